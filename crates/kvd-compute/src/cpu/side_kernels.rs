//! Which sides have kernels that need no decoded rows, and what those have in common.

use crate::cpu::grid::HeldMagnitudes;
use crate::cpu::huffman::{OutlierRest, StreamTiles};
use crate::cpu::int_dot::{TileCodes, wants_bytes};
use crate::cpu::kernel_table::{
    KernelTarget, KeyKernelId, ValueKernelId, find_key_kernel, find_value_kernel,
};
use crate::cpu::loss::RoundingLoss;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::{KernelConfig, Simd, per_level};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::{TileCursor, grow_buffer};
use crate::cpu::{
    bitalloc, fp8, grid, lloyd, polar, score_tables, uniform, uniform::bf16, uniform::by_token,
    uniform::nibbles, uniform::values, vq,
};
use kvd_codec::{CodeLayout, HeadCodec};
use kvd_core::Side;

/// The key side of a unit.
pub(super) enum KeyKernel {
    Fp8(fp8::Fp8Keys),
    Tables(score_tables::TableKeys),
    Vq(vq::VqKeys),
    Bf16(bf16::Bf16Keys),
    Nibbles(nibbles::NibbleKeys),
    Uniform(uniform::UniformKeys),
    ByToken(by_token::TokenKeys),
    Grid(grid::GridKeys),
    BitAlloc(bitalloc::BitAllocKeys),
    Lloyd(lloyd::LloydKeys),
    Polar(polar::PolarKeys),
}

impl KeyKernel {
    /// Takes queries `[rows, dim]` in the side's space; `None` where rows must be decoded.
    pub(super) fn new(
        config: KernelConfig,
        side: &HeadCodec,
        tiles: Option<&StreamTiles>,
        queries: &[f32],
    ) -> Option<Self> {
        let target = KernelTarget::new(config, queries.len() / side.dim());
        match find_key_kernel(target, side, tiles)? {
            KeyKernelId::Fp8 => fp8::Fp8Keys::new(side, queries).map(Self::Fp8),
            KeyKernelId::Grid => grid::GridKeys::new(config, side, tiles?, queries).map(Self::Grid),
            KeyKernelId::BitAlloc => {
                bitalloc::BitAllocKeys::new(config, side, queries).map(Self::BitAlloc)
            }
            KeyKernelId::ScoreTables => {
                score_tables::TableKeys::of_codebook(config.simd, side, queries).map(Self::Tables)
            }
            KeyKernelId::Vq => vq::VqKeys::new(config, side, queries).map(Self::Vq),
            KeyKernelId::LevelTables => {
                lloyd::LloydKeys::with_tables(config.simd, side, queries).map(Self::Lloyd)
            }
            KeyKernelId::Lloyd => lloyd::LloydKeys::new(config, side, queries).map(Self::Lloyd),
            KeyKernelId::Polar => polar::PolarKeys::new(config, side, queries).map(Self::Polar),
            KeyKernelId::ByToken => {
                by_token::TokenKeys::new(config, side, queries).map(Self::ByToken)
            }
            KeyKernelId::Bf16 => bf16::Bf16Keys::new(side, queries).map(Self::Bf16),
            KeyKernelId::Nibbles => nibbles::NibbleKeys::new(side, queries).map(Self::Nibbles),
            KeyKernelId::Uniform => {
                uniform::UniformKeys::new(config, side, queries).map(Self::Uniform)
            }
        }
    }

    /// Its row in the table.
    #[cfg(test)]
    pub(super) fn kernel_id(&self) -> KeyKernelId {
        match self {
            Self::Fp8(_) => KeyKernelId::Fp8,
            Self::Tables(_) => KeyKernelId::ScoreTables,
            Self::Vq(_) => KeyKernelId::Vq,
            Self::Bf16(_) => KeyKernelId::Bf16,
            Self::Nibbles(_) => KeyKernelId::Nibbles,
            Self::Uniform(_) => KeyKernelId::Uniform,
            Self::ByToken(_) => KeyKernelId::ByToken,
            Self::Grid(_) => KeyKernelId::Grid,
            Self::BitAlloc(_) => KeyKernelId::BitAlloc,
            Self::Lloyd(keys) if keys.has_tables() => KeyKernelId::LevelTables,
            Self::Lloyd(_) => KeyKernelId::Lloyd,
            Self::Polar(_) => KeyKernelId::Polar,
        }
    }

