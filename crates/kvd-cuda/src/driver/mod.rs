//! The host's view of a CUDA driver. [`probe_devices`] finds out whether there is one, [`Driver`]
//! has every call that [`crate::CudaBackend`] makes, and [`CudaDriver`] is the real one. Tests have
//! others: one that runs the kernels on the CPU, and one that fails on demand.

mod cuda;
mod graphs;
mod modules;
mod name;
mod nvrtc;
mod pinned;
mod probe;
mod shared;
mod slots;

pub use cuda::CudaDriver;
pub use name::{BadGpuName, GpuName, is_same_gpu};
pub use nvrtc::Nvrtc;
pub use probe::{GpuDevice, ProbeError, probe_devices};

use crate::plan::GpuLimits;
use kvd_compute::RegionHandle;
use std::time::Duration;

/// Why a call of the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// Too little memory; the device goes on.
    #[error("the GPU has no {0} bytes of memory left")]
    OutOfMemory(u64),
    /// Too little memory of the host that may be pinned.
    #[error("the host gives no {0} bytes of pinned memory for copies to and from the GPU")]
    OutOfPinned(u64),
    /// Too little memory for what the driver takes by itself, beside what it was asked for; the
    /// device goes on.
    #[error(
        "the GPU has no memory left for {0}; leave it some beside device.pool_bytes and \
         device.table_bytes"
    )]
    NoRoom(String),
    /// The loaded modules have no such kernel.
    #[error("no kernel {0} among those loaded; rebuild them with `cargo xtask kernels`")]
    NoKernel(String),
    /// Memory of another process that cannot be opened, or kernels that cannot be loaded; the
    /// device goes on.
    #[error("{call} refuses it: {reason}")]
    Refused {
        /// Name of the driver function.
        call: &'static str,
        /// The driver's name for it, or what does not fit.
        reason: String,
    },
    /// Work that does not end; the device must not be called again.
    #[error(
        "the GPU has not done its work within {} ms (device.kernel_timeout_ms): a kernel hangs or \
         the GPU is stuck, of which the system's log may have an Xid; start the daemon again, and \
         raise the setting where work may take so long",
        .0.as_millis()
    )]
    Hung(Duration),
    /// Anything else: CUDA's errors stick to the context, so the device must not be called again.
    #[error("the GPU failed in {call}: {reason}")]
    Failed {
        /// Name of the driver function.
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

/// Kernels that are launched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GraphId(pub u32);

/// A kernel of a graph. It begins when all of the stages before its own have ended; those of one
/// stage may run side by side.
#[derive(Clone, Copy, Debug)]
pub struct GraphNode<'a> {
    /// Rises from node to node, or stays.
    pub stage: u32,
    /// Name of the kernel.
    pub launch: KernelLaunch<'a>,
}

/// A copy within a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// Address of the first byte.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Bytes.
    pub bytes: u64,
}

/// One of the two streams of a device. Work of one stream is done in the order in which it was
/// given; between the two there is no order but what an event makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceStream {
    /// Copies to the device.
    Copy,
    /// Kernels, copies within the device, and copies from it.
    Compute,
}

/// Pinned memory of the host, which the device copies from and to by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PinnedId(pub u32);

/// Bytes of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedRange {
    /// Which memory.
    pub memory: PinnedId,
    /// The first byte.
    pub start: u64,
    /// How many.
    pub bytes: u64,
}

/// A mark in a stream that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventId(pub u32);

/// A device: memory at addresses, kernels, and two streams of work. Calls that give work to a
/// stream may return before it is done, and an error of it may come from any later call. Only
/// [`DriverError::Failed`] and [`DriverError::Hung`] stick.
pub trait Driver: Send {
    /// Description of the device, for logs.
    fn description(&self) -> String;

    /// The GPU's UUID, where it has one: `GPU-` and lower-case digits.
    fn uuid(&self) -> Option<&str>;

    /// Limits of the device, which plans weigh.
    fn limits(&self) -> &GpuLimits;

    /// Loads kernels: a fat binary, or what a [`crate::KernelCompiler`] has made. No launch of them
    /// takes device memory after that.
    ///
    /// # Errors
    /// When the driver refuses it or has no memory for it; the device goes on.
    fn load_image(&mut self, image: &[u8]) -> Result<(), DriverError>;

    /// Whether a kernel is among those loaded.
    ///
    /// # Errors
    /// When it is not, or the device has failed.
    fn find_kernel(&mut self, kernel: &str) -> Result<(), DriverError>;

