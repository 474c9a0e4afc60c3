//! Uniform keys whose groups are channels of one token: integer products of each group with the
//! query as it is, then the token's step and minimum.

use crate::cpu::hybrid::{self, HybridScales, ScaleRows};
use crate::cpu::int_dot::{CodeLookup, ROWS, TileCodes, VECTOR_ROWS, key_dots};
use crate::cpu::int_operands::{self, IntOperands, RoundedRow, ScaledRows};
use crate::cpu::loss::{alike_factor, largest_of, rounding_loss};
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{KernelConfig, Simd, per_level};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use crate::cpu::uniform::{code_lookup, code_reach, largest_code, middle_code};
use kvd_codec::{FixedCodes, GroupAxis, HeadCodec, HybridLayout, UniformGroups, UniformMode};
use kvd_core::DType;
use std::ops::Range;

/// Queries of one group of channels.
struct GroupQueries {
    channels: Range<usize>,
    parts: IntOperands,
    units: Vec<f32>,
    /// Losses of a score for steps of one, by row.
    losses: Vec<f32>,
    /// The share of a score that comes from a centre and from a minimum of one, by row.
    adds: Vec<[f32; 2]>,
}

/// Queries of a unit.
pub(crate) struct TokenKeys {
    groups: UniformGroups,
    lookup: CodeLookup,
    queries: Vec<GroupQueries>,
    dim: usize,
    /// The layout of pages, and their tokens.
    layout: Option<(usize, HybridLayout)>,
    /// Scales of the tile, `[groups, tokens]`.
    scales: HybridScales,
    /// The largest step so far.
    largest_step: f32,
    halves: Vec<u8>,
    codes: Vec<u8>,
    dots: Vec<f32>,
}

/// Whether there is a kernel for the side.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let dim = side.dim();
    let span = groups.group.unwrap_or(dim).min(dim);
    let hybrid = groups.mode == UniformMode::Hybrid;
    // Signs of a group are one word.
    let fits = groups.bits <= 8 && !(hybrid && (span > TILE || groups.bits == 8));
    let whole = dim.is_multiple_of(4)
        && span.is_multiple_of(4)
        && int_operands::sums_fit(span, largest_code(groups));
    groups.axis == GroupAxis::Token && fits && whole
}

