//! The disk tier, with the real daemon: what was durable is found after a kill, byte by byte; what
//! cannot be read is a shorter prefix.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use super::cache::{LAYERS, PAGE, attend, keys, spec, store};
use super::doors::page;
use super::process::{Process, kvd, output, refused, run_at};
use kvd_client::{Client, LayerIndex, LoadRange, ModelId, ModelIdentity, Namespace, SequenceId};
use kvd_codec::{Calibration, resolve_spec};
use kvd_core::Side;
use kvd_fit::{Samples, fit_calibration};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens of a text: four pages and a rest that is not published.
pub(super) const TOKENS: u32 = 300;
pub(super) const PUBLISHED: u32 = TOKENS / PAGE * PAGE;

pub(super) fn settings(folder: &Path) -> Vec<String> {
    [
        format!("cache.disk.path={}", folder.display()),
        "cache.disk.bytes=256 MiB".to_owned(),
        "cache.disk.segment_bytes=4 MiB".to_owned(),
        "cache.disk.reserve_free_bytes=0 B".to_owned(),
        "cache.disk.sync_ms=2".to_owned(),
    ]
    .into_iter()
    .flat_map(|setting| ["--set".to_owned(), setting])
    .collect()
}

/// A daemon with its disk tier in a folder.
pub(super) fn start(folder: &Path, more: &[&str]) -> Process {
    let settings = settings(folder);
    let mut flags: Vec<&str> = settings.iter().map(String::as_str).collect();
    flags.extend(more);
    Process::start(&flags)
}

pub(super) fn identity(weights: &str) -> ModelIdentity {
    ModelIdentity { weights: weights.to_owned().into(), ..ModelIdentity::default() }
}

/// A calibration for codecs that need one, of noise.
pub(super) fn calibration(codec: &str) -> Vec<u8> {
    let geometry = spec("model", codec).geometry;
    let codec = resolve_spec(codec).unwrap();
    if !codec.needs_calibration() {
        return Vec::new();
    }
    let mut samples = Samples::new(&geometry);
    let values = |seed: u64, rows: usize| -> Vec<f32> {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..rows * 64).map(|_| draw() + draw() + draw()).collect()
    };
    for layer in (0..LAYERS).map(LayerIndex) {
        samples.push_queries(layer, 0, &values(7, 200)).unwrap();
        for side in Side::BOTH {
            samples.push(layer, side, 0, &values(11 + side.index() as u64, 400)).unwrap();
        }
    }
    let fitted: Calibration = fit_calibration(&geometry, &codec, &samples, 1, &mut |_| {}).unwrap();
    fitted.to_bytes()
}

pub(super) async fn register(client: &Client, codec: &str, calibration: &[u8]) -> ModelId {
    let mut spec = spec("model", codec);
    spec.calibration = calibration.to_vec().into();
    client.register_identified(spec, identity("a@1")).await.expect("register").model
}

/// Stores a text and publishes it; the sequence is closed once its pages are on disk.
pub(super) async fn publish_durably(client: &Client, model: ModelId, text: u64) {
    let sequence = client.open_sequence(model).await.expect("open");
    store(client, sequence, text, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(text, TOKENS)).await.expect("publish");
    assert_eq!((done.durable_length, &done.not_durable[..]), (PUBLISHED, ""));
    client.close_sequence(sequence).await.expect("close");
}

pub(super) async fn matched(client: &Client, model: ModelId, text: u64) -> [u32; 2] {
    let chains = [keys(text, TOKENS)];
    let found = client.match_prefixes(model, &chains, Duration::ZERO).await.expect("match");
    [found.tokens[0], found.pool_tokens[0]]
}

/// Reads of a new sequence of a text that it begins with: K and V of every layer, and an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Read {
    rows: Vec<u8>,
    answer: Vec<u32>,
}

pub(super) async fn open(client: &Client, model: ModelId, text: u64) -> (SequenceId, u32) {
    let opened = client.open_on_prefix(model, keys(text, TOKENS), None, None).await.expect("open");
    (opened.sequence, opened.length)
}

