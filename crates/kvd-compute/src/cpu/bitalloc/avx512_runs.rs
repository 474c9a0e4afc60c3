//! `mod.rs` in AVX-512: products of a run's codes as they lie, never written as bytes.
//!
//! Runs are whole registers: of keys 64 codes are four positions of sixteen tokens, of values four
//! tokens of sixteen positions. Kernels are reached through the two functions at the top, which ask
//! for a [`Simd`] and check all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.

use crate::cpu::ahead::Steps;
use crate::cpu::dots::avx2::four;
use crate::cpu::dots::avx512::{
    TABLE_64, TABLE_256, add_weighted, biased, by_rows, look_up, whole,
};
use crate::cpu::dots::{BIAS, VECTOR_ROWS};
use crate::cpu::levels::x86::chunk_of;
use crate::cpu::levels::{CHUNKS, LevelTable, RunCodes};
use crate::cpu::parts::PartRows;
use crate::cpu::scores::{SPAN, TILE};
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Runs are multiples of so many positions.
pub(super) const POSITIONS: usize = 16;
/// Codes that are summed together.
const QUAD: usize = 4;

/// Calls `$f::<rows, digits of a factor, kind of table, width>`.
macro_rules! by_width {
    ($f:ident, $width:expr, $rows:expr, $args:tt) => {
        match $width {
            1 => by_rows!($f, $rows, (TABLE_64, 1), $args),
            2 => by_rows!($f, $rows, (TABLE_64, 2), $args),
            3 => by_rows!($f, $rows, (TABLE_64, 3), $args),
            4 => by_rows!($f, $rows, (TABLE_64, 4), $args),
            5 => by_rows!($f, $rows, (TABLE_64, 5), $args),
            6 => by_rows!($f, $rows, (TABLE_64, 6), $args),
            7 => by_rows!($f, $rows, (TABLE_256, 7), $args),
            _ => by_rows!($f, $rows, (TABLE_256, 8), $args),
        }
    };
}

/// Calls `$step!(chunk)` for each chunk of a tile: written out, since shifts are to be constants.
macro_rules! for_chunks {
    ($step:ident) => {
        $step!(0);
        $step!(1);
        $step!(2);
        $step!(3);
        $step!(4);
        $step!(5);
        $step!(6);
        $step!(7);
    };
}

/// Whether there are kernels for runs of such lengths.
pub(super) fn takes(simd: Simd, mut lens: impl Iterator<Item = usize>) -> bool {
    simd.set() == InstructionSet::Avx512 && lens.all(|len| len.is_multiple_of(POSITIONS))
}

/// The tiles of a run.
fn tiles(simd: Simd, codes: RunCodes<'_>) -> usize {
    assert!(takes(simd, [codes.len].into_iter()) && codes.len > 0, "runs: no kernel");
    assert!((1..=8).contains(&codes.width), "runs: width");
    assert!(codes.bytes.len().is_multiple_of(codes.tile_bytes()), "runs: tiles");
    codes.bytes.len() / codes.tile_bytes()
}

