//! Sessions: who holds each, and until when it goes on without a holder.
//!
//! Owns [`SessionTable`]. One mutex: holds and ends are rare, look-ups short; no other lock is
//! taken under it. Nothing here waits or closes a sequence, and whoever calls says what time it
//! is: an [`EndedSession`] is passed on to be closed, a [`SessionLease`] is what a stream keeps.

use super::{ServiceError, ids};
use kvd_core::{ErrorCode, IdCounter, IdSpace, Namespace, SessionId};
use kvd_store::{QuotaKind, QuotaTable, SessionSequences};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionEnd {
    /// Somebody closed it.
    Closed,
    /// Nobody held it for its time to live.
    Expired,
    /// A new one of its name took over.
    TakenOver,
}

impl SessionEnd {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [Self::Closed, Self::Expired, Self::TakenOver];

    /// Label of metrics.
    pub(super) fn reason_label(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Expired => "expired",
            Self::TakenOver => "taken_over",
        }
    }

    /// The error of a stream that held the session.
    pub(crate) fn stream_error(self, session: SessionId) -> ServiceError {
        let how = match self {
            Self::Closed => "was closed",
            Self::Expired => "has ended",
            Self::TakenOver => "was closed by a newer session of its name",
        };
        let message = format!("session {session} {how}, and its sequences are closed");
        ServiceError::new(ErrorCode::UnknownSession, message)
    }
}

/// A session that is no more, but for its sequences.
pub(super) struct EndedSession {
    pub(super) id: SessionId,
    pub(super) namespace: Namespace,
    pub(super) name: String,
    pub(super) end: SessionEnd,
    pub(super) sequences: Arc<SessionSequences>,
}

/// One session of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionDescription {
    /// The session.
    pub id: SessionId,
    /// Its name, unique in its namespace.
    pub name: String,
    /// Since it was begun.
    pub age: Duration,
    /// Streams that hold it.
    pub holders: u32,
    /// Until it ends; none while a stream holds it.
    pub ends_in: Option<Duration>,
    /// How long it goes on without a holder.
    pub ttl: Duration,
    /// Open sequences of it.
    pub sequences: u64,
    /// Where the latest holder came from.
    pub peer: String,
}

/// Named limits of sessions.
#[derive(Clone, Debug)]
pub(super) struct SessionLimits {
    pub(super) sessions_max: usize,
    pub(super) ttl_max: Duration,
    /// Sessions of single namespaces.
    pub(super) quotas: Arc<QuotaTable>,
}

/// A stream that asks to hold a session.
pub(super) struct HoldRequest<'a> {
    pub(super) namespace: &'a Namespace,
    /// As it was asked for.
    pub(super) ttl: Duration,
    pub(super) peer: String,
    pub(super) now: Instant,
}

/// A session that was begun, and the older one of its name that is to be closed first.
pub(super) struct BegunSession {
    pub(super) lease: SessionLease,
    pub(super) replaced: Option<EndedSession>,
}

/// The right of a stream to hold a session. Dropping it is letting go.
pub struct SessionLease {
    table: Arc<SessionTable>,
    id: SessionId,
    ttl: Duration,
    end: watch::Receiver<Option<SessionEnd>>,
}

impl SessionLease {
    /// The session.
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.id
    }

    /// How long it goes on without a holder, as granted.
    #[must_use]
    pub fn granted_ttl(&self) -> Duration {
        self.ttl
    }

    /// Whether the session has ended under its holder.
    pub(crate) fn has_ended(&self) -> bool {
        self.end.borrow().is_some() || self.end.has_changed().is_err()
    }

    /// Returns when the session ends under its holder.
    pub(crate) fn wait_for_end(&self) -> impl Future<Output = SessionEnd> + Send + use<> {
        let mut end = self.end.clone();
        async move {
            // The sender goes with the session, and says why before.
            let why = end.wait_for(Option::is_some).await.ok().and_then(|why| *why);
            why.unwrap_or(SessionEnd::Closed)
        }
    }
}

impl Drop for SessionLease {
    fn drop(&mut self) {
        self.table.release_hold(self.id, Instant::now());
    }
}

struct SessionEntry {
    namespace: Namespace,
    name: String,
    begun: Instant,
    ttl: Duration,
    holders: u32,
    /// When it ends; none while it is held.
    ends: Option<Instant>,
    peer: String,
    sequences: Arc<SessionSequences>,
    end: watch::Sender<Option<SessionEnd>>,
}

impl SessionEntry {
    fn is_due(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| ends <= now)
    }

    /// How a session is held, for people who want its name.
    fn describe_hold(&self, now: Instant) -> String {
        match self.ends {
            None => format!("held by {}", self.peer),
            Some(ends) => {
                let left = ends.saturating_duration_since(now);
                format!("not held, ends in {} ms", left.as_millis())
            }
        }
    }

    fn end_by(self, id: SessionId, end: SessionEnd) -> EndedSession {
        self.end.send_replace(Some(end));
        let Self { namespace, name, sequences, .. } = self;
        EndedSession { id, namespace, name, end, sequences }
    }
}

