//! `kvd calibrate`: from sampled K, V and queries to a calibration artefact.

mod daemon;
mod dump;
mod error;
mod model;

pub use daemon::DaemonSource;
pub use dump::{DumpSource, KvDump, LayerRows};
pub use error::CalibrateError;
pub use model::ModelSource;
use model::ReadModel;

use crate::eval::EvalCodec;
use crate::progress::RunProgress;
use crate::samples;
use crate::split::{self, BitSplit, DumpFits, SplitReport};
use anyhow::{Context, Result};
use kvd_codec::Calibration;
use kvd_core::{LayerIndex, Side};
use kvd_fit::{Samples, SetAside};
use std::path::PathBuf;

/// Where rows come from.
#[derive(Clone, Debug)]
pub enum RowSource {
    /// Files of K, V and queries.
    Dump(DumpSource),
    /// A model and text.
    Model(ModelSource),
    /// Sequences that a daemon holds.
    Daemon(DaemonSource),
}

/// A calibration to make.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Where rows come from.
    pub source: RowSource,
    /// Codecs to fit; the artefact serves all of them.
    pub codecs: Vec<EvalCodec>,
    /// How bits are shared.
    pub split: BitSplit,
    /// Seed of the fits: the same rows, codecs and seed give the same bytes.
    pub seed: u64,
    /// Also write the rows, as a later [`RowSource::Dump`].
    pub dump: Option<PathBuf>,
}

impl CalibrateOptions {
    /// Checks the options before any row is read.
    fn check_options(&self) -> Result<(), CalibrateError> {
        let idle = self.codecs.iter().find(|codec| !codec.spec.needs_calibration());
        match idle {
            Some(codec) => Err(CalibrateError::NothingToFit { codec: codec.label.clone() }),
            None => Ok(()),
        }
    }
}

/// The result of a calibration.
#[derive(Clone, Debug)]
pub struct CalibrationRun {
    /// The artefact; none when no codec was asked for.
    pub artefact: Option<Calibration>,
    /// Tokens it was fitted on.
    pub tokens: usize,
    /// Whether queries were among the rows.
    pub queries: bool,
    /// Queries of the KV head that has the fewest.
    pub queries_per_head: usize,
    /// Channels of a key.
    pub key_channels: usize,
    /// Rows that fits left out or clipped, because they are far beyond all others.
    pub set_aside: Vec<SetAside>,
    /// How bits of codecs are shared.
    pub splits: Vec<SplitReport>,
}

/// Collects rows and fits every codec to them.
///
/// # Errors
/// [`CalibrateError`] where the source does not have what is asked for; otherwise when a file
/// cannot be read or written, the daemon refuses, or a fit fails.
pub async fn run_calibration(options: &CalibrateOptions) -> Result<CalibrationRun> {
    options.check_options()?;
    let progress = RunProgress::new(0);
    progress.name_step("calibrate", "reading rows");
    let mut read = None;
    let rows = match &options.source {
        RowSource::Dump(source) => source.read_files()?,
        RowSource::Model(source) => {
            read.insert(source.read_model()?).record_rows(&progress).await?
        }
        RowSource::Daemon(source) => source.load_dump(&progress).await?,
    };
    if let Some(path) = &options.dump {
        let written = std::fs::write(path, rows.to_bytes()?);
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    let queries = rows.layers.iter().all(|layer| !layer.q.is_empty());
    let tokens = rows.token_count();
    progress.name_step("calibrate", "sorting rows by head");
    let samples = rows.to_samples()?;
    check_samples(options, &samples)?;
    let mut run = CalibrationRun {
        artefact: None,
        tokens,
        queries,
        queries_per_head: samples.queries_per_head(),
        key_channels: samples.geometry().head_dim(Side::Key),
        set_aside: samples.set_aside(),
        splits: Vec::new(),
    };
    let job = DumpFits {
        specs: options.codecs.iter().map(|codec| codec.spec.clone()).collect(),
        split: options.split,
        seed: options.seed,
        progress: &progress,
        model: read.as_ref().map(ReadModel::model_windows),
    };
    let fitted = split::fit_dump(rows, samples, job).await;
    progress.remove_bar();
    let fitted = fitted?;
    (run.artefact, run.splits) = (fitted.fits.merge_all()?, fitted.splits);
    Ok(run)
}

/// Tests that there are as many rows as the codecs need.
fn check_samples(options: &CalibrateOptions, samples: &Samples) -> Result<()> {
    for codec in &options.codecs {
        let lacking = |shortage| CalibrateError::of_shortage(shortage, &codec.label);
        samples.check_counts(&codec.spec).map_err(lacking)?;
        samples.check_zeros().map_err(lacking)?;
    }
    Ok(())
}

impl KvDump {
    /// The rows as fits take them.
    ///
    /// # Errors
    /// When a value is NaN or infinite.
    pub fn to_samples(&self) -> Result<Samples> {
        let geometry = &self.geometry;
        let mut samples = Samples::new(geometry);
        let heads = geometry.kv_heads as usize;
        for (layer, rows) in (0..).map(LayerIndex).zip(&self.layers) {
            let group = self.query_heads / heads;
            for query_head in 0..if rows.q.is_empty() { 0 } else { self.query_heads } {
                let dim = geometry.head_dim(Side::Key);
                let queries = samples::head_rows(&rows.q, query_head, self.query_heads, dim);
                samples.push_queries(layer, query_head / group, &queries)?;
            }
            for (side, values) in [(Side::Key, &rows.k), (Side::Value, &rows.v)] {
                for head in 0..heads {
                    let rows = samples::head_rows(values, head, heads, geometry.head_dim(side));
                    samples.push(layer, side, head, &rows)?;
                }
            }
        }
        Ok(samples)
    }
}
