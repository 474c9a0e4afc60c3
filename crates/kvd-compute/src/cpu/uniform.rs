//! Uniform sides, straight from their codes: a group's step goes into the query (keys by channel)
//! or into the weight (values by token), its minimum into one product per group, and codes are
//! multiplied as the small integers they are.
//!
//! Folded queries and weights are rounded to 16 bits of the largest in their group (weights to 8
//! with `Precision::Int8`); everything
//! else is exact to f32.

use super::dots::{
    Lookup, ROWS, SETTLED_TILES, TERMS_MAX, Target, TileCodes, key_dots, value_dots,
};
use super::hybrid;
use super::parts::{Parts, Pushed};
use super::scores::{SPAN, Scores, TILE};
use super::simd::{How, Simd, per_level};
use kvd_codec::{FixedCodes, GroupAxis, HeadSide, UniformGroups, UniformMode};
use kvd_core::DType;
use std::ops::Range;

/// Bytes of a minimum and a step.
const PAIR_BYTES: usize = 4;

/// Minima and steps of some groups.
#[derive(Default)]
struct Scales {
    minima: Vec<f32>,
    steps: Vec<f32>,
    /// Modes and signs, where groups choose.
    hybrid: hybrid::Groups,
    /// Address and row of what is loaded, so that tiles of one group load it once.
    loaded: Option<(usize, usize)>,
}

impl Scales {
    /// Loads scale row `row`; `pairs` groups of a head size.
    fn load(
        &mut self,
        simd: Simd,
        page: &FixedCodes<'_>,
        groups: UniformGroups,
        row: usize,
        (pairs, dim): (usize, usize),
    ) {
        let key = Some((page.scales.as_ptr().addr(), row));
        if self.loaded == key {
            return;
        }
        self.loaded = key;
        self.minima.resize(pairs, 0.0);
        self.steps.resize(pairs, 0.0);
        let pair_bytes = match groups.mode {
            UniformMode::Asym => PAIR_BYTES,
            UniformMode::Sym => PAIR_BYTES / 2,
            UniformMode::Hybrid => {
                let layout = groups.hybrid_layout(page.layout.tokens(), dim);
                let (bytes, first, count) = (page.scales, row, 1);
                let rows = hybrid::ScaleRows { bytes, layout, first, count, pairs };
                return self.hybrid.load(simd, rows, false);
            }
        };
        let bytes = &page.scales[row * pairs * pair_bytes..][..pairs * pair_bytes];
        let (minima, steps) = bytes.split_at(bytes.len() - 2 * pairs);
        if groups.mode == UniformMode::Asym {
            DType::F16.widen(minima, &mut self.minima);
        }
        DType::F16.widen(steps, &mut self.steps);
    }
}

/// The scale row of a tile, where all its tokens share one.
fn scale_row(groups: UniformGroups, tile: usize) -> usize {
    groups.group.map_or(0, |group| tile * TILE / group)
}

