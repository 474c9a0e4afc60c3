//! Whole chunks ([`WholeChunk`]) under tables of up to 32 short codes, in registers of 512 bits:
//! one permutation looks up the codes of sixteen streams, two of each.
//!
//! Codes of some steps are turned into their order first. Streams have reservoirs of 32 bits, all
//! in one register, and after each top-up those that have a whole word give it away. A word's place
//! among those of the chunk is known before the word is: a stream gets it when a decoder would ask
//! for the word, and has two at most that it has not filled. Words leave together with their
//! places, squeezed, and are put there when a part of the steps is done.

use super::RunTable;
use super::whole::WholeChunk;
use super::{CHUNK_TOKENS, QUAD, STREAMS, StreamRun, StreamTable, WORD_BITS};
use crate::simd;
use core::arch::x86_64::__m512i;
use kvd_core::Side;
use pulp::x86::V4;
use pulp::{Simd, WithSimd, cast};

/// Symbols of a table that one register holds, and codes of a row that one holds.
const SYMBOLS: usize = 32;
/// Quads of a register of codes.
const REGISTER_QUADS: usize = 8;
/// Steps that are brought into order together: those of eight quads of a row, or of 32 positions.
const PART_STEPS: usize = 32;
/// Positions of a row that those steps cover, at most.
const PART_POSITIONS: usize = 32;
/// Words that streams may give away in a part.
const PART_WORDS: usize = PART_STEPS * 2 * STREAMS;
/// A quad of each stream.
type QuadRows = [[u16; QUAD]; STREAMS];

/// Appends the words of a whole chunk; returns how many.
pub(super) struct Avx512Encoder<'a> {
    by: V4,
    chunk: WholeChunk<'a>,
    run: &'a StreamRun,
    /// By code.
    bits: [u16; SYMBOLS],
    lengths: [u16; SYMBOLS],
    /// Symbols under a top-up, and the bits that they may take together.
    batch: (usize, u32),
    out: &'a mut Vec<u8>,
}

impl<'a> Avx512Encoder<'a> {
    /// None where no such registers are at hand, or the table does not fit into one.
    pub(super) fn new(
        chunk: WholeChunk<'a>,
        of: RunTable<'a>,
        out: &'a mut Vec<u8>,
    ) -> Option<Self> {
        let RunTable { run, table } = of;
        let (by, units, batch) = (simd::of_512_bits()?, &table.units, table.batch_size());
        let tokens = chunk.rows.len() / chunk.per_row;
        if units.len() > SYMBOLS || batch.0 < 2 || tokens > CHUNK_TOKENS {
            return None;
        }
        let [mut bits, mut lengths] = [[0; SYMBOLS]; 2];
        for (unit, (bits, length)) in units.iter().zip(bits.iter_mut().zip(&mut lengths)) {
            (*bits, *length) = (*unit as u16, (unit >> StreamTable::LENGTH_AT) as u16);
        }
        Some(Self { by, chunk, run, bits, lengths, batch, out })
    }

    pub(super) fn append_words(self) -> usize {
        Simd::vectorize(self.by, self)
    }
}

impl WithSimd for Avx512Encoder<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        match self.batch.0 {
            2 => self.append_steps::<2>(),
            _ => self.append_steps::<1>(),
        }
    }
}

