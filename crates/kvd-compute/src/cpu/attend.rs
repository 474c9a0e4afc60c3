//! Attention over raw rows and pages: one loop for every codec, FlashDecoding-style split over
//! the stored range, and a merge of the partial states.

use crate::cpu::job::{Job, Unit, payload_row};
use crate::cpu::loss::Merged;
use crate::cpu::span::spans;
use crate::cpu::tile::Reader;
use crate::cpu::unit::{self, UnitAnswer};
use crate::cpu::wide;
use crate::{AttendPlan, Attended, BackendError, PartialState, PlanPart, PlanQuery};
use kvd_core::Side;
use rayon::prelude::*;
use std::ops::Range;

/// Query tokens of one unit: accumulators of four heads of 128 channels to a KV head stay in the
/// second-level cache.
pub(super) const UNIT_QUERY_TOKENS: u32 = 32;
/// Fewest parts (blocks) of one unit: below this a thread's start costs more than it saves.
const UNIT_PARTS_MIN: usize = 8;
/// A few units per thread even out their lengths.
const UNITS_PER_THREAD: usize = 4;

/// Least share of the squares of coefficients that those of an output have, for f32 to do.
const LEFT_LEAST: f64 = 1.0 / 64.0;

/// Runs a plan; the caller has checked shapes and that `q` is finite.
pub(crate) fn attend(job: &Job<'_>) -> Result<Attended, BackendError> {
    let units = units(job);
    let (mut reply, again) = first_pass(job, &units)?;
    attend_again(job, &units, again, &mut reply)?;
    let Reply { out, lse, .. } = reply;
    Ok(Attended { out, lse, stored_bytes_read: stored_bytes(job.plan, job.reader) })
}

/// How many query rows are attended to again.
#[cfg(test)]
pub(super) fn rows_again(job: &Job<'_>) -> Result<usize, BackendError> {
    let (_, again) = first_pass(job, &units(job))?;
    Ok(again.iter().map(|again| again.rows.len()).sum())
}

/// Runs a unit, and gives back what its products have kept of the thread's registers.
fn run(job: &Job<'_>, unit: &Unit<'_>) -> Result<UnitAnswer, BackendError> {
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

/// Rows of a group of units that are to be attended to again, and where the units are.
struct Again {
    units: Range<usize>,
    rows: Vec<usize>,
}

/// Runs all units by the kernels of their sides, merges the splits of each query row and writes the
/// reply; and says which rows those kernels do not serve.
fn first_pass<'a>(
    job: &'a Job<'a>,
    units: &[Unit<'_>],
) -> Result<(Reply<'a>, Vec<Again>), BackendError> {
    let answers: Vec<UnitAnswer> = if units.len() == 1 {
        vec![run(job, &units[0])?]
    } else {
        units.par_iter().map(|unit| run(job, unit)).collect::<Result<_, _>>()?
    };
    let mut reply = Reply::new(job);
    let mut groups = Vec::new();
    let mut pending = units.iter().zip(answers).enumerate().peekable();
    while let Some((first, (unit, mut merged))) = pending.next() {
        let mut end = first + 1;
        while let Some((at, (_, split))) = pending.next_if(|(_, (next, _))| same_rows(unit, next)) {
            merged.merge(&split);
            end = at + 1;
        }
        let cancelled = reply.write(unit, &merged.states);
        groups.push(Group { units: first..end, merged, cancelled });
    }
    let again = |group: &Group| group.again(job, units);
    let again: Vec<Again> = if let [group] = &groups[..] {
        vec![again(group)?]
    } else {
        groups.par_iter().map(again).collect::<Result<_, _>>()?
    };
    Ok((reply, again.into_iter().filter(|again| !again.rows.is_empty()).collect()))
}

/// Units of the same rows, merged.
struct Group {
    units: Range<usize>,
    merged: UnitAnswer,
    /// Rows of which transforms left little.
    cancelled: Vec<usize>,
}

impl Group {
    /// Finds the rows that the kernels do not serve.
    fn again(&self, job: &Job<'_>, units: &[Unit<'_>]) -> Result<Again, BackendError> {
        let UnitAnswer { queries, states, losses } = &self.merged;
        let merged = Merged { job, unit: &units[self.units.start], queries, states, losses };
        let rows = merged.not_served(&self.cancelled, LEFT_LEAST)?;
        Ok(Again { units: self.units.clone(), rows })
    }
}

