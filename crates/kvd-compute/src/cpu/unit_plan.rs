//! How a plan is cut into units: by query tokens, KV head and parts. Parts that several queries
//! read are in units of all of those: one pass over their pages.

use crate::cpu::attend_job::{AttendJob, AttendUnit, TokenList, UnitTokens, group_size};
use crate::cpu::scratch::ScratchVec;
use crate::cpu::token_span::spans_of;
use crate::sharing::{RunReader, SharedRun, find_shared_runs};
use crate::{PlanPart, PlanQuery};
use smallvec::SmallVec;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Query tokens of one unit: accumulators of four heads of 128 channels to a KV head stay in the
/// second-level cache.
pub(super) const UNIT_QUERY_TOKENS: u32 = 32;
/// Fewest parts (blocks) of one unit: below this a thread's start costs more than it saves. Of a
/// shared run too: each query has one more unit for it.
const UNIT_PARTS_MIN: usize = 8;
/// A few units per thread even out their lengths.
const UNITS_PER_THREAD: usize = 4;
/// Query rows times tokens of one unit, at most, where decoding a token counts as [`DECODE_ROWS`]
/// rows do: two or three milliseconds of a thread, so that others wait no longer for a pause.
const UNIT_COST_MAX: u64 = 1 << 18;
/// Query rows that take about as long as decoding a token, of codecs that take long to decode.
const DECODE_ROWS: u64 = 16;

/// Query tokens of one query, for one KV head: the rows that units are merged for.
pub(super) struct RowGroup {
    pub(super) query: usize,
    /// Index of the query's first token in the batch.
    pub(super) batch_row: usize,
    /// Query tokens within the query.
    pub(super) q: Range<u32>,
    pub(super) head: usize,
    /// Parts of its units, counted in the query, in the order in which they are merged.
    pub(super) splits: PartSplits,
    /// Tokens of the longest of its parts.
    pub(super) part_tokens: u32,
    /// The unit after which it is complete.
    pub(super) last_unit: usize,
}

/// Ranges of parts, shared by the groups of a query where they are several.
#[derive(Clone)]
pub(super) enum PartSplits {
    One([Range<usize>; 1]),
    Several(Arc<[Range<usize>]>),
}

impl Deref for PartSplits {
    type Target = [Range<usize>];

    fn deref(&self) -> &[Range<usize>] {
        match self {
            Self::One(one) => one,
            Self::Several(several) => several,
        }
    }
}

/// Groups of a unit.
enum UnitGroups {
    One(usize),
    Several(Box<[usize]>),
}

/// A unit, by numbers into its plan.
pub(super) struct UnitPlan {
    groups: UnitGroups,
    /// Counted in the query of the first group.
    parts: Range<usize>,
}

/// A plan, cut.
#[derive(Default)]
pub(super) struct PlannedUnits {
    pub(super) groups: ScratchVec<RowGroup>,
    pub(super) units: ScratchVec<UnitPlan>,
}

impl RowGroup {
    fn to_tokens<'a>(&self, job: &AttendJob<'a>) -> UnitTokens<'a> {
        let query = &job.plan.queries[self.query];
        UnitTokens { query, batch_row: self.batch_row, q: self.q.clone() }
    }

    /// The unit of its rows alone over some parts of its query.
    pub(super) fn to_unit<'a>(&self, job: &AttendJob<'a>, parts: Range<usize>) -> AttendUnit<'a> {
        let tokens = self.to_tokens(job);
        let parts = &tokens.query.parts[parts];
        let tokens = TokenList::One([tokens]);
        AttendUnit { tokens, head: self.head, parts }
    }

    /// How many of its parts have about so many tokens.
    pub(super) fn parts_of(&self, tokens: u64) -> usize {
        usize::try_from(tokens / u64::from(self.part_tokens.max(1))).unwrap_or(usize::MAX).max(1)
    }
}

impl UnitPlan {
    /// The groups whose rows it has, in that order.
    pub(super) fn groups(&self) -> &[usize] {
        match &self.groups {
            UnitGroups::One(group) => std::slice::from_ref(group),
            UnitGroups::Several(groups) => groups,
        }
    }

    pub(super) fn to_unit<'a>(&self, job: &AttendJob<'a>, groups: &[RowGroup]) -> AttendUnit<'a> {
        let tokens = match &self.groups {
            UnitGroups::One(group) => TokenList::One([groups[*group].to_tokens(job)]),
            UnitGroups::Several(several) => TokenList::Several(
                several.iter().map(|group| groups[*group].to_tokens(job)).collect(),
            ),
        };
        let parts = &tokens[0].query.parts[self.parts.clone()];
        AttendUnit { tokens, head: groups[self.groups()[0]].head, parts }
    }
}

