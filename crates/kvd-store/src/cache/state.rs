//! The tables of the index: entries by digest, tenants with their policies, and what goes first.
//!
//! Owns [`IndexState`], which the index's lock guards. Blocks that go are handed to the caller, to
//! be freed without the lock.
//!
//! Whose block goes: that of the namespace which holds most for its weight, so that nobody's cache
//! is pushed below its share by others; who asks for room may always lose its own.

use super::block::{CachedBlock, HeldEntry};
use super::key::{DigestBuild, KeyChain, KeyDigest, KeyHasher, KeyLineage};
use super::policy::{EvictionChoice, EvictionPolicy, QueuedEntry};
use super::slots::{EntrySlots, IndexEntry};
use kvd_core::{ModelId, Namespace};
use std::collections::HashMap;
use std::sync::Arc;

/// Entries that a search for a victim looks at, in each namespace.
const VICTIM_LOOKS: usize = 4096;

/// Queued entries that are gone may be this many more than those that are there.
const GONE_SLACK: usize = 1024;

/// Holdings of one namespace.
#[derive(Debug)]
struct TenantCache {
    policy: Box<dyn EvictionPolicy>,
    entries: usize,
    bytes: u64,
    weight: u64,
}

/// A prefix that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundPrefix {
    /// Pages of the chain.
    pub(crate) blocks: usize,
    /// The entry of the last.
    pub(crate) last: u32,
}

/// How a sequence came to the blocks that it lets go of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChainOrigin {
    /// It stored them, or shares them with one that did.
    #[default]
    Stored,
    /// Some were found by key: a use of the cache.
    Found,
}

/// A page that is to be added behind another.
#[derive(Debug)]
pub(crate) struct NewEntry<'a> {
    pub(crate) namespace: &'a Namespace,
    pub(crate) model: ModelId,
    pub(crate) parent: Option<u32>,
    pub(crate) digest: KeyDigest,
    pub(crate) lineage: KeyLineage,
    pub(crate) block: Arc<CachedBlock>,
}

/// Tables of the index.
#[derive(Debug)]
pub(crate) struct IndexState {
    by_digest: HashMap<KeyDigest, u32, DigestBuild>,
    pub(crate) slots: EntrySlots,
    tenants: HashMap<Namespace, TenantCache>,
    weights: HashMap<Namespace, u32>,
    eviction: EvictionChoice,
    /// Bytes of all blocks.
    pub(crate) bytes: u64,
}

impl IndexState {
    pub(crate) fn new(eviction: EvictionChoice, weights: HashMap<Namespace, u32>) -> Self {
        Self {
            by_digest: HashMap::default(),
            slots: EntrySlots::default(),
            tenants: HashMap::new(),
            weights,
            eviction,
            bytes: 0,
        }
    }

    /// The entry of a digest.
    pub(crate) fn find_digest(&self, digest: KeyDigest) -> Option<u32> {
        self.by_digest.get(&digest).copied()
    }

    /// The longest prefix of a chain that follows a page of lineage `base`.
    ///
    /// All pages before one that is there are there too, so the last is found by halving; its
    /// lineage then speaks for all. Where it does not fit, keys do not name whole prefixes, and
    /// each page is compared.
    pub(crate) fn find_prefix(
        &self,
        hasher: KeyHasher,
        model: ModelId,
        base: KeyLineage,
        chain: &KeyChain<'_>,
    ) -> Option<FoundPrefix> {
        let find = |block| self.find_digest(hasher.digest_key(model, chain.block_key(block)));
        let (mut low, mut high) = (0, chain.count_blocks());
        while low < high {
            let middle = low + (high - low) / 2;
            match find(middle) {
                Some(_) => low = middle + 1,
                None => high = middle,
            }
        }
        let last_block = low.checked_sub(1)?;
        let fits = |number: u32, lineage| {
            let entry = self.slots.find_entry(number);
            entry.is_some_and(|entry| entry.lineage == lineage && entry.model == model)
        };
        let extend = |lineage, block| hasher.extend_lineage(lineage, chain.block_key(block));
        let lineage = (0..low).fold(base, extend);
        if let Some(last) = find(last_block).filter(|number| fits(*number, lineage)) {
            return Some(FoundPrefix { blocks: low, last });
        }
        let (mut found, mut lineage) = (None, base);
        for block in 0..low {
            lineage = extend(lineage, block);
            let Some(last) = find(block).filter(|number| fits(*number, lineage)) else { break };
            found = Some(FoundPrefix { blocks: block + 1, last });
        }
        found
    }

    /// A hold on an entry.
    pub(crate) fn hold_entry(&self, number: u32) -> Option<HeldEntry> {
        let entry = self.slots.find_entry(number)?;
        Some(HeldEntry { entry: number, block: Arc::clone(&entry.block) })
    }

    /// Adds an entry, which the policy does not have yet.
    pub(crate) fn add_entry(&mut self, new: NewEntry<'_>) -> HeldEntry {
        let NewEntry { namespace, model, parent, digest, lineage, block } = new;
        let of_parent = parent.and_then(|parent| self.slots.find_entry_mut(parent));
        let position = of_parent.map_or(0, |parent| {
            parent.children += 1;
            parent.position + 1
        });
        let tenant = self.tenants.entry(namespace.clone()).or_insert_with(|| TenantCache {
            policy: self.eviction.new_policy(),
            entries: 0,
            bytes: 0,
            weight: self.weights.get(namespace).copied().unwrap_or(1).into(),
        });
        tenant.entries += 1;
        tenant.bytes += block.bytes;
        self.bytes += block.bytes;
        let serial = self.slots.next_serial();
        let entry = self.slots.add_entry(IndexEntry {
            serial,
            digest,
            lineage,
            model,
            namespace: namespace.clone(),
            parent,
            children: 0,
            position,
            is_queued: false,
            block: Arc::clone(&block),
        });
        self.by_digest.insert(digest, entry);
        HeldEntry { entry, block }
    }

