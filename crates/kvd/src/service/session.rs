//! Sessions: hold, end, list; and the sequences that they own.

use super::session_table::{
    BegunSession, EndedSession, HoldRequest, SessionDescription, SessionEnd, SessionLease,
};
use super::{CallContext, Service, ServiceError};
use crate::metrics::{Metric, Metrics};
use kvd_core::{ErrorCode, ModelId, Namespace, SequenceId, SessionId};
use kvd_proto::domain::{HoldTarget, SequenceFilter, SessionHold};
use kvd_store::{SequenceQuery, SequenceSummary, StoreError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A page of a list of sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePage {
    /// In the order of their ids.
    pub sequences: Vec<SequenceSummary>,
    /// After which id the next page begins; none where this was the last.
    pub next_after: Option<SequenceId>,
}

/// Makes the metrics of sessions known before there is any.
pub(super) fn describe_sessions(metrics: &Metrics) {
    metrics.gauge(Metric::Sessions, &[]).set(0.0);
    for end in SessionEnd::ALL {
        metrics.counter(Metric::SessionEndsTotal, &[("reason", end.reason_label())]).increment(0);
    }
    metrics.counter(Metric::SessionSequencesClosedTotal, &[]).increment(0);
}

impl Service {
    /// Holds a session, a new one or one that was begun before, until the lease is dropped. Of a
    /// session that is taken over all sequences are closed when this returns.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a name in use, `LIMIT_EXCEEDED`, or `UNKNOWN_SESSION` for one to
    /// hold again.
    pub async fn hold_session(
        self: &Arc<Self>,
        call: &CallContext,
        hold: SessionHold,
        peer: String,
    ) -> Result<SessionLease, ServiceError> {
        self.admit_call(call)?;
        let SessionHold { target, ttl } = hold;
        let holder = HoldRequest { namespace: &call.namespace, ttl, peer, now: Instant::now() };
        match target {
            HoldTarget::Again(id) => self.sessions.hold_again(holder, id),
            HoldTarget::New { name, take_over } => {
                let begun = self.sessions.begin_session(holder, name, take_over)?;
                let BegunSession { lease, replaced } = begun;
                if let Some(ended) = replaced {
                    self.finish_session(ended).await?;
                }
                Ok(lease)
            }
        }
    }

    /// Ends a session, whoever holds it, and closes its sequences; how many these were.
    ///
    /// # Errors
    /// `UNKNOWN_SESSION`.
    pub async fn close_session(
        self: &Arc<Self>,
        call: &CallContext,
        id: SessionId,
    ) -> Result<u64, ServiceError> {
        // Also while draining: giving back is never refused.
        self.check_namespace(&call.namespace)?;
        let ended = self.sessions.close_session(&call.namespace, id)?;
        self.finish_session(ended).await
    }

    /// The sessions of the caller's namespace, the oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn list_sessions(
        &self,
        call: &CallContext,
    ) -> Result<Vec<SessionDescription>, ServiceError> {
        self.admit_call(call)?;
        Ok(self.sessions.list_sessions(&call.namespace, Instant::now()))
    }

    /// A page of the sequences of the caller's namespace.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `UNKNOWN_SESSION` of what the filter names.
    pub async fn list_sequences(
        self: &Arc<Self>,
        call: &CallContext,
        filter: SequenceFilter,
    ) -> Result<SequencePage, ServiceError> {
        self.admit_call(call)?;
        if let Some(model) = filter.model {
            self.models.find_model(&call.namespace, model)?;
        }
        if let Some(session) = filter.session {
            self.sessions.find_session(&call.namespace, session, Instant::now())?;
        }
        // Ids of another boot sort anywhere: the page would leave out a part without a word.
        if let Some(stale) = filter.after.and_then(|after| self.stale_sequence(after)) {
            return Err(stale);
        }
        let (service, namespace) = (self.clone(), call.namespace.clone());
        run_aside(move || service.list_page(&namespace, &filter)).await
    }

    /// A page of the sequences of a namespace.
    pub(super) fn list_page(&self, namespace: &Namespace, filter: &SequenceFilter) -> SequencePage {
        let SequenceFilter { model, session, idle_min, after, limit } = *filter;
        let query = SequenceQuery { namespace, model, session, idle_min, after };
        let stores = self.shards.iter().map(|shard| &shard.store);
        let mut ids: Vec<_> = stores.flat_map(|store| store.find_sequences(&query)).collect();
        let limit = limit as usize;
        let is_last = ids.len() <= limit;
        if !is_last {
            ids.select_nth_unstable(limit);
            ids.truncate(limit);
        }
        ids.sort_unstable();
        let next_after = ids.last().copied().filter(|_| !is_last);
        let summarize =
            |id: SequenceId| self.shard_of(id).ok()?.store.summarize_sequence(namespace, id);
        SequencePage { sequences: ids.into_iter().filter_map(summarize).collect(), next_after }
    }

    /// A new, empty sequence, which a session owns if one is named.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `UNKNOWN_SESSION` or `LIMIT_EXCEEDED`.
    pub fn open_sequence_in(
        &self,
        call: &CallContext,
        model: ModelId,
        session: Option<SessionId>,
    ) -> Result<SequenceId, ServiceError> {
        self.admit_call(call)?;
        let find = |id| self.sessions.find_session(&call.namespace, id, Instant::now());
        let session = session.map(find).transpose()?;
        self.models.open_sequence_by(&call.namespace, model, |found| {
            let (store, shape) = (&self.shards[found.shard].store, found.shape.clone());
            match &session {
                None => store.open_sequence(shape),
                Some(session) => store.open_in_session(shape, session),
            }
        })
    }

    /// Closes a sequence that no call has named for so long.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, or `SEQUENCE_BUSY` for one that was used since or that somebody appends
    /// to.
    pub fn close_idle_sequence(
        &self,
        call: &CallContext,
        id: SequenceId,
        idle_min: Duration,
    ) -> Result<(), ServiceError> {
        self.check_namespace(&call.namespace)?;
        self.shard_of(id)?.store.close_idle(&call.namespace, id, idle_min).map_err(|error| {
            let wait = match &error {
                StoreError::NotIdle { idle, idle_min, .. } => Some(*idle_min - *idle),
                _ => None,
            };
            let error = ServiceError::from(error);
            match wait {
                Some(wait) => error.retry_after(wait),
                None => error,
            }
        })
    }

    /// Ends sessions whose time has come, for as long as it is polled.
    pub(crate) async fn end_due_sessions(self: Arc<Self>) {
        loop {
            let released = self.sessions.wait_for_release();
            match self.sessions.next_end() {
                None => released.await,
                Some(at) => {
                    let _ = tokio::time::timeout_at(at.into(), released).await;
                }
            }
            for ended in self.sessions.end_due(Instant::now()) {
                // The next is not kept waiting by one with many sequences.
                drop(self.spawn_finish(ended));
            }
        }
    }

    /// Closes the sequences of an ended session, which goes on when the caller leaves.
    async fn finish_session(self: &Arc<Self>, ended: EndedSession) -> Result<u64, ServiceError> {
        self.spawn_finish(ended).await
    }

    fn spawn_finish(
        self: &Arc<Self>,
        ended: EndedSession,
    ) -> impl Future<Output = Result<u64, ServiceError>> + use<> {
        let service = self.clone();
        run_aside(move || service.close_sequences_of(&ended))
    }

    fn close_sequences_of(&self, ended: &EndedSession) -> u64 {
        let EndedSession { id: session, namespace, name, end, sequences } = ended;
        let close = |id: &SequenceId| {
            self.shard_of(*id).is_ok_and(|shard| shard.store.close_sequence(namespace, *id).is_ok())
        };
        let closed = sequences.end_session().iter().filter(|id| close(id)).count() as u64;
        let (session, reason) = (session.0, end.reason_label());
        self.metrics.counter(Metric::SessionEndsTotal, &[("reason", reason)]).increment(1);
        self.metrics.counter(Metric::SessionSequencesClosedTotal, &[]).increment(closed);
        if *end == SessionEnd::Closed {
            tracing::debug!(session, name, %namespace, closed, "a session was closed");
        } else {
            tracing::info!(session, name, %namespace, closed, reason, "a session ended");
        }
        closed
    }
}

/// Runs what may take long off the threads that answer requests. It begins at once, and goes on
/// when the caller leaves.
fn run_aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, ServiceError>> {
    let running = tokio::task::spawn_blocking(work);
    async {
        running.await.map_err(|error| {
            ServiceError::new(ErrorCode::Internal, format!("the work ended early: {error}"))
        })
    }
}
