//! `StoreBlocks`: one range of one layer, from payload to published blocks.

use super::budget::InFlight;
use super::pack::Packer;
use super::{Call, Model, Seat, Service, ServiceError, plan};
use kvd_compute::{Backend, IncomingRows, RegionRows, StagedRows, content_hash};
use kvd_core::{Coded, ErrorCode, Namespace, SequenceId};
use kvd_proto::domain::StoreChunk;
use kvd_store::{Append, AppendClaim, AppendTicket, Pool, Store, StoreError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What one stored range came to.
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
struct Admitted<'a> {
    seat: &'a Seat,
    model: Arc<Model>,
    inflight: InFlight,
}

/// Where the rows of a store are.
enum Rows {
    Host(IncomingRows),
    Staged(StagedRows),
}

impl Service {
    /// Appends K and V of one layer; answered once they can be read.
    ///
    /// # Errors
    /// Shape, range, finiteness, pool and queue errors; nothing is visible then.
    pub async fn store(&self, call: &Call, chunk: StoreChunk) -> Result<StoreReply, ServiceError> {
        let stored = self.store_rows(call, chunk).await;
        if let Err(error) = &stored {
            self.warn_of_refusal(error.code(), Instant::now());
        }
        stored
    }

    async fn store_rows(&self, call: &Call, chunk: StoreChunk) -> Result<StoreReply, ServiceError> {
        let bytes = [&chunk.k, &chunk.v].map(|payload| payload.len() as u64);
        let Admitted { seat, model, inflight } = self.admit_store(call, &chunk, bytes)?;
        let hash = content_hash(&chunk.k, &chunk.v);
        let StoreChunk { sequence, layer, start, tokens, .. } = chunk;
        let claim = seat.store.claim_append(&call.namespace, sequence, layer, start, tokens)?;
        // One that waits holds no memory: it is reserved when the job begins. A range that was
        // stored before needs none.
        let append = match claim {
            Some(claim) => AskedAppend::Claim(claim),
            None => AskedAppend::Begun(begin(&seat.store, &call.namespace, &chunk, hash)?),
        };
        if let AskedAppend::Begun(Append::Replayed { length }) = append {
            return Ok(StoreReply::replayed(length));
        }
        let rows = IncomingRows { tokens: chunk.tokens, k: chunk.k, v: chunk.v };
        let (store, of_store) = (seat.store.clone(), model.clone());
        let work = move |backend: &mut dyn Backend| {
            let (_inflight, began) = (inflight, Instant::now());
            let ticket = match append.begin_append(&store, hash)? {
                Append::Replayed { length } => return Ok(StoreReply::replayed(length)),
                Append::Ticket(ticket) => ticket,
            };
            let reply = execute(backend, store.pool(), &model, ticket, &Rows::Host(rows))?;
            model.metrics.store.record(began.elapsed());
            Ok(reply)
        };
        let reply = seat.lane.run(call, work).await;
        self.tell_deferred(&of_store);
        reply
    }

    /// Tells of blocks of a model that a store found no room for.
    fn tell_deferred(&self, model: &Model) {
        if model.deferred_blocks.load(Ordering::Relaxed) > 0 {
            let blocks = model.deferred_blocks.swap(0, Ordering::Relaxed);
            self.warn_of_deferred(model, blocks, Instant::now());
        }
    }

    /// The same of K and V in a region of the model's device, `bytes` long: the chunk's own are
    /// ignored. `None`, and nothing is done, when the device has no room for so many at once.
    ///
    /// # Errors
    /// As [`Service::store`].
    pub(crate) async fn store_in_place(
        &self,
        call: &Call,
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
        call: &Call,
        chunk: &StoreChunk,
        rows: RegionRows,
        bytes: [u64; 2],
    ) -> Result<Option<StoreReply>, ServiceError> {
        let Admitted { seat, model, inflight } = self.admit_store(call, chunk, bytes)?;
        let (store, namespace) = (seat.store.clone(), call.namespace.clone());
        // From here on it is in flight: what continues it is told so, not that there is a gap. And
        // a range that no content would make fit takes no part of the queue or of the device.
        let StoreChunk { sequence, layer, start, tokens, .. } = *chunk;
        let claim = store.claim_append(&namespace, sequence, layer, start, tokens)?;
        let (chunk, of_store) = (chunk.clone(), model.clone());
        // Its content is not known before the device has read it, so the rest is one job.
        let work = move |backend: &mut dyn Backend| {
            let (_inflight, began) = (inflight, Instant::now());
            let Some(staged) = backend.stage(model.shape.id, &rows)? else { return Ok(None) };
            let content_hash = staged.content_hash;
            let append = match claim {
                Some(claim) => Append::Ticket(store.begin_claimed(claim, content_hash)?),
                None => begin(&store, &namespace, &chunk, content_hash)?,
            };
            let ticket = match append {
                Append::Replayed { length } => return Ok(Some(StoreReply::replayed(length))),
                Append::Ticket(ticket) => ticket,
            };
            let reply = execute(backend, store.pool(), &model, ticket, &Rows::Staged(staged))?;
            model.metrics.store.record(began.elapsed());
            Ok(Some(reply))
        };
        let reply = seat.lane.run(call, work).await;
        self.tell_deferred(&of_store);
        reply
    }

