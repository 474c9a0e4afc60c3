//! Attention over what is stored equals the plain reference: over what was sent for a codec that
//! keeps it all, and over what `LoadBlocks` reads back for every codec.

use kvd_client::merge::{PartialResult, PartialView, merge_partial};
use kvd_client::{AttendQuery, DType, LayerIndex};
use kvd_tests::budget::{BudgetYardstick, ErrorPrecision, assert_within_precision};
use kvd_tests::codec::PRESETS;
use kvd_tests::{
    LayerRows, ModelShape, QueryBatch, StoredSequence, TestEngine, TestRng, assert_within_budget,
    daemon, engine,
};

const SEED: u64 = 20_240_601;
const TOKENS: u32 = 210;

/// One query head per KV head, four, and eight; four head sizes; keys longer than values.
fn shapes() -> Vec<ModelShape> {
    let shape = |kv_heads, group, (head_dim_k, head_dim_v), block_tokens, dtype| ModelShape {
        layers: 2,
        kv_heads,
        group,
        head_dim_k,
        head_dim_v,
        block_tokens,
        dtype,
    };
    vec![
        shape(2, 1, (64, 64), 16, DType::F32),
        shape(1, 4, (96, 96), 64, DType::F16),
        shape(1, 8, (128, 128), 64, DType::BF16),
        shape(2, 2, (128, 64), 16, DType::F16),
    ]
}

/// Each kind of query by name; `TOKENS` tokens are stored.
fn queries(conversation: &StoredSequence) -> Vec<(&'static str, AttendQuery)> {
    let last = |n_q| AttendQuery::new(conversation.sequence, n_q);
    vec![
        ("one token, all of it", last(1)),
        ("more tokens than one work unit, causal", last(37)),
        ("position inside the range", AttendQuery { position: Some(101), ..last(5) }),
        ("position before the range", AttendQuery { position: Some(0), ..last(3) }),
        ("position after all", AttendQuery { position: Some(5000), ..last(2) }),
        ("shorter than stored", AttendQuery { kv_length: Some(77), ..last(4) }),
        ("a range", AttendQuery { start: Some(17), end: Some(203), ..last(1) }),
        ("a range of one token", AttendQuery { start: Some(64), end: Some(65), ..last(1) }),
        ("an end past what is stored", AttendQuery { end: Some(9000), ..last(2) }),
        ("an empty range", AttendQuery { start: Some(50), end: Some(50), ..last(2) }),
        (
            "a range the first tokens cannot see",
            AttendQuery { position: Some(98), start: Some(100), ..last(5) },
        ),
        ("a sliding window", AttendQuery { sliding_window: Some(50), ..last(3) }),
        ("a window of the token itself", AttendQuery { sliding_window: Some(1), ..last(3) }),
        (
            "all at once",
            AttendQuery {
                kv_length: Some(200),
                position: Some(120),
                start: Some(33),
                end: Some(150),
                sliding_window: Some(70),
                ..last(9)
            },
        ),
    ]
}

/// Asks and compares with the reference over what reads back.
async fn check(engine: &TestEngine, context: &str, question: &QueryBatch, rows: &[&LayerRows]) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let question = question.in_dtype(dtype);
        let answer = engine.ask_question(&question).await;
        let context = format!("{context}, {dtype}, seed {SEED}");
        assert_within_budget(&context, engine, &question, &answer, rows);
    }
}

