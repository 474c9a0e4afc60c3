//! Watches of the cache: what is cached where, then every change.
//!
//! Owns [`EventLogs`]: of each namespace that is watched, or was a moment ago, the last events by
//! number. One mutex, taken under the locks of indexes, and no other below it. A watch that asks
//! for what is gone, or falls behind, begins anew with all blocks: nothing waits for a watcher, and
//! no queue grows for one. Namespaces have numbers of their own, which tell nothing of others.

use super::{CallContext, InFlight, RegisteredModel, Service, ServiceError};
use crate::config::EventConfig;
use crate::metrics::{Metric, Metrics};
use kvd_core::{ErrorCode, ModelId, Namespace};
use kvd_store::{BlockEvent, EventSink, ListCursor, PlacedBlock};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Events of one answer.
const EVENTS_PER_ANSWER: usize = 1024;
/// Bytes that an event takes in an answer at most, beside its keys and the name of its model: twice
/// its message, because a list grows by doubling, and what allocators keep of each.
const EVENT_BYTES: usize = 320;
/// Bytes of an answer beside its events, and of room that a list has at least.
const ANSWER_BYTES: usize = 1024;
/// When a watch whose place was taken may ask for another.
const PLACE_RETRY: Duration = Duration::from_secs(1);

/// Why a watch begins anew, as the label `reason` has it.
pub(crate) const RESET_REASONS: [&str; 3] = ["first", "gone", "behind"];

/// One of the places that watches have.
#[derive(Debug, Default)]
struct WatchSeat {
    /// Whether another namespace has it now.
    is_taken: AtomicBool,
}

/// The last events of a namespace.
#[derive(Debug)]
struct NamespaceLog {
    events: VecDeque<BlockEvent>,
    /// Number of the next event.
    next: u64,
    /// Places of its watches, the newest last.
    seats: Vec<Arc<WatchSeat>>,
    /// When the last watcher left; none while there are some.
    unwatched_since: Option<Instant>,
    /// Told of each event.
    grown: Arc<Notify>,
}

impl NamespaceLog {
    /// Number of the oldest event that is there, or of the next.
    fn first_number(&self) -> u64 {
        self.next - self.events.len() as u64
    }
}

#[derive(Debug, Default)]
struct LogTable {
    logs: HashMap<Namespace, NamespaceLog>,
    /// Events of all logs.
    kept: usize,
    watchers: usize,
}

impl LogTable {
    fn drop_log(&mut self, namespace: &Namespace) {
        if let Some(log) = self.logs.remove(namespace) {
            self.kept -= log.events.len();
        }
    }

    /// Forgets the oldest event of the namespace that has most.
    fn forget_event(&mut self) {
        let most = self.logs.values_mut().max_by_key(|log| log.events.len());
        if most.is_some_and(|log| log.events.pop_front().is_some()) {
            self.kept -= 1;
        }
    }

    /// Takes the newest place of the namespace that has most, if that has at least two more than
    /// this one; whether it did. That namespace keeps at least one.
    fn take_seat(&mut self, namespace: &Namespace) -> bool {
        let own = self.logs.get(namespace).map_or(0, |log| log.seats.len());
        let most = self.logs.values_mut().max_by_key(|log| log.seats.len());
        let Some(log) = most.filter(|log| log.seats.len() >= own + 2) else { return false };
        let Some(seat) = log.seats.pop() else { return false };
        seat.is_taken.store(true, Relaxed);
        log.grown.notify_waiters();
        self.watchers -= 1;
        true
    }
}

/// Events of all namespaces that are watched.
#[derive(Debug)]
pub(crate) struct EventLogs {
    config: EventConfig,
    began: Instant,
    table: Mutex<LogTable>,
    /// As many as the table has: most daemons have none, and ask nothing more.
    log_count: AtomicUsize,
    noted: metrics::Counter,
}