pub(super) async fn read(client: &Client, model: ModelId, text: u64) -> Read {
    let (sequence, length) = open(client, model, text).await;
    assert_eq!(length, PUBLISHED, "text {text}");
    let mut rows = Vec::new();
    for layer in (0..LAYERS).map(LayerIndex) {
        let range = LoadRange { sequence, layer, start: 0, end: length, dtype: None };
        let loaded = client.load_rows(range).await.expect("load");
        rows.extend(loaded.k.iter().chain(loaded.v.iter()));
    }
    let answer = attend(client, model, sequence).await.into_iter().map(f32::to_bits).collect();
    client.close_sequence(sequence).await.expect("close");
    Read { rows, answer }
}

pub(super) fn kill(daemon: Process) {
    daemon.signal("KILL");
    assert_eq!(daemon.wait().code, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_durable_is_read_byte_by_byte_after_a_kill() {
    for codec in ["raw", "kivi-4", "kvcomp", "kvd-2"] {
        let folder = tempfile::tempdir().unwrap();
        let calibration = calibration(codec);
        let first = start(folder.path(), &[]);
        let client = first.client().await;
        let model = register(&client, codec, &calibration).await;
        let mut expected = BTreeMap::new();
        for text in 1..=3 {
            publish_durably(&client, model, text).await;
            expected.insert(text, read(&client, model, text).await);
        }
        kill(first);

        let second = start(folder.path(), &[]);
        let client = second.client().await;
        let model = register(&client, codec, &calibration).await;
        // Tables of its own, before any of the others' come.
        let other = client.open_sequence(model).await.unwrap();
        store(&client, other, 77, 0, TOKENS).await;
        for (text, expected) in &expected {
            assert_eq!(matched(&client, model, *text).await, [PUBLISHED, 0], "{codec}");
            let began = Instant::now();
            let got = read(&client, model, *text).await;
            assert!(got == *expected, "{codec}: text {text} is read otherwise");
            println!("{codec}: {PUBLISHED} tokens back in {:?}", began.elapsed());
            assert_eq!(matched(&client, model, *text).await, [PUBLISHED, PUBLISHED]);
        }
    }
}

/// Rounds of publishing and killing; all that was said to be durable is found in each.
async fn kill_rounds(rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mut durable: BTreeMap<u64, Read> = BTreeMap::new();
    for round in 0..rounds {
        let daemon = start(folder.path(), &[]);
        let client = daemon.client().await;
        let model = register(&client, "kvcomp", &[]).await;
        for text in durable.keys() {
            assert_eq!(matched(&client, model, *text).await[0], PUBLISHED, "round {round}: {text}");
        }
        // All of the newest, and some of those before.
        for (text, expected) in durable.iter().filter(|(text, _)| (*text + 5 * round) % 7 < 2) {
            let got = read(&client, model, *text).await;
            assert!(got == *expected, "round {round}: text {text} is read otherwise");
        }
        // One is acknowledged; others are on their way when the daemon is killed.
        let text = 1000 + round;
        publish_durably(&client, model, text).await;
        durable.insert(text, read(&client, model, text).await);
        let others = tokio::spawn(async move {
            for text in 0..20 {
                let sequence = client.open_sequence(model).await?;
                store_or_stop(&client, sequence, 5_000 + 20 * round + text).await?;
            }
            Ok::<(), kvd_client::ClientError>(())
        });
        tokio::time::sleep(Duration::from_millis(round * 7 % 40)).await;
        kill(daemon);
        // It ends with the daemon, if not before.
        let _ended = others.await.unwrap();
    }
}

async fn store_or_stop(
    client: &Client,
    sequence: SequenceId,
    text: u64,
) -> Result<(), kvd_client::ClientError> {
    for layer in (0..LAYERS).map(LayerIndex) {
        let rows: Vec<u8> = vec![(text % 7) as u8; (PAGE * 2 * 64 * 4) as usize];
        let (k, v) = (rows.clone().into(), rows.into());
        let tokens = 2 * PAGE;
        let chunk = kvd_client::StoreChunk { sequence, layer, start: 0, tokens, k, v };
        client.store_chunk(chunk).await?;
    }
    client.publish_blocks(sequence, 0, keys(text, 2 * PAGE)).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_kills_lose_nothing_that_was_durable() {
    kill_rounds(20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes"]
async fn two_hundred_kills_lose_nothing_that_was_durable() {
    kill_rounds(200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_has_one_daemon_and_no_newer_format() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), &[]);
    let serve = |folder: &Path| {
        let mut command = kvd();
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.args(["--pool", "8 MiB"]).args(settings(folder));
        command
    };
    let (code, said) = refused(serve(folder.path()));
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("cache.disk.path: another process uses"), "{said}");
    kill(first);
    let store = folder.path().join("store.json");
    let text = std::fs::read_to_string(&store).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["format"] = 99.into();
    std::fs::write(&store, json.to_string()).unwrap();
    let (code, said) = refused(serve(&store));
    assert_eq!(code, Some(64), "{said}");
    let named = format!("cache.disk.path: {} is a file, not a folder", store.display());
    assert!(said.contains(&named) && said.contains("name a folder"), "{said}");
    let (code, said) = refused(serve(folder.path()));
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("format 99"), "{said}");
}

/// Damages the rows of every page in a folder's segments, far from heads and ends.
fn damage(folder: &Path) -> usize {
    let mut damaged = 0;
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "kvds") {
            continue;
        }
        let mut bytes = std::fs::read(&file).unwrap();
        let pages = bytes.windows(4).enumerate().filter(|(_, magic)| magic == b"KVDP");
        let places: Vec<usize> = pages.map(|(at, _)| at + 40).collect();
        for at in places.into_iter().filter(|at| *at < bytes.len()).collect::<Vec<_>>() {
            bytes[at] ^= 0x10;
            damaged += 1;
        }
        std::fs::write(&file, bytes).unwrap();
    }
    damaged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flipped_bits_on_disk_are_a_shorter_prefix_and_no_data() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), &[]);
    let client = first.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish_durably(&client, model, 1).await;
    let expected = read(&client, model, 1).await;
    // A segment that was sealed is not read at the start: what reads a record finds out.
    first.signal("TERM");
    assert_eq!(first.wait().code, Some(0));
    let run = |what: &str| {
        let mut command = kvd();
        command.args(["cache", what]).arg(folder.path());
        output(command)
    };
    let listed = String::from_utf8(run("ls").stdout).unwrap();
    assert!(listed.contains("model") && listed.contains("default"), "{listed}");
    assert_eq!(run("verify").status.code(), Some(0));
    assert!(damage(folder.path()) > 0);
    let verified = run("verify");
    assert_eq!(verified.status.code(), Some(1));
    let said = String::from_utf8(verified.stderr).unwrap();
    assert!(said.contains("4 records are damaged"), "{said}");
    let second = start(folder.path(), &[]);
    let client = second.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await[0], PUBLISHED);
    let (_, length) = open(&client, model, 1).await;
    assert_eq!(length, 0);
    assert_eq!(matched(&client, model, 1).await, [0, 0]);
    let metrics = page(second.admin(), "/metrics");
    assert!(metrics.contains("kvd_import_refused_total{reason=\"corrupt\"} 1"), "{metrics}");
    // Stored again it is as before, also after another kill.
    publish_durably(&client, model, 1).await;
    assert_eq!(read(&client, model, 1).await, expected);
    kill(second);
    let third = start(folder.path(), &[]);
    let client = third.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(read(&client, model, 1).await, expected);
    // What was open when the daemon was killed is read at the start.
    kill(third);
    damage(folder.path());
    let fourth = start(folder.path(), &[]);
    let client = fourth.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    let (_, length) = open(&client, model, 1).await;
    assert_eq!(length, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scopes_never_meet_and_nobody_without_a_name_reaches_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let more = ["--set", "namespaces.allowed=[\"*\"]"];
    let first = start(folder.path(), &more);
    let client = first.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish_durably(&client, model, 1).await;
    // Nobody names its weights.
    let nameless = client.register_model(spec("nameless", "kivi-4")).await.unwrap().model;
    let sequence = client.open_sequence(nameless).await.unwrap();
    store(&client, sequence, 2, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(2, TOKENS)).await.unwrap();
    assert_eq!((done.length, done.durable_length), (PUBLISHED, 0));
    assert_eq!(done.not_durable, "NOT_DURABLE: NO_IDENTITY");
    // The same content under another name: the scope is taken.
    let twin = client.register_identified(spec("twin", "kivi-4"), identity("a@1")).await.unwrap();
    let sequence = client.open_sequence(twin.model).await.unwrap();
    store(&client, sequence, 1, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(1, TOKENS)).await.unwrap();
    assert_eq!((done.length, &done.not_durable[..]), (PUBLISHED, "NOT_DURABLE: SCOPE_IN_USE"));
    kill(first);

    let second = start(folder.path(), &more);
    let client = second.client().await;
    let other = client.register_identified(spec("other", "kivi-4"), identity("a@2")).await.unwrap();
    let codec = client.register_identified(spec("codec", "kivi-2"), identity("a@1")).await.unwrap();
    let nameless = client.register_model(spec("nameless", "kivi-4")).await.unwrap().model;
    for (model, text) in [(other.model, 1), (codec.model, 1), (nameless, 1), (nameless, 2)] {
        assert_eq!(matched(&client, model, text).await, [0, 0], "{model}: {text}");
    }
    let stranger = client.clone().with_namespace(&Namespace::new("stranger").unwrap());
    let theirs = register(&stranger, "kivi-4", &[]).await;
    assert_eq!(matched(&stranger, theirs, 1).await, [0, 0]);
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, 0]);
    // Unregistered and registered again it is found again; dropped it is not, also after a kill.
    client.unregister_model(model).await.unwrap();
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, 0]);
    publish_durably(&client, model, 3).await;
    let dropped = client.drop_blocks(model, &[keys(1, TOKENS)]).await.unwrap();
    assert_eq!(dropped.dropped, u64::from(PUBLISHED / PAGE));
    // What is behind the drops in the queue is durable, so they are.
    publish_durably(&client, model, 4).await;
    kill(second);
    let third = start(folder.path(), &more);
    let client = third.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [0, 0]);
    assert_eq!(matched(&client, model, 3).await, [PUBLISHED, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_the_pool_may_cache_goes_to_disk_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    // 671 kB for the cache, and 262 kB a text.
    let daemon = start(folder.path(), &["--set", "cache.pool_percent=1"]);
    let client = daemon.client().await;
    let model = register(&client, "raw", &[]).await;
    let mut expected = BTreeMap::new();
    for text in 1..=12 {
        publish_durably(&client, model, text).await;
        expected.insert(text, read(&client, model, text).await);
    }
    let mut from_disk = 0;
    for _ in 0..2 {
        for (text, expected) in &expected {
            let [all, in_pool] = matched(&client, model, *text).await;
            assert_eq!(all, PUBLISHED, "text {text}");
            from_disk += u64::from(all - in_pool);
            assert!(read(&client, model, *text).await == *expected, "text {text}");
        }
    }
    assert!(from_disk > u64::from(12 * PUBLISHED), "{from_disk}");
    let stats = client.stats().await.unwrap().caches.remove(0);
    assert!(stats.bytes <= stats.limit_bytes && stats.disk_blocks == 48, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_said_and_the_pages_are_found_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path(), &["--set", "cache.disk.reserve_free_bytes=900 PiB"]);
    let client = daemon.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    let sequence = client.open_sequence(model).await.unwrap();
    store(&client, sequence, 1, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(1, TOKENS)).await.unwrap();
    assert_eq!((done.length, done.durable_length), (PUBLISHED, 0));
    assert_eq!(done.not_durable, "NOT_DURABLE: DISK_FULL");
    client.close_sequence(sequence).await.unwrap();
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, PUBLISHED]);
    read(&client, model, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_disk_a_publish_that_asks_for_it_says_so() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    let sequence = client.open_sequence(model).await.unwrap();
    store(&client, sequence, 1, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(1, TOKENS)).await.unwrap();
    assert_eq!((done.length, &done.not_durable[..]), (PUBLISHED, "NOT_DURABLE: NO_DISK"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_drop_a_models_blocks_and_a_folders_scopes_and_segments() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish_durably(&client, model, 1).await;
    let of_daemon = ["cache", "drop", "model", "--endpoint", &format!("http://{}", daemon.tcp())];
    let run = |arguments: &[&str]| {
        let mut command = kvd();
        command.args(arguments);
        let done = output(command);
        let said = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8(said).unwrap())
    };
    let (code, said) = run(&of_daemon);
    assert!(code == Some(0) && said.starts_with("4 blocks dropped; 0 stay"), "{said}");
    assert_eq!(matched(&client, model, 1).await, [0, 0]);
    publish_durably(&client, model, 2).await;
    let path = folder.path().display().to_string();
    let (code, said) = run(&["cache", "gc", "--keep-bytes", "1 GiB", &path]);
    assert!(code == Some(69) && said.contains("another process uses"), "{code:?} {said}");
    daemon.signal("TERM");
    assert_eq!(daemon.wait().code, Some(0));
    let (code, said) = run(&["cache", "gc", "--keep-bytes", "1 GiB", &path]);
    assert!(code == Some(0) && said.starts_with("0 blocks dropped, 4 left; 0 B"), "{said}");
    let (code, said) = run(&["cache", "gc", "--scope", "xyz", &path]);
    assert!(code == Some(64) && said.contains("kvd cache ls"), "{code:?} {said}");
    let (_, listed) = run(&["cache", "ls", "--json", &path]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let scope = listed[0]["scope"].as_str().unwrap();
    let (code, said) = run(&["cache", "gc", "--scope", &scope[..8], &path]);
    assert!(code == Some(0) && said.starts_with("4 blocks dropped, 0 left"), "{said}");
    let (code, said) = run(&["cache", "gc", "--keep-bytes", "0 B", "--json", &path]);
    assert!(code == Some(0) && said.contains("freed_bytes"), "{said}");
    let again = start(folder.path(), &[]);
    let client = again.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 2).await, [0, 0]);
}

