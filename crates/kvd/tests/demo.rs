//! The demo's engine against the real daemon: what `kvd demo --serve` shows is what the metrics
//! show, and raw storage changes nothing.
#![cfg(feature = "eval")]
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use kvd::config::{Config, ConfigOverrides};
use kvd::{Daemon, RunningDaemon};
use kvd_eval::demo::{DemoOptions, DemoReport, RestartDemo};
use kvd_eval::eval::WindowChoice;
use kvd_eval::measure::MetricsSource;

async fn daemon() -> RunningDaemon {
    let flags = [
        ("server.listen_tcp", "127.0.0.1:0"),
        ("admin.listen", "127.0.0.1:0"),
        ("device.pool_bytes", "256 MiB"),
    ];
    let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    let config = Config::load(&ConfigOverrides { file: None, environment: false, flags }).unwrap();
    Daemon::build(config).await.unwrap().spawn()
}

async fn run(running: &RunningDaemon, codecs: &[&str]) -> DemoReport {
    let tcp = running.bound_addresses().tcp.unwrap();
    let mut options = DemoOptions::new(format!("http://{tcp}").parse().unwrap());
    options.codecs = codecs.iter().map(|codec| codec.parse().unwrap()).collect();
    options.windows = WindowChoice::Own;
    (options.passages, options.passage_tokens, options.chunk_tokens) = (1, 512, 32);
    (options.prompt_tokens, options.new_tokens) = (96, 24);
    options.keep_open = true;
    let metrics = running.service().metrics().clone();
    options.metrics = Some(MetricsSource::new(move || metrics.render_page()));
    kvd_eval::demo::run_demo(options, &mut Vec::new()).await.unwrap()
}

/// The value of the gauge `name` of `model`.
fn gauge(text: &str, name: &str, model: &str) -> f64 {
    let label = format!("model=\"{model}\"");
    let of_model = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(&label);
    let line = text.lines().find(of_model).unwrap_or_else(|| panic!("{name} of {model}:\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_changes_nothing_and_metrics_show_the_table() {
    let running = daemon().await;
    let report = run(&running, &["raw", "kivi-2", "k=fp8; v=raw"]).await;
    running.service().refresh_gauges();
    let text = running.service().metrics().render_page();

    let [raw, kivi, _] = &report.codecs[..] else { panic!("three codecs were run") };
    assert!(raw.generation.is_same(), "raw wrote {:?}", raw.generation.text);
    let reference = report.without_kvd.quality.perplexity;
    let change = (raw.quality.perplexity - reference).abs() / reference;
    assert!(change < 1e-5, "perplexity {} became {}", reference, raw.quality.perplexity);
    assert!(kivi.quality.kl_nats > raw.quality.kl_nats);

    for run in &report.codecs {
        let bits = 8.0 * gauge(&text, "kvd_packed_bytes_per_value", &run.model);
        assert!((bits - run.storage.bits_per_value).abs() < 1e-6 * bits, "{}: {bits}", run.model);
        let ratio = gauge(&text, "kvd_compression_ratio", &run.model);
        assert!((ratio - run.storage.ratio).abs() < 1e-6 * ratio, "{}: {ratio}", run.model);
        let calls = run.daemon.unwrap();
        assert!(calls.store.calls > 0 && calls.attend.p99_us >= calls.attend.p50_us);
    }
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_on_alike_in_the_next_daemon_on_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let start = async || {
        let flags = [
            ("server.listen_tcp", "127.0.0.1:0".to_owned()),
            ("admin.listen", String::new()),
            ("device.pool_bytes", "64 MiB".to_owned()),
            ("cache.disk.path", folder.path().display().to_string()),
            ("cache.disk.bytes", "48 MiB".to_owned()),
            ("cache.disk.segment_bytes", "4 MiB".to_owned()),
            ("cache.disk.reserve_free_bytes", "0 B".to_owned()),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let overrides = ConfigOverrides { file: None, environment: false, flags };
        Daemon::build(Config::load(&overrides).unwrap()).await.unwrap().spawn()
    };
    let endpoint = |running: &RunningDaemon| {
        format!("http://{}", running.bound_addresses().tcp.unwrap()).parse().unwrap()
    };
    let first = start().await;
    let mut options = DemoOptions::new(endpoint(&first));
    (options.passages, options.passage_tokens, options.chunk_tokens) = (1, 512, 32);
    (options.prompt_tokens, options.new_tokens) = (160, 12);
    let mut prompt = RestartDemo::load_prompt(&options).unwrap();
    prompt.publish_prompt(&options.endpoint).await.unwrap();
    first.drain().await;
    let second = start().await;
    let report = prompt.resume_prompt(&endpoint(&second)).await.unwrap();
    assert_eq!((report.prefix_tokens, report.tokens, report.same_tokens), (128, 12, 12));
    second.drain().await;
}
