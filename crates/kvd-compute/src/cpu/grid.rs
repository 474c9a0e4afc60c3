//! Grid sides, straight from their codes: one step per head goes into the query or the weight,
//! and what remains is an integer dot product of codes. Coefficients of the zero class are in no
//! tile; what tiles do not hold is added outlier by outlier.

use crate::cpu::grid_energy::largest_energy;
use crate::cpu::huffman::{OutlierRest, QUAD, StreamTiles};
use crate::cpu::int_dot::{
    CodeLookup, ROWS, SETTLED_TILES, SumTarget, TileCodes, key_dots, value_dots,
};
use crate::cpu::int_operands::{self, IntOperands, ScaledRows};
use crate::cpu::loss::{SCORE_LOSS_MAX, alike_factor, rounding_loss};
use crate::cpu::outlier_sums::OutlierSums;
use crate::cpu::simd::{KernelConfig, Simd, per_level};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use kvd_codec::{Grid, HeadCodec};
use std::ops::Range;

/// The bias of the stored codes of each position of a tile, and its coefficient.
fn tile_positions(grid: &Grid, tiles: &StreamTiles) -> Vec<(i32, usize)> {
    let mut positions = vec![(0, usize::MAX); tiles.per_row];
    for (run, first) in &tiles.runs {
        for at in 0..run.len {
            positions[first + at] = (grid.bias(run.first + at), run.first + at);
        }
    }
    positions
}

/// The mean over all positions of their largest stored codes, rounded up.
fn mean_largest(grid: &Grid, positions: &[(i32, usize)]) -> i32 {
    let held = positions.iter().filter(|(_, coefficient)| *coefficient != usize::MAX);
    let largest = held.map(|(bias, coefficient)| bias + grid.largest_code(*coefficient));
    let terms = i32::try_from(positions.len()).unwrap_or(i32::MAX).max(1);
    (largest.sum::<i32>() + terms - 1) / terms
}

/// The largest code of each position, and the sum of their squares.
fn largest_codes(grid: &Grid, positions: &[(i32, usize)]) -> (f32, f32) {
    let held = positions.iter().filter(|(_, coefficient)| *coefficient != usize::MAX);
    let largest = held.map(|(bias, at)| (*bias).max(grid.largest_code(*at)) as f32);
    largest.fold((0.0, 0.0), |(most, energy), code| (most.max(code), energy + code * code))
}

/// Biases of stored codes as bytes; none where one is beyond a byte.
fn byte_biases(positions: &[(i32, usize)]) -> Option<Vec<u8>> {
    positions.iter().map(|position| u8::try_from(position.0).ok()).collect()
}

per_level!(
    /// The largest distance of a code from its bias, in tiles of values; `biases` are those of a
    /// quad of tokens.
    fn farthest_code(tiles: &[u8], biases: &[u8]) -> u8 = farthest_code_body
);

#[inline(always)]
fn farthest_code_body(tiles: &[u8], biases: &[u8]) -> u8 {
    const LANES: usize = 64;
    let mut lanes = [0u8; LANES];
    let mut most = 0;
    for quads in tiles.chunks_exact(biases.len()) {
        let (codes, rest) = quads.as_chunks::<LANES>();
        let (of_codes, of_rest) = biases.as_chunks::<LANES>();
        for (codes, biases) in codes.iter().zip(of_codes) {
            for (lane, (code, bias)) in lanes.iter_mut().zip(codes.iter().zip(biases)) {
                *lane = (*lane).max(code.abs_diff(*bias));
            }
        }
        let rest = rest.iter().zip(of_rest).map(|(code, bias)| code.abs_diff(*bias));
        most = rest.fold(most, u8::max);
    }
    lanes.into_iter().fold(most, u8::max)
}

/// Magnitudes of the values of some pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HeldMagnitudes {
    /// The largest that a tile holds.
    pub(super) largest: f32,
    /// The largest that a tile could hold, [`GridValues::largest_value`].
    pub(super) possible: f32,
}

impl HeldMagnitudes {
    /// Those of the tiles of both.
    pub(super) fn larger_of(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest), ..self }
    }
}

/// Finds the magnitudes of the values of pages, one page after the other.
pub(super) struct MagnitudeFinder {
    /// By position of a tile, once for each token of a quad.
    biases: Vec<u8>,
    step: f32,
    held: HeldMagnitudes,
}

