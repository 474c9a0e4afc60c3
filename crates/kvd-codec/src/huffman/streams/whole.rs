//! Codes to words where every stream has a code at every place and all codes are symbols of one
//! table: chunks of 64 tokens under tables that are built from the blocks themselves. Machines with
//! registers of 512 bits do it by `registers.rs` where codes are few.
//!
//! A stream's bits depend on its own codes alone, so that streams go one after the other and their
//! reservoirs stay in registers. Who takes a word at a top-up follows from the lengths, which are
//! kept by top-up: one pass makes masks of them, one the order of streams, one hands words out.

use super::RunTable;
use super::{QUAD, STREAMS, StreamRun, StreamTable, WORD_BITS};
use crate::simd::dispatch_simd;
use kvd_core::Side;
use pulp::{Simd, WithSimd};

/// Bytes of a word, and of a stream's reservoir.
const WORD_BYTES: usize = 2;
const HELD_BYTES: usize = 8;
/// Where the length of a unit begins.
const LENGTH_AT: u32 = StreamTable::LENGTH_AT;

/// A chunk, and its rows of `per_row` codes.
#[derive(Clone, Copy)]
pub(super) struct WholeChunk<'a> {
    pub(super) side: Side,
    pub(super) rows: &'a [u16],
    pub(super) per_row: usize,
}

/// One stream's bits that are not yet words.
#[derive(Default)]
struct BitWriter {
    held: u64,
    filled: u32,
    /// Where its next word goes.
    next: usize,
}

impl BitWriter {
    /// Adds the bits of a top-up, at most a word.
    #[inline(always)]
    fn push(&mut self, bits: u32, length: u32) {
        self.held |= u64::from(bits) << (self.filled % u64::BITS);
        self.filled += length;
    }

    /// Writes all bits, and moves on by whole words; less than one is left.
    #[inline(always)]
    fn flush_words(&mut self, words: &mut [u8]) {
        if let Some(to) = words.get_mut(self.next..self.next + HELD_BYTES) {
            to.copy_from_slice(&self.held.to_le_bytes());
        }
        let whole = self.filled / WORD_BITS;
        self.next += whole as usize * WORD_BYTES;
        self.held >>= whole * WORD_BITS % u64::BITS;
        self.filled %= WORD_BITS;
    }
}

/// The places of a stream's quads, one after the other.
struct QuadCursor {
    place: usize,
    step: usize,
    /// From here on the way goes back.
    end: usize,
    back: usize,
}

impl QuadCursor {
    #[inline(always)]
    fn advance_quad(&mut self) {
        self.place += self.step;
        if self.place >= self.end {
            self.place -= self.back;
        }
    }
}

