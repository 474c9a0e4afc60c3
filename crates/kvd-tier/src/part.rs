//! Result of a read: the verified head of a record, and verified bytes of some layers. Pure.

use crate::aligned::AlignedBytes;
use crate::name::{RecordKind, RecordMeta};
use crate::record::{FramePlace, LayerEntry, RecordFlaw, RecordHeader, VerifiedRecord};
use std::ops::Range;
use std::sync::Arc;

/// Names, forms and tables of a record; verified.
#[derive(Debug)]
pub struct RecordHead {
    pub(crate) header: RecordHeader,
    pub(crate) entries: Vec<LayerEntry>,
    // The record's first bytes, up to the payload.
    bytes: Box<[u8]>,
}

impl RecordHead {
    /// Parses the first bytes of a record.
    pub(crate) fn parse_bytes(bytes: &[u8], place: &FramePlace) -> Result<Self, RecordFlaw> {
        let header = RecordHeader::parse_at(bytes, place)?;
        let entries = header.parse_directory(bytes)?;
        let bytes = bytes[..header.head_bytes as usize].into();
        Ok(Self { header, entries, bytes })
    }

    /// Takes the head of a record that was verified as a whole.
    pub(crate) fn from_verified(verified: VerifiedRecord, bytes: &[u8]) -> Self {
        let VerifiedRecord { header, entries } = verified;
        let bytes = bytes[..header.head_bytes as usize].into();
        Self { header, entries, bytes }
    }

    /// Name and key of the block.
    #[must_use]
    pub fn record_meta(&self) -> RecordMeta {
        let key = self.header.key[..usize::from(self.header.key_bytes)].into();
        RecordMeta { name: self.header.name, key }
    }

    /// Kind of the record.
    #[must_use]
    pub fn record_kind(&self) -> RecordKind {
        self.header.kind
    }

    /// Tables that the pages need, as the writer encoded them.
    #[must_use]
    pub fn table_bytes(&self) -> &[u8] {
        &self.bytes[self.header.tables_span(&self.entries)]
    }

    /// Layers of the record.
    #[must_use]
    pub fn layer_count(&self) -> u32 {
        self.header.layers
    }

    /// Form of a layer, as the writer encoded it.
    #[must_use]
    pub fn layer_form(&self, layer: u32) -> Option<&[u8]> {
        let entry = self.entries.get(layer as usize)?;
        Some(&self.bytes[entry.form.clone()])
    }

    /// Bytes of a layer.
    #[must_use]
    pub fn layer_len(&self, layer: u32) -> Option<usize> {
        Some(self.entries.get(layer as usize)?.span.len())
    }

    /// When the record was made, in milliseconds since 1970: for people only.
    #[must_use]
    pub fn created_ms(&self) -> u64 {
        self.header.created_ms
    }
}

/// Layers of a record, each verified against its checksum.
#[derive(Debug)]
pub struct RecordPart {
    pub(crate) head: Arc<RecordHead>,
    pub(crate) layers: Range<u32>,
    pub(crate) bytes: AlignedBytes,
    // Where `bytes` begins in the record.
    pub(crate) begin: usize,
}

impl RecordPart {
    /// The record's head.
    #[must_use]
    pub fn record_head(&self) -> &Arc<RecordHead> {
        &self.head
    }

    /// Name and key of the block.
    #[must_use]
    pub fn record_meta(&self) -> RecordMeta {
        self.head.record_meta()
    }

    /// Tables that the pages need, as the writer encoded them.
    #[must_use]
    pub fn table_bytes(&self) -> &[u8] {
        self.head.table_bytes()
    }

    /// Layers that are here.
    #[must_use]
    pub fn layer_range(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// Form of a layer; of all layers, also those that are not here.
    #[must_use]
    pub fn layer_form(&self, layer: u32) -> Option<&[u8]> {
        self.head.layer_form(layer)
    }

    /// Bytes of a layer that is here.
    #[must_use]
    pub fn layer_bytes(&self, layer: u32) -> Option<&[u8]> {
        if !self.layers.contains(&layer) {
            return None;
        }
        let span = &self.head.entries.get(layer as usize)?.span;
        self.bytes.get(span.start - self.begin..span.end - self.begin)
    }
}
