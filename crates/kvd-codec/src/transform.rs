//! Linear maps between rows and coefficients, applied in place.
//!
//! A key `k` becomes `c = T k`; the query becomes `q' = T⁻ᵀ q`, so `q'·c = q·k` (VecInfer eq. 7).
//! A value `v` becomes `c = T v`; the weighted sum of coefficients is mapped back once by `T⁻¹`.

use crate::device_view::{ForwardStep, QueryTransformStep};
use crate::rotation::RandomRotation;
use crate::row_block::RowBlockMut;
use crate::simd::{MatrixRows, dispatch_simd};
use nalgebra::DMatrix;
use pulp::{Simd, WithSimd};

/// One step of a side's transform, bound to a head.
#[derive(Clone, Debug)]
pub(crate) enum TransformStep {
    /// `c_i = x_i / factor_i`.
    Scale { factors: Vec<f32>, inverse: Vec<f32> },
    /// Orthonormal Hadamard rotation of consecutive blocks: its own inverse and transpose.
    Hadamard { block: usize },
    /// A seeded orthogonal map.
    Rotation(RandomRotation),
    /// `c = x - mean`.
    Offset { mean: Vec<f32> },
    /// Any invertible map.
    Matrix(Box<TransformMatrix>),
}

/// A dense map and what it folds into, each transposed, row-major `[dim, dim]`: products take
/// columns.
#[derive(Clone, Debug)]
pub(crate) struct TransformMatrix {
    forward: Vec<f32>,
    inverse: Vec<f32>,
    /// `T⁻ᵀ`.
    fold: Vec<f32>,
}

impl TransformStep {
    pub(crate) fn scale_channels(factors: Vec<f32>) -> Self {
        let inverse = factors.iter().map(|f| 1.0 / f).collect();
        Self::Scale { factors, inverse }
    }

    /// A rotation for `dim` channels: blocks of the largest power of two that divides it.
    pub(crate) fn hadamard_blocks(dim: usize) -> Self {
        Self::Hadamard { block: 1 << dim.trailing_zeros() }
    }

    /// The map `forward`, row-major; `None` when it cannot be inverted.
    pub(crate) fn from_matrix(dim: usize, forward: Vec<f32>) -> Option<Self> {
        let matrix = DMatrix::from_row_iterator(dim, dim, forward.iter().map(|x| f64::from(*x)));
        let inverted = matrix.clone().try_inverse()?;
        // Column-major storage of a matrix is row-major storage of its transpose.
        let inverse: Vec<f32> = inverted.iter().map(|x| *x as f32).collect();
        let fold: Vec<f32> = inverted.transpose().iter().map(|x| *x as f32).collect();
        let finite = inverse.iter().chain(&forward).all(|x| x.is_finite());
        let forward = matrix.iter().map(|x| *x as f32).collect();
        finite.then(|| Self::Matrix(Box::new(TransformMatrix { forward, inverse, fold })))
    }

    /// Bytes kept from a calibration: an f32 per factor or mean, an f16 per matrix entry.
    pub(crate) fn calibration_bytes(&self) -> u64 {
        match self {
            Self::Scale { factors, .. } => 4 * factors.len() as u64,
            Self::Hadamard { .. } | Self::Rotation(_) => 0,
            Self::Offset { mean } => 4 * mean.len() as u64,
            Self::Matrix(matrix) => 2 * matrix.forward.len() as u64,
        }
    }

