//! Uniform sides whose codes of up to four bits are multiplied as bytes, with `Precision::Int8` in
//! plain AVX2: `vpmaddubsw` adds two products in 16 bits, and several such sums fit before they
//! are widened.
//!
//! A step is multiplied into the query (keys by channel) or the weight (values by token), and the
//! product cut to one byte of the largest it can be in its block: the block's largest step times
//! its largest query or weight. Those are known before anything is folded, so nothing is looked at
//! twice; and one large channel takes digits from its block alone.

use crate::cpu::int_dot::{TileCodes, VECTOR_ROWS as ROWS};
use crate::cpu::int_operands::FoldScales;
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use crate::cpu::uniform::minima::{MinimaSums, WeightedTokens};
use crate::cpu::uniform::{
    SCALE_BYTES, by_tile, channels_per_pair, scale_row, steps_and_minima, transpose_scales,
};
#[cfg(target_arch = "x86_64")]
use crate::cpu::{uniform::avx2_nibble_values, uniform::avx2_nibbles};
use kvd_codec::{GroupAxis, HeadCodec, UniformGroups, UniformMode};

/// Channels of a key that share a unit, and how many one step of a fold takes.
pub(super) const BLOCK: usize = 8;
pub(super) const STEP: usize = 32;
/// Largest factor of a query, which has a sign, and of a weight, which has none.
const TOP_QUERY: f32 = 127.0;
pub(super) const TOP_WEIGHT: f32 = 255.0;
/// Steps of a block this far apart are uneven.
pub(super) const UNEVEN: f32 = 4.0;
/// Scale of the stored rounding residuals: half a quantization step is [`TOP_QUERY`] units.
pub(super) const RESIDUES: f32 = 254.0;
/// Lanes that sums of products with minima are kept in.
pub(super) const LANES: usize = 8;
/// Values below this are treated as zero: their reciprocal would overflow.
const LEAST: f32 = 1e-30;

/// Tokens whose weights share a unit.
pub(super) const TOKENS: usize = 16;

/// Whether there is a kernel for keys of the side.
pub(crate) fn takes_keys(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let fits = groups.axis == GroupAxis::Channel && by_tile(groups);
    // Blocks of channels lie in one plane of a byte, or codes are made bytes.
    let width = if groups.bits == 3 { 8 } else { groups.bits as usize };
    let dim = side.dim();
    let fits = fits && dim.is_multiple_of(STEP) && (dim * width).is_multiple_of(8 * BLOCK);
    fits && twice_middle(groups).is_some()
}

/// Whether there is a kernel for values of the side.
pub(crate) fn takes_values(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let of = channels_per_pair(groups, side.dim());
    let fits = groups.axis == GroupAxis::Token && of.is_multiple_of(BLOCK);
    fits && side.dim().is_multiple_of(of) && twice_middle(groups).is_some()
}

/// Twice the code around which others are multiplied, the middle of all; `None` where there is no
/// kernel for the codes.
fn twice_middle(groups: UniformGroups) -> Option<u8> {
    if groups.bits > 4 {
        return None;
    }
    match groups.mode {
        UniformMode::Asym => u8::try_from(groups.top).ok().filter(|top| *top < 16),
        // Levels are around zero already, at a whole code.
        UniformMode::Sym => u8::try_from(2 * groups.top).ok().filter(|twice| *twice < 16),
        UniformMode::Hybrid => None,
    }
}

/// Steps from the minimum to the middle.
fn centre_steps(groups: UniformGroups, middle: u8) -> f32 {
    if groups.mode == UniformMode::Asym { f32::from(middle) / 2.0 } else { 0.0 }
}

/// The offset of value codes, which are bytes with a sign: those that lie in one and two bits are
/// doubled first, of others the middle is half a step further.
fn value_offset(groups: UniformGroups, middle: u8, width: u32) -> CodeOffset {
    let doubled = width <= 2;
    let code = if doubled { middle } else { middle.div_ceil(2) };
    let gain = if doubled { 0.5 } else { 1.0 };
    let centre = if groups.mode == UniformMode::Asym { f32::from(code) * gain } else { 0.0 };
    CodeOffset { code, gain, centre }
}

/// The code that is subtracted from value codes before they are multiplied.
#[derive(Clone, Copy)]
pub(super) struct CodeOffset {
    /// To be taken off a code, as it is multiplied.
    pub(super) code: u8,
    /// Steps that one of what is multiplied stands for.
    pub(super) gain: f32,
    /// Steps that it is above the minimum.
    pub(super) centre: f32,
}

