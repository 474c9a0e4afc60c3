//! A device worker: the thread that owns one device, and the bounded queue in front of it.
//!
//! The worker's thread is the only caller of its [`Backend`]. Jobs run one after another, so bytes
//! written by one are visible to all later ones without a lock; in which order, the scheduler says
//! ([`crate::scheduler`]). An attend pauses after [`SLICE`] while others wait. A job whose caller
//! leaves is taken out of the queue at once, with all it holds; one that runs is told to stop. A
//! full queue is an answer, not a delay, except for messages of streams.

mod job;
mod thread;

pub(crate) use job::{Asked, Job, Work};
pub use thread::DeviceWorkerThread;

use crate::metrics::{DeviceMetrics, Metrics};
use crate::scheduler::{Kind, OwnerKey, Scheduler, Ticket, Waiting};
use crate::service::{Call, ServiceError};
use job::Custom;
use kvd_compute::{Backend, DeviceInfo};
use kvd_core::{ErrorCode, Namespace};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long an attend has the device while others wait for it.
pub const SLICE: Duration = Duration::from_millis(2);

/// The least and the most that a caller is told to wait before it asks again.
const RETRY_AFTER: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(5)];

/// Limits of a worker.
#[derive(Clone, Debug)]
pub struct WorkerLimits {
    /// Jobs of each kind that wait, those of streams aside.
    pub queue_jobs_max: usize,
    /// Shares of the device's time of namespaces that have another one than 1.
    pub weights: HashMap<Namespace, u32>,
}

/// Handle on a device's thread; clones share it.
#[derive(Clone)]
pub struct DeviceWorker {
    handles: Arc<Handles>,
    queue_jobs_max: usize,
    info: DeviceInfo,
    metrics: Arc<DeviceMetrics>,
}

/// All handles on a thread, which ends after the last of them.
struct Handles {
    shared: Arc<Shared>,
}

impl Drop for Handles {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

/// State that handles and thread share.
struct Shared {
    queue: Mutex<Queue>,
    /// Told when a job comes, and when the queue is closed.
    changed: Condvar,
    /// Jobs that wait: what a running attend looks at.
    waiting: Arc<AtomicUsize>,
    failed: AtomicBool,
    stopped: Arc<AtomicBool>,
}

/// Jobs that wait.
struct Queue {
    jobs: Scheduler<Entry>,
    /// Whether no more are taken.
    closed: bool,
    /// About how long a job takes, by kind.
    job_time: [Duration; 2],
}

/// A job with what is known of its caller.
struct Entry {
    job: Job,
    accepted: Instant,
    deadline: Option<Instant>,
    /// Set once its caller is gone.
    cancelled: Arc<AtomicBool>,
    /// Device time that it has had.
    cost: Duration,
}

impl Shared {
    /// Answers for jobs that come too late.
    fn closed(&self) -> ServiceError {
        // A thread that is gone without having been stopped is a failure as well.
        if self.failed.load(Ordering::Acquire) || !self.stopped.load(Ordering::Acquire) {
            return device_failed();
        }
        let message = "the daemon has stopped its device; retry on its successor";
        ServiceError::new(ErrorCode::ShuttingDown, message)
    }

    /// Says how many jobs wait, to those that run.
    fn count(&self, queue: &Queue) {
        self.waiting.store(queue.jobs.waiting().iter().sum(), Ordering::Release);
    }
}

fn device_failed() -> ServiceError {
    let message = "the device of this model has failed; the daemon must be started again";
    ServiceError::new(ErrorCode::DeviceFailed, message)
}

/// A job that was accepted. Dropped before its answer it takes the job back: out of the queue, or
/// by telling the device to stop.
struct Accepted<'a> {
    worker: &'a DeviceWorker,
    ticket: Ticket,
    cancelled: Arc<AtomicBool>,
    answered: bool,
}

impl Accepted<'_> {
    /// Takes the job out of the queue, if it waits there.
    fn withdraw(&self) -> Option<Waiting<Entry>> {
        let shared = &self.worker.handles.shared;
        let mut queue = shared.queue.lock();
        let taken = queue.jobs.remove(&self.ticket);
        shared.count(&queue);
        taken
    }
}

impl Drop for Accepted<'_> {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        self.cancelled.store(true, Ordering::Release);
        // Dropped without the lock: what it holds may take other locks.
        if let Some(Waiting { job, .. }) = self.withdraw() {
            let metrics = &self.worker.metrics;
            let begun = !job.cost.is_zero();
            if begun { &metrics.abandoned_during } else { &metrics.abandoned_before }.increment(1);
        }
    }
}