/// Tokens of a published text that are on disk, and why there are no more.
async fn publish_told(client: &Client, model: ModelId, text: u64) -> (u32, String) {
    let sequence = client.open_sequence(model).await.expect("open");
    store(client, sequence, text, 0, TOKENS).await;
    let done = client.publish_durably(sequence, 0, keys(text, TOKENS)).await.expect("publish");
    client.close_sequence(sequence).await.expect("close");
    (done.durable_length, done.not_durable)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_at_its_quota_of_the_disk_is_told_and_another_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let allowed = "namespaces.allowed=[\"a\", \"b\"]";
    let quotas = "namespaces.quotas=[\"a: disk_bytes=1 KiB\"]";
    let daemon = start(folder.path(), &["--set", allowed, "--set", quotas]);
    let client_of =
        async |name: &str| daemon.client().await.with_namespace(&Namespace::new(name).unwrap());
    let (a, b) = (client_of("a").await, client_of("b").await);
    let models = [register(&a, "raw", &[]).await, register(&b, "raw", &[]).await];
    let told = publish_told(&a, models[0], 1).await;
    assert_eq!(told, (0, "NOT_DURABLE: QUOTA_EXCEEDED".to_owned()));
    assert_eq!(matched(&a, models[0], 1).await, [PUBLISHED; 2], "found in the pool");
    publish_durably(&b, models[1], 1).await;
    let endpoint = format!("http://{}", daemon.tcp());
    let set = ["namespaces", "set", "a", "--disk-bytes", "64MiB"];
    let (code, text) = run_at(&endpoint, &set);
    assert!(code == Some(0) && text.contains("disk_bytes 0 B of 64.0 MiB"), "{text}");
    publish_durably(&a, models[0], 1).await;
    let metrics = page(daemon.admin(), "/metrics");
    let of = |name: &str| {
        let named = format!("{name}{{namespace=\"a\",quota=\"disk_bytes\"}} ");
        let found = metrics.lines().find_map(|line| line.strip_prefix(&named[..]));
        found.and_then(|value| value.parse::<f64>().ok()).unwrap_or_else(|| panic!("{metrics}"))
    };
    let rows = f64::from(PUBLISHED * LAYERS) * 512.0;
    assert!(of("kvd_quota_used") >= rows / 2.0, "{}", of("kvd_quota_used"));
    assert!(of("kvd_quota_refusals_total") >= 1.0);
}
