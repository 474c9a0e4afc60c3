//! Memory that clients can take: half-sent messages, lengths of messages that never come, answers
//! that nobody reads. All of it stays within the share of their connection, and others are served.

#![allow(clippy::unwrap_used)]

mod support;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use kvd::RunningDaemon;
use kvd_core::ErrorCode;
use kvd_proto::v1::{self, kvd_client::KvdClient};
use prost::Message;
use std::time::Duration;
use support::{attend_nothing, rpc, spec, start, until};
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::Channel;

const MIB: u64 = 1 << 20;
/// Streams of one connection.
const STREAMS: usize = 24;
/// Bytes that one connection may hold, of messages of a megabyte at most.
const SHARE: u64 = 4 * MIB;
const FLAGS: [(&str, &str); 5] = [
    ("server.message_bytes_max", "1 MiB"),
    ("limits.calibration_bytes_max", "1 MiB"),
    ("limits.attend_parts_max", "8192"),
    ("limits.connection_bytes_max", "4 MiB"),
    ("limits.inflight_bytes_max", "16 MiB"),
];

/// A daemon of those limits and some others.
async fn small(more: &[(&str, &str)]) -> RunningDaemon {
    let flags: Vec<_> = FLAGS.iter().chain(more).copied().collect();
    start(&flags).await
}

/// A client that speaks HTTP/2 and nothing more.
struct Rude {
    send: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Rude {
    async fn connect(running: &RunningDaemon, window: u32) -> Self {
        let address = running.bound_addresses().tcp.expect("a TCP listener");
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).max_concurrent_streams(100);
        let (send, connection) = builder.handshake(socket).await.unwrap();
        Self { send, connection: tokio::spawn(connection) }
    }

