//! Which entries of a codebook of four channels can be nearest at all, by region of space: most
//! points are compared with a fifth of the entries, with the same result.
//!
//! Each channel is cut in three, which makes 81 regions. Boxes within a region are split until
//! they are small; in each, entries that another one beats everywhere in the box drop out. The
//! difference of two scores is linear, so its least value over a box is that of a corner, and the
//! margin is far above what rounding can do to scores. Points beyond all boxes are compared with
//! every entry.

use super::nearest::PointBatch;
use super::nearest::{BATCH_MAX, BestEntries, CandidateEntry, scan_candidates, transpose_points};
use super::vq::Codebook;
use crate::simd::dispatch_simd;
use pulp::{Simd, WithSimd};

/// Channels of an entry.
const DIM: usize = 4;
const CUTS: usize = 2;
/// Regions, and one for what lies beyond.
const REGIONS: usize = 82;
/// Numbers of entries that it pays for.
const ENTRIES: std::ops::RangeInclusive<usize> = 64..=512;
/// Cuts, in root mean squares of the entries: a third of normal points each, the entries of which
/// spread a fifth wider.
const CUT: f32 = 0.35;
/// How far boxes reach, in largest values of the entries.
const LIMIT: f32 = 1.3;
/// Boxes with no side longer than this many root mean squares are not split.
const SIDE: f32 = 0.75;
/// Difference of scores, in largest scores, that rounding cannot turn around: a score is made
/// of nine roundings of a part in 2^24.
const MARGIN: f32 = 1e-5;

/// Candidates by region.
#[derive(Clone, Debug)]
pub(super) struct CandidateRegions {
    cuts: [[f32; CUTS]; DIM],
    limit: f32,
    entries: Vec<CandidateEntry<DIM>>,
    /// Ascending in each region.
    candidates: Vec<u16>,
    /// Where those of a region end.
    ends: Vec<usize>,
}

/// A part of space.
#[derive(Clone, Copy)]
struct RegionBox {
    low: [f32; DIM],
    high: [f32; DIM],
}

impl CandidateRegions {
    /// None for codebooks that are searched as fast without.
    pub(super) fn new(book: &Codebook) -> Option<Self> {
        let entries = book.entries.as_chunks::<DIM>().0;
        if book.dim != DIM || !ENTRIES.contains(&entries.len()) {
            return None;
        }
        let moment = |channel: usize, power: i32| {
            let sum: f32 = entries.iter().map(|entry| entry[channel].powi(power)).sum();
            sum / entries.len() as f32
        };
        let spread = |channel| (moment(channel, 2) - moment(channel, 1).powi(2)).max(0.0).sqrt();
        let spreads: [f32; DIM] = std::array::from_fn(spread);
        let cuts = std::array::from_fn(|channel| {
            [-CUT, CUT].map(|cut| moment(channel, 1) + cut * spreads[channel])
        });
        let largest = book.entries.iter().fold(0f32, |most, x| most.max(x.abs()));
        let limit = LIMIT * largest;
        let side = SIDE * spreads.iter().fold(0f32, |most, x| most.max(*x));
        let norms = book.half_norms.iter().fold(0f32, |most, x| most.max(*x));
        let margin = MARGIN * (norms + DIM as f32 * limit * largest);
        if !(side > 0.0 && margin.is_finite()) {
            return None;
        }
        let all: Vec<u16> = (0..entries.len() as u16).collect();
        let (mut candidates, mut ends) = (Vec::new(), Vec::new());
        for region in 0..REGIONS - 1 {
            let within = region_box(region, &cuts, limit);
            let mut kept = vec![false; entries.len()];
            if let Some(within) = within {
                CandidatePruning { book, margin, side }.keep_nearest(within, &all, &mut kept);
            }
            candidates.extend(all.iter().filter(|entry| kept[usize::from(**entry)]));
            ends.push(candidates.len());
        }
        candidates.extend(&all);
        ends.push(candidates.len());
        let entries = book.candidates();
        Some(Self { cuts, limit, entries, candidates, ends })
    }

    /// As [`Codebook::find_nearest`] of consecutive points: fills in the entries.
    pub(super) fn find_nearest(&self, points: &[f32], codes: &mut [u16]) {
        dispatch_simd(RegionSearch { by: self, points: points.as_chunks().0, codes });
    }

    /// The candidates of a region.
    #[inline(always)]
    fn region_candidates(&self, region: usize) -> &[u16] {
        let start = region.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.candidates[start..self.ends[region]]
    }

