//! A cached block: the packed form of one page of tokens on every layer, and who holds it.
//!
//! Owns [`CachedBlock`]. No locks: it never changes. A clone of its `Arc` is a hold: while the
//! index is not the only owner the entry stays, and with it all entries before it.

use crate::layer_block::{BlockView, PinnedBlock};
use crate::pool::FreedSlots;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// K and V of one page of tokens, all layers.
#[derive(Debug)]
pub(crate) struct CachedBlock {
    layers: Box<[PinnedBlock]>,
    /// Bytes of the pool that it keeps.
    pub(crate) bytes: u64,
    /// Pins of users that cover it.
    pub(crate) user_pins: AtomicU32,
}

impl CachedBlock {
    /// A block of its form on each layer.
    pub(crate) fn new(layers: Vec<PinnedBlock>) -> Self {
        let bytes = layers.iter().map(PinnedBlock::reserved_bytes).sum();
        Self { layers: layers.into(), bytes, user_pins: AtomicU32::new(0) }
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

/// A hold on an entry of the index: while it lives, the entry and all before it stay.
#[derive(Clone, Debug)]
pub(crate) struct HeldEntry {
    pub(crate) entry: u32,
    pub(crate) block: Arc<CachedBlock>,
}
