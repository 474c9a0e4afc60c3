//! Which parts several queries of a plan read, so that one pass over their pages can serve all of
//! them.

use crate::{AttendPlan, PlanPart, PlanQuery, Source};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Consecutive parts that several queries read, each of whose tokens sees all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRun {
    /// The queries, in the order of the plan; two at least.
    pub readers: Vec<RunReader>,
    /// How many parts.
    pub parts: usize,
}

/// A query that reads a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunReader {
    /// The query, counted in the plan.
    pub query: usize,
    /// Its first part of the run.
    pub first_part: usize,
}

/// Equal for two parts where they are the same tokens in the same place of the arena.
#[derive(PartialEq, Eq, Hash)]
struct PartKey {
    offset: u64,
    first_token: u32,
    rows: u32,
    first_row: u32,
}

impl PartKey {
    fn new(part: &PlanPart) -> Self {
        let (extent, first_row) = match part.source {
            Source::Raw { extent, first_row, .. } | Source::Pages { extent, first_row, .. } => {
                (extent, first_row)
            }
        };
        Self { offset: extent.offset, first_token: part.first_token, rows: part.rows, first_row }
    }
}

/// Who reads a part: the first in the plan, and the others.
struct PartReaders {
    first: RunReader,
    others: Vec<RunReader>,
}

/// Finds the runs of at least so many parts that several queries of a plan read. Sequences share
/// pages by being forks, or by an attached prefix: then their parts name the same extents. A part
/// that a token of a query does not see whole is in none of that query's runs.
#[must_use]
pub fn find_shared_runs(plan: &AttendPlan, parts_least: usize) -> Vec<SharedRun> {
    if plan.queries.len() < 2 {
        return Vec::new();
    }
    let mut readers: HashMap<PartKey, PartReaders> = HashMap::new();
    let mut any = false;
    for (number, query) in plan.queries.iter().enumerate() {
        for at in whole_parts(query) {
            let reader = RunReader { query: number, first_part: at };
            match readers.entry(PartKey::new(&query.parts[at])) {
                Entry::Vacant(entry) => {
                    entry.insert(PartReaders { first: reader, others: Vec::new() });
                }
                Entry::Occupied(mut entry) => {
                    any = true;
                    entry.get_mut().others.push(reader);
                }
            }
        }
    }
    let mut runs: Vec<SharedRun> = Vec::new();
    for (number, query) in plan.queries.iter().enumerate().filter(|_| any) {
        for at in whole_parts(query) {
            let Some(part) = readers.get(&PartKey::new(&query.parts[at])) else { continue };
            if part.first != (RunReader { query: number, first_part: at }) || part.others.is_empty()
            {
                continue;
            }
            match runs.last_mut().filter(|run| run.goes_on_with(part)) {
                Some(run) => run.parts += 1,
                None => {
                    let readers = [part.first].into_iter().chain(part.others.iter().copied());
                    runs.push(SharedRun { readers: readers.collect(), parts: 1 });
                }
            }
        }
    }
    runs.retain(|run| run.parts >= parts_least);
    runs
}

impl SharedRun {
    /// Whether a part comes next for all readers of the run, and for nobody else.
    fn goes_on_with(&self, part: &PartReaders) -> bool {
        let [first, others @ ..] = &self.readers[..] else { return false };
        let is_next = |reader: &RunReader, next: &RunReader| {
            reader.query == next.query && reader.first_part + self.parts == next.first_part
        };
        is_next(first, &part.first)
            && others.len() == part.others.len()
            && others.iter().zip(&part.others).all(|(reader, next)| is_next(reader, next))
    }

    /// The parts of the run, counted in the query of a reader.
    #[must_use]
    pub fn parts_of(&self, reader: &RunReader) -> Range<usize> {
        reader.first_part..reader.first_part + self.parts
    }
}

/// Most pairs of queries that [`shares_most`] compares.
const PAIRS_MAX: usize = 1 << 10;

/// Whether two plans that [ask alike](AttendPlan::asks_alike) share so many of their tokens that
/// one pass for both ends about as soon as one for the longer of them: at least half, of either.
#[must_use]
pub fn shares_most(a: &AttendPlan, b: &AttendPlan) -> bool {
    if a.queries.len() * b.queries.len() > PAIRS_MAX {
        return false;
    }
    let is_half = |of: &AttendPlan, other: &AttendPlan| {
        let shared = |query: &PlanQuery| {
            let with = |other: &PlanQuery| count_common_tokens(query, other);
            other.queries.iter().map(with).max().unwrap_or(0) * u64::from(query.n_q)
        };
        let tokens = |query: &PlanQuery| query.tokens() * u64::from(query.n_q);
        let all: u64 = of.queries.iter().map(tokens).sum();
        all > 0 && 2 * of.queries.iter().map(shared).sum::<u64>() >= all
    };
    is_half(a, b) && is_half(b, a)
}

