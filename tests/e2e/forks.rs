//! Forks share what they have in common and nothing else; truncation forgets; closing frees.

use kvd_client::{Client, ErrorCode, SequenceId};
use kvd_tests::codec::{PRESETS, windowed};
use kvd_tests::{
    Conversation, Daemon, Engine, Rng, Rows, Shape, assert_refused, assert_within_budget, daemon,
    engine,
};

const SEED: u64 = 20_240_603;

/// Two layers, blocks of 16.
fn shape() -> Shape {
    Shape { layers: 2, group: 2, ..Shape::small() }
}

/// What reads back is what the conversation stored, up to the codec's error, and attention agrees
/// with what reads back.
async fn assert_consistent(engine: &Engine, of: &Conversation, context: &str, exact: bool) {
    for layer in 0..engine.shape.layers {
        let read = engine.load(of, layer).await;
        let stored = &of.layers[layer as usize];
        if exact {
            assert_eq!(&read, stored, "{context}, layer {layer}, seed {SEED}");
        } else {
            let error = distance(&read, stored);
            assert!(error < 0.7, "{context}, layer {layer}: error {error}, seed {SEED}");
        }
    }
    let read = engine.load(of, 0).await;
    let question = engine.question(of, 3, &mut Rng::new(SEED));
    let answer = engine.ask(&question).await;
    assert_within_budget(context, engine, &question, &answer, &[&read]);
}

/// Relative distance of the keys of two sets of rows; that of unrelated rows is above 1.
fn distance(a: &Rows, b: &Rows) -> f32 {
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
        let mut rng = Rng::new(SEED);
        let codec = windowed(preset, 4, 20);
        let engine = engine(&daemon).named(preset).register(shape(), &codec).await;
        let mut parent = engine.open().await;
        engine.grow(&mut parent, 75, &mut rng).await;
        // 75 is in an open block; 57 in a block of the window; 23 in a packed one; 64 between two.
        for length in [75, 57, 23, 64] {
            let context = format!("{preset}, fork at {length}");
            let mut left = engine.fork(&parent, length).await;
            let mut right = engine.fork(&parent, length).await;
            for tokens in [1, 30, 17] {
                engine.grow(&mut left, tokens, &mut rng).await;
                engine.grow(&mut right, tokens, &mut rng).await;
            }
            let exact = preset == "raw";
            assert_consistent(&engine, &left, &context, exact).await;
            assert_consistent(&engine, &right, &context, exact).await;
            assert_consistent(&engine, &parent, &context, exact).await;
            engine.close(left).await;
            // The parent and the other side do not need it.
            assert_consistent(&engine, &right, &context, exact).await;
            engine.close(right).await;
        }
        engine.grow(&mut parent, 40, &mut rng).await;
        assert_consistent(&engine, &parent, preset, preset == "raw").await;
        engine.close(parent).await;
    }
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_outlives_its_parent() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = Rng::new(SEED);
        let engine = engine(&daemon).named(preset).register(shape(), preset).await;
        let mut parent = engine.open().await;
        engine.grow(&mut parent, 170, &mut rng).await;
        let before = engine.load(&parent, 1).await;
        let child = engine.fork(&parent, 170).await;
        let sequence = parent.sequence;
        engine.close(parent).await;
        let gone = engine.client.describe_sequence(sequence).await;
        assert_refused(gone, ErrorCode::UnknownSequence, "closed");
        assert_eq!(engine.load(&child, 1).await, before, "{preset}, seed {SEED}");
        engine.close(child).await;
    }
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_takes_no_page_memory_until_it_grows() {
    let daemon = daemon().start().await;
    let mut rng = Rng::new(SEED);
    let engine = engine(&daemon).register(shape(), "kvcomp").await;
    let mut parent = engine.open().await;
    engine.grow(&mut parent, 500, &mut rng).await;
    let before = daemon.pool().await;
    let child = engine.fork(&parent, 490).await;
    assert_eq!(daemon.pool().await, before);
    engine.close(child).await;
    assert_eq!(daemon.pool().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_truncation_replaces_what_was_there() {
    let daemon = daemon().start().await;
    for preset in PRESETS {
        let mut rng = Rng::new(SEED);
        let codec = windowed(preset, 0, 20);
        let engine = engine(&daemon).named(preset).register(shape(), &codec).await;
        let mut conversation = engine.open().await;
        engine.grow(&mut conversation, 120, &mut rng).await;
        // Into the window, into packed blocks, between two blocks, to nothing.
        for length in [111, 39, 32, 0] {
            let context = format!("{preset}, truncated to {length}");
            engine.truncate(&mut conversation, length).await;
            engine.grow(&mut conversation, 60, &mut rng).await;
            assert_consistent(&engine, &conversation, &context, preset == "raw").await;
        }
        engine.close(conversation).await;
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
    let mut rng = Rng::new(SEED);
    let engine = engine(&daemon).register(shape(), "raw").await;
    let mut conversation = engine.open().await;
    engine.grow(&mut conversation, 10, &mut rng).await;
    let ahead = Rows::random(&engine.shape, 5, &mut rng);
    engine.store(&mut conversation, 0, &ahead).await.unwrap();
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
async fn family(daemon: &Daemon, codec: &str, rng: &mut Rng) -> (Engine, Vec<Conversation>) {
    let engine = engine(daemon).named(codec).register(shape(), codec).await;
    let mut members = vec![engine.open().await];
    engine.grow(&mut members[0], 90, rng).await;
    for length in [70, 65, 50] {
        let mut child = engine.fork(&members[members.len() - 1], length).await;
        engine.grow(&mut child, 21, rng).await;
        members.push(child);
    }
    (engine, members)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_everything_in_any_order_gives_everything_back() {
    let daemon = daemon().start().await;
    for codec in PRESETS {
        let mut rng = Rng::new(SEED);
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let (engine, mut members) = family(&daemon, codec, &mut rng).await;
            let mut members: Vec<_> = members.drain(..).map(Some).collect();
            for index in order {
                engine.close(members[index].take().unwrap()).await;
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
