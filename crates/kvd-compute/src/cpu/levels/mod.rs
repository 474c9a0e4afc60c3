//! Codes to the bytes of their levels, laid where products take them: what a register holds as a
//! table is looked up there, and levels that no byte holds become two.

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use crate::cpu::int_dot::{BIAS, CodeLookup, repeat_entries};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::TILE;
use kvd_codec::level_unit;
use kvd_core::Side;

/// Bytes of a level of keys that no single byte holds: steps of about `2^-15` of the largest, which
/// cost a score less than queries of f16 do.
const KEY_BYTES: usize = 2;
/// Bytes of such a level of values: they are as exact as f32, since values may cancel where weights
/// are equal, and a transform adds up what all channels lose alike.
const VALUE_BYTES: usize = 3;

/// A byte, plus [`BIAS`], for each code; repeated to fill.
#[derive(Clone, Debug)]
pub(crate) struct LevelTable {
    pub(super) bits: u32,
    pub(super) bytes: [u8; 256],
}

/// Levels as bytes: their sum, each times its factor, is the level.
#[derive(Clone, Debug)]
pub(crate) struct LevelBytes {
    pub(crate) tables: Vec<(LevelTable, f32)>,
}

impl LevelBytes {
    /// Takes `2^bits` finite levels. Those that are whole numbers of a unit up to 127, as fits make
    /// them, are one byte and exact; others are several.
    pub(crate) fn new(levels: &[f32], side: Side) -> Self {
        let Some(unit) = level_unit(levels) else {
            return match side {
                Side::Key => Self::on_bytes(levels, KEY_BYTES),
                Side::Value => Self::on_bytes(levels, VALUE_BYTES),
            };
        };
        let table = LevelTable::new(levels, |level| (level / unit).round() as i32);
        Self { tables: vec![(table, unit)] }
    }

    /// Takes `2^bits` finite levels of keys to two bytes.
    pub(crate) fn on_two_bytes(levels: &[f32]) -> Self {
        Self::on_bytes(levels, KEY_BYTES)
    }

    /// Takes `2^bits` finite levels to whole numbers of that many bytes. The smallest is exact: it
    /// stands for what is near 0, and behind a transform most coefficients of a token may be that.
    fn on_bytes(levels: &[f32], count: usize) -> Self {
        let sizes = levels.iter().map(|level| level.abs());
        let largest = sizes.clone().fold(0f32, f32::max);
        let smallest = sizes.filter(|size| *size > 0.0).fold(largest, f32::min);
        // All bytes are 127.
        let top = (0..count).fold(0, |top, _| 256 * top + i32::from(i8::MAX)) as f32;
        let steps = (smallest / (largest / top)).floor();
        let unit = if steps >= 1.0 { smallest / steps } else { largest / top };
        // What is smaller than this is nothing beside any query or weight.
        let whole = |level: f32| {
            // The quotient of the largest may be rounded up.
            let whole = (level / unit).round().clamp(-top, top);
            if largest > 1e-30 { whole as i32 } else { 0 }
        };
        let table = |byte: usize| {
            let table = LevelTable::new(levels, |level| signed_digit(whole(level), byte));
            (table, 256f32.powi(byte as i32) * unit)
        };
        Self { tables: (0..count).rev().map(table).collect() }
    }

    /// With tables of zeros, up to so many.
    pub(crate) fn padded_to(mut self, count: usize) -> Self {
        let Some((LevelTable { bits, .. }, _)) = self.tables.first() else { return self };
        let zeros = LevelTable { bits: *bits, bytes: [BIAS as u8; 256] };
        self.tables.resize(self.tables.len().max(count), (zeros, 0.0));
        self
    }

    /// The bytes as channels of a code.
    pub(crate) fn to_lookup(&self) -> CodeLookup {
        let bits = self.tables[0].0.bits;
        CodeLookup::of_tables(bits, self.tables.iter().map(|(table, _)| table.bytes).collect())
    }
}

/// The byte at `place` of a number whose bytes all have signs.
fn signed_digit(whole: i32, place: usize) -> i32 {
    let above = |whole: i32| (whole + 128) >> 8;
    let rest = (0..place).fold(whole, |rest, _| above(rest));
    rest - 256 * above(rest)
}

impl LevelTable {
    fn new(levels: &[f32], byte: impl Fn(f32) -> i32) -> Self {
        let mut bytes = [0; 256];
        for (to, level) in bytes.iter_mut().zip(levels) {
            *to = (byte(*level) + BIAS) as u8;
        }
        repeat_entries(&mut bytes, levels.len());
        Self { bits: levels.len().ilog2(), bytes }
    }
}

