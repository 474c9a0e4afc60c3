//! Forking and truncating sequences. Every value of these messages can be meant, so nothing here
//! fails; whether the tokens exist is for the store to say.

use super::session_from_wire;
use crate::v1;
use kvd_core::{SequenceId, SessionId};

/// A fork to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceFork {
    /// The parent.
    pub sequence: SequenceId,
    /// Tokens to share; `None` shares all that are stored on every layer.
    pub length: Option<u32>,
    /// The session that owns the child; `None` leaves it to the parent's.
    pub session: Option<SessionId>,
}

impl From<v1::ForkSequenceRequest> for SequenceFork {
    fn from(request: v1::ForkSequenceRequest) -> Self {
        Self {
            sequence: SequenceId(request.sequence_id),
            length: request.length,
            session: session_from_wire(request.session_id),
        }
    }
}

impl From<SequenceFork> for v1::ForkSequenceRequest {
    fn from(fork: SequenceFork) -> Self {
        let session_id = fork.session.map_or(0, |session| session.0);
        Self { sequence_id: fork.sequence.0, length: fork.length, session_id }
    }
}

/// A fork that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkedSequence {
    /// The child.
    pub sequence: SequenceId,
    /// Tokens it shares with its parent.
    pub length: u32,
}

impl From<v1::ForkSequenceResponse> for ForkedSequence {
    fn from(response: v1::ForkSequenceResponse) -> Self {
        Self { sequence: SequenceId(response.sequence_id), length: response.length }
    }
}

impl From<ForkedSequence> for v1::ForkSequenceResponse {
    fn from(forked: ForkedSequence) -> Self {
        Self { sequence_id: forked.sequence.0, length: forked.length }
    }
}

/// A truncation to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTruncation {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens to keep.
    pub length: u32,
}

impl From<v1::TruncateSequenceRequest> for SequenceTruncation {
    fn from(request: v1::TruncateSequenceRequest) -> Self {
        Self { sequence: SequenceId(request.sequence_id), length: request.length }
    }
}

impl From<SequenceTruncation> for v1::TruncateSequenceRequest {
    fn from(truncation: SequenceTruncation) -> Self {
        Self { sequence_id: truncation.sequence.0, length: truncation.length }
    }
}
