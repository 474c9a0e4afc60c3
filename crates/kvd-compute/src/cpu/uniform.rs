//! Uniform sides, straight from their codes: a group's step goes into the query (keys by channel)
//! or into the weight (values by token), its minimum into one product per group, and codes are
//! multiplied as the small integers they are.
//!
//! Folded queries and weights are rounded to 15 bits of the largest in their group; everything
//! else is exact to f32.

use super::dots::{Lookup, Parts, ROWS, Target, TileCodes, key_dots, value_dots};
use super::scores::{SPAN, Scores, TILE};
use super::simd::{Simd, per_level};
use super::softmax::{LANES, halve};
use kvd_codec::{FixedCodes, GroupAxis, HeadSide, UniformGroups};
use kvd_core::DType;
use std::ops::Range;

/// Bytes of a minimum and a step.
const PAIR_BYTES: usize = 4;

/// Minima and steps of some groups.
#[derive(Default)]
struct Scales {
    minima: Vec<f32>,
    steps: Vec<f32>,
    /// Address and row of what is loaded, so that tiles of one group load it once.
    loaded: Option<(usize, usize)>,
}

impl Scales {
    /// Loads a scale row of `pairs` groups; whether it was another one before.
    fn load(&mut self, page: &FixedCodes<'_>, row: usize, pairs: usize) -> bool {
        let key = Some((page.scales.as_ptr().addr(), row));
        if self.loaded == key {
            return false;
        }
        self.loaded = key;
        let bytes = &page.scales[row * pairs * PAIR_BYTES..][..pairs * PAIR_BYTES];
        let (minima, steps) = bytes.split_at(bytes.len() / 2);
        self.minima.resize(pairs, 0.0);
        self.steps.resize(pairs, 0.0);
        DType::F16.widen(minima, &mut self.minima);
        DType::F16.widen(steps, &mut self.steps);
        true
    }
}

/// The scale row of a tile, where all its tokens share one.
fn scale_row(groups: UniformGroups, tile: usize) -> usize {
    groups.group.map_or(0, |group| tile * TILE / group)
}

/// Whether every tile lies in one scale row.
fn by_tile(groups: UniformGroups) -> bool {
    match groups.axis {
        GroupAxis::Channel => groups.group.is_none_or(|group| group.is_multiple_of(TILE)),
        GroupAxis::Block => true,
        GroupAxis::Token => false,
    }
}

/// Queries of a unit, folded again for every group of tokens.
pub(crate) struct Keys {
    groups: UniformGroups,
    lookup: Lookup,
    dim: usize,
    queries: Vec<f32>,
    scales: Scales,
    parts: Parts,
    units: Vec<f32>,
    /// What the minima add to a score, by row.
    bases: Vec<f32>,
    folded: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(side: &HeadSide, queries: &[f32]) -> Option<Self> {
        let groups = side.uniform()?;
        let dim = side.dim();
        // Beyond this a sum of products might not fit.
        let fits = groups.bits <= 8 && dim <= 512 && dim.is_multiple_of(4);
        if !fits || !by_tile(groups) || !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        Some(Self {
            groups,
            lookup: Lookup::identity(),
            dim,
            queries: queries.to_vec(),
            scales: Scales::default(),
            parts: Parts::default(),
            units: Vec::new(),
            bases: Vec::new(),
            folded: vec![0.0; dim],
        })
    }

