//! The daemon's own metrics of a model, read from its Prometheus exposition.

use super::latency::{CallSummaries, LatencySummary};
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

    /// Device time of all stores and attends so far, whichever model they are of.
    pub(crate) fn read_calls(&self) -> CallTimes {
        let text = (self.0)();
        let read = |metric: &str| {
            let [seconds, jobs] = ["sum", "count"]
                .map(|figure| sum_series(&text, &format!("{metric}_{figure}"), &[]));
            JobTimes { histogram: MetricHistogram::read_metric(&text, metric), seconds, jobs }
        };
        CallTimes { store: read("kvd_store_seconds"), attend: read("kvd_attend_seconds") }
    }

    /// Device time and amounts of a model so far.
    pub(crate) fn device_totals(&self, model: &str) -> DeviceTotals {
        let text = (self.0)();
        let of_model = label_text("model", model);
        let total = |name, work| sum_series(&text, name, &[&of_model, &label_text("work", work)]);
        let seconds = |work| total("kvd_model_device_seconds_total", work);
        DeviceTotals {
            store_seconds: seconds("store"),
            stores: total("kvd_model_device_jobs_total", "store"),
            encode_seconds: seconds("encode"),
            encoded_bytes: sum_series(&text, "kvd_encoded_logical_bytes_total", &[&of_model]),
            load_seconds: seconds("load"),
            attend_seconds: seconds("attend"),
            attends: total("kvd_model_device_jobs_total", "attend"),
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
    /// The difference to `before`.
    pub(crate) fn since_before(self, before: &Self) -> Self {
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
    /// Mean device time of a store.
    pub store_us: f64,
    /// Mean device time of an attend.
    pub attend_us: f64,
}

impl DeviceTotals {
    /// Means; 0 where there was no call.
    pub(crate) fn mean_times(&self) -> DeviceMeans {
        DeviceMeans {
            store_us: mean_us(self.store_seconds, self.stores),
            attend_us: mean_us(self.attend_seconds, self.attends),
        }
    }
}

/// Microseconds for each call; 0 without a call.
fn mean_us(seconds: f64, calls: f64) -> f64 {
    if calls > 0.0 { seconds / calls * 1e6 } else { 0.0 }
}

/// A label as the exposition writes it.
fn label_text(name: &str, value: &str) -> String {
    format!("{name}=\"{value}\"")
}

/// The sum of all series of `name` with those labels.
fn sum_series(text: &str, name: &str, wanted: &[&str]) -> f64 {
    let prefix = format!("{name}{{");
    let value = |line: &str| {
        let (labels, value) = line.strip_prefix(&prefix)?.rsplit_once("} ")?;
        let has = |wanted: &&str| labels.split(',').any(|found| found == *wanted);
        wanted.iter().all(has).then(|| value.trim().parse::<f64>().ok())?
    };
    text.lines().filter_map(value).sum()
}

/// Device time of stores and attends, counted from the daemon's start.
pub(crate) struct CallTimes {
    store: JobTimes,
    attend: JobTimes,
}

impl CallTimes {
    /// Means and percentiles of the calls on top of `before`.
    pub(crate) fn since_before(&self, before: &Self) -> CallSummaries {
        CallSummaries {
            store: self.store.summary_since(&before.store),
            attend: self.attend.summary_since(&before.attend),
        }
    }
}

/// Device time of one kind of job, counted from the daemon's start.
struct JobTimes {
    histogram: MetricHistogram,
    seconds: f64,
    jobs: f64,
}

impl JobTimes {
    fn summary_since(&self, before: &Self) -> LatencySummary {
        let mean = mean_us(self.seconds - before.seconds, self.jobs - before.jobs);
        self.histogram.since_before(&before.histogram).summarize_latency(mean)
    }
}

impl fmt::Debug for MetricsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MetricsSource")
    }
}

/// Cumulative counts by upper bound, ascending; the last bound is infinite.
struct MetricHistogram(Vec<(f64, f64)>);

