//! Where the payloads of a region's calls are.

use crate::region::RegionSlice;
use kvd_core::DType;
use kvd_proto::domain::{AnswerForm, AttendBatch};
use kvd_shm::CompletionRecord;

/// Payloads begin on cache lines.
pub(crate) const ALIGN: u64 = 64;

/// Bytes for each query of what [`RegionClient::query_errors`](crate::RegionClient::query_errors)
/// reads.
pub const QUERY_ERROR_BYTES: u64 = 128;

/// Where the parts of one attend are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttendLayout {
    /// The completion record, [`CompletionRecord::BYTES`] bytes.
    pub done: u64,
    /// `[sum of n_q, q_heads, head_dim_k]`, written by the caller.
    pub q: RegionSlice,
    /// `[sum of n_q, q_heads, head_dim_v]`, written by the daemon.
    pub out: RegionSlice,
    /// `[sum of n_q, q_heads]`, f32, written by the daemon.
    pub lse: RegionSlice,
}

impl AttendLayout {
    /// Places one after another from `start` on, for heads of so many channels of keys and values.
    #[must_use]
    pub fn pack_from(start: u64, batch: &AttendBatch, head_dims: [u32; 2]) -> Self {
        Self::pack_formed(start, batch, AnswerForm::default(), head_dims)
    }

    /// [`AttendLayout::pack_from`], for an answer in a form of the caller's.
    #[must_use]
    pub fn pack_formed(
        start: u64,
        batch: &AttendBatch,
        form: AnswerForm,
        head_dims: [u32; 2],
    ) -> Self {
        let heads = u64::from(batch.query_rows()) * u64::from(batch.q_heads);
        let done = start.next_multiple_of(ALIGN);
        let mut end = done + CompletionRecord::BYTES;
        let mut take = |values: u64, dtype: DType| {
            let (offset, bytes) = (end.next_multiple_of(ALIGN), values * dtype.size_bytes() as u64);
            end = offset + bytes;
            RegionSlice { offset, bytes }
        };
        let [dim_k, dim_v] = head_dims.map(u64::from);
        let q = take(heads * dim_k, batch.dtype);
        let out = take(heads * dim_v, form.out_dtype_for(batch.dtype));
        let lse = take(heads, DType::F32);
        Self { done, q, out, lse }
    }

    /// One past the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.lse.offset + self.lse.bytes
    }
}
