//! Codes to words, in two passes; whole chunks by `whole.rs`.
//!
//! When a stream takes a word depends on the lengths of codes alone. The first pass keeps the words
//! of each stream apart and notes who takes one at each top-up; the second hands them out in that
//! order. So sixteen streams move together, and loops over them become vector instructions.

use super::whole::WholeChunk;
use super::{CodeRows, CodeTables, RunTable};
use super::{QUAD, QuadStep, STREAMS, StreamRun, StreamTable, WORD_BITS, quad_steps};
use crate::simd::dispatch_simd;
use kvd_core::Side;
use pulp::{Simd, WithSimd};

/// Bytes of a word, and of a stream's reservoir.
const WORD_BYTES: usize = 2;
const HELD_BYTES: usize = 8;

/// The symbols of a batch of each stream: what lies under one top-up.
#[derive(Default)]
struct SymbolBatch {
    bits: [u32; STREAMS],
    lengths: [u32; STREAMS],
}

/// Units of the symbols of a batch, those of all streams side by side.
type StreamUnits = [[u32; STREAMS]; QUAD];

/// The bits of all streams.
struct StreamWriter {
    held: [u64; STREAMS],
    filled: [u64; STREAMS],
    /// Upper bound of the bits that any stream holds.
    filled_most: u32,
    /// Bits that a decoder has loaded and not used.
    ready: [u32; STREAMS],
    /// Who takes a word, by top-up; stream 0 is the lowest bit.
    loads: Vec<u16>,
    /// Stream after stream, `stream_bytes` each; zeros beyond what is written.
    words: Vec<u8>,
    stream_bytes: usize,
    /// Where the next word of each stream goes.
    next: [usize; STREAMS],
}

impl StreamWriter {
    /// For streams of `codes` codes at most.
    fn new(codes: usize) -> Self {
        // No code has more bits than a word; a reservoir is written whole.
        let stream_bytes = codes * WORD_BYTES + 2 * HELD_BYTES;
        Self {
            held: [0; STREAMS],
            filled: [0; STREAMS],
            filled_most: 0,
            ready: [0; STREAMS],
            loads: Vec::with_capacity(codes),
            words: vec![0; STREAMS * stream_bytes],
            stream_bytes,
            next: std::array::from_fn(|stream| stream * stream_bytes),
        }
    }

    /// Adds a batch of at most `need` bits to the first `active` streams; the others have none.
    #[inline(always)]
    fn push(&mut self, batch: &SymbolBatch, need: u32, active: usize) {
        if self.filled_most + need >= u64::BITS {
            self.flush_words();
        }
        self.filled_most += need;
        let mut load = 0;
        for stream in 0..STREAMS {
            let need = if stream < active { need } else { 0 };
            let short = u32::from(self.ready[stream] < need);
            self.ready[stream] = self.ready[stream] + WORD_BITS * short - batch.lengths[stream];
            load |= short << stream;
        }
        self.loads.push(load as u16);
        for stream in 0..STREAMS {
            self.held[stream] |= u64::from(batch.bits[stream]) << self.filled[stream];
            self.filled[stream] += u64::from(batch.lengths[stream]);
        }
    }

    /// Writes whole words; less than one is left in a reservoir.
    #[inline(always)]
    fn flush_words(&mut self) {
        for (stream, next) in self.next.iter_mut().enumerate() {
            self.words[*next..][..HELD_BYTES].copy_from_slice(&self.held[stream].to_le_bytes());
            *next += self.filled[stream] as usize / WORD_BITS as usize * WORD_BYTES;
        }
        let rest = u64::from(WORD_BITS) - 1;
        for (held, filled) in self.held.iter_mut().zip(&mut self.filled) {
            *held >>= *filled & !rest;
            *filled &= rest;
        }
        self.filled_most = WORD_BITS - 1;
    }

