//! Reads records and verifies them, in the caller's thread. Any number at once.

use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::error::ReadError;
use crate::files::StoredFile;
use crate::levels::LevelCells;
use crate::name::DiskLocation;
use crate::part::{RecordHead, RecordPart};
use crate::record::{FramePlace, RecordFlaw, verify_layer, verify_record};
use crate::shared::TierShared;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A read that has failed, before it is counted.
enum ReadFault {
    Gone,
    Flaw(RecordFlaw),
    System(io::Error),
}

impl From<RecordFlaw> for ReadFault {
    fn from(flaw: RecordFlaw) -> Self {
        Self::Flaw(flaw)
    }
}

impl From<io::Error> for ReadFault {
    fn from(error: io::Error) -> Self {
        // A file that was cut.
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Self::Flaw(RecordFlaw::Short);
        }
        Self::System(error)
    }
}

impl TierShared {
    fn place_of(&self, location: &DiskLocation) -> FramePlace {
        let offset = u64::from(location.offset) * BLOCK_BYTES as u64;
        self.identity.place_at(location.segment, offset)
    }

    fn open_for(&self, location: &DiskLocation) -> Result<Arc<dyn StoredFile>, ReadFault> {
        self.table.open_segment(location.segment)?.ok_or(ReadFault::Gone)
    }

    /// A whole record, in one read.
    pub(crate) fn read_record(&self, location: &DiskLocation) -> Result<RecordPart, ReadError> {
        let begin = Instant::now();
        let read = self.try_record(location);
        self.count_read(location, begin, read)
    }

    fn try_record(&self, location: &DiskLocation) -> Result<RecordPart, ReadFault> {
        let file = self.open_for(location)?;
        let place = self.place_of(location);
        let mut bytes = AlignedBytes::with_zeros(location.disk_bytes() as usize);
        file.read_at(&mut bytes, place.offset)?;
        let verified = verify_record(&bytes, &place)?;
        if verified.header.location_at(&place) != *location {
            return Err(RecordFlaw::Misplaced.into());
        }
        let layers = 0..verified.header.layers;
        let head = Arc::new(RecordHead::from_verified(verified, &bytes));
        Ok(RecordPart { head, layers, bytes, begin: 0 })
    }

    /// A record's head alone.
    pub(crate) fn read_head(&self, location: &DiskLocation) -> Result<RecordPart, ReadError> {
        let begin = Instant::now();
        let read = self.try_head(location);
        self.count_read(location, begin, read)
    }

    fn try_head(&self, location: &DiskLocation) -> Result<RecordPart, ReadFault> {
        let file = self.open_for(location)?;
        let place = self.place_of(location);
        let mut bytes = AlignedBytes::with_zeros(location.head_blocks as usize * BLOCK_BYTES);
        file.read_at(&mut bytes, place.offset)?;
        let head = RecordHead::parse_bytes(&bytes, &place)?;
        if head.header.location_at(&place) != *location {
            return Err(RecordFlaw::Misplaced.into());
        }
        let bytes = AlignedBytes::with_zeros(0);
        Ok(RecordPart { head: Arc::new(head), layers: 0..0, bytes, begin: 0 })
    }

    /// Layers of a record whose head was read before.
    pub(crate) fn read_layers(
        &self,
        location: &DiskLocation,
        head: &Arc<RecordHead>,
        layers: Range<u32>,
    ) -> Result<RecordPart, ReadError> {
        let count = head.layer_count();
        if layers.end > count || layers.start > layers.end {
            return Err(ReadError::NoSuchLayer { asked: layers.end, layers: count });
        }
        let begin = Instant::now();
        let read = self.try_layers(location, head, layers);
        self.count_read(location, begin, read)
    }

    fn try_layers(
        &self,
        location: &DiskLocation,
        head: &Arc<RecordHead>,
        layers: Range<u32>,
    ) -> Result<RecordPart, ReadFault> {
        if head.header.serial != location.serial {
            return Err(RecordFlaw::Misplaced.into());
        }
        let file = self.open_for(location)?;
        let place = self.place_of(location);
        let entries = &head.entries[layers.start as usize..layers.end as usize];
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            let bytes = AlignedBytes::with_zeros(0);
            return Ok(RecordPart { head: Arc::clone(head), layers, bytes, begin: 0 });
        };
        let begin = first.span.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = last.span.end.next_multiple_of(BLOCK_BYTES);
        let mut bytes = AlignedBytes::with_zeros(end - begin);
        file.read_at(&mut bytes, place.offset + begin as u64)?;
        for (layer, entry) in layers.clone().zip(entries) {
            let span = entry.span.start - begin..entry.span.end - begin;
            verify_layer(entry, layer, &bytes[span])?;
        }
        Ok(RecordPart { head: Arc::clone(head), layers, bytes, begin })
    }

    fn count_read(
        &self,
        location: &DiskLocation,
        begin: Instant,
        read: Result<RecordPart, ReadFault>,
    ) -> Result<RecordPart, ReadError> {
        LevelCells::add_to(&self.cells.read_us, begin.elapsed().as_micros() as u64);
        let fault = match read {
            Ok(part) => {
                LevelCells::add_to(&self.cells.reads, 1);
                let bytes = part.bytes.len().max(BLOCK_BYTES) as u64;
                LevelCells::add_to(&self.cells.read_bytes, bytes);
                return Ok(part);
            }
            Err(fault) => fault,
        };
        let location = *location;
        Err(match fault {
            ReadFault::Gone => {
                LevelCells::add_to(&self.cells.misses_gone, 1);
                ReadError::Gone { location }
            }
            ReadFault::Flaw(flaw) => {
                LevelCells::add_to(&self.cells.corrupt_records, 1);
                ReadError::Corrupt { location, flaw }
            }
            ReadFault::System(error) => {
                LevelCells::add_to(&self.cells.errors_read, 1);
                ReadError::Io { kind: error.kind() }
            }
        })
    }
}
