//! Random operations against a naive model: one token list per sequence and layer.
//!
//! The model knows no blocks that are shared, no slots and no copies: it says what each sequence
//! would read if it were alone. After every step everything is read back through pins, and the
//! pool and the ledgers are compared with the slots that can be reached.

use super::harness::{Bench, Live, Token, shape};
use crate::append::AppendTicket;
use crate::pinned::PinnedRange;
use crate::{ForkedSequence, ModelUsage, StoreError};
use kvd_core::{Coded, ErrorCode, LayerIndex, SequenceId};
use proptest::prelude::*;

/// One step; indices are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Open,
    Append { seq: usize, layer: u32, tokens: u32, fail: u8 },
    RollBack { seq: usize, layer: u32, tokens: u32 },
    Begin { seq: usize, layer: u32, tokens: u32 },
    Finish { ticket: usize, fail: u8, commit: bool },
    Fork { seq: usize, keep: u32 },
    Truncate { seq: usize, keep: u32 },
    Close { seq: usize },
    Pin { seq: usize, layer: u32, from: u32, to: u32 },
    Unpin { pin: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let (seq, layer, tokens) = (any::<usize>(), 0u32..2, 1u32..14);
    let place = || (seq, layer.clone(), tokens.clone());
    // Mostly a fork or cut near the end, where the windows are.
    let keep = || prop_oneof![1 => Just(100), 1 => 80u32..=100, 1 => 0u32..=100];
    prop_oneof![
        1 => Just(Step::Open),
        8 => (place(), any::<u8>())
            .prop_map(|((seq, layer, tokens), fail)| Step::Append { seq, layer, tokens, fail }),
        1 => place().prop_map(|(seq, layer, tokens)| Step::RollBack { seq, layer, tokens }),
        4 => place().prop_map(|(seq, layer, tokens)| Step::Begin { seq, layer, tokens }),
        4 => (seq, any::<u8>(), prop::bool::weighted(0.8))
            .prop_map(|(ticket, fail, commit)| Step::Finish { ticket, fail, commit }),
        2 => (seq, keep()).prop_map(|(seq, keep)| Step::Fork { seq, keep }),
        2 => (seq, keep()).prop_map(|(seq, keep)| Step::Truncate { seq, keep }),
        1 => seq.prop_map(|seq| Step::Close { seq }),
        2 => (seq, 0u32..2, 0u32..=100, 0u32..=100)
            .prop_map(|(seq, layer, from, to)| Step::Pin { seq, layer, from, to }),
        2 => seq.prop_map(|pin| Step::Unpin { pin }),
    ]
}

struct Sequence {
    id: SequenceId,
    layers: [Vec<Token>; 2],
}

impl Sequence {
    fn length(&self) -> u32 {
        self.layers.iter().map(Vec::len).min().unwrap() as u32
    }
}

struct InFlight {
    ticket: AppendTicket,
    values: Vec<u32>,
}

struct World {
    bench: Bench,
    /// No memory is short and no packing fails: what is due is packed.
    strict: bool,
    sequences: Vec<Sequence>,
    in_flight: Vec<InFlight>,
    pins: Vec<(PinnedRange, Vec<Token>)>,
    next_value: u32,
}

