//! The page: a 32-byte header, the payload, zero padding to 16 bytes.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic `KVDP` |
//! | 4 | format version |
//! | 5 | side: 0 key, 1 value |
//! | 6 | quantizer id ([`id`]) |
//! | 7 | flags: bit 0 Huffman, bit 1 fallback to raw floats, bit 2 token gains |
//! | 8..10 | tokens |
//! | 10..12 | channels of the head |
//! | 12..14 | layer |
//! | 14..16 | KV head |
//! | 16..18 | Huffman table version, 0 without Huffman |
//! | 18..20 | codec tag: hash of the side's spec and of this head's calibration |
//! | 20..24 | payload length, without padding |
//! | 24..32 | XXH3-64 of the whole page with these 8 bytes zero |
//!
//! Everything is little-endian. The payload is `scales | stream lengths | codes`: what the
//! quantizer needs per group, then for Huffman pages one u16 per stream (its bytes), then codes.

use crate::PageError;
use crate::gain::{RowGains, gain_bytes};
use kvd_core::{Geometry, Side};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of a page header.
pub const HEADER_BYTES: usize = 32;
/// Pages are padded to this many bytes, so that a page in an aligned slot has aligned parts.
pub const PAGE_ALIGN: usize = 16;

const MAGIC: [u8; 4] = *b"KVDP";
/// Version of pages, which their headers have.
pub const FORMAT_VERSION: u8 = 1;
const TABLE_AT: usize = 16;
const LENGTH_AT: usize = 20;
const CHECKSUM_AT: usize = 24;
const FLAG_HUFFMAN: u8 = 1;
const FLAG_FALLBACK: u8 = 2;
const FLAG_GAINS: u8 = 4;

/// Quantizer ids in page headers.
pub(crate) mod id {
    use kvd_core::DType;

    pub(crate) const E4M3: u8 = 3;
    pub(crate) const UNIFORM: u8 = 16;
    pub(crate) const SYMMETRIC: u8 = 17;
    pub(crate) const HYBRID: u8 = 18;
    pub(crate) const VQ: u8 = 32;
    pub(crate) const GRID: u8 = 48;
    pub(crate) const BITALLOC: u8 = 49;
    pub(crate) const POLAR: u8 = 64;
    pub(crate) const LLOYD: u8 = 80;

    pub(crate) const fn float_id(dtype: DType) -> u8 {
        match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::BF16 => 2,
        }
    }
}

/// The fields of a page header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// Keys or values.
    pub side: Side,
    /// Id of the quantizer: 0 f32, 1 f16, 2 bf16, 3 fp8 e4m3, 16 uniform, 17 symmetric, 18 hybrid,
    /// 32 vq, 48 grid, 49 bitalloc, 64 polar, 80 lloyd.
    pub quantizer: u8,
    /// The codes are Huffman streams.
    pub huffman: bool,
    /// The codec could not represent this page: it holds raw floats in the geometry's dtype.
    pub fallback: bool,
    /// The payload ends with gains, 4 bits per row.
    pub gains: bool,
    /// Rows in the page.
    pub tokens: u16,
    /// Channels of a row.
    pub dim: u16,
    /// Layer of the page.
    pub layer: u16,
    /// KV head of the page.
    pub head: u16,
    /// Huffman table that decodes the page; 0 without Huffman.
    pub table_version: u16,
    /// Low bits of a hash over the side's spec and the head's calibration.
    pub codec_tag: u16,
    /// Bytes after the header, without padding.
    pub payload_len: u32,
    /// XXH3-64 of the page with this field zero.
    pub checksum: u64,
}

impl PageHeader {
    /// Bytes of the gains at the payload's end.
    #[must_use]
    pub fn gain_bytes(&self) -> usize {
        if self.gains { gain_bytes(self.tokens.into()) } else { 0 }
    }

