//! `mod.rs` in AVX2 and AVX-512: factors as bytes or words, and scales turned.
//!
//! Everything here is reached through the functions at the top, which know that the machine has
//! the instructions (a [`Simd`] exists only then) and whose callers have checked all lengths;
//! pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_operands::lane_offsets::{LANES, LaneOffsets};
pub(super) use crate::cpu::int_operands::simd_fold::STEP;
use crate::cpu::int_operands::{FOLD_ROWS, FoldScales, NOTHING, RoundedRow, RowScale};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::simd_vector::SimdVector;
use crate::cpu::simd_vector::x86::Avx512Vector;
use crate::cpu::span_scores::{SPAN, WeightRows};
use std::arch::x86_64::*;

/// Rounds values and cuts them as the set multiplies them; returns the sum of the integers. There
/// are a multiple of [`STEP`] values and `digits` times as many bytes.
pub(super) fn split_values(
    simd: Simd,
    values: &[f32],
    scale: RowScale,
    out: &mut [u8],
    digits: usize,
) -> i32 {
    let (n, values, out) = (values.len(), values.as_ptr(), out.as_mut_ptr());
    // SAFETY: as above.
    unsafe {
        match (simd.vector_set(), digits) {
            (InstructionSet::Avx512, 1) => split_bytes::<1>(values, n, scale, out),
            (InstructionSet::Avx512, _) => split_bytes::<2>(values, n, scale, out),
            _ if simd.has_avx_vnni() => split_bytes_256(values, n, digits, scale, out),
            _ => split_words(values, n, scale, out),
        }
    }
}

/// Results of folding and cutting a few rows.
#[derive(Default)]
pub(super) struct SplitRows {
    pub(super) units: [f32; FOLD_ROWS],
    pub(super) losts: [f32; FOLD_ROWS],
    pub(super) bases: [f32; FOLD_ROWS],
    pub(super) sums: [i32; FOLD_ROWS],
}

/// Where split rows go.
pub(super) struct SplitTarget<'a> {
    pub(super) bytes: &'a mut [u8],
    /// Bytes of an integer.
    pub(super) digits: usize,
    /// The largest magnitude of an integer.
    pub(super) top: f32,
    /// See [`RowScale`].
    pub(super) offsets: &'static LaneOffsets,
}

/// Multiplies up to [`FOLD_ROWS`] rows with the steps of each group, of f16 as minima are, and
/// cuts the products for AVX-512: as `simd_fold::fold_rows` and `split_values` do. Rows are a
/// multiple of [`STEP`]; bytes, `rounded` and `sums` are of all rows of one group and then of the
/// next.
pub(super) fn fold_groups(
    simd: Simd,
    values: &[&[f32]],
    scales: FoldScales<'_>,
    out: SplitTarget<'_>,
    rounded: &mut [RoundedRow],
    sums: &mut [i32],
) {
    let FoldScales { steps, minima } = scales;
    let SplitTarget { bytes: out, digits, top, offsets } = out;
    let limits = FoldLimits { top, offsets };
    let (n, rows) = (values[0].len(), values.len());
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "fold: instruction set");
    assert!((1..=FOLD_ROWS).contains(&rows), "fold: rows");
    assert!(n.is_multiple_of(STEP) && values.iter().all(|row| row.len() == n), "fold: rows");
    let groups = rounded.len() / rows;
    assert!(rounded.len() == groups * rows && sums.len() == groups * rows, "fold: groups");
    assert!(steps.len() == 2 * n * groups && minima.len() == 2 * n * groups, "fold: scales");
    assert!(digits == 1 || digits == 2, "fold: digits");
    assert_eq!(out.len(), digits * n * rows * groups, "fold: output");
    let from = std::array::from_fn(|row| values[row.min(rows - 1)].as_ptr());
    let bytes = out.chunks_exact_mut(digits * n * rows);
    let scales = steps.chunks_exact(2 * n).zip(minima.chunks_exact(2 * n));
    let found = rounded.chunks_exact_mut(rows).zip(sums.chunks_exact_mut(rows));
    for ((out, (steps, minima)), (rounded, sums)) in bytes.zip(scales).zip(found) {
        let (scales, out) = (FoldScales { steps, minima }, out.as_mut_ptr());
        // SAFETY: the set was detected, lengths are as asserted.
        let cut = unsafe {
            match (rows, digits) {
                (1, 1) => fold_512::<1, 1>(from, scales, n, out, limits),
                (2, 1) => fold_512::<2, 1>(from, scales, n, out, limits),
                (3, 1) => fold_512::<3, 1>(from, scales, n, out, limits),
                (_, 1) => fold_512::<4, 1>(from, scales, n, out, limits),
                (1, _) => fold_512::<1, 2>(from, scales, n, out, limits),
                (2, _) => fold_512::<2, 2>(from, scales, n, out, limits),
                (3, _) => fold_512::<3, 2>(from, scales, n, out, limits),
                (_, _) => fold_512::<4, 2>(from, scales, n, out, limits),
            }
        };
        for (row, (rounded, sum)) in rounded.iter_mut().zip(sums).enumerate() {
            let (unit, lost, base) = (cut.units[row], cut.losts[row], cut.bases[row]);
            (*rounded, *sum) = (RoundedRow { unit, lost, base }, cut.sums[row]);
        }
    }
}