impl Avx512Encoder<'_> {
    /// Words of steps of `TOP_UPS`.
    #[inline(always)]
    fn append_steps<const TOP_UPS: usize>(self) -> usize {
        let start = self.out.len();
        let mut words = WordWriter::new(self.by, self.batch.1);
        let mut log: WordLog = [0; PART_WORDS + STREAMS];
        let mut part = [QuadRows::default(); PART_STEPS];
        for at in (0..self.run.len).step_by(PART_POSITIONS) {
            let steps = match self.chunk.side {
                Side::Key => self.fill_key_steps(at, &mut part),
                Side::Value => self.fill_value_steps(at, &mut part),
            };
            for step in part.iter().take(steps) {
                let [first, last] = self.encode_pairs(step);
                if TOP_UPS == 1 {
                    words.push(self.join_pairs(first, last), &mut log);
                } else {
                    words.push(first, &mut log);
                    words.push(last, &mut log);
                }
            }
            words.hand_out(&log, start, self.out);
        }
        words.write_rest(&mut log, start, self.out)
    }

    /// Bits and lengths of the first two codes of each stream, and of the last two.
    #[inline(always)]
    fn encode_pairs(&self, step: &QuadRows) -> [(__m512i, __m512i); 2] {
        let coded = self.lengths.iter().filter(|length| **length > 0).count();
        debug_assert!(step.as_flattened().iter().all(|code| usize::from(*code) < coded));
        let [bits, lengths]: [__m512i; 2] = [cast(self.bits), cast(self.lengths)];
        let halves: [[u16; SYMBOLS]; 2] = bytemuck::cast(*step);
        let codes = (cast(halves[0]), cast(halves[1]));
        let tables = (bits, lengths);
        [self.encode_pair::<0>(codes, tables), self.encode_pair::<1>(codes, tables)]
    }

    /// Encodes two codes of each stream. It has no closures: a closure is compiled without these
    /// instructions, which then become calls.
    #[inline(always)]
    fn encode_pair<const PAIR: u32>(
        &self,
        (low, high): (__m512i, __m512i),
        (bits, lengths): (__m512i, __m512i),
    ) -> (__m512i, __m512i) {
        let (x, words) = (self.by.avx512f, self.by.avx512bw);
        let order: [u32; STREAMS] = std::array::from_fn(|stream| 2 * stream as u32 + PAIR);
        let codes = x._mm512_permutex2var_epi32(low, cast(order), high);
        let bits = words._mm512_permutexvar_epi16(codes, bits);
        let lengths = words._mm512_permutexvar_epi16(codes, lengths);
        let first = x._mm512_and_si512(lengths, splat_u32(0xFFFF));
        let second = x._mm512_sllv_epi32(x._mm512_srli_epi32::<16>(bits), first);
        let bits = x._mm512_or_si512(x._mm512_and_si512(bits, splat_u32(0xFFFF)), second);
        (bits, words._mm512_madd_epi16(lengths, splat_u32(0x1_0001)))
    }

    /// The bits of both, and how many.
    #[inline(always)]
    fn join_pairs(
        &self,
        first: (__m512i, __m512i),
        last: (__m512i, __m512i),
    ) -> (__m512i, __m512i) {
        let x = self.by.avx512f;
        let bits = x._mm512_or_si512(first.0, x._mm512_sllv_epi32(last.0, first.1));
        (bits, x._mm512_add_epi32(first.1, last.1))
    }

    /// Fills in the steps of some quads of keys, from position `at` of the run on, and counts them.
    #[inline(always)]
    fn fill_key_steps(&self, at: usize, part: &mut [QuadRows; PART_STEPS]) -> usize {
        let WholeChunk { rows, per_row, .. } = self.chunk;
        let quads = (self.run.len - at).min(PART_POSITIONS) / QUAD;
        let (first, blocks) = (self.run.first + at, rows.len() / per_row / STREAMS);
        if quads < REGISTER_QUADS {
            for (token, row) in rows.chunks_exact(per_row).enumerate() {
                let steps = part.iter_mut().skip(token / STREAMS).step_by(blocks);
                for (step, quad) in steps.zip(row[first..].as_chunks::<QUAD>().0).take(quads) {
                    step[token % STREAMS] = *quad;
                }
            }
            return quads * blocks;
        }
        for (index, rows) in rows.chunks_exact(REGISTER_QUADS * per_row).enumerate() {
            let (block, half) = (index / 2, index % 2);
            let mut streams = [splat_u32(0); REGISTER_QUADS];
            for (stream, row) in streams.iter_mut().zip(rows.chunks_exact(per_row)) {
                *stream = load_codes(&row[first..]);
            }
            for (quad, quads) in self.transpose_quads(streams).iter().enumerate() {
                let step = &mut part[(quad * blocks + block) % PART_STEPS];
                step.as_chunks_mut::<REGISTER_QUADS>().0[half] = cast(*quads);
            }
        }
        quads * blocks
    }

    /// Fills in the steps of some positions of values, from `at` of the run on, and counts them.
    #[inline(always)]
    fn fill_value_steps(&self, at: usize, part: &mut [QuadRows; PART_STEPS]) -> usize {
        let (x, words) = (self.by.avx512f, self.by.avx512bw);
        let WholeChunk { rows, per_row, .. } = self.chunk;
        let positions = (self.run.len - at).min(PART_POSITIONS);
        let first = self.run.first + at;
        if positions < PART_POSITIONS {
            for (stream, rows) in rows.chunks_exact(QUAD * per_row).enumerate() {
                for (position, step) in part.iter_mut().take(positions).enumerate() {
                    let code = |token: usize| rows[token * per_row + first + position];
                    step[stream % STREAMS] = std::array::from_fn(code);
                }
            }
            return positions;
        }
        for (half, rows) in rows.chunks_exact(REGISTER_QUADS * QUAD * per_row).enumerate() {
            // By stream; a register has the quads of two of every eight positions.
            let mut quads = [[splat_u32(0); REGISTER_QUADS]; 4];
            for (stream, rows) in rows.chunks_exact(QUAD * per_row).enumerate() {
                let (a, b) = (load_codes(&rows[first..]), load_codes(&rows[per_row + first..]));
                let rows = &rows[2 * per_row..];
                let (c, d) = (load_codes(&rows[first..]), load_codes(&rows[per_row + first..]));
                let ab = [words._mm512_unpacklo_epi16(a, b), words._mm512_unpackhi_epi16(a, b)];
                let cd = [words._mm512_unpacklo_epi16(c, d), words._mm512_unpackhi_epi16(c, d)];
                for side in 0..2 {
                    quads[2 * side][stream] = x._mm512_unpacklo_epi32(ab[side], cd[side]);
                    quads[2 * side + 1][stream] = x._mm512_unpackhi_epi32(ab[side], cd[side]);
                }
            }
            for (pair, quads) in quads.into_iter().enumerate() {
                for (index, quads) in self.transpose_quads(quads).into_iter().enumerate() {
                    let step = &mut part[index / 2 * 8 + 2 * pair + index % 2];
                    step.as_chunks_mut::<REGISTER_QUADS>().0[half] = cast(quads);
                }
            }
        }
        positions
    }

    /// Quad `j` of register `i` becomes quad `i` of register `j`.
    #[inline(always)]
    fn transpose_quads(&self, rows: [__m512i; REGISTER_QUADS]) -> [__m512i; REGISTER_QUADS] {
        let x = self.by.avx512f;
        let mut turned = rows;
        for odd in 0..2 {
            let mut pairs = [splat_u32(0); REGISTER_QUADS / 2];
            for (index, pair) in pairs.iter_mut().enumerate() {
                let (a, b) = (rows[2 * index], rows[2 * index + 1]);
                *pair = match odd {
                    0 => x._mm512_unpacklo_epi64(a, b),
                    _ => x._mm512_unpackhi_epi64(a, b),
                };
            }
            let [a, b, c, d] = pairs;
            let (even, even_last) =
                (x._mm512_shuffle_i64x2::<0x88>(a, b), x._mm512_shuffle_i64x2::<0x88>(c, d));
            let (other, other_last) =
                (x._mm512_shuffle_i64x2::<0xDD>(a, b), x._mm512_shuffle_i64x2::<0xDD>(c, d));
            turned[odd] = x._mm512_shuffle_i64x2::<0x88>(even, even_last);
            turned[2 + odd] = x._mm512_shuffle_i64x2::<0x88>(other, other_last);
            turned[4 + odd] = x._mm512_shuffle_i64x2::<0xDD>(even, even_last);
            turned[6 + odd] = x._mm512_shuffle_i64x2::<0xDD>(other, other_last);
        }
        turned
    }
}

