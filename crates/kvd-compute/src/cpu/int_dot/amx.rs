//! `mod.rs` in AMX: products of bytes, 16 lanes times 64 summed codes in one instruction.
//!
//! Codes of a byte lie as its right operand wants them: a row is four summed codes of 16 lanes. The
//! left one is rows of factors, the high bytes of each and then its low ones, as `IntOperands` has
//! them. Rust has no stable names for the instructions, so they stand here as assembly. Registers
//! are rows of a thread's state: shaped when the shape changes, given back when a unit ends.
#![allow(unsafe_code)] // Assembly, and pointers into what callers in `mod.rs` have checked.

use crate::cpu::int_dot::{CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{IntRows, ScaledRows};
use crate::cpu::simd::Simd;
use crate::cpu::span_scores::SPAN;
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Bytes of a row of a register, and most summed codes of one product.
const ROW: usize = 64;
/// Lanes of a product.
const LANES: usize = 16;
/// Sums of a product: at most 16 rows of parts.
const SUMS: usize = 16 * LANES;

/// Whether the processor has AMX for bytes, and the system lets this process use it.
pub(in crate::cpu) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && request_permission())
}

fn has_instructions() -> bool {
    /// AMX-TILE and AMX-INT8, and the state of both kinds in XCR0.
    const BITS: u32 = 1 << 24 | 1 << 25;
    const STATE: u64 = 1 << 17 | 1 << 18;
    if !is_x86_feature_detected!("xsave") || __cpuid(0).eax < 7 {
        return false;
    }
    // The system has enabled XGETBV: that is what "detected" says of xsave.
    // SAFETY: as above.
    __cpuid_count(7, 0).edx & BITS == BITS && unsafe { _xgetbv(0) } & STATE == STATE
}

/// Asks Linux for the registers: once for all threads.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let answer: i64;
    // SAFETY: the call takes two numbers and touches no memory of ours; it leaves all registers
    // but these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// The operands that tile registers are configured for.
#[derive(Clone, Copy, Default, PartialEq)]
struct RegisterShape {
    /// Rows of parts, two for each row of factors; 0 before the first product.
    rows: u8,
    /// Summed codes that fill no whole register.
    tail: u8,
}

thread_local! {
    static SHAPE: Cell<RegisterShape> = const { Cell::new(RegisterShape { rows: 0, tail: 0 }) };
}

/// Gives a thread's registers back when dropped.
pub(in crate::cpu) struct InUse(PhantomData<*const ()>);

impl InUse {
    pub(in crate::cpu) fn new() -> Self {
        Self(PhantomData)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if SHAPE.replace(RegisterShape::default()) != RegisterShape::default() {
            // SAFETY: this thread has shaped them, so that the instruction exists.
            unsafe { asm!("tilerelease", options(nostack)) };
        }
    }
}

#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl RegisterShape {
    /// Shapes the registers: 0 and 1 are sums, 2 is the left operand and 3 and 4 the right ones,
    /// 5, 6 and 7 those of the tail.
    ///
    /// # Safety
    /// AMX must be there and permitted.
    #[inline]
    unsafe fn configure(self) {
        let now = SHAPE.get();
        if now.rows == self.rows && (self.tail == 0 || self.tail == now.tail) {
            return;
        }
        let mut config = TileConfig {
            palette: 1,
            start: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let (sums, tail) = (self.rows, self.tail);
        let shapes = [(sums, 64), (sums, 64), (sums, 64), (16, 64), (16, 64)];
        let tails = [(sums, u16::from(tail)), (tail / 4, 64), (tail / 4, 64)];
        let tails = tails.map(|shape| if tail == 0 { (0, 0) } else { shape });
        for (index, (rows, row_bytes)) in shapes.into_iter().chain(tails).enumerate() {
            config.rows[index] = rows;
            config.row_bytes[index] = row_bytes;
        }
        // SAFETY: 64 bytes that describe a shape that the first palette allows.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        SHAPE.set(self);
    }
}

/// Where the operands of two products side by side lie.
#[derive(Clone, Copy)]
struct ProductOperands {
    /// Rows of factors, `left_stride` bytes apart.
    left: *const u8,
    left_stride: usize,
    /// Two blocks of 16 lanes; a row of four summed codes lies `stride` bytes after the one before.
    right: [*const u8; 2],
    stride: usize,
    /// Summed codes.
    len: usize,
}

/// Sums of products, by row of parts.
#[repr(align(64))]
struct ProductSums([[i32; SUMS]; 2]);

/// Multiplies into `sums`.
///
/// # Safety
/// AMX must be there, registers shaped for the rows and the tail of `len`, and all that the
/// operands name be readable.
#[inline]
unsafe fn multiply_tiles(operands: ProductOperands, sums: &mut ProductSums) {
    let ProductOperands { mut left, left_stride, right: [mut a, mut b], stride, len } = operands;
    /// Both products, of the registers of that shape.
    macro_rules! products {
        ($left:literal, $a:literal, $b:literal) => {
            asm!(
                concat!("tileloadd ", $left, ", [{left} + {left_stride}]"),
                concat!("tileloadd ", $a, ", [{a} + {stride}]"),
                concat!("tdpbsud tmm0, ", $left, ", ", $a),
                concat!("tileloadd ", $b, ", [{b} + {stride}]"),
                concat!("tdpbsud tmm1, ", $left, ", ", $b),
                left = in(reg) left,
                left_stride = in(reg) left_stride,
                a = in(reg) a,
                b = in(reg) b,
                stride = in(reg) stride,
                options(nostack, readonly),
            )
        };
    }
    // SAFETY: the caller's.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        for _ in 0..len / ROW {
            products!("tmm2", "tmm3", "tmm4");
            (left, a, b) = (left.add(ROW), a.add(16 * stride), b.add(16 * stride));
        }
        if !len.is_multiple_of(ROW) {
            products!("tmm5", "tmm6", "tmm7");
        }
        asm!(
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 1024], tmm1",
            sums = in(reg) sums.0.as_mut_ptr(),
            stride = in(reg) ROW,
            options(nostack),
        );
    }
}

