//! Long attends and those of others, and what becomes of work whose caller leaves.

use super::bench::{Bench, call, chunk, stranger};
use crate::service::{AttendReply, CallContext, ServiceError};
use bytes::Bytes;
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, Namespace, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Tokens that are stored, and query tokens of a long attend: seconds of the device in slices of
/// milliseconds.
const TOKENS: u32 = 1 << 15;
const GIANT: u32 = 1 << 12;

const PATIENCE: Duration = Duration::from_secs(120);

async fn stored(bench: &Bench) -> (ModelId, SequenceId) {
    stored_tokens(bench, TOKENS).await
}

/// A model, and a sequence of so many tokens.
pub(super) async fn stored_tokens(bench: &Bench, tokens: u32) -> (ModelId, SequenceId) {
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, tokens).await.unwrap();
    (model, sequence)
}

/// The last so many tokens of a sequence ask for all of it.
pub(super) fn batch(
    (model, sequence): (ModelId, SequenceId),
    n_q: u32,
    scale: Option<f32>,
) -> AttendBatch {
    let values: Vec<f32> = (0..n_q * 8).map(|i| (i * 5 % 31) as f32 / 31.0).collect();
    let mut q = vec![0; values.len() * 4];
    DType::F32.narrow_values(&values, &mut q);
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F32,
        scale,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, n_q)],
        q: Bytes::from(q),
        per_query_errors: false,
    }
}

fn attend(
    bench: &Bench,
    call: CallContext,
    batch: AttendBatch,
) -> JoinHandle<Result<AttendReply, ServiceError>> {
    let service = bench.service.clone();
    tokio::spawn(async move { service.attend_batch(&call, batch).await })
}

pub(super) async fn until(ask: impl Fn() -> bool) {
    let began = Instant::now();
    while !ask() {
        assert!(began.elapsed() < PATIENCE, "it never happens");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_attend_lets_others_pass_and_answers_as_if_alone() {
    let bench = Bench::new(64 << 20, &[]);
    let of = stored(&bench).await;
    let alone = bench.service.attend_batch(&call(), batch(of, GIANT, None)).await.unwrap();
    assert_eq!(*bench.probe.slices.lock(), 1, "nobody waited");
    let giant = attend(&bench, stranger(), batch(of, GIANT, None));
    until(|| *bench.probe.slices.lock() == 2).await;
    let mut beside = 0;
    while !giant.is_finished() && beside < 100 {
        bench.service.attend_batch(&stranger(), batch(of, 1, None)).await.unwrap();
        beside += 1;
    }
    assert!(beside > 10, "{beside} attends of others before the long one ended");
    let shared = giant.await.unwrap().unwrap();
    assert_eq!((shared.out, shared.lse), (alone.out, alone.lse));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_device_is_free_soon_after_the_caller_of_a_long_attend_left() {
    // The second one's scores leave f32: it is answered in f64, tens of times slower.
    for scale in [None, Some(1e37)] {
        let bench = Bench::new(64 << 20, &[]);
        let of = stored(&bench).await;
        let giant = attend(&bench, stranger(), batch(of, GIANT, scale));
        until(|| *bench.probe.slices.lock() == 1).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!giant.is_finished());
        giant.abort();
        let began = Instant::now();
        // Once it is gone, what it held has been given back.
        assert!(giant.await.is_err_and(|error| error.is_cancelled()));
        bench.idle().await;
        let took = began.elapsed();
        // Of milliseconds, on a machine that does something else as well; all of it takes seconds.
        assert!(took < Duration::from_secs(1), "{took:?}");
        let page = bench.service.metrics().render_page();
        assert!(page.contains("kvd_abandoned_jobs_total{device=\"0\",when=\"during\"} 1\n"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_an_attend_that_runs() {
    let bench = Bench::new(64 << 20, &[]);
    let of = stored(&bench).await;
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let began = Instant::now();
    let ended =
        attend(&bench, CallContext { deadline, ..stranger() }, batch(of, GIANT, Some(1e37)));
    let error = ended.await.unwrap().err().expect("it takes longer");
    assert_eq!(error.code(), ErrorCode::DeadlineExceeded, "{error}");
    bench.idle().await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_given_up_in_the_queue_gives_all_back_at_once() {
    let bench = Bench::new(1 << 20, &[("device.queue_jobs_max", "1")]);
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    let _held = bench.hold().await;
    let (service, chunk) = (bench.service.clone(), chunk(sequence, 0, 64));
    let store = tokio::spawn({
        let chunk = chunk.clone();
        async move { service.store_chunk(&call(), chunk).await }
    });
    bench.queued(1).await;
    // Its memory is reserved when it begins.
    assert_eq!(bench.service.pool_stats().used_bytes, 0);
    assert!(bench.service.inflight_bytes() > 0);
    let busy = bench.service.truncate_sequence(&call(), sequence, 0).unwrap_err();
    assert_eq!(busy.code(), ErrorCode::SequenceBusy);
    store.abort();
    assert!(store.await.unwrap_err().is_cancelled());
    // While the device is still held.
    assert_eq!(
        (bench.service.inflight_bytes(), bench.service.first_worker().queued_jobs()),
        (0, 0)
    );
    bench.service.truncate_sequence(&call(), sequence, 0).unwrap();
    let service = bench.service.clone();
    drop(tokio::spawn(async move { service.store_chunk(&call(), chunk).await }));
    bench.queued(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_one_client_refuse_no_other() {
    let bench = Bench::new(64 << 20, &[]);
    let of = stored(&bench).await;
    let held = bench.hold().await;
    let flood = stranger();
    let calls: Vec<_> =
        (0..300).map(|_| attend(&bench, flood.clone(), batch(of, 1, None))).collect();
    bench.queued(256).await;
    let others: Vec<_> = (0..20).map(|_| attend(&bench, stranger(), batch(of, 1, None))).collect();
    until(|| calls.iter().filter(|call| call.is_finished()).count() == 44 + 20).await;
    drop(held);
    for other in others {
        other.await.unwrap().expect("not refused");
    }
    let mut refused = 0;
    for call in calls {
        if let Err(error) = call.await.unwrap() {
            assert_eq!(error.code(), ErrorCode::QueueFull);
            refused += 1;
        }
    }
    assert_eq!(refused, 44 + 20);
}

#[tokio::test]
async fn a_namespace_with_many_connections_leaves_others_an_eighth_of_the_bytes() {
    let bench = Bench::new(
        1 << 20,
        &[
            ("server.message_bytes_max", "16 KiB"),
            ("limits.calibration_bytes_max", "16 KiB"),
            ("limits.attend_parts_max", "64"),
            ("limits.inflight_bytes_max", "160 KiB"),
        ],
    );
    let of = |name: &str| CallContext { namespace: Namespace::new(name).unwrap(), ..stranger() };
    let take = |name: &str, bytes| bench.service.take_bytes(&of(name), bytes);
    let held: Vec<_> = (0..7).map(|_| take("flooder", 20 << 10).unwrap()).collect();
    let refused = take("flooder", 1 << 10).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    assert!(refused.to_string().contains("limits.namespace_bytes_max = 143360"), "{refused}");
    let others = take("victim", 20 << 10).unwrap();
    let refused = take("victim", 1 << 10).unwrap_err();
    assert!(refused.to_string().contains("limits.inflight_bytes_max"), "{refused}");
    drop((held, others));
    drop(take("flooder", 140 << 10).unwrap());
    assert_eq!(bench.service.inflight_bytes(), 0);
}
