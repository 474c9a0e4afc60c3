//! The daemon over the CUDA backend, whose kernels run on the CPU, with the processor's lane beside
//! it: clients over gRPC, a worker over the region socket, and a GPU that is lost.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test may fail, and says a skip")]

#[path = "common/driver.rs"]
mod driver;
#[path = "common/streams.rs"]
mod streams;
#[path = "daemon/worker.rs"]
mod worker;

use driver::{EmuDriver, Fail, Watch};
use kvd::config::ConfigOverrides;
use kvd::{Config, DrainOutcome, RunningDaemon};
use kvd_client::{
    AttendBatch, Attended, Client, ClientError, DType, ErrorCode, LoadedRows, ModelId, SequenceId,
    StoreChunk,
};
use kvd_compute::{Backend, CpuBackend, CpuOptions, Precision};
use kvd_cuda::{CudaBackend, CudaOptions};
use kvd_emu::{ThreadOrder, is_available, is_sanitized};
use kvd_testkit::calls::{CallShape, MOST_APART, get_page, largest_distance, read_floats};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use streams::Pace;
use tokio::task::block_in_place;

const SHAPE: CallShape =
    CallShape { kv_heads: 2, q_heads: 4, dim: 64, block_tokens: 16, dtype: DType::F32 };
/// Each lane's.
const POOL_BYTES: u64 = 1 << 20;
/// The made-up GPU has done its work when it is asked, but for one that hangs.
const KERNEL_TIMEOUT: Duration = Duration::from_millis(20);
/// Blocks are encoded long before a test ends.
const CODECS: [&str; 2] = ["kivi-4; recent=32", "kvcomp"];

/// A daemon whose first lane is the made-up GPU and whose second is the processor.
struct Daemon {
    running: RunningDaemon,
    client: Client,
    watch: Arc<Mutex<Watch>>,
    dir: tempfile::TempDir,
}

/// A model or a sequence on both lanes: the GPU's, the processor's.
type Both<T> = [T; 2];

impl Daemon {
    /// `None` where it cannot be tested, which is said.
    async fn start(pace: Pace) -> Option<Self> {
        Self::start_with(pace, 8 << 20).await
    }

