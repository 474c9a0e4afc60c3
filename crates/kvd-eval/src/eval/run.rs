//! The whole evaluation.

use super::calibrations::CalibrationSource;
use super::texts::{EvalMaterial, ScoredText};
use super::{
    ContextBits, EvalBlock, EvalCodec, EvalOptions, EvalReport, EvalRow, EvalSetup, WindowChoice,
};
use crate::ModelReport;
use crate::measure::{CodecRegistration, CodecRun, MeasureRig, PassageReference};
use crate::progress::RunProgress;
use crate::split::{self, WindowFits};
use anyhow::{Context, Result};
use kvd_client::{Client, ServerInfo};
use kvd_codec::CodecSpec;
use kvd_engine::TokenWindow;
use std::time::Instant;

/// The connection and the material of an evaluation or a search.
pub(crate) struct EvalSession {
    client: Client,
    info: ServerInfo,
    material: EvalMaterial,
    progress: RunProgress,
    begin: Instant,
}

impl EvalSession {
    /// Connects and reads model and texts.
    pub(crate) async fn open_session(options: &EvalOptions) -> Result<Self> {
        let begin = Instant::now();
        options.check_options()?;
        let connected = Client::connect(options.endpoint.clone()).await;
        let client = connected.with_context(|| format!("no daemon at {}", options.endpoint))?;
        let info = client.server_info().await?;
        options.check_prefix(info.block_tokens_default)?;
        let material = EvalMaterial::load_material(options)?;
        Ok(Self { client, info, material, progress: RunProgress::new(0), begin })
    }

    /// The rig that the runs of all codecs share.
    pub(crate) fn session_rig(&self, options: &EvalOptions) -> Result<MeasureRig<'_>> {
        let model = &self.material.model;
        Ok(MeasureRig {
            client: &self.client,
            model,
            geometry: model.config().kv_geometry(self.info.block_tokens_default)?,
            chunk: options.chunk_tokens,
            metrics: options.metrics.clone(),
            progress: &self.progress,
        })
    }

    /// Windows that calibrations are fitted on.
    pub(crate) fn calibration_windows(&self) -> &[TokenWindow] {
        &self.material.calibration
    }
}

/// Runs every codec on every text under all windows.
///
/// The model computes on the calling thread between calls to the daemon: run it where blocking
/// for milliseconds is allowed, as in the future given to `block_on`.
///
/// # Errors
/// When a file cannot be read or is too short, or a call to the daemon fails.
pub async fn run_eval(options: &EvalOptions) -> Result<EvalReport> {
    let session = EvalSession::open_session(options).await?;
    let calibrations = prepare_calibrations(options, &session).await?;
    evaluate_codecs(&session, options, calibrations).await
}

/// The runs of [`run_eval`], with artefacts that are there already.
pub(crate) async fn evaluate_codecs(
    session: &EvalSession,
    options: &EvalOptions,
    calibrations: CalibrationSource,
) -> Result<EvalReport> {
    let (material, rig) = (&session.material, session.session_rig(options)?);
    let splits = calibrations.split_reports();
    let mut evaluation = EvalRun { rig, options, material, calibrations, runs: 0 };
    let mut blocks = Vec::new();
    for text in &material.texts {
        blocks.extend(evaluation.run_text(text).await?);
    }
    Ok(EvalReport {
        version: EvalReport::VERSION,
        model: ModelReport::new(&material.assets, &material.model),
        setup: describe_setup(options, &session.info, material),
        blocks,
        splits,
        search: None,
        seconds: session.begin.elapsed().as_secs_f64(),
        orderings: options.orderings,
    })
}

/// One artefact per codec that needs one: read, or fitted to the model's own text.
async fn prepare_calibrations(
    options: &EvalOptions,
    session: &EvalSession,
) -> Result<CalibrationSource> {
    if let Some(path) = &options.calibration {
        return CalibrationSource::read_artefact(path);
    }
    let specs = options.codecs.iter().map(|codec| codec.spec.clone());
    let specs: Vec<CodecSpec> = specs.filter(CodecSpec::needs_calibration).collect();
    // The rows of codecs that need none would be thrown away.
    let windows = if specs.is_empty() { &[] } else { session.calibration_windows() };
    let MeasureRig { model, geometry, progress, .. } = session.session_rig(options)?;
    let (split, seed, geometry) = (options.split, options.seed, &geometry);
    let job = WindowFits { model, geometry, windows, specs, split, seed, progress };
    let fitted = split::fit_windows(job).await?;
    progress.remove_bar();
    Ok(CalibrationSource::Fitted(fitted))
}

