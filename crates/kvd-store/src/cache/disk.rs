//! Blocks that are on disk, in the pool, or both: what is to be written, what is there after a
//! restart, what is gone.
//!
//! The index knows where a record lies and nothing of files: a [`DiskPlace`] is words of whoever
//! wrote it. All that is on disk alone lies behind what is in the pool: in the pool a parent
//! outlives its children. Everything here runs under the index's lock, and frees without it.

use super::PrefixIndex;
use super::block::{CachedBlock, HeldEntry, StoredLayer};
use super::events::BlockKey;
use super::key::{KeyChain, KeyDigest, KeyLineage};
use super::place::{DiskPlace, DiskState, RecordPlace, RemotePlace};
use super::reads::BlockToRead;
use super::state::{IndexState, NewEntry};
use kvd_core::{ModelId, Namespace};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Entries that a search for a cold leaf looks at.
const COLD_LOOKS: usize = 4096;

/// The name of a block, which means the same after a restart under the same seed and scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockDigests {
    /// Hash of scope and key.
    pub digest: u128,
    /// Hash of all keys up to this one.
    pub lineage: u128,
    /// Lineage of the page before it.
    pub parent_lineage: u128,
    /// Pages before it.
    pub position: u32,
}

/// A block with a record on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskBlock {
    /// Its name.
    pub digests: BlockDigests,
    /// Where the record lies.
    pub place: DiskPlace,
    /// Bytes of the record.
    pub bytes: u64,
}

/// Where blocks are to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteTarget {
    /// This daemon's disk, also what a shared store has.
    Disk,
    /// A shared store alone.
    Remote,
}

/// A block that is to be written; it stays in the pool while this lives.
#[derive(Clone, Debug)]
pub struct BlockToWrite {
    held: HeldEntry,
    block: Arc<CachedBlock>,
    /// Its name.
    pub digests: BlockDigests,
    /// Its object, of a block that is in a shared store already.
    pub remote: Option<RemotePlace>,
    /// Its key, where it is known.
    pub key: Option<BlockKey>,
}

impl BlockToWrite {
    /// Where each layer lies.
    #[must_use]
    pub fn list_layers(&self) -> Vec<StoredLayer> {
        self.block.list_layers()
    }

    /// Bytes that it takes in the pool.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.block.bytes
    }
}

/// A prefix that is held: none of its blocks goes.
#[derive(Clone, Debug)]
pub struct HeldChain(pub(crate) HeldEntry);

/// Blocks of a prefix by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainResidency {
    /// In the pool.
    pub pool: usize,
    /// On disk, whether in the pool or not.
    pub disk: usize,
    /// From its start on disk without a gap: what a restart leaves.
    pub durable: usize,
    /// About to be written.
    pub queued: usize,
}

/// Use of a record by an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordUse {
    /// No entry has it.
    Stale,
    /// Nothing has used it since it left the pool, or since the start.
    Idle,
    /// Its block is in the pool.
    InPool,
    /// A lease, a pin or a sequence holds it, or one behind it.
    Held,
}

impl IndexState {
    fn find_record(&self, digests: &BlockDigests) -> Option<u32> {
        let number = self.find_digest(KeyDigest::from_number(digests.digest))?;
        let entry = self.slots.find_entry(number)?;
        (entry.lineage.to_number() == digests.lineage).then_some(number)
    }

    pub(super) fn digests_of(&self, number: u32) -> BlockDigests {
        let Some(entry) = self.slots.find_entry(number) else { return BlockDigests::default() };
        let parent = entry.parent.and_then(|parent| self.slots.find_entry(parent));
        BlockDigests {
            digest: entry.digest.to_number(),
            lineage: entry.lineage.to_number(),
            parent_lineage: parent.map_or(0, |parent| parent.lineage.to_number()),
            position: entry.position,
        }
    }

    fn disk_block(&self, number: u32) -> Option<DiskBlock> {
        let entry = self.slots.find_entry(number)?;
        let place = entry.disk.disk_place()?;
        Some(DiskBlock { digests: self.digests_of(number), place, bytes: entry.bytes })
    }

    /// Removes an entry that is on disk alone, unused and without children; looks at a few.
    pub(crate) fn remove_cold_leaf(&mut self) -> bool {
        for _ in 0..COLD_LOOKS.min(self.slots.count_numbers()) {
            let number = self.cold_cursor;
            let next = number as usize + 1;
            self.cold_cursor = if next < self.slots.count_numbers() { next as u32 } else { 0 };
            let entry = self.slots.find_entry(number);
            if entry.is_some_and(|entry| entry.block.is_none() && entry.is_free()) {
                self.remove_entry(number);
                return true;
            }
        }
        false
    }

