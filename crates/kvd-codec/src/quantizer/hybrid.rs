//! `uniform(..,mode=hybrid)`: per group the asymmetric or the symmetric levels, whichever has the
//! smaller squared error (InnerQ §4.1.2).
//!
//! Codes have the same width in both modes, because the signs of a symmetric group are kept apart:
//! a group owns a *word* that holds the f32 zero point of an asymmetric group, or one bit per
//! value of a symmetric one, set for negative values. With groups of 32 the word is 32 bits either
//! way. Scales of a page: the mask (a bit per group, set for symmetric ones, in the order of the
//! scale rows), then scale rows of all words and all f16 steps.

use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::ranges::GroupedRows;
use super::ranges::{group_extremes, largest_magnitudes};
use super::stored::{StoredLayout, UniformGroups};
use super::uniform::{ROUND, ScaleRow, Uniform, spread_steps};
use super::uniform_spec::UniformLevels;
use super::{CodeShape, HeadQuantizer, PageScales, Unquantizable};
use crate::UniformMode;
use crate::page::id;
use crate::row_block::RowBlock;
use half::f16;
use kvd_core::Geometry;
use pulp::Simd;
use std::ops::Range;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;
/// A word holds at least a zero point.
const WORD_BYTES_MIN: usize = 4;

/// A uniform quantizer that chooses its mode group by group.
#[derive(Clone, Debug)]
pub(crate) struct Hybrid {
    /// Groups and the width of a level.
    pub(crate) base: Uniform,
}

/// Levels of the groups of one scale row in one mode, spread over the channels, so that loops over
/// values run channel by channel whatever a group is.
#[derive(Clone)]
struct GroupLevels {
    /// Zero point; 0 in the symmetric mode.
    zeros: [f32; DIM_MAX],
    /// Infinite where the mode cannot serve.
    steps: [f32; DIM_MAX],
    inverse: [f32; DIM_MAX],
    errors: [f32; DIM_MAX],
    /// Sum of the errors of each group.
    sums: [f32; DIM_MAX],
}

/// The levels of a scale row, and which of its groups are symmetric.
#[derive(Clone, Copy)]
struct ChosenModes<'a> {
    levels: &'a GroupLevels,
    /// By channel: 1 for the symmetric mode.
    symmetric: &'a [u8],
}

/// Where the parts of a page's scales lie: the mask, then scale rows of words and steps.
#[derive(Clone, Copy, Debug)]
pub struct HybridLayout {
    /// Bytes of the mask.
    pub mask_bytes: usize,
    /// Bytes of a word.
    pub word_bytes: usize,
    /// Bytes of a scale row.
    pub row_bytes: usize,
}

impl UniformGroups {
    /// Where the scales of a page of `tokens` rows of `dim` channels lie, when groups choose their
    /// mode.
    #[must_use]
    pub fn hybrid_layout(&self, tokens: usize, dim: usize) -> HybridLayout {
        Hybrid { base: Uniform::of_groups(self) }.scale_layout(tokens, dim)
    }
}

impl Hybrid {
    fn scale_layout(&self, tokens: usize, dim: usize) -> HybridLayout {
        let pairs = self.base.row_pairs(dim);
        let values =
            self.base.rows_per_scale(tokens).min(tokens) * self.base.channels_per_pair(dim);
        let word_bytes = values.div_ceil(8).max(WORD_BYTES_MIN);
        let mask_bytes = self.base.page_groups(tokens, dim).div_ceil(8);
        HybridLayout { mask_bytes, word_bytes, row_bytes: pairs * (word_bytes + 2) }
    }

