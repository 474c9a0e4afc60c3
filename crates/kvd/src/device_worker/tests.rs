//! The queue in front of a device, and the thread behind it.

use super::*;
use crate::service::CallOwner;
use kvd_compute::{CpuBackend, CpuOptions};
use std::collections::VecDeque;
use std::sync::mpsc;

/// Longest wait for what happens at once.
const PATIENCE: Duration = Duration::from_secs(20);

fn start() -> (DeviceWorker, DeviceWorkerThread) {
    let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
    let backend = Box::new(CpuBackend::new(options).unwrap());
    let merging = MergeLimits { attends_max: 16, wait: Duration::ZERO };
    let limits = WorkerLimits { queue_jobs_max: 2, merging, quotas: QuotaTable::new(1) };
    DeviceWorker::start_thread(backend, limits, &Metrics::new(), || {}).unwrap()
}

fn call() -> CallContext {
    CallContext::new(Namespace::new("default").unwrap())
}

/// A call of a connection of its own.
fn stranger() -> CallContext {
    CallContext { owner: CallOwner::new(1 << 20), ..call() }
}

/// A job on a task of its own.
fn spawn<T: Send + 'static>(
    worker: &DeviceWorker,
    kind: JobKind,
    call: CallContext,
    work: impl FnOnce() -> T + Send + 'static,
) -> tokio::task::JoinHandle<Result<T, ServiceError>> {
    let worker = worker.clone();
    tokio::spawn(async move { worker.run_as(kind, &call, move |_| Ok(work())).await })
}

/// Keeps the device busy until the answer is dropped.
async fn hold(worker: &DeviceWorker) -> mpsc::SyncSender<()> {
    let (go, gate) = mpsc::sync_channel::<()>(1);
    let (begun, has_begun) = oneshot::channel();
    drop(spawn(worker, JobKind::Other, call(), move || {
        let _ = begun.send(());
        let _ = gate.recv();
    }));
    has_begun.await.unwrap();
    go
}

