//! The parts of a codec that an encoder outside this crate needs to write the same pages, byte for
//! byte: the steps of a side's transform, the constants of its quantizer, and the headers of its
//! pages.

use crate::page::{PageHeader, id};
use crate::quantizer::float::largest_finite;
use crate::row_block::LayerSide;
use crate::transform::{TransformStep, hadamard_norm};
use crate::{HeadCodec, ModelCodec, UniformLevels};

/// One step from a row to its coefficients, in place. Every number is rounded by itself: no product
/// is fused with a sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForwardStep<'a> {
    /// Times a factor per channel.
    Scale(&'a [f32]),
    /// Minus a mean per channel.
    Offset(&'a [f32]),
    /// Walsh-Hadamard of consecutive blocks, smallest distance first, then times `norm`.
    Hadamard {
        /// Channels of a block, a power of two.
        block: usize,
        /// Factor that makes it orthonormal.
        norm: f32,
    },
    /// Channel `i` becomes `signs[i]` times channel `order[i]`.
    Permute {
        /// Where each channel comes from.
        order: &'a [u16],
        /// One or minus one.
        signs: &'a [f32],
    },
    /// A matrix, transposed, `[dim, dim]`: output `j` is the sum over inputs `i`, in their order,
    /// of input times entry `[i, j]`.
    Matrix(&'a [f32]),
}

/// One step of a query into coefficient space, or of a weighted sum of coefficients out of it, in
/// place.
#[derive(Clone, Debug, PartialEq)]
pub enum QueryTransformStep<'a> {
    /// Times a factor per channel.
    Scale(&'a [f32]),
    /// A mean per channel: what a query meets is added to its scores; a sum gets it back as often
    /// as its weights add up to.
    Mean(&'a [f32]),
    /// Walsh-Hadamard of consecutive blocks, then times `norm`.
    Hadamard {
        /// Channels of a block, a power of two.
        block: usize,
        /// Factor that makes it orthonormal.
        norm: f32,
    },
    /// Channel `i` becomes `signs[i]` times channel `order[i]`.
    Permute {
        /// Where each channel comes from.
        order: Vec<u16>,
        /// One or minus one.
        signs: Vec<f32>,
    },
    /// A matrix, transposed, `[dim, dim]`: output `j` is the sum over inputs `i` of input times
    /// entry `[i, j]`.
    Matrix(&'a [f32]),
}

impl ForwardStep<'_> {
    pub(crate) fn hadamard_step(block: usize) -> Self {
        Self::Hadamard { block, norm: hadamard_norm(block) }
    }
}

impl QueryTransformStep<'_> {
    pub(crate) fn hadamard_step(block: usize) -> Self {
        Self::Hadamard { block, norm: hadamard_norm(block) }
    }
}

impl HeadCodec {
    /// The steps of its transform; none where coefficients are the rows.
    #[must_use]
    pub fn forward_steps(&self) -> Vec<ForwardStep<'_>> {
        self.steps.iter().flat_map(TransformStep::channel_loops).collect()
    }

    /// The steps of [`HeadCodec::fold_query`]; none where coefficients are the rows.
    #[must_use]
    pub fn fold_steps(&self) -> Vec<QueryTransformStep<'_>> {
        self.steps.iter().flat_map(TransformStep::fold_loops).collect()
    }

    /// The steps of [`HeadCodec::unfold_value`]; none where coefficients are the rows.
    #[must_use]
    pub fn unfold_steps(&self) -> Vec<QueryTransformStep<'_>> {
        self.steps.iter().rev().flat_map(TransformStep::unfold_loops).collect()
    }

    /// Median length of its rows, where shorter ones are raised after the transform.
    #[must_use]
    pub fn gain_median(&self) -> Option<f32> {
        self.gain
    }

    /// Polar codes: cosine and sine of the directions halfway between two codes of the first
    /// octant, then the reach of each pair, where its step is the calibration's.
    #[must_use]
    pub fn polar_bounds(&self) -> Option<(&[[f32; 2]], &[f32])> {
        self.quantizer.polar_bounds()
    }

    /// How its groups get uniform levels, where they do.
    #[must_use]
    pub fn uniform_levels(&self) -> Option<UniformLevels> {
        self.quantizer.uniform_levels()
    }
}

impl ModelCodec {
    /// The header of a page whose codes have a fixed width or are a grid's: without gains, length
    /// and checksum.
    ///
    /// # Panics
    /// When layer or head lie outside the geometry.
    #[must_use]
    pub fn page_header(&self, place: LayerSide, head: usize, tokens: usize) -> PageHeader {
        let LayerSide { layer, side } = place;
        let of_head = self.head_codec(layer, side, head);
        PageHeader {
            side,
            quantizer: of_head.quantizer_id(),
            huffman: false,
            fallback: false,
            gains: false,
            tokens: tokens as u16,
            dim: of_head.dim() as u16,
            layer: layer.0 as u16,
            head: head as u16,
            table_version: 0,
            codec_tag: of_head.tag,
            payload_len: 0,
            checksum: 0,
        }
    }

    /// The header of a page that holds rows as they came, because the quantizer has no codes for
    /// it, and the largest magnitude that such a page can hold.
    ///
    /// # Panics
    /// As [`ModelCodec::page_header`].
    #[must_use]
    pub fn fallback_header(
        &self,
        place: LayerSide,
        head: usize,
        tokens: usize,
    ) -> (PageHeader, f32) {
        let dtype = self.geometry().dtype;
        let (quantizer, fallback) = (id::float_id(dtype), true);
        let header = self.page_header(place, head, tokens);
        (PageHeader { quantizer, fallback, ..header }, largest_finite(dtype))
    }
}
