//! Codes to words, in two passes; whole chunks by `whole.rs`.
//!
//! When a lane takes a word depends on the lengths of codes alone. The first pass keeps the words
//! of each lane apart and notes who takes one at each top-up; the second hands them out in that
//! order. So sixteen lanes move together, and loops over them become vector instructions.

use super::whole::Whole;
use super::{LANES, LaneRun, LaneTable, QUAD, Step, WORD_BITS, steps};
use crate::wide::wide;
use kvd_core::Side;
use pulp::{Simd, WithSimd};

/// Bytes of a word, and of a lane's reservoir.
const WORD_BYTES: usize = 2;
const HELD_BYTES: usize = 8;

/// The symbols of a batch of each lane: what lies under one top-up.
#[derive(Default)]
struct Batch {
    bits: [u32; LANES],
    lengths: [u32; LANES],
}

/// Units of the symbols of a batch, those of all lanes side by side.
type Units = [[u32; LANES]; QUAD];

/// The bits of all lanes.
struct Lanes {
    held: [u64; LANES],
    filled: [u64; LANES],
    /// What no lane has more of.
    filled_most: u32,
    /// Bits that a decoder has loaded and not used.
    ready: [u32; LANES],
    /// Who takes a word, by top-up; lane 0 is the lowest bit.
    loads: Vec<u16>,
    /// Lane after lane, `lane_bytes` each; zeros beyond what is written.
    words: Vec<u8>,
    lane_bytes: usize,
    /// Where the next word of each lane goes.
    next: [usize; LANES],
}

impl Lanes {
    /// For lanes of `codes` codes at most.
    fn new(codes: usize) -> Self {
        // No code has more bits than a word; a reservoir is written whole.
        let lane_bytes = codes * WORD_BYTES + 2 * HELD_BYTES;
        Self {
            held: [0; LANES],
            filled: [0; LANES],
            filled_most: 0,
            ready: [0; LANES],
            loads: Vec::with_capacity(codes),
            words: vec![0; LANES * lane_bytes],
            lane_bytes,
            next: std::array::from_fn(|lane| lane * lane_bytes),
        }
    }

    /// Adds a batch of at most `need` bits to the first `active` lanes; the others have none.
    #[inline(always)]
    fn push(&mut self, batch: &Batch, need: u32, active: usize) {
        if self.filled_most + need >= u64::BITS {
            self.flush();
        }
        self.filled_most += need;
        let mut load = 0;
        for lane in 0..LANES {
            let need = if lane < active { need } else { 0 };
            let short = u32::from(self.ready[lane] < need);
            self.ready[lane] = self.ready[lane] + WORD_BITS * short - batch.lengths[lane];
            load |= short << lane;
        }
        self.loads.push(load as u16);
        for lane in 0..LANES {
            self.held[lane] |= u64::from(batch.bits[lane]) << self.filled[lane];
            self.filled[lane] += u64::from(batch.lengths[lane]);
        }
    }