/// All sessions.
pub(super) struct SessionTable {
    limits: SessionLimits,
    space: Arc<IdSpace>,
    ids: IdCounter<SessionId>,
    entries: Mutex<BTreeMap<SessionId, SessionEntry>>,
    /// Told when a session lost its last holder: the next end may be nearer.
    released: Notify,
}

impl SessionTable {
    pub(super) fn new(limits: SessionLimits, space: Arc<IdSpace>) -> Arc<Self> {
        let (ids, entries) = (space.session_counter(), Mutex::default());
        Arc::new(Self { limits, space, ids, entries, released: Notify::new() })
    }

    /// Begins a session, which the lease holds.
    pub(super) fn begin_session(
        self: &Arc<Self>,
        holder: HoldRequest<'_>,
        name: String,
        take_over: bool,
    ) -> Result<BegunSession, ServiceError> {
        let HoldRequest { namespace, now, .. } = holder;
        let mut entries = self.entries.lock();
        let named = |entry: &SessionEntry| entry.namespace == *namespace && entry.name == name;
        let older = entries.iter().find(|(_, entry)| named(entry)).map(|(id, _)| *id);
        let end = match older.map(|id| (id, &entries[&id])) {
            Some((_, entry)) if entry.is_due(now) => SessionEnd::Expired,
            Some((id, entry)) if !take_over => {
                return Err(name_in_use(id, entry, now));
            }
            _ => SessionEnd::TakenOver,
        };
        let max = self.limits.sessions_max;
        if entries.len() - usize::from(older.is_some()) >= max {
            let message = format!("{max} sessions are open (limits.sessions_max)");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        if let Some(account) = self.limits.quotas.find_account(namespace) {
            let own = entries.values().filter(|entry| entry.namespace == *namespace).count();
            let own = own - usize::from(older.is_some());
            account.check_room(QuotaKind::Sessions, own as u64, 1)?;
        }
        let id = self.ids.next()?;
        let replaced = older.and_then(|id| Some(entries.remove(&id)?.end_by(id, end)));
        let entry = SessionEntry {
            namespace: namespace.clone(),
            name,
            begun: now,
            ttl: Duration::ZERO,
            holders: 0,
            ends: None,
            peer: String::new(),
            sequences: SessionSequences::new(id),
            end: watch::Sender::new(None),
        };
        let lease = self.add_holder(id, entries.entry(id).or_insert(entry), holder);
        Ok(BegunSession { lease, replaced })
    }

    /// Holds a session that was begun before.
    pub(super) fn hold_again(
        self: &Arc<Self>,
        holder: HoldRequest<'_>,
        id: SessionId,
    ) -> Result<SessionLease, ServiceError> {
        let HoldRequest { namespace, now, .. } = holder;
        let mut entries = self.entries.lock();
        let entry = entries.get_mut(&id).filter(|entry| entry.namespace == *namespace);
        match entry.filter(|entry| !entry.is_due(now)) {
            Some(entry) => Ok(self.add_holder(id, entry, holder)),
            None => Err(ids::unknown_session(&self.space, namespace, id)),
        }
    }

    fn add_holder(
        self: &Arc<Self>,
        id: SessionId,
        entry: &mut SessionEntry,
        holder: HoldRequest<'_>,
    ) -> SessionLease {
        entry.holders += 1;
        entry.ends = None;
        entry.ttl = holder.ttl.min(self.limits.ttl_max);
        entry.peer = holder.peer;
        SessionLease { table: self.clone(), id, ttl: entry.ttl, end: entry.end.subscribe() }
    }

    fn release_hold(&self, id: SessionId, now: Instant) {
        let mut entries = self.entries.lock();
        // Gone where the session was ended under its holder.
        let Some(entry) = entries.get_mut(&id) else { return };
        entry.holders -= 1;
        if entry.holders == 0 {
            entry.ends = Some(now + entry.ttl);
            self.released.notify_one();
        }
    }

    /// Returns when a session lost its last holder since the call before.
    pub(super) async fn wait_for_release(&self) {
        self.released.notified().await;
    }

    /// When the next session ends that nobody holds.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.entries.lock().values().filter_map(|entry| entry.ends).min()
    }

    /// Ends the sessions whose time has come.
    pub(super) fn end_due(&self, now: Instant) -> Vec<EndedSession> {
        let mut entries = self.entries.lock();
        let due = entries.extract_if(.., |_, entry| entry.is_due(now));
        due.map(|(id, entry)| entry.end_by(id, SessionEnd::Expired)).collect()
    }

