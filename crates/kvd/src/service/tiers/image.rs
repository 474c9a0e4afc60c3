//! The bytes of a block in a record: how its layers lie there, and the tables that its pages need.
//! Pure; read strictly, since a record may be of anybody.
//!
//! A layer is its rows, padded to 64 bytes, and its pages. Its form says how many of each; the
//! layout is in `docs/cache-format.md`.

use kvd_codec::CarriedTable;
use kvd_compute::LayerImage;
use kvd_core::{LayerIndex, PackedBytes, PageBytes, Side};

/// Rows and pages begin at multiples of this.
const LAYER_ALIGN: usize = 64;
const FORM_VERSION: u32 = 1;
/// Tables of a record at most: layers, sides, variants and versions are far fewer.
const TABLES_MAX: u32 = 1 << 20;

/// How a layer lies in its record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerForm {
    /// Rows that the slot was laid out for; 0 for none.
    pub(super) rows: u32,
    pub(super) rows_bytes: u64,
    pub(super) rows_checksum: u64,
    /// End of each page; none for a block without any.
    pub(super) page_ends: Vec<u32>,
    pub(super) packed: PackedBytes,
}

/// A table, and its layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerTable {
    pub(super) layer: LayerIndex,
    pub(super) table: CarriedTable,
}

/// Reads little-endian numbers.
struct FormReader<'a>(&'a [u8]);

impl<'a> FormReader<'a> {
    fn take_bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn take_u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(*self.take_bytes(4)?.first_chunk()?))
    }

    fn take_u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.take_bytes(8)?.first_chunk()?))
    }
}

fn packed_words(packed: &PackedBytes) -> [u64; 7] {
    let PackedBytes { parts, sides, values } = *packed;
    let PageBytes { header, codes, scales, offsets } = parts;
    [header, codes, scales, offsets, sides[0], sides[1], values]
}

impl LayerForm {
    /// The form of an image.
    pub(super) fn of_image(image: &LayerImage, rows: u32, packed: PackedBytes) -> Self {
        Self {
            rows,
            rows_bytes: image.rows.len() as u64,
            rows_checksum: image.rows_checksum,
            page_ends: image.page_ends.clone(),
            packed,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(FORM_VERSION.to_le_bytes());
        bytes.extend(self.rows.to_le_bytes());
        bytes.extend(self.rows_bytes.to_le_bytes());
        bytes.extend(self.rows_checksum.to_le_bytes());
        bytes.extend((self.page_ends.len() as u32).to_le_bytes());
        self.page_ends.iter().for_each(|end| bytes.extend(end.to_le_bytes()));
        packed_words(&self.packed).iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes
    }

    /// Reads a form; none for one that is not whole or of another version.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut reader = FormReader(bytes);
        if reader.take_u32()? != FORM_VERSION {
            return None;
        }
        let (rows, rows_bytes) = (reader.take_u32()?, reader.take_u64()?);
        let (rows_checksum, pages) = (reader.take_u64()?, reader.take_u32()?);
        let ends = reader.take_bytes(4usize.checked_mul(pages as usize)?)?;
        let ends = ends.as_chunks::<4>().0.iter().map(|end| u32::from_le_bytes(*end));
        let page_ends: Vec<u32> = ends.collect();
        let mut words = [0; 7];
        for word in &mut words {
            *word = reader.take_u64()?;
        }
        let [header, codes, scales, offsets, keys, values_of, values] = words;
        let parts = PageBytes { header, codes, scales, offsets };
        let packed = PackedBytes { parts, sides: [keys, values_of], values };
        let whole = reader.0.is_empty() && page_ends.is_sorted();
        whole.then_some(Self { rows, rows_bytes, rows_checksum, page_ends, packed })
    }

    fn page_bytes(&self) -> usize {
        self.page_ends.last().map_or(0, |end| *end as usize)
    }

    fn pages_at(&self) -> usize {
        (self.rows_bytes as usize).next_multiple_of(LAYER_ALIGN)
    }

    /// Bytes of the layer in its record.
    pub(super) fn layer_bytes(&self) -> usize {
        self.pages_at() + self.page_bytes()
    }

