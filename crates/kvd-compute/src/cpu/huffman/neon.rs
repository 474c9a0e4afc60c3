//! Chunks of Huffman codes in NEON: the reservoirs of sixteen lanes are four registers, and one
//! register has a byte of each lane: how full it is, its next eight bits, and what `tbl` finds
//! for those, a code and its length.
//!
//! A top-up counts the lanes before each that are short as well, and looks up the word of that
//! number. Four registers of codes go to the quads of all lanes with one `st4`.
#![allow(unsafe_code)] // Register loads and stores through pointers into checked slices.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics of a part of the target")]

use crate::cpu::huffman::{HuffmanChunk, QUAD, QuadStep, STEP_BYTES, STREAMS};
use crate::cpu::simd_vector::neon_tables::{
    TABLE_128, TABLE_256, TableRegisters, load_tables, look_up,
};
use kvd_codec::StreamTable;
use std::arch::aarch64::*;

/// A chunk and its reservoirs: four lanes a register.
struct ChunkReservoirs<'a, 'b> {
    chunk: &'a mut HuffmanChunk<'b>,
    held: [uint32x4_t; 4],
    /// Bits in each lane's reservoir.
    filled: uint8x16_t,
}

/// Decodes whole chunks.
pub(super) fn decode_chunks(chunks: Vec<&mut HuffmanChunk<'_>>) {
    let chain = |chunk| {
        // SAFETY: NEON is part of the target.
        let (held, filled) = unsafe { ([vdupq_n_u32(0); 4], vdupq_n_u8(0)) };
        ChunkReservoirs { chunk, held, filled }
    };
    let mut chains: Vec<ChunkReservoirs<'_, '_>> = chunks.into_iter().map(chain).collect();
    // Two at a time: one works while the other waits for its look-ups.
    for pair in chains.chunks_mut(2) {
        let most = pair.iter().map(|chain| chain.chunk.steps.len()).max().unwrap_or(0);
        for step in 0..most {
            for chain in &mut *pair {
                if let Some(step) = chain.chunk.steps.get(step) {
                    // SAFETY: as above.
                    unsafe { chain.run_step(step) };
                }
            }
        }
    }
}

/// Puts byte `4 * index + lane` into the lowest byte of each lane, and zero above it.
#[inline(always)]
unsafe fn bytes_to_lanes(bytes: uint8x16_t, index: usize) -> uint32x4_t {
    // Beyond the table there are zeros.
    const FIRSTS: [u32; 4] = [0xFFFF_FF00, 0xFFFF_FF01, 0xFFFF_FF02, 0xFFFF_FF03];
    let lanes = vaddq_u32(vld1q_u32(FIRSTS.as_ptr()), vdupq_n_u32(4 * index as u32));
    vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(lanes)))
}

/// How many of the lanes up to each are marked with a one.
#[inline(always)]
unsafe fn running_count(ones: uint8x16_t) -> uint8x16_t {
    let zero = vdupq_n_u8(0);
    let sums = vaddq_u8(ones, vextq_u8::<15>(zero, ones));
    let sums = vaddq_u8(sums, vextq_u8::<14>(zero, sums));
    let sums = vaddq_u8(sums, vextq_u8::<12>(zero, sums));
    vaddq_u8(sums, vextq_u8::<8>(zero, sums))
}

impl ChunkReservoirs<'_, '_> {
    #[target_feature(enable = "neon")]
    fn run_step(&mut self, step: &QuadStep) {
        let table = &self.chunk.tables[step.table];
        let symbols = step.count.div_ceil(table.codes_per_symbol());
        // SAFETY: NEON is enabled.
        let [a, b, c, d] = unsafe {
            match (table.longest_symbol() > 7, table.raw_bits() > 0) {
                (false, false) => self.read_symbols::<TABLE_128, false>(table, symbols),
                (true, false) => self.read_symbols::<TABLE_256, false>(table, symbols),
                (false, true) => self.read_symbols::<TABLE_128, true>(table, symbols),
                (true, true) => self.read_symbols::<TABLE_256, true>(table, symbols),
            }
        };
        let quads = match table.codes_per_symbol() {
            1 => uint8x16x4_t(a, b, c, d),
            2 => {
                let low = |two| vandq_u8(two, vdupq_n_u8(0x0F));
                uint8x16x4_t(low(a), vshrq_n_u8::<4>(a), low(b), vshrq_n_u8::<4>(b))
            }
            _ => {
                let low = |four| vandq_u8(four, vdupq_n_u8(3));
                let (second, third) = (vshrq_n_u8::<2>(a), vshrq_n_u8::<4>(a));
                uint8x16x4_t(low(a), low(second), low(third), vshrq_n_u8::<6>(a))
            }
        };
        let out = &mut self.chunk.out[step.out..][..STEP_BYTES];
        // SAFETY: 64 bytes.
        unsafe { vst4q_u8(out.as_mut_ptr(), quads) };
    }

    /// `count` symbols of each lane; others are zero.
    #[inline(always)]
    unsafe fn read_symbols<const KIND: u8, const RAW: bool>(
        &mut self,
        table: &StreamTable,
        count: usize,
    ) -> [uint8x16_t; QUAD] {
        let bytes = table.byte_tables().expect("the caller has looked");
        let (codes, lengths) = (load_tables(&bytes.codes), load_tables(&bytes.lengths));
        let batch = table.batch_size().0;
        let mut symbols = [vdupq_n_u8(0); QUAD];
        for (index, symbol) in symbols.iter_mut().enumerate().take(count) {
            if index % batch == 0 {
                self.top_up(table);
            }
            *symbol = self.next_symbol::<KIND>(&codes, &lengths);
            if RAW {
                let raw = table.raw_bits() as i32;
                let low = vandq_u8(self.next_bits(), vdupq_n_u8(((1u32 << raw) - 1) as u8));
                *symbol = vorrq_u8(*symbol, low);
                self.filled = vsubq_u8(self.filled, vdupq_n_u8(raw as u8));
                self.held = self.held.map(|held| vshlq_u32(held, vdupq_n_s32(-raw)));
            }
        }
        symbols
    }

