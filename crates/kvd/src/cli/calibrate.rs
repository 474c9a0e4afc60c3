//! `kvd calibrate`: a calibration artefact from a dump, a model, or a daemon.

use super::ask_daemon::{SecretArgs, parse_namespace};
use super::bench::flags::count_up_to;
use super::paths::{check_inputs, check_outputs};
use super::{CliError, eval};
use clap::{ArgGroup, Args};
use kvd_client::Endpoint;
use kvd_core::{Namespace, SequenceId};
use kvd_eval::calibrate::{
    self, CalibrateOptions, CalibrationRun, DaemonSource, DumpSource, ModelSource, RowSource,
};
use kvd_eval::eval::EvalCodec;
use kvd_eval::split::BitSplit;
use kvd_fit::SetAside;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Default of --tokens for a model: 22 windows of 2048 tokens, as `kvd eval` fits on.
const MODEL_TOKENS: usize = 45_056;

/// Rows come from --samples, from --endpoint with --sequence, or else from a model.
#[derive(Args)]
#[command(group(ArgGroup::new("result").args(["out", "dump"]).multiple(true).required(true)))]
pub(super) struct CalibrateArgs {
    /// Codec to fit: a preset, a spec, or @FILE for a policy file; may be repeated, the artefact
    /// then serves all of them.
    #[arg(long, value_name = "CODEC", value_parser = eval::parse_codec, requires = "out")]
    codec: Vec<EvalCodec>,
    /// Where to write the artefact.
    #[arg(long, value_name = "FILE", requires = "codec")]
    out: Option<PathBuf>,
    /// Also write the rows, as a file for --samples; without --codec nothing else.
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,
    /// Safetensors file of layer.N.k, .v [tokens, kv_heads, head_dim] and, for qpca, .q; may be
    /// repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "text", "endpoint"])]
    samples: Vec<PathBuf>,
    /// Model folder, as for `kvd eval`; the built-in tiny model when absent.
    #[arg(long, value_name = "DIR", conflicts_with = "endpoint")]
    model: Option<PathBuf>,
    /// Text in UTF-8 for the model to read; may be repeated. Windows all over the model
    /// folder's own when absent.
    #[arg(long, value_name = "FILE", conflicts_with = "endpoint")]
    text: Vec<PathBuf>,
    /// A running daemon, as http://HOST:PORT, https://HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ENDPOINT", requires = "sequence", value_parser = parse_endpoint)]
    endpoint: Option<Endpoint>,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Id of a sequence that the daemon holds; may be repeated.
    #[arg(long, value_name = "ID", requires = "endpoint")]
    sequence: Vec<u64>,
    /// Namespace of the sequences.
    #[arg(long, value_name = "NAME", requires = "endpoint", value_parser = parse_namespace)]
    namespace: Option<Namespace>,
    /// Tokens to take: of each text (45056 when absent), file or sequence (all when absent).
    #[arg(long, value_name = "N", value_parser = count_up_to(eval::COUNT_MAX))]
    tokens: Option<usize>,
    /// Tokens after which the model begins anew.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    #[arg(value_parser = count_up_to(eval::COUNT_MAX))]
    window: usize,
    /// Tokens per block of the model that will use the artefact.
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = count_up_to(kvd_core::Geometry::BLOCK_TOKENS_MAX))]
    block_tokens: u32,
    /// How bits are shared among layers, heads and sides: sensitivity (by what errors cost on
    /// text that no fit sees, where that is better; when absent with --model) or even (when
    /// absent with rows alone).
    #[arg(long, value_name = "SPLIT")]
    split: Option<BitSplit>,
    /// Seed of the fits: the same rows, codecs and seed give the same bytes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Sensitivity where a model can be run: attention errors of rows alone stand for its predictions,
/// and how well was not measured yet.
fn default_split(source: &RowSource) -> BitSplit {
    match source {
        RowSource::Model(_) => BitSplit::Sensitivity,
        RowSource::Dump(_) | RowSource::Daemon(_) => BitSplit::Even,
    }
}

fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    text.parse().map_err(|error| format!("{error}"))
}

