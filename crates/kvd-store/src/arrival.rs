//! The arrival of a prefix whose blocks come back layer by layer: which layers may be read.
//!
//! Owns [`LayerArrival`], which the sequence and whoever brings the blocks share. A count that
//! grows, and one mutex for those who wait, under which nothing else is locked.

use kvd_core::SequenceId;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use crate::error::StoreError;

/// The layers of a prefix that have come so far.
#[derive(Debug)]
pub struct LayerArrival {
    layers: u32,
    /// Layers from the first on whose every block lies verified in the pool.
    ready: AtomicU32,
    /// Why the others do not come.
    lost: OnceLock<&'static str>,
    waiting: Mutex<Vec<Waker>>,
    /// Arrivals under way, of all sequences.
    under_way: Arc<AtomicU64>,
}

impl LayerArrival {
    pub(crate) fn new(layers: u32, ready: u32, under_way: &Arc<AtomicU64>) -> Self {
        under_way.fetch_add(1, Ordering::Relaxed);
        Self {
            layers,
            ready: AtomicU32::new(ready),
            lost: OnceLock::new(),
            waiting: Mutex::default(),
            under_way: Arc::clone(under_way),
        }
    }

    /// Layers of the model.
    #[must_use]
    pub fn count_layers(&self) -> u32 {
        self.layers
    }

    /// Waits until the first so many layers may be read, or will not come.
    pub async fn wait_layers(&self, layers: u32) {
        let is_decided = || self.count_ready() >= layers || self.lost.get().is_some();
        poll_fn(|context| {
            let mut waiting = self.waiting.lock();
            // Under the lock: whoever decides wakes those that are in the list by then.
            if is_decided() {
                return Poll::Ready(());
            }
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    fn count_ready(&self) -> u32 {
        self.ready.load(Ordering::Acquire)
    }

    /// Whether the first so many layers may be read.
    pub(crate) fn check_layers(&self, id: SequenceId, layers: u32) -> Result<(), StoreError> {
        let ready = self.count_ready();
        if ready >= layers {
            return Ok(());
        }
        match self.lost.get() {
            None => Err(StoreError::LayerOnItsWay { id, layer: layers - 1 }),
            Some(reason) => Err(StoreError::PrefixLost { id, layers: ready, reason }),
        }
    }

    fn note_ready(&self, layers: u32) {
        self.ready.store(layers.min(self.layers), Ordering::Release);
        self.wake_all();
    }

    fn note_lost(&self, reason: &'static str) {
        // The first reason is the cause of the others.
        let _told_before = self.lost.set(reason);
        self.wake_all();
    }

    fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// The end of an arrival at which layers are brought. What has not come when it is dropped is lost.
#[derive(Debug)]
pub(crate) struct ArrivalGuard(pub(crate) Arc<LayerArrival>);

impl ArrivalGuard {
    /// Whether a sequence is there that reads the blocks.
    pub(crate) fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn note_ready(&self, layers: u32) {
        self.0.note_ready(layers);
    }

    pub(crate) fn note_lost(&self, reason: &'static str) {
        self.0.note_lost(reason);
    }
}

impl Drop for ArrivalGuard {
    fn drop(&mut self) {
        if self.0.count_ready() < self.0.layers {
            self.0.note_lost("abandoned");
        }
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}
