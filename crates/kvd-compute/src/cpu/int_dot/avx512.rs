//! `mod.rs` in AVX-512: `vpdpbusd` of the high and the low parts, tables in registers.
//!
//! Everything here is reached through the two functions at the top, whose callers in `mod.rs`
//! know that the machine has the instructions and have checked all lengths; pointers stay inside
//! those.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.

use crate::cpu::int_dot::avx2::load_four;
use crate::cpu::int_dot::{BIAS, CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{IntRows, ScaledRows};
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::x86_64::*;

/// Codes are values.
const PLAIN: u8 = 0;
/// A table of at most 64 bytes.
pub(in crate::cpu) const TABLE_64: u8 = 1;
/// A table of 256 bytes.
pub(in crate::cpu) const TABLE_256: u8 = 2;

fn lookup_kind(lookup: &CodeLookup) -> u8 {
    match (lookup.tables.is_empty(), lookup.bits) {
        (true, _) => PLAIN,
        (false, ..=6) => TABLE_64,
        _ => TABLE_256,
    }
}

/// Calls `$f::<rows, digits of a factor, channels per pass, kind, width>`.
macro_rules! by_rows {
    ($f:ident, $rows:expr, ($($shape:tt)*), $args:tt) => {
        match $rows {
            (1, 1) => $f::<1, 1, $($shape)*> $args,
            (2, 1) => $f::<2, 1, $($shape)*> $args,
            (3, 1) => $f::<3, 1, $($shape)*> $args,
            (4, 1) => $f::<4, 1, $($shape)*> $args,
            (1, 2) => $f::<1, 2, $($shape)*> $args,
            (2, 2) => $f::<2, 2, $($shape)*> $args,
            (3, 2) => $f::<3, 2, $($shape)*> $args,
            (4, 2) => $f::<4, 2, $($shape)*> $args,
            (rows, digits) => unreachable!("{rows} rows of {digits} digits"),
        }
    };
}

pub(in crate::cpu) use by_rows;

/// As `by_rows`, whatever the kind and the width.
macro_rules! by_shape {
    ($f:ident, $rows:expr, $kind:expr, $width:expr, $args:tt) => {
        match ($kind, $width) {
            (PLAIN, 1) => by_rows!($f, $rows, (1, PLAIN, 1), $args),
            (PLAIN, 2) => by_rows!($f, $rows, (1, PLAIN, 2), $args),
            (PLAIN, 4) => by_rows!($f, $rows, (1, PLAIN, 4), $args),
            (PLAIN, _) => by_rows!($f, $rows, (1, PLAIN, 8), $args),
            (TABLE_64, 1) => by_rows!($f, $rows, (2, TABLE_64, 1), $args),
            (TABLE_64, 2) => by_rows!($f, $rows, (2, TABLE_64, 2), $args),
            (TABLE_64, 4) => by_rows!($f, $rows, (2, TABLE_64, 4), $args),
            (TABLE_64, _) => by_rows!($f, $rows, (2, TABLE_64, 8), $args),
            _ => by_rows!($f, $rows, (2, TABLE_256, 8), $args),
        }
    };
}

/// # Safety
/// The machine has AVX-512 with VNNI and VBMI, and lengths are as `int_dot::key_dots` wants them.
pub(super) unsafe fn key_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = ((q.units.len(), q.rows.digits), lookup_kind(lookup));
    assert!(kind != TABLE_256 || codes.width == 8, "key_dots: wide codes are bytes");
    // SAFETY: the caller's.
    unsafe { by_shape!(key_tiles, rows, kind, codes.width, (codes, lookup, q, out)) }
}

/// # Safety
/// The machine has AVX-512 with VNNI and VBMI, and lengths are as `int_dot::value_dots` wants them.
pub(super) unsafe fn value_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = ((weights.sums.len(), weights.digits), lookup_kind(lookup));
    assert!(kind != TABLE_256 || codes.width == 8, "value_dots: wide codes are bytes");
    // SAFETY: the caller's.
    unsafe { by_shape!(sum_rows, rows, kind, codes.width, (codes, lookup, weights, target, out)) }
}

