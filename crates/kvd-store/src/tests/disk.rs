//! Rules of blocks that are on disk: they leave the pool and come back as they were; what cannot be
//! read is a shorter prefix.

use super::events::Watcher;
use super::harness::{Bench, shape};
use super::prefixes::{PAGE, chain, keys, values};
use crate::{
    BlockToRead, BlockToWrite, CacheLimits, DiskBlock, DiskPlace, HeldChain, LeaseRequest,
    PackedBytes, PackedPages, QuotaKind, QuotaLimits, RawSlot, ReadPlan, RecordPlace, RecordUse,
    RemoteBlocks, RemotePlace, SlotRegion, StoredLayer, WriteTarget,
};
use kvd_core::LeaseId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A layer as a record has it.
struct LayerRecord {
    rows: Option<(u32, Vec<u8>)>,
    pages: Option<(Arc<[u32]>, PackedBytes, Vec<u8>)>,
}

/// Records by place.
#[derive(Default)]
pub(super) struct Disk(BTreeMap<u64, Vec<LayerRecord>>);

impl Disk {
    fn write(&mut self, b: &Bench, write: &BlockToWrite) -> DiskPlace {
        let bytes = b.bytes.lock();
        let copy = |extent: kvd_core::Extent| {
            bytes[extent.offset as usize..extent.end() as usize].to_vec()
        };
        let record = |layer: StoredLayer| LayerRecord {
            rows: layer.rows.map(|rows| (rows.rows(), copy(rows.extent()))),
            pages: layer
                .pages
                .map(|pages| (Arc::clone(pages.ends()), *pages.accounting(), copy(pages.extent()))),
        };
        let place = 1 + self.0.len() as u64;
        self.0.insert(place, write.list_layers().into_iter().map(record).collect());
        DiskPlace([place, 0, 0, 0])
    }

    /// Writes what a chain has that is not on disk; how many blocks.
    fn write_chain(&mut self, b: &Bench, chain: &HeldChain) -> usize {
        let writes = b.store.plan_writes(chain, WriteTarget::Disk, u64::MAX);
        for write in &writes {
            let place = self.write(b, write);
            b.store.prefix_index().note_written(write, Some(RecordPlace::Disk(place)));
        }
        writes.len()
    }

    pub(super) fn read(&self, b: &Bench, read: &BlockToRead) -> Option<Vec<StoredLayer>> {
        let RecordPlace::Disk(place) = read.place else { return None };
        let layers = self.0.get(&place.0[0])?;
        let fill = |slot: crate::ReservedSlot, from: &[u8]| {
            let at = slot.extent().offset as usize;
            b.bytes.lock()[at..at + from.len()].copy_from_slice(from);
            slot.seal_slot()
        };
        let layer = |record: &LayerRecord| {
            let rows = record.rows.as_ref().map(|(rows, bytes)| {
                let slot = b.pool.reserve_in(SlotRegion::Rows, bytes.len() as u64).unwrap();
                RawSlot::new(fill(slot, bytes), *rows)
            });
            let pages = record.pages.as_ref().map(|(ends, packed, bytes)| {
                let slot = b.pool.reserve_pages(bytes.len() as u64).unwrap();
                PackedPages::new(fill(slot, bytes), Arc::clone(ends), *packed)
            });
            StoredLayer { rows, pages }
        };
        Some(layers.iter().map(layer).collect())
    }

    /// Brings a chain back to the pool; blocks that came.
    pub(super) fn promote(&self, b: &Bench, text: &str) -> usize {
        let (index, mut came) = (b.store.prefix_index(), 0);
        let Some(plan) = plan(b, text) else { return 0 };
        for read in &plan.missing {
            let Some(layers) = self.read(b, read) else {
                index.remove_unreadable(read);
                break;
            };
            assert!(b.store.bring_read(&b.model, read, layers));
            came += 1;
        }
        index.settle_reads(plan);
        came
    }
}

