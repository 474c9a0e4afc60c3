//! The exact nearest-entry search: `argmin |c|²/2 - x·c` over all entries `c` of a codebook.
//!
//! Two registers of points are compared with an entry at a time, a channel of all of them per
//! multiplication: an entry is read once for them.

use super::vq::Codebook;
use crate::simd::dispatch_simd;
use pulp::{Simd, WithSimd};

/// Registers of points compared at once.
const REGISTERS: usize = 2;
/// Registers of more lanes have masks, by which a choice between two of them is one operation.
/// In others it takes three; the sign of a difference does it instead.
const CHOICE_LANES: usize = 8;
/// Points brought into lanes at once, as many as two registers of 512 bits hold.
pub(super) const BATCH_MAX: usize = REGISTERS * 16;

/// Sub-vectors to look up: point `i` is `values[i * stride..][..dim]`.
#[derive(Clone, Copy)]
pub struct SubVectors<'a> {
    values: &'a [f32],
    stride: usize,
    dim: usize,
    count: usize,
}

impl<'a> SubVectors<'a> {
    /// `[n, dim]`.
    pub fn consecutive(values: &'a [f32], dim: usize) -> Self {
        Self { values, stride: dim, dim, count: values.len() / dim }
    }

    /// One position of rows of `positions` sub-vectors.
    pub(crate) fn position_column(
        rows: &'a [f32],
        dim: usize,
        position: usize,
        positions: usize,
    ) -> Self {
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
    /// (ties go to the lower one) and `|entry|²/2 - x·entry` for that entry. Where that is NaN or
    /// overflows upwards for every entry, entry 0 and `f32::MAX`: so it is for a point with NaN.
    pub fn find_nearest(&self, points: SubVectors<'_>, mut found: impl FnMut(usize, usize, f32)) {
        self.nearest_batches(points, |start, at, scores| {
            for ((index, at), score) in (start..).zip(at).zip(scores) {
                found(index, *at as usize, *score);
            }
        });
    }

    /// As [`Codebook::find_nearest`], some consecutive points at a time: the index of the first,
    /// then entries and scores.
    pub(super) fn nearest_batches(
        &self,
        points: SubVectors<'_>,
        found: impl FnMut(usize, &[u32], &[f32]),
    ) {
        dispatch_simd(NearestSearch { book: self, points, found });
    }
}

/// [`Codebook::nearest_batches`].
struct NearestSearch<'a, F> {
    book: &'a Codebook,
    points: SubVectors<'a>,
    found: F,
}

impl<F: FnMut(usize, &[u32], &[f32])> WithSimd for NearestSearch<'_, F> {
    type Output = ();

    /// Lets the compiler know the number of channels.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.book.dim {
            1 => self.search_batches::<S, 1>(simd),
            2 => self.search_batches::<S, 2>(simd),
            3 => self.search_batches::<S, 3>(simd),
            4 => self.search_batches::<S, 4>(simd),
            5 => self.search_batches::<S, 5>(simd),
            6 => self.search_batches::<S, 6>(simd),
            7 => self.search_batches::<S, 7>(simd),
            8 => self.search_batches::<S, 8>(simd),
            16 => self.search_batches::<S, 16>(simd),
            _ => self.run_any(),
        }
    }
}

impl<F: FnMut(usize, &[u32], &[f32])> NearestSearch<'_, F> {
    #[inline(always)]
    fn search_batches<S: Simd, const D: usize>(self, simd: S) {
        let Self { book, points, mut found } = self;
        let candidates = book.candidates::<D>();
        let mut x = [[0f32; BATCH_MAX]; D];
        let mut best = BestEntries::new();
        for start in (0..points.count).step_by(BATCH_MAX) {
            let filled = BATCH_MAX.min(points.count - start);
            let near =
                points.values.get(start * D..).and_then(|rest| rest.as_chunks().0.first_chunk());
            match near {
                Some(near) if points.stride == D => transpose_points(near, &mut x),
                _ => {
                    for (lane, index) in (start..start + filled).enumerate() {
                        let point = points.get(index);
                        (0..D).for_each(|channel| x[channel][lane] = point[channel]);
                    }
                }
            }
            scan_candidates(simd, || candidates.iter(), PointBatch { x: &x, filled }, &mut best);
            found(start, &best.at[..filled], &best.scores[..filled]);
        }
    }

    /// Point by point, for numbers of channels that are hardly used.
    fn run_any(self) {
        let Self { book, points, mut found } = self;
        for index in 0..points.count {
            let point = points.get(index);
            let entries = book.entries.chunks_exact(book.dim).zip(&book.half_norms);
            let scores = entries.map(|(value, half_norm)| {
                value.iter().zip(point).fold(*half_norm, |s, (c, x)| s - x * c)
            });
            let (at, best) = first_least((0..).zip(scores));
            found(index, &[at], &[best]);
        }
    }
}

