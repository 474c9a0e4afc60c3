//! Random histories against the plainest possible model: a sequence is a list of rows by layer.
//! The codec keeps every bit, so what reads back must be what the list says, whatever was packed,
//! shared, copied or cut on the way.

use kvd_client::{
    Client, DType, ErrorCode, Geometry, LayerIndex, LoadRange, ModelId, ModelSpec, RopePairing,
    SequenceId, StoreChunk,
};
use kvd_tests::rows::to_bytes;
use kvd_tests::{assert_refused, daemon};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const LAYERS: u32 = 2;
const DIM: u32 = 2;
const SEQUENCES_MAX: usize = 6;

/// One step. Numbers are reduced to what exists when the step is taken.
#[derive(Clone, Debug)]
enum Step {
    Open,
    /// A layer of a sequence gets so many tokens.
    Store(usize, u32, u32),
    /// The last store of a layer again.
    Replay(usize, u32),
    /// A fork keeps so many thousandths of a sequence's length.
    Fork(usize, u32),
    Truncate(usize, u32),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let of = 0..SEQUENCES_MAX;
    prop_oneof![
        1 => Just(Step::Open),
        8 => (of.clone(), 0..LAYERS, 1u32..23).prop_map(|(s, l, n)| Step::Store(s, l, n)),
        1 => (of.clone(), 0..LAYERS).prop_map(|(s, l)| Step::Replay(s, l)),
        2 => (of.clone(), 0..=1000u32).prop_map(|(s, part)| Step::Fork(s, part)),
        2 => (of.clone(), 0..=1000u32).prop_map(|(s, part)| Step::Truncate(s, part)),
        1 => of.prop_map(Step::Close),
    ]
}

/// The expected content of a sequence.
struct Expected {
    id: SequenceId,
    /// One number for each token of a layer; its row is made of it.
    layers: [Vec<u32>; LAYERS as usize],
    /// Start of the last store of each layer, while it can be repeated.
    last: [Option<usize>; LAYERS as usize],
}

impl Expected {
    fn length(&self) -> u32 {
        self.layers.iter().map(Vec::len).min().unwrap_or(0) as u32
    }
}

struct History<'a> {
    client: &'a Client,
    model: ModelId,
    sequences: Vec<Expected>,
    tokens: u32,
}

/// The row of a token: no two tokens, channels or sides have the same.
fn rows(tokens: &[u32], side: f32) -> Vec<f32> {
    tokens.iter().flat_map(|t| (0..DIM).map(move |c| (t * DIM + c) as f32 + side)).collect()
}

