//! `kvd cache export` and `import`: cached blocks from one machine's folder to another's.

use super::CliError;
use super::ask_daemon::{format_bytes, json_text};
use super::cache_change::{find_scope, open_store};
use crate::daemon::BuildError;
use crate::service::tiers::scope_word;
use anyhow::Context;
use clap::Args;
use kvd_tier::offline::{
    KeyHasher, KeyHashes, OfflineAccess, OfflineStore, TransferReport, import_records,
};
use kvd_tier::{DiskSettings, RecordMeta, ScopeId};
use serde::Serialize;
use std::path::PathBuf;

/// Least size of a segment that imported blocks are written to.
const SEGMENT_BYTES_MIN: u64 = 4 << 20;

#[derive(Args)]
pub(super) struct CacheExportArgs {
    /// The folder, as cache.disk.path has it.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Where the files go: one for each scope.
    #[arg(value_name = "TO")]
    to: PathBuf,
    /// Export one scope alone; its first digits will do.
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Read it also while a daemon uses it; what is written meanwhile may be missing.
    #[arg(long)]
    read_only: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct CacheImportArgs {
    /// The folder, as cache.disk.path has it, which no daemon uses; made if it is not there.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Folder of exported files.
    #[arg(value_name = "FROM")]
    from: PathBuf,
    /// Refuse files with blocks of another scope: all its digits.
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Outcome of either.
#[derive(Serialize)]
struct MovedRecords {
    records: u64,
    bytes: u64,
    existed: u64,
    damaged: u64,
    without_key: u64,
}

impl From<TransferReport> for MovedRecords {
    fn from(report: TransferReport) -> Self {
        let TransferReport { records, bytes, skipped, without_key, existed } = report;
        Self { records, bytes, existed, damaged: skipped, without_key }
    }
}

/// Hashes keys as the daemon's index does.
struct IndexHasher;

impl KeyHasher for IndexHasher {
    fn hash_key(&self, seed: u64, meta: &RecordMeta, parent_lineage: u128) -> Option<KeyHashes> {
        let space = scope_word(meta.name.scope);
        let hashes = kvd_store::KeyHashes::of_key(seed, space, parent_lineage, &meta.key)?;
        Some(KeyHashes { digest: hashes.digest, lineage: hashes.lineage })
    }
}

/// Reads all digits of a scope.
fn parse_scope(digits: &str) -> Result<ScopeId, CliError> {
    let number = u128::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 32);
    let number = number.ok_or_else(|| {
        let message = format!("--scope {digits}: a scope has 32 hexadecimal digits");
        CliError::Usage(message)
    })?;
    Ok(ScopeId(number.to_be_bytes()))
}

/// Says what was moved; an error where something was not that should be.
fn say_moved(what: &str, report: TransferReport, json: bool) -> Result<String, CliError> {
    let moved = MovedRecords::from(report);
    let MovedRecords { records, bytes, existed, damaged, without_key } = moved;
    let mut said = format!("{records} records of {} {what}\n", format_bytes(bytes));
    let parts = [
        (existed, "were there already"),
        (without_key, "have no key: an earlier kvd wrote them"),
        (damaged, "are damaged, or a block before them is missing"),
    ];
    for (count, why) in parts.iter().filter(|(count, _)| *count > 0) {
        said += &format!("{count} {why}\n");
    }
    if damaged > 0 {
        return Err(CliError::Other(anyhow::anyhow!("{}", said.trim_end())));
    }
    if json { json_text(&moved) } else { Ok(said) }
}

/// Writes the records of a folder to files.
pub(super) fn export_folder(args: &CacheExportArgs) -> Result<String, CliError> {
    let store = if args.read_only {
        OfflineStore::open_folder(&args.folder, OfflineAccess::ReadOnly)
            .map_err(BuildError::from)?
    } else {
        open_store(&args.folder)?
    };
    let scope = args.scope.as_ref().map(|digits| find_scope(&store, digits)).transpose()?;
    let report = store.export_records(&args.to, scope).map_err(BuildError::from)?;
    say_moved("exported", report, args.json)
}

/// Writes the records of exported files to a folder.
pub(super) fn import_folder(args: &CacheImportArgs) -> Result<String, CliError> {
    let scope = args.scope.as_deref().map(parse_scope).transpose()?;
    // A small import takes no large segment.
    let mut bytes = SEGMENT_BYTES_MIN;
    for entry in std::fs::read_dir(&args.from).with_context(|| args.from.display().to_string())? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(anyhow::Error::from)?.len();
    }
    let settings = DiskSettings::new(args.folder.clone(), u64::MAX);
    let segment_bytes = bytes.next_multiple_of(SEGMENT_BYTES_MIN).min(settings.segment_bytes);
    let settings = DiskSettings { reserve_free_bytes: 0, segment_bytes, ..settings };
    let report = import_records(settings, &args.from, scope, &IndexHasher);
    say_moved("imported", report.map_err(BuildError::from)?, args.json)
}
