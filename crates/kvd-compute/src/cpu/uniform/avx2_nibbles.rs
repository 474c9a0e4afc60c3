//! Keys of `nibbles.rs` in AVX2: `vpmaddubsw` of codes, which have no sign, and factors of a byte,
//! which do: what the middle of all codes adds is taken off with the minima.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::avx2::{cut_256, load_four};
use crate::cpu::int_dot::avx512::for_planes;
use crate::cpu::int_dot::{TileCodes, VECTOR_ROWS as ROWS};
use crate::cpu::int_operands::FoldScales;
use crate::cpu::simd_vector::SimdVector;
use crate::cpu::simd_vector::x86::Avx2Vector;
use crate::cpu::span_scores::{SPAN, TILE};
use crate::cpu::uniform::avx512_bf16::by_shape;
use crate::cpu::uniform::nibbles::{
    BLOCK, BlockQueries, FoldedBlock, KeyFactors, MiddleCode, RESIDUES, STEP, UNEVEN,
};
use std::arch::x86_64::*;

/// Fours of channels of a block.
const QUADS: usize = BLOCK / 4;

/// Cuts queries times steps, f16 as minima are. Only in AVX2 are there such sides.
pub(super) fn fold_queries(
    of: BlockQueries<'_>,
    scales: FoldScales<'_>,
    middle: MiddleCode,
    to: FoldedBlock<'_>,
) {
    let FoldScales { steps, minima } = scales;
    let (rows, n) = (of.rows, of.values.len() / of.rows);
    assert!((1..=ROWS).contains(&rows) && n.is_multiple_of(STEP), "nibbles: queries");
    assert!(of.values.len() == rows * n && of.scaled.len() == rows * n, "nibbles: rows");
    assert!(steps.len() == 2 * n && minima.len() == 2 * n, "nibbles: scales");
    let lens = [to.factors.len(), to.residues.len()];
    assert_eq!(lens, [rows * n; 2], "nibbles: factors");
    let blocks = n / BLOCK * ROWS;
    assert!(of.largest.len() == blocks && to.units.len() == blocks, "nibbles: units");
    // SAFETY: lengths are as asserted, and the instructions were detected.
    unsafe { by_shape!(fold_block, rows, (of, scales, middle, n, to)) }
}

/// The largest of 8 f16 that are not negative, in the first word.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn largest_of(words: __m128i) -> __m128i {
    // There is an instruction for the least word alone.
    let flip = _mm_set1_epi16(-1);
    _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(words, flip)), flip)
}

/// The largest of each 8 steps of 32, f16, and their reciprocals; and a bit for each that is much
/// larger than the least.
///
/// # Safety
/// There are so many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn largest_of_eights(at: *const u8) -> ([__m128; 2], u32) {
    let load = |i: usize| _mm_loadu_si128(at.add(16 * i).cast());
    let words = [load(0), load(1), load(2), load(3)];
    let [a, b, c, d] = words.map(|words| largest_of(words));
    let most = _mm_unpacklo_epi32(_mm_unpacklo_epi16(a, b), _mm_unpacklo_epi16(c, d));
    let [a, b, c, d] = words.map(|words| _mm_minpos_epu16(words));
    let least = _mm_unpacklo_epi32(_mm_unpacklo_epi16(a, b), _mm_unpacklo_epi16(c, d));
    let (most, least) = (_mm_cvtph_ps(most), _mm_cvtph_ps(least));
    let uneven = _mm_cmpgt_ps(most, _mm_mul_ps(least, _mm_set1_ps(UNEVEN)));
    (with_reciprocals(most), _mm_movemask_ps(uneven) as u32)
}

/// Values, and their reciprocals; those of zero and of infinities are zero.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn with_reciprocals(values: __m128) -> [__m128; 2] {
    let some = _mm_and_ps(
        _mm_cmpgt_ps(values, _mm_set1_ps(1e-30)),
        _mm_cmplt_ps(values, _mm_set1_ps(f32::INFINITY)),
    );
    [values, _mm_and_ps(some, _mm_div_ps(_mm_set1_ps(1.0), values))]
}

