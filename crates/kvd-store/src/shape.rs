//! The shape of a model, as far as the store needs it, and the limits of the store.
//!
//! Owns the window arithmetic: which blocks are due for packing, which rows stay raw. Plain
//! values, no locks.

use kvd_core::{Geometry, ModelId, Namespace};
use std::ops::Range;

/// Named limits of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Open sequences, over all namespaces. Default 65 536.
    pub sequences_max: u64,
    /// Layers of all open sequences together: each takes book-keeping of its own, also while it
    /// is empty. Default 4 194 304 (2^22).
    pub sequence_layers_max: u64,
    /// Views of all sequences together: one for each block that a sequence stored or copied, and
    /// for a fork one for every 64 blocks that it shares and one for each of its last 64. Each
    /// takes 24 bytes. Default 33 554 432 (2^25).
    pub sequence_views_max: u64,
    /// Tokens of one sequence. Default 4 194 304 (2^22).
    pub tokens_per_sequence_max: u32,
    /// Tokens of one append, which bounds the work of one job of the device. Default 65 536.
    pub tokens_per_append_max: u32,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            sequences_max: 65_536,
            sequence_layers_max: 1 << 22,
            sequence_views_max: 1 << 25,
            tokens_per_sequence_max: 1 << 22,
            tokens_per_append_max: 65_536,
        }
    }
}

/// A model as the store sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Its id: totals are kept by it.
    pub id: ModelId,
    /// Whose sequences these are: ids answer only to this namespace.
    pub namespace: Namespace,
    /// Shape of K and V.
    pub geometry: Geometry,
    /// First tokens of a sequence that are kept in the stored precision.
    pub sink: u32,
    /// Last tokens of a layer that are kept in the stored precision.
    pub recent: u32,
}

/// Rows of one block.
pub(crate) struct BlockRows {
    pub(crate) block: usize,
    pub(crate) rows: Range<u32>,
}

impl ModelShape {
    /// Tokens of a block.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.geometry.block_tokens
    }

    /// Blocks that hold `tokens` tokens, the last perhaps in part.
    pub(crate) fn count_blocks(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.block_tokens()) as usize
    }

    /// Blocks that are full and have left the window of a layer of `length` tokens: the first
    /// this many. Those that lie in the sink are among them although they are never packed.
    pub(crate) fn blocks_due(&self, length: u32) -> usize {
        (length.saturating_sub(self.recent) / self.block_tokens()) as usize
    }

    /// Rows at the start of `block` that belong to the sink.
    pub(crate) fn sink_rows(&self, block: usize) -> u32 {
        let start = block as u64 * u64::from(self.block_tokens());
        let rows = u64::from(self.sink).saturating_sub(start);
        rows.min(u64::from(self.block_tokens())) as u32
    }

    /// The blocks that `tokens` touches, each with the rows of it that lie inside.
    pub(crate) fn rows_by_block(&self, tokens: Range<u32>) -> impl Iterator<Item = BlockRows> {
        let size = u64::from(self.block_tokens());
        let (start, end) = (u64::from(tokens.start), u64::from(tokens.end));
        let last = if start < end { end.div_ceil(size) } else { start / size };
        (start / size..last).map(move |block| {
            let first = block * size;
            let rows = start.max(first) - first..end.min(first + size) - first;
            BlockRows { block: block as usize, rows: rows.start as u32..rows.end as u32 }
        })
    }
}
