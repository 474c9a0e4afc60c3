//! Dashboard, alerts, pages of documentation and exporter agree with the enums they speak of.

use super::{GRID_WIDTH, dashboard_json};
use crate::config::{Config, ConfigOverrides};
use crate::daemon::Daemon;
use crate::metrics::{ALERT_CODES, Metric, MetricKind, MetricScope, RPCS};
use crate::service::{CallContext, Service};
use bytes::Bytes;
use kvd_compute::{CpuBackend, CpuOptions};
use kvd_core::{DType, ErrorCode, Geometry, LayerIndex, Namespace, RopePairing};
use kvd_proto::domain::{ModelSpec, StoreChunk};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// A file of the repository.
fn file(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join(path)).expect(path)
}

/// The metrics that a text names; a name that is none of ours fails the test.
fn metrics_in(text: &str) -> BTreeSet<&'static str> {
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = text.split(|c| !in_name(c)).filter(|word| word.starts_with("kvd_"));
    names.map(|name| metric(name).unwrap_or_else(|| panic!("no metric {name}")).name()).collect()
}

/// The metric of a series.
fn metric(series: &str) -> Option<Metric> {
    Metric::ALL.iter().copied().find(|metric| {
        let suffixes: &[&str] = match metric.kind() {
            MetricKind::Histogram => &["_bucket", "_sum", "_count"],
            MetricKind::Counter | MetricKind::Gauge => &[""],
        };
        series.strip_prefix(metric.name()).is_some_and(|suffix| suffixes.contains(&suffix))
    })
}

fn every_metric() -> BTreeSet<&'static str> {
    Metric::ALL.iter().map(|metric| metric.name()).collect()
}

fn panels() -> Vec<Value> {
    dashboard_json()["panels"].as_array().expect("panels").clone()
}

fn expressions(panel: &Value) -> Vec<String> {
    let targets = panel["targets"].as_array().into_iter().flatten();
    targets.map(|target| target["expr"].as_str().expect("expr").to_owned()).collect()
}

#[test]
fn file_is_what_the_code_makes() {
    let file: Value = serde_json::from_str(&file("deploy/grafana/kvd.json")).unwrap();
    let hint = "run `cargo run -p kvd -- dashboard > deploy/grafana/kvd.json`";
    assert!(file == dashboard_json(), "deploy/grafana/kvd.json is stale: {hint}");
}

#[test]
fn every_metric_is_shown_and_no_other() {
    let shown: Vec<_> = panels().iter().flat_map(expressions).collect();
    assert_eq!(metrics_in(&shown.join("\n")), every_metric());
    // Variables name metrics too, and their choice is what the panels filter by.
    let text = dashboard_json().to_string();
    metrics_in(&text);
    for variable in super::query::VARIABLES {
        assert!(text.contains(&format!("${}", variable.name)), "{} is unused", variable.name);
    }
}

#[test]
fn panels_have_their_own_ids_and_places() {
    let panels = panels();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len());
    let mut cells = BTreeSet::new();
    for panel in &panels {
        let title = panel["title"].as_str().expect("a title");
        let described = panel["description"].as_str().is_some_and(|text| !text.is_empty());
        assert!(described || panel["type"] == "row", "{title} has no description");
        let [x, y, w, h] =
            ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().expect("a number"));
        assert!(w > 0 && h > 0 && x + w <= u64::from(GRID_WIDTH), "{title}");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{title} covers another panel at {cell:?}");
        }
        let targets = panel["targets"].as_array().map_or(0, Vec::len);
        assert_eq!(targets == 0, panel["type"] == "row", "{title}");
        let names: BTreeSet<_> =
            (0..targets).map(|i| panel["targets"][i]["refId"].to_string()).collect();
        assert_eq!(names.len(), targets, "{title}");
    }
}

#[test]
fn alerts_name_known_metrics_and_codes() {
    let alerts = file("deploy/prometheus/alerts.yml");
    assert!(!metrics_in(&alerts).is_empty());
    metrics_in(&file("deploy/prometheus/prometheus.yml"));
    for chosen in alerts.split(r#"code=~""#).skip(1) {
        let codes = chosen.split('"').next().unwrap_or_default();
        for code in codes.split('|') {
            assert!(ErrorCode::from_name(code).is_some(), "alerts.yml: no error code {code}");
        }
    }
}

#[test]
fn operating_page_lists_every_error_code() {
    let page = file("docs/operating.md");
    for code in ErrorCode::ALL {
        let grpc = format!("{:?}", kvd_proto::grpc_code(code));
        let retry = if code.is_retryable() { "yes" } else { "no" };
        let row = format!("| `{code}` | {grpc} | {retry} |");
        assert!(page.contains(&row), "docs/operating.md has no row beginning {row}");
    }
}

