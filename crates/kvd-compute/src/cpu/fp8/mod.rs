//! FP8 pages, straight from their codes: an e4m3 byte becomes an f32 in a register and is
//! multiplied there. As exact as rows decoded to f32.
//!
//! Shifted into place, the bits of an e4m3 are those of an f32 of `2^-120` times the value,
//! subnormal ones too. [`GAIN`] in the query or the weight, and again in the result, brings
//! products back without leaving the range of f32.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod lanes;

use crate::cpu::ahead::Ahead;
use crate::cpu::scores::{SPAN, Scores, TILE};
use crate::cpu::simd::{InstructionSet, Simd};
use kvd_codec::{FixedCodes, HeadCodec};
use std::ops::Range;

/// Half of what the bits lack.
const GAIN: f32 = (1u64 << 60) as f32;
/// Rows of queries or weights that one call handles.
pub(super) const ROWS: usize = 4;

/// Whether there is a kernel for the side.
fn fits(simd: Simd, side: &HeadCodec) -> bool {
    side.is_e4m3() && side.dim().is_multiple_of(4) && simd.set() != InstructionSet::Portable
}

/// The page's scale.
fn scale(page: &FixedCodes<'_>) -> f32 {
    page.scales.first_chunk::<4>().map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}

/// Queries of a unit.
pub(crate) struct Keys {
    dim: usize,
    queries: Vec<f32>,
}

impl Keys {
    /// Takes folded queries `[rows, dim]`; `None` where rows must be decoded.
    pub(crate) fn new(simd: Simd, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let queries: Vec<f32> = queries.iter().map(|q| q * GAIN).collect();
        let fits = fits(simd, side) && queries.iter().all(|q| q.is_finite());
        fits.then(|| Self { dim: side.dim(), queries })
    }

    /// Scores all rows against tile `in_page` of a page.
    pub(crate) fn tile(
        &self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        (tile, ahead): (usize, Ahead<'_>),
        scores: &mut Scores,
    ) {
        let codes = &page.codes[page.layout.tile_bytes(in_page)];
        assert_eq!(codes.len(), TILE * self.dim, "fp8: a full tile");
        for (index, queries) in self.queries.chunks(ROWS * self.dim).enumerate() {
            let out = scores.rows_mut(index * ROWS, tile);
            let rows = queries.len() / self.dim;
            assert!(out.len() >= (rows - 1) * SPAN + TILE, "fp8: scores");
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            lanes::keys(simd, (codes, ahead), (self.dim, queries), (GAIN, scale(page)), out);
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            unreachable!("{simd:?} has no kernel, {codes:?}, {queries:?}, {out:?}");
        }
    }
}

/// Weighted sums of a unit over one head's values.
pub(crate) struct Values {
    dim: usize,
    weights: Vec<f32>,
}

impl Values {
    /// `None` where rows must be decoded.
    pub(crate) fn new(simd: Simd, side: &HeadCodec) -> Option<Self> {
        fits(simd, side).then(|| Self { dim: side.dim(), weights: Vec::new() })
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, dim]`); the first is tile `in_page` of
    /// its page.
    pub(crate) fn tiles(
        &mut self,
        simd: Simd,
        (page, in_page): (&FixedCodes<'_>, usize),
        (tiles, ahead): (Range<usize>, Ahead<'_>),
        weights: &Scores,
        sums: &mut [f32],
    ) {
        let last = page.layout.tile_bytes(in_page + tiles.len() - 1);
        let codes = &page.codes[page.layout.tile_bytes(in_page).start..last.end];
        assert_eq!(codes.len(), tiles.len() * TILE * self.dim, "fp8: full tiles");
        for (index, sums) in sums.chunks_mut(ROWS * self.dim).enumerate() {
            self.weights.clear();
            for row in 0..sums.len() / self.dim {
                let (weights, _) = weights.tiles(index * ROWS + row, tiles.clone());
                self.weights.extend(weights.iter().map(|weight| weight * GAIN));
            }
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            lanes::values(
                simd,
                (codes, ahead),
                &self.weights,
                (GAIN, scale(page)),
                (self.dim, sums),
            );
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            unreachable!("{simd:?} has no kernel, {codes:?}, {sums:?}");
        }
    }
}
