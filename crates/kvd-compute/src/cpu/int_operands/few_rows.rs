//! Rows that one kernel rounds together: the weights of a few rows, and those times the steps of
//! all groups of a page.

use crate::cpu::int_dot::ROWS;
#[cfg(target_arch = "x86_64")]
use crate::cpu::int_operands::x86;
use crate::cpu::int_operands::{FOLD_ROWS, FoldScales, IntOperands, RoundedRow};
use crate::cpu::scratch::ScratchVec;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;
use crate::cpu::span_scores::{SpanScores, TILE, WeightRows};
use std::ops::Range;

impl IntOperands {
    /// Takes the weights of at most [`ROWS`] rows in some tiles, in place of the rows it had.
    pub(crate) fn push_weights(
        &mut self,
        simd: Simd,
        weights: &SpanScores,
        rows: Range<usize>,
        tiles: &Range<usize>,
    ) -> [RoundedRow; ROWS] {
        self.clear_rows(tiles.len() * TILE);
        let mut pushed = [RoundedRow::default(); ROWS];
        for (first, pushed) in rows.clone().step_by(FOLD_ROWS).zip(pushed.chunks_mut(FOLD_ROWS)) {
            let rows = first..rows.end.min(first + FOLD_ROWS);
            self.split_rows(simd, &weights.weight_rows(rows, tiles), pushed);
        }
        pushed
    }

    fn split_rows(&mut self, simd: Simd, weights: &WeightRows<'_>, pushed: &mut [RoundedRow]) {
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() == InstructionSet::Avx512 && self.len.is_multiple_of(2 * x86::STEP) {
            let range = self.reserve_rows(weights.rows);
            let (bytes, digits, top) = (&mut self.bytes[range], self.digits, self.top);
            let out = x86::SplitTarget { bytes, digits, top, offsets: self.offsets };
            let cut = x86::split_rows(simd, weights, out);
            for (row, pushed) in pushed.iter_mut().enumerate().take(weights.rows) {
                *pushed = RoundedRow { unit: cut.units[row], lost: cut.losts[row], base: 0.0 };
            }
            self.sums.extend_from_slice(&cut.sums[..weights.rows]);
            return;
        }
        for (row, pushed) in pushed.iter_mut().enumerate().take(weights.rows) {
            let (largest, total) = (weights.largest[row], weights.totals[row]);
            *pushed = self.split_row(simd, weights.weights_of(row), largest, total);
        }
    }

    /// As [`IntOperands::push_folded`], where one kernel does both steps.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn push_folded_at_once(
        &mut self,
        simd: Simd,
        values: &[&[f32]],
        scales: FoldScales<'_>,
        pushed: &mut [RoundedRow; ROWS],
    ) {
        for (values, pushed) in values.chunks(FOLD_ROWS).zip(pushed.chunks_mut(FOLD_ROWS)) {
            self.fold_groups(simd, values, scales, &mut pushed[..values.len()]);
        }
    }

    /// As [`IntOperands::push_folded`] with the scales of each group, one group after the other;
    /// `rounded` is of their rows then.
    pub(crate) fn push_groups(
        &mut self,
        simd: Simd,
        values: &[&[f32]],
        scales: FoldScales<'_>,
        rounded: &mut ScratchVec<RoundedRow>,
    ) {
        let FoldScales { steps, minima } = scales;
        let (n, groups) = (self.len, steps.len() / (2 * self.len));
        rounded.resize_with_room(groups * values.len(), RoundedRow::default());
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() == InstructionSet::Avx512
            && n.is_multiple_of(x86::STEP)
            && values.len() <= FOLD_ROWS
        {
            return self.fold_groups(simd, values, scales, rounded);
        }
        let scales = steps.chunks_exact(2 * n).zip(minima.chunks_exact(2 * n));
        for ((steps, minima), rounded) in scales.zip(rounded.chunks_exact_mut(values.len())) {
            let mut pushed = [RoundedRow::default(); ROWS];
            self.push_folded(simd, values, FoldScales { steps, minima }, &mut pushed);
            rounded.copy_from_slice(&pushed[..values.len()]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn fold_groups(
        &mut self,
        simd: Simd,
        values: &[&[f32]],
        scales: FoldScales<'_>,
        rounded: &mut [RoundedRow],
    ) {
        let (first, range) = (self.sums.len(), self.reserve_rows(rounded.len()));
        self.sums.resize_with_room(first + rounded.len(), 0);
        let (bytes, digits, top) = (&mut self.bytes[range], self.digits, self.top);
        let out = x86::SplitTarget { bytes, digits, top, offsets: self.offsets };
        x86::fold_groups(simd, values, scales, out, rounded, &mut self.sums[first..]);
    }
}
