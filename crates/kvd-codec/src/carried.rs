//! Pages that leave their model's codec and come back to another: verified, with the Huffman tables
//! that they were written with, and renamed to the versions that these have there.
//!
//! A page names its table by a version that counts within one registration. Under another's table
//! of that number its checksum is right and its rows are wrong, so no page crosses without its
//! tables' code lengths.

use crate::drift::TableHistory;
use crate::huffman::HuffmanTable;
use crate::page::{Page, PageHeader, rename_table};
use crate::{CodecError, ModelCodec, PageError, PageReader};
use kvd_core::{LayerIndex, Side};

/// A Huffman table as pages carry it along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedTable {
    /// Keys or values.
    pub side: Side,
    /// Which of the side's codecs ([`ModelCodec::counted_codes`]).
    pub variant: u16,
    /// Version by which the pages that travel with it name it.
    pub version: u16,
    /// Code length of each symbol, in bits.
    pub lengths: Vec<u8>,
}

/// The pages of one block of one layer, one after another.
#[derive(Clone, Copy, Debug)]
pub struct LayerPages<'a> {
    /// Which layer.
    pub layer: LayerIndex,
    /// K of each head, then V.
    pub bytes: &'a [u8],
    /// End of each page in `bytes`.
    pub ends: &'a [u32],
}

/// The version that a table has here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdoptedTable {
    /// This one.
    Version(u16),
    /// There is none: the layer's side has as many versions as it may.
    Full,
}

impl<'a> LayerPages<'a> {
    /// Splits the bytes into `count` pages.
    ///
    /// # Errors
    /// When the ends are not as many, fall, or are not those of the bytes.
    fn split_pages(self, count: usize) -> Result<Vec<&'a [u8]>, PageError> {
        let wrong = PageError::Payload("the ends of its block's pages do not fit");
        let covers = self.ends.last().is_some_and(|end| *end as usize == self.bytes.len());
        if self.ends.len() != count || !self.ends.is_sorted() || !covers {
            return Err(wrong);
        }
        let starts = std::iter::once(&0).chain(self.ends);
        let ranges = starts.zip(self.ends).map(|(start, end)| *start as usize..*end as usize);
        Ok(ranges.map(|range| &self.bytes[range]).collect())
    }
}

impl ModelCodec {
    /// Tests the pages of a block: their checksums, and that they are of that layer, head and codec
    /// with tables that are there.
    ///
    /// # Errors
    /// The first that is not.
    pub fn verify_pages(&self, pages: LayerPages<'_>) -> Result<(), PageError> {
        let LayerPages { layer, .. } = pages;
        let heads = self.geometry().kv_heads as usize;
        for (index, bytes) in pages.split_pages(2 * heads)?.into_iter().enumerate() {
            let page = PageReader::open_page(
                self,
                layer,
                Side::BOTH[index / heads],
                index % heads,
                bytes,
            )?;
            page.verify_checksum()?;
        }
        Ok(())
    }

    /// The Huffman tables built from blocks that pages of a block need, the prior among them.
    ///
    /// # Errors
    /// When a page has no header that can be read, or names a table that is not there.
    pub fn carried_tables(&self, pages: LayerPages<'_>) -> Result<Vec<CarriedTable>, PageError> {
        let mut carried: Vec<CarriedTable> = Vec::new();
        for (place, header) in self.coded_pages(pages)? {
            let PagePlace { side, head, .. } = place;
            let head = self.head_codec(pages.layer, side, head);
            let (variant, version) = (head.variant as u16, header.table_version);
            let is_it =
                |of: &CarriedTable| (of.side, of.variant, of.version) == (side, variant, version);
            if carried.iter().any(is_it) {
                continue;
            }
            let history = &self.tables[self.table_index(pages.layer, side, head)];
            let table = history.versions.get(usize::from(version));
            let lengths = table.ok_or(PageError::Table(version))?.huffman.code_lengths().to_vec();
            carried.push(CarriedTable { side, variant, version, lengths });
        }
        Ok(carried)
    }

    /// Finds a table among a layer's versions, or adds it as one more, which pages are read with
    /// and none is written with unless it fits best. A layer's side adopts as long as its versions
    /// leave [`ModelCodec::OWN_TABLES_MIN`] for its own.
    ///
    /// # Errors
    /// When no head of the layer has such a table.
    pub fn adopt_table(
        &mut self,
        layer: LayerIndex,
        table: &CarriedTable,
    ) -> Result<AdoptedTable, CodecError> {
        let CarriedTable { side, variant, lengths, .. } = table;
        let wrong = || CodecError::Shape(format!("a {side} table of {} codes", lengths.len()));
        let heads = 0..self.geometry().kv_heads as usize;
        let of_table = Some((usize::from(*variant), lengths.len()));
        let is_in_geometry = layer.0 < self.geometry().layers;
        let mut known = heads
            .filter(|head| is_in_geometry && self.counted_codes(layer, *side, *head) == of_table);
        let head = known.next().ok_or_else(wrong)?;
        let huffman = HuffmanTable::try_full(lengths).ok_or_else(wrong)?;
        let index = self.table_index(layer, *side, self.head_codec(layer, *side, head));
        Ok(self.tables[index].adopt_table(huffman))
    }

