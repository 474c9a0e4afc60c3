//! The host side of the kernels in `kernels/`: an attention plan becomes block tables and launches
//! ([`AttendTables`]), and merged partial results become a reply.
//!
//! The structs are what a device is given, and the CPU emulator (`crates/kvd-emu`) gives the same
//! to the same kernels. [`probe_devices`] finds the GPUs of a machine, [`CudaBackend`] serves from
//! one. Not yet measured on a GPU.
//!
//! Unsafe code stands in `driver/` alone: calls of the driver's C functions.
#![deny(unsafe_code)]

mod abi;
mod backend;
mod block_table;
mod buffers;
mod codebook_table;
mod driver;
mod error;
mod finish;
mod huffman_tables;
mod jit;
mod kernel_choice;
mod kernel_table;
mod late_pairs;
mod layer_memory;
mod lookup;
mod page_shapes;
mod plan;
mod query_transform;
mod region_copy_plan;
mod specialized;
mod store;
mod tensor_core;
mod unpack;

pub use abi::{
    AnswerParameters, AttendParameters, AttendUnit, MergeParameters, PageEntry, QueryParameters,
    RowsParameters, RowsUnit, SideKernel, SideShape, StageCheck, StageParameters, StageSide,
    StoreParameters, StoreUnit, TransformUnit,
};
pub use backend::{CudaBackend, CudaOpenError, CudaOptions};
pub use block_table::{AttendLaunch, AttendTables, LayerShapes, TableOptions};
pub use codebook_table::CodebookRoom;
pub use driver::{
    BadGpuName, CudaDriver, DeviceCopy, DeviceStream, Driver, DriverError, EventId, GpuDevice,
    GpuName, GraphId, GraphNode, KernelLaunch, Nvrtc, PinnedId, PinnedRange, ProbeError,
    is_same_gpu, probe_devices,
};
pub use error::PlanError;
pub use finish::{MergedResults, merge_shared_bytes};
pub use huffman_tables::SharedMemory;
pub use jit::{
    CompileError, CompileEvent, CompileReport, KernelCompiler, KernelSource, kernel_headers,
    kernel_source, tensor_source,
};
pub use late_pairs::LatePairs;
pub use layer_memory::LayerMemory;
pub use plan::{
    BlockResources, CodebookPlan, EntryExchange, GpuLimits, KernelPlan, LaunchChoices, Occupancy,
    StepWorkload, plan_kernel,
};
pub use query_transform::QueryTransforms;
pub use store::{
    CodeHistogram, HistogramPlan, StoreLaunch, StorePlan, StoreShapes, StoredPage, encoded_on_host,
};

/// The kernels for GPUs, fat binaries; none without the feature `embed-kernels`.
pub static KERNELS: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
