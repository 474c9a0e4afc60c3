//! The structs that launches pass or point to, in memory as they are here, and the constants that
//! host and kernels share. `cargo xtask gen` makes `kernels/include/kvd/abi.cuh` of the files
//! beside this one; compilers of kernels check the sizes.

mod attend;
mod region;
mod store;

pub(crate) use attend::{
    ATTEND_THREADS, BUFFERS_MAX, COEFFICIENTS, ENTRY_LENGTH, FEW_ROWS, LINE_BYTES, MERGE_THREADS,
    TILE_TOKENS, WEIGHT_SETS_MAX,
};
pub use attend::{AttendParameters, AttendUnit, MergeParameters, PageEntry, SideKernel, SideShape};
pub(crate) use region::{ALL_FINITE, REGION_THREADS, TRANSFORM_ROWS};
pub use region::{
    AnswerParameters, QueryParameters, RowsParameters, RowsUnit, StageCheck, StageParameters,
    StageSide, TransformUnit,
};
pub(crate) use store::{IN_SHARED, STORE_THREADS, VQ_STAGES_MAX};
pub use store::{StoreParameters, StoreUnit};

/// A value of device memory.
pub trait DeviceValue {
    /// Its address: the host holds a number.
    type Address;
}

impl<T> DeviceValue for T {
    type Address = u64;
}

/// Address in device memory of values that a kernel reads.
pub(crate) type ReadAddress<T> = <T as DeviceValue>::Address;
/// Address in device memory of values that a kernel writes.
pub(crate) type WriteAddress<T> = <T as DeviceValue>::Address;
