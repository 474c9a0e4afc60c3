//! `mod.rs` in registers: factors times steps, four rows at once, and scales turned.
//!
//! Everything here is reached through functions that know that the machine has
//! the instructions (a [`Simd`] exists only then) and whose callers have checked all lengths;
//! pointers stay inside those.
#![allow(unsafe_code)] // Calls after detection, pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "the whole of each body needs what its caller upholds")]

#[cfg(target_arch = "aarch64")]
use crate::cpu::int_operands::neon::transpose_8;
#[cfg(target_arch = "x86_64")]
use crate::cpu::int_operands::x86::transpose_8;
use crate::cpu::int_operands::{FOLD_ROWS, FoldScales, FoldedRows};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;
use crate::cpu::simd_vector::SimdVector;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd_vector::neon::NeonVector;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd_vector::x86::Avx2Vector;

/// Values that one step of a loop takes.
pub(super) const STEP: usize = 16;

/// Calls `fold::<rows>` of the wrapper module `$set`.
macro_rules! by_rows {
    ($set:ident, $rows:expr, $args:tt) => {
        match $rows {
            1 => $set::fold_rows::<1> $args,
            2 => $set::fold_rows::<2> $args,
            3 => $set::fold_rows::<3> $args,
            _ => $set::fold_rows::<4> $args,
        }
    };
}

/// Writes `values[r] · steps` of each row to `out` (`[rows, n]`, `n` a multiple of [`STEP`]).
pub(super) fn fold_rows(
    simd: Simd,
    values: &[&[f32]],
    scales: FoldScales<'_>,
    out: &mut [f32],
) -> FoldedRows {
    let n = values[0].len();
    let mut from = [values[0].as_ptr(); FOLD_ROWS];
    for (from, values) in from.iter_mut().zip(values) {
        *from = values.as_ptr();
    }
    let out = out.as_mut_ptr();
    // SAFETY: the instruction set was detected, and the caller has checked the lengths.
    unsafe {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unreachable!("AVX-512 folds and cuts at once"),
            #[cfg(target_arch = "x86_64")]
            _ => by_rows!(avx2, values.len(), (from, scales, n, out)),
            #[cfg(target_arch = "aarch64")]
            _ => by_rows!(neon, values.len(), (from, scales, n, out)),
        }
    }
}

macro_rules! wrappers {
    ($name:ident, $vector:ident, $features:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn fold_rows<const R: usize>(
                values: [*const f32; FOLD_ROWS],
                scales: FoldScales<'_>,
                n: usize,
                out: *mut f32,
            ) -> FoldedRows {
                super::fold_rows_body::<$vector, R>(values, scales, n, out)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
wrappers!(avx2, Avx2Vector, "avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
wrappers!(neon, NeonVector, "neon");

#[inline(always)]
unsafe fn fold_rows_body<V: SimdVector, const R: usize>(
    values: [*const f32; FOLD_ROWS],
    scales: FoldScales<'_>,
    n: usize,
    out: *mut f32,
) -> FoldedRows {
    let (steps, minima) = (scales.steps.as_ptr(), scales.minima.as_ptr());
    let mut largest = [V::zero(); FOLD_ROWS];
    let (mut bases, mut totals) = (largest, largest);
    let mut at = 0;
    while at < n {
        let step = V::load_f16(steps.add(2 * at), V::COUNT);
        let minimum = V::load_f16(minima.add(2 * at), V::COUNT);
        for row in 0..R {
            let value = V::load(values[row].add(at), V::COUNT);
            let folded = V::mul(value, step);
            V::store(out.add(row * n + at), V::COUNT, folded);
            largest[row] = V::max_magnitude(largest[row], folded);
            bases[row] = V::fma(value, minimum, bases[row]);
            totals[row] = V::add(totals[row], folded);
        }
        at += V::COUNT;
    }
    let largest = V::lane_maxima(largest);
    FoldedRows { largest, bases: V::lane_sums(bases), totals: V::lane_sums(totals) }
}

/// Turns `[rows, columns]` words into `[columns, rows]`: both a multiple of eight.
pub(in crate::cpu) fn transpose_words(words: &[u8], columns: usize, out: &mut [u8]) {
    let rows = words.len() / (2 * columns);
    assert!(rows.is_multiple_of(8) && columns.is_multiple_of(8), "transpose: eights");
    assert!(words.len() == 2 * rows * columns && out.len() == words.len(), "transpose: lengths");
    for row in (0..rows).step_by(8) {
        for column in (0..columns).step_by(8) {
            // SAFETY: SSE2 and NEON are part of their targets; eight words of eight rows lie in
            // `words`, and of eight columns in `out`.
            unsafe {
                let from = words.as_ptr().add(2 * (row * columns + column));
                let to = out.as_mut_ptr().add(2 * (column * rows + row));
                transpose_8(from, 2 * columns, to, 2 * rows);
            }
        }
    }
}
