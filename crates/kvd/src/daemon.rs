//! The daemon's life: build (bind and take memory), spawn, drain.

use crate::admin::{AdminPages, AdminServer};
use crate::config::{AccessConfig, Config, ConfigError, MetricsReaders, is_beyond_loopback};
use crate::descriptors;
use crate::device::{self, DeviceError};
use crate::device_worker::{DeviceWorker, DeviceWorkerThread, WorkerLimits};
use crate::door_files::{DoorFiles, FileWatch};
use crate::metrics::{Metric, Metrics};
use crate::quotas::NamespaceQuotas;
use crate::service::tiers::{CacheTiers, TierError};
use crate::service::{KeptState, Service, draw_ids};
use crate::transport::{BoundAddresses, GrpcServer, ListenError, ServerPhase};
use kvd_compute::Backend;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Why a daemon could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The limits of the configuration and of the process do not fit.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A gRPC socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Random numbers for the boot id and for ids.
    #[error("the system gives no random numbers for ids: {0}")]
    Random(getrandom::Error),
    /// The folder of the cache's disk tier.
    #[error("{}", disk_text(.0))]
    Disk(#[from] kvd_tier::DiskError),
    /// A thread for a device.
    #[error("start a device's thread: {0}")]
    Worker(std::io::Error),
}

/// The error of a disk tier, with the setting that it is of.
fn disk_text(error: &kvd_tier::DiskError) -> String {
    error.setting_name().map_or_else(|| error.to_string(), |name| format!("{name}: {error}"))
}

/// Everything bound and taken, nothing served yet.
pub struct Daemon {
    service: Arc<Service>,
    worker_threads: Vec<DeviceWorkerThread>,
    grpc: GrpcServer,
    admin: Option<AdminServer>,
    files: FileWatch,
    /// Devices that have failed.
    failed: watch::Receiver<usize>,
}

/// A serving daemon.
pub struct RunningDaemon {
    service: Arc<Service>,
    worker_threads: Vec<DeviceWorkerThread>,
    addresses: BoundAddresses,
    admin_address: Option<SocketAddr>,
    phase: watch::Sender<ServerPhase>,
    /// Phase of the admin port, which lasts longer.
    admin_phase: watch::Sender<ServerPhase>,
    grpc: JoinHandle<Result<(), tonic::transport::Error>>,
    admin: Option<JoinHandle<std::io::Result<()>>>,
    upkeep: JoinHandle<()>,
    /// Looks at the files of doors, and warns of open ones.
    watches: [JoinHandle<()>; 2],
    /// Asks for that look.
    look: Arc<Notify>,
    /// Ends sessions that nobody holds.
    session_ends: JoinHandle<()>,
    failed: watch::Receiver<usize>,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainOutcome {
    /// Every request in flight was answered.
    Clean,
    /// The grace period ran out; what was left was cut off.
    CutOff,
}

/// How often recorded samples are folded into their buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Time for a scrape in flight.
const ADMIN_GRACE: Duration = Duration::from_millis(200);

/// Time for a server to notice that its connections are cut.
const CUT_TIME: Duration = Duration::from_secs(1);

/// Time for blocks that wait to be written when the daemon stops.
const DISK_GRACE: Duration = Duration::from_secs(2);
/// Longest wait for what the store that daemons share is to have.
const REMOTE_GRACE: Duration = Duration::from_secs(2);

/// Time for devices to end the job that they have: an attend stops within milliseconds.
pub const DEVICE_STOP_TIME: Duration = Duration::from_secs(2);

/// Ends the threads of all devices; whether all of them have ended in time.
fn stop_devices(threads: Vec<DeviceWorkerThread>) -> bool {
    threads.iter().for_each(DeviceWorkerThread::stop_thread);
    let end = Instant::now() + DEVICE_STOP_TIME;
    let left = || end.saturating_duration_since(Instant::now());
    // Each is waited for, whatever became of those before.
    threads.into_iter().map(|thread| thread.join_thread(left())).filter(|ended| !ended).count() == 0
}

/// Waits for a server whose connections are cut, and gives it up if it hangs all the same.
async fn end_server<T>(mut server: JoinHandle<T>) {
    if tokio::time::timeout(CUT_TIME, &mut server).await.is_err() {
        server.abort();
    }
}

/// How often it is said that a door is open to a network.
const OPEN_DOOR_INTERVAL: Duration = Duration::from_secs(3600);

/// Says where whoever reaches a port may use it, at once and then each hour.
async fn warn_of_open_doors(service: Arc<Service>, doors: OpenDoors) {
    let insecure = service.metrics().gauge(Metric::Insecure, &[]);
    insecure.set(if doors.tcp.is_some() { 1.0 } else { 0.0 });
    if doors.tcp.is_none() && doors.admin.is_none() {
        return;
    }
    loop {
        if let Some(address) = doors.tcp {
            tracing::warn!(
                %address,
                key = "server.insecure",
                "gRPC listens beyond this machine without authentication: whoever reaches this \
                 address may read, change and close all sequences"
            );
        }
        if let Some(address) = doors.admin {
            tracing::warn!(
                %address,
                key = "admin.metrics",
                "the admin port listens beyond this machine: whoever reaches this address may read \
                 /metrics, and without access.principals the page at / too, with the names of \
                 models and namespaces"
            );
        }
        tokio::time::sleep(OPEN_DOOR_INTERVAL).await;
    }
}

/// Addresses beyond the loopback that ask nobody who comes.
struct OpenDoors {
    tcp: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl OpenDoors {
    fn of_addresses(
        access: &AccessConfig,
        tcp: Option<SocketAddr>,
        admin: Option<SocketAddr>,
    ) -> Self {
        let is_open = |address: &SocketAddr| is_beyond_loopback(*address);
        let metrics_are_open = access.metrics == MetricsReaders::All;
        Self {
            tcp: tcp.filter(is_open).filter(|_| !access.authenticates_tcp()),
            admin: admin.filter(is_open).filter(|_| metrics_are_open),
        }
    }
}

/// Opens the cache's tiers, if there are to be any, off the threads that answer requests.
async fn open_tiers(
    config: &Config,
    metrics: &Arc<Metrics>,
) -> Result<Option<CacheTiers>, BuildError> {
    let (cache, metrics) = (config.cache.clone(), Arc::clone(metrics));
    let open = move || CacheTiers::open_tiers(&cache, &metrics);
    let opened = tokio::task::spawn_blocking(open).await;
    let opened = opened.map_err(|error| BuildError::Worker(std::io::Error::other(error)))?;
    opened.map_err(|error| match error {
        TierError::Disk(error) => BuildError::Disk(error),
        TierError::Remote(error) => BuildError::Config(error),
    })
}

impl Daemon {
    /// Takes memory, starts the devices' threads and binds all sockets.
    ///
    /// # Errors
    /// What could not be had.
    pub async fn build(config: Config) -> Result<Self, BuildError> {
        let doors = DoorFiles::read_files(&config.access)?;
        let backends = device::open_devices(&config)?;
        Self::build_with(config, backends, doors).await
    }

