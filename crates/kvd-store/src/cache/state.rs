//! The tables of the index: entries by digest, tenants with their policies, and what goes first.
//!
//! Owns [`IndexState`], which the index's lock guards. Blocks that go are handed to the caller, to
//! be freed without the lock.
//!
//! Whose block goes: that of the namespace which holds most for its weight, so that nobody's cache
//! is pushed below its share by others; who asks for room may always lose its own.

use super::CacheLimits;
use super::block::{CachedBlock, EntryHold, HeldEntry};
use super::disk::BlockDigests;
use super::events::{BlockKey, BlockTier, EventSink};
use super::key::{DigestBuild, KeyChain, KeyDigest, KeyHasher, KeyLineage};
use super::place::DiskState;
use super::policy::{EvictionChoice, EvictionPolicy, QueuedEntry};
use super::slots::{EntrySlots, IndexEntry};
use crate::quota::{DeviceQuotas, NamespaceAccount, QuotaKind};
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
    /// Blocks in the pool.
    entries: usize,
    bytes: u64,
    weight: u64,
    account: Arc<NamespaceAccount>,
}

impl TenantCache {
    /// Whether all that its namespace has on the device is reserved for it.
    fn is_reserved(&self, device: usize) -> bool {
        self.account.unused_reserve(device) > 0
    }
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
    /// None for one that is on disk alone.
    pub(crate) block: Option<Arc<CachedBlock>>,
    pub(crate) disk: DiskState,
    pub(crate) bytes: u64,
    /// None where it is not known.
    pub(crate) key: Option<BlockKey>,
}

/// A block that went to make room.
#[derive(Debug)]
pub(crate) struct EvictedBlock {
    pub(crate) block: Arc<CachedBlock>,
    /// Whether its entry stays, on disk.
    pub(crate) is_on_disk: bool,
}

/// Entries that were dropped.
#[derive(Debug, Default)]
pub(crate) struct DroppedEntries {
    pub(crate) count: u64,
    /// To be freed without the lock.
    pub(crate) blocks: Vec<Arc<CachedBlock>>,
    pub(crate) on_disk: Vec<BlockDigests>,
}

/// Tables of the index.
#[derive(Debug)]
pub(crate) struct IndexState {
    by_digest: HashMap<KeyDigest, u32, DigestBuild>,
    pub(crate) slots: EntrySlots,
    tenants: HashMap<Namespace, TenantCache>,
    quotas: DeviceQuotas,
    eviction: EvictionChoice,
    /// Bytes of all blocks in the pool.
    pub(crate) bytes: u64,
    /// Blocks in the pool.
    pub(crate) pool_entries: usize,
    /// Entries with a record on disk.
    pub(crate) disk_entries: usize,
    /// Words of scopes, of models whose keys mean the same after a restart.
    pub(crate) scopes: HashMap<ModelId, u64>,
    /// Where the next search for a cold leaf begins.
    pub(crate) cold_cursor: u32,
    /// Who is told of changes.
    pub(super) events: Option<Arc<dyn EventSink>>,
    /// Whether nothing is told for now.
    pub(super) is_quiet: bool,
}

impl IndexState {
    pub(crate) fn new(limits: &CacheLimits) -> Self {
        let CacheLimits { eviction, quotas, events, .. } = limits.clone();
        Self {
            by_digest: HashMap::default(),
            slots: EntrySlots::default(),
            tenants: HashMap::new(),
            quotas,
            eviction,
            bytes: 0,
            pool_entries: 0,
            disk_entries: 0,
            scopes: HashMap::new(),
            cold_cursor: 0,
            events,
            is_quiet: false,
        }
    }

    /// The space in which a model's keys are hashed.
    pub(crate) fn key_space(&self, model: ModelId) -> u64 {
        if self.scopes.is_empty() { model.0 } else { *self.scopes.get(&model).unwrap_or(&model.0) }
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
        let space = self.key_space(model);
        let find = |block| self.find_digest(hasher.digest_key(space, chain.block_key(block)));
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
        Some(HeldEntry { entry: number, hold: Arc::clone(&entry.hold) })
    }

