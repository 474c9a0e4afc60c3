//! Configuration: what was written ([`RawConfig`]) and what it means ([`Config`]).
//!
//! `deploy/kvd.toml` is the one place that states defaults; it is compiled in, and
//! `kvd config --print-default` prints it.

mod access;
mod address;
mod cache;
mod devices;
mod environment;
mod kernel_cache;
mod log_filter;
mod namespaces;
mod raw;
mod remote;
mod ring;
mod size;
mod traces;

pub(crate) use access::{AccessConfig, MetricsReaders, is_beyond_loopback};
pub use cache::{CacheConfig, DiskCacheConfig, EventConfig, PromotionLimits};
pub(crate) use environment::describe_unread_variables;
pub use kernel_cache::KernelCache;
pub use namespaces::QuotaConfig;
pub(crate) use namespaces::{check_weight, find_quota, parse_amount};
pub use raw::{ConfigError, ConfigOverrides, CountSetting, RawConfig};
pub use remote::RemoteCacheConfig;
pub use ring::RingConfig;
pub use size::SizeSetting;
pub use traces::TraceConfig;

use crate::device_worker::MergeLimits;
use crate::service::PART_BYTES;
use address::{check_socket_paths, parse_address};
use devices::parse_devices;
use kernel_cache::kernel_cache;
use kvd_compute::{CpuOptions, Precision};
use kvd_core::Namespace;
use kvd_cuda::GpuName;
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The file of defaults, as shipped.
pub const DEFAULT_TOML: &str = include_str!("../../../../deploy/kvd.toml");

