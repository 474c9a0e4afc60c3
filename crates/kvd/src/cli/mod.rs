//! The command line.
//!
//! Exit codes: 0 done, 1 failed, 64 wrong usage or configuration, 69 a socket or device could
//! not be had, 70 the device failed while serving, or the GPU asked for cannot be used, 128 and the
//! number of a signal that ended `eval` or `demo` before their work was done.

mod ask_daemon;
mod bench;
mod cache;
mod cache_change;
mod cache_folder;
mod cache_transfer;
#[cfg(feature = "eval")]
mod calibrate;
mod codecs;
#[cfg(feature = "eval")]
mod demo;
#[cfg(feature = "eval")]
mod demo_restart;
mod describe;
#[cfg(feature = "eval")]
mod eval;
mod help;
mod kernels;
#[cfg(feature = "eval")]
mod local;
mod machine;
mod metrics;
mod models;
mod namespaces;
#[cfg(feature = "eval")]
mod paths;
mod plan;
mod sequences;
mod serve;
mod sessions;
mod status;
mod supervisor;
mod table;
mod text_args;
mod top;

use crate::access::NewToken;
use crate::config::describe_unread_variables;
use crate::config::{Config, ConfigError, ConfigOverrides, DEFAULT_TOML, RawConfig};
use crate::daemon::BuildError;
use crate::dashboard;
use crate::device::DeviceError;
use clap::{Args, CommandFactory, Parser, Subcommand};
use kvd_bench::BenchError;
#[cfg(feature = "eval")]
use kvd_core::ErrorCode;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Version and commit, as `kvd --version` says them.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("KVD_COMMIT"), ")");

