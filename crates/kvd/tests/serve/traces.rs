//! Traces of calls, as a collector gets them, and the trace's id in lines of the log.

use super::process::{Process, kvd, refused};
use kvd_proto::v1;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span, span::SpanKind};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa01a902b7";
const PATIENCE: Duration = Duration::from_secs(30);

/// A collector: it hands on what it is sent.
struct Collector(mpsc::Sender<ResourceSpans>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for spans in request.into_inner().resource_spans {
            // The test may have ended.
            let _ = self.0.try_send(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn start_collector() -> (String, mpsc::Receiver<ResourceSpans>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let (sent, spans) = mpsc::channel(256);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = TraceServiceServer::new(Collector(sent));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    (endpoint, spans)
}

type Kvd = v1::kvd_client::KvdClient<Channel>;

async fn connect(daemon: &Process) -> Kvd {
    let channel = Channel::from_shared(format!("http://{}", daemon.tcp())).expect("an address");
    Kvd::new(channel.connect().await.expect("connect"))
}

/// Asks to open a sequence of a model that is not there, as a part of the caller's trace.
async fn ask_in_trace(rpc: &mut Kvd, sampled: bool) -> Status {
    let mut request = Request::new(v1::OpenSequenceRequest { model_id: 7, ..Default::default() });
    let parent = format!("00-{TRACE}-{CALLER}-0{}", u8::from(sampled));
    request.metadata_mut().insert("traceparent", parent.parse().expect("ASCII"));
    rpc.open_sequence(request).await.expect_err("no such model")
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|found| found.value.as_ref()?.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{key}: {other:?}"),
    }
}

fn count(attributes: &[KeyValue], key: &str) -> i64 {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|found| found.value.as_ref()?.value.as_ref()) {
        Some(Value::IntValue(count)) => *count,
        other => panic!("{key}: {other:?}"),
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All spans until the daemon has ended.
async fn drain_spans(daemon: Process, mut spans: mpsc::Receiver<ResourceSpans>) -> Vec<Span> {
    daemon.signal("TERM");
    let ended = tokio::task::spawn_blocking(|| daemon.wait()).await.expect("wait");
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    let mut all = Vec::new();
    while let Ok(sent) = spans.try_recv() {
        let resource = sent.resource.expect("a resource");
        assert_eq!(text(&resource.attributes, "service.name"), "kvd");
        all.extend(sent.scope_spans.into_iter().flat_map(|scope| scope.spans));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_children_of_their_callers_spans() {
    let (endpoint, spans) = start_collector().await;
    let endpoint = format!("traces.endpoint={endpoint}");
    // Calls of their own are not traced; whose caller is, are.
    let daemon = Process::start(&["--set", &endpoint, "--set", "traces.sample_ratio=0"]);
    super::assert_serves(&daemon.client().await).await;
    let mut rpc = connect(&daemon).await;
    ask_in_trace(&mut rpc, true).await;
    ask_in_trace(&mut rpc, false).await;
    let spans = drain_spans(daemon, spans).await;
    let [span] = &spans[..] else { panic!("{spans:#?}") };
    assert_eq!(
        (to_hex(&span.trace_id), to_hex(&span.parent_span_id)),
        (TRACE.into(), CALLER.into())
    );
    assert_eq!((&span.name[..], span.kind), ("OpenSequence", SpanKind::Server as i32));
    assert_eq!(text(&span.attributes, "code"), "UNKNOWN_MODEL");
    assert_eq!(text(&span.attributes, "namespace"), "default");
    assert_eq!(span.status.as_ref().expect("a status").code, 2, "an error");
    assert!(span.end_time_unix_nano > span.start_time_unix_nano);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_is_traced_where_the_ratio_is_one_with_its_time_on_the_device() {
    let began = Instant::now();
    let (endpoint, spans) = start_collector().await;
    let endpoint = format!("traces.endpoint={endpoint}");
    let daemon = Process::start(&["--set", &endpoint, "--set", "traces.sample_ratio=1"]);
    super::assert_serves(&daemon.client().await).await;
    let spans = drain_spans(daemon, spans).await;
    let named = |name: &str| {
        let found = spans.iter().find(|span| span.name == name);
        found.unwrap_or_else(|| panic!("no {name}: {spans:#?}"))
    };
    for name in ["StoreBlocks", "Attend"] {
        let span = named(name);
        assert!(span.parent_span_id.is_empty(), "{span:?}");
        let device_us = count(&span.attributes, "device_us");
        // A span may end while the device worker still waits for a core to say this.
        let most_us = began.elapsed().as_micros();
        assert!((1..most_us).contains(&u128::try_from(device_us).expect("a time")), "{span:?}");
        assert!(span.attributes.iter().any(|attribute| attribute.key == "sequence"), "{span:?}");
    }
    assert!(count(&named("StoreBlocks").attributes, "queue_us") >= 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_not_there_costs_no_call_and_no_exit() {
    // A port that nobody listens at.
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("traces.endpoint=http://{}", free.local_addr().expect("bound"));
    drop(free);
    let daemon = Process::start(&["--set", &endpoint, "--set", "traces.sample_ratio=1"]);
    let client = daemon.client().await;
    for _ in 0..3000 {
        client.server_info().await.expect("served");
    }
    super::assert_serves(&client).await;
    daemon.signal("TERM");
    let ended = tokio::task::spawn_blocking(|| daemon.wait());
    let ended = tokio::time::timeout(PATIENCE, ended).await.expect("in time").expect("wait");
    assert_eq!(ended.code, Some(0), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_of_a_call_have_the_trace_of_its_caller_without_a_collector() {
    let filter = "log.filter=info,kvd::transport::measure=debug";
    let daemon = Process::start(&["--set", filter]);
    ask_in_trace(&mut connect(&daemon).await, true).await;
    daemon.signal("TERM");
    let log = tokio::task::spawn_blocking(|| daemon.wait()).await.expect("wait").log;
    let line = log.lines().find(|line| line.contains("request refused")).expect("a line");
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["spans"][0]["trace_id"], TRACE, "{line}");
}

#[test]
fn what_is_no_collector_is_refused_by_name() {
    for (setting, key) in [
        ("traces.endpoint=localhost:4317", "traces.endpoint"),
        ("traces.sample_ratio=2", "traces.sample_ratio"),
    ] {
        let mut command = kvd();
        command.args(["serve", "--set", setting]);
        let (code, said) = refused(command);
        assert_eq!(code, Some(64), "{said}");
        assert!(said.contains(key), "{said}");
    }
}
