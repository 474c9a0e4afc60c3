//! Changes of the cache that watchers are told of: which blocks are where.
//!
//! Owns no state. The index calls its [`EventSink`] under its lock, so that events come in the
//! order of the changes; a sink takes no lock of the index. Of a block whose key is not known,
//! nothing is told until it is.

use super::PrefixIndex;
use super::disk::BlockDigests;
use super::key::KeyDigest;
use super::place::DiskState;
use super::slots::IndexEntry;
use super::state::IndexState;
use kvd_core::{ModelId, Namespace};
use std::fmt::Debug;
use std::sync::Arc;

/// A key as its engine gave it.
pub type BlockKey = Arc<[u8]>;

/// Entries that a call of [`PrefixIndex::list_placed`] looks at.
const LISTED_AT_A_TIME: usize = 1024;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockTier {
    /// In the pool of a device.
    Pool,
    /// On this daemon's disk, durable.
    Disk,
    /// In a store that daemons share, as far as is known.
    Remote,
}

/// A block in one of the places where it may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedBlock {
    /// Its model.
    pub model: ModelId,
    /// The place.
    pub tier: BlockTier,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it; none for a first block, or where it is not known.
    pub parent: Option<BlockKey>,
    /// Blocks before it.
    pub position: u32,
}

/// A change of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// A block is somewhere from now on.
    Stored(PlacedBlock),
    /// A block is no longer there. It may be elsewhere.
    Removed(PlacedBlock),
    /// Nothing of a model is found any more.
    Cleared(ModelId),
}

/// Whoever is told of changes. Called under the index's lock: it must be quick.
pub trait EventSink: Debug + Send + Sync {
    /// Whether anybody watches a namespace.
    fn is_watched(&self, namespace: &Namespace) -> bool;

    /// Takes an event of a namespace.
    fn note_event(&self, namespace: &Namespace, event: BlockEvent);
}

/// A place in the list of a namespace's blocks, which is read from its end. Where so many entries
/// are left; none before the first is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListCursor(Option<usize>);

impl IndexState {
    fn place_block(&self, entry: &IndexEntry, tier: BlockTier) -> Option<PlacedBlock> {
        let parent = entry.parent.and_then(|parent| self.slots.find_entry(parent));
        Some(PlacedBlock {
            model: entry.model,
            tier,
            key: entry.key.clone()?,
            parent: parent.and_then(|parent| parent.key.clone()),
            position: entry.position,
        })
    }

    fn note_change(&self, number: u32, tier: BlockTier, event: fn(PlacedBlock) -> BlockEvent) {
        let Some(sink) = self.events.as_ref().filter(|_| !self.is_quiet) else { return };
        let Some(entry) = self.slots.find_entry(number) else { return };
        if !sink.is_watched(&entry.namespace) {
            return;
        }
        if let Some(placed) = self.place_block(entry, tier) {
            sink.note_event(&entry.namespace, event(placed));
        }
    }

    /// Tells that an entry's block has come to a place.
    pub(super) fn note_stored(&self, number: u32, tier: BlockTier) {
        self.note_change(number, tier, BlockEvent::Stored);
    }

    /// Tells that an entry's block has gone from a place.
    pub(super) fn note_removed(&self, number: u32, tier: BlockTier) {
        self.note_change(number, tier, BlockEvent::Removed);
    }

    /// Tells what has changed below the pool.
    pub(super) fn note_disk_change(&self, number: u32, before: DiskState, after: DiskState) {
        let places = |of: DiskState| [of.disk_place().is_some(), of.remote_place().is_some()];
        let tiers = [BlockTier::Disk, BlockTier::Remote];
        for ((tier, was), is) in tiers.into_iter().zip(places(before)).zip(places(after)) {
            match (was, is) {
                (false, true) => self.note_stored(number, tier),
                (true, false) => self.note_removed(number, tier),
                _ => {}
            }
        }
    }

    /// Tells that a model's blocks are no more.
    pub(super) fn note_cleared(&self, namespace: &Namespace, model: ModelId) {
        if let Some(sink) = self.events.as_ref().filter(|sink| sink.is_watched(namespace)) {
            sink.note_event(namespace, BlockEvent::Cleared(model));
        }
    }

    /// Gives an entry its key, which was not known: it is told of from now on.
    pub(super) fn learn_key(&mut self, number: u32, key: &[u8]) {
        let Some(entry) = self.slots.find_entry_mut(number) else { return };
        if entry.key.is_some() {
            return;
        }
        entry.key = Some(key.into());
        let (is_in_pool, disk) = (entry.block.is_some(), entry.disk);
        if is_in_pool {
            self.note_stored(number, BlockTier::Pool);
        }
        self.note_disk_change(number, DiskState::Absent, disk);
    }
}

impl PrefixIndex {
    /// Gives a block that was restored its key, of a record that was read and verified. Ignored
    /// where it is not the key that the index found it by.
    pub fn learn_block_key(&self, digests: &BlockDigests, key: &[u8]) {
        let mut state = self.state.write();
        let digest = KeyDigest::from_number(digests.digest);
        let Some(number) = state.find_digest(digest) else { return };
        let Some(model) = state.slots.find_entry(number).map(|entry| entry.model) else { return };
        if self.hasher.digest_key(state.key_space(model), key) == digest {
            state.learn_key(number, key);
        }
    }

    /// Blocks of a namespace and where they are, some at a time, in no order; none after the last.
    /// A block that changes meanwhile may be in the list as it was or as it is, or twice.
    #[must_use]
    pub fn list_placed(
        &self,
        namespace: &Namespace,
        cursor: &mut ListCursor,
    ) -> Option<Vec<PlacedBlock>> {
        let state = self.state.read();
        let listed = state.slots.list_namespace(namespace);
        let end = cursor.0.map_or(listed.len(), |left| left.min(listed.len()));
        if end == 0 {
            return None;
        }
        let first = end.saturating_sub(LISTED_AT_A_TIME);
        cursor.0 = Some(first);
        let mut placed = Vec::new();
        for number in &listed[first..end] {
            let Some(entry) = state.slots.find_entry(*number) else { continue };
            let places = [
                entry.block.as_ref().map(|_| BlockTier::Pool),
                entry.disk.disk_place().map(|_| BlockTier::Disk),
                entry.disk.remote_place().map(|_| BlockTier::Remote),
            ];
            let places = places.into_iter().flatten();
            placed.extend(places.filter_map(|tier| state.place_block(entry, tier)));
        }
        Some(placed)
    }
}
