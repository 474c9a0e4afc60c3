//! Loops compiled for the widest registers of the machine they run on, or for narrower ones that a
//! thread is held to.
//!
//! Every number is made by the same operations in the same order at every width (no fused
//! multiply-add, no sums over lanes), so that pages do not depend on who wrote them.

use crate::row_block::RowBlockMut;
use pulp::{Arch, Simd, WithSimd};
use std::cell::Cell;

/// Rows that share a load of the matrix.
const ROWS: usize = 4;
/// Inputs that are taken together: each strip of the matrix is brought close once for them, and a
/// page of 64 rows of 128 goes at once.
const INPUTS: usize = 8192;
/// Floats of a cache line.
const LINE_FLOATS: usize = 16;
/// Registers of outputs per row; with four rows, eight sums hide the latency of an addition.
const REGISTERS: usize = 2;

/// How wide the registers are that loops take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RegisterWidth {
    /// A value at a time, as far as loops of this crate say.
    Scalar,
    /// NEON.
    Bits128,
    /// AVX2.
    Bits256,
    /// AVX-512.
    Bits512,
}

impl RegisterWidth {
    /// All of them, the widest first.
    const ALL: [Self; 4] = [Self::Bits512, Self::Bits256, Self::Bits128, Self::Scalar];

    /// Registers of this width, if the machine has them.
    fn at_hand(self) -> Option<Arch> {
        match self {
            Self::Scalar => Some(Arch::Scalar),
            #[cfg(target_arch = "aarch64")]
            Self::Bits128 => pulp::aarch64::Neon::try_new().map(Arch::Neon),
            #[cfg(target_arch = "x86_64")]
            Self::Bits256 => pulp::x86::V3::try_new().map(Arch::V3),
            #[cfg(target_arch = "x86_64")]
            Self::Bits512 => pulp::x86::V4::try_new().map(Arch::V4),
            _ => None,
        }
    }
}

thread_local! {
    static HELD: Cell<Option<RegisterWidth>> = const { Cell::new(None) };
}

/// Keeps loops of this thread to registers of at most `width` from now on (`None`: the widest at
/// hand) and returns what they were kept to before. For measurements: pages are the same.
pub fn limit_width(width: Option<RegisterWidth>) -> Option<RegisterWidth> {
    HELD.replace(width)
}

/// The instruction set that loops of this thread use.
fn active_arch() -> Arch {
    let Some(held) = HELD.get() else { return Arch::new() };
    let mut widths = RegisterWidth::ALL.into_iter().filter(|width| *width <= held);
    widths.find_map(RegisterWidth::at_hand).unwrap_or(Arch::Scalar)
}

/// Registers of 512 bits, for loops written for nothing else.
#[cfg(target_arch = "x86_64")]
pub(crate) fn of_512_bits() -> Option<pulp::x86::V4> {
    if let Arch::V4(by) = active_arch() { Some(by) } else { None }
}

/// Runs `loops` with the widest instruction set at hand. What it calls must be inlined.
pub fn dispatch_simd<T>(loops: impl WithSimd<Output = T>) -> T {
    active_arch().dispatch(loops)
}

/// Runs `op` with each instruction set at hand, and without any; what it returns must be the same.
#[cfg(test)]
pub(crate) fn each_width<T: PartialEq + std::fmt::Debug>(op: impl Fn() -> T) -> T {
    let run = |width| {
        let before = limit_width(Some(width));
        let result = op();
        limit_width(before);
        result
    };
    let plain = run(RegisterWidth::Scalar);
    for width in RegisterWidth::ALL.into_iter().filter(|width| width.at_hand().is_some()) {
        assert_eq!(run(width), plain, "{width:?} and without");
    }
    plain
}

/// For each value the number of `bounds` below it; none for NaN.
#[inline(always)]
pub(crate) fn count_below<S: Simd>(simd: S, bounds: &[f32], x: &[f32], counts: &mut [u32]) {
    let (x, x_rest) = S::as_simd_f32s(x);
    let (counts, counts_rest) = S::as_mut_simd_u32s(counts);
    let [none, one] = [0, 1].map(|number| simd.splat_u32s(number));
    let (pairs, last) = x.as_chunks::<2>();
    let (count_pairs, last_counts) = counts.as_chunks_mut::<2>();
    for (x, counts) in pairs.iter().zip(count_pairs) {
        let mut sums = [none; 2];
        for bound in bounds {
            let bound = simd.splat_f32s(*bound);
            for (sum, x) in sums.iter_mut().zip(x) {
                let below = simd.less_than_f32s(bound, *x);
                *sum = simd.add_u32s(*sum, simd.select_u32s(below, one, none));
            }
        }
        *counts = sums;
    }
    for (x, count) in last.iter().zip(last_counts) {
        *count = none;
        for bound in bounds {
            let below = simd.less_than_f32s(simd.splat_f32s(*bound), *x);
            *count = simd.add_u32s(*count, simd.select_u32s(below, one, none));
        }
    }
    for (x, count) in x_rest.iter().zip(counts_rest) {
        *count = bounds.iter().map(|bound| u32::from(bound < x)).sum();
    }
}