impl WholeChunk<'_> {
    /// Whether every stream has four symbols in every step, and those are of one table.
    pub(super) fn is_whole(&self, runs: &[StreamRun], tables: &[StreamTable]) -> bool {
        let [run] = runs else { return false };
        let table = &tables[run.table];
        let tokens = self.rows.len() / self.per_row;
        let streams_are_full = match self.side {
            Side::Key => tokens.is_multiple_of(STREAMS) && run.len.is_multiple_of(QUAD),
            Side::Value => tokens == QUAD * STREAMS,
        };
        streams_are_full && table.codes_per_symbol() == 1 && table.substitutes.is_empty()
    }

    /// Appends the words and returns how many.
    pub(super) fn append_words(self, of: RunTable<'_>, out: &mut Vec<u8>) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Some(registers) = super::avx512::Avx512Encoder::new(self, of, out) {
            return registers.append_words();
        }
        self.stream_by_stream(of, out)
    }

    /// As [`WholeChunk::append_words`], on any machine.
    pub(super) fn stream_by_stream(self, of: RunTable<'_>, out: &mut Vec<u8>) -> usize {
        dispatch_simd(StreamByStream { chunk: self, of, out })
    }

    #[inline(always)]
    fn append_streams(self, of: RunTable<'_>, out: &mut Vec<u8>) -> usize {
        let RunTable { run, table } = of;
        let (batch, need) = table.batch_size();
        let codes = run.len * self.rows.len() / self.per_row / STREAMS;
        let stream_bytes = codes * WORD_BYTES + HELD_BYTES;
        let mut words = vec![0; STREAMS * stream_bytes];
        let mut lengths = vec![[0; STREAMS]; codes / batch];
        for (stream, words) in words.chunks_exact_mut(stream_bytes).enumerate() {
            let from = (self, self.quad_cursor(stream, run));
            // Lets the compiler know how many symbols there are.
            match (batch, table.pair_table()) {
                (2, Some(pairs)) => {
                    encode_by_pairs::<2>(from, pairs, (words, &mut lengths, stream))
                }
                (4, Some(pairs)) => {
                    encode_by_pairs::<1>(from, pairs, (words, &mut lengths, stream))
                }
                (4, None) => {
                    encode_by_codes::<1>(from, &table.units, (words, &mut lengths, stream))
                }
                (2, None) => {
                    encode_by_codes::<2>(from, &table.units, (words, &mut lengths, stream))
                }
                _ => encode_by_codes::<4>(from, &table.units, (words, &mut lengths, stream)),
            }
        }
        hand_out(&word_masks(&lengths, need as u8), &words, stream_bytes, out)
    }

    /// Where the quads of a stream lie.
    #[inline(always)]
    fn quad_cursor(&self, stream: usize, run: &StreamRun) -> QuadCursor {
        let Self { side, rows, per_row } = *self;
        match side {
            Side::Key => QuadCursor {
                place: stream * per_row + run.first,
                step: STREAMS * per_row,
                end: rows.len(),
                back: rows.len() - QUAD,
            },
            Side::Value => {
                let place = QUAD * stream * per_row + run.first;
                QuadCursor { place, step: 1, end: usize::MAX, back: 0 }
            }
        }
    }

    /// The codes of a quad.
    #[inline(always)]
    fn quad_codes(&self, place: usize) -> [u16; QUAD] {
        let rows = &self.rows[place..];
        if self.side == Side::Key {
            return rows.first_chunk().copied().unwrap_or_default();
        }
        std::array::from_fn(|row| rows[row * self.per_row])
    }
}

/// [`WholeChunk::stream_by_stream`].
struct StreamByStream<'a> {
    chunk: WholeChunk<'a>,
    of: RunTable<'a>,
    out: &'a mut Vec<u8>,
}

impl WithSimd for StreamByStream<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        self.chunk.append_streams(self.of, self.out)
    }
}

/// Where a stream's words and the lengths of its top-ups go, and which stream it is.
type To<'a> = (&'a mut [u8], &'a mut [[u8; STREAMS]], usize);

