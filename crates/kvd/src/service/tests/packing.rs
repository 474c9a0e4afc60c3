//! Packing under a full pool and with blocks that cannot be encoded.

use super::bench::{Bench, call, chunk};
use kvd_core::SequenceId;

const RAW: &str = "k=raw; v=raw";

fn take<T>(list: &parking_lot::Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut list.lock())
}

fn deferred(bench: &Bench) -> u64 {
    let text = bench.service.metrics().render_page();
    let line = text.lines().find(|line| line.starts_with("kvd_pack_deferred_total{")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

async fn packed_blocks(bench: &Bench, sequence: SequenceId, start: u32, tokens: u32) -> u32 {
    bench.store(sequence, start, tokens).await.unwrap().packed_blocks
}

#[tokio::test]
async fn blocks_that_wait_for_room_are_counted_once_where_packing_would_save_memory() {
    for (codec, counted) in [(RAW, 0), ("k=fp8e; v=raw", 4)] {
        // Four raw blocks of 512 bytes and room for nothing else.
        let codec = codec.replace("fp8e", "uniform(b=8,g=8,axis=token)");
        let bench = Bench::new(4 * 512, &[]);
        let model = bench.register("a", &codec).await.shape.id;
        let sequence = bench.service.open_sequence(&call(), model).unwrap();
        assert_eq!(packed_blocks(&bench, sequence, 0, 63).await, 0, "{codec}");
        assert_eq!(packed_blocks(&bench, sequence, 63, 1).await, 0, "{codec}");
        assert_eq!(deferred(&bench), counted, "{codec}");
    }
}

#[tokio::test]
async fn a_full_pool_costs_one_encoded_block_per_append() {
    // Sixteen raw blocks of 512 bytes, four more of other sequences, and room for one: pages of
    // a block take 576.
    let bench = Bench::new(21 * 512, &[]);
    let model = bench.register("a", RAW).await.shape.id;
    let open = || bench.service.open_sequence(&call(), model).unwrap();
    let others = [open(), open(), open(), open()];
    for other in others {
        bench.store(other, 0, 15).await.unwrap();
    }
    let sequence = open();
    assert_eq!(packed_blocks(&bench, sequence, 0, 256).await, 0);
    assert_eq!(take(&bench.probe.encoded), [16]);
    for token in 256..259 {
        assert_eq!(packed_blocks(&bench, sequence, token, 1).await, 0);
        assert_eq!(take(&bench.probe.encoded), [1]);
    }
    // With room again, batches grow until it is used up: 2048 bytes are pages of three blocks.
    for other in others {
        bench.service.close_sequence(&call(), other).unwrap();
    }
    assert_eq!(packed_blocks(&bench, sequence, 259, 1).await, 3);
    assert_eq!(take(&bench.probe.encoded), [1, 2, 4]);
}

#[tokio::test]
async fn a_block_that_cannot_be_encoded_stays_raw_alone_and_for_good() {
    let bench = Bench::new(1 << 16, &[]);
    let model = bench.register("a", RAW).await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.probe.faults.fail_next_block();
    assert_eq!(packed_blocks(&bench, sequence, 0, 64).await, 3);
    assert_eq!(packed_blocks(&bench, sequence, 64, 16).await, 1);
    assert_eq!(take(&bench.probe.encoded), [4, 1]);
    let usage = bench.service.describe_sequence(&call(), sequence).unwrap();
    assert_eq!((usage.packed_blocks, usage.raw_blocks), (4, 1));
}

#[tokio::test]
async fn stores_that_wait_hold_no_memory_and_refuse_none_another() {
    // Each store is of four raw blocks of 512 bytes: all at once they are more than the pool, and
    // packed they are less.
    let (stores, pool_bytes) = (12, 40 * 512);
    let bench = Bench::new(pool_bytes, &[]);
    let codec = "k=uniform(b=2,g=8,axis=token); v=uniform(b=2,g=8,axis=token)";
    let model = bench.register("a", codec).await.shape.id;
    let release = bench.hold().await;
    let mut waiting = Vec::new();
    for _ in 0..stores {
        let sequence = bench.service.open_sequence(&call(), model).unwrap();
        let service = bench.service.clone();
        let store = async move { service.store_chunk(&call(), chunk(sequence, 0, 64)).await };
        waiting.push(tokio::spawn(store));
    }
    bench.queued(stores).await;
    assert_eq!(bench.service.pool_stats().used_bytes, 0, "nothing is reserved for what waits");
    drop(release);
    for store in waiting {
        assert_eq!(store.await.unwrap().unwrap().packed_blocks, 4);
    }
    assert!(bench.service.pool_stats().used_bytes > pool_bytes / 2);
}
