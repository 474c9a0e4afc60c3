//! One attend from a client to a daemon in this process and back, by every transport: what the way
//! costs beside the work. Calls follow one another, as layers of a decode step do.

use crate::beside::{BackgroundStores, WriterLoad};
use crate::data::NormalValues;
use crate::limits::CallSize;
use crate::measure::{BenchResult, MachineInfo, MeasuredFigure, measure_time};
use crate::ways::{BenchedDaemon, CallSite, DaemonStarter, EchoPlan, TransportWay};
use crate::{BenchError, HeadShape, limits};
use kvd_client::{
    AttendBatch, AttendQuery, AttendRing, Client, Endpoint, ModelSpec, RegionClient, RegionOptions,
    RingOptions, StoreChunk,
};
use kvd_core::{DType, LayerIndex, ModelId, ProgressLines, SequenceId};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Tokens of one store.
const STORE_TOKENS: u32 = 1024;
/// Memory of the region.
const REGION_BYTES: u64 = 16 << 20;

/// Options of `kvd bench transport`.
#[derive(Clone, Debug)]
pub struct TransportBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs, that need no calibration.
    pub codecs: Vec<String>,
    /// Stored tokens.
    pub contexts: Vec<u32>,
    /// Query tokens of a call.
    pub query_tokens: Vec<u32>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Turns of each transport.
    pub rounds: usize,
    /// Calls of a turn.
    pub calls: usize,
    /// Writers that store all the while.
    pub storing: usize,
    /// Tokens that one of them stores at a time.
    pub storing_tokens: u32,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct TransportRow {
    /// The way.
    pub transport: &'static str,
    /// The codec.
    pub codec: String,
    /// Stored tokens.
    pub context: u32,
    /// Query tokens.
    pub query_tokens: u32,
    /// Wall time of a call, microseconds.
    pub wall_us: MeasuredFigure,
    /// Ninety-nine of a hundred calls took no more wall time, microseconds.
    pub slow_us: f64,
    /// Processor time of a call, client and daemon, microseconds; with that of stores beside it.
    pub cpu_us: MeasuredFigure,
    /// Tokens that were stored beside it, a second.
    pub stored_tokens_per_s: f64,
    /// Time of the device's backend in it, microseconds; 0 where it is no attend.
    pub device_us: f64,
}

/// Ways: see [`TransportWay`].
const WAYS: usize = 7;

/// Times of the turns of one way.
#[derive(Clone, Default)]
struct WayTimes {
    wall: Vec<f64>,
    cpu: Vec<f64>,
    /// Wall time of each call.
    calls: Vec<f64>,
    stored: Vec<f64>,
    /// Device time of each call.
    device: Vec<f64>,
}

/// A call's answer and its wall time.
struct TimedCall {
    answer: Option<kvd_client::Attended>,
    /// Microseconds.
    us: f64,
}

/// A daemon in this process, and what tells of progress.
struct BenchDaemon<'a> {
    runtime: &'a Runtime,
    running: Box<dyn BenchedDaemon>,
    sockets: SocketFolder,
    progress: ProgressLines,
}

/// Calls that are measured by every way, and the stores beside them.
struct TransportCase<'a> {
    codec: &'a str,
    context: u32,
    batch: &'a AttendBatch,
    beside: &'a BackgroundStores,
}

/// A directory for the sockets, removed in the end.
struct SocketFolder(PathBuf);

