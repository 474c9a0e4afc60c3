//! `mod.rs` in AVX-512: scales are taken apart, and turned, in registers; codes get their signs
//! on their way out of a plane.
#![allow(unsafe_code)] // Calls after detection, register loads and stores.

use crate::cpu::hybrid::{HybridScales, QUAD, ScaleRows, SignWords};
use crate::cpu::int_dot::{BIAS, TileCodes};
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Lanes of a register of words.
pub(super) const LANES: usize = 16;
/// Groups of a row that is turned in registers.
const TURNED: usize = 4;
/// Bytes of such a row: words, then steps.
const TURNED_BYTES: usize = 6 * TURNED;

/// Takes scale rows apart into `groups`, whose lengths are theirs, where a register holds whole
/// ones; `false` where not.
pub(super) fn load_scales(
    simd: Simd,
    groups: &mut HybridScales,
    rows: ScaleRows<'_>,
    turned: bool,
) -> bool {
    if simd.vector_set() != InstructionSet::Avx512 {
        return false;
    }
    let ScaleRows { bytes, layout, first, count, pairs } = rows;
    let len = count * pairs;
    let of = [&groups.zeros, &groups.steps, &groups.centres];
    assert!(groups.signs.len() == len && of.iter().all(|of| of.len() == len), "load: groups");
    assert!(layout.row_bytes >= 6 * pairs, "load: row");
    let (modes, rows_of) = bytes.split_at(layout.mask_bytes);
    assert!(8 * modes.len() >= (first + count) * pairs, "load: modes");
    let rows_of = &rows_of[first * layout.row_bytes..][..count * layout.row_bytes];
    let whole = modes.get(first * pairs / 8..).filter(|_| (first * pairs).is_multiple_of(8));
    let Some(modes) = whole else { return false };
    if turned && pairs == TURNED && layout.row_bytes == TURNED_BYTES && count.is_multiple_of(LANES)
    {
        // SAFETY: detected; a mode for each group, whole rows.
        unsafe { load_turned(groups, modes, rows_of) };
        return true;
    }
    if !turned && pairs.is_multiple_of(LANES) {
        // SAFETY: as above.
        unsafe { load_rows(groups, modes, rows_of, pairs, layout.row_bytes) };
        return true;
    }
    false
}

/// Rows as they lie, 16 groups at a time.
#[target_feature(enable = "avx512f,avx512bw")]
fn load_rows(groups: &mut HybridScales, modes: &[u8], rows: &[u8], pairs: usize, row_bytes: usize) {
    for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
        let (words, halves) = bytes.split_at(4 * pairs);
        let chunks = words.as_chunks::<64>().0.iter().zip(halves.as_chunks::<32>().0);
        for (chunk, (words, halves)) in chunks.enumerate() {
            let at = row * pairs + chunk * LANES;
            let modes = u16::from_le_bytes([modes[at / 8], modes[at / 8 + 1]]);
            // SAFETY: 64 and 32 bytes.
            let (words, halves) = unsafe {
                let words = _mm512_loadu_si512(words.as_ptr().cast());
                (words, _mm256_loadu_si256(halves.as_ptr().cast()))
            };
            store_scales(groups, at, words, halves, modes);
        }
    }
}

/// Rows of four groups; groups come before rows then, 16 rows at a time.
#[target_feature(enable = "avx512f,avx512bw")]
fn load_turned(groups: &mut HybridScales, modes: &[u8], rows: &[u8]) {
    let count = rows.len() / TURNED_BYTES;
    let blocks = rows.as_chunks::<{ LANES * TURNED_BYTES }>().0.iter();
    for (block, (rows, modes)) in blocks.zip(modes.as_chunks::<8>().0).enumerate() {
        let (rows, _) = rows.as_chunks::<TURNED_BYTES>();
        let words = turn_words(rows);
        let halves = turn_halves(rows);
        // A byte for each group of a row, tested where the group is.
        let of_rows = _mm512_movm_epi8(u64::from_le_bytes(*modes));
        for (pair, (words, halves)) in words.into_iter().zip(halves).enumerate() {
            let modes = _mm512_test_epi32_mask(of_rows, _mm512_set1_epi32(1 << (8 * pair)));
            store_scales(groups, pair * count + block * LANES, words, halves, modes);
        }
    }
}