    /// Writes an image of this form: all bytes of the layer, whatever they were before.
    pub(super) fn write_image(&self, image: &LayerImage, to: &mut [u8]) {
        to[..image.rows.len()].copy_from_slice(&image.rows);
        to[image.rows.len()..self.pages_at()].fill(0);
        to[self.pages_at()..].copy_from_slice(&image.pages);
    }

    /// Reads an image of this form; none where the bytes are not as many.
    pub(super) fn read_image(&self, from: &[u8], tables: Vec<CarriedTable>) -> Option<LayerImage> {
        let is_there = u64::try_from(from.len()).ok()? >= self.rows_bytes;
        if !is_there || from.len() != self.layer_bytes() {
            return None;
        }
        Some(LayerImage {
            rows: from[..self.rows_bytes as usize].to_vec(),
            rows_checksum: self.rows_checksum,
            pages: from[self.pages_at()..].to_vec(),
            page_ends: self.page_ends.clone(),
            tables,
        })
    }
}

/// The tables of a record.
pub(super) fn write_tables(images: &[LayerImage]) -> Vec<u8> {
    let count: usize = images.iter().map(|image| image.tables.len()).sum();
    let mut bytes = (count as u32).to_le_bytes().to_vec();
    for (layer, image) in (0u32..).zip(images) {
        for CarriedTable { side, variant, version, lengths } in &image.tables {
            bytes.extend(layer.to_le_bytes());
            let words = [side.index() as u32, u32::from(*variant), u32::from(*version)];
            words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
            bytes.extend((lengths.len() as u32).to_le_bytes());
            bytes.extend(lengths);
        }
    }
    bytes
}

/// Reads the tables of a record; none where they are not whole.
pub(super) fn read_tables(bytes: &[u8]) -> Option<Vec<LayerTable>> {
    let mut reader = FormReader(bytes);
    let count = reader.take_u32().filter(|count| *count <= TABLES_MAX)?;
    let mut tables = Vec::new();
    for _ in 0..count {
        let layer = LayerIndex(reader.take_u32()?);
        let side = *Side::BOTH.get(reader.take_u32()? as usize)?;
        let variant = u16::try_from(reader.take_u32()?).ok()?;
        let version = u16::try_from(reader.take_u32()?).ok()?;
        let symbols = reader.take_u32()? as usize;
        let lengths = reader.take_bytes(symbols)?.to_vec();
        tables.push(LayerTable { layer, table: CarriedTable { side, variant, version, lengths } });
    }
    reader.0.is_empty().then_some(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> LayerImage {
        let table = |version| CarriedTable {
            side: Side::Value,
            variant: 1,
            version,
            lengths: vec![1, 2, 3, 3],
        };
        LayerImage {
            rows: vec![7; 70],
            rows_checksum: 5,
            pages: (0..48).collect(),
            page_ends: vec![16, 48],
            tables: vec![table(2), table(9)],
        }
    }

    #[test]
    fn forms_images_and_tables_come_back_and_anything_cut_off_is_none() {
        let image = image();
        let packed = PackedBytes { sides: [1, 2], values: 3, ..PackedBytes::default() };
        let form = LayerForm::of_image(&image, 4, packed);
        let bytes = form.to_bytes();
        assert_eq!(LayerForm::from_bytes(&bytes), Some(form.clone()));
        (0..bytes.len()).for_each(|end| assert_eq!(LayerForm::from_bytes(&bytes[..end]), None));
        let mut layer = vec![9; form.layer_bytes()];
        assert_eq!(layer.len(), 128 + 48);
        form.write_image(&image, &mut layer);
        assert_eq!(layer[70..128], [0; 58], "nothing of what was there before");
        let tables = write_tables(&[LayerImage::default(), image.clone()]);
        let read = read_tables(&tables).unwrap();
        assert!(read.len() == 2 && read.iter().all(|of| of.layer == LayerIndex(1)));
        let carried = read.into_iter().map(|of| of.table).collect();
        assert_eq!(form.read_image(&layer, carried), Some(image));
        assert_eq!(form.read_image(&layer[1..], Vec::new()), None);
        (0..tables.len()).for_each(|end| assert_eq!(read_tables(&tables[..end]), None));
    }
}
