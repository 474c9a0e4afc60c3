//! Memory of a device that a worker shares, as a backend is told of it.

use crate::BackendError;
use kvd_core::ErrorCode;
use std::os::fd::OwnedFd;

/// What a worker hands over.
#[derive(Debug)]
pub enum RegionHandle {
    /// A legacy CUDA IPC handle.
    CudaIpc([u8; RegionHandle::IPC_BYTES]),
    /// A POSIX descriptor, exported from an allocation of CUDA's virtual memory management.
    CudaFd(OwnedFd),
}

impl RegionHandle {
    /// Bytes of a `cudaIpcMemHandle_t`.
    pub const IPC_BYTES: usize = 64;
}

/// Device memory that a backend has opened; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceRegion(pub u64);

/// The answer of a device that no memory can be shared through.
pub(crate) fn none() -> BackendError {
    let message = "the device is the processor: it opens no CUDA memory";
    BackendError::Device { code: ErrorCode::InvalidArgument, message: message.to_owned() }
}