    /// Builds a daemon over given devices, at least one.
    ///
    /// # Errors
    /// What could not be had.
    pub async fn build_on(
        config: Config,
        backends: Vec<Box<dyn Backend>>,
    ) -> Result<Self, BuildError> {
        let doors = DoorFiles::read_files(&config.access)?;
        Self::build_with(config, backends, doors).await
    }

    async fn build_with(
        mut config: Config,
        backends: Vec<Box<dyn Backend>>,
        doors: DoorFiles,
    ) -> Result<Self, BuildError> {
        let DoorFiles { server_tls, admin_tls, principals } = doors;
        config.connections_max = Some(descriptors::allowed_connections(&config)?);
        let grpc = GrpcServer::bind_sockets(&config, server_tls.clone()).await?;
        let admin = match config.admin_listen {
            None => None,
            Some(address) => {
                let bound = AdminServer::bind_address(address, admin_tls.clone()).await;
                let (address, key) = (address.to_string(), "admin.listen");
                Some(bound.map_err(|source| ListenError { address, key, source })?)
            }
        };
        let metrics = Arc::new(Metrics::new());
        let (failures, failed) = watch::channel(0);
        let pools: Vec<_> = backends.iter().map(|backend| backend.info().arena_bytes).collect();
        let quotas = NamespaceQuotas::open_file(&config, &pools)?;
        let start = |backend| {
            let failures = failures.clone();
            let on_failure = move || failures.send_modify(|failed| *failed += 1);
            let (queue_jobs_max, merging) = (config.queue_jobs_max, config.merging);
            let quotas = quotas.quota_table().clone();
            let limits = WorkerLimits { queue_jobs_max, merging, quotas };
            DeviceWorker::start_thread(backend, limits, &metrics, on_failure)
        };
        let workers = backends.into_iter().map(start).collect::<Result<Vec<_>, _>>();
        let (workers, worker_threads) = workers.map_err(BuildError::Worker)?.into_iter().unzip();
        let ids = draw_ids().map_err(BuildError::Random)?;
        let tiers = open_tiers(&config, &metrics).await?;
        let kept = KeptState { tiers, quotas };
        let service = Arc::new(Service::new(Arc::new(config), workers, metrics, ids, kept));
        if let Some(table) = principals {
            tracing::info!(principals = table.count_principals(), "who may come in is read");
            service.access_control().replace_table(table);
        }
        let files = FileWatch::new(service.clone(), server_tls, admin_tls);
        Ok(Self { service, worker_threads, grpc, admin, files, failed })
    }

    /// The pages of the admin port, for connections that do not come by its socket.
    #[must_use]
    pub fn admin_pages(&self) -> AdminPages {
        AdminPages::of_service(self.service.clone())
    }

