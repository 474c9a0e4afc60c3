//! Regions whose payloads are in a device's memory, over a device that a test can look into.

mod device;
mod store;

use super::*;
use crate::config::{Config, Overrides};
use crate::daemon::{Daemon, Running};
use device::{Device, Memories};
use kvd_client::{
    AttendBatch, AttendPlaces, AttendQuery, Attended, Client, ClientError, Launch,
    Region as Shared, RegionDevice, RegionKind, RegionOptions, RegionSlice, StoreChunk,
};
use kvd_compute::{Backend, CpuBackend, CpuOptions};
use kvd_core::{DType, Geometry, LayerIndex, RopePairing};

/// UUIDs of the daemon's devices.
const UUIDS: [&str; 2] =
    ["GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-2222222222ab"];

const DIM: u32 = 64;
/// `server.message_bytes_max`: 512 query tokens of the batch fit, of answers 502.
const MESSAGE_BYTES: u32 = 256 << 10;

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
        Self::over(vec![Memories::default()]).await
    }

    /// Over as many devices; the first is looked into.
    async fn over(all: Vec<Memories>) -> Self {
        Self::with_codec(all, "kivi-4", 1).await
    }

    /// The same of a codec, with a batch of so many query tokens.
    async fn with_codec(all: Vec<Memories>, codec: &str, n_q: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let flags = [
            ("server.listen_tcp", String::new()),
            ("server.listen_unix", path("grpc")),
            ("server.listen_region", path("region")),
            ("server.message_bytes_max", MESSAGE_BYTES.to_string()),
            ("limits.calibration_bytes_max", "4 KiB".to_owned()),
            ("admin.listen", String::new()),
            ("device.pool_bytes", "4 MiB".to_owned()),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
        let file = dir.path().join("kvd.toml");
        std::fs::write(&file, "[namespaces]\nallowed = [\"default\", \"other\"]\n").unwrap();
        let overrides = Overrides { file: Some(file), environment: false, flags };
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
        Self { running, memories, client, batch, dir }
    }

    /// A region with device memory of that name, which begins with the batch's queries.
    fn open(&self, name: u8) -> Shared {
        self.open_with(name, |options| options).unwrap()
    }

    fn open_with(
        &self,
        name: u8,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<Shared, ClientError> {
        let memory = [&self.batch.q[..], &vec![0; 4096.max(2 * self.batch.q.len())]].concat();
        let bytes = memory.len() as u64;
        self.memories.all.lock().insert(name, memory);
        let mut handle = [0; 64];
        handle[0] = name;
        self.region(RegionDevice::CudaIpc(handle), bytes, change)
    }

    fn region(
        &self,
        device: RegionDevice,
        bytes: u64,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<Shared, ClientError> {
        let options = RegionOptions::default().with_bytes(4096).with_device(device, bytes);
        let path = self.dir.path().join("region");
        tokio::task::block_in_place(|| Shared::open(path, &change(options)))
    }

    /// Calls through regions by where their payloads were.
    fn calls(&self, payloads: &str) -> u64 {
        let text = self.running.service().metrics().render();
        let series = format!("kvd_region_calls_total{{payloads=\"{payloads}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&series)).unwrap().parse().unwrap()
    }

    /// Where the parts of the batch are in device memory; its record is in the memory file.
    fn places(&self) -> AttendPlaces {
        let q = RegionSlice { offset: 0, bytes: self.batch.q.len() as u64 };
        let out = RegionSlice { offset: q.bytes, bytes: q.bytes };
        let lse = RegionSlice { offset: 2 * q.bytes, bytes: q.bytes / u64::from(DIM) };
        AttendPlaces { done: 256, q, out, lse }
    }

    /// Attends through a region; the answer as it is in device memory.
    fn attend(&self, region: &Shared, name: u8) -> Result<Attended, ClientError> {
        let at = self.places();
        tokio::task::block_in_place(|| {
            region.send_attend(self.batch.clone(), at)?;
            region.wait(at.done)
        })?;
        Ok(self.answer(at, name))
    }

    /// What is in an answer's places.
    fn answer(&self, at: AttendPlaces, name: u8) -> Attended {
        let memories = self.memories.all.lock();
        let slice = |at: RegionSlice| &memories[&name][at.offset as usize..][..at.bytes as usize];
        let lse = slice(at.lse).as_chunks::<4>().0.iter();
        let lse = lse.map(|value| f32::from_le_bytes(*value)).collect();
        Attended { out: slice(at.out).to_vec().into(), lse }
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
    client.store(StoreChunk { sequence, layer, start, tokens, k, v }).await.unwrap();
    let queries = vec![AttendQuery::new(sequence, n_q)];
    let (scale, soft_cap, dtype, q) = (None, None, DType::F32, rows(n_q, 0.9));
    AttendBatch { model, layer, q_heads: 2, dtype, scale, soft_cap, queries, q }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_in_device_memory_are_answered_there_with_the_same_bytes() {
    let fixture = Fixture::new().await;
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let region = fixture.open(7);
    assert_eq!((region.kind(), region.reason()), (RegionKind::CudaIpc, ""));
    assert_eq!((region.copied(), region.event()), ("", Some([7; 64])));
    assert_eq!(fixture.attend(&region, 7).unwrap(), right);
    assert_eq!(fixture.memories.copies(), 0, "no payload went through the host");
    assert_eq!(["file", "in_place", "copied"].map(|payloads| fixture.calls(payloads)), [0, 1, 0]);
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
async fn calls_in_device_memory_have_the_limits_of_messages_and_large_ones_do_not_stop_a_sample() {
    // Keys kept exactly: queries are drawn for a sample, and those that are, are copied.
    let codec = "k=raw; v=fp8";
    let mut fixture = Fixture::with_codec(vec![Memories::default()], codec, 126).await;
    let region = fixture.open(1);
    assert_eq!(fixture.attend(&region, 1).unwrap().lse.len(), 126 * 2);
    let row = fixture.batch.q.len() / 126;
    for (name, n_q) in [(2, 505), (3, 600)] {
        fixture.batch.q = vec![0; row * n_q as usize].into();
        fixture.batch.queries[0].n_q = n_q;
        let large = fixture.open(name);
        for _ in 0..3 {
            let refused = fixture.attend(&large, name).unwrap_err();
            assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{refused}");
            assert!(refused.message.contains("server.message_bytes_max = 262144"), "{refused}");
        }
    }
    fixture.batch.queries[0].n_q = 1;
    fixture.batch.q.truncate(row);
    let small = fixture.open(4);
    let calls = || fixture.calls("in_place") + fixture.calls("copied");
    let before = calls();
    for _ in 0..1100 {
        fixture.attend(&small, 4).unwrap();
    }
    assert!(fixture.calls("in_place") > 0, "the sample is full and draws seldom");
    assert_eq!(calls() - before, 1100);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_values_have_the_limit_of_one_message_together() {
    let fixture = Fixture::new().await;
    let options = RegionOptions::default().with_bytes(1 << 20);
    let path = fixture.dir.path().join("region");
    let region = tokio::task::block_in_place(|| Shared::open(path, &options)).unwrap();
    let sequence = fixture.client.open_sequence(fixture.batch.model).await.unwrap();
    let chunk = |tokens: u32| {
        let rows = bytes::Bytes::from(vec![0; tokens as usize * 2 * DIM as usize * 4]);
        StoreChunk { sequence, layer: LayerIndex(0), start: 0, tokens, k: rows.clone(), v: rows }
    };
    let refused = tokio::task::block_in_place(|| region.store(chunk(260))).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{refused}");
    let stored = tokio::task::block_in_place(|| region.store(chunk(250))).unwrap();
    assert_eq!(stored.length, 250);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_that_meet_are_copied_so_that_an_answer_over_its_queries_is_right() {
    let fixture = Fixture::new().await;
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let at = fixture.places();
    let over_queries = AttendPlaces { out: RegionSlice { offset: 0, ..at.out }, ..at };
    let lse_inside = RegionSlice { offset: at.q.bytes - 4, ..at.lse };
    let over_one =
        AttendPlaces { out: RegionSlice { offset: 1024, ..at.out }, lse: lse_inside, ..at };
    for (name, at) in [(1, over_queries), (2, over_one)] {
        let region = fixture.open(name);
        tokio::task::block_in_place(|| {
            region.send_attend(fixture.batch.clone(), at).unwrap();
            region.wait(at.done).unwrap();
        });
        assert_eq!(fixture.answer(at, name), right);
    }
    assert_eq!(["in_place", "copied"].map(|payloads| fixture.calls(payloads)), [0, 2]);
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
    let plain = |options| options;
    let region = fixture.region(RegionDevice::CudaIpc(handle), 4096, plain).unwrap();
    assert_eq!(region.kind(), RegionKind::Memfd);
    assert_eq!(region.reason(), "no memory 99 of 4096 bytes");
    let file = std::fs::File::open("/dev/null").unwrap();
    let device = RegionDevice::CudaFd(Arc::new(OwnedFd::from(file)));
    let region = fixture.region(device, 4096, plain).unwrap();
    assert_eq!((region.kind(), region.reason()), (RegionKind::Memfd, "no descriptors here"));
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let answer =
        tokio::task::block_in_place(|| region.attend(fixture.batch.clone(), [DIM, DIM])).unwrap();
    assert_eq!(answer, right);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_that_kernels_cannot_reach_are_copied_and_the_reason_is_named() {
    let fixture = Fixture::new().await;
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    // Values that are not aligned: this call alone.
    let region = fixture.open(1);
    let at = fixture.places();
    let odd = AttendPlaces { out: RegionSlice { offset: at.out.offset + 1, ..at.out }, ..at };
    let odd = AttendPlaces { lse: RegionSlice { offset: odd.lse.offset + 5, ..at.lse }, ..odd };
    tokio::task::block_in_place(|| {
        region.send_attend(fixture.batch.clone(), odd).unwrap();
        region.wait(odd.done).unwrap();
    });
    assert_eq!(fixture.answer(odd, 1), right);
    assert_eq!(["in_place", "copied"].map(|payloads| fixture.calls(payloads)), [0, 1]);
    assert_eq!(fixture.attend(&region, 1).unwrap(), right);
    // A device without the kernels: every call.
    *fixture.memories.copied.lock() = Some("no kernel kvd_queries".to_owned());
    let region = fixture.open(2);
    assert_eq!((region.kind(), region.copied()), (RegionKind::CudaIpc, "no kernel kvd_queries"));
    let before = fixture.memories.copies();
    assert_eq!(fixture.attend(&region, 2).unwrap(), right);
    assert_eq!(fixture.memories.copies() - before, 3, "queries, outputs, log-sum-exps");
    assert_eq!(fixture.calls("copied"), 2);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_opened_by_the_device_of_its_uuid_and_one_of_no_device_is_refused() {
    let other = Memories::default();
    let fixture = Fixture::over(vec![Memories::default(), other.clone()]).await;
    other.all.lock().insert(5, vec![0; 8192]);
    // As another tool may write it.
    let uuid = UUIDS[1].to_uppercase();
    let by = |uuid: &str| {
        let uuid = uuid.to_owned();
        fixture.open_with(5, |options| options.with_device_uuid(uuid))
    };
    let region = by(&uuid).unwrap();
    assert_eq!((region.kind(), &other.open.lock()[..]), (RegionKind::CudaIpc, &[5][..]));
    assert!(fixture.memories.open.lock().is_empty());
    // Without one the first device that can.
    let _first = fixture.open(5);
    fixture.eventually_open(&[5]).await;
    for wrong in ["GPU-33333333-3333-3333-3333-333333333333", "0", "cuda:1"] {
        let refused = by(wrong).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{refused}");
        let named = [wrong, UUIDS[0], UUIDS[1]].iter().all(|name| refused.message.contains(name));
        assert!(named, "{refused}");
    }
    // Of memory that is not offered.
    let options = RegionOptions::default().with_bytes(4096).with_device_uuid(UUIDS[0]);
    let path = fixture.dir.path().join("region");
    let refused = tokio::task::block_in_place(|| Shared::open(path, &options)).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{refused}");
    assert!(refused.message.contains("no device memory is offered"), "{refused}");
    // Its device refuses the handle: the others are not asked.
    other.all.lock().clear();
    let region = by(UUIDS[1]).unwrap();
    assert_eq!((region.kind(), region.reason()), (RegionKind::Memfd, "no memory 5 of 4608 bytes"));
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_is_told_before_the_answer_and_a_worker_that_leaves_then_keeps_its_memory_open() {
    let fixture = Fixture::new().await;
    let right = fixture.client.attend(fixture.batch.clone()).await.unwrap();
    let region = fixture.open_with(3, RegionOptions::with_launches).unwrap();
    let at = fixture.places();
    let send = || {
        tokio::task::block_in_place(|| {
            region.send_attend(fixture.batch.clone(), at).unwrap();
            region.wait_launched(at.done).unwrap()
        })
    };
    let busy = fixture.memories.busy.lock();
    assert_eq!(send(), Launch::Launched);
    assert_ne!(fixture.answer(at, 3), right, "the device is not done yet");
    drop(busy);
    tokio::task::block_in_place(|| region.wait(at.done)).unwrap();
    assert_eq!(fixture.answer(at, 3), right);
    let ended = tokio::task::block_in_place(|| region.wait_launched(at.done)).unwrap();
    assert_eq!(ended, Launch::Ended);
    // The worker dies while kernels use its memory.
    let busy = fixture.memories.busy.lock();
    assert_eq!(send(), Launch::Launched);
    drop(region);
    tokio::task::block_in_place(|| std::thread::sleep(Duration::from_millis(50)));
    assert_eq!(*fixture.memories.open.lock(), [3], "the device still uses it");
    drop(busy);
    fixture.eventually_open(&[]).await;
    assert_eq!(fixture.memories.uses_after_close(), 0);
    let next = fixture.open(4);
    assert_eq!(fixture.attend(&next, 4).unwrap(), right);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_of_another_namespace_reaches_no_model_and_nothing_is_launched() {
    let fixture = Fixture::new().await;
    let other = Namespace::new("other").unwrap();
    let region = fixture.open_with(9, |options| options.with_namespace(&other)).unwrap();
    let refused = fixture.attend(&region, 9).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::UnknownModel), "{refused}");
    // A length that is not the batch's, and a value that is none.
    let region = fixture.open(8);
    let at = fixture.places();
    let short = AttendPlaces { q: RegionSlice { bytes: at.q.bytes - 4, ..at.q }, ..at };
    let sent = region.send_attend(fixture.batch.clone(), short);
    let refused = tokio::task::block_in_place(|| sent.and_then(|()| region.wait(at.done)));
    let refused = refused.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::ShapeMismatch), "{refused}");
    assert_eq!(fixture.calls("in_place"), 0);
    fixture.memories.all.lock().get_mut(&8).unwrap()[4..8].copy_from_slice(&[0xFF; 4]);
    let refused = fixture.attend(&region, 8).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::NonFinite), "{refused}");
    fixture.running.drain().await;
}
