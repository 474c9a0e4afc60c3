//! Requests that cannot be served: each has its code and says what is wrong, nothing changes, and
//! the daemon serves on.

use bytes::Bytes;
use kvd_client::{
    AttendBatch, AttendQuery, ClientError, DType, ErrorCode, LayerIndex, LoadRange, ModelId,
    ModelSpec, SequenceId, StoreChunk,
};
use kvd_proto::v1;
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestDaemon, TestEngine, TestRng, assert_refused, daemon,
    engine,
};

const SEED: u64 = 20_240_604;
const NOWHERE: SequenceId = SequenceId(987_654);

/// A daemon, an engine, and 20 tokens.
struct Scene {
    daemon: TestDaemon,
    engine: TestEngine,
    conversation: StoredSequence,
    rng: TestRng,
}

impl Scene {
    async fn new() -> Self {
        let daemon =
            daemon().with_setting("namespaces.allowed", r#"["default", "other"]"#).start().await;
        let shape =
            ModelShape { layers: 2, group: 2, dtype: DType::F16, ..ModelShape::small_shape() };
        let engine = engine(&daemon).register_model(shape, "raw").await;
        let mut rng = TestRng::new(SEED);
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, 20, &mut rng).await;
        Self { daemon, engine, conversation, rng }
    }

    /// Three tokens that would fit.
    fn chunk(&mut self) -> StoreChunk {
        let rows = LayerRows::random_rows(&self.engine.shape, 3, &mut self.rng);
        self.engine.store_chunk(self.conversation.sequence, 0, 20, &rows)
    }

    /// A batch of two query tokens that would be answered.
    fn batch(&mut self) -> AttendBatch {
        let question = self.engine.random_question(&self.conversation, 2, &mut self.rng);
        self.engine.attend_batch(&question)
    }

    async fn refuse_store(&mut self, code: ErrorCode, says: &str, break_it: fn(&mut StoreChunk)) {
        let mut chunk = self.chunk();
        break_it(&mut chunk);
        assert_refused(self.engine.client.store_chunk(chunk).await, code, says);
    }

    async fn refuse_attend(&mut self, code: ErrorCode, says: &str, break_it: fn(&mut AttendBatch)) {
        let mut batch = self.batch();
        break_it(&mut batch);
        assert_refused(self.engine.client.attend_batch(batch).await, code, says);
    }

