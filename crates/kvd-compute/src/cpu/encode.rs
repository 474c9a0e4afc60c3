//! Raw blocks to pages.

use crate::cpu::arena::HostArena;
use crate::cpu::rows::read_block;
use crate::{BackendError, EncodeSource, EncodedPages, Sampling};
use kvd_codec::{BlockRows, ModelCodec};
use kvd_core::{Geometry, LayerIndex, Side};
use rayon::prelude::*;
use std::cell::Cell;

/// A block's rows, widened.
#[derive(Default)]
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

thread_local! {
    /// Each thread's, so that rows stay close to it from their widening to their page: f32 of a
    /// whole prefill would go to memory and come back.
    static BLOCK: Cell<Block> = Cell::default();
}

/// Blocks by index.
struct Blocks<R> {
    count: usize,
    read: R,
}

impl<R: Fn(usize, &mut Block) + Sync> Blocks<R> {
    /// Runs with the rows of a block.
    fn with<T>(&self, index: usize, run: impl FnOnce(&Block) -> T) -> T {
        let mut block = BLOCK.take();
        (self.read)(index, &mut block);
        let value = run(&block);
        BLOCK.set(block);
        value
    }
}

/// Blocks of the arena.
fn blocks<'a>(
    arena: &'a HostArena,
    geometry: &'a Geometry,
    sources: &'a [EncodeSource],
) -> Blocks<impl Fn(usize, &mut Block) + Sync + 'a> {
    let read = move |index: usize, block: &mut Block| {
        let source = sources[index];
        block.tokens = source.rows as usize;
        for (side, values) in Side::BOTH.into_iter().zip(&mut block.sides) {
            read_block(arena, geometry, source, side, values);
        }
    };
    Blocks { count: sources.len(), read }
}

/// Which blocks are looked at for whether their layer's Huffman tables still fit, where there are
/// any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    /// None: the tables were built from them.
    No,
    /// One in eight of the layer.
    Some,
    /// Each.
    All,
}

/// What is done with blocks beside their encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeAs {
    /// Whether each is decoded again to measure the codec's error.
    pub measured: bool,
    /// For tables that no longer fit.
    pub watched: Watched,
}

/// Builds Huffman tables from blocks of a layer where there are none, or others that fit better.
fn prepare<R: Fn(usize, &mut Block) + Sync>(
    codec: &mut ModelCodec,
    layer: LayerIndex,
    blocks: &Blocks<R>,
    watched: Watched,
) -> Result<(), BackendError> {
    if !codec.needs_tables(layer) {
        let count = if watched == Watched::No { 0 } else { blocks.count };
        for index in 0..count {
            if codec.wants_block(layer) || watched == Watched::All {
                blocks.with(index, |block| codec.count_block(layer, &block.rows()));
            }
        }
        return Ok(());
    }
    let read = |index| {
        let mut block = Block::default();
        (blocks.read)(index, &mut block);
        block
    };
    // A block that cannot be encoded must not keep the others from their tables.
    let blocks: Vec<Block> = (0..blocks.count).map(read).filter(Block::is_finite).collect();
    let rows: Vec<_> = blocks.iter().map(Block::rows).collect();
    if !rows.is_empty() {
        codec.train_tables(layer, &rows)?;
    }
    Ok(())
}

/// Encodes blocks of one layer.
pub(crate) fn encode(
    arena: &HostArena,
    codec: &mut ModelCodec,
    layer: LayerIndex,
    sources: &[EncodeSource],
    sampling: &mut Sampling,
) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
    let geometry = codec.geometry().clone();
    let blocks = blocks(arena, &geometry, sources);
    prepare(codec, layer, &blocks, Watched::Some)?;
    Ok(encode_sampled(codec, layer, &blocks, sampling))
}

/// The same, all of them measured or none.
pub(crate) fn encode_as(
    arena: &HostArena,
    codec: &mut ModelCodec,
    layer: LayerIndex,
    sources: &[EncodeSource],
    EncodeAs { measured, watched }: EncodeAs,
) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
    let geometry = codec.geometry().clone();
    let blocks = blocks(arena, &geometry, sources);
    prepare(codec, layer, &blocks, watched)?;
    Ok(encode_all(codec, layer, &blocks, &vec![measured; blocks.count]))
}

/// Encodes all blocks. When a sampled one is over its bound, the others are measured too.
fn encode_sampled<R: Fn(usize, &mut Block) + Sync>(
    codec: &ModelCodec,
    layer: LayerIndex,
    blocks: &Blocks<R>,
    sampling: &mut Sampling,
) -> Vec<Result<EncodedPages, BackendError>> {
    let due = sampling.due(layer, blocks.count);
    let mut encoded = encode_all(codec, layer, blocks, &due);
    if Sampling::is_alarming(&encoded) {
        let all = encoded.par_iter_mut().zip(&due).enumerate();
        let unmeasured = all.filter(|(_, (_, due))| !**due);
        unmeasured.for_each(|(index, (pages, _))| {
            *pages = blocks.with(index, |block| encode_one(codec, layer, block, true));
        });
    }
    sampling.saw(layer, &encoded);
    encoded
}

