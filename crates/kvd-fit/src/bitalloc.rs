//! Fits a side's bit allocation: widths, levels, scales and bounds
//! (`docs/adr/0006-bit-allocation.md`).

use crate::calibration::HeadFit;
use crate::grid::{GridHead, HeadSamples, layer_heads};
use crate::lloyd;
use crate::quantizer::{FitTarget, QuantizerFit};
use half::f16;
use kvd_codec::fitting::{
    BitAllocTensors, BitLevels, LEVELS, SideCalibration, WIDTH_MAX, levels_at, snap_to_levels,
};
use kvd_codec::{CalibrationError, Transform};
use kvd_core::Side;
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
        let dim = self.target.geometry.head_dim(self.target.side);
        let mut sides = [BitAllocSide::new(self.target, &self.heads)];
        let budget_bits = sides[0].budget_bits(self.bits);
        fit_widths(&mut sides, budget_bits);
        let [side] = sides;
        let allocated = side.into_tensors()?;
        allocated.permute_rows(&mut fitted.matrix, dim);
        fitted.bitalloc = Some(allocated.tensors);
        Ok(())
    }
}

/// The result of a fit: the tensors, and per head the order of its coefficients.
pub(crate) struct FittedBits {
    pub(crate) tensors: BitAllocTensors,
    /// Per head, the coefficient of the samples that becomes coefficient `i`.
    orders: Vec<Vec<usize>>,
}

impl FittedBits {
    /// Brings the rows of every head's matrix into its order; without matrices there is nothing to
    /// do.
    pub(crate) fn permute_rows(&self, matrices: &mut [f16], dim: usize) {
        for (matrix, order) in matrices.chunks_exact_mut(dim * dim).zip(&self.orders) {
            let rows = matrix.to_vec();
            for (row, from) in matrix.chunks_exact_mut(dim).zip(order) {
                row.copy_from_slice(&rows[from * dim..][..dim]);
            }
        }
    }
}

/// A layer's levels and their error of a unit variance, by width.
struct LayerLevels {
    values: Vec<f32>,
    distortions: [f64; WIDTH_MAX + 1],
}

/// A side whose widths are to be found.
pub(crate) struct BitAllocSide<'a> {
    side: Side,
    kv_heads: usize,
    dim: usize,
    /// Whether the fit may order a head's coefficients by spread.
    permute: bool,
    /// Those of layer 0, then those of layer 1 and so on.
    heads: Vec<HeadSamples<'a>>,
    spreads: Vec<Vec<f64>>,
    levels: Vec<LayerLevels>,
    widths: Vec<Vec<u8>>,
}

impl<'a> BitAllocSide<'a> {
    /// Where the last transform is a matrix, a head's widest coefficients come first.
    pub(crate) fn new(target: FitTarget<'_>, heads: &'a [GridHead]) -> Self {
        let FitTarget { geometry, side, transforms, .. } = target;
        let (dim, kv_heads) = (geometry.head_dim(side), geometry.kv_heads as usize);
        // Its rows can take any order.
        let permute = transforms.last().is_some_and(Transform::is_matrix);
        let heads: Vec<HeadSamples<'_>> =
            heads.chunks(kv_heads).flat_map(|layer| layer_heads(layer, dim)).collect();
        let spreads: Vec<Vec<f64>> = heads.iter().map(usable_spreads).collect();
        let widths = vec![vec![0; dim]; heads.len()];
        Self { side, kv_heads, dim, permute, heads, spreads, levels: Vec::new(), widths }
    }

    /// Bits of a row of every head at so many bits per coefficient.
    pub(crate) fn budget_bits(&self, bits: f32) -> f64 {
        f64::from(bits) * (self.dim * self.heads.len()) as f64
    }

    /// Heads over all layers.
    pub(crate) fn head_count(&self) -> usize {
        self.heads.len()
    }

