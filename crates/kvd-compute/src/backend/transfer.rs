//! Blocks that leave a device's page memory for a tier, and come back: verified on either way.
//!
//! Pages are tested here before they leave, so damage in memory is not spread. Those that come back
//! were tested by their reader; they are tested again once their tables have the versions of this
//! device, and then written to a slot that nobody reads yet.

use super::PageBackend;
use crate::BackendError;
use kvd_codec::{AdoptedTable, CarriedTable, LayerPages, ModelCodec};
use kvd_core::{ErrorCode, Extent, LayerIndex, ModelId};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Where a block of one layer lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerSlots {
    /// Rows in the stored precision; none for a block without any.
    pub rows: Option<Extent>,
    /// Pages, and the end of each; none for a block that lies in the sink.
    pub pages: Option<PageSlots>,
}

/// Pages in one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSlots {
    /// The slot.
    pub extent: Extent,
    /// End of each page, from the slot's start.
    pub ends: Arc<[u32]>,
}

/// A block of one layer outside any page memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerImage {
    /// Rows in the stored precision, as they lie in their slot.
    pub rows: Vec<u8>,
    /// XXH3-64 of these.
    pub rows_checksum: u64,
    /// Pages, as they lie in theirs.
    pub pages: Vec<u8>,
    /// End of each page.
    pub page_ends: Vec<u32>,
    /// The Huffman tables that the pages name.
    pub tables: Vec<CarriedTable>,
}

/// Outcome of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The block lies in its slots.
    Imported,
    /// A layer has no version left for a table that its pages need; nothing was written.
    TablesFull,
}

/// A device whose blocks may leave it and come back. By default they do not.
pub trait TransferBackend {
    /// Copies a slot's bytes out.
    ///
    /// # Errors
    /// When the device cannot, or has failed.
    fn read_slot(&mut self, from: Extent, bytes: &mut [u8]) -> Result<(), BackendError> {
        let _ = (from, bytes);
        Err(no_transfer_error())
    }

    /// Copies rows into a slot that was reserved for them.
    ///
    /// # Errors
    /// As [`TransferBackend::read_slot`].
    fn write_rows_slot(&mut self, bytes: &[u8], to: Extent) -> Result<(), BackendError> {
        let _ = (bytes, to);
        Err(no_transfer_error())
    }

    /// Copies verified pages into a slot that was reserved for them.
    ///
    /// # Errors
    /// As [`TransferBackend::read_slot`].
    fn write_pages_slot(&mut self, pages: LayerPages<'_>, to: Extent) -> Result<(), BackendError> {
        let _ = (pages, to);
        Err(no_transfer_error())
    }

    /// A model's codec, by whose tables pages are read.
    ///
    /// # Errors
    /// When it is unknown, or the device's blocks do not leave it.
    fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
        let _ = model;
        Err(no_transfer_error())
    }
}

fn no_transfer_error() -> BackendError {
    let message = "blocks do not leave the page memory of this device".to_owned();
    BackendError::Device { code: ErrorCode::Internal, message }
}

fn damaged_rows_error() -> BackendError {
    let message = "rows of a block are damaged: their checksum is another".to_owned();
    BackendError::Device { code: ErrorCode::CorruptPage, message }
}

/// Copies a block of one layer out, once its pages are verified.
///
/// # Errors
/// A damaged page, an unknown model, or what the device says.
pub fn export_layer<B: PageBackend + TransferBackend + ?Sized>(
    backend: &mut B,
    model: ModelId,
    layer: LayerIndex,
    slots: &LayerSlots,
) -> Result<LayerImage, BackendError> {
    let mut image = LayerImage::default();
    if let Some(from) = slots.rows {
        image.rows = vec![0; from.len as usize];
        backend.read_slot(from, &mut image.rows)?;
        image.rows_checksum = xxh3_64(&image.rows);
    }
    if let Some(PageSlots { extent, ends }) = &slots.pages {
        image.page_ends = ends.to_vec();
        image.pages = vec![0; ends.last().copied().unwrap_or(0) as usize];
        let from = Extent { offset: extent.offset, len: image.pages.len() as u64 };
        backend.read_slot(from, &mut image.pages)?;
        let pages = LayerPages { layer, bytes: &image.pages, ends: &image.page_ends };
        let codec = backend.page_codec(model)?;
        codec.verify_pages(pages)?;
        image.tables = codec.carried_tables(pages)?;
    }
    Ok(image)
}

/// Brings a block of one layer to its slots, which nobody reads yet. Its pages are verified, get
/// the versions that their tables have here, and are verified as pages of this model.
///
/// # Errors
/// Damaged rows or a damaged page, one that is not of this model or layer, or what the device says;
/// the slots may hold anything then.
pub fn import_layer<B: PageBackend + TransferBackend + ?Sized>(
    backend: &mut B,
    model: ModelId,
    layer: LayerIndex,
    image: &mut LayerImage,
    slots: &LayerSlots,
) -> Result<ImportOutcome, BackendError> {
    if xxh3_64(&image.rows) != image.rows_checksum && !image.rows.is_empty() {
        return Err(damaged_rows_error());
    }
    if slots.pages.is_some() {
        let LayerImage { pages, page_ends, tables, .. } = image;
        kvd_codec::verify_checksums(LayerPages { layer, bytes: pages, ends: page_ends })?;
        let codec = backend.page_codec(model)?;
        let mut here = Vec::new();
        for table in tables.iter() {
            match codec.adopt_table(layer, table)? {
                AdoptedTable::Version(version) => here.push(version),
                AdoptedTable::Full => return Ok(ImportOutcome::TablesFull),
            }
        }
        let find = |side, variant, version| {
            let is_it =
                |of: &CarriedTable| (of.side, of.variant, of.version) == (side, variant, version);
            tables.iter().position(is_it).map(|index| here[index])
        };
        codec.rename_tables(layer, pages, page_ends, &find)?;
        codec.verify_pages(LayerPages { layer, bytes: pages, ends: page_ends })?;
    }
    if let Some(to) = slots.rows {
        backend.write_rows_slot(&image.rows, to)?;
    }
    if let Some(PageSlots { extent, .. }) = &slots.pages {
        let pages = LayerPages { layer, bytes: &image.pages, ends: &image.page_ends };
        backend.write_pages_slot(pages, *extent)?;
    }
    Ok(ImportOutcome::Imported)
}
