//! Equidistant levels between a group's minimum and maximum: KIVI's bits and KVComp's relative
//! step (§3.1.1), with the group along tokens of a channel, channels of a token, or the page.
//!
//! Scales are f16, in *scale rows*: all minima of the row, then all its steps. A scale row covers
//! a group of tokens (channel axis: one pair per channel), one token (token axis: one pair per
//! group of channels) or the page (block axis: one pair). The minimum is rounded down and the
//! step up, so the levels cover the group and the error is at most half the stored step.

use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::float::largest_magnitude;
use super::ranges::GroupedRows;
use super::ranges::{
    LANES, append_pairs, f16_at_least, f16_at_most, group_extremes, run_extremes, step_reciprocal,
};
use super::stored::{StoredLayout, UniformGroups};
use super::tiles::TileEncoder;
use super::uniform_spec::UniformLevels;
use super::{CodeShape, GroupScales, HeadQuantizer, PageScales, PayloadRows, Unquantizable};
use crate::bits::{self, CodeLayout};
use crate::page::id;
use crate::row_block::RowBlock;
use crate::simd::dispatch_simd;
use crate::{GroupAxis, PageBytes, UniformMode, UniformStep};
use half::f16;
use kvd_core::{DType, Geometry, Side};
use pulp::{Simd, WithSimd};

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// Adding this to `0 <= x < 2^22` rounds to an integer (ties to even) in the low mantissa bits.
pub(super) const ROUND: f32 = 8_388_608.0;

/// Codes of a group that are made together.
const CODES: usize = 32;

/// A uniform quantizer.
#[derive(Clone, Debug)]
pub(crate) struct Uniform {
    step: UniformStep,
    pub(super) axis: GroupAxis,
    pub(super) group: Option<usize>,
    /// Largest code, or magnitude of one.
    pub(super) top: u16,
    /// Part of a group's values that keep their magnitude, where others are cut.
    pub(super) clip: Option<f32>,
}

/// One scale row as f32, for the rows that share it.
pub(crate) struct ScaleRow {
    /// Which scale row is loaded.
    pub(super) row: Option<usize>,
    pub(super) minima: [f32; DIM_MAX],
    pub(super) steps: [f32; DIM_MAX],
    /// Ones where a channel's codes are magnitudes with a sign apart.
    pub(super) signed: [u8; DIM_MAX],
}

impl Default for ScaleRow {
    fn default() -> Self {
        let zeros = [0.0; DIM_MAX];
        Self { row: None, minima: zeros, steps: zeros, signed: [0; DIM_MAX] }
    }
}

impl Uniform {
    pub(crate) fn new(step: UniformStep, axis: GroupAxis, group: Option<u16>, top: u16) -> Self {
        Self { step, axis, group: group.map(usize::from), top, clip: None }
    }

    /// With a part of a group's values that keep their magnitude.
    pub(super) fn with_clip(self, clip: Option<f32>) -> Self {
        Self { clip, ..self }
    }

    /// Pairs in one scale row.
    pub(super) fn row_pairs(&self, dim: usize) -> usize {
        match self.axis {
            GroupAxis::Channel => dim,
            GroupAxis::Token => dim.div_ceil(self.group.unwrap_or(dim)),
            GroupAxis::Block => 1,
        }
    }

    /// Tokens that share a scale row.
    pub(super) fn rows_per_scale(&self, tokens: usize) -> usize {
        match self.axis {
            GroupAxis::Channel => self.group.unwrap_or(tokens),
            GroupAxis::Token => 1,
            GroupAxis::Block => tokens,
        }
    }

    /// Groups in a page.
    pub(super) fn page_groups(&self, tokens: usize, dim: usize) -> usize {
        tokens.div_ceil(self.rows_per_scale(tokens)) * self.row_pairs(dim)
    }

