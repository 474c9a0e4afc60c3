//! Storing a prefill: check, write into raw slots, encode, place, as the lane does it.

use super::data::{LAYER, MODEL, codec, rows};
use super::measure::{Figure, Machine, timed};
use super::{BenchError, Shape};
use kvd_compute::{Backend, BackendError, CpuBackend, CpuOptions, EncodeSource, RawTarget};
use kvd_core::{Extent, Geometry};
use serde::Serialize;

/// What `kvd bench store` measures.
#[derive(Clone, Debug)]
pub struct StoreBench {
    /// Heads.
    pub shape: Shape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Tokens of the prefill.
    pub tokens: u32,
    /// Compute threads.
    pub threads: usize,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Turns of each codec.
    pub rounds: usize,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct StoreRow {
    /// The codec.
    pub codec: String,
    /// Processor time per token and layer, in microseconds.
    pub cpu_us: Figure,
    /// f16 input per second of processor time, in GB (median).
    pub cpu_gb_per_s: f64,
    /// f16 input per second of wall time, in GB (median).
    pub wall_gb_per_s: f64,
}

struct Case {
    name: String,
    backend: CpuBackend,
    cpu: Vec<f64>,
    wall: Vec<f64>,
}

impl StoreBench {
    /// Measures every codec.
    ///
    /// # Errors
    /// When a codec does not fit the shape, or the memory is not there.
    pub fn run(&self) -> Result<(Machine, Vec<StoreRow>), BenchError> {
        let machine = Machine::look(self.threads);
        let geometry = self.shape.geometry(self.block_tokens);
        let mut cases = Vec::new();
        for name in &self.codecs {
            // Raw slots and, at most as large again, pages.
            let raw = geometry.raw_layout(self.block_tokens).size_bytes() + (1 << 12);
            let options = CpuOptions {
                arena_bytes: 2 * u64::from(self.blocks()) * raw,
                prefault: true,
                threads: self.threads,
            };
            let mut backend = CpuBackend::new(options).map_err(BenchError::of(name))?;
            backend.register(MODEL, codec(&geometry, name)?);
            cases.push(Case { name: name.clone(), backend, cpu: Vec::new(), wall: Vec::new() });
        }
        let incoming = rows(&geometry, self.block_tokens, 9);
        for round in 0..=self.rounds {
            for case in &mut cases {
                let (stored, cpu, wall) =
                    timed(|| self.store(&mut case.backend, &geometry, &incoming));
                stored.map_err(BenchError::of(&case.name))?;
                if round > 0 {
                    case.cpu.push(cpu);
                    case.wall.push(wall);
                }
            }
        }
        Ok((machine, cases.into_iter().map(|case| self.finish(case, &geometry)).collect()))
    }

    fn blocks(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens)
    }

    fn store(
        &self,
        backend: &mut CpuBackend,
        geometry: &Geometry,
        incoming: &kvd_compute::IncomingRows,
    ) -> Result<(), BackendError> {
        let len = geometry.raw_layout(self.block_tokens).size_bytes();
        let tokens = self.block_tokens;
        let mut sources = Vec::new();
        for block in 0..u64::from(self.blocks()) {
            let extent = Extent { offset: block * len, len };
            backend.check(MODEL, incoming)?;
            let to = RawTarget { extent, capacity_rows: tokens, first_row: 0 };
            backend.write(MODEL, incoming, 0, tokens, to)?;
            sources.push(EncodeSource {
                extent,
                capacity_rows: tokens,
                first_row: 0,
                rows: tokens,
            });
        }
        let mut offset = u64::from(self.blocks()) * len;
        for pages in backend.encode(MODEL, LAYER, &sources)? {
            let pages = pages?;
            let extent = Extent { offset, len: pages.bytes.len() as u64 };
            backend.place(&pages, extent);
            offset += pages.bytes.len().next_multiple_of(64) as u64;
        }
        Ok(())
    }

    fn finish(&self, case: Case, geometry: &Geometry) -> StoreRow {
        let tokens = f64::from(self.blocks() * self.block_tokens);
        let bytes = tokens * geometry.values_per_token() as f64 * 2.0;
        let (cpu, wall) = (Figure::of(case.cpu.clone()), Figure::of(case.wall));
        let per_token = case.cpu.iter().map(|cpu| cpu / tokens / 1e3).collect();
        StoreRow {
            codec: case.name,
            cpu_us: Figure::of(per_token),
            cpu_gb_per_s: bytes / cpu.median,
            wall_gb_per_s: bytes / wall.median,
        }
    }
}
