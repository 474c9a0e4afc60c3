//! K and V of a worker's memory on their way to raw slots: how thread blocks share the work, and
//! what host and kernels agree on, field by field (`kernels/include/kvd/region/{stage,rows}.cuh`).

use crate::abi::{RowsUnit, StageCheck, StageParameters, StageSide};
use kvd_compute::{PlannedWrite, RawTarget};
use kvd_core::{DType, Geometry, Side};

/// Bytes of one word that is hashed.
const WORD_BYTES: u64 = 8;
/// Words of a thread block at least: eight of each thread.
const BLOCK_WORDS: u64 = 8 * 128;
/// Thread blocks of a side at most: the host reads a check of each. Whether more would read faster
/// is not yet measured on a GPU.
const BLOCKS_MAX: u64 = 1024;

impl StageParameters {
    /// Dynamic shared memory of a thread block, bytes: a sum and a place of each thread.
    pub const SHARED_BYTES: u32 = 128 * (8 + 4);

    /// To copy so many bytes of each side; the addresses are the caller's to fill in.
    #[must_use]
    pub fn new(bytes: [u64; 2], dtype: DType) -> Self {
        let words = bytes.map(|bytes| bytes.div_ceil(WORD_BYTES));
        let most = words[0].max(words[1]);
        let each = most.div_ceil(BLOCKS_MAX).max(BLOCK_WORDS);
        let side = |side: Side| StageSide {
            from: 0,
            to: 0,
            bytes: bytes[side.index()],
            blocks: words[side.index()].div_ceil(each) as u32,
            align: WORD_BYTES as u32,
        };
        let sides = Side::BOTH.map(side);
        let dtype = crate::store::dtype_number(dtype);
        Self { sides, checks: 0, words: each, dtype, unused: 0 }
    }

    /// Says where a side is; `from` is aligned to a value.
    pub fn set_side(&mut self, side: Side, from: u64, to: u64) {
        // The largest power of two, up to a word.
        let align = 1 << from.trailing_zeros().min(WORD_BYTES.trailing_zeros());
        let side = &mut self.sides[side.index()];
        (side.from, side.to, side.align) = (from, to, align);
    }

    /// Thread blocks of both sides.
    #[must_use]
    pub fn thread_blocks(&self) -> u32 {
        self.sides[0].blocks + self.sides[1].blocks
    }

    /// Bytes of a side's copy.
    #[must_use]
    pub fn copy_bytes(&self, side: Side) -> u64 {
        self.sides[side.index()].bytes.next_multiple_of(WORD_BYTES)
    }

    /// The sum of all words, and of each side the first value that is not finite.
    #[must_use]
    pub fn read_checks(&self, checks: &[StageCheck]) -> (u64, [Option<u32>; 2]) {
        let sum = checks.iter().fold(0u64, |sum, check| sum.wrapping_add(check.sum));
        let (key, value) = checks.split_at(self.sides[0].blocks as usize);
        let first = |checks: &[StageCheck]| {
            let first = checks.iter().map(|check| check.first_bad).min();
            first.filter(|first| *first != u32::MAX)
        };
        (sum, [first(key), first(value)])
    }
}

impl RowsUnit {
    /// Units that an append of so many tokens takes at most: a block that was begun, whole blocks,
    /// and one that is begun.
    #[must_use]
    pub fn units_max(geometry: &Geometry, tokens: u32) -> u64 {
        let blocks = u64::from(tokens / geometry.block_tokens) + 2;
        2 * u64::from(geometry.kv_heads) * blocks.min(tokens.into())
    }

    /// The units of rows that lie, by side, at `from`; slots are in memory that begins at `arena`.
    #[must_use]
    pub fn from_writes(
        geometry: &Geometry,
        writes: &[PlannedWrite],
        from: [u64; 2],
        arena: u64,
    ) -> Vec<Self> {
        let heads = geometry.kv_heads;
        let mut units = Vec::with_capacity(writes.len() * 2 * heads as usize);
        for PlannedWrite { source_row, rows, to: RawTarget { extent, capacity_rows, first_row } } in
            writes
        {
            let layout = geometry.raw_layout(*capacity_rows);
            for side in Side::BOTH {
                let row_bytes = layout.row_bytes(side);
                let stride = row_bytes * u64::from(heads);
                units.extend((0..u64::from(heads)).map(|head| {
                    let at = layout.row_offset(side, head, u64::from(*first_row));
                    let skipped = u64::from(*source_row) * stride + head * row_bytes;
                    Self {
                        from: from[side.index()] + skipped,
                        to: arena + extent.offset + at,
                        rows: *rows,
                        row_bytes: row_bytes as u32,
                        stride: stride as u32,
                        unused: 0,
                    }
                }));
            }
        }
        units
    }

