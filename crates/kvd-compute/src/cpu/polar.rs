//! Polar keys, straight from their codes: radius times cosine and sine are two bytes each, looked
//! up like four channels of a codebook; a pair's step goes into its two channels of the query.

use crate::cpu::int_dot::{CodeLookup, TileCodes};
use crate::cpu::int_operands::{self, IntOperands};
use crate::cpu::levels::LevelBytes;
use crate::cpu::simd::{KernelConfig, Simd};
use crate::cpu::span_scores::{SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use crate::cpu::vq::{self, VqLookup};
use kvd_codec::{HeadCodec, StoredLayout};
use kvd_core::{DType, RopePairing};

/// Bytes of a pair: high and low ones of its first channel, then of its second.
const BYTES: usize = 4;

/// Queries of a unit, multiplied again with every row of steps.
pub(crate) struct PolarKeys {
    /// Gives up its book when steps change.
    products: vq::VqKeys,
    factors: [f32; BYTES],
    pairing: RopePairing,
    /// Tokens that share steps, where pages hold them.
    group: Option<usize>,
    steps: Vec<f32>,
    /// Address and row of the steps that queries are multiplied with.
    folded: Option<(usize, usize)>,
    queries: Vec<f32>,
    dim: usize,
}

/// Whether there is a kernel for the side.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    let StoredLayout::Polar { angle_bits, radius_bits, group, .. } = side.stored_layout() else {
        return false;
    };
    let dim = side.dim();
    side.stream_runs().is_none()
        && angle_bits + radius_bits <= 8
        && (dim / 2).is_multiple_of(4)
        && int_operands::sums_fit(BYTES * dim / 2, CodeLookup::biased_bytes().largest_value())
        && group.is_none_or(|group| group.is_multiple_of(TILE))
}

impl PolarKeys {
    /// Takes folded queries `[rows, dim]`; `None` when one is not finite.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let StoredLayout::Polar { angle_bits, radius_bits, group, steps, directions, pairing } =
            side.stored_layout()
        else {
            return None;
        };
        let (dim, bits) = (side.dim(), angle_bits + radius_bits);
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let level = |code: usize, axis: usize| {
            (code >> angle_bits) as f32 * directions[code & (directions.len() - 1)][axis]
        };
        let axis = |axis| -> Vec<f32> { (0..1 << bits).map(|code| level(code, axis)).collect() };
        let mut levels = LevelBytes::on_two_bytes(&axis(0));
        levels.tables.extend(LevelBytes::on_two_bytes(&axis(1)).tables);
        let rows = queries.len() / dim;
        let mut keys = Self {
            factors: std::array::from_fn(|byte| levels.tables[byte].1),
            products: vq::VqKeys::without_queries(
                IntOperands::of_scaled_queries(config),
                VqLookup::of_lookup(config.simd, levels.to_lookup(), dim / 2, rows),
            ),
            pairing,
            group,
            steps: steps.to_vec(),
            folded: None,
            queries: queries.to_vec(),
            dim,
        };
        if group.is_none() {
            keys.fold_queries(config.simd);
        }
        Some(keys)
    }

    /// Whether all tiles of a page share their steps.
    pub(crate) fn is_by_page(&self) -> bool {
        self.group.is_none()
    }

    /// How far rounding may take a score of that row, so far: see
    /// [`rounding_loss`](crate::cpu::loss::rounding_loss).
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        self.products.score_loss(row)
    }

    /// Scores all rows against a few tiles, which share their steps.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        codes: TileCodes<'_>,
        scores: &mut SpanScores,
    ) {
        if let Some(group) = self.group {
            let scales = cursor.page.scales;
            let row = cursor.in_page * TILE / group;
            let key = Some((scales.as_ptr().addr(), row));
            if self.folded != key {
                self.folded = key;
                self.steps.resize(self.dim / 2, 0.0);
                DType::F16.widen_values(&scales[row * self.dim..][..self.dim], &mut self.steps);
                self.fold_queries(simd);
            }
        }
        self.products.score_tiles(simd, codes, cursor.in_span, scores);
    }

    /// Multiplies the queries with the steps. What overflows has no unit; its score is then of no
    /// use anyway.
    fn fold_queries(&mut self, simd: Simd) {
        let Self { products, factors, pairing, steps, queries, dim, .. } = self;
        let pairs = *dim / 2;
        products.set_queries(simd, queries.chunks_exact(*dim), |query, planar| {
            for (byte, plane) in planar.chunks_exact_mut(pairs).enumerate() {
                for (pair, (to, step)) in plane.iter_mut().zip(&*steps).enumerate() {
                    let channel = match pairing {
                        RopePairing::Half => pair + byte / 2 * pairs,
                        RopePairing::Interleaved => 2 * pair + byte / 2,
                    };
                    *to = query[channel] * step * factors[byte];
                }
            }
        });
    }
}
