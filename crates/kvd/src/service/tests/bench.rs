//! A service, and a device that tells what was asked of it.

use crate::config::{Config, ConfigOverrides};
use crate::device_worker::{DeviceWorker, DeviceWorkerThread, WorkerLimits};
use crate::metrics::Metrics;
use crate::quotas::NamespaceQuotas;
use crate::service::tiers::CacheTiers;
use crate::service::{
    CallContext, CallOwner, KeptState, RegisteredModel, Service, ServiceError, StoreReply, draw_ids,
};
use bytes::Bytes;
use kvd_codec::{LayerPages, ModelCodec};
use kvd_compute::{
    AppendSteps, AttendBackend, AttendTask, Attended, Backend, BackendError, CpuBackend,
    CpuOptions, EncodeTask, EncodedBlocks, PageBackend, Stop, TransferBackend,
};
use kvd_core::{
    DType, ErrorCode, Extent, Geometry, LayerIndex, ModelId, Namespace, RopePairing, SequenceId,
};
use kvd_proto::domain::{ModelSpec, StoreChunk};
use kvd_testkit::forward::{ForwardingBackend, InjectedFaults};
use kvd_testkit::mount_forwarding;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// State of a device that tests see and change.
#[derive(Default)]
pub(super) struct Probe {
    pub(super) models: Mutex<BTreeSet<ModelId>>,
    /// Blocks of each call that encodes, however many slices it takes.
    pub(super) encoded: Mutex<Vec<usize>>,
    pub(super) faults: InjectedFaults,
    /// Whether blocks neither leave the device nor come back.
    pub(super) refuse_transfers: Mutex<bool>,
    /// Calls of `attend_slice`.
    pub(super) slices: Mutex<usize>,
    /// Query tokens of each of them.
    pub(super) asked: Mutex<Vec<usize>>,
    /// Units that [`SliceEvent::Units`] has run.
    pub(super) units: Mutex<usize>,
    /// The thread of the last of them.
    pub(super) attended_on: Mutex<Option<ThreadId>>,
    /// Event of the next of them.
    pub(super) next_slice: Mutex<SliceEvent>,
    /// Calls that encode or attend, in their order.
    pub(super) calls: Mutex<Vec<DeviceCall>>,
    /// The next call of `encode_slice` tells that it has begun, and waits.
    pub(super) encode_gate: Mutex<Option<CallGate>>,
    /// The device's thread.
    pub(super) thread: Mutex<Option<DeviceWorkerThread>>,
    /// `register` waits for this.
    pub(super) register_gate: Mutex<Option<mpsc::Receiver<()>>>,
}

/// A call of `attend_slice` does this.
#[derive(Default)]
pub(super) enum SliceEvent {
    #[default]
    Answer,
    /// Its slice is over at once.
    Pause,
    Panic,
    /// It waits for this first.
    Wait(mpsc::Receiver<()>),
    /// It has so many units first, which end early where a pause is wanted at once.
    Units(CountedUnits),
}

/// A call of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceCall {
    Attend,
    /// Whether it gave way.
    Encode {
        paused: bool,
    },
}

/// A call that tells that it has begun, and ends when it may.
pub(super) struct CallGate {
    pub(super) begun: mpsc::SyncSender<()>,
    pub(super) go: mpsc::Receiver<()>,
}

/// Units of a slice. The second tells that it has begun, and ends when it may.
pub(super) struct CountedUnits {
    pub(super) count: usize,
    pub(super) begun: mpsc::SyncSender<()>,
    pub(super) go: mpsc::Receiver<()>,
}

impl Probe {
    /// Runs units; whether a pause was wanted. Not by the clock, which goes on while tests work.
    fn run_units(&self, units: &CountedUnits, stop: &Stop) -> bool {
        let untimed = Stop { slice: None, ..stop.clone() };
        for unit in 0..units.count {
            if unit == 1 {
                units.begun.send(()).unwrap();
                units.go.recv().unwrap();
            }
            *self.units.lock() += 1;
            if untimed.slice_is_over() {
                return true;
            }
        }
        false
    }
}

struct Device {
    inner: CpuBackend,
    probe: Arc<Probe>,
}

mount_forwarding!(Device);

