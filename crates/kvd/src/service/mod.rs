//! Requests of all transports: limits, namespaces, the store's book-keeping, and jobs of devices.
//! No bytes are touched here; they travel as `Bytes` to the device worker.

mod answer_form;
mod arrival;
mod attend;
mod attend_job;
mod attend_shelf;
mod budget;
mod cache;
mod calibrate;
mod call;
mod distinct_reads;
mod error;
mod events;
mod ids;
pub(crate) mod jobs;
mod launches;
mod load;
mod model;
mod namespace_shares;
mod namespaces;
mod overview;
mod pack;
mod plan;
mod pool_log;
mod publish;
mod query_sample;
mod recent_queries;
mod region;
mod register;
mod sequence;
mod session;
mod session_table;
mod stats;
mod step;
mod store;
#[cfg(test)]
mod tests;
pub(crate) mod tiers;

pub use attend::{AttendReply, RefusedQuery};
pub(crate) use attend::{InPlaceQueries, PART_BYTES};
use budget::NamespaceBudget;
pub(crate) use budget::{ByteBudget, ByteBudgets, InFlight};
pub(crate) use cache::DeviceCache;
pub use cache::{MatchReply, PinReply, PrefixOpening};
pub use calibrate::CalibrationReply;
pub use call::{CallContext, CallOwner};
pub use error::ServiceError;
pub(crate) use events::{BlockWatch, WatchAnswer, WatchStart, WatchedEvents, WatchedModel};
pub(crate) use ids::draw_ids;
pub use load::LoadPiece;
pub use model::RegisteredModel;
pub(crate) use namespaces::ChangedQuotas;
pub use namespaces::{NamespaceDescription, QuotaDescription};
pub use publish::{PublishMode, PublishReply};
pub(crate) use region::{MemoryOffer, OpenMemory};
pub(crate) use register::least_page_tokens;
pub use session::SequencePage;
pub use session_table::{SessionDescription, SessionLease};
pub(crate) use stats::DevicePool;
pub use stats::{ModelStats, PoolStats};
pub(crate) use step::{LoadedStep, RefusedPart};
pub use store::StoreReply;
pub(crate) use tiers::OpenedLayers;

use crate::access::{AccessControl, AccessPrincipal, AuditLog, PrincipalTable};
use crate::config::Config;
use crate::device_worker::DeviceWorker;
use crate::metrics::{Metric, Metrics};
use crate::quotas::NamespaceQuotas;
use attend_shelf::AttendShelf;
use kvd_compute::Precision;
use kvd_core::{ErrorCode, IdSpace, Namespace};
use kvd_store::{ArenaPool, DeviceQuotas, SequenceStore, StoreLimits};
use model::ModelRegistry;
use namespace_shares::NamespaceShares;
use pool_log::PoolLog;
use session_table::{SessionLimits, SessionTable};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tiers::CacheTiers;
use tokio::sync::{Notify, Semaphore};

/// How long a message of a stream waits for room for its answer before it is refused.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// A device and what is stored on it. Whole models are on one: which, says
/// [`RegisteredModel::shard`].
pub(crate) struct DeviceShard {
    worker: DeviceWorker,
    store: Arc<SequenceStore>,
    /// Ids of leases on its cache.
    leases: cache::LeaseIds,
}

/// The daemon's state, shared by all transports.
pub struct Service {
    config: Arc<Config>,
    boot_id: String,
    ids: Arc<IdSpace>,
    /// At least one.
    shards: Vec<DeviceShard>,
    models: Arc<ModelRegistry>,
    /// The cache's tiers below the pool, if there are any.
    tiers: Option<Arc<CacheTiers>>,
    sessions: Arc<SessionTable>,
    metrics: Arc<Metrics>,
    /// Bytes of all requests and answers.
    inflight: ByteBudget,
    namespace_shares: NamespaceShares,
    /// Told when such bytes of a namespace come back.
    inflight_freed: Arc<Notify>,
    quotas: Arc<NamespaceQuotas>,
    /// The right to build a model's codec, which takes memory in proportion to its calibration.
    building: Arc<Semaphore>,
    /// The right to make a calibration, which takes a core for seconds.
    calibrating: Arc<Semaphore>,
    draining: AtomicBool,
    /// Lines of the log about full pools.
    pool_log: PoolLog,
    access: AccessControl,
    /// Events of the cache, for watchers.
    events: Arc<events::EventLogs>,
    /// Memory of attends that are over.
    shelf: Arc<AttendShelf>,
}

/// Creates the series that are there from the start.
fn describe_service(metrics: &Metrics, boot_id: &str, shards: &[DeviceShard]) {
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("commit", env!("KVD_COMMIT")),
        ("boot_id", boot_id),
        ("device", &describe_devices(shards)),
    ];
    metrics.gauge(Metric::BuildInfo, &labels).set(1.0);
    // Both then count up and down with the regions themselves.
    metrics.gauge(Metric::Regions, &[]).set(0.0);
    metrics.gauge(Metric::RegionBytes, &[]).set(0.0);
    for payloads in ["file", "in_place", "copied", "ring"] {
        metrics.counter(Metric::RegionCallsTotal, &[("payloads", payloads)]).increment(0);
    }
    launches::describe_launches(metrics);
    session::describe_sessions(metrics);
    cache::describe_cache(metrics);
    crate::door_files::describe_reloads(metrics);
}

