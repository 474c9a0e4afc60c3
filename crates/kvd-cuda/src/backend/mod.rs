//! A [`Backend`](kvd_compute::Backend) on a GPU: page memory, attention and encoding on the device;
//! what is measured or has no store kernel is encoded on the host, which also builds Huffman tables
//! and decodes.
//!
//! Runs on the device worker's thread. All memory is taken when it is opened, that for tables of
//! layers, every kernel and pinned memory of the host too (only a driver takes some for itself, for
//! graphs and for kernels that are compiled late): bytes for the device are copied while kernels
//! run, and results are waited for by an event, for a bounded time.
//! After an error that sticks, or work that does not end, nothing is called any more: every answer
//! is `DEVICE_FAILED`, and [`PageBackend::failure`] tells the worker.

mod attend;
mod encode;
mod graphs;
mod in_place;
mod layers;
mod memory;
mod pinned_ring;
mod region;
mod region_copy;
mod stream_order;
mod table_arena;
mod train;
mod transfer;
mod wait;

use crate::PlanError;
use crate::driver::{DeviceCopy, Driver, DriverError};
use crate::jit::{CompileReport, JitCompiler, KernelCompiler};
use crate::kernel_choice::ROWS;
use encode::ScratchPages;
use graphs::GraphCache;
use kvd_codec::{ModelCodec, Page, PageHeader};
use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, Attended, BackendError, CpuBackend, CpuOptions,
    DeviceInfo, DeviceRegion, EncodeSource, EncodedPages, IncomingRows, Launches, LoadPlan,
    LoadedRows, ModelBytes, OpenError, OpenedRegion, PageBackend, PlanPart, PlannedWrite,
    RawTarget, RegionBackend, RegionHandle, RegionPlaces, RegionRows, Source, StagedRows,
};
use kvd_core::{Coded, ErrorCode, Extent, LayerIndex, ModelId, Side};
use layers::DeviceModel;
use memory::DeviceMemory;
use region::OpenRegions;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

/// Host memory in which pages and rows are coded; it costs nothing before it is used.
const HOST_BYTES: u64 = 256 << 20;

/// Query rows that a layer's kernels are made ready for before any are known.
const ROWS_USUAL: u32 = ROWS[1];

/// How much of a GPU the backend takes.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Page memory in bytes.
    pub arena_bytes: u64,
    /// Memory for block tables, queries and partial results of one attend, bytes.
    pub scratch_bytes: u64,
    /// Memory for what kernels look up: tables, transforms and codebooks of every layer of the
    /// models that are registered, bytes.
    pub table_bytes: u64,
    /// Pinned memory of the host that copies go through, bytes of one piece; six are taken.
    pub staging_bytes: u64,
    /// Host threads for encoding; 0 means one per core.
    pub threads: usize,
    /// Sequences of launches that are kept as graphs at most; 0 for none.
    pub graphs: usize,
    /// How long the host waits for work: after that the device has failed.
    pub kernel_timeout: Duration,
}

/// Why a GPU could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaOpenError {
    /// The driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The CPU backend, which encodes on the host, could not be opened.
    #[error("host side: {0}")]
    Host(#[from] OpenError),
}

/// A GPU as a backend.
pub struct CudaBackend {
    device: DeviceMemory,
    /// Encodes and decodes rows that are copied to it.
    host: CpuBackend,
    models: HashMap<ModelId, DeviceModel>,
    /// Header of the page that begins at an offset of the arena.
    headers: BTreeMap<u64, PageHeader>,
    regions: OpenRegions,
    held: ScratchPages,
    graphs: GraphCache,
    /// Compiles kernels for pairs of sides that have none of their own.
    jit: Option<JitCompiler>,
}

/// An error of the device with its code.
fn device_error(code: ErrorCode, message: impl ToString) -> BackendError {
    BackendError::Device { code, message: message.to_string() }
}

impl From<PlanError> for BackendError {
    fn from(reason: PlanError) -> Self {
        device_error(reason.code(), reason)
    }
}

impl CudaBackend {
    /// Takes the memory and loads the kernels, fat binaries.
    ///
    /// # Errors
    /// When the GPU has not the memory or refuses the kernels.
    pub fn open_backend(
        driver: Box<dyn Driver>,
        kernels: &[&[u8]],
        options: CudaOptions,
    ) -> Result<Self, CudaOpenError> {
        let mut device = DeviceMemory::open_device(driver, options)?;
        for image in kernels {
            device.load_kernels(image)?;
        }
        let host = CpuBackend::new(CpuOptions {
            arena_bytes: HOST_BYTES,
            prefault: false,
            threads: options.threads,
        })?;
        let (models, headers) = (HashMap::new(), BTreeMap::new());
        let (regions, held) = (OpenRegions::default(), ScratchPages::default());
        let graphs = GraphCache::new(options.graphs);
        Ok(Self { device, host, models, headers, regions, held, graphs, jit: None })
    }

