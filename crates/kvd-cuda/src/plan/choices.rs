//! Launch choices of a layer as it is stored.

use super::codebook_cache::HeadCodebooks;
use super::fit::BlockFit;
use super::{GpuLimits, ROWS_MAX, split_units, stored_bits};
use crate::TableOptions;
use crate::codebook_table::CodebookRoom;
use crate::huffman_tables::SharedMemory;
use crate::kernel_choice::rows_of;
use crate::late_pairs::LatePairs;
use kvd_codec::{ModelCodec, SideSpec};
use kvd_compute::{AttendPlan, PlanQuery};
use kvd_core::{LayerIndex, Side};

/// Launch choices of a layer's attention on a GPU, by the query rows of its units and the kernels
/// that were compiled late; with all of them, the choices of [`crate::plan_kernel`] for the layer's
/// codec. Where heads are stored differently, they are right for all heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchChoices {
    /// Where codebooks are kept, none of a side without.
    rooms: [Option<CodebookRoom>; 2],
    /// Codebooks of values, where all heads have such, and bytes of a token's pages.
    values: Option<(HeadCodebooks, f64)>,
    /// Thread blocks that the GPU holds at once.
    pub resident: u32,
    shared: SharedMemory,
    /// Chunks of Huffman codes that a thread block decodes together; none without such codes.
    chunks: Option<u32>,
    /// Pairs whose late kernels are there.
    late: LatePairs,
}

impl LaunchChoices {
    /// Query rows of the largest unit of a plan, rounded to what kernels take: 1, 4 or 8.
    #[must_use]
    pub fn largest_unit_rows(plan: &AttendPlan, kv_heads: u32) -> u32 {
        let most = plan.queries.iter().map(|query| query.n_q).max().unwrap_or(1);
        rows_of(most.saturating_mul(plan.q_heads / kv_heads).min(ROWS_MAX))
    }

    /// Those for units of at most `rows` query rows of a layer, where `late` were compiled: others'
    /// pages are for the kernel that all pairs share, of which other thread blocks fit. `None` when
    /// a head has no thread block that fits.
    #[must_use]
    pub fn for_layer(
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: u32,
        (limits, late): (&GpuLimits, LatePairs),
    ) -> Option<Self> {
        let (spec, geometry) = (codec.spec(), codec.geometry());
        let mut pairs = Vec::new();
        for head in 0..geometry.kv_heads as usize {
            let pair = Side::BOTH.map(|side| spec.side_at(side, layer, head));
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
        let of_pair = |pair: [&SideSpec; 2]| {
            let fit = BlockFit::new(pair, geometry, rows, (limits, late))?;
            let token_bits = Side::BOTH.map(|side| {
                stored_bits(pair[side.index()], geometry, side) * geometry.head_dim(side) as f64
            });
            Some(Self {
                rooms: fit.codebook_rooms(),
                values: fit.books[1].map(|books| (books, (token_bits[0] + token_bits[1]) / 8.0)),
                resident: limits.multiprocessors * fit.occupancy.blocks,
                shared: limits.shared_memory(),
                chunks: (fit.chunks > 0).then_some(fit.chunks),
                late,
            })
        };
        let choices = pairs.into_iter().map(of_pair).collect::<Option<Vec<_>>>()?;
        choices.into_iter().reduce(|a, b| Self {
            // A side without codebooks asks for nothing, and takes nothing of what others ask.
            rooms: [0, 1].map(|side| match (a.rooms[side], b.rooms[side]) {
                (Some(a), Some(b)) => Some(a.common_room(b)),
                (a, b) => a.or(b),
            }),
            values: a.values.filter(|_| a.values == b.values),
            resident: a.resident.min(b.resident),
            shared: a.shared,
            chunks: match (a.chunks, b.chunks) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
            late,
        })
    }

    /// The pairs for whose late kernels they are.
    pub(crate) fn late_pairs(&self) -> LatePairs {
        self.late
    }

    /// How a plan's stored tokens are cut, so that its heads fill the GPU.
    #[must_use]
    pub fn table_options(&self, plan: &AttendPlan, kv_heads: u32) -> TableOptions {
        let group = plan.q_heads / kv_heads;
        let runs = |n_q: u32| kv_heads * n_q.saturating_mul(group).div_ceil(ROWS_MAX);
        let heads = plan.queries.iter().map(|query| runs(query.n_q)).sum();
        let parts = plan.queries.iter().map(|query| query.parts.len()).max().unwrap_or(0) as u32;
        let runs = split_units(self.resident, heads, parts).0;
        let channel_split = self.channel_split(plan, self.resident / heads.max(1), runs);
        let parts_per_unit = split_units(self.resident, heads * channel_split, parts).1 as usize;
        let (shared, chunks, late) = (self.shared, self.chunks, self.late);
        TableOptions { parts_per_unit, shared, chunks, channel_split, late }
    }

    /// Where codebooks of keys and values are kept: [`crate::LayerShapes::new`].
    #[must_use]
    pub fn codebook_rooms(&self) -> [CodebookRoom; 2] {
        self.rooms.map(|room| room.unwrap_or(CodebookRoom::NONE))
    }

    /// Units among which the channels of values are split, where the tokens of a head are cut into
    /// `runs` and the GPU holds `blocks` thread blocks for them.
    fn channel_split(&self, plan: &AttendPlan, blocks: u32, runs: u32) -> u32 {
        let Some((books, token_bytes)) = self.values else { return 1 };
        let tokens = |query: &PlanQuery| query.parts.iter().map(|part| f64::from(part.rows)).sum();
        let most = plan.queries.iter().map(tokens).fold(0.0, f64::max);
        books.channel_split(blocks, runs, most * token_bytes)
    }
}
