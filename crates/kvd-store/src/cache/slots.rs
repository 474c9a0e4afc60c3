//! The entries of the index by number, and the marks in which their uses are noted.
//!
//! Owns [`EntrySlots`]. Marks lie side by side, apart from the entries: a hit on thousands of
//! blocks writes to few cache lines. Each namespace has a list of its entries, so that to list them
//! takes as long as they are many. No locks: the index's lock guards it.

use super::block::{CachedBlock, EntryHold, HeldEntry};
use super::events::BlockKey;
use super::key::{KeyDigest, KeyLineage};
use super::place::DiskState;
use super::policy::{EntryFate, EntryLookup, QueuedEntry};
use kvd_core::{ModelId, Namespace};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// One page of tokens under its key.
#[derive(Debug)]
pub(crate) struct IndexEntry {
    pub(crate) serial: u64,
    pub(crate) digest: KeyDigest,
    pub(crate) lineage: KeyLineage,
    pub(crate) model: ModelId,
    pub(crate) namespace: Namespace,
    /// The page before it; none for a first page.
    pub(crate) parent: Option<u32>,
    /// Entries whose parent it is.
    pub(crate) children: u32,
    /// Those of them that are in the pool.
    pub(crate) pool_children: u32,
    /// Pages before it.
    pub(crate) position: u32,
    /// Whether the policy has it: not while the sequence that published it is open, nor while it
    /// is on disk alone.
    pub(crate) is_queued: bool,
    pub(crate) hold: Arc<EntryHold>,
    /// None while it is on disk alone. The page before one in the pool is in the pool.
    pub(crate) block: Option<Arc<CachedBlock>>,
    pub(crate) disk: DiskState,
    /// Bytes that it takes or took in the pool, or of its record where it was never there.
    pub(crate) bytes: u64,
    /// As its engine gave it; none of one that was restored and whose record nobody has read yet.
    pub(crate) key: Option<BlockKey>,
}

impl IndexEntry {
    /// Whether nothing needs it but the index. The lock for writing keeps the answer true.
    pub(crate) fn is_free(&self) -> bool {
        self.children == 0 && self.is_unheld()
    }

    /// Whether nobody holds it. As [`IndexEntry::is_free`], true as long as the lock is.
    pub(crate) fn is_unheld(&self) -> bool {
        Arc::strong_count(&self.hold) == 1
    }

    /// Whether its bytes may leave the pool: with the entry, unless it is on disk too.
    pub(crate) fn may_leave(&self) -> bool {
        let children =
            if self.disk.record_place().is_some() { self.pool_children } else { self.children };
        self.block.is_some() && children == 0 && self.is_unheld()
    }

    /// Its bytes in the pool.
    #[cfg(test)]
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.bytes)
    }
}

/// Entries by number. The number of one that went is given again.
#[derive(Debug, Default)]
pub(crate) struct EntrySlots {
    entries: Vec<Option<IndexEntry>>,
    marks: Vec<AtomicU64>,
    /// Where each entry stands in the list of its namespace.
    places: Vec<u32>,
    /// Entries of each namespace that has some. One that goes is replaced by the last.
    by_namespace: HashMap<Namespace, Vec<u32>>,
    free: Vec<u32>,
    serials: u64,
}

