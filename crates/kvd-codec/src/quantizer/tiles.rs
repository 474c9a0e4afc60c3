//! Uniform pages of whole tiles, from rows to the bytes of their codes in one step.
//!
//! Codes whose width is one plane, in groups that are whole registers, need not be written down by
//! themselves and brought into order (`bits/pack.rs`): those of a byte are joined in a lane of 32
//! bits. Of values, a lane also has the bytes of four tokens, and is what the tile has.

use super::uniform::{ROUND, Uniform};
use crate::bits::{CodeLayout, TILE_TOKENS};
use crate::row_block::RowBlock;
use kvd_core::{Geometry, Side};
use pulp::Simd;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;
/// Neighbours along the summed axis.
const QUAD: usize = 4;

/// Rows, and what makes codes of them.
pub(super) struct TileEncoder<'a> {
    pub(super) by: &'a Uniform,
    pub(super) side: Side,
    /// `[tokens, dim]`.
    pub(super) rows: RowBlock<'a>,
    /// Minima of all groups.
    pub(super) minima: &'a [f32],
    /// Reciprocals of their steps.
    pub(super) inverse: &'a [f32],
}

/// The bytes of one tile.
struct TileBytes<'a> {
    /// Index of the tile in the page.
    tile: usize,
    bytes: &'a mut [u8],
}

/// A row and its scale row.
#[derive(Clone, Copy)]
struct ScaledRow<'a> {
    values: &'a [f32],
    minima: &'a [f32],
    inverse: &'a [f32],
    top: f32,
}

impl ScaledRow<'_> {
    /// Minimum and reciprocal of a step, of each channel of a register or of pair `at`.
    #[inline(always)]
    fn load_pair<S: Simd, const SINGLE: bool>(&self, simd: S, at: usize) -> (S::f32s, S::f32s) {
        if SINGLE {
            (load_register::<S>(self.minima, at), load_register::<S>(self.inverse, at))
        } else {
            (simd.splat_f32s(self.minima[at]), simd.splat_f32s(self.inverse[at]))
        }
    }

    /// The codes of a register of channels from `first` on.
    #[inline(always)]
    fn quantize_register<S: Simd>(
        &self,
        simd: S,
        first: usize,
        pair: (S::f32s, S::f32s),
    ) -> S::u32s {
        let values = load_register::<S>(self.values, first);
        let level = simd.mul_f32s(simd.sub_f32s(values, pair.0), pair.1);
        let level = simd.min_f32s(level, simd.splat_f32s(self.top));
        let bits = simd.transmute_u32s_f32s(simd.add_f32s(level, simd.splat_f32s(ROUND)));
        simd.and_u32s(bits, simd.splat_u32s(0xFF))
    }
}

#[inline(always)]
fn load_register<S: Simd>(values: &[f32], first: usize) -> S::f32s {
    S::as_simd_f32s(&values[first..][..S::F32_LANES]).0[0]
}

#[inline(always)]
fn shift_left<S: Simd>(simd: S, lanes: S::u32s, by: usize) -> S::u32s {
    simd.wrapping_dyn_shl_u32s(lanes, simd.splat_u32s(by as u32))
}

