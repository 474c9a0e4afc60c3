//! Why a message is refused before anything is looked up.

use kvd_core::{Coded, ErrorCode};

/// A message that breaks the wire's own rules; names the field, from the message's root.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A required field is absent.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field holds what cannot be meant.
    #[error("{field}: {reason}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// The problem, and the value that would be right.
        reason: String,
    },
    /// A count exceeds its named maximum.
    #[error("{field} is {given}; the maximum is {max}")]
    OverLimit {
        /// The field.
        field: &'static str,
        /// The requested amount.
        given: u64,
        /// The allowed amount.
        max: u64,
    },
    /// A payload does not fill its shape.
    #[error("{field} has {given} bytes; its shape {shape} needs {expected}")]
    PayloadLength {
        /// The field.
        field: &'static str,
        /// The shape in words, e.g. `[tokens, kv_heads, head_dim_k]`.
        shape: &'static str,
        /// Bytes received.
        given: u64,
        /// Bytes the shape needs.
        expected: u64,
    },
    /// A count does not fit the model's geometry.
    #[error("{field}: {reason}")]
    ShapeMismatch {
        /// The field.
        field: &'static str,
        /// The two sizes that do not agree.
        reason: String,
    },
    /// One part of a step is refused.
    #[error("parts[{index}].{error}")]
    Part {
        /// Position in `parts`.
        index: usize,
        /// The refusal, with its field counted from the part.
        error: Box<RequestError>,
    },
    /// One query of a batch is refused.
    #[error("queries[{index}].{error}")]
    Query {
        /// Position in `queries`.
        index: usize,
        /// The refusal, with its field counted from the query.
        error: Box<RequestError>,
    },
}

impl RequestError {
    pub(crate) fn invalid_field(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    /// This refusal, as one of a part of a step.
    #[must_use]
    pub fn in_part(self, index: usize) -> Self {
        Self::Part { index, error: Box::new(self) }
    }
}

impl Coded for RequestError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Missing { .. } | Self::Invalid { .. } => ErrorCode::InvalidArgument,
            Self::OverLimit { .. } => ErrorCode::LimitExceeded,
            Self::PayloadLength { .. } | Self::ShapeMismatch { .. } => ErrorCode::ShapeMismatch,
            Self::Query { error, .. } | Self::Part { error, .. } => error.code(),
        }
    }
}