/// KV-cache memory for LLM inference: keeps KV blocks compressed and answers attention over them.
#[derive(Parser)]
#[command(name = "kvd", version = VERSION, arg_required_else_help = true)]
#[command(max_term_width = 100, after_help = help::KVD)]
struct CliArgs {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Run the daemon.
    #[command(after_help = help::SERVE)]
    Serve(ConfigArgs),
    /// Print the configuration that holds, as a file that --config reads.
    #[command(after_help = help::CONFIG)]
    Config {
        /// Print the file of defaults, with every key explained.
        #[arg(long)]
        print_default: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Ask whether a daemon serves, for probes: exit code 0 if it does.
    #[command(after_help = help::HEALTH)]
    Health(status::HealthArgs),
    /// Say what a daemon is and holds: pools, models, bytes saved.
    #[command(after_help = help::STATUS)]
    Status(status::StatusArgs),
    /// Watch a daemon on one screen: pool, rates, models, sequences; close what nobody uses.
    #[command(after_help = help::TOP)]
    Top(top::TopArgs),
    /// List the models of a daemon.
    #[command(subcommand, after_help = help::MODELS)]
    Models(models::ModelsCommand),
    /// List the namespaces of a daemon.
    #[command(subcommand, after_help = help::NAMESPACES)]
    Namespaces(namespaces::NamespacesCommand),
    /// Say all about a codec, or about a model of a daemon.
    #[command(subcommand, after_help = help::DESCRIBE)]
    Describe(describe::DescribeCommand),
    /// List and close the sequences of a daemon that runs.
    #[command(subcommand, after_help = help::SEQUENCES)]
    Sequences(sequences::SequencesCommand),
    /// List and end the sessions that own them.
    #[command(subcommand, after_help = help::SESSIONS)]
    Sessions(sessions::SessionsCommand),
    /// See what a daemon has cached, and play traces against caches.
    #[command(subcommand, after_help = help::CACHE)]
    Cache(cache::CacheCommand),
    /// Compare the codec presets: what each saves, what it loses, and when to take it.
    #[command(after_help = help::CODECS)]
    Codecs(codecs::CodecsArgs),
    /// Measure attention, encoding and storing on this machine.
    #[command(subcommand, after_help = help::BENCH)]
    Bench(bench::BenchCommand),
    /// Print how the CUDA kernels would be launched on a GPU, and why.
    #[command(after_help = help::PLAN)]
    Plan(plan::PlanArgs),
    /// Print the Grafana dashboard (deploy/grafana/kvd.json).
    #[command(after_help = help::DASHBOARD)]
    Dashboard,
    /// List the metrics of a daemon, with type, labels and meaning.
    #[command(after_help = help::METRICS)]
    Metrics(metrics::MetricsArgs),
    /// Make a bearer token, and the hash of it for the file of principals.
    #[command(after_help = help::TOKEN)]
    Token,
    /// Print a script that completes commands in a shell.
    #[command(after_help = help::COMPLETIONS)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands into a folder.
    #[command(after_help = help::MAN_PAGES)]
    ManPages {
        /// The folder, which is made if there is none.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Start a daemon, run a small real model whose every attention goes through it, and compare
    /// codecs.
    #[cfg(feature = "eval")]
    #[command(after_help = help::DEMO)]
    Demo(demo::DemoArgs),
    /// Measure what codecs save and cost on a model and held-out text: bits, attention error, KL,
    /// perplexity, speed.
    #[cfg(feature = "eval")]
    #[command(after_help = help::EVAL)]
    Eval(eval::EvalArgs),
    /// Fit codecs to sampled K and V: means, axes, codebooks, Huffman tables as one artefact.
    #[cfg(feature = "eval")]
    #[command(after_help = help::CALIBRATE)]
    Calibrate(calibrate::CalibrateArgs),
}

/// Settings that lie over file and environment.
#[derive(Args, Clone, Debug, Default)]
struct ConfigArgs {
    /// Configuration file; see `kvd config --print-default`. KVD_CONFIG in the environment when
    /// absent, and the defaults where that is unset or empty.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// gRPC address, as 127.0.0.1:7070 or localhost:7070; short for --set
    /// server.listen_tcp=ADDRESS.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// gRPC Unix socket; short for --set server.listen_unix=PATH.
    #[arg(long, value_name = "PATH")]
    unix: Option<String>,
    /// Metrics and health address; short for --set admin.listen=ADDRESS.
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
    /// Page memory, as "4 GiB"; short for --set device.pool_bytes=SIZE.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
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
    fn into_overrides(self) -> ConfigOverrides {
        let short = [
            ("server.listen_tcp", self.listen),
            ("server.listen_unix", self.unix),
            ("admin.listen", self.admin),
            ("device.pool_bytes", self.pool),
        ];
        let mut flags: Vec<_> =
            short.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        flags.extend(self.set);
        let named = || std::env::var_os("KVD_CONFIG").filter(|path| !path.is_empty());
        let file = self.config.or_else(|| named().map(PathBuf::from));
        ConfigOverrides { file, environment: true, flags }
    }

    fn load_config(self) -> Result<Config, ConfigError> {
        Config::load(&self.into_overrides())
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
    #[error("{0}")]
    Usage(String),
    /// Whoever read the output has gone, as `head` does: nothing is wrong.
    #[error("nobody reads the output")]
    OutputClosed,
    #[error("the device failed")]
    DeviceFailed,
    /// `kvd health`: it drains, or a device failed.
    #[error("the daemon does not serve: it drains, or a device failed")]
    NotServing,
    /// Nobody answered.
    #[error("no daemon answers: {}{}", .0, advise_connection(&.0.message))]
    Unreachable(kvd_client::ClientError),
    /// A signal ended a command that had not done its work.
    #[cfg(feature = "eval")]
    #[error("ended by signal {0} before the work was done")]
    Interrupted(i32),
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl CliError {
    /// Why there is no connection: nobody answers, or a daemon that does not let the caller in.
    fn of_connection(error: kvd_client::ClientError) -> Self {
        let unanswered = error.code.is_none() && error.is_retryable();
        if unanswered { Self::Unreachable(error) } else { Self::Other(error.into()) }
    }

    /// Ends the process with this error, whatever its threads do.
    #[cfg(feature = "eval")]
    fn end_process(&self) -> ! {
        let _ = writeln!(std::io::stderr(), "kvd: {self}");
        std::process::exit(i32::from(self.exit_code()))
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::OutputClosed => 0,
            Self::Config(_) | Self::Usage(_) | Self::Build(BuildError::Config(_)) => 64,
            Self::Bench(error) if error.is_usage() => 64,
            #[cfg(feature = "eval")]
            Self::Other(error) if is_usage(error) => 64,
            Self::Build(BuildError::Device(DeviceError::Gpu { .. })) | Self::DeviceFailed => 70,
            Self::Build(BuildError::Disk(error)) => error.exit_code(),
            Self::Build(_) | Self::Unreachable(_) => 69,
            // As shells say it.
            #[cfg(feature = "eval")]
            Self::Interrupted(signal) => 128 + u8::try_from(*signal).unwrap_or(0),
            Self::Bench(_) | Self::NotServing | Self::Other(_) => 1,
        }
    }
}

/// The likely cause of a failure to connect, where another endpoint would do.
fn advise_connection(error: &str) -> &'static str {
    if error.contains("InvalidContentType") {
        return "; it does not speak TLS: is http:// meant?";
    }
    let broken = ["broken pipe", "http2 error", "frame with invalid size"];
    match broken.iter().any(|sign| error.contains(sign)) {
        true => {
            "; what listens there speaks no gRPC: is it the admin port, or one of TLS (https://)?"
        }
        false => "",
    }
}

/// Whether other options would do.
#[cfg(feature = "eval")]
fn is_usage(error: &anyhow::Error) -> bool {
    use kvd_codec::CalibrationError::{Malformed, NonFinite, TooFewSamples};
    use kvd_eval::calibrate::CalibrateError;
    error.chain().any(|cause| {
        let calibrate = cause.downcast_ref::<CalibrateError>();
        let idle = matches!(
            calibrate,
            Some(
                CalibrateError::NothingToFit { .. }
                    | CalibrateError::TooFewQueries { .. }
                    | CalibrateError::TooFewTokens { .. }
                    | CalibrateError::OnlyZeros { .. }
                    | CalibrateError::NoQueries { .. }
                    | CalibrateError::Dump { .. }
                    | CalibrateError::Mixed { .. }
            )
        );
        let few = matches!(
            cause.downcast_ref(),
            Some(TooFewSamples { .. } | Malformed(_) | NonFinite { .. })
        );
        let client = cause.downcast_ref::<kvd_client::ClientError>();
        let of_another =
            client.is_some_and(|error| error.code == Some(ErrorCode::InvalidCalibration));
        // A model folder that is not computed is mended by whoever wrote the command.
        idle || few
            || of_another
            || cause.is::<kvd_eval::UsageError>()
            || cause.is::<kvd_eval::ModelError>()
    })
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    // Parsing takes a millisecond, and a configuration as long as its disk does.
    if std::env::args_os().nth(1).is_some_and(|command| command == "serve")
        && let Err(error) = serve::outlive_early_signals()
    {
        let _ = writeln!(std::io::stderr(), "kvd: signals cannot be handled: {error}");
        return ExitCode::FAILURE;
    }
    let cli = match CliArgs::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and are no errors.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 64 } else { 0 });
        }
    };
    match run_command(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::OutputClosed) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "kvd: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run_command(command: CliCommand) -> Result<(), CliError> {
    match command {
        CliCommand::Serve(config) => {
            build_runtime()?.block_on(serve::run_daemon(config.load_config()?))
        }
        CliCommand::Config { print_default: true, .. } => print_text(DEFAULT_TOML),
        CliCommand::Config { config, .. } => print_text(&config_text(&config.into_overrides())?),
        CliCommand::Health(args) => {
            print_text(&build_runtime()?.block_on(status::check_health(args))?)
        }
        CliCommand::Status(args) => {
            print_text(&build_runtime()?.block_on(status::describe_status(args))?)
        }
        CliCommand::Top(args) => print_text(&build_runtime()?.block_on(top::run_top(args))?),
        CliCommand::Models(command) => {
            print_text(&build_runtime()?.block_on(models::run_command(command))?)
        }
        CliCommand::Namespaces(command) => {
            print_text(&build_runtime()?.block_on(namespaces::run_command(command))?)
        }
        CliCommand::Describe(command) => {
            print_text(&build_runtime()?.block_on(describe::run_command(command))?)
        }
        CliCommand::Token => print_text(&token_text()?),
        CliCommand::Completions { shell } => print_text(&completion_script(shell)?),
        CliCommand::ManPages { folder } => print_text(&write_manual(&folder)?),
        CliCommand::Sequences(command) => {
            print_text(&build_runtime()?.block_on(sequences::run_command(command))?)
        }
        CliCommand::Sessions(command) => {
            print_text(&build_runtime()?.block_on(sessions::run_command(command))?)
        }
        CliCommand::Cache(command) => {
            print_text(&build_runtime()?.block_on(cache::run_command(command))?)
        }
        CliCommand::Codecs(args) => print_text(&codecs::codecs_text(&args)?),
        CliCommand::Bench(command) => print_text(&bench::run_bench(command)?),
        CliCommand::Plan(args) => print_text(&plan::plan_text(&args)?),
        CliCommand::Metrics(args) => print_text(&metrics::metrics_text(&args)?),
        CliCommand::Dashboard => print_text(&dashboard::dashboard_text()),
        #[cfg(feature = "eval")]
        CliCommand::Demo(args) => build_runtime()?.block_on(demo::run_demo(args)),
        #[cfg(feature = "eval")]
        CliCommand::Eval(args) => build_runtime()?.block_on(eval::run_eval(args)),
        #[cfg(feature = "eval")]
        CliCommand::Calibrate(args) => build_runtime()?.block_on(calibrate::run_calibrate(args)),
    }
}

