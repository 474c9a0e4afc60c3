//! Keys of uniform sides, straight from their codes, and what values (`values.rs`) share: a
//! group's step goes into the query (keys by channel) or into the weight (values by token), its
//! minimum into one product per group, and codes are multiplied as the small integers they are.
//!
//! Folded queries and weights are rounded to 16 bits of the largest in their group (weights to 8
//! with `Precision::Int8`); everything else is exact to f32. With `Precision::Int8` some machines
//! multiply narrow codes as bf16 (`bf16.rs`).

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2_nibble_values;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2_nibbles;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_bf16;
#[cfg_attr(not(target_arch = "x86_64"), allow(unused, reason = "only AVX-512 has a kernel"))]
pub(super) mod bf16;
pub(super) mod by_token;
pub(super) mod minima;
#[cfg_attr(not(target_arch = "x86_64"), allow(unused, reason = "only AVX2 has a kernel"))]
pub(super) mod nibbles;
mod second_terms;
pub(super) mod values;

use crate::cpu::int_dot::{CodeLookup, ROWS, TileCodes, key_dots};
use crate::cpu::int_operands::{self, FoldScales, IntOperands, RoundedRow, ScaledRows};
use crate::cpu::loss::{alike_factor, rounding_loss};
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::{KernelConfig, Simd};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use kvd_codec::{GroupAxis, HeadCodec, UniformGroups, UniformMode};
use kvd_core::DType;

/// Bytes of a minimum or a step, and of both.
pub(super) const SCALE_BYTES: usize = 2;
pub(super) const PAIR_BYTES: usize = 2 * SCALE_BYTES;

/// The scale row of a tile, where all its tokens share one.
pub(super) fn scale_row(groups: UniformGroups, tile: usize) -> usize {
    groups.group.map_or(0, |group| tile * TILE / group)
}

/// Channels of a value that a token has one pair for; all of them where pairs are of channels.
pub(super) fn channels_per_pair(groups: UniformGroups, dim: usize) -> usize {
    match groups.axis {
        GroupAxis::Token => groups.group.unwrap_or(dim),
        GroupAxis::Channel | GroupAxis::Block => dim,
    }
}

/// Whether every tile lies in one scale row.
pub(super) fn by_tile(groups: UniformGroups) -> bool {
    match groups.axis {
        GroupAxis::Channel => groups.group.is_none_or(|group| group.is_multiple_of(TILE)),
        GroupAxis::Block => true,
        GroupAxis::Token => false,
    }
}

/// Queries of a unit, folded again for every group of tokens.
pub(crate) struct UniformKeys {
    groups: UniformGroups,
    lookup: CodeLookup,
    dim: usize,
    queries: ScratchVec<f32>,
    /// Address and row of the scales that queries are folded with: tiles of one group share them.
    folded: Option<(usize, usize)>,
    /// Zeros of f16, one for each channel, for scales without minima.
    zeros: ScratchVec<u8>,
    parts: IntOperands,
    /// The queries, cut as they are, where one pair is every channel's; a base is that of a minimum
    /// of 1.
    whole: ScratchVec<RoundedRow>,
    units: ScratchVec<f32>,
    /// The share of a score that comes from the minima, by row.
    bases: ScratchVec<f32>,
    /// See [`alike_factor`]; by row, of queries times the first steps.
    alike_factors: ScratchVec<f32>,
    /// The largest units so far, by row.
    largest_units: ScratchVec<f32>,
}

/// Whether there is a kernel for keys of the side.
pub(crate) fn takes_keys(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let fits = groups.bits <= 8
        && side.dim().is_multiple_of(4)
        && int_operands::sums_fit(side.dim(), largest_code(groups));
    fits && groups.mode != UniformMode::Hybrid && by_tile(groups)
}

