//! The work of attention: a plan with all that it needs to be read, and the units that it is cut
//! into.

use crate::cpu::kernel_table::KernelTarget;
use crate::cpu::piece_stop::PieceStop;
use crate::cpu::row_reader::LayerReader;
use crate::cpu::scratch::ScratchStores;
use crate::cpu::simd::{KernelConfig, Precision, Simd};
use crate::cpu::value_looks::ValueLooks;
use crate::{AttendPlan, PlanPart, PlanQuery};
use std::ops::{Deref, Range};

/// A piece of work: some query tokens, one KV head, some parts.
pub(super) struct AttendUnit<'a> {
    /// The query tokens, of one query or of several that share the parts.
    pub(super) tokens: TokenList<'a>,
    pub(super) head: usize,
    pub(super) parts: &'a [PlanPart],
}

/// Some tokens of a query.
pub(super) struct UnitTokens<'a> {
    pub(super) query: &'a PlanQuery,
    /// Index of the query's first token in the batch.
    pub(super) batch_row: usize,
    /// Query tokens within the query.
    pub(super) q: Range<u32>,
}

/// Tokens of the queries of a unit, in no memory of their own where they are of one.
pub(super) enum TokenList<'a> {
    One([UnitTokens<'a>; 1]),
    Several(Vec<UnitTokens<'a>>),
}

impl<'a> Deref for TokenList<'a> {
    type Target = [UnitTokens<'a>];

    fn deref(&self) -> &[UnitTokens<'a>] {
        match self {
            Self::One(one) => one,
            Self::Several(several) => several,
        }
    }
}

impl UnitTokens<'_> {
    /// Positions that its first token sees, and its last.
    fn visible_ends(&self) -> [Range<u32>; 2] {
        [self.q.start, self.q.end - 1].map(|token| self.query.visible(token))
    }
}

impl<'a> AttendUnit<'a> {
    /// Query tokens.
    pub(super) fn token_count(&self) -> usize {
        self.tokens.iter().map(|tokens| tokens.q.len()).sum()
    }

    /// The query that has a token, and the token's number in it.
    fn find_token(&self, token: usize) -> (&UnitTokens<'a>, u32) {
        let mut left = token as u32;
        for tokens in &self.tokens[..] {
            let count = tokens.q.len() as u32;
            if left < count {
                return (tokens, tokens.q.start + left);
            }
            left -= count;
        }
        unreachable!("token {token} of a unit of {}", self.token_count())
    }

    /// Positions that a query token sees, counted in the unit.
    pub(super) fn visible(&self, token: usize) -> Range<u32> {
        let (tokens, token) = self.find_token(token);
        tokens.query.visible(token)
    }

    /// The union of what its query tokens see; where they are of several queries, all of them see
    /// all parts.
    pub(super) fn seen_by_any(&self) -> Range<u32> {
        let ends = self.tokens.iter().map(UnitTokens::visible_ends);
        let all = ends.map(|[first, last]| first.start..last.end);
        all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// Positions that all of its query tokens see; it may be empty.
    pub(super) fn seen_by_all(&self) -> Range<u32> {
        let ends = self.tokens.iter().map(UnitTokens::visible_ends);
        let all = ends.map(|[first, last]| last.start..first.end);
        all.reduce(|a, b| a.start.max(b.start)..a.end.min(b.end)).unwrap_or(0..0)
    }
}

pub(crate) struct AttendJob<'a> {
    pub(crate) plan: &'a AttendPlan,
    pub(crate) reader: LayerReader<'a>,
    pub(crate) simd: Simd,
    pub(crate) precision: Precision,
    /// The whole payload, widened.
    pub(crate) q: &'a [f32],
    /// See [`AttendTask::dropped_queries`](crate::AttendTask::dropped_queries).
    pub(crate) dropped: &'a [bool],
    pub(crate) threads: usize,
    /// Memory for the threads.
    pub(crate) scratch: &'a ScratchStores,
    /// Sides whose codes are looked at while they are multiplied.
    pub(crate) looks: &'a ValueLooks,
    /// Whether the caller's thread does all of it: to wake others takes longer.
    pub(crate) is_small: bool,
    /// When it ends early, and when it pauses.
    pub(crate) stop: PieceStop<'a>,
}

impl AttendJob<'_> {
    /// How its kernels are to work.
    pub(super) fn config(&self) -> KernelConfig {
        KernelConfig { simd: self.simd, precision: self.precision }
    }

    /// The job as its pieces see it that are given up for work that goes first.
    pub(super) fn giving_way(&self) -> Self {
        Self { stop: self.stop.giving_way(), ..*self }
    }

    /// Whether nobody waits for a query.
    pub(super) fn is_dropped(&self, query: usize) -> bool {
        self.dropped.get(query).copied().unwrap_or(false)
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
    let (tokens, token) = unit.find_token(row / group);
    let token = tokens.batch_row + token as usize;
    token * job.plan.q_heads as usize + unit.head * group + row % group
}
