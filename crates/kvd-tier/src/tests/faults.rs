//! The table of failures: full disks, failing devices, spoilt folders.

use super::model::{Index, SEGMENT_BYTES, SimStore, assert_content, block_name};
use super::sim::{Faults, SimFolder};
use crate::error::{DiskError, ReadError, WriteError};
use crate::levels::{TierLevels, TierState};
use crate::name::DiskLocation;
use crate::segment::segment_name;
use crate::writer::WriteCompletion;
use parking_lot::Mutex;
use std::sync::Arc;

fn read_levels(store: &SimStore) -> TierLevels {
    store.opened.shared.cells.read_levels(store.opened.shared.tier_state())
}

fn new_store(seed: u64) -> (SimFolder, SimStore) {
    let folder = SimFolder::new(seed);
    let store = SimStore::open_store(&folder, &Index::new(seed));
    (folder, store)
}

/// Writes a block and syncs; how it ended.
fn write_synced(store: &mut SimStore, chain: u64) -> Result<DiskLocation, WriteError> {
    let result = Arc::new(Mutex::new(None));
    let ended = Arc::clone(&result);
    let done = move |outcome| *ended.lock() = Some(outcome);
    let draft = super::model::block_draft(&block_name(chain, 0));
    store.push_draft(draft, WriteCompletion::Caller(Box::new(done)));
    store.sync_records();
    let outcome = result.lock().take();
    outcome.expect("acknowledged or failed by now")
}

#[test]
fn full_disk_reclaims_the_oldest_segment() {
    let (folder, mut store) = new_store(1);
    folder.set_capacity(2 * SEGMENT_BYTES);
    for chain in 0..60 {
        assert!(write_synced(&mut store, chain).is_ok(), "chain {chain}");
    }
    let levels = read_levels(&store);
    assert!(levels.reclaimed_segments > 0 && levels.drops_full == 0, "{levels:?}");
    assert_eq!(levels.state, TierState::Ok);
}

#[test]
fn disk_without_room_for_a_segment_fails_writes_and_the_tier_goes_on() {
    let (folder, mut store) = new_store(2);
    folder.set_capacity(SEGMENT_BYTES - 1);
    assert_eq!(write_synced(&mut store, 1), Err(WriteError::Full));
    assert_eq!(read_levels(&store).drops_full, 1);
    assert_eq!(read_levels(&store).state, TierState::Ok);
    folder.set_capacity(SEGMENT_BYTES);
    assert!(write_synced(&mut store, 1).is_ok());
}

#[test]
fn failed_sync_abandons_the_segment_and_writes_the_records_again() {
    let (folder, mut store) = new_store(3);
    let first = write_synced(&mut store, 1).unwrap();
    folder.fail_syncs(1);
    let second = write_synced(&mut store, 2).unwrap();
    assert_ne!(first.segment, second.segment);
    let levels = read_levels(&store);
    assert_eq!((levels.errors_sync, levels.drops_io), (1, 0));
    assert_eq!(levels.state, TierState::Ok);
    assert_eq!(folder.take_violations(), Vec::<String>::new());
    // What was durable in the abandoned segment is still read, and recovered.
    for (location, chain) in [(first, 1), (second, 2)] {
        let part = store.opened.shared.read_record(&location).unwrap();
        assert_content(&part, &block_name(chain, 0));
    }
    let after = SimStore::open_store(&folder.crash_folder(), &Index::new(3));
    assert_eq!(after.opened.found.counts.live, 2);
}

#[test]
fn three_failures_in_a_row_turn_the_tier_off_and_reads_go_on() {
    let (folder, mut store) = new_store(4);
    let kept = write_synced(&mut store, 1).unwrap();
    folder.fail_syncs(2);
    assert!(matches!(write_synced(&mut store, 2), Err(WriteError::Io { .. })));
    assert_eq!(read_levels(&store).state, TierState::Degraded);
    folder.fail_syncs(1);
    assert!(write_synced(&mut store, 3).is_err());
    assert_eq!(read_levels(&store).state, TierState::Off);
    assert_eq!(write_synced(&mut store, 4), Err(WriteError::Off));
    assert!(store.opened.shared.read_record(&kept).is_ok());
    assert_eq!(folder.take_violations(), Vec::<String>::new());
}

