//! `mod.rs` in AVX-512: four rows side by side, whose chains hide one another, and no lanes
//! that pass through memory. The same operations in the same order, so the same bits.
//!
//! Everything here is reached through two functions, which ask for a [`Simd`] and test what rows
//! hold; pointers stay inside.
#![allow(unsafe_code)] // Masked loads and stores of checked rows.

use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::simd_vector::SimdVector;
use crate::cpu::simd_vector::x86::{Avx512Vector, mask_512};
use crate::cpu::softmax::{
    LANES, LEAST, LN2_HIGH, LN2_LOW, MAGIC, ROWS, SCORE_MAX, SERIES, SeenScores, WeightSums,
};
use crate::cpu::span_scores::SPAN;
use std::arch::x86_64::*;

/// Calls `$f::<rows>`.
macro_rules! by_rows {
    ($f:ident, $rows:expr, $args:tt) => {
        match $rows {
            1 => $f::<1> $args,
            2 => $f::<2> $args,
            3 => $f::<3> $args,
            ROWS => $f::<ROWS> $args,
            rows => unreachable!("{rows} rows at once"),
        }
    };
}

/// Where the first tokens of the rows are, and how many rows and tokens.
fn check_seen(seen: SeenScores<'_>) -> (*mut f32, usize, usize) {
    let SeenScores { rows, tokens } = seen;
    let count = rows.len() / SPAN;
    assert!(tokens.start <= tokens.end && tokens.end <= SPAN, "softmax: tokens");
    assert!((1..=ROWS).contains(&count), "softmax: rows");
    (rows[tokens.start..].as_mut_ptr(), count, tokens.len())
}

/// As `softmax::finish_scores` without a cap.
pub(super) fn finish_scores(simd: Simd, seen: SeenScores<'_>, offsets: &[f32], maxima: &mut [f32]) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "softmax: instruction set");
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { finish_512(seen, offsets, maxima) }
}

/// As `softmax::weigh_scores`.
pub(super) fn weigh_scores(
    simd: Simd,
    seen: SeenScores<'_>,
    maxima: &[f32; ROWS],
    sums: &mut WeightSums,
) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "softmax: instruction set");
    // SAFETY: as above.
    unsafe { weigh_512(seen, maxima, sums) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
fn finish_512(seen: SeenScores<'_>, offsets: &[f32], maxima: &mut [f32]) {
    let (scores, count, tokens) = check_seen(seen);
    assert!(offsets.len() == count && maxima.len() >= count, "softmax: offsets");
    // SAFETY: rows of `SPAN` hold the tokens.
    let largest = unsafe { by_rows!(finish_rows, count, (scores, tokens, offsets)) };
    maxima[..count].copy_from_slice(&largest[..count]);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
fn weigh_512(seen: SeenScores<'_>, maxima: &[f32; ROWS], sums: &mut WeightSums) {
    let (scores, count, tokens) = check_seen(seen);
    // SAFETY: rows of `SPAN` hold the tokens.
    sums.weights = unsafe { by_rows!(weigh_rows, count, (scores, tokens, maxima)) };
    // SAFETY: four values of four.
    let largest = exp(_mm512_castps128_ps512(unsafe { _mm_loadu_ps(sums.largest.as_ptr()) }));
    // SAFETY: as above.
    unsafe { _mm_storeu_ps(sums.largest.as_mut_ptr(), _mm512_castps512_ps128(largest)) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn finish_rows<const R: usize>(
    scores: *mut f32,
    tokens: usize,
    offsets: &[f32],
) -> [f32; ROWS] {
    let (least, most) = (_mm512_set1_ps(-SCORE_MAX), _mm512_set1_ps(SCORE_MAX));
    let mut largest = [least; ROWS];
    for at in (0..tokens).step_by(LANES) {
        let some = mask_512(LANES.min(tokens - at));
        for row in 0..R {
            let scores = scores.wrapping_add(row * SPAN + at);
            // SAFETY: the lanes are tokens of the row.
            let score = unsafe { load_lanes(scores, some) };
            let score = _mm512_add_ps(score, _mm512_set1_ps(offsets[row]));
            // Not less: NaN as well.
            let beyond = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(_mm512_abs_ps(score), most);
            let score = _mm512_mask_mov_ps(score, beyond, most);
            // SAFETY: as above.
            unsafe { store_lanes(scores, some, score) };
            largest[row] = _mm512_mask_max_ps(largest[row], some, score, largest[row]);
        }
    }
    // SAFETY: registers alone.
    unsafe { Avx512Vector::lane_maxima(largest) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn weigh_rows<const R: usize>(
    scores: *mut f32,
    tokens: usize,
    maxima: &[f32; ROWS],
) -> [f32; ROWS] {
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for at in (0..tokens).step_by(LANES) {
        let some = mask_512(LANES.min(tokens - at));
        for row in 0..R {
            let scores = scores.wrapping_add(row * SPAN + at);
            // SAFETY: the lanes are tokens of the row.
            let score = unsafe { load_lanes(scores, some) };
            let weight = exp(_mm512_sub_ps(score, _mm512_set1_ps(maxima[row])));
            // SAFETY: as above.
            unsafe { store_lanes(scores, some, weight) };
            sums[row] = _mm512_mask_add_ps(sums[row], some, sums[row], weight);
        }
    }
    // SAFETY: registers alone.
    unsafe { Avx512Vector::lane_sums(sums) }
}

/// Some lanes, zeros for the others. Not by a mask where all are wanted: a load waits for a masked
/// store to reach the cache, but takes what another store has from its queue.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_lanes(from: *const f32, some: u16) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        if some == u16::MAX { _mm512_loadu_ps(from) } else { _mm512_maskz_loadu_ps(some, from) }
    }
}

/// Stores some lanes, as [`load_lanes`] loads them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_lanes(to: *mut f32, some: u16, lanes: __m512) {
    // SAFETY: the caller's.
    unsafe {
        if some == u16::MAX {
            _mm512_storeu_ps(to, lanes);
        } else {
            _mm512_mask_storeu_ps(to, some, lanes);
        }
    }
}

/// As `softmax::exp`, lane by lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    let all = |value: f32| _mm512_set1_ps(value);
    let x = _mm512_max_ps(x, all(LEAST));
    let shifted = _mm512_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(MAGIC));
    let n = _mm512_sub_ps(shifted, all(MAGIC));
    let r = _mm512_fnmadd_ps(n, all(LN2_HIGH), x);
    let r = _mm512_fnmadd_ps(n, all(LN2_LOW), r);
    let series = _mm512_fmadd_ps(r, all(SERIES[5]), all(SERIES[4]));
    let series = _mm512_fmadd_ps(r, series, all(SERIES[3]));
    let series = _mm512_fmadd_ps(r, series, all(SERIES[2]));
    let series = _mm512_fmadd_ps(r, series, all(SERIES[1]));
    let series = _mm512_fmadd_ps(r, series, all(SERIES[0]));
    let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(series), exponent))
}
