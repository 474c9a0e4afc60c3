//! Repository chores: `cargo xtask gen | tidy | ci | cross | kernels | fused | gpu`.
#![forbid(unsafe_code)]

mod ci;
mod cross;
mod fused;
mod generate;
mod gpu;
mod kernel_abi;
mod kernels;
mod report;
mod results;
mod tidy;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use report::StepReport;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Repository chores")]
struct XtaskArguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Regenerates the code that is made from `proto/`, the header of what kernels share with the
    /// host, and the page of benchmark results.
    Gen {
        /// Only says whether the files in the repository are up to date.
        #[arg(long)]
        check: bool,
    },
    /// Checks sizes, words, dependency directions, left-overs and the unsafe fence.
    Tidy(tidy::TidyArguments),
    /// Checks that must pass before a commit: fmt, clippy, gen --check, tidy.
    Ci,
    /// Runs the tests of codecs and kernels as aarch64 code, with qemu.
    Cross(cross::CrossArguments),
    /// Compiles the CUDA kernels for each target, with a compiler from Python wheels; needs the
    /// network the first time, no GPU.
    Kernels(kernels::KernelArguments),
    /// Checks that kernels which write pages fuse no product with a sum, in their disassembly.
    Fused(fused::FusedArguments),
    /// Steps for a machine with a GPU, without Rust: conformance, sanitizer, shared memory,
    /// benchmark.
    Gpu {
        #[command(subcommand)]
        step: gpu::GpuStep,
    },
}

fn main() -> ExitCode {
    let report = StepReport;
    match run_chore(XtaskArguments::parse().chore, &find_root(), &report) {
        Ok(()) => ExitCode::SUCCESS,
        // Not `fn main() -> Result`: findings are no defect of this program, so no backtrace.
        Err(error) => {
            report.print_line(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run_chore(chore: Chore, root: &Path, report: &StepReport) -> Result<()> {
    match chore {
        Chore::Gen { check: false } => {
            fs::write(root.join(results::PAGE), results::render_page(root)?)?;
            fs::write(root.join(kernel_abi::HEADER), kernel_abi::render_header(root)?)?;
            generate::generate_code(root, &root.join(generate::OUTPUT))
        }
        Chore::Gen { check: true } => check_generated(root),
        Chore::Tidy(arguments) => tidy::run_rules(root, &arguments, report),
        Chore::Ci => ci::run_checks(root, report),
        Chore::Cross(arguments) => cross::run_emulated(root, &arguments, report),
        Chore::Kernels(arguments) => kernels::compile_asked(root, &arguments, report),
        Chore::Fused(arguments) => fused::check_kernels(root, &arguments, report),
        Chore::Gpu { step } => gpu::run_step(root, step, report),
    }
}

/// The repository's root: this package's parent.
fn find_root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_owned()
}

/// Fails if generated files in the repository are not up to date.
fn check_generated(root: &Path) -> Result<()> {
    let page = fs::read_to_string(root.join(results::PAGE)).unwrap_or_default();
    if page != results::render_page(root)? {
        bail!("{} differs from bench/results: run `cargo xtask gen`", results::PAGE);
    }
    let header = fs::read_to_string(root.join(kernel_abi::HEADER)).unwrap_or_default();
    if header != kernel_abi::render_header(root)? {
        bail!("{} differs from kvd-cuda's structs: run `cargo xtask gen`", kernel_abi::HEADER);
    }
    let scratch = tempfile::tempdir()?;
    let stale = generate::find_stale(root, &root.join(generate::OUTPUT), scratch.path())?;
    if stale.is_empty() {
        return Ok(());
    }
    bail!("{} in {} differ from proto/: run `cargo xtask gen`", stale.join(", "), generate::OUTPUT)
}
