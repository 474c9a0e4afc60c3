//! Registered models: a name in a namespace, bound to one geometry, codec and calibration.

use super::{Call, Service, ServiceError};
use crate::metrics::{Metric, Metrics, ModelMetrics};
use kvd_codec::{Calibration, CodecSpec, ModelCodec};
use kvd_core::{ErrorCode, Geometry, ModelId, Namespace, SequenceId};
use kvd_proto::domain::ModelSpec;
use kvd_store::{ModelShape, Store};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A registered model.
pub struct Model {
    /// Geometry, windows and owner, as the store sees them.
    pub shape: Arc<ModelShape>,
    /// Name, unique in its namespace.
    pub name: String,
    /// The codec in full.
    pub spec: CodecSpec,
    /// The codec as the caller wrote it: a preset's name, or a spec.
    pub codec: String,
    /// Hash of geometry, codec and calibration.
    pub fingerprint: String,
    /// Handles with this model's labels.
    pub metrics: ModelMetrics,
    /// Squared error and squared norm of sampled blocks, by side.
    pub(super) sampled: Mutex<[(f64, f64); 2]>,
    /// Pages kept raw because they could not be quantized.
    pub(super) fallback_pages: AtomicU64,
}

impl Model {
    /// Pages that could not be quantized and were kept raw, since registration.
    #[must_use]
    pub fn fallback_pages(&self) -> u64 {
        self.fallback_pages.load(Ordering::Relaxed)
    }

    /// Relative root-mean-square error of sampled blocks, by side; 0 while none was sampled.
    #[must_use]
    pub fn sampled_error(&self) -> [f64; 2] {
        self.sampled
            .lock()
            .map(|(error, norm)| if norm > 0.0 { (error / norm).sqrt() } else { 0.0 })
    }
}

/// All models. One mutex: registrations are rare, look-ups short.
pub(super) struct Models {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_id: u64,
    by_id: BTreeMap<ModelId, Arc<Model>>,
}

impl Models {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    pub(super) fn find(
        &self,
        namespace: &Namespace,
        id: ModelId,
    ) -> Result<Arc<Model>, ServiceError> {
        self.state.lock().find(namespace, id).cloned()
    }

    pub(super) fn list(&self, namespace: Option<&Namespace>) -> Vec<Arc<Model>> {
        let state = self.state.lock();
        let of = |model: &&Arc<Model>| namespace.is_none_or(|name| model.shape.namespace == *name);
        state.by_id.values().filter(of).cloned().collect()
    }

    fn by_name(&self, namespace: &Namespace, name: &str) -> Option<Arc<Model>> {
        let state = self.state.lock();
        let same = |model: &&Arc<Model>| model.shape.namespace == *namespace && model.name == name;
        state.by_id.values().find(same).cloned()
    }

    fn next_id(&self) -> ModelId {
        let mut state = self.state.lock();
        state.last_id += 1;
        ModelId(state.last_id)
    }

