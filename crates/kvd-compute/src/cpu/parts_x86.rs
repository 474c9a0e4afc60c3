//! `parts.rs` in AVX2 and AVX-512: factors as bytes or words, and scales turned.
//!
//! Everything here is reached through the functions at the top, which know that the machine has
//! the instructions (a [`Simd`] exists only then) and whose callers have checked all lengths;
//! pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use super::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Values that one step of a loop takes.
pub(super) const STEP: usize = 16;

/// Rounds `values · inverse` and cuts it as the set multiplies it; returns the sum of the integers.
/// There are a multiple of [`STEP`] values and twice as many bytes.
pub(super) fn split(simd: Simd, values: &[f32], inverse: f32, out: &mut [u8]) -> i32 {
    let (n, values, out) = (values.len(), values.as_ptr(), out.as_mut_ptr());
    // SAFETY: as above.
    unsafe {
        match simd.set() {
            InstructionSet::Avx512 => split_bytes(values, n, inverse, out),
            _ => split_words(values, n, inverse, out),
        }
    }
}

/// All high bytes, then all low ones, both signed.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn split_bytes(values: *const f32, n: usize, inverse: f32, out: *mut u8) -> i32 {
    let mut sum = _mm512_setzero_si512();
    let mut at = 0;
    while at < n {
        let scaled = _mm512_mul_ps(_mm512_loadu_ps(values.add(at)), _mm512_set1_ps(inverse));
        let rounded = _mm512_cvtps_epi32(scaled);
        sum = _mm512_add_epi32(sum, rounded);
        let high = _mm512_srai_epi32::<8>(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
        _mm_storeu_si128(out.add(at).cast(), _mm512_cvtepi32_epi8(high));
        // What the high byte leaves has the same low eight bits.
        _mm_storeu_si128(out.add(n + at).cast(), _mm512_cvtepi32_epi8(rounded));
        at += STEP;
    }
    _mm512_reduce_add_epi32(sum)
}

/// Words in the order 0, 2, 1, 3 of each four.
#[target_feature(enable = "avx2")]
unsafe fn split_words(values: *const f32, n: usize, inverse: f32, out: *mut u8) -> i32 {
    let mut sum = _mm256_setzero_si256();
    let mut at = 0;
    while at < n {
        let inverse = _mm256_set1_ps(inverse);
        let low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values.add(at)), inverse));
        let high = _mm256_loadu_ps(values.add(at + 8));
        let high = _mm256_cvtps_epi32(_mm256_mul_ps(high, inverse));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
        let words = _mm256_shufflelo_epi16::<0b11_01_10_00>(words);
        let words = _mm256_shufflehi_epi16::<0b11_01_10_00>(words);
        _mm256_storeu_si256(out.add(2 * at).cast(), words);
        at += STEP;
    }
    let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
    _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<0b00_00_00_01>(sum)))
}

/// Turns eight rows of eight words, rows so many bytes apart.
///
/// # Safety
/// They lie within slices.
#[inline(always)]
pub(super) unsafe fn transpose_8(
    (from, stride): (*const u8, usize),
    (to, to_stride): (*mut u8, usize),
) {
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
