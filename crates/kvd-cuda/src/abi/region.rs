//! Structs and constants of the kernels that read and write a worker's memory.

use super::{ReadAddress, WriteAddress};
use bytemuck::{Pod, Zeroable};

/// Threads of a block of these kernels.
pub(crate) const REGION_THREADS: u32 = 128;
/// Rows of a [`TransformUnit`] at most.
pub(crate) const TRANSFORM_ROWS: usize = 8;
/// Index of the first value that is not finite, where all are.
pub(crate) const ALL_FINITE: u32 = 0xFFFF_FFFF;

/// Rows of one query and KV head, counted over query tokens and the query heads that share it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TransformUnit {
    /// Offset of the keys' steps, bytes.
    pub fold: u64,
    /// Offset of the values' steps, bytes.
    pub unfold: u64,
    /// Index in the batch of the query's first token.
    pub token: u32,
    /// First query head.
    pub head: u32,
    /// First row.
    pub first: u32,
    /// Rows.
    pub count: u32,
    /// Where they go in the table of queries as they came.
    pub raw: u32,
    /// Where they go in the table of folded queries.
    pub folded: u32,
}

/// The parameter of `kvd_queries`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct QueryParameters {
    /// The worker's queries, `[tokens, query heads, dim]`.
    pub queries: ReadAddress<u8>,
    /// [`TransformUnit`]s, one per thread block.
    pub units: ReadAddress<TransformUnit>,
    /// [`crate::QueryTransforms::steps`].
    pub steps: ReadAddress<u8>,
    /// [`crate::AttendParameters::queries`]; written.
    pub rows: WriteAddress<f32>,
    /// [`crate::AttendParameters::offsets`]; written.
    pub offsets: WriteAddress<f32>,
    /// Written by the kernel: for each unit the index of the first value that is not finite, all
    /// ones where all are finite.
    pub first_bad: WriteAddress<u32>,
    /// Factor on every score.
    pub scale: f32,
    /// Key channels.
    pub dim: u32,
    /// 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// Query heads.
    pub heads: u32,
    /// Query heads of a KV head.
    pub group: u32,
    /// Zero.
    pub unused: u32,
}

/// The parameter of `kvd_answer`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AnswerParameters {
    /// As in [`crate::MergeParameters`].
    pub sums: ReadAddress<f32>,
    /// As in [`crate::MergeParameters`].
    pub results: ReadAddress<f32>,
    /// [`TransformUnit`]s, one per thread block.
    pub units: ReadAddress<TransformUnit>,
    /// [`crate::QueryTransforms::steps`].
    pub steps: ReadAddress<u8>,
    /// The worker's outputs, `[tokens, query heads, dim]`; written.
    pub out: WriteAddress<u8>,
    /// The worker's log-sum-exps, f32 `[tokens, query heads]`; written.
    pub lse: WriteAddress<f32>,
    /// Value channels.
    pub dim: u32,
    /// 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// Query heads.
    pub heads: u32,
    /// Query heads of a KV head.
    pub group: u32,
}

/// One side of a [`StageParameters`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StageSide {
    /// The worker's values.
    pub from: ReadAddress<u8>,
    /// Where they are copied to; words of eight bytes.
    pub to: WriteAddress<u64>,
    /// A whole number of values.
    pub bytes: u64,
    /// Thread blocks.
    pub blocks: u32,
    /// Alignment of `from`: 8, 4 or 2.
    pub align: u32,
}

/// A thread block's check of its words.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StageCheck {
    /// Sum of the mixed words.
    pub sum: u64,
    /// Index in the side of the first value that is not finite, all ones where all are.
    pub first_bad: u32,
    /// Zero.
    pub unused: u32,
}

/// The parameter of `kvd_stage`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StageParameters {
    /// K, then V.
    pub sides: [StageSide; 2],
    /// [`StageCheck`]s, one per thread block, K's first; written.
    pub checks: WriteAddress<StageCheck>,
    /// Words of a thread block.
    pub words: u64,
    /// 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// Zero.
    pub unused: u32,
}

/// Rows of one head and side that go to one slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RowsUnit {
    /// The first row.
    pub from: ReadAddress<u8>,
    /// Where the rows go, one behind the other.
    pub to: WriteAddress<u8>,
    /// Rows.
    pub rows: u32,
    /// Bytes of one.
    pub row_bytes: u32,
    /// Bytes from one row of the head to the next.
    pub stride: u32,
    /// Zero.
    pub unused: u32,
}

/// The parameter of `kvd_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RowsParameters {
    /// [`RowsUnit`]s, one per thread block.
    pub units: ReadAddress<RowsUnit>,
    /// Common divisor of all addresses, rows and strides: 16 or 4.
    pub align: u32,
    /// Zero.
    pub unused: u32,
}
