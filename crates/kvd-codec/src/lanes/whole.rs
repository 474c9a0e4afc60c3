//! Codes to words where every lane has a code at every place and all codes are symbols of one
//! table: chunks of 64 tokens under tables that are built from the blocks themselves. Machines with
//! registers of 512 bits do it by `registers.rs` where codes are few.
//!
//! A lane's bits depend on its own codes alone, so that lanes go one after the other and their
//! reservoirs stay in registers. Who takes a word at a top-up follows from the lengths, which are
//! kept by top-up: one pass makes masks of them, one the order of lanes, one hands words out.

use super::{LANES, LaneRun, LaneTable, QUAD, WORD_BITS};
use crate::wide::wide;
use kvd_core::Side;
use pulp::{Simd, WithSimd};

/// Bytes of a word, and of a lane's reservoir.
const WORD_BYTES: usize = 2;
const HELD_BYTES: usize = 8;
/// Where the length of a unit begins.
const LENGTH_AT: u32 = LaneTable::LENGTH_AT;

/// A chunk, and its rows of `per_row` codes.
#[derive(Clone, Copy)]
pub(super) struct Whole<'a> {
    pub(super) side: Side,
    pub(super) rows: &'a [u16],
    pub(super) per_row: usize,
}

/// One lane's bits that are not yet words.
#[derive(Default)]
struct Stream {
    held: u64,
    filled: u32,
    /// Where its next word goes.
    next: usize,
}

impl Stream {
    /// Adds the bits of a top-up, at most a word.
    #[inline(always)]
    fn push(&mut self, bits: u32, length: u32) {
        self.held |= u64::from(bits) << (self.filled % u64::BITS);
        self.filled += length;
    }

    /// Writes all bits, and moves on by whole words; what is left is less than one.
    #[inline(always)]
    fn flush(&mut self, words: &mut [u8]) {
        if let Some(to) = words.get_mut(self.next..self.next + HELD_BYTES) {
            to.copy_from_slice(&self.held.to_le_bytes());
        }
        let whole = self.filled / WORD_BITS;
        self.next += whole as usize * WORD_BYTES;
        self.held >>= whole * WORD_BITS % u64::BITS;
        self.filled %= WORD_BITS;
    }
}

/// The places of a lane's quads, one after the other.
struct Walk {
    place: usize,
    step: usize,
    /// From here on the way goes back.
    end: usize,
    back: usize,
}

impl Walk {
    #[inline(always)]
    fn go(&mut self) {
        self.place += self.step;
        if self.place >= self.end {
            self.place -= self.back;
        }
    }
}

impl Whole<'_> {
    /// Whether every lane has four symbols in every step, and those are of one table.
    pub(super) fn is_whole(&self, runs: &[LaneRun], tables: &[LaneTable]) -> bool {
        let [run] = runs else { return false };
        let table = &tables[run.table];
        let tokens = self.rows.len() / self.per_row;
        let lanes_are_full = match self.side {
            Side::Key => tokens.is_multiple_of(LANES) && run.len.is_multiple_of(QUAD),
            Side::Value => tokens == QUAD * LANES,
        };
        lanes_are_full && table.group() == 1 && table.substitutes.is_empty()
    }

    /// Appends the words and returns how many.
    pub(super) fn encode(self, of: (&LaneRun, &LaneTable), out: &mut Vec<u8>) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Some(registers) = super::registers::Registers::new(self, of, out) {
            return registers.encode();
        }
        self.lane_by_lane(of, out)
    }

    /// As [`Whole::encode`], on any machine.
    pub(super) fn lane_by_lane(self, of: (&LaneRun, &LaneTable), out: &mut Vec<u8>) -> usize {
        wide(LaneByLane { chunk: self, of, out })
    }

    #[inline(always)]
    fn words(self, (run, table): (&LaneRun, &LaneTable), out: &mut Vec<u8>) -> usize {
        let (batch, need) = table.batch();
        let codes = run.len * self.rows.len() / self.per_row / LANES;
        let lane_bytes = codes * WORD_BYTES + HELD_BYTES;
        let mut words = vec![0; LANES * lane_bytes];
        let mut lengths = vec![[0; LANES]; codes / batch];
        for (lane, words) in words.chunks_exact_mut(lane_bytes).enumerate() {
            let from = (self, self.walk(lane, run));
            // Lets the compiler know how many symbols there are.
            match (batch, table.pairs()) {
                (2, Some(pairs)) => paired::<2>(from, pairs, (words, &mut lengths, lane)),
                (4, Some(pairs)) => paired::<1>(from, pairs, (words, &mut lengths, lane)),
                (4, None) => single::<1>(from, &table.units, (words, &mut lengths, lane)),
                (2, None) => single::<2>(from, &table.units, (words, &mut lengths, lane)),
                _ => single::<4>(from, &table.units, (words, &mut lengths, lane)),
            }
        }
        hand_out(&masks(&lengths, need as u8), &words, lane_bytes, out)
    }

    /// Where the quads of a lane lie.
    #[inline(always)]
    fn walk(&self, lane: usize, run: &LaneRun) -> Walk {
        let Self { side, rows, per_row } = *self;
        match side {
            Side::Key => Walk {
                place: lane * per_row + run.first,
                step: LANES * per_row,
                end: rows.len(),
                back: rows.len() - QUAD,
            },
            Side::Value => {
                let place = QUAD * lane * per_row + run.first;
                Walk { place, step: 1, end: usize::MAX, back: 0 }
            }
        }
    }

    /// The codes of a quad.
    #[inline(always)]
    fn quad(&self, place: usize) -> [u16; QUAD] {
        let rows = &self.rows[place..];
        if self.side == Side::Key {
            return rows.first_chunk().copied().unwrap_or_default();
        }
        std::array::from_fn(|row| rows[row * self.per_row])
    }
}

