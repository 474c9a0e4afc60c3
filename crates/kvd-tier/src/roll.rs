//! Opens, seals and abandons segments. The writer's thread.

use crate::error::WriteError;
use crate::files::StoredFile;
use crate::levels::LevelCells;
use crate::reclaim::CopyPolicy;
use crate::scan::DurableEnd;
use crate::segment::{SEGMENT_HEADER_BYTES, segment_name, write_footer, write_header};
use crate::table::SegmentInfo;
use crate::writer::{OpenSegment, SegmentWriter, is_full, write_error};
use std::io;
use std::sync::Arc;

/// Rolls until a record finds room: a new segment may fill with copies while an old one goes.
const ROLLS_MAX: u32 = 4;

impl SegmentWriter {
    /// Sees to it that a record of so many bytes fits into the open segment.
    pub(crate) fn make_room(&mut self, bytes: u64) -> Result<(), WriteError> {
        let has_room =
            |writer: &Self| writer.open.as_ref().is_some_and(|open| open.has_room(bytes));
        for _ in 0..ROLLS_MAX {
            if has_room(self) {
                return Ok(());
            }
            self.sync_pending();
            if has_room(self) {
                return Ok(());
            }
            self.seal_open();
            self.open_segment()?;
        }
        Err(WriteError::Full)
    }

    /// Makes a new segment, reclaiming old ones for it.
    fn open_segment(&mut self) -> Result<(), WriteError> {
        if !self.has_space() && !self.is_reclaiming {
            while self.is_over(self.shared.settings.segment_bytes)
                && self.reclaim_oldest(CopyPolicy::Never)
            {}
            if !self.has_space() {
                self.reclaim_oldest(CopyPolicy::Never);
            }
        }
        if !self.has_space() {
            return Err(WriteError::Full);
        }
        let mut created = self.create_segment();
        if let Err(error) = &created
            && is_full(error)
            // A limit on the size of files: no segment that goes would help.
            && error.kind() != io::ErrorKind::FileTooLarge
            && !self.is_reclaiming
            && self.reclaim_oldest(CopyPolicy::Never)
        {
            created = self.create_segment();
        }
        if let Err(error) = created {
            LevelCells::add_to(&self.level_cells().errors_file, 1);
            self.note_failure(&error);
            return Err(write_error(&error));
        }
        self.trim_to_capacity();
        Ok(())
    }

    /// Keeps one segment's bytes free, so that the next one can be made before an old one goes.
    fn trim_to_capacity(&mut self) {
        if self.is_reclaiming {
            return;
        }
        while self.is_over(self.shared.settings.segment_bytes)
            && self.reclaim_oldest(CopyPolicy::Chosen)
        {}
        self.show_space();
    }

    /// Whether so many bytes more would be over the capacity.
    pub(crate) fn is_over(&self, bytes: u64) -> bool {
        self.shared.table.used_bytes() + bytes > self.shared.settings.bytes
    }

    /// Whether a segment may be made: capacity, and what the file system must keep free.
    fn has_space(&self) -> bool {
        let settings = &self.shared.settings;
        if self.is_over(settings.segment_bytes) {
            return false;
        }
        // A file system that does not say is asked when the segment is made.
        let free = self.shared.folder.free_bytes().unwrap_or(u64::MAX);
        free >= settings.reserve_free_bytes.saturating_add(settings.segment_bytes)
    }

    fn create_segment(&mut self) -> io::Result<()> {
        let (number, len) = (self.next_number, self.shared.settings.segment_bytes);
        self.next_number += 1;
        let name = segment_name(number);
        let file = self.shared.folder.create_file(&name, len)?;
        if let Err(error) = self.begin_segment(&*file, number) {
            // The first error is the one that matters; recovery removes segments without records.
            drop(self.shared.folder.remove_file(&name));
            return Err(error);
        }
        let info = SegmentInfo { len, durable_end: DurableEnd::FromHeaders };
        self.shared.table.set_segment(number, info);
        self.open = Some(OpenSegment {
            number,
            file: Arc::clone(&file),
            len,
            end: SEGMENT_HEADER_BYTES,
            synced_to: SEGMENT_HEADER_BYTES,
            entries: Vec::new(),
            failure: None,
        });
        self.show_space();
        Ok(())
    }

    fn begin_segment(&self, file: &dyn StoredFile, number: u64) -> io::Result<()> {
        let header = write_header(&self.shared.identity, number, self.prior_end);
        file.write_at(&header, 0)?;
        file.sync_data()?;
        self.shared.folder.sync_names()
    }

    /// Ends the open segment with a footer. Everything in it is durable already.
    pub(crate) fn seal_open(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        self.prior_end = open.synced_to;
        if open.synced_to == SEGMENT_HEADER_BYTES {
            return self.discard_segment(open.number);
        }
        let footer = write_footer(&self.shared.identity, open.number, &open.entries);
        let len = open.end + footer.len() as u64;
        let sealed = open
            .file
            .set_len(len)
            .and_then(|()| open.file.write_at(&footer, open.end))
            .and_then(|()| open.file.sync_data());
        let info = match sealed {
            Ok(()) => SegmentInfo { len, durable_end: DurableEnd::FromHeaders },
            Err(_) => {
                LevelCells::add_to(&self.level_cells().errors_file, 1);
                SegmentInfo { len: open.len, durable_end: DurableEnd::At(open.synced_to) }
            }
        };
        self.shared.table.set_segment(open.number, info);
    }

    /// Leaves the open segment as it is: what is not synced never counts, and nothing of it is
    /// written or synced again.
    pub(crate) fn abandon_open(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        self.prior_end = open.synced_to;
        if open.synced_to == SEGMENT_HEADER_BYTES {
            return self.discard_segment(open.number);
        }
        let durable_end = DurableEnd::At(open.synced_to);
        self.shared.table.set_segment(open.number, SegmentInfo { len: open.len, durable_end });
    }

    /// Removes a segment's file. Names are synced, so that it does not come back after younger
    /// tombstones have gone.
    pub(crate) fn discard_segment(&mut self, number: u64) {
        self.shared.table.forget_segment(number);
        let removed = self
            .shared
            .folder
            .remove_file(&segment_name(number))
            .and_then(|()| self.shared.folder.sync_names());
        if removed.is_err() {
            LevelCells::add_to(&self.level_cells().errors_file, 1);
        }
        self.show_space();
    }

    /// Writes what waits, seals the segment.
    pub(crate) fn close_segment(&mut self) {
        self.sync_pending();
        self.seal_open();
        self.show_space();
    }

    /// Puts the space of segments into the levels.
    pub(crate) fn show_space(&self) {
        LevelCells::set_to(&self.level_cells().used_bytes, self.shared.table.used_bytes());
        LevelCells::set_to(&self.level_cells().segments, self.shared.table.segment_count() as u64);
    }
}
