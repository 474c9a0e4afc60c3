//! Lengths of files, functions and lines.

use super::TidyFinding;

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_CHARS_MAX: usize = 100;

/// Tables of one row per line, which is how they are read and compared.
const TABLES: &[&str] = &["crates/kvd/src/metrics/name.rs"];

/// Checks the file at `path`; `code` is its [masked](super::mask) text.
pub(super) fn check_sizes(path: &str, text: &str, code: &str) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    let lines = production_lines(code);
    if lines > FILE_LINES_MAX {
        let text = format!("{lines} lines before the tests; at most {FILE_LINES_MAX}");
        findings.push(TidyFinding::new(0, text));
    }
    for (start, length) in find_functions(code) {
        if length > FUNCTION_LINES_MAX {
            let text = format!("a function of {length} lines; at most {FUNCTION_LINES_MAX}");
            findings.push(TidyFinding::new(start, text));
        }
    }
    if TABLES.contains(&path) {
        return findings;
    }
    for (index, line) in text.lines().enumerate() {
        let chars = line.chars().count();
        if chars > LINE_CHARS_MAX && !is_long_literal(line) {
            let text = format!("{chars} characters; at most {LINE_CHARS_MAX}");
            findings.push(TidyFinding::new(index + 1, text));
        }
    }
    findings
}

/// A line that is nothing but a literal stays whole: broken, it could not be searched for.
fn is_long_literal(line: &str) -> bool {
    let line = line.trim().trim_end_matches([',', ';', ')']);
    let quoted = line.starts_with('"') || line.starts_with("r\"") || line.starts_with("r#\"");
    quoted && (line.ends_with('"') || line.ends_with("\"#"))
}

/// Lines before the module of unit tests.
pub(super) fn production_lines(code: &str) -> usize {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let begins_tests = |index: &usize| {
        lines[*index] == "#[cfg(test)]"
            && lines[*index..]
                .iter()
                .find(|line| !line.is_empty() && !line.starts_with("#["))
                .is_some_and(|line| line.starts_with("mod ") || line.starts_with("pub(crate) mod "))
    };
    (0..lines.len()).find(begins_tests).unwrap_or(lines.len())
}

/// First line and number of lines of every function with a body.
fn find_functions(code: &str) -> Vec<(usize, usize)> {
    let chars: Vec<char> = code.chars().collect();
    let line_at = |at: usize| 1 + chars[..at].iter().filter(|c| **c == '\n').count();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for at in 0..chars.len().saturating_sub(3) {
        // `fn` and a space, then a name: `fn(u8)` is a type.
        let keyword = chars[at..at + 3] == ['f', 'n', ' '] && is_word(chars[at + 3]);
        if !keyword || at.checked_sub(1).is_some_and(|before| is_word(chars[before])) {
            continue;
        }
        if let Some(end) = body_end(&chars[at..]) {
            let (first, last) = (line_at(at), line_at(at + end));
            found.push((first, last - first + 1));
        }
    }
    found
}

/// Where the body of the function that begins `chars` ends; `None` for a declaration.
fn body_end(chars: &[char]) -> Option<usize> {
    let (mut nesting, mut depth) = (0usize, 0usize);
    for (at, c) in chars.iter().enumerate() {
        match c {
            '(' | '[' => nesting += 1,
            ')' | ']' => nesting = nesting.saturating_sub(1),
            // Outside brackets: `[u8; 4]` in a signature is no end.
            ';' if depth == 0 && nesting == 0 => return None,
            '{' => depth += 1,
            '}' => {
                depth = depth.saturating_sub(1);
                // A block inside brackets is a const argument of the signature.
                if depth == 0 && nesting == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::mask::mask_text;
    use super::*;

    fn lengths(text: &str) -> Vec<(usize, usize)> {
        find_functions(&mask_text(text))
    }

    #[test]
    fn functions_are_measured_from_keyword_to_brace() {
        let text = "fn a() {}\n\npub(crate) async fn b(x: [u8; 4])\nwhere\n    T: Fn(u8),\n{\n    \
                    '{'; \"{\";\n}\n";
        assert_eq!(lengths(text), [(1, 1), (3, 6)]);
    }

    #[test]
    fn declarations_and_function_types_have_no_length() {
        assert_eq!(lengths("trait T { fn a(&self) -> [u8; 2]; }\ntype F = fn(u8) -> u8;"), []);
        assert_eq!(lengths("let my_fn = 1; struct S { f: fn (u8) }"), []);
    }

    #[test]
    fn nested_functions_count_in_both() {
        assert_eq!(lengths("fn a() {\n fn b() {\n }\n}"), [(1, 4), (2, 2)]);
    }

    #[test]
    fn brackets_open_across_the_body_do_not_end_it() {
        assert_eq!(lengths("fn a() {\n run(|| {\n }, [{ 1 }]);\n}\nfn b() {}"), [(1, 4), (5, 1)]);
    }

    #[test]
    fn only_the_part_before_the_tests_counts() {
        let text = "a\nb\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\nc\n";
        assert_eq!(production_lines(&mask_text(text)), 2);
        let text = "a\n#[cfg(test)]\nfn helper() {}\nb\n// #[cfg(test)]\n// mod tests {}\n";
        assert_eq!(production_lines(&mask_text(text)), 6);
    }

    #[test]
    fn limits_are_inclusive_and_found_with_their_line() {
        let function = |lines: usize| format!("fn a() {{\n{}}}\n", "x;\n".repeat(lines - 2));
        let found = |text: &str| check_sizes("src/lib.rs", text, &mask_text(text));
        assert_eq!(found(&function(70)), []);
        assert_eq!(found(&function(71))[0].line, 1);
        assert_eq!(found(&"x\n".repeat(500)), []);
        assert_eq!(found(&"x\n".repeat(501))[0].line, 0);
        let line = |chars: usize| "ü".repeat(chars);
        assert_eq!(found(&line(100)), []);
        assert_eq!(found(&format!("\n{}", line(101)))[0].line, 2);
        assert_eq!(found(&format!("    \"{}\",", line(101))), []);
        assert_eq!(check_sizes(TABLES[0], &line(101), ""), []);
    }
}
