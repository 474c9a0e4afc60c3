//! In which order a device's jobs run: attention ahead of what else waits, as long as it has not
//! had its share; and of either kind the jobs of whoever has had least of the device's time.
//!
//! A decode step waits for attention layer by layer, while a prefill that is stored takes the
//! device for milliseconds a chunk. So attention goes first; but while other jobs wait, it may take
//! no more of the device's time in its turn than they took in theirs, within [`SHARE`], overrun by
//! one slice of an attend. The others' turn is one job, or short ones until they have taken the
//! least share, overrun by one of any length: stores of a token take microseconds, and would wait
//! milliseconds each. A store is cut too: in attention's turn it gives way as soon as an attend
//! comes, in the others' turn after the least share.
//!
//! Within a kind namespaces share the time by their weights, and the connections of a namespace
//! share its part alike ([`crate::shares`]). Jobs of one connection run in the order they came; an
//! attend that pauses goes behind those that its connection has waiting.

use crate::shares::{ServedMember, TimeShares, WaitingWork};
use kvd_core::Namespace;
use kvd_store::QuotaTable;
use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least and the most that attention may take in its turn.
const SHARE: RangeInclusive<Duration> = Duration::from_millis(2)..=Duration::from_millis(100);

/// Time of others after which a transfer that waits has its turn, once.
const TRANSFER_WAIT: Duration = Duration::from_millis(20);

/// Purpose of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobKind {
    /// Attention over tokens that are stored already, and what carries its bytes.
    Attend,
    /// Everything else, in the order it came.
    Other,
    /// As the others. Once one has begun it is finished, whoever leaves, before another of the
    /// others begins: what it writes is nobody else's, and its memory is taken.
    Store,
    /// As the others, and no earlier than every attend that came before: what takes a model away.
    AfterAll,
    /// Bytes that leave the device for a tier or come back: after all others, but for a slice each
    /// [`TRANSFER_WAIT`], so that they end.
    Transfer,
}

impl JobKind {
    /// Where the kind is in [`crate::metrics::DeviceMetrics::KINDS`].
    pub(crate) fn index(self) -> usize {
        usize::from(self != Self::Attend)
    }
}

/// Whose jobs count together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OwnerKey {
    pub(crate) namespace: Namespace,
    /// The connection.
    pub(crate) connection: u64,
}

/// A job as the scheduler knows it.
#[derive(Clone, Debug)]
pub(crate) struct JobTicket {
    /// Counts all jobs: the job's name.
    pub(crate) serial: u64,
    pub(crate) kind: JobKind,
    pub(crate) owner: OwnerKey,
    /// Whether it takes one of the places that are limited.
    pub(crate) is_counted: bool,
}

/// An attend that has the device.
pub(crate) struct RunningAttend {
    pub(crate) namespace: Namespace,
    pub(crate) began: Instant,
}

/// A job that waits.
pub(crate) struct WaitingJob<J> {
    pub(crate) ticket: JobTicket,
    pub(crate) job: J,
}

/// The kind whose turn it is where both wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NextKind {
    Attends,
    Others,
}

/// Jobs of one connection, in the order they run.
struct ConnectionLine<J>(VecDeque<WaitingJob<J>>);

impl<J> Default for ConnectionLine<J> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<J> WaitingWork for ConnectionLine<J> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn oldest_serial(&self) -> u64 {
        self.0.front().map_or(u64::MAX, |waiting| waiting.ticket.serial)
    }

    fn begin_anew(&mut self) {
        self.0 = VecDeque::new();
    }
}

/// A connection, and how many places its jobs have.
struct OwnerPlaces {
    owner: OwnerKey,
    places: usize,
}

/// Jobs of one kind, by namespace and connection.
struct KindQueue<J> {
    namespaces: TimeShares<Namespace, TimeShares<u64, ConnectionLine<J>>>,
    waiting: usize,
    /// Jobs that have a place.
    counted: usize,
}

impl<J> KindQueue<J> {
    fn new() -> Self {
        Self { namespaces: TimeShares::default(), waiting: 0, counted: 0 }
    }

    fn find_line(&mut self, owner: &OwnerKey) -> Option<&mut ConnectionLine<J>> {
        self.namespaces.get_mut(&owner.namespace)?.get_mut(&owner.connection)
    }

