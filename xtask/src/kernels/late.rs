//! Compiles the kernels that a daemon compiles when a model is registered, and whose products are
//! on tensor cores: with the pinned compiler and for every target, as NVRTC tells nobody of spills.
//! The texts are the daemon's own, which `xtask/tests/late.rs` writes.

use super::{
    HEADING, KernelUsage, compile_all, compile_with, find_compiler, list_sources, output_folder,
    strict_compiler,
};
use crate::report::StepReport;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Names the folder that the texts are written to.
const TEXTS: &str = "KVD_LATE_KERNELS";
/// Beside `target/kernels`, which programs with kernels are built from.
const OUT: &str = "target/kernels-late";

/// Compiles every pair for the targets, prints what each kernel uses and fails with all that spill
/// or do not compile.
pub(super) fn compile_late(root: &Path, targets: &[u32], report: &StepReport) -> Result<()> {
    let nvcc = find_compiler(&output_folder(root)?, report)?;
    let out = root.join(OUT);
    // Pairs of earlier may be gone.
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("clear {}", out.display()))?;
    }
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    write_texts(root, &out, report)?;
    let sources = list_sources(&out)?;
    ensure!(!sources.is_empty(), "no text in {}", out.display());
    report.begin_step(&format!("{} pairs, for {targets:?}", sources.len()));
    let headers = root.join("kernels/include/kvd");
    let compiled = compile_all(&sources, |source| {
        let mut command = strict_compiler(&nvcc, targets);
        // Texts name headers as NVRTC is given them.
        command.arg("-I").arg(&headers);
        compile_with(command, source, &out).with_context(|| source.display().to_string())
    });
    ensure!(compiled.len() == sources.len(), "a thread that compiled has ended early");
    report.print_line(HEADING);
    let mut wrong = Vec::new();
    let mut all = Vec::new();
    for usages in compiled {
        match usages {
            Ok(usages) => all.extend(usages),
            Err(error) => wrong.push(format!("{error:#}")),
        }
    }
    all.iter().for_each(|usage| report.print_line(&usage.line()));
    wrong.extend(all.iter().filter_map(spill));
    ensure!(wrong.is_empty(), "late kernels:\n{}", wrong.join("\n"));
    report.print_line(&summary(&all)?);
    Ok(())
}

/// Has the program that knows the pairs write them down.
fn write_texts(root: &Path, out: &Path, report: &StepReport) -> Result<()> {
    report.begin_step("cargo test -p xtask --test late");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root).args(["test", "--quiet", "-p", "xtask", "--test", "late"]);
    let status = cargo.env(TEXTS, out).stdout(Stdio::null()).status().context("start cargo")?;
    ensure!(status.success(), "the texts were not written");
    Ok(())
}

/// The message about a kernel that spills; none if it does not.
fn spill(usage: &KernelUsage) -> Option<String> {
    let KernelUsage { kernel, target, spill_bytes, .. } = usage;
    (*spill_bytes > 0).then(|| format!("{kernel} spills {spill_bytes} bytes for {target}"))
}

/// How many kernels there are, and how many registers they take.
fn summary(all: &[KernelUsage]) -> Result<String> {
    let registers = || all.iter().map(|usage| usage.registers);
    let least = registers().min().context("nvcc named no kernel")?;
    let most = registers().max().unwrap_or(least);
    Ok(format!("late kernels: {} compiled, {least} to {most} registers, no spill", all.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(registers: u32, spill_bytes: u32) -> KernelUsage {
        let (kernel, target) = ("kvd_a".to_owned(), "sm_80".to_owned());
        KernelUsage { kernel, target, registers, shared_bytes: 0, spill_bytes }
    }

    #[test]
    fn kernels_are_counted_and_each_spill_is_named() {
        let all = [usage(168, 0), usage(96, 0), usage(120, 0)];
        let wanted = "late kernels: 3 compiled, 96 to 168 registers, no spill";
        assert_eq!(summary(&all).unwrap(), wanted);
        assert!(summary(&[]).is_err(), "none were compiled");
        assert_eq!(all.iter().find_map(spill), None);
        assert_eq!(spill(&usage(168, 4)).unwrap(), "kvd_a spills 4 bytes for sm_80");
    }
}
