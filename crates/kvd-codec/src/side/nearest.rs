//! The exact nearest-entry search: `argmin |c|²/2 - x·c` over all entries `c` of a codebook.
//!
//! Sixteen points are compared with an entry at a time, a channel of all of them per
//! multiplication, so that the loops become vector instructions of any width. An entry is read
//! once for sixteen points, which is what makes large codebooks bearable.

use super::vq::Codebook;
use crate::wide::wide;
use pulp::{Simd, WithSimd};

/// Points compared at once.
const LANES: usize = 16;

/// Channels of a sub-vector at most.
const DIM_MAX: usize = 16;

/// Sub-vectors to look up: point `i` is `values[i * stride..][..dim]`.
#[derive(Clone, Copy)]
pub(crate) struct Points<'a> {
    values: &'a [f32],
    stride: usize,
    dim: usize,
    count: usize,
}

impl<'a> Points<'a> {
    /// `[n, dim]`.
    pub(crate) fn consecutive(values: &'a [f32], dim: usize) -> Self {
        Self { values, stride: dim, dim, count: values.len() / dim }
    }

    /// One position of rows of `positions` sub-vectors.
    pub(crate) fn column(rows: &'a [f32], dim: usize, position: usize, positions: usize) -> Self {
        let stride = dim * positions;
        Self { values: &rows[position * dim..], stride, dim, count: rows.len() / stride }
    }

    /// Sub-vector `index`.
    #[inline(always)]
    fn get(&self, index: usize) -> &'a [f32] {
        &self.values[index * self.stride..][..self.dim]
    }
}

impl Codebook {
    /// Calls `found` for each point, in order, with its index, the index of the nearest entry
    /// (ties go to the lower one) and `|entry|²/2 - x·entry` for that entry. A point with NaN
    /// gets entry 0.
    pub(crate) fn nearest(&self, points: Points<'_>, found: impl FnMut(usize, usize, f32)) {
        wide(Search { book: self, points, found });
    }

    /// Lets the compiler know the number of channels.
    #[inline(always)]
    fn search(&self, x: &[[f32; LANES]; DIM_MAX]) -> ([u32; LANES], [f32; LANES]) {
        match self.dim {
            1 => scan::<1>(&self.entries, &self.half_norms, x),
            2 => scan::<2>(&self.entries, &self.half_norms, x),
            3 => scan::<3>(&self.entries, &self.half_norms, x),
            4 => scan::<4>(&self.entries, &self.half_norms, x),
            5 => scan::<5>(&self.entries, &self.half_norms, x),
            6 => scan::<6>(&self.entries, &self.half_norms, x),
            7 => scan::<7>(&self.entries, &self.half_norms, x),
            8 => scan::<8>(&self.entries, &self.half_norms, x),
            16 => scan::<16>(&self.entries, &self.half_norms, x),
            dim => scan_entries(self.entries.chunks_exact(dim), &self.half_norms, x),
        }
    }
}

/// [`Codebook::nearest`].
struct Search<'a, F> {
    book: &'a Codebook,
    points: Points<'a>,
    found: F,
}

impl<F: FnMut(usize, usize, f32)> WithSimd for Search<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { book, points, mut found } = self;
        let mut lanes = [[0f32; LANES]; DIM_MAX];
        for start in (0..points.count).step_by(LANES) {
            let filled = LANES.min(points.count - start);
            for lane in 0..filled {
                let point = points.get(start + lane);
                for (channel, x) in lanes.iter_mut().zip(point) {
                    channel[lane] = *x;
                }
            }
            let (at, score) = book.search(&lanes);
            for lane in 0..filled {
                found(start + lane, at[lane] as usize, score[lane]);
            }
        }
    }
}

#[inline(always)]
fn scan<const D: usize>(
    entries: &[f32],
    half_norms: &[f32],
    x: &[[f32; LANES]; DIM_MAX],
) -> ([u32; LANES], [f32; LANES]) {
    let entries = entries.as_chunks::<D>().0;
    scan_entries(entries.iter().map(|entry| entry.as_slice()), half_norms, x)
}

#[inline(always)]
fn scan_entries<'a>(
    entries: impl Iterator<Item = &'a [f32]>,
    half_norms: &[f32],
    x: &[[f32; LANES]; DIM_MAX],
) -> ([u32; LANES], [f32; LANES]) {
    let (mut best, mut at) = ([f32::INFINITY; LANES], [0u32; LANES]);
    for (index, (entry, half_norm)) in (0u32..).zip(entries.zip(half_norms)) {
        let mut score = [*half_norm; LANES];
        for (x, value) in x.iter().zip(entry) {
            for lane in 0..LANES {
                score[lane] -= x[lane] * value;
            }
        }
        for lane in 0..LANES {
            let closer = score[lane] < best[lane];
            best[lane] = if closer { score[lane] } else { best[lane] };
            at[lane] = if closer { index } else { at[lane] };
        }
    }
    (at, best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(i: usize) -> f32 {
        ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 4.0
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
    fn nearest_is_the_first_least_score() {
        for (dim, count) in
            [(1usize, 2usize), (2, 16), (3, 32), (4, 256), (5, 8), (8, 64), (11, 32), (16, 4)]
        {
            // Pairs of equal entries: the first of each must win.
            let entries: Vec<f32> =
                (0..count * dim).map(|i| wave(i / (2 * dim) * dim + i % dim)).collect();
            let book = Codebook::new(dim, entries.clone());
            for n in [1, 15, 16, 17, 50] {
                let points: Vec<f32> = (0..n * dim).map(|i| wave(31 * i + 5)).collect();
                let mut seen = 0;
                book.nearest(Points::consecutive(&points, dim), |index, entry, score| {
                    assert_eq!(index, seen);
                    seen += 1;
                    let x = &points[index * dim..][..dim];
                    let score_of = |c: &[f32]| {
                        let norm: f32 = c.iter().map(|v| v * v).sum();
                        c.iter().zip(x).fold(0.5 * norm, |s, (c, x)| s - x * c)
                    };
                    let scores: Vec<f32> = entries.chunks(dim).map(score_of).collect();
                    let least = scores.iter().fold(f32::INFINITY, |m, s| m.min(*s));
                    assert_eq!(Some(entry), scores.iter().position(|s| *s == least));
                    assert_eq!(score, least);
                });
                assert_eq!(seen, n);
            }
        }
    }

    #[test]
    fn columns_are_positions_of_rows() {
        let rows: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let points = Points::column(&rows, 2, 1, 3);
        assert_eq!(points.count, 4);
        assert_eq!((points.get(0), points.get(3)), (&[2.0, 3.0][..], &[20.0, 21.0][..]));
    }

    #[test]
    fn nan_gets_entry_zero() {
        let book = Codebook::new(2, vec![1.0, 0.0, -1.0, 0.5]);
        book.nearest(Points::consecutive(&[f32::NAN, f32::MAX], 2), |_, entry, _| {
            assert_eq!(entry, 0);
        });
    }
}
