//! `mod.rs` in AVX2: `vpmaddwd` of sign-extended halves, `vpshufb` tables in registers. AVX-512
//! and AVX-VNNI are beside it (`avx512.rs`, `avx_vnni.rs`).
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::avx_vnni;
use crate::cpu::int_dot::avx512::{self, for_planes};
use crate::cpu::int_dot::{BIAS, CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{IntRows, ScaledRows};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::x86_64::*;

/// Codes are values.
pub(super) const PLAIN: u8 = 0;
/// A table of 16 bytes.
pub(super) const TABLE_16: u8 = 1;

pub(super) fn lookup_kind(lookup: &CodeLookup) -> u8 {
    if lookup.tables.is_empty() { PLAIN } else { TABLE_16 }
}

/// Calls `$f::<rows, channels per pass, kind, width>`.
macro_rules! by_rows {
    ($f:ident, $rows:expr, ($($shape:tt)*), $args:tt) => {
        match $rows {
            1 => $f::<1, $($shape)*> $args,
            2 => $f::<2, $($shape)*> $args,
            3 => $f::<3, $($shape)*> $args,
            4 => $f::<4, $($shape)*> $args,
            rows => unreachable!("{rows} rows"),
        }
    };
}

/// As `$by_rows`, whatever the kind and the width.
macro_rules! by_shape {
    ($by_rows:ident, $f:ident, $rows:expr, $kind:expr, $width:expr, $args:tt) => {
        match ($kind, $width) {
            (PLAIN, 1) => $by_rows!($f, $rows, (1, PLAIN, 1), $args),
            (PLAIN, 2) => $by_rows!($f, $rows, (1, PLAIN, 2), $args),
            (PLAIN, 4) => $by_rows!($f, $rows, (1, PLAIN, 4), $args),
            (PLAIN, _) => $by_rows!($f, $rows, (1, PLAIN, 8), $args),
            (_, 1) => $by_rows!($f, $rows, (2, TABLE_16, 1), $args),
            (_, 2) => $by_rows!($f, $rows, (2, TABLE_16, 2), $args),
            (_, 4) => $by_rows!($f, $rows, (2, TABLE_16, 4), $args),
            (_, _) => $by_rows!($f, $rows, (2, TABLE_16, 8), $args),
        }
    };
}

pub(super) use by_shape;

pub(super) fn key_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = (q.units.len(), lookup_kind(lookup));
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        if simd.vector_set() == InstructionSet::Avx512 {
            return avx512::key_dots(codes, lookup, q, out);
        }
        if simd.has_avx_vnni() {
            return avx_vnni::key_dots(codes, lookup, q, out);
        }
        for (codes, at) in codes.each_tile() {
            by_shape!(
                by_rows,
                keys_256,
                rows,
                kind,
                codes.width,
                (codes, lookup, q, &mut out[at..])
            );
        }
    }
}

pub(super) fn value_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = (weights.sums.len(), lookup_kind(lookup));
    // SAFETY: as above.
    unsafe {
        if simd.vector_set() == InstructionSet::Avx512 {
            avx512::value_dots(codes, lookup, weights, target, out);
        } else if simd.has_avx_vnni() {
            avx_vnni::value_dots(codes, lookup, weights, target, out);
        } else {
            by_shape!(
                by_rows,
                values_256,
                rows,
                kind,
                codes.width,
                (codes, lookup, weights, target, out)
            );
        }
    }
}

/// Four bytes of a row's parts.
///
/// # Safety
/// `at + 4` must lie within `bytes`.
#[inline(always)]
pub(in crate::cpu) unsafe fn load_four(bytes: *const u8, at: usize) -> i32 {
    // SAFETY: the caller's.
    unsafe { bytes.add(at).cast::<i32>().read_unaligned() }
}

/// The bias that is in the sums, because looked-up values have one.
fn sum_excess(lookup: &CodeLookup, sum: i32) -> i32 {
    lookup.bias.wrapping_mul(sum)
}

/// A table as signed values.
#[inline]
#[target_feature(enable = "avx2")]
fn tables_256<const DP: usize>(lookup: &CodeLookup, first: usize) -> [__m256i; DP] {
    let mut tables = [_mm256_setzero_si256(); DP];
    for (register, bytes) in tables.iter_mut().zip(lookup.tables.iter().skip(first)) {
        // SAFETY: 32 of 256 bytes.
        let biased = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        *register = _mm256_xor_si256(biased, _mm256_set1_epi8(BIAS as i8));
    }
    tables
}

