//! `kvd eval`: a daemon in this process and the evaluation as its client.

use super::bench::flags::count_up_to;
use super::local::{self, LocalDaemon};
use super::paths::{check_inputs, check_outputs};
use super::{CliError, text_args};
use crate::daemon::RunningDaemon;
use anyhow::Context;
use clap::Args;
use kvd_eval::demo::DemoOptions;
use kvd_eval::eval::{self, EvalCodec, EvalOptions, EvalReport, LineWidth, WindowChoice};
use kvd_eval::measure::AttachedPrefix;
use kvd_eval::search::{self, SearchOptions};
use kvd_eval::split::BitSplit;
use std::path::{Path, PathBuf};

/// Options of `kvd eval`.
#[derive(Args)]
pub(super) struct EvalArgs {
    /// Model folder (config.json, model.safetensors or shards with their index, tokenizer.json,
    /// eval_ids.u16 or eval.txt); the built-in tiny model when absent.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Held-out text in UTF-8, instead of the model folder's; may be repeated, one block of rows
    /// each. Calibrations stay those of the model folder's text.
    #[arg(long, value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Codec to evaluate: a preset, a spec, or @FILE for a policy file; may be repeated. When
    /// nothing says what to evaluate, those of `kvd demo`: raw, kivi-4, vecinfer-2, kvd-4, kvd-2.
    #[arg(long, value_name = "CODEC", value_parser = parse_codec)]
    codec: Vec<EvalCodec>,
    /// Evaluate every preset of `kvd codecs`, before those of --codec.
    #[arg(long)]
    all_presets: bool,
    /// Evaluate the codecs that papers order, and check their claims where windows are equal.
    #[arg(long)]
    orderings: bool,
    /// Windows of every codec: own, or sink=N,recent=N; may be repeated, one block of rows each.
    #[arg(long, value_name = "WINDOWS", default_value = "own", value_parser = parse_windows)]
    windows: Vec<WindowChoice>,
    /// Passages to score.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count_up_to(COUNT_MAX))]
    passages: usize,
    /// Tokens of a passage, 8 at least.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count_up_to(COUNT_MAX))]
    tokens: usize,
    /// Run each passage once more from this token on, the tokens before it attached from the
    /// cache: whole pages, whole steps.
    #[arg(long, value_name = "N", conflicts_with = "search", value_parser = count_up_to(COUNT_MAX))]
    attached_prefix: Option<usize>,
    /// Tokens at the end of that prefix that are computed anew and not attached.
    #[arg(long, value_name = "N", requires = "attached_prefix", default_value_t = 0)]
    recomputed: usize,
    /// Tokens per step of a passage.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count_up_to(COUNT_MAX))]
    chunk: usize,
    /// Windows of text that calibrations are fitted on.
    #[arg(long, value_name = "N", default_value_t = 22, value_parser = count_up_to(COUNT_MAX))]
    calibration_windows: usize,
    /// Calibration artefact to use for every codec that needs one, instead of fitting.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// How bits of fitted codecs are shared among layers, heads and sides: sensitivity (by what
    /// errors cost on calibration text that no fit sees, where that is better) or even.
    #[arg(long, value_name = "SPLIT", default_value_t = BitSplit::Sensitivity)]
    split: BitSplit,
    /// Tokens of context over which windows and tables are spread.
    #[arg(long, value_name = "N", default_value_t = 32_768, value_parser = count_up_to(COUNT_MAX))]
    context: usize,
    /// Seed of the calibrations.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print every column and table, in lines wider than most terminals.
    #[arg(long)]
    wide: bool,
    /// Write the report as one JSON object; - is standard output, instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as a Markdown page.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Plot bits against KL as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Find the best side for every layer within --budget-bits, by measured sensitivity, and
    /// evaluate that policy beside the codecs (the kvd presets when none is named).
    #[arg(long, requires = "budget_bits", conflicts_with = "calibration")]
    search: bool,
    /// Bits per value of packed blocks that a policy may take, mean over layers and sides.
    #[arg(long, value_name = "BITS", requires = "search", value_parser = parse_budget)]
    budget_bits: Option<f64>,
    /// Codec whose sides a layer may get; may be repeated. Eight rates of the kvd presets' family
    /// when absent.
    #[arg(long, value_name = "CODEC", requires = "search", value_parser = parse_codec)]
    candidates: Vec<EvalCodec>,
    /// Write the policy found, as --codec @FILE reads it.
    #[arg(long, value_name = "FILE", requires = "search")]
    policy: Option<PathBuf>,
    /// Write the calibration artefact of the policy found.
    #[arg(long, value_name = "FILE", requires = "search")]
    artefact: Option<PathBuf>,
    /// Page memory of the daemon.
    #[arg(long, value_name = "SIZE", default_value = "1 GiB", value_parser = text_args::size_text)]
    pool: String,
    /// Tokens per block, which groups of tokens cannot exceed.
    #[arg(long, value_name = "N", default_value_t = local::BLOCK_TOKENS)]
    block_tokens: u32,
}

