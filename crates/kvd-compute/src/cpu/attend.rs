//! Attention over raw rows and pages: one loop for every codec, FlashDecoding-style split over
//! the stored range, and a merge of the partial states; in slices, between which others may have
//! the device.

use crate::cpu::attend_f64::{self, WideState};
use crate::cpu::attend_job::{AttendJob, AttendUnit, group_size, payload_row};
use crate::cpu::attend_unit::{self, UnitAnswer};
use crate::cpu::loss::MergedRows;
use crate::cpu::row_reader::LayerReader;
use crate::cpu::token_span::spans_of;
use crate::{AttendPlan, Attended, BackendError, PartialState, PlanPart, PlanQuery};
use kvd_core::{DType, Side};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query tokens of one unit: accumulators of four heads of 128 channels to a KV head stay in the
/// second-level cache.
pub(super) const UNIT_QUERY_TOKENS: u32 = 32;
/// Fewest parts (blocks) of one unit: below this a thread's start costs more than it saves.
const UNIT_PARTS_MIN: usize = 8;
/// A few units per thread even out their lengths.
const UNITS_PER_THREAD: usize = 4;

/// Least share of the squares of coefficients that those of an output have, for f32 to do.
const LEFT_LEAST: f64 = 1.0 / 64.0;

/// Query rows times tokens of one unit, at most, where decoding a token counts as [`DECODE_ROWS`]
/// rows do: two or three milliseconds of a thread, so that others wait no longer for a pause.
const UNIT_COST_MAX: u64 = 1 << 18;
/// Query rows that take about as long as decoding a token.
const DECODE_ROWS: u64 = 32;
/// Query rows times tokens of one piece of the second pass, at most: f64 takes ten times as long.
const WIDE_COST_MAX: u64 = 1 << 15;
/// Units for each thread whose answers are kept at once.
const ANSWERS_PER_THREAD: usize = 16;

/// Attention under way: what is left of it, and what it came to so far. It refers to the plan by
/// numbers alone, so that the device may do something else between two slices.
pub(super) struct AttendProgress {
    units: Vec<UnitPlan>,
    /// Units that are done.
    done: usize,
    /// The first unit of the group whose splits are being merged, and what they came to.
    group: Option<(usize, UnitAnswer)>,
    /// Groups that are written, and whose rows are yet to be tested.
    written: Vec<UnitGroup>,
    reply: BatchReply,
    again: Vec<RepeatedRows>,
    wide: WideCursor,
}

/// How far the second pass has come.
#[derive(Default)]
struct WideCursor {
    /// The group, the unit in it and the first of that unit's parts that are next.
    group: usize,
    unit: usize,
    part: usize,
    /// States of the group's pieces so far, merged.
    states: Vec<WideState>,
}

/// Some parts of a unit, for some of its rows, in f64.
struct WidePiece {
    group: usize,
    unit: usize,
    parts: Range<usize>,
    /// Whether the group ends with it.
    last: bool,
}

impl AttendProgress {
    /// A plan of which nothing is done; the caller has checked its shapes and that `q` is finite.
    pub(super) fn new(job: &AttendJob<'_>) -> Self {
        Self {
            units: plan_units(job),
            done: 0,
            group: None,
            written: Vec::new(),
            reply: BatchReply::new(job),
            again: Vec::new(),
            wide: WideCursor::default(),
        }
    }

    /// Goes on until all is done, or the slice is over; whether all is done.
    pub(super) fn go_on(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        Ok(self.first_pass(job)? && self.second_pass(job)?)
    }

    /// The answer to a plan that is done.
    pub(super) fn take_answer(self, job: &AttendJob<'_>) -> Attended {
        let BatchReply { out, lse, .. } = self.reply;
        Attended { out, lse, stored_bytes_read: stored_bytes(job.plan, job.reader) }
    }

    /// Runs units by the kernels of their sides, merges the splits of each query row and writes the
    /// reply; and notes which rows those kernels do not serve.
    fn first_pass(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        loop {
            if !self.test_written(job)? {
                return Ok(false);
            }
            if self.done == self.units.len() {
                return Ok(true);
            }
            let end = self.units.len().min(self.done + ANSWERS_PER_THREAD * job.threads);
            let next = &self.units[self.done..end];
            let answers = run_some(job, next, |unit| run_unit(job, &unit.to_unit(job)))?;
            let paused = answers.len() < next.len();
            for answer in answers {
                let at = self.done;
                self.done += 1;
                self.merge_answer(job, at, answer);
            }
            if self.done == self.units.len() {
                self.end_group(job, self.done);
            }
            if paused || job.stop.slice_is_over() {
                return Ok(false);
            }
        }
    }

