//! Chooses who is served next of several that share something by time: the one that has had least
//! of it for its weight (start-time fair queueing).
//!
//! Each member has a *start*, in seconds of the share that it would have had alone. The least one
//! is served next, and moves on by what that took over its weight. Whoever comes anew begins at the
//! *now* that all share: idle time is not saved up, and what one took too much is kept until the
//! others are there. The now moves with all service, so that newcomers without end neither starve
//! those who were there before nor leave their shares behind.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

/// Members that whoever begins anew has room for at most.
const SPARE_MEMBERS: usize = 16;

/// Work that waits.
pub(crate) trait WaitingWork {
    /// Whether there is none.
    fn is_empty(&self) -> bool;

    /// The serial number of what came first.
    fn oldest_serial(&self) -> u64;

    /// As new, with what memory it has; called where there is none of it.
    fn begin_anew(&mut self);
}

/// Members that share.
pub(crate) struct TimeShares<K, V> {
    /// Where newcomers start: what each member would have had by now.
    now: f64,
    /// Members that waited when the last was chosen.
    waited: usize,
    members: HashMap<K, ShareMember<V>>,
    /// The work of one who was forgotten, for the memory that it has.
    spare: Option<V>,
}

/// A member that is being served.
pub(crate) struct ServedMember<'a, K> {
    pub(crate) key: &'a K,
    /// How long so far.
    pub(crate) had: Duration,
    pub(crate) weight: u32,
}

struct ShareMember<V> {
    start: f64,
    work: V,
}

impl<K, V> Default for TimeShares<K, V> {
    fn default() -> Self {
        Self { now: 0.0, waited: 0, members: HashMap::new(), spare: None }
    }
}

impl<K: Clone + Eq + Hash, V: WaitingWork + Default> TimeShares<K, V> {
    /// The work of a member, to which some is about to be added.
    pub(crate) fn join_member(&mut self, key: &K) -> &mut V {
        let now = self.now;
        let spare = &mut self.spare;
        let new = || ShareMember { start: now, work: spare.take().unwrap_or_default() };
        let member = self.members.entry(key.clone()).or_insert_with(new);
        if member.work.is_empty() {
            member.start = member.start.max(now);
        }
        &mut member.work
    }

    /// The work of a member that has some.
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.members.get_mut(key).map(|member| &mut member.work)
    }

    /// The member whose turn it is.
    pub(crate) fn next(&mut self) -> Option<K> {
        let now = self.now;
        // Of those that wait for nothing only what they had too much is remembered.
        self.members.retain(|_, member| !member.work.is_empty() || member.start > now);
        let waiting = self.members.iter().filter(|(_, member)| !member.work.is_empty());
        let order = |a: &ShareMember<V>, b: &ShareMember<V>| {
            a.start
                .total_cmp(&b.start)
                .then_with(|| a.work.oldest_serial().cmp(&b.work.oldest_serial()))
        };
        let mut waited = 0;
        let next = waiting.inspect(|_| waited += 1).min_by(|(_, a), (_, b)| order(a, b));
        self.waited = waited;
        let Some((key, member)) = next else {
            // Nobody waits: nobody has had too much.
            self.members.clear();
            return None;
        };
        self.now = self.now.max(member.start);
        Some(key.clone())
    }

    /// Forgets who was served, where nobody waits: nobody has had too much.
    pub(crate) fn forget_served(&mut self) {
        if !self.is_empty() {
            return;
        }
        if let Some((_, ShareMember { mut work, .. })) = self.members.drain().next() {
            work.begin_anew();
            self.spare = Some(work);
        }
    }

    /// A member of that weight was served for so long.
    pub(crate) fn charge_time(&mut self, key: &K, took: Duration, weight: u32) {
        let now = self.now;
        let spare = &mut self.spare;
        let new = || ShareMember { start: now, work: spare.take().unwrap_or_default() };
        let member = self.members.entry(key.clone()).or_insert_with(new);
        let share = took.as_secs_f64() / f64::from(weight.max(1));
        member.start += share;
        // Slower by one member, so that who comes anew goes before who was just served.
        self.now += share / (self.waited + 1) as f64;
    }

    /// Whether a member that waits for nothing would go before one that is being served.
    pub(crate) fn goes_before(&self, coming: &K, served: ServedMember<'_, K>) -> bool {
        let start = |key| self.members.get(key).map_or(self.now, |member| member.start);
        let waits = self.members.get(coming).is_some_and(|member| !member.work.is_empty());
        let ServedMember { key, had, weight } = served;
        let share = had.as_secs_f64() / f64::from(weight.max(1));
        !waits && coming != key && start(coming).max(self.now) < start(key) + share
    }

    /// The work of all members.
    pub(crate) fn each_work(&mut self) -> impl Iterator<Item = &mut V> {
        self.members.values_mut().map(|member| &mut member.work)
    }

    /// All members and their work.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.members.iter().map(|(key, member)| (key, &member.work))
    }
}

impl<K: Eq + Hash, V: WaitingWork> WaitingWork for TimeShares<K, V> {
    fn is_empty(&self) -> bool {
        self.members.values().all(|member| member.work.is_empty())
    }

    fn oldest_serial(&self) -> u64 {
        let waiting = self.members.values().filter(|member| !member.work.is_empty());
        waiting.map(|member| member.work.oldest_serial()).min().unwrap_or(u64::MAX)
    }

