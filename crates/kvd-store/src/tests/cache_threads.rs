//! Threads that publish, attach, lease and evict at once: nobody waits for ever, everybody reads
//! what was published, and nothing is left.

use super::harness::{Bench, shape};
use super::prefixes::{PAGE, chain, keys, values};
use crate::{CacheLimits, LeaseRequest, ModelUsage, PinRequest, StoreError};
use kvd_core::{Coded, ErrorCode, LeaseId, SequenceId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const THREADS: u64 = 4;
const ROUNDS: u64 = 400;

/// A text of up to five letters, which many threads come to.
fn text_of(round: u64) -> String {
    let bits = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let letter = |place: u64| char::from(b'a' + (bits >> (2 * place) & 1) as u8);
    (0..1 + bits % 5).map(letter).collect()
}

/// Stores what a sequence lacks of a text; false where the pool has no room.
fn complete(b: &Bench, id: SequenceId, length: u32, text: &str) -> bool {
    let wanted = &values(text)[length as usize..];
    (0..2).all(|layer| {
        if wanted.is_empty() {
            return true;
        }
        match b.begin(id, layer, length, wanted.len() as u32) {
            Ok(ticket) => {
                b.finish(ticket, wanted, |_| false);
                true
            }
            Err(StoreError::PoolFull(_)) => false,
            Err(error) => panic!("{error}"),
        }
    })
}

fn run_thread(b: &Bench, thread: u64) {
    let index = b.store.prefix_index();
    for round in 0..ROUNDS {
        let number = thread * ROUNDS + round;
        let text = text_of(number);
        let bytes = keys(&text);
        let (now, id) = (Instant::now(), LeaseId(number + 1));
        let ends = now + Duration::from_millis(number % 3);
        let lease = LeaseRequest { id, namespace: b.ns(), model: b.model.id, now, ends };
        let leased = index.lease_prefixes(&lease, &[chain(&bytes)]).unwrap()[0] as u32;
        let model = Arc::clone(&b.model);
        let opened = b.store.open_with_prefix(model, &chain(&bytes), None).unwrap();
        assert!(opened.length >= leased * PAGE || ends <= Instant::now());
        let whole = complete(b, opened.id, opened.length, &text);
        if whole {
            assert_eq!(b.values(opened.id, (number % 2) as u32), values(&text));
            let ticket = b.store.begin_publish(b.ns(), opened.id, 0, &chain(&bytes)).unwrap();
            let ticket = if number.is_multiple_of(3) { ticket.with_settling() } else { ticket };
            b.finish_publish(ticket, |_| number.is_multiple_of(7));
            assert_eq!(b.values(opened.id, 0), values(&text));
        }
        match number % 5 {
            0 => b.store.truncate_sequence(b.ns(), opened.id, 1).unwrap_or(()),
            1 => {
                let fork = b.store.fork_sequence(b.ns(), opened.id, None).unwrap().id;
                b.store.close_sequence(b.ns(), fork).unwrap();
            }
            2 => {
                let pin = PinRequest { model: b.model.id, now, ends: Some(ends) };
                index.pin_prefixes(pin, &[chain(&bytes)]).unwrap();
                index.unpin_prefixes(b.model.id, &[chain(&bytes)]);
            }
            3 => drop(index.drop_prefixes(b.model.id, &[chain(&bytes)])),
            _ => drop(index.evict_block(None, now)),
        }
        let closed = if number.is_multiple_of(11) {
            b.store.close_and_drop(b.ns(), opened.id).map(drop)
        } else {
            b.store.close_sequence(b.ns(), opened.id)
        };
        closed.unwrap();
        if let Err(error) = index.release_lease(b.ns(), id, Instant::now()) {
            assert_eq!(error.code(), ErrorCode::UnknownLease);
        }
    }
}

#[test]
fn threads_share_the_cache_and_leave_nothing() {
    for granules in [200, 1 << 12] {
        let limits = CacheLimits { pinned_bytes_max: 1 << 20, ..CacheLimits::default() };
        let b = Bench::cached(granules * 64, shape(1, PAGE, 2, 6), limits);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let b = &b;
                scope.spawn(move || run_thread(b, thread));
            }
        });
        let index = b.store.prefix_index();
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(index.check_blocks().iter().map(|block| block.bytes).sum::<u64>(), b.used());
        index.end_due(far);
        while index.evict_block(None, far) {}
        let usage = index.read_usage(far);
        assert!(usage.published > 0);
        assert_eq!((usage.entries, usage.bytes, usage.leases, usage.pinned_bytes), (0, 0, 0, 0));
        assert_eq!((b.used(), b.usage()), (0, ModelUsage::default()));
        assert_eq!(b.store.view_count(), 0);
    }
}
