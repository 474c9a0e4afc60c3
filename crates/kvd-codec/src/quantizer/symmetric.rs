//! `uniform(..,mode=sym)`: levels around zero, `value = (code - top) * step` (InnerQ eq. 13).
//!
//! `b` bits of magnitude and a sign make `2^(b+1) - 1` levels. A scale row holds one f16 step per
//! group and nothing else; the step is rounded up, so that the error is at most half of it.

use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::ranges::{append_f16, largest_magnitudes, step_reciprocal};
use super::stored::StoredLayout;
use super::uniform::{ROUND, ScaleRow, Uniform, spread_steps};
use super::uniform_spec::UniformLevels;
use super::{CodeShape, HeadQuantizer, PageScales, Unquantizable};
use crate::UniformMode;
use crate::page::id;
use crate::row_block::RowBlock;
use kvd_core::Geometry;
use pulp::Simd;

/// A uniform quantizer without zero points.
#[derive(Clone, Debug)]
pub(crate) struct Symmetric {
    /// Groups and the width of a level.
    pub(crate) base: Uniform,
}

impl Symmetric {
    #[inline(always)]
    fn quantize_row(&self, row: &[f32], span: usize, inverse: &[f32], symbols: &mut [u16]) {
        let top = f32::from(self.base.top);
        // Between 0 and 2 top before it is rounded.
        let code = |x: f32, inverse: f32| {
            let level = (x * inverse).clamp(-top, top) + top;
            (level + ROUND).to_bits() as u16
        };
        if span == 1 {
            for ((symbol, x), inverse) in symbols.iter_mut().zip(row).zip(inverse) {
                *symbol = code(*x, *inverse);
            }
            return;
        }
        let parts = symbols.chunks_mut(span).zip(row.chunks(span));
        for ((symbols, part), inverse) in parts.zip(inverse) {
            for (symbol, x) in symbols.iter_mut().zip(part) {
                *symbol = code(*x, *inverse);
            }
        }
    }
}

impl HeadQuantizer for Symmetric {
    fn page_id(&self) -> u8 {
        id::SYMMETRIC
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Uniform(self.base.groups_of_side(UniformMode::Sym))
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        let bits = u32::BITS - (2 * u32::from(self.base.top)).leading_zeros();
        CodeShape { per_row: dim, bits }
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        2 * self.base.page_groups(tokens, dim)
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
        let (pairs, span) =
            (self.base.row_pairs(out.len()), self.base.channels_per_pair(out.len()));
        let scale_row = self.base.scale_row(row);
        if loaded.row != Some(scale_row) {
            let steps = &scales.bytes[scale_row * pairs * 2..][..pairs * 2];
            spread_steps(steps, span, &mut loaded.steps[..out.len()]);
            loaded.row = Some(scale_row);
        }
        let top = f32::from(self.base.top);
        for ((out, symbol), step) in out.iter_mut().zip(symbols).zip(&loaded.steps) {
            *out = (f32::from(*symbol) - top) * step;
        }
    }

    fn uniform_levels(&self) -> Option<UniformLevels> {
        Some(self.base.levels_of_groups())
    }
}

impl CodeLoop for Symmetric {
    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        _: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block: RowBlock { rows, dim }, absmax } = rows;
        let CodeSink { symbols, scales } = into;
        let base = &self.base;
        let (pairs, span) = (base.row_pairs(dim), base.channels_per_pair(dim));
        let share = base.rows_per_scale(rows.len() / dim) * dim;
        let mut buffer = [0f32; Geometry::HEAD_DIM_MAX as usize];
        let steps = &mut buffer[..pairs];
        for (rows, symbols) in rows.chunks(share).zip(symbols.chunks_mut(share)) {
            largest_magnitudes(rows, dim, span, steps);
            for magnitude in steps.iter_mut() {
                *magnitude = base.step_for(*magnitude, absmax)?;
            }
            append_f16(steps, scales);
            // From here on the steps' reciprocals.
            steps.iter_mut().for_each(|step| *step = step_reciprocal(*step));
            for (row, symbols) in rows.chunks_exact(dim).zip(symbols.chunks_exact_mut(dim)) {
                self.quantize_row(row, span, steps, symbols);
            }
        }
        Ok(())
    }
}
