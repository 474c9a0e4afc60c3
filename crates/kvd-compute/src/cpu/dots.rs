//! Dot products of byte codes with 15-bit integers: the arithmetic that fused sides share.
//!
//! Codes come as a tile holds them (`kvd_codec::CodeLayout`): four codes of the summed axis, then
//! the lanes. A [`Lookup`] says what a code stands for, in at most 8 bits. Queries and weights are
//! rounded to 15 bits and a sign: a step of `2^-14` of the row's largest, below what f16 rows are
//! rounded to. Sums are exact integers, so every instruction set gives the same bits.

use super::scores::{SPAN, TILE};
use super::simd::{InstructionSet, Simd, per_level};

/// Rows of queries or weights that one call handles.
pub(crate) const ROWS: usize = 4;
/// Largest magnitude of a quantized query or weight.
const TOP: f32 = 16383.0;
/// Added to looked-up values so that bytes are not negative.
pub(super) const BIAS: i32 = 128;

/// What codes stand for.
pub(crate) struct Lookup {
    /// Channels of a code.
    pub(super) dims: usize,
    /// Bits of a code.
    pub(super) bits: u32,
    /// Per channel, each code's value plus [`BIAS`], repeated to fill; none when a code is its own
    /// value.
    pub(super) tables: Vec<[u8; 256]>,
    /// What one unit of a value is.
    pub(crate) scale: f32,
}

impl Lookup {
    /// Codes are their own values, 0 to 255.
    pub(crate) fn identity() -> Self {
        Self { dims: 1, bits: 8, tables: Vec::new(), scale: 1.0 }
    }

    /// Codes name entries (`[2^bits, dims]`, finite) whose values lie on 255 levels, as fitted
    /// codebooks do; `None` for others, which bytes would change.
    pub(crate) fn table(dims: usize, bits: u32, entries: &[f32]) -> Option<Self> {
        let largest = entries.iter().fold(0f32, |m, value| m.max(value.abs()));
        let scale = largest / 127.0;
        if !scale.is_normal() {
            return None;
        }
        // A level that was rounded to f16 is off by 2^-11 of itself, 127 by 0.062; so is the
        // largest, and with it the scale.
        let level = |value: f32| (value / scale, (value / scale).round());
        let off = |(exact, rounded): (f32, f32)| (exact - rounded).abs() > 0.13;
        if entries.iter().any(|value| off(level(*value))) {
            return None;
        }
        let count = entries.len() / dims;
        let value = |code: usize, dim: usize| {
            (level(entries[code % count * dims + dim]).1 as i32 + BIAS) as u8
        };
        let table = |dim| std::array::from_fn(|code| value(code, dim));
        Some(Self { dims, bits, tables: (0..dims).map(table).collect(), scale })
    }

    /// Value of channel `dim` of `code`.
    fn value(&self, dim: usize, code: u8) -> i32 {
        self.tables.get(dim).map_or(i32::from(code), |t| i32::from(t[usize::from(code)]) - BIAS)
    }

    /// Whether there is a kernel for it; the portable one takes all.
    pub(crate) fn is_fast(&self, simd: Simd) -> bool {
        let pairs = self.tables.is_empty() || self.dims.is_multiple_of(2);
        match simd.set() {
            InstructionSet::Portable => true,
            InstructionSet::Avx2 => pairs && (self.tables.is_empty() || self.bits <= 4),
            InstructionSet::Avx512 => pairs && self.bits <= 8,
        }
    }
}

/// Rows of 15-bit integers, cut the way the instruction set multiplies them: for AVX-512 all high
/// bytes and then all low 7 bits, for the others words in the order 0, 2, 1, 3 of each four.
#[derive(Default)]
pub(crate) struct Parts {
    bytes: Vec<u8>,
    sums: Vec<i32>,
    len: usize,
}

/// Some rows of [`Parts`].
#[derive(Clone, Copy)]
pub(crate) struct PartRows<'a> {
    pub(super) bytes: &'a [u8],
    /// Sum of each row.
    pub(super) sums: &'a [i32],
    /// Values of a row.
    pub(super) len: usize,
}

impl Parts {
    /// Forgets its rows; each new one has `len` values, a multiple of four.
    pub(crate) fn reset(&mut self, len: usize) {
        debug_assert!(len.is_multiple_of(4), "rows of {len}");
        self.bytes.clear();
        self.sums.clear();
        self.len = len;
    }

