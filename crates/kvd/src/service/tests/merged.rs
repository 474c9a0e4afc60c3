//! Attends of several callers in one pass.

use super::bench::{Bench, call, stranger};
use crate::service::{AttendReply, CallContext, ServiceError};
use bytes::Bytes;
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Tokens of the prefix, and of each sequence after it.
const PREFIX: u32 = 1 << 14;
const OWN: u32 = 24;
const PATIENCE: Duration = Duration::from_secs(120);

/// Forks of one prefix.
struct Forks {
    model: ModelId,
    sequences: Vec<SequenceId>,
}

impl Forks {
    async fn open(bench: &Bench, count: usize, codec: &str) -> Self {
        let model = bench.register("a", codec).await.shape.id;
        let prefix = bench.service.open_sequence(&call(), model).unwrap();
        bench.store(prefix, 0, PREFIX).await.unwrap();
        let mut sequences = Vec::new();
        for _ in 0..count {
            let fork = bench.service.fork_sequence(&call(), prefix, None).unwrap();
            bench.store(fork.id, PREFIX, OWN).await.unwrap();
            sequences.push(fork.id);
        }
        Self { model, sequences }
    }

    /// Asks for all of a fork by its last tokens.
    fn make_batch(&self, fork: usize, n_q: u32) -> AttendBatch {
        let value = |i: u32| ((i * 5 + 3 * fork as u32) % 31) as f32 / 31.0;
        let values: Vec<f32> = (0..n_q * 8).map(value).collect();
        let mut q = vec![0; values.len() * 4];
        DType::F32.narrow_values(&values, &mut q);
        AttendBatch {
            model: self.model,
            layer: LayerIndex(0),
            q_heads: 1,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(self.sequences[fork], n_q)],
            q: Bytes::from(q),
            per_query_errors: false,
        }
    }
}

type Asked = JoinHandle<Result<AttendReply, ServiceError>>;

fn spawn_attend(bench: &Bench, call: CallContext, batch: AttendBatch) -> Asked {
    let service = bench.service.clone();
    tokio::spawn(async move { service.attend_batch(&call, batch).await })
}

