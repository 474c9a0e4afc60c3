//! Rows of heads and tokens in a region's memory, by strides.

use crate::service::ServiceError;
use bytes::{Bytes, BytesMut};
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

/// Memory of rows that were copied out: used again once nobody has them any more.
#[derive(Default)]
pub(super) struct RowMemory(Vec<BytesMut>);

/// Pieces of memory that a ring keeps, and the most bytes of one: together 256 KiB.
const PIECES_MAX: usize = 8;
const PIECE_BYTES_MAX: usize = 32 << 10;

impl RowMemory {
    /// So many bytes, filled by `fill`.
    fn fill_rows(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), ServiceError>,
    ) -> Result<Bytes, ServiceError> {
        let at = self.0.iter_mut().position(|piece| piece.try_reclaim(bytes));
        let mut piece = match at {
            Some(at) => self.0.remove(at),
            None => BytesMut::with_capacity(bytes),
        };
        piece.resize(bytes, 0);
        fill(&mut piece)?;
        let rows = piece.split().freeze();
        if bytes <= PIECE_BYTES_MAX {
            // The one that was not used for longest may be too small.
            self.0.drain(..(self.0.len() + 1).saturating_sub(PIECES_MAX));
            self.0.push(piece);
        }
        Ok(rows)
    }
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
    pub(super) fn copy_out(
        &self,
        memory: &RegionMemory,
        to: &mut RowMemory,
    ) -> Result<Bytes, ServiceError> {
        to.fill_rows(self.shape.size_bytes() as usize, |bytes| {
            if self.is_dense() {
                return Ok(memory.read_bytes(self.offset, bytes)?);
            }
            let rows = bytes.chunks_exact_mut(self.shape.row_bytes as usize);
            for (offset, row) in self.row_offsets().zip(rows) {
                memory.read_bytes(offset, row)?;
            }
            Ok(())
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fill_with(memory: &mut RowMemory, bytes: usize, value: u8) -> Bytes {
        let filled = memory.fill_rows(bytes, |rows| {
            rows.fill(value);
            Ok(())
        });
        filled.unwrap()
    }

    #[test]
    fn rows_are_nobody_elses_and_their_memory_is_used_again_once_they_are_gone() {
        let mut memory = RowMemory::default();
        let first = fill_with(&mut memory, 1000, 1);
        let second = fill_with(&mut memory, 1000, 2);
        assert!(first.iter().all(|byte| *byte == 1) && second.iter().all(|byte| *byte == 2));
        let at = [&first, &second].map(|rows| rows.as_ptr());
        drop(first);
        let third = fill_with(&mut memory, 1000, 3);
        assert_eq!(third.as_ptr(), at[0]);
        assert!(second.iter().all(|byte| *byte == 2));
        drop([second, third]);
        // Larger ones take the places of those that are too small.
        let large = fill_with(&mut memory, 2000, 5).as_ptr();
        assert_eq!(fill_with(&mut memory, 2000, 6).as_ptr(), large);
        for _ in 0..100 {
            let rows = fill_with(&mut memory, 1000, 4).as_ptr();
            assert!([at[0], at[1], large, large.wrapping_add(1000)].contains(&rows));
        }
    }

    #[test]
    fn a_ring_keeps_few_pieces_and_none_that_is_large() {
        let mut memory = RowMemory::default();
        drop(fill_with(&mut memory, PIECE_BYTES_MAX + 1, 0));
        assert!(memory.0.is_empty());
        let all: Vec<_> = (0..10).map(|at| fill_with(&mut memory, PIECE_BYTES_MAX, at)).collect();
        assert_eq!(memory.0.len(), PIECES_MAX);
        assert!((0..).zip(&all).all(|(at, rows)| rows.iter().all(|byte| *byte == at)));
        drop(all);
        // One that could not be filled is given up.
        let failed = memory.fill_rows(10, |_| Err(ServiceError::new(ErrorCode::Internal, "no")));
        assert!(failed.is_err());
        assert_eq!(fill_with(&mut memory, 10, 7), [7; 10][..]);
    }
}
