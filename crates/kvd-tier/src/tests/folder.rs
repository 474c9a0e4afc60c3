//! A tier with its threads, on a real folder.

use super::model::{assert_content, block_draft, block_name, block_shape};
use crate::offline::{
    GarbageRule, KeyHasher, KeyHashes, OfflineAccess, OfflineStore, collect_garbage,
    import_records, repair_folder,
};
use crate::{
    DiskError, DiskLocation, DiskSettings, DiskTier, KeepNothing, ReadError, ReadRequest,
    RecordMeta, RefusedWrite, ScopeId, WriteError,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

fn settings(folder: &Path) -> DiskSettings {
    let mut settings = DiskSettings::new(folder.to_owned(), 4 << 20);
    settings.segment_bytes = 1 << 20;
    settings.reserve_free_bytes = 0;
    settings.sync_ms = 1;
    settings
}

fn open(folder: &Path) -> (DiskTier, crate::RecoveredRecords) {
    DiskTier::open_folder(settings(folder), Arc::new(KeepNothing)).unwrap()
}

/// Writes a block and waits until it is durable.
fn write(tier: &DiskTier, chain: u64, position: u32) -> Result<DiskLocation, WriteError> {
    let (send, receive) = sync_channel(1);
    let draft = block_draft(&block_name(chain, position));
    tier.write_record(draft, Box::new(move |result| send.send(result).unwrap())).unwrap();
    receive.recv().unwrap()
}

#[test]
fn records_are_there_after_a_restart_by_layer_and_by_thread() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, found) = open(folder.path());
    assert_eq!(found.counts.live, 0);
    let seed = tier.hash_seed();
    for position in 0..5 {
        write(&tier, 1, position).unwrap();
    }
    tier.close_tier(Duration::from_secs(5));
    let refused = tier.write_record(block_draft(&block_name(1, 6)), Box::new(|_| {}));
    assert_eq!(refused, Err(RefusedWrite::Closed));
    drop(tier);

    let (tier, found) = open(folder.path());
    assert_eq!((found.counts.live, tier.hash_seed()), (5, seed));
    for (position, record) in (0..).zip(&found.records) {
        let name = block_name(1, position);
        assert_eq!(record.name, name);
        assert_content(&tier.read_record(&record.location).unwrap(), &name);
        let head = tier.read_head(&record.location).unwrap();
        for layer in 0..head.layer_count() {
            let part = tier.read_layers(&record.location, &head, layer..layer + 1).unwrap();
            let bytes = block_shape(&name).layers[layer as usize].bytes;
            let content = super::model::layer_content(&name, layer as usize, bytes);
            assert!(part.layer_bytes(layer) == Some(&content[..]));
            assert_eq!(part.layer_bytes(layer + 1), None);
        }
        let beyond = head.layer_count() + 1;
        let read = tier.read_layers(&record.location, &head, 0..beyond);
        assert!(matches!(read, Err(ReadError::NoSuchLayer { .. })));
        let (send, receive) = sync_channel(1);
        let on_read = Box::new(move |part| send.send(part).unwrap());
        tier.submit_read(record.location, ReadRequest::Record, on_read).unwrap();
        assert_content(&receive.recv().unwrap().unwrap(), &name);
    }
    let levels = tier.read_levels();
    assert_eq!((levels.recovered_live, levels.corrupt_records), (5, 0));
    assert_eq!(levels.queued_bytes, 0);
}

#[test]
fn tombstone_holds_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    for position in 0..3 {
        write(&tier, 1, position).unwrap();
    }
    let (send, receive) = sync_channel(1);
    let on_durable = Box::new(move |result: Result<_, _>| send.send(result.is_ok()).unwrap());
    tier.remove_record(&block_name(1, 1), on_durable).unwrap();
    assert!(receive.recv().unwrap());
    drop(tier);
    let (tier, found) = open(folder.path());
    assert_eq!((found.counts.live, found.counts.removed, found.counts.orphan), (1, 1, 1));
    // Written anew, it is there again, and so is its child.
    write(&tier, 1, 1).unwrap();
    drop(tier);
    assert_eq!(open(folder.path()).1.counts.live, 3);
}

