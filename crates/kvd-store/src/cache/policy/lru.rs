//! The entry whose last use is longest ago goes first. A use is a number from a clock that every
//! use moves on; the queue is put in order when somebody looks. No locks of its own.

use super::{EntryFate, EntryLookup, EvictionPolicy, QueuedEntry};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Least recently used.
#[derive(Debug, Default)]
pub(crate) struct LruPolicy {
    clock: AtomicU64,
    /// By the time of a use, which may not be the last: that is in the mark.
    queue: BTreeMap<u64, QueuedEntry>,
}

impl LruPolicy {
    fn next_time(&self) -> u64 {
        self.clock.fetch_add(1, Relaxed) + 1
    }
}

impl EvictionPolicy for LruPolicy {
    fn add_entry(&mut self, entry: QueuedEntry, entries: &dyn EntryLookup) {
        let time = self.next_time();
        entries.use_mark(entry).store(time, Relaxed);
        self.queue.insert(time, entry);
    }

    fn note_use(&self, mark: &AtomicU64) {
        mark.fetch_max(self.next_time(), Relaxed);
    }

    fn take_victim(&mut self, entries: &dyn EntryLookup, looks: usize) -> Option<QueuedEntry> {
        for _ in 0..looks {
            let (time, entry) = self.queue.pop_first()?;
            match entries.find_fate(entry) {
                EntryFate::Gone => {}
                EntryFate::Held => self.add_entry(entry, entries),
                EntryFate::Free => {
                    let last = entries.use_mark(entry).load(Relaxed);
                    if last <= time {
                        return Some(entry);
                    }
                    self.queue.insert(last, entry);
                }
            }
        }
        None
    }

    fn count_queued(&self) -> usize {
        self.queue.len()
    }

    fn drop_gone(&mut self, entries: &dyn EntryLookup) {
        self.queue.retain(|_, entry| entries.find_fate(*entry) != EntryFate::Gone);
    }
}
