//! Repairs and shrinks a folder. The caller's thread; the folder's lock is held meanwhile.

use super::{OfflineAccess, OfflineStore, VerifyReport, read_identity};
use crate::draft::RecordDraft;
use crate::error::{DiskError, WriteError};
use crate::files::RealFolder;
use crate::identity::open_error;
use crate::listener::KeepNothing;
use crate::lock::FolderLock;
use crate::name::{BlockName, RecordKind, RecordMeta, ScopeId};
use crate::reclaim::CopyPolicy;
use crate::settings::DiskSettings;
use crate::tier::{OpenedStore, draft_plain, open_store};
use crate::writer::{PendingRecord, WriteCompletion};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Says which records go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GarbageRule {
    /// The oldest segments, until their files take at most so many bytes.
    KeepBytes(u64),
    /// All blocks of a scope. Their space comes back as their segments are reclaimed.
    Scope(ScopeId),
}

/// A folder that is changed without a daemon.
pub(super) struct FolderChange {
    pub(super) opened: OpenedStore,
    ticket: u64,
    failure: Arc<Mutex<Option<WriteError>>>,
    _lock: FolderLock,
}

impl FolderChange {
    pub(super) fn open_folder(settings: DiskSettings) -> Result<Self, DiskError> {
        settings.check_limits()?;
        let path = settings.folder.clone();
        let folder = RealFolder::open_or_make(&path).map_err(open_error(&path))?;
        let lock = FolderLock::take_lock(&path)?;
        let folder = Arc::new(folder.choose_direct(settings.direct));
        let opened = open_store(folder, &path, settings, Arc::new(KeepNothing))?;
        Ok(Self { opened, ticket: 0, failure: Arc::default(), _lock: lock })
    }

    /// Writes a record; a failure is told by [`Self::close_folder`].
    pub(super) fn push_draft(&mut self, draft: RecordDraft) {
        self.push_pending(|completion, ticket| {
            PendingRecord::new(draft.seal_record(), completion, ticket)
        });
    }

    pub(super) fn push_pending(
        &mut self,
        make_pending: impl FnOnce(WriteCompletion, u64) -> PendingRecord,
    ) {
        self.ticket += 1;
        let failure = Arc::clone(&self.failure);
        let completion = WriteCompletion::Caller(Box::new(move |result| {
            if let Err(error) = result {
                failure.lock().get_or_insert(error);
            }
        }));
        let pending = make_pending(completion, self.ticket);
        self.opened.writer.write_pending(pending, self.ticket);
        if self.opened.writer.pending_bytes >= self.opened.shared.settings.sync_bytes {
            self.opened.writer.sync_pending();
        }
    }

    pub(super) fn remove_block(&mut self, name: &BlockName) {
        let meta = RecordMeta { name: *name, key: Box::default() };
        // A tombstone has neither key nor layers: it always fits.
        if let Ok(draft) = draft_plain(RecordKind::Tombstone, meta, None) {
            self.push_draft(draft);
        }
    }

    /// Makes all durable and seals the segment.
    pub(super) fn close_folder(mut self, path: &Path) -> Result<(), DiskError> {
        self.opened.writer.close_segment();
        match self.failure.lock().take() {
            None => Ok(()),
            Some(error) => Err(DiskError::Io {
                folder: path.to_owned(),
                what: "cannot write a record",
                source: io::Error::other(error),
            }),
        }
    }
}

/// Verifies a folder, and writes tombstones for the blocks whose records are damaged.
///
/// # Errors
///
/// The folder is in use, or cannot be written.
pub fn repair_folder(settings: DiskSettings) -> Result<VerifyReport, DiskError> {
    let path = settings.folder.clone();
    let report = {
        let store = OfflineStore::open_folder(&path, OfflineAccess::Exclusive)?;
        store.verify_records()
    };
    let mut change = FolderChange::open_folder(settings)?;
    for damaged in report.damaged.iter().filter(|damaged| damaged.kind == RecordKind::Block) {
        change.remove_block(&damaged.name);
    }
    change.close_folder(&path)?;
    Ok(report)
}

/// Drops records by a rule; the bytes that files take less.
///
/// # Errors
///
/// The folder has no store, is in use, or cannot be written.
pub fn collect_garbage(settings: DiskSettings, rule: GarbageRule) -> Result<u64, DiskError> {
    let path = settings.folder.clone();
    let folder = RealFolder::open_existing(&path).map_err(open_error(&path))?;
    read_identity(&folder, &path)?;
    let mut change = FolderChange::open_folder(settings)?;
    let before = change.opened.shared.table.used_bytes();
    match rule {
        GarbageRule::KeepBytes(bytes) => {
            while change.opened.shared.table.used_bytes() > bytes
                && change.opened.writer.reclaim_oldest(CopyPolicy::Never)
            {}
        }
        GarbageRule::Scope(scope) => {
            let records = std::mem::take(&mut change.opened.found.records);
            // Children before parents: a chain that is cut midway is cut at its end.
            for record in records.iter().rev().filter(|record| record.name.scope == scope) {
                change.remove_block(&record.name);
            }
        }
    }
    let shared = Arc::clone(&change.opened.shared);
    change.close_folder(&path)?;
    Ok(before.saturating_sub(shared.table.used_bytes()))
}
