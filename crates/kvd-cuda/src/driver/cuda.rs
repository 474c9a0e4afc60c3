//! The real driver: one context and two streams of one GPU, by the C functions that the probe has
//! found. Not yet run on a GPU.
//!
//! Unsafe code: calls of the driver's C functions. Handles are those that it gave, used by one
//! owner at a time, and given back once, in `drop`.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::graphs::Graphs;
use super::modules::{Modules, room};
use super::pinned::{Events, PinnedMemory};
use super::shared::{Opened, Shared};
use super::{
    DeviceCopy, Driver, DriverError, EventId, Gpu, GraphId, GraphNode, KernelLaunch, PinnedId,
    PinnedRange, Stream,
};
use crate::plan::Limits;
use cudarc::driver::sys::{self, CUresult};
use kvd_compute::RegionHandle;
use std::ffi::c_void;
use std::ptr;

/// A GPU, opened.
pub struct CudaDriver {
    gpu: Gpu,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// By [`Stream`].
    streams: [sys::CUstream; 2],
    pinned: PinnedMemory,
    events: Events,
    graphs: Graphs,
    modules: Modules,
    shared: Opened,
    /// Whether its work does not end.
    abandoned: bool,
}

// SAFETY: a context may be used from any thread that has made it current, which every call does
// first; the other handles belong to the context.
unsafe impl Send for CudaDriver {}

impl CudaDriver {
    /// Opens a GPU that [`super::devices`] has found.
    ///
    /// # Errors
    /// When the driver gives no context or stream.
    pub fn open(gpu: Gpu) -> Result<Self, DriverError> {
        let mut driver = Self {
            gpu,
            device: 0,
            context: ptr::null_mut(),
            streams: [ptr::null_mut(); 2],
            pinned: PinnedMemory::default(),
            events: Events::default(),
            graphs: Graphs::default(),
            modules: Modules::default(),
            shared: Opened::default(),
            abandoned: false,
        };
        // SAFETY: each call writes the handle that its pointer is to; the probe has initialised the
        // driver and counted the GPU. What was taken before an error is given back by `drop`.
        unsafe {
            check(
                "cuDeviceGet",
                sys::cuDeviceGet(&raw mut driver.device, driver.gpu.ordinal as i32),
            )?;
            let context = sys::cuDevicePrimaryCtxRetain(&raw mut driver.context, driver.device);
            check("cuDevicePrimaryCtxRetain", context)?;
            driver.bind()?;
            for stream in &mut driver.streams {
                // 1: does not wait for the stream that other code in the process may use.
                check("cuStreamCreate", sys::cuStreamCreate(stream, 1))?;
            }
        }
        Ok(driver)
    }

    /// Makes the context this thread's.
    fn bind(&self) -> Result<(), DriverError> {
        if self.abandoned {
            let reason = "work of the device does not end".to_owned();
            return Err(DriverError::Failed { call: "cuCtxSetCurrent", reason });
        }
        // SAFETY: the context was retained and is not yet released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }
}

pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
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

    fn limits(&self) -> &Limits {
        &self.gpu.limits
    }

    fn load(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.bind()?;
        self.modules.load(image)
    }

