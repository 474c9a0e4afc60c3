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
pub(crate) mod ranges;
mod regions;
pub(crate) mod stored;
pub(crate) mod symmetric;
mod tiles;
pub(crate) mod uniform;
pub(crate) mod vq;

use crate::UniformMode;
use crate::calibration::LAYER_TABLE_BYTES;
use crate::huffman::streams::StreamRun;
use crate::page::id;
use crate::row_block::{RowBlock, RowBlockMut};
use crate::transform::TransformStep;
use bit_levels::LEVELS;
use bitalloc::BitAlloc;
use codes::append_codes;
use float::E4m3;
use grid::Grid;
use hybrid::Hybrid;
pub use hybrid::HybridLayout;
use kvd_core::{DType, Geometry};
use lloyd::LloydMax;
use polar::Polar;
use std::sync::Arc;
use symmetric::Symmetric;
pub use uniform::UniformGroups;
use uniform::{ScaleRow, Uniform};
use vq::VectorQuantizer;

/// The page's values do not fit the quantizer; the page falls back to raw floats.
#[derive(Debug)]
pub(crate) struct Unquantizable;

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

/// A quantizer bound to a head.
#[derive(Clone, Debug)]
pub(crate) enum HeadQuantizer {
    /// Rows in a dtype, no codes.
    Float(DType),
    /// FP8 codes, one scale per page.
    E4m3,
    /// Uniform levels, f16 pairs per group.
    Uniform(Uniform),
    /// Uniform levels around zero, an f16 per group.
    Symmetric(Symmetric),
    /// Either of them, group by group.
    Hybrid(Hybrid),
    /// Angle and radius of channel pairs.
    Polar(Box<Polar>),
    /// The best levels for turned rows, an f16 per row; shared by the heads of a side.
    Lloyd(Arc<LloydMax>),
    /// Codebook indices.
    Vq(VectorQuantizer),
    /// One step per head, codes by class.
    Grid(Box<Grid>),
    /// Fixed widths and levels per coefficient.
    BitAlloc(Box<BitAlloc>),
}

impl HeadQuantizer {
    /// Bits of a fixed-width code; 0 when rows are stored as floats.
    pub(crate) fn code_bits(&self) -> u32 {
        match self {
            Self::Float(_) | Self::Grid(_) | Self::BitAlloc(_) => 0,
            Self::E4m3 => 8,
            Self::Uniform(uniform) => uniform.code_bits(),
            Self::Symmetric(symmetric) => symmetric.code_bits(),
            Self::Hybrid(hybrid) => hybrid.base.code_bits(),
            Self::Polar(polar) => polar.code_bits(),
            Self::Lloyd(lloyd) => lloyd.code_bits(),
            Self::Vq(vq) => vq.code_bits(),
        }
    }

    /// Codes of one row.
    pub(crate) fn symbols_per_row(&self, dim: usize) -> usize {
        match self {
            Self::Float(_) | Self::Grid(_) | Self::BitAlloc(_) => 0,
            Self::E4m3 | Self::Uniform(_) | Self::Symmetric(_) | Self::Hybrid(_) => dim,
            Self::Lloyd(_) => dim,
            Self::Polar(_) => dim / 2,
            Self::Vq(vq) => vq.codes_per_row(),
        }
    }

    /// Bytes of scales in a page.
    pub(crate) fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        match self {
            Self::Float(_) | Self::Vq(_) | Self::Grid(_) | Self::BitAlloc(_) => 0,
            Self::E4m3 => float::E4M3_SCALE_BYTES,
            Self::Uniform(uniform) => uniform.scale_bytes(tokens, dim),
            Self::Symmetric(symmetric) => symmetric.scale_bytes(tokens, dim),
            Self::Hybrid(hybrid) => hybrid.scale_bytes(tokens, dim),
            Self::Polar(polar) => Polar::scale_bytes(polar.group(), tokens, dim),
            Self::Lloyd(_) => LloydMax::scale_bytes(tokens),
        }
    }

    /// Appends the codes and scales of `rows` (`[tokens, dim]`).
    pub(crate) fn quantize_rows(
        &self,
        rows: &[f32],
        dim: usize,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        let block = RowBlock { rows, dim };
        match self {
            // These write their pages themselves.
            Self::Float(_) | Self::Grid(_) | Self::BitAlloc(_) => Ok(()),
            Self::E4m3 => append_codes(&E4m3, block, symbols, scales),
            Self::Uniform(uniform) => append_codes(uniform, block, symbols, scales),
            Self::Symmetric(symmetric) => append_codes(symmetric, block, symbols, scales),
            Self::Hybrid(hybrid) => append_codes(hybrid, block, symbols, scales),
            Self::Polar(polar) => append_codes(&**polar, block, symbols, scales),
            Self::Lloyd(lloyd) => append_codes(&**lloyd, block, symbols, scales),
            Self::Vq(vq) => vq.quantize_rows(rows, symbols),
        }
    }

    /// Writes row `row` of a page with those scales and codes. Any code gives a value.
    pub(crate) fn dequantize_row(
        &self,
        scales: PageScales<'_>,
        row: usize,
        symbols: &[u16],
        loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        let bytes = scales.bytes;
        match self {
            Self::Float(_) | Self::Grid(_) | Self::BitAlloc(_) => {}
            Self::E4m3 => float::decode_e4m3(bytes, symbols, out),
            Self::Uniform(uniform) => uniform.dequantize_row(bytes, row, symbols, loaded, out),
            Self::Symmetric(sym) => sym.dequantize_row(bytes, row, symbols, loaded, out),
            Self::Hybrid(hybrid) => hybrid.dequantize_row(scales, row, symbols, loaded, out),
            Self::Polar(polar) => polar.dequantize_row(bytes, row, symbols, loaded, out),
            Self::Lloyd(lloyd) => lloyd.dequantize_row(bytes, row, symbols, out),
            Self::Vq(vq) => vq.dequantize_row(symbols, out),
        }
    }
}

