//! The daemon as an operator has it: the real binary, its exit codes, its sockets, its signals.

mod attacks;
mod audit;
mod cache;
mod chaos;
mod commands;
mod disk;
mod doors;
mod drains;
mod layers;
mod log;
mod notify;
mod process;
mod quotas;
mod remote;
mod restart;
mod sessions;
mod tables;
mod traces;
mod transfer;
mod watch;

use kvd_client::{
    AttendBatch, AttendQuery, Client, DType, ErrorCode, Geometry, LayerIndex, LoadRange, ModelId,
    ModelSpec, RopePairing, SequenceId, StoreChunk,
};
use kvd_proto::v1;
use process::{Process, kvd, output, refused};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// One layer, one head of 64 channels, f32: 512 bytes per token.
fn tiny_geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 64,
        head_dim_v: 64,
        block_tokens: 64,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    }
}

async fn model(client: &Client) -> ModelId {
    let geometry = tiny_geometry();
    let (name, codec) = ("model".to_owned(), "raw".to_owned());
    let spec = ModelSpec { name, geometry, codec, calibration: Default::default() };
    client.register_model(spec).await.expect("register").model
}

/// Tokens whose keys are all the same and whose values are all 1.
fn chunk(sequence: SequenceId, start: u32, tokens: u32) -> StoreChunk {
    let ones: Vec<u8> = 1f32.to_le_bytes().repeat(64 * tokens as usize);
    let (k, v) = (ones.clone().into(), ones.into());
    StoreChunk { sequence, layer: LayerIndex(0), start, tokens, k, v }
}

/// One query token; its answer is 1 in every channel.
fn batch(model: ModelId, sequence: SequenceId) -> AttendBatch {
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: vec![0u8; 64 * 4].into(),
        per_query_errors: false,
    }
}

/// Stores 100 tokens and asks for them.
async fn assert_serves(client: &Client) -> (ModelId, SequenceId) {
    let model = model(client).await;
    let sequence = client.open_sequence(model).await.expect("open");
    client.store_chunk(chunk(sequence, 0, 100)).await.expect("store");
    let attended = client.attend_batch(batch(model, sequence)).await.expect("attend");
    assert_eq!(attended.out[..], 1f32.to_le_bytes().repeat(64));
    assert!((attended.lse[0] - 100f32.ln()).abs() < 1e-5);
    (model, sequence)
}

#[test]
fn a_bad_configuration_exits_64_and_names_the_key_before_any_port_is_bound() {
    // The port is taken: a daemon that tried it first would end with 69.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvd.toml");
    std::fs::write(&file, "[device]\nqueue_jobs_maximum = 5\n").unwrap();
    let file = file.display().to_string();
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case<'_>; 9] = [
        (&["--set", "device.pool_bytes=lots"], &[], "device.pool_bytes"),
        (&["--pool", "5 B"], &[], "device.pool_bytes"),
        (&["--set", "log.filter=[["], &[], "log.filter"),
        (&["--set", "limits.models_max=0"], &[], "limits.models_max"),
        (&["--admin", "here"], &[], "admin.listen"),
        (&["--config", &file], &[], "device"),
        (&["--config", "/nowhere/kvd.toml"], &[], "/nowhere/kvd.toml"),
        (&[], &[("KVD_DEVICE__THREADS", "many")], "KVD_DEVICE__THREADS"),
        (&["--sat", "x=y"], &[], "--sat"),
    ];
    for (flags, environment, key) in cases {
        let mut command = kvd();
        command.args(["serve", "--listen", &taken]).args(flags).envs(environment.iter().copied());
        let (code, said) = refused(command);
        assert_eq!(code, Some(64), "{flags:?} {environment:?}: {said}");
        assert!(said.contains(key), "{flags:?} {environment:?} does not name {key}: {said}");
    }
}