    /// The next eight bits of each lane.
    #[inline(always)]
    unsafe fn next_bits(&self) -> uint8x16_t {
        let [a, b, c, d] = self.held.map(|held| vreinterpretq_u16_u32(held));
        let (low, high) = (vuzp1q_u16(a, b), vuzp1q_u16(c, d));
        vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
    }

    /// The next symbol of each lane.
    #[inline(always)]
    unsafe fn next_symbol<const KIND: u8>(
        &mut self,
        codes: &[TableRegisters; 4],
        lengths: &[TableRegisters; 4],
    ) -> uint8x16_t {
        let bits = self.next_bits();
        let length = look_up::<KIND>(bits, lengths);
        self.filled = vsubq_u8(self.filled, length);
        // A shift is the signed lowest byte of its lane: to the left, so many bits less.
        let less = vreinterpretq_u8_s8(vnegq_s8(vreinterpretq_s8_u8(length)));
        for (index, held) in self.held.iter_mut().enumerate() {
            *held = vshlq_u32(*held, vreinterpretq_s32_u32(bytes_to_lanes(less, index)));
        }
        look_up::<KIND>(bits, codes)
    }

    /// Gives each lane that has too few bits the next word.
    #[inline(always)]
    unsafe fn top_up(&mut self, table: &StreamTable) {
        // No batch needs more than a word.
        let short = vcltq_u8(self.filled, vdupq_n_u8(table.batch_size().1 as u8));
        let ones = vandq_u8(short, vdupq_n_u8(1));
        let up_to = running_count(ones);
        let first = vshlq_n_u8::<2>(vsubq_u8(up_to, ones));
        let words = &self.chunk.words[self.chunk.next.min(self.chunk.word_count())..][..STREAMS];
        let words = vld1q_u8_x4(words.as_ptr().cast());
        let low = vandq_u8(short, vqtbl4q_u8(words, first));
        let high = vandq_u8(short, vqtbl4q_u8(words, vaddq_u8(first, vdupq_n_u8(1))));
        let words = [vzip1q_u8(low, high), vzip2q_u8(low, high)];
        let [a, b] = words.map(|words| vreinterpretq_u16_u8(words));
        let words = [
            vmovl_u16(vget_low_u16(a)),
            vmovl_high_u16(a),
            vmovl_u16(vget_low_u16(b)),
            vmovl_high_u16(b),
        ];
        for (index, (held, words)) in self.held.iter_mut().zip(words).enumerate() {
            let at = vreinterpretq_s32_u32(bytes_to_lanes(self.filled, index));
            *held = vorrq_u32(*held, vshlq_u32(words, at));
        }
        self.filled = vaddq_u8(self.filled, vandq_u8(short, vdupq_n_u8(16)));
        self.chunk.next += usize::from(vgetq_lane_u8::<15>(up_to));
    }
}

/// Brings quads of values from `[positions, lanes]` to `[lanes, positions]`.
pub(super) fn transpose_quads(quads: &[u8], per_row: usize, out: &mut [u8]) {
    let whole = per_row / QUAD * QUAD;
    for first in (0..whole).step_by(QUAD) {
        for lane in (0..STREAMS).step_by(QUAD) {
            let rows = &quads[first * STEP_BYTES + lane * QUAD..][..3 * STEP_BYTES + 16];
            let out = &mut out[(lane * per_row + first) * QUAD..][..3 * QUAD * per_row + 16];
            // SAFETY: NEON is part of the target; 16 bytes of four rows, and of four lanes.
            unsafe { transpose_four(rows, out, per_row * QUAD) };
        }
    }
    let (quads, out) = (quads.as_chunks::<QUAD>().0, out.as_chunks_mut::<QUAD>().0);
    for position in whole..per_row {
        for lane in 0..STREAMS {
            out[lane * per_row + position] = quads[position * STREAMS + lane];
        }
    }
}

/// Four quads of four positions.
///
/// # Safety
/// `out` has four lanes, `stride` bytes apart, and 16 bytes of the last.
#[target_feature(enable = "neon")]
unsafe fn transpose_four(quads: &[u8], out: &mut [u8], stride: usize) {
    let row = |index: usize| {
        // SAFETY: 16 bytes of a slice that is as long.
        vreinterpretq_u32_u8(unsafe { vld1q_u8(quads[index * STEP_BYTES..][..16].as_ptr()) })
    };
    let (even, odd) = (vzipq_u32(row(0), row(2)), vzipq_u32(row(1), row(3)));
    for (half, (even, odd)) in [(even.0, odd.0), (even.1, odd.1)].into_iter().enumerate() {
        let lanes = vzipq_u32(even, odd);
        for (lane, quads) in [lanes.0, lanes.1].into_iter().enumerate() {
            let out = out[(2 * half + lane) * stride..][..16].as_mut_ptr();
            // SAFETY: as above.
            unsafe { vst1q_u8(out, vreinterpretq_u8_u32(quads)) };
        }
    }
}
