//! Connections: how many, how long they may be silent, and what is counted of calls given up.

mod support;

use kvd::RunningDaemon;
use kvd_core::ErrorCode;
use kvd_proto::v1::{self, kvd_client::KvdClient};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use support::{closes, rpc, start};
use tonic::Request;
use tonic::transport::Endpoint;

fn connect(running: &RunningDaemon) -> TcpStream {
    TcpStream::connect(running.bound_addresses().tcp.expect("a TCP listener")).expect("connect")
}

/// The preface and empty settings, which is all a client must send first.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_never_speak_are_given_up() {
    let running = start(&[("server.keepalive_timeout_ms", "200")]).await;
    let silent = connect(&running);
    let mut stuttering = connect(&running);
    stuttering.write_all(&HELLO[..10]).unwrap();
    assert!(closes(silent).await);
    assert!(closes(stuttering).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_died_are_given_up_and_living_ones_kept() {
    let flags = [("server.keepalive_interval_ms", "100"), ("server.keepalive_timeout_ms", "2000")];
    let running = start(&flags).await;
    let mut alive = rpc(&running).await;
    let mut dead = connect(&running);
    dead.write_all(HELLO).unwrap();
    // It reads, but never answers a ping.
    assert!(closes(dead).await);
    alive.get_server_info(v1::GetServerInfoRequest {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_told_how_many_streams_a_connection_takes() {
    let running = start(&[("server.streams_per_connection_max", "77")]).await;
    let mut socket = connect(&running);
    socket.write_all(HELLO).unwrap();
    let mut settings = [0u8; 9];
    socket.read_exact(&mut settings).unwrap();
    assert_eq!(settings[3], 4, "the first frame holds the settings");
    let mut entries = vec![0u8; usize::from(settings[2])];
    socket.read_exact(&mut entries).unwrap();
    // SETTINGS_MAX_CONCURRENT_STREAMS is 3.
    assert!(entries.chunks(6).any(|entry| entry == [0, 3, 0, 0, 0, 77]), "{entries:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_limit_are_closed_until_one_ends() {
    let running = start(&[("server.connections_max", "2")]).await;
    let [mut first, second] = [rpc(&running).await, rpc(&running).await];
    first.get_server_info(v1::GetServerInfoRequest {}).await.unwrap();
    assert!(closes(connect(&running)).await);
    first.get_server_info(v1::GetServerInfoRequest {}).await.unwrap();
    drop(second);
    // The daemon learns a little later that the second one left.
    let address = format!("http://{}", running.bound_addresses().tcp.unwrap());
    let mut patience = 1000;
    loop {
        let third = Endpoint::try_from(address.clone()).unwrap().connect().await;
        if let Ok(third) = third
            && KvdClient::new(third).get_server_info(v1::GetServerInfoRequest {}).await.is_ok()
        {
            break;
        }
        patience -= 1;
        assert!(patience > 0, "the place of an ended connection is never given out");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn counted(running: &RunningDaemon, rpc: &str, code: &str) -> bool {
    let line = format!("kvd_requests_total{{rpc=\"{rpc}\",code=\"{code}\"}} 1\n");
    running.service().metrics().render_page().contains(&line)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_given_up_while_they_wait_are_counted() {
    let running = start(&[]).await;
    let mut client = rpc(&running).await;
    let model_id = client.register_model(support::spec()).await.unwrap().into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    let sequence_id = client.open_sequence(open).await.unwrap().into_inner().sequence_id;
    let attend = support::attend_nothing(model_id, sequence_id);
    let gate = support::occupy(&running).await;
    let mut timed = Request::new(attend.clone());
    timed.set_timeout(Duration::from_millis(200));
    client.attend(timed).await.unwrap_err();
    support::until(|| counted(&running, "Attend", "DEADLINE_EXCEEDED")).await;
    let mut leaving = client.clone();
    let call = tokio::spawn(async move { leaving.attend(attend).await });
    support::until(|| running.service().first_worker().queued_jobs() == 1).await;
    call.abort();
    support::until(|| counted(&running, "Attend", "CANCELLED")).await;
    drop(gate);
}

#[tokio::test]
async fn calls_of_malformed_namespaces_are_counted() {
    let running = start(&[]).await;
    let mut client = rpc(&running).await;
    let bad = kvd_proto::NAMESPACE_KEY;
    let mut unary = Request::new(v1::GetServerInfoRequest {});
    unary.metadata_mut().insert(bad, "a b".parse().unwrap());
    client.get_server_info(unary).await.unwrap_err();
    let mut stream = Request::new(tokio_stream::empty());
    stream.metadata_mut().insert(bad, "a b".parse().unwrap());
    client.store_blocks(stream).await.unwrap_err();
    for rpc in ["GetServerInfo", "StoreBlocks"] {
        assert!(counted(&running, rpc, "INVALID_ARGUMENT"), "{rpc}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_region_keeps_a_worker_out_for_its_handshake_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    // Keepalive has nothing to do with it.
    let flags = [
        ("server.listen_region", path.to_str().unwrap()),
        ("limits.regions_max", "1"),
        ("server.keepalive_timeout_ms", "60000"),
    ];
    let _running = start(&flags).await;
    let _silent = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let open =
        move || kvd_client::RegionClient::open_region(&path, &kvd_client::RegionOptions::default());
    let began = Instant::now();
    let refused = tokio::task::spawn_blocking({
        let open = open.clone();
        move || open().err()
    });
    let refused = refused.await.unwrap().expect("the one place is taken");
    assert_eq!(refused.code, Some(ErrorCode::LimitExceeded), "{refused}");
    let opened = tokio::task::spawn_blocking(move || {
        while open().is_err() {
            assert!(began.elapsed() < Duration::from_secs(20), "it is never given up");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    opened.await.unwrap();
}
