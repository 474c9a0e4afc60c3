//! Streams of a grid back to coefficients, several codes per look-up and several streams at once.
//!
//! The next [`INDEX_BITS`] bits name an entry with every whole symbol among them, already turned
//! into codes. One entry leads to the next, so a single stream would leave the processor waiting:
//! up to [`LANES`] streams are decoded in turns.

use super::grid::{CLASSES, Class, ESCAPE_BITS, Grid, Run, ZERO_GROUP, ZERO_INDEX_BITS};
use crate::PageError;
use crate::huffman::HuffmanTable;
use kvd_core::Geometry;

/// Streams that are decoded in turns.
pub(crate) const LANES: usize = 4;
/// Bits that name an entry; no code of a class is longer than 8.
const INDEX_BITS: u32 = 10;
/// Codes that an entry writes, whatever its count: later ones are written over the rest.
const ENTRY_WRITES: usize = 8;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// What the next bits hold, in the eight bytes of a word: codes; their count and, in the high half,
/// that of the first symbol alone; the bits of their symbols and those of the first. Small, so
/// that the entries of a head's classes stay in the innermost cache. Without codes when the first
/// symbol is the escape, and in the zero class.
#[derive(Clone, Copy, Debug, Default)]
struct Entry(u64);

impl Entry {
    /// Codes that it can hold.
    const CODES: usize = 6;

    /// Codes, then two bytes that are none.
    #[inline(always)]
    fn bytes(self) -> [u8; ENTRY_WRITES] {
        self.0.to_le_bytes()
    }

    #[inline(always)]
    fn count(self) -> u64 {
        self.0 >> 48 & 15
    }

    /// Codes and bits, of the first symbol alone where `left` is less than all of them.
    #[inline(always)]
    fn taken(self, left: u16) -> (usize, usize) {
        let over = self.count() > u64::from(left);
        let word = if over { self.0 >> 4 } else { self.0 };
        (((word >> 48 & 15) as usize).min(left.into()), (word >> 56 & 15) as usize)
    }

    /// Every whole symbol of `index`, up to the first escape.
    fn new(class: Class, code: &HuffmanTable, mut index: u32) -> Self {
        let (mut bytes, mut left) = ([0u8; ENTRY_WRITES], INDEX_BITS);
        let (mut count, mut first) = (0, true);
        loop {
            let (symbol, length) = code.first(index);
            if std::mem::take(&mut first) {
                bytes[6] |= (class.group as u8) << 4;
                bytes[7] |= (length as u8) << 4;
            }
            let fits = length <= left && count + class.group <= Self::CODES;
            if !fits || symbol == class.escape() {
                bytes[6] |= count as u8;
                bytes[7] |= (INDEX_BITS - left) as u8;
                return Self(u64::from_le_bytes(bytes));
            }
            let mut codes = [0i32; Self::CODES];
            class.codes(symbol, &mut codes[..class.group]);
            for (to, code) in bytes[count..].iter_mut().zip(&codes[..class.group]) {
                *to = *code as u8;
            }
            count += class.group;
            index >>= length;
            left -= length;
        }
    }
}

/// The Huffman tables of one side of one layer, by class, and their entries.
#[derive(Clone, Debug)]
pub(crate) struct ClassTables {
    /// None for the zero class.
    pub(crate) codes: Vec<Option<HuffmanTable>>,
    /// `[classes, 2^INDEX_BITS]`.
    entries: Box<[Entry]>,
}

impl ClassTables {
    pub(crate) fn new(codes: Vec<Option<HuffmanTable>>) -> Self {
        let entries = codes.iter().zip(CLASSES).flat_map(|(code, class)| {
            (0..1u32 << INDEX_BITS).map(move |index| match code {
                Some(code) => Entry::new(class, code, index),
                None => Entry::default(),
            })
        });
        Self { entries: entries.collect(), codes }
    }
}

/// What follows a coefficient of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Where the entries of its class begin.
    base: u32,
    /// Coefficients from it to the end of its run.
    left: u16,
    class: u8,
}

impl Place {
    /// One per coefficient.
    pub(crate) fn of(runs: &[Run]) -> Vec<Self> {
        let place = |run: &Run, index: usize| {
            let (base, left) = ((run.class << INDEX_BITS) as u32, (run.len - index) as u16);
            Self { base, left, class: run.class as u8 }
        };
        runs.iter().flat_map(|run| (0..run.len).map(move |index| place(run, index))).collect()
    }
}

/// One stream on its way into rows.
pub(crate) struct Lane<'a> {
    bytes: &'a [u8],
    /// Bits read; past the end they are zeros.
    read: usize,
    /// Coefficients of the current row that are decoded.
    at: usize,
    codes: [i16; DIM_MAX + ENTRY_WRITES],
    /// Rows to pass over before those of `out`.
    skip: usize,
    out: &'a mut [f32],
    /// Whether the stream ends with the rows of `out`.
    complete: bool,
}

/// The bits of a stream from bit `read` on, at least 57 of them.
#[inline(always)]
fn peek(bytes: &[u8], read: usize) -> u64 {
    let at = read >> 3;
    let word = match bytes.get(at..at + 8).and_then(|word| word.first_chunk()) {
        Some(word) => u64::from_le_bytes(*word),
        None => last_word(bytes, at),
    };
    word >> (read & 7)
}

