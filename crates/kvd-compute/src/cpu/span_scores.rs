//! Scores, then weights, of a unit's rows over a span of tokens.

use crate::cpu::scratch::ScratchVec;
use crate::cpu::softmax::WeightSums;
use crate::cpu::uniform::sum_lanes;
use std::ops::Range;

/// Tokens of a tile of codes.
pub(crate) const TILE: usize = kvd_codec::CodeLayout::TILE_TOKENS;
/// Most tokens of a span: longer ones amortise more, and scores should stay in cache.
pub(crate) const SPAN: usize = 128;

/// Where a score stands, or 0: all of a register at once, then one by one.
pub(crate) fn find_score(scores: &[f32], wanted: f32) -> usize {
    const CHUNK: usize = 16;
    let holds = |chunk: &[f32]| chunk.iter().fold(false, |any, score| any | (*score == wanted));
    let first = CHUNK * scores.chunks(CHUNK).position(holds).unwrap_or(0);
    scores[first..].iter().position(|score| *score == wanted).map_or(0, |at| first + at)
}

/// The tokens that a row sees of a span, and their weights.
#[derive(Clone, Default)]
pub(super) struct RowWeights {
    seen: Range<usize>,
    /// The largest weight, 0 where nothing is seen.
    largest: f32,
    sum: f32,
}

/// A row of [`SPAN`] values for each query row.
pub(crate) struct SpanScores {
    values: ScratchVec<f32>,
    rows: ScratchVec<RowWeights>,
}

impl SpanScores {
    pub(crate) fn new(rows: usize) -> Self {
        Self {
            values: ScratchVec::repeat_value(0.0, rows * SPAN),
            rows: ScratchVec::repeat_value(RowWeights::default(), rows),
        }
    }

    pub(crate) fn row_count(&self) -> usize {
        self.rows.len()
    }

    /// Says which tokens of some tiles these rows see: the weight of others in those is 0.
    pub(crate) fn set_seen(
        &mut self,
        rows: Range<usize>,
        seen: &Range<usize>,
        tiles: &Range<usize>,
    ) {
        let tokens = tiles.start * TILE..tiles.end * TILE;
        if seen.start > tokens.start || seen.end < tokens.end {
            for values in &mut self.values.as_chunks_mut::<SPAN>().0[rows.clone()] {
                values[tokens.start..seen.start.max(tokens.start)].fill(0.0);
                values[seen.end..tokens.end.max(seen.end)].fill(0.0);
            }
        }
        for row in &mut self.rows[rows] {
            *row = RowWeights { seen: seen.clone(), largest: 0.0, sum: 0.0 };
        }
    }

    /// Takes the largest weights and the sums of weights of some rows.
    pub(crate) fn take_sums(&mut self, rows: Range<usize>, sums: &WeightSums) {
        let sums = sums.largest.iter().zip(&sums.weights);
        for (row, (largest, sum)) in self.rows[rows].iter_mut().zip(sums) {
            (row.largest, row.sum) = (*largest, *sum);
        }
    }

    /// The largest weight of a row, 0 where it sees nothing of the span.
    pub(crate) fn largest_weight(&self, row: usize) -> f32 {
        self.rows[row].largest
    }

    /// The sum of the weights of a row in some tiles.
    pub(crate) fn total_weight(&self, row: usize, tiles: &Range<usize>) -> f32 {
        let (tokens, of) = (tiles.start * TILE..tiles.end * TILE, &self.rows[row]);
        if of.seen.is_empty() || tokens.start <= of.seen.start && of.seen.end <= tokens.end {
            return of.sum;
        }
        sum_lanes(&self.row(row)[tokens])
    }

    /// Which tokens `row` sees.
    pub(crate) fn seen_tokens(&self, row: usize) -> Range<usize> {
        self.rows[row].seen.clone()
    }

    /// One row of the span.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32; SPAN] {
        &mut self.values.as_chunks_mut::<SPAN>().0[row]
    }

    /// One row of the span.
    pub(crate) fn row(&self, row: usize) -> &[f32; SPAN] {
        &self.values.as_chunks::<SPAN>().0[row]
    }

    /// `count` rows from `first` on.
    pub(crate) fn some_mut(&mut self, first: usize, count: usize) -> &mut [f32] {
        &mut self.values[first * SPAN..(first + count) * SPAN]
    }

    /// All rows, each [`SPAN`] after the one before, from token `first` on.
    pub(crate) fn tail_mut(&mut self, first: usize) -> &mut [f32] {
        &mut self.values[first..]
    }

    /// Rows from `first` on, each [`SPAN`] after the one before, from a tile's first token on.
    pub(crate) fn rows_mut(&mut self, first: usize, tile: usize) -> &mut [f32] {
        &mut self.values[first * SPAN + tile * TILE..]
    }

    /// Rows from `first` on, to be read, as [`SpanScores::rows_mut`] has them.
    pub(crate) fn rows_from(&self, first: usize, tile: usize) -> &[f32] {
        &self.values[first * SPAN + tile * TILE..]
    }

    /// Multiplies the weights of all rows for `tokens`, of which kernels see no others then.
    pub(crate) fn multiply_weights(&mut self, tokens: Range<usize>, factors: &[f32; SPAN]) {
        let rows = self.values.as_chunks_mut::<SPAN>().0.iter_mut();
        for (weights, row) in rows.zip(&mut self.rows) {
            let weights = &mut weights[tokens.clone()];
            let factors = &factors[tokens.clone()];
            row.largest = weights.iter_mut().zip(factors).fold(0.0, |largest, (weight, factor)| {
                *weight *= factor;
                largest.max(*weight)
            });
            row.sum = sum_lanes(weights);
        }
    }

    /// Weights of a row in some tiles, and the largest of the row.
    pub(crate) fn tile_weights(&self, row: usize, tiles: Range<usize>) -> (&[f32], f32) {
        (&self.row(row)[tiles.start * TILE..tiles.end * TILE], self.rows[row].largest)
    }
}
