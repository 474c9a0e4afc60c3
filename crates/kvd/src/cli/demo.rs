//! `kvd demo`: a daemon in this process and the demo as its client, over loopback gRPC.

use super::bench::flags::count_up_to;
use super::demo_restart::show_restart;
use super::local::{self, LocalDaemon};
use super::paths::check_inputs;
use super::{CliError, eval, text_args};
use crate::daemon::RunningDaemon;
use clap::Args;
use kvd_eval::demo::{self, DemoOptions};
use kvd_eval::eval::{EvalCodec, WindowChoice};

use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;

/// Options of `kvd demo`; the defaults take three to four minutes on two cores.
#[derive(Args)]
pub(super) struct DemoArgs {
    /// Codec to run, as a preset, a spec or `@FILE` for a policy file; may be repeated. See `kvd
    /// codecs`.
    #[arg(long, value_name = "CODEC", value_parser = eval::parse_codec)]
    codec: Vec<EvalCodec>,
    /// Windows of all codecs: `sink=N,recent=N`, or `own`. When absent, `sink=32,recent=96` for the
    /// default codecs and `own` for those named.
    #[arg(long, value_name = "WINDOWS", value_parser = eval::parse_windows)]
    windows: Option<WindowChoice>,
    /// Model folder (config.json, model.safetensors, tokenizer.json, eval_ids.u16); the built-in
    /// tiny model when absent.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Held-out passages to score.
    #[arg(long, value_name = "N", default_value_t = DemoOptions::PASSAGES)]
    #[arg(value_parser = count_up_to(eval::COUNT_MAX))]
    passages: usize,
    /// Tokens to write.
    #[arg(long, value_name = "N", default_value_t = DemoOptions::NEW_TOKENS)]
    #[arg(value_parser = count_up_to(eval::COUNT_MAX))]
    tokens: usize,
    /// Print the table as one JSON object.
    #[arg(long)]
    json: bool,
    /// Stay up afterwards, with everything still stored, until interrupted.
    #[arg(long)]
    serve: bool,
    /// Address of the daemon's metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    admin: String,
    /// Page memory of the daemon.
    #[arg(long, value_name = "SIZE", default_value = "1 GiB", value_parser = text_args::size_text)]
    pool: String,
}

pub(super) async fn run_demo(args: DemoArgs) -> Result<(), CliError> {
    check_inputs("--model", &args.model)?;
    let local =
        LocalDaemon { admin: &args.admin, pool: &args.pool, block_tokens: local::BLOCK_TOKENS };
    let stays = Cell::new(false);
    let shown = local.run_with(async |running| {
        show_demo(&args, running).await?;
        if args.serve {
            stays.set(true);
            std::future::pending::<()>().await;
        }
        Ok(())
    });
    match shown.await {
        // The end that `--serve` waits for.
        Err(CliError::Interrupted(_)) if stays.get() => Ok(()),
        shown => shown,
    }
}

async fn show_demo(args: &DemoArgs, running: &RunningDaemon) -> Result<(), CliError> {
    let mut options = DemoOptions::new(local::daemon_endpoint(running)?);
    if !args.codec.is_empty() {
        options.codecs.clone_from(&args.codec);
        options.windows = WindowChoice::Own;
    }
    options.windows = args.windows.unwrap_or(options.windows);
    options.model_dir.clone_from(&args.model);
    (options.passages, options.new_tokens) = (args.passages, args.tokens);
    options.json = args.json;
    options.keep_open = args.serve;
    options.metrics = Some(local::daemon_metrics(running));
    options.restart = Some(show_restart(&options).await?);
    let mut text = Vec::new();
    demo::run_demo(options, &mut text).await?;
    super::print_text(&String::from_utf8_lossy(&text))?;
    if args.serve {
        let tcp = local::daemon_endpoint(running)?;
        // On standard error, so that --json leaves a single object on standard output.
        let mut notes = format!(
            "\nThe daemon stays up with everything stored; Ctrl-C ends it.\n  gRPC     {tcp}\n"
        );
        if let Some(admin) = running.admin_address() {
            notes.push_str(&format!(
                "  page     http://{admin}/\n  metrics  curl http://{admin}/metrics\n"
            ));
        }
        let _ = std::io::stderr().write_all(notes.as_bytes());
    }
    Ok(())
}
