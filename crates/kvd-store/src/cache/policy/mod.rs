//! Which cached block goes first.
//!
//! A policy owns queues of entries. The index holds what each entry's use is noted in, tells
//! whether an entry may go, and runs every call but [`note_use`](EvictionPolicy::note_use) under
//! its write lock. A policy is not told when an entry goes for another reason: it finds out when it
//! comes upon it.

mod lru;
mod s3_fifo;

pub(crate) use lru::LruPolicy;
pub(crate) use s3_fifo::S3FifoPolicy;

use super::key::KeyDigest;
use std::sync::atomic::AtomicU64;

/// Policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionChoice {
    /// S3-FIFO, whose queue of newcomers has so many percent of the entries.
    S3Fifo {
        /// 1 to 99.
        small_percent: u8,
    },
    /// The one whose last use is longest ago.
    Lru,
}

impl EvictionChoice {
    /// A policy without entries.
    pub(crate) fn new_policy(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::S3Fifo { small_percent } => Box::new(S3FifoPolicy::new(small_percent)),
            Self::Lru => Box::new(LruPolicy::default()),
        }
    }
}

/// An entry in a queue. The serial tells it from a later one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuedEntry {
    pub(crate) serial: u64,
    pub(crate) entry: u32,
}

/// Whether an entry may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryFate {
    /// It is no more.
    Gone,
    /// Somebody holds it, or entries behind it need it.
    Held,
    /// It may go.
    Free,
}

/// Answers to a policy about entries.
pub(crate) trait EntryLookup {
    /// Whether an entry may go.
    fn find_fate(&self, entry: QueuedEntry) -> EntryFate;

    /// Where the use of an entry is noted: the policy's to read and write.
    fn use_mark(&self, entry: QueuedEntry) -> &AtomicU64;

    /// The digest of an entry that is there.
    fn key_digest(&self, entry: QueuedEntry) -> KeyDigest;
}

/// An order in which entries go.
pub(crate) trait EvictionPolicy: std::fmt::Debug + Send + Sync {
    /// Takes a new entry in.
    fn add_entry(&mut self, entry: QueuedEntry, entries: &dyn EntryLookup);

    /// Notes a use in an entry's mark. Several may do so at once.
    fn note_use(&self, mark: &AtomicU64);

    /// Takes the next entry that may go out; looks at `looks` entries at most.
    fn take_victim(&mut self, entries: &dyn EntryLookup, looks: usize) -> Option<QueuedEntry>;

    /// Entries in the queues, those that are gone included.
    fn count_queued(&self) -> usize;

    /// Lets go of entries that are gone.
    fn drop_gone(&mut self, entries: &dyn EntryLookup);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::key::KeyHasher;
    use std::collections::BTreeSet;
    use std::sync::atomic::Ordering::Relaxed;

    /// Entries of a trace: key `k` is entry `k`.
    struct TraceEntries {
        marks: Vec<AtomicU64>,
        held: BTreeSet<u32>,
        gone: BTreeSet<u32>,
    }

    impl TraceEntries {
        fn new(count: usize) -> Self {
            let marks = (0..count).map(|_| AtomicU64::new(0)).collect();
            Self { marks, held: BTreeSet::new(), gone: BTreeSet::new() }
        }
    }

    impl EntryLookup for TraceEntries {
        fn find_fate(&self, entry: QueuedEntry) -> EntryFate {
            match entry.entry {
                gone if self.gone.contains(&gone) => EntryFate::Gone,
                held if self.held.contains(&held) => EntryFate::Held,
                _ => EntryFate::Free,
            }
        }

        fn use_mark(&self, entry: QueuedEntry) -> &AtomicU64 {
            &self.marks[entry.entry as usize]
        }

        fn key_digest(&self, entry: QueuedEntry) -> KeyDigest {
            KeyHasher { seed: 1 }.digest_key(1, &entry.entry.to_le_bytes())
        }
    }

    /// A cache of `capacity` entries under a policy.
    struct TraceCache {
        policy: Box<dyn EvictionPolicy>,
        entries: TraceEntries,
        resident: BTreeSet<u32>,
        serial: u64,
        capacity: usize,
    }

    impl TraceCache {
        fn new(choice: EvictionChoice, capacity: usize) -> Self {
            Self {
                policy: choice.new_policy(),
                entries: TraceEntries::new(64),
                resident: BTreeSet::new(),
                serial: 0,
                capacity,
            }
        }

