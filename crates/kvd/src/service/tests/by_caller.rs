//! Small attends that run on the thread that asks for them, beside those that wait.

use super::bench::{Bench, SliceEvent, call, stranger};
use super::shares::{batch, stored_tokens, until};
use crate::service::CallContext;
use kvd_core::{ErrorCode, ModelId, SequenceId};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Tokens of a context over which one query token is small, and query tokens and heads that are too
/// many.
const TOKENS: u32 = 256;
const MANY: u32 = 128;
const MANY_HEADS: u32 = 64;

async fn bench_with(settings: &[(&str, &str)]) -> (Bench, (ModelId, SequenceId)) {
    let bench = Bench::new(1 << 20, settings);
    let of = stored_tokens(&bench, TOKENS).await;
    bench.idle().await;
    (bench, of)
}

/// Whether the last attend ran on this thread.
fn ran_here(bench: &Bench) -> bool {
    *bench.probe.attended_on.lock() == Some(thread::current().id())
}

// All tests have one thread, which asks; the device's is another.

#[tokio::test]
async fn a_small_attend_runs_on_the_thread_that_asks_and_is_counted_as_any() {
    let (bench, of) = bench_with(&[]).await;
    bench.service.attend_batch(&call(), batch(of, 1, None)).await.unwrap();
    assert!(ran_here(&bench));
    let page = bench.service.metrics().render_page();
    for counted in [
        "kvd_attend_seconds_count{device=\"0\"",
        "kvd_queue_seconds_count{kind=\"attend\"",
        "kvd_device_busy_seconds_total{kind=\"attend\"",
    ] {
        let (name, label) = counted.split_once('{').unwrap();
        let of_label = |line: &&str| line.starts_with(name) && line.contains(label);
        let line = page.lines().find(of_label).unwrap_or_else(|| panic!("{counted}: {page}"));
        assert!(line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 0.0, "{line}");
    }
    // A larger one is worth a thread of its own.
    let mut large = batch(of, MANY, None);
    (large.q_heads, large.q) = (MANY_HEADS, large.q.repeat(MANY_HEADS as usize).into());
    bench.service.attend_batch(&call(), large).await.unwrap();
    assert!(!ran_here(&bench));
}

#[tokio::test]
async fn an_attend_that_waits_for_others_to_come_runs_on_the_device() {
    let settings = [("device.merge_wait_us", "10"), ("device.merged_attends_max", "4")];
    let (bench, of) = bench_with(&settings).await;
    bench.service.attend_batch(&call(), batch(of, 1, None)).await.unwrap();
    assert!(!ran_here(&bench));
}

#[tokio::test]
async fn nothing_that_waits_is_passed() {
    let (bench, of) = bench_with(&[]).await;
    let go = bench.hold().await;
    let service = bench.service.clone();
    let first =
        tokio::spawn(async move { service.attend_batch(&call(), batch(of, 1, None)).await });
    bench.queued(1).await;
    let service = bench.service.clone();
    let ask = batch(of, 1, None);
    let second = tokio::spawn(async move { service.attend_batch(&stranger(), ask).await });
    bench.queued(2).await;
    assert_eq!(*bench.probe.slices.lock(), 0);
    drop(go);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert!(!ran_here(&bench));
    // And once it is idle again, they run here.
    bench.idle().await;
    bench.service.attend_batch(&call(), batch(of, 1, None)).await.unwrap();
    assert!(ran_here(&bench));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_while_a_caller_has_the_device_waits_and_is_served_after_it() {
    let (bench, of) = bench_with(&[]).await;
    let (go, gate) = mpsc::sync_channel(1);
    *bench.probe.next_slice.lock() = SliceEvent::Wait(gate);
    let service = bench.service.clone();
    let small = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(service.attend_batch(&call(), batch(of, 1, None))).map(|reply| reply.lse)
    });
    until(|| *bench.probe.slices.lock() == 1).await;
    let worker = bench.service.first_worker().clone();
    let other = tokio::spawn(async move { worker.run_closure(&stranger(), |_| Ok(7)).await });
    bench.queued(1).await;
    let attend = batch(of, 1, None);
    let service = bench.service.clone();
    let later = tokio::spawn(async move { service.attend_batch(&stranger(), attend).await });
    bench.queued(2).await;
    assert_eq!(*bench.probe.slices.lock(), 1);
    drop(go);
    let lse = small.join().unwrap().unwrap();
    assert_eq!(later.await.unwrap().unwrap().lse, lse);
    assert_eq!(other.await.unwrap().unwrap(), 7);
}

#[tokio::test]
async fn one_that_pauses_goes_on_in_the_queue_with_the_same_answer() {
    let (bench, of) = bench_with(&[]).await;
    let whole = bench.service.attend_batch(&call(), batch(of, 1, None)).await.unwrap();
    *bench.probe.next_slice.lock() = SliceEvent::Pause;
    let paused = bench.service.attend_batch(&call(), batch(of, 1, None)).await.unwrap();
    assert_eq!((paused.out, paused.lse), (whole.out, whole.lse));
    assert_eq!(*bench.probe.slices.lock(), 3);
    assert!(!ran_here(&bench));
}

#[tokio::test]
async fn a_deadline_that_has_passed_begins_nothing() {
    let (bench, of) = bench_with(&[]).await;
    let late = CallContext { deadline: Some(Instant::now()), ..call() };
    let error = bench.service.attend_batch(&late, batch(of, 1, None)).await.err().unwrap();
    assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
    assert_eq!(*bench.probe.slices.lock(), 0);
}

#[tokio::test]
async fn a_panic_there_ends_the_device_as_it_does_on_its_own_thread() {
    let (bench, of) = bench_with(&[]).await;
    *bench.probe.next_slice.lock() = SliceEvent::Panic;
    let error = bench.service.attend_batch(&call(), batch(of, 1, None)).await.err().unwrap();
    assert_eq!(error.code(), ErrorCode::DeviceFailed);
    assert!(bench.service.first_worker().has_failed() && !bench.service.is_ready());
    let after = bench.service.attend_batch(&call(), batch(of, 1, None)).await.err().unwrap();
    assert_eq!(after.code(), ErrorCode::DeviceFailed);
    assert_eq!(*bench.probe.slices.lock(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_asks_again_and_again_delays_no_other_for_long() {
    let (bench, of) = bench_with(&[]).await;
    let service = bench.service.clone();
    let (stop, stopped) = mpsc::sync_channel::<()>(1);
    let flood = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            runtime.block_on(service.attend_batch(&call(), batch(of, 1, None))).unwrap();
        }
    });
    let began = Instant::now();
    for _ in 0..50 {
        bench.service.first_worker().run_closure(&stranger(), |_| Ok(())).await.unwrap();
    }
    // Of microseconds each, on a machine that does something else as well.
    assert!(began.elapsed() < Duration::from_secs(20));
    drop(stop);
    flood.join().unwrap();
}

#[tokio::test]
async fn connections_that_come_and_go_leave_no_trace() {
    let (bench, of) = bench_with(&[]).await;
    for _ in 0..100 {
        // Each is another connection.
        bench.service.attend_batch(&stranger(), batch(of, 1, None)).await.unwrap();
        assert!(ran_here(&bench));
    }
    assert_eq!(bench.service.first_worker().count_remembered(), 1);
}
