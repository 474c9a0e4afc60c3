//! From a spec, a geometry and a calibration to a [`HeadSide`].

use super::uniform::Uniform;
use super::vq::Codebook;
use super::{HeadQuantizer, HeadSide};
use crate::calibration::SideCalibration;
use crate::transform::Step;
use crate::{Calibration, CodecError, CodecSpec, FloatFormat, Quantizer, Transform};
use kvd_core::{Geometry, LayerIndex, Side};
use xxhash_rust::xxh3::Xxh3;

/// Which head is bound.
#[derive(Clone, Copy)]
pub(crate) struct HeadPlace {
    pub(crate) layer: LayerIndex,
    pub(crate) side: Side,
    pub(crate) head: usize,
}

impl HeadSide {
    /// Binds one head of a validated spec.
    pub(crate) fn bind(
        geometry: &Geometry,
        spec: &CodecSpec,
        calibration: Option<&Calibration>,
        place: HeadPlace,
    ) -> Result<Self, CodecError> {
        let (side, dim) = (place.side, geometry.head_dim(place.side));
        let side_spec = spec.side(side);
        let part = match calibration {
            _ if !side_spec.needs_calibration() => None,
            None => return Err(CodecError::CalibrationMissing { spec: spec.to_string() }),
            Some(calibration) => {
                check_shape(geometry, calibration.geometry())?;
                Some(calibration.side(side))
            }
        };
        let index = place.layer.0 as usize * geometry.kv_heads as usize + place.head;
        let mut hash = Xxh3::new();
        hash.update(side_spec.to_string().as_bytes());
        let mut steps = Vec::new();
        for transform in &side_spec.transforms {
            steps.push(match transform {
                Transform::Smooth => {
                    let factors = smooth(part, side_spec.transforms_text(), side, index, dim)?;
                    factors.iter().for_each(|f| hash.update(&f.to_le_bytes()));
                    Step::scale(factors)
                }
                Transform::Hadamard => Step::hadamard(dim),
            });
        }
        let quantizer = match side_spec.quantizer {
            Quantizer::Float(FloatFormat::E4M3) => HeadQuantizer::E4m3,
            Quantizer::Float(format) => {
                let dtype = format.dtype(geometry.dtype);
                HeadQuantizer::Float(dtype.expect("only fp8 has no dtype"))
            }
            Quantizer::Uniform { step, axis, group } => {
                let levels = side_spec.quantizer.alphabet().expect("uniform has codes");
                HeadQuantizer::Uniform(Uniform::new(step, axis, group, (levels - 1) as u16))
            }
            Quantizer::Vq { dim: sub, bits } => {
                let sub = usize::from(sub);
                if !dim.is_multiple_of(sub) {
                    let reason = format!("vq d={sub} does not divide the head size {dim}");
                    return Err(CodecError::InvalidCodec { side, reason });
                }
                let text = side_spec.transforms_text();
                let entries = codebook(part, text, side, index, (1 << bits, sub))?;
                entries.iter().for_each(|v| hash.update(&v.to_le_bytes()));
                HeadQuantizer::Vq(Codebook::new(sub, entries))
            }
        };
        Ok(Self { dim, steps, quantizer, tag: hash.digest() as u16 })
    }
}

fn mismatch(reason: String) -> CodecError {
    CodecError::CalibrationMismatch { reason }
}

/// Layers, heads and head sizes must agree; block size and dtype may differ.
fn check_shape(geometry: &Geometry, fitted: &Geometry) -> Result<(), CodecError> {
    let shape = |g: &Geometry| [g.layers, g.kv_heads, g.head_dim_k, g.head_dim_v];
    if shape(geometry) == shape(fitted) {
        return Ok(());
    }
    Err(mismatch(format!(
        "it was fitted for [layers, kv_heads, head_dim_k, head_dim_v] = {:?}, the model has {:?}",
        shape(fitted),
        shape(geometry)
    )))
}

/// The side's part, if it was fitted in the space of the same transforms.
fn fitted<'a>(
    part: Option<&'a SideCalibration>,
    transforms: &str,
    side: Side,
) -> Result<&'a SideCalibration, CodecError> {
    let part = part.expect("the caller checked that a calibration is there");
    if part.transforms != transforms {
        let text = format!("{side} was fitted after {:?}, not {transforms:?}", part.transforms);
        return Err(mismatch(text));
    }
    Ok(part)
}

fn smooth(
    part: Option<&SideCalibration>,
    transforms: String,
    side: Side,
    index: usize,
    dim: usize,
) -> Result<Vec<f32>, CodecError> {
    let factors = &fitted(part, &transforms, side)?.smooth;
    match factors.get(index * dim..(index + 1) * dim) {
        Some(factors) => Ok(factors.to_vec()),
        None => Err(mismatch(format!("{side} has no smoothing factors"))),
    }
}

fn codebook(
    part: Option<&SideCalibration>,
    transforms: String,
    side: Side,
    index: usize,
    (entries, dim): (usize, usize),
) -> Result<Vec<f32>, CodecError> {
    let Some(books) = &fitted(part, &transforms, side)?.codebooks else {
        return Err(mismatch(format!("{side} has no codebooks")));
    };
    if (books.entries, books.dim) != (entries, dim) {
        let text = format!(
            "{side} has codebooks of {} entries of {} channels, the codec wants {entries} of {dim}",
            books.entries, books.dim
        );
        return Err(mismatch(text));
    }
    let values = &books.values[index * entries * dim..][..entries * dim];
    Ok(values.iter().map(|v| v.to_f32()).collect())
}
