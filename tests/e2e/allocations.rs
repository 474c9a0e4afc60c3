//! Allocations of one attend of one token over 64, of worker and daemon together: a bound for each
//! way, so that what was saved stays saved.
#![cfg(target_os = "linux")]

use kvd_client::{AttendBatch, AttendRing, RegionClient, RegionOptions, RingLayout, RingOptions};
use kvd_tests::{ModelShape, TestEngine, TestRng, daemon, engine};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// The most of a call by ring: none of its own.
const RING_MAX: f64 = 0.5;
/// The most of a call by gRPC. More of them wait, and for longer, where other processes have the
/// cores.
const RPC_MAX: f64 = 100.0;

/// A codec that keeps no rows beside pages.
const PAGES_ALONE: &str = "kivi-4; recent=0";

/// Calls that are counted, and calls before them: buffers that grow once are not of each call.
const CALLS: u64 = 200;
const WARM_UP: u64 = 20;

/// Allocations of a call, with those of what else the process does meanwhile.
fn count_allocations(mut call: impl FnMut()) -> f64 {
    (0..WARM_UP).for_each(|_| call());
    let before = dhat::HeapStats::get().total_blocks;
    (0..CALLS).for_each(|_| call());
    (dhat::HeapStats::get().total_blocks - before) as f64 / CALLS as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_allocates_no_more_than_it_did() {
    // With the name of a file it has there who allocated, for dhat's viewer.
    let profile = dhat::Profiler::builder().trim_backtraces(Some(60));
    let _profiler = match std::env::var_os("KVD_TEST_HEAP_PROFILE") {
        Some(path) => profile.file_name(path).build(),
        None => profile.testing().build(),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvd.region");
    let plan = daemon().with_setting("server.listen_region", &path.display().to_string());
    let daemon = plan.start().await;
    let shape = ModelShape { kv_heads: 8, group: 4, ..ModelShape::small_shape() };
    let of_rows = engine(&daemon).register_model(shape.clone(), "kivi-4").await;
    let of_pages = engine(&daemon).with_name("pages").register_model(shape, PAGES_ALONE).await;
    let batch = ask_stored(&of_rows).await;
    let batch_of_pages = ask_stored(&of_pages).await;
    let runtime = tokio::runtime::Handle::current();
    let [by_ring, pages_by_ring, by_rpc, by_health] = tokio::task::block_in_place(|| {
        let region = RegionClient::open_region(&path, &RegionOptions::default()).expect("a region");
        let mut ring =
            AttendRing::open_ring(Arc::new(region), RingOptions::default()).expect("a ring");
        let client = of_rows.client.clone();
        [
            count_ring(&mut ring, &batch),
            count_ring(&mut ring, &batch_of_pages),
            count_allocations(|| {
                let call = client.attend_batch(batch.clone());
                drop(runtime.block_on(call).expect("attend"));
            }),
            count_allocations(|| {
                runtime.block_on(client.is_serving()).expect("health");
            }),
        ]
    });
    println!("allocations: ring {by_ring}, of pages {pages_by_ring}");
    println!("allocations: rpc {by_rpc}, health check {by_health}");
    assert!(pages_by_ring <= RING_MAX, "{pages_by_ring} of an attend over pages by ring");
    assert!(by_ring <= RING_MAX, "{by_ring} allocations of an attend by ring");
    assert!(by_rpc <= RPC_MAX, "{by_rpc} allocations of an attend by rpc");
}

/// A question of one token to a sequence of 64.
async fn ask_stored(engine: &TestEngine) -> AttendBatch {
    let mut conversation = engine.open_sequence().await;
    let mut rng = TestRng::new(1);
    engine.grow_sequence(&mut conversation, 64, &mut rng).await;
    engine.attend_batch(&engine.random_question(&conversation, 1, &mut rng))
}

/// Allocations of an attend by ring, in place.
fn count_ring(ring: &mut AttendRing, batch: &AttendBatch) -> f64 {
    let at = RingLayout::pack_from(ring.free_from(), batch, [64, 64]);
    ring.shared_region().memory().write_bytes(at.q.offset, &batch.q).expect("inside");
    count_allocations(|| {
        ring.submit_attend(1, batch, &at).expect("room");
        assert_eq!(ring.wait_reply().expect("an end").result, Ok(0));
    })
}
