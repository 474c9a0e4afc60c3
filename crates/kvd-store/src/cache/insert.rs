//! Making published blocks findable: the last step of a publish.

use super::block::{CachedBlock, HeldEntry};
use super::key::{KeyChain, KeyLineage};
use super::state::{FoundPrefix, IndexState, NewEntry};
use super::{EVICTED_PER_CALL_MAX, PrefixIndex, free_blocks};
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
    /// The block before the first went meanwhile.
    ParentGone,
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
        let (Some(held), Some(entry)) = (state.hold_entry(last), state.slots.find_entry(last))
        else {
            return (0, base);
        };
        (blocks, InsertBase { held: Some(held), lineage: entry.lineage })
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
        let mut work =
            InsertWork { gone: Vec::new(), evicted: 0, answer: InsertedBlocks::default() };
        {
            let mut state = self.state.write();
            let is_there = base.held.as_ref().is_none_or(|held| state.slots.is_there(held));
            if is_there {
                work.insert_all(self, &mut state, namespace, model, base, blocks);
            } else {
                work.answer.stop = Some(PublishStop::ParentGone);
            }
        }
        free_blocks(work.gone);
        let counters = &self.counters;
        counters.published.fetch_add(work.answer.published as u64, Relaxed);
        counters.existed.fetch_add(work.answer.existed as u64, Relaxed);
        counters.evicted_by_limit.fetch_add(work.evicted, Relaxed);
        work.answer
    }

    /// Counts blocks that were skipped because they were there.
    pub(crate) fn note_existing(&self, blocks: usize) {
        self.counters.existed.fetch_add(blocks as u64, Relaxed);
    }
}

/// An insertion under way.
struct InsertWork {
    /// Blocks to free once the lock is released.
    gone: Vec<Arc<CachedBlock>>,
    evicted: u64,
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
            let digest = index.hasher.digest_key(model, key);
            if let Some(number) = state.find_digest(digest) {
                self.gone.push(block);
                let same = |e: &super::slots::IndexEntry| e.lineage == lineage && e.model == model;
                if !state.slots.find_entry(number).is_some_and(same) {
                    self.answer.stop = Some(PublishStop::KeyInUse);
                    break;
                }
                self.answer.existed += 1;
                tail = state.hold_entry(number);
                continue;
            }
            if let Some(stop) = self.make_room(index, state, namespace, block.bytes) {
                self.gone.push(block);
                self.answer.stop = Some(stop);
                break;
            }
            let parent = tail.as_ref().map(|held| held.entry);
            let new = NewEntry { namespace, model, parent, digest, lineage, block };
            tail = Some(state.add_entry(new));
            self.answer.published += 1;
        }
        self.answer.tail = tail;
    }

    /// Evicts until the limits hold with another entry of so many bytes; why they cannot.
    fn make_room(
        &mut self,
        index: &PrefixIndex,
        state: &mut IndexState,
        namespace: &Namespace,
        bytes: u64,
    ) -> Option<PublishStop> {
        let over = |state: &IndexState| {
            if state.slots.count_entries() >= index.limits.entries_max {
                return Some(PublishStop::IndexFull);
            }
            let more = state.bytes.saturating_add(bytes);
            (more > index.limits.bytes_max).then_some(PublishStop::CacheFull)
        };
        for _ in 0..EVICTED_PER_CALL_MAX {
            over(state)?;
            let Some(block) = state.evict_block(Some(namespace)) else { break };
            self.evicted += 1;
            self.gone.push(block);
        }
        over(state)
    }
}
