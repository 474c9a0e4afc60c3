//! Which sides have kernels that need no decoded rows, and what those have in common.

use crate::cpu::dots::{TileCodes, wants_bytes};
use crate::cpu::huffman::{LaneTiles, Rest};
use crate::cpu::loss::RoundingLoss;
use crate::cpu::place::{Place, room};
use crate::cpu::scores::{SPAN, Scores, TILE};
use crate::cpu::simd::{How, Precision, Simd, per_level};
use crate::cpu::{
    bitalloc, fp8, grid, lloyd, polar, score_tables, uniform, uniform::bf16, uniform::by_token,
    uniform::nibbles, uniform::values, vq,
};
use kvd_codec::{CodeLayout, HeadCodec};
use kvd_core::Side;
use std::ops::Range;

/// The key side of a unit.
pub(super) enum Keys {
    Fp8(fp8::Keys),
    Tables(score_tables::Keys),
    Vq(vq::Keys),
    Bf16(bf16::Keys),
    Nibbles(nibbles::Keys),
    Uniform(uniform::Keys),
    ByToken(by_token::Keys),
    Grid(grid::Keys),
    BitAlloc(bitalloc::Keys),
    Lloyd(lloyd::Keys),
    Polar(polar::Keys),
}

impl Keys {
    /// Takes queries `[rows, dim]` in the side's space; `None` where rows must be decoded.
    pub(super) fn new(
        how: How,
        side: &HeadCodec,
        tiles: Option<&LaneTiles>,
        queries: &[f32],
    ) -> Option<Self> {
        let exact = fp8::Keys::new(how.0, side, queries).map(Self::Fp8);
        if exact.is_some() || how.1 == Precision::Single {
            return exact;
        }
        if let Some(tiles) = tiles.filter(|_| side.grid().is_some()) {
            return grid::Keys::new(how, side, tiles, queries).map(Self::Grid);
        }
        if side.bitalloc().is_some() {
            return bitalloc::Keys::new(how, side, queries).map(Self::BitAlloc);
        }
        let tables = score_tables::Keys::of_codebook(how, side, queries).map(Self::Tables);
        let vq = tables.or_else(|| vq::Keys::new(how, side, queries).map(Self::Vq));
        let vq = vq.or_else(|| lloyd::Keys::new(how, side, queries).map(Self::Lloyd));
        let vq = vq.or_else(|| polar::Keys::new(how, side, queries).map(Self::Polar));
        let vq = vq.or_else(|| by_token::Keys::new(how, side, queries).map(Self::ByToken));
        let vq = vq.or_else(|| bf16::Keys::new(how, side, queries).map(Self::Bf16));
        let vq = vq.or_else(|| nibbles::Keys::new(how, side, queries).map(Self::Nibbles));
        vq.or_else(|| uniform::Keys::new(how, side, queries).map(Self::Uniform))
    }

    /// Tiles that one call takes: one where they have scales of their own, or bytes are many and
    /// the next ones want to be asked for in between.
    pub(super) fn tiles_at_once(&self) -> usize {
        match self {
            Self::Fp8(_) | Self::Uniform(_) | Self::ByToken(_) => 1,
            Self::Polar(keys) if !keys.is_by_page() => 1,
            Self::Tables(_)
            | Self::Bf16(_)
            | Self::Nibbles(_)
            | Self::Vq(_)
            | Self::Grid(_)
            | Self::BitAlloc(_)
            | Self::Lloyd(_)
            | Self::Polar(_) => SPAN / TILE,
        }
    }

    /// How far rounding of queries to words may take a score of that row, so far, beside those of
    /// f32: see [`rounding_loss`](crate::cpu::loss::rounding_loss).
    pub(super) fn loss(&self, row: usize) -> f32 {
        match self {
            Self::Vq(keys) => keys.loss(row),
            Self::Uniform(keys) => keys.loss(row),
            Self::ByToken(keys) => keys.loss(row),
            Self::Grid(keys) => keys.loss(row),
            Self::BitAlloc(keys) => keys.loss(row),
            Self::Lloyd(keys) => keys.loss(row),
            Self::Polar(keys) => keys.loss(row),
            // The first rounds nothing, others round to bytes, whose bound is another.
            Self::Fp8(_) | Self::Tables(_) | Self::Bf16(_) | Self::Nibbles(_) => 0.0,
        }
    }

    /// Whether queries are rounded to words.
    pub(super) fn rounds_queries(&self) -> bool {
        match self {
            Self::Vq(_) | Self::Uniform(_) | Self::ByToken(_) | Self::Grid(_) => true,
            Self::BitAlloc(_) | Self::Lloyd(_) | Self::Polar(_) => true,
            Self::Fp8(_) | Self::Tables(_) | Self::Bf16(_) | Self::Nibbles(_) => false,
        }
    }

