//! `mod.rs` in AVX2: a sign is a bit of its lane's word, tested where its code lies.
#![allow(unsafe_code)] // A call after detection, register loads and stores.

use crate::cpu::hybrid::{QUAD, sign_four};
use crate::cpu::int_dot::BIAS;
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Makes fours of codes, `[summed / 4, lanes]`, bytes of signed values; the signs of a lane are the
/// bits of its word.
pub(super) fn apply_signs(simd: Simd, codes: &mut [[u8; QUAD]], signs: &[u32]) {
    assert!(simd.vector_set() != InstructionSet::Portable, "sign: no registers");
    assert!(codes.len().is_multiple_of(signs.len()), "sign: lanes");
    assert!(codes.len() <= 8 * signs.len(), "sign: more codes than signs");
    // SAFETY: any other set of this processor's has AVX2, and was detected.
    let done = unsafe { sign_256(codes, signs) };
    if done < signs.len() {
        for (quad, codes) in codes.chunks_exact_mut(signs.len()).enumerate() {
            let rest = codes[done..].iter_mut().zip(&signs[done..]);
            rest.for_each(|(codes, signs)| sign_four(codes, signs >> (QUAD * quad)));
        }
    }
}

/// The bits of four signs, one in each byte: in the low or the high half of a byte of the word.
const BITS: [i32; 2] = [0x0804_0201, 0x8040_2010_u32.cast_signed()];
/// The first byte of each of four words, for each of its four bytes.
const LANES: [i32; 4] = [0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C];

/// Takes eight lanes at a time, and says how many of them it took.
#[target_feature(enable = "avx2")]
fn sign_256(codes: &mut [[u8; QUAD]], signs: &[u32]) -> usize {
    let bias = _mm256_set1_epi8(BIAS as i8);
    let lanes = _mm256_set_epi32(
        LANES[3], LANES[2], LANES[1], LANES[0], LANES[3], LANES[2], LANES[1], LANES[0],
    );
    for (quad, codes) in codes.chunks_exact_mut(signs.len()).enumerate() {
        let bits = _mm256_set1_epi32(BITS[quad % 2]);
        let select = _mm256_add_epi8(lanes, _mm256_set1_epi8((quad / 2) as i8));
        let codes = codes.as_chunks_mut::<8>().0;
        for (codes, signs) in codes.iter_mut().zip(signs.as_chunks::<8>().0) {
            let codes = codes.as_mut_ptr().cast();
            // SAFETY: 32 bytes each.
            let (four, words) =
                unsafe { (_mm256_loadu_si256(codes), _mm256_loadu_si256(signs.as_ptr().cast())) };
            let own = _mm256_and_si256(_mm256_shuffle_epi8(words, select), bits);
            // All ones where the bit is set: x ^ -1 + 1 is -x.
            let negative = _mm256_cmpeq_epi8(own, bits);
            let signed = _mm256_sub_epi8(_mm256_xor_si256(four, negative), negative);
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(codes, _mm256_add_epi8(signed, bias)) };
        }
    }
    signs.len() / 8 * 8
}
