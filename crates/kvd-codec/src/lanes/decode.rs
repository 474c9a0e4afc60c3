//! Words back to codes: the reference, one symbol after another.

use super::outlier::{self, OUTLIER_BYTES, Outlier};
use super::{CHUNK_TOKENS, LANES, LaneRun, LaneTable, QUAD, WORD_BITS, steps};
use crate::PageError;
use kvd_core::Side;

/// What a page's codes look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) side: Side,
    /// Tokens of the page.
    pub(crate) tokens: usize,
    /// Codes of a row.
    pub(crate) per_row: usize,
    pub(crate) runs: &'a [LaneRun],
    pub(crate) tables: &'a [LaneTable],
    /// Whether chunks end in outliers.
    pub(crate) outliers: bool,
}

/// The entropy-coded part of a page.
#[derive(Clone, Copy, Debug)]
pub struct LaneCodes<'a> {
    layout: Layout<'a>,
    /// Per chunk its words, and with outliers the words of those: u16 each.
    lengths: &'a [u8],
    bytes: &'a [u8],
}

/// Up to [`CHUNK_TOKENS`] tokens of a page.
#[derive(Clone, Copy, Debug)]
pub struct LaneChunk<'a> {
    /// Tokens.
    pub tokens: usize,
    /// Words, lowest byte first; after the last come zeros.
    pub words: &'a [u8],
    outliers: &'a [u8],
}

impl Layout<'_> {
    fn length_bytes(&self) -> usize {
        if self.outliers { 4 } else { 2 }
    }

    /// Bytes of all lengths of the page.
    pub(crate) fn lengths_bytes(&self) -> usize {
        self.tokens.div_ceil(CHUNK_TOKENS) * self.length_bytes()
    }
}

/// Lengths and chunks; the lengths add up to the end of `rest`.
pub(crate) fn split<'a>(layout: Layout<'a>, rest: &'a [u8]) -> Result<LaneCodes<'a>, PageError> {
    let mut codes = LaneCodes { layout, lengths: &[], bytes: &[] };
    codes.take(rest)?;
    Ok(codes)
}

impl<'a> LaneCodes<'a> {
    /// Chunks of the page.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.layout.tokens.div_ceil(CHUNK_TOKENS)
    }

    /// Becomes what lies in `rest` of another page of that layout; whether it is one.
    pub(crate) fn turn_to(&mut self, rest: &'a [u8]) -> bool {
        let before = *self;
        let turned = self.take(rest).is_ok();
        if !turned {
            *self = before;
        }
        turned
    }

    fn take(&mut self, rest: &'a [u8]) -> Result<(), PageError> {
        (self.lengths, self.bytes) = rest
            .split_at_checked(self.layout.lengths_bytes())
            .ok_or(PageError::Payload("it ends inside the stream lengths"))?;
        let total: usize =
            (0..self.chunks()).map(|chunk| self.sizes(chunk).iter().sum::<usize>()).sum();
        if total != self.bytes.len() {
            return Err(PageError::Payload("stream lengths do not add up to its end"));
        }
        Ok(())
    }

    /// Keys or values.
    #[must_use]
    pub fn side(&self) -> Side {
        self.layout.side
    }

    /// The runs of a row, in the order of steps.
    #[must_use]
    pub fn runs(&self) -> &'a [LaneRun] {
        self.layout.runs
    }

    /// The tables that runs name.
    #[must_use]
    pub fn tables(&self) -> &'a [LaneTable] {
        self.layout.tables
    }

    /// Codes of a row.
    #[must_use]
    pub fn per_row(&self) -> usize {
        self.layout.per_row
    }

    /// Bytes of the words and of the outliers of a chunk.
    fn sizes(&self, chunk: usize) -> [usize; 2] {
        let at = |index: usize| {
            let at = chunk * self.layout.length_bytes() + 2 * index;
            usize::from(u16::from_le_bytes([self.lengths[at], self.lengths[at + 1]]))
        };
        [2 * at(0), if self.layout.outliers { OUTLIER_BYTES * at(1) } else { 0 }]
    }

    /// One chunk.
    ///
    /// # Panics
    /// When there is no such chunk.
    #[must_use]
    pub fn chunk(&self, index: usize) -> LaneChunk<'a> {
        assert!(index < self.chunks(), "chunk {index} of {}", self.chunks());
        let start: usize = (0..index).map(|i| self.sizes(i).iter().sum::<usize>()).sum();
        let [words, outliers] = self.sizes(index);
        let (words, rest) = self.bytes[start..].split_at(words);
        let tokens = (self.layout.tokens - index * CHUNK_TOKENS).min(CHUNK_TOKENS);
        LaneChunk { tokens, words, outliers: &rest[..outliers] }
    }

    /// Writes the codes of a chunk as rows `[tokens, per_row]`; positions without a run stay as
    /// they are. Outliers are left to the caller.
    ///
    /// # Panics
    /// When there is no such chunk, or `rows` has another length.
    ///
    /// # Errors
    /// When the chunk has more words than its lanes take.
    pub fn decode(&self, chunk: usize, rows: &mut [u16]) -> Result<(), PageError> {
        let Layout { side, per_row, runs, tables, .. } = self.layout;
        let LaneChunk { tokens, words, .. } = self.chunk(chunk);
        assert_eq!(rows.len(), tokens * per_row, "decode: rows");
        let (words, mut next) = (words.as_chunks::<2>().0, 0);
        let (mut held, mut filled) = ([0u32; LANES], [0u32; LANES]);
        for step in steps(side, tokens, runs) {
            let table = &tables[step.table];
            let (batch, need) = table.batch();
            let (group, raw) = (table.group(), table.raw_bits());
            for first in (0..QUAD).step_by(batch * group) {
                for lane in 0..LANES {
                    let count = step.count(lane);
                    if count <= first {
                        continue;
                    }
                    let (mut bits, mut left) = (held[lane], filled[lane]);
                    if left < need {
                        let word = words.get(next).map_or(0, |word| u16::from_le_bytes(*word));
                        bits |= u32::from(word) << left;
                        left += WORD_BITS;
                        next += 1;
                    }
                    for at in (first..count.min(first + batch * group)).step_by(group) {
                        let (symbol, length) = table.huffman.first(bits);
                        let mut codes = table.grouping.codes(symbol);
                        bits >>= length;
                        codes[0] |= (bits & ((1 << raw) - 1)) as u16;
                        bits >>= raw;
                        left -= length + raw;
                        for (index, code) in (at..count).zip(&codes[..group]) {
                            rows[step.place(lane, index, per_row)] = *code;
                        }
                    }
                    (held[lane], filled[lane]) = (bits, left);
                }
            }
        }
        if next < words.len() {
            return Err(PageError::Payload("a stream does not end where its length says"));
        }
        Ok(())
    }

    /// The outliers of a chunk, row after row.
    ///
    /// # Errors
    /// When one lies outside the chunk or ends too early.
    pub fn outliers(
        &self,
        chunk: &LaneChunk<'a>,
    ) -> impl Iterator<Item = Result<Outlier, PageError>> + use<'a> {
        let (tokens, per_row) = (chunk.tokens, self.layout.per_row);
        outlier::read(chunk.outliers).map(move |(place, rest)| {
            let rest = rest.ok_or(PageError::Payload("it ends inside an outlier"))?;
            let (token, position) = (place / per_row, place % per_row);
            if token >= tokens {
                return Err(PageError::Payload("an outlier lies outside its chunk"));
            }
            Ok(Outlier { token, position, rest })
        })
    }
}
