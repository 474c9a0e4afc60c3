//! `mod.rs` in AVX-512: products of a run's codes as they lie, never written as bytes.
//!
//! Runs are whole registers: of keys 64 codes are four positions of sixteen tokens, of values four
//! tokens of sixteen positions. Kernels are reached through the two functions at the top, which ask
//! for a [`Simd`] and check all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.

use crate::cpu::int_dot::avx512::{
    TABLE_64, TABLE_256, add_weighted, biased_sums, by_rows, join_digits, load_factors, look_up,
};
use crate::cpu::int_dot::{BIAS, VECTOR_ROWS};
use crate::cpu::int_operands::ScaledRows;
use crate::cpu::levels::x86::chunk_of;
use crate::cpu::levels::{CHUNKS, LevelTable, RunCodes};
use crate::cpu::prefetch::PrefetchSteps;
use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::{SPAN, TILE};
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
pub(super) fn has_kernel(simd: Simd, mut lens: impl Iterator<Item = usize>) -> bool {
    simd.vector_set() == InstructionSet::Avx512 && lens.all(|len| len.is_multiple_of(POSITIONS))
}

/// The tiles of a run.
fn tile_count(simd: Simd, codes: RunCodes<'_>) -> usize {
    assert!(has_kernel(simd, [codes.len].into_iter()) && codes.len > 0, "runs: no kernel");
    assert!((1..=8).contains(&codes.width), "runs: width");
    assert!(codes.bytes.len().is_multiple_of(codes.tile_bytes()), "runs: tiles");
    codes.bytes.len() / codes.tile_bytes()
}

/// Adds to `scores[row][token]`, rows [`SPAN`] apart, what one unit is in `units` times the sums
/// over the positions of a run of a few tiles of keys.
pub(super) fn key_dots(
    simd: Simd,
    codes: RunCodes<'_>,
    table: &LevelTable,
    q: ScaledRows<'_>,
    prefetch: &mut PrefetchSteps<'_>,
    scores: &mut [f32],
) {
    let ScaledRows { rows: of_rows, units } = q;
    let (tiles, rows) = (tile_count(simd, codes), units.len());
    assert!((1..=VECTOR_ROWS).contains(&rows) && of_rows.sums.len() == rows, "key runs: rows");
    assert!(of_rows.len == codes.len && tiles * TILE <= SPAN, "key runs: positions");
    let size = of_rows.digits * rows * of_rows.len;
    assert!(of_rows.bytes.len() >= size, "key runs: factors");
    assert!(scores.len() >= (rows - 1) * SPAN + tiles * TILE, "key runs: scores");
    let of = (rows, of_rows.digits);
    // SAFETY: a `Simd` of this set exists only where the CPU has it; lengths are as asserted.
    unsafe { by_width!(key_tiles, codes.width, of, (codes, table, q, prefetch, scores)) }
}

/// Adds to `out[row][position]`, rows so far apart, the sums over tokens of a run of a few tiles of
/// values, times their units.
pub(super) fn value_dots(
    simd: Simd,
    codes: RunCodes<'_>,
    table: &LevelTable,
    weights: ScaledRows<'_>,
    prefetch: &mut PrefetchSteps<'_>,
    out: StridedRows<'_>,
) {
    let ScaledRows { rows: of_rows, units } = weights;
    let (tiles, rows) = (tile_count(simd, codes), units.len());
    assert!((1..=VECTOR_ROWS).contains(&rows) && of_rows.sums.len() == rows, "value runs: rows");
    assert_eq!(of_rows.len, tiles * TILE, "value runs: tokens");
    let size = of_rows.digits * rows * of_rows.len;
    assert!(of_rows.bytes.len() >= size, "value runs: factors");
    let needed = (rows - 1) * out.stride + codes.len;
    assert!(out.values.len() >= needed, "value runs: output");
    let of = (rows, of_rows.digits);
    // SAFETY: as above.
    unsafe { by_width!(value_tiles, codes.width, of, (codes, table, weights, prefetch, out)) }
}

