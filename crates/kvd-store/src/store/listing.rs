//! Sequences of sessions, lists of sequences, and closing those that nobody uses.

use super::{ForkedSequence, SequenceStore, common_length};
use crate::error::StoreError;
use crate::hint::SequenceHint;
use crate::sequence::{SequenceEntry, SequenceUsage};
use crate::session_sequences::SessionSequences;
use crate::shape::ModelShape;
use kvd_core::{ModelId, Namespace, SequenceId, SessionId, StoredBytes};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which sequences are looked for.
#[derive(Clone, Copy, Debug)]
pub struct SequenceQuery<'a> {
    /// Whose.
    pub namespace: &'a Namespace,
    /// Those of this model.
    pub model: Option<ModelId>,
    /// Those of this session.
    pub session: Option<SessionId>,
    /// Those that no call has named for so long.
    pub idle_min: Duration,
    /// Those whose id is above this one.
    pub after: Option<SequenceId>,
}

impl SequenceQuery<'_> {
    fn matches_entry(&self, entry: &SequenceEntry, now: Instant) -> bool {
        entry.model.namespace == *self.namespace
            && self.after.is_none_or(|after| entry.id > after)
            && self.model.is_none_or(|model| entry.model.id == model)
            && self.session.is_none_or(|session| entry.session_id() == Some(session))
            && entry.times.idle_at(now) >= self.idle_min
    }
}

/// One sequence of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceSummary {
    /// The sequence.
    pub id: SequenceId,
    /// Its model.
    pub model: ModelId,
    /// The session that owns it, if one does.
    pub session: Option<SessionId>,
    /// Tokens stored on every layer.
    pub length: u32,
    /// Since it was opened.
    pub age: Duration,
    /// Since a call named it.
    pub idle: Duration,
    /// Bytes of its blocks by kind.
    pub stored: StoredBytes,
    /// Its engine's last word on its future.
    pub hint: SequenceHint,
}

impl SequenceStore {
    /// [`SequenceStore::open_sequence`] in a session, which owns the sequence.
    ///
    /// # Errors
    /// As [`SequenceStore::open_sequence`], and [`StoreError::SessionEnded`].
    pub fn open_in_session(
        &self,
        model: Arc<ModelShape>,
        session: &Arc<SessionSequences>,
    ) -> Result<SequenceId, StoreError> {
        self.open_owned(model, Some(Arc::clone(session)))
    }

    /// [`SequenceStore::fork_sequence`] into a session, which owns the child.
    ///
    /// # Errors
    /// As [`SequenceStore::fork_sequence`], and [`StoreError::SessionEnded`].
    pub fn fork_into_session(
        &self,
        ns: &Namespace,
        id: SequenceId,
        length: Option<u32>,
        session: &Arc<SessionSequences>,
    ) -> Result<ForkedSequence, StoreError> {
        self.fork_owned(ns, id, length, Some(Arc::clone(session)))
    }

    /// Says what a sequence holds. Takes time in proportion to its layers.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn describe_sequence(
        &self,
        ns: &Namespace,
        id: SequenceId,
    ) -> Result<SequenceUsage, StoreError> {
        Ok(measure_usage(&*self.find_entry(ns, id)?))
    }

    /// [`SequenceStore::close_sequence`] of a sequence that no call has named for `idle_min` and
    /// that nobody appends to. A call that names it comes before, and it stays open, or after, and
    /// does not find it.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::NotIdle`], [`StoreError::SequenceBusy`].
    pub fn close_idle(
        &self,
        ns: &Namespace,
        id: SequenceId,
        idle_min: Duration,
    ) -> Result<(), StoreError> {
        let mut refusal = StoreError::UnknownSequence { id };
        let removed = self.sequences.remove_if(&id, |_, entry| {
            if entry.model.namespace != *ns {
                return false;
            }
            let idle = entry.times.idle_at(Instant::now());
            match entry.busy_layer() {
                _ if idle < idle_min => refusal = StoreError::NotIdle { id, idle, idle_min },
                Some(layer) => refusal = StoreError::SequenceBusy { id, layer },
                None => return true,
            }
            false
        });
        let (_, entry) = removed.ok_or(refusal)?;
        self.finish_close(entry);
        Ok(())
    }

    /// Replaces what its engine says of a sequence.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn hint_sequence(
        &self,
        ns: &Namespace,
        id: SequenceId,
        hint: SequenceHint,
    ) -> Result<(), StoreError> {
        *self.find_entry(ns, id)?.hint.lock() = hint;
        Ok(())
    }

    /// Ids of the sequences that a query matches, in no order. This names none of them.
    #[must_use]
    pub fn find_sequences(&self, query: &SequenceQuery<'_>) -> Vec<SequenceId> {
        let now = Instant::now();
        let entries = self.sequences.iter();
        entries.filter(|entry| query.matches_entry(entry, now)).map(|entry| entry.id).collect()
    }

    /// An entry of a list; `None` for a sequence that is closed or of others. This does not name
    /// it. Takes time in proportion to its layers.
    #[must_use]
    pub fn summarize_sequence(&self, ns: &Namespace, id: SequenceId) -> Option<SequenceSummary> {
        let entry = self.sequences.get(&id).map(|entry| Arc::clone(&entry))?;
        let entry = Some(entry).filter(|entry| entry.model.namespace == *ns)?;
        let SequenceUsage { model, length, stored, .. } = measure_usage(&entry);
        let (now, session) = (Instant::now(), entry.session_id());
        let (age, idle) = (entry.times.age_at(now), entry.times.idle_at(now));
        let hint = *entry.hint.lock();
        Some(SequenceSummary { id, model, session, length, age, idle, stored, hint })
    }

    /// Makes a sequence that was put on the map one of its session. When that has ended meanwhile
    /// it is as if the sequence had never been opened.
    pub(super) fn join_session(
        &self,
        id: SequenceId,
        session: &SessionSequences,
    ) -> Result<(), StoreError> {
        let joined = session.add_sequence(id);
        if joined.is_err()
            && let Some((_, entry)) = self.sequences.remove(&id)
        {
            self.finish_close(entry);
        } else if !self.sequences.contains_key(&id) {
            // Somebody found it in a list and closed it before it was in the session.
            session.remove_sequence(id);
        }
        joined
    }

    /// Uncounts a sequence that was taken off the map.
    pub(super) fn finish_close(&self, entry: Arc<SequenceEntry>) {
        self.uncount_sequence(&entry.model);
        entry.ledger.sequence_closed();
        if let Some(session) = &entry.session {
            session.remove_sequence(entry.id);
        }
        let model = entry.model.id;
        drop(entry);
        // A ledger that only this map has counts nothing. Who would count needs the shard's lock.
        self.ledgers.remove_if(&model, |_, ledger| Arc::strong_count(ledger) == 1);
    }
}

/// Contents of a sequence.
pub(super) fn measure_usage(entry: &SequenceEntry) -> SequenceUsage {
    let mut usage = SequenceUsage {
        model: entry.model.id,
        length: 0,
        layer_lengths: Vec::with_capacity(entry.model.geometry.layers as usize),
        packed_blocks: 0,
        raw_blocks: 0,
        stored: StoredBytes::default(),
    };
    let _no_cut = entry.cuts.read();
    entry.layer_mutexes().for_each(|layer| layer.lock().add_usage(&entry.model, &mut usage));
    usage.length = common_length(usage.layer_lengths.iter().copied());
    usage
}
