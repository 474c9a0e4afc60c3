//! Pages of Huffman codes as tiles of bytes: what `FixedCodes` of 8 bits would be, kept in a
//! buffer of the unit. Pages of several parts are decoded together, so that one look-up of a
//! register serves as many chunks as it has bytes for a lane, and keys and values take turns.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod chunk_group;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod scalar;

use crate::BackendError;
use crate::cpu::simd::{InstructionSet, Simd, per_level};
use crate::cpu::span_scores::TILE;
use crate::cpu::token_span::TokenSpan;
use kvd_codec::{
    CHUNK_TOKENS, CodeLayout, FixedCodes, HeadCodec, PageError, PageReader, StreamCodes, StreamRun,
    StreamTable,
};
use kvd_core::Side;
use std::ops::Range;

/// Codes that are summed together.
pub(super) const QUAD: usize = 4;
/// Streams of a chunk, a lane of a register each.
pub(super) const STREAMS: usize = 16;
/// Bytes of a quad in every lane.
pub(super) const STEP_BYTES: usize = STREAMS * QUAD;

/// One quad in each lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QuadStep {
    pub(super) table: usize,
    /// Codes of a quad that count.
    pub(super) count: usize,
    /// Tokens before lane 0; chunks that end before them do not have the step.
    pub(super) tokens: usize,
    /// Where the quads of all lanes go.
    pub(super) out: usize,
}

/// One chunk on its way into tiles.
pub(super) struct HuffmanChunk<'a> {
    pub(super) side: Side,
    pub(super) tokens: usize,
    /// Words, and after them as many zeros as there are lanes.
    pub(super) words: &'a [u32],
    /// How many were taken.
    pub(super) next: usize,
    pub(super) tables: &'a [StreamTable],
    pub(super) steps: &'a [QuadStep],
    /// A tile of keys after the other, or quads of values, `[positions, lanes]`.
    pub(super) out: &'a mut [u8],
}

impl HuffmanChunk<'_> {
    /// Words of the page.
    pub(super) fn word_count(&self) -> usize {
        self.words.len() - STREAMS
    }
}

/// A code that tiles hold cut off, or not at all.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutlierRest {
    /// Row, counted in the page.
    pub(super) token: usize,
    /// Position in the row.
    pub(super) position: usize,
    /// The part of the code that the tile lacks.
    pub(super) rest: f32,
}

/// The decoded tiles of one page.
pub(super) struct StreamTiles {
    side: Side,
    /// A row's runs, and where each begins in the rows of a tile.
    pub(super) runs: Vec<(StreamRun, usize)>,
    /// Codes of a tile's row.
    pub(super) per_row: usize,
    /// Rows of the page that lie in full tiles.
    rows: usize,
    pub(super) bytes: Vec<u8>,
    /// Outliers of the decoded chunks, for rows in full tiles.
    pub(super) rests: Vec<OutlierRest>,
    /// The steps of a whole chunk.
    steps: Vec<QuadStep>,
    words: Vec<u32>,
    /// Quads of values, `[positions, lanes]`.
    quads: Vec<u8>,
}

/// The steps of a whole chunk, in the order of its words.
fn chunk_steps(runs: &[(StreamRun, usize)], per_row: usize, side: Side) -> Vec<QuadStep> {
    let mut steps = Vec::new();
    for (run, first) in runs {
        let table = run.table;
        for at in 0..run.len {
            let position = first + at;
            if side == Side::Value {
                steps.push(QuadStep { table, count: QUAD, tokens: 0, out: position * STEP_BYTES });
            } else if at % QUAD == 0 {
                let count = QUAD.min(run.len - at);
                for tokens in (0..CHUNK_TOKENS).step_by(STREAMS) {
                    let (tile, row) = (tokens / TILE, tokens % TILE);
                    let out = tile * TILE * per_row + position * TILE + row * QUAD;
                    steps.push(QuadStep { table, count, tokens, out });
                }
            }
        }
    }
    steps
}

