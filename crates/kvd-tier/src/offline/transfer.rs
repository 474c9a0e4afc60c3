//! Moves records between folders: files of framed records, one for each scope.
//!
//! In such a file records stand one after another, parents first, with the header's checksum under
//! seed 0, and UUID, segment and offset of zero.

use super::OfflineStore;
use super::change::FolderChange;
use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::draft::SealedRecord;
use crate::error::DiskError;
use crate::identity::io_error;
use crate::name::{BlockName, DiskLocation, RecordKind, RecordMeta, ScopeId};
use crate::record::{FramePlace, RecordHeader};
use crate::recover::DescriptionKey;
use crate::scan::{SegmentRef, read_verified};
use crate::segment::RecordEntry;
use crate::settings::DiskSettings;
use crate::writer::PendingRecord;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const SUFFIX: &str = "kvdr";

/// Hashes of a key under another store's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHashes {
    /// See [`BlockName::digest`].
    pub digest: u128,
    /// See [`BlockName::lineage`].
    pub lineage: u128,
}

/// Hashes keys as the index does. Implemented by who owns the index.
pub trait KeyHasher {
    /// The hashes of a block's key under `seed`; `parent_lineage` is made with the same seed.
    /// None for a key that is none.
    fn hash_key(&self, seed: u64, meta: &RecordMeta, parent_lineage: u128) -> Option<KeyHashes>;
}

/// Counts of moved records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferReport {
    /// Records moved, descriptions and calibrations too.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Not moved: damaged, or an ancestor is missing.
    pub skipped: u64,
    /// Not moved: records of an earlier kvd, which have no key to hash anew.
    pub without_key: u64,
    /// Not moved: they are there already.
    pub existed: u64,
}

impl OfflineStore {
    /// Writes the live records of one scope, or of all, into files of a folder.
    ///
    /// # Errors
    ///
    /// The folder cannot be written. Damaged records are skipped and counted.
    pub fn export_records(
        &self,
        to: &Path,
        scope: Option<ScopeId>,
    ) -> Result<TransferReport, DiskError> {
        let failed = io_error(to, "cannot write exported records");
        fs::create_dir_all(to).map_err(&failed)?;
        let mut by_file: BTreeMap<String, Vec<RecordEntry>> = BTreeMap::new();
        for (key, location) in &self.descriptions {
            let name = BlockName { scope: key.scope, digest: key.digest, ..Default::default() };
            let is_wanted = scope.is_none_or(|scope| scope == key.scope);
            if is_wanted || key.kind == RecordKind::Calibration {
                let entry = RecordEntry { kind: key.kind, name, location: *location };
                by_file.entry(format!("descriptions.{SUFFIX}")).or_default().push(entry);
            }
        }
        for record in &self.found.records {
            if scope.is_none_or(|scope| scope == record.name.scope) {
                let entry = RecordEntry {
                    kind: RecordKind::Block,
                    name: record.name,
                    location: record.location,
                };
                let file = format!("{}.{SUFFIX}", record.name.scope);
                by_file.entry(file).or_default().push(entry);
            }
        }
        let mut report = TransferReport::default();
        for (name, entries) in by_file {
            self.export_file(&to.join(name), &entries, &mut report).map_err(&failed)?;
        }
        Ok(report)
    }