    /// Scores all rows against tile `in_page` of a page.
    pub(crate) fn tile(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        codes: TileCodes<'_>,
        tile: usize,
        scores: &mut Scores,
    ) {
        let pairs = if self.groups.axis == GroupAxis::Block { 1 } else { self.dim };
        if self.scales.load(page, scale_row(self.groups, in_page), pairs) {
            self.fold(simd);
        }
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows(first);
            let units = &self.units[first..first + rows.count()];
            let out = scores.rows_mut(first, tile);
            key_dots(simd, codes, &self.lookup, (rows, units), out);
            for (row, base) in self.bases[first..first + rows.count()].iter().enumerate() {
                out[row * SPAN..][..TILE].iter_mut().for_each(|score| *score += base);
            }
        }
    }

    /// Multiplies the queries with the steps that are loaded.
    fn fold(&mut self, simd: Simd) {
        self.parts.reset(self.dim);
        self.units.clear();
        self.bases.clear();
        if self.scales.steps.len() == 1 {
            let (minimum, step) = (self.scales.minima[0], self.scales.steps[0]);
            self.scales.minima.resize(self.dim, minimum);
            self.scales.steps.resize(self.dim, step);
        }
        for query in self.queries.chunks_exact(self.dim) {
            let Scales { minima, steps, .. } = &self.scales;
            let (largest, base) = fold(simd, query, steps, minima, &mut self.folded);
            // An overflow of query times step has no unit; the score is then of no use anyway.
            let largest = if largest.is_finite() { largest } else { 0.0 };
            self.units.push(self.parts.push(simd, &self.folded, largest));
            self.bases.push(base);
        }
    }
}

per_level!(fn fold(
    values: &[f32],
    steps: &[f32],
    minima: &[f32],
    out: &mut [f32],
) -> (f32, f32) = fold_body);

/// Writes `values · steps`; returns its largest magnitude, and the sum of `values · minima`.
#[inline(always)]
fn fold_body(values: &[f32], steps: &[f32], minima: &[f32], out: &mut [f32]) -> (f32, f32) {
    let (mut largest, mut sums) = ([0f32; LANES], [0f32; LANES]);
    let chunks = values.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0);
    let scales = steps.as_chunks::<LANES>().0.iter().zip(minima.as_chunks::<LANES>().0);
    for ((values, out), (steps, minima)) in chunks.zip(scales) {
        for i in 0..LANES {
            out[i] = values[i] * steps[i];
            sums[i] += values[i] * minima[i];
            largest[i] = if out[i].abs() > largest[i] { out[i].abs() } else { largest[i] };
        }
    }
    let rest = values.len() / LANES * LANES..values.len();
    for (lane, i) in rest.enumerate() {
        out[i] = values[i] * steps[i];
        sums[lane] += values[i] * minima[i];
        largest[lane] = largest[lane].max(out[i].abs());
    }
    (halve(largest, |a, b| if a > b { a } else { b }), halve(sums, |a, b| a + b))
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct Values {
    groups: UniformGroups,
    lookup: Lookup,
    dim: usize,
    scales: Scales,
    parts: Parts,
    /// `[minima and steps, groups of channels, tokens]` of a span, for groups by token.
    turned: Vec<f32>,
    flat: Vec<f32>,
    folded: Vec<f32>,
}

