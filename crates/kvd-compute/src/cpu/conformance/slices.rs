//! Attends in slices answer as those that are not cut, bit for bit, and end when they are told to.

use super::*;
use crate::{AttendTask, Slice, Stop, StopReason};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const ASK: Question = Question { group: 4, n_q: 64, position: 8192 - 64, window: None, cap: None };
/// A factor that takes scores out of the range of f32, so that rows are attended to again in f64.
const SCALE: f32 = 1e33;

/// A pause wherever there can be one: others always wait.
fn pausing() -> Stop {
    let slice = Slice { ends: Instant::now(), waiting: Arc::new(AtomicUsize::new(1)) };
    Stop { slice: Some(slice), ..Stop::never() }
}

fn flat(name: &str, scale: Option<f32>) -> (CpuBackend, AttendPlan) {
    let geometry = geometry(64);
    let (backend, parts) = filled(codec(&geometry, name), InputKind::Flat);
    let plan = AttendPlan { scale, ..plan(&geometry, &parts, InputKind::Flat, ASK) };
    (backend, plan)
}

#[test]
fn slices_answer_as_the_whole_with_others_between_them() {
    for (name, scale) in
        [("kivi-4", None), ("kvcomp", None), ("raw", Some(SCALE)), ("kivi-4", Some(SCALE))]
    {
        let (mut backend, plan) = flat(name, scale);
        let again = backend.with_job(&plan, attend::rows_again).unwrap();
        assert_eq!(again > 0, scale.is_some(), "{name}: {again} rows");
        let whole = backend.attend(&plan).unwrap();
        let short = AttendPlan { q: plan.q.slice(..plan.q.len() / 64), ..plan.clone() };
        let query = PlanQuery { n_q: 1, ..plan.queries[0].clone() };
        let short = AttendPlan { queries: vec![query], ..short };
        let alone = backend.attend(&short).unwrap();
        let (mut task, stop) = (AttendTask::new(plan), pausing());
        let mut slices = 1;
        let answer = loop {
            match backend.attend_slice(&mut task, &stop).unwrap() {
                Some(answer) => break answer,
                None => slices += 1,
            }
            let between = backend.attend(&short).unwrap();
            assert_eq!((&between.out, &between.lse), (&alone.out, &alone.lse), "{name}");
        };
        assert!(slices > 8, "{name}: {slices} slices");
        assert_eq!((answer.out, answer.lse), (whole.out, whole.lse), "{name}, {scale:?}");
        assert_eq!(answer.stored_bytes_read, whole.stored_bytes_read);
    }
}

#[test]
fn work_ends_in_either_pass_when_nobody_waits_or_the_deadline_passes() {
    for scale in [None, Some(SCALE)] {
        let (mut backend, plan) = flat("kivi-4", scale);
        let units = backend.with_job(&plan, |job| Ok(attend::units_of(job).len())).unwrap();
        let (mut task, stop) = (AttendTask::new(plan.clone()), pausing());
        // Past the first pass, if there is a second one.
        let slices = if scale.is_some() { units + 1 } else { 1 };
        for _ in 0..slices {
            assert!(backend.attend_slice(&mut task, &stop).unwrap().is_none());
        }
        stop.cancelled.store(true, Ordering::Release);
        let stopped = backend.attend_slice(&mut task, &stop).unwrap_err();
        assert!(matches!(stopped, BackendError::Stopped(StopReason::Cancelled)), "{stopped}");
        let late = Stop { deadline: Some(Instant::now()), ..Stop::never() };
        let stopped = backend.attend_slice(&mut AttendTask::new(plan), &late).unwrap_err();
        assert!(matches!(stopped, BackendError::Stopped(StopReason::DeadlinePassed)), "{stopped}");
    }
}

#[test]
fn a_unit_of_many_rows_is_short() {
    let (backend, plan) = flat("kivi-4", None);
    let parts = backend
        .with_job(&plan, |job| Ok(attend::units_of(job).iter().map(|unit| unit.parts.len()).max()))
        .unwrap();
    // 128 rows and a token's decoding, of 64 tokens a part, in 2^18.
    assert!(parts.unwrap() <= 28, "{parts:?}");
}
