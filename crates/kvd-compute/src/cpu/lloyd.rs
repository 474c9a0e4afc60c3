//! Lloyd sides, straight from their codes: a level is some bytes, looked up like channels of a
//! codebook, or what it adds to a score is looked up itself (`score_tables/`). A row's scale goes
//! into its score or its weight.

use crate::cpu::int_dot::{ROWS, SumTarget, TileCodes, value_dots};
use crate::cpu::int_operands::{FoldScales, IntOperands, RoundedRow};
use crate::cpu::levels::LevelBytes;
use crate::cpu::loss::{RoundingLoss, largest_of};
use crate::cpu::score_tables;
use crate::cpu::simd::{KernelConfig, Simd};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use crate::cpu::vq::{self, VqLookup};
use kvd_codec::HeadCodec;
use kvd_core::{DType, Side};

/// Whether there is a kernel for the side.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    side.lloyd_levels().is_some_and(|levels| levels.len() <= 256) && side.dim().is_multiple_of(4)
}

/// The levels as a codebook whose channels are bytes, an even number of them as kernels take them,
/// and the factor of each.
fn level_lookup(
    config: KernelConfig,
    codec: &HeadCodec,
    side: Side,
    rows: usize,
) -> Option<(VqLookup, Vec<f32>)> {
    let levels = LevelBytes::new(codec.lloyd_levels()?, side);
    let count = levels.tables.len().next_multiple_of(2);
    let levels = levels.padded_to(count);
    let factors = levels.tables.iter().map(|(_, factor)| *factor).collect();
    let lookup = VqLookup::of_lookup(config.simd, levels.to_lookup(), codec.dim(), rows);
    Some((lookup, factors))
}

/// Queries of a unit.
pub(crate) struct LloydKeys {
    products: LloydKernel,
    /// The largest scale of a token so far.
    largest_scale: f32,
}

/// Keys as integer products or as score tables, by the width of their codes.
#[expect(clippy::large_enum_variant, reason = "there is one for each unit, on the stack")]
enum LloydKernel {
    Words(vq::VqKeys),
    Tables(score_tables::TableKeys),
}