/// Words and their places. By itself: the registers below would lie in memory beside it.
type WordLog = [u32; PART_WORDS + STREAMS];

/// The bits of all streams, and where they go.
struct WordWriter {
    by: V4,
    need: __m512i,
    /// Bits that are not yet a word, and how many.
    held: __m512i,
    filled: __m512i,
    /// Bits that a decoder has loaded and not used.
    ready: __m512i,
    /// Places of words, in the upper half: of the last one asked for by each stream, of the one
    /// before, and of those that are asked for next.
    newer: __m512i,
    older: __m512i,
    next: __m512i,
    /// Words asked for.
    taken: usize,
    /// Words in the log.
    given: usize,
}

impl WordWriter {
    #[inline(always)]
    fn new(by: V4, need: u32) -> Self {
        let zero = splat_u32(0);
        let next: [u32; STREAMS] = std::array::from_fn(|place| (place as u32) << WORD_BITS);
        Self {
            by,
            need: splat_u32(need),
            held: zero,
            filled: zero,
            ready: zero,
            newer: zero,
            older: zero,
            next: cast(next),
            taken: 0,
            given: 0,
        }
    }

    /// Adds the bits of a top-up, at most a word of each stream.
    #[inline(always)]
    fn push(&mut self, (bits, lengths): (__m512i, __m512i), log: &mut WordLog) {
        let x = self.by.avx512f;
        let word = splat_u32(WORD_BITS);
        let short = x._mm512_cmplt_epu32_mask(self.ready, self.need);
        let places = x._mm512_maskz_expand_epi32(short, self.next);
        self.older = x._mm512_mask_mov_epi32(self.older, short, self.newer);
        self.newer = x._mm512_mask_mov_epi32(self.newer, short, places);
        let asked = short.count_ones();
        self.next = x._mm512_add_epi32(self.next, splat_u32(asked << WORD_BITS));
        self.taken += asked as usize;
        self.ready = x._mm512_mask_add_epi32(self.ready, short, self.ready, word);
        self.ready = x._mm512_sub_epi32(self.ready, lengths);
        self.held = x._mm512_or_si512(self.held, x._mm512_sllv_epi32(bits, self.filled));
        self.filled = x._mm512_add_epi32(self.filled, lengths);
        self.log_words(x._mm512_test_epi32_mask(self.filled, word), log);
        let given = x._mm512_and_si512(self.filled, word);
        self.held = x._mm512_srlv_epi32(self.held, given);
        self.filled = x._mm512_sub_epi32(self.filled, given);
    }