/// The tables of channels `first..first + DP`, as many registers of each as its kind has.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_tables<const DP: usize, const KIND: u8>(
    lookup: &CodeLookup,
    first: usize,
) -> [[__m512i; 4]; DP] {
    let registers = match KIND {
        PLAIN => 0,
        TABLE_64 => 1,
        _ => 4,
    };
    let mut tables = [[_mm512_setzero_si512(); 4]; DP];
    for (channel, table) in tables.iter_mut().enumerate() {
        for (at, register) in table.iter_mut().enumerate().take(registers) {
            let bytes = &lookup.tables[first + channel].as_chunks::<64>().0[at];
            // SAFETY: 64 bytes.
            *register = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
        }
    }
    tables
}

/// A table of fewer than 64 entries is repeated, so that bits above a code do not matter.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(in crate::cpu) fn look_up<const KIND: u8>(codes: __m512i, table: &[__m512i; 4]) -> __m512i {
    match KIND {
        PLAIN => codes,
        TABLE_64 => _mm512_permutexvar_epi8(codes, table[0]),
        _ => {
            let low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
            let high = _mm512_permutex2var_epi8(table[2], codes, table[3]);
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), low, high)
        }
    }
}

/// Codes of a plane, from bit `shift` of each byte on; bits above them remain where look-ups do
/// not mind.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn cut_plane<const KIND: u8, const WIDTH: usize>(bytes: __m512i, shift: usize) -> __m512i {
    let down = match shift {
        0 => bytes,
        // A constant where this is called: one instruction.
        _ => _mm512_srl_epi16(bytes, _mm_cvtsi64_si128(shift as i64)),
    };
    if KIND == PLAIN && WIDTH < 8 {
        return _mm512_and_si512(down, _mm512_set1_epi8((u8::MAX >> (8 - WIDTH)) as i8));
    }
    down
}

/// Calls `$step!(plane)` for each plane of codes of `$width` bits: written out, since shifts
/// are to be constants.
macro_rules! for_planes {
    ($width:ident, $step:ident) => {
        $step!(0);
        if $width <= 4 {
            $step!(1);
        }
        if $width <= 2 {
            $step!(2);
            $step!(3);
        }
        if $width == 1 {
            $step!(4);
            $step!(5);
            $step!(6);
            $step!(7);
        }
    };
}
pub(in crate::cpu) use for_planes;

/// The sum of both digits' sums, where there are two.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn join_digits<const D: usize>(high: __m512i, low: __m512i) -> __m512i {
    if D == 1 { high } else { _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low) }
}

/// Accumulators of both digits, which begin less what their rows' sums will be too large by: one
/// unit of `bias` for each unit of `sums`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn biased_sums<const R: usize, const D: usize, const C: usize>(
    bias: i32,
    sums: &[i32],
) -> [[[__m512i; C]; R]; 2] {
    let mut digits = [[[_mm512_setzero_si512(); C]; R]; 2];
    // The low digits' where there are two, else the only ones.
    let units = &mut digits[D - 1];
    for row in 0..R {
        units[row] = [_mm512_set1_epi32(bias.wrapping_mul(sums[row]).wrapping_neg()); C];
    }
    digits
}

/// The parts of a factor of four terms, each repeated to fill a register.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_factors<const D: usize>(
    rows: IntRows<'_>,
    row: usize,
    at: usize,
) -> [__m512i; 2] {
    let (bytes, at) = (rows.bytes.as_ptr(), D * row * rows.len + at);
    // SAFETY: a row has `D` times `len` bytes, and four from `at` on are of its first digits.
    let parts = unsafe { [load_four(bytes, at), load_four(bytes, at + (D - 1) * rows.len)] };
    parts.map(|part| _mm512_set1_epi32(part))
}

/// Tile after tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
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
        key_tile::<R, D, DP, KIND, WIDTH>(codes, lookup, q, &mut out[at..]);
    }
}