/// Codes of a run in some tiles, as they lie: of each tile, planes of 8, 4, 2 and 1 bits.
#[derive(Clone, Copy)]
pub(crate) struct RunCodes<'a> {
    pub(crate) bytes: &'a [u8],
    /// Bits of a code, 1 to 8.
    pub(crate) width: u32,
    /// Codes of a token.
    pub(crate) len: usize,
}

/// Chunks of codes in a tile: as many bytes of a plane of one bit.
pub(crate) const CHUNKS: usize = 8;

/// Bytes that may be written behind a chunk, where they are free: what fills a register.
pub(crate) const SPILL: usize = 64;

/// Where the bytes of codes go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputLayout {
    /// The first one.
    pub(crate) first: usize,
    /// From a chunk to the next, and from a tile to the next.
    pub(crate) chunk: usize,
    pub(crate) tile: usize,
    /// Whether up to [`SPILL`] bytes behind each chunk are yet to be written: chunks and tiles go
    /// up, so those of the next chunk may be, or what a later call fills.
    pub(crate) free: bool,
}

/// A plane of a tile.
#[derive(Clone, Copy, Default)]
pub(super) struct BitPlane<'a> {
    bytes: &'a [u8],
    /// Bits of it: a power of two, 0 for no plane; and where they belong in a code.
    pub(super) width: u32,
    pub(super) low: u32,
}

/// The part of a plane that holds its bits of a chunk of codes.
#[derive(Clone, Copy)]
pub(super) struct PlanePart<'a> {
    pub(super) bytes: &'a [u8],
    /// Where those bits are in its bytes.
    pub(super) shift: u32,
}

impl<'a> RunCodes<'a> {
    /// Codes of a chunk.
    pub(super) fn chunk_codes(&self) -> usize {
        TILE / CHUNKS * self.len
    }

    /// Bytes of a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        self.chunk_codes() * self.width as usize
    }

    /// The planes of one tile, the one of the low bits first.
    pub(super) fn tile_planes(&self) -> [BitPlane<'a>; 3] {
        let (mut planes, mut count, mut low) = ([BitPlane::default(); 3], 0, 0);
        for width in [8u32, 4, 2, 1].into_iter().filter(|width| self.width & width != 0) {
            let bytes =
                low as usize * self.chunk_codes()..(low + width) as usize * self.chunk_codes();
            planes[count] = BitPlane { bytes: &self.bytes[bytes], width, low };
            (count, low) = (count + 1, low + width);
        }
        planes
    }
}

impl<'a> BitPlane<'a> {
    /// Its part for chunk `index` of `chunk` codes.
    #[inline]
    pub(super) fn chunk_part(&self, index: usize, chunk: usize) -> PlanePart<'a> {
        let start = (index & (self.width as usize - 1)) * chunk;
        let shift = (index as u32 >> self.width.trailing_zeros()) * self.width;
        PlanePart { bytes: &self.bytes[start..start + chunk], shift }
    }
}

/// Writes the byte of each code to its place in `out`, a chunk of them side by side.
#[inline]
pub(crate) fn look_up(
    simd: Simd,
    codes: RunCodes<'_>,
    table: &LevelTable,
    to: OutputLayout,
    out: &mut [u8],
) {
    let (chunk, tile_bytes) = (codes.chunk_codes(), codes.tile_bytes());
    assert!((1..=8).contains(&codes.width) && chunk > 0, "look_up: width");
    assert!(codes.bytes.len().is_multiple_of(tile_bytes), "look_up: tiles");
    let tiles = codes.bytes.len() / tile_bytes;
    let last = to.first + tiles.saturating_sub(1) * to.tile + (CHUNKS - 1) * to.chunk + chunk;
    assert!(out.len() >= last + if to.free { SPILL } else { 0 }, "look_up: output");
    #[cfg(target_arch = "x86_64")]
    if matches!(simd.vector_set(), InstructionSet::Avx512 | InstructionSet::Amx) {
        return x86::look_up_512(codes, table, to, out);
    }
    for (tile, bytes) in codes.bytes.chunks_exact(tile_bytes).enumerate() {
        let (codes, out) = (RunCodes { bytes, ..codes }, &mut out[to.first + tile * to.tile..]);
        look_up_tile(simd, codes, table, to.chunk, out);
    }
}

