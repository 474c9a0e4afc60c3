//! One codec, registered with the daemon and taken through the measurements one by one.

use super::attached::AttachedSums;
use super::daemon::CallTimes;
use super::storage::{StorageRatios, storage_ratios};
use super::through_kvd::StepLatencies;
use super::{
    AttachedPrefix, AttachedQuality, AttentionError, CallSummaries, CleanWindow, DeviceMeans,
    KvdAttention, MetricsSource, PassageReference,
};
use super::{DeviceSpeed, speed};
use crate::progress::RunProgress;
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use kvd_client::{BlockKeys, Client, ModelSpec, RegisteredModel};
use kvd_core::{Geometry, SequenceId, StoredBytes};
use kvd_engine::{
    Continuation, LanguageModel, QualitySums, TextQuality, TextSteps, WindowPredictions,
    generate_tokens, teacher_forced,
};

/// The client, model and settings that the runs of all codecs share.
pub(crate) struct MeasureRig<'a> {
    pub(crate) client: &'a Client,
    pub(crate) model: &'a LanguageModel,
    pub(crate) geometry: Geometry,
    /// Tokens per step of passages and prompts.
    pub(crate) chunk: usize,
    /// The daemon's own metrics, when it runs in this process.
    pub(crate) metrics: Option<MetricsSource>,
    pub(crate) progress: &'a RunProgress,
}

/// A codec to register.
pub(crate) struct CodecRegistration<'a> {
    /// Name of the model in the daemon; one name stands for one codec.
    pub(crate) name: String,
    /// For the progress bar.
    pub(crate) label: &'a str,
    /// Preset or spec text.
    pub(crate) codec: String,
    /// The artefact, empty when the codec needs none.
    pub(crate) calibration: Bytes,
}

/// Results of teacher-forced passes.
pub(crate) struct PassageRuns {
    /// Against the run without kvd.
    pub(crate) quality: TextQuality,
    /// Bytes of all passages.
    pub(crate) stored: StoredBytes,
    /// Those of each passage.
    predictions: Vec<WindowPredictions>,
}

/// A registered codec and the streams of one client to it.
pub(crate) struct CodecRun<'a> {
    rig: &'a MeasureRig<'a>,
    label: &'a str,
    name: String,
    registered: RegisteredModel,
    kvd: KvdAttention,
    passages: Vec<SequenceId>,
    /// Device time before the first call, where the daemon's metrics are at hand. Codecs run one
    /// after another: what comes on top is this one's.
    calls_before: Option<CallTimes>,
}

impl<'a> CodecRun<'a> {
    /// Registers the codec and opens the streams.
    pub(crate) async fn open_run(
        rig: &'a MeasureRig<'a>,
        registration: CodecRegistration<'a>,
    ) -> Result<Self> {
        let CodecRegistration { name, label, codec, calibration } = registration;
        let spec = ModelSpec {
            name: name.clone(),
            geometry: rig.geometry.clone(),
            codec: codec.clone(),
            calibration,
        };
        let registered = rig.client.register_model(spec).await;
        let registered =
            registered.with_context(|| format!("the daemon refused codec {codec:?}"))?;
        let heads = rig.model.config().attention_heads();
        let kvd = KvdAttention::open_sequence(rig.client, registered.model, heads).await?;
        let calls_before = rig.metrics.as_ref().map(MetricsSource::read_calls);
        Ok(Self { rig, label, name, registered, kvd, passages: Vec::new(), calls_before })
    }

    /// Name of the model in the daemon and in its metrics.
    pub(crate) fn model_name(&self) -> &str {
        &self.name
    }

    /// The codec as the daemon understood it.
    pub(crate) fn codec_spec(&self) -> &str {
        &self.registered.codec_spec
    }

    /// Attention error on clean queries, keys and values, layer by layer.
    pub(crate) async fn attention_error(&mut self, clean: &CleanWindow) -> Result<AttentionError> {
        let (rig, label) = (self.rig, self.label);
        rig.progress.name_step(label, "attention error");
        let tick = |tokens| rig.progress.add_steps(tokens);
        let error = clean.measure_sequence(&mut self.kvd, rig.chunk, tick).await?;
        self.close_sequence().await?;
        Ok(error)
    }

    /// Reads `prompt` and goes on for `new_tokens` tokens; with the device time of their
    /// steps, where the daemon's metrics are at hand.
    pub(crate) async fn generate_text(
        &mut self,
        prompt: &[u32],
        new_tokens: usize,
    ) -> Result<(Continuation, Option<DeviceMeans>)> {
        let (rig, label) = (self.rig, self.label);
        let totals = || rig.metrics.as_ref().map(|metrics| metrics.device_totals(&self.name));
        let (mut read, mut before) = (0, None);
        rig.progress.name_step(label, "text");
        let tick = |tokens| {
            rig.progress.add_steps(tokens);
            read += tokens;
            if read == prompt.len() {
                before = totals();
            }
        };
        let kvd = &mut self.kvd;
        let written = generate_tokens(rig.model, prompt, new_tokens, rig.chunk, kvd, tick).await?;
        let means =
            totals().zip(before).map(|(after, before)| after.since_before(&before).mean_times());
        self.close_sequence().await?;
        Ok((written, means))
    }