    /// Finds the rows of written groups that the kernels do not serve; whether all were tested.
    fn test_written(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        if self.written.is_empty() {
            return Ok(true);
        }
        let tested =
            run_some(job, &self.written, |group| group.find_repeated_rows(job, &self.units))?;
        let left = self.written.split_off(tested.len());
        self.written = left;
        self.again.extend(tested.into_iter().filter(|again| !again.rows.is_empty()));
        Ok(self.written.is_empty())
    }

    /// Takes what unit `at` came to.
    fn merge_answer(&mut self, job: &AttendJob<'_>, at: usize, answer: UnitAnswer) {
        if let Some((first, merged)) = &mut self.group {
            if self.units[*first].has_rows_of(&self.units[at]) {
                merged.merge_answer(&answer);
                return;
            }
            self.end_group(job, at);
        }
        self.group = Some((at, answer));
    }

    /// Writes the rows of the group that ends before unit `end`.
    fn end_group(&mut self, job: &AttendJob<'_>, end: usize) {
        let Some((first, merged)) = self.group.take() else { return };
        let cancelled = self.reply.write_unit(job, &self.units[first].to_unit(job), &merged.states);
        self.written.push(UnitGroup { units: first..end, merged, cancelled });
    }

    /// Attends to rows in f64, and writes them in place of what the reply has.
    fn second_pass(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        loop {
            let next = self.next_pieces(ANSWERS_PER_THREAD * job.threads);
            if next.is_empty() {
                return Ok(true);
            }
            let states = run_some(job, &next, |piece| {
                let rows = &self.again[piece.group].rows;
                let whole = self.units[piece.unit].to_unit(job);
                attend_f64::attend_rows(
                    job,
                    &AttendUnit { parts: &whole.parts[piece.parts.clone()], ..whole },
                    rows,
                )
            })?;
            let paused = states.len() < next.len();
            for (piece, states) in next.into_iter().zip(states) {
                self.merge_wide(job, piece, states);
            }
            if paused || job.stop.slice_is_over() {
                return Ok(false);
            }
        }
    }

    /// At most so many pieces of the second pass that come next.
    fn next_pieces(&self, most: usize) -> Vec<WidePiece> {
        let WideCursor { mut group, unit, part, .. } = self.wide;
        let (mut unit, mut part) = (unit, part);
        let mut pieces = Vec::new();
        while let Some(again) = self.again.get(group).filter(|_| pieces.len() < most) {
            let number = again.units.start + unit;
            let whole = &self.units[number];
            let (parts, rows) = (whole.parts.len(), again.rows.len() as u64);
            let tokens = (WIDE_COST_MAX / rows.max(1)).max(1);
            let end = parts.min(part + whole.parts_of(tokens));
            let (unit_ends, units) = (end == parts, again.units.len());
            let last = unit_ends && unit + 1 == units;
            pieces.push(WidePiece { group, unit: number, parts: part..end, last });
            (group, unit, part) = match (last, unit_ends) {
                (true, _) => (group + 1, 0, 0),
                (false, true) => (group, unit + 1, 0),
                (false, false) => (group, unit, end),
            };
        }
        pieces
    }

    /// Takes what a piece of the second pass came to.
    fn merge_wide(&mut self, job: &AttendJob<'_>, piece: WidePiece, states: Vec<WideState>) {
        let again = &self.again[piece.group];
        let unit = piece.unit - again.units.start;
        let wide = &mut self.wide;
        if wide.states.is_empty() {
            wide.states = states;
        } else {
            wide.states.iter_mut().zip(&states).for_each(|(state, split)| state.merge_split(split));
        }
        let unit_ends = piece.parts.end == self.units[piece.unit].parts.len();
        let unit = if unit_ends { unit + 1 } else { unit };
        let part = if unit_ends { 0 } else { piece.parts.end };
        (wide.group, wide.unit, wide.part) = (piece.group, unit, part);
        if !piece.last {
            return;
        }
        let states = std::mem::take(&mut wide.states);
        (wide.group, wide.unit, wide.part) = (piece.group + 1, 0, 0);
        let mut values = vec![0f32; self.reply.dim];
        for (row, state) in again.rows.iter().zip(&states) {
            let lse = state.write_output(&mut values);
            let target = payload_row(job, &self.units[piece.unit].to_unit(job), *row);
            self.reply.write_row(job.plan.dtype, target, &values, lse);
        }
    }
}