    /// Levels and errors of both modes for the groups of `rows`.
    #[inline(always)]
    fn fit_groups<S: Simd>(
        &self,
        simd: S,
        block: RowBlock<'_>,
        absmax: f32,
        ranges: &mut [Vec<f32>; 3],
        modes: [&mut GroupLevels; 2],
    ) {
        let [wide, even] = modes;
        let [low, high, most] = ranges;
        let RowBlock { rows, dim } = block;
        let (pairs, span) = (self.base.row_pairs(dim), self.base.channels_per_pair(dim));
        group_extremes(simd, GroupedRows { rows, dim, span }, low, high);
        largest_magnitudes(rows, dim, span, most);
        for pair in 0..pairs {
            let channels = pair * span..dim.min((pair + 1) * span);
            let step = |range| self.base.step_for(range, absmax).unwrap_or(f32::INFINITY);
            wide.set_group(channels.clone(), low[pair], step(high[pair] - low[pair]));
            even.set_group(channels, 0.0, step(most[pair]));
        }
        let top = f32::from(self.base.top);
        for levels in [wide, even] {
            levels.add_errors(rows, dim, top);
        }
    }

    /// Appends the scale row of `rows`, and fills in their codes.
    #[inline(always)]
    fn append_scale_row(
        &self,
        block: RowBlock<'_>,
        layout: &HybridLayout,
        modes: ChosenModes<'_>,
        into: CodeSink<'_>,
    ) {
        let CodeSink { symbols, scales } = into;
        let ChosenModes { levels, symmetric } = modes;
        let RowBlock { rows, dim } = block;
        let span = self.base.channels_per_pair(dim);
        let words_at = scales.len();
        scales.resize(words_at + self.base.row_pairs(dim) * layout.word_bytes, 0);
        let steps = levels.steps[..dim].iter().step_by(span);
        scales.extend(steps.flat_map(|step| f16::from_f32(*step).to_le_bytes()));
        let words = &mut scales[words_at..][..self.base.row_pairs(dim) * layout.word_bytes];
        let top = f32::from(self.base.top);
        for (row, symbols) in rows.chunks_exact(dim).zip(symbols.chunks_exact_mut(dim)) {
            let channels = row.iter().zip(&levels.zeros).zip(&levels.inverse);
            for (symbol, ((x, zero), inverse)) in symbols.iter_mut().zip(channels) {
                let level = (x - zero).abs() * inverse;
                let level = if level < top { level } else { top };
                *symbol = (level + ROUND).to_bits() as u16;
            }
        }
        if span == 1 {
            set_column_signs(RowBlock { rows, dim }, layout.word_bytes, words);
        } else {
            set_row_signs(RowBlock { rows, dim }, span, layout.word_bytes, words);
        }
        for (word, channel) in words.chunks_exact_mut(layout.word_bytes).zip((0..).step_by(span)) {
            if symmetric[channel] == 0 {
                word.fill(0);
                word[..4].copy_from_slice(&levels.zeros[channel].to_le_bytes());
            }
        }
    }
}

impl HeadQuantizer for Hybrid {
    fn page_id(&self) -> u8 {
        id::HYBRID
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Uniform(self.base.groups_of_side(UniformMode::Hybrid))
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        CodeShape { per_row: dim, bits: self.base.code_bits() }
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        let layout = self.scale_layout(tokens, dim);
        let rows = self.base.page_groups(tokens, dim) / self.base.row_pairs(dim);
        layout.mask_bytes + rows * layout.row_bytes
    }

    fn quantize_rows(
        &self,
        block: RowBlock<'_>,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        append_codes(self, block, symbols, scales)
    }

