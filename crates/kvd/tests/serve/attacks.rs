//! Attacks on the daemon's memory, with the real daemon: half-sent messages,
//! lengths of messages that never come, answers that nobody reads, forks, and blocks of one token.
//! Its resident bytes stay below those of its pool and its limits and a constant, and others are
//! served meanwhile.
//!
//! `KVD_ATTACKED_DAEMON` names another daemon to attack; each attack prints its figures.

use super::process::{Process, kvd};
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use kvd_client::{
    AttendBatch, AttendQuery, Client, ClientError, DType, Endpoint, ErrorCode, Geometry,
    LayerIndex, ModelId, ModelSpec, RopePairing, SequenceId, StoreChunk,
};
use kvd_proto::v1;
use prost::Message;
use std::process::Command;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

const MIB: u64 = 1 << 20;
/// Resident bytes beside those of the pool and of limits, at most.
const CONSTANT: u64 = 64 * MIB;
/// Bytes that kvd.toml says a block seen by a sequence takes, and a block in the pool beside it.
const VIEW_BYTES: u64 = 24;
const SLOT_BYTES: u64 = 600;

const POOL: u64 = 64 * MIB;
const MESSAGE: u64 = 8 * MIB;
const CONNECTION: u64 = 32 * MIB;
const INFLIGHT: u64 = 128 * MIB;
const VIEWS: u64 = 1 << 20;
/// As many as 0 of `device.pool_slots_max` stands for.
const SLOTS: u64 = 1 << 16;
/// Connections of one attack, whose shares leave some bytes to others, and streams of each.
const CONNECTIONS: usize = 3;
const STREAMS: usize = 24;

/// The least number that all of it stays below.
const BOUND: u64 = POOL + INFLIGHT + VIEWS * VIEW_BYTES + SLOTS * SLOT_BYTES + CONSTANT;

/// A daemon under attack, and a client of it that does no harm.
struct Attacked {
    daemon: Process,
    client: Client,
    model: ModelId,
    sequence: SequenceId,
    began_at: u64,
}

impl Attacked {
    async fn start() -> Self {
        let size = |bytes: u64| format!("{bytes} B");
        let settings = [
            ("server.message_bytes_max", size(MESSAGE)),
            ("server.connection_window_bytes", size(4 * MIB)),
            ("server.stream_window_bytes", size(2 * MIB)),
            ("limits.calibration_bytes_max", size(MESSAGE)),
            ("limits.attend_parts_max", "65536".to_owned()),
            ("limits.connection_bytes_max", size(CONNECTION)),
            ("limits.inflight_bytes_max", size(INFLIGHT)),
            ("limits.sequence_views_max", VIEWS.to_string()),
        ];
        let flags = settings.map(|(key, value)| ["--set".to_owned(), format!("{key}={value}")]);
        let flags: Vec<&str> = flags.iter().flatten().map(String::as_str).collect();
        let command = std::env::var_os("KVD_ATTACKED_DAEMON").map_or_else(kvd, Command::new);
        let daemon = Process::start_by(command, &flags);
        let client = daemon.client().await;
        let model = register(&client, "served", one_head(64, 64)).await;
        let sequence = client.open_sequence(model).await.expect("open");
        let began_at = resident_bytes(&daemon);
        Self { daemon, client, model, sequence, began_at }
    }

    /// Somebody else stores and attends.
    async fn serves(&self) {
        let Self { client, model, sequence, .. } = self;
        let length = client.describe_sequence(*sequence).await.expect("described").length;
        let stored = client.store_chunk(rows(*sequence, length, 64, 64)).await.expect("a store");
        assert_eq!(stored.length, length + 64);
        let answer = client.attend_batch(asks(*model, *sequence, 64)).await.expect("an attend");
        assert_eq!(answer.out.len(), 64 * 4);
    }

    /// Others are served, the daemon has not grown past its bound, and it says how far.
    #[expect(clippy::print_stdout, reason = "the figures of an attack")]
    async fn check_bound(&self, attack: &str) {
        self.serves().await;
        let (now, peak) = (resident_bytes(&self.daemon), peak_bytes(&self.daemon));
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        println!(
            "{attack}: {:.0} MiB at first, {:.0} under attack, {:.0} at most, bound {:.0}",
            mib(self.began_at),
            mib(now),
            mib(peak),
            mib(BOUND),
        );
        assert!(peak <= BOUND, "{attack}: {peak} bytes, over {BOUND}");
    }

