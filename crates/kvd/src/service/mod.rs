//! What the daemon does for a request, whatever the transport: limits, namespaces, the store's
//! book-keeping, and lane jobs. No bytes are touched here; they travel as `Bytes` to the lane.

mod attend;
mod budget;
mod call;
mod error;
mod load;
mod model;
mod pack;
mod plan;
mod query_sample;
mod region;
mod register;
mod sequence;
mod stats;
mod store;
#[cfg(test)]
mod tests;

pub use attend::AttendReply;
pub(crate) use attend::PART_BYTES;
pub use call::Call;
pub use error::ServiceError;
pub use load::LoadPiece;
pub use model::Model;
pub(crate) use region::OpenMemory;
pub use stats::{ModelStats, PoolStats};
pub use store::StoreReply;

use crate::config::Config;
use crate::lane::Lane;
use crate::metrics::{Metric, Metrics};
use budget::ByteBudget;
use kvd_core::{ErrorCode, Namespace};
use kvd_store::{Limits, Pool, Store};
use model::Models;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Semaphore;

/// The daemon's state, shared by all transports.
pub struct Service {
    config: Arc<Config>,
    boot_id: String,
    lane: Lane,
    pool: Arc<Pool>,
    store: Arc<Store>,
    models: Arc<Models>,
    metrics: Arc<Metrics>,
    inflight: ByteBudget,
    /// The right to build a model's codec, which takes memory in proportion to its calibration.
    building: Arc<Semaphore>,
    draining: AtomicBool,
}

impl Service {
    /// A service over one device.
    #[must_use]
    pub fn new(config: Arc<Config>, lane: Lane, metrics: Arc<Metrics>) -> Self {
        let pool = Pool::new("host", lane.info().arena_bytes);
        let limits = Limits {
            sequences_max: config.sequences_max as u64,
            sequence_layers_max: config.sequence_layers_max,
            tokens_per_sequence_max: config.tokens_per_sequence_max,
            ..Limits::default()
        };
        let store = Arc::new(Store::new(pool.clone(), limits));
        let boot_id = boot_id();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("boot_id", &boot_id),
            ("device", &lane.info().description),
        ];
        metrics.gauge(Metric::BuildInfo, &labels).set(1.0);
        // Both then count up and down with the regions themselves.
        metrics.gauge(Metric::Regions, &[]).set(0.0);
        metrics.gauge(Metric::RegionBytes, &[]).set(0.0);
        Self {
            inflight: ByteBudget::new(config.inflight_bytes_max as u64),
            building: Arc::new(Semaphore::new(1)),
            models: Arc::new(Models::new(config.models_max)),
            draining: AtomicBool::new(false),
            config,
            boot_id,
            lane,
            pool,
            store,
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

    /// The device.
    #[must_use]
    pub fn lane(&self) -> &Lane {
        &self.lane
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
        !self.draining.load(Ordering::Acquire) && !self.lane.failed()
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

/// Distinct for every start on a machine: time, process and address-space layout.
fn boot_id() -> String {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_nanos());
    let salt = std::ptr::from_ref(&nanos) as usize;
    let seed = format!("{nanos}-{}-{salt}", std::process::id());
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(seed.as_bytes()))
}
