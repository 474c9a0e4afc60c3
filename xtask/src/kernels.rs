//! Compiles the CUDA kernels for each target with a pinned compiler from Python wheels, on
//! machines without a GPU or CUDA. Warnings and register spills are errors. Needs g++, python3
//! and, the first time, the network; owns `target/kernels` and nothing else. The wheels are
//! NVIDIA's and stay there.

mod late;

use crate::report::StepReport;
use anyhow::{Context, Error, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

/// Pins nvcc, its headers and what they need: the wheels' own dependencies carry no version.
const WHEELS: &str = "cuda-toolkit[nvcc,cccl]==13.0.3.0";
/// The virtual environment in `target/kernels`.
const ENVIRONMENT: &str = "nvcc-13.0.3";
/// Where the wheels put the compiler, in a virtual environment's packages.
const NVCC: &str = "nvidia/cu13/bin/nvcc";
/// Reads what nvcc 13.0 makes; of 13.0 itself there is no wheel.
const DISASSEMBLER: &str = "nvidia-cuda-nvdisasm==13.2.51";
/// GPUs that are compiled for: Ampere, Ada, Hopper.
const TARGETS: [u32; 3] = [80, 89, 90];
/// Later GPUs compile this intermediate form themselves.
const PTX: u32 = 90;

/// Set to make a machine where the compiler cannot be installed a failure instead of a skip.
const REQUIRE: &str = "KVD_REQUIRE_KERNELS";

#[derive(clap::Args)]
pub(crate) struct KernelArguments {
    /// Says so and succeeds where the compiler is not there and cannot be installed.
    #[arg(long)]
    skip_offline: bool,
    /// Compiles instead what a daemon compiles when a model is registered: every pair of sides that
    /// tensor cores multiply. Takes as long as all the others or longer.
    #[arg(long)]
    late: bool,
    /// With `--late`, these compute capabilities alone: 90 for 9.0.
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',', requires = "late")]
    sm: Vec<u32>,
}

/// Resources of one kernel, as ptxas reports them.
#[derive(Debug, Default, PartialEq, Eq)]
struct KernelUsage {
    kernel: String,
    target: String,
    registers: u32,
    /// Static; the kernels' shared memory is dynamic and the host's choice.
    shared_bytes: u32,
    spill_bytes: u32,
}

/// Heading above the lines of [`KernelUsage::line`].
const HEADING: &str = "kernel                              target  registers  shared  spilled";

impl KernelUsage {
    fn line(&self) -> String {
        let Self { kernel, target, registers, shared_bytes, spill_bytes } = self;
        format!("{kernel:<34}  {target:>6}  {registers:>9}  {shared_bytes:>6}  {spill_bytes:>7}")
    }
}

/// Compiles the requested kernels.
pub(crate) fn compile_asked(
    root: &Path,
    arguments: &KernelArguments,
    report: &StepReport,
) -> Result<()> {
    let KernelArguments { skip_offline, late, sm } = arguments;
    let targets = if sm.is_empty() { &TARGETS[..] } else { sm };
    let compile = || {
        if *late {
            late::compile_late(root, targets, report)
        } else {
            compile_kernels(root, report)
        }
    };
    if *skip_offline { or_skip(root, report, compile) } else { compile() }
}

/// Compiles all kernels and prints what each uses.
pub(crate) fn compile_kernels(root: &Path, report: &StepReport) -> Result<()> {
    let out = output_folder(root)?;
    let nvcc = find_compiler(&out, report)?;
    for entry in fs::read_dir(&out)? {
        let path = entry?.path();
        // One whose kernels are gone would be embedded with the others.
        if path.extension().is_some_and(|extension| extension == "fatbin") {
            fs::remove_file(path)?;
        }
    }
    let sources = list_sources(&root.join("kernels"))?;
    let compiled = compile_all(&sources, |source| compile_file(&nvcc, root, source, &out));
    ensure!(compiled.len() == sources.len(), "a thread that compiled has ended early");
    let mut count = 0;
    report.print_line(HEADING);
    for usages in compiled {
        for usage in usages? {
            report.print_line(&usage.line());
            let KernelUsage { kernel, target, spill_bytes, .. } = usage;
            ensure!(spill_bytes == 0, "{kernel} spills {spill_bytes} bytes for {target}");
            count += 1;
        }
    }
    ensure!(count > 0, "nvcc named no kernel");
    report.print_line(&format!("kernels: {count} compiled, into {}", out.display()));
    Ok(())
}

/// Does what needs the compiler, but where that is not there and cannot be installed it says so and
/// why.
fn or_skip(root: &Path, report: &StepReport, compile: impl Fn() -> Result<()>) -> Result<()> {
    match output_folder(root).and_then(|out| find_compiler(&out, report)) {
        Ok(_) => compile(),
        Err(reason) => skip_step("kernels: not compiled for GPUs", &reason, report),
    }
}