    fn dequantize_row(
        &self,
        scales: PageScales<'_>,
        row: usize,
        symbols: &[u16],
        loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        let dim = out.len();
        let (pairs, span) = (self.base.row_pairs(dim), self.base.channels_per_pair(dim));
        let layout = self.scale_layout(scales.tokens, dim);
        let scale_row = self.base.scale_row(row);
        let start = layout.mask_bytes + scale_row * layout.row_bytes;
        let scale_bytes = &scales.bytes[start..][..layout.row_bytes];
        let (words, steps) = scale_bytes.split_at(pairs * layout.word_bytes);
        if loaded.row != Some(scale_row) {
            spread_steps(steps, span, &mut loaded.steps[..dim]);
            for (pair, word) in words.chunks_exact(layout.word_bytes).enumerate() {
                let group = scale_row * pairs + pair;
                let symmetric = scales.bytes[group / 8] >> (group % 8) & 1;
                let zero = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                let channels = pair * span..dim.min((pair + 1) * span);
                loaded.signed[channels.clone()].fill(symmetric);
                loaded.minima[channels].fill(if symmetric == 1 { 0.0 } else { zero });
            }
            loaded.row = Some(scale_row);
        }
        let first_bit = (row - scale_row * self.base.rows_per_scale(scales.tokens)) * span;
        let values = out.iter_mut().zip(symbols).zip(&loaded.steps);
        for ((out, symbol), step) in values {
            *out = f32::from(*symbol) * step;
        }
        // Signs and zero points; adding zero to a negative magnitude leaves it alone.
        let words = words.chunks_exact(layout.word_bytes);
        for ((out, word), first) in out.chunks_mut(span).zip(words).zip((0..dim).step_by(span)) {
            let (zero, symmetric) = (loaded.minima[first], loaded.signed[first]);
            for (bit, out) in (first_bit..).zip(out) {
                let negative = u32::from(word[bit / 8] >> (bit % 8) & symmetric) << 31;
                *out = f32::from_bits(out.to_bits() | negative) + zero;
            }
        }
    }

    fn uniform_levels(&self) -> Option<UniformLevels> {
        Some(self.base.levels_of_groups())
    }
}

impl CodeLoop for Hybrid {
    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        simd: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block: RowBlock { rows, dim }, absmax } = rows;
        let CodeSink { symbols, scales } = into;
        let tokens = rows.len() / dim;
        let layout = self.scale_layout(tokens, dim);
        let share = self.base.rows_per_scale(tokens) * dim;
        let mask_at = scales.len();
        scales.resize(mask_at + layout.mask_bytes, 0);
        let (pairs, span) = (self.base.row_pairs(dim), self.base.channels_per_pair(dim));
        let [mut wide, mut even] = [GroupLevels::new(), GroupLevels::new()];
        let mut ranges = [(); 3].map(|()| vec![0f32; pairs]);
        let mut symmetric = [0u8; DIM_MAX];
        let parts = rows.chunks(share).zip(symbols.chunks_mut(share));
        for (index, (rows, symbols)) in parts.enumerate() {
            self.fit_groups(
                simd,
                RowBlock { rows, dim },
                absmax,
                &mut ranges,
                [&mut wide, &mut even],
            );
            wide.sum_errors(dim, span);
            even.sum_errors(dim, span);
            for pair in 0..pairs {
                let channels = pair * span..dim.min((pair + 1) * span);
                let is_even = even.sums[pair] < wide.sums[pair];
                if is_even {
                    wide.copy_channels(&even, channels.clone());
                } else if !wide.steps[channels.start].is_finite() {
                    return Err(Unquantizable);
                }
                symmetric[channels].fill(u8::from(is_even));
                let group = index * pairs + pair;
                scales[mask_at + group / 8] |= u8::from(is_even) << (group % 8);
            }
            let into = CodeSink { symbols, scales: &mut *scales };
            self.append_scale_row(
                RowBlock { rows, dim },
                &layout,
                ChosenModes { levels: &wide, symmetric: &symmetric },
                into,
            );
        }
        Ok(())
    }
}

/// Sets a bit for each negative value in the word of its channel, rows in order.
#[inline(always)]
fn set_column_signs(block: RowBlock<'_>, word_bytes: usize, words: &mut [u8]) {
    let RowBlock { rows, dim } = block;
    let mut buffer = [0u32; DIM_MAX];
    let signs = &mut buffer[..dim];
    for (byte, rows) in rows.chunks(8 * dim).enumerate() {
        signs.fill(0);
        for (bit, row) in rows.chunks_exact(dim).enumerate() {
            for (signs, x) in signs.iter_mut().zip(row) {
                *signs |= u32::from(*x < 0.0) << bit;
            }
        }
        for (word, signs) in words.chunks_exact_mut(word_bytes).zip(signs.iter()) {
            word[byte] = *signs as u8;
        }
    }
}

