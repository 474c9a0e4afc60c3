//! The CPU backend: an arena, the models' codecs, and a fixed pool of threads.
//!
//! Data flows one way: `attend` (or `key_scores`) cuts a plan into units (`attend_job`),
//! `attend_unit` walks over the spans of one (`token_span`, `row_reader`), `kernel_table` picks
//! the kernels of its sides, and those end in a few products that all share. A file in a folder
//! does the folder's task with one instruction set (`avx512`, `avx2`, `avx_vnni`, `amx`, `neon`;
//! `x86` and `simd_*` where several have one source). Only those files hold unsafe code.
//!
//! | a side | kernel | what it multiplies with |
//! |---|---|---|
//! | `raw`, `f16`, `bf16`, `f32`, and rows that are decoded | `float` | `simd_vector` |
//! | `fp8` | `fp8` | `simd_vector` |
//! | `uniform`, scales by channel or page | `uniform`, its `values` | `int_operands`, `int_dot` |
//! | the same, keys by token | `uniform::by_token` | `int_operands`, `int_dot` |
//! | the same with `int8` | `uniform::bf16` in AVX-512, `uniform::nibbles` in AVX2 | themselves |
//! | `uniform(mode=hybrid)` | `hybrid` under the above | `hybrid`, `int_dot` |
//! | `vq` | `vq`; `expand` first where entries fit no register | `int_operands`, `int_dot` |
//! | `vq(b=4)` and `lloyd(b=4)` keys with `int8` | `score_tables` | look-ups |
//! | `lloyd`, keys of `polar` | `lloyd`, `polar` | `int_operands`, `int_dot` |
//! | `bitalloc` | `bitalloc`; `levels` first but in AVX-512 | `int_operands`, `int_dot` |
//! | `grid`, any side with `/huffman` | `huffman` to tiles, `grid` or the side's own | the same |

mod arena;
mod attend;
mod attend_f64;
mod attend_job;
mod attend_unit;
mod bitalloc;
mod code_decoder;
#[cfg(test)]
mod conformance;
mod content_hash;
mod encode;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "kernels of instruction sets take it")
)]
mod expand;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "kernels of instruction sets take it")
)]
mod float;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "kernels of instruction sets take it")
)]
mod fp8;
mod grid;
mod grid_energy;
mod huffman;
mod hybrid;
mod int_dot;
mod int_operands;
mod kernel_table;
mod key_scores;
mod left_of_sums;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "kernels of instruction sets take it")
)]
mod levels;
mod lloyd;
mod loss;
mod multiply_kind;
mod outlier_sums;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "kernels of instruction sets take it")
)]
mod part_bytes;
mod peak;
mod piece_stop;
mod polar;
mod prefetch;
mod raw_slots;
mod row_block;
mod row_reader;
mod score_probe;
mod score_tables;
mod scratch;
mod side_kernels;
mod simd;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd_vector;
mod slices;
mod small_plans;
mod softmax;
mod span_scores;
mod span_weights;
#[cfg(test)]
mod tests;
mod tile_cursor;
mod token_span;
mod transfer;
mod uniform;
mod unit_answer;
mod unit_plan;
mod unit_queries;
mod value_looks;
mod vq;

use crate::{
    AppendSteps, AttendBackend, AttendPlan, AttendTask, Attended, BackendError, DeviceInfo,
    EncodeSource, EncodeTask, EncodedBlocks, EncodedPages, IncomingRows, LoadPlan, LoadedRows,
    ModelBytes, PageBackend, RawTarget, RegionBackend, Sampling, Source, Stop,
};
pub use arena::ArenaError;
use arena::HostArena;
pub use code_decoder::CodeDecoder;
pub use content_hash::{content_hash, content_hash_of};
pub use encode::EncodeAs;
pub use kernel_table::{KernelChoice, list_kernels};
use kvd_codec::{CodeCounts, ModelCodec};
use kvd_core::{Extent, LayerIndex, ModelId};
pub use multiply_kind::MultiplyKind;
pub use peak::multiply_adds;
pub use raw_slots::first_non_finite;
use row_reader::LayerReader;
use scratch::ScratchStores;
pub(crate) use scratch::ScratchVec;
use simd::KernelConfig;
pub use simd::{InstructionSet, Precision, Simd};
use std::collections::HashMap;

