//! Builds a record in the bytes that will be written. Pure.

use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::error::ShapeError;
use crate::name::{RecordKind, RecordMeta};
use crate::record::{
    END_BYTES, ENTRY_BYTES, FramePlace, HEAD_BYTES_MAX, HEADER_BYTES, KEY_BYTES_MAX, LAYERS_MAX,
    PAYLOAD_ALIGN, RECORD_BYTES_MAX, RecordFlaw, RecordHeader, round_up, verify_record,
};
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_64;

/// One layer of a record that is to be built.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerShape {
    /// How to read the layer's bytes, in an encoding of the caller's: sink bytes, page ends.
    pub form: Vec<u8>,
    /// Bytes of the layer.
    pub bytes: usize,
}

/// A record that is to be built: all but its layers' bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Name and key.
    pub meta: RecordMeta,
    /// Tables that the layers' pages need, in an encoding of the caller's.
    pub tables: Vec<u8>,
    /// The layers, in order.
    pub layers: Vec<LayerShape>,
}

/// A record that is being filled: its layers' bytes lie where they will be on disk, so that
/// whoever exports pages writes them once.
#[derive(Debug)]
pub struct RecordDraft {
    bytes: AlignedBytes,
    header: RecordHeader,
    spans: Vec<Range<usize>>,
}

impl RecordDraft {
    /// A block's record with zeros for layers.
    ///
    /// # Errors
    ///
    /// Key, layers or bytes are over the format's limits.
    pub fn new(shape: &RecordShape) -> Result<Self, ShapeError> {
        Self::with_kind(RecordKind::Block, shape)
    }

    pub(crate) fn with_kind(kind: RecordKind, shape: &RecordShape) -> Result<Self, ShapeError> {
        let header = lay_out(kind, shape)?;
        let mut bytes = AlignedBytes::with_zeros(header.record_bytes as usize);
        let mut spans = Vec::with_capacity(shape.layers.len());
        let mut form_at = HEADER_BYTES + ENTRY_BYTES * shape.layers.len();
        let mut at = header.head_bytes as usize;
        for (layer, of) in shape.layers.iter().enumerate() {
            let entry = HEADER_BYTES + ENTRY_BYTES * layer;
            bytes[entry..entry + 8].copy_from_slice(&(at as u64).to_le_bytes());
            bytes[entry + 8..entry + 16].copy_from_slice(&(of.bytes as u64).to_le_bytes());
            bytes[entry + 24..entry + 28].copy_from_slice(&(form_at as u32).to_le_bytes());
            let form_bytes = (of.form.len() as u32).to_le_bytes();
            bytes[entry + 28..entry + 32].copy_from_slice(&form_bytes);
            bytes[form_at..form_at + of.form.len()].copy_from_slice(&of.form);
            form_at += of.form.len();
            spans.push(at..at + of.bytes);
            at = (at + of.bytes).next_multiple_of(PAYLOAD_ALIGN);
        }
        bytes[form_at..form_at + shape.tables.len()].copy_from_slice(&shape.tables);
        Ok(Self { bytes, header, spans })
    }

    /// The bytes of a layer, zeros at first, aligned to 64.
    #[must_use]
    pub fn layer_mut(&mut self, layer: usize) -> Option<&mut [u8]> {
        let span = self.spans.get(layer)?.clone();
        Some(&mut self.bytes[span])
    }

    /// Bytes that the record takes on disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.header.record_bytes
    }

    pub(crate) fn copy_draft(&self) -> Self {
        let mut bytes = AlignedBytes::with_zeros(self.bytes.len());
        bytes.copy_from_slice(&self.bytes);
        Self { bytes, header: self.header, spans: self.spans.clone() }
    }

    /// Hashes what was filled in.
    pub(crate) fn seal_record(mut self) -> SealedRecord {
        for (layer, span) in self.spans.iter().enumerate() {
            let checksum = xxh3_64(&self.bytes[span.clone()]).to_le_bytes();
            let entry = HEADER_BYTES + ENTRY_BYTES * layer;
            self.bytes[entry + 16..entry + 24].copy_from_slice(&checksum);
        }
        let head_bytes = self.header.head_bytes as usize;
        self.header.directory_checksum = xxh3_64(&self.bytes[HEADER_BYTES..head_bytes]);
        SealedRecord { bytes: self.bytes, header: self.header }
    }
}

/// A record that waits for its place: all but the header's bytes and the end mark is there.
#[derive(Debug)]
pub(crate) struct SealedRecord {
    bytes: AlignedBytes,
    pub(crate) header: RecordHeader,
}

impl SealedRecord {
    /// Takes a record that was written for `place`.
    pub(crate) fn from_bytes(bytes: AlignedBytes, place: &FramePlace) -> Result<Self, RecordFlaw> {
        let header = verify_record(&bytes, place)?.header;
        Ok(Self { bytes, header })
    }

    /// The bytes, as they were framed last.
    pub(crate) fn into_bytes(self) -> AlignedBytes {
        self.bytes
    }

    /// Frames the record for `place`; these are the bytes to write.
    pub(crate) fn frame_at(&mut self, place: &FramePlace) -> &[u8] {
        self.header.write_to(&mut self.bytes, place);
        let mark = self.header.end_mark(&self.bytes);
        let end = self.header.record_bytes as usize;
        self.bytes[end - END_BYTES..end].copy_from_slice(&mark);
        &self.bytes[..end]
    }
}

fn lay_out(kind: RecordKind, shape: &RecordShape) -> Result<RecordHeader, ShapeError> {
    let (key_bytes, layers) = (shape.meta.key.len(), shape.layers.len());
    if key_bytes > KEY_BYTES_MAX {
        return Err(ShapeError::LongKey { bytes: key_bytes, limit: KEY_BYTES_MAX });
    }
    if layers > LAYERS_MAX {
        return Err(ShapeError::ManyLayers { layers, limit: LAYERS_MAX });
    }
    let forms: u64 = shape.layers.iter().map(|layer| layer.form.len() as u64).sum();
    let head = (HEADER_BYTES + ENTRY_BYTES * layers) as u64 + forms + shape.tables.len() as u64;
    let head = round_up(head, PAYLOAD_ALIGN as u64);
    if head > HEAD_BYTES_MAX {
        return Err(ShapeError::TooLarge { bytes: head, limit: HEAD_BYTES_MAX });
    }
    let mut payload_end = head;
    for layer in &shape.layers {
        payload_end =
            round_up(payload_end, PAYLOAD_ALIGN as u64).saturating_add(layer.bytes as u64);
        if payload_end > RECORD_BYTES_MAX {
            return Err(ShapeError::TooLarge { bytes: payload_end, limit: RECORD_BYTES_MAX });
        }
    }
    let record_bytes = round_up(payload_end + END_BYTES as u64, BLOCK_BYTES as u64);
    if record_bytes > RECORD_BYTES_MAX {
        return Err(ShapeError::TooLarge { bytes: record_bytes, limit: RECORD_BYTES_MAX });
    }
    let mut key = [0; KEY_BYTES_MAX];
    key[..key_bytes].copy_from_slice(&shape.meta.key);
    // For people only: nothing compares it.
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(RecordHeader {
        kind,
        name: shape.meta.name,
        key,
        key_bytes: key_bytes as u8,
        layers: layers as u32,
        tables_bytes: shape.tables.len() as u32,
        head_bytes: head as u32,
        payload_end,
        record_bytes,
        serial: 0,
        synced_to: 0,
        created_ms: created.as_millis() as u64,
        directory_checksum: 0,
    })
}