#[test]
fn child_queued_behind_a_failed_parent_is_not_durable() {
    let (folder, mut store) = new_store(5);
    folder.set_capacity(SEGMENT_BYTES - 1);
    let results = Arc::new(Mutex::new(Vec::new()));
    for position in 0..2 {
        if position == 1 {
            folder.set_capacity(u64::MAX);
        }
        let results = Arc::clone(&results);
        let done = move |outcome: Result<_, _>| results.lock().push(outcome.map(|_| ()));
        let draft = super::model::block_draft(&block_name(1, position));
        let completion = WriteCompletion::Caller(Box::new(done));
        let pending = crate::writer::PendingRecord::new(draft.seal_record(), completion, 1);
        // Both were in the queue when the first failed.
        store.opened.writer.write_pending(pending, 2);
    }
    assert_eq!(*results.lock(), [Err(WriteError::Full), Err(WriteError::ParentLost)]);
}

#[test]
fn device_that_fails_reads_is_a_miss_with_a_counter() {
    let (folder, mut store) = new_store(6);
    let location = write_synced(&mut store, 1).unwrap();
    folder.set_faults(Faults { read: 1, ..Default::default() });
    let read = store.opened.shared.read_record(&location);
    assert!(matches!(read, Err(ReadError::Io { .. })));
    assert_eq!(read_levels(&store).errors_read, 1);
}

/// A folder of three sealed segments, each with one block.
fn three_segments(seed: u64) -> (SimFolder, Vec<DiskLocation>) {
    let (folder, mut store) = new_store(seed);
    let mut locations = Vec::new();
    for chain in 0..3 {
        locations.push(write_synced(&mut store, chain).unwrap());
        store.opened.writer.close_segment();
    }
    (folder, locations)
}

#[test]
fn truncated_file_loses_its_end_alone() {
    for cut in [0, 1, 100, 4096, 5000, 9000] {
        let (folder, locations) = three_segments(7);
        folder.edit_file(&segment_name(locations[1].segment), |bytes| bytes.truncate(cut));
        let store = SimStore::open_store(&folder, &Index::new(7));
        let live = store.opened.found.counts.live;
        assert!((2..=3).contains(&live), "cut at {cut}: {live}");
        store.assert_readable();
        // And a location from before is a miss.
        if live == 2 {
            let read = store.opened.shared.read_record(&locations[1]);
            assert!(read.is_err(), "cut at {cut}");
        }
    }
}

#[test]
fn swapped_files_are_left_alone_and_never_read() {
    let (folder, locations) = three_segments(8);
    folder.swap_names(&segment_name(locations[0].segment), &segment_name(locations[1].segment));
    let store = SimStore::open_store(&folder, &Index::new(8));
    let counts = store.opened.found.counts;
    assert_eq!((counts.live, counts.foreign_segments), (1, 2));
    store.assert_readable();
}

#[test]
fn segment_of_a_newer_format_is_refused_with_both_versions() {
    let (folder, locations) = three_segments(9);
    folder.edit_file(&segment_name(locations[2].segment), |bytes| {
        bytes[4] = 9;
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[..40]).to_le_bytes();
        bytes[40..48].copy_from_slice(&checksum);
    });
    let opened = crate::tier::open_store(
        Arc::new(folder.clone()),
        std::path::Path::new("/sim"),
        super::model::small_settings(),
        Arc::new(crate::KeepNothing),
    );
    let error = opened.err().expect("refused");
    assert!(matches!(error, DiskError::NewerFormat { found: 9, known: 1, .. }), "{error}");
    assert_eq!(error.exit_code(), 78);
}

#[test]
fn segment_of_a_damaged_header_keeps_its_records() {
    let (folder, locations) = three_segments(10);
    folder.edit_file(&segment_name(locations[1].segment), |bytes| bytes[..64].fill(0xFF));
    let store = SimStore::open_store(&folder, &Index::new(10));
    assert_eq!(store.opened.found.counts.live, 3);
    store.assert_readable();
}