    /// Clients that speak HTTP/2 and nothing more.
    async fn rude_clients(&self, window: u32) -> Vec<Rude> {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(Rude::connect(self.daemon.tcp(), window).await);
        }
        clients
    }
}

fn read_status(daemon: &Process, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("alive");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    line.trim().strip_suffix(" kB").expect("kB").parse::<u64>().expect("a number") * 1024
}

fn resident_bytes(daemon: &Process) -> u64 {
    read_status(daemon, "VmRSS:")
}

fn peak_bytes(daemon: &Process) -> u64 {
    read_status(daemon, "VmHWM:")
}

/// One layer of one head, in blocks of 64 tokens.
fn one_head(head_dim_k: u32, head_dim_v: u32) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k,
        head_dim_v,
        block_tokens: 64,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    }
}

async fn register(client: &Client, name: &str, geometry: Geometry) -> ModelId {
    let (name, codec, calibration) = (name.to_owned(), "raw".to_owned(), Bytes::new());
    let spec = ModelSpec { name, geometry, codec, calibration };
    client.register_model(spec).await.expect("register").model
}

/// Rows of ones, of as many channels on either side.
fn rows(sequence: SequenceId, start: u32, tokens: u32, dim: usize) -> StoreChunk {
    let ones: Bytes = 1f32.to_le_bytes().repeat(dim * tokens as usize).into();
    StoreChunk { sequence, layer: LayerIndex(0), start, tokens, k: ones.clone(), v: ones }
}

/// One query token.
fn asks(model: ModelId, sequence: SequenceId, dim: usize) -> AttendBatch {
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: 1f32.to_le_bytes().repeat(dim).into(),
        per_query_errors: false,
    }
}

/// A client that speaks HTTP/2 and nothing more; what it opened stays open while it lives.
struct Rude {
    send: SendRequest<Bytes>,
    streams: Vec<SendStream<Bytes>>,
    answers: Vec<RecvStream>,
    waiting: Vec<h2::client::ResponseFuture>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Rude {
    async fn connect(address: &str, window: u32) -> Self {
        let socket = TcpStream::connect(address).await.expect("connect");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).max_concurrent_streams(100);
        let (send, connection) = builder.handshake(socket).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let (streams, answers, waiting) = (Vec::new(), Vec::new(), Vec::new());
        Self { send, streams, answers, waiting, connection }
    }

