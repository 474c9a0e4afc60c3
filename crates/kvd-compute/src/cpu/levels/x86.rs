//! `mod.rs` in AVX-512 (tables of 64 and 256 bytes in registers) and AVX2 (`vpshufb`, one
//! for each 16 levels).
#![allow(unsafe_code)] // Calls after detection, register loads and stores.

use crate::cpu::int_dot::avx512::{TABLE_64, TABLE_256, look_up as look};
use crate::cpu::levels::{BitPlane, CHUNKS, LevelTable, OutputLayout, RunCodes, code_at};
use std::arch::x86_64::*;

/// Writes the bytes of the codes of some tiles to `out`, whose length the caller has checked, as
/// it has that there is AVX-512.
#[inline]
pub(super) fn look_up_512(
    codes: RunCodes<'_>,
    table: &LevelTable,
    to: OutputLayout,
    out: &mut [u8],
) {
    // SAFETY: the instruction set was detected.
    unsafe {
        match codes.width {
            1 => run_512::<TABLE_64, 1>(codes, table, to, out),
            2 => run_512::<TABLE_64, 2>(codes, table, to, out),
            3 => run_512::<TABLE_64, 3>(codes, table, to, out),
            4 => run_512::<TABLE_64, 4>(codes, table, to, out),
            5 => run_512::<TABLE_64, 5>(codes, table, to, out),
            6 => run_512::<TABLE_64, 6>(codes, table, to, out),
            7 => run_512::<TABLE_256, 7>(codes, table, to, out),
            _ => run_512::<TABLE_256, 8>(codes, table, to, out),
        }
    }
}

/// Writes the bytes of one tile in AVX2, chunks `stride` apart.
#[inline]
pub(super) fn look_up_256(codes: RunCodes<'_>, table: &LevelTable, stride: usize, out: &mut [u8]) {
    // SAFETY: the instruction set was detected.
    unsafe {
        match codes.width {
            1 | 2 | 4 => run_256::<1, 1>(codes, table, stride, out),
            3 => run_256::<1, 2>(codes, table, stride, out),
            5 => run_256::<2, 2>(codes, table, stride, out),
            6 => run_256::<4, 2>(codes, table, stride, out),
            7 => run_256::<8, 3>(codes, table, stride, out),
            _ => run_256::<16, 1>(codes, table, stride, out),
        }
    }
}

/// The bits of a code that a plane holds.
fn plane_mask(plane: &BitPlane<'_>) -> i8 {
    (u8::MAX >> (8 - plane.width) << plane.low) as i8
}

/// Codes of `WIDTH` bits. A tile has as many registers of bits, each of which serves several
/// chunks: they are loaded once for all of those, and shifts are constants. A chunk's last register
/// comes first: what it spills over the next chunk is then written again.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
fn run_512<const KIND: u8, const WIDTH: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    places: OutputLayout,
    out: &mut [u8],
) {
    let mut tables = [_mm512_setzero_si512(); 4];
    for (register, bytes) in tables.iter_mut().zip(table.bytes.as_chunks::<64>().0) {
        // SAFETY: 64 bytes.
        *register = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    }
    let (chunk, stride) = (codes.chunk_codes(), places.chunk);
    let out = out[places.first..].as_mut_ptr();
    for (tile, bytes) in codes.bytes.chunks_exact(WIDTH * chunk).enumerate() {
        let (from, to) = (bytes.as_ptr(), out.wrapping_add(tile * places.tile));
        for at in (0..chunk).step_by(64).rev() {
            let lanes = u64::MAX >> (64 - (chunk - at).min(64));
            let mut parts = [_mm512_setzero_si512(); WIDTH];
            for (index, part) in parts.iter_mut().enumerate() {
                // SAFETY: there are `WIDTH` chunks of bytes, and the lanes of the mask lie in one.
                *part =
                    unsafe { _mm512_maskz_loadu_epi8(lanes, from.add(index * chunk + at).cast()) };
            }
            macro_rules! chunks {
                ($write:ident: $($index:literal)*) => {$(
                    let bytes = look::<KIND>(chunk_of::<WIDTH, $index>(&parts), &tables);
                    // SAFETY: `levels::look_up` has checked that [`CHUNKS`] of them, 8, fit `out`,
                    // and a register more where it is free.
                    unsafe { $write(to.add($index * stride + at), lanes, bytes) };
                )*};
            }
            if places.free || lanes == u64::MAX {
                chunks!(write_all: 0 1 2 3 4 5 6 7);
            } else {
                chunks!(write_some: 0 1 2 3 4 5 6 7);
            }
        }
    }
}

