//! Sequences on a prefix that is still on its way to the pool: opened when its slots are reserved
//! and its first layers have come, complete when all have.
//!
//! Until then the blocks are the sequence's alone: the index has them on disk, and gets them whole.

use super::SequenceStore;
use super::prefixes::AttachedSequence;
use crate::arrival::{ArrivalGuard, LayerArrival};
use crate::cache::{AttachedPrefix, CachedBlock, ChainOrigin, ReadPlan, StoredLayer};
use crate::error::StoreError;
use crate::layer::SequenceLayer;
use crate::sequence::{NewSequence, PublishedChain};
use crate::session_sequences::SessionSequences;
use crate::shape::ModelShape;
use kvd_core::{Namespace, SequenceId};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A prefix whose blocks have slots, and whose first layers lie in them.
#[derive(Debug)]
pub struct FilledPrefix {
    /// The blocks, held.
    pub plan: ReadPlan,
    /// The blocks of the prefix that were in the pool before, held.
    pub before: PoolPart,
    /// Layers of each of `plan.missing`, in order.
    pub blocks: Vec<Vec<StoredLayer>>,
    /// Layers, from the first, that lie in the slots of every block.
    pub ready: u32,
}

/// Blocks of a prefix that are in the pool, and stay there.
#[derive(Debug, Default)]
pub struct PoolPart(pub(crate) Option<AttachedPrefix>);

/// The blocks that a sequence waits for. Dropped before [`SequenceStore::finish_arrival`] the
/// layers that have not come are lost.
#[derive(Debug)]
#[must_use = "a sequence waits for the rest"]
pub struct ArrivingPrefix {
    /// The sequence and the tokens that it begins with.
    pub opened: AttachedSequence,
    model: Arc<ModelShape>,
    plan: ReadPlan,
    blocks: Vec<Arc<CachedBlock>>,
    arrival: ArrivalGuard,
}

impl ArrivingPrefix {
    /// Whether the sequence or a read of it is still there.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.arrival.is_wanted()
    }

    /// The first so many layers lie in the slots of every block, verified.
    pub fn note_ready(&self, layers: u32) {
        // The last is told of when the index knows the blocks.
        self.arrival.note_ready(layers.min(self.model.geometry.layers - 1));
    }

    /// The layers that have not come will not.
    pub fn note_lost(self, reason: &'static str) {
        self.arrival.note_lost(reason);
    }
}

impl SequenceStore {
    /// Opens a sequence on a prefix whose slots are reserved. It has the prefix's length on every
    /// layer; reads of a layer that has not come are refused.
    ///
    /// # Errors
    /// As [`SequenceStore::open_in_session`].
    pub fn open_arriving(
        &self,
        model: Arc<ModelShape>,
        filled: FilledPrefix,
        session: Option<&Arc<SessionSequences>>,
    ) -> Result<ArrivingPrefix, StoreError> {
        let FilledPrefix { plan, before, blocks, ready } = filled;
        let layers = model.geometry.layers;
        let adopt = |layers| self.adopt_layers(&model, layers).map(Arc::new);
        let arriving: Vec<_> = blocks.into_iter().map_while(adopt).collect();
        let (before, held) = before.0.map(|of| (of.blocks, of.held)).unzip();
        let mut blocks = before.unwrap_or_default();
        let in_pool = blocks.len();
        blocks.extend(arriving.iter().cloned());
        self.check_views(blocks.len() as u64 * u64::from(layers))?;
        let id = self.admit_sequence(&model)?;
        let layer =
            |layer| SequenceLayer::from_blocks(&self.view_count, &model, &blocks, layer as usize);
        let sequence_layers = (0..layers).map(layer).collect();
        let length = blocks.len() as u32 * model.block_tokens();
        let ledger = Arc::clone(&self.ledgers.entry(model.id).or_default());
        // What arrives counts as published once the index has it.
        let origin = ChainOrigin::Found;
        let published = PublishedChain { blocks: in_pool, tail: held, origin };
        let arrival = Arc::new(LayerArrival::new(layers, ready, &self.arrivals));
        let guard = ArrivalGuard(Arc::clone(&arrival));
        let new = NewSequence {
            id,
            model: Arc::clone(&model),
            ledger,
            layers: sequence_layers,
            published,
            arrival: Some(arrival),
            parent: None,
        };
        let id = self.insert_sequence(new, session.map(Arc::clone))?;
        let opened = AttachedSequence { id, length };
        Ok(ArrivingPrefix { opened, model, plan, blocks: arriving, arrival: guard })
    }

    /// Makes blocks findable in the pool whose every layer has come, as far as the cache has room
    /// for them; how many are. The sequence has them all.
    pub fn finish_arrival(&self, arriving: ArrivingPrefix) -> usize {
        let ArrivingPrefix { opened, model, plan, blocks, arrival } = arriving;
        let bring = |(read, block)| self.cache.bring_read(&model.namespace, read, block);
        let came = plan.missing.iter().zip(blocks).map(bring).take_while(|came| *came).count();
        let entry = self.sequences.get(&opened.id).map(|entry| Arc::clone(&entry));
        let last = came.checked_sub(1).and_then(|last| plan.missing.get(last));
        if let Some((entry, last)) = entry.zip(last) {
            let blocks = plan.blocks - plan.missing.len() + came;
            let (tail, origin) = (Some(last.held_entry().clone()), ChainOrigin::Found);
            // It was not cut: that waits for the last layer.
            entry.extend_published(0, PublishedChain { blocks, tail, origin });
        }
        arrival.note_ready(model.geometry.layers);
        self.cache.settle_reads(plan);
        came
    }

    /// The arrival that a sequence waits for; none where all its layers may be read.
    #[must_use]
    pub fn find_arrival(&self, ns: &Namespace, id: SequenceId) -> Option<Arc<LayerArrival>> {
        if self.arrivals.load(Relaxed) == 0 {
            return None;
        }
        self.find_entry(ns, id).ok()?.prefix_arrival().cloned()
    }
}
