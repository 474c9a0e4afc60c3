//! The real driver: one context and two streams of one GPU, by the C functions that the probe has
//! found. Not yet run on a GPU.
//!
//! Unsafe code: calls of the driver's C functions. Handles are those that it gave, used by one
//! owner at a time, and given back once, in `drop`.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::graphs::{CudaGraphs, KernelNode};
use super::modules::{LoadedModules, check_memory};
use super::pinned::{CudaEvents, PinnedMemory};
use super::shared::{OpenMappings, SharedMapping};
use super::{
    DeviceCopy, DeviceStream, Driver, DriverError, EventId, GpuDevice, GraphId, GraphNode,
    KernelLaunch, PinnedId, PinnedRange,
};
use crate::plan::GpuLimits;
use cudarc::driver::sys::{self, CUresult};
use kvd_compute::RegionHandle;
use std::ffi::c_void;
use std::ptr;

/// A GPU, opened.
pub struct CudaDriver {
    gpu: GpuDevice,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// By [`DeviceStream`].
    streams: [sys::CUstream; 2],
    pinned: PinnedMemory,
    events: CudaEvents,
    graphs: CudaGraphs,
    modules: LoadedModules,
    shared: OpenMappings,
    /// Whether its work does not end.
    abandoned: bool,
}

// SAFETY: a context may be used from any thread that has made it current, which every call does
// first; the other handles belong to the context.
unsafe impl Send for CudaDriver {}

impl CudaDriver {
    /// Opens a GPU that [`super::probe_devices`] has found.
    ///
    /// # Errors
    /// When the driver gives no context or stream.
    pub fn open_gpu(gpu: GpuDevice) -> Result<Self, DriverError> {
        let mut driver = Self {
            gpu,
            device: 0,
            context: ptr::null_mut(),
            streams: [ptr::null_mut(); 2],
            pinned: PinnedMemory::default(),
            events: CudaEvents::default(),
            graphs: CudaGraphs::default(),
            modules: LoadedModules::default(),
            shared: OpenMappings::default(),
            abandoned: false,
        };
        // SAFETY: each call writes the handle that its pointer is to; the probe has initialised the
        // driver and counted the GPU. What was taken before an error is given back by `drop`.
        unsafe {
            check_call(
                "cuDeviceGet",
                sys::cuDeviceGet(&raw mut driver.device, driver.gpu.ordinal as i32),
            )?;
            let context = sys::cuDevicePrimaryCtxRetain(&raw mut driver.context, driver.device);
            check_call("cuDevicePrimaryCtxRetain", context)?;
            driver.bind_context()?;
            for stream in &mut driver.streams {
                // 1: does not wait for the stream that other code in the process may use.
                check_call("cuStreamCreate", sys::cuStreamCreate(stream, 1))?;
            }
        }
        Ok(driver)
    }

    /// Makes the context this thread's.
    fn bind_context(&self) -> Result<(), DriverError> {
        if self.abandoned {
            let reason = "work of the device does not end".to_owned();
            return Err(DriverError::Failed { call: "cuCtxSetCurrent", reason });
        }
        // SAFETY: the context was retained and is not yet released.
        check_call("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn raw_stream(&self, stream: DeviceStream) -> sys::CUstream {
        self.streams[stream as usize]
    }
}

pub(super) fn check_call(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DriverError::Failed { call, reason: format!("{result:?} ({})", result as u32) })
}

impl Driver for CudaDriver {
    fn description(&self) -> String {
        format!("cuda:{} ({}, {})", self.gpu.ordinal, self.gpu.limits.name, self.gpu.uuid)
    }

    fn uuid(&self) -> Option<&str> {
        Some(&self.gpu.uuid)
    }

    fn limits(&self) -> &GpuLimits {
        &self.gpu.limits
    }

    fn load_image(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.bind_context()?;
        self.modules.load_image(image)
    }

    fn find_kernel(&mut self, kernel: &str) -> Result<(), DriverError> {
        self.bind_context()?;
        self.modules.find_kernel(kernel)
    }

