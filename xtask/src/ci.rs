//! The checks of every commit, cheapest to explain first; the first failure ends the run.

use crate::report::StepReport;
use crate::{check_generated, tidy};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

const FMT: &[&str] = &["fmt", "--all", "--check"];
const CLIPPY: &[&str] =
    &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];

/// Runs every check.
pub(crate) fn run_checks(root: &Path, report: &StepReport) -> Result<()> {
    report.begin_step("cargo fmt --all --check");
    run_cargo(root, FMT)?;
    report.begin_step("cargo clippy --workspace --all-targets");
    run_cargo(root, CLIPPY)?;
    report.begin_step("xtask gen --check");
    check_generated(root)?;
    report.begin_step("xtask tidy");
    tidy::run_rules(root, &tidy::TidyArguments::default(), report)
}

/// Runs cargo with `arguments`, its output passed through.
fn run_cargo(root: &Path, arguments: &[&str]) -> Result<()> {
    // Set by the cargo that runs us, so that the toolchain is the same.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(arguments).current_dir(root).status();
    let status = status.with_context(|| format!("start cargo {}", arguments.join(" ")))?;
    if status.success() {
        return Ok(());
    }
    bail!("cargo {} failed", arguments.join(" "))
}
