//! `kvd namespaces`: which tenants hold something, how much, and how much they may.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text, parse_namespace, shorten_text};
use super::help;
use super::table::{TableColumn, render_table};
use crate::config::parse_amount;
use clap::{Args, Subcommand};
use kvd_client::{Namespace, NamespaceInfo, NamespaceQuota, QuotaChange, QuotaOrder};
use kvd_store::QuotaKind;
use serde::Serialize;
use std::collections::BTreeMap;

/// Columns of a name.
const NAME_COLUMNS: usize = 32;

#[derive(Subcommand)]
pub(super) enum NamespacesCommand {
    /// List namespaces that hold something: models, sequences, sessions, bytes.
    #[command(after_help = help::NAMESPACES)]
    List(NamespaceListArgs),
    /// Change what a namespace may have. What is not named stays as it is.
    #[command(after_help = help::NAMESPACES_SET)]
    Set(NamespaceSetArgs),
}

#[derive(Args)]
pub(super) struct NamespaceSetArgs {
    /// The namespace.
    #[arg(value_parser = parse_namespace)]
    name: Namespace,
    #[command(flatten)]
    quotas: QuotaArgs,
    /// Its share of a busy device and of the cache, beside others', 1 to 1000.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    weight: Option<u32>,
    /// Go back to what the configuration says, before the other changes.
    #[arg(long)]
    reset: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Limits: amounts, or `none`.
#[derive(Args)]
struct QuotaArgs {
    /// Bytes of all pools.
    #[arg(long, value_name = "SIZE|none", value_parser = parse_size)]
    pool_bytes: Option<QuotaLimit>,
    /// Bytes of each device's pool that others cannot take.
    #[arg(long, value_name = "SIZE|none", value_parser = parse_size)]
    reserved_bytes: Option<QuotaLimit>,
    /// Bytes of cached blocks.
    #[arg(long, value_name = "SIZE|none", value_parser = parse_size)]
    cache_bytes: Option<QuotaLimit>,
    /// Bytes of cached blocks on disk.
    #[arg(long, value_name = "SIZE|none", value_parser = parse_size)]
    disk_bytes: Option<QuotaLimit>,
    /// Open sequences.
    #[arg(long, value_name = "NUMBER|none", value_parser = parse_count)]
    sequences: Option<QuotaLimit>,
    /// Registered models.
    #[arg(long, value_name = "NUMBER|none", value_parser = parse_count)]
    models: Option<QuotaLimit>,
    /// Sessions.
    #[arg(long, value_name = "NUMBER|none", value_parser = parse_count)]
    sessions: Option<QuotaLimit>,
    /// Bytes of requests and answers at once.
    #[arg(long, value_name = "SIZE|none", value_parser = parse_size)]
    inflight_bytes: Option<QuotaLimit>,
    /// Calls that wait for a device, of attends and of all else each.
    #[arg(long, value_name = "NUMBER|none", value_parser = parse_count)]
    queue_jobs: Option<QuotaLimit>,
}

/// An amount, or none for no limit.
#[derive(Clone, Copy)]
struct QuotaLimit(Option<u64>);

fn parse_limit(kind: QuotaKind, text: &str) -> Result<QuotaLimit, String> {
    match text {
        "none" => Ok(QuotaLimit(None)),
        _ => parse_amount(kind, text).map(|amount| QuotaLimit(Some(amount))),
    }
}

fn parse_size(text: &str) -> Result<QuotaLimit, String> {
    parse_limit(QuotaKind::PoolBytes, text)
}

fn parse_count(text: &str) -> Result<QuotaLimit, String> {
    parse_limit(QuotaKind::Sequences, text)
}

impl QuotaArgs {
    fn list_changes(&self) -> Vec<QuotaChange> {
        let limits = QuotaKind::ALL.map(|kind| match kind {
            QuotaKind::PoolBytes => self.pool_bytes,
            QuotaKind::ReservedBytes => self.reserved_bytes,
            QuotaKind::CacheBytes => self.cache_bytes,
            QuotaKind::DiskBytes => self.disk_bytes,
            QuotaKind::Sequences => self.sequences,
            QuotaKind::Models => self.models,
            QuotaKind::Sessions => self.sessions,
            QuotaKind::InflightBytes => self.inflight_bytes,
            QuotaKind::QueueJobs => self.queue_jobs,
        });
        let named = QuotaKind::ALL.into_iter().zip(limits);
        let change = |(kind, limit): (QuotaKind, Option<QuotaLimit>)| {
            let QuotaLimit(allowed) = limit?;
            Some(QuotaChange { name: kind.quota_name().to_owned(), allowed })
        };
        named.filter_map(change).collect()
    }
}

#[derive(Args)]
pub(super) struct NamespaceListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One namespace of a list.
#[derive(Serialize)]
struct NamespaceRow {
    namespace: String,
    models: u64,
    sequences: u64,
    sessions: u64,
    held_bytes: u64,
    weight: u32,
    /// By the name of the quota.
    quotas: BTreeMap<String, QuotaRow>,
}

/// One quota of a namespace.
#[derive(Serialize)]
struct QuotaRow {
    used: u64,
    /// Null: no limit.
    allowed: Option<u64>,
    refused: u64,
}

impl From<NamespaceInfo> for NamespaceRow {
    fn from(info: NamespaceInfo) -> Self {
        let NamespaceInfo { name: namespace, models, sequences, sessions, .. } = info;
        let NamespaceInfo { held_bytes, weight, .. } = info;
        let quotas = quota_rows(info.quotas);
        Self { namespace, models, sequences, sessions, held_bytes, weight, quotas }
    }
}

fn quota_rows(quotas: Vec<NamespaceQuota>) -> BTreeMap<String, QuotaRow> {
    let row = |quota: NamespaceQuota| {
        let NamespaceQuota { name, used, allowed, refused } = quota;
        (name, QuotaRow { used, allowed, refused })
    };
    quotas.into_iter().map(row).collect()
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: NamespacesCommand) -> Result<String, CliError> {
    match command {
        NamespacesCommand::List(args) => list_namespaces(args).await,
        NamespacesCommand::Set(args) => set_quotas(args).await,
    }
}

async fn list_namespaces(args: NamespaceListArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    let found = client.list_namespaces().await.map_err(anyhow::Error::from)?;
    let rows: Vec<_> = found.into_iter().map(NamespaceRow::from).collect();
    if args.json { json_text(&rows) } else { Ok(namespace_table(&rows)) }
}

async fn set_quotas(args: NamespaceSetArgs) -> Result<String, CliError> {
    let (name, changes) = (args.name.as_str().to_owned(), args.quotas.list_changes());
    if changes.is_empty() && args.weight.is_none() && !args.reset {
        let message = "name what to change, such as --pool-bytes 2GiB or --weight 4, or --reset";
        return Err(CliError::Usage(message.to_owned()));
    }
    let client = args.daemon.connect_client().await?;
    let order = QuotaOrder { name: name.clone(), reset: args.reset, changes, weight: args.weight };
    let changed = client.set_quotas(order).await.map_err(anyhow::Error::from)?;
    let quotas = quota_rows(changed.quotas);
    if args.json {
        let (kept, weight) = (changed.kept, changed.weight);
        return json_text(&ChangedRow { namespace: name, kept, weight, quotas });
    }
    let mut text = format!("{name}: weight {}, {}\n", changed.weight, limits_text(&quotas));
    if !changed.kept {
        text += "this ends with the daemon: it has no namespaces.quota_file\n";
    }
    Ok(text)
}

/// Quotas after a change.
#[derive(Serialize)]
struct ChangedRow {
    namespace: String,
    kept: bool,
    weight: u32,
    quotas: BTreeMap<String, QuotaRow>,
}

/// Limits that there are, and what is used of them.
fn limits_text(quotas: &BTreeMap<String, QuotaRow>) -> String {
    let shown = |name: &str, amount| match QuotaKind::from_name(name) {
        Some(kind) if kind.counts_bytes() => format_bytes(amount),
        _ => amount.to_string(),
    };
    let limit = |(name, row): (&String, &QuotaRow)| {
        let allowed = row.allowed?;
        Some(format!("{name} {} of {}", shown(name, row.used), shown(name, allowed)))
    };
    let limits: Vec<_> = quotas.iter().filter_map(limit).collect();
    if limits.is_empty() { "no limits".to_owned() } else { limits.join(", ") }
}

fn namespace_table(rows: &[NamespaceRow]) -> String {
    if rows.is_empty() {
        return "no namespace holds anything\n".to_owned();
    }
    let cells = |cell: fn(&NamespaceRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let mut text = render_table(&[
        TableColumn::of_text("namespace", cells(|row| shorten_text(&row.namespace, NAME_COLUMNS))),
        TableColumn::of_numbers("models", cells(|row| row.models.to_string())),
        TableColumn::of_numbers("sequences", cells(|row| row.sequences.to_string())),
        TableColumn::of_numbers("sessions", cells(|row| row.sessions.to_string())),
        TableColumn::of_numbers("held", cells(|row| format_bytes(row.held_bytes))),
        TableColumn::of_numbers("weight", cells(|row| row.weight.to_string())),
    ]);
    let is_limited = |row: &&NamespaceRow| row.quotas.values().any(|quota| quota.allowed.is_some());
    for row in rows.iter().filter(is_limited) {
        text += &format!("{}: {}\n", row.namespace, limits_text(&row.quotas));
    }
    text
}
