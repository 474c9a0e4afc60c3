//! Pages of Huffman codes as tiles of bytes: what `FixedCodes` of 8 bits would be, kept in a
//! buffer of the unit. Keys and values of two parts are decoded together, so that the processor has
//! four chains of look-ups to work on.

#[cfg(target_arch = "x86_64")]
use super::huffman_x86;
use super::scores::TILE;
use super::simd::{InstructionSet, Simd};
use super::tile::Span;
use crate::BackendError;
use kvd_codec::{CHUNK_TOKENS, CodeLayout, FixedCodes, HeadSide, LaneCodes, LaneRun, PageReader};
use kvd_core::Side;
use std::ops::Range;

/// Codes that are summed together.
const QUAD: usize = 4;
/// Tiles of a chunk.
const CHUNK_TILES: usize = CHUNK_TOKENS / TILE;

/// A code that tiles hold cut off, or not at all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    /// Row, counted in the page.
    pub(super) token: usize,
    /// Position in the row.
    pub(super) position: usize,
    /// What is missing.
    pub(super) rest: f32,
}

/// The decoded tiles of one page.
pub(super) struct LaneTiles {
    side: Side,
    /// A row's runs, and where each begins in the rows of a tile.
    pub(super) runs: Vec<(LaneRun, usize)>,
    /// Codes of a tile's row.
    pub(super) per_row: usize,
    /// Rows of the page that lie in full tiles.
    rows: usize,
    pub(super) bytes: Vec<u8>,
    /// Of the chunks that were decoded, for rows in full tiles.
    pub(super) rests: Vec<Rest>,
    codes: Vec<u16>,
    #[cfg(target_arch = "x86_64")]
    pub(super) scratch: huffman_x86::Scratch,
}

impl LaneTiles {
    /// For pages of that side; `None` when they hold no Huffman codes, or codes beyond a byte.
    pub(super) fn new(head: &HeadSide, side: Side) -> Option<Self> {
        let mut per_row = 0;
        let place = |run: &LaneRun| {
            let first = per_row;
            // Four positions of a key are summed together.
            per_row += match side {
                Side::Key => run.len.next_multiple_of(QUAD),
                Side::Value => run.len,
            };
            (*run, first)
        };
        let runs: Vec<_> = head.lane_runs()?.iter().map(place).collect();
        Some(Self {
            side,
            runs,
            per_row,
            rows: 0,
            bytes: Vec::new(),
            rests: Vec::new(),
            codes: Vec::new(),
            #[cfg(target_arch = "x86_64")]
            scratch: huffman_x86::Scratch::default(),
        })
    }

    /// The tiles as codes of eight bits under the scales of their page.
    pub(super) fn fixed<'a>(&'a self, scales: &'a [u8]) -> FixedCodes<'a> {
        let layout = CodeLayout::new(self.side, self.rows, self.per_row, 8);
        FixedCodes { layout, scales, codes: &self.bytes }
    }

    /// What tiles do not hold of the rows that a span wants, and their rows in the span.
    pub(super) fn rests_of(&self, span: &Span) -> impl Iterator<Item = (&Rest, usize)> {
        let rows = span.rows();
        let first = span.first;
        let inside = move |rest: &&Rest| rows.contains(&rest.token);
        self.rests.iter().filter(inside).map(move |rest| (rest, rest.token - first))
    }

    fn tile_bytes(&self) -> usize {
        TILE * self.per_row
    }

    /// Makes room for the page, and says which chunks are to be decoded.
    fn open(&mut self, page: &PageReader<'_>, wanted: &Range<usize>) -> Range<usize> {
        self.rows = page.tokens() / TILE * TILE;
        let bytes = self.rows.next_multiple_of(CHUNK_TOKENS) * self.per_row;
        if self.bytes.len() < bytes {
            self.bytes.resize(bytes, 0);
        }
        self.rests.clear();
        wanted.start / CHUNK_TOKENS..wanted.end.min(self.rows).div_ceil(CHUNK_TOKENS)
    }

    fn outliers(&mut self, lanes: &LaneCodes<'_>, index: usize) -> Result<(), BackendError> {
        for outlier in lanes.outliers(&lanes.chunk(index)) {
            let outlier = outlier?;
            let token = index * CHUNK_TOKENS + outlier.token;
            if token < self.rows {
                let (position, rest) = (outlier.position, outlier.rest as f32);
                self.rests.push(Rest { token, position, rest });
            }
        }
        Ok(())
    }

    /// Decodes a chunk by the reference.
    fn plain(&mut self, lanes: &LaneCodes<'_>, index: usize) -> Result<(), BackendError> {
        let (tokens, width) = (lanes.chunk(index).tokens, lanes.per_row());
        self.codes.resize(tokens * width, 0);
        lanes.decode(index, &mut self.codes)?;
        let size = self.tile_bytes();
        for tile in 0..tokens / TILE {
            let out = &mut self.bytes[(index * CHUNK_TILES + tile) * size..][..size];
            for (run, first) in &self.runs {
                for at in 0..run.len {
                    let position = first + at;
                    for row in 0..TILE {
                        let place = match self.side {
                            Side::Key => (position / QUAD * TILE + row) * QUAD + position % QUAD,
                            Side::Value => {
                                (row / QUAD * self.per_row + position) * QUAD + row % QUAD
                            }
                        };
                        let code = self.codes[(tile * TILE + row) * width + run.first + at];
                        out[place] = code as u8;
                    }
                }
            }
        }
        Ok(())
    }
}