fn build_runtime() -> Result<tokio::runtime::Runtime, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    Ok(runtime.map_err(anyhow::Error::from)?)
}

/// A new token: the daemon's file gets its hash alone.
fn token_text() -> Result<String, CliError> {
    let made = NewToken::draw_token().map_err(anyhow::Error::from)?;
    Ok(format!(
        "token, told this once: {}\nfor the file of access.principals: tokens = [\"{}\"]\n",
        made.token, made.hash
    ))
}

/// The completions of a shell.
fn completion_script(shell: clap_complete::Shell) -> Result<String, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut CliArgs::command(), "kvd", &mut script);
    Ok(String::from_utf8(script).map_err(anyhow::Error::from)?)
}

/// Writes the manual pages; how many there are.
fn write_manual(folder: &Path) -> Result<String, CliError> {
    let failed = |error| anyhow::Error::new(error).context(folder.display().to_string());
    std::fs::create_dir_all(folder)
        .map_err(|error| CliError::Usage(format!("{}: {error}", folder.display())))?;
    clap_mangen::generate_to(CliArgs::command(), folder).map_err(failed)?;
    let pages = std::fs::read_dir(folder).map_err(failed)?.count();
    Ok(format!("{}: {pages} files\n", folder.display()))
}

/// The configuration that holds, as a file; an error where the daemon would refuse it.
fn config_text(overrides: &ConfigOverrides) -> Result<String, CliError> {
    Config::load(overrides)?;
    for sentence in describe_unread_variables() {
        let _ = writeln!(std::io::stderr(), "kvd: {sentence}");
    }
    Ok(RawConfig::load(overrides)?.to_toml())
}

fn print_text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(CliError::OutputClosed),
        done => Ok(done.map_err(|error| anyhow::Error::from(error).context("standard output"))?),
    }
}

#[cfg(test)]
mod tests {
    use super::advise_connection;

    #[test]
    fn an_endpoint_that_speaks_otherwise_is_told_what_it_may_be() {
        for (error, part) in [
            ("stream closed because of a broken pipe", "is it the admin port"),
            ("received corrupt message of type InvalidContentType", "is http:// meant?"),
        ] {
            assert!(advise_connection(error).contains(part), "{error}");
        }
        assert_eq!(advise_connection("Connection refused (os error 111)"), "");
    }
}
