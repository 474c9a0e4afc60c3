//! [`Backend`] on a GPU: page memory, attention and encoding on the device; what is measured or has
//! no store kernel is encoded on the host, which also builds Huffman tables and decodes.
//!
//! Runs on the lane's thread. All memory is taken when it is opened, that for tables of layers and
//! pinned memory of the host too (only a driver takes some for itself, for graphs): bytes for the
//! device are copied while kernels run, and results are waited for by an event.
//! After an error that sticks nothing is called any more: every answer is `DEVICE_FAILED`, and
//! [`Backend::failure`] tells the lane.

mod attend;
mod encode;
mod graphs;
mod in_place;
mod kept;
mod memory;
mod order;
mod region;
mod stage;
mod staging;
mod train;

use crate::driver::{DeviceCopy, Driver, DriverError};
use crate::jit::{CompileReport, Jit, KernelCompiler};
use crate::side::ROWS;
use crate::{Choices, PlanError, Shapes, StoreShapes, Turns};
use encode::Held;
use graphs::Graphs;
use kvd_codec::{ModelCodec, Page, PageHeader};
use kvd_compute::{
    AttendPlan, Attended, Backend, BackendError, CpuBackend, CpuOptions, DeviceInfo, DeviceRegion,
    EncodeSource, EncodedPages, IncomingRows, Launches, LoadPlan, LoadedRows, ModelBytes,
    OpenError, OpenedRegion, PlanPart, RawTarget, RegionHandle, RegionPlaces, RegionRows, Sampling,
    Source, StagedRows, StagedWrite,
};
use kvd_core::{Coded, ErrorCode, Extent, LayerIndex, ModelId, Side};
use memory::Device;
use region::Regions;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// Host memory in which pages and rows are coded; it costs nothing before it is used.
const HOST_BYTES: u64 = 256 << 20;

/// Threads of a thread block, of every kernel.
const THREADS: u32 = 128;

/// Query rows that a layer's kernels are made ready for before any are known.
const ROWS_USUAL: u32 = ROWS[1];

/// How much of a GPU the backend takes.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Page memory in bytes.
    pub arena_bytes: u64,
    /// Memory for block tables, queries and partial results of one attend, bytes.
    pub scratch_bytes: u64,
    /// Memory for what kernels look up: tables, transforms and codebooks of every layer that was
    /// used since its model was registered, bytes.
    pub table_bytes: u64,
    /// Pinned memory of the host that copies go through, bytes of one piece; six are taken.
    pub staging_bytes: u64,
    /// Host threads for encoding; 0 means one per core.
    pub threads: usize,
    /// Sequences of launches that are kept as graphs at most; 0 for none.
    pub graphs: usize,
}

/// Why a GPU could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaOpenError {
    /// The driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// What encodes on the host.
    #[error("host side: {0}")]
    Host(#[from] OpenError),
}

/// What a layer's kernels read, and where it lies on the device.
struct Layer {
    /// What kernels are launched with, by the query rows that they take: 1, 4 or 8. All shapes have
    /// the same tables, which the first keeps.
    by_rows: BTreeMap<u32, (Choices, Shapes)>,
    tables: u64,
    /// Where kernels encode.
    store: Option<(StoreShapes, u64)>,
    /// What takes queries from a worker's memory; brought with the first of them.
    turns: Option<(Turns, u64)>,
}

impl Layer {
    fn stores(&self) -> bool {
        self.store.is_some()
    }

    fn is_current(&self, codec: &ModelCodec) -> bool {
        self.by_rows.values().all(|(_, shapes)| shapes.is_current(codec))
    }
}

/// A model's layers, and which of its blocks are measured. Its codec is the host's, which builds
/// Huffman tables.
#[derive(Default)]
struct Model {
    layers: BTreeMap<LayerIndex, Layer>,
    sampling: Sampling,
}

/// A GPU as a backend.
pub struct CudaBackend {
    device: Device,
    /// Encodes and decodes what is copied to it.
    host: CpuBackend,
    models: HashMap<ModelId, Model>,
    /// Header of the page that begins at an offset of the arena.
    headers: BTreeMap<u64, PageHeader>,
    regions: Regions,
    held: Held,
    graphs: Graphs,
    /// Compiles kernels for pairs of sides that have none of their own.
    jit: Option<Jit>,
}

/// An error of the device with its code.
fn error(code: ErrorCode, message: impl ToString) -> BackendError {
    BackendError::Device { code, message: message.to_string() }
}

impl From<PlanError> for BackendError {
    fn from(reason: PlanError) -> Self {
        error(reason.code(), reason)
    }
}

impl CudaBackend {
    /// Takes the memory and loads the kernels, fat binaries.
    ///
    /// # Errors
    /// When the GPU has not the memory or refuses the kernels.
    pub fn open(
        driver: Box<dyn Driver>,
        kernels: &[&[u8]],
        options: CudaOptions,
    ) -> Result<Self, CudaOpenError> {
        let mut device = Device::open(driver, options)?;
        for image in kernels {
            device.load(image)?;
        }
        let host = CpuBackend::new(CpuOptions {
            arena_bytes: HOST_BYTES,
            prefault: false,
            threads: options.threads,
        })?;
        let (models, headers) = (HashMap::new(), BTreeMap::new());
        let (regions, held) = (Regions::default(), Held::default());
        let graphs = Graphs::new(options.graphs);
        Ok(Self { device, host, models, headers, regions, held, graphs, jit: None })
    }

