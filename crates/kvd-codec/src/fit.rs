//! Fits what a codec needs to samples of a model's K and V.

use crate::calibration::SideCalibration;
use crate::fit_bitalloc;
use crate::fit_grid::{self, GridHead};
use crate::fit_vq::VqFit;
use crate::gain;
use crate::outliers::InlierRows;
use crate::quantizer::polar::PairLayout;
use crate::rotation::RandomRotation;
use crate::transform::TransformStep;
use crate::{
    Calibration, CalibrationError, CodecError, CodecSpec, Quantizer, Samples, SideSpec, Transform,
    VqSpec, covariance,
};
use half::f16;
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
/// layers and heads too. Rows far beyond all others of their head ([`Samples::set_aside`]) are left
/// out or clipped. The same arguments give the same calibration.
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
    let mut parts: Vec<(Side, &SideSpec)> = Vec::new();
    for side in Side::BOTH {
        for variant in spec.side_specs(side) {
            variant
                .check_geometry(geometry, side)
                .map_err(|reason| Box::new(CodecError::InvalidCodec { side, reason }))?;
            let known = |(other, spec): &(Side, &SideSpec)| {
                *other == side && spec.fitted_text() == variant.fitted_text()
            };
            if variant.needs_calibration() && !parts.iter().any(known) {
                parts.push((side, variant));
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
    Ok(Calibration { geometry: geometry.clone(), seed, parts })
}

fn fit_side(
    geometry: &Geometry,
    (side, side_spec): (Side, &SideSpec),
    samples: &Samples,
    seed: u64,
    one_more: &mut dyn FnMut(),
) -> Result<SideCalibration, CalibrationError> {
    let mut fitted = SideCalibration::new(side, side_spec.fitted_text());
    let mut vq = match side_spec.quantizer {
        Quantizer::Vq(spec) => Some(VqFit::new(spec, geometry, side, seed)),
        _ => None,
    };
    let mut grid_heads = Vec::new();
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads as usize {
            let place = HeadIndex { layer, side, head };
            let dim = geometry.head_dim(side);
            let head = HeadFit::new(place, samples, dim)?;
            let head = head.fit_transforms(&side_spec.transforms, &mut fitted)?;
            if let Quantizer::Polar { group: None, .. } = side_spec.quantizer {
                let radii =
                    PairLayout::new(geometry.rope_pairing).largest_radii(&head.rows, head.dim);
                fitted.radius.extend(radii.ok_or_else(|| place.out_of_range())?);
            }
            if let Some(vq) = &mut vq {
                vq.add_head(place, &head.rows)?;
            }
            if side_spec.quantizer.fits_coefficients() {
                grid_heads.push(head.cross_fitted(&side_spec.transforms)?);
            }
            one_more();
        }
    }
    fitted.codebooks = vq.map(VqFit::into_codebooks);
    match side_spec.quantizer {
        Quantizer::Grid { rate } => {
            fitted.grid = Some(fit_grid::fit_grid(
                geometry,
                fit_grid::FittedGains { side, gains: &fitted.gain },
                rate,
                &grid_heads,
            )?);
        }
        Quantizer::BitAlloc { bits } => {
            let matrix_is_last =
                matches!(side_spec.transforms.last(), Some(Transform::Pca | Transform::QueryPca));
            let budget = fit_bitalloc::BitBudget { bits, permute: matrix_is_last };
            let allocated = fit_bitalloc::fit_bits(geometry, side, budget, &grid_heads)?;
            permute_rows(&mut fitted.matrix, geometry.head_dim(side), &allocated.orders);
            fitted.bitalloc = Some(allocated.tensors);
        }
        _ => {}
    }
    Ok(fitted)
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
struct HeadFit<'a> {
    place: HeadIndex,
    dim: usize,
    /// As sampled, but for rows far beyond all others.
    raw: Cow<'a, [f32]>,
    rows: Vec<f32>,
    /// Values of `rows` that transforms are fitted on: all but those held out, at the end.
    fitted: usize,
    /// Likewise; folded only where `qpca` looks at them.
    queries: Cow<'a, [f32]>,
    steps: Vec<TransformStep>,
    /// Step of the head's grid in relation to other heads, when the transforms decide it.
    weight: Option<f64>,
}

impl<'a> HeadFit<'a> {
    fn new(place: HeadIndex, samples: &'a Samples, dim: usize) -> Result<Self, CalibrationError> {
        let HeadIndex { layer, side, head } = place;
        let raw = samples.rows(LayerIndex(layer), side, head);
        if raw.is_empty() {
            return Err(CalibrationError::NoSamples { layer, side, head });
        }
        let queries = match side {
            Side::Key => InlierRows::new(samples.queries(LayerIndex(layer), head), dim).rows,
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
        Self { place, dim, raw, rows, fitted, queries, steps, weight: None }
    }

    fn fit_transforms(
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
            Transform::Hadamard => TransformStep::hadamard_blocks(dim),
            Transform::Rotate { seed } => TransformStep::Rotation(RandomRotation::new(dim, seed)),
            Transform::Smooth => {
                let factors = smooth_factors(rows, dim);
                fitted.smooth.extend_from_slice(&factors);
                TransformStep::scale_channels(factors)
            }
            Transform::Norm => {
                let factors = smooth_factors(rows, dim);
                fitted.norm.extend_from_slice(&factors);
                TransformStep::scale_channels(factors)
            }
            Transform::Gain => {
                let median = gain::median_length(&self.raw, dim);
                fitted.gain.push(median);
                gain::raise_short_rows(&self.raw, dim, median, &mut self.rows, &mut Vec::new());
                return Ok(());
            }
            Transform::Mean => {
                let mean = mean_row(rows, dim);
                fitted.mean.extend_from_slice(&mean);
                TransformStep::Offset { mean }
            }
            Transform::Pca => self.store_matrix(&covariance::principal_axes(rows, dim), fitted)?.0,
            Transform::QueryPca => {
                let axes = covariance::query_axes(rows, &self.folded_queries()?, dim);
                let (step, scale) = self.store_matrix(&axes, fitted)?;
                // In the space of `axes` queries have the same spread along every axis and in
                // every head: an equal step there gives scores of all heads equal noise.
                self.weight = Some(scale);
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

    /// The map as it is kept, in f16, and the power of two by which it was brought into range.
    fn store_matrix(
        &self,
        axes: &[f64],
        fitted: &mut SideCalibration,
    ) -> Result<(TransformStep, f64), CalibrationError> {
        let largest = axes.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        // From the exponent's bits: every platform's logarithm would round in its own way.
        let exponent = (largest.to_bits() >> 52) as i32 - 1023;
        let scale = 2f64.powi(-exponent);
        let kept: Vec<f16> = axes.iter().map(|x| f16::from_f64(x * scale)).collect();
        let step = TransformStep::from_matrix(self.dim, kept.iter().map(|x| x.to_f32()).collect());
        fitted.matrix.extend(kept);
        Ok((step.ok_or_else(|| self.place.out_of_range())?, scale))
    }

    /// The head's rows as rows to come will be: each mapped by transforms that were fitted on the
    /// other parts alone. The spreads and the rate that a grid is fitted to must be theirs; rows
    /// that axes were made from fit them better.
    fn cross_fitted(self, transforms: &[Transform]) -> Result<GridHead, CalibrationError> {
        let (place, dim) = (self.place, self.dim);
        let part = self.raw.len() / dim / FOLDS * dim;
        if part == 0 {
            return Ok(GridHead { coefficients: self.rows, weight: self.weight });
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
            // Both are powers of two, brought to one.
            let scale = self.weight.unwrap_or(1.0) / head.weight.unwrap_or(1.0);
            let held_out = &head.rows[fitted..];
            coefficients.extend(held_out.iter().map(|c| (f64::from(*c) * scale) as f32));
        }
        Ok(GridHead { coefficients, weight: self.weight })
    }
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
