//! One head's side of a codec: its transforms and its quantizer with what calibration gave them.

pub(crate) mod bind;
pub(crate) mod bit_levels;
pub(crate) mod bitalloc;
mod codes;
pub(crate) mod float;
pub(crate) mod grid;
pub(crate) mod hybrid;
pub(crate) mod lloyd;
pub(crate) mod nearest;
pub(crate) mod polar;
pub(crate) mod polar_spec;
pub(crate) mod ranges;
mod regions;
pub(crate) mod registry;
pub(crate) mod stored;
pub(crate) mod symmetric;
mod tiles;
pub(crate) mod uniform;
pub(crate) mod uniform_spec;
pub(crate) mod vq;

use crate::PageBytes;
use crate::bits::{self, CodeLayout};
use crate::huffman::streams::StreamRun;
use crate::reader::FixedCodes;
use crate::row_block::{RowBlock, RowBlockMut};
use crate::transform::TransformStep;
use bitalloc::BitAlloc;
use grid::Grid;
pub use hybrid::HybridLayout;
use kvd_core::{Geometry, Side};
use std::fmt;
use std::sync::Arc;
use stored::{StoredLayout, UniformGroups};
use uniform::ScaleRow;
use uniform_spec::UniformLevels;
use vq::{CODES_PER_ROW_MAX, VectorQuantizer};

/// The page's values do not fit the quantizer; the page falls back to raw floats.
#[derive(Debug)]
pub struct Unquantizable;

/// The scales of some groups.
#[derive(Clone, Copy)]
pub(super) struct GroupScales<'a> {
    pub(super) minima: &'a [f32],
    /// Reciprocals of steps.
    pub(super) inverse: &'a [f32],
}

/// The scales of a page.
#[derive(Clone, Copy)]
pub(crate) struct PageScales<'a> {
    /// As many as [`HeadQuantizer::scale_bytes`] says.
    pub(crate) bytes: &'a [u8],
    /// Rows of the page: what lies where depends on it.
    pub(crate) tokens: usize,
}

/// The codes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeShape {
    /// Codes of one row.
    pub(crate) per_row: usize,
    /// Bits of a code of fixed width.
    pub(crate) bits: u32,
}

impl CodeShape {
    /// None: the quantizer writes its payload itself.
    pub(crate) const NONE: Self = Self { per_row: 0, bits: 0 };
}

/// Coefficients whose payload is to be written.
#[derive(Clone, Copy)]
pub(crate) struct PayloadRows<'a> {
    pub(crate) block: RowBlock<'a>,
    /// The largest magnitude, where it is known.
    pub(crate) absmax: Option<f32>,
    pub(crate) side: Side,
    /// Bytes that the rows took before: a payload that is longer serves nobody.
    pub(crate) limit: usize,
    /// Whether codes are to have a fixed width.
    pub(crate) fixed_width: bool,
}

/// Codes of consecutive rows of a page.
#[derive(Clone, Copy)]
pub(crate) struct SymbolRows<'a> {
    /// The first row.
    pub(crate) first: usize,
    /// `[rows, per_row]`.
    pub(crate) symbols: &'a [u16],
}

/// A quantizer bound to a head by its calibration: how rows become a payload and back.
///
/// A page costs a call or two through the table of functions. Loops over its rows are provided
/// methods, which every quantizer has compiled for itself (`docs/adr/0028-quantizer-registry.md`).
pub(crate) trait HeadQuantizer: fmt::Debug + Send + Sync {
    /// Id in page headers.
    fn page_id(&self) -> u8;

    /// How pages hold their values, for all that reads pages.
    fn stored_layout(&self) -> StoredLayout<'_>;

    /// Codes of a row of `dim` channels.
    fn code_shape(&self, _dim: usize) -> CodeShape {
        CodeShape::NONE
    }

    /// Bytes of scales in a page.
    fn scale_bytes(&self, _tokens: usize, _dim: usize) -> usize {
        0
    }

