//! Raw blocks to pages.

use crate::cpu::arena::HostArena;
use crate::cpu::raw_slots::read_block;
use crate::{BackendError, EncodeSource, EncodeTask, EncodedBlocks, EncodedPages, Sampling, Stop};
use kvd_codec::{BlockRows, ModelCodec};
use kvd_core::{Geometry, LayerIndex, PackedBytes, Side};
use rayon::prelude::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

/// A block's rows, widened.
#[derive(Default)]
struct WidenedBlock {
    tokens: usize,
    sides: [Vec<f32>; 2],
}

impl WidenedBlock {
    fn is_finite(&self) -> bool {
        self.sides.iter().flatten().all(|value| value.is_finite())
    }

    fn block_rows(&self) -> BlockRows<'_> {
        BlockRows { tokens: self.tokens, k: &self.sides[0], v: &self.sides[1] }
    }
}

thread_local! {
    /// Each thread's, so that rows stay close to it from their widening to their page: f32 of a
    /// whole prefill would go to memory and come back.
    static BLOCK: Cell<WidenedBlock> = Cell::default();
}

/// Blocks by index.
struct BlockReader<R> {
    count: usize,
    read: R,
}

impl<R: Fn(usize, &mut WidenedBlock) + Sync> BlockReader<R> {
    /// Runs with the rows of a block.
    fn with<T>(&self, index: usize, run: impl FnOnce(&WidenedBlock) -> T) -> T {
        let mut block = BLOCK.take();
        (self.read)(index, &mut block);
        let value = run(&block);
        BLOCK.set(block);
        value
    }
}

/// Blocks of the arena.
fn arena_blocks<'a>(
    arena: &'a HostArena,
    geometry: &'a Geometry,
    sources: &'a [EncodeSource],
) -> BlockReader<impl Fn(usize, &mut WidenedBlock) + Sync + 'a> {
    let read = move |index: usize, block: &mut WidenedBlock| {
        let source = sources[index];
        block.tokens = source.rows as usize;
        for (side, values) in Side::BOTH.into_iter().zip(&mut block.sides) {
            read_block(arena, geometry, source, side, values);
        }
    };
    BlockReader { count: sources.len(), read }
}

/// How blocks are encoded for a device that has its own [`Sampling`] and counts codes itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeAs {
    /// Whether each is decoded again to measure the codec's error.
    pub measured: bool,
}

/// Counts the codes of those blocks that the codec chooses, and lets it replace Huffman tables that
/// fit them badly.
fn count_chosen<R: Fn(usize, &mut WidenedBlock) + Sync>(
    codec: &mut ModelCodec,
    layer: LayerIndex,
    blocks: &BlockReader<R>,
) -> Result<(), BackendError> {
    let chosen = codec.choose_blocks_to_count(layer, blocks.count);
    observe_chosen(codec, layer, blocks, chosen)
}

/// Counts the codes of some blocks, and lets the codec replace Huffman tables that fit them badly.
fn observe_chosen<R: Fn(usize, &mut WidenedBlock) + Sync>(
    codec: &mut ModelCodec,
    layer: LayerIndex,
    blocks: &BlockReader<R>,
    chosen: Vec<usize>,
) -> Result<(), BackendError> {
    let read = |index: usize| {
        let mut block = WidenedBlock::default();
        (blocks.read)(index, &mut block);
        block
    };
    // A block that cannot be encoded must not keep the others from their tables.
    let chosen: Vec<WidenedBlock> =
        chosen.into_iter().map(read).filter(WidenedBlock::is_finite).collect();
    if !chosen.is_empty() {
        let rows: Vec<_> = chosen.iter().map(WidenedBlock::block_rows).collect();
        let counts = codec.count_blocks(layer, &rows)?;
        codec.observe_codes(layer, &counts, rows.len())?;
    }
    Ok(())
}

/// Counts the codes of blocks that the codec has chosen.
pub(crate) fn observe_blocks(
    arena: &HostArena,
    codec: &mut ModelCodec,
    layer: LayerIndex,
    sources: &[EncodeSource],
) -> Result<(), BackendError> {
    let geometry = codec.geometry().clone();
    let blocks = arena_blocks(arena, &geometry, sources);
    let all = (0..blocks.count).collect();
    observe_chosen(codec, layer, &blocks, all)
}

