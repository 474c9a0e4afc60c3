//! A small real language model with its attention left open.
//!
//! [`Model`] computes everything of a Llama- or Qwen2-style model but the attention, which is
//! whatever implements [`Attention`]: [`LocalAttention`] in this process, or a daemon.
//! [`teacher_forced`] and [`generate`] take it through text; [`Quality`] compares two such runs.
//!
//! The crate knows no codec, no daemon and no network.
#![forbid(unsafe_code)]

mod assets;
mod attention;
mod config;
mod generate;
mod local;
mod model;
pub mod plain;
mod quality;

pub use assets::{Assets, Window};
pub use attention::{Attention, AttentionInput, Recorder, Recording};
pub use config::{Heads, ModelConfig};
pub use generate::{Continuation, generate};
pub use local::LocalAttention;
pub use model::Model;
pub use quality::{Predictions, Quality, QualitySums, teacher_forced};