/// Bytes of a pool for each of its rows and pages of blocks, and how many there may be of these in
/// a small one.
const SLOT_BYTES: u64 = 2 << 10;
const SLOTS_LEAST: u64 = 1 << 16;

/// Rows and pages of blocks that a pool has at a time, at most.
fn pool_slots_max(config: &Config, pool_bytes: u64) -> u64 {
    match config.pool_slots_max {
        0 => (pool_bytes / SLOT_BYTES).max(SLOTS_LEAST),
        given => given,
    }
}

fn store_limits(config: &Config) -> StoreLimits {
    StoreLimits {
        sequences_max: config.sequences_max as u64,
        sequence_layers_max: config.sequence_layers_max,
        sequence_views_max: config.sequence_views_max,
        tokens_per_sequence_max: config.tokens_per_sequence_max,
        ..StoreLimits::default()
    }
}

/// State that outlives the daemon.
pub(crate) struct KeptState {
    pub(crate) tiers: Option<CacheTiers>,
    pub(crate) quotas: NamespaceQuotas,
}

impl Service {
    /// A service over devices, at least one, whose ids `ids` gives.
    pub(crate) fn new(
        config: Arc<Config>,
        workers: Vec<DeviceWorker>,
        metrics: Arc<Metrics>,
        ids: Arc<IdSpace>,
        kept: KeptState,
    ) -> Self {
        let (tiers, quotas) = (kept.tiers.map(Arc::new), Arc::new(kept.quotas));
        let events = Arc::new(events::EventLogs::new(config.cache.events, &metrics));
        let quota_table = quotas.quota_table();
        let limits = store_limits(&config);
        let count = workers.len() as u64;
        let shard = |(index, worker): (u64, DeviceWorker)| {
            let (tier, pool_bytes) = (worker.metrics().tier, worker.device_info().arena_bytes);
            let pool = ArenaPool::with_slots(tier, pool_bytes, pool_slots_max(&config, pool_bytes));
            let sequences = ids.sequence_counter(index, count);
            let of_device = DeviceQuotas { table: quota_table.clone(), device: index as usize };
            let of_cache = of_device.clone();
            let mut cache = cache::cache_limits(&config.cache, pool_bytes, of_cache);
            if let Some(seed) = tiers.as_ref().and_then(|tiers| tiers.hash_seed()) {
                cache.seed = seed;
            }
            cache.events = Some(events.clone());
            let store = SequenceStore::new(pool, limits.clone(), sequences);
            let store = store.with_quotas(of_device).with_cache(cache);
            let leases = cache::lease_ids(&ids, index, count);
            DeviceShard { worker, store: Arc::new(store), leases }
        };
        let shards: Vec<DeviceShard> = (0..).zip(workers).map(shard).collect();
        assert!(!shards.is_empty(), "a service without a device");
        tiers.iter().for_each(|tiers| tiers.set_devices(shards.len()));
        let boot_id = ids.boot().to_string();
        describe_service(&metrics, &boot_id, &shards);
        let audit = AuditLog::new(config.access.audit_lines_max);
        // Empty until the daemon has read it: a service lets nobody in too early.
        let (file, table) = (config.access.principals.clone(), PrincipalTable::default());
        let access = AccessControl::new(file, table, audit, &metrics);
        let of_sessions = SessionLimits {
            sessions_max: config.sessions_max,
            ttl_max: config.session_ttl_max,
            quotas: quota_table.clone(),
        };
        let models = ModelRegistry::new(config.models_max, ids.clone(), quota_table.clone());
        Self {
            inflight: ByteBudget::new(
                "limits.inflight_bytes_max",
                config.inflight_bytes_max as u64,
            ),
            namespace_shares: NamespaceShares::new(&config),
            building: Arc::new(Semaphore::new(1)),
            models: Arc::new(models),
            inflight_freed: Arc::default(),
            calibrating: Arc::new(Semaphore::new(1)),
            sessions: SessionTable::new(of_sessions, ids.clone()),
            draining: AtomicBool::new(false),
            quotas,
            tiers,
            pool_log: PoolLog::default(),
            access,
            events,
            config,
            shelf: Arc::default(),
            boot_id,
            ids,
            shards,
            metrics,
        }
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Who may come in.
    pub(crate) fn access_control(&self) -> &AccessControl {
        &self.access
    }

    /// The cache's tiers below the pool, if there are any.
    pub(crate) fn cache_tiers(&self) -> Option<&Arc<CacheTiers>> {
        self.tiers.as_ref()
    }

    /// Changes at every start; ids of another boot are void.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// The devices, in words.
    #[must_use]
    pub fn device_names(&self) -> String {
        describe_devices(&self.shards)
    }

    /// How far attention kernels may round, by the name of the setting; of several devices the
    /// coarsest. GPUs keep to the bound of single precision whatever the setting says.
    #[must_use]
    pub fn precision_name(&self) -> &'static str {
        let on_cpu = self.workers().any(|worker| worker.device_info().uuid.is_none());
        let precision = if on_cpu { self.config.precision } else { Precision::Single };
        precision.name()
    }

