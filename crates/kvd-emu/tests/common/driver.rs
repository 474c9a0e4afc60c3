//! A [`Driver`] whose kernels run on the CPU, which counts what it gave, does its work in an order
//! that shows what is missing, and fails on demand.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod shared;
mod watch;

pub(crate) use watch::{Fail, Planted, Watch};

use crate::streams::{Pace, Streams, Work};
use kvd_compute::RegionHandle;
use kvd_cuda::{
    DeviceCopy, DeviceStream, Driver, DriverError, EventId, GpuLimits, GraphId, GraphNode,
    KernelLaunch, PinnedId, PinnedRange,
};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, launch_kernel};
use memmap2::{MmapMut, MmapOptions};
use parking_lot::Mutex;
use shared::GRANULE;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

/// Memory of a worker.
#[derive(Default)]
struct Opened {
    bytes: u64,
    /// How often it is open.
    times: usize,
    /// The mapping of memory that came as a descriptor, which is mapped each time.
    mapping: Option<MmapMut>,
}

pub(crate) struct EmuDriver {
    memory: BTreeMap<u64, EmulatorMemory>,
    pinned: Vec<Option<Vec<u8>>>,
    /// Memory of a worker that is open.
    shared: BTreeMap<u64, Opened>,
    streams: Streams,
    /// Events whose handle others have.
    events: BTreeMap<EventId, [u8; RegionHandle::IPC_BYTES]>,
    /// Kernels of each graph, by stage.
    graphs: Vec<Option<Vec<(u32, Work)>>>,
    watch: Arc<Mutex<Watch>>,
    order: ThreadOrder,
    pace: Pace,
    limits: GpuLimits,
}

impl EmuDriver {
    fn launch_work(&self, launched: &KernelLaunch<'_>) -> Work {
        let KernelLaunch { kernel, blocks, shared_bytes, parameters, .. } = *launched;
        // A GPU would refuse it.
        let most = self.limits.block_shared_bytes;
        assert!(shared_bytes <= most, "{kernel}: {shared_bytes} of {most} bytes");
        let (kernel, parameters) = (kernel.to_owned(), parameters.to_vec());
        Work::Launch { kernel, blocks, shared_bytes, parameters }
    }

    pub(crate) fn new(order: ThreadOrder, pace: Pace) -> (Self, Arc<Mutex<Watch>>) {
        let watch = Arc::new(Mutex::new(Watch::default()));
        let driver = Self {
            memory: BTreeMap::new(),
            pinned: Vec::new(),
            shared: BTreeMap::new(),
            streams: Streams::default(),
            events: BTreeMap::new(),
            graphs: Vec::new(),
            watch: watch.clone(),
            order,
            pace,
            limits: GpuLimits::h100(),
        };
        (driver, watch)
    }

    /// A driver with the limits of another GPU.
    pub(crate) fn with_limits(mut self, limits: GpuLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Counts a call; an error when the device has failed, or fails here.
    fn call(&self, call: &'static str, fail: Option<Fail>) -> Result<(), DriverError> {
        let mut watch = self.watch.lock();
        *watch.calls.entry(call).or_default() += 1;
        let failed =
            DriverError::Failed { call, reason: "CUDA_ERROR_ILLEGAL_ADDRESS (700)".into() };
        if watch.failed {
            watch.calls_after_failure += 1;
            return Err(failed);
        }
        if Some(watch.fail) == fail {
            watch.failed = true;
            return Err(failed);
        }
        Ok(())
    }

    /// Keeps the fault; nothing works from then on.
    fn complain(&self, what: String) {
        let mut watch = self.watch.lock();
        watch.failed = true;
        watch.complaints.push(what);
    }

    fn planted(&self, planted: Planted) -> bool {
        self.watch.lock().planted == planted
    }

    /// Tests that a range was given.
    fn check(&self, address: u64, len: u64) {
        let own = self.memory.range(..=address).next_back();
        let own = own.map(|(start, memory)| start + memory.bytes().len() as u64);
        let shared = self.shared.range(..=address).next_back();
        let shared = shared.map(|(start, opened)| start + opened.bytes);
        let end = [own, shared].into_iter().flatten().find(|end| address < *end);
        let end = end.expect("an address");
        assert!(address + len <= end, "{len} bytes at {address:#x} end after {end:#x}");
    }

    /// Tests that nothing uses memory that is given back; after a failure nothing runs any more.
    fn check_free(&self, start: u64, bytes: u64) {
        if !self.watch.lock().failed && self.streams.holds(&(start..start + bytes)) {
            self.complain("memory is given back that work still uses".to_owned());
        }
    }

    /// Gives a stream work and does what a device of this pace does at once.
    fn give(&mut self, stream: DeviceStream, work: Work) -> Result<(), DriverError> {
        self.streams.give(stream, work);
        while let Some(given) = self.streams.next_of(self.pace) {
            self.work(given)?;
        }
        Ok(())
    }

    fn work(&mut self, given: (Work, u64)) -> Result<(), DriverError> {
        if let Some(complaint) = self.streams.complaint(&given) {
            self.complain(complaint.clone());
            return Err(DriverError::Failed { call: "streams", reason: complaint });
        }
        let mut slot = |range: PinnedRange| {
            let memory = self.pinned[range.memory.0 as usize].as_mut().expect("pinned memory");
            memory[range.start as usize..][..range.bytes as usize].as_mut_ptr()
        };
        // SAFETY: the ranges were given by `alloc` or are open, as was tested when the work was
        // given, and those of pinned memory are inside it. A kernel is passed addresses of this
        // driver's memory; sanitizers see overruns.
        unsafe {
            match given.0 {
                Work::Write { to, from } => {
                    std::ptr::copy_nonoverlapping(slot(from), to as *mut u8, from.bytes as usize);
                }
                Work::Read { from, to } => {
                    std::ptr::copy_nonoverlapping(from as *const u8, slot(to), to.bytes as usize);
                }
                Work::Copy { from, to, bytes } => {
                    std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize);
                }
                Work::Launch { kernel, blocks, shared_bytes, parameters, .. } => {
                    let (kernel, shared_bytes) = (kernel.as_str(), shared_bytes as usize);
                    let grid = LaunchGrid { kernel, blocks, shared_bytes, order: self.order };
                    launch_kernel(grid, &parameters).map_err(|reason| {
                        self.watch.lock().failed = true;
                        DriverError::Failed { call: "launch", reason }
                    })?;
                }
                Work::Wait(..) => unreachable!("streams wait by themselves"),
            }
        }
        Ok(())
    }
}

