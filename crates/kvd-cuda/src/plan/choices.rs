//! What a plan chooses, for the launches of a layer as it is stored.

use super::fit::Fit;
use super::{Limits, ROWS_MAX, splits};
use crate::Options;
use crate::lanes::SharedMemory;
use crate::side::rows_of;
use kvd_codec::ModelCodec;
use kvd_compute::AttendPlan;
use kvd_core::{LayerIndex, Side};

/// What a layer's attention is launched with on a GPU, by the query rows of its units: what
/// [`crate::plan`] says of the layer's codec. Where heads are stored differently, what is right for
/// all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Shared memory for the codebooks of each side, bytes: [`crate::Shapes::new`].
    pub table_bytes: [usize; 2],
    /// Thread blocks that the GPU holds at once.
    pub resident: u32,
    shared: SharedMemory,
}

impl Choices {
    /// Query rows of the largest unit of a plan, rounded to what kernels take: 1, 4 or 8.
    #[must_use]
    pub fn rows(plan: &AttendPlan, kv_heads: u32) -> u32 {
        let most = plan.queries.iter().map(|query| query.n_q).max().unwrap_or(1);
        rows_of(most.saturating_mul(plan.q_heads / kv_heads).min(ROWS_MAX))
    }

    /// Those for units of at most `rows` query rows of a layer; `None` when a head has no thread
    /// block that fits.
    #[must_use]
    pub fn of_layer(
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: u32,
        limits: &Limits,
    ) -> Option<Self> {
        let (spec, geometry) = (codec.spec(), codec.geometry());
        let mut pairs = Vec::new();
        for head in 0..geometry.kv_heads as usize {
            let pair = Side::BOTH.map(|side| spec.side_at(side, layer, head));
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
        let of_pair = |pair| {
            let fit = Fit::new(pair, geometry, rows, limits)?;
            Some(Self {
                table_bytes: fit.table_bytes.map(|bytes| bytes as usize),
                resident: limits.multiprocessors * fit.occupancy.blocks,
                shared: limits.shared(),
            })
        };
        let choices = pairs.into_iter().map(of_pair).collect::<Option<Vec<_>>>()?;
        choices.into_iter().reduce(|a, b| Self {
            // A side without codebooks asks for nothing, and takes nothing of what others ask.
            table_bytes: [0, 1].map(|side| least_asked(a.table_bytes[side], b.table_bytes[side])),
            resident: a.resident.min(b.resident),
            shared: a.shared,
        })
    }

    /// How a plan's stored tokens are cut, so that its heads fill the GPU.
    #[must_use]
    pub fn options(&self, plan: &AttendPlan, kv_heads: u32) -> Options {
        let group = plan.q_heads / kv_heads;
        let runs = |n_q: u32| kv_heads * n_q.saturating_mul(group).div_ceil(ROWS_MAX);
        let heads = plan.queries.iter().map(|query| runs(query.n_q)).sum();
        let parts = plan.queries.iter().map(|query| query.parts.len()).max().unwrap_or(0) as u32;
        let parts_per_unit = splits(self.resident, heads, parts).1 as usize;
        Options { parts_per_unit, shared: self.shared }
    }
}

fn least_asked(a: usize, b: usize) -> usize {
    if a == 0 || b == 0 { a.max(b) } else { a.min(b) }
}
