//! The thread of a device worker: takes the next job, gives it the device, and says what became of
//! it.

use super::job::{JobStep, record_cost, record_wait};
use super::merged::{MergedStep, merge_jobs, mergeable_plan};
use super::{JobQueue, MergeLimits, QueuedJob, QueuedWork, SLICE, TRANSFER_SLICE, WorkerState};
use crate::metrics::DeviceMetrics;
use crate::scheduler::{JobKind, JobTicket, WaitingJob};
use kvd_compute::{AttendPlan, Backend, Slice, Stop, WantedPause, first_non_finite, shares_most};
use parking_lot::MutexGuard;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The thread itself. It ends when it is joined, or by itself after the last
/// [`DeviceWorker`](super::DeviceWorker) is gone.
pub struct DeviceWorkerThread {
    /// Told by its end that the thread has ended.
    pub(super) ended: Receiver<()>,
    /// Weak, so that this handle does not keep the thread's queue.
    shared: Weak<WorkerState>,
}

impl DeviceWorkerThread {
    /// Tells the thread to end: an attend that runs is stopped, any other job is finished, those
    /// that wait are answered `SHUTTING_DOWN`, and the device is given back.
    pub fn stop_thread(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.stopped.store(true, Ordering::Release);
            // Under the lock: the thread has not looked yet, or waits.
            drop(shared.queue.lock());
            shared.changed.notify_all();
        }
    }

    /// Stops the thread and waits for its end, for so long at most; whether it has ended. One that
    /// has not keeps its device until the process ends.
    #[must_use]
    pub fn join_thread(self, limit: Duration) -> bool {
        self.stop_thread();
        // The sender's end is the thread's.
        self.ended.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }
}

/// A thread to be.
pub(super) struct ThreadPlan {
    /// How attends are merged.
    pub(super) merging: MergeLimits,
    pub(super) shared: Arc<WorkerState>,
    pub(super) metrics: Arc<DeviceMetrics>,
    /// The device, in words.
    pub(super) device: String,
}

impl ThreadPlan {
    /// Starts the thread.
    pub(super) fn start_thread(
        self,
        on_failure: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<DeviceWorkerThread> {
        let (end, ended) = sync_channel::<()>(1);
        let weak = Arc::downgrade(&self.shared);
        let Self { merging, shared, metrics, device } = self;
        let worker =
            WorkerThread { backend: None, failure_told: false, merging, shared, metrics, device };
        std::thread::Builder::new().name("kvd-device".to_owned()).spawn(move || {
            worker.run_jobs(on_failure);
            // Only now, when the device is given back.
            drop(end);
        })?;
        Ok(DeviceWorkerThread { ended, shared: weak })
    }
}

impl WorkerState {
    /// The slice of a job that begins now.
    pub(super) fn slice_of(&self, kind: JobKind, began: Instant) -> Slice {
        let (time, waiting) = match kind {
            JobKind::Transfer => (TRANSFER_SLICE, &self.waiting_first),
            JobKind::Store => (SLICE, &self.waiting_attends),
            _ => (SLICE, &self.waiting),
        };
        Slice { ends: began + time, waiting: waiting.clone() }
    }

    /// The stop of a job that begins now, or goes on. A store that has begun does not end early.
    fn stop_of<W>(&self, ticket: &JobTicket, entry: &QueuedJob<W>, began: Instant) -> Stop {
        let slice = Some(self.slice_of(ticket.kind, began));
        let outrun = self.outrun.clone();
        if ticket.kind == JobKind::Store && !entry.cost.is_zero() {
            return Stop { slice, outrun, ..Stop::never() };
        }
        Stop {
            cancelled: entry.cancelled.clone(),
            shutting_down: self.stopped.clone(),
            deadline: entry.deadline,
            slice,
            pause: None,
            outrun,
        }
    }
}

struct WorkerThread {
    /// The device, while the thread works with it.
    backend: Option<Box<dyn Backend>>,
    failure_told: bool,
    merging: MergeLimits,
    shared: Arc<WorkerState>,
    metrics: Arc<DeviceMetrics>,
    device: String,
}

/// The thread's next step.
enum NextStep {
    Run(WaitingJob<QueuedJob>),
    /// The device has failed, and nobody was told so far.
    TellFailure,
    End,
}

impl WorkerThread {
    fn run_jobs(mut self, on_failure: impl FnOnce()) {
        let mut on_failure = Some(on_failure);
        loop {
            let WaitingJob { ticket, job: entry } = match self.next() {
                NextStep::Run(next) => next,
                NextStep::TellFailure => {
                    self.refuse_all();
                    if let Some(tell) = on_failure.take() {
                        tell();
                    }
                    continue;
                }
                NextStep::End => break,
            };
            let is_well = match entry.job {
                QueuedWork::Merged(_) => self.serve_merged(ticket, entry),
                QueuedWork::One(_) => self.serve_job(ticket, entry),
            };
            if !is_well {
                self.shared.failed.store(true, Ordering::Release);
            }
        }
        let mut queue = self.shared.queue.lock();
        queue.closed = true;
        self.backend = queue.device.take();
        drop(queue);
        self.refuse_all();
    }

