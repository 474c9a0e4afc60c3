//! Chunks of Huffman codes in AVX-512: four of them together, each with the reservoirs of its
//! sixteen lanes in a register.
//!
//! The bits of a lane end at bit 31 of its reservoir, and what moves is the place of the next one.
//! Places are bytes, those of the four chunks side by side in each lane, and so is all that comes
//! of them: the next eight bits (cut out of each reservoir by `vpmultishiftqb`), the codes and
//! lengths of four times sixteen symbols (looked up together in tables of two or four registers),
//! and who is short of bits. Words come in at the same place always, handed out by an expansion.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.

use crate::cpu::huffman::chunk_group::{ChunkWords, group_alike};
use crate::cpu::huffman::{HuffmanChunk, QUAD, QuadStep, STEP_BYTES};
use crate::cpu::simd::{InstructionSet, Simd};
use kvd_codec::StreamTable;
use std::arch::x86_64::*;
use std::array::from_fn;

/// Chunks whose places share a register.
const CHUNKS: usize = 4;
/// A place counts from bit 0 of the even lane of two.
const ODD: i64 = 0x2020_2020_0000_0000;

/// Up to four chunks of the same steps and tables.
struct ChunkGroup<'a, 'b> {
    chunks: Vec<&'a mut HuffmanChunk<'b>>,
    tables: &'b [StreamTable],
    steps: &'b [QuadStep],
    words: [ChunkWords<'b>; CHUNKS],
    lanes: BitReservoirs,
}

/// Reservoirs of four chunks: in registers for the length of a step, since what a mask stores
/// cannot be loaded again before it has left the store buffer.
#[derive(Clone, Copy)]
struct BitReservoirs {
    held: [__m512i; CHUNKS],
    /// Place of the next bit in the reservoirs of two lanes.
    at: __m512i,
}

/// Gives each lane that has too few bits the next word of its chunk. No function: a call would
/// take the reservoirs through memory.
macro_rules! top_up {
    ($lanes:ident, $words:expr, $table:expr) => {{
        // No batch needs more than a word.
        let most = _mm512_set1_epi8(32 - $table.batch_size().1 as i8);
        let most = _mm512_add_epi8(most, _mm512_set1_epi64(ODD));
        // Nothing where there are enough: a mask that comes of a register is there long before one
        // that goes through another's bits.
        let lack = _mm512_subs_epu8($lanes.at, most);
        let short = _mm512_test_epi8_mask(lack, lack);
        let word = _mm512_set1_epi8(16);
        $lanes.at = _mm512_mask_sub_epi8($lanes.at, short, $lanes.at, word);
        for index in 0..CHUNKS {
            let words = &mut $words[index];
            // SAFETY: sixteen words follow the end (`ChunkWords::of_chunk`).
            let some = unsafe { words.words.as_ptr().add(words.next.min(words.end)) };
            let mask = _mm512_test_epi32_mask(lack, _mm512_set1_epi32(0xFF << (8 * index)));
            // SAFETY: as above.
            let some = unsafe { _mm512_loadu_si512(some.cast()) };
            let some = _mm512_maskz_expand_epi32(mask, some);
            let held = $lanes.held[index];
            $lanes.held[index] = _mm512_mask_shrdi_epi32::<16>(held, mask, held, some);
            words.next += mask.count_ones() as usize;
        }
    }};
}

/// Decodes whole chunks.
pub(super) fn decode_chunks(simd: Simd, chunks: Vec<&mut HuffmanChunk<'_>>) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "huffman: instruction set");
    let [keys, values] = group_alike(chunks, CHUNKS);
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { decode_groups(keys, values) }
}

/// Two groups in turns, keys and values where there are both, so that one works while the other
/// waits for its look-ups.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
fn decode_groups<'a, 'b>(
    keys: Vec<Vec<&'a mut HuffmanChunk<'b>>>,
    values: Vec<Vec<&'a mut HuffmanChunk<'b>>>,
) {
    let (mut keys, mut values) = (keys.into_iter(), values.into_iter());
    loop {
        let mut groups: Vec<ChunkGroup<'_, '_>> = Vec::with_capacity(2);
        let first = keys.next().or_else(|| values.next());
        let second = values.next().or_else(|| keys.next());
        groups.extend(first.into_iter().chain(second).map(|chunks| ChunkGroup::new(chunks)));
        match &mut groups[..] {
            [] => return,
            [one] => one.run_steps(0),
            [a, b, ..] => {
                let both = a.steps.len().min(b.steps.len());
                for step in 0..both {
                    a.run_step(&a.steps[step]);
                    b.run_step(&b.steps[step]);
                }
                a.run_steps(both);
                b.run_steps(both);
            }
        }
        for group in groups {
            let words = group.words;
            group.chunks.into_iter().zip(words).for_each(|(chunk, words)| chunk.next = words.next);
        }
    }
}

/// A table of bytes: registers 2 and 3 only where indices have eight bits.
type ByteTable = [__m512i; 4];

#[inline]
#[target_feature(enable = "avx512f")]
fn load_table(bytes: &[u8; 256]) -> ByteTable {
    // SAFETY: four times 64 bytes.
    from_fn(|i| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(64 * i).cast()) })
}

