//! Rules of the cache: what is published is found, what is held stays, what is full makes room.

use super::harness::{Bench, shape};
use crate::{
    AttachedSequence, CacheLimits, CacheUsage, EvictionChoice, KeyChain, LeaseRequest, PackedKeys,
    PinRequest, PublishStop, PublishedBlocks, RowForm, StoreError,
};
use kvd_core::{Coded, ErrorCode, LeaseId, ModelId, Namespace, SequenceId};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const PAGE: u32 = 4;

/// Keys of a text, one a page; texts that begin alike have keys that begin alike.
pub(super) fn keys(text: &str) -> Vec<u8> {
    let ends = (1..=text.len()).map(|end| xxhash_rust::xxh3::xxh3_64(&text.as_bytes()[..end]));
    ends.flat_map(u64::to_le_bytes).collect()
}

pub(super) fn chain(keys: &[u8]) -> KeyChain<'_> {
    KeyChain::new(PackedKeys { bytes: keys, key_bytes: 8, key_tokens: PAGE }, PAGE).unwrap()
}

/// Values of a text: a letter fills a page.
pub(super) fn values(text: &str) -> Vec<u32> {
    text.bytes().flat_map(|letter| [u32::from(letter); PAGE as usize]).collect()
}

impl Bench {
    /// A sequence that holds a text.
    pub(super) fn write(&self, text: &str) -> SequenceId {
        let id = self.open();
        self.write_on(id, 0, text);
        id
    }

    fn write_on(&self, id: SequenceId, start: u32, text: &str) {
        (0..2).for_each(|layer| self.append(id, layer, start, &values(text)));
    }

    /// A sequence that holds a text and has published it.
    pub(super) fn publish_text(&self, text: &str) -> (SequenceId, PublishedBlocks) {
        let id = self.write(text);
        (id, self.publish(id, 0, &chain(&keys(text)), |_| false).unwrap())
    }

    /// Publishes a text and closes the sequence.
    pub(super) fn cache(&self, text: &str) {
        let (id, published) = self.publish_text(text);
        assert_eq!(published.stop, None, "{text}");
        self.store.close_sequence(self.ns(), id).unwrap();
    }

    pub(super) fn matched(&self, text: &str) -> usize {
        self.store.prefix_index().match_prefixes(self.model.id, &[chain(&keys(text))])[0]
    }

    pub(super) fn attach(&self, text: &str) -> AttachedSequence {
        let model = Arc::clone(&self.model);
        self.store.open_with_prefix(model, &chain(&keys(text)), None).unwrap()
    }

    pub(super) fn cache_usage(&self) -> CacheUsage {
        self.store.prefix_index().read_usage(Instant::now())
    }
}

pub(super) fn bench(sink: u32, recent: u32) -> Bench {
    Bench::cached(1 << 20, shape(1, PAGE, sink, recent), CacheLimits::default())
}

#[test]
fn a_published_prefix_is_found_and_reads_as_it_was_written() {
    let b = bench(2, 8);
    let (first, published) = b.publish_text("abcd");
    let wanted = PublishedBlocks { published: 4, existed: 0, stop: None, length: 16 };
    assert_eq!(published, wanted);
    // Its own window is still read raw.
    assert_eq!(b.states(first, 0), "rrpppppprrrrrrrr");
    assert_eq!([b.matched("abcd"), b.matched("abxy"), b.matched("x"), b.matched("")], [4, 2, 0, 0]);
    let AttachedSequence { id, length } = b.attach("abcx");
    assert_eq!(length, 12);
    for layer in 0..2 {
        assert_eq!(b.values(id, layer), values("abc"));
        assert_eq!(b.states(id, layer), "rrpppppppppp", "packed in the window too");
    }
    b.write_on(id, 12, "xyz");
    assert_eq!(b.values(id, 1), values("abcxyz"));
    b.store.close_sequence(b.ns(), first).unwrap();
    assert_eq!((b.matched("abcd"), b.values(id, 0)), (4, values("abcxyz")));
    // The close of the last sequence leaves the cache, and dropping that leaves nothing.
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.cache_usage().bytes, b.used());
    let dropped = b.store.prefix_index().drop_model_blocks(b.model.id);
    assert_eq!((dropped.dropped, dropped.held, b.used()), (4, 0, 0));
    assert_eq!(b.usage(), crate::ModelUsage::default());
    assert_eq!((b.matched("abcd"), b.store.view_count()), (0, 0));
}

