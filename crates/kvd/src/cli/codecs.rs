//! `kvd codecs`: the presets, and what speaks for each.

use super::kernels::kernels_text;
use super::table::{TableColumn, render_table, wrap_text};
use super::{CliError, machine};
use clap::Args;
use kvd_bench::{AttendBench, BenchError, BenchResult, HeadShape, find_shape};
use kvd_codec::{CodecSpec, Preset, presets, resolve_spec};
use kvd_compute::Precision;
use kvd_core::{DType, Geometry, RopePairing, Side};
use serde::Serialize;
use std::fmt::Write;
use std::io::{IsTerminal, Write as _, stderr};

/// The shape for which bits and savings are given; they hardly depend on it.
pub(super) const GEOMETRY: Geometry = Geometry {
    layers: 1,
    kv_heads: 1,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};

/// Context lengths for which savings are given.
const CONTEXTS: [u32; 2] = [2048, 32_768];

/// The page of measurements: how it was made and every codec's loss stand in it.
const QUALITY_PAGE: &str = include_str!("../../../../docs/quality.md");

/// Cached tokens of the attention that is timed.
const SPEED_CONTEXT: u32 = 2048;

/// Turns of each codec, of which the median counts.
const SPEED_ROUNDS: usize = 5;

/// Pages that those turns rotate over.
const SPEED_BUFFER_BYTES: u64 = 16 << 20;

#[derive(Args)]
pub(super) struct CodecsArgs {
    /// Time attention with the presets that need a calibration too, which are fitted first: about
    /// a minute. The others are timed always.
    #[arg(long)]
    speed: bool,
    /// Spec, source and bits per value of every preset, instead of the comparison.
    #[arg(long, conflicts_with_all = ["speed", "json"])]
    wide: bool,
    /// Which CPU kernel multiplies each preset, by instruction set and precision.
    #[arg(long, conflicts_with_all = ["speed", "json", "wide"])]
    kernels: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A preset and its figures.
#[derive(Serialize)]
struct PresetRow {
    name: &'static str,
    spec: &'static str,
    source: &'static str,
    summary: &'static str,
    choose_when: &'static str,
    needs_calibration: bool,
    /// Mean of K and V without windows: by the spec, where it says it, else as measured.
    bits_per_value: f64,
    /// f16 bytes over bytes held, one sequence with its windows, by its tokens.
    saving: Vec<PresetSaving>,
    loss: PresetLoss,
    /// Processor time per token and KV head, nanoseconds; with --speed of every preset, without of
    /// those that need no calibration.
    attend_ns: Option<f64>,
}

#[derive(Clone, Copy, Serialize)]
struct PresetSaving {
    tokens: u32,
    ratio: f64,
}

/// Losses measured on the fixture, each codec under its own windows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct PresetLoss {
    bits_per_value: f64,
    perplexity_change_percent: f64,
    kl_nats: f64,
}

#[derive(Serialize)]
struct PresetReport {
    /// Where losses come from.
    measured: String,
    /// Where attention was timed, or why it was not.
    timed: String,
    presets: Vec<PresetRow>,
}

/// The presets, in the form that was asked for.
pub(super) fn codecs_text(args: &CodecsArgs) -> Result<String, CliError> {
    if args.wide {
        return Ok(wide_text());
    }
    if args.kernels {
        return kernels_text(presets().iter().map(|preset| preset.name));
    }
    let (measured, presets) = (measured_text(), preset_rows());
    let mut report = PresetReport { measured, timed: String::new(), presets };
    let timed: Vec<usize> = (0..report.presets.len())
        .filter(|index| args.speed || !report.presets[*index].needs_calibration)
        .collect();
    if stderr().is_terminal() {
        // Nobody may read it: that is no reason to stop.
        let _ = writeln!(stderr(), "{}", announced_text(timed.len()));
    }
    match time_presets(&mut report, &timed) {
        Err(error) if args.speed => return Err(error.into()),
        // The comparison stands without it.
        Err(error) => report.timed = format!("not timed here: {error}"),
        Ok(()) => {}
    }
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(anyhow::Error::from)?;
        return Ok(json + "\n");
    }
    Ok(comparison_text(&report))
}

