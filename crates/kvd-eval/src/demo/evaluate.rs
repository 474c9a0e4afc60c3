//! One run per codec: every attention of every layer goes through the daemon.

use super::options::DemoOptions;
use super::report::CodecReport;
use super::subject::{DemoReference, DemoSubject};
use crate::eval::EvalCodec;
use crate::fits::FittedSides;
use crate::measure::{CodecRegistration, CodecRun, MeasureRig};
use anyhow::Result;

/// State that the runs of all codecs share.
pub(crate) struct DemoEvaluation<'a> {
    pub(crate) rig: MeasureRig<'a>,
    pub(crate) subject: &'a DemoSubject,
    pub(crate) reference: &'a DemoReference,
    pub(crate) options: &'a DemoOptions,
    /// Calibrations of all codecs.
    pub(crate) fitted: &'a FittedSides,
    /// Codecs run so far.
    pub(crate) runs: usize,
}

impl DemoEvaluation<'_> {
    /// Runs one codec.
    pub(crate) async fn run_codec(&mut self, codec: &EvalCodec) -> Result<CodecReport> {
        let EvalCodec { label, spec } = codec;
        let artefact = self.fitted.codec_artefact(spec)?;
        let (calibration, calibration_seconds) =
            artefact.map_or_else(Default::default, |(fitted, s)| (fitted.to_bytes().into(), s));
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
