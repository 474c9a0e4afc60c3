//! Random operations on the cache against a naive model: which keys were ever published, and what
//! each open sequence must read.
//!
//! A key is a hash of all tokens before its end, so content that is found can be told right from
//! wrong without knowing where it came from. After each step every sequence is read back, the
//! tables of the index are compared with one another, and the pool with all that can be reached.

use super::events::Watcher;
use super::harness::{Bench, Live, shape};
use crate::{
    CacheLimits, DroppedBlocks, EvictionChoice, KeyChain, LeaseRequest, ModelUsage, PackedKeys,
    PinRequest, PublishTicket, StoreError,
};
use kvd_core::{Coded, ErrorCode, LeaseId, SequenceId};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks of a plan.
const BLOCKS: u32 = 6;

/// One step; indices are taken modulo what there is. `plan` has a bit for the content of each
/// block.
#[derive(Clone, Debug)]
enum Step {
    Open { plan: u8 },
    Append { seq: usize, layer: u32, tokens: u32 },
    Publish { seq: usize, start: u32, blocks: u32, fail: u8 },
    Begin { seq: usize, start: u32, blocks: u32 },
    Finish { ticket: usize, fail: u8, commit: bool },
    Fork { seq: usize, keep: u32 },
    Truncate { seq: usize, keep: u32, plan: u8 },
    Close { seq: usize, drop: bool },
    Lease { plan: u8, ms: u64 },
    Release { lease: usize },
    Pin { plan: u8, ms: u64 },
    Unpin { plan: u8 },
    Drop { plan: u8 },
    Wait { ms: u64 },
    Evict,
}

fn step() -> impl Strategy<Value = Step> {
    let (seq, plan, tokens) = (any::<usize>(), any::<u8>(), 1u32..14);
    let fail = || prop_oneof![3 => Just(0), 1 => any::<u8>()];
    // Few plans, so that they meet.
    let plan = plan.prop_map(|plan| plan & 0b10_0110);
    let start = || prop_oneof![2 => Just(0), 1 => 0..BLOCKS];
    prop_oneof![
        3 => plan.clone().prop_map(|plan| Step::Open { plan }),
        8 => (seq, 0u32..2, tokens)
            .prop_map(|(seq, layer, tokens)| Step::Append { seq, layer, tokens }),
        6 => (seq, start(), 0..=BLOCKS, fail())
            .prop_map(|(seq, start, blocks, fail)| Step::Publish { seq, start, blocks, fail }),
        2 => (seq, start(), 0..=BLOCKS)
            .prop_map(|(seq, start, blocks)| Step::Begin { seq, start, blocks }),
        3 => (seq, fail(), prop::bool::weighted(0.8))
            .prop_map(|(ticket, fail, commit)| Step::Finish { ticket, fail, commit }),
        1 => (seq, 0u32..=100).prop_map(|(seq, keep)| Step::Fork { seq, keep }),
        2 => (seq, 0u32..=100, plan.clone())
            .prop_map(|(seq, keep, plan)| Step::Truncate { seq, keep, plan }),
        3 => (seq, prop::bool::weighted(0.2)).prop_map(|(seq, drop)| Step::Close { seq, drop }),
        2 => (plan.clone(), 0u64..50).prop_map(|(plan, ms)| Step::Lease { plan, ms }),
        1 => seq.prop_map(|lease| Step::Release { lease }),
        1 => (plan.clone(), 0u64..50).prop_map(|(plan, ms)| Step::Pin { plan, ms }),
        1 => plan.clone().prop_map(|plan| Step::Unpin { plan }),
        1 => plan.prop_map(|plan| Step::Drop { plan }),
        2 => (0u64..40).prop_map(|ms| Step::Wait { ms }),
        2 => Just(Step::Evict),
    ]
}

struct Sequence {
    id: SequenceId,
    /// Tokens that it has or will have.
    plan: Vec<u32>,
    lengths: [u32; 2],
}

struct InFlight {
    ticket: PublishTicket,
    /// Blocks from the start that the ticket may make findable.
    plan: Vec<u32>,
}

struct HeldLease {
    id: LeaseId,
    ends: Instant,
    keys: Vec<u8>,
    blocks: usize,
}

struct World {
    bench: Bench,
    watcher: Arc<Watcher>,
    /// Nothing is ever evicted or fails: what was published is found.
    roomy: bool,
    sequences: Vec<Sequence>,
    in_flight: Vec<InFlight>,
    leases: Vec<HeldLease>,
    /// Keys of all blocks that were ever published.
    published: BTreeSet<u64>,
    now: Instant,
    next_lease: u64,
}

