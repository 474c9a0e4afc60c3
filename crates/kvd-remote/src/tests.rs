//! The tier over stores: a folder, stores that fail as told, and a real Redis where there is one.

use crate::{
    BreakerState, MacKey, ReadFailure, RemoteOp, RemoteSettings, RemoteStore, RemoteTier,
    RemoteUrl, StoreFailure, StoreFuture, name_object,
};
use bytes::Bytes;
use kvd_tier::{BlockName, LayerShape, ObjectName, RecordDraft, RecordMeta, RecordShape, ScopeId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SCOPE: ScopeId = ScopeId([5; 16]);

fn key(position: u32) -> Vec<u8> {
    format!("key {position}").into_bytes()
}

fn name(position: u32) -> ObjectName {
    let parent = position.checked_sub(1).map(key);
    name_object(SCOPE, position, &key(position), parent.as_deref())
}

fn draft(fill: u8) -> RecordDraft {
    let meta = RecordMeta { name: BlockName::default(), key: Box::default() };
    let layers = vec![LayerShape { form: vec![1], bytes: 9000 }; 2];
    let mut draft = RecordDraft::new(&RecordShape { meta, tables: Vec::new(), layers }).unwrap();
    (0..2).for_each(|layer| draft.layer_mut(layer).unwrap().fill(fill));
    draft
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Writes the first blocks of the prefix and waits for them; how many were written.
async fn write_blocks(tier: &RemoteTier, count: u32) -> usize {
    let written = Arc::new(AtomicUsize::new(0));
    for position in 0..count {
        let object = tier.make_object(&draft(position as u8), &name(position), &key(position));
        let written = Arc::clone(&written);
        let on_uploaded = move |done| {
            written.fetch_add(usize::from(done), Relaxed);
        };
        if tier.queue_object(name(position), object, Box::new(on_uploaded)).is_err() {
            break;
        }
    }
    while tier.read_levels().queued_bytes > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    written.load(Relaxed)
}

fn names(count: u32) -> Vec<ObjectName> {
    (0..count).map(name).collect()
}

/// Tries all that any store has to do.
async fn check_store(settings: RemoteSettings) {
    let quick = RemoteSettings { find_timeout: Duration::from_secs(5), ..settings };
    let [first, second] = [(); 2].map(|()| RemoteTier::open_store(quick.clone()).expect("a store"));
    assert_eq!(second.find_blocks(&names(1), soon()).await, 0);
    assert_eq!(write_blocks(&first, 40).await, 40);
    // It was not there a moment ago; another that never asked finds all.
    assert_eq!(second.find_blocks(&names(60), soon()).await, 0);
    assert_eq!(first.find_blocks(&names(60), soon()).await, 40);
    assert_eq!(first.find_blocks(&names(60)[7..30], soon()).await, 23);
    for position in [0, 17, 39] {
        let part = second.read_block(&name(position), soon()).await.expect("a block");
        assert_eq!(part.layer_bytes(1).unwrap(), [position as u8; 9000]);
        assert!(part.has_key(&key(position)));
    }
    assert_eq!(second.read_block(&name(40), soon()).await.unwrap_err(), ReadFailure::Missing);
    assert_eq!(first.remove_blocks(&names(3)[2..]).await, 1);
    assert_eq!(second.read_block(&name(2), soon()).await.unwrap_err(), ReadFailure::Missing);
    // Another secret, or none, never meets these.
    let mac = MacKey::from_secret(b"a secret of many bytes").unwrap();
    let secret = RemoteTier::open_store(RemoteSettings { mac: Some(mac), ..quick }).unwrap();
    assert_eq!(secret.find_blocks(&names(1), soon()).await, 0);
    assert_eq!(write_blocks(&secret, 2).await, 2);
    assert!(secret.read_block(&name(1), soon()).await.is_ok());
}

#[tokio::test]
async fn a_folder_is_a_store() {
    let folder = tempfile::tempdir().unwrap();
    check_store(RemoteSettings::new(RemoteUrl::Folder(folder.path().to_owned()))).await;
    let missing = RemoteSettings::new(RemoteUrl::Folder(folder.path().join("not there")));
    assert!(RemoteTier::open_store(missing).is_err());
}

/// A store in memory that fails as it is told.
#[derive(Default)]
struct TestStore {
    objects: Mutex<BTreeMap<String, Bytes>>,
    mode: Mutex<TestMode>,
    asked: AtomicUsize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum TestMode {
    #[default]
    Answers,
    Fails,
    Hangs,
    Full,
}

impl TestStore {
    async fn answer(&self) -> Result<(), StoreFailure> {
        self.asked.fetch_add(1, Relaxed);
        let mode = *self.mode.lock();
        match mode {
            TestMode::Answers => Ok(()),
            TestMode::Fails => Err(StoreFailure::Failed("told to".to_owned())),
            TestMode::Full => Err(StoreFailure::Full("told to".to_owned())),
            TestMode::Hangs => std::future::pending().await,
        }
    }
}

impl RemoteStore for Arc<TestStore> {
    fn count_present<'a>(&'a self, paths: &'a [String]) -> StoreFuture<'a, usize> {
        Box::pin(async move {
            self.answer().await?;
            let objects = self.objects.lock();
            Ok(paths.iter().take_while(|path| objects.contains_key(*path)).count())
        })
    }

    fn read_object<'a>(&'a self, path: &'a str, _: u64) -> StoreFuture<'a, Option<Bytes>> {
        Box::pin(async move {
            self.answer().await?;
            Ok(self.objects.lock().get(path).cloned())
        })
    }

    fn write_object<'a>(&'a self, path: &'a str, bytes: Bytes) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.answer().await?;
            self.objects.lock().insert(path.to_owned(), bytes);
            Ok(())
        })
    }

    fn remove_object<'a>(&'a self, path: &'a str) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.answer().await?;
            self.objects.lock().remove(path);
            Ok(())
        })
    }
}

