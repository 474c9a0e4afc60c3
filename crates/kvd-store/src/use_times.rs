//! When a sequence was opened, and when a call last named it. One atomic, no locks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Times of a sequence.
#[derive(Debug)]
pub(crate) struct UseTimes {
    opened: Instant,
    /// Nanoseconds from then to the last use: enough for five centuries.
    used: AtomicU64,
}

impl UseTimes {
    /// Opened, and used, now.
    pub(crate) fn begin_now() -> Self {
        Self { opened: Instant::now(), used: AtomicU64::new(0) }
    }

    /// A call names the sequence now. Of calls at once the latest counts.
    pub(crate) fn note_use(&self) {
        self.used.fetch_max(self.opened.elapsed().as_nanos() as u64, Relaxed);
    }

    /// Since it was opened.
    pub(crate) fn age_at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.opened)
    }

    /// Since a call named it.
    pub(crate) fn idle_at(&self, now: Instant) -> Duration {
        self.age_at(now).saturating_sub(Duration::from_nanos(self.used.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_ends_idleness_and_leaves_the_age() {
        let times = UseTimes::begin_now();
        let later = times.opened + Duration::from_secs(60);
        assert_eq!(times.idle_at(later), Duration::from_secs(60));
        times.used.store(Duration::from_secs(45).as_nanos() as u64, Relaxed);
        assert_eq!(times.idle_at(later), Duration::from_secs(15));
        assert_eq!(times.age_at(later), Duration::from_secs(60));
        // One that read its clock before is no news.
        times.note_use();
        assert_eq!(times.idle_at(later), Duration::from_secs(15));
        assert_eq!(times.idle_at(times.opened), Duration::ZERO);
    }
}
