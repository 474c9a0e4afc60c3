//! Pages back to rows.

use crate::page::{Page, PageHeader};
use crate::side::HeadQuantizer;
use crate::{HeadSide, ModelCodec, PageError, bits};
use kvd_core::{DType, Geometry, LayerIndex, Side};

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
    Fixed { scales: &'a [u8], bits: u32, codes: &'a [u8] },
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
        check("side", header.side.index(), side.index())?;
        check("layer", usize::from(header.layer), layer.0 as usize)?;
        check("head", usize::from(header.head), head)?;
        check("dim", usize::from(header.dim), head_side.dim())?;
        check("codec_tag", usize::from(header.codec_tag), usize::from(head_side.tag))?;
        let dtype = model.geometry().dtype;
        let id =
            if header.fallback { crate::page::id::float(dtype) } else { head_side.quantizer_id() };
        check("quantizer", usize::from(header.quantizer), usize::from(id))?;
        check("huffman", usize::from(header.huffman), 0)?;
        let payload = if header.fallback {
            rows(dtype, &page, head_side.dim())?
        } else if let HeadQuantizer::Float(dtype) = head_side.quantizer {
            rows(dtype, &page, head_side.dim())?
        } else {
            codes(head_side, &page)?
        };
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

    /// Tests the checksum.
    ///
    /// # Errors
    /// [`PageError::Checksum`].
    pub fn verify(&self) -> Result<(), PageError> {
        self.page.verify()
    }

    /// Decodes rows `first..first + count` into `out` (`[count, dim]`, row-major).
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
            }
            Payload::Fixed { scales, bits, codes } => {
                let mut symbols = [0u16; Geometry::HEAD_DIM_MAX as usize];
                let symbols = &mut symbols[..self.side.quantizer.symbols_per_row(dim)];
                let row_bytes = bits::row_bytes(symbols.len(), bits);
                for (row, out) in (first..end).zip(out.chunks_exact_mut(dim)) {
                    bits::unpack_row(&codes[row * row_bytes..][..row_bytes], bits, symbols);
                    self.side.quantizer.dequantize_row(scales, row, symbols, out);
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

/// A payload of scales and codes.
fn codes<'a>(side: &HeadSide, page: &Page<'a>) -> Result<Payload<'a>, PageError> {
    let tokens = usize::from(page.header().tokens);
    let payload = page.payload();
    let scale_bytes = side.quantizer.scale_bytes(tokens, side.dim());
    let bits = side.quantizer.code_bits();
    let row_bytes = bits::row_bytes(side.quantizer.symbols_per_row(side.dim()), bits);
    check("payload_len", payload.len(), scale_bytes + tokens * row_bytes)?;
    let (scales, codes) = payload.split_at(scale_bytes);
    Ok(Payload::Fixed { scales, bits, codes })
}
