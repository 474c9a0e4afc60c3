//! How long calls took, as the client sees them.

use serde::Serialize;
use std::time::Duration;

/// Samples of one kind of call.
#[derive(Clone, Debug, Default)]
pub(crate) struct LatencySamples(Vec<Duration>);

/// Percentiles of a kind of call, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Calls.
    pub calls: u64,
    /// Mean.
    pub mean_us: f64,
    /// Half of the calls took no longer.
    pub p50_us: f64,
    /// 99 of 100 calls took no longer.
    pub p99_us: f64,
}

/// Samples of store and attend.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallLatencies {
    pub(crate) store: LatencySamples,
    pub(crate) attend: LatencySamples,
}

/// Latencies as the client sees them: the daemon's work and the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CallSummaries {
    /// `StoreBlocks` of one layer, until acknowledged.
    pub store: LatencySummary,
    /// `Attend` of one layer.
    pub attend: LatencySummary,
}

impl CallLatencies {
    pub(crate) fn summarize_calls(&self) -> CallSummaries {
        CallSummaries {
            store: self.store.summarize_samples(),
            attend: self.attend.summarize_samples(),
        }
    }
}

impl LatencySamples {
    pub(crate) fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn summarize_samples(&self) -> LatencySummary {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        // The nearest rank: the smallest sample that at least this share does not exceed.
        let percentile = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            let sample = sorted.get(rank.max(1) - 1).copied().unwrap_or_default();
            sample.as_secs_f64() * 1e6
        };
        let seconds: f64 = sorted.iter().map(Duration::as_secs_f64).sum();
        LatencySummary {
            calls: sorted.len() as u64,
            mean_us: if sorted.is_empty() { 0.0 } else { seconds * 1e6 / sorted.len() as f64 },
            p50_us: percentile(0.50),
            p99_us: percentile(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut latencies = LatencySamples::default();
        assert_eq!(latencies.summarize_samples(), LatencySummary::default());
        for us in (1..=200).rev() {
            latencies.push(Duration::from_micros(us));
        }
        let summary = latencies.summarize_samples();
        assert_eq!(summary.calls, 200);
        assert!((summary.mean_us - 100.5).abs() < 1e-6, "{summary:?}");
        assert!((summary.p50_us - 100.0).abs() < 1e-6, "{summary:?}");
        assert!((summary.p99_us - 198.0).abs() < 1e-6, "{summary:?}");
    }
}
