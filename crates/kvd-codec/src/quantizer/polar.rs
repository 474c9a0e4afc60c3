//! `polar(a=..,r=..)`: the two channels that RoPE turns together, as angle and radius (PolarQuant
//! §3.2). Code `radius << a | angle`.
//!
//! The radius takes `2^r` levels from 0 to the pair's largest radius, without a zero point. The
//! angle takes `2^a` directions; code 0 is the direction of the negative first axis, because the
//! paper shifts `atan2` by π. Its decode (§3.3) lacks the shift back, which would negate every
//! key; here the angle of a code is `π code / 2^(a-1) - π`.
//!
//! Scales: with `g=` one f16 step per pair for each `g` tokens, in rows of one step per pair.
//! Without, none: the step follows from the pair's largest radius in the calibration, and what
//! lies beyond is cut to it (the paper's clamp).

use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::ranges::{append_f16, f16_at_least, step_reciprocal};
use super::stored::StoredLayout;
use super::uniform::{ROUND, ScaleRow, check_step};
use super::{CodeShape, HeadQuantizer, PageScales, Unquantizable};
use crate::page::id;
use crate::row_block::RowBlock;
use half::f16;
use kvd_core::{DType, Geometry, RopePairing};
use pulp::Simd;

const PAIRS_MAX: usize = Geometry::HEAD_DIM_MAX as usize / 2;
/// Pairs whose codes are made at once.
const LANES: usize = 8;
/// A radius this many times the calibration's largest means that it was fitted on something else.
const REACH: f32 = 4.0;

/// Which channels form a pair.
#[derive(Clone, Copy, Debug)]
pub struct PairLayout(pub RopePairing);

impl PairLayout {
    /// Writes first and second channels of all pairs.
    #[inline(always)]
    fn split_pairs(self, row: &[f32], x: &mut [f32], y: &mut [f32]) {
        match self.0 {
            RopePairing::Half => {
                x.copy_from_slice(&row[..x.len()]);
                y.copy_from_slice(&row[x.len()..]);
            }
            RopePairing::Interleaved => {
                for ((x, y), [a, b]) in x.iter_mut().zip(y).zip(row.as_chunks::<2>().0) {
                    (*x, *y) = (*a, *b);
                }
            }
        }
    }

    /// Channels of a pair.
    fn pair_channels(self, pair: usize, pairs: usize) -> [usize; 2] {
        match self.0 {
            RopePairing::Half => [pair, pair + pairs],
            RopePairing::Interleaved => [2 * pair, 2 * pair + 1],
        }
    }

    /// Each pair's largest radius over `rows`, rounded up; `None` when one is beyond f16.
    pub fn largest_radii(self, rows: &[f32], dim: usize) -> Option<Vec<f16>> {
        let mut row = RowPairs::new(dim / 2);
        let mut largest = vec![0f32; dim / 2];
        for values in rows.chunks_exact(dim) {
            row.load_row(self, values);
            row.raise_largest(&mut largest);
        }
        let radii: Vec<f16> = largest.iter().map(|r| f16::from_f32(f16_at_least(*r))).collect();
        radii.iter().all(|r| r.is_finite()).then_some(radii)
    }
}

/// The pairs of one row.
struct RowPairs {
    x: [f32; PAIRS_MAX],
    y: [f32; PAIRS_MAX],
    radius: [f32; PAIRS_MAX],
    pairs: usize,
}

impl RowPairs {
    fn new(pairs: usize) -> Self {
        let zeros = [0.0; PAIRS_MAX];
        Self { x: zeros, y: zeros, radius: zeros, pairs }
    }

    #[inline(always)]
    fn load_row(&mut self, by: PairLayout, row: &[f32]) {
        let Self { x, y, radius, pairs } = self;
        by.split_pairs(row, &mut x[..*pairs], &mut y[..*pairs]);
        for ((radius, x), y) in radius[..*pairs].iter_mut().zip(x).zip(y) {
            *radius = (*x * *x + *y * *y).sqrt();
        }
    }

