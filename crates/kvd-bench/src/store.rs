//! Storing a prefill: check, write into raw slots, encode, place, as a device worker does it.

use crate::data::{LAYER, MODEL, NormalValues, draw_rows, fit_codec};
use crate::measure::{BenchResult, MachineInfo, MeasuredFigure, measure_time};
use crate::{BenchError, HeadShape, limits};
use kvd_codec::LayerQueries;
use kvd_compute::{
    AppendSteps, BackendError, CpuBackend, CpuOptions, EncodeAs, EncodeSource, EncodedPages,
    IncomingRows, PageBackend, RawTarget,
};
use kvd_core::{Extent, Geometry, ProgressLines, Side};
use serde::Serialize;

/// How errors of pages are measured while they are stored, one block in 16: what bounds are held
/// against and metrics export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorMeasure {
    /// By the rows alone, as before a layer is asked anything.
    Rows,
    /// By the scores and outputs of as many queries as a daemon keeps.
    Queries,
    /// Not at all, to compare the other two with.
    None,
}

impl ErrorMeasure {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Rows, Self::Queries, Self::None];

    /// As options and tables name it.
    #[must_use]
    pub fn measure_name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Queries => "queries",
            Self::None => "none",
        }
    }
}

/// Options of `kvd bench store`.
#[derive(Clone, Debug)]
pub struct StoreBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Tokens of the prefill.
    pub tokens: u32,
    /// Compute threads; each number of them takes its turn.
    pub threads: Vec<usize>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// How errors are measured; each way takes its turn.
    pub errors: Vec<ErrorMeasure>,
    /// Turns of each codec.
    pub rounds: usize,
    /// Bytes of rows that stores rotate over.
    pub buffer_bytes: u64,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct StoreRow {
    /// The codec.
    pub codec: String,
    /// Instruction set of the backend. Encoders take the widest registers there are.
    pub instruction_set: &'static str,
    /// Compute threads. Rows are checked and written, and pages placed, on one thread beside them.
    pub threads: usize,
    /// How errors were measured.
    pub errors: ErrorMeasure,
    /// Part of the blocks that were measured.
    pub measured_blocks: f64,
    /// Stored bits per value, headers and scales included, of all turns.
    pub bits_per_value: f64,
    /// Processor time per token and layer, in microseconds.
    pub cpu_us: MeasuredFigure,
    /// Processor time of the first call per token and layer, in microseconds: it trains tables
    /// where a codec has such, and threads take the memory that they work in.
    pub first_us: f64,
    /// f16 input per second of processor time, in GB (median).
    pub logical_gb_per_s: f64,
    /// Pages made, in GB per second of processor time (median).
    pub stored_gb_per_s: f64,
    /// f16 input per second of wall time, in GB (median).
    pub wall_gb_per_s: f64,
}

struct StoreCase {
    name: String,
    threads: usize,
    errors: ErrorMeasure,
    backend: CpuBackend,
    first: f64,
    cpu: Vec<f64>,
    wall: Vec<f64>,
    /// Pages of all turns that count.
    stored: StoredPages,
}

/// Pages that were made.
#[derive(Clone, Copy, Default)]
struct StoredPages {
    bytes: u64,
    blocks: u64,
    /// Blocks of which the error was measured.
    measured: u64,
}

impl StoreBench {
    /// Measures every codec.
    ///
    /// # Errors
    /// When a codec does not fit the shape, there are not the cores, or the memory is not there.
    pub fn measure_all(&self) -> Result<BenchResult<StoreRow>, BenchError> {
        let most = self.threads.iter().copied().max().unwrap_or(1);
        limits::check_threads(most)?;
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench store, making rows", 0);
        let geometry = self.shape.layer_geometry(self.block_tokens);
        let incoming = self.draw_blocks(&geometry)?;
        let machine = MachineInfo::inspect_machine(most);
        let mut cases = Vec::new();
        for name in &self.codecs {
            for (threads, errors) in self
                .threads
                .iter()
                .flat_map(|threads| self.errors.iter().map(move |of| (threads, of)))
            {
                cases.push(self.prepare_case(name, *threads, *errors, &geometry)?);
            }
        }
        progress.begin_task("bench store", ((self.rounds + 1) * cases.len()) as u64);
        for round in 0..=self.rounds {
            let first = round * self.count_blocks() as usize;
            let rows = |block: usize| &incoming[(first + block) % incoming.len()];
            for case in &mut cases {
                let store = || self.store_blocks(case, &geometry, rows);
                let timed = measure_time(store);
                let stored = timed.value.map_err(BenchError::failed_step(&case.name))?;
                progress.add_steps(1);
                if round == 0 {
                    case.first = timed.cpu_ns;
                } else {
                    case.cpu.push(timed.cpu_ns);
                    case.wall.push(timed.wall_ns);
                    case.stored.bytes += stored.bytes;
                    case.stored.blocks += stored.blocks;
                    case.stored.measured += stored.measured;
                }
            }
        }
        let rows = cases.into_iter().map(|case| self.finish_row(case, &geometry)).collect();
        Ok(BenchResult { machine, rows })
    }

