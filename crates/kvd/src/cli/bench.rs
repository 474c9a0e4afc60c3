//! `kvd bench`: arguments in, a table or JSON out.

mod cache;
mod cache_layers;
#[cfg(feature = "eval")]
mod daemon;
#[cfg(feature = "eval")]
mod echo;
pub(super) mod flags;
#[cfg(feature = "eval")]
mod mixed;
mod shared;
mod tables;

use super::text_args::{codec_text, parse_size};
use super::{CliError, help};
use bytesize::ByteSize;
use clap::{Args, Subcommand};
#[cfg(feature = "eval")]
use flags::up_to;
use flags::{
    count_up_to, parse_error_measure, parse_instruction_set, parse_precision, parse_shape,
};
#[cfg(feature = "eval")]
use kvd_bench::TransportBench;
use kvd_bench::{
    AttendBench, BenchResult, CodecBench, ErrorMeasure, HeadShape, MachineInfo, ScoresBench,
    StoreBench, limits,
};
use kvd_compute::{InstructionSet, Precision};
use kvd_core::Geometry;
use serde::Serialize;

#[derive(Subcommand)]
pub(super) enum BenchCommand {
    /// Decode attention over pages, per token and KV head.
    #[command(after_help = help::BENCH_ATTEND)]
    Attend(AttendArgs),
    /// Scores of keys alone, all of them kept.
    #[command(after_help = help::BENCH_SCORES)]
    Scores(ScoresArgs),
    /// Encoding and reference decoding, per side.
    #[command(after_help = help::BENCH_CODEC)]
    Codec(CodecArgs),
    /// Storing a prefill through the backend.
    #[command(after_help = help::BENCH_STORE)]
    Store(StoreArgs),
    /// Attention of sequences with a common prefix, beside the cost without sharing.
    #[command(after_help = help::BENCH_SHARED)]
    Shared(shared::SharedArgs),
    /// Looking keys up in the cache, opening on them, and evicting.
    #[command(after_help = help::BENCH_CACHE)]
    Cache(cache::CacheBenchArgs),
    /// One attend from a client to a daemon and back, by transport.
    #[cfg(feature = "eval")]
    #[command(after_help = help::BENCH_TRANSPORT)]
    Transport(TransportArgs),
    /// Clients of several kinds at once against a daemon that runs.
    #[cfg(feature = "eval")]
    #[command(after_help = help::BENCH_MIXED)]
    Mixed(mixed::MixedArgs),
}

/// Options of every benchmark.
#[derive(Args)]
pub(super) struct CommonArgs {
    /// Codec, as a preset or spec; may be repeated.
    #[arg(long = "codec", value_name = "CODEC", value_parser = codec_text)]
    codecs: Vec<String>,
    /// Heads of a model by its name, or as numbers: 8x4x128 are 8 KV heads of 128 channels, each
    /// for 4 query heads; a fourth number are the channels of values.
    #[arg(long, default_value = "llama-3.1-8b", value_parser = parse_shape)]
    shape: HeadShape,
    /// Tokens per block.
    #[arg(long, default_value_t = 64, value_parser = count_up_to(Geometry::BLOCK_TOKENS_MAX))]
    block_tokens: u32,
    /// Turns of each codec.
    #[arg(long, default_value_t = 9, value_parser = count_up_to(limits::ROUNDS_MAX))]
    rounds: usize,
    /// Print every figure, in lines wider than most terminals.
    #[arg(long)]
    wide: bool,
    /// Print JSON.
    #[arg(long, conflicts_with = "wide")]
    json: bool,
}

/// Options that hold a benchmark to an instruction set.
#[derive(Args)]
pub(super) struct SetArgs {
    /// Instruction sets to compare; several, with commas. The machine's best when absent.
    #[arg(long, value_delimiter = ',', value_parser = parse_instruction_set)]
    instruction_set: Vec<InstructionSet>,
}

