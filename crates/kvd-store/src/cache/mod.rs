//! The cache: packed blocks that outlive the sequence that stored them, found by key.
//!
//! Owns [`PrefixIndex`]. Its lock is taken after the locks of a sequence and before the pool's: by
//! matches for reading, by whoever adds, evicts or releases for writing. Blocks are freed without
//! it. The mutex of leases and pins comes before it.
//!
//! These always hold: the page before a cached one is cached, and in the pool where the later one
//! is; a page is found only once its pages lie sealed on every layer; a page that went is not found
//! again unless it is published again; what somebody holds, by an open sequence, a lease or a pin,
//! stays.

mod block;
mod disk;
mod events;
mod holds;
mod insert;
mod key;
mod lease;
mod place;
mod policy;
mod reads;
mod remote;
mod simulate;
mod slots;
mod state;

pub use block::StoredLayer;
pub(crate) use block::{CachedBlock, HeldEntry};
pub use disk::{
    BlockDigests, BlockToWrite, ChainResidency, DiskBlock, HeldChain, RecordUse, WriteTarget,
};
pub use events::{BlockEvent, BlockKey, BlockTier, EventSink, ListCursor, PlacedBlock};
pub use holds::{LeaseRequest, PinRequest, PinnedPrefixes};
pub(crate) use insert::{InsertBase, NewBlock};
pub use insert::{PublishStop, PublishedBlocks};
pub use key::{KEY_BYTES_MAX, KeyChain, KeyError, KeyHashes, PackedKeys};
pub(crate) use key::{KeyHasher, KeyLineage};
pub use place::{DiskPlace, RecordPlace, RemotePlace};
pub use policy::EvictionChoice;
pub use reads::{BlockToRead, ReadPlan};
pub use remote::RemoteBlocks;
pub use simulate::CacheSimulator;

use crate::pool::FreedSlots;
use crate::quota::DeviceQuotas;
use kvd_core::{ModelId, Namespace};
use lease::HoldTable;
use parking_lot::{Mutex, RwLock};
pub(crate) use state::ChainOrigin;
use state::{DroppedEntries, EvictedBlock, IndexState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Blocks that one reservation evicts at most, before it is refused.
pub(crate) const EVICTED_PER_CALL_MAX: usize = 16;

/// Named limits and choices of the cache.
#[derive(Clone, Debug)]
pub struct CacheLimits {
    /// The order in which blocks go. Default `s3-fifo` with a small queue of 50 %.
    pub eviction: EvictionChoice,
    /// Bytes of the pool that cached blocks take, those that open sequences share included;
    /// published beyond it, blocks that nobody holds make room. Default: no limit.
    pub bytes_max: u64,
    /// Entries of the index, one a page. Default 4 194 304 (2^22).
    pub entries_max: usize,
    /// Leases and pins. Default 65 536.
    pub leases_max: usize,
    /// Bytes of blocks that users pin. Default 0: none.
    pub pinned_bytes_max: u64,
    /// Quotas of namespaces, and their shares of the cache.
    pub quotas: DeviceQuotas,
    /// Secret of the daemon under which keys are hashed.
    pub seed: u64,
    /// Who is told of changes, if anybody.
    pub events: Option<Arc<dyn EventSink>>,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self {
            eviction: EvictionChoice::S3Fifo { small_percent: 50 },
            bytes_max: u64::MAX,
            entries_max: 1 << 22,
            leases_max: 65_536,
            pinned_bytes_max: 0,
            quotas: DeviceQuotas::default(),
            seed: 0,
            events: None,
        }
    }
}

/// Levels and counts of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Entries of the index: cached blocks.
    pub entries: u64,
    /// Bytes of the pool that they keep, those that open sequences share included.
    pub bytes: u64,
    /// Leases that have not ended.
    pub leases: u64,
    /// Bytes of blocks that users pin.
    pub pinned_bytes: u64,
    /// Blocks that were published, since the start.
    pub published: u64,
    /// Blocks that were published when they were there already.
    pub existed: u64,
    /// Blocks that went because a reservation found no room.
    pub evicted_for_room: u64,
    /// Blocks that went because the cache had as much as it may.
    pub evicted_by_limit: u64,
    /// Blocks that users dropped, or that went with their model.
    pub dropped: u64,
    /// Reservations that were refused though blocks were cached, all of them held.
    pub evictions_blocked: u64,
    /// Entries whose blocks are in the pool.
    pub pool_entries: u64,
    /// Entries whose blocks are on disk, those that are in the pool too included.
    pub disk_entries: u64,
    /// Blocks that went to make room and whose entries stay, on disk.
    pub evicted_to_disk: u64,
    /// Blocks that came back from disk.
    pub brought_back: u64,
    /// Blocks that were found on disk when their model was registered.
    pub restored: u64,
}

