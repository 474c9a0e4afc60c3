//! A device worker: the thread of one device, and the bounded queue in front of it.
//!
//! Who has the device's [`Backend`] is its only caller: the worker's thread or, for a small attend
//! that finds the device idle and nothing waiting, the thread that asks for it (`by_caller`). Jobs
//! run one after another, so bytes written by one are visible to all later ones; in which order,
//! the scheduler says ([`crate::scheduler`]). An attend pauses after [`SLICE`] while others wait,
//! and at once for a namespace that has had less, a store at once for attends (`running`). A job
//! whose caller leaves is taken out of the queue at once; one that runs is told to stop, a store
//! that has begun is finished. A full queue is an answer, except for messages of streams. Attends
//! that read mostly the same pages go in one pass (`merged`).

mod accepted;
mod by_caller;
mod job;
mod merged;
mod running;
mod thread;

pub(crate) use accepted::AcceptedJob;
pub(crate) use job::{AskedWork, DeviceJob, DeviceWork, JobCaller};
pub use thread::DeviceWorkerThread;

use crate::metrics::{DeviceMetrics, Metrics};
use crate::scheduler::{JobKind, JobScheduler, OwnerKey, WaitingJob};
use crate::service::{CallContext, ServiceError};
use by_caller::{BegunJob, CallerStep};
use job::CustomJob;
use kvd_compute::{Backend, DeviceInfo};
use kvd_core::{ErrorCode, Namespace};
use kvd_store::{QuotaKind, QuotaTable};
use merged::MergedAttends;
use parking_lot::{Condvar, Mutex};
use running::RunningJob;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long an attend has the device while others wait for it.
pub const SLICE: Duration = Duration::from_millis(2);

/// How long a transfer has the device while others than transfers wait for it.
const TRANSFER_SLICE: Duration = Duration::from_micros(250);

/// The least and the most that a caller is told to wait before it asks again.
const RETRY_AFTER: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(5)];

/// Limits of a worker.
#[derive(Clone, Debug)]
pub struct WorkerLimits {
    /// Jobs of each kind that wait, those of streams aside.
    pub queue_jobs_max: usize,
    /// How attends are merged.
    pub merging: MergeLimits,
    /// Jobs that wait of single namespaces, and their shares of the device's time.
    pub quotas: Arc<QuotaTable>,
}

/// Limits of merging attends of several callers into one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeLimits {
    /// Attends of a pass; 1 for no merging.
    pub attends_max: usize,
    /// How long an attend that nothing waits beside is held back for others to come.
    pub wait: Duration,
}

/// Handle on a device's thread; clones share it.
#[derive(Clone)]
pub struct DeviceWorker {
    handles: Arc<WorkerHandles>,
    queue_jobs_max: usize,
    quotas: Arc<QuotaTable>,
    info: DeviceInfo,
    metrics: Arc<DeviceMetrics>,
    /// Whether small attends may run on the thread that asks for them.
    takes_callers: bool,
}

/// All handles on a thread, which ends after the last of them.
struct WorkerHandles {
    shared: Arc<WorkerState>,
}

