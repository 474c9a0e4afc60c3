//! Workers with sequences of a common prefix, each on a connection, that ask one daemon at once.

use crate::attend::read_floats;
use crate::data::{NormalValues, fit_calibration_bytes};
use crate::measure::measure_time;
use crate::shared::{SharedBench, SharedRow, check_difference, compare_outputs};
use crate::ways::{BenchedDaemon, DaemonStarter};
use crate::{BenchError, limits};
use kvd_client::{AttendBatch, AttendQuery, Client, Endpoint, ModelSpec, StoreChunk};
use kvd_core::{DType, LayerIndex, ModelId, SequenceId};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Tokens of one store.
const STORE_TOKENS: u32 = 1024;
const LAYER: LayerIndex = LayerIndex(0);

/// Options of the workers of `kvd bench shared`.
#[derive(Clone, Debug)]
pub struct SharedWorkers {
    /// Heads, codecs, tokens, turns.
    pub bench: SharedBench,
    /// Workers, each with a sequence.
    pub workers: usize,
    /// Calls of a worker in a turn.
    pub calls: usize,
    /// `device.merge_wait_us` of the daemon.
    pub merge_wait_us: u64,
}

/// A worker: its connection, and what it asks.
#[derive(Clone)]
struct PrefixWorker {
    client: Client,
    batch: AttendBatch,
}

/// Processor time of turns, in milliseconds a call of all workers, and the outputs of each worker.
struct WorkedTurns {
    ms: Vec<f64>,
    outputs: Vec<Vec<f64>>,
}

impl SharedWorkers {
    /// Measures workers against a daemon that merges no attends, and one that does.
    ///
    /// # Errors
    /// When the daemon cannot start or refuses a codec, or answers differ.
    pub fn measure_workers(&self, start: DaemonStarter) -> Result<Vec<SharedRow>, BenchError> {
        limits::check_threads(self.bench.threads)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(BenchError::failed_step("runtime"))?;
        let mut rows = Vec::new();
        for codec in &self.bench.codecs {
            let turns = |merged| self.work_turns(&runtime, start, codec, merged);
            let (apart, shared) = (turns(1)?, turns(self.workers)?);
            let gaps = apart.outputs.iter().zip(&shared.outputs);
            let difference = gaps.map(|(a, b)| compare_outputs(a, b)).fold(0f64, f64::max);
            check_difference(codec, difference)?;
            let asked = format!("{} workers", self.workers);
            let times = [apart.ms, shared.ms];
            rows.push(SharedRow::new(asked, codec, self.bench.prefix, times, difference));
        }
        Ok(rows)
    }

    /// Turns against a daemon that merges so many attends.
    fn work_turns(
        &self,
        runtime: &Runtime,
        start: DaemonStarter,
        codec: &str,
        merged: usize,
    ) -> Result<WorkedTurns, BenchError> {
        let geometry = self.bench.shape.layer_geometry(self.bench.block_tokens);
        let tokens = self.bench.prefix + self.bench.own * self.workers as u32;
        // Raw rows and their pages may be there at once.
        let pool_bytes = 2 * geometry.raw_layout(tokens).size_bytes() + (64 << 20);
        limits::check_memory(codec, 1, pool_bytes)?;
        let settings = [
            ("server.listen_tcp", "127.0.0.1:0".to_owned()),
            ("server.listen_unix", String::new()),
            ("server.listen_region", String::new()),
            ("admin.listen", String::new()),
            ("device.threads", self.bench.threads.to_string()),
            ("device.pool_bytes", pool_bytes.to_string()),
            ("device.merged_attends_max", merged.to_string()),
            ("device.merge_wait_us", self.merge_wait_us.to_string()),
        ];
        let settings = settings.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let running = start(runtime, settings)?;
        let turns = self.run_turns(runtime, &*running, codec);
        running.drain_daemon(runtime);
        turns
    }

    fn run_turns(
        &self,
        runtime: &Runtime,
        running: &dyn BenchedDaemon,
        codec: &str,
    ) -> Result<WorkedTurns, BenchError> {
        let workers = runtime.block_on(self.open_workers(running, codec))?;
        let mut turns = WorkedTurns { ms: Vec::new(), outputs: Vec::new() };
        for round in 0..=self.bench.rounds {
            let timed = measure_time(|| runtime.block_on(self.run_turn(&workers)));
            turns.outputs = timed.value?;
            // The first turn warms up.
            if round > 0 {
                turns.ms.push(timed.cpu_ns / 1e6 / self.calls as f64);
            }
        }
        Ok(turns)
    }

