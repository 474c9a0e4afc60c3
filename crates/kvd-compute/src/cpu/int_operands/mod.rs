//! Factors as integers: queries and weights, as they are or times the steps of a page's groups,
//! rounded to 16 bits of the largest in their row, or to 8.

mod few_rows;
pub(super) mod lane_offsets;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod simd_fold;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use crate::cpu::int_dot::ROWS;
use crate::cpu::int_operands::lane_offsets::{
    LANE_OFFSETS, LANES, LaneOffsets, NO_OFFSETS, OFFSET_SETS,
};
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::{InstructionSet, KernelConfig, Precision, Simd, per_level};
use crate::cpu::span_scores::TILE;
use kvd_core::DType;
use std::ops::Range;

/// Rows that are multiplied with steps at once.
pub(super) const FOLD_ROWS: usize = 4;
/// Largest magnitude of a factor: the most that two signed bytes hold both ways.
pub(super) const TOP: f32 = 32639.0;
/// Largest magnitude of a factor of one signed byte, and of one byte without a sign.
const TOP_8: f32 = 127.0;
const TOP_WEIGHT_8: f32 = 255.0;
/// The least of that for rows with many values, so that small ones beside a large one keep enough:
/// 13.5 bits.
const TOP_LEAST: f32 = 11_585.0;
/// Most values of a row that keep one byte: more of their rounding would add up.
const SINGLE_MAX: usize = 256;
/// The largest byte that factors are multiplied with.
const BYTE_MAX: i32 = u8::MAX as i32;
/// A row whose largest is no more than this is nothing beside any other, and has no reciprocal.
pub(super) const NOTHING: f32 = 1e-30;

/// Memory layout of integer operands, chosen per instruction set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OperandLayout {
    /// Words in the order 0, 2, 1, 3 of each four.
    Swapped,
    /// Words as they come.
    Words,
    /// All high bytes and then all low ones, both signed; with one byte each no low ones.
    Halves,
    /// As `Halves`, of each eight values, and of the four that may be left.
    Eights,
}

impl OperandLayout {
    fn chosen_for(simd: Simd) -> Self {
        match simd.level() {
            InstructionSet::Portable | InstructionSet::Avx2 => Self::Swapped,
            InstructionSet::AvxVnni | InstructionSet::Avx512 | InstructionSet::Amx => Self::Halves,
            InstructionSet::Neon => Self::Words,
            InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => Self::Eights,
        }
    }

    /// Where the high and the low byte of value `at` of `len` lie.
    #[inline]
    fn byte_offsets(self, at: usize, len: usize) -> [usize; 2] {
        match self {
            Self::Swapped => {
                let swapped = 2 * (at / 4 * 4 + [0, 2, 1, 3][at % 4]);
                [swapped + 1, swapped]
            }
            Self::Words => [2 * at + 1, 2 * at],
            Self::Halves => [at, len + at],
            Self::Eights => {
                let first = at / EIGHT * EIGHT;
                let high = 2 * first + at % EIGHT;
                [high, high + EIGHT.min(len - first)]
            }
        }
    }

    /// The integer with that high and low byte.
    #[inline]
    fn join_digits(self, digits: [u8; 2]) -> i32 {
        let [high, low] = digits;
        match self {
            Self::Swapped | Self::Words => i32::from(i16::from_le_bytes([low, high])),
            Self::Halves | Self::Eights => i32::from(high as i8) * 256 + i32::from(low as i8),
        }
    }
}

/// Values whose parts [`OperandLayout::Eights`] keeps together.
pub(super) const EIGHT: usize = 8;

