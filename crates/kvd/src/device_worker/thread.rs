//! The thread of a device worker: takes the next job, gives it the device, and says what became of
//! it.

use super::job::JobStep;
use super::{QueuedJob, SLICE, WorkerState};
use crate::metrics::DeviceMetrics;
use crate::scheduler::WaitingJob;
use kvd_compute::{Backend, Slice, Stop};
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

pub(super) fn start_thread(
    backend: Box<dyn Backend>,
    shared: Arc<WorkerState>,
    metrics: Arc<DeviceMetrics>,
    on_failure: impl FnOnce() + Send + 'static,
) -> std::io::Result<DeviceWorkerThread> {
    let (end, ended) = sync_channel::<()>(1);
    let weak = Arc::downgrade(&shared);
    let device = backend.info().description;
    let worker = WorkerThread { backend, shared, metrics, device };
    std::thread::Builder::new().name("kvd-device".to_owned()).spawn(move || {
        worker.run_jobs(on_failure);
        // Only now, when the device is given back.
        drop(end);
    })?;
    Ok(DeviceWorkerThread { ended, shared: weak })
}

struct WorkerThread {
    backend: Box<dyn Backend>,
    shared: Arc<WorkerState>,
    metrics: Arc<DeviceMetrics>,
    device: String,
}

impl WorkerThread {
    fn run_jobs(mut self, on_failure: impl FnOnce()) {
        let mut on_failure = Some(on_failure);
        while let Some(next) = self.next() {
            if self.serve_job(next) {
                continue;
            }
            self.shared.failed.store(true, Ordering::Release);
            self.refuse_all();
            if let Some(tell) = on_failure.take() {
                tell();
            }
        }
        self.shared.queue.lock().closed = true;
        self.refuse_all();
    }

    /// Waits for the next job; none when the thread is to end.
    fn next(&self) -> Option<WaitingJob<QueuedJob>> {
        let mut queue = self.shared.queue.lock();
        loop {
            if self.shared.stopped.load(Ordering::Acquire) {
                return None;
            }
            if let Some(next) = queue.jobs.next() {
                self.shared.count_waiting(&queue);
                return Some(next);
            }
            if queue.closed {
                return None;
            }
            self.shared.changed.wait(&mut queue);
        }
    }

    /// Answers all jobs that wait: they come too late.
    fn refuse_all(&self) {
        let mut queue = self.shared.queue.lock();
        let all = queue.jobs.remove_all();
        self.shared.count_waiting(&queue);
        drop(queue);
        all.into_iter().for_each(|waiting| waiting.job.job.refuse_job(self.shared.closed_error()));
    }

    /// Gives a job the device; false when that has failed.
    fn serve_job(&mut self, WaitingJob { ticket, job: mut entry }: WaitingJob<QueuedJob>) -> bool {
        let kind = ticket.kind.index();
        if entry.cost.is_zero() {
            let waited = entry.accepted.elapsed();
            self.metrics.queue_seconds[kind].record(waited.as_secs_f64());
        }
        let began = Instant::now();
        let stop = Stop {
            cancelled: entry.cancelled.clone(),
            shutting_down: self.shared.stopped.clone(),
            deadline: entry.deadline,
            slice: Some(Slice { ends: began + SLICE, waiting: self.shared.waiting.clone() }),
        };
        let (job, backend) = (entry.job, self.backend.as_mut());
        // After a panic the device's state is unknown, as after an error that sticks: it is never
        // called again.
        let ran = catch_unwind(AssertUnwindSafe(|| job.run_job(backend, &stop)));
        let took = began.elapsed();
        self.metrics.busy_seconds[kind].add_time(took);
        // Never nothing: a cost tells jobs that have begun.
        entry.cost += took.max(Duration::from_nanos(1));
        let mut queue = self.shared.queue.lock();
        queue.jobs.note_run(&ticket, took);
        let mut given_up = None;
        match ran {
            Ok(JobStep::Done { heard }) => {
                // The caller may have left meanwhile; the work stands all the same.
                self.metrics.abandoned_during.increment(u64::from(!heard));
                let mean = &mut queue.job_time[kind];
                *mean = (*mean * 7 + entry.cost) / 8;
            }
            Ok(JobStep::Paused(job)) => {
                let entry = QueuedJob { job, ..entry };
                // Whoever leaves looks for it under the same lock.
                if entry.cancelled.load(Ordering::Acquire) {
                    self.metrics.abandoned_during.increment(1);
                    given_up = Some(entry);
                } else {
                    queue.jobs.push(ticket, entry);
                }
                self.shared.count_waiting(&queue);
            }
            Err(_) => {
                let device = &self.device;
                tracing::error!(device, "a device job panicked; the device is called no more");
                return false;
            }
        }
        drop(queue);
        drop(given_up);
        match self.backend.failure() {
            None => true,
            Some(reason) => {
                let device = &self.device;
                tracing::error!(device, reason, "the device has failed; it is called no more");
                false
            }
        }
    }
}