/// Whether indices have eight bits.
fn is_wide(table: &StreamTable) -> bool {
    table.longest_symbol() > 7
}

/// The bytes that the low bits of each byte name.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up<const WIDE: bool>(index: __m512i, table: &ByteTable) -> __m512i {
    let low = _mm512_permutex2var_epi8(table[0], index, table[1]);
    if !WIDE {
        return low;
    }
    let high = _mm512_permutex2var_epi8(table[2], index, table[3]);
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
}

impl BitReservoirs {
    /// The next eight bits of each lane, a byte for each chunk.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn next_bits(&self) -> __m512i {
        let cut = self.held.map(|held| _mm512_multishift_epi64_epi8(self.at, held));
        // The first where the mask has ones, the second elsewhere.
        let [low, two] = [0xFF, 0xFFFF].map(|mask| _mm512_set1_epi32(mask));
        let other = _mm512_slli_epi32::<16>(low);
        let first = _mm512_ternarylogic_epi32::<0xCA>(low, cut[0], cut[1]);
        let last = _mm512_ternarylogic_epi32::<0xCA>(other, cut[2], cut[3]);
        _mm512_ternarylogic_epi32::<0xCA>(two, first, last)
    }

    /// The next symbol of each lane and chunk, as its table packs it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn next_symbol<const WIDE: bool>(&mut self, codes: &ByteTable, lengths: &ByteTable) -> __m512i {
        let bits = self.next_bits();
        self.at = _mm512_add_epi8(self.at, look_up::<WIDE>(bits, lengths));
        look_up::<WIDE>(bits, codes)
    }

    /// The low bits of a code, as they are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn next_raw_bits(&mut self, bits: u32) -> __m512i {
        let mask = _mm512_set1_epi8(((1u32 << bits) - 1) as i8);
        let low = _mm512_and_si512(self.next_bits(), mask);
        self.at = _mm512_add_epi8(self.at, _mm512_set1_epi8(bits as i8));
        low
    }

    /// As `next_symbol`, with length and code in one byte of a table.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn next_small_symbol<const WIDE: bool>(&mut self, table: &ByteTable) -> __m512i {
        // Ready before the entry is; with saturation, so that the compiler leaves it there.
        let most = _mm512_add_epi8(self.at, _mm512_set1_epi8(8));
        let entry = look_up::<WIDE>(self.next_bits(), table);
        self.at = _mm512_subs_epu8(most, _mm512_and_si512(entry, _mm512_set1_epi8(7)));
        _mm512_and_si512(_mm512_srli_epi16::<3>(entry), _mm512_set1_epi8(31))
    }
}

/// Some symbols of each lane and chunk, as `$symbol` reads one; a top-up before each batch. No
/// function, for what `top_up` says.
macro_rules! symbols {
    (
        $quad:expr, $batch:expr, ($held:expr, $words:ident, $of:ident), |$lanes:ident| $symbol:expr
    ) => {{
        let ((table, count), mut $lanes) = ($of, $held);
        let mut symbols = [_mm512_setzero_si512(); $quad];
        for at in 0usize..$quad {
            if at >= count {
                break;
            }
            if at.is_multiple_of($batch) {
                top_up!($lanes, $words, table);
            }
            symbols[at] = $symbol;
        }
        $held = $lanes;
        symbols
    }};
}

impl<'a, 'b> ChunkGroup<'a, 'b> {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(chunks: Vec<&'a mut HuffmanChunk<'b>>) -> Self {
        let (tables, steps) = (chunks[0].tables, chunks[0].steps);
        let mut words = [ChunkWords::of_no_chunk(); CHUNKS];
        for (words, chunk) in words.iter_mut().zip(&chunks) {
            *words = ChunkWords::of_chunk(chunk.words);
        }
        let empty = _mm512_add_epi8(_mm512_set1_epi8(32), _mm512_set1_epi64(ODD));
        let lanes = BitReservoirs { held: [_mm512_setzero_si512(); CHUNKS], at: empty };
        Self { chunks, tables, steps, words, lanes }
    }

