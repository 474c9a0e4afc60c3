//! Rules of ranges, limits, namespaces, truncation, closing and accounting.

use super::harness::{Bench, namespace, shape};
use crate::{BegunAppend, ModelUsage, StoreError, StoreLimits};
use kvd_core::{Coded, ErrorCode, LayerIndex, ModelId, SequenceId};
use std::sync::Arc;

const L0: LayerIndex = LayerIndex(0);

fn bench() -> Bench {
    Bench::new(1 << 20, shape(1, 4, 0, 8))
}

fn code<T: std::fmt::Debug>(result: Result<T, StoreError>) -> ErrorCode {
    result.unwrap_err().code()
}

#[test]
fn gap_overlap_conflict_and_replay() {
    let b = bench();
    let id = b.open();
    b.append(id, 0, 0, &[1, 2, 3]);
    b.append(id, 0, 3, &[4]);
    let ask = |start, tokens, hash| b.store.begin_append(b.ns(), id, L0, start, tokens, hash);
    assert_eq!(ask(5, 1, 7).unwrap_err(), StoreError::RangeGap { expected: 4, start: 5 });
    let overlap = StoreError::RangeOverlap { start: 2, tokens: 2, length: 4 };
    assert_eq!(ask(2, 2, 7).unwrap_err(), overlap);
    assert_eq!(ask(0, 3, 8).unwrap_err(), StoreError::RangeConflict { start: 0, tokens: 3 });
    assert!(matches!(ask(0, 3, 7).unwrap(), BegunAppend::Replayed { length: 4 }));
    assert!(matches!(ask(3, 1, 7).unwrap(), BegunAppend::Replayed { length: 4 }));
    // Layers do not wait for one another, nor share what they remember.
    assert_eq!(b.store.describe_sequence(b.ns(), id).unwrap().layer_lengths, [4, 0]);
    assert!(b.begin(id, 1, 0, 3).is_ok());
}

#[test]
fn only_recent_ranges_are_remembered() {
    let b = bench();
    let id = b.open();
    for token in 0..65 {
        b.append(id, 0, token, &[token]);
    }
    let ask = |start| b.store.begin_append(b.ns(), id, L0, start, 1, 7);
    assert_eq!(code(ask(0)), ErrorCode::RangeOverlap);
    assert!(matches!(ask(1).unwrap(), BegunAppend::Replayed { length: 65 }));
}

#[test]
fn sizes_and_layers_are_checked() {
    let limits = StoreLimits {
        sequences_max: 2,
        tokens_per_sequence_max: 10,
        tokens_per_append_max: 6,
        ..StoreLimits::default()
    };
    let b = Bench::limited(1 << 20, shape(1, 4, 0, 8), limits);
    let id = b.open();
    assert_eq!(code(b.begin(id, 0, 0, 0)), ErrorCode::InvalidArgument);
    assert_eq!(code(b.begin(id, 2, 0, 1)), ErrorCode::InvalidArgument);
    assert_eq!(code(b.begin(id, 0, 0, 7)), ErrorCode::LimitExceeded);
    assert_eq!(code(b.begin(id, 0, u32::MAX, 2)), ErrorCode::LimitExceeded);
    b.append(id, 0, 0, &[0; 6]);
    let asked = StoreError::LimitExceeded { limit: "tokens_per_sequence_max", max: 10, asked: 11 };
    assert_eq!(b.begin(id, 0, 6, 5).unwrap_err(), asked);
    b.append(id, 0, 6, &[0; 4]);

    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    assert_eq!(code(b.store.fork_sequence(b.ns(), id, None)), ErrorCode::LimitExceeded);
    assert_eq!(code(b.store.open_sequence(b.model.clone())), ErrorCode::LimitExceeded);
    b.store.close_sequence(b.ns(), fork).unwrap();
    b.open();

    let mut wrong = (*b.model).clone();
    wrong.geometry.block_tokens = 0;
    assert_eq!(code(b.store.open_sequence(wrong.into())), ErrorCode::InvalidArgument);
}