impl UniformKeys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let groups = side.uniform_groups()?;
        let (dim, rows) = (side.dim(), queries.len() / side.dim());
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        Some(Self {
            groups,
            lookup: code_lookup(groups),
            dim,
            queries: ScratchVec::collect_values(queries.iter().copied()),
            folded: None,
            zeros: ScratchVec::default(),
            // Queries are cut as they are where a page has one pair.
            parts: match groups.axis {
                GroupAxis::Block => IntOperands::of_queries(config),
                GroupAxis::Channel | GroupAxis::Token => IntOperands::of_scaled_queries(config),
            }
            .multiplied_with(largest_code(groups)),
            whole: ScratchVec::default(),
            units: ScratchVec::with_room(rows),
            bases: ScratchVec::with_room(rows),
            alike_factors: ScratchVec::with_room(rows),
            largest_units: ScratchVec::repeat_value(0.0, rows),
        })
    }

    /// How far rounding may take a score of that row, so far: see [`rounding_loss`].
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        let energy = self.dim as f32 * code_reach(self.groups).powi(2);
        let alike = self.alike_factors.get(row).copied().unwrap_or_default();
        rounding_loss(self.largest_units[row], energy) * alike
    }

    /// Scores all rows against one tile.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        scores: &mut SpanScores,
    ) {
        let scales = cursor.page.scales;
        let key = (scales.as_ptr().addr(), scale_row(self.groups, cursor.in_page));
        if self.folded != Some(key) {
            self.folded = Some(key);
            self.fold_queries(simd, scales, key.1);
            let units = self.largest_units.iter_mut().zip(&self.units);
            units.for_each(|(largest, unit)| *largest = largest.max(*unit));
        }
        for first in (0..self.units.len()).step_by(ROWS) {
            let rows = self.parts.rows_from(first);
            let units = &self.units[first..first + rows.row_count()];
            let out = scores.rows_mut(first, cursor.in_span);
            key_dots(simd, codes, &self.lookup, ScaledRows { rows, units }, out);
            for (row, base) in self.bases[first..first + rows.row_count()].iter().enumerate() {
                out[row * SPAN..][..TILE].iter_mut().for_each(|score| *score += base);
            }
        }
    }

    /// Multiplies the queries with the steps of a scale row.
    fn fold_queries(&mut self, simd: Simd, scales_of_page: &[u8], row: usize) {
        self.units.clear();
        self.bases.clear();
        if self.groups.axis == GroupAxis::Block {
            return self.take_pair(simd, scales_of_page);
        }
        self.parts.clear_rows(self.dim);
        let columns = if self.groups.mode == UniformMode::Asym { 2 } else { 1 };
        let bytes = self.dim * columns * SCALE_BYTES;
        let scales =
            steps_and_minima(&scales_of_page[row * bytes..][..bytes], self.dim, &mut self.zeros);
        for block in self.queries.chunks(ROWS * self.dim) {
            let mut queries: [&[f32]; ROWS] = [&[]; ROWS];
            let rows = block.len() / self.dim;
            for (to, query) in queries.iter_mut().zip(block.chunks_exact(self.dim)) {
                *to = query;
            }
            let mut pushed = [RoundedRow::default(); ROWS];
            self.parts.push_folded(simd, &queries[..rows], scales, &mut pushed);
            for row in &pushed[..rows] {
                self.units.push(row.unit);
                self.bases.push(row.base + middle_code(self.groups) * row.lost);
            }
        }
        if self.alike_factors.is_empty() {
            let mut steps = ScratchVec::repeat_value(0f32, self.dim);
            DType::F16.widen_values(scales.steps, &mut steps);
            let rows = self.queries.chunks_exact(self.dim).zip(&self.units);
            self.alike_factors.extend(rows.map(|(query, unit)| {
                let folded = query.iter().zip(&steps).map(|(q, s)| q * s);
                let folded = ScratchVec::collect_values(folded);
                alike_factor(simd, &folded, *unit)
            }));
        }
    }

    /// Takes the page's only pair into units and bases: the queries are cut once for all pages.
    fn take_pair(&mut self, simd: Simd, pair: &[u8]) {
        if self.whole.is_empty() {
            self.parts.clear_rows(self.dim);
            for query in self.queries.chunks_exact(self.dim) {
                let (largest, total) =
                    (query.iter().fold(0f32, |m, q| m.max(q.abs())), sum_lanes(query));
                let pushed = self.parts.push(simd, query, largest, Some(total));
                self.alike_factors.push(alike_factor(simd, query, pushed.unit));
                self.whole.push_value(RoundedRow { base: total, ..pushed });
            }
        }
        let mut values = [0f32; 2];
        let [minimum, step] = match self.groups.mode {
            UniformMode::Asym => {
                DType::F16.widen_values(&pair[..PAIR_BYTES], &mut values);
                values
            }
            UniformMode::Sym | UniformMode::Hybrid => {
                DType::F16.widen_values(&pair[..PAIR_BYTES / 2], &mut values[1..]);
                values
            }
        };
        for row in &self.whole {
            self.units.push(row.unit * step);
            self.bases.push(row.base * minimum + middle_code(self.groups) * row.lost * step);
        }
    }
}

