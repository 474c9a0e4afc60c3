//! One code per way a request can end, the same in replies, logs and metric labels.

use std::time::Duration;

/// Error codes, for branching and for labels. The gRPC status stands beside each code in
/// `kvd-proto`; [`ErrorCode::is_retryable`] and [`ErrorCode::name`] are the rest of that table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ErrorCode {
    /// A field is missing, malformed or out of range.
    InvalidArgument,
    /// Payload length or head counts do not fit the model's geometry.
    ShapeMismatch,
    /// K, V or a query holds NaN or infinity.
    NonFinite,
    /// The codec text does not parse or cannot serve this geometry.
    InvalidCodec,
    /// The codec needs a calibration that is absent or does not fit.
    InvalidCalibration,
    /// No such model in this namespace.
    UnknownModel,
    /// No such sequence in this namespace.
    UnknownSequence,
    /// No such session in this namespace: it has ended, or never was.
    UnknownSession,
    /// No such lease in this namespace: it has ended, or never was.
    UnknownLease,
    /// A namespace the caller may not use.
    NamespaceDenied,
    /// The caller shows nothing that says who it is, or what it shows is of nobody.
    Unauthenticated,
    /// The caller is known and lacks the role that the call needs.
    PermissionDenied,
    /// A stored range begins after the end of the sequence.
    RangeGap,
    /// A stored range overlaps tokens that are already there.
    RangeOverlap,
    /// An earlier store put other content in the same range.
    RangeConflict,
    /// A read or truncation reaches past what is stored.
    RangeNotStored,
    /// Another request is appending to the same layer of the same sequence.
    SequenceBusy,
    /// A model still has sequences.
    ModelInUse,
    /// Page memory is used up.
    PoolFull,
    /// A bounded queue is full.
    QueueFull,
    /// A named limit was reached (sequences, models, batch).
    LimitExceeded,
    /// A namespace has as much of something as it may.
    QuotaExceeded,
    /// A message is larger than the configured maximum.
    MessageTooLarge,
    /// The deadline passed before the work began.
    DeadlineExceeded,
    /// The caller went away.
    Cancelled,
    /// The daemon drains and takes no new work.
    ShuttingDown,
    /// A page failed its checksum, version or shape test.
    CorruptPage,
    /// The device failed; its lane is closed.
    DeviceFailed,
    /// A defect in kvd.
    Internal,
}

impl ErrorCode {
    /// Every code, in declaration order.
    pub const ALL: [Self; 29] = [
        Self::InvalidArgument,
        Self::ShapeMismatch,
        Self::NonFinite,
        Self::InvalidCodec,
        Self::InvalidCalibration,
        Self::UnknownModel,
        Self::UnknownSequence,
        Self::UnknownSession,
        Self::UnknownLease,
        Self::NamespaceDenied,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::RangeGap,
        Self::RangeOverlap,
        Self::RangeConflict,
        Self::RangeNotStored,
        Self::SequenceBusy,
        Self::ModelInUse,
        Self::PoolFull,
        Self::QueueFull,
        Self::LimitExceeded,
        Self::QuotaExceeded,
        Self::MessageTooLarge,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::ShuttingDown,
        Self::CorruptPage,
        Self::DeviceFailed,
        Self::Internal,
    ];

    /// Name on the wire and in metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::ShapeMismatch => "SHAPE_MISMATCH",
            Self::NonFinite => "NON_FINITE",
            Self::InvalidCodec => "INVALID_CODEC",
            Self::InvalidCalibration => "INVALID_CALIBRATION",
            Self::UnknownModel => "UNKNOWN_MODEL",
            Self::UnknownSequence => "UNKNOWN_SEQUENCE",
            Self::UnknownSession => "UNKNOWN_SESSION",
            Self::UnknownLease => "UNKNOWN_LEASE",
            Self::NamespaceDenied => "NAMESPACE_DENIED",
            Self::Unauthenticated => "UNAUTHENTICATED",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::RangeGap => "RANGE_GAP",
            Self::RangeOverlap => "RANGE_OVERLAP",
            Self::RangeConflict => "RANGE_CONFLICT",
            Self::RangeNotStored => "RANGE_NOT_STORED",
            Self::SequenceBusy => "SEQUENCE_BUSY",
            Self::ModelInUse => "MODEL_IN_USE",
            Self::PoolFull => "POOL_FULL",
            Self::QueueFull => "QUEUE_FULL",
            Self::LimitExceeded => "LIMIT_EXCEEDED",
            Self::QuotaExceeded => "QUOTA_EXCEEDED",
            Self::MessageTooLarge => "MESSAGE_TOO_LARGE",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::Cancelled => "CANCELLED",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::CorruptPage => "CORRUPT_PAGE",
            Self::DeviceFailed => "DEVICE_FAILED",
            Self::Internal => "INTERNAL",
        }
    }

    /// The code of that [`ErrorCode::name`].
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.name() == name)
    }

    /// Whether the same request may succeed later without a change by the caller. Of
    /// [`ErrorCode::QuotaExceeded`] each error says by its hint whether it may.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::SequenceBusy | Self::PoolFull | Self::QueueFull | Self::ShuttingDown)
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An error that knows its code: what every crate's error enum implements.
pub trait Coded: std::error::Error {
    /// The code callers branch on.
    fn code(&self) -> ErrorCode;

    /// When the same request may succeed, where the error knows better than its code.
    fn retry_hint(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_round_trip() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::from_name(code.name()), Some(code));
        }
        assert_eq!(ErrorCode::from_name("NOPE"), None);
    }
}