/// Adds to `scores[row][token]`, rows [`SPAN`] apart, what one unit is in `units` times the sums
/// over the positions of a run of a few tiles of keys.
pub(super) fn key_dots(
    simd: Simd,
    (codes, table): (RunCodes<'_>, &LevelTable),
    (q, units): (PartRows<'_>, &[f32]),
    soon: &mut Steps<'_>,
    scores: &mut [f32],
) {
    let (tiles, rows) = (tiles(simd, codes), units.len());
    assert!((1..=VECTOR_ROWS).contains(&rows) && q.sums.len() == rows, "key runs: rows");
    assert!(q.len == codes.len && tiles * TILE <= SPAN, "key runs: positions");
    assert!(q.bytes.len() >= q.digits * rows * q.len, "key runs: factors");
    assert!(scores.len() >= (rows - 1) * SPAN + tiles * TILE, "key runs: scores");
    let of = (rows, q.digits);
    // SAFETY: a `Simd` of this set exists only where the CPU has it; lengths are as asserted.
    unsafe { by_width!(keys, codes.width, of, ((codes, table), (q, units), soon, scores)) }
}

/// Adds to `out[row][position]`, rows so far apart, the sums over tokens of a run of a few tiles of
/// values, times their units.
pub(super) fn value_dots(
    simd: Simd,
    (codes, table): (RunCodes<'_>, &LevelTable),
    (weights, units): (PartRows<'_>, &[f32]),
    soon: &mut Steps<'_>,
    (out, stride): (&mut [f32], usize),
) {
    let (tiles, rows) = (tiles(simd, codes), units.len());
    assert!((1..=VECTOR_ROWS).contains(&rows) && weights.sums.len() == rows, "value runs: rows");
    assert_eq!(weights.len, tiles * TILE, "value runs: tokens");
    assert!(weights.bytes.len() >= weights.digits * rows * weights.len, "value runs: factors");
    assert!(out.len() >= (rows - 1) * stride + codes.len, "value runs: output");
    let (of, to) = ((rows, weights.digits), (out, stride));
    // SAFETY: as above.
    unsafe { by_width!(values, codes.width, of, ((codes, table), (weights, units), soon, to)) }
}

/// A table of levels; with signs, else plus [`BIAS`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load(table: &LevelTable, signs: bool) -> [__m512i; 4] {
    let flip = _mm512_set1_epi8(if signs { BIAS as i8 } else { 0 });
    let mut registers = [_mm512_setzero_si512(); 4];
    for (register, bytes) in registers.iter_mut().zip(table.bytes.as_chunks::<64>().0) {
        // SAFETY: 64 bytes.
        let bytes = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
        *register = _mm512_xor_si512(bytes, flip);
    }
    registers
}

/// Register `at` of every part of a tile's planes.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts<const WIDTH: usize>(tile: &[u8], at: usize) -> [__m512i; WIDTH] {
    let chunk = tile.len() / WIDTH;
    let mut parts = [_mm512_setzero_si512(); WIDTH];
    for (index, part) in parts.iter_mut().enumerate() {
        // SAFETY: a tile is `WIDTH` chunks of whole registers, of which `at` is one.
        *part = unsafe { _mm512_loadu_si512(tile.as_ptr().add(index * chunk + 64 * at).cast()) };
    }
    parts
}

/// The parts of a factor of four terms, each repeated to fill a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn factors<const D: usize>(rows: PartRows<'_>, row: usize, at: usize) -> [__m512i; 2] {
    let (bytes, at) = (rows.bytes.as_ptr(), D * row * rows.len + at);
    // SAFETY: a row has `D` times `len` bytes, and four from `at` on are of its first digits.
    let parts = unsafe { [four(bytes, at), four(bytes, at + (D - 1) * rows.len)] };
    parts.map(|part| _mm512_set1_epi32(part))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn keys<const R: usize, const D: usize, const KIND: u8, const WIDTH: usize>(
    (codes, table): (RunCodes<'_>, &LevelTable),
    q: (PartRows<'_>, &[f32]),
    soon: &mut Steps<'_>,
    out: &mut [f32],
) {
    let table = load(table, false);
    for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
        let out = &mut out[tile * TILE..];
        // Of an odd number of registers a chunk begins where half of the tokens have passed.
        if (codes.len / POSITIONS).is_multiple_of(2) {
            key_tile::<R, D, KIND, WIDTH, false>((bytes, codes.len), &table, q, soon, out);
        } else {
            key_tile::<R, D, KIND, WIDTH, true>((bytes, codes.len), &table, q, soon, out);
        }
    }
}

/// Accumulators of both halves of the tokens, for each row and digit.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn key_tile<
    const R: usize,
    const D: usize,
    const KIND: u8,
    const WIDTH: usize,
    const TURNS: bool,
>(
    (tile, len): (&[u8], usize),
    table: &[__m512i; 4],
    (q, units): (PartRows<'_>, &[f32]),
    soon: &mut Steps<'_>,
    out: &mut [f32],
) {
    let registers = len / POSITIONS;
    let [mut high, mut low] = biased::<R, D, 2>(BIAS, q.sums);
    for at in 0..registers {
        soon.ask();
        let parts = parts::<WIDTH>(tile, at);
        macro_rules! chunk {
            ($chunk:literal) => {
                let values = look_up::<KIND>(chunk_of::<WIDTH, $chunk>(&parts), table);
                // Halves take turns from register to register; index 0 has that of chunk 0.
                let half = if TURNS { $chunk % 2 } else { 0 };
                let quad = ($chunk * registers + at) / 2;
                for row in 0..R {
                    let [first, second] = factors::<D>(q, row, QUAD * quad);
                    high[row][half] = _mm512_dpbusd_epi32(high[row][half], values, first);
                    if D == 2 {
                        low[row][half] = _mm512_dpbusd_epi32(low[row][half], values, second);
                    }
                }
            };
        }
        for_chunks!(chunk);
        high.iter_mut().chain(&mut low).for_each(|halves| halves.swap(0, 1));
    }
    if TURNS {
        high.iter_mut().chain(&mut low).for_each(|halves| halves.swap(0, 1));
    }
    for row in 0..R {
        let unit = _mm512_set1_ps(units[row]);
        for half in 0..2 {
            let sum = _mm512_cvtepi32_ps(whole::<D>(high[row][half], low[row][half]));
            let to = out[row * SPAN + 16 * half..][..16].as_mut_ptr();
            // SAFETY: 16 scores.
            unsafe {
                let before = _mm512_loadu_ps(to);
                _mm512_storeu_ps(to, _mm512_add_ps(before, _mm512_mul_ps(sum, unit)));
            }
        }
    }
}

/// Two accumulators for each row and digit, which even and odd quads of tokens take in turns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn values<const R: usize, const D: usize, const KIND: u8, const WIDTH: usize>(
    (codes, table): (RunCodes<'_>, &LevelTable),
    (weights, units): (PartRows<'_>, &[f32]),
    soon: &mut Steps<'_>,
    (out, stride): (&mut [f32], usize),
) {
    // A weight of one byte has no sign, and then values need one.
    let table = load(table, D == 1);
    let bias = if D == 1 { 0 } else { BIAS };
    for at in 0..codes.len / POSITIONS {
        let [mut high, mut low] = biased::<R, D, 2>(bias, weights.sums);
        // What the second would be too large by is taken from the first already.
        for row in 0..R {
            (high[row][1], low[row][1]) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        }
        for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
            soon.ask();
            let parts = parts::<WIDTH>(bytes, at);
            macro_rules! chunk {
                ($chunk:literal) => {
                    let values = look_up::<KIND>(chunk_of::<WIDTH, $chunk>(&parts), &table);
                    let token = tile * TILE + TILE / CHUNKS * $chunk;
                    for row in 0..R {
                        let weight = factors::<D>(weights, row, token);
                        let sums = (&mut high[row][$chunk % 2], &mut low[row][$chunk % 2]);
                        add_weighted::<D>(sums, values, weight);
                    }
                };
            }
            for_chunks!(chunk);
        }
        for row in 0..R {
            let [high, low] = [high[row], low[row]].map(|two| _mm512_add_epi32(two[0], two[1]));
            let sum = _mm512_cvtepi32_ps(whole::<D>(high, low));
            let to = out[row * stride + POSITIONS * at..][..POSITIONS].as_mut_ptr();
            // SAFETY: 16 sums.
            unsafe {
                let before = _mm512_loadu_ps(to);
                let unit = _mm512_set1_ps(units[row]);
                _mm512_storeu_ps(to, _mm512_add_ps(before, _mm512_mul_ps(sum, unit)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::ahead::Ahead;
    use crate::cpu::parts::Parts;
    use crate::cpu::simd::Precision;
    use kvd_codec::CodeLayout;
    use kvd_core::Side;

    const TILES: usize = 3;
    const UNITS: [f32; VECTOR_ROWS] = [0.5, 0.1, 3.0, 0.7];

    /// Levels of a run, `[tiles][token][position]`, less [`BIAS`].
    fn levels(side: Side, codes: RunCodes<'_>, table: &LevelTable) -> Vec<Vec<Vec<i32>>> {
        let layout = CodeLayout::new(side, TILE, codes.len, codes.width);
        let level = |tile: &[u8], token: usize, at: usize| {
            let place = match side {
                Side::Key => (at / QUAD * TILE + token) * QUAD + at % QUAD,
                Side::Value => (token / QUAD * codes.len + at) * QUAD + token % QUAD,
            };
            i32::from(table.bytes[usize::from(tile[place])]) - BIAS
        };
        let tiles = codes.bytes.chunks_exact(codes.tile_bytes()).map(|bytes| {
            let mut tile = vec![0; TILE * codes.len];
            layout.unpack_tile(bytes, &mut tile);
            let row = |token| (0..codes.len).map(|at| level(&tile, token, at)).collect();
            (0..TILE).map(row).collect()
        });
        tiles.collect()
    }

    /// Runs of all widths and several lengths, and as many rows of factors as kernels take.
    fn each(mut parts: Parts, simd: Simd, check: impl Fn(RunCodes<'_>, &LevelTable, &mut Parts)) {
        let noise = (0..65536u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8);
        let noise: Vec<u8> = noise.collect();
        assert!(takes(simd, [16, 48].into_iter()) && !takes(simd, [16, 24].into_iter()));
        for width in 1..=8u32 {
            let byte = |code: usize| ((code % (1 << width)) * 37 + 5) as u8;
            let table = LevelTable { bits: width, bytes: std::array::from_fn(byte) };
            for len in [16, 32, 48, 128] {
                let bytes = &noise[len..][..TILES * 4 * len * width as usize];
                check(RunCodes { bytes, width, len }, &table, &mut parts);
            }
        }
    }

    /// Rows of factors.
    fn push(parts: &mut Parts, simd: Simd, len: usize, sign: bool) {
        parts.reset(len);
        for row in 0..VECTOR_ROWS {
            let wave = |at: usize| ((at * 7 + row * 31) as f32 * 0.37).sin();
            let wave = |at| if sign { wave(at) } else { wave(at).abs() };
            let values: Vec<f32> = (0..len).map(wave).collect();
            parts.push(simd, &values, 1.0, None);
        }
    }

    fn level_sets() -> impl Iterator<Item = (Simd, Precision)> {
        let sets = Simd::available().into_iter().filter(|simd| takes(*simd, [16].into_iter()));
        sets.flat_map(|simd| [(simd, Precision::Fast), (simd, Precision::Int8)])
    }

    #[test]
    fn scores_are_sums_over_positions() {
        for how in level_sets() {
            each(Parts::of_queries(how), how.0, |codes, table, parts| {
                push(parts, how.0, codes.len, true);
                let tiles = levels(Side::Key, codes, table);
                for rows in 1..=VECTOR_ROWS {
                    let (q, units) = (parts.rows(0).part(0, rows), &UNITS[..rows]);
                    let mut out = vec![1.5f32; rows * SPAN];
                    let mut soon = Ahead::default().steps(1);
                    key_dots(how.0, (codes, table), (q, units), &mut soon, &mut out);
                    for (at, row) in tiles.concat().iter().enumerate() {
                        for (index, unit) in units.iter().enumerate() {
                            let term = |(i, level): (usize, &i32)| q.value(how.0, index, i) * level;
                            let sum: i32 = row.iter().enumerate().map(term).sum();
                            let want = 1.5 + sum as f32 * unit;
                            assert_eq!(
                                out[index * SPAN + at],
                                want,
                                "{how:?}, {} of {} bits",
                                codes.len,
                                codes.width
                            );
                        }
                    }
                    assert_eq!(out[TILES * TILE], 1.5, "{how:?}: tokens behind the tiles");
                }
            });
        }
    }

    #[test]
    fn values_are_sums_over_tokens() {
        for how in level_sets() {
            each(Parts::of_weights(how), how.0, |codes, table, parts| {
                push(parts, how.0, TILES * TILE, false);
                let (tiles, stride) = (levels(Side::Value, codes, table).concat(), codes.len + 16);
                for rows in 1..=VECTOR_ROWS {
                    let (weights, units) = (parts.rows(0).part(0, rows), &UNITS[..rows]);
                    let mut out = vec![1.5f32; rows * stride];
                    let (mut soon, to) = (Ahead::default().steps(1), (&mut out[..], stride));
                    value_dots(how.0, (codes, table), (weights, units), &mut soon, to);
                    for (index, unit) in units.iter().enumerate() {
                        // One byte of a weight has no sign.
                        let weight = |token| match weights.value(how.0, index, token) {
                            byte if weights.digits == 1 => byte & 255,
                            word => word,
                        };
                        for at in 0..stride {
                            let term = |(token, row): (usize, &Vec<i32>)| {
                                weight(token) * row.get(at).copied().unwrap_or_default()
                            };
                            let sum: i32 = tiles.iter().enumerate().map(term).sum();
                            let want = 1.5 + sum as f32 * unit;
                            assert_eq!(
                                out[index * stride + at],
                                want,
                                "{how:?}, {} of {} bits",
                                codes.len,
                                codes.width
                            );
                        }
                    }
                }
            });
        }
    }
}
