//! Hold of a reader: a range of one layer, alive until it is dropped.
//!
//! Owns [`PinnedRange`], whose memory may be used again ([`PinMemory`]). Whole chunks are held by
//! one pointer each; of the last blocks, which an append may still write to, the bytes alone are
//! held, so that a reader never makes a sequence copy rows that it appends behind those that are
//! read. No locks.

use crate::layer_block::{FoundRows, PinnedBlock, RowExtentRef};
use crate::shape::{BlockRows, ModelShape};
use crate::view_list::{CHUNK_VIEWS, ViewChunk, ViewList};
use std::ops::Range;
use std::sync::Arc;

/// A range of one layer, readable and kept alive until this is dropped.
#[derive(Clone, Debug)]
pub struct PinnedRange {
    /// The sequence's model.
    pub model: Arc<ModelShape>,
    /// Tokens the read sees: as asked, or all that the layer had.
    pub length: u32,
    /// Tokens that are pinned.
    pub range: Range<u32>,
    pub(crate) views: PinnedViews,
}

/// Memory of a pin that is over, for another; it holds nothing.
#[derive(Debug, Default)]
pub struct PinMemory {
    chunks: Vec<Arc<ViewChunk>>,
    blocks: Vec<PinnedBlock>,
}

impl PinMemory {
    /// Bytes of it.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Arc<ViewChunk>>()
            + self.blocks.capacity() * size_of::<PinnedBlock>()
    }
}

/// A range that is to be pinned.
#[derive(Debug, Default)]
pub struct ChosenRange {
    /// Its tokens.
    pub tokens: Range<u32>,
    /// Memory for the pin.
    pub memory: PinMemory,
}

impl From<Range<u32>> for ChosenRange {
    fn from(tokens: Range<u32>) -> Self {
        Self { tokens, memory: PinMemory::default() }
    }
}

/// Some rows of a [`PinnedRange`], all in one form.
#[derive(Clone, Debug)]
pub struct PinnedRows<'a> {
    /// Token of the sequence at `extent.rows.start`.
    pub first_token: u32,
    /// The rows and where they are.
    pub extent: RowExtentRef<'a>,
}

impl PinnedRange {
    /// Gives the range up, and keeps its memory.
    #[must_use]
    pub fn into_memory(self) -> PinMemory {
        let PinnedViews { mut chunks, mut blocks, .. } = self.views;
        chunks.clear();
        blocks.clear();
        PinMemory { chunks, blocks }
    }

    /// Where the tokens of the range lie: in order, disjoint, without gaps.
    pub fn find_rows(&self) -> impl Iterator<Item = PinnedRows<'_>> {
        let block_tokens = self.model.block_tokens();
        self.model.rows_by_block(self.range.clone()).flat_map(move |BlockRows { block, rows }| {
            let first_token = block as u32 * block_tokens;
            self.views.find_rows(block, rows).map(move |extent| PinnedRows {
                first_token: first_token + extent.rows.start,
                extent,
            })
        })
    }
}

/// The blocks of a [`PinnedRange`] range: chunks that hold some of them, then blocks one by one.
#[derive(Clone, Debug, Default)]
pub(crate) struct PinnedViews {
    /// Index of the first of `chunks` within the layer.
    first_chunk: usize,
    chunks: Vec<Arc<ViewChunk>>,
    /// Index of the first of `blocks` within the layer.
    first_block: usize,
    blocks: Vec<PinnedBlock>,
}

impl PinnedViews {
    /// Pins the blocks of `range`, which is not empty.
    pub(crate) fn new(views: &ViewList, range: Range<usize>, memory: PinMemory) -> Self {
        let PinMemory { chunks: mut held_chunks, blocks: mut held_blocks } = memory;
        let chunks = views.chunks();
        let first_chunk = (range.start / CHUNK_VIEWS).min(chunks.len());
        let end_chunk = range.end.div_ceil(CHUNK_VIEWS).min(chunks.len());
        let in_chunks = chunks.len() * CHUNK_VIEWS;
        let first_block = range.start.max(in_chunks);
        let blocks = match range.end.checked_sub(in_chunks) {
            Some(end) if end > 0 => &views.tail()[first_block - in_chunks..end],
            _ => &[],
        };
        held_chunks.extend_from_slice(&chunks[first_chunk..end_chunk]);
        held_blocks.extend(blocks.iter().map(|view| view.pin_block()));
        Self { first_chunk, chunks: held_chunks, first_block, blocks: held_blocks }
    }

    /// Where `rows` of a block lie.
    fn find_rows(&self, block: usize, rows: Range<u32>) -> FoundRows<'_> {
        match block.checked_sub(self.first_block) {
            Some(index) => self.blocks[index].find_rows(rows),
            None => {
                let chunk = &self.chunks[block / CHUNK_VIEWS - self.first_chunk];
                chunk.views()[block % CHUNK_VIEWS].find_rows(rows)
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn pinned_chunks(&self) -> &[Arc<ViewChunk>] {
        &self.chunks
    }

    #[cfg(test)]
    pub(crate) fn pinned_blocks(&self) -> &[PinnedBlock] {
        &self.blocks
    }
}