impl Values {
    pub(crate) fn new(side: &HeadSide) -> Option<Self> {
        let groups = side.uniform()?;
        let dim = side.dim();
        let whole = |group: usize| group.is_multiple_of(16) && dim.is_multiple_of(group);
        let fits = match groups.axis {
            GroupAxis::Token => groups.group.is_none_or(whole),
            GroupAxis::Channel | GroupAxis::Block => by_tile(groups),
        };
        (fits && groups.bits <= 8).then(|| Self {
            groups,
            lookup: Lookup::identity(),
            dim,
            scales: Scales::default(),
            parts: Parts::default(),
            turned: Vec::new(),
            flat: Vec::new(),
            folded: vec![0.0; SPAN],
        })
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, dim]`); the first is tile `in_page` of
    /// its page.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        (codes, tiles): (TileCodes<'_>, Range<usize>),
        weights: &Scores,
        sums: &mut [f32],
    ) {
        if self.groups.axis == GroupAxis::Token {
            self.turn(page, in_page * TILE, tiles.len() * TILE);
            for first in (0..weights.rows()).step_by(ROWS) {
                let rows = first..weights.rows().min(first + ROWS);
                self.by_token(simd, codes, &tiles, (rows, weights), sums);
            }
            return;
        }
        let bytes = codes.bytes.len() / tiles.len();
        for (index, bytes) in codes.bytes.chunks_exact(bytes).enumerate() {
            let codes = TileCodes { bytes, ..codes };
            let pairs = if self.groups.axis == GroupAxis::Block { 1 } else { self.dim };
            self.scales.load(page, scale_row(self.groups, in_page + index), pairs);
            for first in (0..weights.rows()).step_by(ROWS) {
                let rows = first..weights.rows().min(first + ROWS);
                self.by_tile(simd, codes, tiles.start + index, (rows, weights), sums);
            }
        }
    }

    /// Scales of `tokens` tokens from `first` on, groups before tokens.
    fn turn(&mut self, page: &FixedCodes<'_>, first: usize, tokens: usize) {
        let columns = 2 * self.dim / self.groups.group.unwrap_or(self.dim);
        let bytes = &page.scales[first * columns * 2..][..tokens * columns * 2];
        self.flat.resize(tokens * columns, 0.0);
        self.turned.resize(tokens * columns, 0.0);
        DType::F16.widen(bytes, &mut self.flat);
        for (column, out) in self.turned.chunks_exact_mut(tokens).enumerate() {
            let values = self.flat[column..].iter().step_by(columns);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
        }
    }

    /// A few rows over tiles whose tokens have scales of their own.
    fn by_token(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: &Range<usize>,
        (rows, weights): (Range<usize>, &Scores),
        sums: &mut [f32],
    ) {
        let (tokens, count) = (tiles.len() * TILE, self.groups.group.unwrap_or(self.dim));
        let sums = &mut sums[rows.start * self.dim..rows.end * self.dim];
        let (minima, steps) = self.turned.split_at(self.turned.len() / 2);
        let scales = minima.chunks_exact(tokens).zip(steps.chunks_exact(tokens));
        for (group, (minima, steps)) in scales.enumerate() {
            let first = group * count;
            self.parts.reset(tokens);
            let mut units = [0f32; ROWS];
            for (index, row) in rows.clone().enumerate() {
                let (weights, _) = weights.tiles(row, tiles.clone());
                let folded = &mut self.folded[..tokens];
                let (largest, base) = fold(simd, weights, steps, minima, folded);
                units[index] = self.parts.push(simd, folded, largest);
                let sums = &mut sums[index * self.dim + first..][..count];
                sums.iter_mut().for_each(|sum| *sum += base);
            }
            let target = Target { units: &units[..rows.len()], factors: &[], first, count };
            value_dots(simd, codes, &self.lookup, (self.parts.rows(0), target), sums);
        }
    }

    /// A few rows over a tile whose tokens share their scales.
    fn by_tile(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tile: usize,
        (rows, weights): (Range<usize>, &Scores),
        sums: &mut [f32],
    ) {
        self.parts.reset(TILE);
        let mut units = [0f32; ROWS];
        let sums = &mut sums[rows.start * self.dim..rows.end * self.dim];
        let Scales { minima, steps, .. } = &self.scales;
        for (index, row) in rows.clone().enumerate() {
            let (weights, largest) = weights.tiles(row, tile..tile + 1);
            units[index] = self.parts.push(simd, weights, largest);
            let weight: f32 = weights.iter().sum();
            let sums = &mut sums[index * self.dim..][..self.dim];
            match minima[..] {
                [minimum] => sums.iter_mut().for_each(|sum| *sum += weight * minimum),
                _ => sums.iter_mut().zip(minima).for_each(|(sum, m)| *sum += weight * m),
            }
            if let [step] = steps[..] {
                units[index] *= step;
            }
        }
        let factors = if steps.len() == 1 { &[] } else { &steps[..] };
        let target = Target { units: &units[..rows.len()], factors, first: 0, count: self.dim };
        value_dots(simd, codes, &self.lookup, (self.parts.rows(0), target), sums);
    }
}
