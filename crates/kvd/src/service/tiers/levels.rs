//! Metrics of the tiers, from their own counters. Without a tier they are zeros.

use super::CacheTiers;
use crate::metrics::{Metric, Metrics};
use kvd_remote::{RemoteLevels, RemoteOp};
use kvd_tier::TierLevels;

const TIER: (&str, &str) = ("tier", "disk");
const REMOTE: (&str, &str) = ("tier", "remote");

/// Sets the metrics of the tier.
pub(crate) fn refresh_tier(metrics: &Metrics, disk: Option<&CacheTiers>) {
    let levels = disk.map(CacheTiers::read_levels).unwrap_or_default();
    let queued = disk.map_or(0, CacheTiers::queued_bytes);
    let gauges = [
        (Metric::TierState, levels.state as u64),
        (Metric::TierCapacityBytes, levels.capacity_bytes),
        (Metric::TierUsedBytes, levels.used_bytes),
        (Metric::TierQueueBytes, queued),
    ];
    for (metric, value) in gauges {
        metrics.gauge(metric, &[TIER]).set(value as f64);
    }
    metrics.gauge(Metric::Segments, &[]).set(levels.segments as f64);
    metrics.gauge(Metric::DurableLag, &[]).set(levels.durable_lag_us as f64 / 1e6);
    metrics.gauge(Metric::RecoverSeconds, &[]).set(levels.recover_us as f64 / 1e6);
    let counters = [
        (Metric::TierWriteBytesTotal, levels.written_bytes),
        (Metric::TierReadBytesTotal, levels.read_bytes),
        (Metric::CorruptRecordsTotal, levels.corrupt_records),
    ];
    for (metric, count) in counters {
        metrics.counter(metric, &[TIER]).absolute(count);
    }
    metrics.counter(Metric::ReinsertedBytesTotal, &[]).absolute(levels.reinserted_bytes);
    refresh_reasons(metrics, &levels);
    refresh_remote(metrics, &disk.and_then(CacheTiers::read_remote).unwrap_or_default());
}

fn refresh_remote(metrics: &Metrics, levels: &RemoteLevels) {
    metrics.gauge(Metric::RemoteState, &[]).set(f64::from(levels.state as u8));
    metrics.gauge(Metric::TierQueueBytes, &[REMOTE]).set(levels.queued_bytes as f64);
    metrics.counter(Metric::RemoteFoundBlocksTotal, &[]).absolute(levels.found);
    let counters = [
        (Metric::TierWriteBytesTotal, levels.written_bytes),
        (Metric::TierReadBytesTotal, levels.read_bytes),
        (Metric::CorruptRecordsTotal, levels.corrupt),
    ];
    for (metric, count) in counters {
        metrics.counter(metric, &[REMOTE]).absolute(count);
    }
    for (reason, count) in [("queue", levels.drops_queue), ("remote", levels.drops_failed)] {
        let labels = [REMOTE, ("reason", reason)];
        metrics.counter(Metric::TierWriteDropsTotal, &labels).absolute(count);
    }
    for op in RemoteOp::ALL {
        let counts = levels.requests[op as usize];
        let op = ("op", op.op_label());
        let results = [
            ("ok", counts.answered),
            ("failed", counts.failed),
            ("full", counts.full),
            ("denied", counts.denied),
            ("timeout", counts.timed_out),
            ("skipped", counts.skipped),
        ];
        for (result, count) in results {
            let labels = [op, ("result", result)];
            metrics.counter(Metric::RemoteRequestsTotal, &labels).absolute(count);
        }
    }
}

fn refresh_reasons(metrics: &Metrics, levels: &TierLevels) {
    let drops = [
        ("queue", levels.drops_queue),
        ("full", levels.drops_full),
        ("io", levels.drops_io),
        ("parent", levels.drops_parent),
        ("other", levels.drops_other),
    ];
    for (reason, count) in drops {
        let labels = [TIER, ("reason", reason)];
        metrics.counter(Metric::TierWriteDropsTotal, &labels).absolute(count);
    }
    let errors = [
        ("write", levels.errors_write),
        ("sync", levels.errors_sync),
        ("read", levels.errors_read),
        ("file", levels.errors_file),
    ];
    for (reason, count) in errors {
        let labels = [TIER, ("reason", reason)];
        metrics.counter(Metric::TierErrorsTotal, &labels).absolute(count);
    }
    let recovered = [
        ("live", levels.recovered_live),
        ("orphan", levels.recovered_orphan),
        ("replaced", levels.recovered_replaced),
        ("removed", levels.recovered_removed),
        ("torn", levels.recovered_torn),
    ];
    for (result, count) in recovered {
        metrics.counter(Metric::RecoveredBlocksTotal, &[("result", result)]).absolute(count);
    }
}
