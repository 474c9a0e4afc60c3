//! `lloyd(b=..)`: the levels of least squared error for a coordinate of a randomly turned row,
//! and one f16 per row that gives the row its length back (the scalar stage of TurboQuant; the
//! rotation is a transform).
//!
//! A random rotation spreads a row of `d` channels over the sphere: a coordinate divided by the
//! row's root mean square has the density `(1 - x²/d)^((d-3)/2)`, nearly a unit Gaussian. Levels
//! are the centroids of their cells (Lloyd 1982, Max 1960), symmetric around zero. The stored
//! scale is `|c| / |levels of its codes|`, so that a decoded row is as long as the row was; that
//! is what vLLM's `_nc` presets do after decoding.

use super::bind::{HeadBinder, SideBinding};
use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::registry::{QuantizerSpec, share_quantizer};
use super::stored::StoredLayout;
use super::uniform::ScaleRow;
use super::{CodeShape, HeadQuantizer, PageScales, Unquantizable};
use crate::CodecError;
use crate::page::id;
use crate::parse::{ParseResult, QuantizerWord, SingleArgument, SpecCursor};
use crate::row_block::RowBlock;
use crate::simd::count_below;
use half::f16;
use kvd_core::DType;
use pulp::Simd;
use std::fmt;

/// Intervals of Simpson's rule in a cell.
const INTERVALS: usize = 128;
/// Newton's steps at most; each squares the error.
const NEWTON_STEPS: usize = 60;
/// Smallest part of a step that is tried.
const FRACTION_MIN: f64 = 1e-9;
/// Levels up to this many are found by counting, more by halving.
const COUNTED_MAX: usize = 16;
/// Rows whose codes are summed at once.
const SUMS: usize = 8;
/// Below this an f16 loses digits.
const F16_NORMAL_MIN: f32 = 6.103_515_6e-5;

/// Bytes of a row's scale.
const SCALE_BYTES: usize = 2;

/// Levels as a spec asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LloydSpec {
    /// Bits per coefficient, 1 to 8.
    pub bits: u8,
}

impl QuantizerSpec for LloydSpec {
    fn spec_names() -> &'static [&'static str] {
        &["lloyd()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let bits = cursor.parse_single(word, SingleArgument { argument: "b", what: "bits" })?;
        Ok(Self { bits })
    }

    fn page_id(&self, _native: DType) -> u8 {
        id::LLOYD
    }

    fn check_parameters(&self) -> Result<(), String> {
        match self.bits {
            1..=8 => Ok(()),
            bits => Err(format!("lloyd b={bits}: must be 1 to 8")),
        }
    }

    fn code_count(&self) -> Option<u32> {
        Some(1 << self.bits.min(16))
    }

    fn scale_bytes(&self, tokens: usize, _dim: usize) -> usize {
        SCALE_BYTES * tokens
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        Ok(share_quantizer(LloydMax::new(self.bits, side.geometry.head_dim(side.side))))
    }
}

impl fmt::Display for LloydSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lloyd(b={})", self.bits)
    }
}

/// The quantizer of one head size.
#[derive(Clone, Debug)]
pub(crate) struct LloydMax {
    bits: u32,
    /// Ascending, in units of a row's root mean square.
    levels: Vec<f32>,
    /// Halfway between neighbours.
    bounds: Vec<f32>,
}

impl LloydMax {
    /// Levels of `2^bits` codes for rows of `dim` channels.
    pub(crate) fn new(bits: u8, dim: usize) -> Self {
        let mut positive = vec![
            CoordinateDensity { dim }
                .interval_moments(0.0, CoordinateDensity { dim }.largest_coordinate())
                .centroid(),
        ];
        for _ in 1..bits {
            positive = solve_levels(&split_cells(&positive, dim), dim);
        }
        let mirrored = positive.iter().rev().map(|level| -level);
        let levels: Vec<f32> = mirrored.chain(positive.iter().copied()).map(|x| x as f32).collect();
        let bounds = levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        Self { bits: bits.into(), levels, bounds }
    }

