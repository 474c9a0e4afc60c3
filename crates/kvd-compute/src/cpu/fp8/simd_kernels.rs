//! `mod.rs` in AVX2, AVX-512 and NEON. Lanes are tokens (keys) or positions (values); the four
//! bytes of a lane are what a sum adds.
//!
//! Everything here is reached through the two functions at the top, which know that the machine
//! has the instructions (a [`Simd`] exists only then) and whose callers in `mod.rs` have checked
//! all lengths; pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::prefetch::{PrefetchBytes, PrefetchSteps};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;
use crate::cpu::simd_vector::SimdVector;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd_vector::neon::NeonVector;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd_vector::x86::{Avx2Vector, Avx512Vector};
use crate::cpu::span_scores::{SPAN, TILE};

/// Codes of a few tiles, and bytes to prefetch meanwhile.
#[derive(Clone, Copy)]
pub(super) struct ByteCodes<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) prefetch: PrefetchBytes<'a>,
}

/// Factors of a sum of products, one after the other.
#[derive(Clone, Copy)]
pub(super) struct ProductScale {
    /// Half of what the bits lack.
    pub(super) gain: f32,
    /// The page's scale.
    pub(super) scale: f32,
}

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
pub(super) fn score_tile(
    simd: Simd,
    codes: ByteCodes<'_>,
    dim: usize,
    queries: &[f32],
    scale: ProductScale,
    out: &mut [f32],
) {
    let (rows, queries) = (queries.len() / dim, queries.as_ptr());
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_rows!(avx512, score_tile, rows, (codes, queries, dim, scale, out.as_mut_ptr()));
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_rows!(avx2, score_tile, rows, (codes, queries, dim, scale, out.as_mut_ptr())),
            #[cfg(target_arch = "aarch64")]
            _ => by_rows!(neon, score_tile, rows, (codes, queries, dim, scale, out.as_mut_ptr())),
        }
    }
}

/// Adds the weighted tiles to up to four rows of sums.
pub(super) fn add_tiles(
    simd: Simd,
    codes: ByteCodes<'_>,
    weights: &[f32],
    scale: ProductScale,
    dim: usize,
    sums: &mut [f32],
) {
    let rows = sums.len() / dim;
    let from = WeightedCodes {
        codes: codes.bytes.as_ptr(),
        weights: weights.as_ptr(),
        dim,
        tokens: codes.bytes.len() / dim,
    };
    // SAFETY: as above.
    unsafe {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                by_rows!(avx512, add_tiles, rows, (from, codes.prefetch, scale, sums.as_mut_ptr()));
            }
            #[cfg(target_arch = "x86_64")]
            _ => by_rows!(avx2, add_tiles, rows, (from, codes.prefetch, scale, sums.as_mut_ptr())),
            #[cfg(target_arch = "aarch64")]
            _ => by_rows!(neon, add_tiles, rows, (from, codes.prefetch, scale, sums.as_mut_ptr())),
        }
    }
}

/// Codes of tokens, and rows of weights for them.
#[derive(Clone, Copy)]
struct WeightedCodes {
    codes: *const u8,
    weights: *const f32,
    dim: usize,
    tokens: usize,
}