    /// Tiles that one call takes: one where they have scales of their own, or where bytes are
    /// many and the next ones are to be prefetched in between.
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
    pub(super) fn score_loss(&self, row: usize) -> f32 {
        match self {
            Self::Vq(keys) => keys.score_loss(row),
            Self::Uniform(keys) => keys.score_loss(row),
            Self::ByToken(keys) => keys.score_loss(row),
            Self::Grid(keys) => keys.score_loss(row),
            Self::BitAlloc(keys) => keys.score_loss(row),
            Self::Lloyd(keys) => keys.score_loss(row),
            Self::Polar(keys) => keys.score_loss(row),
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

    /// Scores all rows against a few full tiles.
    pub(super) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        buffer: &mut ScratchVec<u8>,
        scores: &mut SpanScores,
    ) {
        match self {
            Self::Fp8(keys) => return keys.score_tiles(simd, cursor, scores),
            Self::BitAlloc(keys) => return keys.score_tiles(simd, cursor, scores),
            _ => {}
        }
        let bytes = wants_bytes(simd, scores.row_count()) && matches!(self, Self::Uniform(_));
        let codes = tile_codes(simd, cursor, CodeForm { side: Side::Key, bytes }, buffer);
        let in_span = cursor.in_span;
        match self {
            Self::Fp8(_) | Self::BitAlloc(_) => {}
            Self::Tables(keys) => keys.score_tiles(simd, codes, in_span, scores),
            Self::Vq(keys) => keys.score_tiles(simd, codes, in_span, scores),
            Self::Uniform(keys) => keys.score_tiles(simd, cursor, codes, scores),
            Self::Bf16(keys) => keys.score_tiles(cursor, codes, scores),
            Self::Nibbles(keys) => keys.score_tiles(cursor, codes, scores),
            Self::Grid(keys) => keys.score_tiles(simd, codes, cursor.span_tiles(), scores),
            Self::ByToken(keys) => keys.score_tiles(simd, cursor, codes, scores),
            Self::Lloyd(keys) => keys.score_tiles(simd, cursor, codes, scores),
            Self::Polar(keys) => keys.score_tiles(simd, cursor, codes, scores),
        }
    }

    /// Adds an outlier, which tiles do not hold, to the score of token `token` of the span.
    pub(super) fn add_outlier(&self, rest: &OutlierRest, token: usize, scores: &mut SpanScores) {
        if let Self::Grid(keys) = self {
            keys.add_outlier(rest, token, scores);
        }
    }
}

/// The value side of a unit.
#[expect(clippy::large_enum_variant, reason = "there is one for each unit, on the stack")]
pub(super) enum ValueKernel {
    Fp8(fp8::Fp8Values),
    Vq(vq::VqValues),
    Bf16(bf16::Bf16Values),
    Nibbles(Box<nibbles::NibbleValues>),
    Uniform(values::UniformValues),
    Grid(grid::GridValues),
    BitAlloc(bitalloc::BitAllocValues),
    Lloyd(lloyd::LloydValues),
}

impl ValueKernel {
    /// `None` where rows must be decoded.
    pub(super) fn new(
        config: KernelConfig,
        side: &HeadCodec,
        tiles: Option<&StreamTiles>,
        rows: usize,
    ) -> Option<Self> {
        match find_value_kernel(KernelTarget::new(config, rows), side, tiles)? {
            ValueKernelId::Fp8 => Some(Self::Fp8(fp8::Fp8Values::new(side))),
            ValueKernelId::Grid => {
                grid::GridValues::new(config, side, tiles?, rows).map(Self::Grid)
            }
            ValueKernelId::BitAlloc => {
                bitalloc::BitAllocValues::new(config, side, rows).map(Self::BitAlloc)
            }
            ValueKernelId::Vq => vq::VqValues::new(config, side, rows).map(Self::Vq),
            ValueKernelId::Lloyd => lloyd::LloydValues::new(config, side, rows).map(Self::Lloyd),
            ValueKernelId::Bf16 => bf16::Bf16Values::new(side, rows).map(Self::Bf16),
            ValueKernelId::Nibbles => {
                let values = nibbles::NibbleValues::new(side, rows)?;
                Some(Self::Nibbles(Box::new(values)))
            }
            ValueKernelId::Uniform => {
                values::UniformValues::new(config, side, rows).map(Self::Uniform)
            }
        }
    }