    /// The number of bounds below `x` by halving; there are `2^bits - 1` bounds.
    #[inline(always)]
    fn count_bounds_below(&self, x: f32) -> u16 {
        let mut below = 0;
        for bit in (0..self.bits).rev() {
            let half = 1usize << bit;
            below += if x > self.bounds[below + half - 1] { half } else { 0 };
        }
        below as u16
    }
}

impl HeadQuantizer for LloydMax {
    fn page_id(&self) -> u8 {
        id::LLOYD
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Lloyd { bits: self.bits, levels: &self.levels }
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        CodeShape { per_row: dim, bits: self.bits }
    }

    fn scale_bytes(&self, tokens: usize, _dim: usize) -> usize {
        SCALE_BYTES * tokens
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
        _loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        let bytes = scales.bytes[SCALE_BYTES * row..].first_chunk().copied().unwrap_or_default();
        let scale = f16::from_le_bytes(bytes).to_f32();
        let mask = self.levels.len() - 1;
        for (out, symbol) in out.iter_mut().zip(symbols) {
            *out = self.levels[usize::from(*symbol) & mask] * scale;
        }
    }
}

impl CodeLoop for LloydMax {
    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        simd: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block: RowBlock { rows, dim }, absmax } = rows;
        let CodeSink { symbols, scales } = into;
        let squared: Vec<f64> = self.levels.iter().map(|x| f64::from(*x) * f64::from(*x)).collect();
        let (mut turned, mut counts) = (vec![0f32; dim], vec![0u32; dim]);
        let parts = rows.chunks(SUMS * dim).zip(symbols.chunks_mut(SUMS * dim));
        for (rows, symbols) in parts {
            let [mut energies, mut decoded] = [[0f64; SUMS]; 2];
            let rows = rows.chunks_exact(dim).zip(symbols.chunks_exact_mut(dim));
            for ((row, symbols), energy) in rows.zip(&mut energies) {
                *energy = sum_squares(row);
                let inverse =
                    if *energy > 0.0 { (dim as f64 / *energy).sqrt() as f32 } else { 0.0 };
                for (turned, x) in turned.iter_mut().zip(row) {
                    *turned = x * inverse;
                }
                if self.levels.len() <= COUNTED_MAX {
                    count_below(simd, &self.bounds, &turned, &mut counts);
                    for (symbol, count) in symbols.iter_mut().zip(&counts) {
                        *symbol = *count as u16;
                    }
                } else {
                    for (symbol, x) in symbols.iter_mut().zip(&turned) {
                        *symbol = self.count_bounds_below(*x);
                    }
                }
            }
            let count = symbols.len() / dim;
            sum_in_order(&squared, symbols, dim, &mut decoded[..count]);
            for (energy, decoded) in energies[..count].iter().zip(&decoded) {
                let scale = (energy / decoded).sqrt() as f32;
                let stored = f16::from_f32(scale);
                // A coarse scale is fine for a row that hardly contributes, and no quantization at
                // all if the whole page is that small.
                let coarse = scale < F16_NORMAL_MIN && scale > absmax / 1024.0;
                if !stored.is_finite() || coarse {
                    return Err(Unquantizable);
                }
                scales.extend(stored.to_le_bytes());
            }
        }
        Ok(())
    }
}

/// The sums of the squared levels of some rows' codes. A sum in order is a chain, and chains can
/// take turns.
#[inline(always)]
fn sum_in_order(squared: &[f64], symbols: &[u16], dim: usize, sums: &mut [f64]) {
    if sums.len() < SUMS {
        for (sum, symbols) in sums.iter_mut().zip(symbols.chunks_exact(dim)) {
            *sum = symbols.iter().fold(0.0, |sum, symbol| sum + squared[usize::from(*symbol)]);
        }
        return;
    }
    let mut of_all = [0f64; SUMS];
    for channel in 0..dim {
        for (row, sum) in of_all.iter_mut().enumerate() {
            *sum += squared[usize::from(symbols[row * dim + channel])];
        }
    }
    sums.copy_from_slice(&of_all);
}

