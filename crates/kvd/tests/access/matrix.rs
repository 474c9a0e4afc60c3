//! The matrix of principal, namespace and rpc: who may is served or told of its arguments, and who
//! may not is refused before anything of its request is looked at.

use super::support::channel;
use super::{Guarded, principal};
use bytes::{Buf, BufMut, Bytes};
use http::uri::PathAndQuery;
use kvd_core::ErrorCode;
use kvd_proto::{NAMESPACE_KEY, rpc_names};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Messages that are bytes: every rpc is asked with an empty one.
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let bytes = from.remaining();
        Ok(Some(from.copy_to_bytes(bytes)))
    }
}

/// A cell of the matrix.
struct Cell<'a> {
    token: Option<&'a str>,
    namespace: &'a str,
    rpc: &'a str,
}

/// Asks a cell of the matrix: nothing comes of it, or an error.
async fn call_cell(channel: &Channel, cell: &Cell<'_>) -> Result<(), Status> {
    let mut request = Request::new(tokio_stream::once(Bytes::new()));
    request.metadata_mut().insert(NAMESPACE_KEY, cell.namespace.parse().unwrap());
    if let Some(token) = cell.token {
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    let path = PathAndQuery::try_from(format!("/kvd.v1.Kvd/{}", cell.rpc)).unwrap();
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let opened = grpc.streaming(request, path, RawCodec).await;
    // Streams that are held open answer once.
    opened?.into_inner().message().await.map(drop)
}

/// Rpcs that ask for no namespace of their own.
const OF_DAEMON: [&str; 4] =
    ["GetServerInfo", "ListCodecs", "ListNamespaces", "SetNamespaceQuotas"];
/// Rpcs of who only operates, beside [`OF_DAEMON`].
const OPERATED: [&str; 14] = [
    "GetStats",
    "DescribeModel",
    "ListModels",
    "UnregisterModel",
    "CloseSequence",
    "DescribeSequence",
    "ListSequences",
    "CloseSession",
    "ListSessions",
    "UnpinBlocks",
    "DropBlocks",
    "WatchBlocks",
    "ListNamespaces",
    "SetNamespaceQuotas",
];
/// Rpcs that no engine may call.
const NOT_USED: [&str; 2] = ["ListNamespaces", "SetNamespaceQuotas"];
/// Rpcs of who only watches.
const WATCHED: [&str; 3] = ["GetServerInfo", "ListCodecs", "GetStats"];

/// The refusal that a cell must get.
fn expected(name: Option<&str>, cell: &Cell<'_>) -> Option<ErrorCode> {
    let (rpc, is_of_daemon) = (cell.rpc, OF_DAEMON.contains(&cell.rpc));
    let is_role = match name {
        Some("a-engine" | "both") => !NOT_USED.contains(&rpc),
        Some("a-operator") => is_of_daemon || OPERATED.contains(&rpc),
        Some("watcher") => WATCHED.contains(&rpc),
        _ => return Some(ErrorCode::Unauthenticated),
    };
    if !is_role {
        return Some(ErrorCode::PermissionDenied);
    }
    let is_own = match name {
        Some("both" | "watcher") => true,
        _ => cell.namespace == "a",
    };
    (!is_own && !is_of_daemon).then_some(ErrorCode::NamespaceDenied)
}

/// Codes with which access is refused.
const REFUSALS: [ErrorCode; 3] =
    [ErrorCode::Unauthenticated, ErrorCode::PermissionDenied, ErrorCode::NamespaceDenied];

fn principals() -> String {
    principal("a-engine", &["a"], &["use"])
        + &principal("a-operator", &["a"], &["operate"])
        + &principal("both", &["a", "b"], &["use"])
        + &principal("watcher", &["*"], &["read_metrics"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_forbidden_cell_is_refused_and_every_other_is_not() {
    let guarded = Guarded::start(&principals(), &[]).await;
    let channel = channel(&guarded.running).await;
    let shown = [Some("a-engine"), Some("a-operator"), Some("both"), Some("watcher")];
    let shown = shown.into_iter().chain([Some("nobody"), None]);
    let (mut cells, mut refused) = (0, 0);
    for token in shown {
        for namespace in ["a", "b"] {
            for rpc in rpc_names() {
                let cell = Cell { token, namespace, rpc };
                let answer = call_cell(&channel, &cell).await;
                let code = answer.as_ref().err().and_then(kvd_proto::error_code);
                let code = code.filter(|code| REFUSALS.contains(code));
                assert_eq!(code, expected(token, &cell), "{token:?} {namespace} {rpc}: {answer:?}");
                cells += 1;
                refused += usize::from(code.is_some());
            }
        }
    }
    // Six callers, two namespaces, all rpcs.
    assert_eq!(cells, 6 * 2 * rpc_names().count());
    let page = guarded.metrics();
    let counted: f64 = ["unauthenticated", "role", "namespace"]
        .map(|reason| {
            let line = format!("kvd_access_refusals_total{{reason=\"{reason}\"}} ");
            let value = page.lines().find_map(|text| text.strip_prefix(&line)).unwrap();
            value.parse::<f64>().unwrap()
        })
        .iter()
        .sum();
    assert_eq!(counted, refused as f64, "{page}");
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_say_what_to_do_and_name_no_token() {
    let guarded = Guarded::start(&principals(), &[]).await;
    let channel = channel(&guarded.running).await;
    let attend = |token, namespace| Cell { token, namespace, rpc: "Attend" };
    for (cell, code, part) in [
        (attend(None, "a"), Code::Unauthenticated, "authorization: Bearer TOKEN"),
        (attend(Some("stolen"), "a"), Code::Unauthenticated, "rotated"),
        (attend(Some("a-engine"), "b"), Code::PermissionDenied, "principal a-engine may not use"),
        (attend(Some("a-operator"), "a"), Code::PermissionDenied, "Attend needs use"),
    ] {
        let status = call_cell(&channel, &cell).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(part), "{status:?}");
        assert!(!status.message().contains("stolen"), "{status:?}");
    }
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_open_and_reflection_is_not() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    let guarded = Guarded::start(&principals(), &[]).await;
    let channel = channel(&guarded.running).await;
    let asked = HealthCheckRequest { service: String::new() };
    HealthClient::new(channel.clone()).check(asked).await.unwrap();
    let asked = tokio_stream::once(ServerReflectionRequest::default());
    let refused = ServerReflectionClient::new(channel).server_reflection_info(asked).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unauthenticated);
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_mended_or_broken_is_seen_and_a_removed_principal_is_out_at_once() {
    let both = principal("old", &["a"], &["use"]) + &principal("kept", &["a"], &["use"]);
    let guarded = Guarded::start(&both, &[]).await;
    let channel = channel(&guarded.running).await;
    let info = |token| Cell { token: Some(token), namespace: "a", rpc: "ListModels" };
    call_cell(&channel, &info("old")).await.unwrap();
    // A broken file changes nothing, and is counted.
    let file = guarded.path("principals.toml");
    std::fs::write(&file, "[[principals]]\nname = 1").unwrap();
    guarded.running.file_reload().notify_one();
    let failed = "kvd_file_reloads_total{files=\"principals\",result=\"failed\"} 1";
    super::support::until(|| guarded.metrics().contains(failed)).await;
    call_cell(&channel, &info("old")).await.unwrap();
    std::fs::write(&file, principal("kept", &["a"], &["use"])).unwrap();
    guarded.running.file_reload().notify_one();
    let ok = "kvd_file_reloads_total{files=\"principals\",result=\"ok\"} 1";
    super::support::until(|| guarded.metrics().contains(ok)).await;
    let refused = call_cell(&channel, &info("old")).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    call_cell(&channel, &info("kept")).await.unwrap();
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_stream_ends_with_the_right_of_its_principal_and_others_go_on() {
    use kvd_proto::v1::{HoldSessionRequest, HoldSessionResponse, kvd_client::KvdClient};
    let both = principal("old", &["a"], &["use"]) + &principal("kept", &["a"], &["use"]);
    let guarded = Guarded::start(&both, &[]).await;
    let channel = channel(&guarded.running).await;
    let hold = async |token: &str| -> tonic::Streaming<HoldSessionResponse> {
        let hold = HoldSessionRequest { name: token.to_owned(), ..Default::default() };
        let mut request = Request::new(hold);
        request.metadata_mut().insert(NAMESPACE_KEY, "a".parse().unwrap());
        let shown = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", shown);
        let held = KvdClient::new(channel.clone()).hold_session(request).await;
        let mut held = held.unwrap().into_inner();
        held.message().await.unwrap().unwrap();
        held
    };
    let (mut old, mut kept) = (hold("old").await, hold("kept").await);
    let file = guarded.path("principals.toml");
    std::fs::write(&file, principal("kept", &["a"], &["use", "operate"])).unwrap();
    guarded.running.file_reload().notify_one();
    let ended = old.message().await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&ended), Some(ErrorCode::Unauthenticated), "{ended:?}");
    assert!(ended.message().contains("removed"), "{ended:?}");
    // It holds nothing any more; the other is held, until it may no more use this namespace.
    super::support::until(|| {
        guarded
            .running
            .service()
            .metrics()
            .render_page()
            .contains("kvd_session_ends_total{reason=\"expired\"} 1")
    })
    .await;
    let waited = tokio::time::timeout(std::time::Duration::from_millis(50), kept.message()).await;
    assert!(waited.is_err(), "{waited:?}");
    std::fs::write(&file, principal("kept", &["b"], &["use"])).unwrap();
    guarded.running.file_reload().notify_one();
    let ended = kept.message().await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&ended), Some(ErrorCode::NamespaceDenied), "{ended:?}");
    guarded.running.drain().await;
}
