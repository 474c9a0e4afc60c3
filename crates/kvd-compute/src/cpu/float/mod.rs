//! Products of f32: scores of rows, and weighted sums of them. Rows are f32 (what a page decoded
//! to) or lie in a dtype, as in raw slots and float pages; those are widened in registers.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod simd_kernels;

use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{InstructionSet, Simd};
use kvd_core::DType;
use std::ops::Range;

/// Query rows that one pass over rows serves.
pub(crate) const ROWS: usize = 4;

/// Row-major rows of K or V.
#[derive(Clone, Copy)]
pub(crate) enum FloatRows<'a> {
    /// Decoded.
    Wide(&'a [f32]),
    /// Little-endian values of a dtype.
    Stored(DType, &'a [u8]),
}

impl<'a> FloatRows<'a> {
    fn value_count(self) -> usize {
        match self {
            Self::Wide(values) => values.len(),
            Self::Stored(dtype, bytes) => bytes.len() / dtype.size_bytes(),
        }
    }

    /// Rows of `dim` channels.
    pub(super) fn row_count(self, dim: usize) -> usize {
        self.value_count() / dim
    }

    /// The rows of a range.
    pub(crate) fn slice_rows(self, dim: usize, rows: Range<usize>) -> Self {
        match self {
            Self::Wide(values) => Self::Wide(&values[rows.start * dim..rows.end * dim]),
            Self::Stored(dtype, bytes) => {
                let row = dim * dtype.size_bytes();
                Self::Stored(dtype, &bytes[rows.start * row..rows.end * row])
            }
        }
    }

    /// Where a little-endian machine finds the values.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) fn as_bytes(self) -> (DType, *const u8) {
        match self {
            Self::Wide(values) => (DType::F32, values.as_ptr().cast()),
            Self::Stored(dtype, bytes) => (dtype, bytes.as_ptr()),
        }
    }

    /// The values as f32, in `buffer` where they are not already.
    fn as_f32(self, buffer: &mut Vec<f32>) -> &[f32]
    where
        'a: 'a,
    {
        match self {
            Self::Wide(values) => {
                buffer.clear();
                buffer.extend_from_slice(values);
            }
            Self::Stored(dtype, bytes) => {
                buffer.resize(self.value_count(), 0.0);
                dtype.widen_values(bytes, buffer);
            }
        }
        buffer
    }
}

impl Simd {
    /// `scores[r * stride + t] = q[r] · rows[t]` for row-major `q` and `rows` of `dim` channels.
    pub(crate) fn score_rows(
        self,
        dim: usize,
        q: &[f32],
        rows: FloatRows<'_>,
        scores: StridedRows<'_>,
    ) {
        let StridedRows { values: scores, stride } = scores;
        let (queries, tokens) = (q.len() / dim, rows.row_count(dim));
        assert!(q.len() == queries * dim && queries > 0, "scores: queries");
        assert!(rows.value_count() == tokens * dim && tokens > 0, "scores: rows");
        assert!(tokens <= stride && (queries - 1) * stride + tokens <= scores.len(), "scores");
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.vector_set() != InstructionSet::Portable {
            let blocks = q.chunks(ROWS * dim).zip(scores.chunks_mut(ROWS * stride));
            for (q, scores) in blocks {
                simd_kernels::score_rows(
                    self,
                    dim,
                    q,
                    rows,
                    StridedRows { values: scores, stride },
                );
            }
            return;
        }
        let mut buffer = Vec::new();
        let rows = rows.as_f32(&mut buffer);
        for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_mut(stride)) {
            for (score, row) in scores.iter_mut().zip(rows.chunks_exact(dim)) {
                *score = dot_product(q, row);
            }
        }
    }

    /// `sums[r] += Σ weights[r][t] · rows[t]` for at most [`ROWS`] rows of sums.
    pub(crate) fn add_weighted_rows(
        self,
        weights: &[&[f32]],
        rows: FloatRows<'_>,
        sums: &mut [&mut [f32]],
    ) {
        let (dim, tokens) = (sums[0].len(), weights[0].len());
        assert!(sums.len() <= ROWS && weights.len() == sums.len(), "accumulate: rows of sums");
        assert!(sums.iter().all(|sums| sums.len() == dim), "accumulate: channels");
        assert!(weights.iter().all(|weights| weights.len() == tokens), "accumulate: weights");
        assert_eq!(rows.value_count(), dim * tokens, "accumulate: rows");
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.vector_set() != InstructionSet::Portable {
            return simd_kernels::add_weighted_rows(self, weights, rows, sums);
        }
        let mut buffer = Vec::new();
        let rows = rows.as_f32(&mut buffer);
        for (weights, sums) in weights.iter().zip(sums) {
            for (weight, row) in weights.iter().zip(rows.chunks_exact(dim)) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
            }
        }
    }
}

/// A dot product in 32 lanes, which the compiler keeps in registers.
fn dot_product(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 32;
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_level_equals_f64(
            dim in 1usize..150,
            tokens in 1usize..14,
            queries in 1usize..10,
            seed in any::<u32>(),
            dtype in prop_oneof![
                Just(None),
                Just(Some(DType::F32)),
                Just(Some(DType::F16)),
                Just(Some(DType::BF16)),
            ],
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 8) / f64::from(1 << 23) - 1.0
            };
            let q: Vec<f32> = (0..dim * queries).map(|_| next() as f32).collect();
            let mut values: Vec<f32> = (0..dim * tokens).map(|_| next() as f32).collect();
            let weights: Vec<Vec<f32>> =
                (0..queries).map(|_| (0..tokens).map(|_| next() as f32).collect()).collect();
            let mut bytes = Vec::new();
            if let Some(dtype) = dtype {
                bytes.resize(values.len() * dtype.size_bytes(), 0);
                dtype.narrow_values(&values, &mut bytes);
                dtype.widen_values(&bytes, &mut values);
            }
            let rows = dtype.map_or(FloatRows::Wide(&values), |d| FloatRows::Stored(d, &bytes));
            for level in Simd::available_levels() {
                let mut scores = vec![7f32; queries * 16];
                level.score_rows(dim, &q, rows, StridedRows { values: &mut scores, stride: 16 });
                for (r, scores) in scores.chunks(16).enumerate() {
                    for (t, score) in scores[..tokens].iter().enumerate() {
                        let product =
                            |i| f64::from(q[r * dim + i]) * f64::from(values[t * dim + i]);
                        let exact: f64 = (0..dim).map(product).sum();
                        prop_assert!((f64::from(*score) - exact).abs() < 1e-6 * dim as f64);
                    }
                    prop_assert!(scores[tokens..].iter().all(|score| *score == 7.0));
                }
                let mut sums = vec![0.5f32; queries * dim];
                for (weights, sums) in weights.chunks(ROWS).zip(sums.chunks_mut(ROWS * dim)) {
                    let weights: Vec<&[f32]> = weights.iter().map(|w| &w[..]).collect();
                    let mut sums: Vec<&mut [f32]> = sums.chunks_mut(dim).collect();
                    level.add_weighted_rows(&weights, rows, &mut sums);
                }
                for (weights, sums) in weights.iter().zip(sums.chunks(dim)) {
                    for (i, sum) in sums.iter().enumerate() {
                        let product =
                            |t: usize| f64::from(weights[t]) * f64::from(values[t * dim + i]);
                        let exact: f64 = 0.5 + (0..tokens).map(product).sum::<f64>();
                        prop_assert!((f64::from(*sum) - exact).abs() < 1e-6 * tokens as f64);
                    }
                }
            }
        }
    }
}
