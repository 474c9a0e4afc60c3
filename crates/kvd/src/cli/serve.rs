//! `kvd serve`: until a signal or the device's end.

use super::CliError;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::telemetry;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) async fn serve(config: Config) -> Result<(), CliError> {
    telemetry::init(&config)?;
    let running = Daemon::build(config).await?.spawn();
    // Held through the drain, so that no signal falls between two listeners.
    let mut signals = StopSignals::new().map_err(anyhow::Error::from)?;
    let outcome = tokio::select! {
        () = signals.next() => Ok(()),
        () = running.device_failed() => Err(CliError::DeviceFailed),
    };
    tokio::select! {
        _ = running.drain() => outcome,
        () = signals.next() => {
            tracing::warn!("a signal during the drain: exit at once");
            // Returning would wait for the device's job and for blocking tasks.
            std::process::exit(1)
        }
    }
}

/// SIGTERM from a supervisor, SIGINT from a terminal.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The first of them from now on.
#[cfg(feature = "eval")]
pub(super) async fn stop_signal() -> std::io::Result<()> {
    StopSignals::new()?.next().await;
    Ok(())
}