/// The code in the middle. What rounding takes from the factors is multiplied with codes; with
/// this one it is put back, so that only the distance of codes from it counts.
pub(super) fn middle_code(groups: UniformGroups) -> f32 {
    match groups.mode {
        // Codes less the largest magnitude are around 0 already.
        UniformMode::Sym => 0.0,
        UniformMode::Asym => f32::from(groups.top) / 2.0,
        UniformMode::Hybrid => ((1u32 << groups.bits) - 1) as f32 / 2.0,
    }
}

/// How far a code can be from the one that rounding is put back with.
pub(super) fn code_reach(groups: UniformGroups) -> f32 {
    match groups.mode {
        UniformMode::Asym => middle_code(groups),
        UniformMode::Sym => f32::from(groups.top),
        UniformMode::Hybrid => ((1u32 << groups.bits) - 1) as f32,
    }
}

/// The largest magnitude of a code as products take it.
pub(super) fn largest_code(groups: UniformGroups) -> i32 {
    match groups.mode {
        UniformMode::Asym | UniformMode::Sym => groups.top.into(),
        UniformMode::Hybrid => code_lookup(groups).largest_value(),
    }
}

/// The values that products take codes for.
pub(super) fn code_lookup(groups: UniformGroups) -> CodeLookup {
    match groups.mode {
        UniformMode::Asym => CodeLookup::identity(),
        UniformMode::Sym => CodeLookup::biased_by(groups.top.into()),
        UniformMode::Hybrid => CodeLookup::biased_bytes(),
    }
}

/// Steps and minima of `n` factors, as f16; minima are zeros where codes have signs.
pub(super) fn steps_and_minima<'a>(
    bytes: &'a [u8],
    n: usize,
    zeros: &'a mut ScratchVec<u8>,
) -> FoldScales<'a> {
    let (minima, steps) = bytes.split_at(bytes.len() - n * SCALE_BYTES);
    if minima.is_empty() {
        zeros.resize_with_room(steps.len(), 0);
        return FoldScales { steps, minima: zeros };
    }
    FoldScales { steps, minima }
}

/// Writes the scales of the tokens of a few tiles, groups before tokens, to `out`.
pub(super) fn transpose_scales(
    groups: UniformGroups,
    dim: usize,
    cursor: &TileCursor<'_>,
    out: &mut ScratchVec<u8>,
) {
    let (first, tokens) = (cursor.in_page * TILE, cursor.count * TILE);
    let pairs = dim.div_ceil(channels_per_pair(groups, dim));
    let columns = if groups.mode == UniformMode::Asym { 2 * pairs } else { pairs };
    let bytes = &cursor.page.scales[first * columns * 2..][..tokens * columns * 2];
    out.resize_with_room(bytes.len(), 0);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if columns.is_multiple_of(8) {
        return int_operands::simd_fold::transpose_words(bytes, columns, out);
    }
    let (words, turned) = (bytes.as_chunks::<2>().0, out.as_chunks_mut::<2>().0);
    for (column, out) in turned.chunks_exact_mut(tokens).enumerate() {
        let values = words[column..].iter().step_by(columns);
        out.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
    }
}

/// Sums in eight lanes: one lane would wait for each addition.
pub(super) fn sum_lanes(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0f32; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum::<f32>() + rest.iter().sum::<f32>()
}
