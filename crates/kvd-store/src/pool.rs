//! A fixed budget of page memory and the guards that hold parts of it.
//!
//! Owns who has which extent: [`ReservedSlot`] (exclusive, not readable) becomes [`PoolSlot`]
//! (readable, clone = pin); dropping either is the way back. One mutex guards the allocator; it is
//! the last lock of the crate's order and no guard is ever dropped while it is held.

use crate::allocator::{ArenaAllocator, SlotRegion, taken_bytes};
use crate::cache::{EVICTED_PER_CALL_MAX, PrefixIndex};
use crate::ledger::SlotAccount;
use crate::quota::{DeviceQuotas, NamespaceAccount, QuotaExceeded, QuotaKind};
use crate::reclaim::ReclaimQueue;
use crate::view_list::DiscardedViews;
use kvd_core::{Extent, Namespace};
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// One arena's memory, handed out in extents.
pub struct ArenaPool {
    tier: &'static str,
    /// Extents at a time, whatever their length: each takes book-keeping beside the arena.
    slots_max: u64,
    allocator: Mutex<ArenaAllocator>,
    reclaim: Arc<ReclaimQueue>,
    /// Cached blocks, which make room. Weak: they hold slots of this pool.
    cache: OnceLock<Weak<PrefixIndex>>,
    /// Accounts of namespaces, where they are counted.
    quotas: OnceLock<DeviceQuotas>,
}

/// State of a pool right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Name of the tier: `gpu`, `host`, …
    pub tier: &'static str,
    /// Bytes in all.
    pub capacity_bytes: u64,
    /// Bytes handed out, rounding to granules included. Those of a long sequence go down soon
    /// after it was closed: a thread gives them back in batches.
    pub used_bytes: u64,
    /// Bytes of the largest reservation that can succeed, of rows or of pages.
    pub largest_free_bytes: u64,
    /// Free bytes that only rows can have, in slots of the sizes that they have now.
    pub idle_row_bytes: u64,
    /// Extents handed out.
    pub slots: u64,
}

/// No free range is large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "pool {tier} is full: {needed} bytes needed for {}, {free} of {capacity} free, the largest \
     range has {largest_free}, and {reserved} are reserved for other namespaces; close or truncate \
     sequences and try again, or give the daemon a larger pool",
    match region { SlotRegion::Rows => "rows", SlotRegion::Pages => "pages" }
)]
pub struct PoolFull {
    /// Name of the tier.
    pub tier: &'static str,
    /// Use of the bytes.
    pub region: SlotRegion,
    /// Bytes asked for, rounded to granules.
    pub needed: u64,
    /// Free bytes in all.
    pub free: u64,
    /// Bytes of the largest free range.
    pub largest_free: u64,
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes of it that other namespaces alone may take now.
    pub reserved: u64,
}

/// As many extents are handed out as there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "pool {tier} has {slots_max} rows and pages of blocks, its most (device.pool_slots_max); close \
     or truncate sequences and try again, or store blocks of more tokens"
)]
pub struct SlotsUsedUp {
    /// Name of the tier.
    pub tier: &'static str,
    /// The most.
    pub slots_max: u64,
}