/// Rounds up to [`FOLD_ROWS`] rows of weights, of which the largest and the sums are given, and
/// cuts them for AVX-512: as `IntOperands::split_row` does. Rows are a multiple of two [`STEP`]s.
pub(super) fn split_rows(simd: Simd, weights: &WeightRows<'_>, out: SplitTarget<'_>) -> SplitRows {
    let WeightRows { values, len: n, rows, .. } = *weights;
    let SplitTarget { bytes: out, digits, top, offsets } = out;
    let limits = FoldLimits { top, offsets };
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "split: instruction set");
    assert!((1..=FOLD_ROWS).contains(&rows) && n.is_multiple_of(2 * STEP), "split: rows");
    assert!(values.len() >= (rows - 1) * SPAN + n, "split: values");
    assert!(digits == 1 || digits == 2, "split: digits");
    assert_eq!(out.len(), digits * n * rows, "split: output");
    let out = out.as_mut_ptr();
    // SAFETY: the set was detected, lengths are as asserted.
    unsafe {
        match (rows, digits) {
            (1, 1) => split_rows_512::<1, 1>(weights, out, limits),
            (2, 1) => split_rows_512::<2, 1>(weights, out, limits),
            (3, 1) => split_rows_512::<3, 1>(weights, out, limits),
            (_, 1) => split_rows_512::<4, 1>(weights, out, limits),
            (1, _) => split_rows_512::<1, 2>(weights, out, limits),
            (2, _) => split_rows_512::<2, 2>(weights, out, limits),
            (3, _) => split_rows_512::<3, 2>(weights, out, limits),
            (_, _) => split_rows_512::<4, 2>(weights, out, limits),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2")]
unsafe fn split_rows_512<const R: usize, const D: usize>(
    weights: &WeightRows<'_>,
    out: *mut u8,
    limits: FoldLimits,
) -> SplitRows {
    let (values, n) = (weights.values.as_ptr(), weights.len);
    let largest = _mm_loadu_ps(weights.largest.as_ptr());
    let totals = _mm_loadu_ps(weights.totals.as_ptr());
    let RowUnits { some, units, inverses } = row_units(largest, limits.top);
    let inverses: [__m512; R] = std::array::from_fn(|row| _mm512_set1_ps(inverses[row]));
    let mut sums = [_mm512_setzero_si512(); FOLD_ROWS];
    for at in (0..n).step_by(2 * STEP) {
        let offsets = [limits.offsets_at(at), limits.offsets_at(at + STEP)];
        for row in 0..R {
            let scaled = |of: usize| {
                let values = _mm512_loadu_ps(values.add(row * SPAN + at + of * STEP));
                _mm512_add_ps(_mm512_mul_ps(values, inverses[row]), offsets[of])
            };
            let out = out.add(D * row * n + at);
            sums[row] = cut_two_512::<D>([scaled(0), scaled(1)], out, n, sums[row]);
        }
    }
    let mut cuts = SplitRows::default();
    cuts.set_sums(sums, units, totals, some);
    cuts
}

/// Units of four rows and their reciprocals, zeros where there are none.
struct RowUnits {
    some: u8,
    units: __m128,
    inverses: [f32; FOLD_ROWS],
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn row_units(largest: __m128, top: f32) -> RowUnits {
    // An overflow has no unit; the sum is then of no use anyway.
    let some = _mm_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm_set1_ps(NOTHING))
        & _mm_cmp_ps_mask::<_CMP_LT_OQ>(largest, _mm_set1_ps(f32::INFINITY));
    let top = _mm_set1_ps(top);
    let units = _mm_maskz_div_ps(some, largest, top);
    let mut inverses = [0f32; FOLD_ROWS];
    _mm_storeu_ps(inverses.as_mut_ptr(), _mm_maskz_div_ps(some, top, largest));
    RowUnits { some, units, inverses }
}

impl SplitRows {
    /// Takes the sums of the integers of each row, and what their units lost of `totals`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx2")]
    unsafe fn set_sums(
        &mut self,
        sums: [__m512i; FOLD_ROWS],
        units: __m128,
        totals: __m128,
        some: u8,
    ) {
        let sums = sum_rows(sums);
        let lost = _mm_sub_ps(totals, _mm_mul_ps(_mm_cvtepi32_ps(sums), units));
        _mm_storeu_ps(self.units.as_mut_ptr(), units);
        _mm_storeu_ps(self.losts.as_mut_ptr(), _mm_maskz_mov_ps(some, lost));
        _mm_storeu_si128(self.sums.as_mut_ptr().cast(), sums);
    }
}

/// The largest magnitude of an integer, and what is added before values are rounded.
#[derive(Clone, Copy)]
struct FoldLimits {
    top: f32,
    offsets: &'static LaneOffsets,
}

impl FoldLimits {
    /// The offsets of a [`STEP`] of values.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn offsets_at(&self, at: usize) -> __m512 {
        _mm512_loadu_ps(self.offsets[at % LANES..].as_ptr())
    }
}

/// Products are made twice, once for their largest: that is less than to keep them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn fold_512<const R: usize, const D: usize>(
    values: [*const f32; FOLD_ROWS],
    scales: FoldScales<'_>,
    n: usize,
    out: *mut u8,
    limits: FoldLimits,
) -> SplitRows {
    let (steps, minima) = (scales.steps.as_ptr(), scales.minima.as_ptr());
    let mut largest = [_mm512_setzero_ps(); FOLD_ROWS];
    let (mut bases, mut totals) = (largest, largest);
    for at in (0..n).step_by(STEP) {
        let step = Avx512Vector::load_f16(steps.add(2 * at), STEP);
        let minimum = Avx512Vector::load_f16(minima.add(2 * at), STEP);
        for row in 0..R {
            let value = _mm512_loadu_ps(values[row].add(at));
            let folded = _mm512_mul_ps(value, step);
            largest[row] = Avx512Vector::max_magnitude(largest[row], folded);
            bases[row] = _mm512_fmadd_ps(value, minimum, bases[row]);
            totals[row] = _mm512_add_ps(totals[row], folded);
        }
    }
    let (bases, totals) =
        (Avx512Vector::lane_sums(bases), _mm_loadu_ps(Avx512Vector::lane_sums(totals).as_ptr()));
    let largest = _mm_loadu_ps(Avx512Vector::lane_maxima(largest).as_ptr());
    let RowUnits { some, units, inverses } = row_units(largest, limits.top);
    let inverses: [__m512; R] = std::array::from_fn(|row| _mm512_set1_ps(inverses[row]));
    let mut sums = [_mm512_setzero_si512(); FOLD_ROWS];
    for at in (0..n).step_by(2 * STEP) {
        let whole = n - at >= 2 * STEP;
        let first = Avx512Vector::load_f16(steps.add(2 * at), STEP);
        let second =
            if whole { Avx512Vector::load_f16(steps.add(2 * (at + STEP)), STEP) } else { first };
        let offsets = [limits.offsets_at(at), limits.offsets_at(at + STEP)];
        for row in 0..R {
            let values = values[row].add(at);
            let scaled = |of: usize, step: __m512| {
                let folded = _mm512_mul_ps(_mm512_loadu_ps(values.add(of * STEP)), step);
                _mm512_add_ps(_mm512_mul_ps(folded, inverses[row]), offsets[of])
            };
            let out = out.add(D * row * n + at);
            sums[row] = if whole {
                cut_two_512::<D>([scaled(0, first), scaled(1, second)], out, n, sums[row])
            } else {
                cut_512::<D>(scaled(0, first), out, n, sums[row])
            };
        }
    }
    let mut cuts = SplitRows { bases, ..SplitRows::default() };
    cuts.set_sums(sums, units, totals, some);
    cuts
}

