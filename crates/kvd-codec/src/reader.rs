//! Pages back to rows.

use crate::bits::CodeLayout;
use crate::gain::RowGains;
use crate::huffman::streams::CodeTables;
use crate::huffman::streams::{self, CHUNK_TOKENS, StreamCodes, StreamLayout, StreamTable};
use crate::page::{Page, PageHeader, id};
use crate::quantizer::bitalloc::BitAlloc;
use crate::quantizer::bitalloc::{CodedRows, PayloadCodes};
use crate::quantizer::grid::Grid;
use crate::quantizer::stored::StoredLayout;
use crate::quantizer::uniform::ScaleRow;
use crate::quantizer::{CodeShape, PageScales, SymbolRows};
use crate::row_block::{LayerSide, RowBlockMut};
use crate::{HeadCodec, ModelCodec, PageError};
use kvd_core::{DType, LayerIndex, Side};
use std::ops::Range;

/// Whether rows of a page are values or coefficients of the transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSpace {
    /// Rows as they arrived: the side has no transforms, or the page is a fallback.
    Raw,
    /// Coefficients: use them with [`HeadCodec::fold_query`] and [`HeadCodec::unfold_value`].
    Coefficient,
}

/// A page together with what its model knows: rows on demand.
#[derive(Clone, Copy, Debug)]
pub struct PageReader<'a> {
    side: &'a HeadCodec,
    page: Page<'a>,
    payload: PagePayload<'a>,
}

/// Scales and Huffman codes of a page.
#[derive(Clone, Copy)]
struct HuffmanPayload<'a> {
    scales: &'a [u8],
    streams: &'a StreamCodes<'a>,
}

/// The parts of a payload, each of the length that the header implies.
#[derive(Clone, Copy, Debug)]
enum PagePayload<'a> {
    Rows { dtype: DType, bytes: &'a [u8] },
    Fixed { scales: &'a [u8], layout: CodeLayout, codes: &'a [u8] },
    Huffman { scales: &'a [u8], streams: StreamCodes<'a> },
    Grid { grid: &'a Grid, streams: StreamCodes<'a> },
    BitAlloc { bitalloc: &'a BitAlloc, codes: &'a [u8], outliers: &'a [u8] },
}

/// The fixed-width codes of a page as they lie, for kernels that need no rows.
#[derive(Clone, Copy, Debug)]
pub struct FixedCodes<'a> {
    /// Where each code lies in `codes`.
    pub layout: CodeLayout,
    /// Scales of all groups.
    pub scales: &'a [u8],
    /// The codes.
    pub codes: &'a [u8],
}

impl<'a> PageReader<'a> {
    /// Opens exactly one page. The header must agree with the place and the codec; the checksum
    /// is tested by [`PageReader::verify_checksum`].
    ///
    /// # Panics
    /// When layer or head lie outside the model's geometry.
    ///
    /// # Errors
    /// When the bytes are no page, a page of another place or codec, or of the wrong length.
    pub fn open_page(
        model: &'a ModelCodec,
        layer: LayerIndex,
        side: Side,
        head: usize,
        bytes: &'a [u8],
    ) -> Result<Self, PageError> {
        let page = Page::parse_page(bytes)?;
        let header = *page.header();
        let head_side = model.head_codec(layer, side, head);
        let dim = head_side.dim();
        check_field("side", header.side.index(), side.index())?;
        check_field("layer", usize::from(header.layer), layer.0 as usize)?;
        check_field("head", usize::from(header.head), head)?;
        check_field("dim", usize::from(header.dim), dim)?;
        check_field("codec_tag", usize::from(header.codec_tag), usize::from(head_side.tag))?;
        let dtype = model.geometry().dtype;
        // A page that fell back says with which side.
        let rung = model.ladder.fallback_codec(side, header.quantizer).filter(|_| header.fallback);
        let raw = header.fallback && rung.is_none();
        let head_side = rung.unwrap_or(head_side);
        let id = if raw { id::float_id(dtype) } else { head_side.quantizer_id() };
        check_field("quantizer", usize::from(header.quantizer), usize::from(id))?;
        let huffman = head_side.trained_tables && !header.fallback;
        check_field("huffman", usize::from(header.huffman), usize::from(huffman))?;
        if header.gains && (header.fallback || head_side.gain.is_none()) {
            check_field("gains", 1, 0)?;
        }
        let version = header.table_version;
        let payload = match head_side.stored_layout() {
            _ if raw => rows_payload(dtype, &page, dim)?,
            StoredLayout::Float(dtype) => rows_payload(dtype, &page, dim)?,
            StoredLayout::Grid(grid) => {
                let (runs, tables) = (&grid.runs[..], &grid.tables[..]);
                let layout = stream_layout(&page, dim, true, CodeTables { runs, tables });
                PagePayload::Grid { grid, streams: streams::split_chunks(layout, page.payload())? }
            }
            StoredLayout::BitAlloc(bitalloc) => bitalloc_payload(bitalloc, &page)?,
            _ if huffman => {
                let table = model.huffman_table(LayerSide { layer, side }, head_side, version);
                let table = table.ok_or(PageError::Table(version))?;
                huffman_payload(head_side, &page, table)?
            }
            _ => fixed_payload(head_side, &page)?,
        };
        if !huffman {
            check_field("table_version", usize::from(version), 0)?;
        }
        Ok(Self { side: head_side, page, payload })
    }

