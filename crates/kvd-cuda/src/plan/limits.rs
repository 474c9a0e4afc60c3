//! Limits of GPUs that plans weigh.

use crate::SharedMemory;

/// Round trip of a memory access, seconds: what must be under way in the meantime hides it.
const LATENCY_SECONDS: f64 = 700e-9;

/// Limits of one GPU. Per multiprocessor unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuLimits {
    /// The vendor's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute: [u32; 2],
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory, bytes.
    pub shared_bytes: u32,
    /// Shared memory that one thread block may ask for, bytes.
    pub block_shared_bytes: u32,
    /// 32-bit registers.
    pub registers: u32,
    /// Resident threads.
    pub threads: u32,
    /// Resident thread blocks.
    pub blocks: u32,
    /// Bandwidth of the device's memory, GB/s, on paper; 0 where the driver does not say.
    pub memory_gbps: u32,
}

impl GpuLimits {
    /// A100 80 GB (Ampere).
    #[must_use]
    pub fn a100() -> Self {
        AMPERE.to_limits("A100 80GB", 2039)
    }

    /// RTX 4090 (Ada).
    #[must_use]
    pub fn rtx4090() -> Self {
        let rtx4090 = GpuDatasheet { multiprocessors: 128, ..ADA };
        rtx4090.to_limits("RTX 4090", 1008)
    }

    /// L40S (Ada).
    #[must_use]
    pub fn l40s() -> Self {
        ADA.to_limits("L40S", 864)
    }

    /// H100 SXM (Hopper).
    #[must_use]
    pub fn h100() -> Self {
        HOPPER.to_limits("H100 SXM", 3350)
    }

    /// H200 SXM (Hopper).
    #[must_use]
    pub fn h200() -> Self {
        HOPPER.to_limits("H200 SXM", 4800)
    }

    /// Its shared memory, and what must be on its way there.
    #[must_use]
    pub fn shared_memory(&self) -> SharedMemory {
        let (block, multiprocessor) = (self.block_shared_bytes, self.shared_bytes);
        SharedMemory {
            block: block as usize,
            multiprocessor: multiprocessor as usize,
            under_way: self.under_way_bytes() as usize,
        }
    }

    /// Bytes on their way to a multiprocessor that hide the latency of memory at the bandwidth on
    /// paper.
    pub(super) fn under_way_bytes(&self) -> f64 {
        self.memory_bandwidth() * LATENCY_SECONDS / f64::from(self.multiprocessors)
    }

    /// Bytes of memory per second, on paper.
    fn memory_bandwidth(&self) -> f64 {
        f64::from(self.memory_gbps) * 1e9
    }

    /// The GPUs above, by the name that `kvd plan --device` takes.
    #[must_use]
    pub fn find_limits(name: &str) -> Option<Self> {
        Some(match name {
            "a100" => Self::a100(),
            "rtx4090" => Self::rtx4090(),
            "l40s" => Self::l40s(),
            "h100" => Self::h100(),
            "h200" => Self::h200(),
            _ => return None,
        })
    }

    /// Names that [`GpuLimits::find_limits`] takes.
    pub const NAMES: [&'static str; 5] = ["a100", "rtx4090", "l40s", "h100", "h200"];
}

/// Figures of the datasheets of one generation of GPUs.
struct GpuDatasheet {
    compute: [u32; 2],
    multiprocessors: u32,
    /// Shared memory of a multiprocessor, and of a thread block at most.
    shared_kib: u32,
    block_shared_kib: u32,
    /// Resident threads and thread blocks.
    threads: u32,
    blocks: u32,
}

const AMPERE: GpuDatasheet = GpuDatasheet {
    compute: [8, 0],
    multiprocessors: 108,
    shared_kib: 164,
    block_shared_kib: 163,
    threads: 2048,
    blocks: 32,
};
const ADA: GpuDatasheet = GpuDatasheet {
    compute: [8, 9],
    multiprocessors: 142,
    shared_kib: 100,
    block_shared_kib: 99,
    threads: 1536,
    blocks: 24,
};
const HOPPER: GpuDatasheet = GpuDatasheet {
    compute: [9, 0],
    multiprocessors: 132,
    shared_kib: 228,
    block_shared_kib: 227,
    threads: 2048,
    blocks: 32,
};

impl GpuDatasheet {
    fn to_limits(&self, name: &str, memory_gbps: u32) -> GpuLimits {
        GpuLimits {
            name: name.to_owned(),
            compute: self.compute,
            multiprocessors: self.multiprocessors,
            shared_bytes: self.shared_kib << 10,
            block_shared_bytes: self.block_shared_kib << 10,
            registers: 65_536,
            threads: self.threads,
            blocks: self.blocks,
            memory_gbps,
        }
    }
}
