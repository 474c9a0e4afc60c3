//! Free ranges of an arena, by place and by size. No lock, and no memory of what is taken.

use std::collections::{BTreeMap, BTreeSet};

/// Ranges that are compared by place at most: a choice among so many is good enough.
const LOOKED_AT_MAX: usize = 64;

/// Ranges that touch nobody else's; no two of them touch.
#[derive(Debug, Default)]
pub(crate) struct FreeRanges {
    /// Offset to length.
    by_offset: BTreeMap<u64, u64>,
    /// These ranges, by length.
    by_size: BTreeSet<SizedRange>,
}

/// A range, ordered by length and then by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizedRange {
    pub(crate) len: u64,
    pub(crate) offset: u64,
}

impl FreeRanges {
    /// Bytes of the largest range.
    pub(crate) fn largest_bytes(&self) -> u64 {
        self.by_size.last().map_or(0, |range| range.len)
    }

    /// The ranges of at least `len` bytes, the smallest first, the lowest of equal ones first.
    pub(crate) fn at_least(&self, len: u64) -> impl Iterator<Item = SizedRange> {
        self.by_size.range(SizedRange { len, offset: 0 }..).copied()
    }

    /// Some ranges of at least `len` bytes, the largest and the smallest among them.
    pub(crate) fn find_large(&self, len: u64) -> impl Iterator<Item = SizedRange> {
        let largest = self.by_size.last().copied().filter(|range| range.len >= len);
        self.at_least(len).take(LOOKED_AT_MAX).chain(largest)
    }

    /// Takes the first `len` bytes of a range.
    pub(crate) fn take_front(&mut self, range: SizedRange, len: u64) -> u64 {
        self.remove(range);
        if range.len > len {
            self.insert(SizedRange { offset: range.offset + len, len: range.len - len });
        }
        range.offset
    }

    /// Takes the last `len` bytes of a range.
    pub(crate) fn take_back(&mut self, range: SizedRange, len: u64) -> u64 {
        self.remove(range);
        if range.len > len {
            self.insert(SizedRange { offset: range.offset, len: range.len - len });
        }
        range.offset + range.len - len
    }

    /// Adds a range and joins it with its neighbours.
    pub(crate) fn give_range(&mut self, range: SizedRange) {
        let SizedRange { len, offset } = range;
        let (mut start, mut end) = (offset, offset + len);
        let before = self.by_offset.range(..=offset).next_back();
        let before = before.map(|(&offset, &len)| SizedRange { len, offset });
        debug_assert!(
            before.is_none_or(|b| b.offset + b.len <= offset),
            "{offset} given back twice"
        );
        if let Some(before) = before.filter(|b| b.offset + b.len == offset) {
            self.remove(before);
            start = before.offset;
        }
        let after = self.by_offset.range(offset..).next();
        let after = after.map(|(&offset, &len)| SizedRange { len, offset });
        debug_assert!(after.is_none_or(|a| a.offset >= end), "{offset} given back twice");
        if let Some(after) = after.filter(|a| a.offset == end) {
            self.remove(after);
            end = after.offset + after.len;
        }
        self.insert(SizedRange { offset: start, len: end - start });
    }

    /// Every range by place, as offset and length.
    #[cfg(test)]
    pub(crate) fn by_offset(&self) -> &BTreeMap<u64, u64> {
        assert_eq!(self.by_offset.len(), self.by_size.len());
        &self.by_offset
    }

    fn insert(&mut self, range: SizedRange) {
        self.by_offset.insert(range.offset, range.len);
        self.by_size.insert(range);
    }

    fn remove(&mut self, range: SizedRange) {
        self.by_offset.remove(&range.offset);
        self.by_size.remove(&range);
    }
}
