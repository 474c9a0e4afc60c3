//! Whole chunks ([`Whole`]) under tables of up to 32 short codes, in registers of 512 bits: one
//! permutation looks up the codes of eight lanes.
//!
//! Codes are brought into the order of steps first. A step makes one word of bits of four codes of
//! each lane, adds it to the lane's reservoir and writes that whole. Who takes a word at a top-up
//! follows from the lengths: the places of their next words are squeezed together, in the order in
//! which a decoder asks for them, and words are fetched by that order at last.

use super::whole::Whole;
use super::{LANES, LaneRun, LaneTable, QUAD, WORD_BITS};
use core::arch::x86_64::__m512i;
use kvd_core::Side;
use pulp::x86::V4;
use pulp::{Simd, WithSimd, cast};

/// Symbols of a table that one register holds.
const SYMBOLS: usize = 32;
/// Lanes of a register of reservoirs, and registers for all lanes.
const REGISTER_LANES: usize = 8;
const REGISTERS: usize = LANES / REGISTER_LANES;
/// A word's bytes, and the words of a lane's reservoir.
type Word = [u8; 2];
const HELD_WORDS: usize = 4;
/// A quad of each lane.
type Step = [[u16; QUAD]; LANES];

/// Appends the words of a whole chunk; returns how many.
pub(super) struct Registers<'a> {
    by: V4,
    chunk: Whole<'a>,
    run: &'a LaneRun,
    /// By code.
    bits: [u16; SYMBOLS],
    lengths: [u16; SYMBOLS],
    /// Symbols under a top-up, and the bits that they may take together.
    batch: (usize, u32),
    out: &'a mut Vec<u8>,
}

impl<'a> Registers<'a> {
    /// None where the machine has no such registers, or the table does not fit into one.
    pub(super) fn new(
        chunk: Whole<'a>,
        (run, table): (&'a LaneRun, &LaneTable),
        out: &'a mut Vec<u8>,
    ) -> Option<Self> {
        let (by, units, batch) = (V4::try_new()?, &table.units, table.batch());
        if units.len() > SYMBOLS || batch.0 < 2 {
            return None;
        }
        let [mut bits, mut lengths] = [[0; SYMBOLS]; 2];
        for (unit, (bits, length)) in units.iter().zip(bits.iter_mut().zip(&mut lengths)) {
            (*bits, *length) = (*unit as u16, (unit >> LaneTable::LENGTH_AT) as u16);
        }
        Some(Self { by, chunk, run, bits, lengths, batch, out })
    }

    pub(super) fn encode(self) -> usize {
        Simd::vectorize(self.by, self)
    }
}

impl WithSimd for Registers<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        let steps = in_order(&self.chunk, self.run);
        let codes = self.lengths.iter().filter(|length| **length > 0).count();
        debug_assert!(steps.as_flattened().as_flattened().iter().all(|c| usize::from(*c) < codes));
        match self.batch.0 {
            2 => self.words::<2>(&steps),
            _ => self.words::<1>(&steps),
        }
    }
}

impl Registers<'_> {
    /// Words of steps of `TOP_UPS`.
    #[inline(always)]
    fn words<const TOP_UPS: usize>(self, steps: &[Step]) -> usize {
        let x = self.by.avx512f;
        let bits_most = steps.len() * TOP_UPS * self.batch.1 as usize;
        // A reservoir is written whole.
        let lane_words = bits_most / WORD_BITS as usize + 1 + HELD_WORDS;
        let mut words = vec![Word::default(); LANES * lane_words];
        // At the end a decoder has loaded one word more than it used, and not used one whole.
        let mut order = vec![0u32; LANES * lane_words];
        let mut taken = 0;
        let starts: [u32; LANES] = std::array::from_fn(|lane| (lane * lane_words) as u32);
        let [need, one, word] = [self.batch.1, 1, WORD_BITS].map(splat);
        let mut ready = splat(0);
        let mut asked: __m512i = cast(starts);
        let mut streams = Streams::new(starts.map(u64::from));
        for step in steps {
            for lengths in self.push::<TOP_UPS>(&mut streams, step) {
                let short = x._mm512_cmplt_epu32_mask(ready, need);
                ready = x._mm512_mask_add_epi32(ready, short, ready, word);
                ready = x._mm512_sub_epi32(ready, lengths);
                let places: [u32; LANES] = cast(x._mm512_maskz_compress_epi32(short, asked));
                if let Some(to) = order.get_mut(taken..taken + LANES) {
                    to.copy_from_slice(&places);
                }
                asked = x._mm512_mask_add_epi32(asked, short, asked, one);
                taken += short.count_ones() as usize;
            }
            streams.flush(self.by, &mut words);
        }
        fetch(&words, &order[..taken], self.out)
    }

    /// Adds the codes of a step; returns the lengths of its top-ups.
    #[inline(always)]
    fn push<const TOP_UPS: usize>(&self, streams: &mut Streams, step: &Step) -> [__m512i; TOP_UPS] {
        let x = self.by.avx512f;
        let look_up = self.by.avx512bw;
        let [bits, lengths]: [__m512i; 2] = [cast(self.bits), cast(self.lengths)];
        let (low_word, low_half): (__m512i, __m512i) =
            (splat(0xFFFF), cast([u64::from(u32::MAX); REGISTER_LANES]));
        let codes: [[u16; SYMBOLS]; REGISTERS] = bytemuck::cast(*step);
        let mut narrow = [[[0u32; REGISTER_LANES]; REGISTERS]; TOP_UPS];
        for register in 0..REGISTERS {
            let codes = cast(codes[register]);
            let codes_bits = look_up._mm512_permutexvar_epi16(codes, bits);
            let lengths = look_up._mm512_permutexvar_epi16(codes, lengths);
            // Pairs, in halves of a lane.
            let first = x._mm512_and_si512(lengths, low_word);
            let second = x._mm512_srli_epi32::<16>(codes_bits);
            let second = x._mm512_sllv_epi32(second, first);
            let pairs = x._mm512_or_si512(x._mm512_and_si512(codes_bits, low_word), second);
            let lengths = x._mm512_add_epi32(first, x._mm512_srli_epi32::<16>(lengths));
            // Quads.
            let first = x._mm512_and_si512(lengths, low_half);
            let last = x._mm512_srli_epi64::<32>(lengths);
            let second = x._mm512_sllv_epi64(x._mm512_srli_epi64::<32>(pairs), first);
            let quads = x._mm512_or_si512(x._mm512_and_si512(pairs, low_half), second);
            let lengths = x._mm512_add_epi64(first, last);
            let (held, filled) = (&mut streams.held[register], &mut streams.filled[register]);
            *held = x._mm512_or_si512(*held, x._mm512_sllv_epi64(quads, *filled));
            *filled = x._mm512_add_epi64(*filled, lengths);
            narrow[0][register] =
                cast(x._mm512_cvtepi64_epi32(if TOP_UPS == 1 { lengths } else { first }));
            if TOP_UPS > 1 {
                narrow[1][register] = cast(x._mm512_cvtepi64_epi32(last));
            }
        }
        let mut top_ups = [splat(0); TOP_UPS];
        for (to, lengths) in top_ups.iter_mut().zip(narrow) {
            *to = cast(lengths);
        }
        top_ups
    }
}

