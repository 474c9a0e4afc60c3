//! Weighted sums of outliers: what codes do not hold of some coefficients.
//!
//! They are summed in f64. A symbol that a Huffman table lacks is stored as another one, with an
//! outlier that takes the difference back, so that both may be a hundred times their sum.

/// Sums by row and coefficient. They take no memory before the first outlier.
pub(super) struct OutlierSums {
    /// `[rows, dim]`, or empty.
    sums: Vec<f64>,
    rows: usize,
    dim: usize,
}

impl OutlierSums {
    /// No outliers of so many rows.
    pub(super) fn new(rows: usize, dim: usize) -> Self {
        Self { sums: Vec::new(), rows, dim }
    }

    /// Adds an outlier to the sum of a row.
    pub(super) fn add_weighted(&mut self, row: usize, coefficient: usize, weighted: f64) {
        self.sums.resize(self.rows * self.dim, 0.0);
        self.sums[row * self.dim + coefficient] += weighted;
    }

    /// Scales the sums of a row.
    pub(super) fn scale_row(&mut self, row: usize, factor: f32) {
        let sums = self.sums.chunks_exact_mut(self.dim).nth(row).into_iter().flatten();
        sums.for_each(|sum| *sum *= f64::from(factor));
    }

    /// The sums of a row, by coefficient; `None` where there are no outliers.
    pub(super) fn row_sums(&self, row: usize) -> Option<&[f64]> {
        self.sums.chunks_exact(self.dim).nth(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_outliers_and_codes_leave_of_each_other_is_kept() {
        // -113 steps in codes and 112 in an outlier, of each token.
        let weights: Vec<f32> = (0..4096).map(|i| 0.25 + (i * 37 % 101) as f32 / 400.0).collect();
        let mut outliers = OutlierSums::new(2, 3);
        assert!(outliers.row_sums(1).is_none());
        weights.iter().for_each(|w| outliers.add_weighted(1, 2, f64::from(*w) * 112.0));
        outliers.scale_row(1, 0.5);
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let left = outliers.row_sums(1).unwrap()[2] - 113.0 * 0.5 * total;
        assert!((left / (-0.5 * total) - 1.0).abs() < 1e-9, "{left} of {total}");
        assert_eq!(outliers.row_sums(1).unwrap()[..2], [0.0; 2]);
        assert_eq!(outliers.row_sums(0), Some(&[0.0; 3][..]));
    }
}
