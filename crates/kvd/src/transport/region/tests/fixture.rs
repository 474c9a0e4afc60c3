//! A daemon over devices that a test can look into, and workers with regions of each kind.

use super::device::{Device, Memories};
use super::*;
use std::ops::Deref;

/// UUIDs of the daemon's devices.
pub(super) const UUIDS: [&str; 2] =
    ["GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-2222222222ab"];
/// Where payloads may be.
pub(super) const KINDS: [RegionKind; 3] =
    [RegionKind::Memfd, RegionKind::CudaIpc, RegionKind::CudaFd];
/// Kinds whose payloads are in memory of a device.
pub(super) const DEVICE_KINDS: [RegionKind; 2] = [RegionKind::CudaIpc, RegionKind::CudaFd];

pub(super) const DIM: u32 = 64;
/// `server.message_bytes_max`: 512 query tokens of the batch fit, of answers 502.
pub(super) const MESSAGE_BYTES: u32 = 256 << 10;
/// Completion record of every call.
pub(super) const DONE: u64 = 256;
/// Where payloads begin: behind the record, which shares their memory where they are in the file.
pub(super) const START: u64 = DONE + 256;
/// Bytes of the memory file where payloads are not in it.
const FILE_BYTES: u64 = 8192;

/// A daemon over such devices, its region socket, and a batch that it can answer.
pub(super) struct Fixture {
    /// Kind of the regions that are opened.
    pub(super) kind: RegionKind,
    pub(super) running: RunningDaemon,
    pub(super) memories: Memories,
    pub(super) client: Client,
    pub(super) batch: AttendBatch,
    pub(super) dir: tempfile::TempDir,
}

/// A region and the memory that its payloads are in.
pub(super) struct Worker {
    region: Shared,
    /// Memory of the device; none where the region's own is used.
    device: Option<Arc<RegionMemory>>,
}

impl Worker {
    pub(super) fn payloads(&self) -> &RegionMemory {
        self.device.as_deref().unwrap_or(self.region.memory())
    }

    pub(super) fn bytes(&self, at: RegionSlice) -> Vec<u8> {
        let mut bytes = vec![0; at.bytes as usize];
        self.payloads().read_bytes(at.offset, &mut bytes).unwrap();
        bytes
    }
}

impl Deref for Worker {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.region
    }
}

impl Fixture {
    pub(super) async fn new(kind: RegionKind) -> Self {
        Self::over(kind, vec![Memories::default()]).await
    }

    /// Over as many devices; the first is looked into.
    pub(super) async fn over(kind: RegionKind, all: Vec<Memories>) -> Self {
        Self::with_codec(kind, all, "kivi-4", 1).await
    }

