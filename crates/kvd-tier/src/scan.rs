//! Reads what records a segment has: from its footer, or header by header. Reads files, changes
//! none; any thread.

use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::files::StoredFile;
use crate::identity::StoreIdentity;
use crate::record::{RecordFlaw, RecordHeader, verify_record};
use crate::segment::{
    RecordEntry, SEGMENT_HEADER_BYTES, SegmentHeader, find_footer, parse_footer, parse_header,
};
use std::io;

/// Bytes read at once while records are large, small, and while none is found.
const WINDOW_LARGE: u64 = BLOCK_BYTES as u64;
const WINDOW_SMALL: u64 = 256 << 10;
const WINDOW_SEARCH: u64 = 1 << 20;
/// Records from this size on are read header by header.
const LARGE_RECORD_BYTES: u64 = 64 << 10;
/// Blocks that cannot be read before a scan gives the segment up.
const READ_ERRORS_MAX: u64 = 256;

/// A segment's first and last blocks.
#[derive(Debug)]
pub(crate) struct SegmentOutline {
    pub(crate) header: SegmentHeader,
    /// Records that the footer lists, if the segment is sealed.
    pub(crate) footer: Option<Vec<RecordEntry>>,
    pub(crate) len: u64,
}

/// How far a segment's bytes are known to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DurableEnd {
    /// Its own headers say how far; what is behind is read and verified.
    FromHeaders,
    /// The writer left it there; what is behind never counted.
    At(u64),
}

/// The records of a segment without a footer.
#[derive(Debug, Default)]
pub(crate) struct OpenScan {
    /// Records to believe, in order.
    pub(crate) records: Vec<RecordEntry>,
    /// How many of the first of them were known to be durable; the rest was read and verified.
    pub(crate) durable: usize,
    /// Records found torn, and damaged places.
    pub(crate) torn: u64,
    /// Largest serial of any header.
    pub(crate) serial_max: u64,
}

/// An open segment of a store.
#[derive(Clone, Copy)]
pub(crate) struct SegmentRef<'a> {
    pub(crate) file: &'a dyn StoredFile,
    pub(crate) identity: &'a StoreIdentity,
    pub(crate) number: u64,
}

/// Reads header and footer.
pub(crate) fn read_outline(segment: SegmentRef<'_>) -> io::Result<SegmentOutline> {
    let SegmentRef { file, identity, number } = segment;
    // A length that is no multiple was cut by somebody: O_DIRECT could not read the rest.
    let len = file.read_len()? & !(BLOCK_BYTES as u64 - 1);
    let mut block = AlignedBytes::with_zeros(BLOCK_BYTES);
    if len < SEGMENT_HEADER_BYTES {
        return Ok(SegmentOutline { header: SegmentHeader::Damaged, footer: None, len });
    }
    // A block that cannot be read is a damaged one; records carry all that matters.
    let header = match file.read_at(&mut block, 0) {
        Ok(()) => parse_header(&block, identity, number),
        Err(_) => SegmentHeader::Damaged,
    };
    let footer = read_footer(segment, len).unwrap_or(None);
    Ok(SegmentOutline { header, footer, len })
}

fn read_footer(segment: SegmentRef<'_>, len: u64) -> io::Result<Option<Vec<RecordEntry>>> {
    let SegmentRef { file, identity, number } = segment;
    let mut block = AlignedBytes::with_zeros(BLOCK_BYTES);
    file.read_at(&mut block, len - BLOCK_BYTES as u64)?;
    let Some(bytes) = find_footer(&block) else {
        return Ok(None);
    };
    let Some(begin) = len.checked_sub(bytes).filter(|begin| *begin >= SEGMENT_HEADER_BYTES) else {
        return Ok(None);
    };
    let mut footer = AlignedBytes::with_zeros(bytes as usize);
    file.read_at(&mut footer, begin)?;
    Ok(parse_footer(&footer, identity, number, begin))
}

/// Reads blocks of a file through a window, so that small records cost few reads.
struct BlockWindow<'a> {
    file: &'a dyn StoredFile,
    len: u64,
    bytes: AlignedBytes,
    begin: u64,
    end: u64,
}

impl<'a> BlockWindow<'a> {
    fn new(file: &'a dyn StoredFile, len: u64) -> Self {
        let bytes = AlignedBytes::with_zeros(WINDOW_SEARCH as usize);
        Self { file, len, bytes, begin: 0, end: 0 }
    }