/// A validated configuration: nothing in it can fail for its form.
#[derive(Clone, Debug)]
pub struct Config {
    /// gRPC over TCP.
    pub listen_tcp: Option<SocketAddr>,
    /// gRPC over a Unix socket.
    pub listen_unix: Option<PathBuf>,
    /// Regions.
    pub listen_region: Option<PathBuf>,
    /// Who may come in.
    pub(crate) access: AccessConfig,
    /// Metrics and health.
    pub admin_listen: Option<SocketAddr>,
    /// Open connections of the admin port.
    pub admin_connections_max: usize,
    /// Time to send the head of a request there, and to be idle before the next.
    pub admin_head_timeout: Duration,
    /// Largest gRPC message.
    pub message_bytes_max: usize,
    /// HTTP/2 window of one stream.
    pub stream_window_bytes: u32,
    /// HTTP/2 window of one connection.
    pub connection_window_bytes: u32,
    /// How often silent connections are asked for a sign of life.
    pub keepalive_interval: Duration,
    /// How long that sign, or a new connection's first one, may take.
    pub keepalive_timeout: Duration,
    /// Requests in flight on one connection.
    pub streams_per_connection_max: u32,
    /// Open connections; none says as many as the descriptors allow, and a daemon that was built
    /// how many that are.
    pub connections_max: Option<usize>,
    /// Time for a message to arrive once its length is known.
    pub message_timeout: Duration,
    /// Time to drain.
    pub grace_period: Duration,
    /// The devices that compute, at least one.
    pub devices: Vec<DeviceChoice>,
    /// Page memory.
    pub pool_bytes: u64,
    /// Rows and pages of blocks in it at a time; 0 for as many as its bytes say.
    pub pool_slots_max: u64,
    /// GPU memory for tables of layers.
    pub table_bytes: u64,
    /// Touch the page memory at start.
    pub prefault: bool,
    /// Compute threads; 0 means one per core.
    pub threads: usize,
    /// Keep each of them on one core.
    pub pin_threads: bool,
    /// How far attention kernels may round.
    pub precision: Precision,
    /// Where kernels are kept that are compiled while the daemon runs.
    pub kernel_cache: KernelCache,
    /// Sequences of launches that a GPU keeps as graphs; 0 for none.
    pub graphs_max: usize,
    /// How long a GPU's work may take before the device has failed.
    pub kernel_timeout: Duration,
    /// Jobs waiting for the device.
    pub queue_jobs_max: usize,
    /// How attends of several callers go in one pass.
    pub merging: MergeLimits,
    /// Registered models.
    pub models_max: usize,
    /// Open sequences.
    pub sequences_max: usize,
    /// Sessions of all namespaces.
    pub sessions_max: usize,
    /// Longest time that a session goes on without a stream that holds it.
    pub session_ttl_max: Duration,
    /// Tokens of one sequence.
    pub tokens_per_sequence_max: u32,
    /// Layers of all open sequences.
    pub sequence_layers_max: u64,
    /// Views that all open sequences have of their blocks.
    pub sequence_views_max: u64,
    /// Calibration artefact of one model.
    pub calibration_bytes_max: usize,
    /// Rows that one `CalibrateModel` takes, as f32; 0 for none.
    pub calibration_rows_bytes_max: u64,
    /// Queries that a model whose keys are kept exactly keeps a sample of, all layers; 0 for none.
    pub query_sample_bytes_max: u64,
    /// Bytes of requests and answers, from a message's length until its answer is sent.
    pub inflight_bytes_max: usize,
    /// Bytes of requests and answers of one connection.
    pub connection_bytes_max: usize,
    /// Bytes of requests and answers of one namespace.
    pub namespace_bytes_max: usize,
    /// Regions that workers share.
    pub regions_max: usize,
    /// Memory file of one region.
    pub region_bytes_max: u64,
    /// Their rings.
    pub rings: RingConfig,
    /// Blocks that the queries of one attend read.
    pub attend_parts_max: u64,
    /// Scores that one attend computes.
    pub attend_work_max: u64,
    /// Rows of heads, tokens, layers and sides of one step.
    pub step_rows_max: u64,
    /// Fewest tokens of a page under a codec with an entropy coder; others that quantize take half.
    pub page_tokens_min: u32,
    /// The cache.
    pub cache: CacheConfig,
    /// Who may use the daemon.
    pub namespaces: AllowedNamespaces,
    /// Shares of a device's time, of namespaces whose share is not 1.
    pub weights: HashMap<Namespace, u32>,
    /// Limits of single namespaces.
    pub quotas: QuotaConfig,
    /// Block size of models that do not say.
    pub block_tokens_default: u32,
    /// Log form.
    pub log_json: bool,
    /// Log filter directives.
    pub log_filter: String,
    /// Where traces go; none where nobody collects them.
    pub traces: Option<TraceConfig>,
}

/// A device that computes, and holds the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The processor.
    Cpu,
    /// A GPU where one can be used, else the processor.
    Auto,
    /// This GPU or nothing.
    Cuda(GpuName),
}

/// Tenants that may use the daemon.
#[derive(Clone, Debug)]
pub enum AllowedNamespaces {
    /// Any well-formed name.
    Any,
    /// Only these.
    Only(BTreeSet<Namespace>),
}

impl AllowedNamespaces {
    /// Whether requests of `namespace` are served.
    #[must_use]
    pub fn allow_namespace(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Any => true,
            Self::Only(names) => names.contains(namespace),
        }
    }
}

impl Config {
    /// Defaults, then `overrides` in their order of precedence.
    ///
    /// # Errors
    /// Names the key that is unknown, malformed or out of range.
    pub fn load(overrides: &ConfigOverrides) -> Result<Self, ConfigError> {
        Self::validate_raw(&RawConfig::load(overrides)?)
    }