    /// Gives an entry, and those before it that it has not, to the policy: the last first, so that
    /// it goes first. Of the others a use is noted where they were found by key.
    pub(crate) fn queue_chain(&mut self, last: u32, origin: ChainOrigin) {
        let mut next = Some(last);
        while let Some(number) = next {
            let Some(entry) = self.slots.find_entry_mut(number) else { return };
            next = entry.parent;
            if std::mem::replace(&mut entry.is_queued, true) {
                // All before it are queued too.
                if origin == ChainOrigin::Stored {
                    return;
                }
                if let Some(tenant) = self.tenants.get(&entry.namespace) {
                    tenant.policy.note_use(self.slots.entry_mark(number));
                }
                continue;
            }
            let queued = QueuedEntry { serial: entry.serial, entry: number };
            if let Some(tenant) = self.tenants.get_mut(&entry.namespace.clone()) {
                tenant.policy.add_entry(queued, &self.slots);
            }
        }
    }

    /// Takes an entry out. Whoever calls knows that no other has it as its parent, or takes those
    /// out first.
    pub(crate) fn remove_entry(&mut self, number: u32) -> Option<Arc<CachedBlock>> {
        let entry = self.slots.take_entry(number)?;
        self.by_digest.remove(&entry.digest);
        if let Some(parent) = entry.parent.and_then(|number| self.slots.find_entry_mut(number)) {
            parent.children -= 1;
        }
        self.bytes -= entry.block.bytes;
        if let Some(tenant) = self.tenants.get_mut(&entry.namespace) {
            tenant.entries -= 1;
            tenant.bytes -= entry.block.bytes;
            if tenant.entries == 0 {
                self.tenants.remove(&entry.namespace);
            } else if tenant.policy.count_queued() > 2 * tenant.entries + GONE_SLACK {
                tenant.policy.drop_gone(&self.slots);
            }
        }
        Some(entry.block)
    }

    /// Evicts a block for `asker`, if any may go.
    pub(crate) fn evict_block(&mut self, asker: Option<&Namespace>) -> Option<Arc<CachedBlock>> {
        let mut weights: u64 = self.tenants.values().map(|tenant| tenant.weight).sum();
        if let Some(asker) = asker.filter(|asker| !self.tenants.contains_key(*asker)) {
            weights += u64::from(self.weights.get(asker).copied().unwrap_or(1));
        }
        let total = self.bytes;
        let has_share = |name: &Namespace, tenant: &TenantCache| {
            let (held, share) = (u128::from(tenant.bytes), u128::from(total));
            held * u128::from(weights) >= share * u128::from(tenant.weight) || asker == Some(name)
        };
        let tenants = self.tenants.iter_mut().filter(|(name, tenant)| has_share(name, tenant));
        let mut tenants: Vec<_> = tenants.map(|(_, tenant)| tenant).collect();
        // Most for its weight first; compared without division.
        tenants.sort_by(|a, b| {
            let scaled =
                |of: &TenantCache, by: &TenantCache| u128::from(of.bytes) * u128::from(by.weight);
            scaled(b, a).cmp(&scaled(a, b))
        });
        let slots = &self.slots;
        let victim = tenants
            .into_iter()
            .find_map(|tenant| tenant.policy.take_victim(slots, VICTIM_LOOKS))?;
        self.remove_entry(victim.entry)
    }

    /// Fails where the tables do not fit together.
    #[cfg(test)]
    pub(crate) fn check_tables(&self) {
        let mut children: HashMap<u32, u32> = HashMap::new();
        let (mut bytes, mut count) = (0, 0);
        for (number, entry) in self.slots.list_entries() {
            (bytes, count) = (bytes + entry.block.bytes, count + 1);
            assert_eq!(self.find_digest(entry.digest), Some(number));
            match entry.parent {
                None => assert_eq!(entry.position, 0),
                Some(parent) => {
                    let found = self.slots.find_entry(parent).expect("a parent is an entry");
                    assert_eq!(found.position + 1, entry.position);
                    assert_eq!((&found.namespace, found.model), (&entry.namespace, entry.model));
                    assert!(found.is_queued || !entry.is_queued, "a child goes first");
                    *children.entry(parent).or_default() += 1;
                }
            }
        }
        for (number, entry) in self.slots.list_entries() {
            assert_eq!(children.remove(&number).unwrap_or(0), entry.children);
        }
        assert_eq!((self.bytes, self.slots.count_entries()), (bytes, count));
        assert_eq!(self.by_digest.len(), count);
        let sums = self.tenants.values().map(|tenant| tenant.bytes);
        assert_eq!(sums.sum::<u64>(), bytes);
    }

    /// Bytes of a namespace's blocks.
    #[cfg(test)]
    pub(crate) fn tenant_bytes(&self, namespace: &Namespace) -> u64 {
        self.tenants.get(namespace).map_or(0, |tenant| tenant.bytes)
    }
}