    fn begin_anew(&mut self) {
        (self.now, self.waited) = (0.0, 0);
        self.members.clear();
        self.members.shrink_to(SPARE_MEMBERS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Jobs that never run out.
    #[derive(Default)]
    struct Endless(bool);

    impl WaitingWork for Endless {
        fn is_empty(&self) -> bool {
            !self.0
        }

        fn oldest_serial(&self) -> u64 {
            0
        }

        fn begin_anew(&mut self) {
            self.0 = false;
        }
    }

    /// How long each was served of `rounds` jobs, which take a member so long each.
    fn served(members: &[(u32, u64, u32)], rounds: usize) -> Vec<u64> {
        let mut shares = TimeShares::<u32, Endless>::default();
        members.iter().for_each(|(key, ..)| shares.join_member(key).0 = true);
        let mut times = vec![0; members.len()];
        for _ in 0..rounds {
            let key = shares.next().unwrap();
            let at = members.iter().position(|member| member.0 == key).unwrap();
            let (_, millis, weight) = members[at];
            shares.charge_time(&key, Duration::from_millis(millis), weight);
            times[at] += millis;
        }
        times
    }

    #[test]
    fn time_is_shared_by_weight_whatever_a_job_takes() {
        let times = served(&[(1, 1, 1), (2, 50, 1), (3, 7, 2)], 10_000);
        let total: u64 = times.iter().sum();
        for (time, share) in times.iter().zip([0.25, 0.25, 0.5]) {
            let of_all = *time as f64 / total as f64;
            assert!((of_all - share).abs() < 0.01, "{times:?}");
        }
    }

    #[test]
    fn who_comes_anew_is_next_and_has_saved_nothing_up() {
        let mut shares = TimeShares::<u32, Endless>::default();
        shares.join_member(&1).0 = true;
        for _ in 0..1000 {
            assert_eq!(shares.next(), Some(1));
            shares.charge_time(&1, Duration::from_millis(10), 1);
        }
        shares.join_member(&2).0 = true;
        let mut turns = Vec::new();
        for _ in 0..6 {
            let key = shares.next().unwrap();
            shares.charge_time(&key, Duration::from_millis(10), 1);
            turns.push(key);
        }
        assert_eq!(turns[0], 2);
        let of_first = turns.iter().filter(|key| **key == 1).count();
        assert!((2..=3).contains(&of_first), "{turns:?}");
    }

    #[test]
    fn who_comes_passes_one_that_is_served_and_has_had_more_for_its_weight() {
        let mut shares = TimeShares::<u32, Endless>::default();
        let millis = Duration::from_millis;
        let served = |had, weight| ServedMember { key: &1, had: millis(had), weight };
        shares.join_member(&1).0 = true;
        assert_eq!(shares.next(), Some(1));
        assert!(shares.goes_before(&2, served(1, 1)), "it was never here");
        assert!(!shares.goes_before(&2, served(0, 1)), "both have had nothing");
        assert!(!shares.goes_before(&1, served(1, 1)), "its own work has its order");
        // It has had 10 ms, and the other may have as much for its weight before.
        shares.charge_time(&2, millis(10), 1);
        assert!(!shares.goes_before(&2, served(9, 1)) && shares.goes_before(&2, served(11, 1)));
        assert!(!shares.goes_before(&2, served(29, 3)) && shares.goes_before(&2, served(31, 3)));
        shares.join_member(&2).0 = true;
        assert!(!shares.goes_before(&2, served(31, 3)), "what it has waiting was chosen among");
    }

    #[test]
    fn who_leaves_after_a_long_job_has_not_had_it_for_nothing() {
        let mut shares = TimeShares::<u32, Endless>::default();
        shares.join_member(&1).0 = true;
        shares.join_member(&2).0 = true;
        let mut long = 0;
        for _ in 0..1000 {
            let key = shares.next().unwrap();
            if key == 1 {
                // It sends its next job, of 50 ms, only after the answer to this one.
                shares.get_mut(&1).unwrap().0 = false;
                shares.charge_time(&1, Duration::from_millis(50), 1);
                shares.join_member(&1).0 = true;
                long += 1;
            } else {
                shares.charge_time(&2, Duration::from_millis(1), 1);
            }
        }
        assert!((15..=25).contains(&long), "{long} jobs of 50 ms beside those of 1 ms");
    }

    #[test]
    fn newcomers_without_end_neither_starve_a_member_nor_pile_up() {
        let mut shares = TimeShares::<u32, Endless>::default();
        shares.join_member(&0).0 = true;
        let mut first = 0;
        for newcomer in 1..=3000 {
            // Always one that was never here, with one job of a millisecond.
            shares.join_member(&newcomer).0 = true;
            let key = shares.next().unwrap();
            if key == 0 {
                first += 1;
            } else {
                shares.get_mut(&key).unwrap().0 = false;
            }
            shares.charge_time(&key, Duration::from_millis(1), 1);
        }
        let left = shares.iter().filter(|(_, work)| !work.0).count();
        assert!(first > 20, "the first was served {first} times");
        assert!(left < 200, "{left} that have left are remembered");
    }

    #[test]
    fn those_that_have_left_are_forgotten() {
        let mut shares = TimeShares::<u32, Endless>::default();
        for key in 0..100 {
            shares.join_member(&key).0 = true;
            assert!(shares.next().is_some());
            shares.get_mut(&key).unwrap().0 = false;
            shares.charge_time(&key, Duration::from_millis(1), 1);
        }
        assert_eq!(shares.next(), None);
        assert_eq!(shares.iter().count(), 0);
    }
}
