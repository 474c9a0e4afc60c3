//! `bf16.rs` in AVX-512: `vpermw` makes bf16 of 32 codes, `vdpbf16ps` multiplies two of them.
//!
//! A word of two bytes holds codes of two neighbours of a quad in its halves, and of another plane
//! above each: shifted by the plane it names the first neighbour's level, by eight more the
//! second's. So a register of levels has the first and third, or the second and fourth, of each
//! quad side by side, and factors are swapped to match.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::avx512::for_planes;
use crate::cpu::int_dot::{TileCodes, VECTOR_ROWS as ROWS};
use crate::cpu::int_operands::FoldScales;
use crate::cpu::simd_vector::SimdVector;
use crate::cpu::simd_vector::x86::Avx512Vector;
use crate::cpu::span_scores::{SPAN, TILE};
use crate::cpu::uniform::bf16::{Bf16Levels, CODES, LANES, STEP};
use crate::cpu::uniform::minima::WeightedTokens;
use std::arch::x86_64::*;

/// Bytes of a register.
const REGISTER: usize = 64;

/// Calls `$f::<rows, width>`.
macro_rules! by_shape {
    ($f:ident, $rows:expr, $args:tt $(, $width:literal)?) => {
        match $rows {
            1 => $f::<1 $(, $width)?> $args,
            2 => $f::<2 $(, $width)?> $args,
            3 => $f::<3 $(, $width)?> $args,
            ROWS => $f::<ROWS $(, $width)?> $args,
            rows => unreachable!("{rows} rows at once"),
        }
    };
    ($f:ident, $rows:expr, $width:expr, $args:tt) => {
        match $width {
            1 => by_shape!($f, $rows, $args, 1),
            2 => by_shape!($f, $rows, $args, 2),
            4 => by_shape!($f, $rows, $args, 4),
            8 => by_shape!($f, $rows, $args, 8),
            width => unreachable!("codes of {width} bits"),
        }
    };
}

pub(super) use by_shape;

/// Writes queries (`[rows, n]`) times steps to `out`, and what minima add to `bases`. Only where
/// there is AVX512-BF16 are there [`Bf16Levels`].
pub(super) fn fold_queries(
    queries: &[f32],
    bases: &mut [f32],
    scales: FoldScales<'_>,
    levels: &Bf16Levels,
    out: &mut [u16],
) {
    let FoldScales { steps, minima } = scales;
    let rows = bases.len();
    let n = queries.len() / rows;
    assert!((1..=ROWS).contains(&rows) && n.is_multiple_of(STEP), "bf16: queries");
    assert!(steps.len() == 2 * n && minima.len() == 2 * n, "bf16: scales");
    assert_eq!(out.len(), queries.len(), "bf16: factors");
    let from = queries.as_ptr();
    let scales =
        ScalePointers { steps: steps.as_ptr(), minima: minima.as_ptr(), middle: levels.middle };
    let mut lanes = [[0f32; LANES]; ROWS];
    let (to, to_bases) = (out.as_mut_ptr(), lanes.as_mut_ptr());
    // SAFETY: the instructions were detected, lengths are as asserted.
    let sums = unsafe {
        by_shape!(fold_rows, rows, (from, n, scales, n, to, to_bases));
        sum_rows(&lanes)
    };
    bases.copy_from_slice(&sums[..rows]);
}

/// # Safety
/// There is AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn sum_rows(lanes: &[[f32; LANES]; ROWS]) -> [f32; ROWS] {
    Avx512Vector::lane_sums([0, 1, 2, 3].map(|row: usize| _mm512_loadu_ps(lanes[row].as_ptr())))
}

/// Steps and minima, f16, and how many steps level zero is above the minimum.
#[derive(Clone, Copy)]
struct ScalePointers {
    steps: *const u8,
    minima: *const u8,
    middle: f32,
}