#[derive(Args)]
pub(super) struct AttendArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    sets: SetArgs,
    /// Cached tokens of a sequence; several, with commas.
    #[arg(long, value_delimiter = ',', default_value = "8192")]
    #[arg(value_parser = count_up_to(limits::CONTEXT_MAX))]
    context: Vec<u32>,
    /// Sequences per call.
    #[arg(long, default_value_t = 1, value_parser = count_up_to(limits::BATCH_MAX))]
    batch: usize,
    /// Each sequence of a call is half as long as the one before.
    #[arg(long)]
    ragged: bool,
    /// Query tokens per sequence.
    #[arg(long, default_value_t = 1, value_parser = count_up_to(limits::QUERY_TOKENS_MAX))]
    query_tokens: u32,
    /// Compute threads; several, with commas.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = count_up_to(limits::THREADS_MAX))]
    threads: Vec<usize>,
    /// Pages that calls rotate over, more than the last-level cache holds.
    #[arg(long, value_name = "SIZE", default_value = "128 MiB", value_parser = parse_size)]
    buffer: ByteSize,
    /// `fast`, as the daemon answers by default; `single`: products of f32 everywhere; `int8`:
    /// queries and weights of 8 bits.
    #[arg(long, default_value = "fast", value_parser = parse_precision)]
    precision: Precision,
}

#[derive(Args)]
pub(super) struct ScoresArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    sets: SetArgs,
    /// Cached tokens.
    #[arg(long, default_value_t = 8192, value_parser = count_up_to(limits::CONTEXT_MAX))]
    context: u32,
    /// Pages that calls rotate over, those of values included.
    #[arg(long, value_name = "SIZE", default_value = "128 MiB", value_parser = parse_size)]
    buffer: ByteSize,
    /// As of `attend`.
    #[arg(long, default_value = "fast", value_parser = parse_precision)]
    precision: Precision,
}

#[derive(Args)]
pub(super) struct CodecArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    sets: SetArgs,
}

#[derive(Args)]
pub(super) struct StoreArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Tokens of the prefill.
    #[arg(long, default_value_t = 1024, value_parser = count_up_to(limits::CONTEXT_MAX))]
    tokens: u32,
    /// Compute threads; several, with commas.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = count_up_to(limits::THREADS_MAX))]
    threads: Vec<usize>,
    /// How errors of one block in 256 are measured, as bounds and metrics want it: rows, queries or
    /// none; several, with commas. 16384 tokens have 256 blocks, of which one is measured.
    #[arg(long, value_delimiter = ',', default_value = "rows", value_parser = parse_error_measure)]
    errors: Vec<ErrorMeasure>,
    /// Rows that stores rotate over, more than the last-level cache holds.
    #[arg(long, value_name = "SIZE", default_value = "128 MiB", value_parser = parse_size)]
    buffer: ByteSize,
}

#[cfg(feature = "eval")]
#[derive(Args)]
pub(super) struct TransportArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Stored tokens; several, with commas.
    #[arg(long, value_delimiter = ',', default_value = "64,8192")]
    #[arg(value_parser = count_up_to(limits::CONTEXT_MAX))]
    context: Vec<u32>,
    /// Query tokens; several, with commas.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    #[arg(value_parser = count_up_to(limits::QUERY_TOKENS_MAX))]
    query_tokens: Vec<u32>,
    /// Calls of one turn.
    #[arg(long, default_value_t = 100, value_parser = count_up_to(limits::CALLS_MAX))]
    calls: usize,
    /// Writers that store chunks of tokens all the while.
    #[arg(long, default_value_t = 0)]
    #[arg(value_parser = up_to(limits::WRITERS_MAX))]
    storing: usize,
    /// Tokens of such a chunk.
    #[arg(long, default_value_t = 1024, value_parser = count_up_to(limits::STORING_TOKENS_MAX))]
    storing_tokens: u32,
}

/// The answer as JSON.
#[derive(Serialize)]
struct BenchReport<T> {
    shape: String,
    machine: MachineInfo,
    rows: Vec<T>,
}

