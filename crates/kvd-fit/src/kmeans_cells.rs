//! k-means for large tables: points and entries are sorted into cells, and a point is compared
//! with the entries of nearby cells only.
//!
//! 1. About `√count` coarse centres from k-means on at most [`COARSE_POINTS`] points.
//! 2. Every cell gets a share of the entries that grows with its total squared error `e` about
//!    its centre as `e^(d/(d+2))`, the density that high-resolution quantization asks for (Zador),
//!    and k-means++ draws them among the cell's points.
//! 3. Lloyd iterations; each point looks at the entries in the [`NEIGHBOURS`] cells nearest to
//!    its own. What encodes later compares with all entries: this only trains them.
//!
//! With 4096 entries that is a quarter of the comparisons, with 65536 a sixteenth.

use crate::kmeans::{self, ClusterFit};
use kvd_codec::Codebook;
use kvd_codec::fitting::{SplitMix64, SubVectors};
use std::ops::Range;

/// Points that coarse centres are fitted on.
const COARSE_POINTS: usize = 1 << 14;
/// Cells whose entries a point is compared with.
const NEIGHBOURS: usize = 16;
/// Lloyd iterations at most: from seeds in every cell, later ones gain less than a percent.
const ITERATIONS: usize = 12;

/// As [`kmeans::fit`], for `count` well above [`kmeans::EXACT_MAX`].
pub(crate) fn fit_clusters(
    points: &[f32],
    dim: usize,
    count: usize,
    rng: &mut SplitMix64,
) -> ClusterFit {
    let cells = CoarseCells::new(points, dim, count, rng);
    let entries = cells.seed_entries(points, count, rng);
    kmeans::refine_clusters(points, dim, entries, ITERATIONS, |entries, found| {
        cells.assign_points(points, entries, found);
    })
}

/// A partition of the points by coarse centres.
struct CoarseCells {
    dim: usize,
    coarse: Codebook,
    /// Points, those of one cell after those of another.
    members: Vec<u32>,
    /// Range of each cell in `members`.
    ranges: Vec<Range<usize>>,
    /// Squared errors of each cell's points about its centre.
    errors: Vec<f64>,
    /// The cells nearest to each, itself first.
    neighbours: Vec<Vec<usize>>,
}

impl CoarseCells {
    fn new(points: &[f32], dim: usize, count: usize, rng: &mut SplitMix64) -> Self {
        let n = points.len() / dim;
        let centres = 1 << (count.ilog2() / 2);
        let step = n.div_ceil(COARSE_POINTS).max(1);
        let some: Vec<f32> = points.chunks_exact(dim).step_by(step).flatten().copied().collect();
        let coarse = Codebook::new(dim, kmeans::fit_clusters(&some, dim, centres, rng).entries);
        let mut errors = vec![0f64; centres];
        let mut cell_of = vec![0usize; n];
        coarse.find_nearest(SubVectors::consecutive(points, dim), |index, cell, score| {
            let point = &points[index * dim..][..dim];
            let norm: f32 = point.iter().map(|x| x * x).sum();
            errors[cell] += f64::from((2.0 * score + norm).max(0.0));
            cell_of[index] = cell;
        });
        let (members, ranges) = sort_by_cell(&cell_of, centres);
        let neighbours = nearest_centres(&coarse);
        Self { dim, coarse, members, ranges, errors, neighbours }
    }

    /// The points of a cell, gathered.
    fn gather_points(&self, points: &[f32], cell: usize) -> Vec<f32> {
        let members = self.members[self.ranges[cell].clone()].iter();
        let dim = self.dim;
        members.flat_map(|point| &points[*point as usize * dim..][..dim]).copied().collect()
    }

    /// Starting entries.
    fn seed_entries(&self, points: &[f32], count: usize, rng: &mut SplitMix64) -> Vec<f32> {
        let sizes: Vec<usize> = self.ranges.iter().map(Range::len).collect();
        let power = self.dim as f64 / (self.dim as f64 + 2.0);
        let weights: Vec<f64> = self.errors.iter().map(|error| error.powf(power)).collect();
        let shares = split_count(&weights, &sizes, count);
        let mut entries = Vec::with_capacity(count * self.dim);
        for (cell, share) in shares.into_iter().enumerate() {
            if share > 0 {
                let points = self.gather_points(points, cell);
                entries.extend(kmeans::plus_plus(&points, self.dim, share, rng));
            }
        }
        entries
    }

    /// Reports for every point the nearest entry in nearby cells.
    fn assign_points(
        &self,
        points: &[f32],
        entries: &[f32],
        found: &mut dyn FnMut(usize, usize, f32),
    ) {
        let dim = self.dim;
        let mut homes = vec![Vec::new(); self.ranges.len()];
        self.coarse.find_nearest(SubVectors::consecutive(entries, dim), |entry, cell, _| {
            homes[cell].push(entry);
        });
        for (cell, neighbours) in self.neighbours.iter().enumerate() {
            let mut nearby: Vec<usize> = Vec::new();
            for neighbour in neighbours {
                // Past the usual number, to the first cell that has entries at all.
                if nearby.is_empty()
                    || neighbours[..NEIGHBOURS.min(neighbours.len())].contains(neighbour)
                {
                    nearby.extend(&homes[*neighbour]);
                }
            }
            nearby.sort_unstable();
            let values = nearby.iter().flat_map(|entry| &entries[entry * dim..][..dim]);
            let book = Codebook::new(dim, values.copied().collect());
            let members = &self.members[self.ranges[cell].clone()];
            let points = self.gather_points(points, cell);
            book.find_nearest(SubVectors::consecutive(&points, dim), |index, entry, score| {
                found(members[index] as usize, nearby[entry], score);
            });
        }
    }
}

