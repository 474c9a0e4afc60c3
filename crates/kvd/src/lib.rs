//! The KV-cache memory daemon: configuration, transport, service, lanes, metrics.
//!
//! ```text
//! transport ─► service ─► store (who holds which bytes)
//!                     └─► lane  ─► backend (the bytes)
//! ```
#![forbid(unsafe_code)]

pub mod admin;
mod affinity;
pub mod bench;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dashboard;
mod descriptors;
pub mod device;
pub mod lane;
pub mod metrics;
pub mod service;
pub mod telemetry;
pub mod transport;
mod turns;

pub use config::Config;
pub use daemon::{BuildError, Daemon, Drained, Running};
