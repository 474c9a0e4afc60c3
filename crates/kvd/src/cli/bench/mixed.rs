//! `kvd bench mixed`: arguments of the load against a daemon that runs.

use super::super::CliError;
use super::super::ask_daemon::{SecretArgs, parse_namespace};
use super::super::table::{TableColumn, render_table};
use super::super::text_args::codec_text;
use super::flags::{count_up_to, parse_shape, up_to};
use clap::Args;
use kvd_bench::{HeadShape, MixedBench, MixedRow, limits};
use kvd_client::{Endpoint, Namespace};
use std::time::Duration;

#[derive(Args)]
pub(in crate::cli) struct MixedArgs {
    /// The daemon: http://HOST:PORT, https://HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Endpoint,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Namespace of the load.
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = parse_namespace)]
    namespace: Namespace,
    /// Codec, as a preset or spec.
    #[arg(long, default_value = "kivi-4", value_parser = codec_text)]
    codec: String,
    /// Heads of a model by its name, or as numbers.
    #[arg(long, default_value = "llama-3.1-8b", value_parser = parse_shape)]
    shape: HeadShape,
    /// Stored tokens, of which the flood and the long attend see all.
    #[arg(long, default_value_t = 8192, value_parser = count_up_to(limits::CONTEXT_MAX))]
    context: u32,
    /// Clients that ask for few tokens, one call after another.
    #[arg(long, default_value_t = 4, value_parser = count_up_to(limits::CALLS_MAX))]
    clients: usize,
    /// Stored tokens that such a client sees.
    #[arg(long, default_value_t = 1, value_parser = count_up_to(limits::CONTEXT_MAX))]
    tokens: u32,
    /// Milliseconds that such a client waits between two calls.
    #[arg(long, default_value_t = 0)]
    think_ms: u64,
    /// Calls that one more client has under way all the time.
    #[arg(long, default_value_t = 0, value_parser = up_to(limits::CALLS_MAX))]
    flood: usize,
    /// Query tokens of an attend that one more client asks for again and again.
    #[arg(long, default_value_t = 0)]
    long: u32,
    /// Clients that store all the time.
    #[arg(long, default_value_t = 0, value_parser = up_to(limits::WRITERS_MAX))]
    writers: usize,
    /// Seconds that all of it lasts.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the load; its table or JSON.
pub(super) fn run_mixed(args: MixedArgs) -> Result<String, CliError> {
    let bench = MixedBench {
        endpoint: args.endpoint,
        options: args.secrets.client_options()?,
        namespace: args.namespace,
        shape: args.shape,
        codec: args.codec,
        context: args.context,
        clients: args.clients,
        tokens: args.tokens.min(args.context),
        think: Duration::from_millis(args.think_ms),
        flood: args.flood,
        long: args.long,
        writers: args.writers,
        time: Duration::from_secs(args.seconds),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let rows = runtime.map_err(anyhow::Error::from)?.block_on(bench.run_load())?;
    if args.json {
        let text = serde_json::to_string_pretty(&rows).map_err(anyhow::Error::from)?;
        return Ok(text + "\n");
    }
    Ok(table_text(&rows))
}

fn table_text(rows: &[MixedRow]) -> String {
    let cells = |cell: fn(&MixedRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    render_table(&[
        TableColumn::of_text("clients that", cells(|row| row.kind.to_owned())),
        TableColumn::of_numbers("are", cells(|row| row.clients.to_string())),
        TableColumn::of_numbers("calls", cells(|row| row.calls.to_string())),
        TableColumn::of_numbers("refused", cells(|row| row.refused.to_string())),
        TableColumn::of_numbers("p50 ms", cells(|row| format!("{:.2}", row.p50_ms))),
        TableColumn::of_numbers("p99 ms", cells(|row| format!("{:.2}", row.p99_ms))),
        TableColumn::of_numbers("p999 ms", cells(|row| format!("{:.2}", row.p999_ms))),
        TableColumn::of_numbers("most ms", cells(|row| format!("{:.2}", row.most_ms))),
        TableColumn::of_numbers("Jain", cells(|row| format!("{:.3}", row.jain))),
    ])
}
