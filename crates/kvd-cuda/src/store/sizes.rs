//! Bytes of the parts of a page, before it is written and after.

use super::{CodeOutput, HeadStore};
use crate::abi::SideKernel;
use kvd_codec::{PageBytes, PageHeader, page_bytes};
use kvd_core::{DType, Side};

/// The part sizes of a page that are known before it is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageSizes {
    known: KnownBytes,
    /// Bytes of the payload at most, gains apart.
    pub(super) room: usize,
    /// Bytes of the page at most.
    pub(super) most: usize,
    /// Bytes of codes of fixed width.
    pub(super) fixed: usize,
}

#[derive(Clone, Copy, Debug)]
enum KnownBytes {
    /// Bytes of scales, and of lengths of Huffman codes; the rest are codes.
    Scales(usize, usize),
    /// Bytes of codes; the rest are outliers, which count as scales.
    Codes(usize),
}

impl PageSizes {
    /// The parts of the page that a header says was written.
    pub(super) fn page_bytes(&self, header: &PageHeader) -> PageBytes {
        let (page, payload) = (header.page_bytes() as u64, u64::from(header.payload_len));
        let gains = header.gain_bytes() as u64;
        let rest = payload.saturating_sub(gains);
        let (scales, offsets) = match self.known {
            _ if header.fallback => (0, 0),
            KnownBytes::Scales(scales, offsets) => (scales as u64, offsets as u64),
            KnownBytes::Codes(bytes) => (rest.saturating_sub(bytes as u64), 0),
        };
        let codes = rest.saturating_sub(scales + offsets);
        PageBytes { header: page - payload, codes, scales: scales + gains, offsets }
    }
}

impl HeadStore {
    /// Sizes of a page of `tokens` tokens, each row with a gain where rows may have one. No page of
    /// outliers is larger than its rows in `dtype`.
    pub(super) fn page_sizes(&self, side: Side, tokens: usize, dtype: DType) -> PageSizes {
        let dim = self.side.dim as usize;
        let (scales, codes) = (self.sizes.scale_bytes(tokens), self.sizes.code_bytes(side, tokens));
        let gains = if self.median > 0.0 { tokens.div_ceil(2) } else { 0 };
        let as_rows = tokens * dim * dtype.size_bytes();
        let (known, room) = match (self.kernel, &self.stage) {
            // Codes stay where they are.
            (_, CodeOutput::Counted(_)) => (KnownBytes::Scales(scales, 0), scales),
            (SideKernel::BitAlloc, _) => (KnownBytes::Codes(codes), codes.max(as_rows)),
            (SideKernel::Grid, CodeOutput::Huffman(lanes)) => {
                (KnownBytes::Scales(0, lanes.length_bytes(tokens)), as_rows)
            }
            (_, CodeOutput::Huffman(lanes)) => {
                let lengths = lanes.length_bytes(tokens);
                (KnownBytes::Scales(scales, lengths), scales + lengths + lanes.word_bytes(tokens))
            }
            _ => (KnownBytes::Scales(scales, 0), scales + codes),
        };
        PageSizes { known, room, most: page_bytes(room + gains), fixed: codes }
    }
}