pub(super) fn plan(b: &Bench, text: &str) -> Option<ReadPlan> {
    b.store.prefix_index().plan_reads(b.model.id, &chain(&keys(text)), usize::MAX)
}

pub(super) fn evict_all(b: &Bench) -> u64 {
    let evict = || b.store.prefix_index().evict_block(None, Instant::now());
    let evicted = std::iter::repeat_with(evict).take_while(|evicted| *evicted).count() as u64;
    b.store.prefix_index().check_blocks();
    evicted
}

/// A bench whose cache has some texts, all on disk, and those closed.
pub(super) fn written(texts: &[&str], limits: CacheLimits) -> (Bench, Disk) {
    let b = Bench::cached(1 << 20, shape(1, PAGE, 2, 4), limits);
    let mut disk = Disk::default();
    for text in texts {
        let (id, _) = b.publish_text(text);
        let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
        disk.write_chain(&b, &held);
        drop(held);
        b.store.close_sequence(b.ns(), id).unwrap();
    }
    (b, disk)
}

/// [`written`], told to a watcher.
pub(super) fn written_and_watched(texts: &[&str], watcher: &Arc<Watcher>) -> (Bench, Disk) {
    let limits = CacheLimits { events: Some(watcher.clone()), ..CacheLimits::default() };
    written(texts, limits)
}

#[test]
fn what_is_on_disk_leaves_the_pool_is_found_and_comes_back_as_it_was() {
    let (b, disk) = written(&["abcd"], CacheLimits::default());
    let in_pool = |b: &Bench, text: &str| {
        let keys = keys(text);
        b.store.prefix_index().count_in_pool(b.model.id, &[chain(&keys)], &[text.len()])[0]
    };
    assert_eq!((b.matched("abcd"), in_pool(&b, "abcd")), (4, 4));
    assert!(plan(&b, "abcd").is_none(), "all of it is in the pool");
    assert_eq!(evict_all(&b), 4);
    assert_eq!((b.used(), b.matched("abcd"), in_pool(&b, "abcd")), (0, 4, 0));
    let usage = b.cache_usage();
    assert_eq!([usage.entries, usage.pool_entries, usage.disk_entries, usage.bytes], [4, 0, 4, 0]);
    assert_eq!(usage.evicted_to_disk, 4);
    // Without reading, nothing of it is there to attach.
    assert_eq!(b.attach("abcd").length, 0);
    assert_eq!(disk.promote(&b, "abcx"), 3);
    assert_eq!((in_pool(&b, "abcd"), b.cache_usage().brought_back), (3, 3));
    let attached = b.attach("abcd");
    assert_eq!(attached.length, 12);
    for layer in 0..2 {
        assert_eq!(b.values(attached.id, layer), values("abc"));
        assert_eq!(b.states(attached.id, layer), "rrpppppppppp");
    }
    let usage = b.usage();
    assert_eq!(usage.stored.raw_bytes + usage.stored.packed_bytes, b.used());
    b.store.prefix_index().check_blocks();
    // They go by their turn again, and nothing is left.
    b.store.close_sequence(b.ns(), attached.id).unwrap();
    assert_eq!((evict_all(&b), b.used()), (3, 0));
}

#[test]
fn blocks_that_are_to_be_written_stay_and_a_write_that_failed_leaves_them_unwritten() {
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 4), CacheLimits::default());
    let (id, _) = b.publish_text("abc");
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    let writes = b.store.plan_writes(&held, WriteTarget::Disk, u64::MAX);
    let positions: Vec<_> = writes.iter().map(|write| write.digests.position).collect();
    assert_eq!(positions, [0, 1, 2], "those before others first");
    assert_eq!(writes[1].digests.parent_lineage, writes[0].digests.lineage);
    assert!(b.store.plan_writes(&held, WriteTarget::Disk, u64::MAX).is_empty(), "once");
    let found = b.store.prefix_index().find_residency(&held);
    assert_eq!((found.queued, found.durable, found.pool), (3, 0, 3));
    b.store.close_sequence(b.ns(), id).unwrap();
    drop(held);
    assert_eq!(evict_all(&b), 0);
    let index = b.store.prefix_index();
    index.note_written(&writes[0], Some(RecordPlace::Disk(DiskPlace([9; 4]))));
    index.note_written(&writes[1], None);
    drop(writes);
    assert_eq!(evict_all(&b), 3);
    // The first stays on disk, the others had nowhere to go.
    assert_eq!(b.matched("abc"), 1);
}

