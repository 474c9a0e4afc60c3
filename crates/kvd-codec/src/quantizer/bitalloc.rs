//! Bit-allocation pages: every coefficient has a fixed width of its own, 0 to 8 bits, and the
//! levels of its width (block quantization after Huang and Schultheiss, 1963).
//!
//! Widths, levels and scales come from the calibration, so a page holds codes only and every row
//! takes the same bits. Coefficients of one width stand together, widest first: the fit permutes
//! the rows of the side's matrix, so a page is a few runs of equal width.
//!
//! Payload: the codes of each run, laid out as any codes of fixed width; then the outliers, each a
//! row (u16), a coefficient (u16) and what its level lacks (f16). A coefficient whose level is off
//! by more than the head's bound is an outlier: other data costs bits, never accuracy.

use super::bind::{HeadBinder, SideBinding, mismatch_error};
use super::bit_levels::{BitLevels, LEVELS};
use super::registry::QuantizerSpec;
use super::stored::StoredLayout;
use super::{HeadQuantizer, PayloadRows, Unquantizable};
use crate::bits::{self, CodeLayout, TILE_TOKENS};
use crate::page::id;
use crate::parse::{ParseResult, QuantizerWord, SingleArgument, SpecCursor};
use crate::simd::dispatch_simd;
use crate::{CodecError, EntropyCoding, PageBytes, PageError};
use half::f16;
use kvd_core::{DType, Geometry, Side};
use pulp::{Simd, WithSimd};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one outlier.
const OUTLIER_BYTES: usize = 6;

/// Coefficients of a run are quantized as a multiple of so many, of whole registers.
const PADDING: usize = 16;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// A bit allocation as a spec asks for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BitAllocSpec {
    /// Mean bits per coefficient over the side's layers and heads.
    pub bits: f32,
}

impl QuantizerSpec for BitAllocSpec {
    fn spec_names() -> &'static [&'static str] {
        &["bitalloc()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let syntax = SingleArgument { argument: "b", what: "bits per coefficient" };
        Ok(Self { bits: cursor.parse_single(word, syntax)? })
    }

    fn page_id(&self, _native: DType) -> u8 {
        id::BITALLOC
    }

    fn check_parameters(&self) -> Result<(), String> {
        if (0.25..=8.0).contains(&self.bits) {
            return Ok(());
        }
        Err(format!("bitalloc b={}: must be 0.25 to 8 bits per coefficient", self.bits))
    }

    fn check_entropy(&self, entropy: EntropyCoding) -> Result<(), String> {
        match entropy {
            EntropyCoding::None => Ok(()),
            EntropyCoding::Huffman => {
                Err("bitalloc takes no /huffman: its codes have fixed widths".to_owned())
            }
        }
    }

    fn code_count(&self) -> Option<u32> {
        None
    }

    /// The mean over the side's heads, outliers apart.
    fn code_bytes(&self, geometry: &Geometry, side: Side) -> usize {
        let values = geometry.block_tokens as usize * geometry.head_dim(side);
        (f64::from(self.bits) * values as f64 / 8.0) as usize
    }

    fn is_fitted(&self) -> bool {
        true
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        let which = side.side;
        let part = side.part.and_then(|part| part.bitalloc.as_ref());
        let levels = part.and_then(|part| part.layer_levels(side.layer.0 as usize));
        let (Some(part), Some(levels)) = (part, levels.map(Arc::new)) else {
            return Err(mismatch_error(format!("{which} has no bit allocation")));
        };
        let dim = side.geometry.head_dim(which);
        Ok(Box::new(move |index, hash| {
            let (widths, bound) = (&part.widths[index * dim..][..dim], part.bounds[index]);
            let scales = &part.scales[index * dim..][..dim];
            hash.update(widths);
            scales.iter().chain([&bound]).for_each(|x| hash.update(&x.to_le_bytes()));
            levels.values().iter().for_each(|x| hash.update(&x.to_le_bytes()));
            let bound =
                BitAlloc::new(which, widths, BoundScales { scales, bound }, Arc::clone(&levels));
            Ok(Arc::new(bound) as Arc<dyn HeadQuantizer>)
        }))
    }
}

impl fmt::Display for BitAllocSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bitalloc(b={})", self.bits)
    }
}

/// A head's widths, scales and bound, and the levels it shares with the heads of its layer.
#[derive(Clone, Debug)]
pub struct BitAlloc {
    side: Side,
    /// Runs of equal width.
    runs: Vec<WidthRun>,
    scales: Vec<f32>,
    levels: Arc<BitLevels>,
    bound: f32,
}