    /// Removes entries whose records are gone, as far as they are on disk alone, and all that is on
    /// disk alone behind them: one in the pool that has no record could not leave it before those.
    fn remove_subtrees(&mut self, roots: HashSet<u32>) -> u64 {
        if roots.is_empty() {
            return 0;
        }
        let cold = self.slots.list_entries().filter(|(_, entry)| entry.block.is_none());
        let mut cold: Vec<_> = cold.map(|(number, entry)| (entry.position, number)).collect();
        cold.sort_unstable();
        let (mut gone, mut order) = (roots, Vec::new());
        for (_, number) in cold {
            let parent = self.slots.find_entry(number).and_then(|entry| entry.parent);
            if gone.contains(&number) || parent.is_some_and(|parent| gone.contains(&parent)) {
                gone.insert(number);
                order.push(number);
            }
        }
        for number in order.iter().rev() {
            self.remove_entry(*number);
        }
        order.len() as u64
    }
}

impl PrefixIndex {
    /// Hashes a model's keys within a scope that means the same after a restart. Call before any
    /// of its blocks is published.
    pub fn set_scope(&self, model: ModelId, word: u64) {
        self.state.write().scopes.insert(model, word);
    }

    /// Makes blocks findable that are on disk: those of a scope, parents first. How many are; the
    /// others have no parent, or the index is full.
    pub fn restore_blocks(
        &self,
        namespace: &Namespace,
        model: ModelId,
        blocks: &[DiskBlock],
    ) -> usize {
        let mut numbers: HashMap<u128, u32> = HashMap::new();
        let mut restored = 0;
        // Whoever waits for the lock waits for few of them.
        for some in blocks.chunks(1024) {
            let mut state = self.state.write();
            for block in some {
                let DiskBlock { digests, place, bytes } = *block;
                if let Some(number) = state.find_record(&digests) {
                    if state.slots.find_entry(number).is_some_and(|entry| entry.model == model) {
                        state.set_disk(number, DiskState::At(place));
                        numbers.insert(digests.lineage, number);
                    }
                    continue;
                }
                let digest = KeyDigest::from_number(digests.digest);
                let parent = numbers.get(&digests.parent_lineage).copied();
                let is_orphan = digests.position > 0 && parent.is_none();
                let full = state.slots.count_entries() >= self.limits.entries_max;
                if is_orphan || full || state.find_digest(digest).is_some() {
                    continue;
                }
                let held = state.add_entry(NewEntry {
                    namespace,
                    model,
                    parent: parent.filter(|_| digests.position > 0),
                    digest,
                    lineage: KeyLineage::from_number(digests.lineage),
                    block: None,
                    disk: DiskState::At(place),
                    bytes,
                    key: None,
                });
                numbers.insert(digests.lineage, held.entry);
                restored += 1;
            }
        }
        self.counters.restored.fetch_add(restored as u64, Relaxed);
        restored
    }

    /// The blocks of a model that are on disk, parents first.
    pub(crate) fn list_disk_blocks(&self, model: ModelId) -> Vec<DiskBlock> {
        let state = self.state.read();
        let of_model = state.slots.list_entries().filter(|(_, entry)| entry.model == model);
        let mut blocks: Vec<_> =
            of_model.filter_map(|(number, _)| state.disk_block(number)).collect();
        blocks.sort_unstable_by_key(|block| block.digests.position);
        blocks
    }

    /// Takes the blocks of a prefix for writing that are not where they are to be, those before
    /// others first; of so many bytes at most, and within the namespace's quota of the disk. Those
    /// behind the last are left.
    pub(crate) fn plan_writes(
        &self,
        last: &HeldEntry,
        target: WriteTarget,
        bytes_max: u64,
    ) -> Vec<BlockToWrite> {
        let mut state = self.state.write();
        if !state.slots.is_there(last) {
            return Vec::new();
        }
        let chain = state.slots.walk_up(last.entry);
        let is_unwritten = |disk| match disk {
            DiskState::Absent => true,
            DiskState::Remote(_) => target == WriteTarget::Disk,
            DiskState::Queued(_) | DiskState::At(_) => false,
        };
        let unwritten = chain.filter(|(_, entry)| is_unwritten(entry.disk));
        let mut numbers: Vec<_> = unwritten.map(|(number, _)| number).collect();
        numbers.reverse();
        let (mut writes, mut bytes) = (Vec::new(), 0);
        for number in numbers {
            let Some(held) = state.hold_entry(number) else { break };
            let entry = state.slots.find_entry(number);
            let Some(block) = entry.and_then(|entry| entry.block.clone()) else { break };
            bytes += block.bytes;
            let is_to_disk = target == WriteTarget::Disk;
            if bytes > bytes_max || (is_to_disk && !state.may_take_disk(number, block.bytes)) {
                break;
            }
            let remote = entry.and_then(|entry| entry.disk.remote_place());
            let key = entry.and_then(|entry| entry.key.clone());
            let digests = state.digests_of(number);
            state.set_disk(number, DiskState::Queued(remote));
            writes.push(BlockToWrite { held, block, digests, remote, key });
        }
        writes
    }

