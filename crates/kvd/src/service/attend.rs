//! `Attend`: from queries over sequences to one plan, and its answer.

use super::attend_job::{AttendInPlace, AttendJob, PreparedAttend};
use super::attend_shelf::AttendShelf;
use super::budget::InFlight;
use super::distinct_reads::{DistinctReads, QueryRead, ReadKey};
use super::{CallContext, RegisteredModel, Service, ServiceError};
use crate::device_worker::AcceptedJob;
use kvd_compute::{AttendPlan, AttendTask, Attended, PlanQuery, RegionPlaces, first_non_finite};
use kvd_core::{DType, ErrorCode, Geometry};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use kvd_store::{ChosenRange, PinnedRange};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Output and log-sum-exp of a batch.
pub struct AttendReply {
    /// `[sum of n_q, q_heads, head_dim_v]` in the batch's dtype.
    pub out: Vec<u8>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
    /// Queries that were not answered, in order; none unless the batch asks for them.
    pub query_errors: Vec<RefusedQuery>,
    /// Share of the budgets, until the answer is sent.
    pub(crate) held: Option<InFlight>,
}

/// An attend that is planned, and the bytes of its answer.
struct BegunAttend {
    prepared: PreparedAttend,
    reply_bytes: u64,
}

/// Queries in device memory, and the places of their answers.
pub(crate) struct InPlaceQueries {
    pub(crate) places: RegionPlaces,
    /// Bytes of the queries.
    pub(crate) q_bytes: u64,
}

/// A query of a batch that fails alone: its output is 0 and its log-sum-exp `-inf`.
#[derive(Clone, Debug)]
pub struct RefusedQuery {
    /// Position in the batch.
    pub index: u32,
    /// Why.
    pub error: ServiceError,
}

/// Bytes of book-keeping of one part in flight: the plan's and the pin's.
pub(crate) const PART_BYTES: u64 = 128;

/// Bytes of book-keeping of one query row in flight, about: its end, its share of a unit, and a
/// word for each of the parts that its range is cut into, some dozens of them.
const ROW_BYTES: u64 = 256;

/// Bytes of a message for the fields around its payloads.
pub(super) const ENVELOPE_BYTES: u64 = 1024;

/// Bytes that an answer takes for a query that failed alone, at most.
const QUERY_ERROR_BYTES: u64 = 256;

impl Service {
    /// Attention of a batch of queries over stored tokens.
    ///
    /// # Errors
    /// Shape and range errors, queries that are not finite, queue errors.
    pub async fn attend_batch(
        &self,
        call: &CallContext,
        batch: AttendBatch,
    ) -> Result<AttendReply, ServiceError> {
        self.wait_for_batch(call, &batch).await;
        let BegunAttend { mut prepared, reply_bytes } = self.begin_attend(call, batch)?;
        if let Some(reply) = prepared.take_empty() {
            return Ok(reply);
        }
        prepared.answer = Some(self.admit_answer(call, reply_bytes).await?);
        let worker = &self.shards[prepared.model.shard].worker;
        worker.ask_device(call, AttendJob(prepared)).await
    }

    /// As [`Service::attend_batch`], for a caller that is told the reply or the error, by this
    /// thread or the device's; whether somebody was there to hear it. The job, if it waits.
    pub(crate) fn tell_attend(
        &self,
        call: &CallContext,
        batch: AttendBatch,
        tell: impl FnOnce(Result<AttendReply, ServiceError>) -> bool + Send + 'static,
    ) -> Option<AcceptedJob> {
        let begun = self.begin_attend(call, batch).and_then(|begun| {
            let mut prepared = begun.prepared;
            if prepared.query_tokens > 0 {
                prepared.answer = Some(self.take_bytes(call, begun.reply_bytes)?);
            }
            Ok(prepared)
        });
        let mut prepared = match begun {
            Ok(prepared) => prepared,
            Err(error) => {
                tell(Err(error));
                return None;
            }
        };
        if let Some(reply) = prepared.take_empty() {
            tell(Ok(reply));
            return None;
        }
        prepared.task.memory = self.shelf.take_answer();
        let shard = prepared.model.shard;
        self.shards[shard].worker.tell_device(call, AttendJob(prepared), tell)
    }

    /// Takes the memory of an answer that was written, for another that is told.
    pub(crate) fn keep_answer(&self, reply: AttendReply) {
        let AttendReply { out, lse, .. } = reply;
        self.shelf.keep_answer(Attended { out, lse, ..Attended::default() });
    }

    /// An empty list for the queries of a batch.
    pub(crate) fn take_queries(&self) -> Vec<AttendQuery> {
        self.shelf.take_queries()
    }

