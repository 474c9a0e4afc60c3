//! The store: sequences by id, and totals by model.
//!
//! Owns the sequence map and the ledgers. A look-up clones the entry's `Arc` and lets the shard
//! go before a layer's mutex is taken; no shard lock is held while anything else is locked
//! or while an entry drops.

mod arriving;
mod listing;
mod opening;
mod prefixes;
mod reads;

pub use arriving::{ArrivingPrefix, FilledPrefix, PoolPart};
pub use listing::{SequenceQuery, SequenceSummary};
pub use opening::ForkedSequence;
pub use prefixes::AttachedSequence;

use crate::append::{AppendClaim, AppendTicket, BegunAppend};
use crate::append_plan::AppendDraft;
use crate::cache::{CacheLimits, DiskBlock, PrefixIndex};
use crate::error::StoreError;
use crate::layer::{RangeFit, RememberedRange, SequenceLayer};
use crate::ledger::{ModelLedger, ModelUsage};
use crate::pool::ArenaPool;
use crate::quota::{DeviceQuotas, QuotaTable};
use crate::sequence::SequenceEntry;
use crate::shape::{ModelShape, StoreLimits};
use crate::view_list::DiscardedViews;
use dashmap::DashMap;
use kvd_core::{IdCounter, LayerIndex, ModelId, Namespace, SequenceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A layer of an open sequence.
struct EntryLayer {
    entry: Arc<SequenceEntry>,
    layer: usize,
}

/// Sequences over one pool.
#[derive(Debug)]
pub struct SequenceStore {
    pool: Arc<ArenaPool>,
    cache: Arc<PrefixIndex>,
    limits: StoreLimits,
    quotas: DeviceQuotas,
    pub(crate) ids: IdCounter<SequenceId>,
    open: AtomicU64,
    open_layers: AtomicU64,
    /// Views of all sequences: the lists count themselves.
    view_count: Arc<AtomicU64>,
    /// Prefixes that come back layer by layer.
    arrivals: Arc<AtomicU64>,
    sequences: DashMap<SequenceId, Arc<SequenceEntry>>,
    ledgers: DashMap<ModelId, Arc<ModelLedger>>,
}

impl SequenceStore {
    /// A store without sequences, which have the ids that `ids` gives.
    #[must_use]
    pub fn new(pool: Arc<ArenaPool>, limits: StoreLimits, ids: IdCounter<SequenceId>) -> Self {
        Self {
            pool,
            cache: Arc::new(PrefixIndex::new(CacheLimits::default())),
            limits,
            quotas: DeviceQuotas::default(),
            ids,
            open: AtomicU64::new(0),
            open_layers: AtomicU64::new(0),
            view_count: Arc::default(),
            arrivals: Arc::default(),
            sequences: DashMap::new(),
            ledgers: DashMap::new(),
        }
    }

    /// This store, without sequences yet, with a cache of those limits, whose blocks make room in
    /// the pool.
    #[must_use]
    pub fn with_cache(self, limits: CacheLimits) -> Self {
        let cache = Arc::new(PrefixIndex::new(limits));
        self.pool.evict_from(&cache);
        Self { cache, ..self }
    }

    /// This store, without sequences yet, that counts for a table which other devices may share.
    #[must_use]
    pub fn with_quotas(self, quotas: DeviceQuotas) -> Self {
        self.pool.count_for(&quotas);
        Self { quotas, ..self }
    }

    /// Accounts of namespaces.
    #[must_use]
    pub fn quota_table(&self) -> &Arc<QuotaTable> {
        &self.quotas.table
    }

    /// The pool that every slot comes from.
    #[must_use]
    pub fn pool(&self) -> &Arc<ArenaPool> {
        &self.pool
    }

    /// Forgets the tokens from `length` on, on every layer. Precision does not come back: rows
    /// that were packed stay so (see the sequence's next append for what happens to a block that
    /// is cut in the middle).
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::RangeNotStored`] when a layer is shorter
    /// than `length`, [`StoreError::SequenceBusy`] while an append is in flight, and as
    /// [`SequenceStore::pin_range`] before every layer of a prefix has come.
    pub fn truncate_sequence(
        &self,
        ns: &Namespace,
        id: SequenceId,
        length: u32,
    ) -> Result<(), StoreError> {
        let entry = self.find_entry(ns, id)?;
        entry.check_arrived()?;
        let mut gone = DiscardedViews::default();
        {
            let _alone = entry.cuts.write();
            let mut layers: Vec<_> = entry.layer_mutexes().map(|layer| layer.lock()).collect();
            if let Some(layer) = entry.busy_layer() {
                return Err(StoreError::SequenceBusy { id, layer });
            }
            let stored = common_length(layers.iter().map(|layer| layer.length));
            if length > stored {
                return Err(StoreError::RangeNotStored { asked: length, stored });
            }
            layers.iter_mut().for_each(|l| gone.append_all(l.truncate_to(&entry.model, length)));
            drop(layers);
            entry.cut_published((length / entry.model.block_tokens()) as usize);
        }
        entry.discard_views(gone);
        Ok(())
    }

    /// Closes a sequence. Pins and appends in flight stay valid: the bytes go with the last of
    /// them, and such an append is seen by nobody. A long sequence's bytes go soon after the
    /// answer; a reservation that needs them waits for them.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn close_sequence(&self, ns: &Namespace, id: SequenceId) -> Result<(), StoreError> {
        let removed = self.sequences.remove_if(&id, |_, entry| entry.model.namespace == *ns);
        let Some((_, entry)) = removed else {
            return Err(StoreError::UnknownSequence { id });
        };
        self.finish_close(entry);
        Ok(())
    }

    /// The model of a sequence.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn model_of(&self, ns: &Namespace, id: SequenceId) -> Result<Arc<ModelShape>, StoreError> {
        Ok(Arc::clone(&self.find_entry(ns, id)?.model))
    }

    /// Asks to append `tokens` tokens at `start` of a layer. Layers do not wait for one another.
    ///
    /// A range that was acknowledged before, one of the layer's last 64, is
    /// [`BegunAppend::Replayed`] when `content_hash` is the same.
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
    ) -> Result<BegunAppend, StoreError> {
        let found = self.entry_to_append(ns, id, layer, start, tokens)?;
        let EntryLayer { entry, layer: index } = found;
        let (claim, draft) = {
            let mut state = entry.layer_mutex(index).lock();
            if let Some(known) = known_content(&entry, &state, layer, start, tokens)? {
                if known != content_hash {
                    return Err(StoreError::RangeConflict { start, tokens });
                }
                return Ok(BegunAppend::Replayed { length: state.length });
            }
            let claim = entry.claim_layer(index).ok_or(StoreError::SequenceBusy { id, layer })?;
            (claim, AppendDraft::new(&mut state, &entry.model, start + tokens))
        };
        let offered = RememberedRange { start, tokens, content_hash };
        Ok(BegunAppend::Ticket(AppendTicket::new(claim, draft, &self.pool, offered)?))
    }

    /// Takes the right to append for a caller who does not know the content yet, and passes the
    /// claim to [`SequenceStore::begin_claimed`] when he does. `None` for a range that was
    /// acknowledged before: only its content says what [`SequenceStore::begin_append`] answers.
    ///
    /// # Errors
    /// Those of [`SequenceStore::begin_append`], but [`StoreError::RangeConflict`] and
    /// [`StoreError::PoolFull`].
    pub fn claim_append(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        start: u32,
        tokens: u32,
    ) -> Result<Option<AppendClaim>, StoreError> {
        let found = self.entry_to_append(ns, id, layer, start, tokens)?;
        let EntryLayer { entry, layer: index } = found;
        let state = entry.layer_mutex(index).lock();
        if known_content(&entry, &state, layer, start, tokens)?.is_some() {
            return Ok(None);
        }
        let claim = entry.claim_layer(index).ok_or(StoreError::SequenceBusy { id, layer })?;
        Ok(Some(AppendClaim { claim, start, tokens }))
    }

    /// [`SequenceStore::begin_append`] of a range that this store gave a claim on. It is new, so it
    /// is no replay; also when the sequence was closed meanwhile, and then it is seen by nobody.
    ///
    /// # Errors
    /// [`StoreError::PoolFull`]; the claim is given back.
    pub fn begin_claimed(
        &self,
        claim: AppendClaim,
        content_hash: u64,
    ) -> Result<AppendTicket, StoreError> {
        let AppendClaim { claim, start, tokens } = claim;
        let draft = {
            let mut state = claim.entry.layer_mutex(claim.layer).lock();
            debug_assert_eq!(state.length, start, "a claimed layer has changed");
            AppendDraft::new(&mut state, &claim.entry.model, start + tokens)
        };
        let offered = RememberedRange { start, tokens, content_hash };
        Ok(AppendTicket::new(claim, draft, &self.pool, offered)?)
    }

    /// Counts what the sequences of a model hold right now; zeros for a model without any.
    #[must_use]
    pub fn model_usage(&self, model: ModelId) -> ModelUsage {
        self.ledgers.get(&model).map_or_else(ModelUsage::default, |ledger| ledger.read_usage())
    }

    /// Drops the ledger and the cached blocks of a model without sequences, which nobody opens any
    /// from now on. Reads and appends in flight when the last was closed kept it. Gives the blocks
    /// that are on disk and stay there.
    pub fn forget_model(&self, model: ModelId) -> Vec<DiskBlock> {
        let on_disk = self.cache.forget_model(model);
        self.ledgers.remove(&model);
        on_disk
    }

    /// Views of all sequences.
    #[cfg(test)]
    pub(crate) fn view_count(&self) -> u64 {
        self.view_count.load(Relaxed)
    }

    /// Every open sequence.
    #[cfg(test)]
    pub(crate) fn all_entries(&self) -> Vec<Arc<SequenceEntry>> {
        self.sequences.iter().map(|entry| Arc::clone(&entry)).collect()
    }

    /// An entry by id, for a call that names it. The same answer for an id that is missing and for
    /// one of others.
    fn find_entry(&self, ns: &Namespace, id: SequenceId) -> Result<Arc<SequenceEntry>, StoreError> {
        let found = self.sequences.get(&id).filter(|entry| entry.model.namespace == *ns);
        let entry = found.ok_or(StoreError::UnknownSequence { id })?;
        // While the map's shard is held: whoever closes what is idle comes before or after.
        entry.times.note_use();
        Ok(Arc::clone(&entry))
    }

    fn entry_and_layer(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
    ) -> Result<EntryLayer, StoreError> {
        let entry = self.find_entry(ns, id)?;
        let layers = entry.model.geometry.layers;
        if layer.0 >= layers {
            return Err(StoreError::LayerOutOfRange { layer, layers });
        }
        entry.check_layer(layer)?;
        Ok(EntryLayer { entry, layer: layer.0 as usize })
    }

    /// The sequence and layer of an append whose size is allowed.
    fn entry_to_append(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        start: u32,
        tokens: u32,
    ) -> Result<EntryLayer, StoreError> {
        let found = self.entry_and_layer(ns, id, layer)?;
        self.check_size(start, tokens)?;
        self.check_views(u64::from(tokens / found.entry.model.block_tokens()))?;
        Ok(found)
    }

    /// Refuses what would add so many views beyond the limit.
    fn check_views(&self, more: u64) -> Result<(), StoreError> {
        let (limit, max) = ("sequence_views_max", self.limits.sequence_views_max);
        let asked = self.view_count.load(Relaxed).saturating_add(more);
        if asked > max {
            return Err(StoreError::LimitExceeded { limit, max, asked });
        }
        Ok(())
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

    /// Entries of the maps by id: sequences, and ledgers of models. For tests of what is left.
    #[doc(hidden)]
    #[must_use]
    pub fn entry_counts(&self) -> [usize; 2] {
        [self.sequences.len(), self.ledgers.len()]
    }
}

/// Tokens that every layer has, of their lengths.
fn common_length(lengths: impl Iterator<Item = u32>) -> u32 {
    lengths.min().unwrap_or(0)
}

/// The hash of a range that was acknowledged before; none where it may be appended. `state` is that
/// of `layer`, and locked.
fn known_content(
    entry: &SequenceEntry,
    state: &SequenceLayer,
    layer: LayerIndex,
    start: u32,
    tokens: u32,
) -> Result<Option<u64>, StoreError> {
    let fit = state.find_fit(start, tokens)?;
    if let RangeFit::Known(content_hash) = fit {
        return Ok(Some(content_hash));
    }
    // Before the gap is called one: what is in flight may be what fills it.
    if entry.is_busy(layer.0 as usize) {
        return Err(StoreError::SequenceBusy { id: entry.id, layer });
    }
    if fit == RangeFit::Gap {
        return Err(StoreError::RangeGap { expected: state.length, start });
    }
    Ok(None)
}
