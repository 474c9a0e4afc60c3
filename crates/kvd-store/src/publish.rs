//! A publish in flight: which blocks must be packed first, and how all become findable.
//!
//! Owns [`PublishTicket`]. What a sequence holds of its blocks is taken down under its locks when
//! the ticket is made; from then on an append or a truncation changes copies. Until
//! [`PublishTicket::commit_blocks`] nothing of it can be seen, and dropping the ticket gives back
//! all that was reserved and packed for it.

use crate::append::{PackBatch, PackTask, set_packed};
use crate::append_plan::RawAllocation;
use crate::cache::{
    CachedBlock, ChainOrigin, InsertBase, KeyChain, NewBlock, PublishStop, PublishedBlocks,
};
use crate::layer_block::{BlockView, LayerBlock, PackedPages, PinnedBlock, RawSlot};
use crate::sequence::{PublishedChain, SequenceEntry};
use crate::shape::ModelShape;
use kvd_core::LayerIndex;
use std::ops::Range;
use std::sync::Arc;

/// One layer's form of a block that is to be published.
#[derive(Debug)]
enum BlockForm {
    /// As it will be found.
    Ready(PinnedBlock),
    /// Raw, and to be packed.
    Raw { raw: RawSlot, block: Arc<LayerBlock> },
}

impl BlockForm {
    /// The form of a full block; none for one that can never be packed.
    fn of_view(view: &BlockView, is_all_sink: bool) -> Option<Self> {
        let (raw, block) = match view {
            BlockView::Packed(packed) => {
                return Some(Self::Ready(PinnedBlock::Packed(Arc::clone(packed))));
            }
            BlockView::Raw { raw, block } => (raw, block),
        };
        if let Some(packed) = block.packed.get() {
            return Some(Self::Ready(PinnedBlock::Packed(Arc::clone(packed))));
        }
        if is_all_sink {
            return Some(Self::Ready(PinnedBlock::Raw(raw.clone())));
        }
        let (raw, block) = (raw.clone(), Arc::clone(block));
        (!block.is_unpackable()).then_some(Self::Raw { raw, block })
    }
}

/// Blocks of one layer.
#[derive(Debug, Default)]
struct LayerPublish {
    forms: Vec<BlockForm>,
    /// The blocks that are to be packed.
    tasks: Vec<PackTask>,
    /// The state of the block of each of `tasks`.
    blocks: Vec<Arc<LayerBlock>>,
    /// Answers to `tasks`, from the first.
    packed: Vec<Option<PackedPages>>,
}

/// The findings of a publish in its sequence.
#[derive(Debug)]
pub(crate) struct PublishDraft<'a> {
    pub(crate) entry: Arc<SequenceEntry>,
    pub(crate) cut_count: u64,
    pub(crate) base: InsertBase,
    pub(crate) chain: &'a KeyChain<'a>,
    /// First block of the chain's keys within the sequence.
    pub(crate) first: usize,
    /// Blocks of the chain that are found already.
    pub(crate) existed: usize,
    /// Blocks of the chain that the sequence itself had published or attached.
    pub(crate) own: usize,
}

/// The blocks of a sequence that are to be found under keys.
///
/// The device worker encodes the tasks of each layer's [`pack_batch`](Self::pack_batch) and hands
/// the answers to [`set_packed`](Self::set_packed); then
/// [`commit_blocks`](Self::commit_blocks) publishes.
#[derive(Debug)]
#[must_use = "dropping a ticket takes the publish back"]
pub struct PublishTicket {
    entry: Arc<SequenceEntry>,
    cut_count: u64,
    base: InsertBase,
    /// First block that is new.
    first: usize,
    existed: usize,
    own: usize,
    settles: bool,
    /// Keys of the new blocks.
    keys: Vec<Box<[u8]>>,
    layers: Vec<LayerPublish>,
    stop: Option<PublishStop>,
}

impl PublishTicket {
    /// Takes down what the sequence holds of the blocks that are new. Call with its cuts held off.
    pub(crate) fn new(draft: PublishDraft<'_>) -> Self {
        let PublishDraft { entry, cut_count, base, chain, first, existed, own } = draft;
        let shape = Arc::clone(&entry.model);
        let new = first + existed..first + chain.count_blocks();
        let key = |block| chain.block_key(block).into();
        let keys = (existed..chain.count_blocks()).map(key).collect();
        let mut count = new.len();
        let mut layers = Vec::with_capacity(shape.geometry.layers as usize);
        for layer in entry.layer_mutexes() {
            let layer = layer.lock();
            let form = |block| {
                let is_all_sink = shape.sink_rows(block) == shape.block_tokens();
                BlockForm::of_view(layer.views.get(block), is_all_sink)
            };
            let forms: Vec<_> = new.clone().map_while(form).collect();
            count = count.min(forms.len());
            layers.push(LayerPublish { forms, ..LayerPublish::default() });
        }
        let stop = (count < new.len()).then_some(PublishStop::Unpackable);
        let first = new.start;
        let mut ticket = Self {
            entry,
            cut_count,
            base,
            first,
            existed,
            own,
            settles: false,
            keys,
            layers,
            stop,
        };
        ticket.keep_first(count);
        ticket
    }

