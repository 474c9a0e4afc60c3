//! The GPU lane: `pack` makes one folder here; `./xtask gpu run` in it, on a machine with a GPU and
//! without Rust, tests and measures, and writes one report. No GPU has run it yet.

mod kept;
mod known;
mod limited;
mod measure;
mod pack;
#[cfg(test)]
mod scripts;
mod steps;
mod write;

use crate::report::StepReport;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};

/// Output of the benchmark.
const FIGURES: &str = "figures.json";
/// Output of the launches of other shapes.
const SHAPES: &str = "shapes.json";
/// Output of the daemon's step.
const DAEMON_STORES: &str = "daemon-stores.json";
/// Description of the packed folder.
const PACK: &str = "pack.json";

#[derive(Subcommand)]
pub(crate) enum GpuStep {
    /// Makes the folder: test binary, kernels, fixtures, scripts, this program, and the daemon with
    /// a client of it where it was built with the kernels.
    Pack {
        /// The GPU whose plans are launched, as `kvd plan --device` has it: on another one none of
        /// them is, and nothing is measured.
        #[arg(long, default_value = "h200")]
        device: String,
        /// The folder.
        #[arg(long, default_value = "target/gpu-pack")]
        out: PathBuf,
    },
    /// Runs what lies in this program's folder; the report is whole after each step.
    Run(RunArguments),
}

/// Options of a run.
#[derive(Args, Clone)]
pub(crate) struct RunArguments {
    /// These steps alone: conformance, benchmark, shapes, daemon, ipc, memcheck, memcheck-ipc and
    /// so on; `sanitizers` are all of those, `rest` what the report has no outcome of.
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
    /// Where the report goes, and where one of the same GPU, day and pack is gone on with; `report`
    /// beside this program otherwise.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// How long each step may take, instead of its own limit.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// How long the run may take: a step whose limit does not fit any more is not begun.
    #[arg(long, value_name = "SECONDS", default_value_t = 570)]
    within: u64,
}

pub(crate) fn run_step(root: &Path, step: GpuStep, report: &StepReport) -> Result<()> {
    match step {
        GpuStep::Pack { device, out } => pack::pack_folder(root, &root.join(out), &device, report),
        GpuStep::Run(asked) => {
            let program = std::env::current_exe()?;
            measure::run(program.parent().unwrap_or(root), "nvidia-smi", &asked, report)
        }
    }
}
