//! What the daemon holds, for `GetStats` and for the gauges that are read at scrape.

use super::{Call, Model, Service, ServiceError};
use crate::lane::Lane;
use crate::metrics::Metric;
use kvd_compute::ModelBytes;
use kvd_store::{ModelUsage, PoolUsage, StoredBytes};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Use of one tier's pool.
pub type PoolStats = PoolUsage;

/// A model and what it holds now.
pub struct ModelStats {
    /// The model.
    pub model: Arc<Model>,
    /// Sequences and bytes.
    pub usage: ModelUsage,
    /// What it takes once.
    pub once: ModelBytes,
}

impl Service {
    /// Use of the pools, all devices together; the largest free range is that of one of them.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        let mut all = self.seats[0].store.pool().usage();
        for usage in self.seats[1..].iter().map(|seat| seat.store.pool().usage()) {
            all.capacity_bytes += usage.capacity_bytes;
            all.used_bytes += usage.used_bytes;
            all.slots += usage.slots;
            all.largest_free_bytes = all.largest_free_bytes.max(usage.largest_free_bytes);
        }
        all
    }

    pub(super) fn usage(&self, model: &Model) -> ModelUsage {
        self.seats[model.seat].store.usage(model.shape.id)
    }

    /// One model's totals. The device is not asked: it may be busy for long.
    ///
    /// # Errors
    /// When the deadline has passed.
    pub fn model_stats(&self, call: &Call, model: Arc<Model>) -> Result<ModelStats, ServiceError> {
        call.check_deadline()?;
        let once = once(&model);
        Ok(ModelStats { usage: self.usage(&model), model, once })
    }

    /// Jobs that wait for a device.
    fn queued(&self) -> usize {
        self.lanes().map(Lane::queued).sum()
    }

    /// Sets the gauges, without asking the device.
    pub fn refresh_gauges(&self) {
        let metrics = &self.metrics;
        metrics.gauge(Metric::Ready, &[]).set(if self.ready() { 1.0 } else { 0.0 });
        metrics.gauge(Metric::QueueDepth, &[]).set(self.queued() as f64);
        if let Some(bytes) = resident_bytes() {
            metrics.gauge(Metric::ResidentBytes, &[]).set(bytes as f64);
        }
        let pool = self.pool_stats();
        let tier = [("tier", pool.tier)];
        metrics.gauge(Metric::PoolCapacityBytes, &tier).set(pool.capacity_bytes as f64);
        metrics.gauge(Metric::PoolUsedBytes, &tier).set(pool.used_bytes as f64);
        metrics.gauge(Metric::PoolLargestFreeBytes, &tier).set(pool.largest_free_bytes as f64);
        metrics.gauge(Metric::PoolSlots, &tier).set(pool.slots as f64);
        let models = self.models.list(None);
        metrics.gauge(Metric::Models, &[]).set(models.len() as f64);
        for model in models {
            refresh_model(&model, &self.usage(&model));
        }
    }
}

fn once(model: &Model) -> ModelBytes {
    ModelBytes {
        calibration: model.calibration_bytes,
        tables: model.table_bytes.load(Ordering::Relaxed),
        table_versions: model.table_versions.load(Ordering::Relaxed),
    }
}

fn refresh_model(model: &Model, usage: &ModelUsage) {
    let (metrics, stored) = (&model.metrics, &usage.stored);
    let once = once(model);
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
    metrics.bits_per_value.set(bits_per_value(stored));
    let value_bytes = model.shape.geometry.dtype.size_bytes() as f64;
    metrics.compression_ratio.set(compression_ratio(stored, value_bytes));
    for (gauge, error) in metrics.codec_error.iter().zip(model.sampled_error()) {
        // No number: neither exact nor over any threshold of an alert.
        gauge.set(error.unwrap_or(f64::NAN));
    }
    for (gauge, bound) in metrics.error_bound.iter().zip(model.spec.bounds) {
        gauge.set(bound.map_or(0.0, f64::from));
    }
}

/// Bits of packed blocks per value, everything counted; 0 while nothing is packed.
fn bits_per_value(stored: &StoredBytes) -> f64 {
    if stored.packed_values == 0 {
        return 0.0;
    }
    stored.packed_bytes as f64 * 8.0 / stored.packed_values as f64
}

/// Bytes in the stored precision over bytes held, windows included; 0 while nothing is held.
fn compression_ratio(stored: &StoredBytes, value_bytes: f64) -> f64 {
    let held = (stored.packed_bytes + stored.raw_bytes) as f64;
    if held == 0.0 {
        return 0.0;
    }
    (stored.packed_values + stored.raw_values) as f64 * value_bytes / held
}

/// Resident memory, where the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_counts_windows_and_bits_do_not() {
        let stored = StoredBytes {
            packed_values: 800,
            packed_bytes: 200,
            raw_values: 100,
            raw_bytes: 200,
            ..StoredBytes::default()
        };
        assert_eq!(bits_per_value(&stored), 2.0);
        assert_eq!(compression_ratio(&stored, 2.0), 1800.0 / 400.0);
        assert_eq!(compression_ratio(&StoredBytes::default(), 2.0), 0.0);
    }

    #[test]
    fn resident_memory_is_known_on_linux() {
        if cfg!(target_os = "linux") {
            assert!(resident_bytes().unwrap() > 1 << 20);
        }
    }
}
