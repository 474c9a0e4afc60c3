//! `mod.rs` in AVX-512: products of codes with signs, which are never written as bytes.
//!
//! Kernels are reached through `add_signed_dots`, which asks for a [`Simd`] and checks all lengths;
//! pointers stay inside.
#![allow(unsafe_code)] // Register loads and stores, and a call after detection.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::hybrid::avx512::{BITS, LANES};
use crate::cpu::hybrid::{GroupFactors, HybridScales, QUAD, SignWords, SignedCodes};
use crate::cpu::int_dot::avx2::load_four;
use crate::cpu::int_dot::{BIAS, VECTOR_ROWS as ROWS};
use crate::cpu::prefetch::PrefetchSteps;
use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;

/// Registers of lanes that are worked on at once.
const COLUMNS: usize = 2;

/// Calls `add_group::<rows, digits, signed>`.
macro_rules! by_rows {
    ($rows:expr, ($($shape:tt)*), $args:tt) => {
        match $rows {
            1 => add_group::<1, $($shape)*> $args,
            2 => add_group::<2, $($shape)*> $args,
            3 => add_group::<3, $($shape)*> $args,
            _ => add_group::<ROWS, $($shape)*> $args,
        }
    };
}

/// Where a quad of codes lies.
#[derive(Clone, Copy)]
struct QuadPlace {
    plane: usize,
    /// Counted in the plane.
    at: usize,
}

/// A tile's codes: where planes and groups lie.
#[derive(Clone, Copy)]
struct CodeTile<'a> {
    bytes: &'a [u8],
    width: usize,
    lanes: usize,
    /// Quads of a plane, and of a group.
    plane: usize,
    quads: usize,
}

impl CodeTile<'_> {
    /// Plane and quad so many quads further.
    #[inline]
    fn advance_quads(self, place: QuadPlace, quads: usize) -> QuadPlace {
        let QuadPlace { mut plane, mut at } = place;
        at += quads;
        while at >= self.plane {
            (plane, at) = (plane + 1, at - self.plane);
        }
        QuadPlace { plane, at }
    }
}

/// Quads of a plane of a tile of so many groups, where there is a kernel for it; no division, which
/// takes as long as a quad.
pub(super) fn plane_quads(codes: SignedCodes<'_>, groups: usize) -> Option<usize> {
    let SignedCodes { codes, signs } = codes;
    let bits = groups * signs.quads * codes.width as usize;
    let plane = bits / 8;
    let whole = plane * 8 == bits && plane * QUAD * signs.lanes == codes.bytes.len();
    let twos = signs.quads.is_multiple_of(2) && plane.is_multiple_of(2) && plane > 0;
    let fits = whole && twos && signs.quads <= 8 && signs.lanes.is_multiple_of(COLUMNS * LANES);
    fits.then_some(plane)
}

/// As `hybrid::add_signed_dots`.
pub(super) fn add_signed_dots<'a>(
    simd: Simd,
    codes: SignedCodes<'_>,
    groups: &HybridScales,
    factors: impl ExactSizeIterator<Item = GroupFactors<'a>>,
    out: StridedRows<'_>,
) {
    let StridedRows { values: out, stride } = out;
    let Some(plane) = plane_quads(codes, factors.len()) else { unreachable!("hybrid: no kernel") };
    let SignedCodes { codes, signs } = codes;
    let (SignWords { words, lanes, quads }, count) = (signs, factors.len());
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "hybrid: instruction set");
    let tile = CodeTile { bytes: codes.bytes, width: codes.width as usize, lanes, plane, quads };
    let of = [&groups.steps, &groups.zeros, &groups.centres];
    let len = count * lanes;
    assert!(words.len() == len && of.iter().all(|of| of.len() == len), "hybrid: scales");
    let mut prefetch = codes.prefetch.in_steps(count * lanes / (COLUMNS * LANES) * quads / 2);
    let mut next = QuadPlace { plane: 0, at: 0 };
    for (group, factors) in factors.enumerate() {
        let (rows, digits) = (factors.rows.row_count(), factors.rows.digits);
        assert!(group < count && (1..=ROWS).contains(&rows), "hybrid: rows");
        assert_eq!(factors.rows.len, QUAD * quads, "hybrid: factors");
        assert!(factors.units.len() == rows && factors.adds.len() == rows, "hybrid: units");
        assert!(out.len() >= (rows - 1) * stride + lanes, "hybrid: output");
        let at = group * lanes;
        let begin = next;
        next = tile.advance_quads(begin, quads);
        let scales = LaneScales { of: of.map(|of| of[at..].as_ptr()), words: words[at..].as_ptr() };
        let to = out.as_mut_ptr();
        // SAFETY: lengths are as asserted; a `Simd` of this set exists only where the CPU has it.
        unsafe {
            match (factors.positive && digits == 1, digits) {
                (true, _) => {
                    by_rows!(
                        rows,
                        (1, true),
                        (tile, begin, factors, scales, to, stride, &mut prefetch)
                    )
                }
                (_, 1) => by_rows!(
                    rows,
                    (1, false),
                    (tile, begin, factors, scales, to, stride, &mut prefetch)
                ),
                _ => by_rows!(
                    rows,
                    (2, false),
                    (tile, begin, factors, scales, to, stride, &mut prefetch)
                ),
            }
        }
    }
}

