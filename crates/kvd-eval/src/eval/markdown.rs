//! The report as a Markdown page.

use super::tables::{TableSheet, block_sheets, codec_legend, search_sheet};
use super::{EvalBlock, EvalReport};
use std::fmt::Write;

/// The page; `plot` is the plot's file as seen from the page.
#[must_use]
pub fn markdown_page(report: &EvalReport, plot: Option<&str>) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut text, report, plot);
    text
}

fn write_page(text: &mut String, report: &EvalReport, plot: Option<&str>) -> std::fmt::Result {
    let (model, setup) = (&report.model, &report.setup);
    writeln!(text, "# Quality of codecs on {}\n", model.name)?;
    if !setup.command.is_empty() {
        writeln!(text, "Written by\n\n```sh\n{}\n```\n", setup.command)?;
    }
    writeln!(
        text,
        "in {:.0} s, kvd {} on {}, blocks of {} tokens. The model has {:.1} M parameters, {} \
         layers, {} query and {} KV heads of {} channels. {}\n",
        report.seconds,
        setup.daemon_version,
        setup.device,
        setup.block_tokens,
        model.parameters as f64 / 1e6,
        model.layers,
        model.query_heads,
        model.kv_heads,
        model.head_dim,
        model.note.replace('\n', " ")
    )?;
    let calibration = match setup.calibration_windows {
        0 => "Calibrations, where needed, came from a file".to_owned(),
        count => format!(
            "Calibrations were fitted on {count} other windows of {} tokens of the model's own \
             text, seed {}",
            setup.passage_tokens, setup.seed
        ),
    };
    writeln!(
        text,
        "Each row: {} passages of {} tokens, teacher-forced in steps of {} tokens, positions from \
         {} on scored. Every attention of every layer is answered by the daemon over gRPC, from \
         pages it encoded itself as blocks left the window. {calibration}. Compare codecs only \
         under equal windows.\n",
        setup.passages, setup.passage_tokens, setup.chunk_tokens, setup.scored_from
    )?;
    if let Some(plot) = plot {
        writeln!(text, "![Bits per value against KL, with the Pareto front]({plot})\n")?;
    }
    report.blocks.iter().try_for_each(|block| write_block(text, report, block))?;
    for split in &report.splits {
        writeln!(text, "- {split}")?;
    }
    let Some(search) = &report.search else { return Ok(()) };
    let sheet = search_sheet(search);
    writeln!(text, "## {}\n", sheet.title)?;
    write_table(text, &sheet)?;
    writeln!(text, "\n{}", sheet.note)
}

fn write_block(text: &mut String, report: &EvalReport, block: &EvalBlock) -> std::fmt::Result {
    let windows = match block.windows.as_str() {
        "own" => "each codec's own windows".to_owned(),
        same => format!("the same windows for all: {same}"),
    };
    writeln!(text, "## Text {}, {windows}\n", block.text)?;
    for (label, codec) in codec_legend(block) {
        writeln!(text, "- {label}: `{codec}`")?;
    }
    if !codec_legend(block).is_empty() {
        writeln!(text)?;
    }
    for sheet in block_sheets(report, block) {
        writeln!(text, "### {}\n", sheet.title)?;
        write_table(text, &sheet)?;
        writeln!(text)?;
        if !sheet.note.is_empty() {
            writeln!(text, "{}\n", sheet.note)?;
        }
    }
    Ok(())
}

fn write_table(text: &mut String, sheet: &TableSheet) -> std::fmt::Result {
    writeln!(text, "| {} |", sheet.header.join(" | "))?;
    writeln!(text, "|---|{}", "---:|".repeat(sheet.header.len() - 1))?;
    sheet.rows.iter().try_for_each(|row| writeln!(text, "| {} |", row.join(" | ")))
}
