//! Codes that stand for bytes, as `kernels/include/kvd/lookup.cuh` looks them up: entries of
//! codebooks on whole levels, levels and directions as high and low bytes.

use crate::abi::SideShape;
use crate::kernel_choice::COPY_BYTES;
use kvd_codec::{VectorQuantizer, level_unit};

/// Codes whose bytes registers hold, where each has two.
const REGISTER_CODES: usize = 16;
/// Codes of a byte: of levels and directions all entries stand in shared memory.
const BYTE_CODES: usize = 256;
/// Shared memory for all of them, each once.
pub(crate) const ALL_ENTRIES: usize = 4 * BYTE_CODES;
/// Largest magnitude of a number of two signed bytes.
const TOP: f32 = 32639.0;
/// Lanes that each read their own copy.
pub(crate) const COPIES_MAX: usize = 32;
/// Shared memory that copies take at most.
pub(crate) const COPIES_BYTES: usize = 32 << 10;
/// Codes in a word, and lanes that read the codes of one token: `CODE_GROUP`.
const QUAD: usize = 4;

/// Values that the codes of a side stand for, in whole numbers of a unit.
pub(crate) struct LookupEntries {
    /// Bytes of each code.
    bytes: usize,
    unit: f32,
    /// `[sets, codes, bytes]`.
    values: Vec<i8>,
    /// Parts of the unit that numbers of each set are of, where there are several.
    parts: Vec<f32>,
}

impl LookupEntries {
    /// Entries of codebooks whose values are whole numbers of a unit up to 127, as fitted ones are:
    /// one for all sub-vectors, or one for each.
    pub(crate) fn from_codebooks(vq: &VectorQuantizer) -> Option<Self> {
        if vq.stages() > 1 || !fits_lookup(vq.dim()) {
            return None;
        }
        let sets = if vq.is_grouped() { vq.positions() } else { 1 };
        let books: Vec<&[f32]> = (0..sets).map(|set| vq.stage_codebook(0, set).entries()).collect();
        let units = books.iter().map(|book| level_unit(book)).collect::<Option<Vec<f32>>>()?;
        let largest = units.iter().fold(0f32, |most, unit| most.max(*unit));
        let levels = books
            .iter()
            .zip(&units)
            .flat_map(|(book, unit)| book.iter().map(move |value| (value / unit).round() as i8));
        let values = levels.collect();
        let parts =
            if sets > 1 { units.iter().map(|unit| unit / largest).collect() } else { vec![] };
        Some(Self { bytes: vq.dim(), unit: largest, values, parts })
    }

    /// Entries of levels, as two bytes on steps of `2^-16` of the largest; the unit is that of the
    /// high byte.
    pub(crate) fn from_levels(levels: &[f32]) -> Option<Self> {
        (levels.len() <= BYTE_CODES).then(|| Self::from_values(2, levels.iter().copied()))
    }

    /// Entries of radii times directions, cosine and sine with two bytes each.
    pub(crate) fn from_polar(bits: u32, directions: &[[f32; 2]]) -> Option<Self> {
        let codes = 1usize << bits;
        let coordinates = (0..codes).flat_map(|code| {
            let radius = (code / directions.len()) as f32;
            directions[code % directions.len()].map(|part| radius * part)
        });
        (codes <= BYTE_CODES).then(|| Self::from_values(4, coordinates))
    }

    /// Entries of values as high and low bytes, `bytes` a code.
    fn from_values(bytes: usize, values: impl Iterator<Item = f32>) -> Self {
        let (low_unit, halves) = split_bytes(&values.collect::<Vec<f32>>());
        Self { bytes, unit: 256.0 * low_unit, values: halves.into_flattened(), parts: vec![] }
    }

    /// Appends them to the layer's tables. As many of the first entries as fit `shared_bytes` are
    /// to stand in shared memory, and all of them several times where they do.
    pub(crate) fn append_entries(
        &self,
        tables: &mut Vec<u8>,
        shape: &mut SideShape,
        shared_bytes: usize,
    ) {
        tables.resize(tables.len().next_multiple_of(COPY_BYTES), 0);
        shape.entries = tables.len() as u64;
        shape.entry_bytes = self.bytes as u32;
        shape.entry_unit = self.unit;
        let sets = self.parts.len().max(1);
        let codes = self.values.len() / self.bytes / sets;
        let bytes = |values: &mut dyn Iterator<Item = i8>| -> Vec<u8> {
            values.map(|value| value as u8).collect()
        };
        if in_registers(self.bytes, codes, sets) {
            for byte in 0..self.bytes {
                let mut of_byte = self.values.iter().skip(byte).step_by(self.bytes).copied();
                let mut row = bytes(&mut of_byte);
                row.resize(REGISTER_CODES, 0);
                tables.extend(row);
            }
            shape.entry_count = codes as u32;
            return;
        }
        for entry in self.values.chunks_exact(self.bytes) {
            tables.extend(bytes(&mut entry.iter().copied()));
            tables.resize(tables.len().next_multiple_of(4), 0);
        }
        tables.extend(self.parts.iter().flat_map(|part| part.to_le_bytes()));
        let words = stored_bytes(self.bytes) * sets;
        let count = (shared_bytes / words).min(codes);
        shape.entry_count = count as u32;
        shape.entry_copies =
            if count == codes { shared_copies(codes * words, shared_bytes) } else { 0 };
    }
}

/// How often entries of so many bytes in all stand in shared memory, as a power of two.
fn shared_copies(bytes: usize, shared_bytes: usize) -> u32 {
    (shared_bytes.min(COPIES_BYTES) / bytes).clamp(1, COPIES_MAX).ilog2()
}