impl EventLogs {
    /// No logs.
    pub(super) fn new(config: EventConfig, metrics: &Metrics) -> Self {
        for reason in RESET_REASONS {
            metrics.counter(Metric::EventResetsTotal, &[("reason", reason)]).increment(0);
        }
        let noted = metrics.counter(Metric::EventsTotal, &[]);
        noted.increment(0);
        Self {
            config,
            began: Instant::now(),
            table: Mutex::default(),
            log_count: AtomicUsize::new(0),
            noted,
        }
    }

    /// A number that no log of this boot has reached: events come slower than nanoseconds.
    fn fresh_number(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX / 2).max(2)
    }

    /// Drops logs that nobody has watched for a while.
    fn drop_idle(&self, table: &mut LogTable) {
        let is_over = |log: &NamespaceLog| {
            log.unwatched_since.is_some_and(|since| since.elapsed() >= self.config.keep_time)
        };
        let over = table.logs.iter().filter(|(_, log)| is_over(log));
        let over: Vec<_> = over.map(|(namespace, _)| namespace.clone()).collect();
        over.iter().for_each(|namespace| table.drop_log(namespace));
    }

    /// Makes room for one more log among as many as there may be watches: the one goes that nobody
    /// has watched for longest.
    fn drop_oldest(&self, table: &mut LogTable) {
        while table.logs.len() >= self.config.watchers_max {
            let unwatched =
                table.logs.iter().filter_map(|(name, log)| Some((log.unwatched_since?, name)));
            // A watch is free, so at least one log of so many has none.
            let Some(oldest) = unwatched.min().map(|(_, name)| name.clone()) else { return };
            table.drop_log(&oldest);
        }
    }

    /// Begins a watch of a namespace after a number, if its events are there; else anew.
    fn open_watch(self: &Arc<Self>, namespace: &Namespace) -> Result<WatchPlace, ServiceError> {
        let mut table = self.table.lock();
        let refuse = |limit: &str, max: usize| {
            let message = format!("no more watches of the cache: {limit} is {max}");
            Err(ServiceError::new(ErrorCode::LimitExceeded, message))
        };
        if self.config.ring == 0 {
            return refuse("cache.events.ring", 0);
        }
        let max = self.config.watchers_max;
        if table.watchers >= max && !table.take_seat(namespace) {
            return refuse("cache.events.watchers_max", max);
        }
        self.drop_idle(&mut table);
        if !table.logs.contains_key(namespace) {
            self.drop_oldest(&mut table);
        }
        let fresh = self.fresh_number();
        let log = table.logs.entry(namespace.clone()).or_insert_with(|| NamespaceLog {
            events: VecDeque::new(),
            next: fresh,
            seats: Vec::new(),
            unwatched_since: None,
            grown: Arc::default(),
        });
        let seat = Arc::<WatchSeat>::default();
        log.seats.push(Arc::clone(&seat));
        log.unwatched_since = None;
        let grown = Arc::clone(&log.grown);
        table.watchers += 1;
        self.log_count.store(table.logs.len(), Relaxed);
        Ok(WatchPlace { logs: Arc::clone(self), namespace: namespace.clone(), grown, seat })
    }

    /// Number of the newest event of a watched namespace.
    fn last_number(&self, namespace: &Namespace) -> u64 {
        self.table.lock().logs.get(namespace).map_or(0, |log| log.next - 1)
    }

    /// Events after a number; none where some of them are gone, or that number never was.
    fn read_after(&self, namespace: &Namespace, number: u64) -> Option<Vec<BlockEvent>> {
        let table = self.table.lock();
        let log = table.logs.get(namespace)?;
        if number >= log.next || number + 1 < log.first_number() {
            return None;
        }
        let skipped = (number + 1 - log.first_number()) as usize;
        Some(log.events.iter().skip(skipped).take(EVENTS_PER_ANSWER).cloned().collect())
    }
}

