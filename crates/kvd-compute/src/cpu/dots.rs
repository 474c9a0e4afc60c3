//! Dot products of byte codes with integers: the arithmetic that fused sides share.
//!
//! Codes come as a tile holds them (`kvd_codec::CodeLayout`): four codes of the summed axis, then
//! the lanes. A [`Lookup`] says what a code stands for, in at most 8 bits. Queries and weights are
//! rounded to 15 bits and a sign: a step of `2^-15` of the row's largest. Sums are exact integers,
//! so every instruction set gives the same bits. With `Precision::Int8` they are one byte where
//! that is faster (`parts.rs`).

use super::parts::PartRows;
use super::scores::{SPAN, TILE};
use super::simd::{InstructionSet, Simd, per_level};
use kvd_codec::level_unit;

/// Rows of queries or weights that one call handles: as many as AMX multiplies at once.
pub(crate) const ROWS: usize = 8;
/// How many of them vector registers have sums for.
const VECTOR_ROWS: usize = 4;
/// Most terms of a sum of products with bytes: more might not fit 32 bits.
pub(crate) const TERMS_MAX: usize = 256;
/// The same where bytes are values plus [`BIAS`]: sums may wrap before the bias is taken off.
pub(crate) const BIASED_TERMS_MAX: usize = 512;
/// Tiles after which what values sum apart, minima or biases, joins the sums of their codes: those
/// are never negative, and grown they would lose what is small beside them.
pub(crate) const SETTLED_TILES: usize = 16;
/// Added to looked-up values so that bytes are not negative.
pub(super) const BIAS: i32 = 128;

/// Whether products with so many rows of a unit are better of bytes, looked up once for all rows:
/// AMX takes nothing else. It multiplies eight rows in the time of one, so that few are no faster
/// than in vector registers (`docs/perf/cpu.md`).
pub(crate) fn wants_bytes(simd: Simd, rows: usize) -> bool {
    simd.has_amx() && rows > VECTOR_ROWS
}

/// Whether a code is a byte and its own value.
#[cfg(target_arch = "x86_64")]
fn codes_are_bytes(codes: TileCodes<'_>, lookup: &Lookup) -> bool {
    lookup.tables.is_empty() && codes.width == 8
}

/// What codes stand for.
pub(crate) struct Lookup {
    /// Channels of a code.
    pub(super) dims: usize,
    /// Bits of a code.
    pub(super) bits: u32,
    /// Per channel, each code's value plus [`BIAS`], repeated to fill; none when a code is its own
    /// value.
    pub(super) tables: Vec<[u8; 256]>,
    /// What values without a table are too large by.
    pub(super) bias: i32,
    /// What one unit of a value is.
    pub(crate) scale: f32,
}

impl Lookup {
    /// Codes are their own values, 0 to 255.
    pub(crate) fn identity() -> Self {
        Self { dims: 1, bits: 8, tables: Vec::new(), bias: 0, scale: 1.0 }
    }

    /// Codes are values plus `bias`.
    pub(crate) fn less(bias: i32) -> Self {
        Self { bias, ..Self::identity() }
    }

    /// Codes are values plus [`BIAS`].
    pub(crate) fn bytes() -> Self {
        Self { bias: BIAS, ..Self::identity() }
    }

    /// Codes name bytes of a table per channel: values plus [`BIAS`].
    pub(crate) fn of_tables(bits: u32, tables: Vec<[u8; 256]>) -> Self {
        Self { dims: tables.len(), bits, tables, bias: BIAS, scale: 1.0 }
    }

    /// Codes name entries (`[2^bits, dims]`, finite) whose values are whole numbers of a unit up to
    /// 127, as those of fitted codebooks are; `None` for others, which bytes would change.
    pub(crate) fn table(dims: usize, bits: u32, entries: &[f32]) -> Option<Self> {
        let scale = level_unit(entries)?;
        let count = entries.len() / dims;
        let value = |code: usize, dim: usize| {
            ((entries[code % count * dims + dim] / scale).round() as i32 + BIAS) as u8
        };
        let table = |dim| std::array::from_fn(|code| value(code, dim));
        Some(Self { dims, bits, tables: (0..dims).map(table).collect(), bias: BIAS, scale })
    }

