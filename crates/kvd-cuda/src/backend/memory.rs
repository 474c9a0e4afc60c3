//! The memory taken from a driver, and whether it still works.

use super::layers::DeviceRange;
use super::stream_order::DeviceStreams;
use super::table_arena::TableArena;
use super::wait::WaitLimit;
use super::{CudaOptions, device_error};
use crate::driver::{DeviceCopy, Driver, DriverError, EventId, GraphId, GraphNode, KernelLaunch};
use crate::plan::GpuLimits;
use kvd_compute::{BackendError, RegionHandle};
use kvd_core::ErrorCode;

/// Alignment of device addresses, bytes.
pub(super) const ALIGN: u64 = 256;

/// The device of a backend: an arena, scratch memory, tables, and the first error that stuck. All
/// of its memory is taken when it is opened.
pub(super) struct DeviceMemory {
    ordered: DeviceStreams,
    arena: u64,
    arena_bytes: u64,
    scratch: u64,
    scratch_bytes: u64,
    scratch_used: u64,
    /// Whether kernels may still use what scratch memory held.
    scratch_stale: bool,
    /// Tables that stay for as long as a model does.
    kept: TableArena,
    failure: Option<String>,
}

impl DeviceMemory {
    pub(super) fn open_device(
        driver: Box<dyn Driver>,
        options: CudaOptions,
    ) -> Result<Self, DriverError> {
        let CudaOptions { arena_bytes, scratch_bytes, table_bytes, .. } = options;
        let patience = WaitLimit(options.kernel_timeout);
        let mut ordered = DeviceStreams::open_streams(driver, options.staging_bytes, patience)?;
        let driver = ordered.driver_mut();
        let arena = driver.allocate_device(arena_bytes)?;
        let scratch =
            driver.allocate_device(scratch_bytes).inspect_err(|_| driver.free_device(arena))?;
        let kept = driver.allocate_device(table_bytes).inspect_err(|_| {
            driver.free_device(scratch);
            driver.free_device(arena);
        })?;
        Ok(Self {
            ordered,
            arena,
            arena_bytes,
            scratch,
            scratch_bytes,
            scratch_used: 0,
            scratch_stale: false,
            kept: TableArena::new(kept, table_bytes),
            failure: None,
        })
    }

    pub(super) fn load_kernels(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.ordered.driver_mut().load_image(image)
    }

    /// Loads an image that was compiled late, which must have these kernels.
    pub(super) fn load_late(&mut self, image: &[u8], kernels: &[String]) -> Result<(), String> {
        let driver = self.ordered.driver_mut();
        let loaded = driver.load_image(image);
        let found =
            loaded.and_then(|()| kernels.iter().try_for_each(|name| driver.find_kernel(name)));
        found.map_err(|error| error.to_string())
    }

    pub(super) fn description(&self) -> String {
        self.ordered.driver().description()
    }

    pub(super) fn uuid(&self) -> Option<String> {
        self.ordered.driver().uuid().map(str::to_owned)
    }

    pub(super) fn limits(&self) -> &GpuLimits {
        self.ordered.driver().limits()
    }

    pub(super) fn arena(&self) -> u64 {
        self.arena
    }

    pub(super) fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    pub(super) fn failure_message(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Calls the driver unless it has failed, and keeps an error that sticks.
    fn call_driver<T>(
        &mut self,
        call: impl FnOnce(&mut DeviceStreams) -> Result<T, DriverError>,
    ) -> Result<T, BackendError> {
        if let Some(failure) = &self.failure {
            return Err(device_error(ErrorCode::DeviceFailed, failure));
        }
        call(&mut self.ordered).map_err(|reason| match reason {
            DriverError::OutOfMemory(_) | DriverError::OutOfPinned(_) | DriverError::NoRoom(_) => {
                device_error(ErrorCode::LimitExceeded, reason)
            }
            DriverError::NoKernel(_) => device_error(ErrorCode::InvalidCodec, reason),
            DriverError::Refused { .. } => device_error(ErrorCode::InvalidArgument, reason),
            DriverError::Failed { .. } | DriverError::Hung(_) => {
                let failure = reason.to_string();
                self.failure = Some(failure.clone());
                device_error(ErrorCode::DeviceFailed, failure)
            }
        })
    }

    /// Writes to an offset of the arena.
    pub(super) fn write_arena(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "write past the arena");
        let to = self.arena + offset;
        self.call_driver(|ordered| ordered.write_ordered(to, bytes))
    }

