//! Ids that mean one thing for ever: 32 bits of the boot above, 32 of a counter below.
//!
//! The counter shows as a keyed permutation of itself. So an id is never given twice, no record of
//! the ids that were is kept, and who has one cannot count on to another's.

use crate::error::{Coded, ErrorCode};
use crate::id::{LeaseId, ModelId, SequenceId, SessionId};
use siphasher::sip::SipHasher13;
use std::fmt;
use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// 128 random bits of one start of a daemon. Written as 32 hexadecimal digits; the first eight are
/// those that its ids carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BootId([u8; 16]);

impl BootId {
    /// The boot of these random bytes; none where the bits that ids carry are all 0, since small
    /// numbers would then pass for ids. Draw again.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Option<Self> {
        let boot = Self(random);
        (boot.id_bits() != 0).then_some(boot)
    }

    /// The upper half of every id of this boot; never 0.
    #[must_use]
    pub fn id_bits(self) -> u32 {
        let [a, b, c, d, ..] = self.0;
        u32::from_be_bytes([a, b, c, d])
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// All ids of one boot.
///
/// The lower half of an id is a Feistel network over the counter, keyed at random at each boot: a
/// bijection of 32 bits, whose inverse finds the counter and so the device of a sequence.
#[derive(Clone)]
pub struct IdSpace {
    boot: BootId,
    hash: SipHasher13,
}

// The key stays secret.
impl fmt::Debug for IdSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdSpace").field("boot", &self.boot).finish_non_exhaustive()
    }
}

/// Rounds of the permutation. Four make a Feistel network of random functions hard to tell from a
/// random permutation; halves as short as 16 bits ask for more.
const ROUNDS: u8 = 10;

/// Counters of sequences, leases, models and sessions, apart, so that no number is ever an id of
/// two kinds.
const SEQUENCES: Range<u64> = 0..0xb000_0000;
const LEASES: Range<u64> = SEQUENCES.end..0xf000_0000;
const MODELS: Range<u64> = LEASES.end..0xf800_0000;
const SESSIONS: Range<u64> = MODELS.end..1 << 32;

impl IdSpace {
    /// Ids of a boot under a random key.
    #[must_use]
    pub fn new(boot: BootId, key: [u8; 16]) -> Self {
        Self { boot, hash: SipHasher13::new_with_key(&key) }
    }

    /// The boot.
    #[must_use]
    pub fn boot(&self) -> BootId {
        self.boot
    }

    /// A counter of model ids. An [`IdSpace`] has one.
    #[must_use]
    pub fn model_counter(self: &Arc<Self>) -> IdCounter<ModelId> {
        IdCounter::new(self, MODELS.start, 1, MODELS.end, ModelId)
    }

    /// A counter of session ids. An [`IdSpace`] has one.
    #[must_use]
    pub fn session_counter(self: &Arc<Self>) -> IdCounter<SessionId> {
        IdCounter::new(self, SESSIONS.start, 1, SESSIONS.end, SessionId)
    }

    /// A counter of the sequence ids of device `index` of `count`. An [`IdSpace`] has one of each.
    #[must_use]
    pub fn sequence_counter(self: &Arc<Self>, index: u64, count: u64) -> IdCounter<SequenceId> {
        IdCounter::new(self, SEQUENCES.start + index, count, SEQUENCES.end, SequenceId)
    }

    /// A counter of the lease ids of device `index` of `count`. An [`IdSpace`] has one of each.
    #[must_use]
    pub fn lease_counter(self: &Arc<Self>, index: u64, count: u64) -> IdCounter<LeaseId> {
        IdCounter::new(self, LEASES.start + index, count, LEASES.end, LeaseId)
    }

    /// Which of `count` devices a lease is of: none for a number that cannot be a lease of this
    /// boot.
    #[must_use]
    pub fn device_of_lease(&self, id: LeaseId, count: u64) -> Option<u64> {
        let counter = self.recover_counter(id.0).filter(|counter| LEASES.contains(counter))?;
        Some((counter - LEASES.start) % count)
    }

