//! Writes records into the open segment, syncs batches, acknowledges. One thread.
//!
//! Nothing is acknowledged before the sync of its bytes has succeeded. After a failure the segment
//! is abandoned: its unsynced part never counts, its file is never synced again, and the records
//! go into a new segment once more. Three failures in a row turn the tier off.

use crate::draft::SealedRecord;
use crate::error::WriteError;
use crate::files::StoredFile;
use crate::levels::{LevelCells, TierState};
use crate::listener::{OnDurable, ReclaimListener};
use crate::lost::LostLineages;
use crate::name::{BlockName, DiskLocation, LiveRecord, RecordKind};
use crate::recover::{DescriptionKey, RecoveredStore};
use crate::segment::{RecordEntry, footer_bytes};
use crate::shared::TierShared;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Failures of the device in a row after which the tier is off.
const FAILURES_MAX: u32 = 3;
/// Times that a record is written before it is given up.
const ATTEMPTS_MAX: u8 = 2;

/// The segment that is written.
pub(crate) struct OpenSegment {
    pub(crate) number: u64,
    pub(crate) file: Arc<dyn StoredFile>,
    pub(crate) len: u64,
    /// Where the next record begins.
    pub(crate) end: u64,
    /// All before this is durable.
    pub(crate) synced_to: u64,
    pub(crate) entries: Vec<RecordEntry>,
    /// A write failed: the segment is to be abandoned.
    pub(crate) failure: Option<io::Error>,
}

impl OpenSegment {
    /// Whether a record of so many bytes fits, with the footer behind it.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.failure.is_none()
            && self.end + bytes + footer_bytes(self.entries.len() + 1) <= self.len
    }
}

/// Who waits for a record.
pub(crate) enum WriteCompletion {
    /// A caller.
    Caller(OnDurable),
    /// The index, whose record is copied.
    Move {
        /// The first copy.
        from: LiveRecord,
    },
    /// Nobody: a description that is copied.
    Nobody,
}

/// A record on its way.
pub(crate) struct PendingRecord {
    pub(crate) record: SealedRecord,
    pub(crate) completion: WriteCompletion,
    /// Order of queueing.
    pub(crate) ticket: u64,
    pub(crate) attempts: u8,
    /// Where it was written, not yet durable.
    pub(crate) location: Option<DiskLocation>,
}

impl PendingRecord {
    pub(crate) fn new(record: SealedRecord, completion: WriteCompletion, ticket: u64) -> Self {
        Self { record, completion, ticket, attempts: 0, location: None }
    }

    fn block_name(&self) -> Option<BlockName> {
        let header = &self.record.header;
        (header.kind == RecordKind::Block).then_some(header.name)
    }
}

pub(crate) struct SegmentWriter {
    pub(crate) shared: Arc<TierShared>,
    pub(crate) listener: Arc<dyn ReclaimListener>,
    pub(crate) open: Option<OpenSegment>,
    pub(crate) pending: Vec<PendingRecord>,
    pub(crate) pending_bytes: u64,
    pub(crate) next_number: u64,
    /// Where the durable part of the segment before the next one ends.
    pub(crate) prior_end: u64,
    pub(crate) lost: LostLineages,
    /// Ticket of the newest record in the queue.
    pub(crate) last_ticket: u64,
    pub(crate) is_reclaiming: bool,
    /// Copies that failed while a segment is reclaimed.
    pub(crate) failed_moves: Vec<LiveRecord>,
    next_serial: u64,
    failures_in_row: u32,
}

impl SegmentWriter {
    pub(crate) fn new(
        shared: Arc<TierShared>,
        listener: Arc<dyn ReclaimListener>,
        recovered: &RecoveredStore,
    ) -> Self {
        let writer = Self {
            shared,
            listener,
            open: None,
            pending: Vec::new(),
            pending_bytes: 0,
            next_number: recovered.next_number,
            prior_end: recovered.prior_end,
            lost: LostLineages::default(),
            last_ticket: 0,
            is_reclaiming: false,
            failed_moves: Vec::new(),
            next_serial: recovered.next_serial,
            failures_in_row: 0,
        };
        writer.show_space();
        writer
    }

    pub(crate) fn level_cells(&self) -> &LevelCells {
        &self.shared.cells
    }

    /// Writes a record, not yet durable. `last_ticket` is that of the newest in the queue.
    pub(crate) fn write_pending(&mut self, pending: PendingRecord, last_ticket: u64) {
        self.last_ticket = last_ticket;
        self.lost.forget_before(pending.ticket);
        self.place_record(pending);
    }

