//! A lane: the thread that owns one device, and the bounded queue in front of it.
//!
//! The lane thread is the only caller of its [`Backend`]. Jobs run one after another, so bytes
//! written by one are visible to all later ones without a lock: attention over what is stored
//! already goes ahead in its share of the time ([`crate::turns`]), others run in the order they
//! were accepted. A full queue is an answer, not a delay.

use crate::metrics::{DeviceMetrics, Metrics};
use crate::service::{Call, ServiceError};
use crate::turns::{Kind, Turns};
use kvd_compute::{Backend, DeviceInfo};
use kvd_core::ErrorCode;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// What the thread runs; `None` stands for a device that is called no more.
type Work = Box<dyn FnOnce(Option<&mut dyn Backend>) + Send>;

struct Job {
    kind: Kind,
    work: Work,
    /// Its place among those that wait; `None` for what only wakes the thread.
    place: Option<OwnedSemaphorePermit>,
}

/// Handle on a device's thread; clones share it.
#[derive(Clone)]
pub struct Lane {
    jobs: mpsc::Sender<Job>,
    /// Places that are free, of `queue_jobs_max` each: stores that wait refuse no attend.
    attend_places: Arc<Semaphore>,
    other_places: Arc<Semaphore>,
    queue_jobs_max: usize,
    state: Arc<State>,
    info: DeviceInfo,
    metrics: Arc<DeviceMetrics>,
}

/// Why the device is called no more.
#[derive(Default)]
struct State {
    failed: AtomicBool,
    stopped: AtomicBool,
}

impl State {
    /// What jobs are answered that come too late.
    fn closed(&self) -> ServiceError {
        // A thread that is gone without having been stopped is a failure as well.
        if self.failed.load(Ordering::Acquire) || !self.stopped.load(Ordering::Acquire) {
            return device_failed();
        }
        let message = "the daemon has stopped its device; retry on its successor";
        ServiceError::new(ErrorCode::ShuttingDown, message)
    }
}

fn device_failed() -> ServiceError {
    let message = "the device of this model has failed; the daemon must be started again";
    ServiceError::new(ErrorCode::DeviceFailed, message)
}

/// The thread itself. It ends when it is joined, or by itself after the last [`Lane`] is gone.
pub struct LaneThread {
    thread: JoinHandle<()>,
    /// Weak, so that this handle does not keep the thread alive.
    jobs: mpsc::WeakSender<Job>,
    state: Arc<State>,
}

impl LaneThread {
    /// Ends the lane, whoever still holds a [`Lane`]: the job that runs is finished, those that
    /// wait are answered `SHUTTING_DOWN`, and the device is given back.
    pub fn join(self) {
        self.state.stopped.store(true, Ordering::Release);
        if let Some(jobs) = self.jobs.upgrade() {
            // Wakes an idle thread; one that has ended needs none.
            let _ = jobs.try_send(Job { kind: Kind::Other, work: Box::new(|_| {}), place: None });
        }
        // A panic of a job was caught and logged; one of the loop itself has nobody left to tell.
        let _ = self.thread.join();
    }
}

impl Lane {
    /// Starts the thread. `on_failure` runs once, on the lane thread, if the device fails.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(
        backend: Box<dyn Backend>,
        queue_jobs_max: usize,
        metrics: &Metrics,
        on_failure: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<(Self, LaneThread)> {
        let (jobs, queue) = mpsc::channel(2 * queue_jobs_max + 1);
        let state = Arc::new(State::default());
        let info = backend.info();
        let device = info.description.clone();
        let tier = if info.uuid.is_some() { "gpu" } else { "host" };
        let lane = Self {
            jobs,
            attend_places: Arc::new(Semaphore::new(queue_jobs_max)),
            other_places: Arc::new(Semaphore::new(queue_jobs_max)),
            queue_jobs_max,
            state: state.clone(),
            info,
            metrics: Arc::new(metrics.add_device(tier)),
        };
        let (jobs, on_thread) = (lane.jobs.downgrade(), state.clone());
        let busy = lane.metrics.clone();
        let thread = std::thread::Builder::new()
            .name("kvd-lane".to_owned())
            .spawn(move || run(backend, (&device, &busy), queue, &on_thread, on_failure))?;
        Ok((lane, LaneThread { thread, jobs, state }))
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its handles of metrics.
    pub(crate) fn metrics(&self) -> &Arc<DeviceMetrics> {
        &self.metrics
    }

    /// Whether the device has failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.state.failed.load(Ordering::Acquire)
    }

