//! Lookup tables of the kernels: codebooks, levels, directions, as bytes in the layout of the
//! side's header in `kernels/include/kvd`.

use crate::abi::SideShape;
use crate::kernel_choice::{COPY_BYTES, RUNS_MAX};
use kvd_codec::{ModelCodec, VectorQuantizer};
use kvd_core::{DType, LayerIndex, Side};

/// Entries of a codebook that the lanes of a warp hold in registers at most, one each.
pub(crate) const HELD_MAX: u32 = 32;
/// Codebooks, and pairs of channels of an entry, for which a lane has registers:
/// `codebook_cache.cuh`.
const HELD_BOOKS: u32 = 2;
const HELD_PAIRS: u32 = 4;

/// Registers and shared memory of a thread block for the codebooks of one side:
/// [`crate::KernelPlan::codebook_rooms`]. It never changes an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodebookRoom {
    /// Shared memory, bytes.
    pub bytes: usize,
    /// First entries of each codebook that lanes hold in registers, where a kernel can.
    pub registers: u32,
    /// Whether lanes decode whole entries of values and exchange them by shuffles, where a kernel
    /// can; else each reads its channels from shared memory.
    pub exchange: bool,
}

impl CodebookRoom {
    /// The value for a side without codebooks.
    pub(crate) const NONE: Self = Self { bytes: 0, registers: 0, exchange: false };

    /// The smaller of both in every field.
    pub(crate) fn common_room(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.min(other.bytes),
            registers: self.registers.min(other.registers),
            exchange: self.exchange && other.exchange,
        }
    }
}

/// So much shared memory, and registers for whatever kernels can hold in them.
impl From<usize> for CodebookRoom {
    fn from(bytes: usize) -> Self {
        Self { bytes, registers: HELD_MAX, exchange: true }
    }
}

/// Pairs of channels of an entry that lanes can take at once and exchange; 0 where they cannot.
pub(crate) fn entry_pairs(dim: u32) -> u32 {
    let pairs = dim / 2;
    let fits = dim.is_multiple_of(2) && pairs.is_power_of_two() && pairs <= HELD_PAIRS;
    if fits { pairs } else { 0 }
}

/// Registers of a lane that hold an entry of each codebook; 0 where there are too many codebooks,
/// or lanes do not take whole entries.
pub(crate) fn held_registers(pairs: u32, stages: u32, sets: u32) -> u32 {
    if sets == 1 && stages <= HELD_BOOKS { pairs * stages } else { 0 }
}

/// Shares a side's channels among thread blocks, as many as divide its codebook sets, at most
/// `parts`; each has in shared memory what fits `bytes` of its own codebooks.
pub(crate) fn split_channels(shape: &mut SideShape, parts: u32, bytes: usize) {
    let parts = (1..=parts.min(shape.sets)).rev().find(|parts| shape.sets.is_multiple_of(*parts));
    shape.parts = parts.unwrap_or(1);
    cache_entries(shape, bytes);
}

/// As many entries behind those in registers as fit `bytes` are to stand in shared memory.
fn cache_entries(shape: &mut SideShape, bytes: usize) {
    let of_part = shape.sets / shape.parts;
    let entry_bytes = 2 * (shape.book_dim * shape.stages * of_part) as usize;
    let count = (bytes / entry_bytes).min((1 << shape.bits) - shape.held as usize);
    shape.cached = shape.held + count as u32;
    shape.table_bytes = (count * entry_bytes) as u32;
}

/// One side's table, appended to those of its layer. Its place and size are kept in the shape.
pub(crate) struct TableWriter<'a> {
    tables: &'a mut Vec<u8>,
    shape: &'a mut SideShape,
}

impl<'a> TableWriter<'a> {
    pub(crate) fn new(tables: &'a mut Vec<u8>, shape: &'a mut SideShape) -> Self {
        tables.resize(tables.len().next_multiple_of(COPY_BYTES), 0);
        shape.table = tables.len() as u64;
        Self { tables, shape }
    }

    /// f32 values, all of them for shared memory.
    pub(crate) fn append_floats(self, values: &[f32]) -> Self {
        self.tables.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.finish_table()
    }

    /// The head of a bit allocation: the number of runs and of levels, then the runs.
    pub(crate) fn append_runs(self, runs: &[[usize; 3]], levels: usize) -> Self {
        let head = [runs.len() as u32, levels as u32, 0, 0];
        let missing = std::iter::repeat_n([0; 4], RUNS_MAX - runs.len());
        let runs = runs.iter().map(|[first, len, width]| [*first, *len, *width, 0]);
        let runs = runs.map(|run| run.map(|x| x as u32)).chain(missing);
        let words = head.into_iter().chain(runs.flatten());
        self.tables.extend(words.flat_map(u32::to_le_bytes));
        self.finish_table()
    }

    /// Codebooks, f16, `[sets, stages, entries, channels]`; `room` says where entries are kept.
    pub(crate) fn append_codebooks(self, vq: &VectorQuantizer, side: Side, room: CodebookRoom) {
        for set in 0..self.shape.sets as usize {
            for stage in 0..vq.stages() {
                let entries = vq.stage_codebook(stage, set).entries();
                let start = self.tables.len();
                self.tables.resize(start + 2 * entries.len(), 0);
                DType::F16.narrow_values(entries, &mut self.tables[start..]);
            }
        }
        let shape = self.shape;
        // For keys a lane has all channels of a token anyway.
        let whole = side == Side::Key || room.exchange;
        shape.entry_pairs = if whole { entry_pairs(shape.book_dim) } else { 0 };
        let holds = held_registers(shape.entry_pairs, shape.stages, shape.sets) > 0;
        shape.held = if holds { room.registers.min(HELD_MAX).min(1 << shape.bits) } else { 0 };
        cache_entries(shape, room.bytes);
    }

    fn finish_table(self) -> Self {
        self.shape.table_bytes = (self.tables.len() as u64 - self.shape.table) as u32;
        self
    }
}

/// Huffman tables of a head's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableVersions {
    count: usize,
    current: usize,
}

/// Those of a layer, by head.
pub(crate) fn table_versions(codec: &ModelCodec, layer: LayerIndex) -> Vec<[TableVersions; 2]> {
    let of_head = |head| {
        Side::BOTH.map(|side| TableVersions {
            count: codec.trained_tables(layer, side, head).len(),
            current: codec.current_table(layer, side, head),
        })
    };
    (0..codec.geometry().kv_heads as usize).map(of_head).collect()
}