/// Words of 16 rows by group.
#[inline]
#[target_feature(enable = "avx512f")]
fn turn_words(rows: &[[u8; TURNED_BYTES]]) -> [__m512i; TURNED] {
    let mut quads = [_mm512_setzero_si512(); 4];
    for (quad, rows) in quads.iter_mut().zip(rows.as_chunks::<4>().0) {
        // SAFETY: the first 16 bytes of a row are its words.
        let words = |row: usize| unsafe { _mm_loadu_si128(rows[row].as_ptr().cast()) };
        let low = _mm512_castsi128_si512(words(0));
        let low = _mm512_inserti32x4::<1>(low, words(1));
        *quad = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, words(2)), words(3));
    }
    // Groups 0 and 1, then 2 and 3, of eight rows.
    let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    let second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    let a = _mm512_permutex2var_epi32(quads[0], first, quads[1]);
    let b = _mm512_permutex2var_epi32(quads[0], second, quads[1]);
    let c = _mm512_permutex2var_epi32(quads[2], first, quads[3]);
    let d = _mm512_permutex2var_epi32(quads[2], second, quads[3]);
    [
        _mm512_shuffle_i64x2::<0x44>(a, c),
        _mm512_shuffle_i64x2::<0xEE>(a, c),
        _mm512_shuffle_i64x2::<0x44>(b, d),
        _mm512_shuffle_i64x2::<0xEE>(b, d),
    ]
}

/// Where 16 rows of [`TURNED`] values have those of two groups.
const FIRST_PAIRS: [u16; 2 * LANES] = pairs_from(0);
const LAST_PAIRS: [u16; 2 * LANES] = pairs_from(2);

const fn pairs_from(first: usize) -> [u16; 2 * LANES] {
    let (mut order, mut at) = ([0; 2 * LANES], 0);
    while at < 2 * LANES {
        order[at] = (TURNED * (at % LANES) + first + at / LANES) as u16;
        at += 1;
    }
    order
}

/// Steps of 16 rows by group, as f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_halves(rows: &[[u8; TURNED_BYTES]]) -> [__m256i; TURNED] {
    let of = |row: usize| {
        let row = &rows[row];
        i64::from_le_bytes([row[16], row[17], row[18], row[19], row[20], row[21], row[22], row[23]])
    };
    let low = _mm512_setr_epi64(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7));
    let high = _mm512_setr_epi64(of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15));
    // SAFETY: 64 bytes each.
    let (first, last) = unsafe {
        let first = _mm512_loadu_si512(FIRST_PAIRS.as_ptr().cast());
        (first, _mm512_loadu_si512(LAST_PAIRS.as_ptr().cast()))
    };
    let a = _mm512_permutex2var_epi16(low, first, high);
    let b = _mm512_permutex2var_epi16(low, last, high);
    let upper = |register| _mm512_extracti64x4_epi64::<1>(register);
    [_mm512_castsi512_si256(a), upper(a), _mm512_castsi512_si256(b), upper(b)]
}

/// Writes what words, f16 steps and modes of 16 groups stand for.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_scales(
    groups: &mut HybridScales,
    at: usize,
    words: __m512i,
    halves: __m256i,
    modes: __mmask16,
) {
    let steps = _mm512_cvtph_ps(halves);
    let zeros = _mm512_maskz_mov_ps(!modes, _mm512_castsi512_ps(words));
    let centres = _mm512_maskz_mov_ps(!modes, steps);
    let signs = _mm512_maskz_mov_epi32(modes, words);
    // SAFETY: 16 values each.
    unsafe {
        _mm512_storeu_ps(groups.zeros[at..][..LANES].as_mut_ptr(), zeros);
        _mm512_storeu_ps(groups.steps[at..][..LANES].as_mut_ptr(), steps);
        _mm512_storeu_ps(groups.centres[at..][..LANES].as_mut_ptr(), centres);
        _mm512_storeu_si512(groups.signs[at..][..LANES].as_mut_ptr().cast(), signs);
    }
}

