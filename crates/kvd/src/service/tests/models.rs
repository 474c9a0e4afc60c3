//! Registration and its end: daemon and device agree whatever becomes of a call.

use super::bench::{Bench, call, geometry, spec};
use crate::service::CallContext;
use kvd_core::{ErrorCode, Geometry};
use kvd_proto::domain::ModelSpec;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A service whose device is busy and whose queue of one is full; dropping the sender frees it.
async fn full(bench: &Bench) -> mpsc::SyncSender<()> {
    let release = bench.hold().await;
    let worker = bench.service.first_worker().clone();
    tokio::spawn(async move { worker.run_closure(&call(), |_| Ok(())).await });
    bench.queued(1).await;
    release
}

#[tokio::test]
async fn a_registration_that_a_full_queue_refuses_leaves_nothing() {
    let bench = Bench::new(1 << 16, &[("device.queue_jobs_max", "1")]);
    let release = full(&bench).await;
    let refused = bench.service.register_model(&call(), spec("a", "raw")).await;
    assert_eq!(refused.err().unwrap().code(), ErrorCode::QueueFull);
    drop(release);
    while bench.service.first_worker().queued_jobs() > 0 {
        tokio::task::yield_now().await;
    }
    let (ids, same) = bench.models();
    assert!(ids.is_empty() && same);
    assert!(!bench.service.metrics().render_page().contains("model=\"a\""));
    bench.register("a", "raw").await;
    assert!(bench.service.metrics().render_page().contains("model=\"a\",codec=\"raw\""));
}

#[tokio::test]
async fn a_caller_that_leaves_leaves_daemon_and_device_agreed() {
    let bench = Bench::new(1 << 16, &[]);
    // Before the device began.
    let release = bench.hold().await;
    let service = bench.service.clone();
    let register = async move { service.register_model(&call(), spec("a", "raw")).await };
    let gone = tokio::spawn(register);
    bench.queued(1).await;
    gone.abort();
    let _ = gone.await;
    drop(release);
    bench.idle().await;
    let (ids, same) = bench.models();
    assert!(ids.is_empty() && same);

    // While the device is at it.
    let (open, gate) = mpsc::sync_channel(1);
    *bench.probe.register_gate.lock() = Some(gate);
    let service = bench.service.clone();
    let gone = tokio::spawn(async move { service.register_model(&call(), spec("b", "raw")).await });
    while bench.probe.register_gate.lock().is_some() {
        tokio::task::yield_now().await;
    }
    gone.abort();
    let _ = gone.await;
    open.send(()).unwrap();
    bench.idle().await;
    let (ids, same) = bench.models();
    assert!(ids.len() == 1 && same);
    // Who comes back finds it.
    let again = bench.register("b", "raw").await;
    assert!(ids.contains(&again.shape.id));
}

#[tokio::test]
async fn an_unregistration_that_is_refused_or_left_keeps_the_model() {
    let bench = Bench::new(1 << 16, &[("device.queue_jobs_max", "1")]);
    let id = bench.register("a", "raw").await.shape.id;
    let release = full(&bench).await;
    let refused = bench.service.unregister_model(&call(), id).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    assert!(refused.code().is_retryable());
    let sequence = bench.service.open_sequence(&call(), id).unwrap();
    bench.service.close_sequence(&call(), sequence).unwrap();
    drop(release);
    while bench.service.first_worker().queued_jobs() > 0 {
        tokio::task::yield_now().await;
    }

    let release = bench.hold().await;
    let service = bench.service.clone();
    let gone = tokio::spawn(async move { service.unregister_model(&call(), id).await });
    bench.queued(1).await;
    gone.abort();
    let _ = gone.await;
    drop(release);
    while bench.service.first_worker().queued_jobs() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.models(), ([id].into(), true));

    bench.service.unregister_model(&call(), id).await.unwrap();
    assert_eq!(bench.models(), ([].into(), true));
    assert!(!bench.service.metrics().render_page().contains("model=\"a\""));
    let again = bench.service.unregister_model(&call(), id).await.unwrap_err();
    assert_eq!(again.code(), ErrorCode::UnknownModel);
}

