//! Runs and tables of a head's Huffman codes in the layout of `kernels/include/kvd/huffman.cuh`,
//! and the shared memory that decoding takes.

use crate::abi::{ENTRY_LENGTH, SideShape, TILE_TOKENS};
use crate::kernel_choice::COPY_BYTES;
use crate::plan::SHARED_RESERVED;
use kvd_codec::{CHUNK_TOKENS, EntropyCoding, Grid, SideSpec, StreamRun, StreamTable};
use kvd_core::Side;
use std::collections::BTreeMap;

/// Codes of a quad.
const QUAD: usize = 4;
/// Chunks of a side that are decoded together at most: `CHUNKS_MAX` of `huffman_pipeline.cuh`.
const CHUNKS_MAX: usize = 4;
/// Words on their way to the lanes of a chunk: `RING_BYTES` of `huffman.cuh`.
const RING_BYTES: usize = 4 * PIECE_BYTES;
/// Words of a chunk that are copied at once, while those before are read: `PIECE_BYTES`.
pub(crate) const PIECE_BYTES: usize = 256;
/// The outliers of a chunk: `OutlierList` of `outlier.cuh`.
const OUTLIERS_BYTES: usize = 512;
/// Words of a head's runs, before the first and of each.
const HEAD_WORDS: usize = 4;
const RUN_WORDS: usize = 16;
/// Bytes between decoded chunks: two that a warp writes at once begin at different banks.
const CHUNK_PAD: usize = 64;
/// Bits that choose an entry, unless codes are longer: kernels take a byte (`BY_BYTE`).
const INDEX_BITS: u32 = 8;
/// The place of a channel without codes.
const NOWHERE: u32 = 0xFFFF;

/// A table by the bits that choose an entry: the next codes, and the bits that they take in the low
/// byte, or, of four codes, above them.
struct DecodeEntries {
    index_bits: u32,
    codes: usize,
    words: Vec<u32>,
}

impl DecodeEntries {
    /// With `symbols` symbols in an entry; none when an entry has no room for them.
    fn new(table: &StreamTable, symbols: usize, index_bits: u32, wide: bool) -> Option<Self> {
        let codes = symbols * table.codes_per_symbol();
        // Where the first code stands: they end the word, but for four.
        let first = if wide { 16 } else { 32 - 8 * codes };
        let words = (0..1u32 << index_bits).map(|index| {
            let (mut bits, mut word, mut length) = (index, 0u32, 0);
            for symbol in 0..symbols {
                let (codes, taken) = table.decode_symbol(bits);
                for (at, code) in
                    (symbol * table.codes_per_symbol()..).zip(&codes[..table.codes_per_symbol()])
                {
                    word |= u32::from(*code) << (first + 8 * at);
                }
                bits >>= taken;
                length += taken + table.raw_bits();
            }
            match codes {
                QUAD => (word < 1 << ENTRY_LENGTH).then_some(word | length << ENTRY_LENGTH),
                _ => Some(word | length),
            }
        });
        Some(Self { index_bits, codes, words: words.collect::<Option<_>>()? })
    }

    /// With as many symbols of one code each as a byte holds and a top-up is for.
    fn joint_entries(table: &StreamTable) -> Option<Self> {
        let alone = table.codes_per_symbol() == 1 && table.raw_bits() == 0;
        let fits = |symbols: &usize| {
            *symbols <= table.batch_size().0
                && *symbols as u32 * table.longest_symbol() <= INDEX_BITS
        };
        let joint = [4, 2].into_iter().filter(|symbols| alone && fits(symbols));
        joint.into_iter().find_map(|symbols| Self::new(table, symbols, INDEX_BITS, false))
    }

    /// The table that codes are looked up in, and the table for single symbols.
    fn from_table(table: &StreamTable, wide: bool) -> (Self, Option<Self>) {
        let alone = |index_bits| {
            let entries = Self::new(table, 1, index_bits, wide);
            entries.unwrap_or_else(|| unreachable!("a symbol's codes fit"))
        };
        match if wide { None } else { Self::joint_entries(table) } {
            Some(joint) => (joint, Some(alone(table.longest_symbol()))),
            None => (alone(table.longest_symbol().max(INDEX_BITS)), None),
        }
    }
}

/// The Huffman codes of one head of one side.
pub(crate) struct HeadStreams<'a> {
    pub(crate) side: Side,
    pub(crate) runs: &'a [StreamRun],
    pub(crate) tables: &'a [StreamTable],
    pub(crate) grid: Option<&'a Grid>,
}