/// Runs the first of some pieces of work on all threads, until the slice is over; what they came
/// to, in order, and of one at least.
fn run_some<P: Sync, T: Send>(
    job: &AttendJob<'_>,
    pieces: &[P],
    run: impl Fn(&P) -> Result<T, BackendError> + Sync,
) -> Result<Vec<T>, BackendError> {
    job.stop.check()?;
    if let [piece] = pieces {
        return Ok(vec![run(piece)?]);
    }
    let taken = AtomicUsize::new(0);
    // Whoever takes a piece runs it, so that those that are done are the first ones.
    let worker = |_| {
        let mut done = Vec::new();
        while taken.load(Ordering::Relaxed) == 0 || !job.stop.slice_is_over() {
            let at = taken.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { break };
            job.stop.check()?;
            done.push((at, run(piece)?));
        }
        Ok(done)
    };
    let workers = job.threads.min(pieces.len());
    let done =
        (0..workers).into_par_iter().map(worker).collect::<Result<Vec<_>, BackendError>>()?;
    let mut all: Vec<(usize, T)> = done.into_iter().flatten().collect();
    all.sort_unstable_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, answer)| answer).collect())
}

/// Units of the same rows, merged.
struct UnitGroup {
    units: Range<usize>,
    merged: UnitAnswer,
    /// Rows of which transforms left little.
    cancelled: Vec<usize>,
}

impl UnitGroup {
    /// Finds the rows that the kernels do not serve.
    fn find_repeated_rows(
        &self,
        job: &AttendJob<'_>,
        units: &[UnitPlan],
    ) -> Result<RepeatedRows, BackendError> {
        let unit = &units[self.units.start].to_unit(job);
        let UnitAnswer { queries, states, losses } = &self.merged;
        let rows = MergedRows { job, unit, queries, states, losses }
            .not_served(&self.cancelled, LEFT_LEAST)?;
        Ok(RepeatedRows { units: self.units.clone(), rows })
    }
}

/// How many query rows are attended to again.
#[cfg(test)]
pub(super) fn rows_again(job: &AttendJob<'_>) -> Result<usize, BackendError> {
    let mut attend = AttendProgress::new(job);
    attend.first_pass(job)?;
    Ok(attend.again.iter().map(|again| again.rows.len()).sum())
}

/// Runs a unit, and gives back what its products have kept of the thread's registers.
fn run_unit(job: &AttendJob<'_>, unit: &AttendUnit<'_>) -> Result<UnitAnswer, BackendError> {
    let _registers = job.simd.in_use();
    attend_unit::answer_unit(job, unit)
}

/// A unit by numbers into its plan.
struct UnitPlan {
    query: usize,
    batch_row: usize,
    q: Range<u32>,
    head: usize,
    parts: Range<usize>,
    /// Tokens of the longest of its parts.
    part_tokens: u32,
}

impl UnitPlan {
    fn to_unit<'a>(&self, job: &AttendJob<'a>) -> AttendUnit<'a> {
        let query = &job.plan.queries[self.query];
        let parts = &query.parts[self.parts.clone()];
        AttendUnit { query, batch_row: self.batch_row, q: self.q.clone(), head: self.head, parts }
    }

    fn has_rows_of(&self, other: &Self) -> bool {
        self.query == other.query && self.q == other.q && self.head == other.head
    }

    /// How many of its parts have about so many tokens.
    fn parts_of(&self, tokens: u64) -> usize {
        usize::try_from(tokens / u64::from(self.part_tokens.max(1))).unwrap_or(usize::MAX).max(1)
    }
}

/// The plan's units.
#[cfg(test)]
pub(super) fn units_of<'a>(job: &AttendJob<'a>) -> Vec<AttendUnit<'a>> {
    plan_units(job).iter().map(|unit| unit.to_unit(job)).collect()
}

