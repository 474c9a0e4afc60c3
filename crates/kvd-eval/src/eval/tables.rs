//! The report as tables, for the terminal and for the page.

use super::{EvalBlock, EvalReport, EvalRow};
use crate::measure::QualityPair;
use crate::search::SearchReport;
use crate::table::{COLUMNS, format_fitted, format_number, format_table, wrap_lines};
use std::io::{self, Write};

/// Longest label that stands in a column; longer ones are numbered.
const LABEL_MAX: usize = 24;

/// A table on its way to a terminal or a page.
pub(super) struct TableSheet {
    pub(super) title: &'static str,
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
    /// Explanation of the columns.
    pub(super) note: String,
}

/// The name of a row in columns and plots.
pub(super) fn row_label(block: &EvalBlock, row: &EvalRow) -> String {
    if row.codec.chars().count() <= LABEL_MAX {
        return row.codec.clone();
    }
    let index = block.rows.iter().position(|other| other.codec == row.codec);
    format!("codec {}", index.unwrap_or_default() + 1)
}

/// Codecs that are not presets, with their specs.
pub(super) fn codec_legend(block: &EvalBlock) -> Vec<(String, &str)> {
    let rows = block.rows.iter().filter(|row| kvd_codec::find_preset(&row.codec).is_none());
    let named = rows.map(|row| (row_label(block, row), row.codec_spec.as_str()));
    named.filter(|(label, spec)| label != spec).collect()
}

/// All tables of a block.
pub(super) fn block_sheets(report: &EvalReport, block: &EvalBlock) -> Vec<TableSheet> {
    let mut sheets = vec![quality_sheet(block), spread_sheet(block)];
    sheets.extend(attached_sheet(block));
    sheets.extend([parts_sheet(report, block), layers_sheet(block)]);
    sheets.extend(speed_sheet(block));
    if report.orderings {
        sheets.extend(super::orderings::claims_sheet(block));
    }
    sheets
}

fn new_sheet(
    title: &'static str,
    header: &[&str],
    rows: Vec<Vec<String>>,
    note: String,
) -> TableSheet {
    let header = header.iter().map(|&name| name.to_owned()).collect();
    TableSheet { title, header, rows, note }
}

fn quality_sheet(block: &EvalBlock) -> TableSheet {
    let header = [
        "codec",
        "bits/value",
        "K",
        "V",
        "attn error",
        "kernel error",
        "ppl",
        "ppl %",
        "KL nats",
        "top-1 %",
    ];
    let dash = || "-".to_owned();
    let without = format_number(block.without_kvd.perplexity, 4);
    let mut rows = vec![vec!["without kvd".to_owned(), "16.00".to_owned()]];
    rows[0].extend([dash(), dash(), dash(), dash(), without, dash(), dash(), dash()]);
    rows.extend(block.rows.iter().map(|row| {
        vec![
            row_label(block, row),
            packed_figure(row, row.storage.bits_per_value, 2),
            packed_figure(row, row.storage.bits_per_key_value, 2),
            packed_figure(row, row.storage.bits_per_value_value, 2),
            packed_figure(row, row.attention_error.codec, 4),
            format!("{:.1e}", row.attention_error.kernel),
            format_number(row.quality.perplexity, 4),
            format!("{:+.2}", row.quality.perplexity_change_percent),
            format_number(row.quality.kl_nats, 5),
            format_number(row.quality.top1_agreement_percent, 2),
        ]
    }));
    let mut note =
        "bits/value: packed blocks as stored, every byte counted, windows not; K and V: the same \
         for keys and for values. attn error: what the codec changes in attention outputs, kernel \
         error: what the daemon's arithmetic adds (both relative, against f64, on clean queries). \
         KL: from the run without kvd to this one, mean over positions."
            .to_owned();
    note.extend(block.rows.iter().filter_map(|row| fallback_note(block, row)));
    if block.rows.iter().any(packs_nothing) {
        note.push_str(
            " A dash: the codec packed no block, because the passages are as short as its windows. \
             Give more --tokens.",
        );
    }
    new_sheet("Quality", &header, rows, note)
}

