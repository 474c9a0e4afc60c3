//! `mod.rs` for AVX2 and AVX-512.
#![allow(unsafe_code)] // Register loads and stores, and intrinsics.
#![allow(unsafe_op_in_unsafe_fn, reason = "every body is what its method's name says")]

use crate::cpu::simd_vector::{E4M3_MASK, SimdVector};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Vector;
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2Vector;

/// Combines the lanes of each of four registers.
macro_rules! reduce_512 {
    ($x:ident, $by_512:ident, $by_256:ident, $by_128:ident) => {{
        let [a, b, c, d] = $x;
        let ab = $by_512(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = $by_512(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let [ab, cd] = [_mm512_castps_pd(ab), _mm512_castps_pd(cd)];
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        let four = $by_512(low, high);
        let top = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(four)));
        let two = $by_256(_mm512_castps512_ps256(four), top);
        halves!(two, $by_128)
    }};
}

/// As `reduce_512`.
macro_rules! reduce_256 {
    ($x:ident, $by_256:ident, $by_128:ident) => {{
        let [a, b, c, d] = $x;
        let ab = $by_256(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = $by_256(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let [ab, cd] = [_mm256_castps_pd(ab), _mm256_castps_pd(cd)];
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
        let high = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
        let two = $by_256(low, high);
        halves!(two, $by_128)
    }};
}

/// Combines the halves of a register.
macro_rules! halves {
    ($x:ident, $by_128:ident) => {{
        let mut out = [0f32; 4];
        let four = $by_128(_mm256_castps256_ps128($x), _mm256_extractf128_ps::<1>($x));
        _mm_storeu_ps(out.as_mut_ptr(), four);
        out
    }};
}

/// The first `count` lanes, at most 16.
#[inline(always)]
pub(in crate::cpu) fn mask_512(count: usize) -> u16 {
    ((1u32 << count) - 1) as u16
}

impl SimdVector for Avx512Vector {
    type F = __m512;
    type I = __m512i;
    const COUNT: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> __m512 {
        if count == 16 {
            return _mm512_loadu_ps(from);
        }
        _mm512_maskz_loadu_ps(mask_512(count), from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, count: usize, x: __m512) {
        _mm512_mask_storeu_ps(to, mask_512(count), x)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8, count: usize) -> __m512 {
        if count == 16 {
            return _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
        }
        _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_512(count), from.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8, count: usize) -> __m512 {
        let words = if count == 16 {
            _mm256_loadu_si256(from.cast())
        } else {
            _mm256_maskz_loadu_epi16(mask_512(count), from.cast())
        };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8, count: usize) -> __m512i {
        if count == 16 {
            return _mm512_loadu_si512(from.cast());
        }
        _mm512_maskz_loadu_epi32(mask_512(count), from.cast())
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn max_magnitude(most: __m512, x: __m512) -> __m512 {
        // The larger magnitude, without a sign.
        _mm512_range_ps::<0b1011>(most, x)
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const BYTE: u32>(x: __m512i) -> __m512 {
        let top = match BYTE {
            0 => _mm512_slli_epi32::<24>(x),
            1 => _mm512_slli_epi32::<16>(x),
            2 => _mm512_slli_epi32::<8>(x),
            _ => x,
        };
        let mask = _mm512_set1_epi32(E4M3_MASK);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32::<4>(top), mask))
    }

    #[inline(always)]
    unsafe fn lane_sums(x: [__m512; 4]) -> [f32; 4] {
        reduce_512!(x, _mm512_add_ps, _mm256_add_ps, _mm_add_ps)
    }

    #[inline(always)]
    unsafe fn lane_maxima(x: [__m512; 4]) -> [f32; 4] {
        reduce_512!(x, _mm512_max_ps, _mm256_max_ps, _mm_max_ps)
    }
}

/// Lanes below `count` are all ones.
#[inline(always)]
unsafe fn mask_256(count: usize) -> __m256i {
    const ONES: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // `count` is at most 8, so eight values follow.
    _mm256_loadu_si256(ONES.as_ptr().add(8 - count).cast())
}

/// Up to eight words; the rest is zero.
#[inline(always)]
unsafe fn words_256(from: *const u8, count: usize) -> __m128i {
    if count == 8 {
        return _mm_loadu_si128(from.cast());
    }
    let mut words = [0u16; 8];
    std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast::<u8>(), 2 * count);
    _mm_loadu_si128(words.as_ptr().cast())
}

impl SimdVector for Avx2Vector {
    type F = __m256;
    type I = __m256i;
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> __m256 {
        if count == 8 {
            return _mm256_loadu_ps(from);
        }
        _mm256_maskload_ps(from, mask_256(count))
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, count: usize, x: __m256) {
        if count == 8 {
            return _mm256_storeu_ps(to, x);
        }
        _mm256_maskstore_ps(to, mask_256(count), x);
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8, count: usize) -> __m256 {
        _mm256_cvtph_ps(words_256(from, count))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8, count: usize) -> __m256 {
        let words = _mm256_cvtepu16_epi32(words_256(from, count));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8, count: usize) -> __m256i {
        if count == 8 {
            return _mm256_loadu_si256(from.cast());
        }
        _mm256_maskload_epi32(from.cast(), mask_256(count))
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn max_magnitude(most: __m256, x: __m256) -> __m256 {
        _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const BYTE: u32>(x: __m256i) -> __m256 {
        let top = match BYTE {
            0 => _mm256_slli_epi32::<24>(x),
            1 => _mm256_slli_epi32::<16>(x),
            2 => _mm256_slli_epi32::<8>(x),
            _ => x,
        };
        let mask = _mm256_set1_epi32(E4M3_MASK);
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32::<4>(top), mask))
    }

    #[inline(always)]
    unsafe fn lane_sums(x: [__m256; 4]) -> [f32; 4] {
        reduce_256!(x, _mm256_add_ps, _mm_add_ps)
    }

    #[inline(always)]
    unsafe fn lane_maxima(x: [__m256; 4]) -> [f32; 4] {
        reduce_256!(x, _mm256_max_ps, _mm_max_ps)
    }
}