    fn validate_raw(raw: &RawConfig) -> Result<Self, ConfigError> {
        let (server, limits, device) = (&raw.server, &raw.limits, &raw.device);
        let (interval, timeout) = (server.keepalive_interval_ms, server.keepalive_timeout_ms);
        let calibration = limits.calibration_bytes_max;
        let streams = server.streams_per_connection_max;
        let config = Self {
            listen_tcp: parse_address("server.listen_tcp", &server.listen_tcp)?,
            listen_unix: socket_path(&server.listen_unix),
            listen_region: socket_path(&server.listen_region),
            access: AccessConfig::validate_raw(server, &raw.admin, &raw.access)?,
            admin_listen: parse_address("admin.listen", &raw.admin.listen)?,
            admin_connections_max: to_permits("admin.connections_max", raw.admin.connections_max)?,
            admin_head_timeout: to_millis("admin.head_timeout_ms", raw.admin.head_timeout_ms)?,
            message_bytes_max: message_bytes(server.message_bytes_max)?,
            stream_window_bytes: stream_window(server.stream_window_bytes)?,
            connection_window_bytes: to_window(
                "server.connection_window_bytes",
                server.connection_window_bytes,
            )?,
            keepalive_interval: to_millis("server.keepalive_interval_ms", interval)?,
            keepalive_timeout: to_millis("server.keepalive_timeout_ms", timeout)?,
            streams_per_connection_max: at_least("server.streams_per_connection_max", streams, 1)?,
            connections_max: parse_connections(&server.connections_max)?,
            message_timeout: to_millis("server.message_timeout_ms", server.message_timeout_ms)?,
            grace_period: Duration::from_millis(server.grace_period_ms),
            devices: parse_devices(&device.device)?,
            pool_bytes: at_least("device.pool_bytes", device.pool_bytes.as_u64(), 1 << 20)?,
            pool_slots_max: device.pool_slots_max,
            table_bytes: at_least("device.table_bytes", device.table_bytes.as_u64(), 1 << 20)?,
            prefault: device.prefault,
            threads: at_most("device.threads", device.threads, CpuOptions::THREADS_MAX)?,
            pin_threads: device.pin_threads,
            precision: parse_precision(&device.precision)?,
            kernel_cache: kernel_cache(&device.kernel_cache, |name| std::env::var_os(name)),
            graphs_max: device.graphs_max,
            kernel_timeout: to_millis("device.kernel_timeout_ms", device.kernel_timeout_ms)?,
            queue_jobs_max: queue_jobs(device.queue_jobs_max)?,
            merging: merge_limits(device)?,
            models_max: at_least("limits.models_max", limits.models_max, 1)?,
            sequences_max: at_least("limits.sequences_max", limits.sequences_max, 1)?,
            sessions_max: at_least("limits.sessions_max", limits.sessions_max, 1)?,
            session_ttl_max: Duration::from_millis(limits.session_ttl_ms_max.into()),
            tokens_per_sequence_max: sequence_tokens(limits.tokens_per_sequence_max)?,
            sequence_layers_max: sequence_layers(limits.sequence_layers_max)?,
            sequence_views_max: sequence_views(limits.sequence_views_max)?,
            calibration_bytes_max: to_size("limits.calibration_bytes_max", calibration)?,
            calibration_rows_bytes_max: limits.calibration_rows_bytes_max.as_u64(),
            query_sample_bytes_max: limits.query_sample_bytes_max.as_u64(),
            inflight_bytes_max: to_size("limits.inflight_bytes_max", limits.inflight_bytes_max)?,
            connection_bytes_max: limits.connection_bytes_max.as_u64() as usize,
            namespace_bytes_max: limits.namespace_bytes_max.as_u64() as usize,
            regions_max: to_permits("limits.regions_max", limits.regions_max)?,
            region_bytes_max: to_size("limits.region_bytes_max", limits.region_bytes_max)? as u64,
            rings: RingConfig::validate_raw(raw)?,
            attend_parts_max: at_least("limits.attend_parts_max", limits.attend_parts_max, 1)?,
            attend_work_max: at_least("limits.attend_work_max", limits.attend_work_max, 1)?,
            step_rows_max: at_least("limits.step_rows_max", limits.step_rows_max, 1)?,
            page_tokens_min: page_tokens("limits.page_tokens_min", limits.page_tokens_min)?,
            cache: CacheConfig::validate_raw(&raw.cache)?,
            namespaces: namespaces::parse_namespaces(&raw.namespaces.allowed)?,
            weights: namespaces::parse_weights(&raw.namespaces.weights)?,
            quotas: QuotaConfig::validate_raw(&raw.namespaces)?,
            block_tokens_default: page_tokens("defaults.block_tokens", raw.defaults.block_tokens)?,
            log_json: log_json(&raw.log.format)?,
            log_filter: log_filter::log_filter(&raw.log.filter)?,
            traces: TraceConfig::validate_raw(&raw.traces)?,
        };
        config.complete_fields()
    }

