//! Grid pages: `code = round(c / step)` with one step for all coefficients of a head, entropy
//! coded by coefficient class (`docs/adr/0005-grid-codec.md`).
//!
//! Coefficients of like spread form a class and share a Huffman table. A Huffman code cannot spend
//! less than a bit, so narrow classes code several coefficients as one symbol, and the narrowest
//! is not coded at all; the widest code their high bits and store the low ones as they are. Rare
//! symbols have no code, which would take room from the others. What a class has no place or code
//! for is cut off, and the rest becomes an outlier: whatever the data, every coefficient is off by
//! at most half a step; drift costs bits, not accuracy.
//!
//! Payload: per chunk of 64 tokens its words and outliers (u16 each), then the chunks (`streams`).
//! Classes and tables come from the calibration, so a page holds codes only.

use super::bind::{HeadBinder, SideBinding, mismatch_error};
use super::registry::QuantizerSpec;
use super::stored::StoredLayout;
use super::{HeadQuantizer, PayloadRows, Unquantizable};
use crate::calibration::LAYER_TABLE_BYTES;
use crate::huffman::streams::{
    self, CHUNK_TOKENS, StreamCodes, StreamRun, StreamTable, SymbolGrouping,
};
use crate::huffman::streams::{CodeRows, CodeTables};
use crate::page::id;
use crate::parse::{ParseResult, QuantizerWord, SingleArgument, SpecCursor};
use crate::simd::dispatch_simd;
use crate::{CodecError, EntropyCoding, PageBytes, PageError};
use kvd_core::{DType, Geometry, Side};
use pulp::{Simd, WithSimd};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// Largest code.
const CODE_MAX: f32 = 32767.0;
/// How the coefficients of one class are coded.
#[derive(Clone, Copy, Debug)]
pub struct CodeClass {
    /// Coefficients per symbol.
    pub group: usize,
    /// Codes, without their low bits, go from minus this to this.
    pub magnitude: i32,
    /// Low bits that are stored as they are.
    pub raw_bits: u32,
    /// Upper bound of the spreads (standard deviation over step) that the class is made for.
    spread_max: f32,
}

const fn code_class(group: usize, magnitude: i32, raw_bits: u32, spread_max: f32) -> CodeClass {
    CodeClass { group, magnitude, raw_bits, spread_max }
}

/// All classes, narrowest first. The first is the zero class, which has no table.
pub const CLASSES: [CodeClass; 15] = [
    code_class(1, 0, 0, 0.15),
    code_class(4, 1, 0, 0.22),
    code_class(4, 1, 0, 0.30),
    code_class(4, 1, 0, 0.38),
    code_class(2, 7, 0, 0.52),
    code_class(2, 7, 0, 0.72),
    code_class(2, 7, 0, 1.0),
    code_class(2, 7, 0, 1.4),
    code_class(2, 7, 0, 1.9),
    code_class(1, 15, 0, 2.7),
    code_class(1, 15, 0, 3.8),
    code_class(1, 15, 1, 5.3),
    code_class(1, 15, 1, 7.5),
    code_class(1, 15, 2, 11.0),
    code_class(1, 15, 3, f32::INFINITY),
];

impl CodeClass {
    /// The number added to a code to store it; the sum fits a byte.
    pub(crate) const fn bias(self) -> i32 {
        self.magnitude << self.raw_bits
    }

    /// How stored codes become symbols.
    pub const fn symbol_grouping(self) -> SymbolGrouping {
        SymbolGrouping {
            group: self.group,
            levels: 2 * self.magnitude as u16 + 1,
            raw_bits: self.raw_bits,
            missing: self.magnitude as u16,
        }
    }

    /// Symbols of the class.
    pub const fn symbol_count(self) -> usize {
        (2 * self.magnitude as usize + 1).pow(self.group as u32)
    }

    /// The code to store for `code`, and the difference to it.
    pub fn cut_code(self, code: i32) -> (u16, i32) {
        cut_to_range(code, self.bias(), self.largest_code())
    }

