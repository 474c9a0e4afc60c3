//! Structured logs on standard error, and traces for a collector.

mod traces;

pub use traces::TraceExport;
pub(crate) use traces::{CALL_SPAN, read_parent};

use crate::config::{Config, ConfigError};
use std::ffi::OsStr;
use std::io::IsTerminal;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Installs the process-wide subscriber of logs and, where a collector is named, traces: within a
/// Tokio runtime.
///
/// # Errors
/// When `log.filter` does not parse, or `traces.endpoint` cannot be reached by its form.
pub fn init_telemetry(config: &Config) -> Result<Option<TraceExport>, ConfigError> {
    let filter = EnvFilter::try_new(&config.log_filter)
        .map_err(|error| ConfigError { key: "log.filter".to_owned(), reason: error.to_string() })?;
    let no_color = std::env::var_os("NO_COLOR");
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_coloured(no_color.as_deref(), std::io::stderr().is_terminal()));
    let lines = if config.log_json { lines.json().boxed() } else { lines.boxed() };
    let export = config.traces.as_ref().map(TraceExport::start_thread).transpose()?;
    let spans = export.as_ref().map(TraceExport::span_layer);
    // An embedding program may have set its own; that one stays.
    let subscriber = tracing_subscriber::registry().with(spans).with(lines.with_filter(filter));
    let _ = subscriber.try_init();
    if std::env::var_os("RUST_LOG").is_some_and(|filter| !filter.is_empty()) {
        tracing::warn!("RUST_LOG is not read: log.filter (KVD_LOG__FILTER) says what is logged");
    }
    Ok(export)
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
