//! Rules of sharing: copy on write, each in its own window, truncation into packed blocks.

use super::harness::{Bench, shape};
use crate::{ForkedSequence, RowForm, StoreError};

#[test]
fn a_shared_tail_is_copied_by_whoever_appends_first() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 8));
    let first = b.open();
    b.fill(first, 0..6);
    let used = b.used();
    let ForkedSequence { id: second, length } = b.store.fork_sequence(b.ns(), first, None).unwrap();
    assert_eq!((length, b.used()), (6, used));
    let ticket = b.begin(first, 0, 6, 1).unwrap();
    let copy = &ticket.row_copies()[0];
    assert_eq!((ticket.row_copies().len(), copy.from.rows.clone(), copy.to_row), (1, 0..2, 0));
    b.finish(ticket, &[60], |_| false);
    // Now the other is alone with the old cell.
    let ticket = b.begin(second, 0, 6, 1).unwrap();
    assert!(ticket.row_copies().is_empty());
    b.finish(ticket, &[61], |_| false);
    assert_eq!(b.values(first, 0), [0, 1, 2, 3, 4, 5, 60]);
    assert_eq!(b.values(second, 0), [0, 1, 2, 3, 4, 5, 61]);
}

#[test]
fn a_fork_made_while_an_append_is_in_flight_sees_only_what_was_there() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 0));
    let first = b.open();
    b.fill(first, 0..2);
    let ticket = b.begin(first, 0, 2, 2).unwrap();
    let ForkedSequence { id: second, length } = b.store.fork_sequence(b.ns(), first, None).unwrap();
    assert_eq!(length, 2);
    // The first is out of sight, yet its append still writes to the shared cell.
    b.store.close_sequence(b.ns(), first).unwrap();
    let other = b.begin(second, 0, 2, 1).unwrap();
    assert_eq!(other.row_copies().len(), 1);
    b.finish(ticket, &[2, 3], |_| false);
    b.finish(other, &[20], |_| false);
    assert_eq!(b.values(second, 0), [0, 1, 20]);
    b.store.close_sequence(b.ns(), second).unwrap();
    assert_eq!(b.used(), 0);
}

#[test]
fn fork_lengths() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 8));
    let id = b.open();
    b.append(id, 0, 0, &[0, 1, 2, 3, 4]);
    b.append(id, 1, 0, &[0, 1, 2]);
    let ForkedSequence { id: least, length } = b.store.fork_sequence(b.ns(), id, None).unwrap();
    assert_eq!((length, b.values(least, 0)), (3, vec![0, 1, 2]));
    let none = b.store.fork_sequence(b.ns(), id, Some(0)).unwrap().id;
    assert!(b.values(none, 0).is_empty());
    let error = b.store.fork_sequence(b.ns(), id, Some(4)).unwrap_err();
    assert_eq!(error, StoreError::RangeNotStored { asked: 4, stored: 3 });
    // A fork has acknowledged nothing, so nothing is a replay.
    let error = b.begin(least, 0, 0, 5).unwrap_err();
    assert_eq!(error, StoreError::RangeOverlap { start: 0, tokens: 5, length: 3 });
}

#[test]
fn each_sequence_reads_as_if_it_were_alone() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 4));
    let first = b.open();
    b.append(first, 0, 0, &[0, 1, 2, 3]);
    b.append(first, 1, 0, &[0, 1, 2, 3]);
    let second = b.store.fork_sequence(b.ns(), first, None).unwrap().id;
    b.append(first, 0, 4, &[4, 5, 6, 7]);
    assert_eq!(b.states(first, 0), "pppprrrr");
    assert_eq!(b.states(second, 0), "rrrr", "still in the second's window");
    let both = b.store.describe_sequence(b.ns(), second).unwrap();
    assert_eq!((both.packed_blocks, both.raw_blocks), (0, 2));
    let slots = b.slots();

    b.append(second, 0, 4, &[40, 50]);
    assert_eq!(b.states(second, 0), "rrrrrr");
    let ticket = b.begin(second, 0, 6, 2).unwrap();
    assert!(ticket.pack_tasks().is_empty(), "the first has packed it");
    b.finish(ticket, &[60, 70], |_| false);
    assert_eq!(b.states(second, 0), "pppprrrr");
    assert_eq!(b.values(second, 0), [0, 1, 2, 3, 40, 50, 60, 70]);
    // One more block of its own, and the raw slot of the shared one is gone.
    assert_eq!(b.slots(), slots);
}

