//! Runs the tests of the crates that hold arithmetic as aarch64 code, with qemu's user mode, and
//! checks that the daemon compiles for it. It checks results there, never speed.

use crate::report::StepReport;
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Every instruction set that kernels exist for, and the C library of the target.
const EMULATED: &str = "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu";

/// An emulator takes minutes for kernels that no compiler has optimised.
const OPTIMISED: &str = "profile.dev.package.kvd-compute.opt-level=3";

/// The daemon compiles.
const CHECK: &[&str] = &["check", "--package", "kvd", "--target", TARGET];
/// Unit tests of formats and codecs: minutes.
const QUICK: &[&str] = &[
    "test",
    "--package",
    "kvd-core",
    "--package",
    "kvd-codec",
    "--package",
    "kvd-fit",
    "--lib",
    "--target",
    TARGET,
];
/// Unit tests of products of integers, whose kernels are the instruction set's own: minutes.
const INTEGERS: &[&str] = &[
    "test",
    "--config",
    OPTIMISED,
    "--package",
    "kvd-compute",
    "--lib",
    "--target",
    TARGET,
    "--",
    "int_operands",
    "int_dot",
];
/// All tests of formats, codecs and attention: an hour or more.
const ALL: &[&str] = &[
    "test",
    "--config",
    OPTIMISED,
    "--package",
    "kvd-core",
    "--package",
    "kvd-codec",
    "--package",
    "kvd-fit",
    "--package",
    "kvd-compute",
    "--target",
    TARGET,
];

#[derive(clap::Args)]
pub(crate) struct CrossArguments {
    /// Unit tests of formats, codecs and products of integers alone.
    #[arg(long)]
    quick: bool,
}

/// Runs every step; the first failure ends the run.
pub(crate) fn run_emulated(
    root: &Path,
    arguments: &CrossArguments,
    report: &StepReport,
) -> Result<()> {
    for tool in [LINKER, EMULATOR] {
        ensure!(can_start(tool), "{tool} is missing: CONTRIBUTING.md says what to install");
    }
    let steps = if arguments.quick { &[CHECK, QUICK, INTEGERS][..] } else { &[CHECK, ALL] };
    for arguments in steps {
        report.begin_step(&format!("cargo {}", arguments.join(" ")));
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let variable = |name: &str| format!("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_{name}");
        let status = Command::new(cargo)
            .args(*arguments)
            .env(variable("LINKER"), LINKER)
            .env(variable("RUNNER"), EMULATED)
            // Tests leave out what would only be longer.
            .env("KVD_EMULATED", "1")
            .current_dir(root)
            .status();
        let status = status.with_context(|| format!("start cargo {}", arguments.join(" ")))?;
        if !status.success() {
            bail!("cargo {} failed", arguments.join(" "));
        }
    }
    Ok(())
}

/// Whether a program can be started.
fn can_start(tool: &str) -> bool {
    let mut command = Command::new(tool);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