    /// A fixture of a codec, with a batch of so many query tokens.
    pub(super) async fn with_codec(
        kind: RegionKind,
        all: Vec<Memories>,
        codec: &str,
        n_q: u32,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let flags = [
            ("server.listen_tcp", String::new()),
            ("server.listen_unix", path("grpc")),
            ("server.listen_region", path("region")),
            ("server.message_bytes_max", MESSAGE_BYTES.to_string()),
            ("limits.calibration_bytes_max", "4 KiB".to_owned()),
            ("limits.page_tokens_min", "1".to_owned()),
            ("admin.listen", String::new()),
            ("device.pool_bytes", "4 MiB".to_owned()),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let file = dir.path().join("kvd.toml");
        std::fs::write(&file, "[namespaces]\nallowed = [\"default\", \"other\"]\n").unwrap();
        let overrides = ConfigOverrides { file: Some(file), environment: false, flags };
        let config = Config::load(&overrides).unwrap();
        let options = CpuOptions { arena_bytes: 4 << 20, prefault: false, threads: 1 };
        let memories = all[0].clone();
        let device = |(memories, uuid): (Memories, &str)| -> Box<dyn Backend> {
            let cpu = CpuBackend::new(options).unwrap();
            Box::new(Device::new(cpu, memories, uuid))
        };
        let devices = all.into_iter().zip(UUIDS).map(device).collect();
        let running = Daemon::build_on(config, devices).await.unwrap().spawn();
        let endpoint = format!("unix:{}", path("grpc")).parse().unwrap();
        let client = Client::connect(endpoint).await.unwrap();
        let batch = stored(&client, codec, n_q).await;
        Self { kind, running, memories, client, batch, dir }
    }

    /// A worker with memory of that name, where the batch's queries are.
    pub(super) fn open(&self, name: u8) -> Worker {
        self.open_with(name, |options| options).unwrap()
    }

    pub(super) fn open_with(
        &self,
        name: u8,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<Worker, ClientError> {
        let worker = self.worker(&self.memories, name, self.payload_bytes(), change)?;
        worker.payloads().write_bytes(START, &self.batch.q).unwrap();
        Ok(worker)
    }

    /// Room for the batch's queries and its answer, and more.
    pub(super) fn payload_bytes(&self) -> u64 {
        let q = self.batch.q.len() as u64;
        START + q + (2 * q).max(4096)
    }

    /// A worker with memory of zeros that one device knows, of any kind.
    pub(super) fn worker(
        &self,
        memories: &Memories,
        name: u8,
        bytes: u64,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<Worker, ClientError> {
        if self.kind == RegionKind::Memfd {
            let options = change(RegionOptions::default().with_bytes(bytes));
            return Ok(Worker { region: self.connect(&options)?, device: None });
        }
        let memory = memories.add(name, bytes);
        let region = self.region(self.offer(name, &memory), bytes, change)?;
        Ok(Worker { region, device: Some(memory) })
    }

    /// How a worker names its memory to the daemon.
    pub(super) fn offer(&self, name: u8, memory: &RegionMemory) -> RegionDevice {
        if self.kind == RegionKind::CudaFd {
            return RegionDevice::CudaFd(Arc::new(memory.file().try_clone_to_owned().unwrap()));
        }
        let mut handle = [0; 64];
        handle[0] = name;
        RegionDevice::CudaIpc(handle)
    }

    pub(super) fn region(
        &self,
        device: RegionDevice,
        bytes: u64,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<Shared, ClientError> {
        let options = RegionOptions::default().with_bytes(FILE_BYTES).with_device(device, bytes);
        self.connect(&change(options))
    }

    pub(super) fn connect(&self, options: &RegionOptions) -> Result<Shared, ClientError> {
        let path = self.dir.path().join("region");
        tokio::task::block_in_place(|| Shared::open_region(path, options))
    }

    /// Calls through regions by where their payloads were: in files, in place, copied.
    pub(super) fn calls(&self) -> [u64; 3] {
        let text = self.running.service().metrics().render_page();
        ["file", "in_place", "copied"].map(|payloads| {
            let series = format!("kvd_region_calls_total{{payloads=\"{payloads}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&series)).unwrap().parse().unwrap()
        })
    }

    /// The value of [`Fixture::calls`] where a device takes so many in place and the others copied.
    pub(super) fn counted(&self, in_place: u64, copied: u64) -> [u64; 3] {
        match self.kind {
            RegionKind::Memfd => [in_place + copied, 0, 0],
            _ => [0, in_place, copied],
        }
    }

    /// Where the parts of the batch are.
    pub(super) fn places(&self) -> AttendLayout {
        let q = RegionSlice { offset: START, bytes: self.batch.q.len() as u64 };
        let out = RegionSlice { offset: q.offset + q.bytes, bytes: q.bytes };
        let lse = q.bytes / u64::from(DIM);
        let lse = RegionSlice { offset: out.offset + out.bytes, bytes: lse };
        AttendLayout { done: DONE, q, out, lse }
    }

    /// Attends through a region; the answer as it is in the worker's memory.
    pub(super) fn attend(&self, worker: &Worker) -> Result<Attended, ClientError> {
        self.attend_at(worker, self.places())
    }

    pub(super) fn attend_at(
        &self,
        worker: &Worker,
        at: AttendLayout,
    ) -> Result<Attended, ClientError> {
        tokio::task::block_in_place(|| {
            worker.send_attend(self.batch.clone(), at)?;
            worker.wait_call(at.done)
        })?;
        Ok(self.answer(worker, at))
    }

    /// Contents of an answer's places.
    pub(super) fn answer(&self, worker: &Worker, at: AttendLayout) -> Attended {
        let lse = worker.bytes(at.lse);
        let lse = lse.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Attended { out: worker.bytes(at.out).into(), lse, query_errors: Vec::new() }
    }

    /// Regions that the daemon holds.
    fn regions(&self) -> usize {
        let text = self.running.service().metrics().render_page();
        text.lines().find_map(|line| line.strip_prefix("kvd_regions ")).unwrap().parse().unwrap()
    }

    /// Waits until the daemon holds the regions of these names, and their memory is open.
    pub(super) async fn eventually_open(&self, names: &[u8]) {
        let wanted = if self.kind == RegionKind::Memfd { &[][..] } else { names };
        for _ in 0..500 {
            if *self.memories.open.lock() == wanted && self.regions() == names.len() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let open = self.memories.open.lock();
        panic!("{:?}: {open:?} are open of {} regions, not {names:?}", self.kind, self.regions());
    }
}

async fn stored(client: &Client, codec: &str, n_q: u32) -> AttendBatch {
    let geometry = Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: DIM,
        head_dim_v: DIM,
        block_tokens: 16,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = ("m".to_owned(), codec.to_owned());
    let spec = kvd_client::ModelSpec { name, geometry, codec, calibration: bytes::Bytes::new() };
    let model = client.register_model(spec).await.unwrap().model;
    let sequence = client.open_sequence(model).await.unwrap();
    let rows = |count: u32, step: f32| {
        let values = (0..count * 2 * DIM).map(|i| (i as f32 * step).sin());
        bytes::Bytes::from(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    let (layer, tokens, start) = (LayerIndex(0), 200, 0);
    let (k, v) = (rows(tokens, 0.7), rows(tokens, 1.3));
    client.store_chunk(StoreChunk { sequence, layer, start, tokens, k, v }).await.unwrap();
    let queries = vec![AttendQuery::new(sequence, n_q)];
    let (scale, soft_cap, dtype, q) = (None, None, DType::F32, rows(n_q, 0.9));
    let per_query_errors = false;
    AttendBatch { model, layer, q_heads: 2, dtype, scale, soft_cap, queries, q, per_query_errors }
}