/// Writes a tile's codes as bytes of signed values; `false` where lanes fill no register.
pub(super) fn unpack_signed(
    simd: Simd,
    codes: TileCodes<'_>,
    signs: SignWords<'_>,
    out: &mut [u8],
) -> bool {
    if simd.vector_set() != InstructionSet::Avx512 {
        return false;
    }
    let quad_bytes = QUAD * signs.lanes;
    if !signs.lanes.is_multiple_of(LANES) || !codes.bytes.len().is_multiple_of(quad_bytes) {
        return false;
    }
    let groups = (out.len() / quad_bytes).div_ceil(signs.quads);
    assert_eq!(out.len() * codes.width as usize, 8 * codes.bytes.len(), "spread: lengths");
    assert!(signs.quads <= 8 && signs.words.len() >= groups * signs.lanes, "spread: signs");
    let planes = (0..8).step_by(codes.width as usize).zip(out.chunks_exact_mut(codes.bytes.len()));
    let plane_quads = codes.bytes.len() / quad_bytes;
    for (plane, (shift, out)) in planes.enumerate() {
        let (first, mask) = (plane * plane_quads, u8::MAX >> (8 - codes.width));
        // SAFETY: detected.
        unsafe {
            match shift {
                0 => unpack_plane::<0>(codes.bytes, signs, first, mask, out),
                1 => unpack_plane::<1>(codes.bytes, signs, first, mask, out),
                2 => unpack_plane::<2>(codes.bytes, signs, first, mask, out),
                3 => unpack_plane::<3>(codes.bytes, signs, first, mask, out),
                4 => unpack_plane::<4>(codes.bytes, signs, first, mask, out),
                5 => unpack_plane::<5>(codes.bytes, signs, first, mask, out),
                6 => unpack_plane::<6>(codes.bytes, signs, first, mask, out),
                _ => unpack_plane::<7>(codes.bytes, signs, first, mask, out),
            }
        }
    }
    true
}

/// The bits of four signs, one in each byte: in the low or the high half of a byte of the word.
pub(super) const BITS: [i32; 2] = [0x0804_0201, 0x8040_2010_u32.cast_signed()];

/// The plane whose first four codes are fours `first` of the tile.
#[target_feature(enable = "avx512f,avx512bw")]
fn unpack_plane<const SHIFT: u32>(
    bytes: &[u8],
    signs: SignWords<'_>,
    first: usize,
    mask: u8,
    out: &mut [u8],
) {
    let (bias, mask) = (_mm512_set1_epi8(BIAS as i8), _mm512_set1_epi8(mask as i8));
    // The first byte of each word, for each of its four bytes.
    let lanes = _mm512_set4_epi32(0x0C0C_0C0C, 0x0808_0808, 0x0404_0404, 0);
    let quad_bytes = QUAD * signs.lanes;
    let quads = bytes.chunks_exact(quad_bytes).zip(out.chunks_exact_mut(quad_bytes));
    for (quad, (bytes, out)) in (first..).zip(quads) {
        let (group, quad) = (quad / signs.quads, quad % signs.quads);
        let bits = _mm512_set1_epi32(BITS[quad % 2]);
        let select = _mm512_add_epi8(lanes, _mm512_set1_epi8((quad / 2) as i8));
        let words = signs.words[group * signs.lanes..][..signs.lanes].as_chunks::<LANES>().0;
        let lines = bytes.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<64>().0);
        for ((from, to), words) in lines.zip(words) {
            // SAFETY: 64 bytes each.
            let (codes, words) = unsafe {
                let words = _mm512_loadu_si512(words.as_ptr().cast());
                (_mm512_loadu_si512(from.as_ptr().cast()), words)
            };
            let codes = _mm512_srli_epi16::<SHIFT>(codes);
            let negative = _mm512_test_epi8_mask(_mm512_shuffle_epi8(words, select), bits);
            // codes & mask | bias; and 256 less that is the bias less the code.
            let positive = _mm512_ternarylogic_epi32::<0xF8>(bias, codes, mask);
            let zero = _mm512_setzero_si512();
            let biased = _mm512_mask_sub_epi8(positive, negative, zero, positive);
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), biased) };
        }
    }
}