#[test]
fn a_limit_of_bytes_takes_the_first_blocks_alone() {
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 4), CacheLimits::default());
    let (id, _) = b.publish_text("abc");
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    let all = b.cache_usage().bytes;
    assert_eq!(b.store.plan_writes(&held, WriteTarget::Disk, all / 3).len(), 1);
    assert_eq!(b.store.plan_writes(&held, WriteTarget::Disk, all).len(), 2);
}

#[test]
fn a_namespace_at_its_quota_of_the_disk_writes_no_more_and_another_does() {
    let limits = CacheLimits::default();
    let table = limits.quotas.table.clone();
    let b = Bench::cached(1 << 20, shape(1, PAGE, 0, 4), limits);
    let (id, _) = b.publish_text("abcd");
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    let block = b.cache_usage().bytes / 4;
    let account = table.open_account(b.ns());
    let used = || account.used_amount(QuotaKind::DiskBytes);
    let set_limit = |bytes| {
        let mut limits = QuotaLimits::default();
        limits.set_limit(QuotaKind::DiskBytes, bytes);
        table.set_limits(b.ns(), &limits);
    };
    set_limit(Some(3 * block - 1));
    let mut disk = Disk::default();
    // What waits to be written counts, and so does what is there.
    let writes = b.store.plan_writes(&held, WriteTarget::Disk, u64::MAX);
    assert_eq!((writes.len(), used()), (2, 2 * block));
    assert!(b.store.plan_writes(&held, WriteTarget::Disk, u64::MAX).is_empty());
    assert_eq!(account.refused_count(QuotaKind::DiskBytes), 2);
    let index = b.store.prefix_index();
    let place = disk.write(&b, &writes[0]);
    index.note_written(&writes[0], Some(RecordPlace::Disk(place)));
    index.note_written(&writes[1], None);
    assert_eq!(used(), block, "what was not written is given back");
    drop(writes);
    set_limit(None);
    assert_eq!(disk.write_chain(&b, &held), 3);
    assert_eq!(used(), 4 * block);
    // It leaves the pool, comes back, and goes: the count is that of the records throughout.
    drop(held);
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(evict_all(&b), 4);
    assert_eq!(used(), 4 * block);
    assert_eq!(disk.promote(&b, "abcd"), 4);
    assert_eq!(used(), 4 * block);
    index.drop_model_blocks(b.model.id);
    assert_eq!(used(), 0);
}

#[test]
fn a_record_that_cannot_be_read_is_a_shorter_prefix_with_all_behind_it() {
    let (b, mut disk) = written(&["abcd", "abxy"], CacheLimits::default());
    evict_all(&b);
    let missing = plan(&b, "abcd").unwrap().missing;
    let RecordPlace::Disk(third) = missing[2].place else { panic!("not on disk") };
    disk.0.remove(&third.0[0]);
    drop(missing);
    assert_eq!(disk.promote(&b, "abcd"), 2);
    assert_eq!([b.matched("abcd"), b.matched("abxy")], [2, 4]);
    b.store.prefix_index().check_blocks();
    // Published again it is there again.
    b.cache("abcd");
    assert_eq!(b.matched("abcd"), 4);
}

