//! Row-major codes into the planes of tiles.
//!
//! Where the codes that share a byte are whole parts of a row (keys) or of a tile's tokens
//! (values), a row is squeezed to bytes first, neighbours by neighbours, and those are moved four
//! at a time. Any other tile is brought into order code by code.

use super::{CodeLayout, GROUP, TILE_TOKENS};
use crate::simd::dispatch_simd;
use kvd_core::Side;
use pulp::{Simd, WithSimd};

/// Appends the codes `symbols` (`[tokens, per_row]`), each below `2^bits`.
pub(crate) fn pack_codes(layout: &CodeLayout, symbols: &[u16], out: &mut Vec<u8>) {
    if layout.per_row > 0 && layout.bits > 0 {
        dispatch_simd(PackCodes { layout, symbols, out });
    }
}

struct PackCodes<'a> {
    layout: &'a CodeLayout,
    symbols: &'a [u16],
    out: &'a mut Vec<u8>,
}

impl WithSimd for PackCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { layout, symbols, out } = self;
        let per_row = layout.per_row;
        let mut lines = vec![0u8; GROUP * per_row];
        let mut elements = Vec::new();
        for rows in symbols.chunks(TILE_TOKENS * per_row) {
            let tokens = rows.len() / per_row;
            let start = out.len();
            out.resize(start + layout.bytes_for_rows(tokens), 0);
            let tile = &mut out[start..];
            // Codes along the summed axis: quads of them must not be parted.
            let mut ordered = false;
            let summed = if layout.side == Side::Key { per_row } else { tokens };
            for plane in layout.tile_planes(tokens) {
                let bytes = &mut tile[plane.bytes.clone()];
                let parts = 8 / plane.width as usize;
                if !summed.is_multiple_of(GROUP * parts) {
                    if !ordered {
                        elements.resize(rows.len(), 0);
                        gather_tile_codes(layout, rows, tokens, &mut elements);
                        ordered = true;
                    }
                    pack_elements(parts, &elements, plane.low, bytes);
                    continue;
                }
                let from = PlaneCodes { rows, per_row, low: plane.low };
                match (layout.side, parts) {
                    (Side::Key, 1) => pack_key_plane::<1>(from, &mut lines, bytes),
                    (Side::Key, 2) => pack_key_plane::<2>(from, &mut lines, bytes),
                    (Side::Key, 4) => pack_key_plane::<4>(from, &mut lines, bytes),
                    (Side::Key, _) => pack_key_plane::<8>(from, &mut lines, bytes),
                    (Side::Value, 1) => pack_value_plane::<1>(from, &mut lines, bytes),
                    (Side::Value, 2) => pack_value_plane::<2>(from, &mut lines, bytes),
                    (Side::Value, 4) => pack_value_plane::<4>(from, &mut lines, bytes),
                    (Side::Value, _) => pack_value_plane::<8>(from, &mut lines, bytes),
                }
            }
        }
    }
}

/// The codes of a tile, and the plane of them that is packed.
#[derive(Clone, Copy)]
struct PlaneCodes<'a> {
    rows: &'a [u16],
    per_row: usize,
    /// Lowest bit of a code that the plane holds.
    low: u32,
}

/// A plane of a tile of keys: a token's bytes, four at a time, to where that token's lie.
#[inline(always)]
fn pack_key_plane<const PARTS: usize>(from: PlaneCodes<'_>, lines: &mut [u8], bytes: &mut [u8]) {
    let PlaneCodes { rows, per_row, low } = from;
    let tokens = rows.len() / per_row;
    let line = &mut lines[..per_row / PARTS];
    let quads = bytes.as_chunks_mut::<GROUP>().0;
    for (token, row) in rows.chunks_exact(per_row).enumerate() {
        join_codes::<PARTS>(std::array::from_fn(|part| &row[part * line.len()..]), low, line);
        let mut at = token;
        for quad in line.as_chunks::<GROUP>().0 {
            quads[at] = *quad;
            at += tokens;
        }
    }
}

