//! Scores of keys alone, all of them kept: what softmax would take.

use crate::BackendError;
use crate::cpu::attend_f64;
use crate::cpu::attend_job::{AttendJob, AttendUnit, TokenList, UnitTokens, group_size};
use crate::cpu::attend_unit::UnitState;
use crate::cpu::raw_slots::restore_rows;
use crate::cpu::row_reader::RowReader;
use crate::cpu::softmax::{self, SeenScores};
use crate::cpu::token_span::TokenSpan;
use kvd_core::Side;
use rayon::prelude::*;

/// Writes the scores of the plan's one query token, `[q_heads, tokens]`; the caller has checked
/// shapes and that `q` is finite. Tokens that it does not see are -infinity.
pub(super) fn write_key_scores(job: &AttendJob<'_>, out: &mut [f32]) -> Result<(), BackendError> {
    let query = &job.plan.queries[0];
    let tokens = query.tokens() as usize;
    if tokens == 0 {
        return Ok(());
    }
    let heads = out.par_chunks_exact_mut(group_size(job) * tokens).enumerate();
    heads.try_for_each(|(head, out)| {
        let tokens = TokenList::One([UnitTokens { query, batch_row: 0, q: 0..1 }]);
        let unit = AttendUnit { tokens, head, parts: &query.parts };
        let _scratch = job.scratch.take_store();
        let _registers = job.simd.in_use();
        out.fill(f32::NEG_INFINITY);
        UnitState::new(job, &unit)?
            .score_parts(&[Side::Key], |state, rows, span| state.keep_scores(&rows[0], span, out))
    })
}

impl UnitState<'_> {
    /// Writes the finished scores of a span into `[rows, tokens]` of the plan.
    fn keep_scores(
        &mut self,
        keys: &RowReader<'_>,
        span: &TokenSpan,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let seen = span.visible_rows(&self.unit.visible(0));
        if seen.is_empty() {
            return Ok(());
        }
        let rows = self.scores.row_count();
        let tokens = out.len() / rows;
        let at = span.position_of(seen.start) - self.unit.parts[0].first_token as usize;
        for first in (0..rows).step_by(softmax::ROWS) {
            let count = softmax::ROWS.min(rows - first);
            let offsets = &self.queries.offsets_of(keys.row_space())[first..first + count];
            let mut maxima = [0f32; softmax::ROWS];
            let some =
                SeenScores { rows: self.scores.some_mut(first, count), tokens: seen.clone() };
            softmax::finish_scores(
                self.job.simd,
                some,
                offsets,
                self.job.plan.soft_cap,
                &mut maxima,
            );
            for row in first..first + count {
                let scores = &self.scores.row(row)[seen.clone()];
                let out = &mut out[row * tokens + at..][..scores.len()];
                out.copy_from_slice(scores);
                if maxima[row - first] >= softmax::SCORE_MAX {
                    self.score_again(keys, span.first + seen.start, row, out)?;
                }
            }
        }
        Ok(())
    }

    /// Writes those scores of a row that left f32, of the keys from row `first` of their source on,
    /// as f64 has them.
    fn score_again(
        &self,
        keys: &RowReader<'_>,
        first: usize,
        row: usize,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let reader = self.job.reader;
        let side = reader.codec.head_codec(reader.layer, Side::Key, self.unit.head);
        let mut key = vec![0f32; side.dim()];
        for (at, score) in out.iter_mut().enumerate() {
            if *score >= softmax::SCORE_MAX {
                keys.decode_at(first + at, 1, &mut key)?;
                restore_rows(side, keys.row_space(), &mut key);
                if let Some(wide) = attend_f64::score_keys(self.job, self.unit, row, &key).next() {
                    *score = (wide as f32).clamp(-f32::MAX, f32::MAX);
                }
            }
        }
        Ok(())
    }
}
