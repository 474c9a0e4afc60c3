//! Which GPUs this machine has, or why none can be used. The driver is opened at run time, and
//! nothing here panics, whatever the library is: each symbol is looked for before it is called.
//! Its answers are an enum of cudarc's, of the codes that CUDA 13.3 has: another one, as later
//! drivers may have, of a minor version too, would be undefined behaviour where a call answers it.
//!
//! Unsafe code: calls of the driver's C functions.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::GpuName;
use crate::plan::GpuLimits;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CStr, c_char, c_int};

/// The fat binaries are compiled by CUDA 13.0, which older drivers do not load.
const DRIVER_VERSION_MIN: i32 = 13_000;

/// Driver functions that the probe and the driver call.
const SYMBOLS: [&CStr; 44] = [
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceGetUuid_v2",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxSetCurrent",
    c"cuModuleLoadData",
    c"cuModuleUnload",
    c"cuModuleGetFunction",
    c"cuModuleGetFunctionCount",
    c"cuModuleEnumerateFunctions",
    c"cuFuncLoad",
    c"cuFuncSetAttribute",
    c"cuLaunchKernel",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuIpcOpenMemHandle_v2",
    c"cuIpcCloseMemHandle",
    c"cuIpcGetEventHandle",
    c"cuMemGetAddressRange_v2",
    c"cuMemImportFromShareableHandle",
    c"cuMemRelease",
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemMap",
    c"cuMemUnmap",
    c"cuMemSetAccess",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemcpyBatchAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamWaitEvent",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
];

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuDevice {
    /// Number by which the driver knows it: `cuda:<ordinal>`.
    pub ordinal: u32,
    /// As in `nvidia-smi`, which containers that number GPUs otherwise share.
    pub uuid: String,
    /// Its name and limits, as plans need them.
    pub limits: GpuLimits,
}

/// Why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// No `libcuda.so`.
    #[error(
        "no CUDA driver: libcuda.so is not found; install NVIDIA's driver or use device = \"cpu\""
    )]
    NoLibrary,
    /// A library that is not, or not wholly, a driver.
    #[error("the CUDA driver lacks {0}; a driver of CUDA 13.0 or later (580) is needed")]
    NoSymbol(String),
    /// The driver refuses.
    #[error("the CUDA driver answers {name} ({code}) to {call}")]
    Driver {
        /// Name of the driver function.
        call: &'static str,
        /// As a number.
        code: u32,
        /// As a name.
        name: String,
    },
    /// The kernels are compiled for later drivers.
    #[error("the CUDA driver is of version {have}; {need} or later (driver 580) is needed")]
    TooOld {
        /// 1000 times the major version plus 10 times the minor.
        have: i32,
        /// The version needed, in the same form.
        need: i32,
    },
    /// No GPU, or none that this process may see.
    #[error("the CUDA driver finds no GPU; CUDA_VISIBLE_DEVICES or the container may hide it")]
    NoDevice,
    /// Fewer GPUs.
    #[error("there is no {name}: the driver finds {count} GPUs, numbered from 0")]
    NoSuchDevice {
        /// Asked for.
        name: GpuName,
        /// GPUs.
        count: usize,
    },
    /// Too old a GPU.
    #[error("{name} has compute capability {major}.{minor}; the kernels need 8.0 or later")]
    Capability {
        /// The GPU.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
}

/// The GPUs of this machine by their numbers, at least one: each as the driver describes it, or why
/// it does not.
///
/// # Errors
/// Why there is none.
pub fn probe_devices() -> Result<Vec<Result<GpuDevice, ProbeError>>, ProbeError> {
    // SAFETY: opens the library and closes it; what it runs when it is opened is the vendor's.
    if !unsafe { sys::is_culib_present() } {
        return Err(ProbeError::NoLibrary);
    }
    // SAFETY: it is present, and would panic otherwise.
    let _ = unsafe { sys::culib() };
    if let Some(symbol) = find_missing_symbol(&SYMBOLS) {
        return Err(ProbeError::NoSymbol(symbol.to_string_lossy().into_owned()));
    }
    // SAFETY: the symbol is there, and this is the call that comes first.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(ProbeError::NoDevice),
        result => check_call("cuInit", result)?,
    }
    let mut version = 0;
    // SAFETY: writes one number.
    check_call("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    if version < DRIVER_VERSION_MIN {
        return Err(ProbeError::TooOld { have: version, need: DRIVER_VERSION_MIN });
    }
    let mut count = 0;
    // SAFETY: writes one number.
    check_call("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    if count <= 0 {
        return Err(ProbeError::NoDevice);
    }
    Ok((0..count).map(describe_gpu).collect())
}

/// The first of some functions that a driver, which was opened, does not have.
pub(super) fn find_missing_symbol<'a>(symbols: &[&'a CStr]) -> Option<&'a CStr> {
    // SAFETY: the library was opened before.
    let library = unsafe { sys::culib() };
    // SAFETY: only looked for, never called as this type.
    let found =
        |name: &CStr| unsafe { library.get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()) };
    symbols.iter().copied().find(|symbol| found(symbol).is_err())
}

fn describe_gpu(ordinal: c_int) -> Result<GpuDevice, ProbeError> {
    let mut device = 0;
    let mut name: [c_char; 128] = [0; 128];
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: each writes what its pointer is to, the name at most its length with a zero at the
    // end; the device is the driver's.
    unsafe {
        check_call("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
        let len = name.len() as c_int - 1;
        check_call("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), len, device))?;
        check_call("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&raw mut uuid, device))?;
    }
    let attribute = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: writes one number; the device is the driver's.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        check_call("cuDeviceGetAttribute", result).map(|()| u32::try_from(value).unwrap_or(0))
    };
    let name = name.map(|c| c as u8);
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy();
    let limits = GpuLimits {
        name: name.into_owned(),
        compute: [
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ],
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        block_shared_bytes: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        registers: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        threads: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        blocks: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
        // Two transfers per clock.
        memory_gbps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? / 1000
            * 2
            * attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?
            / 8
            / 1000,
    };
    let hex: Vec<String> = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    let parts = [part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)];
    Ok(GpuDevice { ordinal: ordinal as u32, uuid: format!("GPU-{}", parts.join("-")), limits })
}

fn check_call(call: &'static str, result: CUresult) -> Result<(), ProbeError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(ProbeError::Driver { call, code: result as u32, name: format!("{result:?}") })
}
