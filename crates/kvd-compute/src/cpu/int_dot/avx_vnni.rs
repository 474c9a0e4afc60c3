//! `mod.rs` in AVX2 with AVX-VNNI: `vpdpbusd` of the high and the low parts, as in AVX-512
//! (`avx512.rs`), in registers of 256 bits, of which there are 16.
//!
//! Everything here is reached through the two functions at the top, whose callers in `avx2.rs`
//! know that the machine has the instructions and have checked all lengths; pointers stay inside
//! those.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::avx2::{
    PLAIN, TABLE_16, add_sums, by_shape, cut_256, load_256, load_four, lookup_kind,
};
use crate::cpu::int_dot::avx512::{by_rows, for_planes};
use crate::cpu::int_dot::{BIAS, CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{IntRows, ScaledRows};
use crate::cpu::prefetch::PrefetchSteps;
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::x86_64::*;

/// # Safety
/// The machine has AVX2 and AVX-VNNI, and lengths are as `int_dot::key_dots` wants them.
pub(super) unsafe fn key_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = ((q.units.len(), q.rows.digits), lookup_kind(lookup));
    // SAFETY: the caller's.
    unsafe { by_shape!(by_rows, key_tiles, rows, kind, codes.width, (codes, lookup, q, out)) }
}

/// # Safety
/// The machine has AVX2 and AVX-VNNI, and lengths are as `int_dot::value_dots` wants them.
pub(super) unsafe fn value_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = ((weights.sums.len(), weights.digits), lookup_kind(lookup));
    // SAFETY: the caller's.
    unsafe {
        by_shape!(
            by_rows,
            value_tiles,
            rows,
            kind,
            codes.width,
            (codes, lookup, weights, target, out)
        )
    }
}

/// Registers of codes that are multiplied at once: each has a sum for every row and digit, which
/// makes eight with four rows.
const fn column_count<const D: usize>() -> usize {
    2 / D
}

/// Sums of both digits, by row and column; as many columns as `column_count` says are in use.
type DigitSums<const R: usize> = [[[__m256i; 2]; R]; 2];

/// Sums that begin less what they will be too large by: one unit of `bias` for each unit of `sums`.
#[inline]
#[target_feature(enable = "avx2")]
fn biased_sums<const R: usize, const D: usize>(bias: i32, sums: &[i32]) -> DigitSums<R> {
    let mut digits = [[[_mm256_setzero_si256(); 2]; R]; 2];
    for row in 0..R {
        let unit = _mm256_set1_epi32(bias.wrapping_mul(sums[row]).wrapping_neg());
        // The low digits' where there are two, else the only ones.
        digits[D - 1][row] = [unit; 2];
    }
    digits
}

/// The sum of both digits' sums, where there are two.
#[inline]
#[target_feature(enable = "avx2")]
fn join_digits<const D: usize>(high: __m256i, low: __m256i) -> __m256 {
    let sum = if D == 1 { high } else { _mm256_add_epi32(_mm256_slli_epi32::<8>(high), low) };
    _mm256_cvtepi32_ps(sum)
}

/// The table of a channel; as signed values where a weight has no sign.
#[inline]
#[target_feature(enable = "avx2")]
fn load_table<const KIND: u8>(lookup: &CodeLookup, channel: usize, signed: bool) -> __m256i {
    if KIND == PLAIN {
        return _mm256_setzero_si256();
    }
    // SAFETY: 32 of 256 bytes.
    let table = unsafe { _mm256_loadu_si256(lookup.tables[channel].as_ptr().cast()) };
    if signed { flip_signs(table) } else { table }
}

/// Takes [`BIAS`] off each byte.
#[inline]
#[target_feature(enable = "avx2")]
fn flip_signs(bytes: __m256i) -> __m256i {
    _mm256_xor_si256(bytes, _mm256_set1_epi8(BIAS as i8))
}

/// Looks up the values of codes.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const KIND: u8>(codes: __m256i, table: __m256i) -> __m256i {
    if KIND == PLAIN { codes } else { _mm256_shuffle_epi8(table, codes) }
}

