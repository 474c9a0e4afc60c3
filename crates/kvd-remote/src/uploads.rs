//! Objects that wait to be written: bounded in bytes, the newest dropped when there is no room.
//!
//! One lock, held to move an object in or out.

use bytes::Bytes;
use kvd_tier::ObjectName;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Told once whether an object was written.
pub type OnUploaded = Box<dyn FnOnce(bool) + Send>;

/// An object that is to be written.
pub(crate) struct QueuedUpload {
    pub(crate) name: ObjectName,
    pub(crate) bytes: Bytes,
    pub(crate) on_uploaded: OnUploaded,
}

/// Why an object is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedUpload {
    /// Too many bytes wait.
    #[error("{queued_bytes} bytes wait to be written, of {limit_bytes}")]
    QueueFull {
        /// Bytes that wait.
        queued_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The store does not answer.
    #[error("the store does not answer: nothing is written for a while")]
    Open,
    /// The daemon ends.
    #[error("the tier is closed")]
    Closed,
}

#[derive(Default)]
struct QueueState {
    waiting: VecDeque<QueuedUpload>,
    /// Sum over those that wait or are being written.
    bytes: u64,
    workers: usize,
    is_closed: bool,
}

/// The queue, and how many work it off.
pub(crate) struct UploadQueue {
    state: Mutex<QueueState>,
    limit_bytes: u64,
    workers_max: usize,
}

impl UploadQueue {
    pub(crate) fn new(limit_bytes: u64, workers_max: usize) -> Self {
        Self { state: Mutex::default(), limit_bytes, workers_max }
    }

    /// Queues an object; whether one more is to work the queue off.
    pub(crate) fn push_upload(&self, upload: QueuedUpload) -> Result<bool, RefusedUpload> {
        let bytes = upload.bytes.len() as u64;
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(RefusedUpload::Closed);
        }
        // One always fits into an empty queue.
        if state.bytes > 0 && state.bytes + bytes > self.limit_bytes {
            let (queued_bytes, limit_bytes) = (state.bytes, self.limit_bytes);
            return Err(RefusedUpload::QueueFull { queued_bytes, limit_bytes });
        }
        state.bytes += bytes;
        state.waiting.push_back(upload);
        let is_needed = state.workers < self.workers_max;
        state.workers += usize::from(is_needed);
        Ok(is_needed)
    }

    /// The next object; none ends whoever works it off.
    pub(crate) fn take_upload(&self) -> Option<QueuedUpload> {
        let mut state = self.state.lock();
        let next = state.waiting.pop_front();
        state.workers -= usize::from(next.is_none());
        next
    }

    /// An object of so many bytes was written or given up.
    pub(crate) fn end_upload(&self, bytes: u64) {
        self.state.lock().bytes -= bytes;
    }

    pub(crate) fn queued_bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Takes no more objects.
    pub(crate) fn close_queue(&self) {
        self.state.lock().is_closed = true;
    }
}
