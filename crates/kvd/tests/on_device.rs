//! The daemon as a process on a device, held against one on the processor through the same calls.
//! `KVD_GPU_DAEMON` names a program with kernels in it, which serves from the first GPU (`xtask gpu
//! run`); without it the program that was built here serves from the processor.
#![cfg(target_os = "linux")]

#[path = "serve/process.rs"]
#[expect(dead_code, reason = "each test file uses its part")]
mod process;

use kvd_client::{
    AttendLayout, Attended, Client, DType, ModelId, RegionClient, RegionDevice, RegionKind,
    RegionOptions, RegionSlice, SequenceId, StoreChunk,
};
use kvd_compute::RegionHandle;
use kvd_testkit::calls::{CallShape, MOST_APART, get_page, largest_distance, read_floats};
use kvd_testkit::gpu_worker::{MemoryKind, WorkerProcess};
use process::Process;
use std::path::Path;
use std::time::{Duration, Instant};

/// A layer of Llama-3.1-8B: kernels with the shapes of presets are for such heads.
const SHAPE: CallShape =
    CallShape { kv_heads: 8, q_heads: 32, dim: 128, block_tokens: 64, dtype: DType::F16 };
/// None needs a calibration.
const CODECS: [&str; 6] =
    ["raw", "fp8", "kivi-4; recent=32", "kvcomp-channel; recent=32", "kvcomp; recent=32", "kivi-2"];
/// Over the ends of blocks and of the window.
const STORED: [u32; 5] = [1, 63, 50, 148, 40];
/// Where payloads begin, behind the completion records.
const PAYLOADS: u64 = 1024;
/// Room for payloads of a few tokens.
const REGION_BYTES: u64 = 256 << 10;
/// Stores that are timed, behind one that is not.
const TIMED: u32 = 7;
/// Room for all of them.
const POOL: &str = "device.pool_bytes=256 MiB";
/// Where the times go, as `xtask gpu run` reads them.
const TIMES: &str = "KVD_GPU_STORES";

/// How long a daemon may take to be ready, where the step that runs this says nothing else.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// How long the step may take, seconds, which ends this then: a driver that compiles the kernels
/// itself, for a later GPU than they were made for, does so for minutes at the first start.
const STEP_SECONDS: &str = "KVD_GPU_STEP_SECONDS";

/// `cuda:0` where a program for it is named.
fn device() -> &'static str {
    if std::env::var_os("KVD_GPU_DAEMON").is_some() { "cuda:0" } else { "cpu" }
}

/// A daemon on a device, and its client.
async fn start(device: &str, flags: &[&str]) -> (Process, Client) {
    let device = format!("device.device={device}");
    let flags = [&["--set", &device, "--set", "device.precision=single"], flags].concat();
    let daemon = Process::start(&flags);
    let began = Instant::now();
    let seconds = std::env::var(STEP_SECONDS).ok().and_then(|seconds| seconds.parse().ok());
    let within = seconds.map_or(READY_WITHIN, Duration::from_secs);
    while get_page(daemon.admin(), "/readyz").0 != 200 {
        assert!(began.elapsed() < within, "{device} does not become ready");
        std::thread::sleep(Duration::from_millis(5));
    }
    let client = daemon.client().await;
    (daemon, client)
}

/// Registers a model and opens a sequence of it.
async fn open(client: &Client, codec: &str) -> (ModelId, SequenceId) {
    let name = codec.split(';').next().expect("a preset");
    let model = client.register_model(SHAPE.model_spec(name, codec)).await.expect("register").model;
    (model, client.open_sequence(model).await.expect("open"))
}

async fn ask(client: &Client, (model, sequence): (ModelId, SequenceId)) -> Attended {
    client.attend_batch(SHAPE.attend_batch(model, &[sequence])).await.expect("attend")
}

/// The sum of a metric's samples that have a label.
fn metric(page: &str, name: &str, label: &str) -> f64 {
    let is_sample = |line: &&str| line.starts_with(name) && line.contains(label);
    let values = page.lines().filter(is_sample).filter_map(|line| line.rsplit(' ').next());
    values.map(|value| value.parse::<f64>().expect("a number")).sum()
}

