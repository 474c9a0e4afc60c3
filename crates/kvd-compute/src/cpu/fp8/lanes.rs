//! `mod.rs` in AVX2, AVX-512 and NEON. Lanes are tokens (keys) or positions (values); the four
//! bytes of a lane are what a sum adds.
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::ahead::{Ahead, Steps};
use crate::cpu::lanes::Lanes;
#[cfg(target_arch = "aarch64")]
use crate::cpu::lanes::neon::N128;
#[cfg(target_arch = "x86_64")]
use crate::cpu::lanes::x86::{A256, A512};
use crate::cpu::scores::{SPAN, TILE};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;

/// Where codes begin, and what to ask for meanwhile.
type Codes<'a> = (*const u8, Ahead<'a>);

/// Calls `$f::<rows>` of the wrapper module `$set`.
macro_rules! by_rows {
    ($set:ident, $f:ident, $rows:expr, $args:tt) => {
        match $rows {
            1 => $set::$f::<1> $args,
            2 => $set::$f::<2> $args,
            3 => $set::$f::<3> $args,
            _ => $set::$f::<4> $args,
        }
    };
}

/// Scores of up to four rows of queries against one tile; rows of scores are [`SPAN`] apart.
pub(super) fn keys(
    simd: Simd,
    (codes, ahead): (&[u8], Ahead<'_>),
    (dim, queries): (usize, &[f32]),
    factors: (f32, f32),
    out: &mut [f32],
) {
    let (rows, codes) = (queries.len() / dim, (codes.as_ptr(), ahead));
    let from = (codes, queries.as_ptr(), dim);
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_rows!(avx512, keys, rows, (from, factors, out.as_mut_ptr()));
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_rows!(avx2, keys, rows, (from, factors, out.as_mut_ptr())),
            #[cfg(target_arch = "aarch64")]
            _ => by_rows!(neon, keys, rows, (from, factors, out.as_mut_ptr())),
        }
    }
}

/// Adds the weighted tiles to up to four rows of sums.
pub(super) fn values(
    simd: Simd,
    (codes, ahead): (&[u8], Ahead<'_>),
    weights: &[f32],
    factors: (f32, f32),
    (dim, sums): (usize, &mut [f32]),
) {
    let (rows, tokens) = (sums.len() / dim, codes.len() / dim);
    let from = ((codes.as_ptr(), ahead), weights.as_ptr(), (dim, tokens));
    // SAFETY: as above.
    unsafe {
        match simd.set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_rows!(avx512, values, rows, (from, factors, sums.as_mut_ptr()));
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_rows!(avx2, values, rows, (from, factors, sums.as_mut_ptr())),
            #[cfg(target_arch = "aarch64")]
            _ => by_rows!(neon, values, rows, (from, factors, sums.as_mut_ptr())),
        }
    }
}

