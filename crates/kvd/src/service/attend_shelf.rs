//! Memory of attends that are over, for those that come: lists of queries, of their parts and pins,
//! and answers.
//!
//! Owns [`AttendShelf`], of which the service has one. What is on it is empty, and names no page.
//! Any thread takes and keeps, under a lock of the shelf's own, held for one move.

use super::plan;
use kvd_compute::{Attended, PlanPart, PlanQuery, Source};
use kvd_core::Extent;
use kvd_proto::domain::AttendQuery;
use kvd_store::{PinMemory, PinnedRange};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Lists of each kind that are kept; the oldest goes.
const LISTS_MAX: usize = 64;
/// Bytes of a list that is kept at most: a shelf takes 10 MiB at most.
const LIST_BYTES_MAX: usize = 32 << 10;

/// A part of nothing.
const NO_PART: PlanPart = PlanPart {
    first_token: 0,
    rows: 0,
    source: Source::Raw { extent: Extent { offset: 0, len: 0 }, capacity_rows: 0, first_row: 0 },
};

/// Lists that nobody uses at the moment.
#[derive(Default)]
pub(super) struct AttendShelf {
    queries: Mutex<VecDeque<Vec<AttendQuery>>>,
    plans: Mutex<VecDeque<Vec<PlanQuery>>>,
    parts: Mutex<VecDeque<Arc<[PlanPart]>>>,
    pins: Mutex<VecDeque<PinMemory>>,
    answers: Mutex<VecDeque<Attended>>,
}

/// Puts a list on its shelf, if it is not too large; answers what has to go.
fn keep_list<L>(kept: &Mutex<VecDeque<L>>, list: L, bytes: usize) -> Option<L> {
    if bytes == 0 || bytes > LIST_BYTES_MAX {
        return Some(list);
    }
    let mut kept = kept.lock();
    let oldest = if kept.len() < LISTS_MAX { None } else { kept.pop_front() };
    kept.push_back(list);
    oldest
}

impl AttendShelf {
    /// An empty list of queries.
    pub(super) fn take_queries(&self) -> Vec<AttendQuery> {
        self.queries.lock().pop_back().unwrap_or_default()
    }

    /// Keeps a list of queries.
    pub(super) fn keep_queries(&self, mut queries: Vec<AttendQuery>) {
        queries.clear();
        let bytes = queries.capacity() * size_of::<AttendQuery>();
        drop(keep_list(&self.queries, queries, bytes));
    }

    /// Memory for a pin.
    pub(super) fn take_pin(&self) -> PinMemory {
        self.pins.lock().pop_back().unwrap_or_default()
    }

    /// Keeps the memory of a pin.
    pub(super) fn keep_pin(&self, memory: PinMemory) {
        let bytes = memory.size_bytes();
        drop(keep_list(&self.pins, memory, bytes));
    }

    /// Memory for an answer.
    pub(super) fn take_answer(&self) -> Attended {
        self.answers.lock().pop_back().unwrap_or_default()
    }

    /// Keeps the memory of an answer.
    pub(super) fn keep_answer(&self, answer: Attended) {
        let bytes = answer.out.capacity() + answer.lse.capacity() * size_of::<f32>();
        drop(keep_list(&self.answers, answer, bytes));
    }

    /// An empty list of a plan's queries.
    pub(super) fn take_plan(&self) -> Vec<PlanQuery> {
        self.plans.lock().pop_back().unwrap_or_default()
    }

    /// Keeps the queries of a plan that is done with, and those of their parts that no other plan
    /// has.
    pub(super) fn keep_plan(&self, mut queries: Vec<PlanQuery>) {
        for PlanQuery { mut parts, .. } in queries.drain(..) {
            let Some(own) = Arc::get_mut(&mut parts) else { continue };
            own.fill(NO_PART);
            let bytes = size_of_val(own);
            drop(keep_list(&self.parts, parts, bytes));
        }
        let bytes = queries.capacity() * size_of::<PlanQuery>();
        drop(keep_list(&self.plans, queries, bytes));
    }

    /// The parts of a pinned range. Whoever plans it keeps `pinned` until the backend has answered.
    pub(super) fn plan_parts(&self, pinned: &PinnedRange) -> Arc<[PlanPart]> {
        let count = pinned.find_rows().count();
        let mut parts = self.take_parts(count);
        if let Some(own) = Arc::get_mut(&mut parts) {
            own.iter_mut().zip(plan::each_part(pinned)).for_each(|(part, of)| *part = of);
        }
        parts
    }

