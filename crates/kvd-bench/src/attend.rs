//! Decode attention over pages of each codec, in turns.

use crate::data::{FillOptions, FilledBackend, LAYER, MODEL, NormalValues};
use crate::limits::CallSize;
use crate::measure::{BenchResult, MachineInfo, MeasuredFigure, measure_time};
use crate::peaks::KnownPeaks;
use crate::{BenchError, HeadShape, each_set, limits};
use bytes::Bytes;
use kvd_compute::{
    AttendBackend, AttendPlan, Attended, InstructionSet, LoadPlan, MultiplyKind, PageBackend,
    PlanPart, PlanQuery, Precision, Source,
};
use kvd_core::{DType, ProgressLines, Side};
use serde::Serialize;
use std::hint::black_box;

/// Deviation of a score: a softmax that is neither flat nor a single token.
const SCORE_DEVIATION: f32 = 1.3;
/// Tokens that the error is measured on.
const ERROR_TOKENS: usize = 2048;

/// Options of `kvd bench attend`.
#[derive(Clone, Debug)]
pub struct AttendBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Cached tokens of a sequence.
    pub contexts: Vec<u32>,
    /// Sequences per call.
    pub batch: usize,
    /// Each sequence of a call is half as long as the one before.
    pub ragged: bool,
    /// Query tokens per sequence.
    pub query_tokens: u32,
    /// Compute threads; each number of them takes its turn.
    pub threads: Vec<usize>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Turns of each codec.
    pub rounds: usize,
    /// Bytes of pages that calls rotate over.
    pub buffer_bytes: u64,
    /// How far kernels may round.
    pub precision: Precision,
    /// Instruction sets to compare; empty is the machine's best.
    pub instruction_sets: Vec<InstructionSet>,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct AttendRow {
    /// The codec.
    pub codec: String,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// How far kernels may round: `int8` is `fast` on instruction sets without products of single
    /// bytes or score tables. Codecs that have neither there round as with `fast` (`error`).
    pub precision: &'static str,
    /// Compute threads.
    pub threads: usize,
    /// Cached tokens of a sequence, of the longest where they differ.
    pub context: u32,
    /// Stored bits per value, headers and scales included.
    pub bits_per_value: f64,
    /// Processor time per token and KV head, K and V and all query heads, in nanoseconds.
    pub cpu_ns: MeasuredFigure,
    /// Wall time per token and KV head, in nanoseconds.
    pub wall_ns: MeasuredFigure,
    /// Pages read, in GB per second of processor time (median).
    pub stored_gb_per_s: f64,
    /// F16 values that the pages stand for, in GB per second of processor time (median).
    pub logical_gb_per_s: f64,
    /// `stored_gb_per_s` as part of what one thread reads from memory.
    pub of_read_speed: f64,
    /// Number format of the products of K and of V on this instruction set: `f32`, `bf16`, `words`,
    /// `bytes`, or `tiles` of bytes.
    pub products: [&'static str; 2],
    /// Such products that one thread makes in a nanosecond at most, from registers, on this
    /// instruction set; none where that is not measured.
    pub peak_per_ns: [Option<f64>; 2],
    /// Multiplications that attention makes, as part of what one thread makes of such products.
    /// Where a factor has two bytes and products are of one, they are at most half of it.
    pub of_multiply_speed: Option<f64>,
    /// Relative error of the output against the same decoded K and V in f64.
    pub kernel_error: f64,
}

/// The blocks of a call's sequences, as many of each.
struct CallBlocks<'a> {
    blocks: &'a [Source],
    per_sequence: usize,
}

/// One codec at one context and instruction set.
struct AttendCase {
    row: AttendRow,
    filled: FilledBackend,
    plans: Vec<AttendPlan>,
    tokens: f64,
    /// Query rows that read a KV head.
    rows_per_head: f64,
    cpu: Vec<f64>,
    wall: Vec<f64>,
}