impl EntrySlots {
    /// Entries that are there.
    pub(crate) fn count_entries(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Numbers that entries have or had.
    pub(crate) fn count_numbers(&self) -> usize {
        self.entries.len()
    }

    /// The entries of a namespace. New ones come last, and the last takes the place of one that
    /// goes: whoever reads them from the end misses none that is there all the while.
    pub(crate) fn list_namespace(&self, namespace: &Namespace) -> &[u32] {
        self.by_namespace.get(namespace).map_or(&[], Vec::as_slice)
    }

    /// The entry of that number, if there is one.
    pub(crate) fn find_entry(&self, number: u32) -> Option<&IndexEntry> {
        self.entries.get(number as usize)?.as_ref()
    }

    pub(crate) fn find_entry_mut(&mut self, number: u32) -> Option<&mut IndexEntry> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    /// A serial that no entry had.
    pub(crate) fn next_serial(&mut self) -> u64 {
        self.serials += 1;
        self.serials
    }

    /// Adds an entry and says its number.
    pub(crate) fn add_entry(&mut self, entry: IndexEntry) -> u32 {
        let namespace = entry.namespace.clone();
        let number = match self.free.pop() {
            Some(number) => {
                *self.marks[number as usize].get_mut() = 0;
                self.entries[number as usize] = Some(entry);
                number
            }
            None => {
                self.marks.push(AtomicU64::new(0));
                self.places.push(0);
                self.entries.push(Some(entry));
                (self.entries.len() - 1) as u32
            }
        };
        let list = self.by_namespace.entry(namespace).or_default();
        self.places[number as usize] = list.len() as u32;
        list.push(number);
        number
    }

    /// Takes an entry out.
    pub(crate) fn take_entry(&mut self, number: u32) -> Option<IndexEntry> {
        let entry = self.entries.get_mut(number as usize)?.take()?;
        self.free.push(number);
        let place = self.places[number as usize];
        if let Some(list) = self.by_namespace.get_mut(&entry.namespace) {
            list.swap_remove(place as usize);
            if let Some(moved) = list.get(place as usize) {
                self.places[*moved as usize] = place;
            }
            if list.is_empty() {
                self.by_namespace.remove(&entry.namespace);
            }
        }
        Some(entry)
    }

    /// Whether a hold is on an entry that is there.
    pub(crate) fn is_there(&self, held: &HeldEntry) -> bool {
        let entry = self.find_entry(held.entry);
        entry.is_some_and(|entry| Arc::ptr_eq(&entry.hold, &held.hold))
    }

    /// An entry and those before it, the last first.
    pub(crate) fn walk_up(&self, last: u32) -> impl Iterator<Item = (u32, &IndexEntry)> {
        let with_number = |number| Some((number, self.find_entry(number)?));
        std::iter::successors(with_number(last), move |(_, entry)| with_number(entry.parent?))
    }

    /// All entries.
    pub(crate) fn list_entries(&self) -> impl Iterator<Item = (u32, &IndexEntry)> + Clone {
        (0..).zip(&self.entries).filter_map(|(number, entry)| Some((number, entry.as_ref()?)))
    }

    /// Fails where the lists of namespaces are not those of the entries.
    #[cfg(test)]
    pub(crate) fn check_lists(&self) {
        let mut listed = 0;
        for (namespace, list) in &self.by_namespace {
            assert!(!list.is_empty());
            for (place, number) in (0..).zip(list) {
                let entry = self.find_entry(*number).expect("what is listed is there");
                assert_eq!((&entry.namespace, self.places[*number as usize]), (namespace, place));
                listed += 1;
            }
        }
        assert_eq!(listed, self.count_entries());
    }

    /// The mark of an entry.
    pub(crate) fn entry_mark(&self, number: u32) -> &AtomicU64 {
        &self.marks[number as usize]
    }
}

impl EntryLookup for EntrySlots {
    fn find_fate(&self, queued: QueuedEntry) -> EntryFate {
        match self.find_entry(queued.entry).filter(|entry| entry.serial == queued.serial) {
            None => EntryFate::Gone,
            Some(entry) if entry.block.is_none() => EntryFate::Gone,
            Some(entry) if entry.may_leave() => EntryFate::Free,
            Some(_) => EntryFate::Held,
        }
    }

    fn use_mark(&self, queued: QueuedEntry) -> &AtomicU64 {
        self.entry_mark(queued.entry)
    }

    fn key_digest(&self, queued: QueuedEntry) -> KeyDigest {
        let entry = self.find_entry(queued.entry);
        entry.map_or_else(KeyDigest::default, |entry| entry.digest)
    }
}
