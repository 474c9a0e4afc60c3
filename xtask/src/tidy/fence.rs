//! Code that must not exist: left-overs, and `unsafe` outside its fence.

use super::TidyFinding;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Crates that may hold unsafe code, each behind its own contract.
const UNSAFE_CRATES: &[&str] = &["kvd-compute", "kvd-shm", "kvd-cuda", "kvd-emu", "kvd-c"];

/// Left-overs in code. Written in two parts, so that this file may name them.
const CODE: &[&str] = &[concat!("todo", "!"), concat!("dbg", "!"), concat!("unimplemented", "!")];
/// Left-overs anywhere, comments included.
const ANYWHERE: &[&str] = &[concat!("FIX", "ME"), concat!("X", "XX")];

/// Words that say the work is not done.
pub(super) fn left_overs(text: &str, code: &str) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    for (index, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let in_code = CODE.iter().filter(|word| has_word(code, word));
        for word in in_code.chain(ANYWHERE.iter().filter(|word| has_word(line, word))) {
            findings.push(TidyFinding::new(index + 1, format!("left-over {word}")));
        }
    }
    findings
}

/// Where the CPU backend's kernels lie, and which files there may hold unsafe code.
const KERNELS: &str = "crates/kvd-compute/src/";
const INSTRUCTION_SETS: &[&str] = &["amx", "avx2", "avx512", "avx_vnni", "neon", "simd", "x86"];

/// Whether a file may hold unsafe code.
fn is_fenced(path: &str) -> bool {
    if path.starts_with(KERNELS) {
        let file = path.rsplit('/').find(|part| *part != "mod.rs").unwrap_or_default();
        return INSTRUCTION_SETS.iter().any(|set| file.starts_with(set));
    }
    UNSAFE_CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/")))
}

/// `unsafe` in a file that may not have it.
pub(super) fn unsafe_words(path: &str, code: &str) -> Vec<TidyFinding> {
    if is_fenced(path) {
        return Vec::new();
    }
    let lines = code.lines().enumerate().filter(|(_, line)| has_word(line, "unsafe"));
    lines.map(|(index, _)| TidyFinding::new(index + 1, "unsafe outside its fence")).collect()
}

/// Unsafe blocks, functions and implementations.
pub(super) fn count_unsafe(code: &str) -> usize {
    let lines = code.lines().map(str::trim_start).filter(|line| !line.starts_with("#"));
    lines.filter(|line| has_word(line, "unsafe")).count()
}

/// Crate roots that do not forbid unsafe code.
pub(super) fn check_roots(root: &Path, metadata: &Value) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for package in super::edges::list_members(metadata)? {
        let name = package["name"].as_str().unwrap_or_default();
        if UNSAFE_CRATES.contains(&name) {
            continue;
        }
        for target in package["targets"].as_array().into_iter().flatten() {
            let kinds = target["kind"].as_array().into_iter().flatten();
            if !kinds.filter_map(Value::as_str).any(|kind| matches!(kind, "lib" | "bin")) {
                continue;
            }
            let path = target["src_path"].as_str().context("metadata: target without src_path")?;
            let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
            if !super::mask::mask_text(&text).contains("#![forbid(unsafe_code)]") {
                let path = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path));
                missing.push(format!("{}:1: #![forbid(unsafe_code)] is missing", path.display()));
            }
        }
    }
    Ok(missing)
}

/// Whether `word` stands in `line` and is no part of a longer name.
fn has_word(line: &str, word: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].ends_with(is_name) && !line[at + word.len()..].starts_with(is_name)
    })
}

#[cfg(test)]
mod tests {
    use super::super::mask::mask_text;
    use super::*;

    #[test]
    fn left_overs_are_found_where_they_count() {
        let marker = ANYWHERE[0];
        let text = format!("let a = {}();\n// {marker}: later\n\"{}\"\n", CODE[0], CODE[1]);
        let lines: Vec<_> = left_overs(&text, &mask_text(&text)).iter().map(|f| f.line).collect();
        assert_eq!(lines, [1, 2]);
        let longer = format!("my_{}() {marker}ED", CODE[0]);
        assert_eq!(left_overs(&longer, &longer), []);
    }

    #[test]
    fn unsafe_is_found_outside_its_fence_only() {
        let code = mask_text("// unsafe\n#![forbid(unsafe_code)]\nunsafe { x }\n\"unsafe\"");
        assert_eq!(unsafe_words("crates/kvd-store/src/lib.rs", &code)[0].line, 3);
        assert_eq!(unsafe_words("crates/kvd-store/src/lib.rs", &code).len(), 1);
        for fenced in
            ["simd.rs", "int_dot/avx512.rs", "simd_vector/mod.rs", "uniform/avx2_nibbles.rs"]
        {
            assert_eq!(unsafe_words(&format!("{KERNELS}cpu/{fenced}"), &code), [], "{fenced}");
        }
        for open in ["lib.rs", "cpu/mod.rs", "cpu/int_dot/mod.rs", "cpu/attend_unit.rs"] {
            assert_eq!(unsafe_words(&format!("{KERNELS}{open}"), &code).len(), 1, "{open}");
        }
        assert_eq!(unsafe_words("crates/kvd-compute-x/src/lib.rs", &code).len(), 1);
    }
}