/// Consecutive coefficients of one width.
#[derive(Clone, Copy, Debug)]
pub struct WidthRun {
    /// Bits of a code.
    pub width: usize,
    /// First coefficient.
    pub first: usize,
    /// Coefficients.
    pub len: usize,
}

/// A payload that begins with `codes` bytes of codes; outliers follow.
#[derive(Clone, Copy)]
pub(crate) struct PayloadCodes<'a> {
    pub(crate) payload: &'a [u8],
    pub(crate) codes: usize,
}

/// Codes and checked outliers of a page of so many rows.
#[derive(Clone, Copy)]
pub(crate) struct CodedRows<'a> {
    pub(crate) tokens: usize,
    pub(crate) codes: &'a [u8],
    pub(crate) outliers: &'a [u8],
}

/// The difference between an outlier coefficient and its level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutlierResidual {
    /// Row of the page.
    pub row: usize,
    /// Coefficient of the row.
    pub coefficient: usize,
    /// The value to add to the level.
    pub residual: f32,
}

impl OutlierResidual {
    fn from_bytes(bytes: [u8; OUTLIER_BYTES]) -> Self {
        let [r0, r1, c0, c1, x0, x1] = bytes;
        let row = usize::from(u16::from_le_bytes([r0, r1]));
        let coefficient = usize::from(u16::from_le_bytes([c0, c1]));
        Self { row, coefficient, residual: f16::from_le_bytes([x0, x1]).to_f32() }
    }
}

/// The runs of a head's widths, one width per coefficient.
fn width_runs(widths: &[u8]) -> Vec<WidthRun> {
    let mut runs: Vec<WidthRun> = Vec::new();
    for widths in widths.chunk_by(|a, b| a == b) {
        let first = runs.last().map_or(0, |run| run.first + run.len);
        runs.push(WidthRun { width: widths[0].into(), first, len: widths.len() });
    }
    runs
}

/// Scales of coefficients, and the largest magnitude of a value.
#[derive(Clone, Copy)]
pub(crate) struct BoundScales<'a> {
    pub(crate) scales: &'a [f32],
    pub(crate) bound: f32,
}

impl BitAlloc {
    pub(crate) fn new(
        side: Side,
        widths: &[u8],
        scales: BoundScales<'_>,
        levels: Arc<BitLevels>,
    ) -> Self {
        let BoundScales { scales, bound } = scales;
        Self { side, runs: width_runs(widths), scales: scales.to_vec(), levels, bound }
    }

    /// The runs of a row, in the order of coefficients and of their codes in a page.
    #[must_use]
    pub fn runs(&self) -> &[WidthRun] {
        &self.runs
    }

    /// First coefficient, length and width of each run.
    #[must_use]
    pub fn run_numbers(&self) -> Vec<[usize; 3]> {
        self.runs.iter().map(|run| [run.first, run.len, run.width]).collect()
    }

    /// The levels of all widths, those of width 1 first, up to width 8.
    #[must_use]
    pub fn level_values(&self) -> &[f32] {
        self.levels.values()
    }

    /// The levels of a run's codes, for coefficients of unit scale.
    #[must_use]
    pub fn levels_of(&self, run: &WidthRun) -> &[f32] {
        self.levels.width_levels(run.width)
    }

    /// Largest error of a level; a coefficient beyond it is an outlier.
    #[must_use]
    pub fn outlier_bound(&self) -> f32 {
        self.bound
    }

    /// Where the levels of a width meet, width 1 first: one bound less than there are levels, then
    /// an infinity.
    #[must_use]
    pub fn midpoints(&self) -> &[f32] {
        self.levels.midpoints()
    }