    /// Writes whole words; what is left of a reservoir is less than one.
    #[inline(always)]
    fn flush(&mut self) {
        for (lane, next) in self.next.iter_mut().enumerate() {
            self.words[*next..][..HELD_BYTES].copy_from_slice(&self.held[lane].to_le_bytes());
            *next += self.filled[lane] as usize / WORD_BITS as usize * WORD_BYTES;
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
        self.flush();
        let words: u32 = self.loads.iter().map(|mask| mask.count_ones()).sum();
        let start = out.len();
        out.resize(start + words as usize * WORD_BYTES, 0);
        let mut at: [usize; LANES] = std::array::from_fn(|lane| lane * self.lane_bytes);
        let mut to = out[start..].as_chunks_mut::<WORD_BYTES>().0.iter_mut();
        for mask in &self.loads {
            let mut left = *mask;
            while left != 0 {
                let at = &mut at[left.trailing_zeros() as usize % LANES];
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
struct Places {
    /// The first code of lane 0.
    first: usize,
    /// From lane to lane.
    lane: usize,
    /// From code to code.
    code: usize,
}

/// Appends the words of a chunk of rows `[tokens, per_row]`; returns how many. `rest` is told the
/// places of codes that have no symbol, and what is missing of them.
pub(crate) fn chunk(
    side: Side,
    (runs, tables): (&[LaneRun], &[LaneTable]),
    (rows, per_row): (&[u16], usize),
    out: &mut Vec<u8>,
    rest: &mut impl FnMut(usize, i32),
) -> usize {
    let whole = Whole { side, rows, per_row };
    if whole.is_whole(runs, tables) {
        let run = &runs[0];
        return whole.encode((run, &tables[run.table]), out);
    }
    wide(Chunk { side, runs, tables, rows, per_row, out, rest })
}

/// A chunk, step by step.
pub(super) struct Chunk<'a, F> {
    pub(super) side: Side,
    pub(super) runs: &'a [LaneRun],
    pub(super) tables: &'a [LaneTable],
    pub(super) rows: &'a [u16],
    pub(super) per_row: usize,
    pub(super) out: &'a mut Vec<u8>,
    pub(super) rest: &'a mut F,
}

impl<F: FnMut(usize, i32)> WithSimd for Chunk<'_, F> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        let Self { side, runs, tables, rows, per_row, out, rest } = self;
        let tokens = rows.len() / per_row;
        let positions: usize = runs.iter().map(|run| run.len).sum();
        let mut lanes = Lanes::new(QUAD * positions);
        for step in steps(side, tokens, runs) {
            let table = &tables[step.table];
            let (batch, need) = table.batch();
            let width = batch * table.group();
            let mut first = 0;
            while first < QUAD {
                let [active, whole] = step.lanes(first, width);
                if active == 0 {
                    break;
                }
                let mut units = Units::default();
                look_up(table, rows, step.places(first, per_row), whole, &mut units);
                for lane in whole..active {
                    let (codes, count) = step.codes(lane, first, (rows, per_row));
                    look_up_part(table, &codes[..count.min(width)], lane, &mut units);
                }
                let (symbols, flags) = joined(&units[..batch]);
                if flags & LaneTable::SUBSTITUTED != 0 {
                    for lane in 0..active {
                        let (codes, count) = step.codes(lane, first, (rows, per_row));
                        missing(table, &codes[..count.min(width)], |index, missing| {
                            rest(step.place(lane, first + index, per_row), missing);
                        });
                    }
                }
                lanes.push(&symbols, need, active);
                first += width;
            }
        }
        lanes.hand_out(out)
    }
}

impl Step {
    /// How many lanes have a code `first` of their quad, and how many `width` from there.
    fn lanes(&self, first: usize, width: usize) -> [usize; 2] {
        [first + 1, first + width].map(|codes| match self.side {
            Side::Key if codes > self.len => 0,
            Side::Key => self.tokens.saturating_sub(self.token).min(LANES),
            Side::Value => (self.tokens + QUAD).saturating_sub(codes) / QUAD,
        })
    }

    fn places(&self, index: usize, per_row: usize) -> Places {
        let first = self.place(0, index, per_row);
        let lane = self.place(1, index, per_row) - first;
        Places { first, lane, code: self.place(0, index + 1, per_row) - first }
    }

    /// The codes of a lane's quad from `first` on.
    fn codes(
        &self,
        lane: usize,
        first: usize,
        (rows, per_row): (&[u16], usize),
    ) -> ([u16; QUAD], usize) {
        let count = self.count(lane) - first;
        let mut codes = [0; QUAD];
        for (index, code) in codes[..count].iter_mut().enumerate() {
            *code = rows[self.place(lane, first + index, per_row)];
        }
        (codes, count)
    }
}

/// Looks up the symbols of the first lanes, none of which lacks a code.
fn look_up(table: &LaneTable, rows: &[u16], places: Places, lanes: usize, units: &mut Units) {
    // Lets the compiler know how many codes and symbols there are.
    match (table.group(), table.batch) {
        (4, 1) => look_up_in::<4, 1>(table, rows, places, lanes, units),
        (2, 2) => look_up_in::<2, 2>(table, rows, places, lanes, units),
        (2, 1) => look_up_in::<2, 1>(table, rows, places, lanes, units),
        (1, 4) => look_up_in::<1, 4>(table, rows, places, lanes, units),
        (1, 2) => look_up_in::<1, 2>(table, rows, places, lanes, units),
        _ => look_up_in::<1, 1>(table, rows, places, lanes, units),
    }
}

/// By itself, so that what it uses stays in registers: most of the time goes here.
#[inline(never)]
fn look_up_in<const GROUP: usize, const BATCH: usize>(
    table: &LaneTable,
    rows: &[u16],
    places: Places,
    lanes: usize,
    units: &mut Units,
) {
    let (levels, of_symbol) = (usize::from(table.grouping.levels), &table.units[..]);
    for lane in 0..lanes.min(LANES) {
        let mut place = places.first + lane * places.lane;
        for units in units.iter_mut().take(BATCH) {
            let mut symbol = 0;
            let mut weight = 1;
            for _ in 0..GROUP {
                symbol += usize::from(rows[place]) * weight;
                weight *= levels;
                place += places.code;
            }
            units[lane] = of_symbol[symbol];
        }
    }
}

/// Looks up the symbols of one lane, which may lack codes.
#[cold]
fn look_up_part(table: &LaneTable, codes: &[u16], lane: usize, units: &mut Units) {
    for (units, codes) in units.iter_mut().zip(codes.chunks(table.group())) {
        units[lane] = table.units[table.unit_of(codes)];
    }
}

/// Joins the symbols of each lane, and the flags of all.
#[inline(always)]
fn joined(units: &[[u32; LANES]]) -> (Batch, u32) {
    let (mut batch, mut flags) = (Batch::default(), 0);
    for units in units {
        for (unit, (bits, length)) in
            units.iter().zip(batch.bits.iter_mut().zip(&mut batch.lengths))
        {
            flags |= unit;
            *bits |= (unit & 0xFFFF) << *length;
            *length += unit >> LaneTable::LENGTH_AT & 0xFF;
        }
    }
    (batch, flags)
}

/// Tells what each of `codes` lacks, by its index.
#[cold]
fn missing(table: &LaneTable, codes: &[u16], mut rest: impl FnMut(usize, i32)) {
    for (at, codes) in codes.chunks(table.group()).enumerate() {
        let wanted = table.grouping.symbol(codes);
        let symbol = table.substitute(wanted);
        if symbol == wanted {
            continue;
        }
        let coded = table.grouping.codes(symbol);
        for (index, (code, coded)) in codes.iter().zip(coded).enumerate() {
            let code = code >> table.raw_bits() << table.raw_bits();
            rest(at * table.group() + index, i32::from(code) - i32::from(coded));
        }
    }
}