/// Runs a benchmark and says what it measured.
pub(super) fn run_bench(command: BenchCommand) -> Result<String, CliError> {
    match command {
        BenchCommand::Attend(args) => {
            let bench = attend_bench(&args);
            report_text(&args.common, bench.measure_all()?, &tables::ATTEND)
        }
        BenchCommand::Scores(args) => {
            let bench = ScoresBench {
                shape: args.common.shape,
                codecs: chosen_codecs(&args.common, &["raw", "kivi-4", "kivi-2", "vecinfer-2-reg"]),
                context: args.context,
                block_tokens: args.common.block_tokens,
                rounds: args.common.rounds,
                buffer_bytes: args.buffer.as_u64(),
                precision: args.precision,
                instruction_sets: args.sets.instruction_set,
            };
            report_text(&args.common, bench.measure_all()?, &tables::SCORES)
        }
        BenchCommand::Codec(CodecArgs { common, sets }) => {
            let bench = CodecBench {
                shape: common.shape,
                codecs: chosen_codecs(
                    &common,
                    &["fp8", "kivi-4", "kivi-2", "kvcomp", "vecinfer-2"],
                ),
                block_tokens: common.block_tokens,
                rounds: common.rounds,
                instruction_sets: sets.instruction_set,
            };
            report_text(&common, bench.measure_all()?, &tables::CODEC)
        }
        BenchCommand::Store(args) => {
            let bench = StoreBench {
                shape: args.common.shape,
                codecs: chosen_codecs(
                    &args.common,
                    &["raw", "fp8", "kivi-4", "kvcomp", "vecinfer-2"],
                ),
                tokens: args.tokens,
                threads: args.threads.clone(),
                block_tokens: args.common.block_tokens,
                errors: args.errors.clone(),
                rounds: args.common.rounds,
                buffer_bytes: args.buffer.as_u64(),
            };
            report_text(&args.common, bench.measure_all()?, &tables::STORE)
        }
        BenchCommand::Cache(args) => cache::run_cache(&args),
        BenchCommand::Shared(args) => shared::run_shared(&args),
        #[cfg(feature = "eval")]
        BenchCommand::Transport(args) => {
            let bench = TransportBench {
                shape: args.common.shape,
                codecs: chosen_codecs(&args.common, &["kivi-4"]),
                contexts: args.context.clone(),
                query_tokens: args.query_tokens.clone(),
                block_tokens: args.common.block_tokens,
                rounds: args.common.rounds,
                calls: args.calls,
                storing: args.storing,
                storing_tokens: args.storing_tokens,
            };
            report_text(&args.common, bench.measure_all(daemon::start_daemon)?, &tables::TRANSPORT)
        }
        #[cfg(feature = "eval")]
        BenchCommand::Mixed(args) => mixed::run_mixed(args),
    }
}

fn attend_bench(args: &AttendArgs) -> AttendBench {
    AttendBench {
        shape: args.common.shape,
        codecs: chosen_codecs(&args.common, &["raw", "fp8", "kivi-4", "kivi-2", "vecinfer-2"]),
        contexts: args.context.clone(),
        batch: args.batch,
        ragged: args.ragged,
        query_tokens: args.query_tokens,
        threads: args.threads.clone(),
        block_tokens: args.common.block_tokens,
        rounds: args.common.rounds,
        buffer_bytes: args.buffer.as_u64(),
        precision: args.precision,
        instruction_sets: args.sets.instruction_set.clone(),
    }
}

fn chosen_codecs(common: &CommonArgs, otherwise: &[&str]) -> Vec<String> {
    if common.codecs.is_empty() {
        return otherwise.iter().map(|name| (*name).to_owned()).collect();
    }
    common.codecs.clone()
}

fn report_text<T: Serialize>(
    common: &CommonArgs,
    measured: BenchResult<T>,
    sheet: &tables::BenchSheet<T>,
) -> Result<String, CliError> {
    let BenchResult { machine, rows } = measured;
    let machine = MachineInfo { commit: env!("KVD_COMMIT"), ..machine };
    if common.json {
        let report = BenchReport { shape: common.shape.to_string(), machine, rows };
        let text = serde_json::to_string_pretty(&report).map_err(anyhow::Error::from)?;
        return Ok(text + "\n");
    }
    let table = if common.wide { (sheet.wide)(&rows) } else { sheet.narrow_text(&rows) };
    Ok(heading_text(&machine, &common.shape) + &table)
}