    /// Adds an entry, which the policy does not have yet.
    pub(crate) fn add_entry(&mut self, new: NewEntry<'_>) -> HeldEntry {
        let NewEntry { namespace, model, parent, digest, lineage, block, disk, bytes, key } = new;
        let of_parent = parent.and_then(|parent| self.slots.find_entry_mut(parent));
        let position = of_parent.map_or(0, |parent| {
            parent.children += 1;
            parent.position + 1
        });
        let serial = self.slots.next_serial();
        let hold = Arc::<EntryHold>::default();
        let entry = self.slots.add_entry(IndexEntry {
            serial,
            digest,
            lineage,
            model,
            namespace: namespace.clone(),
            parent,
            children: 0,
            pool_children: 0,
            position,
            is_queued: false,
            hold: Arc::clone(&hold),
            block: None,
            disk,
            bytes,
            key,
        });
        self.by_digest.insert(digest, entry);
        self.count_disk(entry, DiskState::Absent, disk);
        if let Some(block) = block {
            self.bring_block(entry, block);
        }
        self.note_disk_change(entry, DiskState::Absent, disk);
        HeldEntry { entry, hold }
    }

    /// Brings an entry into the pool, which is not there.
    pub(crate) fn bring_block(&mut self, number: u32, block: Arc<CachedBlock>) {
        let Some(entry) = self.slots.find_entry_mut(number) else { return };
        let bytes = block.bytes;
        let (namespace, parent) = (entry.namespace.clone(), entry.parent);
        // A record has another length than its block in the pool.
        let before = entry.disk.takes_disk().then_some(entry.bytes);
        (entry.bytes, entry.block) = (bytes, Some(block));
        if let Some(parent) = parent.and_then(|parent| self.slots.find_entry_mut(parent)) {
            parent.pool_children += 1;
        }
        let (eviction, quotas) = (self.eviction, &self.quotas);
        let tenant = self.tenants.entry(namespace).or_insert_with_key(|name| TenantCache {
            policy: eviction.new_policy(),
            entries: 0,
            bytes: 0,
            weight: 0,
            account: quotas.table.open_account(name),
        });
        tenant.entries += 1;
        tenant.bytes += bytes;
        tenant.account.take_anyway(QuotaKind::CacheBytes, bytes);
        if let Some(before) = before {
            tenant.account.take_anyway(QuotaKind::DiskBytes, bytes);
            tenant.account.give_back(QuotaKind::DiskBytes, before);
        }
        self.bytes += bytes;
        self.pool_entries += 1;
        self.note_stored(number, BlockTier::Pool);
    }

    /// Takes an entry's block out of the pool. The entry stays.
    pub(crate) fn take_block(&mut self, number: u32) -> Option<Arc<CachedBlock>> {
        let entry = self.slots.find_entry_mut(number)?;
        let block = entry.block.take()?;
        entry.is_queued = false;
        let (namespace, parent) = (entry.namespace.clone(), entry.parent);
        if let Some(parent) = parent.and_then(|parent| self.slots.find_entry_mut(parent)) {
            parent.pool_children -= 1;
        }
        self.bytes -= block.bytes;
        self.pool_entries -= 1;
        if let Some(tenant) = self.tenants.get_mut(&namespace) {
            tenant.entries -= 1;
            tenant.bytes -= block.bytes;
            tenant.account.give_back(QuotaKind::CacheBytes, block.bytes);
            if tenant.entries == 0 {
                self.tenants.remove(&namespace);
            } else if tenant.policy.count_queued() > 2 * tenant.entries + GONE_SLACK {
                tenant.policy.drop_gone(&self.slots);
            }
        }
        self.note_removed(number, BlockTier::Pool);
        Some(block)
    }

    /// Notes where an entry's record lies, or that there is none.
    pub(crate) fn set_disk(&mut self, number: u32, disk: DiskState) {
        let Some(entry) = self.slots.find_entry_mut(number) else { return };
        let before = std::mem::replace(&mut entry.disk, disk);
        self.count_disk(number, before, disk);
        self.note_disk_change(number, before, disk);
    }

    /// Counts an entry's record, to its namespace too.
    fn count_disk(&mut self, number: u32, before: DiskState, after: DiskState) {
        self.disk_entries += usize::from(after.disk_place().is_some());
        self.disk_entries -= usize::from(before.disk_place().is_some());
        let Some(entry) = self.slots.find_entry(number) else { return };
        let account = || self.quotas.table.open_account(&entry.namespace);
        match (before.takes_disk(), after.takes_disk()) {
            (false, true) => account().take_anyway(QuotaKind::DiskBytes, entry.bytes),
            (true, false) => account().give_back(QuotaKind::DiskBytes, entry.bytes),
            _ => {}
        }
    }

