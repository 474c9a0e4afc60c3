//! Vector-quantized sides, straight from their codes: an entry's channels are looked up as bytes
//! in registers and multiplied there; rows of K or V never exist.
//!
//! Entries are held as bytes; `fit` puts them on 255 levels that f16 holds exactly, so nothing is
//! lost. Other codebooks take the generic path. A score is an exact integer times a unit.

use crate::cpu::dots::{Lookup, ROWS, Target, TileCodes, key_dots, value_dots, wants_bytes};
use crate::cpu::expand::Expand;
use crate::cpu::loss::{alike_factor, rounding_loss};
use crate::cpu::parts::{Parts, fits};
use crate::cpu::scores::{Scores, TILE};
use crate::cpu::simd::{How, Simd};
use kvd_codec::{Codebook, HeadCodec};
use kvd_core::Side;
use std::ops::Range;

/// How the codes of a side are looked up.
pub(super) struct Book {
    lookup: Lookup,
    /// Where the tables do not fit registers, or products take bytes alone.
    expand: Option<Expand>,
    dims: usize,
    /// Codes of a row.
    per_row: usize,
    /// The largest sum of squares of what a code stands for, in units.
    energy: f32,
}

impl Book {
    /// The codebook as bytes, for so many rows; `None` where the generic path must do.
    fn new(simd: Simd, side: &HeadCodec, rows: usize) -> Option<Self> {
        let vq = side.vq().filter(|vq| vq.stages() == 1 && !vq.is_grouped())?;
        let book: &Codebook = vq.stage_codebook(0, 0);
        let count = book.entries().len() / book.dim();
        let (dims, per_row) = (book.dim(), side.dim() / book.dim());
        let fits = count.is_power_of_two() && count <= 256;
        if !fits || !per_row.is_multiple_of(4) {
            return None;
        }
        let lookup = Lookup::table(dims, count.ilog2(), book.entries())?;
        Some(Self::of(simd, lookup, per_row, rows))
    }

    /// Takes `per_row` codes of a row to tables, for products with so many rows of factors.
    pub(super) fn of(simd: Simd, lookup: Lookup, per_row: usize, rows: usize) -> Self {
        let (dims, energy) = (lookup.dims, lookup.energy());
        if lookup.is_fast(simd) && !wants_bytes(simd, rows) {
            return Self { lookup, expand: None, dims, per_row, energy };
        }
        let expand = Some(Expand::new(&lookup));
        Self { lookup: lookup.expanded(), expand, dims, per_row, energy }
    }

    /// Codes of tiles, `group` of them at a time, as the products take them.
    pub(super) fn values<'a>(
        &'a mut self,
        simd: Simd,
        codes: TileCodes<'a>,
        (side, buffer): (Side, &'a mut Vec<u8>),
    ) -> (TileCodes<'a>, &'a Lookup) {
        let Some(expand) = &mut self.expand else { return (codes, &self.lookup) };
        let bytes = expand.expand(simd, codes, (side, buffer));
        let per_row = self.dims * self.per_row;
        (TileCodes { bytes, width: 8, per_row, ..codes }, &self.lookup)
    }
}

/// Queries of a unit, ready for one head's key codes.
pub(crate) struct Keys {
    book: Book,
    spread: Vec<u8>,
    parts: Parts,
    /// One unit of a score, by row.
    units: Vec<f32>,
    /// See [`alike_factor`]; by row, of the first queries.
    alikes: Vec<f32>,
    /// See [`Keys::loss`].
    losses: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(how: How, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let book = Book::new(how.0, side, queries.len() / side.dim())?;
        let (dims, per_row) = (book.dims, book.per_row);
        let (parts, queries) = (Parts::of_queries(how), queries.chunks_exact(side.dim()));
        Self::planar(how.0, (parts, book), queries, |query, planar| {
            for (dim, plane) in planar.chunks_exact_mut(per_row).enumerate() {
                let channels = query[dim..].iter().step_by(dims);
                plane.iter_mut().zip(channels).for_each(|(to, from)| *to = *from);
            }
        })
    }