/// Writes the bytes of one tile, chunks `stride` apart.
fn look_up_tile(
    simd: Simd,
    codes: RunCodes<'_>,
    table: &LevelTable,
    stride: usize,
    out: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() != InstructionSet::Portable {
        return x86::look_up_256(codes, table, stride, out);
    }
    #[cfg(target_arch = "aarch64")]
    if simd.vector_set() != InstructionSet::Portable {
        return neon::look_up(codes, table, stride, out);
    }
    let (chunk, planes) = (codes.chunk_codes(), codes.tile_planes());
    for index in 0..CHUNKS {
        for (at, out) in out[index * stride..][..chunk].iter_mut().enumerate() {
            *out = table.bytes[usize::from(code_at(&planes, index, chunk, at))];
        }
    }
}

/// Code `at` of chunk `index` of `chunk` codes.
pub(super) fn code_at(planes: &[BitPlane<'_>; 3], index: usize, chunk: usize, at: usize) -> u8 {
    let bits = |plane: &BitPlane<'_>| {
        let part = plane.chunk_part(index, chunk);
        (part.bytes[at] >> part.shift & u8::MAX >> (8 - plane.width)) << plane.low
    };
    planes.iter().filter(|plane| plane.width > 0).map(bits).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::CodeLayout;

    #[test]
    fn every_level_of_instructions_looks_up_what_tiles_hold() {
        let noise: Vec<u8> =
            (0..16384u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
        for width in 1..=8u32 {
            for (len, stride) in
                [(1, 4), (3, 20), (5, 20), (16, 64), (19, 80), (40, 160), (128, 512)]
            {
                let bytes: [u8; 256] =
                    std::array::from_fn(|code| ((code % (1 << width)) * 7 + 3) as u8);
                let table = LevelTable { bits: width, bytes };
                for tiles in 1..=3 {
                    let bytes = &noise[..tiles * 4 * len * width as usize];
                    let codes = RunCodes { bytes, width, len };
                    for free in [false, true] {
                        let to =
                            OutputLayout { first: 8, chunk: stride, tile: 8 * stride + 24, free };
                        check(codes, &table, to);
                    }
                }
            }
        }
    }

    /// Against the codes as the layout unpacks them; what is not free keeps what it was.
    fn check(codes: RunCodes<'_>, table: &LevelTable, to: OutputLayout) {
        let layout = CodeLayout::new(Side::Value, TILE, codes.len, codes.width);
        let tiles = codes.bytes.chunks(codes.tile_bytes());
        let mut want = vec![Some(9u8); to.first + tiles.len() * to.tile + SPILL];
        for (tile, bytes) in tiles.enumerate() {
            let mut unpacked = vec![0u8; TILE * codes.len];
            layout.unpack_tile(bytes, &mut unpacked);
            let first = to.first + tile * to.tile;
            for (index, chunk) in unpacked.chunks(codes.chunk_codes()).enumerate() {
                let at = first + index * to.chunk;
                for (want, code) in want[at..].iter_mut().zip(chunk) {
                    *want = Some(table.bytes[usize::from(*code)]);
                }
                if to.free {
                    let behind = at + chunk.len()..at + chunk.len() + SPILL;
                    want[behind].fill(None);
                }
            }
        }
        for simd in Simd::available_levels() {
            let mut out = vec![9u8; want.len()];
            look_up(simd, codes, table, to, &mut out);
            for (at, (out, want)) in out.iter().zip(&want).enumerate() {
                let same = want.is_none_or(|want| *out == want);
                assert!(same, "{simd:?} {} {} {to:?}: {at}", codes.width, codes.len);
            }
        }
    }

    #[test]
    fn bytes_are_the_levels() {
        let value = |bytes: &LevelBytes, code: usize| -> f32 {
            let byte = |table: &LevelTable| i32::from(table.bytes[code]) - BIAS;
            bytes.tables.iter().map(|(table, unit)| byte(table) as f32 * unit).sum()
        };
        let snapped = [-127f32, -41.0, 3.0, 120.0].map(|level| level * 11.0 / 1024.0);
        let one = LevelBytes::new(&snapped, Side::Value);
        assert_eq!(one.tables.len(), 1);
        for (code, level) in snapped.iter().enumerate() {
            assert_eq!(value(&one, code), *level);
        }
        let free: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 2.0).collect();
        for (side, bytes, error) in [(Side::Key, 2, 2.0 / 65000.0), (Side::Value, 3, 2.4e-7)] {
            let many = LevelBytes::new(&free, side);
            assert_eq!(many.tables.len(), bytes);
            let padded = many.clone().padded_to(4);
            assert_eq!(padded.tables.len(), 4);
            for (code, level) in free.iter().enumerate() {
                assert!((value(&many, code + 64) - level).abs() < error, "{level}");
                assert_eq!(value(&padded, code), value(&many, code));
            }
        }
        let nothing = LevelBytes::new(&[0.0, 0.0], Side::Value);
        assert_eq!(value(&nothing, 1), 0.0);
    }
}
