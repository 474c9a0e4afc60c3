//! The layout of a record: built, parsed strictly, verified. Pure: bytes in, bytes or names out.
//!
//! `docs/cache-format.md` has the table. No bytes make these functions panic or read past an end.

use crate::aligned::BLOCK_BYTES;
use crate::name::{BlockName, DiskLocation, RecordKind, ScopeId};
use std::ops::Range;
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Version of records, segments and footers.
pub const FORMAT_VERSION: u16 = 1;
/// Bytes of a record's header, the directory behind it not included.
pub const HEADER_BYTES: usize = 256;
/// Longest key.
pub const KEY_BYTES_MAX: usize = 64;
/// Most layers of a record.
pub const LAYERS_MAX: usize = 4096;
/// Largest header, directory and tables of a record.
pub const HEAD_BYTES_MAX: u64 = 64 << 20;
/// Largest record.
pub const RECORD_BYTES_MAX: u64 = 4 << 30;

pub(crate) const ENTRY_BYTES: usize = 32;
pub(crate) const END_BYTES: usize = 16;
pub(crate) const PAYLOAD_ALIGN: usize = 64;
const MAGIC: [u8; 4] = *b"KVDR";

/// The first thing that is wrong with the bytes of a record.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordFlaw {
    /// Fewer bytes than the record has.
    #[error("it is cut off")]
    Short,
    /// No record begins here.
    #[error("no record begins here")]
    Magic,
    /// Another version.
    #[error("its version is {found}, not {FORMAT_VERSION}")]
    Version {
        /// Version that it says.
        found: u16,
    },
    /// The header's checksum.
    #[error("its header has another checksum")]
    HeaderChecksum,
    /// A field of the header is out of range.
    #[error("its header's {field} is out of range")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
    /// The record of another place: a misdirected write, or a swapped file.
    #[error("it belongs elsewhere")]
    Misplaced,
    /// The directory's checksum.
    #[error("its directory has another checksum")]
    DirectoryChecksum,
    /// An entry of the directory.
    #[error("its directory's entry of layer {layer} is out of range")]
    Entry {
        /// Layer of the entry.
        layer: u32,
    },
    /// A layer's checksum.
    #[error("its layer {layer} has another checksum")]
    LayerChecksum {
        /// The layer.
        layer: u32,
    },
    /// The end mark.
    #[error("its end mark is missing")]
    EndMark,
}

/// Makes a record's header valid in one place only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct FramePlace {
    /// UUID of the store; zeros in an exported file.
    pub(crate) store: [u8; 16],
    /// Seed of header checksums, a secret of the store: payloads come from clients, and none of
    /// them can write bytes that look like a header.
    pub(crate) seed: u64,
    /// Number of the segment.
    pub(crate) segment: u64,
    /// Where the record begins in it.
    pub(crate) offset: u64,
}

/// The fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub(crate) kind: RecordKind,
    pub(crate) name: BlockName,
    pub(crate) key: [u8; KEY_BYTES_MAX],
    pub(crate) key_bytes: u8,
    pub(crate) layers: u32,
    pub(crate) tables_bytes: u32,
    /// Header, directory and tables, up to the payload.
    pub(crate) head_bytes: u32,
    /// Where the last layer ends.
    pub(crate) payload_end: u64,
    /// Bytes of the whole record, a multiple of [`BLOCK_BYTES`].
    pub(crate) record_bytes: u64,
    pub(crate) serial: u64,
    /// All bytes of the segment before this offset were durable when this was written.
    pub(crate) synced_to: u64,
    pub(crate) created_ms: u64,
    pub(crate) directory_checksum: u64,
}

/// One layer of a record's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerEntry {
    /// Bytes in the record.
    pub(crate) span: Range<usize>,
    pub(crate) checksum: u64,
    /// The form's bytes in the record.
    pub(crate) form: Range<usize>,
}

/// Reads little-endian fields one after another.
struct FieldReader<'a> {
    bytes: &'a [u8],
}

