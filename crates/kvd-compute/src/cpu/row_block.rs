//! Rows of f32 that kernels read and write.

/// Rows of `dim` values each, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) dim: usize,
}

/// Rows to be written, each `stride` values after the one before.
pub(crate) struct StridedRows<'a> {
    pub(crate) values: &'a mut [f32],
    pub(crate) stride: usize,
}
