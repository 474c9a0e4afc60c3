//! Second moments of samples and the principal-axis transforms made from them
//! (`docs/adr/0005-grid-codec.md`).

use crate::row_block::RowBlock;
use kvd_codec::fitting::dispatch_simd;
use nalgebra::{DMatrix, SymmetricEigen};
use pulp::{Simd, WithSimd};

/// Share of the mean variance added to every axis: keeps a map invertible where samples span
/// fewer axes than the head has.
const RIDGE: f64 = 1e-4;

/// Rows whose products are added to a sum while it is in a register.
const ROWS: usize = 8;

/// `E[x xᵀ]` of `rows` (`[n, dim]`, `n >= 1`).
fn second_moment(rows: &[f32], dim: usize) -> DMatrix<f64> {
    let mut sum = DMatrix::zeros(dim, dim);
    dispatch_simd(GramMatrix { rows, dim, sum: sum.as_mut_slice() });
    sum.fill_upper_triangle_with_lower_triangle();
    sum / (rows.len() / dim) as f64
}

/// Adds `x xᵀ` of every row, row after row, to the lower triangle of `sum` (by columns).
struct GramMatrix<'a> {
    rows: &'a [f32],
    dim: usize,
    sum: &'a mut [f64],
}

impl WithSimd for GramMatrix<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { rows, dim, sum } = self;
        let mut block = vec![0f64; ROWS * dim];
        for rows in rows.chunks(ROWS * dim) {
            // Rows that a last chunk lacks add zeros.
            block.fill(0.0);
            block.iter_mut().zip(rows).for_each(|(wide, x)| *wide = f64::from(*x));
            for (j, column) in sum.chunks_exact_mut(dim).enumerate() {
                let factors: [f64; ROWS] = std::array::from_fn(|r| block[r * dim + j]);
                let rows: [&[f64]; ROWS] =
                    std::array::from_fn(|r| &block[r * dim + j..][..dim - j]);
                for (i, sum) in column[j..].iter_mut().enumerate() {
                    for (row, factor) in rows.iter().zip(factors) {
                        *sum += row[i] * factor;
                    }
                }
            }
        }
    }
}

fn with_ridge(mut moment: DMatrix<f64>) -> DMatrix<f64> {
    let dim = moment.nrows();
    let mean = moment.trace() / dim as f64;
    let ridge = if mean > 0.0 { mean * RIDGE } else { 1.0 };
    for i in 0..dim {
        moment[(i, i)] += ridge;
    }
    moment
}

/// Eigenvectors as rows, largest eigenvalue first.
fn eigenvector_rows(moment: DMatrix<f64>) -> DMatrix<f64> {
    let dim = moment.nrows();
    let eigen = SymmetricEigen::new(moment);
    let mut order: Vec<usize> = (0..dim).collect();
    order.sort_by(|a, b| eigen.eigenvalues[*b].total_cmp(&eigen.eigenvalues[*a]));
    DMatrix::from_fn(dim, dim, |i, j| eigen.eigenvectors[(j, order[i])])
}

/// `a · b` for square matrices. Plain loops: a library's kernels differ between processors, and a
/// calibration must not.
fn multiply_matrices(a: &DMatrix<f64>, b: &DMatrix<f64>) -> DMatrix<f64> {
    let mut out = DMatrix::zeros(a.nrows(), b.ncols());
    for (mut out, b) in out.column_iter_mut().zip(b.column_iter()) {
        for (a, b) in a.column_iter().zip(b.iter()) {
            for (out, a) in out.iter_mut().zip(a.iter()) {
                *out += a * b;
            }
        }
    }
    out
}

fn row_major(matrix: &DMatrix<f64>) -> Vec<f64> {
    matrix.transpose().iter().copied().collect()
}

/// `Uᵀ`: the rotation onto the principal axes of `rows`, row-major.
pub(crate) fn principal_axes(rows: &[f32], dim: usize) -> Vec<f64> {
    row_major(&eigenvector_rows(second_moment(rows, dim)))
}

