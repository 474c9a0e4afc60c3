//! `kvd health` and `kvd status`: whether a daemon serves, and what it holds.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text};
use super::models::{self, ModelRow, model_table};
use clap::Args;
use kvd_client::{Client, PoolStats};
use serde::Serialize;

#[derive(Args)]
pub(super) struct HealthArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Health of a daemon that serves.
#[derive(Serialize)]
struct DaemonHealth {
    serving: bool,
}

#[derive(Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A daemon at one moment.
#[derive(Serialize)]
struct DaemonStatus {
    version: String,
    boot_id: String,
    device: String,
    precision: String,
    serving: bool,
    namespace: String,
    pools: Vec<PoolRow>,
    /// Those of the namespace, as models and sequences are.
    sessions: usize,
    models: Vec<ModelRow>,
    /// Cached bytes of all namespaces, all devices.
    cached_bytes: u64,
}

/// The pool of a device.
#[derive(Serialize)]
struct PoolRow {
    device: String,
    tier: String,
    capacity_bytes: u64,
    used_bytes: u64,
    largest_free_bytes: u64,
}

impl From<PoolStats> for PoolRow {
    fn from(stats: PoolStats) -> Self {
        let PoolStats { device, tier, capacity_bytes, used_bytes, largest_free_bytes, .. } = stats;
        Self { device, tier, capacity_bytes, used_bytes, largest_free_bytes }
    }
}

/// Asks whether the daemon serves; an error where it does not.
pub(super) async fn check_health(args: HealthArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_briefly().await?;
    match client.is_serving().await {
        Ok(true) if args.json => json_text(&DaemonHealth { serving: true }),
        Ok(true) => Ok("serving\n".to_owned()),
        Ok(false) => Err(CliError::NotServing),
        Err(error) => Err(CliError::Unreachable(error)),
    }
}

/// Describes a daemon and its contents.
pub(super) async fn describe_status(args: StatusArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    let status = read_status(&client, args.daemon.namespace_name()).await;
    let status = status.map_err(anyhow::Error::from)?;
    if args.json { json_text(&status) } else { Ok(status_text(&status)) }
}

async fn read_status(
    client: &Client,
    namespace: String,
) -> Result<DaemonStatus, kvd_client::ClientError> {
    let info = client.server_info().await?;
    let stats = client.stats().await?;
    Ok(DaemonStatus {
        version: info.version,
        boot_id: info.boot_id,
        device: info.device,
        precision: info.precision,
        serving: client.is_serving().await?,
        namespace,
        pools: stats.pools.into_iter().map(PoolRow::from).collect(),
        sessions: client.list_sessions().await?.len(),
        models: models::list_rows(client).await?,
        cached_bytes: stats.caches.iter().map(|cache| cache.bytes).sum(),
    })
}

fn status_text(status: &DaemonStatus) -> String {
    let DaemonStatus { version, boot_id, device, precision, namespace, .. } = status;
    let state = if status.serving { "serving" } else { "not serving" };
    let mut text = format!("kvd {version} {state}, boot {boot_id}\n{device}");
    // The CPU's own description has it.
    if !device.contains(precision.as_str()) {
        text.push_str(&format!(", {precision}"));
    }
    text.push('\n');
    for pool in &status.pools {
        let PoolRow { device, tier, capacity_bytes, used_bytes, .. } = pool;
        let percent = 100.0 * *used_bytes as f64 / (*capacity_bytes).max(1) as f64;
        text.push_str(&format!(
            "pool of device {device} ({tier}): {} of {}, {percent:.1} %\n",
            format_bytes(*used_bytes),
            format_bytes(*capacity_bytes),
        ));
    }
    text.push_str(&format!(
        "cached {}; namespace {namespace}: sessions {}, sequences {}, saved {}\n\n",
        format_bytes(status.cached_bytes),
        status.sessions,
        status.models.iter().map(|model| model.sequences).sum::<u64>(),
        format_bytes(status.models.iter().map(ModelRow::saved_bytes).sum()),
    ));
    text + &model_table(&status.models)
}
