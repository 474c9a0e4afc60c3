//! Opening and forking sequences, and counting them against the limits.

use super::{SequenceStore, common_length};
use crate::error::StoreError;
use crate::layer::SequenceLayer;
use crate::quota::QuotaKind;
use crate::sequence::{NewSequence, PublishedChain, SequenceEntry, SequenceMemory};
use crate::session_sequences::SessionSequences;
use crate::shape::ModelShape;
use crate::view_list::ViewList;
use kvd_core::{Namespace, SequenceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A sequence that was forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkedSequence {
    /// The new sequence.
    pub id: SequenceId,
    /// Tokens that it shares with its parent.
    pub length: u32,
}

impl SequenceStore {
    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`StoreError::LimitExceeded`], or [`StoreError::Geometry`] when the shape is out of range.
    pub fn open_sequence(&self, model: Arc<ModelShape>) -> Result<SequenceId, StoreError> {
        self.open_owned(model, None)
    }

    pub(super) fn open_owned(
        &self,
        model: Arc<ModelShape>,
        session: Option<Arc<SessionSequences>>,
    ) -> Result<SequenceId, StoreError> {
        model.geometry.validate_fields()?;
        let id = self.admit_sequence(&model)?;
        let layers =
            (0..model.geometry.layers).map(|_| SequenceLayer::new(&self.view_count)).collect();
        let ledger = Arc::clone(&self.ledgers.entry(model.id).or_default());
        let published = PublishedChain::default();
        let (arrival, parent) = (None, None);
        let new = NewSequence { id, model, ledger, layers, published, arrival, parent };
        self.insert_sequence(new, session)
    }

    /// Opens a sequence that shares the first `length` tokens of `id`, or all that it has on
    /// every layer. A partly filled last block is shared too: whoever appends first copies it. The
    /// parent's session, if it has one, owns the child too.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::RangeNotStored`] when a layer is shorter
    /// than `length`, [`StoreError::LimitExceeded`], [`StoreError::SessionEnded`].
    pub fn fork_sequence(
        &self,
        ns: &Namespace,
        id: SequenceId,
        length: Option<u32>,
    ) -> Result<ForkedSequence, StoreError> {
        self.fork_owned(ns, id, length, None)
    }

    pub(super) fn fork_owned(
        &self,
        ns: &Namespace,
        id: SequenceId,
        length: Option<u32>,
        session: Option<Arc<SessionSequences>>,
    ) -> Result<ForkedSequence, StoreError> {
        let parent = self.find_entry(ns, id)?;
        parent.check_arrived()?;
        // Appends go on: what they add lies behind what is shared.
        let no_cut = parent.cuts.read();
        let stored = common_length(parent.layer_mutexes().map(|layer| layer.lock().length));
        let length = length.unwrap_or(stored);
        if length > stored {
            return Err(StoreError::RangeNotStored { asked: length, stored });
        }
        let views = ViewList::fork_count(parent.model.count_blocks(length));
        self.check_views(views * u64::from(parent.model.geometry.layers))?;
        let forked = self.admit_sequence(&parent.model)?;
        let layers =
            parent.layer_mutexes().map(|layer| layer.lock().fork_first(&parent.model, length));
        let layers = layers.collect();
        let published = parent.fork_published((length / parent.model.block_tokens()) as usize);
        drop(no_cut);
        let (model, ledger) = (Arc::clone(&parent.model), Arc::clone(&parent.ledger));
        let session = session.or_else(|| parent.session.clone());
        let (arrival, parent) = (None, Some(parent.id));
        let new = NewSequence { id: forked, model, ledger, layers, published, arrival, parent };
        let id = self.insert_sequence(new, session)?;
        Ok(ForkedSequence { id, length })
    }

    /// Counts one more sequence and its layers and gives it an id, or refuses.
    pub(super) fn admit_sequence(&self, model: &ModelShape) -> Result<SequenceId, StoreError> {
        let account = self.quotas.table.open_account(&model.namespace);
        if !account.try_take(QuotaKind::Sequences, 1) {
            return Err(account.refuse_amount(QuotaKind::Sequences, 1).into());
        }
        self.count_sequence(model).inspect_err(|_| account.give_back(QuotaKind::Sequences, 1))?;
        Ok(self.ids.next().inspect_err(|_| self.uncount_sequence(model))?)
    }

    /// Counts against the limits of all namespaces.
    fn count_sequence(&self, model: &ModelShape) -> Result<(), StoreError> {
        let limits = &self.limits;
        count_within("sequences_max", &self.open, 1, limits.sequences_max)?;
        let layers = u64::from(model.geometry.layers);
        let max = limits.sequence_layers_max;
        count_within("sequence_layers_max", &self.open_layers, layers, max).inspect_err(|_| {
            self.open.fetch_sub(1, Relaxed);
        })
    }

    /// Takes back what [`SequenceStore::admit_sequence`] counted.
    pub(super) fn uncount_sequence(&self, model: &ModelShape) {
        self.quotas.table.open_account(&model.namespace).give_back(QuotaKind::Sequences, 1);
        self.open.fetch_sub(1, Relaxed);
        self.open_layers.fetch_sub(u64::from(model.geometry.layers), Relaxed);
    }

    /// Puts a sequence on the map, and into its session.
    pub(super) fn insert_sequence(
        &self,
        new: NewSequence,
        session: Option<Arc<SessionSequences>>,
    ) -> Result<SequenceId, StoreError> {
        let id = new.id;
        new.ledger.sequence_opened();
        let memory =
            SequenceMemory { pool: Arc::clone(&self.pool), cache: Arc::clone(&self.cache) };
        let entry = SequenceEntry::new(new, memory).owned_by(session.clone());
        self.sequences.insert(id, Arc::new(entry));
        session.map_or(Ok(()), |session| self.join_session(id, &session))?;
        Ok(id)
    }
}

/// Adds `more` to a counter that stays within `max`.
fn count_within(
    limit: &'static str,
    counter: &AtomicU64,
    more: u64,
    max: u64,
) -> Result<(), StoreError> {
    let add = |now: u64| now.checked_add(more).filter(|sum| *sum <= max);
    match counter.fetch_update(Relaxed, Relaxed, add) {
        Ok(_) => Ok(()),
        Err(now) => Err(StoreError::LimitExceeded { limit, max, asked: now.saturating_add(more) }),
    }
}
