//! Reads of the queries of a batch, and what belongs to each distinct one.

use kvd_core::SequenceId;
use smallvec::SmallVec;
use std::collections::HashMap;

/// Tokens that are read: reads of the same key share their parts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ReadKey {
    pub(super) sequence: SequenceId,
    /// Tokens that the read may see.
    pub(super) length: u32,
    pub(super) start: u32,
    pub(super) end: u32,
}

impl ReadKey {
    pub(super) fn count_tokens(&self) -> u32 {
        self.end - self.start
    }
}

/// The read of one query.
pub(super) struct QueryRead {
    pub(super) key: ReadKey,
    pub(super) position: u32,
}

impl QueryRead {
    /// Reads nothing.
    pub(super) fn read_nothing(sequence: SequenceId) -> Self {
        let key = ReadKey { sequence, length: 0, start: 0, end: 0 };
        Self { key, position: 0 }
    }
}

/// Most entries that are searched one by one: they take no memory beside their own.
const FEW: usize = 8;

/// A read, and what belongs to it.
struct ReadEntry<V> {
    key: ReadKey,
    value: V,
}

/// One entry for each distinct read.
pub(super) struct DistinctReads<V> {
    entries: SmallVec<[ReadEntry<V>; 1]>,
    /// Places of the entries, once those are more than [`FEW`].
    places: HashMap<ReadKey, usize>,
}

impl<V> Default for DistinctReads<V> {
    fn default() -> Self {
        Self { entries: SmallVec::new(), places: HashMap::new() }
    }
}

impl<V> DistinctReads<V> {
    /// Finds what belongs to a read.
    pub(super) fn find_read(&self, key: &ReadKey) -> Option<&V> {
        let at = if self.entries.len() <= FEW {
            self.entries.iter().position(|entry| entry.key == *key)?
        } else {
            *self.places.get(key)?
        };
        Some(&self.entries[at].value)
    }

    /// Adds a read that is not there yet.
    pub(super) fn add_read(&mut self, key: ReadKey, value: V) {
        self.entries.push(ReadEntry { key, value });
        let from = match self.entries.len() {
            few if few <= FEW => return,
            // Those before were not needed.
            few if few == FEW + 1 => 0,
            many => many - 1,
        };
        let places = self.entries[from..].iter().zip(from..);
        self.places.extend(places.map(|(entry, at)| (entry.key, at)));
    }

    /// Other values for the same reads.
    pub(super) fn map_reads<T>(&self, value: impl Fn(&V) -> T) -> DistinctReads<T> {
        let entries = self.entries.iter();
        let entries =
            entries.map(|ReadEntry { key, value: of }| ReadEntry { key: *key, value: value(of) });
        DistinctReads { entries: entries.collect(), places: self.places.clone() }
    }

    /// Takes out what belongs to the reads.
    pub(super) fn drain_values(&mut self) -> impl Iterator<Item = V> {
        self.places.clear();
        self.entries.drain(..).map(|entry| entry.value)
    }

    /// How many reads.
    #[cfg(test)]
    pub(super) fn read_count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_and_many_reads_are_found_by_their_keys() {
        let key = |end: u32| ReadKey { sequence: SequenceId(1), length: 100, start: 0, end };
        for count in [1, FEW as u32, FEW as u32 + 1, 100] {
            let mut reads = DistinctReads::default();
            for end in 0..count {
                assert!(reads.find_read(&key(end)).is_none(), "{end} of {count}");
                reads.add_read(key(end), end);
            }
            let doubled = reads.map_reads(|end| 2 * end);
            for end in 0..count {
                assert_eq!(reads.find_read(&key(end)), Some(&end), "{count}");
                assert_eq!(doubled.find_read(&key(end)), Some(&(2 * end)), "{count}");
            }
            assert!(doubled.find_read(&key(count)).is_none());
            assert_eq!(reads.read_count(), count as usize);
        }
    }
}