    /// Jobs accepted and not yet begun.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued_by_kind().iter().sum()
    }

    /// The same by kind, in the order of [`DeviceMetrics::KINDS`].
    pub(crate) fn queued_by_kind(&self) -> [usize; 2] {
        [&self.attend_places, &self.other_places]
            .map(|free| self.queue_jobs_max - free.available_permits())
    }

    /// Runs `work` on the device after others that were accepted before, attends aside, and waits
    /// for its answer. Work that has begun is finished even if the caller goes away; work that has
    /// not is dropped.
    ///
    /// # Errors
    /// `QUEUE_FULL`, `DEADLINE_EXCEEDED` when the deadline passed before the work began,
    /// `DEVICE_FAILED`, `SHUTTING_DOWN` after [`LaneThread::join`], or what `work` answers.
    pub async fn run<T, F>(&self, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        self.run_as(Kind::Other, call, work).await
    }

    /// The same, ahead of others in its share of the device's time: for work that only reads what
    /// was readable when it was accepted.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub async fn attend<T, F>(&self, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        self.run_as(Kind::Attend, call, work).await
    }

    /// The same as [`Lane::run`], after every attend too that was accepted before.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub async fn run_after_all<T, F>(&self, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        self.run_as(Kind::AfterAll, call, work).await
    }

    fn queue_full(&self) -> ServiceError {
        let max = self.queue_jobs_max;
        let message = format!(
            "{max} jobs of this kind wait for the device already; retry later or raise \
             device.queue_jobs_max"
        );
        ServiceError::new(ErrorCode::QueueFull, message)
    }

    async fn run_as<T, F>(&self, kind: Kind, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        call.check_deadline()?;
        let (reply, answer) = oneshot::channel();
        let (accepted, call, metrics) = (Instant::now(), call.clone(), self.metrics.clone());
        let state = self.state.clone();
        let may_wait = call.waits_for_queue;
        let work: Work = Box::new(move |backend| {
            metrics.queue_seconds[index(kind)].record(accepted.elapsed().as_secs_f64());
            if reply.is_closed() {
                metrics.abandoned_before.increment(1);
                return;
            }
            let result = match backend {
                None => Err(state.closed()),
                Some(backend) => {
                    let result = call.check_deadline().and_then(|()| work(backend));
                    // What a failed device did in this job is not known to be done.
                    if backend.failure().is_some() { Err(device_failed()) } else { result }
                }
            };
            // The caller may have left meanwhile; the work stands all the same.
            if reply.send(result).is_err() {
                metrics.abandoned_during.increment(1);
            }
        });
        let places = match kind {
            Kind::Attend => &self.attend_places,
            Kind::Other | Kind::AfterAll => &self.other_places,
        };
        // Nobody closes it: what fails is that none is free.
        let place = if may_wait {
            places.clone().acquire_owned().await.map_err(|_| self.state.closed())?
        } else {
            places.clone().try_acquire_owned().map_err(|_| self.queue_full())?
        };
        let job = Job { kind, work, place: Some(place) };
        // Never full: every job has a place, and there is room for one that only wakes.
        self.jobs.try_send(job).map_err(|_| self.state.closed())?;
        answer.await.unwrap_or_else(|_| Err(self.state.closed()))
    }
}

/// Where a kind is in [`DeviceMetrics::KINDS`].
fn index(kind: Kind) -> usize {
    usize::from(kind != Kind::Attend)
}

