//! Loops compiled for the widest registers of the machine they run on.
//!
//! Every number is made by the same operations in the same order at every width (no fused
//! multiply-add, no sums over lanes), so that pages do not depend on who wrote them.

use kvd_core::Geometry;
use pulp::{Arch, Simd, WithSimd};

/// Rows that share a load of the matrix.
const ROWS: usize = 4;
/// Registers of outputs per row; with four rows, eight sums hide the latency of an addition.
const REGISTERS: usize = 2;

/// Runs `loops` with the widest instruction set at hand. What it calls must be inlined.
pub(crate) fn wide<T>(loops: impl WithSimd<Output = T>) -> T {
    Arch::new().dispatch(loops)
}

/// Every row `x` of `rows` becomes `M x`, for `columns` = `Mᵀ` (`[dim, dim]`, row-major).
///
/// Columns, so that outputs lie in lanes and each is summed in the order of the inputs.
pub(crate) struct Product<'a> {
    pub(crate) columns: &'a [f32],
    pub(crate) dim: usize,
    pub(crate) rows: &'a mut [f32],
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { columns, dim, rows } = self;
        let mut inputs = [0f32; ROWS * Geometry::HEAD_DIM_MAX as usize];
        for rows in rows.chunks_mut(ROWS * dim) {
            let inputs = &mut inputs[..rows.len()];
            inputs.copy_from_slice(rows);
            if rows.len() == ROWS * dim {
                product_of::<S, ROWS>(simd, columns, dim, inputs, rows);
                continue;
            }
            for (input, row) in inputs.chunks_exact(dim).zip(rows.chunks_exact_mut(dim)) {
                product_of::<S, 1>(simd, columns, dim, input, row);
            }
        }
    }
}

/// The product of `R` rows.
#[inline(always)]
fn product_of<S: Simd, const R: usize>(
    simd: S,
    columns: &[f32],
    dim: usize,
    inputs: &[f32],
    outputs: &mut [f32],
) {
    let step = REGISTERS * S::F32_LANES;
    let whole = dim - dim % step;
    for first in (0..whole).step_by(step) {
        let mut sums = [[simd.splat_f32s(0.0); REGISTERS]; R];
        for (i, column) in columns.chunks_exact(dim).enumerate() {
            let (column, _) = S::as_simd_f32s(&column[first..first + step]);
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = simd.splat_f32s(inputs[r * dim + i]);
                for (sum, column) in sums.iter_mut().zip(column) {
                    *sum = simd.add_f32s(*sum, simd.mul_f32s(x, *column));
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let (out, _) = S::as_mut_simd_f32s(&mut outputs[r * dim + first..][..step]);
            out.copy_from_slice(sums);
        }
    }
    for (input, output) in inputs.chunks_exact(dim).zip(outputs.chunks_exact_mut(dim)) {
        for (j, out) in output.iter_mut().enumerate().skip(whole) {
            let column = columns[j..].iter().step_by(dim);
            *out = input.iter().zip(column).fold(0.0, |sum, (x, m)| sum + x * m);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
    fn every_width_gives_the_sums_in_the_order_of_inputs() {
        let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 97.0;
        for dim in [2, 6, 16, 40, 64, 80, 96, 126, 128, 256] {
            let columns: Vec<f32> = (0..dim * dim).map(value).collect();
            for count in [1, 3, 4, 9] {
                let rows: Vec<f32> = (0..count * dim).map(|i| value(i + 31)).collect();
                let mut got = rows.clone();
                wide(Product { columns: &columns, dim, rows: &mut got });
                for (row, got) in rows.chunks(dim).zip(got.chunks(dim)) {
                    for (j, got) in got.iter().enumerate() {
                        let plain =
                            (0..dim).fold(0.0, |sum, i| sum + row[i] * columns[i * dim + j]);
                        assert_eq!(got.to_bits(), plain.to_bits(), "dim {dim}, rows {count}");
                    }
                }
            }
        }
    }
}