#[test]
fn blocks_of_the_sink_are_cached_as_they_are() {
    let b = bench(6, 0);
    b.cache("abc");
    let AttachedSequence { id, length } = b.attach("abc");
    assert_eq!((length, b.values(id, 0)), (12, values("abc")));
    assert_eq!(b.states(id, 1), "rrrrrrpppppp");
    // Cut into the first block and written on: the cache has its own.
    b.store.truncate_sequence(b.ns(), id, 2).unwrap();
    (0..2).for_each(|layer| b.append(id, layer, 2, &[7, 7]));
    assert_eq!(b.values(id, 0), [97, 97, 7, 7]);
    let again = b.attach("abc");
    assert_eq!(b.values(again.id, 0), values("abc"));
}

#[test]
fn nothing_is_found_before_it_is_complete_on_every_layer() {
    let b = bench(0, 4);
    let id = b.open();
    b.append(id, 0, 0, &values("ab"));
    b.append(id, 1, 0, &values("ab")[..7]);
    let keys = keys("ab");
    let refused = b.store.begin_publish(b.ns(), id, 0, &chain(&keys)).unwrap_err();
    assert_eq!(refused, StoreError::RangeNotStored { asked: 8, stored: 7 });
    b.append(id, 1, 7, &values("b")[..1]);
    let mut ticket = b.store.begin_publish(b.ns(), id, 0, &chain(&keys)).unwrap();
    assert_eq!(ticket.layers_to_pack().count(), 2);
    assert_eq!(b.matched("ab"), 0, "a ticket shows nothing");
    let used = b.used();
    let layers: Vec<_> = ticket.layers_to_pack().collect();
    ticket.set_packed(layers[0], Vec::new());
    drop(ticket);
    assert_eq!((b.matched("ab"), b.used()), (0, used), "dropped: nothing has happened");
    // One layer's block that cannot be packed ends the publish before it.
    let published = b.publish(id, 0, &chain(&keys), |block| block == 1).unwrap();
    assert_eq!((published.published, published.stop), (1, Some(PublishStop::PoolFull)));
    assert_eq!(b.matched("ab"), 1);
    let published = b.publish(id, 4, &chain(&keys[8..]), |_| false).unwrap();
    assert_eq!((published.published, published.length, b.matched("ab")), (1, 8, 2));
}

#[test]
fn rows_that_cannot_be_packed_end_a_publish() {
    let b = bench(0, 4);
    let id = b.write("abc");
    let keys = keys("abc");
    let ticket = b.store.begin_publish(b.ns(), id, 0, &chain(&keys)).unwrap();
    let layer = ticket.layers_to_pack().next().unwrap();
    let batch = ticket.pack_batch(layer);
    assert_eq!(batch.tasks.iter().map(|task| task.block).collect::<Vec<_>>(), [2]);
    batch.give_up(0);
    let published = b.finish_publish(ticket, |_| true);
    assert_eq!((published.published, published.stop), (2, Some(PublishStop::Unpackable)));
    let published = b.publish(id, 0, &chain(&keys), |_| false).unwrap();
    assert_eq!((published.existed, published.stop), (2, Some(PublishStop::Unpackable)));
}