    /// Becomes the reader of another page of the same place, where that differs in its payload
    /// alone. Else `false`, and [`PageReader::open_page`] says what it is.
    #[must_use]
    pub fn turn_to(&mut self, bytes: &'a [u8]) -> bool {
        let mut page = self.page;
        if !page.turn_to(bytes) {
            return false;
        }
        let payload = page.payload();
        let turned = match &mut self.payload {
            PagePayload::Rows { bytes, .. } if payload.len() == bytes.len() => {
                *bytes = payload;
                true
            }
            PagePayload::Fixed { scales, codes, .. }
                if payload.len() == scales.len() + codes.len() =>
            {
                (*scales, *codes) = payload.split_at(scales.len());
                true
            }
            PagePayload::Rows { .. } | PagePayload::Fixed { .. } => false,
            PagePayload::BitAlloc { bitalloc, codes, outliers } => {
                let parts = bitalloc.split_payload(
                    PayloadCodes { payload, codes: codes.len() },
                    page.header().tokens.into(),
                );
                parts.map(|parts| (*codes, *outliers) = parts).is_ok()
            }
            PagePayload::Huffman { scales, streams } => {
                let parts = payload.split_at_checked(scales.len());
                let turned = parts.is_some_and(|(_, rest)| streams.turn_to(rest));
                if let Some((others, _)) = parts.filter(|_| turned) {
                    *scales = others;
                }
                turned
            }
            PagePayload::Grid { streams, .. } => streams.turn_to(payload),
        };
        if turned {
            self.page = page;
        }
        turned
    }

    /// Rows in the page.
    #[must_use]
    pub fn tokens(&self) -> usize {
        usize::from(self.page.header().tokens)
    }

    /// The page's header.
    #[must_use]
    pub fn header(&self) -> &PageHeader {
        self.page.header()
    }

    /// Whether rows come out as they arrived or as coefficients.
    #[must_use]
    pub fn space(&self) -> RowSpace {
        if self.page.header().fallback || self.side.is_identity() {
            RowSpace::Raw
        } else {
            RowSpace::Coefficient
        }
    }

