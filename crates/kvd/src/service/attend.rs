//! `Attend`: from queries over sequences to one plan, and its answer.

use super::{Call, Model, Service, ServiceError, plan};
use kvd_compute::{AttendPlan, PlanQuery};
use kvd_core::{DType, ErrorCode, Geometry};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use kvd_store::Pinned;
use std::time::Instant;

/// Output and log-sum-exp of a batch.
pub struct AttendReply {
    /// `[sum of n_q, q_heads, head_dim_v]` in the batch's dtype.
    pub out: Vec<u8>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
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
        self.check_reply_size(&batch, &model.shape.geometry)?;
        let mut queries = Vec::with_capacity(batch.queries.len());
        // Keeps what the plan names alive until the device has answered.
        let mut pins = Vec::with_capacity(batch.queries.len());
        for (index, query) in batch.queries.iter().enumerate() {
            let (planned, pinned) = self
                .plan_query(call, &model, &batch, query)
                .map_err(|error| error.in_query(index))?;
            queries.push(planned);
            pins.push(pinned);
        }
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
        let work = move |backend: &mut dyn kvd_compute::Backend| {
            let began = Instant::now();
            let attended = backend.attend(&plan)?;
            drop(pins);
            let metrics = &model.metrics;
            metrics.attend_seconds.record(began.elapsed().as_secs_f64());
            metrics.attended_query_tokens.increment(u64::from(query_tokens));
            metrics.attended_stored_bytes.increment(attended.stored_bytes_read);
            metrics.attended_logical_bytes.increment(logical_bytes(&plan, &model.shape.geometry));
            Ok(AttendReply { out: attended.out, lse: attended.lse })
        };
        self.lane.run(call, work).await
    }

    /// Refuses a batch whose answer the transport could not carry, before any work.
    fn check_reply_size(
        &self,
        batch: &AttendBatch,
        geometry: &Geometry,
    ) -> Result<(), ServiceError> {
        let rows = u64::from(batch.rows()) * u64::from(batch.q_heads);
        let row_bytes = u64::from(geometry.head_dim_v) * batch.dtype.size_bytes() as u64
            + DType::F32.size_bytes() as u64;
        self.check_message_size(rows * row_bytes, "fewer query tokens")
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

    fn plan_query(
        &self,
        call: &Call,
        model: &Model,
        batch: &AttendBatch,
        query: &AttendQuery,
    ) -> Result<(PlanQuery, Pinned), ServiceError> {
        let of = self.store.model_of(&call.namespace, query.sequence)?;
        if of.id != model.shape.id {
            let message =
                format!("sequence {} is of model {}, not {}", query.sequence, of.id, batch.model);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        // An end past the readable length reads up to it, as a causal bound would.
        let length = match query.kv_length {
            Some(length) => length,
            None => {
                self.store.pin(&call.namespace, query.sequence, batch.layer, 0..0, None)?.length
            }
        };
        let end = query.end.map_or(length, |end| end.min(length));
        let start = query.start.unwrap_or(0).min(end);
        let pinned = self.store.pin(
            &call.namespace,
            query.sequence,
            batch.layer,
            start..end,
            Some(length),
        )?;
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
        let planned = PlanQuery {
            n_q: query.n_q,
            position,
            sliding_window: query.sliding_window,
            parts: plan::parts(&pinned),
        };
        Ok((planned, pinned))
    }
}

/// What the plan's tokens would take in the stored precision.
fn logical_bytes(plan: &AttendPlan, geometry: &Geometry) -> u64 {
    let tokens: u64 = plan.queries.iter().map(PlanQuery::tokens).sum();
    tokens * geometry.values_per_token() * geometry.dtype.size_bytes() as u64
}
