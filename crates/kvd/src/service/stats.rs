//! Totals of what the daemon holds, for `GetStats` and for the gauges that are read at scrape.

use super::{CallContext, DeviceShard, RegisteredModel, Service, ServiceError};
use crate::metrics::Metric;
use kvd_compute::ModelBytes;
use kvd_core::DType;
use kvd_store::{ModelUsage, PoolUsage, StoredBytes};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Use of pools.
pub type PoolStats = PoolUsage;

/// Use of one device's pool.
pub(crate) struct DevicePool<'a> {
    /// The device, as the label `device` of metrics has it.
    pub(crate) device: &'a str,
    /// Tier and bytes.
    pub(crate) pool: PoolUsage,
}

/// A model and what it holds now.
pub struct ModelStats {
    /// The model.
    pub model: Arc<RegisteredModel>,
    /// Sequences and bytes.
    pub usage: ModelUsage,
    /// Bytes that it takes once.
    pub once: ModelBytes,
}

impl Service {
    /// Use of the pools, all devices together; the largest free range is that of one of them, the
    /// tier that of the first.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        let mut all = self.shards[0].store.pool().read_usage();
        for usage in self.shards[1..].iter().map(|shard| shard.store.pool().read_usage()) {
            all.capacity_bytes += usage.capacity_bytes;
            all.used_bytes += usage.used_bytes;
            all.slots += usage.slots;
            all.largest_free_bytes = all.largest_free_bytes.max(usage.largest_free_bytes);
        }
        all
    }

    /// Use of each device's pool.
    pub(crate) fn device_pools(&self) -> impl Iterator<Item = DevicePool<'_>> {
        self.shards.iter().map(|shard| DevicePool {
            device: &shard.worker.metrics().label,
            pool: shard.store.pool().read_usage(),
        })
    }

    pub(super) fn model_usage(&self, model: &RegisteredModel) -> ModelUsage {
        self.shards[model.shard].store.model_usage(model.shape.id)
    }

    /// One model's totals. The device is not asked: it may be busy for long.
    ///
    /// # Errors
    /// When the deadline has passed.
    pub fn model_stats(
        &self,
        call: &CallContext,
        model: Arc<RegisteredModel>,
    ) -> Result<ModelStats, ServiceError> {
        call.check_deadline()?;
        let once = model_bytes(&model);
        Ok(ModelStats { usage: self.model_usage(&model), model, once })
    }

    /// Sets the gauges, without asking the device.
    pub fn refresh_gauges(&self) {
        let metrics = &self.metrics;
        metrics.gauge(Metric::Ready, &[]).set(if self.is_ready() { 1.0 } else { 0.0 });
        metrics.gauge(Metric::InflightBytes, &[]).set(self.inflight_bytes() as f64);
        self.shards.iter().for_each(refresh_device);
        super::tiers::refresh_tier(metrics, self.tiers.as_deref());
        self.refresh_quotas();
        let models = self.models.list_models(None);
        metrics.gauge(Metric::Models, &[]).set(models.len() as f64);
        metrics.gauge(Metric::Sessions, &[]).set(self.sessions.count_sessions() as f64);
        for model in models {
            refresh_model(&model, &self.model_usage(&model));
        }
    }
}

fn refresh_device(shard: &DeviceShard) {
    let (metrics, pool) = (shard.worker.metrics(), shard.store.pool().read_usage());
    for (gauge, jobs) in metrics.queue_depth.iter().zip(shard.worker.queued_by_kind()) {
        gauge.set(jobs as f64);
    }
    let messages = shard.worker.queued_stream_messages();
    for (gauge, count) in metrics.queued_messages.iter().zip(messages) {
        gauge.set(count as f64);
    }
    metrics.pool_capacity_bytes.set(pool.capacity_bytes as f64);
    metrics.pool_used_bytes.set(pool.used_bytes as f64);
    metrics.pool_largest_free_bytes.set(pool.largest_free_bytes as f64);
    metrics.pool_slots.set(pool.slots as f64);
    let (cache, usage) = (&metrics.cache, shard.store.prefix_index().read_usage(Instant::now()));
    cache.entries.set(usage.entries as f64);
    cache.bytes.set(usage.bytes as f64);
    cache.pinned_bytes.set(usage.pinned_bytes as f64);
    cache.leases.set(usage.leases as f64);
    let published = [usage.published, usage.existed];
    let evicted = [usage.evicted_for_room, usage.evicted_by_limit, usage.dropped];
    let counts = cache.published.iter().zip(published).chain(cache.evicted.iter().zip(evicted));
    counts.for_each(|(counter, count)| counter.absolute(count));
    cache.blocked.absolute(usage.evictions_blocked);
    cache.disk_entries.set(usage.disk_entries as f64);
    cache.evicted_to_disk.absolute(usage.evicted_to_disk);
}

