//! Attention over raw rows and pages: one loop for every codec, FlashDecoding-style split over
//! the stored range, and a merge of the partial states; in slices, between which others may have
//! the device.

use crate::cpu::attend_f64::{self, WideState};
use crate::cpu::attend_job::{AttendJob, AttendUnit, group_size, payload_row};
use crate::cpu::attend_unit;
use crate::cpu::left_of_sums::LeftOfSums;
use crate::cpu::loss::MergedRows;
use crate::cpu::row_reader::LayerReader;
use crate::cpu::scratch::{ScratchValue, ScratchVec};
use crate::cpu::unit_answer::UnitAnswer;
use crate::cpu::unit_plan::{PlannedUnits, RowGroup, SharedPasses, UnitPlan, plan_units};
use crate::{AttendPlan, Attended, BackendError, PartialState, StopReason};
use kvd_core::{DType, Side};
use rayon::prelude::*;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows times tokens of one piece of the second pass, at most: f64 takes ten times as long.
const WIDE_COST_MAX: u64 = 1 << 15;
/// Units for each thread whose answers are kept at once.
const ANSWERS_PER_THREAD: usize = 16;

/// Attention under way: what is left of it, and what it came to so far. It refers to the plan by
/// numbers alone, so that the device may do something else between two slices.
pub(super) struct AttendProgress {
    planned: PlannedUnits,
    /// Units that are done.
    done: usize,
    /// Results of groups whose units are being merged, by group.
    merging: ScratchVec<Option<UnitAnswer>>,
    /// Groups that are written, and whose rows are yet to be tested.
    written: ScratchVec<WrittenGroup>,
    reply: BatchReply,
    again: Vec<RepeatedRows>,
    wide: WideCursor,
    /// So many of the next pieces were begun and given up: they are not given up once more.
    whole: usize,
}

/// How far the second pass has come.
#[derive(Default)]
struct WideCursor {
    /// The group, the split of it and the first of that split's parts that are next.
    group: usize,
    split: usize,
    part: usize,
    /// States of the group's pieces so far, merged.
    states: Vec<WideState>,
}

/// Some parts of a split, for some of its group's rows, in f64.
struct WidePiece {
    /// Which of the groups that have such rows.
    group: usize,
    split: usize,
    /// Counted in the query.
    parts: Range<usize>,
    /// Whether the group ends with it.
    last: bool,
}

impl AttendProgress {
    /// A plan of which nothing is done; the caller has checked its shapes and that `q` is finite.
    /// The answer is written to that memory.
    pub(super) fn in_memory(job: &AttendJob<'_>, memory: Attended) -> Self {
        Self::of_units(job, plan_units(job, SharedPasses::Together), memory)
    }

    #[cfg(test)]
    pub(super) fn new(job: &AttendJob<'_>) -> Self {
        Self::in_memory(job, Attended::default())
    }

    #[cfg(test)]
    pub(super) fn with_passes(job: &AttendJob<'_>, passes: SharedPasses) -> Self {
        Self::of_units(job, plan_units(job, passes), Attended::default())
    }

    fn of_units(job: &AttendJob<'_>, planned: PlannedUnits, memory: Attended) -> Self {
        let groups = planned.groups.len();
        Self {
            merging: ScratchVec::collect_values((0..groups).map(|_| None)),
            written: ScratchVec::with_room(groups),
            planned,
            done: 0,
            reply: BatchReply::new(job, memory),
            again: Vec::new(),
            wide: WideCursor::default(),
            whole: 0,
        }
    }

    /// Goes on until all is done, or the slice is over; whether all is done.
    pub(super) fn go_on(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        Ok(self.first_pass(job)? && self.second_pass(job)?)
    }

    /// The answer to a plan that is done.
    pub(super) fn take_answer(self, job: &AttendJob<'_>) -> Attended {
        let saved_passes = self.planned.count_saved_passes();
        let BatchReply { out, lse, .. } = self.reply;
        let stored_bytes_read = stored_bytes(job.plan, job.reader);
        Attended { out, lse, stored_bytes_read, saved_passes }
    }

