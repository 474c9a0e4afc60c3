//! Blocks that come back from below the pool: which of a prefix are missing, and what becomes of
//! those that were read.
//!
//! Everything here runs under the index's lock, and frees without it.

use super::block::{CachedBlock, HeldEntry};
use super::disk::{BlockDigests, HeldChain};
use super::insert::{InsertWork, NeededRoom};
use super::key::{KeyChain, KeyLineage};
use super::place::RecordPlace;
use super::state::ChainOrigin;
use super::{AttachedPrefix, PrefixIndex, free_blocks};
use crate::store::PoolPart;
use kvd_core::{ModelId, Namespace};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A block on disk that is to come back to the pool; its entry stays while this lives.
#[derive(Clone, Debug)]
pub struct BlockToRead {
    pub(super) held: HeldEntry,
    /// Its name.
    pub digests: BlockDigests,
    /// Where its record lies.
    pub place: RecordPlace,
}

impl BlockToRead {
    /// The hold on its entry.
    pub(crate) fn held_entry(&self) -> &HeldEntry {
        &self.held
    }
}

/// A prefix that is to be in the pool.
#[derive(Debug)]
pub struct ReadPlan {
    /// Keeps the whole prefix.
    pub chain: HeldChain,
    /// Its blocks that are on disk alone, in order.
    pub missing: Vec<BlockToRead>,
    /// All its blocks.
    pub blocks: usize,
}

impl PrefixIndex {
    /// Holds the longest prefix of a chain, of `blocks_max` blocks at most, and says which of them
    /// are on disk alone; none where all of it is in the pool.
    #[must_use]
    pub fn plan_reads(
        &self,
        model: ModelId,
        chain: &KeyChain<'_>,
        blocks_max: usize,
    ) -> Option<ReadPlan> {
        let state = self.state.read();
        let found = state.find_prefix(self.hasher, model, KeyLineage::default(), chain)?;
        let blocks = found.blocks.min(blocks_max);
        let mut walk = state.slots.walk_up(found.last).skip(found.blocks - blocks).peekable();
        let last = walk.peek().map(|(number, _)| *number)?;
        let mut missing = Vec::new();
        for (number, entry) in walk.take_while(|(_, entry)| entry.block.is_none()) {
            let held = state.hold_entry(number)?;
            let place = entry.disk.record_place()?;
            missing.push(BlockToRead { held, digests: state.digests_of(number), place });
        }
        missing.reverse();
        let chain = HeldChain(state.hold_entry(last)?);
        (!missing.is_empty()).then_some(ReadPlan { chain, missing, blocks })
    }

    /// Holds what a prefix has in the pool before its missing blocks; none where that is not all
    /// of it any more.
    #[must_use]
    pub fn hold_before(&self, plan: &ReadPlan) -> Option<PoolPart> {
        let state = self.state.read();
        let first = plan.missing.first()?;
        let entry = state.slots.find_entry(first.held.entry);
        let entry = entry.filter(|_| state.slots.is_there(&first.held))?;
        let Some(last) = entry.parent else { return Some(PoolPart::default()) };
        let held = state.hold_entry(last)?;
        let blocks = state.slots.walk_up(last).map(|(_, entry)| entry.block.clone());
        let mut blocks = blocks.collect::<Option<Vec<_>>>()?;
        blocks.reverse();
        Some(PoolPart(Some(AttachedPrefix { blocks, held })))
    }

    /// Whether a block that was to be read is in the pool, or cannot come there: its entry or the
    /// block before it went.
    #[must_use]
    pub fn is_read(&self, read: &BlockToRead) -> Option<bool> {
        let state = self.state.read();
        let entry = state.slots.find_entry(read.held.entry)?;
        state.slots.is_there(&read.held).then_some(entry.block.is_some())
    }

    /// Brings a block into the pool that was read; whether it is there now. Another may have been
    /// faster; there may be no room; the block before it may be gone.
    pub(crate) fn bring_read(
        &self,
        namespace: &Namespace,
        read: &BlockToRead,
        block: Arc<CachedBlock>,
    ) -> bool {
        let mut work = InsertWork::default();
        let mut state = self.state.write();
        let room = NeededRoom { entries: 0, bytes: block.bytes };
        let number = read.held.entry;
        let is_there = state.slots.is_there(&read.held);
        let entry = state.slots.find_entry(number).filter(|_| is_there);
        let cold = entry.is_some_and(|entry| entry.block.is_none());
        let parent = entry.and_then(|entry| entry.parent);
        let parent_is_in_pool = parent.is_none_or(|parent| {
            state.slots.find_entry(parent).is_some_and(|parent| parent.block.is_some())
        });
        let mut brought = is_there && !cold;
        if cold && parent_is_in_pool && work.make_room(self, &mut state, namespace, room).is_none()
        {
            state.bring_block(number, Arc::clone(&block));
            self.counters.brought_back.fetch_add(1, Relaxed);
            brought = true;
        }
        drop(state);
        self.count_evictions(work.evictions);
        work.gone.push(block);
        free_blocks(work.gone);
        brought
    }

    /// Lets go of a prefix whose blocks were read: from now on they go by their turn.
    pub fn settle_reads(&self, plan: ReadPlan) {
        let mut state = self.state.write();
        let is_in_pool = |read: &BlockToRead| {
            let entry = state.slots.find_entry(read.held.entry);
            state.slots.is_there(&read.held) && entry.is_some_and(|entry| entry.block.is_some())
        };
        let last = plan.missing.iter().rev().find(|read| is_in_pool(read));
        if let Some(number) = last.map(|read| read.held.entry) {
            state.queue_chain(number, ChainOrigin::Stored);
        }
    }
}
