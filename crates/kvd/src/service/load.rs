//! `LoadBlocks`: rows decoded back, in pieces that fit a message.

use super::attend::ENVELOPE_BYTES;
use super::budget::InFlight;
use super::{CallContext, RegisteredModel, Service, ServiceError, plan};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use kvd_compute::{Backend, LoadPlan, Stop};
use kvd_core::{DType, Geometry};
use kvd_proto::domain::LoadRange;
use kvd_store::PinnedRange;
use std::sync::Arc;
use std::time::Instant;

/// Target size of a piece: large enough to amortise a message, small enough to keep the worker
/// free for others.
const PIECE_BYTES: u64 = 1 << 20;

/// Some rows, `[tokens, kv_heads, head_dim]`.
pub struct LoadPiece {
    /// First token.
    pub start: u32,
    /// Tokens.
    pub tokens: u32,
    /// Keys.
    pub k: Vec<u8>,
    /// Values.
    pub v: Vec<u8>,
    /// Share of the budgets, until the piece is sent.
    pub(crate) held: Option<InFlight>,
}

/// The job of one piece.
pub(crate) struct LoadJob {
    plan: LoadPlan,
    start: u32,
    tokens: u32,
    model: Arc<RegisteredModel>,
    /// Keeps what the plan names as it is until it is read.
    _pinned: PinnedRange,
    answer: Option<InFlight>,
}

impl DeviceWork for LoadJob {
    type Reply = LoadPiece;

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<LoadPiece>, ServiceError> {
        let began = Instant::now();
        let rows = backend.load(&self.plan)?;
        let (metrics, tokens) = (&self.model.metrics, self.tokens);
        metrics.load.record_job(began.elapsed());
        let bytes = u64::from(tokens) * self.model.shape.geometry.token_bytes();
        metrics.loaded_logical_bytes.increment(bytes);
        let (start, held) = (self.start, self.answer.take());
        Ok(Some(LoadPiece { start, tokens, k: rows.k, v: rows.v, held }))
    }
}

impl Service {
    /// Splits a load into pieces; each is then read by [`Service::load_piece`]. The whole range
    /// must be stored.
    ///
    /// # Errors
    /// Unknown ids, or a range that is not stored.
    pub fn load_pieces(
        &self,
        call: &CallContext,
        range: &LoadRange,
    ) -> Result<Vec<LoadRange>, ServiceError> {
        self.admit_call(call)?;
        let store = &self.shard_of(range.sequence)?.store;
        let shape = store.model_of(&call.namespace, range.sequence)?;
        range.check_shape(&shape.geometry)?;
        store.pin_range(
            &call.namespace,
            range.sequence,
            range.layer,
            range.start..range.end,
            None,
        )?;
        let dtype = range.dtype.unwrap_or(shape.geometry.dtype);
        // A piece is never larger than a message may be, unless it is of one token.
        let max = (self.config.message_bytes_max as u64).saturating_sub(ENVELOPE_BYTES);
        let step = piece_tokens(&shape.geometry, dtype, max.min(PIECE_BYTES));
        let token_bytes = shape.geometry.values_per_token() * dtype.size_bytes() as u64;
        self.check_message_size(u64::from(step) * token_bytes, "a narrower dtype")?;
        let starts = (range.start..range.end).step_by(step as usize);
        Ok(starts
            .map(|start| LoadRange {
                start,
                end: range.end.min(start.saturating_add(step)),
                dtype: Some(dtype),
                ..*range
            })
            .collect())
    }

    /// Decodes one piece.
    ///
    /// # Errors
    /// When the sequence was closed or truncated since, or a page is corrupt.
    pub async fn load_piece(
        &self,
        call: &CallContext,
        piece: &LoadRange,
    ) -> Result<LoadPiece, ServiceError> {
        // The load as a whole was let in: a drain lets it finish.
        call.check_deadline()?;
        let shard = self.shard_of(piece.sequence)?;
        let shape = shard.store.model_of(&call.namespace, piece.sequence)?;
        let model = self.models.find_model(&call.namespace, shape.id)?;
        let (start, end) = (piece.start, piece.end);
        let pinned = shard.store.pin_range(
            &call.namespace,
            piece.sequence,
            piece.layer,
            start..end,
            None,
        )?;
        let dtype = piece.dtype.unwrap_or(shape.geometry.dtype);
        let plan = LoadPlan {
            model: shape.id,
            layer: piece.layer,
            dtype,
            parts: plan::each_part(&pinned).collect(),
        };
        let tokens = end - start;
        let token_bytes = shape.geometry.values_per_token() * dtype.size_bytes() as u64;
        // It holds nothing else that others wait for.
        let answer = self.call_budgets(call).wait_share(u64::from(tokens) * token_bytes).await?;
        let answer = Some(answer);
        let job = LoadJob { plan, start, tokens, model, _pinned: pinned, answer };
        shard.worker.ask_device(call, job).await
    }
}

/// Tokens of one piece of about so many bytes: whole blocks where they fit.
fn piece_tokens(geometry: &Geometry, dtype: DType, piece_bytes: u64) -> u32 {
    let token_bytes = geometry.values_per_token() * dtype.size_bytes() as u64;
    let tokens = u32::try_from((piece_bytes / token_bytes).max(1)).unwrap_or(u32::MAX);
    let block = geometry.block_tokens;
    if tokens >= block { tokens / block * block } else { tokens }
}
