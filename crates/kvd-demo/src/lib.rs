//! A small real language model whose every attention goes through a kvd daemon.
#![forbid(unsafe_code)]

mod assets;
mod attention;
mod config;
mod local;
mod model;
mod plain;
mod quality;

pub use assets::{Assets, Window};
pub use attention::{Attention, AttentionInput, Recorder, Recording};
pub use config::{Heads, ModelConfig};
pub use local::LocalAttention;
pub use model::Model;
pub use quality::{Predictions, Quality, QualitySums, teacher_forced};