/// The first lane of 128 bits in all of the low half, the second in all of the high one.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn spread_halves(two: __m128) -> __m256 {
    let lanes = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    _mm256_permutevar8x32_ps(_mm256_castps128_ps256(two), lanes)
}

/// Bytes in order of four registers whose words were packed two by two, and those again.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn order_bytes(bytes: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// # Safety
/// As `fold_queries` asserts, and there is AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold_block<const R: usize>(
    of: BlockQueries<'_>,
    scales: FoldScales<'_>,
    middle: MiddleCode,
    n: usize,
    to: FoldedBlock<'_>,
) {
    let (steps, minima) = (scales.steps.as_ptr(), scales.minima.as_ptr());
    let centre = _mm256_set1_ps(middle.steps);
    let (byte, word) = (_mm256_set1_epi8(1), _mm256_set1_epi16(1));
    let mut bases = [_mm256_setzero_ps(); ROWS];
    let (mut excess, mut more) = (_mm256_setzero_ps(), _mm_setzero_ps());
    to.uneven.clear();
    for at in (0..n).step_by(STEP) {
        let ([most, inverse], mut uneven) = largest_of_eights(steps.add(2 * at));
        let mut inverses = [0f32; STEP / BLOCK];
        _mm_storeu_ps(inverses.as_mut_ptr(), inverse);
        let (mut folds, mut centres) = ([_mm256_setzero_ps(); 4], [_mm256_setzero_ps(); 4]);
        for i in 0..4 {
            let step = Avx2Vector::load_f16(steps.add(2 * at + 16 * i), 8);
            let minimum = Avx2Vector::load_f16(minima.add(2 * at + 16 * i), 8);
            folds[i] = _mm256_mul_ps(step, _mm256_set1_ps(inverses[i]));
            centres[i] = _mm256_fmadd_ps(step, centre, minimum);
        }
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for row in 0..R {
            let (values, scaled) = (of.values.as_ptr(), of.scaled.as_ptr());
            let at = row * n + at;
            let mut cut = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                let scaled = _mm256_loadu_ps(scaled.add(at + 8 * i));
                cut[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled, folds[i]));
                let value = _mm256_loadu_ps(values.add(at + 8 * i));
                bases[row] = _mm256_fmadd_ps(value, centres[i], bases[row]);
            }
            let words = [_mm256_packs_epi32(cut[0], cut[1]), _mm256_packs_epi32(cut[2], cut[3])];
            let bytes = order_bytes(_mm256_packs_epi16(words[0], words[1]));
            _mm256_storeu_si256(to.factors.as_mut_ptr().add(at).cast(), bytes);
            sums[row] = _mm256_madd_epi16(_mm256_maddubs_epi16(byte, bytes), word);
        }
        // Four rows of each block.
        let places = at / BLOCK * ROWS;
        let (from, units) = (of.largest.as_ptr().add(places), to.units.as_mut_ptr().add(places));
        let first = _mm256_mul_ps(_mm256_loadu_ps(from), spread_halves(most));
        let most = _mm_movehl_ps(most, most);
        let second = _mm256_mul_ps(_mm256_loadu_ps(from.add(8)), spread_halves(most));
        _mm256_storeu_ps(units, first);
        _mm256_storeu_ps(units.add(8), second);
        excess = with_excess(excess, sums, [first, second]);
        while uneven != 0 {
            let i = uneven.trailing_zeros() as usize;
            uneven &= uneven - 1;
            let at = at + BLOCK * i;
            to.uneven.push(at / BLOCK);
            let out = to.residues.as_mut_ptr().add(at);
            let sums = write_residues::<R>(of.scaled.as_ptr().add(at), n, folds[i], out);
            let unit = _mm_loadu_ps(to.units.as_ptr().add(at / BLOCK * ROWS));
            let unit = _mm_mul_ps(unit, _mm_set1_ps(1.0 / RESIDUES));
            more = _mm_fmadd_ps(sums, unit, more);
        }
    }
    let excess = _mm_add_ps(_mm256_castps256_ps128(excess), _mm256_extractf128_ps::<1>(excess));
    let excess = _mm_add_ps(excess, more);
    let bases = _mm_loadu_ps(Avx2Vector::lane_sums(bases).as_ptr());
    let bases = _mm_fnmadd_ps(excess, _mm_set1_ps(middle.code), bases);
    _mm_storeu_ps(to.bases.as_mut_ptr(), bases);
}