    /// The step as loops over channels.
    pub(crate) fn channel_loops(&self) -> Vec<ForwardStep<'_>> {
        match self {
            Self::Scale { inverse, .. } => vec![ForwardStep::Scale(inverse)],
            Self::Hadamard { block } => vec![ForwardStep::hadamard_step(*block)],
            Self::Rotation(rotation) => {
                let of_round = |(order, signs)| {
                    let permute = ForwardStep::Permute { order, signs };
                    [permute, ForwardStep::hadamard_step(rotation.block_size())]
                };
                rotation.rounds().flat_map(of_round).collect()
            }
            Self::Offset { mean } => vec![ForwardStep::Offset(mean)],
            Self::Matrix(matrix) => vec![ForwardStep::Matrix(&matrix.forward)],
        }
    }

    /// [`TransformStep::fold_query`] as loops over channels.
    pub(crate) fn fold_loops(&self) -> Vec<QueryTransformStep<'_>> {
        match self {
            Self::Scale { factors, .. } => vec![QueryTransformStep::Scale(factors)],
            Self::Hadamard { block } => vec![QueryTransformStep::hadamard_step(*block)],
            Self::Rotation(rotation) => {
                let of_round = |(order, signs): (&[u16], &[f32])| {
                    let (order, signs) = (order.to_vec(), signs.to_vec());
                    [
                        QueryTransformStep::Permute { order, signs },
                        QueryTransformStep::hadamard_step(rotation.block_size()),
                    ]
                };
                rotation.rounds().flat_map(of_round).collect()
            }
            Self::Offset { mean } => vec![QueryTransformStep::Mean(mean)],
            Self::Matrix(matrix) => vec![QueryTransformStep::Matrix(&matrix.fold)],
        }
    }

    /// [`TransformStep::invert_sum`] as loops over channels.
    pub(crate) fn unfold_loops(&self) -> Vec<QueryTransformStep<'_>> {
        match self {
            Self::Scale { .. } | Self::Hadamard { .. } | Self::Offset { .. } => self.fold_loops(),
            Self::Rotation(rotation) => {
                let of_round = |(order, signs): (&[u16], &[f32])| {
                    let mut back = (vec![0; order.len()], vec![0.0; order.len()]);
                    for (place, (from, sign)) in (0..).zip(order.iter().zip(signs)) {
                        back.0[usize::from(*from)] = place;
                        back.1[usize::from(*from)] = *sign;
                    }
                    let (order, signs) = back;
                    [
                        QueryTransformStep::hadamard_step(rotation.block_size()),
                        QueryTransformStep::Permute { order, signs },
                    ]
                };
                rotation.rounds().rev().flat_map(of_round).collect()
            }
            Self::Matrix(matrix) => vec![QueryTransformStep::Matrix(&matrix.inverse)],
        }
    }

    /// `T x` of every row `x` (`[n, dim]`).
    pub(crate) fn transform_rows(&self, rows: &mut [f32], dim: usize) {
        dispatch_simd(ForwardRows { step: self, rows, dim });
    }

    /// `T⁻¹ c` of a sum of rows whose weights sum to `weight_sum`: offsets come back as often.
    pub(crate) fn invert_sum(&self, c: &mut [f32], weight_sum: f32) {
        match self {
            Self::Scale { factors, .. } => multiply_channels(c, factors),
            Self::Hadamard { block } => hadamard_transform(c, *block),
            Self::Rotation(rotation) => rotation.rotate_back(c),
            Self::Offset { mean } => {
                c.iter_mut().zip(mean).for_each(|(c, m)| *c += weight_sum * m);
            }
            Self::Matrix(matrix) => {
                let dim = c.len();
                multiply_rows(&matrix.inverse, RowBlockMut { rows: c, dim });
            }
        }
    }

    /// [`TransformStep::invert_sum`] of rows (`[n, dim]`), each with its own sum of weights.
    pub(crate) fn invert_rows(&self, block: RowBlockMut<'_>, weight_sums: &[f32]) {
        let RowBlockMut { rows, dim } = block;
        if let Self::Matrix(matrix) = self {
            return multiply_rows(&matrix.inverse, RowBlockMut { rows, dim });
        }
        for (row, weight_sum) in rows.chunks_exact_mut(dim).zip(weight_sums) {
            self.invert_sum(row, *weight_sum);
        }
    }

    /// [`TransformStep::fold_query`] of rows (`[n, dim]`); adds to `offsets`.
    pub(crate) fn fold_query_rows(&self, block: RowBlockMut<'_>, offsets: &mut [f32]) {
        let RowBlockMut { rows, dim } = block;
        if let Self::Matrix(matrix) = self {
            return multiply_rows(&matrix.fold, RowBlockMut { rows, dim });
        }
        for (row, offset) in rows.chunks_exact_mut(dim).zip(offsets) {
            *offset += self.fold_query(row);
        }
    }

    /// `T⁻ᵀ q`, and what the step adds to every score.
    pub(crate) fn fold_query(&self, q: &mut [f32]) -> f32 {
        match self {
            // Both equal their transpose.
            Self::Scale { .. } | Self::Hadamard { .. } => self.invert_sum(q, 0.0),
            // The inverse of an orthogonal map is its transpose.
            Self::Rotation(rotation) => rotation.rotate_row(q),
            Self::Offset { mean } => return q.iter().zip(mean).map(|(q, m)| q * m).sum(),
            Self::Matrix(matrix) => {
                let dim = q.len();
                multiply_rows(&matrix.fold, RowBlockMut { rows: q, dim });
            }
        }
        0.0
    }
}

