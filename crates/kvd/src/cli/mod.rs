//! The command line.
//!
//! Exit codes: 0 done, 1 failed, 64 wrong usage or configuration, 69 a socket or device could
//! not be had, 70 the device failed while serving, or the GPU asked for cannot be used.

mod bench;
#[cfg(feature = "eval")]
mod calibrate;
mod codecs;
#[cfg(feature = "eval")]
mod demo;
#[cfg(feature = "eval")]
mod eval;
#[cfg(feature = "eval")]
mod local;
mod plan;
mod serve;

use crate::bench::BenchError;
use crate::config::{Config, ConfigError, DEFAULT_TOML, Overrides};
use crate::daemon::BuildError;
use crate::dashboard;
use crate::device::DeviceError;
use clap::{Args, Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// KV-cache memory for LLM inference: keeps KV blocks compressed and answers attention over them.
#[derive(Parser)]
#[command(name = "kvd", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon.
    Serve(ConfigArgs),
    /// Show the configuration.
    Config {
        /// Print the file of defaults, with every key explained.
        #[arg(long)]
        print_default: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// List the codec presets with their spec and source.
    Codecs,
    /// Measure attention, encoding and storing on this machine.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Print how the CUDA kernels would be launched on a GPU, and why: predictions.
    Plan(plan::PlanArgs),
    /// Print the Grafana dashboard (deploy/grafana/kvd.json).
    Dashboard,
    /// Start a daemon, run a small real model whose every attention goes through it, and compare
    /// codecs.
    #[cfg(feature = "eval")]
    Demo(demo::DemoArgs),
    /// Measure what codecs save and cost on a model and held-out text: bits, attention error, KL,
    /// perplexity, speed.
    #[cfg(feature = "eval")]
    Eval(eval::EvalArgs),
    /// Fit codecs to sampled K and V: means, axes, codebooks, Huffman tables as one artefact.
    #[cfg(feature = "eval")]
    Calibrate(calibrate::CalibrateArgs),
}

/// Settings that lie over file and environment.
#[derive(Args, Clone, Debug, Default)]
struct ConfigArgs {
    /// Configuration file; see `kvd config --print-default`.
    #[arg(long, value_name = "FILE", env = "KVD_CONFIG")]
    config: Option<PathBuf>,
    /// gRPC address; short for --set server.listen_tcp=ADDRESS.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// gRPC Unix socket; short for --set server.listen_unix=PATH.
    #[arg(long, value_name = "PATH")]
    unix: Option<String>,
    /// Metrics and health address; short for --set admin.listen=ADDRESS.
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
    /// Page memory; short for --set device.pool_bytes=SIZE.
    #[arg(long, value_name = "SIZE")]
    pool: Option<String>,
    /// Any setting, as section.key=value; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected section.key=value")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

impl ConfigArgs {
    fn overrides(self) -> Overrides {
        let short = [
            ("server.listen_tcp", self.listen),
            ("server.listen_unix", self.unix),
            ("admin.listen", self.admin),
            ("device.pool_bytes", self.pool),
        ];
        let mut flags: Vec<_> =
            short.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        flags.extend(self.set);
        Overrides { file: self.config, environment: true, flags }
    }

    fn load(self) -> Result<Config, ConfigError> {
        Config::load(&self.overrides())
    }
}

/// Why a command failed; each has its exit code.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error("the device failed")]
    DeviceFailed,
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl CliError {
    fn exit_code(&self) -> u8 {
        match self {
            // A model folder that is not computed is mended by whoever wrote the command.
            #[cfg(feature = "eval")]
            Self::Other(error) if error.is::<kvd_eval::ModelError>() => 64,
            Self::Config(_) | Self::Build(BuildError::Config(_)) => 64,
            Self::Bench(error) if error.is_usage() => 64,
            Self::Build(BuildError::Device(DeviceError::Gpu { .. })) | Self::DeviceFailed => 70,
            Self::Build(_) => 69,
            Self::Bench(_) | Self::Other(_) => 1,
        }
    }
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and are no errors.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 64 } else { 0 });
        }
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "kvd: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Serve(config) => runtime()?.block_on(serve::serve(config.load()?)),
        Command::Config { print_default: true, .. } => print(DEFAULT_TOML),
        Command::Config { config, .. } => print(&format!("{:#?}\n", config.load()?)),
        Command::Codecs => print(&codecs::table()),
        Command::Bench(command) => print(&bench::bench(command)?),
        Command::Plan(args) => print(&plan::text(&args)?),
        Command::Dashboard => print(&dashboard::text()),
        #[cfg(feature = "eval")]
        Command::Demo(args) => runtime()?.block_on(demo::demo(args)),
        #[cfg(feature = "eval")]
        Command::Eval(args) => runtime()?.block_on(eval::eval(args)),
        #[cfg(feature = "eval")]
        Command::Calibrate(args) => runtime()?.block_on(calibrate::calibrate(args)),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    Ok(runtime.map_err(anyhow::Error::from)?)
}

fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    Ok(out.write_all(text.as_bytes()).map_err(anyhow::Error::from)?)
}
