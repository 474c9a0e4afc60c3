//! Fits a side's grid: the step, with the classes and tables that come of it
//! (`docs/adr/0005-grid-codec.md`).

use crate::calibration::HeadFit;
use crate::classes::LayerClasses;
use crate::quantizer::{FitTarget, QuantizerFit};
use kvd_codec::fitting::{GridTensors, QUAD, STREAMS, SideCalibration};
use kvd_codec::{CHUNK_TOKENS, CalibrationError, HEADER_BYTES, PAGE_ALIGN};
use kvd_core::{Geometry, Side};

/// Rows per head that are coded to find the step.
const ROWS_MAX: usize = 4096;
/// The step is searched between the largest spread over this, which leaves codes room for values
/// of 32 times that spread,
const FINEST: f64 = 1024.0;
/// and the largest spread times this,
const COARSEST: f64 = 32.0;
/// halving their ratio's logarithm so often.
const HALVINGS: u32 = 14;
/// Bytes lost at the end of a block's slot, on average: the store's granules are twice as long.
const SLOT_WASTE: usize = 32;

/// One head's samples in the space that is quantized.
#[derive(Clone, Debug)]
pub(crate) struct GridHead {
    /// `[rows, dim]`: those that are coded, about [`ROWS_MAX`].
    rows: Vec<f32>,
    /// Root mean square of each coefficient, over all samples.
    spreads: Vec<f64>,
    /// Step in relation to other heads; none asks for the layer's root mean square.
    weight: Option<f64>,
    /// How many times as large the coefficients are as those of the axes themselves: the power of
    /// two of the head's stored matrices.
    scale: f64,
}

/// How a head's coefficients compare with those of other heads.
pub(crate) struct HeadScale {
    /// As [`GridHead::weight`].
    pub(crate) weight: Option<f64>,
    /// As [`GridHead::scale`].
    pub(crate) scale: f64,
}

impl GridHead {
    /// Keeps whole quads of all samples (`[rows, dim]`): tokens that follow one another may share
    /// a symbol.
    pub(crate) fn new(coefficients: &[f32], dim: usize, scale: HeadScale) -> Self {
        let HeadScale { weight, scale } = scale;
        let stride = (coefficients.len() / dim).div_ceil(ROWS_MAX).max(1);
        let quads = coefficients.chunks(dim * QUAD).step_by(stride);
        let rows = quads.flatten().copied().collect();
        Self { rows, spreads: coefficient_spreads(coefficients, dim), weight, scale }
    }
}

/// The heads of a side on their way to a grid.
pub(crate) struct GridFit<'a> {
    target: FitTarget<'a>,
    /// Bits per value that pages should take.
    rate: f32,
    heads: Vec<GridHead>,
}

impl<'a> GridFit<'a> {
    pub(crate) fn new(target: FitTarget<'a>, rate: f32) -> Self {
        Self { target, rate, heads: Vec::new() }
    }
}

impl QuantizerFit for GridFit<'_> {
    fn add_head(&mut self, head: HeadFit<'_>) -> Result<(), CalibrationError> {
        self.heads.push(head.cross_fitted(self.target.transforms)?);
        Ok(())
    }

    fn store_tensors(
        self: Box<Self>,
        fitted: &mut SideCalibration,
    ) -> Result<(), CalibrationError> {
        let FitTarget { geometry, side, .. } = self.target;
        let gains = FittedGains { side, gains: &fitted.gain };
        fitted.grid = Some(GridSide::new(geometry, gains, &self.heads).fit_rate(self.rate)?);
        Ok(())
    }
}

/// A head's samples as the coder needs them.
pub(crate) struct HeadSamples<'a> {
    pub(crate) rows: Vec<&'a [f32]>,
    /// Root mean square of each coefficient.
    pub(crate) spreads: Vec<f64>,
    /// Error of the head's coefficients in relation to other heads.
    pub(crate) weight: f64,
}

/// A side coded with some steps.
pub(crate) struct GridTrial {
    pub(crate) tensors: GridTensors,
    /// Bits of all codes of the samples.
    bits: f64,
}

/// A side, and the median row lengths of its heads under `gain`; empty without.
#[derive(Clone, Copy)]
pub(crate) struct FittedGains<'a> {
    pub(crate) side: Side,
    pub(crate) gains: &'a [f32],
}

/// A side whose steps are to be found.
pub(crate) struct GridSide<'a> {
    side: Side,
    kv_heads: usize,
    dim: usize,
    /// Those of layer 0, then those of layer 1 and so on.
    heads: Vec<HeadSamples<'a>>,
    /// Bits per value of everything but codes and outliers.
    overhead: f64,
}

impl<'a> GridSide<'a> {
    pub(crate) fn new(geometry: &Geometry, fitted: FittedGains<'_>, heads: &'a [GridHead]) -> Self {
        let FittedGains { side, gains } = fitted;
        let (dim, kv_heads) = (geometry.head_dim(side), geometry.kv_heads as usize);
        let heads = heads.chunks(kv_heads).flat_map(|layer| layer_heads(layer, dim)).collect();
        let overhead = overhead_bits(geometry, side, !gains.is_empty());
        Self { side, kv_heads, dim, heads, overhead }
    }

    /// Values of the samples that are coded.
    fn value_count(&self) -> f64 {
        self.heads.iter().map(|head| head.rows.len() * self.dim).sum::<usize>() as f64
    }

