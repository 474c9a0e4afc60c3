//! Codes to words.

use super::{LANES, LaneRun, LaneTable, QUAD, Step, WORD_BITS, steps};
use kvd_core::Side;

/// The bits of one lane.
#[derive(Default)]
struct Lane {
    words: Vec<u16>,
    held: u64,
    filled: u32,
    /// Bits that a decoder has loaded and not used.
    ready: u32,
}

impl Lane {
    /// At most 16 bits.
    fn push(&mut self, bits: u16, count: u32) {
        self.held |= u64::from(bits) << self.filled;
        self.filled += count;
        self.ready -= count;
        if self.filled >= WORD_BITS {
            self.words.push(self.held as u16);
            self.held >>= WORD_BITS;
            self.filled -= WORD_BITS;
        }
    }

    fn finish(&mut self) {
        if self.filled > 0 {
            self.words.push(self.held as u16);
        }
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
    let mut lanes: [Lane; LANES] = Default::default();
    // Which lane takes each word.
    let mut order = Vec::new();
    for step in steps(side, rows.len() / per_row, runs) {
        let table = &tables[step.table];
        let (batch, need) = table.batch();
        let width = batch * table.group();
        for first in (0..QUAD).step_by(width) {
            for (index, lane) in lanes.iter_mut().enumerate() {
                let (codes, count) = quad(&step, index, rows, per_row);
                if count <= first {
                    continue;
                }
                if lane.ready < need {
                    order.push(index as u8);
                    lane.ready += WORD_BITS;
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
                    lane.push(bits, length);
                    let raw = table.raw_bits();
                    if raw > 0 {
                        lane.push(codes[0] & ((1 << raw) - 1), raw);
                    }
                }
            }
        }
    }
    lanes.iter_mut().for_each(Lane::finish);
    let mut next = [0; LANES];
    let mut words: Vec<u16> = Vec::with_capacity(order.len());
    for lane in order.into_iter().map(usize::from) {
        words.push(lanes[lane].words.get(next[lane]).copied().unwrap_or(0));
        next[lane] += 1;
    }
    // Beyond the end a decoder reads zeros.
    let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    out.extend(words[..used].iter().flat_map(|word| word.to_le_bytes()));
    used
}