    /// Rows with groups cut to their magnitude of rank `floor(clip * n)`, where any is to be.
    fn clip_groups(&self, block: RowBlock<'_>) -> Result<Option<Vec<f32>>, Unquantizable> {
        let Some(clip) = self.clip else { return Ok(None) };
        // What is no number must not become one.
        largest_magnitude(block.rows)?;
        let (mut rows, mut magnitudes) = (block.rows.to_vec(), Vec::new());
        let span = self.channels_per_pair(block.dim);
        for group in rows.chunks_exact_mut(block.dim).flat_map(|row| row.chunks_mut(span)) {
            magnitudes.clear();
            magnitudes.extend(group.iter().map(|x| x.abs()));
            let rank = ((clip * group.len() as f32) as usize).min(group.len() - 1);
            let most = *magnitudes.select_nth_unstable_by(rank, f32::total_cmp).1;
            group.iter_mut().for_each(|x| *x = x.clamp(-most, most));
        }
        Ok(Some(rows))
    }

    pub(super) fn of_groups(groups: &UniformGroups) -> Self {
        let UniformGroups { axis, group, top, .. } = *groups;
        Self { step: UniformStep::Bits(groups.bits as u8), axis, group, top, clip: None }
    }

    pub(super) fn groups_of_side(&self, mode: UniformMode) -> UniformGroups {
        let top = match mode {
            UniformMode::Sym => 2 * self.top,
            _ => self.top,
        };
        let bits = u16::BITS - top.leading_zeros();
        UniformGroups { axis: self.axis, group: self.group, bits, mode, top: self.top }
    }

    /// The scale row of a row of the page.
    pub(super) fn scale_row(&self, row: usize) -> usize {
        match (self.axis, self.group) {
            (GroupAxis::Channel, Some(group)) => row / group,
            (GroupAxis::Token, _) => row,
            (GroupAxis::Channel, None) | (GroupAxis::Block, _) => 0,
        }
    }

    pub(crate) fn code_bits(&self) -> u32 {
        u16::BITS - self.top.leading_zeros()
    }

    /// Channels that share a pair inside a row.
    pub(super) fn channels_per_pair(&self, dim: usize) -> usize {
        match self.axis {
            GroupAxis::Channel => 1,
            GroupAxis::Token => self.group.unwrap_or(dim).min(dim),
            GroupAxis::Block => dim,
        }
    }

    /// Appends scales and codes of a page of fixed width; `absmax` is the largest magnitude.
    pub(crate) fn append_page(
        &self,
        absmax: f32,
        block: RowBlock<'_>,
        to: TileLayout<'_>,
        symbols: &mut Vec<u16>,
        out: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        let TileLayout { layout, side } = to;
        let RowBlock { rows, dim } = block;
        let in_tiles = dispatch_simd(EncodeUniform {
            by: self,
            absmax,
            rows: RowBlock { rows, dim },
            to: TileLayout { layout, side },
            out,
        })?;
        if let Some((minima, inverse)) = in_tiles {
            symbols.clear();
            symbols.resize(rows.len(), 0);
            dispatch_simd(QuantizeGroups {
                by: self,
                rows: RowBlock { rows, dim },
                pairs: GroupScales { minima: &minima, inverse: &inverse },
                symbols,
            });
            bits::pack_codes(layout, symbols, out);
        }
        Ok(())
    }

    /// Minima of all groups and the reciprocals of their steps; appends the scales.
    #[inline(always)]
    fn fit_group_pairs<S: Simd>(
        &self,
        simd: S,
        absmax: f32,
        block: RowBlock<'_>,
        scales: &mut Vec<u8>,
    ) -> Result<(Vec<f32>, Vec<f32>), Unquantizable> {
        let RowBlock { rows, dim } = block;
        let tokens = rows.len() / dim;
        let share = self.rows_per_scale(tokens) * dim;
        let (pairs, span) = (self.row_pairs(dim), self.channels_per_pair(dim));
        let [mut minima, mut steps] = [(); 2].map(|()| vec![0f32; self.page_groups(tokens, dim)]);
        if self.in_runs(dim) && span.is_multiple_of(LANES) {
            run_extremes(rows, span, &mut minima, &mut steps);
        } else {
            let groups = minima.chunks_exact_mut(pairs).zip(steps.chunks_exact_mut(pairs));
            for (rows, (low, high)) in rows.chunks(share).zip(groups) {
                group_extremes(simd, GroupedRows { rows, dim, span }, low, high);
            }
        }
        self.fit_steps(&mut minima, &mut steps, absmax)?;
        append_pairs(&minima, &steps, pairs, scales);
        steps.iter_mut().for_each(|step| *step = step_reciprocal(*step));
        Ok((minima, steps))
    }

