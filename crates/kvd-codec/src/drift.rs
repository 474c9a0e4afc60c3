//! Huffman tables that are built from blocks: the prior that a layer begins with, when blocks make
//! a table of their own, and when another takes its place
//! (`docs/adr/0020-tables-from-a-prior.md`).

use crate::huffman::HuffmanTable;
use crate::huffman::streams::{StreamTable, SymbolGrouping};
use crate::{BlockRows, CodeCounts, CodecError, ModelCodec, SideSpec};
use kvd_core::LayerIndex;

/// One block of a layer in so many has its codes counted, once its tables have settled.
const INTERVAL: u64 = 8;
/// Blocks of a layer that its first table is built from at most.
const FIRST_BLOCKS_MAX: u32 = 64;
/// Blocks that are all counted after a table was replaced,
const YOUNG_BLOCKS: u32 = 16;
/// and after blocks that fit their table badly.
const SUSPECT_BLOCKS: u32 = 8;
/// Counted blocks that make a reliable mean; after them counting starts anew.
const WINDOW_BLOCKS: u32 = 8;
/// How much longer the codes of so many blocks may be than under a table made for them.
const EXCESS: f64 = 0.03;
/// Codes are of one value where no more than one in so many is of another,
const VARIED: u64 = 16;
/// and make no table unless so many counted blocks are like that.
const UNVARIED_BLOCKS: u32 = 32;
/// Versions that a layer's side may have at any time;
const FREE_VERSIONS: usize = 6;
/// the next takes so many blocks stored since the one before, each later one twice as many.
const VERSION_BLOCKS: u64 = 4;

/// Whether counting blocks has changed what pages are written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TableDecision {
    /// The table is as good as any.
    Keep,
    /// The newest blocks are too few to say more, or fit it badly.
    Suspect,
    /// Another table is written with.
    Replaced,
}

/// The Huffman tables of one layer, side and variant.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableHistory {
    /// Version `n` of page headers is at index `n`; the prior is version 0. Empty where tables are
    /// not built from blocks.
    pub(crate) versions: Vec<StreamTable>,
    /// Table version of pages that are written now.
    pub(crate) current: usize,
    window: CodeWindow,
    /// Blocks of one code since the last one of several: engines pad with them. Whatever comes
    /// between them has its window for itself.
    padding: CodeWindow,
    /// Counted blocks that a new version takes: twice as many after each, until tables fit.
    evidence: u32,
    /// By how much codes of single observations were longer than they could be, in the mean of the
    /// last full window: what blocks of one kind differ by.
    spread: f64,
    /// Blocks of the layer that were stored before the newest version.
    born: u64,
}

/// Codes counted since blocks were last compared with tables.
#[derive(Clone, Debug, Default)]
struct CodeWindow {
    counts: Vec<u64>,
    blocks: u32,
    /// Whether it began with blocks that fit their table badly.
    is_suspect: bool,
    /// Sums over observations: bits under the table that was written with, and under tables made
    /// for each.
    current_bits: u64,
    own_bits: u64,
}

impl CodeWindow {
    fn add_counts(&mut self, counts: &[u64], blocks: u32) {
        self.counts.resize(counts.len(), 0);
        for (sum, count) in self.counts.iter_mut().zip(counts) {
            *sum += count;
        }
        self.blocks += blocks;
    }
}

/// Which blocks of a layer are counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountingPlan {
    /// Blocks that were stored.
    stored: u64,
    /// Coming blocks that are all counted.
    dense: u32,
}

impl Default for CountingPlan {
    fn default() -> Self {
        Self { stored: 0, dense: FIRST_BLOCKS_MAX }
    }
}

/// Bits of counted codes under a table.
fn coded_bits(counts: &[u64], table: &HuffmanTable) -> u64 {
    counts.iter().zip(table.code_lengths()).map(|(n, length)| n * u64::from(*length)).sum()
}

/// Bits by which a table made for these codes looks better than it is for others of their kind:
/// half the logarithm of their number for each code that they have (Rissanen's description length).
fn description_bits(counts: &[u64]) -> u64 {
    let used = counts.iter().filter(|count| **count > 0).count().max(1) as u64 - 1;
    let total: u64 = counts.iter().sum();
    used * u64::from(total.max(1).ilog2()) / 2
}

/// Whether codes are of more than one value.
fn is_varied(counts: &[u64]) -> bool {
    let total: u64 = counts.iter().sum();
    let most = counts.iter().copied().max().unwrap_or(0);
    (total - most) * VARIED > total
}

impl TableHistory {
    /// The prior alone: codes of one length, or two that differ by a bit. A page that takes it has
    /// no more bits than codes of fixed width, but for what the sixteen streams leave over.
    pub(crate) fn new(spec: &SideSpec) -> Self {
        let alphabet = spec.quantizer.code_count().filter(|_| spec.has_trained_tables());
        let prior = alphabet.map(|codes| {
            let huffman = HuffmanTable::new(&vec![1; codes as usize]);
            StreamTable::new(huffman, SymbolGrouping::single_codes(codes as u16))
        });
        Self { versions: prior.into_iter().collect(), ..Self::default() }
    }