#[test]
fn the_first_to_publish_wins_and_changes_nobody() {
    let b = bench(0, 0);
    let (first, _) = b.publish_text("ab");
    let used = b.used();
    let (second, published) = b.publish_text("abc");
    assert_eq!((published.published, published.existed, published.length), (1, 2, 12));
    assert!(b.used() > used + used / 2, "the second keeps its own pages");
    // Two at once: the later commit finds the earlier's.
    let ids = ["xy", "xy"].map(|text| b.write(text));
    let keys = keys("xy");
    let tickets = ids.map(|id| b.store.begin_publish(b.ns(), id, 0, &chain(&keys)).unwrap());
    let outcomes = tickets.map(|ticket| b.finish_publish(ticket, |_| false));
    assert_eq!(outcomes.map(|o| (o.published, o.existed)), [(2, 0), (0, 2)]);
    for id in [first, second, ids[0], ids[1]] {
        b.store.close_sequence(b.ns(), id).unwrap();
    }
    assert_eq!((b.cache_usage().entries, b.cache_usage().bytes), (5, b.used()));
}

#[test]
fn a_publish_that_settles_is_read_as_it_is_found() {
    let b = bench(2, 8);
    b.cache("ab");
    let used = b.used();
    let id = b.write("abcd");
    let text = keys("abcd");
    let ticket = b.store.begin_publish(b.ns(), id, 0, &chain(&text)).unwrap().with_settling();
    let done = b.finish_publish(ticket, |_| false);
    assert_eq!((done.existed, done.published), (2, 2));
    let found = b.attach("abcd");
    for layer in 0..2 {
        assert_eq!(b.states(id, layer), "rrpppppppppppppp");
        assert_eq!(b.values(id, layer), values("abcd"));
        assert_eq!(b.states(found.id, layer), b.states(id, layer));
    }
    // It shares what existed, and keeps no rows of its own.
    assert_eq!(b.cache_usage().bytes, b.used());
    assert!(b.used() < 2 * used + used / 2);
    b.write_on(id, 16, "ef");
    assert_eq!(b.values(id, 0), values("abcdef"));
    assert_eq!(b.states(id, 1)[16..], *"rrrrrrrr");
}

#[test]
fn publishes_follow_what_the_sequence_has_published() {
    let b = bench(0, 0);
    let id = b.write("abcd");
    let text = keys("abcd");
    let begin = |start, keys: &[u8]| b.store.begin_publish(b.ns(), id, start, &chain(keys)).err();
    for start in [4, 2] {
        let gap = StoreError::PublishGap { start, published: 0, block_tokens: 4 };
        assert_eq!(begin(start, &text[8..]), Some(gap));
    }
    b.publish(id, 0, &chain(&text[..8]), |_| false).unwrap();
    b.publish(id, 4, &chain(&text[8..16]), |_| false).unwrap();
    assert_eq!(b.matched("abcd"), 2);
    // Again, and further; then a fork goes on from what it shares.
    let again = b.publish(id, 0, &chain(&text[..24]), |_| false).unwrap();
    assert_eq!((again.published, again.existed, again.length), (1, 2, 12));
    let fork = b.store.fork_sequence(b.ns(), id, Some(8)).unwrap().id;
    b.write_on(fork, 8, "xy");
    b.publish(fork, 8, &chain(&keys("abxy")[16..]), |_| false).unwrap();
    assert_eq!([b.matched("abxy"), b.matched("abcd")], [4, 3]);
    // What is cut is published anew under its new keys.
    b.store.truncate_sequence(b.ns(), id, 7).unwrap();
    assert_eq!(
        begin(8, b""),
        Some(StoreError::PublishGap { start: 8, published: 4, block_tokens: 4 })
    );
    (0..2).for_each(|layer| b.append(id, layer, 7, &[1]));
    b.publish(id, 4, &chain(&keys("aZ")[8..]), |_| false).unwrap();
    assert_eq!([b.matched("aZ"), b.matched("abcd")], [2, 3]);
    let changed = b.attach("aZ").id;
    assert_eq!(b.values(changed, 0)[4..], [98, 98, 98, 1]);
}