#[test]
fn what_needs_no_content_to_be_refused_is_told_without_it_and_reserves_nothing() {
    let limits = StoreLimits {
        tokens_per_sequence_max: 10,
        tokens_per_append_max: 6,
        ..StoreLimits::default()
    };
    let b = Bench::limited(1 << 20, shape(1, 4, 0, 8), limits);
    let id = b.open();
    b.append(id, 0, 0, &[1, 2, 3]);
    b.append(id, 0, 3, &[4]);
    let used = b.used();
    let claim = |start, tokens| b.store.claim_append(b.ns(), id, L0, start, tokens);
    // Whether there is a claim, which is dropped.
    let ask = |start, tokens| claim(start, tokens).map(|claim| claim.is_some());
    let begin = |start, tokens| b.begin(id, 0, start, tokens).map(drop);
    let (overlaps, gaps) = ([(2, 2), (0, 4)], [(5, 1), (5, 5)]);
    let sizes = [(4, 0), (4, 7), (5, 6), (u32::MAX, 2), (4, 6)];
    for (start, tokens) in overlaps.into_iter().chain(gaps).chain(sizes) {
        assert_eq!(ask(start, tokens).map(drop), begin(start, tokens), "{start}, {tokens}");
    }
    assert_eq!(ask(5, 1), Err(StoreError::RangeGap { expected: 4, start: 5 }));
    assert_eq!(ask(4, 6), Ok(true));
    // Whether it is the same range again, only its content says.
    assert_eq!((ask(0, 3), ask(3, 1)), (Ok(false), Ok(false)));
    let past = LayerIndex(9);
    assert_eq!(code(b.store.claim_append(b.ns(), id, past, 4, 1)), ErrorCode::InvalidArgument);
    // Another appends: to this layer, not to the next.
    assert_eq!(b.used(), used, "nothing was reserved");
    let ticket = b.begin(id, 0, 4, 1).unwrap();
    let busy = Err(StoreError::SequenceBusy { id, layer: L0 });
    assert_eq!((ask(4, 1), ask(5, 1), ask(0, 3)), (busy.clone(), busy, Ok(false)));
    drop(b.store.claim_append(b.ns(), id, LayerIndex(1), 0, 1).unwrap().unwrap());
    drop(ticket);
    assert_eq!(ask(4, 1), Ok(true));
}

#[test]
fn a_claim_is_an_append_in_flight_until_it_is_dropped_or_a_ticket() {
    let b = bench();
    let id = b.open();
    b.fill(id, 0..5);
    let claim = |start| b.store.claim_append(b.ns(), id, L0, start, 2);
    let busy = StoreError::SequenceBusy { id, layer: L0 };
    let (used, held) = (b.used(), claim(5).unwrap().unwrap());
    assert_eq!(b.used(), used, "nothing was reserved");
    // The same range, what continues it, and what would move its start.
    for start in [5, 7, 9] {
        assert_eq!(claim(start).unwrap_err(), busy, "{start}");
        assert_eq!(b.begin(id, 0, start, 2).unwrap_err(), busy, "{start}");
    }
    assert_eq!(b.store.truncate_sequence(b.ns(), id, 4).unwrap_err(), busy);
    // Reading goes on.
    assert_eq!(b.values(id, 0), [0, 1, 2, 3, 4]);
    drop(held);
    assert_eq!(claim(7).unwrap_err(), StoreError::RangeGap { expected: 5, start: 7 });
    let ticket = b.store.begin_claimed(claim(5).unwrap().unwrap(), 77).unwrap();
    assert_eq!((ticket.start(), ticket.tokens(), ticket.length_after()), (5, 2, 7));
    assert_eq!(claim(7).unwrap_err(), busy);
    assert_eq!(ticket.commit(Vec::new()), 7);
    assert!(claim(5).unwrap().is_none(), "it is remembered");
    let again = b.store.begin_append(b.ns(), id, L0, 5, 2, 77).unwrap();
    assert!(matches!(again, BegunAppend::Replayed { length: 7 }));
    // What is in flight when a sequence is closed ends as it may, and leaves nothing.
    let held = claim(7).unwrap().unwrap();
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.store.begin_claimed(held, 1).unwrap().commit(Vec::new()), 9);
    assert_eq!(b.used(), 0);
}

