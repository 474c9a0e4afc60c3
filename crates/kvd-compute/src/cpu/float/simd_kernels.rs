//! `mod.rs` in AVX2, AVX-512 and NEON: rows are widened in registers, and each register of them
//! is multiplied with four rows of queries or weights.
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::float::{FloatRows, ROWS};
use crate::cpu::row_block::StridedRows;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;
use crate::cpu::simd_vector::SimdVector;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd_vector::neon::NeonVector;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd_vector::x86::{Avx2Vector, Avx512Vector};
use kvd_core::DType;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// Calls `$f::<rows, dtype>` of the wrapper module `$set`.
macro_rules! by_shape {
    ($set:ident, $f:ident, $rows:expr, $dtype:expr, $args:tt) => {
        match ($rows, $dtype) {
            (1, DType::F32) => $set::$f::<1, F32> $args,
            (2, DType::F32) => $set::$f::<2, F32> $args,
            (3, DType::F32) => $set::$f::<3, F32> $args,
            (_, DType::F32) => $set::$f::<4, F32> $args,
            (1, DType::F16) => $set::$f::<1, F16> $args,
            (2, DType::F16) => $set::$f::<2, F16> $args,
            (3, DType::F16) => $set::$f::<3, F16> $args,
            (_, DType::F16) => $set::$f::<4, F16> $args,
            (1, DType::BF16) => $set::$f::<1, BF16> $args,
            (2, DType::BF16) => $set::$f::<2, BF16> $args,
            (3, DType::BF16) => $set::$f::<3, BF16> $args,
            (_, DType::BF16) => $set::$f::<4, BF16> $args,
        }
    };
}

/// Scores of up to [`ROWS`] query rows of `dim` channels; rows of scores are `stride` apart.
pub(super) fn score_rows(
    simd: Simd,
    dim: usize,
    q: &[f32],
    rows: FloatRows<'_>,
    scores: StridedRows<'_>,
) {
    let (count, (dtype, bytes)) = (q.len() / dim, rows.as_bytes());
    let (q, tokens) = (q.as_ptr(), rows.row_count(dim));
    let (to, stride) = (scores.values.as_mut_ptr(), scores.stride);
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_shape!(avx512, score_rows, count, dtype, (dim, q, bytes, tokens, to, stride))
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_shape!(avx2, score_rows, count, dtype, (dim, q, bytes, tokens, to, stride)),
            #[cfg(target_arch = "aarch64")]
            _ => by_shape!(neon, score_rows, count, dtype, (dim, q, bytes, tokens, to, stride)),
        }
    }
}

/// Adds weighted rows to up to [`ROWS`] rows of sums.
pub(super) fn add_weighted_rows(
    simd: Simd,
    weights: &[&[f32]],
    rows: FloatRows<'_>,
    sums: &mut [&mut [f32]],
) {
    let (dim, tokens, (dtype, bytes)) = (sums[0].len(), weights[0].len(), rows.as_bytes());
    let mut from = [std::ptr::null(); ROWS];
    let mut to = [std::ptr::null_mut(); ROWS];
    for (row, (weights, sums)) in weights.iter().zip(sums.iter_mut()).enumerate() {
        (from[row], to[row]) = (weights.as_ptr(), sums.as_mut_ptr());
    }
    // SAFETY: as above.
    unsafe {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_shape!(
                    avx512,
                    add_weighted_rows,
                    weights.len(),
                    dtype,
                    (dim, tokens, from, bytes, to)
                );
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_shape!(
                avx2,
                add_weighted_rows,
                weights.len(),
                dtype,
                (dim, tokens, from, bytes, to)
            ),
            #[cfg(target_arch = "aarch64")]
            _ => by_shape!(
                neon,
                add_weighted_rows,
                weights.len(),
                dtype,
                (dim, tokens, from, bytes, to)
            ),
        }
    }
}