impl FieldReader<'_> {
    fn take_bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        if let Some((head, rest)) = self.bytes.split_at_checked(N) {
            field.copy_from_slice(head);
            self.bytes = rest;
        }
        field
    }

    fn take_u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take_bytes())
    }

    fn take_u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take_bytes())
    }

    fn take_u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take_bytes())
    }

    fn take_u128(&mut self) -> u128 {
        u128::from_le_bytes(self.take_bytes())
    }
}

/// Rounds up to a multiple of `unit`, a power of two.
pub(crate) const fn round_up(value: u64, unit: u64) -> u64 {
    (value + unit - 1) & !(unit - 1)
}

impl RecordHeader {
    /// Writes the header of a record at `place`.
    pub(crate) fn write_to(&self, bytes: &mut [u8], place: &FramePlace) {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, self.key_bytes]);
        out.extend_from_slice(&self.head_bytes.to_le_bytes());
        out.extend_from_slice(&self.layers.to_le_bytes());
        for field in [self.record_bytes, self.serial, self.synced_to, place.segment, place.offset] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.extend_from_slice(&self.name.scope.0);
        for field in [self.name.digest, self.name.lineage, self.name.parent_lineage] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.extend_from_slice(&self.name.position.to_le_bytes());
        out.extend_from_slice(&self.tables_bytes.to_le_bytes());
        for field in [self.created_ms, self.directory_checksum, self.payload_end] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&place.store);
        out.resize(HEADER_BYTES - 8, 0);
        let checksum = xxh3_64_with_seed(&out, place.seed);
        out.extend_from_slice(&checksum.to_le_bytes());
        bytes[..HEADER_BYTES].copy_from_slice(&out);
    }

    /// Parses a header that was written for `place`.
    pub(crate) fn parse_at(bytes: &[u8], place: &FramePlace) -> Result<Self, RecordFlaw> {
        let bytes = bytes.get(..HEADER_BYTES).ok_or(RecordFlaw::Short)?;
        if bytes[..4] != MAGIC {
            return Err(RecordFlaw::Magic);
        }
        if header_checksum(bytes) != xxh3_64_with_seed(&bytes[..HEADER_BYTES - 8], place.seed) {
            return Err(RecordFlaw::HeaderChecksum);
        }
        let mut fields = FieldReader { bytes: &bytes[4..] };
        let found = fields.take_u16();
        if found != FORMAT_VERSION {
            return Err(RecordFlaw::Version { found });
        }
        let [kind, key_bytes] = fields.take_bytes();
        let kind = parse_kind(kind)?;
        let (head_bytes, layers) = (fields.take_u32(), fields.take_u32());
        let (record_bytes, serial) = (fields.take_u64(), fields.take_u64());
        let synced_to = fields.take_u64();
        if fields.take_u64() != place.segment || fields.take_u64() != place.offset {
            return Err(RecordFlaw::Misplaced);
        }
        let name = BlockName {
            scope: ScopeId(fields.take_bytes()),
            digest: fields.take_u128(),
            lineage: fields.take_u128(),
            parent_lineage: fields.take_u128(),
            position: fields.take_u32(),
        };
        let tables_bytes = fields.take_u32();
        let (created_ms, directory_checksum) = (fields.take_u64(), fields.take_u64());
        let payload_end = fields.take_u64();
        let key = fields.take_bytes();
        if fields.take_bytes::<16>() != place.store {
            return Err(RecordFlaw::Misplaced);
        }
        let header = Self {
            kind,
            name,
            key,
            key_bytes,
            layers,
            tables_bytes,
            head_bytes,
            payload_end,
            record_bytes,
            serial,
            synced_to,
            created_ms,
            directory_checksum,
        };
        header.check_ranges()?;
        Ok(header)
    }

    fn check_ranges(&self) -> Result<(), RecordFlaw> {
        let field = |field| Err(RecordFlaw::Field { field });
        if usize::from(self.key_bytes) > KEY_BYTES_MAX
            || self.key[usize::from(self.key_bytes)..].iter().any(|byte| *byte != 0)
        {
            return field("key");
        }
        if self.layers as usize > LAYERS_MAX {
            return field("layers");
        }
        if !self.record_bytes.is_multiple_of(BLOCK_BYTES as u64)
            || self.record_bytes == 0
            || self.record_bytes > RECORD_BYTES_MAX
        {
            return field("record bytes");
        }
        let head = u64::from(self.head_bytes);
        let least = (HEADER_BYTES + ENTRY_BYTES * self.layers as usize) as u64
            + u64::from(self.tables_bytes);
        if head < least
            || head > HEAD_BYTES_MAX
            || !head.is_multiple_of(PAYLOAD_ALIGN as u64)
            || head + END_BYTES as u64 > self.record_bytes
        {
            return field("head bytes");
        }
        if self.payload_end < head || self.payload_end > self.record_bytes - END_BYTES as u64 {
            return field("payload end");
        }
        Ok(())
    }

    /// Where the record lies, if its header was read at `place`.
    pub(crate) fn location_at(&self, place: &FramePlace) -> DiskLocation {
        let blocks = |bytes: u64| (bytes.div_ceil(BLOCK_BYTES as u64)) as u32;
        DiskLocation {
            segment: place.segment,
            serial: self.serial,
            offset: blocks(place.offset),
            blocks: blocks(self.record_bytes),
            head_blocks: blocks(u64::from(self.head_bytes)),
        }
    }

    /// Parses the directory in `head`, the record's first `head_bytes`.
    pub(crate) fn parse_directory(&self, head: &[u8]) -> Result<Vec<LayerEntry>, RecordFlaw> {
        let head = head.get(..self.head_bytes as usize).ok_or(RecordFlaw::Short)?;
        if xxh3_64(&head[HEADER_BYTES..]) != self.directory_checksum {
            return Err(RecordFlaw::DirectoryChecksum);
        }
        let forms_end = self.forms_end(head)?;
        let (mut at, mut form_at) = (u64::from(self.head_bytes), self.forms_begin());
        let mut entries = Vec::with_capacity(self.layers as usize);
        for layer in 0..self.layers {
            let flaw = RecordFlaw::Entry { layer };
            let entry = HEADER_BYTES + ENTRY_BYTES * layer as usize;
            let mut fields = FieldReader { bytes: &head[entry..entry + ENTRY_BYTES] };
            let (begin, bytes) = (fields.take_u64(), fields.take_u64());
            let checksum = fields.take_u64();
            let (form_begin, form_bytes) = (fields.take_u32() as usize, fields.take_u32() as usize);
            // One layout for one content: layers and forms lie one after another.
            let end = begin.checked_add(bytes).ok_or(flaw)?;
            let form_end = form_begin.checked_add(form_bytes).ok_or(flaw)?;
            if begin != at || form_begin != form_at || form_end > forms_end {
                return Err(flaw);
            }
            if end > self.payload_end {
                return Err(flaw);
            }
            at = round_up(end, PAYLOAD_ALIGN as u64);
            form_at = form_end;
            let span = begin as usize..end as usize;
            entries.push(LayerEntry { span, checksum, form: form_begin..form_end });
        }
        let end = entries.last().map_or(u64::from(self.head_bytes), |entry| entry.span.end as u64);
        if end != self.payload_end {
            return Err(RecordFlaw::Field { field: "payload end" });
        }
        Ok(entries)
    }

    fn forms_begin(&self) -> usize {
        HEADER_BYTES + ENTRY_BYTES * self.layers as usize
    }

    /// Forms end where tables begin; the last entry says where.
    fn forms_end(&self, head: &[u8]) -> Result<usize, RecordFlaw> {
        let Some(last) = self.layers.checked_sub(1) else {
            return Ok(self.forms_begin());
        };
        let entry = HEADER_BYTES + ENTRY_BYTES * last as usize + 24;
        let mut fields = FieldReader { bytes: &head[entry..] };
        let end = u64::from(fields.take_u32()) + u64::from(fields.take_u32());
        if end + u64::from(self.tables_bytes) > u64::from(self.head_bytes) {
            return Err(RecordFlaw::Entry { layer: last });
        }
        Ok(end as usize)
    }

    /// Bytes of the tables in the record, whose directory has these entries.
    pub(crate) fn tables_span(&self, entries: &[LayerEntry]) -> Range<usize> {
        let begin = entries.last().map_or(self.forms_begin(), |entry| entry.form.end);
        begin..begin + self.tables_bytes as usize
    }

    /// The last bytes of the record.
    pub(crate) fn end_mark(&self, header: &[u8]) -> [u8; END_BYTES] {
        let mut mark = [0; END_BYTES];
        mark[..8].copy_from_slice(&self.serial.to_le_bytes());
        mark[8..].copy_from_slice(&header_checksum(header).to_le_bytes());
        mark
    }
}

