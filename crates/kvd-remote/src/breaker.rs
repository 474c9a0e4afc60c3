//! Stops asking a store that does not answer. Pure but for the clock that it is told.
//!
//! Five failures or three timeouts in a row open it for a second, then for twice as long each
//! time, up to a minute. After that one request is let through; its success closes it.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

const FAILURES_MAX: u32 = 5;
const TIMEOUTS_MAX: u32 = 3;
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// State of a breaker, as its metric has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests go through.
    #[default]
    Closed = 0,
    /// One request goes through, to find out.
    Probing = 1,
    /// None does.
    Open = 2,
}

#[derive(Clone, Copy, Debug)]
enum InnerState {
    Closed { failures: u32, timeouts: u32 },
    Open { until: Instant, pause: Duration },
    Probing { pause: Duration },
}

/// End of a request that was let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestEnd {
    /// The store answered, be it that there is nothing.
    Answered,
    Failed,
    TimedOut,
}

/// The breaker of one store.
#[derive(Debug)]
pub struct StoreBreaker {
    inner: Mutex<InnerState>,
}

impl Default for StoreBreaker {
    fn default() -> Self {
        Self { inner: Mutex::new(InnerState::Closed { failures: 0, timeouts: 0 }) }
    }
}

/// The right to make a request. Dropped without its end, it was nobody's fault.
#[derive(Debug)]
pub(crate) struct BreakerPass<'a> {
    breaker: &'a StoreBreaker,
    is_ended: bool,
}

impl StoreBreaker {
    /// Its state now.
    #[must_use]
    pub fn read_state(&self) -> BreakerState {
        match *self.inner.lock() {
            InnerState::Closed { .. } => BreakerState::Closed,
            InnerState::Open { .. } => BreakerState::Open,
            InnerState::Probing { .. } => BreakerState::Probing,
        }
    }

    /// Lets a request through, or not.
    pub(crate) fn admit_request(&self, now: Instant) -> Option<BreakerPass<'_>> {
        let mut inner = self.inner.lock();
        match *inner {
            InnerState::Closed { .. } => {}
            InnerState::Open { until, pause } if now >= until => {
                *inner = InnerState::Probing { pause }
            }
            InnerState::Open { .. } | InnerState::Probing { .. } => return None,
        }
        Some(BreakerPass { breaker: self, is_ended: false })
    }

    fn note_end(&self, end: RequestEnd, now: Instant) {
        let mut inner = self.inner.lock();
        let next = match (*inner, end) {
            (InnerState::Closed { .. } | InnerState::Probing { .. }, RequestEnd::Answered) => {
                InnerState::Closed { failures: 0, timeouts: 0 }
            }
            (InnerState::Closed { failures, timeouts }, end) => {
                let failures = failures + 1;
                let timeouts = timeouts + u32::from(end == RequestEnd::TimedOut);
                if failures < FAILURES_MAX && timeouts < TIMEOUTS_MAX {
                    InnerState::Closed { failures, timeouts }
                } else {
                    InnerState::Open { until: now + PAUSE_MIN, pause: PAUSE_MIN }
                }
            }
            (InnerState::Probing { pause }, _) => {
                let pause = (2 * pause).min(PAUSE_MAX);
                InnerState::Open { until: now + pause, pause }
            }
            // It began before; the pause stands.
            (InnerState::Open { .. }, _) => return,
        };
        *inner = next;
    }
}

impl BreakerPass<'_> {
    pub(crate) fn end_request(mut self, end: RequestEnd) {
        self.is_ended = true;
        self.breaker.note_end(end, Instant::now());
    }
}

impl Drop for BreakerPass<'_> {
    fn drop(&mut self) {
        let mut inner = self.breaker.inner.lock();
        // Its caller left: the next one finds out.
        if let InnerState::Probing { pause } = *inner
            && !self.is_ended
        {
            *inner = InnerState::Open { until: Instant::now(), pause };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_failures_open_it_and_one_probe_at_a_time_closes_it() {
        let (breaker, begin) = (StoreBreaker::default(), Instant::now());
        let fail = |end, times| (0..times).for_each(|_| breaker.note_end(end, begin));
        fail(RequestEnd::Failed, 4);
        breaker.note_end(RequestEnd::Answered, begin);
        fail(RequestEnd::TimedOut, 2);
        assert_eq!(breaker.read_state(), BreakerState::Closed);
        fail(RequestEnd::TimedOut, 1);
        assert_eq!(breaker.read_state(), BreakerState::Open);
        let (mut now, mut pause) = (begin, 1);
        for _ in 0..8 {
            let early = now + Duration::from_millis(pause * 1000 - 1);
            assert!(breaker.admit_request(early).is_none());
            now += Duration::from_secs(pause);
            let probe = breaker.admit_request(now).expect("a probe");
            assert!(breaker.admit_request(now).is_none(), "one at a time");
            assert_eq!(breaker.read_state(), BreakerState::Probing);
            breaker.note_end(RequestEnd::Failed, now);
            drop(probe);
            pause = (2 * pause).min(60);
        }
        let probe = breaker.admit_request(now + Duration::from_secs(60)).expect("a probe");
        probe.end_request(RequestEnd::Answered);
        assert_eq!(breaker.read_state(), BreakerState::Closed);
    }

    #[test]
    fn five_failures_open_it_and_a_probe_that_nobody_waits_for_is_made_again() {
        let breaker = StoreBreaker::default();
        for _ in 0..5 {
            breaker.admit_request(Instant::now()).unwrap().end_request(RequestEnd::Failed);
        }
        assert_eq!(breaker.read_state(), BreakerState::Open);
        let later = Instant::now() + Duration::from_secs(2);
        drop(breaker.admit_request(later).unwrap());
        assert!(breaker.admit_request(later).is_some());
    }
}
