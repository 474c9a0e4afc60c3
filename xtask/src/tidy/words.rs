//! Words: names of one word, tuples in place of parameters, openings of doc comments, length of
//! Markdown. What is counted may only become less: `words.toml` holds a maximum for each crate.

use super::mask::mask_text;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The maxima, from the repository's root.
const MAXIMA: &str = "xtask/src/tidy/words.toml";
const LINE_CHARS_MAX: usize = 100;
const README_LINES_MAX: usize = 130;

/// Names that the language, its library or a trait of another crate gives.
const GIVEN: &[&str] = &[
    "as_ref", "borrow", "call", "clone", "cmp", "decode", "decoder", "default", "deref", "drop",
    "encode", "encoder", "eq", "fmt", "from", "get", "hash", "index", "insert", "into", "iter",
    "keys", "len", "main", "new", "next", "poll", "pop", "push", "remove", "source", "visit",
    "with",
];
/// How a doc comment does not begin.
const OPENINGS: &[&str] = &["What", "The same", "Of"];

/// Figures of one crate's code without its tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WordCounts {
    /// Doc comments that begin with one of [`OPENINGS`], those of tests too.
    doc_openings: usize,
    /// Functions whose name is one word.
    one_word_functions: usize,
    /// Structs, enums, traits, unions and aliases whose name is one word.
    one_word_types: usize,
    /// Functions with a tuple or array pattern as an argument.
    tuple_arguments: usize,
}

/// Totals of the counted things, for percentages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NameTotals {
    docs: usize,
    functions: usize,
    types: usize,
}

/// The maxima of `words.toml`, or the figures that are compared with them.
#[derive(Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WordMaxima {
    /// Words of all Markdown files.
    markdown_words: usize,
    /// Lines of Markdown longer than a line may be, by file; no other file has any.
    long_lines: BTreeMap<String, usize>,
    crates: BTreeMap<String, WordCounts>,
}

/// All figures of a tree.
#[derive(Debug, Default)]
pub(super) struct MeasuredTree {
    maxima: WordMaxima,
    totals: BTreeMap<String, NameTotals>,
    readme_words: usize,
    readme_lines: usize,
}

impl MeasuredTree {
    /// Adds a Rust file.
    pub(super) fn add_rust(&mut self, path: &str, text: &str) {
        let name = crate_of(path);
        let words = self.maxima.crates.entry(name.clone()).or_default();
        let totals = self.totals.entry(name).or_default();
        for opening in doc_openings(text) {
            totals.docs += 1;
            words.doc_openings +=
                usize::from(OPENINGS.iter().any(|word| begins_with_words(opening, word)));
        }
        if is_test(path) {
            return;
        }
        let code = mask_text(text);
        let lines = super::size::production_lines(&code);
        let code: String = code.lines().take(lines).flat_map(|line| [line, "\n"]).collect();
        for (name, rest) in find_declared(&code, &["fn"]) {
            totals.functions += 1;
            let is_given = GIVEN.contains(&name);
            words.one_word_functions += usize::from(!is_given && !name.contains('_'));
            words.tuple_arguments += usize::from(has_pattern(rest));
        }
        for (name, _) in find_declared(&code, &["struct", "enum", "trait", "union", "type"]) {
            let is_one = !name.chars().skip(1).any(char::is_uppercase);
            totals.types += 1;
            words.one_word_types += usize::from(is_one);
        }
    }

    /// Adds a Markdown file.
    pub(super) fn add_markdown(&mut self, path: &str, text: &str) {
        let words = text.split_whitespace().count();
        self.maxima.markdown_words += words;
        if path == "README.md" {
            (self.readme_words, self.readme_lines) = (words, text.lines().count());
        }
        let long = long_lines(text);
        if long > 0 {
            self.maxima.long_lines.insert(path.to_owned(), long);
        }
    }

    /// The findings where a tree is over the maxima of its `words.toml`.
    pub(super) fn check(&self, root: &Path) -> Result<Vec<String>> {
        let text = fs::read_to_string(root.join(MAXIMA)).context(MAXIMA)?;
        Ok(self.findings(&toml::from_str(&text).context(MAXIMA)?))
    }

