//! `kvd eval` against the real daemon, and its command line.
#![cfg(feature = "eval")]
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod support;

use kvd::RunningDaemon;
use kvd_eval::eval::{self, EvalCodec, EvalOptions, EvalReport, WindowChoice};
use kvd_eval::measure::{AttachedPrefix, MetricsSource};
use kvd_eval::search::{self, SearchOptions};
use std::process::{Command, Output};

fn parsed(codecs: &[&str]) -> Vec<EvalCodec> {
    codecs.iter().map(|codec| codec.parse().unwrap()).collect()
}

/// Codecs on one passage of 256 tokens, positions from 32 on scored.
fn options(running: &RunningDaemon, codecs: &[&str], windows: Vec<WindowChoice>) -> EvalOptions {
    let tcp = running.bound_addresses().tcp.unwrap();
    let metrics = running.service().metrics().clone();
    EvalOptions {
        metrics: Some(MetricsSource::new(move || metrics.render_page())),
        windows,
        passages: 1,
        passage_tokens: 256,
        chunk_tokens: 32,
        calibration_windows: 2,
        ..EvalOptions::new(format!("http://{tcp}").parse().unwrap(), parsed(codecs))
    }
}

async fn short(codecs: &[&str], windows: Vec<WindowChoice>) -> EvalReport {
    let running = support::start(&[]).await;
    let report = eval::run_eval(&options(&running, codecs, windows)).await.unwrap();
    running.drain().await;
    report
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_changes_nothing_and_fewer_bits_change_more() {
    let codecs = ["raw", "fp8", "k=uniform(b=2,g=32,axis=channel); v=uniform(b=2,g=32,axis=token)"];
    let windows = vec![WindowChoice::Own, WindowChoice::Same { sink: 16, recent: 64 }];
    let report = short(&codecs, windows).await;
    let [own, same] = &report.blocks[..] else { panic!("two blocks") };
    assert_eq!((own.windows.as_str(), same.windows.as_str()), ("own", "sink=16,recent=64"));
    assert_eq!(own.without_kvd.scored_tokens, 224);
    for block in [own, same] {
        let [raw, fp8, two] = &block.rows[..] else { panic!("three rows") };
        assert!(raw.quality.kl_nats.abs() < 1e-6, "{:?}", raw.quality);
        assert_eq!(raw.attention_error.codec, 0.0);
        let error = |row: &eval::EvalRow| row.attention_error.codec;
        assert!(error(fp8) > 1e-4 && error(two) > 2.0 * error(fp8), "{fp8:?} {two:?}");
        assert!(two.quality.kl_nats > fp8.quality.kl_nats);
        for row in &block.rows {
            // Codes multiplied as integers: at most one rounding of f16, else those of f32.
            let most = if row.codec == codecs[2] { 2f64.powi(-11) } else { 1e-6 };
            assert!(row.attention_error.kernel < most, "{:?}", row.attention_error);
            let layers = &row.attention_error.layers;
            let mean = layers.iter().map(|layer| layer.codec).sum::<f64>() / 3.0;
            assert!(layers.len() == 3 && (mean - error(row)).abs() < 1e-12, "{layers:?}");
            let bits = layers.iter().map(|l| (l.key_bits + l.value_bits) / 2.0).sum::<f64>() / 3.0;
            assert!((bits - row.storage.bits_per_value).abs() < 0.01, "{bits} {:?}", row.storage);
            let speed = row.speed.unwrap();
            assert!(speed.encode_gb_per_second > 0.0 && speed.load_gb_per_second > 0.0);
            assert!(speed.attend_us > 0.0 && speed.tokens == 256);
        }
    }
    // Windows of 16 and 64 tokens keep part of the passage exact.
    let loss = |block: &eval::EvalBlock| block.rows[2].attention_error.codec;
    assert!(loss(same) < loss(own));
    let stored = &same.rows[2].storage;
    assert!(stored.raw_values_percent > 30.0 && stored.bits_per_value > 3.0, "{stored:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn codecs_of_one_fit_differ_by_windows_alone_and_the_pages_say_so() {
    let codecs = ["k=smooth/vq(d=4,b=6); v=vq(d=4,b=6)", "raw"];
    let report =
        short(&codecs, vec![WindowChoice::Same { sink: 0, recent: 64 }, WindowChoice::Own]).await;
    let [same, own] = &report.blocks[..] else { panic!("two blocks") };
    assert!(own.rows[0].attention_error.codec > same.rows[0].attention_error.codec);
    assert!(own.rows[0].calibration_seconds > 0.0 && own.rows[1].calibration_seconds == 0.0);
    assert!(own.rows[0].storage.model_bytes > 0);
    let context = own.rows[0].context;
    assert!((context.packed + context.windows + context.model - context.total).abs() < 1e-12);

    let page = eval::markdown_page(&report, Some("plot.svg"));
    for part in
        ["# Quality of codecs on kv-tiny-b", "(plot.svg)", "recent=64", "codec 1: `k=smooth"]
    {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    let columns = |line: &&str| line.starts_with('|').then(|| line.matches('|').count());
    let table: Vec<_> = page.lines().filter_map(|line| columns(&line)).collect();
    assert_eq!(table[..4], [11; 4]);
    let svg = eval::plot_svg(&report);
    // raw equals the run without kvd: no place on a logarithm.
    assert_eq!(svg.matches("<circle").count(), 1);
    assert!(svg.contains("codec 1") && svg.trim_end().ends_with("</svg>"));
    let mut text = Vec::new();
    eval::print_report(&report, &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("Attention error by layer"));
}

/// A prefix from the cache is packed to its last token. That costs what the window of the sequence
/// that stored it is worth, and nothing where there is none.
#[tokio::test(flavor = "multi_thread")]
async fn an_attached_prefix_costs_the_window_that_it_has_not() {
    let two = "k=uniform(b=2,g=32,axis=channel); v=uniform(b=2,g=32,axis=token)";
    let with_window = format!("{two}; recent=64");
    let running = support::start(&[]).await;
    let codecs = ["raw", two, &with_window];
    let options = EvalOptions {
        attached_prefix: Some(AttachedPrefix { tokens: 128, recomputed: 0 }),
        ..options(&running, &codecs, vec![WindowChoice::Own])
    };
    let report = eval::run_eval(&options).await.unwrap();
    running.drain().await;
    let [raw, none, window] = &report.blocks[0].rows[..] else { panic!("three rows") };
    let [raw, none, window] = [raw, none, window].map(|row| row.attached.unwrap());
    assert_eq!((raw.prefix_tokens, raw.next_tokens, raw.all.stored.scored_tokens), (128, 128, 128));
    assert_eq!(raw.all.stored, raw.all.attached);
    assert!(none.all.stored.kl_nats > 0.0);
    assert_eq!(none.all.stored, none.all.attached);
    let more = window.next.kl_change_percent().unwrap();
    assert!(more > 5.0, "{more} % {window:?}");
    assert!(eval::markdown_page(&report, None).contains("### Attached prefix"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_keeps_its_budget_and_its_policy_is_evaluated_last() {
    let running = support::start(&[]).await;
    let windows = WindowChoice::Same { sink: 0, recent: 64 };
    let candidates = parsed(&["k=uniform(b=4,axis=token); v=uniform(b=4,axis=token)", "fp8"]);
    let search = SearchOptions { budget_bits: 6.5, candidates, windows };
    let options = options(&running, &["fp8"], vec![windows]);
    let (found, mut report) = search::run_search(&options, &search).await.unwrap();
    running.drain().await;
    // Nothing else has as few bits: the claim is neither borne out nor printed.
    let claims = eval::check_orderings(&report.blocks[0]);
    assert!(claims.len() == 1 && claims[0].holds.is_none(), "{claims:#?}");
    let printed = |report: &EvalReport| {
        let mut text = Vec::new();
        eval::print_report(report, &mut text).unwrap();
        String::from_utf8(text).unwrap() + &eval::markdown_page(report, None)
    };
    for asked in [false, true] {
        report.orderings = asked;
        let text = printed(&report);
        assert!(!text.contains("beats every") && !text.contains("Orderings"), "{asked}: {text}");
    }
    let [fp8, policy] = &report.blocks[0].rows[..] else { panic!("two rows") };
    assert_eq!(
        (policy.codec.as_str(), &policy.codec_spec),
        ("policy 6.5", &found.spec.to_string())
    );
    let mixed: Vec<f64> = found.report.slots.iter().map(|slot| slot.bits).collect();
    assert!(mixed.iter().any(|b| *b < 5.0) && mixed.iter().any(|b| *b > 8.0), "{mixed:?}");
    let bits = policy.storage.bits_per_value;
    assert!((bits - found.report.bits).abs() < 0.02 && bits <= 6.5, "{bits} {:?}", found.report);
    assert!(policy.quality.kl_nats > fp8.quality.kl_nats && policy.quality.kl_nats < 0.1);
    assert!(found.policy.contains("\nk=") && found.artefact.is_none());
}

/// Names of an object's members, those of objects inside with dots.
fn names(value: &serde_json::Value, prefix: &str, found: &mut Vec<String>) {
    let serde_json::Value::Object(object) = value else { return };
    for (name, inner) in object {
        let name = format!("{prefix}{name}");
        match inner {
            serde_json::Value::Array(items) => names(
                items.first().unwrap_or(&serde_json::Value::Null),
                &format!("{name}[]."),
                found,
            ),
            inner => names(inner, &format!("{name}."), found),
        }
        found.push(name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_json_layout_is_the_one_that_was_published() {
    let report = short(&["raw"], vec![WindowChoice::Own]).await;
    let mut found = Vec::new();
    names(&serde_json::to_value(&report).unwrap(), "", &mut found);
    found.sort();
    let published: Vec<&str> = include_str!("eval-json.txt").lines().collect();
    assert_eq!(found, published, "a new layout needs a new version: {}", found.join("\n"));
}

fn kvd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvd")).args(arguments).output().unwrap()
}

#[test]
fn what_cannot_be_evaluated_is_refused_with_its_exit_code() {
    for (arguments, code, part) in [
        (&["eval", "--codec", "zip"][..], 64, "not a preset"),
        (&["eval", "--codec", "k=raw"], 64, "character 5"),
        (&["eval", "--codec", "@/no/such/file"], 64, "/no/such/file"),
        (&["eval", "--codec", "raw", "--windows", "tail=3"], 64, "sink=N"),
        (&["eval", "--search"], 64, "--budget-bits"),
        (&["eval", "--codec", "raw", "--policy", "x"], 64, "--search"),
        (&["eval", "--codec", "raw", "--text", "/no/such/text"], 64, "/no/such/text"),
        (&["eval", "--codec", "raw", "--model", "/no/such/model"], 64, "/no/such/model"),
        (&["eval", "--codec", "raw", "--passages", "0"], 64, "passages"),
        (&["eval", "--codec", "raw", "--tokens", "4096"], 64, "2048 positions"),
        (&["eval", "--codec", "raw", "--passages", "99"], 64, "fewer --passages"),
        (&["eval", "--codec", "raw", "--attached-prefix", "100"], 64, "steps of 8"),
        (&["eval", "--codec", "raw", "--attached-prefix", "2048"], 64, "a passage of 2048"),
        (&["eval", "--codec", "raw", "--attached-prefix", "96"], 64, "pages of 64"),
        (&["eval", "--codec", "vecinfer-2", "--calibration", "/no/such"], 64, "/no/such"),
    ] {
        let output = kvd(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}
