//! Lloyd sides, straight from their codes: a level is two bytes, looked up like two channels of a
//! codebook, or what it adds to a score is looked up itself (`score_tables/`). A row's scale goes
//! into its score or its weight.

use crate::cpu::dots::{ROWS, Target, TileCodes, value_dots};
use crate::cpu::levels::LevelBytes;
use crate::cpu::loss::{RoundingLoss, largest as largest_of_all, largest_of};
use crate::cpu::parts::{Parts, Pushed, TOP};
use crate::cpu::score_tables;
use crate::cpu::scores::{SPAN, Scores, TILE};
use crate::cpu::simd::{How, Simd};
use crate::cpu::vq::{self, Book};
use kvd_codec::{FixedCodes, HeadCodec};
use kvd_core::{DType, Side};
use std::ops::Range;

/// Bytes of a level.
const BYTES: usize = 2;
/// Two bytes of a level are off by so much of the largest.
const LEVEL_ERROR: f32 = 0.5 / TOP;
/// Most tokens of a unit whose values may be alike, so that their levels are off alike; in longer
/// ones f16 loses as much.
const ALIKE_TOKENS: usize = 1024;

/// The levels as a codebook of two channels, and the factor of each.
fn book((simd, _): How, side: &HeadCodec, rows: usize) -> Option<(Book, [f32; BYTES])> {
    let levels = side.lloyd_levels()?;
    if levels.len() > 256 || !side.dim().is_multiple_of(4) {
        return None;
    }
    let levels = LevelBytes::pair(levels);
    let factors = std::array::from_fn(|byte| levels.tables[byte].1);
    Some((Book::of(simd, levels.lookup(), side.dim(), rows), factors))
}

/// Queries of a unit.
pub(crate) struct Keys {
    products: Products,
    /// The largest scale of a token so far.
    largest_scale: f32,
}

/// Keys as integer products or as score tables, by the width of their codes.
#[expect(clippy::large_enum_variant, reason = "there is one for each unit, on the stack")]
enum Products {
    Words(vq::Keys),
    Tables(score_tables::Keys),
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(how: How, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let tables = score_tables::Keys::of_levels(how, side, queries).map(Products::Tables);
        let products = tables.or_else(|| Self::words(how, side, queries))?;
        Some(Self { products, largest_scale: 0.0 })
    }

    /// How far rounding may take a score of that row, so far: see
    /// [`rounding_loss`](crate::cpu::loss::rounding_loss).
    pub(crate) fn loss(&self, row: usize) -> f32 {
        match &self.products {
            Products::Words(keys) => keys.loss(row) * self.largest_scale,
            Products::Tables(_) => 0.0,
        }
    }

    fn words(how: How, side: &HeadCodec, queries: &[f32]) -> Option<Products> {
        let (book, factors) = book(how, side, queries.len() / side.dim())?;
        let planes = |query: &[f32], planar: &mut [f32]| {
            for (plane, factor) in planar.chunks_exact_mut(query.len()).zip(factors) {
                plane.iter_mut().zip(query).for_each(|(to, from)| *to = factor * from);
            }
        };
        // The low byte of a level counts little: times one byte of a query it would be nothing.
        let (parts, queries) = (Parts::of_scaled_queries(how), queries.chunks_exact(side.dim()));
        vq::Keys::planar(how.0, (parts, book), queries, planes).map(Products::Words)
    }

