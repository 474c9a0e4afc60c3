//! `LaneCodes::decode` in AVX-512: a register holds the reservoirs of all sixteen lanes, a table
//! of 128 or 256 bytes lies in two or four registers, and the words that lanes take are handed out
//! by an expanding load.
//!
//! Chunks are whole (64 tokens), so every lane has every quad; words are copied to where sixteen
//! more can be read after the last.
#![allow(unsafe_code)] // Register loads and stores, and calls after detection.

use super::huffman::LaneTiles;
use super::scores::TILE;
use crate::BackendError;
use kvd_codec::{CHUNK_TOKENS, LaneCodes, LaneTable, PageError};
use kvd_core::Side;
use std::arch::x86_64::*;

/// Bytes of a register.
const REGISTER: usize = 64;
/// The lowest byte of each lane.
const LOWEST: u64 = 0x1111_1111_1111_1111;
/// Codes of a quad.
const QUAD: usize = 4;

/// One quad in each lane.
#[derive(Clone, Copy)]
struct Step {
    table: usize,
    /// Codes of a quad that count.
    count: usize,
    /// Where the register of quads goes.
    out: usize,
}

/// What a unit keeps from chunk to chunk.
#[derive(Default)]
pub(super) struct Scratch {
    steps: Vec<Step>,
    words: Vec<u8>,
    /// Quads of values, `[positions, lanes]`.
    quads: Vec<u8>,
}

/// One chunk on its way into tiles.
struct Chain<'a> {
    held: __m512i,
    filled: __m512i,
    /// Words, and as many zeros after them as a load may reach.
    words: &'a [u8],
    next: usize,
    end: usize,
    tables: &'a [LaneTable],
    steps: std::slice::Iter<'a, Step>,
    out: &'a mut [u8],
}

/// The steps of a whole chunk.
fn steps(tiles: &LaneTiles, side: Side) -> Vec<Step> {
    let mut steps = Vec::new();
    for (run, first) in &tiles.runs {
        let table = run.table;
        for at in 0..run.len {
            let position = first + at;
            if side == Side::Value {
                steps.push(Step { table, count: QUAD, out: position * REGISTER });
            } else if at % QUAD == 0 {
                let count = QUAD.min(run.len - at);
                for block in 0..CHUNK_TOKENS / 16 {
                    let (tile, half) = (block / 2, block % 2);
                    let out = tile * TILE * tiles.per_row + position * TILE + half * REGISTER;
                    steps.push(Step { table, count, out });
                }
            }
        }
    }
    steps
}

