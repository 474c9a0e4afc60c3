//! Where a kernel finds its tiles.

use crate::cpu::ahead::Ahead;
use kvd_codec::FixedCodes;

/// A tile, or the first of several, in its page and in the span that is at work.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) page: FixedCodes<'a>,
    pub(super) in_page: usize,
    pub(super) in_span: usize,
    /// Bytes of the next part to prefetch meanwhile.
    pub(super) ahead: Ahead<'a>,
}

/// So many values of a buffer, which grows where it has fewer.
pub(super) fn room<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