/// A step over rows.
struct ForwardRows<'a> {
    step: &'a TransformStep,
    rows: &'a mut [f32],
    dim: usize,
}

impl WithSimd for ForwardRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { step, rows, dim } = self;
        if let TransformStep::Matrix(matrix) = step {
            return MatrixRows { columns: &matrix.forward, dim, rows }.with_simd(simd);
        }
        for x in rows.chunks_exact_mut(dim) {
            match step {
                TransformStep::Scale { inverse, .. } => multiply_channels(x, inverse),
                TransformStep::Hadamard { block } => hadamard_transform(x, *block),
                TransformStep::Rotation(rotation) => rotation.rotate_row(x),
                TransformStep::Offset { mean } => x.iter_mut().zip(mean).for_each(|(x, m)| *x -= m),
                // Four rows at a time, above.
                TransformStep::Matrix(_) => {}
            }
        }
    }
}

/// `x = M x` of every row (`[n, dim]`) for `columns` = `Mᵀ`: four rows read the matrix once.
fn multiply_rows(columns: &[f32], block: RowBlockMut<'_>) {
    let RowBlockMut { rows, dim } = block;
    dispatch_simd(MatrixRows { columns, dim, rows });
}

#[inline(always)]
fn multiply_channels(x: &mut [f32], by: &[f32]) {
    for (x, by) in x.iter_mut().zip(by) {
        *x *= by;
    }
}

/// Channels whose first three rounds are made in a register.
const TOGETHER: usize = 8;

/// The round of a Hadamard transform between channels `HALF` apart.
#[inline(always)]
fn hadamard_round<const HALF: usize>(x: &mut [f32; TOGETHER]) {
    let other: [f32; TOGETHER] = std::array::from_fn(|channel| x[channel ^ HALF]);
    let sums: [f32; TOGETHER] = std::array::from_fn(|channel| x[channel] + other[channel]);
    let differences: [f32; TOGETHER] = std::array::from_fn(|channel| other[channel] - x[channel]);
    for channel in 0..TOGETHER {
        let first = channel & HALF == 0;
        x[channel] = if first { sums[channel] } else { differences[channel] };
    }
}

/// Factor that makes a block's rotation orthonormal.
pub(crate) fn hadamard_norm(block: usize) -> f32 {
    (block as f32).sqrt().recip()
}

/// Fast Walsh-Hadamard transform of each `block` of `x`, scaled to be orthonormal.
#[inline(always)]
pub(crate) fn hadamard_transform(x: &mut [f32], block: usize) {
    let norm = hadamard_norm(block);
    for block in x.chunks_exact_mut(block) {
        let mut half = 1;
        if block.len() >= TOGETHER {
            for part in block.as_chunks_mut::<TOGETHER>().0 {
                hadamard_round::<1>(part);
                hadamard_round::<2>(part);
                hadamard_round::<4>(part);
            }
            half = TOGETHER;
        }
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for x in block {
            *x *= norm;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadamard_is_orthonormal_and_its_own_inverse() {
        for dim in [2, 30, 32, 80, 96, 128, 254, 256] {
            let step = TransformStep::hadamard_blocks(dim);
            for hot in 0..dim {
                let mut x = vec![0.0; dim];
                x[hot] = 1.0;
                step.transform_rows(&mut x, dim);
                let energy: f32 = x.iter().map(|v| v * v).sum();
                assert!((energy - 1.0).abs() < 1e-5, "dim {dim}: energy {energy}");
                step.invert_sum(&mut x, 1.0);
                for (i, v) in x.iter().enumerate() {
                    assert!((v - f32::from(u8::from(i == hot))).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn hadamard_of_96_is_three_blocks_of_32() {
        let mut x = vec![0.0; 96];
        x[40] = 1.0;
        TransformStep::hadamard_blocks(96).transform_rows(&mut x, 96);
        assert!(x[..32].iter().chain(&x[64..]).all(|v| *v == 0.0));
        assert!(x[32..64].iter().all(|v| (v.abs() - 32f32.sqrt().recip()).abs() < 1e-6));
    }
}