    fn push(&mut self, waiting: WaitingJob<J>) {
        self.waiting += 1;
        self.counted += usize::from(waiting.ticket.is_counted);
        let OwnerKey { namespace, connection } = &waiting.ticket.owner;
        self.namespaces.join_member(namespace).join_member(connection).0.push_back(waiting);
    }

    fn took_out(&mut self, waiting: Option<WaitingJob<J>>) -> Option<WaitingJob<J>> {
        if let Some(waiting) = &waiting {
            self.waiting -= 1;
            self.counted -= usize::from(waiting.ticket.is_counted);
        }
        waiting
    }

    fn pop(&mut self) -> Option<WaitingJob<J>> {
        let namespace = self.namespaces.next()?;
        let connections = self.namespaces.get_mut(&namespace)?;
        let connection = connections.next()?;
        let next = connections.get_mut(&connection)?.0.pop_front();
        self.took_out(next)
    }

    /// Takes out at most so many jobs that are first in their line: one of each connection, then
    /// the next of each.
    fn take_first(&mut self, most: usize, wants: impl Fn(&J) -> bool) -> Vec<WaitingJob<J>> {
        let mut taken = Vec::new();
        loop {
            let before = taken.len();
            for connections in self.namespaces.each_work() {
                for line in connections.each_work() {
                    let wanted = line.0.front().is_some_and(|waiting| wants(&waiting.job));
                    if wanted && taken.len() < most {
                        taken.extend(line.0.pop_front());
                    }
                }
            }
            if taken.len() == before {
                break;
            }
        }
        self.waiting -= taken.len();
        self.counted -= taken.iter().filter(|waiting| waiting.ticket.is_counted).count();
        taken
    }

    fn remove(&mut self, ticket: &JobTicket) -> Option<WaitingJob<J>> {
        let line = &mut self.find_line(&ticket.owner)?.0;
        let at = line.iter().position(|waiting| waiting.ticket.serial == ticket.serial)?;
        let removed = line.remove(at);
        self.took_out(removed)
    }

    /// Places that each connection has.
    fn count_places(&self) -> impl Iterator<Item = OwnerPlaces> {
        self.namespaces.iter().flat_map(|(namespace, connections)| {
            connections.iter().map(|(connection, line)| {
                let places = line.0.iter().filter(|waiting| waiting.ticket.is_counted).count();
                let owner = OwnerKey { namespace: namespace.clone(), connection: *connection };
                OwnerPlaces { owner, places }
            })
        })
    }

    fn count_places_of(&self, owner: &OwnerKey) -> usize {
        self.count_places().find(|of| of.owner == *owner).map_or(0, |of| of.places)
    }
}

/// Jobs that wait.
pub(crate) struct JobScheduler<J> {
    attends: KindQueue<J>,
    others: KindQueue<J>,
    /// The store that has begun and gave way to attends.
    begun_store: Option<WaitingJob<J>>,
    /// Jobs that wait for attends which came before.
    after_all: VecDeque<WaitingJob<J>>,
    /// Jobs of tiers, in the order they came.
    transfers: VecDeque<WaitingJob<J>>,
    /// Time of others since the last of them.
    passed: Duration,
    /// Serial numbers of attends that wait.
    attend_serials: BTreeSet<u64>,
    /// Shares of namespaces, which operators may change at any time.
    weights: Arc<QuotaTable>,
    came: u64,
    turn: NextKind,
    /// Time of the others in their last turn, within [`SHARE`].
    share: Duration,
    /// Time that attention has taken in its turn, while another job waited.
    taken: Duration,
    /// Time that the others have taken in theirs.
    used: Duration,
}