    /// Writes a record at the end of the open segment, or of a new one.
    pub(crate) fn place_record(&mut self, mut pending: PendingRecord) {
        if self.shared.tier_state() == TierState::Off {
            return self.fail_record(pending, WriteError::Off);
        }
        let is_lost = |name: BlockName| self.lost.has_parent_of(&name);
        if pending.block_name().is_some_and(is_lost) {
            return self.fail_record(pending, WriteError::ParentLost);
        }
        let bytes = pending.record.header.record_bytes;
        if let Err(error) = self.make_room(bytes) {
            return self.fail_record(pending, error);
        }
        let Some(open) = self.open.as_mut() else {
            return self.fail_record(pending, WriteError::Full);
        };
        let place = self.shared.identity.place_at(open.number, open.end);
        pending.record.header.serial = self.next_serial;
        pending.record.header.synced_to = open.synced_to;
        self.next_serial += 1;
        let location = pending.record.header.location_at(&place);
        let begin = Instant::now();
        let written = open.file.write_at(pending.record.frame_at(&place), open.end);
        LevelCells::add_to(&self.shared.cells.write_us, begin.elapsed().as_micros() as u64);
        open.entries.push(RecordEntry::from_header(&pending.record.header, location));
        pending.location = Some(location);
        self.pending.push(pending);
        self.pending_bytes += bytes;
        match written {
            Ok(()) => open.end += bytes,
            Err(error) => {
                LevelCells::add_to(&self.shared.cells.errors_write, 1);
                open.failure = Some(error);
                self.sync_pending();
            }
        }
    }

    /// Makes what was written durable and acknowledges it; what fails is written once more.
    pub(crate) fn sync_pending(&mut self) {
        while !self.pending.is_empty() {
            match self.sync_open() {
                Ok(()) => self.acknowledge_pending(),
                Err(error) => self.retry_pending(&error),
            }
        }
    }

    fn sync_open(&mut self) -> io::Result<()> {
        let Some(open) = self.open.as_mut() else {
            return Err(io::Error::from(io::ErrorKind::NotFound));
        };
        if let Some(failure) = open.failure.take() {
            return Err(failure);
        }
        let begin = Instant::now();
        let synced = open.file.sync_data();
        LevelCells::add_to(&self.shared.cells.write_us, begin.elapsed().as_micros() as u64);
        if let Err(error) = synced {
            LevelCells::add_to(&self.shared.cells.errors_sync, 1);
            return Err(error);
        }
        open.synced_to = open.end;
        LevelCells::add_to(&self.shared.cells.syncs, 1);
        Ok(())
    }

    fn acknowledge_pending(&mut self) {
        self.failures_in_row = 0;
        if self.shared.tier_state() == TierState::Degraded {
            self.shared.set_state(TierState::Ok);
        }
        self.pending_bytes = 0;
        for pending in std::mem::take(&mut self.pending) {
            let Some(location) = pending.location else {
                continue;
            };
            let header = &pending.record.header;
            LevelCells::add_to(&self.shared.cells.written_bytes, header.record_bytes);
            LevelCells::add_to(&self.shared.cells.written_records, 1);
            match header.kind {
                RecordKind::Block => self.lost.remove_block(&header.name),
                RecordKind::Tombstone => LevelCells::add_to(&self.shared.cells.tombstones, 1),
                kind => {
                    let (scope, digest) = (header.name.scope, header.name.digest);
                    let key = DescriptionKey { kind, scope, digest };
                    self.shared.descriptions.lock().insert(key, location);
                }
            }
            match pending.completion {
                WriteCompletion::Caller(on_durable) => on_durable(Ok(location)),
                WriteCompletion::Move { from } => {
                    LevelCells::add_to(&self.shared.cells.reinserted_bytes, header.record_bytes);
                    self.listener.record_moved(&from.name, &from.location, &location);
                }
                WriteCompletion::Nobody => {}
            }
        }
    }

    fn retry_pending(&mut self, error: &io::Error) {
        self.note_failure(error);
        self.abandon_open();
        self.pending_bytes = 0;
        for mut pending in std::mem::take(&mut self.pending) {
            pending.attempts += 1;
            pending.location = None;
            if pending.attempts >= ATTEMPTS_MAX {
                self.fail_record(pending, write_error(error));
            } else {
                self.place_record(pending);
            }
        }
    }

    /// Counts a failure of the device; a full disk is none.
    pub(crate) fn note_failure(&mut self, error: &io::Error) {
        if is_full(error) {
            return;
        }
        self.failures_in_row += 1;
        let is_off = self.failures_in_row >= FAILURES_MAX;
        self.shared.set_state(if is_off { TierState::Off } else { TierState::Degraded });
    }

    pub(crate) fn fail_record(&mut self, pending: PendingRecord, error: WriteError) {
        if let Some(name) = pending.block_name() {
            self.lost.add_block(&name, self.last_ticket);
        }
        let cell = match error {
            WriteError::Full => &self.shared.cells.drops_full,
            WriteError::Io { .. } => &self.shared.cells.drops_io,
            WriteError::ParentLost => &self.shared.cells.drops_parent,
            WriteError::Off | WriteError::Closed => &self.shared.cells.drops_other,
        };
        match pending.completion {
            WriteCompletion::Caller(on_durable) => {
                LevelCells::add_to(cell, 1);
                on_durable(Err(error));
            }
            WriteCompletion::Move { from } => self.failed_moves.push(from),
            WriteCompletion::Nobody => {}
        }
    }
}

/// Whether the system says that there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

pub(crate) fn write_error(error: &io::Error) -> WriteError {
    if is_full(error) { WriteError::Full } else { WriteError::Io { kind: error.kind() } }
}
