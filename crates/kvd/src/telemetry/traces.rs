//! Traces of calls, for a collector of OpenTelemetry.
//!
//! A span a call, of the time from its message to its answer: namespace, model, sequence, error
//! code, and how long it waited for the device and had it. A caller's `traceparent` makes it a
//! child of the caller's span.

use crate::config::{ConfigError, TraceConfig};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{SpanContext, TraceContextExt, TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use std::time::Duration;
use tonic::metadata::MetadataMap;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::registry::LookupSpan;

/// Name of the span of a call.
pub(crate) const CALL_SPAN: &str = "rpc";

/// How long a collector has for a batch, and for the last one before the daemon ends.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
const LAST_EXPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Spans on their way to a collector: at most 2,048 wait for a thread that sends them, more are
/// dropped.
#[derive(Debug)]
pub struct TraceExport {
    provider: SdkTracerProvider,
}

impl TraceExport {
    /// Starts the thread that sends spans. The collector need not be there yet. Called within a
    /// Tokio runtime, which carries the connection.
    pub(super) fn start_thread(config: &TraceConfig) -> Result<Self, ConfigError> {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&config.endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|error| ConfigError::new("traces.endpoint", error.to_string()))?;
        let version = opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_service_name("kvd").with_attribute(version);
        let of_roots = Sampler::TraceIdRatioBased(config.sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(Sampler::ParentBased(Box::new(of_roots)))
            .with_resource(resource.build())
            .build();
        Ok(Self { provider })
    }

    /// The layer that makes spans of calls spans of traces.
    pub(super) fn span_layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    {
        let tracer = self.provider.tracer("kvd");
        let is_call = FilterFn::new(|metadata| metadata.is_span() && metadata.name() == CALL_SPAN);
        tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_filter(is_call.with_max_level_hint(LevelFilter::DEBUG))
    }

    /// Sends what waits, and ends. A collector that does not answer is not waited for long.
    pub async fn end_thread(self) {
        let end = move || self.provider.shutdown_with_timeout(LAST_EXPORT_TIMEOUT);
        match tokio::task::spawn_blocking(end).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the last traces were not sent"),
            Err(panic) => tracing::error!(%panic, "the thread that sends traces broke"),
        }
    }
}

/// The span that a call was made in, from its `traceparent` and `tracestate`; none where there is
/// none or it is malformed.
pub(crate) fn read_parent(metadata: &MetadataMap) -> Option<SpanContext> {
    metadata.get("traceparent")?;
    let extracted = TraceContextPropagator::new()
        .extract_with_context(&Context::new(), &MetadataTexts(metadata));
    let parent = extracted.span().span_context().clone();
    parent.is_valid().then_some(parent)
}

/// Metadata as the propagator reads it.
struct MetadataTexts<'a>(&'a MetadataMap);

impl Extractor for MetadataTexts<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_parents_are_none() {
        let mut metadata = MetadataMap::new();
        assert!(read_parent(&metadata).is_none());
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (text, is_parent) in [
            (format!("00-{id}-00f067aa01a902b7-01"), true),
            (format!("00-{id}-00f067aa01a902b7-00"), true),
            (format!("ff-{id}-00f067aa01a902b7-01"), false),
            (format!("00-{}-00f067aa01a902b7-01", "0".repeat(32)), false),
            (format!("00-{id}-00f067aa01a902b7"), false),
            ("4".repeat(8000), false),
            (String::new(), false),
        ] {
            metadata.insert("traceparent", text.parse().expect("ASCII"));
            let parent = read_parent(&metadata);
            assert_eq!(parent.is_some(), is_parent, "{text}");
            assert!(parent.is_none_or(|parent| parent.trace_id().to_string() == id));
        }
    }
}
