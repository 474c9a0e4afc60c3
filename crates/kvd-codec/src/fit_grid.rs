//! Fits a side's grid: the step, with the classes and tables that come of it
//! (`docs/adr/0005-grid-codec.md`).

use crate::CalibrationError;
use crate::calibration::{GridTensors, SideCalibration};
use crate::fit::{FitTarget, HeadFit, QuantizerFit};
use crate::fit_classes::LayerClasses;
use crate::huffman::streams::{CHUNK_TOKENS, QUAD, STREAMS};
use crate::page::{HEADER_BYTES, PAGE_ALIGN};
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
pub(crate) struct GridHead {
    /// `[rows, dim]`.
    pub(crate) coefficients: Vec<f32>,
    /// Step in relation to other heads; none asks for the layer's root mean square.
    pub(crate) weight: Option<f64>,
    /// How many times as large the coefficients are as those of the axes themselves: the power of
    /// two of the head's stored matrices.
    pub(crate) scale: f64,
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
        fitted.grid = Some(fit_grid(geometry, gains, self.rate, &self.heads)?);
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

/// A side coded with one relative step.
struct GridTrial {
    tensors: GridTensors,
    /// Bits of all codes of the samples.
    bits: f64,
}

/// A side, and the median row lengths of its heads under `gain`; empty without.
#[derive(Clone, Copy)]
struct FittedGains<'a> {
    side: Side,
    gains: &'a [f32],
}

/// Finds the finest step at which the samples take at most `rate` bits per value, pages and
/// stream lengths counted. `heads` are those of layer 0, then those of layer 1 and so on.
fn fit_grid(
    geometry: &Geometry,
    fitted: FittedGains<'_>,
    rate: f32,
    heads: &[GridHead],
) -> Result<GridTensors, CalibrationError> {
    let FittedGains { side, gains } = fitted;
    let (dim, kv_heads) = (geometry.head_dim(side), geometry.kv_heads as usize);
    let heads: Vec<HeadSamples<'_>> =
        heads.chunks(kv_heads).flat_map(|layer| layer_heads(layer, dim)).collect();
    let values: usize = heads.iter().map(|head| head.rows.len() * dim).sum();
    let target =
        (f64::from(rate) - overhead_bits(geometry, side, !gains.is_empty())) * values as f64;
    let spread =
        |head: &HeadSamples<'_>| head.spreads.iter().fold(0f64, |a, b| a.max(*b)) / head.weight;
    let largest = heads.iter().map(spread).fold(0f64, f64::max);
    let largest = if largest > 0.0 { largest } else { 1.0 };
    let (mut fine, mut coarse) = (largest / FINEST, largest * COARSEST);
    let mut best = None;
    for _ in 0..HALVINGS {
        let middle = (fine * coarse).sqrt();
        let trial = try_step(side, &heads, kv_heads, middle);
        if trial.bits <= target {
            coarse = middle;
            best = Some(trial);
        } else {
            fine = middle;
        }
    }
    let best = best.unwrap_or_else(|| try_step(side, &heads, kv_heads, coarse));
    let usable = |step: &f32| step.is_normal() && *step > 0.0;
    match best.tensors.steps.iter().position(|step| !usable(step)) {
        None => Ok(best.tensors),
        Some(index) => {
            let (layer, head) = ((index / kv_heads) as u32, index % kv_heads);
            Err(CalibrationError::OutOfRange { layer, side, head })
        }
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
    let spreads: Vec<Vec<f64>> = heads.iter().map(|head| coefficient_spreads(head, dim)).collect();
    // Heads are compared as their rows are, not as their matrices happened to be stored.
    let pairs = heads.iter().zip(&spreads);
    let energy: f64 =
        pairs.flat_map(|(head, spreads)| spreads.iter().map(|s| (s / head.scale).powi(2))).sum();
    let rms = (energy / (dim * heads.len()) as f64).sqrt();
    let of_layer = if rms > 0.0 { rms } else { 1.0 };
    let mut bound = Vec::new();
    for (head, spreads) in heads.iter().zip(spreads) {
        // Whole quads: tokens that follow one another may share a symbol.
        let stride = (head.coefficients.len() / dim).div_ceil(ROWS_MAX).max(1);
        let quads = head.coefficients.chunks(dim * QUAD).step_by(stride);
        let rows = quads.flat_map(|quad| quad.chunks_exact(dim)).collect();
        bound.push(HeadSamples {
            rows,
            spreads,
            weight: head.weight.unwrap_or(of_layer * head.scale),
        });
    }
    bound
}

/// Root mean square of each coefficient.
fn coefficient_spreads(head: &GridHead, dim: usize) -> Vec<f64> {
    let mut sums = vec![0f64; dim];
    for row in head.coefficients.chunks_exact(dim) {
        for (sum, c) in sums.iter_mut().zip(row) {
            *sum += f64::from(*c) * f64::from(*c);
        }
    }
    let count = (head.coefficients.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count).sqrt()).collect()
}

/// Codes all samples with the steps `step * weight` and tables made for them.
fn try_step(side: Side, heads: &[HeadSamples<'_>], kv_heads: usize, step: f64) -> GridTrial {
    let mut tensors = GridTensors { steps: Vec::new(), classes: Vec::new(), tables: Vec::new() };
    let mut bits = 0.0;
    for layer in heads.chunks(kv_heads) {
        let mut coded = LayerClasses::new(side);
        for head in layer {
            let step = (step * head.weight) as f32;
            coded.count_rows(&head.rows, step, &head.spreads);
            tensors.steps.push(step);
        }
        bits += coded.assign_classes() as f64;
        coded.append_tensors(&mut tensors);
    }
    GridTrial { tensors, bits }
}
