//! Runs what the folder holds, step by step; a step that fails or hangs does not end the others,
//! and after each the report is whole.

use super::kept::{KeptReport, RunSubject, StepOutcome};
use super::limited::{self, ProcessEnd};
use super::steps::{self, RunStep};
use super::{PACK, RunArguments};
use crate::report::StepReport;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a GPU may take to say its name.
const SMI_LIMIT: Duration = Duration::from_secs(60);
/// The driver's numbers are then those of `nvidia-smi`, on machines with several GPUs too.
const ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
/// Tells a step its limit: what it waits for is waited for that long, and no less.
const STEP_SECONDS: &str = "KVD_GPU_STEP_SECONDS";
/// Messages of a sanitizer that does not know the GPU.
const REFUSALS: [&str; 2] = ["device not supported", "device is not supported"];

/// Runs the steps that are asked for; where there is no GPU it says so, which `KVD_REQUIRE_GPU=1`
/// makes a failure.
pub(super) fn run(
    folder: &Path,
    smi: &str,
    asked: &RunArguments,
    report: &StepReport,
) -> Result<()> {
    let begun = Instant::now();
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let device = match device(smi, visible.as_deref()) {
        Ok(device) => device,
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_GPU").is_some();
            ensure!(!required, "KVD_REQUIRE_GPU is set, but: {reason:#}");
            report.print_line(&format!("no GPU: skipped because {reason:#}"));
            return Ok(());
        }
    };
    report.begin_step(&device);
    let out = asked.out.clone().unwrap_or_else(|| folder.join("report"));
    let pack = fs::read(folder.join(PACK)).ok();
    let pack: Value =
        pack.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let date = text(Command::new("date").args(["-u", "+%F"]), SMI_LIMIT)?;
    let of = RunSubject { device, date, pack };
    let other = of.mismatch();
    if let Some(reason) = &other {
        report.print_line(&format!("warning: {reason}"));
    }
    let steps = steps::list_steps(folder, |file| of.figures(&out, file));
    let names: Vec<_> = steps.iter().map(|step| step.name.as_str()).collect();
    let mut kept = KeptReport::open(&out, of, &names)?;
    let has_ended =
        |step: &RunStep| kept.steps.iter().any(|done| done.name == step.name && done.has_ended());
    let chosen = steps::choose_steps(&steps, &asked.only, has_ended)?;
    kept.save()?;
    let (mut bad, mut left) = (Vec::new(), Vec::new());
    let asked_for = steps.into_iter().enumerate().zip(chosen).filter(|(_, chosen)| *chosen);
    for ((index, mut step), _) in asked_for {
        let limit = asked.limit.map_or(step.limit, Duration::from_secs);
        if begun.elapsed() + limit > Duration::from_secs(asked.within) {
            left.push(step.key);
            continue;
        }
        report.begin_step(&format!("{}, {} s at most", step.name, limit.as_secs()));
        let done = match &other {
            Some(reason) if step.is_planned() => refuse_step(&mut kept, index, &step, reason)?,
            _ => run_step(&mut kept, index, &mut step, limit)?,
        };
        report.print_line(&format!("{}, {:.1} s", done.outcome, done.seconds));
        if done.is_bad() {
            bad.push(step.key);
        }
    }
    report
        .print_line(&format!("report: {} (belongs into docs/perf/gpu)", kept.path("md").display()));
    if !left.is_empty() {
        let (left, within) = (left.join(","), asked.within);
        report.print_line(&format!("not begun, as {within} s were too few: --only {left}"));
    }
    ensure!(bad.is_empty(), "{} steps failed: {}", bad.len(), bad.join(","));
    Ok(())
}

/// Runs one step, and has the report say so before and after.
fn run_step(
    kept: &mut KeptReport,
    index: usize,
    step: &mut RunStep,
    limit: Duration,
) -> Result<StepOutcome> {
    kept.steps[index] = StepOutcome::begun(&step.name);
    if let Some(file) = step.writes {
        kept.forget(file)?;
    }
    kept.save()?;
    step.command.env(ORDER.0, ORDER.1).env(STEP_SECONDS, limit.as_secs().to_string());
    let done = attempt(&step.name, &mut step.command, limit, &kept.path("log"));
    kept.steps[index] = done.clone();
    // They are there too when a row of them is wrong, or time was too short for all.
    kept.read_figures();
    kept.save()?;
    Ok(done)
}

/// Has a step fail that would measure another GPU's plans, with nothing of it in the report.
fn refuse_step(
    kept: &mut KeptReport,
    index: usize,
    step: &RunStep,
    reason: &str,
) -> Result<StepOutcome> {
    if let Some(file) = step.writes {
        kept.forget(file)?;
    }
    let done = StepOutcome::new(&step.name, format!("failed: {reason}"), 0.0, "");
    kept.steps[index] = done.clone();
    kept.save()?;
    Ok(done)
}

