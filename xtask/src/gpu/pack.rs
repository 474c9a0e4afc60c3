//! Makes the folder that is carried to a machine with a GPU.

use super::PACK;
use crate::kernels;
use crate::report::StepReport;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// Scripts of `kernels/gpu` that are packed.
const SCRIPTS: [&str; 4] = ["baselines.py", "bench.py", "driver.py", "worker.py"];
/// Largest folder that can be carried to the machine with the GPU.
const MOST_BYTES: u64 = 64 << 20;
/// The reports of runs in the folder itself, which are not carried.
const REPORTS: &str = "report";

/// Packs for the GPU that `kvd plan --device` calls `device`: its plans are launched.
pub(crate) fn pack_folder(
    root: &Path,
    out: &Path,
    device: &str,
    report: &StepReport,
) -> Result<()> {
    let fatbins = root.join("target/kernels");
    if kernels::are_stale(root, &fatbins)? {
        kernels::compile_kernels(root, report)?;
    }
    // An earlier pack may hold codecs and kernels that are gone.
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
    copy_program(&build_tests(root, &tests, report)?, &out.join("conformance"))?;
    report.begin_step("cargo test -p kvd-emu --test fixtures");
    let mut command = cargo_command(root);
    command.args(["test", "--quiet", "-p", "kvd-emu", "--test", "fixtures"]);
    command.env("KVD_GPU_FIXTURES", &fixtures).env("KVD_GPU_DEVICE", device);
    let status = command.env("KVD_REQUIRE_EMU", "1").status()?;
    ensure!(status.success(), "the fixtures were not made");
    pack_daemon(root, out, &images, report)?;
    copy_program(&std::env::current_exe()?, &out.join("xtask"))?;
    let packed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let facts = json!({ "commit": packed_commit(root), "device": device, "packed": packed });
    fs::write(out.join(PACK), format!("{facts:#}\n"))?;
    say_sizes(out, &archive_folder(out)?, report)
}

/// Copies a program without what only a debugger reads, which is most of it.
fn copy_program(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("pack {}", from.display()))?;
    // Without binutils it is packed as it is.
    let _ = Command::new("strip").arg(to).stderr(Stdio::null()).status();
    Ok(())
}

/// The commit that is packed, and whether files differ from it.
fn packed_commit(root: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(root).args(arguments).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() { commit } else { format!("{commit} with changes") })
}

/// The folder as one file beside it: a machine may take fewer bytes than it has room for.
fn archive_folder(out: &Path) -> Result<PathBuf> {
    let folder = out.file_name().context("a folder without a name")?;
    let parent = out.parent().context("a folder without a parent")?;
    let mut name = folder.to_owned();
    name.push(".tar.gz");
    let to = out.with_file_name(name);
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(parent).arg("-czf").arg(&to).arg("--exclude").arg(REPORTS).arg(folder);
    ensure!(tar.status().context("start tar")?.success(), "tar fails");
    Ok(to)
}

/// Bytes of a file, or of all files under a folder.
fn bytes_of(path: &Path) -> Result<u64> {
    let about = fs::symlink_metadata(path)?;
    if !about.is_dir() {
        return Ok(about.len());
    }
    let mut bytes = 0;
    for entry in fs::read_dir(path)? {
        bytes += bytes_of(&entry?.path())?;
    }
    Ok(bytes)
}

/// Says what the folder and its archive take, by parts, and warns where that is too much.
fn say_sizes(out: &Path, archive: &Path, report: &StepReport) -> Result<()> {
    let mut parts = Vec::new();
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().display().to_string();
        if name != REPORTS {
            parts.push((bytes_of(&path)?, name));
        }
    }
    parts.sort_by(|a, b| b.cmp(a));
    let total = parts.iter().map(|(bytes, _)| bytes).sum();
    let packed = bytes_of(archive)?;
    let parts =
        parts.iter().take(6).map(|(bytes, name)| format!("{name} {}", mebibytes_text(*bytes)));
    let parts = parts.collect::<Vec<_>>().join(", ");
    report.print_line(&format!("packed: {}, {} ({parts})", out.display(), mebibytes_text(total)));
    report.print_line(&format!("as one file: {}, {}", archive.display(), mebibytes_text(packed)));
    if let Some(warning) = size_warning(total, packed) {
        report.print_line(&warning);
    }
    report.print_line("there, in the folder: ./xtask gpu run");
    Ok(())
}

