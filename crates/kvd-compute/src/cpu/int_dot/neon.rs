//! `mod.rs` in NEON: `tbl` tables in registers, and the products of `neon_products.rs`.
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::int_dot::neon_products::{
    DotProducts, FactorRow, IntProducts, MatrixProducts, WordProducts,
};
use crate::cpu::int_dot::{CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{EIGHT, IntRows, ScaledRows};
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::simd_vector::neon_tables::{TABLE_16, TABLE_64, TableRegisters, load_table};
use crate::cpu::span_scores::{SPAN, TILE};
use std::arch::aarch64::*;

/// Codes are values, a byte each.
const BYTES: u8 = 0;
/// Codes are values.
const PLAIN: u8 = 1;

/// Lanes of a cell.
const LANES: usize = 4;

fn lookup_kind(lookup: &CodeLookup, codes: &TileCodes<'_>) -> u8 {
    match (lookup.tables.is_empty(), lookup.bits, codes.width) {
        (true, _, 8) => BYTES,
        (true, ..) => PLAIN,
        (false, ..=4, _) => TABLE_16,
        _ => TABLE_64,
    }
}

/// Calls `$set::$f::<rows, kind>`.
macro_rules! by_shape {
    ($set:ident, $f:ident, $rows:expr, $kind:expr, $args:tt) => {
        match ($rows, $kind) {
            (1, BYTES) => $set::$f::<1, BYTES> $args,
            (2, BYTES) => $set::$f::<2, BYTES> $args,
            (3, BYTES) => $set::$f::<3, BYTES> $args,
            (_, BYTES) => $set::$f::<4, BYTES> $args,
            (1, PLAIN) => $set::$f::<1, PLAIN> $args,
            (2, PLAIN) => $set::$f::<2, PLAIN> $args,
            (3, PLAIN) => $set::$f::<3, PLAIN> $args,
            (_, PLAIN) => $set::$f::<4, PLAIN> $args,
            (1, TABLE_16) => $set::$f::<1, TABLE_16> $args,
            (2, TABLE_16) => $set::$f::<2, TABLE_16> $args,
            (3, TABLE_16) => $set::$f::<3, TABLE_16> $args,
            (_, TABLE_16) => $set::$f::<4, TABLE_16> $args,
            (1, _) => $set::$f::<1, TABLE_64> $args,
            (2, _) => $set::$f::<2, TABLE_64> $args,
            (3, _) => $set::$f::<3, TABLE_64> $args,
            (_, _) => $set::$f::<4, TABLE_64> $args,
        }
    };
}

pub(super) fn key_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = (q.units.len(), lookup_kind(lookup, &codes));
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.vector_set() {
            InstructionSet::NeonI8mm => {
                by_shape!(matrices, key_tile, rows, kind, (codes, lookup, q, out));
            }
            InstructionSet::NeonDotprod => {
                by_shape!(dots, key_tile, rows, kind, (codes, lookup, q, out));
            }
            _ => by_shape!(words, key_tile, rows, kind, (codes, lookup, q, out)),
        }
    }
}

pub(super) fn value_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let (rows, kind) = (weights.sums.len(), lookup_kind(lookup, &codes));
    // SAFETY: as above.
    unsafe {
        match simd.vector_set() {
            InstructionSet::NeonI8mm => {
                by_shape!(matrices, value_tiles, rows, kind, (codes, lookup, weights, target, out));
            }
            InstructionSet::NeonDotprod => {
                by_shape!(dots, value_tiles, rows, kind, (codes, lookup, weights, target, out));
            }
            _ => by_shape!(words, value_tiles, rows, kind, (codes, lookup, weights, target, out)),
        }
    }
}