#[test]
fn a_claim_that_finds_no_room_is_given_back() {
    let b = Bench::limited(0, shape(1, 4, 0, 8), StoreLimits::default());
    let id = b.open();
    let claim = || b.store.claim_append(b.ns(), id, L0, 0, 2).unwrap().unwrap();
    for _ in 0..2 {
        assert_eq!(code(b.store.begin_claimed(claim(), 1)), ErrorCode::PoolFull);
    }
}

#[test]
fn another_namespace_sees_nothing() {
    let b = bench();
    let id = b.open();
    b.fill(id, 0..5);
    let other = namespace("other");
    let missing = SequenceId(999);
    for (ns, id) in [(&other, id), (b.ns(), missing)] {
        let unknown = StoreError::UnknownSequence { id };
        assert_eq!(b.store.fork_sequence(ns, id, None).unwrap_err(), unknown);
        assert_eq!(b.store.truncate_sequence(ns, id, 0).unwrap_err(), unknown);
        assert_eq!(b.store.close_sequence(ns, id).unwrap_err(), unknown);
        assert_eq!(b.store.describe_sequence(ns, id).unwrap_err(), unknown);
        assert_eq!(b.store.model_of(ns, id).unwrap_err(), unknown);
        assert_eq!(b.store.begin_append(ns, id, L0, 5, 1, 0).unwrap_err(), unknown);
        assert_eq!(b.store.claim_append(ns, id, L0, 5, 1).unwrap_err(), unknown);
        assert_eq!(b.store.pin_range(ns, id, L0, 0..1, None).unwrap_err(), unknown);
    }
    assert_eq!(b.values(id, 0), [0, 1, 2, 3, 4]);
    assert_eq!(b.store.model_of(b.ns(), id).unwrap().id, ModelId(1));
}

#[test]
fn pins_cover_what_was_asked_and_no_more() {
    let b = bench();
    let id = b.open();
    b.fill(id, 0..30);
    let pin =
        |range: std::ops::Range<u32>, length| b.store.pin_range(b.ns(), id, L0, range, length);
    let pinned = pin(3..18, None).unwrap();
    assert_eq!((pinned.length, pinned.range.clone()), (30, 3..18));
    let values: Vec<u32> = b.show(&pinned).iter().map(|t| t.value).collect();
    assert_eq!(values, (3..18).collect::<Vec<_>>());
    assert!(b.show(&pin(7..7, None).unwrap()).is_empty());
    assert!(b.show(&pin(30..30, None).unwrap()).is_empty());
    assert_eq!(pin(0..20, Some(20)).unwrap().length, 20);
    let past = |asked, stored| StoreError::RangeNotStored { asked, stored };
    assert_eq!(pin(0..31, None).unwrap_err(), past(31, 30));
    assert_eq!(pin(0..21, Some(20)).unwrap_err(), past(21, 20));
    assert_eq!(pin(0..1, Some(31)).unwrap_err(), past(31, 30));
    let backwards = std::ops::Range { start: 9, end: 8 };
    assert_eq!(pin(backwards, None).unwrap_err(), StoreError::InvalidRange { start: 9, end: 8 });
    let open_end = b.store.pin_range(b.ns(), id, L0, 4.., Some(10)).unwrap();
    assert_eq!(open_end.range, 4..10);
    assert_eq!(b.store.pin_range(b.ns(), id, L0, 31.., None).unwrap_err(), past(31, 30));
    assert_eq!(b.store.pin_range(b.ns(), id, L0, ..=29, None).unwrap().range, 0..30);
}