/// Runs a command; a program that is not there is skipped.
fn attempt(name: &str, command: &mut Command, limit: Duration, log: &Path) -> StepOutcome {
    let begun = Instant::now();
    let named = OpenOptions::new().create(true).append(true).open(log);
    let named = named.and_then(|mut log| writeln!(log, "== {name}"));
    let ended = named.and_then(|()| limited::run_limited(command, limit, log));
    let (outcome, output) = match ended {
        Err(error) => {
            let program = command.get_program().to_string_lossy().into_owned();
            (format!("skipped because {program} does not start: {error}"), String::new())
        }
        Ok((ProcessEnd::By(status), output)) => {
            let outcome = match (status.success(), refusal(&output), status.signal()) {
                (true, ..) => "passed".to_owned(),
                (_, Some(reason), _) => format!("skipped because of the sanitizer's {reason:?}"),
                (.., Some(signal)) => format!("failed by signal {signal}"),
                _ => "failed".to_owned(),
            };
            (outcome, output)
        }
        Ok((ended, output)) => {
            let stays =
                if matches!(ended, ProcessEnd::Stays) { ", but it does not end" } else { "" };
            (format!("stopped after its {} s{stays}", limit.as_secs_f64()), output)
        }
    };
    StepOutcome::new(name, outcome, begun.elapsed().as_secs_f64(), &output)
}

/// Name and driver of the GPU that is the driver's first.
fn device(smi: &str, visible: Option<&str>) -> Result<String> {
    let mut query = Command::new(smi);
    query.args(["--query-gpu=name,driver_version", "--format=csv,noheader"]);
    if let Some(first) = visible.and_then(first_visible) {
        query.arg(format!("--id={first}"));
    }
    let lines = text(&mut query, SMI_LIMIT)?;
    lines.lines().next().map(str::to_owned).context("nvidia-smi lists no GPU")
}

/// The first of `CUDA_VISIBLE_DEVICES`, where `nvidia-smi` can be asked for it: it has no line for
/// an instance of a divided GPU.
fn first_visible(visible: &str) -> Option<&str> {
    let first = visible.split(',').next()?.trim();
    let is_number = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
    (is_number || first.starts_with("GPU-")).then_some(first)
}

/// A command's output, trimmed.
fn text(command: &mut Command, limit: Duration) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let log = tempfile::NamedTempFile::new()?;
    let ended = limited::run_limited(command, limit, log.path());
    let (ended, output) = ended.with_context(|| format!("{name} does not start"))?;
    match ended {
        ProcessEnd::By(status) if status.success() => Ok(output.trim().to_owned()),
        ProcessEnd::By(_) => bail!("{name} fails: {}", output.trim()),
        ProcessEnd::Killed | ProcessEnd::Stays => {
            bail!("{name} does not answer in {} s", limit.as_secs())
        }
    }
}