/// Eight bytes of which some lie past the end.
#[cold]
fn last_word(bytes: &[u8], at: usize) -> u64 {
    let rest = bytes.get(at..).unwrap_or(&[]);
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(word)
}

impl<'a> Lane<'a> {
    /// A stream whose rows, but for the first `skip`, go to `out`; `complete` says that it holds
    /// no more.
    pub(crate) fn new(
        bytes: &'a [u8],
        (skip, complete): (usize, bool),
        out: &'a mut [f32],
    ) -> Self {
        let codes = [0; DIM_MAX + ENTRY_WRITES];
        Self { bytes, read: 0, at: 0, codes, skip, out, complete }
    }

    /// What no entry holds: a group of the zero class, or an escaped one.
    #[inline(never)]
    fn exception(&mut self, grid: &Grid) -> Result<(), PageError> {
        let Place { left, class, .. } = grid.places[self.at];
        let class = usize::from(class);
        match &grid.tables.codes[class] {
            None => self.zeros(left.into()),
            Some(code) => {
                let (_, length) = code.first(peek(self.bytes, self.read) as u32);
                self.read += length as usize;
                self.escape(CLASSES[class].group.min(left.into()));
                Ok(())
            }
        }
    }

    fn bits(&mut self, count: u32) -> u64 {
        let bits = peek(self.bytes, self.read) & ((1 << count) - 1);
        self.read += count as usize;
        bits
    }

    /// A group of the zero class.
    fn zeros(&mut self, left: usize) -> Result<(), PageError> {
        let len = left.min(ZERO_GROUP);
        let start = self.at;
        self.at += len;
        self.codes[start..start + len].fill(0);
        if self.bits(1) == 0 {
            return Ok(());
        }
        for _ in 0..=self.bits(ZERO_INDEX_BITS) {
            let index = self.bits(ZERO_INDEX_BITS) as usize;
            let code = self.bits(ESCAPE_BITS) as u16 as i16;
            if index >= len {
                return Err(PageError::Payload("a code lies outside its group"));
            }
            self.codes[start + index] = code;
        }
        Ok(())
    }

    /// A group of escaped codes.
    fn escape(&mut self, len: usize) {
        for _ in 0..len {
            self.codes[self.at] = self.bits(ESCAPE_BITS) as u16 as i16;
            self.at += 1;
        }
    }

    /// The row that was decoded, to `out` unless it is passed over.
    fn finish_row(&mut self, step: f32) -> Result<(), PageError> {
        let dim = std::mem::take(&mut self.at);
        if self.out.is_empty() {
            return Ok(());
        }
        if self.read > self.bytes.len() * 8 {
            return Err(PageError::Payload("a stream ends within a code"));
        }
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(());
        }
        let (row, rest) = std::mem::take(&mut self.out).split_at_mut(dim);
        self.out = rest;
        for (c, code) in row.iter_mut().zip(&self.codes[..dim]) {
            *c = f32::from(*code) * step;
        }
        let spent = self.read.div_ceil(8) == self.bytes.len();
        if self.complete && self.out.is_empty() && !spent {
            return Err(PageError::Payload("a stream does not end where its length says"));
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.out.is_empty()
    }
}

impl Grid {
    /// Decodes at most [`LANES`] streams, each into its rows.
    pub(crate) fn decode(&self, lanes: &mut [Lane<'_>]) -> Result<(), PageError> {
        let dim = self.places.len();
        let mut lanes: &mut [Lane<'_>] = lanes;
        while let Some(last) = lanes.iter().rposition(|lane| !lane.is_done()) {
            lanes = &mut lanes[..=last];
            if let [a, b, c, d] = lanes {
                self.turns([a, b, c, d])?;
            }
            for lane in lanes.iter_mut() {
                while lane.at < dim {
                    self.turns([&mut *lane])?;
                }
                lane.finish_row(self.step)?;
            }
        }
        Ok(())
    }

    /// One entry of each lane after another until one of them has its row.
    fn turns<const N: usize>(&self, mut lanes: [&mut Lane<'_>; N]) -> Result<(), PageError> {
        let (places, entries) = (&self.places[..], &self.tables.entries[..]);
        // Copies, which the compiler can keep in registers.
        let mut at = lanes.each_ref().map(|lane| lane.at);
        let mut read = lanes.each_ref().map(|lane| lane.read);
        while at.iter().all(|at| *at < places.len()) {
            for i in 0..N {
                let place = places[at[i]];
                let index = peek(lanes[i].bytes, read[i]) as usize & ((1 << INDEX_BITS) - 1);
                let entry = entries[place.base as usize + index];
                if entry.count() == 0 {
                    (lanes[i].at, lanes[i].read) = (at[i], read[i]);
                    lanes[i].exception(self)?;
                    (at[i], read[i]) = (lanes[i].at, lanes[i].read);
                    continue;
                }
                let codes = lanes[i].codes[at[i]..][..ENTRY_WRITES].iter_mut();
                for (to, code) in codes.zip(entry.bytes()) {
                    *to = i16::from(code as i8);
                }
                // At the end of a run an entry may hold symbols of the next one, read with a
                // wrong table: then only its first counts.
                let (count, bits) = entry.taken(place.left);
                at[i] += count;
                read[i] += bits;
            }
        }
        for (lane, (at, read)) in lanes.iter_mut().zip(at.into_iter().zip(read)) {
            (lane.at, lane.read) = (at, read);
        }
        Ok(())
    }
}