impl History<'_> {
    fn chunk(&self, index: usize, layer: u32, start: usize) -> StoreChunk {
        let sequence = &self.sequences[index];
        let tokens = &sequence.layers[layer as usize][start..];
        StoreChunk {
            sequence: sequence.id,
            layer: LayerIndex(layer),
            start: start as u32,
            tokens: tokens.len() as u32,
            k: to_bytes(DType::F32, &rows(tokens, 0.25)),
            v: to_bytes(DType::F32, &rows(tokens, 0.75)),
        }
    }

    async fn open(&mut self) {
        if self.sequences.len() < SEQUENCES_MAX {
            let id = self.client.open_sequence(self.model).await.expect("open");
            self.sequences.push(Expected { id, layers: Default::default(), last: [None; 2] });
        }
    }

    async fn take(&mut self, step: &Step) {
        if matches!(step, Step::Open) || self.sequences.is_empty() {
            return self.open().await;
        }
        let count = self.sequences.len();
        match *step {
            Step::Open => {}
            Step::Store(index, layer, tokens) => {
                let index = index % count;
                let new = self.tokens..self.tokens + tokens;
                self.tokens = new.end;
                let expected = &mut self.sequences[index];
                let start = expected.layers[layer as usize].len();
                expected.layers[layer as usize].extend(new);
                expected.last[layer as usize] = Some(start);
                let ack =
                    self.client.store_chunk(self.chunk(index, layer, start)).await.expect("store");
                assert_eq!((ack.length, ack.replayed), (start as u32 + tokens, false));
                self.check_layer(index, layer).await;
            }
            Step::Replay(index, layer) => {
                let index = index % count;
                if let Some(start) = self.sequences[index].last[layer as usize] {
                    let ack = self.client.store_chunk(self.chunk(index, layer, start)).await;
                    assert!(ack.expect("replay").replayed);
                }
            }
            Step::Fork(index, part) => self.fork(index % count, part).await,
            Step::Truncate(index, part) => self.truncate(index % count, part).await,
            Step::Close(index) => {
                let closed = self.sequences.swap_remove(index % count);
                self.client.close_sequence(closed.id).await.expect("close");
            }
        }
    }

    async fn fork(&mut self, index: usize, part: u32) {
        if self.sequences.len() == SEQUENCES_MAX {
            return;
        }
        let parent = &self.sequences[index];
        let length = parent.length() * part / 1000;
        let forked = self.client.fork_sequence(parent.id, Some(length)).await.expect("fork");
        let layers = parent.layers.clone().map(|mut tokens| {
            tokens.truncate(length as usize);
            tokens
        });
        self.sequences.push(Expected { id: forked.sequence, layers, last: [None; 2] });
        self.check(self.sequences.len() - 1).await;
    }

    async fn truncate(&mut self, index: usize, part: u32) {
        let expected = &mut self.sequences[index];
        let length = expected.length() * part / 1000;
        self.client.truncate_sequence(expected.id, length).await.expect("truncate");
        for (tokens, last) in expected.layers.iter_mut().zip(&mut expected.last) {
            if tokens.len() > length as usize {
                tokens.truncate(length as usize);
                *last = None;
            }
        }
        self.check(index).await;
    }

    async fn check(&self, index: usize) {
        for layer in 0..LAYERS {
            self.check_layer(index, layer).await;
        }
    }

    async fn check_layer(&self, index: usize, layer: u32) {
        let expected = &self.sequences[index];
        let tokens = &expected.layers[layer as usize];
        let range = LoadRange {
            sequence: expected.id,
            layer: LayerIndex(layer),
            start: 0,
            end: tokens.len() as u32,
            dtype: None,
        };
        let loaded = self.client.load_rows(range).await.expect("load");
        assert_eq!(loaded.k, to_bytes(DType::F32, &rows(tokens, 0.25)), "K of layer {layer}");
        assert_eq!(loaded.v, to_bytes(DType::F32, &rows(tokens, 0.75)), "V of layer {layer}");
        let beyond = LoadRange { end: range.end + 1, ..range };
        assert_refused(self.client.load_rows(beyond).await, ErrorCode::RangeNotStored, "asked for");
    }
}

async fn run(codec: &str, block_tokens: u32, steps: &[Step]) {
    let daemon = daemon().start().await;
    let client = daemon.client().await;
    let geometry = Geometry {
        layers: LAYERS,
        kv_heads: 1,
        head_dim_k: DIM,
        head_dim_v: DIM,
        block_tokens,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = ("model".to_owned(), codec.to_owned());
    let spec = ModelSpec { name, geometry, codec, calibration: Default::default() };
    let model = client.register_model(spec).await.expect("register").model;
    let mut history = History { client: &client, model, sequences: Vec::new(), tokens: 0 };
    for step in steps {
        history.take(step).await;
    }
    for index in 0..history.sequences.len() {
        history.check(index).await;
    }
    for sequence in history.sequences {
        client.close_sequence(sequence.id).await.expect("close");
    }
    assert!(daemon.is_empty().await, "everything is closed");
}

/// Proptest prints the shortest history that fails; it is all that is needed to see it again.
#[test]
fn any_history_reads_back_as_a_list_of_rows_would() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let codec = prop_oneof![
        Just("raw"),
        Just("k=raw; v=raw; sink=3"),
        Just("k=raw; v=raw; recent=7"),
        Just("k=raw; v=raw; sink=9; recent=12"),
    ];
    let history = (codec, 1u32..9, proptest::collection::vec(step(), 1..60));
    let config = Config { cases: 64, failure_persistence: None, ..Config::default() };
    let ran = TestRunner::new(config).run(&history, |(codec, block_tokens, steps)| {
        runtime.block_on(run(codec, block_tokens, &steps));
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}
