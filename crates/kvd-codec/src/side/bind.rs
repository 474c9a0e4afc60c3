//! From a spec, a geometry and a calibration to a [`HeadSide`].

use super::{HeadQuantizer, HeadSide};
use crate::transform::Step;
use crate::{Calibration, CodecError, CodecSpec, FloatFormat, Quantizer, Transform};
use kvd_core::{Geometry, LayerIndex, Side};
use xxhash_rust::xxh3::Xxh3;

impl HeadSide {
    /// Binds one head of a validated spec.
    pub(crate) fn bind(
        geometry: &Geometry,
        spec: &CodecSpec,
        calibration: Option<&Calibration>,
        (layer, side, head): (LayerIndex, Side, usize),
    ) -> Result<Self, CodecError> {
        let dim = geometry.head_dim(side);
        let side_spec = spec.side(side);
        let invalid = |reason: String| CodecError::InvalidCodec { side, reason };
        let mut steps = Vec::new();
        for transform in &side_spec.transforms {
            match transform {
                Transform::Smooth => return Err(invalid("smooth is not built yet".to_owned())),
                Transform::Hadamard => steps.push(Step::hadamard(dim)),
            }
        }
        let quantizer = match side_spec.quantizer {
            Quantizer::Float(FloatFormat::E4M3) => HeadQuantizer::E4m3,
            Quantizer::Float(format) => {
                let dtype = format.dtype(geometry.dtype);
                HeadQuantizer::Float(dtype.expect("only fp8 has no dtype"))
            }
            _ => return Err(invalid("this quantizer is not built yet".to_owned())),
        };
        let _ = (calibration, layer, head);
        let mut hash = Xxh3::new();
        hash.update(side_spec.to_string().as_bytes());
        Ok(Self { dim, steps, quantizer, tag: hash.digest() as u16 })
    }
}
