//! What a backend can answer instead of a result.

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
    /// A block could not be encoded.
    #[error("encode block: {0}")]
    Codec(#[from] CodecError),
    /// The device cannot do what is asked, or has failed.
    #[error("{message}")]
    Device {
        /// What a client is told.
        code: ErrorCode,
        /// In words.
        message: String,
    },
    /// A page in the arena is not what its header says.
    #[error("read page: {0}")]
    Page(#[from] PageError),
}

impl BackendError {
    /// Of a value of K or V, by its index in `[tokens, kv_heads, head_dim]`.
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
}

impl Coded for BackendError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownModel(_) => ErrorCode::UnknownModel,
            Self::NonFinite { .. } | Self::NonFiniteQuery { .. } => ErrorCode::NonFinite,
            Self::Device { code, .. } => *code,
            Self::Codec(error) => error.code(),
            Self::Page(error) => error.code(),
        }
    }
}