fn parse_kind(kind: u8) -> Result<RecordKind, RecordFlaw> {
    let kinds =
        [RecordKind::Block, RecordKind::Scope, RecordKind::Calibration, RecordKind::Tombstone];
    let found = kinds.into_iter().find(|known| *known as u8 == kind);
    found.ok_or(RecordFlaw::Field { field: "kind" })
}

fn header_checksum(header: &[u8]) -> u64 {
    FieldReader { bytes: header.get(HEADER_BYTES - 8..).unwrap_or_default() }.take_u64()
}

/// Verifies a layer's bytes.
pub(crate) fn verify_layer(entry: &LayerEntry, layer: u32, bytes: &[u8]) -> Result<(), RecordFlaw> {
    if xxh3_64(bytes) == entry.checksum { Ok(()) } else { Err(RecordFlaw::LayerChecksum { layer }) }
}

/// A record whose every byte that matters was verified.
#[derive(Debug)]
pub(crate) struct VerifiedRecord {
    pub(crate) header: RecordHeader,
    pub(crate) entries: Vec<LayerEntry>,
}

/// Verifies a whole record: header, directory, each layer, end mark.
pub(crate) fn verify_record(
    bytes: &[u8],
    place: &FramePlace,
) -> Result<VerifiedRecord, RecordFlaw> {
    let header = RecordHeader::parse_at(bytes, place)?;
    let bytes = bytes.get(..header.record_bytes as usize).ok_or(RecordFlaw::Short)?;
    if bytes[bytes.len() - END_BYTES..] != header.end_mark(bytes) {
        return Err(RecordFlaw::EndMark);
    }
    let entries = header.parse_directory(bytes)?;
    for (layer, entry) in (0..).zip(&entries) {
        verify_layer(entry, layer, &bytes[entry.span.clone()])?;
    }
    Ok(VerifiedRecord { header, entries })
}