    /// The block at `offset`; `ahead` bytes from there are read if it is not in the window.
    fn read_block(&mut self, offset: u64, ahead: u64) -> io::Result<&[u8]> {
        let block = BLOCK_BYTES as u64;
        if offset < self.begin || offset + block > self.end {
            self.end = self.begin;
            let mut bytes = ahead.min(self.len - offset) as usize;
            if self.file.read_at(&mut self.bytes[..bytes], offset).is_err() {
                // One bad block must not hide its neighbours.
                bytes = BLOCK_BYTES;
                self.file.read_at(&mut self.bytes[..bytes], offset)?;
            }
            (self.begin, self.end) = (offset, offset + bytes as u64);
        }
        let at = (offset - self.begin) as usize;
        Ok(&self.bytes[at..at + BLOCK_BYTES])
    }
}

/// Finds the records of a segment without a footer.
pub(crate) fn scan_records(segment: SegmentRef<'_>, len: u64, durable_end: DurableEnd) -> OpenScan {
    let limit = match durable_end {
        DurableEnd::FromHeaders => len,
        DurableEnd::At(end) => end.min(len),
    };
    let mut found = find_headers(segment, limit);
    let synced_to = match durable_end {
        DurableEnd::FromHeaders => found.synced_to,
        DurableEnd::At(end) => end,
    };
    let mut scan =
        OpenScan { torn: found.gaps, serial_max: found.serial_max, ..Default::default() };
    for record in found.records.drain(..) {
        if record.end_bytes() <= synced_to {
            scan.records.push(record);
            scan.durable = scan.records.len();
        } else if matches!(read_verified(segment, &record), Ok(Ok(_))) {
            scan.records.push(record);
        } else {
            scan.torn += 1;
        }
    }
    scan
}

#[derive(Default)]
struct FoundHeaders {
    records: Vec<RecordEntry>,
    /// The furthest end that any header calls durable.
    synced_to: u64,
    serial_max: u64,
    /// Places where no record could be read, though something was written.
    gaps: u64,
}

fn find_headers(segment: SegmentRef<'_>, limit: u64) -> FoundHeaders {
    let mut found = FoundHeaders::default();
    let mut window = BlockWindow::new(segment.file, limit);
    let (mut at, mut ahead) = (SEGMENT_HEADER_BYTES, WINDOW_SMALL);
    let (mut is_in_gap, mut read_errors) = (false, 0);
    while at + BLOCK_BYTES as u64 <= limit && read_errors < READ_ERRORS_MAX {
        let place = segment.identity.place_at(segment.number, at);
        let is_written = match window.read_block(at, ahead) {
            Ok(block) => match RecordHeader::parse_at(block, &place) {
                Ok(header) if at + header.record_bytes <= limit => {
                    let entry = RecordEntry::from_header(&header, header.location_at(&place));
                    found.records.push(entry);
                    found.synced_to = found.synced_to.max(header.synced_to);
                    found.serial_max = found.serial_max.max(header.serial);
                    at += header.record_bytes;
                    let is_large = header.record_bytes >= LARGE_RECORD_BYTES;
                    ahead = if is_large { WINDOW_LARGE } else { WINDOW_SMALL };
                    is_in_gap = false;
                    continue;
                }
                Ok(_) => true,
                Err(_) => block.iter().any(|byte| *byte != 0),
            },
            Err(_) => {
                read_errors += 1;
                true
            }
        };
        if is_written && !is_in_gap {
            found.gaps += 1;
            is_in_gap = true;
        }
        ahead = WINDOW_SEARCH;
        at += BLOCK_BYTES as u64;
    }
    found
}

/// Reads a whole record and verifies every byte that matters.
pub(crate) fn read_verified(
    segment: SegmentRef<'_>,
    record: &RecordEntry,
) -> io::Result<Result<AlignedBytes, RecordFlaw>> {
    let mut bytes = AlignedBytes::with_zeros(record.location.disk_bytes() as usize);
    match segment.file.read_at(&mut bytes, record.begin_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Ok(Err(RecordFlaw::Short));
        }
        result => result?,
    }
    let place = segment.identity.place_at(segment.number, record.begin_bytes());
    let verified = match verify_record(&bytes, &place) {
        Ok(verified) => verified,
        Err(flaw) => return Ok(Err(flaw)),
    };
    if verified.header.location_at(&place) != record.location {
        return Ok(Err(RecordFlaw::Misplaced));
    }
    Ok(Ok(bytes))
}
