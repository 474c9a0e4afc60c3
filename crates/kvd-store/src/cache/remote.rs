//! Blocks that a store of several daemons has: made findable here, on that store's word. Whether
//! they can be read shows when they are.

use super::PrefixIndex;
use super::key::{KeyChain, KeyLineage};
use super::place::{DiskState, RemotePlace};
use super::state::NewEntry;
use kvd_core::{ModelId, Namespace};

/// The end of a chain: blocks behind its cached prefix that a shared store has.
#[derive(Clone, Copy, Debug)]
pub struct RemoteBlocks<'a> {
    /// Blocks of the chain before them, all of which are cached.
    pub first: usize,
    /// Their objects, in order.
    pub places: &'a [RemotePlace],
    /// Bytes to count for each until it is there.
    pub bytes: u64,
}

impl PrefixIndex {
    /// Makes blocks of a chain findable that a shared store has: those behind what is cached of it.
    /// How many were not known.
    pub fn add_remote_blocks(
        &self,
        namespace: &Namespace,
        model: ModelId,
        chain: &KeyChain<'_>,
        blocks: RemoteBlocks<'_>,
    ) -> usize {
        let mut state = self.state.write();
        let space = state.key_space(model);
        let found = state.find_prefix(self.hasher, model, KeyLineage::default(), chain);
        // Others may have made it longer meanwhile, or some of it may have gone.
        let known = found.as_ref().map_or(0, |found| found.blocks);
        let Some(skipped) = known.checked_sub(blocks.first) else { return 0 };
        // Held, so that no search for room takes it.
        let mut parent = found.and_then(|found| state.hold_entry(found.last));
        if parent.is_none() && known > 0 {
            return 0;
        }
        let mut added = 0;
        for (index, place) in blocks.places.iter().enumerate().skip(skipped) {
            let key = chain.block_key(blocks.first + index);
            let digest = self.hasher.digest_key(space, key);
            let full = state.slots.count_entries() >= self.limits.entries_max;
            if (full && !state.remove_cold_leaf()) || state.find_digest(digest).is_some() {
                break;
            }
            let number = parent.as_ref().map(|parent| parent.entry);
            let before = number.and_then(|number| state.slots.find_entry(number));
            let lineage = before.map_or_else(KeyLineage::default, |entry| entry.lineage);
            parent = Some(state.add_entry(NewEntry {
                namespace,
                model,
                parent: number,
                digest,
                lineage: self.hasher.extend_lineage(lineage, key),
                block: None,
                disk: DiskState::Remote(*place),
                bytes: blocks.bytes,
                key: Some(key.into()),
            }));
            added += 1;
        }
        added
    }
}
