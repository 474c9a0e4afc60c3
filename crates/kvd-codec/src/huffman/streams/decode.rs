//! Words back to codes: the reference, one symbol after another.

use super::outlier::{self, CodeOutlier, OUTLIER_BYTES};
use super::{CHUNK_TOKENS, QUAD, STREAMS, StreamRun, StreamTable, WORD_BITS, quad_steps};
use crate::PageError;
use kvd_core::Side;

/// Layout of a page's codes: rows, runs and tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamLayout<'a> {
    pub(crate) side: Side,
    /// Tokens of the page.
    pub(crate) tokens: usize,
    /// Codes of a row.
    pub(crate) per_row: usize,
    pub(crate) runs: &'a [StreamRun],
    pub(crate) tables: &'a [StreamTable],
    /// Whether chunks end in outliers.
    pub(crate) outliers: bool,
}

/// The entropy-coded part of a page.
#[derive(Clone, Copy, Debug)]
pub struct StreamCodes<'a> {
    layout: StreamLayout<'a>,
    /// Per chunk its words, and with outliers the words of those: u16 each.
    lengths: &'a [u8],
    bytes: &'a [u8],
}

/// Up to [`CHUNK_TOKENS`] tokens of a page.
#[derive(Clone, Copy, Debug)]
pub struct StreamChunk<'a> {
    /// Tokens.
    pub tokens: usize,
    /// Words, lowest byte first; after the last come zeros.
    pub words: &'a [u8],
    outliers: &'a [u8],
}

impl StreamLayout<'_> {
    fn length_bytes(&self) -> usize {
        if self.outliers { 4 } else { 2 }
    }

    /// Bytes of all lengths of the page.
    pub(crate) fn lengths_bytes(&self) -> usize {
        self.tokens.div_ceil(CHUNK_TOKENS) * self.length_bytes()
    }
}

/// Lengths and chunks; the lengths add up to the end of `rest`.
pub(crate) fn split_chunks<'a>(
    layout: StreamLayout<'a>,
    rest: &'a [u8],
) -> Result<StreamCodes<'a>, PageError> {
    let mut codes = StreamCodes { layout, lengths: &[], bytes: &[] };
    codes.take_lengths(rest)?;
    Ok(codes)
}

impl<'a> StreamCodes<'a> {
    /// Chunks of the page.
    #[must_use]
    pub fn chunk_count(&self) -> usize {
        self.layout.tokens.div_ceil(CHUNK_TOKENS)
    }

    /// Becomes what lies in `rest` of another page of that layout; whether it is one.
    pub(crate) fn turn_to(&mut self, rest: &'a [u8]) -> bool {
        let before = *self;
        let turned = self.take_lengths(rest).is_ok();
        if !turned {
            *self = before;
        }
        turned
    }

    fn take_lengths(&mut self, rest: &'a [u8]) -> Result<(), PageError> {
        (self.lengths, self.bytes) = rest
            .split_at_checked(self.layout.lengths_bytes())
            .ok_or(PageError::Payload("it ends inside the stream lengths"))?;
        let total: usize = (0..self.chunk_count())
            .map(|chunk| self.chunk_sizes(chunk).iter().sum::<usize>())
            .sum();
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
    pub fn runs(&self) -> &'a [StreamRun] {
        self.layout.runs
    }

    /// The tables that runs name.
    #[must_use]
    pub fn tables(&self) -> &'a [StreamTable] {
        self.layout.tables
    }

    /// Codes of a row.
    #[must_use]
    pub fn per_row(&self) -> usize {
        self.layout.per_row
    }

    /// Bytes of the words and of the outliers of a chunk.
    fn chunk_sizes(&self, chunk: usize) -> [usize; 2] {
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
    pub fn chunk(&self, index: usize) -> StreamChunk<'a> {
        assert!(index < self.chunk_count(), "chunk {index} of {}", self.chunk_count());
        let start: usize = (0..index).map(|i| self.chunk_sizes(i).iter().sum::<usize>()).sum();
        let [words, outliers] = self.chunk_sizes(index);
        let (words, rest) = self.bytes[start..].split_at(words);
        let tokens = (self.layout.tokens - index * CHUNK_TOKENS).min(CHUNK_TOKENS);
        StreamChunk { tokens, words, outliers: &rest[..outliers] }
    }

    /// Writes the codes of a chunk as rows `[tokens, per_row]`; positions without a run stay as
    /// they are. Outliers are left to the caller.
    ///
    /// # Panics
    /// When there is no such chunk, or `rows` has another length.
    ///
    /// # Errors
    /// When the chunk has more words than its streams take.
    pub fn decode_chunk(&self, chunk: usize, rows: &mut [u16]) -> Result<(), PageError> {
        let StreamLayout { side, per_row, runs, tables, .. } = self.layout;
        let StreamChunk { tokens, words, .. } = self.chunk(chunk);
        assert_eq!(rows.len(), tokens * per_row, "decode: rows");
        let (words, mut next) = (words.as_chunks::<2>().0, 0);
        let (mut held, mut filled) = ([0u32; STREAMS], [0u32; STREAMS]);
        for step in quad_steps(side, tokens, runs) {
            let table = &tables[step.table];
            let (batch, need) = table.batch_size();
            let (group, raw) = (table.codes_per_symbol(), table.raw_bits());
            for first in (0..QUAD).step_by(batch * group) {
                for stream in 0..STREAMS {
                    let count = step.quad_codes_count(stream);
                    if count <= first {
                        continue;
                    }
                    let (mut bits, mut left) = (held[stream], filled[stream]);
                    if left < need {
                        let word = words.get(next).map_or(0, |word| u16::from_le_bytes(*word));
                        bits |= u32::from(word) << left;
                        left += WORD_BITS;
                        next += 1;
                    }
                    for at in (first..count.min(first + batch * group)).step_by(group) {
                        let (symbol, length) = table.huffman.decode_first(bits);
                        let mut codes = table.grouping.symbol_codes(symbol);
                        bits >>= length;
                        codes[0] |= (bits & ((1 << raw) - 1)) as u16;
                        bits >>= raw;
                        left -= length + raw;
                        for (index, code) in (at..count).zip(&codes[..group]) {
                            rows[step.code_index(stream, index, per_row)] = *code;
                        }
                    }
                    (held[stream], filled[stream]) = (bits, left);
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
    pub fn chunk_outliers(
        &self,
        chunk: &StreamChunk<'a>,
    ) -> impl Iterator<Item = Result<CodeOutlier, PageError>> + use<'a> {
        let (tokens, per_row) = (chunk.tokens, self.layout.per_row);
        outlier::read_outliers(chunk.outliers).map(move |(place, rest)| {
            let rest = rest.ok_or(PageError::Payload("it ends inside an outlier"))?;
            let (token, position) = (place / per_row, place % per_row);
            if token >= tokens {
                return Err(PageError::Payload("an outlier lies outside its chunk"));
            }
            Ok(CodeOutlier { token, position, rest })
        })
    }
}