/// The table of how KL is spread over positions: what users notice is its tail.
fn spread_sheet(block: &EvalBlock) -> TableSheet {
    let header = ["codec", "mean", "median", "99.9 %", "99.9 % over mean"];
    let row = |row: &EvalRow| {
        let quality = &row.quality;
        let over = quality.kl_p999_nats / quality.kl_nats;
        let over = if over.is_finite() { format_number(over, 1) } else { "-".to_owned() };
        let kl = [quality.kl_nats, quality.kl_median_nats, quality.kl_p999_nats];
        let mut cells = vec![row_label(block, row)];
        cells.extend(kl.map(|kl| format_number(kl, 5)));
        cells.push(over);
        cells
    };
    let note = "KL in nats that so large a part of the positions stays below.".to_owned();
    new_sheet("KL by position", &header, block.rows.iter().map(row).collect(), note)
}

/// The table of runs on a prefix from the cache.
fn attached_sheet(block: &EvalBlock) -> Option<TableSheet> {
    let first = block.rows.iter().find_map(|row| row.attached)?;
    let next = |name: &str| format!("next {} {name}", first.next_tokens);
    let header = [next("stored"), next("attached"), next("%"), next("top-1 %")];
    let header =
        header.into_iter().chain(["all stored", "all attached", "all %"].map(str::to_owned));
    let row = |row: &EvalRow| {
        let attached = row.attached?;
        let kl = |pair: &QualityPair| {
            let change = pair.kl_change_percent();
            [
                format_number(pair.stored.kl_nats, 5),
                format_number(pair.attached.kl_nats, 5),
                change.map_or_else(|| "-".to_owned(), |change| format!("{change:+.1}")),
            ]
        };
        let mut cells = vec![row_label(block, row)];
        cells.extend(kl(&attached.next));
        cells.push(format_number(attached.next.attached.top1_agreement_percent, 2));
        cells.extend(kl(&attached.all));
        Some(cells)
    };
    let mut note = format!(
        "KL in nats from the run without kvd, over the {} tokens after a prefix of {} and over all \
         after it: by the sequence that stored the prefix, and by one that found it in the cache, \
         packed to its last token.",
        first.next_tokens, first.prefix_tokens
    );
    if first.recomputed_tokens > 0 {
        note += &format!(" Its last {} tokens were computed anew.", first.recomputed_tokens);
    }
    Some(TableSheet {
        title: "Attached prefix",
        header: std::iter::once("codec".to_owned()).chain(header).collect(),
        rows: block.rows.iter().filter_map(row).collect(),
        note,
    })
}

/// Whether all that was stored lies in windows and open blocks: then nothing is known of the codec.
pub(super) fn packs_nothing(row: &EvalRow) -> bool {
    row.storage.parts.packed_values == 0
}

/// A figure of packed blocks; a dash where there are none.
fn packed_figure(row: &EvalRow, value: f64, digits: usize) -> String {
    if packs_nothing(row) { "-".to_owned() } else { format_number(value, digits) }
}

/// A note on values that were not stored as the codec says; its bits and its error are of a mixture
/// then.
fn fallback_note(block: &EvalBlock, row: &EvalRow) -> Option<String> {
    let (raw, safer) = (row.storage.fallback_pages, row.storage.over_bound_pages);
    let label = row_label(block, row);
    match (raw, safer) {
        (0, 0) => None,
        (_, 0) => Some(format!(" {label}: {raw} pages could not be quantized and are raw.")),
        _ => Some(format!(
            " {label}: {safer} pages were over its bound and are stored with a safer side, {raw} \
             could not be quantized and are raw."
        )),
    }
}