    /// Checks and chooses what depends on several fields.
    fn complete_fields(mut self) -> Result<Self, ConfigError> {
        self.check_listeners()?;
        self.choose_byte_shares();
        self.check_bytes()?;
        Ok(self)
    }

    fn check_listeners(&self) -> Result<(), ConfigError> {
        if self.listen_tcp.is_none() && self.listen_unix.is_none() {
            let reason = "set this or server.listen_unix: nobody could reach the daemon";
            return Err(ConfigError::new("server.listen_tcp", reason));
        }
        check_socket_paths(self.listen_unix.as_deref(), self.listen_region.as_deref())?;
        self.access.check_doors(self.listen_tcp, self.admin_listen)
    }

    /// Shares of all, where none is given, that the largest request fits.
    fn choose_byte_shares(&mut self) {
        let (all, least) = (self.inflight_bytes_max, self.largest_request_bytes() as usize);
        let (connection, namespace) = (all / 4, all - all / 8);
        for (bytes, share) in [
            (&mut self.connection_bytes_max, connection),
            (&mut self.namespace_bytes_max, namespace),
        ] {
            *bytes = if *bytes == 0 { share.max(least) } else { *bytes };
        }
    }

    /// Bytes that one attend can take: its message, its answer and its plan.
    fn largest_request_bytes(&self) -> u64 {
        let plan_bytes = self.attend_parts_max.saturating_mul(PART_BYTES);
        (self.message_bytes_max as u64).saturating_mul(2).saturating_add(plan_bytes)
    }

    /// Sizes that only make sense together.
    fn check_bytes(&self) -> Result<(), ConfigError> {
        let message = self.message_bytes_max;
        if self.calibration_bytes_max > message {
            let reason = format!(
                "{} is above server.message_bytes_max = {message}: such a calibration could not \
                 be sent",
                self.calibration_bytes_max
            );
            return Err(ConfigError::new("limits.calibration_bytes_max", reason));
        }
        // Else the largest request would be refused even by an idle daemon, to be tried again.
        let largest = self.largest_request_bytes();
        let budgets = [
            ("limits.inflight_bytes_max", self.inflight_bytes_max),
            ("limits.connection_bytes_max", self.connection_bytes_max),
            ("limits.namespace_bytes_max", self.namespace_bytes_max),
        ];
        if let Some((key, bytes)) = budgets.iter().find(|(_, bytes)| (*bytes as u64) < largest) {
            let reason = format!(
                "{bytes} is below {largest}, which one attend can take: twice \
                 server.message_bytes_max and {PART_BYTES} bytes for each of \
                 limits.attend_parts_max"
            );
            return Err(ConfigError::new(*key, reason));
        }
        Ok(())
    }
}

/// A socket's path; an empty text is none.
fn socket_path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

fn at_least<T: PartialOrd + std::fmt::Display>(
    key: &'static str,
    value: T,
    min: T,
) -> Result<T, ConfigError> {
    if value < min {
        return Err(ConfigError::new(key, format!("{value} is below the minimum {min}")));
    }
    Ok(value)
}

fn at_most(key: &'static str, value: usize, max: usize) -> Result<usize, ConfigError> {
    if value > max {
        return Err(ConfigError::new(key, format!("{value} is above the maximum {max}")));
    }
    Ok(value)
}

/// A length of time that is waited again and again, so never none.
fn to_millis(key: &'static str, value: u64) -> Result<Duration, ConfigError> {
    Ok(Duration::from_millis(at_least(key, value, 1)?))
}

