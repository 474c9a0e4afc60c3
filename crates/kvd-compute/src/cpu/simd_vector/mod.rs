//! Registers of AVX2, AVX-512 and NEON under one name, so that a kernel of f32 products is written
//! once.
//!
//! Every method is one or two instructions and unsafe for one reason: the machine must have them. A
//! kernel is generic over [`SimdVector`] and inlined into a wrapper that enables the features; the
//! [`Simd`](crate::cpu::simd::Simd) in its caller's hand says that the machine has those.
#![allow(unsafe_code)] // Declares what the instruction sets have.

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon_tables;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

/// Sign, exponent and mantissa of an e4m3 that was shifted to the top and then, arithmetically,
/// four down.
pub(super) const E4M3_MASK: i32 = 0x87F0_0000_u32 as i32;

/// Four, eight or sixteen f32.
pub(super) trait SimdVector: Copy {
    type F: Copy;
    type I: Copy;
    const COUNT: usize;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(x: f32) -> Self::F;
    /// The first `count` lanes (at most [`SimdVector::COUNT`]); others are zero.
    unsafe fn load(from: *const f32, count: usize) -> Self::F;
    unsafe fn store(to: *mut f32, count: usize, x: Self::F);
    /// As `load`, from f16.
    unsafe fn load_f16(from: *const u8, count: usize) -> Self::F;
    /// As `load`, from bf16.
    unsafe fn load_bf16(from: *const u8, count: usize) -> Self::F;
    /// Four bytes per lane.
    unsafe fn load_bytes(from: *const u8, count: usize) -> Self::I;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// The larger of `most` and the magnitude of `x`.
    unsafe fn max_magnitude(most: Self::F, x: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The e4m3 value in byte `BYTE` of each lane, times `2^-120`.
    unsafe fn widen_e4m3<const BYTE: u32>(x: Self::I) -> Self::F;
    /// Sums of the lanes of four registers.
    unsafe fn lane_sums(x: [Self::F; 4]) -> [f32; 4];
    /// The largest lane of each of four registers.
    unsafe fn lane_maxima(x: [Self::F; 4]) -> [f32; 4];
}
