//! Registering and unregistering models: what both the device and the daemon must know.
//!
//! Both change in one job of the device. It runs whole or not at all, whatever becomes of the
//! caller: a model that is registered can be found, and one that cannot be found is not on the
//! device.

use super::budget::InFlight;
use super::model::{ModelRegistry, RemovedModel};
use super::query_sample::QuerySample;
use super::recent_queries::RecentQueries;
use super::tiers::{CacheTiers, ScopeText, scope_of};
use super::{CallContext, RegisteredModel, Service, ServiceError};
use crate::device_worker::DeviceWork;
use crate::metrics::{DeviceMetrics, Metrics, ModelLabels, ModelMetrics};
use crate::scheduler::JobKind;
use kvd_codec::{
    Calibration, CodecSpec, EntropyCoding, FloatFormat, ModelCodec, Quantizer, SideSpec,
};
use kvd_compute::{Backend, Stop};
use kvd_core::{ErrorCode, Geometry, ModelId, Namespace};
use kvd_proto::domain::{ModelIdentity, ModelSpec};
use kvd_store::{DiskBlock, ModelShape, PrefixIndex, SequenceStore};
use kvd_tier::ScopeId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::sync::OwnedSemaphorePermit;

/// All that the bytes of a model's blocks depend on.
#[derive(Clone, Copy)]
pub(crate) struct NamedContent<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) codec: &'a CodecSpec,
    pub(crate) calibration: &'a [u8],
    pub(crate) identity: &'a ModelIdentity,
    pub(crate) namespace: &'a Namespace,
}

