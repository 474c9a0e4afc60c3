//! Values of uniform sides, straight from their codes: steps go into the weights where tokens have
//! them, else into the sums, as do minima.

use crate::cpu::hybrid;
use crate::cpu::int_dot::{
    CodeLookup, ROWS, SETTLED_TILES, SumTarget, TileCodes, VECTOR_ROWS, value_dots,
};
use crate::cpu::int_operands::{FoldScales, IntOperands, RoundedRow};
use crate::cpu::loss::{RoundingLoss, largest_of};
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::row_block::StridedRows;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::{KernelConfig, Simd, per_level};
use crate::cpu::span_scores::{SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use crate::cpu::uniform::second_terms::SecondTerms;
use crate::cpu::uniform::{
    PAIR_BYTES, by_tile, channels_per_pair, code_lookup, code_reach, middle_code, scale_row,
    steps_and_minima, sum_lanes, transpose_scales,
};
use kvd_codec::{FixedCodes, GroupAxis, HeadCodec, UniformGroups, UniformMode};
use kvd_core::DType;
use std::ops::Range;

/// Ones of f16, one for each token of a tile.
const ONES: [u8; 2 * TILE] = {
    let mut ones = [0; 2 * TILE];
    let mut at = 1;
    while at < 2 * TILE {
        ones[at] = 0x3C;
        at += 2;
    }
    ones
};

/// Minima and steps of some groups.
#[derive(Default)]
struct ValueScales {
    minima: ScratchVec<f32>,
    steps: ScratchVec<f32>,
    /// Modes and signs, where groups choose.
    hybrid: hybrid::HybridScales,
    /// Address and row of what is loaded, so that tiles of one group load it once.
    loaded: Option<(usize, usize)>,
}

impl ValueScales {
    /// Loads scale row `row`, unless it is; `pairs` groups of a head size.
    fn load_scales(
        &mut self,
        simd: Simd,
        page: &FixedCodes<'_>,
        groups: UniformGroups,
        row: usize,
        pairs: usize,
        dim: usize,
    ) -> bool {
        let key = Some((page.scales.as_ptr().addr(), row));
        if self.loaded == key {
            return false;
        }
        self.loaded = key;
        self.minima.resize_with_room(pairs, 0.0);
        self.steps.resize_with_room(pairs, 0.0);
        let pair_bytes = match groups.mode {
            UniformMode::Asym => PAIR_BYTES,
            UniformMode::Sym => PAIR_BYTES / 2,
            UniformMode::Hybrid => {
                let layout = groups.hybrid_layout(page.layout.tokens(), dim);
                let (bytes, first, count) = (page.scales, row, 1);
                let rows = hybrid::ScaleRows { bytes, layout, first, count, pairs };
                self.hybrid.load_rows(simd, rows, false);
                return true;
            }
        };
        let bytes = &page.scales[row * pairs * pair_bytes..][..pairs * pair_bytes];
        let (minima, steps) = bytes.split_at(bytes.len() - 2 * pairs);
        if groups.mode == UniformMode::Asym {
            DType::F16.widen_values(minima, &mut self.minima);
        }
        DType::F16.widen_values(steps, &mut self.steps);
        true
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct UniformValues {
    groups: UniformGroups,
    lookup: CodeLookup,
    dim: usize,
    scales: ValueScales,
    parts: IntOperands,
    /// How those were rounded, and their units, `[groups of channels, rows]`.
    rounded: ScratchVec<RoundedRow>,
    units: ScratchVec<f32>,
    /// `[minima and steps, groups of channels, tokens]` of a span as f16, for groups by token.
    turned: ScratchVec<u8>,
    /// Zeros of f16, one for each token of a span, for scales without minima.
    zeros: ScratchVec<u8>,
    /// Sums that belong to all channels of a group, `[rows, groups of channels]`: minima of tokens,
    /// and rounding residuals.
    bases: ScratchVec<f32>,
    /// Tiles since they were added.
    unsettled: usize,
    /// Codes with their signs.
    signed: ScratchVec<u8>,
    /// See [`UniformValues::largest_value`].
    magnitude: f32,
    /// Signed sums of the rounding residuals of weights without steps, by row.
    lost: ScratchVec<f32>,
    /// For rounding of weights times steps, `[rows, groups of channels]`.
    folded: ScratchVec<RoundingLoss>,
    /// Whether, under `int8`, what rounding took from weights counts as the other weights do on
    /// average, and not as the code in the middle: a transform adds up in one channel what is alike
    /// in all, and the middle may be.
    averages: bool,
    /// The rest of the weights, where one rounding takes too much.
    second: Option<Box<SecondTerms>>,
}

/// Whether there is a kernel for the side.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    // The last group may be shorter.
    let whole = |group: usize| group.is_multiple_of(16) && side.dim().is_multiple_of(16);
    let fits = match groups.axis {
        GroupAxis::Token => groups.group.is_none_or(whole),
        GroupAxis::Channel | GroupAxis::Block => by_tile(groups),
    };
    match groups.mode {
        UniformMode::Asym | UniformMode::Sym => fits && groups.bits <= 8,
        // Signs of a group are one word, those of a tile.
        UniformMode::Hybrid => {
            groups.axis == GroupAxis::Channel && groups.group == Some(TILE) && groups.bits < 8
        }
    }
}

impl UniformValues {
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, rows: usize) -> Option<Self> {
        let groups = side.uniform_groups()?;
        let dim = side.dim();
        let pairs = dim.div_ceil(channels_per_pair(groups, dim));
        let second = SecondTerms::of_side(config, side).map(Box::new);
        Some(Self {
            groups,
            lookup: code_lookup(groups),
            dim,
            scales: ValueScales::default(),
            parts: IntOperands::of_weights(config),
            rounded: ScratchVec::default(),
            units: ScratchVec::default(),
            turned: ScratchVec::default(),
            zeros: ScratchVec::default(),
            bases: ScratchVec::repeat_value(0.0, rows * pairs),
            unsettled: 0,
            signed: ScratchVec::default(),
            magnitude: 0.0,
            lost: ScratchVec::repeat_value(0.0, rows),
            folded: match groups.axis {
                GroupAxis::Token => ScratchVec::repeat_value(RoundingLoss::default(), rows * pairs),
                GroupAxis::Channel | GroupAxis::Block => ScratchVec::default(),
            },
            averages: groups.axis == GroupAxis::Token
                && groups.mode == UniformMode::Asym
                && !side.is_identity()
                && second.is_none(),
            second,
        })
    }

    /// The largest distance of a value from where rounding is put back, so far; 0 where steps go
    /// into the weights before those are rounded.
    pub(crate) fn largest_value(&self) -> f32 {
        self.magnitude
    }

    /// The part that rounding took from all weights of a row together, beside what was put back.
    pub(crate) fn joint_residual(&self, row: usize) -> f32 {
        self.lost[row]
    }

    /// Losses of a sum for rounding of weights times steps, of the group of channels that lost
    /// most; none where steps do not go into the weights.
    pub(crate) fn folded_loss(&self, row: usize) -> RoundingLoss {
        let pairs = self.dim.div_ceil(channels_per_pair(self.groups, self.dim));
        let groups = self.folded.get(row * pairs..(row + 1) * pairs).unwrap_or_default();
        let most = groups.iter().fold(RoundingLoss::default(), |most, group| most.larger_of(group));
        most.times_magnitude(code_reach(self.groups))
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, dim]`).
    pub(crate) fn add_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        let tiles = cursor.span_tiles();
        self.unsettled += tiles.len();
        if self.unsettled > SETTLED_TILES {
            self.unsettled = tiles.len();
            self.settle_sums(sums);
        }
        if self.groups.axis == GroupAxis::Token {
            transpose_scales(self.groups, self.dim, cursor, &mut self.turned);
            self.parts.change_offsets();
            for first in (0..weights.row_count()).step_by(ROWS) {
                let rows = first..weights.row_count().min(first + ROWS);
                self.add_by_token(simd, codes, &tiles, rows, weights, sums);
            }
            return;
        }
        let bytes = codes.bytes.len() / tiles.len();
        for (index, bytes) in codes.bytes.chunks_exact(bytes).enumerate() {
            self.parts.change_offsets();
            let prefetch = codes.prefetch.share_of(index, tiles.len());
            let mut codes = TileCodes { bytes, prefetch, ..codes };
            let pairs = if self.groups.axis == GroupAxis::Block { 1 } else { self.dim };
            let row = scale_row(self.groups, cursor.in_page + index);
            if self.scales.load_scales(simd, cursor.page, self.groups, row, pairs, self.dim) {
                let steps = match self.groups.mode {
                    UniformMode::Hybrid => &self.scales.hybrid.steps[..],
                    UniformMode::Asym | UniformMode::Sym => &self.scales.steps[..],
                };
                self.magnitude =
                    self.magnitude.max(largest_of(simd, steps) * code_reach(self.groups));
            }
            let (hybrid, quads) = (self.groups.mode == UniformMode::Hybrid, TILE / hybrid::QUAD);
            if hybrid {
                let signs = self.sign_words(quads);
                let signed = hybrid::SignedCodes { codes, signs };
                let rows = weights.row_count();
                if self.second.is_none() && hybrid::has_dots(simd, signed, 1, rows) {
                    self.add_signed(simd, codes, quads, tiles.start + index, weights, sums);
                    continue;
                }
            }
            // Not borrowed while the sums are made.
            let mut signed = std::mem::take(&mut self.signed);
            if hybrid {
                let signs = self.sign_words(quads);
                signed.resize_with_room(TILE * self.dim, 0);
                hybrid::unpack_signed(simd, codes, signs, &mut signed);
                codes = TileCodes { bytes: &signed, width: 8, ..codes };
            }
            for first in (0..weights.row_count()).step_by(ROWS) {
                let rows = first..weights.row_count().min(first + ROWS);
                self.add_by_tile(simd, codes, tiles.start + index, rows, weights, sums);
            }
            self.signed = signed;
        }
    }

    /// A few rows over tiles whose tokens have scales of their own.
    fn add_by_token(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tiles: &Range<usize>,
        rows: Range<usize>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        let (tokens, channels) = (tiles.len() * TILE, channels_per_pair(self.groups, self.dim));
        let sums = &mut sums[rows.start * self.dim..rows.end * self.dim];
        let mut values: [&[f32]; ROWS] = [&[]; ROWS];
        for (values, row) in values.iter_mut().zip(rows.clone()) {
            *values = weights.tile_weights(row, tiles.clone()).0;
        }
        let values = &values[..rows.len()];
        if self.second.is_some() {
            return self.add_two_terms(simd, codes, rows, values, sums);
        }
        let (pairs, count) = (self.dim.div_ceil(channels), rows.len());
        let scales = steps_and_minima(&self.turned, tokens * pairs, &mut self.zeros);
        // All groups are folded before one is multiplied: while a fold waits for its largest
        // product, the next can begin.
        self.parts.clear_rows(tokens);
        self.parts.push_groups(simd, values, scales, &mut self.rounded);
        self.units.clear();
        let averages = self.averages;
        let middle = if averages { 0.0 } else { middle_code(self.groups) };
        for (group, rounded) in self.rounded.chunks_exact(count).enumerate() {
            for (index, (row, rounded)) in rows.clone().zip(rounded).enumerate() {
                self.bases[row * pairs + group] += rounded.base + middle * rounded.lost;
                self.folded[row * pairs + group].add_row(rounded, tokens);
                let exact = averages.then(|| self.parts.exact_unit(group * count + index, rounded));
                self.units.push_value(exact.unwrap_or(rounded.unit));
            }
        }
        for group in 0..pairs {
            let first = group * channels;
            let units = &self.units[group * count..(group + 1) * count];
            let channels = channels.min(self.dim - first);
            let target = SumTarget { units, factors: &[], first, count: channels };
            let codes = TileCodes { prefetch: codes.prefetch.share_of(group, pairs), ..codes };
            let factors = self.parts.some_rows(group * count, count);
            value_dots(simd, codes, &self.lookup, factors, target, sums);
        }
    }

    /// As [`UniformValues::add_by_token`], where what rounding leaves of weights is rounded again.
    fn add_two_terms(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        rows: Range<usize>,
        values: &[&[f32]],
        sums: &mut [f32],
    ) {
        let Some(terms) = &mut self.second else { return };
        let (tokens, channels) = (values[0].len(), channels_per_pair(self.groups, self.dim));
        let (pairs, middle) = (self.dim.div_ceil(channels), middle_code(self.groups));
        let FoldScales { steps, minima } =
            steps_and_minima(&self.turned, tokens * pairs, &mut self.zeros);
        let scales = minima.chunks_exact(2 * tokens).zip(steps.chunks_exact(2 * tokens));
        for (group, (minima, steps)) in scales.enumerate() {
            let mut pushed = [RoundedRow::default(); ROWS];
            self.parts.clear_rows(tokens);
            self.parts.push_folded(simd, values, FoldScales { steps, minima }, &mut pushed);
            let second = terms.take_residuals(simd, values, Some(steps), &self.parts, &pushed);
            for (row, (first, last)) in rows.clone().zip(pushed.iter().zip(&second)) {
                self.bases[row * pairs + group] += first.base + middle * last.lost;
                self.folded[row * pairs + group].add_row(last, tokens);
            }
            let first = group * channels;
            let count = channels.min(self.dim - first);
            let prefetches = [codes.prefetch.share_of(group, pairs), PrefetchBytes::default()];
            let factors = [self.parts.rows_from(0), terms.last_rows()];
            for ((pushed, factors), prefetch) in
                [pushed, second].iter().zip(factors).zip(prefetches)
            {
                let units = pushed.map(|row| row.unit);
                let units = &units[..rows.len()];
                let target = SumTarget { units, factors: &[], first, count };
                let codes = TileCodes { prefetch, ..codes };
                value_dots(simd, codes, &self.lookup, factors, target, sums);
            }
        }
    }

    /// Signs of the tile whose scales are loaded.
    fn sign_words(&self, quads: usize) -> hybrid::SignWords<'_> {
        hybrid::SignWords { words: &self.scales.hybrid.signs, lanes: self.dim, quads }
    }

    /// All rows over a tile of codes with signs, by the kernel for those.
    fn add_signed(
        &mut self,
        simd: Simd,
        mut codes: TileCodes<'_>,
        quads: usize,
        tile: usize,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        for (sums, at) in sums.chunks_mut(VECTOR_ROWS * self.dim).zip((0..).step_by(VECTOR_ROWS)) {
            let count = sums.len() / self.dim;
            let mut values: [&[f32]; VECTOR_ROWS] = [&[]; VECTOR_ROWS];
            for (row, values) in values.iter_mut().enumerate().take(count) {
                *values = weights.tile_weights(at + row, tile..tile + 1).0;
            }
            // Nothing is folded into them; the share of "minima" of one is their sum.
            let ones = FoldScales { steps: &ONES, minima: &ONES };
            let mut pushed = [RoundedRow::default(); ROWS];
            self.parts.clear_rows(TILE);
            self.parts.push_folded(simd, &values[..count], ones, &mut pushed);
            let units = pushed.map(|row| row.unit);
            let losts = self.lost[at..at + count].iter_mut().zip(&pushed);
            losts.for_each(|(lost, pushed)| *lost += pushed.lost);
            let adds = pushed.map(|row| [middle_code(self.groups) * row.lost, row.base]);
            let (units, adds) = (&units[..count], &adds[..count]);
            let factors =
                hybrid::GroupFactors { rows: self.parts.rows_from(0), positive: true, units, adds };
            let (of, groups) = (std::iter::once(factors), &self.scales.hybrid);
            let signed = hybrid::SignedCodes { codes, signs: self.sign_words(quads) };
            let to = StridedRows { values: sums, stride: self.dim };
            hybrid::add_signed_dots(simd, signed, groups, of, to);
            codes.prefetch = PrefetchBytes::default();
        }
    }

    /// A few rows over a tile whose tokens share their scales.
    fn add_by_tile(
        &mut self,
        simd: Simd,
        codes: TileCodes<'_>,
        tile: usize,
        rows: Range<usize>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        self.parts.clear_rows(TILE);
        let sums = &mut sums[rows.start * self.dim..rows.end * self.dim];
        let ValueScales { minima, steps, hybrid, .. } = &self.scales;
        let (minima, steps, centres) = match self.groups.mode {
            UniformMode::Hybrid => (&hybrid.zeros[..], &hybrid.steps[..], &hybrid.centres[..]),
            UniformMode::Asym | UniformMode::Sym => (&minima[..], &steps[..], &steps[..]),
        };
        let mut values: [&[f32]; ROWS] = [&[]; ROWS];
        let (mut pushed, mut totals) = ([RoundedRow::default(); ROWS], [0f32; ROWS]);
        for (index, row) in rows.clone().enumerate() {
            let (weights, most) = weights.tile_weights(row, tile..tile + 1);
            let weight = sum_lanes(weights);
            values[index] = weights;
            pushed[index] = self.parts.push(simd, weights, most, Some(weight));
            totals[index] = weight;
        }
        let second = self.second.as_mut().map(|second| {
            second.take_residuals(simd, &values[..rows.len()], None, &self.parts, &pushed)
        });
        for (index, row) in rows.clone().enumerate() {
            let (weight, lost) = (totals[index], second.as_ref().unwrap_or(&pushed)[index].lost);
            self.lost[row] += lost;
            let lost = middle_code(self.groups) * lost;
            let sums = &mut sums[index * self.dim..][..self.dim];
            match (minima, steps) {
                ([minimum], [step]) => self.bases[row] += weight * minimum + lost * step,
                _ => add_bases(simd, sums, minima, centres, [weight, lost]),
            }
        }
        let (factors, step) = if let [step] = steps { (&[][..], *step) } else { (steps, 1.0) };
        let units = pushed.map(|row| row.unit * step);
        let target = SumTarget { units: &units[..rows.len()], factors, first: 0, count: self.dim };
        value_dots(simd, codes, &self.lookup, self.parts.rows_from(0), target, sums);
        if let (Some(terms), Some(second)) = (&self.second, second) {
            let units = second.map(|row| row.unit * step);
            let target = SumTarget { units: &units[..rows.len()], ..target };
            let codes = TileCodes { prefetch: PrefetchBytes::default(), ..codes };
            value_dots(simd, codes, &self.lookup, terms.last_rows(), target, sums);
        }
    }

    /// Scales row `row` of the sums; `sums` is that row.
    pub(crate) fn scale_row(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        let pairs = self.dim.div_ceil(channels_per_pair(self.groups, self.dim));
        let bases = &mut self.bases[row * pairs..][..pairs];
        self.lost[row] *= factor;
        let folded = self.folded.iter_mut().skip(row * pairs).take(pairs);
        folded.for_each(|group| group.scale_by(factor));
        sums.iter_mut().chain(bases).for_each(|sum| *sum *= factor);
    }

    /// Adds bases to the sums of all rows: codes are never negative, so that sums without minima
    /// grow and would lose what is small beside them.
    fn settle_sums(&mut self, sums: &mut [f32]) {
        let count = channels_per_pair(self.groups, self.dim);
        let groups = sums.chunks_exact_mut(self.dim).flat_map(|row| row.chunks_mut(count));
        for (sums, base) in groups.zip(&mut self.bases) {
            sums.iter_mut().for_each(|sum| *sum += *base);
            *base = 0.0;
        }
    }

    /// Adds row `row` of the sums to `out`; `sums` is that row, without what is kept apart.
    pub(crate) fn unfold_row(&self, row: usize, sums: &[f32], out: &mut [f32]) {
        let count = channels_per_pair(self.groups, self.dim);
        let pairs = self.dim.div_ceil(count);
        let groups = out.chunks_mut(count).zip(sums.chunks(count));
        for ((out, sums), base) in groups.zip(&self.bases[row * pairs..]) {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum + base);
        }
    }
}

per_level!(
    fn add_bases(sums: &mut [f32], minima: &[f32], centres: &[f32], of: [f32; 2])
        = add_bases_body
);

/// Adds what minima and centres are worth for a weight, and for what rounding took of it.
#[inline(always)]
fn add_bases_body(sums: &mut [f32], minima: &[f32], centres: &[f32], of: [f32; 2]) {
    let [weight, lost] = of;
    for (sum, (minimum, centre)) in sums.iter_mut().zip(minima.iter().zip(centres)) {
        *sum += weight * minimum + lost * centre;
    }
}