/// Rows of integers, cut the way the instruction set multiplies them.
pub(crate) struct IntOperands {
    bytes: ScratchVec<u8>,
    /// Bytes of an integer.
    digits: usize,
    /// Whether rows that are not long have one digit, and the largest magnitude that holds.
    single: Option<f32>,
    /// The largest magnitude of an integer: a row's sum of products fits 32 bits with it.
    top: f32,
    /// The largest magnitudes of what rows are multiplied with, on average.
    meets: i32,
    /// Added to values before they are rounded.
    offsets: &'static LaneOffsets,
    /// Whether these are of [`LANE_OFFSETS`], and which are next.
    next_offsets: Option<usize>,
    sums: ScratchVec<i32>,
    len: usize,
    /// Values times steps.
    folded: ScratchVec<f32>,
}

/// The result of rounding a row of factors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RoundedRow {
    /// One unit of its integers.
    pub(crate) unit: f32,
    /// The sum of what rounding took away.
    pub(crate) lost: f32,
    /// The sum of the values times their minima.
    pub(crate) base: f32,
}

/// Steps and minima that a row of factors is folded with, as f16.
#[derive(Clone, Copy)]
pub(crate) struct FoldScales<'a> {
    pub(crate) steps: &'a [u8],
    pub(crate) minima: &'a [u8],
}

/// Some rows of [`IntOperands`].
#[derive(Clone, Copy)]
pub(crate) struct IntRows<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes of an integer: 2, or 1 where precision is [`Precision::Int8`] and the instruction set
    /// multiplies bytes; one has a sign where it is a query's and none where it is a weight's.
    pub(super) digits: usize,
    /// Sum of each row.
    pub(super) sums: &'a [i32],
    /// Values of a row.
    pub(super) len: usize,
}

/// Some rows, and one unit of the integers of each.
#[derive(Clone, Copy)]
pub(crate) struct ScaledRows<'a> {
    pub(crate) rows: IntRows<'a>,
    pub(crate) units: &'a [f32],
}

impl IntOperands {
    /// No rows of queries yet, to be rounded that far.
    pub(crate) fn of_queries(config: KernelConfig) -> Self {
        Self::new(config, TOP_8)
    }

    /// No rows yet of queries times scales of their channels. They keep two bytes: one large
    /// channel would leave others next to nothing of one.
    pub(crate) fn of_scaled_queries(config: KernelConfig) -> Self {
        Self::new(KernelConfig { precision: Precision::Fast, ..config }, TOP)
    }

    /// No rows of weights yet: those are not negative, so that one byte has no sign. (A page whose
    /// steps are negative, which no encoder writes, gives sums of no use.)
    pub(crate) fn of_weights(config: KernelConfig) -> Self {
        let mut weights = Self { next_offsets: Some(0), ..Self::new(config, TOP_WEIGHT_8) };
        weights.change_offsets();
        weights
    }

    fn new(config: KernelConfig, top: f32) -> Self {
        let KernelConfig { simd, precision } = config;
        let single = precision == Precision::Int8
            && OperandLayout::chosen_for(simd) == OperandLayout::Halves;
        let (bytes, sums) = (ScratchVec::default(), ScratchVec::default());
        let folded = ScratchVec::default();
        let (single, meets) = (single.then_some(top), BYTE_MAX);
        let (offsets, next_offsets) = (&NO_OFFSETS, None);
        Self {
            bytes,
            digits: 2,
            single,
            top: TOP,
            meets,
            offsets,
            next_offsets,
            sums,
            len: 0,
            folded,
        }
    }

    /// Whether all rows have two digits.
    pub(crate) fn are_words(&self) -> bool {
        self.single.is_none()
    }

    /// Rounds the next rows of weights with other offsets, which are to change from page to page or
    /// tile to tile: weights that are alike in all of them then lose nothing together.
    pub(crate) fn change_offsets(&mut self) {
        if let Some(next) = &mut self.next_offsets {
            self.offsets = &LANE_OFFSETS[*next];
            *next = (*next + 1) % OFFSET_SETS;
        }
    }

    /// Rows will be multiplied with what is no larger than `meets`, on average over their values.
    pub(crate) fn multiplied_with(self, meets: i32) -> Self {
        // What depends on it is found with the next length.
        Self { meets, len: 0, ..self }
    }