fn describe_setup(options: &EvalOptions, info: &ServerInfo, material: &EvalMaterial) -> EvalSetup {
    let fitted = options.calibration.is_none();
    EvalSetup {
        command: options.command.clone(),
        daemon_version: info.version.clone(),
        device: info.device.clone(),
        block_tokens: info.block_tokens_default,
        passages: options.passages,
        passage_tokens: options.passage_tokens,
        scored_from: options.scored_from(),
        chunk_tokens: options.chunk_tokens,
        calibration_windows: if fitted { material.calibration.len() } else { 0 },
        seed: options.seed,
        context_tokens: options.context_tokens,
    }
}

/// State that the runs of all codecs share.
struct EvalRun<'a> {
    rig: MeasureRig<'a>,
    options: &'a EvalOptions,
    material: &'a EvalMaterial,
    calibrations: CalibrationSource,
    /// Codecs run so far.
    runs: usize,
}

impl EvalRun<'_> {
    /// One block per choice of windows.
    async fn run_text(&mut self, text: &ScoredText) -> Result<Vec<EvalBlock>> {
        let (options, rig) = (self.options, &self.rig);
        let passage_tokens = options.passages * options.passage_tokens;
        rig.progress.begin_steps("without kvd", passage_tokens);
        let (passages, from) = (text.passages.clone(), options.scored_from());
        let reference =
            PassageReference::run_passages(rig.model, passages, from, rig.chunk, rig.progress)
                .await?;
        let runs = options.codecs.len() * options.windows.len();
        let attached = options.attached_prefix.map_or(0, |prefix| {
            options.passages * (options.passage_tokens - prefix.attached_tokens())
        });
        let each = passage_tokens + attached + reference.clean.measured_tokens();
        rig.progress.begin_steps("codecs", runs * each);
        let mut blocks: Vec<EvalBlock> = Vec::new();
        for windows in &options.windows {
            let mut rows = Vec::new();
            for codec in &options.codecs {
                let spec = windows.apply_windows(codec.spec.clone());
                // Windows that are the codec's own make no second run.
                let known = blocks.iter().flat_map(|block| &block.rows);
                let known = known.chain(&rows).find(|row: &&EvalRow| {
                    row.codec == codec.label && row.codec_spec == spec.to_string()
                });
                let row = match known.cloned() {
                    Some(row) => row,
                    None => self.run_codec(codec, *windows, &reference).await?,
                };
                rows.push(row);
            }
            blocks.push(EvalBlock {
                text: text.name.clone(),
                windows: windows.to_string(),
                without_kvd: reference.quality,
                rows,
            });
        }
        self.rig.progress.remove_bar();
        Ok(blocks)
    }

    async fn run_codec(
        &mut self,
        codec: &EvalCodec,
        windows: WindowChoice,
        reference: &PassageReference,
    ) -> Result<EvalRow> {
        let spec = windows.apply_windows(codec.spec.clone());
        let row = self.measure_codec(&codec.label, &spec, reference).await;
        row.with_context(|| format!("codec {}", codec.label))
    }

    async fn measure_codec(
        &mut self,
        label: &str,
        spec: &CodecSpec,
        reference: &PassageReference,
    ) -> Result<EvalRow> {
        let (calibration, calibration_seconds) = self.calibrations.codec_artefact(spec)?;
        self.runs += 1;
        let name = format!("{}.{}", crate::model_name(&self.material.assets.name), self.runs);
        let codec = spec.to_string();
        let registration = CodecRegistration { name, label, codec, calibration };
        let mut run = CodecRun::open_run(&self.rig, registration).await?;
        let attention_error = run.attention_error(&reference.clean).await?;
        let passages = run.run_passages(reference).await?;
        let attached = match self.options.attached_prefix {
            Some(prefix) => Some(run.run_attached(reference, &passages, prefix).await?),
            None => None,
        };
        let speed = run.measure_speed(&reference.clean).await?;
        let storage = run.storage_ratios(&passages.stored).await?;
        let row = EvalRow {
            codec: label.to_owned(),
            codec_spec: run.codec_spec().to_owned(),
            context: self.context_bits(&storage),
            storage,
            attention_error,
            quality: passages.quality,
            attached,
            speed,
            calibration_seconds,
        };
        run.close_run().await?;
        Ok(row)
    }

    fn context_bits(&self, storage: &crate::measure::StorageRatios) -> ContextBits {
        let heads = self.rig.model.config().attention_heads();
        let values_per_token = 2 * self.rig.geometry.layers as usize * heads.kv_width();
        let (sequences, tokens) = (self.options.passages, self.options.context_tokens);
        ContextBits::new(storage, sequences, tokens, values_per_token)
    }
}
