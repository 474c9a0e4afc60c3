//! Huffman codes in lock step: sixteen streams read the same place of sixteen rows at once.
//!
//! A *chunk* is up to 64 tokens. Its codes are taken four at a time along the axis that attention
//! sums (four positions of a token of keys, four tokens of a position of values): a *quad*. A
//! *step* is one quad in each stream, all at the same position, so that all streams use the same
//! table. Each stream has a reservoir of bits of its own and is *topped up* with the next 16-bit
//! word of the chunk whenever it has too few for what comes; streams take words in their order.
//! Nothing says where a stream begins: encoder and decoder top up at the same places.
//!
//! Vector registers decode sixteen quads at a time this way, and a warp of a GPU thirty-two.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod decode;
mod encode;
mod grouping;
mod nibbles;
mod outlier;
mod substitute;
#[cfg(test)]
mod tests;
mod whole;

pub use decode::{StreamChunk, StreamCodes};
pub(crate) use decode::{StreamLayout, split_chunks};
pub(crate) use encode::append_chunk as encode_chunk;
pub use grouping::SymbolGrouping;
pub use nibbles::{NibbleRow, NibbleTables};
pub use outlier::CodeOutlier;
pub(crate) use outlier::append_outliers as write_outliers;
pub use outlier::outlier_bits;
pub use substitute::cheapest_symbols;

use crate::huffman::HuffmanTable;
use kvd_core::Side;
use std::sync::OnceLock;
use whole::PairTable;

/// Streams of a chunk.
pub const STREAMS: usize = 16;
/// Tokens of a chunk; the last of a page has the rest.
pub const CHUNK_TOKENS: usize = 64;
/// Codes of a quad.
pub const QUAD: usize = 4;
/// Bits of a word.
pub(crate) const WORD_BITS: u32 = 16;

/// Consecutive positions of a row that share a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRun {
    /// Index of the table.
    pub table: usize,
    /// First position.
    pub first: usize,
    /// Positions.
    pub len: usize,
}

/// The runs of a row and the tables that they name.
#[derive(Clone, Copy)]
pub(crate) struct CodeTables<'a> {
    pub(crate) runs: &'a [StreamRun],
    pub(crate) tables: &'a [StreamTable],
}

/// Codes `[tokens, per_row]`, row-major.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows<'a> {
    pub(crate) rows: &'a [u16],
    pub(crate) per_row: usize,
}

/// A run and its table.
#[derive(Clone, Copy)]
struct RunTable<'a> {
    run: &'a StreamRun,
    table: &'a StreamTable,
}

/// A Huffman table, and what its symbols stand for.
#[derive(Clone, Debug)]
pub struct StreamTable {
    pub(crate) huffman: HuffmanTable,
    pub(crate) grouping: SymbolGrouping,
    longest: u32,
    batch: usize,
    bytes: Option<Box<ByteTables>>,
    /// By symbol, what is coded in its place; empty where every symbol has a code.
    substitutes: Vec<u16>,
    /// By [`StreamTable::unit_of`]: the bits that code it, from [`StreamTable::LENGTH_AT`] on how
    /// many, and [`StreamTable::SUBSTITUTED`] where they are those of another symbol.
    units: Vec<u32>,
    /// Made when first encoded with, where they help.
    pairs: OnceLock<Option<PairTable>>,
}

/// A table of up to 8 bits, as vector registers look it up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteTables {
    /// By the next eight bits: one code, or two of four bits, or four of two bits, first lowest.
    pub codes: [u8; 256],
    /// By the next eight bits: bits of the symbol.
    pub lengths: [u8; 256],
    /// By the next eight bits: both, the code in the highest byte and the length in the lowest.
    pub entries: [u32; 256],
    /// By the next eight bits: both in a byte, how far the length is from eight in three bits and
    /// the code above them. Only where a symbol is one code, and none is above 31.
    pub small: Option<[u8; 256]>,
    /// This table, indexed by four bits after the other.
    pub nibbles: NibbleTables,
}

impl StreamTable {
    /// The table, with look-ups for what its codes allow.
    #[must_use]
    pub fn new(huffman: HuffmanTable, grouping: SymbolGrouping) -> Self {
        debug_assert_eq!(huffman.code_lengths().len(), grouping.symbol_count());
        let bytes = (huffman.longest_code() <= 8).then(|| {
            let width = 8 / grouping.group as u32;
            let (mut codes, mut lengths, mut entries) = ([0; 256], [0; 256], [0; 256]);
            for index in 0..256 {
                let (symbol, length) = huffman.decode_first(index as u32);
                let of_symbol = grouping.symbol_codes(symbol).into_iter().take(grouping.group);
                let packed = of_symbol.zip(0..).map(|(code, at)| u32::from(code) << (width * at));
                codes[index] = packed.sum::<u32>() as u8;
                lengths[index] = length as u8;
                entries[index] = u32::from(codes[index]) << 24 | length;
            }
            let fits = |index: usize| codes[index] < 32 && lengths[index] > 0;
            let small = (grouping.group == 1 && (0..256).all(fits))
                .then(|| std::array::from_fn(|index| codes[index] << 3 | (8 - lengths[index])));
            let nibbles = NibbleTables::new(&codes, &lengths, small.as_ref());
            let tables = ByteTables { codes, lengths, entries, small, nibbles };
            Box::new(tables)
        });
        let longest = huffman.code_lengths().iter().copied().max().unwrap_or(0).into();
        let bits = longest + grouping.raw_bits;
        let most = QUAD / grouping.group;
        let fits = |batch: &usize| *batch <= most && *batch as u32 * bits <= WORD_BITS;
        let batch = [4, 2].into_iter().find(fits).unwrap_or(1);
        let substitutes = match huffman.code_lengths() {
            lengths if lengths.contains(&0) => {
                cheapest_symbols(grouping, lengths).into_iter().map(|(symbol, _)| symbol).collect()
            }
            _ => Vec::new(),
        };
        let raw_bits = grouping.raw_bits;
        let unit = |index: usize| {
            let (symbol, low) = ((index >> raw_bits) as u16, index as u32 & ((1 << raw_bits) - 1));
            let coded = substitutes.get(usize::from(symbol)).copied().unwrap_or(symbol);
            let (bits, length) = huffman.symbol_code(coded);
            let flag = if coded == symbol { 0 } else { Self::SUBSTITUTED };
            (u32::from(bits) | low << length) | (length + raw_bits) << Self::LENGTH_AT | flag
        };
        let units = (0..grouping.symbol_count() << raw_bits).map(unit).collect();
        let pairs = OnceLock::new();
        Self { huffman, grouping, longest, batch, bytes, substitutes, units, pairs }
    }

