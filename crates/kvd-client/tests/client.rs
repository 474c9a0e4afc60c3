//! The client against a fake daemon on a real connection.

mod support;

use bytes::Bytes;
use kvd_client::{
    AttendBatch, AttendQuery, CalibrationOrder, Client, ClientOptions, DType, Endpoint, ErrorCode,
    Geometry, LayerIndex, LoadRange, ModelId, ModelSpec, Namespace, RopePairing, SequenceId,
    StoreChunk,
};
use kvd_proto::v1::kvd_server::KvdServer;
use std::time::Duration;
use support::{BUSY, BUSY_HINT, Fake, GAP, SILENT};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

async fn endpoint() -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind a free port");
    let address = listener.local_addr().expect("local address");
    let fake = KvdServer::new(Fake).max_decoding_message_size(1 << 20);
    let server = Server::builder().add_service(fake);
    // Without it each small answer waits for the peer's delayed acknowledgement: 40 ms.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::spawn(server.serve_with_incoming(incoming));
    format!("http://{address}").parse().expect("an endpoint")
}

async fn client() -> Client {
    Client::connect(endpoint().await).await.expect("connect")
}

fn batch(layer: LayerIndex, q: Bytes) -> AttendBatch {
    AttendBatch {
        model: ModelId(5),
        layer,
        q_heads: 1,
        dtype: DType::F16,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(SequenceId(6), 1)],
        q,
        per_query_errors: false,
    }
}

fn chunk(start: u32) -> StoreChunk {
    let (k, v) = (Bytes::from_static(b"kk"), Bytes::from_static(b"vv"));
    StoreChunk { sequence: SequenceId(6), layer: LayerIndex(3), start, tokens: 2, k, v }
}

#[tokio::test]
async fn namespace_and_deadline_travel_with_every_call() {
    let client = client().await;
    assert_eq!(client.server_info().await.unwrap().boot_id, "default");
    let namespace = Namespace::new("team-a").unwrap();
    let other = client.clone().with_namespace(&namespace).with_timeout(Duration::from_secs(9));
    let info = other.server_info().await.unwrap();
    assert_eq!(info.boot_id, "team-a");
    assert_eq!(info.version, "9000000u");
    assert_eq!(client.server_info().await.unwrap().version, "");
}

#[tokio::test]
async fn unix_socket_serves_like_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::builder().add_service(KvdServer::new(Fake));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let endpoint = format!("unix:{}", path.display()).parse().unwrap();
    let client = Client::connect(endpoint).await.unwrap();
    assert_eq!(client.server_info().await.unwrap().boot_id, "default");
}

#[tokio::test]
async fn model_and_sequence_calls_are_typed() {
    let client = client().await;
    let geometry = Geometry {
        layers: 2,
        kv_heads: 1,
        head_dim_k: 4,
        head_dim_v: 4,
        block_tokens: 16,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = ("tiny".to_owned(), "raw".to_owned());
    let spec = ModelSpec { name, geometry: geometry.clone(), codec, calibration: Bytes::new() };
    let registered = client.register_model(spec).await.unwrap();
    assert_eq!((registered.model, registered.geometry), (ModelId(5), geometry));
    assert_eq!(client.list_models().await.unwrap().len(), 2);
    let sequence = client.open_sequence(registered.model).await.unwrap();
    assert_eq!(sequence, SequenceId(6));
    let forked = client.fork_sequence(sequence, None).await.unwrap();
    assert_eq!((forked.sequence, forked.length), (SequenceId(7), 77));
    assert_eq!(client.fork_sequence(sequence, Some(3)).await.unwrap().length, 3);
    let error = client.describe_model(registered.model).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::UnknownModel));
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn store_waits_for_its_acknowledgement() {
    let client = client().await;
    let ack = client.store_chunk(chunk(4)).await.unwrap();
    assert_eq!((ack.layer, ack.length), (LayerIndex(3), 6));
    let error = client.store_chunk(chunk(GAP)).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::RangeGap));
    // One-shot streams end cleanly: a peer that counts resets must not count these.
    for start in 0..300 {
        client.store_chunk(chunk(start)).await.unwrap();
    }
}

#[tokio::test]
async fn store_stream_acknowledges_in_order_and_bounds_what_is_open() {
    let client = client().await;
    let mut stream = client.store_stream(3).await.unwrap();
    let mut lengths = Vec::new();
    for start in 0..10 {
        lengths.extend(stream.send_chunk(chunk(start)).await.unwrap().map(|ack| ack.length));
        assert!(stream.unacknowledged() <= 3);
    }
    assert_eq!(lengths.len(), 7);
    lengths.extend(stream.receive_ack().await.unwrap().map(|ack| ack.length));
    lengths.extend(stream.finish_stream().await.unwrap().iter().map(|ack| ack.length));
    assert_eq!(lengths, (2..12).collect::<Vec<_>>());
}

