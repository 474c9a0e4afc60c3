//! Steps: many layers in one call, from and to an engine's own memory, by region and by gRPC.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod refusals;
#[path = "../support/mod.rs"]
mod support;

use kvd::RunningDaemon;
use kvd_client::{
    Client, ClientError, DType, ErrorCode, Geometry, LayerIndex, LoadRange, LoadStep, ModelId,
    ModelSpec, RegionClient, RegionOptions, RegionSlice, RopePairing, RowLayout, RowTable,
    SequenceId, StepPart, StoreChunk, StoreStep, StoredPart,
};
use std::path::PathBuf;
use support::start;

const LAYERS: u32 = 3;
const HEADS: u32 = 2;
const DIM: u32 = 64;
/// Bytes of one row, f16.
const ROW: u64 = DIM as u64 * 2;
const TOKEN: u64 = HEADS as u64 * ROW;

const MEMORY_BYTES: u64 = 8 << 20;
const DONE: u64 = MEMORY_BYTES - 65_536 - 256;
const ROOM: RegionSlice = RegionSlice { offset: MEMORY_BYTES - 65_536, bytes: 65_536 };

struct Host {
    running: RunningDaemon,
    client: Client,
    region: RegionClient,
    _dir: tempfile::TempDir,
}

impl Host {
    async fn start(flags: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path: PathBuf = dir.path().join("region");
        let text = path.display().to_string();
        let flags: Vec<_> =
            flags.iter().copied().chain([("server.listen_region", &text[..])]).collect();
        let running = start(&flags).await;
        let address = running.bound_addresses().tcp.expect("a TCP listener");
        let endpoint = format!("http://{address}").parse().expect("an endpoint");
        let client = Client::connect(endpoint).await.expect("a client");
        let options = RegionOptions::default().with_bytes(MEMORY_BYTES);
        let region = blocking(|| RegionClient::open_region(&path, &options)).expect("a region");
        Self { running, client, region, _dir: dir }
    }

