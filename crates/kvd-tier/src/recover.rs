//! Finds the records of a folder at its start: footers in threads, open segments record by record.
//!
//! The result depends on nothing but the files. What was acknowledged is found; what was not may
//! be, if every byte of it is right.

use crate::error::DiskError;
use crate::files::{OpenPurpose, StoredFolder};
use crate::identity::{StoreIdentity, io_error};
use crate::name::{BlockName, DiskLocation, LiveRecord, RecordKind, ScopeId};
use crate::scan::{DurableEnd, OpenScan, SegmentOutline, SegmentRef, read_outline, scan_records};
use crate::segment::{
    RecordEntry, SEGMENT_HEADER_BYTES, SegmentHeader, footer_bytes, parse_name, segment_name,
    write_footer,
};
use crate::table::SegmentInfo;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many block records were found, and why others were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Live: they and all their ancestors are there.
    pub live: u64,
    /// Dropped: an ancestor is missing.
    pub orphan: u64,
    /// Dropped: a newer record of the same block is there.
    pub replaced: u64,
    /// Dropped: a tombstone names them.
    pub removed: u64,
    /// Dropped: torn, or not proven to be durable; places that are damaged count too.
    pub torn: u64,
    /// Segments of another store or number: left alone.
    pub foreign_segments: u64,
    /// Files that could not be opened, sealed or removed.
    pub file_errors: u64,
}

/// Records that a folder held when it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredRecords {
    /// Live records of blocks, parents before children.
    pub records: Vec<LiveRecord>,
    /// Totals.
    pub counts: RecoveryCounts,
}

/// Names what is kept apart from blocks: descriptions and calibrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DescriptionKey {
    pub(crate) kind: RecordKind,
    pub(crate) scope: ScopeId,
    pub(crate) digest: u128,
}

/// Whether recovery may change the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecoverMode {
    /// It seals open segments and removes empty ones.
    Own,
    /// It reads.
    Look,
}

/// All that recovery finds.
#[derive(Debug, Default)]
pub(crate) struct RecoveredStore {
    pub(crate) found: RecoveredRecords,
    pub(crate) descriptions: HashMap<DescriptionKey, DiskLocation>,
    pub(crate) segments: BTreeMap<u64, SegmentInfo>,
    pub(crate) next_serial: u64,
    pub(crate) next_number: u64,
    /// Where the durable part of the last segment ends, 0 if there is none.
    pub(crate) prior_end: u64,
}

