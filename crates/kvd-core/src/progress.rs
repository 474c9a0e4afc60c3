//! Lines that tell how far a long command is, where no bar can be drawn: pipes, logs, CI.
#![expect(clippy::disallowed_types, reason = "this crate depends on no other lock")]

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A command that is done by then says nothing.
const SILENCE: Duration = Duration::from_secs(2);

/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// How often it is looked whether a line is due.
const TICK: Duration = Duration::from_millis(250);

/// Work that is done step by step, as its lines tell of it. A command has one task after another,
/// so that nobody knows of the whole how much is left.
#[derive(Clone, Debug, Default)]
struct TaskProgress {
    /// Name of the task.
    task: String,
    /// The step of it that is being done; may be empty.
    step: String,
    /// Steps that are done.
    done: u64,
    /// Steps in all; 0 where nobody knows.
    total: u64,
    /// When its first step began.
    begun: Duration,
    /// When the last line was written.
    told: Option<Duration>,
}

impl TaskProgress {
    /// The line that is due at `now`, counted from the command's begin.
    fn due_line(&mut self, now: Duration) -> Option<String> {
        let since = self.told.map_or(now.saturating_sub(SILENCE), |told| now - told);
        let wait = if self.told.is_some() { INTERVAL } else { Duration::ZERO };
        if now < SILENCE || self.task.is_empty() || since < wait {
            return None;
        }
        self.told = Some(now);
        let Self { task, step, done, total, begun, .. } = self;
        let mut line = format!("kvd: {task}");
        if !step.is_empty() {
            line.push_str(&format!(", {step}"));
        }
        if let Some(percent) = (*done * 100).checked_div(*total) {
            line.push_str(&format!(": {} % of this stage", percent.min(100)));
        }
        if let Some(left) = time_left(now.saturating_sub(*begun), *done, *total) {
            line.push_str(&format!(", about {} left of it", time_text(left)));
        }
        line.push_str(&format!(", {} so far in all", time_text(now)));
        Some(line)
    }
}

/// Time that the steps left take, as long each as those that are done; `None` before the first.
fn time_left(elapsed: Duration, done: u64, total: u64) -> Option<Duration> {
    let left = total.checked_sub(done).filter(|left| *left > 0 && done > 0)?;
    Duration::try_from_secs_f64(elapsed.as_secs_f64() * left as f64 / done as f64).ok()
}

/// `17 s`, `3 min 5 s`, `2 h 4 min`.
fn time_text(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

/// Writes a line every few seconds until it is dropped, also while a step takes long.
#[derive(Debug)]
pub struct ProgressLines {
    work: Arc<Mutex<TaskProgress>>,
    begun: Instant,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressLines {
    /// Lines on standard error.
    #[must_use]
    pub fn on_stderr() -> Self {
        let (stop, stopped) = sync_channel::<()>(1);
        let (work, begun) = (Arc::new(Mutex::new(TaskProgress::default())), Instant::now());
        let shared = work.clone();
        let tell = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(TICK) {
                if let Some(line) = lock_work(&shared).due_line(begun.elapsed()) {
                    // Nobody may read it: that is no reason to stop working.
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
            }
        };
        // A machine without a thread to spare works without lines.
        let thread = std::thread::Builder::new().name("kvd-progress".to_owned()).spawn(tell).ok();
        Self { work, begun, stop: Some(stop), thread }
    }

    /// Begins a task of `total` steps, 0 where nobody knows.
    pub fn begin_task(&self, task: &str, total: u64) {
        let mut work = lock_work(&self.work);
        let told = work.told;
        let (task, begun) = (task.to_owned(), self.begun.elapsed());
        *work = TaskProgress { task, total, begun, told, ..TaskProgress::default() };
    }

    /// Names the task and its step.
    pub fn name_step(&self, task: &str, step: &str) {
        let mut work = lock_work(&self.work);
        task.clone_into(&mut work.task);
        step.clone_into(&mut work.step);
    }

    /// Counts steps.
    pub fn add_steps(&self, steps: u64) {
        lock_work(&self.work).done += steps;
    }
}

impl Drop for ProgressLines {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The work, even after a panic of a thread that held the lock: its lines stay right.
fn lock_work(work: &Mutex<TaskProgress>) -> MutexGuard<'_, TaskProgress> {
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_line_comes_after_two_seconds_and_then_every_five() {
        let mut work =
            TaskProgress { task: "codecs".to_owned(), total: 200, ..TaskProgress::default() };
        assert_eq!(work.due_line(Duration::from_millis(1999)), None);
        let line = "kvd: codecs: 0 % of this stage, 2 s so far in all";
        assert_eq!(work.due_line(seconds(2)).unwrap(), line);
        (work.done, work.step) = (50, "speed".to_owned());
        assert_eq!(work.due_line(seconds(6)), None);
        let line =
            "kvd: codecs, speed: 25 % of this stage, about 21 s left of it, 7 s so far in all";
        assert_eq!(work.due_line(seconds(7)).unwrap(), line);
        work.done = 201;
        let line = "kvd: codecs, speed: 100 % of this stage, 1 h 1 min so far in all";
        assert_eq!(work.due_line(seconds(3660)).unwrap(), line);
        work.total = 0;
        let line = "kvd: codecs, speed, 1 h 1 min so far in all";
        assert_eq!(work.due_line(seconds(3719)).unwrap(), line);
    }

    #[test]
    fn time_left_is_counted_from_the_begin_of_the_stage() {
        let task = "text".to_owned();
        let mut work = TaskProgress {
            task,
            total: 4,
            done: 1,
            begun: seconds(100),
            ..TaskProgress::default()
        };
        let line = "kvd: text: 25 % of this stage, about 30 s left of it, 1 min 50 s so far in all";
        assert_eq!(work.due_line(seconds(110)).unwrap(), line);
        assert_eq!(TaskProgress::default().due_line(seconds(50)), None);
    }
}
