//! Times what the store does for long sequences: fork, describe, pin, close.
//!
//! `cargo run --example store_bench -p kvd-store`. A pool of offsets alone: no bytes are touched.
#![allow(clippy::print_stdout, reason = "prints its table")]

use kvd_core::{
    BootId, DType, Geometry, IdSpace, LayerIndex, ModelId, Namespace, RopePairing, SequenceId,
};
use kvd_store::{
    ArenaPool, BegunAppend, ModelShape, PackedBytes, PackedPages, SequenceStore, StoreLimits,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LAYERS: u32 = 8;
const BLOCKS: u32 = 65_536;
const BLOCK_TOKENS: u32 = 16;
const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let geometry = Geometry {
        layers: LAYERS,
        kv_heads: 8,
        head_dim_k: 128,
        head_dim_v: 128,
        block_tokens: BLOCK_TOKENS,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    let namespace = Namespace::new("default")?;
    let model = ModelShape { id: ModelId(1), namespace, geometry, sink: 0, recent: 128 };
    let bench = StoreBench::new(Arc::new(model))?;
    let id = bench.fill_sequence()?;
    println!("{LAYERS} layers, {BLOCKS} blocks each, median of {ROUNDS}");
    bench.report_times("describe", || {
        bench.store.describe_sequence(bench.namespace(), id).map(drop)
    })?;
    bench.report_times("pin of one layer", || {
        bench.store.pin_range(bench.namespace(), id, LayerIndex(0), .., None).map(drop)
    })?;
    let mut forks = Vec::new();
    bench.report_times("fork", || {
        forks.push(bench.store.fork_sequence(bench.namespace(), id, None)?.id);
        Ok(())
    })?;
    println!("resident after {} forks: {} KiB more", forks.len(), bench.grown_kib());
    for fork in forks {
        bench.store.close_sequence(bench.namespace(), fork)?;
    }
    let began = Instant::now();
    bench.store.close_sequence(bench.namespace(), id)?;
    let closed = began.elapsed();
    while bench.store.pool().read_usage().used_bytes > 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    println!("close: {closed:.1?}, all bytes back after {:.1?}", began.elapsed());
    Ok(())
}

struct StoreBench {
    store: SequenceStore,
    model: Arc<ModelShape>,
    resident_kib: std::cell::Cell<u64>,
}

impl StoreBench {
    fn new(model: Arc<ModelShape>) -> Result<Self, Box<dyn std::error::Error>> {
        let boot = BootId::new([1; 16]).ok_or("no boot id")?;
        let ids = Arc::new(IdSpace::new(boot, [2; 16]));
        let pool = ArenaPool::new("host", 1 << 40);
        let store = SequenceStore::new(pool, StoreLimits::default(), ids.sequence_counter(0, 1));
        Ok(Self { store, model, resident_kib: std::cell::Cell::new(0) })
    }

    fn namespace(&self) -> &Namespace {
        &self.model.namespace
    }

    /// A sequence of so many blocks on each layer, packed up to its window.
    fn fill_sequence(&self) -> Result<SequenceId, Box<dyn std::error::Error>> {
        let id = self.store.open_sequence(self.model.clone())?;
        let step = 4096;
        for start in (0..BLOCKS * BLOCK_TOKENS).step_by(step) {
            for layer in (0..LAYERS).map(LayerIndex) {
                let tokens = step as u32;
                let asked =
                    self.store.begin_append(self.namespace(), id, layer, start, tokens, 0)?;
                let BegunAppend::Ticket(ticket) = asked else { return Err("replayed".into()) };
                let mut packed = Vec::with_capacity(ticket.pack_tasks().len());
                for task in ticket.pack_tasks() {
                    let bytes = 12_000 + u64::from(task.block * 7919 % 1024);
                    let slot = self.store.pool().reserve_pages(bytes)?.seal_slot();
                    let ends = Arc::from([bytes as u32]);
                    packed.push(Some(PackedPages::new(slot, ends, PackedBytes::default())));
                }
                ticket.commit(packed);
            }
        }
        self.resident_kib.set(resident_kib());
        Ok(id)
    }

    fn report_times(
        &self,
        name: &str,
        mut work: impl FnMut() -> Result<(), kvd_store::StoreError>,
    ) -> Result<(), kvd_store::StoreError> {
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let began = Instant::now();
            work()?;
            times.push(began.elapsed());
        }
        times.sort_unstable();
        let (least, most) = (times[0], times[ROUNDS - 1]);
        println!("{name}: {:.1?} ({least:.1?} to {most:.1?})", times[ROUNDS / 2]);
        Ok(())
    }

    fn grown_kib(&self) -> u64 {
        resident_kib().saturating_sub(self.resident_kib.get())
    }
}

/// Resident memory of this process in KiB; 0 where the system does not tell.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