#[test]
fn truncation_forgets_tokens_and_ranges() {
    let b = bench();
    let id = b.open();
    b.append(id, 0, 0, &[1, 2, 3]);
    b.append(id, 0, 3, &[4, 5, 6]);
    b.append(id, 1, 0, &[1, 2, 3, 4]);
    let past = StoreError::RangeNotStored { asked: 5, stored: 4 };
    assert_eq!(b.store.truncate_sequence(b.ns(), id, 5).unwrap_err(), past);
    b.store.truncate_sequence(b.ns(), id, 4).unwrap();
    assert_eq!(b.store.describe_sequence(b.ns(), id).unwrap().layer_lengths, [4, 4]);
    let ask = |start, tokens| b.store.begin_append(b.ns(), id, L0, start, tokens, 7);
    assert!(matches!(ask(0, 3).unwrap(), BegunAppend::Replayed { length: 4 }));
    assert_eq!(code(ask(3, 3)), ErrorCode::RangeOverlap);
    b.append(id, 0, 4, &[50]);
    assert_eq!(b.values(id, 0), [1, 2, 3, 4, 50]);
    b.store.truncate_sequence(b.ns(), id, 0).unwrap();
    assert_eq!(b.used(), 0);
}

#[test]
fn one_append_at_a_time_on_a_layer() {
    let b = bench();
    let id = b.open();
    b.append(id, 0, 0, &[1]);
    let ticket = b.begin(id, 0, 1, 2).unwrap();
    let busy = StoreError::SequenceBusy { id, layer: L0 };
    assert_eq!(b.begin(id, 0, 1, 2).unwrap_err(), busy);
    // Not a gap: what is in flight may fill it.
    assert_eq!(b.begin(id, 0, 3, 2).unwrap_err(), busy);
    assert!(busy.code().is_retryable());
    let replay = b.store.begin_append(b.ns(), id, L0, 0, 1, 7).unwrap();
    assert!(matches!(replay, BegunAppend::Replayed { length: 1 }));
    b.append(id, 1, 0, &[1]);
    assert_eq!(b.store.truncate_sequence(b.ns(), id, 0).unwrap_err(), busy);
    b.finish(ticket, &[2, 3], |_| false);
    assert_eq!(b.values(id, 0), [1, 2, 3]);
    b.store.truncate_sequence(b.ns(), id, 0).unwrap();
}

#[test]
fn close_leaves_pins_and_tickets_valid() {
    let b = bench();
    let id = b.open();
    b.fill(id, 0..5);
    let pinned = b.pin(id, 0);
    let ticket = b.begin(id, 0, 5, 2).unwrap();
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.store.close_sequence(b.ns(), id).unwrap_err(), StoreError::UnknownSequence { id });
    assert_eq!(b.usage().sequences, 0);
    assert_eq!(b.show(&pinned).len(), 5);
    b.finish(ticket, &[5, 6], |_| false);
    assert!(b.used() > 0, "the pin holds its bytes");
    assert_eq!(b.usage().stored.raw_bytes, b.used());
    drop(pinned);
    assert_eq!(b.used(), 0);
    assert_eq!(b.usage(), ModelUsage::default());
}

#[test]
fn ledgers_and_descriptions_count_what_is_held() {
    let b = Bench::new(1 << 20, shape(1, 4, 2, 4));
    let per_token = b.model.geometry.values_per_token();
    let id = b.open();
    b.fill(id, 0..14);
    assert_eq!(b.states(id, 0), "rrpppppprrrrrr");
    let described = b.store.describe_sequence(b.ns(), id).unwrap();
    assert_eq!((described.length, described.model), (14, ModelId(1)));
    assert_eq!((described.packed_blocks, described.raw_blocks), (2, 2 * 3));
    let usage = b.usage();
    assert_eq!((usage.sequences, usage.stored), (1, described.stored));
    let stored = usage.stored;
    assert_eq!(stored.packed_values, 2 * 6 * per_token);
    assert_eq!(stored.raw_values, 2 * 8 * per_token);
    assert_eq!(stored.raw_bytes + stored.packed_bytes, b.used());
    assert_eq!(stored.packed_key_bytes, stored.packed_value_bytes);
    let parts = stored.code_bytes + stored.scale_bytes + stored.offset_bytes + stored.header_bytes;
    assert_eq!(stored.packed_key_bytes * 2, parts);
    assert!(parts <= stored.packed_bytes && stored.packed_bytes < parts + 64 * 4);

    // A fork adds a sequence and no bytes.
    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    let shared = ModelUsage { sequences: 2, stored };
    assert_eq!(b.usage(), shared);
    assert_eq!(b.store.describe_sequence(b.ns(), fork).unwrap().stored, stored);
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.used(), stored.raw_bytes + stored.packed_bytes);
    b.store.truncate_sequence(b.ns(), fork, 13).unwrap();
    assert_eq!(b.usage().stored.raw_values, 2 * 7 * per_token);
    b.store.close_sequence(b.ns(), fork).unwrap();
    assert_eq!(b.usage(), ModelUsage::default());
    assert_eq!(b.used(), 0);
}

