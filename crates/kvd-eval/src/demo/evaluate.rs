//! One run per codec: every attention of every layer goes through the daemon.

use super::options::DemoOptions;
use super::report::CodecReport;
use super::subject::{DemoReference, DemoSubject};
use crate::eval::EvalCodec;
use crate::measure::{CodecRegistration, CodecRun, MeasureRig};
use crate::samples;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_codec::{CodecSpec, Samples};
use std::time::Instant;

/// State that the runs of all codecs share.
pub(crate) struct DemoEvaluation<'a> {
    pub(crate) rig: MeasureRig<'a>,
    pub(crate) subject: &'a DemoSubject,
    pub(crate) reference: &'a DemoReference,
    pub(crate) options: &'a DemoOptions,
    /// Rows for calibrations, collected by the first codec that needs them.
    pub(crate) samples: Option<Samples>,
    /// Codecs run so far.
    pub(crate) runs: usize,
}

impl DemoEvaluation<'_> {
    /// Runs one codec.
    pub(crate) async fn run_codec(&mut self, codec: &EvalCodec) -> Result<CodecReport> {
        let begin = Instant::now();
        let EvalCodec { label, spec } = codec;
        let calibration = self.fit_calibration(label, spec).await?;
        let calibrated = begin.elapsed().as_secs_f64();
        let calibration_seconds = if calibration.is_empty() { 0.0 } else { calibrated };
        self.runs += 1;
        let name = self.model_name(label);
        let registration =
            CodecRegistration { name, label, codec: codec.registration_text(), calibration };
        let mut run = CodecRun::open_run(&self.rig, registration).await?;
        let attention_error = run.attention_error(&self.reference.passages.clean).await?;
        run.take_latencies();
        let (subject, options) = (self.subject, self.options);
        let (written, decode_device) =
            run.generate_text(&subject.prompt, options.new_tokens).await?;
        let passages = run.run_passages(&self.reference.passages).await?;
        let latencies = run.take_latencies();
        let reference = &self.reference.report.generation.tokens;
        let report = CodecReport {
            codec: label.clone(),
            codec_spec: run.codec_spec().to_owned(),
            model: run.model_name().to_owned(),
            storage: run.storage_ratios(&passages.stored).await?,
            attention_error,
            quality: passages.quality,
            generation: subject.compare_generation(written, Some(reference))?,
            decode: latencies.decode.summarize_calls(),
            prefill: latencies.prefill.summarize_calls(),
            decode_device,
            daemon: run.daemon_calls(),
            calibration_seconds,
        };
        if options.keep_open {
            run.leave_open().await?
        } else {
            run.close_run().await?
        }
        Ok(report)
    }

    /// The calibration of `spec`, serialized; empty when it needs none.
    async fn fit_calibration(&mut self, codec: &str, spec: &CodecSpec) -> Result<Bytes> {
        if !spec.needs_calibration() {
            return Ok(Bytes::new());
        }
        let MeasureRig { model, geometry, progress, .. } = &self.rig;
        progress.name_step(codec, "calibration");
        let samples = match self.samples.take() {
            Some(samples) => samples,
            None => {
                let tick = |tokens| progress.add_steps(tokens);
                samples::collect_samples(model, &self.subject.calibration, geometry, tick).await?
            }
        };
        let samples = self.samples.insert(samples);
        let fitted =
            kvd_codec::fit_calibration(geometry, spec, samples, self.options.seed, &mut |_| {});
        Ok(fitted.context("calibration")?.to_bytes().into())
    }

    /// A name of its own for every run, because a name stands for one codec: the model's and the
    /// preset's, or the number of the run for a spec text.
    fn model_name(&self, codec: &str) -> String {
        let model = crate::model_name(&self.subject.assets.name);
        let twice = self.options.codecs.iter().filter(|other| other.label == codec).count() > 1;
        match kvd_codec::find_preset(codec) {
            Some(_) if !twice => format!("{model}.{}", crate::plain_name(codec)),
            _ => format!("{model}.codec-{}", self.runs),
        }
    }
}