    /// The steps from `first` on.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    fn run_steps(&mut self, first: usize) {
        for step in &self.steps[first..] {
            self.run_step(step);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    fn run_step(&mut self, step: &QuadStep) {
        let table = &self.tables[step.table];
        let quads = match (table.codes_per_symbol(), table.batch_size().0) {
            (1, 4) => self.read_singles::<4>(table, step.count),
            (1, 2) => self.read_singles::<2>(table, step.count),
            (1, _) => self.read_singles::<1>(table, step.count),
            (2, 2) => self.read_pairs::<2>(table, step.count),
            (2, _) => self.read_pairs::<1>(table, step.count),
            _ => self.read_fours(table),
        };
        for (chunk, quads) in self.chunks.iter_mut().zip(quads) {
            let out = &mut chunk.out[step.out..][..STEP_BYTES];
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), quads) };
        }
    }

    /// Quads of codes with a symbol each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    fn read_singles<const BATCH: usize>(
        &mut self,
        table: &StreamTable,
        count: usize,
    ) -> [__m512i; CHUNKS] {
        let bytes = table.byte_tables().expect("the caller has looked");
        let (words, of) = (&mut self.words, (table, count));
        let symbols = match (is_wide(table), table.raw_bits(), &bytes.small) {
            (false, 0, Some(small)) => {
                let small = load_table(small);
                symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| lanes
                    .next_small_symbol::<false>(&small))
            }
            (true, 0, Some(small)) => {
                let small = load_table(small);
                symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| lanes
                    .next_small_symbol::<true>(&small))
            }
            (wide, raw, _) => {
                let (codes, lengths) = (load_table(&bytes.codes), load_table(&bytes.lengths));
                match (wide, raw) {
                    (false, 0) => {
                        symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| lanes
                            .next_symbol::<false>(&codes, &lengths))
                    }
                    (true, 0) => symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| lanes
                        .next_symbol::<true>(&codes, &lengths)),
                    (false, raw) => symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| {
                        let symbol = lanes.next_symbol::<false>(&codes, &lengths);
                        _mm512_or_si512(symbol, lanes.next_raw_bits(raw))
                    }),
                    (true, raw) => symbols!(QUAD, BATCH, (self.lanes, words, of), |lanes| {
                        let symbol = lanes.next_symbol::<true>(&codes, &lengths);
                        _mm512_or_si512(symbol, lanes.next_raw_bits(raw))
                    }),
                }
            }
        };
        by_chunk(symbols)
    }

    /// Quads of codes of which two share a symbol.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    fn read_pairs<const BATCH: usize>(
        &mut self,
        table: &StreamTable,
        count: usize,
    ) -> [__m512i; CHUNKS] {
        let bytes = table.byte_tables().expect("the caller has looked");
        let (codes, lengths) = (load_table(&bytes.codes), load_table(&bytes.lengths));
        let (words, of) = (&mut self.words, (table, count.div_ceil(2)));
        let symbols = if is_wide(table) {
            symbols!(2, BATCH, (self.lanes, words, of), |lanes| lanes
                .next_symbol::<true>(&codes, &lengths))
        } else {
            symbols!(2, BATCH, (self.lanes, words, of), |lanes| lanes
                .next_symbol::<false>(&codes, &lengths))
        };
        let [even, odd] = merge_bytes(symbols[0], symbols[1]);
        // Four codes of four bits each, from bit 0 or 16 of a lane on.
        let low = _mm512_set1_epi64(0x2C28_2420_0C08_0400);
        let high = _mm512_set1_epi64(0x3C38_3430_1C18_1410);
        let mut quads = [even, odd, even, odd];
        for (quads, fields) in quads.iter_mut().zip([low, low, high, high]) {
            let codes = _mm512_multishift_epi64_epi8(fields, *quads);
            *quads = _mm512_and_si512(codes, _mm512_set1_epi8(0x0F));
        }
        quads
    }

    /// Quads of codes that share a symbol.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    fn read_fours(&mut self, table: &StreamTable) -> [__m512i; CHUNKS] {
        let bytes = table.byte_tables().expect("the caller has looked");
        let (codes, lengths) = (load_table(&bytes.codes), load_table(&bytes.lengths));
        let (words, of) = (&mut self.words, (table, 1));
        let [packed] = if is_wide(table) {
            symbols!(1, 1, (self.lanes, words, of), |lanes| lanes
                .next_symbol::<true>(&codes, &lengths))
        } else {
            symbols!(1, 1, (self.lanes, words, of), |lanes| lanes
                .next_symbol::<false>(&codes, &lengths))
        };
        // Four codes of two bits each, from bit 0, 8, 16 or 24 of a lane on.
        let mut quads = [packed; CHUNKS];
        for (quads, bit) in quads.iter_mut().zip([0, 8, 16, 24]) {
            let fields = _mm512_set1_epi64(0x2624_2220_0604_0200 + 0x0101_0101_0101_0101 * bit);
            let codes = _mm512_multishift_epi64_epi8(fields, *quads);
            *quads = _mm512_and_si512(codes, _mm512_set1_epi8(3));
        }
        quads
    }
}

