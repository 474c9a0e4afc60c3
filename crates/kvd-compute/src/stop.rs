//! When work on a device ends early, and when it lets other work pass.

use crate::BackendError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Why work ended before it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Nobody waits for its answer any more.
    Cancelled,
    /// The caller's deadline has passed.
    DeadlinePassed,
    /// The device is about to be given back.
    ShuttingDown,
    /// A piece of it was given up for work that goes first, and is done again; no answer ends so.
    Outrun,
}

/// The end of a slice of work: it is over once `ends` has passed and other work waits.
#[derive(Clone, Debug)]
pub struct Slice {
    /// When other work may have the device.
    pub ends: Instant,
    /// How many jobs wait for it.
    pub waiting: Arc<AtomicUsize>,
}

/// A pause that is wanted whether or not other work waits.
#[derive(Clone, Debug)]
pub struct WantedPause {
    /// Set to have one now.
    pub wanted: Arc<AtomicBool>,
    /// When to have one.
    pub at: Option<Instant>,
}

/// Looked at by a backend between pieces of its work: whether to go on at all, and whether to
/// pause. A look costs at most five atomic loads and two readings of the clock.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Set once nobody waits for the answer.
    pub cancelled: Arc<AtomicBool>,
    /// Set once the device is to be given back.
    pub shutting_down: Arc<AtomicBool>,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
    /// When others go first; none for work that is not cut.
    pub slice: Option<Slice>,
    /// When the work pauses so that its owners may be looked after; none for work of one owner.
    pub pause: Option<WantedPause>,
    /// Set when work comes that goes first: the work pauses, and a backend may give up the piece
    /// at work, to do it again.
    pub outrun: Arc<AtomicBool>,
}

impl Stop {
    /// For work that nothing ends early.
    #[must_use]
    pub fn never() -> Self {
        Self::default()
    }

    /// Why the work is to end now.
    #[must_use]
    pub fn reason(&self) -> Option<StopReason> {
        if self.cancelled.load(Ordering::Acquire) {
            return Some(StopReason::Cancelled);
        }
        if self.shutting_down.load(Ordering::Acquire) {
            return Some(StopReason::ShuttingDown);
        }
        let passed = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        passed.then_some(StopReason::DeadlinePassed)
    }

    /// Lets work go on, unless it is to end.
    ///
    /// # Errors
    /// [`BackendError::Stopped`].
    pub fn check(&self) -> Result<(), BackendError> {
        self.reason().map_or(Ok(()), |reason| Err(BackendError::Stopped(reason)))
    }

    /// Whether work has come that goes first.
    #[must_use]
    pub fn is_outrun(&self) -> bool {
        self.outrun.load(Ordering::Acquire)
    }

    /// Whether the work is to pause: other work waits that is to go first, or a pause is wanted.
    #[must_use]
    pub fn slice_is_over(&self) -> bool {
        let is_over = |slice: &Slice| {
            slice.waiting.load(Ordering::Acquire) > 0 && slice.ends <= Instant::now()
        };
        let is_wanted = |pause: &WantedPause| {
            pause.wanted.load(Ordering::Acquire) || pause.at.is_some_and(|at| at <= Instant::now())
        };
        self.is_outrun()
            || self.slice.as_ref().is_some_and(is_over)
            || self.pause.as_ref().is_some_and(is_wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_slice_is_over_only_when_others_wait() {
        let waiting = Arc::new(AtomicUsize::new(0));
        let slice = |ends| Some(Slice { ends, waiting: waiting.clone() });
        let (past, later) = (Instant::now(), Instant::now() + Duration::from_secs(600));
        let over = Stop { slice: slice(past), ..Stop::never() };
        let under_way = Stop { slice: slice(later), ..Stop::never() };
        assert!(!over.slice_is_over());
        waiting.store(1, Ordering::Release);
        assert!(over.slice_is_over() && !under_way.slice_is_over());
        let pause = |at| Some(WantedPause { wanted: Arc::default(), at });
        let pausing = |pause| Stop { pause, ..Stop::never() };
        assert!(pausing(pause(Some(past))).slice_is_over());
        assert!(!pausing(pause(Some(later))).slice_is_over());
        let wanted = pausing(pause(None));
        assert!(!wanted.slice_is_over());
        wanted.pause.iter().for_each(|pause| pause.wanted.store(true, Ordering::Release));
        assert!(wanted.slice_is_over());
        let outrun = Stop { outrun: Arc::new(true.into()), ..Stop::never() };
        assert!(outrun.slice_is_over() && outrun.reason().is_none());
        assert!(!Stop::never().slice_is_over());
        assert_eq!(over.reason(), None);
    }

    #[test]
    fn each_reason_is_told_apart() {
        let stop = Stop { deadline: Some(Instant::now()), ..Stop::never() };
        assert_eq!(stop.reason(), Some(StopReason::DeadlinePassed));
        stop.shutting_down.store(true, Ordering::Release);
        assert_eq!(stop.reason(), Some(StopReason::ShuttingDown));
        stop.cancelled.store(true, Ordering::Release);
        let stopped = stop.check().unwrap_err();
        assert!(matches!(stopped, BackendError::Stopped(StopReason::Cancelled)), "{stopped}");
        Stop::never().check().unwrap();
    }
}