#[test]
fn a_publish_under_way_keeps_what_it_saw() {
    let b = bench(0, 8);
    let id = b.write("ab");
    let text = keys("ab");
    let ticket = b.store.begin_publish(b.ns(), id, 0, &chain(&text)).unwrap();
    b.store.truncate_sequence(b.ns(), id, 2).unwrap();
    (0..2).for_each(|layer| b.append(id, layer, 2, &[5, 5, 5]));
    b.finish_publish(ticket, |_| false);
    let attached = b.attach("ab");
    assert_eq!(b.values(attached.id, 0), values("ab"));
    assert_eq!(b.values(id, 0), [97, 97, 5, 5, 5]);
    // The cut sequence has published nothing of its own.
    let gap = b.store.begin_publish(b.ns(), id, 4, &chain(&text[8..])).unwrap_err();
    assert_eq!(gap.code(), ErrorCode::RangeGap);
    b.store.close_sequence(b.ns(), attached.id).unwrap();
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.cache_usage().bytes, b.used());
}

#[test]
fn keys_that_name_no_whole_prefix_are_caught() {
    let b = bench(0, 0);
    // The same key at two places of two texts.
    let id = b.write("ab");
    b.publish(id, 0, &chain(b"11111111shared__"), |_| false).unwrap();
    let other = b.write("xb");
    let published = b.publish(other, 0, &chain(b"22222222shared__"), |_| false).unwrap();
    assert_eq!((published.published, published.stop), (1, Some(PublishStop::KeyInUse)));
    let find = |keys: &[u8]| b.store.prefix_index().match_prefixes(b.model.id, &[chain(keys)])[0];
    assert_eq!(find(b"11111111shared__"), 2);
    assert_eq!(find(b"22222222shared__"), 1, "the second page is another's");
    assert_eq!(find(b"33333333shared__"), 0);
    assert_eq!(find(b"shared__"), 0);
}

#[test]
fn models_and_tenants_never_see_each_other() {
    let b = bench(0, 0);
    b.cache("ab");
    let index = b.store.prefix_index();
    assert_eq!(index.match_prefixes(ModelId(2), &[chain(&keys("ab"))]), [0]);
    let other = shape(2, PAGE, 0, 0);
    let opened = b.store.open_with_prefix(other, &chain(&keys("ab")), None).unwrap();
    assert_eq!(opened.length, 0);
}

fn lease<'a>(b: &'a Bench, id: u64, now: Instant, ms: u64) -> LeaseRequest<'a> {
    let ends = now + Duration::from_millis(ms);
    LeaseRequest { id: LeaseId(id), namespace: b.ns(), model: b.model.id, now, ends }
}

#[test]
fn a_lease_keeps_what_it_matched_until_it_ends() {
    let b = bench(0, 0);
    b.cache("abc");
    b.cache("xy");
    let index = b.store.prefix_index();
    let now = Instant::now();
    let (ab, none) = (keys("ab"), keys("q"));
    let blocks =
        index.lease_prefixes(&lease(&b, 7, now, 100), &[chain(&ab), chain(&none)]).unwrap();
    assert_eq!(blocks, [2, 0]);
    assert_eq!(index.lease_prefixes(&lease(&b, 8, now, 100), &[chain(&none)]).unwrap(), [0]);
    assert_eq!(index.read_usage(now).leases, 1, "none on nothing");
    while index.evict_block(None, now) {}
    assert_eq!([b.matched("abc"), b.matched("xy")], [2, 0]);
    let stranger = Namespace::new("stranger").unwrap();
    let unknown = StoreError::UnknownLease { id: LeaseId(7) };
    assert_eq!(index.release_lease(&stranger, LeaseId(7), now), Err(unknown.clone()));
    let later = now + Duration::from_millis(100);
    assert_eq!(index.release_lease(b.ns(), LeaseId(7), later), Err(unknown), "it has ended");
    assert!(index.evict_block(None, later));
    assert_eq!(b.matched("abc"), 1);
    index.lease_prefixes(&lease(&b, 9, later, 100), &[chain(&ab)]).unwrap();
    assert_eq!(index.release_lease(b.ns(), LeaseId(9), later), Ok(()));
    assert!(index.evict_block(None, later));
    assert_eq!(b.used(), 0);
}

