//! Huffman tables of many boots, with the real daemon: a layer has 16 versions, and a block whose
//! table finds none left is a counted miss.

use super::cache::{LAYERS, keys};
use super::disk::{PUBLISHED, TOKENS, kill, matched, register, start};
use super::doors::page;
use kvd_client::{Client, LayerIndex, ModelId, StoreChunk};

/// Boots, each with tables of its own; a daemon adopts the tables of fewer.
const BOOTS: u64 = 24;

/// Values whose distribution is the text's own, so that its tables are too.
fn skewed_rows(text: u64, layer: u32) -> Vec<u8> {
    let small = 0.04 * (text % BOOTS) as f32;
    let values = (0..TOKENS * 64).map(|at| {
        let bits = (u64::from(at) + text * 7_919 + u64::from(layer) * 104_729)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let value = (bits >> 40) as f32 / 8_388_608.0 - 1.0;
        if value.abs() < small { value / 20.0 } else { value }
    });
    values.flat_map(f32::to_le_bytes).collect()
}

async fn publish(client: &Client, model: ModelId, text: u64) {
    let sequence = client.open_sequence(model).await.expect("open");
    for layer in 0..LAYERS {
        let rows = skewed_rows(text, layer);
        let (k, v) = (rows.clone().into(), rows.into());
        let layer = LayerIndex(layer);
        let chunk = StoreChunk { sequence, layer, start: 0, tokens: TOKENS, k, v };
        client.store_chunk(chunk).await.expect("store");
    }
    let done = client.publish_durably(sequence, 0, keys(text, TOKENS)).await.expect("publish");
    assert_eq!(done.durable_length, PUBLISHED);
}

async fn open(client: &Client, model: ModelId, text: u64) -> u32 {
    let opened = client.open_on_prefix(model, keys(text, TOKENS), None, None).await.expect("open");
    opened.length
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_whose_table_finds_no_version_left_is_a_counted_miss_and_others_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    for text in 0..BOOTS {
        let daemon = start(folder.path(), &[]);
        let client = daemon.client().await;
        let model = register(&client, "kvcomp", &[]).await;
        publish(&client, model, text).await;
        kill(daemon);
    }
    let daemon = start(folder.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client, "kvcomp", &[]).await;
    let mut lengths = Vec::new();
    for text in 0..BOOTS {
        assert_eq!(matched(&client, model, text).await, [PUBLISHED, 0]);
        lengths.push(open(&client, model, text).await);
    }
    let read = lengths.iter().filter(|length| **length > 0).count();
    let missed = lengths.len() - read;
    assert!(read >= 12 && missed > 0, "{lengths:?}");
    let page = page(daemon.admin(), "/metrics");
    let counted = format!("kvd_import_refused_total{{reason=\"tables_full\"}} {missed}");
    assert!(page.contains(&counted), "{counted}: {page}");
    // They are on disk still, and the daemon's own blocks have versions.
    assert_eq!(matched(&client, model, BOOTS - 1).await, [PUBLISHED, 0]);
    publish(&client, model, BOOTS).await;
    assert_eq!(open(&client, model, BOOTS).await, PUBLISHED);
}
