//! Regions whose payloads are in a device's memory, over a device that a test can look into.

use super::*;
use crate::config::{Config, Overrides};
use crate::daemon::{Daemon, Running};
use kvd_client::{
    AttendBatch, AttendPlaces, AttendQuery, Attended, Client, Region as Shared, RegionDevice,
    RegionKind, RegionOptions, RegionSlice, StoreChunk,
};
use kvd_compute::{
    AttendPlan, Backend, BackendError, CpuBackend, CpuOptions, DeviceInfo, DeviceRegion,
    EncodeSource, EncodedPages, IncomingRows, LoadPlan, LoadedRows, ModelBytes, RawTarget, Source,
};
use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, RopePairing};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Memory of a worker, by the first byte of the handle that names it, and what is open of it.
#[derive(Clone, Default)]
struct Memories {
    all: Arc<Mutex<BTreeMap<u8, Vec<u8>>>>,
    open: Arc<Mutex<Vec<u8>>>,
}

/// The processor, as if it had memory of its own.
struct Device {
    cpu: CpuBackend,
    memories: Memories,
}

impl Device {
    fn with<T>(&self, region: DeviceRegion, look: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        look(self.memories.all.lock().get_mut(&(region.0 as u8)).expect("an open region"))
    }
}

impl Backend for Device {
    fn info(&self) -> DeviceInfo {
        self.cpu.info()
    }
    fn register(&mut self, model: ModelId, codec: kvd_codec::ModelCodec) {
        self.cpu.register(model, codec);
    }
    fn unregister(&mut self, model: ModelId) {
        self.cpu.unregister(model);
    }
    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        self.cpu.model_bytes(model)
    }
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        self.cpu.check(model, rows)
    }
    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        self.cpu.write(model, rows, source_row, count, to)
    }
    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        self.cpu.copy(model, layer, from, count, to)
    }
    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        self.cpu.encode(model, layer, blocks)
    }
    fn place(&mut self, pages: &EncodedPages, to: Extent) {
        self.cpu.place(pages, to);
    }
    fn attend(&mut self, plan: &AttendPlan) -> Result<kvd_compute::Attended, BackendError> {
        self.cpu.attend(plan)
    }
    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        self.cpu.load(plan)
    }
    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<DeviceRegion, BackendError> {
        let RegionHandle::CudaIpc([name, ..]) = handle else {
            let message = "no descriptors here".to_owned();
            return Err(BackendError::Device { code: ErrorCode::InvalidArgument, message });
        };
        let len = self.memories.all.lock().get(&name).map_or(0, |memory| memory.len() as u64);
        if len < bytes || len == 0 {
            let message = format!("no memory {name} of {bytes} bytes");
            return Err(BackendError::Device { code: ErrorCode::InvalidArgument, message });
        }
        self.memories.open.lock().push(name);
        Ok(DeviceRegion(name.into()))
    }
    fn close_region(&mut self, region: DeviceRegion) {
        self.memories.open.lock().retain(|name| u64::from(*name) != region.0);
    }
    fn read_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let len = bytes.len();
        self.with(region, |memory| bytes.copy_from_slice(&memory[offset as usize..][..len]));
        Ok(())
    }
    fn write_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.with(region, |memory| {
            memory[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        });
        Ok(())
    }
}

const DIM: u32 = 64;

/// A daemon over such a device, its region socket, and a batch that it can answer.
struct Fixture {
    running: Running,
    memories: Memories,
    client: Client,
    batch: AttendBatch,
    dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let flags = [
            ("server.listen_tcp", String::new()),
            ("server.listen_unix", path("grpc")),
            ("server.listen_region", path("region")),
            ("admin.listen", String::new()),
            ("device.pool_bytes", "4 MiB".to_owned()),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let config = Config::load(&Overrides { file: None, environment: false, flags }).unwrap();
        let options = CpuOptions { arena_bytes: 4 << 20, prefault: false, threads: 1 };
        let memories = Memories::default();
        let cpu = CpuBackend::new(options).unwrap();
        let device: Box<dyn Backend> = Box::new(Device { cpu, memories: memories.clone() });
        let running = Daemon::build_on(config, vec![device]).await.unwrap().spawn();
        let endpoint = format!("unix:{}", path("grpc")).parse().unwrap();
        let client = Client::connect(endpoint).await.unwrap();
        let batch = stored(&client).await;
        Self { running, memories, client, batch, dir }
    }

    /// A region with device memory of that name, which begins with the batch's queries.
    fn open(&self, name: u8) -> Shared {
        let memory = [&self.batch.q[..], &vec![0; 4096]].concat();
        let bytes = memory.len() as u64;
        self.memories.all.lock().insert(name, memory);
        let mut handle = [0; 64];
        handle[0] = name;
        self.region(RegionDevice::CudaIpc(handle), bytes)
    }