/// The shape with all of its codes looked up as `bytes` bytes each, where there are not too many,
/// as levels and directions are.
pub(crate) fn expect_all(shape: &mut SideShape, bytes: usize) {
    let codes = 1usize << shape.bits;
    if codes <= BYTE_CODES {
        (shape.entry_bytes, shape.entry_count) = (bytes as u32, codes as u32);
        shape.entry_copies = match in_registers(bytes, codes, 1) {
            true => 0,
            false => shared_copies(codes * stored_bytes(bytes), ALL_ENTRIES),
        };
    }
}

/// High and low bytes of values, and what a low one is worth.
pub(crate) fn split_bytes(values: &[f32]) -> (f32, Vec<[i8; 2]>) {
    let largest = values.iter().fold(0f32, |m, value| m.max(value.abs()));
    let unit = largest / TOP;
    let of_value = |value: &f32| {
        // Smaller values are nothing beside any query.
        let whole = if largest > 1e-30 { (value / unit).round() as i32 } else { 0 };
        let high = (whole + 128) >> 8;
        [high as i8, (whole - 256 * high) as i8]
    };
    (unit, values.iter().map(of_value).collect())
}

/// Appends the entries to look up, if any, to the layer's tables: [`DecodeEntries::place`].
pub(crate) fn append_lookup(
    entries: Option<LookupEntries>,
    tables: &mut Vec<u8>,
    shape: &mut SideShape,
    shared_bytes: usize,
) {
    if let Some(entries) = entries {
        entries.append_entries(tables, shape, shared_bytes);
    }
}

/// Whether entries of so many bytes are looked up.
pub(crate) fn fits_lookup(bytes: usize) -> bool {
    bytes >= 2 && bytes.is_power_of_two()
}

/// Whether registers hold so many codes of so many bytes.
pub(crate) fn in_registers(bytes: usize, codes: usize, sets: usize) -> bool {
    bytes == 2 && codes <= REGISTER_CODES && sets == 1
}

/// Bytes that an entry of so many takes: whole words.
pub(crate) fn stored_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(4)
}

/// Shared memory of a side's table.
pub(crate) fn table_bytes(shape: &SideShape) -> usize {
    let (bytes, sets) = (shape.entry_bytes as usize, shape.sets as usize);
    if in_registers(bytes, 1 << shape.bits, sets) {
        return bytes * REGISTER_CODES;
    }
    (shape.entry_count as usize * stored_bytes(bytes) * sets) << shape.entry_copies
}

/// Steps of the products with `codes` codes of keys: `LookupOrder` of `lookup.cuh`.
pub(crate) fn key_steps(shape: &SideShape, codes: usize) -> usize {
    let bytes = shape.entry_bytes as usize;
    let quads = codes.div_ceil(QUAD);
    let chunks = if in_registers(bytes, 1 << shape.bits, shape.sets as usize) {
        quads.div_ceil(2).div_ceil(QUAD)
    } else {
        (quads.div_ceil(QUAD) * bytes).div_ceil(4)
    };
    2 * chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places `2^bits` entries of `bytes` bytes; gives the shape, and bytes in the table.
    fn placed(bytes: usize, bits: u32, shared_bytes: usize) -> (SideShape, usize) {
        let values = (0..bytes << bits).map(|i| (i % 255) as i8).collect();
        let mut shape = SideShape { bits, sets: 1, ..SideShape::default() };
        let mut tables = vec![9; 3];
        LookupEntries { bytes, unit: 0.5, values, parts: vec![] }.append_entries(
            &mut tables,
            &mut shape,
            shared_bytes,
        );
        assert_eq!(shape.entries, 16);
        (shape, tables.len() - 16)
    }

    #[test]
    fn copies_of_entries_are_as_many_as_fit_and_else_some_are_left_out() {
        let entry = |shape: SideShape| (shape.entry_count, 1 << shape.entry_copies);
        // 256 words: 1 KiB.
        for (room, copies) in [(1 << 10, 1), (5000, 4), (18 << 10, 16), (32 << 10, 32)] {
            let (shape, bytes) = placed(4, 8, room);
            assert_eq!((entry(shape), bytes), ((256, copies), 1024));
            assert_eq!(table_bytes(&shape), 1024 * copies as usize);
        }
        assert_eq!(entry(placed(4, 8, usize::MAX).0), (256, 32));
        assert_eq!(entry(placed(4, 8, 1000).0), (250, 1));
        assert_eq!(entry(placed(8, 12, 18 << 10).0), (2304, 1));
        assert_eq!(entry(placed(8, 12, 0).0), (0, 1));
        // A word for two bytes, so that one load is one entry.
        assert_eq!(placed(2, 8, 1024).1, 1024);
    }

    #[test]
    fn two_bytes_of_sixteen_codes_stand_apart_for_registers() {
        let (shape, bytes) = placed(2, 4, 0);
        assert_eq!((shape.entry_count, bytes, table_bytes(&shape)), (16, 32, 32));
        assert_eq!((placed(2, 3, 0).1, placed(2, 5, 0).1), (32, 128));
    }

    #[test]
    fn steps_are_as_many_as_lanes_have_words() {
        let steps = |bytes, bits, codes| key_steps(&placed(bytes, bits, 0).0, codes);
        // 128 channels are four steps, unless four lanes have not as many codes.
        assert_eq!((steps(4, 8, 32), steps(2, 4, 64), steps(2, 8, 64)), (4, 4, 4));
        assert_eq!((steps(8, 12, 16), steps(16, 8, 8)), (4, 8));
        assert_eq!((steps(4, 8, 24), steps(2, 4, 24), steps(2, 8, 24)), (4, 2, 2));
    }
}