    /// A factor per coefficient.
    #[must_use]
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// The outliers of rows from `first` to before `end`; `bytes` are those of a page's outliers.
    pub fn residuals(
        bytes: &[u8],
        rows: Range<usize>,
    ) -> impl Iterator<Item = OutlierResidual> + use<'_> {
        let entries = bytes.as_chunks::<OUTLIER_BYTES>().0;
        let first =
            entries.partition_point(|entry| OutlierResidual::from_bytes(*entry).row < rows.start);
        let entries = entries[first..].iter().map(|entry| OutlierResidual::from_bytes(*entry));
        entries.take_while(move |outlier| outlier.row < rows.end)
    }

    /// Codes and outliers of a payload that begins with so many bytes of codes.
    pub(crate) fn split_payload<'b>(
        &self,
        payload: PayloadCodes<'b>,
        tokens: usize,
    ) -> Result<(&'b [u8], &'b [u8]), PageError> {
        let PayloadCodes { payload, codes } = payload;
        let (codes, outliers) = payload
            .split_at_checked(codes)
            .ok_or(PageError::Payload("it ends inside the codes"))?;
        let (entries, rest) = outliers.as_chunks::<OUTLIER_BYTES>();
        if !rest.is_empty() {
            return Err(PageError::Payload("it ends inside an outlier"));
        }
        let mut before = 0;
        for entry in entries {
            let OutlierResidual { row, coefficient, .. } = OutlierResidual::from_bytes(*entry);
            if row < before || row >= tokens || coefficient >= self.scales.len() {
                return Err(PageError::Payload("an outlier is out of place"));
            }
            before = row;
        }
        Ok((codes, outliers))
    }

    /// Bytes of the codes of a page.
    pub(crate) fn run_bytes(&self, tokens: usize) -> usize {
        self.runs.iter().map(|run| self.run_layout(run, tokens).size_bytes()).sum()
    }

    /// Where the codes of a run lie.
    #[must_use]
    pub fn run_layout(&self, run: &WidthRun, tokens: usize) -> CodeLayout {
        CodeLayout::new(self.side, tokens, run.len, run.width as u32)
    }

    /// Appends codes and outliers of `rows` (`[tokens, dim]`) and returns the bytes of the
    /// outliers. A page that outliers make larger than `limit` bytes is unquantizable.
    fn append_runs(
        &self,
        rows: &[f32],
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<u64, Unquantizable> {
        let dim = self.scales.len();
        let tokens = rows.len() / dim;
        let room = limit.saturating_sub(self.run_bytes(tokens)) / OUTLIER_BYTES;
        let (mut symbols, mut outliers) = (Vec::new(), Vec::new());
        for run in &self.runs {
            symbols.resize(tokens * run.len, 0);
            let (codes, far) = (&mut symbols[..], &mut outliers);
            dispatch_simd(QuantizeRun { by: self, run: *run, rows, codes, far });
            if outliers.len() > room {
                return Err(Unquantizable);
            }
            bits::pack_codes(&self.run_layout(run, tokens), &symbols, out);
        }
        outliers.sort_unstable_by_key(|(row, index, _)| (*row, *index));
        for (row, index, residual) in &outliers {
            if !residual.is_finite() {
                return Err(Unquantizable);
            }
            out.extend_from_slice(&row.to_le_bytes());
            out.extend_from_slice(&index.to_le_bytes());
            out.extend_from_slice(&residual.to_le_bytes());
        }
        Ok((outliers.len() * OUTLIER_BYTES) as u64)
    }

    /// Writes rows from `first` on into `out` (`[count, dim]`). `codes` are those of the page's
    /// `tokens` rows, `outliers` have been checked.
    pub(crate) fn decode_rows(&self, payload: CodedRows<'_>, first: usize, out: &mut [f32]) {
        let CodedRows { tokens, codes, outliers } = payload;
        let dim = self.scales.len();
        let (mut start, mut symbols, mut tile) = (0, [0u16; DIM_MAX], Vec::new());
        for run in &self.runs {
            let layout = self.run_layout(run, tokens);
            let codes = &codes[start..start + layout.size_bytes()];
            start += codes.len();
            let (levels, symbols) = (self.levels.width_levels(run.width), &mut symbols[..run.len]);
            if run.width == 0 {
                for row in out.chunks_exact_mut(dim) {
                    row[run.first..run.first + run.len].fill(0.0);
                }
                continue;
            }
            let places = run.first..run.first + run.len;
            let mut row = first;
            let mut rest = &mut *out;
            while !rest.is_empty() {
                let whole = row.is_multiple_of(TILE_TOKENS)
                    && layout.tile_tokens(row / TILE_TOKENS) == TILE_TOKENS
                    && rest.len() >= TILE_TOKENS * dim;
                let count = if whole { TILE_TOKENS } else { 1 };
                let (rows, after) = rest.split_at_mut(count * dim);
                if whole {
                    tile.resize(TILE_TOKENS * run.len, 0);
                    layout.unpack_tile(&codes[layout.tile_bytes(row / TILE_TOKENS)], &mut tile);
                    self.decode_tile(run, &tile, rows);
                } else {
                    bits::unpack_row(&layout, codes, row, symbols);
                    let values = rows[places.clone()].iter_mut().zip(&self.scales[run.first..]);
                    for ((value, scale), symbol) in values.zip(&*symbols) {
                        *value = levels[usize::from(*symbol)] * scale;
                    }
                }
                (rest, row) = (after, row + count);
            }
        }
        Self::add_outliers(outliers, first, dim, out);
    }

    /// Writes the values of a run for the rows of a full tile, from codes in the order in which
    /// they lie: four that are summed are neighbours, positions for keys, tokens for values.
    fn decode_tile(&self, run: &WidthRun, codes: &[u8], rows: &mut [f32]) {
        let (dim, levels) = (self.scales.len(), self.levels.width_levels(run.width));
        let scales = &self.scales[run.first..][..run.len];
        // No code is beyond the levels; the mask says so.
        let mask = levels.len() - 1;
        match self.side {
            Side::Key => {
                let groups = codes.chunks(4 * TILE_TOKENS).zip(scales.chunks(4));
                for (group, (codes, scales)) in groups.enumerate() {
                    let at = run.first + 4 * group;
                    let tokens = codes.chunks_exact(scales.len());
                    for (row, codes) in rows.chunks_exact_mut(dim).zip(tokens) {
                        let values = row[at..at + scales.len()].iter_mut();
                        for ((value, code), scale) in values.zip(codes).zip(scales) {
                            *value = levels[usize::from(*code) & mask] * scale;
                        }
                    }
                }
            }
            Side::Value => {
                let groups = codes.chunks_exact(4 * run.len).zip(rows.chunks_exact_mut(4 * dim));
                for (codes, rows) in groups {
                    for ((codes, scale), at) in codes.chunks_exact(4).zip(scales).zip(run.first..) {
                        for (token, code) in codes.iter().enumerate() {
                            rows[token * dim + at] = levels[usize::from(*code) & mask] * scale;
                        }
                    }
                }
            }
        }
    }

    /// Adds those of rows from `first` on.
    fn add_outliers(outliers: &[u8], first: usize, dim: usize, out: &mut [f32]) {
        for outlier in Self::residuals(outliers, first..first + out.len() / dim) {
            out[(outlier.row - first) * dim + outlier.coefficient] += outlier.residual;
        }
    }
}