impl PlannedUnits {
    /// Passes over blocks that need not be made because queries share one.
    pub(super) fn count_saved_passes(&self) -> u64 {
        let of_head = |unit: &&UnitPlan| self.groups[unit.groups()[0]].head == 0;
        let saved = |unit: &UnitPlan| (unit.groups().len() - 1) * unit.parts.len();
        self.units.iter().filter(of_head).map(saved).sum::<usize>() as u64
    }

    fn push_unit(&mut self, groups: UnitGroups, parts: Range<usize>) {
        let unit = UnitPlan { groups, parts };
        for group in unit.groups() {
            self.groups[*group].last_unit = self.units.len();
        }
        self.units.push_value(unit);
    }
}

/// Whether queries go through the parts that they share together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedPasses {
    Together,
    /// One after the other, over the same splits.
    #[cfg(test)]
    Apart,
}

/// Entries by query or by piece of one, in no memory of their own where those are few.
type FewQueries<T> = SmallVec<[T; 2]>;

/// A query on its way to units.
struct QueryCut {
    batch_row: usize,
    /// Tokens of the longest part that it sees.
    part_tokens: u32,
    /// Pieces of what it sees, in order.
    pieces: FewQueries<CutPiece>,
    /// Its first group of the head at work.
    first_group: usize,
}

/// Parts of a query that are cut alike.
struct CutPiece {
    parts: Range<usize>,
    /// The run that they are of, if they are of one.
    run: Option<usize>,
    /// Parts of a unit.
    per_split: usize,
}

impl CutPiece {
    fn list_splits(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        split_parts(self.parts.clone(), self.per_split)
    }
}

/// Some parts in pieces of so many; one without any is one piece.
fn split_parts(parts: Range<usize>, per_split: usize) -> impl Iterator<Item = Range<usize>> {
    let (end, empty) = (parts.end, parts.is_empty().then(|| parts.clone()));
    let pieces = parts.step_by(per_split).map(move |at| at..end.min(at + per_split));
    empty.into_iter().chain(pieces)
}

/// Query tokens of a query in pieces that fit a unit.
fn token_chunks(query: &PlanQuery) -> impl Iterator<Item = Range<u32>> + use<> {
    let n_q = query.n_q;
    (0..n_q).step_by(UNIT_QUERY_TOKENS as usize).map(move |at| at..n_q.min(at + UNIT_QUERY_TOKENS))
}

/// Cuts a plan.
struct PlanCutter<'a, 'j> {
    job: &'a AttendJob<'j>,
    runs: Vec<SharedRun>,
    cuts: FewQueries<QueryCut>,
    passes: SharedPasses,
    planned: PlannedUnits,
}

/// Splits the batch by work, so that one long sequence among many short ones is not left to a
/// single thread at the end; units of queries that share nothing follow one another.
pub(super) fn plan_units(job: &AttendJob<'_>, passes: SharedPasses) -> PlannedUnits {
    let runs = find_shared_runs(job.plan, UNIT_PARTS_MIN);
    let mut batch_row = 0;
    let mut cuts: FewQueries<QueryCut> = SmallVec::new();
    for query in &job.plan.queries {
        cuts.push(QueryCut { batch_row, part_tokens: 0, pieces: SmallVec::new(), first_group: 0 });
        batch_row += query.n_q as usize;
    }
    let mut cutter = PlanCutter { job, runs, cuts, passes, planned: PlannedUnits::default() };
    cutter.cut_queries();
    let clusters = cutter.find_clusters();
    for (query, cluster) in clusters.iter().enumerate() {
        match cluster {
            QueryCluster::Alone => cutter.push_cluster(&[query]),
            QueryCluster::FirstOf(queries) => cutter.push_cluster(queries),
            QueryCluster::Later => {}
        }
    }
    cutter.planned
}

/// Queries that share something, directly or by others, by the first of them.
enum QueryCluster {
    Alone,
    FirstOf(Vec<usize>),
    Later,
}

impl PlanCutter<'_, '_> {
    fn kv_heads(&self) -> usize {
        self.job.reader.codec.geometry().kv_heads as usize
    }

