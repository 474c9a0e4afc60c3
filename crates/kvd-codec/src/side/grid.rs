//! Grid pages: `code = round(c / step)` with one step for all coefficients of a head, entropy
//! coded by coefficient class (`docs/adr/0005-grid-codec.md`).
//!
//! Coefficients of like spread form a class and share a Huffman table. A Huffman code cannot spend
//! less than a bit, so narrow classes code several coefficients as one symbol, and the narrowest
//! spends one flag bit on a group of zeros. Every class has an escape: whatever the data, every
//! coefficient is off by at most half a step; drift costs bits, not accuracy.
//!
//! Payload: one u16 per stream (its bytes), then the streams of [`ROWS_PER_STREAM`] rows each.
//! Classes and tables come from the calibration, so a page holds codes only.

use super::Unquantizable;
use super::grid_decode::{ClassTable, Places};
use crate::ROWS_PER_STREAM;
use kvd_core::Geometry;
use std::sync::Arc;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;
/// Bits of a code outside its class's alphabet.
pub(super) const ESCAPE_BITS: u32 = 16;
/// Largest code: what an escape can hold.
const CODE_MAX: f32 = 32767.0;
/// Coefficients under one flag of the zero class.
pub(super) const ZERO_GROUP: usize = 32;
/// Bits of a position in a zero group, and of the count of its non-zero codes less one.
pub(super) const ZERO_INDEX_BITS: u32 = 5;

/// How the coefficients of one class are coded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Coefficients per symbol.
    pub(crate) group: usize,
    /// Codes from `-magnitude` to `magnitude` have a symbol.
    pub(crate) magnitude: i32,
    /// The class serves spreads (standard deviation over step) below this.
    spread_max: f32,
}

const fn class(group: usize, magnitude: i32, spread_max: f32) -> Class {
    Class { group, magnitude, spread_max }
}

/// All classes, narrowest first. The first is the zero class, which has no table.
pub(crate) const CLASSES: [Class; 12] = [
    class(ZERO_GROUP, 0, 0.15),
    class(4, 1, 0.27),
    class(4, 1, 0.45),
    class(2, 3, 0.7),
    class(2, 3, 1.0),
    class(1, 7, 1.5),
    class(1, 15, 2.2),
    class(1, 15, 3.3),
    class(1, 31, 5.0),
    class(1, 31, 7.5),
    class(1, 62, 11.0),
    class(1, 62, f32::INFINITY),
];

impl Class {
    /// Symbols of the class, the escape included (it is the last).
    pub(crate) const fn alphabet(self) -> usize {
        (2 * self.magnitude as usize + 1).pow(self.group as u32) + 1
    }

    /// The symbol of groups that have none.
    pub(crate) const fn escape(self) -> u16 {
        (self.alphabet() - 1) as u16
    }

    /// The symbol of a group, missing coefficients counting as zero; the escape when a code has
    /// no place in it.
    pub(crate) fn symbol(self, codes: &[i32]) -> u16 {
        let (base, mut symbol) = (2 * self.magnitude + 1, 0);
        for index in (0..self.group).rev() {
            let code = codes.get(index).copied().unwrap_or(0);
            if code.abs() > self.magnitude {
                return self.escape();
            }
            symbol = symbol * base + code + self.magnitude;
        }
        symbol as u16
    }

    pub(super) fn codes(self, symbol: u16, codes: &mut [i32]) {
        let base = 2 * self.magnitude + 1;
        let mut rest = i32::from(symbol);
        for code in codes {
            *code = rest % base - self.magnitude;
            rest /= base;
        }
    }
}

/// The class of a coefficient whose standard deviation is `spread` steps.
pub(crate) fn class_of(spread: f32) -> u8 {
    CLASSES.iter().position(|class| spread < class.spread_max).unwrap_or(CLASSES.len() - 1) as u8
}

/// Consecutive coefficients of one class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) class: usize,
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// The runs of a head's classes, one class per coefficient.
pub(crate) fn runs(classes: &[u8]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, class) in classes.iter().enumerate() {
        let class = usize::from(*class);
        match runs.last_mut() {
            Some(run) if run.class == class => run.len += 1,
            _ => runs.push(Run { class, first: index, len: 1 }),
        }
    }
    runs
}

/// The tables of one side of one layer, by class; the zero class has none.
pub(crate) type GridTables = Arc<[Option<ClassTable>]>;

/// A head's step and classes, and the tables it shares with the other heads of its layer.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    pub(super) step: f32,
    pub(super) runs: Vec<Run>,
    pub(super) places: Places,
    pub(super) tables: GridTables,
}

/// Codes of a row: `round(c / step)`.
pub(crate) fn codes(row: &[f32], step: f32, codes: &mut [i32]) -> Result<(), Unquantizable> {
    for (code, c) in codes.iter_mut().zip(row) {
        let level = (c / step).round_ties_even();
        // NaN lies in no range.
        if !(-CODE_MAX..=CODE_MAX).contains(&level) {
            return Err(Unquantizable);
        }
        *code = level as i32;
    }
    Ok(())
}