fn preset_rows() -> Vec<PresetRow> {
    let row = |preset: &Preset| {
        let spec = resolve_spec(preset.name).expect("a test parses every preset");
        let loss = find_loss(QUALITY_PAGE, preset.name).expect("a test looks every preset up");
        let bits_per_value = implied_bits(&spec).unwrap_or(loss.bits_per_value);
        let saving =
            |tokens| PresetSaving { tokens, ratio: memory_saving(&spec, bits_per_value, tokens) };
        PresetRow {
            name: preset.name,
            spec: preset.spec_text,
            source: preset.source,
            summary: preset.summary,
            choose_when: preset.choose_when,
            needs_calibration: spec.needs_calibration(),
            bits_per_value,
            saving: CONTEXTS.map(saving).to_vec(),
            loss,
            attend_ns: None,
        }
    };
    presets().iter().map(row).collect()
}

/// Bits per value, mean of both sides; `None` where they depend on the data.
fn implied_bits(spec: &CodecSpec) -> Option<f64> {
    let [k, v] = Side::BOTH.map(|side| spec.side(side).implied_bits(&GEOMETRY, side).total_bits());
    Some((k? + v?) / 2.0)
}

/// f16 bytes over bytes held of one sequence: its first `sink` tokens, its last `recent` and the
/// block that those begin in are raw.
fn memory_saving(spec: &CodecSpec, bits_per_value: f64, tokens: u32) -> f64 {
    let block = GEOMETRY.block_tokens;
    let packed_end = tokens.saturating_sub(spec.recent) / block * block;
    let packed = f64::from(packed_end.saturating_sub(spec.sink));
    let (all, raw_bits) = (f64::from(tokens), 16.0);
    all * raw_bits / ((all - packed) * raw_bits + packed * bits_per_value)
}

/// The row of a codec in the page's first table.
fn find_loss(page: &str, name: &str) -> Option<PresetLoss> {
    let (_, table) = page.split_once("### Quality")?;
    let lines = table.lines().filter(|line| line.starts_with('|'));
    let mut rows = lines.map(|line| -> Vec<&str> {
        line.trim_matches(['|', ' ']).split('|').map(str::trim).collect()
    });
    let head = rows.next()?;
    let row = rows.find(|row| row.first() == Some(&name))?;
    let figure = |column: &str| -> Option<f64> {
        let index = head.iter().position(|cell| *cell == column)?;
        row.get(index)?.parse().ok()
    };
    Some(PresetLoss {
        bits_per_value: figure("bits/value")?,
        perplexity_change_percent: figure("ppl %")?,
        kl_nats: figure("KL nats")?,
    })
}

/// Where the losses come from, in the page's own words.
fn measured_text() -> String {
    let line = QUALITY_PAGE.lines().find_map(|line| line.strip_prefix("in "));
    let on = line.and_then(|line| line.split(". ").next()).unwrap_or("in docs/quality.md");
    format!("docs/quality.md, {on}")
}

/// The line that a person at a terminal reads before the table.
fn announced_text(timed: usize) -> String {
    format!("kvd: the table follows, once attention with {timed} of its codecs is timed")
}

/// Times attention with these presets.
fn time_presets(report: &mut PresetReport, timed: &[usize]) -> Result<(), BenchError> {
    let shape: HeadShape = find_shape("llama-3.1-8b").expect("a shape of that name");
    let bench = AttendBench {
        shape,
        codecs: timed.iter().map(|index| report.presets[*index].name.to_owned()).collect(),
        contexts: vec![SPEED_CONTEXT],
        batch: 1,
        ragged: false,
        query_tokens: 1,
        threads: vec![1],
        block_tokens: GEOMETRY.block_tokens,
        rounds: SPEED_ROUNDS,
        buffer_bytes: SPEED_BUFFER_BYTES,
        precision: Precision::Fast,
        instruction_sets: Vec::new(),
    };
    let BenchResult { machine, rows } = bench.measure_all()?;
    let mut apart: Vec<f64> = Vec::new();
    for (index, row) in timed.iter().zip(&rows) {
        report.presets[*index].attend_ns = Some(row.cpu_ns.median);
        apart.push(100.0 * (row.cpu_ns.upper_quartile / row.cpu_ns.best - 1.0));
    }
    apart.sort_by(f64::total_cmp);
    let set = rows.first().map_or("", |row| row.instruction_set);
    report.timed = format!(
        "{} ({set}, precision fast), one thread, median of {SPEED_ROUNDS} turns, from best to \
         upper quartile {:.0} % (half of the codecs less); {}",
        machine.processor,
        apart.get(apart.len() / 2).copied().unwrap_or_default(),
        machine::load_text(machine.cores),
    );
    Ok(())
}

