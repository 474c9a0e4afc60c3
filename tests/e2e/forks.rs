//! Forks share what they have in common and nothing else; truncation forgets; closing frees.

use kvd_client::{Client, ErrorCode, SequenceId};
use kvd_tests::codec::{PRESETS, with_windows};
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestDaemon, TestEngine, TestRng, assert_refused,
    assert_within_budget, daemon, engine,
};

const SEED: u64 = 20_240_603;

/// Two layers, blocks of 16.
fn shape() -> ModelShape {
    ModelShape { layers: 2, group: 2, ..ModelShape::small_shape() }
}

/// A fork reads back the rows that the conversation stored, up to the codec's error, and attention
/// agrees with what reads back.
async fn assert_consistent(engine: &TestEngine, of: &StoredSequence, context: &str, exact: bool) {
    for layer in 0..engine.shape.layers {
        let read = engine.load_layer(of, layer).await;
        let stored = &of.layers[layer as usize];
        if exact {
            assert_eq!(&read, stored, "{context}, layer {layer}, seed {SEED}");
        } else {
            let error = distance(&read, stored);
            assert!(error < 0.7, "{context}, layer {layer}: error {error}, seed {SEED}");
        }
    }
    let read = engine.load_layer(of, 0).await;
    let question = engine.random_question(of, 3, &mut TestRng::new(SEED));
    let answer = engine.ask_question(&question).await;
    assert_within_budget(context, engine, &question, &answer, &[&read]);
}

/// Relative distance of the keys of two sets of rows; that of unrelated rows is above 1.
fn distance(a: &LayerRows, b: &LayerRows) -> f32 {
    let sums =
        a.k.iter()
            .zip(&b.k)
            .fold((0.0, 0.0), |(error, norm), (a, b)| (error + (a - b) * (a - b), norm + b * b));
    (sums.0 / sums.1).sqrt()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_in_the_middle_of_a_block_and_its_parent_grow_apart() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = TestRng::new(SEED);
        let codec = with_windows(preset, 4, 20);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), &codec).await;
        let mut parent = engine.open_sequence().await;
        engine.grow_sequence(&mut parent, 75, &mut rng).await;
        // 75 is in an open block; 57 in a block of the window; 23 in a packed one; 64 between two.
        for length in [75, 57, 23, 64] {
            let context = format!("{preset}, fork at {length}");
            let mut left = engine.fork_sequence(&parent, length).await;
            let mut right = engine.fork_sequence(&parent, length).await;
            for tokens in [1, 30, 17] {
                engine.grow_sequence(&mut left, tokens, &mut rng).await;
                engine.grow_sequence(&mut right, tokens, &mut rng).await;
            }
            let exact = preset == "raw";
            assert_consistent(&engine, &left, &context, exact).await;
            assert_consistent(&engine, &right, &context, exact).await;
            assert_consistent(&engine, &parent, &context, exact).await;
            engine.close_sequence(left).await;
            // The parent and the other side do not need it.
            assert_consistent(&engine, &right, &context, exact).await;
            engine.close_sequence(right).await;
        }
        engine.grow_sequence(&mut parent, 40, &mut rng).await;
        assert_consistent(&engine, &parent, preset, preset == "raw").await;
        engine.close_sequence(parent).await;
    }
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_outlives_its_parent() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = TestRng::new(SEED);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), preset).await;
        let mut parent = engine.open_sequence().await;
        engine.grow_sequence(&mut parent, 170, &mut rng).await;
        let before = engine.load_layer(&parent, 1).await;
        let child = engine.fork_sequence(&parent, 170).await;
        let sequence = parent.sequence;
        engine.close_sequence(parent).await;
        let gone = engine.client.describe_sequence(sequence).await;
        assert_refused(gone, ErrorCode::UnknownSequence, "closed");
        assert_eq!(engine.load_layer(&child, 1).await, before, "{preset}, seed {SEED}");
        engine.close_sequence(child).await;
    }
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_takes_no_page_memory_until_it_grows() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "kvcomp").await;
    let mut parent = engine.open_sequence().await;
    engine.grow_sequence(&mut parent, 500, &mut rng).await;
    let before = daemon.pool_stats().await;
    let child = engine.fork_sequence(&parent, 490).await;
    assert_eq!(daemon.pool_stats().await, before);
    engine.close_sequence(child).await;
    assert_eq!(daemon.pool_stats().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_truncation_replaces_what_was_there() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = TestRng::new(SEED);
        let codec = with_windows(preset, 0, 20);
        let engine = engine(&daemon).with_name(preset).register_model(shape(), &codec).await;
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, 120, &mut rng).await;
        // Into the window, into packed blocks, between two blocks, to nothing.
        for length in [111, 39, 32, 0] {
            let context = format!("{preset}, truncated to {length}");
            engine.truncate_sequence(&mut conversation, length).await;
            engine.grow_sequence(&mut conversation, 60, &mut rng).await;
            assert_consistent(&engine, &conversation, &context, preset == "raw").await;
        }
        engine.close_sequence(conversation).await;
    }
    assert!(daemon.is_empty().await);
}