/// A table of levels; with signs, else plus [`BIAS`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_table(table: &LevelTable, signs: bool) -> [__m512i; 4] {
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
fn load_parts<const WIDTH: usize>(tile: &[u8], at: usize) -> [__m512i; WIDTH] {
    let chunk = tile.len() / WIDTH;
    let mut parts = [_mm512_setzero_si512(); WIDTH];
    for (index, part) in parts.iter_mut().enumerate() {
        // SAFETY: a tile is `WIDTH` chunks of whole registers, of which `at` is one.
        *part = unsafe { _mm512_loadu_si512(tile.as_ptr().add(index * chunk + 64 * at).cast()) };
    }
    parts
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn key_tiles<const R: usize, const D: usize, const KIND: u8, const WIDTH: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    q: ScaledRows<'_>,
    prefetch: &mut PrefetchSteps<'_>,
    out: &mut [f32],
) {
    let table = load_table(table, false);
    for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
        let out = &mut out[tile * TILE..];
        // Of an odd number of registers a chunk begins where half of the tokens have passed.
        if (codes.len / POSITIONS).is_multiple_of(2) {
            key_tile::<R, D, KIND, WIDTH, false>(bytes, codes.len, &table, q, prefetch, out);
        } else {
            key_tile::<R, D, KIND, WIDTH, true>(bytes, codes.len, &table, q, prefetch, out);
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
    tile: &[u8],
    len: usize,
    table: &[__m512i; 4],
    q: ScaledRows<'_>,
    prefetch: &mut PrefetchSteps<'_>,
    out: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    let registers = len / POSITIONS;
    let [mut high, mut low] = biased_sums::<R, D, 2>(BIAS, q.sums);
    for at in 0..registers {
        prefetch.next_step();
        let parts = load_parts::<WIDTH>(tile, at);
        macro_rules! chunk {
            ($chunk:literal) => {
                let values = look_up::<KIND>(chunk_of::<WIDTH, $chunk>(&parts), table);
                // Halves take turns from register to register; index 0 has that of chunk 0.
                let half = if TURNS { $chunk % 2 } else { 0 };
                let quad = ($chunk * registers + at) / 2;
                for row in 0..R {
                    let [first, second] = load_factors::<D>(q, row, QUAD * quad);
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
            let sum = _mm512_cvtepi32_ps(join_digits::<D>(high[row][half], low[row][half]));
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
fn value_tiles<const R: usize, const D: usize, const KIND: u8, const WIDTH: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    weights: ScaledRows<'_>,
    prefetch: &mut PrefetchSteps<'_>,
    out: StridedRows<'_>,
) {
    let ScaledRows { rows: weights, units } = weights;
    let StridedRows { values: out, stride } = out;
    // A weight of one byte has no sign, and then values need one.
    let table = load_table(table, D == 1);
    let bias = if D == 1 { 0 } else { BIAS };
    for at in 0..codes.len / POSITIONS {
        let [mut high, mut low] = biased_sums::<R, D, 2>(bias, weights.sums);
        // What the second would be too large by is taken from the first already.
        for row in 0..R {
            (high[row][1], low[row][1]) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        }
        for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
            prefetch.next_step();
            let parts = load_parts::<WIDTH>(bytes, at);
            macro_rules! chunk {
                ($chunk:literal) => {
                    let values = look_up::<KIND>(chunk_of::<WIDTH, $chunk>(&parts), &table);
                    let token = tile * TILE + TILE / CHUNKS * $chunk;
                    for row in 0..R {
                        let weight = load_factors::<D>(weights, row, token);
                        let (high, low) = (&mut high[row][$chunk % 2], &mut low[row][$chunk % 2]);
                        add_weighted::<D>(high, low, values, weight);
                    }
                };
            }
            for_chunks!(chunk);
        }
        for row in 0..R {
            let [high, low] = [high[row], low[row]].map(|two| _mm512_add_epi32(two[0], two[1]));
            let sum = _mm512_cvtepi32_ps(join_digits::<D>(high, low));
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
    use crate::cpu::int_operands::IntOperands;
    use crate::cpu::prefetch::PrefetchBytes;
    use crate::cpu::simd::{KernelConfig, Precision};
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
    fn each(
        mut parts: IntOperands,
        simd: Simd,
        check: impl Fn(RunCodes<'_>, &LevelTable, &mut IntOperands),
    ) {
        let noise = (0..65536u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8);
        let noise: Vec<u8> = noise.collect();
        assert!(has_kernel(simd, [16, 48].into_iter()) && !has_kernel(simd, [16, 24].into_iter()));
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
    fn push(parts: &mut IntOperands, simd: Simd, len: usize, sign: bool) {
        parts.clear_rows(len);
        for row in 0..VECTOR_ROWS {
            let wave = |at: usize| ((at * 7 + row * 31) as f32 * 0.37).sin();
            let wave = |at| if sign { wave(at) } else { wave(at).abs() };
            let values: Vec<f32> = (0..len).map(wave).collect();
            parts.push(simd, &values, 1.0, None);
        }
    }

    fn level_sets() -> impl Iterator<Item = KernelConfig> {
        let sets =
            Simd::available_levels().into_iter().filter(|simd| has_kernel(*simd, [16].into_iter()));
        let precisions = [Precision::Fast, Precision::Int8];
        sets.flat_map(move |simd| precisions.map(|precision| KernelConfig { simd, precision }))
    }

    #[test]
    fn scores_are_sums_over_positions() {
        for config in level_sets() {
            each(IntOperands::of_queries(config), config.simd, |codes, table, parts| {
                push(parts, config.simd, codes.len, true);
                let tiles = levels(Side::Key, codes, table);
                for rows in 1..=VECTOR_ROWS {
                    let (q, units) = (parts.rows_from(0).slice_rows(0, rows), &UNITS[..rows]);
                    let mut out = vec![1.5f32; rows * SPAN];
                    let mut prefetch = PrefetchBytes::default().in_steps(1);
                    let of_units = ScaledRows { rows: q, units };
                    key_dots(config.simd, codes, table, of_units, &mut prefetch, &mut out);
                    for (at, row) in tiles.concat().iter().enumerate() {
                        for (index, unit) in units.iter().enumerate() {
                            let term = |(i, level): (usize, &i32)| {
                                q.value_at(config.simd, index, i) * level
                            };
                            let sum: i32 = row.iter().enumerate().map(term).sum();
                            let want = 1.5 + sum as f32 * unit;
                            assert_eq!(
                                out[index * SPAN + at],
                                want,
                                "{config:?}, {} of {} bits",
                                codes.len,
                                codes.width
                            );
                        }
                    }
                    assert_eq!(out[TILES * TILE], 1.5, "{config:?}: tokens behind the tiles");
                }
            });
        }
    }

    #[test]
    fn values_are_sums_over_tokens() {
        for config in level_sets() {
            each(IntOperands::of_weights(config), config.simd, |codes, table, parts| {
                push(parts, config.simd, TILES * TILE, false);
                let (tiles, stride) = (levels(Side::Value, codes, table).concat(), codes.len + 16);
                for rows in 1..=VECTOR_ROWS {
                    let (weights, units) = (parts.rows_from(0).slice_rows(0, rows), &UNITS[..rows]);
                    let mut out = vec![1.5f32; rows * stride];
                    let mut prefetch = PrefetchBytes::default().in_steps(1);
                    let to = StridedRows { values: &mut out, stride };
                    let of_units = ScaledRows { rows: weights, units };
                    value_dots(config.simd, codes, table, of_units, &mut prefetch, to);
                    for (index, unit) in units.iter().enumerate() {
                        // One byte of a weight has no sign.
                        let weight = |token| match weights.value_at(config.simd, index, token) {
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
                                "{config:?}, {} of {} bits",
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
