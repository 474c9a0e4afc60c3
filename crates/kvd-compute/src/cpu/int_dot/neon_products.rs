//! Sums of products of bytes with 16-bit integers, as the levels of NEON have them.
//!
//! A *cell* is four lanes (tokens of keys, positions of values), each with four bytes of the summed
//! axis. Bytes of two cells, eight of each lane, meet eight factors of a row at once.
#![allow(unsafe_code)] // Instructions without a stable intrinsic, and pointers of callers.
#![allow(unsafe_op_in_unsafe_fn, reason = "every body needs what its level has")]

use crate::cpu::int_operands::EIGHT;
use std::arch::aarch64::*;
use std::arch::asm;

/// The bytes of a row of `len` factors.
#[derive(Clone, Copy)]
pub(super) struct FactorRow<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) len: usize,
}

/// Products of one level. Every method is unsafe for one reason: the machine must have its
/// instructions.
pub(super) trait IntProducts: Copy {
    /// Eight bytes of four lanes.
    type Values: Copy;
    /// Eight factors, as `int_operands/` cuts them for the level.
    type Factors: Copy;
    /// Partial sums of four lanes, before they are added up.
    type Sums: Copy;
    /// Bits that are flipped in each byte before it is multiplied.
    const FLIPPED: u8;

    unsafe fn zero_sums() -> Self::Sums;
    unsafe fn load_values(four: [uint8x16_t; 2]) -> Self::Values;
    unsafe fn load_factors(sixteen: uint8x16_t) -> Self::Factors;
    /// Copies four or eight factors of a row of `len` to where they are taken as eight: those from
    /// `at` on, a multiple of four.
    fn gather_factors(row: FactorRow<'_>, at: usize, count: usize, sixteen: &mut [u8; 2 * EIGHT]);
    unsafe fn add_products(sums: &mut Self::Sums, values: Self::Values, factors: Self::Factors);
    unsafe fn total_sums(sums: Self::Sums) -> int32x4_t;
}

/// Words: a register of sums for each lane, and four products an instruction.
#[derive(Clone, Copy)]
pub(super) struct WordProducts;

impl IntProducts for WordProducts {
    type Values = [int16x8_t; 4];
    type Factors = [int16x8_t; 2];
    type Sums = [int32x4_t; 4];
    const FLIPPED: u8 = 0;

    #[inline(always)]
    unsafe fn zero_sums() -> Self::Sums {
        [vdupq_n_s32(0); 4]
    }

    #[inline(always)]
    unsafe fn load_values(four: [uint8x16_t; 2]) -> Self::Values {
        let [first, second] = four;
        [
            vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(first))),
            vreinterpretq_s16_u16(vmovl_high_u8(first)),
            vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(second))),
            vreinterpretq_s16_u16(vmovl_high_u8(second)),
        ]
    }

    #[inline(always)]
    unsafe fn load_factors(sixteen: uint8x16_t) -> Self::Factors {
        let fours = vreinterpretq_s64_u8(sixteen);
        [
            vreinterpretq_s16_s64(vdupq_laneq_s64::<0>(fours)),
            vreinterpretq_s16_s64(vdupq_laneq_s64::<1>(fours)),
        ]
    }

    fn gather_factors(row: FactorRow<'_>, at: usize, count: usize, sixteen: &mut [u8; 2 * EIGHT]) {
        sixteen[..2 * count].copy_from_slice(&row.bytes[2 * at..][..2 * count]);
    }

    #[inline(always)]
    unsafe fn add_products(sums: &mut Self::Sums, values: Self::Values, factors: Self::Factors) {
        for four in 0..2 {
            let (two, factors) = ([values[2 * four], values[2 * four + 1]], factors[four]);
            let low = vget_low_s16(factors);
            sums[0] = vmlal_s16(sums[0], vget_low_s16(two[0]), low);
            sums[1] = vmlal_high_s16(sums[1], two[0], factors);
            sums[2] = vmlal_s16(sums[2], vget_low_s16(two[1]), low);
            sums[3] = vmlal_high_s16(sums[3], two[1], factors);
        }
    }

    #[inline(always)]
    unsafe fn total_sums(sums: Self::Sums) -> int32x4_t {
        let [a, b, c, d] = sums;
        vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
    }
}

