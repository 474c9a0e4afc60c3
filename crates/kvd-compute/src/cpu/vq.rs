//! Vector-quantized sides, straight from their codes: an entry's channels are looked up as bytes
//! in registers and multiplied there; rows of K or V never exist.
//!
//! Entries are held as bytes; `fit` puts them on 255 levels that f16 holds exactly, so nothing is
//! lost. Other codebooks take the generic path. A score is an exact integer times a unit.

use crate::cpu::expand::CodeExpander;
use crate::cpu::int_dot::{
    CodeLookup, ROWS, SumTarget, TileCodes, key_dots, value_dots, wants_bytes,
};
use crate::cpu::int_operands::{IntOperands, ScaledRows, sums_fit};
use crate::cpu::loss::{alike_factor, rounding_loss};
use crate::cpu::simd::{KernelConfig, Simd};
use crate::cpu::span_scores::SpanScores;
use kvd_codec::{Codebook, HeadCodec};
use kvd_core::Side;
use std::ops::Range;

/// How the codes of a side are looked up.
pub(super) struct VqLookup {
    lookup: CodeLookup,
    /// Where the tables do not fit registers, or products take bytes alone.
    expand: Option<CodeExpander>,
    dims: usize,
    /// Codes of a row.
    per_row: usize,
    /// The largest sum of squares of what a code stands for, in units.
    energy: f32,
}

/// Whether there is a kernel for the side, if its entries fit bytes.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    let vq = side.vq().filter(|vq| vq.stages() == 1 && !vq.is_grouped());
    vq.is_some_and(|vq| {
        let book: &Codebook = vq.stage_codebook(0, 0);
        let count = book.entries().len() / book.dim();
        let fits = count.is_power_of_two() && count <= 256;
        fits && (side.dim() / book.dim()).is_multiple_of(4)
    })
}

impl VqLookup {
    /// The codebook as bytes, for so many rows; `None` when entries fit none.
    fn new(simd: Simd, side: &HeadCodec, rows: usize) -> Option<Self> {
        let book: &Codebook = side.vq()?.stage_codebook(0, 0);
        let count = book.entries().len() / book.dim();
        let (dims, per_row) = (book.dim(), side.dim() / book.dim());
        let lookup = CodeLookup::of_entries(dims, count.ilog2(), book.entries())?;
        Some(Self::of_lookup(simd, lookup, per_row, rows))
    }

    /// Takes `per_row` codes of a row to tables, for products with so many rows of factors.
    pub(super) fn of_lookup(simd: Simd, lookup: CodeLookup, per_row: usize, rows: usize) -> Self {
        let (dims, energy) = (lookup.dims, lookup.largest_energy());
        if lookup.is_fast(simd) && !wants_bytes(simd, rows) {
            return Self { lookup, expand: None, dims, per_row, energy };
        }
        let expand = Some(CodeExpander::new(&lookup));
        Self { lookup: lookup.after_lookup(), expand, dims, per_row, energy }
    }

    /// Codes of tiles, `group` of them at a time, as the products take them.
    pub(super) fn expand_tiles<'a>(
        &'a mut self,
        simd: Simd,
        codes: TileCodes<'a>,
        side: Side,
        buffer: &'a mut Vec<u8>,
    ) -> (TileCodes<'a>, &'a CodeLookup) {
        let Some(expand) = &mut self.expand else { return (codes, &self.lookup) };
        let bytes = expand.expand_codes(simd, codes, side, buffer);
        let per_row = self.dims * self.per_row;
        (TileCodes { bytes, width: 8, per_row, ..codes }, &self.lookup)
    }
}

/// Queries of a unit, ready for one head's key codes.
pub(crate) struct VqKeys {
    book: VqLookup,
    spread: Vec<u8>,
    parts: IntOperands,
    /// One unit of a score, by row.
    units: Vec<f32>,
    /// See [`alike_factor`]; by row, of the first queries.
    alike_factors: Vec<f32>,
    /// See [`VqKeys::score_loss`].
    losses: Vec<f32>,
}

