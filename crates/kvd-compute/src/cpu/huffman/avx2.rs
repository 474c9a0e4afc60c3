//! Chunks of Huffman codes in AVX2: four of them together, each with the reservoirs of its sixteen
//! lanes in two registers, the next bit lowest.
//!
//! The next eight bits of the lanes of two chunks, and all that comes of them, are bytes of one
//! register. Codes and lengths are looked up sixteen bytes at a time: by four bits, then, row after
//! row, by the next four of those lanes whose code goes on (`kvd_codec::NibbleTables`). What a
//! symbol waits for is long, and two pairs of chunks that take it in turns hide half of that.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.
#![expect(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::huffman::chunk_group::{ChunkWords, group_alike};
use crate::cpu::huffman::{HuffmanChunk, QUAD, QuadStep, STEP_BYTES, STREAMS};
use crate::cpu::simd::{InstructionSet, Simd};
use kvd_codec::{NibbleRow, NibbleTables, StreamTable};
use std::arch::x86_64::*;
use std::array::from_fn;

/// Chunks whose lanes share a register of bytes.
const PAIR: usize = 2;
/// Pairs that share look-ups.
const PAIRS: usize = 2;
/// Reservoirs of eight lanes each: of chunk `c`, lanes 0 to 3 and 8 to 11 are in `2 c`, the others
/// in `2 c + 1`, so that packing them to bytes puts eight lanes of a chunk side by side.
const PARTS: usize = 2 * PAIR;

/// By the lanes of eight that are short, which two bytes of the next words each takes.
static HAND_OUT: [[u8; 16]; 256] = hand_out();

const fn hand_out() -> [[u8; 16]; 256] {
    // A byte above 127 asks for zero.
    let mut table = [[0x80; 16]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut next) = (0, 0);
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                table[mask][2 * lane] = next;
                table[mask][2 * lane + 1] = next + 1;
                next += 2;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
}

/// Up to four chunks of the same steps and tables.
struct ChunkGroup<'a, 'b> {
    chunks: Vec<&'a mut HuffmanChunk<'b>>,
    tables: &'b [StreamTable],
    words: [[ChunkWords<'b>; PAIR]; PAIRS],
    lanes: [BitReservoirs; PAIRS],
}

/// Reservoirs of two chunks.
#[derive(Clone, Copy)]
struct BitReservoirs {
    held: [__m256i; PARTS],
    /// How many bits each holds, a byte for each lane.
    have: __m256i,
}

/// Decodes whole chunks.
pub(super) fn decode_chunks(simd: Simd, chunks: Vec<&mut HuffmanChunk<'_>>) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx2, "huffman: instruction set");
    for chunks in group_alike(chunks, PAIRS * PAIR).into_iter().flatten() {
        // SAFETY: a `Simd` of this set exists only where the CPU has it.
        unsafe { decode_avx2(chunks) }
    }
}

#[target_feature(enable = "avx2,popcnt")]
fn decode_avx2(chunks: Vec<&mut HuffmanChunk<'_>>) {
    let steps = chunks[0].steps;
    let mut group = ChunkGroup::new(chunks);
    for step in steps {
        group.run_step(step);
    }
    let words = group.words.into_iter().flatten();
    group.chunks.into_iter().zip(words).for_each(|(chunk, words)| chunk.next = words.next);
}

/// A row for both halves of a register.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast_row(row: &[u8; 16]) -> __m256i {
    // SAFETY: sixteen bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(row.as_ptr().cast()) })
}

/// Looks up the eight bits in each byte in `N` columns of a table.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const N: usize>(
    bits: [__m256i; PAIRS],
    nibbles: &NibbleTables,
    columns: [fn(&NibbleRow) -> &[u8; 16]; N],
) -> [[__m256i; PAIRS]; N] {
    let four = _mm256_set1_epi8(0x0F);
    let zero = _mm256_setzero_si256();
    let (mut low, mut high, mut found) = ([zero; PAIRS], [zero; PAIRS], [[zero; PAIRS]; N]);
    for pair in 0..PAIRS {
        low[pair] = _mm256_and_si256(bits[pair], four);
        high[pair] = _mm256_and_si256(_mm256_srli_epi16::<4>(bits[pair]), four);
    }
    for column in 0..N {
        let entries = broadcast_row(columns[column](&nibbles.first));
        for pair in 0..PAIRS {
            found[column][pair] = _mm256_shuffle_epi8(entries, low[pair]);
        }
    }
    for row in &nibbles.longer {
        let before = broadcast_row(&row.before);
        for pair in 0..PAIRS {
            let goes_on = _mm256_cmpeq_epi8(low[pair], before);
            for column in 0..N {
                let entries = _mm256_shuffle_epi8(broadcast_row(columns[column](row)), high[pair]);
                found[column][pair] = _mm256_blendv_epi8(found[column][pair], entries, goes_on);
            }
        }
    }
    found
}