impl World {
    fn pick(&self, seq: usize) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| seq % self.sequences.len())
    }

    fn is_busy(&self, id: SequenceId, layer: Option<u32>) -> bool {
        let same = |t: &AppendTicket| layer.is_none_or(|l| t.layer() == LayerIndex(l));
        self.in_flight.iter().any(|f| f.ticket.sequence() == id && same(&f.ticket))
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Open if self.sequences.len() < 5 => {
                let id = self.bench.open();
                self.sequences.push(Sequence { id, layers: Default::default() });
            }
            Step::Append { seq, layer, tokens, fail } => {
                if let Some(flight) = self.begin(seq, layer, tokens) {
                    self.commit(flight, fail);
                }
            }
            Step::RollBack { seq, layer, tokens } => {
                if let Some(flight) = self.begin(seq, layer, tokens) {
                    drop(self.bench.execute(&flight.ticket, &flight.values, |_| false));
                }
            }
            Step::Begin { seq, layer, tokens } => {
                let flight = self.begin(seq, layer, tokens);
                self.in_flight.extend(flight);
            }
            Step::Finish { ticket, fail, commit } if !self.in_flight.is_empty() => {
                let flight = self.in_flight.swap_remove(ticket % self.in_flight.len());
                if commit {
                    self.commit(flight, fail);
                }
            }
            Step::Fork { seq, keep } if self.sequences.len() < 5 => self.fork(seq, keep),
            Step::Truncate { seq, keep } => self.truncate(seq, keep),
            Step::Close { seq } => {
                if let Some(index) = self.pick(seq) {
                    let gone = self.sequences.swap_remove(index);
                    self.bench.store.close_sequence(self.bench.ns(), gone.id).unwrap();
                }
            }
            Step::Pin { seq, layer, from, to } => self.pin(seq, layer, from, to),
            Step::Unpin { pin } if !self.pins.is_empty() => {
                let index = pin % self.pins.len();
                self.pins.swap_remove(index);
            }
            _ => {}
        }
    }

    fn begin(&mut self, seq: usize, layer: u32, tokens: u32) -> Option<InFlight> {
        let sequence = &self.sequences[self.pick(seq)?];
        let start = sequence.layers[layer as usize].len() as u32;
        let used = self.bench.used();
        let ticket = match self.bench.begin(sequence.id, layer, start, tokens) {
            Ok(ticket) => ticket,
            Err(error) => {
                match error {
                    StoreError::SequenceBusy { .. } => {
                        assert!(self.is_busy(sequence.id, Some(layer)));
                    }
                    StoreError::PoolFull(_) => assert!(!self.strict),
                    other => panic!("{other}"),
                }
                assert_eq!(self.bench.used(), used, "a refusal changes nothing");
                return None;
            }
        };
        assert!(!self.is_busy(sequence.id, Some(layer)));
        let values = (self.next_value..self.next_value + tokens).collect();
        self.next_value += tokens;
        Some(InFlight { ticket, values })
    }

    fn commit(&mut self, flight: InFlight, fail: u8) {
        let (id, layer) = (flight.ticket.sequence(), flight.ticket.layer().0);
        let strict = self.strict;
        let packed = self
            .bench
            .finish(flight.ticket, &flight.values, |b| !strict && fail >> (b % 8) & 1 > 0);
        let Some(sequence) = self.sequences.iter_mut().find(|s| s.id == id) else { return };
        let tokens = &mut sequence.layers[layer as usize];
        let model = &self.bench.model;
        let block = model.geometry.block_tokens as usize;
        // A block that is cut in the middle is decoded by the append.
        let cut = tokens.len() - tokens.len() % block;
        tokens[cut..].iter_mut().for_each(|t| t.packed = false);
        let new = |value: &u32| Token { value: *value, lossy: false, packed: false };
        tokens.extend(flight.values.iter().map(new));
        let due = tokens.len().saturating_sub(model.recent as usize) / block;
        let seen = self.bench.read(id, layer);
        for (i, token) in tokens.iter_mut().enumerate().take(due * block) {
            if i < model.sink as usize || token.packed {
                continue;
            }
            // Where packing may fail, another sequence may still have packed the block.
            let now = strict || packed.contains(&((i / block) as u32)) || seen[i].packed;
            token.packed = now;
            token.lossy |= now;
        }
    }

    fn fork(&mut self, seq: usize, keep: u32) {
        let Some(index) = self.pick(seq) else { return };
        let parent = &self.sequences[index];
        let length = parent.length() * keep / 100;
        let asked = (keep < 100).then_some(length);
        let ForkedSequence { id, length: got } =
            self.bench.store.fork_sequence(self.bench.ns(), parent.id, asked).unwrap();
        assert_eq!(got, length);
        let layers = parent.layers.clone().map(|mut l| {
            l.truncate(length as usize);
            l
        });
        self.sequences.push(Sequence { id, layers });
    }

    fn truncate(&mut self, seq: usize, keep: u32) {
        let Some(index) = self.pick(seq) else { return };
        let busy = self.is_busy(self.sequences[index].id, None);
        let sequence = &mut self.sequences[index];
        let length = sequence.length() * keep / 100;
        match self.bench.store.truncate_sequence(self.bench.ns(), sequence.id, length) {
            Ok(()) => {
                assert!(!busy);
                sequence.layers.iter_mut().for_each(|l| l.truncate(length as usize));
            }
            Err(error) => {
                assert!(busy);
                assert_eq!(error.code(), ErrorCode::SequenceBusy);
            }
        }
    }

    fn pin(&mut self, seq: usize, layer: u32, from: u32, to: u32) {
        let Some(index) = self.pick(seq) else { return };
        let sequence = &self.sequences[index];
        let tokens = &sequence.layers[layer as usize];
        let at = |percent: u32| tokens.len() as u32 * percent / 100;
        let range = at(from.min(to))..at(from.max(to));
        let (ns, layer) = (self.bench.ns(), LayerIndex(layer));
        let pinned = self
            .bench
            .store
            .pin_range(ns, sequence.id, layer, range.clone(), Some(range.end))
            .unwrap();
        let shown = tokens[range.start as usize..range.end as usize].to_vec();
        self.pins.push((pinned, shown));
    }

    /// Everything that must hold between two steps.
    fn check(&self) {
        for sequence in &self.sequences {
            for (layer, tokens) in sequence.layers.iter().enumerate() {
                assert_eq!(&self.bench.read(sequence.id, layer as u32), tokens);
            }
            let usage = self.bench.store.describe_sequence(self.bench.ns(), sequence.id).unwrap();
            assert_eq!(usage.length, sequence.length());
            assert_eq!(usage, self.bench.recount(sequence.id), "counted as it changed");
            let block = self.bench.model.geometry.block_tokens as usize;
            let blocks = || sequence.layers.iter().flat_map(|l| l.chunks(block));
            let packed = blocks().filter(|b| b.iter().all(|t| t.packed)).count() as u64;
            let raw = blocks().count() as u64 - packed;
            assert_eq!((usage.packed_blocks, usage.raw_blocks), (packed, raw));
        }
        let mut live = Live::default();
        for (pinned, shown) in &self.pins {
            assert_eq!(&self.bench.show(pinned), shown, "a pin's content has changed");
            live.add_pinned(pinned);
        }
        self.in_flight.iter().for_each(|f| live.add_ticket(&f.ticket));
        self.bench.store.all_entries().iter().for_each(|entry| live.add_entry(entry));
        assert_eq!(live.total(), self.bench.used());
        let usage = self.bench.usage();
        assert_eq!(usage.sequences, self.sequences.len() as u64);
        assert_eq!(usage.stored.raw_bytes + usage.stored.packed_bytes, self.bench.used());
    }

    fn tear_down(mut self) {
        for sequence in self.sequences.drain(..) {
            self.bench.store.close_sequence(self.bench.ns(), sequence.id).unwrap();
        }
        self.in_flight.clear();
        self.pins.clear();
        assert_eq!(self.bench.used(), 0);
        assert_eq!(
            self.bench.pool.read_usage().largest_free_bytes,
            self.bench.pool.read_usage().capacity_bytes
        );
        assert_eq!(self.bench.usage(), ModelUsage::default());
        assert_eq!(self.bench.store.view_count(), 0);
    }
}

fn play(strict: bool, capacity: u64, shape_of: (u32, u32, u32), steps: &[Step]) {
    let (block_tokens, sink, recent) = shape_of;
    let bench = Bench::new(capacity, shape(1, block_tokens, sink, recent));
    let mut world = World {
        bench,
        strict,
        sequences: Vec::new(),
        in_flight: Vec::new(),
        pins: Vec::new(),
        next_value: 1,
    };
    world.run(&Step::Open);
    for step in steps {
        world.run(step);
        world.check();
    }
    world.tear_down();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_sequence_reads_as_if_alone(
        shape_of in (1u32..7, 0u32..10, 0u32..12),
        steps in prop::collection::vec(step(), 1..100),
    ) {
        play(true, 1 << 18, shape_of, &steps);
    }

    #[test]
    fn failed_packs_and_a_full_pool_lose_nothing(
        shape_of in (1u32..7, 0u32..10, 0u32..12),
        granules in 20u64..400,
        steps in prop::collection::vec(step(), 1..100),
    ) {
        play(false, granules * 64, shape_of, &steps);
    }
}