    /// Notes a word of each of these streams, and its place.
    #[inline(always)]
    fn log_words(&mut self, streams: u16, log: &mut WordLog) {
        let x = self.by.avx512f;
        // Bits in words that were asked for and are not all there.
        let owed = x._mm512_add_epi32(self.ready, self.filled);
        let both = x._mm512_cmpge_epu32_mask(owed, splat_u32(2 * WORD_BITS));
        let places = x._mm512_mask_blend_epi32(both, self.newer, self.older);
        let words = x._mm512_and_si512(self.held, splat_u32(0xFFFF));
        let words = x._mm512_maskz_compress_epi32(streams, x._mm512_or_si512(words, places));
        if let Some(to) = log.get_mut(self.given..self.given + STREAMS) {
            to.copy_from_slice(&cast::<_, [u32; STREAMS]>(words));
        }
        self.given += streams.count_ones() as usize;
    }

    /// Puts words to their places; the first place is at `start`.
    #[inline(always)]
    fn hand_out(&mut self, log: &WordLog, start: usize, out: &mut Vec<u8>) {
        out.resize(start + size_of::<u16>() * self.taken, 0);
        let to = out[start..].as_chunks_mut::<2>().0;
        for entry in log.iter().take(self.given) {
            // No place is beyond the end. A loop that may stop stays one of scalars: masked, each
            // word cost more than its streams saved.
            let Some(to) = to.get_mut((entry >> WORD_BITS) as usize) else { break };
            *to = (*entry as u16).to_le_bytes();
        }
        self.given = 0;
    }

    /// Writes the remaining words and returns their number.
    #[inline(always)]
    fn write_rest(mut self, log: &mut WordLog, start: usize, out: &mut Vec<u8>) -> usize {
        self.log_words(self.by.avx512f._mm512_test_epi32_mask(self.filled, self.filled), log);
        self.hand_out(log, start, out);
        // Beyond the end a decoder reads zeros.
        let words = out[start..].as_chunks::<2>().0;
        let used = words.iter().rposition(|word| *word != [0; 2]).map_or(0, |last| last + 1);
        out.truncate(start + used * size_of::<u16>());
        used
    }
}

#[inline(always)]
fn splat_u32(number: u32) -> __m512i {
    cast([number; STREAMS])
}

/// The first codes of a row.
#[inline(always)]
fn load_codes(row: &[u16]) -> __m512i {
    cast(row.first_chunk::<SYMBOLS>().copied().unwrap_or_default())
}