impl AttendBench {
    /// Measures everything.
    ///
    /// # Errors
    /// When a codec does not fit the shape, or the memory is not there.
    pub fn measure_all(&self) -> Result<BenchResult<AttendRow>, BenchError> {
        let threads = self.threads.iter().copied().max().unwrap_or(1);
        limits::check_threads(threads)?;
        for context in &self.contexts {
            let tokens = (0..self.batch).map(|at| u64::from(self.context_of(at, *context))).sum();
            let batch = self.batch as u64;
            let call = CallSize { query_tokens: u64::from(self.query_tokens), tokens, batch };
            limits::check_call(&self.shape, call)?;
        }
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench attend", 0);
        let machine = MachineInfo::inspect_machine(threads);
        let (mut rows, mut peaks) = (Vec::new(), KnownPeaks::default());
        for context in &self.contexts {
            let mut cases = Vec::new();
            let sets = each_set(&self.instruction_sets);
            let fills = self.codecs.len() * sets.len() * self.threads.len();
            progress.begin_task("bench attend, filling pages", fills as u64);
            for codec in &self.codecs {
                progress.name_step("bench attend, filling pages", codec);
                for set in &sets {
                    for threads in &self.threads {
                        cases.push(self.prepare_case(codec, *context, *set, *threads)?);
                        progress.add_steps(1);
                    }
                }
            }
            for case in &mut cases {
                self.set_against(&mut peaks, case)?;
            }
            let turns = (self.rounds + 1) * cases.len();
            progress.begin_task(&format!("bench attend, {context} tokens"), turns as u64);
            for round in 0..=self.rounds {
                for case in &mut cases {
                    // The first round warms up.
                    case.take_turn(round, round > 0)?;
                    progress.add_steps(1);
                }
            }
            rows.extend(cases.into_iter().map(|case| case.finish_row(&machine)));
        }
        Ok(BenchResult { machine, rows })
    }

    /// Says what a row multiplies with, and how many of those the machine makes.
    fn set_against(&self, peaks: &mut KnownPeaks, case: &mut AttendCase) -> Result<(), BenchError> {
        let backend = &case.filled.backend;
        let products = backend.multiply_kinds(MODEL, LAYER, self.query_tokens, self.shape.group);
        let products = products.map_err(BenchError::failed_step(&case.row.codec))?;
        let set = backend.instruction_set();
        case.row.products = products.map(MultiplyKind::name);
        case.row.peak_per_ns = products.map(|products| peaks.per_ns(set, products));
        Ok(())
    }

    fn prepare_case(
        &self,
        codec: &str,
        context: u32,
        set: Option<InstructionSet>,
        threads: usize,
    ) -> Result<AttendCase, BenchError> {
        let per_sequence = context.div_ceil(self.block_tokens) as usize;
        let fill = FillOptions {
            shape: self.shape,
            block_tokens: self.block_tokens,
            threads,
            instruction_set: set,
            precision: self.precision,
            buffer_bytes: self.buffer_bytes,
            blocks: per_sequence * self.batch,
        };
        let filled = FilledBackend::new(codec, fill)?;
        let calls = filled.blocks.chunks_exact(per_sequence * self.batch);
        let q = self.draw_queries();
        let plan =
            |blocks| self.plan_attend(CallBlocks { blocks, per_sequence }, context, q.clone());
        let plans: Vec<_> = calls.map(plan).collect();
        let geometry = &filled.geometry;
        let values = geometry.values_per_token() as f64 * f64::from(self.block_tokens);
        let row = AttendRow {
            codec: codec.to_owned(),
            instruction_set: filled.backend.instruction_set().name(),
            precision: filled
                .backend
                .effective_precision(self.query_tokens, self.shape.group)
                .name(),
            threads,
            context,
            bits_per_value: filled.block_bytes * 8.0 / values,
            cpu_ns: MeasuredFigure::from_runs(vec![0.0]),
            wall_ns: MeasuredFigure::from_runs(vec![0.0]),
            stored_gb_per_s: 0.0,
            logical_gb_per_s: 0.0,
            of_read_speed: 0.0,
            products: [""; 2],
            peak_per_ns: [None; 2],
            of_multiply_speed: None,
            kernel_error: 0.0,
        };
        let contexts =
            (0..self.batch).map(|sequence| f64::from(self.context_of(sequence, context)));
        let tokens = contexts.sum::<f64>() * f64::from(self.shape.kv_heads);
        let rows_per_head = f64::from(self.shape.group * self.query_tokens);
        let [cpu, wall] = [const { Vec::new() }; 2];
        let mut case = AttendCase { row, filled, plans, tokens, rows_per_head, cpu, wall };
        case.row.kernel_error =
            self.measure_error(&mut case.filled).map_err(BenchError::failed_step(codec))?;
        Ok(case)
    }

