//! Errors of sources of calibration rows.

use kvd_fit::{SampleKind, SampleShortage};

/// A calibration that cannot be made from its input; each error says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// A transform that looks at queries, and rows without them.
    #[error(
        "codec {codec} looks at queries, and the samples have none: a daemon keeps those of \
         models registered with k=raw once they were attended; or use --model, or a --samples file \
         with layer.N.q"
    )]
    NoQueries {
        /// The codec.
        codec: String,
    },
    /// Fewer queries than matrices need that look at them.
    #[error(
        "codec {codec} looks at queries and needs at least {needed} for each KV head, \
         four for each of {channels} channels; layer {layer} has {found}: give more query tokens \
         (layer.N.q of --samples, --tokens of a model; a daemon keeps those that were attended)"
    )]
    TooFewQueries {
        /// The codec.
        codec: String,
        /// The layer with the fewest.
        layer: u32,
        /// Queries of one of its KV heads.
        found: usize,
        /// How many there must be.
        needed: usize,
        /// Channels of a key.
        channels: usize,
    },
    /// Fewer tokens than the statistics of a codec need.
    #[error(
        "codec {codec} needs at least {needed} tokens for rows of {channels} channels; the samples \
         have {found}: give more tokens"
    )]
    TooFewTokens {
        /// The codec.
        codec: String,
        /// Tokens of the samples.
        found: usize,
        /// How many there must be.
        needed: usize,
        /// Channels of a row.
        channels: usize,
    },
    /// A head whose rows are all zeros.
    #[error(
        "{kind} of layer {layer}, KV head {head}, are all zeros, and a calibration would know \
         nothing of them: take the samples from a forward pass on text"
    )]
    OnlyZeros {
        /// Keys, values or queries.
        kind: SampleKind,
        /// The layer.
        layer: u32,
        /// The KV head.
        head: usize,
    },
    /// The codec takes nothing from samples.
    #[error(
        "codec {codec} needs no calibration: use it as it is; `kvd codecs` says which need one"
    )]
    NothingToFit {
        /// The codec.
        codec: String,
    },
    /// A dump with a wrong or missing tensor.
    #[error("{file}: {problem}")]
    Dump {
        /// The file.
        file: String,
        /// The tensor, and its expected type and shape.
        problem: String,
    },
    /// Several sources whose rows have different shapes.
    #[error("{file} has another shape than the files before it")]
    Mixed {
        /// The first that differs.
        file: String,
    },
    /// A sequence without a stored token on some layer.
    #[error("sequence {sequence} has no tokens stored on every layer")]
    Empty {
        /// The sequence.
        sequence: u64,
    },
}

impl CalibrateError {
    /// The error of samples that lack something for a codec.
    pub(super) fn of_shortage(shortage: SampleShortage, codec: &str) -> Self {
        let codec = codec.to_owned();
        match shortage {
            SampleShortage::NoQueries => Self::NoQueries { codec },
            SampleShortage::TooFewQueries { layer, found, needed, channels } => {
                Self::TooFewQueries { codec, layer, found, needed, channels }
            }
            SampleShortage::TooFewTokens { found, needed, channels } => {
                Self::TooFewTokens { codec, found, needed, channels }
            }
            SampleShortage::OnlyZeros { kind, layer, head } => {
                Self::OnlyZeros { kind, layer, head }
            }
        }
    }
}