#[test]
fn layers_of_all_sequences_are_bounded() {
    // Of two layers each.
    let limits = StoreLimits { sequence_layers_max: 5, ..StoreLimits::default() };
    let b = Bench::limited(1 << 20, shape(1, 4, 0, 8), limits);
    let (first, second) = (b.open(), b.open());
    let full = StoreError::LimitExceeded { limit: "sequence_layers_max", max: 5, asked: 6 };
    assert_eq!(b.store.open_sequence(b.model.clone()).unwrap_err(), full);
    assert_eq!(b.store.fork_sequence(b.ns(), first, None).unwrap_err(), full);
    b.store.close_sequence(b.ns(), second).unwrap();
    b.store.fork_sequence(b.ns(), first, None).unwrap();
}

#[test]
fn a_block_that_could_not_be_packed_is_offered_as_retried() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 0));
    let id = b.open();
    let ticket = b.begin(id, 0, 0, 8).unwrap();
    assert!(ticket.pack_tasks().iter().all(|task| !task.retried));
    b.finish(ticket, &[0, 1, 2, 3, 4, 5, 6, 7], |block| block == 1);
    let ticket = b.begin(id, 0, 8, 4).unwrap();
    let offered: Vec<_> =
        ticket.pack_tasks().iter().map(|task| (task.block, task.retried)).collect();
    assert_eq!(offered, [(1, true), (2, false)]);
    drop(ticket);
    // Other rows are another block.
    b.append(id, 1, 0, &[0; 8]);
    b.store.truncate_sequence(b.ns(), id, 6).unwrap();
    let ticket = b.begin(id, 0, 6, 2).unwrap();
    let offered: Vec<_> =
        ticket.pack_tasks().iter().map(|task| (task.block, task.retried)).collect();
    assert_eq!(offered, [(1, false)]);
}

#[test]
fn a_block_that_was_given_up_stays_raw_and_holds_up_no_other() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 0));
    let id = b.open();
    let ticket = b.begin(id, 0, 0, 8).unwrap();
    ticket.pack_batch().give_up(0);
    b.finish(ticket, &[0, 1, 2, 3, 4, 5, 6, 7], |block| block == 0);
    let ticket = b.begin(id, 0, 8, 4).unwrap();
    let offered: Vec<_> = ticket.pack_tasks().iter().map(|task| task.block).collect();
    assert_eq!(offered, [2]);
    b.finish(ticket, &[8, 9, 10, 11], |_| false);
    let usage = b.store.describe_sequence(b.ns(), id).unwrap();
    assert_eq!((usage.packed_blocks, usage.raw_blocks), (2, 1));
}

#[test]
fn a_store_without_ids_refuses_and_counts_nothing() {
    let b = bench();
    let first = b.open();
    b.fill(first, 0..3);
    b.store.ids.skip_to_last(1);
    let last = b.open();
    assert_ne!(first, last);
    for _ in 0..2 {
        let refused = b.store.open_sequence(Arc::clone(&b.model)).unwrap_err();
        assert_eq!(
            (refused.clone(), refused.code()),
            (StoreError::IdsExhausted(kvd_core::IdsExhausted), ErrorCode::LimitExceeded,)
        );
        assert_eq!(b.store.fork_sequence(b.ns(), first, None).unwrap_err(), refused);
    }
    assert_eq!(b.usage().sequences, 2);
    b.store.close_sequence(b.ns(), first).unwrap();
    b.store.close_sequence(b.ns(), last).unwrap();
    assert_eq!(b.store.entry_counts(), [0, 0]);
}