    /// Blocks that all differ, as many as the buffer and one call hold: what was stored a turn ago
    /// is not in a cache.
    fn draw_blocks(&self, geometry: &Geometry) -> Result<Vec<IncomingRows>, BenchError> {
        let block_bytes = geometry.raw_layout(self.block_tokens).size_bytes();
        let count = self.buffer_bytes.div_ceil(block_bytes).max(u64::from(self.count_blocks()));
        limits::check_memory("rows to store", count, block_bytes)?;
        Ok((0..count).map(|seed| draw_rows(geometry, self.block_tokens, 9 + seed)).collect())
    }

    fn prepare_case(
        &self,
        name: &str,
        threads: usize,
        errors: ErrorMeasure,
        geometry: &Geometry,
    ) -> Result<StoreCase, BenchError> {
        let mut codec = fit_codec(geometry, name)?;
        if errors == ErrorMeasure::Queries {
            let queries = draw_queries(geometry);
            codec.set_queries(LAYER, &queries).map_err(BenchError::codec_error(name))?;
        }
        // Raw slots and, at most as large again, pages.
        let raw = geometry.raw_layout(self.block_tokens).size_bytes() + (1 << 12);
        let blocks = u64::from(self.count_blocks());
        limits::check_memory(name, 2 * blocks, raw)?;
        let options = CpuOptions { arena_bytes: 2 * blocks * raw, prefault: true, threads };
        let mut backend = CpuBackend::new(options).map_err(limits::open_error(name))?;
        backend.register(MODEL, codec);
        let [cpu, wall] = [const { Vec::new() }; 2];
        let (name, stored) = (name.to_owned(), StoredPages::default());
        Ok(StoreCase { name, threads, errors, backend, first: 0.0, cpu, wall, stored })
    }

    fn count_blocks(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens)
    }

    /// Stores so many blocks.
    fn store_blocks<'a>(
        &self,
        case: &mut StoreCase,
        geometry: &Geometry,
        rows: impl Fn(usize) -> &'a IncomingRows,
    ) -> Result<StoredPages, BackendError> {
        let (backend, errors) = (&mut case.backend, case.errors);
        let len = geometry.raw_layout(self.block_tokens).size_bytes();
        let tokens = self.block_tokens;
        let mut sources = Vec::new();
        for block in 0..u64::from(self.count_blocks()) {
            let (extent, incoming) = (Extent { offset: block * len, len }, rows(block as usize));
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
        let mut offset = u64::from(self.count_blocks()) * len;
        let mut stored = StoredPages::default();
        for pages in encode_blocks(backend, &sources, errors)? {
            let pages = pages?;
            let extent = Extent { offset, len: pages.bytes.len() as u64 };
            backend.move_pages(&pages, extent);
            stored.bytes += extent.len;
            stored.blocks += 1;
            stored.measured += u64::from(pages.sampled.is_some());
            offset += extent.len.next_multiple_of(64);
        }
        Ok(stored)
    }

    fn finish_row(&self, case: StoreCase, geometry: &Geometry) -> StoreRow {
        let tokens = f64::from(self.count_blocks()) * f64::from(self.block_tokens);
        let values = tokens * geometry.values_per_token() as f64;
        let stored = case.stored.bytes as f64 / case.cpu.len() as f64;
        let (cpu, wall) =
            (MeasuredFigure::from_runs(case.cpu.clone()), MeasuredFigure::from_runs(case.wall));
        let per_token = |cpu: &f64| cpu / tokens / 1e3;
        StoreRow {
            codec: case.name,
            instruction_set: case.backend.instruction_set().name(),
            threads: case.threads,
            errors: case.errors,
            measured_blocks: case.stored.measured as f64 / case.stored.blocks as f64,
            bits_per_value: stored * 8.0 / values,
            cpu_us: MeasuredFigure::from_runs(case.cpu.iter().map(per_token).collect()),
            first_us: per_token(&case.first),
            logical_gb_per_s: 2.0 * values / cpu.median,
            stored_gb_per_s: stored / cpu.median,
            wall_gb_per_s: 2.0 * values / wall.median,
        }
    }
}

