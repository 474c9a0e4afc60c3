//! Sessions over a service: their ends, namespaces, lists, and closing what is idle.

use super::bench::{Bench, call, several, spec};
use crate::config::Config;
use crate::service::{CallContext, Service, ServiceError, SessionLease};
use kvd_core::{ErrorCode, Namespace, SequenceId, SessionId};
use kvd_proto::domain::{HoldTarget, SequenceFilter, SequenceFork, SessionHold};
use kvd_store::{SequenceHint, SequencePhase};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

fn new_session(name: &str, ttl: Duration) -> SessionHold {
    SessionHold { target: HoldTarget::New { name: name.to_owned(), take_over: false }, ttl }
}

async fn hold(
    service: &Arc<Service>,
    call: &CallContext,
    hold: SessionHold,
) -> Result<SessionLease, ServiceError> {
    service.hold_session(call, hold, "a test".to_owned()).await
}

/// Asks until the answer is yes.
async fn wait_until(ask: impl Fn() -> bool) {
    let asking = async {
        while !ask() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("it never happens");
}

/// A value of the exposition.
fn metric(service: &Service, series: &str) -> f64 {
    service.refresh_gauges();
    let page = service.metrics().render_page();
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series}")).parse().unwrap()
}

fn other() -> CallContext {
    CallContext::new(Namespace::new("other").unwrap())
}

