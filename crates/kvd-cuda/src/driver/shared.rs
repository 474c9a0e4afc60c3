//! Memory of another process: legacy IPC handles, and allocations of virtual memory management that
//! come as descriptors. Not yet run on a GPU.
//!
//! Unsafe code: calls of the driver's C functions, in a context that the caller has made current.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::DriverError;
use cudarc::driver::sys::{self, CUresult};
use kvd_compute::RegionHandle;
use std::collections::HashMap;
use std::os::fd::AsRawFd;

/// Memory that was opened, and how it is closed.
pub(super) enum SharedMapping {
    Ipc { address: u64 },
    Mapped { address: u64, bytes: usize },
}

/// Open mappings by address, one entry for each opening. Two regions of one handle have one
/// address; the driver counts how often it was opened, and unmaps it when it was closed as often.
#[derive(Default)]
pub(super) struct OpenMappings(HashMap<u64, Vec<SharedMapping>>);

impl OpenMappings {
    pub(super) fn insert_mapping(&mut self, shared: SharedMapping) -> u64 {
        let address = shared.address();
        self.0.entry(address).or_default().push(shared);
        address
    }

    /// Removes a holder and returns the mapping that must now be closed.
    pub(super) fn remove_mapping(&mut self, address: u64) -> Option<SharedMapping> {
        let holders = self.0.get_mut(&address)?;
        let shared = holders.pop();
        if holders.is_empty() {
            self.0.remove(&address);
        }
        shared
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = SharedMapping> {
        self.0.drain().flat_map(|(_, holders)| holders)
    }
}

/// An answer that does not stick.
pub(super) fn check_call(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DriverError::Refused { call, reason: format!("{result:?} ({})", result as u32) })
}

impl SharedMapping {
    /// Opens what `handle` names, at least `bytes` of it.
    pub(super) fn open_handle(
        handle: &RegionHandle,
        bytes: u64,
        device: sys::CUdevice,
    ) -> Result<Self, DriverError> {
        match handle {
            RegionHandle::CudaIpc(handle) => Self::open_ipc(handle, bytes),
            RegionHandle::CudaFd(file) => Self::map_file(file.as_raw_fd(), bytes as usize, device),
        }
    }

    fn open_ipc(handle: &[u8; RegionHandle::IPC_BYTES], bytes: u64) -> Result<Self, DriverError> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let mut address = 0;
        // SAFETY: writes the address; 1 lets the driver enable access between GPUs.
        let result = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, 1) };
        check_call("cuIpcOpenMemHandle", result)?;
        let opened = Self::Ipc { address };
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes two numbers; the address was just opened.
        let result = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
        check_call("cuMemGetAddressRange", result).inspect_err(|_| opened.close_mapping())?;
        let have = base + size as u64 - address;
        if have < bytes {
            opened.close_mapping();
            let reason = format!("it has {have} bytes, not {bytes}");
            return Err(DriverError::Refused { call: "cuMemGetAddressRange", reason });
        }
        Ok(opened)
    }

    fn map_file(file: i32, bytes: usize, device: sys::CUdevice) -> Result<Self, DriverError> {
        let posix = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let (mut allocation, mut address) = (0, 0);
        // SAFETY: the driver takes the descriptor as a pointer's bits and writes a handle; the
        // descriptor stays the caller's.
        let result = unsafe {
            let bits = std::ptr::without_provenance_mut(file as usize);
            sys::cuMemImportFromShareableHandle(&raw mut allocation, bits, posix)
        };
        check_call("cuMemImportFromShareableHandle", result)?;
        // SAFETY: writes an address; the range is mapped once. A mapping keeps the allocation, so
        // the handle is given back at once, whatever came of it. A size that is not a whole number
        // of the allocation's granules, or over it, is refused by `cuMemMap`.
        let mapped = unsafe {
            let reserved = sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0);
            let mapped = check_call("cuMemAddressReserve", reserved).and_then(|()| {
                let mapped = sys::cuMemMap(address, bytes, 0, allocation, 0);
                check_call("cuMemMap", mapped).inspect_err(|_| {
                    let _ = sys::cuMemAddressFree(address, bytes);
                })
            });
            let _ = sys::cuMemRelease(allocation);
            mapped
        };
        mapped?;
        let opened = Self::Mapped { address, bytes };
        // SAFETY: all zeros is a value of this plain struct: no place, no access.
        let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.__bindgen_anon_1.id = device;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: the range was just mapped.
        let result = unsafe { sys::cuMemSetAccess(address, bytes, &raw const access, 1) };
        check_call("cuMemSetAccess", result).inspect_err(|_| opened.close_mapping())?;
        Ok(opened)
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Ipc { address } | Self::Mapped { address, .. } => *address,
        }
    }

    /// Gives it back. An error is one that stuck before.
    pub(super) fn close_mapping(&self) {
        // SAFETY: opened above, and closed once: out of the map, or before it got there.
        unsafe {
            match *self {
                Self::Ipc { address } => {
                    let _ = sys::cuIpcCloseMemHandle(address);
                }
                Self::Mapped { address, bytes } => {
                    let _ = sys::cuMemUnmap(address, bytes);
                    let _ = sys::cuMemAddressFree(address, bytes);
                }
            }
        }
    }
}
