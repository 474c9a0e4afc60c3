//! Rules of views in shared chunks, and of what is freed later.

use super::harness::{Bench, shape};
use crate::view_list::CHUNK_VIEWS;
use crate::{ForkedSequence, SlotRegion, StoreError, StoreLimits};
use kvd_core::LayerIndex;
use std::sync::{Arc, Barrier};
use std::thread;

/// Tokens of a block in these tests.
const BLOCK: u32 = 4;

/// Tokens that fill so many chunks.
fn tokens_of_chunks(chunks: u32) -> u32 {
    chunks * CHUNK_VIEWS as u32 * BLOCK
}

#[test]
fn a_fork_copies_pointers_to_chunks_and_the_last_views() {
    let b = Bench::new(1 << 20, shape(1, BLOCK, 0, 0));
    let id = b.open();
    let tokens = tokens_of_chunks(10);
    b.fill(id, 0..tokens);
    let (blocks, layers) = (u64::from(tokens / BLOCK), 2);
    // The last chunk's views are the list's own: of those, a fork has copies.
    let (chunks, own) = (9, CHUNK_VIEWS as u64);
    assert_eq!(b.store.view_count(), layers * (blocks + chunks));
    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    assert_eq!(b.store.view_count(), layers * (blocks + chunks + chunks + own));
    // In the middle of a chunk, the rest of it is copied.
    let short =
        b.store.fork_sequence(b.ns(), id, Some(tokens_of_chunks(2) + BLOCK + 1)).unwrap().id;
    assert_eq!(b.store.view_count(), layers * (blocks + chunks + chunks + own + 2 + 2));
    for (id, len) in [(fork, tokens), (short, tokens_of_chunks(2) + BLOCK + 1)] {
        assert_eq!(b.values(id, 1), (0..len).collect::<Vec<_>>());
        b.store.close_sequence(b.ns(), id).unwrap();
    }
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!((b.used(), b.store.view_count()), (0, 0));
}

#[test]
fn a_cut_into_a_chunk_leaves_it_to_those_who_share_it() {
    let b = Bench::new(1 << 20, shape(1, BLOCK, 0, 100));
    let id = b.open();
    let tokens = tokens_of_chunks(3);
    b.fill(id, 0..tokens);
    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    let pinned = b.pin(id, 0);
    let cut = tokens_of_chunks(1) + BLOCK + 1;
    b.store.truncate_sequence(b.ns(), id, cut).unwrap();
    let ticket = b.begin(id, 0, cut, 2).unwrap();
    assert_eq!(ticket.row_copies().len(), 1, "the fork reads the rows behind the cut");
    b.finish(ticket, &[70, 80], |_| false);
    let cut_values: Vec<u32> = (0..cut).chain([70, 80]).collect();
    assert_eq!(b.values(id, 0), cut_values);
    assert_eq!(b.values(fork, 0), (0..tokens).collect::<Vec<_>>());
    assert_eq!(b.show(&pinned).len(), tokens as usize);
    // Alone, it writes in place: what the reader sees lies before the rows to come.
    b.store.close_sequence(b.ns(), fork).unwrap();
    drop(pinned);
    b.used();
    assert!(b.begin(id, 1, cut, 2).unwrap().row_copies().is_empty());
}

#[test]
fn packing_in_a_shared_chunk_changes_it_for_nobody_else() {
    // A window of several chunks: what leaves it lies in a chunk that the fork shares.
    let window = tokens_of_chunks(2);
    let b = Bench::new(1 << 20, shape(1, BLOCK, 0, window));
    let id = b.open();
    b.fill(id, 0..window);
    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    let pinned = b.pin(id, 0);
    b.append(id, 0, window, &[1000; 8]);
    assert!(b.states(id, 0).starts_with("pppppppprrrr"));
    assert!(b.states(fork, 0).starts_with("rrrrrrrrrrrr"));
    assert!(b.show(&pinned).iter().all(|token| !token.packed));
    assert_eq!(b.recount(fork), b.store.describe_sequence(b.ns(), fork).unwrap());
    assert_eq!(b.recount(id), b.store.describe_sequence(b.ns(), id).unwrap());
}

