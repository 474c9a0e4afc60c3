//! `mod.rs` in AVX2, where `vpshufb` looks up 32 codes of one position: codes are turned
//! first, four positions of 32 tokens at a time. `vpmaddubsw` adds two positions' bytes times
//! their factors; few enough of them are added up before sums of 16 bits become wider.
#![allow(unsafe_code)] // Register loads and stores, and a call after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::TileCodes;
use crate::cpu::int_operands::NOTHING;
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::score_tables::{CODES, QUAD, ROWS, TableKeys};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::x86_64::*;
use std::ops::Range;

/// The largest byte.
const TOP: f32 = 255.0;
/// Most that factors of positions whose sums have 16 bits add up to: 128 times 255 is less than
/// `2^15`.
const FACTORS: usize = 128;
/// Bytes of a tile that hold two quads' codes.
const STEP: usize = TILE * QUAD;
/// Steps whose sums have 16 bits.
const STEPS: usize = 4;

/// Takes the next row: a query, and what codes stand for by channel of a code.
pub(super) fn push_query(
    simd: Simd,
    keys: &mut TableKeys,
    query: &[f32],
    entries: &[[f32; CODES]],
) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx2, "score tables: instruction set");
    assert_eq!(query.len(), keys.positions * entries.len(), "score tables: query");
    let (index, half) = (keys.units.len(), keys.positions / 2);
    let mut scores = vec![[0f32; CODES]; keys.positions];
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    let base = unsafe { score_codes(query, entries, &mut scores) };
    let most = |scores: &[f32; CODES]| scores.iter().fold(0f32, |most, score| most.max(*score));
    let reach: Vec<f32> = scores.iter().map(most).collect();
    // Each factor is rounded up, by less than one.
    let some = half.min(STEPS * QUAD);
    let (low, high) = reach.split_at(half);
    let sums = low.chunks(some).zip(high.chunks(some));
    let sums = sums.map(|(low, high)| low.iter().chain(high).sum::<f32>());
    let unit = sums.fold(0f32, f32::max) / (TOP * (FACTORS - 2 * some) as f32);
    // An overflow has no unit; the score is of no use anyway.
    let some = unit > NOTHING && unit.is_finite();
    keys.units.push(if some { unit } else { 0.0 });
    keys.bases.push(base);
    if !some {
        return;
    }
    for (position, (scores, reach)) in scores.iter().zip(&reach).enumerate() {
        let factor = (reach / (unit * TOP)).ceil().max(1.0);
        *factor_of(keys, index, position) = factor as u8;
        let (quad, place) = (position / QUAD, position % QUAD);
        let table = &mut keys.tables[quad * keys.rows + index].0[place];
        // SAFETY: as above.
        unsafe { round_scores(scores, 1.0 / (unit * factor), table) };
    }
}

/// Where the factor of a position lies: beside that of the position whose codes share its bytes.
pub(super) fn factor_of(keys: &mut TableKeys, row: usize, position: usize) -> &mut u8 {
    let half = keys.positions / 2;
    let (plane, at) = (position / half, position % half);
    let of_step = 2 * (at / QUAD * keys.rows + row);
    let byte = 2 * (at % QUAD) + plane;
    &mut keys.factors[of_step + byte / QUAD][byte % QUAD]
}

/// Writes each code's share of a score less the least of its position; returns the sum of the
/// least.
#[target_feature(enable = "avx2,fma")]
fn score_codes(query: &[f32], entries: &[[f32; CODES]], scores: &mut [[f32; CODES]]) -> f32 {
    let mut base = 0.0;
    for (scores, channels) in scores.iter_mut().zip(query.chunks_exact(entries.len())) {
        for (channel, entries) in channels.iter().zip(entries) {
            scores.iter_mut().zip(entries).for_each(|(score, entry)| *score += channel * entry);
        }
        let least = scores.iter().fold(f32::INFINITY, |least, score| least.min(*score));
        scores.iter_mut().for_each(|score| *score -= least);
        base += least;
    }
    base
}

/// Rounds scores to bytes.
#[target_feature(enable = "avx2,fma")]
fn round_scores(scores: &[f32; CODES], inverse: f32, table: &mut [u8; CODES]) {
    for (byte, score) in table.iter_mut().zip(scores) {
        *byte = crate::cpu::int_operands::round_to_int(score * inverse) as u8;
    }
}

/// Calls `score_tile::<rows>`.
macro_rules! by_rows {
    ($rows:expr, $args:tt) => {
        match $rows {
            1 => score_tile::<1> $args,
            2 => score_tile::<2> $args,
            3 => score_tile::<3> $args,
            ROWS => score_tile::<ROWS> $args,
            rows => unreachable!("{rows} rows at once"),
        }
    };
}