    /// Its row in the table.
    #[cfg(test)]
    pub(super) fn kernel_id(&self) -> ValueKernelId {
        match self {
            Self::Fp8(_) => ValueKernelId::Fp8,
            Self::Vq(_) => ValueKernelId::Vq,
            Self::Bf16(_) => ValueKernelId::Bf16,
            Self::Nibbles(_) => ValueKernelId::Nibbles,
            Self::Uniform(_) => ValueKernelId::Uniform,
            Self::Grid(_) => ValueKernelId::Grid,
            Self::BitAlloc(_) => ValueKernelId::BitAlloc,
            Self::Lloyd(_) => ValueKernelId::Lloyd,
        }
    }

    /// Tiles that one call takes: many where they share work, few where bytes are many and the
    /// next ones are to be prefetched in between.
    pub(super) fn tiles_at_once(&self) -> usize {
        if matches!(self, Self::Fp8(_)) { 1 } else { SPAN / TILE }
    }

    /// Looks at the codes of values from now on, where that is wanted and spares a second look.
    pub(super) fn looking_at(
        mut self,
        wanted: bool,
        side: &HeadCodec,
        tiles: Option<&StreamTiles>,
    ) -> Self {
        if let (Self::Grid(values), Some(tiles), true) = (&mut self, tiles, wanted) {
            values.look_at_codes(side, tiles);
        }
        self
    }

    /// Magnitudes of the values in tiles, where they were looked at.
    pub(super) fn held_magnitudes(&self) -> Option<HeldMagnitudes> {
        if let Self::Grid(values) = self { values.held_magnitudes() } else { None }
    }

    /// The largest magnitude that weights rounded to words are multiplied with, so far; 0 where
    /// those are weights times the scale of their token: see [`ValueKernel::folded_loss`].
    pub(super) fn largest_value(&self) -> f32 {
        match self {
            Self::Vq(values) => values.largest_value(),
            Self::Uniform(values) => values.largest_value(),
            Self::Grid(values) => values.largest_value(),
            Self::BitAlloc(values) => values.largest_value(),
            Self::Fp8(_) | Self::Bf16(_) | Self::Nibbles(_) | Self::Lloyd(_) => 0.0,
        }
    }

    /// The largest bias of a code that sums carry until they are unfolded.
    pub(super) fn largest_bias(&self) -> f32 {
        if let Self::Grid(values) = self { values.largest_bias() } else { 0.0 }
    }