    /// Appends a row whose largest magnitude is `largest`, and returns what one unit is.
    pub(crate) fn push(&mut self, simd: Simd, values: &[f32], largest: f32) -> f32 {
        assert_eq!(values.len(), self.len, "parts: row length");
        let start = self.bytes.len();
        self.bytes.resize(start + 2 * values.len(), 0);
        // What is smaller than this is nothing beside any other row, and has no reciprocal.
        let inverse = if largest > 1e-30 { TOP / largest } else { 0.0 };
        let out = &mut self.bytes[start..];
        let sum = match simd.set() {
            InstructionSet::Avx512 => split_bytes(simd, values, inverse, out),
            _ => split_words(simd, values, inverse, out),
        };
        self.sums.push(sum);
        if inverse > 0.0 { largest / TOP } else { 0.0 }
    }

    /// Rows from `first` on, at most [`ROWS`].
    pub(crate) fn rows(&self, first: usize) -> PartRows<'_> {
        let end = self.sums.len().min(first + ROWS);
        let bytes = &self.bytes[first * 2 * self.len..end * 2 * self.len];
        PartRows { bytes, sums: &self.sums[first..end], len: self.len }
    }
}

impl PartRows<'_> {
    /// How many rows.
    pub(crate) fn count(&self) -> usize {
        self.sums.len()
    }

    /// Value `index` of row `row`, as words hold it.
    fn word(&self, row: usize, index: usize) -> i32 {
        let swapped = [0, 2, 1, 3][index % 4];
        let at = 2 * (row * self.len + index / 4 * 4 + swapped);
        i32::from(i16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
    }
}

/// Rounds to an integer, ties to even, for magnitudes below `2^22`.
#[inline(always)]
fn round(x: f32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32
}

per_level!(fn split_bytes(values: &[f32], inverse: f32, out: &mut [u8]) -> i32 = split_bytes_body);
per_level!(fn split_words(values: &[f32], inverse: f32, out: &mut [u8]) -> i32 = split_words_body);

#[inline(always)]
fn split_bytes_body(values: &[f32], inverse: f32, out: &mut [u8]) -> i32 {
    let (high, low) = out.split_at_mut(values.len());
    let mut sum = 0;
    for ((value, high), low) in values.iter().zip(high).zip(low) {
        let value = round(value * inverse);
        sum += value;
        *high = (value >> 7) as u8;
        *low = (value & 127) as u8;
    }
    sum
}

#[inline(always)]
fn split_words_body(values: &[f32], inverse: f32, out: &mut [u8]) -> i32 {
    let mut sum = 0;
    for (values, out) in values.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        let [a, b, c, d] = values.map(|value| round(value * inverse));
        sum += a + b + c + d;
        for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip([a, c, b, d]) {
            *out = (value as i16).to_le_bytes();
        }
    }
    sum
}

/// Codes of whole tiles, in the order of `kvd_codec::CodeLayout`, one plane.
#[derive(Clone, Copy)]
pub(crate) struct TileCodes<'a> {
    pub(crate) bytes: &'a [u8],
    /// Bits of a code: 1, 2, 4 or 8.
    pub(crate) width: u32,
    /// Codes of a token.
    pub(crate) per_row: usize,
}

impl TileCodes<'_> {
    /// Bytes of a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        4 * self.per_row * self.width as usize
    }

    /// Code number `element` of tile `tile`.
    fn code(&self, tile: usize, element: usize) -> u8 {
        let size = self.tile_bytes();
        let shift = element / size * self.width as usize;
        let mask = u8::MAX >> (8 - self.width);
        self.bytes[tile * size + element % size] >> shift & mask
    }
}

