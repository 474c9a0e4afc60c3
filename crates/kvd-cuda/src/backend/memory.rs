//! The memory taken from a driver, and whether it still works.

use super::kept::Kept;
use super::layers::Place;
use super::order::Ordered;
use super::wait::Patience;
use super::{CudaOptions, error};
use crate::driver::{DeviceCopy, Driver, DriverError, EventId, GraphId, GraphNode, KernelLaunch};
use crate::plan::Limits;
use kvd_compute::{BackendError, RegionHandle};
use kvd_core::ErrorCode;

/// What a device address is aligned to.
pub(super) const ALIGN: u64 = 256;

/// The device of a backend: an arena, scratch memory, tables, and the first error that stuck. All
/// of its memory is taken when it is opened.
pub(super) struct Device {
    ordered: Ordered,
    arena: u64,
    arena_bytes: u64,
    scratch: u64,
    scratch_bytes: u64,
    scratch_used: u64,
    /// Whether kernels may still use what scratch memory held.
    scratch_stale: bool,
    /// What stays for as long as a model does.
    kept: Kept,
    failure: Option<String>,
}

impl Device {
    pub(super) fn open(driver: Box<dyn Driver>, options: CudaOptions) -> Result<Self, DriverError> {
        let CudaOptions { arena_bytes, scratch_bytes, table_bytes, .. } = options;
        let patience = Patience(options.kernel_timeout);
        let mut ordered = Ordered::open(driver, options.staging_bytes, patience)?;
        let driver = ordered.driver_mut();
        let arena = driver.alloc(arena_bytes)?;
        let scratch = driver.alloc(scratch_bytes).inspect_err(|_| driver.free(arena))?;
        let kept = driver.alloc(table_bytes).inspect_err(|_| {
            driver.free(scratch);
            driver.free(arena);
        })?;
        Ok(Self {
            ordered,
            arena,
            arena_bytes,
            scratch,
            scratch_bytes,
            scratch_used: 0,
            scratch_stale: false,
            kept: Kept::new(kept, table_bytes),
            failure: None,
        })
    }

    pub(super) fn load(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.ordered.driver_mut().load(image)
    }

    /// Loads an image that was compiled late, which must have these kernels.
    pub(super) fn load_late(&mut self, image: &[u8], kernels: &[String]) -> Result<(), String> {
        let driver = self.ordered.driver_mut();
        let loaded = driver.load(image);
        let found = loaded.and_then(|()| kernels.iter().try_for_each(|name| driver.find(name)));
        found.map_err(|error| error.to_string())
    }

    pub(super) fn description(&self) -> String {
        self.ordered.driver().description()
    }

    pub(super) fn uuid(&self) -> Option<String> {
        self.ordered.driver().uuid().map(str::to_owned)
    }

    pub(super) fn limits(&self) -> &Limits {
        self.ordered.driver().limits()
    }

    pub(super) fn arena(&self) -> u64 {
        self.arena
    }