#[test]
fn two_that_pass_at_once_keep_one_packed_form() {
    let b = Bench::new(1 << 20, shape(1, 4, 2, 4));
    let first = b.open();
    b.fill(first, 0..4);
    let second = b.store.fork_sequence(b.ns(), first, None).unwrap().id;
    let tickets = [first, second].map(|id| b.begin(id, 0, 4, 4).unwrap());
    for ticket in tickets {
        assert_eq!(ticket.pack_tasks().len(), 1);
        b.finish(ticket, &[4, 5, 6, 7], |_| false);
    }
    assert_eq!(b.states(first, 0), "rrpprrrr");
    assert_eq!(b.states(second, 0), "rrpprrrr");
    let stored = b.usage().stored;
    assert_eq!(stored.packed_values, 2 * b.model.geometry.values_per_token());
    // Layer 1: one raw block. Layer 0: sink rows, pages, a block of each.
    assert_eq!(b.slots(), 1 + 4);
}

#[test]
fn truncation_does_not_restore_precision() {
    let b = Bench::new(1 << 20, shape(1, 4, 1, 2));
    let id = b.open();
    b.fill(id, 0..10);
    assert_eq!(b.states(id, 0), "rppppppprr");
    b.store.truncate_sequence(b.ns(), id, 6).unwrap();
    assert_eq!(b.states(id, 0), "rppppp", "packed stays packed");
    // The next append decodes the rows that are left, and they are packed again in time.
    let ticket = b.begin(id, 0, 6, 1).unwrap();
    assert!(matches!(ticket.row_copies()[0].from.form, RowForm::Pages(_)));
    assert_eq!((ticket.row_copies().len(), ticket.row_copies()[0].from.rows.clone()), (1, 0..2));
    b.finish(ticket, &[60], |_| false);
    assert_eq!(b.states(id, 0), "rpppddr");
    b.append(id, 0, 7, &[70, 80, 90]);
    assert_eq!(b.states(id, 0), "rppppppprr");
    assert_eq!(b.values(id, 0), [0, 1, 2, 3, 4, 5, 60, 70, 80, 90]);
    // Into the block with the sink's rows: both forms are copied, each to its row.
    b.store.truncate_sequence(b.ns(), id, 3).unwrap();
    let ticket = b.begin(id, 0, 3, 1).unwrap();
    let rows: Vec<_> =
        ticket.row_copies().iter().map(|c| (c.from.rows.clone(), c.to_row)).collect();
    assert_eq!(rows, [(0..1, 0), (1..3, 1)]);
    b.finish(ticket, &[30], |_| false);
    assert_eq!((b.states(id, 0), b.values(id, 0)), ("rddr".into(), vec![0, 1, 2, 30]));
}

#[test]
fn a_pin_outlives_truncation_and_overwriting() {
    let b = Bench::new(1 << 20, shape(1, 8, 0, 8));
    let id = b.open();
    b.fill(id, 0..6);
    let pinned = b.pin(id, 0);
    let before = b.show(&pinned);
    b.store.truncate_sequence(b.ns(), id, 2).unwrap();
    let ticket = b.begin(id, 0, 2, 3).unwrap();
    assert_eq!(ticket.row_copies().len(), 1, "rows that are pinned are not overwritten");
    b.finish(ticket, &[20, 30, 40], |_| false);
    b.append(id, 1, 2, &[20, 30, 40]);
    assert_eq!(b.show(&pinned), before);
    assert_eq!(b.values(id, 0), [0, 1, 20, 30, 40]);
    // Rows that nobody has pinned are.
    drop(pinned);
    b.store.truncate_sequence(b.ns(), id, 3).unwrap();
    assert!(b.begin(id, 0, 3, 3).unwrap().row_copies().is_empty());
    // A pin does not stand in the way of what comes after it.
    let _pinned = b.pin(id, 0);
    assert!(b.begin(id, 0, 3, 3).unwrap().row_copies().is_empty());
}

#[test]
fn a_block_that_another_packed_is_not_written_in_place() {
    let b = Bench::new(1 << 20, shape(1, 4, 0, 4));
    let first = b.open();
    b.fill(first, 0..4);
    let second = b.store.fork_sequence(b.ns(), first, None).unwrap().id;
    b.append(first, 0, 4, &[4, 5, 6, 7]);
    b.store.close_sequence(b.ns(), first).unwrap();
    // The second is alone with a raw block whose packed form is known.
    b.store.truncate_sequence(b.ns(), second, 2).unwrap();
    b.append(second, 0, 2, &[20, 30, 40, 50, 60, 70]);
    assert_eq!(b.values(second, 0), [0, 1, 20, 30, 40, 50, 60, 70]);
    assert_eq!(b.states(second, 0), "pppprrrr");
    b.store.close_sequence(b.ns(), second).unwrap();
    assert_eq!(b.used(), 0);
}
