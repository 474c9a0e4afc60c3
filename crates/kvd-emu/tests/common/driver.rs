//! A [`Driver`] whose kernels run on the CPU, which counts what it gave, and fails on demand.

use kvd_compute::RegionHandle;
use kvd_cuda::{Driver, DriverError, KernelLaunch, Limits};
use kvd_emu::{Grid, Memory, Order, launch};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What fails, and how often what happened.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Allocations that were not given back.
    pub(crate) live: usize,
    /// Launches so far.
    pub(crate) launches: usize,
    /// Bytes copied to the host so far.
    pub(crate) read_bytes: usize,
    /// Calls after the first error that sticks.
    pub(crate) calls_after_failure: usize,
    pub(crate) fail: Fail,
    failed: bool,
}

/// Which call fails from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fail {
    #[default]
    Never,
    /// The next launch, and everything after it.
    Launch,
    /// The next copy to the device, and everything after it.
    Write,
    /// Every allocation.
    Memory,
}

pub(crate) struct EmuDriver {
    memory: BTreeMap<u64, Memory>,
    /// Memory of a worker that is open, and its bytes.
    shared: BTreeMap<u64, u64>,
    watch: Arc<Mutex<Watch>>,
    order: Order,
    limits: Limits,
}

impl EmuDriver {
    pub(crate) fn new(order: Order) -> (Self, Arc<Mutex<Watch>>) {
        let watch = Arc::new(Mutex::new(Watch::default()));
        let memory = BTreeMap::new();
        let (shared, limits) = (BTreeMap::new(), Limits::h100());
        (Self { memory, shared, watch: watch.clone(), order, limits }, watch)
    }

    /// Counts a call; an error when the device has failed, or fails here.
    fn call(&self, call: &'static str, fail: Option<Fail>) -> Result<(), DriverError> {
        let mut watch = self.watch.lock();
        let failed =
            DriverError::Failed { call, reason: "CUDA_ERROR_ILLEGAL_ADDRESS (700)".into() };
        if watch.failed {
            watch.calls_after_failure += 1;
            return Err(failed);
        }
        if Some(watch.fail) == fail {
            watch.failed = true;
            return Err(failed);
        }
        Ok(())
    }

    /// Tests that a range was given.
    fn check(&self, address: u64, len: u64) {
        let own = self.memory.range(..=address).next_back();
        let own = own.map(|(start, memory)| start + memory.bytes().len() as u64);
        let shared = self.shared.range(..=address).next_back();
        let shared = shared.map(|(start, bytes)| start + bytes);
        let end = [own, shared].into_iter().flatten().find(|end| address < *end);
        let end = end.expect("an address");
        assert!(address + len <= end, "{len} bytes at {address:#x} end after {end:#x}");
    }
}

impl Driver for EmuDriver {
    fn description(&self) -> String {
        "cuda emulation".to_owned()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn load(&mut self, _: &[u8]) -> Result<(), DriverError> {
        self.call("load", None)
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, DriverError> {
        if self.watch.lock().fail == Fail::Memory {
            return Err(DriverError::OutOfMemory(bytes));
        }
        let memory = Memory::new(bytes as usize);
        let address = memory.address();
        self.memory.insert(address, memory);
        self.watch.lock().live += 1;
        Ok(address)
    }

    fn free(&mut self, address: u64) {
        self.memory.remove(&address).expect("memory is given back once");
        self.watch.lock().live -= 1;
    }

    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.call("write", Some(Fail::Write))?;
        self.check(to, bytes.len() as u64);
        // SAFETY: the range was given and not taken back.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn read(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.call("read", None)?;
        self.watch.lock().read_bytes += bytes.len();
        self.check(from, bytes.len() as u64);
        // SAFETY: the range was given and not taken back.
        unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DriverError> {
        self.call("copy", None)?;
        self.check(from, bytes);
        self.check(to, bytes);
        // SAFETY: both ranges were given and not taken back.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
        Ok(())
    }

    fn launch(&mut self, launched: KernelLaunch<'_>) -> Result<(), DriverError> {
        self.call("launch", Some(Fail::Launch))?;
        self.watch.lock().launches += 1;
        let grid = Grid {
            kernel: launched.kernel,
            blocks: launched.blocks,
            shared_bytes: launched.shared_bytes as usize,
            order: self.order,
        };
        // SAFETY: the backend passes addresses of this driver's memory; sanitizers see overruns.
        unsafe { launch(grid, launched.parameters) }
            .map_err(|reason| DriverError::Failed { call: "launch", reason })
    }

    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError> {
        self.call("open_shared", None)?;
        let address = match handle {
            RegionHandle::CudaIpc(handle) => u64::from_le_bytes(*handle.first_chunk().expect("64")),
            _ => 0,
        };
        if address == 0 {
            let reason = "CUDA_ERROR_INVALID_VALUE (1)".to_owned();
            return Err(DriverError::Refused { call: "open_shared", reason });
        }
        self.shared.insert(address, bytes);
        self.watch.lock().live += 1;
        Ok(address)
    }

    fn close_shared(&mut self, address: u64) {
        self.shared.remove(&address).expect("memory is closed once");
        self.watch.lock().live -= 1;
    }
}
