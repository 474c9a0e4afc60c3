//! Bytes that begin at a multiple of 4 KiB, as O_DIRECT wants them. Pure.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Unit of addresses, offsets and lengths under O_DIRECT; records begin at multiples of it.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Zeroed bytes at an address that is a multiple of [`BLOCK_BYTES`].
pub struct AlignedBytes {
    // Never grows, so what is aligned stays where it is.
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl AlignedBytes {
    /// `len` zeros.
    #[must_use]
    pub fn with_zeros(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK_BYTES];
        let begin = bytes.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        Self { bytes, begin, len }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.begin..self.begin + self.len]
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..self.begin + self.len]
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "AlignedBytes({})", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_and_zero() {
        for len in [0, 1, 4096, 1 << 20] {
            let bytes = AlignedBytes::with_zeros(len);
            assert_eq!(bytes.len(), len);
            assert_eq!(bytes.as_ptr().align_offset(BLOCK_BYTES), 0);
            assert!(bytes.iter().all(|byte| *byte == 0));
        }
    }
}
