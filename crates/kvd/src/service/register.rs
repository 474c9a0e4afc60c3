//! Registering and unregistering models: what both the device and the daemon must know.
//!
//! Both change in one lane job. It runs whole or not at all, whatever becomes of the caller: a
//! model that is registered can be found, and one that cannot be found is not on the device.

use super::query_sample::QuerySample;
use super::recent_queries::RecentQueries;
use super::{Call, Model, Service, ServiceError};
use crate::metrics::{ModelLabels, ModelMetrics};
use kvd_codec::{
    Calibration, CodecSpec, EntropyCoding, FloatFormat, ModelCodec, Quantizer, SideSpec,
};
use kvd_compute::Backend;
use kvd_core::{ErrorCode, Geometry, ModelId};
use kvd_proto::domain::ModelSpec;
use kvd_store::ModelShape;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::sync::OwnedSemaphorePermit;

/// What makes two registrations the same.
fn fingerprint(geometry: &Geometry, spec: &CodecSpec, calibration: &[u8]) -> String {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(format!("{geometry:?}\n{spec}\n").as_bytes());
    hash.update(calibration);
    format!("{:032x}", hash.digest128())
}

/// A model's `codec` label. A spec text can be of any length and number: those that are no
/// preset's name are told apart by the fingerprint, after the preset that they change, if any.
fn codec_label(codec: &str, fingerprint: &str) -> String {
    match kvd_codec::named_preset(codec) {
        Some((preset, true)) => preset.name.to_owned(),
        named => {
            let name = named.map_or("custom", |(preset, _)| preset.name);
            format!("{name}-{}", &fingerprint[..8])
        }
    }
}

/// Refuses a calibration that takes too many bytes.
fn check_calibration_bytes(spec: &ModelSpec, max: usize) -> Result<(), ServiceError> {
    let len = spec.calibration.len();
    if len <= max {
        return Ok(());
    }
    let message = format!("calibration: {len} bytes are over limits.calibration_bytes_max = {max}");
    Err(ServiceError::new(ErrorCode::LimitExceeded, message))
}

/// Refuses pages so small that reading them is several times slower than reading raw rows.
///
/// `min` is for sides with an entropy coder, whose decoder starts anew with each page; other sides
/// that quantize, FP8 among them, have kernels for half of it. Raw rows take pages of any size.
fn check_page_tokens(geometry: &Geometry, codec: &CodecSpec, min: u32) -> Result<(), ServiceError> {
    let overrides = codec.overrides.iter().map(|change| &change.spec);
    let least = |side: &SideSpec| match (&side.quantizer, side.entropy) {
        (Quantizer::Float(FloatFormat::E4M3), EntropyCoding::None) => min.div_ceil(2),
        (Quantizer::Float(_), EntropyCoding::None) => 1,
        (_, EntropyCoding::None) => min.div_ceil(2),
        (_, EntropyCoding::Huffman) => min,
    };
    let needed = [&codec.key, &codec.value].into_iter().chain(overrides).map(least).max();
    let (given, needed) = (geometry.block_tokens, needed.unwrap_or(1));
    if given >= needed {
        return Ok(());
    }
    let message = format!(
        "geometry.block_tokens: pages of {given} tokens make this codec several times slower \
         than raw rows; ask for {needed} or more, or 0 for the default. It is kvd's page size: the \
         engine's own block size is free (limits.page_tokens_min = {min})"
    );
    Err(ServiceError::new(ErrorCode::InvalidArgument, message))
}