/// The kernels with the products of one level, and so many cells at once that the sums of four rows
/// are 16 registers.
macro_rules! wrappers {
    ($name:ident, $products:ident, $features:literal, $cells:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn key_tile<const R: usize, const KIND: u8>(
                codes: TileCodes<'_>,
                lookup: &CodeLookup,
                q: ScaledRows<'_>,
                out: &mut [f32],
            ) {
                if KIND < TABLE_16 {
                    super::key_tile_body::<$products, R, 1, KIND, $cells>(codes, lookup, q, out);
                } else {
                    super::key_tile_body::<$products, R, 2, KIND, $cells>(codes, lookup, q, out);
                }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn value_tiles<const R: usize, const KIND: u8>(
                codes: TileCodes<'_>,
                lookup: &CodeLookup,
                weights: IntRows<'_>,
                target: SumTarget<'_>,
                out: &mut [f32],
            ) {
                if KIND < TABLE_16 {
                    super::value_tiles_body::<$products, R, 1, KIND, $cells>(
                        codes, lookup, weights, target, out,
                    );
                } else {
                    super::value_tiles_body::<$products, R, $cells, KIND, 1>(
                        codes, lookup, weights, target, out,
                    );
                }
            }
        }
    };
}

wrappers!(words, WordProducts, "neon", 1);
wrappers!(dots, DotProducts, "neon,dotprod", 2);
wrappers!(matrices, MatrixProducts, "neon,dotprod,i8mm", 2);

/// The tables of channels `first..first + DP`, flipped as the products want it.
#[inline(always)]
unsafe fn load_tables<const DP: usize>(
    lookup: &CodeLookup,
    first: usize,
    flipped: u8,
) -> [TableRegisters; DP] {
    let mut tables = [load_table(&[0; 64], 0); DP];
    for (to, bytes) in tables.iter_mut().zip(lookup.tables.iter().skip(first)) {
        *to = load_table(&bytes.as_chunks().0[0], flipped);
    }
    tables
}

/// How codes become bytes of values.
#[derive(Clone, Copy)]
struct ValueLookup {
    mask: uint8x16_t,
    flipped: uint8x16_t,
}

impl ValueLookup {
    #[inline(always)]
    unsafe fn new<const KIND: u8>(width: u32, flipped: u8) -> Self {
        // Beyond its end a table would give zeros.
        let entries = match KIND {
            BYTES | PLAIN => u8::MAX,
            TABLE_16 => 15,
            _ => 63,
        };
        let mask = u8::MAX >> (8 - width) & entries;
        Self { mask: vdupq_n_u8(mask), flipped: vdupq_n_u8(flipped) }
    }

    /// Codes: the bits from `shift` on.
    #[inline(always)]
    unsafe fn cut_plane<const KIND: u8>(self, bytes: uint8x16_t, shift: usize) -> uint8x16_t {
        if KIND == BYTES {
            return bytes;
        }
        vandq_u8(vshlq_u8(bytes, vdupq_n_s8(-(shift as i8))), self.mask)
    }

    #[inline(always)]
    unsafe fn look_up<const KIND: u8>(
        self,
        codes: uint8x16_t,
        table: &TableRegisters,
    ) -> uint8x16_t {
        match KIND {
            BYTES | PLAIN => veorq_u8(codes, self.flipped),
            TABLE_16 => vqtbl1q_u8(table.0, codes),
            _ => vqtbl4q_u8(*table, codes),
        }
    }

    /// The values of codes, as products take them.
    #[inline(always)]
    unsafe fn look_up_values<P: IntProducts, const KIND: u8>(
        self,
        cells: [uint8x16_t; 2],
        table: &TableRegisters,
    ) -> P::Values {
        let [a, b] = cells;
        P::load_values([self.look_up::<KIND>(a, table), self.look_up::<KIND>(b, table)])
    }
}

/// Steps through a plane of codes: from one group of four that is summed to the next.
#[derive(Clone, Copy)]
struct QuadCursor {
    at: usize,
    shift: usize,
    /// Groups of bytes.
    count: usize,
    width: usize,
}

