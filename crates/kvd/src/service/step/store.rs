//! `StoreStep`: all ranges of a step become visible together, or none.

use super::{PartsPlan, PlacedPart, StepMemory};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use crate::service::budget::InFlight;
use crate::service::store::{BegunStore, publish_ticket};
use crate::service::{CallContext, RegisteredModel, Service, ServiceError};
use bytes::BytesMut;
use kvd_compute::{AppendRows, Backend, IncomingRows, Stop, content_hash};
use kvd_core::{ErrorCode, LayerIndex, Namespace};
use kvd_proto::domain::{StepPart, StoreStep, StoredPart};
use kvd_shm::RegionMemory;
use kvd_store::{AppendClaim, AppendTicket, BegunAppend, PackedPages, SequenceStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The right to store one layer of a part.
struct LayerRange {
    /// Position of its part, and its layer counted from the part's first.
    part: usize,
    layer: u32,
    /// None for a range that may have been stored before.
    claim: Option<AppendClaim>,
}

/// A layer that is being written and encoded.
struct BegunLayer {
    part: usize,
    layer: LayerIndex,
    store: BegunStore,
    rows: IncomingRows,
}

/// A layer that is written and encoded, and that nobody sees yet.
struct FilledLayer {
    part: usize,
    ticket: AppendTicket,
    packed: Vec<Option<PackedPages>>,
}

/// The job of a step.
pub(crate) struct StoreStepJob {
    store: Arc<SequenceStore>,
    namespace: Namespace,
    model: Arc<RegisteredModel>,
    memory: StepMemory,
    parts: Vec<PlacedPart>,
    /// The layer that gave way to attends.
    begun: Option<BegunLayer>,
    /// Layers yet to be stored, the next last.
    ranges: Vec<LayerRange>,
    filled: Vec<FilledLayer>,
    /// Answers so far, by part; before the end, those of replayed layers.
    answers: Vec<StoredPart>,
    /// Rows of one layer, K and V, kept from one to the next.
    buffers: [BytesMut; 2],
    took: Duration,
    _inflight: InFlight,
}

impl Service {
    /// Appends K and V of many layers; answered once all of it can be read. `region` is the memory
    /// of a caller who has one.
    ///
    /// # Errors
    /// As [`Service::store_chunk`], or layouts that do not fit: nothing is visible then.
    pub(crate) async fn store_step(
        &self,
        call: &CallContext,
        step: StoreStep,
        region: Option<Arc<RegionMemory>>,
    ) -> Result<Vec<StoredPart>, ServiceError> {
        let model = self.step_model(call, step.model)?;
        self.wait_for_parts(call, &step.parts).await;
        let stored = self.store_parts(call, model.clone(), step, region).await;
        self.tell_deferred(&model);
        if let Err(error) = &stored {
            self.warn_of_refusal(error.code(), Instant::now());
        }
        stored
    }

    async fn store_parts(
        &self,
        call: &CallContext,
        model: Arc<RegisteredModel>,
        step: StoreStep,
        region: Option<Arc<RegionMemory>>,
    ) -> Result<Vec<StoredPart>, ServiceError> {
        let memory = match region {
            Some(_) if !step.memory.is_empty() => {
                let message = "memory: rows of a call through a region are in the region";
                return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
            }
            Some(region) => StepMemory::Region(region),
            None => StepMemory::Message(step.memory),
        };
        let geometry = &model.shape.geometry;
        let plan = PartsPlan {
            geometry,
            dtype: geometry.dtype,
            memory_bytes: memory.size_bytes(),
            rows_max: self.config.step_rows_max,
        };
        let parts = plan.place_parts(step.parts)?;
        check_apart(&parts)?;
        // One layer at a time is copied out of the engine's memory.
        let copied = parts.iter().map(PlacedPart::layer_bytes).max().unwrap_or(0);
        check_layer_bytes(copied, self.config.message_bytes_max as u64)?;
        let _inflight = self.take_bytes(call, copied)?;
        let shard = &self.shards[model.shard];
        let store = shard.store.clone();
        let mut ranges = Vec::new();
        for (index, placed) in parts.iter().enumerate() {
            self.check_part_model(call, &placed.part, &model)
                .map_err(|error| error.in_part(index))?;
            for layer in 0..placed.layers {
                let StepPart { sequence, start, tokens, first_layer, .. } = placed.part;
                let of_model = LayerIndex(first_layer.0 + layer);
                let claim = store.claim_append(&call.namespace, sequence, of_model, start, tokens);
                let claim = claim
                    .map_err(|error| ServiceError::from(error).in_layer(of_model).in_part(index))?;
                ranges.push(LayerRange { part: index, layer, claim });
            }
        }
        ranges.reverse();
        let untouched = StoredPart { length: u32::MAX, replayed: true, packed_blocks: 0 };
        let job = StoreStepJob {
            store,
            namespace: call.namespace.clone(),
            model,
            memory,
            answers: vec![untouched; parts.len()],
            parts,
            begun: None,
            filled: Vec::with_capacity(ranges.len()),
            ranges,
            buffers: [BytesMut::new(), BytesMut::new()],
            took: Duration::ZERO,
            _inflight,
        };
        shard.worker.ask_device(call, job).await
    }
}

/// Refuses a layer that would be no message either: room for it may never come.
fn check_layer_bytes(bytes: u64, max: u64) -> Result<(), ServiceError> {
    if bytes <= max {
        return Ok(());
    }
    let message = format!(
        "one layer of a part takes {bytes} bytes, over server.message_bytes_max = {max}; store \
         fewer tokens at once"
    );
    Err(ServiceError::new(ErrorCode::MessageTooLarge, message))
}

/// Refuses parts that have a layer of a sequence in common.
fn check_apart(parts: &[PlacedPart]) -> Result<(), ServiceError> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    let first = |index: usize| parts[index].part.first_layer.0;
    order.sort_by_key(|index| (parts[*index].part.sequence, first(*index)));
    let meeting = order.windows(2).find(|pair| {
        let (one, two) = (&parts[pair[0]], &parts[pair[1]]);
        one.part.sequence == two.part.sequence && first(pair[0]) + one.layers > first(pair[1])
    });
    let Some(pair) = meeting else { return Ok(()) };
    let message = format!(
        "parts[{}] and parts[{}] have layer {} of sequence {} in common; a step stores one range \
         of a layer",
        pair[0].min(pair[1]),
        pair[0].max(pair[1]),
        first(pair[1]),
        parts[pair[1]].part.sequence
    );
    Err(ServiceError::new(ErrorCode::InvalidArgument, message))
}