/// Multiplies `n` values of rows so far apart with steps, f16 as minima are, and adds to `bases`
/// what minima come to.
///
/// # Safety
/// There is AVX512-BF16; pointers are to `n` values of each row, `n` a multiple of [`STEP`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")]
unsafe fn fold_rows<const R: usize>(
    values: *const f32,
    stride: usize,
    scales: ScalePointers,
    n: usize,
    out: *mut u16,
    bases: *mut [f32; LANES],
) {
    let ScalePointers { steps, minima, middle } = scales;
    let middle = _mm512_set1_ps(middle);
    let mut sums: [__m512; R] = std::array::from_fn(|row| _mm512_loadu_ps(bases.add(row).cast()));
    for at in (0..n).step_by(STEP) {
        let step = [0, LANES].map(|half| Avx512Vector::load_f16(steps.add(2 * (at + half)), LANES));
        let minimum =
            [0, LANES].map(|half| Avx512Vector::load_f16(minima.add(2 * (at + half)), LANES));
        let centre = [0, 1].map(|half: usize| _mm512_fmadd_ps(step[half], middle, minimum[half]));
        for row in 0..R {
            let from = values.add(row * stride + at);
            let value = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(LANES))];
            let sum = _mm512_fmadd_ps(value[0], centre[0], sums[row]);
            sums[row] = _mm512_fmadd_ps(value[1], centre[1], sum);
            let factors = [0, 1].map(|half: usize| _mm512_mul_ps(value[half], step[half]));
            let out = out.add(row * n + at);
            _mm512_storeu_si512(out.cast(), round_to_bf16(factors));
        }
    }
    for row in 0..R {
        _mm512_storeu_ps(bases.add(row).cast(), sums[row]);
    }
}

/// Rounds to bf16, the middle two of each four swapped.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_to_bf16(halves: [__m512; 2]) -> __m512i {
    let [low, high] = halves;
    let swap = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    let words = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: both are 512 bits.
    let words = unsafe { std::mem::transmute::<__m512bh, __m512i>(words) };
    _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(swap))
}

/// Levels of two of the quad's codes in `plane` of a register of codes: the first and third, or
/// the second and fourth.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn look_up_levels(codes: __m512i, shift: usize, table: __m512i) -> __m512i {
    // A constant where this is called: one instruction, or none.
    let down = match shift {
        0 => codes,
        _ => _mm512_srl_epi16(codes, _mm_cvtsi64_si128(shift as i64)),
    };
    _mm512_permutexvar_epi16(down, table)
}

/// Adds products of two levels in each lane with the two factors at `at`.
///
/// # Safety
/// There is AVX512-BF16, and two factors are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_products(sum: __m512, levels: __m512i, at: *const u16) -> __m512 {
    let factors = _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
    // SAFETY: all are 512 bits.
    let [levels, factors] = std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([levels, factors]);
    _mm512_dpbf16_ps(sum, levels, factors)
}

/// Writes the scores of a few rows of factors against a tile, rows [`SPAN`] apart.
pub(super) fn score_tile(
    codes: TileCodes<'_>,
    levels: &Bf16Levels,
    factors: &[u16],
    bases: &[f32],
    out: &mut [f32],
) {
    let rows = bases.len();
    assert_eq!(codes.bytes.len(), codes.tile_bytes(), "bf16: one tile");
    assert_eq!(factors.len(), rows * codes.per_row, "bf16: factors");
    assert!((codes.per_row * codes.width as usize).is_multiple_of(32), "bf16: planes");
    assert!(out.len() >= (rows - 1) * SPAN + TILE, "bf16: scores");
    // SAFETY: lengths are as asserted, and the instructions were detected.
    unsafe { by_shape!(key_tile, rows, codes.width, (codes, levels, factors, bases, out)) }
}

/// # Safety
/// As `score_tile` asserts, and there is AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn key_tile<const R: usize, const WIDTH: usize>(
    tile: TileCodes<'_>,
    of: &Bf16Levels,
    factors: &[u16],
    bases: &[f32],
    out: &mut [f32],
) {
    let table = _mm512_loadu_si512(of.table.as_ptr().cast());
    let (groups, n) = (tile.bytes.len() / (2 * REGISTER), tile.per_row);
    let mut prefetch = tile.prefetch.in_steps(groups);
    // Of two registers of tokens, by which codes of a quad.
    let mut sums = [[[_mm512_setzero_ps(); 2]; 2]; R];
    for group in 0..groups {
        prefetch.next_step();
        let at = tile.bytes.as_ptr().add(2 * REGISTER * group);
        let halves = [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(REGISTER).cast())];
        macro_rules! plane {
            ($plane:literal) => {
                let at = factors.as_ptr().add(4 * ($plane * groups + group));
                for odd in 0..2 {
                    for half in 0..2 {
                        let codes = look_up_levels(halves[half], $plane * WIDTH + 8 * odd, table);
                        for row in 0..R {
                            let at = at.add(row * n + 2 * odd);
                            sums[row][half][odd] = add_products(sums[row][half][odd], codes, at);
                        }
                    }
                }
            };
        }
        for_planes!(WIDTH, plane);
    }
    for row in 0..R {
        let base = _mm512_set1_ps(bases[row]);
        for half in 0..2 {
            let [first, second] = sums[row][half];
            let score = _mm512_add_ps(_mm512_add_ps(first, second), base);
            _mm512_storeu_ps(out.as_mut_ptr().add(row * SPAN + LANES * half), score);
        }
    }
}