/// Decodes whole chunks, each into the tiles of its page.
pub(super) fn decode(
    chunks: Vec<(&mut &mut LaneTiles, &mut LaneCodes<'_>, usize)>,
) -> Result<(), BackendError> {
    let mut scratches = Vec::new();
    for (tiles, lanes, index) in &mut chunks.into_iter() {
        let mut scratch = std::mem::take(&mut tiles.scratch);
        if scratch.steps.is_empty() {
            scratch.steps = steps(tiles, lanes.side());
        }
        let words = lanes.chunk(index).words;
        scratch.words.clear();
        scratch.words.extend_from_slice(words);
        scratch.words.resize(words.len() + REGISTER / 2, 0);
        scratch.quads.resize(tiles.per_row.next_multiple_of(16) * REGISTER, 0);
        scratches.push((scratch, tiles, lanes, index));
    }
    let mut chains: Vec<Chain<'_>> = Vec::new();
    for (scratch, tiles, lanes, index) in &mut scratches {
        let size = CHUNK_TOKENS * tiles.per_row;
        let out = match lanes.side() {
            Side::Key => &mut tiles.bytes[*index * size..][..size],
            Side::Value => &mut scratch.quads[..],
        };
        // SAFETY: the caller has AVX-512.
        chains.push(unsafe {
            Chain {
                held: zero(),
                filled: zero(),
                words: &scratch.words,
                next: 0,
                end: scratch.words.len() - REGISTER / 2,
                tables: lanes.tables(),
                steps: scratch.steps.iter(),
                out,
            }
        });
    }
    // SAFETY: as above.
    unsafe { run(&mut chains) };
    let spent = chains.iter().all(|chain| chain.next == chain.end);
    for (scratch, tiles, lanes, index) in scratches {
        if lanes.side() == Side::Value {
            // SAFETY: as above.
            unsafe { turn(&scratch.quads, tiles, index) };
        }
        tiles.scratch = scratch;
    }
    if spent {
        return Ok(());
    }
    Err(PageError::Payload("a stream does not end where its length says").into())
}

#[target_feature(enable = "avx512f")]
fn zero() -> __m512i {
    _mm512_setzero_si512()
}

/// A step of each chain in turns, so that one works while the other waits for its look-up.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn run(chains: &mut [Chain<'_>]) {
    if let [a, b, c, d] = chains {
        while [&*a, &*b, &*c, &*d].iter().all(|chain| chain.steps.len() > 0) {
            step(a);
            step(b);
            step(c);
            step(d);
        }
    }
    // What is left of four is the longer side of two parts.
    let mut left: Vec<&mut Chain<'_>> =
        chains.iter_mut().filter(|chain| chain.steps.len() > 0).collect();
    if let [a, b] = &mut left[..] {
        while a.steps.len() > 0 && b.steps.len() > 0 {
            step(a);
            step(b);
        }
    }
    for chain in left {
        while chain.steps.len() > 0 {
            step(chain);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn step(chain: &mut Chain<'_>) {
    let Some(step) = chain.steps.next() else { return };
    let table = &chain.tables[step.table];
    let wide = table.longest() > 7;
    let quads = match (table.group(), wide, table.raw_bits() > 0) {
        (1, false, false) => singles::<false, false>(chain, table, step.count),
        (1, true, false) => singles::<true, false>(chain, table, step.count),
        (1, false, true) => singles::<false, true>(chain, table, step.count),
        (1, true, true) => singles::<true, true>(chain, table, step.count),
        (2, false, _) => pairs::<false>(chain, table, step.count),
        (2, true, _) => pairs::<true>(chain, table, step.count),
        (_, false, _) => fours::<false>(chain, table),
        (_, true, _) => fours::<true>(chain, table),
    };
    let out = &mut chain.out[step.out..][..REGISTER];
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), quads) };
}

/// A table of bytes: registers 2 and 3 only where indices have eight bits.
type Bytes = [__m512i; 4];

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; 256]) -> Bytes {
    // SAFETY: four times 64 bytes.
    std::array::from_fn(|i| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(64 * i).cast()) })
}

/// The bytes that the low bits of each byte name; only the lowest of each lane is of use.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look<const WIDE: bool>(index: __m512i, table: &Bytes) -> __m512i {
    let low = _mm512_permutex2var_epi8(table[0], index, table[1]);
    if !WIDE {
        return low;
    }
    let high = _mm512_permutex2var_epi8(table[2], index, table[3]);
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
}

/// Reservoirs in registers, for the length of a step.
struct Lanes {
    held: __m512i,
    filled: __m512i,
    codes: Bytes,
    lengths: Bytes,
    need: __m512i,
}

impl Lanes {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn of(chain: &Chain<'_>, table: &LaneTable) -> Self {
        let bytes = table.bytes().expect("the caller has looked");
        Self {
            held: chain.held,
            filled: chain.filled,
            codes: load(&bytes.codes),
            lengths: load(&bytes.lengths),
            need: _mm512_set1_epi32(table.batch().1 as i32),
        }
    }

    /// Gives each lane that has too few bits the next word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn top_up(&mut self, chain: &mut Chain<'_>) {
        let short = _mm512_cmplt_epu32_mask(self.filled, self.need);
        let words = &chain.words[chain.next..][..REGISTER / 2];
        // SAFETY: 32 bytes.
        let words = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
        let words = _mm512_maskz_expand_epi32(short, _mm512_cvtepu16_epi32(words));
        self.held = _mm512_or_si512(self.held, _mm512_sllv_epi32(words, self.filled));
        let more = _mm512_set1_epi32(16);
        self.filled = _mm512_mask_add_epi32(self.filled, short, self.filled, more);
        chain.next = (chain.next + 2 * short.count_ones() as usize).min(chain.end);
    }

    /// The next symbol of each lane, as its table packs it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn symbol<const WIDE: bool>(&mut self) -> __m512i {
        let codes = look::<WIDE>(self.held, &self.codes);
        let lengths = look::<WIDE>(self.held, &self.lengths);
        let lengths = _mm512_maskz_mov_epi8(LOWEST, lengths);
        self.held = _mm512_srlv_epi32(self.held, lengths);
        self.filled = _mm512_sub_epi32(self.filled, lengths);
        codes
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn back(self, chain: &mut Chain<'_>) {
        chain.held = self.held;
        chain.filled = self.filled;
    }
}