    async fn open(&mut self, rpc: &str) -> (ResponseFuture, SendStream<Bytes>) {
        let head = http::Request::post(format!("http://kvd/kvd.v1.Kvd/{rpc}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        self.send = self.send.clone().ready().await.unwrap();
        self.send.send_request(head, false).unwrap()
    }
}

fn prefix(length: u64) -> Vec<u8> {
    let mut prefix = vec![0];
    prefix.extend(u32::try_from(length).unwrap().to_be_bytes());
    prefix
}

fn framed(message: &impl Message) -> Bytes {
    let message = message.encode_to_vec();
    [prefix(message.len() as u64), message].concat().into()
}

/// A model and a sequence of it.
async fn opened(rpc: &mut KvdClient<Channel>) -> (u64, u64) {
    let model_id = rpc.register_model(spec()).await.unwrap().into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    (model_id, rpc.open_sequence(open).await.unwrap().into_inner().sequence_id)
}

/// As many query tokens over nothing, by bytes of the answer.
fn attend_bytes((model_id, sequence_id): (u64, u64), bytes: u64) -> v1::AttendRequest {
    let n_q = u32::try_from(bytes / 256).unwrap();
    let mut request = attend_nothing(model_id, sequence_id);
    request.queries[0].n_q = n_q;
    let q = v1::payload::Source::Inline(vec![0; n_q as usize * 256].into());
    v1::AttendRequest { q: Some(v1::Payload { source: Some(q) }), ..request }
}

/// Bytes of an answer's output.
fn bytes_of(answer: v1::AttendResponse) -> u64 {
    match answer.out.and_then(|out| out.source) {
        Some(v1::payload::Source::Inline(bytes)) => bytes.len() as u64,
        other => panic!("no output: {other:?}"),
    }
}

/// Someone else sends and reads a message that takes half of a share.
async fn others_are_served(rpc: &mut KvdClient<Channel>, of: (u64, u64)) {
    let answer = rpc.attend(attend_bytes(of, MIB / 2)).await.expect("others are served");
    assert_eq!(bytes_of(answer.into_inner()), MIB / 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_sent_messages_hold_a_share_for_so_long() {
    let running = small(&[("server.message_timeout_ms", "1500")]).await;
    let mut other = rpc(&running).await;
    let of = opened(&mut other).await;
    let service = running.service();
    let mut rude = Rude::connect(&running, 1 << 20).await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let (response, mut send) = rude.open("StoreBlocks").await;
        send.send_data(prefix(MIB).into(), false).unwrap();
        send.send_data(vec![0; MIB as usize - 1].into(), false).unwrap();
        streams.push((response, send));
    }
    until(|| service.inflight_bytes() == SHARE).await;
    others_are_served(&mut other, of).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(service.inflight_bytes(), SHARE, "the others of that connection wait");
    // Each in its turn is told that its message did not come.
    let (response, _send) = streams.swap_remove(0);
    let mut answer: RecvStream = response.await.unwrap().into_body();
    let status = Status::from_header_map(&answer.trailers().await.unwrap().unwrap()).unwrap();
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::DeadlineExceeded), "{status:?}");
    assert!(status.message().contains("server.message_timeout_ms"), "{status:?}");
    rude.connection.abort();
    until(|| service.inflight_bytes() == 0).await;
    let page = service.metrics().render_page();
    let line = "kvd_transport_refusals_total{reason=\"over_budget\"} ";
    let counted = page.lines().find_map(|of| of.strip_prefix(line)).unwrap();
    assert!(counted.parse::<u32>().unwrap() >= 1, "{counted}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_takes_its_bytes_before_they_come() {
    let running = small(&[]).await;
    let mut other = rpc(&running).await;
    let of = opened(&mut other).await;
    let service = running.service();
    let mut rude = Rude::connect(&running, 1 << 20).await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let (response, mut send) = rude.open("AttendStream").await;
        // In two pieces: nothing is known after the first.
        let prefix = Bytes::from(prefix(MIB));
        send.send_data(prefix.slice(..3), false).unwrap();
        send.send_data(prefix.slice(3..), false).unwrap();
        streams.push((response, send));
    }
    until(|| service.inflight_bytes() == SHARE).await;
    others_are_served(&mut other, of).await;
    // Calls do not wait, they are refused.
    let (response, mut send) = rude.open("Attend").await;
    send.send_data(prefix(MIB).into(), false).unwrap();
    let response = response.await.unwrap();
    let status = Status::from_header_map(response.headers()).expect("a refusal");
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::QueueFull), "{status:?}");
    assert!(status.message().contains("limits.connection_bytes_max"), "{status:?}");
    assert!(kvd_proto::retry_after(&status).is_some());
    // One stream ends, and one that waits has its place.
    drop(streams.remove(0));
    drop(send);
    until(|| service.inflight_bytes() == SHARE).await;
    rude.connection.abort();
    until(|| service.inflight_bytes() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_nobody_reads_keep_their_share() {
    let running = small(&[]).await;
    let mut other = rpc(&running).await;
    let of = opened(&mut other).await;
    let service = running.service();
    // No byte of an answer may be sent.
    let mut rude = Rude::connect(&running, 0).await;
    let request = framed(&attend_bytes(of, MIB / 2));
    // Bodies that are kept, and not read.
    let mut answers = Vec::new();
    let mut refused = 0;
    for _ in 0..STREAMS {
        let (response, mut send) = rude.open("Attend").await;
        send.send_data(request.clone(), true).unwrap();
        let response = response.await.unwrap();
        refused += usize::from(response.headers().contains_key("grpc-status"));
        answers.push(response.into_body());
    }
    let held = service.inflight_bytes();
    assert!((2 * MIB..=SHARE).contains(&held), "{held}");
    assert!((STREAMS - 8..STREAMS).contains(&refused), "{refused}");
    others_are_served(&mut other, of).await;
    assert_eq!(service.inflight_bytes(), held);
    rude.connection.abort();
    until(|| service.inflight_bytes() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_and_streams_give_all_back_when_they_are_answered() {
    let running = small(&[]).await;
    let mut rpc = rpc(&running).await;
    let of = opened(&mut rpc).await;
    let service = running.service();
    for _ in 0..20 {
        others_are_served(&mut rpc, of).await;
    }
    let requests: Vec<_> = (0..20).map(|_| attend_bytes(of, MIB / 2)).collect();
    let stream = rpc.attend_stream(tokio_stream::iter(requests)).await.unwrap();
    let mut stream = stream.into_inner();
    let mut answers = 0;
    while let Some(answer) = stream.message().await.unwrap() {
        assert_eq!(bytes_of(answer), MIB / 2);
        answers += 1;
    }
    assert_eq!(answers, 20);
    until(|| service.inflight_bytes() == 0).await;
}
