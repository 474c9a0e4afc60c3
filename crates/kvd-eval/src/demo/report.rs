//! The demo's report, for programs: `--json` writes one [`DemoReport`].

use super::restart::RestartReport;
use crate::measure::{AttentionError, CallSummaries, DeviceMeans, StorageRatios};
use crate::model_report::ModelReport;
use kvd_engine::TextQuality;
use serde::Serialize;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// The model and what to make of its numbers.
    pub model: ModelReport,
    /// The setup of the run.
    pub setup: DemoSetup,
    /// The model without kvd: an f16 cache and f32 attention in the engine's own process.
    pub without_kvd: ReferenceReport,
    /// One entry per codec, in the order asked.
    pub codecs: Vec<CodecReport>,
    /// The prompt after a daemon was killed, where that was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartReport>,
    /// Wall time of all of it.
    pub seconds: f64,
}

/// The setup of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoSetup {
    /// The daemon's address.
    pub endpoint: String,
    /// The daemon's version.
    pub daemon_version: String,
    /// The daemon's device.
    pub device: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Windows of all codecs, or `own`.
    pub windows: String,
    /// Held-out passages.
    pub passages: usize,
    /// Tokens of each.
    pub passage_tokens: usize,
    /// First position that is scored.
    pub scored_from: usize,
    /// Tokens per step of passages and prompt.
    pub chunk_tokens: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens written after it.
    pub new_tokens: usize,
    /// The end of the prompt.
    pub prompt_tail: String,
}

/// The run without kvd.
#[derive(Clone, Debug, Serialize)]
pub struct ReferenceReport {
    /// On the passages.
    pub quality: TextQuality,
    /// After the prompt.
    pub generation: GeneratedText,
}

/// A run with one codec.
#[derive(Clone, Debug, Serialize)]
pub struct CodecReport {
    /// A preset's name, a policy file's stem, or the spec as asked for.
    pub codec: String,
    /// As the daemon understood it.
    pub codec_spec: String,
    /// Name of the model in the daemon, and in its metrics.
    pub model: String,
    /// Stored size of the passages in the daemon.
    pub storage: StorageRatios,
    /// On clean queries, keys and values of the first passage.
    pub attention_error: AttentionError,
    /// On the passages, against the run without kvd.
    pub quality: TextQuality,
    /// After the prompt.
    pub generation: GeneratedText,
    /// Latencies of the one-token steps.
    pub decode: CallSummaries,
    /// Device time of the same calls, from the daemon's histograms; absent when nobody gave its
    /// metrics.
    pub decode_device: Option<DeviceMeans>,
    /// Latencies of the steps of `chunk_tokens` tokens of the prompt and the passages.
    pub prefill: CallSummaries,
    /// Device time of all calls, from the daemon's own histograms; absent when nobody gave its
    /// metrics.
    pub daemon: Option<CallSummaries>,
    /// Time the calibration took; 0 for codecs without.
    pub calibration_seconds: f64,
}

/// Text a run wrote.
#[derive(Clone, Debug, Serialize)]
pub struct GeneratedText {
    /// The tokens, as text.
    pub text: String,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// How many of them, from the first, are those of the run without kvd.
    pub same_tokens: usize,
    /// Tokens per second of the one-token steps.
    pub tokens_per_second: f64,
}

impl GeneratedText {
    /// Whether every token is that of the run without kvd.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.same_tokens == self.tokens.len()
    }
}
