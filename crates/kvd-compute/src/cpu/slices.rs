//! Attends in slices: what a processor keeps of one between two of them.

use super::attend::AttendProgress;
use super::{AskedPlan, CpuBackend, ScratchVec, first_non_finite};
use crate::{AttendPlan, AttendTask, Attended, BackendError, Stop};
use std::any::Any;

/// An attend between two slices.
struct UnderWay {
    /// The queries, widened.
    q: ScratchVec<f32>,
    attend: AttendProgress,
}

/// How far an attend has come.
struct TaskProgress {
    /// None before the first slice.
    under_way: Option<UnderWay>,
    /// Memory for the answer, until then.
    memory: Attended,
}

/// A plan's queries in f32.
///
/// # Errors
/// When one of them is not finite.
pub(super) fn widened_queries(plan: &AttendPlan) -> Result<ScratchVec<f32>, BackendError> {
    if let Some((index, value)) = first_non_finite(plan.dtype, &plan.q) {
        return Err(BackendError::NonFiniteQuery { index, value });
    }
    let mut q = ScratchVec::repeat_value(0f32, plan.q.len() / plan.dtype.size_bytes());
    plan.dtype.widen_values(&plan.q, &mut q);
    Ok(q)
}

/// Answers a plan at once.
pub(super) fn attend_whole(
    backend: &CpuBackend,
    plan: &AttendPlan,
) -> Result<Attended, BackendError> {
    let mut progress = TaskProgress { under_way: None, memory: Attended::default() };
    let stop = Stop::never();
    let asked = AskedPlan { plan, dropped: &[], q: &[] };
    loop {
        if let Some(attended) = go_on(backend, asked, &mut progress, &stop)? {
            return Ok(attended);
        }
    }
}

/// Goes on with a task until it is answered or its slice is over.
pub(super) fn attend_slice(
    backend: &CpuBackend,
    task: &mut AttendTask,
    stop: &Stop,
) -> Result<Option<Attended>, BackendError> {
    let known = task.under_way.take().and_then(|kept| kept.downcast::<UnderWay>().ok());
    let memory = std::mem::take(&mut task.memory);
    let mut progress = TaskProgress { under_way: known.map(|kept| *kept), memory };
    let asked = AskedPlan { plan: &task.plan, dropped: task.dropped_queries(), q: &[] };
    let attended = go_on(backend, asked, &mut progress, stop)?;
    task.under_way = progress.under_way.map(|kept| Box::new(kept) as Box<dyn Any + Send>);
    Ok(attended)
}

/// Goes on with a plan, whose queries are widened first.
fn go_on(
    backend: &CpuBackend,
    asked: AskedPlan<'_>,
    progress: &mut TaskProgress,
    stop: &Stop,
) -> Result<Option<Attended>, BackendError> {
    stop.check()?;
    let _scratch = backend.scratch.take_store();
    let kept = match progress.under_way.take() {
        Some(kept) => kept,
        None => {
            let q = widened_queries(asked.plan)?;
            let job = backend.new_job(AskedPlan { q: &q, ..asked }, stop)?;
            let attend = AttendProgress::in_memory(&job, std::mem::take(&mut progress.memory));
            UnderWay { q, attend }
        }
    };
    let UnderWay { q, mut attend } = kept;
    let job = backend.new_job(AskedPlan { q: &q, ..asked }, stop)?;
    let mut run = || {
        let _scratch = backend.scratch.take_store();
        attend.go_on(&job)
    };
    let is_done = if job.is_small { run() } else { backend.threads.install(run) }?;
    if is_done {
        return Ok(Some(attend.take_answer(&job)));
    }
    progress.under_way = Some(UnderWay { q, attend });
    Ok(None)
}
