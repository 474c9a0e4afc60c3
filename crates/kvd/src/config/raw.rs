//! The configuration as written: file, environment and flags laid over the defaults.

use super::DEFAULT_TOML;
use bytesize::ByteSize;
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::Deserialize;
use std::path::PathBuf;

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("configuration: {key}: {reason}")]
pub struct ConfigError {
    /// `section.key`, or the file.
    pub key: String,
    /// What is wrong and what would be right.
    pub reason: String,
}

impl ConfigError {
    pub(super) fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), reason: reason.into() }
    }
}

/// What lies over the defaults.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// A TOML file.
    pub file: Option<PathBuf>,
    /// Read `KVD_<SECTION>__<KEY>` from the environment.
    pub environment: bool,
    /// `section.key` and a TOML value (or a bare text), from flags.
    pub flags: Vec<(String, String)>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct RawConfig {
    pub server: Server,
    pub admin: Admin,
    pub device: Device,
    pub limits: Limits,
    pub namespaces: Namespaces,
    pub defaults: Defaults,
    pub log: Log,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Server {
    pub listen_tcp: String,
    pub listen_unix: String,
    pub message_bytes_max: ByteSize,
    pub stream_window_bytes: ByteSize,
    pub connection_window_bytes: ByteSize,
    pub keepalive_interval_ms: u64,
    pub keepalive_timeout_ms: u64,
    pub streams_per_connection_max: u32,
    pub connections_max: usize,
    pub grace_period_ms: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Admin {
    pub listen: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Device {
    pub device: String,
    pub pool_bytes: ByteSize,
    pub prefault: bool,
    pub threads: usize,
    pub queue_jobs_max: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Limits {
    pub models_max: usize,
    pub sequences_max: usize,
    pub tokens_per_sequence_max: u32,
    pub calibration_bytes_max: ByteSize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Namespaces {
    pub allowed: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Defaults {
    pub block_tokens: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct Log {
    pub format: String,
    pub filter: String,
}

impl RawConfig {
    /// Defaults < file < environment < flags.
    ///
    /// # Errors
    /// Names the key that is unknown or of the wrong type, or the file that cannot be read.
    pub fn load(overrides: &Overrides) -> Result<Self, ConfigError> {
        let mut figment = Figment::from(Toml::string(DEFAULT_TOML));
        if let Some(path) = &overrides.file {
            let text = std::fs::read_to_string(path)
                .map_err(|error| ConfigError::new(path.display().to_string(), error.to_string()))?;
            figment = figment.merge(Toml::string(&text));
        }
        if overrides.environment {
            figment = figment.merge(Env::prefixed("KVD_").split("__"));
        }
        for (key, value) in &overrides.flags {
            let value: figment::value::Value = value.parse().expect("any text is a figment value");
            figment = figment.merge(Serialized::default(key, value));
        }
        figment.extract().map_err(|error| {
            // The first of a chain; later ones are found once it is mended.
            let key = error.path.join(".");
            let reason = error.kind.to_string();
            ConfigError::new(if key.is_empty() { "file".to_owned() } else { key }, reason)
        })
    }
}
