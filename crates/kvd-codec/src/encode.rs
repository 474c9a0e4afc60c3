//! One page: transform, quantize, pack, seal; raw floats when the quantizer cannot.

use crate::page::{self, HEADER_BYTES, PageHeader, id};
use crate::side::float;
use crate::side::{HeadQuantizer, HeadSide, Unquantizable};
use crate::{PageBytes, bits};
use kvd_core::{DType, LayerIndex, Side};

/// Buffers that the pages of a block share.
#[derive(Default)]
pub(crate) struct Scratch {
    coefficients: Vec<f32>,
    symbols: Vec<u16>,
    scales: Vec<u8>,
}

/// Where a page belongs, and the dtype of a fallback.
#[derive(Clone, Copy)]
pub(crate) struct PagePlace {
    pub(crate) layer: LayerIndex,
    pub(crate) side: Side,
    pub(crate) head: usize,
    pub(crate) dtype: DType,
}

pub(crate) struct EncodedPage {
    pub(crate) parts: PageBytes,
    pub(crate) fallback: bool,
}

/// Appends the page of `rows` (`[tokens, dim]`, every value within `place.dtype`).
pub(crate) fn page(
    side: &HeadSide,
    place: PagePlace,
    rows: &[f32],
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> EncodedPage {
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    let (mut parts, fallback) = match payload(side, rows, scratch, out) {
        Ok(parts) => (parts, false),
        Err(Unquantizable) => {
            out.truncate(start + HEADER_BYTES);
            float::encode_rows(place.dtype, rows, out).expect("the block was checked");
            let codes = (out.len() - start - HEADER_BYTES) as u64;
            (PageBytes { codes, ..PageBytes::default() }, true)
        }
    };
    let header = PageHeader {
        side: place.side,
        quantizer: if fallback { id::float(place.dtype) } else { side.quantizer_id() },
        huffman: false,
        fallback,
        tokens: (rows.len() / side.dim()) as u16,
        dim: side.dim() as u16,
        layer: place.layer.0 as u16,
        head: place.head as u16,
        table_version: 0,
        codec_tag: side.tag,
        payload_len: 0,
        checksum: 0,
    };
    let length = page::seal(out, start, header) as u64;
    parts.header = length - parts.total();
    EncodedPage { parts, fallback }
}

fn payload(
    side: &HeadSide,
    rows: &[f32],
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Result<PageBytes, Unquantizable> {
    let coefficients = forward(side, rows, &mut scratch.coefficients);
    if let HeadQuantizer::Float(dtype) = side.quantizer {
        float::encode_rows(dtype, coefficients, out)?;
        let codes = (coefficients.len() * dtype.size_bytes()) as u64;
        return Ok(PageBytes { codes, ..PageBytes::default() });
    }
    scratch.symbols.clear();
    scratch.scales.clear();
    side.quantizer.quantize(coefficients, side.dim(), &mut scratch.symbols, &mut scratch.scales)?;
    out.extend_from_slice(&scratch.scales);
    let codes_at = out.len();
    let per_row = side.quantizer.symbols_per_row(side.dim());
    bits::pack_rows(&scratch.symbols, per_row, side.quantizer.code_bits(), out);
    Ok(PageBytes {
        scales: scratch.scales.len() as u64,
        codes: (out.len() - codes_at) as u64,
        ..PageBytes::default()
    })
}

/// The coefficients of `rows`, in `buffer` unless they are the rows themselves.
pub(crate) fn forward<'a>(side: &HeadSide, rows: &'a [f32], buffer: &'a mut Vec<f32>) -> &'a [f32] {
    if side.is_identity() {
        return rows;
    }
    buffer.clear();
    buffer.resize(rows.len(), 0.0);
    for (row, out) in rows.chunks_exact(side.dim()).zip(buffer.chunks_exact_mut(side.dim())) {
        side.forward(row, out);
    }
    buffer
}
