//! Why the store refuses, with the numbers needed to act. Values only, no locks.

use crate::cache::KeyError;
use crate::pool::{PoolFull, ReserveError, SlotsUsedUp};
use crate::quota::QuotaExceeded;
use kvd_core::{
    Coded, ErrorCode, GeometryError, IdsExhausted, LayerIndex, LeaseId, SequenceId, SessionId,
};
use std::time::Duration;

/// A refused call; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No such sequence, or one of another namespace.
    #[error("sequence {id} is unknown in this namespace; it was never opened or is closed")]
    UnknownSequence {
        /// The id asked for.
        id: SequenceId,
    },
    /// The model's geometry is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The model has fewer layers.
    #[error("layer {layer} is out of range: the model has {layers} layers, counted from 0")]
    LayerOutOfRange {
        /// The layer asked for.
        layer: LayerIndex,
        /// Layers of the model.
        layers: u32,
    },
    /// An append without tokens, or a range that ends before it starts.
    #[error("range {start}..{end} is not a range of tokens")]
    InvalidRange {
        /// First token.
        start: u32,
        /// One past the last token.
        end: u32,
    },
    /// A named limit of the store was reached.
    #[error("{limit} is {max}, {asked} asked for")]
    LimitExceeded {
        /// Name of the limit.
        limit: &'static str,
        /// Its value.
        max: u64,
        /// The amount that the call would have needed.
        asked: u64,
    },
    /// An append begins after the end of the layer.
    #[error("range starts at token {start}, the layer ends at {expected}: store {expected} first")]
    RangeGap {
        /// Where the next append must start: the layer's length.
        expected: u32,
        /// Where it started.
        start: u32,
    },
    /// An append overlaps stored tokens and is not the repetition of a recent one.
    #[error(
        "range of {tokens} tokens at {start} overlaps what is stored; the layer ends at {length}: \
         truncate to {start} first or append at {length}"
    )]
    RangeOverlap {
        /// First token of the range.
        start: u32,
        /// Tokens of the range.
        tokens: u32,
        /// Length of the layer.
        length: u32,
    },
    /// That range was stored before, with other content.
    #[error("range of {tokens} tokens at {start} was stored before with other content")]
    RangeConflict {
        /// First token of the range.
        start: u32,
        /// Tokens of the range.
        tokens: u32,
    },
    /// A read, fork or truncation reaches past what is stored.
    #[error("{asked} tokens asked for, {stored} stored")]
    RangeNotStored {
        /// Tokens that would have to be there.
        asked: u32,
        /// Tokens that are (on the layer, or on every layer).
        stored: u32,
    },
    /// An append to this layer of this sequence is in flight.
    #[error(
        "an append to layer {layer} of sequence {id} is in flight: wait for its answer, then try \
         again"
    )]
    SequenceBusy {
        /// The sequence.
        id: SequenceId,
        /// The layer being appended to.
        layer: LayerIndex,
    },
    /// A sequence that was to be closed only if idle was named by a call meanwhile.
    #[error(
        "sequence {id} was used {} ms ago, and is to be closed after {} ms without use",
        idle.as_millis(),
        idle_min.as_millis()
    )]
    NotIdle {
        /// The sequence.
        id: SequenceId,
        /// Since a call named it.
        idle: Duration,
        /// How long it was to be idle.
        idle_min: Duration,
    },
    /// The session that was to own the sequence has ended.
    #[error("session {id} has ended, and its sequences are closed; hold a new one")]
    SessionEnded {
        /// The session.
        id: SessionId,
    },
    /// No such lease, or one of another namespace.
    #[error("lease {id} is unknown in this namespace; it has ended: match the keys again")]
    UnknownLease {
        /// The id asked for.
        id: LeaseId,
    },
    /// A layer of a prefix that comes back from disk has not come yet.
    #[error("layer {layer} of the prefix of sequence {id} is on its way from disk; try again soon")]
    LayerOnItsWay {
        /// The sequence.
        id: SequenceId,
        /// The last layer that was asked for.
        layer: u32,
    },
    /// The rest of a prefix did not come back from disk.
    #[error(
        "the prefix of sequence {id} came back on its first {layers} layers alone ({reason}); \
         close the sequence, open another on the prefix, and store what it lacks"
    )]
    PrefixLost {
        /// The sequence.
        id: SequenceId,
        /// Layers that came.
        layers: u32,
        /// Why the others did not, as the label `reason` of `kvd_import_refused_total`.
        reason: &'static str,
    },
    /// Keys that cannot be read.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// A publish that does not follow what the sequence has published.
    #[error(
        "keys begin at token {start}, the sequence has published {published}: begin at a page of \
         {block_tokens} tokens, at most there"
    )]
    PublishGap {
        /// First token of the keys.
        start: u32,
        /// Tokens that were published or attached.
        published: u32,
        /// Tokens of a page.
        block_tokens: u32,
    },
    /// No id is left for another sequence.
    #[error(transparent)]
    IdsExhausted(#[from] IdsExhausted),
    /// Page memory is used up.
    #[error(transparent)]
    PoolFull(#[from] PoolFull),
    /// Page memory has as many extents as it may.
    #[error(transparent)]
    SlotsUsedUp(#[from] SlotsUsedUp),
    /// The namespace has as much as it may.
    #[error(transparent)]
    Quota(#[from] QuotaExceeded),
}

impl From<ReserveError> for StoreError {
    fn from(error: ReserveError) -> Self {
        match error {
            ReserveError::PoolFull(full) => Self::PoolFull(full),
            ReserveError::SlotsUsedUp(used_up) => Self::SlotsUsedUp(used_up),
            ReserveError::Quota(exceeded) => Self::Quota(exceeded),
        }
    }
}

impl Coded for StoreError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownSequence { .. } => ErrorCode::UnknownSequence,
            Self::Geometry(_)
            | Self::LayerOutOfRange { .. }
            | Self::InvalidRange { .. }
            | Self::Keys(_) => ErrorCode::InvalidArgument,
            Self::LimitExceeded { .. } => ErrorCode::LimitExceeded,
            Self::RangeGap { .. } => ErrorCode::RangeGap,
            Self::RangeOverlap { .. } => ErrorCode::RangeOverlap,
            Self::RangeConflict { .. } => ErrorCode::RangeConflict,
            // To who reads, what did not come back is not there.
            Self::RangeNotStored { .. } | Self::PrefixLost { .. } => ErrorCode::RangeNotStored,
            Self::SequenceBusy { .. } | Self::NotIdle { .. } | Self::LayerOnItsWay { .. } => {
                ErrorCode::SequenceBusy
            }
            Self::SessionEnded { .. } => ErrorCode::UnknownSession,
            Self::UnknownLease { .. } => ErrorCode::UnknownLease,
            Self::PublishGap { .. } => ErrorCode::RangeGap,
            Self::IdsExhausted(error) => error.code(),
            Self::PoolFull(_) | Self::SlotsUsedUp(_) => ErrorCode::PoolFull,
            Self::Quota(error) => error.code(),
        }
    }

    fn retry_hint(&self) -> Option<Duration> {
        match self {
            Self::Quota(error) => error.retry_hint(),
            _ => None,
        }
    }
}