/// Attends to rows in f64, and writes them in place of what the reply has.
fn attend_again(
    job: &Job<'_>,
    units: &[Unit<'_>],
    again: Vec<Again>,
    reply: &mut Reply<'_>,
) -> Result<(), BackendError> {
    let mut wanted = Vec::new();
    for Again { units: range, rows } in &again {
        wanted.extend(units[range.clone()].iter().map(|unit| (unit, &rows[..])));
    }
    let states = wanted.par_iter().map(|(unit, rows)| wide::run(job, unit, rows));
    let mut states = states.collect::<Result<Vec<_>, _>>()?.into_iter();
    for Again { units: range, rows } in again {
        let mut merged = states.next().unwrap_or_default();
        for split in states.by_ref().take(range.len() - 1) {
            merged.iter_mut().zip(&split).for_each(|(state, split)| state.merge(split));
        }
        let mut values = vec![0f32; reply.dim];
        for (row, state) in rows.into_iter().zip(&merged) {
            let lse = state.finish(&mut values);
            reply.write_row(payload_row(job, &units[range.start], row), &values, lse);
        }
    }
    Ok(())
}

/// Outputs and log-sum-exps of a batch.
struct Reply<'a> {
    job: &'a Job<'a>,
    dim: usize,
    out: Vec<u8>,
    lse: Vec<f32>,
}

impl<'a> Reply<'a> {
    fn new(job: &'a Job<'a>) -> Self {
        let dim = job.reader.codec.geometry().head_dim(Side::Value);
        let tokens: u32 = job.plan.queries.iter().map(|query| query.n_q).sum();
        let rows = tokens as usize * job.plan.q_heads as usize;
        let out = vec![0u8; rows * dim * job.plan.dtype.size_bytes()];
        Self { job, dim, out, lse: vec![f32::NEG_INFINITY; rows] }
    }

    /// Writes the rows of a unit, and returns those of which transforms left little: what f32 lost
    /// of their coefficients then counts.
    fn write(&mut self, unit: &Unit<'_>, merged: &[PartialState]) -> Vec<usize> {
        let mut cancelled = Vec::new();
        let side = self.job.reader.codec.head_codec(self.job.reader.layer, Side::Value, unit.head);
        let mut unfolded: Vec<f32> =
            merged.iter().flat_map(|state| &state.coefficients).copied().collect();
        let weights: Vec<f32> = merged.iter().map(|state| state.coefficient_weight).collect();
        if weights.iter().any(|weight| *weight > 0.0) {
            side.unfold_values(&mut unfolded, &weights);
        }
        let mut values = vec![0f32; self.dim];
        let rows = merged.iter().zip(unfolded.chunks_exact(self.dim)).enumerate();
        for (row, (state, unfolded)) in rows {
            if state.weight_sum == 0.0 {
                continue;
            }
            values.copy_from_slice(&state.raw);
            if state.coefficient_weight > 0.0 {
                values.iter_mut().zip(unfolded).for_each(|(value, of)| *value += of);
            }
            if squares(&values) < LEFT_LEAST * squares(&state.coefficients) {
                cancelled.push(row);
            }
            for value in &mut values {
                *value /= state.weight_sum;
            }
            self.write_row(payload_row(self.job, unit, row), &values, state.lse());
        }
        cancelled
    }

    /// Writes row `target` of the batch.
    fn write_row(&mut self, target: usize, values: &[f32], lse: f32) {
        let dtype = self.job.plan.dtype;
        let bytes = self.dim * dtype.size_bytes();
        self.lse[target] = lse;
        dtype.narrow_values(values, &mut self.out[target * bytes..][..bytes]);
    }
}

/// The sum of squares, in f64: f32 holds neither those of tiny values nor those of huge ones.
fn squares(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [0f64; 16];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += f64::from(*value).powi(2));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>()
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