/// Every row `x` of `rows` becomes `M x`, for `columns` = `Mᵀ` (`[dim, dim]`, row-major).
///
/// Columns, so that outputs lie in lanes and each is summed in the order of the inputs.
pub(crate) struct MatrixRows<'a> {
    pub(crate) columns: &'a [f32],
    pub(crate) dim: usize,
    pub(crate) rows: &'a mut [f32],
}

impl WithSimd for MatrixRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { columns, dim, rows } = self;
        let one_row = rows.len() == dim;
        if one_row
            && (multiply_row::<S, 8>(simd, columns, rows)
                || multiply_row::<S, 4>(simd, columns, rows))
        {
            return;
        }
        let step = REGISTERS * S::F32_LANES;
        let whole = dim - dim % step;
        let block = (INPUTS / dim / ROWS).max(1) * ROWS;
        let mut inputs = vec![0f32; (block * dim).min(rows.len())];
        // For a few rows the matrix is read where it lies.
        let close = rows.len() > ROWS * dim;
        let mut strip = vec![0f32; if close { step * dim + LINE_FLOATS } else { 0 }];
        let strip = begin_on_line(&mut strip, if close { step * dim } else { 0 });
        for rows in rows.chunks_mut(block * dim) {
            let inputs = &mut inputs[..rows.len()];
            turn_quads(rows, dim, inputs);
            for first in (0..whole).step_by(step) {
                let columns = columns.chunks_exact(dim).map(|column| &column[first..][..step]);
                if !close {
                    multiply_strip(simd, columns, inputs, RowBlockMut { rows, dim }, first);
                    continue;
                }
                for (to, column) in strip.chunks_exact_mut(step).zip(columns) {
                    to.copy_from_slice(column);
                }
                multiply_strip(
                    simd,
                    strip.chunks_exact(step),
                    inputs,
                    RowBlockMut { rows, dim },
                    first,
                );
            }
            for (row, out) in rows.chunks_exact_mut(dim).enumerate() {
                let (start, stride) = input_span(row, inputs.len(), dim);
                let input = inputs[start..].iter().step_by(stride).take(dim);
                for (j, out) in out.iter_mut().enumerate().skip(whole) {
                    let column = columns[j..].iter().step_by(dim);
                    *out = input.clone().zip(column).fold(0.0, |sum, (x, m)| sum + x * m);
                }
            }
        }
    }
}

/// The `len` floats from the first multiple of a cache line on: a vector that crosses lines takes
/// two loads, and a product of whole pages twice the time.
fn begin_on_line(floats: &mut [f32], len: usize) -> &mut [f32] {
    let skip = floats.as_ptr().align_offset(LINE_FLOATS * size_of::<f32>());
    let first = skip.min(floats.len() - len);
    &mut floats[first..][..len]
}

/// Outputs from `first` on, as many as the columns are long, of all rows.
#[inline(always)]
fn multiply_strip<'a, S: Simd>(
    simd: S,
    columns: impl Iterator<Item = &'a [f32]> + Clone,
    inputs: &[f32],
    block: RowBlockMut<'_>,
    first: usize,
) {
    let RowBlockMut { rows, dim } = block;
    let (quads, rest) = inputs.split_at(inputs.len() / (ROWS * dim) * ROWS * dim);
    let (quad_rows, rest_rows) = rows.split_at_mut(quads.len());
    let quads = quads.chunks_exact(ROWS * dim).zip(quad_rows.chunks_exact_mut(ROWS * dim));
    for (inputs, rows) in quads {
        product_of::<S, ROWS, REGISTERS>(simd, columns.clone(), inputs, &mut rows[first..], dim);
    }
    for (input, row) in rest.chunks_exact(dim).zip(rest_rows.chunks_exact_mut(dim)) {
        product_of::<S, 1, REGISTERS>(simd, columns.clone(), input, &mut row[first..], dim);
    }
}

/// Where the inputs of row `row` begin among those of all, and how far one is from the next.
#[inline(always)]
fn input_span(row: usize, len: usize, dim: usize) -> (usize, usize) {
    let in_quads = row < len / (ROWS * dim) * ROWS;
    if in_quads { (row / ROWS * ROWS * dim + row % ROWS, ROWS) } else { (row * dim, 1) }
}

