//! The report for people.

use super::report::{CodecReport, DemoReport, GeneratedText};
use super::restart::RestartReport;
use crate::eval::wrap_paragraph;
use crate::measure::DeviceMeans;
use crate::table::{COLUMNS, format_number, format_table, wrap_lines};
use std::io::{self, Write};

/// Writes the report as text.
pub(crate) fn print_report(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    print_heading(report, out)?;
    print_texts(report, out)?;
    print_quality(report, out)?;
    print_storage(report, out)?;
    print_speed(report, out)?;
    if let Some(restart) = &report.restart {
        print_restart(restart, out)?;
    }
    writeln!(out, "\n{:.0} s in all.", report.seconds)
}

fn print_restart(restart: &RestartReport, out: &mut dyn Write) -> io::Result<()> {
    let RestartReport { prefix_tokens, milliseconds, tokens, same_tokens } = restart;
    let text = format!(
        "A daemon with a disk was killed and started again: {prefix_tokens} tokens of the prompt \
         came back in {milliseconds:.1} ms, and the model goes on with "
    );
    let text = if same_tokens == tokens {
        format!("{text}the same {tokens} tokens.")
    } else {
        format!("{text}{tokens} tokens, the first {same_tokens} of them the same.")
    };
    writeln!(out)?;
    wrap_lines(&text, COLUMNS).iter().try_for_each(|line| writeln!(out, "{line}"))
}

fn print_heading(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
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
        let label = codec_label(report, run);
        if label != run.codec {
            let text = format!("{label} is {}", run.codec);
            wrap_lines(&text, COLUMNS).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
    }
    Ok(())
}

/// The name of a codec in the tables: its own, or a number for a spec too long for a column.
fn codec_label(report: &DemoReport, run: &CodecReport) -> String {
    const LONGEST: usize = 16;
    if run.codec.len() <= LONGEST {
        return run.codec.clone();
    }
    let index = report.codecs.iter().position(|other| other.codec == run.codec);
    format!("codec {}", index.unwrap_or_default() + 1)
}

fn print_texts(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let setup = &report.setup;
    writeln!(out, "\nA held-out prompt of {} tokens ends with", setup.prompt_tokens)?;
    print_quoted(&setup.prompt_tail, out)?;
    writeln!(out, "and without kvd the model goes on with {} tokens:", setup.new_tokens)?;
    print_quoted(&report.without_kvd.generation.text, out)?;
    for run in &report.codecs {
        let GeneratedText { same_tokens, tokens, text, .. } = &run.generation;
        if run.generation.is_same() {
            writeln!(out, "{}: the same {same_tokens} tokens.", codec_label(report, run))?;
        } else {
            let (label, all) = (codec_label(report, run), tokens.len());
            writeln!(out, "{label}: the same for {same_tokens} of {all} tokens:")?;
            print_quoted(text, out)?;
        }
    }
    Ok(())
}

fn print_quoted(text: &str, out: &mut dyn Write) -> io::Result<()> {
    for line in text.trim_matches('\n').lines() {
        writeln!(out, "{}", format!("  | {line}").trim_end())?;
    }
    Ok(())
}

fn print_quality(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
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
        format_number(quality.perplexity, 4),
        "-".to_owned(),
        "-".to_owned(),
        "-".to_owned(),
    ]];
    rows.extend(report.codecs.iter().map(|run| {
        vec![
            codec_label(report, run),
            format_number(run.storage.bits_per_value, 2),
            format_number(run.storage.ratio, 2),
            format_number(run.attention_error.codec, 4),
            format!("{:.1e}", run.attention_error.kernel),
            format_number(run.quality.perplexity, 4),
            format!("{:+.2}", run.quality.perplexity_change_percent),
            format_number(run.quality.kl_nats, 5),
            format_number(run.quality.top1_agreement_percent, 2),
        ]
    }));
    let setup = &report.setup;
    writeln!(
        out,
        "\nQuality on {} of {} tokens in steps of {} ({} tokens scored):\n",
        count_passages(setup.passages),
        setup.passage_tokens,
        setup.chunk_tokens,
        quality.scored_tokens
    )?;
    write!(out, "{}", format_table(&header, &rows))?;
    let note = window_note(&setup.windows, report.codecs.len());
    write!(out, "\n{note}")?;
    writeln!(
        out,
        "  bits/value: packed blocks as stored, every byte counted. ratio: f16 bytes over bytes \
         held,\n  windows and open blocks included. attn error: what the codec changes in \
         attention outputs;\n  kernel error: what the daemon's arithmetic adds (both relative, \
         against f64)."
    )
}

