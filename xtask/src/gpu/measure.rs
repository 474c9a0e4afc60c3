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

/// What compute-sanitizer looks for.
const SANITIZERS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];
/// Tests of memory that another process shares.
const OTHER_PROCESS: &str = "memory of another process";
/// The packed daemon, asked by a client.
const DAEMON: &str = "daemon";
/// What a sanitizer says of a GPU that it does not know.
const REFUSALS: [&str; 2] = ["device not supported", "device is not supported"];
/// What the benchmark writes.
const FIGURES: &str = "figures.json";

/// One step of the report.
pub(super) struct Done {
    pub(super) name: String,
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
    let mut done = Vec::new();
    for (name, mut command) in steps(folder) {
        report.step(&name);
        let step = step(name, &mut command);
        report.line(&step.outcome);
        done.push(step);
    }
    // It is there too when a row of it is wrong.
    let bench = fs::read(folder.join(FIGURES)).ok();
    let bench = bench.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or(Value::Null);
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

/// Every step's name and command, the benchmark last.
fn steps(folder: &Path) -> Vec<(String, Command)> {
    // A filter with which tests of other processes are all that runs, or all that does not.
    let halves = [("conformance", &["--skip", "worker"][..]), (OTHER_PROCESS, &["worker"])];
    let tests = |program: &mut Command, filter: &[&str]| {
        program.env("KVD_REQUIRE_GPU", "1").env("KVD_GPU_WORKER", folder.join("worker.py"));
        program.args(["--test-threads", "1", "--nocapture"]).args(filter);
    };
    let mut steps = Vec::new();
    for (name, filter) in halves {
        let mut command = Command::new(folder.join("conformance"));
        tests(&mut command, filter);
        steps.push((name.to_owned(), command));
    }
    for tool in SANITIZERS {
        for (name, filter) in halves {
            let mut command = Command::new("compute-sanitizer");
            // The worker is a program of Python, which launches no kernel.
            command.args(["--tool", tool, "--target-processes", "application-only"]);
            command.args(["--error-exitcode", "1"]).arg(folder.join("conformance"));
            tests(&mut command, filter);
            steps.push((format!("compute-sanitizer {tool}, {name}"), command));
        }
    }
    let mut daemon = Command::new(folder.join("on_device"));
    tests(&mut daemon, &[]);
    daemon.env("KVD_GPU_DAEMON", folder.join("kvd"));
    steps.push((DAEMON.to_owned(), daemon));
    let mut bench = Command::new("python3");
    bench.arg(folder.join("bench.py")).arg(folder.join("fixtures"));
    bench.arg("--fatbins").arg(folder.join("fatbins")).arg("--out").arg(folder.join(FIGURES));
    steps.push(("benchmark".to_owned(), bench));
    steps
}

impl Done {
    fn json(&self) -> Value {
        let start = self.output.len().saturating_sub(TAIL_BYTES);
        let start = (start..).find(|at| self.output.is_char_boundary(*at)).unwrap_or(0);
        let tail = &self.output[start..];
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
fn step(name: String, command: &mut Command) -> Done {
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
            let output = String::from_utf8_lossy(&all).into_owned();
            let outcome = match (passed, refusal(&output)) {
                (true, _) => "passed".to_owned(),
                (false, Some(reason)) => format!("skipped because of the sanitizer's {reason:?}"),
                (false, None) => "failed".to_owned(),
            };
            (outcome, output)
        }
    };
    Done { name, outcome, seconds: start.elapsed().as_secs_f64(), output }
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
            step("a".to_owned(), &mut command)
        };
        let passed = shell("echo out; echo err >&2");
        assert_eq!((passed.outcome.as_str(), passed.output.as_str()), ("passed", "out\n"));
        let failed = shell("echo out; echo err >&2; exit 3");
        assert_eq!((failed.outcome.as_str(), failed.output.as_str()), ("failed", "out\nerr\n"));
        let skipped = step("a".to_owned(), &mut Command::new("no-such-program")).outcome;
        assert!(skipped.starts_with("skipped because no-such-program"), "{skipped}");
    }

    #[test]
    fn a_sanitizer_that_refuses_the_gpu_is_skipped_and_one_that_finds_something_is_not() {
        let of = |lines: &str, status: u32| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("printf '{lines}'; exit {status}")]);
            step("a".to_owned(), &mut command).outcome
        };
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

    #[test]
    fn a_gpu_gets_a_report_of_every_step() {
        let folder = tempfile::tempdir().unwrap();
        let smi = folder.path().join("smi");
        fs::write(&smi, "#!/bin/sh\necho 'Test GPU, 580.1'\n").unwrap();
        let mut chmod = Command::new("chmod");
        assert!(chmod.arg("+x").arg(&smi).status().unwrap().success());
        // A benchmark that fails with figures: a row of it is wrong. Nothing else is there to run.
        let script = "import sys; open(sys.argv[-1], 'w').write('{\"group\": 4}'); sys.exit('off')";
        fs::write(folder.path().join("bench.py"), script).unwrap();
        let error = run(folder.path(), smi.to_str().unwrap(), &Report).unwrap_err();
        assert_eq!(error.to_string(), "1 steps failed");
        let date = text(Command::new("date").args(["-u", "+%F"])).unwrap();
        let report = folder.path().join("report").join(format!("test-gpu-{date}.json"));
        let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
        assert_eq!(report["device"], "Test GPU, 580.1");
        let steps = report["steps"].as_array().unwrap();
        assert!(steps[0]["outcome"].as_str().unwrap().starts_with("skipped because"));
        assert_eq!(steps.last().unwrap()["output"], "off\n");
        assert_eq!(report["benchmark"], json!({ "group": 4 }));
    }

    #[test]
    fn every_sanitizer_runs_every_test_and_the_benchmark_comes_last() {
        let steps = steps(Path::new("f"));
        let of_tool = |tool: &str, filter: &[&str]| {
            let of_step = |(_, command): &&(String, Command)| {
                let arguments: Vec<_> =
                    command.get_args().map(|arg| arg.to_string_lossy()).collect();
                arguments.iter().any(|arg| arg == tool)
                    && arguments
                        .ends_with(&filter.iter().map(|arg| (*arg).into()).collect::<Vec<_>>())
            };
            steps.iter().filter(of_step).count()
        };
        for tool in SANITIZERS {
            let halves =
                [of_tool(tool, &["--skip", "worker"]), of_tool(tool, &["--nocapture", "worker"])];
            assert_eq!(halves, [1, 1], "{tool}");
        }
        assert_eq!(steps.len(), 2 + 2 * SANITIZERS.len() + 2);
        let last = steps.last_chunk().unwrap().each_ref().map(|(name, _)| name.as_str());
        assert_eq!(last, [DAEMON, "benchmark"]);
    }
}
