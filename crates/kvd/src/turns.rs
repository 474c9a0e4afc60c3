//! In which order a lane's jobs run: attention ahead of what else waits, as long as it has not had
//! its share.
//!
//! A decode step waits for attention layer by layer, while a prefill that is stored takes the
//! device for milliseconds a chunk. So attention goes first; but while other jobs wait, it may take
//! no more of the device's time between two of them than the last of them took, within
//! [`SHARE`], overrun by one attend. Of many stores that are queued an attend then waits for those
//! whose turn comes while attends before it use up their share: one, where there are none.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The least and the most that attention may take between two other jobs.
const SHARE: RangeInclusive<Duration> = Duration::from_millis(2)..=Duration::from_millis(100);

/// What a job is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Attention over tokens that are stored already, and what carries its bytes.
    Attend,
    /// Everything else, in the order it came.
    Other,
    /// The same, and no earlier than every attend that came before: what takes a model away.
    AfterAll,
}

struct Waiting<J> {
    kind: Kind,
    /// Counts all jobs.
    serial: u64,
    job: J,
}

/// Jobs that wait.
pub(crate) struct Turns<J> {
    attends: VecDeque<Waiting<J>>,
    others: VecDeque<Waiting<J>>,
    came: u64,
    /// What the last other job took, within [`SHARE`].
    share: Duration,
    /// What attention has taken while another job waited, since the last of them.
    taken: Duration,
}

impl<J> Turns<J> {
    pub(crate) fn new() -> Self {
        let (attends, others) = (VecDeque::new(), VecDeque::new());
        Self { attends, others, came: 0, share: *SHARE.start(), taken: Duration::ZERO }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.attends.is_empty() && self.others.is_empty()
    }

    pub(crate) fn push(&mut self, kind: Kind, job: J) {
        let serial = self.came;
        self.came += 1;
        let queue = if kind == Kind::Attend { &mut self.attends } else { &mut self.others };
        queue.push_back(Waiting { kind, serial, job });
    }

    /// The next job, and what to tell [`Turns::ran`] of it.
    pub(crate) fn next(&mut self) -> Option<(Kind, J)> {
        let attend_first = match (self.attends.front(), self.others.front()) {
            (Some(_), None) => true,
            (Some(attend), Some(other)) => {
                let before = other.kind == Kind::AfterAll && attend.serial < other.serial;
                before || self.taken < self.share
            }
            (None, _) => false,
        };
        let queue = if attend_first { &mut self.attends } else { &mut self.others };
        queue.pop_front().map(|waiting| (waiting.kind, waiting.job))
    }

    /// A job of that kind took so long.
    pub(crate) fn ran(&mut self, kind: Kind, took: Duration) {
        match kind {
            // What nobody waited for was nobody's share.
            Kind::Attend if self.others.is_empty() => self.taken = Duration::ZERO,
            Kind::Attend => self.taken += took,
            Kind::Other | Kind::AfterAll => {
                self.share = took.clamp(*SHARE.start(), *SHARE.end());
                self.taken = Duration::ZERO;
            }
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
        // Two of one millisecond are the least share; then as many as another job took.
        let expected = [0, 1, 100, 2, 3, 4, 5, 6, 101, 7, 8, 9, 102];
        assert_eq!(order(turns(10, 3), 1, 5), expected);
    }

    #[test]
    fn one_long_job_does_not_give_attention_as_long() {
        let expected = [0, 100, 1, 2, 101, 3, 102];
        assert_eq!(order(turns(4, 3), 50, 60_000), expected);
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
    fn what_is_after_all_waits_for_earlier_attends_and_for_no_later_one() {
        let mut turns = turns(3, 1);
        turns.push(Kind::AfterAll, 200);
        turns.push(Kind::Attend, 3);
        turns.push(Kind::Other, 101);
        assert_eq!(order(turns, 50, 1), [0, 100, 1, 2, 200, 3, 101]);
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