impl QuadCursor {
    /// The group of bytes, and the shift.
    #[inline(always)]
    fn next_group(&mut self) -> (usize, usize) {
        let place = (self.at, self.shift);
        self.at += 1;
        if self.at == self.count {
            (self.at, self.shift) = (0, self.shift + self.width);
        }
        place
    }
}

/// Up to eight factors of row `row` from `at` on; those after `count` are zero.
#[inline(always)]
unsafe fn load_factors<P: IntProducts>(
    rows: IntRows<'_>,
    row: usize,
    at: usize,
    count: usize,
) -> P::Factors {
    let first = 2 * row * rows.len;
    if count >= EIGHT && at.is_multiple_of(EIGHT) {
        return P::load_factors(vld1q_u8(rows.bytes.as_ptr().add(first + 2 * at)));
    }
    let mut sixteen = [0u8; 2 * EIGHT];
    let row = FactorRow { bytes: &rows.bytes[first..first + 2 * rows.len], len: rows.len };
    P::gather_factors(row, at, count.min(EIGHT), &mut sixteen);
    P::load_factors(vld1q_u8(sixteen.as_ptr()))
}

/// The bias that is in the sums, because bytes are not the values.
#[inline(always)]
fn sum_excess<P: IntProducts>(lookup: &CodeLookup, sum: i32) -> i32 {
    (lookup.bias - i32::from(P::FLIPPED)).wrapping_mul(sum)
}

/// `C` cells of tokens at once, all channels of theirs.
#[inline(always)]
unsafe fn key_tile_body<
    P: IntProducts,
    const R: usize,
    const DP: usize,
    const KIND: u8,
    const C: usize,
>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    let TileCodes { bytes, width, per_row, .. } = codes;
    let look = ValueLookup::new::<KIND>(width, P::FLIPPED);
    let count = bytes.len() / (4 * TILE);
    for first in (0..TILE).step_by(LANES * C) {
        let mut sums = [[P::zero_sums(); C]; R];
        for pass in (0..lookup.dims).step_by(DP) {
            let tables = load_tables::<DP>(lookup, pass, P::FLIPPED);
            let mut groups = QuadCursor { at: 0, shift: 0, count, width: width as usize };
            for position in (0..per_row).step_by(EIGHT) {
                let mut cells = [[vdupq_n_u8(0); 2]; C];
                for two in 0..2 {
                    // Where there is no second one its factors are zero.
                    if two == 1 && position + 4 == per_row {
                        continue;
                    }
                    let (at, shift) = groups.next_group();
                    for c in 0..C {
                        let at = 4 * (TILE * at + first + LANES * c);
                        cells[c][two] =
                            look.cut_plane::<KIND>(vld1q_u8(bytes.as_ptr().add(at)), shift);
                    }
                }
                for d in 0..DP {
                    let mut values = [P::load_values(cells[0]); C];
                    for c in 0..C {
                        values[c] = look.look_up_values::<P, KIND>(cells[c], &tables[d]);
                    }
                    let (at, left) = ((pass + d) * per_row + position, per_row - position);
                    for row in 0..R {
                        let factors = load_factors::<P>(q, row, at, left);
                        for c in 0..C {
                            P::add_products(&mut sums[row][c], values[c], factors);
                        }
                    }
                }
            }
        }
        for row in 0..R {
            let excess = vdupq_n_s32(sum_excess::<P>(lookup, q.sums[row]));
            for c in 0..C {
                let sum = vcvtq_f32_s32(vsubq_s32(P::total_sums(sums[row][c]), excess));
                let out = &mut out[row * SPAN + first + LANES * c..][..LANES];
                vst1q_f32(out.as_mut_ptr(), vmulq_n_f32(sum, units[row]));
            }
        }
    }
}

/// `C` cells of positions at once, `DP` channels of each.
#[inline(always)]
unsafe fn value_tiles_body<
    P: IntProducts,
    const R: usize,
    const DP: usize,
    const KIND: u8,
    const C: usize,
