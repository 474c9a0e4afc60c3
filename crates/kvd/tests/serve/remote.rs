//! A store that daemons share, with real daemons: what one publishes another reads, bit by bit; a
//! store that is wrong, gone or slow is a shorter prefix.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use super::cache::{keys, spec, store};
use super::disk::{
    self, PUBLISHED, TOKENS, calibration, identity, kill, matched, open, publish_durably, read,
    register,
};
use super::doors::page;
use super::process::Process;
use kvd_client::{Client, ModelId};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Pages of a text.
const PAGES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon with a shared store.
fn start(url: &str, more: &[&str]) -> Process {
    let url = format!("cache.remote.url={url}");
    // No deadline of a busy machine: what is late is another test's.
    let settings = [&url, "cache.remote.min_prefix_tokens=0", "cache.remote.find_ms_max=5000"];
    let mut flags: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    flags.extend(more);
    Process::start(&flags)
}

fn folder_url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

/// All objects below a folder.
fn objects(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(objects(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// A metric's value; 0 where it has no series.
fn metric(daemon: &Process, series: &str) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}

/// Publishes a text and closes its sequence.
async fn publish(client: &Client, model: ModelId, text: u64) {
    let sequence = client.open_sequence(model).await.expect("open");
    store(client, sequence, text, 0, TOKENS).await;
    let done = client.publish_blocks(sequence, 0, keys(text, TOKENS)).await.expect("publish");
    assert_eq!(done.length, PUBLISHED);
    client.close_sequence(sequence).await.expect("close");
}

async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn count_written(daemon: &Process) -> f64 {
    metric(daemon, "kvd_remote_requests_total{op=\"write\",result=\"ok\"}")
}

/// Two daemons share what one of them publishes.
async fn check_sharing(url: &str, codec: &str, more: &[&str]) {
    let calibration = calibration(codec);
    let first = start(url, more);
    let client = first.client().await;
    let model = register(&client, codec, &calibration).await;
    publish(&client, model, 1).await;
    publish(&client, model, 2).await;
    let expected = [read(&client, model, 1).await, read(&client, model, 2).await];
    wait_until("all is written", || count_written(&first) == (2 * PAGES) as f64).await;

    let second = start(url, more);
    let client = second.client().await;
    let model = register(&client, codec, &calibration).await;
    // Tables of its own, before any of the other's come.
    let other = client.open_sequence(model).await.unwrap();
    store(&client, other, 77, 0, TOKENS).await;
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, 0], "{codec}");
    for (text, expected) in (1..).zip(&expected) {
        // The second is found by the call that begins with it.
        assert!(read(&client, model, text).await == *expected, "{codec}: text {text}");
        assert_eq!(matched(&client, model, text).await, [PUBLISHED, PUBLISHED]);
    }
    assert_eq!(metric(&second, "kvd_remote_found_blocks_total"), (2 * PAGES) as f64);
    // Of another model, and without a name of its weights, nothing is found.
    let other = client.register_identified(spec("other", codec_of(codec)), identity("a@2"));
    if let Ok(other) = other.await {
        assert_eq!(matched(&client, other.model, 1).await, [0, 0]);
    }
    // What came from the store is not written to it again.
    publish(&client, model, 1).await;
    assert_eq!(count_written(&second), 0.0);
    kill(first);
    assert!(read(&client, model, 2).await == expected[1]);
}