/// One head of one side of one layer: dimension, transforms, quantizer.
#[derive(Clone, Debug)]
pub struct HeadCodec {
    pub(crate) dim: usize,
    pub(crate) steps: Vec<TransformStep>,
    /// Median length of its rows, where shorter ones are raised.
    pub(crate) gain: Option<f32>,
    /// Whether equal errors of coefficients are equal errors of scores (`qpca`).
    pub(crate) query_metric: bool,
    pub(crate) quantizer: HeadQuantizer,
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
    pub(crate) fn quantizer_id(&self) -> u8 {
        match self.quantizer {
            HeadQuantizer::Float(dtype) => id::float_id(dtype),
            HeadQuantizer::E4m3 => id::E4M3,
            HeadQuantizer::Uniform(_) => id::UNIFORM,
            HeadQuantizer::Symmetric(_) => id::SYMMETRIC,
            HeadQuantizer::Hybrid(_) => id::HYBRID,
            HeadQuantizer::Polar(_) => id::POLAR,
            HeadQuantizer::Lloyd(_) => id::LLOYD,
            HeadQuantizer::Vq(_) => id::VQ,
            HeadQuantizer::Grid(_) => id::GRID,
            HeadQuantizer::BitAlloc(_) => id::BITALLOC,
        }
    }

    /// How the head's values are grouped, when its levels are uniform.
    #[must_use]
    pub fn uniform_groups(&self) -> Option<UniformGroups> {
        match &self.quantizer {
            HeadQuantizer::Uniform(side) => Some(side.groups_of_side(UniformMode::Asym)),
            HeadQuantizer::Symmetric(side) => Some(side.base.groups_of_side(UniformMode::Sym)),
            HeadQuantizer::Hybrid(side) => Some(side.base.groups_of_side(UniformMode::Hybrid)),
            _ => None,
        }
    }

    /// The head's grid, when that is its quantizer.
    #[must_use]
    pub fn grid(&self) -> Option<&Grid> {
        match &self.quantizer {
            HeadQuantizer::Grid(grid) => Some(grid),
            _ => None,
        }
    }

    /// The levels of its codes, when each row has a scale.
    #[must_use]
    pub fn lloyd_levels(&self) -> Option<&[f32]> {
        match &self.quantizer {
            HeadQuantizer::Lloyd(lloyd) => Some(lloyd.levels()),
            _ => None,
        }
    }

    /// The head's bit allocation, when that is its quantizer.
    #[must_use]
    pub fn bitalloc(&self) -> Option<&BitAlloc> {
        match &self.quantizer {
            HeadQuantizer::BitAlloc(bitalloc) => Some(bitalloc),
            _ => None,
        }
    }

    /// The runs of its rows, when its pages hold Huffman codes.
    #[must_use]
    pub fn stream_runs(&self) -> Option<&[StreamRun]> {
        match &self.quantizer {
            HeadQuantizer::Grid(grid) => Some(&grid.runs),
            _ => self.trained_tables.then_some(std::slice::from_ref(&self.trained_run)),
        }
    }

    /// Whether its codes are e4m3 under one scale per page.
    #[must_use]
    pub fn is_e4m3(&self) -> bool {
        matches!(self.quantizer, HeadQuantizer::E4m3)
    }

    /// The head's codebooks, when its quantizer is VQ.
    #[must_use]
    pub fn vq(&self) -> Option<&VectorQuantizer> {
        match &self.quantizer {
            HeadQuantizer::Vq(vq) => Some(vq),
            _ => None,
        }
    }

    /// Bytes of the calibration that the heads of a layer share.
    pub(crate) fn shared_bytes(&self) -> u64 {
        match self.quantizer {
            HeadQuantizer::Grid(_) => LAYER_TABLE_BYTES as u64,
            HeadQuantizer::BitAlloc(_) => 2 * LEVELS as u64,
            _ => 0,
        }
    }

    /// Bytes kept from the calibration for this head alone; codebooks, which heads may share, are
    /// counted by [`vq::codebook_bytes`].
    pub(crate) fn calibration_bytes(&self) -> u64 {
        let factors: u64 = self.steps.iter().map(TransformStep::calibration_bytes).sum();
        let quantizer = match &self.quantizer {
            // A step and a class per coefficient.
            HeadQuantizer::Grid(_) => 4 + self.dim as u64,
            HeadQuantizer::Polar(polar) => polar.calibration_bytes(),
            HeadQuantizer::BitAlloc(bitalloc) => bitalloc.calibration_bytes(),
            _ => 0,
        };
        let gain = if self.gain.is_some() { 4 } else { 0 };
        factors + gain + quantizer
    }

    /// Whether coefficients are the rows themselves.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.steps.is_empty()
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
        for step in &self.steps {
            step.fold_query_rows(RowBlockMut { rows: &mut *queries, dim: self.dim }, &mut offsets);
        }
        offsets
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
