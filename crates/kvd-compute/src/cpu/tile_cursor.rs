//! Where a kernel finds its tiles.

use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::scratch::{ScratchValue, ScratchVec};
use kvd_codec::FixedCodes;
use std::ops::Range;

/// The tiles of one call of a kernel: where they lie in their page and in the span at work.
#[derive(Clone, Copy)]
pub(super) struct TileCursor<'a> {
    pub(super) page: &'a FixedCodes<'a>,
    /// The first tile, counted in its page.
    pub(super) in_page: usize,
    /// The first tile, counted in the span.
    pub(super) in_span: usize,
    /// How many tiles.
    pub(super) count: usize,
    /// Bytes of the next part to prefetch meanwhile.
    pub(super) prefetch: PrefetchBytes<'a>,
}

impl TileCursor<'_> {
    /// The tiles, counted in the span.
    pub(super) fn span_tiles(&self) -> Range<usize> {
        self.in_span..self.in_span + self.count
    }

    /// The tiles, counted in the page.
    pub(super) fn page_tiles(&self) -> Range<usize> {
        self.in_page..self.in_page + self.count
    }
}

/// The first `len` values of a buffer, which grows where it has fewer.
pub(super) fn grow_buffer<T: ScratchValue + Copy + Default>(
    buffer: &mut ScratchVec<T>,
    len: usize,
) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize_with_room(len, T::default());
    }
    &mut buffer[..len]
}