/// High bytes to the first eight, low ones to the last.
fn gather_bytes(row: FactorRow<'_>, at: usize, count: usize, sixteen: &mut [u8; 2 * EIGHT]) {
    let FactorRow { bytes: row, len } = row;
    for four in (0..count).step_by(4) {
        // Of eight values the high bytes come first, and of the four that a row may end with.
        let first = (at + four) / EIGHT * EIGHT;
        let high = 2 * first + (at + four) % EIGHT;
        let low = high + EIGHT.min(len - first);
        sixteen[four..four + 4].copy_from_slice(&row[high..high + 4]);
        sixteen[EIGHT + four..][..4].copy_from_slice(&row[low..low + 4]);
    }
}

/// `sdot`: sums of high and of low bytes, sixteen products an instruction.
#[derive(Clone, Copy)]
pub(super) struct DotProducts;

/// `sums + values · four factors`, those of lane `$lane`.
macro_rules! sdot {
    ($sums:expr, $values:expr, $factors:expr, $lane:literal) => {
        asm!(
            concat!("sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[", $lane, "]"),
            inout(vreg) $sums,
            in(vreg) $values,
            in(vreg) $factors,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
}

impl IntProducts for DotProducts {
    type Values = [uint8x16_t; 2];
    type Factors = uint8x16_t;
    type Sums = [int32x4_t; 2];
    /// Both sides are signed: values become 128 less.
    const FLIPPED: u8 = 0x80;

    #[inline(always)]
    unsafe fn zero_sums() -> Self::Sums {
        [vdupq_n_s32(0); 2]
    }

    #[inline(always)]
    unsafe fn load_values(four: [uint8x16_t; 2]) -> Self::Values {
        four
    }

    #[inline(always)]
    unsafe fn load_factors(sixteen: uint8x16_t) -> Self::Factors {
        sixteen
    }

    fn gather_factors(row: FactorRow<'_>, at: usize, count: usize, sixteen: &mut [u8; 2 * EIGHT]) {
        gather_bytes(row, at, count, sixteen);
    }

    #[inline(always)]
    unsafe fn add_products(sums: &mut Self::Sums, values: Self::Values, factors: Self::Factors) {
        sdot!(sums[0], values[0], factors, "0");
        sdot!(sums[1], values[0], factors, "2");
        sdot!(sums[0], values[1], factors, "1");
        sdot!(sums[1], values[1], factors, "3");
    }

    #[inline(always)]
    unsafe fn total_sums(sums: Self::Sums) -> int32x4_t {
        let [high, low] = sums;
        vaddq_s32(vshlq_n_s32::<8>(high), low)
    }
}

/// `usmmla`: eight bytes of two lanes with eight high and eight low ones, 32 products an
/// instruction.
#[derive(Clone, Copy)]
pub(super) struct MatrixProducts;

impl IntProducts for MatrixProducts {
    type Values = [uint8x16_t; 2];
    type Factors = uint8x16_t;
    /// High and low sums, two lanes a register.
    type Sums = [int32x4_t; 2];
    const FLIPPED: u8 = 0;

    #[inline(always)]
    unsafe fn zero_sums() -> Self::Sums {
        [vdupq_n_s32(0); 2]
    }

    #[inline(always)]
    unsafe fn load_values(four: [uint8x16_t; 2]) -> Self::Values {
        let [first, second] = four.map(|four| vreinterpretq_u32_u8(four));
        let lanes = [vzip1q_u32(first, second), vzip2q_u32(first, second)];
        lanes.map(|two| vreinterpretq_u8_u32(two))
    }

    #[inline(always)]
    unsafe fn load_factors(sixteen: uint8x16_t) -> Self::Factors {
        sixteen
    }

    fn gather_factors(row: FactorRow<'_>, at: usize, count: usize, sixteen: &mut [u8; 2 * EIGHT]) {
        gather_bytes(row, at, count, sixteen);
    }

    #[inline(always)]
    unsafe fn add_products(sums: &mut Self::Sums, values: Self::Values, factors: Self::Factors) {
        for (sums, values) in sums.iter_mut().zip(values) {
            asm!(
                "usmmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
                inout(vreg) *sums,
                in(vreg) values,
                in(vreg) factors,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn total_sums(sums: Self::Sums) -> int32x4_t {
        let [first, second] = sums;
        let (high, low) = (vuzp1q_s32(first, second), vuzp2q_s32(first, second));
        vaddq_s32(vshlq_n_s32::<8>(high), low)
    }
}
