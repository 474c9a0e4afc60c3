//! Seeded k-means: k-means++ start, Lloyd iterations, empty clusters moved to the worst points.
//! Tables of more than [`EXACT_MAX`] entries are fitted by cells (`kmeans_cells.rs`).
//!
//! Deterministic: the same points and seed give the same entries on every machine that rounds
//! f32 arithmetic as IEEE 754 says.

use crate::kmeans_cells;
use kvd_codec::Codebook;
use kvd_codec::fitting::{SplitMix64, SubVectors};

/// Lloyd iterations at most; assignments have usually settled before.
const ITERATIONS: usize = 25;

/// Entries up to which every point is compared with every entry in every iteration.
pub(crate) const EXACT_MAX: usize = 512;

/// Entries, and which of them each point belongs to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClusterFit {
    /// `[count, dim]`, most used first.
    pub(crate) entries: Vec<f32>,
    /// Per point.
    pub(crate) assigned: Vec<u32>,
}

/// `count` entries of `dim` channels for `points` (`[n, dim]`, `n >= 1`).
pub(crate) fn fit_clusters(
    points: &[f32],
    dim: usize,
    count: usize,
    rng: &mut SplitMix64,
) -> ClusterFit {
    if count > EXACT_MAX {
        return kmeans_cells::fit_clusters(points, dim, count, rng);
    }
    let entries = plus_plus(points, dim, count, rng);
    refine_clusters(points, dim, entries, ITERATIONS, |entries, found| {
        let book = Codebook::new(dim, entries.to_vec());
        book.find_nearest(SubVectors::consecutive(points, dim), found);
    })
}

/// Lloyd iterations from `entries` until nothing moves. `assign` reports for every point its
/// entry and `|entry|²/2 - x·entry`.
pub(crate) fn refine_clusters(
    points: &[f32],
    dim: usize,
    mut entries: Vec<f32>,
    iterations: usize,
    mut assign: impl FnMut(&[f32], &mut dyn FnMut(usize, usize, f32)),
) -> ClusterFit {
    let (n, count) = (points.len() / dim, entries.len() / dim);
    let mut assigned = vec![u32::MAX; n];
    let mut uses = vec![0u64; count];
    for iteration in 0..=iterations {
        let mut sums = vec![0f64; count * dim];
        let mut errors = vec![0f32; n];
        let mut moved = false;
        uses.fill(0);
        assign(&entries, &mut |index, nearest, score| {
            let point = &points[index * dim..][..dim];
            moved |= assigned[index] != nearest as u32;
            assigned[index] = nearest as u32;
            uses[nearest] += 1;
            errors[index] = 2.0 * score + point.iter().map(|x| x * x).sum::<f32>();
            for (sum, x) in sums[nearest * dim..][..dim].iter_mut().zip(point) {
                *sum += f64::from(*x);
            }
        });
        if !moved || iteration == iterations {
            break;
        }
        for (index, entry) in entries.chunks_exact_mut(dim).enumerate() {
            if uses[index] > 0 {
                for (value, sum) in entry.iter_mut().zip(&sums[index * dim..]) {
                    *value = (sum / uses[index] as f64) as f32;
                }
            }
        }
        reseed_unused(points, dim, &uses, &errors, &mut entries);
    }
    by_use(&entries, dim, assigned, &uses)
}

/// Brings the entries into the order of their use.
fn by_use(entries: &[f32], dim: usize, mut assigned: Vec<u32>, uses: &[u64]) -> ClusterFit {
    let mut order: Vec<usize> = (0..uses.len()).collect();
    order.sort_by_key(|index| (std::cmp::Reverse(uses[*index]), *index));
    let mut place = vec![0u32; uses.len()];
    for (new, old) in (0u32..).zip(&order) {
        place[*old] = new;
    }
    assigned.iter_mut().for_each(|index| *index = place[*index as usize]);
    let entries = order.iter().flat_map(|index| &entries[index * dim..][..dim]).copied().collect();
    ClusterFit { entries, assigned }
}