/// The bytes of a packed register as reservoirs lie: 32 bits for each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn by_lane(bytes: __m256i) -> [__m256i; PARTS] {
    let mut parts = [bytes; PARTS];
    for (part, bytes) in parts.iter_mut().enumerate() {
        // A byte and three zeros.
        let first = 0x8080_8000_u32 as i32 + 4 * part as i32;
        let each = _mm_add_epi32(_mm_set1_epi32(first), _mm_setr_epi32(0, 1, 2, 3));
        *bytes = _mm256_shuffle_epi8(*bytes, _mm256_broadcastsi128_si256(each));
    }
    parts
}

/// Eight words of 16 bits from a place on.
///
/// # Safety
///
/// `at` is followed by eight words.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_eight(at: *const u32) -> __m128i {
    let at = at.cast::<__m128i>();
    // SAFETY: by the caller.
    unsafe { _mm_packus_epi32(_mm_loadu_si128(at), _mm_loadu_si128(at.add(1))) }
}

impl BitReservoirs {
    /// Gives each lane that has too few bits the next word of its chunk.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn top_up(&mut self, words: &mut [ChunkWords<'_>; PAIR], table: &StreamTable) {
        // No batch needs more than a word.
        let need = _mm256_set1_epi8(table.batch_size().1 as i8);
        let short = _mm256_cmpgt_epi8(need, self.have);
        let all = _mm256_movemask_epi8(short) as u32;
        let places = by_lane(self.have);
        self.have = _mm256_add_epi8(self.have, _mm256_and_si256(short, _mm256_set1_epi8(16)));
        for (index, words) in words.iter_mut().enumerate() {
            let masks = [0, 16].map(|half| (all >> (half + 8 * index) & 0xFF) as usize);
            let counts = masks.map(|mask| mask.count_ones() as usize);
            // SAFETY: sixteen words follow the end (`ChunkWords::of_chunk`), a count is eight at
            // most, and there are as many rows of sixteen bytes as masks.
            let (low, high, order) = unsafe {
                let first = words.words.as_ptr().add(words.next.min(words.end));
                let order = masks.map(|mask| _mm_loadu_si128(HAND_OUT[mask].as_ptr().cast()));
                (load_eight(first), load_eight(first.add(counts[0])), order)
            };
            let fresh = _mm256_set_m128i(high, low);
            let fresh = _mm256_shuffle_epi8(fresh, _mm256_set_m128i(order[1], order[0]));
            let zero = _mm256_setzero_si256();
            let fresh = [_mm256_unpacklo_epi16(fresh, zero), _mm256_unpackhi_epi16(fresh, zero)];
            for (half, fresh) in fresh.into_iter().enumerate() {
                let part = 2 * index + half;
                let fresh = _mm256_sllv_epi32(fresh, places[part]);
                self.held[part] = _mm256_or_si256(self.held[part], fresh);
            }
            words.next += counts[0] + counts[1];
        }
    }

    /// The next eight bits of each lane.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn next_bits(&self) -> __m256i {
        let byte = _mm256_set1_epi32(0xFF);
        let mut bits = self.held;
        for bits in &mut bits {
            *bits = _mm256_and_si256(*bits, byte);
        }
        let [a, b, c, d] = bits;
        _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d))
    }

    /// Leaves out as many bits of each lane.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn skip_bits(&mut self, lengths: __m256i) {
        let by_lane = by_lane(lengths);
        for part in 0..PARTS {
            self.held[part] = _mm256_srlv_epi32(self.held[part], by_lane[part]);
        }
        self.have = _mm256_sub_epi8(self.have, lengths);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn next_bits_of_pairs(lanes: &[BitReservoirs; PAIRS]) -> [__m256i; PAIRS] {
    let [a, b] = lanes;
    [a.next_bits(), b.next_bits()]
}

/// The next symbol of each lane, as its table packs it.
#[inline]
#[target_feature(enable = "avx2")]
fn next_symbol(lanes: &mut [BitReservoirs; PAIRS], nibbles: &NibbleTables) -> [__m256i; PAIRS] {
    let [codes, lengths] =
        look_up(next_bits_of_pairs(lanes), nibbles, [|row| &row.codes, |row| &row.lengths]);
    for pair in 0..PAIRS {
        lanes[pair].skip_bits(lengths[pair]);
    }
    codes
}

