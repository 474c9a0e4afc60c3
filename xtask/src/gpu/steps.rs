//! The steps of a run: what each is called, what it runs and how long it may take.

use super::{DAEMON_STORES, FIGURES, SHAPES};
use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Tools of compute-sanitizer.
const SANITIZERS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];
/// All of them, for `--only`.
const ALL_SANITIZERS: &str = "sanitizers";
/// Value of `--only` for the steps without an outcome in the report of `--out`.
const REST: &str = "rest";
/// The first five fit into one command of ten minutes together.
const CONFORMANCE_LIMIT: Duration = Duration::from_secs(140);
const BENCHMARK_LIMIT: Duration = Duration::from_secs(180);
const SHAPES_LIMIT: Duration = Duration::from_secs(70);
const DAEMON_LIMIT: Duration = Duration::from_secs(100);
const IPC_LIMIT: Duration = Duration::from_secs(70);
const SANITIZER_LIMIT: Duration = Duration::from_secs(280);
/// No codec is begun after this in a sanitizer's step: the rest of its limit is for the last one,
/// and for what starts before the first and runs behind it.
const SANITIZER_BEGINS: Duration = Duration::from_secs(120);

/// One step.
pub(super) struct RunStep {
    /// Name for `--only`.
    pub(super) key: String,
    /// Name in the report.
    pub(super) name: String,
    pub(super) limit: Duration,
    pub(super) command: Command,
    /// The file that it writes into the report's folder, if it does.
    pub(super) writes: Option<&'static str>,
}

impl RunStep {
    /// Whether it launches what was planned for one GPU: shared memory that another may not have,
    /// and figures of that plan in the report.
    pub(super) fn is_planned(&self) -> bool {
        [Some(FIGURES), Some(SHAPES)].contains(&self.writes)
    }
}

/// Every step: what says most first, as a run may end before the last. `figures` says where a file
/// of figures is written.
pub(super) fn list_steps(folder: &Path, figures: impl Fn(&str) -> PathBuf) -> Vec<RunStep> {
    // A filter with which tests of other processes are all that runs, or all that does not.
    let halves = [
        ("conformance", "conformance", &["--skip", "worker"][..], CONFORMANCE_LIMIT),
        ("ipc", "memory of another process", &["worker"], IPC_LIMIT),
    ];
    let tests = |program: &mut Command, filter: &[&str]| {
        program.env("KVD_REQUIRE_GPU", "1").env("KVD_GPU_WORKER", folder.join("worker.py"));
        program.args(["--test-threads", "1", "--nocapture"]).args(filter);
    };
    let step = |key: &str, name: &str, limit, command| RunStep {
        key: key.to_owned(),
        name: name.to_owned(),
        limit,
        command,
        writes: None,
    };
    let [conformance, ipc] = halves.map(|(key, name, filter, limit)| {
        let mut command = Command::new(folder.join("conformance"));
        tests(&mut command, filter);
        step(key, name, limit, command)
    });
    let [bench, shapes] = [FIGURES, SHAPES].map(|file| {
        let mut command = Command::new("python3");
        command.arg(folder.join("bench.py")).arg(folder.join("fixtures"));
        command.args((file == SHAPES).then_some("--checks"));
        command.arg("--fatbins").arg(folder.join("fatbins")).arg("--out").arg(figures(file));
        command
    });
    let bench = step("benchmark", "benchmark", BENCHMARK_LIMIT, bench);
    let shapes = step("shapes", "other shapes", SHAPES_LIMIT, shapes);
    let mut daemon = Command::new(folder.join("on_device"));
    tests(&mut daemon, &[]);
    daemon.env("KVD_GPU_DAEMON", folder.join("kvd"));
    daemon.env("KVD_GPU_STORES", figures(DAEMON_STORES));
    let daemon = step("daemon", "daemon", DAEMON_LIMIT, daemon);
    let bench = RunStep { writes: Some(FIGURES), ..bench };
    let shapes = RunStep { writes: Some(SHAPES), ..shapes };
    let daemon = RunStep { writes: Some(DAEMON_STORES), ..daemon };
    let mut steps = vec![conformance, bench, shapes, daemon, ipc];
    for tool in SANITIZERS {
        for (half, name, filter, _) in halves {
            let mut command = Command::new("compute-sanitizer");
            // The worker is a program of Python, which launches no kernel.
            command.args(["--tool", tool, "--target-processes", "application-only"]);
            command.args(["--error-exitcode", "1"]).arg(folder.join("conformance"));
            tests(&mut command, filter);
            // A kernel may take a hundred times as long so; what hangs is ended with its step.
            command.env("KVD_GPU_KERNEL_SECONDS", SANITIZER_LIMIT.as_secs().to_string());
            // At that time the script reports what it has, and the step ends by itself.
            command.env("KVD_GPU_SECONDS", SANITIZER_BEGINS.as_secs().to_string());
            let key = if half == "ipc" { format!("{tool}-{half}") } else { tool.to_owned() };
            let name = format!("compute-sanitizer {tool}, {name}");
            steps.push(step(&key, &name, SANITIZER_LIMIT, command));
        }
    }
    steps
}

