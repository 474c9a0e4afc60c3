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
    /// Makes the folder: test binary, kernels, fixtures, scripts and this program.
    Pack {
        /// The folder.
        #[arg(long, default_value = "target/gpu-pack")]
        out: PathBuf,
    },
    /// Runs everything in the folder that this program lies in.
    Run,
}

pub(crate) fn run(root: &Path, step: Step, report: &Report) -> Result<()> {
    match step {
        Step::Pack { out } => pack::pack(root, &root.join(out), report),
        Step::Run => {
            let program = std::env::current_exe()?;
            measure::run(program.parent().unwrap_or(root), "nvidia-smi", report)
        }
    }
}
