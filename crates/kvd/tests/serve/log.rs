//! Lines of the log: fields of their own types, who was refused, who holds a full pool.

use super::process::{Process, kvd, refused};
use super::{chunk, model};
use kvd_client::ErrorCode;
use serde_json::Value;

fn lines(log: &str) -> Vec<Value> {
    log.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The field of a line.
fn field<'a>(line: &'a Value, name: &str) -> &'a Value {
    &line["fields"][name]
}

fn with_message<'a>(lines: &'a [Value], message: &str) -> Vec<&'a Value> {
    let says = |line: &&Value| field(line, "message").as_str().unwrap_or("").contains(message);
    lines.iter().filter(says).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_is_told_once_with_who_holds_it_and_refusals_say_whose_they_are() {
    let daemon =
        Process::start(&["--set", "device.pool_bytes=1 MiB", "--set", "log.filter=info,kvd=debug"]);
    let client = daemon.client().await;
    let model = model(&client).await;
    let mut last = client.open_sequence(model).await.expect("open");
    let mut refusals = 0;
    // 2048 tokens of 512 bytes fill the pool.
    for _ in 0..8 {
        last = client.open_sequence(model).await.expect("open");
        if let Err(error) = client.store_chunk(chunk(last, 0, 512)).await {
            assert_eq!(error.code, Some(ErrorCode::PoolFull), "{error}");
            refusals += 1;
        }
    }
    assert!(refusals >= 3, "{refusals}");
    daemon.signal("TERM");
    let ended = daemon.wait();
    assert_eq!(ended.code, Some(0));
    assert!(!ended.log.contains("Some("), "{}", ended.log);
    let lines = lines(&ended.log);
    let [full] = with_message(&lines, "the pool is full")[..] else { panic!("{}", ended.log) };
    assert_eq!(full["level"], "WARN");
    assert_eq!(field(full, "refused"), 1);
    assert_eq!(field(full, "capacity_bytes"), 1 << 20);
    let holders = field(full, "holders").as_str().expect("a text");
    assert!(holders.starts_with("model of default: ") && holders.contains("sequences, "), "{full}");
    let told = with_message(&lines, "request refused");
    assert_eq!(told.len(), refusals, "{}", ended.log);
    let line = told.last().expect("refusals");
    assert_eq!(
        (field(line, "rpc"), field(line, "code")),
        (&"StoreBlocks".into(), &"POOL_FULL".into())
    );
    let spans = line["spans"].as_array().expect("spans");
    let span = |name: &str| {
        let found = spans.iter().find_map(|span| span.get(name));
        found.unwrap_or_else(|| panic!("no {name}: {line}"))
    };
    assert!(span("peer").as_str().expect("a text").starts_with("127.0.0.1:"), "{line}");
    assert_eq!(span("namespace"), "default");
    assert_eq!(span("model").as_u64(), Some(model.0));
    assert_eq!(span("sequence").as_u64(), Some(last.0));
}

#[test]
fn a_level_that_is_none_is_refused_and_frames_are_no_part_of_debug() {
    for filter in ["verbose", "info,wran", "kvd", ""] {
        let mut command = kvd();
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", ""]);
        command.args(["--set", &format!("log.filter={filter}")]);
        let (code, said) = refused(command);
        assert_eq!(code, Some(64), "{filter}: {said}");
        assert!(said.contains("log.filter"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debug_has_no_frames_and_the_first_line_names_every_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (unix, region) = (path("grpc"), path("region"));
    let region_setting = format!("server.listen_region={region}");
    let flags = ["--set", "log.filter=debug", "--unix", &unix, "--set", &region_setting];
    let daemon = Process::start(&flags);
    let serves: Value = serde_json::from_str(daemon.serves()).expect("JSON");
    assert_eq!(field(&serves, "unix"), &Value::from(unix));
    assert_eq!(field(&serves, "region"), &Value::from(region));
    assert!(field(&serves, "pool_bytes").is_u64() && field(&serves, "commit").is_string());
    for listener in ["tcp", "admin"] {
        let address: std::net::SocketAddr =
            field(&serves, listener).as_str().expect("a text").parse().expect("an address");
        assert!(address.ip().is_loopback());
    }
    let client = daemon.client().await;
    super::assert_serves(&client).await;
    daemon.signal("TERM");
    let log = daemon.wait().log;
    let frames = lines(&log)
        .iter()
        .filter(|line| line["target"].as_str().unwrap_or("").starts_with("h2"))
        .count();
    assert_eq!(frames, 0, "{log}");
}
