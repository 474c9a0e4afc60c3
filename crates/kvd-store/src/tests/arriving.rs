//! Rules of sequences whose prefix is on its way: each layer is read once it has come and no
//! earlier, and what does not come is refused and leaves nothing behind.

use super::disk::{Disk, evict_all, plan, written};
use super::harness::Bench;
use super::prefixes::{PAGE, chain, keys, values};
use crate::{ArrivingPrefix, CacheLimits, FilledPrefix, StoreError, StoredLayer};
use kvd_core::{LayerIndex, SequenceId};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Opens on a text whose first layer has come.
fn open_arriving(b: &Bench, disk: &Disk, text: &str) -> ArrivingPrefix {
    let plan = plan(b, text).expect("some of it is on disk alone");
    let before = b.store.prefix_index().hold_before(&plan).expect("a parent in the pool");
    let read = |read| disk.read(b, read).expect("a record");
    let blocks: Vec<Vec<StoredLayer>> = plan.missing.iter().map(read).collect();
    let filled = FilledPrefix { plan, before, blocks, ready: 1 };
    b.store.open_arriving(Arc::clone(&b.model), filled, None).expect("opens")
}

fn pin_layer(b: &Bench, id: SequenceId, layer: u32) -> Result<(), StoreError> {
    b.store.pin_range(b.ns(), id, LayerIndex(layer), .., None).map(drop)
}

#[derive(Default)]
struct CountWakes(AtomicUsize);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_layer_is_read_once_it_has_come_and_the_index_gets_whole_blocks() {
    let (b, disk) = written(&["abcd"], CacheLimits::default());
    evict_all(&b);
    disk.promote(&b, "ab");
    let arriving = open_arriving(&b, &disk, "abcd");
    let id = arriving.opened.id;
    assert_eq!(arriving.opened.length, 4 * PAGE);
    assert_eq!(b.values(id, 0), values("abcd"));
    let refused = |error: &StoreError| matches!(error, StoreError::LayerOnItsWay { layer: 1, .. });
    assert!(refused(&pin_layer(&b, id, 1).unwrap_err()));
    // Whatever needs all layers waits for all.
    assert!(refused(&b.store.fork_sequence(b.ns(), id, None).unwrap_err()));
    assert!(refused(&b.store.truncate_sequence(b.ns(), id, PAGE).unwrap_err()));
    let texts = keys("abcd");
    assert!(refused(&b.store.begin_publish(b.ns(), id, 0, &chain(&texts)).unwrap_err()));
    // Nobody else finds what has not come.
    assert_eq!(b.attach("abcd").length, 2 * PAGE);
    let arrival = b.store.find_arrival(b.ns(), id).unwrap();
    let wakes = Arc::<CountWakes>::default();
    let waker = Waker::from(Arc::clone(&wakes));
    let mut wait = pin!(arrival.wait_layers(2));
    assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert_eq!(b.store.finish_arrival(arriving), 2);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    assert_eq!(wait.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Ready(()));
    assert!(b.store.find_arrival(b.ns(), id).is_none());
    assert_eq!(b.values(id, 1), values("abcd"));
    assert_eq!(b.attach("abcd").length, 4 * PAGE);
    // It counts as published, so what follows is published behind it.
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    assert_eq!(b.store.prefix_index().find_residency(&held).pool, 4);
    b.store.prefix_index().check_blocks();
}

#[test]
fn what_does_not_come_is_refused_by_name_and_goes_with_its_sequence() {
    let (b, disk) = written(&["abcd"], CacheLimits::default());
    evict_all(&b);
    let arriving = open_arriving(&b, &disk, "abcd");
    let id = arriving.opened.id;
    let arrival = b.store.find_arrival(b.ns(), id).unwrap();
    arriving.note_lost("corrupt");
    let waker = Waker::noop();
    assert!(pin!(arrival.wait_layers(2)).poll(&mut Context::from_waker(waker)).is_ready());
    drop(arrival);
    assert_eq!(b.values(id, 0), values("abcd"), "what came is there");
    let error = pin_layer(&b, id, 1).unwrap_err();
    assert!(
        matches!(error, StoreError::PrefixLost { layers: 1, reason: "corrupt", .. }),
        "{error}"
    );
    assert_eq!(b.cache_usage().pool_entries, 0, "nobody else finds it in the pool");
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!((b.used(), b.matched("abcd")), (0, 4));
}

#[test]
fn an_arrival_that_is_given_up_is_lost_and_one_without_a_sequence_is_not_wanted() {
    let (b, disk) = written(&["abcd"], CacheLimits::default());
    evict_all(&b);
    let arriving = open_arriving(&b, &disk, "abcd");
    let id = arriving.opened.id;
    assert!(arriving.is_wanted());
    drop(arriving);
    let error = pin_layer(&b, id, 1).unwrap_err();
    assert!(matches!(error, StoreError::PrefixLost { reason: "abandoned", .. }), "{error}");
    b.store.close_sequence(b.ns(), id).unwrap();
    let arriving = open_arriving(&b, &disk, "abcd");
    b.store.close_sequence(b.ns(), arriving.opened.id).unwrap();
    assert!(!arriving.is_wanted());
    drop(arriving);
    assert_eq!((b.used(), b.cache_usage().pool_entries), (0, 0));
    b.store.prefix_index().check_blocks();
}

#[test]
fn blocks_that_the_cache_has_no_room_for_stay_the_sequences_own() {
    let (b, _) = written(&["ab"], CacheLimits::default());
    let all = b.cache_usage().bytes;
    let limits = CacheLimits { bytes_max: all, ..CacheLimits::default() };
    let (b, disk) = written(&["ab"], limits);
    evict_all(&b);
    let (other, _) = b.publish_text("xy");
    let arriving = open_arriving(&b, &disk, "ab");
    let id = arriving.opened.id;
    assert_eq!(b.store.finish_arrival(arriving), 0);
    assert_eq!((b.values(id, 0), b.values(id, 1)), (values("ab"), values("ab")));
    assert!(b.cache_usage().bytes <= all);
    b.store.close_sequence(b.ns(), id).unwrap();
    b.store.close_sequence(b.ns(), other).unwrap();
    evict_all(&b);
    assert_eq!(b.used(), 0);
}