fn count_passages(passages: usize) -> String {
    let plural = if passages == 1 { "" } else { "s" };
    format!("{passages} held-out passage{plural}")
}

/// A line, or none where there is nothing to compare.
fn window_note(windows: &str, codecs: usize) -> String {
    match (windows, codecs) {
        ("own", 0 | 1) => String::new(),
        ("own", _) => {
            "  Windows differ between codecs, so the rows are not directly comparable.\n".to_owned()
        }
        _ => format!("  The same windows for every codec, in the stored precision: {windows}.\n"),
    }
}

fn print_storage(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
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
        let mut cells = vec![codec_label(report, run)];
        cells.extend(parts.map(|bits| format_number(bits, 3)));
        cells.push(format_number(stored.raw_values_percent, 1));
        cells.push(format!("{:.2}", stored.model_bytes as f64 / 1024.0));
        cells
    };
    let rows: Vec<_> = report.codecs.iter().map(row).collect();
    writeln!(out, "\nWhat the bits per value are (K and V apart, then both by part):\n")?;
    write!(out, "{}", format_table(&header, &rows))?;
    writeln!(
        out,
        "\n  raw values: in windows and open blocks. model KiB: calibration and Huffman tables, \
         held once."
    )?;
    report.splits.iter().try_for_each(|split| write!(out, "{}", wrap_paragraph(&split.to_string())))
}

fn print_speed(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let header =
        ["codec", "tokens/s", "store us", "p99", "on device", "attend us", "p99", "on device"];
    let dash = || "-".to_owned();
    let reference = format_number(report.without_kvd.generation.tokens_per_second, 1);
    let mut rows = vec![vec!["without kvd".to_owned(), reference]];
    rows[0].extend(std::iter::repeat_with(dash).take(header.len() - 2));
    rows.extend(report.codecs.iter().map(|run| {
        let (store, attend) = (run.decode.store, run.decode.attend);
        let us = |us: f64| format!("{us:.0}");
        let device = |mean: fn(DeviceMeans) -> f64| {
            run.decode_device.map_or_else(dash, |means| us(mean(means)))
        };
        vec![
            codec_label(report, run),
            format_number(run.generation.tokens_per_second, 1),
            us(store.mean_us),
            us(store.p99_us),
            device(|means| means.store_us),
            us(attend.mean_us),
            us(attend.p99_us),
            device(|means| means.attend_us),
        ]
    }));
    writeln!(out, "\nSpeed of one-token steps, one layer per call:\n")?;
    write!(out, "{}", format_table(&header, &rows))?;
    writeln!(
        out,
        "\n  us: mean of all calls and the 99th percentile, as the client sees them over loopback \
         gRPC.\n  on device: mean of the same calls, from the daemon's histograms; the rest is \
         transport\n  and waiting. Of one run: on a busy machine small differences are noise."
    )?;
    print_models(report, out)
}

/// Where each codec is in the daemon's metrics.
fn print_models(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    let name = |run: &CodecReport| format!("{} is {}", codec_label(report, run), run.model);
    let names: Vec<_> = report.codecs.iter().map(name).collect();
    let text = format!("In the daemon's metrics the model of {}.", names.join(", "));
    writeln!(out)?;
    wrap_lines(&text, COLUMNS).iter().try_for_each(|line| writeln!(out, "{line}"))
}