async fn wait_until(ask: impl Fn() -> bool) {
    let began = Instant::now();
    while !ask() {
        assert!(began.elapsed() < PATIENCE, "it never happens");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn read_counter(bench: &Bench, metric: &str) -> u64 {
    let page = bench.service.metrics().render_page();
    let line = page.lines().find(|line| line.starts_with(&format!("{metric}{{"))).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn assert_near(got: &AttendReply, wanted: &AttendReply) {
    let floats = |bytes: &[u8]| {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let (got_out, wanted_out) = (floats(&got.out), floats(&wanted.out));
    assert_eq!(got_out.len(), wanted_out.len());
    let largest = wanted_out.iter().fold(0f32, |most, value| most.max(value.abs()));
    for (a, b) in got_out.iter().zip(&wanted_out) {
        assert!((a - b).abs() <= 1e-5 * largest, "{a} {b}");
    }
    for (a, b) in got.lse.iter().zip(&wanted.lse) {
        assert!((a - b).abs() <= 1e-4, "{a} {b}");
    }
}

/// Sends attends while the device is busy, so that all wait when it is free.
async fn send_all(bench: &Bench, calls: Vec<(CallContext, AttendBatch)>) -> Vec<Asked> {
    let gate = bench.hold().await;
    let mut asked = Vec::new();
    for (call, batch) in calls {
        let waiting = bench.service.first_worker().queued_jobs();
        asked.push(spawn_attend(bench, call, batch));
        wait_until(|| bench.service.first_worker().queued_jobs() > waiting).await;
    }
    drop(gate);
    asked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attends_that_wait_go_through_a_shared_prefix_once() {
    let bench = Bench::new(64 << 20, &[]);
    let forks = Forks::open(&bench, 4, "raw").await;
    let mut alone = Vec::new();
    for fork in 0..4 {
        alone.push(bench.service.attend_batch(&call(), forks.make_batch(fork, 1)).await.unwrap());
    }
    assert_eq!(read_counter(&bench, "kvd_merged_attends_total"), 0);
    let slices = *bench.probe.slices.lock();
    let calls = (0..4).map(|fork| (stranger(), forks.make_batch(fork, 1))).collect();
    for (asked, alone) in send_all(&bench, calls).await.into_iter().zip(&alone) {
        assert_near(&asked.await.unwrap().unwrap(), alone);
    }
    assert_eq!(*bench.probe.slices.lock(), slices + 1);
    assert_eq!(read_counter(&bench, "kvd_merged_attends_total"), 4);
    // Three of four queries need no pass of their own.
    let saved = read_counter(&bench, "kvd_saved_block_passes_total");
    assert_eq!(saved, u64::from(3 * PREFIX / 16));
    let attends = read_counter(&bench, "kvd_attended_layer_query_tokens_total");
    assert_eq!(attends, 8, "each is counted as its own");
    bench.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_query_refuses_no_stranger() {
    let bench = Bench::new(64 << 20, &[]);
    let forks = Forks::open(&bench, 4, "raw").await;
    let alone = bench.service.attend_batch(&call(), forks.make_batch(0, 1)).await.unwrap();
    let with = |value: f32| {
        let mut batch = forks.make_batch(1, 1);
        batch.q = [value; 8].into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>().into();
        batch
    };
    // One is no number; another is beyond f32 only once it is multiplied with the scale.
    for bad in [AttendBatch { ..with(f32::NAN) }, AttendBatch { scale: Some(1e10), ..with(1e37) }] {
        let scale = bad.scale;
        let good = |fork| AttendBatch { scale, ..forks.make_batch(fork, 1) };
        let right = bench.service.attend_batch(&call(), good(0)).await.unwrap();
        let calls = vec![(stranger(), good(0)), (stranger(), bad), (stranger(), good(0))];
        let mut asked = send_all(&bench, calls).await.into_iter();
        let mut next = async || asked.next().unwrap().await.unwrap();
        assert_near(&next().await.unwrap(), &right);
        let error = next().await.err().unwrap();
        assert_eq!(error.code(), ErrorCode::NonFinite, "{error}");
        assert_near(&next().await.unwrap(), &right);
    }
    let again = bench.service.attend_batch(&call(), forks.make_batch(0, 1)).await.unwrap();
    assert_eq!((again.out, again.lse), (alone.out, alone.lse));
    bench.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_a_pass_or_is_late_leaves_the_others_alone() {
    // Seconds of the device, in the first pass and in the second one.
    for scale in [None, Some(1e37)] {
        let bench = Bench::new(64 << 20, &[]);
        let forks = Forks::open(&bench, 4, "raw").await;
        let n_q = if scale.is_some() { 256 } else { 1 << 11 };
        let ask = |fork| AttendBatch { scale, ..forks.make_batch(fork, n_q) };
        let right = bench.service.attend_batch(&call(), ask(2)).await.unwrap();
        let slices = *bench.probe.slices.lock();
        let late = Some(Instant::now() + Duration::from_millis(400));
        let calls = vec![
            (stranger(), ask(0)),
            (CallContext { deadline: late, ..stranger() }, ask(1)),
            (stranger(), ask(2)),
            (stranger(), ask(3)),
        ];
        let mut asked = send_all(&bench, calls).await;
        wait_until(|| *bench.probe.slices.lock() > slices).await;
        // The first of them, whose ticket the pass has.
        asked[0].abort();
        assert!(asked.remove(0).await.is_err_and(|error| error.is_cancelled()));
        let error = asked.remove(0).await.unwrap().err();
        if let Some(error) = &error {
            assert_eq!(error.code(), ErrorCode::DeadlineExceeded, "{error}");
        }
        assert_near(&asked.remove(0).await.unwrap().unwrap(), &right);
        asked.remove(0).await.unwrap().unwrap();
        bench.idle().await;
        let page = bench.service.metrics().render_page();
        assert!(page.contains("kvd_abandoned_jobs_total{device=\"0\",when=\"during\"} 1\n"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_shares_little_or_asks_otherwise_is_not_merged() {
    let bench = Bench::new(64 << 20, &[("device.merged_attends_max", "16")]);
    let forks = Forks::open(&bench, 3, "raw").await;
    let short = {
        let mut batch = forks.make_batch(1, 1);
        batch.queries[0].start = Some(PREFIX - 64);
        batch
    };
    let otherwise = AttendBatch { soft_cap: Some(9.0), ..forks.make_batch(2, 1) };
    let calls =
        vec![(stranger(), forks.make_batch(0, 1)), (stranger(), short), (stranger(), otherwise)];
    for asked in send_all(&bench, calls).await {
        asked.await.unwrap().unwrap();
    }
    assert_eq!(read_counter(&bench, "kvd_merged_attends_total"), 0);
    let off = Bench::new(64 << 20, &[("device.merged_attends_max", "1")]);
    let forks = Forks::open(&off, 2, "raw").await;
    let calls = (0..2).map(|fork| (stranger(), forks.make_batch(fork, 1))).collect();
    for asked in send_all(&off, calls).await {
        asked.await.unwrap().unwrap();
    }
    assert_eq!(read_counter(&off, "kvd_merged_attends_total"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_waits_for_others_as_long_as_it_is_told() {
    let bench = Bench::new(64 << 20, &[("device.merge_wait_us", "100000")]);
    let forks = Forks::open(&bench, 2, "raw").await;
    let asked: Vec<Asked> =
        (0..2).map(|fork| spawn_attend(&bench, stranger(), forks.make_batch(fork, 1))).collect();
    for asked in asked {
        asked.await.unwrap().unwrap();
    }
    assert_eq!(read_counter(&bench, "kvd_merged_attends_total"), 2);
}