#[tokio::test]
async fn a_session_that_nobody_holds_is_ended_and_its_sequences_are_closed() {
    let bench = Bench::new(1 << 16, &[]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    tokio::spawn(service.clone().end_due_sessions());
    for reason in ["closed", "expired", "taken_over"] {
        assert_eq!(metric(service, &format!("kvd_session_ends_total{{reason=\"{reason}\"}}")), 0.0);
    }
    let ttl = Duration::from_millis(30);
    let short = hold(service, &call(), new_session("short", ttl)).await.unwrap();
    let at_once = hold(service, &call(), new_session("at-once", Duration::ZERO)).await.unwrap();
    let kept = service.open_sequence(&call(), model).unwrap();
    for lease in [&short, &at_once] {
        for _ in 0..3 {
            let session = Some(lease.session_id());
            let sequence = service.open_sequence_in(&call(), model, session).unwrap();
            bench.store(sequence, 0, 4).await.unwrap();
            service.fork_sequence(&call(), sequence, None).unwrap();
        }
    }
    assert_eq!(metric(service, "kvd_sessions"), 2.0);
    tokio::time::sleep(2 * ttl).await;
    assert_eq!(metric(service, "kvd_sessions"), 2.0, "they are held");
    assert!(service.pool_stats().used_bytes > 0);

    let session = at_once.session_id();
    drop((short, at_once));
    wait_until(|| metric(service, "kvd_session_sequences_closed_total") == 12.0).await;
    assert_eq!(metric(service, "kvd_session_ends_total{reason=\"expired\"}"), 2.0);
    assert_eq!(metric(service, "kvd_sessions"), 0.0);
    assert_eq!(service.pool_stats().used_bytes, 0);
    assert_eq!(service.list_sessions(&call()).unwrap(), []);
    let gone = service.open_sequence_in(&call(), model, Some(session)).unwrap_err();
    assert_eq!(gone.code(), ErrorCode::UnknownSession);
    assert!(service.describe_sequence(&call(), kept).is_ok());
}

#[tokio::test]
async fn a_session_that_is_held_again_in_time_keeps_its_sequences() {
    let bench = Bench::new(1 << 16, &[]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    tokio::spawn(service.clone().end_due_sessions());
    let lease = hold(service, &call(), new_session("a", PATIENCE)).await.unwrap();
    let session = lease.session_id();
    let sequence = service.open_sequence_in(&call(), model, Some(session)).unwrap();
    drop(lease);
    let listed = service.list_sessions(&call()).unwrap().remove(0);
    assert_eq!((listed.holders, listed.sequences), (0, 1));
    assert!(listed.ends_in.unwrap() <= PATIENCE);
    // What is opened meanwhile is its too.
    service.open_sequence_in(&call(), model, Some(session)).unwrap();
    let again = SessionHold { target: HoldTarget::Again(session), ttl: Duration::ZERO };
    let first = hold(service, &call(), again.clone()).await.unwrap();
    let second = hold(service, &call(), again).await.unwrap();
    drop(first);
    let listed = service.list_sessions(&call()).unwrap().remove(0);
    assert_eq!((listed.holders, listed.sequences, listed.ends_in), (1, 2, None));
    assert!(service.describe_sequence(&call(), sequence).is_ok());
    drop(second);
    wait_until(|| service.describe_sequence(&call(), sequence).is_err()).await;
}

#[tokio::test]
async fn who_closes_or_takes_over_a_session_is_answered_when_its_sequences_are_closed() {
    let bench = Bench::new(1 << 16, &[("limits.sessions_max", "1")]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    let lease = hold(service, &call(), new_session("a", PATIENCE)).await.unwrap();
    for _ in 0..5 {
        service.open_sequence_in(&call(), model, Some(lease.session_id())).unwrap();
    }
    let over = hold(service, &call(), new_session("b", PATIENCE)).await.err().unwrap();
    assert_eq!(over.code(), ErrorCode::LimitExceeded);
    assert!(over.to_string().contains("limits.sessions_max"), "{over}");
    // The older one makes room for it.
    let take_over = HoldTarget::New { name: "a".to_owned(), take_over: true };
    let take_over = SessionHold { target: take_over, ttl: Duration::MAX };
    let newer = hold(service, &call(), take_over).await.unwrap();
    assert_eq!(newer.granted_ttl(), service.config().session_ttl_max);
    assert_eq!(metric(service, "kvd_session_sequences_closed_total"), 5.0);
    assert_eq!(metric(service, "kvd_session_ends_total{reason=\"taken_over\"}"), 1.0);
    let told = lease.wait_for_end().await.stream_error(lease.session_id());
    assert_eq!(told.code(), ErrorCode::UnknownSession);
    // Letting go of what was taken over is nothing to the newer one.
    drop(lease);
    assert_eq!(service.list_sessions(&call()).unwrap()[0].holders, 1);

    let sequence = service.open_sequence_in(&call(), model, Some(newer.session_id())).unwrap();
    service.drain();
    assert_eq!(service.close_session(&call(), newer.session_id()).await.unwrap(), 1);
    assert_eq!(metric(service, "kvd_session_ends_total{reason=\"closed\"}"), 1.0);
    assert!(service.close_sequence(&call(), sequence).is_err());
    let again = service.close_session(&call(), newer.session_id()).await.unwrap_err();
    assert_eq!(again.code(), ErrorCode::UnknownSession);
}

#[tokio::test]
async fn namespaces_neither_see_nor_close_nor_use_the_sessions_and_sequences_of_others() {
    let bench = Bench::new(1 << 16, &[("namespaces.allowed", "[\"*\"]")]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    let lease = hold(service, &call(), new_session("a", PATIENCE)).await.unwrap();
    let session = lease.session_id();
    let sequence = service.open_sequence_in(&call(), model, Some(session)).unwrap();
    // A name is one of its namespace.
    let theirs = hold(service, &other(), new_session("a", PATIENCE)).await.unwrap();
    assert_eq!(service.list_sessions(&other()).unwrap()[0].id, theirs.session_id());
    let page = service.list_sequences(&other(), filter()).await.unwrap();
    assert_eq!(page.sequences, []);
    let again = SessionHold { target: HoldTarget::Again(session), ttl: PATIENCE };
    let of_session = SequenceFilter { session: Some(session), ..filter() };
    let of_model = SequenceFilter { model: Some(model), ..filter() };
    let refused = [
        service.close_session(&other(), session).await.err(),
        hold(service, &other(), again).await.err(),
        service.list_sequences(&other(), of_session).await.err(),
    ];
    for error in refused {
        assert_eq!(error.unwrap().code(), ErrorCode::UnknownSession);
    }
    let error = service.list_sequences(&other(), of_model).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownModel);
    let error = service.close_idle_sequence(&other(), sequence, Duration::ZERO).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownSequence);
    let fork = SequenceFork { sequence, length: None, session: Some(theirs.session_id()) };
    let error = service.fork_sequence_in(&call(), fork).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownSession);
    let listed = service.list_sequences(&call(), of_session).await.unwrap().sequences;
    assert_eq!(listed.iter().map(|sequence| sequence.id).collect::<Vec<_>>(), [sequence]);
}

#[tokio::test]
async fn sessions_of_another_boot_say_that_the_daemon_was_restarted() {
    let (old, new) = (Bench::new(1 << 16, &[]), Bench::new(1 << 16, &[]));
    let lease = hold(&old.service, &call(), new_session("a", PATIENCE)).await.unwrap();
    let model = new.register("a", "raw").await.shape.id;
    let (session, service) = (lease.session_id(), &new.service);
    let again = SessionHold { target: HoldTarget::Again(session), ttl: PATIENCE };
    let refused = [
        hold(service, &call(), again).await.err(),
        service.close_session(&call(), session).await.err(),
        service.open_sequence_in(&call(), model, Some(session)).err(),
    ];
    for error in refused.map(Option::unwrap) {
        assert_eq!(error.code(), ErrorCode::UnknownSession, "{error}");
        let stale = error.stale_id().unwrap_or_else(|| panic!("{error}"));
        assert!(old.service.boot_id().starts_with(&stale.id_boot));
    }
    let error = service.close_session(&call(), SessionId(7)).await.unwrap_err();
    assert!(error.stale_id().is_none() && error.to_string().contains("never held"), "{error}");
}

/// All sequences, a page at most.
fn filter() -> SequenceFilter {
    SequenceFilter { limit: SequenceFilter::PAGE_MAX, ..SequenceFilter::default() }
}

#[tokio::test]
async fn pages_have_each_sequence_once_in_the_order_of_ids_whatever_its_device() {
    let (service, _probes) = several(3, 1 << 16, &[]);
    let mut opened = BTreeSet::new();
    for name in ["a", "b", "c"] {
        let model = service.register_model(&call(), spec(name, "raw")).await.unwrap().shape.id;
        opened.extend((0..9).map(|_| service.open_sequence(&call(), model).unwrap()));
    }
    for limit in [1, 10, 13, 27, 1000] {
        let mut page = SequenceFilter { limit, ..filter() };
        let mut listed: Vec<SequenceId> = Vec::new();
        loop {
            let found = service.list_sequences(&call(), page).await.unwrap();
            assert!(found.sequences.len() <= limit as usize);
            listed.extend(found.sequences.iter().map(|sequence| sequence.id));
            page.after = found.next_after;
            if page.after.is_none() {
                break;
            }
        }
        assert_eq!(listed, opened.iter().copied().collect::<Vec<_>>(), "pages of {limit}");
    }
}

#[tokio::test]
async fn a_page_after_a_sequence_of_another_boot_is_refused() {
    let (old, new) = (Bench::new(1 << 16, &[]), Bench::new(1 << 16, &[]));
    let model = old.register("a", "raw").await.shape.id;
    let after = Some(old.service.open_sequence(&call(), model).unwrap());
    let page = SequenceFilter { after, ..filter() };
    old.service.list_sequences(&call(), page).await.unwrap();
    let error = new.service.list_sequences(&call(), page).await.err().unwrap();
    assert_eq!(error.code(), ErrorCode::UnknownSequence);
    assert!(error.stale_id().is_some(), "{error}");
}

#[tokio::test]
async fn hints_are_listed_until_they_are_replaced_and_name_no_foreign_parent() {
    let bench = Bench::new(1 << 16, &[("namespaces.allowed", "[\"*\"]")]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    let parent = service.open_sequence(&call(), model).unwrap();
    let child = service.fork_sequence(&call(), parent, None).unwrap().id;
    let hint = |phase, parent| SequenceHint { phase, parent };
    let listed = async |of: SequenceId| {
        let page = service.list_sequences(&call(), filter()).await.unwrap();
        page.sequences.into_iter().find(|sequence| sequence.id == of).unwrap().hint
    };
    assert_eq!(listed(parent).await, hint(SequencePhase::Unknown, None));
    assert_eq!(listed(child).await, hint(SequencePhase::Unknown, Some(parent)), "a fork");
    for said in [hint(SequencePhase::EndOfTurn, Some(child)), hint(SequencePhase::Done, None)] {
        service.hint_sequence(&call(), parent, said).unwrap();
        assert_eq!(listed(parent).await, said);
    }
    let theirs = service.register_model(&other(), spec("b", "raw")).await.unwrap().shape.id;
    let theirs = service.open_sequence(&other(), theirs).unwrap();
    let refusal = |call: CallContext, of, parent| {
        let said = hint(SequencePhase::Done, Some(parent));
        service.hint_sequence(&call, of, said).unwrap_err().code()
    };
    assert_eq!(refusal(call(), child, theirs), ErrorCode::UnknownSequence);
    assert_eq!(refusal(other(), child, theirs), ErrorCode::UnknownSequence);
    assert_eq!(refusal(call(), child, child), ErrorCode::InvalidArgument);
    // A parent that is closed is still named.
    service.close_sequence(&call(), parent).unwrap();
    assert_eq!(listed(child).await, hint(SequencePhase::Unknown, Some(parent)));
}

#[tokio::test]
async fn only_idle_sequences_are_closed_for_that_and_others_say_when_to_ask_again() {
    let bench = Bench::new(1 << 16, &[]);
    let service = &bench.service;
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 4).await.unwrap();
    let hour = Duration::from_secs(3600);
    let error = service.close_idle_sequence(&call(), sequence, hour).unwrap_err();
    assert_eq!(error.code(), ErrorCode::SequenceBusy);
    assert!(error.retry_hint().unwrap() > hour - PATIENCE, "{:?}", error.retry_hint());
    let idle = SequenceFilter { idle_min: hour, ..filter() };
    assert_eq!(service.list_sequences(&call(), idle).await.unwrap().sequences, []);
    let listed = service.list_sequences(&call(), filter()).await.unwrap().sequences.remove(0);
    assert_eq!((listed.model, listed.session, listed.length), (model, None, 4));
    let described = service.describe_sequence(&call(), sequence).unwrap();
    assert_eq!(listed.stored, described.stored);
    tokio::time::sleep(Duration::from_millis(5)).await;
    service.close_idle_sequence(&call(), sequence, Duration::from_millis(5)).unwrap();
    assert!(service.describe_sequence(&call(), sequence).is_err());
}

#[test]
fn the_default_limits_are_those_that_the_pages_name() {
    let config = Config::load(&Default::default()).unwrap();
    assert_eq!((config.sessions_max, config.session_ttl_max), (4096, Duration::from_secs(300)));
}
