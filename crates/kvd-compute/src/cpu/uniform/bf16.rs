//! Uniform sides whose products are of bf16 (`Precision::Int8` where the machine has AVX512-BF16):
//! a step is multiplied into the query (keys by channel) or the weight (values by token), and the
//! product rounded to bf16, eight bits of its own. No row has to be looked at first for its
//! largest, which integers need, and one small factor beside a large one loses nothing.
//!
//! Codes of up to five bits become bf16 by a table in a register: the code less the middle of all
//! codes, which is exact. The middle goes into the minimum.

use crate::cpu::int_dot::{TileCodes, VECTOR_ROWS as ROWS};
use crate::cpu::int_operands::FoldScales;
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
#[cfg(target_arch = "x86_64")]
use crate::cpu::uniform::avx512_bf16;
use crate::cpu::uniform::minima::{MinimaSums, WeightedTokens};
use crate::cpu::uniform::{
    SCALE_BYTES, by_tile, channels_per_pair, middle_code, scale_row, steps_and_minima,
    transpose_scales,
};
use kvd_codec::{GroupAxis, HeadCodec, UniformGroups, UniformMode};

/// Codes that a table has room for; bits above a code do not matter where they are repeated.
pub(super) const CODES: usize = 32;
/// Factors that one step of a fold takes.
pub(super) const STEP: usize = 32;
/// Lanes that sums of products with minima are kept in.
pub(super) const LANES: usize = 16;

/// The levels that codes stand for.
pub(super) struct Bf16Levels {
    /// The level of each code, as bf16.
    pub(super) table: [u16; CODES],
    /// Steps from the minimum to level zero.
    pub(super) middle: f32,
}

impl Bf16Levels {
    fn for_groups(groups: UniformGroups) -> Self {
        let (count, middle) = (1usize << groups.bits, middle_code(groups));
        let zero = if groups.mode == UniformMode::Sym { groups.top.into() } else { middle };
        // Whole or half numbers of at most five bits: the low half of an f32 is zero.
        let level = |code: usize| ((code % count) as f32 - zero).to_bits() >> 16;
        Self { table: std::array::from_fn(|code| level(code) as u16), middle }
    }
}

/// Whether there is a kernel for codes of the side.
fn takes_codes(groups: UniformGroups) -> bool {
    groups.mode != UniformMode::Hybrid && groups.bits <= CODES.ilog2()
}

/// Whether there is a kernel for keys of the side.
pub(crate) fn takes_keys(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let fits = groups.axis == GroupAxis::Channel && by_tile(groups);
    fits && side.dim().is_multiple_of(STEP) && takes_codes(groups)
}

/// Whether there is a kernel for values of the side.
pub(crate) fn takes_values(side: &HeadCodec) -> bool {
    let Some(groups) = side.uniform_groups() else { return false };
    let of = channels_per_pair(groups, side.dim());
    let fits = groups.axis == GroupAxis::Token && of.is_multiple_of(STEP);
    fits && side.dim().is_multiple_of(of) && takes_codes(groups)
}

/// Queries of a unit, folded again for every group of tokens.
pub(crate) struct Bf16Keys {
    groups: UniformGroups,
    levels: Bf16Levels,
    dim: usize,
    queries: Vec<f32>,
    /// Address and row of the scales that queries are folded with.
    folded: Option<(usize, usize)>,
    /// Queries times steps, `[rows, dim]`, the middle two of each four swapped.
    factors: Vec<u16>,
    /// The share of a score that comes from the minima, by row.
    bases: Vec<f32>,
    zeros: ScratchVec<u8>,
}

impl Bf16Keys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let rows = queries.len() / dim;
        let levels = Bf16Levels::for_groups(groups);
        Some(Self {
            groups,
            factors: vec![0; queries.len()],
            levels,
            dim,
            queries: queries.to_vec(),
            folded: None,
            bases: vec![0.0; rows],
            zeros: ScratchVec::default(),
        })
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
            let size = ROWS * self.dim;
            let rows = self.factors.chunks(size).zip(self.bases.chunks(ROWS));
            for (index, (factors, bases)) in rows.enumerate() {
                let out = scores.rows_mut(index * ROWS, tile);
                let prefetch = if index == 0 { codes.prefetch } else { PrefetchBytes::default() };
                let codes = TileCodes { prefetch, ..codes };
                #[cfg(target_arch = "x86_64")]
                avx512_bf16::score_tile(codes, &self.levels, factors, bases, out);
                #[cfg(not(target_arch = "x86_64"))]
                let _ = (codes, factors, bases, out);
            }
        }
    }

    /// Multiplies the queries with the steps of a scale row.
    fn fold_queries(&mut self, bytes: &[u8], row: usize) {
        let Self { dim, queries, factors, bases, zeros, levels, .. } = self;
        let columns = if self.groups.mode == UniformMode::Asym { 2 } else { 1 };
        let size = *dim * columns * SCALE_BYTES;
        let scales = steps_and_minima(&bytes[row * size..][..size], *dim, zeros);
        let size = ROWS * *dim;
        let rows = queries.chunks(size).zip(factors.chunks_mut(size));
        for ((queries, factors), bases) in rows.zip(bases.chunks_mut(ROWS)) {
            #[cfg(target_arch = "x86_64")]
            avx512_bf16::fold_queries(queries, bases, scales, levels, factors);
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (&queries, &factors, &bases, scales, &levels);
        }
    }
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct Bf16Values {
    groups: UniformGroups,
    levels: Bf16Levels,
    dim: usize,
    /// `[minima and steps, groups of channels, tokens]` of a span as f16.
    turned: ScratchVec<u8>,
    zeros: ScratchVec<u8>,
    /// Weights times steps of one group, `[rows, tokens]`, swapped likewise.
    factors: Vec<u16>,
    bases: MinimaSums<LANES>,
}

