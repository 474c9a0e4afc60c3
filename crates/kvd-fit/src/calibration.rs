//! Fits what a codec needs to samples of a model's K and V.

use crate::covariance;
use crate::grid::{GridHead, HeadScale};
use crate::outliers::InlierRows;
use crate::quantizer::{FitTarget, start_fit};
use crate::repeats::VariedRows;
use crate::row_block::RowBlock;
use crate::{SampleKind, Samples};
use half::f16;
use kvd_codec::fitting::{FittedStep, SideCalibration, median_length, raise_short_rows};
use kvd_codec::{
    Calibration, CalibrationError, CodecError, CodecSpec, SideSpec, Transform, VqSpec,
};
use kvd_core::{Geometry, LayerIndex, Side};
use std::borrow::Cow;

/// Under a grid or a bit allocation, rows are mapped by transforms of other rows, in so many parts.
const FOLDS: usize = 4;

/// How far a fit has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitProgress {
    /// Heads fitted so far, of both sides.
    pub done: usize,
    /// Heads to fit.
    pub total: usize,
}

/// Fits, in the order of the transforms, what each side (and each override) needs to `samples`:
/// smoothing factors (VecInfer eq. 4, InnerQ §4.3: `sqrt(max |x_i|)`, 1 for a channel of zeros),
/// means, principal axes, and in the space after them codebooks (k-means, one per scope and
/// stage), largest radii (PolarQuant §3.2) or grids (one step for the whole side, weighted per
/// head, so that the samples take the rate asked for). The side of an override is fitted over all
/// layers and heads too. Rows far beyond all others of their head, and copies where those are many
/// ([`Samples::set_aside`]), are left out or clipped. The same arguments give the same calibration.
///
/// # Errors
/// When the codec does not fit the geometry, the samples belong to another one, a head has none
/// (or no queries for `qpca`), or a value leaves the range in which it is kept.
pub fn fit_calibration(
    geometry: &Geometry,
    spec: &CodecSpec,
    samples: &Samples,
    seed: u64,
    progress: &mut dyn FnMut(FitProgress),
) -> Result<Calibration, CalibrationError> {
    geometry.validate_fields().map_err(|error| Box::new(CodecError::Geometry(error)))?;
    if !geometry.same_rows(samples.geometry()) {
        return Err(CalibrationError::Shape(
            "the samples have a different geometry than the model".to_owned(),
        ));
    }
    let heads = geometry.layers as usize * geometry.kv_heads as usize;
    let mut parts: Vec<FittedPart<'_>> = Vec::new();
    for side in Side::BOTH {
        for variant in spec.side_specs(side) {
            variant
                .check_geometry(geometry, side)
                .map_err(|reason| Box::new(CodecError::InvalidCodec { side, reason }))?;
            let known = |part: &FittedPart<'_>| {
                part.side == side && part.spec.fitted_text() == variant.fitted_text()
            };
            if variant.needs_calibration() && !parts.iter().any(known) {
                parts.push(FittedPart { side, spec: variant });
            }
        }
    }
    let mut state = FitProgress { done: 0, total: parts.len() * heads };
    let mut one_more = || {
        state.done += 1;
        progress(state);
    };
    let parts = parts.into_iter();
    let parts = parts.map(|part| fit_side(geometry, part, samples, seed, &mut one_more));
    let parts = parts.collect::<Result<_, _>>()?;
    Ok(Calibration::from_parts(geometry, seed, parts))
}

/// A side that is to be fitted.
#[derive(Clone, Copy)]
struct FittedPart<'a> {
    side: Side,
    spec: &'a SideSpec,
}

