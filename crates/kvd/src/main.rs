//! Entry point: parse, run, and turn the outcome into an exit code.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvd::cli::main()
}