    /// Bytes of its page, padding included.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        page_bytes(self.payload_len as usize)
    }

    /// Reads a header.
    ///
    /// # Errors
    /// Magic, version, or a field outside its range.
    pub fn from_bytes(head: &[u8; HEADER_BYTES]) -> Result<Self, PageError> {
        let magic = [head[0], head[1], head[2], head[3]];
        if magic != MAGIC {
            return Err(PageError::Magic(magic));
        }
        if head[4] != FORMAT_VERSION {
            return Err(PageError::Version(head[4]));
        }
        let side = match head[5] {
            0 => Side::Key,
            1 => Side::Value,
            other => return Err(field_error("side", u64::from(other), 1)),
        };
        let flags = head[7];
        if flags & !(FLAG_HUFFMAN | FLAG_FALLBACK | FLAG_GAINS) != 0 {
            return Err(field_error("flags", u64::from(flags), 7));
        }
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let header = Self {
            side,
            quantizer: head[6],
            huffman: flags & FLAG_HUFFMAN != 0,
            fallback: flags & FLAG_FALLBACK != 0,
            gains: flags & FLAG_GAINS != 0,
            tokens: u16_at(8),
            dim: u16_at(10),
            layer: u16_at(12),
            head: u16_at(14),
            table_version: u16_at(16),
            codec_tag: u16_at(18),
            payload_len: stored_length(head),
            checksum: stored_checksum(head),
        };
        if !(1..=Geometry::BLOCK_TOKENS_MAX).contains(&u32::from(header.tokens)) {
            return Err(field_error("tokens", u64::from(header.tokens), 1));
        }
        if !(2..=Geometry::HEAD_DIM_MAX).contains(&u32::from(header.dim)) {
            return Err(field_error("dim", u64::from(header.dim), 2));
        }
        Ok(header)
    }

    /// The header as it stands in a page.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let flags = if self.huffman { FLAG_HUFFMAN } else { 0 }
            | if self.fallback { FLAG_FALLBACK } else { 0 }
            | if self.gains { FLAG_GAINS } else { 0 };
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&[
            FORMAT_VERSION,
            self.side.index() as u8,
            self.quantizer,
            flags,
        ]);
        for (at, field) in
            [self.tokens, self.dim, self.layer, self.head, self.table_version, self.codec_tag]
                .into_iter()
                .enumerate()
        {
            bytes[8 + 2 * at..10 + 2 * at].copy_from_slice(&field.to_le_bytes());
        }
        bytes[20..24].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[CHECKSUM_AT..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }
}

/// A page whose header and length are sound; its checksum is tested on demand.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    header: PageHeader,
    bytes: &'a [u8],
}

impl<'a> Page<'a> {
    /// Reads the header and tests everything but the checksum. `bytes` is exactly one page.
    ///
    /// # Errors
    /// Length, magic, version, or a field outside its range.
    pub fn parse_page(bytes: &'a [u8]) -> Result<Self, PageError> {
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(PageError::Length { got: bytes.len(), want: HEADER_BYTES });
        };
        let header = PageHeader::from_bytes(head)?;
        let want = header.page_bytes();
        if bytes.len() != want {
            return Err(PageError::Length { got: bytes.len(), want });
        }
        let page = Self { header, bytes };
        if header.gain_bytes() > header.payload_len as usize {
            return Err(PageError::Payload("it ends inside the gains"));
        }
        Ok(page)
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &PageHeader {
        &self.header
    }

    /// Becomes the page of `bytes` where that has the same header, but for its length and checksum;
    /// whether it has.
    pub(crate) fn turn_to(&mut self, bytes: &'a [u8]) -> bool {
        let said = |page: &'a [u8]| page.first_chunk::<LENGTH_AT>();
        let Some(head) = bytes.first_chunk() else { return false };
        let header = PageHeader {
            payload_len: stored_length(head),
            checksum: stored_checksum(head),
            ..self.header
        };
        let sound = bytes.len() == header.page_bytes()
            && header.gain_bytes() <= header.payload_len as usize
            && said(bytes) == said(self.bytes);
        if sound {
            *self = Self { header, bytes };
        }
        sound
    }