    /// By head: by how much it may err, in relation to other heads.
    pub(crate) fn head_weights(&self) -> impl Iterator<Item = f64> {
        self.heads.iter().map(|head| head.weight)
    }

    /// Lets each head err by so many times as much as the fit of an even split does.
    pub(crate) fn scale_weights(&mut self, factors: &[f64]) {
        for (head, factor) in self.heads.iter_mut().zip(factors) {
            head.weight *= factor;
        }
    }

    /// By head: the mean squared error of a row under some tensors of this side, in squares of the
    /// head's weight. Widths of a layer err on all its coefficients alike.
    pub(crate) fn unit_errors(&self, tensors: &BitAllocTensors) -> Vec<f64> {
        let layers = self.heads.chunks(self.kv_heads).zip(self.spreads.chunks(self.kv_heads));
        let distortions: Vec<_> = layers
            .zip(tensors.levels.chunks_exact(LEVELS))
            .map(|((heads, spreads), levels)| {
                let points = sample_points(heads, spreads, |_, _| true);
                width_distortions(&points, levels)
            })
            .collect();
        let rows = tensors.widths.chunks_exact(self.dim).zip(tensors.scales.chunks_exact(self.dim));
        let heads = self.heads.iter().zip(rows).enumerate();
        let error = |(index, (head, (widths, scales))): (usize, (&HeadSamples<'_>, _))| {
            let (widths, scales): (&[u8], &[f32]) = (widths, scales);
            let distortions: &[f64; WIDTH_MAX + 1] = &distortions[index / self.kv_heads];
            let squares = widths.iter().zip(scales).map(|(width, scale)| {
                (f64::from(*scale) / head.weight).powi(2) * distortions[usize::from(*width)]
            });
            squares.sum()
        };
        heads.map(error).collect()
    }

    /// Levels of every layer before any coefficient has a width.
    fn begin_levels(&mut self) {
        let layers = self.heads.chunks(self.kv_heads).zip(self.spreads.chunks(self.kv_heads));
        self.levels = layers.map(|(heads, spreads)| train_levels(heads, spreads, None)).collect();
    }

    /// Levels of every layer for the widths that its coefficients have now.
    fn train_widths(&mut self) {
        let layers = self.heads.chunks(self.kv_heads).zip(self.spreads.chunks(self.kv_heads));
        let layers = layers.zip(self.widths.chunks(self.kv_heads)).zip(&mut self.levels);
        for (((heads, spreads), widths), levels) in layers {
            *levels = train_levels(heads, spreads, Some((widths, &*levels)));
        }
    }

    /// The tensors, if every scale and bound can be used.
    pub(crate) fn into_tensors(self) -> Result<FittedBits, CalibrationError> {
        let mut tensors = BitAllocTensors::default();
        let mut orders = Vec::new();
        for (index, widths) in self.widths.iter().enumerate() {
            let mut order: Vec<usize> = (0..self.dim).collect();
            if self.permute {
                order.sort_by_key(|i| std::cmp::Reverse(widths[*i]));
            }
            tensors.widths.extend(order.iter().map(|i| widths[*i]));
            tensors.scales.extend(order.iter().map(|i| self.spreads[index][*i] as f32));
            orders.push(order);
        }
        for layer in &self.levels {
            tensors.levels.extend(layer.values.iter().map(|x| f16::from_f32(*x)));
        }
        let bound = outlier_bound(&self.heads, &self.spreads, &self.widths, &self.levels);
        tensors.bounds = self.heads.iter().map(|head| (bound * head.weight) as f32).collect();
        let usable = |x: &f32| x.is_normal() && *x > 0.0 && x.recip().is_normal();
        let dims = tensors.scales.chunks(self.dim).zip(&tensors.bounds);
        match dims.into_iter().position(|(s, b)| !s.iter().chain([b]).all(usable)) {
            None => Ok(FittedBits { tensors, orders }),
            Some(index) => {
                let (layer, head) = ((index / self.kv_heads) as u32, index % self.kv_heads);
                Err(CalibrationError::OutOfRange { layer, side: self.side, head })
            }
        }
    }
}

/// Shares so many bits of a row of every head among the coefficients of some sides, and trains
/// their levels.
pub(crate) fn fit_widths(sides: &mut [BitAllocSide<'_>], budget_bits: f64) {
    sides.iter_mut().for_each(BitAllocSide::begin_levels);
    for _ in 0..ROUNDS {
        allocate_widths(sides, budget_bits as usize);
        sides.iter_mut().for_each(BitAllocSide::train_widths);
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
        snap_to_levels(&mut snapped);
        let error = lloyd::mean_squared_error(points, &snapped);
        if error <= distortions[width] * SNAPPED_MAX {
            table.copy_from_slice(&snapped);
            distortions[width] = error;
        }
    }
    LayerLevels { values, distortions }
}

/// The error of points under the levels of each width.
fn width_distortions(points: &[f32], levels: &[f16]) -> [f64; WIDTH_MAX + 1] {
    let mut distortions = [1.0; WIDTH_MAX + 1];
    for (width, distortion) in distortions.iter_mut().enumerate().skip(1) {
        let levels = &levels[levels_at(width)..][..1 << width];
        let levels: Vec<f32> = levels.iter().map(|level| level.to_f32()).collect();
        *distortion = lloyd::mean_squared_error(points, &levels);
    }
    distortions
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

/// A group of coefficients.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct GroupPlace {
    /// Index of the side.
    side: usize,
    /// Index of the head over all layers.
    head: usize,
    /// Index of the group in the head.
    group: usize,
}

/// One more bit for each coefficient of a group: how much distortion a bit saves. Ties go to the
/// lower place.
#[derive(Clone, Copy, PartialEq)]
struct BitGain {
    saved: f64,
    place: GroupPlace,
}

impl Eq for BitGain {}

impl PartialOrd for BitGain {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BitGain {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.saved.total_cmp(&other.saved).then(other.place.cmp(&self.place))
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

/// Widths by greedy reduction of the distortion, one for all coefficients of a group.
fn allocate_widths(sides: &mut [BitAllocSide<'_>], budget_bits: usize) {
    let groups: Vec<Vec<Vec<Vec<usize>>>> = sides
        .iter()
        .map(|side| {
            side.spreads.iter().map(|spreads| coefficient_groups(spreads, side.permute)).collect()
        })
        .collect();
    let gain = |sides: &[BitAllocSide<'_>], place: GroupPlace, width: usize| {
        let GroupPlace { side, head, group } = place;
        let (of_side, coefficients) = (&sides[side], &groups[side][head][group]);
        let distortions = &of_side.levels[head / of_side.kv_heads].distortions;
        let unit = |i: &usize| of_side.spreads[head][*i] / of_side.heads[head].weight;
        let squares: f64 = coefficients.iter().map(|i| unit(i) * unit(i)).sum();
        let saved = squares * (distortions[width] - distortions[width + 1]);
        BitGain { saved: saved / coefficients.len() as f64, place }
    };
    let mut heap = BinaryHeap::new();
    for (side, heads) in groups.iter().enumerate() {
        for (head, groups) in heads.iter().enumerate() {
            sides[side].widths[head].fill(0);
            let places = (0..groups.len()).map(|group| GroupPlace { side, head, group });
            heap.extend(places.map(|place| gain(sides, place, 0)));
        }
    }
    let mut budget = budget_bits;
    while let Some(BitGain { place, .. }) = heap.pop() {
        let coefficients = &groups[place.side][place.head][place.group];
        if coefficients.len() > budget {
            continue;
        }
        budget -= coefficients.len();
        let widths = &mut sides[place.side].widths[place.head];
        coefficients.iter().for_each(|i| widths[*i] += 1);
        let width = usize::from(widths[coefficients[0]]);
        if width < WIDTH_MAX {
            heap.push(gain(sides, place, width));
        }
    }
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