/// Lengths of a sequence by layer.
async fn lengths(client: &Client, sequence: SequenceId) -> Vec<u32> {
    client.describe_sequence(sequence).await.expect("describe").layer_lengths
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_every_layer_has_can_be_forked_or_kept() {
    let daemon = daemon().start().await;
    let mut rng = TestRng::new(SEED);
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let mut conversation = engine.open_sequence().await;
    engine.grow_sequence(&mut conversation, 10, &mut rng).await;
    let ahead = LayerRows::random_rows(&engine.shape, 5, &mut rng);
    engine.store_rows(&mut conversation, 0, &ahead).await.unwrap();
    let sequence = conversation.sequence;
    assert_eq!(lengths(&engine.client, sequence).await, [15, 10]);
    let fork = engine.client.fork_sequence(sequence, Some(11)).await;
    assert_refused(fork, ErrorCode::RangeNotStored, "11 tokens asked for, 10 stored");
    let fork = engine.client.fork_sequence(sequence, None).await.unwrap();
    assert_eq!(fork.length, 10);
    assert_eq!(lengths(&engine.client, fork.sequence).await, [10, 10]);
    let truncated = engine.client.truncate_sequence(sequence, 11).await;
    assert_refused(truncated, ErrorCode::RangeNotStored, "11 tokens asked for, 10 stored");
    engine.client.truncate_sequence(sequence, 10).await.unwrap();
    assert_eq!(lengths(&engine.client, sequence).await, [10, 10]);
}

/// A fork of a fork of a fork, each with tokens of its own.
async fn family(
    daemon: &TestDaemon,
    codec: &str,
    rng: &mut TestRng,
) -> (TestEngine, Vec<StoredSequence>) {
    let engine = engine(daemon).with_name(codec).register_model(shape(), codec).await;
    let mut members = vec![engine.open_sequence().await];
    engine.grow_sequence(&mut members[0], 90, rng).await;
    for length in [70, 65, 50] {
        let mut child = engine.fork_sequence(&members[members.len() - 1], length).await;
        engine.grow_sequence(&mut child, 21, rng).await;
        members.push(child);
    }
    (engine, members)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_everything_in_any_order_gives_everything_back() {
    let daemon = daemon().start().await;
    for codec in PRESETS {
        let mut rng = TestRng::new(SEED);
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let (engine, mut members) = family(&daemon, codec, &mut rng).await;
            let mut members: Vec<_> = members.drain(..).map(Some).collect();
            for index in order {
                engine.close_sequence(members[index].take().unwrap()).await;
                for member in members.iter().flatten() {
                    let context = format!("{codec}, after {index} of {order:?}");
                    assert_consistent(&engine, member, &context, codec == "raw").await;
                }
            }
            assert!(daemon.is_empty().await, "{codec}, {order:?}");
            let model = engine.client.describe_model(engine.model).await.unwrap().model.unwrap();
            assert_eq!((model.sequences, model.stored), (0, Some(Default::default())));
        }
    }
}
