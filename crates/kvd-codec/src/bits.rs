//! Where fixed-width codes lie in a page: tiles of tokens, cut into bit planes whose bytes an
//! attention kernel uses as they come.
//!
//! Attention over keys sums products over the positions of a row, attention over values over
//! tokens. Inside a tile, four codes that follow one another along the *summed* axis are
//! neighbours, and such groups lie side by side along the other axis, which becomes the lanes of
//! a register: a byte dot product of four (`vpdpbusd`, `sdot`) then needs no shuffle, and nothing
//! is added across lanes. A code of `b` bits is split into planes of 8, 4, 2 and 1 bits, largest
//! first, the plane of the low bits first; a plane of `w` bits and `n` codes takes
//! `s = ceil(n·w/8)` bytes and puts code `e` into bits `w·(e / s)..` of byte `e % s`: neighbours
//! stay neighbours, and one mask or shift brings a whole register of them out.

mod pack;

pub(crate) use pack::pack_codes;

use kvd_core::Side;
use std::ops::Range;

/// Tokens of a tile; the last tile of a page may have fewer.
pub(crate) const TILE_TOKENS: usize = 32;

/// Codes along the summed axis that lie side by side.
const GROUP: usize = 4;

/// Where the fixed-width codes of one page lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeLayout {
    side: Side,
    tokens: usize,
    per_row: usize,
    bits: u32,
}

/// A plane of a tile: which bits of a code it holds, and where.
struct BitPlane {
    /// Lowest bit of the code.
    low: u32,
    width: u32,
    bytes: Range<usize>,
}

impl CodeLayout {
    /// Tokens of a full tile.
    pub const TILE_TOKENS: usize = TILE_TOKENS;

    /// The layout of `tokens` rows of `per_row` codes of `bits` bits, at most 16.
    #[must_use]
    pub fn new(side: Side, tokens: usize, per_row: usize, bits: u32) -> Self {
        debug_assert!(bits <= 16, "{bits} bits per code");
        Self { side, tokens, per_row, bits }
    }

    /// Bits of a code.
    #[must_use]
    pub fn code_bits(&self) -> u32 {
        self.bits
    }

    /// Rows of the page.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Codes of a row.
    #[must_use]
    pub fn per_row(&self) -> usize {
        self.per_row
    }

    /// Bytes of all codes of the page.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let full = self.tokens / TILE_TOKENS;
        full * self.bytes_for_rows(TILE_TOKENS) + self.bytes_for_rows(self.tokens % TILE_TOKENS)
    }

    /// Bytes of the codes of tile `tile`, which need not be full.
    #[must_use]
    pub fn tile_bytes(&self, tile: usize) -> Range<usize> {
        let start = tile * self.bytes_for_rows(TILE_TOKENS);
        start..start + self.bytes_for_rows(self.tile_tokens(tile))
    }

    /// Tokens of tile `tile`.
    #[must_use]
    pub fn tile_tokens(&self, tile: usize) -> usize {
        self.tokens.saturating_sub(tile * TILE_TOKENS).min(TILE_TOKENS)
    }

    fn bytes_for_rows(&self, tokens: usize) -> usize {
        // Planes of whole bytes, asked for with every page that is opened.
        if tokens.is_multiple_of(8) {
            return tokens / 8 * self.per_row * self.bits as usize;
        }
        self.tile_planes(tokens).map(|plane| plane.bytes.len()).sum()
    }

    /// The planes of a tile of `tokens` tokens.
    fn tile_planes(&self, tokens: usize) -> impl Iterator<Item = BitPlane> + use<> {
        let (codes, mut low, mut start) = (tokens * self.per_row, 0, 0);
        let bits = self.bits;
        // Two planes of eight bits at most, then one of each smaller width that `bits` has.
        let widths = [8, 8, 4, 2, 1];
        widths.into_iter().filter_map(move |width: u32| {
            let left = bits - low;
            if left < width {
                return None;
            }
            let end = start + (codes * width as usize).div_ceil(8);
            let plane = BitPlane { low, width, bytes: start..end };
            (low, start) = (low + width, end);
            Some(plane)
        })
    }

    /// Place of position `position` of row `row` among the codes of its tile.
    fn code_index(&self, tokens: usize, row: usize, position: usize) -> usize {
        let (summed, lane, summed_len, lanes) = match self.side {
            Side::Key => (position, row, self.per_row, tokens),
            Side::Value => (row, position, tokens, self.per_row),
        };
        let first = summed / GROUP * GROUP;
        // The last group has the rest.
        let width = GROUP.min(summed_len - first);
        first * lanes + lane * width + (summed - first)
    }
}

