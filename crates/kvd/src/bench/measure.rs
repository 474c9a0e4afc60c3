//! Clocks, medians, and what the machine can read.

use super::peaks::peak;
use crate::affinity;
use kvd_compute::{CpuBackend, InstructionSet, MultiplyKind};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::hint::black_box;

/// Median, best and spread of a few runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Figure {
    /// Half of the runs were faster.
    pub median: f64,
    /// The fastest run.
    pub best: f64,
    /// A quarter of the runs were slower.
    pub upper_quartile: f64,
}

impl Figure {
    /// Of at least one run.
    pub(super) fn of(mut runs: Vec<f64>) -> Self {
        runs.sort_by(f64::total_cmp);
        let at = |part: f64| runs[((runs.len() - 1) as f64 * part).round() as usize];
        Self { median: at(0.5), best: at(0.0), upper_quartile: at(0.75) }
    }

    /// Of what one nanosecond does, from nanoseconds for one.
    pub(super) fn inverse(self) -> Self {
        let Self { median, best, upper_quartile } = self;
        Self { median: 1.0 / median, best: 1.0 / best, upper_quartile: 1.0 / upper_quartile }
    }
}

/// Nanoseconds of processor time and of wall time that `run` took.
pub(super) fn timed<T>(run: impl FnOnce() -> T) -> (T, f64, f64) {
    let clocks = || [ClockId::ProcessCPUTime, ClockId::Monotonic].map(nanoseconds);
    let before = clocks();
    let value = run();
    let after = clocks();
    (value, after[0] - before[0], after[1] - before[1])
}

fn nanoseconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Keeps this thread, and those it starts from now on, on the last `threads` cores it may use.
/// A machine that refuses is measured unpinned.
fn pin(threads: usize) -> bool {
    affinity::keep_on(affinity::cores().into_iter().rev().take(threads)).is_ok()
}

/// What was measured of the machine in the same run.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor, as the system names it.
    pub processor: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Version of kvd.
    pub version: &'static str,
    /// Commit it was built from, `-dirty` where sources had changed since; `unknown` without git.
    pub commit: &'static str,
    /// Bytes per nanosecond that one thread reads from memory.
    pub read_gb_per_s: Figure,
    /// f32 multiplications with additions that one thread makes in a nanosecond, from registers, on
    /// the machine's best instruction set.
    pub multiply_adds_per_ns: Figure,
    /// Whether the threads could be kept on their cores.
    pub pinned: bool,
}

impl Machine {
    /// Pins this process to `threads` cores and looks at the machine; takes about half a second.
    pub(super) fn look(threads: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pinned = pin(threads);
        let best = CpuBackend::instruction_sets().pop().unwrap_or(InstructionSet::Portable);
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            processor: model.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cores,
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("KVD_COMMIT"),
            read_gb_per_s: read_speed(),
            multiply_adds_per_ns: peak(best, MultiplyKind::F32).expect("every set multiplies f32"),
            pinned,
        }
    }
}

/// Sequential reads of a buffer far beyond the last-level cache, in GB/s.
fn read_speed() -> Figure {
    const WORDS: usize = 256 << 17;
    let buffer = vec![1u64; WORDS];
    let run = |_| {
        let read = || buffer.chunks_exact(64).fold(0u64, |sum, line| sum ^ sum_line(line));
        let (sum, cpu, _) = timed(read);
        black_box(sum);
        cpu / (WORDS * 8) as f64
    };
    Figure::of((0..9).map(run).collect()).inverse()
}

fn sum_line(line: &[u64]) -> u64 {
    line.iter().fold(0, |sum, word| sum ^ word)
}
