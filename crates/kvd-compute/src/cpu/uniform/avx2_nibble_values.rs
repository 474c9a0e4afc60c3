//! Values of `nibbles.rs` in AVX2: `vpmaddubsw` of weights, which have no sign, and codes, which
//! get one as they are cut.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::avx2::{cut_256, load_four};
use crate::cpu::int_dot::{TileCodes, VECTOR_ROWS as ROWS};
use crate::cpu::simd_vector::SimdVector;
use crate::cpu::simd_vector::x86::Avx2Vector;
use crate::cpu::span_scores::{SPAN, TILE};
use crate::cpu::uniform::avx2_nibbles::{largest_of, order_bytes, spread_halves, with_reciprocals};
use crate::cpu::uniform::avx512_bf16::by_shape;
use crate::cpu::uniform::minima::WeightedTokens;
use crate::cpu::uniform::nibbles::{CodeOffset, LANES, TOKENS, TOP_WEIGHT, WeightScratch};
use std::arch::x86_64::*;

/// The largest of each [`TOKENS`] steps, f16, and their reciprocals, in the first two lanes.
///
/// # Safety
/// There are 32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn largest_of_sixteens(at: *const u8) -> [__m128; 2] {
    let load = |i: usize| _mm_loadu_si128(at.add(16 * i).cast());
    let (a, b) = (_mm_max_epu16(load(0), load(1)), _mm_max_epu16(load(2), load(3)));
    with_reciprocals(_mm_cvtph_ps(_mm_unpacklo_epi16(largest_of(a), largest_of(b))))
}

/// Adds the weighted codes of a few tiles to `sums` (`[rows, positions]`), and to `bases`
/// (`[groups of channels, rows]`) what minima come to.
pub(super) fn add_tiles(
    codes: TileCodes<'_>,
    offset: CodeOffset,
    of: WeightedTokens<'_>,
    scratch: &mut WeightScratch,
    bases: &mut [[f32; LANES]],
    sums: &mut [f32],
) {
    let (rows, tokens, groups) = (of.rows, of.tokens, codes.per_row / of.channels);
    assert!((1..=ROWS).contains(&rows), "nibbles: rows");
    assert!(of.channels.is_multiple_of(8), "nibbles: channels");
    assert_eq!(codes.per_row, groups * of.channels, "nibbles: groups");
    assert_eq!(codes.bytes.len(), tokens / TILE * codes.tile_bytes(), "nibbles: codes");
    assert!(tokens.is_multiple_of(TILE) && tokens <= SPAN, "nibbles: tokens");
    assert!(of.weights.len() >= (rows - 1) * SPAN + tokens, "nibbles: weights");
    let scales = 2 * groups * tokens;
    assert!(of.steps.len() == scales && of.minima.len() == scales, "nibbles: scales");
    assert!(bases.len() >= groups * ROWS, "nibbles: bases");
    assert_eq!(sums.len(), rows * codes.per_row, "nibbles: sums");
    // SAFETY: lengths are as asserted, and the instructions were detected.
    unsafe {
        by_shape!(add_weighted, rows, codes.width, (codes, offset, of, scratch, bases, sums));
    }
}

/// Units of [`TOKENS`] weights, by row.
type WeightUnits = [[f32; ROWS]; SPAN / TOKENS];