impl Drop for WorkerHandles {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

/// State that handles and thread share.
struct WorkerState {
    queue: Mutex<JobQueue>,
    /// Told when a job comes, and when the queue is closed.
    changed: Condvar,
    /// Jobs that wait: what a running attend looks at.
    waiting: Arc<AtomicUsize>,
    /// Those of them that are no transfers: what a running transfer looks at.
    waiting_first: Arc<AtomicUsize>,
    /// Those that are attends: what a running store looks at.
    waiting_attends: Arc<AtomicUsize>,
    /// Set when a caller leaves: what merged attends look at.
    left: Arc<AtomicBool>,
    /// Set when an attend comes that goes before the job that has the device.
    outrun: Arc<AtomicBool>,
    failed: AtomicBool,
    stopped: Arc<AtomicBool>,
    /// Never set: of jobs whose caller cannot leave while they run.
    stays: Arc<AtomicBool>,
}

/// Jobs that wait.
struct JobQueue {
    jobs: JobScheduler<QueuedJob>,
    /// The device, while nobody works with it: whoever takes it out does, alone.
    device: Option<Box<dyn Backend>>,
    /// Whether a caller has taken it, who looks after the thread when it gives it back.
    is_lent: bool,
    /// The job that has the device, or had it last.
    running: Option<RunningJob>,
    /// Whether no more are taken.
    closed: bool,
    /// About how long a job takes, by kind.
    job_time: [Duration; 2],
}

impl JobQueue {
    /// Notes how long a job has taken in all.
    fn note_job_time(&mut self, kind: JobKind, cost: Duration) {
        let mean = &mut self.job_time[kind.index()];
        *mean = (*mean * 7 + cost) / 8;
    }
}

/// A job with what is known of its caller.
struct QueuedJob<W = QueuedWork> {
    job: W,
    accepted: Instant,
    deadline: Option<Instant>,
    /// Set once its caller is gone.
    cancelled: Arc<AtomicBool>,
    /// Device time that it has had.
    cost: Duration,
    /// Whether it is not to be merged with others.
    alone: bool,
    /// The span of its call, which says how long it waited and had the device.
    span: tracing::Span,
}

/// Work of an entry of the queue.
enum QueuedWork {
    One(DeviceJob),
    Merged(Box<MergedAttends>),
}

impl QueuedWork {
    /// Answers whoever waits for it without having run it to its end.
    fn refuse_work(self, error: ServiceError) {
        match self {
            Self::One(job) => job.refuse_job(error),
            Self::Merged(mut merged) => merged.refuse_all(&error),
        }
    }
}

impl QueuedJob {
    /// Answers whoever waits for it with the error, and gives that back.
    fn refuse_entry(self, error: ServiceError) -> ServiceError {
        self.job.refuse_work(error.clone());
        error
    }
}

impl<W> QueuedJob<W> {
    fn new(job: W, deadline: Option<Instant>) -> Self {
        let (accepted, cancelled) = (Instant::now(), Arc::default());
        let span = tracing::Span::current();
        Self { job, accepted, deadline, cancelled, cost: Duration::ZERO, alone: false, span }
    }

    /// The entry with other work, and the work that it had.
    fn swap_work<T>(self, job: T) -> (QueuedJob<T>, W) {
        let Self { job: old, accepted, deadline, cancelled, cost, alone, span } = self;
        (QueuedJob { job, accepted, deadline, cancelled, cost, alone, span }, old)
    }
}

impl WorkerState {
    /// Answers for jobs that come too late.
    fn closed_error(&self) -> ServiceError {
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

impl DeviceWorker {
    /// Starts the thread. `on_failure` runs once, on that thread, if the device fails.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start_thread(
        backend: Box<dyn Backend>,
        limits: WorkerLimits,
        metrics: &Metrics,
        on_failure: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<(Self, DeviceWorkerThread)> {
        let info = backend.info();
        let tier = if info.uuid.is_some() { "gpu" } else { "host" };
        let MergeLimits { attends_max, wait } = limits.merging;
        // Where attends are held back for others to come, all go through the queue.
        let holds_back = attends_max > 1 && !wait.is_zero();
        let queue = JobQueue {
            jobs: JobScheduler::new(limits.quotas.clone()),
            device: Some(backend),
            is_lent: false,
            running: None,
            closed: false,
            job_time: [Duration::ZERO; 2],
        };
        let shared = Arc::new(WorkerState {
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            waiting: Arc::default(),
            waiting_first: Arc::default(),
            waiting_attends: Arc::default(),
            left: Arc::default(),
            outrun: Arc::default(),
            failed: AtomicBool::new(false),
            stopped: Arc::default(),
            stays: Arc::default(),
        });
        let worker = Self {
            handles: Arc::new(WorkerHandles { shared: shared.clone() }),
            queue_jobs_max: limits.queue_jobs_max,
            quotas: limits.quotas,
            info,
            metrics: Arc::new(metrics.add_device(tier)),
            takes_callers: !holds_back,
        };
        let thread = thread::ThreadPlan {
            merging: limits.merging,
            shared,
            metrics: worker.metrics.clone(),
            device: worker.info.description.clone(),
        };
        let thread = thread.start_thread(on_failure)?;
        Ok((worker, thread))
    }

    /// Description of the device.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Metrics of the device.
    pub(crate) fn metrics(&self) -> &Arc<DeviceMetrics> {
        &self.metrics
    }

    /// Whether the device has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.handles.shared.failed.load(Ordering::Acquire)
    }

    /// Whether nothing waits and nobody has the device.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.handles.shared.queue.lock();
        queue.device.is_some() && queue.jobs.waiting_jobs() == [0, 0]
    }