/// Quads of codes with a symbol each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn singles<const WIDE: bool, const RAW: bool>(
    chain: &mut Chain<'_>,
    table: &LaneTable,
    count: usize,
) -> __m512i {
    let mut lanes = Lanes::of(chain, table);
    let (batch, raw) = (table.batch().0, table.raw_bits());
    let mask = _mm512_set1_epi32((1 << raw) - 1);
    let shift = _mm_cvtsi32_si128(raw as i32);
    let mut quads = _mm512_setzero_si512();
    for at in 0..QUAD {
        let mut code = _mm512_setzero_si512();
        if at < count {
            if at % batch == 0 {
                lanes.top_up(chain);
            }
            code = lanes.symbol::<WIDE>();
            if RAW {
                code = _mm512_or_si512(code, _mm512_and_si512(lanes.held, mask));
                lanes.held = _mm512_srl_epi32(lanes.held, shift);
                lanes.filled = _mm512_sub_epi32(lanes.filled, _mm512_set1_epi32(raw as i32));
            }
        }
        quads = _mm512_shrdi_epi32::<8>(quads, code);
    }
    lanes.back(chain);
    quads
}

/// Quads of codes of which two share a symbol.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn pairs<const WIDE: bool>(chain: &mut Chain<'_>, table: &LaneTable, count: usize) -> __m512i {
    let mut lanes = Lanes::of(chain, table);
    let mut packed = _mm512_setzero_si512();
    for at in [0, 2] {
        let mut codes = _mm512_setzero_si512();
        if at < count {
            if at % (2 * table.batch().0) == 0 {
                lanes.top_up(chain);
            }
            codes = lanes.symbol::<WIDE>();
        }
        packed = _mm512_shrdi_epi32::<8>(packed, codes);
    }
    lanes.back(chain);
    // Four bits each from bit 16 of a lane on.
    let fields = _mm512_set1_epi64(0x3C38_3430_1C18_1410);
    let codes = _mm512_multishift_epi64_epi8(fields, packed);
    _mm512_and_si512(codes, _mm512_set1_epi8(0x0F))
}

/// Quads of codes that share a symbol.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn fours<const WIDE: bool>(chain: &mut Chain<'_>, table: &LaneTable) -> __m512i {
    let mut lanes = Lanes::of(chain, table);
    lanes.top_up(chain);
    let packed = lanes.symbol::<WIDE>();
    lanes.back(chain);
    // Two bits each from bit 0 of a lane on.
    let fields = _mm512_set1_epi64(0x2624_2220_0604_0200);
    let codes = _mm512_multishift_epi64_epi8(fields, packed);
    _mm512_and_si512(codes, _mm512_set1_epi8(3))
}

/// Brings quads from `[positions, lanes]` to `[lanes, positions]`: lane `l` holds tokens `4 l` and
/// the three after it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn turn(quads: &[u8], tiles: &mut LaneTiles, index: usize) {
    let (per_row, size) = (tiles.per_row, CHUNK_TOKENS * tiles.per_row);
    let out = &mut tiles.bytes[index * size..][..size];
    for first in (0..per_row).step_by(16) {
        let block = &quads[first * REGISTER..][..16 * REGISTER];
        // SAFETY: sixteen times 64 bytes.
        let rows: [__m512i; 16] = std::array::from_fn(|i| unsafe {
            _mm512_loadu_si512(block.as_ptr().add(i * REGISTER).cast())
        });
        let lanes = (per_row - first).min(16);
        let mask = u16::MAX >> (16 - lanes);
        for (lane, row) in transpose(rows).into_iter().enumerate() {
            let out = &mut out[(lane * per_row + first) * QUAD..][..lanes * QUAD];
            // SAFETY: the lanes of the mask are bytes of `out`.
            unsafe { _mm512_mask_storeu_epi32(out.as_mut_ptr().cast(), mask, row) };
        }
    }
}

/// Sixteen rows of sixteen words of 32 bits, turned.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
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
