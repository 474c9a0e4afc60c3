//! One layer of one sequence: its length, its cells, and the ranges it remembers.
//!
//! Owns the rules of ranges (gap, overlap, replay), of truncation and of sharing. Everything here
//! runs under the sequence's mutex; views that drop here may take the pool's lock.
//!
//! Truncation does not restore precision: what was packed stays packed. Rows of a packed block
//! that survive are decoded into a raw block by the next append to it, and encoded again when
//! that block leaves the window. A fork that is shorter than its parent inherits the same.

use crate::cell::{Part, View};
use crate::error::StoreError;
use crate::sequence::{PinnedPart, SequenceUsage};
use crate::shape::ModelShape;
use std::collections::VecDeque;
use std::ops::Range;

/// Ranges a layer remembers in order to recognise a repeated request.
pub(crate) const REMEMBERED_MAX: usize = 64;

/// An append that was acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remembered {
    pub(crate) start: u32,
    pub(crate) tokens: u32,
    pub(crate) content_hash: u64,
}

/// How an append fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// It begins at the end.
    Next,
    /// It was acknowledged before, with content of this hash.
    Known(u64),
    /// It begins after the end.
    Gap,
}

/// Everything a sequence knows of a layer.
#[derive(Debug, Default)]
pub(crate) struct Layer {
    /// Tokens stored.
    pub(crate) length: u32,
    /// `ceil(length / block_tokens)` cells.
    pub(crate) views: Vec<View>,
    /// The first this many cells need no more thought: packed, or never to be.
    pub(crate) settled: usize,
    remembered: VecDeque<Remembered>,
}

impl Layer {
    /// Where a range that is offered stands to what is stored.
    pub(crate) fn fit(&self, start: u32, tokens: u32) -> Result<Fit, StoreError> {
        match start.cmp(&self.length) {
            std::cmp::Ordering::Equal => return Ok(Fit::Next),
            std::cmp::Ordering::Greater => return Ok(Fit::Gap),
            std::cmp::Ordering::Less => {}
        }
        // At most one can match: a range is only stored again after truncation dropped it here.
        let known = self.remembered.iter().find(|r| (r.start, r.tokens) == (start, tokens));
        let overlap = StoreError::RangeOverlap { start, tokens, length: self.length };
        known.map(|r| Fit::Known(r.content_hash)).ok_or(overlap)
    }

    /// Remembers an acknowledged range, and forgets the oldest beyond the limit.
    pub(crate) fn remember(&mut self, stored: Remembered) {
        if self.remembered.len() == REMEMBERED_MAX {
            self.remembered.pop_front();
        }
        self.remembered.push_back(stored);
    }

    /// The same first `length` tokens for another sequence. It remembers no ranges: it has
    /// acknowledged none.
    pub(crate) fn fork(&self, shape: &ModelShape, length: u32) -> Self {
        Self {
            length,
            views: self.views[..shape.blocks(length)].to_vec(),
            settled: self.settled.min((length / shape.block_tokens()) as usize),
            remembered: VecDeque::new(),
        }
    }

    /// Forgets the tokens from `length` on; the cells that go are handed to the caller, to be
    /// dropped without the sequence's lock.
    pub(crate) fn truncate(&mut self, shape: &ModelShape, length: u32) -> Vec<View> {
        if length >= self.length {
            return Vec::new();
        }
        let gone = self.views.split_off(shape.blocks(length));
        let rows = length % shape.block_tokens();
        if rows > 0
            && let Some(last) = self.views.last_mut()
        {
            last.truncate(rows);
        }
        self.length = length;
        self.settled = self.settled.min((length / shape.block_tokens()) as usize);
        self.remembered.retain(|r| r.start + r.tokens <= length);
        gone
    }

    /// Changes over to the packed form of every cell that has left the window and has one; what
    /// it replaces is handed to the caller.
    pub(crate) fn settle(&mut self, shape: &ModelShape) -> Vec<View> {
        let mut gone = Vec::new();
        let mut in_a_row = true;
        for block in self.settled..shape.blocks_due(self.length) {
            let view = &mut self.views[block];
            let packed = match view {
                View::Raw { cell, .. } => cell.packed.get().cloned(),
                View::Packed(_) => None,
            };
            if let Some(packed) = packed {
                gone.push(std::mem::replace(view, View::Packed(packed)));
            }
            let all_sink = shape.sink_rows(block) == shape.block_tokens();
            in_a_row &= all_sink
                || match view {
                    View::Packed(_) => true,
                    View::Raw { cell, .. } => cell.is_unpackable(),
                };
            if in_a_row {
                self.settled = block + 1;
            }
        }
        gone
    }

    /// Where the tokens of `range`, which are stored, lie; in order, without gaps.
    pub(crate) fn parts(&self, shape: &ModelShape, range: Range<u32>) -> Vec<PinnedPart> {
        let mut found: Vec<PinnedPart> = Vec::new();
        let mut of_block: Vec<Part> = Vec::with_capacity(2);
        for (block, rows) in shape.rows_by_block(range) {
            self.views[block].parts(rows, &mut of_block);
            let first = block as u32 * shape.block_tokens();
            found.extend(
                of_block
                    .drain(..)
                    .map(|part| PinnedPart { first_token: first + part.rows.start, part }),
            );
        }
        found
    }

    /// Adds this layer to a sequence's usage.
    pub(crate) fn count(&self, shape: &ModelShape, usage: &mut SequenceUsage) {
        usage.layer_lengths.push(self.length);
        let values_per_row = shape.geometry.values_per_token();
        for (block, rows) in shape.rows_by_block(0..self.length) {
            let view = &self.views[block];
            usage.stored += view.stored(rows.end, values_per_row);
            if view.is_packed() {
                usage.packed_blocks += 1;
            } else {
                usage.raw_blocks += 1;
            }
        }
    }
}
