//! Memory that workers share with the daemon: the same answers as through gRPC, refusals that name
//! what is wrong, and workers that die. A worker that dies is this test binary again.
#![cfg(target_os = "linux")]

use kvd_client::{
    AttendBatch, AttendLayout, Attended, ClientError, DType, ErrorCode, Namespace, RegionClient,
    RegionDevice, RegionKind, RegionOptions, RegionSlice, SequenceId,
};
use kvd_proto::v1;
use kvd_shm::RegionMemory;
use kvd_tests::daemon::DaemonPlan;
use kvd_tests::metrics::MetricsPage;
use kvd_tests::wait::eventually;
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestDaemon, TestEngine, TestRng, assert_refused, daemon,
    engine,
};
use prost::Message;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use tokio::sync::RwLock;

/// Tests share a process under `cargo test`: a test that counts its regions must be alone.
static REGIONS: RwLock<()> = RwLock::const_new(());

/// A daemon with a socket for regions, and the directory that it is in.
async fn start(
    change: impl FnOnce(DaemonPlan) -> DaemonPlan,
) -> (TestDaemon, tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvd.region");
    let plan = daemon().with_setting("server.listen_region", &path.display().to_string());
    (change(plan).start().await, dir, path)
}

/// An engine with a conversation of `tokens`.
async fn stored(
    daemon: &TestDaemon,
    codec: &str,
    tokens: u32,
    seed: u64,
) -> (TestEngine, StoredSequence) {
    let shape = ModelShape { group: 2, ..ModelShape::small_shape() };
    let engine = engine(daemon).with_name(&format!("m{seed}")).register_model(shape, codec).await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, tokens, &mut TestRng::new(seed)).await;
    (engine, conversation)
}

fn open(path: &Path) -> RegionClient {
    RegionClient::open_region(path, &RegionOptions::default().with_bytes(1 << 20))
        .expect("a region")
}

/// Calls that block, beside a daemon in this process.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

fn attend(
    region: &RegionClient,
    engine: &TestEngine,
    batch: AttendBatch,
) -> Result<Attended, ClientError> {
    let dims = [engine.shape.head_dim_k, engine.shape.head_dim_v];
    blocking(|| region.attend_once(batch, dims))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_answers_with_the_bytes_of_every_other_transport() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let region = blocking(|| open(&path));
    for (seed, codec) in (1..).zip(["raw", "kivi-4", "vecinfer-2", "kvcomp", "fp8"]) {
        let (engine, conversation) = stored(&daemon, codec, 300, seed).await;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for n_q in [1, 5] {
                let mut rng = TestRng::new(100 + seed);
                let question = engine.random_question(&conversation, n_q, &mut rng).in_dtype(dtype);
                let batch = engine.attend_batch(&question);
                let unary = engine.client.attend_batch(batch.clone()).await.expect("attend");
                let mut stream = engine.client.attend_stream(1).await.expect("a stream");
                let streamed = stream.attend_batch(batch.clone()).await.expect("attend");
                let shared = attend(&region, &engine, batch).expect("attend");
                assert_eq!(shared, unary, "{codec}, {dtype:?}, {n_q} tokens");
                assert_eq!(streamed, unary);
            }
        }
    }
    assert_eq!(region.boot_id(), engine_boot(&daemon).await);
}

