//! Stores that give way to attends: after one block, by count. A chunk is finished whatever
//! happens, a step undone when its caller leaves.

use super::bench::{Bench, CallGate, DeviceCall, SliceEvent, call, chunk, stranger};
use super::shares::{batch, stored_tokens, until};
use crate::service::{AttendReply, CallContext, Service, ServiceError, StoreReply};
use kvd_core::{ErrorCode, LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{RowLayout, StepPart, StoreStep};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Tokens that the attend reads.
const TOKENS: u32 = 64;
/// Blocks of a store.
const BLOCKS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(120);

/// How a test stores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreWay {
    Chunk,
    Step,
}

/// Stores [`BLOCKS`] blocks; a step has them in its one layer.
async fn store_blocks(
    service: &Service,
    of_store: &CallContext,
    way: StoreWay,
    of: (ModelId, SequenceId),
) -> Result<StoreReply, ServiceError> {
    let (model, sequence) = of;
    let chunk = chunk(sequence, 0, 16 * BLOCKS);
    if way == StoreWay::Chunk {
        return service.store_chunk(of_store, chunk).await;
    }
    let side = chunk.k.len() as u64;
    let rows = |offset| RowLayout {
        offset,
        head_stride: 16,
        token_stride: 16,
        layer_stride: side,
        table: None,
    };
    let part = StepPart {
        sequence,
        start: 0,
        tokens: chunk.tokens,
        first_layer: LayerIndex(0),
        layers: None,
        k: rows(0),
        v: rows(side),
    };
    let memory = [chunk.k, chunk.v].concat().into();
    let step = StoreStep { model, parts: vec![part], memory };
    let stored = service.store_step(of_store, step, None).await?[0];
    let (length, replayed, packed_blocks) = (stored.length, stored.replayed, stored.packed_blocks);
    Ok(StoreReply { length, replayed, packed_blocks })
}

/// A store that waits in its first block while an attend waits for it.
struct StoreAndAttend {
    bench: Bench,
    model: ModelId,
    sequence: SequenceId,
    /// Bytes of the pool before the store.
    used_before: u64,
    store: JoinHandle<Result<StoreReply, ServiceError>>,
    attend: JoinHandle<Result<AttendReply, ServiceError>>,
    /// Lets the block be encoded.
    go: mpsc::SyncSender<()>,
}

impl StoreAndAttend {
    async fn begin_both(way: StoreWay, of_store: CallContext, event: SliceEvent) -> Self {
        let bench = Bench::new(64 << 20, &[]);
        let asked = stored_tokens(&bench, TOKENS).await;
        let packed = bench.register("packed", "k=uniform(b=4,axis=block); v=raw").await;
        let sequence = bench.service.open_sequence(&call(), packed.shape.id).unwrap();
        let used_before = bench.service.pool_stats().used_bytes;
        bench.probe.calls.lock().clear();
        bench.probe.encoded.lock().clear();
        let [(begun, has_begun), (go, may_go)] = [0, 1].map(|_| mpsc::sync_channel(1));
        *bench.probe.encode_gate.lock() = Some(CallGate { begun, go: may_go });
        let service = bench.service.clone();
        let of = (packed.shape.id, sequence);
        let store = tokio::spawn(async move { store_blocks(&service, &of_store, way, of).await });
        until(|| has_begun.try_recv().is_ok()).await;
        *bench.probe.next_slice.lock() = event;
        let attend = ask_attend(&bench, asked);
        bench.queued(1).await;
        Self { bench, model: packed.shape.id, sequence, used_before, store, attend, go }
    }

    fn stored_length(&self) -> u32 {
        self.bench.service.describe_sequence(&call(), self.sequence).unwrap().length
    }
}

fn ask_attend(
    bench: &Bench,
    of: (ModelId, SequenceId),
) -> JoinHandle<Result<AttendReply, ServiceError>> {
    let service = bench.service.clone();
    tokio::spawn(async move { service.attend_batch(&stranger(), batch(of, 1, None)).await })
}

/// An attend that has the device until it may go on.
fn held_attend() -> (mpsc::SyncSender<()>, SliceEvent) {
    let (go, gate) = mpsc::sync_channel(1);
    (go, SliceEvent::Wait(gate))
}

