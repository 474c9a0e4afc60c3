//! Vector-quantized sides, straight from their codes: an entry's channels are looked up as bytes
//! in registers and multiplied there; rows of K or V never exist.
//!
//! Entries are held as bytes; `fit` puts them on 255 levels, so nothing is lost but their rounding
//! to f16. Other codebooks take the generic path. A score is an exact integer times a unit.

use super::dots::{Lookup, Parts, ROWS, Target, TileCodes, key_dots, value_dots};
use super::scores::{Scores, TILE};
use super::simd::Simd;
use kvd_codec::{Codebook, HeadSide};
use std::ops::Range;

/// The codebook as bytes; `None` where the generic path is as good.
fn lookup(simd: Simd, side: &HeadSide) -> Option<(Lookup, usize)> {
    let vq = side.vq().filter(|vq| vq.stages() == 1 && !vq.is_grouped())?;
    let book: &Codebook = vq.codebook(0, 0);
    let count = book.entries().len() / book.dim();
    let per_row = side.dim() / book.dim();
    if !count.is_power_of_two() || count > 256 || !per_row.is_multiple_of(4) {
        return None;
    }
    let lookup = Lookup::table(book.dim(), count.ilog2(), book.entries())?;
    lookup.is_fast(simd).then_some((lookup, per_row))
}

/// Queries of a unit, ready for one head's key codes.
pub(crate) struct Keys {
    lookup: Lookup,
    parts: Parts,
    /// What one unit of a score is, by row.
    units: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(simd: Simd, side: &HeadSide, queries: &[f32]) -> Option<Self> {
        let (lookup, per_row) = lookup(simd, side)?;
        let (mut parts, mut units) = (Parts::default(), Vec::new());
        parts.reset(side.dim());
        let mut planar = vec![0f32; side.dim()];
        for query in queries.chunks_exact(side.dim()) {
            for (dim, plane) in planar.chunks_exact_mut(per_row).enumerate() {
                let channels = query[dim..].iter().step_by(lookup.dims);
                plane.iter_mut().zip(channels).for_each(|(to, from)| *to = *from);
            }
            let largest = query.iter().fold(0f32, |m, q| m.max(q.abs()));
            if !largest.is_finite() {
                return None;
            }
            units.push(parts.push(simd, &planar, largest) * lookup.scale);
        }
        Some(Self { lookup, parts, units })
    }

    /// Scores all rows against one tile of codes.
    pub(crate) fn tile(&self, simd: Simd, codes: TileCodes<'_>, tile: usize, scores: &mut Scores) {
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows(first);
            let units = &self.units[first..first + rows.count()];
            let out = scores.rows_mut(first, tile);
            key_dots(simd, codes, &self.lookup, (rows, units), out);
        }
    }
}

/// Accumulators of a unit over one head's value codes.
pub(crate) struct Values {
    lookup: Lookup,
    per_row: usize,
    parts: Parts,
}

impl Values {
    pub(crate) fn new(simd: Simd, side: &HeadSide) -> Option<Self> {
        let (lookup, per_row) = lookup(simd, side)?;
        Some(Self { lookup, per_row, parts: Parts::default() })
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
        let dim = self.lookup.dims * self.per_row;
        for first in (0..weights.rows()).step_by(ROWS) {
            let rows = first..weights.rows().min(first + ROWS);
            self.parts.reset(tiles.len() * TILE);
            let mut units = [0f32; ROWS];
            for (row, unit) in rows.clone().zip(&mut units) {
                let (weights, largest) = weights.tiles(row, tiles.clone());
                *unit = self.parts.push(simd, weights, largest) * self.lookup.scale;
            }
            let units = &units[..rows.len()];
            let target = Target { units, factors: &[], first: 0, count: self.per_row };
            let sums = &mut sums[rows.start * dim..rows.end * dim];
            value_dots(simd, codes, &self.lookup, (self.parts.rows(0), target), sums);
        }
    }

    /// Adds sums as [`Values::tiles`] leaves them to a row in the order of its channels.
    pub(crate) fn unfold(&self, sums: &[f32], row: &mut [f32]) {
        for (dim, plane) in sums.chunks_exact(self.per_row).enumerate() {
            let channels = row[dim..].iter_mut().step_by(self.lookup.dims);
            channels.zip(plane).for_each(|(to, from)| *to += from);
        }
    }
}
