//! Tests that the threat model quotes: a line that no test shows any more is not true any more.

/// The page.
pub(super) const MODEL: &str = "docs/threat-model.md";
/// Where the page's paths begin.
const FOLDERS: [&str; 3] = ["crates/kvd/tests/access/", "crates/kvd/tests/", ""];
/// Stands in the page for the rest of a name.
const REST: char = '…';

/// A Rust file of the tree.
pub(super) struct RustFile {
    pub(super) path: String,
    pub(super) text: String,
}

/// Quotes in the last column of the page's tables that name no test, file or crate.
pub(super) fn list_missing(page: &str, files: &[RustFile]) -> Vec<String> {
    let rows = page.lines().enumerate().filter(|(_, line)| line.starts_with('|'));
    let quotes = rows.flat_map(|(index, line)| {
        let cell = line.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
        cell.split('`').skip(1).step_by(2).map(move |quote| (index + 1, quote))
    });
    let missing = quotes.filter(|(_, quote)| !is_there(quote, files));
    missing.map(|(line, quote)| format!("{MODEL}:{line}: no test `{quote}`")).collect()
}

fn is_there(quote: &str, files: &[RustFile]) -> bool {
    let has_test = |file: &RustFile, name: &str| match name.strip_suffix(REST) {
        Some(begin) => begin.is_empty() || file.text.contains(&format!("fn {begin}")),
        None => file.text.contains(&format!("fn {name}(")),
    };
    if let Some((module, name)) = quote.split_once("::") {
        let of_module = [format!("/{module}.rs"), format!("/{module}/")];
        let is_of = |file: &&RustFile| of_module.iter().any(|part| file.path.contains(part));
        files.iter().filter(is_of).any(|file| has_test(file, name))
    } else if quote.ends_with(".rs") || quote.ends_with('/') {
        let paths = FOLDERS.map(|folder| format!("{folder}{quote}"));
        files.iter().any(|file| paths.iter().any(|path| file.path.starts_with(path)))
    } else if quote.contains('_') {
        files.iter().any(|file| has_test(file, quote))
    } else {
        files.iter().any(|file| file.path.starts_with(&format!("crates/{quote}/")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_of_what_is_gone_are_found() {
        let file = |path: &str, text: &str| RustFile { path: path.into(), text: text.into() };
        let files = [
            file("crates/kvd/tests/access/doors.rs", "async fn none_comes_in() {}"),
            file("crates/kvd/tests/serve/doors.rs", "fn others_wait() {}"),
            file("crates/kvd-remote/src/tests.rs", "fn a_miss_is_counted() {}"),
        ];
        let row = |cell: &str| list_missing(&format!("# `x`\n| a `b_c` | d | {cell} |\n"), &files);
        for there in [
            "`doors::none_comes_in`, `doors.rs`",
            "`serve/doors.rs`; `doors::others_…`, `doors::…`",
            "`kvd-remote`: `a_miss_is_counted`, `crates/kvd-remote/src/`",
            "by nothing",
        ] {
            assert_eq!(row(there), <[String; 0]>::default());
        }
        for gone in ["doors::none_comes", "matrix::…", "audit.rs", "a_miss", "kvd-tier", "src/"] {
            assert_eq!(row(&format!("`{gone}`")), [format!("{MODEL}:2: no test `{gone}`")]);
        }
    }
}