/// The middle of all key codes.
#[derive(Clone, Copy)]
pub(super) struct MiddleCode {
    /// Steps that it is above the minimum.
    pub(super) steps: f32,
    pub(super) code: f32,
}

/// Queries as they are folded: of at most [`ROWS`] rows.
struct QueryBlock {
    rows: usize,
    values: Vec<f32>,
    /// Values over a unit of their block of channels, so that the largest is [`TOP_QUERY`].
    scaled: Vec<f32>,
    /// The units of blocks of channels, `[blocks, ROWS]`.
    largest: Vec<f32>,
    /// Scaled values times steps, for the last scale row folded: bytes, their units, and the share
    /// of a score that comes from minima and from the code that is zero.
    factors: Vec<u8>,
    units: Vec<f32>,
    bases: [f32; ROWS],
    /// Rounding residuals of uneven blocks, and which blocks those are.
    residues: Vec<u8>,
    uneven: Vec<usize>,
}

impl QueryBlock {
    fn new(values: &[f32], dim: usize) -> Self {
        let rows = values.len() / dim;
        let mut scaled = values.to_vec();
        let mut largest = vec![0.0; dim / BLOCK * ROWS];
        for (row, values) in scaled.chunks_exact_mut(dim).enumerate() {
            for (block, values) in values.chunks_exact_mut(BLOCK).enumerate() {
                let most = values.iter().fold(0f32, |most, q| most.max(q.abs()));
                let inverse = if most > LEAST { TOP_QUERY / most } else { 0.0 };
                values.iter_mut().for_each(|q| *q *= inverse);
                largest[block * ROWS + row] = most / TOP_QUERY;
            }
        }
        Self {
            rows,
            values: values.to_vec(),
            scaled,
            units: vec![0.0; largest.len()],
            largest,
            factors: vec![0; values.len()],
            bases: [0.0; ROWS],
            residues: vec![0; values.len()],
            uneven: Vec::new(),
        }
    }

    fn for_fold(&mut self) -> (BlockQueries<'_>, FoldedBlock<'_>) {
        let Self { rows, values, scaled, largest, .. } = self;
        let queries = BlockQueries { rows: *rows, values, scaled, largest };
        let Self { factors, units, bases, residues, uneven, .. } = self;
        (queries, FoldedBlock { factors, units, bases, residues, uneven })
    }

    fn key_factors(&self) -> KeyFactors<'_> {
        KeyFactors {
            bytes: &self.factors,
            units: &self.units,
            bases: &self.bases[..self.rows],
            residues: &self.residues,
            uneven: &self.uneven,
        }
    }
}

/// Queries of a unit, folded again for every group of tokens.
pub(crate) struct NibbleKeys {
    groups: UniformGroups,
    middle: u8,
    dim: usize,
    blocks: Vec<QueryBlock>,
    /// Address and row of the scales that queries are folded with.
    folded: Option<(usize, usize)>,
    zeros: ScratchVec<u8>,
}

/// Queries as [`NibbleKeys`] hand them to their kernel.
pub(super) struct BlockQueries<'a> {
    pub(super) rows: usize,
    pub(super) values: &'a [f32],
    pub(super) scaled: &'a [f32],
    pub(super) largest: &'a [f32],
}

/// The kernel's output for them.
pub(super) struct FoldedBlock<'a> {
    pub(super) factors: &'a mut [u8],
    pub(super) units: &'a mut [f32],
    pub(super) bases: &'a mut [f32; ROWS],
    pub(super) residues: &'a mut [u8],
    pub(super) uneven: &'a mut Vec<usize>,
}

/// Folded queries, as keys are scored with them.
#[derive(Clone, Copy)]
pub(super) struct KeyFactors<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) units: &'a [f32],
    /// By row, as many as there are.
    pub(super) bases: &'a [f32],
    pub(super) residues: &'a [u8],
    pub(super) uneven: &'a [usize],
}

