//! An attend that a device answers in slices, between which other work may have it.

use crate::{AttendPlan, Attended, BackendError, PlanQuery, Stop};
use std::any::Any;
use std::ops::Range;

/// Scores of one piece of a plan, where a device answers plans whole: tens of milliseconds of a CPU
/// and about one of a GPU.
const PIECE_SCORES: u64 = 1 << 30;

/// An attend and how far it has come.
pub struct AttendTask {
    /// The question.
    pub plan: AttendPlan,
    /// The device's own state of it between slices; none before the first.
    pub under_way: Option<Box<dyn Any + Send>>,
    /// Memory for the answer, if a device wants it: of an earlier answer, or none.
    pub memory: Attended,
    /// Whether nobody waits for a query any more, by query; none while all are waited for.
    dropped: Vec<bool>,
}

/// Rows of a plan that are answered, where a device answers whole plans.
#[derive(Default)]
struct AnsweredRows {
    /// The query of the next row, and the row's token in it.
    query: usize,
    token: u32,
    /// Query tokens before it.
    tokens: usize,
    attended: Attended,
}

impl AttendTask {
    /// An attend of which nothing is done.
    #[must_use]
    pub fn new(plan: AttendPlan) -> Self {
        Self { plan, under_way: None, memory: Attended::default(), dropped: Vec::new() }
    }

    /// Leaves out some queries from now on, as far as the device can: nobody waits for them, and
    /// what stands for them in the answer means nothing.
    pub fn drop_queries(&mut self, queries: Range<usize>) {
        self.dropped.resize(self.plan.queries.len(), false);
        self.dropped[queries].fill(true);
    }

    /// Whether nobody waits for a query any more, by query; none while all are waited for.
    #[must_use]
    pub fn dropped_queries(&self) -> &[bool] {
        &self.dropped
    }

    /// Answers the plan by `attend`, which answers plans whole: one of many scores in pieces of
    /// some query tokens each. `None` when the slice was over before the last of them.
    ///
    /// # Errors
    /// As `attend`, or [`BackendError::Stopped`].
    pub fn attend_by_pieces(
        &mut self,
        stop: &Stop,
        mut attend: impl FnMut(&AttendPlan) -> Result<Attended, BackendError>,
    ) -> Result<Option<Attended>, BackendError> {
        stop.check()?;
        let plan = &self.plan;
        let known = self.under_way.take().and_then(|rows| rows.downcast::<AnsweredRows>().ok());
        if known.is_none() && plan.scores() <= PIECE_SCORES {
            return attend(plan).map(Some);
        }
        let mut rows = known.unwrap_or_default();
        while rows.query < plan.queries.len() {
            stop.check()?;
            rows.attend_next(plan, &mut attend)?;
            if rows.query < plan.queries.len() && stop.slice_is_over() {
                self.under_way = Some(rows);
                return Ok(None);
            }
        }
        Ok(Some(rows.attended))
    }
}

