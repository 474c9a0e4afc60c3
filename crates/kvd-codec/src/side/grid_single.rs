//! Grid streams read one symbol at a time: what the faster decoder is tested against.

use super::grid::{CLASSES, ESCAPE_BITS, Grid, ZERO_INDEX_BITS};
use crate::PageError;
use crate::huffman::HuffmanTable;
use kvd_core::Geometry;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

impl Grid {
    /// Reads rows from one stream; `skip` of them first without keeping them. `complete` says that
    /// the stream holds no more.
    pub(super) fn decode_single(
        &self,
        bytes: &[u8],
        (skip, complete): (usize, bool),
        dim: usize,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let mut reader = BitReader::new(bytes);
        let mut buffer = [0i32; DIM_MAX];
        let codes = &mut buffer[..dim];
        for _ in 0..skip {
            self.decode_row(&mut reader, codes)?;
        }
        for row in out.chunks_exact_mut(dim) {
            self.decode_row(&mut reader, codes)?;
            for (c, code) in row.iter_mut().zip(codes.iter()) {
                *c = *code as f32 * self.step;
            }
        }
        if complete && !reader.is_spent() {
            return Err(PageError::Payload("a stream does not end where its length says"));
        }
        Ok(())
    }

    fn decode_row(&self, reader: &mut BitReader<'_>, codes: &mut [i32]) -> Result<(), PageError> {
        for run in &self.runs {
            let class = CLASSES[run.class];
            for group in codes[run.first..run.first + run.len].chunks_mut(class.group) {
                let Some(table) = &self.tables.codes[run.class] else {
                    decode_zeros(reader, group)?;
                    continue;
                };
                let symbol = reader.symbol(table)?;
                if symbol == class.escape() {
                    for code in group {
                        *code = i32::from(reader.bits(ESCAPE_BITS)? as u16 as i16);
                    }
                } else {
                    class.codes(symbol, group);
                }
            }
        }
        Ok(())
    }
}

fn decode_zeros(reader: &mut BitReader<'_>, group: &mut [i32]) -> Result<(), PageError> {
    group.fill(0);
    if reader.bits(1)? == 0 {
        return Ok(());
    }
    for _ in 0..=reader.bits(ZERO_INDEX_BITS)? {
        let index = reader.bits(ZERO_INDEX_BITS)? as usize;
        let code = i32::from(reader.bits(ESCAPE_BITS)? as u16 as i16);
        let place = group.get_mut(index);
        *place.ok_or(PageError::Payload("a code lies outside its group"))? = code;
    }
    Ok(())
}

/// Reads bits, lowest first; past the end it is an error.
struct BitReader<'a> {
    bytes: &'a [u8],
    next: usize,
    held: u64,
    filled: u32,
}

impl<'a> BitReader<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, next: 0, held: 0, filled: 0 }
    }

    /// Tops up to at least 32 bits, or to the end.
    fn refill(&mut self) {
        while self.filled <= 56 {
            let Some(byte) = self.bytes.get(self.next) else { return };
            self.held |= u64::from(*byte) << self.filled;
            self.next += 1;
            self.filled += 8;
        }
    }

    fn take(&mut self, count: u32) -> Result<(), PageError> {
        if count > self.filled {
            return Err(PageError::Payload("a stream ends within a code"));
        }
        self.held >>= count;
        self.filled -= count;
        Ok(())
    }

    fn bits(&mut self, count: u32) -> Result<u64, PageError> {
        if self.filled < count {
            self.refill();
        }
        let bits = self.held & ((1 << count) - 1);
        self.take(count)?;
        Ok(bits)
    }

    /// Whether less than a byte is left.
    fn is_spent(&self) -> bool {
        self.next == self.bytes.len() && self.filled < 8
    }

    fn symbol(&mut self, table: &HuffmanTable) -> Result<u16, PageError> {
        if self.filled < table.limit() {
            self.refill();
        }
        let (symbol, length) = table.first(self.held as u32);
        self.take(length)?;
        Ok(symbol)
    }
}