impl TileEncoder<'_> {
    /// Appends the codes; whether their layout is one that this is for.
    #[inline(always)]
    pub(super) fn append_tiles<S: Simd>(
        &self,
        simd: S,
        layout: &CodeLayout,
        out: &mut Vec<u8>,
    ) -> bool {
        let RowBlock { rows, dim } = self.rows;
        let (bits, tokens) = (layout.code_bits(), layout.tokens());
        let span = self.by.channels_per_pair(dim);
        let line = match (self.side, bits) {
            (Side::Key, 2 | 4 | 8) => dim * bits as usize / 8,
            _ => dim,
        };
        // Else positions do not come in quads that share bytes.
        let quads = match self.side {
            Side::Key => (dim * bits as usize).is_multiple_of(8 * QUAD),
            Side::Value => dim.is_multiple_of(QUAD),
        };
        let whole = matches!(bits, 2 | 4 | 8) && tokens.is_multiple_of(TILE_TOKENS) && quads;
        let registers = line.is_multiple_of(S::F32_LANES)
            && (span == 1 || span.is_multiple_of(S::F32_LANES) && dim.is_multiple_of(span));
        if cfg!(target_endian = "big") || !whole || !registers {
            return false;
        }
        let start = out.len();
        out.resize(start + rows.len() * bits as usize / 8, 0);
        let tiles = out[start..].chunks_exact_mut(TILE_TOKENS * dim * bits as usize / 8);
        match (span == 1, bits) {
            (true, 2) => self.encode_tiles::<S, 4, true>(simd, tiles),
            (true, 4) => self.encode_tiles::<S, 2, true>(simd, tiles),
            (true, _) => self.encode_tiles::<S, 1, true>(simd, tiles),
            (false, 2) => self.encode_tiles::<S, 4, false>(simd, tiles),
            (false, 4) => self.encode_tiles::<S, 2, false>(simd, tiles),
            (false, _) => self.encode_tiles::<S, 1, false>(simd, tiles),
        }
        true
    }

    /// All tiles; a byte has `PARTS` codes, and a pair is of one channel or of more.
    #[inline(always)]
    fn encode_tiles<'a, S: Simd, const PARTS: usize, const SINGLE: bool>(
        &self,
        simd: S,
        tiles: impl Iterator<Item = &'a mut [u8]>,
    ) {
        let mut lanes = [0; DIM_MAX];
        for (tile, bytes) in tiles.enumerate() {
            match self.side {
                Side::Key => self.encode_key_tile::<S, PARTS, SINGLE>(
                    simd,
                    TileBytes { tile, bytes },
                    &mut lanes,
                ),
                Side::Value => self.encode_value_tile::<S, PARTS, SINGLE>(
                    simd,
                    TileBytes { tile, bytes },
                    &mut lanes,
                ),
            }
        }
    }

    #[inline(always)]
    fn scaled_row(&self, token: usize) -> ScaledRow<'_> {
        let RowBlock { rows, dim } = self.rows;
        let pairs = self.by.row_pairs(dim);
        let first = self.by.scale_row(token) * pairs;
        ScaledRow {
            values: &rows[token * dim..][..dim],
            minima: &self.minima[first..][..pairs],
            inverse: &self.inverse[first..][..pairs],
            top: f32::from(self.by.top),
        }
    }

    /// A tile of keys: a token's bytes, four at a time, to where that token's lie.
    #[inline(always)]
    fn encode_key_tile<S: Simd, const PARTS: usize, const SINGLE: bool>(
        &self,
        simd: S,
        to: TileBytes<'_>,
        lanes: &mut [u32],
    ) {
        let TileBytes { tile, bytes } = to;
        let span = self.by.channels_per_pair(self.rows.dim);
        let line = self.rows.dim / PARTS;
        let lanes = &mut lanes[..line];
        let quads = bytes.as_chunks_mut::<QUAD>().0;
        for token in 0..TILE_TOKENS {
            let row = self.scaled_row(tile * TILE_TOKENS + token);
            for (index, to) in S::as_mut_simd_u32s(lanes).0.iter_mut().enumerate() {
                let mut joined = simd.splat_u32s(0);
                for part in 0..PARTS {
                    let first = part * line + index * S::F32_LANES;
                    let pair =
                        row.load_pair::<S, SINGLE>(simd, if SINGLE { first } else { first / span });
                    let codes = row.quantize_register(simd, first, pair);
                    joined = simd.or_u32s(joined, shift_left(simd, codes, part * 8 / PARTS));
                }
                *to = joined;
            }
            let places = quads[token..].iter_mut().step_by(TILE_TOKENS);
            for (to, lanes) in places.zip(lanes.as_chunks::<QUAD>().0) {
                *to = lanes.map(|lane| lane as u8);
            }
        }
    }

    /// A tile of values: a lane is a byte of four tokens each.
    #[inline(always)]
    fn encode_value_tile<S: Simd, const PARTS: usize, const SINGLE: bool>(
        &self,
        simd: S,
        to: TileBytes<'_>,
        lanes: &mut [u32],
    ) {
        let TileBytes { tile, bytes } = to;
        let dim = self.rows.dim;
        // Registers that share a pair.
        let run = if SINGLE { 1 } else { self.by.channels_per_pair(dim) / S::F32_LANES };
        let lanes = &mut lanes[..dim];
        for (group, bytes) in bytes.chunks_exact_mut(QUAD * dim).enumerate() {
            for part in 0..PARTS {
                let token = tile * TILE_TOKENS + part * TILE_TOKENS / PARTS + group * QUAD;
                let (a, b) = (self.scaled_row(token), self.scaled_row(token + 1));
                let (c, d) = (self.scaled_row(token + 2), self.scaled_row(token + 3));
                let mut first = 0;
                let runs = S::as_mut_simd_u32s(lanes).0.chunks_exact_mut(run.max(1));
                for (index, lanes) in runs.enumerate() {
                    let at = if SINGLE { first } else { index };
                    let of_a = a.load_pair::<S, SINGLE>(simd, at);
                    let of_b = b.load_pair::<S, SINGLE>(simd, at);
                    let of_c = c.load_pair::<S, SINGLE>(simd, at);
                    let of_d = d.load_pair::<S, SINGLE>(simd, at);
                    for to in lanes {
                        let low = a.quantize_register(simd, first, of_a);
                        let joined = simd.or_u32s(
                            low,
                            shift_left(simd, b.quantize_register(simd, first, of_b), 8),
                        );
                        let high = shift_left(simd, d.quantize_register(simd, first, of_d), 8);
                        let high = simd.or_u32s(c.quantize_register(simd, first, of_c), high);
                        let joined = simd.or_u32s(joined, shift_left(simd, high, 16));
                        let joined = shift_left(simd, joined, part * 8 / PARTS);
                        *to = if part == 0 { joined } else { simd.or_u32s(*to, joined) };
                        first += S::F32_LANES;
                    }
                }
            }
            bytes.copy_from_slice(bytemuck::cast_slice(lanes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::codes::append_codes;
    use super::*;
    use crate::bits;
    use crate::simd::each_width;
    use crate::{GroupAxis, UniformStep};

    /// A page both ways; the second by codes that are packed.
    fn pages(by: &Uniform, (rows, dim): (&[f32], usize), side: Side) -> [Vec<u8>; 2] {
        let absmax = rows.iter().fold(0f32, |most, x| most.max(x.abs()));
        let layout = CodeLayout::new(side, rows.len() / dim, dim, by.code_bits());
        let [mut page, mut want] = [vec![7], vec![7]];
        let mut symbols = Vec::new();
        by.append_page(
            absmax,
            RowBlock { rows, dim },
            super::super::uniform::TileLayout { layout: &layout, side },
            &mut symbols,
            &mut page,
        )
        .unwrap();
        symbols.clear();
        append_codes(by, RowBlock { rows, dim }, &mut symbols, &mut want).unwrap();
        bits::pack_codes(&layout, &symbols, &mut want);
        [page, want]
    }

    #[test]
    fn tiles_have_the_bytes_of_codes_that_are_packed() {
        let axes = [
            (GroupAxis::Channel, Some(32)),
            (GroupAxis::Channel, Some(8)),
            (GroupAxis::Channel, None),
            (GroupAxis::Token, Some(32)),
            (GroupAxis::Token, Some(8)),
            (GroupAxis::Token, None),
            (GroupAxis::Block, None),
        ];
        let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 97.0 * (i % 13) as f32;
        for (axis, group) in axes {
            for bits in [1, 2, 3, 4, 8] {
                let by = Uniform::new(UniformStep::Bits(bits), axis, group, (1 << bits) - 1);
                let whole = [(64, 128), (32, 64), (45, 64), (32, 80)];
                // Some of these head sizes fill registers, others leave a rest.
                let others = [6, 18, 34, 66, 130, 36].map(|dim| (64, dim));
                for (tokens, dim) in whole.into_iter().chain(others) {
                    let rows: Vec<f32> = (0..tokens * dim).map(value).collect();
                    for side in Side::BOTH {
                        let [page, want] = each_width(|| pages(&by, (&rows, dim), side));
                        assert_eq!(page, want, "{by:?}, {side:?}, {tokens} tokens of {dim}");
                    }
                }
            }
        }
    }
}
