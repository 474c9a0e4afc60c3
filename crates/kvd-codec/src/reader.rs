//! Pages back to rows.

use crate::bits::{self, CodeLayout};
use crate::multi_symbol::{self, TrainedTable};
use crate::page::{Page, PageHeader, id};
use crate::side::bitalloc::{BitAlloc, OUTLIER_BYTES};
use crate::side::grid::Grid;
use crate::side::grid_decode;
use crate::side::uniform::ScaleRow;
use crate::side::vq::CODES_PER_ROW_MAX;
use crate::side::{HeadQuantizer, Scales};
use crate::{HeadSide, ModelCodec, PageError, ROWS_PER_STREAM};
use kvd_core::{DType, LayerIndex, Side};
use std::ops::Range;

/// What the rows of a page are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Rows as they arrived: the side has no transforms, or the page is a fallback.
    Raw,
    /// Coefficients: use them with [`HeadSide::fold_query`] and [`HeadSide::unfold_value`].
    Coefficient,
}

/// A page together with what its model knows: rows on demand.
#[derive(Clone, Copy, Debug)]
pub struct PageReader<'a> {
    side: &'a HeadSide,
    page: Page<'a>,
    payload: Payload<'a>,
}

/// The parts of a payload, each of the length that the header implies.
#[derive(Clone, Copy, Debug)]
enum Payload<'a> {
    Rows { dtype: DType, bytes: &'a [u8] },
    Fixed { scales: &'a [u8], layout: CodeLayout, codes: &'a [u8] },
    Huffman { scales: &'a [u8], table: &'a TrainedTable, lengths: &'a [u8], codes: &'a [u8] },
    Grid { grid: &'a Grid, lengths: &'a [u8], codes: &'a [u8] },
    BitAlloc { bitalloc: &'a BitAlloc, codes: &'a [u8], outliers: &'a [u8] },
}

/// The fixed-width codes of a page as they lie, for kernels that need no rows.
#[derive(Clone, Copy, Debug)]
pub struct FixedCodes<'a> {
    /// Where each code lies in `codes`.
    pub layout: CodeLayout,
    /// What the quantizer keeps per group.
    pub scales: &'a [u8],
    /// The codes.
    pub codes: &'a [u8],
}

/// One stream of a page, its rows, and which of them are asked for.
struct StreamPart<'a> {
    bytes: &'a [u8],
    rows: Range<usize>,
    wanted: Range<usize>,
}

impl StreamPart<'_> {
    /// Whether its last row is asked for.
    fn is_complete(&self) -> bool {
        self.wanted.end == self.rows.end
    }
}

/// Codes of one row, and what dequantizing keeps between rows.
struct RowBuffer {
    symbols: [u16; CODES_PER_ROW_MAX],
    scale: ScaleRow,
}

impl RowBuffer {
    fn new() -> Self {
        Self { symbols: [0; CODES_PER_ROW_MAX], scale: ScaleRow::default() }
    }
}

impl<'a> PageReader<'a> {
    /// Opens exactly one page. The header must agree with the place and the codec; the checksum
    /// is tested by [`PageReader::verify`].
    ///
    /// # Panics
    /// When layer or head lie outside the model's geometry.
    ///
    /// # Errors
    /// When the bytes are no page, a page of another place or codec, or of the wrong length.
    pub fn open(
        model: &'a ModelCodec,
        layer: LayerIndex,
        side: Side,
        head: usize,
        bytes: &'a [u8],
    ) -> Result<Self, PageError> {
        let page = Page::parse(bytes)?;
        let header = *page.header();
        let head_side = model.head(layer, side, head);
        let dim = head_side.dim();
        check("side", header.side.index(), side.index())?;
        check("layer", usize::from(header.layer), layer.0 as usize)?;
        check("head", usize::from(header.head), head)?;
        check("dim", usize::from(header.dim), dim)?;
        check("codec_tag", usize::from(header.codec_tag), usize::from(head_side.tag))?;
        let dtype = model.geometry().dtype;
        // A page that fell back says with which side.
        let rung = model.ladder.rung(side, header.quantizer).filter(|_| header.fallback);
        let raw = header.fallback && rung.is_none();
        let head_side = rung.unwrap_or(head_side);
        let id = if raw { id::float(dtype) } else { head_side.quantizer_id() };
        check("quantizer", usize::from(header.quantizer), usize::from(id))?;
        let huffman = head_side.trained_tables && !header.fallback;
        check("huffman", usize::from(header.huffman), usize::from(huffman))?;
        let version = header.table_version;
        let payload = match head_side.quantizer {
            _ if raw => rows(dtype, &page, dim)?,
            HeadQuantizer::Float(dtype) => rows(dtype, &page, dim)?,
            HeadQuantizer::Grid(ref grid) => {
                let (lengths, codes) = split_streams(page.payload(), &page)?;
                Payload::Grid { grid, lengths, codes }
            }
            HeadQuantizer::BitAlloc(ref bitalloc) => allocated(bitalloc, &page)?,
            _ if huffman => {
                let table = model.table((layer, side), head_side, version);
                let table = table.ok_or(PageError::Table(version))?;
                streams(head_side, &page, table)?
            }
            _ => codes(head_side, &page)?,
        };
        if !huffman {
            check("table_version", usize::from(version), 0)?;
        }
        Ok(Self { side: head_side, page, payload })
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
    pub fn space(&self) -> Space {
        if self.page.header().fallback || self.side.is_identity() {
            Space::Raw
        } else {
            Space::Coefficient
        }
    }

    /// The page's codes, when they have a fixed width.
    #[must_use]
    pub fn fixed_codes(&self) -> Option<FixedCodes<'a>> {
        match self.payload {
            Payload::Fixed { scales, layout, codes } => Some(FixedCodes { layout, scales, codes }),
            _ => None,
        }
    }