    /// Common divisor of all of their addresses, rows and strides: 16, or 4, since head sizes are
    /// even.
    #[must_use]
    pub fn common_alignment(units: &[Self]) -> u32 {
        let of = |unit: &Self| unit.from | unit.to | u64::from(unit.row_bytes | unit.stride);
        let all = units.iter().fold(0, |all, unit| all | of(unit));
        if all.is_multiple_of(16) { 16 } else { 4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{Extent, RopePairing};
    use std::mem::{offset_of, size_of};

    fn geometry(head_dim_k: u32) -> Geometry {
        Geometry {
            layers: 1,
            kv_heads: 2,
            head_dim_k,
            head_dim_v: 64,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        }
    }

    #[test]
    fn kernels_see_the_fields_where_they_are() {
        assert_eq!([size_of::<StageSide>(), size_of::<StageCheck>()], [32, 16]);
        assert_eq!([size_of::<StageParameters>(), size_of::<RowsUnit>()], [88, 32]);
        assert_eq!([offset_of!(StageParameters, checks), offset_of!(RowsUnit, stride)], [64, 24]);
    }

    #[test]
    fn thread_blocks_cover_all_words_and_are_bounded() {
        for bytes in [[2, 2], [8192, 8194], [1 << 20, 6], [(64 << 20) + 2, 32 << 20]] {
            let plan = StageParameters::new(bytes, DType::F16);
            for side in Side::BOTH {
                let blocks = u64::from(plan.sides[side.index()].blocks);
                let words = bytes[side.index()].div_ceil(8);
                assert!(blocks * plan.words >= words && (blocks - 1) * plan.words < words);
                assert!(blocks <= BLOCKS_MAX);
                assert_eq!(plan.copy_bytes(side), words * 8);
            }
        }
    }

    #[test]
    fn a_side_is_read_in_the_largest_words_that_its_address_allows() {
        let mut plan = StageParameters::new([64, 64], DType::F16);
        for (from, align) in [(0x1000, 8), (0x1004, 4), (0x100A, 2), (0x1010, 8)] {
            plan.set_side(Side::Value, from, 0x8000);
            assert_eq!(plan.sides[1].align, align, "{from:#x}");
        }
        assert_eq!(plan.sides[0].align, 8);
    }

    #[test]
    fn the_first_bad_value_of_each_side_is_that_of_the_first_block_that_has_one() {
        let plan = StageParameters::new([20_000, 20_000], DType::F32);
        let check = |sum, first_bad| StageCheck { sum, first_bad, unused: 0 };
        assert_eq!(plan.thread_blocks(), 6);
        let fine = u32::MAX;
        let checks = [
            check(u64::MAX, fine),
            check(1, 3000),
            check(2, 4500),
            check(3, fine),
            check(4, fine),
            check(5, fine),
        ];
        assert_eq!(plan.read_checks(&checks), (14, [Some(3000), None]));
    }

    #[test]
    fn rows_of_a_head_go_one_behind_the_other() {
        let geometry = geometry(96);
        let extent = |offset| Extent { offset, len: geometry.raw_layout(16).size_bytes() };
        let to =
            |offset, first_row| RawTarget { extent: extent(offset), capacity_rows: 16, first_row };
        let writes = [
            PlannedWrite { source_row: 0, rows: 3, to: to(4096, 13) },
            PlannedWrite { source_row: 3, rows: 16, to: to(20_480, 0) },
        ];
        let units = RowsUnit::from_writes(&geometry, &writes, [0x10_0000, 0x20_0000], 0x100);
        assert_eq!(units.len(), 8);
        assert!(units.len() as u64 <= RowsUnit::units_max(&geometry, 19));
        // V of the second head, second write.
        let layout = geometry.raw_layout(16);
        assert_eq!(
            units[7],
            RowsUnit {
                from: 0x20_0000 + 3 * 2 * 128 + 128,
                to: 0x100 + 20_480 + layout.row_offset(Side::Value, 1, 0),
                rows: 16,
                row_bytes: 128,
                stride: 256,
                unused: 0,
            }
        );
        assert_eq!(RowsUnit::common_alignment(&units), 16);
        let odd = RowsUnit { to: units[0].to + 4, ..units[0] };
        assert_eq!(RowsUnit::common_alignment(&[units[0], odd]), 4);
        assert_eq!(RowsUnit::units_max(&geometry, 1), 4);
    }
}
