//! A sequence: its model, its layers each behind a mutex, and who is appending.
//!
//! Owns [`SequenceEntry`]. Lock story: each layer has a mutex; who needs several takes them in
//! ascending order. `cuts` comes before them: a truncation holds it alone, so that a fork or a
//! description, which holds it with others and takes one layer after another, sees every layer
//! before the cut or every layer after it. `busy` is set under the layer's mutex and cleared
//! without it, by the drop of a [`LayerClaim`], so that a ticket can be dropped anywhere. Every
//! holder keeps the entry alive by `Arc`: closing only takes it off the map, and the last holder's
//! drop gives the bytes back.

use crate::layer::SequenceLayer;
use crate::ledger::ModelLedger;
use crate::pool::ArenaPool;
use crate::session_sequences::SessionSequences;
use crate::shape::ModelShape;
use crate::use_times::UseTimes;
use crate::view_list::DiscardedViews;
use kvd_core::{LayerIndex, ModelId, SequenceId, SessionId, StoredBytes};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Contents of a sequence. Shared blocks are counted in full for each sequence that sees them, in
/// the form in which it reads them.
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
    /// Bytes of the blocks by kind.
    pub stored: StoredBytes,
}

/// A layer, and whether somebody appends to it.
#[derive(Debug)]
struct LayerEntry {
    layer: Mutex<SequenceLayer>,
    busy: AtomicBool,
}

/// A sequence as the store and its tickets hold it.
#[derive(Debug)]
pub(crate) struct SequenceEntry {
    pub(crate) id: SequenceId,
    pub(crate) model: Arc<ModelShape>,
    pub(crate) ledger: Arc<ModelLedger>,
    pub(crate) cuts: RwLock<()>,
    pub(crate) session: Option<Arc<SessionSequences>>,
    pub(crate) times: UseTimes,
    layers: Box<[LayerEntry]>,
    pool: Arc<ArenaPool>,
}

impl SequenceEntry {
    pub(crate) fn new(
        id: SequenceId,
        model: Arc<ModelShape>,
        ledger: Arc<ModelLedger>,
        pool: Arc<ArenaPool>,
        layers: Vec<SequenceLayer>,
    ) -> Self {
        let entry = |layer| LayerEntry { layer: Mutex::new(layer), busy: AtomicBool::new(false) };
        let layers = layers.into_iter().map(entry).collect();
        let (session, times) = (None, UseTimes::begin_now());
        Self { id, model, ledger, cuts: RwLock::new(()), session, times, layers, pool }
    }

    /// This sequence as one of a session.
    pub(crate) fn owned_by(mut self, session: Option<Arc<SessionSequences>>) -> Self {
        self.session = session;
        self
    }

    /// The session that owns it.
    pub(crate) fn session_id(&self) -> Option<SessionId> {
        self.session.as_ref().map(|session| session.session_id())
    }

    /// A layer's mutex.
    pub(crate) fn layer_mutex(&self, layer: usize) -> &Mutex<SequenceLayer> {
        &self.layers[layer].layer
    }

    /// The mutexes of all layers, in the order in which they are taken.
    pub(crate) fn layer_mutexes(&self) -> impl Iterator<Item = &Mutex<SequenceLayer>> {
        self.layers.iter().map(|entry| &entry.layer)
    }

    /// The right to append to `layer`; `None` while another has it. Call under the layer's mutex.
    pub(crate) fn claim_layer(self: &Arc<Self>, layer: usize) -> Option<LayerClaim> {
        let was_busy = self.layers[layer].busy.swap(true, Ordering::Acquire);
        (!was_busy).then(|| LayerClaim { entry: Arc::clone(self), layer })
    }

    /// Whether somebody appends to `layer`.
    pub(crate) fn is_busy(&self, layer: usize) -> bool {
        self.layers[layer].busy.load(Ordering::Acquire)
    }

    /// The first layer that somebody appends to.
    pub(crate) fn busy_layer(&self) -> Option<LayerIndex> {
        (0..self.layers.len()).find(|&l| self.is_busy(l)).map(|l| LayerIndex(l as u32))
    }

    /// Frees views that were this sequence's. Takes the pool's lock: call without a layer's.
    pub(crate) fn discard_views(&self, views: DiscardedViews) {
        self.pool.discard_views(views);
    }
}

impl Drop for SequenceEntry {
    fn drop(&mut self) {
        let mut all = DiscardedViews::default();
        for entry in &mut self.layers {
            all.append_all(entry.layer.get_mut().views.take_all());
        }
        self.pool.discard_views(all);
    }
}

/// The exclusive right to append to one layer; dropping it is giving it back.
#[derive(Debug)]
pub(crate) struct LayerClaim {
    pub(crate) entry: Arc<SequenceEntry>,
    pub(crate) layer: usize,
}

impl Drop for LayerClaim {
    fn drop(&mut self) {
        self.entry.layers[self.layer].busy.store(false, Ordering::Release);
    }
}