/// A number of things that take one permit each.
fn to_permits(key: &'static str, value: usize) -> Result<usize, ConfigError> {
    at_least(key, at_most(key, value, tokio::sync::Semaphore::MAX_PERMITS)?, 1)
}

/// Connections, unless the daemon shall find out.
fn parse_connections(count: &CountSetting) -> Result<Option<usize>, ConfigError> {
    let key = "server.connections_max";
    match count {
        CountSetting::Number(number) => to_permits(key, *number).map(Some),
        CountSetting::Word(word) if word == "auto" => Ok(None),
        CountSetting::Word(word) => {
            Err(ConfigError::new(key, format!("{word:?} is neither a number from 1 nor \"auto\"")))
        }
    }
}

/// The queue is allocated whole, and each job waits for all before it.
fn queue_jobs(value: usize) -> Result<usize, ConfigError> {
    const MAX: usize = 1 << 16;
    let key = "device.queue_jobs_max";
    at_least(key, at_most(key, value, MAX)?, 1)
}

/// An attend that waits for others waits no longer than for a slice of another's.
fn merge_limits(device: &raw::DeviceSettings) -> Result<MergeLimits, ConfigError> {
    const WAIT_MAX: usize = 100_000;
    let attends_max = at_most("device.merged_attends_max", device.merged_attends_max, 1 << 10)?;
    let attends_max = at_least("device.merged_attends_max", attends_max, 1)?;
    let wait = at_most("device.merge_wait_us", device.merge_wait_us, WAIT_MAX)?;
    Ok(MergeLimits { attends_max, wait: Duration::from_micros(wait as u64) })
}

/// A message's length has four bytes in gRPC's frame.
fn message_bytes(value: SizeSetting) -> Result<usize, ConfigError> {
    let key = "server.message_bytes_max";
    at_most(key, to_size(key, value)?, u32::MAX as usize)
}

fn to_size(key: &'static str, value: SizeSetting) -> Result<usize, ConfigError> {
    let bytes = usize::try_from(value.as_u64()).unwrap_or(usize::MAX);
    at_least(key, bytes, 4096)
}

fn sequence_layers(value: u64) -> Result<u64, ConfigError> {
    at_least("limits.sequence_layers_max", value, 1)
}

fn sequence_views(value: u64) -> Result<u64, ConfigError> {
    at_least("limits.sequence_views_max", value, 1)
}

fn sequence_tokens(value: u32) -> Result<u32, ConfigError> {
    at_least("limits.tokens_per_sequence_max", value, 1)
}

fn stream_window(value: SizeSetting) -> Result<u32, ConfigError> {
    to_window("server.stream_window_bytes", value)
}

/// HTTP/2 windows are 31-bit (RFC 9113, section 6.9.1).
fn to_window(key: &'static str, value: SizeSetting) -> Result<u32, ConfigError> {
    match u32::try_from(value.as_u64()) {
        Ok(bytes) if (65_535..1 << 31).contains(&bytes) => Ok(bytes),
        _ => Err(ConfigError::new(key, format!("{value} is not 64 KiB to 2 GiB"))),
    }
}

fn page_tokens(key: &'static str, value: u32) -> Result<u32, ConfigError> {
    let max = kvd_core::Geometry::BLOCK_TOKENS_MAX;
    if value == 0 || value > max {
        let reason = format!("{value} is not 1 to {max}");
        return Err(ConfigError::new(key, reason));
    }
    Ok(value)
}

fn log_json(format: &str) -> Result<bool, ConfigError> {
    match format {
        "text" => Ok(false),
        "json" => Ok(true),
        _ => Err(ConfigError::new("log.format", format!("{format:?} is not text or json"))),
    }
}

fn parse_precision(text: &str) -> Result<Precision, ConfigError> {
    Precision::ALL.into_iter().find(|precision| precision.name() == text).ok_or_else(|| {
        ConfigError::new("device.precision", format!("{text:?} is not fast, single or int8"))
    })
}

#[cfg(test)]
mod tests;
