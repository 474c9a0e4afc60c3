//! `expand.rs` in AVX2: sixteen codes at a time, each one load of its four channels.
#![allow(unsafe_code)] // A call after detection, register loads and stores.

use super::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Writes the four channels of `codes` (a multiple of 16) to four planes of as many bytes.
pub(super) fn fours(simd: Simd, codes: &[u8], table: &[u32], out: &mut [u8]) {
    assert_eq!(simd.set(), InstructionSet::Avx2, "expand: instruction set");
    let table: &[u32; 256] = table.try_into().expect("expand: a table of 256");
    assert!(codes.len().is_multiple_of(16) && out.len() == 4 * codes.len(), "expand: lengths");
    // SAFETY: a `Simd` of this set exists only where the CPU has it; lengths are checked.
    unsafe { fours_avx2(codes, table, out) }
}

#[target_feature(enable = "avx2")]
fn fours_avx2(codes: &[u8], table: &[u32; 256], out: &mut [u8]) {
    let by_channel = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let (planes, len) = (out.as_mut_ptr(), codes.len());
    for (index, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
        let four = |at: usize| {
            let entry = |i: usize| table[usize::from(codes[at + i])].cast_signed();
            _mm_shuffle_epi8(_mm_setr_epi32(entry(0), entry(1), entry(2), entry(3)), by_channel)
        };
        let (a, b, c, d) = (four(0), four(4), four(8), four(12));
        let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        let channels = [
            _mm_unpacklo_epi64(ab, cd),
            _mm_unpackhi_epi64(ab, cd),
            _mm_unpacklo_epi64(ab_high, cd_high),
            _mm_unpackhi_epi64(ab_high, cd_high),
        ];
        for (channel, bytes) in channels.into_iter().enumerate() {
            // SAFETY: four planes of `len` bytes, of which `16 * index` begin sixteen.
            unsafe { _mm_storeu_si128(planes.add(channel * len + 16 * index).cast(), bytes) };
        }
    }
}