    #[inline(always)]
    fn raise_largest(&self, largest: &mut [f32]) {
        for (largest, radius) in largest.iter_mut().zip(&self.radius) {
            *largest = largest.max(*radius);
        }
    }
}

/// A polar quantizer bound to a head.
#[derive(Clone, Debug)]
pub(crate) struct Polar {
    pairs: PairLayout,
    angle_bits: u32,
    radius_bits: u32,
    scale: RadiusScale,
    /// Cosine and sine of each code's angle.
    directions: Vec<[f32; 2]>,
    /// Cosine and sine of the angles halfway between two codes, from 0 to 45 degrees.
    halfway: Vec<[f32; 2]>,
}

/// Where the radius steps come from.
#[derive(Clone, Debug)]
enum RadiusScale {
    /// In the page, for so many tokens each.
    Page(u16),
    /// Steps of the calibration, and the largest radii that they are for.
    Model { steps: Vec<f32>, reach: Vec<f32> },
}

impl Polar {
    /// A quantizer whose pages hold a step per pair and `group` tokens.
    pub(crate) fn with_groups(pairing: RopePairing, bits: [u8; 2], group: u16) -> Self {
        Self::new(pairing, bits, RadiusScale::Page(group))
    }

    /// A quantizer for pairs of at most `radii`; `None` when one of them is negative.
    pub(crate) fn with_radii(pairing: RopePairing, bits: [u8; 2], radii: &[f16]) -> Option<Self> {
        if radii.iter().any(|radius| !(*radius >= f16::ZERO && radius.is_finite())) {
            return None;
        }
        let top = f32::from((1u16 << bits[1]) - 1);
        let steps = radii.iter().map(|radius| radius.to_f32() / top).collect();
        let reach = radii.iter().map(|radius| radius.to_f32() * REACH).collect();
        Some(Self::new(pairing, bits, RadiusScale::Model { steps, reach }))
    }

    fn new(pairing: RopePairing, bits: [u8; 2], scale: RadiusScale) -> Self {
        let [angle, radius] = bits;
        let angle_bits = u32::from(angle);
        // Every other one of 2^(a+1) directions around the circle is a code.
        let fine = circle_points(angle_bits + 1);
        // Code 0 points to the negative first axis.
        let directions = fine.iter().step_by(2).map(|[cos, sin]| [-cos, -sin]);
        let directions = directions.map(|[cos, sin]| [cos as f32, sin as f32]).collect();
        let octant = fine.len() / 8;
        let halfway = fine.iter().take(octant + 1).skip(1).step_by(2);
        let halfway = halfway.map(|[cos, sin]| [*cos as f32, *sin as f32]).collect();
        let pairs = PairLayout(pairing);
        Self { pairs, angle_bits, radius_bits: radius.into(), scale, directions, halfway }
    }

    /// Tokens that share a pair's step, where the page holds it.
    pub(crate) fn group(&self) -> Option<u16> {
        match self.scale {
            RadiusScale::Page(group) => Some(group),
            RadiusScale::Model { .. } => None,
        }
    }

    /// Bytes of the steps of a page: an f16 per pair and group.
    pub(super) fn step_bytes(group: Option<u16>, tokens: usize, dim: usize) -> usize {
        group.map_or(0, |group| tokens.div_ceil(usize::from(group)) * dim)
    }

    /// Refuses radii far beyond those of the calibration.
    #[inline(always)]
    fn check_reach(&self, rows: &[f32], dim: usize, reach: &[f32]) -> Result<(), Unquantizable> {
        let mut row = RowPairs::new(dim / 2);
        let mut largest = [0f32; PAIRS_MAX];
        for values in rows.chunks_exact(dim) {
            row.load_row(self.pairs, values);
            row.raise_largest(&mut largest[..dim / 2]);
        }
        let within = largest.iter().zip(reach).all(|(radius, reach)| radius <= reach);
        if within { Ok(()) } else { Err(Unquantizable) }
    }