    /// The part that rounding took from all weights of a row together: equal weights round equally.
    /// Times [`ValueKernel::largest_value`] it is the largest error of a sum that comes of it.
    pub(super) fn joint_residual(&self, row: usize) -> f32 {
        match self {
            Self::Vq(values) => values.joint_residual(row),
            Self::Uniform(values) => values.joint_residual(row),
            Self::Grid(values) => values.joint_residual(row),
            Self::BitAlloc(values) => values.joint_residual(row),
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

    /// Adds a few full tiles, weighted, to `sums`.
    pub(super) fn add_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        buffer: &mut ScratchVec<u8>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        match self {
            Self::Fp8(values) => return values.add_tiles(simd, cursor, weights, sums),
            Self::BitAlloc(values) => return values.add_tiles(simd, cursor, weights),
            _ => {}
        }
        let bytes = wants_bytes(simd, weights.row_count()) && matches!(self, Self::Uniform(_));
        let codes = tile_codes(simd, cursor, CodeForm { side: Side::Value, bytes }, buffer);
        let tiles = cursor.span_tiles();
        match self {
            Self::Fp8(_) | Self::BitAlloc(_) => {}
            Self::Vq(values) => values.add_tiles(simd, codes, tiles, weights, sums),
            Self::Uniform(values) => values.add_tiles(simd, cursor, codes, weights, sums),
            Self::Bf16(values) => values.add_tiles(cursor, codes, weights, sums),
            Self::Nibbles(values) => values.add_tiles(cursor, codes, weights, sums),
            Self::Grid(values) => values.add_tiles(simd, codes, tiles, weights),
            Self::Lloyd(values) => values.add_tiles(simd, cursor, codes, weights),
        }
    }

    /// Adds an outlier of token `token` of the span, which tiles do not hold.
    pub(super) fn add_outlier(&mut self, rest: &OutlierRest, token: usize, weights: &SpanScores) {
        if let Self::Grid(values) = self {
            values.add_outlier(rest, token, weights);
        }
    }

    /// Scales row `row` of the sums; `sums` is that row.
    pub(super) fn scale_row(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        match self {
            Self::Grid(values) => values.scale_row(row, factor),
            Self::BitAlloc(values) => values.scale_row(row, factor),
            Self::Lloyd(values) => values.scale_row(row, factor),
            Self::Bf16(values) => values.scale_row(row, sums, factor),
            Self::Nibbles(values) => values.scale_row(row, sums, factor),
            Self::Uniform(values) => values.scale_row(row, sums, factor),
            Self::Vq(values) => values.scale_row(row, sums, factor),
            Self::Fp8(_) => sums.iter_mut().for_each(|sum| *sum *= factor),
        }
    }

    /// Adds row `index` of the sums to a row in the order of its channels; `sums` is that row as
    /// [`ValueKernel::add_tiles`] left it.
    pub(super) fn unfold_row(&self, index: usize, sums: &[f32], row: &mut [f32]) {
        match self {
            Self::Vq(values) => values.unfold_row(sums, row),
            Self::Fp8(_) => row.iter_mut().zip(sums).for_each(|(to, from)| *to += from),
            Self::Bf16(values) => values.unfold_row(index, sums, row),
            Self::Nibbles(values) => values.unfold_row(index, sums, row),
            Self::Uniform(values) => values.unfold_row(index, sums, row),
            Self::Grid(values) => values.unfold_row(index, row),
            Self::BitAlloc(values) => values.unfold_row(index, row),
            Self::Lloyd(values) => values.unfold_row(index, row),
        }
    }
}

/// The form in which a side's products want its codes.
#[derive(Clone, Copy)]
struct CodeForm {
    side: Side,
    /// Whether they want a byte for each code.
    bytes: bool,
}

/// The codes of a few tiles in one plane: as they lie, or else a byte each.
fn tile_codes<'a>(
    simd: Simd,
    cursor: &TileCursor<'a>,
    form: CodeForm,
    buffer: &'a mut ScratchVec<u8>,
) -> TileCodes<'a> {
    let TileCursor { page, in_page: first, count, prefetch, .. } = *cursor;
    let CodeForm { side, bytes } = form;
    let (layout, per_row, width) = (page.layout, page.layout.per_row(), page.layout.code_bits());
    // Groups of keys share bytes only if their number allows it.
    let whole = side == Side::Value || (per_row * width as usize).is_multiple_of(32);
    if width == 8 || width.is_power_of_two() && whole && !bytes {
        let bytes = layout.tile_bytes(first).start..layout.tile_bytes(first + count - 1).end;
        return TileCodes { bytes: &page.codes[bytes], width, per_row, prefetch };
    }
    let buffer = grow_buffer(buffer, count * TILE * per_row);
    for (tile, out) in (first..).zip(buffer.chunks_exact_mut(TILE * per_row)) {
        unpack_tile(simd, layout, &page.codes[layout.tile_bytes(tile)], out);
    }
    TileCodes { bytes: buffer, width: 8, per_row, prefetch }
}

per_level!(fn unpack_tile(layout: CodeLayout, codes: &[u8], out: &mut [u8]) = unpack_tile_body);

#[inline(always)]
fn unpack_tile_body(layout: CodeLayout, codes: &[u8], out: &mut [u8]) {
    layout.unpack_tile(codes, out);
}
