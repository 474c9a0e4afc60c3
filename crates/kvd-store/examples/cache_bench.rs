//! Times the cache's index: match, attach, publish, and reservations that evict.
//!
//! `cargo run --release --example cache_bench -p kvd-store`. A pool of offsets alone: no bytes are
//! touched. A plain map, asked key by key, is timed in the same run.
#![allow(clippy::print_stdout, reason = "prints its table")]

use kvd_core::{
    BootId, DType, Geometry, IdSpace, LayerIndex, ModelId, Namespace, RopePairing, SequenceId,
};
use kvd_store::{
    ArenaPool, BegunAppend, CacheLimits, KeyChain, ModelShape, PackedBytes, PackedKeys,
    PackedPages, SequenceStore, StoreLimits,
};
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK_TOKENS: u32 = 64;
/// Pages of a chain: 131,072 tokens.
const CHAIN: usize = 2048;
const KEY_BYTES: usize = 32;
const PAGE_BYTES: u64 = 33 << 10;
const ROUNDS: usize = 101;

type BenchFailure = Box<dyn std::error::Error>;

fn main() -> Result<(), BenchFailure> {
    let chains = std::env::args().nth(1).map_or(Ok(512), |text| text.parse())?;
    let bench = CacheBench::new(1, u64::MAX >> 1)?;
    let began = Instant::now();
    let texts: Vec<_> = (0..chains).map(make_keys).collect();
    for text in &texts {
        bench.publish_text(text)?;
    }
    let entries = bench.store.prefix_index().read_usage(Instant::now()).entries;
    println!("{entries} entries of one layer published in {:.1?}", began.elapsed());
    report_matches(&bench, &texts);
    report_map(&texts);
    report_attach(&bench, &texts)?;
    report_layers()?;
    report_eviction()
}

/// Random keys of a chain.
fn make_keys(seed: u64) -> Vec<u8> {
    let word = |at: u64| {
        let bits = (at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    (0..(CHAIN * KEY_BYTES / 8) as u64).flat_map(|at| word(at).to_le_bytes()).collect()
}

fn read_chain(keys: &[u8]) -> KeyChain<'_> {
    let packed = PackedKeys { bytes: keys, key_bytes: KEY_BYTES as u32, key_tokens: BLOCK_TOKENS };
    KeyChain::new(packed, BLOCK_TOKENS).expect("keys of a page each")
}

/// Median and 99th percentile.
fn report_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (median, high) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("{what}: p50 {median:.1?}, p99 {high:.1?} of {}", times.len());
}

fn report_matches(bench: &CacheBench, texts: &[Vec<u8>]) {
    let half = CHAIN / 2 * KEY_BYTES;
    let other = make_keys(1 << 20);
    let half_of = |text: &Vec<u8>| [&text[..half], &other[half..]].concat();
    let halves: Vec<_> = texts.iter().map(half_of).collect();
    let misses: Vec<_> = (0..texts.len() as u64).map(|seed| make_keys(seed + (1 << 21))).collect();
    let cases = [("hit", texts, CHAIN), ("half", &halves, CHAIN / 2), ("miss", &misses, 0)];
    for (name, texts, wanted) in cases {
        let index = bench.store.prefix_index();
        let time = |round: usize| {
            // Chains far apart, so that no two rounds share cache lines.
            let text = &texts[round * 37 % texts.len()];
            let began = Instant::now();
            let found = index.match_prefixes(bench.model.id, &[read_chain(text)]);
            let took = began.elapsed();
            assert_eq!(found, [wanted]);
            took
        };
        report_times(&format!("match of {CHAIN} keys, {name}"), (0..ROUNDS).map(time).collect());
    }
}

/// A map from keys, asked for each key until one is missing.
fn report_map(texts: &[Vec<u8>]) {
    let keys =
        |text: &Vec<u8>| -> Vec<[u8; KEY_BYTES]> { text.as_chunks::<KEY_BYTES>().0.to_vec() };
    let map: HashMap<_, _> =
        (0u32..).zip(texts.iter().flat_map(keys)).map(|(n, k)| (k, n)).collect();
    let time = |round: usize| {
        let text = &texts[round * 37 % texts.len()];
        let began = Instant::now();
        let keys = text.as_chunks::<KEY_BYTES>().0;
        let found = keys.iter().take_while(|key| black_box(map.get(*key)).is_some()).count();
        let took = began.elapsed();
        assert_eq!(found, CHAIN);
        took
    };
    report_times("the same by a plain map, hit", (0..ROUNDS).map(time).collect());
}

fn report_attach(bench: &CacheBench, texts: &[Vec<u8>]) -> Result<(), BenchFailure> {
    let (mut opens, mut closes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let text = &texts[round * 37 % texts.len()];
        let began = Instant::now();
        let opened = bench.store.open_with_prefix(bench.model.clone(), &read_chain(text), None)?;
        opens.push(began.elapsed());
        let began = Instant::now();
        bench.store.close_sequence(&bench.model.namespace, opened.id)?;
        closes.push(began.elapsed());
    }
    report_times(&format!("open on {CHAIN} pages, one layer"), opens);
    report_times("its close", closes);
    Ok(())
}