/// The kernels with one set's registers: so many of them are summed at once that four rows of sums
/// fit.
macro_rules! wrappers {
    ($name:ident, $lanes:ident, $features:literal, $blocks:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn keys<const R: usize>(
                from: (Codes<'_>, *const f32, usize),
                factors: (f32, f32),
                out: *mut f32,
            ) {
                super::keys_body::<$lanes, R, $blocks>(from, factors, out);
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn values<const R: usize>(
                ((codes, ahead), weights, size): (Codes<'_>, *const f32, (usize, usize)),
                factors: (f32, f32),
                sums: *mut f32,
            ) {
                let (dim, tokens) = size;
                let from = (codes, weights, size);
                let blocks = dim.div_ceil($blocks * $lanes::COUNT);
                let soon = &mut ahead.steps(blocks * tokens / 4);
                let mut first = 0;
                while dim - first >= $blocks * $lanes::COUNT {
                    let at = (first, $lanes::COUNT);
                    super::values_body::<$lanes, R, $blocks>(from, factors, (at, soon), sums);
                    first += $blocks * $lanes::COUNT;
                }
                while first < dim {
                    let at = (first, $lanes::COUNT.min(dim - first));
                    super::values_body::<$lanes, R, 1>(from, factors, (at, soon), sums);
                    first += $lanes::COUNT;
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
wrappers!(avx512, A512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", 2);
#[cfg(target_arch = "x86_64")]
wrappers!(avx2, A256, "avx2,fma,f16c", 2);
#[cfg(target_arch = "aarch64")]
wrappers!(neon, N128, "neon", 4);

/// Adds byte `BYTE` of each lane, weighted with value `at + BYTE` of each row of factors.
#[inline(always)]
unsafe fn add<V: Lanes, const R: usize, const B: usize, const BYTE: u32>(
    lanes: [V::I; B],
    (factors, stride, at): (*const f32, usize, usize),
    sums: &mut [[V::F; B]; R],
) {
    let mut values = [V::zero(); B];
    for b in 0..B {
        values[b] = V::e4m3::<BYTE>(lanes[b]);
    }
    for row in 0..R {
        let factor = V::splat(*factors.add(row * stride + at + BYTE as usize));
        for b in 0..B {
            sums[row][b] = V::fma(factor, values[b], sums[row][b]);
        }
    }
}

#[inline(always)]
unsafe fn keys_body<V: Lanes, const R: usize, const B: usize>(
    ((codes, ahead), queries, dim): (Codes<'_>, *const f32, usize),
    (gain, scale): (f32, f32),
    out: *mut f32,
) {
    let mut soon = ahead.steps(TILE / (B * V::COUNT) * dim / 4);
    let mut token = 0;
    while token < TILE {
        let mut sums = [[V::zero(); B]; R];
        let mut channel = 0;
        while channel < dim {
            soon.ask();
            let from = codes.add(channel * TILE + 4 * token);
            let mut lanes = [V::load_bytes(from, V::COUNT); B];
            for b in 1..B {
                lanes[b] = V::load_bytes(from.add(4 * b * V::COUNT), V::COUNT);
            }
            let factors = (queries, dim, channel);
            add::<V, R, B, 0>(lanes, factors, &mut sums);
            add::<V, R, B, 1>(lanes, factors, &mut sums);
            add::<V, R, B, 2>(lanes, factors, &mut sums);
            add::<V, R, B, 3>(lanes, factors, &mut sums);
            channel += 4;
        }
        let (gain, scale) = (V::splat(gain), V::splat(scale));
        for row in 0..R {
            for b in 0..B {
                let scores = V::mul(V::mul(sums[row][b], gain), scale);
                V::store(out.add(row * SPAN + token + b * V::COUNT), V::COUNT, scores);
            }
        }
        token += B * V::COUNT;
    }
}

/// `B` registers of positions from `first` on, the last one with `count` lanes.
#[inline(always)]
unsafe fn values_body<V: Lanes, const R: usize, const B: usize>(
    (codes, weights, (dim, tokens)): (*const u8, *const f32, (usize, usize)),
    (gain, scale): (f32, f32),
    ((first, count), soon): ((usize, usize), &mut Steps<'_>),
    out: *mut f32,
) {
    let mut sums = [[V::zero(); B]; R];
    let mut token = 0;
    while token < tokens {
        soon.ask();
        let from = codes.add(token * dim + 4 * first);
        let mut lanes = [V::load_bytes(from, count); B];
        for b in 1..B {
            lanes[b] = V::load_bytes(from.add(4 * b * V::COUNT), count);
        }
        let factors = (weights, tokens, token);
        add::<V, R, B, 0>(lanes, factors, &mut sums);
        add::<V, R, B, 1>(lanes, factors, &mut sums);
        add::<V, R, B, 2>(lanes, factors, &mut sums);
        add::<V, R, B, 3>(lanes, factors, &mut sums);
        token += 4;
    }
    let (gain, scale) = (V::splat(gain), V::splat(scale));
    for row in 0..R {
        for b in 0..B {
            let to = out.add(row * dim + first + b * V::COUNT);
            let sum = V::mul(sums[row][b], gain);
            V::store(to, count, V::fma(sum, scale, V::load(to, count)));
        }
    }
}