/// Both digits of four factors of a row of `D * len` bytes, in every lane.
///
/// # Safety
/// `at + 4` is at most the end of the row's first digits.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_factors<const D: usize>(rows: IntRows<'_>, row: usize, at: usize) -> [__m256i; 2] {
    let at = D * row * rows.len + at;
    let low = at + (D - 1) * rows.len;
    // SAFETY: the caller's.
    let parts =
        unsafe { [load_four(rows.bytes.as_ptr(), at), load_four(rows.bytes.as_ptr(), low)] };
    [_mm256_set1_epi32(parts[0]), _mm256_set1_epi32(parts[1])]
}

/// Eight tokens a register.
#[target_feature(enable = "avx2,avxvnni")]
fn key_tiles<
    const R: usize,
    const D: usize,
    const DP: usize,
    const KIND: u8,
    const WIDTH: usize,
>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    for (codes, at) in codes.each_tile() {
        let mut prefetch =
            codes.prefetch.in_steps(4 / column_count::<D>() * codes.bytes.len() / 128);
        for first in (0..4).step_by(column_count::<D>()) {
            let out = &mut out[at + 8 * first..];
            key_columns::<R, D, DP, KIND, WIDTH>(codes, lookup, &mut prefetch, q, first, out);
        }
    }
}

/// The scores of a few registers of tokens of a tile, from register `first` on.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn key_columns<
    const R: usize,
    const D: usize,
    const DP: usize,
    const KIND: u8,
    const WIDTH: usize,
>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    prefetch: &mut PrefetchSteps<'_>,
    q: ScaledRows<'_>,
    first: usize,
    out: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    // Groups of four codes that begin a byte, those of one plane.
    let groups = codes.bytes.len() / 128;
    let [mut high, mut low] = biased_sums::<R, D>(lookup.bias, q.sums);
    for pass in (0..lookup.dims).step_by(DP) {
        let last = pass + DP - 1;
        let tables =
            [load_table::<KIND>(lookup, pass, false), load_table::<KIND>(lookup, last, false)];
        for group in 0..groups {
            if pass == 0 {
                prefetch.next_step();
            }
            let mut loaded = [_mm256_setzero_si256(); 2];
            for c in 0..column_count::<D>() {
                let at = 128 * group + 32 * (first + c);
                // SAFETY: a quarter of 128 bytes, of which there are `groups`.
                loaded[c] = unsafe { _mm256_loadu_si256(codes.bytes.as_ptr().add(at).cast()) };
            }
            macro_rules! plane {
                ($plane:literal) => {
                    let cut = loaded.map(|bytes| cut_256::<WIDTH>(bytes, $plane * WIDTH));
                    for d in 0..DP {
                        let at = (pass + d) * codes.per_row + 4 * ($plane * groups + group);
                        let values = cut.map(|codes| look_up::<KIND>(codes, tables[d]));
                        for row in 0..R {
                            // SAFETY: a row has `q.len` factors, four of them for each group.
                            let [h, l] = unsafe { load_factors::<D>(q, row, at) };
                            for c in 0..column_count::<D>() {
                                high[row][c] = _mm256_dpbusd_avx_epi32(high[row][c], values[c], h);
                                if D == 2 {
                                    low[row][c] =
                                        _mm256_dpbusd_avx_epi32(low[row][c], values[c], l);
                                }
                            }
                        }
                    }
                };
            }
            for_planes!(WIDTH, plane);
        }
    }
    for row in 0..R {
        for c in 0..column_count::<D>() {
            let scores = join_digits::<D>(high[row][c], low[row][c]);
            let scores = _mm256_mul_ps(scores, _mm256_set1_ps(units[row]));
            let out = &mut out[row * SPAN + 8 * c..][..8];
            // SAFETY: eight scores.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), scores) };
        }
    }
}

/// Whether values are multiplied less [`BIAS`]: a weight of one byte has no sign, and then values
/// need one.
const fn needs_signs<const D: usize, const KIND: u8, const WIDTH: usize>() -> bool {
    D == 1 && (KIND != PLAIN || WIDTH == 8)
}