    fn findings(&self, maxima: &WordMaxima) -> Vec<String> {
        let mut findings = Vec::new();
        let mut at_most = |what: &str, is: usize, most: usize| {
            if is > most {
                findings.push(format!("{what}: {is}, at most {most} ({MAXIMA})"));
            }
        };
        at_most("README.md: lines", self.readme_lines, README_LINES_MAX);
        at_most("words of Markdown", self.maxima.markdown_words, maxima.markdown_words);
        for (path, long) in &self.maxima.long_lines {
            let most = maxima.long_lines.get(path).copied().unwrap_or(0);
            at_most(&format!("{path}: lines of more than {LINE_CHARS_MAX}"), *long, most);
        }
        for (name, is) in &self.maxima.crates {
            let most = maxima.crates.get(name).copied().unwrap_or_default();
            for ((what, is), (_, most)) in is.figures().into_iter().zip(most.figures()) {
                at_most(&format!("{name}: {what}"), is, most);
            }
        }
        findings
    }

    /// Writes `words.toml` with the lesser of its maxima and the measured figures.
    pub(super) fn lower(&self, root: &Path) -> Result<()> {
        let path = root.join(MAXIMA);
        let old: WordMaxima = toml::from_str(&fs::read_to_string(&path).context(MAXIMA)?)?;
        fs::write(path, toml::to_string(&self.lesser(&old))?).context(MAXIMA)
    }

    fn lesser(&self, old: &WordMaxima) -> WordMaxima {
        let lines =
            self.maxima.long_lines.iter().filter_map(|(path, long)| {
                Some((path.clone(), *long.min(old.long_lines.get(path)?)))
            });
        let crates = self.maxima.crates.iter().map(|(name, is)| {
            let most = old.crates.get(name).copied().unwrap_or_default();
            (name.clone(), is.lesser(most))
        });
        WordMaxima {
            markdown_words: self.maxima.markdown_words.min(old.markdown_words),
            long_lines: lines.collect(),
            crates: crates.collect(),
        }
    }

    /// The figures, a crate a line.
    pub(super) fn table(&self) -> Result<String> {
        let mut text = format!(
            "{:<12} {:>14} {:>14} {:>14} {:>14}\n",
            "crate", "functions 1w", "types 1w", "tuple args", "doc openings"
        );
        let (mut all, mut of) = (WordCounts::default(), NameTotals::default());
        for (name, words) in &self.maxima.crates {
            let totals = self.totals.get(name).copied().unwrap_or_default();
            all = all.plus(*words);
            of = of.plus(totals);
            words.write_line(&mut text, name, totals)?;
        }
        all.write_line(&mut text, "all", of)?;
        let long: usize = self.maxima.long_lines.values().sum();
        writeln!(
            text,
            "README: {} words, {} lines; Markdown: {} words, {long} lines over {LINE_CHARS_MAX}",
            self.readme_words, self.readme_lines, self.maxima.markdown_words
        )?;
        Ok(text)
    }
}

impl WordCounts {
    fn figures(self) -> [(&'static str, usize); 4] {
        [
            ("doc comments that begin with What, The same or Of", self.doc_openings),
            ("functions named by one word", self.one_word_functions),
            ("types named by one word", self.one_word_types),
            ("functions with a tuple or array pattern as an argument", self.tuple_arguments),
        ]
    }

    fn plus(self, other: Self) -> Self {
        self.each(other, |a, b| a + b)
    }

    fn lesser(self, other: Self) -> Self {
        self.each(other, usize::min)
    }

    fn each(self, other: Self, of: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            doc_openings: of(self.doc_openings, other.doc_openings),
            one_word_functions: of(self.one_word_functions, other.one_word_functions),
            one_word_types: of(self.one_word_types, other.one_word_types),
            tuple_arguments: of(self.tuple_arguments, other.tuple_arguments),
        }
    }