impl CalibrateArgs {
    fn source(&self) -> Result<RowSource, CliError> {
        let (block_tokens, tokens) = (self.block_tokens, self.tokens);
        if let Some(endpoint) = &self.endpoint {
            let sequences = self.sequence.iter().copied().map(SequenceId).collect();
            return Ok(RowSource::Daemon(DaemonSource {
                endpoint: endpoint.clone(),
                options: Box::new(self.secrets.client_options()?),
                namespace: self.namespace.clone(),
                sequences,
                tokens,
            }));
        }
        if !self.samples.is_empty() {
            let files = self.samples.clone();
            return Ok(RowSource::Dump(DumpSource { files, block_tokens, tokens }));
        }
        Ok(RowSource::Model(ModelSource {
            dir: self.model.clone(),
            texts: self.text.clone(),
            tokens: tokens.unwrap_or(MODEL_TOKENS),
            window: self.window,
            block_tokens,
        }))
    }
}

/// Checks the files before a row is made.
fn check_args(args: &CalibrateArgs) -> Result<(), CliError> {
    check_outputs(&[("--out", args.out.as_deref()), ("--dump", args.dump.as_deref())])?;
    check_inputs("--model", &args.model)?;
    check_inputs("--text", &args.text)?;
    check_inputs("--samples", &args.samples)
}

pub(super) async fn run_calibrate(args: CalibrateArgs) -> Result<(), CliError> {
    check_args(&args)?;
    let source = args.source()?;
    let options = CalibrateOptions {
        split: args.split.unwrap_or_else(|| default_split(&source)),
        source,
        codecs: args.codec.clone(),
        seed: args.seed,
        dump: args.dump.clone(),
    };
    let made = calibrate::run_calibration(&options).await?;
    super::print_text(&report_text(&args, &made)?)
}

/// Writes the artefact and says what was made.
fn report_text(args: &CalibrateArgs, made: &CalibrationRun) -> Result<String, CliError> {
    let mut text = String::new();
    let queries = if made.queries { "with queries" } else { "without queries" };
    let mut say = |what: &str, path: &Path| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}: {what}", path.display());
    };
    if let Some(path) = &args.dump {
        say(&format!("{} tokens per layer, {queries}", made.tokens), path);
    }
    if let (Some(path), Some(artefact)) = (&args.out, &made.artefact) {
        let bytes = artefact.to_bytes();
        let written = std::fs::write(path, &bytes).map_err(anyhow::Error::from);
        written.map_err(|error| error.context(format!("cannot write {}", path.display())))?;
        let codecs: Vec<_> = args.codec.iter().map(|codec| codec.label.as_str()).collect();
        let what = format!(
            "{:.1} KiB for {}, fitted on {} tokens per layer, {}, seed {}",
            bytes.len() as f64 / 1024.0,
            codecs.join(", "),
            made.tokens,
            query_counts(made),
            args.seed
        );
        say(&what, path);
        for split in &made.splits {
            let _ = writeln!(text, "{split}");
        }
        for rows in &made.set_aside {
            let _ = writeln!(text, "{}", left_out(rows));
        }
    }
    Ok(text)
}

/// How many queries there were for how many channels.
fn query_counts(made: &CalibrationRun) -> String {
    let (count, channels) = (made.queries_per_head, made.key_channels);
    match made.queries {
        true => format!("{count} queries per KV head for {channels} channels"),
        false => "no queries".to_owned(),
    }
}

/// One line for each reason why a fit did not follow rows.
fn left_out(rows: &SetAside) -> String {
    let SetAside { layer, kind, zeros, repeated, left_out, clipped, longest, .. } = *rows;
    let of_all = format!("of {} rows of {kind}", rows.rows);
    let mut lines = Vec::new();
    if zeros > 0 {
        lines.push(format!(
            "warning: layer {layer}: {zeros} {of_all} left out: all zeros, as padding is"
        ));
    }
    if repeated > 0 {
        lines.push(format!(
            "warning: layer {layer}: {repeated} {of_all} left out: they repeat other rows, as a \
             prompt does that is sent again; sample more varied text"
        ));
    }
    if left_out + clipped > 0 {
        lines.push(format!(
            "warning: layer {layer}: {left_out} {of_all} left out, {clipped} clipped: the longest \
             is {longest:.1} times as long as the median of its head"
        ));
    }
    lines.join("\n")
}