    /// The page's rows, when they are stored in a dtype.
    #[must_use]
    pub fn float_rows(&self) -> Option<(DType, &'a [u8])> {
        match self.payload {
            Payload::Rows { dtype, bytes } => Some((dtype, bytes)),
            _ => None,
        }
    }

    /// Tests the checksum.
    ///
    /// # Errors
    /// [`PageError::Checksum`].
    pub fn verify(&self) -> Result<(), PageError> {
        self.page.verify()
    }

    /// Decodes rows `first..first + count` into `out` (`[count, dim]`, row-major). Cheapest when
    /// `first` is a multiple of [`ROWS_PER_STREAM`].
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
        match self.payload {
            Payload::Rows { dtype, bytes } => {
                let row = dim * dtype.size_bytes();
                dtype.widen(&bytes[first * row..end * row], out);
                Ok(())
            }
            Payload::Fixed { scales, layout, codes } => {
                let quantizer = &self.side.quantizer;
                let mut buffer = RowBuffer::new();
                let symbols = &mut buffer.symbols[..layout.per_row()];
                let scales = Scales { bytes: scales, tokens };
                for (row, out) in (first..end).zip(out.chunks_exact_mut(dim)) {
                    bits::unpack_row(&layout, codes, row, symbols);
                    quantizer.dequantize_row(scales, row, symbols, &mut buffer.scale, out);
                }
                Ok(())
            }
            Payload::Grid { grid, lengths, codes } => {
                self.decode_grid(grid, (lengths, codes), first..end, out)
            }
            Payload::BitAlloc { bitalloc, codes, outliers } => {
                bitalloc.decode((codes, outliers), (tokens, first), out)
            }
            Payload::Huffman { scales, table, lengths, codes } => {
                self.decode_streams((scales, table, lengths, codes), first..end, out)
            }
        }
    }

    /// The streams that hold rows of `wanted`. The lengths have been checked to add up.
    fn streams(
        &self,
        lengths: &'a [u8],
        codes: &'a [u8],
        wanted: Range<usize>,
    ) -> impl Iterator<Item = StreamPart<'a>> + use<'a> {
        let (tokens, mut start) = (self.tokens(), 0);
        let parts = lengths.as_chunks::<2>().0.iter().enumerate().map(move |(index, length)| {
            let bytes = &codes[start..][..usize::from(u16::from_le_bytes(*length))];
            start += bytes.len();
            let first = index * ROWS_PER_STREAM;
            let rows = first..tokens.min(first + ROWS_PER_STREAM);
            let wanted = rows.start.max(wanted.start)..rows.end.min(wanted.end);
            StreamPart { bytes, rows, wanted }
        });
        parts.filter(|part| !part.wanted.is_empty())
    }

    /// Decodes the rows `wanted` of a grid page.
    fn decode_grid(
        &self,
        grid: &Grid,
        (lengths, codes): (&'a [u8], &'a [u8]),
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let (dim, mut out) = (self.side.dim(), out);
        let mut parts = self.streams(lengths, codes, wanted).peekable();
        while parts.peek().is_some() {
            let lanes = parts.by_ref().take(grid_decode::LANES).map(|part| {
                let rows = std::mem::take(&mut out);
                let (rows, rest) = rows.split_at_mut(part.wanted.len() * dim);
                out = rest;
                let skip = part.wanted.start - part.rows.start;
                grid_decode::Lane::new(part.bytes, (skip, part.is_complete()), rows)
            });
            grid.decode(&mut lanes.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Decodes the rows `wanted` of a Huffman page.
    fn decode_streams(
        &self,
        (scales, table, lengths, codes): (&[u8], &TrainedTable, &'a [u8], &'a [u8]),
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PageError> {
        let (quantizer, dim) = (&self.side.quantizer, self.side.dim());
        let per_row = quantizer.symbols_per_row(dim);
        let scales = Scales { bytes: scales, tokens: self.tokens() };
        let (mut scale, mut symbols) = (ScaleRow::default(), Vec::new());
        let parts: Vec<_> = self.streams(lengths, codes, wanted.clone()).collect();
        let rows = |part: &StreamPart<'_>| part.wanted.end - part.rows.start;
        // Streams are read in turns; only the last may have another number of rows.
        for parts in parts.chunk_by(|a, b| rows(a) == rows(b)) {
            for parts in parts.chunks(multi_symbol::LANES) {
                let each = rows(&parts[0]) * per_row;
                symbols.resize(each * parts.len(), 0);
                let lanes = parts.iter().map(|part| multi_symbol::Lane::new(part.bytes));
                let mut lanes: Vec<_> = lanes.collect();
                table.read(&mut lanes, &mut symbols);
                for ((part, lane), symbols) in parts.iter().zip(lanes).zip(symbols.chunks(each)) {
                    lane.check(part.is_complete())?;
                    let passed_over = part.wanted.start - part.rows.start;
                    let rows = symbols.chunks_exact(per_row).skip(passed_over);
                    for (row, symbols) in part.wanted.clone().zip(rows) {
                        let out = &mut out[(row - wanted.start) * dim..][..dim];
                        quantizer.dequantize_row(scales, row, symbols, &mut scale, out);
                    }
                }
            }
        }
        Ok(())
    }
}

fn check(field: &'static str, got: usize, want: usize) -> Result<(), PageError> {
    if got == want {
        return Ok(());
    }
    Err(PageError::Field { field, got: got as u64, want: want as u64 })
}

/// A payload of rows in a dtype.
fn rows<'a>(dtype: DType, page: &Page<'a>, dim: usize) -> Result<Payload<'a>, PageError> {
    let bytes = page.payload();
    let want = usize::from(page.header().tokens) * dim * dtype.size_bytes();
    check("payload_len", bytes.len(), want)?;
    Ok(Payload::Rows { dtype, bytes })
}

/// A payload of scales and fixed-width codes.
fn codes<'a>(side: &HeadSide, page: &Page<'a>) -> Result<Payload<'a>, PageError> {
    let tokens = usize::from(page.header().tokens);
    let payload = page.payload();
    let scale_bytes = side.quantizer.scale_bytes(tokens, side.dim());
    let per_row = side.quantizer.symbols_per_row(side.dim());
    let layout = CodeLayout::new(page.header().side, tokens, per_row, side.quantizer.code_bits());
    check("payload_len", payload.len(), scale_bytes + layout.size_bytes())?;
    let (scales, codes) = payload.split_at(scale_bytes);
    Ok(Payload::Fixed { scales, layout, codes })
}