    /// Lets all workers make their calls; the last outputs of each.
    async fn run_turn(&self, workers: &[PrefixWorker]) -> Result<Vec<Vec<f64>>, BenchError> {
        let mut tasks = JoinSet::new();
        for (number, worker) in workers.iter().cloned().enumerate() {
            let calls = self.calls;
            tasks.spawn(async move {
                let mut outputs = Vec::new();
                for _ in 0..calls {
                    let answer = worker.client.attend_batch(worker.batch.clone()).await;
                    outputs = read_floats(&answer.map_err(BenchError::failed_step("attend"))?.out);
                }
                Ok::<_, BenchError>((number, outputs))
            });
        }
        let mut outputs = vec![Vec::new(); workers.len()];
        while let Some(done) = tasks.join_next().await {
            let (number, of_worker) = done.map_err(BenchError::failed_step("worker"))??;
            outputs[number] = of_worker;
        }
        Ok(outputs)
    }

    /// Stores the prefix, and opens a fork of it for each worker, with tokens of its own.
    async fn open_workers(
        &self,
        running: &dyn BenchedDaemon,
        codec: &str,
    ) -> Result<Vec<PrefixWorker>, BenchError> {
        let failed = BenchError::failed_step;
        let client = connect_client(running).await?;
        let geometry = self.bench.shape.layer_geometry(self.bench.block_tokens);
        let calibration = fit_calibration_bytes(&geometry, codec)?.into();
        let (name, codec_text) = ("bench".to_owned(), codec.to_owned());
        let spec = ModelSpec { name, geometry, codec: codec_text, calibration };
        let model = client.register_model(spec).await.map_err(BenchError::codec_error(codec))?;
        let model = model.model;
        let prefix = client.open_sequence(model).await.map_err(failed("open"))?;
        self.store_rows(&client, prefix, 0..self.bench.prefix).await?;
        let mut workers = Vec::new();
        for number in 0..self.workers {
            let client = connect_client(running).await?;
            let fork = client.fork_sequence(prefix, None).await.map_err(failed("fork"))?;
            let end = self.bench.prefix + self.bench.own;
            self.store_rows(&client, fork.sequence, self.bench.prefix..end).await?;
            let batch = self.ask_query(model, fork.sequence, number as u64);
            workers.push(PrefixWorker { client, batch });
        }
        Ok(workers)
    }

    async fn store_rows(
        &self,
        client: &Client,
        sequence: SequenceId,
        tokens: std::ops::Range<u32>,
    ) -> Result<(), BenchError> {
        let shape = self.bench.shape;
        let mut normal = NormalValues::new(3);
        for start in tokens.clone().step_by(STORE_TOKENS as usize) {
            let count = STORE_TOKENS.min(tokens.end - start);
            let heads = count as usize * shape.kv_heads as usize;
            let k = normal.draw_bytes(heads * shape.head_dim_k as usize, 1.0);
            let v = normal.draw_bytes(heads * shape.head_dim_v as usize, 1.0);
            let chunk = StoreChunk { sequence, layer: LAYER, start, tokens: count, k, v };
            client.store_chunk(chunk).await.map_err(BenchError::failed_step("store"))?;
        }
        Ok(())
    }

    fn ask_query(&self, model: ModelId, sequence: SequenceId, seed: u64) -> AttendBatch {
        let shape = self.bench.shape;
        let q_heads = shape.kv_heads * shape.group;
        let mut normal = NormalValues::new(50 + seed);
        let values = (0..q_heads * shape.head_dim_k).map(|_| normal.draw_value());
        let q: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        AttendBatch {
            model,
            layer: LAYER,
            q_heads,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(sequence, 1)],
            q: q.into(),
            per_query_errors: false,
        }
    }
}

async fn connect_client(running: &dyn BenchedDaemon) -> Result<Client, BenchError> {
    let failed = BenchError::failed_step::<kvd_client::ClientError>;
    let address = running.tcp_address().map(|address| format!("http://{address}"));
    let endpoint = address.unwrap_or_default().parse::<Endpoint>();
    let endpoint = endpoint.map_err(BenchError::failed_step("connect"))?;
    Client::connect(endpoint).await.map_err(failed("connect"))
}