impl HeadQuantizer for BitAlloc {
    fn page_id(&self) -> u8 {
        id::BITALLOC
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::BitAlloc(self)
    }

    fn code_bytes(&self, _side: Side, tokens: usize, _dim: usize) -> usize {
        self.run_bytes(tokens)
    }

    fn append_payload(
        &self,
        rows: PayloadRows<'_>,
        _symbols: &mut Vec<u16>,
        out: &mut Vec<u8>,
    ) -> Option<Result<PageBytes, Unquantizable>> {
        let start = out.len();
        Some(self.append_runs(rows.block.rows, rows.limit, out).map(|scales| {
            let codes = (out.len() - start) as u64 - scales;
            PageBytes { scales, codes, ..PageBytes::default() }
        }))
    }

    fn shared_bytes(&self) -> u64 {
        2 * LEVELS as u64
    }

    /// A scale and a width per coefficient, and the bound.
    fn calibration_bytes(&self) -> u64 {
        5 * self.scales.len() as u64 + 4
    }
}

/// Codes of the coefficients of a run, and those whose level is too far off.
struct QuantizeRun<'a> {
    by: &'a BitAlloc,
    run: WidthRun,
    rows: &'a [f32],
    codes: &'a mut [u16],
    far: &'a mut Vec<(u16, u16, f16)>,
}

