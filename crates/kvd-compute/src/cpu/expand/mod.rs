//! Codes to bytes of values, for tables that do not fit the registers of an instruction set: a
//! code becomes one byte per channel, in a plane per channel, and planes lie like positions do.
//! Products then take bytes as they are. AMX takes nothing else: what fits registers is looked up
//! there, many codes at a time.

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use crate::cpu::int_dot::{CodeLookup, TileCodes};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::TILE;
use kvd_core::Side;

/// Entries of a codebook as bytes.
pub(crate) struct CodeExpander {
    dims: usize,
    /// Per channel, each code's byte.
    pub(super) tables: Vec<[u8; 256]>,
    /// Bits of a code.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for AVX-512"))]
    pub(super) bits: u32,
    /// Four channels of each code as one number, where there are four.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for AVX2"))]
    fours: Vec<u32>,
    bytes: Vec<u8>,
}

impl CodeExpander {
    /// Takes a table per channel.
    pub(crate) fn new(lookup: &CodeLookup) -> Self {
        let (tables, bits) = (&lookup.tables[..], lookup.bits);
        let four =
            |code: usize| u32::from_le_bytes(std::array::from_fn(|channel| tables[channel][code]));
        let fours = if tables.len() == 4 { (0..256).map(four).collect() } else { Vec::new() };
        Self { dims: tables.len(), tables: tables.to_vec(), bits, fours, bytes: Vec::new() }
    }

    /// Takes codes of tiles, a group at a time: a tile of keys, four tokens of values. The bytes
    /// of a group's first channel come before those of its second.
    pub(crate) fn expand_codes(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        side: Side,
        buffer: &mut Vec<u8>,
    ) -> &[u8] {
        #[cfg(target_arch = "x86_64")]
        if simd.has_amx() {
            let (from, to) = (codes.tile_bytes(), TILE * codes.per_row * self.dims);
            let tiles = codes.bytes.chunks_exact(from);
            let len = tiles.len() * to;
            if self.bytes.len() < len {
                self.bytes.resize(len, 0);
            }
            let mut out = std::mem::take(&mut self.bytes);
            for (bytes, out) in tiles.zip(out.chunks_exact_mut(to)) {
                x86::expand_tile(simd, self, TileCodes { bytes, ..codes }, side, out);
            }
            self.bytes = out;
            return &self.bytes[..len];
        }
        let group = match side {
            Side::Key => TILE * codes.per_row,
            Side::Value => 4 * codes.per_row,
        };
        self.expand_bytes(simd, codes.as_bytes(buffer), group)
    }

    /// Takes codes of a byte each.
    fn expand_bytes(&mut self, simd: Simd, codes: &[u8], group: usize) -> &[u8] {
        let len = codes.len() * self.dims;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        let out = &mut self.bytes[..len];
        #[cfg(target_arch = "aarch64")]
        if simd.vector_set() != InstructionSet::Portable && group.is_multiple_of(neon::STEP) {
            neon::expand_codes(codes, group, &self.tables, out);
            return out;
        }
        for (codes, out) in codes.chunks_exact(group).zip(out.chunks_exact_mut(group * self.dims)) {
            #[cfg(target_arch = "x86_64")]
            if simd.vector_set() == InstructionSet::Avx2
                && self.dims == 4
                && group.is_multiple_of(16)
            {
                x86::expand_fours(simd, codes, &self.fours, out);
                continue;
            }
            for (out, table) in out.chunks_exact_mut(group).zip(&self.tables) {
                for (out, code) in out.iter_mut().zip(codes) {
                    *out = table[usize::from(*code)];
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::prefetch::PrefetchBytes;

    #[test]
    fn every_level_expands_alike() {
        let noise: Vec<u8> =
            (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
        for (dims, bits) in [(1, 4), (2, 4), (4, 8), (2, 6), (8, 8), (3, 2), (2, 1)] {
            let byte = |code: usize, d: usize| (code % (1 << bits) * 7 + d * 31) as u8;
            let table = |d: usize| std::array::from_fn(|code| byte(code, d));
            let tables: Vec<[u8; 256]> = (0..dims).map(table).collect();
            let lookup = CodeLookup::of_tables(bits, tables.clone());
            let width = if bits <= 4 { bits } else { 8 };
            let shapes = [4, 8, 20, 64].into_iter().flat_map(|n| Side::BOTH.map(|s| (n, s)));
            for (per_row, side) in shapes {
                let whole = (per_row * width as usize).is_multiple_of(32) || side == Side::Value;
                let bytes = &noise[..8 * per_row * width as usize];
                let bytes: Vec<u8> =
                    bytes.iter().map(|b| if bits == 6 { b & 63 } else { *b }).collect();
                let codes =
                    TileCodes { bytes: &bytes, width, per_row, prefetch: PrefetchBytes::default() };
                let (mut buffer, mut other) = (Vec::new(), Vec::new());
                let plain = codes.as_bytes(&mut buffer);
                let group = if side == Side::Key { TILE * per_row } else { 4 * per_row };
                for simd in Simd::available_levels().into_iter().filter(|_| whole) {
                    let mut expand = CodeExpander::new(&lookup);
                    let bytes = expand.expand_codes(simd, codes, side, &mut other);
                    assert_eq!(bytes.len(), plain.len() * dims);
                    for (index, byte) in bytes.iter().enumerate() {
                        let (at, rest) = (index / (group * dims), index % (group * dims));
                        let (channel, place) = (rest / group, rest % group);
                        let want = tables[channel][usize::from(plain[at * group + place])];
                        assert_eq!(*byte, want, "{simd:?} {dims} {bits} {per_row} {side}");
                    }
                }
            }
        }
    }
}