/// Says which step is skipped and why; `KVD_REQUIRE_KERNELS` makes that a failure.
pub(crate) fn skip_step(what: &str, reason: &Error, report: &StepReport) -> Result<()> {
    ensure!(std::env::var_os(REQUIRE).is_none(), "{REQUIRE} is set, but: {reason:#}");
    report.print_line(&format!("SKIP {what}, because {reason:#}"));
    Ok(())
}

/// The compiler's place, and its output for the kernels.
fn output_folder(root: &Path) -> Result<PathBuf> {
    let out = root.join("target/kernels");
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    Ok(out)
}

/// Whether a kernel file has no fat binary in `out`, or something in `kernels/` is newer than it.
pub(crate) fn are_stale(root: &Path, out: &Path) -> Result<bool> {
    let kernels = root.join("kernels");
    let newest = newest_change(&kernels)?;
    for source in list_sources(&kernels)? {
        let name = source.file_stem().context("a kernel file without a name")?;
        if !is_made_after(&out.join(name).with_extension("fatbin"), newest) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_made_after(file: &Path, time: SystemTime) -> bool {
    let made = fs::metadata(file).and_then(|made| made.modified());
    made.is_ok_and(|made| made >= time)
}

/// When the latest of a folder's kernels and headers was changed.
fn newest_change(folder: &Path) -> Result<SystemTime> {
    let mut latest = SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|end| end == "cu" || end == "cuh");
        if path.is_dir() {
            latest = latest.max(newest_change(&path)?);
        } else if is_source {
            latest = latest.max(fs::metadata(&path)?.modified()?);
        }
    }
    Ok(latest)
}

/// The compiler, installed on first use.
fn find_compiler(out: &Path, report: &StepReport) -> Result<PathBuf> {
    let environment = out.join(ENVIRONMENT);
    if let Some(nvcc) = find_installed(&environment)? {
        return Ok(nvcc);
    }
    report.begin_step(&format!("pip install {WHEELS}"));
    let mut venv = Command::new("python3");
    command_output(venv.args(["-m", "venv"]).arg(&environment))?;
    let mut pip = Command::new(environment.join("bin/pip"));
    command_output(pip.args(["install", "--quiet", "--disable-pip-version-check", WHEELS]))?;
    find_installed(&environment)?.with_context(|| format!("{WHEELS} holds no {NVCC}"))
}

/// Programs of the virtual environment.
pub(crate) struct CudaTools {
    pub(crate) nvcc: PathBuf,
    pub(crate) nvdisasm: PathBuf,
}

/// Compiler and disassembler, installed on first use.
pub(crate) fn find_tools(root: &Path, report: &StepReport) -> Result<CudaTools> {
    let out = output_folder(root)?;
    let nvcc = find_compiler(&out, report)?;
    let nvdisasm = nvcc.with_file_name("nvdisasm");
    if !nvdisasm.is_file() {
        report.begin_step(&format!("pip install {DISASSEMBLER}"));
        let mut pip = Command::new(out.join(ENVIRONMENT).join("bin/pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-deps", DISASSEMBLER]);
        command_output(&mut pip)?;
        ensure!(nvdisasm.is_file(), "{DISASSEMBLER} holds no nvdisasm beside {NVCC}");
    }
    Ok(CudaTools { nvcc, nvdisasm })
}

/// The compiler in a virtual environment, whatever Python's version.
fn find_installed(environment: &Path) -> Result<Option<PathBuf>> {
    let Ok(versions) = fs::read_dir(environment.join("lib")) else {
        return Ok(None);
    };
    for version in versions {
        let nvcc = version?.path().join("site-packages").join(NVCC);
        if nvcc.is_file() {
            return Ok(Some(nvcc));
        }
    }
    Ok(None)
}