    /// Whether groups follow one another.
    fn in_runs(&self, dim: usize) -> bool {
        self.axis == GroupAxis::Token && dim.is_multiple_of(self.channels_per_pair(dim))
    }

    /// The codes of all rows, from minima and the reciprocals of steps.
    #[inline(always)]
    fn quantize_all_rows(&self, block: RowBlock<'_>, groups: GroupScales<'_>, symbols: &mut [u16]) {
        let GroupScales { minima, inverse } = groups;
        let RowBlock { rows, dim } = block;
        let (pairs, span) = (self.row_pairs(dim), self.channels_per_pair(dim));
        if self.in_runs(dim) {
            let groups = minima.iter().zip(inverse);
            let parts = rows.chunks_exact(span).zip(symbols.chunks_exact_mut(span));
            for ((part, symbols), (minimum, inverse)) in parts.zip(groups) {
                self.quantize_group(part, *minimum, *inverse, symbols);
            }
            return;
        }
        let share = self.rows_per_scale(rows.len() / dim) * dim;
        let groups = minima.chunks_exact(pairs).zip(inverse.chunks_exact(pairs));
        let groups = groups.map(|(minima, inverse)| GroupScales { minima, inverse });
        let rows = rows.chunks(share).zip(symbols.chunks_mut(share));
        for ((rows, symbols), groups) in rows.zip(groups) {
            for (row, symbols) in rows.chunks_exact(dim).zip(symbols.chunks_exact_mut(dim)) {
                self.quantize_row(row, span, groups, symbols);
            }
        }
    }

    /// From minima and maxima to minima and steps, exactly representable in f16, that cover them.
    #[inline(always)]
    fn fit_steps(
        &self,
        low: &mut [f32],
        high: &mut [f32],
        absmax: f32,
    ) -> Result<(), Unquantizable> {
        let (part, mut all) = (self.step_fraction(), true);
        for (low, high) in low.iter_mut().zip(high) {
            let minimum = f16_at_most(*low);
            let step = f16_at_least((*high - minimum) * part);
            all &= minimum.is_finite() & serves_group(step, (*high - *low) * part, absmax);
            (*low, *high) = (minimum, step);
        }
        if all { Ok(()) } else { Err(Unquantizable) }
    }

    pub(super) fn levels_of_groups(&self) -> UniformLevels {
        UniformLevels { step_part: self.step_fraction(), clip: self.clip }
    }

    /// A level's part of what a group spans.
    fn step_fraction(&self) -> f32 {
        match self.step {
            UniformStep::Bits(_) => f32::from(self.top).recip(),
            UniformStep::Relative(rel) => rel,
        }
    }

    /// The step, exactly representable in f16, for a group that spans `range`.
    #[inline(always)]
    pub(super) fn step_for(&self, range: f32, absmax: f32) -> Result<f32, Unquantizable> {
        let wanted = range * self.step_fraction();
        check_step(f16_at_least(wanted), wanted, absmax)
    }