    /// Cuts what each query sees into shared runs and the rest, and says how long splits are.
    fn cut_queries(&mut self) {
        let queries = &self.job.plan.queries;
        let seen: FewQueries<Range<usize>> = queries.iter().map(seen_parts).collect();
        let mut shared: FewQueries<Vec<CutPiece>> = queries.iter().map(|_| Vec::new()).collect();
        for (number, run) in self.runs.iter().enumerate() {
            for reader in &run.readers {
                let piece =
                    CutPiece { parts: run.parts_of(reader), run: Some(number), per_split: 1 };
                shared[reader.query].push(piece);
            }
        }
        for ((cut, seen), (query, mut shared)) in
            self.cuts.iter_mut().zip(seen).zip(queries.iter().zip(shared))
        {
            let longest = query.parts[seen.clone()].iter().map(|part| part.rows).max();
            cut.part_tokens = longest.unwrap_or(0);
            shared.sort_by_key(|piece| piece.parts.start);
            let own = |parts| CutPiece { parts, run: None, per_split: 1 };
            let mut next = seen.start;
            for piece in shared {
                if next < piece.parts.start {
                    cut.pieces.push(own(next..piece.parts.start));
                }
                next = piece.parts.end;
                cut.pieces.push(piece);
            }
            if next < seen.end || cut.pieces.is_empty() {
                cut.pieces.push(own(next..seen.end));
            }
        }
        self.choose_splits();
    }

    /// Chooses how many parts units have.
    fn choose_splits(&mut self) {
        let queries = &self.job.plan.queries;
        let chunks = |query: &PlanQuery| query.n_q.div_ceil(UNIT_QUERY_TOKENS) as usize;
        let packs: Vec<Vec<TokenPack>> = self.runs.iter().map(|run| self.pack_run(run)).collect();
        let own = self.cuts.iter().zip(queries).map(|(cut, query)| {
            let pieces = cut.pieces.iter().filter(|piece| piece.run.is_none());
            chunks(query) * pieces.map(|piece| piece.parts.len()).sum::<usize>()
        });
        let shared = self.runs.iter().zip(&packs).map(|(run, packs)| packs.len() * run.parts);
        let parts = (own.sum::<usize>() + shared.sum::<usize>()) * self.kv_heads();
        let per_unit = parts.div_ceil(UNITS_PER_THREAD * self.job.threads).max(UNIT_PARTS_MIN);
        let group = group_size(self.job);
        let of_runs: Vec<usize> = packs
            .iter()
            .map(|packs| packs.iter().map(|pack| pack.tokens).max().unwrap_or(1) as usize)
            .collect();
        for (cut, query) in self.cuts.iter_mut().zip(queries) {
            let part_tokens = cut.part_tokens;
            for piece in &mut cut.pieces {
                let tokens = match piece.run {
                    Some(run) => of_runs[run],
                    None => query.n_q.min(UNIT_QUERY_TOKENS) as usize,
                };
                // Readers of a run are cut alike.
                let longest = piece.run.and_then(|run| {
                    let reader = self.runs[run].readers.first()?;
                    let parts = &queries[reader.query].parts[self.runs[run].parts_of(reader)];
                    parts.iter().map(|part| part.rows).max()
                });
                let part_tokens = longest.unwrap_or(part_tokens);
                let cost = ((tokens * group) as u64 + DECODE_ROWS) * u64::from(part_tokens.max(1));
                let most = usize::try_from(UNIT_COST_MAX / cost).unwrap_or(usize::MAX);
                let per_unit = per_unit.min(most.max(UNIT_PARTS_MIN));
                // Splits of one query are alike: no thread is left with a short rest.
                let splits = piece.parts.len().div_ceil(per_unit).max(1);
                piece.per_split = piece.parts.len().div_ceil(splits).max(1);
            }
        }
    }

    /// Packs the readers of a run into units.
    fn pack_run(&self, run: &SharedRun) -> Vec<TokenPack> {
        let mut packs: Vec<TokenPack> = Vec::new();
        for reader in &run.readers {
            for (number, q) in token_chunks(&self.job.plan.queries[reader.query]).enumerate() {
                let (tokens, chunk) = (q.len() as u32, QueryChunk { reader: *reader, number });
                match packs.last_mut().filter(|pack| pack.tokens + tokens <= UNIT_QUERY_TOKENS) {
                    Some(pack) => {
                        pack.tokens += tokens;
                        pack.chunks.push(chunk);
                    }
                    None => packs.push(TokenPack { tokens, chunks: vec![chunk] }),
                }
            }
        }
        packs
    }

    /// Finds the queries that share something, directly or by others.
    fn find_clusters(&self) -> FewQueries<QueryCluster> {
        let mut first: FewQueries<usize> = (0..self.cuts.len()).collect();
        fn find_first(first: &[usize], mut query: usize) -> usize {
            while first[query] != query {
                query = first[query];
            }
            query
        }
        for run in &self.runs {
            for pair in run.readers.windows(2) {
                let [a, b] = [0, 1].map(|at: usize| find_first(&first, pair[at].query));
                first[a.max(b)] = a.min(b);
            }
        }
        let mut clusters: FewQueries<QueryCluster> =
            first.iter().map(|_| QueryCluster::Alone).collect();
        for query in 0..first.len() {
            let of = find_first(&first, query);
            if of == query {
                continue;
            }
            clusters[query] = QueryCluster::Later;
            match &mut clusters[of] {
                QueryCluster::FirstOf(queries) => queries.push(query),
                other => *other = QueryCluster::FirstOf(vec![of, query]),
            }
        }
        clusters
    }