/// Counts since the start.
#[derive(Debug, Default)]
struct CacheCounters {
    published: AtomicU64,
    existed: AtomicU64,
    evicted_for_room: AtomicU64,
    evicted_by_limit: AtomicU64,
    dropped: AtomicU64,
    evictions_blocked: AtomicU64,
    evicted_to_disk: AtomicU64,
    brought_back: AtomicU64,
    restored: AtomicU64,
}

/// Cached blocks by the keys of their prefixes.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: CacheLimits,
    hasher: KeyHasher,
    state: RwLock<IndexState>,
    holds: Mutex<HoldTable>,
    counters: CacheCounters,
}

/// Blocks of a call that drops some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DroppedBlocks {
    /// Blocks that are no more.
    pub dropped: u64,
    /// Blocks that stay, because something holds them or blocks behind them.
    pub held: u64,
    /// Those that are no more and whose records are to go too.
    pub on_disk: Vec<BlockDigests>,
}

/// A prefix that a new sequence is to have.
#[derive(Debug)]
pub(crate) struct AttachedPrefix {
    /// All its blocks, in order.
    pub(crate) blocks: Vec<Arc<CachedBlock>>,
    /// The last of them.
    pub(crate) held: HeldEntry,
}

impl PrefixIndex {
    /// An empty index.
    #[must_use]
    pub fn new(limits: CacheLimits) -> Self {
        let state = IndexState::new(&limits);
        Self {
            hasher: KeyHasher { seed: limits.seed },
            limits,
            state: RwLock::new(state),
            holds: Mutex::default(),
            counters: CacheCounters::default(),
        }
    }

