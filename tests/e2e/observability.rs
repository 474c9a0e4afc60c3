//! The view of an operator and of a generic gRPC tool: health, reflection, readiness, metrics.

use kvd::metrics::Metric;
use kvd_client::{ErrorCode, LayerIndex, LoadRange, SequenceId, StoredBytes};
use kvd_tests::metrics::MetricsPage;
use kvd_tests::{ModelShape, TestDaemon, TestEngine, TestRng, assert_refused, daemon, engine};
use std::collections::BTreeSet;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

const SEED: u64 = 20_240_607;

async fn metrics(daemon: &TestDaemon) -> MetricsPage {
    let (status, text) = daemon.admin_page("/metrics").await;
    assert_eq!(status, 200);
    MetricsPage::parse_page(&text)
}

/// A model with packed and raw blocks, each kind of call made once.
async fn scenario(daemon: &TestDaemon, name: &str, codec: &str) -> TestEngine {
    let mut rng = TestRng::new(SEED);
    let engine =
        engine(daemon).with_name(name).register_model(ModelShape::small_shape(), codec).await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, 200, &mut rng).await;
    let question = engine.random_question(&conversation, 2, &mut rng);
    engine.ask_question(&question).await;
    engine.load_layer(&conversation, 0).await;
    engine
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_serving() {
    let daemon = daemon().start().await;
    let mut health = HealthClient::new(daemon.channel().await);
    for service in ["", "kvd.v1.Kvd"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer = health.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
    }
}

