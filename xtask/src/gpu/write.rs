//! The report for people.

use super::kept::{KeptReport, RunSubject, StepOutcome};
use serde_json::Value;
use std::fmt::Write;

/// Note for kernels that reach a goal of stores by themselves.
const NOT_A_STORE: &str = "not shown: no client gets this";
/// Stands where there is no figure.
const NONE: &str = "–";
/// How many times faster than the best FP16 attention of the run a codec is meant to be.
const GOALS: [(&str, f64); 5] =
    [("kivi-4", 2.6), ("kivi-2", 3.7), ("vecinfer-2", 4.8), ("kvcomp", 2.5), ("kvd-2", 3.0)];
/// How many bytes of f16 rows a store kernel is meant to take per second.
const STORE_GOALS: [(&str, f64); 2] = [("kivi-4", 2e12), ("kvd-2", 150e9)];
/// Share of the run's read bandwidth that raw rows are meant to reach.
const RAW_GOAL: f64 = 0.88;

/// Microseconds of a `{median, best}`.
fn micros(seconds: &Value) -> Option<[f64; 2]> {
    Some([seconds["median"].as_f64()? * 1e6, seconds["best"].as_f64()? * 1e6])
}

fn rows<'a>(of: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    of[name].as_array().into_iter().flatten()
}

/// The median of a codec, microseconds.
fn median_of(workload: &Value, codec: &str) -> Option<f64> {
    let row = rows(workload, "codecs").find(|row| row["codec"] == codec)?;
    micros(&row["seconds"]).map(|[median, _]| median)
}

