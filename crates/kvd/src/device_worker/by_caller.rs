//! Small attends on the thread that asks for them: where the device is idle and nothing waits, to
//! wake its own thread would take as long as the attend. The job has its ticket, its slice, its
//! deadline and its cost as any other; what comes meanwhile waits in the queue.
//!
//! A caller takes the device out of the queue under the queue's lock, where no job waits: so nobody
//! is passed, and jobs of a connection run in their order.

use super::job::record_cost;
use super::thread::{check_well, log_panic};
use super::{DeviceWork, DeviceWorker, SLICE, device_failed};
use crate::scheduler::JobTicket;
use crate::service::{CallContext, ServiceError};
use kvd_compute::{Backend, Slice, Stop};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// State of work that a caller wants to do itself.
pub(super) enum CallerStep<W: DeviceWork> {
    /// It is not small, or the device is not idle.
    NotRun(W),
    /// Its slice is over and others wait: it goes on in the queue.
    Paused { work: W, begun: BegunJob },
    /// It was answered.
    Done(Result<W::Reply, ServiceError>),
}

/// A job that has had the device.
pub(super) struct BegunJob {
    pub(super) ticket: JobTicket,
    pub(super) cost: Duration,
}

/// The device, taken for a job.
struct TakenDevice {
    backend: Box<dyn Backend>,
    ticket: JobTicket,
}

/// How a run has ended.
struct EndedRun {
    took: Duration,
    /// Whether the device may be called again.
    is_well: bool,
    /// Whether the job is over.
    is_done: bool,
}

impl DeviceWorker {
    /// Does work at once, on this thread, if it is small and the device is idle.
    pub(super) fn run_by_caller<W: DeviceWork>(
        &self,
        call: &CallContext,
        mut work: W,
    ) -> CallerStep<W> {
        let Some(TakenDevice { mut backend, ticket }) = self.take_device(call, &work) else {
            return CallerStep::NotRun(work);
        };
        let shared = &self.handles.shared;
        let kind = ticket.kind.index();
        self.metrics.queue_seconds[kind].record(0.0);
        let began = Instant::now();
        let stop = Stop {
            cancelled: shared.stays.clone(),
            shutting_down: shared.stopped.clone(),
            deadline: call.deadline,
            slice: Some(Slice { ends: began + SLICE, waiting: shared.waiting.clone() }),
            pause: None,
            outrun: shared.outrun.clone(),
        };
        // As on the device's thread.
        let ran = catch_unwind(AssertUnwindSafe(|| {
            stop.check().map_err(ServiceError::from)?;
            work.run_slice(backend.as_mut(), &stop)
        }));
        // Never nothing: a cost tells jobs that have begun.
        let took = began.elapsed().max(Duration::from_nanos(1));
        self.metrics.busy_seconds[kind].add_time(took);
        record_cost(&tracing::Span::current(), took);
        let device = &self.info.description;
        let is_well = match &ran {
            Ok(_) => check_well(backend.as_ref(), device),
            Err(_) => {
                log_panic(device);
                false
            }
        };
        let is_done = !matches!(ran, Ok(Ok(None)));
        let taken = TakenDevice { backend, ticket: ticket.clone() };
        self.give_back(taken, EndedRun { took, is_well, is_done });
        match ran {
            // What a failed device did in this job is not known to be done.
            _ if !is_well => CallerStep::Done(Err(device_failed())),
            Ok(Ok(Some(reply))) => {
                // What it holds is free before its caller asks for more.
                drop(work);
                CallerStep::Done(Ok(reply))
            }
            Ok(Err(error)) => CallerStep::Done(Err(error)),
            Ok(Ok(None)) => CallerStep::Paused { work, begun: BegunJob { ticket, cost: took } },
            Err(_) => CallerStep::Done(Err(device_failed())),
        }
    }

    /// Takes the device for small work, if nobody has it and nothing waits for it.
    fn take_device<W: DeviceWork>(&self, call: &CallContext, work: &W) -> Option<TakenDevice> {
        let plan = work.caller_plan().filter(|_| self.takes_callers)?;
        // A namespace that may have none waiting has none running either.
        self.check_quota(call, || 0).ok()?;
        let shared = &self.handles.shared;
        let mut queue = shared.queue.lock();
        let is_open = !queue.closed
            && !shared.stopped.load(Ordering::Acquire)
            && !shared.failed.load(Ordering::Acquire);
        if !is_open || queue.jobs.waiting_jobs() != [0, 0] {
            return None;
        }
        queue.device.as_ref().filter(|backend| backend.is_small_plan(plan))?;
        let backend = queue.device.take()?;
        queue.is_lent = true;
        queue.jobs.forget_served();
        let (owner, is_counted) = (Self::owner_of(call), !call.waits_for_queue);
        let ticket = queue.jobs.make_ticket(work.job_kind(), owner, is_counted);
        shared.note_begin(&mut queue, &ticket);
        Some(TakenDevice { backend, ticket })
    }

    /// Gives the device back, and wakes its thread if there is something for it to do.
    fn give_back(&self, taken: TakenDevice, ended: EndedRun) {
        let shared = &self.handles.shared;
        let TakenDevice { backend, ticket } = taken;
        let EndedRun { took, is_well, is_done } = ended;
        let mut queue = shared.queue.lock();
        queue.device = Some(backend);
        queue.is_lent = false;
        queue.jobs.note_run(&ticket, took);
        if is_done {
            queue.note_job_time(ticket.kind, took);
        }
        if !is_well {
            shared.failed.store(true, Ordering::Release);
        }
        let is_due = queue.closed
            || !is_well
            || shared.stopped.load(Ordering::Acquire)
            || queue.jobs.waiting_jobs() != [0, 0];
        drop(queue);
        if is_due {
            shared.changed.notify_one();
        }
    }
}