    /// Draws the queries of a call.
    fn draw_queries(&self) -> Bytes {
        draw_queries(&self.shape, self.batch * self.query_tokens as usize)
    }

    fn plan_attend(&self, call: CallBlocks<'_>, context: u32, q: Bytes) -> AttendPlan {
        let sequences = call.blocks.chunks(call.per_sequence).enumerate();
        let sequences = sequences.map(|(sequence, blocks)| {
            let tokens = self.context_of(sequence, context);
            let count = tokens.div_ceil(self.block_tokens) as usize;
            CachedSequence { blocks: &blocks[..count], tokens }
        });
        let (query_tokens, block_tokens) = (self.query_tokens, self.block_tokens);
        plan_of(&self.shape, sequences, PlanQueries { query_tokens, block_tokens, q })
    }

    /// Tokens of a sequence of a call whose longest has `context`.
    fn context_of(&self, sequence: usize, context: u32) -> u32 {
        let halvings = if self.ragged { sequence as u32 } else { 0 };
        context.checked_shr(halvings).unwrap_or(0).max(1)
    }

    /// Relative error of attention over a few blocks against f64 over the same decoded rows.
    fn measure_error(&self, filled: &mut FilledBackend) -> Result<f64, String> {
        let blocks = (ERROR_TOKENS / self.block_tokens as usize).clamp(1, filled.blocks.len());
        let context = blocks as u32 * self.block_tokens;
        let one = Self { batch: 1, query_tokens: 1, ..self.clone() };
        let q = widen_to_f32(&one.draw_queries());
        let call = CallBlocks { blocks: &filled.blocks[..blocks], per_sequence: blocks };
        let mut plan = one.plan_attend(call, context, q);
        plan.dtype = DType::F32;
        let answer = filled.backend.attend(&plan).map_err(|error| error.to_string())?;
        let parts = plan_parts(&filled.blocks[..blocks], self.block_tokens, context);
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts };
        let rows = filled.backend.load(&load).map_err(|error| error.to_string())?;
        let [q, k, v, out] = [&plan.q[..], &rows.k, &rows.v, &answer.out].map(read_floats);
        let exact = attend_exactly(&self.shape, &q, &k, &v);
        let (mut difference, mut norm) = (0f64, 0f64);
        for (got, want) in out.iter().zip(&exact) {
            difference += (got - want).powi(2);
            norm += want.powi(2);
        }
        Ok((difference / norm).sqrt())
    }
}

/// Queries of so many tokens, the same each time.
pub(crate) fn draw_queries(shape: &HeadShape, tokens: usize) -> Bytes {
    let heads = shape.kv_heads as usize * shape.group as usize;
    NormalValues::new(42).draw_bytes(tokens * heads * shape.head_dim_k as usize, SCORE_DEVIATION)
}

/// A sequence of a plan: its blocks, and how many tokens of them it has.
pub(crate) struct CachedSequence<'a> {
    pub(crate) blocks: &'a [Source],
    pub(crate) tokens: u32,
}

/// Queries of a plan.
pub(crate) struct PlanQueries {
    /// Query tokens of each sequence.
    pub(crate) query_tokens: u32,
    /// Tokens of a block of what they read.
    pub(crate) block_tokens: u32,
    pub(crate) q: Bytes,
}

/// Makes a plan of queries over sequences.
pub(crate) fn plan_of<'a>(
    shape: &HeadShape,
    sequences: impl Iterator<Item = CachedSequence<'a>>,
    queries: PlanQueries,
) -> AttendPlan {
    let PlanQueries { query_tokens, block_tokens, q } = queries;
    let query = |sequence: CachedSequence<'_>| PlanQuery {
        n_q: query_tokens,
        position: sequence.tokens,
        sliding_window: None,
        parts: plan_parts(sequence.blocks, block_tokens, sequence.tokens).into(),
    };
    let queries: Vec<_> = sequences.map(query).collect();
    let q_heads = shape.kv_heads * shape.group;
    AttendPlan {
        model: MODEL,
        layer: LAYER,
        q_heads,
        dtype: DType::F16,
        scale: None,
        soft_cap: None,
        queries,
        q,
    }
}