    /// Finds the finest step at which the samples take at most `rate` bits per value, pages and
    /// stream lengths counted.
    pub(crate) fn fit_rate(&self, rate: f32) -> Result<GridTensors, CalibrationError> {
        let target = (f64::from(rate) - self.overhead) * self.value_count();
        let spread =
            |head: &HeadSamples<'_>| head.spreads.iter().fold(0f64, |a, b| a.max(*b)) / head.weight;
        let largest = self.heads.iter().map(spread).fold(0f64, f64::max);
        let largest = if largest > 0.0 { largest } else { 1.0 };
        let (mut fine, mut coarse) = (largest / FINEST, largest * COARSEST);
        let try_step = |step: f64| {
            self.try_steps(self.heads.iter().map(|head| (step * head.weight) as f32).collect())
        };
        let mut best = None;
        for _ in 0..HALVINGS {
            let middle = (fine * coarse).sqrt();
            let trial = try_step(middle);
            if trial.bits <= target {
                coarse = middle;
                best = Some(trial);
            } else {
                fine = middle;
            }
        }
        self.check_steps(best.unwrap_or_else(|| try_step(coarse)).tensors)
    }

    /// The tensors, if every step can be used.
    pub(crate) fn check_steps(
        &self,
        tensors: GridTensors,
    ) -> Result<GridTensors, CalibrationError> {
        let usable = |step: &f32| step.is_normal() && *step > 0.0;
        match tensors.steps.iter().position(|step| !usable(step)) {
            None => Ok(tensors),
            Some(index) => {
                let (layer, head) = ((index / self.kv_heads) as u32, index % self.kv_heads);
                Err(CalibrationError::OutOfRange { layer, side: self.side, head })
            }
        }
    }

    /// Codes all samples with one step per head and tables made for them.
    pub(crate) fn try_steps(&self, steps: Vec<f32>) -> GridTrial {
        let mut tensors = GridTensors { steps, classes: Vec::new(), tables: Vec::new() };
        let mut bits = 0.0;
        let layers = self.heads.chunks(self.kv_heads).enumerate();
        for (layer, heads) in layers {
            let mut coded = LayerClasses::new(self.side);
            for (head, step) in heads.iter().zip(&tensors.steps[layer * self.kv_heads..]) {
                coded.count_rows(&head.rows, *step, &head.spreads);
            }
            bits += coded.assign_classes() as f64;
            coded.append_tensors(&mut tensors);
        }
        GridTrial { tensors, bits }
    }

    /// Bits of a token over all layers and heads, everything counted.
    pub(crate) fn token_bits(&self, trial: &GridTrial) -> f64 {
        self.budget_bits(trial.bits / self.value_count() + self.overhead)
    }

    /// Bits of a token at so many bits per value.
    pub(crate) fn budget_bits(&self, per_value: f64) -> f64 {
        per_value * (self.dim * self.heads.len()) as f64
    }

    /// By head: mean over the samples of a row's squared error, in squares of the head's step.
    pub(crate) fn unit_errors(&self, steps: &[f32]) -> Vec<f64> {
        let error = |(head, step): (&HeadSamples<'_>, &f32)| {
            let step = f64::from(*step);
            let squares = head.rows.iter().flat_map(|row| row.iter()).map(|c| {
                let units = f64::from(*c) / step;
                (units - units.round_ties_even()).powi(2)
            });
            squares.sum::<f64>() / head.rows.len().max(1) as f64
        };
        self.heads.iter().zip(steps).map(error).collect()
    }
}

/// Bits that a stream has loaded and not used when a chunk ends, less the zeros that are left out.
const STREAM_WASTE: f64 = 12.0;

/// Bits of a row's gain.
const GAIN_BITS: f64 = 4.0;

/// Bits per value of everything but codes and outliers: page headers, gains, half the padding of
/// pages,
/// the slot of the block, and per chunk its lengths and what its streams leave over.
fn overhead_bits(geometry: &Geometry, side: Side, gains: bool) -> f64 {
    let dim = geometry.head_dim(side) as f64;
    let slot_share = SLOT_WASTE as f64 / f64::from(2 * geometry.kv_heads);
    let page = 8.0 * (HEADER_BYTES as f64 + PAGE_ALIGN as f64 / 2.0 + slot_share);
    let tokens = f64::from(geometry.block_tokens);
    let chunks = (tokens / CHUNK_TOKENS as f64).ceil();
    let chunk = 32.0 + STREAMS as f64 * STREAM_WASTE;
    let gains = if gains { GAIN_BITS } else { 0.0 };
    (page + chunks * chunk) / (tokens * dim) + gains / dim
}

pub(crate) fn layer_heads(heads: &[GridHead], dim: usize) -> Vec<HeadSamples<'_>> {
    let spreads: Vec<Vec<f64>> = heads.iter().map(|head| head.spreads.clone()).collect();
    // Heads are compared as their rows are, not as their matrices happened to be stored.
    let pairs = heads.iter().zip(&spreads);
    let energy: f64 =
        pairs.flat_map(|(head, spreads)| spreads.iter().map(|s| (s / head.scale).powi(2))).sum();
    let rms = (energy / (dim * heads.len()) as f64).sqrt();
    let of_layer = if rms > 0.0 { rms } else { 1.0 };
    let bound = heads.iter().zip(spreads).map(|(head, spreads)| HeadSamples {
        rows: head.rows.chunks_exact(dim).collect(),
        spreads,
        weight: head.weight.unwrap_or(of_layer * head.scale),
    });
    bound.collect()
}

/// Root mean square of each coefficient.
fn coefficient_spreads(coefficients: &[f32], dim: usize) -> Vec<f64> {
    let mut sums = vec![0f64; dim];
    for row in coefficients.chunks_exact(dim) {
        for (sum, c) in sums.iter_mut().zip(row) {
            *sum += f64::from(*c) * f64::from(*c);
        }
    }
    let count = (coefficients.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count).sqrt()).collect()
}
