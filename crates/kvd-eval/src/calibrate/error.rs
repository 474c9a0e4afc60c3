//! What a source of calibration rows can lack.

/// A calibration that cannot be made from what was given; each says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// `qpca` on rows without queries.
    #[error(
        "codec {codec} looks at queries (qpca), and the samples have none: a daemon keeps those of \
         models registered with k=raw once they were attended; or use --model, or a --samples file \
         with layer.N.q"
    )]
    NoQueries {
        /// The codec.
        codec: String,
    },
    /// The codec takes nothing from samples.
    #[error(
        "codec {codec} needs no calibration: use it as it is; `kvd codecs` says which need one"
    )]
    NothingToFit {
        /// The codec.
        codec: String,
    },
    /// A dump that does not hold what it should.
    #[error("{file}: {problem}")]
    Dump {
        /// The file.
        file: String,
        /// Which tensor, and what it should be.
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