    /// The same values, looked up beforehand: bytes that are theirs plus [`BIAS`].
    pub(crate) fn expanded(&self) -> Self {
        Self { scale: self.scale, ..Self::bytes() }
    }

    /// Value of channel `dim` of `code`.
    pub(super) fn value(&self, dim: usize, code: u8) -> i32 {
        let byte = self.tables.get(dim).map_or(code, |table| table[usize::from(code)]);
        i32::from(byte) - self.bias
    }

    /// Whether there is a kernel for it; the portable one takes all.
    pub(crate) fn is_fast(&self, simd: Simd) -> bool {
        let pairs = self.tables.is_empty() || self.dims.is_multiple_of(2);
        match simd.set() {
            InstructionSet::Portable => true,
            InstructionSet::Avx2 => pairs && (self.tables.is_empty() || self.bits <= 4),
            InstructionSet::Avx512 | InstructionSet::Amx => pairs && self.bits <= 8,
            InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => {
                pairs && (self.tables.is_empty() || self.bits <= 6)
            }
        }
    }
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

    /// Each tile, and its first token.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (Self, usize)> {
        let of = *self;
        let tiles = self.bytes.chunks_exact(self.tile_bytes());
        tiles.zip((0..).step_by(TILE)).map(move |(bytes, at)| (Self { bytes, ..of }, at))
    }

    /// The codes, a byte each; `buffer` holds them where they lie closer.
    pub(super) fn as_bytes<'b>(&'b self, buffer: &'b mut Vec<u8>) -> &'b [u8] {
        if self.width == 8 {
            return self.bytes;
        }
        let (count, tile) = (self.bytes.len() * 8 / self.width as usize, TILE * self.per_row);
        buffer.resize(count, 0);
        let tiles = self.bytes.chunks_exact(self.tile_bytes());
        for (bytes, out) in tiles.zip(buffer.chunks_exact_mut(tile)) {
            spread_body(bytes, self.width, out);
        }
        buffer
    }

    /// Writes the codes of a tile, a byte each.
    pub(super) fn spread(&self, simd: Simd, out: &mut [u8]) {
        assert_eq!(out.len() * self.width as usize, 8 * self.bytes.len(), "spread: lengths");
        spread(simd, self.bytes, self.width, out);
    }
}

per_level!(fn spread(bytes: &[u8], width: u32, out: &mut [u8]) = spread_body);

#[inline(always)]
fn spread_body(bytes: &[u8], width: u32, out: &mut [u8]) {
    let mask = u8::MAX >> (8 - width);
    let shifts = [0, 1, 2, 3, 4, 5, 6, 7].into_iter().filter(|shift| shift % width == 0);
    for (shift, out) in shifts.zip(out.chunks_exact_mut(bytes.len())) {
        out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte >> shift & mask);
    }
}