    /// Appends the words in the order in which a decoder loads them; returns how many.
    #[inline(always)]
    fn hand_out(mut self, out: &mut Vec<u8>) -> usize {
        self.flush_words();
        let words: u32 = self.loads.iter().map(|mask| mask.count_ones()).sum();
        let start = out.len();
        out.resize(start + words as usize * WORD_BYTES, 0);
        let mut at: [usize; STREAMS] = std::array::from_fn(|stream| stream * self.stream_bytes);
        let mut to = out[start..].as_chunks_mut::<WORD_BYTES>().0.iter_mut();
        for mask in &self.loads {
            let mut left = *mask;
            while left != 0 {
                let at = &mut at[left.trailing_zeros() as usize % STREAMS];
                let (Some(to), Some(word)) = (to.next(), self.words[*at..].first_chunk()) else {
                    break;
                };
                *to = *word;
                *at += WORD_BYTES;
                left &= left - 1;
            }
        }
        // Beyond the end a decoder reads zeros.
        let used = out[start..].as_chunks::<WORD_BYTES>().0;
        let used = used.iter().rposition(|word| *word != [0; 2]).map_or(0, |last| last + 1);
        out.truncate(start + used * WORD_BYTES);
        used
    }
}

/// Where the codes of a batch lie among those of a chunk.
#[derive(Clone, Copy)]
struct CodeIndices {
    /// The first code of stream 0.
    first: usize,
    /// From stream to stream.
    stream: usize,
    /// From code to code.
    code: usize,
}

/// Appends the words of a chunk of rows `[tokens, per_row]`; returns how many. `rest` is told the
/// places of codes that have no symbol, and what is missing of them.
pub(crate) fn append_chunk(
    side: Side,
    coding: CodeTables<'_>,
    codes: CodeRows<'_>,
    out: &mut Vec<u8>,
    rest: &mut impl FnMut(usize, i32),
) -> usize {
    let CodeRows { rows, per_row } = codes;
    let CodeTables { runs, tables } = coding;
    let whole = WholeChunk { side, rows, per_row };
    if whole.is_whole(runs, tables) {
        let run = &runs[0];
        return whole.append_words(RunTable { run, table: &tables[run.table] }, out);
    }
    dispatch_simd(ChunkEncoder { side, runs, tables, rows, per_row, out, rest })
}

/// A chunk, step by step.
pub(super) struct ChunkEncoder<'a, F> {
    pub(super) side: Side,
    pub(super) runs: &'a [StreamRun],
    pub(super) tables: &'a [StreamTable],
    pub(super) rows: &'a [u16],
    pub(super) per_row: usize,
    pub(super) out: &'a mut Vec<u8>,
    pub(super) rest: &'a mut F,
}

impl<F: FnMut(usize, i32)> WithSimd for ChunkEncoder<'_, F> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        let Self { side, runs, tables, rows, per_row, out, rest } = self;
        let tokens = rows.len() / per_row;
        let positions: usize = runs.iter().map(|run| run.len).sum();
        let mut streams = StreamWriter::new(QUAD * positions);
        for step in quad_steps(side, tokens, runs) {
            let table = &tables[step.table];
            let (batch, need) = table.batch_size();
            let width = batch * table.codes_per_symbol();
            let mut first = 0;
            while first < QUAD {
                let [active, whole] = step.stream_counts(first, width);
                if active == 0 {
                    break;
                }
                let mut units = StreamUnits::default();
                look_up(table, rows, step.code_indices(first, per_row), whole, &mut units);
                for stream in whole..active {
                    let (codes, count) = step.quad_codes(stream, first, CodeRows { rows, per_row });
                    look_up_part(table, &codes[..count.min(width)], stream, &mut units);
                }
                let (symbols, flags) = join_symbols(&units[..batch]);
                if flags & StreamTable::SUBSTITUTED != 0 {
                    for stream in 0..active {
                        let (codes, count) =
                            step.quad_codes(stream, first, CodeRows { rows, per_row });
                        report_missing(table, &codes[..count.min(width)], |index, missing| {
                            rest(step.code_index(stream, first + index, per_row), missing);
                        });
                    }
                }
                streams.push(&symbols, need, active);
                first += width;
            }
        }
        streams.hand_out(out)
    }
}

impl QuadStep {
    /// How many streams have a code `first` of their quad, and how many `width` from there.
    fn stream_counts(&self, first: usize, width: usize) -> [usize; 2] {
        [first + 1, first + width].map(|codes| match self.side {
            Side::Key if codes > self.len => 0,
            Side::Key => self.tokens.saturating_sub(self.token).min(STREAMS),
            Side::Value => (self.tokens + QUAD).saturating_sub(codes) / QUAD,
        })
    }

