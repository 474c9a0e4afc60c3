//! A device that fails, and one that cannot serve a codec.

use super::bench::{Bench, call, spec};
use kvd_core::ErrorCode;

#[tokio::test]
async fn a_lost_device_answers_no_store_with_success_and_its_lane_closes() {
    let bench = Bench::new(1 << 16, &[]);
    let other = Bench::new(1 << 16, &[]);
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 16).await.unwrap();
    assert!(bench.service.ready());
    *bench.probe.lose.lock() = true;
    let lost = bench.store(sequence, 16, 16).await.unwrap_err();
    assert_eq!(lost.code(), ErrorCode::DeviceFailed);
    while !bench.service.lane().failed() {
        tokio::task::yield_now().await;
    }
    assert!(!bench.service.ready());
    // It is called no more, and the append that was under way left no trace.
    *bench.probe.lose.lock() = false;
    let after = bench.store(sequence, 16, 16).await.unwrap_err();
    assert_eq!(after.code(), ErrorCode::DeviceFailed);
    assert_eq!(bench.service.describe_sequence(&call(), sequence).unwrap().length, 16);
    // Another lane lives.
    let model = other.register("a", "raw").await.shape.id;
    let sequence = other.service.open_sequence(&call(), model).unwrap();
    other.store(sequence, 0, 16).await.unwrap();
    assert!(other.service.ready());
}

#[tokio::test]
async fn a_codec_that_the_device_cannot_serve_is_refused_at_registration() {
    let bench = Bench::new(1 << 16, &[]);
    let refused = bench.service.register_model(&call(), spec("a", "fp8")).await.err().unwrap();
    assert_eq!(refused.code(), ErrorCode::InvalidCodec);
    assert!(refused.to_string().contains("no kernel for fp8"), "{refused}");
    assert!(bench.models().0.is_empty());
    bench.register("a", "raw").await;
}