    /// So many parts that nobody else has.
    fn take_parts(&self, count: usize) -> Arc<[PlanPart]> {
        let mut kept = self.parts.lock();
        let at = kept.iter().rposition(|parts| parts.len() == count);
        let found = at.and_then(|at| kept.swap_remove_back(at));
        drop(kept);
        found.unwrap_or_else(|| std::iter::repeat_n(NO_PART, count).collect())
    }

    /// How many lists are kept, by kind.
    #[cfg(test)]
    pub(super) fn count_kept(&self) -> [usize; 3] {
        [self.queries.lock().len(), self.plans.lock().len(), self.parts.lock().len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::SequenceId;

    fn plan_of(shelf: &AttendShelf, counts: &[usize]) -> Vec<PlanQuery> {
        let mut queries = shelf.take_plan();
        let query = |count: &usize| {
            let parts = shelf.take_parts(*count);
            PlanQuery { n_q: 1, position: 0, sliding_window: None, parts }
        };
        queries.extend(counts.iter().map(query));
        queries
    }

    #[test]
    fn lists_are_used_again_and_hold_nothing() {
        let shelf = AttendShelf::default();
        let ends: Arc<[u32]> = [1, 2].into();
        let mut plan = plan_of(&shelf, &[3, 5]);
        let at = plan.iter().map(|query| query.parts.as_ptr()).collect::<Vec<_>>();
        let parts = Arc::get_mut(&mut plan[1].parts).unwrap();
        let extent = Extent { offset: 64, len: 64 };
        parts[4].source = Source::Pages { extent, ends: ends.clone(), first_row: 0 };
        shelf.keep_plan(plan);
        assert_eq!((Arc::strong_count(&ends), shelf.count_kept()), (1, [0, 1, 2]));
        let again = plan_of(&shelf, &[5, 3, 4]);
        let of_again = again.iter().map(|query| query.parts.as_ptr()).collect::<Vec<_>>();
        assert_eq!(of_again[..2], [at[1], at[0]]);
        assert!(again.iter().flat_map(|query| query.parts.iter()).all(|part| part.rows == 0));
        let mut queries = shelf.take_queries();
        queries.push(AttendQuery::new(SequenceId(1), 1));
        let at = queries.as_ptr();
        shelf.keep_queries(queries);
        let again = shelf.take_queries();
        assert_eq!((again.len(), again.as_ptr()), (0, at));
    }

    #[test]
    fn parts_that_another_plan_has_are_not_kept() {
        let shelf = AttendShelf::default();
        let plan = plan_of(&shelf, &[3]);
        let other = plan[0].parts.clone();
        shelf.keep_plan(plan);
        assert_eq!((shelf.count_kept(), Arc::strong_count(&other)), ([0, 1, 0], 1));
        // Two queries of a plan that share theirs.
        let mut plan = plan_of(&shelf, &[3]);
        plan.push(plan[0].clone());
        shelf.keep_plan(plan);
        assert_eq!(shelf.count_kept(), [0, 1, 1]);
    }

    #[test]
    fn few_lists_are_kept_and_none_that_is_large() {
        let shelf = AttendShelf::default();
        let large = LIST_BYTES_MAX / size_of::<PlanPart>() + 1;
        shelf.keep_plan(plan_of(&shelf, &[large]));
        assert_eq!(shelf.count_kept(), [0, 1, 0]);
        let counts: Vec<usize> = (1..=LISTS_MAX + 10).collect();
        shelf.keep_plan(plan_of(&shelf, &counts));
        assert_eq!(shelf.count_kept(), [0, 1, LISTS_MAX]);
        // The oldest have gone.
        let kept = shelf.take_parts(11);
        assert_eq!((kept.len(), shelf.count_kept()[2]), (11, LISTS_MAX - 1));
        assert_eq!((shelf.take_parts(10).len(), shelf.count_kept()[2]), (10, LISTS_MAX - 1));
        (0..100).for_each(|_| shelf.keep_queries(Vec::with_capacity(1)));
        assert_eq!(shelf.count_kept()[0], LISTS_MAX);
    }
}