/// As `sum_excess`; tables hold signed values here.
fn excess_256<const KIND: u8>(lookup: &CodeLookup, sum: i32) -> i32 {
    if KIND == PLAIN { sum_excess(lookup, sum) } else { 0 }
}

/// Values 0 and 2, then 1 and 3, of each four, as words.
#[inline]
#[target_feature(enable = "avx2")]
fn look_256<const KIND: u8>(codes: __m256i, table: __m256i) -> [__m256i; 2] {
    if KIND == PLAIN {
        let even = _mm256_and_si256(codes, _mm256_set1_epi16(0xFF));
        return [even, _mm256_srli_epi16::<8>(codes)];
    }
    let values = _mm256_shuffle_epi8(table, codes);
    let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(values));
    [even, _mm256_srai_epi16::<8>(values)]
}

/// `sum + even · parts[0] + odd · parts[1]`.
#[inline]
#[target_feature(enable = "avx2")]
fn add_256(sum: __m256i, values: [__m256i; 2], parts: [__m256i; 2]) -> __m256i {
    let even = _mm256_madd_epi16(values[0], parts[0]);
    let odd = _mm256_madd_epi16(values[1], parts[1]);
    _mm256_add_epi32(sum, _mm256_add_epi32(even, odd))
}

/// Codes of a plane, from bit `shift` of each byte on.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn cut_256<const WIDTH: usize>(bytes: __m256i, shift: usize) -> __m256i {
    if WIDTH == 8 {
        return bytes;
    }
    // A constant where this is called: one instruction.
    let down = _mm256_srl_epi16(bytes, _mm_cvtsi64_si128(shift as i64));
    _mm256_and_si256(down, _mm256_set1_epi8((u8::MAX >> (8 - WIDTH)) as i8))
}

/// Two accumulators of 8 tokens per row: 8 registers of 16.
#[target_feature(enable = "avx2")]
fn keys_256<const R: usize, const DP: usize, const KIND: u8, const WIDTH: usize>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    let TileCodes { bytes, per_row, prefetch, .. } = codes;
    // Groups of four codes that begin a byte, those of one plane.
    let groups = bytes.len() / 128;
    let mut prefetch = prefetch.in_steps(2 * lookup.dims / DP * groups);
    for half in 0..2 {
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for pass in (0..lookup.dims).step_by(DP) {
            let tables = tables_256::<DP>(lookup, pass);
            for group in 0..groups {
                prefetch.next_step();
                // SAFETY: two quarters of 128 bytes, of which there are `groups`.
                let quarters = unsafe {
                    let at = bytes.as_ptr().add(128 * group + 64 * half);
                    [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())]
                };
                macro_rules! plane {
                    ($plane:literal) => {
                        let codes = quarters.map(|codes| cut_256::<WIDTH>(codes, $plane * WIDTH));
                        for d in 0..DP {
                            let values = codes.map(|codes| look_256::<KIND>(codes, tables[d]));
                            let at = (pass + d) * per_row + 4 * ($plane * groups + group);
                            for row in 0..R {
                                let (bytes, at) = (q.bytes.as_ptr(), 2 * (row * q.len + at));
                                let parts =
                                    // SAFETY: a row has `2 * q.len` bytes, eight for each group.
                                    unsafe { [load_four(bytes, at), load_four(bytes, at + 4)] };
                                let parts = parts.map(|part| _mm256_set1_epi32(part));
                                sums[row][0] = add_256(sums[row][0], values[0], parts);
                                sums[row][1] = add_256(sums[row][1], values[1], parts);
                            }
                        }
                    };
                }
                for_planes!(WIDTH, plane);
            }
        }
        for row in 0..R {
            let unit = _mm256_set1_ps(units[row]);
            let excess = _mm256_set1_epi32(excess_256::<KIND>(lookup, q.sums[row]));
            for (quarter, sum) in sums[row].into_iter().enumerate() {
                let sum = _mm256_sub_epi32(sum, excess);
                let out = &mut out[row * SPAN + 16 * half + 8 * quarter..][..8];
                let scores = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), unit);
                // SAFETY: eight scores.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), scores) };
            }
        }
    }
}

