//! Fits a side's bit allocation: widths, levels, scales and bounds
//! (`docs/adr/0006-bit-allocation.md`).

use crate::calibration::{BitAllocTensors, SideCalibration};
use crate::fit::{FitTarget, HeadFit, QuantizerFit};
use crate::fit_grid::{GridHead, HeadSamples, layer_heads};
use crate::quantizer::bit_levels::{BitLevels, LEVELS, WIDTH_MAX, levels_at};
use crate::{CalibrationError, Transform, levels, lloyd};
use half::f16;
use kvd_core::{Geometry, Side};
use std::collections::BinaryHeap;

/// Coefficients of a layer that levels are trained on.
const POINTS_MAX: usize = 1 << 16;
/// Fewest coefficients of a width that make levels of their own.
const POINTS_MIN: usize = 1 << 12;
/// A width's levels move to what a byte holds where that raises their error by no more than this:
/// kernels then take a byte for them and lose nothing. Up to 16 levels it never does.
const SNAPPED_MAX: f64 = 1.03;
/// Rounds of allocating widths and training levels on the coefficients of each width.
const ROUNDS: usize = 3;
/// Coefficients of a side whose errors are looked at for the bound.
const BOUND_POINTS_MAX: usize = 1 << 23;
/// Coefficients that have one width. Their codes fill registers: kernels multiply them as they lie,
/// and no code of a run shares its register with another run's.
const GROUP: usize = 16;
/// Share of coefficients that may be outliers on the samples: 48 bits each, 0.003 bits per value.
const OUTLIERS: f64 = 1.0 / 16384.0;

/// The heads of a side on their way to a bit allocation.
pub(crate) struct BitAllocFit<'a> {
    target: FitTarget<'a>,
    /// Bits per coefficient.
    bits: f32,
    heads: Vec<GridHead>,
}

impl<'a> BitAllocFit<'a> {
    pub(crate) fn new(target: FitTarget<'a>, bits: f32) -> Self {
        Self { target, bits, heads: Vec::new() }
    }
}

impl QuantizerFit for BitAllocFit<'_> {
    fn add_head(&mut self, head: HeadFit<'_>) -> Result<(), CalibrationError> {
        self.heads.push(head.cross_fitted(self.target.transforms)?);
        Ok(())
    }

    fn store_tensors(
        self: Box<Self>,
        fitted: &mut SideCalibration,
    ) -> Result<(), CalibrationError> {
        let FitTarget { geometry, side, transforms, .. } = self.target;
        // Its rows can take any order.
        let permute = transforms.last().is_some_and(Transform::is_matrix);
        let budget = BitBudget { bits: self.bits, permute };
        let allocated = fit_bits(geometry, side, budget, &self.heads)?;
        permute_rows(&mut fitted.matrix, geometry.head_dim(side), &allocated.orders);
        fitted.bitalloc = Some(allocated.tensors);
        Ok(())
    }
}

/// Brings the rows of every head's matrix into its order; without matrices there is nothing to do.
fn permute_rows(matrices: &mut [f16], dim: usize, orders: &[Vec<usize>]) {
    for (matrix, order) in matrices.chunks_exact_mut(dim * dim).zip(orders) {
        let rows = matrix.to_vec();
        for (row, from) in matrix.chunks_exact_mut(dim).zip(order) {
            row.copy_from_slice(&rows[from * dim..][..dim]);
        }
    }
}

/// The result of a fit: the tensors, and per head the order of its coefficients.
struct FittedBits {
    tensors: BitAllocTensors,
    /// Per head, the coefficient of the samples that becomes coefficient `i`.
    orders: Vec<Vec<usize>>,
}

/// A layer's levels and their error of a unit variance, by width.
struct LayerLevels {
    values: Vec<f32>,
    distortions: [f64; WIDTH_MAX + 1],
}

/// The bits that a side may spend.
#[derive(Clone, Copy)]
struct BitBudget {
    /// Bits per coefficient.
    bits: f32,
    /// Whether the fit may order a head's coefficients by spread.
    permute: bool,
}

