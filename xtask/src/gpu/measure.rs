//! Runs what the folder holds, step by step; a step that fails does not end the others.

use super::write;
use crate::report::Report;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Bytes of a step's output that the report keeps.
const TAIL_BYTES: usize = 2000;

/// One step of the report.
pub(super) struct Done {
    pub(super) name: &'static str,
    /// `passed`, `failed`, or `skipped because …`.
    pub(super) outcome: String,
    pub(super) seconds: f64,
    pub(super) output: String,
}

/// Runs everything; where there is no GPU it says so, which `KVD_REQUIRE_GPU=1` makes a failure.
pub(super) fn run(folder: &Path, smi: &str, report: &Report) -> Result<()> {
    let device = match device(smi) {
        Ok(device) => device,
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_GPU").is_some();
            ensure!(!required, "KVD_REQUIRE_GPU is set, but: {reason:#}");
            report.line(&format!("no GPU: skipped because {reason:#}"));
            return Ok(());
        }
    };
    report.step(&device);
    let conformance = || {
        let mut command = Command::new(folder.join("conformance"));
        command.env("KVD_REQUIRE_GPU", "1").env("KVD_GPU_WORKER", folder.join("worker.py"));
        command.arg("--nocapture");
        command
    };
    let mut sanitizer = Command::new("compute-sanitizer");
    sanitizer.args(["--error-exitcode", "1"]).arg(folder.join("conformance"));
    sanitizer.env("KVD_REQUIRE_GPU", "1").args(["--test-threads", "1", "--skip", "worker"]);
    let mut ipc = conformance();
    ipc.arg("worker");
    let mut bench = Command::new("python3");
    bench.arg(folder.join("bench.py")).arg(folder.join("fixtures"));
    bench.arg("--fatbins").arg(folder.join("fatbins"));
    let steps = [
        ("conformance", conformance()),
        ("memory of another process", ipc),
        ("compute-sanitizer memcheck", sanitizer),
        ("benchmark", bench),
    ];
    let mut done = Vec::new();
    for (name, mut command) in steps {
        report.step(name);
        let step = step(name, &mut command);
        report.line(&step.outcome);
        done.push(step);
    }
    let bench = done.last().and_then(|step| serde_json::from_str(&step.output).ok());
    let bench: Value = bench.unwrap_or(Value::Null);
    let date = text(Command::new("date").args(["-u", "+%F"]))?;
    let name: String = device.split(',').next().unwrap_or("gpu").trim().to_lowercase();
    let name: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
    let out = folder.join("report");
    fs::create_dir_all(&out)?;
    let markdown = out.join(format!("{name}-{date}.md"));
    fs::write(&markdown, write::markdown(&device, &date, &done, &bench))?;
    let steps: Vec<Value> = done.iter().map(Done::json).collect();
    let all = json!({ "device": device, "date": date, "steps": steps, "benchmark": bench });
    fs::write(markdown.with_extension("json"), serde_json::to_string_pretty(&all)?)?;
    report.line(&format!("report: {} (belongs into docs/perf/gpu)", markdown.display()));
    let failed = done.iter().filter(|step| step.outcome == "failed").count();
    ensure!(failed == 0, "{failed} steps failed");
    Ok(())
}

impl Done {
    /// Without the benchmark's output, which the report holds apart.
    fn json(&self) -> Value {
        let start = self.output.len().saturating_sub(TAIL_BYTES);
        let tail: String = self.output.chars().skip(start).collect();
        let Self { name, outcome, seconds, .. } = self;
        json!({ "name": name, "outcome": outcome, "seconds": seconds, "output": tail })
    }
}

/// Name and driver of the first GPU.
fn device(smi: &str) -> Result<String> {
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let lines = text(Command::new(smi).args(query))?;
    lines.lines().next().map(str::to_owned).context("nvidia-smi lists no GPU")
}

/// What a command prints, trimmed.
fn text(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{name} does not start"))?;
    ensure!(output.status.success(), "{name} fails: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs one step; a program that is not there is skipped.
fn step(name: &'static str, command: &mut Command) -> Done {
    let start = Instant::now();
    let (outcome, output) = match command.output() {
        Err(error) => {
            let program = command.get_program().to_string_lossy().into_owned();
            (format!("skipped because {program} does not start: {error}"), String::new())
        }
        Ok(output) => {
            let passed = output.status.success();
            let errors = if passed { &[][..] } else { &output.stderr };
            let all = [&output.stdout[..], errors].concat();
            let outcome = if passed { "passed" } else { "failed" };
            (outcome.to_owned(), String::from_utf8_lossy(&all).into_owned())
        }
    };
    Done { name, outcome, seconds: start.elapsed().as_secs_f64(), output }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_skipped_with_the_reason() {
        let reason = device("no-such-program").unwrap_err();
        assert!(format!("{reason:#}").starts_with("no-such-program does not start"), "{reason:#}");
        let folder = tempfile::tempdir().unwrap();
        if std::env::var_os("KVD_REQUIRE_GPU").is_none() {
            run(folder.path(), "no-such-program", &Report).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "no report");
    }

    #[test]
    fn steps_pass_fail_or_are_skipped() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            step("a", &mut command)
        };
        let passed = shell("echo out; echo err >&2");
        assert_eq!((passed.outcome.as_str(), passed.output.as_str()), ("passed", "out\n"));
        let failed = shell("echo out; echo err >&2; exit 3");
        assert_eq!((failed.outcome.as_str(), failed.output.as_str()), ("failed", "out\nerr\n"));
        let skipped = step("a", &mut Command::new("no-such-program")).outcome;
        assert!(skipped.starts_with("skipped because no-such-program"), "{skipped}");
    }

    #[test]
    fn a_gpu_gets_a_report_of_every_step() {
        let folder = tempfile::tempdir().unwrap();
        let smi = folder.path().join("smi");
        fs::write(&smi, "#!/bin/sh\necho 'Test GPU, 580.1'\n").unwrap();
        let mut chmod = Command::new("chmod");
        assert!(chmod.arg("+x").arg(&smi).status().unwrap().success());
        // Nothing is there to run, but python3, which finds no script.
        let _ = run(folder.path(), smi.to_str().unwrap(), &Report);
        let date = text(Command::new("date").args(["-u", "+%F"])).unwrap();
        let report = folder.path().join("report").join(format!("test-gpu-{date}.json"));
        let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
        assert_eq!(report["device"], "Test GPU, 580.1");
        assert_eq!(report["steps"].as_array().unwrap().len(), 4);
        assert!(report["steps"][0]["outcome"].as_str().unwrap().starts_with("skipped because"));
        assert_eq!(report["benchmark"], Value::Null);
    }
}