#[cfg(test)]
mod tests {
    use super::super::report::{DemoSetup, ReferenceReport};
    use super::*;
    use crate::measure::{CallSummaries, LatencySummary};
    use crate::model_report::ModelReport;

    /// Figures as long as they get.
    fn report() -> DemoReport {
        let generation = GeneratedText {
            text: "fn main() {\n    let words = 3;".to_owned(),
            tokens: vec![1; 64],
            same_tokens: 38,
            tokens_per_second: 1234.5,
        };
        let quality = kvd_engine::TextQuality {
            scored_tokens: 3584,
            perplexity: 1234.5678,
            perplexity_change_percent: -123.45,
            kl_nats: 12.345_67,
            top1_agreement_percent: 100.0,
            ..kvd_engine::TextQuality::default()
        };
        let (mean_us, p99_us) = (12_345.0, 123_456.0);
        let latency = LatencySummary { calls: 9, mean_us, p50_us: 1.0, p99_us };
        let calls = CallSummaries { store: latency, attend: latency };
        let spec = "k=mean+qpca/grid(rate=2.35)/huffman; v=mean+gain+pca/grid(rate=1.75)/huffman";
        let codec = |codec: &str| CodecReport {
            codec: codec.to_owned(),
            codec_spec: codec.to_owned(),
            model: "kv-tiny-b.vecinfer-2-reg".to_owned(),
            storage: crate::measure::StorageRatios {
                bits_per_value: 16.03,
                bits_per_key_value: 16.031,
                bits_per_value_value: 16.031,
                code_bits: 16.0,
                scale_bits: 1.531,
                raw_values_percent: 100.0,
                model_bytes: 123 << 20,
                ratio: 12.34,
                ..Default::default()
            },
            attention_error: crate::measure::AttentionError {
                codec: 1.2345,
                kernel: 1.2e-7,
                ..Default::default()
            },
            quality,
            generation: generation.clone(),
            decode: calls,
            decode_device: Some(DeviceMeans { store_us: 12_345.0, attend_us: 12_345.0 }),
            prefill: calls,
            daemon: Some(calls),
            calibration_seconds: 123.4,
        };
        DemoReport {
            model: ModelReport::default(),
            setup: DemoSetup::default(),
            without_kvd: ReferenceReport { quality, generation: generation.clone() },
            codecs: ["raw", "vecinfer-2-reg", "kvd-1.5", "kivi-4", spec].map(codec).into(),
            splits: Vec::new(),
            restart: Some(RestartReport {
                prefix_tokens: 320,
                milliseconds: 4.04,
                tokens: 64,
                same_tokens: 64,
            }),
            seconds: 176.0,
        }
    }

    #[test]
    fn one_codec_of_one_passage_is_told_in_the_singular_and_compared_with_none() {
        let mut one = report();
        one.codecs.truncate(1);
        (one.setup.passages, one.setup.windows) = (1, "own".to_owned());
        let print = |report: &DemoReport| {
            let mut text = Vec::new();
            print_report(report, &mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        let text = print(&one);
        assert!(text.contains("on 1 held-out passage of"), "{text}");
        assert!(!text.contains("not directly comparable"), "{text}");
        let mut several = report();
        (several.setup.passages, several.setup.windows) = (2, "own".to_owned());
        let text = print(&several);
        assert!(text.contains("on 2 held-out passages of"), "{text}");
        assert!(text.contains("\n  Windows differ between codecs"), "{text}");
    }

    #[test]
    fn every_table_fits_a_terminal() {
        let mut text = Vec::new();
        print_report(&report(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= COLUMNS, "{longest} columns:\n{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("vecinfer-2-reg is kv-tiny-b"), "{text}");
        let restart = "320 tokens of the prompt came back in 4.0 ms, and the model goes on with";
        assert!(words.contains(&format!("{restart} the same 64 tokens.")), "{text}");
    }
}