impl<J> JobScheduler<J> {
    pub(crate) fn new(weights: Arc<QuotaTable>) -> Self {
        let [taken, used, passed] = [Duration::ZERO; 3];
        Self {
            attends: KindQueue::new(),
            others: KindQueue::new(),
            begun_store: None,
            after_all: VecDeque::new(),
            transfers: VecDeque::new(),
            passed,
            attend_serials: BTreeSet::new(),
            weights,
            came: 0,
            turn: NextKind::Attends,
            share: *SHARE.start(),
            taken,
            used,
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.waiting_jobs().iter().all(|waiting| *waiting == 0)
    }

    /// Jobs that wait, attends and others.
    pub(crate) fn waiting_jobs(&self) -> [usize; 2] {
        let others = self.next_others() + self.after_all.len() + self.transfers.len();
        [self.attends.waiting, others]
    }

    /// Jobs that may run in the others' turn.
    fn next_others(&self) -> usize {
        self.others.waiting + usize::from(self.begun_store.is_some())
    }

    /// Those of the others that are transfers.
    pub(crate) fn waiting_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// Jobs that have a place, attends and others. A store that has begun has none, as one that
    /// runs.
    pub(crate) fn counted_jobs(&self) -> [usize; 2] {
        let after_all = self.after_all.iter().chain(&self.transfers);
        let after_all = after_all.filter(|waiting| waiting.ticket.is_counted).count();
        [self.attends.counted, self.others.counted + after_all]
    }

    /// Jobs that wait without a place, attends and others.
    pub(crate) fn uncounted_jobs(&self) -> [usize; 2] {
        let ([attends, others], counted) = (self.waiting_jobs(), self.counted_jobs());
        let others = others - usize::from(self.begun_store.is_some());
        [attends - counted[0], others - counted[1]]
    }

    /// The next job's name.
    pub(crate) fn make_ticket(
        &mut self,
        kind: JobKind,
        owner: OwnerKey,
        is_counted: bool,
    ) -> JobTicket {
        self.came += 1;
        JobTicket { serial: self.came, kind, owner, is_counted }
    }

    /// Adds a job, one that comes or one that has paused.
    pub(crate) fn push(&mut self, ticket: JobTicket, job: J) {
        let waiting = WaitingJob { ticket, job };
        match waiting.ticket.kind {
            JobKind::Attend => {
                self.attend_serials.insert(waiting.ticket.serial);
                self.attends.push(waiting);
            }
            JobKind::Other | JobKind::Store => self.others.push(waiting),
            JobKind::AfterAll => self.after_all.push_back(waiting),
            // A paused one goes on before those that came later.
            JobKind::Transfer => {
                let serial = waiting.ticket.serial;
                let at = self.transfers.partition_point(|other| other.ticket.serial < serial);
                self.transfers.insert(at, waiting);
            }
        }
    }

    /// Keeps a store that gave way: it goes on before any other of the others.
    pub(crate) fn keep_begun(&mut self, ticket: JobTicket, job: J) {
        self.begun_store = Some(WaitingJob { ticket, job });
    }

    /// Takes out the store that has begun.
    pub(crate) fn take_begun(&mut self) -> Option<WaitingJob<J>> {
        self.begun_store.take()
    }

    /// Takes out a job that waits; not a store that has begun.
    pub(crate) fn remove(&mut self, ticket: &JobTicket) -> Option<WaitingJob<J>> {
        let is_it = |waiting: &WaitingJob<J>| waiting.ticket.serial == ticket.serial;
        if let Some(at) = self.after_all.iter().position(is_it) {
            return self.after_all.remove(at);
        }
        if let Some(at) = self.transfers.iter().position(is_it) {
            return self.transfers.remove(at);
        }
        if ticket.kind != JobKind::Attend {
            return self.others.remove(ticket);
        }
        self.attend_serials.remove(&ticket.serial);
        self.attends.remove(ticket)
    }

    /// Takes out at most so many attends that are next in their line, one of each connection at a
    /// time, to be done with another's.
    pub(crate) fn take_attends(
        &mut self,
        most: usize,
        wants: impl Fn(&J) -> bool,
    ) -> Vec<WaitingJob<J>> {
        let taken = self.attends.take_first(most, wants);
        for waiting in &taken {
            self.attend_serials.remove(&waiting.ticket.serial);
        }
        taken
    }

    /// Takes out all jobs.
    pub(crate) fn remove_all(&mut self) -> Vec<WaitingJob<J>> {
        self.attend_serials.clear();
        let mut all = Vec::new();
        while let Some(waiting) = self.attends.pop().or_else(|| self.others.pop()) {
            all.push(waiting);
        }
        all.extend(self.begun_store.take());
        all.extend(self.after_all.drain(..));
        all.extend(self.transfers.drain(..));
        all
    }

    /// The job that gives its place up to one of `owner`: the last of the connection that has most,
    /// where that has more even then.
    pub(crate) fn take_from_most(
        &mut self,
        kind: JobKind,
        owner: &OwnerKey,
    ) -> Option<WaitingJob<J>> {
        let queue = if kind == JobKind::Attend { &mut self.attends } else { &mut self.others };
        let own = queue.count_places_of(owner);
        let OwnerPlaces { owner: most, places } =
            queue.count_places().max_by_key(|of| of.places)?;
        if places < own + 2 {
            return None;
        }
        let line = queue.find_line(&most)?;
        let last = line.0.iter().rev().find(|waiting| waiting.ticket.is_counted)?;
        let ticket = last.ticket.clone();
        self.remove(&ticket)
    }

    /// Places that a connection has.
    pub(crate) fn count_for(&self, kind: JobKind, owner: &OwnerKey) -> usize {
        let queue = if kind == JobKind::Attend { &self.attends } else { &self.others };
        queue.count_places_of(owner)
    }

    /// Places that all connections of a namespace have.
    pub(crate) fn count_for_namespace(&self, kind: JobKind, namespace: &Namespace) -> usize {
        let queue = if kind == JobKind::Attend { &self.attends } else { &self.others };
        let own = queue.count_places().filter(|of| of.owner.namespace == *namespace);
        own.map(|of| of.places).sum()
    }

    /// The next job, and what to tell [`JobScheduler::note_run`] of it.
    pub(crate) fn next(&mut self) -> Option<WaitingJob<J>> {
        let oldest = self.attend_serials.first().copied().unwrap_or(u64::MAX);
        while self.after_all.front().is_some_and(|waiting| waiting.ticket.serial < oldest) {
            self.others.push(self.after_all.pop_front()?);
        }
        let others_wait = self.attends.waiting + self.next_others() > 0;
        if !others_wait || self.passed >= TRANSFER_WAIT {
            self.passed = Duration::ZERO;
            if let Some(transfer) = self.transfers.pop_front() {
                return Some(transfer);
            }
        }
        let attend_first = match (self.attends.waiting, self.next_others()) {
            (0, _) => false,
            (_, 0) => true,
            _ => self.turn == NextKind::Attends,
        };
        if !attend_first {
            return self.take_begun().or_else(|| self.others.pop());
        }
        let next = self.attends.pop()?;
        self.attend_serials.remove(&next.ticket.serial);
        Some(next)
    }

    /// Whether it is attention's turn where both kinds wait.
    pub(crate) fn attends_go_first(&self) -> bool {
        self.turn == NextKind::Attends
    }

    /// Whether an attend that comes goes before one that has the device: its namespace has none
    /// waiting, and had less than its share.
    pub(crate) fn goes_before(&self, coming: &OwnerKey, running: &RunningAttend) -> bool {
        let RunningAttend { namespace: key, began } = running;
        let (had, weight) = (began.elapsed(), self.weights.weight_of(key));
        let is_turn = self.next_others() == 0 || self.attends_go_first();
        let served = ServedMember { key, had, weight };
        is_turn && self.attends.namespaces.goes_before(&coming.namespace, served)
    }

    /// Forgets who had attends, where none waits. An attend that never waits would else leave a
    /// trace of its connection.
    pub(crate) fn forget_served(&mut self) {
        self.attends.namespaces.forget_served();
    }

    /// Connections that are remembered for what their attends took.
    #[cfg(test)]
    pub(crate) fn count_remembered(&self) -> usize {
        self.attends.namespaces.iter().map(|(_, of)| of.iter().count()).sum()
    }

    /// A job, or a slice of it, took so long.
    pub(crate) fn note_run(&mut self, ticket: &JobTicket, took: Duration) {
        let JobTicket { kind, owner, .. } = ticket;
        if *kind == JobKind::Transfer {
            return;
        }
        if !self.transfers.is_empty() {
            self.passed += took;
        }
        let queue = if *kind == JobKind::Attend { &mut self.attends } else { &mut self.others };
        let weight = self.weights.weight_of(&owner.namespace);
        queue.namespaces.charge_time(&owner.namespace, took, weight);
        queue.namespaces.join_member(&owner.namespace).charge_time(&owner.connection, took, 1);
        match kind {
            // What nobody waited for was nobody's share.
            JobKind::Attend if self.next_others() == 0 => self.taken = Duration::ZERO,
            JobKind::Attend => {
                self.taken += took;
                if self.taken >= self.share {
                    (self.turn, self.taken) = (NextKind::Others, Duration::ZERO);
                }
            }
            // As above: their turn begins where an attend waits.
            _ if self.attends.waiting == 0 => {
                self.share = took.clamp(*SHARE.start(), *SHARE.end());
                [self.taken, self.used] = [Duration::ZERO; 2];
                self.turn = NextKind::Attends;
            }
            _ => {
                self.used += took;
                if self.used >= *SHARE.start() {
                    self.share = self.used.min(*SHARE.end());
                    [self.taken, self.used] = [Duration::ZERO; 2];
                    self.turn = NextKind::Attends;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(connection: u64) -> OwnerKey {
        OwnerKey { namespace: Namespace::new("default").unwrap(), connection }
    }

    /// Jobs of one connection.
    fn push(scheduler: &mut JobScheduler<u32>, kind: JobKind, job: u32) -> JobTicket {
        push_of(scheduler, owner(1), kind, job)
    }

    fn push_of(
        scheduler: &mut JobScheduler<u32>,
        owner: OwnerKey,
        kind: JobKind,
        job: u32,
    ) -> JobTicket {
        let ticket = scheduler.make_ticket(kind, owner, true);
        scheduler.push(ticket.clone(), job);
        ticket
    }

    fn scheduler(attends: u32, others: u32) -> JobScheduler<u32> {
        let mut scheduler = JobScheduler::new(QuotaTable::new(1));
        (0..others).for_each(|job| drop(push(&mut scheduler, JobKind::Other, 100 + job)));
        (0..attends).for_each(|job| drop(push(&mut scheduler, JobKind::Attend, job)));
        scheduler
    }

    /// The order of jobs that take so many milliseconds each.
    fn order(mut scheduler: JobScheduler<u32>, attend_ms: u64, other_ms: u64) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some(WaitingJob { ticket, job }) = scheduler.next() {
            order.push(job);
            let ms = if ticket.kind == JobKind::Attend { attend_ms } else { other_ms };
            scheduler.note_run(&ticket, Duration::from_millis(ms));
        }
        assert!(scheduler.is_empty());
        order
    }

    #[test]
    fn attention_goes_first_until_it_has_had_as_much_time() {
        // Two of one millisecond are the least share; then as many as another job took.
        let expected = [0, 1, 100, 2, 3, 4, 5, 6, 101, 7, 8, 9, 102];
        assert_eq!(order(scheduler(10, 3), 1, 5), expected);
    }

    #[test]
    fn transfers_run_when_nobody_waits_and_a_slice_each_while_the_others_go_on() {
        let mut idle = scheduler(2, 1);
        push(&mut idle, JobKind::Transfer, 300);
        push(&mut idle, JobKind::Transfer, 301);
        assert_eq!(order(idle, 2, 2), [0, 100, 1, 300, 301]);
        let mut busy = scheduler(30, 0);
        push(&mut busy, JobKind::Transfer, 300);
        push(&mut busy, JobKind::Transfer, 301);
        let order = order(busy, 5, 5);
        // Four attends of five milliseconds, then one of them.
        let at = |job| order.iter().position(|other| *other == job).unwrap();
        assert_eq!((at(300), at(301)), (4, 9));
        // One that pauses goes on before the next.
        let mut paused = scheduler(0, 0);
        push(&mut paused, JobKind::Transfer, 300);
        push(&mut paused, JobKind::Transfer, 301);
        let first = paused.next().unwrap();
        paused.push(first.ticket, first.job);
        assert_eq!(paused.next().map(|next| next.job), Some(300));
    }

    #[test]
    fn one_long_job_does_not_give_attention_as_long() {
        let expected = [0, 100, 1, 2, 101, 3, 102];
        assert_eq!(order(scheduler(4, 3), 50, 60_000), expected);
    }

    #[test]
    fn a_store_that_gave_way_goes_on_before_others_begin_and_is_not_taken_out() {
        let mut scheduler = scheduler(0, 0);
        push(&mut scheduler, JobKind::Store, 100);
        let store = scheduler.next().unwrap();
        // It has had its turn.
        scheduler.note_run(&store.ticket, Duration::from_micros(300));
        let ticket = store.ticket.clone();
        scheduler.keep_begun(store.ticket, store.job);
        assert!(scheduler.remove(&ticket).is_none());
        // It has no place, and is no message that waits.
        assert_eq!((scheduler.counted_jobs(), scheduler.uncounted_jobs()), ([0; 2], [0; 2]));
        assert_eq!(scheduler.waiting_jobs(), [0, 1]);
        push_of(&mut scheduler, owner(2), JobKind::Store, 101);
        push_of(&mut scheduler, owner(2), JobKind::Other, 102);
        push_of(&mut scheduler, owner(3), JobKind::Attend, 0);
        assert_eq!(scheduler.waiting_jobs(), [1, 3]);
        assert_eq!(order(scheduler, 0, 1), [0, 100, 101, 102]);
    }

    #[test]
    fn a_store_in_slices_has_as_much_time_as_attends_without_end() {
        let mut scheduler = scheduler(0, 0);
        let mut had = [Duration::ZERO; 2];
        push_of(&mut scheduler, owner(2), JobKind::Store, 100);
        push(&mut scheduler, JobKind::Attend, 0);
        for _ in 0..1000 {
            let WaitingJob { ticket, job } = scheduler.next().unwrap();
            let is_store = ticket.kind == JobKind::Store;
            // In attention's turn it gives way after a block, else at the end of its slice.
            let gives_way = is_store && scheduler.attends_go_first();
            let micros = if gives_way { 100 } else { 2000 };
            let took = if is_store { Duration::from_micros(micros) } else { *SHARE.start() / 5 };
            had[usize::from(is_store)] += took;
            scheduler.note_run(&ticket, took);
            if is_store {
                scheduler.keep_begun(ticket, job);
            } else {
                push(&mut scheduler, JobKind::Attend, job);
            }
        }
        let share = had[1].div_duration_f64(had[0] + had[1]);
        assert!((0.45..0.55).contains(&share), "{share}");
    }

    #[test]
    fn each_kind_of_a_connection_runs_in_the_order_it_came() {
        assert_eq!(order(scheduler(0, 3), 1, 1), [100, 101, 102]);
        assert_eq!(order(scheduler(3, 0), 50, 1), [0, 1, 2]);
    }

    #[test]
    fn a_long_attend_lets_short_jobs_pass_for_the_least_share() {
        assert_eq!(order(scheduler(3, 3), 50, 1), [0, 100, 101, 1, 102, 2]);
        assert_eq!(order(scheduler(3, 3), 50, 2), [0, 100, 1, 101, 2, 102]);
    }

    #[test]
    fn jobs_that_take_next_to_nothing_share_one_turn() {
        // As stores of one token do.
        let expected: Vec<u32> = [0].into_iter().chain(100..120).chain([1, 2]).collect();
        assert_eq!(order(scheduler(3, 20), 50, 0), expected);
    }

    #[test]
    fn what_the_others_did_not_use_of_their_turn_is_theirs_when_they_come_again() {
        let mut scheduler = scheduler(2, 1);
        let took = [3, 1, 5].map(Duration::from_millis);
        for (job, took) in [0, 100, 1].into_iter().zip(took) {
            let next = scheduler.next().unwrap();
            assert_eq!(next.job, job);
            scheduler.note_run(&next.ticket, took);
        }
        push(&mut scheduler, JobKind::Attend, 2);
        push(&mut scheduler, JobKind::Other, 101);
        assert_eq!(scheduler.next().map(|next| next.job), Some(101));
    }

    #[test]
    fn what_is_after_all_waits_for_earlier_attends_and_for_no_later_one() {
        let mut scheduler = scheduler(3, 1);
        push(&mut scheduler, JobKind::AfterAll, 200);
        push(&mut scheduler, JobKind::Attend, 3);
        push(&mut scheduler, JobKind::Other, 101);
        // It holds nothing else up meanwhile, and then has its turn as any other.
        assert_eq!(order(scheduler, 50, 1), [0, 100, 101, 1, 2, 3, 200]);
    }

    #[test]
    fn attention_that_nobody_waited_for_is_not_held_against_it() {
        let mut scheduler = scheduler(2, 0);
        let next = scheduler.next().unwrap();
        scheduler.note_run(&next.ticket, Duration::from_secs(1));
        push(&mut scheduler, JobKind::Other, 100);
        assert_eq!(scheduler.next().map(|next| next.job), Some(1));
    }

    #[test]
    fn a_paused_attend_lets_all_others_pass_and_keeps_its_age() {
        let mut scheduler = JobScheduler::new(QuotaTable::new(1));
        push(&mut scheduler, JobKind::Attend, 0);
        push(&mut scheduler, JobKind::Attend, 1);
        let paused = scheduler.next().unwrap();
        scheduler.note_run(&paused.ticket, Duration::from_millis(2));
        scheduler.push(paused.ticket, paused.job);
        push_of(&mut scheduler, owner(2), JobKind::Attend, 2);
        push(&mut scheduler, JobKind::AfterAll, 200);
        // The other connection first, then what the same one has waiting.
        assert_eq!(order(scheduler, 2, 1), [2, 1, 0, 200]);
    }

    #[test]
    fn a_connection_with_many_jobs_lets_one_of_another_pass() {
        let mut scheduler = scheduler(300, 0);
        push_of(&mut scheduler, owner(2), JobKind::Attend, 1000);
        let order = order(scheduler, 1, 1);
        assert!(order[..2].contains(&1000), "{:?}", &order[..5]);
    }

    #[test]
    fn namespaces_share_by_their_weights_whatever_their_connections() {
        let name = |name| Namespace::new(name).unwrap();
        let weights = QuotaTable::new(1);
        let mut scheduler = JobScheduler::new(weights.clone());
        for job in 0..1000u64 {
            let connection = job % 10;
            let small = OwnerKey { namespace: name("small"), connection };
            push_of(&mut scheduler, small, JobKind::Attend, 0);
            let big = OwnerKey { namespace: name("big"), connection: 99 };
            push_of(&mut scheduler, big, JobKind::Attend, 1);
        }
        // An operator changes them while the jobs wait.
        for (weight, share) in [(1, 250_u32), (3, 375), (3, 375)] {
            weights.set_weight(&name("big"), weight);
            let mut of_big = 0;
            for _ in 0..500 {
                let next = scheduler.next().unwrap();
                scheduler.note_run(&next.ticket, Duration::from_millis(1));
                of_big += next.job;
            }
            assert!(share.abs_diff(of_big) <= 3, "{of_big} of 500 at weight {weight}");
        }
    }

    #[test]
    fn a_place_is_given_up_by_whoever_has_most_and_only_while_that_has_more() {
        let mut scheduler = scheduler(3, 0);
        push_of(&mut scheduler, owner(2), JobKind::Attend, 50);
        let stream = scheduler.make_ticket(JobKind::Attend, owner(1), false);
        scheduler.push(stream, 77);
        assert_eq!((scheduler.counted_jobs(), scheduler.waiting_jobs()), ([4, 0], [5, 0]));
        let taken = |scheduler: &mut JobScheduler<u32>, connection| {
            scheduler.take_from_most(JobKind::Attend, &owner(connection)).map(|waiting| waiting.job)
        };
        assert_eq!(taken(&mut scheduler, 1), None);
        assert_eq!(taken(&mut scheduler, 3), Some(2));
        assert_eq!(taken(&mut scheduler, 2), None);
        assert_eq!(scheduler.counted_jobs(), [3, 0]);
        assert_eq!(order(scheduler, 1, 1).len(), 4);
    }

    #[test]
    fn what_is_taken_out_is_gone_and_holds_nothing_up() {
        let mut scheduler = scheduler(0, 1);
        let attend = push(&mut scheduler, JobKind::Attend, 0);
        let after_all = push(&mut scheduler, JobKind::AfterAll, 200);
        assert_eq!(scheduler.remove(&attend).map(|waiting| waiting.job), Some(0));
        assert!(scheduler.remove(&attend).is_none());
        assert_eq!(scheduler.next().map(|next| next.job), Some(100));
        assert_eq!(scheduler.remove(&after_all).map(|waiting| waiting.job), Some(200));
        assert!(scheduler.is_empty() && scheduler.next().is_none());
    }
}
