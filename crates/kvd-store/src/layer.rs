//! One layer of one sequence: its length, its blocks, and the ranges it remembers.
//!
//! Owns the rules of ranges (gap, overlap, replay), of truncation and of sharing. Everything here
//! runs under the layer's mutex and copies pointers only: views that go are handed to the caller.
//!
//! Truncation does not restore precision: what was packed stays packed. Rows of a packed block
//! that survive are decoded into a raw block by the next append to it, and encoded again when
//! that block leaves the window. A fork that is shorter than its parent inherits the same.

use crate::cache::CachedBlock;
use crate::error::StoreError;
use crate::layer_block::BlockView;
use crate::pinned::{ChosenRange, PinnedViews};
use crate::sequence::SequenceUsage;
use crate::shape::ModelShape;
use crate::view_list::{DiscardedViews, ViewList};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Ranges a layer remembers in order to recognise a repeated request.
pub(crate) const REMEMBERED_MAX: usize = 64;

/// An append that was acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RememberedRange {
    pub(crate) start: u32,
    pub(crate) tokens: u32,
    pub(crate) content_hash: u64,
}

/// How an append fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeFit {
    /// It begins at the end.
    Next,
    /// It was acknowledged before, with content of this hash.
    Known(u64),
    /// It begins after the end.
    Gap,
}

/// Everything a sequence knows of a layer.
#[derive(Debug)]
pub(crate) struct SequenceLayer {
    /// Tokens stored.
    pub(crate) length: u32,
    /// `ceil(length / block_tokens)` blocks.
    pub(crate) views: ViewList,
    /// The first this many blocks need no more thought: packed, or never to be.
    pub(crate) settled: usize,
    remembered: VecDeque<RememberedRange>,
}

impl SequenceLayer {
    /// A layer without tokens; `view_count` counts the views of all sequences.
    pub(crate) fn new(view_count: &Arc<AtomicU64>) -> Self {
        let views = ViewList::new(view_count);
        Self { length: 0, views, settled: 0, remembered: VecDeque::new() }
    }

    /// A layer whose tokens are those of cached blocks, read packed also in its window: what a read
    /// gives does not depend on who else is here.
    pub(crate) fn from_blocks(
        view_count: &Arc<AtomicU64>,
        shape: &ModelShape,
        blocks: &[Arc<CachedBlock>],
        layer: usize,
    ) -> Self {
        let mut new = Self::new(view_count);
        blocks.iter().for_each(|block| new.views.push(block.layer_view(layer)));
        new.length = blocks.len() as u32 * shape.block_tokens();
        new.settled = blocks.len();
        new
    }

    /// Where a range that is offered stands to what is stored.
    pub(crate) fn find_fit(&self, start: u32, tokens: u32) -> Result<RangeFit, StoreError> {
        match start.cmp(&self.length) {
            std::cmp::Ordering::Equal => return Ok(RangeFit::Next),
            std::cmp::Ordering::Greater => return Ok(RangeFit::Gap),
            std::cmp::Ordering::Less => {}
        }
        // At most one can match: a range is only stored again after truncation dropped it here.
        let known = self.remembered.iter().find(|r| (r.start, r.tokens) == (start, tokens));
        let overlap = StoreError::RangeOverlap { start, tokens, length: self.length };
        known.map(|r| RangeFit::Known(r.content_hash)).ok_or(overlap)
    }

    /// Remembers an acknowledged range, and forgets the oldest beyond the limit.
    pub(crate) fn remember_range(&mut self, stored: RememberedRange) {
        if self.remembered.len() == REMEMBERED_MAX {
            self.remembered.pop_front();
        }
        self.remembered.push_back(stored);
    }

    /// The first `length` tokens for another sequence. It remembers no ranges: it has
    /// acknowledged none.
    pub(crate) fn fork_first(&self, shape: &ModelShape, length: u32) -> Self {
        Self {
            length,
            views: self.views.fork_first(shape.count_blocks(length)),
            settled: self.settled.min((length / shape.block_tokens()) as usize),
            remembered: VecDeque::new(),
        }
    }

    /// Forgets the tokens from `length` on; the views that go are handed to the caller, to be
    /// dropped without the layer's lock.
    pub(crate) fn truncate_to(&mut self, shape: &ModelShape, length: u32) -> DiscardedViews {
        if length >= self.length {
            return DiscardedViews::default();
        }
        let gone = self.views.truncate_to(shape.count_blocks(length));
        let rows = length % shape.block_tokens();
        if rows > 0
            && let Some(last) = self.views.last_mut()
        {
            last.forget_rows(rows);
        }
        self.length = length;
        self.settled = self.settled.min((length / shape.block_tokens()) as usize);
        self.remembered.retain(|r| r.start + r.tokens <= length);
        gone
    }

    /// Changes over to the packed form of every block that has left the window and has one; adds
    /// what it replaces to `gone`.
    pub(crate) fn settle_blocks(&mut self, shape: &ModelShape, gone: &mut DiscardedViews) {
        let mut in_a_row = true;
        for block in self.settled..shape.blocks_due(self.length) {
            let (packed, unpackable) = match self.views.get(block) {
                BlockView::Raw { block, .. } => {
                    (block.packed.get().cloned(), block.is_unpackable())
                }
                BlockView::Packed(_) => (None, true),
            };
            let all_sink = shape.sink_rows(block) == shape.block_tokens();
            in_a_row &= all_sink || unpackable || packed.is_some();
            if let Some(packed) = packed {
                gone.push(self.views.replace_view(block, BlockView::Packed(packed)));
            }
            if in_a_row {
                self.settled = block + 1;
            }
        }
    }

    /// Reads blocks from `first` on as they are cached; adds the views that go to `gone`.
    pub(crate) fn share_blocks(
        &mut self,
        first: usize,
        blocks: &[Arc<CachedBlock>],
        layer: usize,
        gone: &mut DiscardedViews,
    ) {
        for (index, block) in (first..).zip(blocks) {
            gone.push(self.views.replace_view(index, block.layer_view(layer)));
        }
        if self.settled >= first {
            self.settled = self.settled.max(first + blocks.len());
        }
    }

    /// Pins the blocks of `range`, whose tokens are stored.
    pub(crate) fn pin_range(&self, shape: &ModelShape, range: ChosenRange) -> PinnedViews {
        let ChosenRange { tokens, memory } = range;
        if tokens.is_empty() {
            return PinnedViews::default();
        }
        let first = (tokens.start / shape.block_tokens()) as usize;
        PinnedViews::new(&self.views, first..shape.count_blocks(tokens.end), memory)
    }

    /// Adds this layer to a sequence's usage.
    pub(crate) fn add_usage(&self, shape: &ModelShape, usage: &mut SequenceUsage) {
        usage.layer_lengths.push(self.length);
        let (totals, blocks) = (self.views.totals(), self.views.len() as u64);
        usage.packed_blocks += totals.packed_blocks;
        usage.raw_blocks += blocks - totals.packed_blocks;
        usage.stored += totals.stored;
        let mut raw_rows = totals.raw_views * u64::from(shape.block_tokens());
        if let Some(BlockView::Raw { .. }) = self.views.tail().last() {
            raw_rows -= blocks * u64::from(shape.block_tokens()) - u64::from(self.length);
        }
        usage.stored.raw_values += raw_rows * shape.geometry.values_per_token();
    }
}