/// Reads bytes as a record of an exported file in all ways there are: for fuzzing. True if they
/// are a whole and valid record.
pub fn probe_bytes(bytes: &[u8]) -> bool {
    let place = FramePlace::default();
    if let Ok(header) = RecordHeader::parse_at(bytes, &place)
        && let Ok(entries) = header.parse_directory(bytes)
    {
        assert!(header.tables_span(&entries).end <= header.head_bytes as usize);
        assert!(entries.iter().all(|entry| entry.span.end as u64 <= header.payload_end));
    }
    verify_record(bytes, &place).is_ok()
}

/// Parses a header as if its checksum were right: for fuzzing what lies behind it. True if the
/// record is valid apart from its checksums of header and directory.
pub fn probe_unchecked(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= HEADER_BYTES {
        bytes[..4].copy_from_slice(&MAGIC);
        let checksum = xxh3_64_with_seed(&bytes[..HEADER_BYTES - 8], 0);
        bytes[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        // So that mutations of the directory reach its parser.
        let mut fields = FieldReader { bytes: &bytes[8..] };
        let head_bytes = fields.take_u32() as usize;
        if let Some(directory) = bytes.get(HEADER_BYTES..head_bytes) {
            let checksum = xxh3_64(directory).to_le_bytes();
            bytes[136..144].copy_from_slice(&checksum);
            let checksum = xxh3_64_with_seed(&bytes[..HEADER_BYTES - 8], 0);
            bytes[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        }
    }
    probe_bytes(&bytes)
}
