//! Structs that host and kernels share, field by field: `kernels/include/kvd/region/`.

use bytemuck::{Pod, Zeroable};

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
    pub queries: u64,
    /// [`TransformUnit`]s, one per thread block.
    pub units: u64,
    /// [`crate::QueryTransforms::steps`].
    pub steps: u64,
    /// [`crate::AttendParameters::queries`]; written.
    pub rows: u64,
    /// [`crate::AttendParameters::offsets`]; written.
    pub offsets: u64,
    /// Written by the kernel: for each unit the index of the first value that is not finite, all
    /// ones where all are finite.
    pub first_bad: u64,
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
    pub sums: u64,
    /// As in [`crate::MergeParameters`].
    pub results: u64,
    /// [`TransformUnit`]s, one per thread block.
    pub units: u64,
    /// [`crate::QueryTransforms::steps`].
    pub steps: u64,
    /// The worker's outputs, `[tokens, query heads, dim]`; written.
    pub out: u64,
    /// The worker's log-sum-exps, f32 `[tokens, query heads]`; written.
    pub lse: u64,
    /// Value channels.
    pub dim: u32,
    /// 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// Query heads.
    pub heads: u32,
    /// Query heads of a KV head.
    pub group: u32,
}