impl StreamTiles {
    /// For pages of that side; `None` when they hold no Huffman codes, or codes beyond a byte.
    pub(super) fn new(head: &HeadCodec, side: Side) -> Option<Self> {
        let mut per_row = 0;
        let place = |run: &StreamRun| {
            let first = per_row;
            // Four positions of a key are summed together.
            per_row += match side {
                Side::Key => run.len.next_multiple_of(QUAD),
                Side::Value => run.len,
            };
            (*run, first)
        };
        let runs: Vec<_> = head.stream_runs()?.iter().map(place).collect();
        Some(Self {
            side,
            steps: chunk_steps(&runs, per_row, side),
            runs,
            per_row,
            rows: 0,
            bytes: Vec::new(),
            rests: Vec::new(),
            words: Vec::new(),
            quads: Vec::new(),
        })
    }

    /// The tiles as codes of eight bits under the scales of their page.
    pub(super) fn as_fixed_codes<'a>(&'a self, scales: &'a [u8]) -> FixedCodes<'a> {
        let layout = CodeLayout::new(self.side, self.rows, self.per_row, 8);
        FixedCodes { layout, scales, codes: &self.bytes }
    }

    /// The page's full tiles.
    pub(super) fn tile_bytes(&self) -> &[u8] {
        &self.bytes[..self.rows * self.per_row]
    }

    /// The codes of a full tile.
    pub(super) fn full_tile(&self, tile: usize) -> Option<&[u8]> {
        let len = TILE * self.per_row;
        self.tile_bytes().get(tile * len..(tile + 1) * len)
    }

    /// The code of a row of the page, which lies in a full tile, at a position.
    pub(super) fn code_of_token(&self, token: usize, position: usize) -> u8 {
        let (quad, within) = match self.side {
            Side::Key => {
                let (tile, row) = (token / TILE * TILE, token % TILE);
                (tile * self.per_row / QUAD + position / QUAD * TILE + row, position % QUAD)
            }
            Side::Value => (token / QUAD * self.per_row + position, token % QUAD),
        };
        self.bytes[quad * QUAD + within]
    }

    /// Whether a row of the page lies in a full tile.
    pub(super) fn holds_token(&self, token: usize) -> bool {
        token < self.rows
    }

    /// Outliers of the rows that a span wants, with their rows in the span.
    pub(super) fn rests_of(&self, span: &TokenSpan) -> impl Iterator<Item = (&OutlierRest, usize)> {
        let rows = span.source_rows();
        let first = span.first;
        let inside = move |rest: &&OutlierRest| rows.contains(&rest.token);
        self.rests.iter().filter(inside).map(move |rest| (rest, rest.token - first))
    }

    /// Makes room for the page, and says which chunks are to be decoded.
    fn open_page(&mut self, page: &PageReader<'_>, wanted: &Range<usize>) -> Range<usize> {
        self.rows = page.tokens() / TILE * TILE;
        let bytes = self.rows.next_multiple_of(CHUNK_TOKENS) * self.per_row;
        if self.bytes.len() < bytes {
            self.bytes.resize(bytes, 0);
        }
        self.rests.clear();
        wanted.start / CHUNK_TOKENS..wanted.end.min(self.rows).div_ceil(CHUNK_TOKENS)
    }

    fn read_outliers(
        &mut self,
        streams: &StreamCodes<'_>,
        index: usize,
    ) -> Result<(), BackendError> {
        for outlier in streams.chunk_outliers(&streams.chunk(index)) {
            let outlier = outlier?;
            let token = index * CHUNK_TOKENS + outlier.token;
            if token < self.rows {
                let (position, rest) = (outlier.position, outlier.rest as f32);
                self.rests.push(OutlierRest { token, position, rest });
            }
        }
        Ok(())
    }

