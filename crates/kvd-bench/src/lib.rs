//! `kvd bench`: how fast this machine attends, encodes and stores, without a daemon around it; and
//! what each transport adds, with one.
//!
//! Every figure is processor time of this process, because machines are shared: runs of different
//! codecs take turns, and each figure is the median of its turns, with the best beside it. Pages
//! rotate over a buffer larger than the last-level cache, so that codes come from memory.
//!
//! It is below the daemon: whoever measures transports says how one is started
//! ([`DaemonStarter`]).
#![forbid(unsafe_code)]

mod attend;
#[cfg(feature = "clients")]
mod beside;
mod cache;
mod codec;
mod data;
pub mod limits;
mod measure;
#[cfg(feature = "clients")]
mod mixed;
mod peaks;
mod scores;
mod shared;
#[cfg(feature = "clients")]
mod shared_workers;
mod store;
#[cfg(feature = "clients")]
mod transport;
#[cfg(feature = "clients")]
mod ways;

pub use attend::{AttendBench, AttendRow};
pub use cache::{CacheBench, CacheRow};
pub use codec::{CodecBench, CodecRow, HuffmanRow};
pub use data::fit_codec;
pub use measure::{BenchResult, MachineInfo, MeasuredFigure};
#[cfg(feature = "clients")]
pub use mixed::{MixedBench, MixedRow};
pub use scores::{ScoresBench, ScoresRow};
pub use shared::{SharedBench, SharedRow};
#[cfg(feature = "clients")]
pub use shared_workers::SharedWorkers;
pub use store::{ErrorMeasure, StoreBench, StoreRow};
#[cfg(feature = "clients")]
pub use transport::{TransportBench, TransportRow};
#[cfg(feature = "clients")]
pub use ways::{BenchedDaemon, DaemonStarter, DeviceClock, EchoCaller, EchoPlan};

use kvd_compute::InstructionSet;
use kvd_core::{DType, Geometry, RopePairing};

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Name on the command line.
    pub name: &'static str,
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads that share one.
    pub group: u32,
    /// Channels of a key.
    pub head_dim_k: u32,
    /// Channels of a value.
    pub head_dim_v: u32,
}

/// Shapes that `--shape` names.
pub const SHAPES: &[HeadShape] = &[
    HeadShape { name: "llama-3.1-8b", kv_heads: 8, group: 4, head_dim_k: 128, head_dim_v: 128 },
    HeadShape { name: "mistral-7b", kv_heads: 8, group: 4, head_dim_k: 128, head_dim_v: 128 },
    HeadShape { name: "qwen3-8b", kv_heads: 8, group: 4, head_dim_k: 128, head_dim_v: 128 },
    HeadShape { name: "qwen3-32b", kv_heads: 8, group: 8, head_dim_k: 128, head_dim_v: 128 },
    HeadShape { name: "llama-3.2-1b", kv_heads: 8, group: 4, head_dim_k: 64, head_dim_v: 64 },
    HeadShape { name: "phi-3-mini", kv_heads: 32, group: 1, head_dim_k: 96, head_dim_v: 96 },
    HeadShape { name: "stablelm-3b", kv_heads: 32, group: 1, head_dim_k: 80, head_dim_v: 80 },
    HeadShape { name: "gemma-2-9b", kv_heads: 8, group: 2, head_dim_k: 256, head_dim_v: 256 },
    // Multi-head latent attention as one KV head: 512 latent and 64 rotary channels.
    HeadShape { name: "mla", kv_heads: 1, group: 128, head_dim_k: 576, head_dim_v: 512 },
];

/// The shape of that name, or `8x4x128` and `8x4x128x64`: KV heads, query heads that share one,
/// channels of a key, and of a value where they are others, both even.
#[must_use]
pub fn find_shape(name: &str) -> Option<HeadShape> {
    SHAPES.iter().find(|shape| shape.name == name).copied().or_else(|| parse_shape(name))
}