fn test_tier(change: impl FnOnce(&mut RemoteSettings)) -> (Arc<TestStore>, RemoteTier) {
    let store = Arc::<TestStore>::default();
    let mut settings = RemoteSettings::new(RemoteUrl::Folder("/".into()));
    (settings.timeout, settings.find_timeout) =
        (Duration::from_millis(40), Duration::from_millis(20));
    change(&mut settings);
    (Arc::clone(&store), RemoteTier::over_store(Box::new(store), settings))
}

#[tokio::test]
async fn whatever_is_wrong_with_an_object_is_a_counted_miss() {
    for secret in [None, Some(MacKey::from_secret(b"a secret of many bytes").unwrap())] {
        let has_secret = secret.is_some();
        let (store, tier) = test_tier(|settings| settings.mac = secret);
        assert_eq!(write_blocks(&tier, 3).await, 3);
        let objects = store.objects.lock().clone();
        let paths: Vec<_> = (0..3)
            .map(|position| {
                let digest = format!("{:032x}", name(position).digest);
                objects.keys().find(|path| path.ends_with(&digest)).unwrap().clone()
            })
            .collect();
        let mut flipped = objects[&paths[1]].to_vec();
        flipped[9000] ^= 1;
        let whole = &objects[&paths[1]];
        let foreign =
            draft(1).to_object(&ObjectName { scope: ScopeId([6; 16]), ..name(1) }, &key(1));
        let of_other_key = draft(1).to_object(&name(1), b"another key");
        let mut wrong = vec![
            ("a flipped bit", Bytes::from(flipped)),
            ("cut off", whole.slice(..whole.len() - 4096)),
            ("empty", Bytes::new()),
            ("longer", Bytes::from([&whole[..], &[0; 4096]].concat())),
            ("of another block", objects[&paths[2]].clone()),
            ("of another scope", Bytes::from(foreign.to_vec())),
            ("of another key", Bytes::from(of_other_key.to_vec())),
        ];
        if has_secret {
            let unsigned = draft(1).to_object(&name(1), &key(1));
            wrong.push(("without its hash", Bytes::from(unsigned.to_vec())));
        }
        for (count, (what, bytes)) in (1..).zip(wrong) {
            store.objects.lock().insert(paths[1].clone(), bytes);
            let read = tier.read_block(&name(1), soon()).await;
            assert_eq!(read.unwrap_err(), ReadFailure::Corrupt, "{what}");
            assert_eq!(tier.read_levels().corrupt, count, "{what}");
            assert_eq!(tier.find_blocks(&names(2)[1..], soon()).await, 0, "{what}");
        }
        // Written anew it is there again.
        assert_eq!(write_blocks(&tier, 2).await, 2);
        assert_eq!(tier.find_blocks(&names(2)[1..], soon()).await, 1);
        assert!(tier.read_block(&name(1), soon()).await.is_ok());
    }
}