/// Waits for the series that the daemon's tasks make when they begin.
async fn await_server(service: &Service) {
    let tasks = [Metric::Connections, Metric::Insecure, Metric::OpenStreams];
    let names = tasks.iter().chain([&Metric::TransportRefusalsTotal]).map(|metric| metric.name());
    let names: Vec<_> = names.collect();
    for _ in 0..1000 {
        let page = service.metrics().render_page();
        if names.iter().all(|name| {
            page.contains(&format!("\n{name}{{")) || page.contains(&format!("\n{name} "))
        }) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A text exposition of a daemon that has one model, two blocks of it packed, and has answered one
/// request.
async fn exposition() -> String {
    let quotas = ("namespaces.quotas", "[\"default: sequences=9\"]");
    let flags = [("server.listen_tcp", "127.0.0.1:0"), ("admin.listen", "127.0.0.1:0"), quotas]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let overrides = ConfigOverrides { flags: flags.into(), ..ConfigOverrides::default() };
    let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
    let backend = Box::new(CpuBackend::new(options).unwrap());
    let config = Config::load(&overrides).unwrap();
    let running = Daemon::build_on(config, vec![backend]).await.unwrap().spawn();
    let service = running.service().clone();
    await_server(&service).await;
    let call = CallContext::new(Namespace::new("default").unwrap());
    let geometry = Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 8,
        head_dim_v: 8,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    let codec = "k=fp8; v=fp8; k.bound=0.5; v.bound=0.5".to_owned();
    let (name, calibration) = ("tiny".into(), Vec::new().into());
    let spec = ModelSpec { name, geometry, codec, calibration };
    let model = service.register_model(&call, spec).await.unwrap().shape.id;
    let sequence = service.open_sequence(&call, model).unwrap();
    let k = Bytes::from(0x3c00_u16.to_le_bytes().repeat(128 * 8));
    let (layer, v) = (LayerIndex(0), k.clone());
    let chunk = StoreChunk { sequence, layer, start: 0, tokens: 128, k, v };
    service.store_chunk(&call, chunk).await.unwrap();
    service.match_prefixes(&call, model, &[], Duration::ZERO).unwrap();
    service.metrics().count_request("RegisterModel", None, Duration::from_millis(1));
    service.refresh_gauges();
    let page = service.metrics().render_page();
    drop(service);
    running.drain().await;
    page
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exporter_exposes_every_metric() {
    let text = exposition().await;
    let mut exposed = BTreeSet::new();
    for series in text.lines().filter(|line| line.starts_with("kvd_")) {
        let name = series.split(['{', ' ']).next().unwrap_or_default();
        let metric = metric(name).unwrap_or_else(|| panic!("no metric {name}"));
        exposed.insert(metric.name());
        let of_model = metric.scope() == MetricScope::Model;
        for label in ["model=", "codec="] {
            assert_eq!(series.contains(label), of_model, "{series}");
        }
        let of_namespace = of_model || metric.scope() == MetricScope::Namespace;
        assert_eq!(series.contains("namespace="), of_namespace, "{series}");
        let of_device = metric.scope() == MetricScope::Device || metric == Metric::BuildInfo;
        assert_eq!(series.contains("device="), of_device, "{series}");
    }
    let missing: Vec<_> =
        every_metric().into_iter().filter(|name| !exposed.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}\n{text}");
    for metric in Metric::ALL {
        let (name, kind) = (metric.name(), format!("{:?}", metric.kind()).to_lowercase());
        assert!(text.contains(&format!("# HELP {name} {}\n", metric.help())), "{name}");
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name}");
    }
}

/// Labels of calls that alerts compare with a fixed text.
#[test]
fn alerts_read_codes_whose_counts_begin_at_zero() {
    let alerts = file("deploy/prometheus/alerts.yml");
    let known = ALERT_CODES.map(|code| code.name());
    let chosen = alerts.split("code=").skip(1).flat_map(|rest| {
        let quoted = rest.split('"').nth(1).unwrap_or_default();
        quoted.split('|').map(str::to_owned).collect::<Vec<_>>()
    });
    let chosen: BTreeSet<_> = chosen.collect();
    assert_eq!(chosen, known.map(str::to_owned).into());
}

#[test]
fn calls_are_counted_by_the_names_of_the_service() {
    let proto = file("proto/kvd/v1/kvd.proto");
    let named =
        proto.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
    let named: BTreeSet<_> =
        named.chain(["AttendRegion", "StoreRegion", "ControlRegion"]).collect();
    assert_eq!(named, RPCS.into());
}

#[test]
fn operating_page_lists_every_alert() {
    let (page, alerts) = (file("docs/operating.md"), file("deploy/prometheus/alerts.yml"));
    let tests = file("deploy/prometheus/alerts.test.yml");
    let names = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let names: Vec<_> = names.collect();
    assert!(names.len() > 10);
    for name in &names {
        assert!(
            page.contains(&format!("\n| `{name}` |")),
            "docs/operating.md has no row of {name}"
        );
        let tested = tests.contains(&format!("alertname: {name}\n"));
        assert!(tested, "no test of deploy/prometheus/alerts.test.yml fires {name}");
    }
}
