//! Test cases beyond the plain question of the suite, and one backend for all of them: a machine
//! with a GPU runs it too (`kvd-cuda/tests/gpu.rs`).

use crate::streams::Pace;
use crate::{OPTIONS, open};
use kvd_cuda::CudaOptions;
use kvd_emu::{ThreadOrder, is_available};
use kvd_testkit::conformance;
use std::time::Instant;

#[test]
fn one_backend_serves_every_codec_in_turn() {
    if !is_available() {
        return;
    }
    let options = CudaOptions { graphs: 0, ..OPTIONS };
    let (mut backend, watch) = open(ThreadOrder::Random(2), Pace::Late, options);
    let live = watch.lock().live;
    let (agreed, of) = conformance::count_agreeing(&mut backend, None);
    assert_eq!((agreed, watch.lock().live), (of, live));
    // No time is left: what says most is asked all the same.
    assert_eq!(conformance::count_agreeing(&mut backend, Some(Instant::now())).0, 1);
}