    fn begin_attend(
        &self,
        call: &CallContext,
        batch: AttendBatch,
    ) -> Result<BegunAttend, ServiceError> {
        self.admit_call(call)?;
        let model = self.batch_model(call, &batch)?;
        batch.check_shape(&model.shape.geometry)?;
        let reply_bytes = self.check_reply_size(&batch, &model.shape.geometry)?;
        // What came in a message is taken already.
        let bytes = call.bytes_to_admit(batch.q.len() as u64);
        let prepared = self.prepare_attend(call, model, batch, bytes)?;
        Ok(BegunAttend { prepared, reply_bytes })
    }

    /// Attention where queries are in device memory and the answer goes there; the batch has none
    /// itself. `launched` is called on the worker's thread once the device has all of it. Answers
    /// which queries failed alone.
    ///
    /// # Errors
    /// As [`Service::attend_batch`]; a query that is not finite refuses the batch in any case.
    pub(crate) async fn attend_in_place(
        &self,
        call: &CallContext,
        batch: AttendBatch,
        in_place: InPlaceQueries,
        launched: impl FnMut() + Send + 'static,
    ) -> Result<Vec<RefusedQuery>, ServiceError> {
        self.admit_call(call)?;
        let model = self.batch_model(call, &batch)?;
        batch.check_shape_of(&model.shape.geometry, in_place.q_bytes)?;
        self.wait_for_batch(call, &batch).await;
        // The limit of an answer that is carried: one batch does not hold the device for longer.
        self.check_reply_size(&batch, &model.shape.geometry)?;
        let rows = u64::from(batch.query_rows()) * u64::from(batch.q_heads);
        // Never more than a batch that is carried may take.
        let bytes = (rows * ROW_BYTES).min(2 * self.config.message_bytes_max as u64);
        let worker = &self.shards[model.shard].worker;
        let prepared = self.prepare_attend(call, model, batch, bytes)?;
        let job = AttendInPlace { prepared, places: in_place.places, launched: Box::new(launched) };
        worker.ask_device(call, job).await
    }

    /// Tests and plans a batch whose queries take `bytes` of the daemon's memory.
    fn prepare_attend(
        &self,
        call: &CallContext,
        model: Arc<RegisteredModel>,
        mut batch: AttendBatch,
        bytes: u64,
    ) -> Result<PreparedAttend, ServiceError> {
        let ResolvedReads { mut reads, pins, mut query_errors } =
            self.resolve_reads(call, &model, &batch)?;
        let parts = self.check_work(&batch, &reads, model.shape.geometry.block_tokens)?;
        let inflight = self.take_bytes(call, bytes + parts * PART_BYTES)?;
        if let Some(sample) = model.queries.as_ref().filter(|_| !batch.q.is_empty()) {
            sample.offer_batch(&batch);
        }
        if batch.per_query_errors {
            refuse_non_finite(&mut batch, &model.shape.geometry, &mut reads, &mut query_errors);
        }
        if let Some(recent) = model.recent_queries.as_ref().filter(|_| !batch.q.is_empty()) {
            recent.offer_batch(&batch);
        }
        let queries = plan_queries(&batch, &reads, &pins, &self.shelf);
        query_errors.sort_by_key(|refused| refused.index);
        let query_tokens = batch.query_rows();
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
        self.shelf.keep_queries(batch.queries);
        Ok(PreparedAttend {
            task: AttendTask::new(plan),
            model,
            query_tokens,
            query_errors,
            pins,
            _inflight: inflight,
            answer: None,
            metrics: self.metrics.clone(),
            shelf: self.shelf.clone(),
            took: Duration::ZERO,
        })
    }

    /// Bytes of the answer. Refuses a batch whose answer the transport could not carry, before any
    /// work.
    fn check_reply_size(
        &self,
        batch: &AttendBatch,
        geometry: &Geometry,
    ) -> Result<u64, ServiceError> {
        let rows = u64::from(batch.query_rows()) * u64::from(batch.q_heads);
        let row_bytes = u64::from(geometry.head_dim_v) * batch.dtype.size_bytes() as u64
            + DType::F32.size_bytes() as u64;
        let errors = if batch.per_query_errors { batch.queries.len() as u64 } else { 0 };
        let bytes = rows * row_bytes + errors * QUERY_ERROR_BYTES;
        self.check_message_size(bytes, "fewer query tokens")?;
        Ok(bytes)
    }