impl Device {
    fn check_transfer(&self) -> Result<(), BackendError> {
        if *self.probe.refuse_transfers.lock() {
            let message = "the copy engine does not answer".to_owned();
            return Err(BackendError::Device { code: ErrorCode::DeviceFailed, message });
        }
        Ok(())
    }
}

impl ForwardingBackend for Device {
    type Inner = CpuBackend;

    fn inner_backend(&self) -> &CpuBackend {
        &self.inner
    }

    fn inner_backend_mut(&mut self) -> &mut CpuBackend {
        &mut self.inner
    }

    fn injected_faults(&self) -> Option<&InjectedFaults> {
        Some(&self.probe.faults)
    }

    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        if codec.spec().to_string().contains("fp8") {
            let message = "this device has no kernel for fp8".to_owned();
            return Err(BackendError::Device { code: ErrorCode::InvalidCodec, message });
        }
        Ok(())
    }

    fn register(&mut self, model: ModelId, codec: ModelCodec) {
        // Not held while it waits: the test looks whether the gate was reached.
        let gate = self.probe.register_gate.lock().take();
        if let Some(gate) = gate {
            gate.recv().unwrap();
        }
        self.probe.models.lock().insert(model);
        self.inner.register(model, codec);
    }

    fn unregister(&mut self, model: ModelId) {
        self.probe.models.lock().remove(&model);
        self.inner.unregister(model);
    }

    fn encode_slice(
        &mut self,
        task: &mut EncodeTask,
        stop: &Stop,
    ) -> Result<Option<EncodedBlocks>, BackendError> {
        if task.under_way.is_none() {
            self.probe.encoded.lock().push(task.blocks.len());
        }
        let gate = self.probe.encode_gate.lock().take();
        if let Some(CallGate { begun, go }) = gate {
            begun.send(()).unwrap();
            go.recv().unwrap();
        }
        let untimed = Stop { slice: None, ..stop.clone() };
        let encoded = self.inner.encode_slice(task, &untimed)?;
        self.probe.calls.lock().push(DeviceCall::Encode { paused: encoded.is_none() });
        Ok(encoded)
    }

    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        *self.probe.attended_on.lock() = Some(thread::current().id());
        self.probe.calls.lock().push(DeviceCall::Attend);
        *self.probe.slices.lock() += 1;
        self.probe.asked.lock().push(task.plan.query_tokens());
        let event = std::mem::take(&mut *self.probe.next_slice.lock());
        match event {
            SliceEvent::Answer => {}
            SliceEvent::Pause => return Ok(None),
            SliceEvent::Panic => panic!("a defect"),
            // The other end may be gone: nothing to wait for.
            SliceEvent::Wait(gate) => drop(gate.recv()),
            SliceEvent::Units(units) if self.probe.run_units(&units, stop) => return Ok(None),
            SliceEvent::Units(_) => {}
        }
        self.inner.attend_slice(task, stop)
    }

    fn read_slot(&mut self, from: Extent, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.check_transfer()?;
        self.inner.read_slot(from, bytes)
    }

    fn write_rows_slot(&mut self, bytes: &[u8], to: Extent) -> Result<(), BackendError> {
        self.check_transfer()?;
        self.inner.write_rows_slot(bytes, to)
    }

    fn write_pages_slot(&mut self, pages: LayerPages<'_>, to: Extent) -> Result<(), BackendError> {
        self.check_transfer()?;
        self.inner.write_pages_slot(pages, to)
    }
}

/// One layer, one head: a block of 16 tokens takes 512 bytes.
pub(super) fn geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 8,
        head_dim_v: 8,
        block_tokens: 16,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

pub(super) fn spec(name: &str, codec: &str) -> ModelSpec {
    let (name, codec) = (name.to_owned(), codec.to_owned());
    ModelSpec { name, geometry: geometry(), codec, calibration: Bytes::new() }
}

pub(super) fn call() -> CallContext {
    CallContext::new(Namespace::new("default").unwrap())
}

/// A call of a connection of its own.
pub(super) fn stranger() -> CallContext {
    CallContext { owner: CallOwner::new(1 << 30), ..call() }
}

