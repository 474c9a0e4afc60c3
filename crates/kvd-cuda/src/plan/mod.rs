//! Launch choices for a GPU: a pure function of codec, question and the GPU's limits, with its
//! reasons. No times are predicted: how fast a launch is, a GPU says.
//!
//! The choices are VQ-LLM's (2503.02236 §V and §VI): entries of codebooks cached from the slack of
//! occupancy, a split that balances reduction and codebook traffic, and exchange through registers
//! or shared memory.

mod choices;
mod codebook_cache;
mod fit;
mod limits;
mod occupancy;
mod report;

pub use choices::LaunchChoices;
pub use limits::GpuLimits;
pub(crate) use occupancy::SHARED_RESERVED;
pub use occupancy::{BlockResources, Occupancy};

use crate::codebook_table::CodebookRoom;
use crate::late_pairs::LatePairs;
use crate::store::encoded_on_host;
use fit::BlockFit;
use kvd_codec::{CodecSpec, SideSpec};
use kvd_core::{Geometry, Side};

/// Query rows that a thread block takes at most.
const ROWS_MAX: u32 = 8;
/// The workload of the kernels: one layer, one decode step.
#[derive(Clone, Debug)]
pub struct StepWorkload {
    /// Shapes of the model.
    pub geometry: Geometry,
    /// Query heads that share a KV head.
    pub group: u32,
    /// Sequences.
    pub batch: u32,
    /// Stored tokens of each.
    pub tokens: u32,
}

/// How one side's codebooks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodebookPlan {
    /// Bytes of all codebooks of a head.
    pub bytes: u32,
    /// Bytes of one entry in every codebook of the head.
    pub entry_bytes: u32,
    /// Entries of a codebook.
    pub entries: u32,
    /// Entries that stand in shared memory, behind those in registers: VQ-LLM's `n_shared`.
    pub shared: u32,
    /// How often each of them does.
    pub copies: u32,
    /// Whether entries are bytes, looked up for tensor cores, and not f16.
    pub as_bytes: bool,
    /// Whether bytes are looked up in registers.
    pub in_registers: bool,
    /// First entries that the lanes of a warp hold in registers, VQ-LLM's `n_reg`.
    pub registers: u32,
    /// How entries come to the lanes that multiply them.
    pub exchange: EntryExchange,
    /// Values: units among which their channels are split, [`crate::TableOptions::channel_split`].
    pub channel_split: u32,
}

/// How a decoded entry comes to the lanes that multiply it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryExchange {
    /// It is where it is needed.
    None,
    /// By so many shuffles between the lanes of a sub-vector.
    Shuffles(u32),
    /// Each lane reads its channel from memory.
    SharedMemory,
}

