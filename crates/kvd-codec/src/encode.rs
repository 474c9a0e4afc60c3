//! One page: transform, quantize, pack, seal; raw floats when the quantizer cannot.

use crate::PageBytes;
use crate::bits::{self, CodeLayout};
use crate::gain;
use crate::huffman::streams::{self, CHUNK_TOKENS, CodeRows, CodeTables, StreamTable};
use crate::page::{self, HEADER_BYTES, PageHeader, id};
use crate::quantizer::bind::HeadPlace;
use crate::quantizer::float;
use crate::quantizer::{CodeShape, HeadCodec, PayloadRows, Unquantizable};
use crate::row_block::RowBlock;
use kvd_core::{DType, Side};

/// Buffers that the pages of a block share.
#[derive(Default)]
pub(crate) struct EncodeScratch {
    coefficients: Vec<f32>,
    symbols: Vec<u16>,
    scales: Vec<u8>,
    /// Shift of each row.
    gains: Vec<u8>,
    /// Version of the Huffman table that the page is written with.
    table_version: u16,
}

/// How codes become bytes.
#[derive(Clone, Copy)]
pub(crate) enum EntropyCoder<'a> {
    Fixed,
    Huffman {
        table: &'a StreamTable,
        version: u16,
        /// Version 0: what a page takes whose codes `table` makes too long.
        prior: &'a StreamTable,
    },
}

pub(crate) struct EncodedPage {
    pub(crate) parts: PageBytes,
    pub(crate) fallback: bool,
}

/// A page that is to be written.
#[derive(Clone, Copy)]
pub(crate) struct PagePlan<'a> {
    /// How its rows are kept.
    pub(crate) side: &'a HeadCodec,
    pub(crate) place: HeadPlace,
    /// Format of a page that cannot be quantized; every value lies within its range.
    pub(crate) dtype: DType,
    /// `[tokens, dim]`.
    pub(crate) rows: &'a [f32],
    /// Their largest magnitude.
    pub(crate) absmax: f32,
    pub(crate) stage: EntropyCoder<'a>,
}

/// Appends the page.
pub(crate) fn append_page(
    plan: &PagePlan<'_>,
    scratch: &mut EncodeScratch,
    out: &mut Vec<u8>,
) -> EncodedPage {
    let PagePlan { side, place, dtype, rows, stage, .. } = *plan;
    let stage = if side.rung { EntropyCoder::Fixed } else { stage };
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    scratch.table_version = 0;
    let mut gains = 0;
    let (mut parts, fallback) = match append_payload(&PagePlan { stage, ..*plan }, scratch, out) {
        Ok(mut parts) => {
            gains = gain::append_shifts(&scratch.gains, out) as u64;
            parts.scales += gains;
            (parts, false)
        }
        Err(Unquantizable) => {
            out.truncate(start + HEADER_BYTES);
            float::encode_rows(dtype, rows, out).expect("the block was checked");
            let codes = (out.len() - start - HEADER_BYTES) as u64;
            (PageBytes { codes, ..PageBytes::default() }, true)
        }
    };
    let header = PageHeader {
        side: place.side,
        quantizer: if fallback { id::float_id(dtype) } else { side.quantizer_id() },
        huffman: side.trained_tables && !fallback,
        fallback: fallback || side.rung,
        gains: gains > 0,
        tokens: (rows.len() / side.dim()) as u16,
        dim: side.dim() as u16,
        layer: place.layer.0 as u16,
        head: place.head as u16,
        table_version: if fallback { 0 } else { scratch.table_version },
        codec_tag: side.tag,
        payload_len: 0,
        checksum: 0,
    };
    let length = page::seal_page(out, start, header) as u64;
    parts.header = length - parts.total_bytes();
    EncodedPage { parts, fallback }
}

fn append_payload(
    plan: &PagePlan<'_>,
    scratch: &mut EncodeScratch,
    out: &mut Vec<u8>,
) -> Result<PageBytes, Unquantizable> {
    let PagePlan { side, place, dtype, rows, absmax, stage } = *plan;
    let of = place.side;
    let (dim, tokens) = (side.dim(), rows.len() / side.dim());
    let EncodeScratch { coefficients, symbols, scales, gains, table_version } = scratch;
    let coefficients = transform_rows(side, rows, coefficients, gains);
    let block = RowBlock { rows: coefficients, dim };
    let as_they_are = side.is_identity() && side.gain.is_none();
    let payload = PayloadRows {
        block,
        absmax: as_they_are.then_some(absmax),
        side: of,
        limit: rows.len() * dtype.size_bytes(),
        fixed_width: matches!(stage, EntropyCoder::Fixed),
    };
    if let Some(parts) = side.quantizer.append_payload(payload, symbols, out) {
        return parts;
    }
    symbols.clear();
    scales.clear();
    side.quantizer.quantize_rows(block, symbols, scales)?;
    let mut parts = PageBytes { scales: scales.len() as u64, ..PageBytes::default() };
    out.extend_from_slice(scales);
    let CodeShape { per_row, bits } = side.quantizer.code_shape(dim);
    let layout = CodeLayout::new(of, tokens, per_row, bits);
    let mut codes_at = out.len();
    match stage {
        EntropyCoder::Fixed => bits::pack_codes(&layout, symbols, out),
        EntropyCoder::Huffman { table, version, prior } => {
            let codes_from = out.len();
            let lengths = 2 * tokens.div_ceil(CHUNK_TOKENS);
            parts.offsets = lengths as u64;
            codes_at += lengths;
            let codes = PageCodes { of, side, symbols, per_row };
            codes.append_huffman(table, out);
            *table_version = version;
            if version != 0
                && takes_too_much(out.len() - codes_at, layout.size_bytes())
                && codes.replace_if_shorter(prior, codes_from, out)
            {
                *table_version = 0;
            }
        }
    }
    parts.codes = (out.len() - codes_at) as u64;
    Ok(parts)
}

