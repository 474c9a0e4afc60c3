//! Codes and scales of a page's rows: the loop that quantizers share, compiled for the widest
//! registers at hand.

use super::Unquantizable;
use super::float::largest_magnitude;
use crate::row_block::RowBlock;
use crate::simd::dispatch_simd;
use pulp::{Simd, WithSimd};

/// Rows `[tokens, dim]` and their largest magnitude.
#[derive(Clone, Copy)]
pub(super) struct MeasuredRows<'a> {
    pub(super) block: RowBlock<'a>,
    pub(super) absmax: f32,
}

/// The destination of quantized rows.
pub(super) struct CodeSink<'a> {
    /// As many as the rows have codes.
    pub(super) symbols: &'a mut [u16],
    /// Scales are appended here.
    pub(super) scales: &'a mut Vec<u8>,
}

/// A quantizer that makes the codes and scales of a page in one loop over its rows.
pub(super) trait CodeLoop {
    /// Codes of one row.
    fn row_codes(&self, dim: usize) -> usize {
        dim
    }

    /// Fills in the codes of finite rows and appends their scales. It must be inlined: only then is
    /// it compiled for the registers of `simd`.
    fn quantize_within<S: Simd>(
        &self,
        simd: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable>;
}

/// Appends the codes and scales of `block`.
pub(super) fn append_codes<Q: CodeLoop>(
    by: &Q,
    block: RowBlock<'_>,
    symbols: &mut Vec<u16>,
    scales: &mut Vec<u8>,
) -> Result<(), Unquantizable> {
    let rows = MeasuredRows { block, absmax: largest_magnitude(block.rows)? };
    let first = symbols.len();
    symbols.resize(first + block.rows.len() / block.dim * by.row_codes(block.dim), 0);
    let into = CodeSink { symbols: &mut symbols[first..], scales };
    dispatch_simd(QuantizePage { by, rows, into })
}

/// [`CodeLoop::quantize_within`] for a page.
struct QuantizePage<'a, Q> {
    by: &'a Q,
    rows: MeasuredRows<'a>,
    into: CodeSink<'a>,
}

impl<Q: CodeLoop> WithSimd for QuantizePage<'_, Q> {
    type Output = Result<(), Unquantizable>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        self.by.quantize_within(simd, self.rows, self.into)
    }
}
