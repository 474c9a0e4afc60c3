//! Torn writes: the power fails at any change of the folder, and what was not synced is kept,
//! dropped, swapped or spoilt sector by sector. `KVD_TORN_SEEDS=10000` runs more seeds.

use super::model::{Index, SimStore, assert_content, block_name};
use super::sim::{Faults, Random, SimFolder};
use std::collections::BTreeMap;

const SEEDS: u64 = 400;

/// Figures of all seeds, so that a test which tests nothing is seen.
#[derive(Debug, Default)]
struct Tally {
    crashes: u64,
    required: u64,
    unproven: u64,
    torn: u64,
    reclaimed: u64,
    failures: u64,
}

#[test]
fn acknowledged_blocks_survive_torn_writes_and_no_wrong_byte_is_read() {
    let seeds = std::env::var("KVD_TORN_SEEDS").ok().and_then(|text| text.parse().ok());
    let mut tally = Tally::default();
    for seed in 0..seeds.unwrap_or(SEEDS) {
        let run = std::panic::AssertUnwindSafe(|| run_seed(seed, &mut tally));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("torn writes: seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{tally:?}");
    assert!(tally.crashes > 0 && tally.required > 0 && tally.unproven > 0, "{tally:?}");
    assert!(tally.torn > 0 && tally.reclaimed > 0 && tally.failures > 0, "{tally:?}");
}

fn run_seed(seed: u64, tally: &mut Tally) {
    let mut random = Random::new(seed);
    let mut folder = SimFolder::new(seed);
    let index = Index::new(seed);
    for _ in 0..1 + random.below(4) {
        let mut store = SimStore::open_store(&folder, &index);
        store.assert_readable();
        if random.is_one_in(3) {
            folder.set_faults(Faults { write: 40, sync: 20, create_full: 20, read: 0 });
        }
        folder.set_fuse(random.below(120) as u64);
        for _ in 0..20 + random.below(80) {
            do_something(&mut store, &mut random);
        }
        if random.is_one_in(4) {
            store.opened.writer.close_segment();
        }
        assert_eq!(folder.take_violations(), Vec::<String>::new());
        let levels = store.opened.shared.cells.read_levels(store.opened.shared.tier_state());
        tally.reclaimed += levels.reclaimed_segments;
        tally.failures += levels.errors_sync + levels.errors_write;
        tally.crashes += 1;
        drop(store);
        folder = folder.crash_folder();
        check_folder(&folder, &index, tally);
    }
}

fn do_something(store: &mut SimStore, random: &mut Random) {
    match random.below(12) {
        0..2 => store.sync_records(),
        2 => {
            let known: Vec<_> =
                store.index.state.lock().entries.values().map(|entry| entry.name).collect();
            if let Some(name) = known.get(random.below(known.len())) {
                store.remove_block(name);
            }
        }
        _ => {
            let chain = random.below(6) as u64;
            // The next block of a chain, parents first; at times one that is there again.
            let depth = (0..).find(|position| {
                let digest = block_name(chain, *position).digest;
                !store.index.state.lock().entries.contains_key(&digest)
            });
            let depth = depth.unwrap_or(0);
            let position =
                if random.is_one_in(6) { random.below(depth as usize) as u32 } else { depth };
            store.write_block(&block_name(chain, position));
        }
    }
}

/// Recovers what the crash left, and compares it with what was acknowledged.
fn check_folder(folder: &SimFolder, index: &std::sync::Arc<Index>, tally: &mut Tally) {
    let before = std::mem::take(&mut *index.state.lock());
    let store = SimStore::open_store(folder, index);
    let found: BTreeMap<u128, _> =
        store.opened.found.records.iter().map(|record| (record.name.digest, record)).collect();
    tally.torn += store.opened.found.counts.torn;
    for entry in before.entries.values().filter(|entry| entry.location.is_some()) {
        tally.required += 1;
        assert!(found.contains_key(&entry.name.digest), "lost: {entry:?}");
    }
    for record in found.values() {
        let name = &record.name;
        assert!(!before.removed.contains(&name.digest), "came back: {name:?}");
        let is_required =
            before.entries.get(&name.digest).is_some_and(|entry| entry.location.is_some());
        tally.unproven += u64::from(!is_required);
        let part = store.opened.shared.read_record(&record.location).unwrap();
        assert_content(&part, name);
    }
    // Removals hold for ever, so the next generation's check begins with them.
    index.state.lock().removed = before.removed;
}

#[test]
fn rotten_bits_in_synced_data_are_misses_and_never_data() {
    let (mut misses, mut hits) = (0, 0);
    for seed in 0..SEEDS / 4 {
        let mut random = Random::new(seed);
        let (folder, index) = (SimFolder::new(seed), Index::new(seed));
        let mut store = SimStore::open_store(&folder, &index);
        for position in 0..30 {
            store.write_block(&block_name(random.below(3) as u64, position / 3));
        }
        store.sync_records();
        if random.is_one_in(2) {
            store.opened.writer.close_segment();
        }
        let entries = index.state.lock().entries.clone();
        folder.rot_bits(1 + random.below(20));
        for entry in entries.values().filter(|entry| entry.location.is_some()) {
            let location = entry.location.unwrap();
            match store.opened.shared.read_record(&location) {
                Ok(part) => assert_content(&part, &entry.name),
                Err(crate::ReadError::Corrupt { .. }) => misses += 1,
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        let levels = store.opened.shared.cells.read_levels(Default::default());
        hits += levels.reads;
        // And once more after a restart, where footers and headers may be spoilt too.
        let after = SimStore::open_store(&folder.crash_folder(), &Index::new(seed));
        for record in &after.opened.found.records {
            if let Ok(part) = after.opened.shared.read_record(&record.location) {
                assert_content(&part, &record.name);
            }
        }
    }
    assert!(misses > 50 && hits > 50, "{misses} misses, {hits} hits");
}
