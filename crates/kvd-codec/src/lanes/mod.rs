//! Huffman codes in lock step: sixteen lanes read the same place of sixteen rows at once.
//!
//! A *chunk* is up to 64 tokens. Its codes are taken four at a time along the axis that attention
//! sums (four positions of a token of keys, four tokens of a position of values): a *quad*. A
//! *step* is one quad in each lane, all at the same position, so that all lanes use the same
//! table. Each lane has a reservoir of bits of its own and is *topped up* with the next 16-bit
//! word of the chunk whenever it has too few for what comes; lanes take words in their order.
//! Nothing says where a lane begins: encoder and decoder top up at the same places.
//!
//! Vector registers decode sixteen quads at a time this way, and a warp of a GPU thirty-two.

mod decode;
mod encode;
mod grouping;
mod nibbles;
mod outlier;
#[cfg(target_arch = "x86_64")]
mod registers;
mod substitute;
#[cfg(test)]
mod tests;
mod whole;

pub use decode::{LaneChunk, LaneCodes};
pub(crate) use decode::{Layout, split};
pub(crate) use encode::chunk as encode_chunk;
pub(crate) use grouping::Grouping;
pub use nibbles::{NibbleRow, Nibbles};
pub use outlier::Outlier;
pub(crate) use outlier::{bits as outlier_bits, write as write_outliers};
pub(crate) use substitute::cheapest;

use crate::huffman::HuffmanTable;
use kvd_core::Side;
use std::sync::OnceLock;
use whole::Pairs;

/// Lanes of a chunk.
pub(crate) const LANES: usize = 16;
/// Tokens of a chunk; the last of a page has what is left.
pub const CHUNK_TOKENS: usize = 64;
/// Codes of a quad.
pub(crate) const QUAD: usize = 4;
/// Bits of a word.
pub(crate) const WORD_BITS: u32 = 16;

/// Consecutive positions of a row that share a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRun {
    /// Index of the table.
    pub table: usize,
    /// First position.
    pub first: usize,
    /// Positions.
    pub len: usize,
}

/// A Huffman table, and what its symbols stand for.
#[derive(Clone, Debug)]
pub struct LaneTable {
    pub(crate) huffman: HuffmanTable,
    pub(crate) grouping: Grouping,
    longest: u32,
    batch: usize,
    bytes: Option<Box<ByteTables>>,
    /// By symbol, what is coded in its place; empty where every symbol has a code.
    substitutes: Vec<u16>,
    /// By [`LaneTable::unit_of`]: the bits that code it, from [`LaneTable::LENGTH_AT`] on how many,
    /// and [`LaneTable::SUBSTITUTED`] where they are those of another symbol.
    units: Vec<u32>,
    /// Made when first encoded with, where they help.
    pairs: OnceLock<Option<Pairs>>,
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
    /// The same by four bits after the other.
    pub nibbles: Nibbles,
}

impl LaneTable {
    pub(crate) fn new(huffman: HuffmanTable, grouping: Grouping) -> Self {
        debug_assert_eq!(huffman.lengths().len(), grouping.alphabet());
        let bytes = (huffman.limit() <= 8).then(|| {
            let width = 8 / grouping.group as u32;
            let (mut codes, mut lengths, mut entries) = ([0; 256], [0; 256], [0; 256]);
            for index in 0..256 {
                let (symbol, length) = huffman.first(index as u32);
                let of_symbol = grouping.codes(symbol).into_iter().take(grouping.group);
                let packed = of_symbol.zip(0..).map(|(code, at)| u32::from(code) << (width * at));
                codes[index] = packed.sum::<u32>() as u8;
                lengths[index] = length as u8;
                entries[index] = u32::from(codes[index]) << 24 | length;
            }
            let fits = |index: usize| codes[index] < 32 && lengths[index] > 0;
            let small = (grouping.group == 1 && (0..256).all(fits))
                .then(|| std::array::from_fn(|index| codes[index] << 3 | (8 - lengths[index])));
            let nibbles = Nibbles::new(&codes, &lengths, small.as_ref());
            let tables = ByteTables { codes, lengths, entries, small, nibbles };
            Box::new(tables)
        });
        let longest = huffman.lengths().iter().copied().max().unwrap_or(0).into();
        let bits = longest + grouping.raw_bits;
        let most = QUAD / grouping.group;
        let fits = |batch: &usize| *batch <= most && *batch as u32 * bits <= WORD_BITS;
        let batch = [4, 2].into_iter().find(fits).unwrap_or(1);
        let substitutes = match huffman.lengths() {
            lengths if lengths.contains(&0) => {
                cheapest(grouping, lengths).into_iter().map(|(symbol, _)| symbol).collect()
            }
            _ => Vec::new(),
        };
        let raw_bits = grouping.raw_bits;
        let unit = |index: usize| {
            let (symbol, low) = ((index >> raw_bits) as u16, index as u32 & ((1 << raw_bits) - 1));
            let coded = substitutes.get(usize::from(symbol)).copied().unwrap_or(symbol);
            let (bits, length) = huffman.code(coded);
            let flag = if coded == symbol { 0 } else { Self::SUBSTITUTED };
            (u32::from(bits) | low << length) | (length + raw_bits) << Self::LENGTH_AT | flag
        };
        let units = (0..grouping.alphabet() << raw_bits).map(unit).collect();
        let pairs = OnceLock::new();
        Self { huffman, grouping, longest, batch, bytes, substitutes, units, pairs }
    }

