//! The fit of each quantizer, in one table.

use crate::bitalloc::BitAllocFit;
use crate::calibration::HeadFit;
use crate::grid::GridFit;
use crate::polar::RadiusFit;
use crate::vq::VqFit;
use kvd_codec::fitting::SideCalibration;
use kvd_codec::{CalibrationError, Quantizer, Transform};
use kvd_core::{Geometry, Side};

/// The side of a model whose quantizer is fitted.
#[derive(Clone, Copy)]
pub(crate) struct FitTarget<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) side: Side,
    pub(crate) transforms: &'a [Transform],
    pub(crate) seed: u64,
}

/// Fits a quantizer to the coefficients of a side's heads.
pub(crate) trait QuantizerFit {
    /// Takes the next head: those of layer 0, then of layer 1 and so on.
    fn add_head(&mut self, head: HeadFit<'_>) -> Result<(), CalibrationError>;

    /// Stores what was fitted, once every head was added.
    fn store_tensors(self: Box<Self>, fitted: &mut SideCalibration)
    -> Result<(), CalibrationError>;
}

/// Starts a quantizer's fit to the coefficients of a side's heads; `None` where nothing is to be
/// fitted.
pub(crate) fn start_fit<'a>(
    quantizer: &Quantizer,
    target: FitTarget<'a>,
) -> Option<Box<dyn QuantizerFit + 'a>> {
    match quantizer {
        Quantizer::Vq(spec) => Some(Box::new(VqFit::new(*spec, target))),
        Quantizer::Grid(spec) => Some(Box::new(GridFit::new(target, spec.rate))),
        Quantizer::BitAlloc(spec) => Some(Box::new(BitAllocFit::new(target, spec.bits))),
        Quantizer::Polar(spec) if spec.group.is_none() => {
            Some(Box::new(RadiusFit::new(target.geometry.rope_pairing)))
        }
        Quantizer::Polar(_) | Quantizer::Float(_) | Quantizer::Uniform(_) | Quantizer::Lloyd(_) => {
            None
        }
    }
}
