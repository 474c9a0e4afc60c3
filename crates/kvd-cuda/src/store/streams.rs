//! Runs and tables of a head's Huffman codes in the layout of
//! `kernels/include/kvd/store/huffman.cuh`, and the room that its codes may take.

use super::steps;
use crate::kernel_choice::COPY_BYTES;
use kvd_codec::{CHUNK_TOKENS, Grid, StreamRun, StreamTable};
use kvd_core::Side;

/// Codes of a quad.
const QUAD: usize = 4;
/// Lanes of a chunk.
const LANES: usize = 16;
/// Words of a head's runs, before the first and of each.
const HEAD_WORDS: usize = 4;
const RUN_WORDS: usize = 12;
/// Bits and bytes of a word.
const WORD_BITS: usize = 16;
const WORD_BYTES: usize = 2;

/// Constants that store kernels read of one layer, and the ranges of them that heads may share.
#[derive(Default)]
pub(super) struct StoreConstants {
    pub(super) bytes: Vec<u8>,
    shared: Vec<(usize, usize)>,
}

impl StoreConstants {
    /// The offset of words, appended where no equal ones are known.
    fn share_words(&mut self, words: &[u32]) -> u32 {
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let equal = |(start, len): &&(usize, usize)| self.bytes[*start..][..*len] == words[..];
        if let Some((start, _)) = self.shared.iter().find(equal) {
            return *start as u32;
        }
        steps::align_sixteen(&mut self.bytes);
        let start = self.bytes.len();
        self.shared.push((start, words.len()));
        self.bytes.extend(words);
        start as u32
    }
}

/// The Huffman codes of one head of one side.
pub(super) struct StoreStreams<'a> {
    pub(super) side: Side,
    pub(super) dim: usize,
    pub(super) runs: &'a [StreamRun],
    pub(super) tables: &'a [StreamTable],
    /// Version of the table in page headers.
    pub(super) version: u16,
    pub(super) grid: Option<&'a Grid>,
}

/// Sizes of a head's Huffman codes that are known before they are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamSizes {
    side: Side,
    /// Offset of runs and tables.
    pub(super) codes: u64,
    /// As in [`HeadStreams`]; none of a grid.
    pub(super) version: Option<u16>,
    /// Bits of a lane at most, of one token of keys, or four of values.
    lane_bits: usize,
}

/// Bytes of so many runs and what is before them, whole pieces.
pub(super) fn run_bytes(runs: usize) -> usize {
    (4 * (HEAD_WORDS + RUN_WORDS * runs)).next_multiple_of(COPY_BYTES)
}

/// Bytes of a table of so many codes, each its own symbol, whole pieces.
pub(super) fn unit_bytes(codes: usize) -> usize {
    (4 * codes).next_multiple_of(COPY_BYTES)
}

impl StoreStreams<'_> {
    /// Appends runs and tables.
    pub(super) fn append_tables(&self, constants: &mut StoreConstants) -> StreamSizes {
        let (mut quads, mut lane_bits, mut words) = (0, 0, Vec::new());
        for run in self.runs {
            let table = &self.tables[run.table];
            let (batch, need) = table.batch_size();
            let of_run = match self.side {
                Side::Key => run.len.div_ceil(QUAD),
                Side::Value => run.len,
            };
            quads += of_run;
            lane_bits += of_run * QUAD / (batch * table.codes_per_symbol()) * need as usize;
            let substitutes: Vec<u32> = table.substitutes().iter().map(|s| (*s).into()).collect();
            let substitutes =
                if substitutes.is_empty() { 0 } else { constants.share_words(&substitutes) };
            words.extend([run.first, run.len, quads].map(|x| x as u32));
            words.extend([
                constants.share_words(table.symbol_units()),
                substitutes,
                table.codes_per_symbol() as u32,
            ]);
            words.extend([table.level_count(), table.missing_code()].map(u32::from));
            words.extend([table.raw_bits(), (batch * table.codes_per_symbol()) as u32, need, 0]);
        }
        let step = self.grid.map_or(0.0, Grid::step);
        let cuts = self.grid.map_or(0, |grid| {
            let cut =
                |channel| (grid.bias(channel) | grid.largest_code(channel) << 16).cast_unsigned();
            constants.share_words(&(0..self.dim).map(cut).collect::<Vec<_>>())
        });
        steps::align_sixteen(&mut constants.bytes);
        let codes = constants.bytes.len() as u64;
        let head = [self.runs.len() as u32, step.to_bits(), cuts, 0];
        constants.bytes.extend(head.into_iter().chain(words).flat_map(u32::to_le_bytes));
        let version = self.grid.is_none().then_some(self.version);
        StreamSizes { side: self.side, codes, version, lane_bits }
    }
}

impl StreamSizes {
    /// Bytes of the lengths of a page's chunks.
    pub(super) fn length_bytes(&self, tokens: usize) -> usize {
        let words = if self.version.is_none() { 2 } else { 1 };
        words * WORD_BYTES * tokens.div_ceil(CHUNK_TOKENS)
    }

    /// Bytes of a page's words at most, outliers apart.
    pub(super) fn word_bytes(&self, tokens: usize) -> usize {
        let words = |tokens: usize| {
            let blocks = match self.side {
                Side::Key => tokens.div_ceil(LANES),
                Side::Value => 1,
            };
            LANES * (blocks * self.lane_bits).div_ceil(WORD_BITS)
        };
        let chunks = (0..tokens).step_by(CHUNK_TOKENS);
        WORD_BYTES * chunks.map(|first| words((tokens - first).min(CHUNK_TOKENS))).sum::<usize>()
    }
}
