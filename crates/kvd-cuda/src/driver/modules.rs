//! Kernels that were loaded, by name. Not yet run on a GPU.
//!
//! Unsafe code: calls of the driver's C functions, in a context that the caller has made current.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::cuda::check_call;
use super::shared::check_call as refuse;
use super::{DriverError, KernelLaunch};
use cudarc::driver::sys::{self, CUfunction_attribute, CUresult};
use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;

/// Shared memory that a block has without asking, bytes.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// Percent of the memory that L1 cache and shared memory have in common, for shared memory: plans
/// count on all of it, and the driver's own choice may leave room for fewer thread blocks. The same
/// for every kernel, because a change between two of them waits for the first.
const SHARED_PERCENT: i32 = 100;

/// A kernel, and the shared memory that its launches may ask for.
#[derive(Clone, Copy)]
struct KernelFunction {
    function: sys::CUfunction,
    shared_bytes: u32,
}

/// Images that were loaded, and kernels of them that were asked for.
#[derive(Default)]
pub(super) struct LoadedModules {
    modules: Vec<sys::CUmodule>,
    functions: HashMap<String, KernelFunction>,
}

impl LoadedModules {
    /// Loads an image with all of its kernels.
    pub(super) fn load_image(&mut self, image: &[u8]) -> Result<(), DriverError> {
        // The driver reads words of the image in place.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
        let mut module = ptr::null_mut();
        // SAFETY: a fat binary says its own length; the handle is written.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, aligned.as_ptr().cast()) };
        check_memory("kernels", result)?;
        refuse("cuModuleLoadData", result)?;
        load_all(module).inspect_err(|_| unload_module(module))?;
        self.modules.push(module);
        Ok(())
    }

    fn kernel_function(&mut self, name: &str) -> Result<KernelFunction, DriverError> {
        if let Some(function) = self.functions.get(name) {
            return Ok(*function);
        }
        let unknown = || DriverError::NoKernel(name.to_owned());
        let text = CString::new(name).map_err(|_| unknown())?;
        for module in &self.modules {
            let mut function = ptr::null_mut();
            // SAFETY: a loaded module, a name that ends with a zero, a handle to write.
            let found =
                unsafe { sys::cuModuleGetFunction(&raw mut function, *module, text.as_ptr()) };
            if found == CUresult::CUDA_ERROR_NOT_FOUND {
                continue;
            }
            check_memory(name, found)?;
            check_call("cuModuleGetFunction", found)?;
            let share = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            set_attribute(function, share, SHARED_PERCENT)?;
            let function = KernelFunction { function, shared_bytes: SHARED_BYTES_DEFAULT };
            self.functions.insert(name.to_owned(), function);
            return Ok(function);
        }
        Err(unknown())
    }

    /// Whether a kernel is there.
    pub(super) fn find_kernel(&mut self, name: &str) -> Result<(), DriverError> {
        self.kernel_function(name).map(|_| ())
    }

    /// A kernel that may have as much shared memory as a launch asks for. What it may have only
    /// grows, so that a launch that is kept in a graph stays allowed.
    pub(super) fn function_for(
        &mut self,
        launch: &KernelLaunch<'_>,
    ) -> Result<sys::CUfunction, DriverError> {
        let KernelFunction { function, shared_bytes } = self.kernel_function(launch.kernel)?;
        if launch.shared_bytes > shared_bytes {
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            set_attribute(function, most, launch.shared_bytes as i32)?;
            let known = KernelFunction { function, shared_bytes: launch.shared_bytes };
            self.functions.insert(launch.kernel.to_owned(), known);
        }
        Ok(function)
    }

    /// Gives everything back.
    pub(super) fn clear(&mut self) {
        self.functions.clear();
        self.modules.drain(..).for_each(unload_module);
    }
}

/// That there is no memory for something is no failure of the device.
pub(super) fn check_memory(what: &str, result: CUresult) -> Result<(), DriverError> {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DriverError::NoRoom(what.to_owned())),
        _ => Ok(()),
    }
}

/// Has the driver load every kernel of a module. By itself it loads each when it is first used, and
/// takes device memory for it then, of which the pool may have left none.
fn load_all(module: sys::CUmodule) -> Result<(), DriverError> {
    let mut count = 0;
    // SAFETY: a loaded module; writes a number.
    let result = unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) };
    refuse("cuModuleGetFunctionCount", result)?;
    let mut functions: Vec<sys::CUfunction> = vec![ptr::null_mut(); count as usize];
    // SAFETY: writes so many handles at most.
    let result = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) };
    check_memory("kernels", result)?;
    refuse("cuModuleEnumerateFunctions", result)?;
    for function in functions {
        // SAFETY: a function of a loaded module.
        let result = unsafe { sys::cuFuncLoad(function) };
        check_memory("kernels", result)?;
        refuse("cuFuncLoad", result)?;
    }
    Ok(())
}

fn unload_module(module: sys::CUmodule) {
    // SAFETY: loaded, and given back once. An error is one that stuck before.
    let _ = unsafe { sys::cuModuleUnload(module) };
}

/// Sets an attribute of a function that a loaded module gave.
fn set_attribute(
    function: sys::CUfunction,
    attribute: CUfunction_attribute,
    value: i32,
) -> Result<(), DriverError> {
    // SAFETY: a function of a loaded module, as this function asks for; modules live as long as the
    // driver.
    let result = unsafe { sys::cuFuncSetAttribute(function, attribute, value) };
    // Too much shared memory was asked for, and nothing was launched.
    if result == CUresult::CUDA_ERROR_INVALID_VALUE {
        let reason = format!("{attribute:?} {value}");
        return Err(DriverError::Refused { call: "cuFuncSetAttribute", reason });
    }
    check_call("cuFuncSetAttribute", result)
}
