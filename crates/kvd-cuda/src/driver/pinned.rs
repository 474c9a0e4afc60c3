//! Pinned memory of the host and events, by number. Not yet run on a GPU.
//!
//! Unsafe code: calls of the driver's C functions, in a context that the caller has made current,
//! and copies to and from memory that they gave, inside its bounds.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::cuda::check_call;
use super::shared::check_call as refuse;
use super::slots::HandleSlots;
use super::{DriverError, EventId, PinnedId, PinnedRange};
use cudarc::driver::sys::{self, CUresult};
use kvd_compute::RegionHandle;
use std::ptr;

/// An event that only says that it has happened.
const WITHOUT_TIMING: u32 = 2;
/// One that other processes may open.
const INTERPROCESS: u32 = 4;

/// Pinned memory that was taken: address and bytes. Given back, an address is null.
#[derive(Default)]
pub(super) struct PinnedMemory(Vec<(*mut u8, u64)>);

impl PinnedMemory {
    pub(super) fn allocate_pinned(&mut self, bytes: u64) -> Result<PinnedId, DriverError> {
        let mut memory = ptr::null_mut();
        // SAFETY: writes the address; no flags, so that the host reads it through its caches.
        match unsafe { sys::cuMemHostAlloc(&raw mut memory, bytes.max(1) as usize, 0) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(DriverError::OutOfPinned(bytes)),
            result => check_call("cuMemHostAlloc", result)?,
        }
        // Unwritten bytes may still be copied to the device, so they must be initialized.
        // SAFETY: as many bytes were given.
        unsafe { ptr::write_bytes(memory.cast::<u8>(), 0, bytes as usize) };
        self.0.push((memory.cast(), bytes));
        Ok(PinnedId(self.0.len() as u32 - 1))
    }

    pub(super) fn give_back(&mut self, memory: PinnedId) {
        let (address, bytes) = &mut self.0[memory.0 as usize];
        *bytes = 0;
        let address = std::mem::replace(address, ptr::null_mut());
        if !address.is_null() {
            // SAFETY: `take` gave it, and it is given back once. Of an error that stuck there is
            // nobody to tell.
            let _ = unsafe { sys::cuMemFreeHost(address.cast()) };
        }
    }

    pub(super) fn clear(&mut self) {
        (0..self.0.len() as u32).for_each(|index| self.give_back(PinnedId(index)));
    }

    /// Where a range is; it is inside its memory.
    pub(super) fn find_range(&self, range: PinnedRange) -> *mut u8 {
        let (address, bytes) = self.0[range.memory.0 as usize];
        let end = range.start.checked_add(range.bytes);
        assert!(end.is_some_and(|end| end <= bytes), "{range:?} is not inside {bytes} bytes");
        // SAFETY: inside the allocation, or its end.
        unsafe { address.add(range.start as usize) }
    }

    pub(super) fn write_bytes(&mut self, memory: PinnedId, start: u64, bytes: &[u8]) {
        let to = self.find_range(PinnedRange { memory, start, bytes: bytes.len() as u64 });
        // SAFETY: `find` has tested the range, which no copy uses, the caller's promise.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub(super) fn read_bytes(&self, memory: PinnedId, start: u64, bytes: &mut [u8]) {
        let from = self.find_range(PinnedRange { memory, start, bytes: bytes.len() as u64 });
        // SAFETY: as in `fill`; every byte was written when the memory was taken.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// Events that were made.
#[derive(Default)]
pub(super) struct CudaEvents(HandleSlots<sys::CUevent>);

impl CudaEvents {
    pub(super) fn create_event(&mut self) -> Result<EventId, DriverError> {
        let mut event = ptr::null_mut();
        // SAFETY: writes the handle.
        check_call("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, WITHOUT_TIMING) })?;
        Ok(EventId(self.0.insert_handle(event)))
    }

    /// An event whose handle other processes may have.
    pub(super) fn create_shared_event(
        &mut self,
    ) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), DriverError> {
        let mut event = ptr::null_mut();
        let flags = WITHOUT_TIMING | INTERPROCESS;
        // SAFETY: writes the handle.
        refuse("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; RegionHandle::IPC_BYTES] };
        // SAFETY: writes the handle of an event that was just made.
        let result = unsafe { sys::cuIpcGetEventHandle(&raw mut handle, event) };
        refuse("cuIpcGetEventHandle", result).inspect_err(|_| destroy_event(event))?;
        Ok((EventId(self.0.insert_handle(event)), handle.reserved.map(|byte| byte as u8)))
    }

    /// Null for one that was given back, which the driver refuses.
    pub(super) fn find_event(&self, event: EventId) -> sys::CUevent {
        self.0.get(event.0).copied().unwrap_or(ptr::null_mut())
    }

    pub(super) fn remove_event(&mut self, event: EventId) {
        self.0.remove_handle(event.0).into_iter().for_each(destroy_event);
    }

    pub(super) fn clear(&mut self) {
        self.0.take_all().for_each(destroy_event);
    }
}

fn destroy_event(event: sys::CUevent) {
    // SAFETY: made above, and given back once: it was taken out of its slot, or never in one. Of an
    // error that stuck there is nobody to tell.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
}