    /// Forgets its rows; each new one has `len` values, a multiple of four. Where products of so
    /// many might not fit, integers of two digits are smaller than those hold: beside bytes up to
    /// 255 from 260 values on, 13.8 bits and a sign at 576.
    #[inline]
    pub(crate) fn clear_rows(&mut self, len: usize) {
        debug_assert!(len.is_multiple_of(4), "rows of {len}");
        self.sums.clear();
        if self.len == len {
            return;
        }
        self.len = len;
        let single = self.single.filter(|_| len <= SINGLE_MAX);
        self.digits = if single.is_some() { 1 } else { 2 };
        self.top = single.unwrap_or(TOP).min(largest_fitting(len, self.meets));
    }

    /// Appends a row whose largest magnitude is `largest`. Who wants to know what rounding took
    /// away says what the values add up to.
    pub(crate) fn push(
        &mut self,
        simd: Simd,
        values: &[f32],
        largest: f32,
        total: Option<f32>,
    ) -> RoundedRow {
        assert_eq!(values.len(), self.len, "operands: row length");
        let pushed = self.split_row(simd, values, largest, total.unwrap_or_default());
        if total.is_some() { pushed } else { RoundedRow { lost: 0.0, ..pushed } }
    }

    /// Appends at most [`ROWS`] rows of `values` times the steps of `scales`.
    pub(crate) fn push_folded(
        &mut self,
        simd: Simd,
        values: &[&[f32]],
        scales: FoldScales<'_>,
        pushed: &mut [RoundedRow; ROWS],
    ) {
        let n = self.len;
        assert!(values.len() <= ROWS && values.iter().all(|row| row.len() == n), "operands: rows");
        let FoldScales { steps, minima } = scales;
        assert!(steps.len() == 2 * n && minima.len() == 2 * n, "operands: scales");
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() == InstructionSet::Avx512 && n.is_multiple_of(x86::STEP) {
            return self.push_folded_at_once(simd, values, scales, pushed);
        }
        let mut folded = std::mem::take(&mut self.folded);
        folded.resize_with_room(FOLD_ROWS * n, 0.0);
        for (values, pushed) in values.chunks(FOLD_ROWS).zip(pushed.chunks_mut(FOLD_ROWS)) {
            let folds = fold_rows(simd, values, scales, &mut folded);
            for (row, folded) in folded.chunks_exact(n).take(values.len()).enumerate() {
                // An overflow of value times step has no unit; the sum is then of no use anyway.
                let largest = folds.largest[row];
                let largest = if largest.is_finite() { largest } else { 0.0 };
                pushed[row] = self.split_row(simd, folded, largest, folds.totals[row]);
                pushed[row].base = folds.bases[row];
            }
        }
        self.folded = folded;
    }

    /// Where the next rows go.
    fn reserve_rows(&mut self, rows: usize) -> Range<usize> {
        let size = self.digits * self.len;
        let start = size * self.sums.len();
        let end = start + size * rows;
        if self.bytes.len() < end {
            self.bytes.resize_with_room(end, 0);
        }
        start..end
    }

    fn split_row(&mut self, simd: Simd, values: &[f32], largest: f32, total: f32) -> RoundedRow {
        let (range, top) = (self.reserve_rows(1), self.top);
        let inverse = if largest > NOTHING { top / largest } else { 0.0 };
        let unit = if inverse > 0.0 { largest / top } else { 0.0 };
        let scale = RowScale { inverse, offsets: self.offsets };
        let sum = split_values(simd, values, scale, &mut self.bytes[range], self.digits);
        self.sums.push_value(sum);
        let lost = if inverse > 0.0 { total - sum as f32 * unit } else { 0.0 };
        RoundedRow { unit, lost, base: 0.0 }
    }