    /// Takes queries that `planes` writes as factors of the book's channels, `[channel of a code,
    /// position]`; `None` when one is not finite, or sums of so many
    /// would not fit.
    pub(super) fn planar<'q>(
        simd: Simd,
        (parts, book): (Parts, Book),
        queries: impl Iterator<Item = &'q [f32]>,
        planes: impl Fn(&[f32], &mut [f32]),
    ) -> Option<Self> {
        if !fits(book.dims * book.per_row, book.lookup.largest()) {
            return None;
        }
        let mut keys = Self::empty(parts, book);
        keys.set(simd, queries, planes).then_some(keys)
    }

    /// Has no queries yet.
    pub(super) fn empty(parts: Parts, book: Book) -> Self {
        let parts = parts.meeting(book.lookup.largest());
        Self {
            book,
            spread: Vec::new(),
            parts,
            units: Vec::new(),
            alikes: Vec::new(),
            losses: Vec::new(),
        }
    }

    /// Takes other queries; whether all are finite.
    pub(super) fn set<'q>(
        &mut self,
        simd: Simd,
        queries: impl Iterator<Item = &'q [f32]>,
        planes: impl Fn(&[f32], &mut [f32]),
    ) -> bool {
        let Self { book, parts, units, alikes, losses, .. } = self;
        let mut planar = vec![0f32; book.dims * book.per_row];
        parts.reset(planar.len());
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
            if alikes.len() == row {
                alikes.push(alike_factor(simd, &planar, unit));
                losses.push(0.0);
            }
            let loss = rounding_loss(unit * book.lookup.scale, energy) * alikes[row];
            losses[row] = losses[row].max(loss);
        }
        finite
    }

    /// How far rounding may take a score of that row, so far: see [`rounding_loss`]. Nothing before
    /// there were queries.
    pub(crate) fn loss(&self, row: usize) -> f32 {
        self.losses.get(row).copied().unwrap_or_default()
    }

    /// Scores all rows against a few tiles of codes.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tile: usize,
        scores: &mut Scores,
    ) {
        let (codes, lookup) = self.book.values(simd, codes, (Side::Key, &mut self.spread));
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows(first);
            let units = &self.units[first..first + rows.count()];
            let out = scores.rows_mut(first, tile);
            key_dots(simd, codes, lookup, (rows, units), out);
        }
    }
}

/// Accumulators of a unit over one head's value codes.
pub(crate) struct Values {
    book: Book,
    spread: Vec<u8>,
    parts: Parts,
    /// Signed sums of the rounding residuals of weights, by row.
    lost: Vec<f32>,
}

impl Values {
    pub(crate) fn new(how: How, side: &HeadCodec, rows: usize) -> Option<Self> {
        let book = Book::new(how.0, side, rows)?;
        let lost = vec![0.0; rows];
        Some(Self { book, spread: Vec::new(), parts: Parts::of_weights(how), lost })
    }

    /// How far a sum of a row is off at most for what rounding took from all of its weights
    /// together.
    pub(crate) fn lost(&self, row: usize) -> f32 {
        self.lost[row].abs() * self.magnitude()
    }

    /// Scales what was summed for row `row`, `sums` of it.
    pub(crate) fn scale(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        self.lost[row] *= factor;
        sums.iter_mut().for_each(|sum| *sum *= factor);
    }

    /// The largest magnitude of a value, before gains.
    pub(crate) fn magnitude(&self) -> f32 {
        self.book.energy.sqrt() * self.book.lookup.scale
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, channel of a code, position]`).
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: Range<usize>,
        weights: &Scores,
        sums: &mut [f32],
    ) {
        let dim = self.book.dims * self.book.per_row;
        let (codes, lookup) = self.book.values(simd, codes, (Side::Value, &mut self.spread));
        for first in (0..weights.rows()).step_by(ROWS) {
            let rows = first..weights.rows().min(first + ROWS);
            self.parts.reset(tiles.len() * TILE);
            let mut units = [0f32; ROWS];
            for (row, unit) in rows.clone().zip(&mut units) {
                let total = weights.total_weight(row, &tiles);
                let (weights, largest) = weights.tiles(row, tiles.clone());
                let pushed = self.parts.push(simd, weights, largest, Some(total));
                *unit = pushed.unit * lookup.scale;
                self.lost[row] += pushed.lost;
            }
            let units = &units[..rows.len()];
            let target = Target { units, factors: &[], first: 0, count: codes.per_row };
            let sums = &mut sums[rows.start * dim..rows.end * dim];
            value_dots(simd, codes, lookup, (self.parts.rows(0), target), sums);
        }
    }

    /// Adds sums as [`Values::tiles`] leaves them to a row in the order of its channels.
    pub(crate) fn unfold(&self, sums: &[f32], row: &mut [f32]) {
        for (dim, plane) in sums.chunks_exact(self.book.per_row).enumerate() {
            let channels = row[dim..].iter_mut().step_by(self.book.dims);
            channels.zip(plane).for_each(|(to, from)| *to += from);
        }
    }
}