    /// Compiles kernels for codecs that share one, from now on as they are registered, and keeps
    /// them in the folder `cache`, if there is one.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn compile_with(
        &mut self,
        compiler: Box<dyn KernelCompiler>,
        cache: impl Into<Option<PathBuf>>,
        report: CompileReport,
    ) -> std::io::Result<()> {
        let compute = self.device.limits().compute;
        self.jit = Some(JitCompiler::start_thread(compiler, cache.into(), compute, report)?);
        Ok(())
    }

    fn model_codec(&self, model: ModelId) -> Result<&ModelCodec, BackendError> {
        self.host.codec(model)
    }

    /// Copies a part's slot to the host and says where it lies there.
    fn fetch_slot(&mut self, source: &Source) -> Result<Source, BackendError> {
        let mut source = source.clone();
        let (Source::Raw { extent, .. } | Source::Pages { extent, .. }) = &mut source;
        *extent = self.fetch_extent(*extent, 0)?;
        Ok(source)
    }

    /// Forgets the headers of pages that lay in a slot before.
    fn forget_headers(&mut self, slot: Extent) {
        let stale: Vec<u64> =
            self.headers.range(slot.offset..slot.end()).map(|(offset, _)| *offset).collect();
        for offset in stale {
            self.headers.remove(&offset);
        }
    }

    /// Notes the headers of pages that lie in a slot.
    fn note_headers(&mut self, bytes: &[u8], ends: &[u32], slot: Extent) {
        let mut start = 0;
        for end in ends.iter().map(|end| *end as usize) {
            // A page that cannot be read is unknown, and reading it an error.
            if let Ok(page) = Page::parse_page(&bytes[start..end]) {
                self.headers.insert(slot.offset + start as u64, *page.header());
            }
            start = end;
        }
    }

    /// Copies an extent to the host's memory at `offset`.
    fn fetch_extent(&mut self, extent: Extent, offset: u64) -> Result<Extent, BackendError> {
        let mut bytes = vec![0; extent.len as usize];
        self.device.read_arena(extent.offset, &mut bytes)?;
        let to = Extent { offset, len: extent.len };
        if to.end() > HOST_BYTES {
            let message = format!("{} bytes are over the host's {HOST_BYTES}", to.end());
            return Err(device_error(ErrorCode::LimitExceeded, message));
        }
        self.host.fill(to, &bytes);
        Ok(to)
    }
}

impl PageBackend for CudaBackend {
    fn info(&self) -> DeviceInfo {
        let arena_bytes = self.device.arena_bytes();
        let (description, uuid) = (self.device.description(), self.device.uuid());
        DeviceInfo { description, arena_bytes, uuid }
    }

    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        self.check_served(codec)
    }

    fn failure(&self) -> Option<&str> {
        self.device.failure_message()
    }

    fn register(&mut self, model: ModelId, codec: ModelCodec) {
        self.unregister(model);
        if let Some(jit) = &mut self.jit {
            jit.request_codec(&codec);
        }
        self.host.register(model, codec);
        self.models.insert(model, DeviceModel::default());
        // Who did not ask whether there is room is told by the first call that needs some.
        let _ = self.reserve_model(model);
    }

    fn unregister(&mut self, model: ModelId) {
        self.host.unregister(model);
        self.graphs.forget_graphs(&mut self.device, |(owner, _)| owner == model);
        self.forget_model(model);
    }

    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        self.host.model_bytes(model)
    }

    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        let mut loaded = LoadedRows { k: Vec::new(), v: Vec::new() };
        for part in &plan.parts {
            let part = PlanPart { source: self.fetch_slot(&part.source)?, ..part.clone() };
            let rows = self.host.load(&LoadPlan { parts: vec![part], ..plan.clone() })?;
            loaded.k.extend(rows.k);
            loaded.v.extend(rows.v);
        }
        Ok(loaded)
    }
}

impl AppendSteps for CudaBackend {
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        self.host.check(model, rows)
    }

    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let geometry = self.model_codec(model)?.geometry().clone();
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
        self.device.copy_arena(rows.collect())
    }

    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let geometry = self.model_codec(model)?.geometry().clone();
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
                self.device.write_arena(to.extent.offset + at, &rows)?;
            }
        }
        Ok(())
    }

    fn write_staged(
        &mut self,
        staged: &StagedRows,
        writes: &[PlannedWrite],
    ) -> Result<(), BackendError> {
        self.write_rows(staged, writes)
    }

    fn set_queries(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        heads: &[Vec<f32>],
    ) -> Result<(), BackendError> {
        // Blocks are measured there.
        self.host.set_queries(model, layer, heads)
    }

    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        self.encode_blocks(model, layer, blocks)
    }

    fn move_pages(&mut self, pages: &EncodedPages, to: Extent) {
        self.forget_headers(to);
        if let Some(held) = pages.held {
            return self.place_held(held, to);
        }
        // A failure is kept and told to the worker, which then answers no one with success.
        if self.device.write_arena(to.offset, &pages.bytes).is_err() {
            return;
        }
        self.note_headers(&pages.bytes, &pages.page_ends, to);
    }
}

impl AttendBackend for CudaBackend {
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let mut q = vec![0f32; plan.q.len() / plan.dtype.size_bytes()];
        plan.dtype.widen_values(&plan.q, &mut q);
        if let Some(index) = q.iter().position(|value| !value.is_finite()) {
            return Err(BackendError::NonFiniteQuery { index, value: q[index] });
        }
        let [dim, _] = self.row_dims(plan)?;
        let scale = plan.score_scale(dim);
        if let Some(index) = q.iter().position(|value| !(value * scale).is_finite()) {
            return Err(BackendError::query_overflow(plan, index / dim, dim));
        }
        self.attend_all(plan)
    }

    fn launches(&self) -> Launches {
        self.graphs.launches().clone()
    }
}

impl RegionBackend for CudaBackend {
    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        self.open_memory(handle, bytes)
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

    fn attend_in_place(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        self.attend_at(plan, places, launched)
    }

    fn stage_rows(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        self.stage_rows(model, rows)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let models: Vec<ModelId> = self.models.keys().copied().collect();
        for model in models {
            self.unregister(model);
        }
        self.graphs.forget_graphs(&mut self.device, |_| true);
        self.regions.clear(&mut self.device);
    }
}
