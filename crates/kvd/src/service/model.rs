//! Registered models: a name in a namespace, bound to one geometry, codec and calibration.

use super::{Call, Service, ServiceError};
use crate::metrics::{Metric, Metrics, ModelMetrics};
use kvd_codec::{Calibration, CodecSpec, ModelCodec};
use kvd_core::{ErrorCode, Geometry, ModelId, Namespace};
use kvd_proto::domain::ModelSpec;
use kvd_store::ModelShape;
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
        let state = self.state.lock();
        let found = state.by_id.get(&id).filter(|model| model.shape.namespace == *namespace);
        found.cloned().ok_or_else(|| {
            let message = format!("model {id} is not registered in namespace {namespace}");
            ServiceError::new(ErrorCode::UnknownModel, message)
        })
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

    /// Adds a model unless its name was taken or the limit reached meanwhile.
    fn insert(&self, model: Arc<Model>) -> Result<(), ServiceError> {
        let mut state = self.state.lock();
        if state.by_id.len() >= self.limit {
            let message = format!("{} models are registered (limits.models_max)", self.limit);
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        let clash = |other: &Arc<Model>| {
            other.shape.namespace == model.shape.namespace && other.name == model.name
        };
        if state.by_id.values().any(clash) {
            return Err(name_taken(&model.name));
        }
        state.by_id.insert(model.shape.id, model);
        Ok(())
    }

    fn remove(&self, id: ModelId) {
        self.state.lock().by_id.remove(&id);
    }
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
            if model.fingerprint == fingerprint {
                return Ok(model);
            }
            return Err(name_taken(&spec.name));
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
        if let Err(error) = self.models.insert(model.clone()) {
            self.forget_on_device(call, id).await?;
            return Err(error);
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
        let model = self.model(call, id)?;
        // Out of sight first, so that no sequence is opened between the test and the removal.
        self.models.remove(id);
        let sequences = self.store.usage(id).sequences;
        if sequences > 0 {
            self.models.insert(model)?;
            let message = format!("model {id} has {sequences} open sequences; close them first");
            return Err(ServiceError::new(ErrorCode::ModelInUse, message));
        }
        self.forget_on_device(call, id).await?;
        model.metrics.clear();
        self.metrics.gauge(Metric::Models, &[]).set(self.models.list(None).len() as f64);
        Ok(())
    }
}