/// Bytes 0 and 2 of each lane of both registers side by side, and bytes 1 and 3.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn merge_bytes(a: __m512i, b: __m512i) -> [__m512i; 2] {
    let even = _mm512_mask_blend_epi8(2 * 0x5555_5555_5555_5555, a, _mm512_slli_epi16::<8>(b));
    let odd = _mm512_mask_blend_epi8(2 * 0x5555_5555_5555_5555, _mm512_srli_epi16::<8>(a), b);
    [even, odd]
}

/// From a register for each code of the quads to one for each chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn by_chunk(codes: [__m512i; QUAD]) -> [__m512i; CHUNKS] {
    let [a, b] = [merge_bytes(codes[0], codes[1]), merge_bytes(codes[2], codes[3])];
    let low = |i: usize| _mm512_mask_blend_epi16(0xAAAA_AAAA, a[i], _mm512_slli_epi32::<16>(b[i]));
    let high = |i: usize| _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(a[i]), b[i]);
    [low(0), low(1), high(0), high(1)]
}

/// Brings quads of values from `[positions, lanes]` to `[lanes, positions]`.
pub(super) fn transpose_quads(simd: Simd, quads: &[u8], per_row: usize, out: &mut [u8]) {
    assert_eq!(simd.vector_set(), InstructionSet::Avx512, "huffman: instruction set");
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { transpose_quads_avx512(quads, per_row, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn transpose_quads_avx512(quads: &[u8], per_row: usize, out: &mut [u8]) {
    for first in (0..per_row).step_by(16) {
        let block = &quads[first * STEP_BYTES..][..16 * STEP_BYTES];
        // SAFETY: sixteen times 64 bytes.
        let rows: [__m512i; 16] =
            from_fn(|i| unsafe { _mm512_loadu_si512(block.as_ptr().add(i * STEP_BYTES).cast()) });
        let lanes = (per_row - first).min(16);
        let mask = u16::MAX >> (16 - lanes);
        for (lane, row) in transpose_words(rows).into_iter().enumerate() {
            let out = &mut out[(lane * per_row + first) * QUAD..][..lanes * QUAD];
            // SAFETY: the lanes of the mask are bytes of `out`.
            unsafe { _mm512_mask_storeu_epi32(out.as_mut_ptr().cast(), mask, row) };
        }
    }
}

/// Sixteen rows of sixteen words of 32 bits, turned.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_words(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = rows;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    let mut b = a;
    for i in 0..4 {
        for half in 0..2 {
            let (low, high) = (a[4 * i + half], a[4 * i + 2 + half]);
            b[4 * i + 2 * half] = _mm512_unpacklo_epi64(low, high);
            b[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(low, high);
        }
    }
    // Now b[4 i + j] holds columns j, j + 4, j + 8, j + 12 of rows 4 i to 4 i + 3.
    let mut out = b;
    for j in 0..4 {
        let [p, q, r, s] = [b[j], b[4 + j], b[8 + j], b[12 + j]];
        let pq_even = _mm512_shuffle_i32x4::<0x88>(p, q);
        let pq_odd = _mm512_shuffle_i32x4::<0xDD>(p, q);
        let rs_even = _mm512_shuffle_i32x4::<0x88>(r, s);
        let rs_odd = _mm512_shuffle_i32x4::<0xDD>(r, s);
        out[j] = _mm512_shuffle_i32x4::<0x88>(pq_even, rs_even);
        out[j + 8] = _mm512_shuffle_i32x4::<0xDD>(pq_even, rs_even);
        out[j + 4] = _mm512_shuffle_i32x4::<0x88>(pq_odd, rs_odd);
        out[j + 12] = _mm512_shuffle_i32x4::<0xDD>(pq_odd, rs_odd);
    }
    out
}
