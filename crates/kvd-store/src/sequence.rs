//! A sequence: its model, its layers each behind a mutex, and who is appending.
//!
//! Owns [`SequenceEntry`]. Lock story: each layer has a mutex; who needs several takes them in
//! ascending order. `cuts` comes before them: a truncation holds it alone, so that a fork or a
//! description, which holds it with others and takes one layer after another, sees every layer
//! before the cut or every layer after it. `busy` is set under the layer's mutex and cleared
//! without it, by the drop of a [`LayerClaim`], so that a ticket can be dropped anywhere. Every
//! holder keeps the entry alive by `Arc`: closing only takes it off the map, and the last holder's
//! drop gives the bytes back.

use crate::arrival::LayerArrival;
use crate::cache::{CachedBlock, ChainOrigin, HeldEntry, PrefixIndex};
use crate::error::StoreError;
use crate::hint::{SequenceHint, SequencePhase};
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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    pub(crate) hint: Mutex<SequenceHint>,
    layers: Box<[LayerEntry]>,
    memory: SequenceMemory,
    /// Truncations so far: changed with `cuts` held alone.
    cut_count: AtomicU64,
    /// Taken after the layers' mutexes and before the cache's lock.
    published: Mutex<PublishedChain>,
    /// Set where it began before its prefix had come.
    arrival: Option<Arc<LayerArrival>>,
}

/// Where a sequence takes its bytes from.
#[derive(Clone, Debug)]
pub(crate) struct SequenceMemory {
    pub(crate) pool: Arc<ArenaPool>,
    pub(crate) cache: Arc<PrefixIndex>,
}

/// A sequence that is to be put on the map.
#[derive(Debug)]
pub(crate) struct NewSequence {
    pub(crate) id: SequenceId,
    pub(crate) model: Arc<ModelShape>,
    pub(crate) ledger: Arc<ModelLedger>,
    pub(crate) layers: Vec<SequenceLayer>,
    pub(crate) published: PublishedChain,
    pub(crate) arrival: Option<Arc<LayerArrival>>,
    /// The sequence that it was forked from.
    pub(crate) parent: Option<SequenceId>,
}

/// The first blocks of a sequence, as far as they are cached under keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct PublishedChain {
    pub(crate) blocks: usize,
    /// The last of them: held, so that none of them is evicted while the sequence reads it anyway.
    pub(crate) tail: Option<HeldEntry>,
    pub(crate) origin: ChainOrigin,
}

impl SequenceEntry {
    pub(crate) fn new(new: NewSequence, memory: SequenceMemory) -> Self {
        let entry = |layer| LayerEntry { layer: Mutex::new(layer), busy: AtomicBool::new(false) };
        let NewSequence { id, model, ledger, layers, published, arrival, parent } = new;
        Self {
            id,
            model,
            ledger,
            cuts: RwLock::new(()),
            session: None,
            times: UseTimes::begin_now(),
            hint: Mutex::new(SequenceHint { phase: SequencePhase::Unknown, parent }),
            layers: layers.into_iter().map(entry).collect(),
            memory,
            cut_count: AtomicU64::new(0),
            published: Mutex::new(published),
            arrival,
        }
    }

    /// The arrival that it waits for, or waited.
    pub(crate) fn prefix_arrival(&self) -> Option<&Arc<LayerArrival>> {
        self.arrival.as_ref()
    }

    /// Whether a layer of its prefix may be read.
    pub(crate) fn check_layer(&self, layer: LayerIndex) -> Result<(), StoreError> {
        self.arrival.as_ref().map_or(Ok(()), |arrival| arrival.check_layers(self.id, layer.0 + 1))
    }

    /// Whether all of them may.
    pub(crate) fn check_arrived(&self) -> Result<(), StoreError> {
        let check = |of: &Arc<LayerArrival>| of.check_layers(self.id, of.count_layers());
        self.arrival.as_ref().map_or(Ok(()), check)
    }

    /// The pool and the cache.
    pub(crate) fn shared_memory(&self) -> &SequenceMemory {
        &self.memory
    }

