//! `kvd codecs --kernels`: which kernel multiplies the pages of a codec on a processor.

use super::CliError;
use super::codecs::GEOMETRY;
use super::table::{TableColumn, render_table, wrap_text};
use kvd_bench::fit_codec;
use kvd_compute::{CpuBackend, KernelChoice, Precision, list_kernels};
use kvd_core::{LayerIndex, ProgressLines, Side};
use std::collections::BTreeMap;

/// Query rows of a unit: one token of four query heads that share a KV head.
const UNIT_ROWS: usize = 4;

/// Kernels of one codec's keys or values under some precisions.
struct KernelLine {
    /// Empty where the line before is of the same side.
    codec: String,
    side: &'static str,
    precisions: String,
    kernels: String,
}

/// The table of codecs, as presets or specs.
pub(super) fn kernels_text<'a>(
    codecs: impl IntoIterator<Item = &'a str>,
) -> Result<String, CliError> {
    let codecs: Vec<_> = codecs.into_iter().collect();
    let progress = ProgressLines::on_stderr();
    progress.begin_task("kernels of codecs", codecs.len() as u64);
    let mut lines = Vec::new();
    for codec in codecs {
        let bound = fit_codec(&GEOMETRY, codec)?;
        let choices = list_kernels(&bound, LayerIndex(0), UNIT_ROWS);
        for side in Side::BOTH {
            add_lines(codec, side, &choices, &mut lines);
        }
        progress.add_steps(1);
    }
    let cells = |cell: &dyn Fn(&KernelLine) -> String| lines.iter().map(cell).collect::<Vec<_>>();
    let mut text = render_table(&[
        TableColumn::of_text("codec", cells(&|line| line.codec.clone())),
        TableColumn::of_text("side", cells(&|line| line.side.to_owned())),
        TableColumn::of_text("precision", cells(&|line| line.precisions.clone())),
        TableColumn::of_text("kernel", cells(&|line| line.kernels.clone())),
    ]);
    let sets: Vec<_> = CpuBackend::instruction_sets().iter().map(|set| set.name()).collect();
    text.push('\n');
    text.push_str(&wrap_text(
        "Names are files under crates/kvd-compute/src/cpu; float decodes rows to f32. Where \
         instruction sets differ, those named have the kernel behind the colon. Units have four \
         query rows; with more, AMX multiplies bytes itself and int8 is fast.",
        "  ",
    ));
    text.push_str(&wrap_text(&format!("This machine has {}.", sets.join(", ")), "  "));
    Ok(text)
}

/// Adds a line for each run of precisions with the same kernels.
fn add_lines(codec: &str, side: Side, choices: &[KernelChoice], lines: &mut Vec<KernelLine>) {
    let first = lines.len();
    for precision in Precision::ALL {
        let kernels = kernel_names(choices, precision, side);
        match lines[first..].last_mut().filter(|line| line.kernels == kernels) {
            Some(line) => line.precisions += &format!(", {}", precision.name()),
            None => {
                let is_first = lines.len() == first;
                let codec = if is_first { codec.to_owned() } else { String::new() };
                let side = if is_first { side.name() } else { "" };
                let precisions = precision.name().to_owned();
                lines.push(KernelLine { codec, side, precisions, kernels });
            }
        }
    }
}

/// The kernel of most instruction sets, and those of the others with their names.
fn kernel_names(choices: &[KernelChoice], precision: Precision, side: Side) -> String {
    let of_precision = choices.iter().filter(|choice| choice.precision == precision);
    let mut sets = BTreeMap::<&str, Vec<&str>>::new();
    for choice in of_precision {
        let path = choice.kernels[side.index()];
        sets.entry(path.rsplit('/').next().unwrap_or(path)).or_default().push(&choice.set);
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
        let has_line = |wanted: &[&str]| {
            text.lines().any(|line| line.split_whitespace().eq(wanted.iter().copied()))
        };
        assert!(has_line(&["raw", "k", "single,", "fast,", "int8", "float"]), "{text}");
        let fp8 = ["fp8", "v", "single,", "fast,", "int8", "fp8;", "portable:", "float"];
        assert!(has_line(&fp8), "{text}");
        assert!(has_line(&["kivi-4", "k", "single", "float"]), "{text}");
        #[cfg(target_arch = "x86_64")]
        assert!(has_line(&["fast", "uniform"]) && text.contains("avx2: nibbles"), "{text}");
        #[cfg(target_arch = "aarch64")]
        assert!(has_line(&["fast,", "int8", "uniform"]), "{text}");
    }
}