async fn every_query_of(codec: &str) {
    let daemon = daemon().start().await;
    for (index, shape) in shapes().into_iter().enumerate() {
        let mut rng = TestRng::new(SEED + index as u64);
        let name = format!("shape-{index}");
        let engine = engine(&daemon).with_name(&name).register_model(shape, codec).await;
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, TOKENS, &mut rng).await;
        for layer in 0..engine.shape.layers {
            let read = engine.load_layer(&conversation, layer).await;
            if codec == "raw" {
                assert_eq!(read, conversation.layers[layer as usize], "{name}: not what was sent");
            }
            for (kind, query) in queries(&conversation) {
                let mut question = engine.question_of(vec![query], &mut rng);
                question.layer = LayerIndex(layer);
                check(&engine, &format!("{codec}, {name}, {kind}"), &question, &[&read]).await;
            }
        }
        let mut question = engine.random_question(&conversation, 3, &mut rng);
        let read = engine.load_layer(&conversation, 0).await;
        question.soft_cap = Some(2.5);
        check(&engine, &format!("{codec}, {name}, soft cap"), &question, &[&read]).await;
        question.scale = Some(0.31);
        check(&engine, &format!("{codec}, {name}, cap and scale"), &question, &[&read]).await;
        question.soft_cap = None;
        check(&engine, &format!("{codec}, {name}, scale"), &question, &[&read]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raw_equals_the_reference_over_what_was_sent() {
    every_query_of("raw").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fp8_equals_the_reference_over_what_reads_back() {
    every_query_of("fp8").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kvcomp_equals_the_reference_over_what_reads_back() {
    every_query_of("kvcomp").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vecinfer_equals_the_reference_over_what_reads_back() {
    every_query_of("vecinfer-2").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kivi_equals_the_reference_over_what_reads_back() {
    every_query_of("k=uniform(b=4,g=32,axis=channel); v=uniform(b=4,g=32,axis=token)").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_precision_keeps_the_budget_of_f32() {
    let daemon = daemon().with_setting("device.precision", "\"single\"").start().await;
    for codec in ["kivi-4", "vecinfer-2"] {
        let mut rng = TestRng::new(SEED);
        let shape = ModelShape { block_tokens: 64, ..ModelShape::small_shape() };
        let engine = engine(&daemon).with_name(codec).register_model(shape, codec).await;
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, 400, &mut rng).await;
        let read = engine.load_layer(&conversation, 0).await;
        let question = engine.random_question(&conversation, 4, &mut rng);
        let answer = engine.ask_question(&question).await;
        let yardstick = BudgetYardstick { shape: &engine.shape, precision: ErrorPrecision::Single };
        assert_within_precision(codec, yardstick, &question, &answer, &[&read]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_reads_each_query_from_its_own_sequence() {
    let daemon = daemon().start().await;
    for codec in PRESETS {
        let mut rng = TestRng::new(SEED);
        let shape = ModelShape { group: 4, ..ModelShape::small_shape() };
        let engine = engine(&daemon).with_name(codec).register_model(shape, codec).await;
        let mut conversations = Vec::new();
        for tokens in [1, 16, 70, 200] {
            let mut conversation = engine.open_sequence().await;
            engine.grow_sequence(&mut conversation, tokens, &mut rng).await;
            conversations.push((engine.load_layer(&conversation, 0).await, conversation));
        }
        // Ragged in both directions, one sequence twice, one query that sees nothing.
        let query = |index: usize, n_q| AttendQuery::new(conversations[index].1.sequence, n_q);
        let queries = vec![
            query(3, 2),
            query(0, 1),
            AttendQuery { start: Some(3), end: Some(3), ..query(2, 1) },
            query(2, 40),
            AttendQuery { position: Some(64), ..query(3, 5) },
            query(1, 16),
        ];
        let rows = [3, 0, 2, 2, 3, 1].map(|index: usize| &conversations[index].0);
        let question = engine.question_of(queries, &mut rng);
        check(&engine, codec, &question, &rows).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disjoint_ranges_merge_to_the_whole() {
    let daemon = daemon().start().await;
    for codec in PRESETS {
        let mut rng = TestRng::new(SEED);
        let engine =
            engine(&daemon).with_name(codec).register_model(ModelShape::small_shape(), codec).await;
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, 230, &mut rng).await;
        let read = engine.load_layer(&conversation, 0).await;
        let whole = engine.random_question(&conversation, 6, &mut rng);
        let base = AttendQuery { position: Some(224), ..whole.queries[0] };
        // The last cut lies among the query tokens: the first of them see nothing behind it.
        for cut in [0, 1, 100, 228, 230] {
            let ask = async |query| {
                engine.ask_question(&QueryBatch { queries: vec![query], ..whole.clone() }).await
            };
            let mut merged = ask(AttendQuery { end: Some(cut), ..base }).await;
            let rest = ask(AttendQuery { start: Some(cut), ..base }).await;
            merge_partial(
                &mut PartialResult { out: &mut merged.out, lse: &mut merged.lse },
                PartialView { out: &rest.out, lse: &rest.lse },
            );
            let context = format!("{codec}, cut at {cut}");
            assert_within_budget(&context, &engine, &whole, &merged, &[&read]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_stream_answers_in_the_order_of_its_batches() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(ModelShape::small_shape(), "raw").await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, 90, &mut rng).await;
    let questions: Vec<_> =
        (1..30).map(|n_q| engine.random_question(&conversation, n_q, &mut rng)).collect();
    let mut stream = engine.client.attend_stream(8).await.unwrap();
    let mut answers = Vec::new();
    for question in &questions {
        answers.extend(stream.send_batch(engine.attend_batch(question)).await.unwrap());
    }
    answers.extend(stream.finish_stream().await.unwrap());
    assert_eq!(answers.len(), questions.len());
    for (question, streamed) in questions.iter().zip(answers) {
        let alone = engine.client.attend_batch(engine.attend_batch(question)).await.unwrap();
        assert_eq!(streamed, alone, "{} query tokens", question.queries[0].n_q);
    }
}