/// The table for a terminal, and how to read it.
fn comparison_text(report: &PresetReport) -> String {
    let rows = &report.presets;
    let cells =
        |cell: &dyn Fn(&PresetRow) -> String| -> Vec<String> { rows.iter().map(cell).collect() };
    let ratio = |row: &PresetRow, index: usize| format!("{:.2}", row.saving[index].ratio);
    let calibration = |row: &PresetRow| if row.needs_calibration { "yes" } else { "no" }.to_owned();
    let mut columns = vec![
        TableColumn::of_text("codec", cells(&|row| row.name.to_owned())),
        TableColumn::of_numbers("x 2k", cells(&|row| ratio(row, 0))),
        TableColumn::of_numbers("x 32k", cells(&|row| ratio(row, 1))),
        TableColumn::of_numbers("ppl %", cells(&|row| percent_text(&row.loss))),
        TableColumn::of_numbers(
            "KL nats",
            cells(&|row| format!("{:.5}", row.loss.kl_nats.max(0.0))),
        ),
        TableColumn::of_text("calibrate", cells(&calibration)),
    ];
    let time =
        |row: &PresetRow| row.attend_ns.map_or_else(|| "-".to_owned(), |ns| format!("{ns:.0}"));
    columns.push(TableColumn::of_numbers("ns", cells(&time)));
    columns.push(TableColumn::of_text("choose it when", cells(&|row| row.choose_when.to_owned())));
    let mut text = render_table(&columns);
    let mut note = |note: &str| text.push_str(&wrap_text(note, "  "));
    note("");
    note(
        "Start with kivi-4. Once you can calibrate (kvd calibrate), take kvd-4, and kvd-2 where \
         memory is short.",
    );
    note(
        "x 2k, x 32k: f16 bytes over bytes held, one sequence of 2048 or 32768 tokens with its \
         windows, head size 128, without what the model takes once. With windows nothing is saved \
         below about 128 tokens.",
    );
    note(&format!(
        "ppl %, KL nats: what the codec changes in perplexity and in the next token's \
         distribution, measured on the built-in 4 M parameter model ({}). Measure yours: kvd eval \
         --model DIR.",
        report.measured
    ));
    note(&format!(
        "ns: attention per token and KV head over {SPEED_CONTEXT} tokens: {}.",
        report.timed
    ));
    if rows.iter().any(|row| row.attend_ns.is_none()) {
        note("-: is fitted first; --speed does that and times it, in about a minute.");
    }
    note("--wide has specs, sources and bits; --json all.");
    text
}

/// A change that rounds to nothing has no sign.
fn percent_text(loss: &PresetLoss) -> String {
    let percent = loss.perplexity_change_percent;
    format!("{:+.2}", if percent.abs() < 0.005 { 0.0 } else { percent })
}