    /// Bytes of the codes of `tokens` rows at a fixed width, or of the rows; 0 where codes have
    /// none.
    fn code_bytes(&self, side: Side, tokens: usize, dim: usize) -> usize {
        match self.code_shape(dim) {
            CodeShape::NONE => 0,
            CodeShape { per_row, bits } => {
                CodeLayout::new(side, tokens, per_row, bits).size_bytes()
            }
        }
    }

    /// Appends a payload that is no scales and codes, or scales and codes by a shorter way; `None`
    /// where the caller makes them by [`HeadQuantizer::quantize_rows`]. `symbols` is scratch.
    fn append_payload(
        &self,
        _rows: PayloadRows<'_>,
        _symbols: &mut Vec<u16>,
        _out: &mut Vec<u8>,
    ) -> Option<Result<PageBytes, Unquantizable>> {
        None
    }

    /// Appends the codes and scales of rows.
    fn quantize_rows(
        &self,
        _block: RowBlock<'_>,
        _symbols: &mut Vec<u16>,
        _scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        Ok(())
    }

    /// Writes row `row` of a page with those scales and codes. Any code gives a value.
    fn dequantize_row(
        &self,
        _scales: PageScales<'_>,
        _row: usize,
        _symbols: &[u16],
        _loaded: &mut ScaleRow,
        _out: &mut [f32],
    ) {
    }

    /// Writes consecutive rows of a page with those scales and codes.
    fn dequantize_rows(
        &self,
        scales: PageScales<'_>,
        codes: SymbolRows<'_>,
        loaded: &mut ScaleRow,
        out: RowBlockMut<'_>,
    ) {
        let per_row = self.code_shape(out.dim).per_row;
        let rows = codes.symbols.chunks_exact(per_row).zip(out.rows.chunks_exact_mut(out.dim));
        for (row, (symbols, out)) in (codes.first..).zip(rows) {
            self.dequantize_row(scales, row, symbols, loaded, out);
        }
    }

    /// Writes rows of a page from `first` on, from codes of fixed width.
    fn decode_fixed(&self, page: FixedCodes<'_>, first: usize, out: RowBlockMut<'_>) {
        let FixedCodes { layout, scales, codes } = page;
        let scales = PageScales { bytes: scales, tokens: layout.tokens() };
        let (mut loaded, mut buffer) = (ScaleRow::default(), [0; CODES_PER_ROW_MAX]);
        let symbols = &mut buffer[..layout.per_row()];
        for (row, out) in (first..).zip(out.rows.chunks_exact_mut(out.dim)) {
            bits::unpack_row(&layout, codes, row, symbols);
            self.dequantize_row(scales, row, symbols, &mut loaded, out);
        }
    }

    /// How groups get uniform levels, where they do.
    fn uniform_levels(&self) -> Option<UniformLevels> {
        None
    }

    /// Polar codes: see [`HeadCodec::polar_bounds`].
    fn polar_bounds(&self) -> Option<(&[[f32; 2]], &[f32])> {
        None
    }

    /// Bytes of the calibration that the heads of a layer share.
    fn shared_bytes(&self) -> u64 {
        0
    }

    /// Bytes kept from the calibration for the head alone, codebooks apart.
    fn calibration_bytes(&self) -> u64 {
        0
    }
}