/// Why bytes could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The pool has none.
    #[error(transparent)]
    PoolFull(#[from] PoolFull),
    /// The pool has no extent for them.
    #[error(transparent)]
    SlotsUsedUp(#[from] SlotsUsedUp),
    /// The namespace may have no more.
    #[error(transparent)]
    Quota(#[from] QuotaExceeded),
}

/// The lack that a reservation met, before anything was done about it.
enum PoolShortage {
    Pool(PoolFull),
    Slots(SlotsUsedUp),
    Quota(Arc<NamespaceAccount>),
}

/// Bytes that somebody wants.
struct WantedBytes<'a> {
    region: SlotRegion,
    len_bytes: u64,
    account: Option<&'a Arc<NamespaceAccount>>,
}

impl ArenaPool {
    /// A pool over an arena of `capacity_bytes` bytes, rounded down to 64-byte granules.
    #[must_use]
    pub fn new(tier: &'static str, capacity_bytes: u64) -> Arc<Self> {
        Self::with_slots(tier, capacity_bytes, u64::MAX)
    }

    /// [`ArenaPool::new`] that hands out so many extents at a time, at most.
    #[must_use]
    pub fn with_slots(tier: &'static str, capacity_bytes: u64, slots_max: u64) -> Arc<Self> {
        let allocator = Mutex::new(ArenaAllocator::new(capacity_bytes));
        let (cache, quotas) = (OnceLock::new(), OnceLock::new());
        Arc::new(Self { tier, slots_max, allocator, reclaim: Arc::default(), cache, quotas })
    }

    /// Takes `len_bytes` bytes for pages, for the caller alone.
    ///
    /// # Errors
    /// As [`ArenaPool::reserve_in`].
    pub fn reserve_pages(self: &Arc<Self>, len_bytes: u64) -> Result<ReservedSlot, ReserveError> {
        self.reserve_in(SlotRegion::Pages, len_bytes)
    }

    /// [`ArenaPool::reserve_pages`] for a namespace, whose own cached blocks may go for it.
    ///
    /// # Errors
    /// As [`ArenaPool::reserve_in`].
    pub fn reserve_pages_for(
        self: &Arc<Self>,
        namespace: &Namespace,
        len_bytes: u64,
    ) -> Result<ReservedSlot, ReserveError> {
        self.reserve_slot(SlotRegion::Pages, len_bytes, Some(namespace))
    }

    /// Takes `len_bytes` bytes for rows of a namespace, as [`ArenaPool::reserve_pages_for`] does
    /// for pages.
    ///
    /// # Errors
    /// As [`ArenaPool::reserve_in`].
    pub fn reserve_rows_for(
        self: &Arc<Self>,
        namespace: &Namespace,
        len_bytes: u64,
    ) -> Result<ReservedSlot, ReserveError> {
        self.reserve_slot(SlotRegion::Rows, len_bytes, Some(namespace))
    }

    /// Takes `len_bytes` bytes, for the caller alone. A pool that is full first frees what was
    /// closed before, and then evicts cached blocks: call without a lock.
    ///
    /// # Errors
    /// When no free range holds them; nothing changes but that some cached blocks may have gone.
    pub fn reserve_in(
        self: &Arc<Self>,
        region: SlotRegion,
        len_bytes: u64,
    ) -> Result<ReservedSlot, ReserveError> {
        self.reserve_slot(region, len_bytes, None)
    }

    /// Has the blocks of an index make room.
    pub(crate) fn evict_from(&self, cache: &Arc<PrefixIndex>) {
        self.cache.get_or_init(|| Arc::downgrade(cache));
    }

    /// Counts what namespaces take from now on.
    pub(crate) fn count_for(&self, quotas: &DeviceQuotas) {
        self.quotas.get_or_init(|| quotas.clone());
    }

    /// [`ArenaPool::reserve_in`] for a namespace, if it is known for whom.
    pub(crate) fn reserve_slot(
        self: &Arc<Self>,
        region: SlotRegion,
        len_bytes: u64,
        namespace: Option<&Namespace>,
    ) -> Result<ReservedSlot, ReserveError> {
        let quotas = self.quotas.get().zip(namespace);
        let account = quotas.map(|(quotas, name)| quotas.table.open_account(name));
        let wanted = WantedBytes { region, len_bytes, account: account.as_ref() };
        let mut evicted = 0;
        loop {
            let seen = self.reclaim.count_batches();
            let short = match self.try_reserve(&wanted) {
                Ok(slot) => return Ok(slot),
                Err(short) => short,
            };
            if self.reclaim.free_or_wait(seen) {
                continue;
            }
            let Some(cache) = self.cache.get().and_then(Weak::upgrade) else {
                return Err(short.refuse_bytes(len_bytes));
            };
            // At its quota a namespace makes room of its own.
            let evict = || match (&short, namespace) {
                (PoolShortage::Quota(_), Some(own)) => cache.evict_own(own, Instant::now()),
                _ => cache.evict_block(namespace, Instant::now()),
            };
            if evicted == EVICTED_PER_CALL_MAX || !evict() {
                cache.note_refusal();
                return Err(short.refuse_bytes(len_bytes));
            }
            evicted += 1;
        }
    }

    fn try_reserve(
        self: &Arc<Self>,
        wanted: &WantedBytes<'_>,
    ) -> Result<ReservedSlot, PoolShortage> {
        let &WantedBytes { region, len_bytes, account } = wanted;
        let needed = taken_bytes(len_bytes).unwrap_or(u64::MAX);
        let quotas = self.quotas.get();
        let device = quotas.map_or(0, |quotas| quotas.device);
        let reserving = quotas.map(|quotas| quotas.table.list_reserving());
        let mut allocator = self.allocator.lock();
        if allocator.count_slots() >= self.slots_max {
            let (tier, slots_max) = (self.tier, self.slots_max);
            return Err(PoolShortage::Slots(SlotsUsedUp { tier, slots_max }));
        }
        let free = allocator.capacity_bytes() - allocator.used_bytes();
        let is_other =
            |of: &&Arc<NamespaceAccount>| account.is_none_or(|own| !Arc::ptr_eq(own, of));
        let others = reserving.iter().flat_map(|accounts| accounts.iter()).filter(is_other);
        let reserved: u64 = others.map(|of| of.unused_reserve(device)).sum();
        let full = |allocator: &ArenaAllocator| {
            PoolShortage::Pool(PoolFull {
                tier: self.tier,
                region,
                needed,
                free,
                largest_free: allocator.largest_range_bytes(),
                capacity: allocator.capacity_bytes(),
                reserved,
            })
        };
        if reserved > 0 && needed.saturating_add(reserved) > free {
            return Err(full(&allocator));
        }
        if let Some(account) = account
            && !account.try_take_pool(device, needed)
        {
            return Err(PoolShortage::Quota(Arc::clone(account)));
        }
        let Some(offset) = allocator.take_slot(region, len_bytes) else {
            account.inspect(|account| account.give_pool(device, needed));
            return Err(full(&allocator));
        };
        let (pool, extent) = (Arc::clone(self), Extent { offset, len: len_bytes });
        Ok(ReservedSlot { pool, region, extent, account: account.cloned(), returned: false })
    }

    /// Frees views: at once when they are few, else on the pool's thread.
    pub(crate) fn discard_views(&self, views: DiscardedViews) {
        self.reclaim.discard_views(views);
    }

    /// The queue of what waits to be freed.
    #[cfg(test)]
    pub(crate) fn reclaim_queue(&self) -> &Arc<ReclaimQueue> {
        &self.reclaim
    }

    /// Waits until all that was closed is free.
    #[cfg(test)]
    pub(crate) fn finish_reclaim(&self) {
        while self.reclaim.free_or_wait(self.reclaim.count_batches()) {}
    }

    /// Says what is handed out and what is free.
    #[must_use]
    pub fn read_usage(&self) -> PoolUsage {
        let allocator = self.allocator.lock();
        PoolUsage {
            tier: self.tier,
            capacity_bytes: allocator.capacity_bytes(),
            used_bytes: allocator.used_bytes(),
            largest_free_bytes: allocator.largest_free_bytes(),
            idle_row_bytes: allocator.idle_bytes(),
            slots: allocator.count_slots(),
        }
    }
}

impl PoolShortage {
    /// The refusal, once nothing helped.
    fn refuse_bytes(self, len_bytes: u64) -> ReserveError {
        match self {
            Self::Pool(full) => full.into(),
            Self::Slots(used_up) => used_up.into(),
            Self::Quota(account) => {
                let needed = taken_bytes(len_bytes).unwrap_or(u64::MAX);
                account.refuse_amount(QuotaKind::PoolBytes, needed).into()
            }
        }
    }
}

impl Drop for ArenaPool {
    fn drop(&mut self) {
        self.reclaim.end_thread();
    }
}

impl fmt::Debug for ArenaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `usage` would take the lock, and a formatter may run anywhere.
        f.debug_struct("Pool").field("tier", &self.tier).finish_non_exhaustive()
    }
}

