//! `StoreBlocks`: one range of one layer, from payload to published blocks.

use super::pack::Packer;
use super::{Call, Model, Service, ServiceError, plan};
use kvd_compute::{Backend, IncomingRows};
use kvd_core::ErrorCode;
use kvd_proto::domain::StoreChunk;
use kvd_store::{Append, AppendTicket, Pool};
use std::sync::Arc;
use std::time::Instant;
use xxhash_rust::xxh3::Xxh3;

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

impl Service {
    /// Appends K and V of one layer; answered once they can be read.
    ///
    /// # Errors
    /// Shape, range, finiteness, pool and queue errors; nothing is visible then.
    pub async fn store(&self, call: &Call, chunk: StoreChunk) -> Result<StoreReply, ServiceError> {
        self.admit(call)?;
        let seat = self.seat_of(chunk.sequence);
        let shape = seat.store.model_of(&call.namespace, chunk.sequence)?;
        chunk.check_shape(&shape.geometry)?;
        let model = self.models.find(&call.namespace, shape.id)?;
        let inflight = self.inflight.take((chunk.k.len() + chunk.v.len()) as u64)?;
        let hash = content_hash(&chunk);
        let append = seat.store.begin_append(
            &call.namespace,
            chunk.sequence,
            chunk.layer,
            chunk.start,
            chunk.tokens,
            hash,
        )?;
        let ticket = match append {
            Append::Replayed { length } => {
                return Ok(StoreReply { length, replayed: true, packed_blocks: 0 });
            }
            Append::Ticket(ticket) => ticket,
        };
        let rows = IncomingRows { tokens: chunk.tokens, k: chunk.k, v: chunk.v };
        let pool = seat.store.pool().clone();
        let work = move |backend: &mut dyn Backend| {
            let reply = execute(backend, &pool, &model, ticket, &rows);
            drop((rows, inflight));
            reply
        };
        seat.lane.run(call, work).await
    }
}

/// Tells a retry from other content under the same range.
fn content_hash(chunk: &StoreChunk) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&chunk.k);
    hash.update(&chunk.v);
    hash.digest()
}

/// The lane's part. The ticket publishes at the very end; an error before drops it, which undoes
/// everything.
fn execute(
    backend: &mut dyn Backend,
    pool: &Arc<Pool>,
    model: &Model,
    ticket: AppendTicket,
    rows: &IncomingRows,
) -> Result<StoreReply, ServiceError> {
    let began = Instant::now();
    let id = model.shape.id;
    backend.check(id, rows)?;
    for copy in ticket.copies() {
        let count = copy.from.rows.end - copy.from.rows.start;
        let (from, to) = (plan::source(&copy.from), plan::target(&copy.to, copy.to_row));
        backend.copy(id, ticket.layer(), &from, count, to)?;
    }
    for write in ticket.writes() {
        let to = plan::target(&write.to, write.to_row);
        backend.write(id, rows, write.source_row, write.rows, to)?;
    }
    let packed = Packer { backend, pool, model, ticket: &ticket }.pack()?;
    let packed_blocks = packed.iter().flatten().count() as u32;
    // Placing pages has no answer of its own: what a failed device holds is never published.
    if let Some(reason) = backend.failure() {
        return Err(ServiceError::new(ErrorCode::DeviceFailed, reason));
    }
    let length = ticket.commit(packed);
    model.metrics.stored_tokens.increment(u64::from(rows.tokens));
    model.metrics.store_seconds.record(began.elapsed().as_secs_f64());
    Ok(StoreReply { length, replayed: false, packed_blocks })
}
