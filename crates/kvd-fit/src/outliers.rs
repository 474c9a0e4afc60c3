//! Rows of samples that are far beyond all others of their head. Means, moments, codebooks and
//! steps that are fitted to squares follow one such row more than a thousand ordinary ones, so that
//! every fit is made without them (`docs/adr/0020-tables-from-a-prior.md`).
//!
//! How far a row may be is told by the 95th percentile of lengths, which no row in twenty can move,
//! as long as it is not itself far beyond the median: up to a quarter of the rows may be long.
//! Magnitudes are compared in rows that are not left out.
//!
//! Rows of zeros, as padding leaves them, tell nothing of the others and take next to no bits; a
//! fit that counted them would give ordinary rows more bits than were asked for.

use std::borrow::Cow;

/// The median and the 95th percentile, in twentieths.
const MEDIAN: usize = 10;
const PERCENT_95: usize = 19;
/// Fewest rows with meaningful percentiles.
const ROWS_MIN: usize = 20;
/// The usual length is the 95th percentile, but at most the median times this: lengths of ordinary
/// rows spread by less (the fixture's heads by 1.34, a lognormal with a deviation of 0.4 by 1.9).
const USUAL: f64 = 2.0;
/// Rows that are long by the median, as a share of all, beyond which they are of another kind and
/// not far off: then the 95th percentile stands.
const OTHER_KIND: f64 = 0.25;
/// Rows longer than the usual length times this are left out,
const LEFT_OUT: f64 = 4.0;
/// and those longer than that times this are brought to that length.
const LONGEST: f64 = 2.0;
/// Magnitudes over the 95th percentile of their channel, or of all channels where that is more,
/// times this are brought to it.
const LARGEST: f32 = 4.0;

/// Rows of a head that a fit looks at.
#[derive(Clone, Debug)]
pub(crate) struct InlierRows<'a> {
    /// `[rows, dim]`; as they were given where none was far.
    pub(crate) rows: Cow<'a, [f32]>,
    /// Rows of zeros among others, which are left out.
    pub(crate) zeros: usize,
    /// Rows far beyond the others, which are left out.
    pub(crate) left_out: usize,
    /// Rows with clipped values.
    pub(crate) clipped: usize,
    /// Length of the longest row given, in medians of all lengths but zeros.
    pub(crate) longest: f64,
}

impl<'a> InlierRows<'a> {
    /// Measures `rows` (`[n, dim]`), leaves out zeros and what is far beyond the others, and
    /// shortens what is less far.
    pub(crate) fn new(rows: impl Into<Cow<'a, [f32]>>, dim: usize) -> Self {
        let rows = rows.into();
        let given = rows.len();
        let full = drop_zero_rows(rows, dim);
        let zeros = (given - full.len()) / dim;
        Self { zeros, ..Self::of_full_rows(full, dim) }
    }

    fn of_full_rows(full: Cow<'a, [f32]>, dim: usize) -> Self {
        let mut inliers = Self { rows: full, zeros: 0, left_out: 0, clipped: 0, longest: 1.0 };
        let rows = &*inliers.rows;
        let lengths: Vec<f64> = rows.chunks_exact(dim).map(row_length).collect();
        let quantile = |share| select_quantile(&mut lengths.clone(), share, f64::total_cmp);
        let median = quantile(MEDIAN).unwrap_or(0.0);
        let percentile = quantile(PERCENT_95).unwrap_or(0.0);
        let of_median = USUAL * median;
        let long = lengths.iter().filter(|length| **length > LONGEST * of_median).count();
        let mixed = long as f64 > OTHER_KIND * lengths.len() as f64;
        let usual = if mixed { percentile } else { percentile.min(of_median) };
        if lengths.len() < ROWS_MIN || usual <= 0.0 || !usual.is_finite() {
            return inliers;
        }
        inliers.longest = lengths.iter().fold(0f64, |most, length| most.max(*length)) / median;
        let near: Vec<&[f32]> = rows
            .chunks_exact(dim)
            .zip(&lengths)
            .filter(|(_, length)| **length <= LEFT_OUT * usual)
            .map(|(row, _)| row)
            .collect();
        let largest = largest_magnitudes(&near, dim);
        let is_far = |row: &[f32]| row.iter().zip(&largest).any(|(x, most)| x.abs() > *most);
        let all = || rows.chunks_exact(dim).zip(&lengths);
        if !all().any(|(row, length)| *length > LONGEST * usual || is_far(row)) {
            return inliers;
        }
        let mut kept = Vec::with_capacity(rows.len());
        for (row, of_row) in all() {
            if *of_row > LEFT_OUT * usual {
                inliers.left_out += 1;
                continue;
            }
            let first = kept.len();
            kept.extend(row.iter().zip(&largest).map(|(x, most)| x.clamp(-most, *most)));
            let clipped = &mut kept[first..];
            let shrink = LONGEST * usual / row_length(clipped);
            if shrink < 1.0 {
                clipped.iter_mut().for_each(|x| *x = (f64::from(*x) * shrink) as f32);
            }
            inliers.clipped += usize::from(clipped != row);
        }
        inliers.rows = Cow::Owned(kept);
        inliers
    }
}

/// How many rows have anything but zeros.
pub(crate) fn count_full_rows(rows: &[f32], dim: usize) -> usize {
    rows.chunks_exact(dim).filter(|row| !is_zero(row)).count()
}

