//! Fits what a codec needs to samples of a model's K and V.

use crate::calibration::{Codebooks, SideCalibration};
use crate::kmeans::{self, Rng};
use crate::transform::Step;
use crate::{Calibration, CalibrationError, CodecError, CodecSpec, Quantizer, Samples, Transform};
use half::f16;
use kvd_core::{Geometry, LayerIndex, Side};

/// Sub-vectors per head that k-means looks at.
const POINTS_MAX: usize = 1 << 16;

/// How far a fit has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitProgress {
    /// Heads fitted so far, of both sides.
    pub done: usize,
    /// Heads to fit.
    pub total: usize,
}

/// Fits smoothing factors (VecInfer eq. 4: `sqrt(max |x_i|)`, 1 for a channel of zeros) and
/// codebooks (k-means in the transformed space, one per layer, side and head) to `samples`.
/// The same arguments give the same calibration.
///
/// # Errors
/// When the codec does not fit the geometry, the samples belong to another one, a head has none,
/// or an entry leaves the range of f16.
pub fn fit(
    geometry: &Geometry,
    spec: &CodecSpec,
    samples: &Samples,
    seed: u64,
    progress: &mut dyn FnMut(FitProgress),
) -> Result<Calibration, CalibrationError> {
    geometry.validate().map_err(|error| Box::new(CodecError::Geometry(error)))?;
    let shape = |g: &Geometry| [g.layers, g.kv_heads, g.head_dim_k, g.head_dim_v];
    if shape(samples.geometry()) != shape(geometry) {
        return Err(CalibrationError::Shape("the samples have another geometry".to_owned()));
    }
    let heads = geometry.layers as usize * geometry.kv_heads as usize;
    let sides = Side::BOTH.into_iter().filter(|side| spec.side(*side).needs_calibration());
    let mut state = FitProgress { done: 0, total: sides.count() * heads };
    let mut one_more = || {
        state.done += 1;
        progress(state);
    };
    let mut fit_side = |side| fit_side(geometry, spec, samples, seed, side, &mut one_more);
    let sides = [fit_side(Side::Key)?, fit_side(Side::Value)?];
    Ok(Calibration { geometry: geometry.clone(), spec: spec.to_string(), seed, sides })
}

fn fit_side(
    geometry: &Geometry,
    spec: &CodecSpec,
    samples: &Samples,
    seed: u64,
    side: Side,
    one_more: &mut dyn FnMut(),
) -> Result<SideCalibration, CalibrationError> {
    let side_spec = spec.side(side);
    let dim = geometry.head_dim(side);
    let mut fitted =
        SideCalibration { transforms: side_spec.transforms_text(), ..SideCalibration::default() };
    let invalid = |reason| Box::new(CodecError::InvalidCodec { side, reason });
    side_spec.validate().map_err(invalid)?;
    if !side_spec.needs_calibration() {
        return Ok(fitted);
    }
    if let Quantizer::Vq { dim: sub, bits } = side_spec.quantizer {
        let sub = usize::from(sub);
        if !dim.is_multiple_of(sub) {
            let reason = format!("vq d={sub} does not divide the head size {dim}");
            return Err(invalid(reason).into());
        }
        fitted.codebooks = Some(Codebooks { dim: sub, entries: 1 << bits, values: Vec::new() });
    }
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads as usize {
            let mut rows = samples.rows(LayerIndex(layer), side, head).to_vec();
            if rows.is_empty() {
                return Err(CalibrationError::NoSamples { layer, side, head });
            }
            transform(&side_spec.transforms, dim, &mut rows, &mut fitted.smooth);
            if let Some(books) = &mut fitted.codebooks {
                let place = u64::from(layer) << 32 | (head as u64) << 1 | side.index() as u64;
                // Hashed through the generator, so that neighbouring heads do not share draws.
                let mut rng = Rng(Rng(seed).next() ^ place.wrapping_mul(0xA24B_AED4_963E_E407));
                let points = subsample(&rows, books.dim, &mut rng);
                let entries = kmeans::fit(&points, books.dim, books.entries, &mut rng);
                let limit = f16::MAX.to_f32();
                if !entries.iter().all(|v| v.abs() <= limit) {
                    return Err(CalibrationError::OutOfRange { layer, side, head });
                }
                books.values.extend(entries.iter().map(|v| f16::from_f32(*v)));
            }
            one_more();
        }
    }
    Ok(fitted)
}

/// Maps `rows` into coefficient space in place; appends the factors of a `smooth` on the way.
fn transform(transforms: &[Transform], dim: usize, rows: &mut [f32], smooth: &mut Vec<f32>) {
    for transform in transforms {
        let step = match transform {
            Transform::Hadamard => Step::hadamard(dim),
            Transform::Smooth => {
                let factors = smooth_factors(rows, dim);
                smooth.extend_from_slice(&factors);
                Step::scale(factors)
            }
        };
        for row in rows.chunks_exact_mut(dim) {
            step.forward(row);
        }
    }
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

/// At most [`POINTS_MAX`] sub-vectors, one drawn from each of as many equal stretches.
fn subsample(rows: &[f32], dim: usize, rng: &mut Rng) -> Vec<f32> {
    let n = rows.len() / dim;
    if n <= POINTS_MAX {
        return rows.to_vec();
    }
    let stretch = n as f64 / POINTS_MAX as f64;
    let pick = |i: usize| (((i as f64 + rng.unit()) * stretch) as usize).min(n - 1);
    let picks = (0..POINTS_MAX).map(pick);
    picks.flat_map(|i| &rows[i * dim..][..dim]).copied().collect()
}