#[test]
fn descriptions_stay_while_blocks_are_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    tier.write_scope(ScopeId([5; 16]), b"{\"model\":\"m\"}", Box::new(|_| {})).unwrap();
    tier.write_calibration([8; 32], &[9; 5000], Box::new(|_| {})).unwrap();
    let mut segments = 0;
    let mut chain = 0;
    while segments < 12 {
        chain += 1;
        segments = write(&tier, chain, 0).unwrap().segment_number();
    }
    assert!(tier.read_levels().reclaimed_segments > 5);
    assert!(tier.read_levels().used_bytes <= 4 << 20);
    drop(tier);
    let (tier, _) = open(folder.path());
    let scope = tier.read_scope(ScopeId([5; 16])).unwrap();
    assert_eq!(scope.as_deref(), Some(&b"{\"model\":\"m\"}"[..]));
    assert_eq!(tier.read_calibration(&[8; 32]).unwrap(), Some(vec![9; 5000]));
    assert_eq!(tier.read_calibration(&[7; 32]).unwrap(), None);
}

#[test]
fn reads_beside_reclaim_give_the_record_or_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let location = write(&tier, 0, 0).unwrap();
    let (hits, misses) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while misses.load(Ordering::Relaxed) < 10 {
                    match tier.read_record(&location) {
                        Ok(part) => {
                            assert_content(&part, &block_name(0, 0));
                            hits.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(ReadError::Gone { .. }) => {
                            misses.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let mut chain = 0;
        while misses.load(Ordering::Relaxed) < 10 {
            chain += 1;
            write(&tier, chain, 0).unwrap();
        }
    });
    assert!(hits.into_inner() > 0);
    assert!(tier.read_levels().misses_gone >= 10);
}

#[test]
fn full_queue_refuses_and_says_how_full_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(folder.path());
    settings.sync_ms = 60_000;
    settings.queue_bytes_max = 4096;
    let (tier, _) = DiskTier::open_folder(settings, Arc::new(KeepNothing)).unwrap();
    // Bytes count until they are durable, which the batch is not yet.
    let draft = block_draft(&block_name(1, 0));
    let bytes = draft.disk_bytes();
    tier.write_record(draft, Box::new(|result| assert!(result.is_ok()))).unwrap();
    let refused = tier.write_record(block_draft(&block_name(2, 0)), Box::new(|_| {}));
    let full = RefusedWrite::QueueFull { queued_bytes: bytes, limit_bytes: 4096 };
    assert_eq!(refused, Err(full));
    assert_eq!(tier.read_levels().drops_queue, 1);
    tier.close_tier(Duration::from_secs(5));
    assert_eq!(tier.read_levels().written_records, 1);
}

#[test]
fn second_opener_is_told_that_the_folder_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let error = DiskTier::open_folder(settings(folder.path()), Arc::new(KeepNothing));
    let error = error.err().expect("refused");
    assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    assert_eq!(error.exit_code(), 69);
    assert!(OfflineStore::open_folder(folder.path(), OfflineAccess::Exclusive).is_err());
    assert!(OfflineStore::open_folder(folder.path(), OfflineAccess::ReadOnly).is_ok());
    drop(tier);
    open(folder.path());
}

#[test]
fn a_file_in_the_place_of_the_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let opened = DiskTier::open_folder(settings(&path), Arc::new(KeepNothing));
        let looked = OfflineStore::open_folder(&path, OfflineAccess::ReadOnly);
        for error in [opened.err(), looked.err()].map(|error| error.expect("refused")) {
            let named = matches!(&error, DiskError::NotFolder { file: named } if *named == file);
            assert!(named && error.exit_code() == 64, "{error}");
        }
    }
}

