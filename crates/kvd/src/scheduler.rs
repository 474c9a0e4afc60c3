//! In which order a lane's jobs run: attention ahead of what else waits, as long as it has not had
//! its share.
//!
//! A decode step waits for attention layer by layer, while a prefill that is stored takes the
//! device for milliseconds a chunk. So attention goes first; but while other jobs wait, it may take
//! no more of the device's time in its turn than they took in theirs, within [`SHARE`], overrun by
//! one attend. The others' turn is one job, or short ones until they have taken the least share,
//! overrun by one of any length: stores of a token take microseconds, and would wait milliseconds
//! each. Of many stores that are queued an attend then waits for those whose turn comes while
//! attends before it use up their share: one, where there are none.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The least and the most that attention may take in its turn.
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

/// Whose turn it is where both wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Attends,
    Others,
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
    turn: Turn,
    /// What the others took in their last turn, within [`SHARE`].
    share: Duration,
    /// What attention has taken in its turn, while another job waited.
    taken: Duration,
    /// What the others have taken in theirs.
    used: Duration,
}

impl<J> Turns<J> {
    pub(crate) fn new() -> Self {
        let (attends, others) = (VecDeque::new(), VecDeque::new());
        let [taken, used] = [Duration::ZERO; 2];
        Self { attends, others, came: 0, turn: Turn::Attends, share: *SHARE.start(), taken, used }
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
                before || self.turn == Turn::Attends
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
            Kind::Attend => {
                self.taken += took;
                if self.taken >= self.share {
                    (self.turn, self.taken) = (Turn::Others, Duration::ZERO);
                }
            }
            // As above: their turn begins where an attend waits.
            Kind::Other | Kind::AfterAll if self.attends.is_empty() => {
                self.share = took.clamp(*SHARE.start(), *SHARE.end());
                [self.taken, self.used] = [Duration::ZERO; 2];
                self.turn = Turn::Attends;
            }
            Kind::Other | Kind::AfterAll => {
                self.used += took;
                if self.used >= *SHARE.start() {
                    self.share = self.used.min(*SHARE.end());
                    [self.taken, self.used] = [Duration::ZERO; 2];
                    self.turn = Turn::Attends;
                }
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
    fn a_long_attend_lets_short_jobs_pass_for_the_least_share() {
        assert_eq!(order(turns(3, 3), 50, 1), [0, 100, 101, 1, 102, 2]);
        assert_eq!(order(turns(3, 3), 50, 2), [0, 100, 1, 101, 2, 102]);
    }

    #[test]
    fn jobs_that_take_next_to_nothing_share_one_turn() {
        // As stores of one token do, and jobs whose caller has left.
        let expected: Vec<u32> = [0].into_iter().chain(100..120).chain([1, 2]).collect();
        assert_eq!(order(turns(3, 20), 50, 0), expected);
    }

    #[test]
    fn what_the_others_did_not_use_of_their_turn_is_theirs_when_they_come_again() {
        let mut turns = turns(2, 1);
        let took = [3, 1, 5].map(Duration::from_millis);
        for (job, took) in [0, 100, 1].into_iter().zip(took) {
            let (kind, next) = turns.next().unwrap();
            assert_eq!(next, job);
            turns.ran(kind, took);
        }
        turns.push(Kind::Attend, 2);
        turns.push(Kind::Other, 101);
        assert_eq!(turns.next(), Some((Kind::Other, 101)));
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