    /// Compiles kernels for codecs that share one, from now on as they are registered, and keeps
    /// them in the folder `cache`.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn compile_with(
        &mut self,
        compiler: Box<dyn KernelCompiler>,
        cache: PathBuf,
        report: CompileReport,
    ) -> std::io::Result<()> {
        let compute = self.device.limits().compute;
        self.jit = Some(Jit::start(compiler, cache, compute, report)?);
        Ok(())
    }

    fn codec(&self, model: ModelId) -> Result<&ModelCodec, BackendError> {
        self.host.codec(model)
    }

    /// What a layer's kernels for units of `rows` query rows are launched with.
    fn choices(
        &self,
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: u32,
    ) -> Result<(Choices, Shapes), BackendError> {
        let limits = self.device.limits();
        let choices = Choices::of_layer(codec, layer, rows, limits).ok_or_else(|| {
            let message = format!(
                "no thread block of this codec's kernels fits {}; register the model with another \
                 codec or on another device",
                limits.name
            );
            error(ErrorCode::InvalidCodec, message)
        })?;
        Ok((choices, Shapes::new(codec, layer, choices.rooms())))
    }

    /// A layer with its tables on the device, brought there once, and ready for kernels of that
    /// many query rows where it is known.
    fn bring_layer(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        rows: Option<u32>,
    ) -> Result<&Layer, BackendError> {
        let codec = self.host.codec(model)?;
        let layers = &self.models.entry(model).or_default().layers;
        let known = layers.get(&layer).filter(|known| known.is_current(codec));
        let missing =
            rows.filter(|rows| known.is_some_and(|known| !known.by_rows.contains_key(rows)));
        if known.is_none() {
            let rows = rows.unwrap_or(ROWS_USUAL);
            let (choices, shapes) = self.choices(codec, layer, rows)?;
            let store = StoreShapes::new(codec, layer, &shapes);
            let tables = self.device.keep(&shapes.tables)?;
            let steps = store.map(|store| Ok((self.device.keep(&store.steps)?, store)));
            let store = match steps.transpose() {
                Ok(store) => store.map(|(address, store)| (store, address)),
                Err(error) => {
                    self.device.free(tables);
                    return Err(error);
                }
            };
            let by_rows = BTreeMap::from([(rows, (choices, shapes))]);
            let fresh = Layer { by_rows, tables, store, turns: None };
            let stale = self.models.entry(model).or_default().layers.insert(layer, fresh);
            stale.into_iter().for_each(|stale| self.free_layer(stale));
        } else if let Some(rows) = missing {
            let (choices, mut shapes) = self.choices(codec, layer, rows)?;
            // They lie on the device already.
            shapes.tables = Vec::new();
            let known = self.models.entry(model).or_default().layers.get_mut(&layer);
            if let Some(known) = known {
                known.by_rows.insert(rows, (choices, shapes));
            }
        }
        Ok(&self.models[&model].layers[&layer])
    }

    fn free_layer(&mut self, layer: Layer) {
        self.device.free(layer.tables);
        let others = [layer.store.map(|(_, at)| at), layer.turns.map(|(_, at)| at)];
        others.into_iter().flatten().for_each(|address| self.device.free(address));
    }

    /// Copies a part's slot to the host and says where it lies there.
    fn fetch(&mut self, source: &Source) -> Result<Source, BackendError> {
        let mut source = source.clone();
        let (Source::Raw { extent, .. } | Source::Pages { extent, .. }) = &mut source;
        *extent = self.fetch_extent(*extent, 0)?;
        Ok(source)
    }

    /// Copies an extent to the host's memory at `offset`.
    fn fetch_extent(&mut self, extent: Extent, offset: u64) -> Result<Extent, BackendError> {
        let mut bytes = vec![0; extent.len as usize];
        self.device.read(extent.offset, &mut bytes)?;
        let to = Extent { offset, len: extent.len };
        if to.end() > HOST_BYTES {
            let message = format!("{} bytes are over the host's {HOST_BYTES}", to.end());
            return Err(error(ErrorCode::LimitExceeded, message));
        }
        self.host.fill(to, &bytes);
        Ok(to)
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> DeviceInfo {
        let arena_bytes = self.device.arena_bytes();
        let (description, uuid) = (self.device.description(), self.device.uuid());
        DeviceInfo { description, arena_bytes, uuid }
    }

    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        for layer in (0..codec.geometry().layers).map(LayerIndex) {
            self.choices(codec, layer, ROWS[2])?.1.check()?;
        }
        Ok(())
    }

    fn failure(&self) -> Option<&str> {
        self.device.failure()
    }

    fn launches(&self) -> Launches {
        self.graphs.launches().clone()
    }

    fn register(&mut self, model: ModelId, codec: ModelCodec) {
        self.unregister(model);
        if let Some(jit) = &mut self.jit {
            jit.want(&codec);
        }
        self.host.register(model, codec);
        self.models.insert(model, Model::default());
    }

    fn unregister(&mut self, model: ModelId) {
        self.host.unregister(model);
        self.graphs.forget(&mut self.device, |(owner, _)| owner == model);
        let model = self.models.remove(&model);
        for layer in model.into_iter().flat_map(|model| model.layers.into_values()) {
            self.free_layer(layer);
        }
    }

    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        self.host.model_bytes(model)
    }

    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        self.host.check(model, rows)
    }

    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let geometry = self.codec(model)?.geometry().clone();
        let layout = geometry.raw_layout(to.capacity_rows);
        let heads = geometry.kv_heads as usize;
        for (side, bytes) in [(Side::Key, &rows.k), (Side::Value, &rows.v)] {
            let row_bytes = layout.row_bytes(side) as usize;
            for head in 0..heads {
                // From `[tokens, heads, channels]` to rows of one head.
                let first = source_row as usize * heads + head;
                let rows = bytes.chunks_exact(row_bytes).skip(first).step_by(heads);
                let rows = rows.take(count as usize).collect::<Vec<_>>().concat();
                let at = layout.row_offset(side, head as u64, u64::from(to.first_row));
                self.device.write(to.extent.offset + at, &rows)?;
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let geometry = self.codec(model)?.geometry().clone();
        let Source::Raw { extent, capacity_rows, first_row } = *from else {
            let part = PlanPart { first_token: 0, rows: count, source: from.clone() };
            let dtype = geometry.dtype;
            let plan = LoadPlan { model, layer, dtype, parts: vec![part] };
            let LoadedRows { k, v } = self.load(&plan)?;
            let rows = IncomingRows { tokens: count, k: k.into(), v: v.into() };
            return self.write(model, &rows, 0, count, to);
        };
        let [source, target] =
            [capacity_rows, to.capacity_rows].map(|rows| geometry.raw_layout(rows));
        let rows = Side::BOTH.into_iter().flat_map(|side| {
            (0..u64::from(geometry.kv_heads)).map(move |head| DeviceCopy {
                from: extent.offset + source.row_offset(side, head, first_row.into()),
                to: to.extent.offset + target.row_offset(side, head, to.first_row.into()),
                bytes: u64::from(count) * source.row_bytes(side),
            })
        });
        self.device.copy(rows.collect())
    }

    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        self.encode_blocks(model, layer, blocks)
    }

    fn place(&mut self, pages: &EncodedPages, to: Extent) {
        // What the slot held before is gone.
        let stale: Vec<u64> =
            self.headers.range(to.offset..to.end()).map(|(offset, _)| *offset).collect();
        for offset in stale {
            self.headers.remove(&offset);
        }
        if let Some(held) = pages.held {
            return self.place_held(held, to);
        }
        // A failure is kept and told to the lane, which then answers no one with success.
        if self.device.write(to.offset, &pages.bytes).is_err() {
            return;
        }
        let mut start = 0;
        for end in pages.page_ends.iter().map(|end| *end as usize) {
            // A page that cannot be read is unknown, and reading it an error.
            if let Ok(page) = Page::parse(&pages.bytes[start..end]) {
                self.headers.insert(to.offset + start as u64, *page.header());
            }
            start = end;
        }
    }

    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let mut q = vec![0f32; plan.q.len() / plan.dtype.size_bytes()];
        plan.dtype.widen(&plan.q, &mut q);
        if let Some(index) = q.iter().position(|value| !value.is_finite()) {
            return Err(BackendError::NonFiniteQuery { index, value: q[index] });
        }
        self.attend_all(plan)
    }

    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        let mut loaded = LoadedRows { k: Vec::new(), v: Vec::new() };
        for part in &plan.parts {
            let part = PlanPart { source: self.fetch(&part.source)?, ..part.clone() };
            let rows = self.host.load(&LoadPlan { parts: vec![part], ..plan.clone() })?;
            loaded.k.extend(rows.k);
            loaded.v.extend(rows.v);
        }
        Ok(loaded)
    }

    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        self.open_memory(handle, bytes)
    }

    fn attend_in_place(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        self.attend_at(plan, places, launched)
    }

    fn stage(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        self.stage_rows(model, rows)
    }

    fn write_staged(
        &mut self,
        staged: &StagedRows,
        writes: &[StagedWrite],
    ) -> Result<(), BackendError> {
        self.write_rows(staged, writes)
    }

    fn close_region(&mut self, region: DeviceRegion) {
        self.close_memory(region);
    }

    fn read_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.read_memory(region, offset, bytes)
    }

    fn write_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.write_memory(region, offset, bytes)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let models: Vec<ModelId> = self.models.keys().copied().collect();
        for model in models {
            self.unregister(model);
        }
        self.graphs.forget(&mut self.device, |_| true);
        self.regions.clear(&mut self.device);
    }
}
