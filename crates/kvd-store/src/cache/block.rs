//! A cached block: the packed form of one page of tokens on every layer, and who holds it.
//!
//! Owns [`CachedBlock`], which never changes, and [`EntryHold`]. No locks. A clone of an entry's
//! hold keeps the entry, and all before it; of one in the pool, in the pool.

use crate::layer_block::{BlockView, PackedBlock, PackedPages, PinnedBlock, RawSlot};
use crate::pool::FreedSlots;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// K and V of one page of tokens, all layers.
#[derive(Debug)]
pub(crate) struct CachedBlock {
    layers: Box<[PinnedBlock]>,
    /// Bytes of the pool that it keeps.
    pub(crate) bytes: u64,
}

/// One layer of a cached block: where its rows and pages lie.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// Rows in the stored precision; none for a block without any.
    pub rows: Option<RawSlot>,
    /// Pages; none for a block that lies in the sink.
    pub pages: Option<PackedPages>,
}

impl CachedBlock {
    /// A block of its form on each layer.
    pub(crate) fn new(layers: Vec<PinnedBlock>) -> Self {
        let bytes = layers.iter().map(PinnedBlock::reserved_bytes).sum();
        Self { layers: layers.into(), bytes }
    }

    /// A block that came back, of each layer's rows and pages; none where a layer has neither.
    pub(crate) fn from_layers(layers: Vec<StoredLayer>) -> Option<Self> {
        let form = |layer: StoredLayer| match layer {
            StoredLayer { rows: sink, pages: Some(pages) } => {
                Some(PinnedBlock::Packed(Arc::new(PackedBlock { sink, pages })))
            }
            StoredLayer { rows: Some(rows), pages: None } => Some(PinnedBlock::Raw(rows)),
            StoredLayer { rows: None, pages: None } => None,
        };
        Some(Self::new(layers.into_iter().map(form).collect::<Option<_>>()?))
    }

    /// Where each layer's rows and pages lie.
    pub(crate) fn list_layers(&self) -> Vec<StoredLayer> {
        let layer = |form: &PinnedBlock| match form {
            PinnedBlock::Raw(rows) => StoredLayer { rows: Some(rows.clone()), pages: None },
            PinnedBlock::Packed(packed) => {
                StoredLayer { rows: packed.sink.clone(), pages: Some(packed.pages.clone()) }
            }
        };
        self.layers.iter().map(layer).collect()
    }

    /// The view that a sequence gets of one layer.
    pub(crate) fn layer_view(&self, layer: usize) -> BlockView {
        match &self.layers[layer] {
            PinnedBlock::Raw(raw) => BlockView::new_raw(raw.clone()),
            PinnedBlock::Packed(packed) => BlockView::Packed(Arc::clone(packed)),
        }
    }

    /// Its form on each layer.
    #[cfg(test)]
    pub(crate) fn layer_forms(&self) -> &[PinnedBlock] {
        &self.layers
    }

    /// Gives the slots that nobody else holds to `freed`.
    pub(crate) fn free_into(self: Arc<Self>, freed: &mut FreedSlots) {
        if let Some(block) = Arc::into_inner(self) {
            block.layers.into_iter().for_each(|layer| layer.free_into(freed));
        }
    }
}

/// The identity of an entry, and the pins of users that cover it.
#[derive(Debug, Default)]
pub(crate) struct EntryHold {
    pub(crate) user_pins: AtomicU32,
    /// Bytes that the first of these pins counted.
    pub(crate) pinned_bytes: AtomicU64,
}

/// A hold on an entry of the index: while it lives, the entry and all before it stay.
#[derive(Clone, Debug)]
pub(crate) struct HeldEntry {
    pub(crate) entry: u32,
    pub(crate) hold: Arc<EntryHold>,
}