/// Sums of the lanes of four registers.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn sum_rows(sums: [__m512i; FOLD_ROWS]) -> __m128i {
    let [a, b, c, d] = sums;
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let four = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let two = _mm512_castsi512_si256(four);
    let two = _mm256_add_epi32(two, _mm512_extracti64x4_epi64::<1>(four));
    _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256::<1>(two))
}

/// As `cut_512` for 32 values; what is added to `sums` are their sums two by two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn cut_two_512<const D: usize>(
    scaled: [__m512; 2],
    out: *mut u8,
    n: usize,
    sums: __m512i,
) -> __m512i {
    let [a, b] = scaled.map(|scaled| _mm512_cvtps_epi32(scaled));
    if D == 1 {
        _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128(out.add(STEP).cast(), _mm512_cvtepi32_epi8(b));
        return _mm512_add_epi32(sums, _mm512_add_epi32(a, b));
    }
    // In each 128 bits four words of one and four of the other.
    let words = _mm512_packs_epi32(a, b);
    let high = _mm512_srli_epi16::<8>(_mm512_add_epi16(words, _mm512_set1_epi16(128)));
    let low = _mm512_and_si512(words, _mm512_set1_epi16(0xFF));
    let bytes = _mm512_packus_epi16(high, low);
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = _mm512_permutexvar_epi32(order, bytes);
    _mm256_storeu_si256(out.cast(), _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256(out.add(n).cast(), _mm512_extracti64x4_epi64::<1>(bytes));
    _mm512_dpwssd_epi32(sums, words, _mm512_set1_epi16(1))
}

/// Rounds, and writes the high byte to `out`, what it leaves `n` further; the only byte of one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn cut_512<const D: usize>(
    scaled: __m512,
    out: *mut u8,
    n: usize,
    sums: __m512i,
) -> __m512i {
    let rounded = _mm512_cvtps_epi32(scaled);
    let sums = _mm512_add_epi32(sums, rounded);
    if D == 1 {
        _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(rounded));
        return sums;
    }
    let high = _mm512_srai_epi32::<8>(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
    _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(high));
    // What the high byte leaves has the same low eight bits.
    _mm_storeu_si128(out.add(n).cast(), _mm512_cvtepi32_epi8(rounded));
    sums
}

