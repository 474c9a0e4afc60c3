//! `kvd codecs`: the presets, as a table.

use kvd_codec::presets;
use std::fmt::Write;

/// Name, spec, source and summary of every preset.
pub(super) fn table() -> String {
    let width = presets().iter().map(|preset| preset.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for preset in presets() {
        let (name, summary) = (preset.name, preset.summary);
        writeln!(text, "{name:width$}  {summary}").expect("write to a string");
        writeln!(text, "{:width$}  {}", "", preset.spec_text).expect("write to a string");
        writeln!(text, "{:width$}  source: {}\n", "", preset.source).expect("write to a string");
    }
    text
}