    /// Truncations so far. Call with `cuts` held.
    pub(crate) fn count_cuts(&self) -> u64 {
        self.cut_count.load(Ordering::Relaxed)
    }

    /// The part of it that is cached under keys.
    pub(crate) fn published_chain(&self) -> PublishedChain {
        self.published.lock().clone()
    }

    /// The part of that which a fork of the first `blocks` has.
    pub(crate) fn fork_published(&self, blocks: usize) -> PublishedChain {
        let chain = PublishedChain { origin: ChainOrigin::Stored, ..self.published_chain() };
        if chain.blocks <= blocks {
            return chain;
        }
        self.shorten_chain(&chain, blocks)
    }

    /// Forgets published blocks from `blocks` on. Call with `cuts` held alone.
    pub(crate) fn cut_published(&self, blocks: usize) {
        self.cut_count.fetch_add(1, Ordering::Relaxed);
        let chain = self.published_chain();
        if chain.blocks > blocks {
            let shorter = self.shorten_chain(&chain, blocks);
            *self.published.lock() = shorter;
            self.release_chain(chain);
        }
    }

    fn shorten_chain(&self, chain: &PublishedChain, blocks: usize) -> PublishedChain {
        let steps = chain.blocks - blocks;
        let ancestor = |tail| self.memory.cache.find_ancestor(tail, steps);
        let tail = chain.tail.as_ref().filter(|_| blocks > 0).and_then(ancestor);
        let blocks = if tail.is_some() { blocks } else { 0 };
        PublishedChain { blocks, tail, origin: chain.origin }
    }

    fn release_chain(&self, chain: PublishedChain) {
        let PublishedChain { tail, origin, .. } = chain;
        tail.into_iter().for_each(|tail| self.memory.cache.release_sequence(tail, origin));
    }

    /// Takes over what a publish has made findable, unless the sequence was cut since `cut_count`.
    pub(crate) fn extend_published(&self, cut_count: u64, mut new: PublishedChain) {
        let cache = &self.memory.cache;
        let _no_cut = self.cuts.read();
        if self.count_cuts() != cut_count {
            return self.release_chain(new);
        }
        let mut published = self.published.lock();
        if published.origin == ChainOrigin::Found {
            new.origin = ChainOrigin::Found;
        }
        let is_same = |early: &PublishedChain, late: &PublishedChain| {
            early.blocks <= late.blocks
                && early.tail.as_ref().is_none_or(|early_tail| {
                    let steps = late.blocks - early.blocks;
                    let at = late.tail.as_ref().and_then(|tail| cache.find_ancestor(tail, steps));
                    at.is_some_and(|at| Arc::ptr_eq(&at.hold, &early_tail.hold))
                })
        };
        if is_same(&published, &new) {
            *published = new;
        } else if !is_same(&new, &published) {
            let old = std::mem::replace(&mut *published, new);
            drop(published);
            self.release_chain(old);
        }
    }

    /// Reads blocks from `first` on as they are cached, unless the sequence was cut since
    /// `cut_count`.
    pub(crate) fn share_blocks(&self, cut_count: u64, first: usize, blocks: &[Arc<CachedBlock>]) {
        let mut gone = DiscardedViews::default();
        {
            let _no_cut = self.cuts.read();
            if self.count_cuts() != cut_count {
                return;
            }
            for (index, layer) in self.layer_mutexes().enumerate() {
                layer.lock().share_blocks(first, blocks, index, &mut gone);
            }
        }
        self.discard_views(gone);
    }

    /// Takes what is published out: the sequence is no more.
    pub(crate) fn take_published(&self) -> PublishedChain {
        std::mem::take(&mut *self.published.lock())
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
        self.memory.pool.discard_views(views);
    }
}

impl Drop for SequenceEntry {
    fn drop(&mut self) {
        let published = self.take_published();
        self.release_chain(published);
        let mut all = DiscardedViews::default();
        for entry in &mut self.layers {
            all.append_all(entry.layer.get_mut().views.take_all());
        }
        self.memory.pool.discard_views(all);
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
