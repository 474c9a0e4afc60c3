//! The work of attention: a plan with all that it needs to be read, and the units that it is cut
//! into.

use crate::cpu::kernel_table::KernelTarget;
use crate::cpu::row_reader::LayerReader;
use crate::cpu::simd::{KernelConfig, Precision, Simd};
use crate::{AttendPlan, PlanPart, PlanQuery, Stop};
use std::ops::Range;

/// A piece of work: some query tokens, one KV head, some parts.
pub(super) struct AttendUnit<'a> {
    pub(super) query: &'a PlanQuery,
    /// Index of the query's first token in the batch.
    pub(super) batch_row: usize,
    /// Query tokens within the query.
    pub(super) q: Range<u32>,
    pub(super) head: usize,
    pub(super) parts: &'a [PlanPart],
}

pub(crate) struct AttendJob<'a> {
    pub(crate) plan: &'a AttendPlan,
    pub(crate) reader: LayerReader<'a>,
    pub(crate) simd: Simd,
    pub(crate) precision: Precision,
    /// The whole payload, widened.
    pub(crate) q: &'a [f32],
    pub(crate) threads: usize,
    /// When it ends early, and when it pauses.
    pub(crate) stop: &'a Stop,
}

impl AttendJob<'_> {
    /// How its kernels are to work.
    pub(super) fn config(&self) -> KernelConfig {
        KernelConfig { simd: self.simd, precision: self.precision }
    }
}

/// The precision that is used for units of so many rows.
pub(super) fn effective_precision(config: KernelConfig, rows: usize) -> Precision {
    KernelTarget::new(config, rows).effective_precision()
}

/// The configuration with [`effective_precision`].
pub(super) fn effective_config(config: KernelConfig, rows: usize) -> KernelConfig {
    KernelConfig { precision: effective_precision(config, rows), ..config }
}

/// Query heads that share one KV head.
pub(super) fn group_size(job: &AttendJob<'_>) -> usize {
    job.plan.q_heads as usize / job.reader.codec.geometry().kv_heads as usize
}

/// Index of a unit's row (`query token × group`) in the batch's `[tokens, q_heads]`.
pub(super) fn payload_row(job: &AttendJob<'_>, unit: &AttendUnit<'_>, row: usize) -> usize {
    let group = group_size(job);
    let token = unit.batch_row + unit.q.start as usize + row / group;
    token * job.plan.q_heads as usize + unit.head * group + row % group
}
