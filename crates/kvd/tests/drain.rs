//! The end of a daemon: what it tells its clients, and that none of them can put it off.

mod support;

use kvd::DrainOutcome;
use kvd_proto::v1;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use support::{closes, rpc, start};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Far more than a cut takes, far less than waiting for a client that never leaves.
const PROMPT: Duration = Duration::from_secs(10);

async fn drain(running: kvd::RunningDaemon) -> DrainOutcome {
    tokio::time::timeout(PROMPT, running.drain()).await.expect("the drain ends")
}

fn name(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

#[tokio::test]
async fn health_follows_the_drain_under_both_names() {
    let running = start(&[]).await;
    let mut health = HealthClient::new(support::channel(&running).await);
    for expected in [ServingStatus::Serving, ServingStatus::NotServing] {
        for service in ["", "kvd.v1.Kvd"] {
            let answer = health.check(name(service)).await.unwrap().into_inner();
            assert_eq!(answer.status(), expected, "{service:?}");
        }
        let error = health.check(name("kvd.v1.Other")).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::NotFound);
        running.service().drain();
    }
    assert_eq!(drain(running).await, DrainOutcome::Clean);
}

#[tokio::test]
async fn watchers_are_told_and_do_not_hold_the_drain() {
    let running = start(&[("server.grace_period_ms", "60000")]).await;
    let mut watches = Vec::new();
    for service in ["", "kvd.v1.Kvd"] {
        let mut health = HealthClient::new(support::channel(&running).await);
        let mut watch = health.watch(name(service)).await.unwrap().into_inner();
        let first = watch.message().await.unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving);
        watches.push((health, watch));
    }
    let drained = tokio::spawn(drain(running));
    for (_, watch) in &mut watches {
        let last = watch.message().await.unwrap().unwrap();
        assert_eq!(last.status(), ServingStatus::NotServing);
        assert!(watch.message().await.unwrap().is_none());
    }
    // The clients are still connected.
    assert_eq!(drained.await.unwrap(), DrainOutcome::Clean);
}

#[tokio::test]
async fn clients_that_say_nothing_are_cut_off_on_both_ports() {
    let flags = [("server.grace_period_ms", "200"), ("admin.listen", "127.0.0.1:0")];
    let running = start(&flags).await;
    let grpc = TcpStream::connect(running.bound_addresses().tcp.unwrap()).unwrap();
    let mut admin = TcpStream::connect(running.admin_address().unwrap()).unwrap();
    admin.write_all(b"GET /metrics HT").unwrap();
    // An answer on a later connection shows that those before it were accepted.
    rpc(&running).await.get_server_info(v1::GetServerInfoRequest {}).await.unwrap();
    assert_eq!(drain(running).await, DrainOutcome::CutOff);
    for socket in [grpc, admin] {
        assert!(closes(socket).await);
    }
}

/// A stored sequence of 8 MiB.
async fn stored(rpc: &mut v1::kvd_client::KvdClient<Channel>) -> u64 {
    let model_id =
        rpc.register_model(support::spec()).await.expect("register").into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    let sequence_id = rpc.open_sequence(open).await.expect("open").into_inner().sequence_id;
    let rows = vec![0u8; 16384 * 64 * 4];
    let inline = v1::payload::Source::Inline(rows.into());
    let payload = v1::Payload { source: Some(inline) };
    let chunk = v1::StoreBlocksRequest {
        sequence_id,
        layer: 0,
        start: 0,
        tokens: 16384,
        k: Some(payload.clone()),
        v: Some(payload),
    };
    let acks = rpc.store_blocks(tokio_stream::once(chunk)).await.expect("store");
    acks.into_inner().message().await.expect("stored").expect("an ack");
    sequence_id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stopped_reading_is_cut_off() {
    let running = start(&[("server.grace_period_ms", "200")]).await;
    let sequence_id = stored(&mut rpc(&running).await).await;
    let address = running.bound_addresses().tcp.unwrap();
    let narrow = Endpoint::try_from(format!("http://{address}")).unwrap();
    let narrow = narrow.initial_stream_window_size(65_535).connect().await.unwrap();
    let range = v1::LoadBlocksRequest { sequence_id, layer: 0, start: 0, end: 16384, dtype: 0 };
    let mut stalled = v1::kvd_client::KvdClient::new(narrow).load_blocks(range).await.unwrap();
    let (began, service) = (Instant::now(), running.service().clone());
    assert_eq!(drain(running).await, DrainOutcome::CutOff);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // What was lost shows as an error, not as a short answer.
    let rest = loop {
        match stalled.get_mut().message().await {
            Ok(Some(_)) => {}
            rest => break rest,
        }
    };
    assert!(rest.is_err());
    // The worker is gone although the service, held here, is not.
    let call = kvd::service::CallContext::new(kvd_core::Namespace::new("default").unwrap());
    let late = service.first_worker().run_closure(&call, |_| Ok(())).await.unwrap_err();
    assert_eq!(late.code(), kvd_core::ErrorCode::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_for_a_busy_device_are_cut_off() {
    let running = start(&[("server.grace_period_ms", "100")]).await;
    let gate = support::occupy(&running).await;
    let mut rpc = rpc(&running).await;
    let spec = support::spec();
    let waiting = tokio::spawn(async move { rpc.register_model(Request::new(spec)).await });
    support::until(|| running.service().first_worker().queued_jobs() == 1).await;
    let drained = tokio::spawn(running.drain());
    // The answer does not wait for the job that runs; the end of the daemon does.
    let error = tokio::time::timeout(PROMPT, waiting).await.unwrap().unwrap().unwrap_err();
    assert!(!drained.is_finished(), "{error}");
    drop(gate);
    let drained = tokio::time::timeout(PROMPT, drained).await.unwrap().unwrap();
    assert_eq!(drained, DrainOutcome::CutOff);
}
