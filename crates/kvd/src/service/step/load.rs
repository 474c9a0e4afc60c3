//! `LoadStep`: rows of many layers, decoded to where an engine keeps them.

use super::places::find_overlap;
use super::{PartsPlan, PlacedPart, StepMemory};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use crate::service::attend::PART_BYTES;
use crate::service::budget::InFlight;
use crate::service::{CallContext, RegisteredModel, Service, ServiceError, plan};
use kvd_compute::{Backend, LoadPlan, PlanPart, Stop};
use kvd_core::{DType, ErrorCode, LayerIndex};
use kvd_proto::domain::{LoadStep, StepPart};
use kvd_shm::RegionMemory;
use kvd_store::PinnedRange;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rows of a piece that is decoded at once, K and V, about: some blocks for the threads of a
/// processor, and few enough to stay in its cache until they are copied to their places.
const PIECE_BYTES: u64 = 1 << 20;

/// Bytes of a row in the search for rows that meet, at most.
const RUN_BYTES: u64 = 16;

/// The answer to a step.
pub(crate) struct LoadedStep {
    /// Parts whose rows are not there, in order.
    pub(crate) errors: Vec<RefusedPart>,
    /// Memory that the rows are in, unless that is a region.
    pub(crate) memory: Vec<u8>,
    /// Share of the budgets, until the answer is sent.
    pub(crate) held: Option<InFlight>,
}

/// A part that fails alone.
#[derive(Debug)]
pub(crate) struct RefusedPart {
    pub(crate) index: u32,
    pub(crate) error: ServiceError,
}

/// One layer of a part, pinned.
struct PinnedLayer {
    part: usize,
    layer: u32,
    pinned: PinnedRange,
}

/// The job of a step.
pub(crate) struct LoadStepJob {
    model: Arc<RegisteredModel>,
    dtype: DType,
    memory: StepMemory,
    parts: Vec<PlacedPart>,
    /// Layers yet to be read, the next last.
    layers: Vec<PinnedLayer>,
    errors: Vec<RefusedPart>,
    held: Option<InFlight>,
    took: Duration,
    _inflight: InFlight,
}

