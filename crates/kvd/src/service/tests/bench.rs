//! A service, and a device that tells what was asked of it.

use crate::config::{Config, ConfigOverrides};
use crate::device_worker::{DeviceWorker, WorkerLimits};
use crate::metrics::Metrics;
use crate::quotas::NamespaceQuotas;
use crate::service::tiers::CacheTiers;
use crate::service::{
    CallContext, CallOwner, KeptState, RegisteredModel, Service, ServiceError, StoreReply, draw_ids,
};
use bytes::Bytes;
use kvd_codec::{LayerPages, ModelCodec};
use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, AttendTask, Attended, Backend, BackendError,
    CpuBackend, CpuOptions, DeviceInfo, EncodeSource, EncodedPages, IncomingRows, LoadPlan,
    LoadedRows, ModelBytes, PageBackend, RawTarget, RegionBackend, Source, Stop, TransferBackend,
};
use kvd_core::{
    DType, ErrorCode, Extent, Geometry, LayerIndex, ModelId, Namespace, RopePairing, SequenceId,
};
use kvd_proto::domain::{ModelSpec, StoreChunk};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

/// State of a device that tests see and change.
#[derive(Default)]
pub(super) struct Probe {
    pub(super) models: Mutex<BTreeSet<ModelId>>,
    /// Blocks of each call of `encode`.
    pub(super) encoded: Mutex<Vec<usize>>,
    /// The first block of the next `encode` has an error.
    pub(super) fail_first: Mutex<bool>,
    /// The next `write` finds the device lost.
    pub(super) lose: Mutex<bool>,
    /// Whether blocks neither leave the device nor come back.
    pub(super) refuse_transfers: Mutex<bool>,
    /// Calls of `attend_slice`.
    pub(super) slices: Mutex<usize>,
    /// `register` waits for this.
    pub(super) register_gate: Mutex<Option<mpsc::Receiver<()>>>,
}

struct Device {
    inner: CpuBackend,
    probe: Arc<Probe>,
    failure: Option<&'static str>,
}

impl PageBackend for Device {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        if codec.spec().to_string().contains("fp8") {
            let message = "this device has no kernel for fp8".to_owned();
            return Err(BackendError::Device { code: ErrorCode::InvalidCodec, message });
        }
        Ok(())
    }

    fn failure(&self) -> Option<&str> {
        self.failure
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

    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        self.inner.model_bytes(model)
    }

    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        self.inner.load(plan)
    }
}

impl AppendSteps for Device {
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        self.inner.check(model, rows)
    }

    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        self.inner.copy(model, layer, from, count, to)
    }

    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        if *self.probe.lose.lock() {
            // As where a call cannot answer: only `failure` tells.
            self.failure = Some("the GPU fell off the bus");
            return Ok(());
        }
        self.inner.write(model, rows, source_row, count, to)
    }

    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        self.probe.encoded.lock().push(blocks.len());
        let mut encoded = self.inner.encode(model, layer, blocks)?;
        if std::mem::take(&mut *self.probe.fail_first.lock()) {
            encoded[0] = Err(BackendError::NonFiniteQuery { index: 0, value: f32::NAN });
        }
        Ok(encoded)
    }

    fn move_pages(&mut self, pages: &EncodedPages, to: Extent) {
        self.inner.move_pages(pages, to);
    }
}

impl AttendBackend for Device {
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        self.inner.attend(plan)
    }

    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        *self.probe.slices.lock() += 1;
        self.inner.attend_slice(task, stop)
    }

    fn shares_pages(&self) -> bool {
        self.inner.shares_pages()
    }
}

impl Device {
    fn check_transfer(&self) -> Result<(), BackendError> {
        if *self.probe.refuse_transfers.lock() {
            let message = "the copy engine does not answer".to_owned();
            return Err(BackendError::Device { code: ErrorCode::DeviceFailed, message });
        }
        Ok(())
    }
}

impl TransferBackend for Device {
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

    fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
        self.inner.page_codec(model)
    }
}

impl RegionBackend for Device {}

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
    let (queue_jobs_max, weights) = (config.queue_jobs_max, config.weights.clone());
    let pools = vec![arena_bytes; count];
    let quotas = NamespaceQuotas::open_file(&config.quotas, &pools).unwrap();
    let table = quotas.quota_table().clone();
    let merging = config.merging;
    let limits = WorkerLimits { queue_jobs_max, weights, merging, quotas: table };
    let start = |probe: &Arc<Probe>| {
        let inner = CpuBackend::new(options).unwrap();
        let device = Box::new(Device { inner, probe: probe.clone(), failure: None });
        // The thread ends with the last handle on the worker.
        DeviceWorker::start_thread(device, limits.clone(), &metrics, || {}).unwrap().0
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

    /// Returns when the device has nothing left to do.
    pub(super) async fn idle(&self) {
        self.service.first_worker().run_closure(&call(), |_| Ok(())).await.unwrap();
    }

    /// Ids that callers can find, and whether the device knows exactly those.
    pub(super) fn models(&self) -> (BTreeSet<ModelId>, bool) {
        let listed = self.service.list_models(&call()).unwrap();
        let ids: BTreeSet<_> = listed.iter().map(|model| model.shape.id).collect();
        let same = *self.probe.models.lock() == ids;
        (ids, same)
    }
}