impl MagnitudeFinder {
    /// `None` where a code's bias is beyond a byte.
    pub(super) fn new(grid: &Grid, tiles: &StreamTiles) -> Option<Self> {
        let positions = tile_positions(grid, tiles);
        let biases = byte_biases(&positions)?;
        let step = grid.step();
        let possible = largest_codes(grid, &positions).0 * step;
        let biases = biases.iter().flat_map(|bias| [*bias; QUAD]).collect();
        Some(Self { biases, step, held: HeldMagnitudes { largest: 0.0, possible } })
    }

    /// Takes the codes of full tiles.
    pub(super) fn add_tiles(&mut self, simd: Simd, tiles: &[u8]) {
        let most = farthest_code(simd, tiles, &self.biases);
        self.held.largest = self.held.largest.max(f32::from(most) * self.step);
    }

    /// Magnitudes of all pages so far.
    pub(super) fn held_magnitudes(&self) -> HeldMagnitudes {
        self.held
    }
}

/// One row of a page as coefficients, from the tiles that hold it.
pub(super) fn decode_row(grid: &Grid, tiles: &StreamTiles, token: usize, row: &mut [f32]) {
    row.fill(0.0);
    for (at, (bias, coefficient)) in tile_positions(grid, tiles).into_iter().enumerate() {
        if let Some(value) = row.get_mut(coefficient) {
            *value = (i32::from(tiles.code_of_token(token, at)) - bias) as f32;
        }
    }
    for rest in tiles.rests.iter().filter(|rest| rest.token == token) {
        row[rest.position] += rest.rest;
    }
    row.iter_mut().for_each(|value| *value *= grid.step());
}

/// Queries of a unit, without the coefficients that are in no tile.
pub(crate) struct GridKeys {
    lookup: CodeLookup,
    parts: IntOperands,
    units: Vec<f32>,
    /// The share of a score that comes from the bias of all codes, by row.
    bases: Vec<f32>,
    /// Queries `[rows, dim]`, times the step.
    queries: Vec<f32>,
    dim: usize,
    /// [`rounding_loss`] of the largest codes that a page could have, by row.
    losses: Vec<f32>,
    /// The squares of those.
    energy_max: f32,
    /// The squares of those that a token has, and the biases by which they are known; none where
    /// the largest codes are fine.
    energy: f32,
    biases: Option<Vec<u8>>,
}

/// By how much the loss by a token's own codes is raised: where most codes are zeros, the queries
/// that meet the others may round alike.
const OF_OWN_CODES: f32 = 2.0;