    /// The page's codes, when they have a fixed width.
    #[must_use]
    pub fn fixed_codes(&self) -> Option<FixedCodes<'a>> {
        match self.payload {
            PagePayload::Fixed { scales, layout, codes } => {
                Some(FixedCodes { layout, scales, codes })
            }
            _ => None,
        }
    }

    /// The codes of all runs one after another, when a bit allocation has made them; the layout
    /// tells no more than how many rows there are, and outliers stand in place of scales.
    #[must_use]
    pub fn allocated_codes(&self) -> Option<FixedCodes<'a>> {
        let PagePayload::BitAlloc { codes, outliers, .. } = self.payload else { return None };
        let header = self.page.header();
        let layout = CodeLayout::new(header.side, self.tokens(), self.side.dim(), 8);
        Some(FixedCodes { layout, scales: outliers, codes })
    }

    /// The page's codes, when they are Huffman codes, and its scales.
    #[must_use]
    pub fn stream_codes(&self) -> Option<(StreamCodes<'a>, &'a [u8])> {
        match self.payload {
            PagePayload::Huffman { scales, streams } => Some((streams, scales)),
            PagePayload::Grid { streams, .. } => Some((streams, &[])),
            _ => None,
        }
    }

    /// Factors by which kernels over its codes multiply a row's weight, where rows have gains.
    #[must_use]
    pub fn gains(&self) -> Option<RowGains<'a>> {
        self.page.gains()
    }

    /// Rows that are decoded together: more than 1 where a single one costs as much.
    #[must_use]
    pub fn rows_together(&self) -> usize {
        if self.stream_codes().is_some() { CHUNK_TOKENS } else { 1 }
    }

    /// The page's rows, when they are stored in a dtype as they are.
    #[must_use]
    pub fn float_rows(&self) -> Option<(DType, &'a [u8])> {
        match self.payload {
            PagePayload::Rows { dtype, bytes } if self.gains().is_none() => Some((dtype, bytes)),
            _ => None,
        }
    }

    /// Tests the checksum.
    ///
    /// # Errors
    /// [`PageError::Checksum`].
    pub fn verify_checksum(&self) -> Result<(), PageError> {
        self.page.verify_checksum()
    }

    /// Decodes rows `first..first + count` into `out` (`[count, dim]`, row-major). Cheapest when
    /// `first` and `count` are multiples of [`PageReader::rows_together`].
    ///
    /// # Errors
    /// When the range or the buffer does not fit, or the codes are corrupt.
    pub fn decode_rows(
        &self,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let (tokens, dim) = (self.tokens(), self.side.dim());
        let end = first.saturating_add(count);
        if end > tokens || out.len() != count * dim {
            return Err(PageError::Range { first, end, tokens, buffer: out.len() });
        }
        self.decode_coefficients(first..end, out)?;
        if let Some(gains) = self.gains() {
            gains.restore_lengths(first, dim, out);
        }
        Ok(())
    }

    /// As [`PageReader::decode_rows`] of one row of a Huffman page, whose codes were read before:
    /// `codes` has a byte for each, and the page's scales. `false`, and nothing written, for
    /// another page or layout.
    #[must_use]
    pub fn decode_from_codes(&self, codes: FixedCodes<'_>, row: usize, out: &mut [f32]) -> bool {
        let (FixedCodes { layout, scales, codes }, dim) = (codes, self.side.dim());
        let PagePayload::Huffman { streams, .. } = self.payload else { return false };
        let fits = row < layout.tokens() && layout.code_bits() == 8 && out.len() == dim;
        if !fits || layout.per_row() != streams.per_row() {
            return false;
        }
        let scales = PageScales { bytes: scales, tokens: self.tokens() };
        let mut symbols = vec![0; layout.per_row()];
        crate::bits::unpack_row(&layout, codes, row, &mut symbols);
        let mut loaded = ScaleRow::default();
        self.side.quantizer.dequantize_row(scales, row, &symbols, &mut loaded, out);
        self.restore_length(row, out);
        true
    }

    /// Brings a row of coefficients, as its codes have them, back to its length.
    pub fn restore_length(&self, row: usize, out: &mut [f32]) {
        if let Some(gains) = self.gains() {
            gains.restore_lengths(row, out.len(), out);
        }
    }

    /// Rows as the quantizer kept them, before gains.
    fn decode_coefficients(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), PageError> {
        let (tokens, dim, Range { start: first, end }) = (self.tokens(), self.side.dim(), rows);
        match self.payload {
            PagePayload::Rows { dtype, bytes } => {
                let row = dim * dtype.size_bytes();
                dtype.widen_values(&bytes[first * row..end * row], out);
                Ok(())
            }
            PagePayload::Fixed { scales, layout, codes } => {
                let page = FixedCodes { layout, scales, codes };
                self.side.quantizer.decode_fixed(page, first, RowBlockMut { rows: out, dim });
                Ok(())
            }
            PagePayload::Grid { grid, streams } => grid.decode_rows(&streams, first..end, out),
            PagePayload::BitAlloc { bitalloc, codes, outliers } => {
                bitalloc.decode_rows(CodedRows { tokens, codes, outliers }, first, out);
                Ok(())
            }
            PagePayload::Huffman { scales, streams } => {
                self.decode_streams(HuffmanPayload { scales, streams: &streams }, first..end, out)
            }
        }
    }

    /// Decodes the rows `wanted` of a Huffman page.
    fn decode_streams(
        &self,
        payload: HuffmanPayload<'_>,
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let HuffmanPayload { scales, streams } = payload;
        let (dim, per_row) = (self.side.dim(), streams.per_row());
        let scales = PageScales { bytes: scales, tokens: self.tokens() };
        let (mut scale, mut symbols) = (ScaleRow::default(), vec![0; CHUNK_TOKENS * per_row]);
        for index in wanted.start / CHUNK_TOKENS..wanted.end.div_ceil(CHUNK_TOKENS) {
            let tokens = streams.chunk(index).tokens;
            streams.decode_chunk(index, &mut symbols[..tokens * per_row])?;
            let first = index * CHUNK_TOKENS;
            let rows = wanted.start.max(first)..wanted.end.min(first + tokens);
            let symbols = &symbols[(rows.start - first) * per_row..(rows.end - first) * per_row];
            let out = &mut out[(rows.start - wanted.start) * dim..(rows.end - wanted.start) * dim];
            let codes = SymbolRows { first: rows.start, symbols };
            let out = RowBlockMut { rows: out, dim };
            self.side.quantizer.dequantize_rows(scales, codes, &mut scale, out);
        }
        Ok(())
    }
}