/// Writes `scores[row][token]`, rows [`SPAN`] apart: what one unit is in `units` times the sums
/// over positions and channels of one tile of keys. A row of `q` holds channel 0 of every
/// position, then channel 1, and so on.
pub(crate) fn key_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &Lookup,
    (q, units): (PartRows<'_>, &[f32]),
    scores: &mut [f32],
) {
    let (per_row, rows) = (codes.per_row, q.sums.len());
    assert!(lookup.is_fast(simd), "key_dots: no kernel");
    assert!(q.len == per_row * lookup.dims && codes.bytes.len() == codes.tile_bytes(), "key_dots");
    assert!((per_row * codes.width as usize).is_multiple_of(32), "key_dots: planes");
    assert!((1..=ROWS).contains(&rows) && units.len() == rows, "key_dots: rows");
    assert!(scores.len() >= (rows - 1) * SPAN + TILE, "key_dots: scores");
    #[cfg(target_arch = "x86_64")]
    if simd.set() != InstructionSet::Portable {
        return super::dots_x86::key_dots(simd, codes, lookup, (q, units), scores);
    }
    for (row, unit) in units.iter().enumerate() {
        let mut sums = [0i32; TILE];
        for position in 0..per_row {
            for (token, sum) in sums.iter_mut().enumerate() {
                let code = codes.code(0, (position / 4 * TILE + token) * 4 + position % 4);
                for dim in 0..lookup.dims {
                    *sum += lookup.value(dim, code) * q.word(row, dim * per_row + position);
                }
            }
        }
        let scores = scores[row * SPAN..].iter_mut();
        scores.zip(sums).for_each(|(score, sum)| *score = sum as f32 * unit);
    }
}

/// What to do with the sums of [`value_dots`].
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    /// What one unit is, by row.
    pub(crate) units: &'a [f32],
    /// A further factor for each position; all 1 when empty.
    pub(crate) factors: &'a [f32],
    /// First position.
    pub(crate) first: usize,
    /// Positions.
    pub(crate) count: usize,
}