/// The reservoirs of all lanes.
struct Streams {
    held: [__m512i; REGISTERS],
    filled: [__m512i; REGISTERS],
    /// Where the next word of each lane goes.
    next: [__m512i; REGISTERS],
}

impl Streams {
    #[inline(always)]
    fn new(starts: [u64; LANES]) -> Self {
        let starts: [[u64; REGISTER_LANES]; REGISTERS] = bytemuck::cast(starts);
        let [low, high] = starts;
        Self { held: [splat(0); 2], filled: [splat(0); 2], next: [cast(low), cast(high)] }
    }

    /// Writes all bits and moves on by whole words; what is left of a lane is less than one.
    #[inline(always)]
    fn flush(&mut self, by: V4, words: &mut [Word]) {
        let x = by.avx512f;
        let rest: __m512i = cast([u64::from(WORD_BITS - 1); REGISTER_LANES]);
        for register in 0..REGISTERS {
            let held: [u64; REGISTER_LANES] = cast(self.held[register]);
            let next: [u64; REGISTER_LANES] = cast(self.next[register]);
            for (held, next) in held.iter().zip(next) {
                let next = next as usize;
                if let Some(to) = words.get_mut(next..next + HELD_WORDS) {
                    to.copy_from_slice(&bytemuck::cast::<_, [Word; HELD_WORDS]>(*held));
                }
            }
            let filled = self.filled[register];
            let whole = x._mm512_andnot_si512(rest, filled);
            self.held[register] = x._mm512_srlv_epi64(self.held[register], whole);
            self.filled[register] = x._mm512_and_si512(filled, rest);
            let whole = x._mm512_srli_epi64::<4>(whole);
            self.next[register] = x._mm512_add_epi64(self.next[register], whole);
        }
    }
}

#[inline(always)]
fn splat(number: u32) -> __m512i {
    cast([number; LANES])
}

/// Appends words by their places; returns how many are not zeros at the end.
#[inline(always)]
fn fetch(words: &[Word], order: &[u32], out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.resize(start + size_of_val(order) / 2, 0);
    let to = out[start..].as_chunks_mut().0;
    for (to, place) in to.iter_mut().zip(order) {
        if let Some(word) = words.get(*place as usize) {
            *to = *word;
        }
    }
    // Beyond the end a decoder reads zeros.
    let used = to.iter().rposition(|word: &Word| *word != [0; 2]).map_or(0, |last| last + 1);
    out.truncate(start + used * size_of::<Word>());
    used
}

/// The codes of all steps.
#[inline(always)]
fn in_order(chunk: &Whole<'_>, run: &LaneRun) -> Vec<Step> {
    let Whole { side, rows, per_row } = *chunk;
    let tokens = rows.len() / per_row;
    let mut steps = vec![Step::default(); run.len * tokens / (LANES * QUAD)];
    match side {
        Side::Key => {
            let blocks = tokens / LANES;
            for (token, row) in rows.chunks_exact(per_row).enumerate() {
                let (block, lane) = (token / LANES, token % LANES);
                let quads = row[run.first..][..run.len].as_chunks::<QUAD>().0;
                for (step, quad) in steps[block..].iter_mut().step_by(blocks).zip(quads) {
                    step[lane] = *quad;
                }
            }
        }
        Side::Value => {
            for (lane, rows) in rows.chunks_exact(QUAD * per_row).enumerate() {
                let row = |token: usize| &rows[token * per_row + run.first..][..run.len];
                let codes = row(0).iter().zip(row(1)).zip(row(2)).zip(row(3));
                for (step, (((a, b), c), d)) in steps.iter_mut().zip(codes) {
                    step[lane % LANES] = [*a, *b, *c, *d];
                }
            }
        }
    }
    steps
}