    /// Scores all rows against `count` full tiles.
    pub(super) fn tiles(
        &mut self,
        simd: Simd,
        (place, count): (Place<'_>, usize),
        buffer: &mut Vec<u8>,
        scores: &mut Scores,
    ) {
        let Place { page, in_page, in_span, ahead } = place;
        let tiles = in_span..in_span + count;
        match self {
            Self::Fp8(keys) => return keys.tile(simd, (&page, in_page), (in_span, ahead), scores),
            Self::BitAlloc(keys) => return keys.tiles(simd, (place, count), scores),
            _ => {}
        }
        let bytes = wants_bytes(simd, scores.rows()) && matches!(self, Self::Uniform(_));
        let codes = plane(simd, (place, count), (Side::Key, bytes), buffer);
        match self {
            Self::Fp8(_) | Self::BitAlloc(_) => {}
            Self::Tables(keys) => keys.tiles(simd, codes, in_span, scores),
            Self::Vq(keys) => keys.tiles(simd, codes, in_span, scores),
            Self::Uniform(keys) => keys.tile(simd, (&page, in_page), codes, in_span, scores),
            Self::Bf16(keys) => keys.tiles((&page, in_page), (codes, tiles), scores),
            Self::Nibbles(keys) => keys.tiles((&page, in_page), (codes, tiles), scores),
            Self::Grid(keys) => keys.tiles(simd, (codes, tiles), scores),
            Self::ByToken(keys) => keys.tile(simd, place, codes, scores),
            Self::Lloyd(keys) => keys.tiles(simd, (&page, in_page), (codes, tiles), scores),
            Self::Polar(keys) => keys.tiles(simd, (&page, in_page), codes, in_span, scores),
        }
    }

    /// Adds what tiles do not hold to the score of token `token` of the span.
    pub(super) fn rest(&self, rest: &Rest, token: usize, scores: &mut Scores) {
        if let Self::Grid(keys) = self {
            keys.rest(rest, token, scores);
        }
    }
}

/// The value side of a unit.
pub(super) enum Values {
    Fp8(fp8::Values),
    Vq(vq::Values),
    Bf16(bf16::Values),
    Nibbles(Box<nibbles::Values>),
    Uniform(Box<values::Values>),
    Grid(grid::Values),
    BitAlloc(bitalloc::Values),
    Lloyd(lloyd::Values),
}

impl Values {
    /// `None` where rows must be decoded.
    pub(super) fn new(
        how: How,
        side: &HeadCodec,
        tiles: Option<&LaneTiles>,
        rows: usize,
    ) -> Option<Self> {
        let exact = fp8::Values::new(how.0, side).map(Self::Fp8);
        if exact.is_some() || how.1 == Precision::Single {
            return exact;
        }
        if let Some(tiles) = tiles.filter(|_| side.grid().is_some()) {
            return grid::Values::new(how, side, tiles, rows).map(Self::Grid);
        }
        if side.bitalloc().is_some() {
            return bitalloc::Values::new(how, side, rows).map(Self::BitAlloc);
        }
        let vq = vq::Values::new(how, side, rows).map(Self::Vq);
        let vq = vq.or_else(|| lloyd::Values::new(how, side, rows).map(Self::Lloyd));
        let vq = vq.or_else(|| bf16::Values::new(how, side, rows).map(Self::Bf16));
        let vq = vq.or_else(|| {
            nibbles::Values::new(how, side, rows).map(|values| Self::Nibbles(Box::new(values)))
        });
        vq.or_else(|| {
            values::Values::new(how, side, rows).map(|values| Self::Uniform(Box::new(values)))
        })
    }

    /// Tiles that one call takes: many where they share work, few where bytes are many and the
    /// next ones want to be asked for in between.
    pub(super) fn tiles_at_once(&self) -> usize {
        if matches!(self, Self::Fp8(_)) { 1 } else { SPAN / TILE }
    }

    /// The largest magnitude that weights rounded to words are multiplied with, so far; 0 where
    /// those are weights times the scale of their token: see [`Values::folded_loss`].
    pub(super) fn magnitude(&self) -> f32 {
        match self {
            Self::Vq(values) => values.magnitude(),
            Self::Uniform(values) => values.magnitude(),
            Self::Grid(values) => values.magnitude(),
            Self::BitAlloc(values) => values.magnitude(),
            Self::Fp8(_) | Self::Bf16(_) | Self::Nibbles(_) | Self::Lloyd(_) => 0.0,
        }
    }

    /// How far a sum of a row is off at most for what rounding to words took from all of its
    /// weights together: equal ones round equally.
    pub(super) fn lost(&self, row: usize) -> f32 {
        match self {
            Self::Vq(values) => values.lost(row),
            Self::Uniform(values) => values.lost(row),
            Self::Grid(values) => values.lost(row),
            Self::BitAlloc(values) => values.lost(row),
            Self::Fp8(_) | Self::Bf16(_) | Self::Nibbles(_) | Self::Lloyd(_) => 0.0,
        }
    }

