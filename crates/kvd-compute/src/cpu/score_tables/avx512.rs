//! `mod.rs` in AVX-512: the tables of a row, and its scores, where `vpermb` looks up 64
//! codes, each in the table of its position, and `vpdpbusd` adds four positions' bytes times their
//! factors.
#![allow(unsafe_code)] // Register loads and stores, and a call after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::TileCodes;
use crate::cpu::int_operands::NOTHING;
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::score_tables::{CODES, PAIR, QUAD, ROWS, TableKeys};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::x86_64::*;
use std::ops::Range;

/// The largest byte, and the most units that one of them is worth: a byte with a sign.
const TOP: f32 = 255.0;
const TOP_FACTOR: f32 = 127.0;
/// Registers of tokens of a tile.
const HALVES: usize = 2;
/// Bytes of a tile that hold two quads' codes.
const STEP: usize = TILE * QUAD;
/// Tiles whose sums registers hold for [`ROWS`] rows.
const TILES: usize = 2;

/// Calls `$f::<rows, tiles>`.
macro_rules! by_rows {
    ($f:ident, $rows:expr, $tiles:literal, $args:tt) => {
        match $rows {
            1 => $f::<1, $tiles> $args,
            2 => $f::<2, $tiles> $args,
            3 => $f::<3, $tiles> $args,
            ROWS => $f::<ROWS, $tiles> $args,
            rows => unreachable!("{rows} rows at once"),
        }
    };
}

/// Takes the next row: a query, and what codes stand for by channel of a code.
pub(super) fn push_query(
    simd: Simd,
    keys: &mut TableKeys,
    query: &[f32],
    entries: &[[f32; CODES]],
) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "score tables: instruction set");
    assert_eq!(query.len(), keys.positions * entries.len(), "score tables: query");
    assert!(keys.positions.is_multiple_of(PAIR), "score tables: positions");
    let mut planes = vec![0f32; query.len()];
    for (d, plane) in planes.chunks_exact_mut(keys.positions).enumerate() {
        let channels = query[d..].iter().step_by(entries.len());
        plane.iter_mut().zip(channels).for_each(|(to, from)| *to = *from);
    }
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { push_planes(keys, &planes, entries) };
}

/// Takes the next row, the query by channel of a code, `[dims, positions]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn push_planes(keys: &mut TableKeys, planes: &[f32], entries: &[[f32; CODES]]) {
    let (positions, index) = (keys.positions, keys.units.len());
    // By pair of quads the least score of each position, then how far it is to the largest.
    let mut ends = vec![[0f32; 2 * PAIR]; positions / PAIR];
    let mut largest = _mm256_setzero_ps();
    let mut base = 0.0;
    for (at, ends) in (0..).step_by(PAIR).zip(&mut ends) {
        let [least, reach] = ends_of(&planes[at..], positions, entries);
        largest = _mm256_max_ps(largest, reach);
        // SAFETY: twice eight values.
        unsafe {
            _mm256_storeu_ps(ends.as_mut_ptr(), least);
            _mm256_storeu_ps(ends.as_mut_ptr().add(PAIR), reach);
        }
        base += ends[..PAIR].iter().sum::<f32>();
    }
    let largest = _mm512_reduce_max_ps(_mm512_zextps256_ps512(largest));
    // An overflow has no unit; the score is of no use anyway.
    let some = largest > NOTHING && largest.is_finite();
    let unit = if some { largest / (TOP * TOP_FACTOR) } else { 0.0 };
    keys.units.push(unit);
    keys.bases.push(base);
    if !some {
        return;
    }
    let entries: Vec<__m512> = entries.iter().map(|entries| load_entries(entries)).collect();
    for (pair, ends) in ends.iter().enumerate() {
        let (factors, inverses) = factors_of(&ends[PAIR..], 1.0 / unit);
        for place in 0..PAIR {
            let (quad, position) = (2 * pair + place / QUAD, PAIR * pair + place);
            let at = quad * keys.rows + index;
            keys.factors[at][place % QUAD] = factors[place];
            let mut scores = _mm512_set1_ps(-ends[place]);
            for (d, entries) in entries.iter().enumerate() {
                let channel = _mm512_set1_ps(planes[d * positions + position]);
                scores = _mm512_add_ps(scores, _mm512_mul_ps(channel, *entries));
            }
            let scores = _mm512_mul_ps(scores, _mm512_set1_ps(inverses[place]));
            let bytes = _mm512_max_epi32(_mm512_cvtps_epi32(scores), _mm512_setzero_si512());
            let table = keys.tables[at].0[place % QUAD].as_mut_ptr();
            // SAFETY: sixteen bytes.
            unsafe { _mm_storeu_si128(table.cast(), _mm512_cvtusepi32_epi8(bytes)) };
        }
    }
}