/// Divides weights by units, and returns those.
///
/// # Safety
/// As `add_tiles` asserts, and there is AVX2.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scale_weights<const R: usize>(
    of: &WeightedTokens<'_>,
    gain: f32,
    out: &mut [f32; ROWS * SPAN],
) -> WeightUnits {
    let mut units: WeightUnits = [[0.0; ROWS]; SPAN / TOKENS];
    for block in 0..of.tokens / TOKENS {
        let mut weights = [[_mm256_setzero_ps(); 2]; R];
        let mut largest = [_mm256_setzero_ps(); ROWS];
        for row in 0..R {
            let at = of.weights.as_ptr().add(row * SPAN + block * TOKENS);
            weights[row] = [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))];
            largest[row] = _mm256_max_ps(weights[row][0], weights[row][1]);
        }
        let largest = _mm_loadu_ps(Avx2Vector::lane_maxima(largest).as_ptr());
        let unit = _mm_mul_ps(largest, _mm_set1_ps(1.0 / TOP_WEIGHT));
        let [unit, inverse] = with_reciprocals(unit);
        _mm_storeu_ps(units[block].as_mut_ptr(), _mm_mul_ps(unit, _mm_set1_ps(gain)));
        let mut inverses = [0f32; ROWS];
        _mm_storeu_ps(inverses.as_mut_ptr(), inverse);
        for row in 0..R {
            let by = _mm256_set1_ps(inverses[row]);
            let to = out.as_mut_ptr().add(row * SPAN + block * TOKENS);
            _mm256_storeu_ps(to, _mm256_mul_ps(weights[row][0], by));
            _mm256_storeu_ps(to.add(8), _mm256_mul_ps(weights[row][1], by));
        }
    }
    units
}

/// Steps and minima of a group's tokens, f16, and how many steps its centre is above the minimum.
#[derive(Clone, Copy)]
struct ScalePointers {
    steps: *const u8,
    minima: *const u8,
    centre: f32,
}

/// Cuts weights times steps of a group of channels, and adds what minima come to to `bases`.
///
/// # Safety
/// As `add_tiles` asserts, there is AVX2, and scales are of `tokens` tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold_weights<const R: usize>(
    of: &WeightedTokens<'_>,
    scratch: &mut WeightScratch,
    scales: ScalePointers,
    units: &mut WeightUnits,
    bases: &mut [[f32; LANES]],
) {
    let ScalePointers { steps, minima, centre } = scales;
    let centre = _mm256_set1_ps(centre);
    let mut sums = [_mm256_setzero_ps(); R];
    for row in 0..R {
        sums[row] = _mm256_loadu_ps(bases[row].as_ptr());
    }
    for at in (0..of.tokens).step_by(2 * TOKENS) {
        let [most, inverse] = largest_of_sixteens(steps.add(2 * at));
        let inverses =
            [_mm256_broadcastss_ps(inverse), _mm256_broadcastss_ps(_mm_movehdup_ps(inverse))];
        let two = units.as_mut_ptr().add(at / TOKENS).cast::<f32>();
        _mm256_storeu_ps(two, _mm256_mul_ps(_mm256_loadu_ps(two), spread_halves(most)));
        let (mut folds, mut centres) = ([_mm256_setzero_ps(); 4], [_mm256_setzero_ps(); 4]);
        for i in 0..4 {
            let step = Avx2Vector::load_f16(steps.add(2 * at + 16 * i), 8);
            let minimum = Avx2Vector::load_f16(minima.add(2 * at + 16 * i), 8);
            folds[i] = _mm256_mul_ps(step, inverses[i / 2]);
            centres[i] = _mm256_fmadd_ps(step, centre, minimum);
        }
        for row in 0..R {
            let (weights, scaled) = (of.weights.as_ptr(), scratch.scaled.as_ptr());
            let at = row * SPAN + at;
            let mut cut = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                let scaled = _mm256_loadu_ps(scaled.add(at + 8 * i));
                cut[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled, folds[i]));
                let weight = _mm256_loadu_ps(weights.add(at + 8 * i));
                sums[row] = _mm256_fmadd_ps(weight, centres[i], sums[row]);
            }
            let words = [_mm256_packs_epi32(cut[0], cut[1]), _mm256_packs_epi32(cut[2], cut[3])];
            let bytes = order_bytes(_mm256_packus_epi16(words[0], words[1]));
            _mm256_storeu_si256(scratch.factors.as_mut_ptr().add(at).cast(), bytes);
        }
    }
    for row in 0..R {
        _mm256_storeu_ps(bases[row].as_mut_ptr(), sums[row]);
    }
}