impl EventSink for EventLogs {
    fn is_watched(&self, namespace: &Namespace) -> bool {
        self.log_count.load(Relaxed) > 0 && self.table.lock().logs.contains_key(namespace)
    }

    fn note_event(&self, namespace: &Namespace, event: BlockEvent) {
        let mut table = self.table.lock();
        let Some(log) = table.logs.get_mut(namespace) else { return };
        let is_over = |since: Instant| since.elapsed() >= self.config.keep_time;
        if log.unwatched_since.is_some_and(is_over) {
            table.drop_log(namespace);
            self.log_count.store(table.logs.len(), Relaxed);
            return;
        }
        log.events.push_back(event);
        log.next += 1;
        log.grown.notify_waiters();
        table.kept += 1;
        while table.kept > self.config.ring {
            table.forget_event();
        }
        self.noted.increment(1);
    }
}

/// A watcher's place in the table. Its drop leaves the log for a while, for who comes back.
#[derive(Debug)]
struct WatchPlace {
    logs: Arc<EventLogs>,
    namespace: Namespace,
    grown: Arc<Notify>,
    seat: Arc<WatchSeat>,
}

impl WatchPlace {
    /// Whether it is still this watch's.
    fn check_seat(&self) -> Result<(), ServiceError> {
        if !self.seat.is_taken.load(Relaxed) {
            return Ok(());
        }
        let max = self.logs.config.watchers_max;
        let message = format!(
            "a watch of another namespace has this one's place, because this namespace had most \
             of the {max} (cache.events.watchers_max); watch again later"
        );
        Err(ServiceError::new(ErrorCode::QueueFull, message).retry_after(PLACE_RETRY))
    }
}

impl Drop for WatchPlace {
    fn drop(&mut self) {
        let mut table = self.logs.table.lock();
        let Some(log) = table.logs.get_mut(&self.namespace) else { return };
        // One that was taken is counted no more.
        let Some(at) = log.seats.iter().position(|seat| Arc::ptr_eq(seat, &self.seat)) else {
            return;
        };
        log.seats.remove(at);
        log.unwatched_since = log.seats.is_empty().then(Instant::now);
        table.watchers -= 1;
    }
}

/// Where a watch goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchStart {
    /// The boot that an earlier watch was of.
    pub(crate) boot_id: String,
    /// The last number that it was told; 0 for none.
    pub(crate) after_number: u64,
}

/// How far a watch is.
#[derive(Debug)]
enum WatchPhase {
    /// It begins anew.
    Reset(&'static str),
    /// All blocks are told, from a number on.
    Listing(BlockListing),
    /// Changes are told.
    Following { number: u64 },
}

/// A part of what a watch tells.
#[derive(Debug, Default)]
pub(crate) struct WatchedEvents {
    /// Number of the last event; 0 while all blocks are being told.
    pub(crate) number: u64,
    /// Whether what was told before is void.
    pub(crate) is_reset: bool,
    pub(crate) events: Vec<BlockEvent>,
}

/// A part of what a watch tells, and its share of the budgets of bytes.
#[derive(Debug)]
pub(crate) struct WatchAnswer {
    pub(crate) told: WatchedEvents,
    pub(crate) held: InFlight,
}

impl WatchedEvents {
    /// Bytes that an answer with them holds at most until it is sent, where models have names of so
    /// many bytes.
    pub(crate) fn answer_bytes(&self, name_bytes: impl Fn(ModelId) -> usize) -> u64 {
        let (mut bytes, mut last) = (ANSWER_BYTES, None);
        for event in &self.events {
            let (model, keys) = match event {
                BlockEvent::Stored(block) | BlockEvent::Removed(block) => {
                    let parent = block.parent.as_ref().map_or(0, |parent| parent.len());
                    // Keys of a chain are one list, which grows by doubling.
                    (block.model, 2 * block.key.len() + parent)
                }
                BlockEvent::Cleared(model) => (*model, 0),
            };
            let name = match last {
                Some((of, name)) if of == model => name,
                _ => name_bytes(model),
            };
            last = Some((model, name));
            bytes += EVENT_BYTES + keys + name;
        }
        bytes as u64
    }
}

/// A watch of a namespace.
pub(crate) struct BlockWatch {
    service: Arc<Service>,
    call: CallContext,
    place: WatchPlace,
    phase: WatchPhase,
}

impl Service {
    /// Begins a watch: after the number that it names if its events are there, else with all
    /// blocks.
    ///
    /// # Errors
    /// `LIMIT_EXCEEDED` of watches, or as every call.
    pub(crate) fn watch_blocks(
        self: &Arc<Self>,
        call: &CallContext,
        start: &WatchStart,
    ) -> Result<BlockWatch, ServiceError> {
        self.admit_call(call)?;
        let place = self.events.open_watch(&call.namespace)?;
        let WatchStart { boot_id, after_number } = start;
        let phase = match *after_number {
            0 => WatchPhase::Reset("first"),
            number
                if *boot_id == self.boot_id
                    && self.events.read_after(&call.namespace, number).is_some() =>
            {
                WatchPhase::Following { number }
            }
            _ => WatchPhase::Reset("gone"),
        };
        let call = CallContext { waits_for_queue: true, ..call.clone() };
        Ok(BlockWatch { service: Arc::clone(self), call, place, phase })
    }
}

/// A model as watchers know it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchedModel {
    /// Empty where it is no more.
    pub(crate) name: String,
    pub(crate) block_tokens: u32,
}