/// How much of the machine the CPU backend takes.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Page memory in bytes, taken at start.
    pub arena_bytes: u64,
    /// Touch every page of the arena at start.
    pub prefault: bool,
    /// Threads for one call, at most [`CpuOptions::THREADS_MAX`]; 0 means one per core.
    pub threads: usize,
}

impl CpuOptions {
    /// Most threads of a backend: as many as cores that one process is kept on.
    pub const THREADS_MAX: usize = 1024;
}

/// A model, and which of its blocks are measured.
struct RegisteredModel {
    codec: ModelCodec,
    sampling: Sampling,
}

/// A [`Backend`](crate::Backend) on the host's processor.
pub struct CpuBackend {
    arena: HostArena,
    models: HashMap<ModelId, RegisteredModel>,
    threads: rayon::ThreadPool,
    /// Memory of attends, for each thread and one caller.
    scratch: ScratchStores,
    /// Sides whose codes are looked at while they are multiplied.
    looks: value_looks::ValueLooks,
    simd: Simd,
    precision: Precision,
}

/// A plan, which of its queries nobody waits for, and its queries in f32.
#[derive(Clone, Copy)]
struct AskedPlan<'a> {
    plan: &'a AttendPlan,
    dropped: &'a [bool],
    q: &'a [f32],
}

