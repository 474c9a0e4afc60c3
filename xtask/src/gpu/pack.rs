//! Makes the folder that is carried to a machine with a GPU.

use crate::kernels;
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Of `kernels/gpu`.
const SCRIPTS: [&str; 4] = ["baselines.py", "bench.py", "driver.py", "worker.py"];

/// Packs for the GPU that `kvd plan --device` calls `device`: its plans are launched.
pub(crate) fn pack(root: &Path, out: &Path, device: &str, report: &Report) -> Result<()> {
    let fatbins = root.join("target/kernels");
    if kernels::are_stale(root, &fatbins)? {
        kernels::run(root, report)?;
    }
    // What was packed before may be of codecs and kernels that are gone.
    for folder in ["fixtures", "fatbins"].map(|name| out.join(name)) {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("clear {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    }
    let fixtures = out.join("fixtures");
    let images = fatbins_in(&fatbins)?;
    for fatbin in &images {
        let name = fatbin.file_name().context("a file without a name")?;
        fs::copy(fatbin, out.join("fatbins").join(name))?;
    }
    for script in SCRIPTS {
        fs::copy(root.join("kernels/gpu").join(script), out.join(script))?;
    }
    let tests = ["-p", "kvd-cuda", "--features", "embed-kernels", "--test", "gpu"];
    fs::copy(program(root, &tests, report)?, out.join("conformance"))?;
    report.step("cargo test -p kvd-emu --test fixtures");
    let mut command = cargo(root);
    command.args(["test", "--quiet", "-p", "kvd-emu", "--test", "fixtures"]);
    command.env("KVD_GPU_FIXTURES", &fixtures).env("KVD_GPU_DEVICE", device);
    let status = command.env("KVD_REQUIRE_EMU", "1").status()?;
    ensure!(status.success(), "the fixtures were not made");
    pack_daemon(root, out, &images, report)?;
    fs::copy(std::env::current_exe()?, out.join("xtask"))?;
    report.line(&format!("packed: {}; there: ./xtask gpu run", out.display()));
    Ok(())
}

/// Packs the daemon where it was built with these kernels, and what asks it.
fn pack_daemon(root: &Path, out: &Path, images: &[PathBuf], report: &Report) -> Result<()> {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| root.join("target"), PathBuf::from);
    let daemon = target.join("release/kvd");
    let packed = ["kvd", "on_device"].map(|name| out.join(name));
    if holds(&fs::read(&daemon).unwrap_or_default(), images)? {
        fs::copy(&daemon, &packed[0])?;
        fs::copy(program(root, &["-p", "kvd", "--test", "on_device"], report)?, &packed[1])?;
        return Ok(());
    }
    for stale in packed.iter().filter(|path| path.exists()) {
        fs::remove_file(stale)?;
    }
    report.line(&format!(
        "without a daemon: {} does not hold these kernels (cargo build --release -p kvd --features \
         gpu-kernels)",
        daemon.display()
    ));
    Ok(())
}

/// Whether a program holds each of these files, of which there is one at least.
fn holds(program: &[u8], images: &[PathBuf]) -> Result<bool> {
    for image in images {
        let image = fs::read(image)?;
        let Some(first) = image.first_chunk::<16>() else { return Ok(false) };
        let mut starts = program.windows(first.len()).enumerate().filter(|(_, at)| at == first);
        if !starts.any(|(at, _)| program[at..].starts_with(&image)) {
            return Ok(false);
        }
    }
    Ok(!images.is_empty())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

fn fatbins_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_fatbin = |path: &PathBuf| path.extension().is_some_and(|end| end == "fatbin");
    Ok(paths.into_iter().filter(is_fatbin).collect())
}

/// Builds the tests that arguments of `cargo test` choose, the target last; says where they are.
fn program(root: &Path, tests: &[&str], report: &Report) -> Result<PathBuf> {
    let choice = tests.join(" ");
    report.step(&format!("cargo test {choice} --no-run"));
    let mut command = cargo(root);
    command.arg("test").args(tests).args(["--no-run", "--message-format", "json"]);
    let output = command.stderr(Stdio::inherit()).output().context("start cargo")?;
    ensure!(output.status.success(), "{choice} does not build");
    let target = tests.last().context("a target")?;
    executable(&String::from_utf8_lossy(&output.stdout), target)
}

/// The program of a target among cargo's messages.
fn executable(messages: &str, target: &str) -> Result<PathBuf> {
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        if message["target"]["name"] == target
            && let Some(path) = message["executable"].as_str()
        {
            return Ok(path.into());
        }
    }
    bail!("cargo named no program of {target}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_the_messages() {
        let messages = "\
warning: not a message
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"kvd_cuda\"},\"executable\":null}
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gpu\"},\"executable\":\"/t/gpu-1\"}
{\"reason\":\"build-finished\",\"success\":true}
";
        assert_eq!(executable(messages, "gpu").unwrap(), PathBuf::from("/t/gpu-1"));
        assert!(executable(messages, "other").is_err());
    }

    #[test]
    fn a_daemon_is_packed_where_it_holds_these_kernels() {
        let folder = tempfile::tempdir().unwrap();
        let image = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        };
        let images = [image("a", &[7; 40]), image("b", b"0123456789abcdef, the end")];
        let program =
            [&[7; 60][..], b"0123456789abcdef, but 0123456789abcdef, the end, and"].concat();
        assert!(holds(&program, &images).unwrap());
        assert!(!holds(&program[..program.len() - 9], &images).unwrap(), "one is cut off");
        assert!(!holds(&[], &images).unwrap() && !holds(&program, &[]).unwrap());
    }

    #[test]
    fn only_fat_binaries_are_kernels() {
        let folder = tempfile::tempdir().unwrap();
        assert!(fatbins_in(&folder.path().join("none")).unwrap().is_empty());
        fs::write(folder.path().join("a.fatbin"), "").unwrap();
        fs::write(folder.path().join("a.txt"), "").unwrap();
        assert_eq!(fatbins_in(folder.path()).unwrap(), [folder.path().join("a.fatbin")]);
    }
}