/// Goes on encoding the blocks of a task; `None` when its slice is over before the last of them.
pub(crate) fn encode_slice(
    arena: &HostArena,
    codec: &mut ModelCodec,
    sampling: &mut Sampling,
    task: &mut EncodeTask,
    stop: &Stop,
) -> Result<Option<EncodedBlocks>, BackendError> {
    let geometry = codec.geometry().clone();
    let blocks = arena_blocks(arena, &geometry, &task.blocks);
    let known = task.under_way.take().and_then(|kept| kept.downcast::<BlocksUnderWay>().ok());
    let mut under_way = match known {
        Some(kept) => *kept,
        None => {
            count_chosen(codec, task.layer, &blocks)?;
            BlocksUnderWay::new(sampling.due(task.layer, blocks.count))
        }
    };
    let encoded = under_way.go_on(codec, task.layer, &blocks, stop);
    match &encoded {
        Some(encoded) => sampling.note_blocks(task.layer, encoded),
        None => task.under_way = Some(Box::new(under_way)),
    }
    Ok(encoded)
}

/// Encodes with the tables that exist, and measures all blocks or none.
pub(crate) fn encode_as(
    arena: &HostArena,
    codec: &ModelCodec,
    layer: LayerIndex,
    sources: &[EncodeSource],
    EncodeAs { measured }: EncodeAs,
) -> Vec<Result<EncodedPages, BackendError>> {
    let geometry = codec.geometry().clone();
    let blocks = arena_blocks(arena, &geometry, sources);
    encode_all(codec, layer, &blocks, &vec![measured; blocks.count])
}

/// Blocks of one call, some of which are encoded.
struct BlocksUnderWay {
    /// Which are measured.
    due: Vec<bool>,
    encoded: Vec<Option<Result<EncodedPages, BackendError>>>,
    /// Whether all are measured since one was found over its bound.
    is_alarmed: bool,
}

impl BlocksUnderWay {
    fn new(due: Vec<bool>) -> Self {
        let encoded = due.iter().map(|_| None).collect();
        Self { due, encoded, is_alarmed: false }
    }

    /// Encodes what is left, one block at least. When a sampled one is over its bound, the others
    /// are encoded again and measured too. `None` when the slice is over before.
    fn go_on<R: Fn(usize, &mut WidenedBlock) + Sync>(
        &mut self,
        codec: &ModelCodec,
        layer: LayerIndex,
        blocks: &BlockReader<R>,
        stop: &Stop,
    ) -> Option<EncodedBlocks> {
        let is_first = AtomicBool::new(true);
        loop {
            let encode = |index: usize, due: bool| {
                // Whatever waits, a slice brings the work further.
                let goes_on = is_first.swap(false, Ordering::Relaxed) || !stop.slice_is_over();
                goes_on.then(|| blocks.with(index, |block| encode_one(codec, layer, block, due)))
            };
            let left = self.encoded.iter_mut().zip(&self.due).enumerate();
            let left: Vec<_> = left.filter(|(_, (encoded, _))| encoded.is_none()).collect();
            // One block is not worth telling other threads of.
            if left.len() == 1 {
                left.into_iter().for_each(|(index, (to, due))| *to = encode(index, *due));
            } else {
                left.into_par_iter().for_each(|(index, (to, due))| *to = encode(index, *due));
            }
            if self.encoded.iter().any(Option::is_none) {
                return None;
            }
            let encoded: EncodedBlocks = self.encoded.drain(..).flatten().collect();
            if self.is_alarmed || !Sampling::is_alarming(&encoded) {
                return Some(encoded);
            }
            self.is_alarmed = true;
            let kept = encoded.into_iter().zip(&self.due);
            self.encoded = kept.map(|(pages, due)| due.then_some(pages)).collect();
            self.due.fill(true);
        }
    }
}

