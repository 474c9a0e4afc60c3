//! One run per codec: every attention of every layer goes through the daemon.

use crate::calibrate;
use crate::generate::generate;
use crate::options::DemoOptions;
use crate::progress::Progress;
use crate::quality::{Quality, QualitySums, teacher_forced};
use crate::report::CodecReport;
use crate::storage::{Storage, StoredParts};
use crate::subject::{Reference, Subject};
use crate::through_kvd::KvdAttention;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_client::{Client, ModelSpec, RegisteredModel, StoredBytes};
use kvd_codec::{CodecSpec, Samples};
use kvd_core::{Geometry, ModelId, SequenceId};
use std::time::Instant;

/// Tokens per step of a calibration window.
const CALIBRATION_CHUNK: usize = 256;

/// What the runs of all codecs share.
pub(crate) struct Evaluation<'a> {
    pub(crate) client: &'a Client,
    pub(crate) subject: &'a Subject,
    pub(crate) reference: &'a Reference,
    pub(crate) options: &'a DemoOptions,
    pub(crate) progress: &'a Progress,
    pub(crate) geometry: Geometry,
    /// Rows for calibrations, collected by the first codec that needs them.
    pub(crate) samples: Option<Samples>,
    /// Codecs run so far.
    pub(crate) runs: usize,
}

/// What the passages gave.
struct Passages {
    quality: Quality,
    stored: StoredParts,
    sequences: Vec<SequenceId>,
}

impl Evaluation<'_> {
    /// Runs one codec.
    pub(crate) async fn run(&mut self, codec: &str, spec: &CodecSpec) -> Result<CodecReport> {
        let begin = Instant::now();
        let calibration = self.calibration(codec, spec).await?;
        let calibrated = begin.elapsed().as_secs_f64();
        let calibration_seconds = if calibration.is_empty() { 0.0 } else { calibrated };
        self.runs += 1;
        let name = self.model_name(codec);
        let registered = self.register(&name, codec, calibration).await?;
        let model = registered.model;
        let (subject, chunk) = (self.subject, self.options.chunk_tokens);
        let heads = subject.model.config().heads();
        let mut kvd = KvdAttention::open(self.client, model, heads).await?;

        self.progress.stage(codec, "attention error");
        let tick = |tokens| self.progress.add(tokens);
        let attention_error = self.reference.clean.measure(&mut kvd, chunk, tick).await?;
        self.client.close_sequence(kvd.next_sequence().await?).await?;

        self.progress.stage(codec, "text");
        kvd.take_latencies();
        let (prompt, new) = (&subject.prompt, self.options.new_tokens);
        let written = generate(&subject.model, prompt, new, chunk, &mut kvd, tick).await?;
        self.client.close_sequence(kvd.next_sequence().await?).await?;

        self.progress.stage(codec, "held-out passages");
        let passages = self.passages(&mut kvd).await?;
        let latencies = kvd.take_latencies();
        let storage = self.storage(model, &passages.stored).await?;
        let daemon = self.options.metrics.as_ref().map(|metrics| metrics.calls(&name));
        self.leave(kvd, model, &passages.sequences).await?;
        let reference = &self.reference.report.generation.tokens;
        Ok(CodecReport {
            codec: codec.to_owned(),
            codec_spec: registered.codec_spec,
            model: name,
            storage,
            attention_error,
            quality: passages.quality,
            generation: subject.generation(written, Some(reference))?,
            decode: latencies.decode.summary(),
            prefill: latencies.prefill.summary(),
            daemon,
            calibration_seconds,
        })
    }
    /// The calibration of `spec`, serialized; empty when it needs none.
    async fn calibration(&mut self, codec: &str, spec: &CodecSpec) -> Result<Bytes> {
        if !spec.needs_calibration() {
            return Ok(Bytes::new());
        }
        self.progress.stage(codec, "calibration");
        let samples = match self.samples.take() {
            Some(samples) => samples,
            None => {
                // Without kvd the step changes nothing but the time it takes.
                let (subject, chunk) = (self.subject, CALIBRATION_CHUNK);
                let (model, windows) = (&subject.model, &subject.calibration);
                let tick = |tokens| self.progress.add(tokens);
                calibrate::samples(model, windows, &self.geometry, chunk, tick).await?
            }
        };
        let samples = self.samples.insert(samples);
        Ok(calibrate::fit(&self.geometry, spec, samples, self.options.seed)?.into())
    }

    /// A name of its own for every run, because a name stands for one codec: the model's and the
    /// preset's, or the number of the run for a spec text.
    fn model_name(&self, codec: &str) -> String {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let clean = |c| if allowed(c) { c } else { '-' };
        let model: String = self.subject.assets.name.chars().map(clean).take(32).collect();
        let twice = self.options.codecs.iter().filter(|other| *other == codec).count() > 1;
        match kvd_codec::preset(codec) {
            Some(_) if !twice => format!("{model}.{codec}"),
            _ => format!("{model}.codec-{}", self.runs),
        }
    }

    async fn register(
        &self,
        name: &str,
        codec: &str,
        calibration: Bytes,
    ) -> Result<RegisteredModel> {
        let spec = ModelSpec {
            name: name.to_owned(),
            geometry: self.geometry.clone(),
            codec: codec.to_owned(),
            calibration,
        };
        let registered = self.client.register_model(spec).await;
        registered.with_context(|| format!("the daemon refused codec {codec:?}"))
    }

    /// Teacher-forced passes; each passage is left stored in a sequence of its own. The streams'
    /// own sequence is empty afterwards.
    async fn passages(&self, kvd: &mut KvdAttention) -> Result<Passages> {
        let mut sums = QualitySums::default();
        let mut stored = StoredParts::default();
        let mut sequences = Vec::new();
        let (model, options) = (&self.subject.model, self.options);
        let tick = |tokens| self.progress.add(tokens);
        for (window, reference) in self.subject.passages.iter().zip(&self.reference.predictions) {
            let (chunk, from) = (options.chunk_tokens, options.scored_from());
            let run = teacher_forced(model, window, chunk, from, kvd, tick).await?;
            sums.add(&run, reference);
            stored.add(&kvd.stored().await?.into());
            sequences.push(kvd.next_sequence().await?);
        }
        Ok(Passages { quality: sums.finish(), stored, sequences })
    }

    async fn storage(&self, model: ModelId, stored: &StoredParts) -> Result<Storage> {
        let description = self.client.describe_model(model).await?;
        let model = description.model.context("the daemon's description of a model is empty")?;
        Ok(stored.storage(model.calibration_bytes + model.table_bytes))
    }

    /// Ends the streams, and unless they are to stay, closes the passages and the model.
    async fn leave(
        &self,
        kvd: KvdAttention,
        model: ModelId,
        passages: &[SequenceId],
    ) -> Result<()> {
        self.client.close_sequence(kvd.finish().await?).await?;
        if self.options.keep_open {
            return Ok(());
        }
        for &sequence in passages {
            self.client.close_sequence(sequence).await?;
        }
        Ok(self.client.unregister_model(model).await?)
    }
}

impl From<StoredBytes> for StoredParts {
    fn from(stored: StoredBytes) -> Self {
        Self {
            packed_values: stored.packed_values,
            packed_bytes: stored.packed_bytes,
            code_bytes: stored.code_bytes,
            scale_bytes: stored.scale_bytes,
            offset_bytes: stored.offset_bytes,
            header_bytes: stored.header_bytes,
            raw_values: stored.raw_values,
            raw_bytes: stored.raw_bytes,
            packed_key_bytes: stored.packed_key_bytes,
            packed_value_bytes: stored.packed_value_bytes,
        }
    }
}