    /// Begins to serve.
    #[must_use]
    pub fn spawn(self) -> RunningDaemon {
        let (phase, of_grpc) = watch::channel(ServerPhase::Serving);
        let (admin_phase, of_admin) = watch::channel(ServerPhase::Serving);
        let addresses = self.grpc.bound_addresses().clone();
        let admin_address = self.admin.as_ref().map(AdminServer::bound_address);
        let shown = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        tracing::info!(
            tcp = addresses.tcp.map(display),
            unix = shown(&addresses.unix),
            region = shown(&addresses.region),
            admin = admin_address.map(display),
            version = env!("CARGO_PKG_VERSION"),
            commit = env!("KVD_COMMIT"),
            device = self.service.device_names(),
            pool_bytes = self.service.pool_stats().capacity_bytes,
            boot_id = self.service.boot_id(),
            "kvd serves"
        );
        let access = &self.service.config().access;
        let doors = OpenDoors::of_addresses(access, addresses.tcp, admin_address);
        let look = Arc::new(Notify::new());
        let watches = [
            tokio::spawn(self.files.watch_files(look.clone())),
            tokio::spawn(warn_of_open_doors(self.service.clone(), doors)),
        ];
        let grpc = tokio::spawn(self.grpc.serve_all(self.service.clone(), of_grpc));
        let admin =
            self.admin.map(|admin| tokio::spawn(admin.serve_until(self.service.clone(), of_admin)));
        let metrics = self.service.metrics().clone();
        let upkeep = tokio::spawn(async move {
            loop {
                tokio::time::sleep(UPKEEP_INTERVAL).await;
                metrics.run_upkeep();
            }
        });
        let session_ends = tokio::spawn(self.service.clone().end_due_sessions());
        RunningDaemon {
            service: self.service,
            worker_threads: self.worker_threads,
            addresses,
            admin_address,
            phase,
            admin_phase,
            grpc,
            admin,
            upkeep,
            watches,
            look,
            session_ends,
            failed: self.failed,
        }
    }
}

impl RunningDaemon {
    /// Where gRPC is served.
    #[must_use]
    pub fn bound_addresses(&self) -> &BoundAddresses {
        &self.addresses
    }

    /// Where metrics and health are served.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// The service, for embedding.
    #[must_use]
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Reads the files of doors anew, soon.
    #[must_use]
    pub fn file_reload(&self) -> Arc<Notify> {
        self.look.clone()
    }

    /// Returns when no device is left that works.
    pub async fn device_failed(&self) {
        let (mut failed, count) = (self.failed.clone(), self.worker_threads.len());
        if failed.wait_for(|failed| *failed == count).await.is_err() {
            // A device's thread is gone without a failure: nothing to report, ever.
            std::future::pending::<()>().await;
        }
    }

    /// Readiness off, no new work, requests in flight answered within the grace period. Metrics
    /// stay readable until the end.
    pub async fn drain(self) -> DrainOutcome {
        tracing::info!("draining");
        self.service.drain();
        // Streams that hold sessions end with the drain, and what is in flight is still answered.
        self.session_ends.abort();
        self.watches.iter().for_each(JoinHandle::abort);
        let grace = self.service.config().grace_period;
        self.phase.send_replace(ServerPhase::Draining);
        let mut grpc = self.grpc;
        let drained = match tokio::time::timeout(grace, &mut grpc).await {
            Ok(Ok(Ok(()))) => DrainOutcome::Clean,
            Ok(other) => {
                let reason = match other {
                    Ok(Err(error)) => error.to_string(),
                    Err(panic) => panic.to_string(),
                    Ok(Ok(())) => String::new(),
                };
                tracing::error!(reason, "the gRPC server broke");
                DrainOutcome::CutOff
            }
            Err(_) => {
                let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
                tracing::warn!(grace_ms, "the grace period ran out; requests are cut off");
                self.phase.send_replace(ServerPhase::Cut);
                end_server(grpc).await;
                DrainOutcome::CutOff
            }
        };
        self.admin_phase.send_replace(ServerPhase::Draining);
        if let Some(mut admin) = self.admin {
            // A scraper that keeps its connection open must not hold the daemon.
            if tokio::time::timeout(ADMIN_GRACE, &mut admin).await.is_err() {
                self.admin_phase.send_replace(ServerPhase::Cut);
                end_server(admin).await;
            }
        }
        self.upkeep.abort();
        if let Some(tiers) = self.service.cache_tiers().cloned() {
            let disk = Arc::clone(&tiers);
            let close = move || disk.close_folder(DISK_GRACE);
            // What a panic left unwritten is not durable, and nobody was told that it is.
            drop(tokio::task::spawn_blocking(close).await);
            tiers.close_remote(REMOTE_GRACE).await;
        }
        drop(self.service);
        // Off the runtime's workers: a device may be in the middle of a job. Tasks that were cut
        // off may still hold the service; the threads end all the same.
        let threads = self.worker_threads;
        let join = move || stop_devices(threads);
        if !tokio::task::spawn_blocking(join).await.unwrap_or(false) {
            let limit_ms = DEVICE_STOP_TIME.as_millis() as u64;
            tracing::warn!(limit_ms, "a device's job did not end; it ends with the process");
        }
        tracing::info!(?drained, "stopped");
        drained
    }
}