#[tokio::test]
async fn names_and_limits_are_checked_before_a_codec_is_built() {
    let bench = Bench::new(1 << 16, &[("limits.models_max", "1")]);
    let id = bench.register("a", "raw").await.shape.id;
    // Whoever would build waits for ever.
    let _turn = bench.service.building.clone().acquire_owned().await.unwrap();
    let over = bench.service.register_model(&call(), spec("b", "raw")).await.err().unwrap();
    assert_eq!(over.code(), ErrorCode::LimitExceeded);
    let taken = bench.service.register_model(&call(), spec("a", "fp8")).await.err().unwrap();
    assert_eq!(taken.code(), ErrorCode::InvalidArgument);
    assert_eq!(bench.register("a", "raw").await.shape.id, id);
}

#[tokio::test]
async fn codecs_are_built_one_at_a_time_and_for_as_long_as_the_caller_waits() {
    let bench = Bench::new(1 << 16, &[]);
    let _turn = bench.service.building.clone().acquire_owned().await.unwrap();
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let call = CallContext { deadline, ..call() };
    let late = bench.service.register_model(&call, spec("a", "raw")).await.err().unwrap();
    assert_eq!(late.code(), ErrorCode::DeadlineExceeded);
}

#[tokio::test]
async fn the_same_content_at_once_is_one_model() {
    let bench = Bench::new(1 << 16, &[]);
    let register = || {
        let service = bench.service.clone();
        tokio::spawn(async move { service.register_model(&call(), spec("a", "raw")).await })
    };
    let registering: Vec<_> = (0..8).map(|_| register()).collect();
    let mut found = std::collections::BTreeSet::new();
    for registered in registering {
        found.insert(registered.await.unwrap().ok().unwrap().shape.id);
    }
    assert_eq!(bench.models(), (found.clone(), true));
    assert_eq!(found.len(), 1);
}

#[tokio::test]
async fn a_geometry_of_huge_blocks_is_refused() {
    let bench = Bench::new(1 << 16, &[]);
    let geometry = Geometry {
        kv_heads: 1024,
        head_dim_k: 1024,
        head_dim_v: 1024,
        block_tokens: 1024,
        ..geometry()
    };
    let spec = ModelSpec { geometry, ..spec("a", "raw") };
    let refused = bench.service.register_model(&call(), spec).await.err().unwrap();
    assert_eq!(refused.code(), ErrorCode::InvalidArgument);
    assert!(refused.to_string().contains("block_tokens * kv_heads"), "{refused}");
}

#[tokio::test]
async fn pages_that_make_a_codec_slow_are_refused_by_its_kind() {
    let bench = Bench::new(1 << 20, &[("limits.page_tokens_min", "64")]);
    let register = async |codec: &str, block_tokens| {
        let mut asked = spec(&format!("{codec}-{block_tokens}"), codec);
        asked.geometry.block_tokens = block_tokens;
        bench.service.register_model(&call(), asked).await
    };
    for (codec, tokens) in [("raw", 1), ("raw", 63), ("kvcomp", 128), ("kivi-4", 96)] {
        register(codec, tokens).await.unwrap();
    }
    let small = [("kvcomp", 63, 64), ("kvcomp", 16, 64), ("kivi-4", 16, 32), ("fp8", 31, 32)];
    let uneven = [("kvcomp", 96, 64), ("kvcomp", 127, 64), ("kivi-4", 63, 32), ("fp8", 100, 32)];
    for (codec, tokens, least) in small.into_iter().chain(uneven) {
        let refused = register(codec, tokens).await.err().unwrap();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{codec} {tokens}");
        let text = refused.to_string();
        assert!(text.starts_with("geometry.block_tokens: "), "{text}");
        assert!(text.contains(&format!("ask for a multiple of {least}")), "{text}");
        assert!(text.contains("limits.page_tokens_min = 64"), "{text}");
    }
    // One side with an entropy coder is enough.
    let refused = register("k=raw; v=uniform(rel=0.15,axis=token)/huffman", 32).await;
    assert!(refused.err().unwrap().to_string().contains("ask for a multiple of 64"));
}