/// # Safety
/// 64 bytes may be written.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_all(to: *mut u8, _: u64, bytes: __m512i) {
    // SAFETY: the caller's.
    unsafe { _mm512_storeu_si512(to.cast(), bytes) };
}

/// # Safety
/// The bytes of the lanes may be written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn write_some(to: *mut u8, lanes: u64, bytes: __m512i) {
    // SAFETY: the caller's.
    unsafe { _mm512_mask_storeu_epi8(to.cast(), lanes, bytes) };
}

/// The codes of chunk `INDEX` from the parts of all planes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
pub(in crate::cpu) fn chunk_of<const WIDTH: usize, const INDEX: usize>(
    parts: &[__m512i; WIDTH],
) -> __m512i {
    // Not a loop over planes: what is constant would be counted at run time.
    let codes = with_plane::<WIDTH, INDEX, 8>(_mm512_setzero_si512(), parts);
    let codes = with_plane::<WIDTH, INDEX, 4>(codes, parts);
    let codes = with_plane::<WIDTH, INDEX, 2>(codes, parts);
    with_plane::<WIDTH, INDEX, 1>(codes, parts)
}

/// With the bits of the plane of `PLANE` bits, where codes have one. Bits above a code are
/// anything: look-ups do not mind.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
fn with_plane<const WIDTH: usize, const INDEX: usize, const PLANE: usize>(
    codes: __m512i,
    parts: &[__m512i; WIDTH],
) -> __m512i {
    if WIDTH & PLANE == 0 {
        return codes;
    }
    // Planes of more bits come before, and hold lower bits.
    let low = WIDTH & !(2 * PLANE - 1);
    let part = parts[low + INDEX % PLANE];
    let turn = low as i16 - (INDEX / PLANE * PLANE) as i16;
    let turned = match turn {
        0 => part,
        _ => _mm512_shldv_epi16(part, part, _mm512_set1_epi16(turn)),
    };
    if low == 0 {
        return turned;
    }
    let mask = _mm512_set1_epi8((u8::MAX >> (8 - PLANE) << low) as i8);
    // The bits under the mask, else those of other planes.
    _mm512_ternarylogic_epi64::<0xCA>(mask, turned, codes)
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
    let (chunk, planes) = (codes.chunk_codes(), codes.tile_planes());
    let masks: [_; PARTS] = std::array::from_fn(|p| _mm256_set1_epi8(plane_mask(&planes[p])));
    for index in 0..CHUNKS {
        let parts: [_; PARTS] = std::array::from_fn(|p| planes[p].chunk_part(index, chunk));
        let down = |p: usize| parts[p].shift.saturating_sub(planes[p].low);
        let up = |p: usize| planes[p].low.saturating_sub(parts[p].shift);
        let downs: [_; PARTS] = std::array::from_fn(|p| _mm_cvtsi32_si128(down(p) as i32));
        let ups: [_; PARTS] = std::array::from_fn(|p| _mm_cvtsi32_si128(up(p) as i32));
        let out = &mut out[index * stride..][..chunk];
        if chunk < 32 {
            for (at, out) in out.iter_mut().enumerate() {
                *out = table.bytes[usize::from(code_at(&planes, index, chunk, at))];
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