    /// Rewrites the versions by which a block's pages name their tables, and their checksums. Call
    /// after [`Page::verify_checksum`] of each: what was damaged before would look whole.
    ///
    /// # Errors
    /// When a page cannot be read, or names a table that `version_here` does not know.
    pub fn rename_tables(
        &self,
        layer: LayerIndex,
        bytes: &mut [u8],
        ends: &[u32],
        version_here: &dyn Fn(Side, u16, u16) -> Option<u16>,
    ) -> Result<(), PageError> {
        let coded = self.coded_pages(LayerPages { layer, bytes, ends })?;
        for (place, header) in coded {
            let PagePlace { side, head, start, end } = place;
            let variant = self.head_codec(layer, side, head).variant as u16;
            let version = header.table_version;
            let here = version_here(side, variant, version).ok_or(PageError::Table(version))?;
            rename_table(&mut bytes[start..end], here);
        }
        Ok(())
    }

    /// The pages of a block whose codes were written with tables that are built from blocks.
    fn coded_pages(
        &self,
        pages: LayerPages<'_>,
    ) -> Result<Vec<(PagePlace, PageHeader)>, PageError> {
        let heads = self.geometry().kv_heads as usize;
        if pages.layer.0 >= self.geometry().layers {
            return Err(PageError::Payload("it is of no layer of the model"));
        }
        let (mut coded, mut start) = (Vec::new(), 0);
        for (index, bytes) in pages.split_pages(2 * heads)?.into_iter().enumerate() {
            let header = *Page::parse_page(bytes)?.header();
            let (side, head) = (Side::BOTH[index / heads], index % heads);
            let end = start + bytes.len();
            let trained = self.head_codec(pages.layer, side, head).trained_tables;
            if trained && header.huffman && !header.fallback {
                coded.push((PagePlace { side, head, start, end }, header));
            }
            start = end;
        }
        Ok(coded)
    }
}

/// Where a page lies among those of its block.
#[derive(Clone, Copy, Debug)]
struct PagePlace {
    side: Side,
    head: usize,
    start: usize,
    end: usize,
}

/// Tests the checksums of the pages of a block, whoever wrote them.
///
/// # Errors
/// The first page that is damaged or cannot be read.
pub fn verify_checksums(pages: LayerPages<'_>) -> Result<(), PageError> {
    for bytes in pages.split_pages(pages.ends.len())? {
        Page::parse_page(bytes)?.verify_checksum()?;
    }
    Ok(())
}

impl TableHistory {
    /// The version of a table, which becomes one more where there is room.
    fn adopt_table(&mut self, huffman: HuffmanTable) -> AdoptedTable {
        let is_it = |of: &crate::StreamTable| of.huffman == huffman;
        if let Some(version) = self.versions.iter().position(is_it) {
            return AdoptedTable::Version(version as u16);
        }
        if self.built_versions() + ModelCodec::OWN_TABLES_MIN >= ModelCodec::TABLE_VERSIONS_MAX {
            return AdoptedTable::Full;
        }
        self.add_version(huffman);
        AdoptedTable::Version(self.built_versions() as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockRows, resolve_spec};
    use kvd_core::{DType, Geometry, RopePairing};

    const LAYER: LayerIndex = LayerIndex(0);
    const TOKENS: usize = 64;
    const DIM: usize = 64;
    const VALUES: usize = 2 * TOKENS * DIM;

    fn codec(text: &str) -> ModelCodec {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 2,
            head_dim_k: DIM as u32,
            head_dim_v: DIM as u32,
            block_tokens: TOKENS as u32,
            dtype: DType::F32,
            rope_pairing: RopePairing::Half,
        };
        ModelCodec::new(geometry, resolve_spec(text).unwrap(), None).unwrap()
    }

