//! The processor, as if it had memory of its own that workers share: by handle, where the first
//! byte names it, or by descriptor, which is mapped as it comes out of the daemon's socket.

use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, AttendTask, Attended, BackendError, CpuBackend,
    DeviceInfo, DeviceRegion, IncomingRows, OpenedRegion, PageBackend, PlannedWrite, RegionHandle,
    RegionPlaces, RegionRows, StagedRows, Stop, content_hash,
};
use kvd_core::{ErrorCode, ModelId, Side};
use kvd_shm::RegionMemory;
use kvd_testkit::forward::{ForwardingBackend, InjectedFaults};
use kvd_testkit::mount_forwarding;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Memory of workers by name, and what is open of it.
#[derive(Clone, Default)]
pub(super) struct Memories {
    pub(super) all: Arc<Mutex<BTreeMap<u8, Arc<RegionMemory>>>>,
    pub(super) open: Arc<Mutex<Vec<u8>>>,
    /// Why no kernel reaches it.
    pub(super) copied: Arc<Mutex<Option<String>>>,
    /// Why it shares no event.
    pub(super) no_event: Arc<Mutex<Option<String>>>,
    /// Held by a test while launches are under way.
    pub(super) busy: Arc<Mutex<()>>,
    /// Stores.
    pub(super) stores: Arc<Mutex<Stores>>,
    pub(super) faults: Arc<InjectedFaults>,
    /// Calls that were to open some.
    pub(super) asked: Arc<Mutex<usize>>,
    /// No GPU: it has no UUID.
    is_processor: bool,
    /// Copies to and from it, and uses of what was not open.
    counts: Arc<Mutex<[usize; 2]>>,
}

/// State of stores that a test sets and sees.
#[derive(Default)]
pub(super) struct Stores {
    /// Bytes of K and V from which on there is no room for them.
    pub(super) room: Option<u64>,
    /// Workers write over their rows as soon as those are staged.
    pub(super) spoil: bool,
    /// Calls that staged something.
    pub(super) staged: u64,
}

/// Identity of a file among all others.
fn file_id(file: BorrowedFd<'_>) -> (u64, u64) {
    let file = file.try_clone_to_owned().expect("a descriptor");
    let metadata = std::fs::File::from(file).metadata().expect("fstat");
    (metadata.dev(), metadata.ino())
}

fn refuse<T>(message: impl Into<String>) -> Result<T, BackendError> {
    Err(BackendError::Device { code: ErrorCode::InvalidArgument, message: message.into() })
}

impl Memories {
    pub(super) fn of_processor() -> Self {
        Self { is_processor: true, ..Self::default() }
    }

    /// New memory of zeros, by that name from now on.
    pub(super) fn add(&self, name: u8, bytes: u64) -> Arc<RegionMemory> {
        let memory = Arc::new(RegionMemory::create_memory(bytes).expect("memory"));
        self.all.lock().insert(name, memory.clone());
        memory
    }

    /// The memory that a handle names.
    fn named(&self, name: u8, bytes: u64) -> Result<Arc<RegionMemory>, BackendError> {
        match self.all.lock().get(&name).filter(|memory| memory.size_bytes() >= bytes) {
            Some(memory) => Ok(memory.clone()),
            None => refuse(format!("no memory {name} of {bytes} bytes")),
        }
    }

    /// The memory of a descriptor, mapped once more, and its name.
    fn mapped(&self, file: OwnedFd, bytes: u64) -> Result<(u8, Arc<RegionMemory>), BackendError> {
        let memory =
            RegionMemory::map_file(file, bytes).or_else(|error| refuse(error.to_string()))?;
        let all = self.all.lock();
        let same = |known: &RegionMemory| file_id(known.file()) == file_id(memory.file());
        match all.iter().find(|(_, known)| same(known)) {
            Some((name, _)) => Ok((*name, Arc::new(memory))),
            None => refuse("memory of nobody"),
        }
    }

    /// Payloads that went through the host.
    pub(super) fn copies(&self) -> usize {
        self.counts.lock()[0]
    }

    pub(super) fn uses_after_close(&self) -> usize {
        self.counts.lock()[1]
    }
}

/// The processor, as if it had memory of its own.
pub(super) struct Device {
    cpu: CpuBackend,
    memories: Memories,
    uuid: String,
    /// By name.
    regions: BTreeMap<u64, Arc<RegionMemory>>,
    staged: Option<(ModelId, IncomingRows)>,
}

impl Device {
    pub(super) fn new(cpu: CpuBackend, memories: Memories, uuid: &str) -> Self {
        let uuid = uuid.to_owned();
        Self { cpu, memories, uuid, regions: BTreeMap::new(), staged: None }
    }

