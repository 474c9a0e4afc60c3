//! A sequence that grows token by token: what lies in a window is kept as it came, and at every
//! length attention agrees with what reads back.

use kvd_client::DType;
use kvd_tests::codec::{PRESETS, with_windows};
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestEngine, TestRng, assert_within_budget, daemon,
    engine,
};

const SEED: u64 = 20_240_602;
const BLOCK: u32 = 16;

fn shape() -> ModelShape {
    ModelShape { group: 2, block_tokens: BLOCK, dtype: DType::F16, ..ModelShape::small_shape() }
}

/// Tokens `range` of two sets of rows are the same bits.
fn assert_same(context: &str, a: &LayerRows, b: &LayerRows, range: std::ops::Range<u32>) {
    let shape = shape();
    let (a, b) = (a.token_range(&shape, range.clone()), b.token_range(&shape, range.clone()));
    assert_eq!(a, b, "{context}: tokens {range:?} are not as they came");
}

/// One more token, read and attended.
async fn step(
    engine: &TestEngine,
    conversation: &mut StoredSequence,
    context: &str,
    rng: &mut TestRng,
) {
    engine.grow_sequence(conversation, 1, rng).await;
    let read = engine.load_layer(conversation, 0).await;
    let question = engine.random_question(conversation, 1, rng);
    let answer = engine.ask_question(&question).await;
    assert_within_budget(context, engine, &question, &answer, &[&read]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_stay_exact_while_a_sequence_grows_token_by_token() {
    let (sink, recent) = (21, 19);
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = TestRng::new(SEED);
        let codec = with_windows(preset, sink, recent);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), &codec).await;
        let mut conversation = engine.open_sequence().await;
        for length in 1..=90u32 {
            let context = format!("{preset}, {length} tokens, seed {SEED}");
            step(&engine, &mut conversation, &context, &mut rng).await;
            let read = engine.load_layer(&conversation, 0).await;
            let stored = &conversation.layers[0];
            assert_same(&context, &read, stored, 0..sink.min(length));
            assert_same(&context, &read, stored, length.saturating_sub(recent)..length);
            let usage = engine.client.describe_sequence(conversation.sequence).await.unwrap();
            // The first block lies in the sink, the second half in it: one is never packed, the
            // other never wholly.
            let due = u64::from(length.saturating_sub(recent) / BLOCK);
            assert_eq!(usage.packed_blocks, due.saturating_sub(2), "{context}");
            assert_eq!(usage.length, length, "{context}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_block_is_exact_in_every_codec() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = TestRng::new(SEED);
        let codec = with_windows(preset, 0, 0);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), &codec).await;
        let mut conversation = engine.open_sequence().await;
        for length in 1..=2 * BLOCK + 3 {
            let context = format!("{preset}, {length} tokens, seed {SEED}");
            step(&engine, &mut conversation, &context, &mut rng).await;
            let read = engine.load_layer(&conversation, 0).await;
            let open = length / BLOCK * BLOCK..length;
            assert_same(&context, &read, &conversation.layers[0], open);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_store_and_many_read_back_the_same() {
    let daemon = daemon().start().await;
    // Without an entropy stage, whose tables are made from the first blocks that arrive.
    for preset in ["raw", "fp8", "vecinfer-2"] {
        let mut rng = TestRng::new(SEED);
        let codec = with_windows(preset, 5, 30);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), &codec).await;
        let (mut whole, mut pieces) = (engine.open_sequence().await, engine.open_sequence().await);
        let rows = LayerRows::random_rows(&engine.shape, 150, &mut rng);
        engine.store_rows(&mut whole, 0, &rows).await.unwrap();
        for (start, end) in [(0, 1), (1, 15), (15, 17), (17, 64), (64, 64 + 48), (112, 150)] {
            let part = rows.token_range(&engine.shape, start..end);
            engine.store_rows(&mut pieces, 0, &part).await.unwrap();
        }
        let (whole, pieces) =
            (engine.load_layer(&whole, 0).await, engine.load_layer(&pieces, 0).await);
        assert_eq!(whole, pieces, "{preset}, seed {SEED}");
    }
}