fn parse_shape(text: &str) -> Option<HeadShape> {
    let number = |text: &str| text.parse().ok().filter(|number| (1..=1024).contains(number));
    let numbers: Option<Vec<u32>> = text.split('x').map(number).collect();
    let (kv_heads, group, head_dim_k, head_dim_v) = match numbers?[..] {
        [kv_heads, group, dim] => (kv_heads, group, dim, dim),
        [kv_heads, group, dim_k, dim_v] => (kv_heads, group, dim_k, dim_v),
        _ => return None,
    };
    let shape = HeadShape { name: "own", kv_heads, group, head_dim_k, head_dim_v };
    shape.layer_geometry(1).validate_fields().is_ok().then_some(shape)
}

impl std::fmt::Display for HeadShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, kv_heads, group, head_dim_k, head_dim_v } = self;
        write!(f, "{name} ({kv_heads}x{group}x{head_dim_k}x{head_dim_v})")
    }
}

/// Each instruction set that is to be measured; of none named, the machine's best.
fn each_set(named: &[InstructionSet]) -> Vec<Option<InstructionSet>> {
    if named.is_empty() {
        return vec![None];
    }
    named.iter().copied().map(Some).collect()
}

/// Why a benchmark could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A codec is not for this shape, or not known.
    #[error("--codec {codec}: {reason}")]
    Codec {
        /// As given.
        codec: String,
        /// Why not.
        reason: String,
    },
    /// More threads than cores.
    #[error(
        "--threads {threads}: this process may use {cores} cores, and more threads would only take \
         turns on them; give at most {cores}"
    )]
    Threads {
        /// As given.
        threads: usize,
        /// Cores of the process.
        cores: usize,
    },
    /// Options that come to more than one call may take.
    #[error("{what}: {asked} is above the maximum {max}; give less {options}")]
    Limit {
        /// The quantity of which there is too much.
        what: &'static str,
        /// How much was asked for.
        asked: u64,
        /// The most there can be.
        max: u64,
        /// Options that make it less.
        options: &'static str,
    },
    /// Options that come to more memory than there is.
    #[error(
        "{what}: {bytes} bytes of memory are wanted, and {available} are there; give less \
         --buffer, --context, --tokens or --batch, or a smaller --shape"
    )]
    Memory {
        /// The codec whose pages or rows take it.
        what: String,
        /// How much was asked for.
        bytes: u64,
        /// How much there is.
        available: u64,
    },
    /// A step failed.
    #[error("{what}: {reason}")]
    Failed {
        /// Which codec or step.
        what: String,
        /// The error in words.
        reason: String,
    },
}

impl BenchError {
    /// A failure of `what`, for `map_err`.
    pub fn failed_step<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Self + '_ {
        move |error| Self::Failed { what: what.to_owned(), reason: error.to_string() }
    }

    /// A codec that cannot be measured, for `map_err`.
    fn codec_error<E: std::fmt::Display>(codec: &str) -> impl FnOnce(E) -> Self + '_ {
        move |error| Self::Codec { codec: codec.to_owned(), reason: error.to_string() }
    }

    /// Whether other options would do.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }
}

impl HeadShape {
    /// One layer of this shape.
    fn layer_geometry(&self, block_tokens: u32) -> Geometry {
        Geometry {
            layers: 1,
            kv_heads: self.kv_heads,
            head_dim_k: self.head_dim_k,
            head_dim_v: self.head_dim_v,
            block_tokens,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{SHAPES, find_shape};

    #[test]
    fn a_shape_is_a_name_or_its_numbers() {
        assert_eq!(
            find_shape("mla").map(|shape| shape.to_string()),
            Some("mla (1x128x576x512)".into())
        );
        assert_eq!(
            find_shape("8x4x128").map(|shape| shape.to_string()),
            Some("own (8x4x128x128)".into())
        );
        assert_eq!(
            find_shape("2x1x96x64").map(|shape| shape.to_string()),
            Some("own (2x1x96x64)".into())
        );
        for wrong in ["", "8", "8x4", "0x4x128", "8x4x128x8x1", "8x4xd", "8x4x4096", "8x4x127"] {
            assert_eq!(find_shape(wrong), None, "{wrong}");
        }
        for known in SHAPES {
            assert_eq!(find_shape(known.name), Some(*known));
        }
    }
}
