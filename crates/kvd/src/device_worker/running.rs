//! Whose job has the device, and who makes it pause: an attend of a namespace that has had less
//! than its share does not wait for another's slice to be over, but for a few pages of it.

use super::{JobQueue, WorkerState};
use crate::scheduler::{JobKind, JobTicket, RunningAttend};
use std::sync::atomic::Ordering;
use std::time::Instant;

impl WorkerState {
    /// Notes who takes the device out of the queue. Under its lock: who comes later is seen.
    pub(super) fn note_begin(&self, queue: &mut JobQueue, ticket: &JobTicket) {
        self.left.store(false, Ordering::Release);
        self.outrun.store(false, Ordering::Release);
        let namespace = || ticket.owner.namespace.clone();
        queue.running = (ticket.kind == JobKind::Attend)
            .then(|| RunningAttend { namespace: namespace(), began: Instant::now() });
    }

    /// Makes the attend that has the device pause, if one that is about to wait goes before it.
    pub(super) fn outrun_for(&self, queue: &JobQueue, coming: &JobTicket) {
        let running = queue.running.as_ref().filter(|_| queue.device.is_none());
        let Some(running) = running.filter(|_| coming.kind == JobKind::Attend) else { return };
        if queue.jobs.goes_before(&coming.owner, running) {
            self.outrun.store(true, Ordering::Release);
        }
    }
}
