//! Chunks of Huffman codes in AVX2: the reservoirs of sixteen lanes are two registers, a symbol is
//! one gathered load of its code and length, and words are handed out by a permutation of eight.
//!
//! The bits of a lane end at bit 31 of its reservoir, and what moves is the place of the next one:
//! a word then always comes in at the same place.
#![allow(unsafe_code)] // Register loads and stores, gathers, and calls after detection.

use super::huffman::{Chunk, LANES, QUAD, STEP_BYTES, Step};
use super::simd::{InstructionSet, Simd};
use kvd_codec::LaneTable;
use std::arch::x86_64::*;

/// By the lanes that are short, which of the next words each lane takes.
static HAND_OUT: [[u8; 8]; 256] = hand_out();

const fn hand_out() -> [[u8; 8]; 256] {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut next) = (0, 0);
        while lane < 8 {
            table[mask][lane] = next;
            next += (mask >> lane & 1) as u8;
            lane += 1;
        }
        mask += 1;
    }
    table
}

/// A chunk and its reservoirs: eight lanes a register.
struct Chain<'a, 'b> {
    chunk: &'a mut Chunk<'b>,
    held: [__m256i; 2],
    /// Place of the next bit; 32 in an empty reservoir.
    at: [__m256i; 2],
}

/// Decodes whole chunks.
pub(super) fn decode(simd: Simd, chunks: Vec<&mut Chunk<'_>>) {
    assert_eq!(simd.set(), InstructionSet::Avx2, "huffman: instruction set");
    // SAFETY: a `Simd` of this set exists only where the CPU has it.
    unsafe { decode_avx2(chunks) }
}

#[target_feature(enable = "avx2,popcnt")]
fn decode_avx2(chunks: Vec<&mut Chunk<'_>>) {
    let mut chains: Vec<Chain<'_, '_>> = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let (held, at) = ([_mm256_setzero_si256(); 2], [_mm256_set1_epi32(32); 2]);
        chains.push(Chain { chunk, held, at });
    }
    // Two at a time: one works while the other waits for its loads.
    for pair in chains.chunks_mut(2) {
        let most = pair.iter().map(|chain| chain.chunk.steps.len()).max().unwrap_or(0);
        for step in 0..most {
            for chain in &mut *pair {
                if let Some(step) = chain.chunk.steps.get(step) {
                    chain.step(step);
                }
            }
        }
    }
}

