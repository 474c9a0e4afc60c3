//! The report of an evaluation, for programs: `--json` writes one [`EvalReport`].

use crate::ModelReport;
use crate::measure::{AttachedQuality, AttentionError, DeviceSpeed, StorageRatios};
use crate::search::SearchReport;
use crate::split::SplitReport;
use kvd_engine::TextQuality;
use serde::Serialize;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct EvalReport {
    /// Version of this layout; fields may be added within one.
    pub version: u32,
    /// The model and what to make of its numbers.
    pub model: ModelReport,
    /// The setup of the run.
    pub setup: EvalSetup,
    /// One per text and windows, in the order asked, windows innermost.
    pub blocks: Vec<EvalBlock>,
    /// How the bits of codecs that were fitted here are shared.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub splits: Vec<SplitReport>,
    /// How the policy among the rows was found, after a search.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub search: Option<SearchReport>,
    /// Wall time of all of it.
    pub seconds: f64,
    /// Whether claims about the order of codecs are shown with the tables.
    #[serde(skip)]
    pub orderings: bool,
}

impl EvalReport {
    /// Version of the layout.
    pub const VERSION: u32 = 1;
}

/// The setup of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EvalSetup {
    /// How it was asked for.
    pub command: String,
    /// The daemon's version.
    pub daemon_version: String,
    /// The daemon's device.
    pub device: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Passages of each text.
    pub passages: usize,
    /// Tokens of each.
    pub passage_tokens: usize,
    /// First position that is scored.
    pub scored_from: usize,
    /// Tokens per step.
    pub chunk_tokens: usize,
    /// Windows of the model's own text that calibrations were fitted on; 0 when they came from a
    /// file.
    pub calibration_windows: usize,
    /// Seed of the calibrations.
    pub seed: u64,
    /// Context over which [`ContextBits`] are spread.
    pub context_tokens: usize,
}

/// All codecs on one text under one choice of windows.
#[derive(Clone, Debug, Serialize)]
pub struct EvalBlock {
    /// The text: a file's name, or the model's for its own.
    pub text: String,
    /// `own`, or the windows that every codec was given.
    pub windows: String,
    /// Quality on these passages without kvd.
    pub without_kvd: TextQuality,
    /// One per codec, in the order asked.
    pub rows: Vec<EvalRow>,
}

/// One codec.
#[derive(Clone, Debug, Serialize)]
pub struct EvalRow {
    /// As asked.
    pub codec: String,
    /// As the daemon understood it, windows included.
    pub codec_spec: String,
    /// Stored size of the passages in the daemon, by part.
    pub storage: StorageRatios,
    /// Bits per value, with constant parts spread over a context of a stated length.
    pub context: ContextBits,
    /// On clean queries, keys and values of the first passage, by layer.
    pub attention_error: AttentionError,
    /// On the passages, against the run without kvd.
    pub quality: TextQuality,
    /// After a prefix from the cache, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<AttachedQuality>,
    /// Encode, load and attend; absent without the daemon's metrics.
    pub speed: Option<DeviceSpeed>,
    /// Time the calibration took; 0 for codecs without.
    pub calibration_seconds: f64,
}

/// Bits per value of one sequence of [`EvalSetup::context_tokens`], everything counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ContextBits {
    /// Packed blocks.
    pub packed: f64,
    /// Windows and the open block, in the stored precision.
    pub windows: f64,
    /// Calibration and Huffman tables.
    pub model: f64,
    /// All three.
    pub total: f64,
}

impl ContextBits {
    /// Spreads what `sequences` sequences hold over a context of `tokens` tokens of
    /// `values_per_token` K and V values: the same windows, the rest packed.
    pub(super) fn new(
        storage: &StorageRatios,
        sequences: usize,
        tokens: usize,
        values_per_token: usize,
    ) -> Self {
        let values = (tokens * values_per_token) as f64;
        let each = |count: u64| count as f64 / sequences as f64;
        let raw_values = each(storage.parts.raw_values).min(values);
        let packed = storage.bits_per_value * (values - raw_values) / values;
        let windows = 8.0 * each(storage.parts.raw_bytes) / values;
        let model = 8.0 * storage.model_bytes as f64 / values;
        Self { packed, windows, model, total: packed + windows + model }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::StoredBytes;

    #[test]
    fn a_longer_context_spreads_windows_and_tables_thinner() {
        let parts =
            StoredBytes { raw_values: 2 * 1000, raw_bytes: 2 * 2000, ..StoredBytes::default() };
        let storage = StorageRatios {
            bits_per_value: 2.0,
            model_bytes: 500,
            parts,
            ..StorageRatios::default()
        };
        // 400 tokens of 10 values: 1000 raw at 16 bits, 3000 at 2, and 4000 bits of tables.
        let short = ContextBits::new(&storage, 2, 400, 10);
        assert_eq!((short.packed, short.windows, short.model), (1.5, 4.0, 1.0));
        assert_eq!(short.total, 6.5);
        let long = ContextBits::new(&storage, 2, 400_000, 10);
        assert!((long.total - 2.0).abs() < 0.01, "{long:?}");
    }
}
