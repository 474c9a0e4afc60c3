//! Queries whose sequences share pages are answered by one pass over those, as each alone.

use super::bits::rounds_alike;
use super::*;
use crate::cpu::attend::AttendProgress;
use crate::cpu::simd::KernelConfig;
use crate::cpu::unit_plan::SharedPasses;
use crate::{AttendTask, Attended, Slice, Stop, find_shared_runs};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// Pages of the pool that sequences are made of.
const POOL: usize = 48;
const BLOCK: u32 = 64;

/// A random number generator that a seed reproduces.
struct Draw(u64);

impl Draw {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % end
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// A random tree: a trunk of pages, forks of it and of each other, cut back and grown again, with
/// windows and several query tokens; each query's own rows are raw.
fn draw_queries(draw: &mut Draw, pages: &[PlanPart], tail: &PlanPart) -> Vec<PlanQuery> {
    let trunk = 10 + draw.below(12);
    let mut fresh = trunk;
    let mut sequences: Vec<Vec<usize>> = vec![(0..trunk).collect()];
    for _ in 0..2 + draw.below(6) {
        let of = draw.below(sequences.len());
        let parent = &sequences[of];
        let mut pages = parent[..parent.len() - draw.below(4).min(parent.len() - 1)].to_vec();
        for _ in 0..draw.below(3) {
            pages.push(fresh % POOL);
            fresh += 1;
        }
        sequences.push(pages);
    }
    let query = |sequence: &Vec<usize>| {
        let mut parts: Vec<PlanPart> = Vec::new();
        for page in sequence {
            let first_token = parts.last().map_or(0, PlanPart::end_token);
            parts.push(PlanPart { first_token, ..pages[*page].clone() });
        }
        // Cut within the last page, or followed by raw rows.
        if draw.one_in(3) {
            let last = parts.last_mut().unwrap();
            last.rows = 1 + draw.below(BLOCK as usize - 1) as u32;
        } else {
            let first_token = parts.last().unwrap().end_token();
            parts.push(PlanPart { first_token, ..tail.clone() });
        }
        let end = parts.last().unwrap().end_token();
        let n_q = [1, 1, 1, 2, 5, 33][draw.below(6)];
        let window = draw.one_in(4).then(|| 300 + draw.below(900) as u32);
        PlanQuery { n_q, position: end - n_q, sliding_window: window, parts: parts.into() }
    };
    sequences.iter().map(query).collect()
}

/// A plan of these queries, of `group` heads to a KV head.
fn plan_queries(geometry: &Geometry, queries: Vec<PlanQuery>, group: usize) -> AttendPlan {
    let n_q = queries.iter().map(|query| query.n_q).sum();
    let ask = Question { group, n_q, position: 0, window: None, cap: None };
    let no_parts = [];
    AttendPlan { queries, ..plan(geometry, &no_parts, InputKind::Normal, ask) }
}

/// The right answer to one query of a batch, and how far off outputs and log-sum-exps may be.
struct QueryTruth {
    rows: Vec<RowTruth>,
    rounded: (f64, f64),
    single: (f64, f64),
}

/// The truth of each query of a plan, asked alone.
fn truth_by_query(
    backend: &mut CpuBackend,
    geometry: &Geometry,
    plan: &AttendPlan,
) -> Vec<QueryTruth> {
    let token_bytes = plan.q.len() / plan.query_tokens();
    let mut first = 0;
    let mut truth = |query: &PlanQuery| {
        let tokens = first..first + query.n_q as usize;
        first = tokens.end;
        let q = plan.q.slice(tokens.start * token_bytes..tokens.end * token_bytes);
        let alone = AttendPlan { queries: vec![query.clone()], q, ..plan.clone() };
        let parts = query.parts.to_vec();
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts };
        let loaded = backend.load(&load).unwrap();
        let rows = reference(geometry, &alone, &loaded, |_| {});
        let norm = rows.iter().flat_map(|row| &row.out).fold(0f64, |max, x| max.max(x.abs()));
        let rounded = budget(geometry, &alone, &loaded, &rows, to_half, 11);
        QueryTruth { rows, rounded, single: (SINGLE_ERROR_MAX * norm, SINGLE_ERROR_MAX) }
    };
    plan.queries.iter().map(&mut truth).collect()
}

fn answer_by(backend: &CpuBackend, plan: &AttendPlan, passes: SharedPasses) -> Attended {
    let answer = |job: &attend_job::AttendJob<'_>| {
        let mut attend = AttendProgress::with_passes(job, passes);
        while !attend.go_on(job)? {}
        Ok(attend.take_answer(job))
    };
    backend.with_job(plan, answer).unwrap()
}

/// Whether a unit of any number of rows up to `rows` rounds queries and weights as one of `least`.
fn same_rounding(backend: &CpuBackend, codec: &ModelCodec, name: &str, least: usize) -> bool {
    let config = KernelConfig { simd: backend.simd, precision: backend.precision };
    rounds_alike(config, codec, name, [least, 32 * least])
}