    /// Versions built from blocks.
    pub(crate) fn built_versions(&self) -> usize {
        self.versions.len().saturating_sub(1)
    }

    /// Appends a version and writes with it from now on.
    pub(crate) fn push(&mut self, huffman: HuffmanTable, stored: u64) {
        self.add_version(huffman);
        self.current = self.built_versions();
        self.born = stored;
        self.evidence = (2 * self.evidence).clamp(2, WINDOW_BLOCKS);
        self.window = CodeWindow::default();
        self.padding = CodeWindow::default();
    }

    /// Appends a version.
    pub(crate) fn add_version(&mut self, huffman: HuffmanTable) {
        let grouping = SymbolGrouping::single_codes(huffman.code_lengths().len() as u16);
        self.versions.push(StreamTable::new(huffman, grouping));
    }

    /// Whether there may be another version after so many stored blocks.
    fn has_room(&self, stored: u64) -> bool {
        let built = self.built_versions();
        let doublings = built.saturating_sub(FREE_VERSIONS) as u32;
        let wait = if built < FREE_VERSIONS { 0 } else { VERSION_BLOCKS << doublings };
        built < ModelCodec::TABLE_VERSIONS_MAX && stored - self.born >= wait
    }

    /// How much longer the codes of so many blocks may be than under a table made for them: the
    /// fewer blocks, the more they differ by chance.
    fn drift_threshold(&self, blocks: u32) -> f64 {
        let share = f64::from(WINDOW_BLOCKS) / f64::from(blocks.clamp(1, WINDOW_BLOCKS));
        let of_few = if blocks < WINDOW_BLOCKS { 2.0 * self.spread } else { 0.0 };
        1.0 + EXCESS * share.sqrt() + of_few
    }

    /// Adds the codes of some blocks, and takes the best table there is, or one made for them,
    /// where the one that is written with costs too much.
    fn observe_codes(&mut self, counts: &[u64], blocks: u32, stored: u64) -> TableDecision {
        if blocks == 0 || counts.iter().all(|count| *count == 0) {
            return TableDecision::Keep;
        }
        if !is_varied(counts) {
            return self.observe_padding(counts, blocks, stored);
        }
        self.padding = CodeWindow::default();
        let own = coded_bits(counts, &HuffmanTable::new(counts)) + description_bits(counts);
        let current = coded_bits(counts, &self.versions[self.current].huffman);
        let fits = (1.0 + EXCESS + 2.0 * self.spread) * own as f64;
        let departs = current as f64 > fits;
        // Data that comes and goes need not show it for long: its table is there.
        if departs && self.take_up_table(counts, fits, current) {
            return TableDecision::Replaced;
        }
        if departs && !self.window.is_suspect {
            // Earlier counts are of other data and would blur these.
            self.window = CodeWindow { is_suspect: true, ..CodeWindow::default() };
        }
        self.window.add_counts(counts, blocks);
        self.window.current_bits += current;
        self.window.own_bits += own;
        if self.window.blocks < WINDOW_BLOCKS.min(self.evidence) {
            return TableDecision::Suspect;
        }
        let verdict = self.decide_table(stored);
        if verdict == TableDecision::Replaced {
            self.window = CodeWindow::default();
        } else if self.window.blocks >= WINDOW_BLOCKS {
            let window = std::mem::take(&mut self.window);
            self.spread = (window.current_bits as f64 / window.own_bits as f64 - 1.0).max(0.0);
            self.evidence = 1;
            return TableDecision::Keep;
        }
        if self.window.is_suspect { verdict.max(TableDecision::Suspect) } else { verdict }
    }

    /// As [`TableHistory::observe_codes`], of blocks of one code: they make no table before there
    /// are many without others between.
    fn observe_padding(&mut self, counts: &[u64], blocks: u32, stored: u64) -> TableDecision {
        self.padding.add_counts(counts, blocks);
        if self.padding.blocks < UNVARIED_BLOCKS {
            return TableDecision::Keep;
        }
        self.window = std::mem::take(&mut self.padding);
        let verdict = self.decide_table(stored);
        self.window = CodeWindow::default();
        verdict
    }

    /// Writes with the earlier version that takes the fewest bits for these codes, where it takes
    /// no more than `fits` and is clearly better than the one that takes `current`; whether there
    /// is one.
    fn take_up_table(&mut self, counts: &[u64], fits: f64, current: u64) -> bool {
        let costs = self.versions.iter().map(|of| coded_bits(counts, &of.huffman));
        let Some((version, cost)) = costs.enumerate().min_by_key(|(_, cost)| *cost) else {
            return false;
        };
        let cost = cost as f64;
        let better = cost <= fits && (1.0 + EXCESS) * cost < current as f64;
        if better {
            self.current = version;
            self.window = CodeWindow::default();
        }
        better
    }