/// Brings points into lanes, channel by channel.
#[inline(always)]
pub(super) fn transpose_points<const D: usize>(
    points: &[[f32; D]; BATCH_MAX],
    x: &mut [[f32; BATCH_MAX]; D],
) {
    for channel in 0..D {
        for lane in 0..BATCH_MAX {
            x[channel][lane] = points[lane][channel];
        }
    }
}

/// A batch of points, channel by channel; the first `filled` are present.
#[derive(Clone, Copy)]
pub(super) struct PointBatch<'a, const D: usize> {
    pub(super) x: &'a [[f32; BATCH_MAX]; D],
    pub(super) filled: usize,
}

/// The entry and score that [`scan_candidates`] found for each lane.
pub(super) struct BestEntries {
    pub(super) at: [u32; BATCH_MAX],
    pub(super) scores: [f32; BATCH_MAX],
}

impl BestEntries {
    pub(super) fn new() -> Self {
        Self { at: [0; BATCH_MAX], scores: [0.0; BATCH_MAX] }
    }
}

/// An entry, as it is compared with points: all of it lies together.
#[derive(Clone, Copy, Debug)]
pub(super) struct CandidateEntry<const D: usize> {
    values: [f32; D],
    half_norm: f32,
    index: u32,
}

impl Codebook {
    /// The entries in their order.
    pub(super) fn candidates<const D: usize>(&self) -> Vec<CandidateEntry<D>> {
        let entries = self.entries.as_chunks::<D>().0.iter().zip(&self.half_norms).zip(0..);
        let candidate =
            |((values, half_norm), index): ((&[f32; D], &f32), u32)| -> CandidateEntry<D> {
                CandidateEntry { values: *values, half_norm: *half_norm, index }
            };
        entries.map(candidate).collect()
    }
}

/// The first with the least score; NaN and infinity are never the least.
#[inline(always)]
fn first_least(scores: impl Iterator<Item = (u32, f32)>) -> (u32, f32) {
    let closer = |best: (u32, f32), next: (u32, f32)| if next.1 < best.1 { next } else { best };
    scores.fold((0, f32::MAX), closer)
}

/// For each of the first `filled` points the first of `candidates` with the least score; their
/// indices ascend. As [`first_least`] says.
#[inline(always)]
pub(super) fn scan_candidates<
    'a,
    S: Simd,
    const D: usize,
    C: Iterator<Item = &'a CandidateEntry<D>>,
>(
    simd: S,
    candidates: impl Fn() -> C,
    points: PointBatch<'_, D>,
    found: &mut BestEntries,
) {
    let PointBatch { x, filled } = points;
    let mut first = 0;
    while first < filled {
        let places = (&mut found.at[first..], &mut found.scores[first..]);
        first += if filled - first > S::F32_LANES {
            scan_registers::<S, D, REGISTERS>(simd, candidates(), x, first, places)
        } else {
            scan_registers::<S, D, 1>(simd, candidates(), x, first, places)
        };
    }
    // Scores without an order: a difference of minus infinities is NaN, and on some machines the
    // minimum of a number and NaN is NaN. Both stay until the end.
    let sound = |score: &f32| *score > f32::NEG_INFINITY;
    if !found.scores[..filled].iter().fold(true, |all, score| all & sound(score)) {
        for lane in 0..filled {
            if !sound(&found.scores[lane]) {
                let x = std::array::from_fn(|channel| x[channel][lane]);
                (found.at[lane], found.scores[lane]) = one_by_one(candidates(), &x);
            }
        }
    }
}

/// [`scan_candidates`] of one point, whatever its scores are.
#[cold]
#[inline(never)]
fn one_by_one<'a, const D: usize>(
    candidates: impl Iterator<Item = &'a CandidateEntry<D>>,
    x: &[f32; D],
) -> (u32, f32) {
    first_least(candidates.map(|CandidateEntry { values, half_norm, index }| {
        (*index, values.iter().zip(x).fold(*half_norm, |s, (c, x)| s - x * c))
    }))
}