    /// Notes what came of a block that was to be written: none, if nothing did.
    pub fn note_written(&self, write: &BlockToWrite, place: Option<RecordPlace>) {
        let mut state = self.state.write();
        let entry = state.slots.find_entry(write.held.entry);
        let Some(DiskState::Queued(remote)) = entry.map(|entry| entry.disk) else { return };
        if state.slots.is_there(&write.held) {
            let disk = match place.or(remote.map(RecordPlace::Remote)) {
                Some(RecordPlace::Disk(place)) => DiskState::At(place),
                Some(RecordPlace::Remote(place)) => DiskState::Remote(place),
                None => DiskState::Absent,
            };
            state.set_disk(write.held.entry, disk);
        }
    }

    /// Where the blocks of a prefix are.
    #[must_use]
    pub fn find_residency(&self, chain: &HeldChain) -> ChainResidency {
        let state = self.state.read();
        let mut found = ChainResidency::default();
        if !state.slots.is_there(&chain.0) {
            return found;
        }
        // From the last on: whatever is not on disk ends what a restart leaves.
        for (_, entry) in state.slots.walk_up(chain.0.entry) {
            found.pool += usize::from(entry.block.is_some());
            found.queued += usize::from(matches!(entry.disk, DiskState::Queued(_)));
            let is_on_disk = entry.disk.disk_place().is_some();
            found.disk += usize::from(is_on_disk);
            found.durable = if is_on_disk { found.durable + 1 } else { 0 };
        }
        found
    }

    /// Counts those of so many blocks at the start of each chain that are in the pool.
    #[must_use]
    pub fn count_in_pool(
        &self,
        model: ModelId,
        chains: &[KeyChain<'_>],
        blocks: &[usize],
    ) -> Vec<usize> {
        let state = self.state.read();
        let count = |(chain, blocks): (&KeyChain<'_>, &usize)| {
            let last = blocks.checked_sub(1)?;
            let space = state.key_space(model);
            let digest = self.hasher.digest_key(space, chain.block_key(last));
            let walked = state.slots.walk_up(state.find_digest(digest)?);
            let cold = walked.take_while(|(_, entry)| entry.block.is_none()).count();
            Some(blocks.saturating_sub(cold))
        };
        chains.iter().zip(blocks).map(|pair| count(pair).unwrap_or(0)).collect()
    }

    /// Removes a block whose record cannot be read, and all behind it; how many went.
    pub fn remove_unreadable(&self, read: &BlockToRead) -> u64 {
        let mut state = self.state.write();
        let entry = state.slots.find_entry(read.held.entry);
        let same = entry.is_some_and(|entry| entry.disk.record_place() == Some(read.place));
        if !same || !state.slots.is_there(&read.held) {
            return 0;
        }
        let is_cold = entry.is_some_and(|entry| entry.block.is_none());
        if !is_cold {
            // It came to the pool meanwhile: published again.
            state.set_disk(read.held.entry, DiskState::Absent);
        }
        state.remove_subtrees(HashSet::from([read.held.entry]))
    }

    /// Says of records whether somebody needs them.
    #[must_use]
    pub fn find_record_uses(&self, records: &[(BlockDigests, DiskPlace)]) -> Vec<RecordUse> {
        let state = self.state.read();
        let of = |(digests, place): &(BlockDigests, DiskPlace)| {
            let entry = state.find_record(digests).and_then(|n| state.slots.find_entry(n));
            match entry.filter(|entry| entry.disk.disk_place() == Some(*place)) {
                None => RecordUse::Stale,
                Some(entry) if !entry.is_unheld() => RecordUse::Held,
                Some(entry) if entry.block.is_some() => RecordUse::InPool,
                Some(_) => RecordUse::Idle,
            }
        };
        records.iter().map(of).collect()
    }

    /// A record lies elsewhere from now on.
    pub fn move_record(&self, digests: &BlockDigests, from: DiskPlace, to: DiskPlace) {
        let mut state = self.state.write();
        let Some(number) = state.find_record(digests) else { return };
        let is_it =
            state.slots.find_entry(number).is_some_and(|e| e.disk.disk_place() == Some(from));
        if is_it {
            state.set_disk(number, DiskState::At(to));
        }
    }

    /// Records are no more: blocks in the pool stay there, the others go with all behind them.
    pub fn forget_records(&self, records: &[(BlockDigests, DiskPlace)]) -> u64 {
        let mut state = self.state.write();
        let mut roots = HashSet::new();
        for (digests, place) in records {
            let Some(number) = state.find_record(digests) else { continue };
            let Some(entry) = state.slots.find_entry(number) else { continue };
            if entry.disk.disk_place() != Some(*place) {
                continue;
            }
            if entry.block.is_some() {
                state.set_disk(number, DiskState::Absent);
            }
            roots.insert(number);
        }
        state.remove_subtrees(roots)
    }
}
