//! The store: sequences by id, and totals by model.
//!
//! Owns the sequence map and the ledgers. A look-up clones the entry's `Arc` and lets the shard
//! go before the sequence's mutex is taken; no shard lock is held while anything else is locked
//! or while an entry drops.

use crate::append::{Append, AppendClaim, AppendTicket};
use crate::error::StoreError;
use crate::layer::{Fit, Layer, Remembered};
use crate::ledger::{Ledger, ModelUsage, StoredBytes};
use crate::pool::Pool;
use crate::sequence::{Pinned, SequenceEntry, SequenceUsage, common_length};
use crate::shape::{Limits, ModelShape};
use dashmap::DashMap;
use kvd_core::{IdCounter, LayerIndex, ModelId, Namespace, SequenceId};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Sequences over one pool.
#[derive(Debug)]
pub struct Store {
    pool: Arc<Pool>,
    limits: Limits,
    pub(crate) ids: IdCounter<SequenceId>,
    open: AtomicU64,
    open_layers: AtomicU64,
    sequences: DashMap<SequenceId, Arc<SequenceEntry>>,
    ledgers: DashMap<ModelId, Arc<Ledger>>,
}

impl Store {
    /// A store without sequences, which have the ids that `ids` gives.
    #[must_use]
    pub fn new(pool: Arc<Pool>, limits: Limits, ids: IdCounter<SequenceId>) -> Self {
        Self {
            pool,
            limits,
            ids,
            open: AtomicU64::new(0),
            open_layers: AtomicU64::new(0),
            sequences: DashMap::new(),
            ledgers: DashMap::new(),
        }
    }

    /// The pool that every slot comes from.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`StoreError::LimitExceeded`], or [`StoreError::Geometry`] when the shape is out of range.
    pub fn open(&self, model: Arc<ModelShape>) -> Result<SequenceId, StoreError> {
        model.geometry.validate_fields()?;
        let id = self.admit(&model)?;
        let layers = (0..model.geometry.layers).map(|_| Layer::default()).collect();
        let ledger = Arc::clone(&self.ledgers.entry(model.id).or_default());
        Ok(self.insert(id, model, ledger, layers))
    }

    /// Opens a sequence that shares the first `length` tokens of `id`, or all that it has on
    /// every layer; returns its id and length. A partly filled last block is shared too: whoever
    /// appends first copies it.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::RangeNotStored`] when a layer is shorter
    /// than `length`, [`StoreError::LimitExceeded`].
    pub fn fork(
        &self,
        ns: &Namespace,
        id: SequenceId,
        length: Option<u32>,
    ) -> Result<(SequenceId, u32), StoreError> {
        let parent = self.entry(ns, id)?;
        let (forked, length, layers) = {
            let layers = parent.layers.lock();
            let stored = common_length(&layers);
            let length = length.unwrap_or(stored);
            if length > stored {
                return Err(StoreError::RangeNotStored { asked: length, stored });
            }
            let forked = self.admit(&parent.model)?;
            let shared = layers.iter().map(|l| l.fork(&parent.model, length)).collect();
            (forked, length, shared)
        };
        let model = Arc::clone(&parent.model);
        Ok((self.insert(forked, model, Arc::clone(&parent.ledger), layers), length))
    }