    /// Takes memory, aligned to 256 bytes; its content is undefined.
    ///
    /// # Errors
    /// When there is none left.
    fn allocate_device(&mut self, bytes: u64) -> Result<u64, DriverError>;

    /// Gives memory back, by the address that [`Driver::allocate_device`] gave; no work may be
    /// using it.
    fn free_device(&mut self, address: u64);

    /// Takes pinned memory of the host.
    ///
    /// # Errors
    /// When the host gives none.
    fn allocate_pinned(&mut self, bytes: u64) -> Result<PinnedId, DriverError>;

    /// Gives pinned memory back.
    fn free_pinned(&mut self, memory: PinnedId);

    /// Writes to pinned memory; no copy from it may be under way.
    fn write_pinned(&mut self, memory: PinnedId, start: u64, bytes: &[u8]);

    /// Reads pinned memory, into which no copy may be under way.
    fn read_pinned(&mut self, memory: PinnedId, start: u64, bytes: &mut [u8]);

    /// Makes an event.
    ///
    /// # Errors
    /// When the device has failed.
    fn create_event(&mut self) -> Result<EventId, DriverError>;

    /// Makes an event that other processes may open by the handle that comes with it, and wait for.
    ///
    /// # Errors
    /// When the driver gives no such handle, or the device has failed.
    fn share_event(&mut self) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), DriverError>;

    /// Gives an event back.
    fn destroy_event(&mut self, event: EventId);

    /// Marks where a stream is now; where the event was before is forgotten.
    ///
    /// # Errors
    /// When the device has failed.
    fn record_event(&mut self, event: EventId, stream: DeviceStream) -> Result<(), DriverError>;

    /// Makes later work of a stream wait for an event as it was last recorded.
    ///
    /// # Errors
    /// When the device has failed.
    fn wait_event(&mut self, stream: DeviceStream, event: EventId) -> Result<(), DriverError>;

    /// Whether an event has happened; returns at once.
    ///
    /// # Errors
    /// When the device has failed, in any work before.
    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError>;

    /// Work does not end. Giving anything back would wait for it, so from now on no call reaches
    /// the device, and what it holds goes with the process.
    fn abandon_device(&mut self);

    /// [`DeviceStream::Copy`]: copies to the device.
    ///
    /// # Errors
    /// When the device has failed.
    fn copy_to_device(&mut self, to: u64, from: PinnedRange) -> Result<(), DriverError>;

    /// [`DeviceStream::Compute`]: copies from the device.
    ///
    /// # Errors
    /// When the device has failed.
    fn copy_to_host(&mut self, from: u64, to: PinnedRange) -> Result<(), DriverError>;

    /// [`DeviceStream::Compute`]: copies within the device, in any order and at once; no range
    /// overlaps one that is written.
    ///
    /// # Errors
    /// When the device has failed.
    fn copy_on_device(&mut self, copies: &[DeviceCopy]) -> Result<(), DriverError>;

    /// [`DeviceStream::Compute`]: runs a kernel.
    ///
    /// # Errors
    /// When there is no such kernel, no memory to launch it (it was not), or the device has
    /// failed.
    fn launch_kernel(&mut self, launch: KernelLaunch<'_>) -> Result<(), DriverError>;

    /// Makes a graph of kernels, at least one.
    ///
    /// # Errors
    /// [`DriverError::Refused`] when the driver makes none, and the device goes on; else as
    /// [`Driver::launch_kernel`].
    fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, DriverError>;

    /// Changes what a node of a graph is launched with; its kernel stays.
    ///
    /// # Errors
    /// As [`Driver::build_graph`]; a graph that was refused a change must not be launched.
    fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), DriverError>;

    /// [`DeviceStream::Compute`]: runs a graph.
    ///
    /// # Errors
    /// When the device has failed.
    fn launch_graph(&mut self, graph: GraphId) -> Result<(), DriverError>;

    /// Gives a graph back, which must not be under way.
    fn destroy_graph(&mut self, graph: GraphId);

    /// Opens `bytes` of memory that another process shares, and says where they are here: the same
    /// address each time it is opened, as long as it is open.
    ///
    /// # Errors
    /// Why they cannot be opened.
    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError>;

    /// Closes it, by the address that [`Driver::open_shared`] gave, as often as it was opened; the
    /// last time no work may be using it.
    fn close_shared(&mut self, address: u64);
}
