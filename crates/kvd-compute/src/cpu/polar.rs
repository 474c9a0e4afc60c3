//! Polar keys, straight from their codes: radius times cosine and sine are two bytes each, looked
//! up like four channels of a codebook; a pair's step goes into its two channels of the query.

use crate::cpu::dots::{Lookup, TileCodes};
use crate::cpu::levels::LevelBytes;
use crate::cpu::parts::{self, Parts};
use crate::cpu::scores::{Scores, TILE};
use crate::cpu::simd::{How, Simd};
use crate::cpu::vq::{self, Book};
use kvd_codec::{FixedCodes, HeadCodec, StoredLayout};
use kvd_core::{DType, RopePairing};

/// Bytes of a pair: high and low ones of its first channel, then of its second.
const BYTES: usize = 4;

/// Queries of a unit, multiplied again with every row of steps.
pub(crate) struct Keys {
    /// Gives up its book when steps change.
    products: vq::Keys,
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

impl Keys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(how: How, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let StoredLayout::Polar { angle_bits, radius_bits, group, steps, directions, pairing } =
            side.stored_layout()
        else {
            return None;
        };
        let (dim, bits) = (side.dim(), angle_bits + radius_bits);
        let fits = side.stream_runs().is_none()
            && bits <= 8
            && (dim / 2).is_multiple_of(4)
            && parts::fits(BYTES * dim / 2, Lookup::bytes().largest());
        let by_tile = group.is_none_or(|group| group.is_multiple_of(TILE));
        if !fits || !by_tile || !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let level = |code: usize, axis: usize| {
            (code >> angle_bits) as f32 * directions[code & (directions.len() - 1)][axis]
        };
        let axis = |axis| -> Vec<f32> { (0..1 << bits).map(|code| level(code, axis)).collect() };
        let mut levels = LevelBytes::pair(&axis(0));
        levels.tables.extend(LevelBytes::pair(&axis(1)).tables);
        let rows = queries.len() / dim;
        let mut keys = Self {
            factors: std::array::from_fn(|byte| levels.tables[byte].1),
            products: vq::Keys::empty(
                Parts::of_scaled_queries(how),
                Book::of(how.0, levels.lookup(), dim / 2, rows),
            ),
            pairing,
            group,
            steps: steps.to_vec(),
            folded: None,
            queries: queries.to_vec(),
            dim,
        };
        if group.is_none() {
            keys.fold(how.0);
        }
        Some(keys)
    }

    /// Whether all tiles of a page share their steps.
    pub(crate) fn is_by_page(&self) -> bool {
        self.group.is_none()
    }

    /// How far rounding may take a score of that row, so far: see
    /// [`rounding_loss`](crate::cpu::loss::rounding_loss).
    pub(crate) fn loss(&self, row: usize) -> f32 {
        self.products.loss(row)
    }

    /// Scores all rows against tiles from `in_page` of a page on, which share their steps.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        codes: TileCodes<'_>,
        tile: usize,
        scores: &mut Scores,
    ) {
        if let Some(group) = self.group {
            let row = in_page * TILE / group;
            let key = Some((page.scales.as_ptr().addr(), row));
            if self.folded != key {
                self.folded = key;
                self.steps.resize(self.dim / 2, 0.0);
                DType::F16
                    .widen_values(&page.scales[row * self.dim..][..self.dim], &mut self.steps);
                self.fold(simd);
            }
        }
        self.products.tiles(simd, codes, tile, scores);
    }

    /// Multiplies the queries with the steps. What overflows has no unit; its score is then of no
    /// use anyway.
    fn fold(&mut self, simd: Simd) {
        let Self { products, factors, pairing, steps, queries, dim, .. } = self;
        let pairs = *dim / 2;
        products.set(simd, queries.chunks_exact(*dim), |query, planar| {
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
