//! A job in a queue or on the device, as its caller holds it.

use super::{QueuedJob, QueuedWork, WorkerHandles};
use crate::metrics::DeviceMetrics;
use crate::scheduler::{JobTicket, WaitingJob};
use crate::service::CallContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A job that was accepted. Dropped before its answer it takes the job back: out of the queue, or
/// by telling the device to stop.
pub(crate) struct AcceptedJob {
    pub(super) handles: Arc<WorkerHandles>,
    pub(super) metrics: Arc<DeviceMetrics>,
    pub(super) ticket: JobTicket,
    pub(super) cancelled: Arc<AtomicBool>,
    pub(super) answered: bool,
}

impl AcceptedJob {
    /// Notes that it was answered: there is nothing to take back.
    pub(crate) fn note_answer(mut self) {
        self.answered = true;
    }

    /// Takes the job out of the queue, if it waits there, and tells its caller that it is too late.
    /// One that has the device is told to stop by its deadline, and says so itself.
    pub(crate) fn expire_job(&self) {
        if let Some(WaitingJob { job, .. }) = self.withdraw_job() {
            self.metrics.abandoned_before.increment(1);
            job.job.refuse_work(CallContext::too_late());
        }
    }

    /// Takes the job out of the queue, if it waits there; not out of a pass of several, and not a
    /// store that has begun.
    pub(super) fn withdraw_job(&self) -> Option<WaitingJob<QueuedJob>> {
        let shared = &self.handles.shared;
        let mut queue = shared.queue.lock();
        let taken = match queue.jobs.remove(&self.ticket) {
            Some(WaitingJob { ticket, job }) if matches!(job.job, QueuedWork::Merged(_)) => {
                queue.jobs.push(ticket, job);
                None
            }
            taken => taken,
        };
        shared.count_waiting(&queue);
        taken
    }
}

impl Drop for AcceptedJob {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        self.cancelled.store(true, Ordering::Release);
        self.handles.shared.left.store(true, Ordering::Release);
        // Dropped without the lock: what it holds may take other locks.
        if let Some(WaitingJob { job, .. }) = self.withdraw_job() {
            let metrics = &self.metrics;
            let begun = !job.cost.is_zero();
            if begun { &metrics.abandoned_during } else { &metrics.abandoned_before }.increment(1);
        }
    }
}