fn model_bytes(model: &RegisteredModel) -> ModelBytes {
    ModelBytes {
        calibration: model.calibration_bytes,
        tables: model.table_bytes.load(Ordering::Relaxed),
        table_versions: model.table_versions.load(Ordering::Relaxed),
    }
}

fn refresh_model(model: &RegisteredModel, usage: &ModelUsage) {
    let (metrics, stored) = (&model.metrics, &usage.stored);
    let once = model_bytes(model);
    metrics.once_bytes[0].set(once.calibration as f64);
    metrics.once_bytes[1].set(once.tables as f64);
    metrics.table_versions.set(once.table_versions as f64);
    metrics.sequences.set(usage.sequences as f64);
    metrics.packed_values.set(stored.packed_values as f64);
    metrics.packed_bytes[0].set(stored.packed_key_bytes as f64);
    metrics.packed_bytes[1].set(stored.packed_value_bytes as f64);
    let parts = [stored.code_bytes, stored.scale_bytes, stored.offset_bytes, stored.header_bytes];
    for (gauge, bytes) in metrics.packed_part_bytes.iter().zip(parts) {
        gauge.set(bytes as f64);
    }
    metrics.raw_values.set(stored.raw_values as f64);
    metrics.raw_bytes.set(stored.raw_bytes as f64);
    let saving = StorageSaving::from_stored(stored, model.shape.geometry.dtype);
    metrics.held_bytes.set(saving.held_bytes);
    metrics.logical_bytes.set(saving.logical_bytes);
    metrics.saved_bytes.set(saving.logical_bytes - saving.held_bytes);
    // What does not exist has no series: NaN takes it away.
    let packed_bytes = stored.packed_bytes as f64;
    metrics.packed_bytes_per_value.set(divide_or_nan(packed_bytes, stored.packed_values as f64));
    metrics.compression_ratio.set(divide_or_nan(saving.logical_bytes, saving.held_bytes));
    for (gauge, error) in metrics.codec_error.iter().zip(model.sampled_error()) {
        gauge.set(error.unwrap_or(f64::NAN));
    }
    for (gauge, error) in metrics.codec_row_error.iter().zip(model.sampled_row_error()) {
        gauge.set(error.unwrap_or(f64::NAN));
    }
    for (gauge, bound) in metrics.error_bound.iter().zip(model.spec.bounds) {
        gauge.set(bound.map_or(f64::NAN, f64::from));
    }
}

/// Bytes that a model's K and V take, and would take in the stored precision.
pub(super) struct StorageSaving {
    pub(super) held_bytes: f64,
    pub(super) logical_bytes: f64,
}

impl StorageSaving {
    pub(super) fn from_stored(stored: &StoredBytes, dtype: DType) -> Self {
        let values = stored.packed_values + stored.raw_values;
        Self {
            held_bytes: (stored.packed_bytes + stored.raw_bytes) as f64,
            logical_bytes: (values * dtype.size_bytes() as u64) as f64,
        }
    }
}

/// NaN where there is nothing to divide by.
fn divide_or_nan(amount: f64, unit: f64) -> f64 {
    if unit > 0.0 { amount / unit } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_counts_windows_and_is_none_of_nothing() {
        let stored = StoredBytes {
            packed_values: 800,
            packed_bytes: 200,
            raw_values: 100,
            raw_bytes: 200,
            ..StoredBytes::default()
        };
        let saving = StorageSaving::from_stored(&stored, DType::F16);
        assert_eq!(divide_or_nan(saving.logical_bytes, saving.held_bytes), 1800.0 / 400.0);
        assert_eq!(saving.logical_bytes - saving.held_bytes, 1400.0);
        let nothing = StorageSaving::from_stored(&StoredBytes::default(), DType::F16);
        assert!(divide_or_nan(nothing.logical_bytes, nothing.held_bytes).is_nan());
    }
}
