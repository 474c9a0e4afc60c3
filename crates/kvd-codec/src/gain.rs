//! Token gains: a power of two per row, by which the coefficients of quiet rows are raised before
//! they are quantized (the `gain` transform of values).
//!
//! One step for all rows is right when all rows count alike. Values do not: in some heads a few
//! tokens take most of the weight and have values far shorter than others. An error that is small
//! beside an ordinary value is as large as those. So a row shorter than the head's median is
//! brought near it, and its error shrinks with it; long rows keep the step
//! (`docs/adr/0009-token-gains.md` has the figures). A gain commutes with every linear transform;
//! attention multiplies the token's weight by it.
//!
//! Stored: 4 bits per row after the payload, low nibble first, where any row of the page has one.

use std::f32::consts::SQRT_2;

/// Largest shift: rows of 2^-7 of the median and shorter.
const SHIFT_MAX: u8 = 7;

/// Rows whose lengths are summed at once.
const LENGTHS: usize = 8;

/// Bytes of the gains of a page.
pub(crate) const fn gain_bytes(tokens: usize) -> usize {
    tokens.div_ceil(2)
}

/// The median length of rows (`[n, dim]`), 1 where that is nothing to divide by.
pub fn median_length(rows: &[f32], dim: usize) -> f32 {
    let mut lengths: Vec<f32> = rows.chunks_exact(dim).map(row_length).collect();
    let middle = lengths.len() / 2;
    let median = *lengths.select_nth_unstable_by(middle, f32::total_cmp).1;
    if median.is_normal() { median } else { 1.0 }
}

fn row_length(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// Raises `coefficients` of rows that are shorter than `median`, and returns the shift of each.
pub fn raise_short_rows(
    rows: &[f32],
    dim: usize,
    median: f32,
    coefficients: &mut [f32],
    shifts: &mut Vec<u8>,
) {
    shifts.clear();
    let parts = rows.chunks(LENGTHS * dim).zip(coefficients.chunks_mut(LENGTHS * dim));
    for (rows, coefficients) in parts {
        let lengths = row_lengths(rows, dim);
        for (coefficients, length) in coefficients.chunks_exact_mut(dim).zip(lengths) {
            let shift = nearest_shift(median / length);
            shifts.push(shift);
            if shift > 0 {
                let gain = f32::from(1u16 << shift);
                coefficients.iter_mut().for_each(|c| *c *= gain);
            }
        }
    }
}

/// As [`row_length`], of some rows at once: a sum in order is a chain, and chains can take turns.
fn row_lengths(rows: &[f32], dim: usize) -> [f32; LENGTHS] {
    let mut sums = [0f32; LENGTHS];
    if rows.len() == LENGTHS * dim {
        for channel in 0..dim {
            for (sum, x) in sums.iter_mut().zip(rows[channel..].iter().step_by(dim)) {
                *sum += x * x;
            }
        }
        return sums.map(f32::sqrt);
    }
    for (length_of, row) in sums.iter_mut().zip(rows.chunks_exact(dim)) {
        *length_of = row_length(row);
    }
    sums
}

/// The shift nearest to the logarithm of `ratio`; none for NaN.
fn nearest_shift(ratio: f32) -> u8 {
    let mut shift = 0;
    while shift < SHIFT_MAX && ratio >= SQRT_2 * f32::from(1u16 << shift) {
        shift += 1;
    }
    shift
}

/// Appends the shifts of a page; none where no row has one.
pub(crate) fn append_shifts(shifts: &[u8], out: &mut Vec<u8>) -> usize {
    if shifts.iter().all(|shift| *shift == 0) {
        return 0;
    }
    let nibbles = shifts.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4));
    out.extend(nibbles);
    gain_bytes(shifts.len())
}

/// The gains of a page.
#[derive(Clone, Copy, Debug)]
pub struct RowGains<'a>(pub(crate) &'a [u8]);

impl RowGains<'_> {
    /// The factor of the stored coefficients of row `row`, at most 1.
    #[must_use]
    pub fn row_factor(&self, row: usize) -> f32 {
        let shift = self.0[row / 2] >> (4 * (row % 2)) & 15;
        f32::from(1u16 << shift).recip()
    }

    /// Brings rows (`[n, dim]`) from row `first` on back to their length.
    pub(crate) fn restore_lengths(&self, first: usize, dim: usize, rows: &mut [f32]) {
        for (row, values) in (first..).zip(rows.chunks_exact_mut(dim)) {
            let factor = self.row_factor(row);
            if factor < 1.0 {
                values.iter_mut().for_each(|c| *c *= factor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_bring_short_rows_near_the_median_and_leave_long_ones() {
        let of = |length: f32| nearest_shift(1.0 / length);
        assert_eq!([2.0, 1.0, 0.72, 0.70, 0.5, 0.36, 0.25].map(of), [0, 0, 0, 1, 1, 1, 2]);
        assert_eq!([1e-3, 0.0, f32::NAN].map(of), [SHIFT_MAX, SHIFT_MAX, 0]);
    }

    #[test]
    fn raised_rows_come_back_exactly() {
        let rows: Vec<f32> =
            (0..5).flat_map(|i| [4f32.powi(-i), 0.0, 3.0 * 4f32.powi(-i)]).collect();
        let (mut raised, mut shifts, mut bytes) = (rows.clone(), Vec::new(), vec![9]);
        raise_short_rows(&rows, 3, median_length(&rows, 3), &mut raised, &mut shifts);
        assert_eq!(append_shifts(&shifts, &mut bytes), gain_bytes(5));
        assert_ne!(raised, rows);
        let gains = RowGains(&bytes[1..]);
        let mut back = raised[3..].to_vec();
        gains.restore_lengths(1, 3, &mut back);
        assert_eq!(back, rows[3..]);
    }

    #[test]
    fn rows_of_any_size_are_compared_by_their_ratio() {
        for size in [1e-12f32, 1.0, 1e12] {
            let rows = [1.0, 1.0, 1.0, 0.25].map(|x| x * size);
            let (mut raised, mut shifts) = (rows, Vec::new());
            raise_short_rows(&rows, 1, median_length(&rows, 1), &mut raised, &mut shifts);
            assert_eq!(shifts, [0, 0, 0, 2], "{size}");
        }
    }

    #[test]
    fn pages_of_equal_rows_store_no_gains() {
        let mut bytes = Vec::new();
        assert_eq!(append_shifts(&[0, 0, 0], &mut bytes), 0);
        assert!(bytes.is_empty());
    }

    #[test]
    fn the_median_of_zeros_is_one() {
        assert_eq!(median_length(&[0.0; 8], 4), 1.0);
    }
}
