//! Leases and pins over the index: taken on what chains match, ended by whoever comes by later.

use super::PrefixIndex;
use super::block::HeldEntry;
use super::key::{KeyChain, KeyLineage};
use super::lease::{HoldTable, LeaseEntry, PinEntry, PinKey, PinLink};
use crate::error::StoreError;
use kvd_core::{LeaseId, ModelId, Namespace};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// A lease that is to be taken.
#[derive(Clone, Debug)]
pub struct LeaseRequest<'a> {
    /// Its id, which no lease had.
    pub id: LeaseId,
    /// Whose.
    pub namespace: &'a Namespace,
    /// The model.
    pub model: ModelId,
    /// The time now.
    pub now: Instant,
    /// When it ends.
    pub ends: Instant,
}

/// Pins that are to be set.
#[derive(Clone, Copy, Debug)]
pub struct PinRequest {
    /// The model.
    pub model: ModelId,
    /// The time now.
    pub now: Instant,
    /// When they end; none for those that are kept until they are taken back.
    pub ends: Option<Instant>,
}

/// Answer to [`PrefixIndex::pin_prefixes`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedPrefixes {
    /// Blocks of each chain that are pinned.
    pub blocks: Vec<usize>,
    /// Bytes of all blocks that are pinned now.
    pub pinned_bytes: u64,
}

/// A prefix that a chain matched.
struct HeldPrefix {
    blocks: usize,
    held: HeldEntry,
    lineage: KeyLineage,
}

impl PrefixIndex {
    /// [`PrefixIndex::match_prefixes`], and holds what was matched until the lease ends; where
    /// nothing was, no lease is taken.
    ///
    /// # Errors
    /// [`StoreError::LimitExceeded`].
    pub fn lease_prefixes(
        &self,
        request: &LeaseRequest<'_>,
        chains: &[KeyChain<'_>],
    ) -> Result<Vec<usize>, StoreError> {
        self.end_due(request.now);
        let found = self.hold_prefixes(request.model, chains);
        let blocks = found.iter().map(|found| found.as_ref().map_or(0, |f| f.blocks)).collect();
        let held: Vec<_> = found.into_iter().flatten().map(|found| found.held).collect();
        if held.is_empty() {
            return Ok(blocks);
        }
        let LeaseRequest { id, namespace, model, ends, .. } = *request;
        let mut holds = self.holds.lock();
        self.check_holds(holds.count_holds() as u64 + 1)?;
        let lease = LeaseEntry { namespace: namespace.clone(), model, ends, _held: held };
        holds.add_lease(id, lease);
        Ok(blocks)
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// [`StoreError::UnknownLease`] for one that has ended or is of others.
    pub fn release_lease(
        &self,
        namespace: &Namespace,
        id: LeaseId,
        now: Instant,
    ) -> Result<(), StoreError> {
        self.end_due(now);
        let lease = self.holds.lock().take_lease(namespace, id);
        lease.map(drop).ok_or(StoreError::UnknownLease { id })
    }

    /// Keeps the longest cached prefix of each chain until the pin ends or is taken back. Pinning
    /// the same again gives it another end. All are pinned or none.
    ///
    /// # Errors
    /// [`StoreError::LimitExceeded`] of pins or of pinned bytes.
    pub fn pin_prefixes(
        &self,
        request: PinRequest,
        chains: &[KeyChain<'_>],
    ) -> Result<PinnedPrefixes, StoreError> {
        let PinRequest { model, now, ends } = request;
        self.end_due(now);
        let mut holds = self.holds.lock();
        let found = self.hold_prefixes(model, chains);
        let blocks = found.iter().map(|found| found.as_ref().map_or(0, |f| f.blocks)).collect();
        let pin = |found: HeldPrefix| {
            let key = PinKey { model, lineage: found.lineage };
            (key, PinEntry { links: self.list_links(&found.held), ends })
        };
        // One prefix of several chains is pinned once.
        let pins: HashMap<_, _> = found.into_iter().flatten().map(pin).collect();
        let new = pins.iter().filter(|(key, _)| !holds.pins.contains_key(key));
        let new: Vec<_> = new.map(|(_, pin)| pin).collect();
        self.check_holds((holds.count_holds() + new.len()) as u64)?;
        let more: u64 = new.iter().map(|pin| pin.count_pin()).sum();
        let (pinned_bytes, max) = (holds.pinned_bytes + more, self.limits.pinned_bytes_max);
        if pinned_bytes > max {
            let taken_back: u64 = new.iter().map(|pin| pin.uncount_pin()).sum();
            debug_assert_eq!(taken_back, more);
            let (limit, asked) = ("cache.pinned_bytes_max", pinned_bytes);
            return Err(StoreError::LimitExceeded { limit, max, asked });
        }
        holds.pinned_bytes = pinned_bytes;
        pins.into_iter().for_each(|(key, pin)| holds.add_pin(key, pin));
        Ok(PinnedPrefixes { blocks, pinned_bytes })
    }

    /// Takes the pins back that are on prefixes of the chains; how many these were.
    pub fn unpin_prefixes(&self, model: ModelId, chains: &[KeyChain<'_>]) -> u64 {
        let mut holds = self.holds.lock();
        let mut gone = Vec::new();
        for chain in chains {
            let mut lineage = KeyLineage::default();
            for block in 0..chain.count_blocks() {
                lineage = self.hasher.extend_lineage(lineage, chain.block_key(block));
                gone.extend(holds.pins.remove(&PinKey { model, lineage }));
            }
        }
        Self::uncount_pins(&mut holds, &gone);
        gone.len() as u64
    }

    /// Ends leases and pins whose time is over.
    pub fn end_due(&self, now: Instant) {
        let mut holds = self.holds.lock();
        let leases = holds.take_due(now);
        let due = holds.due_pins(now);
        let pins: Vec<_> = due.iter().filter_map(|key| holds.pins.remove(key)).collect();
        Self::uncount_pins(&mut holds, &pins);
        drop(holds);
        drop((leases, pins));
    }

    fn check_holds(&self, asked: u64) -> Result<(), StoreError> {
        let max = self.limits.leases_max as u64;
        let limit = "cache.leases_max";
        if asked > max { Err(StoreError::LimitExceeded { limit, max, asked }) } else { Ok(()) }
    }

    /// The longest cached prefix of each chain, held.
    fn hold_prefixes(&self, model: ModelId, chains: &[KeyChain<'_>]) -> Vec<Option<HeldPrefix>> {
        let state = self.state.read();
        let hold = |chain| {
            let found = state.find_prefix(self.hasher, model, KeyLineage::default(), chain)?;
            let lineage = state.slots.find_entry(found.last)?.lineage;
            let held = state.hold_entry(found.last)?;
            Some(HeldPrefix { blocks: found.blocks, held, lineage })
        };
        chains.iter().map(hold).collect()
    }

    /// A held block and those before it.
    fn list_links(&self, held: &HeldEntry) -> Vec<PinLink> {
        let state = self.state.read();
        let links = state.slots.walk_up(held.entry);
        links.map(|(_, of)| PinLink { hold: Arc::clone(&of.hold), bytes: of.bytes }).collect()
    }

    /// Uncounts pins that were taken out of the table.
    pub(super) fn uncount_pins(holds: &mut HoldTable, pins: &[PinEntry]) {
        let bytes: u64 = pins.iter().map(PinEntry::uncount_pin).sum();
        holds.pinned_bytes -= bytes;
    }
}
