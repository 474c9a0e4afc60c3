//! Prefixes that come back layer by layer, with the real daemon: what is read is what was stored,
//! and what cannot be read is refused to the calls that need it.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use super::cache::{PAGE, keys, spec};
use super::disk::{identity, kill, start};
use super::doors::page;
use super::process::Process;
use kvd_client::{
    AttendBatch, AttendQuery, Client, ClientError, DType, ErrorCode, LayerIndex, LoadRange,
    ModelId, ModelSpec, OpenedPrefix, OpeningTerms, SequenceId, StoreChunk,
};
use std::path::Path;
use std::time::{Duration, Instant};

/// More than two groups of layers behind the first.
const LAYERS: u32 = 20;
const TOKENS: u32 = 8 * PAGE;

async fn register(client: &Client) -> ModelId {
    let mut spec: ModelSpec = spec("deep", "kivi-4");
    spec.geometry.layers = LAYERS;
    client.register_identified(spec, identity("deep@1")).await.expect("register").model
}

fn rows(layer: u32, start: u32, tokens: u32) -> Vec<u8> {
    let values = (start * 64..(start + tokens) * 64).map(|at| {
        let bits = (u64::from(at) + u64::from(layer) * 104_729).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    });
    values.flat_map(f32::to_le_bytes).collect()
}

async fn store(client: &Client, sequence: SequenceId, start: u32, tokens: u32) {
    for layer in 0..LAYERS {
        let rows = rows(layer, start, tokens);
        let (k, v) = (rows.clone().into(), rows.into());
        let layer = LayerIndex(layer);
        client.store_chunk(StoreChunk { sequence, layer, start, tokens, k, v }).await.unwrap();
    }
}

async fn publish_durably(client: &Client, model: ModelId) {
    let sequence = client.open_sequence(model).await.unwrap();
    store(client, sequence, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(1, TOKENS)).await.unwrap();
    assert_eq!((done.durable_length, &done.not_durable[..]), (TOKENS, ""));
    client.close_sequence(sequence).await.unwrap();
}

async fn open(client: &Client, model: ModelId, ready_layers: u32) -> OpenedPrefix {
    let terms = OpeningTerms { ready_layers, ..OpeningTerms::default() };
    client.open_on_terms(model, keys(1, TOKENS), terms).await.unwrap()
}

async fn attend(
    client: &Client,
    model: ModelId,
    sequence: SequenceId,
    layer: u32,
) -> Result<Vec<u8>, ClientError> {
    let batch = AttendBatch {
        model,
        layer: LayerIndex(layer),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: rows(99, 0, 1).into(),
        per_query_errors: false,
    };
    Ok(client.attend_batch(batch).await?.out.to_vec())
}

async fn load(client: &Client, sequence: SequenceId, layer: u32) -> Result<Vec<u8>, ClientError> {
    let layer = LayerIndex(layer);
    let range = LoadRange { sequence, layer, start: 0, end: TOKENS, dtype: None };
    let loaded = client.load_rows(range).await?;
    Ok([loaded.k, loaded.v].concat())
}

/// Answers and rows of every layer, the last first.
async fn read_all(client: &Client, model: ModelId, sequence: SequenceId) -> Vec<Vec<u8>> {
    let mut read = Vec::new();
    for layer in (0..LAYERS).rev() {
        read.push(attend(client, model, sequence, layer).await.unwrap());
        read.push(load(client, sequence, layer).await.unwrap());
    }
    read
}

fn used_bytes(daemon: &Process) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let lines = page.lines().filter(|line| line.starts_with("kvd_pool_used_bytes"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

async fn wait_until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "it does not come about");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_that_come_one_by_one_are_read_as_those_that_came_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), &[]);
    let client = first.client().await;
    publish_durably(&client, register(&client).await).await;
    kill(first);
    let mut all = Vec::new();
    for ready in [0, 1, 3, LAYERS, u32::MAX] {
        let daemon = start(folder.path(), &[]);
        let client = daemon.client().await;
        let model = register(&client).await;
        let opened = open(&client, model, ready).await;
        let wanted = if ready == 0 { LAYERS } else { ready.min(LAYERS) };
        assert_eq!((opened.length, opened.ready_layers), (TOKENS, wanted));
        // The last layer first: it is waited for.
        all.push(read_all(&client, model, opened.sequence).await);
        // What follows is stored and published behind it, and a fork has it all.
        store(&client, opened.sequence, TOKENS, PAGE).await;
        let more = keys(1, TOKENS + PAGE);
        let done = client.publish_blocks(opened.sequence, 0, more).await.unwrap();
        assert_eq!((done.length, &done.stopped_by[..]), (TOKENS + PAGE, ""));
        let found = client.match_prefixes(model, &[keys(1, TOKENS)], Duration::ZERO).await.unwrap();
        assert_eq!((found.tokens[0], found.pool_tokens[0]), (TOKENS, TOKENS));
        kill(daemon);
    }
    assert!(all.iter().all(|read| *read == all[0]), "the answers are others");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_opens_at_once_with_others_gets_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), &[]);
    let client = first.client().await;
    publish_durably(&client, register(&client).await).await;
    kill(first);
    let daemon = start(folder.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client).await;
    let opens = [1, 0, 1, 2].map(|ready| {
        let client = client.clone();
        tokio::spawn(async move {
            let opened = open(&client, model, ready).await;
            assert_eq!(opened.length, TOKENS);
            read_all(&client, model, opened.sequence).await
        })
    });
    let mut all = Vec::new();
    for open in opens {
        all.push(open.await.unwrap());
    }
    assert!(all.iter().all(|read| *read == all[0]), "the answers are others");
}

