//! Attention over raw rows and pages: one loop for every codec, FlashDecoding-style split over
//! the stored range, and a merge of the partial states.

use crate::cpu::job::{Job, Unit, payload_row};
use crate::cpu::span::spans;
use crate::cpu::tile::Reader;
use crate::cpu::unit;
use crate::{AttendPlan, Attended, BackendError, PartialState, PlanPart, PlanQuery};
use kvd_core::Side;
use rayon::prelude::*;

/// Query tokens of one unit: accumulators of four heads of 128 channels to a KV head stay in the
/// second-level cache.
pub(super) const UNIT_QUERY_TOKENS: u32 = 32;
/// Fewest parts (blocks) of one unit: below this a thread's start costs more than it saves.
const UNIT_PARTS_MIN: usize = 8;
/// A few units per thread even out their lengths.
const UNITS_PER_THREAD: usize = 4;

/// Runs a plan; the caller has checked shapes and that `q` is finite.
pub(crate) fn attend(job: &Job<'_>) -> Result<Attended, BackendError> {
    let units = units(job);
    let states: Vec<Vec<PartialState>> = if units.len() == 1 {
        vec![run(job, &units[0])?]
    } else {
        units.par_iter().map(|unit| run(job, unit)).collect::<Result<_, _>>()?
    };
    Ok(finish(job, &units, states))
}

/// Runs a unit, and gives back what its products have kept of the thread's registers.
fn run(job: &Job<'_>, unit: &Unit<'_>) -> Result<Vec<PartialState>, BackendError> {
    let _registers = job.simd.in_use();
    unit::run(job, unit)
}

/// Splits the batch by work, so that one long sequence among many short ones is not left to a
/// single thread at the end; units of the same query tokens and head follow one another.
pub(super) fn units<'a>(job: &Job<'a>) -> Vec<Unit<'a>> {
    let kv_heads = job.reader.codec.geometry().kv_heads as usize;
    let whole = |query: &PlanQuery| query.n_q.div_ceil(UNIT_QUERY_TOKENS) as usize * kv_heads;
    let queries = &job.plan.queries;
    let parts: usize = queries.iter().map(|query| whole(query) * seen(query).len()).sum();
    let parts_per_unit = parts.div_ceil(UNITS_PER_THREAD * job.threads).max(UNIT_PARTS_MIN);
    let mut units = Vec::with_capacity(queries.iter().map(whole).sum());
    let mut batch_row = 0;
    for query in queries {
        let parts = seen(query);
        // Splits of one query are alike: no thread is left with a short rest.
        let splits = parts.len().div_ceil(parts_per_unit).max(1);
        let parts_per_split = parts.len().div_ceil(splits).max(1);
        for q_start in (0..query.n_q).step_by(UNIT_QUERY_TOKENS as usize) {
            let q = q_start..query.n_q.min(q_start + UNIT_QUERY_TOKENS);
            for head in 0..kv_heads {
                let unit = |parts| Unit { query, batch_row, q: q.clone(), head, parts };
                if parts.is_empty() {
                    units.push(unit(parts));
                }
                units.extend(parts.chunks(parts_per_split).map(unit));
            }
        }
        batch_row += query.n_q as usize;
    }
    units
}

/// The parts from the first to the last that some token of the query sees.
fn seen(query: &PlanQuery) -> &[PlanPart] {
    let visible = query.visible(0).start..query.visible(query.n_q.saturating_sub(1)).end;
    let is_seen = |part: &PlanPart| spans(part, visible.clone()).next().is_some();
    let Some(first) = query.parts.iter().position(is_seen) else { return &[] };
    let end = query.parts.iter().rposition(is_seen).map_or(first, |last| last + 1);
    &query.parts[first..end]
}

/// Merges the splits of each query row and writes the reply.
fn finish(job: &Job<'_>, units: &[Unit<'_>], states: Vec<Vec<PartialState>>) -> Attended {
    let dim_v = job.reader.codec.geometry().head_dim(Side::Value);
    let rows_in_batch: u32 = job.plan.queries.iter().map(|query| query.n_q).sum();
    let rows_total = rows_in_batch as usize * job.plan.q_heads as usize;
    let value_bytes = job.plan.dtype.size_bytes();
    let mut out = vec![0u8; rows_total * dim_v * value_bytes];
    let mut lse = vec![f32::NEG_INFINITY; rows_total];
    let mut row_values = vec![0f32; dim_v];
    let mut pending = units.iter().zip(states).peekable();
    while let Some((unit, mut merged)) = pending.next() {
        while let Some((_, split)) = pending.next_if(|(next, _)| same_rows(unit, next)) {
            for (state, other) in merged.iter_mut().zip(&split) {
                state.merge(other);
            }
        }
        let side = job.reader.codec.head(job.reader.layer, Side::Value, unit.head);
        let mut unfolded: Vec<f32> =
            merged.iter().flat_map(|state| &state.coefficients).copied().collect();
        let weights: Vec<f32> = merged.iter().map(|state| state.coefficient_weight).collect();
        if weights.iter().any(|weight| *weight > 0.0) {
            side.unfold_values(&mut unfolded, &weights);
        }
        let rows = merged.iter().zip(unfolded.chunks_exact(dim_v)).enumerate();
        for (row, (state, unfolded)) in rows {
            let target = payload_row(job, unit, row);
            lse[target] = state.lse();
            if state.weight_sum == 0.0 {
                continue;
            }
            row_values.copy_from_slice(&state.raw);
            if state.coefficient_weight > 0.0 {
                row_values.iter_mut().zip(unfolded).for_each(|(value, of)| *value += of);
            }
            for value in &mut row_values {
                *value /= state.weight_sum;
            }
            let start = target * dim_v * value_bytes;
            job.plan.dtype.narrow(&row_values, &mut out[start..start + dim_v * value_bytes]);
        }
    }
    Attended { out, lse, stored_bytes_read: stored_bytes(job.plan, job.reader) }
}

fn same_rows(a: &Unit<'_>, b: &Unit<'_>) -> bool {
    std::ptr::eq(a.query, b.query) && a.q == b.q && a.head == b.head
}

/// Bytes of the parts a plan names: what the compressed-throughput metric counts.
fn stored_bytes(plan: &AttendPlan, reader: Reader<'_>) -> u64 {
    let geometry = reader.codec.geometry();
    let token_bytes = geometry.values_per_token() * geometry.dtype.size_bytes() as u64;
    plan.queries
        .iter()
        .flat_map(|query| query.parts.iter())
        .map(|part| part.stored_bytes(token_bytes))
        .sum()
}
