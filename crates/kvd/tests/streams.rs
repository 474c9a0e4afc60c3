//! Streams and deadlines as a client of another language has them: over the generated stubs.

mod support;

use kvd::RunningDaemon;
use kvd_client::{Client, Endpoint as Address};
use kvd_core::ErrorCode;
use kvd_proto::v1::{self, kvd_client::KvdClient};
use prost::Message;
use std::time::{Duration, Instant};
use support::{attend_nothing, occupy, rpc, spec, start, until};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Far more than a deadline of a test, far less than for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request that the daemon is to end.
fn with_timeout<T>(message: T, timeout: &'static str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("grpc-timeout", timeout.parse().expect("a header"));
    request
}

fn assert_deadline(status: &Status) {
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(kvd_proto::error_code(status), Some(ErrorCode::DeadlineExceeded), "{status:?}");
}

/// A model and an empty sequence of it.
async fn opened(rpc: &mut KvdClient<Channel>) -> (u64, u64) {
    let model_id = rpc.register_model(spec()).await.expect("a model").into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    (model_id, rpc.open_sequence(open).await.expect("a sequence").into_inner().sequence_id)
}

/// Tokens of ones for the model of [`spec`].
fn chunk(sequence_id: u64, start: u32, tokens: u32) -> v1::StoreBlocksRequest {
    let ones = 1f32.to_le_bytes().repeat(64 * tokens as usize);
    let inline = || v1::payload::Source::Inline(ones.clone().into());
    let payload = || Some(v1::Payload { source: Some(inline()) });
    v1::StoreBlocksRequest { sequence_id, layer: 0, start, tokens, k: payload(), v: payload() }
}