    /// Which of `count` devices a sequence is on, if it is on any: none for a number that cannot be
    /// a sequence of this boot.
    #[must_use]
    pub fn device_of(&self, id: SequenceId, count: u64) -> Option<u64> {
        let counter = self.recover_counter(id.0).filter(|counter| SEQUENCES.contains(counter))?;
        Some(counter % count)
    }

    /// The boot's bits of an id that another boot gave. None for ids of this one, and for numbers
    /// that no boot gives.
    #[must_use]
    pub fn other_boot(&self, id: u64) -> Option<u32> {
        let bits = (id >> 32) as u32;
        (bits != 0 && bits != self.boot.id_bits()).then_some(bits)
    }

    fn scramble_counter(&self, counter: u64) -> u64 {
        let (mut left, mut right) = ((counter >> 16) as u16, counter as u16);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ self.mix_half(round, right));
        }
        u64::from(self.boot.id_bits()) << 32 | u64::from(left) << 16 | u64::from(right)
    }

    fn recover_counter(&self, id: u64) -> Option<u64> {
        if (id >> 32) as u32 != self.boot.id_bits() {
            return None;
        }
        let (mut left, mut right) = ((id >> 16) as u16, id as u16);
        for round in (0..ROUNDS).rev() {
            (left, right) = (right ^ self.mix_half(round, left), left);
        }
        Some(u64::from(left) << 16 | u64::from(right))
    }

    fn mix_half(&self, round: u8, half: u16) -> u16 {
        let mut hash = self.hash;
        let [high, low] = half.to_be_bytes();
        hash.write(&[round, high, low]);
        hash.finish() as u16
    }
}

/// Hands out ids, each once.
#[derive(Debug)]
pub struct IdCounter<Id> {
    space: Arc<IdSpace>,
    next: AtomicU64,
    step: u64,
    end: u64,
    make: fn(u64) -> Id,
}

impl<Id> IdCounter<Id> {
    fn new(space: &Arc<IdSpace>, start: u64, step: u64, end: u64, make: fn(u64) -> Id) -> Self {
        Self { space: space.clone(), next: AtomicU64::new(start), step, end, make }
    }

    /// An id that was never given out.
    ///
    /// # Errors
    /// When all were.
    pub fn next(&self) -> Result<Id, IdsExhausted> {
        let add = |next: u64| (next < self.end).then(|| next + self.step);
        let counter = self.next.fetch_update(Relaxed, Relaxed, add).map_err(|_| IdsExhausted)?;
        Ok((self.make)(self.space.scramble_counter(counter)))
    }

    #[doc(hidden)]
    /// Goes on as if all but `left` ids had been given out; for tests of the end.
    pub fn skip_to_last(&self, left: u64) {
        let count = (self.end - self.next.load(Relaxed)).div_ceil(self.step);
        let skipped = count.saturating_sub(left) * self.step;
        self.next.fetch_add(skipped, Relaxed);
    }
}

/// Every id of this boot was given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this boot has given out all of its ids, and none is given twice: restart the daemon")]
pub struct IdsExhausted;

