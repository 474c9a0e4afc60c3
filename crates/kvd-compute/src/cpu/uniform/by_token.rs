//! Uniform keys whose groups are channels of one token: integer products of each group with the
//! query as it is, then the token's step and minimum.

use crate::cpu::ahead::Ahead;
use crate::cpu::dots::{Lookup, ROWS, TileCodes, VECTOR_ROWS, key_dots};
use crate::cpu::hybrid::{self, Groups, ScaleRows};
use crate::cpu::loss::{alike_factor, largest_of, rounding_loss};
use crate::cpu::parts::{self, Parts, Pushed};
use crate::cpu::place::Place;
use crate::cpu::scores::{SPAN, Scores, TILE};
use crate::cpu::simd::{How, Simd, per_level};
use crate::cpu::uniform::{largest, lookup, middle, spread};
use kvd_codec::{FixedCodes, GroupAxis, HeadCodec, HybridLayout, UniformGroups, UniformMode};
use kvd_core::DType;
use std::ops::Range;

/// Queries of one group of channels.
struct Group {
    channels: Range<usize>,
    parts: Parts,
    units: Vec<f32>,
    /// Losses of a score for steps of one, by row.
    losses: Vec<f32>,
    /// The share of a score that comes from a centre and from a minimum of one, by row.
    adds: Vec<[f32; 2]>,
}

/// Queries of a unit.
pub(crate) struct Keys {
    groups: UniformGroups,
    lookup: Lookup,
    queries: Vec<Group>,
    dim: usize,
    /// The layout of pages, and their tokens.
    layout: Option<(usize, HybridLayout)>,
    /// Scales of the tile, `[groups, tokens]`.
    scales: Groups,
    /// The largest step so far.
    largest_step: f32,
    halves: Vec<u8>,
    codes: Vec<u8>,
    dots: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(how: How, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        let span = groups.group.unwrap_or(dim).min(dim);
        let hybrid = groups.mode == UniformMode::Hybrid;
        // Signs of a group are one word.
        let fits = groups.bits <= 8 && !(hybrid && (span > TILE || groups.bits == 8));
        let whole =
            dim.is_multiple_of(4) && span.is_multiple_of(4) && parts::fits(span, largest(groups));
        if groups.axis != GroupAxis::Token || !fits || !whole {
            return None;
        }
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let group = |first: usize| {
            let channels = first..dim.min(first + span);
            let (mut units, mut losses) = (Vec::new(), Vec::new());
            let energy = channels.len() as f32 * spread(groups).powi(2);
            let mut parts = Parts::of_queries(how).meeting(largest(groups));
            let mut adds = Vec::new();
            parts.reset(channels.len());
            for query in queries.chunks_exact(dim) {
                let query = &query[channels.clone()];
                let largest = query.iter().fold(0f32, |m, q| m.max(q.abs()));
                let total: f32 = query.iter().sum();
                let Pushed { unit, lost, .. } = parts.push(how.0, query, largest, Some(total));
                units.push(unit);
                losses.push(rounding_loss(unit, energy) * alike_factor(how.0, query, unit));
                adds.push([lost * middle(groups), total]);
            }
            Group { channels, parts, units, losses, adds }
        };
        Some(Self {
            groups,
            lookup: lookup(groups),
            queries: (0..dim).step_by(span).map(group).collect(),
            layout: None,
            dim,
            scales: Groups::default(),
            largest_step: 0.0,
            halves: Vec::new(),
            codes: vec![0; TILE * dim],
            dots: vec![0.0; ROWS * SPAN],
        })
    }

    /// How far rounding may take a score of that row, so far: see [`rounding_loss`].
    pub(crate) fn loss(&self, row: usize) -> f32 {
        let losses = self.queries.iter().map(|group| group.losses[row]);
        losses.fold(0f32, f32::hypot) * self.largest_step
    }

