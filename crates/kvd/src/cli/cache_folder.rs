//! `kvd cache ls` and `verify`: a folder of the disk tier, looked at without a daemon.

use super::CliError;
use super::ask_daemon::{format_bytes, json_text};
use super::table::{TableColumn, render_table};
use crate::daemon::BuildError;
use clap::Args;
use kvd_tier::offline::{OfflineAccess, OfflineStore, ScopeListing};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
pub(super) struct CacheFolderArgs {
    /// The folder, as cache.disk.path has it.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Look at it also while a daemon uses it; what is written meanwhile may be missing.
    #[arg(long)]
    read_only: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A scope of a folder.
#[derive(Serialize)]
struct ScopeRow {
    scope: String,
    model: String,
    namespace: String,
    codec: String,
    blocks: u64,
    bytes: u64,
    blocks_of_longest: u32,
}

impl From<&ScopeListing> for ScopeRow {
    fn from(listing: &ScopeListing) -> Self {
        // It is there for people: one that is not there shows as nothing.
        let description: serde_json::Value =
            serde_json::from_slice(&listing.description).unwrap_or_default();
        let text = |key| description[key].as_str().unwrap_or("?").to_owned();
        Self {
            scope: listing.scope.to_string(),
            model: text("model"),
            namespace: text("namespace"),
            codec: text("codec"),
            blocks: listing.blocks,
            bytes: listing.bytes,
            blocks_of_longest: listing.depth_max,
        }
    }
}

/// Outcome of a verification.
#[derive(Serialize)]
struct FolderVerification {
    sound_records: u64,
    bytes: u64,
    damaged: Vec<String>,
}

fn open_store(args: &CacheFolderArgs) -> Result<OfflineStore, CliError> {
    let access = if args.read_only { OfflineAccess::ReadOnly } else { OfflineAccess::Exclusive };
    Ok(OfflineStore::open_folder(&args.folder, access).map_err(BuildError::from)?)
}

/// Lists the scopes of a folder.
pub(super) fn list_scopes(args: &CacheFolderArgs) -> Result<String, CliError> {
    let listing = open_store(args)?.list_scopes();
    let rows: Vec<ScopeRow> = listing.scopes.iter().map(ScopeRow::from).collect();
    if args.json {
        return json_text(&rows);
    }
    let texts =
        |name, cell: fn(&ScopeRow) -> String| TableColumn::of_text(name, rows.iter().map(cell));
    let numbers =
        |name, cell: fn(&ScopeRow) -> String| TableColumn::of_numbers(name, rows.iter().map(cell));
    let (segments, bytes) = (listing.segments, format_bytes(listing.used_bytes));
    let head = format!("{segments} segments of {bytes} in all\n\n");
    Ok(head
        + &render_table(&[
            texts("scope", |row| row.scope[..8].to_owned()),
            texts("model", |row| row.model.clone()),
            texts("namespace", |row| row.namespace.clone()),
            numbers("blocks", |row| row.blocks.to_string()),
            numbers("bytes", |row| format_bytes(row.bytes)),
            numbers("longest", |row| row.blocks_of_longest.to_string()),
        ]))
}

/// Reads every record of a folder; an error where any is damaged.
pub(super) fn verify_folder(args: &CacheFolderArgs) -> Result<String, CliError> {
    let report = open_store(args)?.verify_records();
    let line = |damaged: &kvd_tier::offline::DamagedRecord| {
        let (scope, position) = (damaged.name.scope, damaged.name.position);
        format!("scope {scope}, block {position}: {}", damaged.error)
    };
    let (sound_records, bytes) = (report.sound, report.bytes);
    let damaged: Vec<String> = report.damaged.iter().map(line).collect();
    let done = FolderVerification { sound_records, bytes, damaged };
    if !done.damaged.is_empty() {
        let (count, lines) = (done.damaged.len(), done.damaged.join("\n"));
        let error =
            anyhow::anyhow!("{count} records are damaged, {sound_records} are sound\n{lines}");
        return Err(CliError::Other(error));
    }
    if args.json {
        return json_text(&done);
    }
    Ok(format!("{sound_records} records of {} are sound\n", format_bytes(bytes)))
}