impl Service {
    /// Decodes tokens of many layers to the memory of the step's caller. `region` is that of a
    /// caller who has one.
    ///
    /// # Errors
    /// Layouts that do not fit, or meet; queue errors. A sequence that is not there and a range
    /// that is not stored fail their part alone.
    pub(crate) async fn load_step(
        &self,
        call: &CallContext,
        step: LoadStep,
        region: Option<Arc<RegionMemory>>,
    ) -> Result<LoadedStep, ServiceError> {
        let model = self.step_model(call, step.model)?;
        self.wait_for_parts(call, &step.parts).await;
        let (memory, held) = self.load_memory(call, step.memory_bytes, region)?;
        let geometry = &model.shape.geometry;
        let dtype = step.dtype.unwrap_or(geometry.dtype);
        let (memory_bytes, rows_max) = (memory.size_bytes(), self.config.step_rows_max);
        let plan = PartsPlan { geometry, dtype, memory_bytes, rows_max };
        let parts = plan.place_parts(step.parts)?;
        let rows = parts.iter().flat_map(|part| [&part.k, &part.v]);
        let rows: u64 = rows.map(|places| places.row_shape().count_rows()).sum();
        let _runs = self.take_bytes(call, rows * RUN_BYTES)?;
        if let Some(at) = find_overlap(parts.iter().flat_map(|part| [&part.k, &part.v])) {
            let message = format!("two rows of the step have byte {at} of the memory in common");
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        let blocks = |part: &PlacedPart| {
            u64::from(part.part.tokens.div_ceil(geometry.block_tokens) + 1) * u64::from(part.layers)
        };
        let pinned = parts.iter().map(blocks).sum::<u64>() * PART_BYTES;
        let _inflight = self.take_bytes(call, PIECE_BYTES + pinned)?;
        let (mut layers, mut errors) = (Vec::new(), Vec::new());
        for (index, placed) in parts.iter().enumerate() {
            match self.pin_part(call, &model, placed, index) {
                Ok(pinned) => layers.extend(pinned),
                Err(error) => errors.push(RefusedPart { index: index as u32, error }),
            }
        }
        layers.reverse();
        let worker = self.shards[model.shard].worker.clone();
        let took = Duration::ZERO;
        let job =
            LoadStepJob { model, dtype, memory, parts, layers, errors, held, took, _inflight };
        worker.ask_device(call, job).await
    }

    /// The memory that rows are written to, and the share of an answer that carries it.
    fn load_memory(
        &self,
        call: &CallContext,
        bytes: u64,
        region: Option<Arc<RegionMemory>>,
    ) -> Result<(StepMemory, Option<InFlight>), ServiceError> {
        match region {
            Some(_) if bytes != 0 => {
                let message = "memory_bytes: rows of a call through a region go to the region";
                Err(ServiceError::new(ErrorCode::InvalidArgument, message))
            }
            Some(region) => Ok((StepMemory::Region(region), None)),
            None => {
                self.check_message_size(bytes, "fewer tokens or layers")?;
                let held = self.take_bytes(call, bytes)?;
                Ok((StepMemory::Answer(vec![0; bytes as usize]), Some(held)))
            }
        }
    }

    fn pin_part(
        &self,
        call: &CallContext,
        model: &RegisteredModel,
        placed: &PlacedPart,
        index: usize,
    ) -> Result<Vec<PinnedLayer>, ServiceError> {
        let part = &placed.part;
        self.check_part_model(call, part, model)?;
        let store = &self.shards[model.shard].store;
        let (first, range) = (part.first_layer.0, part.start..part.end_token());
        let pin = |layer: u32| {
            let of_model = LayerIndex(first + layer);
            let range = range.clone();
            let pinned = store.pin_range(&call.namespace, part.sequence, of_model, range, None);
            let pinned = pinned.map_err(|error| ServiceError::from(error).in_layer(of_model))?;
            Ok(PinnedLayer { part: index, layer, pinned })
        };
        (0..placed.layers).map(pin).collect()
    }
}

impl DeviceWork for LoadStepJob {
    type Reply = LoadedStep;

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<LoadedStep>, ServiceError> {
        let began = Instant::now();
        while let Some(layer) = self.layers.pop() {
            let part = layer.part;
            match self.load_layer(backend, &layer) {
                Ok(()) => {}
                // The device itself, or the memory.
                Err(error) if error.code() != ErrorCode::CorruptPage => return Err(error),
                Err(error) => {
                    self.layers.retain(|layer| layer.part != part);
                    self.errors.push(RefusedPart { index: part as u32, error });
                }
            }
            if stop.slice_is_over() && !self.layers.is_empty() {
                self.took += began.elapsed();
                return Ok(None);
            }
        }
        self.model.metrics.load.record_job(self.took + began.elapsed());
        let mut errors = std::mem::take(&mut self.errors);
        errors.sort_by_key(|error| error.index);
        let memory = match &mut self.memory {
            StepMemory::Answer(bytes) => std::mem::take(bytes),
            _ => Vec::new(),
        };
        Ok(Some(LoadedStep { errors, memory, held: self.held.take() }))
    }
}

impl LoadStepJob {
    /// Decodes one layer of a part, piece by piece.
    fn load_layer(
        &mut self,
        backend: &mut dyn Backend,
        of: &PinnedLayer,
    ) -> Result<(), ServiceError> {
        let placed = &self.parts[of.part];
        let StepPart { first_layer, tokens, .. } = placed.part;
        let layer = LayerIndex(first_layer.0 + of.layer);
        let token_bytes = (placed.layer_bytes() / u64::from(tokens)).max(1);
        let rows_max = u32::try_from(PIECE_BYTES / token_bytes).unwrap_or(u32::MAX).max(1);
        let mut first = 0;
        for parts in cut_pieces(plan::each_part(&of.pinned).collect(), rows_max) {
            let count: u32 = parts.iter().map(|part| part.rows).sum();
            let plan = LoadPlan { model: self.model.shape.id, layer, dtype: self.dtype, parts };
            let rows = backend.load(&plan);
            let rows = rows.map_err(|error| ServiceError::from(error).in_layer(layer))?;
            let piece = first..first + count;
            self.memory.scatter_rows(&placed.k.cut_tokens(piece.clone()), of.layer, &rows.k)?;
            self.memory.scatter_rows(&placed.v.cut_tokens(piece), of.layer, &rows.v)?;
            first += count;
        }
        let bytes = u64::from(tokens) * self.model.shape.geometry.token_bytes();
        self.model.metrics.loaded_logical_bytes.increment(bytes);
        Ok(())
    }
}

/// Groups of whole parts, of about so many rows each.
fn cut_pieces(parts: Vec<PlanPart>, rows_max: u32) -> Vec<Vec<PlanPart>> {
    let mut pieces: Vec<Vec<PlanPart>> = Vec::new();
    let mut rows = 0;
    for part in parts {
        match pieces.last_mut() {
            Some(piece) if rows + part.rows <= rows_max => {
                rows += part.rows;
                piece.push(part);
            }
            _ => {
                rows = part.rows;
                pieces.push(vec![part]);
            }
        }
    }
    pieces
}
