//! `mod.rs` in AVX2: sixteen codes at a time, each one load of its four channels. In AVX-512:
//! 64 codes at a time, looked up in registers.
#![allow(unsafe_code)] // Calls after detection, register loads and stores.

use crate::cpu::expand::CodeExpander;
use crate::cpu::int_dot::TileCodes;
use crate::cpu::int_dot::avx512::{TABLE_64, TABLE_256, look_up};
use crate::cpu::levels::CHUNKS;
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::TILE;
use kvd_core::Side;
use std::arch::x86_64::*;

/// Writes the four channels of `codes` (a multiple of 16) to four planes of as many bytes.
pub(super) fn expand_fours(simd: Simd, codes: &[u8], table: &[u32], out: &mut [u8]) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx2, "expand: instruction set");
    let table: &[u32; 256] = table.try_into().expect("expand: a table of 256");
    assert!(codes.len().is_multiple_of(16) && out.len() == 4 * codes.len(), "expand: lengths");
    // SAFETY: a `Simd` of this set exists only where the CPU has it; lengths are checked.
    unsafe { expand_fours_avx2(codes, table, out) }
}

#[target_feature(enable = "avx2")]
fn expand_fours_avx2(codes: &[u8], table: &[u32; 256], out: &mut [u8]) {
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

/// Writes the bytes of all channels of one tile of codes: by chunks of four times `per_row`, which
/// are what a tile has [`CHUNKS`] of.
pub(super) fn expand_tile(
    simd: Simd,
    expand: &CodeExpander,
    codes: TileCodes<'_>,
    side: Side,
    out: &mut [u8],
) {
    let dims = expand.tables.len();
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "expand: instruction set");
    assert_eq!(codes.bytes.len(), codes.tile_bytes(), "expand: a tile");
    assert!(codes.width.is_power_of_two() && codes.width <= 8, "expand: width");
    assert_eq!(out.len(), TILE * codes.per_row * dims, "expand: lengths");
    let chunk = TILE / CHUNKS * codes.per_row;
    let strides = match side {
        Side::Key => PlaneStrides { chunk, channel: TILE * codes.per_row },
        Side::Value => PlaneStrides { chunk: dims * chunk, channel: chunk },
    };
    let step = if dims.is_multiple_of(2) { 2 } else { 1 };
    for first in (0..dims).step_by(step) {
        // SAFETY: a `Simd` of this set exists only where the CPU has it; lengths are checked.
        unsafe {
            match (step, expand.bits) {
                (1, ..=6) => expand_tile_512::<1, TABLE_64>(expand, codes, first, strides, out),
                (1, _) => expand_tile_512::<1, TABLE_256>(expand, codes, first, strides, out),
                (_, ..=6) => expand_tile_512::<2, TABLE_64>(expand, codes, first, strides, out),
                (_, _) => expand_tile_512::<2, TABLE_256>(expand, codes, first, strides, out),
            }
        }
    }
}

/// Bytes from a chunk to the next, and from a channel to the next.
#[derive(Clone, Copy)]
struct PlaneStrides {
    chunk: usize,
    channel: usize,
}

/// Channels `first..first + N` of all codes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn expand_tile_512<const N: usize, const KIND: u8>(
    expand: &CodeExpander,
    TileCodes { bytes, width, per_row, .. }: TileCodes<'_>,
    first: usize,
    strides: PlaneStrides,
    out: &mut [u8],
) {
    let mut tables = [[_mm512_setzero_si512(); 4]; N];
    for (tables, bytes) in tables.iter_mut().zip(&expand.tables[first..]) {
        for (register, bytes) in tables.iter_mut().zip(bytes.as_chunks::<64>().0) {
            // SAFETY: 64 bytes.
            *register = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
        }
    }
    let mask = _mm512_set1_epi8((u8::MAX >> (8 - width)) as i8);
    let chunk = TILE / CHUNKS * per_row;
    for index in 0..CHUNKS {
        let start = (index & (width as usize - 1)) * chunk;
        let shift = (index as u32 >> width.trailing_zeros()) * width;
        let shift = _mm512_set1_epi16(shift as i16);
        let from = &bytes[start..start + chunk];
        let to = index * strides.chunk + first * strides.channel;
        let to = &mut out[to..to + (N - 1) * strides.channel + chunk];
        for at in (0..chunk).step_by(64) {
            let lanes = u64::MAX >> (64 - (chunk - at).min(64));
            // SAFETY: the lanes of the mask lie in the chunk.
            let codes = unsafe { _mm512_maskz_loadu_epi8(lanes, from.as_ptr().add(at).cast()) };
            let codes = _mm512_and_si512(_mm512_srlv_epi16(codes, shift), mask);
            for (channel, table) in tables.iter().enumerate() {
                let values = look_up::<KIND>(codes, table);
                // SAFETY: as above, in the output of that channel.
                unsafe {
                    let to = to.as_mut_ptr().add(channel * strides.channel + at);
                    _mm512_mask_storeu_epi8(to.cast(), lanes, values);
                }
            }
        }
    }
}