fn parts_sheet(report: &EvalReport, block: &EvalBlock) -> TableSheet {
    let header = [
        "codec",
        "codes",
        "scales",
        "offsets",
        "headers",
        "stored",
        "+ windows",
        "+ tables",
        "model KiB",
    ];
    let row = |row: &EvalRow| {
        let (stored, context) = (&row.storage, &row.context);
        let bits = [
            stored.code_bits,
            stored.scale_bits,
            stored.offset_bits,
            stored.header_bits,
            stored.bits_per_value,
            context.packed + context.windows,
            context.total,
        ];
        let mut cells = vec![row_label(block, row)];
        cells.extend(bits.map(|bits| packed_figure(row, bits, 3)));
        cells.push(format_number(stored.model_bytes as f64 / 1024.0, 1));
        cells
    };
    let note = format!(
        "The first four make up stored. + windows: one sequence of {} tokens with its windows and \
         open block in 16 bits; + tables: with the model's calibration and Huffman tables (model \
         KiB) charged to that one sequence.",
        report.setup.context_tokens
    );
    new_sheet("Bits per value by part", &header, block.rows.iter().map(row).collect(), note)
}

fn layers_sheet(block: &EvalBlock) -> TableSheet {
    let count = block.rows.first().map_or(0, |row| row.attention_error.layers.len());
    let mut header = vec!["codec".to_owned()];
    header.extend((0..count).map(|layer| format!("layer {layer}")));
    header.extend(["mean", "kernel error"].map(str::to_owned));
    let row = |row: &EvalRow| {
        let mut cells = vec![row_label(block, row)];
        let layers = row.attention_error.layers.iter();
        cells.extend(layers.map(|layer| packed_figure(row, layer.codec, 4)));
        cells.push(packed_figure(row, row.attention_error.codec, 4));
        cells.push(format!("{:.1e}", row.attention_error.kernel));
        cells
    };
    let rows = block.rows.iter().map(row).collect();
    let note = "Relative to the exact output, queries of the last quarter of the first passage.";
    TableSheet { title: "Attention error by layer", header, rows, note: note.to_owned() }
}

fn speed_sheet(block: &EvalBlock) -> Option<TableSheet> {
    let header =
        ["codec", "encode Mvalues/s", "encode GB/s", "load GB/s", "attend us", "calibration s"];
    let row = |row: &EvalRow| {
        let speed = row.speed?;
        Some(vec![
            row_label(block, row),
            packed_figure(row, speed.encode_values_per_second / 1e6, 0),
            packed_figure(row, speed.encode_gb_per_second, 3),
            format_number(speed.load_gb_per_second, 3),
            format_number(speed.attend_us, 0),
            format_number(row.calibration_seconds, 1),
        ])
    };
    let rows: Vec<_> = block.rows.iter().filter_map(row).collect();
    let tokens = block.rows.iter().find_map(|row| row.speed)?.tokens;
    let note = format!(
        "Device time from the daemon's histograms, best of three rounds: encode and load of \
         {tokens} tokens in GB of f16 per second, attention of one token over them, one layer. \
         What else the machine does shows here and nowhere else."
    );
    Some(new_sheet("Speed", &header, rows, note))
}

/// The table of a search: the spec of each layer and side.
pub(super) fn search_sheet(search: &SearchReport) -> TableSheet {
    let header = ["layer", "side", "bits/value", "attn error", "KL expected", "spec"];
    let row = |slot: &crate::search::SlotReport| {
        vec![
            slot.layer.to_string(),
            slot.side.clone(),
            format_number(slot.bits, 2),
            format_number(slot.attention_error, 4),
            format_number(slot.expected_kl_nats, 5),
            slot.spec.clone(),
        ]
    };
    let note = format!(
        "{:.3} bits per value of a budget of {}, {:.5} nats expected in all, both on a window of \
         the calibration text that no fit saw.",
        search.bits, search.budget_bits, search.expected_kl_nats
    );
    new_sheet("Policy found", &header, search.slots.iter().map(row).collect(), note)
}

