//! `score_tables.rs` in AVX-512: `vpermb` looks up 64 codes, each in the table of its position, and
//! `vpdpbusd` adds four positions' bytes times their factors.
#![allow(unsafe_code)] // Register loads and stores, and a call after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use super::ahead::Ahead;
use super::dots::TileCodes;
use super::score_tables::{Keys, QUAD, ROWS};
use super::scores::{SPAN, TILE};
use std::arch::x86_64::*;
use std::ops::Range;

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

/// Writes the scores of some rows of `keys`, [`SPAN`] apart. Only where there is AVX-512 are there
/// any.
pub(super) fn scores(codes: TileCodes<'_>, keys: &Keys, rows: Range<usize>, out: &mut [f32]) {
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
        let ahead = codes.ahead.share(call, calls);
        let codes = Codes { bytes, steps: quads / 2, ahead };
        let out = &mut out[call * TILES * TILE..];
        // SAFETY: lengths are as asserted, and who made the tables knows of the instructions.
        unsafe {
            if bytes.len() > tile_bytes {
                by_rows!(some, rows.len(), 2, (codes, keys, rows.start, out));
            } else {
                by_rows!(some, rows.len(), 1, (codes, keys, rows.start, out));
            }
        }
    }
}

/// Codes of a few tiles, each `steps` times [`STEP`] bytes.
struct Codes<'a> {
    bytes: &'a [u8],
    steps: usize,
    ahead: Ahead<'a>,
}

/// Rows from `first` on over `T` tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn some<const R: usize, const T: usize>(
    codes: Codes<'_>,
    keys: &Keys,
    first: usize,
    out: &mut [f32],
) {
    let Codes { bytes, steps, ahead } = codes;
    let mut soon = ahead.steps(steps);
    let places = _mm512_set1_epi32(0x3020_1000);
    let low = _mm512_set1_epi8(0x0F);
    let mut sums = [[[_mm512_setzero_si512(); HALVES]; T]; R];
    for step in 0..steps {
        soon.ask();
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