    fn export_file(
        &self,
        path: &Path,
        entries: &[RecordEntry],
        report: &mut TransferReport,
    ) -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        for entry in entries {
            let Some(mut record) = self.read_sealed(entry) else {
                report.skipped += 1;
                continue;
            };
            if record.header.kind == RecordKind::Block && record.header.key_bytes == 0 {
                report.without_key += 1;
                continue;
            }
            record.header.synced_to = 0;
            out.write_all(record.frame_at(&FramePlace::default()))?;
            report.records += 1;
            report.bytes += entry.location.disk_bytes();
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    fn read_sealed(&self, entry: &RecordEntry) -> Option<SealedRecord> {
        let DiskLocation { segment, .. } = entry.location;
        let file = self.shared.table.open_segment(segment).ok()??;
        let identity = &self.shared.identity;
        let segment = SegmentRef { file: &*file, identity, number: segment };
        let bytes = read_verified(segment, entry).ok()?.ok()?;
        let place = identity.place_at(entry.location.segment, entry.begin_bytes());
        SealedRecord::from_bytes(bytes, &place).ok()
    }
}

/// Writes the records of exported files into a folder, under hashes of its own seed. Each block is
/// verified as a whole before it is written; one that is damaged is skipped, with all behind it.
///
/// # Errors
///
/// A file is none, is cut off, or has blocks of another scope than `scope`: then nothing is
/// imported. A file cannot be read; the folder is in use, or cannot be written.
pub fn import_records(
    settings: DiskSettings,
    from: &Path,
    scope: Option<ScopeId>,
    hasher: &dyn KeyHasher,
) -> Result<TransferReport, DiskError> {
    let path = settings.folder.clone();
    let failed = io_error(from, "cannot read exported records");
    let files = list_exported(from).map_err(&failed)?;
    for file in &files {
        check_file(file, scope)?;
    }
    let change = FolderChange::open_folder(settings)?;
    let known = change.opened.found.records.iter();
    let known = known.map(|record| (record.name.scope, record.name.digest)).collect();
    let described = change.opened.shared.descriptions.lock().keys().copied().collect();
    let (lineages, report) = (HashMap::new(), TransferReport::default());
    let mut import = RecordImport { change, hasher, known, described, lineages, report };
    // What was read before a failure is written as a whole.
    let read = files.iter().try_for_each(|file| import.read_file(file));
    let report = import.report;
    import.change.close_folder(&path)?;
    read.map_err(&failed)?;
    Ok(report)
}

/// Fails where a file is not one record after another, or not of a scope. Reads headers alone.
fn check_file(path: &Path, scope: Option<ScopeId>) -> Result<(), DiskError> {
    let failed = io_error(path, "cannot read exported records");
    let bad = |record, what: String| DiskError::BadExport { file: path.to_owned(), record, what };
    let mut file = File::open(path).map_err(&failed)?;
    let (len, mut at, mut record) = (file.metadata().map_err(&failed)?.len(), 0, 0);
    while at < len {
        if len - at < BLOCK_BYTES as u64 {
            return Err(bad(record, "the file is cut off".to_owned()));
        }
        let mut first = AlignedBytes::with_zeros(BLOCK_BYTES);
        file.seek(SeekFrom::Start(at)).map_err(&failed)?;
        file.read_exact(&mut first).map_err(&failed)?;
        let header = RecordHeader::parse_at(&first, &FramePlace::default())
            .map_err(|flaw| bad(record, flaw.to_string()))?;
        if header.record_bytes > len - at {
            return Err(bad(record, "the file is cut off".to_owned()));
        }
        let of = header.name.scope;
        if header.kind == RecordKind::Block && scope.is_some_and(|scope| scope != of) {
            return Err(bad(record, format!("it is of scope {of}")));
        }
        at += header.record_bytes;
        record += 1;
    }
    Ok(())
}

fn list_exported(from: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if path.extension().is_some_and(|suffix| suffix == SUFFIX) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

struct RecordImport<'a> {
    change: FolderChange,
    hasher: &'a dyn KeyHasher,
    /// Blocks that are in the folder.
    known: HashSet<(ScopeId, u128)>,
    /// Descriptions and calibrations that are in the folder.
    described: HashSet<DescriptionKey>,
    /// Lineage of the exporting store to lineage of this one; as many as there are records.
    lineages: HashMap<(ScopeId, u128), u128>,
    report: TransferReport,
}

impl RecordImport<'_> {
    fn read_file(&mut self, path: &Path) -> io::Result<()> {
        let mut file = File::open(path)?;
        let mut left = file.metadata()?.len();
        let place = FramePlace::default();
        while left > 0 {
            let mut first = AlignedBytes::with_zeros(BLOCK_BYTES);
            file.read_exact(&mut first)?;
            let header = RecordHeader::parse_at(&first, &place).map_err(io::Error::other)?;
            if header.record_bytes > left {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
            left -= header.record_bytes;
            let mut bytes = AlignedBytes::with_zeros(header.record_bytes as usize);
            bytes[..BLOCK_BYTES].copy_from_slice(&first);
            file.read_exact(&mut bytes[BLOCK_BYTES..])?;
            match SealedRecord::from_bytes(bytes, &place) {
                Ok(record) => self.take_record(record),
                Err(_) => self.report.skipped += 1,
            }
        }
        Ok(())
    }

    fn take_record(&mut self, mut record: SealedRecord) {
        let limit = self.change.opened.shared.settings.record_bytes_max();
        let header = &mut record.header;
        if header.kind == RecordKind::Tombstone || header.record_bytes > limit {
            self.report.skipped += 1;
            return;
        }
        if header.kind == RecordKind::Block {
            if header.key_bytes == 0 {
                self.report.without_key += 1;
                return;
            }
            if !self.rename_block(header) {
                self.report.skipped += 1;
                return;
            }
        }
        if !self.note_known(header.kind, &header.name) {
            self.report.existed += 1;
            return;
        }
        self.report.records += 1;
        self.report.bytes += header.record_bytes;
        self.change
            .push_pending(|completion, ticket| PendingRecord::new(record, completion, ticket));
    }

    /// Notes a record as one that the folder has; false where it has it.
    fn note_known(&mut self, kind: RecordKind, name: &BlockName) -> bool {
        let (scope, digest) = (name.scope, name.digest);
        match kind {
            RecordKind::Block => self.known.insert((scope, digest)),
            _ => self.described.insert(DescriptionKey { kind, scope, digest }),
        }
    }

    /// Gives a block its names under this store's seed. False if its parent did not come before.
    fn rename_block(&mut self, header: &mut RecordHeader) -> bool {
        let old = header.name;
        let parent = if old.position == 0 {
            Some(0)
        } else {
            self.lineages.get(&(old.scope, old.parent_lineage)).copied()
        };
        let Some(parent_lineage) = parent else {
            return false;
        };
        let key = header.key[..usize::from(header.key_bytes)].into();
        let meta = RecordMeta { name: old, key };
        let seed = self.change.opened.shared.identity.hash_seed;
        let Some(hashes) = self.hasher.hash_key(seed, &meta, parent_lineage) else { return false };
        self.lineages.insert((old.scope, old.lineage), hashes.lineage);
        header.name.digest = hashes.digest;
        header.name.lineage = hashes.lineage;
        header.name.parent_lineage = parent_lineage;
        true
    }
}