fn fit_side(
    geometry: &Geometry,
    part: FittedPart<'_>,
    samples: &Samples,
    seed: u64,
    one_more: &mut dyn FnMut(),
) -> Result<SideCalibration, CalibrationError> {
    let FittedPart { side, spec: side_spec } = part;
    let mut fitted = SideCalibration::new(side, side_spec.fitted_text());
    let transforms = &side_spec.transforms[..];
    let target = FitTarget { geometry, side, transforms, seed };
    let mut quantizer = start_fit(&side_spec.quantizer, target);
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads as usize {
            let place = HeadIndex { layer, side, head };
            let head = HeadFit::new(place, samples, transforms)?;
            let head = head.fit_transforms(transforms, &mut fitted)?;
            if let Some(quantizer) = &mut quantizer {
                quantizer.add_head(head)?;
            }
            one_more();
        }
    }
    if let Some(quantizer) = quantizer {
        quantizer.store_tensors(&mut fitted)?;
    }
    Ok(fitted)
}

/// The head that is being fitted.
#[derive(Clone, Copy)]
pub(crate) struct HeadIndex {
    pub(crate) layer: u32,
    pub(crate) side: Side,
    pub(crate) head: usize,
}

impl HeadIndex {
    pub(crate) fn out_of_range(self) -> CalibrationError {
        let Self { layer, side, head } = self;
        CalibrationError::OutOfRange { layer, side, head }
    }

    /// `found` sub-vectors are fewer than the entries that they should give.
    pub(crate) fn too_few_samples(self, vq: &VqSpec, found: usize) -> CalibrationError {
        let Self { layer, side, head } = self;
        let (vq, entries) = (vq.to_string(), vq.entry_count());
        CalibrationError::TooFewSamples { layer, side, head, vq, entries, found }
    }
}

/// Samples of one head on their way through its transforms.
pub(crate) struct HeadFit<'a> {
    pub(crate) place: HeadIndex,
    pub(crate) dim: usize,
    /// As sampled, but for copies and rows far beyond all others.
    raw: Cow<'a, [f32]>,
    pub(crate) rows: Vec<f32>,
    /// Values of `rows` that transforms are fitted on: all but those held out, at the end.
    fitted: usize,
    /// Likewise: queries of keys; under `sveig` values by what their keys score. Mapped only where
    /// a transform looks at them.
    queries: Cow<'a, [f32]>,
    steps: Vec<FittedStep>,
    /// Step of the head's grid in relation to other heads, when the transforms decide it.
    weight: Option<f64>,
    /// The power of two by which stored matrices make coefficients larger than the axes do.
    scale: f64,
}

impl<'a> HeadFit<'a> {
    pub(crate) fn new(
        place: HeadIndex,
        samples: &'a Samples,
        transforms: &[Transform],
    ) -> Result<Self, CalibrationError> {
        let HeadIndex { layer, side, head } = place;
        let dim = samples.geometry().head_dim(side);
        let kind = SampleKind::of_side(side);
        let raw = samples.varied_rows(LayerIndex(layer), kind, head).rows;
        if raw.is_empty() {
            return Err(CalibrationError::NoSamples { layer, side, head });
        }
        let queries = match side {
            Side::Key => inlier_queries(samples, layer, head),
            Side::Value if transforms.contains(&Transform::ScoredAxes) => {
                let scored = scored_values(samples, layer, head)?;
                InlierRows::new(scored, dim).rows
            }
            Side::Value => Cow::Borrowed(&[][..]),
        };
        let raw = InlierRows::new(raw, dim).rows;
        let fitted = raw.len();
        Ok(Self::of_rows(place, dim, raw, fitted, queries))
    }

    fn of_rows(
        place: HeadIndex,
        dim: usize,
        raw: Cow<'a, [f32]>,
        fitted: usize,
        queries: Cow<'a, [f32]>,
    ) -> Self {
        let (rows, steps) = (raw.to_vec(), Vec::new());
        Self { place, dim, raw, rows, fitted, queries, steps, weight: None, scale: 1.0 }
    }

    pub(crate) fn fit_transforms(
        mut self,
        transforms: &[Transform],
        fitted: &mut SideCalibration,
    ) -> Result<Self, CalibrationError> {
        for transform in transforms {
            self.fit_transform(*transform, fitted)?;
        }
        Ok(self)
    }

