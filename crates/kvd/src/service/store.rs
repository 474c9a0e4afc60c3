//! `StoreBlocks`: one range of one layer, from payload to published blocks.

use super::budget::InFlight;
use super::pack::{AppendUnderWay, PackSite};
use super::{CallContext, DeviceShard, RegisteredModel, Service, ServiceError, plan};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use kvd_compute::{
    AppendRows, AppendTask, Backend, IncomingRows, RegionRows, StagedRows, Stop, content_hash,
};
use kvd_core::{Namespace, SequenceId};
use kvd_proto::domain::StoreChunk;
use kvd_store::{
    AppendClaim, AppendTicket, ArenaPool, BegunAppend, PackedPages, SequenceStore, StoreError,
};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The answer to one stored range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreReply {
    /// Tokens of the layer that can be read.
    pub length: u32,
    /// The range was there before; nothing changed.
    pub replayed: bool,
    /// Blocks encoded on the way.
    pub packed_blocks: u32,
}

/// A store that may go on: where, of what model, and its share of the budget.
struct AdmittedStore<'a> {
    shard: &'a DeviceShard,
    model: Arc<RegisteredModel>,
    inflight: InFlight,
}

impl Service {
    /// Appends K and V of one layer; answered once they can be read.
    ///
    /// # Errors
    /// Shape, range, finiteness, pool and queue errors; nothing is visible then.
    pub async fn store_chunk(
        &self,
        call: &CallContext,
        chunk: StoreChunk,
    ) -> Result<StoreReply, ServiceError> {
        self.wait_for_layer(call, chunk.sequence, chunk.layer).await;
        let stored = self.store_rows(call, chunk).await;
        if let Err(error) = &stored {
            self.warn_of_refusal(error.code(), Instant::now());
        }
        stored
    }

    async fn store_rows(
        &self,
        call: &CallContext,
        chunk: StoreChunk,
    ) -> Result<StoreReply, ServiceError> {
        let bytes = [&chunk.k, &chunk.v].map(|payload| payload.len() as u64);
        let AdmittedStore { shard, model, inflight } = self.admit_store(call, &chunk, bytes)?;
        let hash = content_hash(&chunk.k, &chunk.v);
        let StoreChunk { sequence, layer, start, tokens, .. } = chunk;
        let claim = shard.store.claim_append(&call.namespace, sequence, layer, start, tokens)?;
        // One that waits holds no memory: it is reserved when the job begins. A range that was
        // stored before needs none.
        let append = match claim {
            Some(claim) => AskedAppend::Claim(claim),
            None => AskedAppend::Begun(begin_chunk(&shard.store, &call.namespace, &chunk, hash)?),
        };
        if let AskedAppend::Begun(BegunAppend::Replayed { length }) = append {
            return Ok(StoreReply::of_replay(length));
        }
        let rows = IncomingRows { tokens: chunk.tokens, k: chunk.k, v: chunk.v };
        let (store, of_store) = (shard.store.clone(), model.clone());
        let job = StoreJob {
            slices: StoreSlices::new(store, model),
            append: Some(append),
            content_hash: hash,
            rows,
            _inflight: inflight,
        };
        let reply = shard.worker.ask_device(call, job).await;
        self.tell_deferred(&of_store);
        reply
    }

    /// Tells of blocks of a model that a store found no room for.
    pub(super) fn tell_deferred(&self, model: &RegisteredModel) {
        if model.deferred_blocks.load(Ordering::Relaxed) > 0 {
            let blocks = model.deferred_blocks.swap(0, Ordering::Relaxed);
            self.warn_of_deferred(model, blocks, Instant::now());
        }
    }

    /// Appends K and V that are in a region of the model's device, `bytes` long: the chunk's own
    /// are ignored. `None`, and nothing is done, when the device has no room for so many at once.
    ///
    /// # Errors
    /// As [`Service::store_chunk`].
    pub(crate) async fn store_in_place(
        &self,
        call: &CallContext,
        chunk: &StoreChunk,
        rows: RegionRows,
        bytes: [u64; 2],
    ) -> Result<Option<StoreReply>, ServiceError> {
        let stored = self.store_region_rows(call, chunk, rows, bytes).await;
        if let Err(error) = &stored {
            self.warn_of_refusal(error.code(), Instant::now());
        }
        stored
    }

    async fn store_region_rows(
        &self,
        call: &CallContext,
        chunk: &StoreChunk,
        rows: RegionRows,
        bytes: [u64; 2],
    ) -> Result<Option<StoreReply>, ServiceError> {
        let AdmittedStore { shard, model, inflight } = self.admit_store(call, chunk, bytes)?;
        let (store, namespace) = (shard.store.clone(), call.namespace.clone());
        // From here on it is in flight: what continues it is told so, not that there is a gap. And
        // a range that no content would make fit takes no part of the queue or of the device.
        let StoreChunk { sequence, layer, start, tokens, .. } = *chunk;
        let claim = store.claim_append(&namespace, sequence, layer, start, tokens)?;
        let of_store = model.clone();
        // Its content is not known before the device has read it, so the rest is one job.
        let job = StoreInPlace {
            slices: StoreSlices::new(store, model),
            namespace,
            claim,
            chunk: chunk.clone(),
            rows,
            _inflight: inflight,
        };
        let reply = shard.worker.ask_device(call, job).await;
        self.tell_deferred(&of_store);
        reply
    }