/// A plane of a tile of values: the bytes of four tokens, turned.
#[inline(always)]
fn pack_value_plane<const PARTS: usize>(from: PlaneCodes<'_>, lines: &mut [u8], bytes: &mut [u8]) {
    let PlaneCodes { rows, per_row, low } = from;
    let part_len = rows.len() / PARTS;
    let quads = bytes.as_chunks_mut::<GROUP>().0.chunks_exact_mut(per_row);
    for (group, quads) in quads.enumerate() {
        for (token, line) in lines.chunks_exact_mut(per_row).enumerate() {
            let start = (group * GROUP + token) * per_row;
            let parts = std::array::from_fn(|part| &rows[part * part_len + start..]);
            join_codes::<PARTS>(parts, low, line);
        }
        let (a, rest) = lines.split_at(per_row);
        let (b, rest) = rest.split_at(per_row);
        let (c, d) = rest.split_at(per_row);
        for ((((to, a), b), c), d) in quads.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *to = [*a, *b, *c, *d];
        }
    }
}

/// Bytes of the bits of `PARTS` codes each; a part begins at the start of its slice.
#[inline(always)]
fn join_codes<const PARTS: usize>(parts: [&[u16]; PARTS], low: u32, bytes: &mut [u8]) {
    let width = 8 / PARTS;
    let mask = ((1u32 << width) - 1) as u16;
    let parts = parts.map(|part| &part[..bytes.len()]);
    for (index, byte) in bytes.iter_mut().enumerate() {
        let mut bits = 0;
        for (part, codes) in parts.iter().enumerate() {
            bits |= (codes[index] >> low & mask) << (part * width);
        }
        *byte = bits as u8;
    }
}

/// Fills the bytes of a plane that has the bits of `parts` codes in each; they are zero.
#[inline(always)]
fn pack_elements(parts: usize, elements: &[u16], low: u32, bytes: &mut [u8]) {
    let width = 8 / parts;
    let mask = ((1u32 << width) - 1) as u16;
    for (part, elements) in elements.chunks(bytes.len()).enumerate() {
        for (byte, element) in bytes.iter_mut().zip(elements) {
            *byte |= ((element >> low & mask) << (part * width)) as u8;
        }
    }
}

/// Brings the codes of a tile into the order in which they lie.
#[inline(always)]
pub(super) fn gather_tile_codes(
    layout: &CodeLayout,
    rows: &[u16],
    tokens: usize,
    elements: &mut [u16],
) {
    let per_row = layout.per_row;
    match layout.side {
        Side::Key => {
            let whole = per_row / GROUP * tokens;
            let (groups, last) = elements.split_at_mut(whole * GROUP);
            let groups = groups.as_chunks_mut::<GROUP>().0;
            let left = per_row % GROUP;
            for (token, row) in rows.chunks_exact(per_row).enumerate() {
                let (row, rest) = row.as_chunks::<GROUP>();
                let places = groups.iter_mut().skip(token).step_by(tokens);
                for (group, codes) in places.zip(row) {
                    *group = *codes;
                }
                last[token * left..][..left].copy_from_slice(rest);
            }
        }
        Side::Value => {
            let (whole, rest) = rows.split_at(tokens / GROUP * GROUP * per_row);
            let (groups, last) = elements.split_at_mut(whole.len());
            let groups = groups.as_chunks_mut::<GROUP>().0.chunks_exact_mut(per_row);
            for (rows, group) in whole.chunks_exact(GROUP * per_row).zip(groups) {
                let (a, rows) = rows.split_at(per_row);
                let (b, rows) = rows.split_at(per_row);
                let (c, d) = rows.split_at(per_row);
                for ((((to, a), b), c), d) in group.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                    *to = [*a, *b, *c, *d];
                }
            }
            let left = tokens % GROUP;
            for (place, element) in last.iter_mut().enumerate() {
                *element = rest[place % left * per_row + place / left];
            }
        }
    }
}
