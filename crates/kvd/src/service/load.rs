//! `LoadBlocks`: rows decoded back, in pieces that fit a message.

use super::attend::ENVELOPE_BYTES;
use super::{Call, Service, ServiceError, plan};
use kvd_compute::LoadPlan;
use kvd_core::{DType, Geometry};
use kvd_proto::domain::LoadRange;
use std::time::Instant;

/// Target size of a piece: large enough to amortise a message, small enough to keep the lane
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
}

impl Service {
    /// Splits a load into pieces; each is then read by [`Service::load_piece`]. The whole range
    /// must be stored.
    ///
    /// # Errors
    /// Unknown ids, or a range that is not stored.
    pub fn load_pieces(
        &self,
        call: &Call,
        range: &LoadRange,
    ) -> Result<Vec<LoadRange>, ServiceError> {
        self.admit(call)?;
        let store = &self.seat_of(range.sequence)?.store;
        let shape = store.model_of(&call.namespace, range.sequence)?;
        range.check_shape(&shape.geometry)?;
        store.pin(&call.namespace, range.sequence, range.layer, range.start..range.end, None)?;
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
        call: &Call,
        piece: &LoadRange,
    ) -> Result<LoadPiece, ServiceError> {
        // The load as a whole was let in: a drain lets it finish.
        call.check_deadline()?;
        let seat = self.seat_of(piece.sequence)?;
        let shape = seat.store.model_of(&call.namespace, piece.sequence)?;
        let model = self.models.find(&call.namespace, shape.id)?;
        let (start, end) = (piece.start, piece.end);
        let pinned =
            seat.store.pin(&call.namespace, piece.sequence, piece.layer, start..end, None)?;
        let plan = LoadPlan {
            model: shape.id,
            layer: piece.layer,
            dtype: piece.dtype.unwrap_or(shape.geometry.dtype),
            parts: plan::parts(&pinned),
        };
        let work = move |backend: &mut dyn kvd_compute::Backend| {
            let began = Instant::now();
            let rows = backend.load(&plan)?;
            drop(pinned);
            model.metrics.load.record(began.elapsed());
            let bytes = u64::from(end - start) * model.shape.geometry.token_bytes();
            model.metrics.loaded_logical_bytes.increment(bytes);
            Ok(LoadPiece { start, tokens: end - start, k: rows.k, v: rows.v })
        };
        seat.lane.run(call, work).await
    }
}

/// Tokens of one piece of about so many bytes: whole blocks where they fit.
fn piece_tokens(geometry: &Geometry, dtype: DType, piece_bytes: u64) -> u32 {
    let token_bytes = geometry.values_per_token() * dtype.size_bytes() as u64;
    let tokens = u32::try_from((piece_bytes / token_bytes).max(1)).unwrap_or(u32::MAX);
    let block = geometry.block_tokens;
    if tokens >= block { tokens / block * block } else { tokens }
}