/// Two accumulators of 16 tokens for each row and digit: at most 16 registers of 32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn key_tile<const R: usize, const D: usize, const DP: usize, const KIND: u8, const WIDTH: usize>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    let TileCodes { bytes, per_row, prefetch, .. } = codes;
    // Groups of four codes that begin a byte, those of one plane.
    let groups = bytes.len() / 128;
    let mut prefetch = prefetch.in_steps(groups * lookup.dims / DP);
    let [mut high, mut low] = biased_sums::<R, D, 2>(lookup.bias, q.sums);
    for pass in (0..lookup.dims).step_by(DP) {
        let tables = load_tables::<DP, KIND>(lookup, pass);
        for group in 0..groups {
            prefetch.next_step();
            // SAFETY: two halves of 128 bytes, of which there are `groups`.
            let halves = unsafe {
                let at = bytes.as_ptr().add(128 * group);
                [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())]
            };
            macro_rules! plane {
                ($plane:literal) => {
                    let codes = halves.map(|half| cut_plane::<KIND, WIDTH>(half, $plane * WIDTH));
                    for d in 0..DP {
                        let values = codes.map(|codes| look_up::<KIND>(codes, &tables[d]));
                        let at = (pass + d) * per_row + 4 * ($plane * groups + group);
                        for row in 0..R {
                            let (bytes, at) = (q.bytes.as_ptr(), D * row * q.len + at);
                            let low_at = at + (D - 1) * q.len;
                            // SAFETY: a row has `D * q.len` bytes and `at` is four bytes before
                            // the end of its first digits at most.
                            let parts = unsafe { [load_four(bytes, at), load_four(bytes, low_at)] };
                            let parts = parts.map(|part| _mm512_set1_epi32(part));
                            for half in 0..2 {
                                high[row][half] =
                                    _mm512_dpbusd_epi32(high[row][half], values[half], parts[0]);
                                if D == 2 {
                                    let sum = low[row][half];
                                    low[row][half] =
                                        _mm512_dpbusd_epi32(sum, values[half], parts[1]);
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
        let unit = _mm512_set1_ps(units[row]);
        for half in 0..2 {
            let sum = _mm512_cvtepi32_ps(join_digits::<D>(high[row][half], low[row][half]));
            let out = &mut out[row * SPAN + 16 * half..][..16];
            // SAFETY: 16 scores.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(sum, unit)) };
        }
    }
}

/// Registers of positions that are worked on at once: 16 of one channel twice, or of two channels.
const COLUMNS: usize = 2;

/// Positions of a step: `DP` channels of each share what is read of the weights.
const fn positions_per_step<const DP: usize>() -> usize {
    16 * COLUMNS / DP
}

/// Whether values are multiplied less [`BIAS`]: a weight of one byte has no sign, and then values
/// need one.
const fn needs_signs<const D: usize, const KIND: u8, const WIDTH: usize>() -> bool {
    D == 1 && (KIND != PLAIN || WIDTH == 8)
}

/// The bytes of the first lanes.
fn lanes_mask(lanes: usize) -> u64 {
    u64::MAX.checked_shr(64 - 4 * lanes as u32).unwrap_or(0)
}

/// Takes [`BIAS`] off each byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn flip_signs(registers: &mut [__m512i]) {
    for bytes in registers {
        *bytes = _mm512_xor_si512(*bytes, _mm512_set1_epi8(BIAS as i8));
    }
}

/// Adds values times the digits of a weight.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(in crate::cpu) fn add_weighted<const D: usize>(
    high: &mut __m512i,
    low: &mut __m512i,
    values: __m512i,
    weight: [__m512i; 2],
) {
    if D == 1 {
        *high = _mm512_dpbusd_epi32(*high, weight[0], values);
    } else {
        *high = _mm512_dpbusd_epi32(*high, values, weight[0]);
        *low = _mm512_dpbusd_epi32(*low, values, weight[1]);
    }
}

/// Sums of all tiles, by row.
///
/// An accumulator per row, register and digit: at most 16 registers of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn sum_rows<const R: usize, const D: usize, const DP: usize, const KIND: u8, const WIDTH: usize>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (per_row, end) = (codes.per_row, target.first + target.count);
    let step = positions_per_step::<DP>();
    let blocks = lookup.dims / DP * target.count.div_ceil(step);
    let mut prefetch = codes.prefetch.in_steps(blocks * WIDTH * weights.len / TILE);
    for pass in (0..lookup.dims).step_by(DP) {
        let mut tables = load_tables::<DP, KIND>(lookup, pass);
        let bias = lookup.bias - if needs_signs::<D, KIND, WIDTH>() { BIAS } else { 0 };
        if needs_signs::<D, KIND, WIDTH>() {
            flip_signs(tables.as_flattened_mut());
        }
        for block in (target.first..end).step_by(step) {
            // Of the second register too, where it holds other positions.
            let lanes = [(end - block).min(16), (end - block).clamp(16, 32) - 16];
            let masks = lanes.map(lanes_mask);
            let [mut high, mut low] = biased_sums::<R, D, COLUMNS>(bias, weights.sums);
            for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
                for group in 0..WIDTH {
                    prefetch.next_step();
                    // SAFETY: as many positions of four bytes as lanes, all of them codes.
                    let load = |column: usize| unsafe {
                        let at = 4 * (group * per_row + block + 16 * column);
                        let from = bytes.as_ptr().wrapping_add(at);
                        _mm512_maskz_loadu_epi8(masks[column], from.cast())
                    };
                    let mut loaded = [load(0), if DP == 1 { load(1) } else { load(0) }];
                    if needs_signs::<D, KIND, WIDTH>() && KIND == PLAIN {
                        flip_signs(&mut loaded);
                    }
                    macro_rules! plane {
                        ($plane:literal) => {
                            let values: [_; COLUMNS] = std::array::from_fn(|column| {
                                let code = cut_plane::<KIND, WIDTH>(loaded[column], $plane * WIDTH);
                                look_up::<KIND>(code, &tables[column % DP])
                            });
                            let at = tile * TILE + 4 * ($plane * WIDTH + group);
                            for row in 0..R {
                                let weight = load_factors::<D>(weights, row, at);
                                for c in 0..COLUMNS {
                                    let (high, low) = (&mut high[row][c], &mut low[row][c]);
                                    add_weighted::<D>(high, low, values[c], weight);
                                }
                            }
                        };
                    }
                    for_planes!(WIDTH, plane);
                }
            }
            for row in 0..R {
                for c in 0..COLUMNS {
                    let sum = _mm512_cvtepi32_ps(join_digits::<D>(high[row][c], low[row][c]));
                    let (channel, column) = if DP == 1 { (pass, c) } else { (pass + c, 0) };
                    let (lanes, position) = (lanes[column], block + 16 * column);
                    let at = (row * lookup.dims + channel) * per_row + position;
                    add_sums(sum, target.units[row], SumPlace { lanes, position, at }, target, out);
                }
            }
        }
    }
}

/// Where the sums of a register go.
#[derive(Clone, Copy)]
struct SumPlace {
    lanes: usize,
    /// The position of the first lane.
    position: usize,
    /// Where its sum lies in the output.
    at: usize,
}

/// Adds up to 16 sums, times the unit and their factors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add_sums(sums: __m512, unit: f32, place: SumPlace, target: SumTarget<'_>, out: &mut [f32]) {
    let SumPlace { lanes, position, at } = place;
    let lanes = (u32::from(u16::MAX) >> (16 - lanes)) as u16;
    let mut factor = _mm512_set1_ps(unit);
    if !target.factors.is_empty() {
        let factors = target.factors.as_ptr().wrapping_add(position);
        // SAFETY: there are as many factors as positions.
        factor = _mm512_mul_ps(unsafe { _mm512_maskz_loadu_ps(lanes, factors) }, factor);
    }
    let out = out.as_mut_ptr().wrapping_add(at);
    // SAFETY: the lanes of the mask are positions of the output.
    unsafe {
        let before = _mm512_maskz_loadu_ps(lanes, out);
        let after = _mm512_add_ps(before, _mm512_mul_ps(sums, factor));
        _mm512_mask_storeu_ps(out, lanes, after);
    }
}
