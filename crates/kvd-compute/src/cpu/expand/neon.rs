//! `mod.rs` in NEON: a table of 256 bytes in half of the registers, sixteen codes at a time.
#![allow(unsafe_code)] // Register loads and stores through pointers into checked slices.

use crate::cpu::simd_vector::neon_tables::{TABLE_256, load_tables, look_up};
use std::arch::aarch64::*;

/// Codes of a step: groups are multiples of them.
pub(super) const STEP: usize = 16;

/// Writes a plane of bytes per table for each group of codes.
pub(super) fn expand_codes(codes: &[u8], group: usize, planes: &[[u8; 256]], out: &mut [u8]) {
    assert!(group.is_multiple_of(STEP) && codes.len().is_multiple_of(group), "expand: groups");
    assert_eq!(out.len(), codes.len() * planes.len(), "expand: lengths");
    for (plane, table) in planes.iter().enumerate() {
        let groups = codes.chunks_exact(group).zip(out.chunks_exact_mut(group * planes.len()));
        // SAFETY: NEON is part of the target.
        unsafe {
            expand_plane(groups.map(|(codes, out)| (codes, &mut out[plane * group..])), table)
        }
    }
}

#[target_feature(enable = "neon")]
fn expand_plane<'a>(groups: impl Iterator<Item = (&'a [u8], &'a mut [u8])>, table: &[u8; 256]) {
    // SAFETY: NEON is enabled.
    let tables = unsafe { load_tables(table) };
    for (codes, out) in groups {
        let out = out.as_chunks_mut::<STEP>().0;
        for (codes, out) in codes.as_chunks::<STEP>().0.iter().zip(out) {
            // SAFETY: as above; 16 bytes each.
            unsafe {
                let bytes = look_up::<TABLE_256>(vld1q_u8(codes.as_ptr()), &tables);
                vst1q_u8(out.as_mut_ptr(), bytes);
            }
        }
    }
}
