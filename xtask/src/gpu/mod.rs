//! The GPU lane: `pack` makes one folder here; `./xtask gpu run` in it, on a machine with a GPU and
//! without Rust, tests and measures, and writes one report. No GPU has run it yet.

mod measure;
mod pack;
mod write;

use crate::report::Report;
use anyhow::Result;
use clap::Subcommand;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub(crate) enum Step {
    /// Makes the folder: test binary, kernels, fixtures, scripts, this program, and the daemon with
    /// a client of it where it was built with the kernels.
    Pack {
        /// The GPU whose plans are launched, as `kvd plan --device` has it.
        #[arg(long, default_value = "h200")]
        device: String,
        /// The folder.
        #[arg(long, default_value = "target/gpu-pack")]
        out: PathBuf,
    },
    /// Runs everything in the folder that this program lies in.
    Run,
}

pub(crate) fn run(root: &Path, step: Step, report: &Report) -> Result<()> {
    match step {
        Step::Pack { device, out } => pack::pack(root, &root.join(out), &device, report),
        Step::Run => {
            let program = std::env::current_exe()?;
            measure::run(program.parent().unwrap_or(root), "nvidia-smi", report)
        }
    }
}
