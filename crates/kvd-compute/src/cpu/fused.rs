//! Which sides have kernels that need no decoded rows, and what those have in common.

use super::dots::TileCodes;
use super::scores::{Scores, TILE};
use super::simd::{Simd, per_level};
use super::{uniform, vq};
use kvd_codec::{CodeLayout, FixedCodes, HeadSide};
use kvd_core::Side;
use std::ops::Range;

/// A tile, or the first of several, in its page and in the span that is at work.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) page: FixedCodes<'a>,
    pub(super) in_page: usize,
    pub(super) in_span: usize,
}

/// The key side of a unit.
pub(super) enum Keys {
    Vq(vq::Keys),
    Uniform(uniform::Keys),
}

impl Keys {
    /// Takes queries `[rows, dim]` in the side's space; `None` where rows must be decoded.
    pub(super) fn new(simd: Simd, side: &HeadSide, queries: &[f32]) -> Option<Self> {
        let vq = vq::Keys::new(simd, side, queries).map(Self::Vq);
        vq.or_else(|| uniform::Keys::new(side, queries).map(Self::Uniform))
    }

    /// Scores all rows against one full tile.
    pub(super) fn tile(
        &mut self,
        simd: Simd,
        place: Place<'_>,
        buffer: &mut [u8],
        scores: &mut Scores,
    ) {
        let Place { page, in_page, in_span } = place;
        let codes = plane(simd, &page, Side::Key, (in_page, 1), buffer);
        match self {
            Self::Vq(keys) => keys.tile(simd, codes, in_span, scores),
            Self::Uniform(keys) => keys.tile(simd, (&page, in_page), codes, in_span, scores),
        }
    }
}

/// The value side of a unit.
pub(super) enum Values {
    Vq(vq::Values),
    Uniform(uniform::Values),
}

impl Values {
    /// `None` where rows must be decoded.
    pub(super) fn new(simd: Simd, side: &HeadSide) -> Option<Self> {
        let vq = vq::Values::new(simd, side).map(Self::Vq);
        vq.or_else(|| uniform::Values::new(side).map(Self::Uniform))
    }

    /// Adds `count` full tiles, weighted, to `sums`.
    pub(super) fn tiles(
        &mut self,
        simd: Simd,
        (place, count): (Place<'_>, usize),
        buffer: &mut [u8],
        weights: &Scores,
        sums: &mut [f32],
    ) {
        let Place { page, in_page, in_span } = place;
        let codes = plane(simd, &page, Side::Value, (in_page, count), buffer);
        let tiles: Range<usize> = in_span..in_span + count;
        match self {
            Self::Vq(values) => values.tiles(simd, codes, tiles, weights, sums),
            Self::Uniform(values) => {
                values.tiles(simd, (&page, in_page), (codes, tiles), weights, sums);
            }
        }
    }

    /// Adds what [`Values::tiles`] has summed to a row in the order of its channels.
    pub(super) fn unfold(&self, sums: &[f32], row: &mut [f32]) {
        match self {
            Self::Vq(values) => values.unfold(sums, row),
            Self::Uniform(_) => row.iter_mut().zip(sums).for_each(|(to, from)| *to += from),
        }
    }
}

/// The codes of `count` tiles from `first` on, in one plane: as they lie, or else a byte each.
fn plane<'a>(
    simd: Simd,
    page: &FixedCodes<'a>,
    side: Side,
    (first, count): (usize, usize),
    buffer: &'a mut [u8],
) -> TileCodes<'a> {
    let (layout, per_row, width) = (page.layout, page.layout.per_row(), page.layout.bits());
    // Groups of keys share bytes only if their number allows it.
    let whole = side == Side::Value || (per_row * width as usize).is_multiple_of(32);
    if width.is_power_of_two() && whole {
        let bytes = layout.tile(first).start..layout.tile(first + count - 1).end;
        return TileCodes { bytes: &page.codes[bytes], width, per_row };
    }
    let buffer = &mut buffer[..count * TILE * per_row];
    for (tile, out) in (first..).zip(buffer.chunks_exact_mut(TILE * per_row)) {
        unpack_tile(simd, layout, &page.codes[layout.tile(tile)], out);
    }
    TileCodes { bytes: buffer, width: 8, per_row }
}

per_level!(fn unpack_tile(layout: CodeLayout, codes: &[u8], out: &mut [u8]) = unpack_tile_body);

#[inline(always)]
fn unpack_tile_body(layout: CodeLayout, codes: &[u8], out: &mut [u8]) {
    layout.unpack_tile(codes, out);
}