/// Scales of a group's lanes: steps, zero points and centres; and a word of signs each.
#[derive(Clone, Copy)]
struct LaneScales {
    of: [*const f32; 3],
    words: *const u32,
}

/// One group, for all lanes. `SIGNED`: factors have no sign, so that codes keep theirs; else codes
/// are bytes plus [`BIAS`], which is taken off again.
///
/// # Safety
/// As `add_signed_dots` asserts, and there is AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_group<const R: usize, const D: usize, const SIGNED: bool>(
    tile: CodeTile<'_>,
    begin: QuadPlace,
    factors: GroupFactors<'_>,
    scales: LaneScales,
    out: *mut f32,
    stride: usize,
    prefetch: &mut PrefetchSteps<'_>,
) {
    let rows = factors.rows;
    let mask = _mm512_set1_epi8((u8::MAX >> (8 - tile.width)) as i8);
    let bias = _mm512_set1_epi8(if SIGNED { 0 } else { BIAS as i8 });
    // The first byte of each word, for each of its four bytes.
    let firsts = _mm512_set4_epi32(0x0C0C_0C0C, 0x0808_0808, 0x0404_0404, 0);
    for lane in (0..tile.lanes).step_by(COLUMNS * LANES) {
        let words =
            [0, 1].map(|c: usize| _mm512_loadu_si512(scales.words.add(lane + c * LANES).cast()));
        let mut sums = [[[_mm512_setzero_si512(); COLUMNS]; R]; D];
        for row in 0..R {
            let much = if SIGNED { 0 } else { BIAS.wrapping_mul(rows.sums[row]) };
            sums[D - 1][row] = [_mm512_set1_epi32(much.wrapping_neg()); COLUMNS];
        }
        let mut place = begin;
        let mut select = firsts;
        for two in 0..tile.quads / 2 {
            prefetch.next_step();
            let from = tile.bytes.as_ptr().add(QUAD * (place.at * tile.lanes + lane));
            let shift = _mm512_set1_epi16((place.plane * tile.width) as i16);
            place = tile.advance_quads(place, 2);
            let signs = words.map(|words| _mm512_shuffle_epi8(words, select));
            select = _mm512_add_epi8(select, _mm512_set1_epi8(1));
            for odd in 0..2 {
                let from = from.add(odd * QUAD * tile.lanes);
                let mut values = signs;
                for c in 0..COLUMNS {
                    let codes = _mm512_loadu_si512(from.add(c * QUAD * LANES).cast());
                    let codes = _mm512_srlv_epi16(codes, shift);
                    let negative = _mm512_test_epi8_mask(signs[c], _mm512_set1_epi32(BITS[odd]));
                    // codes & mask | bias; and nothing less that is twice the bias less it.
                    let positive = _mm512_ternarylogic_epi32::<0xF8>(bias, codes, mask);
                    let zero = _mm512_setzero_si512();
                    values[c] = _mm512_mask_sub_epi8(positive, negative, zero, positive);
                }
                for row in 0..R {
                    let at = D * row * rows.len + QUAD * (2 * two + odd);
                    for digit in 0..D {
                        let factor = load_four(rows.bytes.as_ptr(), at + digit * rows.len);
                        let factor = _mm512_set1_epi32(factor);
                        for c in 0..COLUMNS {
                            let sum = &mut sums[digit][row][c];
                            *sum = if SIGNED {
                                _mm512_dpbusd_epi32(*sum, factor, values[c])
                            } else {
                                _mm512_dpbusd_epi32(*sum, values[c], factor)
                            };
                        }
                    }
                }
            }
        }
        for c in 0..COLUMNS {
            let sums: [_; R] = std::array::from_fn(|row| match D {
                1 => sums[0][row][c],
                _ => _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0][row][c]), sums[D - 1][row][c]),
            });
            add_scaled(sums, factors, scales, lane + c * LANES, out, stride);
        }
    }
}

/// Adds sums of 16 lanes times their steps, and what centres and zero points add.
///
/// # Safety
/// As `add_signed_dots` asserts, and there is AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_scaled<const R: usize>(
    sums: [__m512i; R],
    factors: GroupFactors<'_>,
    scales: LaneScales,
    lane: usize,
    out: *mut f32,
    stride: usize,
) {
    let [steps, zeros, centres] = scales.of.map(|of| _mm512_loadu_ps(of.add(lane)));
    for row in 0..R {
        let unit = _mm512_mul_ps(steps, _mm512_set1_ps(factors.units[row]));
        let [centre, zero] = factors.adds[row];
        let out = out.add(row * stride + lane);
        let before = _mm512_loadu_ps(out);
        let after = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), unit, before);
        let after = _mm512_fmadd_ps(centres, _mm512_set1_ps(centre), after);
        let after = _mm512_fmadd_ps(zeros, _mm512_set1_ps(zero), after);
        _mm512_storeu_ps(out, after);
    }
}