    /// Reserves what packing needs beside pages. Call without a lock.
    pub(crate) fn reserve_memory(mut self) -> Self {
        let entry = Arc::clone(&self.entry);
        let (shape, pool): (&ModelShape, _) = (&entry.model, &entry.shared_memory().pool);
        let allocation = RawAllocation { pool, shape, ledger: &entry.ledger };
        let first = self.first;
        let (mut count, mut stop) = (usize::MAX, PublishStop::PoolFull);
        for layer in &mut self.layers {
            for (offset, form) in layer.forms.iter().enumerate() {
                let BlockForm::Raw { raw, block } = form else { continue };
                match allocation.make_task(first + offset, raw, false) {
                    Ok(task) => layer.tasks.push(task),
                    Err(error) => {
                        (count, stop) = (count.min(offset), PublishStop::of_reserve(&error));
                        break;
                    }
                }
                layer.blocks.push(Arc::clone(block));
            }
        }
        if count < usize::MAX {
            self.stop = Some(stop);
            self.keep_first(count);
        }
        self
    }

    /// Gives up all new blocks but the first.
    fn keep_first(&mut self, count: usize) {
        let end = self.first + count;
        for layer in &mut self.layers {
            layer.forms.truncate(count);
            let kept = layer.tasks.iter().take_while(|task| (task.block as usize) < end).count();
            layer.tasks.truncate(kept);
            layer.blocks.truncate(kept);
        }
    }

    /// This publish, after which the sequence itself reads the blocks as they are cached, also in
    /// its window: what it answers then is what sequences answer that find them.
    pub fn with_settling(self) -> Self {
        Self { settles: true, ..self }
    }

    /// The sequence's model.
    #[must_use]
    pub fn model_shape(&self) -> &Arc<ModelShape> {
        &self.entry.model
    }

    /// Layers with blocks to encode that have no answer yet.
    pub fn layers_to_pack(&self) -> impl Iterator<Item = LayerIndex> {
        let waits = |layer: &LayerPublish| layer.packed.is_empty() && !layer.tasks.is_empty();
        let layers = (0..).map(LayerIndex).zip(&self.layers);
        layers.filter(move |(_, layer)| waits(layer)).map(|(index, _)| index)
    }

    /// The blocks of a layer to encode.
    ///
    /// # Panics
    /// When there is no such layer.
    #[must_use]
    pub fn pack_batch(&self, layer: LayerIndex) -> PackBatch<'_> {
        let LayerPublish { tasks, blocks, .. } = &self.layers[layer.0 as usize];
        PackBatch { sequence: self.entry.id, layer, tasks, blocks }
    }

    /// Answers a layer's [`pack_batch`](Self::pack_batch), from its first task; `None`, or a
    /// missing answer, for what could not be packed.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn set_packed(&mut self, layer: LayerIndex, mut packed: Vec<Option<PackedPages>>) {
        let layer = &mut self.layers[layer.0 as usize];
        packed.resize_with(layer.tasks.len(), || None);
        layer.packed = packed;
    }

    /// Makes the blocks findable, as far as each is packed on every layer.
    pub fn commit_blocks(self) -> PublishedBlocks {
        let Self { entry, cut_count, base, first, existed, own, settles, keys, layers, mut stop } =
            self;
        let cache = &entry.shared_memory().cache;
        let count = layers.first().map_or(0, |layer| layer.forms.len());
        let mut forms: Vec<Vec<PinnedBlock>> = (0..count).map(|_| Vec::new()).collect();
        let mut complete = count;
        for layer in layers {
            let LayerPublish { forms: of_layer, tasks, blocks, packed } = layer;
            for ((task, block), pages) in tasks.into_iter().zip(&blocks).zip(packed) {
                if let Some(pages) = pages {
                    set_packed(task, block, pages, &entry.ledger);
                }
            }
            for (offset, form) in of_layer.into_iter().enumerate() {
                match finish_form(form) {
                    Ok(form) => forms[offset].push(form),
                    Err(reason) => {
                        if offset < complete {
                            (complete, stop) = (offset, Some(reason));
                        }
                        break;
                    }
                }
            }
        }
        forms.truncate(complete);
        let blocks = forms.into_iter().zip(&keys);
        let blocks = blocks.map(|(layers, key)| NewBlock { key, block: CachedBlock::new(layers) });
        let namespace = &entry.model.namespace;
        let inserted = cache.insert_blocks(namespace, entry.model.id, base, blocks.collect());
        cache.note_existing(existed);
        let found = first + inserted.published + inserted.existed;
        if let Some(tail) = inserted.tail {
            if settles {
                let blocks = cache.list_blocks(&tail, found - (first - existed));
                entry.share_blocks(cut_count, first - existed, &blocks);
            }
            let is_found = existed + inserted.existed > own;
            let origin = if is_found { ChainOrigin::Found } else { ChainOrigin::Stored };
            let chain = PublishedChain { blocks: found, tail: Some(tail), origin };
            entry.extend_published(cut_count, chain);
        }
        PublishedBlocks {
            published: inserted.published,
            existed: existed + inserted.existed,
            stop: inserted.stop.or(stop),
            length: found as u32 * entry.model.block_tokens(),
        }
    }
}

/// The form in which a block is found, once its packing was tried.
fn finish_form(form: BlockForm) -> Result<PinnedBlock, PublishStop> {
    let block = match form {
        BlockForm::Ready(form) => return Ok(form),
        BlockForm::Raw { block, .. } => block,
    };
    let why = if block.is_unpackable() { PublishStop::Unpackable } else { PublishStop::PoolFull };
    block.packed.get().map(|packed| PinnedBlock::Packed(Arc::clone(packed))).ok_or(why)
}

/// Blocks of a sequence as tokens.
pub(crate) fn tokens_of(blocks: Range<usize>, shape: &ModelShape) -> Range<u64> {
    let size = u64::from(shape.block_tokens());
    blocks.start as u64 * size..blocks.end as u64 * size
}
