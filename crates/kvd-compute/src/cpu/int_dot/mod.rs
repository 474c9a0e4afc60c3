//! Dot products of byte codes with integers: the arithmetic that kernels of sides share.
//!
//! Codes come as a tile holds them (`kvd_codec::CodeLayout`): four codes of the summed axis, then
//! the lanes. A [`CodeLookup`] says what a code stands for, in at most 8 bits. Queries and weights
//! are rounded to 15 bits and a sign: a step of `2^-15` of the row's largest, and a wider one where
//! sums have more terms than 32 bits hold (`IntOperands::clear_rows`). Sums are exact integers, so
//! every instruction set gives the same bits. With `Precision::Int8` they are one byte where that
//! is faster (`int_operands/`).

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx_vnni;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon_products;
pub(super) mod portable;

use crate::cpu::int_operands::{IntRows, ScaledRows, round_to_int};
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::simd::{InstructionSet, Simd, per_level};
use crate::cpu::span_scores::{SPAN, TILE};
use kvd_codec::level_unit;

/// Rows of queries or weights that one call handles: as many as AMX multiplies at once.
pub(crate) const ROWS: usize = 8;
/// How many of them vector registers have sums for.
pub(crate) const VECTOR_ROWS: usize = 4;
/// Tiles after which what values sum apart, minima or biases, joins the sums of their codes: those
/// are never negative, and grown they would lose what is small beside them.
pub(crate) const SETTLED_TILES: usize = 16;
/// Added to looked-up values so that bytes are not negative.
pub(super) const BIAS: i32 = 128;

/// As [`InstructionSet::wants_bytes`].
pub(crate) fn wants_bytes(simd: Simd, rows: usize) -> bool {
    simd.level().wants_bytes(rows)
}

/// Whether a code is a byte and its own value.
#[cfg(target_arch = "x86_64")]
fn codes_are_bytes(codes: TileCodes<'_>, lookup: &CodeLookup) -> bool {
    lookup.tables.is_empty() && codes.width == 8
}

/// The values that codes stand for.
pub(crate) struct CodeLookup {
    /// Channels of a code.
    pub(super) dims: usize,
    /// Bits of a code.
    pub(super) bits: u32,
    /// Per channel, each code's value plus [`BIAS`], repeated to fill; none when a code is its own
    /// value.
    pub(super) tables: Vec<[u8; 256]>,
    /// The bias of values: codes or bytes of a table are values plus this.
    pub(super) bias: i32,
    /// One unit of a value.
    pub(crate) scale: f32,
}

impl CodeLookup {
    /// Codes are their own values, 0 to 255.
    pub(crate) fn identity() -> Self {
        Self { dims: 1, bits: 8, tables: Vec::new(), bias: 0, scale: 1.0 }
    }

    /// Codes are values plus `bias`.
    pub(crate) fn biased_by(bias: i32) -> Self {
        Self { bias, ..Self::identity() }
    }

    /// Codes are values plus [`BIAS`].
    pub(crate) fn biased_bytes() -> Self {
        Self { bias: BIAS, ..Self::identity() }
    }

    /// Codes name bytes of a table per channel: values plus [`BIAS`].
    pub(crate) fn of_tables(bits: u32, tables: Vec<[u8; 256]>) -> Self {
        Self { dims: tables.len(), bits, tables, bias: BIAS, scale: 1.0 }
    }

    /// Codes name entries (`[2^bits, dims]`, finite) whose values are whole numbers of a unit up to
    /// 127, as those of fitted codebooks are; `None` for others, which bytes would change.
    pub(crate) fn of_entries(dims: usize, bits: u32, entries: &[f32]) -> Option<Self> {
        let scale = level_unit(entries)?;
        let count = entries.len() / dims;
        let table = |dim: usize| {
            let mut table = [0; 256];
            for (byte, entry) in table.iter_mut().zip(entries.chunks_exact(dims)) {
                *byte = (round_to_int(entry[dim] / scale) + BIAS) as u8;
            }
            repeat_entries(&mut table, count);
            table
        };
        Some(Self { dims, bits, tables: (0..dims).map(table).collect(), bias: BIAS, scale })
    }

    /// A lookup of these values after they were looked up: bytes that are values plus [`BIAS`].
    pub(crate) fn after_lookup(&self) -> Self {
        Self { scale: self.scale, ..Self::biased_bytes() }
    }

    /// The largest magnitude of a value.
    pub(crate) fn largest_value(&self) -> i32 {
        (i32::from(u8::MAX) - self.bias).max(self.bias)
    }

    /// The largest sum of squares of a code's channels.
    pub(crate) fn largest_energy(&self) -> f32 {
        if self.tables.is_empty() {
            return (self.dims as f32) * (self.largest_value() as f32).powi(2);
        }
        let squares = |code: usize| -> i32 {
            self.tables.iter().map(|table| (i32::from(table[code]) - self.bias).pow(2)).sum()
        };
        (0..1usize << self.bits).map(squares).max().unwrap_or_default() as f32
    }