/// The least scores of the codes of eight positions, and how far those are from the most.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn ends_of(planes: &[f32], stride: usize, entries: &[[f32; CODES]]) -> [__m256; 2] {
    let mut scores = [_mm256_setzero_ps(); CODES];
    for (d, entries) in entries.iter().enumerate() {
        let channels = &planes[d * stride..][..PAIR];
        // SAFETY: eight values.
        let channels = unsafe { _mm256_loadu_ps(channels.as_ptr()) };
        for code in 0..CODES {
            let product = _mm256_mul_ps(channels, _mm256_set1_ps(entries[code]));
            scores[code] = _mm256_add_ps(scores[code], product);
        }
    }
    let (mut low, mut high) = (scores[0], scores[0]);
    for code in 1..CODES {
        low = _mm256_min_ps(low, scores[code]);
        high = _mm256_max_ps(high, scores[code]);
    }
    [low, _mm256_sub_ps(high, low)]
}

/// How many units of the row a byte of each of eight positions is, rounded up so that none is over
/// the top; and by what scores become bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn factors_of(reach: &[f32], of_unit: f32) -> ([u8; PAIR], [f32; PAIR]) {
    let (mut factors, mut inverses) = ([0; PAIR], [0f32; PAIR]);
    for place in 0..PAIR {
        let factor = (reach[place] * (of_unit / TOP)).ceil().clamp(1.0, TOP_FACTOR);
        (factors[place], inverses[place]) = (factor as u8, of_unit / factor);
    }
    (factors, inverses)
}

/// A value for each code.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_entries(entries: &[f32; CODES]) -> __m512 {
    // SAFETY: sixteen values.
    unsafe { _mm512_loadu_ps(entries.as_ptr()) }
}

/// Writes the scores of some rows of `keys`, [`SPAN`] apart. Only where there is AVX-512 are there
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
    let count = quads * keys.rows;
    assert!(rows.end <= keys.rows && keys.tables.len() == count, "score tables: tables");
    assert_eq!(keys.factors.len(), count, "score tables: factors");
    assert!(out.len() >= (rows.len() - 1) * SPAN + tiles * TILE, "score tables: scores");
    let bytes = codes.bytes.chunks(TILES * tile_bytes);
    let calls = bytes.len();
    for (call, bytes) in bytes.enumerate() {
        let prefetch = codes.prefetch.share_of(call, calls);
        let codes = StepCodes { bytes, steps: quads / 2, prefetch };
        let out = &mut out[call * TILES * TILE..];
        // SAFETY: lengths are as asserted, and who made the tables knows of the instructions.
        unsafe {
            if bytes.len() > tile_bytes {
                by_rows!(score_some_tiles, rows.len(), 2, (codes, keys, rows.start, out));
            } else {
                by_rows!(score_some_tiles, rows.len(), 1, (codes, keys, rows.start, out));
            }
        }
    }
}

/// Codes of a few tiles, each `steps` times [`STEP`] bytes.
struct StepCodes<'a> {
    bytes: &'a [u8],
    steps: usize,
    prefetch: PrefetchBytes<'a>,
}

/// Rows from `first` on over `T` tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn score_some_tiles<const R: usize, const T: usize>(
    codes: StepCodes<'_>,
    keys: &TableKeys,
    first: usize,
    out: &mut [f32],
) {
    let StepCodes { bytes, steps, prefetch } = codes;
    let mut prefetch = prefetch.in_steps(steps);
    let places = _mm512_set1_epi32(0x3020_1000);
    let low = _mm512_set1_epi8(0x0F);
    let mut sums = [[[_mm512_setzero_si512(); HALVES]; T]; R];
    for step in 0..steps {
        prefetch.next_step();
        let mut loaded = [[low; HALVES]; T];
        for tile in 0..T {
            for half in 0..HALVES {
                let at = (tile * steps + step) * STEP + half * 64;
                // SAFETY: a step has two halves.
                let from = unsafe { bytes.as_ptr().add(at) };
                // SAFETY: 64 bytes.
                loaded[tile][half] = unsafe { _mm512_loadu_si512(from.cast()) };
            }
        }
        for plane in 0..2 {
            let mut codes = loaded;
            for codes in codes.as_flattened_mut() {
                let down = if plane == 0 { *codes } else { _mm512_srli_epi16::<4>(*codes) };
                // The code, and above it the place of its position.
                *codes = _mm512_ternarylogic_epi32::<0xEA>(down, low, places);
            }
            let quad = (plane * steps + step) * keys.rows + first;
            for row in 0..R {
                // SAFETY: there are tables and factors for all rows of all quads.
                let (table, factors) = unsafe {
                    let table = keys.tables.as_ptr().add(quad + row);
                    let factors = keys.factors.as_ptr().add(quad + row).cast::<i32>();
                    (_mm512_loadu_si512(table.cast()), factors.read_unaligned())
                };
                let factors = _mm512_set1_epi32(factors);
                for tile in 0..T {
                    for half in 0..HALVES {
                        let scores = _mm512_permutexvar_epi8(codes[tile][half], table);
                        let sum = &mut sums[row][tile][half];
                        *sum = _mm512_dpbusd_epi32(*sum, scores, factors);
                    }
                }
            }
        }
    }
    for row in 0..R {
        let unit = _mm512_set1_ps(keys.units[first + row]);
        let base = _mm512_set1_ps(keys.bases[first + row]);
        let sums = sums[row].as_flattened();
        for (sum, out) in sums.iter().zip(out[row * SPAN..].as_chunks_mut::<16>().0) {
            let score = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(*sum), unit), base);
            // SAFETY: 16 scores.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), score) };
        }
    }
}