/// Tokens of the parts that two queries both see whole, from the first that both do up to where
/// they differ; as many as there are where whoever shares a part shares all before it.
fn count_common_tokens(a: &PlanQuery, b: &PlanQuery) -> u64 {
    let [a, b] = [a, b].map(|query| &query.parts[whole_parts(query)]);
    let (Some(first_a), Some(first_b)) = (a.first(), b.first()) else { return 0 };
    let start = first_a.first_token.max(first_b.first_token);
    let [a, b] =
        [a, b].map(|parts| &parts[parts.partition_point(|part| part.first_token < start)..]);
    let same = |at: usize| PartKey::new(&a[at]) == PartKey::new(&b[at]);
    let (mut least, mut most) = (0, a.len().min(b.len()));
    while least < most {
        let middle = (least + most) / 2;
        if same(middle) { least = middle + 1 } else { most = middle }
    }
    least.checked_sub(1).map_or(0, |last| u64::from(a[last].end_token() - a[0].first_token))
}

/// The parts that each token of a query sees whole.
fn whole_parts(query: &PlanQuery) -> Range<usize> {
    let start = query.visible(query.n_q.saturating_sub(1)).start;
    let end = query.visible(0).end;
    let first = query.parts.partition_point(|part| part.first_token < start);
    let last = query.parts.partition_point(|part| part.end_token() <= end);
    first..last.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use kvd_core::{DType, Extent, LayerIndex, ModelId};

    const ROWS: u32 = 64;

    /// A query at the end of parts in these slots.
    fn query(slots: &[u64]) -> PlanQuery {
        let part = |(at, slot): (u32, &u64)| PlanPart {
            first_token: at * ROWS,
            rows: ROWS,
            source: Source::Pages {
                extent: Extent { offset: *slot, len: 1 },
                ends: [1].into(),
                first_row: 0,
            },
        };
        let parts = (0..).zip(slots).map(part).collect();
        let position = slots.len() as u32 * ROWS;
        PlanQuery { n_q: 1, position, sliding_window: None, parts }
    }

    fn plan(queries: Vec<PlanQuery>) -> AttendPlan {
        AttendPlan {
            model: ModelId(1),
            layer: LayerIndex(0),
            q_heads: 1,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries,
            q: Bytes::new(),
        }
    }

    /// Readers as (query, first part), and parts.
    fn runs(queries: Vec<PlanQuery>, least: usize) -> Vec<(Vec<(usize, usize)>, usize)> {
        let of = |run: &SharedRun| {
            let readers = run.readers.iter().map(|reader| (reader.query, reader.first_part));
            (readers.collect(), run.parts)
        };
        find_shared_runs(&plan(queries), least).iter().map(of).collect()
    }

    #[test]
    fn forks_of_forks_share_a_run_at_each_level() {
        let of = |slots: &[u64]| query(slots);
        let queries =
            vec![of(&[1, 2, 3, 4, 50]), of(&[1, 2, 3, 4, 60]), of(&[1, 2, 70]), of(&[80, 81])];
        let all = vec![(0, 0), (1, 0), (2, 0)];
        let two = vec![(0, 2), (1, 2)];
        assert_eq!(runs(queries.clone(), 1), [(all, 2), (two, 2)]);
        assert_eq!(runs(queries, 3), []);
        assert_eq!(runs(vec![of(&[1, 2, 3])], 1), []);
    }

    #[test]
    fn only_parts_that_every_token_sees_whole_are_shared() {
        // Three tokens at the end of the third part: the last of those parts is still being seen.
        let causal = PlanQuery { n_q: 3, position: 3 * ROWS - 3, ..query(&[1, 2, 3]) };
        // A window that begins within the first part.
        let window = PlanQuery { sliding_window: Some(3 * ROWS - 5), ..query(&[1, 2, 3]) };
        let plain = query(&[1, 2, 3]);
        let expected = [
            (vec![(0, 0), (2, 0)], 1),
            (vec![(0, 1), (1, 1), (2, 1)], 1),
            (vec![(1, 2), (2, 2)], 1),
        ];
        assert_eq!(runs(vec![causal, window, plain], 1), expected);
    }

    #[test]
    fn plans_go_together_where_either_shares_half_of_its_tokens() {
        let of = |slots: &[u64]| plan(vec![query(slots)]);
        let shares = |a: &[u64], b: &[u64]| {
            assert_eq!(shares_most(&of(a), &of(b)), shares_most(&of(b), &of(a)));
            shares_most(&of(a), &of(b))
        };
        assert!(shares(&[1, 2, 3, 4], &[1, 2, 3, 4]));
        assert!(shares(&[1, 2, 30, 40], &[1, 2, 50]));
        assert!(!shares(&[1, 20, 30, 40], &[1, 50]));
        // A short one does not wait for a long one.
        assert!(!shares(&[1, 2, 3, 4, 5], &[1, 2]));
        assert!(!shares(&[1, 2], &[3, 4]) && !shares(&[], &[]));
        let many = plan(vec![query(&[1, 2]); 40]);
        assert!(shares_most(&many, &of(&[1, 2])) && !shares_most(&many, &many));
    }

    #[test]
    fn the_same_slot_elsewhere_in_a_sequence_is_another_part() {
        let late = {
            let query = query(&[9, 1]);
            PlanQuery { parts: query.parts[1..].into(), ..query }
        };
        assert_eq!(runs(vec![query(&[1, 2]), late], 1), []);
        // A request that starts later reads the same blocks at other numbers.
        let started = {
            let query = query(&[1, 2, 3]);
            PlanQuery { parts: query.parts[1..].into(), ..query }
        };
        assert_eq!(runs(vec![query(&[1, 2, 3]), started], 1), [(vec![(0, 1), (1, 0)], 2)]);
    }
}