fn mebibytes_text(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The warning about a folder, or its archive too, that is too large to be carried.
fn size_warning(folder: u64, archive: u64) -> Option<String> {
    let most = mebibytes_text(MOST_BYTES);
    match (folder > MOST_BYTES, archive > MOST_BYTES) {
        (false, _) => None,
        (true, false) => Some(format!("warning: more than {most}: carry the one file")),
        (true, true) => Some(format!("warning: both are more than {most}")),
    }
}

/// Packs the daemon where it was built with these kernels, and what asks it.
fn pack_daemon(root: &Path, out: &Path, images: &[PathBuf], report: &StepReport) -> Result<()> {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| root.join("target"), PathBuf::from);
    let daemon = target.join("release/kvd");
    let packed = ["kvd", "on_device"].map(|name| out.join(name));
    if holds_images(&fs::read(&daemon).unwrap_or_default(), images)? {
        copy_program(&daemon, &packed[0])?;
        let tests = ["-p", "kvd", "--test", "on_device"];
        copy_program(&build_tests(root, &tests, report)?, &packed[1])?;
        return Ok(());
    }
    for stale in packed.iter().filter(|path| path.exists()) {
        fs::remove_file(stale)?;
    }
    report.print_line(&format!(
        "without a daemon: {} does not hold these kernels (cargo build --release -p kvd --features \
         gpu-kernels)",
        daemon.display()
    ));
    Ok(())
}

/// Whether a program holds each of these files; there is at least one.
fn holds_images(program: &[u8], images: &[PathBuf]) -> Result<bool> {
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

fn cargo_command(root: &Path) -> Command {
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
fn build_tests(root: &Path, tests: &[&str], report: &StepReport) -> Result<PathBuf> {
    let choice = tests.join(" ");
    report.begin_step(&format!("cargo test {choice} --no-run"));
    let mut command = cargo_command(root);
    command.arg("test").args(tests).args(["--no-run", "--message-format", "json"]);
    let output = command.stderr(Stdio::inherit()).output().context("start cargo")?;
    ensure!(output.status.success(), "{choice} does not build");
    let target = tests.last().context("a target")?;
    find_executable(&String::from_utf8_lossy(&output.stdout), target)
}

/// The program of a target among cargo's messages.
fn find_executable(messages: &str, target: &str) -> Result<PathBuf> {
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
        assert_eq!(find_executable(messages, "gpu").unwrap(), PathBuf::from("/t/gpu-1"));
        assert!(find_executable(messages, "other").is_err());
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
        assert!(holds_images(&program, &images).unwrap());
        assert!(!holds_images(&program[..program.len() - 9], &images).unwrap(), "one is cut off");
        assert!(!holds_images(&[], &images).unwrap() && !holds_images(&program, &[]).unwrap());
    }

    #[test]
    fn sizes_are_of_all_files_but_reports_and_a_warning_says_what_to_carry() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("gpu-pack");
        for part in ["fixtures/checks", REPORTS] {
            fs::create_dir_all(out.join(part)).unwrap();
        }
        fs::write(out.join("fixtures/a.bin"), [0; 1000]).unwrap();
        fs::write(out.join("fixtures/checks/b.bin"), [0; 500]).unwrap();
        fs::write(out.join(REPORTS).join("old.md"), "a").unwrap();
        assert_eq!(bytes_of(&out.join("fixtures")).unwrap(), 1500);
        let archive = archive_folder(&out).unwrap();
        assert_eq!(archive, folder.path().join("gpu-pack.tar.gz"));
        let list = Command::new("tar").arg("-tzf").arg(&archive).output().unwrap().stdout;
        let list = String::from_utf8(list).unwrap();
        assert!(list.contains("gpu-pack/fixtures/checks/b.bin"), "{list}");
        assert!(!list.contains("old.md"), "{list}");
        say_sizes(&out, &archive, &StepReport).unwrap();
        assert_eq!(mebibytes_text(3 << 19), "1.5 MiB");
        assert_eq!(size_warning(MOST_BYTES, 1), None);
        assert!(size_warning(MOST_BYTES + 1, 1).unwrap().ends_with("64.0 MiB: carry the one file"));
        assert!(size_warning(MOST_BYTES + 1, MOST_BYTES + 1).unwrap().contains("both"));
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