impl HeadStreams<'_> {
    /// Appends runs and tables to `tables`, where no equal ones are known, and says in `shape`
    /// where they are and what decoding takes.
    pub(crate) fn append_tables(
        &self,
        tables: &mut Vec<u8>,
        known: &mut Vec<(u64, usize)>,
        shape: &mut SideShape,
    ) {
        let places = self.run_starts();
        let wide = shape.bits > 8;
        let bytes = self.table_bytes(&places, shape.dim as usize, wide);
        shape.stride = self.row_stride(&places);
        let planes = if wide { 2 } else { 1 };
        let tiles = CHUNK_TOKENS / TILE_TOKENS;
        let chunk = tiles * TILE_TOKENS * shape.stride as usize * planes;
        shape.chunk_bytes = (chunk.next_multiple_of(128) + CHUNK_PAD) as u32;
        // Tables of wide codes are read where they are.
        shape.lane_bytes = if wide { 0 } else { bytes.len() as u32 };
        let equal = |(start, len): &&(u64, usize)| tables[*start as usize..][..*len] == bytes[..];
        shape.lanes = match known.iter().find(equal) {
            Some((start, _)) => *start,
            None => {
                tables.resize(tables.len().next_multiple_of(16), 0);
                let start = tables.len() as u64;
                known.push((start, bytes.len()));
                tables.extend(bytes);
                start
            }
        };
    }

    /// Where each run begins in a decoded row, and at the end where the row ends.
    fn run_starts(&self) -> Vec<usize> {
        let mut next = 0;
        let mut places = vec![0];
        for run in self.runs {
            // Four positions of a key are summed together.
            next += match self.side {
                Side::Key => run.len.next_multiple_of(QUAD),
                Side::Value => run.len,
            };
            places.push(next);
        }
        places
    }

    fn row_stride(&self, places: &[usize]) -> u32 {
        let end = places.last().copied().unwrap_or(0);
        match self.side {
            // Whole steps of the products on tensor cores.
            Side::Key => end.max(1).next_multiple_of(TILE_TOKENS) as u32,
            // Odd, so that lanes that write four tokens of one position meet no bank twice.
            Side::Value => end as u32 | 1,
        }
    }

    fn table_bytes(&self, places: &[usize], dim: usize, wide: bool) -> Vec<u8> {
        let channels_at = HEAD_WORDS + RUN_WORDS * self.runs.len();
        // Nothing asks where a channel of a key is.
        let placed = self.grid.filter(|_| self.side == Side::Value);
        let mut next = channels_at + if placed.is_some() { dim } else { 0 };
        let (mut entries, mut at) = (Vec::new(), BTreeMap::new());
        for run in self.runs {
            at.entry(run.table).or_insert_with(|| {
                let (entries_of, single) = DecodeEntries::from_table(&self.tables[run.table], wide);
                let mut push = |entries_of: DecodeEntries| {
                    let start = next;
                    next += entries_of.words.len();
                    entries.extend(entries_of.words);
                    [4 * start as u32, entries_of.index_bits, entries_of.codes as u32]
                };
                let all = push(entries_of);
                (all, single.map_or(all, push))
            });
        }
        let lengths = if self.grid.is_some() { 4 } else { 2 };
        let step = self.grid.map_or(0.0, Grid::step);
        let mut words =
            vec![self.runs.len() as u32, lengths, step.to_bits(), 4 * channels_at as u32];
        for (run, place) in self.runs.iter().zip(places) {
            let table = &self.tables[run.table];
            let (batch, need) = table.batch_size();
            let (all, single) = at[&run.table];
            let bias = self.grid.map_or(0, |grid| grid.bias(run.first)) as u32;
            let per_word = (batch * table.codes_per_symbol()) as u32;
            words.extend([run.first, run.len, *place].map(|x| x as u32));
            words.extend(all);
            words.extend(single);
            words.extend([per_word, need, table.raw_bits(), bias, 0, 0, 0]);
        }
        if let Some(grid) = placed {
            let mut channels = vec![NOWHERE; dim];
            for (run, place) in self.runs.iter().zip(places) {
                for (at, channel) in channels[run.first..run.first + run.len].iter_mut().enumerate()
                {
                    *channel = (grid.bias(run.first) as u32) << 16 | (place + at) as u32;
                }
            }
            words.extend(channels);
        }
        words.extend(entries);
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// Upper bound of a side's shared memory for rows of `dim` codes: a chunk, and runs and tables.
pub(crate) fn expected_bytes(side: Side, spec: &SideSpec, dim: usize) -> [usize; 2] {
    if spec.entropy != EntropyCoding::Huffman {
        return [0, 0];
    }
    let codes = spec.quantizer.code_count();
    let planes = if codes.is_some_and(|codes| codes > 256) { 2 } else { 1 };
    // As `stride` has them, where every coefficient has a code.
    let stride = if side == Side::Key { dim.next_multiple_of(TILE_TOKENS) } else { dim | 1 };
    let chunk = (CHUNK_TOKENS * stride * planes).next_multiple_of(128) + CHUNK_PAD;
    let tables = match codes {
        // Every class of a grid in runs of its own, and a word per channel of values.
        None => 14 * (1024 + 64) + if side == Side::Value { 4 * dim } else { 0 },
        // Tables of wide codes are read where they are.
        Some(257..) => 0,
        Some(codes) => entry_bytes(codes),
    };
    [chunk, tables]
}

/// Entries of a table for so many codes at most, bytes: those that a byte chooses, and where they
/// are of several codes, which are short, single ones.
fn entry_bytes(codes: u32) -> usize {
    match codes {
        0..=128 => (4 << INDEX_BITS) + (4 << (INDEX_BITS / 2)),
        129..=256 => 4 << 12,
        _ => 4 << 15,
    }
}

/// Device memory for runs and a table of so many codes that is built from blocks, at most.
pub(crate) fn trained_bytes(codes: usize, runs: usize) -> usize {
    let head = 4 * (HEAD_WORDS + RUN_WORDS * runs);
    (head + entry_bytes(codes as u32)).next_multiple_of(COPY_BYTES)
}

/// Shared memory of a GPU, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// That one thread block may take.
    pub block: usize,
    /// Bytes of a multiprocessor.
    pub multiprocessor: usize,
    /// Bytes that must be on their way to a multiprocessor to use its part of the memory's
    /// bandwidth all the time.
    pub under_way: usize,
}

