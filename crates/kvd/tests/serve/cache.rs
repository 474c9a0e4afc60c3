//! Prefixes that clients share by key, with the real daemon.

use super::doors::page;
use super::process::Process;
use kvd_client::{
    AttendBatch, AttendQuery, BlockKeys, Client, ClientError, DType, ErrorCode, Geometry,
    LayerIndex, LoadRange, ModelId, ModelIdentity, ModelSpec, Namespace, RopePairing, SequenceId,
    StoreChunk,
};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

pub(super) const LAYERS: u32 = 2;
pub(super) const PAGE: u32 = 64;
/// Tokens of the engine's own blocks.
const KEY_TOKENS: u32 = 16;
const LEASE: Duration = Duration::from_secs(60);
/// Names the daemon to the process that is killed.
const ENDPOINT: &str = "SERVE_TEST_CACHE_ENDPOINT";

pub(super) fn spec(name: &str, codec: &str) -> ModelSpec {
    let geometry = Geometry {
        layers: LAYERS,
        kv_heads: 1,
        head_dim_k: 64,
        head_dim_v: 64,
        block_tokens: PAGE,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = (name.to_owned(), codec.to_owned());
    ModelSpec { name, geometry, codec, calibration: Default::default() }
}

async fn register(client: &Client, codec: &str) -> ModelId {
    client.register_model(spec("model", codec)).await.expect("register").model
}

/// Values of a text's tokens: noise that depends on the text and the position.
fn rows(text: u64, layer: u32, start: u32, tokens: u32) -> Vec<u8> {
    let values = (start * 64..(start + tokens) * 64).map(|at| {
        let bits = (u64::from(at) + text * 7_919 + u64::from(layer) * 104_729)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    });
    values.flat_map(f32::to_le_bytes).collect()
}

pub(super) async fn store(
    client: &Client,
    sequence: SequenceId,
    text: u64,
    start: u32,
    tokens: u32,
) {
    for layer in 0..LAYERS {
        let rows = rows(text, layer, start, tokens);
        let (k, v) = (rows.clone().into(), rows.into());
        let layer = LayerIndex(layer);
        let chunk = StoreChunk { sequence, layer, start, tokens, k, v };
        client.store_chunk(chunk).await.expect("store");
    }
}

/// Keys of the first tokens of a text.
pub(super) fn keys(text: u64, tokens: u32) -> BlockKeys {
    let keys = (0..tokens / KEY_TOKENS).flat_map(|key| {
        let key = text << 20 | u64::from(key);
        [key.to_le_bytes(), (!key).to_le_bytes()].concat()
    });
    BlockKeys { keys: keys.collect(), key_bytes: 16, key_tokens: KEY_TOKENS }
}

/// Stores a text and publishes it; the sequence.
async fn publish(client: &Client, model: ModelId, text: u64, tokens: u32) -> SequenceId {
    let sequence = client.open_sequence(model).await.expect("open");
    store(client, sequence, text, 0, tokens).await;
    let published = client.publish_blocks(sequence, 0, keys(text, tokens)).await.expect("publish");
    assert_eq!((published.length, &published.stopped_by[..]), (tokens / PAGE * PAGE, ""));
    sequence
}

async fn matched(client: &Client, model: ModelId, text: u64, tokens: u32) -> u32 {
    let chains = [keys(text, tokens)];
    client.match_prefixes(model, &chains, Duration::ZERO).await.expect("match").tokens[0]
}

pub(super) async fn attend(client: &Client, model: ModelId, sequence: SequenceId) -> Vec<f32> {
    let batch = AttendBatch {
        model,
        layer: LayerIndex(1),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: rows(99, 0, 0, 1).into(),
        per_query_errors: false,
    };
    let attended = client.attend_batch(batch).await.expect("attend");
    let out = attended.out.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
    out.chain(attended.lse).collect()
}

async fn load(client: &Client, sequence: SequenceId, end: u32) -> Vec<u8> {
    let range = LoadRange { sequence, layer: LayerIndex(1), start: 0, end, dtype: None };
    client.load_rows(range).await.expect("load").k.to_vec()
}

fn refused<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> (ErrorCode, String) {
    let error = answer.expect_err("a refusal");
    (error.code.expect("a code"), error.message)
}

/// The value of a series of the first device.
fn metric(daemon: &Process, series: &str) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {page}")).trim().parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_share_a_prefix_and_read_the_same() {
    for codec in ["raw", "kivi-4", "kvcomp"] {
        let daemon = Process::start(&[]);
        let (a, b) = (daemon.client().await, daemon.client().await);
        let model = register(&a, codec).await;
        let first = publish(&a, model, 1, 300).await;
        let own = attend(&a, model, first).await;
        if codec == "raw" {
            assert_eq!(load(&a, first, 256).await, rows(1, 1, 0, 256));
        }
        // Settled, it answers what those answer that find its pages.
        let settled = a.publish_settled(first, 0, keys(1, 300)).await.unwrap();
        assert_eq!((settled.existed, settled.published), (4, 0));
        let alike = attend(&a, model, first).await;
        a.close_sequence(first).await.unwrap();

        assert_eq!(register(&b, codec).await, model);
        let chains = [keys(1, 300), keys(2, 300), keys(1, 100)];
        let found = b.match_prefixes(model, &chains, LEASE).await.unwrap();
        assert_eq!((&found.keys[..], &found.tokens[..]), (&[16, 0, 4][..], &[256, 0, 64][..]));
        assert_eq!(metric(&daemon, "kvd_leases{device=\"0\"}"), 1.0);
        let opened = b.open_on_prefix(model, keys(1, 300), None, found.lease).await.unwrap();
        assert_eq!(opened.length, 256);
        let other = a.open_on_prefix(model, keys(1, 300), None, None).await.unwrap();
        assert_eq!(load(&a, other.sequence, 256).await, load(&b, opened.sequence, 256).await);
        if codec == "raw" {
            assert_eq!(load(&b, opened.sequence, 256).await, rows(1, 1, 0, 256));
        }
        // Both go on with the same tokens, and ask alike.
        store(&a, other.sequence, 1, 256, 44).await;
        store(&b, opened.sequence, 1, 256, 44).await;
        let [one, two] =
            [attend(&a, model, other.sequence).await, attend(&b, model, opened.sequence).await];
        assert_eq!(one, two, "{codec}");
        assert_eq!(one, alike, "{codec}: cold and warm");
        let apart = one.iter().zip(&own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < if codec == "raw" { 1e-4 } else { 0.2 }, "{codec}: {apart}");
        // The lease went with the opening.
        let gone = refused(b.release_lease(found.lease.unwrap()).await);
        assert_eq!(gone.0, ErrorCode::UnknownLease);
        assert_eq!(metric(&daemon, "kvd_leases{device=\"0\"}"), 0.0);
        assert_eq!(metric(&daemon, "kvd_attached_tokens_total"), 512.0);
        assert_eq!(metric(&daemon, "kvd_match_hit_tokens_total"), 320.0);
        assert_eq!(metric(&daemon, "kvd_index_entries{device=\"0\"}"), 4.0);
        // With its sequences and its blocks the model takes everything along.
        for sequence in [other.sequence, opened.sequence] {
            b.close_sequence(sequence).await.unwrap();
        }
        let stats = b.stats().await.unwrap();
        assert_eq!((stats.caches[0].blocks, stats.caches[0].bytes > 0), (4, true));
        assert_eq!(stats.caches[0].bytes, stats.pools[0].used_bytes, "nothing else is left");
        b.unregister_model(model).await.unwrap();
        assert_eq!(b.stats().await.unwrap().pools[0].used_bytes, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_ends_leases_and_the_cache() {
    let first = Process::start(&[]);
    let port = format!("server.listen_tcp={}", first.tcp());
    let client = first.client().await;
    let model = register(&client, "raw").await;
    publish(&client, model, 1, 128).await;
    let found = client.match_prefixes(model, &[keys(1, 128)], LEASE).await.unwrap();
    first.signal("KILL");
    first.wait();

    let _second = Process::start(&["--set", &port]);
    let lease = found.lease.unwrap();
    let error = client.release_lease(lease).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::UnknownLease), "{error}");
    assert!(error.restarted.is_some(), "{error}");
    let model = register(&client, "raw").await;
    assert_eq!(matched(&client, model, 1, 128).await, 0);
    let open = client.open_on_prefix(model, keys(1, 128), None, Some(lease)).await;
    assert_eq!(refused(open).0, ErrorCode::UnknownLease);
    let opened = client.open_on_prefix(model, keys(1, 128), None, None).await.unwrap();
    assert_eq!(opened.length, 0);
    assert_eq!(client.stats().await.unwrap().models[0].sequences, 1, "the refused one is not open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_and_checkpoints_never_match_each_other() {
    let daemon = Process::start(&["--set", "namespaces.allowed=[\"a\", \"b\"]"]);
    let of = |name: &str| Namespace::new(name).unwrap();
    let client = daemon.client().await;
    let (a, b) = (client.with_namespace(&of("a")), daemon.client().await.with_namespace(&of("b")));
    let model = register(&a, "raw").await;
    publish(&a, model, 1, 128).await;
    let lease = a.match_prefixes(model, &[keys(1, 128)], LEASE).await.unwrap().lease.unwrap();
    // The same model, the same keys, another tenant.
    let of_b = register(&b, "raw").await;
    assert_eq!((matched(&b, of_b, 1, 128).await, matched(&a, model, 1, 128).await), (0, 128));
    let stolen = b.match_prefixes(model, &[keys(1, 128)], LEASE).await;
    assert_eq!(refused(stolen).0, ErrorCode::UnknownModel);
    assert_eq!(refused(b.release_lease(lease).await).0, ErrorCode::UnknownLease);
    a.release_lease(lease).await.unwrap();
    // Another checkpoint of the same geometry is another model.
    let identity = |weights: &'static str| ModelIdentity {
        weights: weights.into(),
        ..ModelIdentity::default()
    };
    let tuned = a.register_identified(spec("model", "raw"), identity("base@2")).await;
    assert_eq!(refused(tuned).0, ErrorCode::InvalidArgument);
    let tuned = a.register_identified(spec("tuned", "raw"), identity("base@2")).await.unwrap();
    let again = a.register_identified(spec("tuned", "raw"), identity("base@2")).await.unwrap();
    assert_eq!(again, tuned);
    assert_eq!(matched(&a, tuned.model, 1, 128).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_evicts_cached_blocks_and_refuses_nobody() {
    let daemon =
        Process::start(&["--set", "device.pool_bytes=4 MiB", "--set", "cache.pool_percent=100"]);
    let client = daemon.client().await;
    let model = register(&client, "raw").await;
    for text in 0..40 {
        let sequence = publish(&client, model, text, 256).await;
        assert_eq!(matched(&client, model, text, 256).await, 256);
        client.close_sequence(sequence).await.unwrap();
    }
    assert_eq!(matched(&client, model, 0, 256).await, 0);
    assert_eq!(matched(&client, model, 39, 256).await, 256);
    assert!(metric(&daemon, "kvd_evicted_blocks_total{device=\"0\",reason=\"room\"}") > 50.0);
    assert_eq!(metric(&daemon, "kvd_evict_blocked_total{device=\"0\"}"), 0.0);
    // A share of the pool is for rows: then publishing makes the room.
    let daemon =
        Process::start(&["--set", "device.pool_bytes=4 MiB", "--set", "cache.pool_percent=50"]);
    let client = daemon.client().await;
    let model = register(&client, "raw").await;
    for text in 0..20 {
        let sequence = publish(&client, model, text, 256).await;
        client.close_sequence(sequence).await.unwrap();
    }
    let stats = client.stats().await.unwrap();
    assert_eq!(stats.caches[0].limit_bytes, 2 << 20);
    assert!(stats.caches[0].bytes <= 2 << 20 && stats.caches[0].bytes > 1 << 20, "{stats:?}");
    assert!(metric(&daemon, "kvd_evicted_blocks_total{device=\"0\",reason=\"limit\"}") > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a_publisher_that_is_killed_leaves_only_whole_prefixes starts and kills it"]
async fn publishes_until_it_is_killed() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let client = Client::connect(endpoint.parse().unwrap()).await.unwrap();
    let model = register(&client, "kivi-4").await;
    for text in 0.. {
        publish(&client, model, text, 192).await;
        println!("published {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_is_killed_leaves_only_whole_prefixes() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let model = register(&client, "kivi-4").await;
    let mut doomed = Command::new(std::env::current_exe().unwrap())
        .args(["cache::publishes_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
        .env(ENDPOINT, format!("http://{}", daemon.tcp()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(doomed.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut lines = lines.filter(|line| line.contains("published"));
    lines.by_ref().take(10).for_each(drop);
    doomed.kill().unwrap();
    let told = 10 + lines.count() as u64;
    doomed.wait().unwrap();
    // All that was acknowledged is there, and of the one under way all or nothing.
    let mut after = 0;
    for text in 0..told + 2 {
        let found = matched(&client, model, text, 192).await;
        assert!(found == 192 || text >= told && found == 0, "{text} of {told}: {found}");
        after += u32::from(text >= told && found > 0);
        let opened = client.open_on_prefix(model, keys(text, 192), None, None).await.unwrap();
        assert_eq!(opened.length, found);
        client.close_sequence(opened.sequence).await.unwrap();
    }
    assert!(after <= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_and_drops_do_as_they_are_told() {
    let daemon = Process::start(&["--set", "cache.pinned_bytes_max=1 MiB"]);
    let client = daemon.client().await;
    let model = register(&client, "raw").await;
    let first = publish(&client, model, 1, 256).await;
    let chains = [keys(1, 128)];
    let pinned = client.pin_blocks(model, &chains, None).await.unwrap();
    assert_eq!((&pinned.pinned_tokens[..], pinned.pinned_bytes > 0), (&[128][..], true));
    client.close_sequence(first).await.unwrap();
    let dropped = client.drop_blocks(model, &[keys(1, 256)]).await.unwrap();
    assert_eq!((dropped.dropped, dropped.held), (2, 2));
    assert_eq!(client.drop_blocks(model, &[]).await.unwrap().held, 2);
    assert_eq!(matched(&client, model, 1, 256).await, 128);
    assert_eq!(metric(&daemon, "kvd_pinned_bytes{device=\"0\"}"), pinned.pinned_bytes as f64);
    assert_eq!(client.unpin_blocks(model, &[keys(1, 256)]).await.unwrap(), 1);
    assert_eq!(client.drop_blocks(model, &[]).await.unwrap().dropped, 2);
    // A sequence may take what it published along.
    let second = publish(&client, model, 1, 256).await;
    client.close_and_drop(second).await.unwrap();
    assert_eq!(matched(&client, model, 1, 256).await, 0);
    assert_eq!(client.stats().await.unwrap().pools[0].used_bytes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_keys_are_refused_and_cost_little() {
    let daemon = Process::start(&["--set", "cache.keys_per_call_max=1000"]);
    let client = daemon.client().await;
    let model = register(&client, "raw").await;
    let sequence = publish(&client, model, 1, 128).await;
    let keys_of = |bytes: usize, key_bytes, key_tokens| BlockKeys {
        keys: vec![7; bytes].into(),
        key_bytes,
        key_tokens,
    };
    let invalid = [
        (keys_of(65, 65, 16), "key_bytes is 65"),
        (keys_of(0, 0, 16), "key_bytes is 0"),
        (keys_of(33, 16, 16), "no whole number of keys"),
        (keys_of(32, 16, 24), "must divide the 64 tokens"),
        (keys_of(32, 16, 128), "must divide the 64 tokens"),
    ];
    for (bad, named) in invalid {
        let chains = [keys(1, 64), bad.clone()];
        let (code, said) = refused(client.match_prefixes(model, &chains, LEASE).await);
        assert_eq!(code, ErrorCode::InvalidArgument);
        assert!(said.contains("chain 1: ") && said.contains(named), "{said}");
        let open = client.open_on_prefix(model, bad.clone(), None, None).await;
        assert_eq!(refused(open).0, ErrorCode::InvalidArgument);
        let publish = client.publish_blocks(sequence, 0, bad).await;
        assert_eq!(refused(publish).0, ErrorCode::InvalidArgument);
    }
    // Millions of keys, and thousands of chains without any.
    for chains in [vec![keys_of(4 << 20, 1, 1)], vec![keys_of(0, 1, 1); 1001]] {
        let (code, said) = refused(client.match_prefixes(model, &chains, LEASE).await);
        assert_eq!(code, ErrorCode::LimitExceeded);
        assert!(said.contains("cache.keys_per_call_max is 1000"), "{said}");
    }
    let publish = |start, tokens| client.publish_blocks(sequence, start, keys(1, tokens));
    assert_eq!(refused(publish(16, 64).await).0, ErrorCode::RangeGap);
    assert_eq!(refused(publish(192, 64).await).0, ErrorCode::RangeGap);
    assert_eq!(refused(publish(0, 192).await).0, ErrorCode::RangeNotStored);
    // Keys that do not stand for what is before them match nothing that they should not.
    let mut other = keys(2, 64);
    other.keys = [&other.keys[..], &keys(1, 128).keys[64..]].concat().into();
    let found = client.match_prefixes(model, &[other.clone()], Duration::ZERO).await.unwrap();
    assert_eq!(found.tokens, [0]);
    let stranger = client.open_sequence(model).await.unwrap();
    store(&client, stranger, 2, 0, 128).await;
    let published = client.publish_blocks(stranger, 0, other).await.unwrap();
    assert_eq!((published.length, &published.stopped_by[..]), (64, "KEY_IN_USE"));
    let (code, said) = refused(client.pin_blocks(model, &[keys(1, 64)], None).await);
    assert_eq!(code, ErrorCode::LimitExceeded);
    assert!(said.contains("cache.pinned_bytes_max"), "{said}");
    let long = ModelIdentity { weights: vec![0; 257].into(), ..ModelIdentity::default() };
    let (code, said) = refused(client.register_identified(spec("long", "raw"), long).await);
    assert!(code == ErrorCode::InvalidArgument || code == ErrorCode::LimitExceeded, "{said}");
    // It serves on.
    assert_eq!(matched(&client, model, 1, 128).await, 128);
}