pub(crate) fn widen_to_f32(bytes: &Bytes) -> Bytes {
    let mut wide = vec![0f32; bytes.len() / 2];
    DType::F16.widen_values(bytes, &mut wide);
    let mut out = vec![0; wide.len() * 4];
    DType::F32.narrow_values(&wide, &mut out);
    out.into()
}

pub(crate) fn read_floats(bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.as_chunks::<4>().0.iter();
    chunks.map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

/// Attention of one query token over `[tokens, heads, dim]` rows, in f64.
fn attend_exactly(shape: &HeadShape, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let (heads, group) = (shape.kv_heads as usize, shape.group as usize);
    let (dim_k, dim_v) = (shape.head_dim_k as usize, shape.head_dim_v as usize);
    let scale = 1.0 / (dim_k as f64).sqrt();
    let mut out = vec![0f64; heads * group * dim_v];
    for (row, out) in out.chunks_exact_mut(dim_v).enumerate() {
        let (q, head) = (&q[row * dim_k..][..dim_k], row / group);
        let key = |t: usize| &k[(t * heads + head) * dim_k..][..dim_k];
        let dot = |key: &[f64]| q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * scale;
        let scores: Vec<f64> = (0..k.len() / (heads * dim_k)).map(|t| dot(key(t))).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        for (t, score) in scores.iter().enumerate() {
            let weight = (score - max).exp() / sum;
            let value = &v[(t * heads + head) * dim_v..][..dim_v];
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
        }
    }
    out
}

pub(crate) fn plan_parts(blocks: &[Source], block_tokens: u32, context: u32) -> Vec<PlanPart> {
    let part = |(first_token, source): (u32, &Source)| PlanPart {
        first_token,
        rows: block_tokens.min(context - first_token),
        source: source.clone(),
    };
    (0..).step_by(block_tokens as usize).zip(blocks).map(part).collect()
}

impl AttendCase {
    /// Attends to the next part of the buffer.
    fn take_turn(&mut self, round: usize, counts: bool) -> Result<(), BenchError> {
        // Enough calls that a turn takes milliseconds.
        let calls = ((4e5 / self.tokens) as usize).clamp(1, self.plans.len());
        for call in 0..calls {
            let plan = &self.plans[(round * calls + call) % self.plans.len()];
            let attend = || self.filled.backend.attend(plan);
            let timed = measure_time(attend);
            let answer: Attended = timed.value.map_err(BenchError::failed_step(&self.row.codec))?;
            black_box(answer);
            if counts {
                self.cpu.push(timed.cpu_ns / self.tokens);
                self.wall.push(timed.wall_ns / self.tokens);
            }
        }
        Ok(())
    }

    fn finish_row(mut self, machine: &MachineInfo) -> AttendRow {
        let heads = f64::from(self.filled.geometry.kv_heads);
        let values = self.filled.geometry.values_per_token() as f64 / heads;
        self.row.cpu_ns = MeasuredFigure::from_runs(self.cpu);
        self.row.wall_ns = MeasuredFigure::from_runs(self.wall);
        let median = self.row.cpu_ns.median;
        self.row.stored_gb_per_s = values * self.row.bits_per_value / 8.0 / median;
        self.row.logical_gb_per_s = values * 2.0 / median;
        self.row.of_read_speed = self.row.stored_gb_per_s / machine.read_gb_per_s.median;
        let at_least = |(side, peak): (Side, Option<f64>)| {
            let values = self.filled.geometry.head_dim(side) as f64;
            peak.map(|peak| values * self.rows_per_head / peak)
        };
        let sides = Side::BOTH.into_iter().zip(self.row.peak_per_ns).map(at_least);
        self.row.of_multiply_speed = sides.sum::<Option<f64>>().map(|ns| ns / median);
        self.row
    }
}
