//! Clients that hold sessions and die, with the real binary and a real process that is killed.

use super::doors::page;
use super::process::{Process, kvd, output};
use super::{batch, chunk, model};
use kvd_client::{
    Client, ErrorCode, HeldSession, SequenceFilter, SequenceId, SessionId, SessionOptions,
};
use kvd_proto::v1;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Names the daemon to the process that is killed.
const ENDPOINT: &str = "SERVE_TEST_ENDPOINT";
/// Far more than an end takes on a busy machine, far less than keepalive needs to notice one.
const SOON: Duration = Duration::from_secs(5);

/// The value of a series.
fn gauge(daemon: &Process, series: &str) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {page}")).trim().parse().expect("a number")
}

/// Series that are 0 when nothing is left of a client.
const HELD: [&str; 4] = [
    "kvd_sessions",
    "kvd_open_streams{rpc=\"HoldSession\"}",
    "kvd_sequences{namespace=\"default\",model=\"model\",codec=\"raw\"}",
    "kvd_pool_used_bytes{device=\"0\",tier=\"host\"}",
];

/// Waits until nothing is left.
fn assert_all_given_back(daemon: &Process) {
    let began = Instant::now();
    for series in HELD {
        while gauge(daemon, series) != 0.0 {
            assert!(began.elapsed() < SOON, "{series} is {}", gauge(daemon, series));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Opens sequences in a session and stores in each.
async fn fill_session(client: &Client, session: &HeldSession) -> Vec<SequenceId> {
    let model = model(client).await;
    let mut sequences = Vec::new();
    for _ in 0..3 {
        let sequence = session.open_sequence(model).await.expect("open");
        client.store_chunk(chunk(sequence, 0, 100)).await.expect("store");
        sequences.push(sequence);
    }
    sequences
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the process that a_client_that_is_killed_leaves_nothing starts and kills"]
async fn holds_a_session_until_it_is_killed() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let client = Client::connect(endpoint.parse().unwrap()).await.unwrap();
    let session = client.hold_session(SessionOptions::new("doomed")).await.unwrap();
    fill_session(&client, &session).await;
    println!("holds");
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_killed_leaves_nothing() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let mut doomed = Command::new(std::env::current_exe().unwrap())
        .args(["sessions::holds_a_session_until_it_is_killed", "--exact", "--ignored"])
        .arg("--nocapture")
        .env(ENDPOINT, format!("http://{}", daemon.tcp()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(doomed.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("holds")), "it never held a session");
    assert_eq!(HELD.map(|series| gauge(&daemon, series) > 0.0), [true; 4]);
    let listed = client.list_sessions().await.unwrap();
    assert_eq!((listed.len(), &listed[0].name[..], listed[0].sequences), (1, "doomed", 3));
    assert!(listed[0].peer.starts_with("127.0.0.1:"), "{listed:?}");
    assert_eq!((listed[0].holders, listed[0].ends_in_ms), (1, None));

    doomed.kill().unwrap();
    assert_all_given_back(&daemon);
    doomed.wait().unwrap();
    let expired = "kvd_session_ends_total{reason=\"expired\"}";
    assert_eq!(gauge(&daemon, expired), 1.0);
    assert_eq!(gauge(&daemon, "kvd_session_sequences_closed_total"), 3.0);
    // Its model can be unregistered by whoever comes next.
    client.unregister_model(model(&client).await).await.unwrap();
    daemon.signal("TERM");
    let ended = daemon.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("a session ended"), "{}", ended.log);
}

/// A stream that holds a session, on a connection of its own.
async fn hold_raw(
    daemon: &Process,
    request: v1::HoldSessionRequest,
) -> (tonic::Streaming<v1::HoldSessionResponse>, v1::HoldSessionResponse) {
    let channel = tonic::transport::Endpoint::try_from(format!("http://{}", daemon.tcp()))
        .expect("an endpoint")
        .connect()
        .await
        .expect("connect");
    let mut rpc = v1::kvd_client::KvdClient::new(channel);
    let mut stream = rpc.hold_session(request).await.expect("hold").into_inner();
    let answer = stream.message().await.expect("an answer").expect("one");
    (stream, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_held_again_in_time_keeps_its_sequences() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let model = model(&client).await;
    let ttl_ms = 60_000;
    let new = v1::HoldSessionRequest { name: "engine".to_owned(), ttl_ms, ..Default::default() };
    let (stream, answer) = hold_raw(&daemon, new).await;
    let v1::HoldSessionResponse { session_id, .. } = answer;
    assert_eq!(answer.ttl_ms, ttl_ms);
    let sequence = client.open_sequence_in(model, SessionId(session_id)).await.unwrap();
    client.store_chunk(chunk(sequence, 0, 100)).await.unwrap();
    // The connection goes with its last stream.
    drop(stream);
    let began = Instant::now();
    while client.list_sessions().await.unwrap()[0].ends_in_ms.is_none() {
        assert!(began.elapsed() < SOON, "the stream is still seen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Again for no time at all: it ends with this stream.
    let again = v1::HoldSessionRequest { session_id, ..Default::default() };
    let (stream, answer) = hold_raw(&daemon, again).await;
    assert_eq!((answer.session_id, answer.ttl_ms), (session_id, 0));
    let attended = client.attend_batch(batch(model, sequence)).await.unwrap();
    assert_eq!(attended.out[..], 1f32.to_le_bytes().repeat(64));
    assert_eq!(client.list_sessions().await.unwrap()[0].ends_in_ms, None);
    drop(stream);
    assert_all_given_back(&daemon);
    let error = client.open_sequence_in(model, SessionId(session_id)).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::UnknownSession), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_session_is_closed_when_it_is_dropped_and_told_when_another_takes_over() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let options = SessionOptions::new("engine").with_ttl(Duration::from_secs(3600));
    let first = client.hold_session(options.clone()).await.unwrap();
    // As long as the daemon lets anybody have it.
    assert_eq!(first.granted_ttl(), Duration::from_secs(300));
    fill_session(&client, &first).await;
    let refused = client.hold_session(options.clone()).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::InvalidArgument));
    assert!(refused.message.contains("held by 127.0.0.1:"), "{refused}");

    let second = client.hold_session(options.with_take_over()).await.unwrap();
    let end = first.wait_for_end().await;
    assert_eq!(end.code, Some(ErrorCode::UnknownSession), "{end}");
    assert!(end.message.contains("newer session"), "{end}");
    let model = model(&client).await;
    assert_eq!(first.open_sequence(model).await.unwrap_err(), end);
    // All of the first one's were closed before the second was answered.
    let all = SequenceFilter::default();
    assert_eq!(client.list_sequences(all).await.unwrap().sequences, []);

    fill_session(&client, &second).await;
    assert_eq!(client.list_sequences(all).await.unwrap().sequences.len(), 3);
    // Not left to its time to live.
    drop(second);
    assert_all_given_back(&daemon);
    let third = client.hold_session(SessionOptions::new("engine")).await.unwrap();
    fill_session(&client, &third).await;
    assert_eq!(third.close_session().await.unwrap(), 3);
    assert_all_given_back(&daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_is_told_by_a_session_and_a_drain_ends_its_stream() {
    let first = Process::start(&[]);
    let tcp = format!("server.listen_tcp={}", first.tcp());
    let client = first.client().await;
    let old = client.server_info().await.unwrap().boot_id;
    let model = model(&client).await;
    let lasting = SessionOptions::new("lasting").with_ttl(Duration::from_secs(60));
    let (lasting, brief) = (
        client.hold_session(lasting).await.unwrap(),
        client.hold_session(SessionOptions::new("brief")).await.unwrap(),
    );
    let (mut raw, _) =
        hold_raw(&first, v1::HoldSessionRequest { name: "raw".to_owned(), ..Default::default() })
            .await;
    first.signal("TERM");
    let status = raw.message().await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::ShuttingDown), "{status}");
    let ended = first.wait();
    assert!(ended.log.contains("\"drained\":\"Clean\""), "{}", ended.log);

    let second = Process::start(&["--set", &tcp]);
    // One is held again until it is told; the other had no time to be.
    for session in [lasting, brief] {
        let end = session.wait_for_end().await;
        assert_eq!(end.code, Some(ErrorCode::UnknownSession), "{end}");
        let error = session.open_sequence(model).await.unwrap_err();
        let restarted = error.restarted.clone().unwrap_or_else(|| panic!("{error}"));
        assert!(old.starts_with(&restarted.old) && restarted.old.len() >= 8, "{error}");
        assert!(!error.is_retryable());
    }
    drop(second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_list_and_close_what_is_left_over() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let endpoint = format!("http://{}", daemon.tcp());
    let session = client.hold_session(SessionOptions::new("engine")).await.unwrap();
    let owned = fill_session(&client, &session).await;
    let orphan = client.open_sequence(model(&client).await).await.unwrap();
    let run = |arguments: &[&str]| {
        let mut command = kvd();
        command.args(arguments).args(["--endpoint", &endpoint]);
        output(command)
    };
    let printed = |arguments: &[&str]| {
        let output = run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let list = printed(&["sequences", "list"]);
    assert!(list.contains("4 sequences in all"), "{list}");
    for sequence in owned.iter().chain([&orphan]) {
        assert!(list.contains(&sequence.to_string()), "{list}");
    }
    let of_session = printed(&["sequences", "list", "--session", "engine", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&of_session).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 3, "{rows}");
    assert_eq!((&rows[0]["model"], &rows[0]["tokens"]), (&"model".into(), &100.into()));
    assert_eq!(rows[0]["session"], session.session_id().to_string());
    let sessions = printed(&["sessions", "list"]);
    assert!(sessions.contains("engine") && sessions.contains("held"), "{sessions}");
    assert!(printed(&["sequences", "list", "--idle", "1h"]).contains("no sequences"));
    assert_eq!(printed(&["sequences", "close", "--idle", "1h"]), "closed 0 sequences\n");
    let elsewhere = printed(&["sequences", "list", "--model", "model"]);
    assert!(elsewhere.contains("4 sequences in all"), "{elsewhere}");

    // Exactly one way to say which.
    for arguments in [&["sequences", "close"][..], &["sequences", "close", "7", "--idle", "1h"]] {
        assert_eq!(run(arguments).status.code(), Some(64), "{arguments:?}");
    }
    let id = orphan.to_string();
    let both = run(&["sequences", "close", &id, "7"]);
    let said = String::from_utf8_lossy(&both.stderr);
    assert!(
        !both.status.success() && said.contains("closed 1 sequence; UNKNOWN_SEQUENCE"),
        "{said}"
    );
    assert_eq!(printed(&["sequences", "close", "--session", "engine"]), "closed 3 sequences\n");
    assert_eq!(printed(&["sequences", "list"]), "no sequences\n");
    let closed = printed(&["sessions", "close", "engine"]);
    assert!(
        closed.starts_with("closed session") && closed.ends_with(", sequences: 0\n"),
        "{closed}"
    );
    assert_eq!(session.wait_for_end().await.code, Some(ErrorCode::UnknownSession));
    assert_eq!(printed(&["sessions", "list"]), "no sessions\n");
}
