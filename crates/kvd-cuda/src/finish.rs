//! From merged partial results to a reply: the value side's transform is undone once per row.

use crate::abi::MERGE_THREADS;
use kvd_codec::ModelCodec;
use kvd_compute::{AttendPlan, Attended};
use kvd_core::Side;

/// Warps of a block of `kvd_merge`.
const MERGE_WARPS: usize = MERGE_THREADS as usize / 32;

/// Shared memory of `kvd_merge` for rows of so many channels, bytes: a factor and a number for each
/// thread; of each warp the largest score, the weights and the sums of both spaces.
#[must_use]
pub fn merge_shared_bytes(dim: usize) -> usize {
    4 * (2 * MERGE_THREADS as usize + MERGE_WARPS * (1 + 2 + 2 * dim))
}

/// The output of `kvd_merge`.
#[derive(Clone, Debug)]
pub struct MergedResults {
    /// `[rows, 2, value channels]`: weighted sums of raw rows, of coefficients.
    pub sums: Vec<f32>,
    /// `[rows, 3]`: log-sum-exp, sum of weights, the part of coefficients.
    pub results: Vec<f32>,
}

impl MergedResults {
    /// The plan's answer. Rows are `[tokens, query heads]`, as in the plan.
    ///
    /// # Panics
    /// When the lengths are not the plan's.
    #[must_use]
    pub fn to_attended(&self, plan: &AttendPlan, codec: &ModelCodec) -> Attended {
        let geometry = codec.geometry();
        let dim = geometry.head_dim(Side::Value);
        let group = (plan.q_heads / geometry.kv_heads) as usize;
        let rows = self.results.len() / 3;
        assert_eq!(self.sums.len(), rows * 2 * dim, "finish: sums");
        let row_bytes = dim * plan.dtype.size_bytes();
        let mut out = vec![0u8; rows * row_bytes];
        let mut lse = Vec::with_capacity(rows);
        let results = self.results.as_chunks::<3>().0.iter();
        for (row, (result, sums)) in results.zip(self.sums.chunks_exact(2 * dim)).enumerate() {
            let [row_lse, weights, coefficient_weights] = *result;
            lse.push(row_lse);
            if weights == 0.0 {
                continue;
            }
            let head = row % plan.q_heads as usize / group;
            let mut values = sums[..dim].to_vec();
            if coefficient_weights > 0.0 {
                let side = codec.head_codec(plan.layer, Side::Value, head);
                side.unfold_value(&sums[dim..], coefficient_weights, &mut values);
            }
            // An answer lies among the rows, which are finite: sums may overflow, it may not.
            let within = |sum: f32| (sum / weights).clamp(-f32::MAX, f32::MAX);
            values.iter_mut().for_each(|value| *value = within(*value));
            plan.dtype.narrow_values(&values, &mut out[row * row_bytes..][..row_bytes]);
        }
        let token_bytes = geometry.token_bytes();
        let parts = plan.queries.iter().flat_map(|query| query.parts.iter());
        let stored_bytes_read = parts.map(|part| part.stored_bytes(token_bytes)).sum();
        Attended { out, lse, stored_bytes_read, saved_passes: 0 }
    }
}