    /// Reads from an offset of the arena.
    pub(super) fn read_arena(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "read past the arena");
        let from = self.arena + offset;
        self.call_driver(|ordered| ordered.read_ordered(from, bytes))
    }

    /// Copies within the arena, between its offsets.
    pub(super) fn copy_arena(&mut self, mut copies: Vec<DeviceCopy>) -> Result<(), BackendError> {
        for copy in &mut copies {
            assert!(copy.from + copy.bytes <= self.arena_bytes, "copy past the arena");
            copy.from += self.arena;
        }
        self.copy_in(copies)
    }

    /// Copies from any address of this device to offsets of the arena.
    pub(super) fn copy_in(&mut self, mut copies: Vec<DeviceCopy>) -> Result<(), BackendError> {
        for copy in &mut copies {
            assert!(copy.to + copy.bytes <= self.arena_bytes, "copy past the arena");
            copy.to += self.arena;
        }
        self.call_driver(|ordered| ordered.copy_ordered(&copies))
    }

    /// Stops all further calls, because of this fault.
    pub(super) fn fail_with(&mut self, why: &str) {
        self.failure.get_or_insert_with(|| why.to_owned());
    }

    /// Whether so much has room beside the arena.
    pub(super) fn has_room(&self, bytes: u64) -> Result<(), BackendError> {
        self.kept.has_room(bytes).map_err(|full| device_error(ErrorCode::LimitExceeded, full))
    }

    /// Takes memory for what stays, beside the arena.
    pub(super) fn reserve_table(&mut self, bytes: u64) -> Result<u64, BackendError> {
        self.kept.allocate(bytes).map_err(|full| device_error(ErrorCode::LimitExceeded, full))
    }

    /// Copies lasting data to its place, after all kernels that may still read the old content.
    pub(super) fn write_table(
        &mut self,
        to: DeviceRange,
        bytes: &[u8],
    ) -> Result<u64, BackendError> {
        if bytes.len() as u64 > to.bytes {
            let message = format!("{} bytes of tables in room for {}", bytes.len(), to.bytes);
            return Err(device_error(ErrorCode::Internal, message));
        }
        self.call_driver(|ordered| ordered.write_ordered(to.address, bytes))?;
        Ok(to.address)
    }

    /// Gives back memory that [`DeviceMemory::reserve`] took, once nothing uses it any more.
    pub(super) fn free_table(&mut self, address: u64) {
        self.settle_device();
        self.kept.release(address);
    }

    /// Waits until nothing is under way. Of a failure, old or new, the next call tells.
    fn settle_device(&mut self) {
        let _ = self.call_driver(DeviceStreams::wait_for_all);
    }

    /// Opens memory of another process.
    pub(super) fn open_shared(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<u64, BackendError> {
        self.call_driver(|ordered| ordered.driver_mut().open_shared(handle, bytes))
    }

    pub(super) fn close_shared(&mut self, address: u64) {
        self.settle_device();
        self.ordered.driver_mut().close_shared(address);
    }

    /// Whether a kernel is there.
    pub(super) fn find_kernel(&mut self, kernel: &str) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.driver_mut().find_kernel(kernel))
    }

    /// Makes an event that other processes may wait for.
    pub(super) fn share_event(
        &mut self,
    ) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), BackendError> {
        self.call_driver(|ordered| ordered.driver_mut().share_event())
    }

    pub(super) fn record_event(&mut self, event: EventId) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.record_event(event))
    }

    pub(super) fn destroy_event(&mut self, event: EventId) {
        self.ordered.driver_mut().destroy_event(event);
    }

    /// Writes to memory of another process; the bytes are there when it returns.
    pub(super) fn write_shared(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.call_driver(|ordered| {
            ordered.write_ordered(to, bytes).and_then(|()| ordered.wait_for_all())
        })
    }

    /// Gives all scratch memory back.
    pub(super) fn clear_scratch(&mut self) {
        (self.scratch_used, self.scratch_stale) = (0, true);
    }

    /// Scratch memory that is taken.
    pub(super) fn scratch_used(&self) -> u64 {
        self.scratch_used
    }

    /// Gives scratch memory back but for the first `bytes`.
    pub(super) fn keep_scratch(&mut self, bytes: u64) {
        self.scratch_used = bytes;
    }

    /// Takes scratch memory that kernels may still use: the next write to it waits for them.
    pub(super) fn reuse_scratch(&mut self, bytes: u64) {
        (self.scratch_used, self.scratch_stale) = (bytes, true);
    }

    /// Takes scratch memory; `None` when too little is left.
    pub(super) fn take_scratch(&mut self, bytes: u64) -> Option<u64> {
        let start = self.scratch_used;
        let end = start.checked_add(bytes)?.checked_next_multiple_of(ALIGN)?;
        if end > self.scratch_bytes {
            return None;
        }
        self.scratch_used = end;
        Some(self.scratch + start)
    }

    /// Writes to scratch memory that no kernel was told of since it was taken, all of what
    /// [`DeviceMemory::scratch`] gave at once. The first since scratch memory was given back comes
    /// after the kernels that may still use what it held.
    pub(super) fn upload_scratch(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        if std::mem::take(&mut self.scratch_stale) {
            self.call_driver(DeviceStreams::follow_kernels)?;
        }
        self.call_driver(|ordered| ordered.upload_aligned(to, bytes))
    }

    /// Reads scratch memory that a kernel was told of: after all kernels before.
    pub(super) fn rewrite_scratch(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.write_ordered(to, bytes))
    }

    /// Reads scratch memory. What is uploaded to scratch memory from then on waits for no kernel:
    /// all before have ended, and those after use what was taken since it was given back.
    pub(super) fn download_scratch(
        &mut self,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.read_ordered(from, bytes))?;
        // Nothing is waited for where nothing is read.
        self.scratch_stale &= bytes.is_empty();
        Ok(())
    }

    pub(super) fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, BackendError> {
        self.call_driver(|ordered| ordered.driver_mut().build_graph(nodes))
    }

    pub(super) fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.driver_mut().update_graph(graph, node, launch))
    }

    pub(super) fn launch_graph(&mut self, graph: GraphId) -> Result<(), BackendError> {
        self.call_driver(|ordered| ordered.launch_graph(graph))
    }

    pub(super) fn destroy_graph(&mut self, graph: GraphId) {
        self.settle_device();
        self.ordered.driver_mut().destroy_graph(graph);
    }

    pub(super) fn launch_kernel(&mut self, launch: KernelLaunch<'_>) -> Result<(), BackendError> {
        if launch.blocks == 0 {
            return Ok(());
        }
        self.call_driver(|ordered| ordered.launch_ordered(launch))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.settle_device();
        let driver = self.ordered.driver_mut();
        driver.free_device(self.kept.start());
        driver.free_device(self.scratch);
        driver.free_device(self.arena);
    }
}
