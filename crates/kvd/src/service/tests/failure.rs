//! A device that fails, and one that cannot serve a codec.

use super::bench::{Bench, call, chunk, several, spec};
use kvd_core::ErrorCode;

#[tokio::test]
async fn a_lost_device_refuses_the_store_and_its_worker_closes() {
    let bench = Bench::new(1 << 16, &[]);
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 16).await.unwrap();
    assert!(bench.service.is_ready());
    bench.probe.faults.lose_in_write(true);
    let lost = bench.store(sequence, 16, 16).await.unwrap_err();
    assert_eq!(lost.code(), ErrorCode::DeviceFailed);
    while !bench.service.first_worker().has_failed() {
        tokio::task::yield_now().await;
    }
    assert!(!bench.service.is_ready());
    // It is called no more, and the append that was under way left no trace.
    bench.probe.faults.lose_in_write(false);
    let after = bench.store(sequence, 16, 16).await.unwrap_err();
    assert_eq!(after.code(), ErrorCode::DeviceFailed);
    assert_eq!(bench.service.describe_sequence(&call(), sequence).unwrap().length, 16);
}

#[tokio::test]
async fn models_go_where_fewest_are_and_one_lost_device_leaves_the_others_as_they_are() {
    let (service, probes) = several(2, 1 << 16, &[]);
    let register = async |name: &str| {
        let model = service.register_model(&call(), spec(name, "raw")).await.unwrap();
        let sequence = service.open_sequence(&call(), model.shape.id).unwrap();
        let stored = service.store_chunk(&call(), chunk(sequence, 0, 16)).await;
        (model.shard, sequence, stored.map(|reply| reply.length).map_err(|error| error.code()))
    };
    let mut models = Vec::new();
    for name in ["a", "b", "c", "d"] {
        models.push(register(name).await);
    }
    let shards: Vec<usize> = models.iter().map(|model| model.0).collect();
    assert_eq!(shards, [0, 1, 0, 1]);
    assert_eq!(probes[0].models.lock().len(), 2);
    assert_eq!(service.pool_stats().capacity_bytes, 2 << 16);
    let forked = service.fork_sequence(&call(), models[1].1, None).unwrap().id;
    // The second is lost: its models answer so, the others and new ones live, and it is said.
    probes[1].faults.lose_in_write(true);
    for sequence in [models[1].1, models[3].1, forked] {
        let lost = service.store_chunk(&call(), chunk(sequence, 16, 16)).await.unwrap_err();
        assert_eq!(lost.code(), ErrorCode::DeviceFailed);
    }
    while service.workers().filter(|worker| worker.has_failed()).count() < 1 {
        tokio::task::yield_now().await;
    }
    assert!(!service.is_ready());
    let why = service.why_unready();
    assert!(why.starts_with("failed: cpu") && why.lines().count() == 1, "{why}");
    for sequence in [models[0].1, models[2].1] {
        service.store_chunk(&call(), chunk(sequence, 16, 16)).await.unwrap();
        assert_eq!(service.describe_sequence(&call(), sequence).unwrap().length, 32);
    }
    let (shard, _, stored) = register("e").await;
    assert_eq!((shard, stored), (0, Ok(16)), "though more models are there");
    // Closing gives memory back, of the lost device too.
    let used = service.pool_stats().used_bytes;
    for (_, sequence, _) in models {
        service.close_sequence(&call(), sequence).unwrap();
    }
    service.close_sequence(&call(), forked).unwrap();
    assert!(service.pool_stats().used_bytes < used / 2, "{used}");
    assert_eq!(service.pool_stats().slots, 1);
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