#[test]
fn a_folder_without_a_store_is_left_alone_and_another_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("letter.txt"), "mine").unwrap();
    let error = OfflineStore::open_folder(folder.path(), OfflineAccess::ReadOnly).err().unwrap();
    assert!(matches!(error, DiskError::NoStore { .. }) && error.exit_code() == 64, "{error}");
    let said = error.to_string();
    assert!(said.contains("is no folder of a cache") && !said.contains("move"), "{said}");
    let nowhere = folder.path().join("none");
    let error = OfflineStore::open_folder(&nowhere, OfflineAccess::ReadOnly).err().unwrap();
    assert!(matches!(error, DiskError::Unopened { .. }) && error.exit_code() == 74, "{error}");
    // Segments alone were a store once.
    drop(open(folder.path()));
    let (tier, _) = open(folder.path());
    write(&tier, 1, 0).unwrap();
    drop(tier);
    fs::remove_file(folder.path().join("store.json")).unwrap();
    let error = OfflineStore::open_folder(folder.path(), OfflineAccess::ReadOnly).err().unwrap();
    assert!(matches!(error, DiskError::BadStore { .. }), "{error}");
}

#[test]
fn newer_and_spoilt_stores_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    write(&tier, 1, 0).unwrap();
    drop(tier);
    let store = folder.path().join("store.json");
    for (text, is_newer) in [("{\"format\":2,\"more\":1}", true), ("{", false), ("[]", false)] {
        fs::write(&store, text).unwrap();
        let opened = DiskTier::open_folder(settings(folder.path()), Arc::new(KeepNothing));
        let error = opened.err().expect("refused");
        assert_eq!(matches!(error, DiskError::NewerFormat { found: 2, .. }), is_newer, "{error}");
        assert_eq!(error.exit_code(), 78);
    }
    fs::remove_file(&store).unwrap();
    let opened = DiskTier::open_folder(settings(folder.path()), Arc::new(KeepNothing));
    assert!(matches!(opened.err(), Some(DiskError::BadStore { .. })));
}

/// Set in the process whose files may not grow.
const LIMITED: &str = "KVD_TIER_LIMITED_FOLDER";

#[test]
fn file_size_limit_fails_writes_and_reads_go_on() {
    if let Some(folder) = std::env::var_os(LIMITED) {
        let (tier, found) = open(Path::new(&folder));
        assert_eq!(write(&tier, 2, 0), Err(WriteError::Full));
        assert_content(&tier.read_record(&found.records[0].location).unwrap(), &block_name(1, 0));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    write(&tier, 1, 0).unwrap();
    drop(tier);
    // The signal of the limit would end the process; ignored, the write fails.
    let test = "tests::folder::file_size_limit_fails_writes_and_reads_go_on";
    let status = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 512; exec \"$0\" --exact \"$1\""])
        .arg(std::env::current_exe().unwrap())
        .arg(test)
        .env(LIMITED, folder.path())
        .status()
        .unwrap();
    assert!(status.success());
}

/// Hashes as the tests name blocks, apart by seed.
struct SeededHasher;

impl KeyHasher for SeededHasher {
    fn hash_key(&self, seed: u64, meta: &RecordMeta, parent_lineage: u128) -> Option<KeyHashes> {
        let mixed = meta.name.lineage ^ parent_lineage.rotate_left(7) ^ u128::from(seed);
        Some(KeyHashes { digest: meta.name.digest ^ u128::from(seed), lineage: mixed })
    }
}

/// A file that is cut off or none is refused whole; a block whose bytes are wrong is skipped, with
/// all behind it.
fn check_damaged_exports(exported: &Path) {
    let file = fs::read_dir(exported).unwrap().map(|entry| entry.unwrap().path());
    let file = file.filter(|path| !path.ends_with("descriptions.kvdr")).last().unwrap();
    let sound = fs::read(&file).unwrap();
    let import = || {
        let folder = tempfile::tempdir().unwrap();
        import_records(settings(folder.path()), exported, None, &SeededHasher)
    };
    for (bytes, why) in [
        (sound[..sound.len() - 100].to_vec(), "the file is cut off"),
        (sound[..sound.len() - 4096].to_vec(), "the file is cut off"),
        (b"no records".repeat(1000), "record 0:"),
    ] {
        fs::write(&file, bytes).unwrap();
        let refused = import().unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
        assert_eq!(refused.exit_code(), 1);
    }
    // The second of four records, behind the first one's bytes.
    let first = u64::from_le_bytes(sound[16..24].try_into().unwrap()) as usize;
    let mut damaged = sound.clone();
    damaged[first + 700] ^= 4;
    fs::write(&file, damaged).unwrap();
    let report = import().unwrap();
    assert_eq!((report.records, report.skipped), (3, 3), "descriptions, and the first block");
    fs::write(&file, sound).unwrap();
}

