//! Codes to words.

use super::{LANES, LaneRun, LaneTable, QUAD, Step, WORD_BITS, steps};
use kvd_core::Side;

/// The bits of one lane.
#[derive(Clone, Copy, Default)]
struct Lane {
    held: u64,
    filled: u32,
    /// Bits that a decoder has loaded and not used.
    ready: u32,
    /// Words that it has loaded and that are not written yet: two at most, the earlier first.
    open: [usize; 2],
    open_count: usize,
}

impl Lane {
    /// A decoder takes the next word of the chunk for this lane.
    fn load(&mut self, words: &mut Vec<u16>) {
        self.open[self.open_count] = words.len();
        self.open_count += 1;
        words.push(0);
        self.ready += WORD_BITS;
    }

    /// At most 16 bits.
    fn push(&mut self, bits: u16, count: u32, words: &mut [u16]) {
        self.held |= u64::from(bits) << self.filled;
        self.filled += count;
        self.ready -= count;
        if self.filled >= WORD_BITS {
            self.flush(words);
            self.held >>= WORD_BITS;
            self.filled -= WORD_BITS;
        }
    }

    /// Writes the lowest bits to the earlier open word.
    fn flush(&mut self, words: &mut [u16]) {
        words[self.open[0]] = self.held as u16;
        self.open[0] = self.open[1];
        self.open_count -= 1;
    }
}

/// The codes of a lane's quad.
fn quad(step: &Step, lane: usize, rows: &[u16], per_row: usize) -> ([u16; QUAD], usize) {
    let count = step.count(lane);
    let mut codes = [0; QUAD];
    for (index, code) in codes[..count].iter_mut().enumerate() {
        *code = rows[step.place(lane, index, per_row)];
    }
    (codes, count)
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
    let mut lanes = [Lane::default(); LANES];
    // Those of all lanes, in the order in which they are taken.
    let mut words: Vec<u16> = Vec::with_capacity(rows.len() / 2);
    for step in steps(side, rows.len() / per_row, runs) {
        let table = &tables[step.table];
        let (batch, need) = table.batch();
        let width = batch * table.group();
        let quads: [_; LANES] = std::array::from_fn(|lane| quad(&step, lane, rows, per_row));
        for first in (0..QUAD).step_by(width) {
            for (index, lane) in lanes.iter_mut().enumerate() {
                let (codes, count) = quads[index];
                if count <= first {
                    continue;
                }
                if lane.ready < need {
                    lane.load(&mut words);
                }
                let codes = &codes[first..count.min(first + width)];
                for (at, codes) in codes.chunks(table.group()).enumerate() {
                    let wanted = table.grouping.symbol(codes);
                    let symbol = table.substitute(wanted);
                    if symbol != wanted {
                        let first = first + at * table.group();
                        let coded = table.grouping.codes(symbol);
                        for (at, code) in codes.iter().enumerate() {
                            let code = code >> table.raw_bits() << table.raw_bits();
                            let missing = i32::from(code) - i32::from(coded[at]);
                            rest(step.place(index, first + at, per_row), missing);
                        }
                    }
                    let (bits, length) = table.huffman.code(symbol);
                    lane.push(bits, length, &mut words);
                    let raw = table.raw_bits();
                    if raw > 0 {
                        lane.push(codes[0] & ((1 << raw) - 1), raw, &mut words);
                    }
                }
            }
        }
    }
    for lane in lanes.iter_mut().filter(|lane| lane.filled > 0) {
        lane.flush(&mut words);
    }
    // Beyond the end a decoder reads zeros.
    let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    out.extend(words[..used].iter().flat_map(|word| word.to_le_bytes()));
    used
}
