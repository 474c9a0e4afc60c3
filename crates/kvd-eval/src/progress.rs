//! How far a run is, on stderr: one bar on a terminal, a line every few seconds elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvd_core::ProgressLines;
use std::time::Duration;

/// How often the bar's clock moves while a step takes long.
const TICK: Duration = Duration::from_millis(500);

/// Bar of a stage, which fits a terminal with the longest name of a step.
const TEMPLATE: &str =
    "{prefix:>16} {bar:20} {percent:>3}% {elapsed}, {eta} left of this stage {msg}";

/// Progress of a whole run, in model tokens or heads fitted.
pub(crate) struct RunProgress {
    bar: ProgressBar,
    /// Where no bar can be drawn.
    lines: Option<ProgressLines>,
}

impl RunProgress {
    /// A bar of `steps` steps.
    pub(crate) fn new(steps: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        let lines = bar.is_hidden().then(ProgressLines::on_stderr);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        if lines.is_none() {
            bar.enable_steady_tick(TICK);
        }
        let progress = Self { bar, lines };
        if let Some(lines) = &progress.lines {
            lines.begin_task("", steps as u64);
        }
        progress
    }

    /// Starts anew with `steps` steps.
    pub(crate) fn begin_steps(&self, what: &str, steps: usize) {
        self.bar.reset();
        self.bar.set_length(steps as u64);
        if let Some(lines) = &self.lines {
            lines.begin_task(what, steps as u64);
        }
        self.name_step(what, "");
    }

    /// Names the current run and its stage.
    pub(crate) fn name_step(&self, run: &str, stage: &'static str) {
        self.bar.set_prefix(run.to_owned());
        self.bar.set_message(stage);
        if let Some(lines) = &self.lines {
            lines.name_step(run, stage);
        }
    }

    /// Counts steps.
    pub(crate) fn add_steps(&self, steps: usize) {
        self.bar.inc(steps as u64);
        if let Some(lines) = &self.lines {
            lines.add_steps(steps as u64);
        }
    }

    /// Removes the bar.
    pub(crate) fn remove_bar(&self) {
        self.bar.finish_and_clear();
        if let Some(lines) = &self.lines {
            lines.begin_task("", 0);
        }
    }
}