impl BlockWatch {
    /// The boot whose numbers it tells.
    pub(crate) fn boot_id(&self) -> &str {
        &self.service.boot_id
    }

    /// A model of its namespace.
    pub(crate) fn describe_model(&self, id: ModelId) -> WatchedModel {
        let found = self.service.models.find_model(&self.call.namespace, id);
        let describe = |model: Arc<RegisteredModel>| WatchedModel {
            name: model.name.clone(),
            block_tokens: model.shape.geometry.block_tokens,
        };
        found.map(describe).unwrap_or_default()
    }

    /// The next part, and its share of the budgets of bytes; waits for one.
    ///
    /// # Errors
    /// `QUEUE_FULL` where the budgets had no room for a while, or another namespace has its place.
    pub(crate) async fn next_answer(&mut self) -> Result<WatchAnswer, ServiceError> {
        let told = loop {
            self.place.check_seat()?;
            match &mut self.phase {
                WatchPhase::Reset(reason) => {
                    let reason = *reason;
                    break self.begin_list(reason).await;
                }
                WatchPhase::Listing(listing) => {
                    let told = listing.take_part(&self.service, &self.call.namespace).await;
                    if told.number != 0 {
                        self.phase = WatchPhase::Following { number: told.number };
                    }
                    break told;
                }
                WatchPhase::Following { number } => {
                    let number = *number;
                    if let Some(told) = self.follow_log(number).await? {
                        break told;
                    }
                    self.phase = WatchPhase::Reset("behind");
                }
            }
        };
        let bytes = told.answer_bytes(|model| self.describe_model(model).name.len());
        let held = self.service.admit_answer(&self.call, bytes).await?;
        Ok(WatchAnswer { told, held })
    }

    async fn begin_list(&mut self, reason: &'static str) -> WatchedEvents {
        let service = &self.service;
        service.metrics.counter(Metric::EventResetsTotal, &[("reason", reason)]).increment(1);
        // Events from here on are told after the list, which may have seen them or not.
        let number = self.place.logs.last_number(&self.place.namespace);
        let mut listing = BlockListing { number, ..BlockListing::default() };
        let told = listing.take_part(service, &self.call.namespace).await;
        self.phase = match told.number {
            0 => WatchPhase::Listing(listing),
            number => WatchPhase::Following { number },
        };
        WatchedEvents { is_reset: true, ..told }
    }

