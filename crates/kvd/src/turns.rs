//! In which order a lane's jobs run: attention ahead of what else waits, as long as it has not had
//! its share.
//!
//! A decode step waits for attention and for nothing else, while a prefill that is stored takes the
//! device for milliseconds a chunk. So attention goes first; but when other jobs wait, it may take
//! no more of the device's time between two of them than the last of them took, or [`QUANTUM`].
//! Neither starves: an attend waits for one other job at most, however many are queued.

use std::collections::VecDeque;
use std::time::Duration;

/// Time that attention may take before another job in any case.
const QUANTUM: Duration = Duration::from_millis(2);

/// What a job is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Attention over tokens that are stored already.
    Attend,
    /// Everything else, in the order it came.
    Other,
}

/// Jobs that wait.
pub(crate) struct Turns<J> {
    attends: VecDeque<J>,
    others: VecDeque<J>,
    /// What the last other job took, at least the quantum.
    share: Duration,
    /// What attention has taken while another job waited, since the last of them.
    taken: Duration,
}

impl<J> Turns<J> {
    pub(crate) fn new() -> Self {
        let (attends, others) = (VecDeque::new(), VecDeque::new());
        Self { attends, others, share: QUANTUM, taken: Duration::ZERO }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.attends.is_empty() && self.others.is_empty()
    }

    pub(crate) fn push(&mut self, kind: Kind, job: J) {
        match kind {
            Kind::Attend => self.attends.push_back(job),
            Kind::Other => self.others.push_back(job),
        }
    }

    /// The next job, and what to tell [`Turns::ran`] of it.
    pub(crate) fn next(&mut self) -> Option<(Kind, J)> {
        let attend = self.others.is_empty() || self.taken < self.share;
        if let Some(job) = attend.then(|| self.attends.pop_front()).flatten() {
            return Some((Kind::Attend, job));
        }
        let other = self.others.pop_front().map(|job| (Kind::Other, job));
        other.or_else(|| self.attends.pop_front().map(|job| (Kind::Attend, job)))
    }

    /// A job of that kind took so long.
    pub(crate) fn ran(&mut self, kind: Kind, took: Duration) {
        match kind {
            // What nobody waited for was nobody's share.
            Kind::Attend if self.others.is_empty() => self.taken = Duration::ZERO,
            Kind::Attend => self.taken += took,
            Kind::Other => (self.share, self.taken) = (took.max(QUANTUM), Duration::ZERO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(attends: u32, others: u32) -> Turns<u32> {
        let mut turns = Turns::new();
        (0..others).for_each(|job| turns.push(Kind::Other, 100 + job));
        (0..attends).for_each(|job| turns.push(Kind::Attend, job));
        turns
    }

    /// The order of jobs that take so many milliseconds each.
    fn order(mut turns: Turns<u32>, attend_ms: u64, other_ms: u64) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some((kind, job)) = turns.next() {
            order.push(job);
            let ms = if kind == Kind::Attend { attend_ms } else { other_ms };
            turns.ran(kind, Duration::from_millis(ms));
        }
        assert!(turns.is_empty());
        order
    }

    #[test]
    fn attention_goes_first_until_it_has_had_as_much_time() {
        // Two of one millisecond are the quantum; then as many as another job took.
        let expected = [0, 1, 100, 2, 3, 4, 5, 6, 101, 7, 8, 9, 102];
        assert_eq!(order(turns(10, 3), 1, 5), expected);
    }

    #[test]
    fn each_kind_runs_in_the_order_it_came() {
        assert_eq!(order(turns(0, 3), 1, 1), [100, 101, 102]);
        assert_eq!(order(turns(3, 0), 50, 1), [0, 1, 2]);
    }

    #[test]
    fn a_long_attend_lets_one_other_job_pass() {
        assert_eq!(order(turns(3, 3), 50, 1), [0, 100, 1, 101, 2, 102]);
    }

    #[test]
    fn attention_that_nobody_waited_for_is_not_held_against_it() {
        let mut turns = turns(2, 0);
        let (kind, _) = turns.next().unwrap();
        turns.ran(kind, Duration::from_secs(1));
        turns.push(Kind::Other, 100);
        assert_eq!(turns.next(), Some((Kind::Attend, 1)));
    }
}
