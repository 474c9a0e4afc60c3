//! The metrics for Prometheus: one enum of names, handles resolved once, gauges read at scrape.

mod device;
mod group;
mod model;
mod name;
mod quota;
mod requests;

pub use device::DeviceMetrics;
pub use group::SecondsCounter;
pub use model::{ModelLabels, ModelMetrics};
pub use name::{Metric, MetricKind, MetricScope};
pub(crate) use quota::{NamespaceWeight, QuotaLevel};

use group::SeriesGroup;
use kvd_core::ErrorCode;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use parking_lot::Mutex;
use requests::RequestSeries;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bucket bounds of latencies in seconds: 1 µs to 10 s.
const SECONDS_BUCKETS: [f64; 22] = [
    0.000_001, 0.000_002, 0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5,
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

/// Codes that alerts read: their counts begin at 0, so that the first of them is an increase.
pub const ALERT_CODES: [ErrorCode; 5] = [
    ErrorCode::Internal,
    ErrorCode::DeviceFailed,
    ErrorCode::CorruptPage,
    ErrorCode::PoolFull,
    ErrorCode::QueueFull,
];

/// Names of calls in labels: those of the service, and those of regions.
pub const RPCS: [&str; 37] = [
    "GetServerInfo",
    "RegisterModel",
    "DescribeModel",
    "ListModels",
    "UnregisterModel",
    "OpenSequence",
    "ForkSequence",
    "TruncateSequence",
    "HintSequence",
    "CloseSequence",
    "DescribeSequence",
    "ListSequences",
    "HoldSession",
    "CloseSession",
    "ListSessions",
    "StoreBlocks",
    "Attend",
    "AttendStream",
    "LoadBlocks",
    "SampleQueries",
    "CalibrateModel",
    "GetStats",
    "StoreStep",
    "LoadStep",
    "ListCodecs",
    "MatchPrefix",
    "ReleaseLease",
    "PublishBlocks",
    "PinBlocks",
    "UnpinBlocks",
    "DropBlocks",
    "WatchBlocks",
    "ListNamespaces",
    "SetNamespaceQuotas",
    "AttendRegion",
    "StoreRegion",
    "ControlRegion",
];

/// The daemon's own recorder. It is not global: several daemons may live in one process.
///
/// What lasts as long as the daemon, and every histogram, is in the exporter library; what ends
/// before is in groups.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    process: metrics_process::Collector,
    devices: AtomicUsize,
    requests: RequestSeries,
    /// Series of devices and of registered models.
    groups: Mutex<Vec<Arc<SeriesGroup>>>,
    /// Series of quotas, as they were last shown.
    quotas: Mutex<Option<Arc<SeriesGroup>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A recorder that knows the counts of calls that alerts read, and no other series.
    ///
    /// # Panics
    /// Never: the bucket list is not empty.
    #[must_use]
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS_BUCKETS)
            .expect("buckets are not empty")
            .build_recorder();
        for metric in Metric::ALL {
            let name = KeyName::from_const_str(metric.name());
            let (unit, help) = (metric.metric_unit(), metric.help().into());
            match metric.kind() {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
        let process = metrics_process::Collector::default();
        metrics::with_local_recorder(&recorder, || process.describe());
        let handle = recorder.handle();
        let (devices, groups) = (AtomicUsize::new(0), Mutex::default());
        let (quotas, requests) = (Mutex::default(), RequestSeries::default());
        let metrics = Self { recorder, handle, process, devices, requests, groups, quotas };
        for rpc in RPCS {
            for code in ALERT_CODES {
                metrics.requests_counter(rpc, code.name()).increment(0);
            }
        }
        metrics
    }

    /// A counter of the daemon with its labels.
    pub fn counter(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Counter {
        debug_assert_eq!(metric.kind(), MetricKind::Counter);
        self.recorder.register_counter(&metric_key(metric, labels), &METADATA)
    }

    /// A gauge of the daemon with its labels.
    pub fn gauge(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Gauge {
        debug_assert_eq!(metric.kind(), MetricKind::Gauge);
        self.recorder.register_gauge(&metric_key(metric, labels), &METADATA)
    }

    /// A histogram with its labels; it lasts as long as the recorder.
    pub fn histogram(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Histogram {
        debug_assert_eq!(metric.kind(), MetricKind::Histogram);
        self.recorder.register_histogram(&metric_key(metric, labels), &METADATA)
    }

    /// The handles of one more device, whose pool is of that tier. Its label is the number of
    /// those before it.
    pub fn add_device(&self, tier: &'static str) -> DeviceMetrics {
        let index = self.devices.fetch_add(1, Ordering::Relaxed);
        DeviceMetrics::new(self, index.to_string(), tier)
    }

    /// Shows a group's series from now on.
    fn keep_group(&self, group: Arc<SeriesGroup>) -> Arc<SeriesGroup> {
        self.groups.lock().push(group.clone());
        group
    }

    /// Ends the series of a model: it is gone, its last values must not linger.
    pub fn forget_model(&self, model: &ModelMetrics) {
        self.groups.lock().retain(|group| !Arc::ptr_eq(group, &model.group));
    }

    fn requests_counter(&self, rpc: &'static str, code: &str) -> Counter {
        self.counter(Metric::RequestsTotal, &[("rpc", rpc), ("code", code)])
    }

    /// The text exposition. It reads the process's own figures from the system.
    #[must_use]
    pub fn render_page(&self) -> String {
        metrics::with_local_recorder(&self.recorder, || self.process.collect());
        let mut page = self.handle.render();
        let mut groups = self.groups.lock().clone();
        groups.extend(self.quotas.lock().clone());
        group::write_groups(&groups, &mut page);
        page
    }

    /// Folds recorded samples into their buckets; to be called every few seconds, so that memory
    /// does not grow while nobody scrapes.
    pub fn run_upkeep(&self) {
        self.handle.run_upkeep();
    }
}

/// Counts something that is open, as long as this lives.
pub(crate) struct OpenCount(Gauge);

impl OpenCount {
    /// Counts one more in `gauge`.
    pub(crate) fn new(gauge: &Gauge) -> Self {
        gauge.increment(1.0);
        Self(gauge.clone())
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

const METADATA: Metadata<'static> = Metadata::new("kvd", Level::INFO, None);

fn metric_key(metric: Metric, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(metric.name(), labels)
}

impl Metric {
    fn metric_unit(self) -> Option<Unit> {
        let name = self.name();
        let stem = name.strip_suffix("_total").unwrap_or(name);
        if stem.ends_with("_seconds") {
            Some(Unit::Seconds)
        } else if stem.ends_with("_bytes") {
            Some(Unit::Bytes)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::time::Duration;

    #[test]
    fn names_follow_the_scheme_and_are_unique() {
        let names: BTreeSet<_> = Metric::ALL.iter().map(|metric| metric.name()).collect();
        assert_eq!(names.len(), Metric::ALL.len());
        for metric in Metric::ALL {
            let name = metric.name();
            assert!(name.starts_with("kvd_"), "{name}");
            let total = name.ends_with("_total");
            assert_eq!(total, metric.kind() == MetricKind::Counter, "{name}");
            // Histograms are in the exporter library, which forgets nothing.
            assert!(
                metric.kind() != MetricKind::Histogram || metric.scope() != MetricScope::Model,
                "{name}"
            );
            assert!(!metric.help().is_empty(), "{name}");
        }
    }

    #[test]
    fn render_shows_what_was_recorded() {
        let metrics = Metrics::new();
        metrics.count_request("Attend", None, Duration::from_nanos(800));
        metrics.count_request("Attend", Some(ErrorCode::PoolFull), Duration::from_micros(300));
        let text = metrics.render_page();
        assert!(text.contains("kvd_requests_total{rpc=\"Attend\",code=\"POOL_FULL\"} 1"), "{text}");
        assert!(text.contains("kvd_request_seconds_bucket{rpc=\"Attend\",le=\"0.000001\"} 1"));
        assert!(text.contains("kvd_request_seconds_bucket{rpc=\"Attend\",le=\"0.0005\"} 2"));
    }

    #[test]
    fn the_process_is_told_of_by_the_names_that_every_exporter_has() {
        let text = Metrics::new().render_page();
        for name in [
            "process_cpu_seconds_total",
            "process_start_time_seconds",
            "process_resident_memory_bytes",
            "process_open_fds",
            "process_max_fds",
            "process_threads",
        ] {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
            let value: f64 = line.unwrap_or_else(|| panic!("no {name}:\n{text}"))[name.len()..]
                .trim()
                .parse()
                .unwrap();
            assert!(value > 0.0 || name == "process_cpu_seconds_total", "{name} {value}");
        }
    }

    fn labels(model: &str) -> ModelLabels<'_> {
        ModelLabels { namespace: "default", model, codec: "raw" }
    }

    #[test]
    fn a_model_that_is_forgotten_leaves_no_series_and_shares_headers_until_then() {
        let metrics = Metrics::new();
        metrics.count_request("Attend", None, Duration::from_micros(300));
        let device = metrics.add_device("host");
        let one = ModelMetrics::new(&metrics, &device, labels("one"), 2);
        let two = ModelMetrics::new(&metrics, &device, labels("two"), 2);
        one.stored_layer_tokens.increment(3);
        two.store.record_job(Duration::from_millis(500));
        let text = metrics.render_page();
        let header = "# TYPE kvd_stored_layer_tokens_total counter\n";
        assert_eq!(text.matches(header).count(), 1, "{text}");
        let sample = "kvd_stored_layer_tokens_total{namespace=\"default\",model=\"one\"";
        assert!(text.contains(sample));
        assert!(text.contains("kvd_requests_total{rpc=\"Attend\",code=\"OK\"} 1\n"), "{text}");
        assert!(text.contains("kvd_store_seconds_sum{device=\"0\"} 0.5\n"), "{text}");
        let seconds = "model=\"two\",codec=\"raw\",work=\"store\"} 0.5\n";
        assert!(text.contains(seconds), "{text}");
        for line in text.lines() {
            let known = ["kvd_", "process_", "# "].iter().any(|start| line.starts_with(start));
            assert!(line.is_empty() || known, "{line}");
        }
        metrics.forget_model(&one);
        let text = metrics.render_page();
        assert!(!text.contains("model=\"one\"") && text.contains("model=\"two\""), "{text}");
        // Work in flight may still count; the same name starts anew.
        one.stored_layer_tokens.increment(1);
        let again = ModelMetrics::new(&metrics, &device, labels("one"), 2);
        again.stored_layer_tokens.increment(2);
        let sample = "model=\"one\",codec=\"raw\"} 2\n";
        assert!(metrics.render_page().contains(sample));
    }

    #[test]
    fn what_is_open_is_counted_while_it_is() {
        let metrics = Metrics::new();
        let gauge = metrics.gauge(Metric::Connections, &[("listener", "tcp")]);
        let open = [OpenCount::new(&gauge), OpenCount::new(&gauge)];
        let sample = |count| format!("kvd_connections{{listener=\"tcp\"}} {count}\n");
        assert!(metrics.render_page().contains(&sample(2)));
        drop(open);
        assert!(metrics.render_page().contains(&sample(0)));
    }
}