    /// Fits one transform, maps the rows through it and keeps its parameters.
    fn fit_transform(
        &mut self,
        transform: Transform,
        fitted: &mut SideCalibration,
    ) -> Result<(), CalibrationError> {
        let (dim, rows) = (self.dim, &self.rows[..self.fitted]);
        let step = match transform {
            Transform::Hadamard => FittedStep::hadamard_blocks(dim),
            Transform::Rotate { seed } => FittedStep::random_rotation(dim, seed),
            Transform::Smooth => {
                let factors = smooth_factors(rows, dim);
                fitted.smooth.extend_from_slice(&factors);
                FittedStep::scale_channels(factors)
            }
            Transform::Norm => {
                let factors = smooth_factors(rows, dim);
                fitted.norm.extend_from_slice(&factors);
                FittedStep::scale_channels(factors)
            }
            Transform::Gain => {
                let median = median_length(&self.raw, dim);
                fitted.gain.push(median);
                raise_short_rows(&self.raw, dim, median, &mut self.rows, &mut Vec::new());
                return Ok(());
            }
            Transform::Mean => {
                let mean = mean_row(rows, dim);
                fitted.mean.extend_from_slice(&mean);
                FittedStep::offset_by(mean)
            }
            Transform::Pca => self.store_matrix(&covariance::principal_axes(rows, dim), fitted)?,
            Transform::QueryAxes => {
                let axes = covariance::principal_axes(&self.folded_queries()?, dim);
                self.store_matrix(&axes, fitted)?
            }
            Transform::ScoredAxes => {
                let mut scored = self.queries.to_vec();
                // Linear, as no step before it takes a mean.
                self.steps.iter().for_each(|step| step.transform_rows(&mut scored, dim));
                self.store_matrix(&covariance::principal_axes(&scored, dim), fitted)?
            }
            Transform::QueryPca => {
                let axes = covariance::query_axes(rows, &self.folded_queries()?, dim);
                let before = self.scale;
                let step = self.store_matrix(&axes, fitted)?;
                // In the space of `axes` queries have the same spread along every axis and in
                // every head: an equal step there gives scores of all heads equal noise.
                self.weight = Some(self.scale / before);
                step
            }
        };
        step.transform_rows(&mut self.rows, dim);
        if !self.rows.iter().all(|x| x.is_finite()) {
            return Err(self.place.out_of_range());
        }
        self.steps.push(step);
        Ok(())
    }

    /// The samples' queries as they meet the rows after the steps so far.
    fn folded_queries(&self) -> Result<Vec<f32>, CalibrationError> {
        let HeadIndex { layer, side, head } = self.place;
        if self.queries.is_empty() {
            return Err(CalibrationError::NoQueries { layer, head });
        }
        let mut queries = self.queries.to_vec();
        for query in queries.chunks_exact_mut(self.dim) {
            for step in &self.steps {
                // The constant that folding adds to a score is equal for every key.
                step.fold_query(query);
            }
        }
        if queries.iter().all(|x| x.is_finite()) {
            return Ok(queries);
        }
        Err(CalibrationError::OutOfRange { layer, side, head })
    }

    /// The map as it is kept, in f16 and brought into range by a power of two.
    fn store_matrix(
        &mut self,
        axes: &[f64],
        fitted: &mut SideCalibration,
    ) -> Result<FittedStep, CalibrationError> {
        let largest = axes.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        // From the exponent's bits: every platform's logarithm would round in its own way.
        let exponent = (largest.to_bits() >> 52) as i32 - 1023;
        let scale = 2f64.powi(-exponent);
        let kept: Vec<f16> = axes.iter().map(|x| f16::from_f64(x * scale)).collect();
        let step = FittedStep::from_matrix(self.dim, kept.iter().map(|x| x.to_f32()).collect());
        fitted.matrix.extend(kept);
        self.scale *= scale;
        step.ok_or_else(|| self.place.out_of_range())
    }