/// Allocates `bits` bits per coefficient over all heads of a side. `heads` are those of layer 0,
/// then those of layer 1 and so on; where `permute`, a head's widest coefficients come first.
fn fit_bits(
    geometry: &Geometry,
    side: Side,
    budget: BitBudget,
    heads: &[GridHead],
) -> Result<FittedBits, CalibrationError> {
    let BitBudget { bits, permute } = budget;
    let (dim, kv_heads) = (geometry.head_dim(side), geometry.kv_heads as usize);
    let heads: Vec<HeadSamples<'_>> =
        heads.chunks(kv_heads).flat_map(|layer| layer_heads(layer, dim)).collect();
    let spreads: Vec<Vec<f64>> = heads.iter().map(usable_spreads).collect();
    let mut levels: Vec<LayerLevels> = heads
        .chunks(kv_heads)
        .zip(spreads.chunks(kv_heads))
        .map(|(heads, spreads)| train_levels(heads, spreads, None))
        .collect();
    let mut widths = Vec::new();
    for _ in 0..ROUNDS {
        widths = allocate_widths(&heads, &spreads, &levels, BitBudget { bits, permute });
        let layers = heads.chunks(kv_heads).zip(spreads.chunks(kv_heads));
        let layers = layers.zip(widths.chunks(kv_heads)).zip(&mut levels);
        for (((heads, spreads), widths), levels) in layers {
            *levels = train_levels(heads, spreads, Some((widths, &*levels)));
        }
    }
    let mut tensors = BitAllocTensors::default();
    let mut orders = Vec::new();
    for (index, widths) in widths.iter().enumerate() {
        let mut order: Vec<usize> = (0..dim).collect();
        if permute {
            order.sort_by_key(|i| std::cmp::Reverse(widths[*i]));
        }
        tensors.widths.extend(order.iter().map(|i| widths[*i]));
        tensors.scales.extend(order.iter().map(|i| spreads[index][*i] as f32));
        orders.push(order);
    }
    for layer in &levels {
        tensors.levels.extend(layer.values.iter().map(|x| f16::from_f32(*x)));
    }
    let bound = outlier_bound(&heads, &spreads, &widths, &levels);
    tensors.bounds = heads.iter().map(|head| (bound * head.weight) as f32).collect();
    let usable = |x: &f32| x.is_normal() && *x > 0.0 && x.recip().is_normal();
    let dims = tensors.scales.chunks(dim).zip(&tensors.bounds);
    match dims.into_iter().position(|(s, b)| !s.iter().chain([b]).all(usable)) {
        None => Ok(FittedBits { tensors, orders }),
        Some(index) => {
            let (layer, head) = ((index / kv_heads) as u32, index % kv_heads);
            Err(CalibrationError::OutOfRange { layer, side, head })
        }
    }
}

/// A head's spreads, those far below its largest raised: a scale must have a reciprocal.
fn usable_spreads(head: &HeadSamples<'_>) -> Vec<f64> {
    let largest = head.spreads.iter().fold(0f64, |a, b| a.max(*b));
    let floor = if largest > 0.0 { largest * 1e-6 } else { head.weight };
    head.spreads.iter().map(|spread| spread.max(floor)).collect()
}

/// Trains a layer's levels on its coefficients over their spreads: those of the width, or all of
/// them where too few have it. The distortion of a width without coefficients of its own is that
/// of the levels before.
fn train_levels(
    heads: &[HeadSamples<'_>],
    spreads: &[Vec<f64>],
    before: Option<(&[Vec<u8>], &LayerLevels)>,
) -> LayerLevels {
    let all = sample_points(heads, spreads, |_, _| true);
    let mut values = vec![0f32; LEVELS];
    let mut distortions = [1.0; WIDTH_MAX + 1];
    for width in 1..=WIDTH_MAX {
        let own = before.map(|(widths, _)| {
            sample_points(heads, spreads, |head, i| usize::from(widths[head][i]) == width)
        });
        let table = &mut values[levels_at(width)..][..1 << width];
        let points = own.as_ref().filter(|own| own.len() >= POINTS_MIN).unwrap_or(&all);
        distortions[width] = lloyd::train_levels(points, table);
        let mut snapped = table.to_vec();
        levels::snap_to_levels(&mut snapped);
        let error = lloyd::mean_squared_error(points, &snapped);
        if error <= distortions[width] * SNAPPED_MAX {
            table.copy_from_slice(&snapped);
            distortions[width] = error;
        }
    }
    LayerLevels { values, distortions }
}

/// At most [`POINTS_MAX`] coefficients over their spread, in ascending order.
fn sample_points(
    heads: &[HeadSamples<'_>],
    spreads: &[Vec<f64>],
    takes: impl Fn(usize, usize) -> bool,
) -> Vec<f32> {
    let dim = spreads[0].len();
    let taken: Vec<(usize, usize)> = (0..heads.len())
        .flat_map(|head| (0..dim).map(move |i| (head, i)))
        .filter(|(head, i)| takes(*head, *i))
        .collect();
    let rows: usize = taken.iter().map(|(head, _)| heads[*head].rows.len()).sum();
    let stride = rows.div_ceil(POINTS_MAX).max(1);
    let mut points = Vec::new();
    for (nth, (head, i)) in taken.into_iter().enumerate() {
        // Another phase per coefficient, so that all rows have their turn.
        let rows = heads[head].rows.iter().skip(nth % stride).step_by(stride);
        points.extend(rows.map(|row| (f64::from(row[i]) / spreads[head][i]) as f32));
    }
    points.sort_by(f32::total_cmp);
    points
}

/// One more bit for each coefficient of a group: how much distortion a bit saves. Ties go to the
/// lower place.
#[derive(Clone, Copy, PartialEq)]
struct BitGain {
    saved: f64,
    head: usize,
    group: usize,
}

impl Eq for BitGain {}

impl PartialOrd for BitGain {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BitGain {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let place = |gain: &Self| std::cmp::Reverse((gain.head, gain.group));
        self.saved.total_cmp(&other.saved).then(place(self).cmp(&place(other)))
    }
}

/// The coefficients of each of a head's groups: those of like spread where the fit orders them.
fn coefficient_groups(spreads: &[f64], permute: bool) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..spreads.len()).collect();
    if permute {
        order.sort_by(|a, b| spreads[*b].total_cmp(&spreads[*a]));
    }
    order.chunks(GROUP).map(<[usize]>::to_vec).collect()
}

