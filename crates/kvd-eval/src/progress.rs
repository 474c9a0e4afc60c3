//! One progress bar on stderr, only when that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress of a whole run, in model tokens or heads fitted.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar of `steps` steps.
    pub(crate) fn new(steps: usize) -> Self {
        // indicatif draws nothing when stderr is no terminal.
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        let template = "{prefix:>16} {bar:32} {percent:>3}% {elapsed} {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Starts anew with `steps` steps.
    pub(crate) fn begin(&self, what: &str, steps: usize) {
        self.0.reset();
        self.0.set_length(steps as u64);
        self.stage(what, "");
    }

    /// Names what is being done: a run and its stage.
    pub(crate) fn stage(&self, run: &str, stage: &'static str) {
        self.0.set_prefix(run.to_owned());
        self.0.set_message(stage);
    }

    /// Counts steps.
    pub(crate) fn add(&self, steps: usize) {
        self.0.inc(steps as u64);
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
