//! Rows of one head, with their length: the arguments that loops over rows share.

use kvd_core::{LayerIndex, Side};

/// Rows `[n, dim]`, row-major.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock<'a> {
    pub(crate) rows: &'a [f32],
    /// Channels of a row.
    pub(crate) dim: usize,
}

/// Rows `[n, dim]`, row-major, that are transformed in place.
pub(crate) struct RowBlockMut<'a> {
    pub(crate) rows: &'a mut [f32],
    /// Channels of a row.
    pub(crate) dim: usize,
}

/// One side of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerSide {
    /// The layer.
    pub layer: LayerIndex,
    /// Keys or values.
    pub side: Side,
}