pub(super) fn parse_codec(text: &str) -> Result<EvalCodec, String> {
    text.parse().map_err(|error: anyhow::Error| text_args::refused_codec(format!("{error:#}")))
}

pub(super) fn parse_windows(text: &str) -> Result<WindowChoice, String> {
    text.parse().map_err(|error: anyhow::Error| format!("{error:#}"))
}

/// Tokens, windows and passages that are counted.
pub(super) const COUNT_MAX: usize = 1 << 30;

impl EvalArgs {
    /// Checks the files before a model is read.
    fn check_files(&self) -> Result<(), CliError> {
        check_outputs(&[
            ("--json", self.json.as_deref()),
            ("--markdown", self.markdown.as_deref()),
            ("--svg", self.svg.as_deref()),
            ("--policy", self.policy.as_deref()),
            ("--artefact", self.artefact.as_deref()),
        ])?;
        check_inputs("--model", &self.model)?;
        check_inputs("--text", &self.text)?;
        check_inputs("--calibration", &self.calibration)
    }

    /// Codecs that flags name, none twice.
    fn named_codecs(&self) -> Vec<EvalCodec> {
        let mut codecs = if self.all_presets { EvalCodec::all_presets() } else { Vec::new() };
        let ordered = if self.orderings { EvalCodec::ordering_codecs() } else { Vec::new() };
        for codec in ordered.into_iter().chain(self.codec.iter().cloned()) {
            if !codecs.contains(&codec) {
                codecs.push(codec);
            }
        }
        if codecs.is_empty() && !self.search {
            codecs = DemoOptions::default_codecs();
        }
        codecs
    }
}

/// Bits per value that some codec takes.
fn parse_budget(text: &str) -> Result<f64, String> {
    let bits = text.parse().map_err(|_| "expected a number of bits, such as 2.5".to_owned())?;
    if (0.5..=32.0).contains(&bits) { Ok(bits) } else { Err("expected 0.5 to 32 bits".to_owned()) }
}

pub(super) async fn run_eval(args: EvalArgs) -> Result<(), CliError> {
    args.check_files()?;
    let local = LocalDaemon { admin: "", pool: &args.pool, block_tokens: args.block_tokens };
    local.run_with(async |running| report_eval(&args, running).await).await
}

async fn report_eval(args: &EvalArgs, running: &RunningDaemon) -> Result<(), CliError> {
    let codecs = args.named_codecs();
    let options = EvalOptions {
        metrics: Some(local::daemon_metrics(running)),
        model_dir: args.model.clone(),
        texts: args.text.clone(),
        windows: args.windows.clone(),
        passages: args.passages,
        passage_tokens: args.tokens,
        attached_prefix: args
            .attached_prefix
            .map(|tokens| AttachedPrefix { tokens, recomputed: args.recomputed }),
        chunk_tokens: args.chunk,
        calibration_windows: args.calibration_windows,
        calibration: args.calibration.clone(),
        context_tokens: args.context,
        seed: args.seed,
        split: args.split,
        orderings: args.orderings,
        command: command_line(),
        ..EvalOptions::new(local::daemon_endpoint(running)?, codecs)
    };
    let Some(budget) = args.budget_bits else {
        return write_report(args, &eval::run_eval(&options).await?);
    };
    write_report(args, &search_policy(args, options, budget).await?)
}