impl Service {
    /// Registers a model, or finds it when the same was registered before.
    ///
    /// # Errors
    /// A codec or calibration that does not fit, a name in use, or a limit.
    pub async fn register_model(
        &self,
        call: &Call,
        spec: ModelSpec,
    ) -> Result<Arc<Model>, ServiceError> {
        self.admit(call)?;
        check_calibration_bytes(&spec, self.config.calibration_bytes_max)?;
        let inflight = self.inflight.take(spec.calibration.len() as u64)?;
        let codec = kvd_codec::resolve_spec(&spec.codec)?;
        check_page_tokens(&spec.geometry, &codec, self.config.page_tokens_min)?;
        let fingerprint = fingerprint(&spec.geometry, &codec, &spec.calibration);
        let check = || self.models.check(&call.namespace, &spec.name, &fingerprint);
        if let Some(model) = check()? {
            return Ok(model);
        }
        let turn = self.turn_to_build(call).await?;
        // Whoever had the turn before may have registered the same.
        if let Some(model) = check()? {
            return Ok(model);
        }
        let (runtime, turn) = build(&spec, &codec, turn).await?;
        let label = codec_label(&spec.codec, &fingerprint);
        let (models, metrics, namespace) =
            (self.models.clone(), self.metrics.clone(), call.namespace.clone());
        // The turn keeps others from counting at the same time.
        let seat = self.next_seat();
        let device = self.seats[seat].lane.metrics().clone();
        let queries = QuerySample::new(&spec.geometry, &codec, &self.config);
        let recent_queries = RecentQueries::new(&spec.geometry, &codec);
        let register = move |backend: &mut dyn Backend| {
            backend.supports(&runtime)?;
            let name = spec.name.clone();
            let registered = models.insert(&namespace, &name, &fingerprint.clone(), |id| {
                let calibration_bytes = runtime.calibration_bytes();
                backend.register(id, runtime);
                tracing::info!(id = id.0, name, %codec, "model registered");
                let labels =
                    ModelLabels { namespace: namespace.as_str(), model: &spec.name, codec: &label };
                let layers = spec.geometry.layers;
                Model {
                    metrics: ModelMetrics::new(&metrics, &device, labels, layers),
                    shape: Arc::new(ModelShape {
                        id,
                        namespace: namespace.clone(),
                        geometry: spec.geometry,
                        sink: codec.sink,
                        recent: codec.recent,
                    }),
                    name: spec.name,
                    seat,
                    spec: codec,
                    codec: spec.codec,
                    fingerprint,
                    queries,
                    recent_queries,
                    sampled: Mutex::default(),
                    fallback_pages: AtomicU64::new(0),
                    deferred_blocks: AtomicU64::new(0),
                    over_bound_pages: Default::default(),
                    calibration_bytes,
                    table_bytes: AtomicU64::new(0),
                    table_versions: AtomicU64::new(0),
                }
            });
            drop((turn, inflight));
            registered
        };
        self.seats[seat].lane.run(call, register).await
    }

    /// Waits for the right to build a codec, as long as the caller does.
    async fn turn_to_build(&self, call: &Call) -> Result<OwnedSemaphorePermit, ServiceError> {
        let turn = self.building.clone().acquire_owned();
        let turn = match call.deadline {
            None => turn.await,
            Some(deadline) => {
                let Ok(turn) = tokio::time::timeout_at(deadline.into(), turn).await else {
                    let message = "the deadline passed while other models were being registered";
                    return Err(ServiceError::new(ErrorCode::DeadlineExceeded, message));
                };
                turn
            }
        };
        turn.map_err(|_| ServiceError::new(ErrorCode::Internal, "no more models are built"))
    }

    /// A model of the caller's namespace.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, also for models of other namespaces.
    pub fn model(&self, call: &Call, id: ModelId) -> Result<Arc<Model>, ServiceError> {
        self.admit(call)?;
        self.models.find(&call.namespace, id)
    }

    /// All models of the caller's namespace.
    ///
    /// # Errors
    /// When the call is not admitted.
    pub fn list_models(&self, call: &Call) -> Result<Vec<Arc<Model>>, ServiceError> {
        self.admit(call)?;
        Ok(self.models.list(Some(&call.namespace)))
    }

    /// Forgets a model without sequences.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `MODEL_IN_USE`; the model is as it was after any error.
    pub async fn unregister_model(&self, call: &Call, id: ModelId) -> Result<(), ServiceError> {
        self.admit(call)?;
        let seat = &self.seats[self.models.find(&call.namespace, id)?.seat];
        let (models, store, metrics, namespace) =
            (self.models.clone(), seat.store.clone(), self.metrics.clone(), call.namespace.clone());
        let forget = move |backend: &mut dyn Backend| {
            let model = models.remove(&namespace, id, &store)?;
            backend.unregister(id);
            metrics.forget(&model.metrics);
            tracing::info!(id = id.0, name = model.name, "model unregistered");
            Ok(())
        };
        // An attend that was accepted before is answered yet.
        seat.lane.run_after_all(call, forget).await
    }
}

/// Reads the calibration and binds the codec, off the threads that answer requests. The turn
/// stays with the work even when the caller leaves.
async fn build(
    spec: &ModelSpec,
    codec: &CodecSpec,
    turn: OwnedSemaphorePermit,
) -> Result<(ModelCodec, OwnedSemaphorePermit), ServiceError> {
    let (geometry, codec, bytes) = (spec.geometry.clone(), codec.clone(), spec.calibration.clone());
    let work = move || {
        let calibration = match &bytes[..] {
            [] => None,
            bytes => Some(Calibration::from_bytes(bytes)?),
        };
        Ok((ModelCodec::new(geometry, codec, calibration.as_ref())?, turn))
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        let message = format!("the codec could not be built: {error}");
        Err(ServiceError::new(ErrorCode::Internal, message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_preset_names_or_short() {
        let print = "0123456789abcdef0123456789abcdef";
        assert_eq!(codec_label(" kivi-2 ", print), "kivi-2");
        assert_eq!(codec_label("k=raw; v=raw", print), "custom-01234567");
    }
}
