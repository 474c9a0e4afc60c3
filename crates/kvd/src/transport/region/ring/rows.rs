//! Rows of heads and tokens in a region's memory, by strides.

use crate::service::ServiceError;
use kvd_core::{Coded, ErrorCode};
use kvd_shm::RegionMemory;
use kvd_shm::ring::RingRows;
use std::ops::Range;

/// Sizes of rows.
#[derive(Clone, Copy)]
pub(super) struct RowShape {
    pub(super) tokens: u64,
    pub(super) heads: u64,
    pub(super) row_bytes: u64,
}

/// Rows whose places were tested.
#[derive(Clone, Copy)]
pub(super) struct PlacedRows {
    offset: u64,
    bytes: u64,
    token_stride: u64,
    head_stride: u64,
    shape: RowShape,
}

impl RowShape {
    /// Bytes of all.
    pub(super) fn size_bytes(&self) -> u64 {
        self.tokens * self.heads * self.row_bytes
    }
}

impl PlacedRows {
    /// Tests that all rows are in the memory.
    pub(super) fn new(
        memory: &RegionMemory,
        field: &'static str,
        rows: RingRows,
        shape: RowShape,
    ) -> Result<Self, ServiceError> {
        let RingRows { offset, token_stride, head_stride } = rows;
        let or_dense = |stride, dense| if stride == 0 { dense } else { stride };
        let head_stride = or_dense(head_stride, shape.row_bytes);
        let dense = head_stride.saturating_mul(shape.heads);
        let token_stride = or_dense(token_stride, dense);
        // From the first byte to the end of the last row.
        let ahead = |count: u64, stride: u64| count.saturating_sub(1).checked_mul(stride);
        let bytes = ahead(shape.tokens, token_stride)
            .zip(ahead(shape.heads, head_stride))
            .and_then(|(tokens, heads)| tokens.checked_add(heads)?.checked_add(shape.row_bytes));
        let in_field = |code, reason: &str| ServiceError::new(code, format!("{field}: {reason}"));
        let Some(bytes) = bytes else {
            return Err(in_field(ErrorCode::InvalidArgument, "its strides pass 2^64 bytes"));
        };
        let checked = memory.check_range(offset, bytes);
        checked.map_err(|error| in_field(error.code(), &error.to_string()))?;
        Ok(Self { offset, bytes, token_stride, head_stride, shape })
    }

    /// Bytes from the first row to the end of the last.
    pub(super) fn byte_range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    /// Whether the rows lie one behind another.
    fn is_dense(&self) -> bool {
        let Self { shape, head_stride, token_stride, .. } = self;
        (shape.heads == 1 || *head_stride == shape.row_bytes)
            && (shape.tokens == 1 || *token_stride == shape.row_bytes * shape.heads)
    }

    fn row_offsets(self) -> impl Iterator<Item = u64> {
        let Self { offset, token_stride, head_stride, shape, .. } = self;
        (0..shape.tokens).flat_map(move |token| {
            (0..shape.heads).map(move |head| offset + token * token_stride + head * head_stride)
        })
    }

    /// Copies them out, token by token.
    pub(super) fn copy_out(&self, memory: &RegionMemory) -> Result<Vec<u8>, ServiceError> {
        let mut bytes = vec![0; self.shape.size_bytes() as usize];
        if self.is_dense() {
            memory.read_bytes(self.offset, &mut bytes)?;
            return Ok(bytes);
        }
        let rows = bytes.chunks_exact_mut(self.shape.row_bytes as usize);
        for (offset, row) in self.row_offsets().zip(rows) {
            memory.read_bytes(offset, row)?;
        }
        Ok(bytes)
    }

    /// Copies as many in.
    pub(super) fn copy_in(&self, memory: &RegionMemory, bytes: &[u8]) -> Result<(), ServiceError> {
        if self.is_dense() {
            return Ok(memory.write_bytes(self.offset, bytes)?);
        }
        let rows = bytes.chunks_exact(self.shape.row_bytes as usize);
        for (offset, row) in self.row_offsets().zip(rows) {
            memory.write_bytes(offset, row)?;
        }
        Ok(())
    }
}
