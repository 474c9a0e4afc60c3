//! From a spec, a geometry and a calibration to a [`HeadCodec`].

use super::{HeadCodec, HeadQuantizer};
use crate::calibration::SideCalibration;
use crate::huffman::streams::StreamRun;
use crate::rotation::RandomRotation;
use crate::row_block::LayerSide;
use crate::transform::TransformStep;
use crate::{Calibration, CodecError, CodecSpec, SideSpec, Transform};
use kvd_core::{Geometry, LayerIndex, Side};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Which head is bound.
#[derive(Clone, Copy)]
pub(crate) struct HeadPlace {
    pub(crate) layer: LayerIndex,
    pub(crate) side: Side,
    pub(crate) head: usize,
}

/// One side of one layer that a quantizer is bound to.
#[derive(Clone, Copy)]
pub(crate) struct SideBinding<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) side: Side,
    pub(crate) layer: LayerIndex,
    /// The calibration's part, where the side takes anything from it.
    pub(crate) part: Option<&'a SideCalibration>,
    /// The geometry that the part was fitted for.
    pub(crate) fitted_for: Option<&'a Geometry>,
}

/// Makes the quantizer of a head from its index among all heads of the side, and adds to a hash
/// what it took from the calibration.
pub(crate) type HeadBinder<'a> =
    Box<dyn Fn(usize, &mut Xxh3) -> Result<Arc<dyn HeadQuantizer>, CodecError> + 'a>;

/// One variant of a side of one layer on its way to its heads.
struct SideBinder<'a> {
    binding: SideBinding<'a>,
    spec: &'a SideSpec,
    variant: usize,
    bind_quantizer: HeadBinder<'a>,
}

impl HeadCodec {
    /// Binds the heads of one side of one layer; every side's spec is valid.
    pub(crate) fn bind_heads(
        geometry: &Geometry,
        spec: &CodecSpec,
        calibration: Option<&Calibration>,
        place: LayerSide,
    ) -> Result<Vec<Self>, CodecError> {
        let LayerSide { layer, side } = place;
        let variants = spec.side_specs(side);
        let binders = variants.iter().enumerate().map(|(variant, side_spec)| {
            let of_head = |head| spec.side_at(side, layer, head) == *side_spec;
            if !(0..geometry.kv_heads as usize).any(of_head) {
                return Ok(None);
            }
            let part = match calibration {
                _ if !side_spec.needs_calibration() => None,
                None => return Err(CodecError::CalibrationMissing { spec: spec.to_string() }),
                Some(calibration) => {
                    check_shape(geometry, calibration.geometry())?;
                    Some(fitted_side(calibration, side_spec, side)?)
                }
            };
            let fitted_for = part.and(calibration).map(Calibration::geometry);
            let binding = SideBinding { geometry, side, layer, part, fitted_for };
            let bind_quantizer = side_spec.quantizer.as_spec().bind_side(binding)?;
            Ok(Some(SideBinder { binding, spec: side_spec, variant, bind_quantizer }))
        });
        let binders: Vec<Option<SideBinder<'_>>> = binders.collect::<Result<_, _>>()?;
        let bind = |head: usize| {
            let wanted = spec.side_at(side, layer, head);
            let binder = binders.iter().flatten().find(|binder| binder.spec == wanted);
            binder.expect("every variant of the layer has a binder").bind_head(head)
        };
        (0..geometry.kv_heads as usize).map(bind).collect()
    }
}

impl SideBinder<'_> {
    fn bind_head(&self, head: usize) -> Result<HeadCodec, CodecError> {
        let SideBinding { geometry, side, layer, .. } = self.binding;
        let dim = geometry.head_dim(side);
        let index = layer.0 as usize * geometry.kv_heads as usize + head;
        let mut hash = Xxh3::new();
        hash.update(self.spec.to_string().as_bytes());
        let steps = self.spec.transforms.iter().filter(|transform| **transform != Transform::Gain);
        let steps = steps.map(|transform| self.binding.bind_step(*transform, index, &mut hash));
        let steps = steps.collect::<Result<_, _>>()?;
        let gain = self.bind_gain(index, &mut hash)?;
        let quantizer = (self.bind_quantizer)(index, &mut hash)?;
        let (variant, trained_tables) = (self.variant, self.spec.has_trained_tables());
        let tag = hash.digest() as u16;
        let per_row = quantizer.code_shape(dim).per_row;
        let mut codec = HeadCodec {
            dim,
            steps,
            offset: None,
            gain,
            query_metric: self.spec.transforms.contains(&Transform::QueryPca),
            quantizer,
            variant,
            trained_tables,
            trained_run: StreamRun { table: 0, first: 0, len: per_row },
            rung: false,
            tag,
        };
        if self.spec.transforms.contains(&Transform::Mean) {
            let mut offset = vec![0.0; dim].into_boxed_slice();
            codec.unfold_value(&vec![0.0; dim], 1.0, &mut offset);
            codec.offset = Some(offset);
        }
        Ok(codec)
    }

    /// The median length of the head's rows, under `gain`.
    fn bind_gain(&self, index: usize, hash: &mut Xxh3) -> Result<Option<f32>, CodecError> {
        if !self.spec.transforms.contains(&Transform::Gain) {
            return Ok(None);
        }
        let median = self.binding.head_tensor(|part| &part.gain, index, 1, "median lengths")?[0];
        hash.update(&median.to_le_bytes());
        Ok(Some(median))
    }
}

