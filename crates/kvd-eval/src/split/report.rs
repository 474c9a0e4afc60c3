//! The split that a codec got, and why.

use kvd_codec::CodecSpec;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// How a codec's bits are shared among layers, heads and sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BitSplit {
    /// One step for all heads of a side, at the rate that its spec asks for.
    Even,
    /// By what errors cost, where held-out text says that this loses less.
    #[default]
    Sensitivity,
}

impl FromStr for BitSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "even" => Ok(Self::Even),
            "sensitivity" => Ok(Self::Sensitivity),
            _ => Err(format!("{text:?}: expected sensitivity or even")),
        }
    }
}

impl fmt::Display for BitSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Even => "even",
            Self::Sensitivity => "sensitivity",
        })
    }
}

/// A codec on text that neither a fit nor a split has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct JudgedCodec {
    /// KL in nats; without a model the mean over layers of the squared relative error of
    /// attention outputs.
    pub loss: f64,
    /// Bits per value of its pages.
    pub bits: f64,
}

/// Why a codec has the split that it has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitVerdict {
    /// The split by costs loses less.
    ByCosts {
        /// The even split.
        even: JudgedCodec,
        /// The split by costs.
        by_costs: JudgedCodec,
    },
    /// The split by costs does not lose less: the even split is kept.
    NotBetter {
        /// The even split.
        even: JudgedCodec,
        /// The split by costs.
        by_costs: JudgedCodec,
    },
    /// There is too little text to hold some out: the even split is kept.
    TooLittleText {
        /// Tokens there are.
        tokens: usize,
        /// Tokens there must be.
        needed: usize,
    },
    /// Nobody knows which tokens the queries are of: the even split is kept.
    QueriesWithoutTokens,
}

/// The split of one codec.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SplitReport {
    /// The preset with these two sides, or the codec's text.
    pub codec: String,
    /// Whether losses are of a model's predictions.
    pub by_model: bool,
    /// The split that was taken, and why.
    pub verdict: SplitVerdict,
}

impl SplitReport {
    pub(super) fn new(spec: &CodecSpec, by_model: bool, verdict: SplitVerdict) -> Self {
        let same = |preset: &&kvd_codec::Preset| {
            kvd_codec::find_preset(preset.name).is_some_and(|known| {
                (known.key, known.value) == (spec.key.clone(), spec.value.clone())
            })
        };
        let preset = kvd_codec::presets().iter().find(same);
        let codec = preset.map_or_else(|| spec.to_string(), |preset| preset.name.to_owned());
        Self { codec, by_model, verdict }
    }
}

impl fmt::Display for SplitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.codec)?;
        let loss = if self.by_model { "KL" } else { "squared error of attention" };
        match self.verdict {
            SplitVerdict::ByCosts { even, by_costs } => write!(
                f,
                "bits shared by sensitivity: {loss} {:.5} at {:.2} bits on held-out text, {:.5} \
                 at {:.2} bits with an even split",
                by_costs.loss, by_costs.bits, even.loss, even.bits
            ),
            SplitVerdict::NotBetter { even, by_costs } => write!(
                f,
                "bits shared evenly: {loss} {:.5} at {:.2} bits on held-out text, {:.5} at {:.2} \
                 bits when shared by sensitivity",
                even.loss, even.bits, by_costs.loss, by_costs.bits
            ),
            SplitVerdict::TooLittleText { tokens, needed } => write!(
                f,
                "bits shared evenly, because {tokens} tokens are too few to measure \
                 sensitivity on some that no fit sees; give {needed} at least"
            ),
            SplitVerdict::QueriesWithoutTokens => f.write_str(
                "bits shared evenly: sensitivity needs a query of every token, as a dump of \
                 --model has",
            ),
        }
    }
}
