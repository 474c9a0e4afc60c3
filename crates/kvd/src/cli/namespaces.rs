//! `kvd namespaces`: which tenants hold something, and how much.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text, shorten_text};
use super::help;
use super::table::{TableColumn, render_table};
use clap::{Args, Subcommand};
use kvd_client::NamespaceInfo;
use serde::Serialize;

/// Columns of a name.
const NAME_COLUMNS: usize = 32;

#[derive(Subcommand)]
pub(super) enum NamespacesCommand {
    /// List namespaces that hold something: models, sequences, sessions, bytes.
    #[command(after_help = help::NAMESPACES)]
    List(NamespaceListArgs),
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
}

impl From<NamespaceInfo> for NamespaceRow {
    fn from(info: NamespaceInfo) -> Self {
        let NamespaceInfo { name: namespace, models, sequences, sessions, .. } = info;
        let NamespaceInfo { held_bytes, weight, .. } = info;
        Self { namespace, models, sequences, sessions, held_bytes, weight }
    }
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: NamespacesCommand) -> Result<String, CliError> {
    let NamespacesCommand::List(args) = command;
    let client = args.daemon.connect_client().await?;
    let found = client.list_namespaces().await.map_err(anyhow::Error::from)?;
    let rows: Vec<_> = found.into_iter().map(NamespaceRow::from).collect();
    if args.json { json_text(&rows) } else { Ok(namespace_table(&rows)) }
}

fn namespace_table(rows: &[NamespaceRow]) -> String {
    if rows.is_empty() {
        return "no namespace holds anything\n".to_owned();
    }
    let cells = |cell: fn(&NamespaceRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    render_table(&[
        TableColumn::of_text("namespace", cells(|row| shorten_text(&row.namespace, NAME_COLUMNS))),
        TableColumn::of_numbers("models", cells(|row| row.models.to_string())),
        TableColumn::of_numbers("sequences", cells(|row| row.sequences.to_string())),
        TableColumn::of_numbers("sessions", cells(|row| row.sessions.to_string())),
        TableColumn::of_numbers("held", cells(|row| format_bytes(row.held_bytes))),
        TableColumn::of_numbers("weight", cells(|row| row.weight.to_string())),
    ])
}