    /// Value of channel `dim` of `code`.
    pub(super) fn value_of(&self, dim: usize, code: u8) -> i32 {
        let byte = self.tables.get(dim).map_or(code, |table| table[usize::from(code)]);
        i32::from(byte) - self.bias
    }

    /// Whether there is a kernel for it; the portable one takes all.
    pub(crate) fn is_fast(&self, simd: Simd) -> bool {
        let pairs = self.tables.is_empty() || self.dims.is_multiple_of(2);
        match simd.vector_set() {
            InstructionSet::Portable => true,
            InstructionSet::Avx2 | InstructionSet::AvxVnni => {
                pairs && (self.tables.is_empty() || self.bits <= 4)
            }
            InstructionSet::Avx512 | InstructionSet::Amx => pairs && self.bits <= 8,
            InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => {
                pairs && (self.tables.is_empty() || self.bits <= 6)
            }
        }
    }
}

/// Repeats the first `count` bytes of a table to fill it: bits above a code do not matter.
pub(super) fn repeat_entries(table: &mut [u8; 256], count: usize) {
    let mut filled = count;
    while filled < table.len() {
        let more = filled.min(table.len() - filled);
        table.copy_within(..more, filled);
        filled += more;
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
    /// Bytes to prefetch while these are multiplied.
    pub(crate) prefetch: PrefetchBytes<'a>,
}

impl TileCodes<'_> {
    /// Bytes of a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        4 * self.per_row * self.width as usize
    }

    /// Each tile, and its first token.
    pub(super) fn each_tile(&self) -> impl Iterator<Item = (Self, usize)> {
        let of = *self;
        let tiles = self.bytes.chunks_exact(self.tile_bytes());
        let count = tiles.len();
        tiles.enumerate().map(move |(tile, bytes)| {
            (Self { bytes, prefetch: of.prefetch.share_of(tile, count), ..of }, tile * TILE)
        })
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
            unpack_codes_body(bytes, self.width, out);
        }
        buffer
    }

    /// Writes the codes of a tile, a byte each.
    pub(super) fn unpack_to(&self, simd: Simd, out: &mut [u8]) {
        assert_eq!(out.len() * self.width as usize, 8 * self.bytes.len(), "spread: lengths");
        unpack_codes(simd, self.bytes, self.width, out);
    }
}

per_level!(fn unpack_codes(bytes: &[u8], width: u32, out: &mut [u8]) = unpack_codes_body);

#[inline(always)]
fn unpack_codes_body(bytes: &[u8], width: u32, out: &mut [u8]) {
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
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    scores: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
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
        for (codes, at) in codes.each_tile() {
            codes.prefetch.request_all();
            let q = ScaledRows { rows: q, units };
            amx::key_dots(simd, codes, lookup, q, &mut scores[at..]);
        }
        return;
    }
    for (index, units) in units.chunks(VECTOR_ROWS).enumerate() {
        let first = index * VECTOR_ROWS;
        let q = ScaledRows { rows: q.slice_rows(first, units.len()), units };
        let scores = &mut scores[first * SPAN..];
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() != InstructionSet::Portable {
            avx2::key_dots(simd, codes, lookup, q, scores);
            continue;
        }
        for (codes, at) in codes.each_tile() {
            let scores = &mut scores[at..];
            codes.prefetch.request_all();
            #[cfg(target_arch = "aarch64")]
            if simd.vector_set() != InstructionSet::Portable {
                neon::key_dots(simd, codes, lookup, q, scores);
                continue;
            }
            portable::key_dots(codes, lookup, q, scores);
        }
    }
}

/// The positions that [`value_dots`] sums, and the factors of the sums.
#[derive(Clone, Copy)]
pub(crate) struct SumTarget<'a> {
    /// One unit of the integers, by row.
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
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (per_row, rows) = (codes.per_row, weights.sums.len());
    let SumTarget { units, factors, first, count } = target;
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
        let done = amx::value_dots(simd, codes, lookup, weights, target, out);
        (target.first, target.count) = (first + done, count - done);
        if target.count == 0 {
            return;
        }
    }
    let size = VECTOR_ROWS * lookup.dims * per_row;
    for (index, (units, out)) in units.chunks(VECTOR_ROWS).zip(out.chunks_mut(size)).enumerate() {
        let target = SumTarget { units, ..target };
        let weights = weights.slice_rows(index * VECTOR_ROWS, units.len());
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() != InstructionSet::Portable {
            avx2::value_dots(simd, codes, lookup, weights, target, out);
            continue;
        }
        codes.prefetch.request_all();
        #[cfg(target_arch = "aarch64")]
        if simd.vector_set() != InstructionSet::Portable {
            neon::value_dots(simd, codes, lookup, weights, target, out);
            continue;
        }
        portable::value_dots(codes, lookup, weights, target, out);
    }
}

#[cfg(test)]
mod tests;