#[test]
fn views_of_all_sequences_are_bounded() {
    // Two layers of two blocks: four views, and four more for each fork.
    let limits = StoreLimits { sequence_views_max: 10, ..StoreLimits::default() };
    let b = Bench::limited(1 << 20, shape(1, BLOCK, 0, 8), limits);
    let id = b.open();
    b.fill(id, 0..7);
    let fork = b.store.fork_sequence(b.ns(), id, None).unwrap().id;
    let full = |asked| StoreError::LimitExceeded { limit: "sequence_views_max", max: 10, asked };
    assert_eq!(b.store.fork_sequence(b.ns(), id, None).unwrap_err(), full(12));
    assert_eq!(b.begin(fork, 0, 7, 12).unwrap_err(), full(11));
    // Within a block that is there, and of one new block, it goes on.
    b.append(fork, 0, 7, &[7, 8]);
    b.store.close_sequence(b.ns(), fork).unwrap();
    b.used();
    b.store.fork_sequence(b.ns(), id, None).unwrap();
}

#[test]
fn a_pool_full_of_closed_sequences_refuses_nobody() {
    // Each fills the pool: the next has memory only when the one before is free.
    let tokens = 64 * BLOCK;
    let raw_block = 192;
    let b = Bench::new(2 * 64 * raw_block, shape(1, BLOCK, 0, tokens));
    for round in 0..200 {
        let id = b.open();
        for layer in 0..2 {
            let ticket = b.begin(id, layer, 0, tokens);
            let ticket = ticket.unwrap_or_else(|error| panic!("round {round}: {error}"));
            b.finish(ticket, &vec![round; tokens as usize], |_| false);
        }
        assert_eq!(b.pool.read_usage().used_bytes, b.pool.read_usage().capacity_bytes);
        let full = b.begin(id, 0, tokens, 1).unwrap_err();
        assert!(matches!(full, StoreError::PoolFull(full) if full.region == SlotRegion::Rows));
        b.store.close_sequence(b.ns(), id).unwrap();
    }
    assert_eq!(b.used(), 0);
}

#[test]
fn many_that_need_what_was_closed_get_it() {
    let tokens = 32 * BLOCK;
    let raw_block = 192;
    let threads = 4;
    // Two layers of each thread's sequence, and no more.
    let b = Bench::new(threads * 2 * 32 * raw_block, shape(1, BLOCK, 0, tokens));
    let start = Barrier::new(threads as usize);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                start.wait();
                for round in 0..100 {
                    let id = b.open();
                    for layer in 0..2 {
                        let ticket = b.begin(id, layer, 0, tokens).unwrap();
                        b.finish(ticket, &vec![round; tokens as usize], |_| false);
                    }
                    b.store.close_sequence(b.ns(), id).unwrap();
                }
            });
        }
    });
    assert_eq!(b.used(), 0);
}

#[test]
fn a_pool_that_is_gone_ends_its_thread() {
    let b = Bench::new(1 << 20, shape(1, BLOCK, 0, 0));
    let id = b.open();
    b.fill(id, 0..tokens_of_chunks(4));
    b.store.close_sequence(b.ns(), id).unwrap();
    let reclaim = Arc::downgrade(b.pool.reclaim_queue());
    drop(b);
    let began = std::time::Instant::now();
    while reclaim.strong_count() > 0 {
        assert!(began.elapsed().as_secs() < 20, "the thread goes on");
        thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_fork_sees_all_layers_before_a_cut_or_all_after_it() {
    let layers = 200;
    let mut model = (*shape(1, BLOCK, 0, 8)).clone();
    model.geometry.layers = layers;
    let b = Bench::new(1 << 22, Arc::new(model));
    let id = b.open();
    b.fill(id, 0..40);
    let rounds = 100;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                b.store.truncate_sequence(b.ns(), id, 20).unwrap();
                for layer in 0..layers {
                    b.append(id, layer, 20, &[1000 * round; 20]);
                }
            }
        });
        scope.spawn(|| {
            for _ in 0..20 * rounds {
                let ForkedSequence { id: fork, length } =
                    b.store.fork_sequence(b.ns(), id, None).unwrap();
                assert_eq!(b.values(fork, 0), b.values(fork, layers - 1), "{length} tokens");
                let seen = b.store.describe_sequence(b.ns(), fork).unwrap();
                assert_eq!(seen.layer_lengths, vec![length; layers as usize]);
                b.store.close_sequence(b.ns(), fork).unwrap();
            }
        });
        scope.spawn(|| {
            for _ in 0..rounds {
                let seen = b.store.describe_sequence(b.ns(), id).unwrap();
                assert!(seen.layer_lengths.iter().all(|length| [20, 40].contains(length)));
                let pinned = b.store.pin_range(b.ns(), id, LayerIndex(1), 0..20, None).unwrap();
                let values: Vec<u32> = b.show(&pinned).iter().map(|token| token.value).collect();
                assert_eq!(values, (0..20).collect::<Vec<_>>());
            }
        });
    });
}
