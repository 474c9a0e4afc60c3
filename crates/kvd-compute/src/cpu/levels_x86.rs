//! `levels.rs` in AVX-512 (tables of 64 and 256 bytes in registers) and AVX2 (`vpshufb`, one
//! for each 16 levels).
#![allow(unsafe_code)] // Calls after detection, register loads and stores.

use super::dots_512_x86::{TABLE_64, TABLE_256, look_up as look};
use super::levels::{CHUNKS, LevelTable, Plane, RunCodes, code};
use super::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Writes the bytes of the codes of a tile to `out`, whose length the caller has checked.
pub(super) fn look_up(
    simd: Simd,
    codes: RunCodes<'_>,
    table: &LevelTable,
    stride: usize,
    out: &mut [u8],
) {
    // SAFETY: the instruction set was detected.
    unsafe {
        match (simd.set(), codes.width) {
            (InstructionSet::Avx2, 1 | 2 | 4) => run_256::<1, 1>(codes, table, stride, out),
            (InstructionSet::Avx2, 3) => run_256::<1, 2>(codes, table, stride, out),
            (InstructionSet::Avx2, 5) => run_256::<2, 2>(codes, table, stride, out),
            (InstructionSet::Avx2, 6) => run_256::<4, 2>(codes, table, stride, out),
            (InstructionSet::Avx2, 7) => run_256::<8, 3>(codes, table, stride, out),
            (InstructionSet::Avx2, _) => run_256::<16, 1>(codes, table, stride, out),
            (_, 1 | 2 | 4) => run_512::<TABLE_64, 1>(codes, table, stride, out),
            (_, 3 | 5 | 6) => run_512::<TABLE_64, 2>(codes, table, stride, out),
            (_, 7) => run_512::<TABLE_256, 3>(codes, table, stride, out),
            _ => run_512::<TABLE_256, 1>(codes, table, stride, out),
        }
    }
}

/// The bits of a code that a plane holds.
fn mask(plane: &Plane<'_>) -> i8 {
    (u8::MAX >> (8 - plane.width) << plane.low) as i8
}

/// Codes of `PARTS` planes: a rotation brings the bits of each to their place.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
fn run_512<const KIND: u8, const PARTS: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    stride: usize,
    out: &mut [u8],
) {
    let tables: [__m512i; 4] = std::array::from_fn(|index| {
        // SAFETY: 64 of 256 bytes.
        unsafe { _mm512_loadu_si512(table.bytes.as_ptr().add(64 * index).cast()) }
    });
    let (chunk, planes) = (codes.chunk(), codes.planes());
    let masks: [_; PARTS] = std::array::from_fn(|p| _mm512_set1_epi8(mask(&planes[p])));
    for index in 0..CHUNKS {
        let parts: [_; PARTS] = std::array::from_fn(|p| planes[p].part(index, chunk));
        let turns: [_; PARTS] = std::array::from_fn(|p| {
            _mm512_set1_epi16(planes[p].low as i16 - parts[p].shift as i16)
        });
        let out = &mut out[index * stride..][..chunk];
        for at in (0..chunk).step_by(64) {
            let lanes = u64::MAX >> (64 - (chunk - at).min(64));
            let mut codes = _mm512_setzero_si512();
            for p in 0..PARTS {
                // SAFETY: parts are as long as the chunk, and the lanes of the mask lie in it.
                let bytes = unsafe {
                    _mm512_maskz_loadu_epi8(lanes, parts[p].bytes.as_ptr().add(at).cast())
                };
                let turned = _mm512_shldv_epi16(bytes, bytes, turns[p]);
                // The bits under the mask, to those of other planes.
                codes = _mm512_ternarylogic_epi64::<0xF8>(codes, turned, masks[p]);
            }
            let bytes = look::<KIND>(codes, &tables);
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_epi8(out.as_mut_ptr().add(at).cast(), lanes, bytes) };
        }
    }
}

/// `TABLES` tables of 16 bytes. Of a code that another table serves, the upper half of the byte
/// differs: with 0x70 added it has its top bit, for which `vpshufb` gives zero.
#[target_feature(enable = "avx2")]
fn run_256<const TABLES: usize, const PARTS: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    stride: usize,
    out: &mut [u8],
) {
    let tables: [__m256i; TABLES] = std::array::from_fn(|index| {
        // SAFETY: 16 of 256 bytes.
        let bytes = unsafe { _mm_loadu_si128(table.bytes.as_ptr().add(16 * index).cast()) };
        _mm256_broadcastsi128_si256(bytes)
    });
    let (chunk, planes) = (codes.chunk(), codes.planes());
    let masks: [_; PARTS] = std::array::from_fn(|p| _mm256_set1_epi8(mask(&planes[p])));
    for index in 0..CHUNKS {
        let parts: [_; PARTS] = std::array::from_fn(|p| planes[p].part(index, chunk));
        let down = |p: usize| parts[p].shift.saturating_sub(planes[p].low);
        let up = |p: usize| planes[p].low.saturating_sub(parts[p].shift);
        let downs: [_; PARTS] = std::array::from_fn(|p| _mm_cvtsi32_si128(down(p) as i32));
        let ups: [_; PARTS] = std::array::from_fn(|p| _mm_cvtsi32_si128(up(p) as i32));
        let out = &mut out[index * stride..][..chunk];
        if chunk < 32 {
            for (at, out) in out.iter_mut().enumerate() {
                *out = table.bytes[usize::from(code(&planes, (index, chunk), at))];
            }
            continue;
        }
        // The last ones twice, where they fill no register.
        for at in (0..chunk).step_by(32).map(|at| at.min(chunk - 32)) {
            let mut codes = _mm256_setzero_si256();
            for p in 0..PARTS {
                // SAFETY: parts are as long as the chunk, of which 32 bytes begin at `at`.
                let bytes = unsafe { _mm256_loadu_si256(parts[p].bytes.as_ptr().add(at).cast()) };
                let mut bits = _mm256_srl_epi16(bytes, downs[p]);
                // The first plane has the lowest bits already.
                if p > 0 {
                    bits = _mm256_sll_epi16(bits, ups[p]);
                }
                codes = _mm256_or_si256(codes, _mm256_and_si256(bits, masks[p]));
            }
            let bytes = look_256(codes, &tables);
            // SAFETY: as above.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(at).cast(), bytes) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn look_256<const TABLES: usize>(codes: __m256i, tables: &[__m256i; TABLES]) -> __m256i {
    if TABLES == 1 {
        return _mm256_shuffle_epi8(tables[0], codes);
    }
    let mut bytes = _mm256_setzero_si256();
    for (index, table) in tables.iter().enumerate() {
        let own = _mm256_xor_si256(codes, _mm256_set1_epi8((index as i8) << 4));
        let own = _mm256_adds_epu8(own, _mm256_set1_epi8(0x70));
        bytes = _mm256_or_si256(bytes, _mm256_shuffle_epi8(*table, own));
    }
    bytes
}