    /// Where the length of a unit begins.
    const LENGTH_AT: u32 = 16;
    const SUBSTITUTED: u32 = 1 << 31;

    /// The unit of the first codes of a quad: that of a single code, with its low bits, or of the
    /// symbol of several.
    fn unit_of(&self, codes: &[u16]) -> usize {
        if self.codes_per_symbol() == 1 {
            codes[0].into()
        } else {
            self.grouping.symbol_from_codes(codes).into()
        }
    }

    /// The table that codes two codes at once; none where a symbol holds several codes.
    fn pair_table(&self) -> Option<&PairTable> {
        self.pairs.get_or_init(|| PairTable::new(self)).as_ref()
    }

    /// The symbol that is coded for `symbol`.
    fn coded_symbol(&self, symbol: u16) -> u16 {
        self.substitutes.get(usize::from(symbol)).copied().unwrap_or(symbol)
    }

    /// Codes of a symbol: 1, 2 or 4.
    #[must_use]
    pub fn codes_per_symbol(&self) -> usize {
        self.grouping.group
    }

    /// Low bits of a code that follow its symbol as they are.
    #[must_use]
    pub fn raw_bits(&self) -> u32 {
        self.grouping.raw_bits
    }

    /// Bits of the longest symbol, its low bits not counted.
    #[must_use]
    pub fn longest_symbol(&self) -> u32 {
        self.longest
    }

    /// Symbols under one top-up, and the bits that they may take together.
    #[must_use]
    pub fn batch_size(&self) -> (usize, u32) {
        (self.batch, self.batch as u32 * (self.longest + self.raw_bits()))
    }

    /// Upper bound of its codes, without their low bits.
    #[must_use]
    pub fn level_count(&self) -> u16 {
        self.grouping.levels
    }

    /// The code that stands for a missing one in a symbol of several codes.
    #[must_use]
    pub fn missing_code(&self) -> u16 {
        self.grouping.missing
    }

    /// By symbol and, below it, its low bits: the bits that code them, from bit 16 on how many, and
    /// bit 31 where they are those of another symbol.
    #[must_use]
    pub fn symbol_units(&self) -> &[u32] {
        &self.units
    }

    /// The symbol that is coded for each; empty where all have a code.
    #[must_use]
    pub fn substitutes(&self) -> &[u16] {
        &self.substitutes
    }

    /// The codes of the symbol in the low bits, its low bits zero, and the symbol's length.
    #[must_use]
    pub fn decode_symbol(&self, bits: u32) -> ([u16; QUAD], u32) {
        let (symbol, length) = self.huffman.decode_first(bits);
        (self.grouping.symbol_codes(symbol), length)
    }

    /// The table as bytes; none where codes have more than 8 bits.
    #[must_use]
    pub fn byte_tables(&self) -> Option<&ByteTables> {
        self.bytes.as_deref()
    }

    /// Bytes that a store must keep to rebuild the table.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.huffman.size_bytes()
    }
}

/// One quad in each stream.
#[derive(Clone, Copy, Debug)]
struct QuadStep {
    side: Side,
    /// Tokens of the chunk.
    tokens: usize,
    table: usize,
    /// First position of the quads.
    position: usize,
    /// First token of the quad of stream 0.
    token: usize,
    /// Positions of a quad of keys.
    len: usize,
}

impl QuadStep {
    /// Codes of a stream's quad.
    fn quad_codes_count(&self, stream: usize) -> usize {
        match self.side {
            Side::Key if self.token + stream < self.tokens => self.len,
            Side::Key => 0,
            Side::Value => self.tokens.saturating_sub(QUAD * stream).min(QUAD),
        }
    }

    /// Where code `index` of a stream's quad lies among rows of `per_row` codes.
    fn code_index(&self, stream: usize, index: usize, per_row: usize) -> usize {
        match self.side {
            Side::Key => (self.token + stream) * per_row + self.position + index,
            Side::Value => (QUAD * stream + index) * per_row + self.position,
        }
    }
}

/// The steps of a chunk of `tokens` tokens, in their order.
fn quad_steps(
    side: Side,
    tokens: usize,
    runs: &[StreamRun],
) -> impl Iterator<Item = QuadStep> + use<'_> {
    let (quad, blocks) = match side {
        Side::Key => (QUAD, tokens.div_ceil(STREAMS)),
        Side::Value => (1, 1),
    };
    runs.iter().flat_map(move |run| {
        (0..run.len).step_by(quad).flat_map(move |at| {
            (0..blocks).map(move |block| QuadStep {
                side,
                tokens,
                table: run.table,
                position: run.first + at,
                token: block * STREAMS,
                len: quad.min(run.len - at),
            })
        })
    })
}