/// Writes `scores[row][token]`, rows [`SPAN`] apart: what one unit is in `units` times the sums
/// over positions and channels of a few tiles of keys. A row of `q` holds channel 0 of every
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
    assert!(q.len == per_row * lookup.dims && per_row > 0, "key_dots: positions");
    assert!(codes.bytes.len().is_multiple_of(codes.tile_bytes()), "key_dots: tiles");
    assert!((per_row * codes.width as usize).is_multiple_of(32), "key_dots: planes");
    assert!((1..=ROWS).contains(&rows) && units.len() == rows, "key_dots: rows");
    let tiles = codes.bytes.len() / codes.tile_bytes();
    assert!(tiles * TILE <= SPAN, "key_dots: span");
    assert!(scores.len() >= (rows - 1) * SPAN + tiles * TILE, "key_dots: scores");
    #[cfg(target_arch = "x86_64")]
    if wants_bytes(simd, rows) && codes_are_bytes(codes, lookup) && q.digits == 2 {
        for (codes, at) in codes.tiles() {
            super::amx_x86::key_dots(simd, codes, lookup, (q, units), &mut scores[at..]);
        }
        return;
    }
    for (index, units) in units.chunks(VECTOR_ROWS).enumerate() {
        let first = index * VECTOR_ROWS;
        let (q, scores) = (q.part(first, units.len()), &mut scores[first * SPAN..]);
        #[cfg(target_arch = "x86_64")]
        if simd.set() != InstructionSet::Portable {
            super::dots_x86::key_dots(simd, codes, lookup, (q, units), scores);
            continue;
        }
        for (codes, at) in codes.tiles() {
            let (q, scores) = ((q, units), &mut scores[at..]);
            #[cfg(target_arch = "aarch64")]
            if simd.set() != InstructionSet::Portable {
                super::dots_neon::key_dots(simd, codes, lookup, q, scores);
                continue;
            }
            super::dots_portable::key_dots(codes, lookup, q, scores);
        }
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
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut, reason = "AMX takes a part"))]
    let mut target = target;
    #[cfg(target_arch = "x86_64")]
    if wants_bytes(simd, rows) && codes_are_bytes(codes, lookup) && weights.digits == 2 {
        let done = super::amx_x86::value_dots(simd, codes, lookup, (weights, target), out);
        (target.first, target.count) = (first + done, count - done);
        if target.count == 0 {
            return;
        }
    }
    let size = VECTOR_ROWS * lookup.dims * per_row;
    for (index, (units, out)) in units.chunks(VECTOR_ROWS).zip(out.chunks_mut(size)).enumerate() {
        let target = Target { units, ..target };
        let weights = (weights.part(index * VECTOR_ROWS, units.len()), target);
        #[cfg(target_arch = "x86_64")]
        if simd.set() != InstructionSet::Portable {
            super::dots_x86::value_dots(simd, codes, lookup, weights, out);
            continue;
        }
        #[cfg(target_arch = "aarch64")]
        if simd.set() != InstructionSet::Portable {
            super::dots_neon::value_dots(simd, codes, lookup, weights, out);
            continue;
        }
        super::dots_portable::value_dots(codes, lookup, weights, out);
    }
}

#[cfg(test)]
mod tests {
    use super::super::parts::{Parts, TOP};
    use super::super::simd::Precision;
    use super::*;

    const UNITS: [f32; ROWS] = [0.5, 0.1, 3.0, 1.0, 0.7, 2.0, 0.3, 1.5];

    /// The same values in every run, in `-1.0..1.0`.
    fn waves(count: usize, seed: usize) -> Vec<f32> {
        let wave = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
        (0..count).map(wave).collect()
    }