    /// Workers of the devices.
    pub fn workers(&self) -> impl Iterator<Item = &DeviceWorker> {
        self.shards.iter().map(|shard| &shard.worker)
    }

    /// Worker of the first device.
    #[must_use]
    pub fn first_worker(&self) -> &DeviceWorker {
        &self.shards[0].worker
    }

    /// The shard of the next model: of the devices that work, the one with the fewest models.
    fn next_shard(&self) -> usize {
        let models = self.models.list_models(None);
        let count = |shard: usize| models.iter().filter(|model| model.shard == shard).count();
        let by_use = |shard: &usize| (self.shards[*shard].worker.has_failed(), count(*shard));
        (0..self.shards.len()).min_by_key(by_use).unwrap_or(0)
    }

    /// The recorder.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// From now on requests are refused with `SHUTTING_DOWN`.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether requests are served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Acquire) && !self.workers().any(DeviceWorker::has_failed)
    }

    /// Says why requests are not served, for people.
    #[must_use]
    pub fn why_unready(&self) -> String {
        let failed = self.workers().filter(|worker| worker.has_failed());
        let failed = failed.map(|worker| format!("failed: {}\n", worker.device_info().description));
        let draining = self.draining.load(Ordering::Acquire);
        failed.chain(draining.then(|| "draining\n".to_owned())).collect()
    }

    /// Bytes of requests and answers that are in the daemon now, in units of 1 KiB.
    #[must_use]
    pub fn inflight_bytes(&self) -> u64 {
        self.inflight.taken_bytes()
    }

    /// Budgets of a caller.
    pub(crate) fn call_budgets(&self, call: &CallContext) -> ByteBudgets {
        let principal = call.principal.as_deref().and_then(AccessPrincipal::byte_budget).cloned();
        ByteBudgets { principal, ..self.budgets_of(&call.owner, Some(&call.namespace)) }
    }

    /// Budgets of a connection, and of a namespace where its requests have one.
    pub(crate) fn budgets_of(
        &self,
        owner: &CallOwner,
        namespace: Option<&Namespace>,
    ) -> ByteBudgets {
        let account = namespace.and_then(|name| self.quotas.quota_table().find_account(name));
        let freed = &self.inflight_freed;
        let budget = |account| NamespaceBudget { account, freed: freed.clone() };
        let share = namespace.and_then(|name| self.namespace_shares.find_share(name));
        let (connection, all) = (owner.byte_budget().clone(), self.inflight.clone());
        let namespace = account.map(budget);
        ByteBudgets { principal: None, namespace, connection, share, all }
    }

    /// Takes bytes of a request or its answer.
    pub(crate) fn take_bytes(
        &self,
        call: &CallContext,
        bytes: u64,
    ) -> Result<InFlight, ServiceError> {
        self.call_budgets(call).take_share(bytes)
    }

    /// Takes the bytes of an answer. On a stream they are waited for a while: what holds them may
    /// be answers of the same stream that its client has yet to read.
    async fn admit_answer(&self, call: &CallContext, bytes: u64) -> Result<InFlight, ServiceError> {
        let budgets = self.call_budgets(call);
        if call.waits_for_queue
            && let Ok(share) = tokio::time::timeout(ANSWER_TIME, budgets.wait_share(bytes)).await
        {
            return share;
        }
        budgets.take_share(bytes)
    }

    /// Lets a request in, or says why not.
    ///
    /// # Errors
    /// `SHUTTING_DOWN`, `NAMESPACE_DENIED` or `DEADLINE_EXCEEDED`.
    pub fn admit_call(&self, call: &CallContext) -> Result<(), ServiceError> {
        self.admit_daemon_call(call)?;
        self.check_namespace(&call.namespace)
    }

    /// Lets a request in that is about the daemon, whatever namespace it comes from.
    pub(crate) fn admit_daemon_call(&self, call: &CallContext) -> Result<(), ServiceError> {
        if self.draining.load(Ordering::Acquire) {
            let message = "the daemon drains and takes no new work; retry on its successor";
            return Err(ServiceError::new(ErrorCode::ShuttingDown, message));
        }
        call.check_deadline()
    }

    fn check_namespace(&self, namespace: &Namespace) -> Result<(), ServiceError> {
        if self.config.namespaces.allow_namespace(namespace) {
            return Ok(());
        }
        let message =
            format!("namespace {namespace} may not use this daemon (see namespaces.allowed)");
        Err(ServiceError::new(ErrorCode::NamespaceDenied, message))
    }
}

fn describe_devices(shards: &[DeviceShard]) -> String {
    let names: Vec<_> =
        shards.iter().map(|shard| &shard.worker.device_info().description[..]).collect();
    names.join(", ")
}
