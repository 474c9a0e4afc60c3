//! Structured logs on standard error.

use crate::config::{Config, ConfigError};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Installs the process-wide log subscriber.
///
/// # Errors
/// When `log.filter` does not parse.
pub fn init(config: &Config) -> Result<(), ConfigError> {
    let filter = EnvFilter::try_new(&config.log_filter)
        .map_err(|error| ConfigError { key: "log.filter".to_owned(), reason: error.to_string() })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for people; in a file or a journal they are noise.
        .with_ansi(std::io::stderr().is_terminal());
    // An embedding program may have set its own; that one stays.
    let _ = if config.log_json { builder.json().try_init() } else { builder.try_init() };
    Ok(())
}