    /// Forgets the tokens from `length` on, on every layer. Precision does not come back: rows
    /// that were packed stay so (see the sequence's next append for what happens to a block that
    /// is cut in the middle).
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::RangeNotStored`] when a layer is shorter
    /// than `length`, [`StoreError::SequenceBusy`] while an append is in flight.
    pub fn truncate(&self, ns: &Namespace, id: SequenceId, length: u32) -> Result<(), StoreError> {
        let entry = self.entry(ns, id)?;
        let gone: Vec<_> = {
            let mut layers = entry.layers.lock();
            if let Some(layer) = entry.busy_layer() {
                return Err(StoreError::SequenceBusy { id, layer });
            }
            let stored = common_length(&layers);
            if length > stored {
                return Err(StoreError::RangeNotStored { asked: length, stored });
            }
            layers.iter_mut().map(|l| l.truncate(&entry.model, length)).collect()
        };
        drop(gone);
        Ok(())
    }

    /// Closes a sequence. Pins and appends in flight stay valid: the bytes go with the last of
    /// them, and such an append is seen by nobody.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn close(&self, ns: &Namespace, id: SequenceId) -> Result<(), StoreError> {
        let removed = self.sequences.remove_if(&id, |_, entry| entry.model.namespace == *ns);
        let Some((_, entry)) = removed else {
            return Err(StoreError::UnknownSequence { id });
        };
        self.uncount(&entry.model);
        entry.ledger.sequence_closed();
        let model = entry.model.id;
        drop(entry);
        // A ledger that only this map has counts nothing. Who would count needs the shard's lock.
        self.ledgers.remove_if(&model, |_, ledger| Arc::strong_count(ledger) == 1);
        Ok(())
    }

    /// What a sequence holds. Takes time in proportion to its blocks.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn describe(&self, ns: &Namespace, id: SequenceId) -> Result<SequenceUsage, StoreError> {
        let entry = self.entry(ns, id)?;
        let layers = entry.layers.lock();
        let mut usage = SequenceUsage {
            model: entry.model.id,
            length: common_length(&layers),
            layer_lengths: Vec::with_capacity(layers.len()),
            packed_blocks: 0,
            raw_blocks: 0,
            stored: StoredBytes::default(),
        };
        for layer in layers.iter() {
            layer.count(&entry.model, &mut usage);
        }
        Ok(usage)
    }

    /// The model of a sequence.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn model_of(&self, ns: &Namespace, id: SequenceId) -> Result<Arc<ModelShape>, StoreError> {
        Ok(Arc::clone(&self.entry(ns, id)?.model))
    }

    /// Asks to append `tokens` tokens at `start` of a layer. Layers do not wait for one another.
    ///
    /// A range that was acknowledged before, one of the layer's last 64, is
    /// [`Append::Replayed`] when `content_hash` is the same.
    ///
    /// # Errors
    /// Each range rule has its variant: [`StoreError::RangeGap`], [`StoreError::RangeOverlap`],
    /// [`StoreError::RangeConflict`]. [`StoreError::SequenceBusy`] and [`StoreError::PoolFull`]
    /// may be tried again.
    pub fn begin_append(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        start: u32,
        tokens: u32,
        content_hash: u64,
    ) -> Result<Append, StoreError> {
        let (entry, index) = self.entry_to_append(ns, id, layer, start, tokens)?;
        let mut layers = entry.layers.lock();
        let state = &mut layers[index];
        if let Some(known) = known_content(&entry, state, layer, start, tokens)? {
            if known != content_hash {
                return Err(StoreError::RangeConflict { start, tokens });
            }
            return Ok(Append::Replayed { length: state.length });
        }
        let claim = entry.claim(index).ok_or(StoreError::SequenceBusy { id, layer })?;
        let offered = Remembered { start, tokens, content_hash };
        Ok(Append::Ticket(AppendTicket::new(claim, state, &self.pool, offered)?))
    }

    /// Takes the right to append for a caller who does not know the content yet, and passes the
    /// claim to [`Store::begin_claimed`] when he does. `None` for a range that was acknowledged
    /// before: only its content says what [`Store::begin_append`] answers.
    ///
    /// # Errors
    /// Those of [`Store::begin_append`], but [`StoreError::RangeConflict`] and
    /// [`StoreError::PoolFull`].
    pub fn claim_append(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        start: u32,
        tokens: u32,
    ) -> Result<Option<AppendClaim>, StoreError> {
        let (entry, index) = self.entry_to_append(ns, id, layer, start, tokens)?;
        let layers = entry.layers.lock();
        if known_content(&entry, &layers[index], layer, start, tokens)?.is_some() {
            return Ok(None);
        }
        let claim = entry.claim(index).ok_or(StoreError::SequenceBusy { id, layer })?;
        Ok(Some(AppendClaim { claim, start, tokens }))
    }

    /// [`Store::begin_append`] of a range that this store gave a claim on. It is new, so it is no
    /// replay; also when the sequence was closed meanwhile, and then it is seen by nobody.
    ///
    /// # Errors
    /// [`StoreError::PoolFull`]; the claim is given back.
    pub fn begin_claimed(
        &self,
        claim: AppendClaim,
        content_hash: u64,
    ) -> Result<AppendTicket, StoreError> {
        let AppendClaim { claim, start, tokens } = claim;
        let entry = Arc::clone(&claim.entry);
        let mut layers = entry.layers.lock();
        let state = &mut layers[claim.layer];
        debug_assert_eq!(state.length, start, "a claimed layer has changed");
        let offered = Remembered { start, tokens, content_hash };
        Ok(AppendTicket::new(claim, state, &self.pool, offered)?)
    }

    /// Pins tokens of one layer for reading. `length` is how many tokens the read may see, all
    /// that are stored when absent; `range` lies within them, and an open end means to their end.
    ///
    /// # Errors
    /// [`StoreError::RangeNotStored`] when `length` or `range` reaches past what is stored,
    /// [`StoreError::InvalidRange`] when `range` ends before it starts.
    pub fn pin(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        range: impl RangeBounds<u32>,
        length: Option<u32>,
    ) -> Result<Pinned, StoreError> {
        let (entry, index) = self.entry_and_layer(ns, id, layer)?;
        let layers = entry.layers.lock();
        let state = &layers[index];
        let stored = state.length;
        let length = length.unwrap_or(stored);
        if length > stored {
            return Err(StoreError::RangeNotStored { asked: length, stored });
        }
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => length.max(start),
        };
        if start > end {
            return Err(StoreError::InvalidRange { start, end });
        }
        if end > length {
            return Err(StoreError::RangeNotStored { asked: end, stored: length });
        }
        let parts = state.parts(&entry.model, start..end);
        Ok(Pinned { model: Arc::clone(&entry.model), length, range: start..end, parts })
    }

    /// What the sequences of a model hold right now; zeros for a model without any.
    #[must_use]
    pub fn usage(&self, model: ModelId) -> ModelUsage {
        self.ledgers.get(&model).map_or_else(ModelUsage::default, |ledger| ledger.usage())
    }

    /// Drops the ledger of a model without sequences, which nobody opens any from now on. Reads
    /// and appends in flight when the last was closed kept it.
    pub fn forget_model(&self, model: ModelId) {
        self.ledgers.remove(&model);
    }

    /// Every open sequence.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> Vec<Arc<SequenceEntry>> {
        self.sequences.iter().map(|entry| Arc::clone(&entry)).collect()
    }

    /// An entry by id. The same answer for an id that is missing and for one of others.
    fn entry(&self, ns: &Namespace, id: SequenceId) -> Result<Arc<SequenceEntry>, StoreError> {
        let found = self.sequences.get(&id).map(|entry| Arc::clone(&entry));
        found.filter(|entry| entry.model.namespace == *ns).ok_or(StoreError::UnknownSequence { id })
    }

    fn entry_and_layer(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
    ) -> Result<(Arc<SequenceEntry>, usize), StoreError> {
        let entry = self.entry(ns, id)?;
        let layers = entry.model.geometry.layers;
        if layer.0 >= layers {
            return Err(StoreError::LayerOutOfRange { layer, layers });
        }
        Ok((entry, layer.0 as usize))
    }

    /// The sequence and layer of an append whose size is allowed.
    fn entry_to_append(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        start: u32,
        tokens: u32,
    ) -> Result<(Arc<SequenceEntry>, usize), StoreError> {
        let found = self.entry_and_layer(ns, id, layer)?;
        self.check_size(start, tokens)?;
        Ok(found)
    }

    /// Whether an append has a size that is allowed at all.
    fn check_size(&self, start: u32, tokens: u32) -> Result<(), StoreError> {
        if tokens == 0 {
            return Err(StoreError::InvalidRange { start, end: start });
        }
        let exceeded = |limit, max: u32, asked: u64| {
            Err(StoreError::LimitExceeded { limit, max: u64::from(max), asked })
        };
        if tokens > self.limits.tokens_per_append_max {
            let max = self.limits.tokens_per_append_max;
            return exceeded("tokens_per_append_max", max, u64::from(tokens));
        }
        let end = u64::from(start) + u64::from(tokens);
        if end > u64::from(self.limits.tokens_per_sequence_max) {
            return exceeded("tokens_per_sequence_max", self.limits.tokens_per_sequence_max, end);
        }
        Ok(())
    }

    /// Counts one more sequence and its layers and gives it an id, or refuses.
    fn admit(&self, model: &ModelShape) -> Result<SequenceId, StoreError> {
        let limits = &self.limits;
        count("sequences_max", &self.open, 1, limits.sequences_max)?;
        let layers = u64::from(model.geometry.layers);
        let max = limits.sequence_layers_max;
        count("sequence_layers_max", &self.open_layers, layers, max).inspect_err(|_| {
            self.open.fetch_sub(1, Relaxed);
        })?;
        Ok(self.ids.next().inspect_err(|_| self.uncount(model))?)
    }

    /// Takes back what [`Store::admit`] counted.
    fn uncount(&self, model: &ModelShape) {
        self.open.fetch_sub(1, Relaxed);
        self.open_layers.fetch_sub(u64::from(model.geometry.layers), Relaxed);
    }

    fn insert(
        &self,
        id: SequenceId,
        model: Arc<ModelShape>,
        ledger: Arc<Ledger>,
        layers: Vec<Layer>,
    ) -> SequenceId {
        ledger.sequence_opened();
        self.sequences.insert(id, Arc::new(SequenceEntry::new(id, model, ledger, layers)));
        id
    }

    /// Entries of the maps by id: sequences, and ledgers of models. For tests of what is left.
    #[doc(hidden)]
    #[must_use]
    pub fn entry_counts(&self) -> [usize; 2] {
        [self.sequences.len(), self.ledgers.len()]
    }
}

/// The hash of a range that was acknowledged before; none where it may be appended. `state` is that
/// of `layer`, and locked.
fn known_content(
    entry: &SequenceEntry,
    state: &Layer,
    layer: LayerIndex,
    start: u32,
    tokens: u32,
) -> Result<Option<u64>, StoreError> {
    let fit = state.fit(start, tokens)?;
    if let Fit::Known(content_hash) = fit {
        return Ok(Some(content_hash));
    }
    // Before the gap is called one: what is in flight may be what fills it.
    if entry.is_busy(layer.0 as usize) {
        return Err(StoreError::SequenceBusy { id: entry.id, layer });
    }
    if fit == Fit::Gap {
        return Err(StoreError::RangeGap { expected: state.length, start });
    }
    Ok(None)
}

/// Adds `more` to a counter that stays within `max`.
fn count(limit: &'static str, counter: &AtomicU64, more: u64, max: u64) -> Result<(), StoreError> {
    let add = |now: u64| now.checked_add(more).filter(|sum| *sum <= max);
    match counter.fetch_update(Relaxed, Relaxed, add) {
        Ok(_) => Ok(()),
        Err(now) => Err(StoreError::LimitExceeded { limit, max, asked: now.saturating_add(more) }),
    }
}
