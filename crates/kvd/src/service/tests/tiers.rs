//! A device whose blocks do not leave it, or do not come back: counted, and nobody waits.

use super::bench::{Bench, call, spec};
use crate::service::{PrefixOpening, PublishMode};
use kvd_core::ModelId;
use kvd_proto::domain::{BlockKeys, ModelIdentity};
use std::path::Path;
use std::time::Duration;

const CODEC: &str = "k=uniform(b=4,g=8,axis=token); v=uniform(b=4,g=8,axis=token); recent=64";
const DURABLY: PublishMode = PublishMode { settles: false, waits_for_disk: true };

fn keys() -> BlockKeys {
    BlockKeys { keys: (0..4).collect(), key_bytes: 1, key_tokens: 16 }
}

fn bench(folder: &Path) -> Bench {
    let path = folder.display().to_string();
    Bench::new(
        1 << 16,
        &[
            ("cache.disk.path", &path),
            ("cache.disk.bytes", "16 MiB"),
            ("cache.disk.segment_bytes", "1 MiB"),
            ("cache.disk.reserve_free_bytes", "0 B"),
            ("cache.disk.sync_ms", "1"),
        ],
    )
}

async fn register(bench: &Bench) -> ModelId {
    let identity = ModelIdentity { weights: "a@1".into(), ..ModelIdentity::default() };
    let model = bench.service.register_identified(&call(), spec("a", CODEC), &identity).await;
    model.unwrap().shape.id
}

/// Tokens of the chain that are found, and of those the ones in the pool.
fn matched(bench: &Bench, model: ModelId) -> (u32, u32) {
    let found = bench.service.match_prefixes(&call(), model, &[keys()], Duration::ZERO).unwrap();
    (found.tokens[0], found.pool_tokens[0])
}

/// Tokens with which a new sequence begins.
async fn open(bench: &Bench, model: ModelId) -> u32 {
    let opening = PrefixOpening { model, session: None, prefix: keys(), lease: None };
    let _brought = bench.service.bring_prefix(&call(), &opening).await;
    bench.service.open_on_prefix(&call(), &opening).unwrap().length
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_gives_or_takes_no_bytes_is_a_page_not_durable_and_a_shorter_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let first = bench(folder.path());
    let model = register(&first).await;
    let sequence = first.service.open_sequence(&call(), model).unwrap();
    first.store(sequence, 0, 64).await.unwrap();
    *first.probe.refuse_transfers.lock() = true;
    let (caller, keys) = (call(), keys());
    let publish = || first.service.publish_in_mode(&caller, sequence, 0, &keys, DURABLY);
    let done = publish().await.unwrap();
    assert_eq!((done.durable_length, done.not_durable), (0, Some("DISK_ERROR")));
    assert_eq!((done.published.length, matched(&first, model)), (64, (64, 64)));
    *first.probe.refuse_transfers.lock() = false;
    let done = publish().await.unwrap();
    assert_eq!((done.durable_length, done.not_durable), (64, None));
    first.service.cache_tiers().unwrap().close_folder(Duration::from_secs(5));
    drop(first);

    let second = bench(folder.path());
    let model = register(&second).await;
    assert_eq!(matched(&second, model), (64, 0));
    *second.probe.refuse_transfers.lock() = true;
    assert_eq!(open(&second, model).await, 0);
    let page = second.service.metrics().render_page();
    assert!(page.contains("kvd_import_refused_total{reason=\"device\"} 1"), "{page}");
    // It is the device that failed: the records are kept.
    assert_eq!(matched(&second, model), (64, 0));
    *second.probe.refuse_transfers.lock() = false;
    assert_eq!(open(&second, model).await, 64);
    assert_eq!(matched(&second, model), (64, 64));
}
