//! Events of the cache: a picture drawn from them is what the index has.

use super::disk::{evict_all, find_remotely, plan, written_and_watched};
use super::harness::{Bench, namespace, shape};
use super::prefixes::{PAGE, chain, keys};
use crate::{BlockEvent, BlockTier, EventSink, ListCursor, PlacedBlock};
use kvd_core::Namespace;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The parent of each block, by place and key.
type Picture = BTreeMap<(BlockTier, Vec<u8>), Option<Vec<u8>>>;

/// A watcher that draws a picture.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    picture: Mutex<Picture>,
}

impl EventSink for Watcher {
    fn is_watched(&self, _: &Namespace) -> bool {
        true
    }

    fn note_event(&self, _: &Namespace, event: BlockEvent) {
        let mut picture = self.picture.lock();
        match event {
            BlockEvent::Stored(block) => {
                let (place, parent) = picture_of(block);
                assert!(picture.insert(place, parent).is_none(), "told once");
            }
            BlockEvent::Removed(block) => {
                let place = picture_of(block).0;
                assert!(picture.remove(&place).is_some(), "it was there: {place:?}");
            }
            BlockEvent::Cleared(_) => picture.clear(),
        }
    }
}

/// A block of a picture, and its parent.
fn picture_of(block: PlacedBlock) -> ((BlockTier, Vec<u8>), Option<Vec<u8>>) {
    ((block.tier, block.key.to_vec()), block.parent.map(|key| key.to_vec()))
}

impl Watcher {
    /// Fails where the picture is not what the index has.
    pub(super) fn check_picture(&self, bench: &Bench) {
        let (mut cursor, mut listed) = (ListCursor::default(), Picture::default());
        while let Some(placed) = bench.store.prefix_index().list_placed(bench.ns(), &mut cursor) {
            listed.extend(placed.into_iter().map(picture_of));
        }
        assert_eq!(*self.picture.lock(), listed);
    }

    fn count_in(&self, tier: BlockTier) -> usize {
        self.picture.lock().keys().filter(|(of, _)| *of == tier).count()
    }
}

#[test]
fn a_block_is_told_of_in_each_place_where_it_comes_and_goes() {
    let watcher = Arc::<Watcher>::default();
    let (b, disk) = written_and_watched(&["abcd"], &watcher);
    let told = |pool, disk, remote| {
        watcher.check_picture(&b);
        let tiers = [BlockTier::Pool, BlockTier::Disk, BlockTier::Remote];
        assert_eq!(tiers.map(|tier| watcher.count_in(tier)), [pool, disk, remote]);
    };
    told(4, 4, 0);
    assert_eq!(evict_all(&b), 4);
    told(0, 4, 0);
    assert_eq!(disk.promote(&b, "ab"), 2);
    told(2, 4, 0);
    assert_eq!(find_remotely(&b, "abcdef", 4, 2), 2);
    told(2, 4, 2);
    let reads = plan(&b, "abcd").unwrap();
    assert_eq!(b.store.prefix_index().remove_unreadable(&reads.missing[0]), 4);
    drop(reads);
    told(2, 2, 0);
    b.store.forget_model(b.model.id);
    told(0, 0, 0);
}

#[test]
fn a_restored_block_is_told_of_once_its_key_is_known() {
    let watcher = Arc::<Watcher>::default();
    let (b, _) = written_and_watched(&["abc"], &watcher);
    evict_all(&b);
    let index = b.store.prefix_index();
    let on_disk = b.store.forget_model(b.model.id);
    assert_eq!(on_disk.len(), 3);
    assert_eq!(index.restore_blocks(b.ns(), b.model.id, &on_disk), 3);
    watcher.check_picture(&b);
    assert_eq!(watcher.count_in(BlockTier::Disk), 0);
    let keys = keys("abc");
    let chain = chain(&keys);
    let key = |block| chain.find_key(block).unwrap();
    index.learn_block_key(&on_disk[0].digests, key(1));
    assert_eq!(watcher.count_in(BlockTier::Disk), 0, "another's key is ignored");
    index.learn_block_key(&on_disk[0].digests, key(0));
    index.learn_block_key(&on_disk[0].digests, key(0));
    assert_eq!(watcher.count_in(BlockTier::Disk), 1);
    // Publishing it again says the others.
    b.publish_text("abc");
    assert_eq!(watcher.count_in(BlockTier::Disk), 3);
    watcher.check_picture(&b);
}

/// A bench whose cache has chains of four blocks, so many, that share what they have in common.
fn cached_chains(chains: u32) -> Bench {
    let bench = Bench::new(16 << 20, shape(1, PAGE, 0, 0));
    (0..chains).for_each(|number| bench.cache(&format!("{number:04}")));
    bench
}

/// All blocks of the bench's namespace.
fn list_all(bench: &Bench) -> Picture {
    let (mut listed, mut cursor) = (Picture::default(), ListCursor::default());
    while let Some(placed) = bench.store.prefix_index().list_placed(bench.ns(), &mut cursor) {
        listed.extend(placed.into_iter().map(picture_of));
    }
    listed
}

#[test]
fn a_namespace_is_listed_in_as_many_looks_as_it_has_blocks_whatever_others_have() {
    let bench = cached_chains(3000);
    let index = bench.store.prefix_index();
    let mut cursor = ListCursor::default();
    assert!(index.list_placed(&namespace("other"), &mut cursor).is_none(), "no look at others");
    let (mut looks, mut cursor) = (0, ListCursor::default());
    while let Some(placed) = index.list_placed(bench.ns(), &mut cursor) {
        looks += 1;
        assert!(placed.len() <= 1024);
    }
    // 3000 last blocks, and those before them.
    let entries: usize = 3000 + 300 + 30 + 3;
    assert_eq!((list_all(&bench).len(), looks), (entries, entries.div_ceil(1024)));
    index.check_blocks();
}

#[test]
fn a_list_misses_no_block_that_stays_while_others_come_and_go() {
    let bench = cached_chains(2000);
    let index = bench.store.prefix_index();
    let mut stays = list_all(&bench);
    let (mut listed, mut cursor) = (Picture::default(), ListCursor::default());
    let mut step = 0;
    while let Some(placed) = index.list_placed(bench.ns(), &mut cursor) {
        listed.extend(placed.into_iter().map(picture_of));
        // Some go that are listed or not, and one comes.
        (0..200).for_each(|_| assert!(index.evict_block(None, Instant::now())));
        bench.cache(&format!("new{step}"));
        step += 1;
    }
    let now = list_all(&bench);
    stays.retain(|place, _| now.contains_key(place));
    assert!(stays.len() > 1000 && stays.len() < 2223, "{}", stays.len());
    let missed = stays.keys().filter(|place| !listed.contains_key(*place)).count();
    assert_eq!(missed, 0);
    index.check_blocks();
}