    /// Refuses an answer larger than a message may be.
    pub(super) fn check_message_size(&self, bytes: u64, ask: &str) -> Result<(), ServiceError> {
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

    /// Finds and pins what each query reads, in the batch's order; queries that read the same share
    /// a pin. One that cannot be read fails alone where the batch asks for that, and then reads
    /// nothing.
    pub(super) fn resolve_reads(
        &self,
        call: &CallContext,
        model: &RegisteredModel,
        batch: &AttendBatch,
    ) -> Result<ResolvedReads, ServiceError> {
        let mut resolved = ResolvedReads {
            reads: SmallVec::with_capacity(batch.queries.len()),
            pins: DistinctReads::default(),
            query_errors: Vec::new(),
        };
        let mut blocks_left = self.config.attend_parts_max;
        for (index, query) in (0..).zip(&batch.queries) {
            let read = self.resolve_query(call, model, batch, query, |key| {
                // A batch that is over its limit is counted to its end, and pins no more.
                let blocks = key.count_tokens().div_ceil(model.shape.geometry.block_tokens);
                let fits = blocks_left >= u64::from(blocks);
                blocks_left = blocks_left.saturating_sub(blocks.into());
                fits && blocks > 0 && resolved.pins.find_read(&key).is_none()
            });
            match read {
                Ok(PinnedRead { read, pinned }) => {
                    if !pinned.range.is_empty() {
                        resolved.pins.add_read(read.key, pinned);
                    }
                    resolved.reads.push(read);
                }
                Err(error) => {
                    refuse_query(batch, index, error, &mut resolved.query_errors)?;
                    resolved.reads.push(QueryRead::read_nothing(query.sequence));
                }
            }
        }
        Ok(resolved)
    }

    /// Finds what a query reads, and pins it where `wants_pin`.
    fn resolve_query(
        &self,
        call: &CallContext,
        model: &RegisteredModel,
        batch: &AttendBatch,
        query: &AttendQuery,
        wants_pin: impl FnOnce(ReadKey) -> bool,
    ) -> Result<PinnedRead, ServiceError> {
        query.check_query()?;
        let AttendQuery { sequence, kv_length, n_q, .. } = *query;
        let store = &self.shard_of(sequence)?.store;
        let of = store.model_of(&call.namespace, sequence)?;
        if of.id != model.shape.id {
            let message = format!("sequence {sequence} is of model {}, not {}", of.id, batch.model);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        let mut read = QueryRead::read_nothing(sequence);
        let mut memory = Some(self.shelf.take_pin());
        let choose = |length: u32| {
            let position = match query.position {
                Some(position) => position,
                None => length.checked_sub(n_q).ok_or_else(|| {
                    let message = format!(
                        "position is absent and n_q {n_q} exceeds the {length} tokens read"
                    );
                    ServiceError::new(ErrorCode::InvalidArgument, message)
                })?,
            };
            // Past the end all is visible, wherever; a window counts from there.
            let is_clamped = query.sliding_window.is_none();
            let position = if is_clamped { position.min(length) } else { position };
            let range = range_to_read(query, length, position, of.geometry.block_tokens);
            let key = ReadKey { sequence, length, start: range.start, end: range.end };
            read = QueryRead { key, position };
            Ok::<_, ServiceError>(match memory.take_if(|_| wants_pin(key)) {
                Some(memory) => ChosenRange { tokens: range, memory },
                None => ChosenRange::default(),
            })
        };
        let pinned = store.pin_chosen(&call.namespace, sequence, batch.layer, kv_length, choose)?;
        if let Some(unused) = memory {
            self.shelf.keep_pin(unused);
        }
        Ok(PinnedRead { read, pinned })
    }

    /// Refuses a batch that would hold memory or the device for too long, before anything of it
    /// is collected. Answers how many parts its distinct ranges have, about.
    pub(super) fn check_work(
        &self,
        batch: &AttendBatch,
        reads: &[QueryRead],
        block_tokens: u32,
    ) -> Result<u64, ServiceError> {
        let (mut parts, mut work, mut distinct) = (0u64, 0u64, 0u64);
        let mut seen = DistinctReads::default();
        for (query, read) in batch.queries.iter().zip(reads) {
            let blocks = u64::from(read.key.count_tokens().div_ceil(block_tokens));
            parts += blocks;
            if seen.find_read(&read.key).is_none() {
                seen.add_read(read.key, ());
                distinct += blocks;
            }
            let window = query.sliding_window.map_or(u32::MAX, |w| w.saturating_add(query.n_q));
            let scores = u64::from(query.n_q) * u64::from(read.key.count_tokens().min(window));
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
}

/// The read of one query, and its pin: of nothing where an earlier one has it.
struct PinnedRead {
    read: QueryRead,
    pinned: PinnedRange,
}

/// The reads of a batch, query by query, and which queries fail alone.
pub(super) struct ResolvedReads {
    pub(super) reads: SmallVec<[QueryRead; 2]>,
    /// A pin of each distinct read that is not empty.
    pub(super) pins: DistinctReads<PinnedRange>,
    pub(super) query_errors: Vec<RefusedQuery>,
}

/// Plans each distinct range once; queries that read the same share the parts.
pub(super) fn plan_queries(
    batch: &AttendBatch,
    reads: &[QueryRead],
    pins: &DistinctReads<PinnedRange>,
    shelf: &AttendShelf,
) -> Vec<PlanQuery> {
    let planned = pins.map_reads(|pinned| shelf.plan_parts(pinned));
    let queries = batch.queries.iter().zip(reads);
    // One without tokens has no rows, and was refused.
    let answered = queries.filter(|(query, _)| query.n_q > 0);
    let mut plan = shelf.take_plan();
    plan.extend(answered.map(|(query, read)| PlanQuery {
        n_q: query.n_q,
        position: read.position,
        sliding_window: query.sliding_window,
        parts: planned.find_read(&read.key).cloned().unwrap_or_default(),
    }));
    plan
}

/// Notes that a query failed, or refuses its batch where that does not ask for single errors.
fn refuse_query(
    batch: &AttendBatch,
    index: u32,
    error: ServiceError,
    query_errors: &mut Vec<RefusedQuery>,
) -> Result<(), ServiceError> {
    if !batch.per_query_errors {
        return Err(error.in_query(index));
    }
    query_errors.push(RefusedQuery { index, error });
    Ok(())
}

/// Fails queries that hold a NaN or an infinity, or that are none of f32 times the scale, and puts
/// zeros in place of what they ask.
fn refuse_non_finite(
    batch: &mut AttendBatch,
    geometry: &Geometry,
    reads: &mut [QueryRead],
    query_errors: &mut Vec<RefusedQuery>,
) {
    let value_bytes = batch.dtype.size_bytes();
    let token_bytes = batch.q_heads as usize * geometry.head_dim_k as usize * value_bytes;
    let mut finite: Option<Vec<u8>> = None;
    let mut start = 0;
    for (index, (query, read)) in (0..).zip(batch.queries.iter().zip(reads)) {
        let rows = start..(start + query.n_q as usize * token_bytes).min(batch.q.len());
        start = rows.end;
        let asked = &batch.q[rows.clone()];
        let message = match first_non_finite(batch.dtype, asked) {
            Some((at, value)) => format!("value {at} of its q is {value}; queries must be finite"),
            None => match first_overflow(batch.dtype, asked, batch.scale) {
                Some((at, value)) => format!(
                    "value {at} of its q is {value}, which times scale {} is beyond f32; \
                     send smaller queries or a smaller scale",
                    batch.scale.unwrap_or_default()
                ),
                None => continue,
            },
        };
        finite.get_or_insert_with(|| batch.q.to_vec())[rows].fill(0);
        *read = QueryRead::read_nothing(query.sequence);
        // One that failed already keeps its first reason.
        if query_errors.iter().all(|refused| refused.index != index) {
            let error = ServiceError::new(ErrorCode::NonFinite, message);
            query_errors.push(RefusedQuery { index, error });
        }
    }
    if let Some(finite) = finite {
        batch.q = finite.into();
    }
}

/// The first value that is no finite f32 times the scale, and where it is. One that is absent is
/// below 1.
fn first_overflow(dtype: DType, bytes: &[u8], scale: Option<f32>) -> Option<(usize, f32)> {
    const CHUNK: usize = 256;
    let scale = scale.filter(|scale| scale.abs() > 1.0)?;
    let size = dtype.size_bytes();
    bytes.chunks(CHUNK * size).enumerate().find_map(|(chunk, bytes)| {
        let mut values = [0f32; CHUNK];
        let values = &mut values[..bytes.len() / size];
        dtype.widen_values(bytes, values);
        let at = values.iter().position(|value| !(value * scale).is_finite())?;
        Some((chunk * CHUNK + at, values[at]))
    })
}

/// Tokens that a query has to read, of `length`: none that the window of its first token hides, and
/// no block that begins after the position of its last token.
///
/// The end is that of a block, so that queries of neighbouring positions share what they read.
fn range_to_read(query: &AttendQuery, length: u32, position: u32, block_tokens: u32) -> Range<u32> {
    let seen_end = u64::from(position) + u64::from(query.n_q);
    let block_end = seen_end.next_multiple_of(u64::from(block_tokens));
    let end = query.end.unwrap_or(length).min(length);
    let end = u32::try_from(block_end).map_or(end, |block_end| end.min(block_end));
    // The first token sees `window` tokens, itself the last of them.
    let seen_start = query.sliding_window.map_or(0, |window| {
        (u64::from(position) + 1).saturating_sub(u64::from(window)).min(u64::from(end)) as u32
    });
    query.start.unwrap_or(0).max(seen_start).min(end)..end
}
