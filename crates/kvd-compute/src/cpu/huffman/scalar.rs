//! Chunks of Huffman codes without vector registers: a lane after the other, in the order in which
//! lanes take words, with one load for a symbol's code and length.

use crate::cpu::huffman::{HuffmanChunk, QUAD, STEP_BYTES, STREAMS};
use kvd_codec::StreamTable;
use kvd_core::Side;
use std::ops::Range;

/// Bits of a word.
const WORD_BITS: u32 = 16;

/// The reservoirs of all lanes.
#[derive(Default)]
struct BitReservoirs {
    held: [u32; STREAMS],
    filled: [u32; STREAMS],
    /// Decoded symbols, eight bits each, the first lowest.
    packed: [u32; STREAMS],
}

/// Decodes a chunk of any number of tokens.
pub(super) fn decode_chunk(chunk: &mut HuffmanChunk<'_>) {
    let mut lanes = BitReservoirs::default();
    for step in chunk.steps.iter().filter(|step| step.tokens < chunk.tokens) {
        let table = &chunk.tables[step.table];
        lanes.packed = [0; STREAMS];
        for first in (0..QUAD).step_by(table.batch_size().0 * table.codes_per_symbol()) {
            let left = step.count.saturating_sub(first);
            match chunk.side {
                Side::Key => {
                    let count = (chunk.tokens - step.tokens).min(STREAMS);
                    lanes.read_batch(chunk.words, &mut chunk.next, table, first, left, 0..count);
                }
                Side::Value => {
                    // The last lane of a page may have less than a quad.
                    let full = chunk.tokens / QUAD;
                    lanes.read_batch(chunk.words, &mut chunk.next, table, first, left, 0..full);
                    let left = (chunk.tokens % QUAD).saturating_sub(first);
                    let last = full..STREAMS.min(full + 1);
                    lanes.read_batch(chunk.words, &mut chunk.next, table, first, left, last);
                }
            }
        }
        let out = chunk.out[step.out..][..STEP_BYTES].as_chunks_mut::<QUAD>().0;
        let quads = lanes
            .packed
            .map(|packed| unpack_symbols(packed, table.codes_per_symbol()).to_le_bytes());
        out.copy_from_slice(&quads);
    }
}

/// One code a byte.
fn unpack_symbols(packed: u32, group: usize) -> u32 {
    match group {
        1 => packed,
        2 => {
            let bytes = (packed | packed << 8) & 0x00FF_00FF;
            (bytes | bytes << 4) & 0x0F0F_0F0F
        }
        _ => {
            let halves = (packed | packed << 12) & 0x000F_000F;
            (halves | halves << 6) & 0x0303_0303
        }
    }
}

impl BitReservoirs {
    /// Reads the symbols that one top-up serves, from code `first` of the quads on; `left` codes
    /// are still to come.
    fn read_batch(
        &mut self,
        words: &[u32],
        next: &mut usize,
        table: &StreamTable,
        first: usize,
        left: usize,
        lanes: Range<usize>,
    ) {
        let (batch, group) = (table.batch_size().0, table.codes_per_symbol());
        let at = 8 * (first / group) as u32;
        match (left.div_ceil(group).min(batch), table.raw_bits() > 0) {
            (0, _) => {}
            (1, false) => self.read_symbols::<1, false>(words, next, table, at, lanes),
            (2, false) => self.read_symbols::<2, false>(words, next, table, at, lanes),
            (3, false) => self.read_symbols::<3, false>(words, next, table, at, lanes),
            (_, false) => self.read_symbols::<4, false>(words, next, table, at, lanes),
            (1, true) => self.read_symbols::<1, true>(words, next, table, at, lanes),
            (2, true) => self.read_symbols::<2, true>(words, next, table, at, lanes),
            (3, true) => self.read_symbols::<3, true>(words, next, table, at, lanes),
            (_, true) => self.read_symbols::<4, true>(words, next, table, at, lanes),
        }
    }

    #[inline]
    fn read_symbols<const COUNT: usize, const RAW: bool>(
        &mut self,
        words: &[u32],
        next: &mut usize,
        table: &StreamTable,
        at: u32,
        lanes: Range<usize>,
    ) {
        let entries = &table.byte_tables().expect("the caller has looked").entries;
        let (need, raw) = (table.batch_size().1, table.raw_bits());
        let end = words.len() - 1;
        let mut taken = *next;
        let held = self.held[lanes.clone()].iter_mut().zip(&mut self.filled[lanes.clone()]);
        for ((held, filled), packed) in held.zip(&mut self.packed[lanes]) {
            let (mut bits, mut left) = (*held, *filled);
            // Without a branch: whether a lane is short is no better than a coin to predict.
            let short = u32::from(left < need);
            bits |= (words[taken.min(end)] * short) << left;
            left += WORD_BITS * short;
            taken += short as usize;
            for index in 0..COUNT as u32 {
                let entry = entries[(bits & 0xFF) as usize];
                let length = entry & 0xF;
                let mut code = entry >> 24;
                bits >>= length;
                left -= length;
                if RAW {
                    code |= bits & ((1 << raw) - 1);
                    bits >>= raw;
                    left -= raw;
                }
                *packed |= code << (at + 8 * index);
            }
            (*held, *filled) = (bits, left);
        }
        *next = taken;
    }
}