/// Eight positions a register; the second has other positions, or another channel of the same.
#[target_feature(enable = "avx2,avxvnni")]
fn value_tiles<
    const R: usize,
    const D: usize,
    const DP: usize,
    const KIND: u8,
    const WIDTH: usize,
>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let end = target.first + target.count;
    // Channels at once, and positions of them.
    let channels = if KIND == PLAIN { 1 } else { column_count::<D>() };
    let positions = 8 * column_count::<D>() / channels;
    let blocks = lookup.dims / channels * target.count.div_ceil(positions);
    let mut prefetch = codes.prefetch.in_steps(blocks * WIDTH * weights.len / TILE);
    let signed = needs_signs::<D, KIND, WIDTH>();
    let bias = lookup.bias - if signed { BIAS } else { 0 };
    for pass in (0..lookup.dims).step_by(channels) {
        let last = pass + channels - 1;
        let tables =
            [load_table::<KIND>(lookup, pass, signed), load_table::<KIND>(lookup, last, signed)];
        for block in (target.first..end).step_by(positions) {
            let lanes = [(end - block).min(8), (end - block).clamp(8, 16) - 8];
            let sums = biased_sums::<R, D>(bias, weights.sums);
            let prefetch = &mut prefetch;
            let sums = sum_block::<R, D, KIND, WIDTH>(
                codes, tables, weights, sums, prefetch, block, lanes,
            );
            for row in 0..R {
                for c in 0..column_count::<D>() {
                    let (channel, position, lanes) = match KIND {
                        PLAIN => (pass, block + 8 * c, lanes[c]),
                        _ => (pass + c, block, lanes[0]),
                    };
                    if lanes == 0 {
                        continue;
                    }
                    let sum = join_digits::<D>(sums[0][row][c], sums[1][row][c]);
                    let at = (row * lookup.dims + channel) * codes.per_row + position;
                    let factors = target.factors.get(position..position + lanes);
                    add_sums(sum, target.units[row], factors, &mut out[at..at + lanes]);
                }
            }
        }
    }
}

/// Adds all tokens' values at the positions from `block` on, times their weights.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn sum_block<const R: usize, const D: usize, const KIND: u8, const WIDTH: usize>(
    codes: TileCodes<'_>,
    tables: [__m256i; 2],
    weights: IntRows<'_>,
    sums: DigitSums<R>,
    prefetch: &mut PrefetchSteps<'_>,
    block: usize,
    lanes: [usize; 2],
) -> DigitSums<R> {
    let [mut high, mut low] = sums;
    for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
        for group in 0..WIDTH {
            prefetch.next_step();
            let bytes = &bytes[4 * (group * codes.per_row + block)..];
            let mut loaded = [load_256(bytes, lanes[0]); 2];
            if KIND == PLAIN && column_count::<D>() == 2 && lanes[1] > 0 {
                loaded[1] = load_256(&bytes[32..], lanes[1]);
            }
            if KIND == PLAIN && needs_signs::<D, KIND, WIDTH>() {
                loaded = [flip_signs(loaded[0]), flip_signs(loaded[1])];
            }
            macro_rules! plane {
                ($plane:literal) => {
                    let at = tile * TILE + 4 * ($plane * WIDTH + group);
                    let mut values = loaded;
                    for c in 0..column_count::<D>() {
                        let codes = cut_256::<WIDTH>(loaded[c], $plane * WIDTH);
                        values[c] = look_up::<KIND>(codes, tables[c]);
                    }
                    for row in 0..R {
                        // SAFETY: a row has `weights.len` factors, four of them for each group.
                        let [h, l] = unsafe { load_factors::<D>(weights, row, at) };
                        if D == 2 {
                            high[row][0] = _mm256_dpbusd_avx_epi32(high[row][0], values[0], h);
                            low[row][0] = _mm256_dpbusd_avx_epi32(low[row][0], values[0], l);
                        } else {
                            for c in 0..2 {
                                high[row][c] = _mm256_dpbusd_avx_epi32(high[row][c], h, values[c]);
                            }
                        }
                    }
                };
            }
            for_planes!(WIDTH, plane);
        }
    }
    [high, low]
}