/// One head of one side of one layer: dimension, transforms, quantizer.
#[derive(Clone, Debug)]
pub struct HeadCodec {
    pub(crate) dim: usize,
    pub(crate) steps: Vec<TransformStep>,
    /// The row whose coefficients are zeros, where that is not a row of zeros.
    pub(crate) offset: Option<Box<[f32]>>,
    /// Median length of its rows, where shorter ones are raised.
    pub(crate) gain: Option<f32>,
    /// Whether equal errors of coefficients are equal errors of scores (`qpca`).
    pub(crate) query_metric: bool,
    pub(crate) quantizer: Arc<dyn HeadQuantizer>,
    /// Index of the head's spec in [`crate::CodecSpec::side_specs`].
    pub(crate) variant: usize,
    /// Whether Huffman tables are built from the blocks themselves.
    pub(crate) trained_tables: bool,
    /// Then its rows are one run of codes.
    pub(crate) trained_run: StreamRun,
    /// Whether its pages stand in for another side's, and say so.
    pub(crate) rung: bool,
    /// Hash of spec and calibration, stored in each page.
    pub(crate) tag: u16,
}

impl HeadCodec {
    /// Channels of a row, and coefficients of its transform.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Quantizer id in page headers.
    #[must_use]
    pub fn quantizer_id(&self) -> u8 {
        self.quantizer.page_id()
    }