    /// A daemon with so much of the GPU's memory for tables of layers.
    async fn start_with(pace: Pace, table_bytes: u64) -> Option<Self> {
        if !is_available() {
            return None;
        }
        if is_sanitized("thread") {
            // It sees the daemon's copies and not the daemon's locks.
            eprintln!("SKIP emu: ThreadSanitizer was not built into the daemon");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let flags = [
            ("server.listen_tcp", "127.0.0.1:0".to_owned()),
            ("server.listen_region", dir.path().join("region").display().to_string()),
            ("admin.listen", "127.0.0.1:0".to_owned()),
            // Blocks of few tokens are soon full.
            ("limits.page_tokens_min", "1".to_owned()),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let config =
            Config::load(&ConfigOverrides { file: None, environment: false, flags }).unwrap();
        let (driver, watch) = EmuDriver::new(ThreadOrder::Random(7), pace);
        let options = CudaOptions {
            arena_bytes: POOL_BYTES,
            scratch_bytes: 1 << 20,
            table_bytes,
            staging_bytes: 64 << 10,
            threads: 1,
            graphs: 4,
            kernel_timeout: KERNEL_TIMEOUT,
        };
        let gpu = CudaBackend::open_backend(Box::new(driver), &[b"kernels"], options).unwrap();
        let options = CpuOptions { arena_bytes: POOL_BYTES, prefault: false, threads: 1 };
        let mut cpu = CpuBackend::new(options).unwrap();
        cpu.set_precision(Precision::Single);
        let lanes: Vec<Box<dyn Backend>> = vec![Box::new(gpu), Box::new(cpu)];
        let running = kvd::Daemon::build_on(config, lanes).await.unwrap().spawn();
        let endpoint =
            format!("http://{}", running.bound_addresses().tcp.unwrap()).parse().unwrap();
        let client = Client::connect(endpoint).await.unwrap();
        Some(Self { running, client, watch, dir })
    }

    /// A model goes to the lane with the fewest that works.
    async fn model(&self, name: &str, codec: &str) -> ModelId {
        self.client.register_model(SHAPE.model_spec(name, codec)).await.unwrap().model
    }

    async fn models(&self, codec: &str) -> Both<ModelId> {
        let preset = codec.split(';').next().unwrap();
        let (gpu, cpu) = (format!("{preset}.gpu"), format!("{preset}.cpu"));
        [self.model(&gpu, codec).await, self.model(&cpu, codec).await]
    }

    async fn open(&self, models: Both<ModelId>) -> Both<SequenceId> {
        let [gpu, cpu] = models.map(|model| self.client.open_sequence(model));
        [gpu.await.unwrap(), cpu.await.unwrap()]
    }

    async fn fork(&self, of: Both<SequenceId>, length: u32) -> Both<SequenceId> {
        let [gpu, cpu] = of.map(|sequence| self.client.fork_sequence(sequence, Some(length)));
        [gpu.await.unwrap().sequence, cpu.await.unwrap().sequence]
    }

    async fn close(&self, sequences: Both<SequenceId>) {
        for sequence in sequences {
            self.client.close_sequence(sequence).await.unwrap();
        }
    }

    /// Appends rows to both.
    async fn grow(&self, to: Both<SequenceId>, seed: u32, start: u32, tokens: u32) {
        for sequence in to {
            let stored = self
                .client
                .store_chunk(SHAPE.store_chunk(sequence, seed, start, tokens))
                .await
                .unwrap();
            assert_eq!(stored.length, start + tokens);
        }
    }

    async fn attend(
        &self,
        model: ModelId,
        sequences: &[SequenceId],
    ) -> Result<Attended, ClientError> {
        self.client.attend_batch(SHAPE.attend_batch(model, sequences)).await
    }

    async fn load(&self, sequence: SequenceId, end: u32) -> Result<LoadedRows, ClientError> {
        self.client.load_rows(CallShape::load_range(sequence, end)).await
    }

    /// Tests that both lanes hold the same and answer the same, of all sequences in one batch.
    async fn assert_same(&self, models: Both<ModelId>, all: &[(Both<SequenceId>, u32)], of: &str) {
        for ([gpu, cpu], length) in all {
            let rows = self.load(*gpu, *length).await.unwrap();
            assert_eq!(rows.k.len() as u32, length * SHAPE.kv_heads * SHAPE.dim * 4, "{of}");
            assert!(rows == self.load(*cpu, *length).await.unwrap(), "{of}: rows of {length}");
        }
        let lane = |index: usize| all.iter().map(|(both, _)| both[index]).collect::<Vec<_>>();
        let gpu = self.attend(models[0], &lane(0)).await.unwrap();
        let cpu = self.attend(models[1], &lane(1)).await.unwrap();
        let apart = largest_distance(&gpu, &cpu);
        assert!(apart < MOST_APART, "{of}: {apart:.1e}");
    }

    /// `GET /readyz` of the admin port: status and text.
    fn readyz(&self) -> (u16, String) {
        let address = self.running.admin_address().unwrap().to_string();
        block_in_place(|| get_page(&address, "/readyz"))
    }

    fn used_bytes(&self) -> u64 {
        self.running.service().pool_stats().used_bytes
    }

    /// Stops it; nothing that its driver gave is left.
    async fn stop(self) {
        drop(self.client);
        assert_eq!(self.running.drain().await, DrainOutcome::Clean);
        let watch = self.watch.lock();
        assert_eq!((watch.live, watch.calls_after_failure), (0, 0), "{watch:?}");
        assert_eq!(watch.complaints, Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_worker_holds_and_answers_what_the_processors_does() {
    for (codec, pace) in CODECS.into_iter().flat_map(|codec| Pace::EACH.map(|pace| (codec, pace))) {
        let Some(daemon) = Daemon::start(pace).await else { return };
        let models = daemon.models(codec).await;
        let parent = daemon.open(models).await;
        let mut length = 0;
        // Over the ends of blocks and of the window.
        for tokens in [1, 15, 7, 50, 48, 40] {
            daemon.grow(parent, 1, length, tokens).await;
            length += tokens;
        }
        daemon.assert_same(models, &[(parent, length)], codec).await;
        // Blocks that two sequences share exist once, until the sequences diverge.
        let before = daemon.used_bytes();
        let (half, whole) = (daemon.fork(parent, 75).await, daemon.fork(parent, length).await);
        assert_eq!(daemon.used_bytes(), before, "{codec}: a fork takes no memory");
        daemon.grow(half, 2, 75, 30).await;
        daemon.grow(whole, 3, length, 9).await;
        daemon.grow(parent, 4, length, 20).await;
        let all = [(parent, length + 20), (half, 105), (whole, length + 9)];
        daemon.assert_same(models, &all, codec).await;
        // And is there as long as one of them needs it.
        let right = daemon.load(half[0], 105).await.unwrap();
        daemon.close(parent).await;
        daemon.close(whole).await;
        assert_eq!(daemon.load(half[0], 105).await.unwrap(), right);
        daemon.assert_same(models, &[(half, 105)], codec).await;
        daemon.close(half).await;
        assert_eq!((daemon.used_bytes(), daemon.running.service().pool_stats().slots), (0, 0));
        let kernels = std::mem::take(&mut daemon.watch.lock().kernels);
        for kind in ["kvd_attend_", "kvd_store_", "kvd_merge"] {
            assert!(kernels.iter().any(|name| name.starts_with(kind)), "{codec}: {kernels:?}");
        }
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_closed_sequences_serves_others_when_a_gpus_pool_is_full() {
    let Some(daemon) = Daemon::start(Pace::Late).await else { return };
    let model = daemon.model("gpu", CODECS[0]).await;
    let mut stored = Vec::new();
    let refused = loop {
        let sequence = daemon.client.open_sequence(model).await.unwrap();
        let seed = stored.len() as u32;
        match daemon.client.store_chunk(SHAPE.store_chunk(sequence, seed, 0, 100)).await {
            Ok(_) => stored.push(sequence),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code, Some(ErrorCode::PoolFull), "{refused}");
    assert!(stored.len() > 4, "{} sequences", stored.len());
    let (first, rest) = (stored[0], &stored[1..]);
    let before = daemon.load(first, 100).await.unwrap();
    let mut others = Vec::new();
    for sequence in rest {
        others.push(daemon.load(*sequence, 100).await.unwrap());
    }
    daemon.client.close_sequence(first).await.unwrap();
    let again = daemon.client.open_sequence(model).await.unwrap();
    daemon.client.store_chunk(SHAPE.store_chunk(again, 0, 0, 100)).await.unwrap();
    assert_eq!(daemon.load(again, 100).await.unwrap(), before);
    for (sequence, rows) in rest.iter().zip(others) {
        assert_eq!(daemon.load(*sequence, 100).await.unwrap(), rows);
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_whose_tables_have_no_room_on_a_gpu_is_refused_when_it_is_registered() {
    let Some(daemon) = Daemon::start_with(Pace::Late, 24 << 10).await else { return };
    let refused =
        daemon.client.register_model(SHAPE.model_spec("large", "kvcomp")).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::LimitExceeded), "{refused}");
    assert!(refused.message.contains("raise device.table_bytes"), "{refused}");
    assert_eq!(daemon.client.list_models().await.unwrap().len(), 0);
    // A smaller one is served there.
    let model = daemon.model("small", CODECS[0]).await;
    let sequence = daemon.client.open_sequence(model).await.unwrap();
    daemon.client.store_chunk(SHAPE.store_chunk(sequence, 9, 0, 90)).await.unwrap();
    daemon.attend(model, &[sequence]).await.unwrap();
    assert!(!daemon.watch.lock().kernels.is_empty());
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_lost_gpu_fail_with_its_name_and_the_other_device_lives() {
    let fails = [Fail::Launch, Fail::Write, Fail::Later, Fail::Hang, Fail::Hang];
    for (fail, pace) in fails.into_iter().zip(Pace::EACH.into_iter().cycle()) {
        let Some(daemon) = Daemon::start(pace).await else { return };
        let models = daemon.models(CODECS[0]).await;
        let both = daemon.open(models).await;
        daemon.grow(both, 6, 0, 90).await;
        let right = daemon.attend(models[1], &both[1..]).await.unwrap();
        assert_eq!(daemon.readyz(), (200, "ready\n".to_owned()));
        daemon.watch.lock().fail = fail;
        // One meets the error, the others wait behind it.
        let calls = [0; 4].map(|_| {
            let (client, batch) =
                (daemon.client.clone(), SHAPE.attend_batch(models[0], &both[..1]));
            tokio::spawn(async move { client.attend_batch(batch).await })
        });
        for call in calls {
            let refused = call.await.unwrap().unwrap_err();
            assert_eq!(refused.code, Some(ErrorCode::DeviceFailed), "{fail:?}: {refused}");
            assert!(refused.message.contains("must be started again"), "{refused}");
        }
        while !daemon.running.service().first_worker().has_failed() {
            tokio::task::yield_now().await;
        }
        assert_eq!(daemon.readyz(), (503, "failed: cuda emulation\n".to_owned()));
        let stored =
            daemon.client.store_chunk(SHAPE.store_chunk(both[0], 6, 90, 10)).await.map(drop);
        let loaded = daemon.load(both[0], 90).await.map(drop);
        for result in [stored, loaded] {
            assert_eq!(result.unwrap_err().code, Some(ErrorCode::DeviceFailed), "{fail:?}");
        }
        let known = daemon.client.describe_sequence(both[0]).await.unwrap();
        assert_eq!(known.length, 90, "{fail:?}: a store that failed left something");
        // The processor's lane, for its model and for new ones.
        assert_eq!(daemon.attend(models[1], &both[1..]).await.unwrap(), right);
        daemon.client.store_chunk(SHAPE.store_chunk(both[1], 6, 90, 10)).await.unwrap();
        let next = daemon.model("next", CODECS[0]).await;
        let sequence = daemon.client.open_sequence(next).await.unwrap();
        daemon.client.store_chunk(SHAPE.store_chunk(sequence, 6, 0, 90)).await.unwrap();
        assert_eq!(daemon.attend(next, &[sequence]).await.unwrap(), right);
        let ends = tokio::time::timeout(Duration::from_millis(10), daemon.running.device_failed());
        assert!(ends.await.is_err(), "the daemon goes on");
        daemon.client.close_sequence(sequence).await.unwrap();
        daemon.close(both).await;
        assert_eq!(daemon.used_bytes(), 0, "{fail:?}");
        daemon.stop().await;
    }
}