#[test]
fn offline_commands_list_verify_repair_move_and_shrink() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    tier.write_scope(ScopeId([5; 16]), b"{}", Box::new(|_| {})).unwrap();
    tier.write_calibration([8; 32], &[9; 5000], Box::new(|_| {})).unwrap();
    let mut last = write(&tier, 1, 0).unwrap();
    for position in 1..4 {
        last = write(&tier, 1, position).unwrap();
    }
    drop(tier);
    let store = OfflineStore::open_folder(folder.path(), OfflineAccess::Exclusive).unwrap();
    let listing = store.list_scopes();
    assert_eq!(listing.scopes.len(), 1);
    let scope = &listing.scopes[0];
    assert_eq!((scope.blocks, scope.depth_max), (4, 4));
    assert_eq!(scope.description, b"{}");
    let report = store.verify_records();
    assert_eq!((report.sound, report.damaged.len()), (6, 0));

    let exported = tempfile::tempdir().unwrap();
    let moved = store.export_records(exported.path(), None).unwrap();
    assert_eq!((moved.records, moved.skipped), (6, 0));
    drop(store);
    let other = tempfile::tempdir().unwrap();
    let taken =
        import_records(settings(other.path()), exported.path(), None, &SeededHasher).unwrap();
    assert_eq!((taken.records, taken.skipped, taken.bytes), (6, 0, moved.bytes));
    // Again, all of it is there, and nothing is written; of another scope, it is refused.
    let import =
        |scope| import_records(settings(other.path()), exported.path(), scope, &SeededHasher);
    let again = import(Some(block_name(1, 0).scope)).unwrap();
    assert_eq!((again.existed, again.skipped), (6, 0));
    assert_eq!((again.records, again.bytes), (0, 0));
    let refused = import(Some(ScopeId([9; 16]))).unwrap_err().to_string();
    assert!(refused.contains("it is of scope") && refused.contains("nothing was"), "{refused}");
    check_damaged_exports(exported.path());
    let (tier, found) = open(other.path());
    assert_eq!(found.counts.live, 4);
    for (position, record) in (0..).zip(&found.records) {
        let part = tier.read_record(&record.location).unwrap();
        let name = block_name(1, position);
        assert_eq!(part.record_meta().key[..], name.digest.to_le_bytes());
        assert_eq!(record.name.digest, name.digest ^ u128::from(tier.hash_seed()));
    }
    drop(tier);

    // One flipped bit in the payload of the last block.
    let path = folder.path().join(format!("seg-{:016x}.kvds", last.segment_number()));
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = u64::from(last.offset) * 4096 + 700;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    let report = repair_folder(settings(folder.path())).unwrap();
    assert_eq!((report.sound, report.damaged.len()), (5, 1));
    let report = repair_folder(settings(folder.path())).unwrap();
    assert_eq!((report.sound, report.damaged.len()), (5, 0));

    collect_garbage(settings(folder.path()), GarbageRule::Scope(ScopeId([5; 16]))).unwrap();
    let store = OfflineStore::open_folder(folder.path(), OfflineAccess::Exclusive).unwrap();
    assert_eq!(store.list_scopes().counts.live, 0);
    drop(store);
    let freed = collect_garbage(settings(folder.path()), GarbageRule::KeepBytes(0)).unwrap();
    assert!(freed > 0);
    let nowhere = OfflineStore::open_folder(&folder.path().join("no"), OfflineAccess::ReadOnly);
    assert!(nowhere.is_err());
}
