//! A daemon in this process for the commands that are their own client, over loopback gRPC.

use super::{CliError, serve::stop_signal};
use crate::config::{Config, ConfigOverrides};
use crate::daemon::{Daemon, RunningDaemon};
use crate::telemetry;
use anyhow::Context;
use kvd_client::Endpoint;
use kvd_eval::measure::MetricsSource;
use std::time::Duration;

/// Settings of that daemon that differ from the defaults.
pub(super) struct LocalDaemon<'a> {
    /// Address of the metrics; empty for none.
    pub(super) admin: &'a str,
    /// Page memory.
    pub(super) pool: &'a str,
    /// Tokens per block.
    pub(super) block_tokens: u32,
}

/// Tokens per block unless a command asks for others: what the daemon's default is.
pub(super) const BLOCK_TOKENS: u32 = 64;

impl LocalDaemon<'_> {
    /// Starts a daemon, does `work` with it and drains it, also after a signal. The process ends
    /// soon after a signal even where a fit keeps this thread busy.
    pub(super) async fn run_with(
        &self,
        work: impl AsyncFnOnce(&RunningDaemon) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let block_tokens = self.block_tokens.to_string();
        let flags = [
            ("server.listen_tcp", "127.0.0.1:0"),
            ("admin.listen", self.admin),
            ("device.pool_bytes", self.pool),
            ("defaults.block_tokens", &block_tokens),
            // Whoever measures may want to know what small pages cost.
            ("limits.page_tokens_min", "1"),
            ("log.filter", "warn"),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let config = Config::load(&ConfigOverrides { file: None, environment: false, flags })?;
        // Its own settings name no collector of traces.
        telemetry::init_telemetry(&config)?;
        let running = Daemon::build(config).await?.spawn();
        let outcome = tokio::select! {
            result = work(&running) => result,
            () = running.device_failed() => Err(CliError::DeviceFailed),
            ended = tokio::spawn(wait_for_end()) => match ended.map_err(anyhow::Error::from)? {
                Ok(signal) => Err(CliError::Interrupted(signal)),
                Err(error) => Err(CliError::Other(error.into())),
            },
        };
        running.drain().await;
        outcome
    }
}

/// Time for the work to notice a signal and for the daemon to drain.
const END_GRACE: Duration = Duration::from_secs(2);

/// The signal that ends the command; the process does not outlive it for long.
async fn wait_for_end() -> std::io::Result<i32> {
    let signal = stop_signal().await?;
    tokio::spawn(async move {
        tokio::time::sleep(END_GRACE).await;
        CliError::Interrupted(signal).end_process()
    });
    Ok(signal)
}

/// Where that daemon listens.
pub(super) fn daemon_endpoint(running: &RunningDaemon) -> anyhow::Result<Endpoint> {
    let tcp = running.bound_addresses().tcp.context("the daemon in this process listens on TCP")?;
    Ok(format!("http://{tcp}").parse()?)
}

/// Metrics of that daemon.
pub(super) fn daemon_metrics(running: &RunningDaemon) -> MetricsSource {
    let metrics = running.service().metrics().clone();
    MetricsSource::new(move || metrics.render_page())
}
