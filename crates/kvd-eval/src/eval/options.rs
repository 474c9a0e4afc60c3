//! Options of an evaluation.

use super::{EvalCodec, WindowChoice};
use crate::UsageError;
use crate::measure::{AttachedPrefix, MetricsSource};
use crate::split::BitSplit;
use anyhow::{Result, ensure};
use kvd_client::Endpoint;
use std::path::PathBuf;

/// An evaluation.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// The daemon.
    pub endpoint: Endpoint,
    /// The daemon's metrics, for speeds; without them there are none.
    pub metrics: Option<MetricsSource>,
    /// A model directory; the compiled-in fixture when absent.
    pub model_dir: Option<PathBuf>,
    /// Held-out texts (UTF-8), one block of rows each; the model's own when empty.
    pub texts: Vec<PathBuf>,
    /// A prefix that each passage is run on once more, attached from the cache. Positions from
    /// there on are scored, in both runs.
    pub attached_prefix: Option<AttachedPrefix>,
    /// Codecs, one row each.
    pub codecs: Vec<EvalCodec>,
    /// Windows, one block of rows each.
    pub windows: Vec<WindowChoice>,
    /// Passages to score, from the front of a text.
    pub passages: usize,
    /// Tokens of a passage; positions from an eighth of it on are scored.
    pub passage_tokens: usize,
    /// Tokens per step: see `DemoOptions::chunk_tokens`.
    pub chunk_tokens: usize,
    /// Windows that calibrations are fitted on, spread over what is not scored of the model's own
    /// text; fewer where the text is short or the model's rows are large.
    pub calibration_windows: usize,
    /// An artefact to use instead of fitting, for every codec that needs one.
    pub calibration: Option<PathBuf>,
    /// Context over which tables and windows are spread.
    pub context_tokens: usize,
    /// Seed of the calibrations.
    pub seed: u64,
    /// How bits of codecs that are fitted here are shared.
    pub split: BitSplit,
    /// Whether claims about the order of codecs are checked and shown.
    pub orderings: bool,
    /// How this run was asked for, for the head of the page.
    pub command: String,
}

impl EvalOptions {
    /// Two passages of 2048 tokens of the model's own text in steps of 8, codecs under their own
    /// windows.
    #[must_use]
    pub fn new(endpoint: Endpoint, codecs: Vec<EvalCodec>) -> Self {
        Self {
            endpoint,
            metrics: None,
            model_dir: None,
            texts: Vec::new(),
            attached_prefix: None,
            codecs,
            windows: vec![WindowChoice::Own],
            passages: 2,
            passage_tokens: 2048,
            chunk_tokens: 8,
            calibration_windows: 22,
            calibration: None,
            context_tokens: 32_768,
            seed: 1,
            split: BitSplit::Sensitivity,
            orderings: false,
            command: String::new(),
        }
    }

    pub(super) fn check_options(&self) -> Result<()> {
        ensure!(!self.codecs.is_empty(), UsageError("no codec to evaluate".to_owned()));
        ensure!(!self.windows.is_empty(), UsageError("no windows to evaluate under".to_owned()));
        let counts = [
            ("passages", self.passages),
            ("chunk", self.chunk_tokens),
            ("calibration windows", self.calibration_windows),
            ("context", self.context_tokens),
        ];
        for (name, count) in counts {
            ensure!(count > 0, UsageError(format!("{name} must be at least 1")));
        }
        ensure!(self.passage_tokens >= 8, UsageError("tokens must be at least 8".to_owned()));
        let Some(AttachedPrefix { tokens, recomputed }) = self.attached_prefix else {
            return Ok(());
        };
        let chunk = self.chunk_tokens;
        ensure!(
            tokens < self.passage_tokens && tokens.is_multiple_of(chunk),
            UsageError(format!(
                "an attached prefix of {tokens} tokens is no number of steps of {chunk} tokens \
                 that leaves some of a passage of {}",
                self.passage_tokens
            ))
        );
        ensure!(
            recomputed < tokens && recomputed.is_multiple_of(chunk),
            UsageError(format!(
                "{recomputed} recomputed tokens are no number of steps of {chunk} tokens that \
                 leaves some of a prefix of {tokens}"
            ))
        );
        Ok(())
    }

    /// Refuses a prefix that is no number of pages.
    pub(super) fn check_prefix(&self, block_tokens: u32) -> Result<()> {
        let Some(prefix) = self.attached_prefix else { return Ok(()) };
        let attached = prefix.attached_tokens();
        ensure!(
            attached.is_multiple_of(block_tokens as usize),
            UsageError(format!(
                "an attached prefix of {attached} tokens is no number of pages of {block_tokens}"
            ))
        );
        Ok(())
    }

    /// First position of a passage that is scored.
    pub(super) fn scored_from(&self) -> usize {
        self.attached_prefix.map_or(self.passage_tokens / 8, |prefix| prefix.tokens)
    }
}
