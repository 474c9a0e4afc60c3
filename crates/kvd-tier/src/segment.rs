//! The layout of a segment: its header, its footer, its file's name. Pure.

use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::identity::StoreIdentity;
use crate::name::{BlockName, DiskLocation, RecordKind, ScopeId};
use crate::record::{FORMAT_VERSION, RecordHeader, round_up};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const HEADER_MAGIC: [u8; 4] = *b"KVDS";
const FOOTER_MAGIC: [u8; 4] = *b"KVDF";
/// Bytes of a segment's header; the first record begins behind it.
pub(crate) const SEGMENT_HEADER_BYTES: u64 = BLOCK_BYTES as u64;
/// Bytes of a record in a footer.
const FOOTER_ENTRY_BYTES: usize = 96;
/// The last bytes of a sealed segment.
const TRAILER_BYTES: usize = 64;

/// The name of a segment's file.
pub(crate) fn segment_name(number: u64) -> String {
    format!("seg-{number:016x}.kvds")
}

/// The number in the name of a segment's file.
pub(crate) fn parse_name(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("seg-")?.strip_suffix(".kvds")?;
    let number = u64::from_str_radix(digits, 16).ok()?;
    (segment_name(number) == name).then_some(number)
}

/// A segment's first block, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentHeader {
    /// A segment of this store.
    Own {
        /// Where the durable part of the segment before it ends; 0 if the writer did not know.
        prior_end: u64,
    },
    /// From another store, or with another number: somebody moved files.
    Foreign,
    /// A newer format's.
    Newer {
        /// Its version.
        found: u16,
    },
    /// Torn, damaged or never written.
    Damaged,
}

/// Writes a segment's header.
pub(crate) fn write_header(identity: &StoreIdentity, number: u64, prior_end: u64) -> AlignedBytes {
    let mut block = AlignedBytes::with_zeros(BLOCK_BYTES);
    block[..4].copy_from_slice(&HEADER_MAGIC);
    block[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    block[8..24].copy_from_slice(&identity.uuid);
    block[24..32].copy_from_slice(&number.to_le_bytes());
    block[32..40].copy_from_slice(&prior_end.to_le_bytes());
    // Without the seed: a header of another store can be told from a damaged one.
    let checksum = xxh3_64_with_seed(&block[..40], 0).to_le_bytes();
    block[40..48].copy_from_slice(&checksum);
    block
}

/// Parses a segment's header.
pub(crate) fn parse_header(block: &[u8], identity: &StoreIdentity, number: u64) -> SegmentHeader {
    let Some(header) = block.get(..48) else {
        return SegmentHeader::Damaged;
    };
    if header[..4] != HEADER_MAGIC || xxh3_64_with_seed(&header[..40], 0) != word_at(header, 40) {
        return SegmentHeader::Damaged;
    }
    let found = u16::from_le_bytes([header[4], header[5]]);
    if found > FORMAT_VERSION {
        return SegmentHeader::Newer { found };
    }
    if header[8..24] != identity.uuid || word_at(header, 24) != number {
        return SegmentHeader::Foreign;
    }
    SegmentHeader::Own { prior_end: word_at(header, 32) }
}

/// A record of a segment, as its footer lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordEntry {
    pub(crate) kind: RecordKind,
    pub(crate) name: BlockName,
    pub(crate) location: DiskLocation,
}

impl RecordEntry {
    pub(crate) fn from_header(header: &RecordHeader, location: DiskLocation) -> Self {
        Self { kind: header.kind, name: header.name, location }
    }

    /// Where the record begins.
    pub(crate) fn begin_bytes(&self) -> u64 {
        u64::from(self.location.offset) * BLOCK_BYTES as u64
    }

    /// Where the record ends.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.begin_bytes() + self.location.disk_bytes()
    }
}

/// Bytes of the footer of so many records.
pub(crate) fn footer_bytes(records: usize) -> u64 {
    let bytes = records * FOOTER_ENTRY_BYTES + TRAILER_BYTES;
    round_up(bytes as u64, BLOCK_BYTES as u64)
}