fn run(
    mut backend: Box<dyn Backend>,
    (device, metrics): (&str, &DeviceMetrics),
    mut queue: mpsc::Receiver<Job>,
    state: &State,
    on_failure: impl FnOnce(),
) {
    let mut on_failure = Some(on_failure);
    let mut turns = Turns::new();
    loop {
        if turns.is_empty() {
            let Some(job) = queue.blocking_recv() else { return };
            turns.push(job.kind, job);
        }
        while let Ok(job) = queue.try_recv() {
            turns.push(job.kind, job);
        }
        let Some((kind, Job { work, place, .. })) = turns.next() else { return };
        // It waits no longer.
        drop(place);
        if state.stopped.load(Ordering::Acquire) {
            // Nothing new comes in; what waits is answered, and then the loop ends.
            queue.close();
            work(None);
            continue;
        }
        if state.failed.load(Ordering::Acquire) {
            work(None);
            continue;
        }
        let began = Instant::now();
        // After a panic the device's state is unknown, as after an error that sticks: it is never
        // called again.
        let ran = catch_unwind(AssertUnwindSafe(|| work(Some(backend.as_mut()))));
        let took = began.elapsed();
        metrics.busy_seconds[index(kind)].add(took);
        turns.ran(kind, took);
        match ran.map(|()| backend.failure()) {
            Ok(None) => continue,
            Ok(Some(reason)) => {
                tracing::error!(device, reason, "the device has failed; the lane is closed");
            }
            Err(_) => tracing::error!(device, "a device job panicked; the lane is closed"),
        }
        state.failed.store(true, Ordering::Release);
        if let Some(tell) = on_failure.take() {
            tell();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_compute::{CpuBackend, CpuOptions};
    use kvd_core::Namespace;
    use std::collections::VecDeque;
    use std::time::Duration;

    fn start() -> (Lane, LaneThread) {
        let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
        let backend = Box::new(CpuBackend::new(options).unwrap());
        Lane::start(backend, 2, &Metrics::new(), || {}).unwrap()
    }

    fn call() -> Call {
        Call {
            namespace: Namespace::new("default").unwrap(),
            deadline: None,
            waits_for_queue: false,
        }
    }

    /// Joins on a thread of its own; whether that ended in time.
    fn joins(thread: LaneThread) -> std::sync::mpsc::Receiver<()> {
        let (ended, end) = std::sync::mpsc::sync_channel(1);
        std::thread::spawn(move || {
            thread.join();
            ended.send(())
        });
        end
    }

    #[tokio::test]
    async fn an_idle_lane_ends_while_handles_remain_and_refuses_what_comes_after() {
        let (lane, thread) = start();
        assert_eq!(lane.run(&call(), |_| Ok(7)).await.unwrap(), 7);
        joins(thread).recv_timeout(Duration::from_secs(10)).expect("the lane ends");
        let late = lane.run(&call(), |_| Ok(7)).await.unwrap_err();
        assert_eq!(late.code(), ErrorCode::ShuttingDown);
        assert!(!lane.failed());
    }

    #[tokio::test]
    async fn attention_passes_other_jobs_that_wait_and_takes_a_place_as_they_do() {
        let (lane, _thread) = start();
        let (go, gate) = std::sync::mpsc::sync_channel::<()>(1);
        let (begun, has_begun) = oneshot::channel();
        let held = lane.clone();
        let running = tokio::spawn(async move {
            let work = move |_: &mut dyn Backend| {
                let _ = begun.send(());
                let _ = gate.recv();
                Ok(())
            };
            held.run(&call(), work).await
        });
        has_begun.await.unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = order.clone();
            move |_: &mut dyn Backend| {
                order.lock().push(name);
                Ok(())
            }
        };
        let (a, b) = (lane.clone(), lane.clone());
        let (store, attend) = (note("store"), note("attend"));
        let store = tokio::spawn(async move { a.run(&call(), store).await });
        while lane.queued() < 1 {
            tokio::task::yield_now().await;
        }
        let attend = tokio::spawn(async move { b.attend(&call(), attend).await });
        while lane.queued() < 2 {
            tokio::task::yield_now().await;
        }
        // Each kind has two places.
        let (c, d) = (lane.clone(), lane.clone());
        let (second, forget) = (note("second store"), note("too many"));
        let second = tokio::spawn(async move { c.run(&call(), second).await });
        while lane.queued() < 3 {
            tokio::task::yield_now().await;
        }
        let refused = d.run_after_all(&call(), forget).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::QueueFull);
        let (late, cancelled) = (lane.clone(), note("nobody waits for it"));
        let cancelled = tokio::spawn(async move { late.attend(&call(), cancelled).await });
        while lane.queued() < 4 {
            tokio::task::yield_now().await;
        }
        let refused = lane.attend(&call(), note("too many")).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::QueueFull);
        cancelled.abort();
        assert!(cancelled.await.unwrap_err().is_cancelled());
        go.send(()).unwrap();
        for job in [running, store, attend, second] {
            job.await.unwrap().unwrap();
        }
        assert_eq!(*order.lock(), ["attend", "store", "second store"]);
        assert_eq!(lane.queued(), 0);
    }

    #[tokio::test]
    async fn others_get_their_turn_while_attends_keep_coming() {
        let (lane, _thread) = start();
        let stored = Arc::new(AtomicBool::new(false));
        let (store, done) = (lane.clone(), stored.clone());
        let mut store = Some(tokio::spawn(async move {
            while store.queued() == 0 {
                tokio::task::yield_now().await;
            }
            let work = move |_: &mut dyn Backend| {
                done.store(true, Ordering::Release);
                Ok(())
            };
            store.run(&call(), work).await
        }));
        let slow = || {
            let lane = lane.clone();
            let work = |_: &mut dyn Backend| {
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            };
            tokio::spawn(async move { lane.attend(&call(), work).await })
        };
        // Two are always on their way, so that one waits whenever the lane looks.
        let mut under_way = VecDeque::from([slow(), slow()]);
        for _ in 0..10_000 {
            if stored.load(Ordering::Acquire) {
                break;
            }
            under_way.pop_front().unwrap().await.unwrap().unwrap();
            under_way.push_back(slow());
        }
        assert!(stored.load(Ordering::Acquire), "the store never ran");
        store.take().unwrap().await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stopping_finishes_the_running_job_and_answers_a_full_queue() {
        let (lane, thread) = start();
        let (begun, has_begun) = oneshot::channel();
        let (go, gate) = std::sync::mpsc::sync_channel::<()>(1);
        let job = |lane: Lane, work: Box<dyn FnOnce() -> u32 + Send>| {
            tokio::spawn(async move { lane.run(&call(), move |_| Ok(work())).await })
        };
        let running = job(
            lane.clone(),
            Box::new(move || {
                let _ = begun.send(());
                let _ = gate.recv();
                1
            }),
        );
        has_begun.await.unwrap();
        let waiting = [0, 1].map(|_| job(lane.clone(), Box::new(|| 2)));
        while lane.queued() < 2 {
            tokio::task::yield_now().await;
        }
        let end = joins(thread);
        while !lane.state.stopped.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        go.send(()).unwrap();
        end.recv_timeout(Duration::from_secs(10)).expect("the lane ends");
        assert_eq!(running.await.unwrap().unwrap(), 1);
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap().unwrap_err().code(), ErrorCode::ShuttingDown);
        }
    }
}
