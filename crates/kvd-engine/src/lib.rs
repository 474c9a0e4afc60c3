//! A small real language model with its attention left open.
//!
//! [`LanguageModel`] computes everything of a Llama, Mistral, Qwen2 or Qwen3 model but the
//! attention, which is whatever implements [`LayerAttention`]: [`LocalAttention`] in this process,
//! or a daemon. [`teacher_forced`] and [`generate`] take it through text; [`TextQuality`] compares
//! two such runs.
//!
//! The crate knows no codec, no daemon and no network.
#![forbid(unsafe_code)]

mod assets;
mod attention;
mod config;
mod error;
mod generate;
mod local;
mod model;
pub mod plain;
mod quality;
mod rope;
mod weights;

pub use assets::{ModelAssets, TokenWindow};
pub use attention::{AttentionInput, AttentionRecorder, LayerAttention, LayerRecording};
pub use config::{HeadCounts, LayerKind, ModelConfig, ModelFamily};
pub use error::ModelError;
pub use generate::{Continuation, generate_tokens};
pub use local::{LocalAttention, round_to_f16};
pub use model::LanguageModel;
pub use quality::{QualitySums, TextQuality, TextSteps, WindowPredictions, teacher_forced};
pub use weights::WeightFiles;
