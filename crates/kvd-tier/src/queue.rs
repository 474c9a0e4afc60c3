//! Records that wait for the writer, bounded in bytes, and the loop that makes batches of them.
//!
//! One lock, held to move a record in or out. Bytes count until a record is durable or has failed.

use crate::draft::SealedRecord;
use crate::error::{RefusedWrite, WriteError};
use crate::levels::{LevelCells, TierState};
use crate::listener::OnDurable;
use crate::shared::TierShared;
use crate::writer::{PendingRecord, SegmentWriter, WriteCompletion};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A batch ends when for this part of its longest time no record came: whoever waits for the last
/// of a publish waits for no others.
const PAUSE_PART: u32 = 8;

/// Longest pause between batches, when a rate is kept.
const PAUSE_MAX: Duration = Duration::from_secs(1);

struct QueuedRecord {
    record: SealedRecord,
    on_durable: OnDurable,
    queued_at: Instant,
    ticket: u64,
}

#[derive(Default)]
struct QueueState {
    records: VecDeque<QueuedRecord>,
    /// Bytes of records that wait or are being written.
    bytes: u64,
    last_ticket: u64,
    /// When the oldest record of the batch in hand was queued.
    batch_since: Option<Instant>,
    /// No more records are taken.
    is_closed: bool,
    /// Records that still wait after this moment fail.
    drain_until: Option<Instant>,
}

/// The queue between callers and the writer.
pub(crate) struct WriteQueue {
    shared: Arc<TierShared>,
    state: Mutex<QueueState>,
    wake: Condvar,
}

/// A record for the writer, and the ticket of the newest in the queue.
struct TakenRecord {
    pending: PendingRecord,
    last_ticket: u64,
    is_late: bool,
}

impl WriteQueue {
    pub(crate) fn new(shared: Arc<TierShared>) -> Self {
        Self { shared, state: Mutex::new(QueueState::default()), wake: Condvar::new() }
    }

    /// Queues a record.
    pub(crate) fn push_record(
        &self,
        record: SealedRecord,
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        let pushed = self.try_push(record, on_durable);
        if let Err(refused) = &pushed {
            let cell = match refused {
                RefusedWrite::QueueFull { .. } => &self.shared.cells.drops_queue,
                _ => &self.shared.cells.drops_other,
            };
            LevelCells::add_to(cell, 1);
        }
        pushed
    }

    fn try_push(&self, record: SealedRecord, on_durable: OnDurable) -> Result<(), RefusedWrite> {
        let bytes = record.header.record_bytes;
        let limit_bytes = self.shared.settings.record_bytes_max();
        if bytes > limit_bytes {
            return Err(RefusedWrite::TooLarge { bytes, limit_bytes });
        }
        if self.shared.tier_state() == TierState::Off {
            return Err(RefusedWrite::Off);
        }
        let limit_bytes = self.shared.settings.queue_bytes_max;
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(RefusedWrite::Closed);
        }
        // One record always fits into an empty queue.
        if state.bytes > 0 && state.bytes + bytes > limit_bytes {
            return Err(RefusedWrite::QueueFull { queued_bytes: state.bytes, limit_bytes });
        }
        state.bytes += bytes;
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        let queued_at = Instant::now();
        state.records.push_back(QueuedRecord { record, on_durable, queued_at, ticket });
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Bytes that are not yet durable, and the age of the oldest.
    pub(crate) fn read_backlog(&self) -> (u64, Duration) {
        let state = self.state.lock();
        let front = state.records.front().map(|record| record.queued_at);
        let oldest = state.batch_since.or(front);
        (state.bytes, oldest.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Takes no more records; what waits is written within `grace`.
    pub(crate) fn close_queue(&self, grace: Duration) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.drain_until = Instant::now().checked_add(grace);
        drop(state);
        self.wake.notify_all();
    }

    /// The next record; `None` at `deadline`, or when the queue is closed and empty.
    fn take_record(&self, deadline: Option<Instant>) -> Option<TakenRecord> {
        let mut state = self.state.lock();
        loop {
            if let Some(queued) = state.records.pop_front() {
                state.batch_since.get_or_insert(queued.queued_at);
                let is_late = state.drain_until.is_some_and(|until| Instant::now() > until);
                let completion = WriteCompletion::Caller(queued.on_durable);
                let pending = PendingRecord::new(queued.record, completion, queued.ticket);
                return Some(TakenRecord { pending, last_ticket: state.last_ticket, is_late });
            }
            if state.is_closed {
                return None;
            }
            match deadline {
                None => self.wake.wait(&mut state),
                Some(deadline) => {
                    if self.wake.wait_until(&mut state, deadline).timed_out() {
                        return None;
                    }
                }
            }
        }
    }

    fn end_batch(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        state.batch_since = None;
    }
}

/// Fails what waits when the writer ends, by whatever way.
struct WriterEnd<'a> {
    queue: &'a WriteQueue,
}

impl Drop for WriterEnd<'_> {
    fn drop(&mut self) {
        self.queue.close_queue(Duration::ZERO);
        if std::thread::panicking() {
            self.queue.shared.set_state(TierState::Off);
        }
        while let Some(taken) = self.queue.take_record(None) {
            if let WriteCompletion::Caller(on_durable) = taken.pending.completion {
                on_durable(Err(WriteError::Closed));
            }
        }
    }
}

/// The writer's thread: batches until the queue is closed and empty, then a footer.
pub(crate) fn run_writer(mut writer: SegmentWriter, queue: &WriteQueue) {
    let _end = WriterEnd { queue };
    let settings = queue.shared.settings.clone();
    while let Some(first) = queue.take_record(None) {
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(settings.sync_ms);
        let pause = Duration::from_millis(settings.sync_ms) / PAUSE_PART;
        let mut bytes = write_taken(&mut writer, first);
        while bytes < settings.sync_bytes
            && let Some(next) = queue.take_record(Some(deadline.min(Instant::now() + pause)))
        {
            bytes += write_taken(&mut writer, next);
        }
        writer.sync_pending();
        queue.end_batch(bytes);
        keep_rate(bytes, settings.write_bytes_per_second, begin);
    }
    writer.close_segment();
}

fn write_taken(writer: &mut SegmentWriter, taken: TakenRecord) -> u64 {
    let bytes = taken.pending.record.header.record_bytes;
    if taken.is_late {
        writer.fail_record(taken.pending, WriteError::Closed);
    } else {
        writer.write_pending(taken.pending, taken.last_ticket);
    }
    bytes
}

/// Sleeps as long as a batch should have taken.
fn keep_rate(bytes: u64, bytes_per_second: u64, begin: Instant) {
    if bytes_per_second == 0 {
        return;
    }
    let due = Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64);
    std::thread::sleep(due.saturating_sub(begin.elapsed()).min(PAUSE_MAX));
}
