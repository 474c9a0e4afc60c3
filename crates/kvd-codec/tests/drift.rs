//! Huffman tables are built again when codes drift, a bounded number of times.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{codec, decode, geometry, noise, page};
use kvd_codec::{BlockRows, ModelCodec};
use kvd_core::{DType, LayerIndex, Side};

const LAYER: LayerIndex = LayerIndex(0);
const SPEC: &str = "k=uniform(rel=0.05,axis=block)/huffman; v=uniform(b=4,axis=token)";

/// A block of which one value in `rare` is large: the rarer, the more codes are alike.
fn rows(seed: usize, rare: usize) -> Vec<f32> {
    let gain = |i: usize| if i.is_multiple_of(rare) { 8.0 } else { 1.0 };
    (0..2 * 64 * 32).map(|i| noise(seed * 8192 + i) * gain(i)).collect()
}

/// Lets the codec see `count` blocks.
fn watch(codec: &mut ModelCodec, count: usize, rare: usize) {
    for seed in 0..count {
        let rows = rows(100 + seed, rare);
        codec.watch_tables(LAYER, &BlockRows { tokens: 64, k: &rows, v: &rows });
    }
}

fn trained(rare: usize) -> ModelCodec {
    let rows = rows(1, rare);
    codec(&geometry(32, DType::F32), SPEC, &BlockRows { tokens: 64, k: &rows, v: &rows })
}

fn bytes(codec: &ModelCodec, rows: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let block = BlockRows { tokens: 64, k: rows, v: rows };
    codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    bytes
}

#[test]
fn blocks_of_the_same_kind_keep_their_table() {
    let mut codec = trained(2);
    // The first table is of a single block; one of eight may replace it.
    watch(&mut codec, 64, 2);
    let versions = codec.table_versions();
    watch(&mut codec, 1024, 2);
    assert_eq!(codec.table_versions(), versions);
}

#[test]
fn drift_builds_a_version_and_older_pages_still_decode() {
    let mut codec = trained(2);
    let old_rows = rows(1, 2);
    let mut old = Vec::new();
    let block = BlockRows { tokens: 64, k: &old_rows, v: &old_rows };
    let encoded = codec.encode_block(LAYER, &block, &mut old).unwrap();
    let before = decode(&codec, Side::Key, 0, page(&old, &encoded, 0));
    let new_rows = rows(2, 4096);
    let expensive = bytes(&codec, &new_rows).len();
    watch(&mut codec, 63, 4096);
    assert_eq!(codec.table_versions(), 1, "64 blocks make a decision");
    watch(&mut codec, 1, 4096);
    assert_eq!(codec.table_versions(), 2);
    assert!(bytes(&codec, &new_rows).len() < expensive);
    assert_eq!(decode(&codec, Side::Key, 0, page(&old, &encoded, 0)), before);
}

#[test]
fn versions_are_bounded_and_bad_blocks_passed_over() {
    let mut codec = trained(2);
    for turn in 0..40 {
        watch(&mut codec, 64, if turn % 2 == 0 { 4096 } else { 2 });
    }
    assert_eq!(codec.table_versions(), 16);
    let bad = vec![f32::NAN; 2 * 64 * 32];
    for _ in 0..64 {
        codec.watch_tables(LAYER, &BlockRows { tokens: 64, k: &bad, v: &bad });
    }
    assert_eq!(codec.table_versions(), 16);
}