    fn find(&mut self, kernel: &str) -> Result<(), DriverError> {
        self.bind()?;
        self.modules.find(kernel)
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, DriverError> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: writes the address.
        match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1) as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DriverError::OutOfMemory(bytes)),
            result => check("cuMemAlloc", result).map(|()| address),
        }
    }

    fn free(&mut self, address: u64) {
        // SAFETY: an address that `alloc` gave. An error is one that stuck before; there is nobody
        // to tell, and the context takes its memory with it.
        let _ = self.bind().map(|()| unsafe { sys::cuMemFree_v2(address) });
    }

    fn pin(&mut self, bytes: u64) -> Result<PinnedId, DriverError> {
        self.bind()?;
        self.pinned.take(bytes)
    }

    fn unpin(&mut self, memory: PinnedId) {
        let _ = self.bind().map(|()| self.pinned.give_back(memory));
    }

    fn fill(&mut self, memory: PinnedId, start: u64, bytes: &[u8]) {
        self.pinned.fill(memory, start, bytes);
    }

    fn take(&mut self, memory: PinnedId, start: u64, bytes: &mut [u8]) {
        self.pinned.read(memory, start, bytes);
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        self.bind()?;
        self.events.create()
    }

    fn share_event(&mut self) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), DriverError> {
        self.bind()?;
        self.events.share()
    }

    fn destroy_event(&mut self, event: EventId) {
        let _ = self.bind().map(|()| self.events.destroy(event));
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<(), DriverError> {
        self.bind()?;
        let (event, stream) = (self.events.find(event), self.stream(stream));
        // SAFETY: an event and a stream of this context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event, stream) })
    }

    fn wait(&mut self, stream: Stream, event: EventId) -> Result<(), DriverError> {
        self.bind()?;
        let (event, stream) = (self.events.find(event), self.stream(stream));
        // SAFETY: an event and a stream of this context; no flags.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError> {
        self.bind()?;
        let event = self.events.find(event);
        // SAFETY: an event of this context.
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }

    fn write(&mut self, to: u64, from: PinnedRange) -> Result<(), DriverError> {
        self.bind()?;
        let (source, stream) = (self.pinned.find(from), self.stream(Stream::Copy));
        // SAFETY: the source is in pinned memory that stays as it is until an event behind the copy
        // was waited for, the caller's promise; so is it that the target is its own.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, source.cast(), from.bytes as usize, stream) };
        check("cuMemcpyHtoD", result)
    }

    fn read(&mut self, from: u64, to: PinnedRange) -> Result<(), DriverError> {
        self.bind()?;
        let (target, stream) = (self.pinned.find(to), self.stream(Stream::Compute));
        // SAFETY: as for `write`, the other way.
        let result =
            unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), from, to.bytes as usize, stream) };
        check("cuMemcpyDtoH", result)
    }

    fn copy(&mut self, copies: &[DeviceCopy]) -> Result<(), DriverError> {
        self.bind()?;
        let stream = self.stream(Stream::Compute);
        if let [DeviceCopy { from, to, bytes }] = *copies {
            // SAFETY: the caller owns both ranges.
            let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) };
            return check("cuMemcpyDtoD", result);
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
        check("cuMemcpyBatchAsync", result)
    }

    fn launch(&mut self, launch: KernelLaunch<'_>) -> Result<(), DriverError> {
        self.bind()?;
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
                self.stream(Stream::Compute),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        room(launch.kernel, result)?;
        check("cuLaunchKernel", result)
    }

    fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, DriverError> {
        self.bind()?;
        let mut found = Vec::with_capacity(nodes.len());
        for GraphNode { stage, launch } in nodes {
            found.push((*stage, self.modules.function_for(launch)?, *launch));
        }
        self.graphs.build(&found, self.stream(Stream::Compute))
    }

    fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), DriverError> {
        self.bind()?;
        self.modules.function_for(&launch)?;
        self.graphs.update(graph, node, &launch)
    }

    fn launch_graph(&mut self, graph: GraphId) -> Result<(), DriverError> {
        self.bind()?;
        let result = self.graphs.launch(graph, self.stream(Stream::Compute))?;
        check("cuGraphLaunch", result)
    }

    fn destroy_graph(&mut self, graph: GraphId) {
        let _ = self.bind().map(|()| self.graphs.destroy(graph));
    }

    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError> {
        self.bind()?;
        Shared::open(&handle, bytes, self.device).map(|shared| self.shared.put(shared))
    }

    fn close_shared(&mut self, address: u64) {
        let ended = self.shared.take(address);
        if self.bind().is_ok() {
            ended.into_iter().for_each(|shared| shared.close());
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if self.context.is_null() || self.bind().is_err() {
            return;
        }
        self.shared.take_all().for_each(|shared| shared.close());
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