    /// Waits for events after a number; none where they are gone.
    async fn follow_log(&mut self, number: u64) -> Result<Option<WatchedEvents>, ServiceError> {
        let WatchPlace { logs, namespace, grown, .. } = &self.place;
        loop {
            let mut more = std::pin::pin!(grown.notified());
            // From here on no event is missed.
            more.as_mut().enable();
            self.place.check_seat()?;
            let Some(events) = logs.read_after(namespace, number) else { return Ok(None) };
            if events.is_empty() {
                more.await;
                continue;
            }
            let number = number + events.len() as u64;
            self.phase = WatchPhase::Following { number };
            return Ok(Some(WatchedEvents { number, is_reset: false, events }));
        }
    }
}

/// All blocks of a namespace, told in parts.
#[derive(Debug, Default)]
struct BlockListing {
    /// Changes after it are told next.
    number: u64,
    shard: usize,
    cursor: ListCursor,
    /// Listed, and not told yet.
    left: VecDeque<PlacedBlock>,
}

impl BlockListing {
    /// The next part; the last has the number from which to follow. Others have the thread between
    /// looks at the index: a list may have none of its blocks to tell.
    async fn take_part(&mut self, service: &Service, namespace: &Namespace) -> WatchedEvents {
        while self.left.len() < EVENTS_PER_ANSWER {
            let Some(shard) = service.shards.get(self.shard) else { break };
            match shard.store.prefix_index().list_placed(namespace, &mut self.cursor) {
                Some(mut placed) => {
                    // Blocks of one place follow one another, as they were published.
                    placed.sort_by_key(|block| block.tier);
                    self.left.extend(placed);
                }
                None => (self.shard, self.cursor) = (self.shard + 1, ListCursor::default()),
            }
            tokio::task::yield_now().await;
        }
        let count = self.left.len().min(EVENTS_PER_ANSWER);
        let events = self.left.drain(..count).map(BlockEvent::Stored).collect();
        let is_last = self.left.is_empty() && self.shard >= service.shards.len();
        let number = if is_last { self.number } else { 0 };
        WatchedEvents { number, is_reset: false, events }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn logs(ring: usize, watchers_max: usize, keep_ms: u64) -> Arc<EventLogs> {
        let keep_time = Duration::from_millis(keep_ms);
        let config = EventConfig { ring, watchers_max, keep_time };
        Arc::new(EventLogs::new(config, &Metrics::new()))
    }

    fn name(name: &str) -> Namespace {
        Namespace::new(name).unwrap()
    }

    fn note(logs: &EventLogs, namespace: &str, models: std::ops::Range<u64>) {
        models.for_each(|id| logs.note_event(&name(namespace), BlockEvent::Cleared(ModelId(id))));
    }

    fn read(logs: &EventLogs, namespace: &str, number: u64) -> Option<Vec<u64>> {
        let id = |event: BlockEvent| match event {
            BlockEvent::Cleared(id) => id.0,
            other => panic!("{other:?}"),
        };
        Some(logs.read_after(&name(namespace), number)?.into_iter().map(id).collect())
    }

    #[test]
    fn events_are_kept_from_the_first_watch_on_and_a_flood_takes_room_of_its_own() {
        let logs = logs(8, 4, 60_000);
        note(&logs, "a", 0..3);
        assert!(!logs.is_watched(&name("a")) && read(&logs, "a", 1).is_none());
        let places = ["a", "b"].map(|of| logs.open_watch(&name(of)).unwrap());
        let [a, b] = ["a", "b"].map(|of| logs.last_number(&name(of)));
        note(&logs, "a", 0..2);
        note(&logs, "b", 10..13);
        assert_eq!(read(&logs, "a", a), Some(vec![0, 1]));
        assert_eq!(read(&logs, "b", b + 1), Some(vec![11, 12]));
        assert_eq!(read(&logs, "b", b + 3), Some(vec![]));
        assert_eq!(read(&logs, "b", b + 4), None, "a number that is not there yet");
        note(&logs, "a", 2..100);
        assert_eq!(read(&logs, "b", b), Some(vec![10, 11, 12]), "another's flood takes none");
        assert_eq!(read(&logs, "a", a), None);
        assert_eq!(read(&logs, "a", a + 95), Some((95..100).collect()));
        assert_eq!(read(&logs, "a", a + 94), None);
        drop(places);
        assert_eq!(logs.table.lock().watchers, 0);
        assert!(logs.is_watched(&name("a")), "for who comes back");
    }

    #[test]
    fn logs_are_as_many_as_watches_may_be_and_those_that_are_watched_stay() {
        let logs = logs(8, 2, 60_000);
        let has = |of: &str| logs.is_watched(&name(of));
        let watch_once = |of: &str| drop(logs.open_watch(&name(of)).unwrap());
        ["a", "b", "c"].into_iter().for_each(watch_once);
        assert_eq!(["a", "b", "c"].map(has), [false, true, true]);
        let _place = logs.open_watch(&name("b")).unwrap();
        ["d", "e"].into_iter().for_each(watch_once);
        assert_eq!(["b", "c", "d", "e"].map(has), [true, false, false, true]);
    }

    #[test]
    fn a_log_that_nobody_watches_ends_and_its_numbers_never_come_again() {
        let logs = logs(8, 4, 0);
        drop(logs.open_watch(&name("a")).unwrap());
        let before = logs.last_number(&name("a"));
        note(&logs, "a", 0..1);
        assert!(!logs.is_watched(&name("a")), "it is not kept");
        let _place = logs.open_watch(&name("a")).unwrap();
        assert!(logs.last_number(&name("a")) > before);
        assert_eq!(read(&logs, "a", before), None);
    }

    #[test]
    fn a_namespace_that_has_no_place_takes_one_of_who_has_most() {
        let logs = logs(8, 4, 60_000);
        let mut ours: Vec<_> = (0..4).map(|_| logs.open_watch(&name("a")).unwrap()).collect();
        assert!(logs.open_watch(&name("a")).is_err(), "it takes none of its own");
        let of_b = logs.open_watch(&name("b")).unwrap();
        let lost = ours.pop().unwrap();
        let error = lost.check_seat().unwrap_err();
        assert_eq!(error.code(), ErrorCode::QueueFull);
        assert!(error.to_string().contains("cache.events.watchers_max"), "{error}");
        assert!(ours.iter().all(|place| place.check_seat().is_ok()));
        // Two each; then neither has more than the other.
        let second = logs.open_watch(&name("b")).unwrap();
        assert!(ours.pop().unwrap().check_seat().is_err());
        for of in ["a", "b"] {
            assert!(logs.open_watch(&name(of)).is_err());
        }
        // A third namespace has one of them, and what ends is counted once.
        let of_c = logs.open_watch(&name("c")).unwrap();
        let left = [&ours[0], &ours[1], &of_b, &second, &of_c];
        assert_eq!(left.iter().filter(|place| place.check_seat().is_ok()).count(), 4);
        assert_eq!(logs.table.lock().watchers, 4);
        drop((lost, ours, of_b, second, of_c));
        assert_eq!(logs.table.lock().watchers, 0);
    }

    #[test]
    fn watches_have_a_limit_that_the_error_names() {
        let one = logs(8, 1, 0);
        let place = one.open_watch(&name("a")).unwrap();
        let refused = one.open_watch(&name("b")).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::LimitExceeded);
        assert!(refused.to_string().contains("cache.events.watchers_max is 1"), "{refused}");
        drop(place);
        one.open_watch(&name("b")).unwrap();
        let off = logs(0, 1, 0).open_watch(&name("a")).unwrap_err();
        assert!(off.to_string().contains("cache.events.ring is 0"), "{off}");
    }
}