    fn code_indices(&self, index: usize, per_row: usize) -> CodeIndices {
        let first = self.code_index(0, index, per_row);
        let stream = self.code_index(1, index, per_row) - first;
        CodeIndices { first, stream, code: self.code_index(0, index + 1, per_row) - first }
    }

    /// The codes of a stream's quad from `first` on.
    fn quad_codes(&self, stream: usize, first: usize, codes: CodeRows<'_>) -> ([u16; QUAD], usize) {
        let CodeRows { rows, per_row } = codes;
        let count = self.quad_codes_count(stream) - first;
        let mut codes = [0; QUAD];
        for (index, code) in codes[..count].iter_mut().enumerate() {
            *code = rows[self.code_index(stream, first + index, per_row)];
        }
        (codes, count)
    }
}

/// Looks up the symbols of the first streams; each has a code.
fn look_up(
    table: &StreamTable,
    rows: &[u16],
    places: CodeIndices,
    streams: usize,
    units: &mut StreamUnits,
) {
    // Lets the compiler know how many codes and symbols there are.
    match (table.codes_per_symbol(), table.batch) {
        (4, 1) => look_up_in::<4, 1>(table, rows, places, streams, units),
        (2, 2) => look_up_in::<2, 2>(table, rows, places, streams, units),
        (2, 1) => look_up_in::<2, 1>(table, rows, places, streams, units),
        (1, 4) => look_up_in::<1, 4>(table, rows, places, streams, units),
        (1, 2) => look_up_in::<1, 2>(table, rows, places, streams, units),
        _ => look_up_in::<1, 1>(table, rows, places, streams, units),
    }
}

/// A separate function, so that its variables stay in registers: most of the time goes here.
#[inline(never)]
fn look_up_in<const GROUP: usize, const BATCH: usize>(
    table: &StreamTable,
    rows: &[u16],
    places: CodeIndices,
    streams: usize,
    units: &mut StreamUnits,
) {
    let (levels, of_symbol) = (usize::from(table.grouping.levels), &table.units[..]);
    for stream in 0..streams.min(STREAMS) {
        let mut place = places.first + stream * places.stream;
        for units in units.iter_mut().take(BATCH) {
            let mut symbol = 0;
            let mut weight = 1;
            for _ in 0..GROUP {
                symbol += usize::from(rows[place]) * weight;
                weight *= levels;
                place += places.code;
            }
            units[stream] = of_symbol[symbol];
        }
    }
}

/// Looks up the symbols of one stream, which may lack codes.
#[cold]
fn look_up_part(table: &StreamTable, codes: &[u16], stream: usize, units: &mut StreamUnits) {
    for (units, codes) in units.iter_mut().zip(codes.chunks(table.codes_per_symbol())) {
        units[stream] = table.units[table.unit_of(codes)];
    }
}

/// Joins the symbols of each stream, and the flags of all.
#[inline(always)]
fn join_symbols(units: &[[u32; STREAMS]]) -> (SymbolBatch, u32) {
    let (mut batch, mut flags) = (SymbolBatch::default(), 0);
    for units in units {
        for (unit, (bits, length)) in
            units.iter().zip(batch.bits.iter_mut().zip(&mut batch.lengths))
        {
            flags |= unit;
            *bits |= (unit & 0xFFFF) << *length;
            *length += unit >> StreamTable::LENGTH_AT & 0xFF;
        }
    }
    (batch, flags)
}

/// Tells what each of `codes` lacks, by its index.
#[cold]
fn report_missing(table: &StreamTable, codes: &[u16], mut rest: impl FnMut(usize, i32)) {
    for (at, codes) in codes.chunks(table.codes_per_symbol()).enumerate() {
        let wanted = table.grouping.symbol_from_codes(codes);
        let symbol = table.coded_symbol(wanted);
        if symbol == wanted {
            continue;
        }
        let coded = table.grouping.symbol_codes(symbol);
        for (index, (code, coded)) in codes.iter().zip(coded).enumerate() {
            let code = code >> table.raw_bits() << table.raw_bits();
            rest(at * table.codes_per_symbol() + index, i32::from(code) - i32::from(coded));
        }
    }
}