    /// Runs units by the kernels of their sides, merges the splits of each query row and writes the
    /// reply; and notes which rows those kernels do not serve.
    fn first_pass(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        let units = self.planned.units.len();
        loop {
            if !self.test_written(job)? {
                return Ok(false);
            }
            if self.done == units {
                return Ok(true);
            }
            let end = units.min(self.done + ANSWERS_PER_THREAD * job.threads);
            let next = &self.planned.units[self.done..end];
            let groups = &self.planned.groups;
            let run = |job: &AttendJob<'_>, unit: &UnitPlan| run_unit(job, unit, groups);
            let mut answers = run_some(job, next, &mut self.whole, run)?;
            let paused = answers.len() < next.len();
            for answers in answers.drain(..) {
                self.merge_answers(job, answers);
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
        let groups = &self.planned.groups;
        let test =
            |job: &AttendJob<'_>, group: &WrittenGroup| group.find_repeated_rows(job, groups);
        // They are short and look at no stop.
        let mut tested = run_some(job, &self.written, &mut 0, test)?;
        self.written.drain(..tested.len());
        self.again.extend(tested.drain(..).filter(|again| !again.rows.is_empty()));
        Ok(self.written.is_empty())
    }

    /// Takes what the next unit came to, group by group; none for one that nobody waits for.
    fn merge_answers(&mut self, job: &AttendJob<'_>, answers: UnitAnswers) {
        let at = self.done;
        self.done += 1;
        let groups = self.planned.units[at].groups();
        for (group, answer) in groups.iter().zip(answers) {
            match &mut self.merging[*group] {
                Some(merged) => merged.merge_answer(&answer),
                empty => *empty = Some(answer),
            }
        }
        let is_last = |group: &usize| self.planned.groups[*group].last_unit == at;
        let ended: SmallVec<[usize; 1]> = groups.iter().copied().filter(is_last).collect();
        ended.into_iter().for_each(|group| self.end_group(job, group));
    }

    /// Writes the rows of a group whose units are all merged.
    fn end_group(&mut self, job: &AttendJob<'_>, group: usize) {
        let Some(merged) = self.merging[group].take() else { return };
        if job.is_dropped(self.planned.groups[group].query) {
            return;
        }
        let unit = self.planned.groups[group].to_unit(job, 0..0);
        let left = self.reply.write_unit(job, &unit, &merged.states);
        self.written.push_value(WrittenGroup { group, merged, left });
    }

    /// Attends to rows in f64, and writes them in place of what the reply has.
    fn second_pass(&mut self, job: &AttendJob<'_>) -> Result<bool, BackendError> {
        let is_dropped =
            |again: &RepeatedRows| job.is_dropped(self.planned.groups[again.group].query);
        while self.again.get(self.wide.group).is_some_and(is_dropped) {
            self.wide = WideCursor { group: self.wide.group + 1, ..WideCursor::default() };
        }
        loop {
            let next = self.next_pieces(ANSWERS_PER_THREAD * job.threads);
            if next.is_empty() {
                return Ok(true);
            }
            let mut states = run_some(job, &next, &mut self.whole, |job, piece| {
                let RepeatedRows { group, rows } = &self.again[piece.group];
                let unit = self.planned.groups[*group].to_unit(job, piece.parts.clone());
                attend_f64::attend_rows(job, &unit, rows)
            })?;
            let paused = states.len() < next.len();
            for (piece, states) in next.into_iter().zip(states.drain(..)) {
                self.merge_wide(job, piece, states);
            }
            if paused || job.stop.slice_is_over() {
                return Ok(false);
            }
        }
    }

    /// At most so many pieces of the second pass that come next.
    fn next_pieces(&self, most: usize) -> Vec<WidePiece> {
        let WideCursor { mut group, mut split, mut part, .. } = self.wide;
        let mut pieces = Vec::new();
        while let Some(again) = self.again.get(group).filter(|_| pieces.len() < most) {
            let of = &self.planned.groups[again.group];
            let whole = of.splits[split].clone();
            let tokens = (WIDE_COST_MAX / (again.rows.len() as u64).max(1)).max(1);
            let end = whole.len().min(part + of.parts_of(tokens));
            let (split_ends, splits) = (end == whole.len(), of.splits.len());
            let last = split_ends && split + 1 == splits;
            let parts = whole.start + part..whole.start + end;
            pieces.push(WidePiece { group, split, parts, last });
            (group, split, part) = match (last, split_ends) {
                (true, _) => (group + 1, 0, 0),
                (false, true) => (group, split + 1, 0),
                (false, false) => (group, split, end),
            };
        }
        pieces
    }

    /// Takes what a piece of the second pass came to.
    fn merge_wide(&mut self, job: &AttendJob<'_>, piece: WidePiece, states: Vec<WideState>) {
        let again = &self.again[piece.group];
        let of = &self.planned.groups[again.group];
        let wide = &mut self.wide;
        if wide.states.is_empty() {
            wide.states = states;
        } else {
            wide.states.iter_mut().zip(&states).for_each(|(state, split)| state.merge_split(split));
        }
        let whole = &of.splits[piece.split];
        let split_ends = piece.parts.end == whole.end;
        let split = if split_ends { piece.split + 1 } else { piece.split };
        let part = if split_ends { 0 } else { piece.parts.end - whole.start };
        (wide.group, wide.split, wide.part) = (piece.group, split, part);
        if !piece.last {
            return;
        }
        let states = std::mem::take(&mut wide.states);
        (wide.group, wide.split, wide.part) = (piece.group + 1, 0, 0);
        let mut values = vec![0f32; self.reply.dim];
        let unit = of.to_unit(job, 0..0);
        for (row, state) in again.rows.iter().zip(&states) {
            let lse = state.write_output(&mut values);
            let target = payload_row(job, &unit, *row);
            self.reply.write_row(job.plan.dtype, target, &values, lse);
        }
    }
}

/// Runs the first of some pieces of work on all threads, until the slice is over; what they came
/// to, in order. Pieces at work are given up for work that goes first, but for the first `whole`,
/// of which one is run at least: so each is begun twice at most.
fn run_some<P: Sync, T: ScratchValue + Send>(
    job: &AttendJob<'_>,
    pieces: &[P],
    whole: &mut usize,
    run: impl Fn(&AttendJob<'_>, &P) -> Result<T, BackendError> + Sync,
) -> Result<ScratchVec<T>, BackendError> {
    job.stop.check()?;
    if job.is_small {
        return run_here(job, pieces, run);
    }
    let giving_way = job.giving_way();
    let taken = AtomicUsize::new(0);
    let first_whole = *whole;
    // Whoever takes a piece runs it, so that those that are done are the first ones.
    let worker = |_| {
        let _scratch = job.scratch.take_store();
        let mut done = Vec::new();
        while taken.load(Ordering::Relaxed) == 0 || !job.stop.slice_is_over() {
            let at = taken.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { break };
            job.stop.check()?;
            match run(if at < first_whole { job } else { &giving_way }, piece) {
                Err(BackendError::Stopped(StopReason::Outrun)) => break,
                ran => done.push((at, ran?)),
            }
        }
        Ok(done)
    };
    let done = if pieces.len() == 1 {
        worker(0)?
    } else {
        let workers = job.threads.min(pieces.len());
        let done = (0..workers).into_par_iter().map(worker);
        done.collect::<Result<Vec<_>, BackendError>>()?.into_iter().flatten().collect()
    };
    let begun = taken.into_inner().min(pieces.len());
    let done = keep_first(done);
    *whole = (begun - done.len()).max(whole.saturating_sub(done.len()));
    Ok(done)
}

/// Answers of pieces, in order, up to the first that is missing.
fn keep_first<T: ScratchValue>(mut done: Vec<(usize, T)>) -> ScratchVec<T> {
    done.sort_unstable_by_key(|(at, _)| *at);
    let mut kept = ScratchVec::with_room(done.len());
    let first = done.into_iter().enumerate().take_while(|(number, (at, _))| number == at);
    kept.extend(first.map(|(_, (_, answer))| answer));
    kept
}

/// Runs pieces of work as [`run_some`], on this thread.
fn run_here<P, T: ScratchValue>(
    job: &AttendJob<'_>,
    pieces: &[P],
    run: impl Fn(&AttendJob<'_>, &P) -> Result<T, BackendError>,
) -> Result<ScratchVec<T>, BackendError> {
    let mut done = ScratchVec::with_room(pieces.len());
    for piece in pieces {
        if !done.is_empty() && job.stop.slice_is_over() {
            break;
        }
        job.stop.check()?;
        done.push(run(job, piece)?);
    }
    Ok(done)
}

/// A group whose units are merged and written.
pub(super) struct WrittenGroup {
    group: usize,
    merged: UnitAnswer,
    left: LeftOfSums,
}

impl WrittenGroup {
    /// Finds the rows that the kernels do not serve.
    fn find_repeated_rows(
        &self,
        job: &AttendJob<'_>,
        groups: &[RowGroup],
    ) -> Result<RepeatedRows, BackendError> {
        let of = &groups[self.group];
        let unit = &of.to_unit(job, 0..job.plan.queries[of.query].parts.len());
        let UnitAnswer { queries, states, losses } = &self.merged;
        let rows =
            MergedRows { job, unit, queries, states, losses, left: &self.left }.not_served()?;
        Ok(RepeatedRows { group: self.group, rows })
    }
}

/// How many query rows are attended to again.
#[cfg(test)]
pub(super) fn rows_again(job: &AttendJob<'_>) -> Result<usize, BackendError> {
    let mut attend = AttendProgress::new(job);
    attend.first_pass(job)?;
    Ok(attend.again.iter().map(|again| again.rows.len()).sum())
}

/// The plan's units.
#[cfg(test)]
pub(super) fn units_of<'a>(job: &AttendJob<'a>) -> Vec<AttendUnit<'a>> {
    let PlannedUnits { groups, units } = plan_units(job, SharedPasses::Together);
    units.iter().map(|unit| unit.to_unit(job, &groups)).collect()
}

/// Results of a unit, by group.
pub(super) type UnitAnswers = SmallVec<[UnitAnswer; 1]>;

/// Runs a unit, and gives back what its products have kept of the thread's registers; the answers
/// of its groups.
fn run_unit(
    job: &AttendJob<'_>,
    unit: &UnitPlan,
    groups: &[RowGroup],
) -> Result<UnitAnswers, BackendError> {
    if unit.groups().iter().all(|group| job.is_dropped(groups[*group].query)) {
        return Ok(UnitAnswers::new());
    }
    let _registers = job.simd.in_use();
    let unit = unit.to_unit(job, groups);
    let mut rest = attend_unit::answer_unit(job, &unit)?;
    let mut answers = UnitAnswers::with_capacity(unit.tokens.len());
    for tokens in &unit.tokens[..unit.tokens.len() - 1] {
        let next = rest.split_off_rows(tokens.q.len() * group_size(job));
        answers.push(std::mem::replace(&mut rest, next));
    }
    answers.push(rest);
    Ok(answers)
}

/// Rows of a group that are to be attended to again.
pub(super) struct RepeatedRows {
    group: usize,
    rows: Vec<usize>,
}

/// Outputs and log-sum-exps of a batch.
struct BatchReply {
    dim: usize,
    out: Vec<u8>,
    lse: Vec<f32>,
}

impl BatchReply {
    fn new(job: &AttendJob<'_>, memory: Attended) -> Self {
        let dim = job.reader.codec.geometry().head_dim(Side::Value);
        let tokens: u32 = job.plan.queries.iter().map(|query| query.n_q).sum();
        let rows = tokens as usize * job.plan.q_heads as usize;
        let Attended { mut out, mut lse, .. } = memory;
        out.clear();
        out.resize(rows * dim * job.plan.dtype.size_bytes(), 0);
        lse.clear();
        lse.resize(rows, f32::NEG_INFINITY);
        Self { dim, out, lse }
    }

    /// Writes the rows of a unit, and returns what was left of their sums: where that is little,
    /// what the sums lost counts.
    fn write_unit(
        &mut self,
        job: &AttendJob<'_>,
        unit: &AttendUnit<'_>,
        merged: &[PartialState],
    ) -> LeftOfSums {
        let mut left = LeftOfSums::default();
        let side = job.reader.codec.head_codec(job.reader.layer, Side::Value, unit.head);
        let mut unfolded = ScratchVec::with_room(merged.len() * self.dim);
        merged.iter().for_each(|state| unfolded.extend_from_slice(&state.coefficients));
        let weights = merged.iter().map(|state| state.coefficient_weight);
        let weights = ScratchVec::collect_values(weights);
        if weights.iter().any(|weight| *weight > 0.0) {
            side.unfold_values(&mut unfolded, &weights);
        }
        let mut values = ScratchVec::repeat_value(0f32, self.dim);
        let rows = merged.iter().zip(unfolded.chunks_exact(self.dim)).enumerate();
        for (row, (state, unfolded)) in rows {
            if state.weight_sum == 0.0 {
                continue;
            }
            values.copy_from_slice(&state.raw);
            if state.coefficient_weight > 0.0 {
                values.iter_mut().zip(unfolded).for_each(|(value, of)| *value += of);
            }
            if state.coefficient_weight > 0.0 {
                left.take_row(row, &values, state, side.offset());
            }
            for value in &mut values[..] {
                *value /= state.weight_sum;
            }
            let target = payload_row(job, unit, row);
            self.write_row(job.plan.dtype, target, &values, state.lse());
        }
        left
    }

    /// Writes row `target` of the batch.
    fn write_row(&mut self, dtype: DType, target: usize, values: &[f32], lse: f32) {
        let bytes = self.dim * dtype.size_bytes();
        self.lse[target] = lse;
        dtype.narrow_values(values, &mut self.out[target * bytes..][..bytes]);
    }
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
