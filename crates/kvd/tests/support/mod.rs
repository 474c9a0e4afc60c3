//! A daemon in this process, and rude clients.
#![allow(dead_code, reason = "each test file uses its part")]

use kvd::config::ConfigOverrides;
use kvd::{Config, Daemon, RunningDaemon};
use kvd_proto::v1;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tonic::transport::{Channel, Endpoint};

/// Longest wait for what happens at once.
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon of 64 MiB on a free loopback port, without an admin port, and with these settings.
pub(crate) async fn start(flags: &[(&str, &str)]) -> RunningDaemon {
    let basic = [
        ("server.listen_tcp", "127.0.0.1:0"),
        ("admin.listen", ""),
        ("device.pool_bytes", "64 MiB"),
        ("device.threads", "1"),
    ];
    let flags = basic.iter().chain(flags);
    let flags = flags.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let config = Config::load(&ConfigOverrides { file: None, environment: false, flags });
    let daemon = Daemon::build(config.expect("a configuration")).await.expect("a daemon");
    daemon.spawn()
}

/// A connection of its own.
pub(crate) async fn channel(running: &RunningDaemon) -> Channel {
    let address = running.bound_addresses().tcp.expect("a TCP listener");
    let endpoint = Endpoint::try_from(format!("http://{address}")).expect("an endpoint");
    endpoint.connect().await.expect("connect")
}

/// The generated client on a connection of its own.
pub(crate) async fn rpc(running: &RunningDaemon) -> v1::kvd_client::KvdClient<Channel> {
    let rpc = v1::kvd_client::KvdClient::new(channel(running).await);
    rpc.max_encoding_message_size(64 << 20).max_decoding_message_size(64 << 20)
}

/// A small model.
pub(crate) fn spec() -> v1::RegisterModelRequest {
    let geometry = v1::Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 64,
        head_dim_v: 64,
        block_tokens: 64,
        dtype: v1::DType::DtypeF32.into(),
        rope_pairing: v1::RopePairing::Half.into(),
    };
    v1::RegisterModelRequest {
        name: "model".to_owned(),
        geometry: Some(geometry),
        codec: "raw".to_owned(),
        ..Default::default()
    }
}

/// One query over the empty range of a sequence of [`spec`]: enough to wait for the device.
pub(crate) fn attend_nothing(model_id: u64, sequence_id: u64) -> v1::AttendRequest {
    let query = v1::Query { sequence_id, n_q: 1, position: Some(0), ..Default::default() };
    let q = v1::payload::Source::Inline(vec![0; 64 * 4].into());
    v1::AttendRequest {
        model_id,
        q_heads: 1,
        dtype: v1::DType::DtypeF32.into(),
        queries: vec![query],
        q: Some(v1::Payload { source: Some(q) }),
        ..Default::default()
    }
}

/// Keeps the device busy until the answer is dropped.
pub(crate) async fn occupy(running: &RunningDaemon) -> mpsc::SyncSender<()> {
    let (gate, opened) = mpsc::sync_channel(1);
    let (begin, begun) = tokio::sync::oneshot::channel();
    let worker = running.service().first_worker().clone();
    let namespace = kvd_core::Namespace::new("default").expect("a namespace");
    tokio::spawn(async move {
        let call = kvd::service::CallContext::new(namespace);
        let work = move |_: &mut dyn kvd_compute::Backend| {
            let _ = begin.send(());
            let _ = opened.recv();
            Ok(())
        };
        worker.run_closure(&call, work).await
    });
    begun.await.expect("the device takes the job");
    gate
}

/// Asks until the answer is yes.
pub(crate) async fn until(ask: impl Fn() -> bool) {
    let began = Instant::now();
    while !ask() {
        assert!(began.elapsed() < PATIENCE, "it never happens");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Whether the daemon ends this connection; what it sends before that is passed over.
pub(crate) async fn closes(mut socket: TcpStream) -> bool {
    let read = move || {
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut bytes = [0u8; 4096];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::ConnectionReset,
            }
        }
    };
    tokio::task::spawn_blocking(read).await.expect("read")
}