/// The fastest FP16 attention of a workload by its median: others' and rows as they came.
fn best_f16(workload: &Value) -> Option<(&str, f64)> {
    let others = workload["baselines"].as_object().into_iter().flatten();
    let others = others.filter_map(|(name, time)| Some((name.as_str(), micros(time)?[0])));
    let own = median_of(workload, "raw").map(|median| ("raw", median));
    others.chain(own).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Bytes per second that the run's own kernel or copy reached.
fn bandwidth(bench: &Value, of: &str) -> Option<f64> {
    rows(bench, "bandwidth").find(|row| row["of"] == of)?["bytes_per_second"].as_f64()
}

/// The report: steps, and every codec against what the run itself and others reach.
pub(super) fn markdown(kept: &KeptReport) -> String {
    let KeptReport { of: RunSubject { device, date, pack }, steps, bench, .. } = kept;
    let commit = pack["commit"].as_str().unwrap_or("unknown");
    let mut text =
        format!("# {device}, {date}\n\nWritten by `xtask gpu run`, commit {commit}.\n\n");
    text.push_str("| step | outcome | seconds |\n|---|---|---|\n");
    for StepOutcome { name, outcome, seconds, .. } in steps {
        let outcome = outcome.replace('|', "/");
        let _ = writeln!(text, "| {name} | {outcome} | {seconds:.1} |");
    }
    if bench.is_null() {
        text.push_str("\nThe benchmark gave no figures.\n");
    } else {
        measured(&mut text, bench);
    }
    daemon_store_table(&mut text, &kept.daemon_stores);
    if !kept.shapes.is_null() {
        check_list(&mut text, &kept.shapes);
    }
    if !bench.is_null() {
        goal_table(&mut text, bench, &kept.daemon_stores);
    }
    text
}

/// Writes the figures of the benchmark.
fn measured(text: &mut String, bench: &Value) {
    if bench["complete"] == false {
        text.push_str("\n**The benchmark did not come to its end**: this is what it had.\n");
    }
    let number = |name: &str| bench[name].as_u64().unwrap_or(0);
    let _ = writeln!(
        text,
        "\nOne layer, launched as `kvd plan` has it for {}. {} query heads per KV head, {} \
         channels. Medians of {} graphs of {} launches each, between two events; pages are read \
         from memory that no launch before has left in the L2 cache. FP16 attention of others is \
         timed alike in the same process. Rows are noise: entropy-coded pages are larger than the \
         plan's and than those of a model.\n",
        bench["planned_for"].as_str().unwrap_or("?"),
        number("group"),
        number("dim"),
        number("rounds"),
        number("launches"),
    );
    for row in rows(bench, "bandwidth") {
        let of = row["of"].as_str().unwrap_or("?");
        let _ = match row["bytes_per_second"].as_f64() {
            Some(speed) => writeln!(text, "- {of}: {:.0} GB/s", speed / 1e9),
            None => writeln!(text, "- {of}: {}", reason(row)),
        };
    }
    for workload in rows(bench, "workloads") {
        let _ = writeln!(
            text,
            "\n## {} tokens, {} sequences, {} KV heads",
            workload["tokens"], workload["batch"], workload["heads"]
        );
        baseline_table(text, &workload["baselines"]);
        codec_table(text, bench, workload);
    }
    store_table(text, bench);
}

/// Why a row has no figures.
fn reason(row: &Value) -> String {
    row["error"].as_str().unwrap_or("not measured").replace(['|', '\n'], "/")
}

fn baseline_table(text: &mut String, baselines: &Value) {
    if let Some(skipped) = baselines.as_str() {
        let _ = writeln!(text, "\nFP16 attention of others: {skipped}.");
        return;
    }
    text.push_str("\n| FP16 attention of others | us, median | best |\n|---|---|---|\n");
    for (name, time) in baselines.as_object().into_iter().flatten() {
        let _ = match micros(time) {
            Some([median, best]) => {
                // The host's time may be in it.
                let how = if time["graph"] == false { ", no graph" } else { "" };
                writeln!(text, "| {name}{how} | {median:.1} | {best:.1} |")
            }
            None => {
                let reason = time.as_str().unwrap_or("?").replace('|', "/");
                writeln!(text, "| {name} | {reason} | |")
            }
        };
    }
}

/// A share in percent, or nothing.
fn percent(part: Option<f64>) -> String {
    part.map_or(NONE.to_owned(), |part| format!("{:.0} %", 100.0 * part))
}

fn codec_table(text: &mut String, bench: &Value, workload: &Value) {
    let read = bandwidth(bench, "read");
    let best = best_f16(workload);
    if let Some((name, _)) = best {
        let _ = writeln!(text, "\nThe fastest FP16 attention, `x f16` of which is 1: {name}.");
    }
    text.push_str(
        "\n| codec | us, median | best | MB of pages | GB/s | of the read bandwidth | x f16 \
         | registers | blocks per SM, planned |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows(workload, "codecs") {
        let codec = row["codec"].as_str().unwrap_or("?");
        let Some([median, fastest]) = micros(&row["seconds"]) else {
            let _ = writeln!(text, "| {codec} | {} | | | | | | | |", reason(row));
            continue;
        };
        let bytes = row["page_bytes"].as_f64().unwrap_or(0.0);
        let speed = bytes / median * 1e6;
        let _ = writeln!(
            text,
            "| {codec} | {median:.1} | {fastest:.1} | {:.1} | {:.0} | {} | {} | {} | {}, {} |",
            bytes / 1e6,
            speed / 1e9,
            percent(read.map(|read| speed / read)),
            best.map_or(NONE.to_owned(), |(_, best)| format!("{:.2}", best / median)),
            row["registers"],
            row["blocks_per_sm"],
            row["plan"]["blocks_per_sm"],
        );
    }
}

/// Bytes of f16 rows that a store took per second.
fn store_speed(row: &Value) -> Option<f64> {
    Some(row["f16_bytes"].as_f64()? / row["seconds"]["median"].as_f64()?)
}

fn store_table(text: &mut String, bench: &Value) {
    text.push_str(
        "\n## Stores\n\nKernels alone: from rows in the pool to pages in scratch memory, without \
         the copies to their slots and without the block in sixteen that a daemon's store also \
         copies to the host, encodes there and measures. No client gets this.\n\n\
         | codec, kernels alone | us, median | best | MB of f16 rows | TB/s of f16 | thread \
         blocks |\n\
         |---|---|---|---|---|---|\n",
    );
    for row in rows(bench, "stores") {
        let codec = row["codec"].as_str().unwrap_or("?");
        let (Some([median, best]), Some(speed)) = (micros(&row["seconds"]), store_speed(row))
        else {
            let _ = writeln!(text, "| {codec} | {} | | | | |", reason(row));
            continue;
        };
        let _ = writeln!(
            text,
            "| {codec} | {median:.1} | {best:.1} | {:.1} | {:.3} | {} |",
            row["f16_bytes"].as_f64().unwrap_or(0.0) / 1e6,
            speed / 1e12,
            row["thread_blocks"]
        );
    }
}

/// Stores of whole daemons, which the daemon's step has timed.
fn daemon_store_table(text: &mut String, stores: &Value) {
    let stores = stores.as_array().map(Vec::as_slice).unwrap_or_default();
    if stores.is_empty() {
        return;
    }
    text.push_str(
        "\n## Stores of the daemon\n\nOf a worker through the packed daemon, from its call to the \
         answer: all that a client waits for.\n\n\
         | codec | rows in | us, median | best | MB of f16 rows | TB/s of f16 |\n\
         |---|---|---|---|---|---|\n",
    );
    for row in stores {
        let codec = row["codec"].as_str().unwrap_or("?");
        let (Some([median, best]), Some(speed)) = (micros(&row["seconds"]), store_speed(row))
        else {
            continue;
        };
        let _ = writeln!(
            text,
            "| {codec} | {} | {median:.1} | {best:.1} | {:.1} | {:.3} |",
            row["rows_in"].as_str().unwrap_or("?"),
            row["f16_bytes"].as_f64().unwrap_or(0.0) / 1e6,
            speed / 1e12,
        );
    }
}

/// Shapes that were launched for their outputs alone, and those of them that were wrong.
fn check_list(text: &mut String, shapes: &Value) {
    let (wrong, right): (Vec<_>, Vec<_>) =
        rows(shapes, "checks").partition(|row| row["output_error"].is_null());
    let all = if shapes["complete"] == false { ", not all of them" } else { "" };
    let _ = writeln!(
        text,
        "\n## Other shapes\n\n{} launched once{all}, for outputs and pages: {} as on the CPU \
         lane.",
        wrong.len() + right.len(),
        right.len()
    );
    for row in wrong {
        let codec = row["codec"].as_str().unwrap_or("?");
        let _ = writeln!(
            text,
            "- {codec}, {} channels, {} query heads, {}: {}",
            row["dim"],
            row["group"],
            row["dtype"].as_str().unwrap_or("f16"),
            reason(row)
        );
    }
}

/// Goals for the first workload and for stores, and whether they are met.
fn goal_table(text: &mut String, bench: &Value, daemon_stores: &Value) {
    text.push_str("\n## Goals\n\n| what | goal | measured | |\n|---|---|---|---|\n");
    let first = &bench["workloads"][0];
    let f16 = best_f16(first).map(|(_, best)| best);
    let raw = rows(first, "codecs").find(|row| row["codec"] == "raw");
    let part = raw.and_then(|row| {
        let speed = row["page_bytes"].as_f64()? / row["seconds"]["median"].as_f64()?;
        Some(speed / bandwidth(bench, "read")?)
    });
    let measured = part.map(|part| (percent(Some(part)), part >= RAW_GOAL));
    goal(text, "raw, of the read bandwidth", &percent(Some(RAW_GOAL)), measured);
    for (codec, wanted) in GOALS {
        let times = f16.zip(median_of(first, codec)).map(|(f16, median)| f16 / median);
        let measured = times.map(|times| (format!("{times:.2}"), times >= wanted));
        goal(text, &format!("{codec}, x f16"), &format!("{wanted:.1}"), measured);
    }
    let keys = bench["polar_keys_alone"].as_str().unwrap_or("not measured");
    goal(text, &format!("polar keys, x f16 ({keys})"), "2.2", None);
    let gigabytes = |speed: f64| format!("{:.0} GB/s", speed / 1e9);
    for (codec, wanted) in STORE_GOALS {
        let of = |row: &&Value| row["codec"] == codec;
        let kernels = rows(bench, "stores").find(of).and_then(store_speed);
        let what = format!("store of {codec}, f16 rows, kernels alone");
        match kernels {
            // If this alone is not enough, it is not enough with more to do.
            Some(speed) if speed >= wanted => {
                let [wanted, speed] = [wanted, speed].map(gigabytes);
                let _ = writeln!(text, "| {what} | {wanted} | {speed} | {NOT_A_STORE} |");
            }
            speed => {
                let measured = speed.map(|speed| (gigabytes(speed), false));
                goal(text, &what, &gigabytes(wanted), measured);
            }
        }
        let whole = daemon_stores.as_array().into_iter().flatten().find(of).and_then(store_speed);
        let measured = whole.map(|speed| (gigabytes(speed), speed >= wanted));
        let what = format!("store of {codec}, f16 rows, by the daemon");
        goal(text, &what, &gigabytes(wanted), measured);
    }
}

/// A goal, the measured figure, and whether that meets it.
fn goal(text: &mut String, what: &str, goal: &str, measured: Option<(String, bool)>) {
    let (measured, met) = match measured {
        None => (NONE.to_owned(), "not measured"),
        Some((measured, true)) => (measured, "met"),
        Some((measured, false)) => (measured, "missed"),
    };
    let _ = writeln!(text, "| {what} | {goal} | {measured} | {met} |");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The report of one step, with what benchmark, other shapes and the daemon wrote.
    fn markdown(outcome: &str, figures: [&Value; 3]) -> String {
        let (device, date) = ("G, 580".to_owned(), "2026-11-22".to_owned());
        let of = RunSubject { device, date, pack: json!({ "commit": "1234567" }) };
        let folder = tempfile::tempdir().unwrap();
        let mut kept = KeptReport::open(folder.path(), of, &["conformance"]).unwrap();
        kept.steps[0] = StepOutcome::new("conformance", outcome.to_owned(), 1.25, "");
        [kept.bench, kept.shapes, kept.daemon_stores] = figures.map(Value::clone);
        super::markdown(&kept)
    }

    fn time(us: f64) -> Value {
        json!({ "median": us / 1e6, "best": us / 2e6 })
    }

    /// Every line is one of the text's.
    fn assert_lines(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.lines().any(|l| l == *line), "{line}\n in \n{text}");
        }
    }

    #[test]
    fn figures_stand_against_what_the_run_reads_and_the_best_f16() {
        let plan = json!({ "blocks_per_sm": 4 });
        let bench = json!({
            "device": "G", "planned_for": "H200 SXM", "group": 4, "dim": 128, "rounds": 20,
            "launches": 30,
            "bandwidth": [{ "of": "read", "bytes_per_second": 4e12 },
                          { "of": "copy", "error": "cuMemAlloc: CUDA error 2" }],
            "polar_keys_alone": "no kernel",
            "workloads": [{
                "tokens": 131072, "batch": 1, "heads": 8,
                "baselines": { "PyTorch 2.9 flash_attention": time(200.0),
                               "FlashInfer": time(140.0),
                               "slow": { "median": 1e-3, "best": 1e-3, "graph": false },
                               "PyTorch 2.9 cudnn_attention": "refused: no plan" },
                "codecs": [
                    { "codec": "raw", "seconds": time(160.0), "page_bytes": 536e6,
                      "registers": 72, "blocks_per_sm": 4, "plan": plan },
                    { "codec": "kivi-2", "seconds": time(40.0), "page_bytes": 100e6,
                      "registers": 74, "blocks_per_sm": 3, "plan": plan },
                    { "codec": "kivi-4", "seconds": time(50.0), "page_bytes": 100e6,
                      "registers": 74, "blocks_per_sm": 3, "plan": plan },
                    { "codec": "kvd-2", "error": "outputs by 2|3", "plan": plan },
                ],
            }],
        });
        let text = markdown("passed", [&bench, &Value::Null, &Value::Null]);
        assert_lines(
            &text,
            &[
                "# G, 580, 2026-11-22",
                "Written by `xtask gpu run`, commit 1234567.",
                "| conformance | passed | 1.2 |",
                "- read: 4000 GB/s",
                "- copy: cuMemAlloc: CUDA error 2",
                "## 131072 tokens, 1 sequences, 8 KV heads",
                "| PyTorch 2.9 flash_attention | 200.0 | 100.0 |",
                "| PyTorch 2.9 cudnn_attention | refused: no plan | |",
                "| slow, no graph | 1000.0 | 1000.0 |",
                "The fastest FP16 attention, `x f16` of which is 1: FlashInfer.",
                "| raw | 160.0 | 80.0 | 536.0 | 3350 | 84 % | 0.88 | 72 | 4, 4 |",
                "| kivi-2 | 40.0 | 20.0 | 100.0 | 2500 | 62 % | 3.50 | 74 | 3, 4 |",
                "| kvd-2 | outputs by 2/3 | | | | | | | |",
                "| raw, of the read bandwidth | 88 % | 84 % | missed |",
                "| kivi-4, x f16 | 2.6 | 2.80 | met |",
                "| kivi-2, x f16 | 3.7 | 3.50 | missed |",
                "| kvd-2, x f16 | 3.0 | – | not measured |",
                "| polar keys, x f16 (no kernel) | 2.2 | – | not measured |",
            ],
        );
        assert!(!text.contains("did not come to its end"), "{text}");
        let text = markdown("passed", [&json!({ "complete": false }), &Value::Null, &Value::Null]);
        assert!(text.contains("**The benchmark did not come to its end**"), "{text}");
    }

    #[test]
    fn store_kernels_alone_meet_no_goal_and_stores_of_the_daemon_may() {
        let store = |codec: &str, us: f64| {
            let seconds = time(us);
            json!({ "codec": codec, "seconds": seconds, "f16_bytes": 268e6, "thread_blocks": 16 })
        };
        let bench = json!({ "stores": [store("kivi-4", 100.0), store("kvd-2", 2000.0)] });
        let daemon_stores = json!([{ "codec": "kivi-4", "rows_in": "memory of the GPU",
                                     "seconds": time(1000.0), "f16_bytes": 33.6e6 }]);
        let shapes = json!({ "complete": false, "checks": [
            { "codec": "raw", "dim": 64, "group": 1, "output_error": 1e-7 },
            { "codec": "raw", "dim": 64, "group": 8, "dtype": "bf16", "error": "outputs by 2" },
        ] });
        let text = markdown("passed", [&bench, &shapes, &daemon_stores]);
        let alone = "| store of kivi-4, f16 rows, kernels alone | 2000 GB/s | 2680 GB/s";
        assert_lines(
            &text,
            &[
                "| kivi-4 | 100.0 | 50.0 | 268.0 | 2.680 | 16 |",
                "| kivi-4 | memory of the GPU | 1000.0 | 500.0 | 33.6 | 0.034 |",
                "2 launched once, not all of them, for outputs and pages: 1 as on the CPU lane.",
                "- raw, 64 channels, 8 query heads, bf16: outputs by 2",
                &format!("{alone} | {NOT_A_STORE} |"),
                "| store of kivi-4, f16 rows, by the daemon | 2000 GB/s | 34 GB/s | missed |",
                "| store of kvd-2, f16 rows, kernels alone | 150 GB/s | 134 GB/s | missed |",
                "| store of kvd-2, f16 rows, by the daemon | 150 GB/s | – | not measured |",
            ],
        );
        assert!(!text.contains("| met |"), "{text}");
    }

    #[test]
    fn rows_as_they_came_are_the_baseline_where_nothing_is_faster() {
        let codec = |codec: &str, us: f64| {
            let seconds = time(us);
            json!({ "codec": codec, "seconds": seconds, "page_bytes": 1e6 })
        };
        let workload = json!({ "baselines": "skipped because No module named 'torch'",
                               "codecs": [codec("raw", 100.0), codec("kivi-4", 50.0)] });
        let text =
            markdown("passed", [&json!({ "workloads": [workload] }), &Value::Null, &Value::Null]);
        assert!(text.contains("FP16 attention of others: skipped because No module"), "{text}");
        let (_, row) = text.split_once("| kivi-4 | 50.0").unwrap();
        assert!(row.lines().next().unwrap().contains("| 2.00 |"), "{text}");
        assert_lines(&text, &["| kivi-4, x f16 | 2.6 | 2.00 | missed |"]);
    }

    #[test]
    fn what_was_not_measured_is_said_and_not_made_up() {
        let text = markdown("skipped because a|b", [&Value::Null; 3]);
        assert!(text.contains("gave no figures") && text.contains("skipped because a/b"), "{text}");
        let row = json!({ "codec": "raw", "seconds": null });
        let bench =
            json!({ "workloads": [{ "baselines": "none", "codecs": [row] }], "stores": [row] });
        let text = markdown("passed", [&bench, &Value::Null, &Value::Null]);
        assert_lines(
            &text,
            &["| raw | not measured | | | | | | | |", "| raw | not measured | | | | |"],
        );
        assert!(
            !text.contains("NaN") && !text.contains("met |") && !text.contains("missed"),
            "{text}"
        );
    }
}
