//! Memory of a device that a worker shares, as a backend is told of it.

use crate::BackendError;
use kvd_core::ErrorCode;
use std::os::fd::OwnedFd;

/// A handle of device memory, as a worker hands it over.
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

/// Device memory that was opened, as the device describes it.
#[derive(Clone, Debug)]
pub struct OpenedRegion {
    /// Its name from now on.
    pub region: DeviceRegion,
    /// A `cudaIpcEventHandle_t` of the event that marks when outputs are there; none where the
    /// driver gives none.
    pub event: Option<[u8; RegionHandle::IPC_BYTES]>,
    /// Why there is no event, where payloads are not copied.
    pub no_event: Option<String>,
    /// Why payloads are copied through the host; none where kernels read and write them where they
    /// are.
    pub copied: Option<String>,
}

/// Where a batch's queries are and its answer goes: offsets in one region, each aligned to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPlaces {
    /// The region.
    pub region: DeviceRegion,
    /// `[sum of n_q, q_heads, head_dim_k]` in the plan's dtype.
    pub q: u64,
    /// `[sum of n_q, q_heads, head_dim_v]` in the plan's dtype.
    pub out: u64,
    /// `[sum of n_q, q_heads]`, f32.
    pub lse: u64,
}

/// Where K and V to store are: offsets in one region, each aligned to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRows {
    /// The region.
    pub region: DeviceRegion,
    /// Tokens of both.
    pub tokens: u32,
    /// `[tokens, kv_heads, head_dim_k]` in the model's dtype.
    pub k: u64,
    /// `[tokens, kv_heads, head_dim_v]` in the model's dtype.
    pub v: u64,
}

/// K and V of a region as they were when the device copied them, until it is asked to encode or to
/// attend. What the worker writes later changes nothing of it.
#[derive(Debug)]
pub struct StagedRows {
    /// Which call of [`crate::RegionBackend::stage_rows`] copied them.
    pub call: u64,
    /// [`crate::content_hash`] of them.
    pub content_hash: u64,
    /// The first value that is NaN or infinite, as [`crate::AppendSteps::check`] names it.
    pub finite: Result<(), BackendError>,
}

/// The answer of a device that no memory can be shared through.
pub(crate) fn no_region_error() -> BackendError {
    let message = "the device is the processor: it opens no CUDA memory";
    BackendError::Device { code: ErrorCode::InvalidArgument, message: message.to_owned() }
}