/// Why the CPU backend could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// More threads than a backend has.
    #[error("{threads} compute threads (device.threads) are above the maximum {max}")]
    TooManyThreads {
        /// Threads asked for.
        threads: usize,
        /// The most there can be.
        max: usize,
    },
    /// The thread pool could not be started.
    #[error("start {threads} compute threads (device.threads): {source}")]
    Threads {
        /// Threads asked for; 0 means one per core.
        threads: usize,
        /// Why not.
        source: rayon::ThreadPoolBuildError,
    },
    /// The processor cannot do what was asked for.
    #[error("this processor does not have {0}")]
    InstructionSet(&'static str),
    /// Page memory could not be had.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl CpuBackend {
    /// Takes the arena and starts the threads.
    ///
    /// # Errors
    /// When the operating system gives no threads or not the memory.
    pub fn new(options: CpuOptions) -> Result<Self, OpenError> {
        Self::starting(options, |_| {})
    }

    /// As [`CpuBackend::new`]; each thread calls `on_start` with its number before it works.
    ///
    /// # Errors
    /// As [`CpuBackend::new`].
    pub fn starting(
        options: CpuOptions,
        on_start: impl Fn(usize) + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        let (threads, max) = (options.threads, CpuOptions::THREADS_MAX);
        if threads > max {
            return Err(OpenError::TooManyThreads { threads, max });
        }
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("kvd-cpu-{i}"))
            .start_handler(on_start)
            .build()
            .map_err(|source| OpenError::Threads { threads: options.threads, source })?;
        Ok(Self {
            arena: HostArena::new(options.arena_bytes, options.prefault.then_some(&threads))?,
            models: HashMap::new(),
            scratch: ScratchStores::for_threads(threads.current_num_threads() + 1),
            looks: value_looks::ValueLooks::default(),
            threads,
            simd: Simd::detect_widest(),
            precision: Precision::default(),
        })
    }

    /// Instruction sets that this machine has, the widest last.
    #[must_use]
    pub fn instruction_sets() -> Vec<InstructionSet> {
        let has = |set: &InstructionSet| Simd::of_set(*set).is_some();
        InstructionSet::ALL.into_iter().filter(has).collect()
    }

    /// The instruction set in use.
    #[must_use]
    pub fn instruction_set(&self) -> InstructionSet {
        self.simd.level()
    }

    /// Chooses between exactness and speed; [`Precision::Fast`] unless told otherwise.
    pub fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// The precision that is used on this instruction set, where `query_tokens` of a sequence go
    /// through `group` query heads of each KV head: `int8` is [`Precision::Fast`] where nothing is
    /// rounded to single bytes or it would be no faster. Codecs whose kernels round to none answer
    /// as under `fast` either way.
    #[must_use]
    pub fn effective_precision(&self, query_tokens: u32, group: u32) -> Precision {
        let rows = query_tokens.min(unit_plan::UNIT_QUERY_TOKENS) * group;
        attend_job::effective_precision(self.config(), rows as usize)
    }

    /// The instructions that attention multiplies keys and values of a layer with, where
    /// `query_tokens` of a sequence go through `group` query heads of each KV head; by its first
    /// head.
    ///
    /// # Errors
    /// When the model is not registered.
    pub fn multiply_kinds(
        &self,
        model: ModelId,
        layer: LayerIndex,
        query_tokens: u32,
        group: u32,
    ) -> Result<[MultiplyKind; 2], BackendError> {
        let rows = (query_tokens.min(unit_plan::UNIT_QUERY_TOKENS) * group) as usize;
        let config = attend_job::effective_config(self.config(), rows);
        Ok(MultiplyKind::of_layer(config, self.codec(model)?, layer, rows))
    }

    /// Uses `set` instead of the best there is, to compare or to test: for attention and scores,
    /// and in the codec's loops on this backend's threads (encoding, transforms, decoding of rows).
    ///
    /// # Errors
    /// When this machine does not have it.
    pub fn limit(&mut self, set: InstructionSet) -> Result<(), OpenError> {
        self.simd = Simd::named(Some(set))?;
        let width = self.simd.width();
        self.threads.broadcast(|_| kvd_codec::limit_width(Some(width)));
        Ok(())
    }

    /// Scores of one query token against the keys that the plan names, all of them kept: what
    /// softmax would take, `[q_heads, tokens]`, and -infinity where a token is not seen. Values are
    /// not read.
    ///
    /// # Errors
    /// As [`AttendBackend::attend`].
    ///
    /// # Panics
    /// When the plan has not one query of one token, or `out` another length.
    pub fn key_scores(&self, plan: &AttendPlan, out: &mut [f32]) -> Result<(), BackendError> {
        assert!(matches!(&plan.queries[..], [query] if query.n_q == 1), "one query token");
        let scores = plan.queries[0].tokens() * u64::from(plan.q_heads);
        assert_eq!(out.len() as u64, scores, "a score for each query head and token");
        self.with_job(plan, |job| key_scores::write_key_scores(job, out))
    }

    /// Runs a plan on the threads, if its queries are numbers.
    fn with_job<T: Send>(
        &self,
        plan: &AttendPlan,
        run: impl FnOnce(&attend_job::AttendJob<'_>) -> Result<T, BackendError> + Send,
    ) -> Result<T, BackendError> {
        let q = slices::widened_queries(plan)?;
        let stop = Stop::never();
        let asked = AskedPlan { plan, dropped: &[], q: &q };
        self.threads.install(|| run(&self.new_job(asked, &stop)?))
    }

    fn config(&self) -> KernelConfig {
        KernelConfig { simd: self.simd, precision: self.precision }
    }

    fn new_job<'a>(
        &'a self,
        asked: AskedPlan<'a>,
        stop: &'a Stop,
    ) -> Result<attend_job::AttendJob<'a>, BackendError> {
        let AskedPlan { plan, dropped, q } = asked;
        Ok(attend_job::AttendJob {
            plan,
            reader: LayerReader {
                arena: &self.arena,
                codec: self.codec(plan.model)?,
                layer: plan.layer,
            },
            simd: self.simd,
            precision: self.precision,
            q,
            dropped,
            threads: self.threads.current_num_threads(),
            scratch: &self.scratch,
            looks: &self.looks,
            is_small: self.is_small(plan),
            stop: piece_stop::PieceStop::new(stop),
        })
    }

    /// Writes bytes to page memory as they are: rows or pages that lie on another device.
    ///
    /// # Panics
    /// When the lengths differ, or the extent is beyond the memory.
    pub fn fill(&mut self, to: Extent, bytes: &[u8]) {
        self.arena.extent_bytes_mut(to).copy_from_slice(bytes);
    }

    /// Encodes blocks as [`AppendSteps::encode`] does, `how` instead of as the host decides, with
    /// the Huffman tables that there are: for a device that has its own [`Sampling`].
    ///
    /// # Errors
    /// As [`AppendSteps::encode`].
    pub fn encode_as(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
        how: EncodeAs,
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        let state = self.models.get(&model).ok_or(BackendError::UnknownModel(model))?;
        let (arena, codec) = (&self.arena, &state.codec);
        Ok(self.threads.install(|| encode::encode_as(arena, codec, layer, blocks, how)))
    }

    /// Chooses which of a layer's next blocks are counted before any of them is encoded.
    ///
    /// # Errors
    /// When the model is not registered.
    pub fn choose_blocks_to_count(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: usize,
    ) -> Result<Vec<usize>, BackendError> {
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        Ok(state.codec.choose_blocks_to_count(layer, blocks))
    }

    /// Counts the codes of chosen blocks, whose Huffman tables may be replaced for it.
    ///
    /// # Errors
    /// When the model is not registered, or as [`ModelCodec::count_blocks`].
    pub fn observe_blocks(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<(), BackendError> {
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        let (arena, codec) = (&self.arena, &mut state.codec);
        self.threads.install(|| encode::observe_blocks(arena, codec, layer, blocks))
    }

    /// Takes the codes of so many chosen blocks that a device has counted.
    ///
    /// # Errors
    /// When the model is not registered, or as [`ModelCodec::observe_codes`].
    pub fn observe_codes(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        counts: &[CodeCounts],
        blocks: usize,
    ) -> Result<(), BackendError> {
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        Ok(state.codec.observe_codes(layer, counts, blocks)?)
    }

    /// A model's codec, with the Huffman tables built so far.
    ///
    /// # Errors
    /// When the model is not registered.
    pub fn codec(&self, model: ModelId) -> Result<&ModelCodec, BackendError> {
        Ok(&self.models.get(&model).ok_or(BackendError::UnknownModel(model))?.codec)
    }
}