    /// Input and output of the decoder for one chunk.
    fn start_chunk<'a>(
        &'a mut self,
        simd: Simd,
        streams: &StreamCodes<'a>,
        index: usize,
    ) -> HuffmanChunk<'a> {
        let chunk = streams.chunk(index);
        let words = chunk.words.as_chunks::<2>().0;
        self.words.resize(words.len() + STREAMS, 0);
        let (wide, beyond) = self.words.split_at_mut(words.len());
        widen_words(simd, words, wide);
        beyond.fill(0);
        let size = CHUNK_TOKENS * self.per_row;
        let out = match self.side {
            Side::Key => &mut self.bytes[index * size..][..size],
            Side::Value => {
                self.quads.resize(self.per_row.next_multiple_of(16) * STEP_BYTES, 0);
                &mut self.quads[..]
            }
        };
        HuffmanChunk {
            side: self.side,
            tokens: chunk.tokens,
            words: &self.words,
            next: 0,
            tables: streams.tables(),
            steps: &self.steps,
            out,
        }
    }

    /// Brings quads of values where tiles have them: lane `l` holds tokens `4 l` and the three
    /// after it.
    fn place_quads(&mut self, simd: Simd, index: usize) {
        if self.side == Side::Key {
            return;
        }
        let (per_row, size) = (self.per_row, CHUNK_TOKENS * self.per_row);
        let out = &mut self.bytes[index * size..][..size];
        #[cfg(target_arch = "x86_64")]
        if simd.vector_set() == InstructionSet::Avx512 {
            return avx512::transpose_quads(simd, &self.quads, per_row, out);
        }
        #[cfg(target_arch = "aarch64")]
        if simd.vector_set() != InstructionSet::Portable {
            return neon::transpose_quads(&self.quads, per_row, out);
        }
        #[cfg(target_arch = "x86_64")]
        let done = match simd.vector_set() {
            InstructionSet::Avx2 => avx2::transpose_quads(simd, &self.quads, per_row, out),
            _ => 0,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let done = 0;
        transpose_quads(&self.quads, per_row, done, out);
    }
}

per_level!(fn widen_words(words: &[[u8; 2]], out: &mut [u32]) = widen_words_body);

#[inline(always)]
fn widen_words_body(words: &[[u8; 2]], out: &mut [u32]) {
    let words = words.iter().map(|word| u32::from(u16::from_le_bytes(*word)));
    out.iter_mut().zip(words).for_each(|(out, word)| *out = word);
}

/// The positions from `done` on.
fn transpose_quads(quads: &[u8], per_row: usize, done: usize, out: &mut [u8]) {
    let out = out.as_chunks_mut::<QUAD>().0;
    // A line of each lane at a time.
    for first in (done..per_row).step_by(STREAMS) {
        let count = (per_row - first).min(STREAMS);
        let block = quads[first * STEP_BYTES..].as_chunks::<QUAD>().0;
        for lane in 0..STREAMS {
            let out = out[lane * per_row + first..][..count].iter_mut();
            out.enumerate().for_each(|(at, out)| *out = block[at * STREAMS + lane]);
        }
    }
}

/// Parts whose pages are decoded together: bytes of a lane of 32 bits.
pub(super) const TOGETHER: usize = 4;

/// A page, and the rows of it that are wanted.
pub(super) struct PageRequest<'a> {
    pub(super) tiles: &'a mut StreamTiles,
    pub(super) page: &'a PageReader<'a>,
    pub(super) rows: Range<usize>,
    /// Whether there are tiles of the page now.
    pub(super) decoded: &'a mut bool,
}

