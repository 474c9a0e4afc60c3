//! The KV-cache memory daemon: configuration, transport, service, device workers, metrics.
//!
//! ```text
//! transport ─► service ─► store (who holds which bytes)
//!                     └─► worker  ─► backend (the bytes)
//! ```
#![forbid(unsafe_code)]

mod access;
pub mod admin;
mod bounded_file;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dashboard;
mod descriptors;
pub mod device;
pub mod device_worker;
mod door_files;
pub mod metrics;
mod quotas;
mod scheduler;
pub mod service;
mod shares;
pub mod telemetry;
mod tls;
pub mod transport;

pub use config::Config;
pub use daemon::{BuildError, Daemon, DrainOutcome, RunningDaemon};