/// A codec that needs no calibration, for a model of which nothing is found.
fn codec_of(codec: &str) -> &str {
    if codec == "kvd-2" { "kivi-4" } else { codec }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_share_prefixes_through_a_folder_and_answers_are_equal() {
    for codec in ["kvcomp", "kvd-2"] {
        let folder = tempfile::tempdir().unwrap();
        check_sharing(&folder_url(folder.path()), codec, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_share_prefixes_through_a_redis_and_answers_are_equal() {
    let Some(server) = RedisServer::start() else {
        println!("SKIP redis: redis-server is not installed");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "a secret of two daemons").unwrap();
    let secret = format!("cache.remote.mac_key_file={}", secret.display());
    let url = format!("redis://127.0.0.1:{}/0", server.port);
    check_sharing(&url, "kivi-4", &["--set", &secret]).await;
    // A third without the secret finds nothing of theirs.
    let stranger = start(&url, &[]);
    let client = stranger.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_is_damaged_cut_off_or_of_another_block_is_a_counted_miss() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder_url(folder.path());
    let first = start(&url, &[]);
    let client = first.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish(&client, model, 1).await;
    wait_until("all is written", || count_written(&first) == PAGES as f64).await;
    let paths = objects(folder.path());
    let sound: Vec<_> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    type Damage = fn(&[Vec<u8>], usize) -> Vec<u8>;
    let damages: [(&str, Damage); 3] = [
        ("a flipped bit", |sound, at| {
            let mut bytes = sound[at].clone();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            bytes
        }),
        ("cut off", |sound, at| sound[at][..sound[at].len() - 4096].to_vec()),
        ("another's", |sound, at| sound[(at + 1) % sound.len()].clone()),
    ];
    for (what, damage) in damages {
        for (at, path) in paths.iter().enumerate() {
            std::fs::write(path, damage(&sound, at)).unwrap();
        }
        let second = start(&url, &[]);
        let client = second.client().await;
        let model = register(&client, "kivi-4", &[]).await;
        assert_eq!(matched(&client, model, 1).await[0], PUBLISHED, "{what}");
        let (_, length) = open(&client, model, 1).await;
        assert_eq!(length, 0, "{what}");
        assert_eq!(matched(&client, model, 1).await, [0, 0], "{what}");
        assert!(metric(&second, "kvd_corrupt_records_total{tier=\"remote\"}") >= 1.0, "{what}");
        let refused = "kvd_import_refused_total{reason=\"corrupt\"}";
        assert_eq!(metric(&second, refused), 1.0, "{what}");
        // Published here it is as it was, for others too.
        publish(&client, model, 1).await;
        wait_until("it is written anew", || count_written(&second) == PAGES as f64).await;
        let anew: Vec<_> = paths.iter().map(|path| std::fs::read(path).unwrap().len()).collect();
        assert_eq!(anew, sound.iter().map(Vec::len).collect::<Vec<_>>(), "{what}");
    }
    // Dropped by key it leaves the store too.
    let dropped = client.drop_blocks(model, &[keys(1, TOKENS)]).await.unwrap();
    assert_eq!(dropped.dropped, PAGES as u64);
    wait_until("all is removed", || objects(folder.path()).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_came_from_a_store_is_durable_once_it_is_published_here() {
    let (shared, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = folder_url(shared.path());
    let with_disk = |folder: &Path| disk::settings(folder);
    let of_first = tempfile::tempdir().unwrap();
    let flags = with_disk(of_first.path());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let first = start(&url, &flags);
    let client = first.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish_durably(&client, model, 1).await;
    let expected = read(&client, model, 1).await;
    wait_until("all is written", || count_written(&first) == PAGES as f64).await;
    kill(first);

    let flags = with_disk(own.path());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let second = start(&url, &flags);
    let client = second.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    let (sequence, length) = open(&client, model, 1).await;
    assert_eq!(length, PUBLISHED);
    store(&client, sequence, 1, PUBLISHED, TOKENS - PUBLISHED).await;
    let done = client.publish_durably(sequence, 0, keys(1, TOKENS)).await.unwrap();
    assert_eq!((done.durable_length, &done.not_durable[..]), (PUBLISHED, ""));
    assert_eq!(count_written(&second), 0.0);
    kill(second);
    // Its own disk has it now: no store is needed.
    let third = Process::start(&flags);
    let client = third.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, 0]);
    assert_eq!(read(&client, model, 1).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_or_is_gone_costs_a_miss_its_deadline_and_a_hit_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [silent.local_addr().unwrap(), gone] {
        let url = format!("redis://{address}");
        let daemon = start(&url, &["--set", "cache.remote.find_ms_max=50"]);
        let client = daemon.client().await;
        let model = register(&client, "kivi-4", &[]).await;
        publish(&client, model, 1).await;
        let asked = || {
            let page = page(daemon.admin(), "/metrics");
            let finds = page.lines().filter(|line| {
                line.starts_with("kvd_remote_requests_total{op=\"find\"")
                    && !line.contains("skipped")
            });
            finds.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
        };
        for _ in 0..20 {
            assert_eq!(matched(&client, model, 1).await, [PUBLISHED, PUBLISHED]);
        }
        assert_eq!(asked(), 0.0, "a hit asks for nothing");
        for text in 2..12 {
            let began = Instant::now();
            assert_eq!(matched(&client, model, text).await, [0, 0]);
            assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        }
        assert_eq!(metric(&daemon, "kvd_remote_state"), 2.0);
        assert!(asked() <= 5.0, "{}", asked());
        assert_eq!(read(&client, model, 1).await, read(&client, model, 1).await);
    }
}

/// A Redis of this test, on loopback, ended with it.
struct RedisServer {
    child: Child,
    port: u16,
}

impl RedisServer {
    /// None where none is installed.
    fn start() -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.current_dir(std::env::temp_dir()).stdout(Stdio::null()).stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => {
                let server = Self { child, port };
                let until = Instant::now() + PATIENCE;
                while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
                    assert!(Instant::now() < until, "redis-server does not listen");
                    std::thread::sleep(Duration::from_millis(10));
                }
                Some(server)
            }
            Err(error) => {
                let is_required = std::env::var_os("KVD_REQUIRE_REMOTE").is_some();
                assert!(!is_required, "redis-server: {error}");
                None
            }
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