/// Memory that its owner fills and nobody reads yet; dropping it gives the bytes back.
#[derive(Debug)]
#[must_use = "dropping a reservation gives the bytes back"]
pub struct ReservedSlot {
    pool: Arc<ArenaPool>,
    region: SlotRegion,
    extent: Extent,
    /// Who is charged for the bytes.
    account: Option<Arc<NamespaceAccount>>,
    /// The bytes were given back already.
    returned: bool,
}

impl ReservedSlot {
    /// Where the bytes are; as long as was asked for.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Gives the bytes back, to the pool and to who was charged for them.
    fn return_bytes(&mut self, allocator: &mut MutexGuard<'_, ArenaAllocator>) {
        let Extent { offset, len } = self.extent;
        allocator.give_slot(self.region, offset, len);
        if let Some(account) = &self.account {
            let device = self.pool.quotas.get().map_or(0, |quotas| quotas.device);
            account.give_pool(device, taken_bytes(len).unwrap_or(u64::MAX));
        }
        self.returned = true;
    }

    /// Makes the bytes readable by whoever holds the slot.
    #[must_use]
    pub fn seal_slot(self) -> PoolSlot {
        PoolSlot(Arc::new(SlotInner { account: OnceLock::new(), reserved: self }))
    }
}

impl Drop for ReservedSlot {
    fn drop(&mut self) {
        if !self.returned {
            let pool = Arc::clone(&self.pool);
            self.return_bytes(&mut pool.allocator.lock());
        }
    }
}