    /// Scores all rows against one tile.
    pub(crate) fn tile(
        &mut self,
        simd: Simd,
        place: Place<'_>,
        codes: TileCodes<'_>,
        scores: &mut Scores,
    ) {
        let Place { page, in_page, in_span, ahead } = place;
        self.load(simd, &page, in_page);
        self.largest_step = self.largest_step.max(largest_of(simd, &self.scales.steps));
        let Self { groups, lookup, queries, scales, codes: bytes, dots, .. } = self;
        let pairs = queries.len();
        if groups.mode == UniformMode::Hybrid {
            let quads = queries[0].channels.len() / hybrid::QUAD;
            let signs = hybrid::Signs { words: &scales.signs, lanes: TILE, quads };
            if hybrid::has_dots(simd, (codes, signs), pairs, queries[0].units.len()) {
                let out = scores.rows_mut(0, in_span);
                return with_signs(simd, (codes, signs), (scales, queries), out);
            }
            hybrid::spread(simd, codes, signs, bytes);
        } else {
            codes.spread(simd, bytes);
        }
        debug_assert_eq!(scales.steps.len(), pairs * TILE);
        for (index, group) in queries.iter().enumerate() {
            let (channels, tokens) = (group.channels.clone(), index * TILE..(index + 1) * TILE);
            let bytes = &bytes[channels.start * TILE..channels.end * TILE];
            let codes = TileCodes {
                bytes,
                width: 8,
                per_row: channels.len(),
                ahead: ahead.share(index, pairs),
            };
            let scales = TokenScales {
                steps: &scales.steps[tokens.clone()],
                zeros: &scales.zeros[tokens.clone()],
                centres: &scales.centres[tokens],
            };
            for first in (0..group.units.len()).step_by(ROWS) {
                let rows = group.parts.rows(first);
                let units = &group.units[first..first + rows.count()];
                key_dots(simd, codes, lookup, (rows, units), dots);
                let out = scores.rows_mut(first, in_span);
                for row in 0..rows.count() {
                    let out = &mut out[row * SPAN..][..TILE];
                    if index == 0 {
                        out.fill(0.0);
                    }
                    let adds = group.adds[first + row];
                    add(simd, &dots[row * SPAN..][..TILE], scales, adds, out);
                }
            }
        }
    }

    /// Loads the scales of a tile, groups before tokens.
    fn load(&mut self, simd: Simd, page: &FixedCodes<'_>, in_page: usize) {
        let (pairs, first) = (self.queries.len(), in_page * TILE);
        let scales = &mut self.scales;
        if self.groups.mode == UniformMode::Hybrid {
            let tokens = page.layout.tokens();
            if self.layout.is_none_or(|(of, _)| of != tokens) {
                self.layout = Some((tokens, self.groups.hybrid_layout(tokens, self.dim)));
            }
            if let Some((_, layout)) = self.layout {
                let (bytes, count) = (page.scales, TILE);
                scales.load(simd, ScaleRows { bytes, layout, first, count, pairs }, true);
            }
            return;
        }
        let asym = self.groups.mode == UniformMode::Asym;
        let columns = if asym { 2 * pairs } else { pairs };
        let words = &page.scales[first * columns * 2..][..TILE * columns * 2];
        self.halves.resize(words.len(), 0);
        let turned = self.halves.as_chunks_mut::<2>().0;
        for (token, words) in words.chunks_exact(2 * columns).enumerate() {
            for (column, word) in words.as_chunks::<2>().0.iter().enumerate() {
                turned[column * TILE + token] = *word;
            }
        }
        let (zeros, steps) = self.halves.split_at(if asym { 2 * TILE * pairs } else { 0 });
        scales.steps.resize(TILE * pairs, 0.0);
        DType::F16.widen_values(steps, &mut scales.steps);
        scales.zeros.resize(TILE * pairs, 0.0);
        scales.centres.resize(TILE * pairs, 0.0);
        if asym {
            DType::F16.widen_values(zeros, &mut scales.zeros);
            scales.centres.copy_from_slice(&scales.steps);
        }
    }
}

/// Scores all rows against a tile by the kernel for codes with signs.
fn with_signs(
    simd: Simd,
    (mut codes, signs): (TileCodes<'_>, hybrid::Signs<'_>),
    (scales, queries): (&Groups, &[Group]),
    out: &mut [f32],
) {
    let rows = queries[0].units.len();
    for first in (0..rows).step_by(VECTOR_ROWS) {
        let of = first..rows.min(first + VECTOR_ROWS);
        let factors = queries.iter().map(|group| hybrid::Factors {
            rows: group.parts.rows(first).part(0, of.len()),
            positive: false,
            units: &group.units[of.clone()],
            adds: &group.adds[of.clone()],
        });
        let out = &mut out[first * SPAN..];
        (0..of.len()).for_each(|row| out[row * SPAN..][..TILE].fill(0.0));
        hybrid::dots(simd, (codes, signs), scales, factors, (out, SPAN));
        codes.ahead = Ahead::default();
    }
}

/// Scales of one group for the tokens of a tile.
#[derive(Clone, Copy)]
struct TokenScales<'a> {
    steps: &'a [f32],
    zeros: &'a [f32],
    centres: &'a [f32],
}

per_level!(
    fn add(dots: &[f32], scales: TokenScales<'_>, adds: [f32; 2], out: &mut [f32]) = add_body
);

/// Adds products times steps, and what centres and zero points add.
#[inline(always)]
fn add_body(dots: &[f32], scales: TokenScales<'_>, [lost, total]: [f32; 2], out: &mut [f32]) {
    let of = |values: &[f32]| -> [f32; TILE] { *values.first_chunk().unwrap_or(&[0.0; TILE]) };
    let (dots, steps) = (of(dots), of(scales.steps));
    let (zeros, centres) = (of(scales.zeros), of(scales.centres));
    for (token, out) in out.iter_mut().enumerate().take(TILE) {
        *out += dots[token] * steps[token] + (lost * centres[token] + total * zeros[token]);
    }
}