impl Driver for EmuDriver {
    fn description(&self) -> String {
        "cuda emulation".to_owned()
    }

    fn uuid(&self) -> Option<&str> {
        Some("GPU-00000000-0000-0000-0000-0000000000e7")
    }

    fn limits(&self) -> &GpuLimits {
        &self.limits
    }

    fn load_image(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.call("load", None)?;
        if image.starts_with(b"compiled ") && self.watch.lock().fail == Fail::Image {
            let reason = "CUDA_ERROR_INVALID_IMAGE (200)".to_owned();
            return Err(DriverError::Refused { call: "load", reason });
        }
        Ok(())
    }

    fn find_kernel(&mut self, kernel: &str) -> Result<(), DriverError> {
        self.call("find", None)?;
        match self.watch.lock().fail {
            Fail::Kernels => Err(DriverError::NoKernel(kernel.to_owned())),
            _ => Ok(()),
        }
    }

    fn allocate_device(&mut self, bytes: u64) -> Result<u64, DriverError> {
        if self.watch.lock().fail == Fail::Memory {
            return Err(DriverError::OutOfMemory(bytes));
        }
        let memory = EmulatorMemory::new(bytes as usize);
        let address = memory.address();
        self.memory.insert(address, memory);
        self.watch.lock().live += 1;
        Ok(address)
    }

    fn free_device(&mut self, address: u64) {
        let memory = self.memory.remove(&address).expect("memory is given back once");
        self.check_free(address, memory.bytes().len() as u64);
        self.watch.lock().live -= 1;
    }

    fn allocate_pinned(&mut self, bytes: u64) -> Result<PinnedId, DriverError> {
        if self.watch.lock().fail == Fail::Pinned && !self.pinned.is_empty() {
            return Err(DriverError::OutOfPinned(bytes));
        }
        self.pinned.push(Some(vec![0xFF; bytes as usize]));
        self.watch.lock().live += 1;
        Ok(PinnedId(self.pinned.len() as u32 - 1))
    }

    fn free_pinned(&mut self, memory: PinnedId) {
        let bytes = self.pinned[memory.0 as usize].take().expect("pinned memory").len() as u64;
        let holds = self.streams.holds_pinned(PinnedRange { memory, start: 0, bytes });
        if holds && !self.watch.lock().failed {
            self.complain("pinned memory is given back that a copy still uses".to_owned());
        }
        self.watch.lock().live -= 1;
    }

