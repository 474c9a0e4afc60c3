//! Attends by the ring of a region: the answers of the unary rpc, bit by bit; whatever a worker
//! writes there harms itself alone; who dies leaves nothing. A worker that dies is this test binary
//! again.
#![cfg(target_os = "linux")]

use kvd_client::{
    AttendBatch, AttendQuery, AttendRing, DType, ErrorCode, LayerIndex, ModelId, RegionClient,
    RegionOptions, RingLayout, RingOptions, RingRows, SequenceId,
};
use kvd_shm::ring::{RingAttend, RingQuery};
use kvd_tests::daemon::DaemonPlan;
use kvd_tests::metrics::MetricsPage;
use kvd_tests::wait::eventually;
use kvd_tests::{
    ModelShape, StoredSequence, TestDaemon, TestEngine, TestRng, assert_refused, daemon, engine,
};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DIMS: [u32; 2] = [64, 64];

async fn start(
    change: impl FnOnce(DaemonPlan) -> DaemonPlan,
) -> (TestDaemon, tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvd.region");
    let plan = daemon().with_setting("server.listen_region", &path.display().to_string());
    (change(plan).start().await, dir, path)
}

async fn stored(daemon: &TestDaemon, codec: &str, tokens: u32) -> (TestEngine, StoredSequence) {
    let shape = ModelShape { group: 2, ..ModelShape::small_shape() };
    let engine = engine(daemon).with_name(codec).register_model(shape, codec).await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, tokens, &mut TestRng::new(1)).await;
    (engine, conversation)
}

fn region_with(path: &Path, timeout: Duration) -> Arc<RegionClient> {
    let options = RegionOptions::default().with_bytes(1 << 20).with_timeout(timeout);
    Arc::new(RegionClient::open_region(path, &options).expect("a region"))
}

fn ring_with(path: &Path, options: RingOptions) -> AttendRing {
    let region = region_with(path, Duration::from_secs(20));
    AttendRing::open_ring(region, options).expect("a ring")
}

/// Calls that block, beside a daemon in this process.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

fn batch_of(engine: &TestEngine, conversation: &StoredSequence, n_q: u32) -> AttendBatch {
    engine.attend_batch(&engine.random_question(conversation, n_q, &mut TestRng::new(5)))
}

