//! Rows of one head, with their length.

/// Rows `[n, dim]`, row-major.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock<'a> {
    pub(crate) rows: &'a [f32],
    /// Channels of a row.
    pub(crate) dim: usize,
}

impl<'a> RowBlock<'a> {
    pub(crate) fn count_tokens(self) -> usize {
        self.rows.len() / self.dim
    }

    pub(crate) fn row_of(self, index: usize) -> &'a [f32] {
        &self.rows[index * self.dim..][..self.dim]
    }

    pub(crate) fn hash_row(self, index: usize) -> u64 {
        self.row_of(index).iter().fold(0, |hash: u64, x| {
            (hash.rotate_left(23) ^ u64::from(x.to_bits())).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        })
    }

    pub(crate) fn has_equal(self, a: usize, b: usize) -> bool {
        self.row_of(a).iter().zip(self.row_of(b)).all(|(a, b)| a.to_bits() == b.to_bits())
    }
}
