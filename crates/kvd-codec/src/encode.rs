//! One page: transform, quantize, pack, seal; raw floats when the quantizer cannot.

use crate::PageBytes;
use crate::bits::{self, CodeLayout};
use crate::gain;
use crate::lanes::{self, CHUNK_TOKENS, LaneTable};
use crate::page::{self, HEADER_BYTES, PageHeader, id};
use crate::side::bind::HeadPlace;
use crate::side::float::{self, largest_magnitude};
use crate::side::uniform::Uniform;
use crate::side::{HeadQuantizer, HeadSide, Unquantizable};
use kvd_core::{DType, Side};

/// Buffers that the pages of a block share.
#[derive(Default)]
pub(crate) struct Scratch {
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
pub(crate) enum Stage<'a> {
    Fixed,
    Huffman {
        table: &'a LaneTable,
        version: u16,
        /// Version 0: what a page takes whose codes `table` makes too long.
        prior: &'a LaneTable,
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
    pub(crate) side: &'a HeadSide,
    pub(crate) place: HeadPlace,
    /// What a page that cannot be quantized holds; every value lies within it.
    pub(crate) dtype: DType,
    /// `[tokens, dim]`.
    pub(crate) rows: &'a [f32],
    /// Their largest magnitude.
    pub(crate) absmax: f32,
    pub(crate) stage: Stage<'a>,
}

/// Appends the page.
pub(crate) fn page(plan: &PagePlan<'_>, scratch: &mut Scratch, out: &mut Vec<u8>) -> EncodedPage {
    let PagePlan { side, place, dtype, rows, absmax, stage } = *plan;
    let stage = if side.rung { Stage::Fixed } else { stage };
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    let part = (side, place.side, dtype);
    scratch.table_version = 0;
    let mut gains = 0;
    let (mut parts, fallback) = match payload(part, (rows, absmax), stage, scratch, out) {
        Ok(mut parts) => {
            gains = gain::append(&scratch.gains, out) as u64;
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
        quantizer: if fallback { id::float(dtype) } else { side.quantizer_id() },
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
    let length = page::seal(out, start, header) as u64;
    parts.header = length - parts.total();
    EncodedPage { parts, fallback }
}

fn payload(
    (side, of, dtype): (&HeadSide, Side, DType),
    (rows, absmax): (&[f32], f32),
    stage: Stage<'_>,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Result<PageBytes, Unquantizable> {
    if let HeadQuantizer::Float(dtype) = side.quantizer {
        let coefficients = forward(side, rows, &mut scratch.coefficients, &mut scratch.gains);
        float::encode_rows(dtype, coefficients, out)?;
        let codes = (rows.len() * dtype.size_bytes()) as u64;
        return Ok(PageBytes { codes, ..PageBytes::default() });
    }
    if let HeadQuantizer::Grid(grid) = &side.quantizer {
        let coefficients = forward(side, rows, &mut scratch.coefficients, &mut scratch.gains);
        let start = out.len();
        let raw = rows.len() * dtype.size_bytes();
        let offsets = grid.encode(coefficients, raw, out)?;
        let codes = (out.len() - start) as u64 - offsets;
        return Ok(PageBytes { offsets, codes, ..PageBytes::default() });
    }
    if let HeadQuantizer::BitAlloc(bitalloc) = &side.quantizer {
        let coefficients = forward(side, rows, &mut scratch.coefficients, &mut scratch.gains);
        let start = out.len();
        let raw = rows.len() * dtype.size_bytes();
        let scales = bitalloc.encode(coefficients, raw, out)?;
        let codes = (out.len() - start) as u64 - scales;
        return Ok(PageBytes { scales, codes, ..PageBytes::default() });
    }
    if let (HeadQuantizer::Uniform(uniform), Stage::Fixed) = (&side.quantizer, stage) {
        return fixed_uniform(uniform, (side, of), (rows, absmax), scratch, out);
    }
    quantize(side, rows, scratch)?;
    let mut parts = PageBytes { scales: scratch.scales.len() as u64, ..PageBytes::default() };
    out.extend_from_slice(&scratch.scales);
    let per_row = side.quantizer.symbols_per_row(side.dim());
    let mut codes_at = out.len();
    match stage {
        Stage::Fixed => {
            let (tokens, bits) = (rows.len() / side.dim(), side.quantizer.code_bits());
            bits::pack(&CodeLayout::new(of, tokens, per_row, bits), &scratch.symbols, out);
        }
        Stage::Huffman { table, version, prior } => {
            let (tokens, codes_from) = (rows.len() / side.dim(), out.len());
            let lengths = 2 * tokens.div_ceil(CHUNK_TOKENS);
            parts.offsets = lengths as u64;
            codes_at += lengths;
            let codes = Codes { of, side, symbols: &scratch.symbols, per_row };
            codes.encode(table, out);
            scratch.table_version = version;
            let bits = side.quantizer.code_bits();
            let fixed = CodeLayout::new(of, tokens, per_row, bits).size_bytes();
            if version != 0 && takes_too_much(out.len() - codes_at, fixed) {
                let with_table = out.len();
                codes.encode(prior, out);
                if out.len() - with_table < with_table - codes_from {
                    out.drain(codes_from..with_table);
                    scratch.table_version = 0;
                } else {
                    out.truncate(with_table);
                }
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
struct Codes<'a> {
    of: Side,
    side: &'a HeadSide,
    symbols: &'a [u16],
    per_row: usize,
}

impl Codes<'_> {
    /// Appends the lengths of chunks, and their words.
    fn encode(&self, table: &LaneTable, out: &mut Vec<u8>) {
        let chunks = self.symbols.chunks(self.per_row * CHUNK_TOKENS);
        let lengths_at = out.len();
        out.resize(lengths_at + 2 * chunks.len(), 0);
        let (runs, tables) = ([self.side.trained_run], std::slice::from_ref(table));
        let mut rest = |_, _| debug_assert!(false, "a symbol without a code");
        for (index, chunk) in chunks.enumerate() {
            let rows = (chunk, self.per_row);
            let words = lanes::encode_chunk(self.of, (&runs, tables), rows, out, &mut rest);
            // 64 tokens of 1024 codes of 15 bits at most are fewer than 2^16 words.
            let length = (words as u16).to_le_bytes();
            out[lengths_at + 2 * index..][..2].copy_from_slice(&length);
        }
    }
}

/// Uniform codes of fixed width; `absmax` is the largest magnitude of `rows`.
fn fixed_uniform(
    uniform: &Uniform,
    (side, of): (&HeadSide, Side),
    (rows, absmax): (&[f32], f32),
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Result<PageBytes, Unquantizable> {
    let (tokens, dim) = (rows.len() / side.dim(), side.dim());
    let coefficients = forward(side, rows, &mut scratch.coefficients, &mut scratch.gains);
    let as_they_are = side.is_identity() && side.gain.is_none();
    let absmax = if as_they_are { absmax } else { largest_magnitude(coefficients)? };
    let start = out.len();
    let layout = CodeLayout::new(of, tokens, dim, uniform.code_bits());
    uniform.encode(absmax, (coefficients, dim), (&layout, of), &mut scratch.symbols, out)?;
    let scales = uniform.scale_bytes(tokens, dim) as u64;
    let codes = (out.len() - start) as u64 - scales;
    Ok(PageBytes { scales, codes, ..PageBytes::default() })
}

/// Fills `scratch` with the codes and scales of `rows`.
fn quantize(side: &HeadSide, rows: &[f32], scratch: &mut Scratch) -> Result<(), Unquantizable> {
    scratch.symbols.clear();
    scratch.scales.clear();
    let coefficients = forward(side, rows, &mut scratch.coefficients, &mut scratch.gains);
    side.quantizer.quantize(coefficients, side.dim(), &mut scratch.symbols, &mut scratch.scales)
}

/// The codes of `rows`.
pub(crate) fn codes(side: &HeadSide, rows: &[f32]) -> Option<Vec<u16>> {
    let mut scratch = Scratch::default();
    quantize(side, rows, &mut scratch).is_ok().then_some(scratch.symbols)
}

/// Adds the codes of `rows` to `counts`; rows that would fall back count nothing.
pub(crate) fn count(side: &HeadSide, rows: &[f32], scratch: &mut Scratch, counts: &mut [u64]) {
    if quantize(side, rows, scratch).is_ok() {
        for symbol in &scratch.symbols {
            counts[usize::from(*symbol)] += 1;
        }
    }
}

/// The coefficients of `rows`, in `buffer` unless they are the rows themselves, and the shift of
/// each row under `gain`.
fn forward<'a>(
    side: &HeadSide,
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
    side.forward(buffer);
    if let Some(median) = side.gain {
        gain::raise(rows, side.dim(), median, buffer, gains);
    }
    buffer
}
