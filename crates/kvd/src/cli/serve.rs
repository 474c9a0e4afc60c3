//! `kvd serve`: until a signal or the device's end.

use super::CliError;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::telemetry;
use tokio::signal::unix::{SignalKind, signal};

pub(super) async fn serve(config: Config) -> Result<(), CliError> {
    telemetry::init(&config)?;
    let running = Daemon::build(config).await?.spawn();
    let outcome = tokio::select! {
        result = stop_signal() => result.map_err(anyhow::Error::from).map_err(CliError::from),
        () = running.device_failed() => Err(CliError::DeviceFailed),
    };
    running.drain().await;
    outcome
}

/// SIGTERM from a supervisor, SIGINT from a terminal.
pub(super) async fn stop_signal() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