#[test]
fn pins_keep_prefixes_within_a_limit_of_bytes() {
    let b = bench(0, 0);
    b.cache("abc");
    let block = b.cache_usage().bytes / 3;
    let limits = CacheLimits { pinned_bytes_max: 2 * block, ..CacheLimits::default() };
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 0), limits);
    b.cache("abc");
    let index = b.store.prefix_index();
    let (now, model) = (Instant::now(), b.model.id);
    let pin = |text: &str, ends| {
        index.pin_prefixes(PinRequest { model, now, ends }, &[chain(&keys(text))])
    };
    let refused = pin("abc", None).unwrap_err();
    let (limit, max) = ("cache.pinned_bytes_max", 2 * block);
    assert_eq!(refused, StoreError::LimitExceeded { limit, max, asked: 3 * block });
    assert_eq!(pin("ab", None).unwrap().pinned_bytes, 2 * block);
    let ends = Some(now + Duration::from_secs(1));
    assert_eq!(pin("a", ends).unwrap().pinned_bytes, 2 * block, "counted once");
    while index.evict_block(None, now) {}
    assert_eq!(b.matched("abc"), 2);
    assert_eq!(index.unpin_prefixes(model, &[chain(&keys("abc"))]), 2);
    assert_eq!(index.read_usage(now).pinned_bytes, 0);
    pin("ab", ends).unwrap();
    let later = now + Duration::from_secs(1);
    assert_eq!(index.read_usage(later).pinned_bytes, 0);
    while index.evict_block(None, later) {}
    assert_eq!((b.matched("ab"), b.used()), (0, 0));
}

/// A pool of so many cached pages of both layers, and nothing else.
fn small_pool(pages: u64, limits: CacheLimits) -> Bench {
    let b = bench(0, 0);
    b.cache("a");
    let bytes = b.cache_usage().bytes;
    Bench::cached(pages * bytes, shape(1, PAGE, 0, 0), limits)
}

#[test]
fn a_full_pool_evicts_what_nobody_holds_and_the_end_first() {
    let b = small_pool(12, CacheLimits::default());
    for text in ["abcd", "efgh"] {
        b.cache(text);
    }
    let mut stored = 0;
    for text in ["ijkl", "mnop", "qrst", "uvwx"] {
        b.cache(text);
        stored += b.matched(text);
    }
    let usage = b.cache_usage();
    assert_eq!(stored, 16, "each was found when it was new");
    assert!(usage.evicted_for_room > 8, "{usage:?}");
    assert_eq!(usage.evictions_blocked, 0);
    b.store.prefix_index().check_blocks();
    // Of a prefix that went in part, the start is left.
    let left: Vec<_> = ["abcd", "efgh", "ijkl", "mnop"].map(|text| b.matched(text)).into();
    assert!(left[0] == 0 && left.is_sorted(), "{left:?}");
}

#[test]
fn a_pool_full_of_held_blocks_is_full() {
    let b = small_pool(8, CacheLimits::default());
    let (held, _) = b.publish_text("abcd");
    let index = b.store.prefix_index();
    let id = b.open();
    let mut start = 0;
    let refused = loop {
        match b.begin(id, 0, start, 4) {
            Ok(ticket) => b.finish(ticket, &[start; 4], |_| false),
            Err(refused) => break refused,
        };
        start += 4;
    };
    assert_eq!(refused.code(), ErrorCode::PoolFull);
    assert!(index.read_usage(Instant::now()).evictions_blocked > 0);
    assert_eq!(b.matched("abcd"), 4);
    // Closed, it makes room.
    b.store.close_sequence(b.ns(), held).unwrap();
    b.append(id, 0, start, &[1; 4]);
    assert!(b.matched("abcd") < 4);
}

