//! Scores of keys alone, all of them kept, in turns: what a search over keys would compare.

use crate::attend::{
    CachedSequence, PlanQueries, draw_queries, plan_of, plan_parts, read_floats, widen_to_f32,
};
use crate::data::{FillOptions, FilledBackend, LAYER, MODEL};
use crate::limits::CallSize;
use crate::measure::{BenchResult, MachineInfo, MeasuredFigure, measure_time};
use crate::{BenchError, HeadShape, each_set, limits};
use kvd_compute::{AttendPlan, InstructionSet, LoadPlan, PageBackend, Precision, Source};
use kvd_core::{DType, ProgressLines};
use serde::Serialize;
use std::hint::black_box;

/// Tokens that the error is measured on.
const ERROR_TOKENS: usize = 2048;

/// Options of `kvd bench scores`: one query token of one sequence, on one thread.
#[derive(Clone, Debug)]
pub struct ScoresBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Cached tokens.
    pub context: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Turns of each codec.
    pub rounds: usize,
    /// Bytes of pages that calls rotate over, those of values included.
    pub buffer_bytes: u64,
    /// How far kernels may round.
    pub precision: Precision,
    /// Instruction sets to compare; empty is the machine's best.
    pub instruction_sets: Vec<InstructionSet>,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct ScoresRow {
    /// The codec.
    pub codec: String,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// How far kernels rounded, in the words of attention.
    pub precision: &'static str,
    /// Cached tokens.
    pub context: u32,
    /// Stored bits per value of keys, headers included.
    pub bits_per_value: f64,
    /// Processor time per key, all query heads of its KV head, in nanoseconds.
    pub cpu_ns: MeasuredFigure,
    /// Relative error of the scores against the same decoded keys in f64.
    pub kernel_error: f64,
}

/// One codec and instruction set.
struct ScoresCase {
    row: ScoresRow,
    filled: FilledBackend,
    plans: Vec<AttendPlan>,
    scores: Vec<f32>,
    keys: f64,
    cpu: Vec<f64>,
}

impl ScoresBench {
    /// Measures everything.
    ///
    /// # Errors
    /// When a codec does not fit the shape, or the memory is not there.
    pub fn measure_all(&self) -> Result<BenchResult<ScoresRow>, BenchError> {
        let tokens = u64::from(self.context);
        limits::check_call(&self.shape, CallSize { query_tokens: 1, tokens, batch: 1 })?;
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench scores, filling pages", 0);
        let machine = MachineInfo::inspect_machine(1);
        let mut cases = Vec::new();
        for codec in &self.codecs {
            for set in each_set(&self.instruction_sets) {
                cases.push(self.prepare_case(codec, set)?);
            }
        }
        progress.begin_task("bench scores", ((self.rounds + 1) * cases.len()) as u64);
        for round in 0..=self.rounds {
            for case in &mut cases {
                // The first round warms up.
                case.take_turn(round, round > 0)?;
                progress.add_steps(1);
            }
        }
        let finish = |case: ScoresCase| ScoresRow {
            cpu_ns: MeasuredFigure::from_runs(case.cpu),
            ..case.row
        };
        Ok(BenchResult { machine, rows: cases.into_iter().map(finish).collect() })
    }

    fn prepare_case(
        &self,
        codec: &str,
        set: Option<InstructionSet>,
    ) -> Result<ScoresCase, BenchError> {
        let blocks = self.context.div_ceil(self.block_tokens) as usize;
        let fill = FillOptions {
            shape: self.shape,
            block_tokens: self.block_tokens,
            threads: 1,
            instruction_set: set,
            precision: self.precision,
            buffer_bytes: self.buffer_bytes,
            blocks,
        };
        let mut filled = FilledBackend::new(codec, fill)?;
        let kernel_error =
            self.measure_error(&mut filled).map_err(BenchError::failed_step(codec))?;
        let calls = filled.blocks.chunks_exact(blocks);
        let plans = calls.map(|blocks| self.plan_scores(blocks, self.context)).collect();
        let row = ScoresRow {
            codec: codec.to_owned(),
            instruction_set: filled.backend.instruction_set().name(),
            precision: filled.backend.effective_precision(1, self.shape.group).name(),
            context: self.context,
            bits_per_value: self.key_bits(&filled.blocks),
            cpu_ns: MeasuredFigure::from_runs(vec![0.0]),
            kernel_error,
        };
        let keys = f64::from(self.context) * f64::from(self.shape.kv_heads);
        let scores = vec![0.0; self.context as usize * self.q_heads()];
        Ok(ScoresCase { row, filled, plans, scores, keys, cpu: Vec::new() })
    }