fn check_field(field: &'static str, got: usize, want: usize) -> Result<(), PageError> {
    if got == want {
        return Ok(());
    }
    Err(PageError::Field { field, got: got as u64, want: want as u64 })
}

/// A payload of rows in a dtype.
fn rows_payload<'a>(
    dtype: DType,
    page: &Page<'a>,
    dim: usize,
) -> Result<PagePayload<'a>, PageError> {
    let bytes = page.payload();
    let want = usize::from(page.header().tokens) * dim * dtype.size_bytes();
    check_field("payload_len", bytes.len(), want)?;
    Ok(PagePayload::Rows { dtype, bytes })
}

/// A payload of scales and fixed-width codes.
fn fixed_payload<'a>(side: &HeadCodec, page: &Page<'a>) -> Result<PagePayload<'a>, PageError> {
    let tokens = usize::from(page.header().tokens);
    let payload = page.payload();
    let scale_bytes = side.quantizer.scale_bytes(tokens, side.dim());
    let CodeShape { per_row, bits } = side.quantizer.code_shape(side.dim());
    let layout = CodeLayout::new(page.header().side, tokens, per_row, bits);
    check_field("payload_len", payload.len(), scale_bytes + layout.size_bytes())?;
    let (scales, codes) = payload.split_at(scale_bytes);
    Ok(PagePayload::Fixed { scales, layout, codes })
}

/// A payload of codes of allocated widths and outliers.
fn bitalloc_payload<'a>(
    bitalloc: &'a BitAlloc,
    page: &Page<'a>,
) -> Result<PagePayload<'a>, PageError> {
    let tokens = page.header().tokens.into();
    let parts = bitalloc.split_payload(
        PayloadCodes { payload: page.payload(), codes: bitalloc.run_bytes(tokens) },
        tokens,
    )?;
    let (codes, outliers) = parts;
    Ok(PagePayload::BitAlloc { bitalloc, codes, outliers })
}

/// A payload of scales and Huffman streams.
fn huffman_payload<'a>(
    side: &'a HeadCodec,
    page: &Page<'a>,
    table: &'a StreamTable,
) -> Result<PagePayload<'a>, PageError> {
    let tokens = usize::from(page.header().tokens);
    let (scales, rest) = page
        .payload()
        .split_at_checked(side.quantizer.scale_bytes(tokens, side.dim()))
        .ok_or(PageError::Payload("it ends inside the scales"))?;
    let per_row = side.quantizer.code_shape(side.dim()).per_row;
    let coding = CodeTables {
        runs: std::slice::from_ref(&side.trained_run),
        tables: std::slice::from_ref(table),
    };
    let streams = streams::split_chunks(stream_layout(page, per_row, false, coding), rest)?;
    Ok(PagePayload::Huffman { scales, streams })
}

fn stream_layout<'a>(
    page: &Page<'_>,
    per_row: usize,
    outliers: bool,
    coding: CodeTables<'a>,
) -> StreamLayout<'a> {
    let CodeTables { runs, tables } = coding;
    let (side, tokens) = (page.header().side, page.header().tokens.into());
    StreamLayout { side, tokens, per_row, runs, tables, outliers }
}