impl Grid {
    pub(crate) fn new(step: f32, classes: &[u8], tables: GridTables) -> Self {
        let runs = runs(classes);
        Self { step, places: Places::new(&runs), runs, tables }
    }

    /// Appends the stream lengths and streams of `rows` (`[tokens, dim]`); returns the bytes of
    /// the lengths.
    pub(crate) fn encode(
        &self,
        rows: &[f32],
        dim: usize,
        out: &mut Vec<u8>,
    ) -> Result<u64, Unquantizable> {
        let streams = rows.chunks(dim * ROWS_PER_STREAM);
        let lengths_at = out.len();
        let lengths = 2 * streams.len();
        out.resize(lengths_at + lengths, 0);
        let mut buffer = [0i32; DIM_MAX];
        let row_codes = &mut buffer[..dim];
        for (index, stream) in streams.enumerate() {
            let start = out.len();
            let mut writer = BitWriter::new(out);
            for row in stream.chunks_exact(dim) {
                codes(row, self.step, row_codes)?;
                self.encode_row(row_codes, &mut writer);
            }
            writer.finish();
            // A row of escapes takes 24 bits per coefficient: 24 KiB per stream at most.
            let length = ((out.len() - start) as u16).to_le_bytes();
            out[lengths_at + 2 * index..][..2].copy_from_slice(&length);
        }
        Ok(lengths as u64)
    }

    fn encode_row(&self, codes: &[i32], writer: &mut BitWriter<'_>) {
        for run in &self.runs {
            let class = CLASSES[run.class];
            for group in codes[run.first..run.first + run.len].chunks(class.group) {
                let Some(table) = &self.tables[run.class] else {
                    encode_zeros(group, writer);
                    continue;
                };
                let symbol = class.symbol(group);
                let (code, length) = table.code.code(symbol);
                writer.push(code.into(), length);
                if symbol == class.escape() {
                    for code in group {
                        writer.push(u64::from(*code as u16), ESCAPE_BITS);
                    }
                }
            }
        }
    }
}

/// Bits of a zero group: a flag, and where it is set a count and (position, code) pairs.
pub(crate) fn zero_group_bits(group: &[i32]) -> u64 {
    let others = group.iter().filter(|code| **code != 0).count() as u64;
    let pair = u64::from(ZERO_INDEX_BITS + ESCAPE_BITS);
    if others == 0 { 1 } else { 1 + u64::from(ZERO_INDEX_BITS) + others * pair }
}

/// Extra bits of an escaped group.
pub(crate) fn escape_bits(group: &[i32]) -> u64 {
    u64::from(ESCAPE_BITS) * group.len() as u64
}

fn encode_zeros(group: &[i32], writer: &mut BitWriter<'_>) {
    let others = group.iter().filter(|code| **code != 0).count() as u64;
    writer.push(u64::from(others != 0), 1);
    if others == 0 {
        return;
    }
    writer.push(others - 1, ZERO_INDEX_BITS);
    for (index, code) in group.iter().enumerate().filter(|(_, code)| **code != 0) {
        writer.push(index as u64, ZERO_INDEX_BITS);
        writer.push(u64::from(*code as u16), ESCAPE_BITS);
    }
}

/// Appends bits, lowest first.
struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    held: u64,
    filled: u32,
}

