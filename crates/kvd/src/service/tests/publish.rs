//! Publishes that are given up, wait or fail on the device.

use super::bench::{Bench, call};
use kvd_core::{ErrorCode, ModelId, SequenceId};
use kvd_proto::domain::BlockKeys;
use std::time::Duration;

const CODEC: &str = "k=uniform(b=4,g=8,axis=token); v=uniform(b=4,g=8,axis=token); recent=64";

fn keys(blocks: u8) -> BlockKeys {
    BlockKeys { keys: (0..blocks).collect(), key_bytes: 1, key_tokens: 16 }
}

/// A sequence whose blocks are all in its window still.
async fn written(bench: &Bench) -> (ModelId, SequenceId) {
    let model = bench.register("a", CODEC).await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 64).await.unwrap();
    (model, sequence)
}

fn matched(bench: &Bench, model: ModelId) -> u32 {
    let found = bench.service.match_prefixes(&call(), model, &[keys(4)], Duration::ZERO);
    found.unwrap().tokens[0]
}

#[tokio::test]
async fn a_publisher_that_leaves_before_its_turn_has_published_nothing() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = written(&bench).await;
    let used = bench.service.pool_stats().used_bytes;
    let release = bench.hold().await;
    let service = bench.service.clone();
    let publish =
        tokio::spawn(async move { service.publish_blocks(&call(), sequence, 0, &keys(4)).await });
    bench.queued(1).await;
    publish.abort();
    assert!(publish.await.unwrap_err().is_cancelled());
    assert_eq!(bench.service.first_worker().queued_jobs(), 0, "it is out of the queue at once");
    drop(release);
    bench.idle().await;
    assert_eq!((matched(&bench, model), bench.service.pool_stats().used_bytes), (0, used));
    let done = bench.service.publish_blocks(&call(), sequence, 0, &keys(4)).await.unwrap();
    assert_eq!((done.published, done.length, matched(&bench, model)), (4, 64, 64));
    // Packed once: again takes no part of the device, though that is held.
    let release = bench.hold().await;
    let done = bench.service.publish_blocks(&call(), sequence, 0, &keys(4)).await.unwrap();
    assert_eq!((done.published, done.existed), (0, 4));
    drop(release);
}

#[tokio::test]
async fn what_cannot_be_packed_ends_a_publish_before_it() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = written(&bench).await;
    bench.probe.faults.fail_next_block();
    let done = bench.service.publish_blocks(&call(), sequence, 0, &keys(4)).await.unwrap();
    assert_eq!((done.published, done.stop.is_some(), matched(&bench, model)), (0, true, 0));
}

#[tokio::test]
async fn a_model_that_is_unregistered_takes_its_cache_along() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = written(&bench).await;
    bench.service.publish_blocks(&call(), sequence, 0, &keys(4)).await.unwrap();
    bench.service.close_sequence(&call(), sequence).unwrap();
    assert_eq!(matched(&bench, model), 64);
    let lease = Duration::from_secs(60);
    let found = bench.service.match_prefixes(&call(), model, &[keys(4)], lease).unwrap();
    bench.service.unregister_model(&call(), model).await.unwrap();
    assert_eq!(bench.service.pool_stats().used_bytes, 0);
    let gone = bench.service.release_lease(&call(), found.lease.unwrap()).unwrap_err();
    assert_eq!(gone.code(), ErrorCode::UnknownLease);
    let (again, _) = written(&bench).await;
    assert_eq!(matched(&bench, again), 0, "its tables are new, so its pages must be");
}

#[tokio::test]
async fn leases_are_cut_to_the_longest_that_is_allowed() {
    let bench = Bench::new(1 << 16, &[("cache.lease_ms_max", "1")]);
    let (model, sequence) = written(&bench).await;
    bench.service.publish_blocks(&call(), sequence, 0, &keys(4)).await.unwrap();
    let long = Duration::from_secs(3600);
    let found = bench.service.match_prefixes(&call(), model, &[keys(4)], long).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let gone = bench.service.release_lease(&call(), found.lease.unwrap()).unwrap_err();
    assert_eq!(gone.code(), ErrorCode::UnknownLease);
}
