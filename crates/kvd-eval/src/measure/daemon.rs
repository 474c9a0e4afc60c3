//! What the daemon's own metrics tell of a model, read from its Prometheus exposition.

use super::latency::{Calls, LatencySummary};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// Where the daemon's metrics come from: the text that `GET /metrics` answers.
#[derive(Clone)]
pub struct MetricsSource(Arc<dyn Fn() -> String + Send + Sync>);

impl MetricsSource {
    /// A source that asks `read` each time.
    #[must_use]
    pub fn new(read: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Device time of all stores and attends of a model so far.
    pub(crate) fn calls(&self, model: &str) -> Calls {
        let text = (self.0)();
        let summary = |metric: &str| {
            let [seconds, calls] =
                ["sum", "count"].map(|of| total(&text, &format!("{metric}_{of}"), model));
            let mean_us = if calls > 0.0 { seconds / calls * 1e6 } else { 0.0 };
            Histogram::read(&text, metric, model).summary(mean_us)
        };
        Calls { store: summary("kvd_store_seconds"), attend: summary("kvd_attend_seconds") }
    }

    /// Device time and amounts of a model so far.
    pub(crate) fn device_totals(&self, model: &str) -> DeviceTotals {
        let text = (self.0)();
        let total = |name| total(&text, name, model);
        DeviceTotals {
            store_seconds: total("kvd_store_seconds_sum"),
            stores: total("kvd_store_seconds_count"),
            encode_seconds: total("kvd_encode_seconds_sum"),
            encoded_bytes: total("kvd_encoded_logical_bytes_total"),
            load_seconds: total("kvd_load_seconds_sum"),
            attend_seconds: total("kvd_attend_seconds_sum"),
            attends: total("kvd_attend_seconds_count"),
        }
    }
}

/// Sums over the life of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceTotals {
    pub(crate) store_seconds: f64,
    pub(crate) stores: f64,
    pub(crate) encode_seconds: f64,
    /// In the stored precision.
    pub(crate) encoded_bytes: f64,
    pub(crate) load_seconds: f64,
    pub(crate) attend_seconds: f64,
    pub(crate) attends: f64,
}

impl DeviceTotals {
    /// What came on top of `before`.
    pub(crate) fn since(self, before: &Self) -> Self {
        Self {
            store_seconds: self.store_seconds - before.store_seconds,
            stores: self.stores - before.stores,
            encode_seconds: self.encode_seconds - before.encode_seconds,
            encoded_bytes: self.encoded_bytes - before.encoded_bytes,
            load_seconds: self.load_seconds - before.load_seconds,
            attend_seconds: self.attend_seconds - before.attend_seconds,
            attends: self.attends - before.attends,
        }
    }
}

/// Mean device time of some calls, in microseconds: sums over counts, so no bucket rounds it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DeviceMeans {
    /// Of a store.
    pub store_us: f64,
    /// Of an attend.
    pub attend_us: f64,
}

impl DeviceTotals {
    /// Means; 0 where there was no call.
    pub(crate) fn means(&self) -> DeviceMeans {
        let us = |seconds: f64, calls: f64| if calls > 0.0 { seconds / calls * 1e6 } else { 0.0 };
        DeviceMeans {
            store_us: us(self.store_seconds, self.stores),
            attend_us: us(self.attend_seconds, self.attends),
        }
    }
}

/// The sum of all series of `name` with that model.
fn total(text: &str, name: &str, model: &str) -> f64 {
    let prefix = format!("{name}{{");
    let value = |line: &str| {
        let (labels, value) = line.strip_prefix(&prefix)?.rsplit_once("} ")?;
        has_model(labels, model).then(|| value.trim().parse::<f64>().ok())?
    };
    text.lines().filter_map(value).sum()
}

fn has_model(labels: &str, model: &str) -> bool {
    let label = format!("model=\"{model}\"");
    labels.split(',').any(|found| found == label)
}

impl fmt::Debug for MetricsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MetricsSource")
    }
}

/// Cumulative counts by upper bound, ascending; the last bound is infinite.
struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    fn read(text: &str, metric: &str, model: &str) -> Self {
        let prefix = format!("{metric}_bucket{{");
        let bucket = |line: &str| {
            let (labels, count) = line.strip_prefix(&prefix)?.rsplit_once("} ")?;
            if !has_model(labels, model) {
                return None;
            }
            let mut labels = labels.split(',');
            let bound = labels.find_map(|found| found.strip_prefix("le=\"")?.strip_suffix('"'))?;
            // Rust reads "+Inf" as infinity.
            Some((bound.parse().ok()?, count.trim().parse().ok()?))
        };
        Self(text.lines().filter_map(bucket).collect())
    }

    /// As Prometheus' `histogram_quantile`: linear inside a bucket, and the last finite bound
    /// for what lies beyond it.
    fn quantile_seconds(&self, share: f64) -> f64 {
        let Some((_, total)) = self.0.last() else { return 0.0 };
        let rank = share * total;
        let (mut low, mut below) = (0.0, 0.0);
        for (bound, count) in &self.0 {
            if *count >= rank && *count > below {
                if bound.is_infinite() {
                    return low;
                }
                return low + (bound - low) * (rank - below) / (count - below);
            }
            (low, below) = (*bound, *count);
        }
        0.0
    }

    fn summary(&self, mean_us: f64) -> LatencySummary {
        LatencySummary {
            calls: self.0.last().map_or(0, |(_, count)| *count as u64),
            mean_us,
            p50_us: self.quantile_seconds(0.50) * 1e6,
            p99_us: self.quantile_seconds(0.99) * 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
kvd_store_seconds_bucket{namespace=\"d\",model=\"other\",codec=\"raw\",le=\"+Inf\"} 9
kvd_store_seconds_bucket{namespace=\"d\",model=\"m.raw\",codec=\"raw\",le=\"0.001\"} 50
kvd_store_seconds_bucket{namespace=\"d\",model=\"m.raw\",codec=\"raw\",le=\"0.002\"} 100
kvd_store_seconds_bucket{namespace=\"d\",model=\"m.raw\",codec=\"raw\",le=\"+Inf\"} 100
kvd_store_seconds_sum{namespace=\"d\",model=\"m.raw\",codec=\"raw\"} 0.1
kvd_store_seconds_count{namespace=\"d\",model=\"m.raw\",codec=\"raw\"} 100
";

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let source = MetricsSource::new(|| TEXT.to_owned());
        let calls = source.calls("m.raw");
        assert_eq!(calls.store.calls, 100);
        assert!((calls.store.p50_us - 1000.0).abs() < 1e-6, "{calls:?}");
        assert!((calls.store.p99_us - 1980.0).abs() < 1e-6, "{calls:?}");
        assert!((calls.store.mean_us - 1000.0).abs() < 1e-6, "{calls:?}");
        let means = source.device_totals("m.raw").means();
        assert!((means.store_us - 1000.0).abs() < 1e-6 && means.attend_us == 0.0, "{means:?}");
        assert_eq!(calls.attend, LatencySummary::default());
    }

    #[test]
    fn totals_are_those_of_one_model() {
        assert_eq!(total(TEXT, "kvd_store_seconds_sum", "m.raw"), 0.1);
        assert_eq!(total(TEXT, "kvd_store_seconds_sum", "m"), 0.0);
        assert_eq!(total(TEXT, "kvd_load_seconds_sum", "m.raw"), 0.0);
    }
}