    /// The codes of one row; `inverse` holds the steps' reciprocals.
    #[inline(always)]
    fn quantize_row(&self, row: &RowPairs, inverse: &[f32], top: f32, symbols: &mut [u16]) {
        let bits = self.angle_bits;
        let mask = (1u32 << bits) - 1;
        let places = (0..row.pairs).step_by(LANES);
        for (first, symbols) in places.zip(symbols.chunks_mut(LANES)) {
            let [mut x, mut y] = [[0f32; LANES]; 2];
            x[..symbols.len()].copy_from_slice(&row.x[first..][..symbols.len()]);
            y[..symbols.len()].copy_from_slice(&row.y[first..][..symbols.len()]);
            let angles = self.nearest_angles(&x, &y);
            let radii = row.radius[first..].iter().zip(&inverse[first..]);
            for ((symbol, angle), (radius, inverse)) in symbols.iter_mut().zip(angles).zip(radii) {
                let level = radius * inverse;
                let level = if level < top { level } else { top };
                let radius = (level + ROUND).to_bits() as u16;
                *symbol = radius << bits | (angle & mask) as u16;
            }
        }
    }

    /// The nearest direction of each `(x, y)`, before it is brought into range. Counts the halfway
    /// directions below it within the first octant, then unfolds the octants.
    #[inline(always)]
    fn nearest_angles(&self, x: &[f32; LANES], y: &[f32; LANES]) -> [u32; LANES] {
        let [mut across, mut along] = [[0f32; LANES]; 2];
        for lane in 0..LANES {
            let (x, y) = (x[lane].abs(), y[lane].abs());
            across[lane] = if x < y { x } else { y };
            along[lane] = if x < y { y } else { x };
        }
        let mut codes = [0u32; LANES];
        for [cos, sin] in &self.halfway {
            for lane in 0..LANES {
                codes[lane] += u32::from(across[lane] * cos > along[lane] * sin);
            }
        }
        let turn = 1u32 << self.angle_bits;
        let quarter = if self.angle_bits >= 2 { turn / 4 } else { 0 };
        for lane in 0..LANES {
            let code = codes[lane];
            let turned = (self.angle_bits >= 2) & (y[lane].abs() > x[lane].abs());
            let code = if turned { quarter.wrapping_sub(code) } else { code };
            let code = if x[lane] < 0.0 { (turn / 2).wrapping_sub(code) } else { code };
            let code = if y[lane] < 0.0 { turn.wrapping_sub(code) } else { code };
            // Half a turn, as in the paper.
            codes[lane] = code.wrapping_add(turn / 2);
        }
        codes
    }
}

impl HeadQuantizer for Polar {
    fn page_id(&self) -> u8 {
        id::POLAR
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        let steps = match &self.scale {
            RadiusScale::Page(_) => &[],
            RadiusScale::Model { steps, .. } => steps.as_slice(),
        };
        StoredLayout::Polar {
            angle_bits: self.angle_bits,
            radius_bits: self.radius_bits,
            group: self.group().map(usize::from),
            steps,
            directions: &self.directions,
            pairing: self.pairs.0,
        }
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        CodeShape { per_row: dim / 2, bits: self.angle_bits + self.radius_bits }
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        Self::step_bytes(self.group(), tokens, dim)
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
        let pairs = out.len() / 2;
        let scale_row = match self.scale {
            RadiusScale::Page(group) => row / usize::from(group),
            RadiusScale::Model { .. } => 0,
        };
        if loaded.row != Some(scale_row) {
            let steps = &mut loaded.steps[..pairs];
            match &self.scale {
                RadiusScale::Page(_) => {
                    let bytes = &scales.bytes[scale_row * pairs * 2..][..pairs * 2];
                    DType::F16.widen_values(bytes, steps);
                }
                RadiusScale::Model { steps: fitted, .. } => steps.copy_from_slice(fitted),
            }
            loaded.row = Some(scale_row);
        }
        let mask = self.directions.len() - 1;
        for (pair, (symbol, step)) in symbols.iter().zip(&loaded.steps).enumerate() {
            let [cos, sin] = self.directions[usize::from(*symbol) & mask];
            let radius = f32::from(symbol >> self.angle_bits) * step;
            let [x, y] = self.pairs.pair_channels(pair, pairs);
            (out[x], out[y]) = (radius * cos, radius * sin);
        }
    }