    /// Losses of a sum of a row for weights that are rounded times the scale of their token.
    pub(super) fn folded_loss(&self, row: usize) -> RoundingLoss {
        match self {
            Self::Uniform(values) => values.folded_loss(row),
            Self::Lloyd(values) => values.folded_loss(row),
            _ => RoundingLoss::default(),
        }
    }

    /// Adds `count` full tiles, weighted, to `sums`.
    pub(super) fn tiles(
        &mut self,
        simd: Simd,
        (place, count): (Place<'_>, usize),
        buffer: &mut Vec<u8>,
        weights: &Scores,
        sums: &mut [f32],
    ) {
        let Place { page, in_page, in_span, ahead } = place;
        let tiles: Range<usize> = in_span..in_span + count;
        match self {
            Self::Fp8(values) => {
                return values.tiles(simd, (&page, in_page), (tiles, ahead), weights, sums);
            }
            Self::BitAlloc(values) => return values.tiles(simd, (place, count), weights),
            _ => {}
        }
        let bytes = wants_bytes(simd, weights.rows()) && matches!(self, Self::Uniform(_));
        let codes = plane(simd, (place, count), (Side::Value, bytes), buffer);
        match self {
            Self::Fp8(_) | Self::BitAlloc(_) => {}
            Self::Vq(values) => values.tiles(simd, codes, tiles, weights, sums),
            Self::Uniform(values) => {
                values.tiles(simd, (&page, in_page), (codes, tiles), weights, sums);
            }
            Self::Bf16(values) => {
                values.tiles((&page, in_page), (codes, tiles), weights, sums);
            }
            Self::Nibbles(values) => {
                values.tiles((&page, in_page), (codes, tiles), weights, sums);
            }
            Self::Grid(values) => values.tiles(simd, codes, tiles, weights),
            Self::Lloyd(values) => values.tiles(simd, (&page, in_page), (codes, tiles), weights),
        }
    }

    /// Adds what tiles do not hold of token `token` of the span.
    pub(super) fn rest(&mut self, rest: &Rest, token: usize, weights: &Scores) {
        if let Self::Grid(values) = self {
            values.rest(rest, token, weights);
        }
    }

    /// Scales what was summed for row `row`, `sums` of it.
    pub(super) fn scale(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        match self {
            Self::Grid(values) => values.scale(row, factor),
            Self::BitAlloc(values) => values.scale(row, factor),
            Self::Lloyd(values) => values.scale(row, factor),
            Self::Bf16(values) => values.scale(row, sums, factor),
            Self::Nibbles(values) => values.scale(row, sums, factor),
            Self::Uniform(values) => values.scale(row, sums, factor),
            Self::Vq(values) => values.scale(row, sums, factor),
            Self::Fp8(_) => sums.iter_mut().for_each(|sum| *sum *= factor),
        }
    }

    /// Adds what [`Values::tiles`] has summed for row `index`, `sums` of it, to a row in the order
    /// of its channels.
    pub(super) fn unfold(&self, index: usize, sums: &[f32], row: &mut [f32]) {
        match self {
            Self::Vq(values) => values.unfold(sums, row),
            Self::Fp8(_) => row.iter_mut().zip(sums).for_each(|(to, from)| *to += from),
            Self::Bf16(values) => values.unfold(index, sums, row),
            Self::Nibbles(values) => values.unfold(index, sums, row),
            Self::Uniform(values) => values.unfold(index, sums, row),
            Self::Grid(values) => values.unfold(index, row),
            Self::BitAlloc(values) => values.unfold(index, row),
            Self::Lloyd(values) => values.unfold(index, row),
        }
    }
}

/// The codes of `count` tiles from `first` on, in one plane: as they lie, or else a byte each, as
/// products may want them.
fn plane<'a>(
    simd: Simd,
    (place, count): (Place<'a>, usize),
    (side, bytes): (Side, bool),
    buffer: &'a mut Vec<u8>,
) -> TileCodes<'a> {
    let Place { page, in_page: first, ahead, .. } = place;
    let (layout, per_row, width) = (page.layout, page.layout.per_row(), page.layout.code_bits());
    // Groups of keys share bytes only if their number allows it.
    let whole = side == Side::Value || (per_row * width as usize).is_multiple_of(32);
    if width == 8 || width.is_power_of_two() && whole && !bytes {
        let bytes = layout.tile_bytes(first).start..layout.tile_bytes(first + count - 1).end;
        return TileCodes { bytes: &page.codes[bytes], width, per_row, ahead };
    }
    let buffer = room(buffer, count * TILE * per_row);
    for (tile, out) in (first..).zip(buffer.chunks_exact_mut(TILE * per_row)) {
        unpack_tile(simd, layout, &page.codes[layout.tile_bytes(tile)], out);
    }
    TileCodes { bytes: buffer, width: 8, per_row, ahead }
}

per_level!(fn unpack_tile(layout: CodeLayout, codes: &[u8], out: &mut [u8]) = unpack_tile_body);

#[inline(always)]
fn unpack_tile_body(layout: CodeLayout, codes: &[u8], out: &mut [u8]) {
    layout.unpack_tile(codes, out);
}
