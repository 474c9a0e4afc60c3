//! Structured logs on standard error.

use crate::config::{Config, ConfigError};
use std::ffi::OsStr;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Installs the process-wide log subscriber.
///
/// # Errors
/// When `log.filter` does not parse.
pub fn init_logs(config: &Config) -> Result<(), ConfigError> {
    let filter = EnvFilter::try_new(&config.log_filter)
        .map_err(|error| ConfigError { key: "log.filter".to_owned(), reason: error.to_string() })?;
    let no_color = std::env::var_os("NO_COLOR");
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(is_coloured(no_color.as_deref(), std::io::stderr().is_terminal()));
    // An embedding program may have set its own; that one stays.
    let _ = if config.log_json { builder.json().try_init() } else { builder.try_init() };
    if std::env::var_os("RUST_LOG").is_some_and(|filter| !filter.is_empty()) {
        tracing::warn!("RUST_LOG is not read: log.filter (KVD_LOG__FILTER) says what is logged");
    }
    Ok(())
}

/// Colours are for people at a terminal who did not ask for none (<https://no-color.org>); in a
/// file or a journal they are noise.
fn is_coloured(no_color: Option<&OsStr>, terminal: bool) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        assert!(is_coloured(None, true) && is_coloured(Some(OsStr::new("")), true));
        assert!(!is_coloured(Some(OsStr::new("1")), true));
        assert!(!is_coloured(Some(OsStr::new("0")), true));
        assert!(!is_coloured(None, false));
    }
}
