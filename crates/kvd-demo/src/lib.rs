//! A small real language model whose every attention goes through a kvd daemon.
//!
//! [`run`] takes the model through held-out text and a prompt, first with attention in this
//! process ([`LocalAttention`]), then once per codec with every attention of every layer answered
//! by the daemon over gRPC, and reports what the codec saves, what it changes and what it costs.
//! Everything but the attention ([`Attention`]) is the same code in every run.
//!
//! The crate talks to a daemon only through `kvd-client`; whoever calls [`run`] starts one.
#![forbid(unsafe_code)]

mod assets;
mod attention;
mod attention_error;
mod calibrate;
mod config;
mod daemon_latency;
mod demo;
mod evaluate;
mod generate;
mod latency;
mod local;
mod model;
mod options;
mod plain;
mod print;
mod progress;
mod quality;
mod report;
mod storage;
mod subject;
mod table;
mod through_kvd;

pub use assets::{Assets, Window};
pub use attention::{Attention, AttentionInput, Recorder, Recording};
pub use attention_error::AttentionError;
pub use config::{Heads, ModelConfig};
pub use daemon_latency::MetricsSource;
pub use demo::run;
pub use latency::{Calls, LatencySummary};
pub use local::LocalAttention;
pub use model::Model;
pub use options::DemoOptions;
pub use quality::{Predictions, Quality, QualitySums, teacher_forced};
pub use report::{CodecReport, DemoReport, Generation, ModelReport, ReferenceReport, Setup};
pub use storage::{Storage, StoredParts};