    /// The unit with which the integers of row `row`, which rounded to `pushed`, add up to what its
    /// values do: sums with it are averages by the rounded weights, and what rounding took counts
    /// as those average.
    pub(crate) fn exact_unit(&self, row: usize, pushed: &RoundedRow) -> f32 {
        let sum = self.sums[row];
        pushed.unit + if sum > 0 { pushed.lost / sum as f32 } else { 0.0 }
    }

    /// Writes the integers of row `row`, of two digits, as floats.
    pub(crate) fn widen_row(&self, simd: Simd, row: usize, out: &mut [f32]) {
        assert!(self.digits == 2 && out.len() == self.len, "operands: digits or row length");
        let bytes = &self.bytes[2 * self.len * row..][..2 * self.len];
        let layout = OperandLayout::chosen_for(simd);
        if layout == OperandLayout::Halves {
            let (high, low) = bytes.split_at(self.len);
            return join_halves(simd, high, low, out);
        }
        for (at, value) in out.iter_mut().enumerate() {
            let digits = layout.byte_offsets(at, self.len).map(|at| bytes[at]);
            *value = layout.join_digits(digits) as f32;
        }
    }

    /// Rows from `first` on, at most [`ROWS`].
    pub(crate) fn rows_from(&self, first: usize) -> IntRows<'_> {
        self.some_rows(first, ROWS.min(self.sums.len() - first))
    }

    /// So many rows from `first` on.
    pub(crate) fn some_rows(&self, first: usize, count: usize) -> IntRows<'_> {
        let (digits, size, end) = (self.digits, self.digits * self.len, first + count);
        let bytes = &self.bytes[first * size..end * size];
        IntRows { bytes, digits, sums: &self.sums[first..end], len: self.len }
    }
}

impl IntRows<'_> {
    /// How many rows.
    pub(crate) fn row_count(&self) -> usize {
        self.sums.len()
    }

    /// Rows `first..first + count`.
    pub(super) fn slice_rows(&self, first: usize, count: usize) -> Self {
        let size = self.digits * self.len;
        let bytes = &self.bytes[first * size..(first + count) * size];
        Self { bytes, sums: &self.sums[first..first + count], ..*self }
    }

    /// Value `index` of row `row`; as a query's where it is one byte.
    pub(crate) fn value_at(&self, simd: Simd, row: usize, index: usize) -> i32 {
        let size = self.digits * self.len;
        let row = &self.bytes[row * size..][..size];
        if self.digits == 1 {
            return i32::from(row[index] as i8);
        }
        let layout = OperandLayout::chosen_for(simd);
        layout.join_digits(layout.byte_offsets(index, self.len).map(|at| row[at]))
    }

    /// Value `index` of row `row`, as the portable path has it.
    pub(super) fn portable_value_at(&self, row: usize, index: usize) -> i32 {
        let swapped = [0, 2, 1, 3][index % 4];
        let at = 2 * (row * self.len + index / 4 * 4 + swapped);
        i32::from(i16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
    }
}

/// Whether products of `len` integers with what is no larger than `meets` fit 32 bits, and these
/// integers are not too small for it.
pub(crate) fn sums_fit(len: usize, meets: i32) -> bool {
    largest_fitting(len, meets) >= TOP_LEAST
}

/// The largest integer whose products with `len` others, on average up to `meets`, add up to 32
/// bits.
pub(super) fn largest_fitting(len: usize, meets: i32) -> f32 {
    let terms = i32::try_from(len.max(1)).unwrap_or(i32::MAX);
    (i32::MAX / meets.max(1) / terms) as f32
}

/// Rounds to an integer, ties to even, for magnitudes below `2^22`, without a call of the
/// mathematics library for each.
#[inline(always)]
pub(super) fn round_to_int(x: f32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32
}

/// The way from values of a row to its integers: values times `inverse`, and the offset of their
/// lane, are rounded.
#[derive(Clone, Copy)]
struct RowScale {
    inverse: f32,
    offsets: &'static LaneOffsets,
}