    /// Tests a store before anything is done; `bytes` are those of K and V.
    fn admit_store(
        &self,
        call: &CallContext,
        chunk: &StoreChunk,
        bytes: [u64; 2],
    ) -> Result<AdmittedStore<'_>, ServiceError> {
        self.admit_call(call)?;
        // Whoever sends too much is told so before anything is looked up.
        let bytes_more = call.bytes_to_admit(bytes[0] + bytes[1]);
        let inflight = self.take_bytes(call, bytes_more)?;
        let shard = self.shard_of(chunk.sequence)?;
        let shape = shard.store.model_of(&call.namespace, chunk.sequence)?;
        chunk.check_payload_bytes(&shape.geometry, bytes)?;
        let model = self.models.find_model(&call.namespace, shape.id)?;
        Ok(AdmittedStore { shard, model, inflight })
    }

    /// The model of a sequence that a store names.
    ///
    /// # Errors
    /// When the call is not admitted, or there is no such sequence in the caller's namespace.
    pub(crate) fn model_of(
        &self,
        call: &CallContext,
        sequence: SequenceId,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.admit_call(call)?;
        let shape = self.shard_of(sequence)?.store.model_of(&call.namespace, sequence)?;
        self.models.find_model(&call.namespace, shape.id)
    }
}

impl StoreReply {
    /// A range that was there before.
    fn of_replay(length: u32) -> Self {
        Self { length, replayed: true, packed_blocks: 0 }
    }
}

/// An append before its job begins.
enum AskedAppend {
    /// The right to append: what it needs is not reserved yet.
    Claim(AppendClaim),
    /// Answered already.
    Begun(BegunAppend),
}

impl AskedAppend {
    /// Reserves what the append needs.
    fn begin_append(
        self,
        store: &SequenceStore,
        content_hash: u64,
    ) -> Result<BegunAppend, StoreError> {
        match self {
            Self::Claim(claim) => {
                Ok(BegunAppend::Ticket(store.begin_claimed(claim, content_hash)?))
            }
            Self::Begun(append) => Ok(append),
        }
    }
}

/// Asks for the range of a chunk with that content.
fn begin_chunk(
    store: &SequenceStore,
    namespace: &Namespace,
    chunk: &StoreChunk,
    content_hash: u64,
) -> Result<BegunAppend, StoreError> {
    let StoreChunk { sequence, layer, start, tokens, .. } = *chunk;
    store.begin_append(namespace, sequence, layer, start, tokens, content_hash)
}

/// The job of a store whose rows came to the daemon.
pub(crate) struct StoreJob {
    slices: StoreSlices,
    /// None once it has begun.
    append: Option<AskedAppend>,
    content_hash: u64,
    rows: IncomingRows,
    _inflight: InFlight,
}

/// A store that may wait for attends to pass. Dropped before its end it undoes everything.
pub(super) struct BegunStore {
    // First: slots are given back before the claim of their layer.
    append: AppendUnderWay,
    ticket: AppendTicket,
}

impl BegunStore {
    /// A store of which nothing is done.
    pub(super) fn new(model: &RegisteredModel, ticket: AppendTicket, rows: AppendRows) -> Self {
        let append = AppendUnderWay::new(plan::plan_append(model, &ticket, rows));
        Self { append, ticket }
    }

    /// A store whose rows are written at once: the device's copy of them ends with the next attend.
    fn write_staged(
        backend: &mut dyn Backend,
        model: &RegisteredModel,
        ticket: AppendTicket,
        staged: StagedRows,
    ) -> Result<Self, ServiceError> {
        let mut packing = plan::plan_append(model, &ticket, AppendRows::Staged(staged));
        let writing = plan::take_writes(&mut packing);
        let mut task = AppendTask::new(writing);
        loop {
            let written = backend.append_slice(&mut task, &mut |_| None, &Stop::never());
            let written = written.inspect_err(|_| plan::give_back_queries(model, &packing))?;
            if written.is_some() {
                return Ok(Self { append: AppendUnderWay::new(packing), ticket });
            }
        }
    }

    /// Goes on until the rows are written and the blocks encoded, all but what makes them visible;
    /// `None` where the slice is over before.
    pub(super) fn go_on(
        &mut self,
        backend: &mut dyn Backend,
        pool: &Arc<ArenaPool>,
        model: &RegisteredModel,
        stop: &Stop,
    ) -> Result<Option<Vec<Option<PackedPages>>>, ServiceError> {
        let batch = self.ticket.pack_batch();
        self.append.go_on(backend, PackSite { pool, model, batch: &batch }, stop)
    }