/// Room of a kernel's thread blocks on a multiprocessor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRoom {
    pub(crate) shared: SharedMemory,
    /// Thread blocks that a multiprocessor's registers are enough for.
    pub(crate) resident: usize,
}

/// Chunks of each side that a thread block decodes together, and the shared memory that it takes
/// for them beside `other` bytes: `planned` where a thread block has room for them, else so that a
/// multiprocessor decodes as many as it can. `chunk_bytes` is of keys and values, 0 for sides of
/// fixed width.
pub(crate) fn plan_decoding(
    chunk_bytes: [usize; 2],
    other: usize,
    room: BlockRoom,
    planned: Option<usize>,
) -> (usize, usize) {
    if chunk_bytes == [0; 2] {
        return (0, 0);
    }
    let BlockRoom { shared, resident } = room;
    let bytes = |chunks: usize| {
        // Half a warp that has no chunk turns its ring nonetheless.
        let rings = 2 * chunks.max(2) * RING_BYTES;
        rings + chunks * (2 * OUTLIERS_BYTES + chunk_bytes.iter().sum::<usize>())
    };
    let decoded = |chunks: &usize| {
        let block = other + bytes(*chunks);
        let blocks = shared.multiprocessor / (block + SHARED_RESERVED as usize);
        let fits = block <= shared.block && blocks > 0;
        (if fits { blocks.min(resident) * chunks } else { 0 }, *chunks)
    };
    let planned = planned.filter(|chunks| decoded(chunks).0 > 0);
    let most = || [1, CHUNKS_MAX / 2, CHUNKS_MAX].into_iter().max_by_key(decoded);
    let chunks = planned.or_else(most).unwrap_or(1);
    (chunks, bytes(chunks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_that_were_planned_where_a_thread_block_has_room() {
        let chunks = |block: usize, planned| {
            let shared = SharedMemory { block, multiprocessor: block + 1024, under_way: 0 };
            plan_decoding([8 << 10; 2], 1 << 10, BlockRoom { shared, resident: 4 }, planned).0
        };
        // Alone: two in each of two thread blocks; four in one. Then as many as were planned.
        assert_eq!([140 << 10, 90 << 10].map(|block| chunks(block, None)), [2, 4]);
        assert_eq!([1, 2, 4].map(|planned| chunks(140 << 10, Some(planned))), [1, 2, 4]);
        let none = SharedMemory { block: 0, multiprocessor: 0, under_way: 0 };
        // Four have no room.
        assert_eq!(chunks(60 << 10, Some(4)), chunks(60 << 10, None));
        assert_eq!(
            plan_decoding([0; 2], 0, BlockRoom { shared: none, resident: 4 }, Some(2)),
            (0, 0)
        );
    }
}
