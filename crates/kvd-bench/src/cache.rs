//! Costs of the cache's index: matches, opens, and reservations that evict.
//!
//! A pool of offsets alone: no bytes are touched. A plain map, asked key by key, is timed in the
//! same run.

use super::BenchError;
use kvd_core::{
    BootId, DType, Geometry, IdSpace, LayerIndex, ModelId, Namespace, ProgressLines, RopePairing,
    SequenceId,
};
use kvd_store::{
    ArenaPool, BegunAppend, CacheLimits, KeyChain, ModelShape, PackedBytes, PackedKeys,
    PackedPages, SequenceStore, StoreLimits,
};
use serde::Serialize;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK_TOKENS: u32 = 64;
const KEY_BYTES: usize = 32;
const PAGE_BYTES: u64 = 33 << 10;
/// Cached pages of the pool that is full.
const FULL_PAGES: usize = 1024;

/// Sizes of the index and its questions.
#[derive(Clone, Copy, Debug)]
pub struct CacheBench {
    /// Entries, about.
    pub entries: usize,
    /// Keys of a chain.
    pub keys: usize,
    /// Runs of each case, each on another chain.
    pub rounds: usize,
}

/// Wall times of one case.
#[derive(Clone, Debug, Serialize)]
pub struct CacheRow {
    /// The case.
    pub case: String,
    /// Entries of the index meanwhile.
    pub entries: usize,
    /// Median, microseconds.
    pub p50_us: f64,
    /// 99th percentile, microseconds.
    pub p99_us: f64,
}

impl CacheRow {
    fn from_times(case: impl Into<String>, entries: usize, mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1e6;
        Self { case: case.into(), entries, p50_us: at(50), p99_us: at(99) }
    }
}

impl CacheBench {
    /// Fills an index and asks it.
    ///
    /// # Errors
    /// [`BenchError::Failed`].
    pub fn measure_all(&self) -> Result<Vec<CacheRow>, BenchError> {
        let filled = IndexStore::new(u64::MAX >> 1)?;
        let chains = (self.entries / self.keys).max(1) as u64;
        let texts: Vec<_> = (0..chains).map(|seed| make_keys(seed, self.keys)).collect();
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench cache, filling the index", texts.len() as u64);
        for text in &texts {
            filled.publish_text(text)?;
            progress.add_steps(1);
        }
        progress.begin_task("bench cache", 0);
        let mut rows = self.time_matches(&filled, &texts);
        rows.push(self.time_map(&texts));
        rows.push(self.time_opens(&filled, &texts)?);
        rows.push(time_evictions()?);
        Ok(rows)
    }

    /// Chains far apart, so that no two rounds share cache lines.
    fn text_of<'a>(&self, texts: &'a [Vec<u8>], round: usize) -> &'a [u8] {
        &texts[round * 37 % texts.len()]
    }

    fn time_matches(&self, filled: &IndexStore, texts: &[Vec<u8>]) -> Vec<CacheRow> {
        let entries = texts.len() * self.keys;
        let half = self.keys / 2;
        let other = make_keys(1 << 28, self.keys);
        let half_of =
            |text: &Vec<u8>| [&text[..half * KEY_BYTES], &other[half * KEY_BYTES..]].concat();
        let halves: Vec<_> = texts.iter().map(half_of).collect();
        let seeds = (0..texts.len() as u64).map(|seed| seed + (1 << 29));
        let misses: Vec<_> = seeds.map(|seed| make_keys(seed, self.keys)).collect();
        let index = filled.store.prefix_index();
        let cases =
            [("all cached", texts, self.keys), ("half", &halves, half), ("none", &misses, 0)];
        let time = |(name, texts, wanted): (&str, &[Vec<u8>], usize)| {
            let run = |round| {
                let chain = [read_chain(self.text_of(texts, round))];
                let began = Instant::now();
                let found = index.match_prefixes(filled.model.id, &chain);
                let took = began.elapsed();
                assert_eq!(found, [wanted]);
                took
            };
            let times = (0..self.rounds).map(run).collect();
            CacheRow::from_times(format!("match of {} keys, {name}", self.keys), entries, times)
        };
        cases.into_iter().map(time).collect()
    }

    /// A map from keys, asked for each key until one is missing.
    fn time_map(&self, texts: &[Vec<u8>]) -> CacheRow {
        let keys = |text: &Vec<u8>| text.as_chunks::<KEY_BYTES>().0.to_vec();
        let all = texts.iter().flat_map(keys).zip(0u32..);
        let map: HashMap<[u8; KEY_BYTES], u32> = all.collect();
        let run = |round| {
            let keys = self.text_of(texts, round).as_chunks::<KEY_BYTES>().0;
            let began = Instant::now();
            let found = keys.iter().take_while(|key| black_box(map.get(*key)).is_some()).count();
            let took = began.elapsed();
            assert_eq!(found, self.keys);
            took
        };
        let case = format!("{} keys of a plain map, all there", self.keys);
        CacheRow::from_times(case, map.len(), (0..self.rounds).map(run).collect())
    }

    fn time_opens(&self, filled: &IndexStore, texts: &[Vec<u8>]) -> Result<CacheRow, BenchError> {
        let mut times = Vec::new();
        for round in 0..self.rounds {
            let chain = read_chain(self.text_of(texts, round));
            let (store, model) = (&filled.store, filled.model.clone());
            let began = Instant::now();
            let opened = store.open_with_prefix(model, &chain, None).map_err(cache_failure)?;
            times.push(began.elapsed());
            store.close_sequence(&filled.model.namespace, opened.id).map_err(cache_failure)?;
        }
        let case = format!("open on {} pages of one layer", self.keys);
        Ok(CacheRow::from_times(case, texts.len() * self.keys, times))
    }
}