/// [`scan_candidates`] of `R` registers of points from `first` on; returns how many points those
/// are.
#[inline(always)]
fn scan_registers<'a, S: Simd, const D: usize, const R: usize>(
    simd: S,
    candidates: impl Iterator<Item = &'a CandidateEntry<D>>,
    x: &[[f32; BATCH_MAX]; D],
    first: usize,
    (found_at, found_scores): (&mut [u32], &mut [f32]),
) -> usize {
    let x: [[S::f32s; R]; D] = std::array::from_fn(|channel| {
        let (registers, _) = S::as_simd_f32s(&x[channel][first..]);
        std::array::from_fn(|register| registers[register])
    });
    let [none, top] = [0, 31].map(|bits| simd.splat_u32s(bits));
    // Not infinity: from that, infinity is no distance but NaN, with any sign.
    let mut best = [simd.splat_f32s(f32::MAX); R];
    let mut at = [none; R];
    for candidate in candidates {
        let mut scores = [simd.splat_f32s(candidate.half_norm); R];
        for (x, value) in x.iter().zip(candidate.values) {
            let value = simd.splat_f32s(value);
            for (score, x) in scores.iter_mut().zip(x) {
                *score = simd.sub_f32s(*score, simd.mul_f32s(*x, value));
            }
        }
        let index = simd.splat_u32s(candidate.index);
        for register in 0..R {
            let least = simd.min_f32s(scores[register], best[register]);
            at[register] = if S::F32_LANES > CHOICE_LANES {
                let closer = simd.less_than_f32s(scores[register], best[register]);
                simd.select_u32s(closer, index, at[register])
            } else {
                // Indices ascend: the largest of those that were closer is the last.
                let ahead = simd.sub_f32s(least, best[register]);
                let sign = simd.wrapping_dyn_shr_u32s(simd.transmute_u32s_f32s(ahead), top);
                let closer = simd.sub_u32s(none, sign);
                simd.max_u32s(at[register], simd.and_u32s(closer, index))
            };
            best[register] = least;
        }
    }
    S::as_mut_simd_f32s(found_scores).0[..R].copy_from_slice(&best);
    S::as_mut_simd_u32s(found_at).0[..R].copy_from_slice(&at);
    R * S::F32_LANES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::each_width;

    fn wave(i: usize) -> f32 {
        ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 4.0
    }

    #[test]
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
                book.find_nearest(SubVectors::consecutive(&points, dim), |index, entry, score| {
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

    /// Entries and bits of scores, the same at every width.
    fn found(book: &Codebook, points: &[f32]) -> Vec<(usize, u32)> {
        each_width(|| {
            let mut found = Vec::new();
            book.find_nearest(SubVectors::consecutive(points, book.dim), |_, entry, score| {
                found.push((entry, score.to_bits()));
            });
            found
        })
    }

    /// With a loop over all entries.
    fn compare(book: &Codebook, points: &[f32]) {
        for (x, found) in points.chunks(book.dim).zip(found(book, points)) {
            let (mut at, mut best) = (0, f32::MAX);
            for (index, c) in book.entries.chunks(book.dim).enumerate() {
                let norm = book.half_norms[index];
                let score = c.iter().zip(x).fold(norm, |s, (c, x)| s - x * c);
                (at, best) = if score < best { (index, score) } else { (at, best) };
            }
            assert_eq!(found, (at, best.to_bits()), "dim {}, point {x:?}", book.dim);
        }
    }

    /// Few levels, so that there are ties.
    fn coarse(i: usize) -> f32 {
        (wave(i) * 2.0).round()
    }

    /// With products and squares beyond all numbers.
    fn huge(i: usize) -> f32 {
        [coarse(i), 1e20 * wave(i), 3e38, -3e38][i * 31 % 17 % 4]
    }

    fn odd(i: usize) -> f32 {
        match i % 37 {
            5 => f32::NAN,
            11 => -f32::NAN,
            17 => f32::INFINITY,
            23 => f32::NEG_INFINITY,
            _ => huge(i),
        }
    }

    #[test]
    fn every_width_finds_the_first_least_whatever_scores_are() {
        for dim in [1usize, 2, 3, 4, 5, 7, 8, 11, 16] {
            let fill = |value: fn(usize) -> f32, count: usize| -> Vec<f32> {
                (0..count * dim).map(|i| value(7 * i + 3)).collect()
            };
            for entries in [coarse as fn(usize) -> f32, huge].map(|value| fill(value, 33)) {
                let book = Codebook::new(dim, entries);
                for n in [1, 7, 8, 9, 15, 16, 17, 31, 33, 77] {
                    for points in
                        [coarse as fn(usize) -> f32, huge, odd].map(|value| fill(value, n))
                    {
                        compare(&book, &points);
                    }
                }
            }
        }
    }

    #[test]
    fn columns_are_positions_of_rows() {
        let rows: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let points = SubVectors::position_column(&rows, 2, 1, 3);
        assert_eq!(points.count, 4);
        assert_eq!((points.get(0), points.get(3)), (&[2.0, 3.0][..], &[20.0, 21.0][..]));
    }

    #[test]
    fn nan_gets_entry_zero() {
        let book = Codebook::new(2, vec![1.0, 0.0, -1.0, 0.5]);
        book.find_nearest(SubVectors::consecutive(&[f32::NAN, f32::MAX], 2), |_, entry, _| {
            assert_eq!(entry, 0);
        });
    }
}