/// `Uᵀ S` with `S = (E[q qᵀ])^½` and `U` the principal axes of `S x`, row-major.
pub(crate) fn query_axes(rows: &[f32], queries: &[f32], dim: usize) -> Vec<f64> {
    let eigen = SymmetricEigen::new(with_ridge(second_moment(queries, dim)));
    let roots = eigen.eigenvalues.map(|value| value.max(0.0).sqrt());
    let vectors = &eigen.eigenvectors;
    let scaled = DMatrix::from_fn(dim, dim, |i, j| vectors[(i, j)] * roots[j]);
    let root = multiply_matrices(&scaled, &vectors.transpose());
    let moment = multiply_matrices(&multiply_matrices(&root, &second_moment(rows, dim)), &root);
    row_major(&multiply_matrices(&eigenvector_rows(moment), &root))
}

/// Each value times the root of what the queries make of its key, `(kᵀ E[q qᵀ] k)^½`: the second
/// moment of the result is that of the values, weighted by their scores.
pub(crate) fn weigh_values(keys: RowBlock<'_>, queries: &[f32], values: RowBlock<'_>) -> Vec<f32> {
    let moment = second_moment(queries, keys.dim);
    let mut weighted = values.rows.to_vec();
    let rows = weighted.chunks_exact_mut(values.dim).zip(keys.rows.chunks_exact(keys.dim));
    for (value, key) in rows {
        let met = |column: &[f64]| -> f64 {
            column.iter().zip(key).map(|(entry, x)| entry * f64::from(*x)).sum()
        };
        let columns = moment.as_slice().chunks_exact(keys.dim);
        let score: f64 = columns.zip(key).map(|(column, x)| met(column) * f64::from(*x)).sum();
        let weight = score.max(0.0).sqrt();
        value.iter_mut().for_each(|x| *x = (f64::from(*x) * weight) as f32);
    }
    weighted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two axes with spreads 4 and 1, turned by 30 degrees.
    fn rows() -> Vec<f32> {
        let (sin, cos) = (0.5f32, 0.75f32.sqrt());
        let grid =
            (-10..=10).flat_map(|a| (-10..=10).map(move |b| (a as f32 * 0.4, b as f32 * 0.1)));
        grid.flat_map(|(a, b)| [cos * a - sin * b, sin * a + cos * b]).collect()
    }

    #[test]
    fn principal_axes_are_the_axes() {
        let axes = principal_axes(&rows(), 2);
        assert!((axes[0].abs() - 0.75f64.sqrt()).abs() < 1e-5, "{axes:?}");
        assert!((axes[1].abs() - 0.5).abs() < 1e-5, "{axes:?}");
    }

    #[test]
    fn moments_are_sums_in_the_order_of_rows() {
        for (dim, count) in [(2, 1), (6, 8), (14, 21), (64, 40)] {
            let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 97.0;
            let rows: Vec<f32> = (0..count * dim).map(value).collect();
            let moment = second_moment(&rows, dim);
            for (i, j) in (0..dim).flat_map(|i| (0..dim).map(move |j| (i, j))) {
                let of_row = |row: &[f32]| f64::from(row[i]) * f64::from(row[j]);
                let sum: f64 = rows.chunks_exact(dim).map(of_row).sum();
                assert_eq!(moment[(i, j)], sum / count as f64, "dim {dim}: {i}, {j}");
            }
        }
    }

    #[test]
    fn queries_along_one_axis_bring_it_first() {
        // Queries see almost only the narrow axis of the rows.
        let (sin, cos) = (0.5f32, 0.75f32.sqrt());
        let queries: Vec<f32> = (0..50)
            .flat_map(|i| {
                let s = if i % 2 == 0 { 9.0 } else { -9.0 };
                [-sin * s + cos * 0.01, cos * s + sin * 0.01]
            })
            .collect();
        let map = query_axes(&rows(), &queries, 2);
        // The first coefficient is (up to sign) nine times the narrow coordinate.
        let narrow = map[0] * -f64::from(sin) + map[1] * f64::from(cos);
        assert!((narrow.abs() - 9.0).abs() < 0.1, "{map:?}");
    }
}