/// The line in which a sanitizer refuses the GPU; none where what it ran failed by itself.
fn refusal(output: &str) -> Option<&str> {
    let found = |line: &str| {
        let errors = line.split_once("ERROR SUMMARY: ").map(|(_, count)| count);
        line.contains("test result: FAILED") || errors.is_some_and(|count| !count.starts_with("0 "))
    };
    if output.lines().any(found) {
        return None;
    }
    let own = output.lines().filter_map(|line| line.strip_prefix("========="));
    own.map(str::trim).find(|line| {
        let line = line.to_lowercase();
        REFUSALS.iter().any(|refusal| line.contains(refusal))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::PathBuf;

    const ASKED: RunArguments =
        RunArguments { only: Vec::new(), out: None, limit: None, within: 570 };

    fn attempted(command: &mut Command, limit: Duration) -> StepOutcome {
        let folder = tempfile::tempdir().unwrap();
        attempt("a", command, limit, &folder.path().join("log"))
    }

    fn shell(script: &str) -> StepOutcome {
        attempted(Command::new("sh").args(["-c", script]), Duration::from_secs(30))
    }

    #[test]
    fn a_machine_without_a_gpu_is_skipped_with_the_reason() {
        let reason = device("no-such-program", None).unwrap_err();
        assert!(format!("{reason:#}").starts_with("no-such-program does not start"), "{reason:#}");
        let folder = tempfile::tempdir().unwrap();
        if std::env::var_os("KVD_REQUIRE_GPU").is_none() {
            run(folder.path(), "no-such-program", &ASKED, &StepReport).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "no report");
        let slow = text(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap_err();
        assert_eq!(slow.to_string(), "sleep does not answer in 0 s");
    }

    #[test]
    fn steps_pass_fail_are_stopped_or_skipped() {
        let passed = shell("echo out; echo err >&2");
        assert_eq!((passed.outcome.as_str(), passed.output.as_str()), ("passed", "out\nerr\n"));
        let failed = shell("echo out; echo err >&2; exit 3");
        assert_eq!((failed.outcome.as_str(), failed.output.as_str()), ("failed", "out\nerr\n"));
        assert_eq!(shell("kill -9 $$").outcome, "failed by signal 9");
        let mut sleeps = Command::new("sh");
        sleeps.args(["-c", "echo out; sleep 60"]);
        let stopped = attempted(&mut sleeps, Duration::from_millis(500));
        assert_eq!(
            (stopped.outcome.as_str(), &*stopped.output),
            ("stopped after its 0.5 s", "out\n")
        );
        assert!(stopped.seconds < 30.0 && stopped.is_bad());
        let skipped = attempted(&mut Command::new("no-such-program"), Duration::ZERO).outcome;
        assert!(skipped.starts_with("skipped because no-such-program"), "{skipped}");
    }

    #[test]
    fn a_sanitizer_that_refuses_the_gpu_is_skipped_and_one_that_finds_something_is_not() {
        let of =
            |lines: &str, status: u32| shell(&format!("printf '{lines}'; exit {status}")).outcome;
        let refused = "========= Error: Device not supported. See the list of devices\\n";
        let outcome = of(&format!("========= COMPUTE-SANITIZER\\n{refused}"), 1);
        let reason = "Error: Device not supported. See the list of devices";
        assert_eq!(outcome, format!("skipped because of the sanitizer's {reason:?}"));
        assert_eq!(of(refused, 0), "passed");
        assert_eq!(of("Device not supported\\n", 1), "failed", "said by what it ran");
        for found in ["test result: FAILED. 1 passed", "========= ERROR SUMMARY: 1 error"] {
            assert_eq!(of(&format!("{refused}{found}\\n"), 1), "failed");
        }
    }

    fn program(path: PathBuf, script: &str) {
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        assert!(Command::new("chmod").arg("+x").arg(path).status().unwrap().success());
    }

    #[test]
    fn the_gpu_is_the_one_that_steps_are_run_on() {
        let folder = tempfile::tempdir().unwrap();
        let smi = folder.path().join("smi");
        program(smi.clone(), "echo \"$@\"");
        let smi = smi.to_str().unwrap();
        let of = |visible: Option<&str>| device(smi, visible).unwrap();
        let query = "--query-gpu=name,driver_version --format=csv,noheader";
        for first in ["1", "GPU-8f"] {
            let visible = format!("{first},0");
            assert_eq!(of(Some(&visible)), format!("{query} --id={first}"));
        }
        for visible in [None, Some(""), Some("MIG-8f")] {
            assert_eq!(of(visible), query);
        }
    }

    /// A folder with a GPU's name and a benchmark that fails with figures: a row is wrong.
    fn packed() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        program(folder.path().join("smi"), "echo 'Test GPU, 580.1'");
        let script = "import sys; open(sys.argv[-1], 'w').write('{\"group\": 4}'); sys.exit('off')";
        fs::write(folder.path().join("bench.py"), script).unwrap();
        let smi = folder.path().join("smi").to_str().unwrap().to_owned();
        (folder, smi)
    }

    /// The file of the folder's one report with this ending. Steps write JSON beside it, and the
    /// day may change during a test: the report is the one whose text stands there too.
    fn read_report(out: &Path, end: &str) -> String {
        let paths = fs::read_dir(out).unwrap().map(|file| file.unwrap().path());
        let mut texts = paths.filter(|path| path.extension().is_some_and(|end| end == "md"));
        let text = texts.next().unwrap();
        assert_eq!(texts.next(), None, "one report");
        fs::read_to_string(text.with_extension(end)).unwrap()
    }

    fn read(out: &Path) -> (Value, String) {
        (serde_json::from_str(&read_report(out, "json")).unwrap(), read_report(out, "md"))
    }

    fn outcomes(report: &Value) -> Vec<&str> {
        let steps = report["steps"].as_array().unwrap().iter();
        steps.map(|step| step["outcome"].as_str().unwrap()).collect()
    }

    #[test]
    fn a_gpu_gets_a_report_of_every_step() {
        let (folder, smi) = packed();
        let error = run(folder.path(), &smi, &ASKED, &StepReport).unwrap_err();
        // It is of the same script.
        assert_eq!(error.to_string(), "2 steps failed: benchmark,shapes");
        let (report, _) = read(&folder.path().join("report"));
        assert_eq!(report["device"], "Test GPU, 580.1");
        let outcomes = outcomes(&report);
        assert!(outcomes[0].starts_with("skipped because"), "{outcomes:?}");
        assert_eq!((outcomes[1], &report["steps"][1]["output"]), ("failed", &json!("off\n")));
        assert!(outcomes[3..].iter().all(|outcome| outcome.starts_with("skipped because")));
        assert_eq!(report["benchmark"], json!({ "group": 4 }));
    }

    #[test]
    fn plans_of_another_gpu_are_not_launched() {
        let (folder, smi) = packed();
        let pack = |device: &str| {
            let facts = json!({ "commit": "1", "device": device, "packed": 1 }).to_string();
            fs::write(folder.path().join(PACK), facts).unwrap();
        };
        program(folder.path().join("conformance"), "echo ran");
        program(folder.path().join("smi"), "echo 'NVIDIA H100 80GB HBM3, 580.1'");
        pack("h200");
        let only = ["conformance", "benchmark", "shapes"].map(str::to_owned).into();
        let only = RunArguments { only, ..ASKED };
        let error = run(folder.path(), &smi, &only, &StepReport).unwrap_err();
        assert_eq!(error.to_string(), "2 steps failed: benchmark,shapes");
        let found = |end: &str| read_report(&folder.path().join("report"), end);
        let report: Value = serde_json::from_str(&found("json")).unwrap();
        let outcomes_of = outcomes(&report);
        assert_eq!(outcomes_of[0], "passed");
        for outcome in &outcomes_of[1..3] {
            assert!(outcome.contains("cargo xtask gpu pack --device h100"), "{outcomes_of:?}");
        }
        assert_eq!([&report["benchmark"], &report["shapes"]], [&Value::Null; 2]);
        assert!(found("md").contains("is NVIDIA H100 80GB HBM3"), "{}", found("md"));
        // With the GPU's own plans it is measured.
        pack("h100");
        let error = run(folder.path(), &smi, &only, &StepReport).unwrap_err();
        assert_eq!(error.to_string(), "2 steps failed: benchmark,shapes");
        let report: Value = serde_json::from_str(&found("json")).unwrap();
        assert_eq!((outcomes(&report)[1], &report["benchmark"]["group"]), ("failed", &json!(4)));
    }

    #[test]
    fn a_hang_loses_nothing_and_a_later_run_goes_on() {
        let (folder, smi) = packed();
        let out = folder.path().join("out");
        // If the machine is taken during the first step, this report is left.
        let copy = format!("cp {0}/test-gpu-*.json {0}/then.json; sleep 60", out.display());
        program(folder.path().join("conformance"), &copy);
        let first = RunArguments {
            only: ["conformance", "benchmark"].map(str::to_owned).into(),
            out: Some(out.clone()),
            limit: Some(2),
            ..ASKED
        };
        let error = run(folder.path(), &smi, &first, &StepReport).unwrap_err();
        assert_eq!(error.to_string(), "2 steps failed: conformance,benchmark");
        let then: Value =
            serde_json::from_slice(&fs::read(out.join("then.json")).unwrap()).unwrap();
        assert_eq!(outcomes(&then)[..2], ["begun, not ended", "not run yet"]);
        let (report, _) = read(&out);
        assert_eq!(outcomes(&report)[..3], ["stopped after its 2 s", "failed", "not run yet"]);
        program(folder.path().join("on_device"), "echo served within $KVD_GPU_STEP_SECONDS");
        let none = RunArguments { only: vec!["rest".to_owned()], within: 1, ..first.clone() };
        run(folder.path(), &smi, &none, &StepReport).unwrap();
        assert_eq!(read(&out).0, report, "no step fits into a second");
        let error = run(folder.path(), &smi, &RunArguments { within: 570, ..none }, &StepReport)
            .unwrap_err();
        assert_eq!(error.to_string(), "2 steps failed: shapes,ipc");
        let (report, markdown) = read(&out);
        let outcomes = outcomes(&report);
        assert_eq!(outcomes[..4], ["stopped after its 2 s", "failed", "failed", "passed"]);
        assert!(outcomes[4..].iter().all(|outcome| *outcome != "not run yet"), "{outcomes:?}");
        assert_eq!(report["benchmark"], json!({ "group": 4 }));
        assert!(markdown.contains("| daemon | passed |"), "{markdown}");
        let log = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        let log = log.filter(|path| path.extension().is_some_and(|end| end == "log"));
        let log = fs::read_to_string(log.last().unwrap()).unwrap();
        assert!(
            log.contains("== benchmark\noff\n== other shapes\noff\n== daemon\nserved within 2\n"),
            "{log}"
        );
    }
}
