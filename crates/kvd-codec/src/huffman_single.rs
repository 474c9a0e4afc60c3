//! Huffman streams read one symbol at a time: what faster decoders are tested against.

use super::{HuffmanTable, LIMIT_LARGE, LIMIT_SMALL, LIMIT_WIDE};
use crate::PageError;

/// Reads one stream symbol by symbol. Past the end it reads zeros and [`Stream::check`] fails.
pub(crate) struct Stream<'a> {
    table: &'a HuffmanTable,
    bytes: &'a [u8],
    /// Bytes that have entered the reservoir, or would have.
    at: usize,
    held: u64,
    filled: u32,
}

impl<'a> Stream<'a> {
    pub(crate) fn new(table: &'a HuffmanTable, bytes: &'a [u8]) -> Self {
        Self { table, bytes, at: 0, held: 0, filled: 0 }
    }

    /// Tops the reservoir up to at least 56 bits.
    #[inline]
    fn refill(&mut self) {
        if let Some(next) = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<8>()) {
            self.held |= u64::from_le_bytes(*next) << self.filled;
            self.at += ((63 - self.filled) >> 3) as usize;
            self.filled |= 56;
            return;
        }
        while self.filled <= 56 {
            let byte = self.bytes.get(self.at).copied().unwrap_or(0);
            self.held |= u64::from(byte) << self.filled;
            self.at += 1;
            self.filled += 8;
        }
    }

    /// Reads `symbols.len()` symbols.
    pub(crate) fn read(&mut self, symbols: &mut [u16]) {
        match self.table.limit {
            LIMIT_SMALL => self.read_limited::<LIMIT_SMALL, 7>(symbols),
            LIMIT_LARGE => self.read_limited::<LIMIT_LARGE, 4>(symbols),
            _ => self.read_limited::<LIMIT_WIDE, 3>(symbols),
        }
    }

    /// `BATCH` codes of at most `LIMIT` bits fit in the 56 bits after a refill.
    fn read_limited<const LIMIT: u32, const BATCH: usize>(&mut self, symbols: &mut [u16]) {
        let decode = &self.table.decode[..1 << LIMIT];
        for batch in symbols.chunks_mut(BATCH) {
            self.refill();
            let (mut held, mut filled) = (self.held, self.filled);
            for symbol in batch {
                let entry = decode[(held & ((1 << LIMIT) - 1)) as usize];
                let length = u32::from(entry >> 12);
                *symbol = entry & 0xFFF;
                held >>= length;
                filled -= length;
            }
            (self.held, self.filled) = (held, filled);
        }
    }

    /// Tests that what was read lies inside the stream, and, where all of it was read, that it
    /// ends in the last byte.
    pub(crate) fn check(&self, complete: bool) -> Result<(), PageError> {
        let used = self.at * 8 - self.filled as usize;
        if used > self.bytes.len() * 8 || (complete && used.div_ceil(8) != self.bytes.len()) {
            return Err(PageError::Payload("a stream does not end where its length says"));
        }
        Ok(())
    }
}
