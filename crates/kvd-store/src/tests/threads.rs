//! Threads that append to, fork, cut and read sequences of one store at the same time.

use super::harness::{Bench, shape};
use crate::{ForkedSequence, ModelUsage, StoreError};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

#[test]
fn threads_on_own_and_forked_sequences_do_not_disturb_one_another() {
    let b = Bench::new(1 << 22, shape(1, 4, 3, 6));
    let base = b.open();
    b.fill(base, 0..22);
    thread::scope(|scope| {
        for thread in 0..4u32 {
            let b = &b;
            scope.spawn(move || {
                let own = b.open();
                let mut end = 0;
                for round in 0..60u32 {
                    b.fill(own, end..end + 1 + round % 7);
                    end += 1 + round % 7;
                    let ForkedSequence { id: fork, length } =
                        b.store.fork_sequence(b.ns(), base, None).unwrap();
                    let pinned = b.pin(fork, 0);
                    let mine = [1000 * (thread + 1) + round; 9];
                    b.append(fork, 0, length, &mine);
                    b.append(fork, 1, length, &mine[..5]);
                    let cut = length - round % 9;
                    b.store.truncate_sequence(b.ns(), fork, cut).unwrap();
                    b.append(fork, 0, cut, &mine);
                    let values: Vec<u32> = (0..cut).chain(mine).collect();
                    assert_eq!(b.values(fork, 0), values);
                    let shown: Vec<u32> = b.show(&pinned).iter().map(|t| t.value).collect();
                    assert_eq!(shown, (0..length).collect::<Vec<_>>());
                    b.store.close_sequence(b.ns(), fork).unwrap();
                    assert_eq!(b.values(own, 1), (0..end).collect::<Vec<_>>());
                }
                b.store.close_sequence(b.ns(), own).unwrap();
            });
        }
        // The base moves on meanwhile, in steps that every fork finds on both layers.
        let b = &b;
        scope.spawn(move || (22..80).for_each(|token| b.fill(base, token..token + 1)));
    });
    assert_eq!(b.values(base, 0), (0..80).collect::<Vec<_>>());
    b.store.close_sequence(b.ns(), base).unwrap();
    assert_eq!(b.used(), 0);
    assert_eq!(b.usage(), ModelUsage::default());
}

#[test]
fn threads_on_one_layer_take_turns() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 4));
    let id = b.open();
    let refused = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let length = b.pin(id, 0).length;
                    if length >= 150 {
                        break;
                    }
                    match b.store.begin_append(
                        b.ns(),
                        id,
                        kvd_core::LayerIndex(0),
                        length,
                        1,
                        u64::from(length),
                    ) {
                        Ok(crate::BegunAppend::Ticket(ticket)) => {
                            b.finish(ticket, &[length], |_| false);
                        }
                        Ok(crate::BegunAppend::Replayed { length: now }) => assert!(now > length),
                        Err(StoreError::SequenceBusy { .. }) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            thread::yield_now();
                        }
                        // Later than the appends that are remembered.
                        Err(StoreError::RangeOverlap { .. }) => {
                            assert!(b.pin(id, 0).length > length + 1);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    let length = b.pin(id, 0).length;
    assert_eq!(b.values(id, 0), (0..length).collect::<Vec<_>>());
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.used(), 0);
}
