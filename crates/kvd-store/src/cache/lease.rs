//! Leases and pins: holds on cached blocks that outlast the call that took them.
//!
//! Owns [`HoldTable`]. One mutex, whose holder takes the index's lock for reading at most. A lease
//! ends after its time; whoever calls says what time it is. A pin of a user ends when it is taken
//! back, or after its time if it has one, and its bytes are counted.

use super::block::{EntryHold, HeldEntry};
use super::key::KeyLineage;
use kvd_core::{LeaseId, ModelId, Namespace};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// A lease on what some chains matched.
#[derive(Debug)]
pub(crate) struct LeaseEntry {
    pub(crate) namespace: Namespace,
    pub(crate) model: ModelId,
    pub(crate) ends: Instant,
    /// Its holds: they are there, and that is all.
    pub(crate) _held: Vec<HeldEntry>,
}

/// The prefix that a pin is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PinKey {
    pub(crate) model: ModelId,
    pub(crate) lineage: KeyLineage,
}

/// A block that a pin covers.
#[derive(Debug)]
pub(crate) struct PinLink {
    pub(crate) hold: Arc<EntryHold>,
    /// Its bytes when it was pinned.
    pub(crate) bytes: u64,
}

/// A pin of a user on a prefix.
#[derive(Debug)]
pub(crate) struct PinEntry {
    /// All its blocks: damage may take entries from the index whose bytes were counted.
    pub(crate) links: Vec<PinLink>,
    /// None for one that is kept until it is taken back.
    pub(crate) ends: Option<Instant>,
}

impl PinEntry {
    /// Counts the pin; bytes of the blocks that had none.
    pub(crate) fn count_pin(&self) -> u64 {
        let is_first = |link: &&PinLink| link.hold.user_pins.fetch_add(1, Relaxed) == 0;
        let count = |link: &PinLink| {
            link.hold.pinned_bytes.store(link.bytes, Relaxed);
            link.bytes
        };
        self.links.iter().filter(is_first).map(count).sum()
    }

    /// Takes that back; bytes of the blocks that have no pin any more.
    pub(crate) fn uncount_pin(&self) -> u64 {
        let is_last = |link: &&PinLink| link.hold.user_pins.fetch_sub(1, Relaxed) == 1;
        let bytes = |link: &PinLink| link.hold.pinned_bytes.load(Relaxed);
        self.links.iter().filter(is_last).map(bytes).sum()
    }
}

/// All leases and pins.
#[derive(Debug, Default)]
pub(crate) struct HoldTable {
    leases: HashMap<LeaseId, LeaseEntry>,
    ends: BTreeSet<LeaseEnd>,
    pub(crate) pins: HashMap<PinKey, PinEntry>,
    pub(crate) pinned_bytes: u64,
    /// No pin ends before.
    next_pin_end: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LeaseEnd {
    at: Instant,
    id: LeaseId,
}

impl HoldTable {
    /// Leases and pins.
    pub(crate) fn count_holds(&self) -> usize {
        self.leases.len() + self.pins.len()
    }

    pub(crate) fn count_leases(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn add_lease(&mut self, id: LeaseId, lease: LeaseEntry) {
        self.ends.insert(LeaseEnd { at: lease.ends, id });
        self.leases.insert(id, lease);
    }

    /// Takes a lease of a namespace out.
    pub(crate) fn take_lease(&mut self, namespace: &Namespace, id: LeaseId) -> Option<LeaseEntry> {
        self.leases.get(&id).filter(|lease| lease.namespace == *namespace)?;
        self.remove_lease(id)
    }

    fn remove_lease(&mut self, id: LeaseId) -> Option<LeaseEntry> {
        let lease = self.leases.remove(&id)?;
        self.ends.remove(&LeaseEnd { at: lease.ends, id });
        Some(lease)
    }

    /// Takes the leases out whose time is over.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<LeaseEntry> {
        let mut due = Vec::new();
        while let Some(end) = self.ends.first().copied().filter(|end| end.at <= now) {
            due.extend(self.remove_lease(end.id));
        }
        due
    }

    /// Adds a pin, or gives it another time.
    pub(crate) fn add_pin(&mut self, key: PinKey, pin: PinEntry) {
        let ends = [self.next_pin_end, pin.ends].into_iter().flatten().min();
        self.next_pin_end = ends;
        self.pins.insert(key, pin);
    }

    /// The pins whose time is over.
    pub(crate) fn due_pins(&mut self, now: Instant) -> Vec<PinKey> {
        if self.next_pin_end.is_none_or(|end| end > now) {
            return Vec::new();
        }
        let is_due = |pin: &PinEntry| pin.ends.is_some_and(|ends| ends <= now);
        let later = self.pins.values().filter(|pin| !is_due(pin)).filter_map(|pin| pin.ends);
        self.next_pin_end = later.min();
        self.pins.iter().filter(|(_, pin)| is_due(pin)).map(|(key, _)| *key).collect()
    }

    /// Takes the leases of a model out.
    pub(crate) fn take_leases_of(&mut self, model: ModelId) -> Vec<LeaseEntry> {
        let leases = self.leases.iter().filter(|(_, lease)| lease.model == model);
        let ids: Vec<_> = leases.map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.remove_lease(id)).collect()
    }

    /// Takes the pins of a model out.
    pub(crate) fn take_pins_of(&mut self, model: ModelId) -> Vec<PinEntry> {
        let pins = self.pins.extract_if(|key, _| key.model == model);
        pins.map(|(_, pin)| pin).collect()
    }
}
