//! Test cases beyond the plain question of the suite, and one backend for all of them: a machine
//! with a GPU runs it too (`kvd-cuda/tests/gpu.rs`).

use crate::streams::Pace;
use crate::{OPTIONS, open, suite};
use kvd_cuda::CudaOptions;
use kvd_emu::{ThreadOrder, is_available};
use std::time::Instant;

#[test]
fn windows_caps_ranges_and_other_types_are_answered_as_asked() {
    if !is_available() {
        return;
    }
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    for pace in Pace::EACH {
        for ask in suite::asks() {
            let (mut backend, _) = open(orders.next().unwrap(), pace, OPTIONS);
            let (off, lse) = suite::errors_of(&mut backend, &ask).unwrap();
            let most = suite::largest_error(ask.text);
            assert!(off < most && lse < most, "{ask:?}: {off:.1e}, log-sum-exp {lse:.1e}");
        }
    }
}

#[test]
fn one_backend_serves_every_codec_in_turn() {
    if !is_available() {
        return;
    }
    let options = CudaOptions { graphs: 0, ..OPTIONS };
    let (mut backend, watch) = open(ThreadOrder::Random(2), Pace::Late, options);
    let live = watch.lock().live;
    let (agreed, of) = suite::agree(&mut backend, None);
    assert_eq!((agreed, watch.lock().live), (of, live));
    // No time is left: what says most is asked all the same.
    assert_eq!(suite::agree(&mut backend, Some(Instant::now())).0, 1);
}

#[test]
fn blocks_that_cross_to_another_backend_answer_as_before() {
    if !is_available() {
        return;
    }
    for text in ["raw", "kivi-4", "kvcomp", "kvd-2"] {
        let (mut from, _) = open(ThreadOrder::Ascending, Pace::Late, OPTIONS);
        let (mut to, watch) = open(ThreadOrder::Random(3), Pace::Late, OPTIONS);
        suite::transfer::check_transfer(&mut from, &mut to, text);
        drop(to);
        assert_eq!(watch.lock().live, 0);
    }
}
