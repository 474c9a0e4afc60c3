//! From the scores of a span to weights: the softmax of a unit's rows, span by span.

use crate::cpu::attend_job::{AttendUnit, group_size};
use crate::cpu::attend_unit::{UnitState, split_range};
use crate::cpu::softmax::{self, SeenScores, WeightSums};
use crate::cpu::span_scores::find_score;
use crate::cpu::token_span::TokenSpan;
use kvd_codec::RowSpace;
use std::ops::Range;

impl UnitState<'_> {
    /// Turns scores into weights, online (Milakov and Gimelshein): sums seen so far are scaled
    /// down when a larger score comes.
    pub(super) fn weigh_span(
        &mut self,
        span: &TokenSpan,
        key_space: RowSpace,
        value_space: RowSpace,
    ) {
        let seen = span.visible_rows(&self.seen_by_all);
        if span.is_whole(&seen) {
            self.weigh_rows(span, 0..self.states.len(), &seen, [key_space, value_space]);
        } else {
            self.weigh_in_groups(span, [key_space, value_space]);
        }
    }

    /// As [`UnitState::weigh_span`], where query tokens do not all see the same.
    #[inline(never)]
    fn weigh_in_groups(&mut self, span: &TokenSpan, spaces: [RowSpace; 2]) {
        let group = group_size(self.job);
        let seen_by =
            |unit: &AttendUnit<'_>, row: usize| span.visible_rows(&unit.visible(row / group));
        let mut end = 0;
        while end < self.states.len() {
            // Query tokens that see the same go together.
            let (first, seen) = (end, seen_by(self.unit, end));
            end += group;
            while end < self.states.len() && seen_by(self.unit, end) == seen {
                end += group;
            }
            self.weigh_rows(span, first..end, &seen, spaces);
        }
    }

    /// Turns the scores of rows that see the same tokens of a span into weights; `spaces` are those
    /// of keys and values.
    fn weigh_rows(
        &mut self,
        span: &TokenSpan,
        rows: Range<usize>,
        seen: &Range<usize>,
        spaces: [RowSpace; 2],
    ) {
        let (simd, cap) = (self.job.simd, self.job.plan.soft_cap);
        self.scores.set_seen(rows.clone(), seen, &span.tile_range());
        if seen.is_empty() {
            return;
        }
        for rows in split_range(rows, softmax::ROWS) {
            self.prefetch.next_step();
            let offsets = &self.queries.offsets_of(spaces[0])[rows.clone()];
            let (mut maxima, mut sums) = ([0f32; softmax::ROWS], WeightSums::default());
            let scores = self.scores.some_mut(rows.start, rows.len());
            let some = SeenScores { rows: scores, tokens: seen.clone() };
            softmax::finish_scores(simd, some, offsets, cap, &mut maxima);
            if let Some(probe) = &mut self.probe {
                probe.keep_scores(rows.clone(), &self.scores);
            }
            self.raise_maxima(rows.clone(), span, &mut maxima, &mut sums.largest);
            self.prefetch.next_step();
            let scores = self.scores.some_mut(rows.start, rows.len());
            let some = SeenScores { rows: scores, tokens: seen.clone() };
            softmax::weigh_scores(simd, some, &maxima, &mut sums);
            self.scores.take_sums(rows.clone(), &sums);
            for (state, sum) in self.states[rows].iter_mut().zip(sums.weights) {
                state.weight_sum += sum;
                if spaces[1] == RowSpace::Coefficient {
                    state.coefficient_weight += sum;
                }
            }
        }
    }

    /// Takes the largest scores of a span; `maxima` become those of all spans so far, and `below`
    /// how far the span's are from them.
    fn raise_maxima(
        &mut self,
        rows: Range<usize>,
        span: &TokenSpan,
        maxima: &mut [f32; softmax::ROWS],
        below: &mut [f32; softmax::ROWS],
    ) {
        for ((row, max), below) in rows.zip(maxima).zip(below) {
            let (state, loss) = (&mut self.states[row], &mut self.losses[row]);
            if *max > state.max {
                let seen = self.scores.seen_tokens(row);
                let at = find_score(&self.scores.row(row)[seen.clone()], *max);
                loss.largest_at = span.position_of(seen.start + at) as u32;
            }
            if *max > state.max
                && state.weight_sum > 0.0
                && let Some(values) = &mut self.values
            {
                let factor = (state.max - *max).exp();
                let dim = state.raw.len();
                values.scale_row(row, &mut self.sums[row * dim..][..dim], factor);
                loss.scale_by(factor);
            }
            state.raise_max(*max);
            (*below, *max) = (*max - state.max, state.max);
        }
    }
}