/// Publish and attach for a model of 32 layers.
fn report_layers() -> Result<(), BenchFailure> {
    let bench = CacheBench::new(32, u64::MAX >> 1)?;
    let text = make_keys(1);
    let id = bench.write_text(CHAIN as u32 * BLOCK_TOKENS)?;
    let began = Instant::now();
    let chain = read_chain(&text);
    let ticket = bench.store.begin_publish(&bench.model.namespace, id, 0, &chain)?;
    assert_eq!(ticket.layers_to_pack().count(), 0);
    assert_eq!(ticket.commit_blocks().published, CHAIN);
    println!("publish of {CHAIN} packed pages of 32 layers: {:.1?}", began.elapsed());
    let mut opens = Vec::new();
    for _ in 0..21 {
        let began = Instant::now();
        let opened = bench.store.open_with_prefix(bench.model.clone(), &read_chain(&text), None)?;
        opens.push(began.elapsed());
        bench.store.close_sequence(&bench.model.namespace, opened.id)?;
    }
    report_times(&format!("open on {CHAIN} pages of 32 layers"), opens);
    Ok(())
}

/// A pool of 1,024 cached pages that is full, and reservations that make room.
fn report_eviction() -> Result<(), BenchFailure> {
    let bench = CacheBench::new(1, 1024 * (PAGE_BYTES + 64))?;
    for seed in 0..64 {
        let id = bench.write_text(32 * BLOCK_TOKENS)?;
        let keys = make_keys(seed);
        let chain = read_chain(&keys[..32 * KEY_BYTES]);
        let _ = bench.store.begin_publish(&bench.model.namespace, id, 0, &chain)?.commit_blocks();
        bench.store.close_sequence(&bench.model.namespace, id)?;
    }
    let index = bench.store.prefix_index();
    let before = index.read_usage(Instant::now());
    let (mut times, mut held) = (Vec::new(), Vec::new());
    for _ in 0..before.entries / 2 {
        let began = Instant::now();
        held.push(bench.store.pool().reserve_pages_for(&bench.model.namespace, PAGE_BYTES)?);
        times.push(began.elapsed());
    }
    let after = index.read_usage(Instant::now());
    let usage = bench.store.pool().read_usage();
    let evicted = after.evicted_for_room - before.evicted_for_room;
    report_times("reservation of a page in a full pool", times);
    println!(
        "evicted {evicted} blocks for {} reservations; pool {:.1} % full",
        held.len(),
        usage.used_bytes as f64 * 100.0 / usage.capacity_bytes as f64
    );
    Ok(())
}

struct CacheBench {
    store: SequenceStore,
    model: Arc<ModelShape>,
}

impl CacheBench {
    fn new(layers: u32, pool_bytes: u64) -> Result<Self, BenchFailure> {
        let geometry = Geometry {
            layers,
            kv_heads: 8,
            head_dim_k: 128,
            head_dim_v: 128,
            block_tokens: BLOCK_TOKENS,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let namespace = Namespace::new("default")?;
        let model =
            Arc::new(ModelShape { id: ModelId(1), namespace, geometry, sink: 0, recent: 0 });
        let boot = BootId::new([1; 16]).ok_or("no boot")?;
        let ids = Arc::new(IdSpace::new(boot, [2; 16])).sequence_counter(0, 1);
        let limits = StoreLimits { tokens_per_append_max: u32::MAX, ..StoreLimits::default() };
        let store = SequenceStore::new(ArenaPool::new("host", pool_bytes), limits, ids);
        let cache = CacheLimits { seed: 7, ..CacheLimits::default() };
        Ok(Self { store: store.with_cache(cache), model })
    }

    /// A sequence of so many tokens, all packed.
    fn write_text(&self, tokens: u32) -> Result<SequenceId, BenchFailure> {
        let id = self.store.open_sequence(self.model.clone())?;
        for layer in 0..self.model.geometry.layers {
            for start in (0..tokens).step_by(BLOCK_TOKENS as usize) {
                let ns = &self.model.namespace;
                let begun =
                    self.store.begin_append(ns, id, LayerIndex(layer), start, BLOCK_TOKENS, 0)?;
                let BegunAppend::Ticket(ticket) = begun else { return Err("replayed".into()) };
                let pack = |_| {
                    let slot = self.store.pool().reserve_pages_for(ns, PAGE_BYTES).ok()?;
                    let ends = Arc::from([PAGE_BYTES as u32]);
                    Some(PackedPages::new(slot.seal_slot(), ends, PackedBytes::default()))
                };
                let packed = ticket.pack_tasks().iter().map(pack).collect();
                ticket.commit(packed);
            }
        }
        Ok(id)
    }

    fn publish_text(&self, keys: &[u8]) -> Result<(), BenchFailure> {
        let id = self.write_text(CHAIN as u32 * BLOCK_TOKENS)?;
        let chain = read_chain(keys);
        let ticket = self.store.begin_publish(&self.model.namespace, id, 0, &chain)?;
        assert_eq!(ticket.commit_blocks().published, CHAIN);
        self.store.close_sequence(&self.model.namespace, id)?;
        Ok(())
    }
}
