//! Options of the demo.

use super::restart::RestartReport;
use crate::UsageError;
use crate::eval::{EvalCodec, WindowChoice};
use crate::measure::MetricsSource;
use anyhow::{Result, ensure};
use kvd_client::Endpoint;
use std::path::PathBuf;

/// A run of the demo.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// The daemon.
    pub endpoint: Endpoint,
    /// A model directory; the compiled-in fixture when absent.
    pub model_dir: Option<PathBuf>,
    /// One run each, in this order.
    pub codecs: Vec<EvalCodec>,
    /// Windows that they all have, unless each keeps its own.
    pub windows: WindowChoice,
    /// Held-out passages to score.
    pub passages: usize,
    /// Tokens of a passage; positions from an eighth of it on are scored.
    pub passage_tokens: usize,
    /// Tokens per step of a passage and of the prompt. A step is stored before it attends, so that
    /// its queries find a block they complete already packed: with few tokens per step, as in
    /// decoding, most queries still see the open block in full precision.
    pub chunk_tokens: usize,
    /// Tokens of the held-out prompt.
    pub prompt_tokens: usize,
    /// Tokens to write after the prompt, one per step.
    pub new_tokens: usize,
    /// Windows that calibrations are fitted on, spread over the held-out text that is neither
    /// scored nor prompt; fewer where the text is short.
    pub calibration_windows: usize,
    /// Seed of the calibrations.
    pub seed: u64,
    /// Leaves the scored passages of every codec stored, so that the daemon's metrics go on to
    /// show what the table says.
    pub keep_open: bool,
    /// The daemon's metrics, for latencies as it sees them.
    pub metrics: Option<MetricsSource>,
    /// Outcome of a restart, to be told with the rest.
    pub restart: Option<RestartReport>,
    /// Writes the report as one JSON object instead of text.
    pub json: bool,
}

impl DemoOptions {
    /// Presets of a run that names no codec.
    pub const CODECS: [&'static str; 5] = ["raw", "kivi-4", "vecinfer-2", "kvd-4", "kvd-2"];
    /// Windows of such a run: wider ones would flatter a codec.
    pub const WINDOWS: WindowChoice = WindowChoice::Same { sink: 32, recent: 96 };

    /// Passages that are scored unless somebody asks for others.
    pub const PASSAGES: usize = 2;
    /// Tokens that are written unless somebody asks for others.
    pub const NEW_TOKENS: usize = 64;

    /// The codecs of [`DemoOptions::CODECS`].
    #[must_use]
    pub fn default_codecs() -> Vec<EvalCodec> {
        let chosen = |codec: &EvalCodec| Self::CODECS.contains(&codec.label.as_str());
        EvalCodec::all_presets().into_iter().filter(chosen).collect()
    }

    /// The demo as `kvd demo` runs it: the fixture, two passages of 2048 tokens.
    #[must_use]
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            model_dir: None,
            codecs: Self::default_codecs(),
            windows: Self::WINDOWS,
            passages: Self::PASSAGES,
            passage_tokens: 2048,
            chunk_tokens: 8,
            prompt_tokens: 384,
            new_tokens: Self::NEW_TOKENS,
            calibration_windows: 22,
            seed: 1,
            keep_open: false,
            metrics: None,
            restart: None,
            json: false,
        }
    }

    pub(crate) fn check_options(&self) -> Result<()> {
        ensure!(!self.codecs.is_empty(), UsageError("no codec to run".to_owned()));
        let counts = [
            ("passages", self.passages),
            ("passage_tokens", self.passage_tokens),
            ("chunk_tokens", self.chunk_tokens),
            ("prompt_tokens", self.prompt_tokens),
            ("new_tokens", self.new_tokens),
            ("calibration_windows", self.calibration_windows),
        ];
        for (name, count) in counts {
            ensure!(count > 0, UsageError(format!("{name} must be at least 1")));
        }
        let enough = self.passage_tokens >= 8;
        ensure!(enough, UsageError("passage_tokens must be at least 8".to_owned()));
        Ok(())
    }

    /// First position of a passage that is scored.
    pub(crate) fn scored_from(&self) -> usize {
        self.passage_tokens / 8
    }
}