/// The sum of squares. In f64: the square of a large f32 is none.
#[inline(always)]
fn sum_squares(row: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let (chunks, rest) = row.as_chunks::<8>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
}

/// The density of a coordinate, not normalised. Products and square roots alone, so that every
/// machine finds the same levels.
#[derive(Clone, Copy)]
struct CoordinateDensity {
    dim: usize,
}

/// Integrals over an interval.
struct IntervalMoments {
    mass: f64,
    moment: f64,
}

impl CoordinateDensity {
    /// The largest possible coordinate.
    fn largest_coordinate(self) -> f64 {
        (self.dim as f64).sqrt()
    }

    fn density_at(self, x: f64) -> f64 {
        let base = (1.0 - x * x / self.dim as f64).max(0.0);
        if self.dim <= 3 {
            // One over a square root for two channels; kept finite at the end, flat for three.
            return if self.dim == 2 { base.max(1e-6).sqrt().recip() } else { 1.0 };
        }
        let exponent = self.dim - 3;
        let root = if exponent % 2 == 1 { base.sqrt() } else { 1.0 };
        root * integer_power(base, exponent / 2)
    }

    fn interval_moments(self, from: f64, to: f64) -> IntervalMoments {
        // Beyond nine spreads there is nothing to see.
        let to = to.min(from + 9.0);
        let width = (to - from) / INTERVALS as f64;
        let (mut mass, mut moment) = (0.0, 0.0);
        for index in 0..=INTERVALS {
            let x = from + width * index as f64;
            let weight = match index {
                0 | INTERVALS => 1.0,
                odd if odd % 2 == 1 => 4.0,
                _ => 2.0,
            };
            let density = weight * self.density_at(x);
            mass += density;
            moment += density * x;
        }
        IntervalMoments { mass: mass * width / 3.0, moment: moment * width / 3.0 }
    }
}

impl IntervalMoments {
    fn centroid(&self) -> f64 {
        self.moment / self.mass
    }
}

/// By squaring: the library's power rounds in its own way.
fn integer_power(base: f64, mut exponent: usize) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent % 2 == 1 {
            result *= square;
        }
        square *= square;
        exponent /= 2;
    }
    result
}

/// Bounds of the cells of positive levels, from zero to the end.
fn cell_bounds(levels: &[f64], dim: usize) -> Vec<f64> {
    let halves = levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    [0.0]
        .into_iter()
        .chain(halves)
        .chain([CoordinateDensity { dim }.largest_coordinate()])
        .collect()
}

/// Two levels in each cell, as a start for the next number of bits.
fn split_cells(levels: &[f64], dim: usize) -> Vec<f64> {
    let bounds = cell_bounds(levels, dim);
    let pair = |(level, cell): (&f64, &[f64])| {
        let above = cell[1].min(2.0 * level - cell[0]);
        [(level + cell[0]) / 2.0, (level + above) / 2.0]
    };
    levels.iter().zip(bounds.windows(2)).flat_map(pair).collect()
}