/// Encodes blocks, and measures those that are due.
fn encode_all<R: Fn(usize, &mut WidenedBlock) + Sync>(
    codec: &ModelCodec,
    layer: LayerIndex,
    blocks: &BlockReader<R>,
    due: &[bool],
) -> EncodedBlocks {
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
    block: &WidenedBlock,
    sample: bool,
) -> Result<EncodedPages, BackendError> {
    let mut bytes = Vec::new();
    let (encoded, checked) = if sample {
        let (encoded, checked) =
            codec.encode_block_checked(layer, &block.block_rows(), &mut bytes)?;
        (encoded, Some(checked))
    } else {
        (codec.encode_block(layer, &block.block_rows(), &mut bytes)?, None)
    };
    Ok(EncodedPages {
        bytes,
        held: None,
        page_ends: encoded.page_ends.into(),
        packed: PackedBytes {
            parts: encoded.parts,
            sides: [encoded.key_bytes, encoded.value_bytes],
            values: block.tokens as u64 * codec.geometry().values_per_token(),
        },
        fallback_pages: encoded.fallback_pages,
        sampled: checked,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SAMPLE_INTERVAL;
    use kvd_codec::resolve_spec;
    use kvd_core::{DType, RopePairing};
    use std::sync::Arc;

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
        ModelCodec::new(geometry, resolve_spec(spec).unwrap(), None).unwrap()
    }

    /// Blocks of one call, in one slice.
    fn encode_sampled(
        codec: &ModelCodec,
        layer: LayerIndex,
        blocks: &BlockReader<impl Fn(usize, &mut WidenedBlock) + Sync>,
        sampling: &mut Sampling,
    ) -> EncodedBlocks {
        let mut under_way = BlocksUnderWay::new(sampling.due(layer, blocks.count));
        let encoded = under_way.go_on(codec, layer, blocks, &Stop::never()).unwrap();
        sampling.note_blocks(layer, &encoded);
        encoded
    }

    /// One range for a page of even values is fine; one spike in it takes all other levels.
    fn block(spike: bool) -> WidenedBlock {
        let mut k: Vec<f32> = (0..16 * 32).map(|i| 1.0 + (i * 37 % 64) as f32 / 64.0).collect();
        if spike {
            k[9] = 100.0;
            k[200] = -100.0;
        }
        WidenedBlock { tokens: 16, sides: [k.clone(), k] }
    }

    #[test]
    fn every_layer_has_its_turn_when_layers_come_one_after_another() {
        let (codec, mut sampling) = (codec(), Sampling::default());
        let mut measured = [0; 16];
        for _ in 0..2 * SAMPLE_INTERVAL + 1 {
            for (layer, measured) in (0..).map(LayerIndex).zip(&mut measured) {
                // All layers of this codec are alike; which one is asked for is what counts.
                let blocks =
                    BlockReader { count: 1, read: |_, to: &mut WidenedBlock| *to = block(false) };
                let encoded = encode_sampled(&codec, layer, &blocks, &mut sampling);
                *measured += usize::from(encoded[0].as_ref().unwrap().sampled.is_some());
            }
        }
        // 0, the powers of two below 256, 256 and 512.
        assert_eq!(measured, [11; 16]);
    }

    #[test]
    fn an_alarm_measures_every_block_until_sixteen_in_a_row_keep_the_bound() {
        let (codec, mut sampling) = (codec(), Sampling::default());
        let mut run = |spikes: &[bool]| -> Vec<(bool, u32)> {
            let read = |index: usize, to: &mut WidenedBlock| *to = block(spikes[index]);
            let blocks = BlockReader { count: spikes.len(), read };
            let encoded = encode_sampled(&codec, LAYER, &blocks, &mut sampling);
            let seen = encoded.into_iter().map(Result::unwrap);
            seen.map(|pages| (pages.sampled.is_some(), pages.over_bound()[0])).collect()
        };
        // Blocks 0, 1, 2, 4 and 8 are due; 9 to 15 are not, spike or no spike.
        let due = [true, true, true, false, true, false, false, false, true];
        assert_eq!(run(&[false; 9]), due.map(|measured| (measured, 0)));
        let later = run(&[true; 7]);
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

    #[test]
    fn slices_of_a_block_make_the_pages_of_one_call() {
        let spikes = [false, true, false, true, true];
        let read = |index: usize, to: &mut WidenedBlock| *to = block(spikes[index]);
        let blocks = BlockReader { count: spikes.len(), read };
        // The first is measured and keeps the bound; the second, where an alarm begins, does not.
        for due in [[true, false, false, false, false], [false, true, false, false, false]] {
            let whole = BlocksUnderWay::new(due.to_vec())
                .go_on(&codec(), LAYER, &blocks, &Stop::never())
                .unwrap();
            let (mut sliced, mut slices) = (BlocksUnderWay::new(due.to_vec()), 1);
            let stop = Stop { outrun: Arc::new(true.into()), ..Stop::never() };
            let sliced = loop {
                match sliced.go_on(&codec(), LAYER, &blocks, &stop) {
                    Some(encoded) => break encoded,
                    None => slices += 1,
                }
            };
            let is_alarmed = due[1];
            assert_eq!(slices, if is_alarmed { 5 + 4 } else { 5 });
            for (one, other) in whole.iter().zip(&sliced) {
                let [one, other] = [one, other].map(|pages| pages.as_ref().unwrap());
                assert_eq!((&one.bytes, &one.page_ends), (&other.bytes, &other.page_ends));
                assert_eq!(one.sampled.is_some(), other.sampled.is_some());
            }
            assert_eq!(whole.iter().flatten().all(|pages| pages.sampled.is_some()), is_alarmed);
        }
    }
}
