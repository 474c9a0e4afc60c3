//! The report for people.

use super::measure::Done;
use serde_json::Value;
use std::fmt::Write;

/// Microseconds of a `{median, best}`.
fn micros(seconds: &Value) -> Option<[f64; 2]> {
    Some([seconds["median"].as_f64()? * 1e6, seconds["best"].as_f64()? * 1e6])
}

/// The fastest backend of PyTorch, by its median.
fn best_of_torch(torch: &Value) -> Option<(&str, f64)> {
    let backends = torch.as_object()?.iter();
    let timed = backends.filter_map(|(name, time)| Some((name.as_str(), micros(time)?[0])));
    timed.min_by(|a, b| a.1.total_cmp(&b.1))
}

/// The report: steps, baselines, and every codec against both.
pub(super) fn markdown(device: &str, date: &str, steps: &[Done], bench: &Value) -> String {
    let mut text = format!("# {device}, {date}\n\nWritten by `xtask gpu run`.\n\n");
    text.push_str("| step | outcome | seconds |\n|---|---|---|\n");
    for Done { name, outcome, seconds, .. } in steps {
        let outcome = outcome.replace('|', "/");
        let _ = writeln!(text, "| {name} | {outcome} | {seconds:.1} |");
    }
    if bench.is_null() {
        text.push_str("\nThe benchmark gave no figures.\n");
        return text;
    }
    let number = |name: &str| bench[name].as_u64().unwrap_or(0);
    let _ = writeln!(
        text,
        "\nOne layer and decode step: {} tokens, {} KV heads of {} channels, {} query heads each; \
         one process; medians of events.\n",
        number("tokens"),
        number("heads"),
        number("dim"),
        number("group")
    );
    let copy = bench["copy_bytes_per_second"].as_f64();
    if let Some(copy) = copy {
        let _ =
            writeln!(text, "Copy within the device: {:.0} GB/s read and written.\n", copy / 1e9);
    }
    match bench["torch"].as_str() {
        Some(skipped) => {
            let _ = writeln!(text, "PyTorch: {skipped}.\n");
        }
        None => torch_table(&mut text, &bench["torch"]),
    }
    codec_table(&mut text, bench, copy);
    text
}

fn torch_table(text: &mut String, torch: &Value) {
    let version = torch["version"].as_str().unwrap_or("?");
    let _ = writeln!(
        text,
        "| FP16 attention of PyTorch {version} | us, median | best |\n|---|---|---|"
    );
    for (name, time) in torch.as_object().into_iter().flatten() {
        if let Some([median, best]) = micros(time) {
            let _ = writeln!(text, "| {name} | {median:.1} | {best:.1} |");
        } else if name != "version" {
            let _ = writeln!(text, "| {name} | {} | |", time.as_str().unwrap_or("?"));
        }
    }
    text.push('\n');
}

fn codec_table(text: &mut String, bench: &Value, copy: Option<f64>) {
    let torch = best_of_torch(&bench["torch"]);
    let codecs = bench["codecs"].as_array();
    let median = |row: &Value| micros(&row["seconds"]).map(|[median, _]| median);
    let raw = codecs.into_iter().flatten().find(|row| row["codec"] == "raw").and_then(median);
    text.push_str(
        "| codec | us, median | best | MB of pages | GB/s | of the copy | x PyTorch | x raw | \
         registers | blocks per SM |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let ratio = |over: Option<f64>, under: f64| {
        over.map_or("–".to_owned(), |over| format!("{:.2}", over / under))
    };
    for row in codecs.into_iter().flatten() {
        let codec = row["codec"].as_str().unwrap_or("?");
        let bytes = row["page_bytes"].as_f64().unwrap_or(0.0);
        let Some([median, best]) = micros(&row["seconds"]) else {
            let _ = writeln!(text, "| {codec} | not measured | | {:.1} | | | | | | |", bytes / 1e6);
            continue;
        };
        let speed = bytes / median * 1e6;
        let of_copy =
            copy.map_or("–".to_owned(), |copy| format!("{:.0} %", 100.0 * speed / copy));
        let _ = writeln!(
            text,
            "| {codec} | {median:.1} | {best:.1} | {:.1} | {:.0} | {of_copy} | {} | {} | {} | {} |",
            bytes / 1e6,
            speed / 1e9,
            ratio(torch.map(|torch| torch.1), median),
            ratio(raw, median),
            row["registers"],
            row["blocks_per_sm"]
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn step(outcome: &str) -> Done {
        let outcome = outcome.to_owned();
        Done { name: "conformance", outcome, seconds: 1.25, output: String::new() }
    }

    #[test]
    fn figures_stand_against_the_copy_and_the_best_of_pytorch() {
        let time = |us: f64| json!({ "median": us / 1e6, "best": us / 2e6 });
        let bench = json!({
            "device": "G", "tokens": 131072, "heads": 8, "group": 4, "dim": 128,
            "copy_bytes_per_second": 4e12,
            "torch": { "version": "2.9", "flash_attention": time(200.0), "math": time(900.0),
                       "cudnn_attention": "refused: no plan" },
            "codecs": [
                { "codec": "raw", "seconds": time(160.0), "page_bytes": 536e6, "registers": 72,
                  "blocks_per_sm": 4 },
                { "codec": "kivi-2", "seconds": time(40.0), "page_bytes": 100e6, "registers": 74,
                  "blocks_per_sm": 4 },
            ],
        });
        let text = markdown("G, 580", "2026-11-22", &[step("passed")], &bench);
        for line in [
            "# G, 580, 2026-11-22",
            "| conformance | passed | 1.2 |",
            "Copy within the device: 4000 GB/s read and written.",
            "| flash_attention | 200.0 | 100.0 |",
            "| cudnn_attention | refused: no plan | |",
            "| raw | 160.0 | 80.0 | 536.0 | 3350 | 84 % | 1.25 | 1.00 | 72 | 4 |",
            "| kivi-2 | 40.0 | 20.0 | 100.0 | 2500 | 62 % | 5.00 | 4.00 | 74 | 4 |",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n in \n{text}");
        }
    }

    #[test]
    fn what_was_not_measured_is_said_and_not_made_up() {
        let text = markdown("G", "d", &[step("skipped because a|b")], &Value::Null);
        assert!(text.contains("gave no figures") && text.contains("skipped because a/b"), "{text}");
        let bench = json!({ "torch": "skipped because No module named 'torch'",
                            "codecs": [{ "codec": "raw", "seconds": null, "page_bytes": 1e6 }] });
        let text = markdown("G", "d", &[], &bench);
        assert!(text.contains("PyTorch: skipped because No module"), "{text}");
        assert!(text.contains("| raw | not measured |") && !text.contains("NaN"), "{text}");
    }
}
