//! The Huffman decoder of the attention kernels by itself, to be measured.

use crate::BackendError;
use crate::cpu::huffman::{PageRequest, StreamTiles, TOGETHER, decode_pages};
use crate::cpu::simd::Simd;
use kvd_codec::{HeadCodec, PageReader};
use kvd_core::Side;

/// Decodes codes of one head's pages into tiles of bytes, as attention does before its products.
pub struct CodeDecoder {
    simd: Simd,
    tiles: [StreamTiles; Self::PAGES],
    per_row: usize,
}

impl CodeDecoder {
    /// Pages that are decoded together: as many as attention decodes of both sides.
    pub const PAGES: usize = Side::BOTH.len() * TOGETHER;

    /// For pages of `head`; `None` for pages without Huffman codes.
    #[must_use]
    pub fn new(simd: Simd, head: &HeadCodec, side: Side) -> Option<Self> {
        let per_row = head.stream_runs()?.iter().map(|run| run.len).sum();
        let mut tiles = Vec::new();
        for _ in 0..Self::PAGES {
            tiles.push(StreamTiles::new(head, side)?);
        }
        Some(Self { simd, tiles: tiles.try_into().ok()?, per_row })
    }

    /// Decodes up to [`CodeDecoder::PAGES`] pages and says how many codes they held: none where
    /// codes do not fit a byte.
    ///
    /// # Errors
    /// When a page is damaged.
    pub fn decode(&mut self, pages: &[PageReader<'_>]) -> Result<usize, BackendError> {
        let mut decoded = [false; Self::PAGES];
        let buffers = self.tiles.iter_mut().zip(&mut decoded);
        let wanted = pages.iter().zip(buffers).map(|(page, (tiles, decoded))| {
            let rows = 0..page.tokens();
            PageRequest { tiles, page, rows, decoded }
        });
        decode_pages(self.simd, wanted.collect())?;
        let rows = pages.iter().zip(decoded).filter(|(_, decoded)| *decoded);
        Ok(rows.map(|(page, _)| page.tokens() * self.per_row).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::conformance::{codec, geometry, values};
    use kvd_codec::{BlockRows, ModelCodec};
    use kvd_core::LayerIndex;

    const LAYER: LayerIndex = LayerIndex(0);

    /// Codes of both sides of head 0 that were counted, the same by every instruction set.
    fn counted(codec: &mut ModelCodec, dim: usize, tokens: usize) -> Vec<Option<usize>> {
        let [k, v] = [3, 4].map(|seed| values(2 * tokens * dim, seed));
        let block = BlockRows { tokens, k: &k, v: &v };
        codec.train_tables(LAYER, &[block]).unwrap();
        let mut bytes = Vec::new();
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        let side = |side: Side| {
            let first = 2 * side.index();
            let start = if first == 0 { 0 } else { encoded.page_ends[first - 1] };
            let page = &bytes[start as usize..encoded.page_ends[first] as usize];
            let page = || PageReader::open_page(codec, LAYER, side, 0, page).unwrap();
            let by = |simd| {
                let mut decoder = CodeDecoder::new(simd, codec.head_codec(LAYER, side, 0), side)?;
                assert_eq!(decoder.simd, simd);
                Some(decoder.decode(&[page(), page()]).unwrap())
            };
            let counts: Vec<_> = Simd::available_levels().into_iter().map(by).collect();
            assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
            counts[0]
        };
        Side::BOTH.map(side).into()
    }

    #[test]
    fn codes_of_every_page_are_counted_where_there_are_any() {
        let geometry = geometry(64);
        let mut huffman = codec(&geometry, "k=uniform(rel=0.1,axis=block)/huffman; v=raw");
        assert_eq!(counted(&mut huffman, 64, 64), [Some(2 * 64 * 64), None]);
        assert_eq!(counted(&mut huffman, 64, 47), [Some(2 * 47 * 64), None]);
    }
}