/// The kernels with one set's registers: tokens at once in `score_rows`, registers of channels at
/// once in `add_weighted_rows`, such that the sums fit.
macro_rules! wrappers {
    ($name:ident, $vector:ident, $features:literal, $tokens:literal, $blocks:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn score_rows<const R: usize, const D: u8>(
                dim: usize,
                q: *const f32,
                rows: *const u8,
                tokens: usize,
                scores: *mut f32,
                stride: usize,
            ) {
                super::score_rows_body::<$vector, R, D, $tokens>(
                    dim, q, rows, tokens, scores, stride,
                );
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn add_weighted_rows<const R: usize, const D: u8>(
                dim: usize,
                tokens: usize,
                weights: [*const f32; ROWS],
                rows: *const u8,
                sums: [*mut f32; ROWS],
            ) {
                let mut first = 0;
                while dim - first >= $blocks * $vector::COUNT {
                    let count = $vector::COUNT;
                    super::add_weighted_rows_body::<$vector, R, D, $blocks>(
                        dim, tokens, first, count, weights, rows, sums,
                    );
                    first += $blocks * $vector::COUNT;
                }
                while first < dim {
                    let count = $vector::COUNT.min(dim - first);
                    super::add_weighted_rows_body::<$vector, R, D, 1>(
                        dim, tokens, first, count, weights, rows, sums,
                    );
                    first += $vector::COUNT;
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
wrappers!(avx512, Avx512Vector, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", 4, 4);
#[cfg(target_arch = "x86_64")]
wrappers!(avx2, Avx2Vector, "avx2,fma,f16c", 2, 2);
#[cfg(target_arch = "aarch64")]
wrappers!(neon, NeonVector, "neon", 4, 4);

/// Bytes of a value.
const fn value_bytes(dtype: u8) -> usize {
    if dtype == F32 { 4 } else { 2 }
}

/// `count` values from the one number `at`.
#[inline(always)]
unsafe fn load_widened<V: SimdVector, const D: u8>(
    rows: *const u8,
    at: usize,
    count: usize,
) -> V::F {
    let from = rows.add(at * value_bytes(D));
    match D {
        F32 => V::load(from.cast(), count),
        F16 => V::load_f16(from, count),
        _ => V::load_bf16(from, count),
    }
}

/// `T` tokens times `R` rows of queries at once.
#[inline(always)]
unsafe fn score_rows_body<V: SimdVector, const R: usize, const D: u8, const T: usize>(
    dim: usize,
    q: *const f32,
    rows: *const u8,
    tokens: usize,
    scores: *mut f32,
    stride: usize,
) {
    let whole = dim / V::COUNT * V::COUNT;
    let mut first = 0;
    while first < tokens {
        // Past the last token its scores are computed again and not stored.
        let mut at = [0; T];
        for t in 0..T {
            at[t] = (first + t).min(tokens - 1) * dim;
        }
        let mut sums = [[V::zero(); T]; R];
        let mut channel = 0;
        while channel < dim {
            let count = if channel < whole { V::COUNT } else { dim - whole };
            let mut keys = [V::zero(); T];
            for t in 0..T {
                keys[t] = load_widened::<V, D>(rows, at[t] + channel, count);
            }
            for row in 0..R {
                let query = V::load(q.add(row * dim + channel), count);
                for t in 0..T {
                    sums[row][t] = V::fma(query, keys[t], sums[row][t]);
                }
            }
            channel += V::COUNT;
        }
        // Four sums of lanes at once: of four tokens, or of two for two rows.
        let rows_at_once = 4 / T;
        let mut row = 0;
        while row < R {
            let other = (row + rows_at_once - 1).min(R - 1);
            let four =
                V::lane_sums([sums[row][0], sums[row][1], sums[other][T - 2], sums[other][T - 1]]);
            for (index, sum) in four.into_iter().enumerate() {
                let (row, token) = (row + index / T, first + index % T);
                if row < R && token < tokens {
                    *scores.add(row * stride + token) = sum;
                }
            }
            row += rows_at_once;
        }
        first += T;
    }
}

/// `B` registers of channels from `first` on, the last one with `count` lanes.
#[inline(always)]
unsafe fn add_weighted_rows_body<V: SimdVector, const R: usize, const D: u8, const B: usize>(
    dim: usize,
    tokens: usize,
    first: usize,
    count: usize,
    weights: [*const f32; ROWS],
    rows: *const u8,
    out: [*mut f32; ROWS],
) {
    let mut sums = [[V::zero(); B]; R];
    for row in 0..R {
        for b in 0..B {
            sums[row][b] = V::load(out[row].add(first + b * V::COUNT), count);
        }
    }
    let mut token = 0;
    while token < tokens {
        let mut values = [V::zero(); B];
        for b in 0..B {
            values[b] = load_widened::<V, D>(rows, token * dim + first + b * V::COUNT, count);
        }
        for row in 0..R {
            let weight = V::splat(*weights[row].add(token));
            for b in 0..B {
                sums[row][b] = V::fma(weight, values[b], sums[row][b]);
            }
        }
        token += 1;
    }
    for row in 0..R {
        for b in 0..B {
            V::store(out[row].add(first + b * V::COUNT), count, sums[row][b]);
        }
    }
}