#[tokio::test]
async fn a_store_that_hangs_costs_its_deadline_three_times_and_then_nothing() {
    let (store, tier) = test_tier(|settings| settings.miss_time = Duration::ZERO);
    assert_eq!(write_blocks(&tier, 2).await, 2);
    *store.mode.lock() = TestMode::Hangs;
    // A caller that leaves early says nothing about the store.
    for _ in 0..5 {
        let early = Instant::now() + Duration::from_millis(1);
        assert_eq!(tier.find_blocks(&names(2), early).await, 0);
    }
    assert_eq!(tier.read_levels().state, BreakerState::Closed);
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(tier.find_blocks(&names(2), soon()).await, 0);
        assert!(began.elapsed() >= Duration::from_millis(20));
    }
    let levels = tier.read_levels();
    assert_eq!(
        (levels.state, levels.requests[RemoteOp::Find as usize].timed_out),
        (BreakerState::Open, 8)
    );
    let asked = store.asked.load(Relaxed);
    for _ in 0..100 {
        assert_eq!(tier.find_blocks(&names(2), soon()).await, 0);
        let read = tier.read_block(&name(0), soon()).await;
        assert_eq!(read.unwrap_err(), ReadFailure::Unavailable);
    }
    assert_eq!(write_blocks(&tier, 2).await, 0);
    assert_eq!(store.asked.load(Relaxed), asked, "nothing is asked of it");
    assert_eq!(tier.read_levels().drops_failed, 1);
    *store.mode.lock() = TestMode::Answers;
    tokio::time::sleep(Duration::from_millis(1010)).await;
    assert_eq!(tier.find_blocks(&names(2), soon()).await, 2);
    assert_eq!(tier.read_levels().state, BreakerState::Closed);
}

#[tokio::test]
async fn what_does_not_fit_is_dropped_and_what_a_full_store_has_is_read() {
    let (store, tier) = test_tier(|settings| settings.queue_bytes = 60_000);
    assert_eq!(write_blocks(&tier, 1).await, 1);
    *store.mode.lock() = TestMode::Hangs;
    let object = tier.make_object(&draft(1), &name(1), &key(1));
    assert!(object.len() > 20_000 && object.len() < 30_000);
    let queue = || tier.queue_object(name(1), object.clone(), Box::new(|_| ()));
    assert!(queue().is_ok() && queue().is_ok());
    let refused = queue().unwrap_err().to_string();
    assert!(refused.contains("of 60000"), "{refused}");
    tier.close_tier(Duration::from_secs(5)).await;
    let levels = tier.read_levels();
    assert_eq!((levels.queued_bytes, levels.drops_queue, levels.drops_failed), (0, 1, 2));
    assert!(queue().is_err());

    let (store, tier) = test_tier(|_| ());
    assert_eq!(write_blocks(&tier, 1).await, 1);
    *store.mode.lock() = TestMode::Full;
    assert_eq!(write_blocks(&tier, 9).await, 0);
    *store.mode.lock() = TestMode::Answers;
    assert!(tier.read_block(&name(0), soon()).await.is_ok());
    *store.mode.lock() = TestMode::Fails;
    assert_eq!(write_blocks(&tier, 9).await, 0);
    assert_eq!(tier.read_levels().state, BreakerState::Open);
}

/// A Redis of this test, on a socket of loopback, ended with it.
struct RedisServer {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl RedisServer {
    /// None where none is installed, which is said aloud.
    fn start(flags: &[&str]) -> Option<Self> {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        Self::start_at(port, flags)
    }