    fn write_line(self, text: &mut String, name: &str, of: NameTotals) -> std::fmt::Result {
        let part = |count: usize, all: usize| {
            let percent = 100.0 * count as f64 / (all.max(1)) as f64;
            format!("{count} {percent:>5.1} %")
        };
        writeln!(
            text,
            "{name:<12} {:>14} {:>14} {:>14} {:>14}",
            part(self.one_word_functions, of.functions),
            part(self.one_word_types, of.types),
            part(self.tuple_arguments, of.functions),
            format!("{} of {}", self.doc_openings, of.docs),
        )
    }
}

impl NameTotals {
    fn plus(self, other: Self) -> Self {
        Self {
            docs: self.docs + other.docs,
            functions: self.functions + other.functions,
            types: self.types + other.types,
        }
    }
}

/// The crate that a file belongs to, by its folder.
fn crate_of(path: &str) -> String {
    let path = path.strip_prefix("crates/").unwrap_or(path);
    path.split('/').next().unwrap_or_default().to_owned()
}

fn is_test(path: &str) -> bool {
    path.split('/').any(|part| ["tests", "tests.rs", "conformance"].contains(&part))
}

/// First lines of doc comments.
fn doc_openings(text: &str) -> Vec<&str> {
    let mut openings = Vec::new();
    let mut before = "";
    for line in text.lines().map(str::trim) {
        let marker = ["///", "//!"].into_iter().find(|marker| line.starts_with(marker));
        if let Some(marker) = marker
            && !before.starts_with(marker)
        {
            openings.push(line[marker.len()..].trim_start());
        }
        before = line;
    }
    openings
}

/// Whether a text begins with these words and not with a longer one.
fn begins_with_words(text: &str, words: &str) -> bool {
    let rest = text.strip_prefix(words);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// Names after a keyword, each with the code that follows it.
fn find_declared<'a>(code: &'a str, keywords: &[&str]) -> Vec<(&'a str, &'a str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for keyword in keywords {
        for (at, _) in code.match_indices(keyword) {
            let Some(rest) = code[at + keyword.len()..].strip_prefix(' ') else { continue };
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            // An associated type that a trait of another crate names is no choice.
            let is_assigned = *keyword == "type" && code[..at].ends_with("    ");
            if end > 0 && !code[..at].ends_with(is_word) && !is_assigned {
                found.push(rest.split_at(end));
            }
        }
    }
    found
}

/// Whether the parameters that follow a function's name hold a tuple or array pattern.
fn has_pattern(after_name: &str) -> bool {
    let Some(open) = parameters_at(after_name) else { return false };
    let (mut depth, mut is_start) = (0usize, true);
    for c in after_name[open + 1..].chars() {
        if is_start && depth == 0 && (c == '(' || c == '[') {
            return true;
        }
        match c {
            '(' | '[' | '<' | '{' => depth += 1,
            ')' if depth == 0 => return false,
            ')' | ']' | '>' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_start = if c == ',' { depth == 0 } else { is_start && c.is_whitespace() };
    }
    false
}

/// Where the parameters begin, behind the generics.
fn parameters_at(after_name: &str) -> Option<usize> {
    let mut depth = 0usize;
    let mut before = ' ';
    for (at, c) in after_name.char_indices() {
        match c {
            '<' => depth += 1,
            // Not the end of `->`.
            '>' if before != '-' => depth = depth.saturating_sub(1),
            '(' if depth == 0 => return Some(at),
            '{' | ';' => return None,
            _ => {}
        }
        before = c;
    }
    None
}

/// Lines of prose that are too long. Tables, code and link targets are not prose.
fn long_lines(text: &str) -> usize {
    let (mut is_code, mut count) = (false, 0);
    for line in text.lines() {
        let start = line.trim_start();
        if start.starts_with("```") {
            is_code = !is_code;
        } else if !is_code && !start.starts_with('|') && !line.starts_with("    ") {
            count += usize::from(prose_chars(line) > LINE_CHARS_MAX);
        }
    }
    count
}

/// Characters of a line without the targets of its links.
fn prose_chars(line: &str) -> usize {
    let mut parts = line.split("](");
    let first = parts.next().unwrap_or_default().chars().count();
    let rest = parts.map(|part| {
        let target = part.find(')').unwrap_or(0);
        part[target..].chars().count() + 2
    });
    first + rest.sum::<usize>()
}

#[cfg(test)]
mod tests;
