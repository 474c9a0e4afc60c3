//! A sequence: its model, its layers behind one mutex, and who is appending.
//!
//! Owns [`SequenceEntry`]. Lock story: `layers` is the sequence's mutex. `busy` is set under it
//! and cleared without it, by the drop of a [`Claim`], so that a ticket can be dropped
//! anywhere. Every holder keeps the entry alive by `Arc`: closing only takes it off the map, and
//! the last holder's drop gives the bytes back.

use crate::cell::Part;
use crate::layer::Layer;
use crate::ledger::{Ledger, StoredBytes};
use crate::shape::ModelShape;
use kvd_core::{LayerIndex, ModelId, SequenceId};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a sequence holds. Shared cells are counted in full for each sequence that sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceUsage {
    /// Its model.
    pub model: ModelId,
    /// Tokens stored on every layer.
    pub length: u32,
    /// Tokens stored on each layer.
    pub layer_lengths: Vec<u32>,
    /// Blocks, over all layers, of which every row is read from pages.
    pub packed_blocks: u64,
    /// The other blocks: wholly or partly read in the stored precision.
    pub raw_blocks: u64,
    /// What the cells hold; a block kept raw for this sequence and packed for another is counted
    /// in both forms.
    pub stored: StoredBytes,
}

/// A range of one layer, readable and kept alive until this is dropped.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// The sequence's model.
    pub model: Arc<ModelShape>,
    /// Tokens the read sees: as asked, or all that the layer had.
    pub length: u32,
    /// Tokens that the parts cover.
    pub range: Range<u32>,
    /// Where they lie: in order, disjoint, without gaps.
    pub parts: Vec<PinnedPart>,
}

/// One part of a [`Pinned`] range.
#[derive(Clone, Debug)]
pub struct PinnedPart {
    /// Token of the sequence at `part.rows.start`.
    pub first_token: u32,
    /// Its rows and their place.
    pub part: Part,
}

/// A sequence as the store and its tickets hold it.
#[derive(Debug)]
pub(crate) struct SequenceEntry {
    pub(crate) id: SequenceId,
    pub(crate) model: Arc<ModelShape>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) layers: Mutex<Vec<Layer>>,
    busy: Box<[AtomicBool]>,
}

impl SequenceEntry {
    pub(crate) fn new(
        id: SequenceId,
        model: Arc<ModelShape>,
        ledger: Arc<Ledger>,
        layers: Vec<Layer>,
    ) -> Self {
        let busy = layers.iter().map(|_| AtomicBool::new(false)).collect();
        Self { id, model, ledger, layers: Mutex::new(layers), busy }
    }

    /// The right to append to `layer`; `None` while another has it. Call under the mutex.
    pub(crate) fn claim(self: &Arc<Self>, layer: usize) -> Option<Claim> {
        let was_busy = self.busy[layer].swap(true, Ordering::Acquire);
        (!was_busy).then(|| Claim { entry: Arc::clone(self), layer })
    }

    /// Whether somebody appends to `layer`.
    pub(crate) fn is_busy(&self, layer: usize) -> bool {
        self.busy[layer].load(Ordering::Acquire)
    }

    /// The first layer that somebody appends to.
    pub(crate) fn busy_layer(&self) -> Option<LayerIndex> {
        (0..self.busy.len()).find(|&l| self.is_busy(l)).map(|l| LayerIndex(l as u32))
    }
}

/// Tokens that every one of `layers` has.
pub(crate) fn common_length(layers: &[Layer]) -> u32 {
    layers.iter().map(|l| l.length).min().unwrap_or(0)
}

/// The exclusive right to append to one layer; dropping it is giving it back.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) entry: Arc<SequenceEntry>,
    pub(crate) layer: usize,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.entry.busy[self.layer].store(false, Ordering::Release);
    }
}
