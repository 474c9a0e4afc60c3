//! The door of `kvd-fit` to the codec: the tensors that a fit fills in, and the maps, rounding and
//! tables that pages are made with, so that a fit sees what pages will hold. Nothing that serves
//! uses it.

pub use crate::calibration::{BitAllocTensors, GridTensors, SideCalibration, SideCodebooks};
pub use crate::gain::{median_length, raise_short_rows};
pub use crate::huffman::streams::{QUAD, STREAMS, SymbolGrouping, cheapest_symbols, outlier_bits};
pub use crate::levels::snap_to_levels;
pub use crate::quantizer::Unquantizable;
pub use crate::quantizer::bit_levels::{BitLevels, LEVELS, WIDTH_MAX, levels_at};
pub use crate::quantizer::grid::{CLASSES, CodeClass, class_of, round_row};
pub use crate::quantizer::nearest::SubVectors;
pub use crate::quantizer::polar::PairLayout;
pub use crate::random::SplitMix64;
pub use crate::simd::dispatch_simd;

use crate::rotation::RandomRotation;
use crate::transform::TransformStep;

/// One step of a side's transform, as it is bound to a head.
#[derive(Clone, Debug)]
pub struct FittedStep(TransformStep);

impl FittedStep {
    /// A Hadamard rotation of `dim` channels: blocks of the largest power of two that divides it.
    #[must_use]
    pub fn hadamard_blocks(dim: usize) -> Self {
        Self(TransformStep::hadamard_blocks(dim))
    }

    /// The random rotation of `seed` for `dim` channels, an even number.
    #[must_use]
    pub fn random_rotation(dim: usize, seed: u64) -> Self {
        Self(TransformStep::Rotation(RandomRotation::new(dim, seed)))
    }

    /// Divides channels by their factors.
    #[must_use]
    pub fn scale_channels(factors: Vec<f32>) -> Self {
        Self(TransformStep::scale_channels(factors))
    }

    /// Takes a mean away.
    #[must_use]
    pub fn offset_by(mean: Vec<f32>) -> Self {
        Self(TransformStep::Offset { mean })
    }

    /// The map `forward`, row-major `[dim, dim]`; `None` when it cannot be inverted.
    #[must_use]
    pub fn from_matrix(dim: usize, forward: Vec<f32>) -> Option<Self> {
        TransformStep::from_matrix(dim, forward).map(Self)
    }

    /// Maps rows (`[n, dim]`) to coefficients, in place.
    pub fn transform_rows(&self, rows: &mut [f32], dim: usize) {
        self.0.transform_rows(rows, dim);
    }

    /// Maps a query so that its products with coefficients are those with rows; returns what the
    /// step adds to every product.
    pub fn fold_query(&self, query: &mut [f32]) -> f32 {
        self.0.fold_query(query)
    }
}