/// Rounds values to so many bytes, cuts these as the set multiplies them, and returns the integers'
/// sum.
fn split_values(simd: Simd, values: &[f32], scale: RowScale, out: &mut [u8], digits: usize) -> i32 {
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() != InstructionSet::Portable && values.len().is_multiple_of(x86::STEP) {
        return x86::split_values(simd, values, scale, out, digits);
    }
    #[cfg(target_arch = "aarch64")]
    if simd.vector_set() != InstructionSet::Portable && values.len().is_multiple_of(EIGHT) {
        return neon::split_values(simd, values, scale, out);
    }
    let (mut sum, cut) = (0, OperandLayout::chosen_for(simd));
    for (at, value) in values.iter().enumerate() {
        let rounded = round_to_int(value * scale.inverse + scale.offsets[at % LANES]);
        sum += rounded;
        if digits == 1 {
            out[at] = rounded as u8;
            continue;
        }
        let high = match cut {
            OperandLayout::Swapped | OperandLayout::Words => rounded >> 8,
            // What the high byte leaves has the same low eight bits.
            OperandLayout::Halves | OperandLayout::Eights => (rounded + 128) >> 8,
        };
        let [high_at, low_at] = cut.byte_offsets(at, values.len());
        (out[high_at], out[low_at]) = (high as u8, rounded as u8);
    }
    sum
}

per_level!(
    /// Joins the signed digits of [`OperandLayout::Halves`].
    fn join_halves(high: &[u8], low: &[u8], out: &mut [f32]) = join_halves_body
);

#[inline(always)]
fn join_halves_body(high: &[u8], low: &[u8], out: &mut [f32]) {
    for (out, (high, low)) in out.iter_mut().zip(high.iter().zip(low)) {
        *out = (i32::from(*high as i8) * 256 + i32::from(*low as i8)) as f32;
    }
}

/// Results of folding up to [`FOLD_ROWS`] rows: the largest magnitudes, the sums with minima, and
/// the sums of all.
#[derive(Default)]
pub(super) struct FoldedRows {
    pub(super) largest: [f32; FOLD_ROWS],
    pub(super) bases: [f32; FOLD_ROWS],
    pub(super) totals: [f32; FOLD_ROWS],
}