async fn queued(worker: &DeviceWorker, count: usize) {
    let began = Instant::now();
    while worker.queued_jobs() != count {
        assert!(began.elapsed() < PATIENCE, "{} jobs wait", worker.queued_jobs());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn an_idle_worker_ends_while_handles_remain_and_refuses_what_comes_after() {
    let (worker, thread) = start();
    assert_eq!(worker.run_closure(&call(), |_| Ok(7)).await.unwrap(), 7);
    assert!(thread.join_thread(PATIENCE));
    let late = worker.run_closure(&call(), |_| Ok(7)).await.unwrap_err();
    assert_eq!(late.code(), ErrorCode::ShuttingDown);
    assert!(!worker.has_failed());
}

#[tokio::test]
async fn the_thread_ends_after_its_last_handle() {
    let (worker, thread) = start();
    drop(worker.clone());
    assert_eq!(worker.run_closure(&call(), |_| Ok(7)).await.unwrap(), 7);
    drop(worker);
    assert_eq!(thread.ended.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[tokio::test]
async fn attention_passes_other_jobs_that_wait_and_each_kind_has_its_places() {
    let (worker, _thread) = start();
    let go = hold(&worker).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let job = |kind, name: &'static str| {
        let order = order.clone();
        spawn(&worker, kind, call(), move || order.lock().push(name))
    };
    let store = job(JobKind::Other, "store");
    queued(&worker, 1).await;
    let second = job(JobKind::Other, "second store");
    queued(&worker, 2).await;
    let attend = job(JobKind::Attend, "attend");
    queued(&worker, 3).await;
    let refused = job(JobKind::AfterAll, "too many").await.unwrap().unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    assert!(refused.to_string().contains("2 of them of this connection"), "{refused}");
    let hint = refused.retry_hint().unwrap();
    assert!((RETRY_AFTER[0]..=RETRY_AFTER[1]).contains(&hint), "{hint:?}");
    drop(go);
    for job in [store, attend, second] {
        job.await.unwrap().unwrap();
    }
    assert_eq!(*order.lock(), ["attend", "store", "second store"]);
    assert_eq!(worker.queued_jobs(), 0);
}

#[tokio::test]
async fn others_get_their_turn_while_attends_keep_coming() {
    let (worker, _thread) = start();
    let stored = Arc::new(AtomicBool::new(false));
    let slow =
        || spawn(&worker, JobKind::Attend, call(), || std::thread::sleep(Duration::from_millis(1)));
    // Two are always on their way, so that one waits whenever the worker looks.
    let go = hold(&worker).await;
    let mut under_way = VecDeque::from([slow(), slow()]);
    let done = stored.clone();
    let store = spawn(&worker, JobKind::Other, call(), move || done.store(true, Ordering::Release));
    queued(&worker, 3).await;
    drop(go);
    for _ in 0..10_000 {
        if stored.load(Ordering::Acquire) {
            break;
        }
        under_way.pop_front().unwrap().await.unwrap().unwrap();
        under_way.push_back(slow());
    }
    assert!(stored.load(Ordering::Acquire), "the store never ran");
    store.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_finishes_the_running_job_and_answers_a_full_queue() {
    let (worker, thread) = start();
    let go = hold(&worker).await;
    let waiting = [0, 1].map(|_| spawn(&worker, JobKind::Other, call(), || 2));
    queued(&worker, 2).await;
    let end = tokio::task::spawn_blocking(move || thread.join_thread(PATIENCE));
    let stopped = worker.handles.shared.stopped.clone();
    while !stopped.load(Ordering::Acquire) {
        tokio::task::yield_now().await;
    }
    drop(go);
    assert!(end.await.unwrap());
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().unwrap_err().code(), ErrorCode::ShuttingDown);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_does_not_end_is_waited_for_so_long_and_no_longer() {
    let (worker, thread) = start();
    let _never = hold(&worker).await;
    let began = Instant::now();
    let limit = Duration::from_millis(100);
    assert!(!tokio::task::spawn_blocking(move || thread.join_thread(limit)).await.unwrap());
    assert!((limit..PATIENCE).contains(&began.elapsed()));
}

#[tokio::test]
async fn a_job_leaves_the_queue_with_all_it_holds_when_its_caller_does() {
    let (worker, _thread) = start();
    let go = hold(&worker).await;
    let held = Arc::new(());
    let keep = |held: &Arc<()>| {
        let held = held.clone();
        move || drop(held)
    };
    let jobs: Vec<_> =
        (0..2).map(|_| spawn(&worker, JobKind::Other, call(), keep(&held))).collect();
    queued(&worker, 2).await;
    assert_eq!(Arc::strong_count(&held), 3);
    for job in jobs {
        job.abort();
        assert!(job.await.unwrap_err().is_cancelled());
    }
    // Before the device has done anything.
    assert_eq!((worker.queued_jobs(), Arc::strong_count(&held)), (0, 1));
    let next = spawn(&worker, JobKind::Other, call(), || 3);
    queued(&worker, 1).await;
    drop(go);
    assert_eq!(next.await.unwrap().unwrap(), 3);
}

#[tokio::test]
async fn a_job_that_waits_ends_at_its_deadline_wherever_its_caller_is() {
    let (worker, _thread) = start();
    let _go = hold(&worker).await;
    let deadline = Some(Instant::now() + Duration::from_millis(30));
    let late = spawn(&worker, JobKind::Attend, CallContext { deadline, ..call() }, || ());
    let answer = tokio::time::timeout(PATIENCE, late).await.expect("an answer").unwrap();
    assert_eq!(answer.unwrap_err().code(), ErrorCode::DeadlineExceeded);
    assert_eq!(worker.queued_jobs(), 0);
}

#[tokio::test]
async fn the_connection_with_most_jobs_gives_a_place_up_to_another() {
    let (worker, _thread) = start();
    let go = hold(&worker).await;
    let flood = stranger();
    let first = spawn(&worker, JobKind::Attend, flood.clone(), || 1);
    queued(&worker, 1).await;
    let second = spawn(&worker, JobKind::Attend, flood.clone(), || 2);
    queued(&worker, 2).await;
    let other = spawn(&worker, JobKind::Attend, stranger(), || 3);
    let refused = second.await.unwrap().unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    assert!(refused.retry_hint().is_some());
    // Now each has one, and whoever comes has no better right to it.
    for caller in [flood, stranger()] {
        let refused = spawn(&worker, JobKind::Attend, caller, || 4).await.unwrap().unwrap_err();
        assert_eq!(refused.code(), ErrorCode::QueueFull);
    }
    drop(go);
    assert_eq!(first.await.unwrap().unwrap() + other.await.unwrap().unwrap(), 4);
}

#[tokio::test]
async fn messages_of_streams_wait_beside_the_places_and_are_counted() {
    let (worker, _thread) = start();
    let go = hold(&worker).await;
    let stream = || CallContext { waits_for_queue: true, ..stranger() };
    let streams: Vec<_> =
        (0..50).map(|_| spawn(&worker, JobKind::Attend, stream(), || 1)).collect();
    queued(&worker, 50).await;
    assert_eq!(worker.queued_stream_messages(), [50, 0]);
    let unary = spawn(&worker, JobKind::Attend, stranger(), || 1);
    queued(&worker, 51).await;
    assert_eq!(worker.queued_stream_messages(), [50, 0]);
    drop(go);
    for job in streams.into_iter().chain([unary]) {
        assert_eq!(job.await.unwrap().unwrap(), 1);
    }
}

#[tokio::test]
async fn a_panic_ends_the_device_and_answers_those_that_wait() {
    let (worker, thread) = start();
    let go = hold(&worker).await;
    let panics = spawn(&worker, JobKind::Other, call(), || panic!("a defect"));
    queued(&worker, 1).await;
    let waiting = spawn(&worker, JobKind::Other, call(), || ());
    queued(&worker, 2).await;
    drop(go);
    for job in [panics, waiting] {
        assert_eq!(job.await.unwrap().unwrap_err().code(), ErrorCode::DeviceFailed);
    }
    assert!(worker.has_failed());
    let late = worker.run_closure(&call(), |_| Ok(())).await.unwrap_err();
    assert_eq!(late.code(), ErrorCode::DeviceFailed);
    assert!(thread.join_thread(PATIENCE));
}

#[tokio::test]
async fn an_attend_cuts_other_jobs_short_and_not_transfers() {
    for (kind, is_cut) in [(JobKind::Other, true), (JobKind::Transfer, false)] {
        let (worker, thread) = start();
        let (begun, has_begun) = oneshot::channel();
        let (go, gate) = mpsc::sync_channel::<()>(1);
        let running = spawn(&worker, kind, call(), move || {
            begun.send(()).unwrap();
            let _ = gate.recv();
        });
        has_begun.await.unwrap();
        let attend = spawn(&worker, JobKind::Attend, call(), || ());
        queued(&worker, 1).await;
        assert_eq!(worker.handles.shared.outrun.load(Ordering::Acquire), is_cut, "{kind:?}");
        drop(go);
        running.await.unwrap().unwrap();
        attend.await.unwrap().unwrap();
        assert!(thread.join_thread(PATIENCE));
    }
}

#[tokio::test]
async fn a_transfer_gives_way_to_others_and_not_to_transfers() {
    let (worker, thread) = start();
    let go = hold(&worker).await;
    let shared = worker.handles.shared.clone();
    let began = Instant::now();
    let slice_of = |kind| shared.slice_of(kind, began);
    let waiting = |kind| slice_of(kind).waiting.load(Ordering::Acquire);
    let transfer = spawn(&worker, JobKind::Transfer, call(), || ());
    queued(&worker, 1).await;
    assert_eq!([waiting(JobKind::Transfer), waiting(JobKind::Attend)], [0, 1]);
    let attend = spawn(&worker, JobKind::Attend, call(), || ());
    queued(&worker, 2).await;
    assert_eq!([waiting(JobKind::Transfer), waiting(JobKind::Attend)], [1, 2]);
    assert!(slice_of(JobKind::Transfer).ends < slice_of(JobKind::Attend).ends);
    drop(go);
    attend.await.unwrap().unwrap();
    transfer.await.unwrap().unwrap();
    assert!(thread.join_thread(PATIENCE));
}