    /// Connections that the queue remembers for what their attends took.
    #[cfg(test)]
    pub(crate) fn count_remembered(&self) -> usize {
        self.handles.shared.queue.lock().jobs.count_remembered()
    }

    /// Jobs that wait: accepted and not begun, or paused.
    #[must_use]
    pub fn queued_jobs(&self) -> usize {
        self.queued_by_kind().iter().sum()
    }

    /// Jobs that wait by kind, in the order of [`DeviceMetrics::KINDS`].
    pub(crate) fn queued_by_kind(&self) -> [usize; 2] {
        self.handles.shared.queue.lock().jobs.waiting_jobs()
    }

    /// Jobs that wait and are messages of streams, by kind: they wait without a place.
    pub(crate) fn queued_stream_messages(&self) -> [usize; 2] {
        self.handles.shared.queue.lock().jobs.uncounted_jobs()
    }

    /// Jobs of a namespace that have a place in the queue; of the kind that has more.
    pub(crate) fn queued_of(&self, namespace: &Namespace) -> usize {
        let queue = self.handles.shared.queue.lock();
        let count = |kind| queue.jobs.count_for_namespace(kind, namespace);
        count(JobKind::Attend).max(count(JobKind::Other))
    }

    /// Has work done on the device, and waits for what comes of it. Given up before the answer, it
    /// leaves the queue at once, or ends as soon as the device looks.
    ///
    /// # Errors
    /// `QUEUE_FULL`, `DEADLINE_EXCEEDED`, `DEVICE_FAILED`, `SHUTTING_DOWN` after
    /// [`DeviceWorkerThread::join_thread`], or what the work answers.
    pub(crate) async fn ask_device<W>(
        &self,
        call: &CallContext,
        work: W,
    ) -> Result<W::Reply, ServiceError>
    where
        W: DeviceWork,
        DeviceJob: From<AskedWork<W>>,
    {
        call.check_deadline()?;
        let (work, begun) = match self.run_by_caller(call, work) {
            CallerStep::Done(result) => return result,
            CallerStep::NotRun(work) => (work, None),
            CallerStep::Paused { work, begun } => (work, Some(begun)),
        };
        let (reply, mut answer) = oneshot::channel();
        let kind = work.job_kind();
        let job = AskedWork { work, caller: JobCaller::Task(reply) }.into();
        let mut accepted = self.submit_job(call, kind, job, begun)?;
        let closed = |_| Err(self.handles.shared.closed_error());
        let result = match call.deadline {
            None => answer.await.unwrap_or_else(closed),
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut answer).await {
                Ok(answer) => answer.unwrap_or_else(closed),
                // What waits is not begun; what has the device is told to stop, and says so.
                Err(_) if accepted.withdraw_job().is_some() => Err(CallContext::too_late()),
                Err(_) => answer.await.unwrap_or_else(closed),
            },
        };
        accepted.answered = true;
        result
    }

    /// Has work done on the device for a caller that is told of it, also where it is refused. The
    /// job, if it waits: who drops it before its answer takes it back.
    pub(crate) fn tell_device<W>(
        &self,
        call: &CallContext,
        work: W,
        tell: impl FnOnce(Result<W::Reply, ServiceError>) -> bool + Send + 'static,
    ) -> Option<AcceptedJob>
    where
        W: DeviceWork,
        DeviceJob: From<AskedWork<W>>,
    {
        let (work, begun) = match self.run_by_caller(call, work) {
            CallerStep::Done(result) => {
                self.metrics.abandoned_during.increment(u64::from(!tell(result)));
                return None;
            }
            CallerStep::NotRun(work) => (work, None),
            CallerStep::Paused { work, begun } => (work, Some(begun)),
        };
        let kind = work.job_kind();
        let job = AskedWork { work, caller: JobCaller::Told(Box::new(tell)) }.into();
        // The caller was told of an error already.
        self.submit_job(call, kind, job, begun).ok()
    }

