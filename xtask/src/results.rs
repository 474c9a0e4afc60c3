//! The page of benchmark results: `docs/perf/results.md`, made from `bench/results/*.json`.
//!
//! A file of results is one table: title, machine, commit, date, command, unit, notes, columns and
//! rows. A fact of a run that nobody noted is null.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The page, from the repository's root.
pub(crate) const PAGE: &str = "docs/perf/results.md";
const FOLDER: &str = "bench/results";
const LINE_CHARS_MAX: usize = 100;
/// Smaller fractions are written with an exponent.
const SMALL: f64 = 0.01;

const HEAD: &str = "\
# Results

`cargo xtask gen` writes this page from [bench/results](../../bench/results), which has the other
tables. Compare figures only within one table. What they mean: [attention](cpu.md),
[encoding](encode.md), [Huffman codes](entropy.md), [transport](transport.md).
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultFile {
    title: String,
    /// Whether the page shows the table; otherwise it links to the file.
    page: bool,
    machine: Option<String>,
    commit: Option<String>,
    date: Option<String>,
    command: Option<String>,
    unit: String,
    notes: Vec<String>,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

/// The text that the page must have.
pub(crate) fn render_page(root: &Path) -> Result<String> {
    let folder = root.join(FOLDER);
    let entries = fs::read_dir(&folder).with_context(|| format!("read {FOLDER}"))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|end| end == "json"));
    files.sort();
    let mut page = HEAD.to_owned();
    for file in files {
        let read =
            || -> Result<ResultFile> { Ok(serde_json::from_str(&fs::read_to_string(&file)?)?) };
        let context = || file.display().to_string();
        let results = read().with_context(context)?;
        if results.page {
            page.push_str(&results.section().with_context(context)?);
        }
    }
    Ok(page)
}

impl ResultFile {
    /// Heading, circumstances and table.
    fn section(&self) -> Result<String> {
        let mut words = vec![self.unit.clone()];
        let known = |name: &str, value: &Option<String>| {
            format!("{name}: {}", value.as_deref().unwrap_or("not noted"))
        };
        words.push(known("machine", &self.machine));
        words.push(format!("{}, {}", known("commit", &self.commit), known("date", &self.date)));
        words.extend(self.command.iter().map(|command| format!("`{command}`")));
        words.extend(self.notes.iter().cloned());
        let mut text =
            format!("\n## {}\n\n{}\n", self.title, wrap_lines(&(words.join("; ") + ".")));
        write!(text, "\n{}{}", render_row(&self.columns), "|---".repeat(self.columns.len()))?;
        text.push_str("|\n");
        for values in &self.rows {
            let (count, columns) = (values.len(), self.columns.len());
            anyhow::ensure!(count == columns, "a row has {count} values for {columns} columns");
            text.push_str(&render_row(&values.iter().map(render_cell).collect::<Vec<_>>()));
        }
        Ok(text)
    }
}

fn render_row(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

fn render_cell(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            Some(small) if number.is_f64() && small.abs() < SMALL => format!("{small:e}"),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

/// Breaks a text into lines.
fn wrap_lines(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let Some(line) = lines.last_mut() else { continue };
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= LINE_CHARS_MAX {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(rows: Vec<Vec<Value>>) -> ResultFile {
        let columns = vec!["codec".to_owned(), "ns".to_owned()];
        let (machine, commit, date) = (Some("Zen 5".to_owned()), None, None);
        let (title, unit, notes) = ("Attention".to_owned(), "ns".to_owned(), Vec::new());
        ResultFile {
            title,
            page: true,
            machine,
            commit,
            date,
            command: None,
            unit,
            notes,
            columns,
            rows,
        }
    }

    #[test]
    fn a_table_has_its_circumstances_and_what_is_not_known() {
        let text = results(vec![
            vec!["raw".into(), 1.5.into()],
            vec!["kivi-4".into(), 6.2e-5.into()],
            vec!["x".into(), Value::Null],
        ]);
        let wanted = "\n## Attention\n\nns; machine: Zen 5; commit: not noted, date: not noted.\n\n\
                      | codec | ns |\n|---|---|\n| raw | 1.5 |\n\
                      | kivi-4 | 6.2e-5 |\n| x | – |\n";
        assert_eq!(text.section().unwrap(), wanted);
    }

    #[test]
    fn a_row_of_another_length_is_refused() {
        let error = results(vec![vec!["raw".into()]]).section().unwrap_err().to_string();
        assert_eq!(error, "a row has 1 values for 2 columns");
    }

    #[test]
    fn lines_have_at_most_a_hundred_characters() {
        let text = wrap_lines(&"ab ".repeat(100));
        assert!(text.lines().all(|line| line.chars().count() <= LINE_CHARS_MAX));
        assert_eq!(text.lines().count(), 4);
    }
}