    fn allocate_device(&mut self, bytes: u64) -> Result<u64, DriverError> {
        self.bind_context()?;
        let mut address = 0;
        // SAFETY: writes the address.
        match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1) as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DriverError::OutOfMemory(bytes)),
            result => check_call("cuMemAlloc", result).map(|()| address),
        }
    }

    fn free_device(&mut self, address: u64) {
        // SAFETY: an address that `alloc` gave. An error is one that stuck before; there is nobody
        // to tell, and the context takes its memory with it.
        let _ = self.bind_context().map(|()| unsafe { sys::cuMemFree_v2(address) });
    }

    fn allocate_pinned(&mut self, bytes: u64) -> Result<PinnedId, DriverError> {
        self.bind_context()?;
        self.pinned.allocate_pinned(bytes)
    }

    fn free_pinned(&mut self, memory: PinnedId) {
        let _ = self.bind_context().map(|()| self.pinned.give_back(memory));
    }

    fn write_pinned(&mut self, memory: PinnedId, start: u64, bytes: &[u8]) {
        self.pinned.write_bytes(memory, start, bytes);
    }

    fn read_pinned(&mut self, memory: PinnedId, start: u64, bytes: &mut [u8]) {
        self.pinned.read_bytes(memory, start, bytes);
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        self.bind_context()?;
        self.events.create_event()
    }

    fn share_event(&mut self) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), DriverError> {
        self.bind_context()?;
        self.events.create_shared_event()
    }

    fn destroy_event(&mut self, event: EventId) {
        let _ = self.bind_context().map(|()| self.events.remove_event(event));
    }

    fn record_event(&mut self, event: EventId, stream: DeviceStream) -> Result<(), DriverError> {
        self.bind_context()?;
        let (event, stream) = (self.events.find_event(event), self.raw_stream(stream));
        // SAFETY: an event and a stream of this context.
        check_call("cuEventRecord", unsafe { sys::cuEventRecord(event, stream) })
    }

    fn wait_event(&mut self, stream: DeviceStream, event: EventId) -> Result<(), DriverError> {
        self.bind_context()?;
        let (event, stream) = (self.events.find_event(event), self.raw_stream(stream));
        // SAFETY: an event and a stream of this context; no flags.
        check_call("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError> {
        self.bind_context()?;
        let event = self.events.find_event(event);
        // SAFETY: an event of this context.
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check_call("cuEventQuery", result).map(|()| true),
        }
    }

    fn abandon_device(&mut self) {
        self.abandoned = true;
    }

    fn copy_to_device(&mut self, to: u64, from: PinnedRange) -> Result<(), DriverError> {
        self.bind_context()?;
        let (source, stream) = (self.pinned.find_range(from), self.raw_stream(DeviceStream::Copy));
        // SAFETY: the source is in pinned memory that stays as it is until an event behind the copy
        // was waited for, the caller's promise; so is it that the target is its own.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, source.cast(), from.bytes as usize, stream) };
        check_call("cuMemcpyHtoD", result)
    }

    fn copy_to_host(&mut self, from: u64, to: PinnedRange) -> Result<(), DriverError> {
        self.bind_context()?;
        let (target, stream) = (self.pinned.find_range(to), self.raw_stream(DeviceStream::Compute));
        // SAFETY: as for `write`, the other way.
        let result =
            unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), from, to.bytes as usize, stream) };
        check_call("cuMemcpyDtoH", result)
    }

    fn copy_on_device(&mut self, copies: &[DeviceCopy]) -> Result<(), DriverError> {
        self.bind_context()?;
        let stream = self.raw_stream(DeviceStream::Compute);
        if let [DeviceCopy { from, to, bytes }] = *copies {
            // SAFETY: the caller owns both ranges.
            let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) };
            return check_call("cuMemcpyDtoD", result);
        }
        // The driver refuses a copy of nothing among others.
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let mut to: Vec<_> = copies.clone().map(|copy| copy.to).collect();
        let mut from: Vec<_> = copies.clone().map(|copy| copy.from).collect();
        let mut bytes: Vec<_> = copies.map(|copy| copy.bytes as usize).collect();
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: all zeros is a value of this plain struct: no hints, no flags.
        let mut order: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        order.srcAccessOrder = sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut first = 0;
        // SAFETY: three lists of one length, and attributes from the first on; the driver has read
        // them when it returns. The caller owns the ranges.
        let result = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &raw mut order,
                &raw mut first,
                1,
                stream,
            )
        };
        check_call("cuMemcpyBatchAsync", result)
    }

    fn launch_kernel(&mut self, launch: KernelLaunch<'_>) -> Result<(), DriverError> {
        self.bind_context()?;
        let function = self.modules.function_for(&launch)?;
        let mut parameters = [launch.parameters.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the kernel's one parameter is copied before the call returns; what the kernel
        // does with the addresses in it is the caller's promise.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                launch.blocks,
                1,
                1,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.raw_stream(DeviceStream::Compute),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check_memory(launch.kernel, result)?;
        check_call("cuLaunchKernel", result)
    }

    fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, DriverError> {
        self.bind_context()?;
        let mut found = Vec::with_capacity(nodes.len());
        for GraphNode { stage, launch } in nodes {
            let function = self.modules.function_for(launch)?;
            found.push(KernelNode { stage: *stage, function, launch: *launch });
        }
        self.graphs.build_graph(&found, self.raw_stream(DeviceStream::Compute))
    }

    fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), DriverError> {
        self.bind_context()?;
        self.modules.function_for(&launch)?;
        self.graphs.update_node(graph, node, &launch)
    }

    fn launch_graph(&mut self, graph: GraphId) -> Result<(), DriverError> {
        self.bind_context()?;
        let result = self.graphs.launch_graph(graph, self.raw_stream(DeviceStream::Compute))?;
        check_call("cuGraphLaunch", result)
    }

    fn destroy_graph(&mut self, graph: GraphId) {
        let _ = self.bind_context().map(|()| self.graphs.destroy_graph(graph));
    }

    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError> {
        self.bind_context()?;
        SharedMapping::open_handle(&handle, bytes, self.device)
            .map(|shared| self.shared.insert_mapping(shared))
    }

    fn close_shared(&mut self, address: u64) {
        let ended = self.shared.remove_mapping(address);
        if self.bind_context().is_ok() {
            ended.into_iter().for_each(|shared| shared.close_mapping());
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if self.context.is_null() || self.bind_context().is_err() {
            return;
        }
        self.shared.take_all().for_each(|shared| shared.close_mapping());
        self.graphs.clear();
        self.events.clear();
        self.pinned.clear();
        self.modules.clear();
        // SAFETY: every handle was given by the driver and is given back once. Errors that stuck
        // come back here again, and nothing is left to do about them.
        unsafe {
            for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
                let _ = sys::cuStreamDestroy_v2(stream);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
