//! The only place that prints.
#![expect(clippy::print_stdout, reason = "a command-line tool talks through standard output")]

/// Tells the person at the terminal what happens.
pub(crate) struct StepReport;

impl StepReport {
    /// A step begins.
    pub(crate) fn begin_step(&self, name: &str) {
        println!("== {name}");
    }

    /// One line of detail.
    pub(crate) fn print_line(&self, text: &str) {
        println!("{text}");
    }
}