/// Encodes blocks as a store does, but that it measures none where that is asked for.
fn encode_blocks(
    backend: &mut CpuBackend,
    sources: &[EncodeSource],
    errors: ErrorMeasure,
) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
    if errors != ErrorMeasure::None {
        return backend.encode(MODEL, LAYER, sources);
    }
    let chosen = backend.choose_blocks_to_count(MODEL, LAYER, sources.len())?;
    let chosen: Vec<_> = chosen.into_iter().map(|index| sources[index]).collect();
    backend.observe_blocks(MODEL, LAYER, &chosen)?;
    backend.encode_as(MODEL, LAYER, sources, EncodeAs { measured: false })
}

/// As many queries of each head as errors are measured by.
fn draw_queries(geometry: &Geometry) -> Vec<Vec<f32>> {
    let (mut normal, dim) = (NormalValues::new(8), geometry.head_dim(Side::Key));
    let scale = (dim as f32).sqrt().recip();
    let mut of_head =
        |_| (0..LayerQueries::MOST * dim).map(|_| normal.draw_value() * scale).collect();
    (0..geometry.kv_heads).map(&mut of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find_shape;

    fn bench(tokens: u32, buffer_bytes: u64) -> StoreBench {
        StoreBench {
            shape: find_shape("2x1x64").unwrap(),
            codecs: vec!["raw".into(), "kvcomp".into()],
            tokens,
            threads: vec![1],
            block_tokens: 16,
            errors: vec![ErrorMeasure::Rows],
            rounds: 1,
            buffer_bytes,
        }
    }

    #[test]
    fn rows_to_store_are_more_than_the_buffer_and_all_differ() {
        let of = |tokens, buffer_bytes| {
            let bench = bench(tokens, buffer_bytes);
            bench.draw_blocks(&bench.shape.layer_geometry(16)).unwrap()
        };
        // A block has 16 tokens of 2 heads of 64 channels, K and V of two bytes.
        let incoming = of(33, 5 << 13);
        assert_eq!(incoming.len(), 5);
        let bytes: std::collections::BTreeSet<_> =
            incoming.iter().map(|rows| &rows.k[..]).collect();
        assert_eq!(bytes.len(), 5);
        // As many at least as one call stores.
        assert_eq!(of(33, 1).len(), 3);
    }

    #[test]
    fn a_row_says_what_its_pages_take_and_what_the_first_call_costs() {
        let rows = bench(33, 1).measure_all().unwrap().rows;
        let [raw, coded] = &rows[..] else { panic!("{rows:?}") };
        // Pages of f16 have headers.
        assert!((16.0..17.0).contains(&raw.bits_per_value), "{raw:?}");
        assert!(coded.bits_per_value < raw.bits_per_value, "{coded:?}");
        for row in &rows {
            assert!(row.first_us > 0.0 && row.threads == 1, "{row:?}");
            let ratio = row.logical_gb_per_s / row.stored_gb_per_s;
            assert!((ratio * row.bits_per_value / 16.0 - 1.0).abs() < 1e-9, "{row:?}");
        }
    }

    #[test]
    fn one_block_in_sixteen_is_measured_or_none() {
        let bench =
            StoreBench { errors: ErrorMeasure::ALL.to_vec(), rounds: 3, ..bench(16 * 16, 1) };
        let rows = bench.measure_all().unwrap().rows;
        assert_eq!(rows.len(), 2 * ErrorMeasure::ALL.len());
        for row in &rows {
            let part = if row.errors == ErrorMeasure::None { 0.0 } else { 1.0 / 16.0 };
            assert_eq!(row.measured_blocks, part, "{row:?}");
            // The pages are those of a store that measures.
            let same = rows.iter().filter(|of| of.codec == row.codec);
            assert!(same.clone().all(|of| of.bits_per_value == row.bits_per_value), "{row:?}");
        }
    }
}
