//! `kvd cache`: what a daemon has cached, and what a cache would have found of a trace.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text};
use super::cache_change::{CacheDropArgs, CacheGcArgs, collect_folder, drop_model};
use super::cache_folder::{CacheFolderArgs, list_scopes, verify_folder};
use super::cache_transfer::{CacheExportArgs, CacheImportArgs, export_folder, import_folder};
use super::help;
use super::table::{TableColumn, render_table};
use crate::bounded_file::open_file;
use clap::{Args, Subcommand};
use kvd_client::CacheStats;
use kvd_store::{CacheSimulator, EvictionChoice};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub(super) enum CacheCommand {
    /// Say what a daemon has cached, by device.
    #[command(after_help = help::CACHE_STAT)]
    Stat(CacheStatArgs),
    /// List what a folder of the disk tier holds, by scope.
    #[command(after_help = help::CACHE_LS)]
    Ls(CacheFolderArgs),
    /// Read all records of a folder; ends with 1 where any is damaged.
    #[command(after_help = help::CACHE_VERIFY)]
    Verify(CacheFolderArgs),
    /// Shrink a folder that no daemon uses, or drop what it holds of a scope.
    #[command(after_help = help::CACHE_GC)]
    Gc(CacheGcArgs),
    /// Write the blocks of a folder to files, for another machine.
    #[command(after_help = help::CACHE_EXPORT)]
    Export(CacheExportArgs),
    /// Take exported blocks into a folder that no daemon uses.
    #[command(after_help = help::CACHE_IMPORT)]
    Import(CacheImportArgs),
    /// Drop all that a daemon has cached of a model, also on its disk.
    #[command(after_help = help::CACHE_DROP)]
    Drop(CacheDropArgs),
    /// Play a trace of requests against caches of several sizes, by policy.
    #[command(after_help = help::CACHE_SIMULATE)]
    Simulate(CacheSimulateArgs),
}

