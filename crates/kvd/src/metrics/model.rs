//! Handles of one model, resolved when it is registered.

use super::{Exporter, Metric, Metrics};
use metrics::{Counter, Gauge, Histogram};
use std::sync::Arc;

/// Everything that carries a model's labels.
pub struct ModelMetrics {
    pub(super) exporter: Arc<Exporter>,
    pub(crate) store_seconds: Histogram,
    pub(crate) encode_seconds: Histogram,
    pub(crate) attend_seconds: Histogram,
    pub(crate) load_seconds: Histogram,
    pub(crate) stored_tokens: Counter,
    pub(crate) encoded_logical_bytes: Counter,
    pub(crate) encoded_page_bytes: Counter,
    pub(crate) encoded_blocks: Counter,
    pub(crate) pack_deferred: Counter,
    pub(crate) fallback_pages: Counter,
    pub(crate) sampled_blocks: Counter,
    pub(crate) over_bound_pages: [Counter; 2],
    pub(crate) attended_query_tokens: Counter,
    pub(crate) attended_stored_bytes: Counter,
    pub(crate) attended_logical_bytes: Counter,
    pub(crate) sequences: Gauge,
    pub(crate) packed_values: Gauge,
    pub(crate) packed_bytes: [Gauge; 2],
    pub(crate) packed_part_bytes: [Gauge; 4],
    pub(crate) raw_values: Gauge,
    pub(crate) raw_bytes: Gauge,
    pub(crate) once_bytes: [Gauge; 2],
    pub(crate) table_versions: Gauge,
    pub(crate) bits_per_value: Gauge,
    pub(crate) compression_ratio: Gauge,
    pub(crate) error_bound: [Gauge; 2],
    pub(crate) codec_error: [Gauge; 2],
    pub(crate) codec_row_error: [Gauge; 2],
}

/// Names of [`ModelMetrics::packed_part_bytes`], in order.
pub(crate) const PARTS: [&str; 4] = ["codes", "scales", "offsets", "header"];

impl ModelMetrics {
    /// Resolves the handles of one model, whose series last until [`Metrics::forget`].
    #[must_use]
    pub fn new(metrics: &Metrics, namespace: &str, model: &str, codec: &str) -> Self {
        let base = [("namespace", namespace), ("model", model), ("codec", codec)];
        let with = |extra: (&'static str, &'static str)| {
            let [a, b, c] = base;
            [a, b, c, extra]
        };
        let exporter = Arc::new(Exporter::new());
        metrics.models.lock().push(exporter.clone());
        let counter = |metric| exporter.counter(metric, &base);
        let gauge = |metric| exporter.gauge(metric, &base);
        let histogram = |metric| exporter.histogram(metric, &base);
        let by = |metric, label, value| exporter.gauge(metric, &with((label, value)));
        Self {
            store_seconds: histogram(Metric::StoreSeconds),
            encode_seconds: histogram(Metric::EncodeSeconds),
            attend_seconds: histogram(Metric::AttendSeconds),
            load_seconds: histogram(Metric::LoadSeconds),
            stored_tokens: counter(Metric::StoredTokensTotal),
            encoded_logical_bytes: counter(Metric::EncodedLogicalBytesTotal),
            encoded_page_bytes: counter(Metric::EncodedPageBytesTotal),
            encoded_blocks: counter(Metric::EncodedBlocksTotal),
            pack_deferred: counter(Metric::PackDeferredTotal),
            fallback_pages: counter(Metric::FallbackPagesTotal),
            sampled_blocks: counter(Metric::SampledBlocksTotal),
            over_bound_pages: ["k", "v"]
                .map(|side| exporter.counter(Metric::OverBoundPagesTotal, &with(("side", side)))),
            attended_query_tokens: counter(Metric::AttendedQueryTokensTotal),
            attended_stored_bytes: counter(Metric::AttendedStoredBytesTotal),
            attended_logical_bytes: counter(Metric::AttendedLogicalBytesTotal),
            sequences: gauge(Metric::Sequences),
            packed_values: gauge(Metric::PackedValues),
            packed_bytes: ["k", "v"].map(|side| by(Metric::PackedBytes, "side", side)),
            packed_part_bytes: PARTS.map(|part| by(Metric::PackedPartBytes, "part", part)),
            raw_values: gauge(Metric::RawValues),
            raw_bytes: gauge(Metric::RawBytes),
            once_bytes: ["calibration", "tables"]
                .map(|part| by(Metric::ModelOnceBytes, "part", part)),
            table_versions: gauge(Metric::TableVersions),
            bits_per_value: gauge(Metric::BitsPerValue),
            compression_ratio: gauge(Metric::CompressionRatio),
            error_bound: ["k", "v"].map(|side| by(Metric::ErrorBound, "side", side)),
            codec_error: ["k", "v"].map(|side| by(Metric::CodecError, "side", side)),
            codec_row_error: ["k", "v"].map(|side| by(Metric::CodecRowError, "side", side)),
            exporter: exporter.clone(),
        }
    }
}
