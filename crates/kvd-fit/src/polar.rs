//! Fits the largest radii of `polar(..)`.

use crate::calibration::HeadFit;
use crate::quantizer::QuantizerFit;
use half::f16;
use kvd_codec::CalibrationError;
use kvd_codec::fitting::{PairLayout, SideCalibration};
use kvd_core::RopePairing;

/// Largest radii of the heads so far.
pub(crate) struct RadiusFit {
    pairs: PairLayout,
    radii: Vec<f16>,
}

impl RadiusFit {
    pub(crate) fn new(pairing: RopePairing) -> Self {
        Self { pairs: PairLayout(pairing), radii: Vec::new() }
    }
}

impl QuantizerFit for RadiusFit {
    fn add_head(&mut self, head: HeadFit<'_>) -> Result<(), CalibrationError> {
        let radii = self.pairs.largest_radii(&head.rows, head.dim);
        self.radii.extend(radii.ok_or_else(|| head.place.out_of_range())?);
        Ok(())
    }

    fn store_tensors(
        self: Box<Self>,
        fitted: &mut SideCalibration,
    ) -> Result<(), CalibrationError> {
        fitted.radius = self.radii;
        Ok(())
    }
}