/// Copies rows, those of four input by input, what is left over row by row.
#[inline(always)]
fn turn_quads(rows: &[f32], dim: usize, inputs: &mut [f32]) {
    let quads = rows.chunks_exact(ROWS * dim);
    let rest = quads.remainder();
    for (rows, inputs) in quads.zip(inputs.chunks_exact_mut(ROWS * dim)) {
        let (a, rows) = rows.split_at(dim);
        let (b, rows) = rows.split_at(dim);
        let (c, d) = rows.split_at(dim);
        let inputs = inputs.as_chunks_mut::<ROWS>().0.iter_mut();
        for ((((input, a), b), c), d) in inputs.zip(a).zip(b).zip(c).zip(d) {
            *input = [*a, *b, *c, *d];
        }
    }
    let start = rows.len() - rest.len();
    inputs[start..].copy_from_slice(rest);
}

/// [`MatrixRows`] of one row in strips of `N` registers, since each sum waits for itself; whether
/// the row is of such strips.
#[inline(always)]
fn multiply_row<S: Simd, const N: usize>(simd: S, columns: &[f32], row: &mut [f32]) -> bool {
    let (dim, step) = (row.len(), N * S::F32_LANES);
    if !dim.is_multiple_of(step) {
        return false;
    }
    let input = row.to_vec();
    for first in (0..dim).step_by(step) {
        let columns = columns.chunks_exact(dim).map(|column| &column[first..][..step]);
        product_of::<S, 1, N>(simd, columns, &input, &mut row[first..], dim);
    }
    true
}

/// [`multiply_strip`] of `R` rows, in strips of `N` registers.
#[inline(always)]
fn product_of<'a, S: Simd, const R: usize, const N: usize>(
    simd: S,
    columns: impl Iterator<Item = &'a [f32]>,
    inputs: &[f32],
    outputs: &mut [f32],
    dim: usize,
) {
    let step = N * S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); N]; R];
    for (column, inputs) in columns.zip(inputs.as_chunks::<R>().0) {
        let (column, _) = S::as_simd_f32s(column);
        for (sums, x) in sums.iter_mut().zip(inputs) {
            let x = simd.splat_f32s(*x);
            for (sum, column) in sums.iter_mut().zip(column) {
                *sum = simd.add_f32s(*sum, simd.mul_f32s(x, *column));
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let (out, _) = S::as_mut_simd_f32s(&mut outputs[r * dim..][..step]);
        out.copy_from_slice(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of the registers that a loop is given; none for single values.
    struct Bits;

    impl WithSimd for Bits {
        type Output = usize;

        fn with_simd<S: Simd>(self, _: S) -> usize {
            if S::F32_LANES == 1 { 0 } else { 32 * S::F32_LANES }
        }
    }

    #[test]
    fn a_thread_takes_no_wider_registers_than_it_is_held_to() {
        let widest = dispatch_simd(Bits);
        assert_eq!(limit_width(None), None);
        for (width, bits) in RegisterWidth::ALL.into_iter().zip([512, 256, 128, 0]) {
            limit_width(Some(width));
            let got = dispatch_simd(Bits);
            #[cfg(target_arch = "x86_64")]
            assert_eq!(of_512_bits().is_some(), got == 512, "{width:?}");
            assert_eq!(limit_width(None), Some(width));
            assert!(got <= bits, "{width:?}: {got}");
            assert!(width.at_hand().is_none() || got == bits, "{width:?}: {got}");
        }
        let other = std::thread::scope(|scope| {
            limit_width(Some(RegisterWidth::Scalar));
            scope.spawn(|| dispatch_simd(Bits)).join().unwrap()
        });
        limit_width(None);
        assert_eq!(other, widest, "another thread");
    }

    #[test]
    fn every_width_gives_the_sums_in_the_order_of_inputs() {
        let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 97.0;
        for dim in [2, 6, 16, 40, 64, 80, 96, 126, 128, 256] {
            let columns: Vec<f32> = (0..dim * dim).map(value).collect();
            for count in [1, 3, 4, 9, 70] {
                let rows: Vec<f32> = (0..count * dim).map(|i| value(i + 31)).collect();
                let got = each_width(|| {
                    let mut got = rows.clone();
                    dispatch_simd(MatrixRows { columns: &columns, dim, rows: &mut got });
                    got.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                for (row, got) in rows.chunks(dim).zip(got.chunks(dim)) {
                    for (j, got) in got.iter().enumerate() {
                        let plain =
                            (0..dim).fold(0.0, |sum, i| sum + row[i] * columns[i * dim + j]);
                        assert_eq!(*got, plain.to_bits(), "dim {dim}, rows {count}");
                    }
                }
            }
        }
    }
}