/// Adds a step's sums of factors, in their units: blocks by row, two of four rows in each unit.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn with_excess(excess: __m256, sums: [__m256i; ROWS], units: [__m256; 2]) -> __m256 {
    let [a, b, c, d] = sums;
    // A row's first and second block, then the next row's; third and fourth above.
    let two = [_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d)].map(|x| _mm256_cvtepi32_ps(x));
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(two[0], two[1]);
    let odd = _mm256_shuffle_ps::<0b11_01_11_01>(two[0], two[1]);
    let [first, second] = units;
    let excess = _mm256_fmadd_ps(even, _mm256_permute2f128_ps::<0x20>(first, second), excess);
    _mm256_fmadd_ps(odd, _mm256_permute2f128_ps::<0x31>(first, second), excess)
}

/// Writes what rounding takes from a block of scaled queries, rows so far apart, times steps, and
/// returns the sums of it by row.
///
/// # Safety
/// There is AVX2; pointers are to a block of each row.
#[target_feature(enable = "avx2,fma")]
unsafe fn write_residues<const R: usize>(
    scaled: *const f32,
    n: usize,
    steps: __m256,
    out: *mut u8,
) -> __m128 {
    let mut sums = [_mm256_setzero_ps(); ROWS];
    for row in 0..R {
        let factor = _mm256_mul_ps(_mm256_loadu_ps(scaled.add(row * n)), steps);
        let whole = _mm256_cvtepi32_ps(_mm256_cvtps_epi32(factor));
        let left = _mm256_mul_ps(_mm256_sub_ps(factor, whole), _mm256_set1_ps(RESIDUES));
        let left = _mm256_cvtps_epi32(left);
        sums[row] = _mm256_cvtepi32_ps(left);
        let words = _mm256_packs_epi32(left, left);
        let bytes = _mm256_packs_epi16(words, words);
        let fours = [_mm256_extract_epi32::<0>(bytes), _mm256_extract_epi32::<4>(bytes)];
        out.add(row * n).cast::<[i32; 2]>().write_unaligned(fours);
    }
    _mm_loadu_ps(Avx2Vector::lane_sums(sums).as_ptr())
}

/// Writes the scores of a few rows of factors against a tile, rows [`SPAN`] apart.
pub(super) fn score_tile(codes: TileCodes<'_>, factors: KeyFactors<'_>, out: &mut [f32]) {
    let (rows, n) = (factors.bases.len(), codes.per_row);
    assert_eq!(codes.bytes.len(), codes.tile_bytes(), "nibbles: one tile");
    assert_eq!([factors.bytes.len(), factors.residues.len()], [rows * n; 2], "nibbles: factors");
    assert_eq!(factors.units.len(), n / BLOCK * ROWS, "nibbles: units");
    assert!(factors.uneven.iter().all(|block| *block < n / BLOCK), "nibbles: blocks");
    assert!((n * codes.width as usize).is_multiple_of(8 * BLOCK), "nibbles: planes");
    assert!(out.len() >= (rows - 1) * SPAN + TILE, "nibbles: scores");
    // SAFETY: lengths are as asserted, and the instructions were detected.
    unsafe { by_shape!(key_tile, rows, codes.width, (codes, factors, out)) }
}