/// A page, and the rows of it that are wanted.
pub(super) struct Wanted<'a> {
    pub(super) tiles: &'a mut LaneTiles,
    pub(super) page: &'a PageReader<'a>,
    pub(super) rows: Range<usize>,
    /// Whether there are tiles of the page now.
    pub(super) decoded: &'a mut bool,
}

/// Decodes what is wanted of the pages that hold Huffman codes of at most a byte.
pub(super) fn decode(simd: Simd, pages: Vec<Wanted<'_>>) -> Result<(), BackendError> {
    let mut tasks = Vec::with_capacity(pages.len());
    for Wanted { tiles, page, rows, decoded } in pages {
        let Some((lanes, _)) = page.lane_codes() else { continue };
        if lanes.tables().iter().any(|table| table.bytes().is_none()) {
            continue;
        }
        *decoded = true;
        let chunks = tiles.open(page, &rows);
        for index in chunks.clone() {
            tiles.outliers(&lanes, index)?;
        }
        tasks.push((tiles, lanes, chunks));
    }
    while tasks.iter().any(|(.., chunks)| !chunks.is_empty()) {
        let mut whole = Vec::new();
        for (tiles, lanes, chunks) in &mut tasks {
            let Some(index) = chunks.next() else { continue };
            let fast =
                simd.set() == InstructionSet::Avx512 && lanes.chunk(index).tokens == CHUNK_TOKENS;
            if fast {
                whole.push((tiles, lanes, index));
            } else {
                tiles.plain(lanes, index)?;
            }
        }
        #[cfg(target_arch = "x86_64")]
        huffman_x86::decode(whole)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{codec, geometry, values};
    use super::*;
    use kvd_codec::{BlockRows, HEADER_BYTES, ModelCodec};
    use kvd_core::LayerIndex;

    const LAYER: LayerIndex = LayerIndex(0);

    /// The codes of every run and every outlier, or that there is an error.
    fn tiles(simd: Simd, codec: &ModelCodec, side: Side, page: &[u8]) -> Option<Vec<i64>> {
        let head = codec.head(LAYER, side, 0);
        let page = PageReader::open(codec, LAYER, side, 0, page).ok()?;
        let mut tiles = LaneTiles::new(head, side).unwrap();
        let mut decoded = false;
        let rows = 0..page.tokens();
        let wanted = Wanted { tiles: &mut tiles, page: &page, rows, decoded: &mut decoded };
        decode(simd, vec![wanted]).ok()?;
        assert!(decoded);
        let layout = CodeLayout::new(side, tiles.rows, tiles.per_row, 8);
        let mut codes = Vec::new();
        for tile in 0..tiles.rows / TILE {
            let bytes = &tiles.bytes[layout.tile(tile)];
            for (run, first) in &tiles.runs {
                for position in *first..first + run.len {
                    codes.extend((0..TILE).map(|row| match side {
                        Side::Key => bytes[(position / 4 * TILE + row) * 4 + position % 4],
                        Side::Value => bytes[(row / 4 * tiles.per_row + position) * 4 + row % 4],
                    }));
                }
            }
        }
        let rests =
            tiles.rests.iter().flat_map(|r| [r.token, r.position, r.rest.to_bits() as usize]);
        Some(codes.into_iter().map(i64::from).chain(rests.map(|x| x as i64)).collect())
    }

    #[test]
    fn every_level_reads_what_the_reference_reads() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        let (mut read, mut refused) = (0, 0);
        for dim in [36, 64] {
            let geometry = geometry(dim);
            for name in [
                "kvcomp",
                "kvd-4",
                "k=mean+qpca/grid(rate=2)/huffman; v=mean+pca/grid(rate=1)/huffman",
                "k=uniform(b=7,axis=channel)/huffman; v=uniform(b=1,axis=token)/huffman",
            ] {
                let mut codec = codec(&geometry, name);
                let rows = |seed| values(2 * 64 * dim as usize, seed);
                let (k, v) = (rows(3), rows(4));
                let block = BlockRows { tokens: 64, k: &k, v: &v };
                codec.train_tables(LAYER, &[block]).unwrap();
                let mut bytes = Vec::new();
                let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
                for side in Side::BOTH {
                    let first = 2 * side.index();
                    let start = if first == 0 { 0 } else { encoded.page_ends[first - 1] };
                    let page = &bytes[start as usize..encoded.page_ends[first] as usize];
                    for turn in 0..60 {
                        let mut page = page.to_vec();
                        for _ in 0..turn {
                            let at = HEADER_BYTES + 4 + random() % (page.len() - HEADER_BYTES - 4);
                            page[at] = random() as u8;
                        }
                        let levels = Simd::available();
                        let expected = tiles(levels[0], &codec, side, &page);
                        read += usize::from(expected.is_some());
                        refused += usize::from(expected.is_none());
                        for simd in levels {
                            let got = tiles(simd, &codec, side, &page);
                            assert_eq!(got, expected, "{simd:?} {name} {side} {turn}");
                        }
                    }
                }
            }
        }
        assert!(read > 100 && refused > 20, "{read} pages read, {refused} refused");
    }
}
