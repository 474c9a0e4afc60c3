//! How long a side looks for the other's next word before it sleeps.

use std::time::{Duration, Instant};

/// Two looks so far apart were not of a thread that had its core all the time.
const LOST_CORE: Duration = Duration::from_micros(50);
/// Waits without a look once looks are in vain: others have work for the core, or waits are long.
const WAITS_ASLEEP: u32 = 64;
/// Looks in vain are halved down to this part of the most, and then left.
const LEAST_PART: u32 = 8;

/// Looks before a sleep, for as long as that is of use: half as long after each look in vain, and
/// not at all for a while where that was of no use, or another thread took the core meanwhile.
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

    /// Looks until `is_there`, or for so long as is of use; whether it was.
    ///
    /// # Errors
    /// As `is_there`.
    pub fn look_for<E>(
        &mut self,
        mut is_there: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let spin = self.next_spin();
        if is_there()? {
            return Ok(true);
        }
        if spin.is_zero() {
            return Ok(false);
        }
        let began = Instant::now();
        let mut before = began;
        let found = loop {
            std::hint::spin_loop();
            if is_there()? {
                break true;
            }
            let now = Instant::now();
            if self.note_look(now - before) || now - began >= spin {
                break false;
            }
            before = now;
        };
        self.note_end(found);
        Ok(found)
    }

    /// How long the next wait is looked in.
    fn next_spin(&mut self) -> Duration {
        if self.asleep > 0 {
            self.asleep -= 1;
            return Duration::ZERO;
        }
        self.now
    }

    /// Notes the time between two looks; whether another thread had the core.
    fn note_look(&mut self, apart: Duration) -> bool {
        let is_lost = apart >= LOST_CORE;
        if is_lost {
            self.asleep = WAITS_ASLEEP;
        }
        is_lost
    }

    /// Notes whether a look was of use.
    fn note_end(&mut self, found: bool) {
        self.now = if found { self.most.min(self.now * 2) } else { self.now / 2 };
        if self.now < self.most / LEAST_PART {
            self.asleep = WAITS_ASLEEP;
            self.now = self.most;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const MOST: Duration = Duration::from_micros(160);

    #[test]
    fn looks_in_vain_become_shorter_and_then_none_for_some_waits() {
        let mut spin = AdaptiveSpin::up_to(MOST);
        let mut spins = Vec::new();
        for _ in 0..4 {
            spins.push(spin.next_spin().as_micros());
            spin.note_end(false);
        }
        assert_eq!(spins, [160, 80, 40, 20]);
        for _ in 0..WAITS_ASLEEP {
            assert_eq!(spin.next_spin(), Duration::ZERO);
        }
        // Then it tries again.
        assert_eq!(spin.next_spin(), MOST);
        spin.note_end(false);
        spin.note_end(true);
        assert_eq!(spin.next_spin(), MOST);
    }

    #[test]
    fn who_lost_its_core_sleeps_for_some_waits() {
        let mut spin = AdaptiveSpin::up_to(MOST);
        assert!(!spin.note_look(LOST_CORE / 2) && spin.note_look(LOST_CORE));
        for _ in 0..WAITS_ASLEEP {
            assert_eq!(spin.next_spin(), Duration::ZERO);
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