    /// Begins a call with the first bytes of its message.
    async fn begin(&mut self, rpc: &str, bytes: Bytes) {
        let head = http::Request::post(format!("http://kvd/kvd.v1.Kvd/{rpc}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a request");
        self.send = self.send.clone().ready().await.expect("a stream");
        let (response, mut stream) = self.send.send_request(head, false).expect("a stream");
        stream.send_data(bytes, false).expect("sent");
        self.streams.push(stream);
        self.waiting.push(response);
    }

    /// Takes the heads of answers that are there, and none of their bytes.
    async fn keep_answers(&mut self) {
        for response in self.waiting.drain(..) {
            let answered = tokio::time::timeout(Duration::from_secs(20), response).await;
            if let Ok(Ok(answer)) = answered {
                self.answers.push(answer.into_body());
            }
        }
    }
}

impl Drop for Rude {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// The five bytes before a message of that length.
fn prefix(length: u64) -> Vec<u8> {
    let length = u32::try_from(length).expect("a length");
    [&[0][..], &length.to_be_bytes()].concat()
}

/// Time for all that was sent to arrive and to be held.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(1500)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_sent_messages_stay_within_limits() {
    let attacked = Attacked::start().await;
    let mut clients = attacked.rude_clients(1 << 20).await;
    let most: Bytes = [prefix(MESSAGE), vec![7; MESSAGE as usize - 1]].concat().into();
    for client in &mut clients {
        for _ in 0..STREAMS {
            client.begin("StoreBlocks", most.clone()).await;
        }
    }
    settle().await;
    attacked.check_bound("half-sent messages").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lengths_of_messages_that_never_come_stay_within_limits() {
    let attacked = Attacked::start().await;
    let mut clients = attacked.rude_clients(1 << 20).await;
    for client in &mut clients {
        for _ in 0..STREAMS {
            client.begin("AttendStream", prefix(MESSAGE).into()).await;
        }
    }
    settle().await;
    attacked.check_bound("five-byte prefixes").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_nobody_reads_stay_within_limits() {
    let attacked = Attacked::start().await;
    // Two channels of a key become a thousand of an answer.
    let model = register(&attacked.client, "wide", one_head(2, 1024)).await;
    let sequence = attacked.client.open_sequence(model).await.expect("open");
    let n_q = (MESSAGE / 2 / (1024 * 4)) as u32;
    let queries =
        vec![v1::Query { sequence_id: sequence.0, n_q, position: Some(0), ..v1::Query::default() }];
    let q = v1::payload::Source::Inline(vec![0; n_q as usize * 8].into());
    let request = v1::AttendRequest {
        model_id: model.0,
        q_heads: 1,
        dtype: v1::DType::DtypeF32.into(),
        queries,
        q: Some(v1::Payload { source: Some(q) }),
        ..v1::AttendRequest::default()
    };
    let message = request.encode_to_vec();
    let framed: Bytes = [prefix(message.len() as u64), message].concat().into();
    // No byte of an answer may be sent.
    let mut clients = attacked.rude_clients(0).await;
    for client in &mut clients {
        for _ in 0..STREAMS {
            client.begin("AttendStream", framed.clone()).await;
        }
    }
    settle().await;
    for client in &mut clients {
        client.keep_answers().await;
    }
    assert!(clients.iter().any(|client| !client.answers.is_empty()), "none was answered");
    attacked.check_bound("unread answers").await;
}

/// Stores tokens until the daemon refuses some; how many it took, and why it took no more.
async fn fill(client: &Client, sequence: SequenceId, dim: usize) -> (u32, Option<ClientError>) {
    const TOKENS: u32 = 16_384;
    let mut start = 0;
    while start < 1 << 20 {
        if let Err(error) = client.store_chunk(rows(sequence, start, TOKENS, dim)).await {
            return (start, Some(error));
        }
        start += TOKENS;
    }
    (start, None)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_stay_within_limits() {
    let attacked = Attacked::start().await;
    let client = &attacked.client;
    let geometry = Geometry { block_tokens: 1, ..one_head(8, 8) };
    let model = register(client, "forked", geometry).await;
    let parent = client.open_sequence(model).await.expect("open");
    let mut stored = 0;
    while stored < 32_768 {
        client.store_chunk(rows(parent, stored, 8192, 8)).await.expect("a store");
        stored += 8192;
    }
    let mut forks = 0;
    let refused = loop {
        match client.fork_sequence(parent, None).await {
            Ok(_) => forks += 1,
            Err(error) => break error,
        }
        // The limit of sequences, whatever a fork takes.
        assert!(forks <= 65_536, "nothing limits forks");
    };
    assert_eq!(refused.code, Some(ErrorCode::LimitExceeded), "{refused}");
    println!("{forks} forks of {stored} blocks");
    attacked.check_bound("forks").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_one_token_stay_within_limits() {
    let attacked = Attacked::start().await;
    // What serves others has its room before.
    attacked.serves().await;
    let client = &attacked.client;
    let geometry = Geometry { block_tokens: 1, ..one_head(2, 2) };
    let model = register(client, "tiny", geometry).await;
    let mut blocks = 0;
    let refused = loop {
        let sequence = client.open_sequence(model).await.expect("open");
        let (stored, refused) = fill(client, sequence, 2).await;
        blocks += stored;
        if let Some(error) = refused {
            break error;
        }
    };
    assert_eq!(refused.code, Some(ErrorCode::PoolFull), "{refused}");
    println!("{blocks} blocks of one token: {}", refused.message);
    assert!(refused.message.contains("device.pool_slots_max"), "{refused}");
    // A refused store takes no slot: some are left for others.
    let address: Endpoint = format!("http://{}", attacked.daemon.tcp()).parse().expect("a URL");
    Client::connect(address).await.expect("others connect");
    attacked.check_bound("blocks of one token").await;
}