    /// Whether an entry's namespace may have so many bytes more on disk; a refusal is counted.
    pub(super) fn may_take_disk(&self, number: u32, bytes: u64) -> bool {
        let Some(entry) = self.slots.find_entry(number) else { return false };
        let Some(account) = self.quotas.table.find_account(&entry.namespace) else { return true };
        let used = account.used_amount(QuotaKind::DiskBytes);
        account.check_room(QuotaKind::DiskBytes, used, bytes).is_ok()
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
    /// out first. Its block is none where it was on disk alone.
    pub(crate) fn remove_entry(&mut self, number: u32) -> Option<Arc<CachedBlock>> {
        let block = self.take_block(number);
        self.set_disk(number, DiskState::Absent);
        let entry = self.slots.take_entry(number)?;
        self.by_digest.remove(&entry.digest);
        if let Some(parent) = entry.parent.and_then(|number| self.slots.find_entry_mut(number)) {
            parent.children -= 1;
        }
        block
    }

    /// Takes out an entry that is dropped, also from disk.
    pub(crate) fn drop_entry(&mut self, number: u32, gone: &mut DroppedEntries) {
        let digests = self.digests_of(number);
        let Some(entry) = self.slots.find_entry(number) else { return };
        if matches!(entry.disk, DiskState::At(_) | DiskState::Queued(_)) {
            gone.on_disk.push(digests);
        }
        gone.count += 1;
        gone.blocks.extend(self.remove_entry(number));
    }

    /// Evicts a block for `asker`, if any may go.
    pub(crate) fn evict_block(&mut self, asker: Option<&Namespace>) -> Option<EvictedBlock> {
        // Once for this choice: an operator may change them meanwhile.
        for tenant in self.tenants.values_mut() {
            tenant.weight = tenant.account.share_weight().into();
        }
        let mut weights: u64 = self.tenants.values().map(|tenant| tenant.weight).sum();
        if let Some(asker) = asker.filter(|asker| !self.tenants.contains_key(*asker)) {
            weights += u64::from(self.quotas.table.weight_of(asker));
        }
        let (total, device) = (self.bytes, self.quotas.device);
        let has_share = |name: &Namespace, tenant: &TenantCache| {
            let (held, share) = (u128::from(tenant.bytes), u128::from(total));
            let has_most = held * u128::from(weights) >= share * u128::from(tenant.weight);
            asker == Some(name) || (has_most && !tenant.is_reserved(device))
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
        self.take_victim(victim)
    }

    /// Evicts a block of a namespace that makes room of its own.
    pub(crate) fn evict_own(&mut self, namespace: &Namespace) -> Option<EvictedBlock> {
        let tenant = self.tenants.get_mut(namespace)?;
        let victim = tenant.policy.take_victim(&self.slots, VICTIM_LOOKS)?;
        self.take_victim(victim)
    }

    fn take_victim(&mut self, victim: QueuedEntry) -> Option<EvictedBlock> {
        let on_disk = self.slots.find_entry(victim.entry)?.disk.record_place().is_some();
        let number = victim.entry;
        let block = if on_disk { self.take_block(number) } else { self.remove_entry(number) };
        Some(EvictedBlock { block: block?, is_on_disk: on_disk })
    }

    /// Fails where the tables do not fit together.
    #[cfg(test)]
    pub(crate) fn check_tables(&self) {
        self.slots.check_lists();
        let mut children: HashMap<u32, [u32; 2]> = HashMap::new();
        let (mut bytes, mut count, mut in_pool, mut on_disk) = (0, 0, 0, 0);
        for (number, entry) in self.slots.list_entries() {
            (bytes, count) = (bytes + entry.pool_bytes(), count + 1);
            in_pool += usize::from(entry.block.is_some());
            on_disk += usize::from(entry.disk.disk_place().is_some());
            assert!(
                entry.block.is_some() || entry.disk.record_place().is_some(),
                "it is somewhere"
            );
            assert!(entry.block.is_some() || !entry.is_queued, "what is on disk alone waits");
            assert_eq!(self.find_digest(entry.digest), Some(number));
            match entry.parent {
                None => assert_eq!(entry.position, 0),
                Some(parent) => {
                    let found = self.slots.find_entry(parent).expect("a parent is an entry");
                    assert_eq!(found.position + 1, entry.position);
                    assert_eq!((&found.namespace, found.model), (&entry.namespace, entry.model));
                    assert!(found.is_queued || !entry.is_queued, "a child goes first");
                    let of_parent = children.entry(parent).or_default();
                    of_parent[0] += 1;
                    if entry.block.is_some() {
                        assert!(
                            found.block.is_some(),
                            "in the pool a parent outlives its children"
                        );
                        of_parent[1] += 1;
                    }
                }
            }
        }
        for (number, entry) in self.slots.list_entries() {
            let counted = children.remove(&number).unwrap_or_default();
            assert_eq!(counted, [entry.children, entry.pool_children]);
        }
        assert_eq!((self.bytes, self.slots.count_entries()), (bytes, count));
        assert_eq!((self.pool_entries, self.disk_entries), (in_pool, on_disk));
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