impl PageBackend for CpuBackend {
    fn info(&self) -> DeviceInfo {
        let (simd, threads) = (self.simd.level().name(), self.threads.current_num_threads());
        DeviceInfo {
            description: format!("cpu ({simd}, {threads} threads, {})", self.precision.name()),
            arena_bytes: self.arena.capacity_bytes(),
            uuid: None,
        }
    }

    fn register(&mut self, model: ModelId, codec: ModelCodec) {
        self.models.insert(model, RegisteredModel { codec, sampling: Sampling::default() });
    }

    fn unregister(&mut self, model: ModelId) {
        self.models.remove(&model);
    }

    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        let codec = self.codec(model)?;
        Ok(ModelBytes {
            calibration: codec.calibration_bytes(),
            tables: codec.table_bytes(),
            table_versions: codec.table_versions(),
        })
    }

    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        let codec = self.codec(plan.model)?;
        let reader = LayerReader { arena: &self.arena, codec, layer: plan.layer };
        raw_slots::load_rows(reader, plan, &self.threads)
    }
}

impl AppendSteps for CpuBackend {
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        raw_slots::check_finite(self.codec(model)?.geometry(), rows)
    }

    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let model = self.models.get(&model).ok_or(BackendError::UnknownModel(model))?;
        let source = source_row..source_row + count;
        raw_slots::write_rows(&mut self.arena, model.codec.geometry(), rows, source, to);
        Ok(())
    }

    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let model = self.models.get(&model).ok_or(BackendError::UnknownModel(model))?;
        raw_slots::copy_rows(&mut self.arena, &model.codec, layer, from, count, to)
    }

    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<EncodedBlocks, BackendError> {
        let blocks = blocks.to_vec();
        let mut task = EncodeTask { model, layer, blocks, under_way: None };
        let never = Stop::never();
        loop {
            if let Some(encoded) = self.encode_slice(&mut task, &never)? {
                return Ok(encoded);
            }
        }
    }

    fn encode_slice(
        &mut self,
        task: &mut EncodeTask,
        stop: &Stop,
    ) -> Result<Option<EncodedBlocks>, BackendError> {
        let model = task.model;
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        let (arena, codec, sampling) = (&self.arena, &mut state.codec, &mut state.sampling);
        self.threads.install(|| encode::encode_slice(arena, codec, sampling, task, stop))
    }

    fn set_queries(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        heads: &[Vec<f32>],
    ) -> Result<(), BackendError> {
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        Ok(state.codec.set_queries(layer, heads)?)
    }

    fn move_pages(&mut self, pages: &EncodedPages, to: Extent) {
        self.arena.extent_bytes_mut(to).copy_from_slice(&pages.bytes);
    }
}

impl AttendBackend for CpuBackend {
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        slices::attend_whole(self, plan)
    }

    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        slices::attend_slice(self, task, stop)
    }

    fn shares_pages(&self) -> bool {
        true
    }

    fn is_small_plan(&self, plan: &AttendPlan) -> bool {
        self.is_small(plan)
    }
}

/// The host has no device memory to share.
impl RegionBackend for CpuBackend {}
