//! A driver, the memory taken from it, and whether it still works.

use super::error;
use crate::driver::{Driver, DriverError, KernelLaunch};
use crate::plan::Limits;
use kvd_compute::{BackendError, RegionHandle};
use kvd_core::ErrorCode;

/// What a device address is aligned to.
const ALIGN: u64 = 256;

/// The device of a backend: an arena, scratch memory, and the first error that stuck.
pub(super) struct Device {
    driver: Box<dyn Driver>,
    arena: u64,
    arena_bytes: u64,
    scratch: u64,
    scratch_bytes: u64,
    scratch_used: u64,
    failure: Option<String>,
}

impl Device {
    pub(super) fn open(
        mut driver: Box<dyn Driver>,
        arena_bytes: u64,
        scratch_bytes: u64,
    ) -> Result<Self, DriverError> {
        let arena = driver.alloc(arena_bytes)?;
        let scratch = match driver.alloc(scratch_bytes) {
            Ok(scratch) => scratch,
            Err(error) => {
                driver.free(arena);
                return Err(error);
            }
        };
        let (scratch_used, failure) = (0, None);
        Ok(Self { driver, arena, arena_bytes, scratch, scratch_bytes, scratch_used, failure })
    }

    pub(super) fn load(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.driver.load(image)
    }

    pub(super) fn description(&self) -> String {
        self.driver.description()
    }

    pub(super) fn limits(&self) -> &Limits {
        self.driver.limits()
    }

    pub(super) fn arena(&self) -> u64 {
        self.arena
    }

    pub(super) fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Calls the driver unless it has failed, and keeps an error that sticks.
    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Driver) -> Result<T, DriverError>,
    ) -> Result<T, BackendError> {
        if let Some(failure) = &self.failure {
            return Err(error(ErrorCode::DeviceFailed, failure));
        }
        call(self.driver.as_mut()).map_err(|reason| match reason {
            DriverError::OutOfMemory(_) => error(ErrorCode::LimitExceeded, reason),
            DriverError::NoKernel(_) => error(ErrorCode::InvalidCodec, reason),
            DriverError::Refused { .. } => error(ErrorCode::InvalidArgument, reason),
            DriverError::Failed { .. } => {
                let failure = reason.to_string();
                self.failure = Some(failure.clone());
                error(ErrorCode::DeviceFailed, failure)
            }
        })
    }

    /// Writes to an offset of the arena.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "write past the arena");
        let to = self.arena + offset;
        self.call(|driver| driver.write(to, bytes))
    }

    /// Reads from an offset of the arena.
    pub(super) fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "read past the arena");
        let from = self.arena + offset;
        self.call(|driver| driver.read(from, bytes))
    }

    /// Copies within the arena.
    pub(super) fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), BackendError> {
        assert!(from.max(to) + bytes <= self.arena_bytes, "copy past the arena");
        let (from, to) = (self.arena + from, self.arena + to);
        self.call(|driver| driver.copy(from, to, bytes))
    }

    /// Copies from any address of this device into the arena.
    pub(super) fn copy_in(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), BackendError> {
        assert!(to + bytes <= self.arena_bytes, "copy past the arena");
        let to = self.arena + to;
        self.call(|driver| driver.copy(from, to, bytes))
    }

    /// Calls nothing any more, because of what was found.
    pub(super) fn fail(&mut self, why: &str) {
        self.failure.get_or_insert_with(|| why.to_owned());
    }

    /// Takes memory beside the arena for what stays.
    pub(super) fn keep(&mut self, bytes: &[u8]) -> Result<u64, BackendError> {
        let address = self.call(|driver| driver.alloc(bytes.len() as u64))?;
        let written = self.call(|driver| driver.write(address, bytes));
        written.map(|()| address).inspect_err(|_| self.driver.free(address))
    }

    pub(super) fn free(&mut self, address: u64) {
        self.driver.free(address);
    }

    /// Opens memory of another process.
    pub(super) fn open_shared(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<u64, BackendError> {
        self.call(|driver| driver.open_shared(handle, bytes))
    }

    pub(super) fn close_shared(&mut self, address: u64) {
        self.driver.close_shared(address);
    }

    /// Gives all scratch memory back.
    pub(super) fn clear_scratch(&mut self) {
        self.scratch_used = 0;
    }

    /// Scratch memory that is taken.
    pub(super) fn scratch_used(&self) -> u64 {
        self.scratch_used
    }

    /// Gives scratch memory back but for the first `bytes`.
    pub(super) fn keep_scratch(&mut self, bytes: u64) {
        self.scratch_used = bytes;
    }

    /// Takes scratch memory; `None` when too little is left.
    pub(super) fn scratch(&mut self, bytes: u64) -> Option<u64> {
        let start = self.scratch_used;
        let end = start.checked_add(bytes)?.checked_next_multiple_of(ALIGN)?;
        if end > self.scratch_bytes {
            return None;
        }
        self.scratch_used = end;
        Some(self.scratch + start)
    }

    /// Writes to scratch memory.
    pub(super) fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.call(|driver| driver.write(to, bytes))
    }

    /// Reads scratch memory.
    pub(super) fn download(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.call(|driver| driver.read(from, bytes))
    }

    pub(super) fn launch(&mut self, launch: KernelLaunch<'_>) -> Result<(), BackendError> {
        if launch.blocks == 0 {
            return Ok(());
        }
        self.call(|driver| driver.launch(launch))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.driver.free(self.scratch);
        self.driver.free(self.arena);
    }
}