/// Name, spec, stored bits, source and summary of every preset.
fn wide_text() -> String {
    let width = presets().iter().map(|preset| preset.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for preset in presets() {
        let spec = resolve_spec(preset.name).expect("a test parses every preset");
        let mut lines = vec![preset.summary.to_owned(), preset.spec_text.to_owned()];
        for side in Side::BOTH {
            let of_side = spec.side(side);
            let bits = match of_side.quantizer.target_bits() {
                Some(rate) => format!("about {rate}, everything counted, by its fit"),
                None => of_side.implied_bits(&GEOMETRY, side).to_string(),
            };
            lines.push(format!("bits/value of {side}: {bits}"));
        }
        lines.push(format!("source: {}", preset.source));
        for (index, line) in lines.iter().enumerate() {
            let name = if index == 0 { preset.name } else { "" };
            writeln!(text, "{name:width$}  {line}").expect("write to a string");
        }
        text.push('\n');
    }
    let Geometry { head_dim_k: dim, block_tokens: tokens, .. } = GEOMETRY;
    writeln!(text, "Bits of full pages of {tokens} tokens and head size {dim}, without windows.")
        .expect("write to a string");
    text
}

#[cfg(test)]
mod tests {
    use super::super::table::{COLUMNS, columns_of};
    use super::*;

    #[test]
    fn every_preset_is_listed_with_its_bits_and_source() {
        let table = wide_text();
        for preset in presets() {
            assert!(table.contains(preset.name) && table.contains(preset.source));
        }
        assert!(table.contains("bits/value of k: 4.000 codes + 1.000 scales + 0.031 header"));
        assert!(table.contains("bits/value of v: codes depend on the data"));
        assert!(table.contains("bits/value of k: about 2.35, everything counted"));
    }

    #[test]
    fn the_comparison_fits_a_terminal_with_speeds_too() {
        let mut report = PresetReport {
            measured: measured_text(),
            timed: String::new(),
            presets: preset_rows(),
        };
        let plain = comparison_text(&report);
        assert!(columns_of(&plain) <= COLUMNS, "{} columns:\n{plain}", columns_of(&plain));
        assert!(plain.contains("docs/quality.md") && plain.contains("kvd 0.1.0 on cpu"), "{plain}");
        for row in &mut report.presets {
            row.attend_ns = Some(4321.0);
        }
        report.timed = "a processor with a long name, one thread, busy ".repeat(4);
        let timed = comparison_text(&report);
        assert!(columns_of(&timed) <= COLUMNS, "{} columns:\n{timed}", columns_of(&timed));
        for preset in presets() {
            assert!(timed.contains(preset.choose_when), "{}", preset.name);
            assert!((5..=36).contains(&preset.choose_when.chars().count()), "{}", preset.name);
        }
    }

    #[test]
    fn losses_are_those_of_the_page_and_bits_near_what_specs_say() {
        for preset in presets() {
            let spec = resolve_spec(preset.name).unwrap();
            let loss = find_loss(QUALITY_PAGE, preset.name);
            let loss = loss.unwrap_or_else(|| panic!("docs/quality.md has no {}", preset.name));
            if let Some(bits) = implied_bits(&spec) {
                // Of the budget that a spec allows, what no coefficient needs is left.
                let left = bits - loss.bits_per_value;
                assert!((-0.02..0.03).contains(&left), "{}: {bits}, {loss:?}", preset.name);
            }
        }
        let page = "### Quality\n\n| codec | KL nats | bits/value | ppl % |\n|---|---|---|---|\n\
                    | a | 0.5 | 3.25 | -1.5 |\n";
        let found =
            PresetLoss { bits_per_value: 3.25, perplexity_change_percent: -1.5, kl_nats: 0.5 };
        assert_eq!(find_loss(page, "a"), Some(found));
        assert_eq!(find_loss(page, "b"), None);
    }

    /// Ratios that a daemon told by `DescribeSequence`.
    #[test]
    fn windows_and_open_blocks_are_counted() {
        let at = |name: &str, bits: f64, tokens| {
            memory_saving(&resolve_spec(name).unwrap(), bits, tokens)
        };
        assert_eq!(at("kivi-4", 5.031, 128), 1.0);
        for (name, bits, tokens, ratio) in [
            ("fp8", 8.047, 2048, 1.99),
            ("kivi-4", 5.031, 256, 1.52),
            ("kivi-4", 5.031, 2048, 2.80),
            ("kivi-4", 5.031, 32_768, 3.15),
            ("vecinfer-2", 2.031, 2048, 5.51),
            ("kvd-2", 2.03, 256, 1.49),
            ("kvd-2", 2.03, 2048, 5.13),
        ] {
            let saving = at(name, bits, tokens);
            assert!((saving - ratio).abs() < 0.02, "{name} {tokens}: {saving}");
        }
    }
}
