//! `StoreBlocks`: one range of one layer, from payload to published blocks.

use super::{Call, Model, Service, ServiceError, plan};
use kvd_compute::{Backend, EncodedPages, IncomingRows};
use kvd_core::Side;
use kvd_proto::domain::StoreChunk;
use kvd_store::{Append, AppendTicket, PackedBytes, Pages, Pool};
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
        let shape = self.store.model_of(&call.namespace, chunk.sequence)?;
        chunk.check_shape(&shape.geometry)?;
        let model = self.models.find(&call.namespace, shape.id)?;
        let hash = content_hash(&chunk);
        let append = self.store.begin_append(
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
        let pool = self.pool.clone();
        self.lane.run(call, move |backend| execute(backend, &pool, &model, ticket, &rows)).await
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
    let packed = pack(backend, pool, model, &ticket)?;
    let packed_blocks = packed.iter().flatten().count() as u32;
    let length = ticket.commit(packed);
    model.metrics.stored_tokens.increment(u64::from(rows.tokens));
    model.metrics.store_seconds.record(began.elapsed().as_secs_f64());
    Ok(StoreReply { length, replayed: false, packed_blocks })
}

/// Blocks encoded at once: enough for many cores, little enough lost when the pool is full.
const ENCODE_BATCH_BLOCKS: usize = 64;

/// Encodes the blocks that leave the window. A block that finds no room stays raw and is offered
/// again by the next append: giving up the append would not free anything.
fn pack(
    backend: &mut dyn Backend,
    pool: &Arc<Pool>,
    model: &Model,
    ticket: &AppendTicket,
) -> Result<Vec<Option<Pages>>, ServiceError> {
    let tasks = ticket.packs();
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let id = model.shape.id;
    let began = Instant::now();
    for keep in tasks.iter().filter_map(|task| task.keep.as_ref()) {
        let count = keep.from.rows.end - keep.from.rows.start;
        let (from, to) = (plan::source(&keep.from), plan::target(&keep.to, keep.to_row));
        backend.copy(id, ticket.layer(), &from, count, to)?;
    }
    let mut packed = Vec::with_capacity(tasks.len());
    for batch in tasks.chunks(ENCODE_BATCH_BLOCKS) {
        let sources: Vec<_> = batch.iter().map(plan::encode_source).collect();
        match backend.encode(id, ticket.layer(), &sources) {
            Ok(encoded) => {
                packed.extend(encoded.iter().map(|pages| place(backend, pool, model, pages)));
            }
            Err(error) => {
                let sequence = ticket.sequence();
                tracing::warn!(%sequence, layer = %ticket.layer(), %error, "blocks stay raw");
                packed.resize(packed.len() + batch.len(), None);
            }
        }
        if packed.last().is_some_and(Option::is_none) {
            // A pool without room for one block has none for the rest.
            break;
        }
    }
    packed.resize(tasks.len(), None);
    let deferred = packed.iter().filter(|pages| pages.is_none()).count();
    model.metrics.pack_deferred.increment(deferred as u64);
    model.metrics.encode_seconds.record(began.elapsed().as_secs_f64());
    Ok(packed)
}

fn place(
    backend: &mut dyn Backend,
    pool: &Arc<Pool>,
    model: &Model,
    pages: &EncodedPages,
) -> Option<Pages> {
    let metrics = &model.metrics;
    let reserved = pool.reserve(pages.bytes.len() as u64).ok()?;
    backend.place(pages, reserved.extent());
    metrics.encoded_blocks.increment(1);
    metrics.fallback_pages.increment(u64::from(pages.fallback_pages));
    model.fallback_pages.fetch_add(u64::from(pages.fallback_pages), Ordering::Relaxed);
    let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
    metrics.encoded_logical_bytes.increment(pages.values * value_bytes);
    metrics.encoded_page_bytes.increment(pages.bytes.len() as u64);
    if let Some(sums) = pages.sampled {
        let mut total = model.sampled.lock();
        for (total, sum) in total.iter_mut().zip(sums) {
            total.0 += sum.0;
            total.1 += sum.1;
        }
    }
    let accounting = PackedBytes {
        codes: pages.parts.codes,
        scales: pages.parts.scales,
        offsets: pages.parts.offsets,
        header: pages.parts.header,
        key: pages.side_bytes[Side::Key.index()],
        value: pages.side_bytes[Side::Value.index()],
        values: pages.values,
    };
    Some(Pages::new(reserved.seal(), pages.page_ends.clone(), accounting))
}