/// Rows with anything but zeros; all of them where none has.
fn drop_zero_rows(rows: Cow<'_, [f32]>, dim: usize) -> Cow<'_, [f32]> {
    let full = count_full_rows(&rows, dim);
    if full == 0 || full == rows.len() / dim {
        return rows;
    }
    let kept = rows.chunks_exact(dim).filter(|row| !is_zero(row));
    Cow::Owned(kept.flatten().copied().collect())
}

pub(crate) fn is_zero(row: &[f32]) -> bool {
    row.iter().all(|x| *x == 0.0)
}

fn row_length(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

/// The value below which so many twentieths of all others are; none of no values.
fn select_quantile<T: Copy>(
    values: &mut [T],
    twentieths: usize,
    order: impl FnMut(&T, &T) -> std::cmp::Ordering,
) -> Option<T> {
    let index = values.len().checked_sub(1)? * twentieths / 20;
    Some(*values.select_nth_unstable_by(index, order).1)
}

/// Largest magnitude that a value of each channel keeps.
fn largest_magnitudes(rows: &[&[f32]], dim: usize) -> Vec<f32> {
    let usual: Vec<f32> = (0..dim)
        .map(|channel| {
            let mut magnitudes: Vec<f32> = rows.iter().map(|row| row[channel].abs()).collect();
            select_quantile(&mut magnitudes, PERCENT_95, f32::total_cmp).unwrap_or(0.0)
        })
        .collect();
    let mut magnitudes: Vec<f32> =
        rows.iter().flat_map(|row| row.iter().map(|x| x.abs())).collect();
    let of_all = select_quantile(&mut magnitudes, PERCENT_95, f32::total_cmp).unwrap_or(0.0);
    // Where nearly all values are zeros, nothing tells how far the others may be.
    let limit = |usual: &f32| if of_all > 0.0 { LARGEST * usual.max(of_all) } else { f32::MAX };
    usual.iter().map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many that a row with one value clipped is not too long as well.
    const DIM: usize = 32;

    fn rows() -> Vec<f32> {
        (0..200 * DIM).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 504.0).collect()
    }

    #[test]
    fn ordinary_rows_stay_as_they_are() {
        let rows = rows();
        let inliers = InlierRows::new(&rows, DIM);
        assert!(matches!(inliers.rows, Cow::Borrowed(same) if same == rows));
        assert_eq!((inliers.left_out, inliers.clipped), (0, 0));
        assert!((1.0..2.0).contains(&inliers.longest), "{}", inliers.longest);
        // Zeros, a few rows and no rows keep everything too.
        for few in [&[0.0; 64 * DIM][..], &rows[..19 * DIM], &[]] {
            assert_eq!(InlierRows::new(few, DIM).rows, few);
        }
    }

    #[test]
    fn two_kinds_of_rows_are_both_kept() {
        let ordinary = rows();
        let count = ordinary.len() / DIM;
        // More than half are short, and none of the others is far off.
        let mut mixed: Vec<f32> = (0..count + count / 4).flat_map(|_| [1e-3f32; DIM]).collect();
        mixed.extend(&ordinary);
        let inliers = InlierRows::new(mixed, DIM);
        assert_eq!(inliers.left_out, 0);
    }

    #[test]
    fn rows_of_zeros_are_left_out_where_there_are_others() {
        let ordinary = rows();
        for every in [2, 3, 50] {
            let mut rows = ordinary.clone();
            let padded = rows.chunks_exact_mut(DIM).step_by(every);
            let zeros = padded.map(|row| row.fill(0.0)).count();
            let inliers = InlierRows::new(&rows, DIM);
            assert_eq!((inliers.zeros, inliers.left_out, inliers.clipped), (zeros, 0, 0));
            assert_eq!(inliers.rows.len(), ordinary.len() - zeros * DIM);
            assert_eq!(count_full_rows(&rows, DIM), 200 - zeros);
            assert_eq!(count_full_rows(&inliers.rows, DIM), 200 - zeros);
        }
    }

    #[test]
    fn rows_far_beyond_all_others_are_left_out() {
        let ordinary = rows();
        let many = [(12, 30.0), (40, 30.0), (49, 1e4)];
        for (far, factor) in [(1, 30.0), (1, 1e4), (9, 1e4), (1, 1e37)].into_iter().chain(many) {
            let mut rows = ordinary.clone();
            rows[..far * DIM].iter_mut().for_each(|x| *x *= factor);
            let inliers = InlierRows::new(&rows, DIM);
            assert_eq!((inliers.left_out, inliers.clipped), (far, 0), "{far} rows x{factor}");
            assert_eq!(inliers.rows, &ordinary[far * DIM..]);
            let of_median = inliers.longest / f64::from(factor);
            assert!((0.8..1.5).contains(&of_median), "{far} rows x{factor}: {}", inliers.longest);
        }
    }

    #[test]
    fn long_rows_are_shortened_and_single_values_clipped() {
        let mut rows = rows();
        rows[..DIM].iter_mut().for_each(|x| *x = 2.0);
        rows[DIM] = 5.0;
        let inliers = InlierRows::new(&rows, DIM);
        assert_eq!((inliers.left_out, inliers.clipped), (0, 2));
        assert!(inliers.rows[DIM] < 4.0 && inliers.rows[DIM + 1] == rows[DIM + 1]);
        assert!(row_length(&inliers.rows[..DIM]) < row_length(&rows[..DIM]));
        assert_eq!(inliers.rows[2 * DIM..], rows[2 * DIM..]);
    }
}