/// Writes the scores of some rows of `keys`, [`SPAN`] apart. Only where there is AVX2 are there
/// any.
pub(super) fn sum_tables(
    codes: TileCodes<'_>,
    keys: &TableKeys,
    rows: Range<usize>,
    out: &mut [f32],
) {
    let quads = codes.per_row / QUAD;
    let tile_bytes = STEP * quads / 2;
    let tiles = codes.bytes.len() / tile_bytes;
    assert!(quads.is_multiple_of(2) && quads > 0, "score tables: quads");
    assert!(codes.bytes.len().is_multiple_of(tile_bytes), "score tables: tiles");
    assert!(!rows.is_empty() && rows.len() <= ROWS, "score tables: rows");
    assert!(rows.end <= keys.rows, "score tables: rows");
    let count = quads * keys.rows;
    assert_eq!(keys.tables.len(), count, "score tables: tables");
    assert_eq!(keys.factors.len(), count, "score tables: factors");
    assert!(out.len() >= (rows.len() - 1) * SPAN + tiles * TILE, "score tables: scores");
    for (at, bytes) in codes.bytes.chunks_exact(tile_bytes).enumerate() {
        let (prefetch, out) = (codes.prefetch.share_of(at, tiles), &mut out[at * TILE..]);
        // SAFETY: lengths are as asserted, and who made the tables knows of the instructions.
        unsafe { by_rows!(rows.len(), (bytes, prefetch, keys, rows.start, out)) };
    }
}

/// Rows from `first` on over a tile.
#[target_feature(enable = "avx2,fma")]
unsafe fn score_tile<const R: usize>(
    bytes: &[u8],
    prefetch: PrefetchBytes<'_>,
    keys: &TableKeys,
    first: usize,
    out: &mut [f32],
) {
    let steps = bytes.as_chunks::<STEP>().0;
    let mut prefetch = prefetch.in_steps(steps.len());
    let low = _mm256_set1_epi8(0x0F);
    let mut wide = [[_mm256_setzero_si256(); 4]; R];
    for at in (0..steps.len()).step_by(STEPS) {
        // Of 16 tokens each, 16 bits.
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for step in at..steps.len().min(at + STEPS) {
            prefetch.next_step();
            let of_step = step * keys.rows + first;
            let quads = [of_step, of_step + steps.len() * keys.rows];
            for (place, codes) in transpose_codes(&steps[step]).into_iter().enumerate() {
                let codes = [codes, _mm256_srli_epi16::<4>(codes)];
                let codes = codes.map(|codes| _mm256_and_si256(codes, low));
                for row in 0..R {
                    let look_up = |plane: usize| {
                        // SAFETY: there are tables for all rows of all quads, of 16 bytes.
                        let table = unsafe {
                            let tables = keys.tables.as_ptr().add(quads[plane] + row);
                            _mm_load_si128((*tables).0[place].as_ptr().cast())
                        };
                        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes[plane])
                    };
                    let (a, b) = (look_up(0), look_up(1));
                    // SAFETY: there are four pairs of factors for all rows of all steps.
                    let factors = unsafe {
                        let pairs = keys.factors.as_ptr().cast::<i16>();
                        pairs.add(QUAD * (of_step + row) + place).read_unaligned()
                    };
                    let factors = _mm256_set1_epi16(factors);
                    let pairs = [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)];
                    for (sum, pairs) in sums[row].iter_mut().zip(pairs) {
                        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(pairs, factors));
                    }
                }
            }
        }
        for row in 0..R {
            for (wide, sums) in wide[row].iter_mut().zip(widen_sums(sums[row])) {
                *wide = _mm256_add_epi32(*wide, sums);
            }
        }
    }
    for row in 0..R {
        let unit = _mm256_set1_ps(keys.units[first + row]);
        let base = _mm256_set1_ps(keys.bases[first + row]);
        let eights = out[row * SPAN..].as_chunks_mut::<8>().0;
        for (sums, out) in wide[row].into_iter().zip(eights) {
            let score = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), unit), base);
            // SAFETY: eight scores.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), score) };
        }
    }
}

/// Bytes of four positions of 32 tokens, by position. Each half of a register has fours of
/// tokens that are eight apart.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_codes(bytes: &[u8; STEP]) -> [__m256i; QUAD] {
    // Four tokens of a position side by side.
    let fours = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let fours = _mm256_broadcastsi128_si256(fours);
    let mut eights = [fours; 4];
    for (eight, bytes) in eights.iter_mut().zip(bytes.as_chunks::<32>().0) {
        // SAFETY: 32 bytes.
        let bytes = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        *eight = _mm256_shuffle_epi8(bytes, fours);
    }
    let [a, b, c, d] = eights;
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (first, second) = (_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    let (ab, cd) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [first, second, _mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd)]
}

/// Sums of 16 tokens each, in the order of [`transpose_codes`], as words of eight tokens each.
#[inline]
#[target_feature(enable = "avx2")]
fn widen_sums(sums: [__m256i; 2]) -> [__m256i; 4] {
    let [first, second] = sums;
    let zero = _mm256_setzero_si256();
    [
        _mm256_unpacklo_epi16(first, zero),
        _mm256_unpackhi_epi16(first, zero),
        _mm256_unpacklo_epi16(second, zero),
        _mm256_unpackhi_epi16(second, zero),
    ]
}
