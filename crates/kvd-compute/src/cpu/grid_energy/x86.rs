//! `mod.rs` in AVX2 and AVX-512: squares of distances by pairs of codes.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.

use super::{LANES, QUAD};
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// As `mod.rs` has it.
pub(super) fn tile_energy(simd: Simd, tile: &[u8], biases: &[u8]) -> i32 {
    assert_eq!(tile.len(), biases.len() / QUAD * LANES, "energy: codes");
    // SAFETY: the set was detected, lengths are as asserted.
    unsafe {
        match simd.vector_set() {
            InstructionSet::Avx512 => tile_energy_512(tile, biases),
            _ => tile_energy_256(tile, biases),
        }
    }
}

/// # Safety
/// There is AVX-512BW, and a tile has `LANES` codes for each quad of biases.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn tile_energy_512(tile: &[u8], biases: &[u8]) -> i32 {
    // Two sums of each token, of two codes.
    let mut sums = [_mm512_setzero_si512(); 4];
    for (quad, bias) in biases.as_chunks::<QUAD>().0.iter().enumerate() {
        let bias = _mm512_cvtepu8_epi16(_mm256_set1_epi32(i32::from_ne_bytes(*bias)));
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: within the quad's codes.
            let codes = unsafe {
                let at = tile.as_ptr().add(quad * LANES + part * LANES / 4);
                _mm512_cvtepu8_epi16(_mm256_loadu_si256(at.cast()))
            };
            let apart = _mm512_sub_epi16(codes, bias);
            *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(apart, apart));
        }
    }
    let both = sums.map(|sum| _mm512_add_epi32(sum, _mm512_shuffle_epi32::<0b1011_0001>(sum)));
    let [a, b, c, d] = both;
    _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d)))
}

/// # Safety
/// There is AVX2, and a tile has `LANES` codes for each quad of biases.
#[target_feature(enable = "avx2")]
unsafe fn tile_energy_256(tile: &[u8], biases: &[u8]) -> i32 {
    let mut sums = [_mm256_setzero_si256(); 8];
    for (quad, bias) in biases.as_chunks::<QUAD>().0.iter().enumerate() {
        let bias = _mm256_cvtepu8_epi16(_mm_set1_epi32(i32::from_ne_bytes(*bias)));
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: within the quad's codes.
            let codes = unsafe {
                let at = tile.as_ptr().add(quad * LANES + part * LANES / 8);
                _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()))
            };
            let apart = _mm256_sub_epi16(codes, bias);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(apart, apart));
        }
    }
    let both = sums.map(|sum| _mm256_add_epi32(sum, _mm256_shuffle_epi32::<0b1011_0001>(sum)));
    let most = both.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_max_epi32(a, b));
    let mut lanes = [0i32; 8];
    // SAFETY: as many.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), most) };
    lanes.into_iter().fold(0, i32::max)
}
