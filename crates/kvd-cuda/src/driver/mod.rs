//! What the host needs from a CUDA driver. [`devices`] finds out whether there is one, [`Driver`]
//! is all that [`crate::CudaBackend`] calls of it, and [`CudaDriver`] the real one. Tests have
//! others: one that runs the kernels on the CPU, and one that fails on demand.

mod cuda;
mod name;
mod probe;
mod shared;

pub use cuda::CudaDriver;
pub use name::{BadGpuName, GpuName};
pub use probe::{Gpu, ProbeError, devices};

use crate::plan::Limits;
use kvd_compute::RegionHandle;

/// Why a call of the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// Too little memory; the device goes on.
    #[error("the GPU has no {0} bytes of memory left")]
    OutOfMemory(u64),
    /// No such kernel in what was loaded.
    #[error("no kernel {0} among those loaded; rebuild them with `cargo xtask kernels`")]
    NoKernel(String),
    /// Memory of another process that cannot be opened; the device goes on.
    #[error("{call} refuses the memory: {reason}")]
    Refused {
        /// What was called.
        call: &'static str,
        /// The driver's name for it, or what does not fit.
        reason: String,
    },
    /// Anything else: CUDA's errors stick to the context, so the device must not be called again.
    #[error("the GPU failed in {call}: {reason}")]
    Failed {
        /// What was called.
        call: &'static str,
        /// The driver's name for it.
        reason: String,
    },
}

/// A kernel to run: one block per unit of work, one parameter.
#[derive(Clone, Copy, Debug)]
pub struct KernelLaunch<'a> {
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Thread blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// The parameter's bytes; addresses in it are the device's.
    pub parameters: &'a [u8],
}

/// A device: memory at addresses, and kernels. Calls take effect in their order; those that hand
/// nothing back may return before they have. Only
/// [`DriverError::Failed`] sticks.
pub trait Driver: Send {
    /// What the device is, for logs.
    fn description(&self) -> String;

    /// What plans weigh.
    fn limits(&self) -> &Limits;

    /// Loads kernels, a fat binary.
    ///
    /// # Errors
    /// When the driver refuses it.
    fn load(&mut self, image: &[u8]) -> Result<(), DriverError>;

    /// Takes memory, aligned to 256 bytes; what it holds is not defined.
    ///
    /// # Errors
    /// When there is none left.
    fn alloc(&mut self, bytes: u64) -> Result<u64, DriverError>;

    /// Gives memory back, by the address that [`Driver::alloc`] gave.
    fn free(&mut self, address: u64);

    /// Copies to the device; `bytes` may be reused at once.
    ///
    /// # Errors
    /// When the device has failed.
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError>;

    /// Copies from the device, after everything before.
    ///
    /// # Errors
    /// When the device has failed, by any call before.
    fn read(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), DriverError>;

    /// Copies within the device; the ranges do not overlap.
    ///
    /// # Errors
    /// When the device has failed.
    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DriverError>;

    /// Starts a kernel.
    ///
    /// # Errors
    /// When there is no such kernel, or the device has failed.
    fn launch(&mut self, launch: KernelLaunch<'_>) -> Result<(), DriverError>;

    /// Opens `bytes` of memory that another process shares, and says where they are here.
    ///
    /// # Errors
    /// Why they cannot be opened.
    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError>;

    /// Closes it, by the address that [`Driver::open_shared`] gave.
    fn close_shared(&mut self, address: u64);
}