    /// Waits for the next job, and merges those that go with it.
    fn next(&mut self) -> NextStep {
        loop {
            let mut queue = self.shared.queue.lock();
            queue.device = self.backend.take().or_else(|| queue.device.take());
            let next = loop {
                if !queue.is_lent {
                    if self.shared.stopped.load(Ordering::Acquire) {
                        let has_failed = self.shared.failed.load(Ordering::Acquire);
                        // Like any job that runs it is finished.
                        let begun = if has_failed { None } else { queue.jobs.take_begun() };
                        let Some(begun) = begun else { return NextStep::End };
                        break begun;
                    }
                    if self.shared.failed.load(Ordering::Acquire) && !self.failure_told {
                        self.failure_told = true;
                        return NextStep::TellFailure;
                    }
                    if let Some(next) = queue.jobs.next() {
                        break next;
                    }
                    if queue.closed {
                        return NextStep::End;
                    }
                }
                self.shared.changed.wait(&mut queue);
            };
            self.backend = queue.device.take();
            self.shared.note_begin(&mut queue, &next.ticket);
            let others = self.take_others(&mut queue, &next.job);
            self.shared.count_waiting(&queue);
            drop(queue);
            if others.is_empty() {
                return NextStep::Run(next);
            }
            if let Some(next) = self.merge_attends([next].into_iter().chain(others).collect()) {
                return NextStep::Run(next);
            }
        }
    }

    /// Takes attends that go in one pass with an attend out of the queue; none for other jobs.
    fn take_others(
        &self,
        queue: &mut MutexGuard<'_, JobQueue>,
        next: &QueuedJob,
    ) -> Vec<WaitingJob<QueuedJob>> {
        let MergeLimits { attends_max, wait } = self.merging;
        let shares = self.backend.as_ref().is_some_and(|backend| backend.shares_pages());
        let merges = attends_max > 1 && shares;
        let Some(plan) = mergeable_plan(next).filter(|_| merges) else { return Vec::new() };
        let until = next.accepted + wait;
        // Only for as long as it keeps nothing else from the device.
        while !wait.is_zero()
            && queue.jobs.waiting_jobs()[1] == 0
            && queue.jobs.waiting_jobs()[0] + 1 < attends_max
            && !self.shared.stopped.load(Ordering::Acquire)
            && !self.shared.changed.wait_until(queue, until).timed_out()
        {}
        let goes_with = |other: &AttendPlan| plan.asks_alike(other) && shares_most(plan, other);
        queue.jobs.take_attends(attends_max - 1, |job| mergeable_plan(job).is_some_and(goes_with))
    }

    /// Merges attends. One that asks for what is no number waits to be refused by itself.
    fn merge_attends(&self, jobs: Vec<WaitingJob<QueuedJob>>) -> Option<WaitingJob<QueuedJob>> {
        let is_finite = |waiting: &WaitingJob<QueuedJob>| {
            let plan = mergeable_plan(&waiting.job);
            plan.is_some_and(|plan| first_non_finite(plan.dtype, &plan.q).is_none())
        };
        let (finite, others): (Vec<_>, Vec<_>) = jobs.into_iter().partition(is_finite);
        let now = Instant::now();
        let merged = if finite.len() > 1 { finite.len() } else { 0 };
        self.metrics.merged_attends.increment(merged as u64);
        for waiting in finite.iter().take(merged) {
            let waited = now.saturating_duration_since(waiting.job.accepted);
            self.metrics.queue_seconds[0].record(waited.as_secs_f64());
            record_wait(&waiting.job.span, waited);
        }
        let mut all = merge_jobs(finite);
        all.extend(others.into_iter().map(|waiting| WaitingJob {
            job: QueuedJob { alone: true, ..waiting.job },
            ..waiting
        }));
        let mut all = all.into_iter();
        let next = all.next();
        self.put_back(all);
        next
    }

    /// Puts jobs into the queue again that were taken out.
    fn put_back(&self, jobs: impl Iterator<Item = WaitingJob<QueuedJob>>) {
        let mut left = Vec::new();
        let mut queue = self.shared.queue.lock();
        for waiting in jobs {
            // Whoever leaves looks for it under the same lock.
            if waiting.job.cancelled.load(Ordering::Acquire) {
                self.metrics.abandoned_before.increment(1);
                left.push(waiting);
            } else {
                queue.jobs.push(waiting.ticket, waiting.job);
            }
        }
        self.shared.count_waiting(&queue);
        drop(queue);
    }

    /// Answers all jobs that wait: they come too late.
    fn refuse_all(&self) {
        let mut queue = self.shared.queue.lock();
        let all = queue.jobs.remove_all();
        self.shared.count_waiting(&queue);
        drop(queue);
        all.into_iter().for_each(|waiting| waiting.job.job.refuse_work(self.shared.closed_error()));
    }

