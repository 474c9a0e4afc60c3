//! Grid pages: `code = round(c / step)` with one step for all coefficients of a head, entropy
//! coded by coefficient class (`docs/adr/0005-grid-codec.md`).
//!
//! Coefficients of like spread form a class and share a Huffman table. A Huffman code cannot spend
//! less than a bit, so narrow classes code several coefficients as one symbol, and the narrowest
//! is not coded at all; the widest code their high bits and store the low ones as they are. What
//! a class has no place for is cut off, and the rest becomes an outlier: whatever the data, every
//! coefficient is off by at most half a step; drift costs bits, not accuracy.
//!
//! Payload: per chunk of 64 tokens its words and outliers (u16 each), then the chunks (`lanes`).
//! Classes and tables come from the calibration, so a page holds codes only.

use super::Unquantizable;
use crate::PageError;
use crate::lanes::{self, CHUNK_TOKENS, Grouping, LaneCodes, LaneRun, LaneTable};
use kvd_core::Side;
use std::ops::Range;
use std::sync::Arc;

/// Largest code.
const CODE_MAX: f32 = 32767.0;
/// Bits of an outlier of one step; larger ones take several.
pub(crate) const OUTLIER_BITS: u64 = 24;
/// What one outlier can hold.
const OUTLIER_MAX: i32 = 127;

/// How the coefficients of one class are coded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Coefficients per symbol.
    pub(crate) group: usize,
    /// Codes, without their low bits, go from minus this to this.
    pub(crate) magnitude: i32,
    /// Low bits that are stored as they are.
    raw_bits: u32,
    /// The class serves spreads (standard deviation over step) below this.
    spread_max: f32,
}

const fn class(group: usize, magnitude: i32, raw_bits: u32, spread_max: f32) -> Class {
    Class { group, magnitude, raw_bits, spread_max }
}

/// All classes, narrowest first. The first is the zero class, which has no table.
pub(crate) const CLASSES: [Class; 12] = [
    class(1, 0, 0, 0.15),
    class(4, 1, 0, 0.27),
    class(4, 1, 0, 0.45),
    class(2, 3, 0, 0.7),
    class(2, 3, 0, 1.0),
    class(1, 7, 0, 1.5),
    class(1, 10, 0, 2.2),
    class(1, 15, 0, 3.3),
    class(1, 12, 1, 5.0),
    class(1, 15, 1, 7.5),
    class(1, 12, 2, 11.0),
    class(1, 15, 3, f32::INFINITY),
];

impl Class {
    /// What is added to a code to store it; the sum fits a byte.
    pub(crate) const fn bias(self) -> i32 {
        self.magnitude << self.raw_bits
    }

    /// How stored codes become symbols.
    pub(crate) const fn grouping(self) -> Grouping {
        Grouping {
            group: self.group,
            levels: 2 * self.magnitude as u16 + 1,
            raw_bits: self.raw_bits,
            missing: self.magnitude as u16,
        }
    }

    /// Symbols of the class.
    pub(crate) fn alphabet(self) -> usize {
        self.grouping().alphabet()
    }

    /// The code to store for `code`, and what it cuts off.
    pub(crate) fn cut(self, code: i32) -> (u16, i32) {
        let high = self.bias() + (1 << self.raw_bits) - 1;
        let kept = code.clamp(-self.bias(), high);
        ((kept + self.bias()) as u16, code - kept)
    }
}

/// The class of a coefficient whose standard deviation is `spread` steps.
pub(crate) fn class_of(spread: f32) -> u8 {
    CLASSES.iter().position(|class| spread < class.spread_max).unwrap_or(CLASSES.len() - 1) as u8
}

/// The runs of a head's classes, one class per coefficient; the zero class has none. Table `n` is
/// that of class `n + 1`.
pub(crate) fn runs(classes: &[u8]) -> Vec<LaneRun> {
    let mut runs: Vec<LaneRun> = Vec::new();
    let coded = classes.iter().enumerate().filter(|(_, class)| **class > 0);
    for (index, class) in coded {
        let table = usize::from(*class) - 1;
        match runs.last_mut() {
            Some(run) if run.table == table && run.first + run.len == index => run.len += 1,
            _ => runs.push(LaneRun { table, first: index, len: 1 }),
        }
    }
    runs
}

/// The tables of one side of one layer, by class; the zero class has none.
pub(crate) type GridTables = Arc<[LaneTable]>;

/// A head's step and classes, and the tables it shares with the other heads of its layer.
#[derive(Clone, Debug)]
pub struct Grid {
    step: f32,
    side: Side,
    pub(crate) runs: Vec<LaneRun>,
    /// Class of each coefficient.
    classes: Vec<u8>,
    pub(crate) tables: GridTables,
}

/// Codes of a row: `round(c / step)`.
pub(crate) fn codes(row: &[f32], step: f32, codes: &mut [i32]) -> Result<(), Unquantizable> {
    let mut fits = true;
    for (code, c) in codes.iter_mut().zip(row) {
        let level = (c / step).round_ties_even();
        // NaN lies in no range.
        fits &= (-CODE_MAX..=CODE_MAX).contains(&level);
        *code = level as i32;
    }
    if fits { Ok(()) } else { Err(Unquantizable) }
}

/// Outliers that a rest takes.
pub(crate) fn outliers(rest: i32) -> u64 {
    u64::from(rest.unsigned_abs().div_ceil(OUTLIER_MAX as u32))
}