    /// The ticket of a store that is done.
    pub(super) fn into_ticket(self) -> AppendTicket {
        self.ticket
    }
}

/// A store over the slices that it takes.
struct StoreSlices {
    store: Arc<SequenceStore>,
    model: Arc<RegisteredModel>,
    /// The store that waits for the next slice.
    begun: Option<BegunStore>,
    /// Device time of slices before this one.
    took: Duration,
}

impl StoreSlices {
    fn new(store: Arc<SequenceStore>, model: Arc<RegisteredModel>) -> Self {
        Self { store, model, begun: None, took: Duration::ZERO }
    }

    /// Goes on with a store in a slice that has begun, and makes it visible once it is done; `None`
    /// where the slice is over before.
    fn go_on(
        &mut self,
        mut store: BegunStore,
        slice_began: Instant,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<StoreReply>, ServiceError> {
        let Some(packed) = store.go_on(backend, self.store.pool(), &self.model, stop)? else {
            self.took += slice_began.elapsed();
            self.begun = Some(store);
            return Ok(None);
        };
        let reply = publish_ticket(&self.model, store.into_ticket(), packed);
        self.model.metrics.store.record_job(self.took + slice_began.elapsed());
        Ok(Some(reply))
    }
}

impl DeviceWork for StoreJob {
    type Reply = StoreReply;

    fn job_kind(&self) -> JobKind {
        JobKind::Store
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<StoreReply>, ServiceError> {
        let began = Instant::now();
        let slices = &mut self.slices;
        let store = match (slices.begun.take(), self.append.take()) {
            (Some(begun), _) => begun,
            (None, Some(append)) => match append.begin_append(&slices.store, self.content_hash)? {
                BegunAppend::Replayed { length } => {
                    return Ok(Some(StoreReply::of_replay(length)));
                }
                BegunAppend::Ticket(ticket) => {
                    BegunStore::new(&slices.model, ticket, AppendRows::Host(self.rows.clone()))
                }
            },
            (None, None) => return Ok(None),
        };
        self.slices.go_on(store, began, backend, stop)
    }
}

/// The job of a store whose rows are in device memory.
pub(crate) struct StoreInPlace {
    /// Once it has begun, its rows are where they belong.
    slices: StoreSlices,
    namespace: Namespace,
    claim: Option<AppendClaim>,
    chunk: StoreChunk,
    rows: RegionRows,
    _inflight: InFlight,
}

impl DeviceWork for StoreInPlace {
    /// `None` where the device has no room for so many rows at once.
    type Reply = Option<StoreReply>;

    fn job_kind(&self) -> JobKind {
        JobKind::Store
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError> {
        let began = Instant::now();
        let store = match self.slices.begun.take() {
            Some(begun) => begun,
            None => match self.begin_staged(backend)? {
                ControlFlow::Continue(begun) => begun,
                ControlFlow::Break(reply) => return Ok(Some(reply)),
            },
        };
        Ok(self.slices.go_on(store, began, backend, stop)?.map(Some))
    }
}

impl StoreInPlace {
    /// Brings the rows from the worker's memory to where they belong; the reply where there is
    /// nothing more to do, or no room to do it.
    fn begin_staged(
        &mut self,
        backend: &mut dyn Backend,
    ) -> Result<ControlFlow<Option<StoreReply>, BegunStore>, ServiceError> {
        let StoreSlices { store, model, .. } = &self.slices;
        let Some(staged) = backend.stage_rows(model.shape.id, &self.rows)? else {
            return Ok(ControlFlow::Break(None));
        };
        let content_hash = staged.content_hash;
        let append = match self.claim.take() {
            Some(claim) => BegunAppend::Ticket(store.begin_claimed(claim, content_hash)?),
            None => begin_chunk(store, &self.namespace, &self.chunk, content_hash)?,
        };
        Ok(match append {
            BegunAppend::Replayed { length } => {
                ControlFlow::Break(Some(StoreReply::of_replay(length)))
            }
            BegunAppend::Ticket(ticket) => {
                ControlFlow::Continue(BegunStore::write_staged(backend, model, ticket, staged)?)
            }
        })
    }
}

/// Makes what a ticket stores visible.
pub(super) fn publish_ticket(
    model: &RegisteredModel,
    ticket: AppendTicket,
    packed: Vec<Option<PackedPages>>,
) -> StoreReply {
    let packed_blocks = packed.iter().flatten().count() as u32;
    let stored_tokens = ticket.tokens();
    let length = ticket.commit(packed);
    model.metrics.stored_layer_tokens.increment(u64::from(stored_tokens));
    let bytes = u64::from(stored_tokens) * model.shape.geometry.token_bytes();
    model.metrics.stored_logical_bytes.increment(bytes);
    StoreReply { length, replayed: false, packed_blocks }
}