/// A stream, by a table of pairs, `TOP_UPS` a quad. By itself, so that what it uses stays in
/// registers: most of the time goes here and in [`encode_by_codes`].
#[inline(never)]
fn encode_by_pairs<const TOP_UPS: usize>(
    (whole, mut walk): (WholeChunk<'_>, QuadCursor),
    pairs: &PairTable,
    (words, lengths, stream): To<'_>,
) {
    let (units, levels, stream) = (&pairs.units[..], pairs.levels, stream % STREAMS);
    let mut writer = BitWriter::default();
    for lengths in lengths.as_chunks_mut::<TOP_UPS>().0 {
        let [a, b, c, d] = whole.quad_codes(walk.place).map(usize::from);
        walk.advance_quad();
        let (low, high) = (units[a + b * levels], units[c + d * levels]);
        let [low_bits, high_bits] = [low, high].map(|unit| unit >> LENGTH_AT);
        writer.push(low & 0xFFFF, low_bits);
        writer.push(high & 0xFFFF, high_bits);
        writer.flush_words(words);
        lengths[0][stream] = (if TOP_UPS == 1 { low_bits + high_bits } else { low_bits }) as u8;
        if TOP_UPS > 1 {
            lengths[TOP_UPS - 1][stream] = high_bits as u8;
        }
    }
}

/// A stream, code by code.
#[inline(never)]
fn encode_by_codes<const TOP_UPS: usize>(
    (whole, mut walk): (WholeChunk<'_>, QuadCursor),
    units: &[u32],
    (words, lengths, stream): To<'_>,
) {
    let stream = stream % STREAMS;
    let mut writer = BitWriter::default();
    for lengths in lengths.as_chunks_mut::<TOP_UPS>().0 {
        let codes = whole.quad_codes(walk.place);
        walk.advance_quad();
        for (part, lengths) in lengths.iter_mut().enumerate() {
            let batch = QUAD / TOP_UPS;
            let (mut bits, mut length) = (0, 0);
            for code in &codes[part * batch..][..batch] {
                let unit = units[usize::from(*code)];
                bits |= (unit & 0xFFFF) << length;
                length += unit >> LENGTH_AT;
            }
            writer.push(bits, length);
            lengths[stream] = length as u8;
            if part % 2 == 1 || part + 1 == TOP_UPS {
                writer.flush_words(words);
            }
        }
    }
}

/// By top-up, a mask of who takes a word; stream 0 is the lowest bit.
#[inline(always)]
fn word_masks(lengths: &[[u8; STREAMS]], need: u8) -> Vec<u16> {
    /// Brings the lowest bits of eight bytes into the highest one.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    // Bits that a decoder has loaded and not used.
    let mut ready = [0u8; STREAMS];
    let mut masks = vec![0; lengths.len()];
    for (mask, lengths) in masks.iter_mut().zip(lengths) {
        let mut short = [0u8; STREAMS];
        for stream in 0..STREAMS {
            short[stream] = u8::from(ready[stream] < need);
            ready[stream] = ready[stream] + WORD_BITS as u8 * short[stream] - lengths[stream];
        }
        let halves: [u64; 2] = bytemuck::cast(short);
        let [low, high] = halves.map(|half| u64::from_le(half).wrapping_mul(GATHER) >> 56);
        *mask = (low | high << 8) as u16;
    }
    masks
}

/// By mask of eight streams: which they are, the first lowest.
static ORDER: [u64; 256] = {
    let mut order = [0; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut stream, mut at) = (0, 0);
        while stream < 8 {
            if mask >> stream & 1 == 1 {
                order[mask] |= stream << (8 * at);
                at += 1;
            }
            stream += 1;
        }
        mask += 1;
    }
    order
};

/// Appends the words in the order in which a decoder loads them; returns how many.
#[inline(always)]
fn hand_out(masks: &[u16], words: &[u8], stream_bytes: usize, out: &mut Vec<u8>) -> usize {
    let count: usize = masks.iter().map(|mask| mask.count_ones() as usize).sum();
    let mut order = vec![0u8; count + STREAMS];
    let mut to = 0;
    for mask in masks {
        for (mask, base) in [(mask & 0xFF, 0), (mask >> 8, u64::from_le_bytes([8; 8]))] {
            let streams = ORDER[usize::from(mask)] + base;
            order[to..][..8].copy_from_slice(&streams.to_le_bytes());
            to += mask.count_ones() as usize;
        }
    }
    let start = out.len();
    out.resize(start + count * WORD_BYTES, 0);
    let mut at: [usize; STREAMS] = std::array::from_fn(|stream| stream * stream_bytes);
    for (to, stream) in out[start..].as_chunks_mut::<WORD_BYTES>().0.iter_mut().zip(&order) {
        let at = &mut at[usize::from(*stream) % STREAMS];
        // A stream has no more words than room for them.
        if let Some(word) = words.get(*at..).and_then(|words| words.first_chunk()) {
            *to = *word;
        }
        *at += WORD_BYTES;
    }
    // Beyond the end a decoder reads zeros.
    let used = out[start..].as_chunks::<WORD_BYTES>().0;
    let used = used.iter().rposition(|word| *word != [0; 2]).map_or(0, |last| last + 1);
    out.truncate(start + used * WORD_BYTES);
    used
}

/// Codes of pairs of single codes, for tables of few codes without substitutes.
#[derive(Clone, Debug)]
pub(super) struct PairTable {
    levels: usize,
    /// By first code and, `levels` times that, second: as [`StreamTable::symbol_units`].
    units: Vec<u32>,
}

impl PairTable {
    /// Codes that a table of pairs is made for; it then takes 16 KiB at most.
    const LEVELS_MAX: usize = 64;

    /// None where a pair need not fit a word, or symbols lack a code.
    pub(super) fn new(table: &StreamTable) -> Option<Self> {
        let units = &table.units;
        let few = units.len() <= Self::LEVELS_MAX && table.substitutes.is_empty();
        if table.codes_per_symbol() != 1 || table.batch < 2 || !few {
            return None;
        }
        let joined = |index: usize| {
            let (low, high) = (units[index % units.len()], units[index / units.len()]);
            let length = low >> LENGTH_AT;
            (low | (high & 0xFFFF) << length) + (high >> LENGTH_AT << LENGTH_AT)
        };
        let pairs = (0..units.len() * units.len()).map(joined).collect();
        Some(Self { levels: units.len(), units: pairs })
    }
}