    /// Bytes of a plane; those that are a code each hold no larger one than the lookup has.
    fn codes(lookup: &Lookup, width: u32, count: usize) -> Vec<u8> {
        let mask = if width == 8 { u8::MAX >> (8 - lookup.bits) } else { u8::MAX };
        (0..count).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8 & mask).collect()
    }

    /// The widths of planes that can hold a lookup's codes: any that holds a code for itself.
    fn widths(lookup: &Lookup) -> &'static [u32] {
        match (lookup.tables.is_empty(), lookup.bits) {
            (true, _) => &[1, 2, 4, 8],
            (_, 1) => &[1, 8],
            (_, 2) => &[2],
            (_, 3 | 4) => &[4, 8],
            _ => &[8],
        }
    }

    fn lookups() -> Vec<Lookup> {
        let mut lookups = vec![Lookup::identity(), Lookup::bytes()];
        for (dims, bits) in [(2, 1), (2, 2), (2, 4), (4, 5), (4, 6), (2, 7), (4, 8), (8, 8), (1, 4)]
        {
            let levels = (0..dims << bits).map(|i| (i * 89 % 255) as f32 - 127.0);
            let levels: Vec<f32> = levels.collect();
            lookups.push(Lookup::table(dims, bits, &levels).unwrap());
        }
        lookups
    }

    fn parts(simd: Simd, rows: usize, len: usize) -> Parts {
        let mut parts = Parts::of_queries((simd, Precision::Fast));
        parts.reset(len);
        for row in 0..rows {
            let values = waves(len, row);
            let pushed = parts.push(simd, &values, 1.0, Some(values.iter().sum()));
            assert_eq!(pushed.unit, 1.0 / TOP);
            assert!(pushed.lost.abs() < pushed.unit * len as f32 / 2.0);
        }
        parts
    }

    #[test]
    fn key_dots_are_the_same_on_every_level() {
        for lookup in lookups() {
            for per_row in [8, 16, 32, 80] {
                let widths = widths(&lookup).iter();
                let widths = widths.filter(|width| (per_row as u32 * **width).is_multiple_of(32));
                for (width, rows) in widths.flat_map(|w| (1..=ROWS).map(move |rows| (*w, rows))) {
                    let bytes = &codes(&lookup, width, 4 * per_row * width as usize);
                    let run = |simd| {
                        let parts = parts(simd, rows, per_row * lookup.dims);
                        let mut out = vec![0.0; rows * SPAN];
                        let codes = TileCodes { bytes, width, per_row };
                        let q = (parts.rows(0), &UNITS[..rows]);
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
                let shapes = [(1, 1), (2, 4), (3, 1), (4, 2), (7, 3), (8, 4)];
                let shapes = widths(&lookup).iter().flat_map(|width| shapes.map(|s| (*width, s)));
                for (width, (rows, tiles)) in shapes {
                    let bytes = &codes(&lookup, width, tiles * 4 * per_row * width as usize);
                    let factors = waves(per_row, 5);
                    let factors = if tiles == 1 { &factors[..] } else { &[] };
                    let run = |simd| {
                        let parts = parts(simd, rows, tiles * 32);
                        let mut out = vec![0.25; rows * lookup.dims * per_row];
                        let codes = TileCodes { bytes, width, per_row };
                        let units = &UNITS[..rows];
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

    /// Rows of one byte each: queries with signs, weights without.
    fn bytes(simd: Simd, (rows, len): (usize, usize), weights: bool) -> (Parts, Vec<Vec<i32>>) {
        let how = (simd, Precision::Int8);
        let mut parts = if weights { Parts::of_weights(how) } else { Parts::of_queries(how) };
        let top = if weights { 255.0 } else { 127.0 };
        parts.reset(len);
        let rows = (0..rows).map(|row| {
            let values = waves(len, row);
            let values = values.into_iter().map(|x| if weights { x.abs() } else { x });
            let values: Vec<f32> = values.collect();
            assert_eq!(parts.push(simd, &values, 1.0, None).unit, 1.0 / top);
            values.iter().map(|x| (x * top).round_ties_even() as i32).collect()
        });
        let rows = rows.collect();
        (parts, rows)
    }

    /// Sets that multiply bytes.
    fn with_bytes() -> impl Iterator<Item = Simd> {
        Simd::available().into_iter().filter(|simd| simd.set() == InstructionSet::Avx512)
    }

    #[test]
    fn queries_of_a_byte_are_multiplied_exactly() {
        const PER_ROW: usize = 24;
        for (simd, lookup) in
            with_bytes().flat_map(|simd| lookups().into_iter().map(move |l| (simd, l)))
        {
            if !lookup.is_fast(simd) {
                continue;
            }
            for (width, rows) in widths(&lookup).iter().flat_map(|w| [1, 4, 7].map(|r| (*w, r))) {
                if !(PER_ROW as u32 * width).is_multiple_of(32) {
                    continue;
                }
                let bytes = &codes(&lookup, width, 2 * 4 * PER_ROW * width as usize);
                let codes = TileCodes { bytes, width, per_row: PER_ROW };
                let (parts, q) = self::bytes(simd, (rows, PER_ROW * lookup.dims), false);
                let mut out = vec![0.0; rows * SPAN];
                key_dots(simd, codes, &lookup, (parts.rows(0), &UNITS[..rows]), &mut out);
                for (tile, (codes, _)) in codes.tiles().enumerate() {
                    let mut buffer = Vec::new();
                    let plain = codes.as_bytes(&mut buffer);
                    for (row, token) in (0..rows).flat_map(|row| (0..TILE).map(move |t| (row, t))) {
                        let value = |at: usize, dim| {
                            let code = plain[(at / 4 * TILE + token) * 4 + at % 4];
                            lookup.value(dim, code) * q[row][dim * PER_ROW + at]
                        };
                        let sum =
                            (0..PER_ROW).flat_map(|at| (0..lookup.dims).map(move |d| (at, d)));
                        let sum: i32 = sum.map(|(at, dim)| value(at, dim)).sum();
                        let got = out[row * SPAN + tile * TILE + token];
                        assert_eq!(got, sum as f32 * UNITS[row], "{simd:?}, {width} bits");
                    }
                }
            }
        }
    }

    #[test]
    fn weights_of_a_byte_are_multiplied_exactly() {
        const PER_ROW: usize = 40;
        for (simd, lookup) in
            with_bytes().flat_map(|simd| lookups().into_iter().map(move |l| (simd, l)))
        {
            if !lookup.is_fast(simd) {
                continue;
            }
            for (width, rows) in widths(&lookup).iter().flat_map(|w| [1, 4, 7].map(|r| (*w, r))) {
                let bytes = &codes(&lookup, width, 2 * 4 * PER_ROW * width as usize);
                let codes = TileCodes { bytes, width, per_row: PER_ROW };
                let (parts, weights) = self::bytes(simd, (rows, 2 * TILE), true);
                let mut out = vec![0.0; rows * lookup.dims * PER_ROW];
                let units = &UNITS[..rows];
                let target = Target { units, factors: &[], first: 0, count: PER_ROW };
                value_dots(simd, codes, &lookup, (parts.rows(0), target), &mut out);
                let mut buffer = Vec::new();
                let plain = codes.as_bytes(&mut buffer);
                for (row, dim) in (0..rows).flat_map(|row| (0..lookup.dims).map(move |d| (row, d)))
                {
                    for at in 0..PER_ROW {
                        let value = |token: usize| {
                            let code = plain[(token / 4 * PER_ROW + at) * 4 + token % 4];
                            lookup.value(dim, code) * weights[row][token]
                        };
                        let sum: i32 = (0..2 * TILE).map(value).sum();
                        let got = out[(row * lookup.dims + dim) * PER_ROW + at];
                        assert_eq!(got, sum as f32 * UNITS[row], "{simd:?}, {width} bits");
                    }
                }
            }
        }
    }

    #[test]
    fn largest_queries_against_the_largest_codes_do_not_overflow() {
        for simd in Simd::available() {
            for sign in [1.0, -1.0] {
                let mut parts = Parts::of_queries((simd, Precision::Fast));
                parts.reset(TERMS_MAX);
                parts.push(simd, &[sign; TERMS_MAX], 1.0, None);
                let mut out = [0.0; SPAN];
                let codes =
                    TileCodes { bytes: &[255; 32 * TERMS_MAX], width: 8, per_row: TERMS_MAX };
                let q = (parts.rows(0), &[1.0][..]);
                key_dots(simd, codes, &Lookup::identity(), q, &mut out);
                assert_eq!(out[..TILE], [sign * (255.0 * TOP * TERMS_MAX as f32); 32], "{simd:?}");
            }
        }
    }

    #[test]
    fn entries_off_their_levels_have_no_table() {
        assert!(Lookup::table(1, 1, &[127.0, -33.0]).is_some());
        assert!(Lookup::table(1, 1, &[127.0, -33.5]).is_none());
        assert!(Lookup::table(1, 1, &[0.0, 0.0]).is_none());
    }
}