/// As `next_symbol`, where length and code are one byte of the table.
#[inline]
#[target_feature(enable = "avx2")]
fn next_small_symbol(
    lanes: &mut [BitReservoirs; PAIRS],
    nibbles: &NibbleTables,
) -> [__m256i; PAIRS] {
    let [mut entries] = look_up(next_bits_of_pairs(lanes), nibbles, [|row| &row.small]);
    let code = _mm256_set1_epi8(31);
    for pair in 0..PAIRS {
        let under_eight = _mm256_and_si256(entries[pair], _mm256_set1_epi8(7));
        lanes[pair].skip_bits(_mm256_sub_epi8(_mm256_set1_epi8(8), under_eight));
        entries[pair] = _mm256_and_si256(_mm256_srli_epi16::<3>(entries[pair]), code);
    }
    entries
}

/// As `next_symbol`, with the low bits of the code, which follow it as they are.
#[inline]
#[target_feature(enable = "avx2")]
fn with_raw(
    lanes: &mut [BitReservoirs; PAIRS],
    nibbles: &NibbleTables,
    raw: u32,
) -> [__m256i; PAIRS] {
    let mut codes = next_symbol(lanes, nibbles);
    let (low, mask) = (next_bits_of_pairs(lanes), _mm256_set1_epi8(((1u32 << raw) - 1) as i8));
    for pair in 0..PAIRS {
        codes[pair] = _mm256_or_si256(codes[pair], _mm256_and_si256(low[pair], mask));
        lanes[pair].skip_bits(_mm256_set1_epi8(raw as i8));
    }
    codes
}

/// The symbols of a quad in each lane, as `$symbol` reads one; a top-up before each batch. No
/// function, and no loop over what is known: reservoirs stay in registers.
macro_rules! symbols {
    ($batch:expr, ($held:expr, $words:ident, $of:ident), |$lanes:ident| $symbol:expr) => {{
        let ((table, count), mut $lanes) = ($of, $held);
        let mut symbols = [[_mm256_setzero_si256(); PAIRS]; QUAD];
        for at in 0usize..QUAD {
            if at >= count {
                break;
            }
            if at.is_multiple_of($batch) {
                for pair in 0..PAIRS {
                    $lanes[pair].top_up(&mut $words[pair], table);
                }
            }
            symbols[at] = $symbol;
        }
        $held = $lanes;
        symbols
    }};
}

