//! `mod.rs` in NEON: `tbl` tables, and shifts either way that bring planes to their bits.
#![allow(unsafe_code)] // Register loads and stores through pointers into checked slices.

use crate::cpu::levels::{BitPlane, CHUNKS, LevelTable, PlanePart, RunCodes, code_at};
use crate::cpu::simd_vector::neon_tables::{
    TABLE_16, TABLE_64, TABLE_256, load_tables, look_up as look,
};
use std::arch::aarch64::*;

/// Codes of a register.
const STEP: usize = 16;

/// Writes the bytes of the codes of a tile to `out`, whose length the caller has checked.
pub(super) fn look_up(codes: RunCodes<'_>, table: &LevelTable, stride: usize, out: &mut [u8]) {
    // SAFETY: NEON is part of the target.
    unsafe {
        match codes.width {
            1 | 2 | 4 => look_up_chunks::<TABLE_16, 1>(codes, table, stride, out),
            3 => look_up_chunks::<TABLE_16, 2>(codes, table, stride, out),
            5 | 6 => look_up_chunks::<TABLE_64, 2>(codes, table, stride, out),
            7 => look_up_chunks::<TABLE_256, 3>(codes, table, stride, out),
            _ => look_up_chunks::<TABLE_256, 1>(codes, table, stride, out),
        }
    }
}

/// The bits of a code that a plane holds.
fn plane_mask(plane: &BitPlane<'_>) -> u8 {
    u8::MAX >> (8 - plane.width) << plane.low
}

/// How far the bits of a plane are to be moved up.
fn shift_up(plane: &BitPlane<'_>, part: &PlanePart<'_>) -> i8 {
    plane.low as i8 - part.shift as i8
}

/// Codes of `PARTS` planes.
#[target_feature(enable = "neon")]
fn look_up_chunks<const KIND: u8, const PARTS: usize>(
    codes: RunCodes<'_>,
    table: &LevelTable,
    stride: usize,
    out: &mut [u8],
) {
    // SAFETY: NEON is enabled.
    let tables = unsafe { load_tables(&table.bytes) };
    let (chunk, planes) = (codes.chunk_codes(), codes.tile_planes());
    let masks: [_; PARTS] = std::array::from_fn(|p| vdupq_n_u8(plane_mask(&planes[p])));
    for index in 0..CHUNKS {
        let parts: [_; PARTS] = std::array::from_fn(|p| planes[p].chunk_part(index, chunk));
        let ups: [_; PARTS] = std::array::from_fn(|p| vdupq_n_s8(shift_up(&planes[p], &parts[p])));
        let out = &mut out[index * stride..][..chunk];
        if chunk < STEP {
            for (at, out) in out.iter_mut().enumerate() {
                *out = table.bytes[usize::from(code_at(&planes, index, chunk, at))];
            }
            continue;
        }
        // The last ones twice, where they fill no register.
        for at in (0..chunk).step_by(STEP).map(|at| at.min(chunk - STEP)) {
            let mut codes = vdupq_n_u8(0);
            for p in 0..PARTS {
                // SAFETY: parts are as long as the chunk, of which 16 bytes begin at `at`.
                let bytes = unsafe { vld1q_u8(parts[p].bytes.as_ptr().add(at)) };
                codes = vorrq_u8(codes, vandq_u8(vshlq_u8(bytes, ups[p]), masks[p]));
            }
            // SAFETY: NEON is enabled; as above.
            unsafe { vst1q_u8(out.as_mut_ptr().add(at), look::<KIND>(codes, &tables)) };
        }
    }
}
