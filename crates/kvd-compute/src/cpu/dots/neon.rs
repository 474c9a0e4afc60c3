//! `mod.rs` in NEON: `tbl` tables in registers, and the products of `neon_products.rs`.
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::dots::neon_products::{Dots, Matrices, Products, Words};
use crate::cpu::dots::{Lookup, Target, TileCodes};
use crate::cpu::lanes::neon_tables::{TABLE_16, TABLE_64, Table, table};
use crate::cpu::parts::{EIGHT, PartRows};
use crate::cpu::scores::{SPAN, TILE};
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::aarch64::*;

/// Codes are values, a byte each.
const BYTES: u8 = 0;
/// Codes are values.
const PLAIN: u8 = 1;

/// Lanes of a cell.
const LANES: usize = 4;

fn kind(lookup: &Lookup, codes: &TileCodes<'_>) -> u8 {
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
    lookup: &Lookup,
    q: (PartRows<'_>, &[f32]),
    out: &mut [f32],
) {
    let (rows, kind) = (q.1.len(), kind(lookup, &codes));
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.set() {
            InstructionSet::NeonI8mm => {
                by_shape!(matrices, keys, rows, kind, (codes, lookup, q, out));
            }
            InstructionSet::NeonDotprod => {
                by_shape!(dots, keys, rows, kind, (codes, lookup, q, out));
            }
            _ => by_shape!(words, keys, rows, kind, (codes, lookup, q, out)),
        }
    }
}

