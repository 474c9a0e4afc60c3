//! Queries whose sequences share pages are answered by one pass over those, as each alone.

use super::bits::rounds_alike;
use super::*;
use crate::cpu::attend::AttendProgress;
use crate::cpu::simd::KernelConfig;
use crate::cpu::unit_plan::SharedPasses;
use crate::{Attended, find_shared_runs};
use std::collections::BTreeSet;

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

/// The plan of one query of a batch, and its rows of the answer.
struct QueryAlone<'a> {
    plan: AttendPlan,
    out: &'a [u8],
    lse: &'a [f32],
}

fn each_alone<'a>(plan: &AttendPlan, answer: &'a Attended) -> Vec<QueryAlone<'a>> {
    let tokens = plan.query_tokens();
    let [q_bytes, out_bytes] = [plan.q.len(), answer.out.len()].map(|bytes| bytes / tokens);
    let heads = plan.q_heads as usize;
    let mut first = 0;
    let alone = |query: &PlanQuery| {
        let rows = first..first + query.n_q as usize;
        first = rows.end;
        let q = plan.q.slice(rows.start * q_bytes..rows.end * q_bytes);
        QueryAlone {
            plan: AttendPlan { queries: vec![query.clone()], q, ..plan.clone() },
            out: &answer.out[rows.start * out_bytes..rows.end * out_bytes],
            lse: &answer.lse[rows.start * heads..rows.end * heads],
        }
    };
    plan.queries.iter().map(alone).collect()
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
        for alone in each_alone(plan, &together) {
            let parts = alone.plan.queries[0].parts.to_vec();
            let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts };
            let rows = backend.load(&load).unwrap();
            let truth = reference(geometry, &alone.plan, &rows, |_| {});
            let norm = truth.iter().flat_map(|row| &row.out).fold(0f64, |max, x| max.max(x.abs()));
            let allowed = match precision {
                Precision::Fast if ROUNDED.contains(&name) || !EXACT.contains(&name) => {
                    budget(geometry, &alone.plan, &rows, &truth, to_half, 11)
                }
                _ => (SINGLE_ERROR_MAX * norm, SINGLE_ERROR_MAX),
            };
            let got = floats(alone.out);
            let got = got.chunks_exact(geometry.head_dim(Side::Value));
            let (out, lse) = worst(&truth, got.zip(alone.lse.iter().map(|x| f64::from(*x))));
            assert!(out <= allowed.0, "{what}: {out:e} of {:e}", allowed.0);
            assert!(lse <= allowed.1, "{what}: lse {lse:e} of {:e}", allowed.1);
        }
    }
    saved
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
        // Under an emulator a tree is a minute.
        for seed in 0..if emulated() { 1 } else { 2 } {
            let seed = number as u64 * 100 + seed;
            let mut draw = Draw(seed);
            let queries = draw_queries(&mut draw, &pages, &tail);
            let group = [1, 4, 8][draw.below(3)];
            let plan = plan_queries(&geometry, queries, group);
            if find_shared_runs(&plan, 8).is_empty() {
                continue;
            }
            let what = format!("{name} | tree {seed}, {group}");
            trees += 1;
            sharing += u32::from(check_shared(&mut backend, &codec, &plan, &what) > 0);
        }
    }
    // Some trees share only between queries that each fill a unit.
    assert!(trees > 20 && sharing * 2 > trees, "{sharing} of {trees}");
}
