//! Sessions: owners of sequences that live while a client holds them.

use crate::client::Client;
use crate::error::ClientError;
use kvd_core::{ErrorCode, ModelId, SequenceId, SessionId};
use kvd_proto::domain::{HoldTarget, SequenceFilter, SessionHold};
use kvd_proto::v1;
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tonic::Streaming;

/// Wait after the first attempt to hold a session again; it doubles up to [`WAIT_MAX`].
const WAIT_MIN: Duration = Duration::from_millis(20);
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Most time for one attempt.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);
/// Most time for the call that closes a dropped session.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// A session to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionOptions {
    /// For people: 1 to 128 characters of `a-z A-Z 0-9 . _ - /`. A namespace has one session of a
    /// name.
    pub name: String,
    /// How long the session goes on when its connection is lost; none. The daemon may grant less.
    pub ttl: Duration,
    /// Whether an older session of that name is closed first; else its name is refused.
    pub take_over: bool,
}

impl SessionOptions {
    /// A session of that name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ttl: Duration::ZERO, take_over: false }
    }

    /// With a time to live without its connection.
    #[must_use]
    pub fn with_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Closing an older session of that name first.
    #[must_use]
    pub fn with_take_over(mut self) -> Self {
        self.take_over = true;
        self
    }
}

/// The stream of a session that is held, and what was granted.
struct OpenHold {
    session: SessionId,
    ttl: Duration,
    stream: Streaming<v1::HoldSessionResponse>,
}

impl Client {
    /// Holds a new session. A task keeps it, and holds it again by itself when the connection
    /// breaks.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a name in use, `LIMIT_EXCEEDED`, or as every call.
    pub async fn hold_session(&self, options: SessionOptions) -> Result<HeldSession, ClientError> {
        let SessionOptions { name, ttl, take_over } = options;
        let target = HoldTarget::New { name, take_over };
        let OpenHold { session, ttl, stream } = self.open_hold(SessionHold { target, ttl }).await?;
        let (sender, end) = watch::channel(None);
        let (release, released) = oneshot::channel();
        let keeper = SessionKeeper { client: self.clone(), session, ttl, stream };
        tokio::spawn(keeper.keep_session(sender, released));
        Ok(HeldSession { client: self.clone(), session, ttl, end, _release: release })
    }

    /// Opens a stream that holds a session, and reads its answer.
    async fn open_hold(&self, hold: SessionHold) -> Result<OpenHold, ClientError> {
        // The deadline is one of the answer; the stream has none.
        let request = self.namespaced_request(v1::HoldSessionRequest::from(hold));
        let mut rpc = self.rpc.clone();
        self.within_deadline(async move {
            let mut stream = rpc.hold_session(request).await?.into_inner();
            let v1::HoldSessionResponse { session_id, ttl_ms } =
                stream.message().await?.ok_or_else(ended_early)?;
            let ttl = Duration::from_millis(ttl_ms.into());
            Ok(OpenHold { session: SessionId(session_id), ttl, stream })
        })
        .await
    }

    /// Ends a session, whoever holds it, and closes its sequences; how many these were.
    ///
    /// # Errors
    /// `UNKNOWN_SESSION`, or as every call.
    pub async fn close_session(&self, session: SessionId) -> Result<u64, ClientError> {
        let request = self.unary_request(v1::CloseSessionRequest { session_id: session.0 });
        let response = self.call_rpc(self.rpc.clone().close_session(request)).await?;
        Ok(response.sequences_closed)
    }

    /// The sessions of this namespace, the oldest first.
    ///
    /// # Errors
    /// As every call.
    pub async fn list_sessions(&self) -> Result<Vec<v1::SessionInfo>, ClientError> {
        let request = self.unary_request(v1::ListSessionsRequest {});
        Ok(self.call_rpc(self.rpc.clone().list_sessions(request)).await?.sessions)
    }

    /// Says what comes next for a sequence, and for which other one it works, in place of what was
    /// said before.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE` of either, or as every call.
    pub async fn hint_sequence(
        &self,
        sequence: SequenceId,
        phase: v1::SequencePhase,
        parent: Option<SequenceId>,
    ) -> Result<(), ClientError> {
        let request = self.unary_request(v1::HintSequenceRequest {
            sequence_id: sequence.0,
            phase: phase.into(),
            parent_sequence_id: parent.map_or(0, |parent| parent.0),
        });
        self.call_rpc(self.rpc.clone().hint_sequence(request)).await.map(drop)
    }

    /// A page of the sequences of this namespace, in the order of their ids. `next_after_id` of it
    /// is [`SequenceFilter::after`] of the next; 0 where this was the last.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `UNKNOWN_SESSION` of what the filter names, or as every call.
    pub async fn list_sequences(
        &self,
        filter: SequenceFilter,
    ) -> Result<v1::ListSequencesResponse, ClientError> {
        let request = self.unary_request(v1::ListSequencesRequest::from(filter));
        self.call_rpc(self.rpc.clone().list_sequences(request)).await
    }