    /// Scores all rows against tiles from `in_page` of a page on.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        (codes, tiles): (TileCodes<'_>, Range<usize>),
        scores: &mut Scores,
    ) {
        match &mut self.products {
            Products::Words(keys) => keys.tiles(simd, codes, tiles.start, scores),
            Products::Tables(keys) => keys.tiles(simd, codes, tiles.start, scores),
        }
        let (mut scales, tokens) = ([0f32; SPAN], tiles.len() * TILE);
        let scales = &mut scales[..tokens];
        DType::F16.widen_values(&page.scales[2 * TILE * in_page..][..2 * tokens], scales);
        self.largest_scale = self.largest_scale.max(largest_of(simd, scales));
        for row in 0..scores.rows() {
            let scores = &mut scores.row_mut(row)[tiles.start * TILE..][..tokens];
            scores.iter_mut().zip(&*scales).for_each(|(score, scale)| *score *= scale);
        }
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct Values {
    book: Book,
    spread: Vec<u8>,
    factors: [f32; BYTES],
    parts: Parts,
    /// As many f16 as a span has tokens: scales have no minima.
    zeros: Vec<u8>,
    /// `[rows, bytes of a level, dim]`.
    sums: Vec<f32>,
    dim: usize,
    /// For rounding of weights times scales, by row.
    rounding: Vec<RoundingLoss>,
    /// Weights times scales, by row.
    scaled: Vec<f32>,
    /// Tokens so far.
    tokens: usize,
    /// The largest magnitude of a level.
    largest: f32,
}

impl Values {
    pub(crate) fn new(how: How, side: &HeadCodec, rows: usize) -> Option<Self> {
        let (book, factors) = book(how, side, rows)?;
        let (parts, dim) = (Parts::of_weights(how), side.dim());
        let sums = vec![0.0; rows * BYTES * dim];
        Some(Self {
            book,
            spread: Vec::new(),
            factors,
            parts,
            zeros: Vec::new(),
            sums,
            dim,
            rounding: vec![RoundingLoss::default(); rows],
            scaled: vec![0.0; rows],
            tokens: 0,
            largest: side.lloyd_levels()?.iter().fold(0f32, |most, level| most.max(level.abs())),
        })
    }

    /// Losses of a sum for rounding of weights times scales, and of levels where sums are so large
    /// that values must be alike.
    pub(crate) fn folded_loss(&self, row: usize) -> RoundingLoss {
        let mut rounding = self.rounding[row].times(self.largest);
        let most = self.scaled[row].abs() * self.largest;
        let mut sums = vec![0f32; self.dim];
        self.unfold(row, &mut sums);
        if self.tokens <= ALIKE_TOKENS && 2.0 * largest_of_all(&sums) >= most {
            rounding.lost = rounding.lost.abs() + LEVEL_ERROR * most;
        }
        rounding
    }

    /// Adds the weighted codes of tiles; the first is tile `in_page` of its page.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        (codes, tiles): (TileCodes<'_>, Range<usize>),
        weights: &Scores,
    ) {
        let (codes, lookup) = self.book.values(simd, codes, (Side::Value, &mut self.spread));
        let (tokens, width) = (tiles.len() * TILE, BYTES * self.dim);
        let scales = &page.scales[2 * TILE * in_page..][..2 * tokens];
        self.tokens += tokens;
        self.zeros.resize(2 * tokens, 0);
        for first in (0..weights.rows()).step_by(ROWS) {
            let rows = first..weights.rows().min(first + ROWS);
            let mut values: [&[f32]; ROWS] = [&[]; ROWS];
            for (values, row) in values.iter_mut().zip(rows.clone()) {
                *values = weights.tiles(row, tiles.clone()).0;
            }
            self.parts.reset(tokens);
            let mut pushed = [Pushed::default(); ROWS];
            let scales = (scales, &self.zeros[..]);
            self.parts.push_folded(simd, &values[..rows.len()], scales, &mut pushed);
            for (rounding, pushed) in self.rounding[rows.clone()].iter_mut().zip(&pushed) {
                rounding.add(pushed, tokens);
            }
            let factors = self.parts.rows(0);
            for (at, scaled) in self.scaled[rows.clone()].iter_mut().enumerate() {
                *scaled += factors.sums[at] as f32 * pushed[at].unit;
            }
            let units = pushed.map(|row| row.unit);
            let units = &units[..rows.len()];
            let target = Target { units, factors: &[], first: 0, count: codes.per_row };
            let sums = &mut self.sums[rows.start * width..rows.end * width];
            value_dots(simd, codes, lookup, (self.parts.rows(0), target), sums);
        }
    }

    /// Scales the sums of a row.
    pub(crate) fn scale(&mut self, row: usize, factor: f32) {
        let width = BYTES * self.dim;
        self.rounding[row].scale(factor);
        self.scaled[row] *= factor;
        self.sums[row * width..][..width].iter_mut().for_each(|sum| *sum *= factor);
    }

    /// Adds the sums of row `row` to `out`.
    pub(crate) fn unfold(&self, row: usize, out: &mut [f32]) {
        let planes = self.sums[row * BYTES * self.dim..].chunks_exact(self.dim);
        for (plane, factor) in planes.zip(self.factors) {
            out.iter_mut().zip(plane).for_each(|(out, sum)| *out += factor * sum);
        }
    }
}