/// `tokens` tokens for the layer; K and V the same, all finite.
pub(super) fn chunk(sequence: SequenceId, start: u32, tokens: u32) -> StoreChunk {
    let values: Vec<f32> = (0..tokens * 8).map(|i| ((i * 7 + start) % 61) as f32).collect();
    let mut bytes = vec![0; values.len() * 2];
    DType::F16.narrow_values(&values, &mut bytes);
    let bytes = Bytes::from(bytes);
    StoreChunk { sequence, layer: LayerIndex(0), start, tokens, k: bytes.clone(), v: bytes }
}

/// A service over so many devices, and what is seen of each.
pub(super) fn several(
    count: usize,
    arena_bytes: u64,
    settings: &[(&str, &str)],
) -> (Arc<Service>, Vec<Arc<Probe>>) {
    let small_pages = [("limits.page_tokens_min", "1")];
    let flags = small_pages
        .iter()
        .chain(settings)
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    let overrides = ConfigOverrides { flags, ..ConfigOverrides::default() };
    let config = Arc::new(Config::load(&overrides).unwrap());
    let options = CpuOptions { arena_bytes, prefault: false, threads: 1 };
    let metrics = Arc::new(Metrics::new());
    let probes: Vec<_> = (0..count).map(|_| Arc::<Probe>::default()).collect();
    let pools = vec![arena_bytes; count];
    let quotas = NamespaceQuotas::open_file(&config, &pools).unwrap();
    let table = quotas.quota_table().clone();
    let (queue_jobs_max, merging) = (config.queue_jobs_max, config.merging);
    let limits = WorkerLimits { queue_jobs_max, merging, quotas: table };
    let start = |probe: &Arc<Probe>| {
        let inner = CpuBackend::new(options).unwrap();
        let device = Box::new(Device { inner, probe: probe.clone() });
        // The thread ends with the last handle on the worker.
        let started = DeviceWorker::start_thread(device, limits.clone(), &metrics, || {});
        let (worker, thread) = started.unwrap();
        *probe.thread.lock() = Some(thread);
        worker
    };
    let workers = probes.iter().map(start).collect();
    let ids = draw_ids().unwrap();
    let tiers = CacheTiers::open_tiers(&config.cache, &metrics).unwrap();
    let kept = KeptState { tiers, quotas };
    (Arc::new(Service::new(config.clone(), workers, metrics, ids, kept)), probes)
}

pub(super) struct Bench {
    pub(super) service: Arc<Service>,
    pub(super) probe: Arc<Probe>,
}

impl Bench {
    pub(super) fn new(arena_bytes: u64, settings: &[(&str, &str)]) -> Self {
        let (service, mut probes) = several(1, arena_bytes, settings);
        Self { service, probe: probes.remove(0) }
    }
    pub(super) async fn register(&self, name: &str, codec: &str) -> Arc<RegisteredModel> {
        self.service.register_model(&call(), spec(name, codec)).await.unwrap()
    }

    pub(super) async fn store(
        &self,
        sequence: SequenceId,
        start: u32,
        tokens: u32,
    ) -> Result<StoreReply, ServiceError> {
        self.service.store_chunk(&call(), chunk(sequence, start, tokens)).await
    }

    /// Keeps the device busy until the answer is dropped.
    pub(super) async fn hold(&self) -> mpsc::SyncSender<()> {
        let (release, released) = mpsc::sync_channel::<()>(1);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let worker = self.service.first_worker().clone();
        tokio::spawn(async move {
            let work = move |_: &mut dyn Backend| {
                let _ = begun.send(());
                let _ = released.recv();
                Ok(())
            };
            worker.run_closure(&call(), work).await
        });
        has_begun.await.unwrap();
        release
    }

    /// Returns when `count` jobs wait.
    pub(super) async fn queued(&self, count: usize) {
        while self.service.first_worker().queued_jobs() < count {
            tokio::task::yield_now().await;
        }
    }

    /// Returns when the device has nothing left to do and nobody has it.
    pub(super) async fn idle(&self) {
        let worker = self.service.first_worker();
        worker.run_closure(&call(), |_| Ok(())).await.unwrap();
        // An answer comes before the thread gives the device back.
        while !worker.is_idle() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ids that callers can find, and whether the device knows exactly those.
    pub(super) fn models(&self) -> (BTreeSet<ModelId>, bool) {
        let listed = self.service.list_models(&call()).unwrap();
        let ids: BTreeSet<_> = listed.iter().map(|model| model.shape.id).collect();
        let same = *self.probe.models.lock() == ids;
        (ids, same)
    }
}
