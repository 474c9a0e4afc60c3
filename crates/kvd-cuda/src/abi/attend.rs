//! Structs and constants of the kernels that attend and merge.

use super::{ReadAddress, WriteAddress};
use bytemuck::{Pod, Zeroable};

/// Threads of a block of `kvd_attend_*`.
pub(crate) const ATTEND_THREADS: u32 = 128;
/// Threads of a block of `kvd_merge`.
pub(crate) const MERGE_THREADS: u32 = 128;
/// Tokens of a tile, the unit in which pages are staged and codes are laid out.
pub(crate) const TILE_TOKENS: usize = 32;
/// Tiles that have room in shared memory, at most.
pub(crate) const BUFFERS_MAX: usize = 4;
/// Bytes within which pieces of a tile of halves change places.
pub(crate) const LINE_BYTES: usize = 128;
/// Scales of a token for which weights are cut.
pub(crate) const WEIGHT_SETS_MAX: usize = 4;
/// Query rows whose digits one product of bytes takes.
pub(crate) const FEW_ROWS: i32 = 4;
/// The high bits from here on of a Huffman table's entry of four codes hold their length.
pub(crate) const ENTRY_LENGTH: u32 = 27;
/// Marks a partial result that is in coefficients.
pub(crate) const COEFFICIENTS: u32 = 0x8000_0000;

/// The kernel of one side: a struct of `kernels/include/kvd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum SideKernel {
    /// Rows in f32.
    F32 = 0,
    /// Rows in f16.
    F16 = 1,
    /// Rows in bf16.
    Bf16 = 2,
    /// FP8 e4m3.
    Fp8 = 3,
    /// Equidistant levels between minimum and maximum.
    Uniform = 4,
    /// Equidistant levels around zero.
    Symmetric = 5,
    /// Either of them, group by group.
    Hybrid = 6,
    /// Vector quantization.
    Vq = 7,
    /// Angle and radius of channel pairs.
    Polar = 8,
    /// The best levels for turned rows.
    Lloyd = 9,
    /// A width for every coefficient.
    BitAlloc = 10,
    /// One step, codes by class of coefficient.
    Grid = 11,
}

/// How one head's keys or values are stored; fields that a kernel does not name are not read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct SideShape {
    /// Offset of codebooks, levels or directions in the layer's tables, bytes.
    pub table: u64,
    /// [`SideKernel`] as a number.
    pub kind: u32,
    /// Channels of a row.
    pub dim: u32,
    /// Bits of a code, 0 for floats; of a bit allocation those of a whole row.
    pub bits: u32,
    /// Tokens that share a scale, at least 1.
    pub scale_tokens: u32,
    /// Channels that share a scale, at least 1.
    pub scale_channels: u32,
    /// Symmetric uniform: the largest magnitude of a code.
    pub top: u32,
    /// VQ: channels of an entry, at least 1.
    pub book_dim: u32,
    /// VQ: codes per sub-vector.
    pub stages: u32,
    /// VQ: codebook sets, 1 or one per sub-vector.
    pub sets: u32,
    /// VQ: entries of each codebook, most used first, in registers or shared memory.
    pub cached: u32,
    /// Polar: bits of the angle.
    pub angle_bits: u32,
    /// Polar: whether neighbouring channels are a pair, not those half a row apart.
    pub interleaved: u32,
    /// Bytes of the table in shared memory.
    pub table_bytes: u32,
    /// Huffman codes: codes of a decoded row, padded; 0 where codes have a fixed width.
    pub stride: u32,
    /// Huffman codes: offset of runs and tables in the layer's tables.
    pub lanes: u64,
    /// Bytes of runs and tables in shared memory: all of them or none.
    pub lane_bytes: u32,
    /// Bytes of a decoded chunk.
    pub chunk_bytes: u32,
    /// Codes looked up as bytes: offset of all entries in the layer's tables.
    pub entries: u64,
    /// Entries in shared memory.
    pub entry_count: u32,
    /// How often each stands there, as a logarithm.
    pub entry_copies: u32,
    /// Bytes of an entry, 0 where codes are not looked up so.
    pub entry_bytes: u32,
    /// Value of a byte of 1.
    pub entry_unit: f32,
    /// Codes made bytes before they are multiplied: shared memory for a tile of them, 0 where they
    /// are not. Their table stands at `entries`.
    pub spread_bytes: u32,
    /// Positions of a row of bytes, or of groups that are not spread.
    pub spread_row: u32,
    /// Values: places in the sums.
    pub spread_places: u32,
    /// Bytes of their table in shared memory.
    pub spread_table: u32,
    /// VQ on CUDA cores: entries of each codebook that lanes hold in registers, of the `cached`.
    pub held: u32,
    /// Pairs of channels of an entry that a lane takes at once, and of values exchanges with its
    /// neighbours; 0 where every lane reads its channel.
    pub entry_pairs: u32,
    /// Values: thread blocks that share the channels, at least 1.
    pub parts: u32,
    /// Which of them this is.
    pub part: u32,
}

