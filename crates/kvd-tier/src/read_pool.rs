//! The tier's own threads for reads, with a bounded queue. One lock, held to move a request.

use crate::error::ReadError;
use crate::name::DiskLocation;
use crate::part::{RecordHead, RecordPart};
use crate::shared::TierShared;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// Called once, on a reader's thread.
pub type OnRead = Box<dyn FnOnce(Result<RecordPart, ReadError>) + Send>;

/// How much of a record is read.
#[derive(Clone, Debug)]
pub enum ReadRequest {
    /// All layers.
    Record,
    /// Names, forms and tables; a part without layers.
    Head,
    /// Some layers of a record whose head was read before.
    Layers {
        /// The head.
        head: Arc<RecordHead>,
        /// The layers.
        layers: Range<u32>,
    },
}

struct QueuedRead {
    location: DiskLocation,
    request: ReadRequest,
    on_read: OnRead,
}

#[derive(Default)]
struct ReadQueue {
    reads: VecDeque<QueuedRead>,
    is_closed: bool,
}

struct PoolShared {
    tier: Arc<TierShared>,
    queue: Mutex<ReadQueue>,
    wake: Condvar,
}

/// Threads that read.
pub(crate) struct ReadPool {
    shared: Arc<PoolShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl ReadPool {
    pub(crate) fn spawn_threads(tier: Arc<TierShared>) -> io::Result<Self> {
        let count = tier.settings.read_threads;
        let queue = Mutex::new(ReadQueue::default());
        let shared = Arc::new(PoolShared { tier, queue, wake: Condvar::new() });
        let pool = Self { shared, threads: Mutex::new(Vec::new()) };
        for index in 0..count {
            let shared = Arc::clone(&pool.shared);
            let thread = Builder::new().name(format!("kvd-read-{index}"));
            pool.threads.lock().push(thread.spawn(move || shared.serve_reads())?);
        }
        Ok(pool)
    }

    pub(crate) fn push_read(
        &self,
        location: DiskLocation,
        request: ReadRequest,
        on_read: OnRead,
    ) -> Result<(), ReadError> {
        let limit = self.shared.tier.settings.reads_max;
        let mut queue = self.shared.queue.lock();
        if queue.is_closed || queue.reads.len() >= limit {
            return Err(ReadError::QueueFull { limit });
        }
        queue.reads.push_back(QueuedRead { location, request, on_read });
        drop(queue);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Takes no more reads, ends those that wait, and joins the threads.
    pub(crate) fn close_pool(&self) {
        self.shared.queue.lock().is_closed = true;
        self.shared.wake.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A callback may hold the last reference: its own thread ends after it.
            if thread.thread().id() != std::thread::current().id() {
                // A callback of the caller's panicked: its message is on stderr already.
                drop(thread.join());
            }
        }
    }
}

impl Drop for ReadPool {
    fn drop(&mut self) {
        self.close_pool();
    }
}

impl PoolShared {
    fn serve_reads(&self) {
        while let Some(QueuedRead { location, request, on_read }) = self.take_read() {
            on_read(match request {
                ReadRequest::Record => self.tier.read_record(&location),
                ReadRequest::Head => self.tier.read_head(&location),
                ReadRequest::Layers { head, layers } => {
                    self.tier.read_layers(&location, &head, layers)
                }
            });
        }
    }

    fn take_read(&self) -> Option<QueuedRead> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(read) = queue.reads.pop_front() {
                return Some(read);
            }
            if queue.is_closed {
                return None;
            }
            self.wake.wait(&mut queue);
        }
    }
}