>(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let TileCodes { bytes, width, per_row, .. } = codes;
    let look = ValueLookup::new::<KIND>(width, P::FLIPPED);
    let end = target.first + target.count;
    for pass in (0..lookup.dims).step_by(DP) {
        let tables = load_tables::<DP>(lookup, pass, P::FLIPPED);
        for block in (target.first..end).step_by(LANES * C) {
            let mut sums = [[[P::zero_sums(); C]; DP]; R];
            for token in (0..weights.len).step_by(EIGHT) {
                let tile = token / TILE * codes.tile_bytes();
                let mut cells = [[vdupq_n_u8(0); 2]; C];
                for two in 0..2 {
                    // A tile has eight groups of four tokens, in `width` groups of bytes.
                    let group = token % TILE / 4 + two;
                    let within = group & (width as usize - 1);
                    for c in 0..C {
                        let position = block + LANES * c;
                        let at = tile + 4 * (within * per_row + position);
                        let four = load_lanes(bytes, at, end.saturating_sub(position));
                        cells[c][two] = look.cut_plane::<KIND>(four, group - within);
                    }
                }
                let mut values = [[P::load_values(cells[0]); C]; DP];
                for d in 0..DP {
                    for c in 0..C {
                        values[d][c] = look.look_up_values::<P, KIND>(cells[c], &tables[d]);
                    }
                }
                for row in 0..R {
                    let at = 2 * (row * weights.len + token);
                    let factors = P::load_factors(vld1q_u8(weights.bytes.as_ptr().add(at)));
                    for d in 0..DP {
                        for c in 0..C {
                            P::add_products(&mut sums[row][d][c], values[d][c], factors);
                        }
                    }
                }
            }
            for row in 0..R {
                let excess = vdupq_n_s32(sum_excess::<P>(lookup, weights.sums[row]));
                for d in 0..DP {
                    for c in 0..C {
                        let position = block + LANES * c;
                        let lanes = end.saturating_sub(position).min(LANES);
                        if lanes == 0 {
                            continue;
                        }
                        let sum = vsubq_s32(P::total_sums(sums[row][d][c]), excess);
                        let at = (row * lookup.dims + pass + d) * per_row + position;
                        let factors = target.factors.get(position..position + lanes);
                        let (sum, unit) = (vcvtq_f32_s32(sum), target.units[row]);
                        add_sums(sum, unit, factors, &mut out[at..at + lanes]);
                    }
                }
            }
        }
    }
}

/// Four bytes of each lane from `at` on, of `lanes` lanes.
#[inline(always)]
unsafe fn load_lanes(bytes: &[u8], at: usize, lanes: usize) -> uint8x16_t {
    if lanes >= LANES {
        return vld1q_u8(bytes.as_ptr().add(at));
    }
    if lanes == 0 {
        return vdupq_n_u8(0);
    }
    let mut sixteen = [0u8; 4 * LANES];
    sixteen[..4 * lanes].copy_from_slice(&bytes[at..][..4 * lanes]);
    vld1q_u8(sixteen.as_ptr())
}

/// Adds up to four sums, times the unit and their factors.
#[inline(always)]
unsafe fn add_sums(sums: float32x4_t, unit: f32, factors: Option<&[f32]>, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        let mut by = vdupq_n_f32(unit);
        if let Some(factors) = factors.and_then(<[f32]>::first_chunk::<LANES>) {
            by = vmulq_n_f32(vld1q_f32(factors.as_ptr()), unit);
        }
        let after = vaddq_f32(vld1q_f32(out.as_ptr()), vmulq_f32(sums, by));
        return vst1q_f32(out.as_mut_ptr(), after);
    }
    let mut four = [0f32; LANES];
    vst1q_f32(four.as_mut_ptr(), sums);
    for (lane, out) in out.iter_mut().enumerate() {
        *out += four[lane] * factors.map_or(unit, |factors| factors[lane] * unit);
    }
}