/// For 8 positions two channels, or one channel of 16: two accumulators per row, 8 registers of 16.
#[target_feature(enable = "avx2")]
fn values_256<const R: usize, const DP: usize, const KIND: u8, const WIDTH: usize>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let TileCodes { bytes, per_row, prefetch, .. } = codes;
    let end = target.first + target.count;
    let positions = if KIND == PLAIN { 16 } else { 8 };
    let blocks = lookup.dims / DP * target.count.div_ceil(positions);
    let mut prefetch = prefetch.in_steps(blocks * WIDTH * weights.len / TILE);
    for pass in (0..lookup.dims).step_by(DP) {
        let tables = tables_256::<2>(lookup, pass);
        for block in (target.first..end).step_by(positions) {
            let lanes = [(end - block).min(8), (end - block).clamp(8, 16) - 8];
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for (tile, bytes) in bytes.chunks_exact(codes.tile_bytes()).enumerate() {
                for group in 0..WIDTH {
                    prefetch.next_step();
                    let bytes = &bytes[4 * (group * per_row + block)..];
                    let first = load_256(bytes, lanes[0]);
                    let loaded = match KIND {
                        PLAIN if lanes[1] > 0 => [first, load_256(&bytes[32..], lanes[1])],
                        _ => [first; 2],
                    };
                    macro_rules! plane {
                        ($plane:literal) => {
                            let cut = |bytes| cut_256::<WIDTH>(bytes, $plane * WIDTH);
                            let values: [_; 2] = std::array::from_fn(|column| {
                                look_256::<KIND>(cut(loaded[column]), tables[column])
                            });
                            let at = tile * TILE + 4 * ($plane * WIDTH + group);
                            for row in 0..R {
                                let (bytes, at) =
                                    (weights.bytes.as_ptr(), 2 * (row * weights.len + at));
                                let parts =
                                    // SAFETY: a row has `2 * weights.len` bytes, eight to a group.
                                    unsafe { [load_four(bytes, at), load_four(bytes, at + 4)] };
                                let parts = parts.map(|part| _mm256_set1_epi32(part));
                                sums[row][0] = add_256(sums[row][0], values[0], parts);
                                sums[row][1] = add_256(sums[row][1], values[1], parts);
                            }
                        };
                    }
                    for_planes!(WIDTH, plane);
                }
            }
            for row in 0..R {
                let excess = _mm256_set1_epi32(excess_256::<KIND>(lookup, weights.sums[row]));
                for (half, sum) in sums[row].into_iter().enumerate() {
                    let (channel, position, lanes) = match KIND {
                        PLAIN => (pass, block + 8 * half, lanes[half]),
                        _ => (pass + half, block, lanes[0]),
                    };
                    if lanes == 0 {
                        continue;
                    }
                    let sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, excess));
                    let at = (row * lookup.dims + channel) * per_row + position;
                    let factors = target.factors.get(position..position + lanes);
                    add_sums(sum, target.units[row], factors, &mut out[at..at + lanes]);
                }
            }
        }
    }
}

/// Adds up to eight sums, times the unit and their factors.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn add_sums(sums: __m256, unit: f32, factors: Option<&[f32]>, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut::<8>() {
        let mut by = _mm256_set1_ps(unit);
        // SAFETY: eight values each.
        unsafe {
            if let Some(factors) = factors.and_then(<[f32]>::first_chunk::<8>) {
                by = _mm256_mul_ps(_mm256_loadu_ps(factors.as_ptr()), by);
            }
            let before = _mm256_loadu_ps(out.as_ptr());
            let after = _mm256_add_ps(before, _mm256_mul_ps(sums, by));
            _mm256_storeu_ps(out.as_mut_ptr(), after);
        }
        return;
    }
    let mut eight = [0f32; 8];
    // SAFETY: eight values.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), sums) };
    for (lane, out) in out.iter_mut().enumerate() {
        *out += eight[lane] * factors.map_or(unit, |factors| factors[lane] * unit);
    }
}

/// Loads up to eight words; the rest of the register is zero.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_256(bytes: &[u8], words: usize) -> __m256i {
    let bytes = &bytes[..4 * words];
    if let Some(full) = bytes.first_chunk::<32>() {
        // SAFETY: 32 bytes.
        return unsafe { _mm256_loadu_si256(full.as_ptr().cast()) };
    }
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let some = _mm256_cmpgt_epi32(_mm256_set1_epi32(words as i32), lanes);
    // SAFETY: none but the first words are read.
    unsafe { _mm256_maskload_epi32(bytes.as_ptr().cast(), some) }
}