        fn use_key(&mut self, key: u32) -> Option<u32> {
            if self.resident.contains(&key) {
                self.policy.note_use(&self.entries.marks[key as usize]);
                return None;
            }
            let mut evicted = None;
            if self.resident.len() == self.capacity {
                let victim = self.policy.take_victim(&self.entries, 1000).unwrap().entry;
                assert!(self.resident.remove(&victim));
                evicted = Some(victim);
            }
            self.serial += 1;
            self.entries.marks[key as usize].store(0, Relaxed);
            self.policy.add_entry(QueuedEntry { serial: self.serial, entry: key }, &self.entries);
            self.resident.insert(key);
            evicted
        }

        /// Keys in order; those that went, in order.
        fn play(&mut self, keys: impl IntoIterator<Item = u32>) -> Vec<u32> {
            keys.into_iter().filter_map(|key| self.use_key(key)).collect()
        }
    }

    #[test]
    fn lru_lets_the_longest_unused_go() {
        let mut cache = TraceCache::new(EvictionChoice::Lru, 3);
        assert_eq!(cache.play([1, 2, 3, 1, 4, 5, 1, 6]), [2, 3, 4]);
    }

    #[test]
    fn s3_fifo_follows_its_written_trace() {
        // Small queue of half: 2 of 4. What is used once while small moves on, what comes again
        // soon after it went begins in the main queue.
        let mut cache = TraceCache::new(EvictionChoice::S3Fifo { small_percent: 50 }, 4);
        assert_eq!(cache.play([1, 2, 3, 4, 1]), []);
        // 1 was used: it moves on, and 2 goes.
        assert_eq!(cache.play([5]), [2]);
        // 2 is a ghost, so it comes into the main queue; 3 goes for it.
        assert_eq!(cache.play([2]), [3]);
        assert_eq!(cache.resident, BTreeSet::from([1, 2, 4, 5]));
        // Small has 4 and 5, no more than half: the main queue's oldest that was not used goes.
        assert_eq!(cache.play([6]), [1]);
        assert_eq!(cache.play([7]), [4]);
    }

    #[test]
    fn a_scan_does_not_push_out_what_is_used() {
        let mut cache = TraceCache::new(EvictionChoice::S3Fifo { small_percent: 50 }, 10);
        cache.play(0..5);
        cache.play(0..5);
        cache.play(10..40);
        // One goes when both queues have half.
        let kept = (0..5).filter(|key| cache.resident.contains(key)).count();
        assert_eq!(kept, 4, "{:?}", cache.resident);
        let mut lru = TraceCache::new(EvictionChoice::Lru, 10);
        lru.play(0..5);
        lru.play(0..5);
        lru.play(10..40);
        assert!(!(0..5).any(|key| lru.resident.contains(&key)));
    }

    #[test]
    fn held_entries_are_passed_over_and_gone_ones_forgotten() {
        for choice in [EvictionChoice::Lru, EvictionChoice::S3Fifo { small_percent: 50 }] {
            let mut cache = TraceCache::new(choice, 8);
            cache.play(0..8);
            cache.entries.held.extend([0, 1, 2]);
            cache.entries.gone.extend([3, 4]);
            let mut take = || cache.policy.take_victim(&cache.entries, 100).map(|v| v.entry);
            assert_eq!([take(), take(), take()], [Some(5), Some(6), Some(7)], "{choice:?}");
            assert_eq!(take(), None, "{choice:?}");
            cache.entries.held.clear();
            cache.policy.drop_gone(&cache.entries);
            assert_eq!(cache.policy.count_queued(), 3, "{choice:?}");
            let mut left: Vec<_> = (0..3)
                .map(|_| cache.policy.take_victim(&cache.entries, 100).unwrap().entry)
                .collect();
            left.sort_unstable();
            assert_eq!(left, [0, 1, 2], "{choice:?}");
            assert_eq!(cache.policy.count_queued(), 0);
        }
    }

    #[test]
    fn an_entry_that_was_used_moves_on_though_others_need_it() {
        let mut cache = TraceCache::new(EvictionChoice::S3Fifo { small_percent: 50 }, 4);
        cache.play([0, 1, 2, 3, 0]);
        // A block behind it came: it is held when its turn comes.
        cache.entries.held.insert(0);
        assert_eq!(cache.play([4]), [1]);
        cache.entries.held.clear();
        // In the main queue it outlives what is small.
        assert_eq!(cache.play([5, 6]), [2, 3]);
    }

    #[test]
    fn a_search_is_bounded() {
        for choice in [EvictionChoice::Lru, EvictionChoice::S3Fifo { small_percent: 50 }] {
            let mut cache = TraceCache::new(choice, 20);
            cache.play(0..20);
            cache.entries.held.extend(0..15);
            assert_eq!(cache.policy.take_victim(&cache.entries, 10), None, "{choice:?}");
            // The next one goes on where this one ended.
            assert!(cache.policy.take_victim(&cache.entries, 10).is_some(), "{choice:?}");
        }
    }
}
