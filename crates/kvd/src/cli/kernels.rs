//! `kvd codecs --kernels`: which kernel multiplies the pages of a codec on a processor.

use super::CliError;
use super::codecs::GEOMETRY;
use super::table::{TableColumn, render_table, wrap_text};
use kvd_bench::fit_codec;
use kvd_compute::{CpuBackend, KernelChoice, Precision, list_kernels};
use kvd_core::{LayerIndex, Side};
use std::collections::BTreeMap;

/// Query rows of a unit: one token of four query heads that share a KV head.
const UNIT_ROWS: usize = 4;

/// Kernels of one codec's keys or values.
struct KernelLine {
    codec: String,
    side: Side,
    /// By precision: `single`, `fast`, `int8`.
    kernels: [String; 3],
}

/// The table of codecs, as presets or specs.
pub(super) fn kernels_text<'a>(
    codecs: impl IntoIterator<Item = &'a str>,
) -> Result<String, CliError> {
    let mut lines = Vec::new();
    for codec in codecs {
        let bound = fit_codec(&GEOMETRY, codec)?;
        let choices = list_kernels(&bound, LayerIndex(0), UNIT_ROWS);
        for side in Side::BOTH {
            let kernels = Precision::ALL.map(|precision| kernel_names(&choices, precision, side));
            lines.push(KernelLine { codec: codec.to_owned(), side, kernels });
        }
    }
    let cells = |cell: &dyn Fn(&KernelLine) -> String| lines.iter().map(cell).collect::<Vec<_>>();
    let int8 = |line: &KernelLine| {
        let [_, fast, int8] = &line.kernels;
        if fast == int8 { "as fast" } else { int8 }.to_owned()
    };
    let mut text = render_table(&[
        TableColumn::of_text("codec", cells(&|line| line.codec.clone())),
        TableColumn::of_text("side", cells(&|line| line.side.to_string())),
        TableColumn::of_text("single", cells(&|line| line.kernels[0].clone())),
        TableColumn::of_text("fast", cells(&|line| line.kernels[1].clone())),
        TableColumn::of_text("int8", cells(&int8)),
    ]);
    let sets: Vec<_> = CpuBackend::instruction_sets().iter().map(|set| set.name()).collect();
    text.push('\n');
    text.push_str(&wrap_text(
        "Names are files of crates/kvd-compute/src/cpu; float decodes rows to f32. Where \
         instruction sets differ, those named have the kernel behind the colon. Units have four \
         query rows; with more, AMX multiplies bytes itself and int8 is fast.",
        "  ",
    ));
    text.push_str(&wrap_text(&format!("This machine has {}.", sets.join(", ")), "  "));
    Ok(text)
}

/// The kernel of most instruction sets, and those of the others with their names.
fn kernel_names(choices: &[KernelChoice], precision: Precision, side: Side) -> String {
    let of_precision = choices.iter().filter(|choice| choice.precision == precision);
    let mut sets = BTreeMap::<&str, Vec<&str>>::new();
    for choice in of_precision {
        sets.entry(choice.kernels[side.index()]).or_default().push(&choice.set);
    }
    let most = sets.iter().max_by_key(|(_, sets)| sets.len()).map(|(kernel, _)| *kernel);
    let others = sets.iter().filter(|(kernel, _)| Some(**kernel) != most);
    let others = others.map(|(kernel, sets)| format!("; {}: {kernel}", sets.join(", ")));
    format!("{}{}", most.unwrap_or_default(), others.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::super::table::{COLUMNS, columns_of};
    use super::*;

    #[test]
    fn kernels_are_told_by_precision_and_instruction_set() {
        let text = kernels_text(["raw", "fp8", "kivi-4"]).unwrap();
        assert!(columns_of(&text) <= COLUMNS, "{} columns:\n{text}", columns_of(&text));
        let line = |codec: &str, side: &str| {
            let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            lines.find(|words| words[..2] == [codec, side]).unwrap().join(" ")
        };
        assert_eq!(line("raw", "k"), "raw k float float as fast");
        assert!(line("fp8", "v").starts_with("fp8 v fp8; portable: float fp8; portable: float"));
        assert!(line("kivi-4", "k").starts_with("kivi-4 k float uniform"), "{text}");
        #[cfg(target_arch = "x86_64")]
        assert!(line("kivi-4", "k").contains("avx2: uniform/nibbles"), "{text}");
    }
}
