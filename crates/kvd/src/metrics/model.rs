//! Handles of one model, resolved when it is registered.

use super::group::{GroupBuilder, SeriesGroup};
use super::{DeviceMetrics, Metric, Metrics, SecondsCounter};
use metrics::{Counter, Gauge, Histogram};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// One kind of work on a device: the device's distribution of durations, and the model's share.
pub(crate) struct WorkMetrics {
    durations: Histogram,
    seconds: SecondsCounter,
    jobs: Counter,
}

impl WorkMetrics {
    /// Counts one job.
    pub(crate) fn record_job(&self, took: Duration) {
        self.durations.record(took.as_secs_f64());
        self.seconds.add_time(took);
        self.jobs.increment(1);
    }
}

/// Everything that carries a model's labels.
pub struct ModelMetrics {
    pub(super) group: Arc<SeriesGroup>,
    pub(crate) store: WorkMetrics,
    pub(crate) encode: WorkMetrics,
    pub(crate) attend: WorkMetrics,
    pub(crate) load: WorkMetrics,
    pub(crate) stored_layer_tokens: Counter,
    pub(crate) stored_logical_bytes: Counter,
    pub(crate) loaded_logical_bytes: Counter,
    pub(crate) encoded_logical_bytes: Counter,
    pub(crate) encoded_page_bytes: Counter,
    pub(crate) encoded_layer_blocks: Counter,
    pub(crate) pack_deferred: Counter,
    pub(crate) fallback_pages: Counter,
    pub(crate) sampled_blocks: Counter,
    pub(crate) over_bound_pages: [Counter; 2],
    pub(crate) attended_layer_query_tokens: Counter,
    pub(crate) attended_stored_bytes: Counter,
    pub(crate) attended_logical_bytes: Counter,
    pub(crate) saved_passes: Counter,
    pub(crate) sequences: Gauge,
    pub(crate) held_bytes: Gauge,
    pub(crate) logical_bytes: Gauge,
    pub(crate) saved_bytes: Gauge,
    pub(crate) packed_values: Gauge,
    pub(crate) packed_bytes: [Gauge; 2],
    pub(crate) packed_part_bytes: [Gauge; 4],
    pub(crate) raw_values: Gauge,
    pub(crate) raw_bytes: Gauge,
    pub(crate) once_bytes: [Gauge; 2],
    pub(crate) table_versions: Gauge,
    pub(crate) packed_bytes_per_value: Gauge,
    pub(crate) compression_ratio: Gauge,
    pub(crate) error_bound: [Gauge; 2],
    pub(crate) codec_error: [Gauge; 2],
    pub(crate) codec_row_error: [Gauge; 2],
}

/// Names of [`ModelMetrics::packed_part_bytes`], in order.
pub(crate) const PARTS: [&str; 4] = ["codes", "scales", "offsets", "header"];

/// Labels that name a model where its series are shown.
#[derive(Clone, Copy, Debug)]
pub struct ModelLabels<'a> {
    /// Tenant of the model.
    pub namespace: &'a str,
    /// Name of the model in its namespace.
    pub model: &'a str,
    /// A preset's name, or a short name of a spec.
    pub codec: &'a str,
}

impl ModelMetrics {
    /// A counter of the model as it stands.
    pub(crate) fn read_count(&self, metric: Metric) -> u64 {
        self.group.read_count(metric)
    }

    /// Resolves the handles of one model on a device, whose series last until
    /// [`Metrics::forget_model`].
    #[must_use]
    pub fn new(
        metrics: &Metrics,
        device: &DeviceMetrics,
        labels: ModelLabels<'_>,
        layers: u32,
    ) -> Self {
        let ModelLabels { namespace, model, codec } = labels;
        let base = [("namespace", namespace), ("model", model), ("codec", codec)];
        let mut group = GroupBuilder::new(&base);
        let mut work = |name, durations: &Histogram| WorkMetrics {
            durations: durations.clone(),
            seconds: group.seconds(Metric::ModelDeviceSecondsTotal, &[("work", name)]),
            jobs: group.counter(Metric::ModelDeviceJobsTotal, &[("work", name)]),
        };
        let store = work("store", &device.store_seconds);
        let encode = work("encode", &device.encode_seconds);
        let attend = work("attend", &device.attend_seconds);
        let load = work("load", &device.load_seconds);
        group.gauge(Metric::ModelRegistered, &[]).set(now_seconds());
        group.gauge(Metric::ModelLayers, &[]).set(f64::from(layers));
        let over_bound_pages =
            SIDES.map(|side| group.counter(Metric::OverBoundPagesTotal, &[("side", side)]));
        let mut by_side = |metric| SIDES.map(|side| group.gauge(metric, &[("side", side)]));
        let packed_bytes = by_side(Metric::PackedBytes);
        let error_bound = by_side(Metric::ErrorBound);
        let codec_error = by_side(Metric::CodecError);
        let codec_row_error = by_side(Metric::CodecRowError);
        let packed_part_bytes =
            PARTS.map(|part| group.gauge(Metric::PackedPartBytes, &[("part", part)]));
        let once_bytes = ["calibration", "tables"]
            .map(|part| group.gauge(Metric::ModelOnceBytes, &[("part", part)]));
        Self {
            store,
            encode,
            attend,
            load,
            stored_layer_tokens: group.counter(Metric::StoredLayerTokensTotal, &[]),
            stored_logical_bytes: group.counter(Metric::StoredLogicalBytesTotal, &[]),
            loaded_logical_bytes: group.counter(Metric::LoadedLogicalBytesTotal, &[]),
            encoded_logical_bytes: group.counter(Metric::EncodedLogicalBytesTotal, &[]),
            encoded_page_bytes: group.counter(Metric::EncodedPageBytesTotal, &[]),
            encoded_layer_blocks: group.counter(Metric::EncodedLayerBlocksTotal, &[]),
            pack_deferred: group.counter(Metric::PackDeferredTotal, &[]),
            fallback_pages: group.counter(Metric::FallbackPagesTotal, &[]),
            sampled_blocks: group.counter(Metric::SampledBlocksTotal, &[]),
            over_bound_pages,
            attended_layer_query_tokens: group.counter(Metric::AttendedLayerQueryTokensTotal, &[]),
            attended_stored_bytes: group.counter(Metric::AttendedStoredBytesTotal, &[]),
            attended_logical_bytes: group.counter(Metric::AttendedLogicalBytesTotal, &[]),
            saved_passes: group.counter(Metric::SavedBlockPassesTotal, &[]),
            sequences: group.gauge(Metric::Sequences, &[]),
            held_bytes: group.gauge(Metric::HeldBytes, &[]),
            logical_bytes: group.gauge(Metric::LogicalBytes, &[]),
            saved_bytes: group.gauge(Metric::SavedBytes, &[]),
            packed_values: group.gauge(Metric::PackedValues, &[]),
            packed_bytes,
            packed_part_bytes,
            raw_values: group.gauge(Metric::RawValues, &[]),
            raw_bytes: group.gauge(Metric::RawBytes, &[]),
            once_bytes,
            table_versions: group.gauge(Metric::TableVersions, &[]),
            packed_bytes_per_value: group.gauge(Metric::PackedBytesPerValue, &[]),
            compression_ratio: group.gauge(Metric::CompressionRatio, &[]),
            error_bound,
            codec_error,
            codec_row_error,
            group: metrics.keep_group(group.build_group()),
        }
    }
}

/// Values of the label `side`.
const SIDES: [&str; 2] = ["k", "v"];

fn now_seconds() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64().floor())
}