/// The sum of products of a row of factors, of 16 lanes: of its high bytes and of its low ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_of(sums: &[i32; SUMS], row: usize, excess: i32) -> __m512 {
    let parts: &[[i32; LANES]; 2] = sums.as_chunks().0[2 * row..].first_chunk().expect("two rows");
    // SAFETY: 16 sums each.
    let [high, low] = parts.each_ref().map(|p| unsafe { _mm512_loadu_si512(p.as_ptr().cast()) });
    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low);
    _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(excess)))
}

fn shape_for(rows: usize, len: usize) -> RegisterShape {
    RegisterShape { rows: 2 * rows as u8, tail: (len % ROW) as u8 }
}

/// As `int_dot::key_dots`, of codes of a byte without tables.
pub(super) fn key_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    out: &mut [f32],
) {
    assert!(simd.has_amx() && lookup.tables.is_empty() && codes.width == 8, "key_dots: bytes");
    // SAFETY: a `Simd` with AMX exists only where the CPU has it, and AVX-512; the caller has
    // checked the lengths.
    unsafe { key_sums(codes, lookup, q, out) }
}

/// As `int_dot::value_dots`, of codes of a byte without tables, for the first positions that are a
/// multiple of 16; says how many.
pub(super) fn value_dots(
    simd: Simd,
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) -> usize {
    assert!(simd.has_amx() && lookup.tables.is_empty() && codes.width == 8, "value_dots: bytes");
    let count = target.count / LANES * LANES;
    // SAFETY: as above.
    unsafe { value_sums(codes, lookup, weights, SumTarget { count, ..target }, out) }
    count
}

/// # Safety
/// AMX must be there, and lengths checked as in `int_dot::key_dots`.
#[target_feature(enable = "avx512f")]
unsafe fn key_sums(codes: TileCodes<'_>, lookup: &CodeLookup, q: ScaledRows<'_>, out: &mut [f32]) {
    let ScaledRows { rows: q, units } = q;
    let codes = codes.bytes.as_ptr();
    let mut sums = ProductSums([[0; SUMS]; 2]);
    // SAFETY: a group of four codes has two halves of 16 tokens, of which there are `q.len / 4`; a
    // row of parts has `q.len` bytes.
    unsafe {
        shape_for(units.len(), q.len).configure();
        let right = [codes, codes.add(ROW)];
        let (left, left_stride) = (q.bytes.as_ptr(), q.len);
        multiply_tiles(
            ProductOperands { left, left_stride, right, stride: 2 * ROW, len: q.len },
            &mut sums,
        );
    }
    for (row, (unit, total)) in units.iter().zip(q.sums).enumerate() {
        let excess = lookup.bias.wrapping_mul(*total);
        for (half, sums) in sums.0.iter().enumerate() {
            let out = &mut out[row * SPAN + LANES * half..][..LANES];
            let scores = _mm512_mul_ps(sum_of(sums, row, excess), _mm512_set1_ps(*unit));
            // SAFETY: 16 scores.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), scores) };
        }
    }
}

/// # Safety
/// AMX must be there, lengths checked as in `int_dot::value_dots`, and positions a multiple of 16.
#[target_feature(enable = "avx512f")]
unsafe fn value_sums(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let per_row = codes.per_row;
    let end = target.first + target.count;
    let mut sums = ProductSums([[0; SUMS]; 2]);
    for first in (target.first..end).step_by(2 * LANES) {
        // The last block has no other beside it.
        let blocks = [first, if first + LANES < end { first + LANES } else { first }];
        // SAFETY: a group of four tokens has `per_row` positions of four bytes, all of them codes,
        // and there are `weights.len / 4` groups; a row of parts has `weights.len` bytes.
        unsafe {
            shape_for(target.units.len(), weights.len).configure();
            let right = blocks.map(|block| codes.bytes.as_ptr().add(4 * block));
            let (left, left_stride) = (weights.bytes.as_ptr(), weights.len);
            let (stride, len) = (4 * per_row, weights.len);
            multiply_tiles(ProductOperands { left, left_stride, right, stride, len }, &mut sums);
        }
        let count = if blocks[0] == blocks[1] { 1 } else { 2 };
        for (row, (unit, total)) in target.units.iter().zip(weights.sums).enumerate() {
            let excess = lookup.bias.wrapping_mul(*total);
            for (block, sums) in blocks.into_iter().zip(&sums.0).take(count) {
                let mut factor = _mm512_set1_ps(*unit);
                if !target.factors.is_empty() {
                    let factors = &target.factors[block..][..LANES];
                    // SAFETY: as many factors as lanes.
                    factor = _mm512_mul_ps(unsafe { _mm512_loadu_ps(factors.as_ptr()) }, factor);
                }
                let out = &mut out[row * per_row + block..][..LANES];
                let sum = _mm512_mul_ps(sum_of(sums, row, excess), factor);
                // SAFETY: 16 sums.
                unsafe {
                    let after = _mm512_add_ps(_mm512_loadu_ps(out.as_ptr()), sum);
                    _mm512_storeu_ps(out.as_mut_ptr(), after);
                }
            }
        }
    }
}
