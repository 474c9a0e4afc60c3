//! The report for people.

use super::report::{CodecReport, DemoReport, Generation};
use crate::table::{number, table};
use std::io::{self, Write};

/// Writes the report as text.
pub(crate) fn print(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    heading(report, out)?;
    texts(report, out)?;
    quality(report, out)?;
    storage(report, out)?;
    speed(report, out)?;
    writeln!(out, "\n{:.0} s in all.", report.seconds)
}

fn heading(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let (model, setup) = (&report.model, &report.setup);
    writeln!(
        out,
        "Model {}: {:.1} M parameters, {} layers, {} query / {} KV heads of {} channels.",
        model.name,
        model.parameters as f64 / 1e6,
        model.layers,
        model.query_heads,
        model.kv_heads,
        model.head_dim
    )?;
    writeln!(out, "{}", model.note)?;
    writeln!(
        out,
        "Every attention of every layer went through kvd {} at {}:\n{}, blocks of {} tokens.",
        setup.daemon_version, setup.endpoint, setup.device, setup.block_tokens
    )?;
    for run in &report.codecs {
        let label = label(report, run);
        if label != run.codec {
            writeln!(out, "{label} is {}", run.codec)?;
        }
    }
    Ok(())
}

/// What a codec is called here: its name, or a number for a spec too long for a column.
fn label(report: &DemoReport, run: &CodecReport) -> String {
    const LONGEST: usize = 16;
    if run.codec.len() <= LONGEST {
        return run.codec.clone();
    }
    let index = report.codecs.iter().position(|other| other.codec == run.codec);
    format!("codec {}", index.unwrap_or_default() + 1)
}

fn texts(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let setup = &report.setup;
    writeln!(out, "\nA held-out prompt of {} tokens ends with", setup.prompt_tokens)?;
    quoted(&setup.prompt_tail, out)?;
    writeln!(out, "and without kvd the model goes on with {} tokens:", setup.new_tokens)?;
    quoted(&report.without_kvd.generation.text, out)?;
    for run in &report.codecs {
        let Generation { same_tokens, tokens, text, .. } = &run.generation;
        if run.generation.same() {
            writeln!(out, "{}: the same {same_tokens} tokens.", label(report, run))?;
        } else {
            let (label, all) = (label(report, run), tokens.len());
            writeln!(out, "{label}: the same for {same_tokens} of {all} tokens:")?;
            quoted(text, out)?;
        }
    }
    Ok(())
}

fn quoted(text: &str, out: &mut dyn Write) -> io::Result<()> {
    for line in text.trim_matches('\n').lines() {
        writeln!(out, "{}", format!("  | {line}").trim_end())?;
    }
    Ok(())
}

fn quality(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let header = [
        "codec",
        "bits/value",
        "ratio",
        "attn error",
        "kernel error",
        "ppl",
        "ppl %",
        "KL nats",
        "top-1 %",
    ];
    let quality = &report.without_kvd.quality;
    let mut rows = vec![vec![
        "without kvd".to_owned(),
        "16.00".to_owned(),
        "1.00".to_owned(),
        "-".to_owned(),
        "-".to_owned(),
        number(quality.perplexity, 4),
        "-".to_owned(),
        "-".to_owned(),
        "-".to_owned(),
    ]];
    rows.extend(report.codecs.iter().map(|run| {
        vec![
            label(report, run),
            number(run.storage.bits_per_value, 2),
            number(run.storage.ratio, 2),
            number(run.attention_error.codec, 4),
            format!("{:.1e}", run.attention_error.kernel),
            number(run.quality.perplexity, 4),
            format!("{:+.2}", run.quality.perplexity_change_percent),
            number(run.quality.kl_nats, 5),
            number(run.quality.top1_agreement_percent, 2),
        ]
    }));
    let setup = &report.setup;
    writeln!(
        out,
        "\nQuality on {} held-out passages of {} tokens in steps of {} ({} tokens scored):\n",
        setup.passages, setup.passage_tokens, setup.chunk_tokens, quality.scored_tokens
    )?;
    write!(out, "{}", table(&header, &rows))?;
    writeln!(out, "\n  {}", windows(&setup.windows))?;
    writeln!(
        out,
        "  bits/value: packed blocks as stored, every byte counted. ratio: f16 bytes over bytes \
         held,\n  windows and open blocks included. attn error: what the codec changes in \
         attention outputs;\n  kernel error: what the daemon's arithmetic adds (both relative, \
         against f64)."
    )
}

fn windows(windows: &str) -> String {
    if windows == "own" {
        return "Every codec has windows of its own: what wider ones gain is no merit of a codec."
            .to_owned();
    }
    format!("The same windows for every codec, in the stored precision: {windows}.")
}

fn storage(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let header =
        ["codec", "K", "V", "codes", "scales", "offsets", "headers", "raw values %", "model KiB"];
    let row = |run: &CodecReport| {
        let stored = &run.storage;
        let parts = [
            stored.bits_per_key_value,
            stored.bits_per_value_value,
            stored.code_bits,
            stored.scale_bits,
            stored.offset_bits,
            stored.header_bits,
        ];
        let mut cells = vec![label(report, run)];
        cells.extend(parts.map(|bits| number(bits, 3)));
        cells.push(number(stored.raw_values_percent, 1));
        cells.push(format!("{:.2}", stored.model_bytes as f64 / 1024.0));
        cells
    };
    let rows: Vec<_> = report.codecs.iter().map(row).collect();
    writeln!(out, "\nWhat the bits per value are (K and V apart, then both by part):\n")?;
    write!(out, "{}", table(&header, &rows))?;
    writeln!(
        out,
        "\n  raw values: in windows and open blocks. model KiB: calibration and Huffman tables, \
         held once."
    )
}

fn speed(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let header = ["codec", "tokens/s", "store p50", "store p99", "attend p50", "attend p99"];
    let dash = || "-".to_owned();
    let reference = number(report.without_kvd.generation.tokens_per_second, 1);
    let mut rows = vec![vec!["without kvd".to_owned(), reference, dash(), dash(), dash(), dash()]];
    rows.extend(report.codecs.iter().map(|run| {
        let (store, attend) = (run.decode.store, run.decode.attend);
        let mut cells = vec![label(report, run), number(run.generation.tokens_per_second, 1)];
        cells.extend(
            [store.p50_us, store.p99_us, attend.p50_us, attend.p99_us]
                .map(|us| format!("{us:.0} us")),
        );
        cells
    }));
    writeln!(out, "\nSpeed of one-token steps, one layer per call, seen by the client:\n")?;
    write!(out, "{}", table(&header, &rows))?;
    daemon(report, out)
}

/// What the daemon says of itself, when somebody gave its metrics.
fn daemon(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let row = |run: &CodecReport| {
        let calls = run.daemon?;
        let times =
            [calls.store.p50_us, calls.store.p99_us, calls.attend.p50_us, calls.attend.p99_us];
        let mut cells = vec![label(report, run), run.model.clone()];
        cells.extend(times.map(|us| format!("{us:.0} us")));
        Some(cells)
    };
    let rows: Vec<_> = report.codecs.iter().filter_map(row).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let header =
        ["codec", "model in the metrics", "store p50", "store p99", "attend p50", "attend p99"];
    writeln!(out, "\nDevice time of all calls, from the daemon's histograms:\n")?;
    write!(out, "{}", table(&header, &rows))
}