    /// Compares the current table, all others, and one made for the counts.
    fn decide_table(&mut self, stored: u64) -> TableDecision {
        let counts = &self.window.counts;
        let fresh = HuffmanTable::new(counts);
        let fresh_bits = (coded_bits(counts, &fresh) + description_bits(counts)) as f64;
        let costs: Vec<u64> =
            self.versions.iter().map(|of| coded_bits(counts, &of.huffman)).collect();
        let known = (0..costs.len()).min_by_key(|version| costs[*version]).unwrap_or(0);
        let threshold = self.drift_threshold(self.window.blocks);
        let is_fine = |version: usize| costs[version] as f64 <= threshold * fresh_bits;
        if is_fine(self.current) {
            return TableDecision::Keep;
        }
        // A table that fits is taken up again: data that comes and goes uses up no versions.
        if !is_fine(known) && self.has_room(stored) {
            self.push(fresh, stored);
            return TableDecision::Replaced;
        }
        let is_other = costs[known] < costs[self.current];
        self.current = if is_other { known } else { self.current };
        if is_other { TableDecision::Replaced } else { TableDecision::Keep }
    }
}

impl ModelCodec {
    /// Versions of a Huffman table that is built from blocks, at most. The prior is none of them.
    pub const TABLE_VERSIONS_MAX: usize = 16;

    /// Versions that are left of these for a layer's own blocks when tables of others are adopted.
    pub const OWN_TABLES_MIN: usize = 4;

    /// Which of a layer's next `blocks` blocks are to be counted and told to
    /// [`ModelCodec::observe_codes`] before any of them is encoded: all at first and after a table
    /// was replaced or began to fit badly, then one in 8. Every call tells of new blocks.
    pub fn choose_blocks_to_count(&mut self, layer: LayerIndex, blocks: usize) -> Vec<usize> {
        let Some(plan) = self.counting.get_mut(layer.0 as usize) else { return Vec::new() };
        let mut chosen = Vec::new();
        for index in 0..blocks {
            plan.stored += 1;
            if plan.dense > 0 || plan.stored.is_multiple_of(INTERVAL) {
                plan.dense = plan.dense.saturating_sub(1);
                chosen.push(index);
            }
        }
        chosen
    }

    /// Takes the codes of `blocks` blocks that [`ModelCodec::choose_blocks_to_count`] chose, summed
    /// as by [`ModelCodec::count_blocks`], and replaces tables that fit them badly: by an earlier
    /// version where one fits, else by one made for them. A layer's side has at most
    /// [`ModelCodec::TABLE_VERSIONS_MAX`] of these, the first 6 at any time, each later one after
    /// twice as many stored blocks as the one before. Pages of all versions still decode.
    ///
    /// # Errors
    /// When counts are of a side and variant that no head of the layer has, or are not as many as
    /// it has codes.
    pub fn observe_codes(
        &mut self,
        layer: LayerIndex,
        counts: &[CodeCounts],
        blocks: usize,
    ) -> Result<(), CodecError> {
        let Some(plan) = self.counting.get(layer.0 as usize).copied() else { return Ok(()) };
        let mut dense = plan.dense;
        if !self.needs_tables(layer) {
            dense = dense.min(YOUNG_BLOCKS);
        }
        for counts in counts {
            let index = self.counted_tables(layer, counts)?;
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            let history = &mut self.tables[index];
            let was_first = history.built_versions() == 0;
            dense = match history.observe_codes(&counts.counts, blocks, plan.stored) {
                TableDecision::Keep => dense,
                TableDecision::Suspect => dense.max(SUSPECT_BLOCKS),
                TableDecision::Replaced if was_first => YOUNG_BLOCKS,
                TableDecision::Replaced => dense.max(YOUNG_BLOCKS),
            };
        }
        self.counting[layer.0 as usize].dense = dense;
        Ok(())
    }

    /// Counts those of some blocks of a layer that are to be counted, before they are encoded, and
    /// replaces tables that fit them badly. Blocks that cannot be encoded are passed over.
    ///
    /// # Errors
    /// As [`ModelCodec::observe_codes`].
    pub fn watch_tables(
        &mut self,
        layer: LayerIndex,
        blocks: &[BlockRows<'_>],
    ) -> Result<(), CodecError> {
        let chosen = self.choose_blocks_to_count(layer, blocks.len()).into_iter();
        let chosen = chosen.map(|index| blocks[index]);
        let can_be_stored = |block: &BlockRows<'_>| {
            self.check_shape(layer, block).is_ok() && self.check_values(block).is_ok()
        };
        let chosen: Vec<_> = chosen.filter(can_be_stored).collect();
        let counts = self.count_blocks(layer, &chosen)?;
        self.observe_codes(layer, &counts, chosen.len())
    }

    /// Blocks of a layer that were stored so far.
    pub(crate) fn stored_blocks(&self, layer: LayerIndex) -> u64 {
        self.counting.get(layer.0 as usize).map_or(0, |plan| plan.stored)
    }

    /// Versions of all Huffman tables that were built from blocks together.
    #[must_use]
    pub fn table_versions(&self) -> u64 {
        self.tables.iter().map(|history| history.built_versions() as u64).sum()
    }
}
