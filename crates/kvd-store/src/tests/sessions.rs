//! Sequences of sessions, idleness, and lists.

use super::harness::{Bench, namespace, shape};
use crate::{BegunAppend, ModelUsage, SequenceQuery, SessionSequences, StoreError};
use kvd_core::{Coded, ErrorCode, LayerIndex, ModelId, SequenceId, SessionId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const SESSION: SessionId = SessionId(77);

fn open_in(b: &Bench, session: &Arc<SessionSequences>) -> Result<SequenceId, StoreError> {
    b.store.open_in_session(Arc::clone(&b.model), session)
}

/// Closes what an ended session had; how many of them were still open.
fn close_all(b: &Bench, session: &SessionSequences) -> usize {
    let ids = session.end_session();
    ids.into_iter().filter(|id| b.store.close_sequence(b.ns(), *id).is_ok()).count()
}

#[test]
fn a_session_owns_what_is_opened_in_it_and_what_is_forked_from_that() {
    let b = Bench::new(1 << 20, shape(1, 4, 3, 6));
    let (session, other) = (SessionSequences::new(SESSION), SessionSequences::new(SessionId(78)));
    let free = b.open();
    let own = open_in(&b, &session).unwrap();
    b.fill(own, 0..9);
    b.fill(free, 0..9);
    let child = b.store.fork_sequence(b.ns(), own, None).unwrap().id;
    let moved = b.store.fork_into_session(b.ns(), own, None, &other).unwrap().id;
    let adopted = b.store.fork_into_session(b.ns(), free, None, &session).unwrap().id;
    let loose = b.store.fork_sequence(b.ns(), free, None).unwrap().id;
    assert_eq!((session.count_open(), other.count_open()), (3, 1));
    b.store.close_sequence(b.ns(), child).unwrap();
    assert_eq!(session.count_open(), 2);

    let mut ended = session.end_session();
    ended.sort();
    assert_eq!(ended, BTreeSet::from([own, adopted]).into_iter().collect::<Vec<_>>());
    assert_eq!(session.end_session(), [], "whoever comes second has nothing to close");
    for id in ended {
        b.store.close_sequence(b.ns(), id).unwrap();
    }
    for id in [free, loose, moved] {
        assert_eq!(b.store.describe_sequence(b.ns(), id).unwrap().length, 9);
    }
}

#[test]
fn nothing_is_opened_in_a_session_that_has_ended() {
    let b = Bench::new(1 << 20, shape(1, 4, 3, 6));
    let session = SessionSequences::new(SESSION);
    let own = open_in(&b, &session).unwrap();
    assert_eq!(session.end_session(), [own]);
    let refused = open_in(&b, &session).unwrap_err();
    assert_eq!(refused, StoreError::SessionEnded { id: SESSION });
    assert_eq!(refused.code(), ErrorCode::UnknownSession);
    // One of its own that is not closed yet leaves no fork behind either.
    let refused = b.store.fork_sequence(b.ns(), own, None).unwrap_err();
    assert_eq!(refused, StoreError::SessionEnded { id: SESSION });
    b.store.close_sequence(b.ns(), own).unwrap();
    assert_eq!(b.store.entry_counts(), [0, 0]);
    assert_eq!(b.usage(), ModelUsage::default());
}

#[test]
fn a_session_that_ends_while_threads_open_in_it_leaves_nothing() {
    let b = Bench::new(1 << 20, shape(1, 4, 3, 6));
    for round in 0..50 {
        let session = SessionSequences::new(SESSION);
        let opened = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while open_in(&b, &session).is_ok() {
                        opened.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            while opened.load(Ordering::Relaxed) < round % 8 {
                thread::yield_now();
            }
            close_all(&b, &session);
        });
        assert_eq!(b.store.entry_counts(), [0, 0], "round {round}");
        assert_eq!(session.count_open(), 0);
    }
    assert_eq!(b.usage(), ModelUsage::default());
}