#[test]
fn the_cache_keeps_to_its_limits() {
    let limits = CacheLimits { entries_max: 3, ..CacheLimits::default() };
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 0), limits);
    b.cache("ab");
    b.cache("xy");
    assert_eq!((b.cache_usage().entries, b.cache_usage().evicted_by_limit), (3, 1));
    // What is being published holds itself: no block of it makes room for another.
    let (id, published) = b.publish_text("klmno");
    assert_eq!((published.published, published.stop), (3, Some(PublishStop::IndexFull)));
    b.store.close_sequence(b.ns(), id).unwrap();
    let none = CacheLimits { bytes_max: 0, ..CacheLimits::default() };
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 0), none);
    let (_, published) = b.publish_text("a");
    assert_eq!((published.published, published.stop), (0, Some(PublishStop::CacheFull)));
    let limits = CacheLimits { leases_max: 0, ..CacheLimits::default() };
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 0), limits);
    b.cache("a");
    let text = keys("a");
    let refused =
        b.store.prefix_index().lease_prefixes(&lease(&b, 1, Instant::now(), 9), &[chain(&text)]);
    assert_eq!(refused.unwrap_err().code(), ErrorCode::LimitExceeded);
}

#[test]
fn drops_take_what_is_free_and_leave_what_is_held() {
    let b = bench(0, 0);
    b.cache("abcd");
    b.cache("abxy");
    let index = b.store.prefix_index();
    let attached = b.attach("abc");
    let dropped = index.drop_prefixes(b.model.id, &[chain(&keys("abcd")), chain(&keys("q"))]);
    assert_eq!((dropped.dropped, dropped.held), (1, 3));
    let dropped = index.drop_prefixes(b.model.id, &[chain(&keys("abxy"))]);
    assert_eq!((dropped.dropped, dropped.held), (2, 2));
    assert_eq!([b.matched("abcd"), b.matched("abxy")], [3, 2]);
    assert_eq!(index.drop_model_blocks(b.model.id).held, 3);
    b.store.close_sequence(b.ns(), attached.id).unwrap();
    // A sequence may take along what it alone published.
    let (id, _) = b.publish_text("abcz");
    b.store.close_and_drop(b.ns(), id).unwrap();
    assert_eq!((b.matched("abcz"), b.used()), (0, 0));
}

#[test]
fn a_model_that_goes_takes_its_blocks_leases_and_pins_along() {
    let limits = CacheLimits { pinned_bytes_max: 1 << 20, ..CacheLimits::default() };
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 0), limits);
    b.cache("abc");
    let (index, now) = (b.store.prefix_index(), Instant::now());
    index.lease_prefixes(&lease(&b, 1, now, 1000), &[chain(&keys("abc"))]).unwrap();
    let pin = PinRequest { model: b.model.id, now, ends: None };
    index.pin_prefixes(pin, &[chain(&keys("ab"))]).unwrap();
    b.store.forget_model(b.model.id);
    let usage = index.read_usage(now);
    assert_eq!((usage.entries, usage.bytes, usage.leases, usage.pinned_bytes), (0, 0, 0, 0));
    assert_eq!((b.matched("abc"), b.used()), (0, 0));
    assert_eq!(
        index.release_lease(b.ns(), LeaseId(1), now).unwrap_err().code(),
        ErrorCode::UnknownLease
    );
}

#[test]
fn an_attached_block_that_is_cut_is_decoded_by_the_next_append() {
    let b = bench(0, 8);
    b.cache("abc");
    let AttachedSequence { id, .. } = b.attach("abc");
    b.store.truncate_sequence(b.ns(), id, 10).unwrap();
    let ticket = b.begin(id, 0, 10, 1).unwrap();
    assert!(matches!(ticket.row_copies()[0].from.form, RowForm::Pages(_)));
    b.finish(ticket, &[9], |_| false);
    assert_eq!(b.values(id, 0)[8..], [99, 99, 9]);
    assert_eq!(b.matched("abc"), 3);
}

#[test]
fn both_policies_serve_the_same_calls() {
    for eviction in [EvictionChoice::Lru, EvictionChoice::S3Fifo { small_percent: 10 }] {
        let b = small_pool(12, CacheLimits { eviction, ..CacheLimits::default() });
        b.cache("ab");
        for round in 0..20 {
            let used = b.attach("ab");
            assert_eq!(used.length, 8, "{eviction:?} {round}");
            b.store.close_sequence(b.ns(), used.id).unwrap();
            b.cache(&format!("{round:02}"));
        }
        assert_eq!(b.matched("ab"), 2, "{eviction:?}: used each time, it stays");
    }
}
