//! Prefixes by key: publishing blocks of sequences, and opening sequences on what was published.

use super::{SequenceStore, common_length};
use crate::cache::{
    BlockToRead, BlockToWrite, CachedBlock, ChainOrigin, DroppedBlocks, HeldChain, KeyChain,
    PrefixIndex, StoredLayer, WriteTarget,
};
use crate::error::StoreError;
use crate::layer::SequenceLayer;
use crate::ledger::SlotAccount;
use crate::publish::{PublishDraft, PublishTicket, tokens_of};
use crate::sequence::{NewSequence, PublishedChain};
use crate::session_sequences::SessionSequences;
use crate::shape::ModelShape;
use kvd_core::{Namespace, SequenceId};
use std::sync::Arc;

/// A sequence that begins with what was cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedSequence {
    /// The new sequence.
    pub id: SequenceId,
    /// Tokens that it has from the cache, on every layer.
    pub length: u32,
}

impl SequenceStore {
    /// The cache: what was published, by key.
    #[must_use]
    pub fn prefix_index(&self) -> &Arc<PrefixIndex> {
        &self.cache
    }

    /// Asks to publish the blocks from token `start` on under the keys of a chain, whose first page
    /// begins there. Those that have no pages yet are to be packed first.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`], [`StoreError::PublishGap`] when `start` is no page's start
    /// or lies behind what was published before, [`StoreError::RangeNotStored`] when the chain is
    /// longer than what every layer has.
    pub fn begin_publish(
        &self,
        ns: &Namespace,
        id: SequenceId,
        start: u32,
        chain: &KeyChain<'_>,
    ) -> Result<PublishTicket, StoreError> {
        let entry = self.find_entry(ns, id)?;
        entry.check_arrived()?;
        let block_tokens = entry.model.block_tokens();
        let no_cut = entry.cuts.read();
        let published = entry.published_chain();
        let first = (start / block_tokens) as usize;
        let gap = |blocks: usize| {
            let published = blocks as u32 * block_tokens;
            Err(StoreError::PublishGap { start, published, block_tokens })
        };
        if !start.is_multiple_of(block_tokens) || first > published.blocks {
            return gap(published.blocks);
        }
        let stored = common_length(entry.layer_mutexes().map(|layer| layer.lock().length));
        let asked = tokens_of(first..first + chain.count_blocks(), &entry.model).end;
        if asked > u64::from(stored) {
            let asked = u32::try_from(asked).unwrap_or(u32::MAX);
            return Err(StoreError::RangeNotStored { asked, stored });
        }
        let before = published.tail.filter(|_| first > 0);
        let steps = published.blocks - first;
        let held = before.and_then(|tail| self.cache.find_ancestor(&tail, steps));
        if first > 0 && held.is_none() {
            // Only with its model do blocks go that a sequence holds.
            return gap(0);
        }
        let base = self.cache.base_behind(held);
        let (existed, base) = self.cache.skip_existing(entry.model.id, base, chain);
        let cut_count = entry.count_cuts();
        let of = Arc::clone(&entry);
        let draft = PublishDraft { entry: of, cut_count, base, chain, first, existed, own: steps };
        let ticket = PublishTicket::new(draft);
        drop(no_cut);
        Ok(ticket.reserve_memory())
    }

    /// Opens a sequence that begins with the longest cached prefix of a chain, which may be none:
    /// it reads the blocks that were published.
    ///
    /// # Errors
    /// As [`SequenceStore::open_in_session`].
    pub fn open_with_prefix(
        &self,
        model: Arc<ModelShape>,
        chain: &KeyChain<'_>,
        session: Option<&Arc<SessionSequences>>,
    ) -> Result<AttachedSequence, StoreError> {
        let session = session.map(Arc::clone);
        let blocks_max = self.limits.tokens_per_sequence_max / model.block_tokens();
        let found = self.cache.attach_prefix(model.id, chain, blocks_max as usize);
        let Some(found) = found else {
            return Ok(AttachedSequence { id: self.open_owned(model, session)?, length: 0 });
        };
        let layers = model.geometry.layers as usize;
        self.check_views(found.blocks.len() as u64 * layers as u64)?;
        let id = self.admit_sequence(&model)?;
        let layer =
            |layer| SequenceLayer::from_blocks(&self.view_count, &model, &found.blocks, layer);
        let layers = (0..layers).map(layer).collect();
        let blocks = found.blocks.len();
        let length = blocks as u32 * model.block_tokens();
        let ledger = Arc::clone(&self.ledgers.entry(model.id).or_default());
        let published =
            PublishedChain { blocks, tail: Some(found.held), origin: ChainOrigin::Found };
        let (arrival, parent) = (None, None);
        let new = NewSequence { id, model, ledger, layers, published, arrival, parent };
        Ok(AttachedSequence { id: self.insert_sequence(new, session)?, length })
    }

    /// [`SequenceStore::close_sequence`], and drops the blocks that it published and that nobody
    /// else holds.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn close_and_drop(
        &self,
        ns: &Namespace,
        id: SequenceId,
    ) -> Result<DroppedBlocks, StoreError> {
        let removed = self.sequences.remove_if(&id, |_, entry| entry.model.namespace == *ns);
        let (_, entry) = removed.ok_or(StoreError::UnknownSequence { id })?;
        let published = entry.take_published();
        self.finish_close(entry);
        Ok(published.tail.map_or_else(Default::default, |tail| self.cache.drop_chain(tail)))
    }

    /// The prefix of a sequence that is cached, held.
    ///
    /// # Errors
    /// [`StoreError::UnknownSequence`].
    pub fn hold_published(
        &self,
        ns: &Namespace,
        id: SequenceId,
    ) -> Result<Option<HeldChain>, StoreError> {
        Ok(self.find_entry(ns, id)?.published_chain().tail.map(HeldChain))
    }

    /// Takes the blocks of a prefix for writing that are not where they are to be, in order; of so
    /// many bytes at most.
    #[must_use]
    pub fn plan_writes(
        &self,
        chain: &HeldChain,
        target: WriteTarget,
        bytes_max: u64,
    ) -> Vec<BlockToWrite> {
        self.cache.plan_writes(&chain.0, target, bytes_max)
    }

    /// Brings a block to the pool that was read into slots of its own; whether it is there now.
    /// Its slots count as the model's from now on.
    #[must_use]
    pub fn bring_read(
        &self,
        model: &ModelShape,
        read: &BlockToRead,
        layers: Vec<StoredLayer>,
    ) -> bool {
        let Some(block) = self.adopt_layers(model, layers) else { return false };
        self.cache.bring_read(&model.namespace, read, Arc::new(block))
    }

    /// A block of slots that count as the model's from now on.
    pub(super) fn adopt_layers(
        &self,
        model: &ModelShape,
        layers: Vec<StoredLayer>,
    ) -> Option<CachedBlock> {
        let ledger = Arc::clone(&self.ledgers.entry(model.id).or_default());
        let values_per_row = model.geometry.values_per_token();
        for StoredLayer { rows, pages } in &layers {
            if let Some(rows) = rows {
                let slot = rows.slot();
                slot.attach_account(|| {
                    SlotAccount::new_raw(&ledger, values_per_row, slot.reserved_bytes())
                });
                rows.set_filled(rows.rows());
            }
            if let Some(pages) = pages {
                let slot = pages.slot();
                slot.attach_account(|| {
                    SlotAccount::new_packed(&ledger, pages.accounting(), slot.reserved_bytes())
                });
            }
        }
        CachedBlock::from_layers(layers)
    }
}