/// Decodes what is wanted of the pages that hold Huffman codes of at most a byte.
pub(super) fn decode_pages(simd: Simd, pages: Vec<PageRequest<'_>>) -> Result<(), BackendError> {
    let mut tasks = Vec::with_capacity(pages.len());
    for PageRequest { tiles, page, rows, decoded } in pages {
        let Some((streams, _)) = page.stream_codes() else { continue };
        if streams.tables().iter().any(|table| table.byte_tables().is_none()) {
            continue;
        }
        *decoded = true;
        let chunks = tiles.open_page(page, &rows);
        for index in chunks.clone() {
            tiles.read_outliers(&streams, index)?;
        }
        tasks.push((tiles, streams, chunks));
    }
    while tasks.iter().any(|(.., chunks)| !chunks.is_empty()) {
        let (mut turns, mut chunks) = (Vec::new(), Vec::new());
        for (tiles, streams, wanted) in &mut tasks {
            let Some(index) = wanted.next() else { continue };
            turns.push((&mut **tiles, &*streams, index));
        }
        chunks.extend(
            turns
                .iter_mut()
                .map(|(tiles, streams, index)| tiles.start_chunk(simd, streams, *index)),
        );
        decode_chunks(simd, &mut chunks);
        let spent = chunks.iter().all(|chunk| chunk.next >= chunk.word_count());
        drop(chunks);
        if !spent {
            return Err(PageError::Payload("a stream does not end where its length says").into());
        }
        turns.into_iter().for_each(|(tiles, _, index)| tiles.place_quads(simd, index));
    }
    Ok(())
}