/// # Safety
/// As `score_tile` asserts, and there is AVX2.
#[target_feature(enable = "avx2,fma")]
unsafe fn key_tile<const R: usize, const WIDTH: usize>(
    tile: TileCodes<'_>,
    of: KeyFactors<'_>,
    out: &mut [f32],
) {
    let KeyFactors { bytes: factors, units, bases, .. } = of;
    // Groups of four codes that begin a byte, those of one plane.
    let (groups, n) = (tile.bytes.len() / 128, tile.per_row);
    let ones = _mm256_set1_epi16(1);
    let mut prefetch = tile.prefetch.in_steps(4 * groups / QUADS);
    // Eight tokens at once: sums of four rows, narrow and wide, are eight registers of 16.
    for first_token in (0..TILE).step_by(8) {
        let mut sums = [_mm256_setzero_ps(); R];
        for row in 0..R {
            sums[row] = _mm256_set1_ps(bases[row]);
        }
        for first in (0..groups).step_by(QUADS) {
            prefetch.next_step();
            macro_rules! plane {
                ($plane:literal) => {
                    let quad = $plane * groups + first;
                    // Sums of four products of a block: at most 4 times 15 times 127.
                    let mut words = [_mm256_setzero_si256(); R];
                    for i in 0..QUADS {
                        let at = 4 * (TILE * (first + i) + first_token);
                        let codes = _mm256_loadu_si256(tile.bytes.as_ptr().add(at).cast());
                        let codes = cut_256::<WIDTH>(codes, $plane * WIDTH);
                        for row in 0..R {
                            let by = load_four(factors.as_ptr(), row * n + 4 * (quad + i));
                            let products = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(by));
                            words[row] = _mm256_add_epi16(words[row], products);
                        }
                    }
                    for row in 0..R {
                        let unit = units.as_ptr().add(quad / QUADS * ROWS + row);
                        let unit = _mm256_broadcast_ss(&*unit);
                        let sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(words[row], ones));
                        sums[row] = _mm256_fmadd_ps(sum, unit, sums[row]);
                    }
                };
            }
            for_planes!(WIDTH, plane);
        }
        if !of.uneven.is_empty() {
            add_residues::<R, WIDTH>(tile, first_token, of, &mut sums);
        }
        for row in 0..R {
            let at = row * SPAN + first_token;
            _mm256_storeu_ps(out.as_mut_ptr().add(at), sums[row]);
        }
    }
}

/// Adds to the scores of eight tokens what rounding took from factors of uneven blocks.
///
/// # Safety
/// As `score_tile` asserts, and there is AVX2.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_residues<const R: usize, const WIDTH: usize>(
    tile: TileCodes<'_>,
    first_token: usize,
    of: KeyFactors<'_>,
    sums: &mut [__m256; R],
) {
    let (groups, n) = (tile.bytes.len() / 128, tile.per_row);
    let mask = _mm256_set1_epi8((u8::MAX >> (8 - WIDTH)) as i8);
    for block in of.uneven {
        let quad = QUADS * block;
        let down = _mm_cvtsi64_si128((quad / groups * WIDTH) as i64);
        let mut words = [_mm256_setzero_si256(); R];
        for i in 0..QUADS {
            let at = 4 * (TILE * (quad % groups + i) + first_token);
            let codes = _mm256_loadu_si256(tile.bytes.as_ptr().add(at).cast());
            let codes = _mm256_and_si256(_mm256_srl_epi16(codes, down), mask);
            for row in 0..R {
                let by = load_four(of.residues.as_ptr(), row * n + 4 * (quad + i));
                let products = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(by));
                words[row] = _mm256_add_epi16(words[row], products);
            }
        }
        for row in 0..R {
            let unit = _mm256_set1_ps(of.units[block * ROWS + row] / RESIDUES);
            let sum = _mm256_madd_epi16(words[row], _mm256_set1_epi16(1));
            sums[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), unit, sums[row]);
        }
    }
}