impl WithSimd for QuantizeRun<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { by, run, rows, codes, far } = self;
        let places = run.first..run.first + run.len;
        let (scales, levels) = (&by.scales[places.clone()], by.levels.width_levels(run.width));
        // Whole registers, zeros at the end.
        let room = run.len.next_multiple_of(PADDING);
        let (mut quotients, mut found) = (vec![0f32; room], vec![0u32; room]);
        let mut residuals = vec![0f32; run.len];
        let rows = rows.chunks_exact(by.scales.len());
        for (row, (values, codes)) in rows.zip(codes.chunks_exact_mut(run.len)).enumerate() {
            let values = &values[places.clone()];
            for ((quotient, x), scale) in quotients.iter_mut().zip(values).zip(scales) {
                *quotient = x / scale;
            }
            by.levels.nearest_codes(simd, run.width, &quotients, &mut found);
            for ((code, residual), found) in codes.iter_mut().zip(&mut residuals).zip(&found) {
                *code = *found as u16;
                *residual = levels[*found as usize];
            }
            let mut within = true;
            for (residual, (x, scale)) in residuals.iter_mut().zip(values.iter().zip(scales)) {
                *residual = x - *residual * scale;
                within &= residual.abs() <= by.bound;
            }
            // NaN is an outlier as well, and then without a value.
            if !within {
                let beyond = |x: &f32| x.is_nan() || x.abs() > by.bound;
                let beyond = residuals.iter().enumerate().filter(|(_, x)| beyond(x));
                far.extend(beyond.map(|(index, residual)| {
                    (row as u16, (run.first + index) as u16, f16::from_f32(*residual))
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn levels() -> Arc<BitLevels> {
        let table = |width: usize| {
            let count = 1usize << width;
            (0..count).map(move |i| (i as f32 + 0.5) * 6.0 / count as f32 - 3.0)
        };
        Arc::new(BitLevels::new(
            &(1..=super::super::bit_levels::WIDTH_MAX).flat_map(table).collect::<Vec<_>>(),
        ))
    }

    proptest! {
        #[test]
        fn any_values_come_back_within_the_bound(
            widths in proptest::collection::vec((0u8..=8, 1usize..9), 1..8),
            tokens in 1usize..=70,
            values in proptest::collection::vec(
                prop_oneof![9 => -3f32..3.0, 1 => -300f32..300.0], 40 * 70),
            bound in 0.01f32..2.0,
            first in prop_oneof![Just(0usize), Just(32), 0usize..70],
            side in prop_oneof![Just(Side::Key), Just(Side::Value)],
        ) {
            let run = |(width, len)| std::iter::repeat_n(width, len);
            let widths: Vec<u8> = widths.into_iter().flat_map(run).take(40).collect();
            let (dim, first) = (widths.len(), first.min(tokens - 1));
            let rows = &values[..dim * tokens];
            let scales: Vec<f32> = (0..dim).map(|i| 0.2 + i as f32 * 0.01).collect();
            let scales = BoundScales { scales: &scales, bound };
            let bitalloc = BitAlloc::new(side, &widths, scales, levels());
            let mut out = Vec::new();
            let outliers = bitalloc.append_runs(rows, usize::MAX, &mut out).unwrap() as usize;
            prop_assert_eq!(out.len(), bitalloc.run_bytes(tokens) + outliers);
            let (codes, outliers) = out.split_at(bitalloc.run_bytes(tokens));
            let mut back = vec![0f32; dim * (tokens - first)];
            bitalloc.decode_rows(CodedRows { tokens, codes, outliers }, first, &mut back);
            for (a, b) in rows[first * dim..].iter().zip(&back) {
                prop_assert!((a - b).abs() <= bound.max(a.abs() / 1024.0) * 1.001, "{a} {b}");
            }
        }

        #[test]
        fn any_bytes_decode_or_fail_but_never_panic(
            widths in proptest::collection::vec(0u8..=8, 1..80),
            bytes in proptest::collection::vec(any::<u8>(), 800),
            count in 0usize..8,
        ) {
            let scales = vec![1.0; widths.len()];
            let scales = BoundScales { scales: &scales, bound: 1.0 };
            let side = BitAlloc::new(Side::Key, &widths, scales, levels());
            let codes = side.run_bytes(4);
            let payload = &bytes[..codes + count * OUTLIER_BYTES];
            let mut out = vec![0f32; widths.len() * 4];
            if let Ok((codes, outliers)) = side.split_payload(PayloadCodes { payload, codes }, 4) {
                side.decode_rows(CodedRows { tokens: 4, codes, outliers }, 0, &mut out);
            }
        }
    }

    #[test]
    fn what_no_outlier_can_hold_is_unquantizable() {
        let side = BitAlloc::new(
            Side::Key,
            &[4, 0],
            BoundScales { scales: &[1.0, 1.0], bound: 1.0 },
            levels(),
        );
        for bad in [f32::NAN, f32::INFINITY, 1e6] {
            assert!(side.append_runs(&[bad, 0.0], usize::MAX, &mut Vec::new()).is_err(), "{bad}");
            assert!(side.append_runs(&[0.0, bad], usize::MAX, &mut Vec::new()).is_err(), "{bad}");
        }
        // Two outliers take 12 bytes, the codes one.
        assert!(side.append_runs(&[50.0, 50.0], 13, &mut Vec::new()).is_ok());
        assert!(side.append_runs(&[50.0, 50.0], 12, &mut Vec::new()).is_err());
    }
}