/// Holds a plan's answer, where queries go through shared pages together, against the same one
/// where they do not, and against each query alone in f64.
/// Says how many passes over blocks were saved.
fn check_shared(
    backend: &mut CpuBackend,
    codec: &ModelCodec,
    plan: &AttendPlan,
    what: &str,
) -> u64 {
    let mut saved = 0;
    let (geometry, name) = (codec.geometry(), what.split('|').next().unwrap().trim());
    let group = plan.q_heads as usize / HEADS;
    let truth = truth_by_query(backend, geometry, plan);
    for (simd, precision) in Simd::available_levels()
        .into_iter()
        .flat_map(|simd| [Precision::Fast, Precision::Single].map(|p| (simd, p)))
    {
        (backend.simd, backend.precision) = (simd, precision);
        let what = format!("{what}, {simd:?}, {precision:?}");
        let together = answer_by(backend, plan, SharedPasses::Together);
        let apart = answer_by(backend, plan, SharedPasses::Apart);
        assert_eq!(apart.saved_passes, 0, "{what}");
        saved += together.saved_passes;
        if same_rounding(backend, codec, name, group) {
            assert_eq!(together.lse, apart.lse, "{what}");
            assert!(together.out == apart.out, "{what}: bits of outputs differ");
        }
        let outputs = floats(&together.out);
        let mut got = outputs
            .chunks_exact(geometry.head_dim(Side::Value))
            .zip(together.lse.iter().map(|x| f64::from(*x)));
        for query in &truth {
            let is_rounded = precision == Precision::Fast && !EXACT.contains(&name);
            let allowed = if is_rounded { query.rounded } else { query.single };
            let (out, lse) = worst(&query.rows, got.by_ref().take(query.rows.len()));
            assert!(out <= allowed.0, "{what}: {out:e} of {:e}", allowed.0);
            assert!(lse <= allowed.1, "{what}: lse {lse:e} of {:e}", allowed.1);
        }
    }
    saved
}

#[test]
fn queries_that_are_dropped_between_slices_leave_the_others_as_they_are() {
    let geometry = geometry(64);
    for scale in [None, Some(1e33)] {
        let codec = codec(&geometry, "kivi-4");
        let (mut backend, mut pages) = filled_with(codec, &[BLOCK; POOL], |block, tokens| {
            [0, 1].map(|side| values(tokens as usize * HEADS * 64, 2 * block + side))
        });
        let tail = pages.pop().unwrap();
        let queries = draw_queries(&mut Draw(3), &pages, &tail);
        let plan = AttendPlan { scale, ..plan_queries(&geometry, queries, 4) };
        let whole = backend.attend(&plan).unwrap();
        let slice = Slice { ends: Instant::now(), waiting: Arc::new(AtomicUsize::new(1)) };
        let stop = Stop { slice: Some(slice), ..Stop::never() };
        let mut dropped = 0..0;
        let (mut task, mut slices) = (AttendTask::new(plan.clone()), 0);
        let answer = loop {
            if let Some(answer) = backend.attend_slice(&mut task, &stop).unwrap() {
                break answer;
            }
            slices += 1;
            if slices == 2 {
                task.drop_queries(0..1);
                dropped = 0..plan.queries[0].n_q as usize * HEADS * 4;
            }
        };
        assert!(slices > 2 && !dropped.is_empty(), "{slices}");
        assert_eq!(answer.lse[dropped.end..], whole.lse[dropped.end..], "{scale:?}");
        let bytes = dropped.end * 64 * 4;
        assert!(answer.out[bytes..] == whole.out[bytes..], "{scale:?}: outputs differ");
    }
}

#[test]
fn queries_of_random_trees_answer_as_apart_and_as_alone() {
    let presets = kvd_codec::presets().iter().map(|preset| preset.name);
    let names: BTreeSet<&str> = presets.chain(ROUNDED.iter().chain(EXACT).copied()).collect();
    let geometry = geometry(64);
    let (mut trees, mut sharing) = (0, 0);
    for (number, name) in names.into_iter().enumerate() {
        let codec = codec(&geometry, name);
        let (mut backend, mut pages) =
            filled_with(codec.clone(), &[BLOCK; POOL], |block, tokens| {
                [0, 1].map(|side| values(tokens as usize * HEADS * 64, 2 * block + side))
            });
        let tail = pages.pop().unwrap();
        let mut draw = Draw(number as u64);
        let queries = draw_queries(&mut draw, &pages, &tail);
        let group = [1, 4, 8][draw.below(3)];
        let plan = plan_queries(&geometry, queries, group);
        if find_shared_runs(&plan, 8).is_empty() {
            continue;
        }
        let what = format!("{name} | tree {number}, {group}");
        trees += 1;
        sharing += u32::from(check_shared(&mut backend, &codec, &plan, &what) > 0);
    }
    // Some trees share only between queries that each fill a unit.
    assert!(trees > 20 && sharing * 2 > trees, "{sharing} of {trees}");
}
