//! `Attend`: from queries over sequences to one plan, and its answer.

use super::budget::InFlight;
use super::launches::count_launches;
use super::{Call, Model, Service, ServiceError, plan};
use kvd_compute::{AttendPlan, Backend, PlanPart, PlanQuery, RegionPlaces};
use kvd_core::{DType, ErrorCode, Geometry, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use kvd_store::Pinned;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// Output and log-sum-exp of a batch.
pub struct AttendReply {
    /// `[sum of n_q, q_heads, head_dim_v]` in the batch's dtype.
    pub out: Vec<u8>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
}

/// Bytes of book-keeping of one part in flight: the plan's and the pin's.
pub(crate) const PART_BYTES: u64 = 128;

/// Bytes of book-keeping of one query row in flight, about: its end, its share of a unit, and a
/// word for each of the parts that its range is cut into, some dozens of them.
const ROW_BYTES: u64 = 256;

/// Sequence, readable length, first token and end: reads of the same key share their parts.
pub(super) type ReadKey = (SequenceId, u32, u32, u32);

/// What one query reads.
pub(super) struct Read {
    pub(super) key: ReadKey,
    pub(super) position: u32,
}

impl Read {
    fn tokens(&self) -> u32 {
        let (_, _, start, end) = self.key;
        end - start
    }
}

/// An attend that the device may begin.
struct Prepared {
    plan: AttendPlan,
    model: Arc<Model>,
    query_tokens: u32,
    /// What the plan names stays as it is until the device has answered.
    held: (Vec<Pinned>, InFlight),
}

impl Prepared {
    /// Ends the attend that began at `began`.
    fn end(self, began: Instant, stored_bytes_read: u64) {
        drop(self.held);
        let metrics = &self.model.metrics;
        metrics.attend_seconds.record(began.elapsed().as_secs_f64());
        metrics.attended_query_tokens.increment(u64::from(self.query_tokens));
        metrics.attended_stored_bytes.increment(stored_bytes_read);
        let logical = logical_bytes(&self.plan, &self.model.shape.geometry);
        metrics.attended_logical_bytes.increment(logical);
    }
}

impl Service {
    /// Attention of a batch of queries over stored tokens.
    ///
    /// # Errors
    /// Shape and range errors, queries that are not finite, queue errors.
    pub async fn attend(
        &self,
        call: &Call,
        batch: AttendBatch,
    ) -> Result<AttendReply, ServiceError> {
        self.admit(call)?;
        let model = self.models.find(&call.namespace, batch.model)?;
        batch.check_shape(&model.shape.geometry)?;
        let reply_bytes = self.check_reply_size(&batch, &model.shape.geometry)?;
        let lane = self.seats[model.seat].lane.clone();
        let bytes = batch.q.len() as u64 + reply_bytes;
        let prepared = self.prepare(call, model, batch, bytes)?;
        let metrics = self.metrics.clone();
        let work = move |backend: &mut dyn Backend| {
            let (began, before) = (Instant::now(), backend.launches());
            let attended = backend.attend(&prepared.plan);
            count_launches(&metrics, || backend.info(), &before, &backend.launches());
            let attended = attended?;
            prepared.end(began, attended.stored_bytes_read);
            Ok(AttendReply { out: attended.out, lse: attended.lse })
        };
        lane.attend(call, work).await
    }

    /// The same where queries are in device memory and the answer goes there; the batch has none
    /// itself. `launched` is called on the lane's thread once the device has all of it.
    ///
    /// # Errors
    /// As [`Service::attend`].
    pub(crate) async fn attend_in_place(
        &self,
        call: &Call,
        batch: AttendBatch,
        (places, q_bytes): (RegionPlaces, u64),
        mut launched: impl FnMut() + Send + 'static,
    ) -> Result<(), ServiceError> {
        self.admit(call)?;
        let model = self.models.find(&call.namespace, batch.model)?;
        batch.check_shape_of(&model.shape.geometry, q_bytes)?;
        // The limit of an answer that is carried: one batch does not hold the device for longer.
        self.check_reply_size(&batch, &model.shape.geometry)?;
        let rows = u64::from(batch.rows()) * u64::from(batch.q_heads);
        // Never more than a batch that is carried may take.
        let bytes = (rows * ROW_BYTES).min(2 * self.config.message_bytes_max as u64);
        let lane = self.seats[model.seat].lane.clone();
        let prepared = self.prepare(call, model, batch, bytes)?;
        let metrics = self.metrics.clone();
        let work = move |backend: &mut dyn Backend| {
            let (began, before) = (Instant::now(), backend.launches());
            let read = backend.attend_in_place(&prepared.plan, &places, &mut launched);
            count_launches(&metrics, || backend.info(), &before, &backend.launches());
            prepared.end(began, read?);
            Ok(())
        };
        lane.attend(call, work).await
    }

    /// Tests and plans a batch whose queries and answer take `bytes` of the daemon's memory.
    fn prepare(
        &self,
        call: &Call,
        model: Arc<Model>,
        batch: AttendBatch,
        bytes: u64,
    ) -> Result<Prepared, ServiceError> {
        let reads = self.resolve(call, &model, &batch)?;
        let parts = self.check_work(&batch, &reads, model.shape.geometry.block_tokens)?;
        let inflight = self.inflight.take(bytes + parts * PART_BYTES)?;
        if let Some(sample) = model.queries.as_ref().filter(|_| !batch.q.is_empty()) {
            sample.offer(&batch);
        }
        if let Some(recent) = model.recent_queries.as_ref().filter(|_| !batch.q.is_empty()) {
            recent.offer(&batch);
        }
        let (queries, pins) = self.plan_queries(call, &batch, &reads)?;
        let query_tokens = batch.rows();
        let plan = AttendPlan {
            model: batch.model,
            layer: batch.layer,
            q_heads: batch.q_heads,
            dtype: batch.dtype,
            scale: batch.scale,
            soft_cap: batch.soft_cap,
            queries,
            q: batch.q,
        };
        Ok(Prepared { plan, model, query_tokens, held: (pins, inflight) })
    }

    /// Bytes of the answer. Refuses a batch whose answer the transport could not carry, before any
    /// work.
    fn check_reply_size(
        &self,
        batch: &AttendBatch,
        geometry: &Geometry,
    ) -> Result<u64, ServiceError> {
        let rows = u64::from(batch.rows()) * u64::from(batch.q_heads);
        let row_bytes = u64::from(geometry.head_dim_v) * batch.dtype.size_bytes() as u64
            + DType::F32.size_bytes() as u64;
        self.check_message_size(rows * row_bytes, "fewer query tokens")?;
        Ok(rows * row_bytes)
    }

    /// Refuses an answer larger than a message may be.
    pub(super) fn check_message_size(&self, bytes: u64, ask: &str) -> Result<(), ServiceError> {
        // Room for the fields around the payloads.
        const ENVELOPE_BYTES: u64 = 1024;
        let max = self.config.message_bytes_max as u64;
        if bytes + ENVELOPE_BYTES > max {
            let message = format!(
                "the answer would take {bytes} bytes, over server.message_bytes_max = {max}; \
                 ask for {ask} at once"
            );
            return Err(ServiceError::new(ErrorCode::MessageTooLarge, message));
        }
        Ok(())
    }

    /// What each query reads, in the batch's order.
    pub(super) fn resolve(
        &self,
        call: &Call,
        model: &Model,
        batch: &AttendBatch,
    ) -> Result<Vec<Read>, ServiceError> {
        let read = |(index, query)| {
            self.resolve_query(call, model, batch, query).map_err(|error| error.in_query(index))
        };
        batch.queries.iter().enumerate().map(read).collect()
    }

    fn resolve_query(
        &self,
        call: &Call,
        model: &Model,
        batch: &AttendBatch,
        query: &AttendQuery,
    ) -> Result<Read, ServiceError> {
        let store = &self.seat_of(query.sequence).store;
        let of = store.model_of(&call.namespace, query.sequence)?;
        if of.id != model.shape.id {
            let message =
                format!("sequence {} is of model {}, not {}", query.sequence, of.id, batch.model);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        // No token is pinned here: this tests and finds the length.
        let pinned =
            store.pin(&call.namespace, query.sequence, batch.layer, 0..0, query.kv_length)?;
        let length = pinned.length;
        // An end past the readable length reads up to it, as a causal bound would.
        let end = query.end.map_or(length, |end| end.min(length));
        let start = query.start.unwrap_or(0).min(end);
        let position = match query.position {
            Some(position) => position,
            None => length.checked_sub(query.n_q).ok_or_else(|| {
                let message = format!(
                    "position is absent and n_q {} exceeds the {length} tokens read",
                    query.n_q
                );
                ServiceError::new(ErrorCode::InvalidArgument, message)
            })?,
        };
        Ok(Read { key: (query.sequence, length, start, end), position })
    }

    /// Refuses a batch that would hold memory or the device for too long, before anything of it
    /// is collected. Answers how many parts its distinct ranges have, about.
    pub(super) fn check_work(
        &self,
        batch: &AttendBatch,
        reads: &[Read],
        block_tokens: u32,
    ) -> Result<u64, ServiceError> {
        let (mut parts, mut work, mut distinct) = (0u64, 0u64, 0u64);
        let mut seen = HashSet::new();
        for (query, read) in batch.queries.iter().zip(reads) {
            let blocks = u64::from(read.tokens().div_ceil(block_tokens));
            parts += blocks;
            if seen.insert(read.key) {
                distinct += blocks;
            }
            let window = query.sliding_window.map_or(u32::MAX, |w| w.saturating_add(query.n_q));
            let scores = u64::from(query.n_q) * u64::from(read.tokens().min(window));
            work = work.saturating_add(scores.saturating_mul(u64::from(batch.q_heads)));
        }
        let check = |what, asked: u64, limit, max: u64| {
            if asked <= max {
                return Ok(());
            }
            let message = format!(
                "the batch has {asked} {what}, over {limit} = {max}; ask for fewer query tokens \
                 or shorter ranges at once"
            );
            Err(ServiceError::new(ErrorCode::LimitExceeded, message))
        };
        let config = &self.config;
        check("blocks to read", parts, "limits.attend_parts_max", config.attend_parts_max)?;
        check("scores to compute", work, "limits.attend_work_max", config.attend_work_max)?;
        Ok(distinct)
    }

    /// Pins and plans each distinct range once; queries that read the same share the parts.
    pub(super) fn plan_queries(
        &self,
        call: &Call,
        batch: &AttendBatch,
        reads: &[Read],
    ) -> Result<(Vec<PlanQuery>, Vec<Pinned>), ServiceError> {
        let mut planned = HashMap::<ReadKey, Arc<[PlanPart]>>::with_capacity(reads.len());
        let mut pins = Vec::with_capacity(reads.len());
        let mut queries = Vec::with_capacity(reads.len());
        for (index, (query, read)) in batch.queries.iter().zip(reads).enumerate() {
            let parts = match planned.entry(read.key) {
                Entry::Occupied(known) => known.get().clone(),
                Entry::Vacant(new) => {
                    let (sequence, length, start, end) = read.key;
                    let store = &self.seat_of(sequence).store;
                    let pinned = store
                        .pin(&call.namespace, sequence, batch.layer, start..end, Some(length))
                        .map_err(|error| ServiceError::from(error).in_query(index))?;
                    let parts = new.insert(plan::parts(&pinned).into()).clone();
                    pins.push(pinned);
                    parts
                }
            };
            queries.push(PlanQuery {
                n_q: query.n_q,
                position: read.position,
                sliding_window: query.sliding_window,
                parts,
            });
        }
        Ok((queries, pins))
    }
}

/// What the plan's tokens would take in the stored precision.
fn logical_bytes(plan: &AttendPlan, geometry: &Geometry) -> u64 {
    let tokens: u64 = plan.queries.iter().map(PlanQuery::tokens).sum();
    tokens * geometry.values_per_token() * geometry.dtype.size_bytes() as u64
}