impl<'a> BitWriter<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, held: 0, filled: 0 }
    }

    /// At most 32 bits at once.
    fn push(&mut self, bits: u64, count: u32) {
        self.held |= bits << self.filled;
        self.filled += count;
        if self.filled >= 32 {
            self.out.extend_from_slice(&(self.held as u32).to_le_bytes());
            self.held >>= 32;
            self.filled -= 32;
        }
    }

    /// Pads to a whole byte.
    fn finish(self) {
        let bytes = self.filled.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.held.to_le_bytes()[..bytes]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageError;
    use crate::huffman::HuffmanTable;
    use crate::side::grid_decode::{LANES, Lane, bind};
    use proptest::prelude::*;

    /// Tables in which the middle of an alphabet is likely, the more so the larger `skew`.
    fn tables(skew: f64) -> GridTables {
        let table = |class: &Class| {
            let middle = (class.alphabet() / 2) as f64;
            let count = |symbol| (1e6 * skew.powf(-f64::abs(symbol as f64 - middle))) as u64;
            let counts: Vec<u64> = (0..class.alphabet()).map(count).collect();
            (class.group != ZERO_GROUP).then(|| HuffmanTable::new(&counts))
        };
        bind(CLASSES.iter().map(table).collect())
    }

    fn decode(
        grid: &Grid,
        bytes: &[u8],
        part: (usize, bool),
        out: &mut [f32],
    ) -> Result<(), PageError> {
        grid.decode(&mut [Lane::new(bytes, part, out)])
    }

    #[test]
    fn every_alphabet_fits_the_short_tables() {
        for class in &CLASSES[1..] {
            assert!(class.alphabet() <= 128, "{class:?}");
        }
    }

    #[test]
    fn symbols_and_codes_are_inverse() {
        for class in &CLASSES[1..] {
            for symbol in 0..class.escape() {
                let mut codes = vec![0; class.group];
                class.codes(symbol, &mut codes);
                assert_eq!(class.symbol(&codes), symbol);
            }
        }
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
        fn any_values_come_back_within_half_a_step(
            classes in proptest::collection::vec(0u8..12, 2..80),
            values in proptest::collection::vec(-300f32..300.0, 80 * 11),
            tokens in 1usize..12,
            step in 0.01f32..3.0,
        ) {
            let dim = classes.len();
            let rows = &values[..dim * tokens.min(11)];
            let tokens = rows.len() / dim;
            let grid = Grid::new(step, &classes, tables(1.5));
            let mut out = Vec::new();
            let lengths = grid.encode(rows, dim, &mut out).unwrap() as usize;
            prop_assert_eq!(lengths, 2 * tokens.div_ceil(ROWS_PER_STREAM));
            let mut at = lengths;
            for (index, stream) in rows.chunks(dim * ROWS_PER_STREAM).enumerate() {
                let length = u16::from_le_bytes([out[2 * index], out[2 * index + 1]]) as usize;
                let mut back = vec![0f32; stream.len()];
                decode(&grid, &out[at..at + length], (0, true), &mut back).unwrap();
                for (a, b) in stream.iter().zip(&back) {
                    prop_assert!((a - b).abs() <= step * 0.5001 + 1e-4, "{a} became {b}");
                }
                let shorter = &out[at..at + length - 1];
                prop_assert!(decode(&grid, shorter, (0, true), &mut back).is_err());
                at += length;
            }
            prop_assert_eq!(at, out.len());
        }

        /// Against the decoder that reads one symbol at a time.
        #[test]
        #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
        fn lanes_give_what_single_symbols_give(
            classes in proptest::collection::vec((0u8..12, 1usize..40), 1..8),
            values in proptest::collection::vec(
                prop_oneof![8 => -2f32..2.0, 2 => -20f32..20.0, 1 => -300f32..300.0], 300 * 9),
            skew in 1f64..3.0,
            skip in 0usize..8,
        ) {
            let run = |(class, len)| std::iter::repeat_n(class, len);
            let classes: Vec<u8> = classes.into_iter().flat_map(run).collect();
            let dim = classes.len();
            let rows = &values[..values.len() / dim.max(9) / 9 * 9 * dim];
            prop_assume!(!rows.is_empty());
            let grid = Grid::new(0.7, &classes, tables(skew));
            let mut out = Vec::new();
            let mut at = grid.encode(rows, dim, &mut out).unwrap() as usize;
            let (mut expected, mut streams) = (Vec::new(), Vec::new());
            for (index, stream) in rows.chunks(dim * ROWS_PER_STREAM).enumerate() {
                let length = u16::from_le_bytes([out[2 * index], out[2 * index + 1]]) as usize;
                let skip = if index == 0 { skip } else { 0 };
                let bytes = &out[at..at + length];
                let count = (stream.len() / dim).saturating_sub(skip) * dim;
                let mut one = vec![0f32; count];
                grid.decode_single(bytes, (skip, true), dim, &mut one).unwrap();
                expected.extend(one);
                streams.push((bytes, (skip, true), count));
                at += length;
            }
            let mut back = vec![0f32; expected.len()];
            let mut rest = &mut back[..];
            let lanes = streams.into_iter().filter(|(.., count)| *count > 0).map(|part| {
                let (rows, after) = std::mem::take(&mut rest).split_at_mut(part.2);
                rest = after;
                Lane::new(part.0, part.1, rows)
            });
            let mut lanes: Vec<_> = lanes.collect();
            for lanes in lanes.chunks_mut(LANES) {
                grid.decode(lanes).unwrap();
            }
            prop_assert_eq!(back, expected);
        }

        #[test]
        #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
        fn any_bytes_end_as_single_symbols_end(
            classes in proptest::collection::vec(0u8..12, 2..80),
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            skew in 1f64..3.0,
            complete in any::<bool>(),
        ) {
            let grid = Grid::new(1.0, &classes, tables(skew));
            let mut out = vec![0f32; classes.len() * 8];
            let fast = decode(&grid, &bytes, (0, complete), &mut out);
            let mut expected = vec![0f32; out.len()];
            let single = grid.decode_single(&bytes, (0, complete), classes.len(), &mut expected);
            prop_assert_eq!(fast.is_ok(), single.is_ok());
            if single.is_ok() {
                prop_assert_eq!(out, expected);
            }
        }
    }

    #[test]
    fn values_beyond_the_escape_are_unquantizable() {
        let grid = Grid::new(0.001, &[5, 5], tables(1.0));
        assert!(grid.encode(&[1.0, 40.0], 2, &mut Vec::new()).is_err());
        assert!(grid.encode(&[f32::MAX, 0.0], 2, &mut Vec::new()).is_err());
    }
}