    /// The region of each of [`BATCH_MAX`] points.
    #[inline(always)]
    fn locate_points<S: Simd>(
        &self,
        simd: S,
        x: &[[f32; BATCH_MAX]; DIM],
        placed: &mut [u32; BATCH_MAX],
    ) {
        let [none, one, three, last] = [0, 1, 3, REGIONS as u32 - 1].map(|x| simd.splat_u32s(x));
        let [least, most] = [-self.limit, self.limit].map(|limit| simd.splat_f32s(limit));
        for (register, to) in S::as_mut_simd_u32s(placed).0.iter_mut().enumerate() {
            let mut region = none;
            let mut beyond = none;
            for (x, [low, high]) in x.iter().zip(&self.cuts) {
                let x = S::as_simd_f32s(x).0[register];
                region = simd.mul_u32s(region, three);
                for cut in [low, high] {
                    let above = simd.less_than_f32s(simd.splat_f32s(*cut), x);
                    region = simd.add_u32s(region, simd.select_u32s(above, one, none));
                }
                let out = [simd.less_than_f32s(x, least), simd.less_than_f32s(most, x)];
                for out in out {
                    beyond = simd.select_u32s(out, one, beyond);
                }
            }
            let beyond = simd.equal_u32s(beyond, one);
            *to = simd.select_u32s(beyond, last, region);
        }
    }
}

/// The box of a region; none where a cut lies beyond the limit.
fn region_box(region: usize, cuts: &[[f32; CUTS]; DIM], limit: f32) -> Option<RegionBox> {
    let mut span = RegionBox { low: [-limit; DIM], high: [limit; DIM] };
    let mut rest = region;
    for channel in (0..DIM).rev() {
        let [low, high] = cuts[channel];
        match rest % 3 {
            0 => span.high[channel] = low,
            1 => (span.low[channel], span.high[channel]) = (low, high),
            _ => span.low[channel] = high,
        }
        rest /= 3;
    }
    let sound = span.low.iter().zip(&span.high).all(|(low, high)| low <= high);
    sound.then_some(span)
}

/// The inputs of a search for candidates.
struct CandidatePruning<'a> {
    book: &'a Codebook,
    margin: f32,
    side: f32,
}

impl CandidatePruning<'_> {
    /// Marks those of `among` that can be nearest within the box.
    fn keep_nearest(&self, span: RegionBox, among: &[u16], kept: &mut [bool]) {
        let RegionBox { low, high } = span;
        let centre: [f32; DIM] = std::array::from_fn(|c| low[c].midpoint(high[c]));
        let half: [f32; DIM] = std::array::from_fn(|c| (high[c] - low[c]) / 2.0);
        let entries = self.book.entries.as_chunks::<DIM>().0;
        let score = |entry: u16| {
            let (entry, norm) =
                (&entries[usize::from(entry)], self.book.half_norms[usize::from(entry)]);
            entry.iter().zip(&centre).fold(norm, |score, (e, x)| score - e * x)
        };
        let scores: Vec<f32> = among.iter().map(|entry| score(*entry)).collect();
        let best = (0..scores.len()).min_by(|a, b| scores[*a].total_cmp(&scores[*b]));
        let Some(best) = best else { return };
        let rival = &entries[usize::from(among[best])];
        let can_win = |(entry, score): (&u16, &f32)| {
            let entry = &entries[usize::from(*entry)];
            let sway: f32 = (0..DIM).map(|c| (entry[c] - rival[c]).abs() * half[c]).sum();
            score - scores[best] - sway <= self.margin
        };
        let left = among.iter().zip(&scores).filter(|pair| can_win(*pair));
        let left: Vec<u16> = left.map(|(entry, _)| *entry).collect();
        if left.iter().all(|entry| kept[usize::from(*entry)]) {
            return;
        }
        let longest = (0..DIM).max_by(|a, b| half[*a].total_cmp(&half[*b])).unwrap_or(0);
        if 2.0 * half[longest] <= self.side {
            left.iter().for_each(|entry| kept[usize::from(*entry)] = true);
            return;
        }
        let mut parts = [span; 2];
        parts[0].high[longest] = centre[longest];
        parts[1].low[longest] = centre[longest];
        parts.into_iter().for_each(|part| self.keep_nearest(part, &left, kept));
    }
}

/// [`CandidateRegions::find_nearest`].
struct RegionSearch<'a> {
    by: &'a CandidateRegions,
    points: &'a [[f32; DIM]],
    codes: &'a mut [u16],
}

impl WithSimd for RegionSearch<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { by, points, codes } = self;
        let (order, ends) = sort_by_region(simd, by, points);
        let (mut x, mut best) = ([[0f32; BATCH_MAX]; DIM], BestEntries::new());
        let mut near = [[0f32; DIM]; BATCH_MAX];
        let mut start = 0;
        for (region, end) in ends.into_iter().enumerate() {
            let candidates = by.region_candidates(region);
            for order in order[start..end].chunks(BATCH_MAX) {
                for (near, point) in near.iter_mut().zip(order) {
                    *near = points[*point as usize];
                }
                transpose_points(&near, &mut x);
                let tried = || candidates.iter().map(|entry| &by.entries[usize::from(*entry)]);
                scan_candidates(simd, tried, PointBatch { x: &x, filled: order.len() }, &mut best);
                for (point, at) in order.iter().zip(best.at) {
                    codes[*point as usize] = at as u16;
                }
            }
            start = end;
        }
    }
}