    /// Blocks of each chain that are cached, from its start.
    #[must_use]
    pub fn match_prefixes(&self, model: ModelId, chains: &[KeyChain<'_>]) -> Vec<usize> {
        let state = self.state.read();
        let find = |chain| state.find_prefix(self.hasher, model, KeyLineage::default(), chain);
        chains.iter().map(|chain| find(chain).map_or(0, |found| found.blocks)).collect()
    }

    /// Holds the longest prefix of a chain that is in the pool, of `blocks_max` blocks at most. Its
    /// use is noted when it is let go of.
    pub(crate) fn attach_prefix(
        &self,
        model: ModelId,
        chain: &KeyChain<'_>,
        blocks_max: usize,
    ) -> Option<AttachedPrefix> {
        let state = self.state.read();
        let found = state.find_prefix(self.hasher, model, KeyLineage::default(), chain)?;
        let skipped = found.blocks.saturating_sub(blocks_max);
        let chain = state.slots.walk_up(found.last).skip(skipped);
        let chain: Vec<_> = chain.skip_while(|(_, entry)| entry.block.is_none()).collect();
        let (last, _) = chain.first().copied()?;
        let held = state.hold_entry(last)?;
        let blocks = chain.iter().rev().map(|(_, entry)| entry.block.clone());
        Some(AttachedPrefix { blocks: blocks.collect::<Option<_>>()?, held })
    }

    /// The last `count` blocks up to a held one, in order. They are in the pool.
    pub(crate) fn list_blocks(&self, last: &HeldEntry, count: usize) -> Vec<Arc<CachedBlock>> {
        let state = self.state.read();
        let chain = state.slots.walk_up(last.entry).take(count);
        let mut blocks: Vec<_> = chain.filter_map(|(_, entry)| entry.block.clone()).collect();
        blocks.reverse();
        blocks
    }

    /// The entry `steps` before another.
    pub(crate) fn find_ancestor(&self, of: &HeldEntry, steps: usize) -> Option<HeldEntry> {
        let state = self.state.read();
        let (number, _) = state.slots.walk_up(of.entry).nth(steps)?;
        state.hold_entry(number)
    }

    /// Lets go of the last block of a sequence: from now on it goes by its turn, and those before
    /// it.
    pub(crate) fn release_sequence(&self, held: HeldEntry, origin: ChainOrigin) {
        let mut state = self.state.write();
        if state.slots.is_there(&held) {
            state.queue_chain(held.entry, origin);
        }
    }

    /// Evicts one block, if any may go.
    pub(crate) fn evict_block(&self, asker: Option<&Namespace>, now: Instant) -> bool {
        self.end_due(now);
        let evicted = self.state.write().evict_block(asker);
        self.finish_eviction(evicted)
    }

    /// Evicts one block of a namespace that has as much as it may.
    pub(crate) fn evict_own(&self, namespace: &Namespace, now: Instant) -> bool {
        self.end_due(now);
        let evicted = self.state.write().evict_own(namespace);
        self.finish_eviction(evicted)
    }

    fn finish_eviction(&self, evicted: Option<EvictedBlock>) -> bool {
        let Some(evicted) = evicted else { return false };
        self.counters.evicted_for_room.fetch_add(1, Relaxed);
        self.counters.evicted_to_disk.fetch_add(u64::from(evicted.is_on_disk), Relaxed);
        free_blocks([evicted.block]);
        true
    }

    /// Counts a reservation that was refused, if anything is cached.
    pub(crate) fn note_refusal(&self) {
        if self.state.read().pool_entries > 0 {
            self.counters.evictions_blocked.fetch_add(1, Relaxed);
        }
    }

    /// Drops the blocks of chains that nothing holds, the last of each first.
    pub fn drop_prefixes(&self, model: ModelId, chains: &[KeyChain<'_>]) -> DroppedBlocks {
        let mut gone = DroppedEntries::default();
        let mut answer = DroppedBlocks::default();
        let mut state = self.state.write();
        for chain in chains {
            let found = state.find_prefix(self.hasher, model, KeyLineage::default(), chain);
            let Some(found) = found else { continue };
            let numbers: Vec<_> = state.slots.walk_up(found.last).map(|(n, _)| n).collect();
            let is_free = |state: &IndexState, number| {
                state.slots.find_entry(number).is_some_and(|entry| entry.is_free())
            };
            let mut left = numbers.len() as u64;
            for number in numbers {
                if !is_free(&state, number) {
                    break;
                }
                state.drop_entry(number, &mut gone);
                left -= 1;
            }
            answer.held += left;
        }
        drop(state);
        self.finish_drop(gone, answer)
    }

    /// Drops the blocks up to one that nothing else holds, the last first; the others go by their
    /// turn.
    pub(crate) fn drop_chain(&self, last: HeldEntry) -> DroppedBlocks {
        let mut gone = DroppedEntries::default();
        let mut state = self.state.write();
        if state.slots.is_there(&last) {
            state.queue_chain(last.entry, ChainOrigin::Stored);
            let mut next = Some(last.entry);
            drop(last);
            while let Some(number) = next {
                let entry = state.slots.find_entry(number).filter(|entry| entry.is_free());
                let Some(entry) = entry else { break };
                next = entry.parent;
                state.drop_entry(number, &mut gone);
            }
        }
        drop(state);
        self.finish_drop(gone, DroppedBlocks::default())
    }

    /// Drops all blocks of a model that nothing holds.
    pub fn drop_model_blocks(&self, model: ModelId) -> DroppedBlocks {
        self.drop_all_of(model, false)
    }

    /// Forgets all blocks of a model that is no more, with the leases and pins on them; those that
    /// are on disk stay there.
    pub(crate) fn forget_model(&self, model: ModelId) -> Vec<DiskBlock> {
        let mut holds = self.holds.lock();
        let (leases, pins) = (holds.take_leases_of(model), holds.take_pins_of(model));
        Self::uncount_pins(&mut holds, &pins);
        drop(holds);
        drop((leases, pins));
        let on_disk = self.list_disk_blocks(model);
        self.drop_all_of(model, true);
        self.state.write().scopes.remove(&model);
        on_disk
    }

    fn drop_all_of(&self, model: ModelId, with_held: bool) -> DroppedBlocks {
        let mut state = self.state.write();
        let of_model = state.slots.list_entries().filter(|(_, entry)| entry.model == model);
        let namespace = of_model.clone().next().map(|(_, entry)| entry.namespace.clone());
        // One event for all of them.
        let namespace = namespace.filter(|_| with_held);
        let mut numbers: Vec<_> =
            of_model.map(|(number, entry)| (entry.position, number)).collect();
        // Those behind go before those that they need.
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        let (mut gone, mut answer) = (DroppedEntries::default(), DroppedBlocks::default());
        state.is_quiet = with_held;
        for (_, number) in numbers {
            let entry = state.slots.find_entry(number);
            if with_held || entry.is_some_and(|entry| entry.is_free()) {
                state.drop_entry(number, &mut gone);
            } else {
                answer.held += 1;
            }
        }
        state.is_quiet = false;
        namespace.iter().for_each(|namespace| state.note_cleared(namespace, model));
        drop(state);
        self.finish_drop(gone, answer)
    }

    fn finish_drop(&self, gone: DroppedEntries, answer: DroppedBlocks) -> DroppedBlocks {
        let DroppedEntries { count, blocks, on_disk } = gone;
        self.counters.dropped.fetch_add(count, Relaxed);
        free_blocks(blocks);
        DroppedBlocks { dropped: count, on_disk, ..answer }
    }

    /// All cached blocks, once it is certain that the tables fit together.
    #[cfg(test)]
    pub(crate) fn check_blocks(&self) -> Vec<Arc<CachedBlock>> {
        let state = self.state.read();
        state.check_tables();
        state.slots.list_entries().filter_map(|(_, entry)| entry.block.clone()).collect()
    }

    /// Bytes of all blocks that users pin, as their entries say.
    #[cfg(test)]
    pub(crate) fn count_pinned(&self) -> u64 {
        let state = self.state.read();
        let pinned = state.slots.list_entries().map(|(_, entry)| entry);
        let pinned = pinned.filter(|entry| entry.hold.user_pins.load(Relaxed) > 0);
        pinned.map(|entry| entry.hold.pinned_bytes.load(Relaxed)).sum()
    }

    /// Bytes of a namespace's blocks.
    #[cfg(test)]
    pub(crate) fn tenant_bytes(&self, namespace: &Namespace) -> u64 {
        self.state.read().tenant_bytes(namespace)
    }

    /// Levels and counts.
    #[must_use]
    pub fn read_usage(&self, now: Instant) -> CacheUsage {
        self.end_due(now);
        let (leases, pinned_bytes) = {
            let holds = self.holds.lock();
            (holds.count_leases() as u64, holds.pinned_bytes)
        };
        let (entries, bytes, pool_entries, disk_entries) = {
            let state = self.state.read();
            let [in_pool, on_disk] = [state.pool_entries, state.disk_entries].map(|n| n as u64);
            (state.slots.count_entries() as u64, state.bytes, in_pool, on_disk)
        };
        let CacheCounters { published, existed, evicted_for_room, .. } = &self.counters;
        let CacheCounters { evicted_by_limit, dropped, evictions_blocked, .. } = &self.counters;
        let CacheCounters { evicted_to_disk, brought_back, restored, .. } = &self.counters;
        CacheUsage {
            entries,
            bytes,
            leases,
            pinned_bytes,
            published: published.load(Relaxed),
            existed: existed.load(Relaxed),
            evicted_for_room: evicted_for_room.load(Relaxed),
            evicted_by_limit: evicted_by_limit.load(Relaxed),
            dropped: dropped.load(Relaxed),
            evictions_blocked: evictions_blocked.load(Relaxed),
            pool_entries,
            disk_entries,
            evicted_to_disk: evicted_to_disk.load(Relaxed),
            brought_back: brought_back.load(Relaxed),
            restored: restored.load(Relaxed),
        }
    }
}

/// Gives the bytes of blocks back that nobody else holds. Call without a lock.
fn free_blocks(blocks: impl IntoIterator<Item = Arc<CachedBlock>>) {
    let mut freed = FreedSlots::default();
    blocks.into_iter().for_each(|block| block.free_into(&mut freed));
    freed.give_back();
}