/// Moves each level to the centroid of its cell: Newton's method on `level - centroid`, whose
/// derivative is tridiagonal. A step that would put levels out of order is taken by halves.
fn solve_levels(start: &[f64], dim: usize) -> Vec<f64> {
    let density = CoordinateDensity { dim };
    let mut levels = start.to_vec();
    for _ in 0..NEWTON_STEPS {
        let bounds = cell_bounds(&levels, dim);
        let rows: Vec<[f64; 4]> = (levels.iter().zip(bounds.windows(2)).enumerate())
            .map(|(index, (level, ends))| {
                let cell = density.interval_moments(ends[0], ends[1]);
                let centroid = cell.centroid();
                // A level moves a bound by half of its own way; zero and the end stay.
                let below = if index == 0 { 0.0 } else { 0.5 };
                let above = if index + 1 == start.len() { 0.0 } else { 0.5 };
                let below = below * density.density_at(ends[0]) * (centroid - ends[0]) / cell.mass;
                let above = above * density.density_at(ends[1]) * (ends[1] - centroid) / cell.mass;
                [-below, 1.0 - below - above, -above, centroid - level]
            })
            .collect();
        let step = solve_tridiagonal(&rows);
        let moved = |fraction: f64| -> Vec<f64> {
            levels.iter().zip(&step).map(|(level, step)| level + fraction * step).collect()
        };
        let in_order = |moved: &[f64]| {
            moved[0] > 0.0
                && moved.windows(2).all(|pair| pair[0] < pair[1])
                && moved[moved.len() - 1] < density.largest_coordinate()
        };
        let mut fraction = 1.0;
        while !in_order(&moved(fraction)) && fraction > FRACTION_MIN {
            fraction /= 2.0;
        }
        levels = moved(fraction);
        if step.iter().all(|step| step.abs() < 1e-12) {
            break;
        }
    }
    levels
}