/// # Safety
/// As `add_tiles` asserts, and there is AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_weighted<const R: usize, const WIDTH: usize>(
    codes: TileCodes<'_>,
    offset: CodeOffset,
    of: WeightedTokens<'_>,
    scratch: &mut WeightScratch,
    bases: &mut [[f32; LANES]],
    sums: &mut [f32],
) {
    let (per_row, tokens, channels) = (codes.per_row, of.tokens, of.channels);
    let ones = _mm256_set1_epi16(1);
    let middle = _mm256_set1_epi8(offset.code as i8);
    let mut prefetch = codes.prefetch.in_steps(per_row / 8 * (tokens / TILE));
    let weights = scale_weights::<R>(&of, offset.gain, &mut scratch.scaled);
    for group in 0..per_row / channels {
        let scales = 2 * group * tokens;
        let scales = ScalePointers {
            steps: of.steps.as_ptr().add(scales),
            minima: of.minima.as_ptr().add(scales),
            centre: offset.centre,
        };
        let (mut units, bases) = (weights, &mut bases[group * ROWS..][..ROWS]);
        fold_weights::<R>(&of, scratch, scales, &mut units, bases);
        for first in (group * channels..(group + 1) * channels).step_by(8) {
            let mut totals = [_mm256_setzero_ps(); R];
            for row in 0..R {
                totals[row] = _mm256_loadu_ps(sums.as_ptr().add(row * per_row + first));
            }
            for (tile, bytes) in codes.bytes.chunks_exact(codes.tile_bytes()).enumerate() {
                prefetch.next_step();
                macro_rules! block {
                    ($first:literal: $($quad:literal)*) => {
                        // Sums of two tokens of four quads: at most 255 times 8 times 8.
                        let mut words = [_mm256_setzero_si256(); R];
                        $(
                            let (plane, at) = ($quad / WIDTH, $quad % WIDTH);
                            let at = bytes.as_ptr().add(4 * (at * per_row + first));
                            let codes = cut_signed::<WIDTH>(_mm256_loadu_si256(at.cast()), plane);
                            let codes = _mm256_sub_epi8(codes, middle);
                            for row in 0..R {
                                let at = row * SPAN + tile * TILE + 4 * $quad;
                                let by = _mm256_set1_epi32(load_four(scratch.factors.as_ptr(), at));
                                let products = _mm256_maddubs_epi16(by, codes);
                                words[row] = _mm256_add_epi16(words[row], products);
                            }
                        )*
                        let units = &units[tile * (TILE / TOKENS) + $first / (TOKENS / 4)];
                        for row in 0..R {
                            let unit = _mm256_set1_ps(units[row]);
                            let sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(words[row], ones));
                            totals[row] = _mm256_fmadd_ps(sum, unit, totals[row]);
                        }
                    };
                }
                block!(0: 0 1 2 3);
                block!(4: 4 5 6 7);
            }
            for row in 0..R {
                let at = sums.as_mut_ptr().add(row * per_row + first);
                _mm256_storeu_ps(at, totals[row]);
            }
        }
    }
}

/// Codes of a plane, of one or two bits twice what they are: so their middle is a whole number.
#[inline]
#[target_feature(enable = "avx2")]
fn cut_signed<const WIDTH: usize>(bytes: __m256i, plane: usize) -> __m256i {
    if WIDTH >= 4 {
        return cut_256::<WIDTH>(bytes, plane * WIDTH);
    }
    let moved = if plane == 0 {
        _mm256_add_epi8(bytes, bytes)
    } else {
        _mm256_srl_epi16(bytes, _mm_cvtsi64_si128((plane * WIDTH) as i64 - 1))
    };
    _mm256_and_si256(moved, _mm256_set1_epi8((u8::MAX >> (8 - WIDTH) << 1) as i8))
}