    /// The codes of one row, from minima and the reciprocals of steps.
    #[inline(always)]
    fn quantize_row(&self, row: &[f32], span: usize, groups: GroupScales<'_>, symbols: &mut [u16]) {
        let GroupScales { minima, inverse } = groups;
        let top = f32::from(self.top);
        let pairs = minima.iter().zip(inverse);
        if span == 1 {
            for ((symbol, x), (minimum, inverse)) in symbols.iter_mut().zip(row).zip(pairs) {
                *symbol = quantize_value(*x, *minimum, *inverse, top);
            }
            return;
        }
        let parts = symbols.chunks_mut(span).zip(row.chunks(span));
        for ((symbols, part), (minimum, inverse)) in parts.zip(pairs) {
            self.quantize_group(part, *minimum, *inverse, symbols);
        }
    }

    /// The codes of values of one group.
    #[inline(always)]
    fn quantize_group(&self, values: &[f32], minimum: f32, inverse: f32, symbols: &mut [u16]) {
        let top = f32::from(self.top);
        let (whole, rest) = values.as_chunks::<CODES>();
        let (to, last) = symbols.as_chunks_mut::<CODES>();
        for (symbols, part) in to.iter_mut().zip(whole) {
            for (symbol, x) in symbols.iter_mut().zip(part) {
                *symbol = quantize_value(*x, minimum, inverse, top);
            }
        }
        for (symbol, x) in last.iter_mut().zip(rest) {
            *symbol = quantize_value(*x, minimum, inverse, top);
        }
    }
}

/// The level nearest to `x`, from a minimum and the reciprocal of a step.
#[inline(always)]
fn quantize_value(x: f32, minimum: f32, inverse: f32, top: f32) -> u16 {
    let level = (x - minimum) * inverse;
    let level = if level < top { level } else { top };
    // Far below 2^15, which lets the compiler narrow two registers at once.
    ((level + ROUND).to_bits() & 0x7FFF) as u16
}

impl HeadQuantizer for Uniform {
    fn page_id(&self) -> u8 {
        id::UNIFORM
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Uniform(self.groups_of_side(UniformMode::Asym))
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        CodeShape { per_row: dim, bits: self.code_bits() }
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        self.page_groups(tokens, dim) * 4
    }

    /// Codes of fixed width go straight to where they lie.
    fn append_payload(
        &self,
        rows: PayloadRows<'_>,
        symbols: &mut Vec<u16>,
        out: &mut Vec<u8>,
    ) -> Option<Result<PageBytes, Unquantizable>> {
        rows.fixed_width.then(|| {
            let PayloadRows { block, absmax, side, .. } = rows;
            let clipped = self.clip_groups(block)?;
            let absmax = absmax.filter(|_| clipped.is_none());
            let block = RowBlock { rows: clipped.as_deref().unwrap_or(block.rows), ..block };
            let absmax = absmax.map_or_else(|| largest_magnitude(block.rows), Ok)?;
            let (start, tokens) = (out.len(), block.rows.len() / block.dim);
            let layout = CodeLayout::new(side, tokens, block.dim, self.code_bits());
            let to = TileLayout { layout: &layout, side };
            self.append_page(absmax, block, to, symbols, out)?;
            let scales = self.scale_bytes(tokens, block.dim) as u64;
            let codes = (out.len() - start) as u64 - scales;
            Ok(PageBytes { scales, codes, ..PageBytes::default() })
        })
    }

    fn quantize_rows(
        &self,
        block: RowBlock<'_>,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        let clipped = self.clip_groups(block)?;
        let block = RowBlock { rows: clipped.as_deref().unwrap_or(block.rows), ..block };
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
        let pairs = self.row_pairs(out.len());
        let scale_row = self.scale_row(row);
        if loaded.row != Some(scale_row) {
            let bytes = &scales.bytes[scale_row * pairs * 4..][..pairs * 4];
            DType::F16.widen_values(&bytes[..pairs * 2], &mut loaded.minima[..pairs]);
            DType::F16.widen_values(&bytes[pairs * 2..], &mut loaded.steps[..pairs]);
            loaded.row = Some(scale_row);
        }
        let span = self.channels_per_pair(out.len());
        let scale = loaded.minima[..pairs].iter().zip(&loaded.steps[..pairs]);
        if span == 1 {
            for ((out, symbol), (minimum, step)) in out.iter_mut().zip(symbols).zip(scale) {
                *out = minimum + f32::from(*symbol) * step;
            }
            return;
        }
        let parts = out.chunks_mut(span).zip(symbols.chunks(span));
        for ((out, symbols), (minimum, step)) in parts.zip(scale) {
            for (out, symbol) in out.iter_mut().zip(symbols) {
                *out = minimum + f32::from(*symbol) * step;
            }
        }
    }

