//! `mod.rs` for NEON.
#![allow(unsafe_code)] // Register loads and stores, and intrinsics.
#![allow(unsafe_op_in_unsafe_fn, reason = "every body is what its method's name says")]

use crate::cpu::simd_vector::{E4M3_MASK, SimdVector};
use std::arch::aarch64::*;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct NeonVector;

/// Up to four f32; the rest is zero.
#[inline(always)]
unsafe fn load_some(from: *const f32, count: usize) -> float32x4_t {
    let mut values = [0f32; 4];
    std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
    vld1q_f32(values.as_ptr())
}

/// Up to four words; the rest is zero.
#[inline(always)]
unsafe fn load_words(from: *const u8, count: usize) -> uint16x4_t {
    if count == 4 {
        return vreinterpret_u16_u8(vld1_u8(from));
    }
    let mut words = [0u16; 4];
    std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast::<u8>(), 2 * count);
    vld1_u16(words.as_ptr())
}

impl SimdVector for NeonVector {
    type F = float32x4_t;
    type I = uint32x4_t;
    const COUNT: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> float32x4_t {
        if count == 4 { vld1q_f32(from) } else { load_some(from, count) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, count: usize, x: float32x4_t) {
        if count == 4 {
            return vst1q_f32(to, x);
        }
        let mut values = [0f32; 4];
        vst1q_f32(values.as_mut_ptr(), x);
        std::ptr::copy_nonoverlapping(values.as_ptr(), to, count);
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8, count: usize) -> float32x4_t {
        vcvt_f32_f16(vreinterpret_f16_u16(load_words(from, count)))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8, count: usize) -> float32x4_t {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(load_words(from, count)))
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8, count: usize) -> uint32x4_t {
        if count == 4 {
            return vreinterpretq_u32_u8(vld1q_u8(from));
        }
        let mut lanes = [0u32; 4];
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr().cast::<u8>(), 4 * count);
        vld1q_u32(lanes.as_ptr())
    }

    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }

    #[inline(always)]
    unsafe fn max_magnitude(most: float32x4_t, x: float32x4_t) -> float32x4_t {
        vmaxnmq_f32(most, vabsq_f32(x))
    }

    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const BYTE: u32>(x: uint32x4_t) -> float32x4_t {
        let top = match BYTE {
            0 => vshlq_n_u32::<24>(x),
            1 => vshlq_n_u32::<16>(x),
            2 => vshlq_n_u32::<8>(x),
            _ => x,
        };
        let down = vshrq_n_s32::<4>(vreinterpretq_s32_u32(top));
        vreinterpretq_f32_s32(vandq_s32(down, vdupq_n_s32(E4M3_MASK)))
    }

    #[inline(always)]
    unsafe fn lane_sums(x: [float32x4_t; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        let mut out = [0f32; 4];
        let four = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
        vst1q_f32(out.as_mut_ptr(), four);
        out
    }

    #[inline(always)]
    unsafe fn lane_maxima(x: [float32x4_t; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        let mut out = [0f32; 4];
        let four = vpmaxnmq_f32(vpmaxnmq_f32(a, b), vpmaxnmq_f32(c, d));
        vst1q_f32(out.as_mut_ptr(), four);
        out
    }
}