    /// Largest code that is stored.
    const fn largest_code(self) -> i32 {
        self.bias() + (1 << self.raw_bits) - 1
    }
}

#[inline(always)]
fn cut_to_range(code: i32, bias: i32, largest: i32) -> (u16, i32) {
    let kept = code.max(-bias).min(largest);
    ((kept + bias) as u16, code - kept)
}

/// Stored codes of rows, and the differences to the codes.
struct QuantizeGrid<'a> {
    step: f32,
    /// Biases and largest codes, by coefficient.
    cuts: &'a [Vec<i32>; 2],
    rows: &'a [f32],
    into: (&'a mut [u16], &'a mut [i32]),
}

impl WithSimd for QuantizeGrid<'_> {
    type Output = Result<(), Unquantizable>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let Self { step, cuts, rows, into: (stored, rests) } = self;
        let [biases, largest] = cuts;
        let dim = biases.len();
        let mut buffer = [0i32; DIM_MAX];
        let row_codes = &mut buffer[..dim];
        let into = stored.chunks_exact_mut(dim).zip(rests.chunks_exact_mut(dim));
        for (row, (stored, rests)) in rows.chunks_exact(dim).zip(into) {
            round_row(row, step, row_codes)?;
            let cuts = row_codes.iter().zip(biases).zip(largest);
            for (((code, bias), largest), (stored, rest)) in cuts.zip(stored.iter_mut().zip(rests))
            {
                (*stored, *rest) = cut_to_range(*code, *bias, *largest);
            }
        }
        Ok(())
    }
}

/// The class that is made for coefficients whose standard deviation is `spread` steps.
pub fn class_of(spread: f32) -> u8 {
    CLASSES.iter().position(|class| spread < class.spread_max).unwrap_or(CLASSES.len() - 1) as u8
}

/// The runs of a head's classes, one class per coefficient; the zero class has none. Table `n` is
/// that of class `n + 1`.
pub(crate) fn class_runs(classes: &[u8]) -> Vec<StreamRun> {
    let mut runs: Vec<StreamRun> = Vec::new();
    let coded = classes.iter().enumerate().filter(|(_, class)| **class > 0);
    for (index, class) in coded {
        let table = usize::from(*class) - 1;
        match runs.last_mut() {
            Some(run) if run.table == table && run.first + run.len == index => run.len += 1,
            _ => runs.push(StreamRun { table, first: index, len: 1 }),
        }
    }
    runs
}

/// The tables of one side of one layer, by class; the zero class has none.
pub(crate) type GridTables = Arc<[StreamTable]>;

/// A grid as a spec asks for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GridSpec {
    /// Bits per value that pages should take on the calibration text, everything counted.
    pub rate: f32,
}

impl QuantizerSpec for GridSpec {
    fn spec_names() -> &'static [&'static str] {
        &["grid()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let syntax = SingleArgument { argument: "rate", what: "bits per value" };
        Ok(Self { rate: cursor.parse_single(word, syntax)? })
    }

    fn page_id(&self, _native: DType) -> u8 {
        id::GRID
    }

    fn check_parameters(&self) -> Result<(), String> {
        if (0.25..=10.0).contains(&self.rate) {
            return Ok(());
        }
        Err(format!("grid rate={}: must be 0.25 to 10 bits per value", self.rate))
    }

    fn check_entropy(&self, entropy: EntropyCoding) -> Result<(), String> {
        match entropy {
            EntropyCoding::Huffman => Ok(()),
            EntropyCoding::None => {
                Err("grid needs /huffman: its codes have no fixed width".to_owned())
            }
        }
    }

    fn code_count(&self) -> Option<u32> {
        None
    }

    fn target_bits(&self) -> Option<f32> {
        Some(self.rate)
    }

    fn is_fitted(&self) -> bool {
        true
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        let which = side.side;
        let Some(grid) = side.part.and_then(|part| part.grid.as_ref()) else {
            return Err(mismatch_error(format!("{which} has no grid")));
        };
        let tables = grid.layer_tables(side.layer.0 as usize);
        let tables = tables.ok_or_else(|| mismatch_error(format!("{which} has no tables")))?;
        let tables = tables.into_iter().zip(&CLASSES[1..]);
        let tables = tables.map(|(table, class)| StreamTable::new(table, class.symbol_grouping()));
        let tables: GridTables = tables.collect();
        let dim = side.geometry.head_dim(which);
        Ok(Box::new(move |index, hash| {
            let (step, classes) = (grid.steps[index], &grid.classes[index * dim..][..dim]);
            hash.update(&step.to_le_bytes());
            hash.update(classes);
            tables.iter().for_each(|table| hash.update(table.huffman.code_lengths()));
            let bound = Grid::new(which, step, classes, Arc::clone(&tables));
            Ok(Arc::new(bound) as Arc<dyn HeadQuantizer>)
        }))
    }
}

