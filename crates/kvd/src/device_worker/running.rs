//! Whose job has the device, and who makes it pause: an attend of a namespace that has had less
//! than its share does not wait for another's slice to be over, but for a few pages of it; and in
//! attention's turn no attend waits for more of a store or a step than a block or a layer.

use super::{JobQueue, WorkerState};
use crate::scheduler::{JobKind, JobTicket, RunningAttend};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The job that has the device, or had it last, as those that come look at it.
pub(super) enum RunningJob {
    Attend(RunningAttend),
    /// A short one, which brings at least a layer.
    Transfer,
    Other,
}

impl WorkerState {
    /// Notes who takes the device out of the queue. Under its lock: who comes later is seen.
    pub(super) fn note_begin(&self, queue: &mut JobQueue, ticket: &JobTicket) {
        self.left.store(false, Ordering::Release);
        self.outrun.store(false, Ordering::Release);
        queue.running = Some(match ticket.kind {
            JobKind::Attend => {
                let namespace = ticket.owner.namespace.clone();
                RunningJob::Attend(RunningAttend { namespace, began: Instant::now() })
            }
            JobKind::Transfer => RunningJob::Transfer,
            JobKind::Store | JobKind::Other | JobKind::AfterAll => RunningJob::Other,
        });
    }

    /// Makes the job that has the device pause, if an attend that is about to wait goes before it.
    pub(super) fn outrun_for(&self, queue: &JobQueue, coming: &JobTicket) {
        let is_attend = coming.kind == JobKind::Attend && queue.device.is_none();
        let goes_before = match queue.running.as_ref().filter(|_| is_attend) {
            Some(RunningJob::Attend(running)) => queue.jobs.goes_before(&coming.owner, running),
            Some(RunningJob::Other) => queue.jobs.attends_go_first(),
            Some(RunningJob::Transfer) | None => false,
        };
        if goes_before {
            self.outrun.store(true, Ordering::Release);
        }
    }

    /// Says how many jobs wait, to those that run.
    pub(super) fn count_waiting(&self, queue: &JobQueue) {
        let [attends, others] = queue.jobs.waiting_jobs();
        let all = attends + others;
        self.waiting.store(all, Ordering::Release);
        self.waiting_first.store(all - queue.jobs.waiting_transfers(), Ordering::Release);
        self.waiting_attends.store(attends, Ordering::Release);
    }
}