/// [`Whole::lane_by_lane`].
struct LaneByLane<'a> {
    chunk: Whole<'a>,
    of: (&'a LaneRun, &'a LaneTable),
    out: &'a mut Vec<u8>,
}

impl WithSimd for LaneByLane<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        self.chunk.words(self.of, self.out)
    }
}

/// Where a lane's words and the lengths of its top-ups go, and which lane it is.
type To<'a> = (&'a mut [u8], &'a mut [[u8; LANES]], usize);

/// A lane, by a table of pairs, `TOP_UPS` a quad. By itself, so that what it uses stays in
/// registers: most of the time goes here and in [`single`].
#[inline(never)]
fn paired<const TOP_UPS: usize>(
    (whole, mut walk): (Whole<'_>, Walk),
    pairs: &Pairs,
    (words, lengths, lane): To<'_>,
) {
    let (units, levels, lane) = (&pairs.units[..], pairs.levels, lane % LANES);
    let mut stream = Stream::default();
    for lengths in lengths.as_chunks_mut::<TOP_UPS>().0 {
        let [a, b, c, d] = whole.quad(walk.place).map(usize::from);
        walk.go();
        let (low, high) = (units[a + b * levels], units[c + d * levels]);
        let [low_bits, high_bits] = [low, high].map(|unit| unit >> LENGTH_AT);
        stream.push(low & 0xFFFF, low_bits);
        stream.push(high & 0xFFFF, high_bits);
        stream.flush(words);
        lengths[0][lane] = (if TOP_UPS == 1 { low_bits + high_bits } else { low_bits }) as u8;
        if TOP_UPS > 1 {
            lengths[TOP_UPS - 1][lane] = high_bits as u8;
        }
    }
}

/// A lane, code by code.
#[inline(never)]
fn single<const TOP_UPS: usize>(
    (whole, mut walk): (Whole<'_>, Walk),
    units: &[u32],
    (words, lengths, lane): To<'_>,
) {
    let lane = lane % LANES;
    let mut stream = Stream::default();
    for lengths in lengths.as_chunks_mut::<TOP_UPS>().0 {
        let codes = whole.quad(walk.place);
        walk.go();
        for (part, lengths) in lengths.iter_mut().enumerate() {
            let batch = QUAD / TOP_UPS;
            let (mut bits, mut length) = (0, 0);
            for code in &codes[part * batch..][..batch] {
                let unit = units[usize::from(*code)];
                bits |= (unit & 0xFFFF) << length;
                length += unit >> LENGTH_AT;
            }
            stream.push(bits, length);
            lengths[lane] = length as u8;
            if part % 2 == 1 || part + 1 == TOP_UPS {
                stream.flush(words);
            }
        }
    }
}

/// By top-up, a mask of who takes a word; lane 0 is the lowest bit.
#[inline(always)]
fn masks(lengths: &[[u8; LANES]], need: u8) -> Vec<u16> {
    /// Brings the lowest bits of eight bytes into the highest one.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    // Bits that a decoder has loaded and not used.
    let mut ready = [0u8; LANES];
    let mut masks = vec![0; lengths.len()];
    for (mask, lengths) in masks.iter_mut().zip(lengths) {
        let mut short = [0u8; LANES];
        for lane in 0..LANES {
            short[lane] = u8::from(ready[lane] < need);
            ready[lane] = ready[lane] + WORD_BITS as u8 * short[lane] - lengths[lane];
        }
        let halves: [u64; 2] = bytemuck::cast(short);
        let [low, high] = halves.map(|half| u64::from_le(half).wrapping_mul(GATHER) >> 56);
        *mask = (low | high << 8) as u16;
    }
    masks
}

/// By mask of eight lanes: which they are, the first lowest.
static ORDER: [u64; 256] = {
    let mut order = [0; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut at) = (0, 0);
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                order[mask] |= lane << (8 * at);
                at += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    order
};

/// Appends the words in the order in which a decoder loads them; returns how many.
#[inline(always)]
fn hand_out(masks: &[u16], words: &[u8], lane_bytes: usize, out: &mut Vec<u8>) -> usize {
    let count: usize = masks.iter().map(|mask| mask.count_ones() as usize).sum();
    let mut order = vec![0u8; count + LANES];
    let mut to = 0;
    for mask in masks {
        for (mask, base) in [(mask & 0xFF, 0), (mask >> 8, u64::from_le_bytes([8; 8]))] {
            let lanes = ORDER[usize::from(mask)] + base;
            order[to..][..8].copy_from_slice(&lanes.to_le_bytes());
            to += mask.count_ones() as usize;
        }
    }
    let start = out.len();
    out.resize(start + count * WORD_BYTES, 0);
    let mut at: [usize; LANES] = std::array::from_fn(|lane| lane * lane_bytes);
    for (to, lane) in out[start..].as_chunks_mut::<WORD_BYTES>().0.iter_mut().zip(&order) {
        let at = &mut at[usize::from(*lane) % LANES];
        // A lane has no more words than room for them.
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

/// What codes two single codes, for tables of few of them without substitutes.
#[derive(Clone, Debug)]
pub(super) struct Pairs {
    levels: usize,
    /// By first code and, `levels` times that, second: as [`LaneTable::units`].
    units: Vec<u32>,
}

impl Pairs {
    /// Codes that a table of pairs is made for; it then takes 16 KiB at most.
    const LEVELS_MAX: usize = 64;

    /// None where a pair need not fit a word, or symbols lack a code.
    pub(super) fn new(table: &LaneTable) -> Option<Self> {
        let units = &table.units;
        let few = units.len() <= Self::LEVELS_MAX && table.substitutes.is_empty();
        if table.group() != 1 || table.batch < 2 || !few {
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