    /// Adds a model unless its name was taken or the limit reached meanwhile; answers the one that
    /// is registered, which is another when the same content came first.
    fn insert(&self, model: Arc<Model>) -> Result<Arc<Model>, ServiceError> {
        let mut state = self.state.lock();
        let clash = |other: &&Arc<Model>| {
            other.shape.namespace == model.shape.namespace && other.name == model.name
        };
        if let Some(other) = state.by_id.values().find(clash) {
            return same_content(other, &model.fingerprint);
        }
        if state.by_id.len() >= self.limit {
            let message = format!("{} models are registered (limits.models_max)", self.limit);
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        state.by_id.insert(model.shape.id, model.clone());
        Ok(model)
    }

    /// Opens a sequence of a model that is registered until it is open.
    pub(super) fn open(
        &self,
        namespace: &Namespace,
        id: ModelId,
        store: &Store,
    ) -> Result<SequenceId, ServiceError> {
        let state = self.state.lock();
        Ok(store.open(state.find(namespace, id)?.shape.clone())?)
    }

    /// Takes a model out, unless it has sequences.
    fn remove(
        &self,
        namespace: &Namespace,
        id: ModelId,
        store: &Store,
    ) -> Result<Arc<Model>, ServiceError> {
        let mut state = self.state.lock();
        let model = state.find(namespace, id)?.clone();
        let sequences = store.usage(id).sequences;
        if sequences > 0 {
            let message = format!("model {id} has {sequences} open sequences; close them first");
            return Err(ServiceError::new(ErrorCode::ModelInUse, message));
        }
        state.by_id.remove(&id);
        Ok(model)
    }
}

impl State {
    fn find(&self, namespace: &Namespace, id: ModelId) -> Result<&Arc<Model>, ServiceError> {
        let found = self.by_id.get(&id).filter(|model| model.shape.namespace == *namespace);
        found.ok_or_else(|| {
            let message = format!("model {id} is not registered in namespace {namespace}");
            ServiceError::new(ErrorCode::UnknownModel, message)
        })
    }
}

/// The model that has the name already, if it is the same.
fn same_content(model: &Arc<Model>, fingerprint: &str) -> Result<Arc<Model>, ServiceError> {
    if model.fingerprint == fingerprint {
        return Ok(model.clone());
    }
    Err(name_taken(&model.name))
}

fn name_taken(name: &str) -> ServiceError {
    ServiceError::new(
        ErrorCode::InvalidArgument,
        format!(
            "name: {name:?} is registered with another geometry, codec or calibration; \
             unregister it or choose another name"
        ),
    )
}

/// What makes two registrations the same.
fn fingerprint(geometry: &Geometry, spec: &CodecSpec, calibration: &[u8]) -> String {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(format!("{geometry:?}\n{spec}\n").as_bytes());
    hash.update(calibration);
    format!("{:032x}", hash.digest128())
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
        if spec.calibration.len() > self.config.calibration_bytes_max {
            let (len, max) = (spec.calibration.len(), self.config.calibration_bytes_max);
            let message =
                format!("calibration: {len} bytes are over limits.calibration_bytes_max = {max}");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        let codec = kvd_codec::resolve(&spec.codec)?;
        let fingerprint = fingerprint(&spec.geometry, &codec, &spec.calibration);
        if let Some(model) = self.models.by_name(&call.namespace, &spec.name) {
            return same_content(&model, &fingerprint);
        }
        let calibration = match &spec.calibration[..] {
            [] => None,
            bytes => Some(Calibration::from_bytes(bytes)?),
        };
        let runtime = ModelCodec::new(spec.geometry.clone(), codec.clone(), calibration.as_ref())?;
        let model = Arc::new(Model {
            shape: Arc::new(ModelShape {
                id: self.models.next_id(),
                namespace: call.namespace.clone(),
                geometry: spec.geometry,
                sink: codec.sink,
                recent: codec.recent,
            }),
            metrics: self.model_metrics(&call.namespace, &spec.name, &spec.codec),
            name: spec.name,
            spec: codec,
            codec: spec.codec,
            fingerprint,
            sampled: Mutex::default(),
            fallback_pages: AtomicU64::new(0),
        });
        // The device must know the model before anybody can find it.
        let id = model.shape.id;
        let register = move |backend: &mut dyn kvd_compute::Backend| {
            backend.register(id, runtime);
            Ok(())
        };
        self.lane.run(call, register).await?;
        let registered = self.models.insert(model.clone());
        if !registered.as_ref().is_ok_and(|registered| registered.shape.id == id) {
            self.forget_on_device(call, id).await?;
            return registered;
        }
        self.metrics.gauge(Metric::Models, &[]).set(self.models.list(None).len() as f64);
        tracing::info!(%id, name = model.name, codec = %model.spec, "model registered");
        Ok(model)
    }

    fn model_metrics(&self, namespace: &Namespace, name: &str, codec: &str) -> ModelMetrics {
        let metrics: &Metrics = &self.metrics;
        ModelMetrics::new(metrics, namespace.as_str(), name, codec)
    }

    async fn forget_on_device(&self, call: &Call, id: ModelId) -> Result<(), ServiceError> {
        let forget = move |backend: &mut dyn kvd_compute::Backend| {
            backend.unregister(id);
            Ok(())
        };
        self.lane.run(call, forget).await
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
    /// `UNKNOWN_MODEL` or `MODEL_IN_USE`.
    pub async fn unregister_model(&self, call: &Call, id: ModelId) -> Result<(), ServiceError> {
        self.admit(call)?;
        let model = self.models.remove(&call.namespace, id, &self.store)?;
        self.forget_on_device(call, id).await?;
        model.metrics.clear();
        self.metrics.gauge(Metric::Models, &[]).set(self.models.list(None).len() as f64);
        Ok(())
    }
}