impl Chain<'_, '_> {
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn step(&mut self, step: &Step) {
        let table = &self.chunk.tables[step.table];
        let (batch, group) = (table.batch().0, table.group());
        let symbols = step.count.div_ceil(group);
        let mut packed = match (table.raw_bits() > 0, batch, symbols) {
            (false, 4, 4) => self.symbols::<4, 4, false>(table),
            (false, 2, 4) => self.symbols::<2, 4, false>(table),
            (false, 2, 2) => self.symbols::<2, 2, false>(table),
            (false, 1, 2) => self.symbols::<1, 2, false>(table),
            (false, _, 1) => self.symbols::<1, 1, false>(table),
            _ => self.some(table, symbols),
        };
        for quads in &mut packed {
            *quads = spread(*quads, group);
        }
        let out = &mut self.chunk.out[step.out..][..STEP_BYTES];
        // SAFETY: 64 bytes.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), packed[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), packed[1]);
        }
    }

    /// `COUNT` symbols of each lane, eight bits each, the first lowest; a top-up serves `BATCH`.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn symbols<const BATCH: usize, const COUNT: usize, const RAW: bool>(
        &mut self,
        table: &LaneTable,
    ) -> [__m256i; 2] {
        let mut packed = [_mm256_setzero_si256(); 2];
        for index in 0..COUNT {
            if index % BATCH == 0 {
                self.top_up(table);
            }
            for (half, packed) in packed.iter_mut().enumerate() {
                *packed = self.symbol::<RAW>(table, half, *packed);
            }
        }
        align(packed, COUNT)
    }

    /// As `symbols`, of any batch and count.
    #[target_feature(enable = "avx2,popcnt")]
    fn some(&mut self, table: &LaneTable, count: usize) -> [__m256i; 2] {
        let mut packed = [_mm256_setzero_si256(); 2];
        for index in 0..count {
            if index % table.batch().0 == 0 {
                self.top_up(table);
            }
            for (half, packed) in packed.iter_mut().enumerate() {
                *packed = match table.raw_bits() {
                    0 => self.symbol::<false>(table, half, *packed),
                    _ => self.symbol::<true>(table, half, *packed),
                };
            }
        }
        align(packed, count)
    }

    /// Gives each lane that has too few bits the next word.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn top_up(&mut self, table: &LaneTable) {
        // No batch needs more than a word.
        let most = _mm256_set1_epi32(32 - table.batch().1 as i32);
        let end = self.chunk.end();
        for half in 0..2 {
            let short = _mm256_cmpgt_epi32(self.at[half], most);
            let mask = _mm256_movemask_ps(_mm256_castsi256_ps(short)) as usize;
            let words = &self.chunk.words[self.chunk.next.min(end)..][..LANES / 2];
            // SAFETY: eight words, and eight bytes of a table of as many rows as masks.
            let (words, order) = unsafe {
                let order = _mm_loadl_epi64(HAND_OUT[mask].as_ptr().cast());
                (_mm256_loadu_si256(words.as_ptr().cast()), _mm256_cvtepu8_epi32(order))
            };
            let words = _mm256_permutevar8x32_epi32(words, order);
            let fresh = _mm256_blend_epi16::<0xAA>(
                _mm256_srli_epi32::<16>(self.held[half]),
                _mm256_slli_epi32::<16>(words),
            );
            self.held[half] = _mm256_blendv_epi8(self.held[half], fresh, short);
            let word = _mm256_and_si256(short, _mm256_set1_epi32(16));
            self.at[half] = _mm256_sub_epi32(self.at[half], word);
            self.chunk.next += mask.count_ones() as usize;
        }
    }

    /// Shifts the next symbol of eight lanes into `packed`, from above.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn symbol<const RAW: bool>(
        &mut self,
        table: &LaneTable,
        half: usize,
        packed: __m256i,
    ) -> __m256i {
        let entries = &table.bytes().expect("the caller has looked").entries;
        let byte = _mm256_set1_epi32(0xFF);
        let next = _mm256_and_si256(_mm256_srlv_epi32(self.held[half], self.at[half]), byte);
        // SAFETY: indices are below 256.
        let entry = unsafe { _mm256_i32gather_epi32::<4>(entries.as_ptr().cast(), next) };
        self.at[half] = _mm256_add_epi32(self.at[half], _mm256_and_si256(entry, byte));
        let mut code = _mm256_andnot_si256(_mm256_set1_epi32(0xFF_FFFF), entry);
        if RAW {
            let raw = table.raw_bits() as i32;
            let low = _mm256_srlv_epi32(self.held[half], self.at[half]);
            let low = _mm256_and_si256(low, _mm256_set1_epi32((1 << raw) - 1));
            code = _mm256_or_si256(code, _mm256_slli_epi32::<24>(low));
            self.at[half] = _mm256_add_epi32(self.at[half], _mm256_set1_epi32(raw));
        }
        _mm256_or_si256(_mm256_srli_epi32::<8>(packed), code)
    }
}

/// Brings `count` symbols of eight bits from the upper end of each lane to the lower one.
#[inline]
#[target_feature(enable = "avx2")]
fn align(packed: [__m256i; 2], count: usize) -> [__m256i; 2] {
    let shift = _mm_cvtsi32_si128(8 * (QUAD - count) as i32);
    [_mm256_srl_epi32(packed[0], shift), _mm256_srl_epi32(packed[1], shift)]
}

/// One code a byte.
#[inline]
#[target_feature(enable = "avx2")]
fn spread(packed: __m256i, group: usize) -> __m256i {
    let both = |x: __m256i, shifted: __m256i, mask: i32| {
        _mm256_and_si256(_mm256_or_si256(x, shifted), _mm256_set1_epi32(mask))
    };
    match group {
        1 => packed,
        2 => {
            let bytes = both(packed, _mm256_slli_epi32::<8>(packed), 0x00FF_00FF);
            both(bytes, _mm256_slli_epi32::<4>(bytes), 0x0F0F_0F0F)
        }
        _ => {
            let halves = both(packed, _mm256_slli_epi32::<12>(packed), 0x000F_000F);
            both(halves, _mm256_slli_epi32::<6>(halves), 0x0303_0303)
        }
    }
}