pub(super) fn value_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &Lookup,
    weights: (PartRows<'_>, Target<'_>),
    out: &mut [f32],
) {
    let (rows, kind) = (weights.0.sums.len(), kind(lookup, &codes));
    // SAFETY: as above.
    unsafe {
        match simd.set() {
            InstructionSet::NeonI8mm => {
                by_shape!(matrices, values, rows, kind, (codes, lookup, weights, out));
            }
            InstructionSet::NeonDotprod => {
                by_shape!(dots, values, rows, kind, (codes, lookup, weights, out));
            }
            _ => by_shape!(words, values, rows, kind, (codes, lookup, weights, out)),
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
            pub(super) unsafe fn keys<const R: usize, const KIND: u8>(
                codes: TileCodes<'_>,
                lookup: &Lookup,
                q: (PartRows<'_>, &[f32]),
                out: &mut [f32],
            ) {
                if KIND < TABLE_16 {
                    super::keys_body::<$products, R, 1, KIND, $cells>(codes, lookup, q, out);
                } else {
                    super::keys_body::<$products, R, 2, KIND, $cells>(codes, lookup, q, out);
                }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn values<const R: usize, const KIND: u8>(
                codes: TileCodes<'_>,
                lookup: &Lookup,
                weights: (PartRows<'_>, Target<'_>),
                out: &mut [f32],
            ) {
                if KIND < TABLE_16 {
                    super::values_body::<$products, R, 1, KIND, $cells>(
                        codes, lookup, weights, out,
                    );
                } else {
                    super::values_body::<$products, R, $cells, KIND, 1>(
                        codes, lookup, weights, out,
                    );
                }
            }
        }
    };
}

wrappers!(words, Words, "neon", 1);
wrappers!(dots, Dots, "neon,dotprod", 2);
wrappers!(matrices, Matrices, "neon,dotprod,i8mm", 2);

/// The tables of channels `first..first + DP`, flipped as the products want it.
#[inline(always)]
unsafe fn tables<const DP: usize>(lookup: &Lookup, first: usize, flipped: u8) -> [Table; DP] {
    let mut tables = [table(&[0; 64], 0); DP];
    for (to, bytes) in tables.iter_mut().zip(lookup.tables.iter().skip(first)) {
        *to = table(&bytes.as_chunks().0[0], flipped);
    }
    tables
}

/// How codes become bytes of values.
#[derive(Clone, Copy)]
struct Look {
    mask: uint8x16_t,
    flipped: uint8x16_t,
}

impl Look {
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
    unsafe fn cut<const KIND: u8>(self, bytes: uint8x16_t, shift: usize) -> uint8x16_t {
        if KIND == BYTES {
            return bytes;
        }
        vandq_u8(vshlq_u8(bytes, vdupq_n_s8(-(shift as i8))), self.mask)
    }

    #[inline(always)]
    unsafe fn look<const KIND: u8>(self, codes: uint8x16_t, table: &Table) -> uint8x16_t {
        match KIND {
            BYTES | PLAIN => veorq_u8(codes, self.flipped),
            TABLE_16 => vqtbl1q_u8(table.0, codes),
            _ => vqtbl4q_u8(*table, codes),
        }
    }

    /// The values of codes, as products take them.
    #[inline(always)]
    unsafe fn values<P: Products, const KIND: u8>(
        self,
        [a, b]: [uint8x16_t; 2],
        table: &Table,
    ) -> P::Values {
        P::values([self.look::<KIND>(a, table), self.look::<KIND>(b, table)])
    }
}

/// Steps through a plane of codes: from one group of four that is summed to the next.
#[derive(Clone, Copy)]
struct Groups {
    at: usize,
    shift: usize,
    /// Groups of bytes.
    count: usize,
    width: usize,
}

impl Groups {
    /// The group of bytes, and the shift.
    #[inline(always)]
    fn step(&mut self) -> (usize, usize) {
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
unsafe fn factors<P: Products>(
    rows: PartRows<'_>,
    row: usize,
    (at, count): (usize, usize),
) -> P::Factors {
    let first = 2 * row * rows.len;
    if count >= EIGHT && at.is_multiple_of(EIGHT) {
        return P::factors(vld1q_u8(rows.bytes.as_ptr().add(first + 2 * at)));
    }
    let mut sixteen = [0u8; 2 * EIGHT];
    let row = (&rows.bytes[first..first + 2 * rows.len], rows.len);
    P::gather(row, (at, count.min(EIGHT)), &mut sixteen);
    P::factors(vld1q_u8(sixteen.as_ptr()))
}

/// The bias that is in the sums, because bytes are not the values.
#[inline(always)]
fn excess<P: Products>(lookup: &Lookup, sum: i32) -> i32 {
    (lookup.bias - i32::from(P::FLIPPED)).wrapping_mul(sum)
}

/// `C` cells of tokens at once, all channels of theirs.
#[inline(always)]
unsafe fn keys_body<
    P: Products,
    const R: usize,
    const DP: usize,
    const KIND: u8,
    const C: usize,
>(
    codes: TileCodes<'_>,
    lookup: &Lookup,
    (q, units): (PartRows<'_>, &[f32]),
    out: &mut [f32],
) {
    let TileCodes { bytes, width, per_row, .. } = codes;
    let look = Look::new::<KIND>(width, P::FLIPPED);
    let count = bytes.len() / (4 * TILE);
    for first in (0..TILE).step_by(LANES * C) {
        let mut sums = [[P::zero(); C]; R];
        for pass in (0..lookup.dims).step_by(DP) {
            let tables = tables::<DP>(lookup, pass, P::FLIPPED);
            let mut groups = Groups { at: 0, shift: 0, count, width: width as usize };
            for position in (0..per_row).step_by(EIGHT) {
                let mut cells = [[vdupq_n_u8(0); 2]; C];
                for two in 0..2 {
                    // Where there is no second one its factors are zero.
                    if two == 1 && position + 4 == per_row {
                        continue;
                    }
                    let (at, shift) = groups.step();
                    for c in 0..C {
                        let at = 4 * (TILE * at + first + LANES * c);
                        cells[c][two] = look.cut::<KIND>(vld1q_u8(bytes.as_ptr().add(at)), shift);
                    }
                }
                for d in 0..DP {
                    let mut values = [P::values(cells[0]); C];
                    for c in 0..C {
                        values[c] = look.values::<P, KIND>(cells[c], &tables[d]);
                    }
                    let at = ((pass + d) * per_row + position, per_row - position);
                    for row in 0..R {
                        let factors = factors::<P>(q, row, at);
                        for c in 0..C {
                            P::add(&mut sums[row][c], values[c], factors);
                        }
                    }
                }
            }
        }
        for row in 0..R {
            let excess = vdupq_n_s32(excess::<P>(lookup, q.sums[row]));
            for c in 0..C {
                let sum = vcvtq_f32_s32(vsubq_s32(P::total(sums[row][c]), excess));
                let out = &mut out[row * SPAN + first + LANES * c..][..LANES];
                vst1q_f32(out.as_mut_ptr(), vmulq_n_f32(sum, units[row]));
            }
        }
    }
}

/// `C` cells of positions at once, `DP` channels of each.
#[inline(always)]
unsafe fn values_body<
    P: Products,
    const R: usize,
    const DP: usize,
    const KIND: u8,
    const C: usize,
>(
    codes: TileCodes<'_>,
    lookup: &Lookup,
    (weights, target): (PartRows<'_>, Target<'_>),
    out: &mut [f32],
) {
    let TileCodes { bytes, width, per_row, .. } = codes;
    let look = Look::new::<KIND>(width, P::FLIPPED);
    let end = target.first + target.count;
    for pass in (0..lookup.dims).step_by(DP) {
        let tables = tables::<DP>(lookup, pass, P::FLIPPED);
        for block in (target.first..end).step_by(LANES * C) {
            let mut sums = [[[P::zero(); C]; DP]; R];
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
                        let four = load(bytes, at, end.saturating_sub(position));
                        cells[c][two] = look.cut::<KIND>(four, group - within);
                    }
                }
                let mut values = [[P::values(cells[0]); C]; DP];
                for d in 0..DP {
                    for c in 0..C {
                        values[d][c] = look.values::<P, KIND>(cells[c], &tables[d]);
                    }
                }
                for row in 0..R {
                    let at = 2 * (row * weights.len + token);
                    let factors = P::factors(vld1q_u8(weights.bytes.as_ptr().add(at)));
                    for d in 0..DP {
                        for c in 0..C {
                            P::add(&mut sums[row][d][c], values[d][c], factors);
                        }
                    }
                }
            }
            for row in 0..R {
                let excess = vdupq_n_s32(excess::<P>(lookup, weights.sums[row]));
                for d in 0..DP {
                    for c in 0..C {
                        let position = block + LANES * c;
                        let lanes = end.saturating_sub(position).min(LANES);
                        if lanes == 0 {
                            continue;
                        }
                        let sum = vsubq_s32(P::total(sums[row][d][c]), excess);
                        let at = (row * lookup.dims + pass + d) * per_row + position;
                        let factors = target.factors.get(position..position + lanes);
                        let by = (target.units[row], factors);
                        add_sums(vcvtq_f32_s32(sum), by, &mut out[at..at + lanes]);
                    }
                }
            }
        }
    }
}

/// Four bytes of each lane from `at` on, of `lanes` lanes.
#[inline(always)]
unsafe fn load(bytes: &[u8], at: usize, lanes: usize) -> uint8x16_t {
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
unsafe fn add_sums(sums: float32x4_t, (unit, factors): (f32, Option<&[f32]>), out: &mut [f32]) {
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
