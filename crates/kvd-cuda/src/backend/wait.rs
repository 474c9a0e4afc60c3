//! The host's wait for an event, which ends: behind a kernel that hangs the lane's thread, and all
//! who wait for it, would wait for ever.

use crate::driver::{Driver, DriverError, EventId};
use std::thread;
use std::time::{Duration, Instant};

/// How long the driver is asked again and again, as its own wait would: most kernels have ended by
/// then, and a sleep would add to their time.
const ASKING: Duration = Duration::from_millis(1);

/// Sleeps are this part of what was waited before them, which is all that they can add, and
/// [`SLEEP_MAX`] at most.
const SLEEP_PART: u32 = 16;
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// How long the host waits for work of the device.
#[derive(Clone, Copy)]
pub(super) struct WaitLimit(pub(super) Duration);

impl WaitLimit {
    /// Waits until an event has happened.
    pub(super) fn wait_event(
        self,
        driver: &mut dyn Driver,
        event: EventId,
    ) -> Result<(), DriverError> {
        let start = Instant::now();
        loop {
            // Before the question: a process that was stopped in between has not waited.
            let waited = start.elapsed();
            if driver.is_done(event)? {
                return Ok(());
            }
            if waited >= self.0 {
                driver.abandon_device();
                return Err(DriverError::Hung(self.0));
            }
            match sleep_time(waited) {
                None => thread::yield_now(),
                Some(pause) => thread::sleep(pause),
            }
        }
    }
}

/// How long to sleep before the next question.
fn sleep_time(waited: Duration) -> Option<Duration> {
    (waited >= ASKING).then(|| (waited / SLEEP_PART).min(SLEEP_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_work_is_asked_for_at_once_and_long_work_costs_neither_a_core_nor_much_time() {
        let micros = Duration::from_micros;
        assert_eq!([0, 20, 999].map(|waited| sleep_time(micros(waited))), [None; 3]);
        let long = [1000, 4000, 16_000, 30_000_000].map(|waited| sleep_time(micros(waited)));
        assert_eq!(
            long,
            [62_500, 250_000, 1_000_000, 1_000_000].map(|ns| Some(Duration::from_nanos(ns)))
        );
    }
}
