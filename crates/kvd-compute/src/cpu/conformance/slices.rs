//! Attends in slices answer as those that are not cut, bit for bit, and end when they are told to.

use super::*;
use crate::cpu::piece_stop::looks::{LookHook, set_hook};
use crate::{AttendTask, Attended, Slice, Stop, StopReason};
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

/// A question of 64 tokens as so many queries of one token over the same parts: one pass reads
/// those for all of them.
fn merged(plan: AttendPlan) -> AttendPlan {
    let query =
        |token: u32| PlanQuery { n_q: 1, position: 8191 - token, ..plan.queries[0].clone() };
    AttendPlan { queries: (0..64).map(query).collect(), ..plan }
}

#[test]
fn work_that_goes_first_waits_for_a_part_of_a_unit_and_answers_stay_as_they_are() {
    let cases = [("kivi-4", None), ("kvcomp", None), ("raw", Some(SCALE)), ("kivi-4", Some(SCALE))];
    for (name, scale) in cases {
        for merge in [false, true] {
            let (mut backend, plan) = flat(name, scale);
            let plan = if merge { merged(plan) } else { plan };
            let whole = backend.attend(&plan).unwrap();
            assert_eq!(whole.saved_passes > 0, merge, "{name}");
            for (threads, comes_after) in [(1, 0), (1, 5), (1, 40), (2, 5)] {
                let what = format!("{name}, {scale:?}, merged {merge}, {threads}, {comes_after}");
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                backend.threads = pool.build().unwrap();
                let (answer, waits) = answer_outrun(&mut backend, &plan, comes_after);
                assert_eq!((&answer.out, &answer.lse), (&whole.out, &whole.lse), "{what}");
                assert_eq!(answer.saved_passes, whole.saved_passes, "{what}");
                // Looks before tests and pieces and in one. What was cut runs whole the next
                // time, by several threads for longer than others take.
                let short = waits.iter().filter(|looks| **looks <= 6).count();
                let enough = short > 2 && (2 * short >= waits.len() || threads > 1);
                assert!(enough, "{what}: {waits:?}");
            }
        }
    }
}

/// The answer to a plan that is outrun in each slice after so many looks at its stop; and how many
/// looks who came waited for, by slice.
fn answer_outrun(
    backend: &mut CpuBackend,
    plan: &AttendPlan,
    comes_after: usize,
) -> (Attended, Vec<usize>) {
    let (stop, looks) = (Stop::never(), Arc::new(AtomicUsize::new(0)));
    let (outrun, seen) = (stop.outrun.clone(), looks.clone());
    let hook: LookHook = Arc::new(move || {
        if seen.fetch_add(1, Ordering::AcqRel) >= comes_after {
            outrun.store(true, Ordering::Release);
        }
    });
    backend.threads.broadcast(|_| set_hook(hook.clone()));
    let (mut task, mut waits) = (AttendTask::new(plan.clone()), Vec::new());
    let answer = loop {
        looks.store(0, Ordering::Release);
        stop.outrun.store(false, Ordering::Release);
        if let Some(answer) = backend.attend_slice(&mut task, &stop).unwrap() {
            break answer;
        }
        waits.push(looks.load(Ordering::Acquire).saturating_sub(comes_after));
    };
    backend.threads.broadcast(|_| set_hook(Arc::new(|| {})));
    (answer, waits)
}
