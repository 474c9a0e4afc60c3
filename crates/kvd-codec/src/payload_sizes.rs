//! Sizes of a payload's parts that follow from the quantizer, before any row is written: for
//! encoders outside this crate.

use crate::HeadCodec;
use crate::quantizer::HeadQuantizer;
use crate::quantizer::float::FloatRows;
use kvd_core::{DType, Side};
use std::sync::Arc;

/// Bytes of the scales and codes of a head's pages.
#[derive(Clone, Debug)]
pub struct PayloadSizes {
    quantizer: Arc<dyn HeadQuantizer>,
    dim: usize,
}

impl PayloadSizes {
    /// Those of pages that hold rows in a dtype.
    #[must_use]
    pub fn of_rows(dtype: DType, dim: usize) -> Self {
        Self { quantizer: Arc::new(FloatRows(dtype)), dim }
    }

    /// Bytes of the scales of `tokens` rows; outliers, gains and lengths of streams are none.
    #[must_use]
    pub fn scale_bytes(&self, tokens: usize) -> usize {
        self.quantizer.scale_bytes(tokens, self.dim)
    }

    /// Bytes of the codes of `tokens` rows at a fixed width, or of the rows; 0 where codes have
    /// none.
    #[must_use]
    pub fn code_bytes(&self, side: Side, tokens: usize) -> usize {
        self.quantizer.code_bytes(side, tokens, self.dim)
    }
}

impl HeadCodec {
    /// Sizes of the parts of the head's payloads.
    #[must_use]
    pub fn payload_sizes(&self) -> PayloadSizes {
        PayloadSizes { quantizer: Arc::clone(&self.quantizer), dim: self.dim() }
    }
}