async fn reflect(daemon: &TestDaemon, ask: MessageRequest) -> ServerReflectionResponse {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
    let mut client = ServerReflectionClient::new(daemon.channel().await);
    let answers = client.server_reflection_info(tokio_stream::once(request)).await;
    answers.expect("reflect").into_inner().message().await.expect("an answer").expect("one")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_service_and_describes_it() {
    let daemon = daemon().start().await;
    let answer = reflect(&daemon, MessageRequest::ListServices(String::new())).await;
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}");
    };
    let names: BTreeSet<_> = list.service.into_iter().map(|service| service.name).collect();
    for name in ["kvd.v1.Kvd", "grpc.health.v1.Health"] {
        assert!(names.contains(name), "{names:?}");
    }
    let symbol = "kvd.v1.Kvd.StoreBlocks".to_owned();
    let answer = reflect(&daemon, MessageRequest::FileContainingSymbol(symbol)).await;
    let Some(MessageResponse::FileDescriptorResponse(files)) = answer.message_response else {
        panic!("{answer:?}");
    };
    let holds = |text: &str| {
        let mut files = files.file_descriptor_proto.iter();
        files.any(|file| file.windows(text.len()).any(|part| part == text.as_bytes()))
    };
    assert!(holds("StoreBlocksRequest") && holds("AttendRequest"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_port_answers() {
    let daemon = daemon().start().await;
    assert_eq!(daemon.admin_page("/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(daemon.admin_page("/readyz").await, (200, "ready\n".to_owned()));
    assert_eq!(daemon.admin_page("/nothing").await.0, 404);
    assert_eq!(metrics(&daemon).await.sum_samples("kvd_ready", &[]), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_appears_and_no_other() {
    let quotas = "[\"default: sequences=99\"]";
    let daemon = daemon().with_setting("namespaces.quotas", quotas).start().await;
    scenario(&daemon, "model", "kvcomp; k.bound=0.9; v.bound=0.9").await;
    let page = metrics(&daemon).await;
    let known: BTreeSet<_> = Metric::ALL.iter().map(|metric| metric.name().to_owned()).collect();
    let of_process = |name: &&String| name.starts_with("process_");
    assert!(page.names.iter().filter(of_process).count() > 4, "{:?}", page.names);
    let ours: BTreeSet<_> = page.names.iter().filter(|name| !of_process(name)).cloned().collect();
    assert_eq!(ours, known);
    // Each name has samples, of a histogram those of its parts.
    for name in &known {
        let has = |suffix: &str| {
            let full = format!("{name}{suffix}");
            page.samples.keys().any(|key| key.split('{').next() == Some(&full))
        };
        assert!(has("") || has("_count"), "{name} has no samples");
    }
}

fn bits_per_value(stored: &StoredBytes) -> f64 {
    stored.packed_bytes as f64 * 8.0 / stored.packed_values as f64
}

#[track_caller]
fn assert_close(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} is not {want}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_say_what_the_api_says() {
    let daemon = daemon().start().await;
    for (name, codec) in [("a", "fp8"), ("b", "kvcomp"), ("c", "vecinfer-2")] {
        let engine = scenario(&daemon, name, codec).await;
        let page = metrics(&daemon).await;
        let described = engine.client.describe_model(engine.model).await.unwrap();
        let stats = engine.client.stats().await.unwrap();
        let model = described.model.unwrap();
        assert!(stats.models.contains(&model));
        let stored = model.stored.unwrap();
        let label = format!("model=\"{name}\"");
        let of = |metric: Metric| page.sum_samples(metric.name(), &[&label]);
        assert!(of(Metric::PackedBytesPerValue) > 0.0);
        assert_close(8.0 * of(Metric::PackedBytesPerValue), bits_per_value(&stored));
        // 200 tokens of 2 heads with 64 + 64 channels, all of them somewhere.
        assert_eq!(stored.packed_values + stored.raw_values, 200 * 2 * 128);
        let held = (stored.packed_bytes + stored.raw_bytes) as f64;
        let logical = f64::from(200 * 2 * 128 * 4);
        assert_close(of(Metric::CompressionRatio), logical / held);
        assert_eq!(of(Metric::HeldBytes), held);
        assert_eq!(of(Metric::LogicalBytes), logical);
        assert_eq!(of(Metric::SavedBytes), logical - held);
        assert_eq!(of(Metric::StoredLogicalBytesTotal), logical);
        assert_eq!(of(Metric::LoadedLogicalBytesTotal), logical);
        let pages = stored.packed_key_bytes + stored.packed_value_bytes;
        assert_close(of(Metric::PackedBytes), pages as f64);
        assert_close(of(Metric::PackedPartBytes), pages as f64);
        // Held bytes are rounded to granules of 64 bytes.
        let blocks = stored.packed_values / (16 * 2 * 128);
        assert!((pages..pages + 64 * blocks).contains(&stored.packed_bytes));
        let once = (model.calibration_bytes + model.table_bytes) as f64;
        assert_close(of(Metric::ModelOnceBytes), once);
        assert_close(of(Metric::CodecError), model.sampled_error_k + model.sampled_error_v);
        assert!(model.sampled_error_k > 0.0 && model.sampled_error_v > 0.0);
        assert_eq!(of(Metric::Sequences), 1.0);
        assert_eq!(of(Metric::StoredLayerTokensTotal), 200.0);
        assert_eq!(of(Metric::AttendedLayerQueryTokensTotal), 2.0);
        assert_eq!(of(Metric::ModelLayers), 1.0);
        let pool = daemon.pool_stats().await;
        assert_eq!(page.sum_samples(Metric::PoolUsedBytes.name(), &[]), pool.used_bytes as f64);
        assert_eq!(
            page.sum_samples(Metric::PoolCapacityBytes.name(), &[]),
            pool.capacity_bytes as f64
        );
    }
    assert_eq!(metrics(&daemon).await.sum_samples(Metric::Models.name(), &[]), 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_counted_by_rpc_and_code() {
    let daemon = daemon().start().await;
    let engine = scenario(&daemon, "model", "raw").await;
    let nowhere = SequenceId(4242);
    let range =
        LoadRange { sequence: nowhere, layer: LayerIndex(0), start: 0, end: 1, dtype: None };
    assert_refused(engine.client.load_rows(range).await, ErrorCode::UnknownSequence, "4242");
    let page = metrics(&daemon).await;
    let count = |rpc: &str, code: &str| {
        let (rpc, code) = (format!("rpc=\"{rpc}\""), format!("code=\"{code}\""));
        page.sum_samples(Metric::RequestsTotal.name(), &[&rpc, &code])
    };
    assert_eq!(count("RegisterModel", "OK"), 1.0);
    assert_eq!(count("StoreBlocks", "OK"), 1.0);
    assert_eq!(count("Attend", "OK"), 1.0);
    assert_eq!(count("LoadBlocks", "UNKNOWN_SEQUENCE"), 1.0);
    assert_eq!(count("Attend", "UNKNOWN_SEQUENCE"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_levels_of_a_model_that_is_gone_are_zero() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(ModelShape::small_shape(), "fp8").await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, 100, &mut rng).await;
    assert!(metrics(&daemon).await.sum_samples(Metric::PackedBytes.name(), &[]) > 0.0);
    engine.close_sequence(conversation).await;
    engine.client.unregister_model(engine.model).await.unwrap();
    let page = metrics(&daemon).await;
    for metric in [Metric::PackedBytes, Metric::RawBytes, Metric::SavedBytes, Metric::Models] {
        assert_eq!(page.sum_samples(metric.name(), &[]), 0.0, "{metric:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_start_has_a_boot_id_of_its_own() {
    let (first, second) = (daemon().start().await, daemon().start().await);
    let info = first.client().await.server_info().await.unwrap();
    assert_ne!(info.boot_id, second.client().await.server_info().await.unwrap().boot_id);
    assert_eq!(info.boot_id, first.client().await.stats().await.unwrap().boot_id);
    assert_eq!(info.pool_capacity_bytes, 64 << 20);
    assert_eq!(info.block_tokens_default, 64);
    let label = format!("boot_id=\"{}\"", info.boot_id);
    assert_eq!(metrics(&first).await.sum_samples(Metric::BuildInfo.name(), &[&label]), 1.0);
}
