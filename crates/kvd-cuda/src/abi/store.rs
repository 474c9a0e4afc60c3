//! Structs and constants of the kernels that write pages.

use super::{ReadAddress, SideShape, WriteAddress};
use bytemuck::{Pod, Zeroable};

/// Threads of a block of `kvd_store_*`.
pub(crate) const STORE_THREADS: u32 = 128;
/// Codes that a sub-vector's own words hold until all are found.
pub(crate) const VQ_STAGES_MAX: usize = 3;
/// [`StoreUnit::words`] of a page whose coefficients are in shared memory.
pub(crate) const IN_SHARED: u64 = 0xFFFF_FFFF_FFFF_FFFF;

/// A page to write.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct StoreUnit {
    /// How it is stored.
    pub side: SideShape,
    /// Offset of the raw rows in the arena.
    pub rows: u64,
    /// Offset of the page in [`StoreParameters::pages`], aligned to 16.
    pub page: u64,
    /// Offset of the transform's steps in [`StoreParameters::steps`].
    pub steps: u64,
    /// Offset of what the quantizer reads beside its table, in the same place: what its store
    /// header says.
    pub norms: u64,
    /// Offset of runs and tables of Huffman codes, in the same place.
    pub codes: u64,
    /// Offset of its coefficients in [`StoreParameters::words`], in words; all ones when they are
    /// in shared memory.
    pub words: u64,
    /// Rows.
    pub tokens: u32,
    /// Format of the rows: 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// 0 keys, 1 values.
    pub is_value: u32,
    /// The first 20 bytes of the page's header, without a flag for gains.
    pub header: [u32; 5],
    /// Uniform: a level's part of what a group spans. Floats and VQ: the largest magnitude that has
    /// a code. Bit allocation: what a level may lack.
    pub limit: f32,
    /// Median length of rows; 0 where no row is raised.
    pub median: f32,
    /// Huffman codes: bytes that scales and codes may take. Codes that are counted: how many there
    /// are; their counters are from number `codes` on.
    pub room: u32,
    /// Codes that are counted: counters of each in shared memory, a power of two.
    pub copies: u32,
}

/// The parameter of `kvd_store_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StoreParameters {
    /// Page memory.
    pub arena: ReadAddress<u8>,
    /// [`crate::LayerShapes::tables`].
    pub tables: ReadAddress<u8>,
    /// [`crate::StoreShapes::steps`].
    pub steps: ReadAddress<u8>,
    /// [`StoreUnit`]s, one per thread block.
    pub units: ReadAddress<StoreUnit>,
    /// Pages; written.
    pub pages: WriteAddress<u8>,
    /// Header of each unit's page, 32 bytes, zeros where it has no codes; written. Where codes are
    /// counted, the counters: [`crate::CodeHistogram`].
    pub headers: WriteAddress<u8>,
    /// Coefficients of pages that shared memory has no room for.
    pub words: WriteAddress<u32>,
    /// Shared memory of rows that a transform reads, bytes.
    pub row_bytes: u32,
    /// Shared memory of a page's gains, bytes.
    pub gain_bytes: u32,
}