#[derive(Args)]
pub(super) struct CacheStatArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct CacheSimulateArgs {
    /// A request a line, as JSON with the list `hash_ids`: numbers of its blocks from the first,
    /// each of which stands for all before it too (the form of Mooncake's traces).
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Sizes of the cache, in blocks; 1/64 to 1/4 of the trace's distinct ones when absent.
    #[arg(long, value_name = "N,M", value_delimiter = ',')]
    blocks: Vec<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One line of the list.
#[derive(Serialize)]
struct CacheRow {
    device: String,
    blocks: u64,
    bytes: u64,
    limit_bytes: u64,
    leases: u64,
    pinned_bytes: u64,
    published: u64,
    evicted: u64,
}

impl From<CacheStats> for CacheRow {
    fn from(stats: CacheStats) -> Self {
        let CacheStats { device, blocks, bytes, limit_bytes, leases, pinned_bytes, .. } = stats;
        let (published, evicted) = (stats.published, stats.evicted);
        Self { device, blocks, bytes, limit_bytes, leases, pinned_bytes, published, evicted }
    }
}

/// A request of a trace.
#[derive(Deserialize)]
struct TraceRequest {
    hash_ids: Vec<u64>,
}

/// Most bytes of a request: a device's line need not end.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Hit rates of one policy.
#[derive(Serialize)]
struct PolicyRow {
    policy: &'static str,
    /// Share of the blocks that were asked for, by size.
    hit_rates: Vec<f64>,
}

/// Hit rates of a trace.
#[derive(Serialize)]
struct CacheSimulation {
    requests: usize,
    asked_blocks: u64,
    distinct_blocks: usize,
    sizes: Vec<usize>,
    policies: Vec<PolicyRow>,
}

const POLICIES: [(&str, EvictionChoice); 3] = [
    ("s3-fifo", EvictionChoice::S3Fifo { small_percent: 50 }),
    ("s3-fifo, small 10 %", EvictionChoice::S3Fifo { small_percent: 10 }),
    ("lru", EvictionChoice::Lru),
];

/// Runs the command; what it prints.
pub(super) async fn run_command(command: CacheCommand) -> Result<String, CliError> {
    match command {
        CacheCommand::Stat(args) => {
            let client = args.daemon.connect_client().await?;
            let stats = client.stats().await.map_err(anyhow::Error::from)?;
            let rows: Vec<_> = stats.caches.into_iter().map(CacheRow::from).collect();
            if args.json { json_text(&rows) } else { Ok(stat_table(&rows)) }
        }
        CacheCommand::Ls(args) => list_scopes(&args),
        CacheCommand::Verify(args) => verify_folder(&args),
        CacheCommand::Gc(args) => collect_folder(&args),
        CacheCommand::Export(args) => export_folder(&args),
        CacheCommand::Import(args) => import_folder(&args),
        CacheCommand::Drop(args) => drop_model(&args).await,
        CacheCommand::Simulate(args) => {
            let done = simulate_trace(&args.trace, &args.blocks)?;
            if args.json { json_text(&done) } else { Ok(simulation_table(&done)) }
        }
    }
}

fn stat_table(rows: &[CacheRow]) -> String {
    let numbers =
        |name, cell: fn(&CacheRow) -> String| TableColumn::of_numbers(name, rows.iter().map(cell));
    render_table(&[
        TableColumn::of_text("device", rows.iter().map(|row| row.device.clone())),
        numbers("blocks", |row| row.blocks.to_string()),
        numbers("bytes", |row| format_bytes(row.bytes)),
        numbers("limit", |row| format_bytes(row.limit_bytes)),
        numbers("leases", |row| row.leases.to_string()),
        numbers("pinned", |row| format_bytes(row.pinned_bytes)),
        numbers("published", |row| row.published.to_string()),
        numbers("evicted", |row| row.evicted.to_string()),
    ])
}

fn read_trace(path: &Path) -> Result<Vec<Vec<u64>>, CliError> {
    let refused = |reason: String| CliError::Usage(format!("--trace {}: {reason}", path.display()));
    let file = open_file(path).map_err(|error| refused(error.to_string()))?;
    let (mut lines, mut line, mut requests) = (BufReader::new(file), String::new(), Vec::new());
    loop {
        let refused = |error: String| refused(format!("line {}: {error}", requests.len() + 1));
        line.clear();
        let read = lines.by_ref().take(LINE_BYTES_MAX + 1).read_line(&mut line);
        match read.map_err(|error| refused(error.to_string()))? as u64 {
            0 => return Ok(requests),
            1..=LINE_BYTES_MAX => {}
            _ => return Err(refused(format!("it has more than {LINE_BYTES_MAX} bytes"))),
        }
        let request: TraceRequest =
            serde_json::from_str(&line).map_err(|error| refused(error.to_string()))?;
        requests.push(request.hash_ids);
    }
}

fn simulate_trace(path: &Path, sizes: &[usize]) -> Result<CacheSimulation, CliError> {
    let requests = read_trace(path)?;
    let distinct = requests.iter().flatten().collect::<HashSet<_>>().len();
    if distinct == 0 {
        return Err(CliError::Usage(format!("{}: no request has blocks", path.display())));
    }
    let parts = || [64, 32, 16, 8, 4].map(|part| (distinct / part).max(1)).to_vec();
    let sizes = if sizes.is_empty() { parts() } else { sizes.to_vec() };
    let asked: u64 = requests.iter().map(|request| request.len() as u64).sum();
    let hit_rate = |choice, size| {
        let mut cache = CacheSimulator::new(choice, size);
        let hits: u64 = requests.iter().map(|of| cache.play_request(of) as u64).sum();
        hits as f64 / asked as f64
    };
    let policies = POLICIES.map(|(policy, choice)| PolicyRow {
        policy,
        hit_rates: sizes.iter().map(|size| hit_rate(choice, *size)).collect(),
    });
    Ok(CacheSimulation {
        requests: requests.len(),
        asked_blocks: asked,
        distinct_blocks: distinct,
        sizes: sizes.clone(),
        policies: policies.into(),
    })
}

fn simulation_table(done: &CacheSimulation) -> String {
    let percent = |rate: f64| format!("{:.1}", rate * 100.0);
    let sizes = done.sizes.iter().map(|size| size.to_string());
    let mut columns = vec![TableColumn::of_numbers("cached blocks", sizes)];
    for PolicyRow { policy, hit_rates } in &done.policies {
        let cells = hit_rates.iter().map(|rate| percent(*rate));
        columns.push(TableColumn::of_numbers(policy, cells));
    }
    let CacheSimulation { requests, asked_blocks, distinct_blocks, .. } = done;
    let head = format!(
        "{requests} requests for {asked_blocks} blocks, {distinct_blocks} of them distinct; \
         percent of blocks found\n\n"
    );
    head + &render_table(&columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_and_played() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.jsonl");
        let lines = "{\"timestamp\": 0, \"hash_ids\": [1, 2]}\n{\"hash_ids\": [1, 2, 3, 4]}\n";
        std::fs::write(&path, lines).unwrap();
        let done = simulate_trace(&path, &[4]).unwrap();
        assert_eq!((done.requests, done.asked_blocks, done.distinct_blocks), (2, 6, 4));
        assert!(done.policies.iter().all(|policy| policy.hit_rates == [2.0 / 6.0]));
        let table = simulation_table(&done);
        assert!(table.contains("33.3") && table.contains("s3-fifo"), "{table}");
        std::fs::write(&path, "{\"hash_ids\": [1]}\n{}\n").unwrap();
        let refused = simulate_trace(&path, &[]).err().unwrap().to_string();
        assert!(refused.contains("line 2") && refused.contains("hash_ids"), "{refused}");
        std::fs::write(&path, "").unwrap();
        assert!(matches!(simulate_trace(&path, &[]), Err(CliError::Usage(_))));
        assert!(simulate_trace(Path::new("/nowhere"), &[]).is_err());
        let refused = simulate_trace(Path::new("/dev/zero"), &[]).err().unwrap().to_string();
        assert!(refused.contains("line 1") && refused.contains("more than 16777216"), "{refused}");
    }
}