    /// Gives a job the device; false when that has failed.
    fn serve_job(&mut self, ticket: JobTicket, entry: QueuedJob) -> bool {
        let (mut entry, QueuedWork::One(job)) = entry.swap_work(()) else { return true };
        let kind = ticket.kind.index();
        if entry.cost.is_zero() {
            let waited = entry.accepted.elapsed();
            self.metrics.queue_seconds[kind].record(waited.as_secs_f64());
            record_wait(&entry.span, waited);
        }
        let began = Instant::now();
        let stop = self.shared.stop_of(&ticket, &entry, began);
        let Some(backend) = self.backend.as_deref_mut() else { return false };
        // After a panic the device's state is unknown, as after an error that sticks: it is never
        // called again.
        let ran = catch_unwind(AssertUnwindSafe(|| job.run_job(backend, &stop)));
        let took = began.elapsed();
        self.metrics.busy_seconds[kind].add_time(took);
        // Never nothing: a cost tells jobs that have begun.
        entry.cost += took.max(Duration::from_nanos(1));
        record_cost(&entry.span, entry.cost);
        let mut queue = self.shared.queue.lock();
        queue.jobs.note_run(&ticket, took);
        let mut given_up = None;
        match ran {
            Ok(JobStep::Done { heard }) => {
                // The caller may have left meanwhile; the work stands all the same.
                self.metrics.abandoned_during.increment(u64::from(!heard));
                queue.note_job_time(ticket.kind, entry.cost);
            }
            Ok(JobStep::Paused(job)) => {
                let goes_first = job.goes_on_first();
                let (entry, ()) = entry.swap_work(QueuedWork::One(job));
                let is_finished = ticket.kind == JobKind::Store;
                // Whoever leaves looks for it under the same lock.
                if entry.cancelled.load(Ordering::Acquire) && !is_finished {
                    self.metrics.abandoned_during.increment(1);
                    given_up = Some(entry);
                } else if goes_first {
                    queue.jobs.keep_begun(ticket, entry);
                } else {
                    queue.jobs.push(ticket, entry);
                }
                self.shared.count_waiting(&queue);
            }
            Err(_) => return self.note_panic(),
        }
        drop(queue);
        drop(given_up);
        self.is_well()
    }

    /// Gives merged attends the device; false when that has failed.
    fn serve_merged(&mut self, ticket: JobTicket, entry: QueuedJob) -> bool {
        let (entry, QueuedWork::Merged(merged)) = entry.swap_work(()) else { return true };
        let began = Instant::now();
        let wanted = self.shared.left.clone();
        let stop = Stop {
            cancelled: entry.cancelled.clone(),
            shutting_down: self.shared.stopped.clone(),
            deadline: None,
            slice: Some(Slice { ends: began + SLICE, waiting: self.shared.waiting.clone() }),
            pause: Some(WantedPause { wanted, at: merged.first_deadline() }),
            outrun: self.shared.outrun.clone(),
        };
        let (shares, members) = (merged.each_share(), merged.count_members());
        let Some(backend) = self.backend.as_deref_mut() else { return false };
        let ran = catch_unwind(AssertUnwindSafe(|| merged.run_merged(backend, &stop)));
        let took = began.elapsed();
        self.metrics.busy_seconds[0].add_time(took);
        let cost = entry.cost + took;
        let mut queue = self.shared.queue.lock();
        for share in shares {
            queue.jobs.note_run(&share.ticket, took.mul_f64(share.part));
        }
        match ran {
            Ok(MergedStep::Done { unheard }) => {
                self.metrics.abandoned_during.increment(unheard);
                let members = u32::try_from(members).unwrap_or(u32::MAX);
                queue.note_job_time(ticket.kind, cost / members);
            }
            Ok(MergedStep::Paused(merged)) => {
                let (entry, ()) = entry.swap_work(QueuedWork::Merged(merged));
                queue.jobs.push(ticket, QueuedJob { cost, ..entry });
                self.shared.count_waiting(&queue);
            }
            Ok(MergedStep::Apart { jobs, unheard }) => {
                self.metrics.abandoned_during.increment(unheard);
                drop(queue);
                self.put_back(jobs.into_iter());
                return self.is_well();
            }
            Err(_) => return self.note_panic(),
        }
        drop(queue);
        self.is_well()
    }

    fn note_panic(&self) -> bool {
        log_panic(&self.device);
        false
    }

    /// Whether the device may be called again.
    fn is_well(&self) -> bool {
        self.backend.as_deref().is_some_and(|backend| check_well(backend, &self.device))
    }
}

/// Logs that a job panicked.
pub(super) fn log_panic(device: &str) {
    tracing::error!(device, "a device job panicked; the device is called no more");
}

/// Whether a device may be called again; says so where not.
pub(super) fn check_well(backend: &dyn Backend, device: &str) -> bool {
    match backend.failure() {
        None => true,
        Some(reason) => {
            tracing::error!(device, reason, "the device has failed; it is called no more");
            false
        }
    }
}