/// Flips a bit of the last page of a layer of the block at a position.
fn damage_layer(folder: &Path, block: usize, layer: usize) {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let segments = files.filter(|path| path.extension().is_some_and(|of| of == "kvds"));
    for path in segments {
        let mut bytes = std::fs::read(&path).unwrap();
        let pages = bytes.windows(4).enumerate().filter(|(_, magic)| magic == b"KVDP");
        // K and V of one head.
        let pages: Vec<usize> = pages.map(|(at, _)| at).collect();
        if let Some(at) = pages.get(2 * (block * LAYERS as usize + layer) + 1) {
            bytes[at + 40] ^= 0x10;
            std::fs::write(&path, bytes).unwrap();
            return;
        }
    }
    panic!("no such page");
}

fn refused<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> (ErrorCode, String) {
    let error = answer.expect_err("a refusal");
    (error.code.expect("a code"), error.message)
}

/// A folder whose only segment is sealed: what reads a record finds its damage.
async fn sealed_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), &[]);
    let client = first.client().await;
    publish_durably(&client, register(&client).await).await;
    first.signal("TERM");
    assert_eq!(first.wait().code, Some(0));
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_of_a_later_layer_is_refused_and_the_next_prefix_is_shorter() {
    let folder = sealed_folder().await;
    damage_layer(folder.path(), 5, 12);
    let daemon = start(folder.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client).await;
    let opened = open(&client, model, 1).await;
    assert_eq!((opened.length, opened.ready_layers), (TOKENS, 1));
    attend(&client, model, opened.sequence, 0).await.unwrap();
    let last = LAYERS - 1;
    let (code, said) = refused(attend(&client, model, opened.sequence, last).await);
    assert_eq!(code, ErrorCode::RangeNotStored, "{said}");
    assert!(said.contains("(corrupt)") && said.contains("open another"), "{said}");
    assert_eq!(refused(load(&client, opened.sequence, 12).await).0, ErrorCode::RangeNotStored);
    let fork = client.fork_sequence(opened.sequence, None).await;
    assert_eq!(refused(fork).0, ErrorCode::RangeNotStored);
    let publish = client.publish_blocks(opened.sequence, 0, keys(1, TOKENS)).await;
    assert_eq!(refused(publish).0, ErrorCode::RangeNotStored);
    // What came is there.
    attend(&client, model, opened.sequence, 0).await.unwrap();
    client.close_sequence(opened.sequence).await.unwrap();
    wait_until(|| used_bytes(&daemon) == 0.0).await;
    let shorter = open(&client, model, 1).await;
    assert_eq!(shorter.length, 5 * PAGE);
    attend(&client, model, shorter.sequence, last).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_of_the_first_layer_is_a_shorter_prefix() {
    let folder = sealed_folder().await;
    damage_layer(folder.path(), 3, 0);
    let daemon = start(folder.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client).await;
    let opened = open(&client, model, 1).await;
    assert_eq!(opened.length, 3 * PAGE);
    read_three(&client, model, opened.sequence).await;
}

async fn read_three(client: &Client, model: ModelId, sequence: SequenceId) {
    for layer in 0..LAYERS {
        attend(client, model, sequence, layer).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_leaves_nothing_reserved() {
    let folder = sealed_folder().await;
    let daemon = start(folder.path(), &[]);
    for round in 0..20 {
        let client = daemon.client().await;
        let model = register(&client).await;
        let opened = open(&client, model, 1).await;
        client.close_sequence(opened.sequence).await.unwrap();
        // What came as a whole is cached: dropped, nothing is left.
        let end = Instant::now() + Duration::from_secs(20);
        while used_bytes(&daemon) > 0.0 {
            assert!(Instant::now() < end, "round {round}: something stays reserved");
            client.drop_blocks(model, &[]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        publish_durably(&client, model).await;
        client.unregister_model(model).await.unwrap();
    }
}