    /// Ends a session, whoever holds it.
    pub(super) fn close_session(
        &self,
        namespace: &Namespace,
        id: SessionId,
    ) -> Result<EndedSession, ServiceError> {
        let mut entries = self.entries.lock();
        let is_own = entries.get(&id).is_some_and(|entry| entry.namespace == *namespace);
        let entry = if is_own { entries.remove(&id) } else { None };
        let entry = entry.ok_or_else(|| ids::unknown_session(&self.space, namespace, id))?;
        Ok(entry.end_by(id, SessionEnd::Closed))
    }

    /// The sequences of a session that has not ended.
    pub(super) fn find_session(
        &self,
        namespace: &Namespace,
        id: SessionId,
        now: Instant,
    ) -> Result<Arc<SessionSequences>, ServiceError> {
        let entries = self.entries.lock();
        let entry = entries.get(&id).filter(|entry| entry.namespace == *namespace);
        let entry = entry.filter(|entry| !entry.is_due(now));
        let found = entry.map(|entry| entry.sequences.clone());
        found.ok_or_else(|| ids::unknown_session(&self.space, namespace, id))
    }

    /// The sessions of a namespace, the oldest first.
    pub(super) fn list_sessions(
        &self,
        namespace: &Namespace,
        now: Instant,
    ) -> Vec<SessionDescription> {
        let entries = self.entries.lock();
        let own = entries.iter().filter(|(_, entry)| entry.namespace == *namespace);
        let describe = |(id, entry): (&SessionId, &SessionEntry)| SessionDescription {
            id: *id,
            name: entry.name.clone(),
            age: now.saturating_duration_since(entry.begun),
            holders: entry.holders,
            ends_in: entry.ends.map(|ends| ends.saturating_duration_since(now)),
            ttl: entry.ttl,
            sequences: entry.sequences.count_open(),
            peer: entry.peer.clone(),
        };
        let mut sessions: Vec<_> =
            own.filter(|(_, entry)| !entry.is_due(now)).map(describe).collect();
        sessions.sort_by_key(|session| std::cmp::Reverse(session.age));
        sessions
    }

    /// Namespace of each session.
    pub(super) fn count_of(&self, namespace: &Namespace) -> usize {
        self.entries.lock().values().filter(|entry| entry.namespace == *namespace).count()
    }

    /// Namespaces of sessions.
    pub(super) fn list_namespaces(&self) -> Vec<Namespace> {
        self.entries.lock().values().map(|entry| entry.namespace.clone()).collect()
    }

    /// Sessions of all namespaces.
    pub(super) fn count_sessions(&self) -> usize {
        self.entries.lock().len()
    }
}