    fn region(&self, device: RegionDevice, bytes: u64) -> Shared {
        let options = RegionOptions::default().with_bytes(4096).with_device(device, bytes);
        let path = self.dir.path().join("region");
        tokio::task::block_in_place(|| Shared::open(path, &options).unwrap())
    }

    /// Where the parts of the batch are in device memory; its record is in the memory file.
    fn places(&self) -> AttendPlaces {
        let q = RegionSlice { offset: 0, bytes: self.batch.q.len() as u64 };
        let out = RegionSlice { offset: q.bytes, bytes: q.bytes };
        let lse = RegionSlice { offset: 2 * q.bytes, bytes: 2 * 4 };
        AttendPlaces { done: 256, q, out, lse }
    }

    /// Attends through a region; the answer as it is in device memory.
    fn attend(&self, region: &Shared, name: u8) -> Result<Attended, kvd_client::ClientError> {
        let at = self.places();
        tokio::task::block_in_place(|| {
            region.send_attend(self.batch.clone(), at)?;
            region.wait(at.done)
        })?;
        let memories = self.memories.all.lock();
        let slice = |at: RegionSlice| &memories[&name][at.offset as usize..][..at.bytes as usize];
        let lse = slice(at.lse).as_chunks::<4>().0.iter();
        let lse = lse.map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Attended { out: slice(at.out).to_vec().into(), lse })
    }

    async fn eventually_open(&self, names: &[u8]) {
        for _ in 0..500 {
            if *self.memories.open.lock() == names {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?} are open, not {names:?}", self.memories.open.lock());
    }
}

async fn stored(client: &Client) -> AttendBatch {
    let geometry = Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: DIM,
        head_dim_v: DIM,
        block_tokens: 16,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = ("m".to_owned(), "kivi-4".to_owned());
    let spec = kvd_client::ModelSpec { name, geometry, codec, calibration: bytes::Bytes::new() };
    let model = client.register_model(spec).await.unwrap().model;
    let sequence = client.open_sequence(model).await.unwrap();
    let rows = |count: u32, step: f32| {
        let values = (0..count * 2 * DIM).map(|i| (i as f32 * step).sin());
        bytes::Bytes::from(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    let (layer, tokens, start) = (LayerIndex(0), 200, 0);
    let (k, v) = (rows(tokens, 0.7), rows(tokens, 1.3));
    client.store(StoreChunk { sequence, layer, start, tokens, k, v }).await.unwrap();
    let queries = vec![AttendQuery::new(sequence, 1)];
    let (scale, soft_cap, dtype, q) = (None, None, DType::F32, rows(1, 0.9));
    AttendBatch { model, layer, q_heads: 2, dtype, scale, soft_cap, queries, q }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_in_device_memory_are_answered_there_with_the_same_bytes() {
    let fixture = Fixture::new().await;
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let region = fixture.open(7);
    assert_eq!((region.kind(), region.reason()), (RegionKind::CudaIpc, ""));
    assert_eq!(fixture.attend(&region, 7).unwrap(), right);
    let blocking = || region.attend(fixture.batch.clone(), [DIM, DIM]);
    let refused = tokio::task::block_in_place(blocking).unwrap_err();
    assert!(refused.message.contains("device memory (CudaIpc)"), "{refused}");
    // Past the device's memory, though inside the memory file.
    let outside = AttendPlaces {
        lse: RegionSlice { offset: 4096 + fixture.places().q.bytes, bytes: 8 },
        ..fixture.places()
    };
    let sent = region.send_attend(fixture.batch.clone(), outside);
    let refused = tokio::task::block_in_place(|| sent.and_then(|()| region.wait(outside.done)));
    let refused = refused.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{refused}");
    assert!(refused.message.contains("of the device"), "{refused}");
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_memory_is_given_back_when_its_worker_is_gone() {
    let fixture = Fixture::new().await;
    let (one, two) = (fixture.open(1), fixture.open(2));
    fixture.eventually_open(&[1, 2]).await;
    drop(one);
    fixture.eventually_open(&[2]).await;
    fixture.attend(&two, 2).unwrap();
    drop(two);
    fixture.eventually_open(&[]).await;
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_the_device_cannot_open_is_replaced_with_the_reason() {
    let fixture = Fixture::new().await;
    let mut handle = [0; 64];
    handle[0] = 99;
    let region = fixture.region(RegionDevice::CudaIpc(handle), 4096);
    assert_eq!(region.kind(), RegionKind::Memfd);
    assert_eq!(region.reason(), "no memory 99 of 4096 bytes");
    let file = std::fs::File::open("/dev/null").unwrap();
    let device = RegionDevice::CudaFd(Arc::new(OwnedFd::from(file)));
    let region = fixture.region(device, 4096);
    assert_eq!((region.kind(), region.reason()), (RegionKind::Memfd, "no descriptors here"));
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let answer =
        tokio::task::block_in_place(|| region.attend(fixture.batch.clone(), [DIM, DIM])).unwrap();
    assert_eq!(answer, right);
    fixture.running.drain().await;
}
