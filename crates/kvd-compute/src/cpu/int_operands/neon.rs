//! `mod.rs` in NEON: factors as words or bytes, and scales turned.
//!
//! Everything here is reached through the functions at the top, whose callers have checked all
//! lengths; pointers stay inside those.
#![allow(unsafe_code)] // Register loads and stores through pointers into checked slices.

use crate::cpu::int_operands::{EIGHT, RowScale};
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::aarch64::*;

/// Rounds values and cuts them as the set multiplies them; returns the sum of the integers. There
/// are a multiple of [`EIGHT`] values and twice as many bytes.
pub(super) fn split_values(simd: Simd, values: &[f32], scale: RowScale, out: &mut [u8]) -> i32 {
    let (values, out) = (values.as_chunks::<EIGHT>().0, out.as_chunks_mut::<{ 2 * EIGHT }>().0);
    // SAFETY: NEON is part of the target.
    unsafe {
        match simd.vector_set() {
            InstructionSet::Neon => cut_values::<false>(values, scale, out),
            _ => cut_values::<true>(values, scale, out),
        }
    }
}

/// Eight words, or eight high bytes and then eight low ones, both signed.
#[target_feature(enable = "neon")]
fn cut_values<const BYTES: bool>(
    values: &[[f32; EIGHT]],
    scale: RowScale,
    out: &mut [[u8; 2 * EIGHT]],
) -> i32 {
    let mut sum = vdupq_n_s32(0);
    let lanes = scale.offsets.as_chunks::<EIGHT>().0.iter().cycle();
    for ((values, out), offsets) in values.iter().zip(out).zip(lanes) {
        let rounded = |at: usize| {
            // SAFETY: four of eight values, and of as many offsets.
            let four = unsafe { [values, offsets].map(|of| vld1q_f32(of[at..].as_ptr())) };
            vcvtnq_s32_f32(vaddq_f32(vmulq_n_f32(four[0], scale.inverse), four[1]))
        };
        let (first, second) = (rounded(0), rounded(4));
        sum = vaddq_s32(sum, vaddq_s32(first, second));
        let words = vmovn_high_s32(vmovn_s32(first), second);
        let cut = if BYTES {
            // Rounded, or else what is below 0 in the low byte is missing. No factor is so large
            // that this overflows, and what the high byte leaves has the same low eight bits.
            let high = vshrn_n_s16::<8>(vaddq_s16(words, vdupq_n_s16(128)));
            vcombine_s8(high, vmovn_s16(words))
        } else {
            vreinterpretq_s8_s16(words)
        };
        // SAFETY: 16 bytes.
        unsafe { vst1q_s8(out.as_mut_ptr().cast(), cut) };
    }
    vaddvq_s32(sum)
}

/// Turns eight rows of eight words, rows so many bytes apart.
///
/// # Safety
/// The rows lie within slices.
#[target_feature(enable = "neon")]
pub(super) unsafe fn transpose_8(from: *const u8, stride: usize, to: *mut u8, to_stride: usize) {
    let row = |index: usize| {
        // SAFETY: the caller's.
        vreinterpretq_u16_u8(unsafe { vld1q_u8(from.add(index * stride)) })
    };
    let rows: [uint16x8_t; 8] = std::array::from_fn(row);
    // Rows i and i + 4 in turns; then those and i + 2 and i + 6; then all.
    let turns: [_; 4] = std::array::from_fn(|i| vzipq_u16(rows[i], rows[i + 4]));
    for (half, rows) in [turns.map(|two| two.0), turns.map(|two| two.1)].into_iter().enumerate() {
        let (even, odd) = (vzipq_u16(rows[0], rows[2]), vzipq_u16(rows[1], rows[3]));
        for (pair, (even, odd)) in [(even.0, odd.0), (even.1, odd.1)].into_iter().enumerate() {
            let columns = vzipq_u16(even, odd);
            let at = (4 * half + 2 * pair) * to_stride;
            // SAFETY: the caller's.
            unsafe {
                vst1q_u8(to.add(at), vreinterpretq_u8_u16(columns.0));
                vst1q_u8(to.add(at + to_stride), vreinterpretq_u8_u16(columns.1));
            }
        }
    }
}
