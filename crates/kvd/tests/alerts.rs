//! Series that alerts read are there from the start, and move on the first cause of each.
//! `deploy/prometheus/alerts.test.yml` shows that the rules then fire.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod support;

use bytes::Bytes;
use kvd::RunningDaemon;
use kvd::metrics::{ALERT_CODES, RPCS};
use kvd_compute::{Backend, IncomingRows, RawTarget};
use kvd_core::{Extent, ModelId, Namespace};
use kvd_proto::v1::{self, kvd_client::KvdClient};
use std::collections::BTreeSet;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// A token of K or V in bytes: one head of 64 channels in f32.
const TOKEN_BYTES: usize = 64 * 4;

/// Messages of 1 MiB at most.
const SMALL_MESSAGES: [(&str, &str); 2] =
    [("server.message_bytes_max", "1 MiB"), ("limits.calibration_bytes_max", "512 KiB")];

fn page(running: &RunningDaemon) -> String {
    running.service().refresh_gauges();
    running.service().metrics().render_page()
}

/// Values of all series whose line has each of these texts.
fn values(page: &str, name: &str, labels: &[&str]) -> Vec<f64> {
    let of_name = |line: &&str| line.split(['{', ' ']).next() == Some(name);
    let lines = page.lines().filter(of_name);
    let lines = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

fn sum(running: &RunningDaemon, name: &str, labels: &[&str]) -> f64 {
    values(&page(running), name, labels).iter().sum()
}

fn answered(running: &RunningDaemon, rpc: &str, code: &str) -> f64 {
    let labels = [format!("rpc=\"{rpc}\""), format!("code=\"{code}\"")];
    sum(running, "kvd_requests_total", &labels.each_ref().map(String::as_str))
}

/// A client, a model of that codec, and a sequence of it.
struct Engine {
    rpc: KvdClient<Channel>,
    model_id: u64,
    sequence_id: u64,
}

impl Engine {
    async fn open(running: &RunningDaemon, codec: &str) -> Self {
        let mut rpc = support::rpc(running).await;
        let spec = v1::RegisterModelRequest { codec: codec.to_owned(), ..support::spec() };
        let model_id = rpc.register_model(spec).await.unwrap().into_inner().model_id;
        let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
        let sequence_id = rpc.open_sequence(open).await.unwrap().into_inner().sequence_id;
        Self { rpc, model_id, sequence_id }
    }

    /// Stores tokens whose values `value` gives by their index.
    async fn store(
        &mut self,
        start: u32,
        tokens: u32,
        value: impl Fn(usize) -> f32,
    ) -> Result<(), Status> {
        let values = (0..tokens as usize * TOKEN_BYTES / 4).map(|i| value(i).to_le_bytes());
        let rows = Bytes::from(values.flatten().collect::<Vec<u8>>());
        let payload = || v1::Payload { source: Some(v1::payload::Source::Inline(rows.clone())) };
        let sequence_id = self.sequence_id;
        let (k, v) = (Some(payload()), Some(payload()));
        let message = v1::StoreBlocksRequest { sequence_id, layer: 0, start, tokens, k, v };
        let mut answers = self.rpc.store_blocks(tokio_stream::once(message)).await?.into_inner();
        answers.message().await.map(|_| ())
    }

    async fn attend(&mut self) -> Result<(), Status> {
        self.rpc.attend(support::attend_nothing(self.model_id, self.sequence_id)).await.map(|_| ())
    }

    /// Loads as one step; the codes of the parts that failed.
    async fn load_step(&mut self, tokens: u32) -> Vec<String> {
        let side_bytes = u64::from(tokens) * TOKEN_BYTES as u64;
        let rows = |offset| Some(v1::Rows { offset, ..Default::default() });
        let (k, v) = (rows(0), rows(side_bytes));
        let sequence_id = self.sequence_id;
        let part = v1::StepPart { sequence_id, tokens, k, v, ..Default::default() };
        let (model_id, memory_bytes) = (self.model_id, 2 * side_bytes);
        let parts = vec![part];
        let step = v1::LoadStepRequest { model_id, parts, memory_bytes, ..Default::default() };
        let answer = self.rpc.load_step(step).await.unwrap().into_inner();
        answer.errors.into_iter().map(|part| part.error.unwrap().code).collect()
    }

    async fn load(&mut self, end: u32) -> Result<(), Status> {
        let sequence_id = self.sequence_id;
        let request = v1::LoadBlocksRequest { sequence_id, end, ..Default::default() };
        let mut pieces = self.rpc.load_blocks(request).await?.into_inner();
        while pieces.message().await?.is_some() {}
        Ok(())
    }
}

fn alert_rules() -> String {
    let package = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(package.join("../../deploy/prometheus/alerts.yml")).unwrap()
}

/// The error above which `KvdCodecError` fires.
fn codec_error_threshold() -> f64 {
    let rules = alert_rules();
    let (_, threshold) = rules.split_once("expr: kvd_codec_error_ratio > ").unwrap();
    threshold.lines().next().unwrap().parse().unwrap()
}

fn noise(index: usize) -> f32 {
    let bits = (index as u32).wrapping_mul(2_654_435_761);
    ((bits ^ bits >> 15).wrapping_mul(2_246_822_519) >> 8) as f32 / 8_388_608.0 - 1.0
}

fn call() -> kvd::service::CallContext {
    kvd::service::CallContext::new(Namespace::new("default").unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_alerts_read_is_there_before_anything_happens() {
    let running = support::start(&[]).await;
    let codec = "k=fp8; v=fp8; k.bound=0.5; v.bound=0.5";
    Engine::open(&running, codec).await;
    let page = page(&running);
    let alerts = alert_rules();
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = alerts.split(|c| !in_name(c));
    let names: BTreeSet<_> =
        names.filter(|name| name.starts_with("kvd_") || name.starts_with("process_")).collect();
    assert!(names.len() > 8, "{names:?}");
    for name in names {
        let found = values(&page, name, &[]);
        match name {
            // Nothing was measured: no error, which is not an error of 0.
            "kvd_codec_error_ratio" => assert!(found.is_empty(), "{found:?}"),
            "kvd_requests_total" => {
                for (rpc, code) in RPCS.iter().flat_map(|rpc| ALERT_CODES.map(|code| (rpc, code))) {
                    let labels = format!("{{rpc=\"{rpc}\",code=\"{code}\"}} 0\n");
                    assert!(page.contains(&format!("{name}{labels}")), "{labels}");
                }
            }
            name if name.ends_with("_total") => {
                assert!(!found.is_empty() && found.iter().all(|value| *value == 0.0), "{name}");
            }
            name => assert!(!found.is_empty(), "{name}"),
        }
    }
    assert_eq!(values(&page, "kvd_ready", &[]), [1.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_is_counted_from_its_first_refusal_and_blocks_that_wait_for_room() {
    let running = support::start(&[("device.pool_bytes", "1 MiB")]).await;
    let mut engine = Engine::open(&running, "kivi-4; sink=0; recent=0").await;
    // Raw rows of 2,048 tokens take the pool.
    engine.store(0, 2048, noise).await.unwrap();
    assert!(sum(&running, "kvd_pack_deferred_total", &["codec="]) > 0.0);
    let used = sum(&running, "kvd_pool_used_bytes", &["device=\"0\"", "tier=\"host\""]);
    assert!(used > 0.9 * sum(&running, "kvd_pool_capacity_bytes", &[]), "{used}");
    let [other] = [Engine::open(&running, "kivi-4; sink=0; recent=0").await];
    let mut other = other;
    let refused = other.store(0, 2048, noise).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert_eq!(answered(&running, "StoreBlocks", "POOL_FULL"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_counted_from_its_first_refusal_and_long_waits_are_seen() {
    let running = support::start(&[("device.queue_jobs_max", "1")]).await;
    let mut engine = Engine::open(&running, "raw").await;
    let gate = support::occupy(&running).await;
    let mut rpc = engine.rpc.clone();
    let attend = support::attend_nothing(engine.model_id, engine.sequence_id);
    let waiting = tokio::spawn(async move { rpc.attend(attend).await.map(|_| ()) });
    support::until(|| running.service().first_worker().queued_jobs() == 1).await;
    let labels = ["device=\"0\"", "kind=\"attend\""];
    assert_eq!(sum(&running, "kvd_queue_depth", &labels), 1.0);
    assert!(sum(&running, "kvd_inflight_bytes", &[]) > 0.0);
    engine.attend().await.unwrap_err();
    assert_eq!(answered(&running, "Attend", "QUEUE_FULL"), 1.0);
    tokio::time::sleep(Duration::from_millis(150)).await;
    drop(gate);
    waiting.await.unwrap().unwrap();
    let bucket = |bound| {
        let bound = format!("le=\"{bound}\"");
        sum(&running, "kvd_queue_seconds_bucket", &["kind=\"attend\"", &bound])
    };
    assert_eq!((bucket("0.1"), bucket("+Inf")), (0.0, 1.0));
    assert!(sum(&running, "kvd_device_busy_seconds_total", &["kind=\"other\""]) > 0.1);
    assert_eq!(sum(&running, "kvd_inflight_bytes", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_whose_caller_left_are_counted_by_when() {
    let running = support::start(&[]).await;
    let engine = Engine::open(&running, "raw").await;
    let gate = support::occupy(&running).await;
    let mut rpc = engine.rpc.clone();
    let attend = support::attend_nothing(engine.model_id, engine.sequence_id);
    let waiting = tokio::spawn(async move { rpc.attend(attend).await.map(|_| ()) });
    support::until(|| running.service().first_worker().queued_jobs() == 1).await;
    waiting.abort();
    support::until(|| answered(&running, "Attend", "CANCELLED") == 1.0).await;
    drop(gate);
    let abandoned = |when| sum(&running, "kvd_abandoned_jobs_total", &[when]);
    support::until(|| abandoned("when=\"before\"") == 1.0).await;
    assert_eq!(abandoned("when=\"during\""), 0.0);
    // This one's caller leaves while it runs.
    let (worker, (begin, begun)) =
        (running.service().first_worker().clone(), tokio::sync::oneshot::channel());
    let (go, gate) = std::sync::mpsc::sync_channel::<()>(1);
    let leaving = tokio::spawn(async move {
        let work = move |_: &mut dyn Backend| {
            let _ = begin.send(());
            let _ = gate.recv();
            Ok(())
        };
        worker.run_closure(&call(), work).await
    });
    begun.await.unwrap();
    leaving.abort();
    assert!(leaving.await.is_err());
    drop(go);
    support::until(|| abandoned("when=\"during\"") == 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_fails_is_counted_from_its_first_answer_and_ends_readiness() {
    let running = support::start(&[]).await;
    let mut engine = Engine::open(&running, "raw").await;
    let worker = running.service().first_worker().clone();
    let panic = |_: &mut dyn Backend| -> Result<(), kvd::service::ServiceError> {
        panic!("the device is gone")
    };
    worker.run_closure(&call(), panic).await.unwrap_err();
    support::until(|| worker.has_failed()).await;
    engine.attend().await.unwrap_err();
    assert_eq!(answered(&running, "Attend", "DEVICE_FAILED"), 1.0);
    assert_eq!(sum(&running, "kvd_ready", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_page_is_counted_from_its_first_answer() {
    let running = support::start(&[]).await;
    let mut engine = Engine::open(&running, "fp8; sink=0; recent=0").await;
    engine.store(0, 64, noise).await.unwrap();
    engine.load(64).await.unwrap();
    // Rows over the pages, which lie at the end of the arena.
    let capacity = running.service().pool_stats().capacity_bytes;
    let (model, tokens) = (ModelId(engine.model_id), 256);
    let rows = Bytes::from(vec![0x3f; tokens as usize * TOKEN_BYTES]);
    let destroy = move |backend: &mut dyn Backend| {
        let rows = IncomingRows { tokens, k: rows.clone(), v: rows };
        let len = 2 * u64::from(tokens) * TOKEN_BYTES as u64;
        let extent = Extent { offset: capacity - len, len };
        let to = RawTarget { extent, capacity_rows: tokens, first_row: 0 };
        Ok(backend.write(model, &rows, 0, tokens, to)?)
    };
    running.service().first_worker().run_closure(&call(), destroy).await.unwrap();
    let error = engine.load(64).await.unwrap_err();
    assert_eq!(error.code(), Code::DataLoss, "{error}");
    assert_eq!(answered(&running, "LoadBlocks", "CORRUPT_PAGE"), 1.0);
    // A step that loads it is answered, and its part alone fails.
    assert_eq!(engine.load_step(64).await, ["CORRUPT_PAGE"]);
    assert_eq!(answered(&running, "LoadStep", "CORRUPT_PAGE"), 1.0);
    assert_eq!(answered(&running, "LoadStep", "OK"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_a_codec_cannot_take_or_that_are_over_their_bound_are_counted() {
    let running = support::start(&[]).await;
    let codec = "k=uniform(b=1,g=64,axis=token); v=fp8; sink=0; recent=0";
    let mut coarse = Engine::open(&running, codec).await;
    // Beyond the f16 of a group's minimum and step.
    coarse.store(0, 64, |index| 1e30 * noise(index)).await.unwrap();
    assert!(sum(&running, "kvd_fallback_pages_total", &[]) > 0.0);
    assert!(values(&page(&running), "kvd_error_bound_ratio", &[]).is_empty());
    drop(coarse);
    let running = support::start(&[]).await;
    let mut coarse = Engine::open(&running, codec).await;
    // One loud channel: two levels for a token are far from all others.
    coarse.store(0, 1024, |i| if i % 64 == 0 { 9.0 } else { noise(i) }).await.unwrap();
    let error = |side| values(&page(&running), "kvd_codec_error_ratio", &[side]);
    let k = error("side=\"k\"");
    assert!(k.len() == 1 && k[0] > codec_error_threshold(), "{k:?}");
    let running = support::start(&[]).await;
    let mut bounded = Engine::open(&running, &format!("{codec}; k.bound=0.1")).await;
    bounded.store(0, 1024, noise).await.unwrap();
    let over = |side| sum(&running, "kvd_over_bound_pages_total", &[side]);
    assert!(over("side=\"k\"") > 0.0 && over("side=\"v\"") == 0.0);
    // A series for the side that has a bound, and none for the other.
    let bound = |side| values(&page(&running), "kvd_error_bound_ratio", &[side]);
    assert!(bound("side=\"v\"").is_empty());
    assert!((bound("side=\"k\"")[0] - 0.1).abs() < 1e-6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ratios_come_with_what_they_are_of_and_go_with_it() {
    let running = support::start(&[]).await;
    let mut engine = Engine::open(&running, "fp8; sink=0; recent=0").await;
    let of = |name| values(&page(&running), name, &[]);
    for name in ["kvd_compression_ratio", "kvd_packed_bytes_per_value"] {
        assert!(of(name).is_empty(), "{name}");
    }
    engine.store(0, 128, noise).await.unwrap();
    engine.load(128).await.unwrap();
    let bytes = 128.0 * 2.0 * TOKEN_BYTES as f64;
    assert_eq!(of("kvd_stored_logical_bytes_total"), [bytes]);
    assert_eq!(of("kvd_loaded_logical_bytes_total"), [bytes]);
    assert_eq!(of("kvd_logical_bytes"), [bytes]);
    let held = of("kvd_held_bytes")[0];
    assert_eq!(of("kvd_saved_bytes"), [bytes - held]);
    assert!((of("kvd_compression_ratio")[0] - bytes / held).abs() < 1e-9);
    assert!((of("kvd_packed_bytes_per_value")[0] - 1.0).abs() < 0.05);
    let close = v1::CloseSequenceRequest { sequence_id: engine.sequence_id, ..Default::default() };
    engine.rpc.close_sequence(close).await.unwrap();
    for name in ["kvd_compression_ratio", "kvd_packed_bytes_per_value"] {
        assert!(of(name).is_empty(), "{name}");
    }
    assert_eq!(of("kvd_saved_bytes"), [0.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_grpc_itself_refuses_is_counted_by_reason() {
    let running = support::start(&SMALL_MESSAGES).await;
    let refused = |reason| {
        let reason = format!("reason=\"{reason}\"");
        sum(&running, "kvd_transport_refusals_total", &[&reason])
    };
    let mut grpc = tonic::client::Grpc::new(support::channel(&running).await);
    // The codec of any message: bytes that are no `GetServerInfo` and no `RegisterModel`.
    let codec = tonic_prost::ProstCodec::<v1::Payload, v1::Payload>::default;
    let unknown = http::uri::PathAndQuery::from_static("/kvd.v1.Kvd/Nothing");
    grpc.ready().await.unwrap();
    let payload = |len| {
        let bytes = v1::payload::Source::Inline(vec![0xff; len].into());
        tonic::Request::new(v1::Payload { source: Some(bytes) })
    };
    let error = grpc.unary(payload(1), unknown, codec()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert_eq!(refused("unimplemented"), 1.0);
    // Its first field is a text, which these bytes are not.
    let register = http::uri::PathAndQuery::from_static("/kvd.v1.Kvd/RegisterModel");
    grpc.ready().await.unwrap();
    let error = grpc.unary(payload(4), register, codec()).await.unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{error}");
    assert_eq!(refused("bad_message"), 1.0);
    let mut engine = Engine::open(&running, "raw").await;
    let error = engine.store(0, 4096, noise).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    let calibration = Bytes::from(vec![0; 2 << 20]);
    let large = v1::RegisterModelRequest { calibration, ..support::spec() };
    let error = engine.rpc.register_model(large).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    assert_eq!(refused("message_too_large"), 2.0);
    // kvd's own refusals are not gRPC's.
    let gone = v1::CloseSequenceRequest { sequence_id: 1 << 40, ..Default::default() };
    engine.rpc.close_sequence(gone).await.unwrap_err();
    assert_eq!(sum(&running, "kvd_transport_refusals_total", &[]), 4.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_and_streams_are_counted_while_they_are_open() {
    let running = support::start(&[]).await;
    let open = |name, label| sum(&running, name, &[label]);
    assert_eq!(open("kvd_connections", "listener=\"tcp\""), 0.0);
    let mut rpc = support::rpc(&running).await;
    let (requests, receiver) = tokio::sync::mpsc::channel::<v1::AttendRequest>(1);
    let receiver = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let answers = rpc.attend_stream(receiver).await.unwrap();
    support::until(|| open("kvd_open_streams", "rpc=\"AttendStream\"") == 1.0).await;
    assert_eq!(open("kvd_connections", "listener=\"tcp\""), 1.0);
    drop((requests, answers));
    support::until(|| open("kvd_open_streams", "rpc=\"AttendStream\"") == 0.0).await;
    drop(rpc);
    support::until(|| open("kvd_connections", "listener=\"tcp\"") == 0.0).await;
}