impl fmt::Display for GridSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "grid(rate={})", self.rate)
    }
}

/// A head's step and classes, and the tables it shares with the other heads of its layer.
#[derive(Clone, Debug)]
pub struct Grid {
    step: f32,
    side: Side,
    pub(crate) runs: Vec<StreamRun>,
    /// Class of each coefficient.
    classes: Vec<u8>,
    pub(crate) tables: GridTables,
}

/// Codes of a row: `round(c / step)`, ties to even.
#[inline(always)]
pub fn round_row(row: &[f32], step: f32, codes: &mut [i32]) -> Result<(), Unquantizable> {
    // A number of this size has no room for a fraction: adding it rounds, without a call of the
    // mathematics library for each coefficient.
    const MAGIC: f32 = 12_582_912.0;
    let mut fits = true;
    for (code, c) in codes.iter_mut().zip(row) {
        let rounded = (c / step).clamp(-2.0 * CODE_MAX, 2.0 * CODE_MAX) + MAGIC;
        // NaN lies in no range.
        fits &= (MAGIC - CODE_MAX..=MAGIC + CODE_MAX).contains(&rounded);
        *code = rounded.to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed();
    }
    if fits { Ok(()) } else { Err(Unquantizable) }
}

impl Grid {
    /// A grid of one class per coefficient; `tables` are those of the classes after the zero class.
    #[must_use]
    pub fn new(side: Side, step: f32, classes: &[u8], tables: GridTables) -> Self {
        Self { step, side, runs: class_runs(classes), classes: classes.to_vec(), tables }
    }

    /// The step: the value of code 1.
    #[must_use]
    pub fn step(&self) -> f32 {
        self.step
    }

    /// The tables that its runs name, shared by the heads of a layer.
    #[must_use]
    pub fn tables(&self) -> &[StreamTable] {
        &self.tables
    }

    /// The number subtracted from a stored code of that coefficient to get its code.
    #[must_use]
    pub fn bias(&self, coefficient: usize) -> i32 {
        CLASSES[usize::from(self.classes[coefficient])].bias()
    }

    /// The largest code of that coefficient that is stored whole; the smallest is minus
    /// [`Grid::bias`].
    #[must_use]
    pub fn largest_code(&self, coefficient: usize) -> i32 {
        CLASSES[usize::from(self.classes[coefficient])].largest_code()
    }