impl<'a> SideBinding<'a> {
    fn bind_step(
        &self,
        transform: Transform,
        index: usize,
        hash: &mut Xxh3,
    ) -> Result<TransformStep, CodecError> {
        let dim = self.geometry.head_dim(self.side);
        match transform {
            Transform::Smooth => {
                let factors =
                    self.head_tensor(|part| &part.smooth, index, dim, "smoothing factors")?;
                factors.iter().for_each(|f| hash.update(&f.to_le_bytes()));
                Ok(TransformStep::scale_channels(factors.to_vec()))
            }
            Transform::Norm => {
                let factors = self.head_tensor(|part| &part.norm, index, dim, "norms")?;
                factors.iter().for_each(|f| hash.update(&f.to_le_bytes()));
                Ok(TransformStep::scale_channels(factors.to_vec()))
            }
            Transform::Gain => unreachable!("gain is no step"),
            Transform::Hadamard => Ok(TransformStep::hadamard_blocks(dim)),
            Transform::Rotate { seed } => {
                Ok(TransformStep::Rotation(RandomRotation::new(dim, seed)))
            }
            Transform::Mean => {
                let mean = self.head_tensor(|part| &part.mean, index, dim, "means")?;
                mean.iter().for_each(|m| hash.update(&m.to_le_bytes()));
                Ok(TransformStep::Offset { mean: mean.to_vec() })
            }
            _ => {
                debug_assert!(transform.is_matrix(), "{transform} has tensors of its own");
                let matrix = self.head_tensor(|part| &part.matrix, index, dim * dim, "matrices")?;
                matrix.iter().for_each(|m| hash.update(&m.to_le_bytes()));
                let step =
                    TransformStep::from_matrix(dim, matrix.iter().map(|m| m.to_f32()).collect());
                step.ok_or_else(|| {
                    mismatch_error(format!("a matrix of {} has no inverse", self.side))
                })
            }
        }
    }

    /// The head's part of a tensor, `len` values.
    pub(crate) fn head_tensor<T>(
        &self,
        tensor: impl Fn(&SideCalibration) -> &Vec<T>,
        index: usize,
        len: usize,
        what: &str,
    ) -> Result<&'a [T], CodecError> {
        let part = self.part.and_then(|part| tensor(part).get(index * len..(index + 1) * len));
        part.ok_or_else(|| mismatch_error(format!("{} has no {what}", self.side)))
    }
}

/// The calibration is not one for the codec.
pub(crate) fn mismatch_error(reason: String) -> CodecError {
    CodecError::CalibrationMismatch { reason }
}

/// Layers, heads and head sizes must agree; block size and dtype may differ.
fn check_shape(geometry: &Geometry, fitted: &Geometry) -> Result<(), CodecError> {
    if geometry.same_rows(fitted) {
        return Ok(());
    }
    let shape = |g: &Geometry| [g.layers, g.kv_heads, g.head_dim_k, g.head_dim_v];
    Err(mismatch_error(format!(
        "it was fitted for [layers, kv_heads, head_dim_k, head_dim_v] = {:?}, the model has {:?}",
        shape(fitted),
        shape(geometry)
    )))
}

/// The part that was fitted for this side.
fn fitted_side<'a>(
    calibration: &'a Calibration,
    spec: &SideSpec,
    side: Side,
) -> Result<&'a SideCalibration, CodecError> {
    let wanted = spec.fitted_text();
    calibration.find_side(side, &wanted).ok_or_else(|| {
        let held: Vec<String> =
            calibration.parts().map(|(side, fitted)| format!("{side}={fitted}")).collect();
        mismatch_error(format!("it was fitted for {}, not for {side}={wanted}", held.join("; ")))
    })
}