impl MetricHistogram {
    /// All series of a histogram together: those of several devices, say.
    fn read_metric(text: &str, metric: &str) -> Self {
        let prefix = format!("{metric}_bucket{{");
        let bucket = |line: &str| -> Option<(f64, f64)> {
            let (labels, count) = line.strip_prefix(&prefix)?.rsplit_once("} ")?;
            let mut labels = labels.split(',');
            let bound = labels.find_map(|found| found.strip_prefix("le=\"")?.strip_suffix('"'))?;
            // Rust reads "+Inf" as infinity.
            Some((bound.parse().ok()?, count.trim().parse().ok()?))
        };
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (bound, count) in text.lines().filter_map(bucket) {
            match buckets.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, sum)) => *sum += count,
                None => buckets.push((bound, count)),
            }
        }
        buckets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        Self(buckets)
    }

    /// The difference to `before`, which is an earlier state or empty.
    fn since_before(&self, before: &Self) -> Self {
        let earlier = |bound: f64| {
            let found = before.0.iter().find(|(known, _)| *known == bound);
            found.map_or(0.0, |(_, count)| *count)
        };
        Self(self.0.iter().map(|(bound, count)| (*bound, count - earlier(*bound))).collect())
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

    fn summarize_latency(&self, mean_us: f64) -> LatencySummary {
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
kvd_store_seconds_bucket{device=\"0\",le=\"0.001\"} 50
kvd_store_seconds_bucket{device=\"0\",le=\"0.002\"} 100
kvd_store_seconds_bucket{device=\"0\",le=\"+Inf\"} 100
kvd_store_seconds_bucket{device=\"1\",le=\"0.001\"} 0
kvd_store_seconds_bucket{device=\"1\",le=\"0.002\"} 0
kvd_store_seconds_bucket{device=\"1\",le=\"+Inf\"} 10
kvd_store_seconds_sum{device=\"0\"} 0.1
kvd_store_seconds_count{device=\"0\"} 100
kvd_store_seconds_sum{device=\"1\"} 3
kvd_store_seconds_count{device=\"1\"} 10
kvd_model_device_seconds_total{namespace=\"d\",model=\"m.raw\",codec=\"raw\",work=\"store\"} 0.1
kvd_model_device_jobs_total{namespace=\"d\",model=\"m.raw\",codec=\"raw\",work=\"store\"} 100
kvd_model_device_seconds_total{namespace=\"d\",model=\"m.raw\",codec=\"raw\",work=\"load\"} 0.4
kvd_model_device_seconds_total{namespace=\"d\",model=\"other\",codec=\"raw\",work=\"load\"} 8
kvd_model_device_jobs_total{namespace=\"d\",model=\"m.raw\",codec=\"raw\",work=\"attend\"} 3
kvd_encoded_logical_bytes_total{namespace=\"d\",model=\"m.raw\",codec=\"raw\"} 64
";

    #[test]
    fn quantiles_are_those_of_prometheus_over_what_came_since() {
        let before = MetricsSource::new(|| {
            "kvd_store_seconds_bucket{device=\"1\",le=\"+Inf\"} 10\n\
             kvd_store_seconds_sum{device=\"1\"} 3\n\
             kvd_store_seconds_count{device=\"1\"} 10\n"
                .to_owned()
        });
        let calls =
            MetricsSource::new(|| TEXT.to_owned()).read_calls().since_before(&before.read_calls());
        assert_eq!(calls.store.calls, 100);
        assert!((calls.store.p50_us - 1000.0).abs() < 1e-6, "{calls:?}");
        assert!((calls.store.p99_us - 1980.0).abs() < 1e-6, "{calls:?}");
        assert!((calls.store.mean_us - 1000.0).abs() < 1e-6, "{calls:?}");
        assert_eq!(calls.attend, LatencySummary::default());
    }

    #[test]
    fn totals_are_those_of_one_model_and_work() {
        let totals = MetricsSource::new(|| TEXT.to_owned()).device_totals("m.raw");
        let wanted = DeviceTotals {
            store_seconds: 0.1,
            stores: 100.0,
            encode_seconds: 0.0,
            encoded_bytes: 64.0,
            load_seconds: 0.4,
            attend_seconds: 0.0,
            attends: 3.0,
        };
        assert_eq!(totals, wanted);
        let means = totals.mean_times();
        assert!((means.store_us - 1000.0).abs() < 1e-6 && means.attend_us == 0.0, "{means:?}");
        let none = MetricsSource::new(|| TEXT.to_owned()).device_totals("m");
        assert_eq!(none.encoded_bytes + none.load_seconds + none.attends, 0.0);
    }
}