    fn polar_bounds(&self) -> Option<(&[[f32; 2]], &[f32])> {
        Some(match &self.scale {
            RadiusScale::Page(_) => (&self.halfway, &[]),
            RadiusScale::Model { reach, .. } => (&self.halfway, reach),
        })
    }

    /// An f16 per pair.
    fn calibration_bytes(&self) -> u64 {
        match &self.scale {
            RadiusScale::Page(_) => 0,
            RadiusScale::Model { steps, .. } => 2 * steps.len() as u64,
        }
    }
}

impl CodeLoop for Polar {
    fn row_codes(&self, dim: usize) -> usize {
        dim / 2
    }

    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        _: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block: RowBlock { rows, dim }, absmax } = rows;
        let CodeSink { symbols, scales } = into;
        let mut row = RowPairs::new(dim / 2);
        let mut buffer = [0f32; PAIRS_MAX];
        let inverse = &mut buffer[..dim / 2];
        let share = match &self.scale {
            RadiusScale::Page(group) => usize::from(*group) * dim,
            RadiusScale::Model { steps, reach } => {
                self.check_reach(rows, dim, reach)?;
                inverse.iter_mut().zip(steps).for_each(|(to, step)| *to = step_reciprocal(*step));
                rows.len()
            }
        };
        let top = f32::from((1u16 << self.radius_bits) - 1);
        for (rows, symbols) in rows.chunks(share).zip(symbols.chunks_mut(share / 2)) {
            if let RadiusScale::Page(_) = self.scale {
                inverse.fill(0.0);
                for values in rows.chunks_exact(dim) {
                    row.load_row(self.pairs, values);
                    row.raise_largest(inverse);
                }
                for largest in inverse.iter_mut() {
                    let wanted = *largest / top;
                    *largest = check_step(f16_at_least(wanted), wanted, absmax)?;
                }
                append_f16(inverse, scales);
                inverse.iter_mut().for_each(|step| *step = step_reciprocal(*step));
            }
            for (values, symbols) in rows.chunks_exact(dim).zip(symbols.chunks_mut(dim / 2)) {
                row.load_row(self.pairs, values);
                self.quantize_row(&row, inverse, top, symbols);
            }
        }
        Ok(())
    }
}

