//! Making published blocks findable: the last step of a publish.

use super::block::{CachedBlock, HeldEntry};
use super::key::{KeyChain, KeyLineage};
use super::place::DiskState;
use super::state::{FoundPrefix, IndexState, NewEntry};
use super::{EVICTED_PER_CALL_MAX, PrefixIndex, free_blocks};
use crate::pool::ReserveError;
use crate::quota::{NamespaceAccount, QuotaKind};
use kvd_core::{ModelId, Namespace};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Why a publish ended before its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishStop {
    /// A block could not be packed now, for want of room.
    PoolFull,
    /// Rows of a block cannot be encoded.
    Unpackable,
    /// A key names another prefix already: keys must stand for all tokens from the start.
    KeyInUse,
    /// The index has as many entries as it may, and nobody can spare one.
    IndexFull,
    /// Cached blocks take as many bytes as they may, and nobody can spare one.
    CacheFull,
    /// The namespace has as much as its quota of cached or of all bytes allows.
    QuotaExceeded,
    /// The block before the first went meanwhile.
    ParentGone,
}

impl PublishStop {
    /// The end where packing found no memory.
    pub(crate) fn of_reserve(error: &ReserveError) -> Self {
        match error {
            ReserveError::PoolFull(_) | ReserveError::SlotsUsedUp(_) => Self::PoolFull,
            ReserveError::Quota(_) => Self::QuotaExceeded,
        }
    }
}

/// Outcome of a publish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishedBlocks {
    /// Blocks that were not there before.
    pub published: usize,
    /// Blocks that were.
    pub existed: usize,
    /// Why it ended early, if it did.
    pub stop: Option<PublishStop>,
    /// Tokens of the sequence, from its start, that are found under its keys.
    pub length: u32,
}

/// The page that published blocks follow.
#[derive(Clone, Debug, Default)]
pub(crate) struct InsertBase {
    /// None for blocks from the start.
    pub(crate) held: Option<HeldEntry>,
    pub(crate) lineage: KeyLineage,
}

/// Room that one more block takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct NeededRoom {
    pub(super) entries: usize,
    pub(super) bytes: u64,
}

/// A block that is to be found.
#[derive(Debug)]
pub(crate) struct NewBlock<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) block: CachedBlock,
}

/// Blocks that were inserted, and the last that is found.
#[derive(Debug, Default)]
pub(crate) struct InsertedBlocks {
    pub(crate) published: usize,
    pub(crate) existed: usize,
    pub(crate) stop: Option<PublishStop>,
    pub(crate) tail: Option<HeldEntry>,
}

impl PrefixIndex {
    /// The base of what follows a held entry.
    pub(crate) fn base_behind(&self, held: Option<HeldEntry>) -> InsertBase {
        let state = self.state.read();
        let entry = held.as_ref().and_then(|held| state.slots.find_entry(held.entry));
        let lineage = entry.map_or_else(KeyLineage::default, |entry| entry.lineage);
        InsertBase { held, lineage }
    }

    /// The blocks of a chain behind `base` that are there already: how many, and the base of those
    /// behind them.
    pub(crate) fn skip_existing(
        &self,
        model: ModelId,
        base: InsertBase,
        chain: &KeyChain<'_>,
    ) -> (usize, InsertBase) {
        let state = self.state.read();
        let found = state.find_prefix(self.hasher, model, base.lineage, chain);
        let Some(FoundPrefix { blocks, last }) = found else { return (0, base) };
        // What is on disk alone is brought back by whoever publishes it again.
        let chain = state.slots.walk_up(last).take(blocks).enumerate();
        let mut in_pool = chain.filter(|(_, (_, entry))| entry.block.is_some());
        let Some((skipped, (last, entry))) = in_pool.next() else { return (0, base) };
        let Some(held) = state.hold_entry(last) else { return (0, base) };
        (blocks - skipped, InsertBase { held: Some(held), lineage: entry.lineage })
    }

    /// Makes blocks behind `base` findable, in order, until one cannot be. Of two that publish the
    /// same at once the first wins.
    pub(crate) fn insert_blocks(
        &self,
        namespace: &Namespace,
        model: ModelId,
        base: InsertBase,
        blocks: Vec<NewBlock<'_>>,
    ) -> InsertedBlocks {
        let mut work = InsertWork::default();
        {
            let mut state = self.state.write();
            let is_there = base.held.as_ref().is_none_or(|held| state.slots.is_there(held));
            if is_there {
                work.space = state.key_space(model);
                work.insert_all(self, &mut state, namespace, model, base, blocks);
            } else {
                work.answer.stop = Some(PublishStop::ParentGone);
            }
        }
        free_blocks(work.gone);
        let counters = &self.counters;
        counters.published.fetch_add(work.answer.published as u64, Relaxed);
        counters.existed.fetch_add(work.answer.existed as u64, Relaxed);
        self.count_evictions(work.evictions);
        work.answer
    }