/// All high bytes, then all low ones, both signed; or one of each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn split_bytes<const D: usize>(
    values: *const f32,
    n: usize,
    scale: RowScale,
    out: *mut u8,
) -> i32 {
    let inverse = _mm512_set1_ps(scale.inverse);
    let scaled = |at: usize| {
        let offsets = _mm512_loadu_ps(scale.offsets[at % LANES..].as_ptr());
        _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(values.add(at)), inverse), offsets)
    };
    let mut sum = _mm512_setzero_si512();
    for at in (0..n).step_by(2 * STEP) {
        sum = if n - at >= 2 * STEP {
            cut_two_512::<D>([scaled(at), scaled(at + STEP)], out.add(at), n, sum)
        } else {
            cut_512::<D>(scaled(at), out.add(at), n, sum)
        };
    }
    _mm512_reduce_add_epi32(sum)
}

/// As `split_bytes`.
#[target_feature(enable = "avx2")]
unsafe fn split_bytes_256(
    values: *const f32,
    n: usize,
    digits: usize,
    scale: RowScale,
    out: *mut u8,
) -> i32 {
    let byte = _mm256_set1_epi32(0xFF);
    let mut sum = _mm256_setzero_si256();
    for at in (0..n).step_by(STEP) {
        let [a, b] = round_step_256(values, at, scale);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        // In each half four words of one and four of the other, until bytes are in order.
        let low = _mm256_packus_epi32(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
        let high = _mm256_add_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(128));
        let high = _mm256_srli_epi16::<8>(high);
        let bytes = _mm256_packus_epi16(high, low);
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let bytes = _mm256_permutevar8x32_epi32(bytes, order);
        let low = _mm256_extracti128_si256::<1>(bytes);
        if digits == 2 {
            _mm_storeu_si128(out.add(at).cast(), _mm256_castsi256_si128(bytes));
        }
        _mm_storeu_si128(out.add((digits - 1) * n + at).cast(), low);
    }
    sum_256(sum)
}

