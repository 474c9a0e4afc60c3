//! Registered models: a name in a namespace, bound to one geometry, codec and calibration.

use super::query_sample::QuerySample;
use super::recent_queries::RecentQueries;
use super::{ServiceError, ids};
use crate::metrics::ModelMetrics;
use kvd_codec::{CheckedBlock, CodecSpec, ErrorSum, Quantizer, SideSpec};
use kvd_core::{ErrorCode, IdCounter, IdSpace, ModelId, Namespace, SequenceId};
use kvd_store::{DiskBlock, ModelShape, QuotaKind, QuotaTable, SequenceStore, StoreError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A registered model.
pub struct RegisteredModel {
    /// Geometry, windows and owner, as the store sees them.
    pub shape: Arc<ModelShape>,
    /// Name, unique in its namespace.
    pub name: String,
    /// Its scope on disk; none where nobody names its weights, there is no disk, or another
    /// registration of the same content has it.
    pub(super) scope: Option<kvd_tier::ScopeId>,
    /// Whether it would have one, if no other had it.
    pub(super) is_identified: bool,
    /// Which of the daemon's devices has it.
    pub shard: usize,
    /// The codec in full.
    pub spec: CodecSpec,
    /// The codec as the caller wrote it: a preset's name, or a spec.
    pub codec: String,
    /// Hash of geometry, codec and calibration.
    pub fingerprint: String,
    /// Handles with this model's labels.
    pub metrics: ModelMetrics,
    /// A sample of its queries, where keys are kept exactly.
    pub(super) queries: Option<QuerySample>,
    /// Its last queries, where its codec declares a bound.
    pub(super) recent_queries: Option<RecentQueries>,
    pub(super) sampled: Mutex<SampledErrors>,
    /// Pages kept raw because they could not be quantized.
    pub(super) fallback_pages: AtomicU64,
    /// Blocks that stayed raw for want of room, and of which the log has not told.
    pub(super) deferred_blocks: AtomicU64,
    /// Pages over the codec's bound, by side.
    pub(super) over_bound_pages: [AtomicU64; 2],
    /// Bytes of smoothing factors, codebooks and matrices.
    pub(super) calibration_bytes: u64,
    /// Bytes of entropy tables, as the device last said.
    pub(super) table_bytes: AtomicU64,
    pub(super) table_versions: AtomicU64,
}

impl RegisteredModel {
    /// Pages that could not be quantized and were kept raw, since registration.
    #[must_use]
    pub fn fallback_pages(&self) -> u64 {
        self.fallback_pages.load(Ordering::Relaxed)
    }

    /// Whether packing saves memory anywhere: pages of floats as wide as the rows do not.
    #[must_use]
    pub fn saves_memory(&self) -> bool {
        let native = self.shape.geometry.dtype;
        let saves = |side: &SideSpec| match side.quantizer {
            Quantizer::Float(format) => format
                .stored_dtype(native)
                .is_none_or(|dtype| dtype.size_bytes() < native.size_bytes()),
            _ => true,
        };
        let CodecSpec { key, value, overrides, .. } = &self.spec;
        let exceptions = overrides.iter().map(|exception| &exception.spec);
        [key, value].into_iter().chain(exceptions).any(saves)
    }

    /// Pages over the codec's bound that were kept with a safer side, by side, since registration.
    #[must_use]
    pub fn over_bound_pages(&self) -> [u64; 2] {
        [0, 1].map(|side: usize| self.over_bound_pages[side].load(Ordering::Relaxed))
    }

    /// Relative root-mean-square error of what attention sees of recently sampled blocks, by side;
    /// none before the first.
    #[must_use]
    pub fn sampled_error(&self) -> [Option<f64>; 2] {
        self.sampled.lock().attention.map(|sampled| sampled.error_ratio())
    }

    /// Relative root-mean-square error of the rows of recently sampled blocks, by side.
    #[must_use]
    pub fn sampled_row_error(&self) -> [Option<f64>; 2] {
        self.sampled.lock().rows.map(|sampled| sampled.error_ratio())
    }
}

/// Errors of sampled blocks, by side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SampledErrors {
    attention: [SampledError; 2],
    rows: [SampledError; 2],
}