    async fn model(&self, codec: &str) -> ModelId {
        let geometry = Geometry {
            layers: LAYERS,
            kv_heads: HEADS,
            head_dim_k: DIM,
            head_dim_v: DIM,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let (name, codec) = (codec.to_owned(), codec.to_owned());
        let spec = ModelSpec { name, geometry, codec, calibration: bytes::Bytes::new() };
        self.client.register_model(spec).await.expect("a model").model
    }

    async fn open(&self, model: ModelId) -> SequenceId {
        self.client.open_sequence(model).await.expect("a sequence")
    }

    /// Stores a step by region, whose memory is written first, or by gRPC.
    async fn store(&self, way: Way, step: StoreStep) -> Result<Vec<StoredPart>, ClientError> {
        match way {
            Way::Grpc => self.client.store_step(step).await,
            Way::Region => blocking(|| {
                self.region.memory().write_bytes(0, &step.memory).expect("inside");
                let step = StoreStep { memory: bytes::Bytes::new(), ..step };
                self.region.control_calls(DONE, ROOM).store_step(step)
            }),
        }
    }

    /// Loads a step into memory full of 0xEE by region, of zeros by gRPC: the memory, and which
    /// parts failed by which code.
    async fn load(&self, way: Way, step: LoadStep) -> Result<Loaded, ClientError> {
        let (memory, errors) = match way {
            Way::Grpc => {
                let loaded = self.client.load_step(step).await?;
                (loaded.memory.to_vec(), loaded.errors)
            }
            Way::Region => blocking(|| {
                let mut memory = vec![0xEE; step.memory_bytes as usize];
                self.region.memory().write_bytes(0, &memory).expect("inside");
                let step = LoadStep { memory_bytes: 0, ..step };
                let errors = self.region.control_calls(DONE, ROOM).load_step(step)?;
                self.region.memory().read_bytes(0, &mut memory).expect("inside");
                Ok::<_, ClientError>((memory, errors))
            })?,
        };
        let errors = errors.into_iter().map(|error| (error.part, error.error.code)).collect();
        Ok(Loaded { memory, errors })
    }

    async fn rows(&self, sequence: SequenceId, layer: u32, tokens: u32) -> [Vec<u8>; 2] {
        let layer = LayerIndex(layer);
        let range = LoadRange { sequence, layer, start: 0, end: tokens, dtype: None };
        let rows = self.client.load_rows(range).await.expect("rows");
        [rows.k.to_vec(), rows.v.to_vec()]
    }

    async fn lengths(&self, sequence: SequenceId) -> Vec<u32> {
        self.client.describe_sequence(sequence).await.expect("a sequence").layer_lengths
    }
}

#[derive(Debug)]
struct Loaded {
    memory: Vec<u8>,
    errors: Vec<(u32, ErrorCode)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Region,
    Grpc,
}

const WAYS: [Way; 2] = [Way::Region, Way::Grpc];

/// Calls that block, beside a daemon in this process.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

/// Dense rows `[layers, tokens, heads, dim]` of noise.
fn noise(seed: u32, tokens: u32) -> Vec<u8> {
    let values = (0..LAYERS * tokens * HEADS * DIM).map(|i| {
        let bits = (i + seed * 1_000_003).wrapping_mul(2_654_435_761);
        ((bits ^ bits >> 15).wrapping_mul(2_246_822_519) >> 8) as f32 / 8_388_608.0 - 1.0
    });
    let values: Vec<f32> = values.collect();
    let mut bytes = vec![0; values.len() * 2];
    DType::F16.narrow_values(&values, &mut bytes);
    bytes
}

/// One layer of dense rows.
fn layer_of(rows: &[u8], layer: u32) -> &[u8] {
    let bytes = rows.len() / LAYERS as usize;
    &rows[layer as usize * bytes..][..bytes]
}

/// All layers of a sequence, whose K and V are dense one after another.
fn dense_part(sequence: SequenceId, start: u32, tokens: u32) -> StepPart {
    let side_bytes = u64::from(LAYERS * tokens) * TOKEN;
    StepPart {
        sequence,
        start,
        tokens,
        first_layer: LayerIndex(0),
        layers: None,
        k: RowLayout::from_offset(0),
        v: RowLayout::from_offset(side_bytes),
    }
}

fn dense_step(model: ModelId, sequence: SequenceId, start: u32, [k, v]: [&[u8]; 2]) -> StoreStep {
    let tokens = (k.len() as u64 / TOKEN / u64::from(LAYERS)) as u32;
    let parts = vec![dense_part(sequence, start, tokens)];
    StoreStep { model, parts, memory: [k, v].concat().into() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_stores_what_a_message_for_each_layer_does() {
    let host = Host::start(&[]).await;
    let (k, v) = (noise(1, 200), noise(2, 200));
    for codec in ["raw", "kivi-4", "kvcomp"] {
        let model = host.model(codec).await;
        let right = host.open(model).await;
        let mut packed = 0;
        for layer in 0..LAYERS {
            let of = |rows: &[u8]| bytes::Bytes::copy_from_slice(layer_of(rows, layer));
            let (start, tokens, layer) = (0, 200, LayerIndex(layer));
            let chunk = StoreChunk { sequence: right, layer, start, tokens, k: of(&k), v: of(&v) };
            packed += host.client.store_chunk(chunk).await.unwrap().packed_blocks;
        }
        for way in WAYS {
            let sequence = host.open(model).await;
            let step = dense_step(model, sequence, 0, [&k, &v]);
            let stored = host.store(way, step.clone()).await.unwrap();
            let wanted = StoredPart { length: 200, replayed: false, packed_blocks: packed };
            assert_eq!(stored, [wanted], "{codec} {way:?}");
            for layer in 0..LAYERS {
                let rows = host.rows(sequence, layer, 200).await;
                assert!(rows == host.rows(right, layer, 200).await, "{codec} {way:?} {layer}");
            }
            // Again, and with other bytes.
            let again = host.store(way, step.clone()).await.unwrap();
            let wanted = StoredPart { length: 200, replayed: true, packed_blocks: 0 };
            assert_eq!(again, [wanted], "{codec} {way:?}");
            let mut memory = step.memory.to_vec();
            *memory.last_mut().unwrap() ^= 1;
            let other = StoreStep { memory: memory.into(), ..step };
            let refused = host.store(way, other).await.unwrap_err();
            assert_eq!(refused.code, Some(ErrorCode::RangeConflict), "{refused}");
            assert!(refused.message.starts_with("parts[0]: layer 2: "), "{refused}");
        }
    }
    host.running.drain().await;
}

/// Where an engine keeps a row: blocks of 16 tokens as `[layers, blocks, heads, 16, K | V]`.
const BLOCKS: u64 = 40;
const BLOCK: u64 = HEADS as u64 * 16 * 2 * ROW;

fn paged(side: u64, blocks: &[u32], first_row: u32) -> RowLayout {
    RowLayout {
        offset: side * ROW,
        head_stride: 16 * 2 * ROW,
        token_stride: 2 * ROW,
        layer_stride: BLOCKS * BLOCK,
        table: Some(RowTable {
            block_tokens: 16,
            block_stride: BLOCK,
            blocks: blocks.to_vec(),
            first_row,
        }),
    }
}

/// The engine's memory with dense rows of K and V at their places.
fn paged_memory(rows: [&[u8]; 2], blocks: &[u32], first_row: u32, fill: u8) -> Vec<u8> {
    let mut memory = vec![fill; (u64::from(LAYERS) * BLOCKS * BLOCK) as usize];
    for (side, rows) in (0..).zip(rows) {
        for (index, row) in rows.chunks(ROW as usize).enumerate() {
            let (token_head, per_layer) = (index as u64, rows.len() as u64 / ROW / 3);
            let (layer, rest) = (token_head / per_layer, token_head % per_layer);
            let (token, head) = (rest / u64::from(HEADS), rest % u64::from(HEADS));
            let at = u64::from(first_row) + token;
            let block = u64::from(blocks[(at / 16) as usize]);
            let at = layer * BLOCKS * BLOCK
                + block * BLOCK
                + head * 16 * 2 * ROW
                + (at % 16) * 2 * ROW
                + side * ROW;
            memory[at as usize..][..ROW as usize].copy_from_slice(row);
        }
    }
    memory
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_go_to_and_from_the_blocks_of_an_engine() {
    let host = Host::start(&[]).await;
    let model = host.model("raw").await;
    let (k, v) = (noise(3, 100), noise(4, 100));
    // From row 5 of a block: 105 rows take 7 blocks, in any order.
    let blocks = [31, 2, 39, 0, 7, 8, 1];
    for way in WAYS {
        let sequence = host.open(model).await;
        let part = StepPart {
            k: paged(0, &blocks, 5),
            v: paged(1, &blocks, 5),
            ..dense_part(sequence, 0, 100)
        };
        let memory = paged_memory([&k, &v], &blocks, 5, 0x11);
        let step = StoreStep { model, parts: vec![part.clone()], memory: memory.into() };
        assert_eq!(host.store(way, step).await.unwrap()[0].length, 100, "{way:?}");
        for layer in 0..LAYERS {
            let [loaded_k, loaded_v] = host.rows(sequence, layer, 100).await;
            assert!(loaded_k == layer_of(&k, layer), "{way:?} {layer}");
            assert!(loaded_v == layer_of(&v, layer), "{way:?} {layer}");
        }
        // Back to other blocks; nothing beside the rows is touched.
        let blocks = [1, 30, 4, 5, 9, 0, 22];
        let part = StepPart { k: paged(0, &blocks, 11), v: paged(1, &blocks, 11), ..part };
        let fill = if way == Way::Region { 0xEE } else { 0 };
        let wanted = paged_memory([&k, &v], &blocks, 11, fill);
        let memory_bytes = wanted.len() as u64;
        let step = LoadStep { model, parts: vec![part], dtype: None, memory_bytes };
        let loaded = host.load(way, step).await.unwrap();
        assert!(loaded.memory == wanted && loaded.errors.is_empty(), "{way:?}");
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn some_layers_and_tokens_are_loaded_in_another_precision() {
    // One thread alone, and blocks on threads beside one another: the answers are the same.
    let alone = load_some(&Host::start(&[]).await).await;
    let beside = load_some(&Host::start(&[("device.threads", "3")]).await).await;
    assert!(alone == beside);
}

/// Loads the middle layer of a few codecs, in f32; the rows of all of them.
async fn load_some(host: &Host) -> Vec<u8> {
    let mut all = Vec::new();
    let (k, v) = (noise(5, 300), noise(6, 300));
    for codec in ["raw", "kivi-4"] {
        let model = host.model(codec).await;
        let sequence = host.open(model).await;
        host.store(Way::Grpc, dense_step(model, sequence, 0, [&k, &v])).await.unwrap();
        let side = 200 * TOKEN * 2;
        let part = StepPart {
            first_layer: LayerIndex(1),
            layers: Some(1),
            v: RowLayout::from_offset(side),
            ..dense_part(sequence, 70, 200)
        };
        let (dtype, layer) = (Some(DType::F32), LayerIndex(1));
        let range = LoadRange { sequence, layer, start: 70, end: 270, dtype };
        let right = host.client.load_rows(range).await.unwrap();
        for way in WAYS {
            let step = LoadStep { model, parts: vec![part.clone()], dtype, memory_bytes: 2 * side };
            let loaded = host.load(way, step).await.unwrap();
            assert!(loaded.memory == [&right.k[..], &right.v[..]].concat(), "{codec} {way:?}");
            all.extend(loaded.memory);
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_anywhere_leaves_nothing() {
    let host = Host::start(&[]).await;
    let model = host.model("kivi-4").await;
    let (k, v) = (noise(7, 100), noise(8, 100));
    for way in WAYS {
        let (one, two) = (host.open(model).await, host.open(model).await);
        let good = dense_step(model, one, 0, [&k, &v]);
        let both = |second: StepPart| StoreStep {
            parts: vec![good.parts[0].clone(), second],
            ..good.clone()
        };
        let of_two = dense_part(two, 0, 100);
        let mut infinite = good.memory.to_vec();
        // The last value of V: the last layer is the one that is refused.
        let end = infinite.len();
        infinite[end - 2..].copy_from_slice(&[0x00, 0x7c]);
        let closed = host.open(model).await;
        host.client.close_sequence(closed).await.unwrap();
        let other = host.open(host.model("raw").await).await;
        let cases = [
            (
                both(StepPart { start: 1, ..of_two.clone() }),
                ErrorCode::RangeGap,
                "parts[1]: layer 0",
            ),
            (
                StoreStep { memory: infinite.into(), ..both(of_two.clone()) },
                ErrorCode::NonFinite,
                "parts[0]: layer 2: ",
            ),
            (
                both(StepPart { sequence: closed, ..of_two.clone() }),
                ErrorCode::UnknownSequence,
                "parts[1]: ",
            ),
            (
                both(StepPart { sequence: other, ..of_two.clone() }),
                ErrorCode::InvalidArgument,
                "parts[1]: sequence",
            ),
        ];
        for (step, code, text) in cases {
            let refused = host.store(way, step).await.unwrap_err();
            assert_eq!(refused.code, Some(code), "{way:?}: {refused}");
            assert!(refused.message.starts_with(text), "{way:?}: {refused}");
            assert_eq!(host.lengths(one).await, [0, 0, 0], "{way:?}: {code}");
            assert_eq!(host.lengths(two).await, [0, 0, 0], "{way:?}: {code}");
        }
        // The right one is then stored, of both sequences.
        let stored = host.store(way, both(of_two)).await.unwrap();
        assert_eq!([stored[0].length, stored[1].length], [100, 100]);
        assert_eq!(host.lengths(two).await, [100, 100, 100]);
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_a_full_pool_refuses_leaves_nothing() {
    let host = Host::start(&[("device.pool_bytes", "1 MiB")]).await;
    let model = host.model("raw").await;
    // 200 tokens of three layers take 307 KiB.
    let (k, v) = (noise(9, 200), noise(10, 200));
    for way in WAYS {
        let mut stored = Vec::new();
        let refused = loop {
            let sequence = host.open(model).await;
            match host.store(way, dense_step(model, sequence, 0, [&k, &v])).await {
                Ok(_) => stored.push(sequence),
                Err(error) => break (sequence, error),
            }
            assert!(stored.len() < 10, "the pool never is full");
        };
        assert_eq!(refused.1.code, Some(ErrorCode::PoolFull), "{}", refused.1);
        assert_eq!(host.lengths(refused.0).await, [0, 0, 0], "{way:?}");
        // One closed makes room for the same step.
        let first = stored.swap_remove(0);
        host.client.close_sequence(first).await.unwrap();
        host.store(way, dense_step(model, refused.0, 0, [&k, &v])).await.unwrap();
        assert_eq!(host.lengths(refused.0).await, [200, 200, 200]);
        stored.push(refused.0);
        for sequence in stored {
            host.client.close_sequence(sequence).await.unwrap();
        }
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_load_fail_alone() {
    let host = Host::start(&[]).await;
    let model = host.model("raw").await;
    let (k, v) = (noise(11, 100), noise(12, 100));
    let (good, short, closed) =
        (host.open(model).await, host.open(model).await, host.open(model).await);
    for sequence in [good, short, closed] {
        host.store(Way::Grpc, dense_step(model, sequence, 0, [&k, &v])).await.unwrap();
    }
    host.client.truncate_sequence(short, 99).await.unwrap();
    host.client.close_sequence(closed).await.unwrap();
    let other = host.open(host.model("kivi-4").await).await;
    let side = 3 * 100 * TOKEN;
    let sequences = [closed, good, short, other];
    let parts = (0..).zip(sequences).map(|(index, sequence): (u64, _)| StepPart {
        k: RowLayout::from_offset(index * 2 * side),
        v: RowLayout::from_offset(index * 2 * side + side),
        ..dense_part(sequence, 0, 100)
    });
    let parts: Vec<_> = parts.collect();
    for way in WAYS {
        let (dtype, memory_bytes) = (None, 8 * side);
        let step = LoadStep { model, parts: parts.clone(), dtype, memory_bytes };
        let loaded = host.load(way, step).await.unwrap();
        let wanted = [
            (0, ErrorCode::UnknownSequence),
            (2, ErrorCode::RangeNotStored),
            (3, ErrorCode::InvalidArgument),
        ];
        assert_eq!(loaded.errors, wanted, "{way:?}");
        let at = 2 * side as usize;
        assert!(loaded.memory[at..][..side as usize] == k, "{way:?}");
        assert!(loaded.memory[at + side as usize..][..side as usize] == v, "{way:?}");
    }
    host.running.drain().await;
}