async fn regions(daemon: &TestDaemon) -> f64 {
    let page = MetricsPage::parse_page(&daemon.admin_page("/metrics").await.1);
    page.sum_samples("kvd_regions", &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_is_that_of_the_unary_rpc_while_numbers_wrap() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    // Few records, and numbers that pass 2^32.
    let options = RingOptions::default().with_entries(4).with_first(u32::MAX - 9);
    let mut ring = blocking(|| ring_with(&path, options));
    for codec in ["raw", "kivi-4", "kvcomp"] {
        let (engine, conversation) = stored(&daemon, codec, 300).await;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for n_q in [1, 5] {
                let mut rng = TestRng::new(100);
                let question = engine.random_question(&conversation, n_q, &mut rng).in_dtype(dtype);
                let plain = engine.attend_batch(&question);
                let mut capped = plain.clone();
                (capped.scale, capped.soft_cap) = (Some(0.25), Some(5.0));
                let mut windowed = plain.clone();
                let query = &mut windowed.queries[0];
                (query.kv_length, query.start, query.end) = (Some(290), Some(3), Some(280));
                (query.position, query.sliding_window) = (Some(200), Some(40));
                let mut bad = plain.clone();
                bad.per_query_errors = true;
                bad.queries.push(AttendQuery { sequence: SequenceId(7), ..bad.queries[0] });
                bad.q = [&bad.q[..], &bad.q[..]].concat().into();
                for batch in [plain, capped, windowed, bad] {
                    let unary = engine.client.attend_batch(batch.clone()).await.expect("attend");
                    let by_ring = blocking(|| ring.attend_once(&batch, DIMS)).expect("attend");
                    assert_eq!(by_ring, unary, "{codec}, {dtype:?}, {n_q} tokens");
                }
            }
        }
        // What a batch is refused for, it is refused for here.
        let unknown = AttendBatch { model: ModelId(9), ..batch_of(&engine, &conversation, 1) };
        let unary = engine.client.attend_batch(unknown.clone()).await.expect_err("no such model");
        let by_ring = blocking(|| ring.attend_once(&unknown, DIMS)).expect_err("no such model");
        assert_eq!((by_ring.code, &by_ring.message), (unary.code, &unary.message));
        assert_eq!(by_ring.restarted.is_some(), unary.restarted.is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_read_and_written_by_strides() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 100).await;
    let batch = batch_of(&engine, &conversation, 3);
    let right = engine.client.attend_batch(batch.clone()).await.expect("attend");
    let mut ring = blocking(|| ring_with(&path, RingOptions::default()));
    let row = 64 * batch.dtype.size_bytes() as u64;
    // Heads before tokens, with a gap behind each row.
    let rows = |offset| RingRows { offset, token_stride: row + 64, head_stride: 5 * (row + 64) };
    let at = RingLayout::pack_from(ring.free_from(), &batch, DIMS);
    let at = RingLayout { q: rows(1 << 18), out: rows(1 << 19), ..at };
    let place = |rows: RingRows, index: usize| {
        let (token, head) = (index as u64 / 4, index as u64 % 4);
        rows.offset + token * rows.token_stride + head * rows.head_stride
    };
    let memory = ring.shared_region().memory();
    for (index, values) in batch.q.chunks(row as usize).enumerate() {
        memory.write_bytes(place(at.q, index), values).expect("inside");
    }
    blocking(|| {
        ring.submit_attend(77, &batch, &at).expect("room");
        let reply = ring.wait_reply().expect("an end");
        assert_eq!((reply.tag, reply.result), (77, Ok(0)));
    });
    for (index, right) in right.out.chunks(row as usize).enumerate() {
        let mut values = vec![0; row as usize];
        ring.shared_region()
            .memory()
            .read_bytes(place(at.out, index), &mut values)
            .expect("inside");
        assert_eq!(values, right, "row {index}");
    }
    // A stride that leaves the region, and one that leaves 64 bits.
    for token_stride in [1 << 30, u64::MAX] {
        let out = RingRows { token_stride, ..at.out };
        ring.submit_attend(78, &batch, &RingLayout { out, ..at }).expect("room");
        let refused = blocking(|| ring.wait_reply()).expect("an end").result;
        assert_refused(refused, ErrorCode::InvalidArgument, "out: ");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_ring_refuses_and_a_worker_that_reads_no_ends_delays_no_other() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 100).await;
    let batch = batch_of(&engine, &conversation, 1);
    let mut lazy = blocking(|| ring_with(&path, RingOptions::default().with_entries(2)));
    let mut other = blocking(|| ring_with(&path, RingOptions::default()));
    let right = blocking(|| other.attend_once(&batch, DIMS)).expect("attend");
    let at = RingLayout::pack_from(lazy.free_from(), &batch, DIMS);
    lazy.shared_region().memory().write_bytes(at.q.offset, &batch.q).expect("inside");
    for round in 0..3 {
        lazy.submit_attend(2 * round, &batch, &at).expect("room");
        lazy.submit_attend(2 * round + 1, &batch, &at).expect("room");
        let full = lazy.submit_attend(99, &batch, &at);
        assert_refused(full, ErrorCode::QueueFull, "2 attends");
        assert_eq!(blocking(|| other.attend_once(&batch, DIMS)).expect("attend"), right);
        for tag in [2 * round, 2 * round + 1] {
            assert_eq!(blocking(|| lazy.wait_reply()).expect("an end").tag, tag);
        }
    }
    // One ring a region, of a number of records that wraps.
    let region = region_with(&path, Duration::from_secs(5));
    let odd = RingOptions::default().with_entries(3);
    assert_refused(
        blocking(|| AttendRing::open_ring(region.clone(), odd)),
        ErrorCode::InvalidArgument,
        "power of two",
    );
    let large = RingOptions::default().with_entries(512);
    let refused = blocking(|| AttendRing::open_ring(region.clone(), large));
    assert_refused(refused, ErrorCode::LimitExceeded, "limits.ring_entries_max = 256");
    let _first = blocking(|| AttendRing::open_ring(region.clone(), RingOptions::default()));
    let second = RingOptions::default().with_offset(1 << 19);
    let refused = blocking(|| AttendRing::open_ring(region.clone(), second));
    assert_refused(refused, ErrorCode::LimitExceeded, "has a ring");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_record_says_it_ends_with_an_answer_or_a_code() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 100).await;
    let batch = AttendBatch { per_query_errors: true, ..batch_of(&engine, &conversation, 2) };
    let mut ring = blocking(|| ring_with(&path, RingOptions::default()));
    let right = blocking(|| ring.attend_once(&batch, DIMS)).expect("attend");
    let at = RingLayout::pack_from(ring.free_from(), &batch, DIMS);
    let seed = 20_261_127;
    let mut rng = TestRng::new(seed);
    let (mut answered, mut refused) = (0, 0);
    let query = batch.queries[0];
    let entry = RingQuery { sequence: query.sequence.0, n_q: query.n_q, ..RingQuery::default() };
    let words = [0, 1, 2, 7, 0x7fff_ffff, 0x8000_0000, u32::MAX, u32::MAX - 1];
    for round in 0..600u64 {
        let number = ring.next_number().expect("room");
        let record = RingAttend {
            tag: round,
            timeout_us: 0,
            model: batch.model.0,
            layer: 0,
            q_heads: batch.q_heads,
            dtype: batch.dtype,
            scale: None,
            soft_cap: None,
            per_query_errors: true,
            queries: 1,
            queries_at: at.queries,
            q: at.q,
            out: at.out,
            lse_at: at.lse,
            query_errors_at: at.query_errors,
        };
        let (mut record, mut entry) = (record.write_record(number), entry.write_entry());
        // One or two words of the record or the query become hostile.
        for _ in 0..=rng.next_word() % 2 {
            let bytes =
                if rng.next_word().is_multiple_of(4) { &mut entry[..] } else { &mut record[..] };
            let at = (rng.next_word() % (bytes.len() as u64 / 4)) as usize * 4;
            let word = match rng.next_word() % 3 {
                0 => rng.next_word() as u32,
                1 => 1 << (rng.next_word() % 32),
                _ => words[rng.next_word() as usize % words.len()],
            };
            // The tag is the worker's own.
            if at != 8 && at != 12 {
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
        ring.shared_region().memory().write_bytes(at.queries, &entry).expect("inside");
        ring.submit_record(&record).expect("room");
        let reply = blocking(|| ring.wait_reply());
        let reply = reply.unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error}"));
        match reply.result {
            Ok(_) => answered += 1,
            Err(error) => {
                let code = error.code.expect("a code of kvd's");
                assert_ne!(code, ErrorCode::Internal, "seed {seed}, round {round}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 100 && answered > 10, "{answered} answered, {refused} refused");
    // The ring is as good as before.
    assert_eq!(blocking(|| ring.attend_once(&batch, DIMS)).expect("attend"), right);
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_that_cannot_be_end_the_region_alone() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 100).await;
    let batch = batch_of(&engine, &conversation, 1);
    let mut other = blocking(|| ring_with(&path, RingOptions::default()));
    let right = blocking(|| other.attend_once(&batch, DIMS)).expect("attend");
    // More written than the ring has, and more read than was taken.
    for word in [64, 68] {
        let mut ring = blocking(|| ring_with(&path, RingOptions::default()));
        let memory = ring.shared_region().memory();
        memory.store_word(word, 1000).expect("inside");
        // The doorbell.
        memory.store_word(76, 1000).expect("inside");
        let began = Instant::now();
        let broken = blocking(|| ring.wait_reply());
        assert_refused(broken, ErrorCode::InvalidArgument, "counters are broken");
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(blocking(|| other.attend_once(&batch, DIMS)).expect("attend"), right);
    }
    eventually("the others are given back", async || regions(&daemon).await == 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_and_ends_of_sequences_and_of_the_daemon_are_told() {
    let (daemon, _dir, path) = start(|plan| plan).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 100).await;
    let batch = batch_of(&engine, &conversation, 1);
    let mut ring = blocking(|| ring_with(&path, RingOptions::default()));
    let right = blocking(|| ring.attend_once(&batch, DIMS)).expect("attend");
    // What waits past its deadline ends with that, though the device is busy all the while.
    let held = daemon.hold_device().await;
    let region = region_with(&path, Duration::from_millis(60));
    let mut hasty =
        blocking(|| AttendRing::open_ring(region, RingOptions::default())).expect("a ring");
    let at = RingLayout::pack_from(hasty.free_from(), &batch, DIMS);
    hasty.submit_attend(1, &batch, &at).expect("room");
    std::thread::sleep(Duration::from_millis(30));
    let reply = blocking(|| hasty.wait_reply()).expect("the daemon's own end");
    assert_refused(reply.result, ErrorCode::DeadlineExceeded, "deadline");
    // A worker that leaves takes what waits with it.
    let leaving = RingLayout::pack_from(hasty.free_from(), &batch, DIMS);
    hasty.submit_attend(2, &batch, &leaving).expect("room");
    drop(hasty);
    eventually("its region is given back", async || regions(&daemon).await == 1.0).await;
    eventually("its attend has left the queue", async || daemon.queued_jobs() == 0).await;
    drop(held);
    assert_eq!(blocking(|| ring.attend_once(&batch, DIMS)).expect("attend"), right);
    engine.close_sequence(conversation).await;
    let gone = blocking(|| ring.attend_once(&batch, DIMS));
    assert_refused(gone, ErrorCode::UnknownSequence, "queries[0]");
    assert!(daemon.is_empty().await, "no plan keeps pages");
    daemon.stop_admitting();
    let late = blocking(|| ring.attend_once(&batch, DIMS));
    assert_refused(late, ErrorCode::ShuttingDown, "drains");
    drop(engine);
    daemon.stop_daemon().await;
    let gone = blocking(|| ring.attend_once(&batch, DIMS)).expect_err("nobody answers");
    assert_eq!((gone.code, gone.is_retryable()), (Some(ErrorCode::ShuttingDown), true), "{gone}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed_leaves_nothing_and_two_others_live() {
    // Attends of several workers in one pass have other bits.
    let apart = |plan: DaemonPlan| plan.with_setting("device.merged_attends_max", "1");
    let (daemon, _dir, path) = start(apart).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 1000).await;
    let batch = batch_of(&engine, &conversation, 3);
    let right = engine.client.attend_batch(batch.clone()).await.expect("attend");
    let mut two = blocking(|| [(); 2].map(|()| ring_with(&path, RingOptions::default())));
    for _ in 0..2 {
        let mut worker = Command::new(std::env::current_exe().expect("this test's own path"))
            .args(["--exact", "a_worker_process", "--ignored", "--nocapture"])
            .env("KVD_TEST_REGION", &path)
            .env("KVD_TEST_MODEL", engine.model.to_string())
            .env("KVD_TEST_SEQUENCE", conversation.sequence.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a worker");
        let lines = BufReader::new(worker.stdout.take().expect("its output")).lines();
        assert!(blocking(|| lines.map_while(Result::ok).any(|line| line.contains("busy"))));
        assert_eq!(regions(&daemon).await, 3.0);
        // Both of the others all the while.
        blocking(|| {
            std::thread::scope(|scope| {
                for ring in &mut two {
                    let (batch, right) = (&batch, &right);
                    scope.spawn(move || {
                        for _ in 0..10 {
                            let answer = ring.attend_once(batch, DIMS).expect("attend");
                            assert_eq!(answer, *right);
                        }
                    });
                }
            });
        });
        worker.kill().expect("SIGKILL");
        worker.wait().expect("its end");
        eventually("the region is given back", async || regions(&daemon).await == 2.0).await;
    }
    drop(two);
    eventually("nothing is held", async || regions(&daemon).await == 0.0).await;
    engine.close_sequence(conversation).await;
    assert!(daemon.is_empty().await);
    daemon.assert_serves().await;
}

/// Calls of a ring that was left.
#[derive(Default)]
struct LeftCalls {
    sent: usize,
    answered: usize,
}

/// Attends of a worker of its own: some answers are read, then it leaves with the rest under way.
fn leave_early(
    path: &Path,
    batch: &AttendBatch,
    timeout: Duration,
    rng: &mut TestRng,
) -> LeftCalls {
    let options = RegionOptions::default().with_bytes(1 << 20).with_timeout(timeout);
    // Its time may be over before it has come in.
    let ring = RegionClient::open_region(path, &options)
        .and_then(|region| AttendRing::open_ring(Arc::new(region), RingOptions::default()));
    let Ok(mut ring) = ring else { return LeftCalls::default() };
    let mut answered = 0;
    let at = RingLayout::pack_from(ring.free_from(), batch, DIMS);
    ring.shared_region().memory().write_bytes(at.q.offset, &batch.q).expect("inside");
    let sent = 1 + rng.next_word() % 8;
    (0..sent).for_each(|tag| ring.submit_attend(tag, batch, &at).expect("room"));
    for _ in 0..rng.next_word() % (sent + 1) {
        match ring.wait_reply() {
            Ok(reply) => {
                let code = reply.result.err().map(|error| error.code);
                let late = Some(Some(ErrorCode::DeadlineExceeded));
                assert!(code.is_none() || code == late, "{code:?}");
                answered += usize::from(code.is_none());
            }
            Err(error) => {
                assert_eq!(error.code, Some(ErrorCode::DeadlineExceeded), "{error}");
                break;
            }
        }
    }
    LeftCalls { sent: sent as usize, answered }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_that_end_anyhow_leave_nothing_and_harm_no_answer() {
    let apart = |plan: DaemonPlan| plan.with_setting("device.merged_attends_max", "1");
    let (daemon, _dir, path) = start(apart).await;
    let (engine, conversation) = stored(&daemon, "kivi-4", 300).await;
    let batches = [1, 4].map(|n_q| batch_of(&engine, &conversation, n_q));
    let mut right = Vec::new();
    for batch in &batches {
        right.push(engine.client.attend_batch(batch.clone()).await.expect("attend"));
    }
    let mut stays = blocking(|| ring_with(&path, RingOptions::default()));
    let seed = 20_261_128;
    let mut rng = TestRng::new(seed);
    let (mut calls, mut answered, mut sent, mut by_ring) = (0, 0, 0, 0);
    while calls < 1000 {
        let which = (rng.next_word() % 2) as usize;
        // Now and then the device is busy, and all of them wait.
        let held = match rng.next_word() % 4 {
            0 => Some(daemon.hold_device().await),
            _ => None,
        };
        let unary: Vec<_> = (0..4)
            .map(|_| {
                let (client, batch) = (engine.client.clone(), batches[which].clone());
                let time = Duration::from_micros(rng.next_word() % 3000);
                let call = async move { client.attend_batch(batch).await };
                tokio::spawn(tokio::time::timeout(time, call))
            })
            .collect();
        let patience = if held.is_some() || rng.next_word().is_multiple_of(2) { 5 } else { 20_000 };
        let patience = Duration::from_millis(patience);
        let left = blocking(|| leave_early(&path, &batches[which], patience, &mut rng));
        calls += unary.len() + left.sent;
        (sent, by_ring) = (sent + left.sent, by_ring + left.answered);
        drop(held);
        for call in unary {
            if let Ok(answer) = call.await.expect("no panic") {
                assert_eq!(answer.expect("attend"), right[which], "seed {seed}, call {calls}");
                answered += 1;
            }
        }
        let answer = blocking(|| stays.attend_once(&batches[1 - which], DIMS)).expect("attend");
        assert_eq!(answer, right[1 - which], "seed {seed}, call {calls}");
    }
    assert!(answered > 0, "all of {calls} were given up");
    assert!(by_ring > 0 && by_ring < sent, "{by_ring} of {sent} by ring were answered");
    eventually("their regions are given back", async || regions(&daemon).await == 1.0).await;
    eventually("they have left the queue", async || daemon.queued_jobs() == 0).await;
    let budgets = async || {
        let page = MetricsPage::parse_page(&daemon.admin_page("/metrics").await.1);
        page.sum_samples("kvd_inflight_bytes", &[])
    };
    eventually("they hold no bytes", async || budgets().await == 0.0).await;
    engine.close_sequence(conversation).await;
    assert!(daemon.is_empty().await, "no plan keeps pages");
    daemon.assert_serves().await;
}

/// The worker of a test above: keeps attends under way until it is killed.
#[test]
#[ignore = "a role of another test"]
fn a_worker_process() {
    let get = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let mut ring = ring_with(Path::new(&get("KVD_TEST_REGION")), RingOptions::default());
    let sequence = SequenceId(get("KVD_TEST_SEQUENCE").parse().expect("an id"));
    let batch = AttendBatch {
        model: ModelId(get("KVD_TEST_MODEL").parse().expect("an id")),
        layer: LayerIndex(0),
        q_heads: 4,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 8)],
        q: vec![0; 8 * 4 * 64 * 4].into(),
        per_query_errors: false,
    };
    let at = RingLayout::pack_from(ring.free_from(), &batch, DIMS);
    for tag in 0.. {
        while ring.submit_attend(tag, &batch, &at).is_ok() {}
        if tag == 0 {
            println!("busy");
        }
        ring.wait_reply().expect("an end").result.expect("an answer");
    }
}
