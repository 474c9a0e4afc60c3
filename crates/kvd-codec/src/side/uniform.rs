//! Equidistant levels between a group's minimum and maximum: KIVI's bits and KVComp's relative
//! step (§3.1.1), with the group along tokens of a channel, channels of a token, or the page.
//!
//! Scales are f16, in *scale rows*: all minima of the row, then all its steps. A scale row covers
//! a group of tokens (channel axis: one pair per channel), one token (token axis: one pair per
//! group of channels) or the page (block axis: one pair). The minimum is rounded down and the
//! step up, so the levels cover the group and the error is at most half the stored step.

use super::Unquantizable;
use super::float::largest_magnitude;
use crate::{GroupAxis, UniformMode, UniformStep};
use half::f16;
use kvd_core::{DType, Geometry};

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// Adding this to `0 <= x < 2^22` rounds to an integer (ties to even) in the low mantissa bits.
pub(super) const ROUND: f32 = 8_388_608.0;

/// A uniform quantizer.
#[derive(Clone, Debug)]
pub(crate) struct Uniform {
    step: UniformStep,
    pub(super) axis: GroupAxis,
    pub(super) group: Option<usize>,
    /// Largest code, or magnitude of one.
    pub(super) top: u16,
}

/// How a uniform side groups its values, for kernels that read its pages themselves.
///
/// A scale row is all its minima, where the mode has them, then all its steps, f16;
/// `docs/format.md` says which tokens and channels share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniformGroups {
    /// What values of a group have in common.
    pub axis: GroupAxis,
    /// Values of a group; `None` is the whole extent of the axis in the page.
    pub group: Option<usize>,
    /// Bits of a code.
    pub bits: u32,
    /// Where the levels stand.
    pub mode: UniformMode,
    /// Largest code; in the symmetric mode the largest magnitude of one, half of the largest code.
    pub top: u16,
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
        Self { step, axis, group: group.map(usize::from), top }
    }

    /// Pairs in one scale row.
    pub(super) fn pairs(&self, dim: usize) -> usize {
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
    pub(super) fn groups(&self, tokens: usize, dim: usize) -> usize {
        tokens.div_ceil(self.rows_per_scale(tokens)) * self.pairs(dim)
    }

    pub(super) fn of_groups(groups: &UniformGroups) -> Self {
        let UniformGroups { axis, group, top, .. } = *groups;
        Self { step: UniformStep::Bits(groups.bits as u8), axis, group, top }
    }

    pub(super) fn groups_of_side(&self, mode: UniformMode) -> UniformGroups {
        let top = match mode {
            UniformMode::Sym => 2 * self.top,
            _ => self.top,
        };
        let bits = u16::BITS - top.leading_zeros();
        UniformGroups { axis: self.axis, group: self.group, bits, mode, top: self.top }
    }

    pub(crate) fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        self.groups(tokens, dim) * 4
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

    pub(crate) fn quantize(
        &self,
        rows: &[f32],
        dim: usize,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        let absmax = largest_magnitude(rows)?;
        let share = self.rows_per_scale(rows.len() / dim) * dim;
        let (pairs, span) = (self.pairs(dim), self.channels_per_pair(dim));
        let mut scale = ScaleRow::default();
        symbols.reserve(rows.len());
        for rows in rows.chunks(share) {
            let (low, high) = (&mut scale.minima[..pairs], &mut scale.steps[..pairs]);
            extremes(rows, dim, span, low, high);
            for (low, high) in low.iter_mut().zip(high.iter_mut()) {
                (*low, *high) = self.fit(*low, *high, absmax)?;
            }
            for pair in [&scale.minima, &scale.steps] {
                scales.extend(pair[..pairs].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()));
            }
            // From here on the steps' reciprocals; a step of zero has a single code.
            for step in &mut scale.steps[..pairs] {
                *step = if *step > 0.0 { step.recip() } else { 0.0 };
            }
            for row in rows.chunks_exact(dim) {
                self.codes(row, span, &scale, symbols);
            }
        }
        Ok(())
    }

    /// Minimum and step, exactly representable in f16, that cover `low..=high`.
    fn fit(&self, low: f32, high: f32, absmax: f32) -> Result<(f32, f32), Unquantizable> {
        let minimum = f16_at_most(low);
        let part = self.part();
        let step = f16_at_least((high - minimum) * part);
        if !minimum.is_finite() {
            return Err(Unquantizable);
        }
        Ok((minimum, checked(step, (high - low) * part, absmax)?))
    }

    /// A level's part of what a group spans.
    pub(crate) fn part(&self) -> f32 {
        match self.step {
            UniformStep::Bits(_) => f32::from(self.top).recip(),
            UniformStep::Relative(rel) => rel,
        }
    }

    /// The step, exactly representable in f16, for a group that spans `range`.
    pub(super) fn step_for(&self, range: f32, absmax: f32) -> Result<f32, Unquantizable> {
        let wanted = range * self.part();
        checked(f16_at_least(wanted), wanted, absmax)
    }

    /// Appends the codes of one row; `scale.steps` holds reciprocals.
    fn codes(&self, row: &[f32], span: usize, scale: &ScaleRow, symbols: &mut Vec<u16>) {
        let top = f32::from(self.top);
        let code = |x: f32, minimum: f32, inverse: f32| {
            let level = ((x - minimum) * inverse).min(top);
            (level + ROUND).to_bits() as u16
        };
        let pairs = scale.minima.iter().zip(&scale.steps);
        if span == 1 {
            symbols.extend(row.iter().zip(pairs).map(|(x, (m, i))| code(*x, *m, *i)));
            return;
        }
        for (part, (minimum, inverse)) in row.chunks(span).zip(pairs) {
            symbols.extend(part.iter().map(|x| code(*x, *minimum, *inverse)));
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
        let pairs = self.pairs(out.len());
        let scale_row = self.scale_row(row);
        if loaded.row != Some(scale_row) {
            let bytes = &scales[scale_row * pairs * 4..][..pairs * 4];
            DType::F16.widen(&bytes[..pairs * 2], &mut loaded.minima[..pairs]);
            DType::F16.widen(&bytes[pairs * 2..], &mut loaded.steps[..pairs]);
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
}

/// A stored step, if it serves. Below f16's range it is coarser than wanted. That is fine for a
/// group that hardly contributes, and no quantization at all if the whole page is that small.
pub(super) fn checked(step: f32, wanted: f32, absmax: f32) -> Result<f32, Unquantizable> {
    if !step.is_finite() || (step > 2.0 * wanted && step > absmax / 1024.0) {
        return Err(Unquantizable);
    }
    Ok(step)
}

/// Gives each channel the step of its group of `span` channels.
pub(super) fn spread_steps(bytes: &[u8], span: usize, steps: &mut [f32]) {
    if span == 1 {
        return DType::F16.widen(bytes, steps);
    }
    for (part, step) in steps.chunks_mut(span).zip(bytes.as_chunks::<2>().0) {
        part.fill(f16::from_le_bytes(*step).to_f32());
    }
}

/// Minimum and maximum of each pair's values over `rows`.
pub(super) fn extremes(rows: &[f32], dim: usize, span: usize, low: &mut [f32], high: &mut [f32]) {
    low.fill(f32::INFINITY);
    high.fill(f32::NEG_INFINITY);
    for row in rows.chunks_exact(dim) {
        if span == 1 {
            for ((x, low), high) in row.iter().zip(low.iter_mut()).zip(high.iter_mut()) {
                *low = if *x < *low { *x } else { *low };
                *high = if *x > *high { *x } else { *high };
            }
            continue;
        }
        for ((part, low), high) in row.chunks(span).zip(low.iter_mut()).zip(high.iter_mut()) {
            *low = part.iter().fold(*low, |m, x| if *x < m { *x } else { m });
            *high = part.iter().fold(*high, |m, x| if *x > m { *x } else { m });
        }
    }
}

/// The largest f16 that is not above `x` (finite).
fn f16_at_most(x: f32) -> f32 {
    let near = f16::from_f32(x);
    let value = near.to_f32();
    if value <= x {
        return value;
    }
    // One step down; zero has two encodings.
    let bits = near.to_bits();
    let below = match bits {
        0x0000 | 0x8000 => 0x8001,
        _ if bits & 0x8000 == 0 => bits - 1,
        _ => bits + 1,
    };
    f16::from_bits(below).to_f32()
}

/// The smallest f16 that is not below `x`.
pub(super) fn f16_at_least(x: f32) -> f32 {
    // Adding zero turns -0 into 0.
    -f16_at_most(-x) + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn directed_rounding_brackets(x in -70000f32..70000.0, tiny in -1e-6f32..1e-6) {
            for x in [x, tiny] {
                let (low, high) = (f16_at_most(x), f16_at_least(x));
                prop_assert!(low <= x && x <= high);
                let ulp = (x.abs() / 1024.0).max(6.0e-8);
                prop_assert!(high - low <= ulp || high.is_infinite() || low.is_infinite());
            }
        }
    }

    #[test]
    fn what_is_not_finite_has_no_code() {
        for axis in [GroupAxis::Channel, GroupAxis::Token, GroupAxis::Block] {
            let uniform = Uniform::new(UniformStep::Bits(4), axis, None, 15);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in 0..8 {
                    let mut rows = [0.5; 8];
                    rows[at] = bad;
                    let (mut symbols, mut scales) = (Vec::new(), Vec::new());
                    let result = uniform.quantize(&rows, 4, &mut symbols, &mut scales);
                    assert!(result.is_err(), "{bad} at {at}");
                }
            }
        }
    }

    #[test]
    fn directed_rounding_at_the_edges() {
        assert_eq!(f16_at_most(65504.0), 65504.0);
        assert_eq!(f16_at_most(70000.0), 65504.0);
        assert_eq!(f16_at_least(70000.0), f32::INFINITY);
        assert_eq!(f16_at_most(-1e-12), -2f32.powi(-24));
        assert_eq!(f16_at_least(0.0).to_bits(), 0);
    }
}