#[test]
fn a_segment_that_goes_takes_what_is_on_disk_alone_and_leaves_the_pool() {
    let (b, disk) = written(&["abcd", "xyz"], CacheLimits::default());
    evict_all(&b);
    disk.promote(&b, "ab");
    let index = b.store.prefix_index();
    let records: Vec<_> = index
        .list_disk_blocks(b.model.id)
        .into_iter()
        .filter(|block| block.place.0[0] <= 5)
        .map(|block| (block.digests, block.place))
        .collect();
    assert_eq!(records.len(), 5);
    let uses = index.find_record_uses(&records);
    assert_eq!(uses.iter().filter(|of| **of == RecordUse::InPool).count(), 2);
    assert_eq!(uses.iter().filter(|of| **of == RecordUse::Idle).count(), 3);
    let moved = DiskPlace([77; 4]);
    index.move_record(&records[0].0, records[0].1, moved);
    assert_eq!(index.find_record_uses(&records)[0], RecordUse::Stale);
    index.move_record(&records[0].0, moved, records[0].1);
    // Cold blocks of the second text lie behind its first, and go with it.
    assert_eq!(index.forget_records(&records), 5);
    assert_eq!([b.matched("abcd"), b.matched("xyz")], [2, 0]);
    index.check_blocks();
    assert_eq!((evict_all(&b), b.matched("abcd"), b.used()), (2, 0, 0));
}

#[test]
fn a_model_that_comes_again_finds_what_is_on_disk() {
    let limits = CacheLimits { seed: 3, ..CacheLimits::default() };
    let (b, disk) = written(&["abcd", "abx"], limits.clone());
    // The hashes mean the same under the same seed and scope, whatever the model's id is.
    b.store.prefix_index().set_scope(b.model.id, b.model.id.0);
    let blocks = b.store.forget_model(b.model.id);
    assert_eq!((blocks.len(), b.matched("abcd"), b.used()), (5, 0, 0));
    let again = Bench::cached(1 << 20, shape(8, PAGE, 2, 4), limits);
    let index = again.store.prefix_index();
    index.set_scope(again.model.id, 1);
    let restored = index.restore_blocks(again.ns(), again.model.id, &blocks);
    assert_eq!((restored, again.matched("abcd"), again.matched("abx")), (5, 4, 3));
    assert_eq!(disk.promote(&again, "abcd"), 4);
    let attached = again.attach("abcd");
    assert_eq!(again.values(attached.id, 1), values("abcd"));
    // Without its parent nothing is restored.
    let orphans: Vec<DiskBlock> =
        blocks.into_iter().filter(|block| block.digests.position > 0).collect();
    let empty = Bench::cached(1 << 20, shape(8, PAGE, 2, 4), CacheLimits::default());
    let index = empty.store.prefix_index();
    assert_eq!(index.restore_blocks(empty.ns(), empty.model.id, &orphans), 0);
}

#[test]
fn a_lease_on_what_is_on_disk_keeps_it_and_a_full_index_gives_up_what_nobody_holds() {
    let limits = CacheLimits { entries_max: 5, ..CacheLimits::default() };
    let (b, disk) = written(&["abc", "xy"], limits);
    evict_all(&b);
    let (now, index) = (Instant::now(), b.store.prefix_index());
    let request = LeaseRequest {
        id: LeaseId(1),
        namespace: b.ns(),
        model: b.model.id,
        now,
        ends: now + Duration::from_secs(60),
    };
    let leased_keys = keys("abc");
    assert_eq!(index.lease_prefixes(&request, &[chain(&leased_keys)]).unwrap(), [3]);
    b.cache("q");
    assert_eq!([b.matched("abc"), b.matched("xy"), b.matched("q")], [3, 1, 1]);
    b.cache("rs");
    assert_eq!([b.matched("abc"), b.matched("xy")], [3, 0]);
    assert_eq!(disk.promote(&b, "abc"), 3);
    assert_eq!(b.attach("abc").length, 12);
}

#[test]
fn what_is_on_disk_alone_and_published_again_is_in_the_pool_again() {
    let (b, _) = written(&["abcd"], CacheLimits::default());
    evict_all(&b);
    let (id, published) = b.publish_text("abcdef");
    assert_eq!((published.published, published.existed, published.stop), (2, 4, None));
    let usage = b.cache_usage();
    assert_eq!([usage.entries, usage.pool_entries, usage.disk_entries], [6, 6, 4]);
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.attach("abcdef").length, 24);
    b.store.prefix_index().check_blocks();
}

