//! `kvd bench cache`: arguments of the index that is asked.

use super::super::CliError;
use super::super::table::{TableColumn, render_table};
use super::cache_layers::measure_disk;
use super::flags::count_up_to;
use clap::Args;
use kvd_bench::{CacheBench, CacheRow};
use std::path::PathBuf;

/// Entries of the largest index.
const ENTRIES_MAX: usize = 1 << 24;
/// Keys of the longest chain.
const KEYS_MAX: usize = 1 << 14;
const ROUNDS_MAX: usize = 10_000;

#[derive(Args)]
pub(in crate::cli) struct CacheBenchArgs {
    /// Entries of the index: cached pages of 64 tokens.
    #[arg(long, default_value_t = 1 << 20, value_parser = count_up_to(ENTRIES_MAX))]
    entries: usize,
    /// Keys of a chain, of 32 bytes each.
    #[arg(long, default_value_t = 2048, value_parser = count_up_to(KEYS_MAX))]
    keys: usize,
    /// Runs of each case.
    #[arg(long, default_value_t = 101, value_parser = count_up_to(ROUNDS_MAX))]
    rounds: usize,
    /// Measure prefixes on disk in this folder instead: published, and back after a start.
    #[arg(long, value_name = "FOLDER")]
    disk: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures; the table or JSON.
pub(super) fn run_cache(args: &CacheBenchArgs) -> Result<String, CliError> {
    let CacheBenchArgs { entries, keys, rounds, ref disk, json } = *args;
    let rows = match disk {
        Some(folder) => measure_disk(folder, rounds)?,
        None => CacheBench { entries, keys, rounds }.measure_all()?,
    };
    if json {
        let text = serde_json::to_string_pretty(&rows).map_err(anyhow::Error::from)?;
        return Ok(text + "\n");
    }
    let cells = |cell: fn(&CacheRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    Ok(render_table(&[
        TableColumn::of_text("case", cells(|row| row.case.clone())),
        TableColumn::of_numbers("entries", cells(|row| row.entries.to_string())),
        TableColumn::of_numbers("p50 us", cells(|row| format!("{:.2}", row.p50_us))),
        TableColumn::of_numbers("p99 us", cells(|row| format!("{:.2}", row.p99_us))),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_come_back_from_a_folder_that_is_left_empty() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Some(folder.path().to_path_buf());
        let args = CacheBenchArgs { entries: 1, keys: 1, rounds: 1, disk, json: false };
        let table = run_cache(&args).unwrap();
        for case in ["publish to durable", "first layer", "by layers", "at once"] {
            assert!(table.contains(case), "{table}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_small_index_is_measured_beside_a_map() {
        let args = CacheBenchArgs { entries: 64, keys: 8, rounds: 3, disk: None, json: true };
        let rows: serde_json::Value = serde_json::from_str(&run_cache(&args).unwrap()).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 6);
        for row in rows {
            assert!(row["p99_us"].as_f64() >= row["p50_us"].as_f64(), "{row}");
            assert!(row["p50_us"].as_f64() > Some(0.0), "{row}");
        }
        let table = run_cache(&CacheBenchArgs { json: false, ..args }).unwrap();
        assert!(table.contains("match of 8 keys, all cached") && table.contains("plain map"));
    }
}
