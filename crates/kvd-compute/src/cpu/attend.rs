//! Attention over raw rows and pages: one loop for every codec, FlashDecoding-style split over
//! the stored range, and a merge of the partial states.

use super::simd::Simd;
use super::tile::{Reader, TILE_TOKENS, tiles};
use crate::{AttendPlan, Attended, BackendError, PartialState, PlanPart, PlanQuery};
use kvd_codec::Space;
use kvd_core::Side;
use rayon::prelude::*;
use std::ops::Range;

/// Query tokens of one unit: their accumulators stay in the second-level cache.
const UNIT_QUERY_TOKENS: u32 = 32;
/// Fewest parts (blocks) of one unit: below this a thread's start costs more than it saves.
const UNIT_PARTS_MIN: usize = 8;
/// Scores are kept finite, so that huge keys saturate instead of turning into NaN.
const SCORE_MAX: f32 = 1.0e38;

/// A piece of work: some query tokens, one KV head, some parts.
struct Unit<'a> {
    query: &'a PlanQuery,
    /// Index of the query's first token in the batch.
    batch_row: usize,
    /// Query tokens within the query.
    q: Range<u32>,
    head: usize,
    parts: &'a [PlanPart],
}

pub(crate) struct Job<'a> {
    pub(crate) plan: &'a AttendPlan,
    pub(crate) reader: Reader<'a>,
    pub(crate) simd: Simd,
    /// The whole payload, widened.
    pub(crate) q: &'a [f32],
    pub(crate) threads: usize,
}

/// Runs a plan; the caller has checked shapes and that `q` is finite.
pub(crate) fn attend(job: &Job<'_>) -> Result<Attended, BackendError> {
    let units = units(job);
    let states: Vec<Vec<PartialState>> = if units.len() == 1 {
        vec![run_unit(job, &units[0])?]
    } else {
        units.par_iter().map(|unit| run_unit(job, unit)).collect::<Result<_, _>>()?
    };
    Ok(finish(job, &units, states))
}

/// Splits the batch; units of the same query tokens and head follow one another.
fn units<'a>(job: &Job<'a>) -> Vec<Unit<'a>> {
    let kv_heads = job.reader.codec.geometry().kv_heads as usize;
    let whole: usize = job
        .plan
        .queries
        .iter()
        .map(|query| query.n_q.div_ceil(UNIT_QUERY_TOKENS) as usize * kv_heads)
        .sum();
    // A few units per thread even out their lengths.
    let splits_wanted = (4 * job.threads).div_ceil(whole.max(1));
    let mut units = Vec::with_capacity(whole);
    let mut batch_row = 0;
    for query in &job.plan.queries {
        let parts_per_unit = query.parts.len().div_ceil(splits_wanted).max(UNIT_PARTS_MIN);
        for q_start in (0..query.n_q).step_by(UNIT_QUERY_TOKENS as usize) {
            let q = q_start..query.n_q.min(q_start + UNIT_QUERY_TOKENS);
            for head in 0..kv_heads {
                let unit = |parts| Unit { query, batch_row, q: q.clone(), head, parts };
                if query.parts.is_empty() {
                    units.push(unit(&query.parts[..]));
                }
                units.extend(query.parts.chunks(parts_per_unit).map(unit));
            }
        }
        batch_row += query.n_q as usize;
    }
    units
}

/// The queries of a unit, once as given and once folded into coefficient space.
struct Prepared {
    raw: Vec<f32>,
    folded: Vec<f32>,
    /// What to add to scores of coefficient pages.
    offsets: Vec<f32>,
}

/// Query heads that share one KV head.
fn group(job: &Job<'_>) -> usize {
    job.plan.q_heads as usize / job.reader.codec.geometry().kv_heads as usize
}

fn prepare(job: &Job<'_>, unit: &Unit<'_>) -> Prepared {
    let dim = job.reader.codec.geometry().head_dim(Side::Key);
    let side = job.reader.codec.head(job.reader.layer, Side::Key, unit.head);
    let scale = job.plan.scale.unwrap_or_else(|| 1.0 / (dim as f32).sqrt());
    let rows = unit.q.len() * group(job);
    let mut prepared = Prepared {
        raw: Vec::with_capacity(rows * dim),
        folded: vec![0.0; rows * dim],
        offsets: Vec::with_capacity(rows),
    };
    for row in 0..rows {
        let start = payload_row(job, unit, row) * dim;
        prepared.raw.extend(job.q[start..start + dim].iter().map(|value| value * scale));
        let raw = &prepared.raw[row * dim..];
        let folded = &mut prepared.folded[row * dim..][..dim];
        prepared.offsets.push(side.fold_query(raw, folded));
    }
    prepared
}

