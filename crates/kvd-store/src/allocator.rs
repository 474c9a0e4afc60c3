//! Free ranges of an arena: best fit, coalescing, in 64-byte granules.
//!
//! Owns the free list only; it has no lock (the pool's mutex guards it) and remembers nothing
//! about what is taken: whoever took a range gives exactly that range back.

use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a granule: offsets and sizes of what is taken are multiples of it. One cache line, so
/// that two slots never share one.
pub(crate) const GRANULE_BYTES: u64 = 64;

/// Bytes that `len_bytes` takes: rounded up to granules, at least one.
pub(crate) fn taken_bytes(len_bytes: u64) -> Option<u64> {
    len_bytes.max(1).checked_next_multiple_of(GRANULE_BYTES)
}

/// The free ranges, by place and by size.
#[derive(Debug)]
pub(crate) struct Allocator {
    capacity_bytes: u64,
    used_bytes: u64,
    slots: u64,
    /// Offset to length; no two ranges touch.
    by_offset: BTreeMap<u64, u64>,
    /// The same ranges as (length, offset).
    by_size: BTreeSet<(u64, u64)>,
}

impl Allocator {
    /// An empty arena; a capacity that is no multiple of the granule is rounded down.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let capacity_bytes = capacity_bytes - capacity_bytes % GRANULE_BYTES;
        let mut allocator = Self {
            capacity_bytes,
            used_bytes: 0,
            slots: 0,
            by_offset: BTreeMap::new(),
            by_size: BTreeSet::new(),
        };
        if capacity_bytes > 0 {
            allocator.insert(0, capacity_bytes);
        }
        allocator
    }

    /// Takes [`taken_bytes`] of `len_bytes` from the smallest free range that holds them, the
    /// lowest of equal ones; `None` when no range does.
    pub(crate) fn take(&mut self, len_bytes: u64) -> Option<u64> {
        let len = taken_bytes(len_bytes)?;
        let &(found, offset) = self.by_size.range((len, 0)..).next()?;
        self.remove(offset, found);
        if found > len {
            self.insert(offset + len, found - len);
        }
        self.used_bytes += len;
        self.slots += 1;
        Some(offset)
    }

    /// Gives back what `take(len_bytes)` returned as `offset`, and joins it with its neighbours.
    pub(crate) fn give(&mut self, offset: u64, len_bytes: u64) {
        let Some(len) = taken_bytes(len_bytes) else {
            return;
        };
        self.used_bytes -= len;
        self.slots -= 1;
        let (mut start, mut end) = (offset, offset + len);
        let before = self.by_offset.range(..offset).next_back().map(|(&o, &l)| (o, l));
        debug_assert!(before.is_none_or(|(o, l)| o + l <= offset), "{offset} given back twice");
        if let Some((o, l)) = before.filter(|(o, l)| o + l == offset) {
            self.remove(o, l);
            start = o;
        }
        let after = self.by_offset.range(offset..).next().map(|(&o, &l)| (o, l));
        debug_assert!(after.is_none_or(|(o, _)| o >= end), "{offset} given back twice");
        if let Some((o, l)) = after.filter(|(o, _)| *o == end) {
            self.remove(o, l);
            end = o + l;
        }
        self.insert(start, end - start);
    }

    /// Bytes in all.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes taken, rounding included.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Ranges taken.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of the largest free range.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.by_size.last().map_or(0, |&(len, _)| len)
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_size.insert((len, offset));
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(len, offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn takes_the_smallest_range_that_fits() {
        let mut a = Allocator::new(64 * 10 + 5);
        assert_eq!(a.capacity_bytes(), 640);
        let offsets: Vec<u64> = (0..5).map(|_| a.take(128).unwrap()).collect();
        assert_eq!(a.take(1), None);
        a.give(offsets[0], 128);
        a.give(offsets[1], 128);
        a.give(offsets[4], 128);
        // A hole of 256 at 0 and one of 128 at the end: the tight one is used first.
        assert_eq!(a.take(100), Some(offsets[4]));
        assert_eq!(a.largest_free_bytes(), 256);
        assert_eq!(a.take(0), Some(0));
        assert_eq!(a.take(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn never_overlaps_never_leaks_and_coalesces(
            steps in proptest::collection::vec((any::<bool>(), 0u64..900, any::<usize>()), 1..200),
        ) {
            let mut a = Allocator::new(64 * 128);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, len, pick) in steps {
                if take || live.is_empty() {
                    let free_before = a.largest_free_bytes();
                    let rounded = taken_bytes(len).unwrap();
                    match a.take(len) {
                        Some(offset) => {
                            prop_assert_eq!(offset % GRANULE_BYTES, 0);
                            prop_assert!(offset + rounded <= a.capacity_bytes());
                            for &(o, l) in &live {
                                let other = taken_bytes(l).unwrap();
                                prop_assert!(offset >= o + other || o >= offset + rounded);
                            }
                            live.push((offset, len));
                        }
                        None => prop_assert!(free_before < rounded),
                    }
                } else {
                    let (offset, len) = live.swap_remove(pick % live.len());
                    a.give(offset, len);
                }
                let used: u64 = live.iter().map(|&(_, l)| taken_bytes(l).unwrap()).sum();
                prop_assert_eq!(a.used_bytes(), used);
                prop_assert_eq!(a.slots(), live.len() as u64);
                let free: u64 = a.by_offset.values().sum();
                prop_assert_eq!(free + used, a.capacity_bytes());
                prop_assert_eq!(a.by_offset.len(), a.by_size.len());
                let ends: Vec<_> = a.by_offset.iter().map(|(o, l)| (*o, o + l)).collect();
                prop_assert!(ends.windows(2).all(|w| w[0].1 < w[1].0), "neighbours not joined");
            }
            for (offset, len) in live {
                a.give(offset, len);
            }
            prop_assert_eq!(a.largest_free_bytes(), a.capacity_bytes());
        }
    }
}