    fn memory(&self, region: DeviceRegion) -> Arc<RegionMemory> {
        let open = self.regions.get(&region.0);
        self.memories.counts.lock()[1] += usize::from(open.is_none());
        open.cloned().unwrap_or_else(|| self.memories.all.lock()[&(region.0 as u8)].clone())
    }

    fn read(&self, region: DeviceRegion, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory(region).read_bytes(offset, &mut bytes).expect("a range that was tested");
        bytes
    }

    fn put(&self, region: DeviceRegion, offset: u64, bytes: &[u8]) {
        self.memory(region).write_bytes(offset, bytes).expect("a range that was tested");
    }
}

mount_forwarding!(Device);

impl ForwardingBackend for Device {
    type Inner = CpuBackend;

    fn inner_backend(&self) -> &CpuBackend {
        &self.cpu
    }

    fn inner_backend_mut(&mut self) -> &mut CpuBackend {
        &mut self.cpu
    }

    fn injected_faults(&self) -> Option<&InjectedFaults> {
        Some(&self.memories.faults)
    }

    fn info(&self) -> DeviceInfo {
        let uuid = (!self.memories.is_processor).then(|| self.uuid.clone());
        DeviceInfo { uuid, ..self.cpu.info() }
    }

    fn write_staged(
        &mut self,
        staged: &StagedRows,
        writes: &[PlannedWrite],
    ) -> Result<(), BackendError> {
        assert_eq!(staged.call, self.memories.stores.lock().staged, "the rows of another call");
        let (model, rows) = self.staged.as_ref().expect("staged rows");
        for write in writes {
            self.cpu.write(*model, rows, write.source_row, write.rows, write.to)?;
        }
        Ok(())
    }

    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        task.attend_by_pieces(stop, |plan| self.cpu.attend(plan))
    }

    fn shares_pages(&self) -> bool {
        false
    }

    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        *self.memories.asked.lock() += 1;
        let (name, memory) = match handle {
            RegionHandle::CudaIpc([name, ..]) => (name, self.memories.named(name, bytes)?),
            RegionHandle::CudaFd(file) => self.memories.mapped(file, bytes)?,
        };
        self.regions.insert(name.into(), memory);
        self.memories.open.lock().push(name);
        let [copied, no_event] =
            [&self.memories.copied, &self.memories.no_event].map(|reason| reason.lock().clone());
        let event = no_event.is_none().then_some([name; 64]);
        Ok(OpenedRegion { region: DeviceRegion(name.into()), event, no_event, copied })
    }

    fn close_region(&mut self, region: DeviceRegion) {
        self.memories.open.lock().retain(|name| u64::from(*name) != region.0);
        self.regions.remove(&region.0);
    }

    fn read_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.memories.counts.lock()[0] += 1;
        bytes.copy_from_slice(&self.read(region, offset, bytes.len()));
        Ok(())
    }

    fn write_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.memories.counts.lock()[0] += 1;
        self.put(region, offset, bytes);
        Ok(())
    }

    fn attend_in_place(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        assert!(plan.q.is_empty(), "the host has no queries");
        let q_bytes = plan.rows() as usize * 64 * plan.dtype.size_bytes();
        let region = places.region;
        let q = self.read(region, places.q, q_bytes).into();
        launched();
        drop(self.memories.busy.lock());
        let attended = self.cpu.attend(&AttendPlan { q, ..plan.clone() })?;
        let lse: Vec<u8> = attended.lse.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.put(region, places.out, &attended.out);
        self.put(region, places.lse, &lse);
        Ok(attended.stored_bytes_read)
    }

    fn stage_rows(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        let geometry = self.cpu.codec(model)?.geometry().clone();
        let per_head = rows.tokens as usize * geometry.kv_heads as usize;
        let bytes = |side| per_head * geometry.head_dim(side) * geometry.dtype.size_bytes();
        let mut stores = self.memories.stores.lock();
        let [k_bytes, v_bytes] = Side::BOTH.map(bytes);
        if stores.room.is_some_and(|room| (k_bytes + v_bytes) as u64 >= room) {
            return Ok(None);
        }
        let [k, v] = [(rows.k, k_bytes), (rows.v, v_bytes)].map(|(at, bytes)| {
            let copy = self.read(rows.region, at, bytes);
            if stores.spoil {
                self.put(rows.region, at, &vec![0xFF; bytes]);
            }
            copy
        });
        let rows = IncomingRows { tokens: rows.tokens, k: k.into(), v: v.into() };
        let (content_hash, finite) = (content_hash(&rows.k, &rows.v), self.cpu.check(model, &rows));
        self.staged = Some((model, rows));
        stores.staged += 1;
        Ok(Some(StagedRows { call: stores.staged, content_hash, finite }))
    }
}