/// Adds the weighted codes of a few tiles to `sums` (`[rows, positions]`), and to `bases`
/// (`[groups of channels, rows]`) what minima come to; factors are room for a group's.
pub(super) fn add_tiles(
    codes: TileCodes<'_>,
    levels: &Bf16Levels,
    of: WeightedTokens<'_>,
    factors: &mut [u16],
    bases: &mut [[f32; LANES]],
    sums: &mut [f32],
) {
    let (rows, tokens, groups) = (of.rows, of.tokens, codes.per_row / of.channels);
    assert!(of.channels.is_multiple_of(STEP), "bf16: channels");
    assert_eq!(codes.per_row, groups * of.channels, "bf16: groups");
    assert_eq!(codes.bytes.len(), tokens / TILE * codes.tile_bytes(), "bf16: codes");
    assert!(tokens.is_multiple_of(TILE) && tokens <= SPAN, "bf16: tokens");
    assert!(of.weights.len() >= (rows - 1) * SPAN + tokens, "bf16: weights");
    let scales = 2 * groups * tokens;
    assert!(of.steps.len() == scales && of.minima.len() == scales, "bf16: scales");
    let size = rows * tokens;
    assert!(factors.len() >= size && bases.len() >= groups * ROWS, "bf16: room");
    assert_eq!(sums.len(), rows * codes.per_row, "bf16: sums");
    // SAFETY: lengths are as asserted, and the instructions were detected.
    unsafe {
        by_shape!(add_weighted, rows, codes.width, (codes, levels, of, factors, bases, sums));
    }
}

/// # Safety
/// As `add_tiles` asserts, and there is AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")]
unsafe fn add_weighted<const R: usize, const WIDTH: usize>(
    codes: TileCodes<'_>,
    of: &Bf16Levels,
    from: WeightedTokens<'_>,
    factors: &mut [u16],
    bases: &mut [[f32; LANES]],
    sums: &mut [f32],
) {
    let TileCodes { per_row, prefetch, .. } = codes;
    let WeightedTokens { tokens, channels, .. } = from;
    let table = _mm512_loadu_si512(of.table.as_ptr().cast());
    let mut prefetch = prefetch.in_steps(per_row / STEP * (tokens / TILE) * WIDTH);
    for group in 0..per_row / channels {
        let scales = 2 * group * tokens;
        let scales = ScalePointers {
            steps: from.steps.as_ptr().add(scales),
            minima: from.minima.as_ptr().add(scales),
            middle: of.middle,
        };
        let (to, to_bases) = (factors.as_mut_ptr(), bases.as_mut_ptr().add(group * ROWS));
        fold_rows::<R>(from.weights.as_ptr(), SPAN, scales, tokens, to, to_bases);
        for block in (group * channels..(group + 1) * channels).step_by(STEP) {
            // Of two registers of positions, by which tokens of a quad.
            let mut totals = [[[_mm512_setzero_ps(); 2]; 2]; R];
            for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
                for quad in 0..WIDTH {
                    prefetch.next_step();
                    let at = bytes.as_ptr().add(4 * (quad * per_row + block));
                    let halves = [
                        _mm512_loadu_si512(at.cast()),
                        _mm512_loadu_si512(at.add(REGISTER).cast()),
                    ];
                    macro_rules! plane {
                        ($plane:literal) => {
                            let at = tile * TILE + 4 * ($plane * WIDTH + quad);
                            let at = factors.as_ptr().add(at);
                            for odd in 0..2 {
                                for half in 0..2 {
                                    let codes = look_up_levels(
                                        halves[half],
                                        $plane * WIDTH + 8 * odd,
                                        table,
                                    );
                                    for row in 0..R {
                                        let at = at.add(row * tokens + 2 * odd);
                                        let total = &mut totals[row][half][odd];
                                        *total = add_products(*total, codes, at);
                                    }
                                }
                            }
                        };
                    }
                    for_planes!(WIDTH, plane);
                }
            }
            for row in 0..R {
                for half in 0..2 {
                    let [first, second] = totals[row][half];
                    let at = sums.as_mut_ptr().add(row * per_row + block + LANES * half);
                    let sum = _mm512_add_ps(_mm512_loadu_ps(at), _mm512_add_ps(first, second));
                    _mm512_storeu_ps(at, sum);
                }
            }
        }
    }
}

const _: () = assert!(2 * CODES == REGISTER, "a table is a register");