/// The files that hold kernels.
fn list_sources(kernels: &Path) -> Result<Vec<PathBuf>> {
    let mut sources = Vec::new();
    for entry in fs::read_dir(kernels).with_context(|| format!("read {}", kernels.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

/// Compiles the files, as many at once as there are processors; their results in the order of the
/// files.
fn compile_all<T: Send>(sources: &[PathBuf], compile: impl Fn(&Path) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(source) = sources.get(at) else { return done };
            done.push((at, compile(source)));
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let mut done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Compiles one file for every target into one fat binary.
fn compile_file(nvcc: &Path, root: &Path, source: &Path, out: &Path) -> Result<Vec<KernelUsage>> {
    let mut command = strict_compiler(nvcc, &TARGETS);
    command.arg("-lineinfo").arg(format!("-gencode=arch=compute_{PTX},code=compute_{PTX}"));
    command.arg("-I").arg(root.join("kernels/include"));
    compile_with(command, source, out)
}

/// The compiler, with warnings and spills as errors, for some targets.
fn strict_compiler(nvcc: &Path, targets: &[u32]) -> Command {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fatbin", "-Werror", "all-warnings"]);
    command.args(["-Xptxas", "-v,--warn-on-spills,-Werror"]);
    for target in targets {
        command.arg(format!("-gencode=arch=compute_{target},code=sm_{target}"));
    }
    command
}

/// Compiles one file into one fat binary in the folder `out`.
fn compile_with(mut command: Command, source: &Path, out: &Path) -> Result<Vec<KernelUsage>> {
    let name = source.file_stem().context("a kernel file without a name")?;
    command.arg(source).arg("-o").arg(out.join(name).with_extension("fatbin"));
    Ok(read_usages(&command_output(&mut command)?))
}

/// Runs a command; gives its output.
pub(crate) fn command_output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("start {name}"))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if !output.status.success() {
        bail!("{name} failed:\n{}", text.trim());
    }
    Ok(text)
}

/// Reads ptxas's verbose lines: a kernel's name, then its stack, then its registers.
fn read_usages(text: &str) -> Vec<KernelUsage> {
    let mut usages: Vec<KernelUsage> = Vec::new();
    for line in text.lines() {
        if line.contains("Compiling entry function") {
            let mut quoted = line.split('\'').skip(1).step_by(2).map(str::to_owned);
            let kernel = quoted.next().unwrap_or_default();
            let target = quoted.next().unwrap_or_default();
            usages.push(KernelUsage { kernel, target, ..KernelUsage::default() });
        }
        let Some(usage) = usages.last_mut() else { continue };
        for part in line.split(',') {
            let words: Vec<&str> = part.split_whitespace().collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
            if part.ends_with("bytes spill stores") || part.ends_with("bytes spill loads") {
                usage.spill_bytes += number(0).unwrap_or(0);
            } else if part.ends_with("registers") {
                usage.registers = number(words.len().saturating_sub(2)).unwrap_or(0);
            } else if part.ends_with("bytes smem") {
                usage.shared_bytes = number(0).unwrap_or(0);
            }
        }
    }
    usages
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn usage_is_read_from_what_ptxas_prints() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kvd_a' for 'sm_80'
ptxas info    : Function properties for kvd_a
    16 bytes stack frame, 28 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'kvd_b' for 'sm_90'
ptxas info    : Function properties for kvd_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
";
        let usage =
            |kernel: &str, target: &str, registers, shared_bytes, spill_bytes| KernelUsage {
                kernel: kernel.to_owned(),
                target: target.to_owned(),
                registers,
                shared_bytes,
                spill_bytes,
            };
        let wanted = [usage("kvd_a", "sm_80", 64, 128, 44), usage("kvd_b", "sm_90", 40, 0, 0)];
        assert_eq!(read_usages(text), wanted);
    }

    #[test]
    fn files_are_compiled_once_each_and_come_back_in_order() {
        let sources: Vec<PathBuf> = (0..20).map(|i| PathBuf::from(format!("{i}.cu"))).collect();
        let count = AtomicUsize::new(0);
        let compiled = compile_all(&sources, |source| {
            count.fetch_add(1, Ordering::Relaxed);
            source.to_owned()
        });
        assert_eq!((compiled, count.into_inner()), (sources, 20));
    }

    #[test]
    fn where_the_compiler_cannot_be_installed_compiling_is_skipped_only_if_that_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("target/kernels");
        fs::create_dir_all(&out).unwrap();
        // No virtual environment can be made there.
        fs::write(out.join("nvcc-13.0.3"), "a file").unwrap();
        assert!(compile_kernels(root.path(), &StepReport).is_err());
        if std::env::var_os(REQUIRE).is_none() {
            for late in [false, true] {
                let asked_for = KernelArguments { skip_offline: true, late, sm: Vec::new() };
                compile_asked(root.path(), &asked_for, &StepReport).unwrap();
            }
        }
    }

    #[test]
    fn fat_binaries_older_than_a_header_or_missing_are_stale() {
        let root = tempfile::tempdir().unwrap();
        let (kernels, out) = (root.path().join("kernels"), root.path().join("out"));
        fs::create_dir_all(kernels.join("include/deep")).unwrap();
        fs::create_dir_all(&out).unwrap();
        let at = |path: &Path, seconds: u64| {
            let file = fs::File::create(path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        };
        let stale = || are_stale(root.path(), &out).unwrap();
        at(&kernels.join("a.cu"), 100);
        at(&kernels.join("include/deep/b.cuh"), 100);
        assert!(stale(), "there is none");
        at(&out.join("a.fatbin"), 200);
        at(&kernels.join("a.txt"), 300);
        assert!(!stale(), "what is newer is no source");
        at(&kernels.join("include/deep/b.cuh"), 300);
        assert!(stale());
        at(&out.join("a.fatbin"), 400);
        at(&kernels.join("c.cu"), 100);
        assert!(stale(), "one has none");
    }

    #[test]
    fn a_compiler_that_is_not_there_is_not_found() {
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(find_installed(empty.path()).unwrap(), None);
        let nvcc = empty.path().join("lib/python3.99/site-packages").join(NVCC);
        fs::create_dir_all(nvcc.parent().unwrap()).unwrap();
        fs::write(&nvcc, "").unwrap();
        assert_eq!(find_installed(empty.path()).unwrap(), Some(nvcc));
    }
}