/// Reservations in a pool that cached pages fill: each evicts one.
fn time_evictions() -> Result<CacheRow, BenchError> {
    let pages = FULL_PAGES / 16;
    let full = IndexStore::new(FULL_PAGES as u64 * PAGE_BYTES)?;
    for seed in 0..32 {
        full.publish_text(&make_keys(seed, pages))?;
    }
    let namespace = &full.model.namespace;
    let (mut times, mut held) = (Vec::new(), Vec::new());
    for _ in 0..FULL_PAGES / 2 {
        let began = Instant::now();
        let reserved = full.store.pool().reserve_pages_for(namespace, PAGE_BYTES);
        times.push(began.elapsed());
        held.push(reserved.map_err(cache_failure)?);
    }
    let case = "reservation of a page in a full pool";
    Ok(CacheRow::from_times(case, FULL_PAGES, times))
}

fn cache_failure<E: std::fmt::Display>(error: E) -> BenchError {
    BenchError::failed_step("cache")(error)
}

/// Random keys of a chain; seeds are below 2^32.
fn make_keys(seed: u64, keys: usize) -> Vec<u8> {
    let word = |at: u64| {
        let bits = (at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    (0..(keys * KEY_BYTES / 8) as u64).flat_map(|at| word(at).to_le_bytes()).collect()
}

fn read_chain(keys: &[u8]) -> KeyChain<'_> {
    let key_bytes = KEY_BYTES as u32;
    let packed = PackedKeys { bytes: keys, key_bytes, key_tokens: BLOCK_TOKENS };
    KeyChain::new(packed, BLOCK_TOKENS).expect("a key for each page")
}

/// A store of one model of one layer.
struct IndexStore {
    store: SequenceStore,
    model: Arc<ModelShape>,
}

impl IndexStore {
    fn new(pool_bytes: u64) -> Result<Self, BenchError> {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 8,
            head_dim_k: 128,
            head_dim_v: 128,
            block_tokens: BLOCK_TOKENS,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let namespace = Namespace::new("bench").map_err(cache_failure)?;
        let model = ModelShape { id: ModelId(1), namespace, geometry, sink: 0, recent: 0 };
        let boot = BootId::new([1; 16]).expect("not all 0");
        let ids = Arc::new(IdSpace::new(boot, [2; 16])).sequence_counter(0, 1);
        let store =
            SequenceStore::new(ArenaPool::new("host", pool_bytes), StoreLimits::default(), ids);
        let limits = CacheLimits { seed: 7, ..CacheLimits::default() };
        Ok(Self { store: store.with_cache(limits), model: Arc::new(model) })
    }

    /// Stores a page for each key, packed, and publishes all.
    fn publish_text(&self, keys: &[u8]) -> Result<(), BenchError> {
        let (store, namespace) = (&self.store, &self.model.namespace);
        let id = store.open_sequence(self.model.clone()).map_err(cache_failure)?;
        for block in 0..(keys.len() / KEY_BYTES) as u32 {
            self.append_block(id, block * BLOCK_TOKENS)?;
        }
        let ticket =
            store.begin_publish(namespace, id, 0, &read_chain(keys)).map_err(cache_failure)?;
        let published = ticket.commit_blocks();
        if let Some(stop) = published.stop {
            return Err(cache_failure(format!("publishing ended by {stop:?}")));
        }
        store.close_sequence(namespace, id).map_err(cache_failure)
    }

    fn append_block(&self, id: SequenceId, start: u32) -> Result<(), BenchError> {
        let (namespace, layer) = (&self.model.namespace, LayerIndex(0));
        let begun = self.store.begin_append(namespace, id, layer, start, BLOCK_TOKENS, 0);
        let BegunAppend::Ticket(ticket) = begun.map_err(cache_failure)? else {
            return Err(cache_failure("a block was stored twice"));
        };
        let pack = |_| {
            let slot = self.store.pool().reserve_pages_for(namespace, PAGE_BYTES).ok()?;
            let ends = Arc::from([PAGE_BYTES as u32]);
            Some(PackedPages::new(slot.seal_slot(), ends, PackedBytes::default()))
        };
        let packed = ticket.pack_tasks().iter().map(pack).collect();
        ticket.commit(packed);
        Ok(())
    }
}