    /// Opens an empty sequence that a session owns.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `UNKNOWN_SESSION`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn open_sequence_in(
        &self,
        model: ModelId,
        session: SessionId,
    ) -> Result<SequenceId, ClientError> {
        let (model_id, session_id) = (model.0, session.0);
        let message = v1::OpenSequenceRequest { model_id, session_id, ..Default::default() };
        let request = self.unary_request(message);
        let response = self.call_rpc(self.rpc.clone().open_sequence(request)).await?;
        Ok(SequenceId(response.sequence_id))
    }

    /// Closes a sequence that no call has named for so long, at least a millisecond.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`; `SEQUENCE_BUSY` for one that was used since or that somebody appends
    /// to; or as every call.
    pub async fn close_idle_sequence(
        &self,
        sequence: SequenceId,
        idle_min: Duration,
    ) -> Result<(), ClientError> {
        // 0 would close it in any case.
        let idle_ms_min = u64::try_from(idle_min.as_millis()).unwrap_or(u64::MAX).max(1);
        let sequence_id = sequence.0;
        let message = v1::CloseSequenceRequest { sequence_id, idle_ms_min, ..Default::default() };
        let request = self.unary_request(message);
        self.call_rpc(self.rpc.clone().close_sequence(request)).await.map(drop)
    }
}

fn ended_early() -> ClientError {
    ClientError::lost_connection("the stream of the session ended".to_owned())
}

/// A session that this client holds.
///
/// When the connection breaks it is held again within its time to live, and its sequences stay.
/// Dropping it closes the session and its sequences: best effort, by a task of the runtime, as the
/// daemon does by itself when the connection goes. [`HeldSession::close_session`] waits for that.
#[derive(Debug)]
pub struct HeldSession {
    client: Client,
    session: SessionId,
    ttl: Duration,
    end: watch::Receiver<Option<ClientError>>,
    /// Its drop tells the keeper.
    _release: oneshot::Sender<()>,
}

impl HeldSession {
    /// The session's id.
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.session
    }

    /// How long the session goes on without a connection, as the daemon granted it.
    #[must_use]
    pub fn granted_ttl(&self) -> Duration {
        self.ttl
    }

    /// Opens an empty sequence that this session owns.
    ///
    /// # Errors
    /// The error that ended the session, where it has ended: [`ClientError::restarted`] says
    /// whether that was a restart of the daemon. Else as [`Client::open_sequence`].
    pub async fn open_sequence(&self, model: ModelId) -> Result<SequenceId, ClientError> {
        let Some(error) = self.end_error() else {
            return self.client.open_sequence_in(model, self.session).await;
        };
        if error.restarted.is_some() {
            return Err(error);
        }
        // Given up here, whatever the daemon still has of it; and it says whether it is the same.
        let answer = self.client.close_session(self.session).await;
        Err(answer.err().filter(|answer| answer.restarted.is_some()).unwrap_or(error))
    }

    /// Why the session has ended: `UNKNOWN_SESSION` where it was closed by another, lost, or of a
    /// daemon that was restarted. `None` while it is held.
    #[must_use]
    pub fn end_error(&self) -> Option<ClientError> {
        self.end.borrow().clone()
    }

    /// Returns when the session ends, with why.
    pub async fn wait_for_end(&self) -> ClientError {
        let mut end = self.end.clone();
        let error = end.wait_for(Option::is_some).await.ok().and_then(|error| error.clone());
        // A runtime that ends drops the keeper.
        error.unwrap_or_else(ended_early)
    }

    /// Closes the session and its sequences; how many these were.
    ///
    /// # Errors
    /// `UNKNOWN_SESSION` where it has ended before, or as every call.
    pub async fn close_session(self) -> Result<u64, ClientError> {
        self.client.close_session(self.session).await
    }
}

/// Keeps the stream of a session, and opens it again when it breaks.
struct SessionKeeper {
    client: Client,
    session: SessionId,
    ttl: Duration,
    stream: Streaming<v1::HoldSessionResponse>,
}

impl SessionKeeper {
    /// Runs until the session ends or its owner drops it, and then closes it.
    async fn keep_session(
        mut self,
        end: watch::Sender<Option<ClientError>>,
        released: oneshot::Receiver<()>,
    ) {
        tokio::select! {
            biased;
            error = self.hold_until_lost() => {
                end.send_replace(Some(error));
                return;
            }
            _ = released => {}
        }
        let close = self.client.close_session(self.session);
        // Where this fails the daemon ends the session when the stream is gone.
        let _ = tokio::time::timeout(CLOSE_TIME, close).await;
    }

    async fn hold_until_lost(&mut self) -> ClientError {
        loop {
            let lost = match self.stream.message().await {
                Ok(Some(_)) => continue,
                Ok(None) => ended_early(),
                Err(status) => status.into(),
            };
            if let Err(error) = self.hold_again(lost).await {
                return error;
            }
        }
    }

    /// Opens the stream again, or says why the session is lost.
    async fn hold_again(&mut self, lost: ClientError) -> Result<(), ClientError> {
        if lost.code == Some(ErrorCode::UnknownSession) {
            return Err(lost);
        }
        let (end, mut wait) = (Instant::now() + self.ttl, WAIT_MIN);
        loop {
            let hold = SessionHold { target: HoldTarget::Again(self.session), ttl: self.ttl };
            let attempt = tokio::time::timeout(ATTEMPT_TIME, self.client.open_hold(hold)).await;
            let error = match attempt {
                Ok(Ok(held)) => {
                    self.stream = held.stream;
                    return Ok(());
                }
                Ok(Err(error)) if error.code == Some(ErrorCode::UnknownSession) => {
                    return Err(error);
                }
                // A connection that breaks has many codes; the next attempt makes a new one.
                Ok(Err(error)) => error,
                Err(_) => ClientError::deadline_exceeded(ATTEMPT_TIME),
            };
            if Instant::now() + wait >= end {
                let (session, ttl) = (self.session, self.ttl);
                let text = format!("session {session} was not held again within {ttl:?}: {error}");
                return Err(ClientError::new(ErrorCode::UnknownSession, text));
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(WAIT_MAX);
        }
    }
}
