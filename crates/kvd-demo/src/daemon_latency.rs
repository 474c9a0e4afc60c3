//! Latencies as the daemon's own histograms tell them, read from its Prometheus exposition.

use crate::latency::{Calls, LatencySummary};
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
        let summary = |metric| Histogram::read(&text, metric, model).summary();
        Calls { store: summary("kvd_store_seconds"), attend: summary("kvd_attend_seconds") }
    }
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
        let label = format!("model=\"{model}\"");
        let bucket = |line: &str| {
            let (labels, count) = line.strip_prefix(&prefix)?.rsplit_once("} ")?;
            let mut labels = labels.split(',');
            if !labels.clone().any(|found| found == label) {
                return None;
            }
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

    fn summary(&self) -> LatencySummary {
        LatencySummary {
            calls: self.0.last().map_or(0, |(_, count)| *count as u64),
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
";

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let source = MetricsSource::new(|| TEXT.to_owned());
        let calls = source.calls("m.raw");
        assert_eq!(calls.store.calls, 100);
        assert!((calls.store.p50_us - 1000.0).abs() < 1e-6, "{calls:?}");
        assert!((calls.store.p99_us - 1980.0).abs() < 1e-6, "{calls:?}");
        assert_eq!(calls.attend, LatencySummary::default());
    }
}
