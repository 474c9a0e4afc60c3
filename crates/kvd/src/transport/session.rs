//! Sessions on the wire: the stream that holds one, and lists.

use super::call::wire_status;
use super::connection::{self, ServerPhase};
use super::stream::{ReplyStream, StreamState, shutting_down};
use crate::metrics::OpenCount;
use crate::service::{SequencePage, ServiceError, SessionDescription, SessionLease};
use futures_core::Stream;
use kvd_core::{ErrorCode, SequenceId};
use kvd_proto::v1;
use kvd_store::{SequenceHint, SequencePhase, SequenceSummary};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::Status;

/// One answer, and then nothing until the session or the daemon ends. Its drop, which is also that
/// of its connection, lets go of the session.
struct HoldStream {
    answer: Option<v1::HoldSessionResponse>,
    /// `None` once it has been told.
    end: Option<Pin<Box<dyn Future<Output = Status> + Send>>>,
    _lease: SessionLease,
    _open: OpenCount,
}

/// The stream that holds a session by its lease.
pub(super) fn hold_stream(
    lease: SessionLease,
    streams: &StreamState,
) -> ReplyStream<v1::HoldSessionResponse> {
    let session = lease.session_id();
    let ttl_ms = u32::try_from(lease.granted_ttl().as_millis()).unwrap_or(u32::MAX);
    let (ended, phase) = (lease.wait_for_end(), streams.phase.clone());
    let end = async move {
        tokio::select! {
            biased;
            why = ended => wire_status(&why.stream_error(session)),
            () = ServerPhase::Draining.wait_until(phase) => shutting_down(),
        }
    };
    Box::pin(HoldStream {
        answer: Some(v1::HoldSessionResponse { session_id: session.0, ttl_ms }),
        end: Some(Box::pin(end)),
        _lease: lease,
        _open: OpenCount::new(&streams.holds),
    })
}

impl Stream for HoldStream {
    type Item = Result<v1::HoldSessionResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if let Some(answer) = this.answer.take() {
            return Poll::Ready(Some(Ok(answer)));
        }
        let Some(end) = &mut this.end else { return Poll::Ready(None) };
        let ended = end.as_mut().poll(context);
        ended.map(|status| {
            this.end = None;
            Some(Err(status))
        })
    }
}

/// Where a request came from, for people: an address, or the process at a Unix socket.
pub(super) fn peer_name(extensions: &http::Extensions) -> String {
    connection::owner_of(extensions).map_or_else(String::new, |owner| owner.call_peer().to_string())
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The answer to `ListSessions`.
pub(super) fn session_list(sessions: Vec<SessionDescription>) -> v1::ListSessionsResponse {
    let describe = |session: SessionDescription| v1::SessionInfo {
        session_id: session.id.0,
        name: session.name,
        age_ms: whole_ms(session.age),
        holders: session.holders,
        ends_in_ms: session.ends_in.map(whole_ms),
        ttl_ms: u32::try_from(session.ttl.as_millis()).unwrap_or(u32::MAX),
        sequences: session.sequences,
        peer: session.peer,
    };
    v1::ListSessionsResponse { sessions: sessions.into_iter().map(describe).collect() }
}

fn wire_phase(phase: SequencePhase) -> v1::SequencePhase {
    match phase {
        SequencePhase::Unknown => v1::SequencePhase::Unspecified,
        SequencePhase::EndOfTurn => v1::SequencePhase::EndOfTurn,
        SequencePhase::Done => v1::SequencePhase::Done,
    }
}

/// Reads the hint of a `HintSequence`.
pub(super) fn read_hint(message: v1::HintSequenceRequest) -> Result<SequenceHint, ServiceError> {
    let phase = match v1::SequencePhase::try_from(message.phase) {
        Ok(v1::SequencePhase::Unspecified) => SequencePhase::Unknown,
        Ok(v1::SequencePhase::EndOfTurn) => SequencePhase::EndOfTurn,
        Ok(v1::SequencePhase::Done) => SequencePhase::Done,
        Err(_) => {
            let reason = format!("phase: {} is no SequencePhase", message.phase);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, reason));
        }
    };
    let parent = message.parent_sequence_id;
    Ok(SequenceHint { phase, parent: (parent != 0).then_some(SequenceId(parent)) })
}

/// The answer to `ListSequences`.
pub(super) fn sequence_page(page: SequencePage) -> v1::ListSequencesResponse {
    let describe = |sequence: SequenceSummary| v1::SequenceInfo {
        sequence_id: sequence.id.0,
        model_id: sequence.model.0,
        session_id: sequence.session.map_or(0, |session| session.0),
        length: sequence.length,
        age_ms: whole_ms(sequence.age),
        idle_ms: whole_ms(sequence.idle),
        stored: Some(sequence.stored.into()),
        phase: wire_phase(sequence.hint.phase).into(),
        parent_sequence_id: sequence.hint.parent.map_or(0, |parent| parent.0),
    };
    v1::ListSequencesResponse {
        sequences: page.sequences.into_iter().map(describe).collect(),
        next_after_id: page.next_after.map_or(0, |after| after.0),
    }
}