/// Rounds [`STEP`] values of a row, from `first` on.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn round_step_256(values: *const f32, first: usize, scale: RowScale) -> [__m256i; 2] {
    let inverse = _mm256_set1_ps(scale.inverse);
    [first, first + 8].map(|at| {
        let scaled = _mm256_mul_ps(_mm256_loadu_ps(values.add(at)), inverse);
        let offsets = _mm256_loadu_ps(scale.offsets[at % LANES..].as_ptr());
        _mm256_cvtps_epi32(_mm256_add_ps(scaled, offsets))
    })
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_256(sum: __m256i) -> i32 {
    let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
    _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<0b00_00_00_01>(sum)))
}

/// Words in the order 0, 2, 1, 3 of each four.
#[target_feature(enable = "avx2")]
unsafe fn split_words(values: *const f32, n: usize, scale: RowScale, out: *mut u8) -> i32 {
    let mut sum = _mm256_setzero_si256();
    let mut at = 0;
    while at < n {
        let [low, high] = round_step_256(values, at, scale);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
        let words = _mm256_shufflelo_epi16::<0b11_01_10_00>(words);
        let words = _mm256_shufflehi_epi16::<0b11_01_10_00>(words);
        _mm256_storeu_si256(out.add(2 * at).cast(), words);
        at += STEP;
    }
    sum_256(sum)
}

/// Turns eight rows of eight words, rows so many bytes apart.
///
/// # Safety
/// The rows lie within slices.
#[inline(always)]
pub(super) unsafe fn transpose_8(from: *const u8, stride: usize, to: *mut u8, to_stride: usize) {
    let mut rows = [_mm_setzero_si128(); 8];
    for row in 0..8 {
        rows[row] = _mm_loadu_si128(from.add(row * stride).cast());
    }
    let mut pairs = rows;
    for i in 0..4 {
        pairs[2 * i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    let mut fours = rows;
    for half in 0..2 {
        for i in 0..2 {
            let (a, b) = (pairs[4 * half + i], pairs[4 * half + i + 2]);
            fours[4 * half + 2 * i] = _mm_unpacklo_epi32(a, b);
            fours[4 * half + 2 * i + 1] = _mm_unpackhi_epi32(a, b);
        }
    }
    for i in 0..4 {
        let low = _mm_unpacklo_epi64(fours[i], fours[4 + i]);
        let high = _mm_unpackhi_epi64(fours[i], fours[4 + i]);
        _mm_storeu_si128(to.add(2 * i * to_stride).cast(), low);
        _mm_storeu_si128(to.add((2 * i + 1) * to_stride).cast(), high);
    }
}
