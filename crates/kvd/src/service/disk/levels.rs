//! Metrics of the disk tier, from its own counters. Without a tier they are zeros.

use super::DiskCache;
use crate::metrics::{Metric, Metrics};
use kvd_tier::TierLevels;

const TIER: (&str, &str) = ("tier", "disk");

/// Sets the metrics of the tier.
pub(crate) fn refresh_tier(metrics: &Metrics, disk: Option<&DiskCache>) {
    let levels = disk.map(DiskCache::read_levels).unwrap_or_default();
    let queued = disk.map_or(0, DiskCache::queued_bytes);
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
