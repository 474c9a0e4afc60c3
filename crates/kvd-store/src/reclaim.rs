//! Bytes of long sequences are given back in batches, on a thread of its own.
//!
//! Owns [`ReclaimQueue`]: the views that wait, and the thread that frees them. Whoever finds the
//! pool full helps: what was closed before is free before anybody is refused. Lock story: the
//! queue's mutex is held for a push or a pop only, never while a batch is freed, and no other lock
//! is taken under it. Call without any lock of the store's held.

use crate::pool::FreedSlots;
use crate::view_list::DiscardedViews;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Slots of a batch, about: so many take the pool's lock once.
const BATCH_SLOTS: usize = 256;

/// Views that a caller frees himself: as many as a batch or fewer.
const OWN_VIEWS_MAX: usize = if cfg!(test) { 3 } else { BATCH_SLOTS };

/// Sequences and cuts that wait at most. Beyond that, callers free what they close themselves.
const QUEUE_MAX: usize = if cfg!(test) { 4 } else { 1024 };

/// Views that wait to be freed.
#[derive(Debug, Default)]
pub(crate) struct ReclaimQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    queue: VecDeque<DiscardedViews>,
    /// Who frees a batch right now.
    working: usize,
    /// Batches that were freed: tells who found the pool full that it is worth another look.
    batches: u64,
    thread: ThreadState,
    /// The pool is gone: the thread ends.
    closed: bool,
}

#[derive(Debug, Default)]
enum ThreadState {
    #[default]
    NotStarted,
    Started(JoinHandle<()>),
    /// The system gave none: callers free what they close.
    None,
}

impl ReclaimQueue {
    /// Frees views, or leaves them to the thread when they are many.
    pub(crate) fn discard_views(self: &Arc<Self>, views: DiscardedViews) {
        if views.len() > OWN_VIEWS_MAX {
            let mut state = self.state.lock();
            if state.queue.len() < QUEUE_MAX && self.start_thread(&mut state) {
                state.queue.push_back(views);
                self.changed.notify_all();
                return;
            }
        }
        let mut rest = Some(views);
        while let Some(views) = rest {
            rest = free_batch(views);
        }
    }

    /// Batches freed so far.
    pub(crate) fn count_batches(&self) -> u64 {
        self.state.lock().batches
    }

    /// Frees a batch of what waits, or waits until another has freed one. False when nothing
    /// waits and nothing was freed since [`ReclaimQueue::count_batches`] was `seen`.
    pub(crate) fn free_or_wait(&self, seen: u64) -> bool {
        let mut state = self.state.lock();
        if let Some(views) = state.queue.pop_front() {
            self.work_on(&mut state, views);
            return true;
        }
        while state.batches == seen && state.working > 0 {
            self.changed.wait(&mut state);
        }
        state.batches != seen
    }

    /// Ends the thread and waits for that, unless it is the thread itself that asks: it drops the
    /// pool's last slot.
    pub(crate) fn end_thread(&self) {
        let thread = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::replace(&mut state.thread, ThreadState::None)
        };
        self.changed.notify_all();
        if let ThreadState::Started(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic was told of when it came.
            let _ended = thread.join();
        }
    }

    /// Frees a batch of views that were taken off the queue, without the lock.
    fn work_on(&self, state: &mut parking_lot::MutexGuard<'_, QueueState>, views: DiscardedViews) {
        state.working += 1;
        let rest = parking_lot::MutexGuard::unlocked(state, || free_batch(views));
        state.working -= 1;
        state.batches += 1;
        if let Some(rest) = rest {
            state.queue.push_front(rest);
        }
        self.changed.notify_all();
    }

    /// Whether there is a thread; starts it when there was none yet.
    fn start_thread(self: &Arc<Self>, state: &mut QueueState) -> bool {
        if matches!(state.thread, ThreadState::NotStarted) {
            let reclaim = Arc::clone(self);
            let builder = std::thread::Builder::new().name("kvd-reclaim".to_owned());
            let thread = builder.spawn(move || reclaim.free_until_closed());
            state.thread = thread.map_or(ThreadState::None, ThreadState::Started);
        }
        matches!(state.thread, ThreadState::Started(_))
    }

    fn free_until_closed(&self) {
        let mut state = self.state.lock();
        while !state.closed {
            match state.queue.pop_front() {
                Some(views) => self.work_on(&mut state, views),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// Frees some views; what is left.
fn free_batch(mut views: DiscardedViews) -> Option<DiscardedViews> {
    let mut freed = FreedSlots::default();
    let mut more = true;
    while more && freed.len() < BATCH_SLOTS {
        more = views.free_some(&mut freed);
    }
    freed.give_back();
    more.then_some(views)
}