/// Starting entries, each drawn with a probability proportional to the squared distance from
/// those before it (Arthur and Vassilvitskii 2007).
pub(crate) fn plus_plus(
    points: &[f32],
    dim: usize,
    count: usize,
    rng: &mut SplitMix64,
) -> Vec<f32> {
    let n = points.len() / dim;
    // One array per channel, so that the distance loop runs over points in lanes.
    let channels: Vec<Vec<f32>> =
        (0..dim).map(|c| points.iter().skip(c).step_by(dim).copied().collect()).collect();
    let mut distance = vec![f32::INFINITY; n];
    let mut fresh = vec![0f32; n];
    let mut entries = Vec::with_capacity(count * dim);
    let mut pick = (rng.next_unit() * n as f64) as usize;
    loop {
        let entry = &points[pick * dim..][..dim];
        entries.extend_from_slice(entry);
        if entries.len() == count * dim {
            return entries;
        }
        fresh.fill(0.0);
        for (channel, value) in channels.iter().zip(entry) {
            for (fresh, x) in fresh.iter_mut().zip(channel) {
                *fresh += (x - value) * (x - value);
            }
        }
        for (distance, fresh) in distance.iter_mut().zip(&fresh) {
            *distance = if *fresh < *distance { *fresh } else { *distance };
        }
        pick = draw_weighted(&distance, rng);
    }
}

/// An index drawn in proportion to `weights`; any index when all are zero.
fn draw_weighted(weights: &[f32], rng: &mut SplitMix64) -> usize {
    // Sums of runs first: one pass that vectorizes, then one run to search.
    const RUN: usize = 256;
    let runs: Vec<f64> =
        weights.chunks(RUN).map(|run| f64::from(run.iter().sum::<f32>())).collect();
    let total: f64 = runs.iter().sum();
    let mut left = rng.next_unit() * total;
    if !(total > 0.0 && total.is_finite()) {
        return (rng.next_unit() * weights.len() as f64) as usize;
    }
    let mut run = 0;
    while run + 1 < runs.len() && left >= runs[run] {
        left -= runs[run];
        run += 1;
    }
    let start = run * RUN;
    let end = weights.len().min(start + RUN);
    for (index, weight) in weights[start..end].iter().enumerate() {
        left -= f64::from(*weight);
        if left < 0.0 {
            return start + index;
        }
    }
    end - 1
}

/// Moves entries that no point uses to the points that are served worst.
fn reseed_unused(points: &[f32], dim: usize, uses: &[u64], errors: &[f32], entries: &mut [f32]) {
    let empty: Vec<usize> = (0..uses.len()).filter(|index| uses[*index] == 0).collect();
    if empty.is_empty() {
        return;
    }
    let mut worst: Vec<usize> = (0..errors.len()).collect();
    worst.sort_by(|a, b| errors[*b].total_cmp(&errors[*a]).then(a.cmp(b)));
    for (entry, point) in empty.into_iter().zip(worst) {
        entries[entry * dim..][..dim].copy_from_slice(&points[point * dim..][..dim]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separated_clusters_are_found_and_ordered_by_use() {
        let mut rng = SplitMix64(1);
        let mut points = Vec::new();
        for (centre, size) in [(-10.0f32, 300), (0.0, 100), (10.0, 200)] {
            for _ in 0..size {
                points.extend([centre + rng.next_unit() as f32, -centre + rng.next_unit() as f32]);
            }
        }
        let fitted = fit_clusters(&points, 2, 3, &mut SplitMix64(5));
        let ClusterFit { entries, assigned } = &fitted;
        for (entry, centre) in entries.chunks(2).zip([-10.0f32, 10.0, 0.0]) {
            assert!((entry[0] - centre - 0.5).abs() < 0.2, "{entries:?}");
        }
        let uses = |entry| assigned.iter().filter(|a| **a == entry).count();
        assert_eq!([uses(0), uses(1), uses(2)], [300, 200, 100]);
        assert_eq!(fitted, fit_clusters(&points, 2, 3, &mut SplitMix64(5)));
    }

    #[test]
    fn fewer_distinct_points_than_entries_is_fine() {
        let entries = fit_clusters(&[1.0, 1.0, 1.0, 2.0], 1, 16, &mut SplitMix64(0)).entries;
        assert_eq!(entries.len(), 16);
        assert!(entries.contains(&1.0) && entries.contains(&2.0));
    }
}
