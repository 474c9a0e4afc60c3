//! Raw blocks to pages.

use super::arena::HostArena;
use super::rows::read_block;
use crate::{BackendError, EncodeSource, EncodedPages};
use kvd_codec::{BlockRows, ModelCodec, PageReader, Space};
use kvd_core::{LayerIndex, Side};
use rayon::prelude::*;

/// One block in this many is decoded again to measure the codec's error.
pub(crate) const SAMPLE_INTERVAL: u64 = 16;

/// A block's rows, widened.
struct Block {
    tokens: usize,
    sides: [Vec<f32>; 2],
}

impl Block {
    fn is_finite(&self) -> bool {
        self.sides.iter().flatten().all(|value| value.is_finite())
    }

    fn rows(&self) -> BlockRows<'_> {
        BlockRows { tokens: self.tokens, k: &self.sides[0], v: &self.sides[1] }
    }
}

/// Encodes blocks of one layer; `first_index` is how many blocks this model encoded before.
pub(crate) fn encode(
    arena: &HostArena,
    codec: &mut ModelCodec,
    layer: LayerIndex,
    blocks: &[EncodeSource],
    first_index: u64,
) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
    let geometry = codec.geometry().clone();
    let blocks: Vec<Block> = blocks
        .iter()
        .map(|source| Block {
            tokens: source.rows as usize,
            sides: Side::BOTH.map(|side| read_block(arena, &geometry, *source, side)),
        })
        .collect();
    if codec.needs_tables(layer) {
        // A block that cannot be encoded must not keep the others from their tables.
        let rows: Vec<_> =
            blocks.iter().filter(|block| block.is_finite()).map(Block::rows).collect();
        if !rows.is_empty() {
            codec.train_tables(layer, &rows)?;
        }
    }
    let codec = &*codec;
    let one = |(i, block): (usize, &Block)| {
        let sample = (first_index + i as u64).is_multiple_of(SAMPLE_INTERVAL);
        encode_one(codec, layer, block, sample)
    };
    if blocks.len() == 1 {
        return Ok(vec![one((0, &blocks[0]))]);
    }
    Ok(blocks.par_iter().enumerate().map(one).collect())
}

fn encode_one(
    codec: &ModelCodec,
    layer: LayerIndex,
    block: &Block,
    sample: bool,
) -> Result<EncodedPages, BackendError> {
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(layer, &block.rows(), &mut bytes)?;
    let sampled =
        if sample { Some(measure(codec, layer, block, &bytes, &encoded.page_ends)?) } else { None };
    Ok(EncodedPages {
        bytes,
        page_ends: encoded.page_ends.into(),
        parts: encoded.parts,
        side_bytes: [encoded.key_bytes, encoded.value_bytes],
        values: block.tokens as u64 * codec.geometry().values_per_token(),
        fallback_pages: encoded.fallback_pages,
        sampled,
    })
}

/// Squared error and squared norm of a block's pages, by side.
fn measure(
    codec: &ModelCodec,
    layer: LayerIndex,
    block: &Block,
    bytes: &[u8],
    ends: &[u32],
) -> Result<[(f64, f64); 2], BackendError> {
    let heads = codec.geometry().kv_heads as usize;
    let mut sums = [(0f64, 0f64); 2];
    for side in Side::BOTH {
        let dim = codec.geometry().head_dim(side);
        let mut coefficients = vec![0f32; block.tokens * dim];
        let mut value = vec![0f32; dim];
        for head in 0..heads {
            let index = side.index() * heads + head;
            let start = if index == 0 { 0 } else { ends[index - 1] as usize };
            let page = &bytes[start..ends[index] as usize];
            let page = PageReader::open(codec, layer, side, head, page)?;
            page.decode_rows(0, block.tokens, &mut coefficients)?;
            let originals = &block.sides[side.index()][head * block.tokens * dim..];
            let transform = codec.head(layer, side, head);
            for (row, original) in coefficients.chunks_exact(dim).zip(originals.chunks_exact(dim)) {
                match page.space() {
                    Space::Raw => value.copy_from_slice(row),
                    Space::Coefficient => transform.inverse(row, &mut value),
                }
                for (a, b) in value.iter().zip(original) {
                    sums[side.index()].0 += f64::from(a - b).powi(2);
                    sums[side.index()].1 += f64::from(*b).powi(2);
                }
            }
        }
    }
    Ok(sums)
}