#[test]
fn dropped_blocks_say_which_records_go_too() {
    let (b, _) = written(&["abcd"], CacheLimits::default());
    evict_all(&b);
    let index = b.store.prefix_index();
    let dropped = index.drop_prefixes(b.model.id, &[chain(&keys("abcd"))]);
    assert_eq!((dropped.dropped, dropped.on_disk.len(), b.matched("abcd")), (4, 4, 0));
}

/// Makes blocks of a text known that a shared store has, from `first` on.
pub(super) fn find_remotely(b: &Bench, text: &str, first: usize, count: u64) -> usize {
    let places: Vec<_> = (0..count).map(|number| RemotePlace([number; 4])).collect();
    let blocks = RemoteBlocks { first, places: &places, bytes: 100 };
    b.store.prefix_index().add_remote_blocks(b.ns(), b.model.id, &chain(&keys(text)), blocks)
}

#[test]
fn what_a_shared_store_has_is_found_read_written_to_disk_and_not_durable_before() {
    let (b, mut disk) = written(&["ab"], CacheLimits::default());
    assert_eq!(find_remotely(&b, "abcd", 3, 1), 0, "a gap before it");
    assert_eq!(find_remotely(&b, "abcd", 1, 3), 2, "one of them is there already");
    assert_eq!(find_remotely(&b, "abcd", 2, 2), 0);
    assert_eq!(b.matched("abcde"), 4);
    let usage = b.cache_usage();
    assert_eq!([usage.entries, usage.pool_entries, usage.disk_entries], [4, 2, 2]);
    let reads = plan(&b, "abcd").unwrap();
    let places: Vec<_> = reads.missing.iter().map(|read| read.place).collect();
    assert_eq!(places, [1, 2].map(|number| RecordPlace::Remote(RemotePlace([number; 4]))));
    // It comes as blocks of a text that was published here would.
    let (other, from) = written(&["abcd"], CacheLimits::default());
    assert_eq!(evict_all(&other), 4);
    for (read, place) in reads.missing.iter().zip([3, 4]) {
        let mut from_other = read.clone();
        from_other.place = RecordPlace::Disk(DiskPlace([place, 0, 0, 0]));
        assert!(b.store.bring_read(&b.model, read, from.read(&b, &from_other).unwrap()));
    }
    b.store.prefix_index().settle_reads(reads);
    assert_eq!(b.values(b.attach("abcd").id, 0), values("abcd"));
    let (id, _) = b.publish_text("abcd");
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    assert_eq!(b.store.prefix_index().find_residency(&held).durable, 2);
    assert_eq!(disk.write_chain(&b, &held), 2);
    assert_eq!(b.store.prefix_index().find_residency(&held).durable, 4);
}

#[test]
fn a_write_that_fails_leaves_what_is_remote_and_a_read_that_fails_removes_it() {
    let b = Bench::cached(1 << 20, shape(1, PAGE, 2, 4), CacheLimits::default());
    assert_eq!(find_remotely(&b, "abc", 0, 3), 3);
    let (id, _) = b.publish_text("ab");
    let held = b.store.hold_published(b.ns(), id).unwrap().unwrap();
    assert!(b.store.plan_writes(&held, WriteTarget::Remote, u64::MAX).is_empty());
    let writes = b.store.plan_writes(&held, WriteTarget::Disk, u64::MAX);
    assert_eq!(writes.len(), 2);
    for write in &writes {
        assert!(write.remote.is_some());
        b.store.prefix_index().note_written(write, None);
    }
    b.store.close_sequence(b.ns(), id).unwrap();
    drop((held, writes));
    assert_eq!(evict_all(&b), 2);
    assert_eq!((b.used(), b.matched("abc")), (0, 3));
    let reads = plan(&b, "abc").unwrap();
    assert_eq!(b.store.prefix_index().remove_unreadable(&reads.missing[1]), 2);
    drop(reads);
    assert_eq!(b.matched("abc"), 1);
}