    fn uniform_levels(&self) -> Option<UniformLevels> {
        Some(self.levels_of_groups())
    }
}

impl CodeLoop for Uniform {
    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        simd: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block, absmax } = rows;
        let CodeSink { symbols, scales } = into;
        let (minima, inverse) = self.fit_group_pairs(simd, absmax, block, scales)?;
        self.quantize_all_rows(block, GroupScales { minima: &minima, inverse: &inverse }, symbols);
        Ok(())
    }
}

/// The side whose codes are packed, and their layout in the page.
#[derive(Clone, Copy)]
pub(crate) struct TileLayout<'a> {
    pub(crate) layout: &'a CodeLayout,
    pub(crate) side: Side,
}

/// [`Uniform::append_page`] but for codes that are no whole tiles: of those, what makes them.
struct EncodeUniform<'a> {
    by: &'a Uniform,
    absmax: f32,
    rows: RowBlock<'a>,
    to: TileLayout<'a>,
    out: &'a mut Vec<u8>,
}

impl WithSimd for EncodeUniform<'_> {
    type Output = Result<Option<(Vec<f32>, Vec<f32>)>, Unquantizable>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Self { by, absmax, rows, to: TileLayout { layout, side }, out } = self;
        let (minima, inverse) = by.fit_group_pairs(simd, absmax, rows, out)?;
        let tiles = TileEncoder { by, side, rows, minima: &minima, inverse: &inverse };
        let appended = tiles.append_tiles(simd, layout, out);
        Ok((!appended).then_some((minima, inverse)))
    }
}

/// The codes of rows whose groups are known.
struct QuantizeGroups<'a> {
    by: &'a Uniform,
    rows: RowBlock<'a>,
    pairs: GroupScales<'a>,
    symbols: &'a mut [u16],
}

impl WithSimd for QuantizeGroups<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.by.quantize_all_rows(self.rows, self.pairs, self.symbols);
    }
}

/// A stored step, if it serves. Below f16's range it is coarser than wanted. That is fine for a
/// group that hardly contributes, and no quantization at all if the whole page is that small.
pub(super) fn check_step(step: f32, wanted: f32, absmax: f32) -> Result<f32, Unquantizable> {
    if serves_group(step, wanted, absmax) { Ok(step) } else { Err(Unquantizable) }
}

#[inline(always)]
fn serves_group(step: f32, wanted: f32, absmax: f32) -> bool {
    step.is_finite() & !((step > 2.0 * wanted) & (step > absmax / 1024.0))
}

/// Gives each channel the step of its group of `span` channels.
pub(super) fn spread_steps(bytes: &[u8], span: usize, steps: &mut [f32]) {
    if span == 1 {
        return DType::F16.widen_values(bytes, steps);
    }
    for (part, step) in steps.chunks_mut(span).zip(bytes.as_chunks::<2>().0) {
        part.fill(f16::from_le_bytes(*step).to_f32());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_has_no_code() {
        for axis in [GroupAxis::Channel, GroupAxis::Token, GroupAxis::Block] {
            let uniform = Uniform::new(UniformStep::Bits(4), axis, None, 15);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in 0..8 {
                    let mut rows = [0.5; 8];
                    rows[at] = bad;
                    let (mut symbols, mut scales) = (Vec::new(), Vec::new());
                    let block = RowBlock { rows: &rows, dim: 4 };
                    let result = append_codes(&uniform, block, &mut symbols, &mut scales);
                    assert!(result.is_err(), "{bad} at {at}");
                }
            }
        }
    }
}
