//! Batches of sequences that are not of one length.

use super::*;
use crate::cpu::attend::units_of;

/// A plan of several queries of one token, each over the first so many parts.
fn ragged(geometry: &Geometry, parts: &[PlanPart], lengths: &[usize]) -> AttendPlan {
    let tokens = parts.last().unwrap().end_token();
    let ask = Question {
        group: 4,
        n_q: lengths.len() as u32,
        position: tokens - 1,
        window: None,
        cap: None,
    };
    let mut plan = plan(geometry, parts, InputKind::Flat, ask);
    let query = |length: &usize| PlanQuery {
        n_q: 1,
        position: tokens - 1,
        sliding_window: None,
        parts: parts[..*length].into(),
    };
    plan.queries = lengths.iter().map(query).collect();
    plan
}

#[test]
fn a_long_sequence_among_short_ones_is_split_and_answers_as_alone() {
    let geometry = geometry(64);
    let (mut backend, parts) = filled(codec(&geometry, "kivi-4"), InputKind::Flat);
    backend.set_precision(Precision::Single);
    // Fifteen of one part, and one of all, in the middle.
    let mut lengths = [1; 16];
    lengths[7] = parts.len();
    let plan = ragged(&geometry, &parts, &lengths);
    let split = |plan: &AttendPlan| {
        let count = |job: &attend_job::AttendJob<'_>| {
            let units = units_of(job);
            let of = |query: &PlanQuery| {
                units.iter().filter(|unit| std::ptr::eq(unit.tokens[0].query, query)).count()
            };
            Ok(plan.queries.iter().map(of).collect::<Vec<_>>())
        };
        backend.with_job(plan, count).unwrap()
    };
    // Of 288 parts, two threads get four units each of at most 36 and one head; 129 are four.
    let mut wanted = [HEADS; 16];
    wanted[7] = HEADS * 4;
    assert_eq!(split(&plan), wanted);
    let together = backend.attend(&plan).unwrap();
    let row_bytes = plan.q.len() / lengths.len();
    for (index, query) in plan.queries.iter().enumerate() {
        let q = plan.q.slice(index * row_bytes..(index + 1) * row_bytes);
        let alone = AttendPlan { queries: vec![query.clone()], q, ..plan.clone() };
        let alone = backend.attend(&alone).unwrap();
        let out = floats(&together.out[index * row_bytes..][..row_bytes]);
        let norm = out.iter().fold(0f64, |max, x| max.max(x.abs()));
        for (a, b) in out.iter().zip(floats(&alone.out)) {
            assert!((a - b).abs() <= SINGLE_ERROR_MAX * norm, "query {index}: {a} {b}");
        }
        let lse = &together.lse[index * HEADS * 4..][..HEADS * 4];
        for (a, b) in lse.iter().zip(alone.lse) {
            assert!(f64::from((a - b).abs()) <= SINGLE_ERROR_MAX, "query {index}: {a} {b}");
        }
    }
}

#[test]
fn parts_that_a_window_hides_are_no_work() {
    let geometry = geometry(64);
    let (backend, parts) = filled(codec(&geometry, "kivi-4"), InputKind::Flat);
    let mut plan = ragged(&geometry, &parts, &[parts.len()]);
    // Sixteen parts of 64 tokens at most, for two heads and two threads: two splits of each.
    plan.queries[0].sliding_window = Some(15 * 64);
    let splits = |job: &attend_job::AttendJob<'_>| {
        Ok(units_of(job).iter().map(|unit| unit.parts.len()).collect::<Vec<_>>())
    };
    let splits = backend.with_job(&plan, splits).unwrap();
    let all: usize = splits.iter().sum();
    assert!(splits.len() == 2 * HEADS && all <= 16 * HEADS, "{splits:?}");
    // None sees anything.
    plan.queries[0].parts = parts[..1].into();
    let splits = |job: &attend_job::AttendJob<'_>| Ok(units_of(job).len());
    assert_eq!(backend.with_job(&plan, splits).unwrap(), HEADS);
}
