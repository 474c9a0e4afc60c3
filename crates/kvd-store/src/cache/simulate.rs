//! Traces of requests: how much of them a cache of some size would have found.
//!
//! Owns [`CacheSimulator`]: the index with its policies, over blocks without bytes. A request finds
//! its longest cached prefix and then publishes all of its blocks, as a sequence that is closed
//! before the next begins.

use super::CacheLimits;
use super::block::{CachedBlock, HeldEntry};
use super::key::{KeyChain, KeyHasher, KeyLineage, PackedKeys};
use super::place::DiskState;
use super::policy::EvictionChoice;
use super::state::{ChainOrigin, IndexState, NewEntry};
use kvd_core::{ModelId, Namespace};
use std::sync::Arc;

/// A cache of so many blocks.
#[derive(Debug)]
pub struct CacheSimulator {
    state: IndexState,
    hasher: KeyHasher,
    namespace: Namespace,
    capacity_blocks: usize,
}

const MODEL: ModelId = ModelId(1);

impl CacheSimulator {
    /// An empty cache.
    ///
    /// # Panics
    /// Never: `trace` is a namespace.
    #[must_use]
    pub fn new(eviction: EvictionChoice, capacity_blocks: usize) -> Self {
        Self {
            state: IndexState::new(&CacheLimits { eviction, ..CacheLimits::default() }),
            hasher: KeyHasher { seed: 0 },
            namespace: Namespace::new("trace").expect("a namespace"),
            capacity_blocks,
        }
    }

    /// A request for blocks, each named by a number that stands for all before it too; how many of
    /// them were found.
    pub fn play_request(&mut self, blocks: &[u64]) -> usize {
        let keys: Vec<u8> = blocks.iter().flat_map(|block| block.to_le_bytes()).collect();
        let packed = PackedKeys { bytes: &keys, key_bytes: 8, key_tokens: 1 };
        let Ok(chain) = KeyChain::new(packed, 1) else { return 0 };
        let found = self.state.find_prefix(self.hasher, MODEL, KeyLineage::default(), &chain);
        let hits = found.map_or(0, |found| found.blocks);
        let mut tail = found.and_then(|found| self.state.hold_entry(found.last));
        self.publish_rest(&chain, hits, &mut tail);
        if let Some(held) = tail {
            let origin = if hits > 0 { ChainOrigin::Found } else { ChainOrigin::Stored };
            self.state.queue_chain(held.entry, origin);
        }
        hits
    }

    fn publish_rest(&mut self, chain: &KeyChain<'_>, hits: usize, tail: &mut Option<HeldEntry>) {
        let mut lineage = KeyLineage::default();
        for block in 0..chain.count_blocks() {
            let key = chain.block_key(block);
            lineage = self.hasher.extend_lineage(lineage, key);
            if block < hits {
                continue;
            }
            let digest = self.hasher.digest_key(MODEL.0, key);
            // A trace may name one block behind two prefixes: the daemon stops there too.
            if self.state.find_digest(digest).is_some() {
                return;
            }
            let full = self.state.slots.count_entries() >= self.capacity_blocks;
            if full && self.state.evict_block(None).is_none() {
                return;
            }
            let parent = tail.as_ref().map(|held| held.entry);
            let new = NewEntry {
                namespace: &self.namespace,
                model: MODEL,
                parent,
                digest,
                lineage,
                block: Some(Arc::new(CachedBlock::new(Vec::new()))),
                disk: DiskState::Absent,
                bytes: 0,
                key: None,
            };
            *tail = Some(self.state.add_entry(new));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_played_as_the_daemon_would() {
        let mut cache = CacheSimulator::new(EvictionChoice::Lru, 4);
        assert_eq!(cache.play_request(&[1, 2, 3]), 0);
        assert_eq!(cache.play_request(&[1, 2, 4]), 2);
        // Four blocks are there: the unused end goes first, and then the rest of it.
        assert_eq!(cache.play_request(&[5]), 0);
        assert_eq!(cache.play_request(&[1, 2, 4]), 3);
        assert_eq!(cache.play_request(&[1, 2, 3]), 2);
        assert_eq!(cache.play_request(&[9, 8, 7, 6, 5]), 0, "more than fits");
        assert_eq!(cache.play_request(&[9, 8, 7, 6, 5]), 4);
        assert_eq!(cache.play_request(&[]), 0);
    }
}
