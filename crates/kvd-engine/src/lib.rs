//! A small real language model with its attention left open.
//!
//! [`Model`] computes everything of a Llama, Mistral, Qwen2 or Qwen3 model but the attention, which
//! is whatever implements [`Attention`]: [`LocalAttention`] in this process, or a daemon.
//! [`teacher_forced`] and [`generate`] take it through text; [`Quality`] compares two such runs.
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

pub use assets::{Assets, Window};
pub use attention::{Attention, AttentionInput, Recorder, Recording};
pub use config::{Family, Heads, LayerKind, ModelConfig};
pub use error::ModelError;
pub use generate::{Continuation, generate};
pub use local::LocalAttention;
pub use model::Model;
pub use quality::{Predictions, Quality, QualitySums, teacher_forced};
pub use weights::WeightFiles;