    pub(super) fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Calls the driver unless it has failed, and keeps an error that sticks.
    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut Ordered) -> Result<T, DriverError>,
    ) -> Result<T, BackendError> {
        if let Some(failure) = &self.failure {
            return Err(error(ErrorCode::DeviceFailed, failure));
        }
        call(&mut self.ordered).map_err(|reason| match reason {
            DriverError::OutOfMemory(_) | DriverError::OutOfPinned(_) | DriverError::NoRoom(_) => {
                error(ErrorCode::LimitExceeded, reason)
            }
            DriverError::NoKernel(_) => error(ErrorCode::InvalidCodec, reason),
            DriverError::Refused { .. } => error(ErrorCode::InvalidArgument, reason),
            DriverError::Failed { .. } | DriverError::Hung(_) => {
                let failure = reason.to_string();
                self.failure = Some(failure.clone());
                error(ErrorCode::DeviceFailed, failure)
            }
        })
    }

    /// Writes to an offset of the arena.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "write past the arena");
        let to = self.arena + offset;
        self.call(|ordered| ordered.write(to, bytes))
    }

    /// Reads from an offset of the arena.
    pub(super) fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        assert!(offset + bytes.len() as u64 <= self.arena_bytes, "read past the arena");
        let from = self.arena + offset;
        self.call(|ordered| ordered.read(from, bytes))
    }

    /// Copies within the arena, between its offsets.
    pub(super) fn copy(&mut self, mut copies: Vec<DeviceCopy>) -> Result<(), BackendError> {
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
        self.call(|ordered| ordered.copy(&copies))
    }

    /// Calls nothing any more, because of what was found.
    pub(super) fn fail(&mut self, why: &str) {
        self.failure.get_or_insert_with(|| why.to_owned());
    }

    /// Whether so much has room beside the arena.
    pub(super) fn has_room(&self, bytes: u64) -> Result<(), BackendError> {
        self.kept.has_room(bytes).map_err(|full| error(ErrorCode::LimitExceeded, full))
    }

    /// Takes memory for what stays, beside the arena.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<u64, BackendError> {
        self.kept.take(bytes).map_err(|full| error(ErrorCode::LimitExceeded, full))
    }

    /// Brings what stays to its place, after all kernels that may still read what it held.
    pub(super) fn keep(&mut self, to: Place, bytes: &[u8]) -> Result<u64, BackendError> {
        if bytes.len() as u64 > to.bytes {
            let message = format!("{} bytes of tables in room for {}", bytes.len(), to.bytes);
            return Err(error(ErrorCode::Internal, message));
        }
        self.call(|ordered| ordered.write(to.address, bytes))?;
        Ok(to.address)
    }

    /// Gives back memory that [`Device::reserve`] took, once nothing uses it any more.
    pub(super) fn free(&mut self, address: u64) {
        self.settle();
        self.kept.give(address);
    }

    /// Waits until nothing is under way. Of a failure, old or new, the next call tells.
    fn settle(&mut self) {
        let _ = self.call(Ordered::settle);
    }

    /// Opens memory of another process.
    pub(super) fn open_shared(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<u64, BackendError> {
        self.call(|ordered| ordered.driver_mut().open_shared(handle, bytes))
    }

    pub(super) fn close_shared(&mut self, address: u64) {
        self.settle();
        self.ordered.driver_mut().close_shared(address);
    }

    /// Whether a kernel is there.
    pub(super) fn find(&mut self, kernel: &str) -> Result<(), BackendError> {
        self.call(|ordered| ordered.driver_mut().find(kernel))
    }

    /// Makes an event that other processes may wait for.
    pub(super) fn share_event(
        &mut self,
    ) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), BackendError> {
        self.call(|ordered| ordered.driver_mut().share_event())
    }

    pub(super) fn record(&mut self, event: EventId) -> Result<(), BackendError> {
        self.call(|ordered| ordered.record(event))
    }

    pub(super) fn destroy_event(&mut self, event: EventId) {
        self.ordered.driver_mut().destroy_event(event);
    }

    /// Writes to memory of another process; the bytes are there when it returns.
    pub(super) fn write_shared(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.call(|ordered| ordered.write(to, bytes).and_then(|()| ordered.settle()))
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

    /// The same of memory that kernels may still use: what is written there next waits for them.
    pub(super) fn reuse_scratch(&mut self, bytes: u64) {
        (self.scratch_used, self.scratch_stale) = (bytes, true);
    }

    /// Takes scratch memory; `None` when too little is left.
    pub(super) fn scratch(&mut self, bytes: u64) -> Option<u64> {
        let start = self.scratch_used;
        let end = start.checked_add(bytes)?.checked_next_multiple_of(ALIGN)?;
        if end > self.scratch_bytes {
            return None;
        }
        self.scratch_used = end;
        Some(self.scratch + start)
    }

    /// Writes to scratch memory that no kernel was told of since it was taken, all of what
    /// [`Device::scratch`] gave at once. The first since scratch memory was given back comes after
    /// the kernels that may still use what it held.
    pub(super) fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        if std::mem::take(&mut self.scratch_stale) {
            self.call(Ordered::follow_kernels)?;
        }
        self.call(|ordered| ordered.upload_aligned(to, bytes))
    }

    /// The same where a kernel was told of it: after all kernels before.
    pub(super) fn rewrite(&mut self, to: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.call(|ordered| ordered.write(to, bytes))
    }

    /// Reads scratch memory. What is uploaded to scratch memory from then on waits for no kernel:
    /// all before have ended, and those after use what was taken since it was given back.
    pub(super) fn download(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.call(|ordered| ordered.read(from, bytes))?;
        // Nothing is waited for where nothing is read.
        self.scratch_stale &= bytes.is_empty();
        Ok(())
    }

    pub(super) fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, BackendError> {
        self.call(|ordered| ordered.driver_mut().build_graph(nodes))
    }

    pub(super) fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), BackendError> {
        self.call(|ordered| ordered.driver_mut().update_graph(graph, node, launch))
    }

    pub(super) fn launch_graph(&mut self, graph: GraphId) -> Result<(), BackendError> {
        self.call(|ordered| ordered.launch_graph(graph))
    }

    pub(super) fn destroy_graph(&mut self, graph: GraphId) {
        self.settle();
        self.ordered.driver_mut().destroy_graph(graph);
    }

    pub(super) fn launch(&mut self, launch: KernelLaunch<'_>) -> Result<(), BackendError> {
        if launch.blocks == 0 {
            return Ok(());
        }
        self.call(|ordered| ordered.launch(launch))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.settle();
        let driver = self.ordered.driver_mut();
        driver.free(self.kept.start());
        driver.free(self.scratch);
        driver.free(self.arena);
    }
}