/// How wide lines may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineWidth {
    /// 100 columns.
    Terminal,
    /// As wide as tables are.
    All,
}

/// Names of columns that are shorter on a terminal.
const SHORT_NAMES: [(&str, &str); 3] =
    [("bits/value", "bits"), ("attn error", "attn err"), ("kernel error", "kernel")];

/// Writes the report as text, for a terminal.
///
/// # Errors
/// When `out` cannot be written to.
pub fn print_report(report: &EvalReport, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(report_text(report, LineWidth::Terminal).as_bytes())
}

/// The report as text.
#[must_use]
pub fn report_text(report: &EvalReport, width: LineWidth) -> String {
    let mut text = String::new();
    let (model, setup) = (&report.model, &report.setup);
    text.push_str(&wrap_paragraph(&format!(
        "Model {}: {:.1} M parameters, {} layers, {} query / {} KV heads of {} channels.",
        model.name,
        model.parameters as f64 / 1e6,
        model.layers,
        model.query_heads,
        model.kv_heads,
        model.head_dim
    )));
    text.push_str(&wrap_paragraph(&model.note));
    for block in &report.blocks {
        text.push('\n');
        text.push_str(&wrap_paragraph(&format!(
            "Text {}, windows {}: {} passages of {} tokens in steps of {}, {} tokens scored.",
            block.text,
            block.windows,
            setup.passages,
            setup.passage_tokens,
            setup.chunk_tokens,
            block.without_kvd.scored_tokens
        )));
        if block.windows == "own" {
            let own = "Windows differ between codecs, so the rows are not directly comparable.";
            text.push_str(&wrap_paragraph(own));
        }
        for (label, codec) in codec_legend(block) {
            text.push_str(&wrap_paragraph(&format!("{label} is {codec}")));
        }
        for sheet in block_sheets(report, block) {
            push_sheet(&mut text, &sheet, width);
        }
    }
    for split in &report.splits {
        text.push('\n');
        text.push_str(&wrap_paragraph(&split.to_string()));
    }
    if let Some(search) = &report.search {
        push_sheet(&mut text, &search_sheet(search), width);
    }
    text.push_str(&format!("\n{:.0} s in all.\n", report.seconds));
    text
}

fn push_sheet(text: &mut String, sheet: &TableSheet, width: LineWidth) {
    let short = |name: &str| {
        let short = SHORT_NAMES.iter().find(|(long, _)| *long == name);
        short.map(|(_, short)| *short).filter(|_| width == LineWidth::Terminal)
    };
    let name = |name: &'_ String| short(name).map_or_else(|| name.clone(), str::to_owned);
    let header: Vec<String> = sheet.header.iter().map(name).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows = match width {
        LineWidth::Terminal => format_fitted(&header, &sheet.rows, COLUMNS),
        LineWidth::All => format_table(&header, &sheet.rows),
    };
    text.push_str(&format!("\n{}:\n\n{rows}\n", sheet.title));
    if !sheet.note.is_empty() {
        text.push_str(&wrap_note(&sheet.note));
    }
}

/// Lines of a terminal's width.
pub(crate) fn wrap_paragraph(text: &str) -> String {
    text.lines().flat_map(|line| wrap_lines(line, COLUMNS)).map(|line| line + "\n").collect()
}