impl SampledErrors {
    pub(super) fn add_block(&mut self, block: &CheckedBlock) {
        let sums = block.attention.into_iter().chain(block.rows);
        self.attention
            .iter_mut()
            .chain(&mut self.rows)
            .zip(sums)
            .for_each(|(to, sum)| to.add_sum(sum));
    }
}

/// Squared error and squared norm of sampled blocks. Older ones fade, so that data unlike the
/// calibration shows however long a daemon has run.
#[derive(Clone, Copy, Debug, Default)]
struct SampledError {
    error: f64,
    norm: f64,
    any: bool,
}

impl SampledError {
    /// The share of older blocks that one more block keeps: weights sum to about 64 blocks.
    const KEPT: f64 = 1.0 - 1.0 / 64.0;

    fn add_sum(&mut self, sum: ErrorSum) {
        self.any = true;
        // A block of numbers near the largest must not end the figure for good.
        if sum.error.is_finite() && sum.norm.is_finite() {
            self.error = self.error * Self::KEPT + sum.error;
            self.norm = self.norm * Self::KEPT + sum.norm;
        }
    }

    fn error_ratio(&self) -> Option<f64> {
        let ratio = if self.norm > 0.0 { (self.error / self.norm).sqrt() } else { 0.0 };
        self.any.then_some(ratio)
    }
}

/// Models of all namespaces, and of single ones.
struct ModelLimits {
    models_max: usize,
    quotas: Arc<QuotaTable>,
}

/// All models. One mutex: registrations are rare, look-ups short.
pub(super) struct ModelRegistry {
    limits: ModelLimits,
    space: Arc<IdSpace>,
    ids: IdCounter<ModelId>,
    state: Mutex<RegistryState>,
}

/// A model that is no more.
pub(super) struct RemovedModel {
    pub(super) model: Arc<RegisteredModel>,
    /// Its blocks on disk, which stay there.
    pub(super) on_disk: Vec<DiskBlock>,
}

#[derive(Default)]
struct RegistryState {
    by_id: BTreeMap<ModelId, Arc<RegisteredModel>>,
}

impl ModelRegistry {
    pub(super) fn new(models_max: usize, space: Arc<IdSpace>, quotas: Arc<QuotaTable>) -> Self {
        let limits = ModelLimits { models_max, quotas };
        Self { limits, ids: space.model_counter(), space, state: Mutex::default() }
    }

    pub(super) fn find_model(
        &self,
        namespace: &Namespace,
        id: ModelId,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        ids::record_id("model", id.0);
        self.state.lock().find_model(&self.space, namespace, id).cloned()
    }

    pub(super) fn list_models(&self, namespace: Option<&Namespace>) -> Vec<Arc<RegisteredModel>> {
        let state = self.state.lock();
        let of = |model: &&Arc<RegisteredModel>| {
            namespace.is_none_or(|name| model.shape.namespace == *name)
        };
        state.by_id.values().filter(of).cloned().collect()
    }

    /// The model of that name when it has the same content; `None` when there is room for it.
    pub(super) fn check_name(
        &self,
        namespace: &Namespace,
        name: &str,
        fingerprint: &str,
    ) -> Result<Option<Arc<RegisteredModel>>, ServiceError> {
        self.state.lock().check_name(&self.limits, namespace, name, fingerprint)
    }