/// Channels of a value that a token has one pair for; all of them where pairs are of channels.
fn channels(groups: UniformGroups, dim: usize) -> usize {
    match groups.axis {
        GroupAxis::Token => groups.group.unwrap_or(dim),
        GroupAxis::Channel | GroupAxis::Block => dim,
    }
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
    /// Address and row of the scales that queries are folded with: tiles of one group share them.
    folded: Option<(usize, usize)>,
    /// As many f16 as there are channels, for scales without minima.
    zeros: Vec<u8>,
    parts: Parts,
    /// What cutting the queries as they are came to, where one pair is every channel's; its base
    /// is that of a minimum of 1.
    whole: Vec<Pushed>,
    units: Vec<f32>,
    /// What the minima add to a score, by row.
    bases: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(how: How, side: &HeadSide, queries: &[f32]) -> Option<Self> {
        let groups = side.uniform()?;
        let dim = side.dim();
        let fits = groups.bits <= 8 && dim <= TERMS_MAX && dim.is_multiple_of(4);
        let fits = fits && groups.mode != UniformMode::Hybrid;
        if !fits || !by_tile(groups) || !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        Some(Self {
            groups,
            lookup: lookup(groups),
            dim,
            queries: queries.to_vec(),
            folded: None,
            zeros: Vec::new(),
            // Queries are cut as they are where a page has one pair.
            parts: match groups.axis {
                GroupAxis::Block => Parts::of_queries(how),
                GroupAxis::Channel | GroupAxis::Token => Parts::of_scaled_queries(how),
            },
            whole: Vec::new(),
            units: Vec::new(),
            bases: Vec::new(),
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
        let key = (page.scales.as_ptr().addr(), scale_row(self.groups, in_page));
        if self.folded != Some(key) {
            self.folded = Some(key);
            self.fold(simd, page.scales, key.1);
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

    /// Multiplies the queries with the steps of a scale row.
    fn fold(&mut self, simd: Simd, scales: &[u8], row: usize) {
        self.units.clear();
        self.bases.clear();
        if self.groups.axis == GroupAxis::Block {
            return self.take_pair(simd, scales);
        }
        self.parts.reset(self.dim);
        let (minima, steps) = if self.groups.mode == UniformMode::Asym {
            let bytes = self.dim * PAIR_BYTES;
            scales[row * bytes..][..bytes].split_at(bytes / 2)
        } else {
            let bytes = self.dim * PAIR_BYTES / 2;
            self.zeros.resize(bytes, 0);
            (&self.zeros[..], &scales[row * bytes..][..bytes])
        };
        for block in self.queries.chunks(ROWS * self.dim) {
            let mut queries: [&[f32]; ROWS] = [&[]; ROWS];
            let rows = block.len() / self.dim;
            for (to, query) in queries.iter_mut().zip(block.chunks_exact(self.dim)) {
                *to = query;
            }
            let mut pushed = [Pushed::default(); ROWS];
            self.parts.push_folded(simd, &queries[..rows], (steps, minima), &mut pushed);
            for row in &pushed[..rows] {
                self.units.push(row.unit);
                self.bases.push(row.base + middle(self.groups) * row.lost);
            }
        }
    }

    /// Takes the page's only pair into units and bases: the queries are cut once for all pages.
    fn take_pair(&mut self, simd: Simd, pair: &[u8]) {
        if self.whole.is_empty() {
            self.parts.reset(self.dim);
            for query in self.queries.chunks_exact(self.dim) {
                let (largest, total) = (query.iter().fold(0f32, |m, q| m.max(q.abs())), sum(query));
                let pushed = self.parts.push(simd, query, largest, Some(total));
                self.whole.push(Pushed { base: total, ..pushed });
            }
        }
        let mut values = [0f32; 2];
        let [minimum, step] = match self.groups.mode {
            UniformMode::Asym => {
                DType::F16.widen(&pair[..PAIR_BYTES], &mut values);
                values
            }
            UniformMode::Sym | UniformMode::Hybrid => {
                DType::F16.widen(&pair[..PAIR_BYTES / 2], &mut values[1..]);
                values
            }
        };
        for row in &self.whole {
            self.units.push(row.unit * step);
            self.bases.push(row.base * minimum + middle(self.groups) * row.lost * step);
        }
    }
}

/// The code in the middle. What rounding takes from the factors is multiplied with codes; with
/// this one it is put back, so that only the distance of codes from it counts.
pub(super) fn middle(groups: UniformGroups) -> f32 {
    match groups.mode {
        // Codes less the largest magnitude are around 0 already.
        UniformMode::Sym => 0.0,
        UniformMode::Asym => f32::from(groups.top) / 2.0,
        UniformMode::Hybrid => ((1u32 << groups.bits) - 1) as f32 / 2.0,
    }
}

/// What products take codes for.
pub(super) fn lookup(groups: UniformGroups) -> Lookup {
    match groups.mode {
        UniformMode::Asym => Lookup::identity(),
        UniformMode::Sym => Lookup::less(groups.top.into()),
        UniformMode::Hybrid => Lookup::bytes(),
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct Values {
    groups: UniformGroups,
    lookup: Lookup,
    dim: usize,
    scales: Scales,
    parts: Parts,
    /// `[minima and steps, groups of channels, tokens]` of a span as f16, for groups by token.
    turned: Vec<u8>,
    /// As many f16 as a span has tokens, for scales without minima.
    zeros: Vec<u8>,
    /// What is to be added to all channels of a group, `[rows, groups of channels]`: minima of
    /// tokens, and what rounding took.
    bases: Vec<f32>,
    /// Tiles since they were added.
    unsettled: usize,
    /// Codes with their signs.
    signed: Vec<u8>,
}

impl Values {
    pub(crate) fn new(how: How, side: &HeadSide, rows: usize) -> Option<Self> {
        let groups = side.uniform()?;
        let dim = side.dim();
        // The last group may be shorter.
        let whole = |group: usize| group.is_multiple_of(16) && dim.is_multiple_of(16);
        let fits = match groups.axis {
            GroupAxis::Token => groups.group.is_none_or(whole),
            GroupAxis::Channel | GroupAxis::Block => by_tile(groups),
        };
        let fits = match groups.mode {
            UniformMode::Asym | UniformMode::Sym => fits && groups.bits <= 8,
            // Signs of a group are one word, those of a tile.
            UniformMode::Hybrid => {
                groups.axis == GroupAxis::Channel && groups.group == Some(TILE) && groups.bits < 8
            }
        };
        let pairs = dim.div_ceil(channels(groups, dim));
        fits.then(|| Self {
            groups,
            lookup: lookup(groups),
            dim,
            scales: Scales::default(),
            parts: Parts::of_weights(how),
            turned: Vec::new(),
            zeros: Vec::new(),
            bases: vec![0.0; rows * pairs],
            unsettled: 0,
            signed: Vec::new(),
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
        self.unsettled += tiles.len();
        if self.unsettled > SETTLED_TILES {
            self.unsettled = tiles.len();
            self.settle(sums);
        }
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
            let ahead = codes.ahead.share(index, tiles.len());
            let mut codes = TileCodes { bytes, ahead, ..codes };
            let pairs = if self.groups.axis == GroupAxis::Block { 1 } else { self.dim };
            let row = scale_row(self.groups, in_page + index);
            self.scales.load(simd, page, self.groups, row, (pairs, self.dim));
            // Not borrowed while the sums are made.
            let mut signed = std::mem::take(&mut self.signed);
            if self.groups.mode == UniformMode::Hybrid {
                signed.resize(TILE * self.dim, 0);
                let (words, lanes) = (&self.scales.hybrid.signs, self.dim);
                let signs = hybrid::Signs { words, lanes, quads: TILE / hybrid::QUAD };
                hybrid::spread(simd, codes, signs, &mut signed);
                codes = TileCodes { bytes: &signed, width: 8, ..codes };
            }
            for first in (0..weights.rows()).step_by(ROWS) {
                let rows = first..weights.rows().min(first + ROWS);
                self.by_tile(simd, codes, tiles.start + index, (rows, weights), sums);
            }
            self.signed = signed;
        }
    }

    /// Scales of `tokens` tokens from `first` on, groups before tokens.
    fn turn(&mut self, page: &FixedCodes<'_>, first: usize, tokens: usize) {
        let pairs = self.dim.div_ceil(channels(self.groups, self.dim));
        let columns = if self.groups.mode == UniformMode::Asym { 2 * pairs } else { pairs };
        let bytes = &page.scales[first * columns * 2..][..tokens * columns * 2];
        self.turned.resize(bytes.len(), 0);
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if columns.is_multiple_of(8) {
            return super::parts_lanes::transpose(bytes, columns, &mut self.turned);
        }
        let (words, turned) = (bytes.as_chunks::<2>().0, self.turned.as_chunks_mut::<2>().0);
        for (column, out) in turned.chunks_exact_mut(tokens).enumerate() {
            let values = words[column..].iter().step_by(columns);
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
        let (tokens, channels) = (tiles.len() * TILE, channels(self.groups, self.dim));
        let sums = &mut sums[rows.start * self.dim..rows.end * self.dim];
        let mut values: [&[f32]; ROWS] = [&[]; ROWS];
        for (values, row) in values.iter_mut().zip(rows.clone()) {
            *values = weights.tiles(row, tiles.clone()).0;
        }
        let pairs = self.dim.div_ceil(channels);
        let (mut minima, steps) = self.turned.split_at(self.turned.len() - 2 * tokens * pairs);
        if minima.is_empty() {
            self.zeros.resize(steps.len(), 0);
            minima = &self.zeros;
        }
        let scales = minima.chunks_exact(2 * tokens).zip(steps.chunks_exact(2 * tokens));
        for (group, (minima, steps)) in scales.enumerate() {
            let first = group * channels;
            self.parts.reset(tokens);
            let mut pushed = [Pushed::default(); ROWS];
            self.parts.push_folded(simd, &values[..rows.len()], (steps, minima), &mut pushed);
            for (row, pushed) in rows.clone().zip(&pushed) {
                let base = pushed.base + middle(self.groups) * pushed.lost;
                self.bases[row * pairs + group] += base;
            }
            let units = pushed.map(|row| row.unit);
            let count = channels.min(self.dim - first);
            let target = Target { units: &units[..rows.len()], factors: &[], first, count };
            let codes = TileCodes { ahead: codes.ahead.share(group, pairs), ..codes };
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
        let Scales { minima, steps, hybrid, .. } = &self.scales;
        let (minima, steps, centres) = match self.groups.mode {
            UniformMode::Hybrid => (&hybrid.zeros, &hybrid.steps, &hybrid.centres),
            UniformMode::Asym | UniformMode::Sym => (minima, steps, steps),
        };
        for (index, row) in rows.clone().enumerate() {
            let (weights, largest) = weights.tiles(row, tile..tile + 1);
            let weight = sum(weights);
            let pushed = self.parts.push(simd, weights, largest, Some(weight));
            units[index] = pushed.unit;
            let lost = middle(self.groups) * pushed.lost;
            let sums = &mut sums[index * self.dim..][..self.dim];
            match (&minima[..], &steps[..]) {
                ([minimum], [step]) => self.bases[row] += weight * minimum + lost * step,
                _ => add_bases(simd, sums, (minima, centres), [weight, lost]),
            }
            if let [step] = steps[..] {
                units[index] *= step;
            }
        }
        let factors = if steps.len() == 1 { &[] } else { &steps[..] };
        let target = Target { units: &units[..rows.len()], factors, first: 0, count: self.dim };
        value_dots(simd, codes, &self.lookup, (self.parts.rows(0), target), sums);
    }

    /// Scales what was summed for row `row`, `sums` of it.
    pub(crate) fn scale(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        let pairs = self.dim.div_ceil(channels(self.groups, self.dim));
        let bases = &mut self.bases[row * pairs..][..pairs];
        sums.iter_mut().chain(bases).for_each(|sum| *sum *= factor);
    }

    /// Adds bases to the sums of all rows: codes are never negative, so that sums without minima
    /// grow and would lose what is small beside them.
    fn settle(&mut self, sums: &mut [f32]) {
        let count = channels(self.groups, self.dim);
        let groups = sums.chunks_exact_mut(self.dim).flat_map(|row| row.chunks_mut(count));
        for (sums, base) in groups.zip(&mut self.bases) {
            sums.iter_mut().for_each(|sum| *sum += *base);
            *base = 0.0;
        }
    }

    /// Adds what was summed for row `row`, `sums` of it, to `out`.
    pub(crate) fn unfold(&self, row: usize, sums: &[f32], out: &mut [f32]) {
        let count = channels(self.groups, self.dim);
        let pairs = self.dim.div_ceil(count);
        let groups = out.chunks_mut(count).zip(sums.chunks(count));
        for ((out, sums), base) in groups.zip(&self.bases[row * pairs..]) {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum + base);
        }
    }
}

/// In eight lanes: one would wait for each addition.
fn sum(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0f32; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum::<f32>() + rest.iter().sum::<f32>()
}

per_level!(
    fn add_bases(sums: &mut [f32], scales: (&[f32], &[f32]), of: [f32; 2]) = add_bases_body
);

/// Adds what minima and centres are worth for a weight, and for what rounding took of it.
#[inline(always)]
fn add_bases_body(sums: &mut [f32], (minima, centres): (&[f32], &[f32]), [weight, lost]: [f32; 2]) {
    for (sum, (minimum, centre)) in sums.iter_mut().zip(minima.iter().zip(centres)) {
        *sum += weight * minimum + lost * centre;
    }
}