#[test]
fn the_printed_defaults_are_a_valid_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvd.toml");
    let mut command = kvd();
    command.args(["config", "--print-default"]);
    let printed = output(command);
    assert!(printed.status.success());
    std::fs::write(&file, &printed.stdout).unwrap();
    let shown = |command: &mut std::process::Command| {
        let shown = command.output().unwrap();
        assert!(shown.status.success(), "{shown:?}");
        String::from_utf8(shown.stdout).unwrap()
    };
    let from_file = shown(kvd().arg("config").arg("--config").arg(&file));
    assert_eq!(from_file, shown(kvd().arg("config")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_daemon_on_the_same_port_exits_69() {
    let first = Process::start(&[]);
    let mut listen = kvd();
    listen.args(["serve", "--listen", first.tcp(), "--admin", ""]);
    let mut admin = kvd();
    admin.args(["serve", "--listen", "127.0.0.1:0", "--admin", first.admin()]);
    for (command, key) in [(listen, "server.listen_tcp"), (admin, "admin.listen")] {
        let (code, said) = refused(command);
        assert_eq!(code, Some(69), "{said}");
        assert!(said.contains(key), "{said}");
    }
    assert_serves(&first.client().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_open_streams_and_exits_0() {
    for signal in ["TERM", "INT"] {
        let daemon = Process::start(&[]);
        let client = daemon.client().await;
        let (model, sequence) = assert_serves(&client).await;
        // One stream in the middle of its work, one idle.
        let mut stores = client.store_stream(128).await.unwrap();
        for number in 0..100 {
            stores.send_chunk(chunk(sequence, 100 + number, 1)).await.unwrap();
        }
        assert_eq!(stores.receive_ack().await.unwrap().unwrap().length, 101);
        let mut attends = client.attend_stream(1).await.unwrap();
        attends.attend_batch(batch(model, sequence)).await.unwrap();
        daemon.signal(signal);
        // Each chunk was stored or refused; which of them is a matter of when the signal came.
        let mut length = 101;
        loop {
            match stores.receive_ack().await {
                Ok(None) => break,
                Ok(Some(ack)) => {
                    length += 1;
                    assert_eq!(ack.length, length);
                }
                Err(error) => {
                    assert_eq!(error.code, Some(ErrorCode::ShuttingDown), "{error}");
                    break;
                }
            }
        }
        let ended = daemon.wait();
        assert_eq!(ended.code, Some(0), "{}", ended.log);
        assert!(ended.log.contains("\"drained\":\"Clean\""), "{}", ended.log);
        // Whoever calls now is told that nobody is there, and that it may try elsewhere.
        let error = client.server_info().await.unwrap_err();
        assert!(error.is_retryable() || error.code == Some(ErrorCode::ShuttingDown), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_holds_the_daemon_no_longer_than_the_grace_period() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvd.sock");
    let flags = ["--set", "server.grace_period_ms=300", "--unix", &unix_flag(&path)];
    let daemon = Process::start(&flags);
    let client = daemon.client().await;
    let (_, sequence) = assert_serves(&client).await;
    for start in (100..8100).step_by(1000) {
        client.store_chunk(chunk(sequence, start, 1000)).await.unwrap();
    }
    // 4 MiB through a window of 64 KiB that nobody empties.
    let narrow = tonic::transport::Endpoint::try_from(format!("http://{}", daemon.tcp()))
        .unwrap()
        .initial_stream_window_size(65_535)
        .connect()
        .await
        .unwrap();
    let mut rpc = v1::kvd_client::KvdClient::new(narrow);
    let range = LoadRange { sequence, layer: LayerIndex(0), start: 0, end: 8100, dtype: None };
    let mut unread = rpc.load_blocks(v1::LoadBlocksRequest::from(range)).await.unwrap();
    daemon.signal("TERM");
    let ended = tokio::task::spawn_blocking(|| daemon.wait()).await.unwrap();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("\"drained\":\"CutOff\""), "{}", ended.log);
    assert!(!path.exists(), "the socket file stayed");
    // What was lost shows as an error, not as a short answer.
    let rest = loop {
        match unread.get_mut().message().await {
            Ok(Some(_)) => {}
            rest => break rest,
        }
    };
    assert!(rest.is_err());
}

fn unix_flag(path: &Path) -> String {
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_serves_replaces_a_stale_one_and_goes_with_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvd.sock");
    // A listener that is gone leaves its file behind.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let daemon = Process::start(&["--unix", &unix_flag(&path)]);
    let client = Client::connect(format!("unix:{}", path.display()).parse().unwrap()).await;
    assert_serves(&client.unwrap()).await;
    // A living one is not taken over.
    let mut second = kvd();
    second.args(["serve", "--listen", "", "--admin", "", "--unix", &unix_flag(&path)]);
    let (code, said) = refused(second);
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("server.listen_unix"), "{said}");
    daemon.signal("TERM");
    assert_eq!(daemon.wait().code, Some(0));
    assert!(!path.exists(), "the socket file stayed");
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious.txt");
    std::fs::write(&path, "mine").unwrap();
    let mut command = kvd();
    command.args(["serve", "--listen", "", "--admin", "", "--unix", &unix_flag(&path)]);
    let (code, said) = refused(command);
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("server.listen_unix"), "{said}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}