async fn engine_boot(daemon: &TestDaemon) -> String {
    daemon.client().await.server_info().await.expect("server info").boot_id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_stored_through_a_region_are_the_rows_stored_through_grpc() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let region = blocking(|| open(&path));
    let shape = ModelShape::small_shape();
    let engine = engine(&daemon).register_model(shape.clone(), "kivi-2").await;
    let (one, mut other) = (engine.open_sequence().await, engine.open_sequence().await);
    let mut rng = TestRng::new(4);
    for start in [0, 150] {
        let rows = LayerRows::random_rows(&shape, 150, &mut rng);
        let chunk = engine.store_chunk(one.sequence, 0, start, &rows);
        let ack = blocking(|| region.store_once(chunk.clone())).expect("store");
        assert_eq!(ack, engine.store_rows(&mut other, 0, &rows).await.expect("store"));
        let again = blocking(|| region.store_once(chunk)).expect("a replay");
        assert!(again.replayed && again.length == ack.length, "{again:?}");
    }
    let mine = StoredSequence { sequence: one.sequence, layers: other.layers.clone() };
    assert_eq!(engine.load_layer(&mine, 0).await, engine.load_layer(&other, 0).await);
    let gap =
        engine.store_chunk(one.sequence, 0, 999, &LayerRows::random_rows(&shape, 1, &mut rng));
    assert_refused(blocking(|| region.store_once(gap)), ErrorCode::RangeGap, "999");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_outside_the_region_are_refused_and_it_goes_on() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "raw", 40, 1).await;
    let region = blocking(|| open(&path));
    let size = region.memory().size_bytes();
    let batch =
        engine.attend_batch(&engine.random_question(&conversation, 2, &mut TestRng::new(5)));
    let right = attend(&region, &engine, batch.clone()).expect("attend");
    let good = AttendLayout::pack_from(0, &batch, [64, 64]);
    let moved = |slice: RegionSlice, offset| RegionSlice { offset, ..slice };
    let cases = [
        ("inside", AttendLayout { q: moved(good.q, size - good.q.bytes + 1), ..good }),
        ("inside", AttendLayout { q: moved(good.q, u64::MAX - 7), ..good }),
        ("inside", AttendLayout { out: moved(good.out, size), ..good }),
        ("inside", AttendLayout { lse: moved(good.lse, u64::MAX), ..good }),
        ("inside", AttendLayout { q: RegionSlice { offset: 0, bytes: u64::MAX }, ..good }),
    ];
    for (says, places) in cases {
        let sent = region.send_attend(batch.clone(), places);
        let answer = sent.and_then(|()| blocking(|| region.wait_call(places.done)));
        assert_refused(answer, ErrorCode::InvalidArgument, says);
    }
    let lengths = [
        ("q has", AttendLayout { q: RegionSlice { bytes: 4, ..good.q }, ..good }),
        ("out has", AttendLayout { out: RegionSlice { bytes: 4, ..good.out }, ..good }),
        (
            "lse has",
            AttendLayout { lse: RegionSlice { bytes: good.lse.bytes + 4, ..good.lse }, ..good },
        ),
    ];
    for (says, places) in lengths {
        region.send_attend(batch.clone(), places).expect("send");
        let answer = blocking(|| region.wait_call(places.done));
        assert_refused(answer, ErrorCode::ShapeMismatch, says);
    }
    let mut unknown = batch.clone();
    unknown.queries[0].sequence = SequenceId(999);
    let answer = attend(&region, &engine, unknown);
    assert_refused(answer, ErrorCode::UnknownSequence, "999");
    assert_eq!(attend(&region, &engine, batch.clone()).expect("attend"), right);
    // A region is its connection's: gRPC has no way into it.
    let mut request = v1::AttendRequest::from(batch);
    request.q = Some(v1::Payload { source: Some(v1::payload::Source::Region(good.q)) });
    let refused = daemon.raw_client().await.attend(request).await.map(|_| ());
    assert_refused(refused.map_err(ClientError::from), ErrorCode::InvalidArgument, "q");
}

