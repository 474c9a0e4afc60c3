//! Clocks, medians, and what the machine can read.

use crate::peaks::measure_peak;
use kvd_compute::affinity;
use kvd_compute::{CpuBackend, InstructionSet, MultiplyKind};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::hint::black_box;

/// Median, best and spread of a few runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MeasuredFigure {
    /// Half of the runs were faster.
    pub median: f64,
    /// The fastest run.
    pub best: f64,
    /// A quarter of the runs were slower.
    pub upper_quartile: f64,
}

impl MeasuredFigure {
    /// Figures from runs, at least one.
    pub(crate) fn from_runs(mut runs: Vec<f64>) -> Self {
        runs.sort_by(f64::total_cmp);
        let at = |part: f64| runs[((runs.len() - 1) as f64 * part).round() as usize];
        Self { median: at(0.5), best: at(0.0), upper_quartile: at(0.75) }
    }

    /// Turns nanoseconds for one into how many one nanosecond does.
    pub(crate) fn to_rate(self) -> Self {
        let Self { median, best, upper_quartile } = self;
        Self { median: 1.0 / median, best: 1.0 / best, upper_quartile: 1.0 / upper_quartile }
    }
}

/// The value of a run, and the time that it took.
pub(crate) struct TimedRun<T> {
    pub(crate) value: T,
    /// Processor time, nanoseconds.
    pub(crate) cpu_ns: f64,
    /// Wall time, nanoseconds.
    pub(crate) wall_ns: f64,
}

/// Runs `run` and measures its time.
pub(crate) fn measure_time<T>(run: impl FnOnce() -> T) -> TimedRun<T> {
    let clocks = || [ClockId::ProcessCPUTime, ClockId::Monotonic].map(read_clock);
    let before = clocks();
    let value = run();
    let after = clocks();
    TimedRun { value, cpu_ns: after[0] - before[0], wall_ns: after[1] - before[1] }
}

fn read_clock(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Keeps this thread, and those it starts from now on, on the last `threads` cores it may use.
/// A machine that refuses is measured unpinned.
fn pin_threads(threads: usize) -> bool {
    affinity::keep_on(affinity::allowed_cores().into_iter().rev().take(threads)).is_ok()
}

/// The answer of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchResult<T> {
    /// The machine that it ran on.
    pub machine: MachineInfo,
    /// One row for each case.
    pub rows: Vec<T>,
}

/// The machine, as measured in the same run.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    /// Processor, as the system names it.
    pub processor: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Version of kvd.
    pub version: &'static str,
    /// Commit it was built from, `-dirty` where sources had changed since; `unknown` until the
    /// program, which knows it, says so.
    pub commit: &'static str,
    /// Bytes per nanosecond that one thread reads from memory.
    pub read_gb_per_s: MeasuredFigure,
    /// f32 multiplications with additions that one thread makes in a nanosecond, from registers, on
    /// the machine's best instruction set.
    pub multiply_adds_per_ns: MeasuredFigure,
    /// Whether the threads could be kept on their cores.
    pub pinned: bool,
}

impl MachineInfo {
    /// Pins this process to `threads` cores and looks at the machine; takes about half a second.
    pub(crate) fn inspect_machine(threads: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pinned = pin_threads(threads);
        let best = CpuBackend::instruction_sets().pop().unwrap_or(InstructionSet::Portable);
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            processor: model.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cores,
            version: env!("CARGO_PKG_VERSION"),
            commit: "unknown",
            read_gb_per_s: read_speed(),
            multiply_adds_per_ns: measure_peak(best, MultiplyKind::F32)
                .expect("every set multiplies f32"),
            pinned,
        }
    }
}

/// Sequential reads of a buffer far beyond the last-level cache, in GB/s.
fn read_speed() -> MeasuredFigure {
    const WORDS: usize = 256 << 17;
    let buffer = vec![1u64; WORDS];
    let run = |_| {
        let read = || buffer.chunks_exact(64).fold(0u64, |sum, line| sum ^ sum_line(line));
        let timed = measure_time(read);
        black_box(timed.value);
        timed.cpu_ns / (WORDS * 8) as f64
    };
    MeasuredFigure::from_runs((0..9).map(run).collect()).to_rate()
}

fn sum_line(line: &[u64]) -> u64 {
    line.iter().fold(0, |sum, word| sum ^ word)
}