impl VqKeys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let book = VqLookup::new(config.simd, side, queries.len() / side.dim())?;
        let (dims, per_row) = (book.dims, book.per_row);
        let (parts, queries) = (IntOperands::of_queries(config), queries.chunks_exact(side.dim()));
        Self::of_planar(config.simd, parts, book, queries, |query, planar| {
            for (dim, plane) in planar.chunks_exact_mut(per_row).enumerate() {
                let channels = query[dim..].iter().step_by(dims);
                plane.iter_mut().zip(channels).for_each(|(to, from)| *to = *from);
            }
        })
    }

    /// Takes queries that `planes` writes as factors of the book's channels, `[channel of a code,
    /// position]`; `None` when one is not finite, or sums of so many
    /// would not fit.
    pub(super) fn of_planar<'q>(
        simd: Simd,
        parts: IntOperands,
        book: VqLookup,
        queries: impl Iterator<Item = &'q [f32]>,
        planes: impl Fn(&[f32], &mut [f32]),
    ) -> Option<Self> {
        if !sums_fit(book.dims * book.per_row, book.lookup.largest_value()) {
            return None;
        }
        let mut keys = Self::without_queries(parts, book);
        keys.set_queries(simd, queries, planes).then_some(keys)
    }

    /// Has no queries yet.
    pub(super) fn without_queries(parts: IntOperands, book: VqLookup) -> Self {
        let parts = parts.multiplied_with(book.lookup.largest_value());
        Self {
            book,
            spread: Vec::new(),
            parts,
            units: Vec::new(),
            alike_factors: Vec::new(),
            losses: Vec::new(),
        }
    }

    /// Takes other queries; whether all are finite.
    pub(super) fn set_queries<'q>(
        &mut self,
        simd: Simd,
        queries: impl Iterator<Item = &'q [f32]>,
        planes: impl Fn(&[f32], &mut [f32]),
    ) -> bool {
        let Self { book, parts, units, alike_factors, losses, .. } = self;
        let mut planar = vec![0f32; book.dims * book.per_row];
        parts.clear_rows(planar.len());
        units.clear();
        let energy = book.energy * book.per_row as f32;
        let mut finite = true;
        for (row, query) in queries.enumerate() {
            planes(query, &mut planar);
            let largest = planar.iter().fold(0f32, |m, q| m.max(q.abs()));
            finite &= largest.is_finite() && !planar.iter().any(|q| q.is_nan());
            let largest = if largest.is_finite() { largest } else { 0.0 };
            let unit = parts.push(simd, &planar, largest, None).unit;
            units.push(unit * book.lookup.scale);
            if alike_factors.len() == row {
                alike_factors.push(alike_factor(simd, &planar, unit));
                losses.push(0.0);
            }
            let loss = rounding_loss(unit * book.lookup.scale, energy) * alike_factors[row];
            losses[row] = losses[row].max(loss);
        }
        finite
    }

    /// How far rounding may take a score of that row, so far: see [`rounding_loss`]. Nothing before
    /// there were queries.
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        self.losses.get(row).copied().unwrap_or_default()
    }

    /// Scores all rows against a few tiles of codes.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tile: usize,
        scores: &mut SpanScores,
    ) {
        let (codes, lookup) = self.book.expand_tiles(simd, codes, Side::Key, &mut self.spread);
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows_from(first);
            let units = &self.units[first..first + rows.row_count()];
            let out = scores.rows_mut(first, tile);
            key_dots(simd, codes, lookup, ScaledRows { rows, units }, out);
        }
    }
}

/// Accumulators of a unit over one head's value codes.
pub(crate) struct VqValues {
    book: VqLookup,
    spread: Vec<u8>,
    parts: IntOperands,
    /// Signed sums of the rounding residuals of weights, by row.
    lost: Vec<f32>,
}

impl VqValues {
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, rows: usize) -> Option<Self> {
        let book = VqLookup::new(config.simd, side, rows)?;
        let lost = vec![0.0; rows];
        Some(Self { book, spread: Vec::new(), parts: IntOperands::of_weights(config), lost })
    }

    /// The part that rounding took from all weights of a row together.
    pub(crate) fn joint_residual(&self, row: usize) -> f32 {
        self.lost[row]
    }

    /// Scales row `row` of the sums; `sums` is that row.
    pub(crate) fn scale_row(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        self.lost[row] *= factor;
        sums.iter_mut().for_each(|sum| *sum *= factor);
    }

    /// The largest magnitude of a value, before gains.
    pub(crate) fn largest_value(&self) -> f32 {
        self.book.energy.sqrt() * self.book.lookup.scale
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, channel of a code, position]`).
    pub(crate) fn add_tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: Range<usize>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        let dim = self.book.dims * self.book.per_row;
        let (codes, lookup) = self.book.expand_tiles(simd, codes, Side::Value, &mut self.spread);
        self.parts.change_offsets();
        for first in (0..weights.row_count()).step_by(ROWS) {
            let rows = first..weights.row_count().min(first + ROWS);
            let pushed = self.parts.push_weights(simd, weights, rows.clone(), &tiles);
            for (lost, pushed) in self.lost[rows.clone()].iter_mut().zip(&pushed) {
                *lost += pushed.lost;
            }
            let units = pushed.map(|row| row.unit * lookup.scale);
            let units = &units[..rows.len()];
            let target = SumTarget { units, factors: &[], first: 0, count: codes.per_row };
            let sums = &mut sums[rows.start * dim..rows.end * dim];
            value_dots(simd, codes, lookup, self.parts.rows_from(0), target, sums);
        }
    }

    /// Adds sums as [`VqValues::add_tiles`] leaves them to a row in the order of its channels.
    pub(crate) fn unfold_row(&self, sums: &[f32], row: &mut [f32]) {
        for (dim, plane) in sums.chunks_exact(self.book.per_row).enumerate() {
            let channels = row[dim..].iter_mut().step_by(self.book.dims);
            channels.zip(plane).for_each(|(to, from)| *to += from);
        }
    }
}