impl LloydKeys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let products = Self::word_keys(config, side, queries)?;
        Some(Self { products, largest_scale: 0.0 })
    }

    /// As [`LloydKeys::new`], with levels that are looked up.
    pub(crate) fn with_tables(simd: Simd, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let tables = score_tables::TableKeys::of_levels(simd, side, queries)?;
        Some(Self { products: LloydKernel::Tables(tables), largest_scale: 0.0 })
    }

    /// How far rounding may take a score of that row, so far: see
    /// [`rounding_loss`](crate::cpu::loss::rounding_loss).
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        match &self.products {
            LloydKernel::Words(keys) => keys.score_loss(row) * self.largest_scale,
            LloydKernel::Tables(_) => 0.0,
        }
    }

    #[cfg(test)]
    pub(crate) fn has_tables(&self) -> bool {
        matches!(self.products, LloydKernel::Tables(_))
    }

    fn word_keys(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<LloydKernel> {
        let rows = queries.len() / side.dim();
        let (book, factors) = level_lookup(config, side, Side::Key, rows)?;
        let planes = |query: &[f32], planar: &mut [f32]| {
            for (plane, factor) in planar.chunks_exact_mut(query.len()).zip(&factors) {
                plane.iter_mut().zip(query).for_each(|(to, from)| *to = factor * from);
            }
        };
        // The low byte of a level counts little: times one byte of a query it would be nothing.
        let (parts, queries) =
            (IntOperands::of_scaled_queries(config), queries.chunks_exact(side.dim()));
        vq::VqKeys::of_planar(config.simd, parts, book, queries, planes).map(LloydKernel::Words)
    }

    /// Scores all rows against a few tiles.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        scores: &mut SpanScores,
    ) {
        match &mut self.products {
            LloydKernel::Words(keys) => keys.score_tiles(simd, codes, cursor.in_span, scores),
            LloydKernel::Tables(keys) => keys.score_tiles(simd, codes, cursor.in_span, scores),
        }
        let (mut scales, tokens) = ([0f32; SPAN], cursor.count * TILE);
        let scales = &mut scales[..tokens];
        DType::F16
            .widen_values(&cursor.page.scales[2 * TILE * cursor.in_page..][..2 * tokens], scales);
        self.largest_scale = self.largest_scale.max(largest_of(simd, scales));
        for row in 0..scores.row_count() {
            let scores = &mut scores.row_mut(row)[cursor.in_span * TILE..][..tokens];
            scores.iter_mut().zip(&*scales).for_each(|(score, scale)| *score *= scale);
        }
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct LloydValues {
    book: VqLookup,
    spread: Vec<u8>,
    /// The factors of the bytes of a level.
    factors: Vec<f32>,
    parts: IntOperands,
    /// Zeros of f16, one for each token of a span: scales have no minima.
    zeros: Vec<u8>,
    /// `[rows, bytes of a level, dim]`.
    sums: Vec<f32>,
    dim: usize,
    /// For rounding of weights times scales, by row.
    rounding: Vec<RoundingLoss>,
    /// The largest magnitude of a level.
    largest: f32,
}

impl LloydValues {
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, rows: usize) -> Option<Self> {
        let (book, factors) = level_lookup(config, side, Side::Value, rows)?;
        let (parts, dim) = (IntOperands::of_weights(config), side.dim());
        let sums = vec![0.0; rows * factors.len() * dim];
        Some(Self {
            book,
            spread: Vec::new(),
            factors,
            parts,
            zeros: Vec::new(),
            sums,
            dim,
            rounding: vec![RoundingLoss::default(); rows],
            largest: side.lloyd_levels()?.iter().fold(0f32, |most, level| most.max(level.abs())),
        })
    }

    /// Losses of a sum for rounding of weights times scales.
    pub(crate) fn folded_loss(&self, row: usize) -> RoundingLoss {
        self.rounding[row].times_magnitude(self.largest)
    }

    /// Adds the weighted codes of tiles.
    pub(crate) fn add_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        weights: &SpanScores,
    ) {
        let (codes, lookup) = self.book.expand_tiles(simd, codes, Side::Value, &mut self.spread);
        let (tokens, width) = (cursor.count * TILE, self.factors.len() * self.dim);
        let scales = &cursor.page.scales[2 * TILE * cursor.in_page..][..2 * tokens];
        self.zeros.resize(2 * tokens, 0);
        self.parts.change_offsets();
        for first in (0..weights.row_count()).step_by(ROWS) {
            let rows = first..weights.row_count().min(first + ROWS);
            let mut values: [&[f32]; ROWS] = [&[]; ROWS];
            for (values, row) in values.iter_mut().zip(rows.clone()) {
                *values = weights.tile_weights(row, cursor.span_tiles()).0;
            }
            self.parts.clear_rows(tokens);
            let mut pushed = [RoundedRow::default(); ROWS];
            let scales = FoldScales { steps: scales, minima: &self.zeros };
            self.parts.push_folded(simd, &values[..rows.len()], scales, &mut pushed);
            for (rounding, pushed) in self.rounding[rows.clone()].iter_mut().zip(&pushed) {
                rounding.add_row(pushed, tokens);
            }
            let units = pushed.map(|row| row.unit);
            let units = &units[..rows.len()];
            let target = SumTarget { units, factors: &[], first: 0, count: codes.per_row };
            let sums = &mut self.sums[rows.start * width..rows.end * width];
            value_dots(simd, codes, lookup, self.parts.rows_from(0), target, sums);
        }
    }

    /// Scales the sums of a row.
    pub(crate) fn scale_row(&mut self, row: usize, factor: f32) {
        let width = self.factors.len() * self.dim;
        self.rounding[row].scale_by(factor);
        self.sums[row * width..][..width].iter_mut().for_each(|sum| *sum *= factor);
    }

    /// Adds the sums of row `row` to `out`.
    pub(crate) fn unfold_row(&self, row: usize, out: &mut [f32]) {
        let planes = self.sums[row * self.factors.len() * self.dim..].chunks_exact(self.dim);
        for (plane, factor) in planes.zip(&self.factors) {
            out.iter_mut().zip(plane).for_each(|(out, sum)| *out += factor * sum);
        }
    }
}
