//! House rules that no lint knows: sizes, words, dependency directions, left-overs, the unsafe
//! fence, what the container image is built from, tests that the threat model quotes.
//!
//! Each rule is a pure function from text to findings; this file feeds them.

mod edges;
mod fence;
mod image;
mod mask;
mod packages;
mod quoted;
mod size;
mod words;

use crate::report::StepReport;
use anyhow::{Context, Result, bail};
use quoted::RustFile;
use std::fs;
use std::path::Path;
use std::process::Command;
use words::MeasuredTree;

/// Written by a generator: sizes and left-overs are not ours to fix.
const GENERATED: &[&str] = &["crates/kvd-proto/src/gen/"];

#[derive(Default, clap::Args)]
pub(crate) struct TidyArguments {
    /// Prints the figures of words by crate, and checks nothing.
    #[arg(long)]
    measure: bool,
    /// Prints which files hold how much unsafe code, and checks nothing.
    #[arg(long)]
    unsafe_code: bool,
    /// Lowers the maxima of xtask/src/tidy/words.toml to the measured figures.
    #[arg(long)]
    lower: bool,
}

/// One broken rule.
#[derive(Debug, PartialEq, Eq)]
struct TidyFinding {
    /// Line, from 1; 0 for the whole file.
    line: usize,
    text: String,
}

impl TidyFinding {
    fn new(line: usize, text: impl Into<String>) -> Self {
        Self { line, text: text.into() }
    }
}

/// Checks the tree under `root`.
pub(crate) fn run_rules(root: &Path, arguments: &TidyArguments, report: &StepReport) -> Result<()> {
    if arguments.unsafe_code {
        return list_unsafe(root, report);
    }
    let measured = measure_words(root)?;
    if arguments.lower {
        measured.lower(root)?;
    }
    if arguments.measure {
        report.print_line(measured.table()?.trim_end());
        return Ok(());
    }
    check_tree(root, &measured, report)
}

fn check_tree(root: &Path, measured: &MeasuredTree, report: &StepReport) -> Result<()> {
    let mut broken = 0;
    let files = read_rust(root)?;
    for RustFile { path, text } in &files {
        for finding in check_file(path, text) {
            broken += 1;
            report.print_line(&format!("{path}:{}: {}", finding.line, finding.text));
        }
    }
    let metadata = read_metadata(root)?;
    let others = [
        list_foreign_packages(root)?,
        edges::check_edges(&metadata)?,
        fence::check_roots(root, &metadata)?,
        measured.check(root)?,
        quoted::list_missing(&fs::read_to_string(root.join(quoted::MODEL))?, &files),
    ];
    for text in others.into_iter().flatten().chain(image::check_image(root, &metadata)?) {
        broken += 1;
        report.print_line(&text);
    }
    if broken > 0 {
        bail!("tidy: {broken} findings in {} files", files.len());
    }
    report.print_line(&format!("tidy: {} files, no findings", files.len()));
    Ok(())
}

/// Lines that install a package of others, in files whose lines people copy.
fn list_foreign_packages(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for pattern in packages::PATTERNS {
        for path in listed_files(root, pattern)? {
            let text = fs::read_to_string(root.join(&path)).with_context(|| path.clone())?;
            let findings = packages::find_foreign_packages(&text).into_iter();
            found.extend(
                findings.map(|finding| format!("{path}:{}: {}", finding.line, finding.text)),
            );
        }
    }
    Ok(found)
}

/// Prints files with unsafe code, and how many blocks, functions and implementations are unsafe.
fn list_unsafe(root: &Path, report: &StepReport) -> Result<()> {
    let counted = read_rust(root)?.into_iter().map(|RustFile { path, text }| {
        let count = fence::count_unsafe(&mask::mask_text(&text));
        (path, count)
    });
    let held: Vec<_> = counted.filter(|(_, count)| *count > 0).collect();
    for (path, count) in &held {
        report.print_line(&format!("{count:>6} {path}"));
    }
    let all: usize = held.iter().map(|(_, count)| count).sum();
    report.print_line(&format!("{all:>6} in {} files", held.len()));
    Ok(())
}

/// Every Rust file of the tree.
fn read_rust(root: &Path) -> Result<Vec<RustFile>> {
    let read = |path: String| {
        let text = fs::read_to_string(root.join(&path)).with_context(|| format!("read {path}"))?;
        Ok(RustFile { path, text })
    };
    listed_files(root, "*.rs")?.into_iter().map(read).collect()
}

/// The figures of words.
fn measure_words(root: &Path) -> Result<MeasuredTree> {
    let mut measured = MeasuredTree::default();
    let read =
        |path: &str| fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"));
    for path in listed_files(root, "*.rs")? {
        if !GENERATED.iter().any(|prefix| path.starts_with(prefix)) {
            measured.add_rust(&path, &read(&path)?);
        }
    }
    for path in listed_files(root, "*.md")? {
        measured.add_markdown(&path, &read(&path)?);
    }
    Ok(measured)
}

fn check_file(path: &str, text: &str) -> Vec<TidyFinding> {
    let code = mask::mask_text(text);
    let mut findings = fence::unsafe_words(path, &code);
    if !GENERATED.iter().any(|prefix| path.starts_with(prefix)) {
        findings.extend(size::check_sizes(path, text, &code));
        findings.extend(fence::left_overs(text, &code));
    }
    findings.sort_by_key(|finding| finding.line);
    findings
}

/// Every file of a kind that git knows or could be told of.
fn listed_files(root: &Path, pattern: &str) -> Result<Vec<String>> {
    let arguments = ["ls-files", "--cached", "--others", "--exclude-standard", pattern];
    let output = Command::new("git").args(arguments).current_dir(root).output();
    let output = output.context("start git ls-files")?;
    if !output.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    }
    let listed = String::from_utf8(output.stdout).context("git ls-files")?;
    // A file deleted but not yet committed is still listed.
    let exists = |path: &&str| root.join(path).is_file();
    Ok(listed.lines().filter(exists).map(str::to_owned).collect())
}

fn read_metadata(root: &Path) -> Result<serde_json::Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(root).output();
    let output = output.context("start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("parse cargo metadata")
}
