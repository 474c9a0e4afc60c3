//! Open admin connections: at most so many, and who waits longest gives way to who comes.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Time for the peer to read an answer before its connection may give way.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// Every open connection of a port.
pub(super) struct OpenConnections {
    /// One for each socket that is open.
    sockets: Arc<Semaphore>,
    known: Mutex<KnownConnections>,
}

#[derive(Default)]
struct KnownConnections {
    next: u64,
    /// By the order in which they came.
    by_age: BTreeMap<u64, Arc<OpenConnection>>,
}

/// One that is open, or has just given way.
pub(super) struct OpenConnection {
    activity: Mutex<RequestActivity>,
    gave_way: Notify,
}

/// How far its newest request is.
#[derive(Clone, Copy)]
enum RequestActivity {
    /// None has come whole.
    Waiting,
    /// It is being answered.
    Answering,
    /// It was answered then.
    Answered(Instant),
}

/// The right to be open; given back when this is dropped.
pub(super) struct AdmittedConnection {
    open: Arc<OpenConnections>,
    number: u64,
    connection: Arc<OpenConnection>,
    _socket: OwnedSemaphorePermit,
}

impl OpenConnections {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { sockets: Arc::new(Semaphore::new(max)), known: Mutex::default() })
    }

    /// Lets one more in. When as many are open as may be, the oldest without a request under way
    /// gives way, and its socket is closed first; none where all have one.
    pub(super) async fn admit_socket(self: &Arc<Self>) -> Option<AdmittedConnection> {
        let sockets = self.sockets.clone();
        let socket = match sockets.clone().try_acquire_owned() {
            Ok(socket) => socket,
            Err(_) if self.give_way() => sockets.acquire_owned().await.ok()?,
            Err(_) => return None,
        };
        let connection = Arc::new(OpenConnection {
            activity: Mutex::new(RequestActivity::Waiting),
            gave_way: Notify::new(),
        });
        let mut known = self.known.lock();
        let number = known.next;
        known.next += 1;
        known.by_age.insert(number, connection.clone());
        Some(AdmittedConnection { open: self.clone(), number, connection, _socket: socket })
    }

    /// Ends the oldest connection that has no request under way; whether there is one.
    fn give_way(&self) -> bool {
        let mut known = self.known.lock();
        let now = Instant::now();
        let oldest = known.by_age.iter().find(|(_, connection)| connection.is_idle(now));
        let Some(number) = oldest.map(|(number, _)| *number) else { return false };
        if let Some(connection) = known.by_age.remove(&number) {
            connection.gave_way.notify_one();
        }
        true
    }
}

impl OpenConnection {
    fn is_idle(&self, now: Instant) -> bool {
        match *self.activity.lock() {
            RequestActivity::Waiting => true,
            RequestActivity::Answering => false,
            RequestActivity::Answered(then) => now.saturating_duration_since(then) > ANSWER_TIME,
        }
    }

    /// A request has come.
    pub(super) fn begin_answer(&self) {
        *self.activity.lock() = RequestActivity::Answering;
    }

    /// Its answer is on its way.
    pub(super) fn end_answer(&self) {
        *self.activity.lock() = RequestActivity::Answered(Instant::now());
    }
}

impl AdmittedConnection {
    /// Where its requests are told of.
    pub(super) fn open_connection(&self) -> &Arc<OpenConnection> {
        &self.connection
    }

    /// Returns when it gives way to another.
    pub(super) async fn gives_way(&self) {
        self.connection.gave_way.notified().await;
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        self.open.known.lock().by_age.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_core::Future;
    use std::task::{Context, Poll, Waker};

    fn is_ready(future: impl Future<Output = ()>) -> bool {
        let mut future = std::pin::pin!(future);
        future.as_mut().poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[tokio::test]
    async fn the_oldest_that_waits_gives_way_and_one_that_is_answered_does_not() {
        let open = OpenConnections::new(2);
        let [answered, waiting] =
            [open.admit_socket().await.unwrap(), open.admit_socket().await.unwrap()];
        answered.open_connection().begin_answer();
        let newcomer = tokio::spawn({
            let open = open.clone();
            async move { open.admit_socket().await }
        });
        waiting.gives_way().await;
        assert!(!newcomer.is_finished(), "its socket is open yet");
        assert!(!is_ready(answered.gives_way()));
        drop(waiting);
        let newcomer = newcomer.await.unwrap().unwrap();
        newcomer.open_connection().begin_answer();
        assert!(open.admit_socket().await.is_none(), "all are being answered");
        // A peer that has just been answered may still read.
        newcomer.open_connection().end_answer();
        assert!(open.admit_socket().await.is_none());
        drop(newcomer);
        assert!(open.admit_socket().await.is_some());
        assert_eq!(open.known.lock().by_age.len(), 1);
    }
}