    /// Counts blocks that went because a limit was reached.
    pub(super) fn count_evictions(&self, evictions: LimitEvictions) {
        self.counters.evicted_by_limit.fetch_add(evictions.blocks, Relaxed);
        self.counters.evicted_to_disk.fetch_add(evictions.to_disk, Relaxed);
    }

    /// Counts blocks that were skipped because they were there.
    pub(crate) fn note_existing(&self, blocks: usize) {
        self.counters.existed.fetch_add(blocks as u64, Relaxed);
    }
}

/// Blocks that went because a limit was reached.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LimitEvictions {
    blocks: u64,
    /// Those whose entries stay.
    to_disk: u64,
}

/// An insertion under way.
#[derive(Default)]
pub(super) struct InsertWork {
    /// Blocks to free once the lock is released.
    pub(super) gone: Vec<Arc<CachedBlock>>,
    pub(super) evictions: LimitEvictions,
    space: u64,
    answer: InsertedBlocks,
}

impl InsertWork {
    fn insert_all(
        &mut self,
        index: &PrefixIndex,
        state: &mut IndexState,
        namespace: &Namespace,
        model: ModelId,
        base: InsertBase,
        blocks: Vec<NewBlock<'_>>,
    ) {
        let InsertBase { held: mut tail, mut lineage } = base;
        for NewBlock { key, block } in blocks {
            let block = Arc::new(block);
            lineage = index.hasher.extend_lineage(lineage, key);
            let digest = index.hasher.digest_key(self.space, key);
            if let Some(number) = state.find_digest(digest) {
                let same = |e: &super::slots::IndexEntry| e.lineage == lineage && e.model == model;
                if !state.slots.find_entry(number).is_some_and(same) {
                    self.gone.push(block);
                    self.answer.stop = Some(PublishStop::KeyInUse);
                    break;
                }
                state.learn_key(number, key);
                let held = state.hold_entry(number);
                let is_cold = state.slots.find_entry(number).is_some_and(|e| e.block.is_none());
                if is_cold {
                    let room = NeededRoom { entries: 0, bytes: block.bytes };
                    if let Some(stop) = self.make_room(index, state, namespace, room) {
                        self.gone.push(block);
                        self.answer.stop = Some(stop);
                        break;
                    }
                    state.bring_block(number, block);
                } else {
                    self.gone.push(block);
                }
                self.answer.existed += 1;
                tail = held;
                continue;
            }
            let room = NeededRoom { entries: 1, bytes: block.bytes };
            if let Some(stop) = self.make_room(index, state, namespace, room) {
                self.gone.push(block);
                self.answer.stop = Some(stop);
                break;
            }
            let parent = tail.as_ref().map(|held| held.entry);
            let (bytes, disk, block) = (block.bytes, DiskState::Absent, Some(block));
            let key = Some(key.into());
            let new =
                NewEntry { namespace, model, parent, digest, lineage, block, disk, bytes, key };
            tail = Some(state.add_entry(new));
            self.answer.published += 1;
        }
        self.answer.tail = tail;
    }

    /// Evicts until the limits hold with another entry of so many bytes; why they cannot.
    pub(super) fn make_room(
        &mut self,
        index: &PrefixIndex,
        state: &mut IndexState,
        namespace: &Namespace,
        room: NeededRoom,
    ) -> Option<PublishStop> {
        let over = |state: &IndexState| {
            if state.slots.count_entries() + room.entries > index.limits.entries_max {
                return Some(PublishStop::IndexFull);
            }
            let more = state.bytes.saturating_add(room.bytes);
            if more > index.limits.bytes_max {
                return Some(PublishStop::CacheFull);
            }
            let account = index.limits.quotas.table.find_account(namespace);
            let has_room = |account: &NamespaceAccount| {
                let used = account.used_amount(QuotaKind::CacheBytes);
                let allowed = account.limit_of(QuotaKind::CacheBytes);
                allowed.is_none_or(|allowed| used.saturating_add(room.bytes) <= allowed)
            };
            account.is_some_and(|account| !has_room(&account)).then_some(PublishStop::QuotaExceeded)
        };
        for _ in 0..EVICTED_PER_CALL_MAX {
            // Evicting what is on disk frees bytes and no entry.
            let why = over(state)?;
            if why == PublishStop::IndexFull && state.remove_cold_leaf() {
                continue;
            }
            let evicted = match why {
                PublishStop::QuotaExceeded => state.evict_own(namespace),
                _ => state.evict_block(Some(namespace)),
            };
            let Some(evicted) = evicted else { break };
            self.evictions.blocks += 1;
            self.evictions.to_disk += u64::from(evicted.is_on_disk);
            self.gone.push(evicted.block);
        }
        let stop = over(state);
        if stop == Some(PublishStop::QuotaExceeded) {
            let account = index.limits.quotas.table.open_account(namespace);
            // Counted, and told of by the stop.
            let _exceeded = account.refuse_amount(QuotaKind::CacheBytes, room.bytes);
        }
        stop
    }
}