/// Numbers of the segments in a folder, ascending.
pub(crate) fn list_segments(folder: &dyn StoredFolder) -> io::Result<Vec<u64>> {
    let mut numbers: Vec<u64> =
        folder.list_names()?.iter().filter_map(|name| parse_name(name)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The folder that is recovered, and how.
#[derive(Clone, Copy)]
pub(crate) struct FolderRecovery<'a> {
    pub(crate) folder: &'a dyn StoredFolder,
    pub(crate) path: &'a Path,
    pub(crate) identity: &'a StoreIdentity,
    pub(crate) threads: usize,
    pub(crate) mode: RecoverMode,
}

/// Recovers a folder.
///
/// # Errors
///
/// The folder cannot be listed, or a newer kvd wrote into it. Damage is no error.
pub(crate) fn recover_store(recovery: FolderRecovery<'_>) -> Result<RecoveredStore, DiskError> {
    let FolderRecovery { folder, path, .. } = recovery;
    let numbers = list_segments(folder).map_err(io_error(path, "cannot list the segments"))?;
    let mut outlines = read_outlines(recovery, &numbers);
    for (number, outline) in &outlines {
        if let SegmentHeader::Newer { found } = outline.header {
            return Err(DiskError::NewerFormat {
                folder: path.join(segment_name(*number)),
                found: u32::from(found),
                known: u32::from(crate::record::FORMAT_VERSION),
            });
        }
    }
    let mut store = RecoveredStore {
        next_serial: 1,
        next_number: numbers.last().map_or(1, |number| number.saturating_add(1)),
        ..Default::default()
    };
    store.found.counts.file_errors = (numbers.len() - outlines.len()) as u64;
    let ends: BTreeMap<u64, DurableEnd> =
        outlines.keys().map(|number| (*number, find_durable_end(&outlines, *number))).collect();
    let mut entries = Vec::new();
    for (number, outline) in &mut outlines {
        if outline.header == SegmentHeader::Foreign {
            store.found.counts.foreign_segments += 1;
            continue;
        }
        let found = match outline.footer.take() {
            Some(records) => {
                store.prior_end = outline.len;
                let info = SegmentInfo { len: outline.len, durable_end: DurableEnd::FromHeaders };
                store.segments.insert(*number, info);
                records
            }
            None => {
                let end = ends.get(number).copied().unwrap_or(DurableEnd::FromHeaders);
                let info = SegmentInfo { len: outline.len, durable_end: end };
                recover_open(recovery, *number, info, &mut store)
            }
        };
        let serials = found.iter().map(|record| record.location.serial);
        store.next_serial = serials.fold(store.next_serial, |next, serial| next.max(serial + 1));
        entries.extend(found);
    }
    select_live(&entries, &mut store);
    Ok(store)
}

/// The next segment's header says where this one's durable part ends.
fn find_durable_end(outlines: &BTreeMap<u64, SegmentOutline>, number: u64) -> DurableEnd {
    match number.checked_add(1).and_then(|next| outlines.get(&next)).map(|next| next.header) {
        Some(SegmentHeader::Own { prior_end }) if prior_end > 0 => DurableEnd::At(prior_end),
        _ => DurableEnd::FromHeaders,
    }
}

fn read_outlines(recovery: FolderRecovery<'_>, numbers: &[u64]) -> BTreeMap<u64, SegmentOutline> {
    let FolderRecovery { folder, identity, threads, .. } = recovery;
    let next = AtomicUsize::new(0);
    let outlines = Mutex::new(BTreeMap::new());
    let read_some = || {
        while let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
            let name = segment_name(*number);
            let outline = folder.open_file(&name, OpenPurpose::Read).and_then(|file| {
                read_outline(SegmentRef { file: &*file, identity, number: *number })
            });
            if let Ok(outline) = outline {
                outlines.lock().insert(*number, outline);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(numbers.len()) {
            scope.spawn(read_some);
        }
        read_some();
    });
    outlines.into_inner()
}

/// Reads a segment that has no footer, and gives it one.
fn recover_open(
    recovery: FolderRecovery<'_>,
    number: u64,
    mut info: SegmentInfo,
    store: &mut RecoveredStore,
) -> Vec<RecordEntry> {
    let FolderRecovery { folder, identity, mode, .. } = recovery;
    let name = segment_name(number);
    let Ok(file) = folder.open_file(&name, OpenPurpose::Read) else {
        store.found.counts.file_errors += 1;
        return Vec::new();
    };
    let segment = SegmentRef { file: &*file, identity, number };
    let mut scan = scan_records(segment, info.len, info.durable_end);
    store.found.counts.torn += scan.torn;
    store.next_serial = store.next_serial.max(scan.serial_max + 1);
    if mode == RecoverMode::Own {
        drop(file);
        let sealed = seal_scanned(recovery, number, &mut scan);
        match sealed {
            Ok(SealOutcome::Removed) => return Vec::new(),
            Ok(SealOutcome::Sealed { len }) => info.len = len,
            Err(_) => store.found.counts.file_errors += 1,
        }
    }
    store.prior_end = scan.records.last().map_or(SEGMENT_HEADER_BYTES, RecordEntry::end_bytes);
    store.segments.insert(number, info);
    scan.records
}

enum SealOutcome {
    Sealed { len: u64 },
    Removed,
}

/// Makes the records of a scan durable and lists them in a footer; removes a segment without any.
fn seal_scanned(
    recovery: FolderRecovery<'_>,
    number: u64,
    scan: &mut OpenScan,
) -> io::Result<SealOutcome> {
    let FolderRecovery { folder, identity, .. } = recovery;
    let name = segment_name(number);
    if scan.records.is_empty() {
        folder.remove_file(&name)?;
        folder.sync_names()?;
        return Ok(SealOutcome::Removed);
    }
    let file = folder.open_file(&name, OpenPurpose::Write).and_then(|file| {
        if scan.durable < scan.records.len() {
            file.sync_data()?;
        }
        Ok(file)
    });
    let file = file.inspect_err(|_| {
        // Not proven to be durable: they do not count.
        scan.torn += (scan.records.len() - scan.durable) as u64;
        scan.records.truncate(scan.durable);
    })?;
    let end = scan.records.last().map_or(SEGMENT_HEADER_BYTES, RecordEntry::end_bytes);
    let footer = write_footer(identity, number, &scan.records);
    let len = end + footer_bytes(scan.records.len());
    file.set_len(len)?;
    file.write_at(&footer, end)?;
    file.sync_data()?;
    Ok(SealOutcome::Sealed { len })
}

/// The newest record of each name; of blocks, those whose ancestors are all there.
fn select_live(entries: &[RecordEntry], store: &mut RecoveredStore) {
    let mut newest: HashMap<(ScopeId, u128), &RecordEntry> = HashMap::new();
    for entry in entries {
        let (name, serial) = (&entry.name, entry.location.serial);
        if matches!(entry.kind, RecordKind::Scope | RecordKind::Calibration) {
            let key = DescriptionKey { kind: entry.kind, scope: name.scope, digest: name.digest };
            let place = store.descriptions.entry(key).or_insert(entry.location);
            if place.serial < serial {
                *place = entry.location;
            }
            continue;
        }
        let place = newest.entry((name.scope, name.digest)).or_insert(entry);
        if place.location.serial < serial {
            *place = entry;
        }
    }
    let counts = &mut store.found.counts;
    let mut candidates = Vec::with_capacity(newest.len());
    for entry in entries.iter().filter(|entry| entry.kind == RecordKind::Block) {
        let Some(winner) = newest.get(&(entry.name.scope, entry.name.digest)) else {
            continue;
        };
        if winner.kind == RecordKind::Tombstone {
            counts.removed += 1;
        } else if winner.location != entry.location {
            counts.replaced += 1;
        } else {
            candidates.push(LiveRecord { name: entry.name, location: entry.location });
        }
    }
    candidates.sort_unstable_by_key(|record| (record.name.position, record.location.serial));
    let mut positions: HashMap<(ScopeId, u128), u32> = HashMap::with_capacity(candidates.len());
    candidates.retain(|record| {
        let is_rooted = has_parent(&record.name, &positions);
        if is_rooted {
            positions.insert((record.name.scope, record.name.lineage), record.name.position);
        }
        is_rooted
    });
    counts.live = candidates.len() as u64;
    counts.orphan = newest.values().filter(|entry| entry.kind == RecordKind::Block).count() as u64
        - counts.live;
    store.found.records = candidates;
}

fn has_parent(name: &BlockName, positions: &HashMap<(ScopeId, u128), u32>) -> bool {
    let Some(before) = name.position.checked_sub(1) else {
        return true;
    };
    positions.get(&(name.scope, name.parent_lineage)) == Some(&before)
}