impl TokenKeys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        let span = groups.group.unwrap_or(dim).min(dim);
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let group = |first: usize| {
            let channels = first..dim.min(first + span);
            let (mut units, mut losses) = (Vec::new(), Vec::new());
            let energy = channels.len() as f32 * code_reach(groups).powi(2);
            let mut parts = IntOperands::of_queries(config).multiplied_with(largest_code(groups));
            let mut adds = Vec::new();
            parts.clear_rows(channels.len());
            for query in queries.chunks_exact(dim) {
                let query = &query[channels.clone()];
                let largest = query.iter().fold(0f32, |m, q| m.max(q.abs()));
                let total: f32 = query.iter().sum();
                let RoundedRow { unit, lost, .. } =
                    parts.push(config.simd, query, largest, Some(total));
                units.push(unit);
                losses.push(rounding_loss(unit, energy) * alike_factor(config.simd, query, unit));
                adds.push([lost * middle_code(groups), total]);
            }
            GroupQueries { channels, parts, units, losses, adds }
        };
        Some(Self {
            groups,
            lookup: code_lookup(groups),
            queries: (0..dim).step_by(span).map(group).collect(),
            layout: None,
            dim,
            scales: HybridScales::default(),
            largest_step: 0.0,
            halves: Vec::new(),
            codes: vec![0; TILE * dim],
            dots: vec![0.0; ROWS * SPAN],
        })
    }

    /// How far rounding may take a score of that row, so far: see [`rounding_loss`].
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        let losses = self.queries.iter().map(|group| group.losses[row]);
        losses.fold(0f32, f32::hypot) * self.largest_step
    }

    /// Scores all rows against one tile.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        scores: &mut SpanScores,
    ) {
        let TileCursor { page, in_page, in_span, prefetch, .. } = *cursor;
        self.load_scales(simd, page, in_page);
        self.largest_step = self.largest_step.max(largest_of(simd, &self.scales.steps));
        let Self { groups, lookup, queries, scales, codes: bytes, dots, .. } = self;
        let pairs = queries.len();
        if groups.mode == UniformMode::Hybrid {
            let quads = queries[0].channels.len() / hybrid::QUAD;
            let signs = hybrid::SignWords { words: &scales.signs, lanes: TILE, quads };
            let signed = hybrid::SignedCodes { codes, signs };
            if hybrid::has_dots(simd, signed, pairs, queries[0].units.len()) {
                let out = scores.rows_mut(0, in_span);
                return score_signed(simd, signed, scales, queries, out);
            }
            hybrid::unpack_signed(simd, codes, signs, bytes);
        } else {
            codes.unpack_to(simd, bytes);
        }
        debug_assert_eq!(scales.steps.len(), pairs * TILE);
        for (index, group) in queries.iter().enumerate() {
            let (channels, tokens) = (group.channels.clone(), index * TILE..(index + 1) * TILE);
            let bytes = &bytes[channels.start * TILE..channels.end * TILE];
            let codes = TileCodes {
                bytes,
                width: 8,
                per_row: channels.len(),
                prefetch: prefetch.share_of(index, pairs),
            };
            let scales = TokenScales {
                steps: &scales.steps[tokens.clone()],
                zeros: &scales.zeros[tokens.clone()],
                centres: &scales.centres[tokens],
            };
            for first in (0..group.units.len()).step_by(ROWS) {
                let rows = group.parts.rows_from(first);
                let units = &group.units[first..first + rows.row_count()];
                key_dots(simd, codes, lookup, ScaledRows { rows, units }, dots);
                let out = scores.rows_mut(first, in_span);
                for row in 0..rows.row_count() {
                    let out = &mut out[row * SPAN..][..TILE];
                    if index == 0 {
                        out.fill(0.0);
                    }
                    let adds = group.adds[first + row];
                    add_scaled(simd, &dots[row * SPAN..][..TILE], scales, adds, out);
                }
            }
        }
    }

    /// Loads the scales of a tile, groups before tokens.
    fn load_scales(&mut self, simd: Simd, page: &FixedCodes<'_>, in_page: usize) {
        let (pairs, first) = (self.queries.len(), in_page * TILE);
        let scales = &mut self.scales;
        if self.groups.mode == UniformMode::Hybrid {
            let tokens = page.layout.tokens();
            if self.layout.is_none_or(|(of, _)| of != tokens) {
                self.layout = Some((tokens, self.groups.hybrid_layout(tokens, self.dim)));
            }
            if let Some((_, layout)) = self.layout {
                let (bytes, count) = (page.scales, TILE);
                scales.load_rows(simd, ScaleRows { bytes, layout, first, count, pairs }, true);
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
fn score_signed(
    simd: Simd,
    mut codes: hybrid::SignedCodes<'_>,
    scales: &HybridScales,
    queries: &[GroupQueries],
    out: &mut [f32],
) {
    let rows = queries[0].units.len();
    for first in (0..rows).step_by(VECTOR_ROWS) {
        let of = first..rows.min(first + VECTOR_ROWS);
        let factors = queries.iter().map(|group| hybrid::GroupFactors {
            rows: group.parts.rows_from(first).slice_rows(0, of.len()),
            positive: false,
            units: &group.units[of.clone()],
            adds: &group.adds[of.clone()],
        });
        let out = &mut out[first * SPAN..];
        (0..of.len()).for_each(|row| out[row * SPAN..][..TILE].fill(0.0));
        let to = StridedRows { values: out, stride: SPAN };
        hybrid::add_signed_dots(simd, codes, scales, factors, to);
        codes.codes.prefetch = PrefetchBytes::default();
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
    fn add_scaled(dots: &[f32], scales: TokenScales<'_>, adds: [f32; 2], out: &mut [f32])
        = add_scaled_body
);

/// Adds products times steps, and what centres and zero points add.
#[inline(always)]
fn add_scaled_body(dots: &[f32], scales: TokenScales<'_>, adds: [f32; 2], out: &mut [f32]) {
    let [lost, total] = adds;
    let of = |values: &[f32]| -> [f32; TILE] { *values.first_chunk().unwrap_or(&[0.0; TILE]) };
    let (dots, steps) = (of(dots), of(scales.steps));
    let (zeros, centres) = (of(scales.zeros), of(scales.centres));
    for (token, out) in out.iter_mut().enumerate().take(TILE) {
        *out += dots[token] * steps[token] + (lost * centres[token] + total * zeros[token]);
    }
}
