//! Rules of the window, of packing, and of tickets that fail.

use super::harness::{Bench, shape};
use crate::{ModelUsage, StoreError};
use kvd_core::{Coded, ErrorCode};

#[test]
fn blocks_are_packed_when_they_leave_the_window() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 3));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(b.states(id, 0), "rrrrrr");
    let ticket = b.begin(id, 0, 6, 1).unwrap();
    assert_eq!((ticket.length_after(), ticket.pack_tasks().len()), (7, 1));
    assert_eq!((ticket.pack_tasks()[0].block, ticket.pack_tasks()[0].rows.clone()), (0, 0..4));
    assert!(ticket.pack_tasks()[0].keep.is_none());
    b.finish(ticket, &[6], |_| false);
    assert_eq!(b.states(id, 0), "pppprrr");
    // A long append packs blocks that it has itself written.
    b.append(id, 0, 7, &(7..23).collect::<Vec<_>>());
    assert_eq!(b.states(id, 0), "pppppppppppppppppppprrr");
    assert_eq!(b.values(id, 0), (0..23).collect::<Vec<_>>());
    assert_eq!(b.slots(), 6);
}

#[test]
fn sink_rows_stay_raw_in_a_smaller_slot() {
    let b = Bench::new(1 << 20, shape(1, 4, 6, 0));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2, 3]);
    assert_eq!(b.states(id, 0), "rrrr");
    let ticket = b.begin(id, 0, 4, 8).unwrap();
    let rows: Vec<_> = ticket.pack_tasks().iter().map(|p| (p.block, p.rows.clone())).collect();
    assert_eq!(rows, [(1, 2..4), (2, 0..4)]);
    let keep = ticket.pack_tasks()[0].keep.as_ref().unwrap();
    assert_eq!((keep.to.rows(), keep.from.rows.clone(), keep.to_row), (2, 0..2, 0));
    b.finish(ticket, &(4..12).collect::<Vec<_>>(), |_| false);
    assert_eq!(b.states(id, 0), "rrrrrrpppppp");
    assert_eq!(b.values(id, 0), (0..12).collect::<Vec<_>>());
    // The sink block, the sink's rows of the next, two packed blocks.
    assert_eq!(b.slots(), 4);
}

#[test]
fn a_block_that_could_not_be_packed_is_offered_again() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 0));
    let id = b.open();
    let ticket = b.begin(id, 0, 0, 8).unwrap();
    assert_eq!(b.finish(ticket, &(0..8).collect::<Vec<_>>(), |block| block == 0), [1]);
    assert_eq!(b.states(id, 0), "rrrrpppp");
    let ticket = b.begin(id, 0, 8, 1).unwrap();
    assert_eq!(ticket.pack_tasks().len(), 1);
    // A missing answer is like None.
    b.execute(&ticket, &[8], |_| true);
    ticket.commit(Vec::new());
    assert_eq!(b.states(id, 0), "rrrrppppr");
    b.append(id, 0, 9, &[9]);
    assert_eq!(b.states(id, 0), "pppppppprr");
}

#[test]
fn a_dropped_ticket_leaves_no_trace() {
    let b = Bench::new(1 << 20, shape(1, 4, 2, 4));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2, 3, 4, 5]);
    let (used, usage) = (b.used(), b.usage());
    let ticket = b.begin(id, 0, 6, 10).unwrap();
    let packed = b.execute(&ticket, &[99; 10], |_| false);
    assert!(b.used() > used);
    drop((ticket, packed));
    assert_eq!((b.used(), b.usage()), (used, usage));
    assert_eq!(b.values(id, 0), [0, 1, 2, 3, 4, 5]);
    b.append(id, 0, 6, &[6]);
    assert_eq!(b.values(id, 0), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_full_pool_refuses_and_changes_nothing() {
    // One raw block takes 4 tokens * 2 heads * 24 bytes = 192 bytes.
    let b = Bench::new(192 * 3, shape(1, 4, 0, 4));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2, 3, 4]);
    let error = b.begin(id, 0, 5, 8).unwrap_err();
    assert!(matches!(&error, StoreError::PoolFull(full) if full.needed == 192), "{error}");
    assert_eq!((error.code(), error.code().is_retryable()), (ErrorCode::PoolFull, true));
    assert_eq!(b.used(), 192 * 2);
    // What still fits is stored although there is no memory for the packed form.
    let ticket = b.begin(id, 0, 5, 7).unwrap();
    assert_eq!(ticket.pack_tasks().len(), 2);
    assert_eq!(b.finish(ticket, &[5, 6, 7, 8, 9, 10, 11], |_| false), [0; 0]);
    assert_eq!(b.states(id, 0), "rrrrrrrrrrrr");
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.used(), 0);
    assert_eq!(b.usage(), ModelUsage::default());
}

#[test]
fn no_room_for_the_sink_rows_only_delays_packing() {
    let b = Bench::new(192 * 2, shape(1, 4, 1, 0));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2]);
    b.append(id, 1, 0, &[0, 1, 2]);
    let ticket = b.begin(id, 0, 3, 1).unwrap();
    assert!(ticket.pack_tasks().is_empty());
    b.finish(ticket, &[3], |_| false);
    assert_eq!(b.states(id, 0), "rrrr");
}