    /// Appends lengths and chunks of `rows` (`[tokens, dim]`), at most `limit` bytes; returns the
    /// bytes of the lengths.
    pub fn append_chunks(
        &self,
        rows: &[f32],
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<u64, Unquantizable> {
        let dim = self.classes.len();
        let start = out.len();
        let lengths = 4 * (rows.len() / dim).div_ceil(CHUNK_TOKENS);
        out.resize(start + lengths, 0);
        let cuts = [CodeClass::bias, CodeClass::largest_code]
            .map(|of| self.classes.iter().map(|class| of(CLASSES[usize::from(*class)])).collect());
        let (mut stored, mut rests) = (Vec::new(), Vec::new());
        for (index, rows) in rows.chunks(dim * CHUNK_TOKENS).enumerate() {
            stored.resize(rows.len(), 0);
            rests.resize(rows.len(), 0);
            let (step, into) = (self.step, (&mut stored[..], &mut rests[..]));
            dispatch_simd(QuantizeGrid { step, cuts: &cuts, rows, into })?;
            let coding = CodeTables { runs: &self.runs, tables: &self.tables };
            let mut rest = |place: usize, missing: i32| rests[place] += missing;
            let words = streams::encode_chunk(
                self.side,
                coding,
                CodeRows { rows: &stored, per_row: dim },
                out,
                &mut rest,
            );
            let count = streams::write_outliers(&rests, out);
            if out.len() - start > limit || count > usize::from(u16::MAX) {
                return Err(Unquantizable);
            }
            // 64 tokens of 1024 codes of 15 bits at most are fewer than 2^16 words.
            let sizes = [words, count].map(|size| (size as u16).to_le_bytes());
            out[start + 4 * index..][..4].copy_from_slice(sizes.as_flattened());
        }
        Ok(lengths as u64)
    }

    /// Decodes the rows `wanted` of a page.
    pub(crate) fn decode_rows(
        &self,
        streams: &StreamCodes<'_>,
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let dim = self.classes.len();
        let mut stored = vec![0u16; CHUNK_TOKENS * dim];
        let mut codes = vec![0i32; CHUNK_TOKENS * dim];
        for index in wanted.start / CHUNK_TOKENS..wanted.end.div_ceil(CHUNK_TOKENS) {
            let chunk = streams.chunk(index);
            let stored = &mut stored[..chunk.tokens * dim];
            streams.decode_chunk(index, stored)?;
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
            for outlier in streams.chunk_outliers(&chunk) {
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

impl HeadQuantizer for Grid {
    fn page_id(&self) -> u8 {
        id::GRID
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Grid(self)
    }

    fn append_payload(
        &self,
        rows: PayloadRows<'_>,
        _symbols: &mut Vec<u16>,
        out: &mut Vec<u8>,
    ) -> Option<Result<PageBytes, Unquantizable>> {
        let start = out.len();
        Some(self.append_chunks(rows.block.rows, rows.limit, out).map(|offsets| {
            let codes = (out.len() - start) as u64 - offsets;
            PageBytes { offsets, codes, ..PageBytes::default() }
        }))
    }

    fn shared_bytes(&self) -> u64 {
        LAYER_TABLE_BYTES as u64
    }

    /// A step, and a class per coefficient.
    fn calibration_bytes(&self) -> u64 {
        4 + self.classes.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alphabet_fits_the_short_tables_and_every_code_a_byte() {
        for class in &CLASSES[1..] {
            assert!(
                class.symbol_count() <= 256
                    && class.symbol_count() == class.symbol_grouping().symbol_count()
            );
            // Joint counts of a group serve every class that joins so many.
            let alike = |other: &&CodeClass| class.group > 1 && other.group == class.group;
            assert!(CLASSES.iter().filter(alike).all(|c| c.magnitude == class.magnitude));
            assert!(2 * class.bias() + (1 << class.raw_bits) <= 256, "{class:?}");
            // Packed entries.
            assert!(class.group == 1 || class.symbol_grouping().levels < 1 << (8 / class.group));
        }
    }

    #[test]
    fn cut_codes_and_rests_add_up() {
        for class in CLASSES {
            for code in -300..300 {
                let (kept, rest) = class.cut_code(code);
                assert!(
                    usize::from(kept >> class.raw_bits)
                        < usize::from(class.symbol_grouping().levels)
                );
                assert_eq!(i32::from(kept) - class.bias() + rest, code, "{class:?}");
            }
        }
    }

    #[test]
    fn runs_leave_the_zero_class_out() {
        let run = |table, first, len| StreamRun { table, first, len };
        assert_eq!(class_runs(&[2, 2, 0, 0, 2, 1]), [run(1, 0, 2), run(1, 4, 1), run(0, 5, 1)]);
        assert_eq!(class_runs(&[0, 0]), []);
    }
}