/// Solves rows of `[below, diagonal, above, right]`.
fn solve_tridiagonal(rows: &[[f64; 4]]) -> Vec<f64> {
    let mut swept: Vec<[f64; 2]> = Vec::with_capacity(rows.len());
    let mut last = [0.0, 0.0];
    for [below, diagonal, above, right] in rows {
        let pivot = diagonal - below * last[0];
        last = [above / pivot, (right - below * last[1]) / pivot];
        swept.push(last);
    }
    let mut after = 0.0;
    let mut solution: Vec<f64> = Vec::with_capacity(rows.len());
    for [above, right] in swept.iter().rev() {
        after = right - above * after;
        solution.push(after);
    }
    solution.reverse();
    solution
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// Positive levels and squared error of the unit Gaussian's best quantizers: J. Max,
    /// Quantizing for minimum distortion (1960), table I, for 2, 4, 8 and 16 levels.
    const GAUSSIAN: [(&[f64], f64); 4] = [
        (&[0.7980], 0.3634),
        (&[0.4528, 1.510], 0.1175),
        (&[0.2451, 0.7560, 1.344, 2.152], 0.03454),
        (&[0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    ];

    /// Mean squared error on the density itself.
    fn error(lloyd: &LloydMax, dim: usize) -> f64 {
        let density = CoordinateDensity { dim };
        let count = 200_000;
        let width = 2.0 * density.largest_coordinate().min(9.0) / f64::from(count);
        let (mut sum, mut mass) = (0.0, 0.0);
        for index in 0..count {
            let x = (f64::from(index) + 0.5) * width - density.largest_coordinate().min(9.0);
            let level = lloyd.levels[usize::from(lloyd.count_bounds_below(x as f32))];
            sum += density.density_at(x) * (x - f64::from(level)).powi(2);
            mass += density.density_at(x);
        }
        sum / mass
    }

    #[test]
    fn in_many_dimensions_the_levels_are_those_of_a_gaussian() {
        for (bits, (levels, least)) in (1u8..).zip(GAUSSIAN) {
            let lloyd = LloydMax::new(bits, 1024);
            for (level, want) in lloyd.levels[levels.len()..].iter().zip(levels) {
                assert!(
                    (f64::from(*level) / want - 1.0).abs() < 5e-3,
                    "{bits}: {:?}",
                    lloyd.levels
                );
            }
            let error = error(&lloyd, 1024);
            assert!((error / least - 1.0).abs() < 5e-3, "{bits} bits: {error}, Max has {least}");
        }
    }

    #[test]
    fn every_level_is_the_centroid_of_its_cell() {
        for dim in [2, 4, 32, 80, 128, 256, 1024] {
            for bits in 1..=8 {
                let levels = LloydMax::new(bits, dim).levels;
                assert_eq!(levels.len(), 1 << bits);
                assert!(levels.windows(2).all(|pair| pair[0] < pair[1]), "{dim}, {bits} bits");
                let positive: Vec<f64> =
                    levels[levels.len() / 2..].iter().map(|x| f64::from(*x)).collect();
                for (level, ends) in positive.iter().zip(cell_bounds(&positive, dim).windows(2)) {
                    let centroid =
                        CoordinateDensity { dim }.interval_moments(ends[0], ends[1]).centroid();
                    assert!((level - centroid).abs() < 1e-5, "{dim}, {bits}: {level} {centroid}");
                }
            }
        }
    }

    #[test]
    fn counting_and_halving_agree() {
        let dim = 2001;
        let row: Vec<f32> = (0..dim).map(|index| index as f32 * 0.005 - 5.0).collect();
        let lloyd = LloydMax::new(4, dim);
        let (mut symbols, mut scales) = (Vec::new(), Vec::new());
        append_codes(&lloyd, RowBlock { rows: &row, dim }, &mut symbols, &mut scales).unwrap();
        assert_eq!((symbols.len(), scales.len()), (dim, 2));
        let inverse = (dim as f64 / sum_squares(&row)).sqrt() as f32;
        let halved: Vec<u16> = row.iter().map(|x| lloyd.count_bounds_below(x * inverse)).collect();
        assert_eq!(symbols, halved);
    }

    #[test]
    fn rows_keep_their_length_and_err_as_the_theory_says() {
        let dim = 128;
        // Normal deviates (Box and Muller) of a length that changes from row to row.
        let mut rng = SplitMix64(5);
        let mut normal = || {
            let (a, b) = (1.0 - rng.next_unit(), rng.next_unit());
            ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
        };
        let rows: Vec<f32> = (0..200 * dim).map(|i| normal() * (1 + i / dim) as f32).collect();
        for bits in 1..=4 {
            let lloyd = LloydMax::new(bits, dim);
            let (mut symbols, mut scales) = (Vec::new(), Vec::new());
            append_codes(&lloyd, RowBlock { rows: &rows, dim }, &mut symbols, &mut scales).unwrap();
            assert_eq!(scales.len(), lloyd.scale_bytes(200, dim));
            let (mut relative, mut out) = (0.0, vec![0f32; dim]);
            for (row, values) in rows.chunks_exact(dim).enumerate() {
                let codes = &symbols[row * dim..][..dim];
                let scales = PageScales { bytes: &scales, tokens: 200 };
                lloyd.dequantize_row(scales, row, codes, &mut ScaleRow::default(), &mut out);
                let length = sum_squares(values);
                assert!((sum_squares(&out) / length - 1.0).abs() < 2e-3);
                let off = values.iter().zip(&out).map(|(a, b)| f64::from(a - b).powi(2));
                relative += off.sum::<f64>() / length / 200.0;
            }
            // A row that keeps its length errs by 2 - 2 sqrt(1 - D) where D is the least error.
            let want = 2.0 - 2.0 * (1.0 - error(&lloyd, dim)).sqrt();
            let off = (relative / want - 1.0).abs();
            assert!(off < 0.03, "{bits} bits: {relative}, expected {want}");
        }
    }

    #[test]
    fn zeros_are_zeros() {
        let lloyd = LloydMax::new(3, 4);
        let (mut symbols, mut scales) = (Vec::new(), Vec::new());
        append_codes(&lloyd, RowBlock { rows: &[0.0; 4], dim: 4 }, &mut symbols, &mut scales)
            .unwrap();
        let mut out = [1f32; 4];
        let scales = PageScales { bytes: &scales, tokens: 1 };
        lloyd.dequantize_row(scales, 0, &symbols, &mut ScaleRow::default(), &mut out);
        assert_eq!(out, [0.0; 4]);
    }
}