    /// How this head's pages hold their values. Where [`HeadCodec::stream_runs`] names runs, codes
    /// are Huffman codes and not of a fixed width.
    #[must_use]
    pub fn stored_layout(&self) -> StoredLayout<'_> {
        self.quantizer.stored_layout()
    }

    /// How the head's values are grouped, when its levels are uniform.
    #[must_use]
    pub fn uniform_groups(&self) -> Option<UniformGroups> {
        match self.stored_layout() {
            StoredLayout::Uniform(groups) => Some(groups),
            _ => None,
        }
    }

    /// The head's grid, when that is its quantizer.
    #[must_use]
    pub fn grid(&self) -> Option<&Grid> {
        match self.stored_layout() {
            StoredLayout::Grid(grid) => Some(grid),
            _ => None,
        }
    }

    /// The levels of its codes, when each row has a scale.
    #[must_use]
    pub fn lloyd_levels(&self) -> Option<&[f32]> {
        match self.stored_layout() {
            StoredLayout::Lloyd { levels, .. } => Some(levels),
            _ => None,
        }
    }

    /// The head's bit allocation, when that is its quantizer.
    #[must_use]
    pub fn bitalloc(&self) -> Option<&BitAlloc> {
        match self.stored_layout() {
            StoredLayout::BitAlloc(bitalloc) => Some(bitalloc),
            _ => None,
        }
    }

    /// The runs of its rows, when its pages hold Huffman codes.
    #[must_use]
    pub fn stream_runs(&self) -> Option<&[StreamRun]> {
        match self.grid() {
            Some(grid) => Some(&grid.runs),
            None => self.trained_tables.then_some(std::slice::from_ref(&self.trained_run)),
        }
    }

    /// Whether its codes are e4m3 under one scale per page.
    #[must_use]
    pub fn is_e4m3(&self) -> bool {
        matches!(self.stored_layout(), StoredLayout::E4m3)
    }

    /// The head's codebooks, when its quantizer is VQ.
    #[must_use]
    pub fn vq(&self) -> Option<&VectorQuantizer> {
        match self.stored_layout() {
            StoredLayout::Codebooks(vq) => Some(vq),
            _ => None,
        }
    }

    /// Bytes of the calibration that the heads of a layer share.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.quantizer.shared_bytes()
    }

    /// Bytes kept from the calibration for this head alone; codebooks, which heads may share, are
    /// counted by [`vq::codebook_bytes`].
    pub(crate) fn calibration_bytes(&self) -> u64 {
        let factors: u64 = self.steps.iter().map(TransformStep::calibration_bytes).sum();
        let gain = if self.gain.is_some() { 4 } else { 0 };
        factors + gain + self.quantizer.calibration_bytes()
    }

    /// Whether coefficients are the rows themselves.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.steps.is_empty()
    }

    /// The row whose coefficients are zeros, where that is not a row of zeros.
    #[must_use]
    pub fn offset(&self) -> Option<&[f32]> {
        self.offset.as_deref()
    }

    /// Key side: writes `q'` with `q'·c == q·k` for the coefficients `c` of a key `k`
    /// (VecInfer eq. 7) and returns what to add to each score. `q` and `out` have `dim` values.
    ///
    /// # Panics
    /// When a length is not `dim`.
    pub fn fold_query(&self, q: &[f32], out: &mut [f32]) -> f32 {
        assert_eq!(q.len(), self.dim, "fold_query: query length");
        out.copy_from_slice(q);
        self.steps.iter().map(|step| step.fold_query(out)).sum()
    }

    /// [`HeadCodec::fold_query`] of several queries in place (`[n, dim]`), and what each adds to
    /// its scores; the same numbers in less time.
    ///
    /// # Panics
    /// When the length is no multiple of `dim`.
    #[must_use]
    pub fn fold_queries(&self, queries: &mut [f32]) -> Vec<f32> {
        assert!(queries.len().is_multiple_of(self.dim), "fold_queries: length of rows");
        let mut offsets = vec![0.0; queries.len() / self.dim];
        self.fold_queries_into(queries, &mut offsets);
        offsets
    }

    /// As [`HeadCodec::fold_queries`]; adds what each query adds to its scores to its offset.
    ///
    /// # Panics
    /// When there are not as many offsets as queries.
    pub fn fold_queries_into(&self, queries: &mut [f32], offsets: &mut [f32]) {
        assert_eq!(queries.len(), offsets.len() * self.dim, "fold_queries: offsets");
        for step in &self.steps {
            step.fold_query_rows(RowBlockMut { rows: &mut *queries, dim: self.dim }, offsets);
        }
    }

    /// Value side: turns weighted sums of coefficients in place (`[n, dim]`) into those of rows;
    /// `weight_sums` are the sums of the weights. See [`HeadCodec::unfold_value`] for one.
    ///
    /// # Panics
    /// When there are not as many sums as rows.
    pub fn unfold_values(&self, sums: &mut [f32], weight_sums: &[f32]) {
        assert_eq!(sums.len(), weight_sums.len() * self.dim, "unfold_values: length of rows");
        for step in self.steps.iter().rev() {
            step.invert_rows(RowBlockMut { rows: &mut *sums, dim: self.dim }, weight_sums);
        }
    }

    /// Value side: adds to `out` the rows' weighted sum, given the coefficients' weighted sum
    /// `acc`. `weight_sum` is the sum of the weights. Both slices have `dim` values.
    ///
    /// # Panics
    /// When a length is not `dim`.
    pub fn unfold_value(&self, acc: &[f32], weight_sum: f32, out: &mut [f32]) {
        assert_eq!(out.len(), self.dim, "unfold_value: output length");
        let mut row = [0f32; Geometry::HEAD_DIM_MAX as usize];
        let row = &mut row[..self.dim];
        self.inverse_sum(acc, weight_sum, row);
        for (o, r) in out.iter_mut().zip(row) {
            *o += *r;
        }
    }

    /// Turns rows into their coefficients (`[n, dim]`), before any gain.
    ///
    /// # Panics
    /// When the length is no multiple of `dim`.
    pub fn transform_rows(&self, rows: &mut [f32]) {
        assert!(rows.len().is_multiple_of(self.dim), "forward: length of rows");
        for step in &self.steps {
            step.transform_rows(rows, self.dim);
        }
    }

    /// Writes the row of `coeff`. Both slices have `dim` values.
    ///
    /// # Panics
    /// When a length is not `dim`.
    pub fn invert_row(&self, coeff: &[f32], out: &mut [f32]) {
        self.inverse_sum(coeff, 1.0, out);
    }

    fn inverse_sum(&self, coeff: &[f32], weight_sum: f32, out: &mut [f32]) {
        assert_eq!(coeff.len(), self.dim, "inverse: coefficient length");
        out.copy_from_slice(coeff);
        for step in self.steps.iter().rev() {
            step.invert_sum(out, weight_sum);
        }
    }
}