fn name_in_use(id: SessionId, entry: &SessionEntry, now: Instant) -> ServiceError {
    let SessionEntry { name, .. } = entry;
    let hold = entry.describe_hold(now);
    let message = format!(
        "name: {name:?} is session {id} ({hold}); ask with take_over to close it, or hold it \
         again by its session_id"
    );
    ServiceError::new(ErrorCode::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::BootId;

    /// A table, and a clock that the test moves.
    struct Bench {
        table: Arc<SessionTable>,
        namespace: Namespace,
        begun: Instant,
    }

    impl Bench {
        fn new(sessions_max: usize) -> Self {
            let space = IdSpace::new(BootId::new([1; 16]).unwrap(), [2; 16]);
            let (ttl_max, quotas) = (Duration::from_secs(300), QuotaTable::new(1));
            let limits = SessionLimits { sessions_max, ttl_max, quotas };
            let namespace = Namespace::new("default").unwrap();
            let table = SessionTable::new(limits, Arc::new(space));
            Self { table, namespace, begun: Instant::now() }
        }

        /// So many seconds after the begin.
        fn at(&self, seconds: u64) -> Instant {
            self.begun + Duration::from_secs(seconds)
        }

        fn holder(&self, seconds: u64, ttl_seconds: u64) -> HoldRequest<'_> {
            let (ttl, peer) = (Duration::from_secs(ttl_seconds), "a test".to_owned());
            HoldRequest { namespace: &self.namespace, ttl, peer, now: self.at(seconds) }
        }

        /// Begins a session by a holder who is let go of by [`SessionTable::release_hold`] alone.
        fn begin(
            &self,
            holder: HoldRequest<'_>,
            name: &str,
            take_over: bool,
        ) -> Result<Begun, ServiceError> {
            let begun = self.table.begin_session(holder, name.to_owned(), take_over)?;
            let BegunSession { lease, replaced } = begun;
            let session = lease.session_id();
            std::mem::forget(lease);
            Ok(Begun { session, replaced: replaced.map(|ended| (ended.id, ended.end)) })
        }

        fn hold_again(&self, holder: HoldRequest<'_>, id: SessionId) -> Result<(), ServiceError> {
            self.table.hold_again(holder, id).map(std::mem::forget)
        }

        /// Which sessions end at that second, and why.
        fn ended_at(&self, seconds: u64) -> Vec<(SessionId, SessionEnd)> {
            let ended = self.table.end_due(self.at(seconds));
            ended.into_iter().map(|ended| (ended.id, ended.end)).collect()
        }
    }

    #[derive(Debug)]
    struct Begun {
        session: SessionId,
        replaced: Option<(SessionId, SessionEnd)>,
    }

    #[test]
    fn a_session_ends_when_nobody_has_held_it_for_the_time_that_the_latest_asked_for() {
        let b = Bench::new(9);
        let id = b.begin(b.holder(0, 10), "a", false).unwrap().session;
        assert_eq!((b.table.next_end(), b.ended_at(1000)), (None, vec![]));
        b.hold_again(b.holder(5, 20), id).unwrap();
        b.table.release_hold(id, b.at(6));
        assert_eq!((b.table.next_end(), b.ended_at(1000)), (None, vec![]));
        b.table.release_hold(id, b.at(7));
        assert_eq!(b.table.next_end(), Some(b.at(27)));
        assert_eq!(b.ended_at(26), []);
        // Held again in its last second, it begins anew.
        b.hold_again(b.holder(26, 3), id).unwrap();
        assert_eq!((b.table.next_end(), b.ended_at(1000)), (None, vec![]));
        b.table.release_hold(id, b.at(30));
        assert_eq!(b.ended_at(33), [(id, SessionEnd::Expired)]);
        assert_eq!(b.table.count_sessions(), 0);
        // One that let go late, of what is gone.
        b.table.release_hold(id, b.at(34));
    }

    #[test]
    fn a_session_whose_time_has_come_is_gone_before_it_is_taken_out() {
        let b = Bench::new(1);
        let id = b.begin(b.holder(0, 10), "a", false).unwrap().session;
        b.table.release_hold(id, b.at(0));
        assert!(b.table.find_session(&b.namespace, id, b.at(9)).is_ok());
        let gone = b.table.find_session(&b.namespace, id, b.at(10)).unwrap_err();
        assert_eq!(gone.code(), ErrorCode::UnknownSession);
        let gone = b.hold_again(b.holder(10, 10), id).unwrap_err();
        assert_eq!(gone.code(), ErrorCode::UnknownSession);
        assert_eq!(b.table.list_sessions(&b.namespace, b.at(10)), []);
        // Its name is free, and its place.
        let newer = b.begin(b.holder(10, 10), "a", false).unwrap();
        assert_eq!(newer.replaced, Some((id, SessionEnd::Expired)));
        assert_eq!(b.ended_at(1000), []);
    }

    #[test]
    fn a_name_in_use_is_refused_or_taken_over() {
        let b = Bench::new(2);
        let id = b.begin(b.holder(0, 10), "a", false).unwrap().session;
        let refused = b.begin(b.holder(1, 10), "a", false).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument);
        assert!(refused.to_string().contains(&format!("is session {id} (held by a test)")));
        b.table.release_hold(id, b.at(2));
        let refused = b.begin(b.holder(4, 10), "a", false).unwrap_err().to_string();
        assert!(refused.contains("(not held, ends in 8000 ms)"), "{refused}");
        let newer = b.begin(b.holder(5, 10), "a", true).unwrap();
        assert_eq!(newer.replaced, Some((id, SessionEnd::TakenOver)));
        assert_ne!(newer.session, id);
        assert_eq!(b.begin(b.holder(6, 10), "b", true).unwrap().replaced, None);
        let full = b.begin(b.holder(7, 10), "c", true).unwrap_err();
        assert_eq!(full.code(), ErrorCode::LimitExceeded);
        let names: Vec<_> = b.table.list_sessions(&b.namespace, b.at(8)).into_iter().collect();
        assert_eq!(names.iter().map(|session| &session.name[..]).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn a_lease_lets_go_when_it_is_dropped_and_is_told_of_the_end() {
        let b = Bench::new(2);
        let begun = b.table.begin_session(b.holder(0, 500), "a".to_owned(), false).unwrap();
        let lease = begun.lease;
        assert_eq!(lease.granted_ttl(), Duration::from_secs(300), "no more than is granted");
        let ended = b.table.close_session(&b.namespace, lease.session_id()).unwrap();
        assert_eq!(ended.end, SessionEnd::Closed);
        let mut end = std::pin::pin!(lease.wait_for_end());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let told = end.as_mut().poll(&mut context);
        assert_eq!(told, std::task::Poll::Ready(SessionEnd::Closed));

        let lease = b.table.begin_session(b.holder(0, 10), "b".to_owned(), false).unwrap().lease;
        assert_eq!(b.table.next_end(), None);
        drop(lease);
        assert!(b.table.next_end().is_some());
    }
}
