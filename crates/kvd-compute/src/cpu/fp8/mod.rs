//! FP8 pages, straight from their codes: an e4m3 byte becomes an f32 in a register and is
//! multiplied there. As exact as rows decoded to f32.
//!
//! Shifted into place, the bits of an e4m3 are those of an f32 of `2^-120` times the value,
//! subnormal ones too. [`GAIN`] in the query or the weight, and again in the result, brings
//! products back without leaving the range of f32.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod simd_kernels;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::cpu::fp8::simd_kernels::{ByteCodes, ProductScale};
use crate::cpu::simd::Simd;
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use kvd_codec::{FixedCodes, HeadCodec};

/// Half of what the bits lack.
const GAIN: f32 = (1u64 << 60) as f32;
/// Rows of queries or weights that one call handles.
pub(super) const ROWS: usize = 4;

/// Whether there is a kernel for the side, where there are vector registers.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    side.is_e4m3() && side.dim().is_multiple_of(4)
}

/// The page's scale.
fn page_scale(page: &FixedCodes<'_>) -> f32 {
    page.scales.first_chunk::<4>().map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}

/// Queries of a unit.
pub(crate) struct Fp8Keys {
    dim: usize,
    queries: Vec<f32>,
}

impl Fp8Keys {
    /// Takes folded queries `[rows, dim]`; `None` when one is beyond f32.
    pub(crate) fn new(side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let queries: Vec<f32> = queries.iter().map(|q| q * GAIN).collect();
        queries.iter().all(|q| q.is_finite()).then(|| Self { dim: side.dim(), queries })
    }

    /// Scores all rows against one tile.
    pub(crate) fn score_tiles(&self, simd: Simd, cursor: &TileCursor<'_>, scores: &mut SpanScores) {
        let TileCursor { page, in_page, in_span, prefetch, .. } = *cursor;
        let codes = &page.codes[page.layout.tile_bytes(in_page)];
        assert_eq!(codes.len(), TILE * self.dim, "fp8: a full tile");
        for (index, queries) in self.queries.chunks(ROWS * self.dim).enumerate() {
            let out = scores.rows_mut(index * ROWS, in_span);
            let rows = queries.len() / self.dim;
            assert!(out.len() >= (rows - 1) * SPAN + TILE, "fp8: scores");
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            {
                let codes = ByteCodes { bytes: codes, prefetch };
                let scale = ProductScale { gain: GAIN, scale: page_scale(page) };
                simd_kernels::score_tile(simd, codes, self.dim, queries, scale, out);
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            unreachable!("{simd:?} has no kernel, {codes:?}, {prefetch:?}, {queries:?}, {out:?}");
        }
    }
}

/// Weighted sums of a unit over one head's values.
pub(crate) struct Fp8Values {
    dim: usize,
    weights: Vec<f32>,
}

impl Fp8Values {
    pub(crate) fn new(side: &HeadCodec) -> Self {
        Self { dim: side.dim(), weights: Vec::new() }
    }

    /// Adds the weighted codes of tiles to `sums` (`[rows, dim]`).
    pub(crate) fn add_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        weights: &SpanScores,
        sums: &mut [f32],
    ) {
        let TileCursor { page, in_page, count, prefetch, .. } = *cursor;
        let tiles = cursor.span_tiles();
        let last = page.layout.tile_bytes(in_page + count - 1);
        let codes = &page.codes[page.layout.tile_bytes(in_page).start..last.end];
        assert_eq!(codes.len(), count * TILE * self.dim, "fp8: full tiles");
        for (index, sums) in sums.chunks_mut(ROWS * self.dim).enumerate() {
            self.weights.clear();
            for row in 0..sums.len() / self.dim {
                let (weights, _) = weights.tile_weights(index * ROWS + row, tiles.clone());
                self.weights.extend(weights.iter().map(|weight| weight * GAIN));
            }
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            {
                let codes = ByteCodes { bytes: codes, prefetch };
                let scale = ProductScale { gain: GAIN, scale: page_scale(page) };
                simd_kernels::add_tiles(simd, codes, &self.weights, scale, self.dim, sums);
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            unreachable!("{simd:?} has no kernel, {codes:?}, {prefetch:?}, {sums:?}");
        }
    }
}
