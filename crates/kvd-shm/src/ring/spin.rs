//! How long a side looks for the other's next word before it sleeps.

use std::time::{Duration, Instant};

/// Two looks so far apart were not of a thread that had its core all the time.
const LOST_CORE: Duration = Duration::from_micros(50);
/// Waits without a look after a core was lost: others have work for it.
const WAITS_ASLEEP: u32 = 64;
/// The least that is looked for, as a part of the most: what comes early is seen again.
const LEAST_PART: u32 = 16;

/// Looks before a sleep, for as long as that is of use: less after waits that were longer than the
/// most, not at all for a while where another thread took the core meanwhile.
#[derive(Debug)]
pub struct AdaptiveSpin {
    most: Duration,
    now: Duration,
    /// Waits that are not to be looked in.
    asleep: u32,
}

impl AdaptiveSpin {
    /// Looks for so long at most.
    #[must_use]
    pub fn up_to(most: Duration) -> Self {
        Self { most, now: most, asleep: 0 }
    }

    /// How long the next wait is looked in.
    #[must_use]
    pub fn next_spin(&self) -> Duration {
        if self.asleep > 0 { Duration::ZERO } else { self.now }
    }

    /// Looks until `is_there`, or for so long as is of use; whether it was.
    ///
    /// # Errors
    /// As `is_there`.
    pub fn look_for<E>(
        &mut self,
        mut is_there: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let spin = self.next_spin();
        let began = Instant::now();
        let mut before = began;
        loop {
            if is_there()? {
                return Ok(true);
            }
            let now = Instant::now();
            if self.note_look(now - before) || now - began >= spin {
                return Ok(false);
            }
            before = now;
            std::hint::spin_loop();
        }
    }

    /// Notes the time between two looks; whether another thread had the core.
    fn note_look(&mut self, apart: Duration) -> bool {
        let is_lost = apart >= LOST_CORE;
        if is_lost {
            self.asleep = WAITS_ASLEEP;
        }
        is_lost
    }

    /// Notes how long a wait was in all, however it ended.
    pub fn note_wait(&mut self, took: Duration) {
        self.asleep = self.asleep.saturating_sub(1);
        self.now =
            if took <= self.most { self.most } else { (self.now / 2).max(self.most / LEAST_PART) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const MOST: Duration = Duration::from_micros(160);

    #[test]
    fn what_takes_longer_is_looked_for_less_and_what_comes_early_more_again() {
        let mut spin = AdaptiveSpin::up_to(MOST);
        let mut spins = Vec::new();
        for _ in 0..6 {
            spins.push(spin.next_spin().as_micros());
            spin.note_wait(MOST * 2);
        }
        assert_eq!(spins, [160, 80, 40, 20, 10, 10]);
        spin.note_wait(MOST);
        assert_eq!(spin.next_spin(), MOST);
    }

    #[test]
    fn who_lost_its_core_sleeps_for_some_waits() {
        let mut spin = AdaptiveSpin::up_to(MOST);
        assert!(!spin.note_look(LOST_CORE / 2) && spin.note_look(LOST_CORE));
        for _ in 0..WAITS_ASLEEP {
            assert_eq!(spin.next_spin(), Duration::ZERO);
            spin.note_wait(MOST / 2);
        }
        assert_eq!(spin.next_spin(), MOST);
    }

    #[test]
    fn a_look_ends_with_what_it_looks_for_and_without_it_at_its_time() {
        let mut looks = 0;
        let mut spin = AdaptiveSpin::up_to(Duration::from_secs(60));
        let found = spin.look_for(|| {
            looks += 1;
            Ok::<_, Infallible>(looks == 3)
        });
        // Another thread may have had the core.
        assert!(found == Ok(true) && looks == 3 || spin.next_spin().is_zero());
        let mut never = AdaptiveSpin::up_to(Duration::ZERO);
        assert_eq!(never.look_for(|| Ok::<_, Infallible>(false)), Ok(false));
        assert_eq!(never.look_for(|| Ok::<_, Infallible>(true)), Ok(true));
    }
}