    /// Teacher-forced passes; each passage is left stored in a sequence of its own until
    /// [`CodecRun::close_run`].
    pub(crate) async fn run_passages(
        &mut self,
        reference: &PassageReference,
    ) -> Result<PassageRuns> {
        let (rig, label) = (self.rig, self.label);
        rig.progress.name_step(label, "held-out passages");
        let mut sums = QualitySums::default();
        let mut stored = StoredBytes::default();
        let mut predictions = Vec::new();
        let tick = |tokens| rig.progress.add_steps(tokens);
        for (window, without) in reference.passages.iter().zip(&reference.predictions) {
            let (scored_from, kvd) = (reference.scored_from, &mut self.kvd);
            let steps = TextSteps { chunk: rig.chunk, start: 0, scored_from };
            let run = teacher_forced(rig.model, window, steps, kvd, tick).await?;
            sums.add_window(&run, without);
            predictions.push(run);
            stored += self.kvd.stored_bytes().await?;
            self.passages.push(self.kvd.next_sequence().await?);
        }
        Ok(PassageRuns { quality: sums.mean_quality(), stored, predictions })
    }

    /// Runs every passage once more from `prefix` on, in a sequence that finds the tokens before it
    /// in the cache, where [`CodecRun::run_passages`] left them.
    pub(crate) async fn run_attached(
        &mut self,
        reference: &PassageReference,
        runs: &PassageRuns,
        prefix: AttachedPrefix,
    ) -> Result<AttachedQuality> {
        let (rig, label) = (self.rig, self.label);
        rig.progress.name_step(label, "attached prefix");
        let mut sums = AttachedSums::new(prefix);
        for (index, window) in reference.passages.iter().enumerate() {
            let keys = (0..prefix.attached_tokens() as u64 / u64::from(rig.geometry.block_tokens))
                .flat_map(|page| [index as u64, page].map(u64::to_be_bytes).concat())
                .collect();
            let keys = BlockKeys { keys, key_bytes: 16, key_tokens: 0 };
            let found = self.kvd.switch_to_prefix(self.passages[index], keys).await?;
            ensure!(
                found as usize == prefix.attached_tokens(),
                "only {found} of the {} tokens of a prefix are in the cache: give a larger --pool",
                prefix.attached_tokens()
            );
            let (start, scored_from) = (prefix.attached_tokens(), prefix.tokens);
            let steps = TextSteps { chunk: rig.chunk, start, scored_from };
            let tick = |tokens| rig.progress.add_steps(tokens);
            let run = teacher_forced(rig.model, window, steps, &mut self.kvd, tick).await?;
            sums.add_passage(&reference.predictions[index], &runs.predictions[index], &run);
            self.close_sequence().await?;
        }
        Ok(sums.mean_quality())
    }

    /// Device time of encoding, loading and attending; nothing without the daemon's metrics.
    pub(crate) async fn measure_speed(
        &mut self,
        clean: &CleanWindow,
    ) -> Result<Option<DeviceSpeed>> {
        let Some(metrics) = &self.rig.metrics else { return Ok(None) };
        self.rig.progress.name_step(self.label, "speed");
        let mut speed: Option<DeviceSpeed> = None;
        for _ in 0..speed::ROUNDS {
            let round = speed::measure_round(metrics, &self.name, clean, &mut self.kvd).await?;
            self.close_sequence().await?;
            speed = Some(speed.map_or(round, |best| best.best_figures(round)));
        }
        Ok(speed)
    }

    /// Ratios of stored bytes, with the bytes that the model takes once.
    pub(crate) async fn storage_ratios(&self, stored: &StoredBytes) -> Result<StorageRatios> {
        let description = self.rig.client.describe_model(self.registered.model).await?;
        let model = description.model.context("the daemon's description of a model is empty")?;
        Ok(StorageRatios {
            fallback_pages: model.fallback_pages,
            over_bound_pages: model.over_bound_pages_k + model.over_bound_pages_v,
            ..storage_ratios(stored, model.calibration_bytes + model.table_bytes)
        })
    }

    /// Client-side latencies since the last call of this.
    pub(crate) fn take_latencies(&mut self) -> StepLatencies {
        self.kvd.take_latencies()
    }

    /// Device time of all stores and attends so far, where the daemon's metrics are at hand.
    pub(crate) fn daemon_calls(&self) -> Option<CallSummaries> {
        let metrics = self.rig.metrics.as_ref()?;
        Some(metrics.read_calls().since_before(self.calls_before.as_ref()?))
    }

    /// Ends the streams, and closes the passages and the model.
    pub(crate) async fn close_run(self) -> Result<()> {
        let (client, model) = (self.rig.client, self.registered.model);
        client.close_sequence(self.kvd.finish_sequence().await?).await?;
        for &sequence in &self.passages {
            client.close_sequence(sequence).await?;
        }
        Ok(client.unregister_model(model).await?)
    }

    /// Ends the streams and leaves the passages stored.
    pub(crate) async fn leave_open(self) -> Result<()> {
        Ok(self.rig.client.close_sequence(self.kvd.finish_sequence().await?).await?)
    }

    async fn close_sequence(&mut self) -> Result<()> {
        let done = self.kvd.next_sequence().await?;
        Ok(self.rig.client.close_sequence(done).await?)
    }
}