/// Widths by greedy reduction of the distortion, the same for all coefficients of a group.
fn allocate_widths(
    heads: &[HeadSamples<'_>],
    spreads: &[Vec<f64>],
    levels: &[LayerLevels],
    budget: BitBudget,
) -> Vec<Vec<u8>> {
    let BitBudget { bits, permute } = budget;
    let dim = spreads[0].len();
    let kv_heads = heads.len() / levels.len();
    let groups: Vec<_> =
        spreads.iter().map(|spreads| coefficient_groups(spreads, permute)).collect();
    let gain = |head: usize, group: usize, width: usize| {
        let distortions = &levels[head / kv_heads].distortions;
        let coefficients = &groups[head][group];
        let unit = |i: &usize| spreads[head][*i] / heads[head].weight;
        let squares: f64 = coefficients.iter().map(|i| unit(i) * unit(i)).sum();
        let saved = squares * (distortions[width] - distortions[width + 1]);
        BitGain { saved: saved / coefficients.len() as f64, head, group }
    };
    let mut widths = vec![vec![0u8; dim]; heads.len()];
    let mut budget = (f64::from(bits) * (dim * heads.len()) as f64) as usize;
    let all = groups.iter().enumerate();
    let all = all.flat_map(|(head, groups)| (0..groups.len()).map(move |group| (head, group)));
    let mut heap: BinaryHeap<BitGain> = all.map(|(head, group)| gain(head, group, 0)).collect();
    while let Some(BitGain { head, group, .. }) = heap.pop() {
        let coefficients = &groups[head][group];
        if coefficients.len() > budget {
            continue;
        }
        budget -= coefficients.len();
        coefficients.iter().for_each(|i| widths[head][*i] += 1);
        let width = usize::from(widths[head][coefficients[0]]);
        if width < WIDTH_MAX {
            heap.push(gain(head, group, width));
        }
    }
    widths
}

/// The error that at most [`OUTLIERS`] of the samples' coefficients exceed, in units of a head's
/// weight.
fn outlier_bound(
    heads: &[HeadSamples<'_>],
    spreads: &[Vec<f64>],
    widths: &[Vec<u8>],
    levels: &[LayerLevels],
) -> f64 {
    let kv_heads = heads.len() / levels.len();
    let coefficients: usize = heads.iter().map(|head| head.rows.len() * widths[0].len()).sum();
    let stride = coefficients.div_ceil(BOUND_POINTS_MAX).max(1);
    let mut errors = Vec::new();
    for (layer, levels) in levels.iter().enumerate() {
        let stored: Vec<f32> = levels.values.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        let levels = BitLevels::new(&stored);
        for head in layer * kv_heads..(layer + 1) * kv_heads {
            for row in heads[head].rows.iter().step_by(stride) {
                for (i, x) in row.iter().enumerate() {
                    let (width, scale) = (usize::from(widths[head][i]), spreads[head][i] as f32);
                    let level = levels.level_value(width, levels.nearest_code(width, x / scale));
                    errors.push((x - level * scale).abs() / heads[head].weight as f32);
                }
            }
        }
    }
    let exceeding = (errors.len() as f64 * OUTLIERS) as usize;
    let place = errors.len() - 1 - exceeding;
    let (_, bound, _) = errors.select_nth_unstable_by(place, f32::total_cmp);
    // Heads without spread have no error to go by.
    if *bound > 0.0 { f64::from(*bound) } else { 1e-3 }
}