impl Grid {
    pub(crate) fn new(side: Side, step: f32, classes: &[u8], tables: GridTables) -> Self {
        Self { step, side, runs: runs(classes), classes: classes.to_vec(), tables }
    }

    /// What a code of 1 is worth.
    #[must_use]
    pub fn step(&self) -> f32 {
        self.step
    }

    /// What is taken from a stored code of that coefficient to get its code.
    #[must_use]
    pub fn bias(&self, coefficient: usize) -> i32 {
        CLASSES[usize::from(self.classes[coefficient])].bias()
    }

    /// Appends lengths and chunks of `rows` (`[tokens, dim]`), at most `limit` bytes; returns the
    /// bytes of the lengths.
    pub(crate) fn encode(
        &self,
        rows: &[f32],
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<u64, Unquantizable> {
        let dim = self.classes.len();
        let start = out.len();
        let lengths = 4 * (rows.len() / dim).div_ceil(CHUNK_TOKENS);
        out.resize(start + lengths, 0);
        let (mut stored, mut row_codes) = (Vec::new(), vec![0; dim]);
        let mut outliers = Vec::new();
        for (index, rows) in rows.chunks(dim * CHUNK_TOKENS).enumerate() {
            stored.clear();
            outliers.clear();
            for (token, row) in rows.chunks_exact(dim).enumerate() {
                codes(row, self.step, &mut row_codes)?;
                self.store(token, &row_codes, &mut stored, &mut outliers);
            }
            let tables = (&self.runs[..], &self.tables[..]);
            let words = lanes::encode_chunk(self.side, tables, (&stored, dim), out);
            out.extend_from_slice(&outliers);
            let count = outliers.len() / (OUTLIER_BITS / 8) as usize;
            if out.len() - start > limit || count > usize::from(u16::MAX) {
                return Err(Unquantizable);
            }
            // 64 tokens of 1024 codes of 15 bits at most are fewer than 2^16 words.
            let sizes = [words, count].map(|size| (size as u16).to_le_bytes());
            out[start + 4 * index..][..4].copy_from_slice(sizes.as_flattened());
        }
        Ok(lengths as u64)
    }

    /// Appends the stored codes of a row, and the outliers it has.
    fn store(&self, token: usize, codes: &[i32], stored: &mut Vec<u16>, outliers: &mut Vec<u8>) {
        for (position, (code, class)) in codes.iter().zip(&self.classes).enumerate() {
            let (kept, mut rest) = CLASSES[usize::from(*class)].cut(*code);
            stored.push(kept);
            while rest != 0 {
                let part = rest.clamp(-OUTLIER_MAX, OUTLIER_MAX);
                rest -= part;
                let place = (position * CHUNK_TOKENS + token) as u16;
                outliers.extend(place.to_le_bytes());
                outliers.push(part as i8 as u8);
            }
        }
    }

    /// Decodes the rows `wanted` of a page.
    pub(crate) fn decode(
        &self,
        lanes: &LaneCodes<'_>,
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let dim = self.classes.len();
        let mut stored = vec![0u16; CHUNK_TOKENS * dim];
        let mut codes = vec![0i32; CHUNK_TOKENS * dim];
        for index in wanted.start / CHUNK_TOKENS..wanted.end.div_ceil(CHUNK_TOKENS) {
            let chunk = lanes.chunk(index);
            let stored = &mut stored[..chunk.tokens * dim];
            lanes.decode(index, stored)?;
            for (codes, stored) in codes.chunks_exact_mut(dim).zip(stored.chunks_exact(dim)) {
                codes.fill(0);
                for run in &self.runs {
                    let bias = self.bias(run.first);
                    let run = run.first..run.first + run.len;
                    for (code, stored) in codes[run.clone()].iter_mut().zip(&stored[run]) {
                        *code = i32::from(*stored) - bias;
                    }
                }
            }
            for outlier in lanes.outliers(&chunk) {
                let outlier = outlier?;
                codes[outlier.token * dim + outlier.position] += outlier.rest;
            }
            let first = index * CHUNK_TOKENS;
            let rows = wanted.start.max(first)..wanted.end.min(first + chunk.tokens);
            let out = &mut out[(rows.start - wanted.start) * dim..(rows.end - wanted.start) * dim];
            for (c, code) in out.iter_mut().zip(&codes[(rows.start - first) * dim..]) {
                *c = *code as f32 * self.step;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alphabet_fits_the_short_tables_and_every_code_a_byte() {
        for class in &CLASSES[1..] {
            assert!(class.alphabet() <= 128, "{class:?}");
            assert!(2 * class.bias() + (1 << class.raw_bits) <= 256, "{class:?}");
            // Packed entries.
            assert!(class.group == 1 || class.grouping().levels < 1 << (8 / class.group));
        }
    }

    #[test]
    fn cut_codes_and_rests_add_up() {
        for class in CLASSES {
            for code in -300..300 {
                let (kept, rest) = class.cut(code);
                assert!(usize::from(kept >> class.raw_bits) < usize::from(class.grouping().levels));
                assert_eq!(i32::from(kept) - class.bias() + rest, code, "{class:?}");
            }
        }
    }

    #[test]
    fn runs_leave_the_zero_class_out() {
        let run = |table, first, len| LaneRun { table, first, len };
        assert_eq!(runs(&[2, 2, 0, 0, 2, 1]), [run(1, 0, 2), run(1, 4, 1), run(0, 5, 1)]);
        assert_eq!(runs(&[0, 0]), []);
    }
}