impl DeviceWork for StoreStepJob {
    type Reply = Vec<StoredPart>;

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    /// Within a layer: no other store may come to the same tables of codes before its end.
    fn goes_on_first(&self) -> bool {
        self.begun.is_some()
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError> {
        let began = Instant::now();
        while self.begun.is_some() || !self.ranges.is_empty() {
            let is_filled = self.fill_next(backend, stop)?;
            if !is_filled || (stop.slice_is_over() && !self.ranges.is_empty()) {
                self.took += began.elapsed();
                return Ok(None);
            }
        }
        // What a failed device holds is never published.
        if let Some(reason) = backend.failure() {
            return Err(ServiceError::new(ErrorCode::DeviceFailed, reason));
        }
        for FilledLayer { part, ticket, packed } in self.filled.drain(..) {
            let stored = publish_ticket(&self.model, ticket, packed);
            let answer = &mut self.answers[part];
            answer.length = answer.length.min(stored.length);
            answer.packed_blocks += stored.packed_blocks;
            answer.replayed = false;
        }
        self.model.metrics.store.record_job(self.took + began.elapsed());
        Ok(Some(std::mem::take(&mut self.answers)))
    }
}

impl StoreStepJob {
    fn layer_of(&self, range: &LayerRange) -> LayerIndex {
        LayerIndex(self.parts[range.part].part.first_layer.0 + range.layer)
    }

    /// Goes on with the next layer, which stays unseen; whether it is written and encoded.
    fn fill_next(&mut self, backend: &mut dyn Backend, stop: &Stop) -> Result<bool, ServiceError> {
        let mut begun = match self.begun.take() {
            Some(begun) => begun,
            None => {
                let Some(range) = self.ranges.pop() else { return Ok(true) };
                let (part, layer) = (range.part, self.layer_of(&range));
                let begun = self.begin_layer(range);
                match begun.map_err(|error| error.in_layer(layer).in_part(part))? {
                    Some(begun) => begun,
                    None => return Ok(true),
                }
            }
        };
        let (part, layer) = (begun.part, begun.layer);
        let packed = begun.store.go_on(backend, self.store.pool(), &self.model, stop);
        let packed = packed.map_err(|error| error.in_layer(layer).in_part(part))?;
        let Some(packed) = packed else {
            self.begun = Some(begun);
            return Ok(false);
        };
        let BegunLayer { store, rows, .. } = begun;
        self.filled.push(FilledLayer { part, ticket: store.into_ticket(), packed });
        self.take_buffers(rows);
        Ok(true)
    }

    /// Copies the rows of a layer, and reserves what it needs; none where it was stored before.
    fn begin_layer(&mut self, range: LayerRange) -> Result<Option<BegunLayer>, ServiceError> {
        let layer = self.layer_of(&range);
        let LayerRange { part, layer: of_part, claim } = range;
        let placed = &self.parts[part];
        let StepPart { sequence, start, tokens, .. } = placed.part;
        let [k, v] = &mut self.buffers;
        for (buffer, places) in [(&mut *k, &placed.k), (&mut *v, &placed.v)] {
            buffer.resize(places.row_shape().layer_bytes() as usize, 0);
            self.memory.gather_rows(places, of_part, buffer)?;
        }
        let [k, v] = [k, v].map(|buffer| std::mem::take(buffer).freeze());
        let hash = content_hash(&k, &v);
        let rows = IncomingRows { tokens, k, v };
        let append = match claim {
            Some(claim) => BegunAppend::Ticket(self.store.begin_claimed(claim, hash)?),
            None => {
                self.store.begin_append(&self.namespace, sequence, layer, start, tokens, hash)?
            }
        };
        match append {
            BegunAppend::Replayed { length } => {
                let answer = &mut self.answers[part];
                answer.length = answer.length.min(length);
                self.take_buffers(rows);
                Ok(None)
            }
            BegunAppend::Ticket(ticket) => {
                let of_store = AppendRows::Host(rows.clone());
                let store = BegunStore::new(&self.model, ticket, of_store);
                Ok(Some(BegunLayer { part, layer, store, rows }))
            }
        }
    }

    /// Nobody else has the rows: the next layer is copied to where this one was.
    fn take_buffers(&mut self, rows: IncomingRows) {
        let IncomingRows { k, v, .. } = rows;
        self.buffers = [k, v].map(|bytes| bytes.try_into_mut().unwrap_or_default());
    }
}