impl CodeLayout {
    /// Writes the codes of a full tile, in the order in which they lie, as one byte each; `codes`
    /// are the tile's bytes, `out` has `32 * per_row` bytes. Inlined, so that it is compiled for
    /// the caller's instruction set.
    ///
    /// # Panics
    /// When codes have more than 8 bits or a length is not the layout's.
    #[inline(always)]
    pub fn unpack_tile(&self, codes: &[u8], out: &mut [u8]) {
        assert!(self.bits <= 8, "unpack_tile: {} bits", self.bits);
        assert_eq!(out.len(), TILE_TOKENS * self.per_row, "unpack_tile: output length");
        let mut start = 0;
        let mut low = 0;
        for width in [8u32, 4, 2, 1] {
            if self.bits & width == 0 {
                continue;
            }
            let bytes = &codes[start..start + out.len() * width as usize / 8];
            start += bytes.len();
            match width {
                8 => out.copy_from_slice(bytes),
                4 => unpack_plane::<4>(bytes, low, out),
                2 => unpack_plane::<2>(bytes, low, out),
                _ => unpack_plane::<1>(bytes, low, out),
            }
            low += width;
        }
    }
}

/// Brings a plane's bits to their place in each code; the first plane of a tile overwrites.
#[inline(always)]
fn unpack_plane<const WIDTH: u32>(bytes: &[u8], low: u32, out: &mut [u8]) {
    let mut parts = out.chunks_exact_mut(bytes.len());
    // Shifts that the compiler knows: bytes have no shift by a variable.
    for shift in [0, 1, 2, 3, 4, 5, 6, 7] {
        if shift % WIDTH != 0 {
            continue;
        }
        let Some(part) = parts.next() else { return };
        let mask = ((1u32 << WIDTH) - 1) as u8;
        match (low, shift) {
            (0, 0) => unpack_shifted::<0>(bytes, mask, part),
            (0, 1) => unpack_shifted::<1>(bytes, mask, part),
            (0, 2) => unpack_shifted::<2>(bytes, mask, part),
            (0, 3) => unpack_shifted::<3>(bytes, mask, part),
            (0, 4) => unpack_shifted::<4>(bytes, mask, part),
            (0, 5) => unpack_shifted::<5>(bytes, mask, part),
            (0, 6) => unpack_shifted::<6>(bytes, mask, part),
            (0, _) => unpack_shifted::<7>(bytes, mask, part),
            _ => part.iter_mut().zip(bytes).for_each(|(out, byte)| {
                *out |= (byte >> shift & mask) << low;
            }),
        }
    }
}

#[inline(always)]
fn unpack_shifted<const SHIFT: u32>(bytes: &[u8], mask: u8, out: &mut [u8]) {
    for (out, byte) in out.iter_mut().zip(bytes) {
        *out = byte >> SHIFT & mask;
    }
}