/// A stream's requests that stay open, and how to send one.
fn requests<T>() -> (mpsc::Sender<T>, ReceiverStream<T>) {
    let (sender, receiver) = mpsc::channel(16);
    (sender, ReceiverStream::new(receiver))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_past_their_deadline_are_told_so_by_the_daemon() {
    let running = start(&[]).await;
    let (model_id, sequence_id) = opened(&mut rpc(&running).await).await;
    let _held = occupy(&running).await;
    // Whoever's timer is first, the answer is the daemon's.
    for _ in 0..20 {
        let began = Instant::now();
        let status = attend_until(&running, &attend_nothing(model_id, sequence_id), "50m").await;
        assert_deadline(&status);
        let took = began.elapsed();
        assert!((Duration::from_millis(50)..PATIENCE).contains(&took), "{took:?}");
    }
    assert_deadline(&attend_until(&running, &attend_nothing(model_id, sequence_id), "0n").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_stream_ends_at_its_deadline() {
    let running = start(&[]).await;
    let mut rpc = rpc(&running).await;
    let (_, sequence_id) = opened(&mut rpc).await;
    let began = Instant::now();
    let (_attends, open) = requests();
    let attends = rpc.attend_stream(with_timeout(open, "1S")).await.unwrap();
    let (stores, open) = requests();
    let mut stored = rpc.store_blocks(with_timeout(open, "1S")).await.unwrap().into_inner();
    stores.send(chunk(sequence_id, 0, 64)).await.unwrap();
    assert_eq!(stored.message().await.unwrap().unwrap().length, 64);
    let attended = tokio::time::timeout(PATIENCE, attends.into_inner().message()).await;
    assert_deadline(&attended.expect("an end").unwrap_err());
    let stored = tokio::time::timeout(PATIENCE, stored.message()).await;
    assert_deadline(&stored.expect("an end").unwrap_err());
    assert!(began.elapsed() >= Duration::from_secs(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_ends_at_its_deadline_while_the_device_is_busy() {
    let running = start(&[]).await;
    let mut rpc = rpc(&running).await;
    let (_, sequence_id) = opened(&mut rpc).await;
    let once = tokio_stream::once(chunk(sequence_id, 0, 64));
    rpc.store_blocks(once).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let _held = occupy(&running).await;
    let range = v1::LoadBlocksRequest { sequence_id, end: 64, ..Default::default() };
    let loaded = rpc.load_blocks(with_timeout(range, "300m")).await.unwrap();
    let loaded = tokio::time::timeout(PATIENCE, loaded.into_inner().message()).await;
    assert_deadline(&loaded.expect("an end").unwrap_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_message_ends_its_stream_or_is_answered_as_was_asked() {
    let running = start(&[]).await;
    let mut rpc = rpc(&running).await;
    let (_, sequence_id) = opened(&mut rpc).await;
    // As today without the key.
    let bad = vec![chunk(sequence_id, 7, 1), chunk(sequence_id, 0, 1)];
    let mut acks = rpc.store_blocks(tokio_stream::iter(bad)).await.unwrap().into_inner();
    let status = acks.message().await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::RangeGap));
    // Each message is judged by itself.
    let mut malformed = chunk(sequence_id, 64, 1);
    malformed.tokens = 0;
    let messages = vec![
        chunk(sequence_id, 0, 64),
        chunk(sequence_id, 100, 4),
        malformed,
        chunk(u64::MAX, 0, 1),
        chunk(sequence_id, 64, 4),
        chunk(sequence_id, 104, 4),
    ];
    let mut request = Request::new(tokio_stream::iter(messages));
    request.metadata_mut().insert("kvd-stream-errors", "per-message".parse().unwrap());
    let mut acks = rpc.store_blocks(request).await.unwrap().into_inner();
    let mut seen = Vec::new();
    while let Some(ack) = acks.message().await.unwrap() {
        seen.push(ack.error.map_or(ack.length.to_string(), |error| error.code));
    }
    let codes = ["64", "RANGE_GAP", "INVALID_ARGUMENT", "UNKNOWN_SEQUENCE", "68", "RANGE_GAP"];
    assert_eq!(seen, codes);
    let mut request = Request::new(tokio_stream::iter(vec![chunk(sequence_id, 68, 1)]));
    request.metadata_mut().insert("kvd-stream-errors", "sometimes".parse().unwrap());
    let status = rpc.store_blocks(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("kvd-stream-errors: "), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_the_client_go_on_after_a_refusal() {
    let running = start(&[]).await;
    let (model, sequence) = opened(&mut rpc(&running).await).await;
    let address: Address =
        format!("http://{}", running.bound_addresses().tcp.unwrap()).parse().unwrap();
    let client = Client::connect(address).await.unwrap();
    let domain = |start| chunk(sequence, start, 4).try_into().unwrap();
    let mut stores = client.store_stream(2).await.unwrap();
    stores.send_chunk(domain(0)).await.unwrap();
    stores.send_chunk(domain(9)).await.unwrap();
    assert_eq!(stores.send_chunk(domain(4)).await.unwrap().unwrap().length, 4);
    // The refusal of the second stands in its place; the fourth has been sent all the same.
    let refused = stores.send_chunk(domain(8)).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::RangeGap));
    assert!(stores.is_open());
    assert_eq!(stores.unacknowledged(), 2);
    assert_eq!(stores.receive_ack().await.unwrap().unwrap().length, 8);
    assert_eq!(stores.receive_ack().await.unwrap().unwrap().length, 12);
    stores.send_chunk(domain(0)).await.unwrap();
    stores.send_chunk(domain(50)).await.unwrap();
    assert_eq!(stores.finish_stream().await.unwrap_err().code, Some(ErrorCode::RangeGap));
    let mut attends = client.attend_stream(1).await.unwrap();
    let batch = |sequence| attend_nothing(model, sequence).try_into().unwrap();
    let refused = attends.attend_batch(batch(u64::MAX)).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::UnknownSequence));
    assert!(!refused.is_retryable());
    assert_eq!(attends.attend_batch(batch(sequence)).await.unwrap().lse.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_waits_where_a_call_is_told_that_the_queue_is_full() {
    let running = start(&[("device.queue_jobs_max", "1")]).await;
    let mut rpc = rpc(&running).await;
    let (model_id, sequence_id) = opened(&mut rpc).await;
    let attend = || attend_nothing(model_id, sequence_id);
    let held = occupy(&running).await;
    let mut first = rpc.clone();
    let waiting = {
        let request = attend();
        tokio::spawn(async move { first.attend(request).await })
    };
    until(|| running.service().first_worker().queued_jobs() == 1).await;
    let status = rpc.attend(attend()).await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::QueueFull));
    let mut streams = Vec::new();
    for _ in 0..8 {
        let request = tokio_stream::once(attend());
        streams.push(rpc.attend_stream(request).await.unwrap().into_inner());
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(held);
    waiting.await.unwrap().unwrap();
    for stream in &mut streams {
        assert!(stream.message().await.unwrap().is_some());
        assert!(stream.message().await.unwrap().is_none());
    }
}

/// Calls `Attend` as a client that leaves the deadline to the daemon, which tonic's does not;
/// answers the status.
async fn attend_until(
    running: &RunningDaemon,
    request: &v1::AttendRequest,
    timeout: &str,
) -> Status {
    let address = running.bound_addresses().tcp.expect("a TCP listener");
    let socket = tokio::net::TcpStream::connect(address).await.expect("connect");
    let (mut send, connection) = h2::client::handshake(socket).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    let head = http::Request::post(format!("http://{address}/kvd.v1.Kvd/Attend"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-timeout", timeout)
        .body(())
        .expect("a request");
    let (response, mut body) = send.send_request(head, false).expect("sent");
    let message = request.encode_to_vec();
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend(message);
    body.send_data(frame.into(), true).expect("sent");
    let response = tokio::time::timeout(PATIENCE, response).await.expect("in time");
    let status = Status::from_header_map(response.expect("an answer").headers());
    connection.abort();
    status.expect("a status without a body")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gzip_is_taken_within_the_message_limit_and_answered_to_who_sends_it() {
    let flags =
        [("server.message_bytes_max", "256 KiB"), ("limits.calibration_bytes_max", "64 KiB")];
    let running = start(&flags).await;
    let mut plain = rpc(&running).await;
    let (_, sequence_id) = opened(&mut plain).await;
    let mut gzip = plain
        .clone()
        .send_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Gzip);
    let store = async |rpc: &mut KvdClient<Channel>, start, tokens| {
        let messages = tokio_stream::once(chunk(sequence_id, start, tokens));
        rpc.store_blocks(messages).await?.into_inner().message().await
    };
    assert_eq!(store(&mut gzip, 0, 256).await.unwrap().unwrap().length, 256);
    // Ones: a thousandth of the limit when compressed, over it when not.
    let status = store(&mut gzip, 256, 1024).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("262144"), "{status:?}");
    let error = kvd_client::ClientError::from(status);
    assert_eq!(error.code, Some(ErrorCode::MessageTooLarge));
    assert_eq!(store(&mut gzip, 256, 4).await.unwrap().unwrap().length, 260);
    // Answers are compressed where requests are, not wherever a library says that it could read it.
    let load = v1::LoadBlocksRequest { sequence_id, end: 256, ..Default::default() };
    let mut reads = plain.accept_compressed(CompressionEncoding::Gzip);
    let mut rows = Vec::new();
    for (rpc, encoding) in [(&mut gzip, Some("gzip")), (&mut reads, None)] {
        let mut loaded = rpc.load_blocks(load).await.unwrap();
        let said = loaded.metadata().get("grpc-encoding").map(|said| said.to_str().unwrap());
        assert_eq!(said, encoding);
        rows.push(loaded.get_mut().message().await.unwrap().unwrap());
    }
    assert_eq!(rows[0], rows[1]);
}