impl Drop for SocketFolder {
    fn drop(&mut self) {
        // A directory of the system's temporary place that stays is no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl SocketFolder {
    fn new() -> Result<Self, BenchError> {
        let path = std::env::temp_dir().join(format!("kvd-bench-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(BenchError::failed_step("sockets"))?;
        Ok(Self(path))
    }

    fn socket_path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl TransportBench {
    /// Measures every transport to a daemon that `start` starts.
    ///
    /// # Errors
    /// When the daemon cannot start, or refuses a codec.
    pub fn measure_all(
        &self,
        start: DaemonStarter,
    ) -> Result<BenchResult<TransportRow>, BenchError> {
        for query_tokens in self.query_tokens.iter().copied().map(u64::from) {
            for tokens in self.contexts.iter().copied().map(u64::from) {
                limits::check_call(&self.shape, CallSize { query_tokens, tokens, batch: 1 })?;
            }
        }
        let token_bytes = self.shape.layer_geometry(1).raw_layout(1).size_bytes();
        limits::check_memory("what writers store", u64::from(self.storing_tokens), token_bytes)?;
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench transport", 0);
        let machine = MachineInfo::inspect_machine(2);
        let failed = BenchError::failed_step("runtime");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let sockets = SocketFolder::new()?;
        let running = start(&runtime, daemon_settings(&sockets))?;
        let mut rows = Vec::new();
        let measured = self.codecs.len() * self.contexts.len() * self.query_tokens.len();
        let turns = measured * (self.rounds + 1) * WAYS;
        progress.begin_task("bench transport", (turns * self.calls) as u64);
        let daemon = BenchDaemon { runtime: &runtime, running, sockets, progress };
        for codec in &self.codecs {
            rows.extend(self.measure_codec(&daemon, codec)?);
        }
        daemon.running.drain_daemon(&runtime);
        Ok(BenchResult { machine, rows })
    }

    fn measure_codec(
        &self,
        daemon: &BenchDaemon<'_>,
        codec: &str,
    ) -> Result<Vec<TransportRow>, BenchError> {
        let runtime = daemon.runtime;
        let mut ways = runtime.block_on(open_ways(&*daemon.running, &daemon.sockets))?;
        let client = runtime.block_on(connect_client(unix_endpoint(&daemon.sockets)))?;
        let spec = ModelSpec {
            name: "bench".to_owned(),
            geometry: self.shape.layer_geometry(self.block_tokens),
            codec: codec.to_owned(),
            calibration: bytes::Bytes::new(),
        };
        let model = runtime
            .block_on(client.register_model(spec))
            .map_err(BenchError::codec_error(codec))?;
        let (model, shape) = (model.model, self.shape);
        let (writers, tokens) = (self.storing, self.storing_tokens);
        let load = WriterLoad { model, shape, writers, tokens };
        let mut rows = Vec::new();
        for &context in &self.contexts {
            daemon.progress.name_step("bench transport", &format!("{codec}, {context} tokens"));
            let stored = self.store_context(&client, model, context);
            let sequence = runtime.block_on(stored)?;
            for n_q in &self.query_tokens {
                let batch = self.build_batch(model, sequence, *n_q);
                // A connection of their own, so that calls wait for the device alone.
                let client = runtime.block_on(connect_client(unix_endpoint(&daemon.sockets)))?;
                let beside = BackgroundStores::start_writers(runtime, &client, load);
                let case = TransportCase { codec, context, batch: &batch, beside: &beside };
                let answer_bytes = batch.q.len() / self.shape.head_dim_k as usize
                    * self.shape.head_dim_v as usize
                    + 4 * batch.q_heads as usize * *n_q as usize;
                let socket = daemon.sockets.socket_path("echo");
                let _ = std::fs::remove_file(&socket);
                let plan = EchoPlan { socket: &socket, answer_bytes };
                ways[0] = TransportWay::Echo(daemon.running.open_echo(runtime, plan)?);
                let measured = self.measure_ways(daemon, &mut ways, &case);
                beside.stop_writers(runtime)?;
                rows.extend(measured?);
            }
            let closed = runtime.block_on(client.close_sequence(sequence));
            closed.map_err(BenchError::failed_step("close"))?;
        }
        let gone = runtime.block_on(client.unregister_model(model));
        gone.map_err(BenchError::failed_step("unregister"))?;
        Ok(rows)
    }

    async fn store_context(
        &self,
        client: &Client,
        model: ModelId,
        context: u32,
    ) -> Result<SequenceId, BenchError> {
        let failed = || BenchError::failed_step("store");
        let sequence = client.open_sequence(model).await.map_err(failed())?;
        let mut normal = NormalValues::new(3);
        for start in (0..context).step_by(STORE_TOKENS as usize) {
            let tokens = STORE_TOKENS.min(context - start);
            let heads = tokens as usize * self.shape.kv_heads as usize;
            let k = normal.draw_bytes(heads * self.shape.head_dim_k as usize, 1.0);
            let v = normal.draw_bytes(heads * self.shape.head_dim_v as usize, 1.0);
            let layer = LayerIndex(0);
            let chunk = StoreChunk { sequence, layer, start, tokens, k, v };
            client.store_chunk(chunk).await.map_err(failed())?;
        }
        Ok(sequence)
    }

    fn build_batch(&self, model: ModelId, sequence: SequenceId, n_q: u32) -> AttendBatch {
        let q_heads = self.shape.kv_heads * self.shape.group;
        let values = n_q as usize * q_heads as usize * self.shape.head_dim_k as usize;
        AttendBatch {
            model,
            layer: LayerIndex(0),
            q_heads,
            dtype: DType::F16,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(sequence, n_q)],
            q: NormalValues::new(5).draw_bytes(values, 1.0),
            per_query_errors: false,
        }
    }

    /// Turns of every way, which must all answer the same.
    fn measure_ways(
        &self,
        daemon: &BenchDaemon<'_>,
        ways: &mut [TransportWay],
        case: &TransportCase<'_>,
    ) -> Result<Vec<TransportRow>, BenchError> {
        let (batch, beside) = (case.batch, case.beside);
        let dims = [self.shape.head_dim_k, self.shape.head_dim_v];
        let site = CallSite { runtime: daemon.runtime, daemon: &*daemon.running, dims };
        let mut times = vec![WayTimes::default(); ways.len()];
        let right = ways[1].attend_once(site, batch)?;
        for round in 0..=self.rounds {
            for (way, times) in ways.iter_mut().zip(&mut times) {
                let (before, clock) = (beside.stored_tokens(), daemon.running.device_clock());
                let timed = measure_time(|| {
                    let call = |_| {
                        let timed = measure_time(|| way.attend_once(site, batch));
                        Ok(TimedCall { answer: timed.value?, us: timed.wall_ns / 1e3 })
                    };
                    (0..self.calls).map(call).collect::<Result<Vec<_>, BenchError>>()
                });
                let stored = (beside.stored_tokens() - before) as f64 / timed.wall_ns * 1e9;
                let calls = timed.value?;
                daemon.progress.add_steps(self.calls as u64);
                let answers = || calls.iter().filter(|call| call.answer.is_some());
                if answers().any(|call| call.answer != right) {
                    let reason = "does not answer as the others do".to_owned();
                    return Err(BenchError::Failed { what: way.way_name().to_owned(), reason });
                }
                if round > 0 {
                    let each = self.calls as f64 * 1e3;
                    times.wall.push(timed.wall_ns / each);
                    times.cpu.push(timed.cpu_ns / each);
                    times.calls.extend(calls.iter().map(|call| call.us));
                    times.stored.push(stored);
                    let after = daemon.running.device_clock();
                    let served = (after.calls - clock.calls).max(1.0);
                    times.device.push((after.seconds - clock.seconds) * 1e6 / served);
                }
            }
        }
        let rows = ways.iter().zip(times).map(|(way, mut times)| {
            times.calls.sort_by(f64::total_cmp);
            TransportRow {
                transport: way.way_name(),
                codec: case.codec.to_owned(),
                context: case.context,
                query_tokens: batch.query_rows(),
                wall_us: MeasuredFigure::from_runs(times.wall),
                slow_us: times.calls[(times.calls.len() - 1) * 99 / 100],
                cpu_us: MeasuredFigure::from_runs(times.cpu),
                stored_tokens_per_s: MeasuredFigure::from_runs(times.stored).median,
                device_us: MeasuredFigure::from_runs(times.device).median,
            }
        });
        Ok(rows.collect())
    }
}

/// Settings of a daemon on sockets of its own.
fn daemon_settings(sockets: &SocketFolder) -> Vec<(String, String)> {
    let text = |path: &Path| path.display().to_string();
    let settings = [
        ("server.listen_tcp", "127.0.0.1:0".to_owned()),
        ("server.listen_unix", text(&sockets.socket_path("grpc"))),
        ("server.listen_region", text(&sockets.socket_path("region"))),
        ("admin.listen", String::new()),
        ("device.threads", "1".to_owned()),
    ];
    settings.map(|(key, value)| (key.to_owned(), value)).to_vec()
}

async fn connect_client(text: String) -> Result<Client, BenchError> {
    let endpoint = text.parse::<Endpoint>().map_err(BenchError::failed_step("connect"))?;
    Client::connect(endpoint).await.map_err(BenchError::failed_step("connect"))
}

fn unix_endpoint(sockets: &SocketFolder) -> String {
    format!("unix:{}", sockets.socket_path("grpc").display())
}

/// Every way to it; in place of the bare server, which is of one case, the way without one.
async fn open_ways(
    running: &dyn BenchedDaemon,
    sockets: &SocketFolder,
) -> Result<Vec<TransportWay>, BenchError> {
    let failed = || BenchError::failed_step("connect");
    let mut ways = vec![TransportWay::Inside];
    let unix = connect_client(unix_endpoint(sockets)).await?;
    let stream = unix.attend_stream(1).await.map_err(failed())?;
    ways.extend([TransportWay::Unary("unix", unix), TransportWay::Stream(stream)]);
    if let Some(address) = running.tcp_address() {
        ways.push(TransportWay::Unary("tcp", connect_client(format!("http://{address}")).await?));
    }
    let options = RegionOptions::default().with_bytes(REGION_BYTES);
    let path = sockets.socket_path("region");
    let opened = tokio::task::block_in_place(|| {
        let region = RegionClient::open_region(&path, &options)?;
        let of_ring = Arc::new(RegionClient::open_region(&path, &options)?);
        Ok((region, AttendRing::open_ring(of_ring, RingOptions::default())?))
    });
    let (region, ring) =
        opened.map_err(BenchError::failed_step::<kvd_client::ClientError>("region"))?;
    ways.extend([TransportWay::Region(region), TransportWay::Ring(Box::new(ring))]);
    ways.push(TransportWay::Inside);
    Ok(ways)
}