/// Sets a bit for each negative value in the word of its group, row after row.
#[inline(always)]
fn set_row_signs(block: RowBlock<'_>, span: usize, word_bytes: usize, words: &mut [u8]) {
    let RowBlock { rows, dim } = block;
    for (index, row) in rows.chunks_exact(dim).enumerate() {
        let first = index * span;
        for (word, part) in words.chunks_exact_mut(word_bytes).zip(row.chunks(span)) {
            if first.is_multiple_of(8) {
                for (byte, values) in word[first / 8..].iter_mut().zip(part.chunks(8)) {
                    let mut signs = 0;
                    for (bit, x) in values.iter().enumerate() {
                        signs |= u32::from(*x < 0.0) << bit;
                    }
                    *byte = signs as u8;
                }
                continue;
            }
            for (bit, x) in (first..).zip(part) {
                word[bit / 8] |= u8::from(*x < 0.0) << (bit % 8);
            }
        }
    }
}

impl GroupLevels {
    fn new() -> Self {
        let zeros = [0.0; DIM_MAX];
        Self { zeros, steps: zeros, inverse: zeros, errors: zeros, sums: zeros }
    }

    /// Sums the errors of each group of `span` channels, in order; groups take turns.
    #[inline(always)]
    fn sum_errors(&mut self, dim: usize, span: usize) {
        let pairs = dim.div_ceil(span);
        self.sums[..pairs].fill(0.0);
        for at in 0..span {
            let errors = self.errors[..dim][at..].iter().step_by(span);
            for (sum, error) in self.sums[..pairs].iter_mut().zip(errors) {
                *sum += error;
            }
        }
    }

    #[inline(always)]
    fn set_group(&mut self, channels: Range<usize>, zero: f32, step: f32) {
        self.zeros[channels.clone()].fill(zero);
        self.steps[channels.clone()].fill(step);
        // A step of zero has a single code.
        self.inverse[channels].fill(if step > 0.0 { step.recip() } else { 0.0 });
    }

    #[inline(always)]
    fn copy_channels(&mut self, other: &Self, channels: Range<usize>) {
        self.zeros[channels.clone()].copy_from_slice(&other.zeros[channels.clone()]);
        self.steps[channels.clone()].copy_from_slice(&other.steps[channels.clone()]);
        self.inverse[channels.clone()].copy_from_slice(&other.inverse[channels]);
    }