/// Reads the codes of row `row` of the page; any bytes of the layout's length give codes.
pub(crate) fn unpack_row(layout: &CodeLayout, codes: &[u8], row: usize, symbols: &mut [u16]) {
    let (tile, row) = (row / TILE_TOKENS, row % TILE_TOKENS);
    let (codes, tokens) = (&codes[layout.tile_bytes(tile)], layout.tile_tokens(tile));
    symbols.fill(0);
    for plane in layout.tile_planes(tokens) {
        let mask = (1u16 << plane.width) - 1;
        let bytes = &codes[plane.bytes];
        // Places grow along a row, so the byte and shift of one follow from those of the last.
        let (mut start, mut shift) = (0, 0);
        for (position, symbol) in symbols.iter_mut().enumerate() {
            let element = layout.code_index(tokens, row, position);
            while element - start >= bytes.len() {
                start += bytes.len();
                shift += plane.width;
            }
            *symbol |= (u16::from(bytes[element - start] >> shift) & mask) << plane.low;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::pack::gather_tile_codes;
    use super::*;

    fn codes(count: usize, bits: u32) -> Vec<u16> {
        let mask = (1u32 << bits) - 1;
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761) >> 11) & mask) as u16).collect()
    }

    #[test]
    fn every_width_and_shape_round_trips() {
        for side in Side::BOTH {
            for bits in 1..=16u32 {
                for per_row in [1usize, 5, 7, 32, 33] {
                    for tokens in [1usize, 3, 4, 31, 32, 33, 64, 75] {
                        let layout = CodeLayout::new(side, tokens, per_row, bits);
                        let symbols = codes(tokens * per_row, bits);
                        let mut bytes = vec![0xEE];
                        pack_codes(&layout, &symbols, &mut bytes);
                        assert_eq!(bytes.len() - 1, layout.size_bytes());
                        let mut back = vec![9; per_row];
                        for (row, wanted) in symbols.chunks(per_row).enumerate() {
                            unpack_row(&layout, &bytes[1..], row, &mut back);
                            assert_eq!(back, wanted, "{side} {bits} bits, {tokens} x {per_row}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn full_tiles_waste_no_bit_and_others_less_than_a_byte_per_plane() {
        for bits in 1..=16u32 {
            for per_row in [3usize, 64, 80] {
                let size = |tokens| CodeLayout::new(Side::Key, tokens, per_row, bits).size_bytes();
                assert_eq!(size(64) * 8, 64 * per_row * bits as usize);
                let planes = CodeLayout::new(Side::Key, 1, per_row, bits).tile_planes(1).count();
                assert!(size(9) < (9 * per_row * bits as usize).div_ceil(8) + planes);
            }
        }
    }

    #[test]
    fn unpacked_tile_is_the_codes_in_their_order() {
        for side in Side::BOTH {
            for bits in 1..=8u32 {
                let layout = CodeLayout::new(side, 70, 12, bits);
                let symbols = codes(70 * 12, bits);
                let mut bytes = Vec::new();
                pack_codes(&layout, &symbols, &mut bytes);
                let mut out = vec![0xEE; 32 * 12];
                layout.unpack_tile(&bytes[layout.tile_bytes(1)], &mut out);
                let mut wanted = vec![0; 32 * 12];
                gather_tile_codes(&layout, &symbols[32 * 12..64 * 12], 32, &mut wanted);
                let out: Vec<u16> = out.into_iter().map(u16::from).collect();
                assert_eq!(out, wanted, "{side} {bits} bits");
            }
        }
    }

    #[test]
    fn four_summed_codes_are_neighbours() {
        // Keys: positions of a token; values: tokens of a position. Nibbles: the second half of a
        // plane's codes lies in the high halves of its bytes.
        let symbols = codes(32 * 16, 4);
        for (side, at) in [(Side::Key, [0, 1, 2, 3]), (Side::Value, [0, 16, 32, 48])] {
            let mut bytes = Vec::new();
            pack_codes(&CodeLayout::new(side, 32, 16, 4), &symbols, &mut bytes);
            assert_eq!(bytes.len(), 256);
            let low: Vec<u16> = bytes[..4].iter().map(|byte| u16::from(byte & 15)).collect();
            assert_eq!(low, at.map(|at| symbols[at]), "{side}");
            let half = if side == Side::Key { 8 } else { 16 * 16 };
            assert_eq!(u16::from(bytes[0] >> 4), symbols[half], "{side}");
        }
    }
}