impl NibbleKeys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let middle = twice_middle(groups)?;
        let blocks = queries.chunks(ROWS * dim).map(|queries| QueryBlock::new(queries, dim));
        let blocks = blocks.collect();
        Some(Self { groups, middle, dim, blocks, folded: None, zeros: ScratchVec::default() })
    }

    /// Scores all rows against a few tiles.
    pub(crate) fn score_tiles(
        &mut self,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        scores: &mut SpanScores,
    ) {
        for ((codes, at), tile) in codes.each_tile().zip(cursor.span_tiles()) {
            let row = scale_row(self.groups, cursor.in_page + at / TILE);
            let key = (cursor.page.scales.as_ptr().addr(), row);
            if self.folded != Some(key) {
                self.folded = Some(key);
                self.fold_queries(cursor.page.scales, row);
            }
            for (index, block) in self.blocks.iter().enumerate() {
                let out = scores.rows_mut(index * ROWS, tile);
                let prefetch = if index == 0 { codes.prefetch } else { PrefetchBytes::default() };
                let codes = TileCodes { prefetch, ..codes };
                let factors = block.key_factors();
                #[cfg(target_arch = "x86_64")]
                avx2_nibbles::score_tile(codes, factors, out);
                #[cfg(not(target_arch = "x86_64"))]
                let _ = (codes, factors, out);
            }
        }
    }

    /// Multiplies the queries with the steps of a scale row.
    fn fold_queries(&mut self, bytes: &[u8], row: usize) {
        let columns = if self.groups.mode == UniformMode::Asym { 2 } else { 1 };
        let size = self.dim * columns * SCALE_BYTES;
        let scales = steps_and_minima(&bytes[row * size..][..size], self.dim, &mut self.zeros);
        let middle = MiddleCode {
            steps: centre_steps(self.groups, self.middle),
            code: f32::from(self.middle) / 2.0,
        };
        for block in &mut self.blocks {
            let (queries, folded) = block.for_fold();
            #[cfg(target_arch = "x86_64")]
            avx2_nibbles::fold_queries(queries, scales, middle, folded);
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (queries, scales, middle, folded);
        }
    }
}

/// Room for what is made of some rows' weights.
pub(super) struct WeightScratch {
    /// Weights over a unit of [`TOKENS`] of them.
    pub(super) scaled: [f32; ROWS * SPAN],
    /// Scaled weights times steps of one group.
    pub(super) factors: [u8; ROWS * SPAN],
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct NibbleValues {
    groups: UniformGroups,
    middle: u8,
    dim: usize,
    /// `[minima and steps, groups of channels, tokens]` of a span as f16.
    turned: ScratchVec<u8>,
    zeros: ScratchVec<u8>,
    scratch: Box<WeightScratch>,
    bases: MinimaSums<LANES>,
}

impl NibbleValues {
    pub(crate) fn new(side: &HeadCodec, rows: usize) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        let of = channels_per_pair(groups, dim);
        Some(Self {
            middle: twice_middle(groups)?,
            groups,
            dim,
            turned: ScratchVec::default(),
            zeros: ScratchVec::default(),
            scratch: Box::new(WeightScratch {
                scaled: [0.0; ROWS * SPAN],
                factors: [0; ROWS * SPAN],
            }),
            bases: MinimaSums::new(rows, dim, of),
        })
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, dim]`).
    pub(crate) fn add_tiles(
        &mut self,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        let Self { groups, middle, dim, turned, zeros, scratch, bases } = self;
        let (tokens, channels) = (cursor.count * TILE, channels_per_pair(*groups, *dim));
        transpose_scales(*groups, *dim, cursor, turned);
        let pairs = *dim / channels;
        let FoldScales { steps, minima } = steps_and_minima(turned, tokens * pairs, zeros);
        let offset = value_offset(*groups, *middle, codes.width);
        let blocks = sums.chunks_mut(ROWS * *dim).zip(bases.row_blocks());
        for (index, (sums, bases)) in blocks.enumerate() {
            let rows = sums.len() / *dim;
            let weights = weights.rows_from(index * ROWS, cursor.in_span);
            let of = WeightedTokens { weights, rows, tokens, steps, minima, channels };
            let prefetch = if index == 0 { codes.prefetch } else { PrefetchBytes::default() };
            let codes = TileCodes { prefetch, ..codes };
            #[cfg(target_arch = "x86_64")]
            avx2_nibble_values::add_tiles(codes, offset, of, scratch, bases, sums);
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (codes, offset, of, &scratch, (bases, sums));
        }
    }

    /// Scales row `row` of the sums; `sums` is that row.
    pub(crate) fn scale_row(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        self.bases.scale_row(row, sums, factor);
    }

    /// Adds row `row` of the sums to `out`; `sums` is that row, without what is kept apart.
    pub(crate) fn unfold_row(&self, row: usize, sums: &[f32], out: &mut [f32]) {
        self.bases.unfold_row(row, sums, out);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
