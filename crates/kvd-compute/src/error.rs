//! Errors that a backend answers with.

use crate::{AttendPlan, StopReason};
use kvd_codec::{CodecError, PageError};
use kvd_core::{Coded, ErrorCode, Geometry, ModelId, Side};

/// An error of a device operation. Nothing was published when one is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The model was never registered with this device, or was unregistered meanwhile.
    #[error("model {0} is not registered on this device")]
    UnknownModel(ModelId),
    /// An incoming row holds NaN or infinity.
    #[error(
        "{} of token {token}, head {head}, channel {channel} is {value}; K and V must be finite",
        if *side == Side::Key { "K" } else { "V" }
    )]
    NonFinite {
        /// Which payload.
        side: Side,
        /// Token within the request.
        token: u32,
        /// KV head.
        head: u32,
        /// Channel.
        channel: u32,
        /// NaN or an infinity.
        value: f32,
    },
    /// A query holds NaN or infinity.
    #[error("q at index {index} is {value}; queries must be finite")]
    NonFiniteQuery {
        /// Index into the payload, in values.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A query times the scale, folded into the codec's space, is beyond f32.
    #[error(
        "q of query {query} (query token {token}, query head {head}) times scale {scale} is beyond \
         f32; choose a smaller scale or smaller queries"
    )]
    QueryOverflow {
        /// Index in the batch.
        query: usize,
        /// Query token within the query.
        token: u32,
        /// Query head.
        head: u32,
        /// The factor on scores.
        scale: f32,
    },
    /// A block could not be encoded.
    #[error("encode block: {0}")]
    Codec(#[from] CodecError),
    /// The device cannot do what is asked, or has failed.
    #[error("{message}")]
    Device {
        /// The code that a client gets.
        code: ErrorCode,
        /// In words.
        message: String,
    },
    /// A page in the arena is not what its header says.
    #[error("read page: {0}")]
    Page(#[from] PageError),
    /// The work ended before it was done.
    #[error(
        "{}",
        match .0 {
            StopReason::Cancelled => "nobody waits for the answer any more",
            StopReason::DeadlinePassed => "the deadline passed before the answer was ready",
            StopReason::ShuttingDown =>
                "the daemon has stopped its device; retry on its successor",
            StopReason::Outrun => "work that goes first has the device",
        }
    )]
    Stopped(StopReason),
}

impl BackendError {
    /// The error for row `row` of a batch (`[tokens, q_heads]`) whose product with the scale is
    /// beyond f32, where keys have `dim` channels.
    #[must_use]
    pub fn query_overflow(plan: &AttendPlan, row: usize, dim: usize) -> Self {
        let (heads, scale) = (plan.q_heads.max(1) as usize, plan.score_scale(dim));
        let (mut query, mut token, head) = (0, row / heads, (row % heads) as u32);
        for of in &plan.queries {
            if token < of.n_q as usize {
                break;
            }
            (query, token) = (query + 1, token - of.n_q as usize);
        }
        Self::QueryOverflow { query, token: token as u32, head, scale }
    }

    /// The error for a value of K or V, by its index in `[tokens, kv_heads, head_dim]`.
    #[must_use]
    pub fn non_finite(geometry: &Geometry, side: Side, index: usize, value: f32) -> Self {
        let (dim, heads) = (geometry.head_dim(side), geometry.kv_heads as usize);
        Self::NonFinite {
            side,
            token: (index / (dim * heads)) as u32,
            head: (index / dim % heads) as u32,
            channel: (index % dim) as u32,
            value,
        }
    }

    /// The error of a value that is so many tokens further on in the request.
    pub(crate) fn later_by(mut self, tokens: u32) -> Self {
        if let Self::NonFinite { token, .. } = &mut self {
            *token += tokens;
        }
        self
    }
}

impl Coded for BackendError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownModel(_) => ErrorCode::UnknownModel,
            Self::NonFinite { .. } | Self::NonFiniteQuery { .. } | Self::QueryOverflow { .. } => {
                ErrorCode::NonFinite
            }
            Self::Device { code, .. } => *code,
            Self::Codec(error) => error.code(),
            Self::Page(error) => error.code(),
            Self::Stopped(StopReason::Cancelled | StopReason::Outrun) => ErrorCode::Cancelled,
            Self::Stopped(StopReason::DeadlinePassed) => ErrorCode::DeadlineExceeded,
            Self::Stopped(StopReason::ShuttingDown) => ErrorCode::ShuttingDown,
        }
    }
}
