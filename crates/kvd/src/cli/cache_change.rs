//! `kvd cache gc` of a folder without a daemon, and `drop` of a daemon's blocks.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text};
use super::models::find_description;
use super::text_args::parse_size;
use crate::daemon::BuildError;
use bytesize::ByteSize;
use clap::Args;
use kvd_client::ModelId;
use kvd_tier::offline::{GarbageRule, OfflineAccess, OfflineStore, collect_garbage};
use kvd_tier::{DiskSettings, ScopeId};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Size of the segment that marks of dropped blocks are written to.
const MARKS_SEGMENT_BYTES: u64 = 4 << 20;

#[derive(Args)]
pub(super) struct CacheGcArgs {
    /// The folder, as cache.disk.path has it.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    rule: GcRuleArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct GcRuleArgs {
    /// Drop the oldest segments until the files take at most so many bytes.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    keep_bytes: Option<ByteSize>,
    /// Drop the blocks of a scope; its first digits will do. Their room is used again by and by.
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
}

#[derive(Args)]
pub(super) struct CacheDropArgs {
    /// Name or id of the model.
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Outcome of a gc.
#[derive(Serialize)]
struct CollectedFolder {
    freed_bytes: u64,
    blocks_before: u64,
    blocks: u64,
}

/// Outcome of a drop.
#[derive(Serialize)]
struct DroppedModel {
    dropped: u64,
    held: u64,
}

/// The one scope of a folder that begins with these digits.
pub(super) fn find_scope(store: &OfflineStore, digits: &str) -> Result<ScopeId, CliError> {
    let scopes = store.list_scopes().scopes;
    let digits = digits.to_ascii_lowercase();
    let mut fitting = scopes.iter().filter(|of| of.scope.to_string().starts_with(&digits));
    match (fitting.next(), fitting.next()) {
        (Some(found), None) => Ok(found.scope),
        (None, _) => {
            Err(CliError::Usage(format!("no scope begins with {digits}; see kvd cache ls")))
        }
        _ => Err(CliError::Usage(format!("more than one scope begins with {digits}"))),
    }
}

pub(super) fn open_store(folder: &Path) -> Result<OfflineStore, CliError> {
    let store = OfflineStore::open_folder(folder, OfflineAccess::Exclusive);
    Ok(store.map_err(BuildError::from)?)
}

fn count_blocks(store: &OfflineStore) -> u64 {
    store.list_scopes().scopes.iter().map(|of| of.blocks).sum()
}

/// Drops blocks of a folder by the rule of the arguments.
pub(super) fn collect_folder(args: &CacheGcArgs) -> Result<String, CliError> {
    let store = open_store(&args.folder)?;
    let blocks_before = count_blocks(&store);
    let rule = match (&args.rule.keep_bytes, &args.rule.scope) {
        (Some(bytes), _) => GarbageRule::KeepBytes(bytes.as_u64()),
        (None, Some(digits)) => GarbageRule::Scope(find_scope(&store, digits)?),
        (None, None) => return Err(CliError::Usage("--keep-bytes or --scope".to_owned())),
    };
    // It holds the folder's lock.
    drop(store);
    let settings = DiskSettings {
        segment_bytes: MARKS_SEGMENT_BYTES,
        reserve_free_bytes: 0,
        ..DiskSettings::new(args.folder.clone(), u64::MAX)
    };
    let freed_bytes = collect_garbage(settings, rule).map_err(BuildError::from)?;
    let blocks = count_blocks(&open_store(&args.folder)?);
    if args.json {
        return json_text(&CollectedFolder { freed_bytes, blocks_before, blocks });
    }
    let freed = format_bytes(freed_bytes);
    Ok(format!("{} blocks dropped, {blocks} left; {freed} freed\n", blocks_before - blocks))
}

/// Drops a model's blocks from a daemon.
pub(super) async fn drop_model(args: &CacheDropArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    let found = find_description(&client, &args.model).await?;
    let id = found.model.map_or(0, |stats| stats.model_id);
    let dropped = client.drop_blocks(ModelId(id), &[]).await.map_err(anyhow::Error::from)?;
    let (dropped, held) = (dropped.dropped, dropped.held);
    if args.json {
        return json_text(&DroppedModel { dropped, held });
    }
    Ok(format!("{dropped} blocks dropped; {held} stay, which sequences, leases or pins hold\n"))
}
