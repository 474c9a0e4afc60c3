//! Tables of bytes in registers of NEON: `tbl` of 16 and of 64 entries, and of 256 in four steps.
#![allow(unsafe_code)] // Register loads.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics of a part of the target")]

use std::arch::aarch64::*;

/// A table of 16 bytes.
pub(in crate::cpu) const TABLE_16: u8 = 2;
/// A table of 64 bytes.
pub(in crate::cpu) const TABLE_64: u8 = 3;
/// A table of 128 bytes, of which codes have more bits.
pub(in crate::cpu) const TABLE_128: u8 = 5;
/// A table of 256 bytes.
pub(in crate::cpu) const TABLE_256: u8 = 4;

/// 64 bytes.
pub(in crate::cpu) type TableRegisters = uint8x16x4_t;

/// 64 bytes, each with the bits of `flipped` flipped.
#[inline(always)]
pub(in crate::cpu) unsafe fn load_table(bytes: &[u8; 64], flipped: u8) -> TableRegisters {
    let flip = |at: usize| veorq_u8(vld1q_u8(bytes[at..].as_ptr()), vdupq_n_u8(flipped));
    uint8x16x4_t(flip(0), flip(16), flip(32), flip(48))
}

/// All of a table as [`look_up`] takes it.
#[inline(always)]
pub(in crate::cpu) unsafe fn load_tables(bytes: &[u8; 256]) -> [TableRegisters; 4] {
    let (tables, _) = bytes.as_chunks::<64>();
    [
        load_table(&tables[0], 0),
        load_table(&tables[1], 0),
        load_table(&tables[2], 0),
        load_table(&tables[3], 0),
    ]
}

/// The bytes of 16 codes, of a table of that kind.
#[inline(always)]
pub(in crate::cpu) unsafe fn look_up<const KIND: u8>(
    codes: uint8x16_t,
    tables: &[TableRegisters; 4],
) -> uint8x16_t {
    if KIND == TABLE_16 {
        return vqtbl1q_u8(tables[0].0, codes);
    }
    let mut codes = if KIND == TABLE_128 { vandq_u8(codes, vdupq_n_u8(0x7F)) } else { codes };
    let mut bytes = vqtbl4q_u8(tables[0], codes);
    let count = match KIND {
        TABLE_64 => 1,
        TABLE_128 => 2,
        _ => 4,
    };
    for table in &tables[1..count] {
        // Codes below the table wrap around, and what lies beyond it stays as it is.
        codes = vsubq_u8(codes, vdupq_n_u8(64));
        bytes = vqtbx4q_u8(bytes, *table, codes);
    }
    bytes
}