impl AnsweredRows {
    /// Answers the next piece.
    fn attend_next(
        &mut self,
        plan: &AttendPlan,
        attend: &mut impl FnMut(&AttendPlan) -> Result<Attended, BackendError>,
    ) -> Result<(), BackendError> {
        let mut queries = Vec::new();
        let (first, mut left) = (self.tokens, PIECE_SCORES);
        while let Some(query) = plan.queries.get(self.query) {
            let row = (query.tokens() * u64::from(plan.q_heads)).max(1);
            let rest = query.n_q - self.token;
            let fit = u32::try_from(left / row).unwrap_or(u32::MAX).min(rest);
            // One row at least, however long it is; a query that is cut begins a piece.
            let taken = if queries.is_empty() { fit.max(1).min(rest) } else { fit };
            if taken < rest && !queries.is_empty() {
                break;
            }
            left = left.saturating_sub(u64::from(taken) * row);
            queries.push(PlanQuery {
                n_q: taken,
                position: query.position.saturating_add(self.token),
                ..query.clone()
            });
            self.tokens += taken as usize;
            self.token += taken;
            if self.token < query.n_q {
                break;
            }
            (self.query, self.token) = (self.query + 1, 0);
        }
        let token_bytes = plan.q.len() / plan.query_tokens().max(1);
        let q = plan.q.slice(first * token_bytes..self.tokens * token_bytes);
        // What the pieces of a query share is counted with the last of them.
        let whole = self.token == 0;
        let piece = attend(&AttendPlan { queries, q, ..plan.clone() })?;
        self.attended.out.extend(piece.out);
        self.attended.lse.extend(piece.lse);
        self.attended.saved_passes += piece.saved_passes;
        self.attended.stored_bytes_read += if whole { piece.stored_bytes_read } else { 0 };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanPart, Slice, Source, StopReason};
    use bytes::Bytes;
    use kvd_core::{DType, Extent, LayerIndex, ModelId};
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    /// Queries of so many tokens over that many stored ones, of 32 heads with one channel.
    fn plan(queries: &[(u32, u32)]) -> AttendPlan {
        let source =
            Source::Raw { extent: Extent { offset: 0, len: 1 }, capacity_rows: 1, first_row: 0 };
        let query = |&(n_q, tokens): &(u32, u32)| {
            let part = PlanPart { first_token: 0, rows: tokens, source: source.clone() };
            let parts = [part].into();
            PlanQuery { n_q, position: 1000, sliding_window: None, parts }
        };
        let tokens: u32 = queries.iter().map(|query| query.0).sum();
        let q: Vec<u8> = (0..tokens).flat_map(|token| [token as u8; 32]).collect();
        AttendPlan {
            model: ModelId(1),
            layer: LayerIndex(0),
            q_heads: 32,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: queries.iter().map(query).collect(),
            q: Bytes::from(q),
        }
    }

    /// The answer of a device that gives queries back, and the tokens of each call.
    fn attended(plan: &AttendPlan, calls: &mut Vec<Vec<(u32, u32)>>) -> Attended {
        calls.push(plan.queries.iter().map(|query| (query.n_q, query.position)).collect());
        let lse = vec![0.0; plan.rows() as usize];
        Attended {
            out: plan.q.to_vec(),
            lse,
            stored_bytes_read: plan.queries.len() as u64,
            saved_passes: 0,
        }
    }

    #[test]
    fn a_plan_of_few_scores_is_one_piece() {
        let mut calls = Vec::new();
        let plan = plan(&[(3, 100), (1, 5)]);
        let mut task = AttendTask::new(plan.clone());
        let stop = Stop::never();
        let all = task.attend_by_pieces(&stop, |plan| Ok(attended(plan, &mut calls))).unwrap();
        assert_eq!(all.unwrap().out, plan.q);
        assert_eq!(calls, [vec![(3, 1000), (1, 1000)]]);
    }

    #[test]
    fn pieces_cover_each_row_once_and_pause_between_them() {
        let mut calls = Vec::new();
        // A row of 2^24 tokens is half of a piece.
        let plan = plan(&[(1, 1), (5, 1 << 24), (1, 1)]);
        let slice = Slice { ends: Instant::now(), waiting: Arc::new(AtomicUsize::new(1)) };
        let stop = Stop { slice: Some(slice), ..Stop::never() };
        let mut task = AttendTask::new(plan.clone());
        let mut slices = 1;
        let answer = loop {
            let done = task.attend_by_pieces(&stop, |plan| Ok(attended(plan, &mut calls))).unwrap();
            if let Some(answer) = done {
                break answer;
            }
            slices += 1;
        };
        assert_eq!(answer.out, plan.q);
        assert_eq!(answer.lse.len() as u64, plan.rows());
        assert_eq!(slices, calls.len(), "a pause after each piece but the last");
        assert_eq!(answer.stored_bytes_read, 1 + 2);
        let wanted =
            [vec![(1, 1000)], vec![(2, 1000)], vec![(2, 1002)], vec![(1, 1004), (1, 1000)]];
        assert_eq!(calls, wanted);
    }

    #[test]
    fn work_that_nobody_waits_for_ends_between_pieces() {
        let stop = Stop::never();
        let mut task = AttendTask::new(plan(&[(5, 1 << 25)]));
        let mut pieces = 0;
        let stopped = task.attend_by_pieces(&stop, |plan| {
            pieces += 1;
            stop.cancelled.store(true, std::sync::atomic::Ordering::Release);
            Ok(attended(plan, &mut Vec::new()))
        });
        let stopped = stopped.unwrap_err();
        assert!(matches!(stopped, BackendError::Stopped(StopReason::Cancelled)), "{stopped}");
        assert_eq!(pieces, 1);
    }
}
