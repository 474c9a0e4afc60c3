//! Streams of a grid back to coefficients, several codes per look-up and several streams at once.
//!
//! The next [`INDEX_BITS`] bits name an entry with every whole symbol among them, already turned
//! into codes. One entry leads to the next, so a single stream would leave the processor waiting:
//! up to [`LANES`] streams are decoded in turns.

use super::grid::{
    CLASSES, Class, ESCAPE_BITS, Grid, GridTables, Run, ZERO_GROUP, ZERO_INDEX_BITS,
};
use crate::PageError;
use crate::huffman::HuffmanTable;
use kvd_core::Geometry;

/// Streams that are decoded in turns.
pub(crate) const LANES: usize = 4;
/// Bits that name an entry; no code of a class is longer than 8.
const INDEX_BITS: u32 = 10;
/// Most codes in an entry.
const ENTRY_CODES: usize = 8;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// What the next bits hold.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    codes: [i8; ENTRY_CODES],
    /// Codes in `codes`; none when the first symbol is the escape.
    count: u8,
    /// Bits of their symbols.
    bits: u8,
    /// Codes and bits of the first symbol alone.
    first_count: u8,
    first_bits: u8,
}

/// The Huffman table of a class, and its entries.
#[derive(Clone, Debug)]
pub(crate) struct ClassTable {
    pub(crate) code: HuffmanTable,
    entries: Box<[Entry]>,
}

impl ClassTable {
    pub(crate) fn new(class: Class, code: HuffmanTable) -> Self {
        let entries = (0..1u32 << INDEX_BITS).map(|index| Self::entry(class, &code, index));
        Self { entries: entries.collect(), code }
    }

    /// Every whole symbol of `index`, up to the first escape.
    fn entry(class: Class, code: &HuffmanTable, mut index: u32) -> Entry {
        let mut entry = Entry::default();
        let mut left = INDEX_BITS;
        loop {
            let (symbol, length) = code.first(index);
            let at = usize::from(entry.count);
            if entry.first_bits == 0 {
                entry.first_bits = length as u8;
                entry.first_count = class.group as u8;
            }
            let fits = length <= left && at + class.group <= ENTRY_CODES;
            if !fits || symbol == class.escape() {
                return entry;
            }
            let mut codes = [0i32; ENTRY_CODES];
            class.codes(symbol, &mut codes[..class.group]);
            for (to, code) in entry.codes[at..].iter_mut().zip(&codes[..class.group]) {
                *to = *code as i8;
            }
            entry.count += class.group as u8;
            entry.bits += length as u8;
            index >>= length;
            left -= length;
        }
    }
}

/// The tables of one side of one layer, by class.
pub(crate) fn bind(tables: Vec<Option<HuffmanTable>>) -> GridTables {
    let bound = tables.into_iter().zip(CLASSES);
    bound.map(|(code, class)| code.map(|code| ClassTable::new(class, code))).collect()
}

/// Where a row's codes are and what follows them: indexed by coefficient.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// Class of the coefficient.
    class: Vec<u8>,
    /// Coefficients from it to the end of its run.
    left: Vec<u16>,
}

impl Places {
    pub(crate) fn new(runs: &[Run]) -> Self {
        let mut places = Self::default();
        for run in runs {
            places.class.extend(std::iter::repeat_n(run.class as u8, run.len));
            places.left.extend((1..=run.len as u16).rev());
        }
        places
    }
}

/// One stream on its way into rows.
pub(crate) struct Lane<'a> {
    bytes: &'a [u8],
    /// Bits read; past the end they are zeros.
    read: usize,
    /// Coefficients of the current row that are decoded.
    at: usize,
    codes: [i16; DIM_MAX + ENTRY_CODES],
    /// Rows to pass over before those of `out`.
    skip: usize,
    out: &'a mut [f32],
    /// Whether the stream ends with the rows of `out`.
    complete: bool,
}

impl<'a> Lane<'a> {
    /// A stream whose rows, but for the first `skip`, go to `out`; `complete` says that it holds
    /// no more.
    pub(crate) fn new(
        bytes: &'a [u8],
        (skip, complete): (usize, bool),
        out: &'a mut [f32],
    ) -> Self {
        let codes = [0; DIM_MAX + ENTRY_CODES];
        Self { bytes, read: 0, at: 0, codes, skip, out, complete }
    }

    /// The next bits, at least 57 of them.
    #[inline]
    fn peek(&self) -> u64 {
        let rest = self.bytes.get(self.read >> 3..).unwrap_or(&[]);
        let word = match rest.first_chunk::<8>() {
            Some(word) => u64::from_le_bytes(*word),
            None => {
                let mut word = [0; 8];
                word[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(word)
            }
        };
        word >> (self.read & 7)
    }

    /// The codes that the next entry holds.
    #[inline]
    fn step(&mut self, grid: &Grid) -> Result<(), PageError> {
        let class = usize::from(grid.places.class[self.at]);
        let left = grid.places.left[self.at];
        let Some(table) = &grid.tables[class] else {
            return self.zeros(left.into());
        };
        let entry = &table.entries[(self.peek() as usize) & ((1 << INDEX_BITS) - 1)];
        if entry.count == 0 {
            return self.escape(table, CLASSES[class].group.min(left.into()));
        }
        for (to, code) in self.codes[self.at..][..ENTRY_CODES].iter_mut().zip(entry.codes) {
            *to = code.into();
        }
        // At the end of a run an entry may hold symbols of the next one, read with a wrong table.
        let over = u16::from(entry.count) > left;
        let (count, bits) = if over {
            (u16::from(entry.first_count).min(left), entry.first_bits)
        } else {
            (u16::from(entry.count), entry.bits)
        };
        self.at += usize::from(count);
        self.read += usize::from(bits);
        Ok(())
    }

    fn bits(&mut self, count: u32) -> u64 {
        let bits = self.peek() & ((1 << count) - 1);
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
    #[cold]
    fn escape(&mut self, table: &ClassTable, len: usize) -> Result<(), PageError> {
        let (_, length) = table.code.first(self.peek() as u32);
        self.read += length as usize;
        for _ in 0..len {
            self.codes[self.at] = self.bits(ESCAPE_BITS) as u16 as i16;
            self.at += 1;
        }
        Ok(())
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
    /// Decodes streams, each into its rows.
    pub(crate) fn decode(&self, lanes: &mut [Lane<'_>]) -> Result<(), PageError> {
        let dim = self.places.class.len();
        let mut lanes: &mut [Lane<'_>] = lanes;
        while let Some(last) = lanes.iter().rposition(|lane| !lane.is_done()) {
            lanes = &mut lanes[..=last];
            // In turns while all of them have codes to come, then one after another.
            while lanes.iter().all(|lane| lane.at < dim) {
                for lane in lanes.iter_mut() {
                    lane.step(self)?;
                }
            }
            for lane in lanes.iter_mut() {
                while lane.at < dim {
                    lane.step(self)?;
                }
                lane.finish_row(self.step)?;
            }
        }
        Ok(())
    }
}
