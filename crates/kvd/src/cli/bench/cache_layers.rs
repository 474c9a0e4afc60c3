//! `kvd bench cache --disk`: a daemon in this process publishes prefixes to disk and, started
//! again, brings them back, layer by layer and at once in turns.

use crate::config::{Config, ConfigOverrides};
use crate::daemon::{Daemon, RunningDaemon};
use crate::service::{CallContext, PrefixOpening, PublishMode, Service, ServiceError};
use kvd_bench::{BenchError, CacheRow};
use kvd_core::{DType, Geometry, LayerIndex, ModelId, Namespace, RopePairing};
use kvd_proto::domain::{BlockKeys, ModelIdentity, ModelSpec, StoreChunk};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// A model with 8 billion parameters.
const GEOMETRY: Geometry = Geometry {
    layers: 32,
    kv_heads: 8,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};
const BLOCKS: u32 = 32;
const KEY_BYTES: u32 = 32;
const CODEC: &str = "kivi-2";
const DURABLY: PublishMode = PublishMode { settles: false, waits_for_disk: true };

/// A daemon on a folder, and its model.
struct DiskDaemon {
    runtime: Runtime,
    daemon: RunningDaemon,
    model: ModelId,
    call: CallContext,
}

fn step_failed<E: std::fmt::Display>(step: &'static str) -> impl FnOnce(E) -> BenchError {
    BenchError::failed_step(step)
}