/// The points by region, and where those of each region end.
#[inline(always)]
fn sort_by_region<S: Simd>(
    simd: S,
    by: &CandidateRegions,
    points: &[[f32; DIM]],
) -> (Vec<u32>, [usize; REGIONS]) {
    let mut regions = vec![0u8; points.len()];
    let (mut x, mut placed) = ([[0f32; BATCH_MAX]; DIM], [0; BATCH_MAX]);
    let mut near = [[0f32; DIM]; BATCH_MAX];
    for (points, regions) in points.chunks(BATCH_MAX).zip(regions.chunks_mut(BATCH_MAX)) {
        near[..points.len()].copy_from_slice(points);
        transpose_points(points.first_chunk().unwrap_or(&near), &mut x);
        by.locate_points(simd, &x, &mut placed);
        for (region, placed) in regions.iter_mut().zip(placed) {
            *region = placed as u8;
        }
    }
    let mut starts = [0usize; REGIONS];
    for region in &regions {
        starts[usize::from(*region)] += 1;
    }
    let mut next = 0;
    for start in &mut starts {
        (*start, next) = (next, next + *start);
    }
    let mut order = vec![0u32; points.len()];
    for (point, region) in (0u32..).zip(&regions) {
        let place = &mut starts[usize::from(*region)];
        order[*place] = point;
        *place += 1;
    }
    // Each start has moved to the end of its region.
    (order, starts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantizer::nearest::SubVectors;
    use crate::random::SplitMix64;

    fn noise(count: usize, seed: u64, gain: f32) -> Vec<f32> {
        let mut rng = SplitMix64(seed);
        let mut draw = || (0..4).map(|_| rng.next_unit() as f32 - 0.5).sum::<f32>() * gain;
        (0..count).map(|_| draw()).collect()
    }

    /// 256 entries that lie as densely as points do: some rounds of means.
    fn trained_entries(points: &[f32]) -> Vec<f32> {
        let mut entries = points[..256 * DIM].to_vec();
        for _ in 0..10 {
            let book = Codebook::new(DIM, entries.clone());
            let mut sums = vec![(0f32, [0f32; DIM]); 256];
            book.find_nearest(SubVectors::consecutive(points, DIM), |index, entry, _| {
                let (count, sum) = &mut sums[entry];
                *count += 1.0;
                sum.iter_mut().zip(&points[index * DIM..]).for_each(|(sum, x)| *sum += x);
            });
            for (entry, (count, sum)) in entries.chunks_exact_mut(DIM).zip(&sums) {
                entry.iter_mut().zip(sum).for_each(|(x, sum)| *x = sum / count.max(1.0));
            }
        }
        entries
    }

    #[test]
    fn fewer_entries_give_the_same_ones() {
        let fitted = trained_entries(&noise(4 * 8192, 1, 1.7));
        let coarse: Vec<f32> = fitted.iter().map(|x| (x * 4.0).round() / 4.0).collect();
        for entries in [fitted, coarse, noise(4 * 100, 5, 1.0)] {
            let book = Codebook::new(DIM, entries);
            let regions = CandidateRegions::new(&book).expect("four channels, 64 entries or more");
            for (gain, seed) in [(1.7, 11), (0.3, 12), (9.0, 13)] {
                let mut points = noise(4 * 5003, seed, gain);
                // On the levels of the coarse entries there are ties.
                points[..8000].iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0);
                let mut codes = vec![0; 5003];
                regions.find_nearest(&points, &mut codes);
                book.find_nearest(SubVectors::consecutive(&points, DIM), |index, entry, _| {
                    assert_eq!(usize::from(codes[index]), entry, "point {index}");
                });
            }
        }
    }

    struct Sorted<'a>(&'a CandidateRegions, &'a [[f32; DIM]]);

    impl WithSimd for Sorted<'_> {
        type Output = (Vec<u32>, [usize; REGIONS]);

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            sort_by_region(simd, self.0, self.1)
        }
    }

    #[test]
    fn most_points_have_few_candidates() {
        let points = noise(4 * 8192, 1, 1.7);
        let book = Codebook::new(DIM, trained_entries(&points));
        let regions = CandidateRegions::new(&book).expect("four channels, 256 entries");
        let (_, ends) = dispatch_simd(Sorted(&regions, points.as_chunks().0));
        let counts = ends.iter().scan(0, |start, end| Some(end - std::mem::replace(start, *end)));
        let tried: usize =
            counts.enumerate().map(|(r, n)| n * regions.region_candidates(r).len()).sum();
        let mean = tried as f64 / 8192.0;
        assert!(mean < 80.0, "{mean} candidates for a point");
    }
}