fn heading_text(machine: &MachineInfo, shape: &HeadShape) -> String {
    let (read, multiply) = (machine.read_gb_per_s, machine.multiply_adds_per_ns);
    format!(
        "kvd {} ({}) on {} ({} cores{})\nshape {shape}\none thread reads {:.1} [{:.1}] GB/s from \
         memory and makes {:.0} [{:.0}] G f32 multiplications a second\n\n",
        machine.version,
        machine.commit,
        machine.processor,
        machine.cores,
        if machine.pinned { ", pinned" } else { "" },
        read.median,
        read.best,
        multiply.median,
        multiply.best,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use clap::error::ErrorKind;

    #[derive(Parser)]
    struct Cli {
        #[command(subcommand)]
        command: BenchCommand,
    }

    fn parsed(arguments: &str) -> Result<BenchCommand, clap::Error> {
        let arguments = std::iter::once("bench").chain(arguments.split_whitespace());
        Cli::try_parse_from(arguments).map(|cli| cli.command)
    }

    /// Each benchmark, as small as it can be.
    const TINY: &[&str] = &[
        "attend --shape 2x2x64 --rounds 1 --buffer 64KiB --context 200,1 --batch 3 --ragged",
        "scores --shape 2x2x64 --rounds 1 --buffer 64KiB --context 70",
        "codec --shape 2x2x64 --rounds 1 --codec kvcomp",
        "store --shape 2x2x64 --rounds 1 --tokens 65 --buffer 64KiB",
        #[cfg(feature = "eval")]
        "transport --shape 2x2x64 --rounds 1 --context 64 --query-tokens 1 --calls 1 \
         --storing 1 --storing-tokens 9",
    ];

    #[test]
    fn every_benchmark_runs_and_says_what_it_measured_of_which_build() {
        for arguments in TINY {
            let json = run_bench(parsed(&format!("{arguments} --json")).unwrap()).unwrap();
            let report: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert!(!report["rows"].as_array().unwrap().is_empty(), "{json}");
            let commit = report["machine"]["commit"].as_str().unwrap();
            let number = commit.strip_suffix("-dirty").unwrap_or(commit);
            let hexadecimal = number.len() >= 7 && number.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(commit == "unknown" || hexadecimal, "{commit}");
        }
    }

    #[test]
    fn words_of_codes_are_held_against_their_entropy() {
        let codecs = "--codec k=uniform(b=4,axis=block)/huffman;v=raw --codec kivi-4";
        let command = parsed(&format!("codec --shape 2x2x64 --rounds 1 --json {codecs}")).unwrap();
        let report: serde_json::Value = serde_json::from_str(&run_bench(command).unwrap()).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let huffman = &rows[0]["huffman"];
        let [entropy, bits_per_code] =
            ["entropy", "bits_per_code"].map(|figure| huffman[figure].as_f64().unwrap());
        // A Huffman code of single symbols takes less than a bit more than their entropy, and words
        // hold some bits that no code needs.
        assert!(entropy > 2.0 && entropy < 4.0, "{huffman:?}");
        assert!((entropy..entropy + 1.0).contains(&bits_per_code), "{huffman:?}");
        assert!(bits_per_code < rows[0]["bits_per_value"].as_f64().unwrap(), "{huffman:?}");
        assert!(rows[1..].iter().all(|row| row["huffman"].is_null()), "{rows:?}");
    }

    #[test]
    fn a_precision_is_the_one_that_answers() {
        let row = |arguments: &str| {
            let tiny =
                "attend --shape 1x2x64 --rounds 1 --buffer 64KiB --context 64 --codec kivi-4";
            let command = parsed(&format!("{tiny} --json {arguments}")).unwrap();
            let report: serde_json::Value =
                serde_json::from_str(&run_bench(command).unwrap()).unwrap();
            report["rows"][0]["precision"].as_str().unwrap().to_owned()
        };
        assert_eq!(row("--precision int8 --instruction-set portable"), "fast");
        assert_eq!(row("--precision single --instruction-set portable"), "single");
    }

    /// The benchmarks that can be held to an instruction set, as small as they can be.
    const HELD: &[&str] = &[
        "attend --shape 1x2x64 --rounds 1 --buffer 64KiB --context 64",
        "scores --shape 1x2x64 --rounds 1 --buffer 64KiB --context 64",
        "codec --shape 1x2x64 --rounds 1",
    ];

    #[test]
    fn each_instruction_set_that_is_named_is_what_ran() {
        // Of each machine, the best and the least.
        let [best, least] = [None, Some(InstructionSet::Portable)]
            .map(|set| kvd_compute::Simd::named(set).unwrap().level().name());
        for arguments in HELD {
            let sets = |option: &str| -> Vec<String> {
                let codec = "--codec k=raw;v=vq(d=2,b=4)";
                let command = parsed(&format!("{arguments} --json {codec} {option}")).unwrap();
                let report = run_bench(command).unwrap();
                let report: serde_json::Value = serde_json::from_str(&report).unwrap();
                let set = |row: &serde_json::Value| row["instruction_set"].as_str().map(Into::into);
                let mut sets: Vec<_> =
                    report["rows"].as_array().unwrap().iter().filter_map(set).collect();
                sets.sort();
                sets.dedup();
                sets
            };
            let mut both = vec![best, least];
            both.sort_unstable();
            both.dedup();
            assert_eq!(sets(""), [best], "{arguments}");
            assert_eq!(sets(&format!("--instruction-set {best},portable")), both, "{arguments}");
        }
    }

    #[test]
    fn an_instruction_set_that_is_unknown_or_not_there_is_an_error() {
        // Of another architecture.
        let absent = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        for arguments in HELD {
            for set in ["avx3", absent] {
                let error = parsed(&format!("{arguments} --instruction-set {set}")).err().unwrap();
                assert_eq!(error.kind(), ErrorKind::ValueValidation, "{arguments} {set}");
            }
        }
    }

    #[test]
    fn every_count_has_a_least_and_a_most() {
        let common = ["rounds", "block-tokens"];
        let own = [
            ("attend", &["context", "batch", "query-tokens", "threads"][..]),
            ("scores", &["context"]),
            ("codec", &[]),
            ("store", &["tokens", "threads"]),
            #[cfg(feature = "eval")]
            ("transport", &["context", "query-tokens", "calls", "storing-tokens"]),
        ];
        for (name, own) in own {
            for option in common.iter().chain(own) {
                for value in ["0", "1000000000", "18446744073709551615"] {
                    let error = parsed(&format!("{name} --{option} {value}")).err();
                    let error = error.unwrap_or_else(|| panic!("{name} --{option} {value}"));
                    assert_eq!(error.kind(), ErrorKind::ValueValidation, "{name} --{option}");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_what_can() {
        // Of another architecture.
        let absent = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        let refused = [
            ("attend --shape 8x4x127".to_owned(), "even"),
            ("attend --codec nope".to_owned(), "kvd codecs"),
            (format!("attend --instruction-set {absent}"), "portable"),
        ];
        for (arguments, hint) in refused {
            let error = parsed(&arguments).err().unwrap_or_else(|| panic!("{arguments}"));
            assert_eq!(error.kind(), ErrorKind::ValueValidation, "{arguments}");
            assert!(error.to_string().contains(hint), "{error}");
        }
        let refused = [
            ("attend --context 16777216 --batch 4096", "--batch"),
            ("attend --query-tokens 65536 --context 1 --shape 1x1024x1024", "--query-tokens"),
            ("attend --shape 1x1x64 --context 1 --buffer 17179869183GiB", "--buffer"),
            ("scores --shape 1x1x64 --context 1 --buffer 17179869183GiB", "--buffer"),
            ("store --shape 1x1x64 --buffer 17179869183GiB", "--buffer"),
            ("store --threads 1024", "cores"),
            ("attend --threads 1,1024", "cores"),
            ("attend --shape 1x1x64 --codec k=vq(d=7,b=4);v=raw", "--codec"),
        ];
        for (arguments, hint) in refused {
            let error = run_bench(parsed(arguments).unwrap()).unwrap_err();
            assert_eq!(error.exit_code(), 64, "{arguments}: {error}");
            assert!(error.to_string().contains(hint), "{arguments}: {error}");
        }
    }

    #[test]
    fn products_are_set_against_a_peak_of_the_rows_own_instruction_set() {
        let sets = kvd_compute::CpuBackend::instruction_sets();
        let names: Vec<_> = sets.iter().map(|set| set.name()).collect();
        let tiny = "attend --shape 1x4x64 --rounds 1 --buffer 64KiB --context 64 --json";
        let own = format!("--codec raw --codec kivi-4 --instruction-set {}", names.join(","));
        for precision in ["fast", "int8"] {
            let command = parsed(&format!("{tiny} {own} --precision {precision}")).unwrap();
            let report: serde_json::Value =
                serde_json::from_str(&run_bench(command).unwrap()).unwrap();
            for row in report["rows"].as_array().unwrap() {
                let raw = row["codec"] == "raw";
                assert_eq!(row["products"][0] == "f32", raw, "{row}");
                // Products of integers are measured on x86.
                let set = row["instruction_set"].as_str().unwrap();
                let integers = matches!(set, "avx2" | "avx-vnni" | "avx512" | "amx");
                let peak = row["peak_per_ns"][0].as_f64();
                assert_eq!(peak.is_some(), raw || integers, "{row}");
                assert_eq!(row["of_multiply_speed"].is_number(), raw || integers, "{row}");
            }
        }
    }
}