/// Hashes what two equal registrations have in common.
fn model_fingerprint(spec: &ModelSpec, codec: &CodecSpec, identity: &ModelIdentity) -> String {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(format!("{:?}\n{codec}\n", spec.geometry).as_bytes());
    hash.update(&spec.calibration);
    // Nothing is added for who gives none: fingerprints are as they were.
    if *identity != ModelIdentity::default() {
        let ModelIdentity { weights, tp_rank, tp_size, first_layer } = identity;
        hash.update(weights);
        for number in [tp_rank, tp_size, first_layer] {
            hash.update(&number.to_le_bytes());
        }
    }
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

/// Refuses pages that are read several times slower than raw rows: kernels take whole runs of
/// tokens, and decode what a page has beyond the last run row by row.
///
/// `min` is the run of sides with an entropy coder, whose decoder starts anew with each page; other
/// sides that quantize, FP8 among them, have half of it. Raw rows take pages of any size.
fn check_page_tokens(geometry: &Geometry, codec: &CodecSpec, min: u32) -> Result<(), ServiceError> {
    let (given, needed) = (geometry.block_tokens, least_page_tokens(codec, min));
    if given.is_multiple_of(needed) {
        return Ok(());
    }
    let message = format!(
        "geometry.block_tokens: pages of {given} tokens make this codec several times slower \
         than raw rows; ask for a multiple of {needed}; 0 asks for defaults.block_tokens. It is \
         kvd's page size, and the engine's own block size is free (limits.page_tokens_min = {min})"
    );
    Err(ServiceError::new(ErrorCode::InvalidArgument, message))
}

/// Tokens that pages of a codec are a multiple of, where `min` is what an entropy coder needs.
pub(crate) fn least_page_tokens(codec: &CodecSpec, min: u32) -> u32 {
    let overrides = codec.overrides.iter().map(|change| &change.spec);
    let least = |side: &SideSpec| match (&side.quantizer, side.entropy) {
        (Quantizer::Float(FloatFormat::E4M3), EntropyCoding::None) => min.div_ceil(2),
        (Quantizer::Float(_), EntropyCoding::None) => 1,
        (_, EntropyCoding::None) => min.div_ceil(2),
        (_, EntropyCoding::Huffman) => min,
    };
    let needed = [&codec.key, &codec.value].into_iter().chain(overrides).map(least).max();
    needed.unwrap_or(1)
}

impl Service {
    /// [`Service::register_identified`] of weights that nobody names.
    ///
    /// # Errors
    /// As that.
    pub async fn register_model(
        &self,
        call: &CallContext,
        spec: ModelSpec,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.register_identified(call, spec, &ModelIdentity::default()).await
    }

    /// Registers a model, or finds it when the same was registered before.
    ///
    /// # Errors
    /// A codec or calibration that does not fit, a name in use, or a limit.
    pub async fn register_identified(
        &self,
        call: &CallContext,
        spec: ModelSpec,
        identity: &ModelIdentity,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.admit_call(call)?;
        check_calibration_bytes(&spec, self.config.calibration_bytes_max)?;
        let bytes = call.bytes_to_admit(spec.calibration.len() as u64);
        let inflight = self.take_bytes(call, bytes)?;
        let codec = kvd_codec::resolve_spec(&spec.codec)?;
        check_page_tokens(&spec.geometry, &codec, self.config.page_tokens_min)?;
        let fingerprint = model_fingerprint(&spec, &codec, identity);
        let check = || self.models.check_name(&call.namespace, &spec.name, &fingerprint);
        if let Some(model) = check()? {
            return Ok(model);
        }
        let turn = self.turn_to_build(call).await?;
        // Whoever had the turn before may have registered the same.
        if let Some(model) = check()? {
            return Ok(model);
        }
        let BuiltCodec { codec: runtime, turn } = build_codec(&spec, &codec, turn).await?;
        let label = codec_label(&spec.codec, &fingerprint);
        let scope = scope_of(&NamedContent {
            geometry: &spec.geometry,
            codec: &codec,
            calibration: &spec.calibration,
            identity,
            namespace: &call.namespace,
        });
        // The turn keeps others from counting at the same time.
        let shard = self.next_shard();
        let new = NewModel {
            queries: QuerySample::new(&spec.geometry, &codec, &self.config),
            recent_queries: RecentQueries::new(&spec.geometry, &codec),
            device: self.shards[shard].worker.metrics().clone(),
            metrics: self.metrics.clone(),
            namespace: call.namespace.clone(),
            spec,
            codec,
            runtime,
            label,
            fingerprint,
            shard,
            wanted_scope: scope.zip(self.tiers.clone()),
            index: self.shards[shard].store.prefix_index().clone(),
            weights: identity.weights.clone(),
        };
        let job =
            RegisterJob { models: self.models.clone(), new: Some(new), _held: (turn, inflight) };
        let (model, found) = self.shards[shard].worker.ask_device(call, job).await?;
        if !found.is_empty() {
            self.restore_blocks(&model, found).await;
        }
        Ok(model)
    }

    /// Makes a model's blocks findable that are on disk.
    async fn restore_blocks(&self, model: &Arc<RegisteredModel>, found: Vec<DiskBlock>) {
        let (index, shape) =
            (self.shards[model.shard].store.prefix_index().clone(), model.shape.clone());
        let blocks = found.len();
        let (found, of_index) = (Arc::new(found), Arc::clone(&index));
        let blocks_found = Arc::clone(&found);
        let restore = move || index.restore_blocks(&shape.namespace, shape.id, &blocks_found);
        let restored = tokio::task::spawn_blocking(restore).await.unwrap_or(0);
        let name = &model.name;
        tracing::info!(model = name, blocks, restored, "cached blocks were found on disk");
        if let Some(tiers) = self.tiers.clone() {
            // Nobody waits for it.
            tokio::task::spawn_blocking(move || tiers.learn_keys(&of_index, &found));
        }
    }

    /// Waits for the right to build a codec, as long as the caller does.
    async fn turn_to_build(
        &self,
        call: &CallContext,
    ) -> Result<OwnedSemaphorePermit, ServiceError> {
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
    pub fn find_model(
        &self,
        call: &CallContext,
        id: ModelId,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.admit_call(call)?;
        self.models.find_model(&call.namespace, id)
    }

    /// All models of the caller's namespace.
    ///
    /// # Errors
    /// When the call is not admitted.
    pub fn list_models(
        &self,
        call: &CallContext,
    ) -> Result<Vec<Arc<RegisteredModel>>, ServiceError> {
        self.admit_call(call)?;
        Ok(self.models.list_models(Some(&call.namespace)))
    }

    /// Forgets a model without sequences.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `MODEL_IN_USE`; the model is as it was after any error.
    pub async fn unregister_model(
        &self,
        call: &CallContext,
        id: ModelId,
    ) -> Result<(), ServiceError> {
        self.admit_call(call)?;
        let shard = &self.shards[self.models.find_model(&call.namespace, id)?.shard];
        let (models, store, metrics, namespace) = (
            self.models.clone(),
            shard.store.clone(),
            self.metrics.clone(),
            call.namespace.clone(),
        );
        // An attend that was accepted before is answered yet.
        let tiers = self.tiers.clone();
        let job = UnregisterJob { models, store, metrics, namespace, id, tiers };
        shard.worker.ask_device(call, job).await
    }
}

/// A model that is to be registered.
struct NewModel {
    spec: ModelSpec,
    codec: CodecSpec,
    runtime: ModelCodec,
    namespace: Namespace,
    label: String,
    fingerprint: String,
    shard: usize,
    queries: Option<QuerySample>,
    recent_queries: Option<RecentQueries>,
    metrics: Arc<Metrics>,
    device: Arc<DeviceMetrics>,
    /// Its scope on disk, where it has one and there is a disk.
    wanted_scope: Option<(ScopeId, Arc<CacheTiers>)>,
    index: Arc<PrefixIndex>,
    weights: bytes::Bytes,
}

impl NewModel {
    /// Takes the model's scope on disk, if nobody has it, and its blocks there.
    fn claim_scope(&self, id: ModelId) -> Option<ClaimedScope> {
        let (scope, tiers) = self.wanted_scope.as_ref()?;
        let blocks = tiers.claim_scope(*scope, &self.index, id)?;
        let codec = self.codec.to_string();
        let text = ScopeText { model: &self.spec.name, codec: &codec, weights: &self.weights };
        tiers.describe_scope(*scope, &self.namespace, &text);
        Some(ClaimedScope { scope: *scope, blocks })
    }

    /// Makes the model known to its device.
    fn register_model(
        self,
        backend: &mut dyn Backend,
        id: ModelId,
        found: &mut Vec<DiskBlock>,
    ) -> RegisteredModel {
        let claimed = self.claim_scope(id);
        let is_identified = self.wanted_scope.is_some();
        let scope = claimed.map(|claimed| {
            *found = claimed.blocks;
            claimed.scope
        });
        let Self { spec, codec, namespace, .. } = self;
        let calibration_bytes = self.runtime.calibration_bytes();
        backend.register(id, self.runtime);
        tracing::info!(id = id.0, name = spec.name, %codec, "model registered");
        let labels =
            ModelLabels { namespace: namespace.as_str(), model: &spec.name, codec: &self.label };
        let layers = spec.geometry.layers;
        RegisteredModel {
            metrics: ModelMetrics::new(&self.metrics, &self.device, labels, layers),
            shape: Arc::new(ModelShape {
                id,
                namespace: namespace.clone(),
                geometry: spec.geometry,
                sink: codec.sink,
                recent: codec.recent,
            }),
            name: spec.name,
            scope,
            is_identified,
            shard: self.shard,
            spec: codec,
            codec: spec.codec,
            fingerprint: self.fingerprint,
            queries: self.queries,
            recent_queries: self.recent_queries,
            sampled: Mutex::default(),
            fallback_pages: AtomicU64::new(0),
            deferred_blocks: AtomicU64::new(0),
            over_bound_pages: Default::default(),
            calibration_bytes,
            table_bytes: AtomicU64::new(0),
            table_versions: AtomicU64::new(0),
        }
    }
}

/// A scope that a model has, and its blocks on disk.
struct ClaimedScope {
    scope: ScopeId,
    blocks: Vec<DiskBlock>,
}

/// The job that registers a model.
pub(crate) struct RegisterJob {
    models: Arc<ModelRegistry>,
    /// None once it has begun.
    new: Option<NewModel>,
    /// The turn to build a codec, and the calibration's bytes.
    _held: (OwnedSemaphorePermit, InFlight),
}

impl DeviceWork for RegisterJob {
    type Reply = (Arc<RegisteredModel>, Vec<DiskBlock>);

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError> {
        let Some(new) = self.new.take() else { return Ok(None) };
        backend.supports(&new.runtime)?;
        let (namespace, name) = (new.namespace.clone(), new.spec.name.clone());
        let fingerprint = new.fingerprint.clone();
        let mut found = Vec::new();
        let make = |id| new.register_model(backend, id, &mut found);
        let model = self.models.insert(&namespace, &name, &fingerprint, make)?;
        Ok(Some((model, found)))
    }
}

/// The job that forgets a model.
pub(crate) struct UnregisterJob {
    models: Arc<ModelRegistry>,
    store: Arc<SequenceStore>,
    metrics: Arc<Metrics>,
    namespace: Namespace,
    id: ModelId,
    tiers: Option<Arc<CacheTiers>>,
}

impl DeviceWork for UnregisterJob {
    type Reply = ();

    fn job_kind(&self) -> JobKind {
        JobKind::AfterAll
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<()>, ServiceError> {
        let removed = self.models.remove(&self.namespace, self.id, &self.store)?;
        let RemovedModel { model, on_disk } = removed;
        if let (Some(scope), Some(tiers)) = (model.scope, &self.tiers) {
            tiers.return_scope(scope, on_disk);
        }
        backend.unregister(self.id);
        self.metrics.forget_model(&model.metrics);
        tracing::info!(id = self.id.0, name = model.name, "model unregistered");
        Ok(Some(()))
    }
}

/// A codec bound to its model, and the turn to build it.
struct BuiltCodec {
    codec: ModelCodec,
    turn: OwnedSemaphorePermit,
}

/// Reads the calibration and binds the codec, off the threads that answer requests. The turn
/// stays with the work even when the caller leaves.
async fn build_codec(
    spec: &ModelSpec,
    codec: &CodecSpec,
    turn: OwnedSemaphorePermit,
) -> Result<BuiltCodec, ServiceError> {
    let (geometry, codec, bytes) = (spec.geometry.clone(), codec.clone(), spec.calibration.clone());
    let work = move || {
        let calibration = match &bytes[..] {
            [] => None,
            bytes => Some(Calibration::from_bytes(bytes)?),
        };
        Ok(BuiltCodec { codec: ModelCodec::new(geometry, codec, calibration.as_ref())?, turn })
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
