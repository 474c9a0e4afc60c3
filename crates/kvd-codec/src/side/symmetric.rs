//! `uniform(..,mode=sym)`: levels around zero, `value = (code - top) * step` (InnerQ eq. 13).
//!
//! `b` bits of magnitude and a sign make `2^(b+1) - 1` levels. A scale row holds one f16 step per
//! group and nothing else; the step is rounded up, so that the error is at most half of it.

use super::Unquantizable;
use super::float::largest_magnitude;
use super::uniform::{ROUND, ScaleRow, Uniform, spread_steps};
use half::f16;
use kvd_core::Geometry;

/// A uniform quantizer without zero points.
#[derive(Clone, Debug)]
pub(crate) struct Symmetric {
    /// Groups and the width of a level.
    pub(crate) base: Uniform,
}

impl Symmetric {
    pub(crate) fn code_bits(&self) -> u32 {
        u32::BITS - (2 * u32::from(self.base.top)).leading_zeros()
    }

    pub(crate) fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        2 * self.base.groups(tokens, dim)
    }

    pub(crate) fn quantize(
        &self,
        rows: &[f32],
        dim: usize,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        let absmax = largest_magnitude(rows)?;
        let base = &self.base;
        let (pairs, span) = (base.pairs(dim), base.channels_per_pair(dim));
        let share = base.rows_per_scale(rows.len() / dim) * dim;
        let mut buffer = [0f32; Geometry::HEAD_DIM_MAX as usize];
        let inverse = &mut buffer[..pairs];
        symbols.reserve(rows.len());
        for rows in rows.chunks(share) {
            largest(rows, dim, span, inverse);
            for magnitude in inverse.iter_mut() {
                let step = base.step_for(*magnitude, absmax)?;
                scales.extend(f16::from_f32(step).to_le_bytes());
                // From here on the step's reciprocal; a step of zero has a single code.
                *magnitude = if step > 0.0 { step.recip() } else { 0.0 };
            }
            for row in rows.chunks_exact(dim) {
                self.codes(row, span, inverse, symbols);
            }
        }
        Ok(())
    }

    fn codes(&self, row: &[f32], span: usize, inverse: &[f32], symbols: &mut Vec<u16>) {
        let top = f32::from(self.base.top);
        // Between 0 and 2 top before it is rounded.
        let code = |x: f32, inverse: f32| {
            let level = (x * inverse).clamp(-top, top) + top;
            (level + ROUND).to_bits() as u16
        };
        if span == 1 {
            symbols.extend(row.iter().zip(inverse).map(|(x, inverse)| code(*x, *inverse)));
            return;
        }
        for (part, inverse) in row.chunks(span).zip(inverse) {
            symbols.extend(part.iter().map(|x| code(*x, *inverse)));
        }
    }

    /// Writes row `row` from its codes; `loaded` keeps the scale row from call to call.
    pub(crate) fn dequantize_row(
        &self,
        scales: &[u8],
        row: usize,
        symbols: &[u16],
        loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        let (pairs, span) = (self.base.pairs(out.len()), self.base.channels_per_pair(out.len()));
        let scale_row = self.base.scale_row(row);
        if loaded.row != Some(scale_row) {
            let steps = &scales[scale_row * pairs * 2..][..pairs * 2];
            spread_steps(steps, span, &mut loaded.steps[..out.len()]);
            loaded.row = Some(scale_row);
        }
        let top = f32::from(self.base.top);
        for ((out, symbol), step) in out.iter_mut().zip(symbols).zip(&loaded.steps) {
            *out = (f32::from(*symbol) - top) * step;
        }
    }
}

/// The largest magnitude of each group over `rows`.
pub(super) fn largest(rows: &[f32], dim: usize, span: usize, largest: &mut [f32]) {
    largest.fill(0.0);
    for row in rows.chunks_exact(dim) {
        if span == 1 {
            for (x, largest) in row.iter().zip(largest.iter_mut()) {
                *largest = if x.abs() > *largest { x.abs() } else { *largest };
            }
            continue;
        }
        for (part, largest) in row.chunks(span).zip(largest.iter_mut()) {
            *largest = part.iter().fold(*largest, |m, x| if x.abs() > m { x.abs() } else { m });
        }
    }
}