    /// The head's rows as rows to come will be: each mapped by transforms that were fitted on the
    /// other parts alone. The spreads and the rate that a grid is fitted to must be theirs; rows
    /// that axes were made from fit them better.
    pub(crate) fn cross_fitted(
        self,
        transforms: &[Transform],
    ) -> Result<GridHead, CalibrationError> {
        let (place, dim) = (self.place, self.dim);
        let part = self.raw.len() / dim / FOLDS * dim;
        if part == 0 {
            let Self { rows, weight, scale, .. } = self;
            return Ok(GridHead::new(&rows, dim, HeadScale { weight, scale }));
        }
        let mut coefficients = Vec::with_capacity(self.raw.len());
        for fold in 0..FOLDS {
            let start = fold * part;
            let end = if fold + 1 == FOLDS { self.raw.len() } else { start + part };
            let raw = [&self.raw[..start], &self.raw[end..], &self.raw[start..end]].concat();
            let fitted = self.raw.len() - (end - start);
            let queries = Cow::Borrowed(&*self.queries);
            let head = HeadFit::of_rows(place, dim, Cow::Owned(raw), fitted, queries);
            let mut unused = SideCalibration::new(place.side, String::new());
            let head = head.fit_transforms(transforms, &mut unused)?;
            // Matrices of a fold may be stored at another power of two than the head's.
            let scale = self.scale / head.scale;
            let held_out = &head.rows[fitted..];
            coefficients.extend(held_out.iter().map(|c| (f64::from(*c) * scale) as f32));
        }
        let scale = HeadScale { weight: self.weight, scale: self.scale };
        Ok(GridHead::new(&coefficients, dim, scale))
    }
}

fn inlier_queries(samples: &Samples, layer: u32, head: usize) -> Cow<'_, [f32]> {
    let dim = samples.geometry().head_dim(Side::Key);
    let varied = samples.varied_rows(LayerIndex(layer), SampleKind::Queries, head);
    InlierRows::new(varied.rows, dim).rows
}

/// The values of a head, each by what the queries make of its key.
fn scored_values(samples: &Samples, layer: u32, head: usize) -> Result<Vec<f32>, CalibrationError> {
    let rows = |side| samples.rows(LayerIndex(layer), side, head);
    let [key_dim, value_dim] = Side::BOTH.map(|side| samples.geometry().head_dim(side));
    let (keys, values) = (rows(Side::Key), rows(Side::Value));
    let queries = inlier_queries(samples, layer, head);
    if queries.is_empty() {
        return Err(CalibrationError::NoQueries { layer, head });
    }
    if keys.len() / key_dim != values.len() / value_dim {
        return Err(CalibrationError::Shape(format!(
            "layer {layer} head {head} has other tokens in its keys than in its values"
        )));
    }
    let kept = samples.varied_tokens(LayerIndex(layer), head);
    let keys = VariedRows::of_rows(keys, key_dim, kept.as_deref()).rows;
    let values = VariedRows::of_rows(values, value_dim, kept.as_deref()).rows;
    let keys = RowBlock { rows: &keys, dim: key_dim };
    Ok(covariance::weigh_values(keys, &queries, RowBlock { rows: &values, dim: value_dim }))
}

fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sum = vec![0f64; dim];
    for row in rows.chunks_exact(dim) {
        for (sum, x) in sum.iter_mut().zip(row) {
            *sum += f64::from(*x);
        }
    }
    let count = (rows.len() / dim) as f64;
    sum.into_iter().map(|sum| (sum / count) as f32).collect()
}

fn smooth_factors(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut largest = vec![0f32; dim];
    for row in rows.chunks_exact(dim) {
        for (largest, x) in largest.iter_mut().zip(row) {
            *largest = largest.max(x.abs());
        }
    }
    largest.into_iter().map(|x| if x > 0.0 { x.sqrt() } else { 1.0 }).collect()
}
