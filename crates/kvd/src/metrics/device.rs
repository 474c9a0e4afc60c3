//! Handles of one device, resolved when its worker starts.

use super::group::GroupBuilder;
use super::{Metric, Metrics, SecondsCounter};
use metrics::{Counter, Gauge, Histogram};

/// Everything that carries a device's label.
pub struct DeviceMetrics {
    /// The value of the label `device`: 0, 1 and so on, as the configuration names them.
    pub(crate) label: String,
    /// The tier of its pool.
    pub(crate) tier: &'static str,
    /// By [`Self::KINDS`].
    pub(crate) queue_depth: [Gauge; 2],
    pub(crate) queued_messages: [Gauge; 2],
    pub(crate) queue_seconds: [Histogram; 2],
    pub(crate) busy_seconds: [SecondsCounter; 2],
    /// Jobs that nobody waited for any more when they were to begin.
    pub(crate) abandoned_before: Counter,
    /// Jobs whose caller left while they ran.
    pub(crate) abandoned_during: Counter,
    pub(crate) merged_attends: Counter,
    pub(crate) store_seconds: Histogram,
    pub(crate) encode_seconds: Histogram,
    pub(crate) attend_seconds: Histogram,
    pub(crate) load_seconds: Histogram,
    pub(crate) pool_capacity_bytes: Gauge,
    pub(crate) pool_used_bytes: Gauge,
    pub(crate) pool_largest_free_bytes: Gauge,
    pub(crate) pool_slots: Gauge,
    pub(crate) cache: CacheMetrics,
}

/// Handles of a device's cache.
pub(crate) struct CacheMetrics {
    pub(crate) entries: Gauge,
    pub(crate) bytes: Gauge,
    pub(crate) pinned_bytes: Gauge,
    pub(crate) leases: Gauge,
    /// Blocks that are new, and those that existed.
    pub(crate) published: [Counter; 2],
    /// For room, by a limit, and dropped.
    pub(crate) evicted: [Counter; 3],
    pub(crate) blocked: Counter,
    pub(crate) disk_entries: Gauge,
    pub(crate) evicted_to_disk: Counter,
}

impl CacheMetrics {
    fn new(group: &mut GroupBuilder<'_>) -> Self {
        Self {
            entries: group.gauge(Metric::IndexEntries, &[]),
            bytes: group.gauge(Metric::CachedBytes, &[]),
            pinned_bytes: group.gauge(Metric::PinnedBytes, &[]),
            leases: group.gauge(Metric::Leases, &[]),
            published: ["new", "existed"]
                .map(|result| group.counter(Metric::PublishedBlocksTotal, &[("result", result)])),
            evicted: ["room", "limit", "dropped"]
                .map(|reason| group.counter(Metric::EvictedBlocksTotal, &[("reason", reason)])),
            blocked: group.counter(Metric::EvictBlockedTotal, &[]),
            disk_entries: group.gauge(Metric::DiskEntries, &[]),
            evicted_to_disk: group.counter(Metric::EvictedToDiskTotal, &[]),
        }
    }
}

impl DeviceMetrics {
    /// Values of the label `kind`.
    pub(crate) const KINDS: [&str; 2] = ["attend", "other"];

    /// Resolves the handles of the next device, whose series last as long as the recorder.
    pub(super) fn new(metrics: &Metrics, label: String, tier: &'static str) -> Self {
        let base = [("device", label.as_str())];
        let mut group = GroupBuilder::new(&base);
        let histogram = |metric| metrics.histogram(metric, &base);
        let by_kind = |kind| [base[0], ("kind", kind)];
        let tiered = [("tier", tier)];
        let device = Self {
            queue_depth: Self::KINDS.map(|kind| group.gauge(Metric::QueueDepth, &[("kind", kind)])),
            queued_messages: Self::KINDS
                .map(|kind| group.gauge(Metric::QueuedStreamMessages, &[("kind", kind)])),
            queue_seconds: Self::KINDS
                .map(|kind| metrics.histogram(Metric::QueueSeconds, &by_kind(kind))),
            busy_seconds: Self::KINDS
                .map(|kind| group.seconds(Metric::DeviceBusySecondsTotal, &[("kind", kind)])),
            abandoned_before: group.counter(Metric::AbandonedJobsTotal, &[("when", "before")]),
            abandoned_during: group.counter(Metric::AbandonedJobsTotal, &[("when", "during")]),
            merged_attends: group.counter(Metric::MergedAttendsTotal, &[]),
            store_seconds: histogram(Metric::StoreSeconds),
            encode_seconds: histogram(Metric::EncodeSeconds),
            attend_seconds: histogram(Metric::AttendSeconds),
            load_seconds: histogram(Metric::LoadSeconds),
            pool_capacity_bytes: group.gauge(Metric::PoolCapacityBytes, &tiered),
            pool_used_bytes: group.gauge(Metric::PoolUsedBytes, &tiered),
            pool_largest_free_bytes: group.gauge(Metric::PoolLargestFreeBytes, &tiered),
            pool_slots: group.gauge(Metric::PoolSlots, &tiered),
            cache: CacheMetrics::new(&mut group),
            tier,
            label: label.clone(),
        };
        metrics.keep_group(group.build_group());
        device
    }
}