/// A note in lines of a terminal's width, two columns in.
fn wrap_note(text: &str) -> String {
    wrap_lines(text, COLUMNS - 4).into_iter().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{ContextBits, EvalSetup};
    use super::*;
    use crate::ModelReport;
    use crate::measure::{AttachedQuality, AttentionError, DeviceSpeed, LayerError, StorageRatios};
    use kvd_core::StoredBytes;
    use kvd_engine::TextQuality;

    #[test]
    fn notes_break_between_words() {
        let text = "word ".repeat(50);
        let lines = wrap_note(text.trim());
        assert!(
            lines.lines().all(|line| line.len() <= 98 && line.starts_with("  word")),
            "{lines}"
        );
        assert_eq!(lines.split_whitespace().count(), 50);
    }

    /// A report of 32 layers whose figures are as long as they get.
    fn report() -> EvalReport {
        let layer = LayerError { codec: 1.2345, ..LayerError::default() };
        let row = |codec: &str| EvalRow {
            codec: codec.to_owned(),
            codec_spec: codec.to_owned(),
            storage: StorageRatios {
                bits_per_value: 16.03,
                bits_per_key_value: 16.03,
                bits_per_value_value: 16.03,
                code_bits: 16.0,
                model_bytes: 123 << 20,
                parts: StoredBytes { packed_values: 1 << 20, ..StoredBytes::default() },
                ..StorageRatios::default()
            },
            context: ContextBits { total: 16.031, ..ContextBits::default() },
            attention_error: AttentionError {
                codec: 1.2345,
                kernel: 1.2e-7,
                layers: vec![layer; 32],
                ..AttentionError::default()
            },
            quality: TextQuality {
                perplexity: 1234.5678,
                perplexity_change_percent: -123.45,
                kl_nats: 12.345_67,
                top1_agreement_percent: 100.0,
                ..TextQuality::default()
            },
            attached: Some(AttachedQuality { next_tokens: 128, ..AttachedQuality::default() }),
            speed: Some(DeviceSpeed {
                encode_values_per_second: 1.2e12,
                encode_gb_per_second: 123.456,
                load_gb_per_second: 123.456,
                attend_us: 123_456.0,
                tokens: 2048,
            }),
            calibration_seconds: 1234.5,
        };
        let spec = "k=mean+qpca/grid(rate=2.35)/huffman; v=mean+gain+pca/grid(rate=1.75)/huffman; \
                    sink=32; recent=96; k[layer=0-1]=fp8";
        let presets = kvd_codec::presets().iter().map(|preset| preset.name);
        let block = EvalBlock {
            text: "a-text-with-a-long-name-of-a-file.txt".repeat(2),
            windows: "own".to_owned(),
            without_kvd: TextQuality { perplexity: 1234.5678, ..TextQuality::default() },
            rows: presets.chain([spec]).map(row).collect(),
        };
        EvalReport {
            version: EvalReport::VERSION,
            model: ModelReport { note: "Numbers of a model. ".repeat(9), ..ModelReport::default() },
            setup: EvalSetup::default(),
            blocks: vec![block],
            orderings: true,
            splits: Vec::new(),
            search: None,
            seconds: 1234.0,
        }
    }

    #[test]
    fn every_table_fits_a_terminal_and_wide_has_all_in_one_line() {
        let narrow = report_text(&report(), LineWidth::Terminal);
        let longest = narrow.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= COLUMNS, "{longest} columns:\n{narrow}");
        for part in ["layer 31", "vecinfer-2-reg", "attn err", "Bits per value by part", "Speed:"] {
            assert!(narrow.contains(part), "no {part} in\n{narrow}");
        }
        let wide = report_text(&report(), LineWidth::All);
        let layers = wide.lines().find(|line| line.contains("layer 0 ")).unwrap();
        assert!(layers.contains("layer 31") && wide.contains("bits/value"), "{layers}");
        assert!(!wide.contains("packed no block"), "{wide}");
    }

    #[test]
    fn a_codec_that_packed_nothing_has_no_bits() {
        let mut report = report();
        report.blocks[0].rows[0].storage = StorageRatios::default();
        let page = report_text(&report, LineWidth::All);
        let first = |title: &str| {
            let sheet = page.split(title).nth(1).unwrap();
            sheet.lines().find(|line| line.trim_start().starts_with("raw ")).unwrap().to_owned()
        };
        assert!(!first("Bits per value by part").contains("0.000"), "{page}");
        assert!(page.contains("packed no block"), "{page}");
        assert!(super::super::plot_svg(&report).matches(">raw<").count() == 0);
    }
}