/// Indices sorted by their cell, and where each cell's begin and end.
fn sort_by_cell(cell_of: &[usize], cells: usize) -> (Vec<u32>, Vec<Range<usize>>) {
    let mut ends = vec![0usize; cells];
    for cell in cell_of {
        ends[*cell] += 1;
    }
    let mut start = 0;
    let ranges: Vec<Range<usize>> = ends
        .into_iter()
        .map(|size| {
            start += size;
            start - size..start
        })
        .collect();
    let mut next: Vec<usize> = ranges.iter().map(|range| range.start).collect();
    let mut members = vec![0u32; cell_of.len()];
    for (index, cell) in (0u32..).zip(cell_of) {
        members[next[*cell]] = index;
        next[*cell] += 1;
    }
    (members, ranges)
}

/// For each centre all centres, nearest first.
fn nearest_centres(coarse: &Codebook) -> Vec<Vec<usize>> {
    let centres: Vec<&[f32]> = coarse.entries().chunks_exact(coarse.dim()).collect();
    let distance =
        |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum() };
    let sorted = |centre: &&[f32]| {
        let distances: Vec<f32> = centres.iter().map(|other| distance(centre, other)).collect();
        let mut order: Vec<usize> = (0..centres.len()).collect();
        order.sort_by(|a, b| distances[*a].total_cmp(&distances[*b]).then(a.cmp(b)));
        order
    };
    centres.iter().map(sorted).collect()
}

/// Splits `count` in proportion to `weights`, none above its size while others have room;
/// what is left over when all are full goes to the first that has points.
fn split_count(weights: &[f64], sizes: &[usize], count: usize) -> Vec<usize> {
    let mut shares = vec![0usize; weights.len()];
    let mut left = count;
    while left > 0 {
        let room = |cell: &usize| shares[*cell] < sizes[*cell];
        let open: Vec<usize> = (0..shares.len()).filter(room).collect();
        let total: f64 = open.iter().map(|cell| weights[*cell]).sum();
        if open.is_empty() {
            let first = sizes.iter().position(|size| *size > 0).unwrap_or(0);
            shares[first] += left;
            break;
        }
        let before = left;
        for cell in &open {
            let part = if total > 0.0 { weights[*cell] / total } else { 1.0 / open.len() as f64 };
            let wish = (before as f64 * part) as usize;
            let given = wish.min(sizes[*cell] - shares[*cell]).min(left);
            shares[*cell] += given;
            left -= given;
        }
        if left == before {
            // Less than one each: the heaviest first.
            let mut order = open;
            order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
            for cell in order.into_iter().take(left) {
                shares[cell] += 1;
                left -= 1;
            }
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = SplitMix64(seed);
        let mut draw = || (0..4).map(|_| rng.next_unit() as f32 - 0.5).sum::<f32>();
        (0..n).map(|_| draw()).collect()
    }

    fn error(points: &[f32], dim: usize, entries: &[f32]) -> f64 {
        let book = Codebook::new(dim, entries.to_vec());
        let mut sum = 0.0;
        book.find_nearest(SubVectors::consecutive(points, dim), |index, _, score| {
            let norm: f32 = points[index * dim..][..dim].iter().map(|x| x * x).sum();
            sum += f64::from(2.0 * score + norm);
        });
        sum
    }

    #[test]
    fn cells_do_nearly_as_well_as_comparing_everything() {
        let (dim, count) = (4, 1024);
        let points = noise(8192 * dim, 1);
        let fitted = fit_clusters(&points, dim, count, &mut SplitMix64(3));
        assert_eq!(fitted, fit_clusters(&points, dim, count, &mut SplitMix64(3)));
        let entries = kmeans::plus_plus(&points, dim, count, &mut SplitMix64(3));
        let exact = kmeans::refine_clusters(&points, dim, entries, ITERATIONS, |entries, found| {
            Codebook::new(dim, entries.to_vec())
                .find_nearest(SubVectors::consecutive(&points, dim), found);
        });
        let (ours, exact) =
            (error(&points, dim, &fitted.entries), error(&points, dim, &exact.entries));
        assert!(ours < 1.03 * exact, "{ours} against {exact}");
        let mut uses = vec![0; count];
        fitted.assigned.iter().for_each(|entry| uses[*entry as usize] += 1);
        assert!(uses.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn few_distinct_points_are_fine() {
        let points = [1.0f32, 2.0, 1.0, 2.0, 7.0];
        let entries = fit_clusters(&points, 1, 1024, &mut SplitMix64(0)).entries;
        assert_eq!(entries.len(), 1024);
        assert!(points.iter().all(|p| entries.contains(p)));
    }

    #[test]
    fn shares_add_up_and_keep_to_the_sizes() {
        assert_eq!(split_count(&[1.0, 1.0, 2.0], &[100, 100, 100], 8), [2, 2, 4]);
        assert_eq!(split_count(&[1.0, 9.0, 0.0], &[100, 5, 0], 10), [5, 5, 0]);
        assert_eq!(split_count(&[0.0, 0.0, 0.0], &[0, 4, 4], 3), [0, 2, 1]);
        assert_eq!(split_count(&[1.0, 1.0], &[0, 2], 7), [0, 7]);
    }
}
