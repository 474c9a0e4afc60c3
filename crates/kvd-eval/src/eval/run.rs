//! The whole evaluation.

use super::calibrations::Calibrations;
use super::texts::{Material, Text};
use super::{Block, ContextBits, EvalCodec, EvalOptions, EvalReport, EvalRow, EvalSetup, Windows};
use crate::fits::Fits;
use crate::measure::{CodecRun, PassageReference, Registration, Rig};
use crate::progress::Progress;
use crate::{ModelReport, samples};
use anyhow::{Context, Result};
use kvd_client::{Client, ServerInfo};
use kvd_codec::CodecSpec;
use kvd_engine::Window;
use std::time::Instant;

/// What an evaluation and a search begin with.
pub(crate) struct Session {
    client: Client,
    info: ServerInfo,
    material: Material,
    progress: Progress,
    begin: Instant,
}

impl Session {
    /// Connects and reads model and texts.
    pub(crate) async fn open(options: &EvalOptions) -> Result<Self> {
        let begin = Instant::now();
        options.check()?;
        let connected = Client::connect(options.endpoint.clone()).await;
        let client = connected.with_context(|| format!("no daemon at {}", options.endpoint))?;
        let info = client.server_info().await?;
        let material = Material::load(options)?;
        Ok(Self { client, info, material, progress: Progress::new(0), begin })
    }

    /// What the runs of all codecs share.
    pub(crate) fn rig(&self, options: &EvalOptions) -> Result<Rig<'_>> {
        let model = &self.material.model;
        Ok(Rig {
            client: &self.client,
            model,
            geometry: model.config().geometry(self.info.block_tokens_default)?,
            chunk: options.chunk_tokens,
            metrics: options.metrics.clone(),
            progress: &self.progress,
        })
    }

    /// Windows that calibrations are fitted on.
    pub(crate) fn calibration(&self) -> &[Window] {
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
pub async fn run(options: &EvalOptions) -> Result<EvalReport> {
    let session = Session::open(options).await?;
    let calibrations = calibrations(options, &session).await?;
    evaluate(&session, options, calibrations).await
}

/// The runs of [`run`], with artefacts that are there already.
pub(crate) async fn evaluate(
    session: &Session,
    options: &EvalOptions,
    calibrations: Calibrations,
) -> Result<EvalReport> {
    let (material, rig) = (&session.material, session.rig(options)?);
    let mut evaluation = Evaluation { rig, options, material, calibrations, runs: 0 };
    let mut blocks = Vec::new();
    for text in &material.texts {
        blocks.extend(evaluation.text(text).await?);
    }
    Ok(EvalReport {
        version: EvalReport::VERSION,
        model: ModelReport::new(&material.assets, &material.model),
        setup: setup(options, &session.info, material),
        blocks,
        search: None,
        seconds: session.begin.elapsed().as_secs_f64(),
        orderings: options.orderings,
    })
}

/// One artefact per codec that needs one: read, or fitted to the model's own text.
async fn calibrations(options: &EvalOptions, session: &Session) -> Result<Calibrations> {
    if let Some(path) = &options.calibration {
        return Calibrations::read(path);
    }
    let specs = options.codecs.iter().map(|codec| &codec.spec);
    let specs = specs.filter(|spec| spec.needs_calibration());
    // The rows of codecs that need none would be thrown away.
    let windows = if specs.clone().next().is_some() { session.calibration() } else { &[] };
    let Rig { model, geometry, progress, .. } = session.rig(options)?;
    progress.begin("calibration text", windows.len() * options.passage_tokens);
    let tick = |tokens| progress.add(tokens);
    let samples = samples::collect(model, windows, &geometry, tick).await?;
    let fits = Fits::new(specs, &samples, options.seed, progress)?;
    progress.finish();
    Ok(Calibrations::Fitted(fits))
}

fn setup(options: &EvalOptions, info: &ServerInfo, material: &Material) -> EvalSetup {
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

/// What the runs of all codecs share.
struct Evaluation<'a> {
    rig: Rig<'a>,
    options: &'a EvalOptions,
    material: &'a Material,
    calibrations: Calibrations,
    /// Codecs run so far.
    runs: usize,
}

impl Evaluation<'_> {
    /// One block per choice of windows.
    async fn text(&mut self, text: &Text) -> Result<Vec<Block>> {
        let (options, rig) = (self.options, &self.rig);
        let passage_tokens = options.passages * options.passage_tokens;
        rig.progress.begin("without kvd", passage_tokens);
        let (passages, from) = (text.passages.clone(), options.scored_from());
        let reference =
            PassageReference::run(rig.model, passages, from, rig.chunk, rig.progress).await?;
        let runs = options.codecs.len() * options.windows.len();
        let each = passage_tokens + reference.clean.measured_tokens();
        rig.progress.begin("codecs", runs * each);
        let mut blocks: Vec<Block> = Vec::new();
        for windows in &options.windows {
            let mut rows = Vec::new();
            for codec in &options.codecs {
                let spec = windows.apply(codec.spec.clone());
                // Windows that are the codec's own make no second run.
                let known = blocks.iter().flat_map(|block| &block.rows);
                let known = known.chain(&rows).find(|row: &&EvalRow| {
                    row.codec == codec.label && row.codec_spec == spec.to_string()
                });
                let row = match known.cloned() {
                    Some(row) => row,
                    None => self.codec(codec, *windows, &reference).await?,
                };
                rows.push(row);
            }
            blocks.push(Block {
                text: text.name.clone(),
                windows: windows.to_string(),
                without_kvd: reference.quality,
                rows,
            });
        }
        self.rig.progress.finish();
        Ok(blocks)
    }

    async fn codec(
        &mut self,
        codec: &EvalCodec,
        windows: Windows,
        reference: &PassageReference,
    ) -> Result<EvalRow> {
        let spec = windows.apply(codec.spec.clone());
        let row = self.measure(&codec.label, &spec, reference).await;
        row.with_context(|| format!("codec {}", codec.label))
    }

    async fn measure(
        &mut self,
        label: &str,
        spec: &CodecSpec,
        reference: &PassageReference,
    ) -> Result<EvalRow> {
        let (calibration, calibration_seconds) = self.calibrations.of(spec)?;
        self.runs += 1;
        let name = format!("{}.{}", crate::model_name(&self.material.assets.name), self.runs);
        let codec = spec.to_string();
        let registration = Registration { name, label, codec, calibration };
        let mut run = CodecRun::open(&self.rig, registration).await?;
        let attention_error = run.attention_error(&reference.clean).await?;
        let (quality, stored) = run.passages(reference).await?;
        let speed = run.speed(&reference.clean).await?;
        let storage = run.storage(&stored).await?;
        let row = EvalRow {
            codec: label.to_owned(),
            codec_spec: run.codec_spec().to_owned(),
            context: self.context_bits(&storage),
            storage,
            attention_error,
            quality,
            speed,
            calibration_seconds,
        };
        run.leave().await?;
        Ok(row)
    }

    fn context_bits(&self, storage: &crate::measure::Storage) -> ContextBits {
        let heads = self.rig.model.config().heads();
        let values_per_token = 2 * self.rig.geometry.layers as usize * heads.kv_width();
        let (sequences, tokens) = (self.options.passages, self.options.context_tokens);
        ContextBits::new(storage, sequences, tokens, values_per_token)
    }
}
