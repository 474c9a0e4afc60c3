//! How full a pool is when it refuses: sequences that grow side by side, with pages of many sizes.
//!
//! 48 sequences take turns to append. Blocks that leave the window become pages whose
//! sizes are drawn as an entropy coder's: each layer has its own mean, each block differs a
//! little. When the pool refuses an append, its free share is noted, one sequence is closed at
//! random and a new one takes its place.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may fail, and says how full")]

use kvd_core::{
    BootId, DType, Geometry, IdSpace, LayerIndex, ModelId, Namespace, PageBytes, RopePairing,
    SequenceId,
};
use kvd_store::{
    ArenaPool, BegunAppend, ModelShape, PackedBytes, PackedPages, SequenceStore, StoreError,
    StoreLimits,
};
use std::sync::Arc;

const SEQUENCES: usize = 48;
const REFUSALS: usize = 60;

/// A small generator with a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Uniform in `-1..1`.
    fn signed(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// The model, and the sizes of its pages as shares of a raw block.
#[derive(Clone, Copy)]
struct Workload {
    pool_bytes: u64,
    layers: u32,
    /// The mean over all layers.
    mean: f64,
    /// How far a layer's mean is from it, at most, as a share of it.
    layer_spread: f64,
    /// How far a block's size is from its layer's mean, at most, as a share of it.
    block_spread: f64,
}

struct Growth {
    store: SequenceStore,
    model: Arc<ModelShape>,
    sizes: Workload,
    layer_means: Vec<f64>,
    random: Random,
    sequences: Vec<SequenceId>,
    lengths: Vec<Vec<u32>>,
}

/// The state of the pool when it refused.
#[derive(Debug)]
struct Refusal {
    /// Share of the pool that is free.
    free: f64,
    /// Share of the pool that neither rows nor pages nor rounding to granules fill: the free
    /// bytes and what a slot takes beyond its length.
    unused: f64,
    /// Tokens of all sequences, on one layer.
    tokens: f64,
}

impl Growth {
    fn new(seed: u64, sizes: Workload) -> Self {
        let geometry = Geometry {
            layers: sizes.layers,
            kv_heads: 8,
            head_dim_k: 128,
            head_dim_v: 128,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let namespace = Namespace::new("default").unwrap();
        let model =
            Arc::new(ModelShape { id: ModelId(1), namespace, geometry, sink: 32, recent: 96 });
        let ids = Arc::new(IdSpace::new(BootId::new([1; 16]).unwrap(), [2; 16]));
        let pool = ArenaPool::new("host", sizes.pool_bytes);
        let store = SequenceStore::new(pool, StoreLimits::default(), ids.sequence_counter(0, 1));
        let mut random = Random(seed);
        let layer_means = (0..sizes.layers)
            .map(|_| sizes.mean * (1.0 + sizes.layer_spread * random.signed()))
            .collect();
        let sequences =
            (0..SEQUENCES).map(|_| store.open_sequence(model.clone()).unwrap()).collect();
        let lengths = vec![vec![0; sizes.layers as usize]; SEQUENCES];
        Self { store, model, sizes, layer_means, random, sequences, lengths }
    }

    /// Appends to every layer of a sequence; what the pool says when it refuses.
    fn append(&mut self, sequence: usize, tokens: u32) -> Result<(), StoreError> {
        for layer in 0..self.sizes.layers {
            let start = self.lengths[sequence][layer as usize];
            let (namespace, id) = (&self.model.namespace, self.sequences[sequence]);
            let asked =
                self.store.begin_append(namespace, id, LayerIndex(layer), start, tokens, 0)?;
            let BegunAppend::Ticket(ticket) = asked else { panic!("replayed") };
            let mut packed = Vec::new();
            for task in ticket.pack_tasks() {
                let share = f64::from(task.rows.end - task.rows.start) / 64.0;
                let mean = self.layer_means[layer as usize];
                let size = mean * (1.0 + self.sizes.block_spread * self.random.signed()) * share;
                let raw_bytes = self.model.geometry.raw_layout(64).size_bytes();
                let bytes = (size * raw_bytes as f64) as u64;
                let Ok(reserved) = self.store.pool().reserve_pages(bytes) else { break };
                let ends = Arc::from([bytes as u32]);
                let accounting = PackedBytes {
                    parts: PageBytes { codes: bytes, ..PageBytes::default() },
                    ..PackedBytes::default()
                };
                packed.push(Some(PackedPages::new(reserved.seal_slot(), ends, accounting)));
            }
            ticket.commit(packed);
            self.lengths[sequence][layer as usize] += tokens;
        }
        Ok(())
    }

    fn refusal(&self) -> Refusal {
        let usage = self.store.pool().read_usage();
        let stored = self.store.model_usage(self.model.id).stored;
        // One raw slot of the sink's rows aside, slots hold what they are long.
        let filled = stored.code_bytes + stored.raw_bytes;
        let share = |bytes: u64| bytes as f64 / usage.capacity_bytes as f64;
        Refusal {
            free: share(usage.capacity_bytes - usage.used_bytes),
            unused: share(usage.capacity_bytes - filled),
            tokens: self.lengths.iter().map(|lengths| f64::from(lengths[0])).sum(),
        }
    }

    fn run(&mut self) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        while refusals.len() < REFUSALS {
            for sequence in 0..SEQUENCES {
                let tokens = 1 + self.random.below(512) as u32;
                if self.append(sequence, tokens).is_ok() {
                    continue;
                }
                refusals.push(self.refusal());
                let closed = self.random.below(SEQUENCES as u64) as usize;
                self.store.close_sequence(&self.model.namespace, self.sequences[closed]).unwrap();
                self.sequences[closed] = self.store.open_sequence(self.model.clone()).unwrap();
                self.lengths[closed] = vec![0; self.sizes.layers as usize];
            }
        }
        refusals
    }
}

struct Shares {
    median: f64,
    worst: f64,
}

fn shares(mut values: Vec<f64>) -> Shares {
    values.sort_by(f64::total_cmp);
    Shares { median: values[values.len() / 2], worst: values[values.len() - 1] }
}

fn unused_when_full(sizes: Workload) -> Vec<f64> {
    let mut all = Vec::new();
    for seed in 1..=3 {
        let refusals = Growth::new(seed, sizes).run();
        let free = shares(refusals.iter().map(|refusal| refusal.free).collect());
        let unused = shares(refusals.iter().map(|refusal| refusal.unused).collect());
        let tokens = shares(refusals.iter().map(|refusal| refusal.tokens).collect());
        println!(
            "{} layers, seed {seed}, {REFUSALS} refusals: free {:.1} % (worst {:.1} %), \
             unused {:.1} % (worst {:.1} %), {:.0} tokens",
            sizes.layers,
            100.0 * free.median,
            100.0 * free.worst,
            100.0 * unused.median,
            100.0 * unused.worst,
            tokens.median,
        );
        all.extend(refusals.iter().map(|refusal| refusal.unused));
    }
    all
}

/// One best fit for rows and pages left a sixth of the pool in the median, a third at worst.
fn check_unused(unused: &Shares) {
    let [median, worst] = [unused.median, unused.worst].map(|share| 100.0 * share);
    assert!(median <= 3.0 && worst <= 6.0, "{median:.1} % were free, {worst:.1} % at worst");
}

#[test]
fn a_pool_of_entropy_coded_pages_is_full_when_it_refuses() {
    for (pool_bytes, layers) in [(247 << 20, 1), (320 << 20, 4)] {
        let sizes =
            Workload { pool_bytes, layers, mean: 0.2, layer_spread: 0.2, block_spread: 0.05 };
        check_unused(&shares(unused_when_full(sizes)));
    }
}

#[test]
fn a_pool_of_pages_of_one_size_is_full_when_it_refuses() {
    for (pool_bytes, layers) in [(247 << 20, 1), (320 << 20, 4)] {
        let sizes =
            Workload { pool_bytes, layers, mean: 0.3, layer_spread: 0.0, block_spread: 0.0 };
        check_unused(&shares(unused_when_full(sizes)));
    }
}
