//! The host side of the kernels in `kernels/`: an attention plan becomes block tables and launches
//! ([`Tables`]), and merged partial results become a reply.
//!
//! The structs are what a device is given, and the CPU lane (`crates/kvd-emu`) gives the same to
//! the same kernels. [`devices`] finds the GPUs of a machine, [`CudaBackend`] serves from one.
//! Not yet measured on a GPU.
//!
//! Unsafe code stands in `driver/` alone: calls of the driver's C functions.
#![deny(unsafe_code)]

mod abi;
mod backend;
mod buffers;
mod driver;
mod error;
mod finish;
mod fixed;
mod jit;
mod lanes;
mod late;
mod lookup;
mod plan;
mod products;
mod room;
mod rows;
mod side;
mod spread;
mod store;
mod table;
mod tables;
mod turn;

pub use abi::{AttendParameters, MergeParameters, PageEntry, SideShape, Unit};
pub use backend::{CudaBackend, CudaOpenError, CudaOptions};
pub use driver::{
    BadGpuName, CudaDriver, DeviceCopy, Driver, DriverError, EventId, Gpu, GpuName, GraphId,
    GraphNode, KernelLaunch, Nvrtc, PinnedId, PinnedRange, ProbeError, Stream, devices,
    is_same_gpu,
};
pub use error::PlanError;
pub use finish::Merged;
pub use jit::{
    CompileError, CompileEvent, CompileReport, KernelCompiler, KernelSource, kernel_headers,
    kernel_source, tensor_source,
};
pub use lanes::SharedMemory;
pub use late::LatePairs;
pub use plan::{Block, Choices, CodebookPlan, Exchange, Limits, Occupancy, Plan, Workload, plan};
pub use room::LayerRoom;
pub use rows::{RowsParameters, RowsUnit, StageCheck, StageParameters, StageSide};
pub use side::Kernel;
pub use store::{
    Histogram, HistogramPlan, StoreLaunch, StoreParameters, StorePlan, StoreShapes, StoreUnit,
    StoredPage, encoded_on_host,
};
pub use table::CodebookRoom;
pub use tables::{Launch, Options, Shapes, Tables};
pub use turn::{AnswerParameters, QueryParameters, TurnUnit, Turns};

/// The kernels for GPUs, fat binaries; none without the feature `embed-kernels`.
pub static KERNELS: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
