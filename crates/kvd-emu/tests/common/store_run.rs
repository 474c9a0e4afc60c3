//! Launches of store kernels, as a device would run them one after another.

use kvd_cuda::{StoreLaunch, StoreParameters};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, launch_kernel};

/// Device memory that all launches of one plan read and write.
pub(crate) struct StoreRun<'a> {
    pub(crate) arena: &'a [u8],
    pub(crate) tables: &'a [u8],
    pub(crate) steps: &'a [u8],
    /// Bytes of the pages that they write.
    pub(crate) page_bytes: u64,
    /// Words that they need beside shared memory.
    pub(crate) words: u64,
    /// The page headers that units write, or counters.
    pub(crate) headers: &'a EmulatorMemory,
    /// Bytes of it that are a unit's own; 0 where they are all units'.
    pub(crate) header_bytes: usize,
}

impl StoreRun<'_> {
    /// Runs all launches; gives the pages.
    pub(crate) fn run(&self, launches: &[StoreLaunch], order: ThreadOrder) -> EmulatorMemory {
        let [arena, tables, steps] =
            [self.arena, self.tables, self.steps].map(EmulatorMemory::copy_from);
        let pages = EmulatorMemory::new(self.page_bytes as usize);
        let words = EmulatorMemory::new(4 * self.words as usize);
        let mut headers = self.headers.address();
        for launched in launches {
            let units = EmulatorMemory::copy_from(bytemuck::cast_slice(&launched.units));
            let parameters = StoreParameters {
                arena: arena.address(),
                tables: tables.address(),
                steps: steps.address(),
                units: units.address(),
                pages: pages.address(),
                headers,
                words: words.address(),
                row_bytes: launched.row_bytes,
                gain_bytes: launched.gain_bytes,
            };
            let (blocks, shared_bytes) = (launched.units.len(), launched.shared_bytes);
            let kernel = launched.kernel.as_str();
            let grid = LaunchGrid { kernel, blocks: blocks as u32, shared_bytes, order };
            // SAFETY: every address is of memory that lives on, of the size that the plan names.
            unsafe { launch_kernel(grid, bytemuck::bytes_of(&parameters)) }.unwrap();
            headers += (blocks * self.header_bytes) as u64;
        }
        pages
    }
}