impl Bf16Values {
    pub(crate) fn new(side: &HeadCodec, rows: usize) -> Option<Self> {
        let (groups, dim) = (side.uniform_groups()?, side.dim());
        let of = channels_per_pair(groups, dim);
        let levels = Bf16Levels::for_groups(groups);
        Some(Self {
            groups,
            dim,
            turned: ScratchVec::default(),
            zeros: ScratchVec::default(),
            factors: vec![0; ROWS * SPAN],
            levels,
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
        let Self { groups, levels, dim, turned, zeros, factors, bases } = self;
        let (tokens, channels) = (cursor.count * TILE, channels_per_pair(*groups, *dim));
        transpose_scales(*groups, *dim, cursor, turned);
        let pairs = *dim / channels;
        let FoldScales { steps, minima } = steps_and_minima(turned, tokens * pairs, zeros);
        let blocks = sums.chunks_mut(ROWS * *dim).zip(bases.row_blocks());
        for (index, (sums, bases)) in blocks.enumerate() {
            let rows = sums.len() / *dim;
            let weights = weights.rows_from(index * ROWS, cursor.in_span);
            let of = WeightedTokens { weights, rows, tokens, steps, minima, channels };
            let prefetch = if index == 0 { codes.prefetch } else { PrefetchBytes::default() };
            let codes = TileCodes { prefetch, ..codes };
            #[cfg(target_arch = "x86_64")]
            avx512_bf16::add_tiles(codes, levels, of, factors, bases, sums);
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (codes, &levels, of, &factors, (bases, sums));
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
mod tests {
    use super::*;
    use crate::cpu::simd::Simd;
    use kvd_core::DType;

    /// A whole number of up to `top`.
    fn whole(i: usize, top: usize) -> f32 {
        (i * 7919 % (top + 1)) as f32
    }

    /// A whole number of up to `top`, with a sign.
    fn signed(i: usize, top: usize) -> f32 {
        if i * 13 % 7 < 3 { -whole(i, top) } else { whole(i, top) }
    }

    fn narrow(dtype: DType, value: f32) -> [u8; 2] {
        let mut bytes = [0; 2];
        dtype.narrow_values(&[value], &mut bytes);
        bytes
    }

    fn widen(dtype: DType, bytes: &[u8]) -> f32 {
        let mut value = [0.0];
        dtype.widen_values(bytes, &mut value);
        value[0]
    }

    /// So many values as f16.
    fn halves(count: usize, value: impl Fn(usize) -> f32) -> Vec<u8> {
        (0..count).flat_map(|i| narrow(DType::F16, value(i))).collect()
    }

    /// Sixteenths: times a whole number they have more digits than bf16, and sums of such products
    /// fewer than f32.
    fn steps(count: usize) -> Vec<u8> {
        halves(count, |i| (1.0 + whole(i, 14)) / 16.0)
    }

    fn minima(count: usize) -> Vec<u8> {
        halves(count, |i| signed(3 * i + 1, 8) / 4.0)
    }

    fn half(bytes: &[u8], at: usize) -> f32 {
        widen(DType::F16, &bytes[2 * at..2 * at + 2])
    }

    /// Levels of as many bits; `None` where the machine has no products of bf16.
    fn levels(bits: u32, mode: UniformMode) -> Option<Bf16Levels> {
        let top = if mode == UniformMode::Sym { (1 << (bits - 1)) - 1 } else { (1 << bits) - 1 };
        let groups = UniformGroups { axis: GroupAxis::Token, group: Some(32), bits, mode, top };
        Simd::detect_widest().has_bf16().then(|| Bf16Levels::for_groups(groups))
    }

    /// A tile's codes `[quads, lanes, 4]` in planes of so many bits.
    fn tile(
        width: usize,
        quads: usize,
        lanes: usize,
        code: impl Fn(usize, usize) -> u8,
    ) -> Vec<u8> {
        let plane = quads * width / 8;
        let byte = |i: usize| {
            let (quad, lane, place) = (i / (4 * lanes), i / 4 % lanes, i % 4);
            (0..8 / width)
                .fold(0, |byte, p| byte | code(4 * (p * plane + quad) + place, lane) << (p * width))
        };
        (0..plane * lanes * 4).map(byte).collect()
    }

    /// Whether a factor of bf16 is not the product itself.
    fn is_rounded(value: f32, step: f32) -> bool {
        widen(DType::BF16, &narrow(DType::BF16, value * step)) != value * step
    }

    /// The product of a factor that is rounded to bf16, and a code's level.
    fn product(value: f32, step: f32, level: u16) -> f64 {
        let factor = widen(DType::BF16, &narrow(DType::BF16, value * step));
        f64::from(factor) * f64::from(f32::from_bits(u32::from(level) << 16))
    }

    fn shapes() -> impl Iterator<Item = (u32, usize, UniformMode)> {
        let widths = [(1, 1), (2, 2), (3, 8), (4, 4), (5, 8)];
        let modes = [UniformMode::Asym, UniformMode::Sym];
        let all = modes.into_iter().flat_map(move |mode| widths.map(|(bits, w)| (bits, w, mode)));
        all.filter(|(bits, _, mode)| *bits > 1 || *mode == UniformMode::Asym)
    }

    #[test]
    fn scores_are_exact_sums_of_rounded_factors() {
        for ((bits, width, mode), rows) in shapes().flat_map(|s| [1, 2, 3, 4].map(|r| (s, r))) {
            let Some(levels) = levels(bits, mode) else { return };
            let dim = 64;
            let code =
                |channel: usize, token: usize| ((channel * 5 + token * 3) % (1 << bits)) as u8;
            let bytes = tile(width, dim / 4, TILE, code);
            let queries: Vec<f32> = (0..rows * dim).map(|i| signed(i, 100)).collect();
            let (steps, minima) = (steps(dim), minima(dim));
            assert!((0..dim).any(|channel| is_rounded(queries[channel], half(&steps, channel))));
            let (mut factors, mut bases) = (vec![0; rows * dim], vec![0.0; rows]);
            let scales = FoldScales { steps: &steps, minima: &minima };
            avx512_bf16::fold_queries(&queries, &mut bases, scales, &levels, &mut factors);
            let codes = TileCodes {
                bytes: &bytes,
                width: width as u32,
                per_row: dim,
                prefetch: PrefetchBytes::default(),
            };
            let mut out = vec![0f32; rows * SPAN];
            avx512_bf16::score_tile(codes, &levels, &factors, &bases, &mut out);
            for (row, token) in (0..rows).flat_map(|row| (0..TILE).map(move |t| (row, t))) {
                let score: f64 = (0..dim)
                    .map(|channel| {
                        let (q, step) = (queries[row * dim + channel], half(&steps, channel));
                        let centre = levels.middle.mul_add(step, half(&minima, channel));
                        let level = levels.table[usize::from(code(channel, token))];
                        product(q, step, level) + f64::from(q) * f64::from(centre)
                    })
                    .sum();
                let got = f64::from(out[row * SPAN + token]);
                assert_eq!(got, score, "{bits} {mode:?} {rows}");
            }
        }
    }

    #[test]
    fn sums_are_exact_ones_of_rounded_weights_times_steps() {
        for ((bits, width, mode), rows) in shapes().flat_map(|s| [1, 3, 4].map(|r| (s, r))) {
            let Some(levels) = levels(bits, mode) else { return };
            let (channels, groups, tokens) = (32, 2, 2 * TILE);
            let dim = channels * groups;
            let code =
                |token: usize, channel: usize| ((channel * 7 + token * 3) % (1 << bits)) as u8;
            let bytes = [0, TILE].map(|first| {
                tile(width, TILE / 4, dim, |token, channel| code(first + token, channel))
            });
            let codes = TileCodes {
                bytes: &bytes.concat(),
                width: width as u32,
                per_row: dim,
                prefetch: PrefetchBytes::default(),
            };
            let weights: Vec<f32> = (0..rows * SPAN).map(|i| whole(i, 200)).collect();
            let (steps, minima) = (steps(groups * tokens), minima(groups * tokens));
            assert!((0..tokens).any(|token| is_rounded(weights[token], half(&steps, token))));
            let of = WeightedTokens {
                weights: &weights,
                rows,
                tokens,
                steps: &steps,
                minima: &minima,
                channels,
            };
            let mut factors = vec![0; ROWS * SPAN];
            let mut bases = vec![[0f32; LANES]; ROWS * groups];
            let mut sums = vec![1f32; rows * dim];
            avx512_bf16::add_tiles(codes, &levels, of, &mut factors, &mut bases, &mut sums);
            for (row, channel) in (0..rows).flat_map(|row| (0..dim).map(move |c| (row, c))) {
                let group = channel / channels;
                let sum: f64 = (0..tokens)
                    .map(|token| {
                        let (weight, at) = (weights[row * SPAN + token], group * tokens + token);
                        let centre = levels.middle.mul_add(half(&steps, at), half(&minima, at));
                        let level = levels.table[usize::from(code(token, channel))];
                        product(weight, half(&steps, at), level)
                            + f64::from(weight) * f64::from(centre)
                    })
                    .sum();
                let base: f64 = bases[group * ROWS + row].map(f64::from).iter().sum();
                let got = f64::from(sums[row * dim + channel]) - 1.0 + base;
                assert_eq!(got, sum, "{bits} {mode:?} {rows}");
            }
        }
    }
}
