//! How many thread blocks a multiprocessor holds, and how much memory they leave.

use super::GpuLimits;
use crate::abi::ATTEND_THREADS;

/// Registers are given to warps in pieces of this many.
const REGISTERS_STEP: u32 = 256;
/// Shared memory that the system takes of every block, bytes.
pub(crate) const SHARED_RESERVED: u32 = 1024;

/// Registers and shared memory of one thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockResources {
    /// Registers of a thread.
    pub registers: u32,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
}

/// Thread blocks that a multiprocessor holds, and the registers and bytes that each could take
/// besides at the same count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Thread blocks.
    pub blocks: u32,
    /// The resource that one block more would exceed.
    pub limit: &'static str,
    /// Shared memory that each block could take besides, bytes.
    pub shared_slack: u32,
    /// Registers that each thread could take besides.
    pub register_slack: u32,
}

impl BlockResources {
    /// How it fits a multiprocessor; `None` when it does not fit at all.
    #[must_use]
    pub fn fit_multiprocessor(self, limits: &GpuLimits) -> Option<Occupancy> {
        if self.shared_bytes > limits.block_shared_bytes {
            return None;
        }
        let warp_registers = (self.registers * 32).next_multiple_of(REGISTERS_STEP);
        let candidates = [
            (limits.threads / ATTEND_THREADS, "threads"),
            (limits.blocks, "thread blocks"),
            (limits.registers / (warp_registers * (ATTEND_THREADS / 32)), "registers"),
            (limits.shared_bytes / (self.shared_bytes + SHARED_RESERVED), "shared memory"),
        ];
        let (blocks, limit) = candidates.into_iter().min_by_key(|(count, _)| *count)?;
        if blocks == 0 {
            return None;
        }
        let shared = (limits.shared_bytes / blocks - SHARED_RESERVED)
            .min(limits.block_shared_bytes)
            .saturating_sub(self.shared_bytes);
        let registers = limits.registers / blocks / ATTEND_THREADS / 8 * 8;
        let register_slack = registers.min(255).saturating_sub(self.registers);
        Some(Occupancy { blocks, limit, shared_slack: shared, register_slack })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_resource_counts_the_blocks_and_the_others_have_slack() {
        // 128 registers × 128 threads: a quarter of 65536 each.
        let block = BlockResources { registers: 128, shared_bytes: 16 << 10 };
        let hopper = block.fit_multiprocessor(&GpuLimits::h100()).unwrap();
        assert_eq!((hopper.blocks, hopper.limit), (4, "registers"));
        // 228 KiB / 4, less 1 KiB of the system and the 16 KiB in use.
        assert_eq!(hopper.shared_slack, (57 - 1 - 16) << 10);
        assert_eq!(hopper.register_slack, 0);
        let ampere = block.fit_multiprocessor(&GpuLimits::a100()).unwrap();
        assert_eq!((ampere.blocks, ampere.shared_slack), (4, (41 - 1 - 16) << 10));
        let ada = block.fit_multiprocessor(&GpuLimits::rtx4090()).unwrap();
        assert_eq!((ada.blocks, ada.shared_slack), (4, (25 - 1 - 16) << 10));
    }

    #[test]
    fn shared_memory_and_threads_limit_too() {
        let block = BlockResources { registers: 40, shared_bytes: 60 << 10 };
        let occupancy = block.fit_multiprocessor(&GpuLimits::h100()).unwrap();
        assert_eq!((occupancy.blocks, occupancy.limit), (3, "shared memory"));
        let block = BlockResources { registers: 32, shared_bytes: 1 << 10 };
        let occupancy = block.fit_multiprocessor(&GpuLimits::rtx4090()).unwrap();
        assert_eq!((occupancy.blocks, occupancy.limit), (12, "threads"));
        assert_eq!(
            BlockResources { shared_bytes: 100 << 10, ..block }
                .fit_multiprocessor(&GpuLimits::l40s()),
            None
        );
    }
}