/// Writes the footer of a segment: entries, zeros, and the trailer at the very end.
pub(crate) fn write_footer(
    identity: &StoreIdentity,
    number: u64,
    records: &[RecordEntry],
) -> AlignedBytes {
    let bytes = footer_bytes(records.len()) as usize;
    let mut footer = AlignedBytes::with_zeros(bytes);
    for (record, out) in records.iter().zip(footer.chunks_exact_mut(FOOTER_ENTRY_BYTES)) {
        write_entry(record, out);
    }
    let trailer = bytes - TRAILER_BYTES;
    footer[trailer..trailer + 4].copy_from_slice(&FOOTER_MAGIC);
    footer[trailer + 4..trailer + 6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    footer[trailer + 8..trailer + 12].copy_from_slice(&(records.len() as u32).to_le_bytes());
    footer[trailer + 16..trailer + 24].copy_from_slice(&number.to_le_bytes());
    footer[trailer + 24..trailer + 40].copy_from_slice(&identity.uuid);
    let checksum = xxh3_64_with_seed(&footer[..bytes - 8], identity.frame_seed).to_le_bytes();
    footer[bytes - 8..].copy_from_slice(&checksum);
    footer
}

/// Bytes of the footer that the last block of a segment ends, if it ends one.
pub(crate) fn find_footer(last_block: &[u8]) -> Option<u64> {
    let trailer = last_block.get(last_block.len().checked_sub(TRAILER_BYTES)?..)?;
    if trailer[..4] != FOOTER_MAGIC {
        return None;
    }
    let records = u32::from_le_bytes([trailer[8], trailer[9], trailer[10], trailer[11]]);
    Some(footer_bytes(records as usize))
}

/// Parses a footer whose length [`find_footer`] gave; `None` if anything is wrong with it.
/// `begin` is where it lies in the segment.
pub(crate) fn parse_footer(
    footer: &[u8],
    identity: &StoreIdentity,
    number: u64,
    begin: u64,
) -> Option<Vec<RecordEntry>> {
    let body = footer.len().checked_sub(8)?;
    if xxh3_64_with_seed(&footer[..body], identity.frame_seed) != word_at(footer, body) {
        return None;
    }
    let trailer = &footer[footer.len() - TRAILER_BYTES..];
    let is_ours = trailer[4..6] == FORMAT_VERSION.to_le_bytes()
        && word_at(trailer, 16) == number
        && trailer[24..40] == identity.uuid;
    if !is_ours || find_footer(footer)? != footer.len() as u64 {
        return None;
    }
    let count = u32::from_le_bytes([trailer[8], trailer[9], trailer[10], trailer[11]]) as usize;
    let entries = footer.chunks_exact(FOOTER_ENTRY_BYTES).take(count);
    let records: Vec<_> = entries.map_while(|entry| parse_entry(entry, number)).collect();
    let mut at = SEGMENT_HEADER_BYTES;
    for record in &records {
        if record.begin_bytes() < at || record.location.blocks == 0 {
            return None;
        }
        at = record.end_bytes();
    }
    (records.len() == count && at <= begin).then_some(records)
}

fn write_entry(record: &RecordEntry, out: &mut [u8]) {
    let (name, location) = (&record.name, &record.location);
    out[..16].copy_from_slice(&name.scope.0);
    out[16..32].copy_from_slice(&name.digest.to_le_bytes());
    out[32..48].copy_from_slice(&name.lineage.to_le_bytes());
    out[48..64].copy_from_slice(&name.parent_lineage.to_le_bytes());
    out[64..72].copy_from_slice(&location.serial.to_le_bytes());
    out[72..76].copy_from_slice(&name.position.to_le_bytes());
    out[76..80].copy_from_slice(&location.offset.to_le_bytes());
    out[80..84].copy_from_slice(&location.blocks.to_le_bytes());
    out[84..88].copy_from_slice(&location.head_blocks.to_le_bytes());
    out[88] = record.kind as u8;
}

fn parse_entry(entry: &[u8], segment: u64) -> Option<RecordEntry> {
    let kinds =
        [RecordKind::Block, RecordKind::Scope, RecordKind::Calibration, RecordKind::Tombstone];
    let mut scope = [0; 16];
    scope.copy_from_slice(&entry[..16]);
    let half = |at: usize| word_at(entry, at) as u32;
    let wide =
        |at: usize| u128::from(word_at(entry, at)) | u128::from(word_at(entry, at + 8)) << 64;
    Some(RecordEntry {
        kind: kinds.into_iter().find(|kind| *kind as u8 == entry[88])?,
        name: BlockName {
            scope: ScopeId(scope),
            digest: wide(16),
            lineage: wide(32),
            parent_lineage: wide(48),
            position: half(72),
        },
        location: DiskLocation {
            segment,
            serial: word_at(entry, 64),
            offset: half(76),
            blocks: half(80),
            head_blocks: half(84),
        },
    })
}

/// The little-endian word at `at`; zero behind the end.
fn word_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = bytes.get(at..at + 8) {
        word.copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> StoreIdentity {
        StoreIdentity { uuid: [7; 16], hash_seed: 1, frame_seed: 2 }
    }

    fn entries(count: u32) -> Vec<RecordEntry> {
        let entry = |index: u32| RecordEntry {
            kind: RecordKind::Block,
            name: BlockName {
                scope: ScopeId([3; 16]),
                digest: u128::MAX - u128::from(index),
                lineage: 1 << 90 | u128::from(index),
                parent_lineage: 5,
                position: index,
            },
            location: DiskLocation {
                segment: 9,
                serial: u64::MAX - u64::from(index),
                offset: 1 + 2 * index,
                blocks: 2,
                head_blocks: 1,
            },
        };
        (0..count).map(entry).collect()
    }

    #[test]
    fn names_round_trip_and_others_are_none() {
        assert_eq!(parse_name(&segment_name(0xAB)), Some(0xAB));
        for name in ["seg-ab.kvds", "seg-00000000000000AB.kvds", "store.json", "seg-é.kvds"] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn footer_round_trips_and_any_flipped_bit_is_found() {
        for count in [0, 1, 42, 300] {
            let records = entries(count);
            let footer = write_footer(&identity(), 9, &records);
            let begin = SEGMENT_HEADER_BYTES + 8192 * u64::from(count);
            let length = find_footer(&footer[footer.len() - BLOCK_BYTES..]);
            assert_eq!(length, Some(footer.len() as u64));
            assert_eq!(parse_footer(&footer, &identity(), 9, begin), Some(records.clone()));
            assert_eq!(parse_footer(&footer, &identity(), 8, begin), None);
            let mut copy = footer.to_vec();
            for bit in (0..copy.len() * 8).step_by(97) {
                copy[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(parse_footer(&copy, &identity(), 9, begin), None, "bit {bit}");
                copy[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn header_tells_own_foreign_newer_and_damaged_apart() {
        let block = write_header(&identity(), 4, 8192);
        let own = SegmentHeader::Own { prior_end: 8192 };
        assert_eq!(parse_header(&block, &identity(), 4), own);
        assert_eq!(parse_header(&block, &identity(), 5), SegmentHeader::Foreign);
        let other = StoreIdentity { uuid: [8; 16], ..identity() };
        assert_eq!(parse_header(&block, &other, 4), SegmentHeader::Foreign);
        let mut newer = block.to_vec();
        newer[4] = 2;
        assert_eq!(parse_header(&newer, &identity(), 4), SegmentHeader::Damaged);
        let checksum = xxh3_64_with_seed(&newer[..40], 0).to_le_bytes();
        newer[40..48].copy_from_slice(&checksum);
        assert_eq!(parse_header(&newer, &identity(), 4), SegmentHeader::Newer { found: 2 });
        assert_eq!(parse_header(&[0; 4096], &identity(), 4), SegmentHeader::Damaged);
        assert_eq!(parse_header(&[], &identity(), 4), SegmentHeader::Damaged);
    }
}
