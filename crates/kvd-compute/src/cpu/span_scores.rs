//! Scores, then weights, of a unit's rows over a span of tokens.

use crate::cpu::scratch::ScratchVec;
use crate::cpu::softmax::{ROWS, WeightSums};
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

/// A row of [`SPAN`] values for each query row.
pub(crate) struct SpanScores {
    values: ScratchVec<f32>,
    /// Which tokens each row sees.
    seen: ScratchVec<Range<usize>>,
    /// Largest weight of each row, 0 where it sees nothing of the span.
    largest: ScratchVec<f32>,
    /// Sum of the weights of each row.
    sums: ScratchVec<f32>,
}

/// Weights of up to four rows in some tiles.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    /// Rows of `len` values, each [`SPAN`] after the one before.
    pub(super) values: &'a [f32],
    pub(super) len: usize,
    pub(super) rows: usize,
    /// The largest weight of each row in its span.
    pub(super) largest: [f32; ROWS],
    /// Sums of the weights.
    pub(super) totals: [f32; ROWS],
}

impl<'a> WeightRows<'a> {
    /// The weights of one of the rows.
    pub(super) fn weights_of(&self, row: usize) -> &'a [f32] {
        &self.values[row * SPAN..][..self.len]
    }
}

/// Copies up to four values, all of them at once: kernels load them so, which would wait for
/// stores one by one.
fn copy_few(to: &mut [f32], from: &[f32; ROWS]) {
    match <&mut [f32; ROWS]>::try_from(&mut *to) {
        Ok(all) => *all = *from,
        Err(_) => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
    }
}

/// Up to four values as [`copy_few`] writes them, zeros after them.
fn take_few(from: &[f32]) -> [f32; ROWS] {
    <[f32; ROWS]>::try_from(from).unwrap_or_else(|_| {
        let mut few = [0.0; ROWS];
        few.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        few
    })
}

impl SpanScores {
    pub(crate) fn new(rows: usize) -> Self {
        Self {
            values: ScratchVec::repeat_value(0.0, rows * SPAN),
            seen: ScratchVec::repeat_value(0..0, rows),
            largest: ScratchVec::repeat_value(0.0, rows),
            sums: ScratchVec::repeat_value(0.0, rows),
        }
    }

    pub(crate) fn row_count(&self) -> usize {
        self.largest.len()
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
        self.seen[rows.clone()].iter_mut().for_each(|row| *row = seen.clone());
        if seen.is_empty() {
            self.largest[rows.clone()].fill(0.0);
            self.sums[rows].fill(0.0);
        }
    }

    /// Takes the largest weights and the sums of weights of up to four rows.
    pub(crate) fn take_sums(&mut self, rows: Range<usize>, sums: &WeightSums) {
        copy_few(&mut self.largest[rows.clone()], &sums.largest);
        copy_few(&mut self.sums[rows], &sums.weights);
    }

    /// The largest weight of a row, 0 where it sees nothing of the span.
    pub(crate) fn largest_weight(&self, row: usize) -> f32 {
        self.largest[row]
    }

    /// The sum of the weights of a row in some tiles.
    pub(crate) fn total_weight(&self, row: usize, tiles: &Range<usize>) -> f32 {
        if self.is_within(row, tiles) {
            return self.sums[row];
        }
        sum_lanes(&self.row(row)[tiles.start * TILE..tiles.end * TILE])
    }

    /// Whether a row sees no tokens outside some tiles.
    fn is_within(&self, row: usize, tiles: &Range<usize>) -> bool {
        let seen = &self.seen[row];
        seen.is_empty() || tiles.start * TILE <= seen.start && seen.end <= tiles.end * TILE
    }

    /// The weights of up to four rows in some tiles.
    pub(crate) fn weight_rows(&self, rows: Range<usize>, tiles: &Range<usize>) -> WeightRows<'_> {
        let mut totals = take_few(&self.sums[rows.clone()]);
        if !rows.clone().all(|row| self.is_within(row, tiles)) {
            for (total, row) in totals.iter_mut().zip(rows.clone()) {
                *total = self.total_weight(row, tiles);
            }
        }
        WeightRows {
            values: self.rows_from(rows.start, tiles.start),
            len: tiles.len() * TILE,
            rows: rows.len(),
            largest: take_few(&self.largest[rows]),
            totals,
        }
    }

    /// Which tokens `row` sees.
    pub(crate) fn seen_tokens(&self, row: usize) -> Range<usize> {
        self.seen[row].clone()
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
        for (weights, (largest, total)) in rows.zip(self.largest.iter_mut().zip(&mut self.sums)) {
            let weights = &mut weights[tokens.clone()];
            let factors = &factors[tokens.clone()];
            *largest = weights.iter_mut().zip(factors).fold(0.0, |largest, (weight, factor)| {
                *weight *= factor;
                largest.max(*weight)
            });
            *total = sum_lanes(weights);
        }
    }

    /// Weights of a row in some tiles, and the largest of the row.
    pub(crate) fn tile_weights(&self, row: usize, tiles: Range<usize>) -> (&[f32], f32) {
        (&self.row(row)[tiles.start * TILE..tiles.end * TILE], self.largest[row])
    }
}
