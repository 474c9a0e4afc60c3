//! Quotas of namespaces as operators set them: they hold, they last, and a flood stays its own.

use super::doors::page;
use super::process::{Process, kvd, refused, run_at};
use super::{batch, chunk, model};
use kvd_client::{Client, ErrorCode, Namespace};
use std::path::Path;
use std::time::{Duration, Instant};

/// A daemon that keeps quotas in a file of a folder.
fn start(folder: &Path) -> Process {
    let file = format!("namespaces.quota_file={}", folder.join("quotas.json").display());
    let quotas = "namespaces.quotas=[\"b: sequences=7\", \"c: models=0\"]";
    let allowed = "namespaces.allowed=[\"a\", \"b\", \"c\"]";
    let weights = "namespaces.weights=[\"b=5\"]";
    let one = "device.threads=1";
    let settings = [&file, quotas, allowed, weights, one].map(|setting| ["--set", setting]);
    Process::start(settings.as_flattened())
}

async fn client_of(daemon: &Process, namespace: &str) -> Client {
    daemon.client().await.with_namespace(&Namespace::new(namespace).expect("a set-up"))
}

fn list(daemon: &Process) -> serde_json::Value {
    let (code, text) = run_at(&endpoint(daemon), &["namespaces", "list", "--json"]);
    assert_eq!(code, Some(0), "{text}");
    serde_json::from_str(&text).expect("a set-up")
}

fn endpoint(daemon: &Process) -> String {
    format!("http://{}", daemon.tcp())
}

