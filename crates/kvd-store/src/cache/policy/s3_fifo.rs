//! S3-FIFO: newcomers wait in a small queue, and go from there unless they were used; those that
//! were, and those that come again soon after they went, are in the main queue, whose entries get
//! another round for each use. A use adds to a counter, so that a hit costs next to nothing.
//! No locks of its own.

use super::{EntryFate, EntryLookup, EvictionPolicy, QueuedEntry};
use crate::cache::key::{DigestBuild, KeyDigest};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Uses of an entry that count.
const USES_MAX: u64 = 3;

/// Ghosts that are kept however few the entries.
const GHOSTS_MIN: usize = 64;

/// Small and main queue, and ghosts of what went.
#[derive(Debug)]
pub(crate) struct S3FifoPolicy {
    small_percent: usize,
    small: VecDeque<QueuedEntry>,
    main: VecDeque<QueuedEntry>,
    ghosts: GhostList,
}

/// Digests of the last entries that went from the small queue.
#[derive(Debug, Default)]
struct GhostList {
    /// The number under which a digest came last.
    numbers: HashMap<KeyDigest, u64, DigestBuild>,
    order: VecDeque<NumberedGhost>,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct NumberedGhost {
    digest: KeyDigest,
    number: u64,
}

impl GhostList {
    fn add_ghost(&mut self, digest: KeyDigest, max: usize) {
        self.next += 1;
        self.numbers.insert(digest, self.next);
        self.order.push_back(NumberedGhost { digest, number: self.next });
        // Those that came again leave their place in the order behind.
        while self.numbers.len() > max || self.order.len() > 2 * max {
            let Some(oldest) = self.order.pop_front() else { return };
            if self.numbers.get(&oldest.digest) == Some(&oldest.number) {
                self.numbers.remove(&oldest.digest);
            }
        }
    }

    /// Whether the digest was a ghost; it is none any more.
    fn take_ghost(&mut self, digest: KeyDigest) -> bool {
        self.numbers.remove(&digest).is_some()
    }
}

impl S3FifoPolicy {
    pub(crate) fn new(small_percent: u8) -> Self {
        Self {
            small_percent: small_percent.into(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: GhostList::default(),
        }
    }

    /// Whether the next victim is looked for among the newcomers.
    fn is_small_next(&self) -> bool {
        let all = self.small.len() + self.main.len();
        self.main.is_empty() || self.small.len() * 100 > all * self.small_percent
    }

    /// The oldest newcomer, if it goes.
    fn try_small(&mut self, entries: &dyn EntryLookup) -> Option<QueuedEntry> {
        let entry = self.small.pop_front()?;
        match entries.find_fate(entry) {
            EntryFate::Gone => None,
            // Also one that is held: blocks behind it are what its use may have brought.
            _ if entries.use_mark(entry).swap(0, Relaxed) > 0 => {
                self.main.push_back(entry);
                None
            }
            EntryFate::Held => {
                self.small.push_back(entry);
                None
            }
            EntryFate::Free => {
                let max = (self.count_queued() + 1).max(GHOSTS_MIN);
                self.ghosts.add_ghost(entries.key_digest(entry), max);
                Some(entry)
            }
        }
    }

    /// The oldest of the others, if it goes.
    fn try_main(&mut self, entries: &dyn EntryLookup) -> Option<QueuedEntry> {
        let entry = self.main.pop_front()?;
        let (fate, mark) = (entries.find_fate(entry), entries.use_mark(entry));
        match (fate, mark.load(Relaxed)) {
            (EntryFate::Gone, _) => return None,
            (EntryFate::Free, 0) => return Some(entry),
            (EntryFate::Held, 0) => {}
            (_, uses) => mark.store(uses - 1, Relaxed),
        }
        self.main.push_back(entry);
        None
    }
}

impl EvictionPolicy for S3FifoPolicy {
    fn add_entry(&mut self, entry: QueuedEntry, entries: &dyn EntryLookup) {
        let came_back = self.ghosts.take_ghost(entries.key_digest(entry));
        if came_back { &mut self.main } else { &mut self.small }.push_back(entry);
    }

    fn note_use(&self, mark: &AtomicU64) {
        // Two at once may count as one: that is no harm.
        let uses = mark.load(Relaxed);
        if uses < USES_MAX {
            mark.store(uses + 1, Relaxed);
        }
    }

    fn take_victim(&mut self, entries: &dyn EntryLookup, looks: usize) -> Option<QueuedEntry> {
        for look in 0..looks {
            if self.count_queued() == 0 {
                return None;
            }
            // A queue whose entries are all held must not hide the other.
            let small = match look < looks / 2 {
                true => self.is_small_next(),
                false => !self.is_small_next() && !self.small.is_empty() || self.main.is_empty(),
            };
            let found = if small { self.try_small(entries) } else { self.try_main(entries) };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn count_queued(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn drop_gone(&mut self, entries: &dyn EntryLookup) {
        let is_there = |entry: &QueuedEntry| entries.find_fate(*entry) != EntryFate::Gone;
        self.small.retain(is_there);
        self.main.retain(is_there);
    }
}