/// Decodes one chunk of each page; those that are not whole one symbol after another.
fn decode_chunks(simd: Simd, chunks: &mut [HuffmanChunk<'_>]) {
    let whole = |chunk: &&mut HuffmanChunk<'_>| chunk.tokens == CHUNK_TOKENS;
    let (fast, slow): (Vec<_>, Vec<_>) = chunks.iter_mut().partition(whole);
    slow.into_iter().for_each(scalar::decode_chunk);
    match simd.vector_set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => avx512::decode_chunks(simd, fast),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => avx2::decode_chunks(simd, fast),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => {
            neon::decode_chunks(fast);
        }
        _ => fast.into_iter().for_each(scalar::decode_chunk),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::conformance::{codec, geometry, values};
    use kvd_codec::{BlockRows, HEADER_BYTES, ModelCodec};
    use kvd_core::LayerIndex;

    const LAYER: LayerIndex = LayerIndex(0);

    /// By page the codes of every run and every outlier; `None` if one of them has an error.
    fn tiles(simd: Simd, codec: &ModelCodec, side: Side, pages: &[&[u8]]) -> Option<Vec<Vec<i64>>> {
        let head = codec.head_codec(LAYER, side, 0);
        let pages: Option<Vec<_>> = pages
            .iter()
            .map(|page| PageReader::open_page(codec, LAYER, side, 0, page).ok())
            .collect();
        let pages = pages?;
        let mut tiles: Vec<_> =
            pages.iter().map(|_| StreamTiles::new(head, side).unwrap()).collect();
        let mut decoded = vec![false; pages.len()];
        let wanted = pages.iter().zip(&mut tiles).zip(&mut decoded);
        let wanted = wanted.map(|((page, tiles), decoded)| {
            let rows = 0..page.tokens();
            PageRequest { tiles, page, rows, decoded }
        });
        decode_pages(simd, wanted.collect()).ok()?;
        assert!(decoded.iter().all(|decoded| *decoded));
        Some(tiles.iter().map(|tiles| codes(tiles, side)).collect())
    }

    fn codes(tiles: &StreamTiles, side: Side) -> Vec<i64> {
        let layout = CodeLayout::new(side, tiles.rows, tiles.per_row, 8);
        let mut codes = Vec::new();
        for row in 0..tiles.rows {
            let bytes = &tiles.bytes[layout.tile_bytes(row / TILE)];
            let row = row % TILE;
            for position in tiles.runs.iter().flat_map(|(run, first)| *first..first + run.len) {
                codes.push(match side {
                    Side::Key => bytes[(position / 4 * TILE + row) * 4 + position % 4],
                    Side::Value => bytes[(row / 4 * tiles.per_row + position) * 4 + row % 4],
                });
            }
        }
        let rests =
            tiles.rests.iter().flat_map(|r| [r.token, r.position, r.rest.to_bits() as usize]);
        codes.into_iter().map(i64::from).chain(rests.map(|x| x as i64)).collect()
    }

    /// The codes and outliers of a page by the reference decoder.
    fn reference(codec: &ModelCodec, side: Side, page: &[u8]) -> Option<Vec<i64>> {
        let page = PageReader::open_page(codec, LAYER, side, 0, page).ok()?;
        let (streams, _) = page.stream_codes().unwrap();
        let (mut codes, mut rests) = (Vec::new(), Vec::new());
        let full = page.tokens() / TILE * TILE;
        for index in 0..full.div_ceil(CHUNK_TOKENS) {
            let (chunk, first) = (streams.chunk(index), index * CHUNK_TOKENS);
            let mut rows = vec![0; chunk.tokens * streams.per_row()];
            streams.decode_chunk(index, &mut rows).ok()?;
            for row in rows.chunks_exact(streams.per_row()).take(full - first) {
                let runs = streams.runs().iter().map(|run| &row[run.first..run.first + run.len]);
                codes.extend(runs.flatten().map(|code| i64::from(*code)));
            }
            for outlier in streams.chunk_outliers(&chunk) {
                let outlier = outlier.ok()?;
                if first + outlier.token < full {
                    let rest = (outlier.rest as f32).to_bits();
                    rests.extend([first + outlier.token, outlier.position, rest as usize]);
                }
            }
        }
        codes.extend(rests.into_iter().map(|x| x as i64));
        Some(codes)
    }

    #[test]
    fn every_level_reads_what_the_reference_reads() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        let (mut read, mut refused) = (0, 0);
        for (dim, tokens) in [(36, 64), (64, 64), (64, 47)] {
            let geometry = geometry(dim);
            for name in [
                "kvcomp",
                "kvd-4",
                "k=mean+qpca/grid(rate=2)/huffman; v=mean+pca/grid(rate=1)/huffman",
                "k=uniform(b=7,axis=channel)/huffman; v=uniform(b=1,axis=token)/huffman",
            ] {
                let mut codec = codec(&geometry, name);
                let rows = |seed| values(2 * tokens * dim as usize, seed);
                let (k, v) = (rows(3), rows(4));
                let block = BlockRows { tokens, k: &k, v: &v };
                codec.train_tables(LAYER, &[block]).unwrap();
                let mut bytes = Vec::new();
                let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
                for side in Side::BOTH {
                    let first = 2 * side.index();
                    let start = if first == 0 { 0 } else { encoded.page_ends[first - 1] };
                    let good = &bytes[start as usize..encoded.page_ends[first] as usize];
                    let right = reference(&codec, side, good);
                    for turn in 0..60 {
                        let mut page = good.to_vec();
                        for _ in 0..turn {
                            let at = HEADER_BYTES + 4 + random() % (page.len() - HEADER_BYTES - 4);
                            page[at] = random() as u8;
                        }
                        let expected = reference(&codec, side, &page);
                        read += usize::from(expected.is_some());
                        refused += usize::from(expected.is_none());
                        // Beside good ones, at every place of those that are decoded together.
                        let (count, at) = (1 + turn % 5, turn % 7 % (1 + turn % 5));
                        let mut pages = vec![good; count];
                        pages[at] = &page;
                        for simd in Simd::available_levels() {
                            let got = tiles(simd, &codec, side, &pages);
                            let context = format!("{simd:?} {name} {side} {turn}");
                            assert_eq!(got.is_some(), expected.is_some(), "{context}");
                            for (index, got) in got.into_iter().flatten().enumerate() {
                                let of = if index == at { &expected } else { &right };
                                assert_eq!(Some(&got), of.as_ref(), "{context}, {index}");
                            }
                        }
                    }
                }
            }
        }
        assert!(read > 100 && refused > 20, "{read} pages read, {refused} refused");
    }
}
