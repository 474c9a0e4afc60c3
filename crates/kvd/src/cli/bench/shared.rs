//! `kvd bench shared`: arguments of sequences with a common prefix.

use super::super::CliError;
use super::super::table::{TableColumn, render_table, wrap_text};
use super::flags::count_up_to;
use super::{CommonArgs, chosen_codecs};
use clap::Args;
use kvd_bench::{MeasuredFigure, SharedBench, SharedRow, limits};

/// Workers of a daemon.
#[cfg(feature = "eval")]
const WORKERS_MAX: usize = 256;

#[derive(Args)]
pub(in crate::cli) struct SharedArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Tokens of the common prefix.
    #[arg(long, default_value_t = 8192, value_parser = count_up_to(limits::CONTEXT_MAX))]
    prefix: u32,
    /// Tokens that each sequence has after it.
    #[arg(long, default_value_t = 64, value_parser = count_up_to(limits::CONTEXT_MAX))]
    own: u32,
    /// Sequences of a batch.
    #[arg(long, default_value_t = 16, value_parser = count_up_to(limits::BATCH_MAX))]
    sequences: usize,
    /// Workers, each on a connection to a daemon in this process, that ask for one sequence each in
    /// place of a batch.
    #[cfg(feature = "eval")]
    #[arg(long, value_parser = count_up_to(WORKERS_MAX))]
    workers: Option<usize>,
    /// Calls of a worker in a turn.
    #[cfg(feature = "eval")]
    #[arg(long, default_value_t = 5, value_parser = count_up_to(limits::CALLS_MAX))]
    calls: usize,
    /// `device.merge_wait_us` of that daemon.
    #[cfg(feature = "eval")]
    #[arg(long, default_value_t = 0)]
    merge_wait_us: u64,
    /// Compute threads.
    #[arg(long, default_value_t = 1, value_parser = count_up_to(limits::THREADS_MAX))]
    threads: usize,
}

/// Measures; the table or JSON.
pub(super) fn run_shared(args: &SharedArgs) -> Result<String, CliError> {
    let SharedArgs { common, prefix, own, sequences, threads, .. } = args;
    let bench = SharedBench {
        shape: common.shape,
        codecs: chosen_codecs(common, &["raw", "fp8", "kivi-4", "kvcomp"]),
        prefix: *prefix,
        own: *own,
        sequences: *sequences,
        block_tokens: common.block_tokens,
        threads: *threads,
        rounds: common.rounds,
    };
    let rows = measure_rows(args, bench)?;
    if common.json {
        let text = serde_json::to_string_pretty(&rows).map_err(anyhow::Error::from)?;
        return Ok(text + "\n");
    }
    Ok(shared_table(&rows))
}

#[cfg(feature = "eval")]
fn measure_rows(args: &SharedArgs, bench: SharedBench) -> Result<Vec<SharedRow>, CliError> {
    let Some(workers) = args.workers else { return Ok(bench.measure_batches()?) };
    let (calls, merge_wait_us) = (args.calls, args.merge_wait_us);
    let workers = kvd_bench::SharedWorkers { bench, workers, calls, merge_wait_us };
    Ok(workers.measure_workers(super::daemon::start_daemon)?)
}

#[cfg(not(feature = "eval"))]
fn measure_rows(_: &SharedArgs, bench: SharedBench) -> Result<Vec<SharedRow>, CliError> {
    Ok(bench.measure_batches()?)
}

fn shared_table(rows: &[SharedRow]) -> String {
    let cells = |cell: fn(&SharedRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let spread = |of: MeasuredFigure| format!("{:.1}..{:.1}", of.best, of.upper_quartile);
    let apart_spread: Vec<_> = rows.iter().map(|row| spread(row.apart_ms)).collect();
    let shared_spread: Vec<_> = rows.iter().map(|row| spread(row.shared_ms)).collect();
    let table = render_table(&[
        TableColumn::of_text("asked", cells(|row| row.asked.clone())),
        TableColumn::of_text("codec", cells(|row| row.codec.clone())),
        TableColumn::of_numbers("prefix", cells(|row| row.prefix.to_string())),
        TableColumn::of_numbers("apart ms", cells(|row| format!("{:.1}", row.apart_ms.median))),
        TableColumn::of_numbers("best..q3", apart_spread),
        TableColumn::of_numbers("shared ms", cells(|row| format!("{:.1}", row.shared_ms.median))),
        TableColumn::of_numbers("best..q3", shared_spread),
        TableColumn::of_numbers("ratio", cells(|row| format!("{:.2}", row.ratio))),
        TableColumn::of_numbers("gap", cells(|row| format!("{:.0e}", row.difference))),
    ]);
    let note = "Processor time. A batch: of a call where each sequence has a copy of the prefix \
                (apart), and where all have the same pages (shared). Workers: of a call of all of \
                them, to a daemon that merges no attends (apart), and one that does. gap: the \
                largest difference of outputs, of the largest output.";
    format!("{table}\n{}", wrap_text(note, ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: SharedArgs,
    }

    fn run_tiny(arguments: &str) -> String {
        let tiny = "bench --shape 2x2x64 --rounds 1 --prefix 512 --own 65 --codec raw \
                    --codec kivi-4 --threads 1";
        let arguments = format!("{tiny} {arguments}");
        run_shared(&Cli::parse_from(arguments.split_whitespace()).args).unwrap()
    }

    #[test]
    fn a_small_prefix_is_measured_and_answers_agree() {
        let rows: serde_json::Value =
            serde_json::from_str(&run_tiny("--json --sequences 3")).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|row| row["ratio"].as_f64() > Some(0.0)), "{rows:?}");
        assert!(run_tiny("--sequences 2").contains("batch of 2"));
    }

    #[cfg(feature = "eval")]
    #[test]
    fn workers_of_a_daemon_are_measured_and_answers_agree() {
        assert!(run_tiny("--workers 2 --calls 2").contains("2 workers"));
    }
}