    /// Adds the groups and units of some queries, which share with no others: head by head, so that
    /// few states wait for what is merged into them.
    fn push_cluster(&mut self, queries: &[usize]) {
        let mut runs: Vec<usize> = Vec::new();
        for query in queries {
            runs.extend(self.cuts[*query].pieces.iter().filter_map(|piece| piece.run));
        }
        runs.sort_unstable();
        runs.dedup();
        let packs: Vec<_> = runs.iter().map(|run| self.pack_run(&self.runs[*run])).collect();
        let splits: FewQueries<PartSplits> =
            queries.iter().map(|query| self.merge_order(*query)).collect();
        for head in 0..self.kv_heads() {
            for (query, splits) in queries.iter().zip(&splits) {
                self.push_groups(*query, head, splits);
            }
            for (run, packs) in runs.iter().zip(&packs) {
                for pack in packs {
                    match self.passes {
                        SharedPasses::Together => self.push_pack(*run, &pack.chunks),
                        #[cfg(test)]
                        SharedPasses::Apart => {
                            pack.chunks.chunks(1).for_each(|chunk| self.push_pack(*run, chunk));
                        }
                    }
                }
            }
            for query in queries {
                self.push_own_units(*query);
            }
        }
    }

    /// The splits of a query in the order in which they are merged: those of runs come first.
    fn merge_order(&self, query: usize) -> PartSplits {
        let mut pieces: FewQueries<&CutPiece> = self.cuts[query].pieces.iter().collect();
        pieces.sort_by_key(|piece| piece.run.unwrap_or(usize::MAX));
        let mut splits = pieces.into_iter().flat_map(CutPiece::list_splits);
        match (splits.next(), splits.next()) {
            (Some(one), None) => PartSplits::One([one]),
            (first, second) => {
                PartSplits::Several(first.into_iter().chain(second).chain(splits).collect())
            }
        }
    }

    fn push_groups(&mut self, query: usize, head: usize, splits: &PartSplits) {
        let cut = &mut self.cuts[query];
        cut.first_group = self.planned.groups.len();
        for q in token_chunks(&self.job.plan.queries[query]) {
            self.planned.groups.push_value(RowGroup {
                query,
                batch_row: cut.batch_row,
                q,
                head,
                splits: splits.clone(),
                part_tokens: cut.part_tokens,
                last_unit: 0,
            });
        }
    }

    /// Adds the units of a run for the readers of one pack.
    fn push_pack(&mut self, run: usize, chunks: &[QueryChunk]) {
        let Some(first) = chunks.first() else { return };
        let pieces = &self.cuts[first.reader.query].pieces;
        let Some(piece) = pieces.iter().find(|piece| piece.run == Some(run)) else { return };
        let splits: Vec<_> = piece.list_splits().collect();
        for parts in splits {
            let group =
                |chunk: &QueryChunk| self.cuts[chunk.reader.query].first_group + chunk.number;
            let groups = match chunks {
                [one] => UnitGroups::One(group(one)),
                several => UnitGroups::Several(several.iter().map(group).collect()),
            };
            self.planned.push_unit(groups, parts);
        }
    }

    /// Adds the units of what a query reads alone.
    fn push_own_units(&mut self, query: usize) {
        let QueryCut { pieces, first_group, .. } = &self.cuts[query];
        let chunks = token_chunks(&self.job.plan.queries[query]).count();
        for group in *first_group..first_group + chunks {
            for piece in pieces.iter().filter(|piece| piece.run.is_none()) {
                for parts in piece.list_splits() {
                    self.planned.push_unit(UnitGroups::One(group), parts);
                }
            }
        }
    }
}

/// Query tokens of the readers of a run that go through it together.
struct TokenPack {
    tokens: u32,
    chunks: Vec<QueryChunk>,
}

/// Some query tokens of a reader: the piece of that number.
struct QueryChunk {
    reader: RunReader,
    number: usize,
}

/// The parts from the first to the last that some token of the query sees.
fn seen_parts(query: &PlanQuery) -> Range<usize> {
    let visible = query.visible(0).start..query.visible(query.n_q.saturating_sub(1)).end;
    let is_seen = |part: &PlanPart| spans_of(part, visible.clone()).next().is_some();
    let Some(first) = query.parts.iter().position(is_seen) else { return 0..0 };
    first..query.parts.iter().rposition(is_seen).map_or(first, |last| last + 1)
}