/// The choices for one codec on one GPU.
#[derive(Clone, Debug)]
pub struct KernelPlan {
    /// The GPU.
    pub limits: GpuLimits,
    /// The question.
    pub workload: StepWorkload,
    /// Resources of a thread block, codebooks apart.
    pub block: BlockResources,
    /// Tiles in the shared memory of a thread block: it works on one, the others are under way.
    pub buffers: u32,
    /// Bytes on their way to a thread block at once.
    pub block_under_way: u32,
    /// Chunks of each side that a thread block decodes together; 0 without Huffman codes.
    pub chunks: u32,
    /// How it fits, without codebooks.
    pub occupancy: Occupancy,
    /// Codebooks of keys and values.
    pub codebooks: [Option<CodebookPlan>; 2],
    /// Shared memory for the codebooks of each side, bytes: [`crate::LayerShapes::new`].
    pub table_bytes: [u32; 2],
    /// Why products with keys and values are not on tensor cores; none where they are.
    pub products: [Option<&'static str>; 2],
    /// Whether the kernel multiplies on tensor cores and is none that is compiled ahead of time:
    /// NVRTC compiles it when a model is registered, and until then the one for all pairs serves.
    pub is_late: bool,
    /// Whether each warp has tokens of its own, which it copies itself.
    pub owns_tokens: bool,
    /// Units over the stored tokens of one head.
    pub splits: u32,
    /// [`crate::TableOptions::parts_per_unit`].
    pub parts_per_unit: u32,
    /// Bytes of pages that one step reads.
    pub page_bytes: f64,
    /// Partial results of each query row that the merge reads: one of every unit.
    pub merged: u32,
    /// Bytes of the partial results of all rows.
    pub merge_bytes: f64,
    /// Why the host encodes keys and values; none where store kernels do. They encode only layers
    /// of which they can write both.
    pub host_encoding: [Option<&'static str>; 2],
    /// Whether the host builds Huffman tables from the blocks that come first.
    pub host_tables: bool,
}

/// Stored bits per value of a side; for an entropy-coded side its target, or the measured bits of
/// its preset.
fn stored_bits(side: &SideSpec, geometry: &Geometry, which: Side) -> f64 {
    let implied = side.implied_bits(geometry, which);
    let rate = side
        .quantizer
        .target_bits()
        .map_or_else(|| side.quantizer.code_count().map_or(0.0, code_bits), f64::from);
    implied.total_bits().unwrap_or(rate + implied.scales + implied.offsets + implied.header)
}

/// Bits of a Huffman code of so many levels, as keys and values of `kvcomp` and keys of
/// `kvcomp-channel` have them on text (docs/quality.md, bits per value less scales, offsets and
/// headers); of other numbers of levels as large a part of a fixed width.
fn code_bits(levels: u32) -> f64 {
    match levels {
        21 => 3.48,
        8 => 2.55,
        5 => 2.11,
        _ => 0.85 * f64::from(levels).log2(),
    }
}

/// The plan where every kernel that can be compiled late was, or `None` when not even one thread
/// block fits a multiprocessor.
#[must_use]
pub fn plan_kernel(
    codec: &CodecSpec,
    workload: &StepWorkload,
    limits: &GpuLimits,
) -> Option<KernelPlan> {
    let geometry = &workload.geometry;
    let [dim_k, dim_v] = Side::BOTH.map(|side| geometry.head_dim(side) as u32);
    let bits = Side::BOTH.map(|side| stored_bits(codec.side(side), geometry, side));
    let rows = workload.group.min(ROWS_MAX);
    let sides = Side::BOTH.map(|side| codec.side(side));
    let fit = BlockFit::new(sides, geometry, rows, (limits, LatePairs::ALL))?;
    let resident = limits.multiprocessors * fit.occupancy.blocks;
    let parts = workload.tokens.div_ceil(geometry.block_tokens).max(1);
    let heads = workload.batch * geometry.kv_heads * workload.group.div_ceil(ROWS_MAX);
    let values =
        f64::from(workload.batch) * f64::from(workload.tokens) * f64::from(geometry.kv_heads);
    let page_bytes = values * (f64::from(dim_k) * bits[0] + f64::from(dim_v) * bits[1]) / 8.0;
    let mut codebooks = fit.codebooks;
    let of_head = page_bytes / f64::from(workload.batch * geometry.kv_heads);
    let channel_split = match fit.books[1] {
        Some(books) => books.channel_split(
            resident / heads.max(1),
            split_units(resident, heads, parts).0,
            of_head,
        ),
        None => 1,
    };
    if let Some(values) = &mut codebooks[1] {
        values.split_channels(channel_split, fit.table_bytes[1]);
    }
    let (splits, parts_per_unit) = split_units(resident, heads * channel_split, parts);
    // A partial result is a row of sums, its largest score and its weights.
    let partials = f64::from(workload.batch * geometry.kv_heads * workload.group * splits);
    let merge_bytes = 4.0 * partials * f64::from(dim_v + 2);
    Some(KernelPlan {
        limits: limits.clone(),
        workload: workload.clone(),
        block: fit.block,
        buffers: fit.buffers,
        block_under_way: fit.under_way,
        chunks: fit.chunks,
        occupancy: fit.occupancy,
        codebooks,
        table_bytes: fit.table_bytes,
        products: fit.products,
        is_late: fit.is_late,
        owns_tokens: fit.owns_tokens,
        splits,
        parts_per_unit,
        page_bytes,
        merged: splits,
        merge_bytes,
        host_encoding: Side::BOTH.map(|side| host_encoding(codec, side)),
        host_tables: Side::BOTH.into_iter().any(|side| host_tables(codec, side)),
    })
}

/// Why the host encodes a side in some layer or head.
fn host_encoding(codec: &CodecSpec, side: Side) -> Option<&'static str> {
    codec.side_specs(side).into_iter().find_map(encoded_on_host)
}

/// Whether a side has Huffman tables that are built from blocks.
fn host_tables(codec: &CodecSpec, side: Side) -> bool {
    codec.side_specs(side).into_iter().any(SideSpec::has_trained_tables)
}

/// Units over the parts of one head, so that all heads fill the thread blocks that are resident at
/// once, and the parts of each unit.
fn split_units(resident: u32, heads: u32, parts: u32) -> (u32, u32) {
    let parts = parts.max(1);
    let wanted = (resident / heads.max(1)).clamp(1, parts);
    let parts_per_unit = parts.div_ceil(wanted);
    (parts.div_ceil(parts_per_unit), parts_per_unit)
}

impl CodebookPlan {
    /// Bytes of shared memory that entries take, each once.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.shared * (self.entry_bytes / self.channel_split)
    }

    /// Where they are kept, in so many bytes of shared memory.
    fn codebook_room(&self, bytes: u32) -> CodebookRoom {
        CodebookRoom {
            bytes: bytes as usize,
            registers: self.registers,
            exchange: self.exchange != EntryExchange::SharedMemory,
        }
    }

    /// Splits the channels, so that more entries fit the same shared memory.
    fn split_channels(&mut self, channel_split: u32, shared_bytes: u32) {
        self.channel_split = channel_split;
        let fit = shared_bytes / (self.entry_bytes / channel_split);
        self.shared = fit.min(self.entries - self.registers);
    }
}

impl KernelPlan {
    /// Where the codebooks of keys and values are kept: [`crate::LayerShapes::new`].
    #[must_use]
    pub fn codebook_rooms(&self) -> [CodebookRoom; 2] {
        [0, 1].map(|side| {
            let books = self.codebooks[side].as_ref();
            books.map_or(CodebookRoom::NONE, |books| books.codebook_room(self.table_bytes[side]))
        })
    }

    /// Bytes of pages under way on a multiprocessor, and those that hide the latency.
    #[must_use]
    pub fn bytes_under_way(&self) -> [f64; 2] {
        let have = f64::from(self.block_under_way) * f64::from(self.occupancy.blocks);
        [have, self.limits.under_way_bytes()]
    }
}

#[cfg(test)]
mod tests;