/// Whether Huffman codes of a page, bytes, are so much longer than codes of fixed width that its
/// prior is tried.
#[must_use]
pub fn takes_too_much(huffman: usize, fixed: usize) -> bool {
    huffman * 50 > fixed * 51
}

/// The codes of a page.
struct PageCodes<'a> {
    of: Side,
    side: &'a HeadCodec,
    symbols: &'a [u16],
    per_row: usize,
}

impl PageCodes<'_> {
    /// Puts codes by that table in place of those from `from` on where they are shorter; says so.
    fn replace_if_shorter(&self, table: &StreamTable, from: usize, out: &mut Vec<u8>) -> bool {
        let end = out.len();
        self.append_huffman(table, out);
        let is_shorter = out.len() - end < end - from;
        if is_shorter {
            out.drain(from..end);
        } else {
            out.truncate(end);
        }
        is_shorter
    }

    /// Appends the lengths of chunks, and their words.
    fn append_huffman(&self, table: &StreamTable, out: &mut Vec<u8>) {
        let chunks = self.symbols.chunks(self.per_row * CHUNK_TOKENS);
        let lengths_at = out.len();
        out.resize(lengths_at + 2 * chunks.len(), 0);
        let (runs, tables) = ([self.side.trained_run], std::slice::from_ref(table));
        let mut rest = |_, _| debug_assert!(false, "a symbol without a code");
        for (index, chunk) in chunks.enumerate() {
            let rows = CodeRows { rows: chunk, per_row: self.per_row };
            let words = streams::encode_chunk(
                self.of,
                CodeTables { runs: &runs, tables },
                rows,
                out,
                &mut rest,
            );
            // 64 tokens of 1024 codes of 15 bits at most are fewer than 2^16 words.
            let length = (words as u16).to_le_bytes();
            out[lengths_at + 2 * index..][..2].copy_from_slice(&length);
        }
    }
}

/// Fills `scratch` with the codes and scales of `rows`.
fn fill_codes(
    side: &HeadCodec,
    rows: &[f32],
    scratch: &mut EncodeScratch,
) -> Result<(), Unquantizable> {
    scratch.symbols.clear();
    scratch.scales.clear();
    let coefficients = transform_rows(side, rows, &mut scratch.coefficients, &mut scratch.gains);
    let block = RowBlock { rows: coefficients, dim: side.dim() };
    side.quantizer.quantize_rows(block, &mut scratch.symbols, &mut scratch.scales)
}

/// The codes of `rows`.
pub(crate) fn quantize_rows(side: &HeadCodec, rows: &[f32]) -> Option<Vec<u16>> {
    let mut scratch = EncodeScratch::default();
    fill_codes(side, rows, &mut scratch).is_ok().then_some(scratch.symbols)
}

/// Adds the codes of `rows` to `counts`; rows that would fall back count nothing.
pub(crate) fn count_codes(
    side: &HeadCodec,
    rows: &[f32],
    scratch: &mut EncodeScratch,
    counts: &mut [u64],
) {
    if fill_codes(side, rows, scratch).is_ok() {
        for symbol in &scratch.symbols {
            counts[usize::from(*symbol)] += 1;
        }
    }
}

/// The coefficients of `rows`, in `buffer` unless they are the rows themselves, and the shift of
/// each row under `gain`.
fn transform_rows<'a>(
    side: &HeadCodec,
    rows: &'a [f32],
    buffer: &'a mut Vec<f32>,
    gains: &mut Vec<u8>,
) -> &'a [f32] {
    gains.clear();
    if side.is_identity() && side.gain.is_none() {
        return rows;
    }
    buffer.clear();
    buffer.extend_from_slice(rows);
    side.transform_rows(buffer);
    if let Some(median) = side.gain {
        gain::raise_short_rows(rows, side.dim(), median, buffer, gains);
    }
    buffer
}