    /// Rows near a normal distribution, to that power.
    fn rows(power: i32) -> Vec<f32> {
        let mut state = 7u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..VALUES).map(|_| (draw() + draw() + draw()).powi(power)).collect()
    }

    /// A codec that has trained its tables on rows of that power.
    fn trained(power: i32) -> ModelCodec {
        let mut codec = codec("kvcomp");
        let rows = rows(power);
        codec.train_tables(LAYER, &[BlockRows { tokens: TOKENS, k: &rows, v: &rows }]).unwrap();
        codec
    }

    struct Written {
        bytes: Vec<u8>,
        ends: Vec<u32>,
    }

    impl Written {
        fn of(codec: &ModelCodec) -> Self {
            let (rows, mut bytes) = (rows(3), Vec::new());
            let block = BlockRows { tokens: TOKENS, k: &rows, v: &rows };
            let ends = codec.encode_block(LAYER, &block, &mut bytes).unwrap().page_ends;
            Self { bytes, ends }
        }

        fn pages(&self) -> LayerPages<'_> {
            LayerPages { layer: LAYER, bytes: &self.bytes, ends: &self.ends }
        }

        /// The rows of its pages under a codec; none where they cannot be read.
        fn decode(&self, codec: &ModelCodec) -> Option<Vec<f32>> {
            let mut all = Vec::new();
            for (index, bytes) in self.pages().split_pages(4).unwrap().into_iter().enumerate() {
                let (side, head) = (Side::BOTH[index / 2], index % 2);
                let page = PageReader::open_page(codec, LAYER, side, head, bytes).ok()?;
                page.verify_checksum().ok()?;
                let mut rows = vec![0.0; TOKENS * DIM];
                page.decode_rows(0, TOKENS, &mut rows).ok()?;
                all.extend(rows);
            }
            Some(all)
        }
    }

    fn cross(written: &mut Written, from: &ModelCodec, to: &mut ModelCodec, renames: bool) {
        let tables = from.carried_tables(written.pages()).unwrap();
        assert_eq!(tables.len(), 2);
        let mut here = Vec::new();
        for table in &tables {
            let AdoptedTable::Version(version) = to.adopt_table(LAYER, table).unwrap() else {
                panic!("there is room for two tables")
            };
            here.push((table.side, table.variant, table.version, version));
        }
        let find = |side, variant, version| {
            let found = here.iter().find(|of| (of.0, of.1, of.2) == (side, variant, version));
            found.map(|of| of.3)
        };
        if renames {
            let Written { bytes, ends } = written;
            to.rename_tables(LAYER, bytes, ends, &find).unwrap();
        }
    }

    #[test]
    fn pages_of_other_tables_read_as_they_were_once_they_are_renamed_and_not_before() {
        let from = trained(3);
        let mut expected = Written::of(&from);
        let rows = expected.decode(&from).unwrap();
        // Another registration, whose first table is of other data.
        let mut to = trained(1);
        cross(&mut expected, &from, &mut to, true);
        assert_eq!(expected.decode(&to).as_ref(), Some(&rows));
        to.verify_pages(expected.pages()).unwrap();
        // What this is for: the same bytes without the rewriting are other rows, or none.
        let mut without = Written::of(&from);
        cross(&mut without, &from, &mut trained(1), false);
        assert_ne!(without.decode(&to).as_ref(), Some(&rows));
    }

    #[test]
    fn a_table_that_is_there_takes_no_version_and_one_too_many_is_full() {
        let from = trained(3);
        let tables = from.carried_tables(Written::of(&from).pages()).unwrap();
        let mut same = from.clone();
        for table in &tables {
            assert_eq!(same.adopt_table(LAYER, table).unwrap(), AdoptedTable::Version(1));
        }
        assert_eq!(same.table_versions(), from.table_versions());
        // Other complete codes of as many symbols: the same lengths, given to others.
        let built = same.tables[0].built_versions();
        let mut answers = Vec::new();
        for turn in 1..20 {
            let mut table = tables[0].clone();
            table.lengths.rotate_left(turn);
            answers.push(same.adopt_table(LAYER, &table).unwrap());
        }
        let room = ModelCodec::TABLE_VERSIONS_MAX - ModelCodec::OWN_TABLES_MIN;
        assert_eq!(same.tables[0].built_versions(), room);
        let full = answers.iter().filter(|answer| **answer == AdoptedTable::Full).count();
        assert_eq!(full, 19 - (room - built));
        // None of them is written with.
        assert_eq!(same.current_table(LAYER, Side::Key, 0), 1);
    }

    #[test]
    fn tables_of_no_side_and_lengths_that_are_no_code_are_refused() {
        let from = trained(3);
        let tables = from.carried_tables(Written::of(&from).pages()).unwrap();
        let mut to = codec("kvcomp");
        let mut wrong = tables[0].clone();
        wrong.lengths[0] += 1;
        to.adopt_table(LAYER, &wrong).unwrap_err();
        to.adopt_table(LAYER, &CarriedTable { variant: 7, ..tables[0].clone() }).unwrap_err();
        to.adopt_table(LayerIndex(1), &tables[0]).unwrap_err();
        to.adopt_table(LAYER, &CarriedTable { lengths: vec![0; 3], ..tables[0].clone() })
            .unwrap_err();
    }

    #[test]
    fn every_flipped_bit_of_a_block_is_found() {
        let codec = codec("kivi-4");
        let mut written = Written::of(&codec);
        codec.verify_pages(written.pages()).unwrap();
        for bit in (0..written.bytes.len() * 8).step_by(13) {
            written.bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(verify_checksums(written.pages()).is_err(), "bit {bit}");
            written.bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let ends = &written.ends[..3];
        let short = LayerPages { ends, ..written.pages() };
        assert!(codec.verify_pages(short).is_err() && verify_checksums(short).is_err());
    }
}