/// Cosines and sines of `2^bits` angles around the circle, from 0. Made from square roots and
/// products alone, which every machine rounds alike; a library's cosine is not.
fn circle_points(bits: u32) -> Vec<[f64; 2]> {
    // A half turn, then its halves.
    let mut turns = vec![[-1f64, 0.0]];
    for _ in 1..bits {
        let [cos, sin] = turns[turns.len() - 1];
        let half_cos = ((1.0 + cos) / 2.0).max(0.0).sqrt();
        // Below 0 the cosine alone decides, above it sin / (2 cos) loses nothing.
        let half_sin = if cos < 0.0 { ((1.0 - cos) / 2.0).sqrt() } else { sin / (2.0 * half_cos) };
        turns.push([half_cos, half_sin]);
    }
    let direction = |code: usize| {
        let chosen =
            turns.iter().enumerate().filter(|(i, _)| code >> (bits as usize - 1 - i) & 1 == 1);
        chosen.fold([1f64, 0.0], |[c, s], (_, [cos, sin])| [c * cos - s * sin, s * cos + c * sin])
    };
    (0..1usize << bits).map(direction).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::PI;

    #[test]
    fn the_circle_is_the_circle() {
        for bits in 1..=9 {
            for (code, [cos, sin]) in circle_points(bits).into_iter().enumerate() {
                let angle = 2.0 * PI * code as f64 / f64::from(1u32 << bits);
                assert!((cos - angle.cos()).abs() < 1e-14, "{bits}: {code}");
                assert!((sin - angle.sin()).abs() < 1e-14, "{bits}: {code}");
            }
        }
    }

    #[test]
    fn angles_are_the_papers_rounded() {
        for bits in 1..=8u8 {
            let polar = Polar::with_groups(RopePairing::Half, [bits, 4], 64);
            let turn = 1u32 << bits;
            for step in 0..3600 {
                // Off the ties.
                let angle = (f64::from(step) + 0.37) * 2.0 * PI / 3600.0 - PI;
                let (x, y) = ((3.0 * angle.cos()) as f32, (3.0 * angle.sin()) as f32);
                let paper = f64::from(turn / 2) * (angle + PI) / PI;
                let want = paper.round_ties_even() as u32 % turn;
                let [xs, ys] = [[x; LANES], [y; LANES]];
                assert_eq!(polar.nearest_angles(&xs, &ys)[0] % turn, want, "{bits} bits, {angle}");
                let [cos, sin] = polar.directions[want as usize];
                let off = (f64::from(cos) - angle.cos()).hypot(f64::from(sin) - angle.sin());
                assert!(off <= 1.001 * PI / f64::from(turn), "{bits} bits: {off}");
            }
        }
    }

    #[test]
    fn a_vector_keeps_its_direction_under_either_pairing() {
        let row = [3.0, 0.0, -1.0, 0.5, 0.0, -2.0, -1.0, 0.5];
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let polar = Polar::with_groups(pairing, [8, 8], 64);
            let (mut symbols, mut scales) = (Vec::new(), Vec::new());
            append_codes(&polar, RowBlock { rows: &row, dim: 8 }, &mut symbols, &mut scales)
                .unwrap();
            assert_eq!((symbols.len(), scales.len()), (4, polar.scale_bytes(1, 8)));
            let mut out = [0f32; 8];
            polar.dequantize_row(
                PageScales { bytes: &scales, tokens: 1 },
                0,
                &symbols,
                &mut ScaleRow::default(),
                &mut out,
            );
            for (x, y) in row.iter().zip(&out) {
                assert!((x - y).abs() < 0.05, "{pairing:?}: {row:?} became {out:?}");
            }
        }
    }

    #[test]
    fn radii_beyond_the_calibration_are_cut_and_far_beyond_refused() {
        let radii = [f16::from_f32(5.0), f16::from_f32(1.0)];
        let polar = Polar::with_radii(RopePairing::Half, [4, 4], &radii).unwrap();
        let encode = |row: &[f32; 4]| {
            let (mut symbols, mut scales) = (Vec::new(), Vec::new());
            append_codes(&polar, RowBlock { rows: row, dim: 4 }, &mut symbols, &mut scales)?;
            assert!(scales.is_empty());
            let mut out = [0f32; 4];
            polar.dequantize_row(
                PageScales { bytes: &scales, tokens: 1 },
                0,
                &symbols,
                &mut ScaleRow::default(),
                &mut out,
            );
            Ok::<_, Unquantizable>(out)
        };
        assert_eq!(encode(&[10.0, 0.0, 0.0, 2.0]).unwrap(), [5.0, 0.0, 0.0, 1.0]);
        assert!(encode(&[20.1, 0.0, 0.0, 1.0]).is_err());
        assert!(Polar::with_radii(RopePairing::Half, [4, 4], &[f16::from_f32(-1.0)]).is_none());
    }
}