    /// Adds what `make` makes under a new id, unless the name was taken or the limit reached
    /// meanwhile; answers the one that is registered, which is another when the same content came
    /// first.
    pub(super) fn insert(
        &self,
        namespace: &Namespace,
        name: &str,
        fingerprint: &str,
        make: impl FnOnce(ModelId) -> RegisteredModel,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        let mut state = self.state.lock();
        if let Some(model) = state.check_name(&self.limits, namespace, name, fingerprint)? {
            return Ok(model);
        }
        let id = self.ids.next()?;
        let model = Arc::new(make(id));
        state.by_id.insert(id, model.clone());
        Ok(model)
    }

    /// Opens a sequence of a model that is registered until it is open.
    pub(super) fn open_sequence_by(
        &self,
        namespace: &Namespace,
        id: ModelId,
        open: impl FnOnce(&RegisteredModel) -> Result<SequenceId, StoreError>,
    ) -> Result<SequenceId, ServiceError> {
        let state = self.state.lock();
        Ok(open(state.find_model(&self.space, namespace, id)?)?)
    }

    /// Takes a model out, unless it has sequences.
    pub(super) fn remove(
        &self,
        namespace: &Namespace,
        id: ModelId,
        store: &SequenceStore,
    ) -> Result<RemovedModel, ServiceError> {
        let mut state = self.state.lock();
        let model = state.find_model(&self.space, namespace, id)?.clone();
        let sequences = store.model_usage(id).sequences;
        if sequences > 0 {
            let message = format!("model {id} has {sequences} open sequences; close them first");
            return Err(ServiceError::new(ErrorCode::ModelInUse, message));
        }
        state.by_id.remove(&id);
        let on_disk = store.forget_model(id);
        Ok(RemovedModel { model, on_disk })
    }
}

impl RegistryState {
    fn check_name(
        &self,
        limits: &ModelLimits,
        namespace: &Namespace,
        name: &str,
        fingerprint: &str,
    ) -> Result<Option<Arc<RegisteredModel>>, ServiceError> {
        let same = |model: &&Arc<RegisteredModel>| {
            model.shape.namespace == *namespace && model.name == name
        };
        if let Some(model) = self.by_id.values().find(same) {
            return same_content(model, fingerprint).map(Some);
        }
        if self.by_id.len() >= limits.models_max {
            let limit = limits.models_max;
            let message = format!("{limit} models are registered (limits.models_max)");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        if let Some(account) = limits.quotas.find_account(namespace) {
            let own = self.by_id.values().filter(|model| model.shape.namespace == *namespace);
            account.check_room(QuotaKind::Models, own.count() as u64, 1)?;
        }
        Ok(None)
    }

    fn find_model(
        &self,
        ids: &IdSpace,
        namespace: &Namespace,
        id: ModelId,
    ) -> Result<&Arc<RegisteredModel>, ServiceError> {
        let found = self.by_id.get(&id).filter(|model| model.shape.namespace == *namespace);
        found.ok_or_else(|| ids::unknown_model(ids, namespace, id))
    }
}

/// The model that has the name already, if it is the same.
fn same_content(
    model: &Arc<RegisteredModel>,
    fingerprint: &str,
) -> Result<Arc<RegisteredModel>, ServiceError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_blocks_fade_and_none_is_not_zero() {
        let mut sampled = SampledError::default();
        assert_eq!(sampled.error_ratio(), None);
        let sum = |error, norm| ErrorSum { error, norm };
        (0..100_000).for_each(|_| sampled.add_sum(sum(0.01, 1.0)));
        assert!((sampled.error_ratio().unwrap() - 0.1).abs() < 1e-9);
        (0..1024).for_each(|_| sampled.add_sum(sum(0.25, 1.0)));
        sampled.add_sum(sum(f64::INFINITY, 1.0));
        assert!(sampled.error_ratio().unwrap() > 0.49 && sampled.error_ratio().unwrap() < 0.5);
        let mut zeros = SampledError::default();
        zeros.add_sum(sum(0.0, 0.0));
        assert_eq!(zeros.error_ratio(), Some(0.0));
    }
}
