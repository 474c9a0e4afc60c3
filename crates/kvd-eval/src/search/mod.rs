//! `kvd eval --search`: the best side for every layer within a budget of bits, as a policy file.

mod assign;
mod policy;
mod sensitivity;

use crate::eval::{
    CalibrationSource, EvalCodec, EvalOptions, EvalReport, EvalSession, WindowChoice,
    evaluate_codecs,
};
use crate::fits::FittedSides;
use crate::measure::{MeasureRig, PassageReference};
use crate::samples;
use crate::split::CodecFits;
use anyhow::{Context, Result, ensure};
use assign::SlotChoice;
use kvd_codec::{Calibration, CodecSpec, SideSpec};
use kvd_core::Side;
use sensitivity::{MeasuredSide, SensitivityBench};
use serde::Serialize;

/// Options of a search.
#[derive(Clone, Debug)]
pub struct SearchOptions {
    /// Bits per value of packed blocks, mean over layers, keys and values.
    pub budget_bits: f64,
    /// Codecs whose key and value sides each layer may get.
    pub candidates: Vec<EvalCodec>,
    /// Windows of the policy and of every measurement.
    pub windows: WindowChoice,
}

impl SearchOptions {
    /// The family of our own presets at finer rates, under sink 32 and recent 96.
    #[must_use]
    pub fn new(budget_bits: f64) -> Self {
        let rates = ["1", "1.5", "2", "2.5", "3", "3.5", "4", "5"];
        let candidate = |rate: &str| {
            let text = format!(
                "k=mean+qpca/grid(rate={rate})/huffman; v=mean+gain+pca/grid(rate={rate})/huffman"
            );
            text.parse().ok()
        };
        Self {
            budget_bits,
            candidates: rates.into_iter().filter_map(candidate).collect(),
            windows: WindowChoice::Same { sink: 32, recent: 96 },
        }
    }
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct FoundPolicy {
    /// The policy.
    pub spec: CodecSpec,
    /// Its file, as `--codec @FILE` reads it.
    pub policy: String,
    /// Its artefact; none when no side needs one.
    pub artefact: Option<Calibration>,
    /// For programs.
    pub report: SearchReport,
}

/// How a policy was found.
#[derive(Clone, Debug, Serialize)]
pub struct SearchReport {
    /// Bits per value asked for.
    pub budget_bits: f64,
    /// Bits per value on the text of the search.
    pub bits: f64,
    /// Sum of the costs: KL expected on that text, in nats.
    pub expected_kl_nats: f64,
    /// Layer by layer, keys first.
    pub slots: Vec<SlotReport>,
}

/// The spec that a search gave one layer and side.
#[derive(Clone, Debug, Serialize)]
pub struct SlotReport {
    /// Layer.
    pub layer: usize,
    /// `k` or `v`.
    pub side: String,
    /// The side spec.
    pub spec: String,
    /// Bits per value there.
    pub bits: f64,
    /// Attention error that it alone makes there.
    pub attention_error: f64,
    /// KL expected from it alone, in nats.
    pub expected_kl_nats: f64,
}

/// Finds a policy on a window of the calibration text that no fit sees, then evaluates the codecs
/// of `options` and the policy, which comes last in every block.
///
/// # Errors
/// As [`crate::eval::run`], and when the budget is below what the candidates take.
pub async fn run_search(
    options: &EvalOptions,
    search: &SearchOptions,
) -> Result<(FoundPolicy, EvalReport)> {
    ensure!(!search.candidates.is_empty(), "no candidate to search among");
    ensure!(options.calibration.is_none(), "a search fits its candidates: no --calibration");
    let mut options = options.clone();
    let all = || options.codecs.iter().chain(&search.candidates).map(|codec| &codec.spec);
    let specs: Vec<CodecSpec> = all().cloned().collect();
    let session = EvalSession::open_session(&options).await?;
    let rig = session.session_rig(&options)?;
    let windows = session.calibration_windows();
    ensure!(windows.len() >= 2, "a search needs two windows of calibration text at least");
    let (held_out, fitted) = windows.split_at(1);
    rig.progress.begin_steps("calibration text", fitted.len() * options.passage_tokens);
    let tick = |tokens| rig.progress.add_steps(tokens);
    let samples = samples::collect_samples(rig.model, fitted, &rig.geometry, tick).await?;
    let fits = FittedSides::new(specs.iter(), &samples, options.seed, rig.progress)?;
    drop(samples);
    let passages = held_out.to_vec();
    rig.progress.begin_steps("without kvd", options.passage_tokens);
    let from = options.passage_tokens / 8;
    let reference =
        PassageReference::run_passages(rig.model, passages, from, rig.chunk, rig.progress).await?;
    let found = find_policy(&rig, &fits, &reference, search, &options.command).await?;
    let label = format!("policy {}", search.budget_bits);
    options.codecs.push(EvalCodec { label, spec: found.spec.clone() });
    let fitted = CodecFits { fits, splits: Vec::new() };
    let mut report = evaluate_codecs(&session, &options, CalibrationSource::Fitted(fitted)).await?;
    report.search = Some(found.report.clone());
    Ok((found, report))
}

async fn find_policy(
    rig: &MeasureRig<'_>,
    fits: &FittedSides,
    reference: &PassageReference,
    search: &SearchOptions,
    command: &str,
) -> Result<FoundPolicy> {
    let layers = rig.geometry.layers as usize;
    let sides = [Side::Key, Side::Value].map(|side| candidate_specs(&search.candidates, side));
    let steps = (sides[0].len() + sides[1].len()) * reference.clean.measured_tokens();
    let probes = 2 * layers * reference.passages.iter().map(|w| w.inputs.len()).sum::<usize>();
    rig.progress.begin_steps("search", steps + probes);
    let mut bench = SensitivityBench { rig, fits, reference, windows: search.windows, runs: 0 };
    let mut slots = vec![Vec::new(); 2 * layers];
    let mut errors: Vec<Vec<MeasuredSide>> = vec![Vec::new(); 2 * layers];
    for side in Side::BOTH {
        let mut measured = Vec::new();
        for candidate in &sides[side.index()] {
            measured.push(bench.measure_attention(side, candidate).await?);
        }
        let probe = sensitivity::choose_probe(&measured, search.budget_bits);
        for layer in 0..layers {
            let here: Vec<MeasuredSide> = measured.iter().map(|layers| layers[layer]).collect();
            let kl =
                bench.measure_kl(u32::try_from(layer)?, side, &sides[side.index()][probe]).await?;
            slots[2 * layer + side.index()] = sensitivity::slot_choices(&here, probe, kl)?;
            errors[2 * layer + side.index()] = here;
        }
    }
    rig.progress.remove_bar();
    let chosen = assign::assign_choices(&slots, search.budget_bits)?;
    let spec_of = |slot: usize| sides[slot % 2][chosen[slot].candidate].clone();
    let assigned: Vec<[SideSpec; 2]> =
        (0..layers).map(|layer| [spec_of(2 * layer), spec_of(2 * layer + 1)]).collect();
    let spec = policy::policy_codec(&assigned, search.windows);
    let slot = |(slot, choice): (usize, &SlotChoice)| SlotReport {
        layer: slot / 2,
        side: Side::BOTH[slot % 2].to_string(),
        spec: spec_of(slot).to_string(),
        bits: choice.bits,
        attention_error: errors[slot][choice.candidate].error,
        expected_kl_nats: choice.cost,
    };
    let slots: Vec<SlotReport> = chosen.iter().enumerate().map(slot).collect();
    let count = slots.len() as f64;
    let report = SearchReport {
        budget_bits: search.budget_bits,
        bits: slots.iter().map(|slot| slot.bits).sum::<f64>() / count,
        expected_kl_nats: slots.iter().map(|slot| slot.expected_kl_nats).sum(),
        slots,
    };
    let comments = [
        command.to_owned(),
        format!("{:.3} bits per value on the text of the search", report.bits),
    ];
    let artefact = fits.codec_artefact(&spec).context("the policy's artefact")?.map(|(c, _)| c);
    Ok(FoundPolicy { policy: policy::policy_file(&spec, &comments), spec, artefact, report })
}

/// The side specs of all candidates, none twice.
fn candidate_specs(codecs: &[EvalCodec], side: Side) -> Vec<SideSpec> {
    let mut found: Vec<SideSpec> = Vec::new();
    for spec in codecs.iter().map(|codec| codec.spec.side(side)) {
        if !found.contains(spec) {
            found.push(spec.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_candidates_are_eight_rates_of_one_family() {
        let search = SearchOptions::new(2.0);
        assert_eq!(search.candidates.len(), 8);
        for side in Side::BOTH {
            assert_eq!(candidate_specs(&search.candidates, side).len(), 8);
        }
        let shared = ["k=raw; v=fp8", "k=fp8; v=fp8"].map(|text| text.parse().unwrap());
        assert_eq!(candidate_specs(&shared, Side::Value).len(), 1);
    }
}