impl GridKeys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(
        config: KernelConfig,
        side: &HeadCodec,
        tiles: &StreamTiles,
        queries: &[f32],
    ) -> Option<Self> {
        let grid = side.grid()?;
        let (dim, positions) = (side.dim(), tile_positions(grid, tiles));
        let queries: Vec<f32> = queries.iter().map(|q| q * grid.step()).collect();
        let meets = mean_largest(grid, &positions);
        if !int_operands::sums_fit(positions.len(), meets) || !queries.iter().all(|q| q.is_finite())
        {
            return None;
        }
        let mut parts = IntOperands::of_queries(config).multiplied_with(meets);
        let (_, energy_max) = largest_codes(grid, &positions);
        let (mut units, mut bases, mut losses) = (Vec::new(), Vec::new(), Vec::new());
        parts.clear_rows(positions.len());
        let mut row = vec![0f32; positions.len()];
        for (index, query) in queries.chunks_exact(dim).enumerate() {
            for (value, (_, coefficient)) in row.iter_mut().zip(&positions) {
                *value = query.get(*coefficient).copied().unwrap_or(0.0);
            }
            let largest = row.iter().fold(0f32, |m, q| m.max(q.abs()));
            let unit = parts.push(config.simd, &row, largest, None).unit;
            let part = parts.rows_from(index);
            let bias = positions.iter().enumerate();
            let bias =
                bias.map(|(at, (bias, _))| i64::from(part.value_at(config.simd, 0, at) * bias));
            bases.push(-(bias.sum::<i64>() as f32) * unit);
            units.push(unit);
            losses.push(rounding_loss(unit, energy_max) * alike_factor(config.simd, &row, unit));
        }
        let lookup = CodeLookup::identity();
        // Codes are looked at where the largest that there could be would lose too much.
        let many = losses.iter().any(|loss| *loss > SCORE_LOSS_MAX / 2.0);
        let biases = if many { byte_biases(&positions) } else { None };
        let energy = if biases.is_some() { 0.0 } else { energy_max };
        Some(Self { lookup, parts, units, bases, queries, dim, losses, energy_max, energy, biases })
    }

    /// How far rounding may take a score of that row: see [`rounding_loss`]. Most codes of a coarse
    /// grid are zeros, and the largest would count too much.
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        let share = self.energy / self.energy_max;
        let own = OF_OWN_CODES * share.sqrt();
        let rounded = if own < 1.0 { self.losses[row] * own } else { self.losses[row] };
        // Of a score of zeros the bias is taken back, and f32 has rounded both.
        rounded + f32::EPSILON * self.bases[row].abs()
    }

    /// Scores all rows against a few tiles.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: Range<usize>,
        scores: &mut SpanScores,
    ) {
        if let Some(biases) = self.biases.as_ref().filter(|biases| !biases.is_empty()) {
            self.energy = self.energy.max(largest_energy(simd, codes.bytes, biases));
        }
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows_from(first);
            let units = &self.units[first..first + rows.row_count()];
            let out = scores.rows_mut(first, tiles.start);
            if codes.per_row > 0 {
                key_dots(simd, codes, &self.lookup, ScaledRows { rows, units }, out);
            }
            for (row, base) in self.bases[first..first + rows.row_count()].iter().enumerate() {
                let scores = out[row * SPAN..][..tiles.len() * TILE].iter_mut();
                match codes.per_row {
                    0 => scores.for_each(|score| *score = 0.0),
                    _ => scores.for_each(|score| *score += base),
                }
            }
        }
    }

    /// Adds an outlier, which tiles do not hold, to the score of token `token` of the span.
    pub(crate) fn add_outlier(&self, rest: &OutlierRest, token: usize, scores: &mut SpanScores) {
        for (row, query) in self.queries.chunks_exact(self.dim).enumerate() {
            scores.row_mut(row)[token] += query[rest.position] * rest.rest;
        }
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct GridValues {
    lookup: CodeLookup,
    step: f32,
    positions: Vec<(i32, usize)>,
    parts: IntOperands,
    /// `[rows, positions]`.
    sums: Vec<f32>,
    /// Sums of the weights in steps, by row: the bias of codes is multiplied with them at the end.
    weights: Vec<f32>,
    /// Signed sums of the rounding residuals of weights, by row.
    lost: Vec<f32>,
    /// Tiles since that was taken off.
    unsettled: usize,
    /// Sums of outliers, which tiles do not hold.
    outliers: OutlierSums,
    /// The largest magnitude that a value in a tile could have. Sums have the biases of codes until
    /// the end, so that zeros cost as much.
    magnitude: f32,
    /// The largest bias of a code, in values.
    bias: f32,
    /// Looks at the codes, where they will be asked for (`value_looks.rs`).
    finder: Option<MagnitudeFinder>,
}

impl GridValues {
    pub(crate) fn new(
        config: KernelConfig,
        side: &HeadCodec,
        tiles: &StreamTiles,
        rows: usize,
    ) -> Option<Self> {
        let grid = side.grid()?;
        let positions = tile_positions(grid, tiles);
        Some(Self {
            lookup: CodeLookup::identity(),
            step: grid.step(),
            sums: vec![0.0; rows * positions.len()],
            weights: vec![0.0; rows],
            lost: vec![0.0; rows],
            unsettled: 0,
            outliers: OutlierSums::new(rows, side.dim()),
            magnitude: largest_codes(grid, &positions).0 * grid.step(),
            bias: positions.iter().map(|(bias, _)| *bias).max().unwrap_or(0) as f32 * grid.step(),
            finder: None,
            positions,
            parts: IntOperands::of_weights(config),
        })
    }

    /// Looks at all codes from now on.
    pub(crate) fn look_at_codes(&mut self, side: &HeadCodec, tiles: &StreamTiles) {
        self.finder = side.grid().and_then(|grid| MagnitudeFinder::new(grid, tiles));
    }

    /// Magnitudes of the values in all tiles so far, where they were looked at.
    pub(crate) fn held_magnitudes(&self) -> Option<HeldMagnitudes> {
        self.finder.as_ref().map(MagnitudeFinder::held_magnitudes)
    }

    /// The largest magnitude of a value that rounded weights are multiplied with.
    pub(crate) fn largest_value(&self) -> f32 {
        self.magnitude
    }

    /// The largest bias of a code, in values: sums carry it until they are unfolded.
    pub(crate) fn largest_bias(&self) -> f32 {
        self.bias
    }

    /// The part that rounding took from all weights of a row together.
    pub(crate) fn joint_residual(&self, row: usize) -> f32 {
        self.lost[row]
    }

    /// Adds the weighted codes of tiles.
    pub(crate) fn add_tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: Range<usize>,
        weights: &SpanScores,
    ) {
        let count = self.positions.len();
        if count == 0 {
            return;
        }
        if let Some(finder) = &mut self.finder {
            finder.add_tiles(simd, codes.bytes);
        }
        self.unsettled += tiles.len();
        if self.unsettled > SETTLED_TILES {
            self.unsettled = tiles.len();
            self.settle_sums();
        }
        self.parts.change_offsets();
        for first in (0..weights.row_count()).step_by(ROWS) {
            let rows = first..weights.row_count().min(first + ROWS);
            let pushed = self.parts.push_weights(simd, weights, rows.clone(), &tiles);
            let units = pushed.map(|row| row.unit * self.step);
            for (index, row) in rows.clone().enumerate() {
                self.lost[row] += pushed[index].lost;
                let sum = self.parts.rows_from(index).sums[0] as f32;
                self.weights[row] += sum * units[index];
            }
            let sums = &mut self.sums[rows.start * count..rows.end * count];
            let units = &units[..rows.len()];
            let target = SumTarget { units, factors: &[], first: 0, count };
            value_dots(simd, codes, &self.lookup, self.parts.rows_from(0), target, sums);
        }
    }

    /// Takes from the sums what their codes were too large by, before that grows beyond them.
    fn settle_sums(&mut self) {
        let rows = self.sums.chunks_exact_mut(self.positions.len()).zip(&mut self.weights);
        for (sums, weight) in rows {
            let sums = sums.iter_mut().zip(&self.positions);
            sums.for_each(|(sum, (bias, _))| *sum -= *bias as f32 * *weight);
            *weight = 0.0;
        }
    }

    /// Adds an outlier of token `token` of the span, which tiles do not hold.
    pub(crate) fn add_outlier(&mut self, rest: &OutlierRest, token: usize, weights: &SpanScores) {
        for row in 0..weights.row_count() {
            let weighted = f64::from(weights.row(row)[token]) * f64::from(rest.rest * self.step);
            self.outliers.add_weighted(row, rest.position, weighted);
        }
    }

    /// Scales the sums of a row.
    pub(crate) fn scale_row(&mut self, row: usize, factor: f32) {
        let count = self.positions.len();
        self.weights[row] *= factor;
        self.lost[row] *= factor;
        self.sums[row * count..][..count].iter_mut().for_each(|sum| *sum *= factor);
        self.outliers.scale_row(row, factor);
    }

    /// Adds the sums of row `row` to `out`, in the order of coefficients.
    pub(crate) fn unfold_row(&self, row: usize, out: &mut [f32]) {
        let (weight, sums) = (self.weights[row], &self.sums[row * self.positions.len()..]);
        let sums = self.positions.iter().zip(sums);
        let Some(outliers) = self.outliers.row_sums(row) else {
            sums.for_each(|((bias, coefficient), sum)| {
                out[*coefficient] += sum - *bias as f32 * weight;
            });
            return;
        };
        let mut wide = outliers.to_vec();
        for ((bias, coefficient), sum) in sums {
            wide[*coefficient] += f64::from(*sum) - f64::from(*bias) * f64::from(weight);
        }
        out.iter_mut().zip(&wide).for_each(|(out, sum)| *out += *sum as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_farthest_code_is_found_wherever_it_stands() {
        for positions in [1usize, 8, 15, 16, 33] {
            let biases: Vec<u8> = (0..positions).flat_map(|at| [(at % 40) as u8; QUAD]).collect();
            let calm: Vec<u8> =
                biases.iter().map(|bias| bias + 1).collect::<Vec<_>>().repeat(TILE / QUAD);
            for at in [0, calm.len() / 2, calm.len() - 1] {
                for far in [0u8, 90] {
                    let mut tiles = calm.clone();
                    tiles[at] = far;
                    let want = far.abs_diff(biases[at % biases.len()]).max(1);
                    for simd in Simd::available_levels() {
                        assert_eq!(farthest_code(simd, &tiles, &biases), want, "{simd:?} {at}");
                    }
                }
            }
        }
    }
}