    /// Where the length of a unit begins.
    const LENGTH_AT: u32 = 16;
    const SUBSTITUTED: u32 = 1 << 31;

    /// The unit of the first codes of a quad: that of a single code, with its low bits, or of the
    /// symbol of several.
    fn unit_of(&self, codes: &[u16]) -> usize {
        if self.group() == 1 { codes[0].into() } else { self.grouping.symbol(codes).into() }
    }

    /// What codes two codes at once.
    fn pairs(&self) -> Option<&Pairs> {
        self.pairs.get_or_init(|| Pairs::new(self)).as_ref()
    }

    /// The symbol that is coded for `symbol`.
    fn substitute(&self, symbol: u16) -> u16 {
        self.substitutes.get(usize::from(symbol)).copied().unwrap_or(symbol)
    }

    /// Codes of a symbol: 1, 2 or 4.
    #[must_use]
    pub fn group(&self) -> usize {
        self.grouping.group
    }

    /// Low bits of a code that follow its symbol as they are.
    #[must_use]
    pub fn raw_bits(&self) -> u32 {
        self.grouping.raw_bits
    }

    /// Bits of the longest symbol, its low bits not counted.
    #[must_use]
    pub fn longest(&self) -> u32 {
        self.longest
    }

    /// Symbols under one top-up, and the bits that they may take together.
    #[must_use]
    pub fn batch(&self) -> (usize, u32) {
        (self.batch, self.batch as u32 * (self.longest + self.raw_bits()))
    }

    /// What its codes are below, without their low bits.
    #[must_use]
    pub fn levels(&self) -> u16 {
        self.grouping.levels
    }

    /// What a missing code of a symbol of several counts as.
    #[must_use]
    pub fn missing(&self) -> u16 {
        self.grouping.missing
    }

    /// By symbol and, below it, its low bits: the bits that code them, from bit 16 on how many, and
    /// bit 31 where they are those of another symbol.
    #[must_use]
    pub fn units(&self) -> &[u32] {
        &self.units
    }

    /// The symbol that is coded for each; empty where all have a code.
    #[must_use]
    pub fn substitutes(&self) -> &[u16] {
        &self.substitutes
    }

    /// The codes of the symbol in the low bits, its low bits zero, and the symbol's length.
    #[must_use]
    pub fn lookup(&self, bits: u32) -> ([u16; QUAD], u32) {
        let (symbol, length) = self.huffman.first(bits);
        (self.grouping.codes(symbol), length)
    }

    /// The table as bytes; none where codes have more than 8 bits.
    #[must_use]
    pub fn bytes(&self) -> Option<&ByteTables> {
        self.bytes.as_deref()
    }

    /// Bytes that a store must keep to rebuild the table.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.huffman.size_bytes()
    }
}

/// One quad in each lane.
#[derive(Clone, Copy, Debug)]
struct Step {
    side: Side,
    /// Tokens of the chunk.
    tokens: usize,
    table: usize,
    /// First position of the quads.
    position: usize,
    /// First token of the quad of lane 0.
    token: usize,
    /// Positions of a quad of keys.
    len: usize,
}

impl Step {
    /// Codes of a lane's quad.
    fn count(&self, lane: usize) -> usize {
        match self.side {
            Side::Key if self.token + lane < self.tokens => self.len,
            Side::Key => 0,
            Side::Value => self.tokens.saturating_sub(QUAD * lane).min(QUAD),
        }
    }

    /// Where code `index` of a lane's quad lies among rows of `per_row` codes.
    fn place(&self, lane: usize, index: usize, per_row: usize) -> usize {
        match self.side {
            Side::Key => (self.token + lane) * per_row + self.position + index,
            Side::Value => (QUAD * lane + index) * per_row + self.position,
        }
    }
}

/// The steps of a chunk of `tokens` tokens, in their order.
fn steps(side: Side, tokens: usize, runs: &[LaneRun]) -> impl Iterator<Item = Step> + use<'_> {
    let (quad, blocks) = match side {
        Side::Key => (QUAD, tokens.div_ceil(LANES)),
        Side::Value => (1, 1),
    };
    runs.iter().flat_map(move |run| {
        (0..run.len).step_by(quad).flat_map(move |at| {
            (0..blocks).map(move |block| Step {
                side,
                tokens,
                table: run.table,
                position: run.first + at,
                token: block * LANES,
                len: quad.min(run.len - at),
            })
        })
    })
}