fn hash_of(tokens: &[u32]) -> u64 {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

impl World {
    fn page(&self) -> u32 {
        self.bench.model.geometry.block_tokens
    }

    /// The tokens of a plan.
    fn plan(&self, bits: u8) -> Vec<u32> {
        let page = self.page();
        (0..BLOCKS * page).map(|at| at * 2 + u32::from(bits >> (at / page) & 1)).collect()
    }

    /// Keys of blocks of a plan.
    fn keys(&self, plan: &[u32], blocks: std::ops::Range<u32>) -> Vec<u8> {
        let ends = blocks.map(|block| ((block + 1) * self.page()) as usize);
        ends.flat_map(|end| hash_of(&plan[..end]).to_le_bytes()).collect()
    }

    fn chain<'a>(&self, keys: &'a [u8]) -> KeyChain<'a> {
        let key_tokens = self.page();
        KeyChain::new(PackedKeys { bytes: keys, key_bytes: 8, key_tokens }, key_tokens).unwrap()
    }

    fn pick(&self, seq: usize) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| seq % self.sequences.len())
    }

    /// Blocks of a plan that must be findable where nothing goes, and may be elsewhere.
    fn findable(&self, plan: &[u32]) -> usize {
        let is_published = |block: &u32| {
            self.published.contains(&hash_of(&plan[..((block + 1) * self.page()) as usize]))
        };
        (0..BLOCKS).take_while(is_published).count()
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Open { plan } if self.sequences.len() < 5 => self.open(plan),
            Step::Append { seq, layer, tokens } => self.append(seq, layer, tokens),
            Step::Publish { seq, start, blocks, fail } => {
                if let Some(flight) = self.begin(seq, start, blocks) {
                    self.finish(flight, fail);
                }
            }
            Step::Begin { seq, start, blocks } if self.in_flight.len() < 3 => {
                let flight = self.begin(seq, start, blocks);
                self.in_flight.extend(flight);
            }
            Step::Finish { ticket, fail, commit } if !self.in_flight.is_empty() => {
                let flight = self.in_flight.swap_remove(ticket % self.in_flight.len());
                if commit {
                    self.finish(flight, fail);
                }
            }
            Step::Fork { .. } | Step::Truncate { .. } | Step::Close { .. } => self.change(step),
            Step::Lease { plan, ms } => self.lease(plan, ms),
            Step::Release { lease } if !self.leases.is_empty() => {
                let lease = self.leases.swap_remove(lease % self.leases.len());
                let index = self.bench.store.prefix_index();
                let ended = index.release_lease(self.bench.ns(), lease.id, self.now);
                assert_eq!(ended.is_ok(), lease.ends > self.now);
            }
            Step::Pin { plan, ms } => {
                let keys = self.keys(&self.plan(plan), 0..BLOCKS);
                let ends = (ms > 25).then(|| self.now + Duration::from_millis(ms));
                let request = PinRequest { model: self.bench.model.id, now: self.now, ends };
                let index = self.bench.store.prefix_index();
                if let Err(error) = index.pin_prefixes(request, &[self.chain(&keys)]) {
                    assert_eq!(error.code(), ErrorCode::LimitExceeded);
                }
            }
            Step::Unpin { plan } => {
                let keys = self.keys(&self.plan(plan), 0..BLOCKS);
                let index = self.bench.store.prefix_index();
                index.unpin_prefixes(self.bench.model.id, &[self.chain(&keys)]);
            }
            Step::Drop { plan } => {
                self.roomy = false;
                let keys = self.keys(&self.plan(plan), 0..BLOCKS);
                let chain = self.chain(&keys);
                let (index, model) = (self.bench.store.prefix_index(), self.bench.model.id);
                let DroppedBlocks { dropped, held, .. } = index.drop_prefixes(model, &[chain]);
                let left = index.match_prefixes(model, &[chain])[0];
                assert_eq!(left as u64, held, "{dropped} dropped");
            }
            Step::Wait { ms } => self.now += Duration::from_millis(ms),
            Step::Evict => {
                let evicted = self.bench.store.prefix_index().evict_block(None, self.now);
                self.roomy &= !evicted;
            }
            _ => {}
        }
    }

    /// Forks, cuts and closes.
    fn change(&mut self, step: &Step) {
        match *step {
            Step::Fork { seq, keep } if self.sequences.len() < 5 => {
                let Some(index) = self.pick(seq) else { return };
                let parent = &self.sequences[index];
                let length = parent.lengths.into_iter().min().unwrap() * keep / 100;
                let store = &self.bench.store;
                let id = store.fork_sequence(self.bench.ns(), parent.id, Some(length)).unwrap().id;
                let plan = parent.plan.clone();
                self.sequences.push(Sequence { id, plan, lengths: [length; 2] });
            }
            Step::Truncate { seq, keep, plan } => {
                let Some(index) = self.pick(seq) else { return };
                let new = self.plan(plan);
                let sequence = &mut self.sequences[index];
                let length = sequence.lengths.into_iter().min().unwrap() * keep / 100;
                let store = &self.bench.store;
                store.truncate_sequence(self.bench.ns(), sequence.id, length).unwrap();
                sequence.lengths = [length; 2];
                sequence.plan[length as usize..].copy_from_slice(&new[length as usize..]);
            }
            Step::Close { seq, drop } => {
                let Some(index) = self.pick(seq) else { return };
                let gone = self.sequences.swap_remove(index);
                let (store, ns) = (&self.bench.store, self.bench.ns());
                self.roomy &= !drop;
                let closed = if drop {
                    store.close_and_drop(ns, gone.id).map(|_| ())
                } else {
                    store.close_sequence(ns, gone.id)
                };
                closed.unwrap();
            }
            _ => {}
        }
    }

    fn open(&mut self, bits: u8) {
        let plan = self.plan(bits);
        let keys = self.keys(&plan, 0..BLOCKS);
        let model = Arc::clone(&self.bench.model);
        let opened = self.bench.store.open_with_prefix(model, &self.chain(&keys), None).unwrap();
        let blocks = (opened.length / self.page()) as usize;
        let findable = self.findable(&plan);
        assert!(blocks <= findable, "{blocks} found, {findable} were published");
        assert!(!self.roomy || blocks == findable, "{blocks} found of {findable}");
        for lease in &self.leases {
            if lease.ends > self.now && lease.keys == keys {
                assert!(blocks >= lease.blocks, "a lease was of {}", lease.blocks);
            }
        }
        self.sequences.push(Sequence { id: opened.id, plan, lengths: [opened.length; 2] });
    }

    fn append(&mut self, seq: usize, layer: u32, tokens: u32) {
        let Some(index) = self.pick(seq) else { return };
        let sequence = &self.sequences[index];
        let start = sequence.lengths[layer as usize];
        let end = (start + tokens).min(BLOCKS * self.page());
        if start == end {
            return;
        }
        match self.bench.begin(sequence.id, layer, start, end - start) {
            Ok(ticket) => {
                let values = &sequence.plan[start as usize..end as usize];
                self.bench.finish(ticket, values, |_| false);
                self.sequences[index].lengths[layer as usize] = end;
            }
            Err(error) => assert!(matches!(error, StoreError::PoolFull(_)), "{error}"),
        }
    }

    fn begin(&self, seq: usize, start: u32, blocks: u32) -> Option<InFlight> {
        let sequence = &self.sequences[self.pick(seq)?];
        let end = (start + blocks).min(BLOCKS);
        let keys = self.keys(&sequence.plan, start.min(end)..end);
        let (store, ns) = (&self.bench.store, self.bench.ns());
        let begun = store.begin_publish(ns, sequence.id, start * self.page(), &self.chain(&keys));
        match begun {
            Ok(ticket) => {
                let plan = sequence.plan[..(end * self.page()) as usize].to_vec();
                Some(InFlight { ticket, plan })
            }
            Err(StoreError::RangeNotStored { asked, stored }) => {
                assert_eq!(stored, sequence.lengths.into_iter().min().unwrap());
                assert_eq!(asked, end * self.page());
                None
            }
            Err(StoreError::PublishGap { published, .. }) => {
                assert!(published < start * self.page());
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn finish(&mut self, flight: InFlight, fail: u8) {
        let InFlight { ticket, plan } = flight;
        // Any bit will do to have some settle.
        let ticket = if plan.len() % 4 > 1 { ticket.with_settling() } else { ticket };
        let done = self.bench.finish_publish(ticket, |block| fail >> (block % 8) & 1 > 0);
        assert!(done.length as usize <= plan.len());
        let page = self.page();
        let ends = (1..=done.length / page).map(|end| (end * page) as usize);
        self.published.extend(ends.map(|end| hash_of(&plan[..end])));
        let asked = plan.len() as u32;
        assert!(done.length == asked || done.stop.is_some(), "{done:?} of {asked}");
    }

    fn lease(&mut self, bits: u8, ms: u64) {
        self.next_lease += 1;
        let id = LeaseId(self.next_lease);
        let keys = self.keys(&self.plan(bits), 0..BLOCKS);
        let (now, ends) = (self.now, self.now + Duration::from_millis(ms));
        let (namespace, model) = (self.bench.ns(), self.bench.model.id);
        let request = LeaseRequest { id, namespace, model, now, ends };
        let index = self.bench.store.prefix_index();
        let blocks = index.lease_prefixes(&request, &[self.chain(&keys)]).unwrap()[0];
        if blocks > 0 {
            self.leases.push(HeldLease { id, ends, keys, blocks });
        }
    }

    /// Everything that must hold between two steps.
    fn check(&self) {
        for sequence in &self.sequences {
            for (layer, length) in (0..).zip(sequence.lengths) {
                let wanted = &sequence.plan[..length as usize];
                assert_eq!(self.bench.values(sequence.id, layer), wanted);
            }
            let usage = self.bench.store.describe_sequence(self.bench.ns(), sequence.id).unwrap();
            assert_eq!(usage, self.bench.recount(sequence.id), "counted as it changed");
        }
        let index = self.bench.store.prefix_index();
        index.end_due(self.now);
        for lease in self.leases.iter().filter(|lease| lease.ends > self.now) {
            let chain = self.chain(&lease.keys);
            assert!(index.match_prefixes(self.bench.model.id, &[chain])[0] >= lease.blocks);
        }
        let blocks = index.check_blocks();
        self.watcher.check_picture(&self.bench);
        if self.in_flight.is_empty() {
            let mut live = Live::default();
            self.bench.store.all_entries().iter().for_each(|entry| live.add_entry(entry));
            blocks.iter().for_each(|block| live.add_cached(block));
            assert_eq!(live.total(), self.bench.used());
        }
        assert_eq!(index.read_usage(self.now).pinned_bytes, index.count_pinned());
        let usage = self.bench.usage();
        assert_eq!(usage.stored.raw_bytes + usage.stored.packed_bytes, self.bench.used());
    }

    fn tear_down(mut self) {
        for sequence in self.sequences.drain(..) {
            self.bench.store.close_sequence(self.bench.ns(), sequence.id).unwrap();
        }
        self.in_flight.clear();
        let far = self.now + Duration::from_secs(3600);
        let index = self.bench.store.prefix_index();
        index.end_due(far);
        let plans: HashMap<_, _> =
            (0..64).map(|bits| (bits, self.keys(&self.plan(bits), 0..BLOCKS))).collect();
        plans.values().for_each(|keys| {
            index.unpin_prefixes(self.bench.model.id, &[self.chain(keys)]);
        });
        while index.evict_block(None, far) {}
        let usage = index.read_usage(far);
        assert_eq!((usage.entries, usage.bytes, usage.leases, usage.pinned_bytes), (0, 0, 0, 0));
        assert_eq!(self.bench.used(), 0);
        assert_eq!(self.bench.usage(), ModelUsage::default());
        assert_eq!(self.bench.store.view_count(), 0);
        let all = usage.published - usage.evicted_for_room - usage.evicted_by_limit - usage.dropped;
        assert_eq!(all, 0, "all that came went");
    }
}

fn play(
    roomy: bool,
    capacity: u64,
    shape_of: (u32, u32, u32),
    limits: CacheLimits,
    steps: &[Step],
) {
    let (block_tokens, sink, recent) = shape_of;
    let watcher = Arc::<Watcher>::default();
    let limits = CacheLimits { events: Some(watcher.clone()), ..limits };
    let bench = Bench::cached(capacity, shape(1, block_tokens, sink, recent), limits);
    let mut world = World {
        bench,
        watcher,
        roomy,
        sequences: Vec::new(),
        in_flight: Vec::new(),
        leases: Vec::new(),
        published: BTreeSet::new(),
        now: Instant::now(),
        next_lease: 0,
    };
    for step in steps {
        world.run(step);
        world.check();
    }
    world.tear_down();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn what_is_published_is_found_and_right(
        shape_of in (1u32..7, 0u32..10, 0u32..12),
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let limits = CacheLimits { pinned_bytes_max: 1 << 14, ..CacheLimits::default() };
        play(true, 1 << 18, shape_of, limits, &steps);
    }

    #[test]
    fn a_full_pool_and_small_limits_lose_nothing_but_the_cache(
        shape_of in (1u32..7, 0u32..10, 0u32..12),
        granules in 20u64..200,
        cached in 0u64..100,
        entries_max in 1usize..20,
        is_lru: bool,
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let small = EvictionChoice::S3Fifo { small_percent: 50 };
        let limits = CacheLimits {
            eviction: if is_lru { EvictionChoice::Lru } else { small },
            bytes_max: cached * 64,
            entries_max,
            pinned_bytes_max: 1 << 12,
            ..CacheLimits::default()
        };
        play(false, granules * 64, shape_of, limits, &steps);
    }
}
