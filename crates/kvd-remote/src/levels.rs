//! Counters and levels of the tier. Plain numbers.

use crate::breaker::BreakerState;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A kind of request to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteOp {
    /// Which of some objects are there.
    Find = 0,
    /// An object's bytes.
    Read = 1,
    /// To write one.
    Write = 2,
    /// To remove one.
    Remove = 3,
}

impl RemoteOp {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Find, Self::Read, Self::Write, Self::Remove];

    /// Label in metrics.
    #[must_use]
    pub fn op_label(self) -> &'static str {
        match self {
            Self::Find => "find",
            Self::Read => "read",
            Self::Write => "write",
            Self::Remove => "remove",
        }
    }
}

/// Requests of one kind by their end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Answered.
    pub answered: u64,
    /// The store failed.
    pub failed: u64,
    /// The store has no room.
    pub full: u64,
    /// The store does not let us in.
    pub denied: u64,
    /// No answer in time.
    pub timed_out: u64,
    /// Not made, because the breaker was open or too many were under way.
    pub skipped: u64,
}

/// Counters since the start, and levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteLevels {
    /// The breaker.
    pub state: BreakerState,
    /// By [`RemoteOp`].
    pub requests: [RequestCounts; 4],
    /// Blocks that look-ups found.
    pub found: u64,
    /// Bytes of objects read.
    pub read_bytes: u64,
    /// Bytes of objects written.
    pub written_bytes: u64,
    /// Objects that were damaged, of another block, or had no right keyed hash.
    pub corrupt: u64,
    /// Objects that did not fit the queue.
    pub drops_queue: u64,
    /// Objects that were not written for want of an answer.
    pub drops_failed: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
}

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountedEnd {
    Answered,
    Failed,
    Full,
    Denied,
    TimedOut,
    Skipped,
}

#[derive(Debug, Default)]
struct RequestCells {
    ends: [AtomicU64; 6],
}

#[derive(Debug, Default)]
pub(crate) struct LevelCells {
    requests: [RequestCells; 4],
    pub(crate) found: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) corrupt: AtomicU64,
    pub(crate) drops_queue: AtomicU64,
    pub(crate) drops_failed: AtomicU64,
}

impl LevelCells {
    pub(crate) fn count_request(&self, op: RemoteOp, end: CountedEnd) {
        self.requests[op as usize].ends[end as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn read_levels(&self, state: BreakerState, queued_bytes: u64) -> RemoteLevels {
        let counts = |cells: &RequestCells| {
            let [answered, failed, full, denied, timed_out, skipped] =
                std::array::from_fn(|end| cells.ends[end].load(Relaxed));
            RequestCounts { answered, failed, full, denied, timed_out, skipped }
        };
        RemoteLevels {
            state,
            requests: std::array::from_fn(|op| counts(&self.requests[op])),
            found: self.found.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            corrupt: self.corrupt.load(Relaxed),
            drops_queue: self.drops_queue.load(Relaxed),
            drops_failed: self.drops_failed.load(Relaxed),
            queued_bytes,
        }
    }
}