/// Writes `values[r] · steps` of each row to `out` (`[rows, n]`).
fn fold_rows(simd: Simd, values: &[&[f32]], scales: FoldScales<'_>, out: &mut [f32]) -> FoldedRows {
    let n = values[0].len();
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if simd.vector_set() != InstructionSet::Portable && n.is_multiple_of(simd_fold::STEP) {
        return simd_fold::fold_rows(simd, values, scales, out);
    }
    let (mut steps, mut minima) = (vec![0f32; n], vec![0f32; n]);
    DType::F16.widen_values(scales.steps, &mut steps);
    DType::F16.widen_values(scales.minima, &mut minima);
    let mut folds = FoldedRows::default();
    for (row, (values, out)) in values.iter().zip(out.chunks_exact_mut(n)).enumerate() {
        // In lanes, as vectors do: one long sum would lose more.
        let (mut bases, mut totals) = ([0f32; TILE], [0f32; TILE]);
        for (i, (value, out)) in values.iter().zip(out).enumerate() {
            *out = value * steps[i];
            folds.largest[row] = folds.largest[row].max(out.abs());
            bases[i % TILE] += value * minima[i];
            totals[i % TILE] += *out;
        }
        (folds.bases[row], folds.totals[row]) = (bases.iter().sum(), totals.iter().sum());
    }
    folds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_nothing_has_no_unit() {
        for simd in Simd::available_levels() {
            let mut parts =
                IntOperands::of_queries(KernelConfig { simd, precision: Precision::Fast });
            parts.clear_rows(4);
            assert_eq!(parts.push(simd, &[0.0; 4], 0.0, None), RoundedRow::default());
            assert_eq!(parts.push(simd, &[1e-38; 4], 1e-38, None), RoundedRow::default());
            assert_eq!(parts.rows_from(0).sums, [0, 0]);
        }
    }

    #[test]
    fn weights_that_are_alike_keep_their_sum_and_none_is_made_of_nothing() {
        for simd in Simd::available_levels() {
            let mut parts =
                IntOperands::of_weights(KernelConfig { simd, precision: Precision::Fast });
            let fractions = [0.07, 0.3, 0.49, 0.51, 100.49];
            let cases = [16, 64, 128].into_iter().flat_map(|n| fractions.map(|f| (n, f)));
            for (tokens, fraction) in cases {
                // One large weight, every eighth is nothing, the others are alike.
                let unit = 1.0 / TOP;
                let mut weights = vec![fraction * unit; tokens];
                weights.iter_mut().step_by(8).for_each(|weight| *weight = 0.0);
                weights[8] = 1.0;
                let total: f32 = weights.iter().sum();
                parts.clear_rows(tokens);
                let lost = parts.push(simd, &weights, 1.0, Some(total)).lost;
                // A share for each of the lanes, and for those that have nothing.
                let units = (lost / unit).abs();
                assert!(units < 1.0 + tokens as f32 / 32.0, "{units}, {tokens} of {fraction}");
                let words = (0..tokens).map(|at| parts.rows_from(0).value_at(simd, 0, at));
                for (at, word) in words.enumerate() {
                    assert!(word >= 0 && (weights[at] > 0.0 || word == 0), "{at}: {word}");
                }
                assert_eq!(parts.rows_from(0).value_at(simd, 0, 8), TOP as i32);
            }
        }
    }

    #[test]
    fn every_level_folds_alike() {
        let wave = |i: usize, gain: f32| (i as f32 * 0.7).sin() * gain;
        for n in [16, 64, 80, 20] {
            let values: Vec<Vec<f32>> =
                (0..ROWS).map(|row| (0..n).map(|i| wave(i + 31 * row, 3.0)).collect()).collect();
            let scales = |gain| {
                let wide: Vec<f32> = (0..n).map(|i| wave(i * i, gain)).collect();
                let mut bytes = vec![0; 2 * n];
                DType::F16.narrow_values(&wide, &mut bytes);
                bytes
            };
            let (steps, minima) = (scales(0.25), scales(40.0));
            for rows in 1..=ROWS {
                let run = |simd: Simd| {
                    let mut parts =
                        IntOperands::of_weights(KernelConfig { simd, precision: Precision::Fast });
                    parts.clear_rows(n);
                    let mut pushed = [RoundedRow::default(); ROWS];
                    let values: Vec<&[f32]> = values[..rows].iter().map(|row| &row[..]).collect();
                    let scales = FoldScales { steps: &steps, minima: &minima };
                    parts.push_folded(simd, &values, scales, &mut pushed);
                    let rows = parts.rows_from(0);
                    let words = (0..rows.row_count()).flat_map(|row| (0..n).map(move |i| (row, i)));
                    let words: Vec<i32> =
                        words.map(|(row, i)| rows.value_at(simd, row, i)).collect();
                    (pushed, words, rows.sums.to_vec())
                };
                let portable = run(Simd::available_levels()[0]);
                for simd in Simd::available_levels() {
                    let (pushed, words, sums) = run(simd);
                    assert_eq!((&words, &sums), (&portable.1, &portable.2), "{simd:?}, {n}");
                    for (got, want) in pushed.iter().zip(&portable.0) {
                        assert_eq!(got.unit, want.unit);
                        assert!((got.base - want.base).abs() < 1e-3, "{got:?} {want:?}");
                        assert!((got.lost - want.lost).abs() < 1e-4, "{got:?} {want:?}");
                    }
                }
            }
        }
    }
}
