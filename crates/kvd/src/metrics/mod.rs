//! What kvd tells Prometheus: one enum of names, handles resolved once, gauges read at scrape.

mod model;
mod name;

pub use model::ModelMetrics;
pub use name::{Kind, Metric};

use kvd_core::ErrorCode;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Bucket bounds of latencies in seconds: 20 µs to 10 s.
const SECONDS_BUCKETS: [f64; 18] = [
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0,
];

/// Recorder and exposition of some series. The exporter library forgets no series, so what has
/// an end of its own has an exporter of its own.
struct Exporter {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

impl Exporter {
    /// Describes every metric.
    fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS_BUCKETS)
            .expect("buckets are not empty")
            .build_recorder();
        for metric in Metric::ALL {
            let name = KeyName::from_const_str(metric.name());
            let (unit, help) = (metric.unit(), metric.help().into());
            match metric.kind() {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
        let handle = recorder.handle();
        Self { recorder, handle }
    }

    fn counter(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Counter {
        debug_assert_eq!(metric.kind(), Kind::Counter);
        self.recorder.register_counter(&key(metric, labels), &METADATA)
    }

    fn gauge(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Gauge {
        debug_assert_eq!(metric.kind(), Kind::Gauge);
        self.recorder.register_gauge(&key(metric, labels), &METADATA)
    }

    fn histogram(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Histogram {
        debug_assert_eq!(metric.kind(), Kind::Histogram);
        self.recorder.register_histogram(&key(metric, labels), &METADATA)
    }
}

/// The daemon's own recorder. It is not global: several daemons may live in one process.
pub struct Metrics {
    daemon: Exporter,
    /// Of registered models.
    models: Mutex<Vec<Arc<Exporter>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A recorder that knows no series yet.
    ///
    /// # Panics
    /// Never: the bucket list is not empty.
    #[must_use]
    pub fn new() -> Self {
        Self { daemon: Exporter::new(), models: Mutex::default() }
    }

    /// A counter with its labels.
    pub fn counter(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Counter {
        self.daemon.counter(metric, labels)
    }

    /// A gauge with its labels.
    pub fn gauge(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Gauge {
        self.daemon.gauge(metric, labels)
    }

    /// A histogram with its labels.
    pub fn histogram(&self, metric: Metric, labels: &[(&'static str, &str)]) -> Histogram {
        self.daemon.histogram(metric, labels)
    }

    /// Ends the series of a model: it is gone, its last values must not linger.
    pub fn forget(&self, model: &ModelMetrics) {
        self.models.lock().retain(|exporter| !Arc::ptr_eq(exporter, &model.exporter));
    }

    /// Counts one finished call.
    pub fn request(&self, rpc: &'static str, code: Option<ErrorCode>, took: Duration) {
        let code = code.map_or("OK", ErrorCode::name);
        self.counter(Metric::RequestsTotal, &[("rpc", rpc), ("code", code)]).increment(1);
        self.histogram(Metric::RequestSeconds, &[("rpc", rpc)]).record(took.as_secs_f64());
    }

    /// The text exposition.
    #[must_use]
    pub fn render(&self) -> String {
        let models = self.models.lock().clone();
        let mut texts = vec![self.daemon.handle.render()];
        texts.extend(models.iter().map(|exporter| exporter.handle.render()));
        merge(&texts)
    }

    /// Folds recorded samples into their buckets; to be called every few seconds, so that memory
    /// does not grow while nobody scrapes.
    pub fn upkeep(&self) {
        self.daemon.handle.run_upkeep();
        let models = self.models.lock().clone();
        for exporter in models {
            exporter.handle.run_upkeep();
        }
    }
}

/// One exposition of several: the samples of a metric must follow its one header together.
fn merge(texts: &[String]) -> String {
    let mut families = BTreeMap::<&str, String>::new();
    for family in texts.iter().flat_map(|text| text.split("\n\n")) {
        let family = family.trim_end();
        let comments = family.lines().take_while(|line| line.starts_with('#'));
        let header: usize = comments.map(|line| line.len() + 1).sum();
        if header == 0 || header > family.len() {
            continue;
        }
        let (header, samples) = family.split_at(header);
        let merged = families.entry(header).or_insert_with(|| header.to_owned());
        merged.push_str(samples);
        merged.push('\n');
    }
    families.into_values().collect::<Vec<_>>().join("\n")
}

const METADATA: Metadata<'static> = Metadata::new("kvd", Level::INFO, None);

fn key(metric: Metric, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(metric.name(), labels)
}

impl Metric {
    fn unit(self) -> Option<Unit> {
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

    #[test]
    fn names_follow_the_scheme_and_are_unique() {
        let names: BTreeSet<_> = Metric::ALL.iter().map(|metric| metric.name()).collect();
        assert_eq!(names.len(), Metric::ALL.len());
        for metric in Metric::ALL {
            let name = metric.name();
            assert!(name.starts_with("kvd_"), "{name}");
            let total = name.ends_with("_total");
            assert_eq!(total, metric.kind() == Kind::Counter, "{name}");
            assert!(!metric.help().is_empty(), "{name}");
        }
    }

    #[test]
    fn render_shows_what_was_recorded() {
        let metrics = Metrics::new();
        metrics.request("Attend", None, Duration::from_micros(300));
        metrics.request("Attend", Some(ErrorCode::PoolFull), Duration::from_micros(300));
        let text = metrics.render();
        assert!(text.contains("kvd_requests_total{rpc=\"Attend\",code=\"POOL_FULL\"} 1"), "{text}");
        assert!(text.contains("kvd_request_seconds_bucket{rpc=\"Attend\",le=\"0.0005\"} 2"));
    }
    #[test]
    fn a_model_that_is_forgotten_leaves_no_series_and_shares_headers_until_then() {
        let metrics = Metrics::new();
        metrics.request("Attend", None, Duration::from_micros(300));
        let one = ModelMetrics::new(&metrics, "default", "one", "raw");
        let two = ModelMetrics::new(&metrics, "default", "two", "raw");
        one.stored_tokens.increment(3);
        two.store_seconds.record(0.5);
        let text = metrics.render();
        assert_eq!(text.matches("# TYPE kvd_stored_tokens_total counter\n").count(), 1, "{text}");
        assert!(text.contains("kvd_stored_tokens_total{namespace=\"default\",model=\"one\""));
        assert!(text.contains("kvd_requests_total{rpc=\"Attend\",code=\"OK\"} 1\n"), "{text}");
        for line in text.lines() {
            assert!(
                line.is_empty() || line.starts_with("kvd_") || line.starts_with("# "),
                "{line}"
            );
        }
        metrics.forget(&one);
        let text = metrics.render();
        assert!(!text.contains("model=\"one\"") && text.contains("model=\"two\""), "{text}");
        // Work in flight may still count; the same name starts anew.
        one.stored_tokens.increment(1);
        let again = ModelMetrics::new(&metrics, "default", "one", "raw");
        again.stored_tokens.increment(2);
        let sample = "model=\"one\",codec=\"raw\"} 2\n";
        assert!(metrics.render().contains(sample));
    }
}
