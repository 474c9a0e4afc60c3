//! `mod.rs` in NEON: a sign is a bit of its lane's word, tested where its code lies.
#![allow(unsafe_code)] // Register loads and stores.

use crate::cpu::hybrid::{QUAD, sign_four};
use crate::cpu::int_dot::BIAS;
use std::arch::aarch64::*;

/// Lanes of a register.
const LANES: usize = 4;

/// Makes fours of codes, one for each lane, bytes of signed values; their signs are the bits from
/// `first` on, a multiple of four, of the lane's word.
pub(super) fn apply_signs(codes: &mut [[u8; QUAD]], signs: &[u32], first: u32) {
    assert_eq!(codes.len(), signs.len(), "sign: lanes");
    // SAFETY: NEON is part of the target.
    let done = unsafe { sign_lanes(codes, signs, first) };
    let rest = codes[done..].iter_mut().zip(&signs[done..]);
    rest.for_each(|(codes, signs)| sign_four(codes, signs >> first));
}

/// The bits of four signs, one in each byte: in the low or the high half of a byte of the word.
const BITS: [u32; 2] = [0x0804_0201, 0x8040_2010];

/// Takes four lanes at a time, and says how many it took.
#[target_feature(enable = "neon")]
fn sign_lanes(codes: &mut [[u8; QUAD]], signs: &[u32], first: u32) -> usize {
    const BYTES: [u8; 16] = [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12];
    let bits = vreinterpretq_u8_u32(vdupq_n_u32(BITS[(first / 4 % 2) as usize]));
    // SAFETY: 16 bytes.
    let lanes = unsafe { vld1q_u8(BYTES.as_ptr()) };
    let select = vaddq_u8(lanes, vdupq_n_u8((first / 8) as u8));
    let bias = vdupq_n_u8(BIAS as u8);
    let (codes, signs) = (codes.as_chunks_mut::<LANES>().0, signs.as_chunks::<LANES>().0);
    for (codes, signs) in codes.iter_mut().zip(signs) {
        // SAFETY: 16 bytes each.
        let (four, words) = unsafe { (vld1q_u8(codes.as_ptr().cast()), vld1q_u32(signs.as_ptr())) };
        let negative = vtstq_u8(vqtbl1q_u8(vreinterpretq_u8_u32(words), select), bits);
        let signed = vbslq_u8(negative, vsubq_u8(bias, four), vaddq_u8(bias, four));
        // SAFETY: 16 bytes.
        unsafe { vst1q_u8(codes.as_mut_ptr().cast(), signed) };
    }
    LANES * signs.len()
}