/// Readable memory; a clone is a pin, and the last drop gives the bytes back.
#[derive(Clone, Debug)]
pub struct PoolSlot(Arc<SlotInner>);

#[derive(Debug)]
struct SlotInner {
    /// Set once a sequence holds the slot: takes its bytes off the model's ledger in its drop.
    account: OnceLock<SlotAccount>,
    reserved: ReservedSlot,
}

impl PoolSlot {
    /// Where the bytes are.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.0.reserved.extent
    }

    /// Bytes the slot takes from the pool: its length, rounded up to granules.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        taken_bytes(self.0.reserved.extent.len).unwrap_or(u64::MAX)
    }

    /// Counts the slot on a ledger from now to its end; a slot is counted once.
    pub(crate) fn attach_account(&self, account: impl FnOnce() -> SlotAccount) {
        self.0.account.get_or_init(account);
    }

    /// How the slot is counted, once it is.
    pub(crate) fn slot_account(&self) -> Option<&SlotAccount> {
        self.0.account.get()
    }

    /// Whether nobody else holds the slot. Exclusive access makes the answer last: what nobody
    /// else holds can only be cloned from here.
    pub(crate) fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
    }
}

/// Slots that nobody holds any more, to be given back under one lock.
#[derive(Debug, Default)]
pub(crate) struct FreedSlots(Vec<ReservedSlot>);

impl FreedSlots {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes a slot when nobody else holds it.
    pub(crate) fn take_slot(&mut self, slot: PoolSlot) {
        self.0.extend(Arc::into_inner(slot.0).map(|inner| inner.reserved));
    }

    /// Gives the bytes back. Those of another pool than the first's go one by one.
    pub(crate) fn give_back(mut self) {
        let Some(pool) = self.0.first().map(|reserved| Arc::clone(&reserved.pool)) else {
            return;
        };
        let mut allocator = pool.allocator.lock();
        for reserved in self.0.iter_mut().filter(|reserved| Arc::ptr_eq(&reserved.pool, &pool)) {
            reserved.return_bytes(&mut allocator);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_is_the_way_back() {
        let pool = ArenaPool::new("host", 1024);
        let first = pool.reserve_in(SlotRegion::Rows, 100).unwrap();
        assert_eq!(first.extent(), Extent { offset: 0, len: 100 });
        let slot = pool.reserve_pages(64).unwrap().seal_slot();
        assert_eq!(slot.extent().offset, 1024 - 64);
        assert_eq!((slot.reserved_bytes(), pool.read_usage().used_bytes), (64, 192));
        let pin = slot.clone();
        drop(slot);
        drop(first);
        assert_eq!((pool.read_usage().used_bytes, pool.read_usage().slots), (64, 1));
        drop(pin);
        assert_eq!(pool.read_usage().used_bytes, 0);
        assert_eq!(pool.read_usage().largest_free_bytes, 1024);
    }

    #[test]
    fn extents_have_a_limit_of_their_own() {
        let pool = ArenaPool::with_slots("host", 1024, 2);
        let held = [64, 128].map(|len| pool.reserve_pages(len).unwrap());
        let error = pool.reserve_in(SlotRegion::Rows, 64).unwrap_err();
        let used_up = SlotsUsedUp { tier: "host", slots_max: 2 };
        assert_eq!(error, ReserveError::SlotsUsedUp(used_up));
        assert!(error.to_string().contains("device.pool_slots_max"), "{error}");
        drop(held);
        drop(pool.reserve_in(SlotRegion::Rows, 64).unwrap());
    }

    #[test]
    fn full_says_what_is_missing() {
        let pool = ArenaPool::new("host", 256);
        let _held = pool.reserve_pages(128).unwrap();
        let error = pool.reserve_pages(129).unwrap_err();
        let wanted = PoolFull {
            tier: "host",
            region: SlotRegion::Pages,
            needed: 192,
            free: 128,
            largest_free: 128,
            capacity: 256,
            reserved: 0,
        };
        assert_eq!(error, ReserveError::PoolFull(wanted));
        assert!(
            error.to_string().contains("192 bytes needed for pages, 128 of 256 free"),
            "{error}"
        );
        assert_eq!(pool.read_usage().slots, 1);
        assert!(pool.reserve_pages(128).is_ok());
    }
}