    fn start_at(port: u16, flags: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command
            .arg("--dir")
            .arg(folder.path())
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => {
                let server = Self { child, port, _folder: folder };
                let until = Instant::now() + Duration::from_secs(10);
                while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
                    assert!(Instant::now() < until, "redis-server does not listen");
                    std::thread::sleep(Duration::from_millis(10));
                }
                Some(server)
            }
            Err(error) => {
                assert!(std::env::var_os("KVD_REQUIRE_REMOTE").is_none(), "redis-server: {error}");
                println!("SKIP redis: redis-server is not installed ({error})");
                None
            }
        }
    }

    fn settings(&self) -> RemoteSettings {
        RemoteSettings::new(RemoteUrl::Redis(format!("redis://127.0.0.1:{}", self.port)))
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[tokio::test]
async fn a_redis_is_a_store() {
    let Some(server) = RedisServer::start(&[]) else { return };
    check_store(server.settings()).await;
    let settings =
        RemoteSettings { ttl: Duration::from_secs(1), prefix: "t".to_owned(), ..server.settings() };
    let tier = RemoteTier::open_store(settings).unwrap();
    assert_eq!(write_blocks(&tier, 1).await, 1);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(tier.read_block(&name(0), soon()).await.unwrap_err(), ReadFailure::Missing);
}

#[tokio::test]
async fn a_redis_that_is_full_guarded_or_gone_is_told_apart_and_found_again() {
    let Some(server) = RedisServer::start(&["--maxmemory", "1", "--requirepass", "word"]) else {
        return;
    };
    let quick = RemoteSettings { find_timeout: Duration::from_secs(5), ..server.settings() };
    let stranger = RemoteTier::open_store(quick.clone()).unwrap();
    assert_eq!(stranger.find_blocks(&names(1), soon()).await, 0);
    assert_eq!(stranger.read_levels().requests[RemoteOp::Find as usize].denied, 1);
    let settings = RemoteSettings { password: Some("word".to_owned()), ..quick };
    let tier = RemoteTier::open_store(settings).unwrap();
    assert_eq!(write_blocks(&tier, 1).await, 0);
    assert_eq!(tier.read_levels().requests[RemoteOp::Write as usize].full, 1);
    let port = server.port;
    drop(server);
    let began = Instant::now();
    for _ in 0..5 {
        assert_eq!(tier.find_blocks(&names(1), soon()).await, 0);
    }
    assert_eq!(tier.read_levels().state, BreakerState::Open);
    assert!(began.elapsed() < Duration::from_secs(2));
    let _again = RedisServer::start_at(port, &["--requirepass", "word"]);
    tokio::time::sleep(Duration::from_millis(1010)).await;
    assert_eq!(write_blocks(&tier, 1).await, 1);
    assert!(tier.read_block(&name(0), soon()).await.is_ok());
}

/// A real S3 server, where `KVD_TEST_WEED` names SeaweedFS's program; its keys are those of the
/// environment, which a client of S3 takes them from.
#[cfg(feature = "s3")]
#[tokio::test]
async fn an_s3_server_is_a_store() {
    let (Some(weed), Ok(id), Ok(secret)) = (
        std::env::var_os("KVD_TEST_WEED"),
        std::env::var("AWS_ACCESS_KEY_ID"),
        std::env::var("AWS_SECRET_ACCESS_KEY"),
    ) else {
        println!("SKIP s3: KVD_TEST_WEED, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY name none");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.json");
    let credentials = format!("{{\"accessKey\": \"{id}\", \"secretKey\": \"{secret}\"}}");
    let identity = format!(
        "{{\"name\": \"kvd\", \"credentials\": [{credentials}], \"actions\": [\"Admin\"]}}"
    );
    std::fs::write(&keys, format!("{{\"identities\": [{identity}]}}")).unwrap();
    // Each of its ports has another 10,000 above.
    let base = 20_000 + std::process::id() as u16 % 2000 * 4;
    let mut command = Command::new(weed);
    command.args(["server", "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-filer", "-s3"]);
    for (index, flag) in (0..).zip(["-master.port", "-volume.port", "-filer.port", "-s3.port"]) {
        command.arg(flag).arg((base + index).to_string());
    }
    command.arg("-dir").arg(folder.path()).arg("-s3.config").arg(&keys);
    command.args(["-master.volumeSizeLimitMB", "64"]).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Server(command.spawn().unwrap());
    let settings = RemoteSettings {
        endpoint: format!("http://127.0.0.1:{}", base + 3),
        region: "us-east-1".to_owned(),
        timeout: Duration::from_secs(10),
        find_timeout: Duration::from_secs(10),
        ..RemoteSettings::new(RemoteUrl::S3 { bucket: "kvd".to_owned() })
    };
    // Written once it listens; a bucket comes to be with its first object's folder.
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let tier = RemoteTier::open_store(settings.clone()).unwrap();
        make_bucket(base + 2).await;
        if write_blocks(&tier, 1).await == 1 {
            assert_eq!(tier.remove_blocks(&names(1)).await, 1);
            break;
        }
        assert!(Instant::now() < until, "the server does not answer: {:?}", tier.read_levels());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    check_store(settings).await;
}

/// Makes the bucket by its folder in the filer, which needs no signature.
#[cfg(feature = "s3")]
async fn make_bucket(port: u16) {
    let request = reqwest::Client::new().post(format!("http://127.0.0.1:{port}/buckets/kvd/"));
    // Until it listens there is nothing to be made.
    let _answer = request.send().await;
}

#[cfg(feature = "s3")]
struct Server(Child);

#[cfg(feature = "s3")]
impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}