#[test]
fn only_what_is_idle_is_closed_for_idleness() {
    let b = Bench::new(1 << 20, shape(1, 4, 3, 6));
    let id = b.open();
    let (hour, moment) = (Duration::from_secs(3600), Duration::from_millis(5));
    let refused = b.store.close_idle(b.ns(), id, hour).unwrap_err();
    assert!(matches!(refused, StoreError::NotIdle { .. }), "{refused}");
    assert_eq!(refused.code(), ErrorCode::SequenceBusy);
    assert!(refused.to_string().ends_with("after 3600000 ms without use"), "{refused}");
    let unknown = StoreError::UnknownSequence { id };
    let of_others = b.store.close_idle(&namespace("other"), id, Duration::ZERO);
    assert_eq!(of_others.unwrap_err(), unknown);

    thread::sleep(2 * moment);
    // Any call that names it is a use, one of others and a list are none.
    assert_eq!(b.store.model_of(&namespace("other"), id).unwrap_err(), unknown);
    assert!(b.store.summarize_sequence(b.ns(), id).unwrap().idle >= 2 * moment);
    b.store.pin_range(b.ns(), id, LayerIndex(0), .., None).unwrap();
    assert!(b.store.summarize_sequence(b.ns(), id).unwrap().age >= 2 * moment);
    assert!(b.store.close_idle(b.ns(), id, hour).is_err());

    // An append in flight is a use for as long as it lasts.
    let BegunAppend::Ticket(ticket) =
        b.store.begin_append(b.ns(), id, LayerIndex(0), 0, 3, 9).unwrap()
    else {
        panic!("a replay");
    };
    thread::sleep(2 * moment);
    let refused = b.store.close_idle(b.ns(), id, moment).unwrap_err();
    assert_eq!(refused, StoreError::SequenceBusy { id, layer: LayerIndex(0) });
    drop(ticket);
    b.store.close_idle(b.ns(), id, moment).unwrap();
    assert_eq!(b.store.close_idle(b.ns(), id, moment).unwrap_err(), unknown);
    assert_eq!(b.store.entry_counts(), [0, 0]);
}

#[test]
fn lists_choose_by_namespace_model_session_idleness_and_id() {
    let b = Bench::new(1 << 20, shape(1, 4, 3, 6));
    let session = SessionSequences::new(SESSION);
    let (free, own) = (b.open(), open_in(&b, &session).unwrap());
    b.fill(own, 0..9);
    let ns = b.ns().clone();
    let all = SequenceQuery {
        namespace: &ns,
        model: None,
        session: None,
        idle_min: Duration::ZERO,
        after: None,
    };
    let found = |query: SequenceQuery<'_>| -> BTreeSet<SequenceId> {
        b.store.find_sequences(&query).into_iter().collect()
    };
    let both = BTreeSet::from([free, own]);
    assert_eq!(found(all), both);
    assert_eq!(found(SequenceQuery { model: Some(b.model.id), ..all }), both);
    assert_eq!(found(SequenceQuery { model: Some(ModelId(9)), ..all }), [].into());
    assert_eq!(found(SequenceQuery { session: Some(SESSION), ..all }), [own].into());
    assert_eq!(found(SequenceQuery { session: Some(SessionId(1)), ..all }), [].into());
    assert_eq!(found(SequenceQuery { idle_min: Duration::from_secs(60), ..all }), [].into());
    assert_eq!(found(SequenceQuery { after: both.first().copied(), ..all }).len(), 1);
    assert_eq!(found(SequenceQuery { after: both.last().copied(), ..all }), [].into());
    let others = namespace("other");
    assert_eq!(found(SequenceQuery { namespace: &others, ..all }), [].into());

    let summary = b.store.summarize_sequence(b.ns(), own).unwrap();
    assert_eq!((summary.session, summary.length), (Some(SESSION), 9));
    assert_eq!(summary.stored, b.store.describe_sequence(b.ns(), own).unwrap().stored);
    assert!(summary.stored.raw_bytes > 0);
    assert_eq!(b.store.summarize_sequence(b.ns(), free).unwrap().session, None);
    assert_eq!(b.store.summarize_sequence(&others, own), None);
}