impl<'a, 'b> ChunkGroup<'a, 'b> {
    #[target_feature(enable = "avx2")]
    fn new(chunks: Vec<&'a mut HuffmanChunk<'b>>) -> Self {
        let tables = chunks[0].tables;
        let mut words = [[ChunkWords::of_no_chunk(); PAIR]; PAIRS];
        for (words, chunk) in words.iter_mut().flatten().zip(&chunks) {
            *words = ChunkWords::of_chunk(chunk.words);
        }
        let zero = _mm256_setzero_si256();
        Self {
            chunks,
            tables,
            words,
            lanes: [BitReservoirs { held: [zero; PARTS], have: zero }; PAIRS],
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn run_step(&mut self, step: &QuadStep) {
        let table = &self.tables[step.table];
        let symbols = match table.batch_size().0 {
            4 => self.read_symbols::<4>(table, step.count),
            2 => self.read_symbols::<2>(table, step.count),
            _ => self.read_symbols::<1>(table, step.count),
        };
        let [a, b, c, d] = symbols;
        for (pair, chunks) in self.chunks.chunks_mut(PAIR).enumerate() {
            let quads =
                unpack_symbols([a[pair], b[pair], c[pair], d[pair]], table.codes_per_symbol());
            let quads = by_chunk(quads);
            for (chunk, quads) in chunks.iter_mut().zip(quads) {
                let out = &mut chunk.out[step.out..][..STEP_BYTES];
                // SAFETY: 64 bytes.
                unsafe {
                    _mm256_storeu_si256(out.as_mut_ptr().cast(), quads[0]);
                    _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), quads[1]);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn read_symbols<const BATCH: usize>(
        &mut self,
        table: &StreamTable,
        codes: usize,
    ) -> [[__m256i; PAIRS]; QUAD] {
        let bytes = table.byte_tables().expect("the caller has looked");
        let (nibbles, group) = (&bytes.nibbles, table.codes_per_symbol());
        // One, two or four: a division would take as long as a symbol.
        let count = (codes + group - 1) >> group.trailing_zeros();
        let (words, of) = (&mut self.words, (table, count));
        match (bytes.small.is_some(), table.raw_bits()) {
            (true, 0) => {
                symbols!(BATCH, (self.lanes, words, of), |lanes| next_small_symbol(
                    &mut lanes, nibbles
                ))
            }
            (false, 0) => {
                symbols!(BATCH, (self.lanes, words, of), |lanes| next_symbol(&mut lanes, nibbles))
            }
            (_, raw) => {
                symbols!(BATCH, (self.lanes, words, of), |lanes| with_raw(&mut lanes, nibbles, raw))
            }
        }
    }
}

/// A code of each quad a register, out of symbols of one, two or four.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack_symbols(symbols: [__m256i; QUAD], group: usize) -> [__m256i; QUAD] {
    let four = _mm256_set1_epi8(0x0F);
    let two = _mm256_set1_epi8(3);
    let [a, b, ..] = symbols;
    let upper = |x| _mm256_and_si256(_mm256_srli_epi16::<4>(x), four);
    match group {
        1 => symbols,
        2 => [_mm256_and_si256(a, four), upper(a), _mm256_and_si256(b, four), upper(b)],
        _ => [a, _mm256_srli_epi16::<2>(a), _mm256_srli_epi16::<4>(a), _mm256_srli_epi16::<6>(a)]
            .map(|code| _mm256_and_si256(code, two)),
    }
}

/// From a register for each code of the quads to the quads of each chunk, its lanes in order.
#[inline]
#[target_feature(enable = "avx2")]
fn by_chunk(codes: [__m256i; QUAD]) -> [[__m256i; 2]; PAIR] {
    let [a, b, c, d] = codes;
    let of = |pairs: [__m256i; 2]| {
        let first = _mm256_unpacklo_epi16(pairs[0], pairs[1]);
        let second = _mm256_unpackhi_epi16(pairs[0], pairs[1]);
        let low = _mm256_permute2x128_si256::<0x20>(first, second);
        [low, _mm256_permute2x128_si256::<0x31>(first, second)]
    };
    [
        of([_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d)]),
        of([_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d)]),
    ]
}

/// Brings quads of values from `[positions, lanes]` to `[lanes, positions]`, eight positions at a
/// time, and says how many.
pub(super) fn transpose_quads(simd: Simd, quads: &[u8], per_row: usize, out: &mut [u8]) -> usize {
    assert_eq!(simd.vector_set(), InstructionSet::Avx2, "huffman: instruction set");
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { transpose_quads_avx2(quads, per_row, out) }
}

#[target_feature(enable = "avx2")]
fn transpose_quads_avx2(quads: &[u8], per_row: usize, out: &mut [u8]) -> usize {
    let (quads, out) = (quads.as_chunks::<32>().0, &mut out[..STREAMS * per_row * QUAD]);
    let whole = per_row / 8 * 8;
    for first in (0..whole).step_by(8) {
        for half in 0..2 {
            let block = &quads[2 * first..][..16];
            // SAFETY: 32 bytes.
            let rows =
                from_fn(|i| unsafe { _mm256_loadu_si256(block[2 * i + half].as_ptr().cast()) });
            for (lane, row) in transpose_words(rows).into_iter().enumerate() {
                let at = ((8 * half + lane) * per_row + first) * QUAD;
                // SAFETY: 32 bytes.
                unsafe { _mm256_storeu_si256(out[at..][..32].as_mut_ptr().cast(), row) };
            }
        }
    }
    whole
}

/// Eight rows of eight words of 32 bits, turned.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_words(rows: [__m256i; 8]) -> [__m256i; 8] {
    let (mut a, mut b) = (rows, rows);
    for i in 0..4 {
        a[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // b[4 i + j] holds columns j and j + 4 of rows 4 i to 4 i + 3.
    for i in 0..2 {
        for half in 0..2 {
            let (low, high) = (a[4 * i + half], a[4 * i + 2 + half]);
            b[4 * i + 2 * half] = _mm256_unpacklo_epi64(low, high);
            b[4 * i + 2 * half + 1] = _mm256_unpackhi_epi64(low, high);
        }
    }
    from_fn(|column| match column {
        0..4 => _mm256_permute2x128_si256::<0x20>(b[column], b[4 + column]),
        _ => _mm256_permute2x128_si256::<0x31>(b[column - 4], b[column]),
    })
}