    /// What is tested of a store before anything is done; `bytes` are those of K and V.
    fn admit_store(
        &self,
        call: &Call,
        chunk: &StoreChunk,
        bytes: [u64; 2],
    ) -> Result<Admitted<'_>, ServiceError> {
        self.admit(call)?;
        // Whoever sends too much is told so before anything is looked up.
        let inflight = self.inflight.take(bytes[0] + bytes[1])?;
        let seat = self.seat_of(chunk.sequence)?;
        let shape = seat.store.model_of(&call.namespace, chunk.sequence)?;
        chunk.check_shape_of(&shape.geometry, bytes)?;
        let model = self.models.find(&call.namespace, shape.id)?;
        Ok(Admitted { seat, model, inflight })
    }

    /// The model of a sequence that a store names.
    ///
    /// # Errors
    /// When the call is not admitted, or there is no such sequence in the caller's namespace.
    pub(crate) fn model_of(
        &self,
        call: &Call,
        sequence: SequenceId,
    ) -> Result<Arc<Model>, ServiceError> {
        self.admit(call)?;
        let shape = self.seat_of(sequence)?.store.model_of(&call.namespace, sequence)?;
        self.models.find(&call.namespace, shape.id)
    }
}

impl StoreReply {
    /// A range that was there before.
    fn replayed(length: u32) -> Self {
        Self { length, replayed: true, packed_blocks: 0 }
    }
}

/// An append before its job begins.
enum AskedAppend {
    /// The right to append: what it needs is not reserved yet.
    Claim(AppendClaim),
    /// Answered already.
    Begun(Append),
}

impl AskedAppend {
    /// Reserves what the append needs.
    fn begin_append(self, store: &Store, content_hash: u64) -> Result<Append, StoreError> {
        match self {
            Self::Claim(claim) => Ok(Append::Ticket(store.begin_claimed(claim, content_hash)?)),
            Self::Begun(append) => Ok(append),
        }
    }
}

/// Asks for the range of a chunk with that content.
fn begin(
    store: &Store,
    namespace: &Namespace,
    chunk: &StoreChunk,
    content_hash: u64,
) -> Result<Append, StoreError> {
    let StoreChunk { sequence, layer, start, tokens, .. } = *chunk;
    store.begin_append(namespace, sequence, layer, start, tokens, content_hash)
}

/// The lane's part. The ticket publishes at the very end; an error before drops it, which undoes
/// everything.
fn execute(
    backend: &mut dyn Backend,
    pool: &Arc<Pool>,
    model: &Model,
    ticket: AppendTicket,
    rows: &Rows,
) -> Result<StoreReply, ServiceError> {
    let id = model.shape.id;
    match rows {
        Rows::Host(rows) => backend.check(id, rows)?,
        Rows::Staged(StagedRows { finite: Err(error), .. }) => {
            return Err(ServiceError::new(error.code(), error.to_string()));
        }
        Rows::Staged(_) => {}
    }
    for copy in ticket.copies() {
        let count = copy.from.rows.end - copy.from.rows.start;
        let (from, to) = (plan::source(&copy.from.borrow()), plan::target(&copy.to, copy.to_row));
        backend.copy(id, ticket.layer(), &from, count, to)?;
    }
    match rows {
        Rows::Host(rows) => {
            for write in ticket.writes() {
                let to = plan::target(&write.to, write.to_row);
                backend.write(id, rows, write.source_row, write.rows, to)?;
            }
        }
        Rows::Staged(staged) => {
            let writes: Vec<_> = ticket.writes().iter().map(plan::staged_write).collect();
            backend.write_staged(staged, &writes)?;
        }
    }
    let packed = Packer { backend, pool, model, ticket: &ticket }.pack()?;
    let packed_blocks = packed.iter().flatten().count() as u32;
    // Placing pages has no answer of its own: what a failed device holds is never published.
    if let Some(reason) = backend.failure() {
        return Err(ServiceError::new(ErrorCode::DeviceFailed, reason));
    }
    let stored_tokens = ticket.tokens();
    let length = ticket.commit(packed);
    model.metrics.stored_layer_tokens.increment(u64::from(stored_tokens));
    let bytes = u64::from(stored_tokens) * model.shape.geometry.token_bytes();
    model.metrics.stored_logical_bytes.increment(bytes);
    Ok(StoreReply { length, replayed: false, packed_blocks })
}