/// The attend came after one block, and the rest of the store in one slice. An attend that the
/// clock cuts has more than one.
fn check_order(bench: &Bench) {
    let calls = bench.probe.calls.lock().clone();
    assert_eq!(calls[1], DeviceCall::Attend, "{calls:?}");
    let mut encoded = calls;
    encoded.retain(|call| *call != DeviceCall::Attend);
    let expected = [true, false].map(|paused| DeviceCall::Encode { paused });
    assert_eq!(encoded, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_gives_way_to_an_attend_after_one_block_and_is_stored_whole() {
    for way in [StoreWay::Chunk, StoreWay::Step] {
        let case = StoreAndAttend::begin_both(way, stranger(), SliceEvent::Answer).await;
        case.go.send(()).unwrap();
        case.attend.await.unwrap().unwrap();
        let stored = case.store.await.unwrap().unwrap();
        assert_eq!((stored.length, stored.packed_blocks), (16 * BLOCKS, BLOCKS));
        check_order(&case.bench);
        // One call that encodes, with one choice of what is measured.
        assert_eq!(*case.bench.probe.encoded.lock(), [BLOCKS as usize]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_gave_way_goes_on_before_other_stores_and_is_undone_when_its_caller_leaves() {
    for leaves in [false, true] {
        let (go_on, event) = held_attend();
        let mut case = StoreAndAttend::begin_both(StoreWay::Step, stranger(), event).await;
        case.go.send(()).unwrap();
        until(|| case.bench.probe.calls.lock().contains(&DeviceCall::Attend)).await;
        assert_eq!((case.bench.service.first_worker().queued_jobs(), case.stored_length()), (1, 0));
        let other = case.bench.service.open_sequence(&call(), case.model).unwrap();
        let service = case.bench.service.clone();
        let of_other = (case.model, other);
        let next = tokio::spawn(async move {
            store_blocks(&service, &stranger(), StoreWay::Chunk, of_other).await
        });
        case.bench.queued(2).await;
        if leaves {
            case.store.abort();
            // Noted before the attend ends.
            let worker = case.bench.service.first_worker();
            until(|| case.store.is_finished() && worker.queued_jobs() == 2).await;
        }
        go_on.send(()).unwrap();
        (&mut case.attend).await.unwrap().unwrap();
        assert_eq!(next.await.unwrap().unwrap().length, 16 * BLOCKS);
        case.bench.idle().await;
        // Blocks that were encoded together: those of the step, then those of the other.
        let blocks = BLOCKS as usize;
        assert_eq!(*case.bench.probe.encoded.lock(), [blocks, blocks]);
        let mut encoded = case.bench.probe.calls.lock().clone();
        encoded.retain(|call| *call != DeviceCall::Attend);
        let of_step: &[bool] = if leaves { &[true] } else { &[true, false] };
        let paused = of_step.iter().chain(&[false]);
        let expected: Vec<_> =
            paused.map(|paused| DeviceCall::Encode { paused: *paused }).collect();
        assert_eq!(encoded, expected);
        let service = &case.bench.service;
        if leaves {
            assert_eq!(case.stored_length(), 0);
            // The same range is free.
            let of_case = (case.model, case.sequence);
            let again = store_blocks(service, &stranger(), StoreWay::Step, of_case).await;
            assert_eq!(again.unwrap().length, 16 * BLOCKS);
        } else {
            assert_eq!((&mut case.store).await.unwrap().unwrap().length, 16 * BLOCKS);
        }
        for sequence in [case.sequence, other] {
            service.close_sequence(&call(), sequence).unwrap();
        }
        until(|| service.pool_stats().used_bytes == case.used_before).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_seen_of_a_store_that_gave_way_and_it_is_finished_when_its_caller_leaves() {
    let (go_on, event) = held_attend();
    let case = StoreAndAttend::begin_both(StoreWay::Chunk, stranger(), event).await;
    case.go.send(()).unwrap();
    until(|| case.bench.probe.calls.lock().contains(&DeviceCall::Attend)).await;
    // It waits, and counts as a job that does.
    assert_eq!((case.bench.service.first_worker().queued_jobs(), case.stored_length()), (1, 0));
    case.store.abort();
    let StoreAndAttend { bench, sequence, store, attend, .. } = case;
    assert!(store.await.unwrap_err().is_cancelled());
    // What it appends to is its own until then.
    let busy = bench.store(sequence, 16 * BLOCKS, 1).await.unwrap_err();
    assert_eq!(busy.code(), ErrorCode::SequenceBusy);
    go_on.send(()).unwrap();
    attend.await.unwrap().unwrap();
    bench.idle().await;
    check_order(&bench);
    let stored = bench.service.describe_sequence(&call(), sequence).unwrap().length;
    assert_eq!(stored, 16 * BLOCKS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_gave_way_is_finished_after_its_deadline_and_while_the_device_stops() {
    let (go_on, event) = held_attend();
    let deadline = Instant::now() + Duration::from_secs(1);
    let of_store = CallContext { deadline: Some(deadline), ..stranger() };
    let case = StoreAndAttend::begin_both(StoreWay::Chunk, of_store, event).await;
    case.go.send(()).unwrap();
    until(|| case.bench.probe.calls.lock().contains(&DeviceCall::Attend)).await;
    let thread = case.bench.probe.thread.lock().take().unwrap();
    thread.stop_thread();
    until(|| deadline <= Instant::now()).await;
    go_on.send(()).unwrap();
    let stopped = case.attend.await.unwrap().err().map(|error| error.code());
    assert_eq!(stopped, Some(ErrorCode::ShuttingDown));
    assert_eq!(case.store.await.unwrap().unwrap().length, 16 * BLOCKS);
    assert!(tokio::task::spawn_blocking(|| thread.join_thread(PATIENCE)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_after_it_gave_way_leaves_nothing() {
    let (go_on, event) = held_attend();
    let case = StoreAndAttend::begin_both(StoreWay::Chunk, stranger(), event).await;
    let used = || case.bench.service.pool_stats().used_bytes;
    let before = used();
    case.go.send(()).unwrap();
    until(|| case.bench.probe.calls.lock().contains(&DeviceCall::Attend)).await;
    // The device is lost while the store waits; its attend is told as well.
    case.bench.probe.faults.lose_device();
    go_on.send(()).unwrap();
    let told = case.attend.await.unwrap().err().map(|error| error.code());
    assert_eq!(told, Some(ErrorCode::DeviceFailed));
    assert_eq!(case.store.await.unwrap().unwrap_err().code(), ErrorCode::DeviceFailed);
    assert_eq!(case.bench.service.describe_sequence(&call(), case.sequence).unwrap().length, 0);
    assert!(used() < before, "its rows and pages are free again");
}
