//! How many tiles have room in the shared memory of a thread block: one that it works on, and
//! others on their way. What is under way on a multiprocessor divided by a memory access' round
//! trip is the most that it reads, so there are as many as hide the latency, if they fit beside as
//! many thread blocks.

use crate::abi::BUFFERS_MAX;
use crate::huffman_tables::BlockRoom;
use crate::plan::SHARED_RESERVED;

/// Buffers that every thread block has.
pub(crate) const BUFFERS_MIN: usize = 2;
/// Bytes of a place and of a piece: `StopOf` of `tile_scheduler.cuh`.
const STOP_BYTES: usize = 32;
const PIECE_BYTES: usize = 16;

/// Shared memory for where the next tiles are, of sides of so many spans, and whether they hold
/// Huffman codes, which leave less room, of so many tiles together: `Stops` of
/// `tile_scheduler.cuh`.
pub(crate) fn tile_stop_bytes(spans: [usize; 2], huffman: bool, tiles: usize) -> usize {
    // Those of both sides, and gains.
    let pieces = spans[0] + spans[1] + 1;
    let batch = match pieces {
        _ if huffman => 4 / tiles,
        0..=8 => 16,
        _ => 8,
    };
    2 * batch * (STOP_BYTES + PIECE_BYTES * pieces)
}

/// A thread block that has [`BUFFERS_MIN`].
pub(crate) struct TileBuffers {
    /// Its shared memory, bytes.
    pub(crate) block: usize,
    /// Shared memory of one buffer more, bytes.
    pub(crate) buffer: usize,
    /// Bytes that are copied of a tile.
    pub(crate) tile: usize,
    /// Whether it reads Huffman codes, which come through rings of their own.
    pub(crate) huffman: bool,
}

impl TileBuffers {
    /// Buffers of a thread block.
    pub(crate) fn buffer_count(&self, room: BlockRoom) -> usize {
        let BlockRoom { shared, resident } = room;
        if self.huffman {
            return BUFFERS_MIN;
        }
        let reserved = SHARED_RESERVED as usize;
        let blocks = (shared.multiprocessor / (self.block + reserved)).clamp(1, resident);
        let each = (shared.multiprocessor / blocks).saturating_sub(reserved).min(shared.block);
        let more = each.saturating_sub(self.block) / self.buffer.max(1);
        let enough = |buffers: &usize| (buffers - 1) * self.tile * blocks >= shared.under_way;
        let wanted = (BUFFERS_MIN..=BUFFERS_MAX).find(enough).unwrap_or(BUFFERS_MAX);
        wanted.min(BUFFERS_MIN + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::huffman_tables::SharedMemory;

    const HOPPER: SharedMemory =
        SharedMemory { block: 227 << 10, multiprocessor: 228 << 10, under_way: 25 << 10 };

    fn buffers(block: usize, tile: usize, shared: SharedMemory) -> usize {
        TileBuffers { block, buffer: tile + 64, tile, huffman: false }
            .buffer_count(BlockRoom { shared, resident: 4 })
    }

    #[test]
    fn small_tiles_have_more_buffers_and_large_ones_no_more_than_they_need() {
        // Four thread blocks: 6.25 KiB of each.
        let of_tile = |tile| buffers(10 << 10, tile, HOPPER);
        assert_eq!([16 << 10, 6400, 6399, 3200, 3199, 100].map(of_tile), [2, 2, 3, 3, 4, 4]);
        let slow = SharedMemory { under_way: 5 << 10, ..HOPPER };
        assert_eq!(buffers(10 << 10, 2048, slow), 2);
    }

    #[test]
    fn they_take_what_is_left_and_no_thread_block_s_place() {
        // 228 KiB / 4, less 1 KiB of the system.
        let full = 56 << 10;
        let with_left = |left: usize| buffers(full - left, 2048, HOPPER);
        assert_eq!([0, 2111, 2112, 4223, 4224, 9000].map(with_left), [2, 2, 3, 3, 4, 4]);
        // One that is alone on its multiprocessor has what a thread block may take.
        assert_eq!(buffers(HOPPER.block, 2048, HOPPER), 2);
        let huffman = TileBuffers { block: 1 << 10, buffer: 1 << 10, tile: 1 << 10, huffman: true };
        assert_eq!(huffman.buffer_count(BlockRoom { shared: HOPPER, resident: 3 }), 2);
    }
}