/// Splits the batch by work, so that one long sequence among many short ones is not left to a
/// single thread at the end; units of the same query tokens and head follow one another.
fn plan_units(job: &AttendJob<'_>) -> Vec<UnitPlan> {
    let kv_heads = job.reader.codec.geometry().kv_heads as usize;
    let whole = |query: &PlanQuery| query.n_q.div_ceil(UNIT_QUERY_TOKENS) as usize * kv_heads;
    let queries = &job.plan.queries;
    let seen: Vec<Range<usize>> = queries.iter().map(seen_parts).collect();
    let parts: usize = queries.iter().zip(&seen).map(|(of, seen)| whole(of) * seen.len()).sum();
    let parts_per_unit = parts.div_ceil(UNITS_PER_THREAD * job.threads).max(UNIT_PARTS_MIN);
    let mut units = Vec::with_capacity(queries.iter().map(whole).sum());
    let mut batch_row = 0;
    for (number, (query, seen)) in queries.iter().zip(seen).enumerate() {
        let part_tokens = query.parts[seen.clone()].iter().map(|part| part.rows).max();
        let part_tokens = part_tokens.unwrap_or(0);
        let rows = query.n_q.min(UNIT_QUERY_TOKENS) as usize * group_size(job);
        let part_cost = (rows as u64 + DECODE_ROWS) * u64::from(part_tokens.max(1));
        let most = usize::try_from(UNIT_COST_MAX / part_cost).unwrap_or(usize::MAX);
        let parts_per_unit = parts_per_unit.min(most.max(UNIT_PARTS_MIN));
        // Splits of one query are alike: no thread is left with a short rest.
        let splits = seen.len().div_ceil(parts_per_unit).max(1);
        let parts_per_split = seen.len().div_ceil(splits).max(1);
        for q_start in (0..query.n_q).step_by(UNIT_QUERY_TOKENS as usize) {
            let q = q_start..query.n_q.min(q_start + UNIT_QUERY_TOKENS);
            for head in 0..kv_heads {
                let unit = |parts| {
                    let q = q.clone();
                    UnitPlan { query: number, batch_row, q, head, parts, part_tokens }
                };
                if seen.is_empty() {
                    units.push(unit(seen.clone()));
                }
                let starts = seen.clone().step_by(parts_per_split);
                units.extend(starts.map(|at| unit(at..seen.end.min(at + parts_per_split))));
            }
        }
        batch_row += query.n_q as usize;
    }
    units
}

/// The parts from the first to the last that some token of the query sees.
fn seen_parts(query: &PlanQuery) -> Range<usize> {
    let visible = query.visible(0).start..query.visible(query.n_q.saturating_sub(1)).end;
    let is_seen = |part: &PlanPart| spans_of(part, visible.clone()).next().is_some();
    let Some(first) = query.parts.iter().position(is_seen) else { return 0..0 };
    first..query.parts.iter().rposition(is_seen).map_or(first, |last| last + 1)
}

/// Rows of a group of units that are to be attended to again, and where the units are.
struct RepeatedRows {
    units: Range<usize>,
    rows: Vec<usize>,
}

/// Outputs and log-sum-exps of a batch.
struct BatchReply {
    dim: usize,
    out: Vec<u8>,
    lse: Vec<f32>,
}

impl BatchReply {
    fn new(job: &AttendJob<'_>) -> Self {
        let dim = job.reader.codec.geometry().head_dim(Side::Value);
        let tokens: u32 = job.plan.queries.iter().map(|query| query.n_q).sum();
        let rows = tokens as usize * job.plan.q_heads as usize;
        let out = vec![0u8; rows * dim * job.plan.dtype.size_bytes()];
        Self { dim, out, lse: vec![f32::NEG_INFINITY; rows] }
    }

    /// Writes the rows of a unit, and returns those of which transforms left little: what f32 lost
    /// of their coefficients then counts.
    fn write_unit(
        &mut self,
        job: &AttendJob<'_>,
        unit: &AttendUnit<'_>,
        merged: &[PartialState],
    ) -> Vec<usize> {
        let mut cancelled = Vec::new();
        let side = job.reader.codec.head_codec(job.reader.layer, Side::Value, unit.head);
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
            if sum_of_squares(&values) < LEFT_LEAST * sum_of_squares(&state.coefficients) {
                cancelled.push(row);
            }
            for value in &mut values {
                *value /= state.weight_sum;
            }
            let target = payload_row(job, unit, row);
            self.write_row(job.plan.dtype, target, &values, state.lse());
        }
        cancelled
    }

    /// Writes row `target` of the batch.
    fn write_row(&mut self, dtype: DType, target: usize, values: &[f32], lse: f32) {
        let bytes = self.dim * dtype.size_bytes();
        self.lse[target] = lse;
        dtype.narrow_values(values, &mut self.out[target * bytes..][..bytes]);
    }
}

/// The sum of squares, in f64: f32 holds neither those of tiny values nor those of huge ones.
fn sum_of_squares(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [0f64; 16];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += f64::from(*value).powi(2));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>()
}

/// Bytes of the parts a plan names: what the compressed-throughput metric counts.
fn stored_bytes(plan: &AttendPlan, reader: LayerReader<'_>) -> u64 {
    let geometry = reader.codec.geometry();
    let token_bytes = geometry.values_per_token() * geometry.dtype.size_bytes() as u64;
    plan.queries
        .iter()
        .flat_map(|query| query.parts.iter())
        .map(|part| part.stored_bytes(token_bytes))
        .sum()
}