/// Whether each step is one of `only`, where nothing means every one; `ended` says which have an
/// outcome.
pub(super) fn choose_steps(
    steps: &[RunStep],
    only: &[String],
    ended: impl Fn(&RunStep) -> bool,
) -> Result<Vec<bool>> {
    let is_sanitizer = |step: &RunStep| step.name.starts_with("compute-sanitizer");
    for word in only {
        let known = steps.iter().map(|step| step.key.as_str()).chain([ALL_SANITIZERS, REST]);
        let known: Vec<_> = known.collect();
        let is_known = known.contains(&word.as_str());
        ensure!(is_known, "there is no step {word:?}, but {}", known.join(", "));
    }
    let is_meant = |step: &RunStep| {
        let by = |word: &String| match word.as_str() {
            ALL_SANITIZERS => is_sanitizer(step),
            REST => !ended(step),
            word => step.key == word,
        };
        only.is_empty() || only.iter().any(by)
    };
    Ok(steps.iter().map(is_meant).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_benchmark_comes_before_every_sanitizer_and_each_of_those_runs_every_test() {
        let steps = list_steps(Path::new("f"), |file| Path::new("o").join(file));
        let keys: Vec<_> = steps.iter().map(|step| step.key.as_str()).collect();
        assert_eq!(keys[..5], ["conformance", "benchmark", "shapes", "daemon", "ipc"]);
        let first: Duration = steps[..5].iter().map(|step| step.limit).sum();
        assert!(first <= Duration::from_secs(570), "they fit into one command: {first:?}");
        let of_tool = |tool: &str, filter: &[&str]| {
            let of_step = |step: &&RunStep| {
                let arguments: Vec<_> =
                    step.command.get_args().map(|arg| arg.to_string_lossy()).collect();
                arguments.iter().any(|arg| arg == tool)
                    && arguments
                        .ends_with(&filter.iter().map(|arg| (*arg).into()).collect::<Vec<_>>())
            };
            steps[5..].iter().filter(of_step).count()
        };
        for tool in SANITIZERS {
            let halves =
                [of_tool(tool, &["--skip", "worker"]), of_tool(tool, &["--nocapture", "worker"])];
            assert_eq!(halves, [1, 1], "{tool}");
        }
        for step in &steps[5..] {
            let seconds = step.command.get_envs().find(|env| env.0 == "KVD_GPU_SECONDS");
            let seconds = seconds.and_then(|env| env.1?.to_str()?.parse().ok());
            let seconds = Duration::from_secs(seconds.expect("when no codec is begun any more"));
            assert!(2 * seconds < step.limit, "{}", step.name);
        }
        assert_eq!(steps.len(), 5 + 2 * SANITIZERS.len());
    }

    #[test]
    fn steps_are_chosen_by_name_as_sanitizers_and_as_what_has_no_outcome() {
        let steps = list_steps(Path::new("f"), |file| Path::new("o").join(file));
        let of = |only: &[&str]| {
            let only: Vec<_> = only.iter().map(|word| (*word).to_owned()).collect();
            let chosen = choose_steps(&steps, &only, |step| step.key != "ipc")?;
            let of_step = |(step, chosen): (&RunStep, bool)| chosen.then_some(step.key.clone());
            Ok::<_, anyhow::Error>(steps.iter().zip(chosen).filter_map(of_step).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]).unwrap().len(), steps.len());
        assert_eq!(of(&["daemon", "racecheck-ipc"]).unwrap(), ["daemon", "racecheck-ipc"]);
        assert_eq!(of(&["sanitizers"]).unwrap().len(), 2 * SANITIZERS.len());
        assert_eq!(of(&["rest"]).unwrap(), ["ipc"]);
        let error = of(&["bench"]).unwrap_err().to_string();
        assert!(error.contains("\"bench\", but conformance, benchmark, shapes"), "{error}");
    }
}