/// The kernels with one set's registers: so many of them are summed at once that four rows of sums
/// fit.
macro_rules! wrappers {
    ($name:ident, $vector:ident, $features:literal, $blocks:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn score_tile<const R: usize>(
                codes: ByteCodes<'_>,
                queries: *const f32,
                dim: usize,
                scale: ProductScale,
                out: *mut f32,
            ) {
                super::score_tile_body::<$vector, R, $blocks>(codes, queries, dim, scale, out);
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn add_tiles<const R: usize>(
                from: WeightedCodes,
                prefetch: PrefetchBytes<'_>,
                scale: ProductScale,
                sums: *mut f32,
            ) {
                let WeightedCodes { dim, tokens, .. } = from;
                let blocks = dim.div_ceil($blocks * $vector::COUNT);
                let prefetch = &mut prefetch.in_steps(blocks * tokens / 4);
                let mut first = 0;
                while dim - first >= $blocks * $vector::COUNT {
                    let count = $vector::COUNT;
                    super::add_tiles_body::<$vector, R, $blocks>(
                        from, scale, first, count, prefetch, sums,
                    );
                    first += $blocks * $vector::COUNT;
                }
                while first < dim {
                    let count = $vector::COUNT.min(dim - first);
                    super::add_tiles_body::<$vector, R, 1>(
                        from, scale, first, count, prefetch, sums,
                    );
                    first += $vector::COUNT;
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
wrappers!(avx512, Avx512Vector, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", 2);
#[cfg(target_arch = "x86_64")]
wrappers!(avx2, Avx2Vector, "avx2,fma,f16c", 2);
#[cfg(target_arch = "aarch64")]
wrappers!(neon, NeonVector, "neon", 4);

/// Adds byte `BYTE` of each lane, weighted with value `at + BYTE` of each row of factors.
#[inline(always)]
unsafe fn add_bytes<V: SimdVector, const R: usize, const B: usize, const BYTE: u32>(
    lanes: [V::I; B],
    factors: *const f32,
    stride: usize,
    at: usize,
    sums: &mut [[V::F; B]; R],
) {
    let mut values = [V::zero(); B];
    for b in 0..B {
        values[b] = V::widen_e4m3::<BYTE>(lanes[b]);
    }
    for row in 0..R {
        let factor = V::splat(*factors.add(row * stride + at + BYTE as usize));
        for b in 0..B {
            sums[row][b] = V::fma(factor, values[b], sums[row][b]);
        }
    }
}

#[inline(always)]
unsafe fn score_tile_body<V: SimdVector, const R: usize, const B: usize>(
    codes: ByteCodes<'_>,
    queries: *const f32,
    dim: usize,
    scale: ProductScale,
    out: *mut f32,
) {
    let (codes, prefetch) = (codes.bytes.as_ptr(), codes.prefetch);
    let mut prefetch = prefetch.in_steps(TILE / (B * V::COUNT) * dim / 4);
    let mut token = 0;
    while token < TILE {
        let mut sums = [[V::zero(); B]; R];
        let mut channel = 0;
        while channel < dim {
            prefetch.next_step();
            let from = codes.add(channel * TILE + 4 * token);
            let mut lanes = [V::load_bytes(from, V::COUNT); B];
            for b in 1..B {
                lanes[b] = V::load_bytes(from.add(4 * b * V::COUNT), V::COUNT);
            }
            add_bytes::<V, R, B, 0>(lanes, queries, dim, channel, &mut sums);
            add_bytes::<V, R, B, 1>(lanes, queries, dim, channel, &mut sums);
            add_bytes::<V, R, B, 2>(lanes, queries, dim, channel, &mut sums);
            add_bytes::<V, R, B, 3>(lanes, queries, dim, channel, &mut sums);
            channel += 4;
        }
        let (gain, scale) = (V::splat(scale.gain), V::splat(scale.scale));
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
unsafe fn add_tiles_body<V: SimdVector, const R: usize, const B: usize>(
    from: WeightedCodes,
    scale: ProductScale,
    first: usize,
    count: usize,
    prefetch: &mut PrefetchSteps<'_>,
    out: *mut f32,
) {
    let WeightedCodes { codes, weights, dim, tokens } = from;
    let mut sums = [[V::zero(); B]; R];
    let mut token = 0;
    while token < tokens {
        prefetch.next_step();
        let start = codes.add(token * dim + 4 * first);
        let mut lanes = [V::load_bytes(start, count); B];
        for b in 1..B {
            lanes[b] = V::load_bytes(start.add(4 * b * V::COUNT), count);
        }
        add_bytes::<V, R, B, 0>(lanes, weights, tokens, token, &mut sums);
        add_bytes::<V, R, B, 1>(lanes, weights, tokens, token, &mut sums);
        add_bytes::<V, R, B, 2>(lanes, weights, tokens, token, &mut sums);
        add_bytes::<V, R, B, 3>(lanes, weights, tokens, token, &mut sums);
        token += 4;
    }
    let (gain, scale) = (V::splat(scale.gain), V::splat(scale.scale));
    for row in 0..R {
        for b in 0..B {
            let to = out.add(row * dim + first + b * V::COUNT);
            let sum = V::mul(sums[row][b], gain);
            V::store(to, count, V::fma(sum, scale, V::load(to, count)));
        }
    }
}