/// A payload of codes of allocated widths and outliers.
fn allocated<'a>(bitalloc: &'a BitAlloc, page: &Page<'a>) -> Result<Payload<'a>, PageError> {
    let codes = bitalloc.code_bytes(page.header().tokens.into());
    let (codes, outliers) = page
        .payload()
        .split_at_checked(codes)
        .ok_or(PageError::Payload("it ends inside the codes"))?;
    if !outliers.len().is_multiple_of(OUTLIER_BYTES) {
        return Err(PageError::Payload("it ends inside an outlier"));
    }
    Ok(Payload::BitAlloc { bitalloc, codes, outliers })
}

/// A payload of scales and Huffman streams.
fn streams<'a>(
    side: &HeadSide,
    page: &Page<'a>,
    table: &'a TrainedTable,
) -> Result<Payload<'a>, PageError> {
    let tokens = usize::from(page.header().tokens);
    let (scales, rest) = page
        .payload()
        .split_at_checked(side.quantizer.scale_bytes(tokens, side.dim()))
        .ok_or(PageError::Payload("it ends inside the scales"))?;
    let (lengths, codes) = split_streams(rest, page)?;
    Ok(Payload::Huffman { scales, table, lengths, codes })
}

/// Stream lengths and streams of what follows the scales; the lengths add up.
fn split_streams<'a>(rest: &'a [u8], page: &Page<'_>) -> Result<(&'a [u8], &'a [u8]), PageError> {
    let tokens = usize::from(page.header().tokens);
    let (lengths, codes) = rest
        .split_at_checked(2 * tokens.div_ceil(ROWS_PER_STREAM))
        .ok_or(PageError::Payload("it ends inside the stream lengths"))?;
    let chunks = lengths.as_chunks::<2>().0;
    let total: usize = chunks.iter().map(|b| usize::from(u16::from_le_bytes(*b))).sum();
    if total != codes.len() {
        return Err(PageError::Payload("stream lengths do not add up to its end"));
    }
    Ok((lengths, codes))
}