/// Keys of a prefix.
fn chain_keys(number: usize) -> BlockKeys {
    let key = |block: u32| {
        let mut key = [0; KEY_BYTES as usize];
        key[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
        key[8..12].copy_from_slice(&block.to_le_bytes());
        key
    };
    let keys: Vec<u8> = (0..BLOCKS).flat_map(key).collect();
    BlockKeys { keys: keys.into(), key_bytes: KEY_BYTES, key_tokens: GEOMETRY.block_tokens }
}

/// Rows of all heads of a layer, of noise.
fn noise_rows(layer: u32) -> Vec<u8> {
    let values = u64::from(BLOCKS * GEOMETRY.block_tokens) * 8 * 128;
    let value = |at: u64| {
        let bits = (at + u64::from(layer) * 104_729).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let values: Vec<f32> = (0..values).map(value).collect();
    let mut rows = vec![0; values.len() * 2];
    DType::F16.narrow_values(&values, &mut rows);
    rows
}

impl DiskDaemon {
    fn start_daemon(folder: &Path) -> Result<Self, BenchError> {
        let text = folder.display().to_string();
        let flags = [
            ("server.listen_tcp", "127.0.0.1:0"),
            ("server.listen_unix", ""),
            ("server.listen_region", ""),
            ("admin.listen", "127.0.0.1:0"),
            ("device.pool_bytes", "2 GiB"),
            ("cache.disk.path", &text),
            ("cache.disk.bytes", "8 GiB"),
            ("log.filter", "warn"),
        ];
        let flags = flags.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let overrides = ConfigOverrides { file: None, environment: false, flags };
        let config = Config::load(&overrides).map_err(step_failed("configuration"))?;
        let runtime = Runtime::new().map_err(step_failed("runtime"))?;
        let daemon = runtime.block_on(Daemon::build(config)).map_err(step_failed("daemon"))?;
        let daemon = {
            let _inside = runtime.enter();
            daemon.spawn()
        };
        let call = CallContext::new(Namespace::new("default").map_err(step_failed("namespace"))?);
        let spec = ModelSpec {
            name: "bench".to_owned(),
            geometry: GEOMETRY,
            codec: CODEC.to_owned(),
            calibration: Default::default(),
        };
        let weights = ModelIdentity { weights: "bench".into(), ..ModelIdentity::default() };
        let registered = daemon.service().register_identified(&call, spec, &weights);
        let model = runtime.block_on(registered).map_err(step_failed("model"))?.shape.id;
        Ok(Self { runtime, daemon, model, call })
    }

    fn called_service(&self) -> &Arc<Service> {
        self.daemon.service()
    }

    fn stop_daemon(self) {
        let Self { runtime, daemon, .. } = self;
        runtime.block_on(daemon.drain());
    }

    /// Stores a prefix and publishes it; how long the publish took until all was durable.
    fn publish_prefix(&self, number: usize) -> Result<Duration, BenchError> {
        let (service, call) = (self.called_service(), &self.call);
        let publish = async {
            let sequence = service.open_sequence(call, self.model)?;
            let tokens = BLOCKS * GEOMETRY.block_tokens;
            for layer in 0..GEOMETRY.layers {
                let k = bytes::Bytes::from(noise_rows(layer + number as u32));
                let (v, layer) = (k.clone(), LayerIndex(layer));
                let chunk = StoreChunk { sequence, layer, start: 0, tokens, k, v };
                service.store_chunk(call, chunk).await?;
            }
            let (keys, began) = (chain_keys(number), Instant::now());
            let done = service.publish_in_mode(call, sequence, 0, &keys, DURABLY).await?;
            let took = began.elapsed();
            service.close_sequence(call, sequence)?;
            Ok::<_, ServiceError>((done.durable_length == tokens).then_some(took))
        };
        let took = self.runtime.block_on(publish).map_err(step_failed("publish"))?;
        took.ok_or_else(|| step_failed("publish")("not all of it is durable"))
    }

    /// Opens on a prefix; when the first layers were there, and when all were.
    fn open_prefix(&self, number: usize, ready: u32) -> Result<OpenTimes, BenchError> {
        let (service, call) = (self.called_service(), &self.call);
        let prefix = chain_keys(number);
        let opening = PrefixOpening { model: self.model, session: None, prefix, lease: None };
        let open = async {
            let began = Instant::now();
            let opened = service.open_by_layers(call, &opening, ready).await?;
            let first = began.elapsed();
            service.wait_for_prefix(call, opened.opened.id).await;
            let times = OpenTimes { first, all: began.elapsed() };
            service.close_sequence(call, opened.opened.id)?;
            let is_whole = opened.opened.length == BLOCKS * GEOMETRY.block_tokens;
            Ok::<_, ServiceError>(is_whole.then_some(times))
        };
        let times = self.runtime.block_on(open).map_err(step_failed("open"))?;
        times.ok_or_else(|| step_failed("open")("some of it did not come back"))
    }
}

struct OpenTimes {
    first: Duration,
    all: Duration,
}

fn times_row(case: &str, mut times: Vec<Duration>) -> CacheRow {
    times.sort_unstable();
    let at = |part: usize| {
        let index = (times.len() * part / 100).min(times.len().saturating_sub(1));
        times.get(index).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    let (p50_us, p99_us) = (at(50), at(99));
    CacheRow { case: case.to_owned(), entries: BLOCKS as usize, p50_us, p99_us }
}

/// Publishes two prefixes a round to a folder of its own below this one, and brings them back after
/// a start in turns: one layer by layer, the other at once.
pub(super) fn measure_disk(folder: &Path, rounds: usize) -> Result<Vec<CacheRow>, BenchError> {
    let folder = folder.join(format!("kvd-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(step_failed("folder"))?;
    let rows = measure_in(&folder, rounds);
    std::fs::remove_dir_all(&folder).map_err(step_failed("folder"))?;
    rows
}

fn measure_in(folder: &Path, rounds: usize) -> Result<Vec<CacheRow>, BenchError> {
    let daemon = DiskDaemon::start_daemon(folder)?;
    let publish = |number| daemon.publish_prefix(number);
    let published = (0..2 * rounds).map(publish).collect::<Result<Vec<_>, _>>()?;
    daemon.stop_daemon();
    let daemon = DiskDaemon::start_daemon(folder)?;
    let (mut first, mut layered, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let by_layers = daemon.open_prefix(2 * round, 1)?;
        first.push(by_layers.first);
        layered.push(by_layers.all);
        whole.push(daemon.open_prefix(2 * round + 1, 0)?.all);
    }
    daemon.stop_daemon();
    Ok(vec![
        times_row("publish to durable", published),
        times_row("back from disk: first layer", first),
        times_row("back from disk: all layers, by layers", layered),
        times_row("back from disk: all layers at once", whole),
    ])
}