impl DeviceWorker {
    /// Starts the thread. `on_failure` runs once, on that thread, if the device fails.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(
        backend: Box<dyn Backend>,
        limits: WorkerLimits,
        metrics: &Metrics,
        on_failure: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<(Self, DeviceWorkerThread)> {
        let queue = Queue {
            jobs: Scheduler::new(limits.weights),
            closed: false,
            job_time: [Duration::ZERO; 2],
        };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            waiting: Arc::default(),
            failed: AtomicBool::new(false),
            stopped: Arc::default(),
        });
        let info = backend.info();
        let tier = if info.uuid.is_some() { "gpu" } else { "host" };
        let worker = Self {
            handles: Arc::new(Handles { shared: shared.clone() }),
            queue_jobs_max: limits.queue_jobs_max,
            info,
            metrics: Arc::new(metrics.add_device(tier)),
        };
        let thread = thread::start(backend, shared, worker.metrics.clone(), on_failure)?;
        Ok((worker, thread))
    }

    /// Description of the device.
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
        self.handles.shared.failed.load(Ordering::Acquire)
    }

    /// Jobs that wait: accepted and not begun, or paused.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued_by_kind().iter().sum()
    }

    /// Jobs that wait by kind, in the order of [`DeviceMetrics::KINDS`].
    pub(crate) fn queued_by_kind(&self) -> [usize; 2] {
        self.handles.shared.queue.lock().jobs.waiting()
    }

    /// Those of them that are messages of streams, which wait without a place.
    pub(crate) fn queued_stream_messages(&self) -> [usize; 2] {
        let queue = self.handles.shared.queue.lock();
        let (waiting, counted) = (queue.jobs.waiting(), queue.jobs.counted());
        [0, 1].map(|kind: usize| waiting[kind] - counted[kind])
    }

    /// Has work done on the device, and waits for what comes of it. Given up before the answer, it
    /// leaves the queue at once, or ends as soon as the device looks.
    ///
    /// # Errors
    /// `QUEUE_FULL`, `DEADLINE_EXCEEDED`, `DEVICE_FAILED`, `SHUTTING_DOWN` after
    /// [`DeviceWorkerThread::join`], or what the work answers.
    pub(crate) async fn ask<W>(&self, call: &Call, work: W) -> Result<W::Reply, ServiceError>
    where
        W: Work,
        Job: From<Asked<W>>,
    {
        call.check_deadline()?;
        let (reply, mut answer) = oneshot::channel();
        let kind = work.kind();
        let mut accepted = self.submit(call, kind, Asked { work, reply }.into())?;
        let closed = |_| Err(self.handles.shared.closed());
        let result = match call.deadline {
            None => answer.await.unwrap_or_else(closed),
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut answer).await {
                Ok(answer) => answer.unwrap_or_else(closed),
                // What waits is not begun; what has the device is told to stop, and says so.
                Err(_) if accepted.withdraw().is_some() => Err(Call::too_late()),
                Err(_) => answer.await.unwrap_or_else(closed),
            },
        };
        accepted.answered = true;
        result
    }

    /// Runs `work` on the device as a job of its own, for those who embed the daemon.
    ///
    /// # Errors
    /// As the daemon's own jobs, or what `work` answers.
    pub async fn run<T, F>(&self, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        self.run_as(Kind::Other, call, work).await
    }

    async fn run_as<T, F>(&self, kind: Kind, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        let work = move |backend: &mut dyn Backend| Ok(Box::new(work(backend)?) as Box<_>);
        let reply = self.ask(call, Custom { kind, work: Some(Box::new(work)) }).await?;
        let other = |_| ServiceError::new(ErrorCode::Internal, "a job answered another's question");
        reply.downcast().map(|reply| *reply).map_err(other)
    }

    /// Puts a job into the queue. Where no place is left, one is taken from the connection that has
    /// most, if that has more than this one's.
    fn submit(&self, call: &Call, kind: Kind, job: Job) -> Result<Accepted<'_>, ServiceError> {
        let shared = &self.handles.shared;
        let owner =
            OwnerKey { namespace: call.namespace.clone(), connection: call.owner.connection() };
        let cancelled = Arc::new(AtomicBool::new(false));
        let (accepted, deadline) = (Instant::now(), call.deadline);
        let cost = Duration::ZERO;
        let entry = Entry { job, accepted, deadline, cancelled: cancelled.clone(), cost };
        let mut queue = shared.queue.lock();
        if queue.closed || shared.failed.load(Ordering::Acquire) {
            return Err(shared.closed());
        }
        let is_counted = !call.waits_for_queue;
        let mut refused = None;
        if is_counted && queue.jobs.counted()[kind.index()] >= self.queue_jobs_max {
            refused = queue.jobs.take_from_most(kind, &owner);
            if refused.is_none() {
                return Err(self.queue_full(&queue, kind, &owner));
            }
        }
        let ticket = queue.jobs.ticket(kind, owner, is_counted);
        queue.jobs.push(ticket.clone(), entry);
        shared.count(&queue);
        let error = refused.as_ref().map(|of| self.queue_full(&queue, kind, &of.ticket.owner));
        drop(queue);
        shared.changed.notify_one();
        if let (Some(Waiting { job, .. }), Some(error)) = (refused, error) {
            job.job.refuse(error);
        }
        Ok(Accepted { worker: self, ticket, cancelled, answered: false })
    }

    /// The answer where no place is left, with the time that the caller's own jobs take about.
    fn queue_full(&self, queue: &Queue, kind: Kind, owner: &OwnerKey) -> ServiceError {
        let (max, own) = (self.queue_jobs_max, queue.jobs.count_for(kind, owner));
        let message = format!(
            "{max} jobs of this kind wait for the device already, {own} of them of this \
             connection; retry later or raise device.queue_jobs_max"
        );
        let jobs = u32::try_from(own).unwrap_or(u32::MAX).max(1);
        let wait = queue.job_time[kind.index()].saturating_mul(jobs);
        let wait = wait.clamp(RETRY_AFTER[0], RETRY_AFTER[1]);
        ServiceError::new(ErrorCode::QueueFull, message).retry_after(wait)
    }
}

#[cfg(test)]
mod tests;
