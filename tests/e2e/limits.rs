//! Limits: page memory, the queue, messages, deadlines, counts, and the end of the daemon. Each
//! answers at once and gives way when there is room again.

use kvd::Drained;
use kvd_client::{AttendQuery, ClientError, ClientOptions, ErrorCode, ModelSpec, Namespace};
use kvd_proto::v1;
use kvd_tests::codec::{calibration_for_random, with_windows};
use kvd_tests::metrics::MetricsPage;
use kvd_tests::wait::eventually;
use kvd_tests::{
    LayerRows, ModelShape, QueryBatch, StoredSequence, TestDaemon, TestEngine, TestRng,
    assert_refused, assert_within_budget, daemon, engine,
};

const SEED: u64 = 20_240_605;

/// Raw blocks of 32 KiB: 32 of them fill the smallest pool, 1 MiB.
fn shape() -> ModelShape {
    ModelShape { block_tokens: 32, ..ModelShape::small_shape() }
}

async fn small_daemon() -> TestDaemon {
    daemon().with_pool("1 MiB").start().await
}

/// A new conversation with so many tokens.
async fn talk(engine: &TestEngine, tokens: u32, rng: &mut TestRng) -> StoredSequence {
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, tokens, rng).await;
    conversation
}

/// Attention agrees with the reference over the rows as sent.
async fn assert_answers(engine: &TestEngine, conversation: &StoredSequence, rng: &mut TestRng) {
    let question = engine.random_question(conversation, 1, rng);
    let answer = engine.ask_question(&question).await;
    let rows = [&conversation.layers[0]];
    assert_within_budget("answers", engine, &question, &answer, &rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_refuses_until_something_is_closed() {
    let daemon = small_daemon().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), &with_windows("raw", 0, 4096)).await;
    let mut first = talk(&engine, 20 * 32, &mut rng).await;
    let second = talk(&engine, 12 * 32, &mut rng).await;
    assert_eq!(daemon.pool_stats().await.used_bytes, 1 << 20);
    let more = LayerRows::random_rows(&engine.shape, 1, &mut rng);
    let refused = engine.store_rows(&mut first, 0, &more).await;
    assert_refused(refused, ErrorCode::PoolFull, "32768 bytes needed for rows, 0 of 1048576 free");
    assert_eq!(daemon.pool_stats().await.used_bytes, 1 << 20);
    assert_answers(&engine, &first, &mut rng).await;
    engine.close_sequence(second).await;
    engine.store_rows(&mut first, 0, &more).await.unwrap();
    assert_answers(&engine, &first, &mut rng).await;
    engine.close_sequence(first).await;
    assert!(daemon.is_empty().await);
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_append_that_finds_only_part_of_its_room_takes_none() {
    let daemon = small_daemon().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let mut conversation = talk(&engine, 40, &mut rng).await;
    let before = daemon.pool_stats().await;
    let too_much = LayerRows::random_rows(&engine.shape, 33 * 32, &mut rng);
    let refused = engine.store_rows(&mut conversation, 0, &too_much).await;
    assert_refused(refused, ErrorCode::PoolFull, "pool host is full");
    assert_eq!(daemon.pool_stats().await, before);
    engine.grow_sequence(&mut conversation, 40, &mut rng).await;
    assert_answers(&engine, &conversation, &mut rng).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_room_to_pack_blocks_stay_raw_and_are_packed_later() {
    let daemon = small_daemon().await;
    let mut rng = TestRng::new(SEED);
    let raw = with_windows("raw", 0, 4096);
    let bystander = engine(&daemon).with_name("bystander").register_model(shape(), &raw).await;
    let other = talk(&bystander, 2 * 32, &mut rng).await;
    let engine = engine(&daemon).register_model(shape(), "kvcomp").await;
    let mut conversation = engine.open_sequence().await;
    let rows = LayerRows::random_rows(&engine.shape, 30 * 32, &mut rng);
    let ack = engine.store_rows(&mut conversation, 0, &rows).await.unwrap();
    assert_eq!(ack.packed_blocks, 0, "the raw blocks fill the pool");
    // Nothing was quantized, so nothing was lost.
    assert_answers(&engine, &conversation, &mut rng).await;
    let (_, page) = daemon.admin_page("/metrics").await;
    let deferred =
        MetricsPage::parse_page(&page).sum_samples("kvd_pack_deferred_total", &["model=\"model\""]);
    assert_eq!(deferred, 30.0);
    bystander.close_sequence(other).await;
    // Each append packs blocks while there is room, and thereby makes room.
    for _ in 0..5 {
        engine.grow_sequence(&mut conversation, 1, &mut rng).await;
    }
    let usage = engine.client.describe_sequence(conversation.sequence).await.unwrap();
    assert_eq!((usage.packed_blocks, usage.raw_blocks), (30, 1));
    let read = engine.load_layer(&conversation, 0).await;
    let question = engine.random_question(&conversation, 2, &mut rng);
    let answer = engine.ask_question(&question).await;
    assert_within_budget("packed later", &engine, &question, &answer, &[&read]);
    engine.close_sequence(conversation).await;
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_refuses_and_answers_who_got_in() {
    let daemon = daemon().with_setting("device.queue_jobs_max", "1").start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(ModelShape { group: 8, ..shape() }, "raw").await;
    let conversation = talk(&engine, 2000, &mut rng).await;
    let question = engine.random_question(&conversation, 100, &mut rng);
    let alone = engine.ask_question(&question).await;
    // One runs, one waits: of this many at once some must be refused.
    let asking: Vec<_> = (0..24)
        .map(|_| {
            let (engine, question) = (engine.clone(), question.clone());
            tokio::spawn(async move { engine.try_ask(&question).await })
        })
        .collect();
    let (mut answered, mut refused) = (0, 0);
    for task in asking {
        match task.await.unwrap() {
            Ok(answer) => {
                assert_eq!(answer, alone);
                answered += 1;
            }
            error => {
                assert_refused(error, ErrorCode::QueueFull, "device.queue_jobs_max");
                refused += 1;
            }
        }
    }
    assert!(answered > 0 && refused > 0, "{answered} answered, {refused} refused");
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_limit_is_refused_in_both_directions() {
    let daemon = daemon().with_messages("256 KiB").start().await;
    let generous = ClientOptions::default().with_message_bytes_max(256 << 20);
    let client = daemon.client_with(generous).await;
    let mut rng = TestRng::new(SEED);
    let shape = ModelShape { head_dim_v: 128, ..shape() };
    let engine = engine(&daemon).with_client(client).register_model(shape, "raw").await;
    let mut conversation = engine.open_sequence().await;
    let large = LayerRows::random_rows(&engine.shape, 400, &mut rng);
    let refused = engine.store_rows(&mut conversation, 0, &large).await;
    assert_refused(refused, ErrorCode::MessageTooLarge, "too large");
    let question = engine.question_of(vec![AttendQuery::new(conversation.sequence, 900)], &mut rng);
    assert_refused(engine.try_ask(&question).await, ErrorCode::MessageTooLarge, "too large");
    // Keys and values in pieces, queries below the limit, but values are longer than keys.
    engine.grow_sequence(&mut conversation, 60, &mut rng).await;
    let query = AttendQuery { position: Some(0), ..AttendQuery::new(conversation.sequence, 300) };
    let question = engine.question_of(vec![query], &mut rng);
    let refused = engine.try_ask(&question).await;
    assert_refused(refused, ErrorCode::MessageTooLarge, "the answer would take");
    // A load is cut into pieces that fit.
    for _ in 0..5 {
        engine.grow_sequence(&mut conversation, 100, &mut rng).await;
    }
    assert_answers(&engine, &conversation, &mut rng).await;
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_longer_than_a_message_are_loaded_in_pieces() {
    let daemon = daemon().with_messages("2 MiB").start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let mut conversation = engine.open_sequence().await;
    for _ in 0..4 {
        engine.grow_sequence(&mut conversation, 1000, &mut rng).await;
    }
    let read = engine.load_layer(&conversation, 0).await;
    assert_eq!(read, conversation.layers[0], "seed {SEED}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_in_the_past_stops_every_call() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let mut conversation = talk(&engine, 50, &mut rng).await;
    let rows = LayerRows::random_rows(&engine.shape, 5, &mut rng);
    let chunk =
        v1::StoreBlocksRequest::from(engine.store_chunk(conversation.sequence, 0, 50, &rows));
    let question = engine.random_question(&conversation, 1, &mut rng);
    let batch = v1::AttendRequest::from(engine.attend_batch(&question));
    let mut rpc = daemon.raw_client().await;
    // `0n` is stopped by the gRPC runtime on either side. Nine digits are one more than the
    // runtime reads, so the second spelling is for kvd alone.
    for timeout in ["0n", "000000000n"] {
        let codes = [
            rpc.attend(late(batch.clone(), timeout)).await.err(),
            rpc.get_stats(late(v1::GetStatsRequest {}, timeout)).await.err(),
            match rpc.store_blocks(late(tokio_stream::once(chunk.clone()), timeout)).await {
                Ok(acks) => acks.into_inner().message().await.err(),
                Err(status) => Some(status),
            },
        ];
        for status in codes {
            let status = status.expect("the call was served");
            if timeout != "0n" {
                let code = kvd_proto::error_code(&status);
                assert_eq!(code, Some(ErrorCode::DeadlineExceeded), "{status}");
            }
            let error = ClientError::from(status);
            assert_eq!(error.code, Some(ErrorCode::DeadlineExceeded), "{timeout}: {error}");
        }
    }
    engine.store_rows(&mut conversation, 0, &rows).await.expect("nothing was stored");
    daemon.assert_serves().await;
}

fn late<T>(message: T, timeout: &'static str) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert("grpc-timeout", timeout.parse().expect("metadata"));
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_vanishes_in_the_middle_of_a_stream_leaves_whole_chunks() {
    let daemon = daemon().start().await;
    for round in 0..10 {
        let mut rng = TestRng::new(SEED + round);
        let engine = engine(&daemon).register_model(shape(), "kvcomp").await;
        let mut conversation = engine.open_sequence().await;
        let rows = LayerRows::random_rows(&engine.shape, 600, &mut rng);
        let doomed = kvd_tests::engine(&daemon).register_model(shape(), "kvcomp").await;
        let mut stream = doomed.client.store_stream(64).await.unwrap();
        for start in (0..600).step_by(20) {
            let part = rows.token_range(&engine.shape, start..start + 20);
            stream
                .send_chunk(doomed.store_chunk(conversation.sequence, 0, start, &part))
                .await
                .unwrap();
        }
        if round % 2 == 0 {
            stream.receive_ack().await.unwrap();
        }
        drop((stream, doomed));
        // Busy until the chunk in the lane is done; then whatever was stored is whole.
        let length = settled_length(&engine, &conversation).await;
        assert_eq!(length % 20, 0, "seed {}", SEED + round);
        conversation.layers[0] = rows.token_range(&engine.shape, 0..length);
        let rest = rows.token_range(&engine.shape, length..600);
        if rest.tokens > 0 {
            engine.store_rows(&mut conversation, 0, &rest).await.unwrap();
        }
        let read = engine.load_layer(&conversation, 0).await;
        let question = engine.random_question(&conversation, 1, &mut rng);
        let answer = engine.ask_question(&question).await;
        assert_within_budget("survivor", &engine, &question, &answer, &[&read]);
        engine.close_sequence(conversation).await;
        eventually("page memory given back", async || daemon.is_empty().await).await;
    }
    daemon.assert_serves().await;
}

/// Tokens of layer 0 once nobody appends any more. Truncating to what is there changes nothing,
/// but is refused while an append is in flight.
async fn settled_length(engine: &TestEngine, conversation: &StoredSequence) -> u32 {
    let mut before = None;
    loop {
        let sequence = conversation.sequence;
        let length = engine.client.describe_sequence(sequence).await.expect("describe").length;
        let kept = engine.client.truncate_sequence(sequence, length).await;
        if kept.is_ok() && before == Some(length) {
            return length;
        }
        before = Some(length);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_closed_under_a_stream_gives_its_memory_back() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "fp8").await;
    let conversation = engine.open_sequence().await;
    let rows = LayerRows::random_rows(&engine.shape, 20, &mut rng);
    let mut stream = engine.client.store_stream(64).await.unwrap();
    for start in (0..800).step_by(20) {
        stream
            .send_chunk(engine.store_chunk(conversation.sequence, 0, start, &rows))
            .await
            .unwrap();
    }
    stream.receive_ack().await.unwrap();
    engine.close_sequence(conversation).await;
    // All of it was quick enough, or the rest found no sequence.
    if let Err(error) = stream.finish_stream().await {
        assert_eq!(error.code, Some(ErrorCode::UnknownSequence), "{error}");
    }
    eventually("page memory given back", async || daemon.is_empty().await).await;
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_have_limits() {
    let plan = daemon()
        .with_setting("limits.models_max", "2")
        .with_setting("limits.sequences_max", "3")
        .with_setting("limits.tokens_per_sequence_max", "100")
        .with_setting("limits.calibration_bytes_max", "4 KiB");
    let daemon = plan.start().await;
    let mut rng = TestRng::new(SEED);
    let code = ErrorCode::LimitExceeded;
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let register = async |name: &str, codec: &str, calibration| {
        let (name, codec) = (name.to_owned(), codec.to_owned());
        let spec = ModelSpec { name, geometry: shape().geometry(), codec, calibration };
        engine.client.register_model(spec).await
    };
    let calibration = calibration_for_random("vecinfer-2", &shape());
    let refused = register("large", "vecinfer-2", calibration).await;
    assert_refused(refused, code, "limits.calibration_bytes_max = 4096");
    let second = register("second", "raw", Default::default()).await.unwrap().model;
    let refused = register("third", "raw", Default::default()).await;
    assert_refused(refused, code, "limits.models_max");
    engine.client.unregister_model(second).await.unwrap();

    let mut conversation = talk(&engine, 90, &mut rng).await;
    let rows = LayerRows::random_rows(&engine.shape, 11, &mut rng);
    let refused = engine.store_rows(&mut conversation, 0, &rows).await;
    assert_refused(refused, code, "tokens_per_sequence_max is 100, 101 asked for");
    let fork = engine.fork_sequence(&conversation, 30).await;
    engine.open_sequence().await;
    assert_refused(engine.client.open_sequence(engine.model).await, code, "sequences_max is 3");
    let refused = engine.client.fork_sequence(conversation.sequence, None).await;
    assert_refused(refused, code, "sequences_max is 3");
    engine.close_sequence(fork).await;
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_daemon_refuses_new_work_and_takes_back_what_it_lent() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let conversation = talk(&engine, 50, &mut rng).await;
    let question: QueryBatch = engine.random_question(&conversation, 1, &mut rng);
    let rows = LayerRows::random_rows(&engine.shape, 5, &mut rng);
    let chunk = engine.store_chunk(conversation.sequence, 0, 50, &rows);
    let mut stream = engine.client.store_stream(1).await.unwrap();
    assert_eq!(daemon.admin_page("/readyz").await, (200, "ready\n".to_owned()));
    daemon.stop_admitting();
    let (code, says) = (ErrorCode::ShuttingDown, "drains");
    assert_refused(engine.try_ask(&question).await, code, says);
    assert_refused(engine.client.store_chunk(chunk.clone()).await, code, says);
    assert_refused(engine.client.open_sequence(engine.model).await, code, says);
    assert_refused(engine.client.stats().await, code, says);
    stream.send_chunk(chunk).await.unwrap();
    assert_refused(stream.finish_stream().await, code, says);
    assert_eq!(daemon.admin_page("/readyz").await.0, 503);
    assert_eq!(daemon.admin_page("/healthz").await.0, 200);
    engine.close_sequence(conversation).await;
    assert_eq!(daemon.stop_daemon().await, Drained::Clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_idle_streams_and_is_clean() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let conversation = talk(&engine, 50, &mut rng).await;
    let question = engine.random_question(&conversation, 1, &mut rng);
    let mut attends = engine.client.attend_stream(1).await.unwrap();
    attends.attend_batch(engine.attend_batch(&question)).await.unwrap();
    let stores = engine.client.store_stream(1).await.unwrap();
    let (drained, attends, stores) =
        tokio::join!(daemon.stop_daemon(), attends.finish_stream(), stores.finish_stream());
    assert_eq!(drained, Drained::Clean);
    // Whether the client's end or the daemon's came first is a race; both are in order.
    for result in [attends.map(drop), stores.map(drop)] {
        if result.is_err() {
            assert_refused(result, ErrorCode::ShuttingDown, "drains");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_do_not_share_the_names_of_models() {
    let daemon = daemon().with_setting("namespaces.allowed", r#"["*"]"#).start().await;
    let mut models = Vec::new();
    for name in ["one", "two"] {
        let namespace = Namespace::new(name).unwrap();
        let client = daemon.client().await.with_namespace(&namespace);
        models.push(engine(&daemon).with_client(client).register_model(shape(), "raw").await);
    }
    let mut rng = TestRng::new(SEED);
    for engine in &models {
        let conversation = talk(engine, 40, &mut rng).await;
        assert_answers(engine, &conversation, &mut rng).await;
        let stats = engine.client.stats().await.unwrap();
        assert_eq!(stats.models.len(), 1);
        assert_eq!(stats.models[0].model_id, engine.model.0);
    }
}