/// Encodes blocks, and measures those that are due.
fn encode_all<R: Fn(usize, &mut Block) + Sync>(
    codec: &ModelCodec,
    layer: LayerIndex,
    blocks: &Blocks<R>,
    due: &[bool],
) -> Vec<Result<EncodedPages, BackendError>> {
    let one = |(index, due): (usize, &bool)| {
        blocks.with(index, |block| encode_one(codec, layer, block, *due))
    };
    match due {
        [due] => vec![one((0, due))],
        _ => due.par_iter().enumerate().map(one).collect(),
    }
}

fn encode_one(
    codec: &ModelCodec,
    layer: LayerIndex,
    block: &Block,
    sample: bool,
) -> Result<EncodedPages, BackendError> {
    let mut bytes = Vec::new();
    let (encoded, checked) = if sample {
        let (encoded, checked) = codec.encode_block_checked(layer, &block.rows(), &mut bytes)?;
        (encoded, Some(checked))
    } else {
        (codec.encode_block(layer, &block.rows(), &mut bytes)?, None)
    };
    Ok(EncodedPages {
        bytes,
        held: None,
        page_ends: encoded.page_ends.into(),
        parts: encoded.parts,
        side_bytes: [encoded.key_bytes, encoded.value_bytes],
        values: block.tokens as u64 * codec.geometry().values_per_token(),
        fallback_pages: encoded.fallback_pages,
        sampled: checked,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SAMPLE_INTERVAL;
    use kvd_codec::resolve;
    use kvd_core::{DType, RopePairing};

    const LAYER: LayerIndex = LayerIndex(0);

    fn codec() -> ModelCodec {
        let geometry = Geometry {
            layers: 16,
            kv_heads: 1,
            head_dim_k: 32,
            head_dim_v: 32,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let spec = "k=uniform(b=4,axis=block); v=raw; k.bound=0.1";
        ModelCodec::new(geometry, resolve(spec).unwrap(), None).unwrap()
    }

    /// One range for a page of even values is fine; one spike in it takes all other levels.
    fn block(spike: bool) -> Block {
        let mut k: Vec<f32> = (0..16 * 32).map(|i| 1.0 + (i * 37 % 64) as f32 / 64.0).collect();
        if spike {
            k[9] = 100.0;
            k[200] = -100.0;
        }
        Block { tokens: 16, sides: [k.clone(), k] }
    }

    #[test]
    fn every_layer_has_its_turn_when_layers_come_one_after_another() {
        let (codec, mut sampling) = (codec(), Sampling::default());
        let mut measured = [0; 16];
        for _ in 0..2 * SAMPLE_INTERVAL {
            for (layer, measured) in (0..).map(LayerIndex).zip(&mut measured) {
                // All layers of this codec are alike; which one is asked for is what counts.
                let blocks = Blocks { count: 1, read: |_, to: &mut Block| *to = block(false) };
                let encoded = encode_sampled(&codec, layer, &blocks, &mut sampling);
                *measured += usize::from(encoded[0].as_ref().unwrap().sampled.is_some());
            }
        }
        assert_eq!(measured, [2; 16]);
    }

    #[test]
    fn an_alarm_measures_every_block_until_sixteen_in_a_row_keep_the_bound() {
        let (codec, mut sampling) = (codec(), Sampling::default());
        let mut run = |spikes: &[bool]| -> Vec<(bool, u32)> {
            let read = |index: usize, to: &mut Block| *to = block(spikes[index]);
            let blocks = Blocks { count: spikes.len(), read };
            let encoded = encode_sampled(&codec, LAYER, &blocks, &mut sampling);
            let seen = encoded.into_iter().map(Result::unwrap);
            seen.map(|pages| (pages.sampled.is_some(), pages.over_bound()[0])).collect()
        };
        // Block 0 is due; 1 to 15 are not, spike or no spike.
        assert_eq!(run(&[false, true]), [(true, 0), (false, 0)]);
        let later = run(&[true; 14]);
        assert!(later.iter().all(|seen| *seen == (false, 0)));
        // Block 16 is due and over its bound: its neighbours are measured as well.
        assert_eq!(run(&[true, false, true]), [(true, 1), (true, 0), (true, 1)]);
        assert_eq!(run(&[true]), [(true, 1)]);
        assert!(run(&[false; 15]).iter().all(|seen| *seen == (true, 0)));
        assert_eq!(run(&[true, false]), [(true, 1), (true, 0)]);
        assert!(run(&[false; 15]).iter().all(|seen| *seen == (true, 0)));
        // The alarm has ended with that.
        assert_eq!(run(&[true]), [(false, 0)]);
    }
}
