//! How much each candidate costs on each layer and side, measured.
//!
//! The attention error of a candidate on one side, the other kept as it arrives, is measured on
//! clean rows, where layers do not disturb each other: one run gives all layers. What an error on
//! one layer and side does to the predictions is measured by one probe there, everything else
//! kept as it arrives. KL grows with the square of a small error, so that a candidate's cost is
//! the probe's KL times the ratio of their squared errors.

use super::assign::SlotChoice;
use crate::eval::WindowChoice;
use crate::fits::{FittedSides, one_side_codec, raw_side};
use crate::measure::{CodecRegistration, CodecRun, MeasureRig, PassageReference};
use anyhow::{Context, Result};
use kvd_codec::{CodecSpec, SideSpec, SpecOverride};
use kvd_core::Side;

/// Attention error and bits of one candidate on one layer and side.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MeasuredSide {
    pub(super) error: f64,
    pub(super) bits: f64,
}

/// State that the measurements share.
pub(super) struct SensitivityBench<'a> {
    pub(super) rig: &'a MeasureRig<'a>,
    pub(super) fits: &'a FittedSides,
    pub(super) reference: &'a PassageReference,
    pub(super) windows: WindowChoice,
    /// Runs so far: each needs a name of its own.
    pub(super) runs: usize,
}

impl SensitivityBench<'_> {
    async fn open_run(&mut self, label: &'static str, spec: CodecSpec) -> Result<CodecRun<'_>> {
        self.runs += 1;
        let spec = self.windows.apply_windows(spec);
        let artefact = self.fits.codec_artefact(&spec)?;
        let calibration = artefact.map_or_else(Default::default, |(c, _)| c.to_bytes().into());
        let (name, codec) = (format!("search.{}", self.runs), spec.to_string());
        CodecRun::open_run(self.rig, CodecRegistration { name, label, codec, calibration }).await
    }

    /// By layer: `candidate` on `side`, the other side as it arrives.
    pub(super) async fn measure_attention(
        &mut self,
        side: Side,
        candidate: &SideSpec,
    ) -> Result<Vec<MeasuredSide>> {
        let clean = &self.reference.clean;
        let mut run = self.open_run("candidates", one_side_codec(side, candidate.clone())).await?;
        let error = run.attention_error(clean).await?;
        run.close_run().await?;
        let layer = |layer: &crate::measure::LayerError| {
            let bits = if side == Side::Key { layer.key_bits } else { layer.value_bits };
            MeasuredSide { error: layer.codec, bits }
        };
        Ok(error.layers.iter().map(layer).collect())
    }

    /// KL when `probe` is on one layer's side and everything else as it arrives.
    pub(super) async fn measure_kl(
        &mut self,
        layer: u32,
        side: Side,
        probe: &SideSpec,
    ) -> Result<f64> {
        let layers = Some(layer..=layer);
        let place = SpecOverride { side, layers, heads: None, spec: probe.clone() };
        let spec = CodecSpec { overrides: vec![place], ..one_side_codec(side, raw_side()) };
        let reference = self.reference;
        let mut run = self.open_run("probes", spec).await?;
        let passages = run.run_passages(reference).await?;
        run.close_run().await?;
        Ok(passages.quality.kl_nats)
    }
}

/// The choices of one layer and side: `probe_kl` is what candidate `probe` does there.
pub(super) fn slot_choices(
    measured: &[MeasuredSide],
    probe: usize,
    probe_kl: f64,
) -> Result<Vec<SlotChoice>> {
    let base = measured.get(probe).context("the probe is not among the candidates")?.error.powi(2);
    let choice = |(candidate, m): (usize, &MeasuredSide)| {
        // A probe without any error says nothing of the others; their errors alone rank them.
        let weight = if base > 0.0 { probe_kl / base } else { 1.0 };
        SlotChoice { candidate, bits: m.bits, cost: weight * m.error.powi(2) }
    };
    Ok(measured.iter().enumerate().map(choice).collect())
}

/// The candidate nearest to the budget: its error is of the size that will be chosen.
pub(super) fn choose_probe(measured: &[Vec<MeasuredSide>], budget: f64) -> usize {
    let mean = |layers: &Vec<MeasuredSide>| {
        layers.iter().map(|m| m.bits).sum::<f64>() / layers.len().max(1) as f64
    };
    let off = |candidate: &usize| (mean(&measured[*candidate]) - budget).abs();
    (0..measured.len()).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_grows_with_the_square_of_the_error_from_the_probes() {
        let measured = [0.4, 0.2, 0.1].map(|error| MeasuredSide { error, bits: 1.0 / error });
        let costs: Vec<f64> =
            slot_choices(&measured, 1, 0.01).unwrap().iter().map(|choice| choice.cost).collect();
        for (cost, expected) in costs.iter().zip([0.04, 0.01, 0.0025]) {
            assert!((cost - expected).abs() < 1e-12, "{costs:?}");
        }
        assert!(slot_choices(&measured, 3, 0.01).is_err());
    }

    #[test]
    fn the_probe_is_the_candidate_nearest_to_the_budget() {
        let of = |bits| vec![MeasuredSide { error: 0.1, bits }; 2];
        let measured = [of(1.5), of(2.1), of(3.0)];
        assert_eq!([1.0, 2.2, 9.0].map(|budget| choose_probe(&measured, budget)), [0, 1, 2]);
    }
}