    /// Squared errors of each channel over `rows`.
    #[inline(always)]
    fn add_errors(&mut self, rows: &[f32], dim: usize, top: f32) {
        let Self { zeros, steps, inverse, errors, .. } = self;
        errors[..dim].fill(0.0);
        for row in rows.chunks_exact(dim) {
            let levels = zeros.iter().zip(steps.iter()).zip(inverse.iter());
            for ((x, sum), ((zero, step), inverse)) in row.iter().zip(errors.iter_mut()).zip(levels)
            {
                let distance = (x - zero).abs();
                let level = distance * inverse;
                let level = (if level < top { level } else { top } + ROUND) - ROUND;
                let off = distance - level * step;
                *sum += off * off;
            }
        }
        for (error, step) in errors[..dim].iter_mut().zip(steps.iter()) {
            // An infinite step has no finite error.
            *error = if step.is_finite() { *error } else { f32::INFINITY };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupAxis, UniformStep};

    fn hybrid(axis: GroupAxis, group: Option<u16>) -> Hybrid {
        Hybrid { base: Uniform::new(UniformStep::Bits(2), axis, group, 3) }
    }

    /// Codes, scales and values of one page.
    fn round_trip(hybrid: &Hybrid, rows: &[f32], dim: usize) -> (Vec<u8>, Vec<f32>) {
        let (mut symbols, mut scales) = (Vec::new(), Vec::new());
        append_codes(hybrid, RowBlock { rows, dim }, &mut symbols, &mut scales).unwrap();
        let tokens = rows.len() / dim;
        assert_eq!(scales.len(), hybrid.scale_bytes(tokens, dim));
        let mut out = vec![0f32; rows.len()];
        let mut loaded = ScaleRow::default();
        for (row, (out, symbols)) in
            out.chunks_exact_mut(dim).zip(symbols.chunks_exact(dim)).enumerate()
        {
            let scales = PageScales { bytes: &scales, tokens };
            hybrid.dequantize_row(scales, row, symbols, &mut loaded, out);
        }
        (scales, out)
    }

    #[test]
    fn a_group_on_one_side_of_zero_is_asymmetric_and_one_around_it_is_symmetric() {
        // Two groups of one row: what four levels from 10 to 13 hold exactly, and what seven
        // levels around zero do.
        let row = [10.0, 11.0, 12.0, 13.0, -3.0, -1.0, 2.0, 0.0];
        let (scales, out) = round_trip(&hybrid(GroupAxis::Token, Some(4)), &row, 8);
        assert_eq!(out, row);
        assert_eq!(scales[0], 0b10);
        assert_eq!(scales[1..5], 10f32.to_le_bytes());
        assert_eq!(scales[5..9], [0b0011, 0, 0, 0]);
        assert_eq!(scales[9..13], [0x00, 0x3C, 0x00, 0x3C]);
    }

    #[test]
    fn words_have_a_bit_per_value_and_hold_a_zero_point() {
        let bytes = |axis, group, tokens| hybrid(axis, group).scale_bytes(tokens, 128);
        // Mask, words and steps of 256 groups of 32, as InnerQ counts them.
        assert_eq!(bytes(GroupAxis::Token, Some(32), 64), 256 / 8 + 256 * (4 + 2));
        assert_eq!(bytes(GroupAxis::Channel, Some(32), 64), 256 / 8 + 256 * (4 + 2));
        assert_eq!(bytes(GroupAxis::Channel, None, 64), 128 / 8 + 128 * (8 + 2));
        assert_eq!(bytes(GroupAxis::Channel, Some(32), 3), 128 / 8 + 128 * (4 + 2));
        assert_eq!(bytes(GroupAxis::Block, None, 64), 1 + 64 * 128 / 8 + 2);
    }

    #[test]
    fn the_better_mode_is_taken_for_every_group() {
        let value = |i: usize| ((i * 7919 % 1009) as f32 / 1009.0 - 0.4) * (1 + i % 3) as f32;
        let rows: Vec<f32> = (0..40 * 32).map(value).collect();
        for (axis, group) in [(GroupAxis::Token, Some(8)), (GroupAxis::Channel, Some(16))] {
            let mixed = hybrid(axis, group);
            let (_, out) = round_trip(&mixed, &rows, 32);
            let squared = |index: &[usize]| -> f32 {
                index.iter().map(|i| (out[*i] - rows[*i]).powi(2)).sum()
            };
            let [mut wide, mut even] = [GroupLevels::new(), GroupLevels::new()];
            let share = mixed.base.rows_per_scale(40);
            for (scale_row, part) in rows.chunks(share * 32).enumerate() {
                let mut ranges = [(); 3].map(|()| vec![0f32; mixed.base.row_pairs(32)]);
                mixed.fit_groups(
                    pulp::Scalar,
                    RowBlock { rows: part, dim: 32 },
                    2.0,
                    &mut ranges,
                    [&mut wide, &mut even],
                );
                let span = mixed.base.channels_per_pair(32);
                for pair in 0..mixed.base.row_pairs(32) {
                    let members: Vec<usize> = (0..part.len())
                        .filter(|i| i % 32 / span == pair)
                        .map(|i| scale_row * share * 32 + i)
                        .collect();
                    let sum = |levels: &GroupLevels| -> f32 {
                        levels.errors[pair * span..(pair + 1) * span].iter().sum()
                    };
                    let least = sum(&wide).min(sum(&even));
                    assert!((squared(&members) - least).abs() <= 1e-4 * (1e-3 + least));
                }
            }
        }
    }
}