/// Index of a unit's row (`query token × group`) in the batch's `[tokens, q_heads]`.
fn payload_row(job: &Job<'_>, unit: &Unit<'_>, row: usize) -> usize {
    let group = group(job);
    let token = unit.batch_row + unit.q.start as usize + row / group;
    token * job.plan.q_heads as usize + unit.head * group + row % group
}

fn run_unit(job: &Job<'_>, unit: &Unit<'_>) -> Result<Vec<PartialState>, BackendError> {
    let geometry = job.reader.codec.geometry();
    let (dim_k, dim_v) = (geometry.head_dim(Side::Key), geometry.head_dim(Side::Value));
    let prepared = prepare(job, unit);
    let rows = unit.q.len() * group(job);
    let mut states: Vec<_> = (0..rows).map(|_| PartialState::empty(dim_v)).collect();
    // The union of what the unit's query tokens see; tiles outside are never decoded.
    let seen_start = unit.query.visible(unit.q.start).start;
    let seen_end = unit.query.visible(unit.q.end - 1).end;
    let mut k_tile = vec![0f32; TILE_TOKENS as usize * dim_k];
    let mut v_tile = vec![0f32; TILE_TOKENS as usize * dim_v];
    for part in unit.parts {
        let mut opened = None;
        for (first, count) in tiles(part, seen_start, seen_end) {
            if opened.is_none() {
                let open = |side| job.reader.open(&part.source, part.rows, side, unit.head);
                opened = Some((open(Side::Key)?, open(Side::Value)?));
            }
            let Some((keys, values)) = &opened else { unreachable!("opened above") };
            keys.decode(first, count, &mut k_tile[..count as usize * dim_k])?;
            values.decode(first, count, &mut v_tile[..count as usize * dim_v])?;
            let tile = Tile {
                first_token: part.first_token + first,
                tokens: count as usize,
                keys: &k_tile,
                key_space: keys.space(),
                values: &v_tile,
                value_space: values.space(),
            };
            for (row, state) in states.iter_mut().enumerate() {
                absorb(job, unit, &prepared, &tile, row, state);
            }
        }
    }
    Ok(states)
}

/// Decoded rows of a few consecutive tokens.
struct Tile<'a> {
    first_token: u32,
    tokens: usize,
    keys: &'a [f32],
    key_space: Space,
    values: &'a [f32],
    value_space: Space,
}

/// One query row sees one tile: online softmax (Milakov and Gimelshein) on its visible tokens.
#[expect(clippy::manual_clamp, reason = "clamp would keep a NaN, max and min drop it")]
fn absorb(
    job: &Job<'_>,
    unit: &Unit<'_>,
    prepared: &Prepared,
    tile: &Tile<'_>,
    row: usize,
    state: &mut PartialState,
) {
    let visible = unit.query.visible(unit.q.start + (row / group(job)) as u32);
    let from = visible.start.saturating_sub(tile.first_token) as usize;
    let to = (visible.end.saturating_sub(tile.first_token) as usize).min(tile.tokens);
    if from >= to {
        return;
    }
    let (dim_k, dim_v) = (prepared.raw.len() / prepared.offsets.len(), state.raw.len());
    let (q, offset) = match tile.key_space {
        Space::Raw => (&prepared.raw, 0.0),
        Space::Coefficient => (&prepared.folded, prepared.offsets[row]),
    };
    let mut buffer = [0f32; TILE_TOKENS as usize];
    let scores = &mut buffer[..to - from];
    job.simd.scores(&q[row * dim_k..][..dim_k], &tile.keys[from * dim_k..to * dim_k], scores);
    let mut max = f32::NEG_INFINITY;
    for score in scores.iter_mut() {
        let mut s = *score + offset;
        if let Some(cap) = job.plan.soft_cap {
            s = cap * (s / cap).tanh();
        }
        *score = s.max(-SCORE_MAX).min(SCORE_MAX);
        max = max.max(*score);
    }
    state.raise_max(max);
    let mut sum = 0f32;
    for score in scores.iter_mut() {
        *score = (*score - state.max).exp();
        sum += *score;
    }
    state.weight_sum += sum;
    let acc = match tile.value_space {
        Space::Raw => &mut state.raw,
        Space::Coefficient => {
            state.coefficient_weight += sum;
            &mut state.coefficients
        }
    };
    job.simd.accumulate(scores, &tile.values[from * dim_v..to * dim_v], acc);
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
        for (row, state) in merged.iter_mut().enumerate() {
            let target = payload_row(job, unit, row);
            lse[target] = state.lse();
            if state.weight_sum == 0.0 {
                continue;
            }
            row_values.copy_from_slice(&state.raw);
            if state.coefficient_weight > 0.0 {
                side.unfold_value(&state.coefficients, state.coefficient_weight, &mut row_values);
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