/// An entry of the block table: one page of one KV head, or rows as they came.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PageEntry {
    /// Offset of the keys' payload in the arena.
    pub key: u64,
    /// Offset of the values' payload in the arena.
    pub value: u64,
    /// Rows that the payload was laid out for.
    pub tokens: u32,
    /// First row to read.
    pub first_row: u32,
    /// Rows to read.
    pub rows: u32,
    /// Position of the first row's token.
    pub first_token: u32,
    /// Bytes of the keys' payload, 0 for rows as they came.
    pub key_bytes: u32,
    /// Bytes of the values' payload without gains, 0 for rows as they came.
    pub value_bytes: u32,
    /// Bytes of the values' gains, which follow the payload: 4 bits per row, or none.
    pub gain_bytes: u32,
    /// Zero.
    pub unused: u32,
}

/// The work of one thread block: a few query rows over some pages of one KV head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AttendUnit {
    /// Keys.
    pub key: SideShape,
    /// Values.
    pub value: SideShape,
    /// First entry of the block table.
    pub first_page: u32,
    /// Entries.
    pub pages: u32,
    /// First row of the queries.
    pub query: u32,
    /// Query rows.
    pub rows: u32,
    /// Number of the first row among the query's `[tokens, heads]`.
    pub first_row: u32,
    /// Query heads of the KV head.
    pub heads: u32,
    /// Position of query token 0.
    pub position: u32,
    /// Sliding window in tokens, 0 for none.
    pub window: u32,
    /// First row of the partial results.
    pub partial: u32,
    /// Stops of 64 tokens of its longest page (token_pages.cuh).
    pub page_stops: u32,
}

/// The parameter of `kvd_attend_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AttendParameters {
    /// Page memory.
    pub arena: ReadAddress<u8>,
    /// [`crate::LayerShapes::tables`].
    pub tables: ReadAddress<u8>,
    /// [`PageEntry`]s.
    pub pages: ReadAddress<PageEntry>,
    /// [`AttendUnit`]s, one per thread block.
    pub units: ReadAddress<AttendUnit>,
    /// Scaled queries, f32 `[rows, key channels]`.
    pub queries: ReadAddress<f32>,
    /// Terms added to a row's scores, f32.
    pub offsets: ReadAddress<f32>,
    /// Partial sums, f32 `[partials, value channels]`; written.
    pub out: WriteAddress<f32>,
    /// Largest score and sum of weights, f32 `[partials, 2]`; written.
    pub stats: WriteAddress<f32>,
    /// Shared memory of a staged tile of keys, bytes.
    pub key_stage: u32,
    /// Shared memory of a staged tile of values, bytes.
    pub value_stage: u32,
    /// Shared memory of the keys' table, bytes.
    pub key_table: u32,
    /// Shared memory of the values' table, bytes.
    pub value_table: u32,
    /// Soft cap of scores, 0 for none.
    pub soft_cap: f32,
    /// Huffman codes: chunks of a side that are decoded together.
    pub chunks: u32,
    /// Shared memory of a decoded chunk of keys, bytes.
    pub key_chunk: u32,
    /// Shared memory of a decoded chunk of values, bytes.
    pub value_chunk: u32,
    /// Tiles that have room in shared memory, 2 to 4: one is worked on, the others are under way.
    pub buffers: u32,
    /// Zero.
    pub unused: u32,
}

/// The parameter of `kvd_merge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MergeParameters {
    /// As in [`AttendParameters`].
    pub out: ReadAddress<f32>,
    /// As in [`AttendParameters`].
    pub stats: ReadAddress<f32>,
    /// End of each row's list in `partials`, u32.
    pub ends: ReadAddress<u32>,
    /// Partial results by row; the top bit says that one is in coefficients.
    pub partials: ReadAddress<u32>,
    /// f32 `[rows, 2, value channels]`: weighted sums of raw rows, of coefficients; written.
    pub sums: WriteAddress<f32>,
    /// f32 `[rows, 3]`: log-sum-exp, sum of weights, the part of coefficients; written.
    pub results: WriteAddress<f32>,
    /// Value channels.
    pub dim: u32,
    /// Zero.
    pub unused: u32,
}