    /// Runs `work` on the device as a job of its own, for those who embed the daemon.
    ///
    /// # Errors
    /// As the daemon's own jobs, or what `work` answers.
    pub async fn run_closure<T, F>(&self, call: &CallContext, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        self.run_as(JobKind::Other, call, work).await
    }

    async fn run_as<T, F>(
        &self,
        kind: JobKind,
        call: &CallContext,
        work: F,
    ) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        let work = move |backend: &mut dyn Backend| Ok(Box::new(work(backend)?) as Box<_>);
        let reply = self.ask_device(call, CustomJob { kind, work: Some(Box::new(work)) }).await?;
        let other = |_| ServiceError::new(ErrorCode::Internal, "a job answered another's question");
        reply.downcast().map(|reply| *reply).map_err(other)
    }

    /// Whose job it is.
    fn owner_of(call: &CallContext) -> OwnerKey {
        let connection = call.owner.connection_number();
        OwnerKey { namespace: call.namespace.clone(), connection }
    }

    /// Whether the namespace may have one more job in the queue beside those that it has.
    fn check_quota(
        &self,
        call: &CallContext,
        has: impl FnOnce() -> usize,
    ) -> Result<(), ServiceError> {
        let account = self.quotas.find_account(&call.namespace);
        let account = account.filter(|of| of.limit_of(QuotaKind::QueueJobs).is_some());
        match account {
            Some(account) => Ok(account.check_room(QuotaKind::QueueJobs, has() as u64, 1)?),
            None => Ok(()),
        }
    }

    /// Puts a job into the queue. Where no place is left, one is taken from the connection that has
    /// most, if that has more than this one's; what has begun goes on wherever.
    fn submit_job(
        &self,
        call: &CallContext,
        kind: JobKind,
        job: DeviceJob,
        begun: Option<BegunJob>,
    ) -> Result<AcceptedJob, ServiceError> {
        let shared = &self.handles.shared;
        let mut entry = QueuedJob::new(QueuedWork::One(job), call.deadline);
        let cancelled = entry.cancelled.clone();
        let mut queue = shared.queue.lock();
        if queue.closed || shared.failed.load(Ordering::Acquire) {
            drop(queue);
            return Err(entry.refuse_entry(shared.closed_error()));
        }
        let mut refused = None;
        let ticket = match begun {
            Some(BegunJob { ticket, cost }) => {
                entry.cost = cost;
                ticket
            }
            None => {
                let (owner, is_counted) = (Self::owner_of(call), !call.waits_for_queue);
                let own = || queue.jobs.count_for_namespace(kind, &call.namespace);
                if is_counted && let Err(error) = self.check_quota(call, own) {
                    drop(queue);
                    return Err(entry.refuse_entry(error));
                }
                if is_counted && queue.jobs.counted_jobs()[kind.index()] >= self.queue_jobs_max {
                    refused = queue.jobs.take_from_most(kind, &owner);
                    if refused.is_none() {
                        let error = self.queue_full(&queue, kind, &owner);
                        drop(queue);
                        return Err(entry.refuse_entry(error));
                    }
                }
                queue.jobs.make_ticket(kind, owner, is_counted)
            }
        };
        shared.outrun_for(&queue, &ticket);
        queue.jobs.push(ticket.clone(), entry);
        shared.count_waiting(&queue);
        let error = refused.as_ref().map(|of| self.queue_full(&queue, kind, &of.ticket.owner));
        let is_lent = queue.is_lent;
        drop(queue);
        if !is_lent {
            shared.changed.notify_one();
        }
        if let (Some(WaitingJob { job, .. }), Some(error)) = (refused, error) {
            job.job.refuse_work(error);
        }
        let (handles, metrics) = (self.handles.clone(), self.metrics.clone());
        Ok(AcceptedJob { handles, metrics, ticket, cancelled, answered: false })
    }

    /// The answer where no place is left, with the time that the caller's own jobs take about.
    fn queue_full(&self, queue: &JobQueue, kind: JobKind, owner: &OwnerKey) -> ServiceError {
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