fn set(daemon: &Process, arguments: &[&str]) {
    let arguments = [&["namespaces", "set"], arguments].concat();
    let (code, text) = run_at(&endpoint(daemon), &arguments);
    assert_eq!(code, Some(0), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_survive_kill_9_and_a_damaged_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path());
    set(&first, &["a", "--sequences", "1", "--pool-bytes", "1.5MiB"]);
    set(&first, &["b", "--sequences", "none", "--sessions", "3"]);
    set(&first, &["c", "--models", "5"]);
    set(&first, &["c", "--reset"]);
    set(&first, &["a", "--weight", "3"]);
    let zero = run_at(&endpoint(&first), &["namespaces", "set", "a", "--weight", "0"]);
    assert!(zero.0 == Some(64) && zero.1.contains("1..=1000"), "{zero:?}");
    let before = list(&first);
    first.signal("KILL");
    assert_eq!(first.wait().code, None);

    let second = start(folder.path());
    assert_eq!(list(&second), before);
    let allowed = |row: usize, quota: &str| before[row]["quotas"][quota]["allowed"].clone();
    assert_eq!(allowed(0, "pool_bytes"), 3 << 19);
    assert_eq!((allowed(1, "sequences"), allowed(1, "sessions")), (None::<u64>.into(), 3.into()));
    assert_eq!(allowed(2, "models"), 0);
    let weights: Vec<_> = (0..3).map(|row| before[row]["weight"].clone()).collect();
    assert_eq!(weights, [3, 5, 1], "of an operator, of the configuration, of nobody");
    let a = client_of(&second, "a").await;
    let of_a = model(&a).await;
    a.open_sequence(of_a).await.unwrap();
    let error = a.open_sequence(of_a).await.unwrap_err();
    assert_eq!(
        (error.code, error.is_retryable()),
        (Some(ErrorCode::QuotaExceeded), true),
        "{error}"
    );
    assert!(error.message.contains("has 1 of the 1 that its quota sequences allows"), "{error}");
    set(&second, &["a", "--sequences", "2"]);
    a.open_sequence(of_a).await.unwrap();
    second.signal("KILL");
    second.wait();

    let path = folder.path().join("quotas.json");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let mut third = kvd();
    third.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--pool", "64 MiB"]);
    third.args(["--set", &format!("namespaces.quota_file={}", path.display())]);
    let (code, text) = refused(third);
    assert!(code == Some(64) && text.contains("move it away"), "{code:?} {text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_is_refused_with_what_it_has_and_the_victim_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path());
    set(&daemon, &["a", "--pool-bytes", "8MiB", "--inflight-bytes", "16MiB", "--queue-jobs", "2"]);
    let victim = client_of(&daemon, "b").await;
    let of_victim = model(&victim).await;
    let sequence = victim.open_sequence(of_victim).await.unwrap();
    victim.store_chunk(chunk(sequence, 0, 64)).await.unwrap();
    let end = Instant::now() + Duration::from_millis(600);
    let mut floods = Vec::new();
    for _ in 0..4 {
        let flooder = client_of(&daemon, "a").await;
        floods.push(tokio::spawn(async move {
            let of_flooder = model(&flooder).await;
            let mut refusals = Vec::new();
            while Instant::now() < end {
                let sequence = match flooder.open_sequence(of_flooder).await {
                    Ok(sequence) => sequence,
                    Err(error) => panic!("{error}"),
                };
                refusals.extend(flooder.store_chunk(chunk(sequence, 0, 1024)).await.err());
            }
            refusals
        }));
    }
    let mut answered = 0;
    while Instant::now() < end {
        // Its own pages are there, and there is room for more.
        victim.attend_batch(batch(of_victim, sequence)).await.unwrap();
        let more = victim.open_sequence(of_victim).await.unwrap();
        victim.store_chunk(chunk(more, 0, 64)).await.unwrap();
        victim.close_sequence(more).await.unwrap();
        answered += 1;
    }
    let mut refused = 0;
    for flood in floods {
        for error in flood.await.unwrap() {
            assert_eq!(error.code, Some(ErrorCode::QuotaExceeded), "{error}");
            assert!(error.message.contains("namespace a has "), "{error}");
            assert!(error.retry_after.is_some(), "{error}");
            refused += 1;
        }
    }
    assert!(answered > 5 && refused > 5, "{answered} answered, {refused} refused");
    let rows = list(&daemon);
    let pool = &rows[0]["quotas"]["pool_bytes"];
    let used = pool["used"].as_u64().unwrap();
    assert!(used > 7 << 20 && used <= 8 << 20, "{pool}");
    assert!(pool["refused"].as_u64() > Some(0), "{pool}");
}

/// Attends of a namespace that the device has ended.
async fn attends_of(daemon: &Process, namespace: &str) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let of = [format!("namespace=\"{namespace}\""), "work=\"attend\"".to_owned()];
    let is_asked = |line: &&str| {
        line.starts_with("kvd_model_device_jobs_total{")
            && of.iter().all(|part| line.contains(part))
    };
    let line = page.lines().find(is_asked).expect("a series");
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Keeps the device busy with attends of one sequence until it is aborted.
async fn flood(daemon: &Process, namespace: &str) -> tokio::task::JoinHandle<()> {
    let client = client_of(daemon, namespace).await;
    let model = model(&client).await;
    let sequence = client.open_sequence(model).await.expect("open");
    client.store_chunk(chunk(sequence, 0, 4096)).await.expect("store");
    let mut asked = batch(model, sequence);
    asked.queries = vec![kvd_client::AttendQuery::new(sequence, 64)];
    asked.q = vec![0u8; 64 * 64 * 4].into();
    tokio::spawn(async move {
        loop {
            client.attend_batch(asked.clone()).await.expect("attend");
        }
    })
}

/// How often the device served `a` for each time that it served `b`, while both wanted all of it.
async fn share_of_first(daemon: &Process) -> f64 {
    let before = [attends_of(daemon, "a").await, attends_of(daemon, "b").await];
    let [mut a, mut b] = [0.0; 2];
    while a + b < 200.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        a = attends_of(daemon, "a").await - before[0];
        b = attends_of(daemon, "b").await - before[1];
    }
    a / b
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_an_operator_sets_share_the_device_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path());
    let mut floods = Vec::new();
    for connection in 0..8 {
        floods.push(flood(&daemon, ["a", "b"][connection % 2]).await);
    }
    // Jobs are alike, so they count what the device gave each.
    for (weights, share) in [([3, 1], 3.0), ([1, 1], 1.0), ([1, 3], 1.0 / 3.0)] {
        for (name, weight) in ["a", "b"].into_iter().zip(weights) {
            set(&daemon, &[name, "--weight", &weight.to_string()]);
        }
        let served = share_of_first(&daemon).await;
        assert!((served / share).ln().abs() < 0.25, "{served} at weights {weights:?}");
    }
    let page = page(daemon.admin(), "/metrics");
    assert!(page.contains("\nkvd_namespace_weight{namespace=\"b\"} 3\n"), "{page}");
    for flood in floods {
        flood.abort();
    }
}