/// Ends a daemon as a supervisor does.
fn stop(daemon: Process) {
    daemon.signal("TERM");
    let ended = daemon.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("\"drained\":\"Clean\""), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_on_a_device_holds_and_answers_what_one_on_the_processor_does() {
    let ((daemon, client), (other, reference)) =
        (start(device(), &[]).await, start("cpu", &[]).await);
    let mut farthest = 0f32;
    for codec in CODECS {
        let (mine, theirs) = (open(&client, codec).await, open(&reference, codec).await);
        let mut length = 0;
        for tokens in STORED {
            for (client, (_, sequence)) in [(&client, mine), (&reference, theirs)] {
                let stored =
                    client.store_chunk(SHAPE.store_chunk(sequence, 1, length, tokens)).await;
                assert_eq!(stored.expect("store").length, length + tokens);
            }
            length += tokens;
            let right = ask(&reference, theirs).await;
            // Launched kernel by kernel, made a graph, launched as one.
            for _ in 0..3 {
                let apart = largest_distance(&ask(&client, mine).await, &right);
                assert!(apart < MOST_APART, "{codec}, {length} tokens: {apart:.1e}");
                farthest = farthest.max(apart);
            }
        }
        let [rows, right] = [(&client, mine.1), (&reference, theirs.1)]
            .map(|(client, sequence)| client.load_rows(CallShape::load_range(sequence, length)));
        assert!(rows.await.expect("load") == right.await.expect("load"), "{codec}: rows differ");
    }
    let (_, page) = get_page(daemon.admin(), "/metrics");
    let calls = (CODECS.len() * STORED.len()) as f64;
    assert_eq!(metric(&page, "kvd_ready", ""), 1.0, "{page}");
    assert_eq!(metric(&page, "kvd_attended_layer_query_tokens_total", ""), 3.0 * calls, "{page}");
    let [kernels, graphs] =
        ["how=\"kernel\"", "how=\"graph\""].map(|how| metric(&page, "kvd_gpu_launches_total", how));
    let on_gpu = device() != "cpu";
    assert_eq!([kernels > 0.0, graphs > 0.0], [on_gpu; 2], "{kernels} kernels, {graphs} graphs");
    let device = if on_gpu { "device=\"cuda:0 (" } else { "device=\"cpu (" };
    assert_eq!(metric(&page, "kvd_build_info", device), 1.0, "{page}");
    drop((client, reference));
    stop(daemon);
    stop(other);
    println!(
        "{device}: {calls} contexts of {CODECS:?}, answers {farthest:.1e} apart at most (of \
         {MOST_APART:.1e}), {kernels} kernels and {graphs} graphs launched"
    );
}

/// Memory of a region's payloads: a worker's memory of a GPU, or the region's own.
struct Payloads {
    region: RegionClient,
    worker: Option<WorkerProcess>,
}

impl Payloads {
    fn open(socket: &Path, bytes: u64) -> Self {
        let options = RegionOptions::default().with_bytes(bytes);
        if device() == "cpu" {
            return Self {
                region: RegionClient::open_region(socket, &options).expect("a region"),
                worker: None,
            };
        }
        let (worker, handle, bytes) = WorkerProcess::start_with(MemoryKind::Ipc, Some(bytes));
        let RegionHandle::CudaIpc(handle) = handle else { panic!("not the handle of {handle:?}") };
        let options = options.with_device(RegionDevice::CudaIpc(handle), bytes);
        let region = RegionClient::open_region(socket, &options).expect("a region");
        let opened = (region.kind(), region.fallback_reason(), region.copy_reason());
        assert_eq!(opened, (RegionKind::CudaIpc, "", ""));
        Self { region, worker: Some(worker) }
    }

    fn write(&mut self, to: RegionSlice, bytes: &[u8]) {
        match &mut self.worker {
            Some(worker) => worker.write_memory(to.offset, bytes),
            None => self.region.memory().write_bytes(to.offset, bytes).expect("inside"),
        }
    }

    fn read(&mut self, from: RegionSlice) -> Vec<u8> {
        if let Some(worker) = &mut self.worker {
            return worker.read_memory(from.offset, from.bytes);
        }
        let mut bytes = vec![0; from.bytes as usize];
        self.region.memory().read_bytes(from.offset, &mut bytes).expect("inside");
        bytes
    }

    /// Writes a chunk's rows to where a store finds them.
    fn place(&mut self, chunk: &StoreChunk) -> [RegionSlice; 2] {
        let bytes = chunk.k.len() as u64;
        let places = [0, bytes].map(|at| RegionSlice { offset: PAYLOADS + at, bytes });
        self.write(places[0], &chunk.k);
        self.write(places[1], &chunk.v);
        places
    }

    fn send(&self, chunk: StoreChunk, places: [RegionSlice; 2]) -> u32 {
        self.region.send_store(chunk, 0, places).expect("send");
        self.region.wait_call(0).expect("store")[0]
    }

    fn store(&mut self, chunk: StoreChunk) -> u32 {
        let places = self.place(&chunk);
        self.send(chunk, places)
    }

    fn attend(&mut self, batch: kvd_client::AttendBatch) -> Attended {
        let mut at = AttendLayout::pack_from(PAYLOADS, &batch, [SHAPE.dim; 2]);
        at.done = 0;
        self.write(at.q, &batch.q);
        self.region.send_attend(batch, at).expect("send");
        self.region.wait_call(0).expect("attend");
        let lse = read_floats(&self.read(at.lse));
        Attended { out: self.read(at.out).into(), lse, query_errors: Vec::new() }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_a_daemon_on_a_device_stores_and_attends_in_shared_memory() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("region");
    let listen = format!("server.listen_region={}", socket.display());
    let (daemon, client) = start(device(), &["--set", &listen]).await;
    let (model, sequence) = open(&client, CODECS[2]).await;
    let (_, other) = open(&client, CODECS[2]).await;
    let mut payloads = tokio::task::block_in_place(|| Payloads::open(&socket, REGION_BYTES));
    // As many tokens as the memory has room for at once.
    for start in (0..160).step_by(16) {
        client.store_chunk(SHAPE.store_chunk(other, 5, start, 16)).await.expect("store");
        let chunk = SHAPE.store_chunk(sequence, 5, start, 16);
        assert_eq!(tokio::task::block_in_place(|| payloads.store(chunk)), start + 16);
    }
    let [rows, right] =
        [sequence, other].map(|of| client.load_rows(CallShape::load_range(of, 160)));
    assert!(rows.await.expect("load") == right.await.expect("load"));
    let right = ask(&client, (model, sequence)).await;
    for _ in 0..3 {
        let batch = SHAPE.attend_batch(model, &[sequence]);
        let apart =
            largest_distance(&tokio::task::block_in_place(|| payloads.attend(batch)), &right);
        assert!(apart < MOST_APART, "{apart:.1e}");
    }
    let (_, page) = get_page(daemon.admin(), "/metrics");
    let of = |label| metric(&page, "kvd_region_calls_total", label);
    let place =
        if payloads.worker.is_some() { "payloads=\"in_place\"" } else { "payloads=\"file\"" };
    assert_eq!((of(place), of("")), (13.0, 13.0), "{page}");
    let Payloads { region, worker } = payloads;
    drop((region, client));
    if let Some(worker) = worker {
        worker.end_process();
    }
    stop(daemon);
}

/// Seconds of each store of so many tokens of one sequence, of the same rows, from the call to the
/// answer; and the bytes of those rows.
fn time_stores(payloads: &mut Payloads, sequence: SequenceId, tokens: u32) -> (Vec<f64>, u64) {
    let mut chunk = SHAPE.store_chunk(sequence, 5, 0, tokens);
    let places = payloads.place(&chunk);
    // They are in the region.
    (chunk.k, chunk.v) = Default::default();
    let mut seconds = Vec::new();
    for turn in 0..=TIMED {
        let next = StoreChunk { start: turn * tokens, ..chunk.clone() };
        let begun = Instant::now();
        let length = payloads.send(next, places);
        seconds.push(begun.elapsed().as_secs_f64());
        assert_eq!(length, (turn + 1) * tokens);
    }
    // Whatever is made at the first.
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    (seconds, places.iter().map(|place| place.bytes).sum())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_of_a_worker_are_timed_from_call_to_answer() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("region");
    let listen = format!("server.listen_region={}", socket.display());
    let (daemon, client) = start(device(), &["--set", &listen, "--set", POOL]).await;
    let (_, sequence) = open(&client, "kivi-4").await;
    // A prefill; on the processor only so much that every step is taken.
    let tokens = if device() == "cpu" { 128 } else { 4096 };
    let room = PAYLOADS + u64::from(2 * tokens * SHAPE.kv_heads * SHAPE.dim * 2);
    let mut payloads = tokio::task::block_in_place(|| Payloads::open(&socket, room));
    let (seconds, bytes) =
        tokio::task::block_in_place(|| time_stores(&mut payloads, sequence, tokens));
    let rows_in = if payloads.worker.is_some() { "memory of the GPU" } else { "shared memory" };
    let row = serde_json::json!({
        "codec": "kivi-4", "rows_in": rows_in, "f16_bytes": bytes,
        "seconds": { "median": seconds[seconds.len() / 2], "best": seconds[0] },
    });
    println!("{}: stores of {tokens} tokens: {row}", device());
    if let Some(path) = std::env::var_os(TIMES) {
        std::fs::write(path, format!("[{row}]\n")).expect("write the times");
    }
    let Payloads { region, worker } = payloads;
    drop((region, client));
    if let Some(worker) = worker {
        worker.end_process();
    }
    stop(daemon);
}