impl Coded for IdsExhausted {
    fn code(&self) -> ErrorCode {
        ErrorCode::LimitExceeded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn space(boot: u8, key: u8) -> Arc<IdSpace> {
        Arc::new(IdSpace::new(BootId::new([boot; 16]).unwrap(), [key; 16]))
    }

    proptest! {
        #[test]
        fn an_id_leads_back_to_its_counter(counter in 0..1u64 << 32, key: [u8; 16]) {
            let ids = IdSpace::new(BootId::new([7; 16]).unwrap(), key);
            let id = ids.scramble_counter(counter);
            prop_assert_eq!(ids.recover_counter(id), Some(counter));
            prop_assert_eq!(id >> 32, 0x0707_0707);
        }
    }

    #[test]
    fn ids_are_new_and_their_devices_are_found() {
        let ids = space(1, 2);
        let (models, sessions) = (ids.model_counter(), ids.session_counter());
        let mut seen = BTreeSet::new();
        for device in 0..3 {
            let sequences = ids.sequence_counter(device, 3);
            let leases = ids.lease_counter(device, 3);
            for _ in 0..10_000 {
                let id = sequences.next().unwrap();
                assert_eq!(ids.device_of(id, 3), Some(device));
                assert!(seen.insert(id.0));
                let model = models.next().unwrap();
                assert!(seen.insert(model.0));
                assert_eq!(ids.device_of(SequenceId(model.0), 3), None, "a model's id");
                let lease = leases.next().unwrap();
                assert_eq!(ids.device_of_lease(lease, 3), Some(device));
                assert_eq!(ids.device_of_lease(LeaseId(id.0), 3), None, "a sequence's id");
                assert_eq!(ids.device_of(SequenceId(lease.0), 3), None, "a lease's id");
                assert!(seen.insert(lease.0));
                let session = sessions.next().unwrap();
                assert!(seen.insert(session.0));
                assert_eq!(ids.device_of(SequenceId(session.0), 3), None, "a session's id");
            }
        }
    }

    #[test]
    fn nobody_counts_to_a_neighbour() {
        let ids = space(1, 2);
        let sequences = ids.sequence_counter(0, 1);
        let given: BTreeSet<u64> = (0..10_000).map(|_| sequences.next().unwrap().0).collect();
        // Random ones have 10,000 x 10,000 x 64 / 2^32, about 1.5, pairs as near as this.
        let near = |id: u64| (1..=32).any(|step| given.contains(&(id + step)));
        let found = given.iter().filter(|id| near(**id)).count();
        assert!(found < 12, "{found} ids have a neighbour within 32");
        // Nor does a difference come again, as with a stride.
        let order: Vec<u64> = {
            let sequences = ids.sequence_counter(0, 1);
            (0..10_000).map(|_| sequences.next().unwrap().0).collect()
        };
        let strides: BTreeSet<u64> =
            order.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        assert!(strides.len() > 9_990, "{}", strides.len());
    }

    #[test]
    fn another_key_gives_other_ids() {
        let (one, two) = (space(1, 2), space(1, 3));
        let same = (0..1000)
            .filter(|counter| one.scramble_counter(*counter) == two.scramble_counter(*counter))
            .count();
        assert!(same <= 1, "{same}");
    }

    #[test]
    fn ids_of_another_boot_and_of_none_are_told_apart() {
        let (ids, other) = (space(1, 2), space(9, 2));
        let id = other.sequence_counter(0, 1).next().unwrap();
        assert_eq!(ids.device_of(id, 1), None);
        assert_eq!(ids.other_boot(id.0), Some(0x0909_0909));
        let own = ids.sequence_counter(0, 1).next().unwrap();
        assert_eq!(ids.other_boot(own.0), None);
        assert_eq!(ids.other_boot(7), None);
        assert_eq!(BootId::new([0; 16]), None);
    }

    #[test]
    fn the_last_id_is_followed_by_an_error_and_never_by_the_first() {
        let ids = space(1, 2);
        let sequences = ids.sequence_counter(1, 3);
        let first = sequences.next().unwrap();
        sequences.skip_to_last(2);
        for _ in 0..2 {
            let id = sequences.next().unwrap();
            assert_ne!(id, first);
            assert_eq!(ids.device_of(id, 3), Some(1));
        }
        for _ in 0..3 {
            assert_eq!(sequences.next(), Err(IdsExhausted));
        }
        let models = ids.model_counter();
        models.skip_to_last(1);
        let last_model = models.next().unwrap();
        assert_eq!(models.next(), Err(IdsExhausted));
        let sessions = ids.session_counter();
        assert_ne!(sessions.next().unwrap().0, last_model.0);
        sessions.skip_to_last(0);
        assert_eq!(sessions.next(), Err(IdsExhausted));
        assert_eq!(IdsExhausted.code(), ErrorCode::LimitExceeded);
    }

    #[test]
    fn a_boot_is_written_with_the_bits_of_its_ids_first() {
        let boot = BootId::new([0xab; 16]).unwrap();
        assert_eq!(boot.to_string(), "ab".repeat(16));
        assert!(boot.to_string().starts_with(&format!("{:08x}", boot.id_bits())));
    }
}