#[tokio::test]
async fn failed_chunk_ends_the_stream_with_its_error() {
    let client = client().await;
    let mut stream = client.store_stream(2).await.unwrap();
    stream.send_chunk(chunk(0)).await.unwrap();
    stream.send_chunk(chunk(GAP)).await.unwrap();
    assert_eq!(stream.receive_ack().await.unwrap().unwrap().length, 2);
    let error = stream.receive_ack().await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::RangeGap));
    assert!(stream.send_chunk(chunk(4)).await.is_err());

    let mut stream = client.store_stream(8).await.unwrap();
    stream.send_chunk(chunk(GAP)).await.unwrap();
    assert_eq!(stream.finish_stream().await.unwrap_err().code, Some(ErrorCode::RangeGap));
}

#[tokio::test]
async fn attend_returns_what_was_answered() {
    let client = client().await;
    let attended =
        client.attend_batch(batch(LayerIndex(0), Bytes::from_static(b"qq"))).await.unwrap();
    assert_eq!(attended.out, b"qq"[..]);
    assert_eq!(attended.lse, [1.0]);
    let error = client.attend_batch(batch(BUSY, Bytes::new())).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::QueueFull));
    assert_eq!(error.retry_after, Some(BUSY_HINT));
    assert!(error.is_retryable());
}

#[tokio::test]
async fn attend_stream_answers_in_order() {
    let client = client().await;
    let mut stream = client.attend_stream(2).await.unwrap();
    let payload = |i: u8| Bytes::from(vec![i; 4]);
    let mut outs = Vec::new();
    for i in 0..5 {
        outs.extend(stream.send_batch(batch(LayerIndex(0), payload(i))).await.unwrap());
    }
    assert_eq!(stream.unanswered(), 2);
    let error = stream.attend_batch(batch(LayerIndex(0), payload(9))).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::InvalidArgument));
    while let Some(attended) = stream.receive_answer().await.unwrap() {
        outs.push(attended);
    }
    let firsts: Vec<u8> = outs.iter().map(|attended| attended.out[0]).collect();
    assert_eq!(firsts, [0, 1, 2, 3, 4]);
    let attended = stream.attend_batch(batch(LayerIndex(0), payload(7))).await.unwrap();
    assert_eq!(attended.out, payload(7));
    assert!(stream.finish_stream().await.unwrap().is_empty());
}

#[tokio::test]
async fn load_joins_its_pieces() {
    let client = client().await;
    let (sequence, layer) = (SequenceId(6), LayerIndex(0));
    let range = LoadRange { sequence, layer, start: 2, end: 10, dtype: None };
    let rows = client.load_rows(range).await.unwrap();
    assert_eq!(rows.k, [2, 3, 4, 5, 6, 7, 8, 9][..]);
    assert_eq!(rows.v[0], 253);
    let mut stream = client.load_stream(range).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(piece) = stream.receive_piece().await.unwrap() {
        tokens.push(piece.tokens);
    }
    assert_eq!(tokens, [3, 3, 2]);
    let short = LoadRange { layer: LayerIndex(1), ..range };
    assert_eq!(client.load_rows(short).await.unwrap_err().code, Some(ErrorCode::Internal));
}

#[tokio::test]
async fn sampled_queries_come_with_their_shape() {
    let sampled = client().await.sample_queries(ModelId(1), LayerIndex(3)).await.unwrap();
    assert_eq!((sampled.q_heads, sampled.dtype), (3, DType::F16));
    assert_eq!(sampled.q, [7; 6][..]);
}

#[tokio::test]
async fn made_calibration_comes_with_its_counts() {
    let order = CalibrationOrder {
        model: ModelId(1),
        sequences: vec![SequenceId(2), SequenceId(3)],
        codecs: vec!["kvd-2".to_owned()],
        seed: 5,
        tokens_max: None,
    };
    let made = client().await.calibrate_model(order).await.unwrap();
    assert_eq!((made.tokens, made.queries_per_head), (5, 2));
    assert_eq!(made.calibration, "kvd-2");
}

#[tokio::test]
async fn silent_daemon_is_a_deadline() {
    let client = client().await.with_timeout(Duration::from_millis(80));
    let error = client.attend_batch(batch(SILENT, Bytes::new())).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::DeadlineExceeded));
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn oversized_message_is_named_whoever_notices() {
    // The fake accepts 1 MiB: the daemon notices.
    let client = client().await;
    let large = batch(LayerIndex(0), Bytes::from(vec![0; 2 << 20]));
    let error = client.attend_batch(large).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::MessageTooLarge), "{error:?}");
    // Here the client itself does.
    let options = ClientOptions::default().with_message_bytes_max(1 << 10);
    let client = Client::connect_with(endpoint().await, &options).await.unwrap();
    let large = batch(LayerIndex(0), Bytes::from(vec![0; 2 << 10]));
    let error = client.attend_batch(large.clone()).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::MessageTooLarge), "{error:?}");
    let mut stream = client.attend_stream(2).await.unwrap();
    let error = stream.send_batch(large).await.unwrap_err();
    assert_eq!(error.code, Some(ErrorCode::MessageTooLarge), "{error:?}");
    // The refused message was never sent, so the stream lives.
    stream.attend_batch(batch(LayerIndex(0), Bytes::new())).await.unwrap();
}

#[tokio::test]
async fn unreachable_daemon_is_retryable_and_named() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let endpoint = format!("http://{address}").parse().unwrap();
    let error = Client::connect(endpoint).await.unwrap_err();
    assert_eq!(error.code, None);
    assert!(error.is_retryable());
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}