/// Sends a first message as a worker would that does not use the client.
fn hand_over(
    path: &Path,
    request: &v1::OpenRegionRequest,
    file: &[BorrowedFd<'_>],
) -> v1::OpenRegionResponse {
    let mut stream = UnixStream::connect(path).expect("connect");
    let mut bytes = (request.encoded_len() as u32).to_le_bytes().to_vec();
    bytes.extend(request.encode_to_vec());
    kvd_shm::send_files(&stream, &bytes, file).expect("send");
    answer(&mut stream)
}

/// The daemon's last word on a connection.
fn answer(stream: &mut UnixStream) -> v1::OpenRegionResponse {
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("a timeout");
    stream.read_to_end(&mut bytes).expect("the daemon hangs up");
    v1::OpenRegionResponse::decode(&bytes[4..]).expect("a response")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_a_region_is_refused_with_the_reason() {
    let _among_others = REGIONS.read().await;
    let (daemon, dir, path) = start(|plan| {
        plan.with_setting("limits.region_bytes_max", "1 MiB")
            .with_setting("limits.regions_max", "2")
    })
    .await;
    let ask = |bytes| v1::OpenRegionRequest { bytes, ..Default::default() };
    let says = |request: &v1::OpenRegionRequest, file: &[BorrowedFd<'_>]| {
        blocking(|| hand_over(&path, request, file)).refused
    };
    let memory = RegionMemory::create_memory(4096).expect("memory");
    let file = std::fs::File::create_new(dir.path().join("file")).expect("a file");
    file.set_len(4096).expect("a size");
    for (refused, wanted) in [
        (says(&ask(4096), &[]), "INVALID_ARGUMENT: the first byte of the message carries no"),
        (says(&ask(4096), &[file.as_fd()]), "INVALID_ARGUMENT: the file can shrink"),
        (says(&ask(4097), &[memory.file()]), "INVALID_ARGUMENT: the file has 4096 bytes"),
        (says(&ask(0), &[memory.file()]), "INVALID_ARGUMENT: bytes is 0"),
        (says(&ask(2 << 20), &[memory.file()]), "LIMIT_EXCEEDED: a region of 2097152 bytes"),
    ] {
        assert!(refused.starts_with(wanted), "{refused:?} is not {wanted:?}");
    }
    let other = Namespace::new("other").expect("a name");
    let options = RegionOptions::default().with_bytes(4096).with_namespace(&other);
    let denied = blocking(|| RegionClient::open_region(&path, &options));
    assert_refused(denied, ErrorCode::NamespaceDenied, "other");
    let mine = RegionOptions::default().with_bytes(4096);
    let two =
        [0, 1].map(|_| blocking(|| RegionClient::open_region(&path, &mine)).expect("a region"));
    let third = blocking(|| RegionClient::open_region(&path, &mine));
    assert_refused(third, ErrorCode::LimitExceeded, "limits.regions_max");
    // Peers over the limit are refused before they say anything.
    let mut silent = UnixStream::connect(&path).expect("connect");
    let refused = blocking(|| answer(&mut silent)).refused;
    assert!(refused.starts_with("LIMIT_EXCEEDED: 2 regions are open already"), "{refused}");
    drop(two);
    eventually("room again", async || blocking(|| RegionClient::open_region(&path, &mine)).is_ok())
        .await;
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_break_the_protocol_end_the_connection_alone() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "raw", 40, 1).await;
    let neighbour = blocking(|| open(&path));
    let memory = RegionMemory::create_memory(4096).expect("memory");
    let request = v1::OpenRegionRequest { bytes: 4096, ..Default::default() };
    let call = |done| v1::RegionCall { done, ..Default::default() }.encode_to_vec();
    let framed = |body: Vec<u8>| [(body.len() as u32).to_le_bytes().to_vec(), body].concat();
    for (bytes, wanted) in [
        (framed(call(4096 - 255)), "INVALID_ARGUMENT: bytes 3841..3841+256 are not inside"),
        (framed(call(6)), "INVALID_ARGUMENT: the word at 6 is not aligned"),
        (framed(vec![0xFF; 9]), "INVALID_ARGUMENT: region message"),
        (u32::MAX.to_le_bytes().to_vec(), "INVALID_ARGUMENT: region message: "),
    ] {
        let refused = blocking(|| {
            let mut stream = UnixStream::connect(&path).expect("connect");
            let first = framed(request.encode_to_vec());
            kvd_shm::send_files(&stream, &first, &[memory.file()]).expect("send");
            let mut head = [0; 4];
            stream.read_exact(&mut head).expect("a response");
            let mut opened = vec![0; u32::from_le_bytes(head) as usize];
            stream.read_exact(&mut opened).expect("a response");
            kvd_shm::send_files(&stream, &bytes, &[]).expect("send");
            answer(&mut stream).refused
        });
        assert!(refused.starts_with(wanted), "{refused:?} is not {wanted:?}");
    }
    let batch =
        engine.attend_batch(&engine.random_question(&conversation, 1, &mut TestRng::new(5)));
    attend(&neighbour, &engine, batch).expect("others live");
}

/// Mappings and descriptors of regions in this process.
fn held() -> [usize; 2] {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let files = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    let of_region = |text: &str| text.contains("kvd-region");
    let mapped = maps.lines().filter(|line| of_region(line)).count();
    [mapped, links.filter(|link| of_region(&link.to_string_lossy())).count()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed_leaves_nothing_and_others_live() {
    let _alone = REGIONS.write().await;
    eventually("other tests' regions are given back", async || held() == [0, 0]).await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 3000, 1).await;
    let survivor = blocking(|| open(&path));
    let before = held();
    assert_eq!(before, [2, 2], "the survivor's and the daemon's");
    let batch =
        engine.attend_batch(&engine.random_question(&conversation, 3, &mut TestRng::new(5)));
    let right = attend(&survivor, &engine, batch.clone()).expect("attend");
    for _ in 0..3 {
        let mut worker = Command::new(std::env::current_exe().expect("this test's own path"))
            .args(["--exact", "a_worker_process", "--ignored", "--nocapture"])
            .env("KVD_TEST_REGION", &path)
            .env("KVD_TEST_MODEL", engine.model.to_string())
            .env("KVD_TEST_SEQUENCE", conversation.sequence.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a worker");
        let lines = BufReader::new(worker.stdout.take().expect("its output")).lines();
        let busy = blocking(|| lines.map_while(Result::ok).any(|line| line.contains("busy")));
        assert!(busy, "the worker has calls under way");
        assert_eq!(held(), [3, 3]);
        worker.kill().expect("SIGKILL");
        worker.wait().expect("its end");
        eventually("the region is given back", async || held() == before).await;
        assert_eq!(attend(&survivor, &engine, batch.clone()).expect("attend"), right);
    }
    let page = MetricsPage::parse_page(&daemon.admin_page("/metrics").await.1);
    assert_eq!(page.sum_samples("kvd_regions", &[]), 1.0);
    assert_eq!(page.sum_samples("kvd_region_bytes", &[]), f64::from(1 << 20));
    assert!(page.sum_samples("kvd_requests_total", &["rpc=\"AttendRegion\""]) > 3.0);
    drop(survivor);
    eventually("nothing is held", async || held() == [0, 0]).await;
    engine.close_sequence(conversation).await;
    assert!(daemon.is_empty().await);
    daemon.assert_serves().await;
}

/// The worker of the test above: keeps calls under way until it is killed.
#[test]
#[ignore = "a role of another test"]
fn a_worker_process() {
    let get = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let region = open(Path::new(&get("KVD_TEST_REGION")));
    let sequence = SequenceId(get("KVD_TEST_SEQUENCE").parse().expect("an id"));
    let batch = AttendBatch {
        model: kvd_client::ModelId(get("KVD_TEST_MODEL").parse().expect("an id")),
        layer: kvd_client::LayerIndex(0),
        q_heads: 4,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![kvd_client::AttendQuery::new(sequence, 8)],
        q: vec![0; 8 * 4 * 64 * 4].into(),
        per_query_errors: false,
    };
    let (mut places, mut start) = (Vec::new(), 0);
    for _ in 0..40 {
        let at = AttendLayout::pack_from(start, &batch, [64, 64]);
        start = at.end();
        places.push(at);
    }
    loop {
        for at in &places {
            region.send_attend(batch.clone(), *at).expect("send");
        }
        println!("busy");
        for at in &places {
            region.wait_call(at.done).expect("an answer");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_with_many_calls_under_way_each_get_their_own_answers() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 200, 1).await;
    let mut rng = TestRng::new(9);
    let batches: Vec<_> = (0..12)
        .map(|_| engine.attend_batch(&engine.random_question(&conversation, 1, &mut rng)))
        .collect();
    let mut right = Vec::new();
    for batch in &batches {
        right.push(engine.client.attend_batch(batch.clone()).await.expect("attend"));
    }
    blocking(|| {
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (path, batches, right) = (&path, &batches, &right);
                scope.spawn(move || {
                    let region = open(path);
                    let mut places = Vec::new();
                    for batch in batches.iter().cycle().skip(worker).take(48) {
                        let start = places.last().map_or(0, AttendLayout::end);
                        let at = AttendLayout::pack_from(start, batch, [64, 64]);
                        region.memory().write_bytes(at.q.offset, &batch.q).expect("inside");
                        region.send_attend(batch.clone(), at).expect("send");
                        places.push(at);
                    }
                    for (at, right) in places.iter().zip(right.iter().cycle().skip(worker)) {
                        region.wait_call(at.done).expect("an answer");
                        let mut out = vec![0; at.out.bytes as usize];
                        region.memory().read_bytes(at.out.offset, &mut out).expect("inside");
                        assert_eq!(out, right.out);
                    }
                });
            }
        });
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cuda_memory_offered_to_the_processor_is_declined_with_the_reason() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "raw", 40, 1).await;
    let file = std::fs::File::open("/dev/null").expect("a descriptor");
    for device in [RegionDevice::CudaIpc([1; 64]), RegionDevice::CudaFd(Arc::new(file.into()))] {
        let options = RegionOptions::default().with_bytes(1 << 20).with_device(device, 1 << 21);
        let region = blocking(|| RegionClient::open_region(&path, &options)).expect("a region");
        assert_eq!(region.kind(), RegionKind::Memfd);
        assert_eq!(
            region.fallback_reason(),
            "the device is the processor: it opens no CUDA memory"
        );
        let batch =
            engine.attend_batch(&engine.random_question(&conversation, 1, &mut TestRng::new(5)));
        attend(&region, &engine, batch).expect("its own memory serves");
    }
    let page = MetricsPage::parse_page(&daemon.admin_page("/metrics").await.1);
    assert_eq!(page.sum_samples("kvd_region_calls_total", &["payloads=\"file\""]), 2.0);
    // A GPU by name is another matter: the worker counts on it.
    let device = RegionDevice::CudaIpc([1; 64]);
    let uuid = "GPU-11111111-1111-1111-1111-111111111111";
    let options = RegionOptions::default().with_bytes(4096).with_device(device, 4096);
    let refused = blocking(|| RegionClient::open_region(&path, &options.with_device_uuid(uuid)));
    assert_refused(refused, ErrorCode::InvalidArgument, "serves from no GPU");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_ends_is_told_to_its_workers() {
    let _among_others = REGIONS.read().await;
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "raw", 40, 1).await;
    let region = blocking(|| open(&path));
    let batch =
        engine.attend_batch(&engine.random_question(&conversation, 1, &mut TestRng::new(5)));
    daemon.stop_admitting();
    let late = attend(&region, &engine, batch.clone());
    assert_refused(late, ErrorCode::ShuttingDown, "drains");
    drop(engine);
    daemon.stop_daemon().await;
    let gone = blocking(|| region.attend_once(batch, [64, 64])).expect_err("nobody answers");
    assert_eq!((gone.code, gone.is_retryable()), (Some(ErrorCode::ShuttingDown), true), "{gone}");
    assert!(!path.exists(), "the socket's file is removed");
}