    /// The payload without gains and padding.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[HEADER_BYTES..][..self.header.payload_len as usize - self.header.gain_bytes()]
    }

    /// The gains of its rows, where any has one.
    #[must_use]
    pub fn gains(&self) -> Option<RowGains<'a>> {
        let end = HEADER_BYTES + self.header.payload_len as usize;
        self.header.gains.then(|| RowGains(&self.bytes[end - self.header.gain_bytes()..end]))
    }

    /// Tests the checksum.
    ///
    /// # Errors
    /// [`PageError::Checksum`].
    pub fn verify_checksum(&self) -> Result<(), PageError> {
        let want = page_checksum(self.bytes);
        let got = self.header.checksum;
        if got == want { Ok(()) } else { Err(PageError::Checksum { got, want }) }
    }
}

fn field_error(field: &'static str, got: u64, want: u64) -> PageError {
    PageError::Field { field, got, want }
}

fn stored_length(head: &[u8; HEADER_BYTES]) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| head[LENGTH_AT + byte]))
}

fn stored_checksum(head: &[u8; HEADER_BYTES]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&head[CHECKSUM_AT..]);
    u64::from_le_bytes(bytes)
}

/// Checksum of a page with its checksum field taken as zero.
fn page_checksum(page: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&page[..CHECKSUM_AT]);
    hash.update(&[0; HEADER_BYTES - CHECKSUM_AT]);
    hash.update(&page[HEADER_BYTES..]);
    hash.digest()
}

/// Gives a page another table version, and the checksum that goes with it.
pub(crate) fn rename_table(page: &mut [u8], version: u16) {
    page[TABLE_AT..TABLE_AT + 2].copy_from_slice(&version.to_le_bytes());
    let sum = page_checksum(page);
    page[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// Bytes of a page with that payload, padding included.
#[must_use]
pub fn page_bytes(payload: usize) -> usize {
    (HEADER_BYTES + payload).next_multiple_of(PAGE_ALIGN)
}

/// Pads the page that starts at `start` of `out` (its header still blank), fills in length and
/// checksum, and returns its whole length.
pub(crate) fn seal_page(out: &mut Vec<u8>, start: usize, mut header: PageHeader) -> usize {
    let payload = out.len() - start - HEADER_BYTES;
    header.payload_len = u32::try_from(payload).expect("a page is far below 4 GiB");
    out.resize(start + page_bytes(payload), 0);
    header.checksum = 0;
    out[start..start + HEADER_BYTES].copy_from_slice(&header.to_bytes());
    let sum = page_checksum(&out[start..]);
    out[start + CHECKSUM_AT..start + HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    out.len() - start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> PageHeader {
        PageHeader {
            side: Side::Value,
            quantizer: id::VQ,
            huffman: true,
            fallback: false,
            gains: false,
            tokens: 0x0102,
            dim: 0x0304,
            layer: 0x0201,
            head: 0x0203,
            table_version: 0x0506,
            codec_tag: 0x0708,
            payload_len: 3,
            checksum: 0,
        }
    }

    #[test]
    fn header_bytes_are_golden() {
        let mut page = vec![0xEE; 5];
        page.resize(5 + HEADER_BYTES, 0);
        page.extend([9, 8, 7]);
        assert_eq!(seal_page(&mut page, 5, header()), 48);
        let text: String = page[5..29].iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(text, "4b56445001012001020104030102030206050807".to_owned() + "03000000");
        let parsed = Page::parse_page(&page[5..]).unwrap();
        assert_eq!(parsed.payload(), [9, 8, 7]);
        assert_eq!(PageHeader { checksum: 0, ..*parsed.header() }, header());
        parsed.verify_checksum().unwrap();
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let mut page = vec![0; HEADER_BYTES];
        page.extend([1, 2, 3, 4, 5]);
        seal_page(&mut page, 0, header());
        for bit in 0..page.len() * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            let found = Page::parse_page(&page).and_then(|p| p.verify_checksum());
            assert!(found.is_err(), "bit {bit} went unnoticed");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(matches!(Page::parse_page(&page[..31]), Err(PageError::Length { .. })));
        assert!(matches!(Page::parse_page(&page[..40]), Err(PageError::Length { .. })));
    }
}
