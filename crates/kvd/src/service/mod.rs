//! What the daemon does for a request, whatever the transport: limits, namespaces, the store's
//! book-keeping, and lane jobs. No bytes are touched here; they travel as `Bytes` to the lane.

mod attend;
mod budget;
mod call;
mod error;
mod ids;
mod launches;
mod load;
mod model;
mod pack;
mod plan;
mod pool_log;
mod query_sample;
mod recent_queries;
mod region;
mod register;
mod sequence;
mod stats;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use attend::PART_BYTES;
pub use attend::{AttendReply, RefusedQuery};
pub use call::Call;
pub use error::ServiceError;
pub(crate) use ids::draw as draw_ids;
pub use load::LoadPiece;
pub use model::Model;
pub(crate) use region::{Offer, OpenMemory};
pub(crate) use stats::DevicePool;
pub use stats::{ModelStats, PoolStats};
pub use store::StoreReply;

use crate::config::Config;
use crate::lane::Lane;
use crate::metrics::{Metric, Metrics};
use budget::ByteBudget;
use kvd_compute::Precision;
use kvd_core::{ErrorCode, IdSpace, Namespace};
use kvd_store::{Limits, Pool, Store};
use model::Models;
use pool_log::PoolLog;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Semaphore;

/// A device and what is stored on it. Whole models are on one: which, says [`Model::seat`].
pub(crate) struct Seat {
    lane: Lane,
    store: Arc<Store>,
}

/// The daemon's state, shared by all transports.
pub struct Service {
    config: Arc<Config>,
    boot_id: String,
    ids: Arc<IdSpace>,
    /// At least one.
    seats: Vec<Seat>,
    models: Arc<Models>,
    metrics: Arc<Metrics>,
    inflight: ByteBudget,
    /// The right to build a model's codec, which takes memory in proportion to its calibration.
    building: Arc<Semaphore>,
    draining: AtomicBool,
    /// What was told of full pools.
    pool_log: PoolLog,
}

impl Service {
    /// A service over devices, at least one, whose ids `ids` gives.
    pub(crate) fn new(
        config: Arc<Config>,
        lanes: Vec<Lane>,
        metrics: Arc<Metrics>,
        ids: Arc<IdSpace>,
    ) -> Self {
        let limits = Limits {
            sequences_max: config.sequences_max as u64,
            sequence_layers_max: config.sequence_layers_max,
            sequence_views_max: config.sequence_views_max,
            tokens_per_sequence_max: config.tokens_per_sequence_max,
            ..Limits::default()
        };
        let count = lanes.len() as u64;
        let seat = |(index, lane): (u64, Lane)| {
            let pool = Pool::new(lane.metrics().tier, lane.info().arena_bytes);
            let sequences = ids.sequences(index, count);
            Seat { lane, store: Arc::new(Store::new(pool, limits.clone(), sequences)) }
        };
        let seats: Vec<Seat> = (0..).zip(lanes).map(seat).collect();
        assert!(!seats.is_empty(), "a service without a device");
        let boot_id = ids.boot().to_string();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("commit", env!("KVD_COMMIT")),
            ("boot_id", &boot_id),
            ("device", &devices(&seats)),
        ];
        metrics.gauge(Metric::BuildInfo, &labels).set(1.0);
        // Both then count up and down with the regions themselves.
        metrics.gauge(Metric::Regions, &[]).set(0.0);
        metrics.gauge(Metric::RegionBytes, &[]).set(0.0);
        for payloads in ["file", "in_place", "copied"] {
            metrics.counter(Metric::RegionCallsTotal, &[("payloads", payloads)]).increment(0);
        }
        launches::describe_launches(&metrics);
        Self {
            inflight: ByteBudget::new(config.inflight_bytes_max as u64),
            building: Arc::new(Semaphore::new(1)),
            models: Arc::new(Models::new(config.models_max, ids.clone())),
            draining: AtomicBool::new(false),
            pool_log: PoolLog::default(),
            config,
            boot_id,
            ids,
            seats,
            metrics,
        }
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes at every start; ids of another boot are void.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// The devices, in words.
    #[must_use]
    pub fn devices(&self) -> String {
        devices(&self.seats)
    }

    /// How far attention kernels may round, by the name of the setting; of several devices the
    /// coarsest. GPUs keep to the bound of single precision whatever the setting says.
    #[must_use]
    pub fn precision(&self) -> &'static str {
        let on_cpu = self.lanes().any(|lane| lane.info().uuid.is_none());
        let precision = if on_cpu { self.config.precision } else { Precision::Single };
        precision.name()
    }

    /// Their lanes.
    pub fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.seats.iter().map(|seat| &seat.lane)
    }

    /// The first of them; of a daemon with one device, that one's.
    #[must_use]
    pub fn lane(&self) -> &Lane {
        &self.seats[0].lane
    }

    /// Where the next model goes: of the devices that work, the one with the fewest.
    fn next_seat(&self) -> usize {
        let models = self.models.list(None);
        let count = |seat: usize| models.iter().filter(|model| model.seat == seat).count();
        let by_use = |seat: &usize| (self.seats[*seat].lane.failed(), count(*seat));
        (0..self.seats.len()).min_by_key(by_use).unwrap_or(0)
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
    pub fn ready(&self) -> bool {
        !self.draining.load(Ordering::Acquire) && !self.lanes().any(Lane::failed)
    }

    /// Why not, for people.
    #[must_use]
    pub fn why_unready(&self) -> String {
        let failed = self.lanes().filter(|lane| lane.failed());
        let failed = failed.map(|lane| format!("failed: {}\n", lane.info().description));
        let draining = self.draining.load(Ordering::Acquire);
        failed.chain(draining.then(|| "draining\n".to_owned())).collect()
    }

    /// Lets a request in, or says why not.
    ///
    /// # Errors
    /// `SHUTTING_DOWN`, `NAMESPACE_DENIED` or `DEADLINE_EXCEEDED`.
    pub fn admit(&self, call: &Call) -> Result<(), ServiceError> {
        if self.draining.load(Ordering::Acquire) {
            let message = "the daemon drains and takes no new work; retry on its successor";
            return Err(ServiceError::new(ErrorCode::ShuttingDown, message));
        }
        self.allow(&call.namespace)?;
        call.check_deadline()
    }

    fn allow(&self, namespace: &Namespace) -> Result<(), ServiceError> {
        if self.config.namespaces.allow(namespace) {
            return Ok(());
        }
        let message =
            format!("namespace {namespace} may not use this daemon (see namespaces.allowed)");
        Err(ServiceError::new(ErrorCode::NamespaceDenied, message))
    }
}

fn devices(seats: &[Seat]) -> String {
    let names: Vec<_> = seats.iter().map(|seat| &seat.lane.info().description[..]).collect();
    names.join(", ")
}