    /// The conversation is as it was, can go on, and so can everybody else.
    async fn unharmed(mut self) {
        for layer in 0..self.engine.shape.layers {
            let read = self.engine.load_layer(&self.conversation, layer).await;
            assert_eq!(read, self.conversation.layers[layer as usize]);
        }
        self.engine.grow_sequence(&mut self.conversation, 3, &mut self.rng).await;
        self.daemon.assert_serves().await;
        self.engine.close_sequence(self.conversation).await;
        assert!(self.daemon.is_empty().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_do_not_fit_their_shape() {
    let mut scene = Scene::new().await;
    let mismatch = ErrorCode::ShapeMismatch;
    scene.refuse_store(mismatch, "k has", |c| c.k = c.k.slice(2..)).await;
    scene.refuse_store(mismatch, "v has", |c| c.v = Bytes::new()).await;
    scene.refuse_store(mismatch, "k has", |c| c.tokens = 2).await;
    let invalid = ErrorCode::InvalidArgument;
    scene.refuse_store(invalid, "tokens", |c| c.tokens = 0).await;
    scene.refuse_store(invalid, "tokens", |c| c.start = u32::MAX).await;
    scene.refuse_store(invalid, "layer 2 of a model with 2", |c| c.layer = LayerIndex(2)).await;
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_that_do_not_fit_their_shape() {
    let mut scene = Scene::new().await;
    let mismatch = ErrorCode::ShapeMismatch;
    scene.refuse_attend(mismatch, "q has", |b| b.q = b.q.slice(4..)).await;
    scene.refuse_attend(mismatch, "q has", |b| b.dtype = DType::F16).await;
    scene.refuse_attend(mismatch, "multiple of the 2 KV heads", |b| b.q_heads = 3).await;
    let invalid = ErrorCode::InvalidArgument;
    scene.refuse_attend(invalid, "q_heads", |b| b.q_heads = 0).await;
    scene.refuse_attend(invalid, "queries", |b| b.queries.clear()).await;
    scene.refuse_attend(invalid, "queries[0].n_q", |b| b.queries[0].n_q = 0).await;
    scene.refuse_attend(invalid, "layer", |b| b.layer = LayerIndex(9)).await;
    scene.refuse_attend(invalid, "scale", |b| b.scale = Some(0.0)).await;
    scene.refuse_attend(invalid, "scale", |b| b.scale = Some(f32::NAN)).await;
    scene.refuse_attend(invalid, "soft_cap", |b| b.soft_cap = Some(-1.0)).await;
    scene.refuse_attend(invalid, "position", |b| b.queries[0].position = Some(u32::MAX)).await;
    let short = |b: &mut AttendBatch| b.queries[0].kv_length = Some(1);
    scene.refuse_attend(invalid, "kv_length", short).await;
    let limit = ErrorCode::LimitExceeded;
    scene.refuse_attend(limit, "sum of n_q", |b| b.queries[0].n_q = 1 << 21).await;
    let many = |b: &mut AttendBatch| b.queries = vec![b.queries[0]; 4097];
    scene.refuse_attend(limit, "queries", many).await;
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_what_is_not_stored() {
    let mut scene = Scene::new().await;
    let code = ErrorCode::RangeNotStored;
    let past = |b: &mut AttendBatch| b.queries[0].kv_length = Some(21);
    scene.refuse_attend(code, "21 tokens asked for, 20 stored", past).await;
    let range = |start, end| LoadRange {
        sequence: scene.conversation.sequence,
        layer: LayerIndex(1),
        start,
        end,
        dtype: None,
    };
    let client = &scene.engine.client;
    assert_refused(client.load_rows(range(0, 21)).await, code, "21 tokens asked for, 20 stored");
    assert_refused(client.load_rows(range(7, 6)).await, ErrorCode::InvalidArgument, "before start");
    let layer = LoadRange { layer: LayerIndex(2), ..range(0, 1) };
    assert_refused(client.load_rows(layer).await, ErrorCode::InvalidArgument, "layer 2");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_models_and_sequences() {
    let mut scene = Scene::new().await;
    let sequence = ErrorCode::UnknownSequence;
    scene.refuse_store(sequence, "987654", |c| c.sequence = NOWHERE).await;
    scene.refuse_attend(sequence, "queries[0]", |b| b.queries[0].sequence = NOWHERE).await;
    scene.refuse_attend(ErrorCode::UnknownModel, "55", |b| b.model = ModelId(55)).await;
    let client = &scene.engine.client;
    assert_refused(client.fork_sequence(NOWHERE, None).await, sequence, "987654");
    assert_refused(client.truncate_sequence(NOWHERE, 0).await, sequence, "987654");
    assert_refused(client.close_sequence(NOWHERE).await, sequence, "987654");
    assert_refused(client.describe_sequence(NOWHERE).await, sequence, "987654");
    let range =
        LoadRange { sequence: NOWHERE, layer: LayerIndex(0), start: 0, end: 0, dtype: None };
    assert_refused(client.load_rows(range).await, sequence, "987654");
    let (model, code) = (ModelId(55), ErrorCode::UnknownModel);
    assert_refused(client.open_sequence(model).await, code, "55");
    assert_refused(client.describe_model(model).await, code, "55");
    assert_refused(client.unregister_model(model).await, code, "55");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_another_namespace_look_unknown() {
    let mut scene = Scene::new().await;
    let (chunk, batch) = (scene.chunk(), scene.batch());
    let (model, sequence) = (scene.engine.model, scene.conversation.sequence);
    let stranger = scene.daemon.client_of("other").await;
    let code = ErrorCode::UnknownSequence;
    assert_refused(stranger.store_chunk(chunk).await, code, "unknown in this namespace");
    assert_refused(stranger.describe_sequence(sequence).await, code, "unknown");
    assert_refused(stranger.fork_sequence(sequence, None).await, code, "unknown");
    assert_refused(stranger.truncate_sequence(sequence, 0).await, code, "unknown");
    assert_refused(stranger.close_sequence(sequence).await, code, "unknown");
    let range = LoadRange { sequence, layer: LayerIndex(0), start: 0, end: 1, dtype: None };
    assert_refused(stranger.load_rows(range).await, code, "unknown");
    let code = ErrorCode::UnknownModel;
    assert_refused(stranger.attend_batch(batch).await, code, "not registered in namespace other");
    assert_refused(stranger.open_sequence(model).await, code, "namespace other");
    assert_refused(stranger.describe_model(model).await, code, "namespace other");
    assert_refused(stranger.unregister_model(model).await, code, "namespace other");
    assert_eq!(stranger.list_models().await.unwrap(), []);
    assert_eq!(stranger.stats().await.unwrap().models, []);
    // Another namespace may use the name.
    let shape = scene.engine.shape.clone();
    let own = engine(&scene.daemon).with_client(stranger).register_model(shape, "fp8").await;
    assert_ne!(own.model, model);
    let mut batch = scene.batch();
    batch.model = own.model;
    assert_refused(own.client.attend_batch(batch).await, ErrorCode::UnknownSequence, "unknown");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_that_may_not_use_the_daemon() {
    let mut scene = Scene::new().await;
    let (chunk, batch) = (scene.chunk(), scene.batch());
    let denied = scene.daemon.client_of("intruder").await;
    let (code, says) = (ErrorCode::NamespaceDenied, "intruder");
    assert_refused(denied.server_info().await, code, says);
    assert_refused(denied.stats().await, code, says);
    assert_refused(denied.list_models().await, code, says);
    assert_refused(denied.store_chunk(chunk).await, code, says);
    assert_refused(denied.attend_batch(batch).await, code, says);
    assert_refused(denied.close_sequence(scene.conversation.sequence).await, code, says);
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_out_of_order() {
    let mut scene = Scene::new().await;
    scene.refuse_store(ErrorCode::RangeGap, "the layer ends at 20", |c| c.start = 21).await;
    let overlap = ErrorCode::RangeOverlap;
    scene.refuse_store(overlap, "the layer ends at 20", |c| c.start = 19).await;
    scene.refuse_store(overlap, "the layer ends at 20", |c| c.start = 2).await;
    // The range of the first store, with other rows.
    let other = LayerRows::random_rows(&scene.engine.shape, 20, &mut scene.rng);
    let conflict = scene.engine.store_chunk(scene.conversation.sequence, 0, 0, &other);
    let refused = scene.engine.client.store_chunk(conflict).await;
    assert_refused(refused, ErrorCode::RangeConflict, "20 tokens at 0");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_range_is_acknowledged_and_changes_nothing() {
    let scene = Scene::new().await;
    let before = scene.daemon.pool_stats().await;
    for layer in 0..scene.engine.shape.layers {
        let rows = &scene.conversation.layers[layer as usize];
        let again = scene.engine.store_chunk(scene.conversation.sequence, layer, 0, rows);
        let ack = scene.engine.client.store_chunk(again).await.unwrap();
        assert_eq!((ack.length, ack.replayed, ack.packed_blocks), (20, true, 0));
    }
    assert_eq!(scene.daemon.pool_stats().await, before);
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_and_queries_that_are_not_finite() {
    let mut scene = Scene::new().await;
    let kv_heads_and_dim = 2 * 64;
    for (bad, says) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let rows = LayerRows::random_rows(&scene.engine.shape, 3, &mut scene.rng);
        let (mut k, mut v) = (rows.clone(), rows);
        k.k[2 * kv_heads_and_dim + 64 + 7] = bad;
        v.v[kv_heads_and_dim] = bad;
        for (rows, place) in
            [(k, "K of token 2, head 1, channel 7"), (v, "V of token 1, head 0, channel 0")]
        {
            let chunk = scene.engine.store_chunk(scene.conversation.sequence, 1, 20, &rows);
            let refused = scene.engine.client.store_chunk(chunk).await;
            assert_refused(refused, ErrorCode::NonFinite, &format!("{place} is {says}"));
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut question = scene.engine.random_question(&scene.conversation, 2, &mut scene.rng);
            question = question.in_dtype(dtype);
            question.q[300] = bad;
            let refused = scene.engine.try_ask(&question).await;
            assert_refused(refused, ErrorCode::NonFinite, &format!("q at index 300 is {says}"));
        }
    }
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_of_another_model_in_a_batch() {
    let mut scene = Scene::new().await;
    let shape = scene.engine.shape.clone();
    let other = engine(&scene.daemon).with_name("other").register_model(shape, "raw").await;
    let foreign = other.open_sequence().await;
    let mut batch = scene.batch();
    batch.queries = vec![
        AttendQuery::new(scene.conversation.sequence, 1),
        AttendQuery::new(foreign.sequence, 1),
    ];
    let refused = scene.engine.client.attend_batch(batch).await;
    assert_refused(refused, ErrorCode::InvalidArgument, "queries[1]: sequence");
    scene.unharmed().await;
}

/// A registration that would be accepted but for one thing.
fn spec(codec: &str, calibration: impl Into<Bytes>) -> ModelSpec {
    let geometry = ModelShape::small_shape().geometry();
    let (name, codec) = ("new".to_owned(), codec.to_owned());
    ModelSpec { name, geometry, codec, calibration: calibration.into() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_cannot_be() {
    let scene = Scene::new().await;
    let client = &scene.engine.client;
    let refuse = async |spec: ModelSpec, code, says: &str| {
        assert_refused(client.register_model(spec).await, code, says);
    };
    let codec = ErrorCode::InvalidCodec;
    refuse(spec("zip", ""), codec, "\"zip\" is not a preset").await;
    refuse(spec("k=raw; v=uniform(b=4,axes=token)", ""), codec, "character 21").await;
    refuse(spec("k=raw; v=raw/huffman", ""), codec, "huffman").await;
    refuse(spec("k=raw; v=uniform(b=9,axis=token)", ""), codec, "b=9").await;
    let calibration = ErrorCode::InvalidCalibration;
    refuse(spec("vecinfer-2", ""), calibration, "needs a calibration").await;
    refuse(spec("vecinfer-2", "not safetensors"), calibration, "calibration artefact").await;
    let shape = ModelShape { head_dim_v: 32, ..ModelShape::small_shape() };
    let foreign = kvd_tests::codec::calibration_for_random("vecinfer-2", &shape);
    refuse(spec("vecinfer-2", foreign), calibration, "does not fit").await;
    let invalid = ErrorCode::InvalidArgument;
    refuse(ModelSpec { name: "a b".to_owned(), ..spec("raw", "") }, invalid, "name").await;
    refuse(ModelSpec { name: String::new(), ..spec("raw", "") }, invalid, "name").await;
    refuse(ModelSpec { name: "model".to_owned(), ..spec("raw", "") }, invalid, "another").await;
    let mut odd = spec("raw", "");
    odd.geometry.head_dim_k = 63;
    refuse(odd, invalid, "geometry.head_dim_k is 63").await;
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_in_use_stays() {
    let scene = Scene::new().await;
    let (client, model) = (&scene.engine.client, scene.engine.model);
    let refused = client.unregister_model(model).await;
    assert_refused(refused, ErrorCode::ModelInUse, "1 open sequences");
    let described = client.describe_model(model).await.unwrap();
    assert_eq!(described.model.unwrap().sequences, 1);
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_is_idempotent() {
    let scene = Scene::new().await;
    let again = engine(&scene.daemon).register_model(scene.engine.shape.clone(), "raw").await;
    assert_eq!(again.model, scene.engine.model);
    let spelled = engine(&scene.daemon).register_model(again.shape.clone(), "k=raw; v=raw").await;
    assert_eq!(spelled.model, scene.engine.model);
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_chunk_of_a_stream_is_told_and_the_others_are_stored() {
    let mut scene = Scene::new().await;
    let mut stream = scene.engine.client.store_stream(4).await.unwrap();
    let good = LayerRows::random_rows(&scene.engine.shape, 3, &mut scene.rng);
    let sequence = scene.conversation.sequence;
    let chunk = |layer, start| scene.engine.store_chunk(sequence, layer, start, &good);
    for (layer, start) in [(0, 20), (1, 20), (0, 24), (0, 23), (1, 23)] {
        stream.send_chunk(chunk(layer, start)).await.unwrap();
    }
    let refused = stream.finish_stream().await;
    assert_refused(refused, ErrorCode::RangeGap, "the layer ends at 23");
    for rows in &mut scene.conversation.layers {
        rows.extend_rows(&good);
        rows.extend_rows(&good);
    }
    scene.unharmed().await;
}

/// A message as no typed client would send it.
async fn raw_store(scene: &Scene, break_it: fn(&mut v1::StoreBlocksRequest)) -> ClientError {
    let rows = LayerRows::random_rows(&scene.engine.shape, 3, &mut TestRng::new(SEED));
    let chunk = scene.engine.store_chunk(scene.conversation.sequence, 0, 20, &rows);
    let mut request = v1::StoreBlocksRequest::from(chunk);
    break_it(&mut request);
    let mut rpc = scene.daemon.raw_client().await;
    let mut acks = rpc.store_blocks(tokio_stream::once(request)).await.expect("open").into_inner();
    acks.message().await.expect_err("the chunk was stored").into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_without_their_payload() {
    let scene = Scene::new().await;
    let error = raw_store(&scene, |request| request.k = None).await;
    assert_eq!(error.code, Some(ErrorCode::InvalidArgument), "{error}");
    let error = raw_store(&scene, |request| request.v = Some(v1::Payload { source: None })).await;
    assert!(error.message.contains("v is missing"), "{error}");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dtype_that_does_not_exist() {
    let mut scene = Scene::new().await;
    let mut request = v1::AttendRequest::from(scene.batch());
    let mut rpc = scene.daemon.raw_client().await;
    for (dtype, says) in [(0, "dtype is missing"), (77, "dtype 77 is not known")] {
        request.dtype = dtype;
        let status = rpc.attend(request.clone()).await.unwrap_err();
        assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::InvalidArgument));
        assert!(status.message().contains(says), "{status}");
    }
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_outside_the_stored_precision_is_refused_as_what_it_becomes() {
    let scene = Scene::new().await;
    let rows = LayerRows::random_rows(&scene.engine.shape, 1, &mut TestRng::new(SEED));
    let mut chunk = scene.engine.store_chunk(scene.conversation.sequence, 0, 20, &rows);
    // An engine that narrows 70000 to f16 without saturation sends this.
    let mut v = chunk.v.to_vec();
    v[10..12].copy_from_slice(&0x7c00u16.to_le_bytes());
    chunk.v = v.into();
    let refused = scene.engine.client.store_chunk(chunk).await;
    assert_refused(refused, ErrorCode::NonFinite, "V of token 0, head 0, channel 5 is inf");
    scene.unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_before_the_start_leaves_nothing_visible() {
    let mut scene = Scene::new().await;
    let mut batch = scene.batch();
    (batch.queries[0].start, batch.queries[0].end) = (Some(5), Some(4));
    let attended = scene.engine.client.attend_batch(batch).await.expect("an answer");
    assert!(attended.lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
    assert!(attended.out.iter().all(|byte| *byte == 0));
    scene.unharmed().await;
}