/// Adds to `out[row][channel][position]` the sums over tokens of a few tiles of values, times
/// their units and factors. A row of `weights` holds a weight per token.
pub(crate) fn value_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &Lookup,
    (weights, target): (PartRows<'_>, Target<'_>),
    out: &mut [f32],
) {
    let (per_row, rows) = (codes.per_row, weights.sums.len());
    let Target { units, factors, first, count } = target;
    assert!(lookup.is_fast(simd), "value_dots: no kernel");
    assert!(weights.len.is_multiple_of(TILE), "value_dots: tokens");
    assert_eq!(codes.bytes.len(), weights.len / TILE * codes.tile_bytes(), "value_dots: codes");
    assert!(first + count <= per_row && count > 0, "value_dots: range");
    assert!((1..=ROWS).contains(&rows) && units.len() == rows, "value_dots: rows");
    assert!(factors.is_empty() || factors.len() == per_row, "value_dots: factors");
    assert_eq!(out.len(), rows * lookup.dims * per_row, "value_dots: output");
    #[cfg(target_arch = "x86_64")]
    if simd.set() != InstructionSet::Portable {
        return super::dots_x86::value_dots(simd, codes, lookup, (weights, target), out);
    }
    for (row, out) in out.chunks_exact_mut(lookup.dims * per_row).enumerate() {
        for (dim, out) in out.chunks_exact_mut(per_row).enumerate() {
            for (position, out) in (first..).zip(&mut out[first..first + count]) {
                let mut sum = 0;
                for token in 0..weights.len {
                    let (tile, token_in) = (token / TILE, token % TILE);
                    let element = (token_in / 4 * per_row + position) * 4 + token_in % 4;
                    let code = codes.code(tile, element);
                    sum += lookup.value(dim, code) * weights.word(row, token);
                }
                let factor = factors.get(position).map_or(units[row], |f| f * units[row]);
                *out += sum as f32 * factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same values in every run, in `-1.0..1.0`.
    fn waves(count: usize, seed: usize) -> Vec<f32> {
        let wave = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
        (0..count).map(wave).collect()
    }

    fn codes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect()
    }

    /// The widths of a plane that can hold a lookup's codes.
    fn width(lookup: &Lookup) -> u32 {
        if lookup.bits <= 4 { lookup.bits.next_power_of_two() } else { 8 }
    }

    fn lookups() -> Vec<Lookup> {
        let mut lookups = vec![Lookup::identity()];
        for (dims, bits) in [(2, 4), (4, 5), (4, 6), (2, 7), (4, 8), (8, 8), (1, 4)] {
            let levels = (0..dims << bits).map(|i| (i * 89 % 255) as f32 - 127.0);
            let levels: Vec<f32> = levels.collect();
            lookups.push(Lookup::table(dims, bits, &levels).unwrap());
        }
        lookups
    }

    fn parts(simd: Simd, rows: usize, len: usize) -> Parts {
        let mut parts = Parts::default();
        parts.reset(len);
        for row in 0..rows {
            let unit = parts.push(simd, &waves(len, row), 1.0);
            assert_eq!(unit, 1.0 / TOP);
        }
        parts
    }

    #[test]
    fn key_dots_are_the_same_on_every_level() {
        for lookup in lookups() {
            for per_row in [8, 16, 32, 80] {
                for rows in 1..=ROWS {
                    let width = width(&lookup);
                    let bytes = &codes(4 * per_row * width as usize);
                    let run = |simd| {
                        let parts = parts(simd, rows, per_row * lookup.dims);
                        let mut out = vec![0.0; rows * SPAN];
                        let codes = TileCodes { bytes, width, per_row };
                        let q = (parts.rows(0), &[0.5, 0.1, 3.0, 1.0][..rows]);
                        key_dots(simd, codes, &lookup, q, &mut out);
                        out
                    };
                    let levels = Simd::available();
                    let portable = run(levels[0]);
                    assert!(portable.iter().any(|dot| *dot != 0.0));
                    for simd in levels.into_iter().filter(|simd| lookup.is_fast(*simd)) {
                        assert_eq!(run(simd), portable, "{simd:?}, {per_row} x {}", lookup.dims);
                    }
                }
            }
        }
    }

    #[test]
    fn value_dots_are_the_same_on_every_level() {
        for lookup in lookups() {
            for (per_row, first, count) in [(4, 0, 4), (20, 0, 20), (40, 0, 40), (80, 32, 32)] {
                for (rows, tiles) in [(1, 1), (2, 4), (3, 1), (4, 2)] {
                    let width = width(&lookup);
                    let bytes = &codes(tiles * 4 * per_row * width as usize);
                    let factors = waves(per_row, 5);
                    let factors = if tiles == 1 { &factors[..] } else { &[] };
                    let run = |simd| {
                        let parts = parts(simd, rows, tiles * 32);
                        let mut out = vec![0.25; rows * lookup.dims * per_row];
                        let codes = TileCodes { bytes, width, per_row };
                        let units = &[0.5, 0.1, 3.0, 1.0][..rows];
                        let target = Target { units, factors, first, count };
                        value_dots(simd, codes, &lookup, (parts.rows(0), target), &mut out);
                        out
                    };
                    let levels = Simd::available();
                    let portable = run(levels[0]);
                    assert!(portable.iter().any(|dot| *dot != 0.25));
                    for simd in levels.into_iter().filter(|simd| lookup.is_fast(*simd)) {
                        assert_eq!(run(simd), portable, "{simd:?}, {per_row} x {}", lookup.dims);
                    }
                }
            }
        }
    }

    #[test]
    fn largest_queries_against_the_largest_codes_do_not_overflow() {
        for simd in Simd::available() {
            for sign in [1.0, -1.0] {
                let mut parts = Parts::default();
                parts.reset(512);
                parts.push(simd, &[sign; 512], 1.0);
                let mut out = [0.0; SPAN];
                let codes = TileCodes { bytes: &[255; 32 * 512], width: 8, per_row: 512 };
                let q = (parts.rows(0), &[1.0][..]);
                key_dots(simd, codes, &Lookup::identity(), q, &mut out);
                assert_eq!(out[..TILE], [sign * (255.0 * 16383.0 * 512.0); 32], "{simd:?}");
            }
        }
    }

    #[test]
    fn entries_off_their_levels_have_no_table() {
        assert!(Lookup::table(1, 1, &[1.27, -0.33]).is_some());
        assert!(Lookup::table(1, 1, &[1.27, -0.335]).is_none());
        assert!(Lookup::table(1, 1, &[0.0, 0.0]).is_none());
    }

    #[test]
    fn a_row_of_nothing_has_no_unit() {
        for simd in Simd::available() {
            let mut parts = Parts::default();
            parts.reset(4);
            assert_eq!(parts.push(simd, &[0.0; 4], 0.0), 0.0);
            assert_eq!(parts.push(simd, &[1e-38; 4], 1e-38), 0.0);
            assert_eq!(parts.rows(0).sums, [0, 0]);
        }
    }
}
