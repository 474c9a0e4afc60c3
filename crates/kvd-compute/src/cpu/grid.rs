//! Grid sides, straight from their codes: one step per head goes into the query or the weight,
//! and what remains is an integer dot product of codes. Coefficients of the zero class are in no
//! tile; what tiles do not hold is added outlier by outlier.

use crate::cpu::huffman::{OutlierRest, QUAD, StreamTiles};
use crate::cpu::int_dot::{
    CodeLookup, ROWS, SETTLED_TILES, SumTarget, TileCodes, key_dots, value_dots,
};
use crate::cpu::int_operands::{self, IntOperands, ScaledRows};
use crate::cpu::loss::{alike_factor, rounding_loss};
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
    /// The largest sum over a token's codes of their squares, in tiles of keys; `biases` are those
    /// of a token's codes.
    fn largest_energy(tiles: &[u8], biases: &[u8]) -> f32 = largest_energy_body
);

#[inline(always)]
fn largest_energy_body(tiles: &[u8], biases: &[u8]) -> f32 {
    const LANES: usize = QUAD * TILE;
    let mut most = 0;
    for tile in tiles.chunks_exact(TILE * biases.len()) {
        let mut lanes = [0u32; LANES];
        // Four codes of each token, then the next four.
        for (codes, biases) in tile.as_chunks::<LANES>().0.iter().zip(biases.as_chunks().0) {
            let biases: &[u8; QUAD] = biases;
            for (at, (lane, code)) in lanes.iter_mut().zip(codes).enumerate() {
                let apart = u32::from(code.abs_diff(biases[at % QUAD]));
                *lane += apart * apart;
            }
        }
        let tokens = lanes.as_chunks::<QUAD>().0.iter().map(|token| token.iter().sum::<u32>());
        most = tokens.fold(most, u32::max);
    }
    most as f32
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
    /// The squares of those that a token has, and the biases by which they are known.
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
        let (lookup, biases) = (CodeLookup::identity(), byte_biases(&positions));
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
    /// Sums of outliers, which tiles do not hold: `[rows, dim]`.
    rests: Vec<f32>,
    dim: usize,
    /// The largest magnitude that a value in a tile could have. Sums have the biases of codes until
    /// the end, so that zeros cost as much.
    magnitude: f32,
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
            rests: vec![0.0; rows * side.dim()],
            magnitude: largest_codes(grid, &positions).0 * grid.step(),
            positions,
            parts: IntOperands::of_weights(config),
            dim: side.dim(),
        })
    }

    /// The largest magnitude of a value that rounded weights are multiplied with.
    pub(crate) fn largest_value(&self) -> f32 {
        self.magnitude
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
        self.unsettled += tiles.len();
        if self.unsettled > SETTLED_TILES {
            self.unsettled = tiles.len();
            self.settle_sums();
        }
        for first in (0..weights.row_count()).step_by(ROWS) {
            let rows = first..weights.row_count().min(first + ROWS);
            self.parts.clear_rows(tiles.len() * TILE);
            let mut units = [0f32; ROWS];
            let sums = &mut self.sums[rows.start * count..rows.end * count];
            for (index, row) in rows.clone().enumerate() {
                let total = weights.total_weight(row, &tiles);
                let (weights, largest) = weights.tile_weights(row, tiles.clone());
                let pushed = self.parts.push(simd, weights, largest, Some(total));
                self.lost[row] += pushed.lost;
                let unit = pushed.unit * self.step;
                units[index] = unit;
                self.weights[row] += self.parts.rows_from(index).sums[0] as f32 * unit;
            }
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
        let rests = self.rests.chunks_exact_mut(self.dim);
        for (row, rests) in rests.enumerate() {
            rests[rest.position] += weights.row(row)[token] * rest.rest * self.step;
        }
    }

    /// Scales the sums of a row.
    pub(crate) fn scale_row(&mut self, row: usize, factor: f32) {
        let count = self.positions.len();
        self.weights[row] *= factor;
        self.lost[row] *= factor;
        let sums = self.sums[row * count..][..count].iter_mut();
        sums.chain(&mut self.rests[row * self.dim..][..self.dim]).for_each(|sum| *sum *= factor);
    }

    /// Adds the sums of row `row` to `out`, in the order of coefficients.
    pub(crate) fn unfold_row(&self, row: usize, out: &mut [f32]) {
        let sums = &self.sums[row * self.positions.len()..];
        for ((bias, coefficient), sum) in self.positions.iter().zip(sums) {
            out[*coefficient] += sum - *bias as f32 * self.weights[row];
        }
        let rests = &self.rests[row * self.dim..][..self.dim];
        out.iter_mut().zip(rests).for_each(|(out, rest)| *out += rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_energy_is_of_one_token_and_without_biases() {
        const PER_ROW: usize = 12;
        let biases: Vec<u8> = (0..PER_ROW).map(|at| (at * 7 % 40) as u8).collect();
        let tiles: Vec<u8> = (0..3 * TILE * PER_ROW).map(|at| (at * 89 % 251) as u8).collect();
        let energy = |tile: &[u8], token: usize| -> u32 {
            let code = |at: usize| tile[at / QUAD * QUAD * TILE + token * QUAD + at % QUAD];
            let square = |at: usize| u32::from(code(at).abs_diff(biases[at])).pow(2);
            (0..PER_ROW).map(square).sum()
        };
        let all = tiles
            .chunks_exact(TILE * PER_ROW)
            .flat_map(|tile| (0..TILE).map(move |token| (tile, token)));
        let most = all.map(|(tile, token)| energy(tile, token)).max().unwrap();
        for simd in Simd::available_levels() {
            assert_eq!(largest_energy(simd, &tiles, &biases), most as f32, "{simd:?}");
            // Codes at their biases are zeros.
            let zeros: Vec<u8> =
                biases.chunks_exact(QUAD).flat_map(|quad| quad.repeat(TILE)).collect();
            assert_eq!(largest_energy(simd, &zeros, &biases), 0.0, "{simd:?}");
        }
    }
}
