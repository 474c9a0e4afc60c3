//! `hybrid.rs` in AVX-512 and AVX2: a sign is a bit of its lane's word, tested where its code lies.
#![allow(unsafe_code)] // A call after detection, register loads and stores.

use super::dots::BIAS;
use super::hybrid::{QUAD, sign_four};
use super::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Makes fours of codes, one for each lane, bytes of signed values; their signs are the bits from
/// `first` on, a multiple of four, of the lane's word.
pub(super) fn sign(simd: Simd, codes: &mut [[u8; QUAD]], signs: &[u32], first: u32) {
    assert_eq!(codes.len(), signs.len(), "sign: lanes");
    // SAFETY: the instruction set was detected.
    let done = unsafe {
        match simd.set() {
            InstructionSet::Avx512 => sign_512(codes, signs, first),
            _ => sign_256(codes, signs, first),
        }
    };
    let rest = codes[done..].iter_mut().zip(&signs[done..]);
    rest.for_each(|(codes, signs)| sign_four(codes, signs >> first));
}

/// The bits of four signs, one in each byte: in the low or the high half of a byte of the word.
const BITS: [i32; 2] = [0x0804_0201, 0x8040_2010_u32.cast_signed()];

/// Takes 16 lanes at a time, and says how many it took.
#[target_feature(enable = "avx512f,avx512bw")]
fn sign_512(codes: &mut [[u8; QUAD]], signs: &[u32], first: u32) -> usize {
    let bits = _mm512_set1_epi32(BITS[(first / 4 % 2) as usize]);
    let byte = _mm512_set1_epi32((first / 8) as i32 * 0x0101_0101);
    let lanes = _mm512_set4_epi32(0x0C0C_0C0C, 0x0808_0808, 0x0404_0404, 0);
    let select = _mm512_add_epi8(lanes, byte);
    let bias = _mm512_set1_epi8(BIAS as i8);
    let (codes, signs) = (codes.as_chunks_mut::<16>().0, signs.as_chunks::<16>().0);
    for (codes, signs) in codes.iter_mut().zip(signs) {
        // SAFETY: 64 bytes each.
        let (four, words) = unsafe {
            (_mm512_loadu_si512(codes.as_ptr().cast()), _mm512_loadu_si512(signs.as_ptr().cast()))
        };
        let negative = _mm512_test_epi8_mask(_mm512_shuffle_epi8(words, select), bits);
        let positive = _mm512_add_epi8(bias, four);
        let biased = _mm512_mask_sub_epi8(positive, negative, bias, four);
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_si512(codes.as_mut_ptr().cast(), biased) };
    }
    16 * signs.len()
}

/// Takes eight lanes at a time, and says how many it took.
#[target_feature(enable = "avx2")]
fn sign_256(codes: &mut [[u8; QUAD]], signs: &[u32], first: u32) -> usize {
    let bits = _mm256_set1_epi32(BITS[(first / 4 % 2) as usize]);
    let byte = _mm256_set1_epi32((first / 8) as i32 * 0x0101_0101);
    let lanes = _mm256_setr_epi32(
        0,
        0x0404_0404,
        0x0808_0808,
        0x0C0C_0C0C,
        0,
        0x0404_0404,
        0x0808_0808,
        0x0C0C_0C0C,
    );
    let select = _mm256_add_epi8(lanes, byte);
    let bias = _mm256_set1_epi8(BIAS as i8);
    let (codes, signs) = (codes.as_chunks_mut::<8>().0, signs.as_chunks::<8>().0);
    for (codes, signs) in codes.iter_mut().zip(signs) {
        // SAFETY: 32 bytes each.
        let (four, words) = unsafe {
            (_mm256_loadu_si256(codes.as_ptr().cast()), _mm256_loadu_si256(signs.as_ptr().cast()))
        };
        let own = _mm256_and_si256(_mm256_shuffle_epi8(words, select), bits);
        // All ones where the bit is set: x ^ -1 + 1 is -x.
        let negative = _mm256_cmpeq_epi8(own, bits);
        let signed = _mm256_sub_epi8(_mm256_xor_si256(four, negative), negative);
        // SAFETY: 32 bytes.
        unsafe {
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_add_epi8(signed, bias));
        }
    }
    8 * signs.len()
}