    fn q_heads(&self) -> usize {
        (self.shape.kv_heads * self.shape.group) as usize
    }

    /// Pages are `[K heads.., V heads..]`.
    fn key_bits(&self, blocks: &[Source]) -> f64 {
        let heads = self.shape.kv_heads as usize;
        let bytes = |source: &Source| match source {
            Source::Pages { ends, .. } => f64::from(ends[heads - 1]),
            Source::Raw { .. } => 0.0,
        };
        let bytes: f64 = blocks.iter().map(bytes).sum();
        let rows = blocks.len() * self.block_tokens as usize * heads;
        bytes * 8.0 / (rows * self.shape.head_dim_k as usize) as f64
    }

    fn plan_scores(&self, blocks: &[Source], context: u32) -> AttendPlan {
        let (block_tokens, q) = (self.block_tokens, draw_queries(&self.shape, 1));
        let sequence = CachedSequence { blocks, tokens: context };
        let queries = PlanQueries { query_tokens: 1, block_tokens, q };
        plan_of(&self.shape, std::iter::once(sequence), queries)
    }

    /// Relative error of the scores of a few blocks.
    fn measure_error(&self, filled: &mut FilledBackend) -> Result<f64, String> {
        let blocks = (ERROR_TOKENS / self.block_tokens as usize).clamp(1, filled.blocks.len());
        let context = blocks as u32 * self.block_tokens;
        let mut plan = self.plan_scores(&filled.blocks[..blocks], context);
        (plan.dtype, plan.q) = (DType::F32, widen_to_f32(&plan.q));
        let mut scores = vec![0f32; context as usize * self.q_heads()];
        filled.backend.key_scores(&plan, &mut scores).map_err(|error| error.to_string())?;
        let parts = plan_parts(&filled.blocks[..blocks], self.block_tokens, context);
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts };
        let rows = filled.backend.load(&load).map_err(|error| error.to_string())?;
        let (q, k) = (read_floats(&plan.q), read_floats(&rows.k));
        let (dim, heads) = (self.shape.head_dim_k as usize, self.shape.kv_heads as usize);
        let (mut difference, mut norm) = (0f64, 0f64);
        for (row, scores) in scores.chunks_exact(context as usize).enumerate() {
            let (q, head) = (&q[row * dim..][..dim], row / self.shape.group as usize);
            for (score, keys) in scores.iter().zip(k.chunks_exact(heads * dim)) {
                let products = q.iter().zip(&keys[head * dim..]).map(|(a, b)| a * b);
                let exact = products.sum::<f64>() / (dim as f64).sqrt();
                difference += (f64::from(*score) - exact).powi(2);
                norm += exact.powi(2);
            }
        }
        Ok((difference / norm).sqrt())
    }
}

impl ScoresCase {
    /// Scores the next part of the buffer.
    fn take_turn(&mut self, round: usize, counts: bool) -> Result<(), BenchError> {
        // Enough calls that a turn takes milliseconds.
        let calls = ((4e5 / self.keys) as usize).clamp(1, self.plans.len());
        for call in 0..calls {
            let plan = &self.plans[(round * calls + call) % self.plans.len()];
            let (backend, scores) = (&self.filled.backend, &mut self.scores);
            let timed = measure_time(|| backend.key_scores(plan, scores));
            timed.value.map_err(BenchError::failed_step(&self.row.codec))?;
            black_box(&mut self.scores);
            if counts {
                self.cpu.push(timed.cpu_ns / self.keys);
            }
        }
        Ok(())
    }
}