/// Writes the policy and its artefact too.
async fn search_policy(
    args: &EvalArgs,
    mut options: EvalOptions,
    budget: f64,
) -> anyhow::Result<EvalReport> {
    let mut search = SearchOptions::new(budget);
    if !args.candidates.is_empty() {
        search.candidates.clone_from(&args.candidates);
    }
    // Rows compare under the policy's own windows only.
    match options.windows.iter().find(|windows| **windows != WindowChoice::Own) {
        Some(windows) => search.windows = *windows,
        None => options.windows = vec![search.windows],
    }
    if options.codecs.is_empty() {
        let ours = |codec: &EvalCodec| codec.label.starts_with("kvd-");
        options.codecs = EvalCodec::all_presets().into_iter().filter(ours).collect();
    }
    let (found, report) = search::run_search(&options, &search).await?;
    if let Some(path) = &args.policy {
        write_file(path, found.policy.as_bytes())?;
    }
    if let (Some(path), Some(artefact)) = (&args.artefact, &found.artefact) {
        write_file(path, &artefact.to_bytes())?;
    }
    Ok(report)
}

/// Files first, so that a table on the terminal says that everything is written.
fn write_report(args: &EvalArgs, report: &EvalReport) -> Result<(), CliError> {
    if let Some(path) = &args.svg {
        write_file(path, eval::plot_svg(report).as_bytes())?;
    }
    if let Some(path) = &args.markdown {
        let plot = args.svg.as_deref().map(|svg| seen_from(path, svg));
        write_file(path, eval::markdown_page(report, plot.as_deref()).as_bytes())?;
    }
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(report).map_err(anyhow::Error::from)? + "\n";
        if path.as_os_str() == "-" {
            return super::print_text(&json);
        }
        write_file(path, json.as_bytes())?;
    }
    super::print_text(&eval::report_text(
        report,
        if args.wide { LineWidth::All } else { LineWidth::Terminal },
    ))
}

fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// The plot as a link of the page: its name where both lie in one folder.
fn seen_from(page: &Path, svg: &Path) -> String {
    let near = svg.file_name().filter(|_| page.parent() == svg.parent());
    near.map_or_else(|| svg.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// This command line, as it can be typed again.
fn command_line() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=.,/@:+".contains(c);
    let quoted = |argument: String| {
        if argument.chars().all(plain) { argument } else { format!("'{argument}'") }
    };
    let arguments = std::env::args().skip(1).map(quoted);
    std::iter::once("kvd".to_owned()).chain(arguments).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        eval: EvalArgs,
    }

    fn codecs(flags: &[&str]) -> Vec<String> {
        let cli = Cli::try_parse_from([&["eval"], flags].concat()).unwrap();
        cli.eval.named_codecs().into_iter().map(|codec| codec.label).collect()
    }

    #[test]
    fn codecs_are_those_named_or_those_of_the_demo() {
        assert_eq!(
            codecs(&[]),
            ["raw", "kivi-4", "vecinfer-2", "kvd-4", "kvd-2"].map(|name| name.to_owned())
        );
        assert_eq!(codecs(&["--codec", "fp8", "--codec", "fp8"]), ["fp8"]);
        let all = codecs(&["--all-presets", "--codec", "fp8"]);
        assert_eq!(all.len(), kvd_codec::presets().len());
        assert!(codecs(&["--search", "--budget-bits", "3"]).is_empty());
    }
}
