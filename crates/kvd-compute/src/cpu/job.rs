//! The work of attention: a plan with all that it needs to be read, and the units that it is cut
//! into.

use crate::cpu::simd::{Precision, Simd};
use crate::cpu::tile::Reader;
use crate::{AttendPlan, PlanPart, PlanQuery, Stop};
use std::ops::Range;

/// A piece of work: some query tokens, one KV head, some parts.
pub(super) struct Unit<'a> {
    pub(super) query: &'a PlanQuery,
    /// Index of the query's first token in the batch.
    pub(super) batch_row: usize,
    /// Query tokens within the query.
    pub(super) q: Range<u32>,
    pub(super) head: usize,
    pub(super) parts: &'a [PlanPart],
}

pub(crate) struct Job<'a> {
    pub(crate) plan: &'a AttendPlan,
    pub(crate) reader: Reader<'a>,
    pub(crate) simd: Simd,
    pub(crate) precision: Precision,
    /// The whole payload, widened.
    pub(crate) q: &'a [f32],
    pub(crate) threads: usize,
    /// When it ends early, and when it pauses.
    pub(crate) stop: &'a Stop,
}

/// Query heads that share one KV head.
pub(super) fn group(job: &Job<'_>) -> usize {
    job.plan.q_heads as usize / job.reader.codec.geometry().kv_heads as usize
}

/// Index of a unit's row (`query token × group`) in the batch's `[tokens, q_heads]`.
pub(super) fn payload_row(job: &Job<'_>, unit: &Unit<'_>, row: usize) -> usize {
    let group = group(job);
    let token = unit.batch_row + unit.q.start as usize + row / group;
    token * job.plan.q_heads as usize + unit.head * group + row % group
}