    fn write_pinned(&mut self, memory: PinnedId, start: u64, bytes: &[u8]) {
        if self.streams.holds_pinned(PinnedRange { memory, start, bytes: bytes.len() as u64 }) {
            self.complain("pinned memory is filled before its last copy has ended".to_owned());
        }
        let memory = self.pinned[memory.0 as usize].as_mut().expect("pinned memory");
        memory[start as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn read_pinned(&mut self, memory: PinnedId, start: u64, bytes: &mut [u8]) {
        if self.streams.holds_pinned(PinnedRange { memory, start, bytes: bytes.len() as u64 }) {
            self.complain("bytes from the device are read before their event".to_owned());
        }
        let memory = self.pinned[memory.0 as usize].as_ref().expect("pinned memory");
        bytes.copy_from_slice(&memory[start as usize..][..bytes.len()]);
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        self.call("create_event", None)?;
        self.watch.lock().live += 1;
        Ok(self.streams.create_event())
    }

    fn share_event(&mut self) -> Result<(EventId, [u8; RegionHandle::IPC_BYTES]), DriverError> {
        self.call("share_event", None)?;
        if self.watch.lock().fail == Fail::Events {
            let reason = "CUDA_ERROR_NOT_SUPPORTED (801)".to_owned();
            return Err(DriverError::Refused { call: "share_event", reason });
        }
        let event = self.create_event()?;
        let mut handle = [0xE7; RegionHandle::IPC_BYTES];
        handle[0] = event.0 as u8;
        self.events.insert(event, handle);
        Ok((event, handle))
    }

    fn destroy_event(&mut self, _: EventId) {
        self.watch.lock().live -= 1;
    }

    fn record_event(&mut self, event: EventId, stream: DeviceStream) -> Result<(), DriverError> {
        self.call("record", None)?;
        if let Some(handle) = self.events.get(&event) {
            let mut watch = self.watch.lock();
            let before = watch.kernels.last().cloned().unwrap_or_default();
            watch.recorded.push((*handle, before));
        }
        self.streams.record(event, stream);
        Ok(())
    }

    fn wait_event(&mut self, stream: DeviceStream, event: EventId) -> Result<(), DriverError> {
        self.call("wait", None)?;
        let forgotten = match stream {
            DeviceStream::Copy => Planted::CopiesDoNotWait,
            DeviceStream::Compute => Planted::KernelsDoNotWait,
        };
        if !self.planted(forgotten) {
            self.streams.wait(stream, event);
        }
        Ok(())
    }

    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError> {
        self.call("is_done", Some(Fail::Later))?;
        {
            let mut watch = self.watch.lock();
            if watch.fail == Fail::Hang || watch.until.is_some_and(|until| Instant::now() < until) {
                return Ok(false);
            }
            watch.waits += 1;
        }
        if self.planted(Planted::HostDoesNotWait) {
            return Ok(true);
        }
        while let Some(given) = self.streams.next_before(event) {
            self.work(given)?;
        }
        self.streams.see(event);
        Ok(true)
    }

    fn abandon_device(&mut self) {
        self.watch.lock().failed = true;
    }

    fn copy_to_device(&mut self, to: u64, from: PinnedRange) -> Result<(), DriverError> {
        self.call("write", Some(Fail::Write))?;
        {
            let mut watch = self.watch.lock();
            watch.writes += 1;
            watch.written_bytes += from.bytes as usize;
        }
        self.check(to, from.bytes);
        self.give(DeviceStream::Copy, Work::Write { to, from })
    }

    fn copy_to_host(&mut self, from: u64, to: PinnedRange) -> Result<(), DriverError> {
        self.call("read", None)?;
        self.watch.lock().read_bytes += to.bytes as usize;
        self.check(from, to.bytes);
        self.give(DeviceStream::Compute, Work::Read { from, to })
    }

    fn copy_on_device(&mut self, copies: &[DeviceCopy]) -> Result<(), DriverError> {
        self.call("copy", None)?;
        self.watch.lock().copies += 1;
        for copy in copies {
            self.check(copy.from, copy.bytes);
            self.check(copy.to, copy.bytes);
            let meets = |other: &DeviceCopy| {
                let meets = |at: u64, bytes: u64| at < copy.to + copy.bytes && copy.to < at + bytes;
                meets(other.from, other.bytes) || other != copy && meets(other.to, other.bytes)
            };
            if copies.iter().any(meets) {
                self.complain(format!("{copy:x?} overlaps another of its copies"));
            }
        }
        // In any order: the last first, where the threads' is not that of their numbers.
        let last_first = self.order != ThreadOrder::Ascending;
        let mut given: Vec<DeviceCopy> = copies.to_vec();
        if last_first {
            given.reverse();
        }
        for DeviceCopy { from, to, bytes } in given {
            self.give(DeviceStream::Compute, Work::Copy { from, to, bytes })?;
        }
        Ok(())
    }

    fn launch_kernel(&mut self, launched: KernelLaunch<'_>) -> Result<(), DriverError> {
        self.call("launch", Some(Fail::Launch))?;
        let work = self.launch_work(&launched);
        self.watch.lock().launched(&work);
        self.give(DeviceStream::Compute, work)
    }

    fn build_graph(&mut self, nodes: &[GraphNode<'_>]) -> Result<GraphId, DriverError> {
        self.call("build_graph", None)?;
        if self.watch.lock().fail == Fail::Graphs {
            let reason = "CUDA_ERROR_NOT_SUPPORTED (801)".to_owned();
            return Err(DriverError::Refused { call: "build_graph", reason });
        }
        assert!(nodes.is_sorted_by_key(|node| node.stage) && !nodes.is_empty());
        let nodes = nodes.iter().map(|node| (node.stage, self.launch_work(&node.launch)));
        let nodes = Some(nodes.collect());
        self.graphs.push(nodes);
        self.watch.lock().live += 1;
        Ok(GraphId(self.graphs.len() as u32 - 1))
    }

    fn update_graph(
        &mut self,
        graph: GraphId,
        node: usize,
        launch: KernelLaunch<'_>,
    ) -> Result<(), DriverError> {
        self.call("update_graph", None)?;
        if self.watch.lock().fail == Fail::Updates {
            let reason = "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE (910)".to_owned();
            return Err(DriverError::Refused { call: "update_graph", reason });
        }
        if self.watch.lock().fail == Fail::Node && node == 2 {
            return Err(DriverError::NoRoom(launch.kernel.to_owned()));
        }
        let work = self.launch_work(&launch);
        let nodes = self.graphs[graph.0 as usize].as_mut().expect("a graph");
        let name = |work: &Work| match work {
            Work::Launch { kernel, .. } => kernel.clone(),
            _ => unreachable!("kernels alone"),
        };
        assert_eq!(name(&nodes[node].1), name(&work), "a node keeps its kernel");
        nodes[node].1 = work;
        Ok(())
    }

    fn launch_graph(&mut self, graph: GraphId) -> Result<(), DriverError> {
        self.call("launch_graph", Some(Fail::Launch))?;
        self.watch.lock().graphs += 1;
        let mut nodes = self.graphs[graph.0 as usize].clone().expect("a graph");
        // Kernels of a stage in any order.
        if self.order != ThreadOrder::Ascending {
            nodes.chunk_by_mut(|a, b| a.0 == b.0).for_each(<[_]>::reverse);
        }
        for (_, work) in nodes {
            self.watch.lock().launched(&work);
            self.give(DeviceStream::Compute, work)?;
        }
        Ok(())
    }

    fn destroy_graph(&mut self, graph: GraphId) {
        let nodes = self.graphs[graph.0 as usize].take().expect("a graph is given back once");
        self.watch.lock().live -= 1;
        let under_way = nodes.iter().any(|(_, work)| self.streams.holds_launch(work));
        if under_way && !self.watch.lock().failed {
            self.complain("a graph is given back that is under way".to_owned());
        }
    }

    fn open_shared(&mut self, handle: RegionHandle, bytes: u64) -> Result<u64, DriverError> {
        self.call("open_shared", None)?;
        let refused = |call| {
            let reason = "CUDA_ERROR_INVALID_VALUE (1)".to_owned();
            DriverError::Refused { call, reason }
        };
        let (address, mapping) = match handle {
            RegionHandle::CudaIpc(handle) => {
                (u64::from_le_bytes(*handle.first_chunk().expect("64")), None)
            }
            RegionHandle::CudaFd(file) => {
                let file = File::from(file);
                let have = file.metadata().map_or(0, |of| of.len());
                if bytes > have || !bytes.is_multiple_of(GRANULE) {
                    return Err(refused("cuMemMap"));
                }
                // SAFETY: the worker's file, which a test does not cut while it is open.
                let mapping = unsafe { MmapOptions::new().len(bytes as usize).map_mut(&file) };
                let mapping = mapping.map_err(|_| refused("cuMemImportFromShareableHandle"))?;
                (mapping.as_ptr() as u64, Some(mapping))
            }
        };
        if address == 0 {
            return Err(refused("open_shared"));
        }
        let opened = self.shared.entry(address).or_default();
        (opened.bytes, opened.times) = (bytes.max(opened.bytes), opened.times + 1);
        opened.mapping = mapping;
        self.watch.lock().live += 1;
        Ok(address)
    }

    fn close_shared(&mut self, address: u64) {
        self.watch.lock().live -= 1;
        let opened = self.shared.get_mut(&address).expect("memory is open");
        opened.times -= 1;
        if opened.times == 0 {
            let opened = self.shared.remove(&address).expect("memory is open");
            self.check_free(address, opened.bytes);
        }
    }
}

impl Drop for EmuDriver {
    fn drop(&mut self) {
        let watch = self.watch.lock();
        let expected = watch.planted != Planted::Nothing || std::thread::panicking();
        assert!(expected || watch.complaints.is_empty(), "{:?}", watch.complaints);
    }
}
